"""Persistent CTAs: proves the loop around a kernel in which a CTA computes one item of work after the other.

An item is a number in registers, which grows by a step from one iteration to the next. The body of the loop is proven
for any item: it begins in the state at the loop's entry, with that item in those registers. Where it reaches the loop's
head again, the state must be that of the next item. So all items of a CTA follow by induction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kernelproof.certificates.cells import Kinds
from kernelproof.certificates.contract import Bounds, Contract
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.invariants import Invariant, Turns, is_number, poly_of, substituted
from kernelproof.certificates.machine import Machine, State
from kernelproof.certificates.polynomials import Polynomial
from kernelproof.certificates.program import Program
from kernelproof.certificates.words import Word
from kernelproof.emulator.frontend.instruction import defs_uses


@dataclass(frozen=True)
class Items:
    """What is stated of the loop over items.

    ``entry``: the contract up to the loop, in which the first item is ``first``. ``names``: names of that contract ->
    their values in the contract of the body. ``current``: the body's item. ``step``: the difference to the CTA's next
    item. ``last``: whether the body's item is the CTA's last.
    """

    entry: Contract
    first: Polynomial
    names: dict[str, Polynomial]
    current: Polynomial
    step: Polynomial
    last: bool


class ItemLoop:
    """The loop over items of one kernel. ``inner``: the blocks of the main loop, or those to which it was unrolled."""

    def __init__(self, program: Program, items: Items, inner: Iterable[int], kinds: Kinds) -> None:
        self.program, self.items, self.kinds = program, items, kinds
        around = [head for head, body in program.loops.items() if body.issuperset(inner) and body != set(inner)]
        if len(around) != 1:
            raise NotCertified("no loop over the items of a CTA is around its products")
        (self.head,) = around
        written = {
            name
            for block in program.loops[self.head]
            for ins in program.blocks[block].all()
            for name in defs_uses(ins)[0]
        }
        self.written = [name for name in program.live(self.head) if name in written]

    def start(self, machine: Machine, name: str, value: Polynomial, bounds: Bounds) -> State:
        """The state in which the body begins, for the problems in which a name has a value."""
        entry = Machine(self.program, self.items.entry.where(name, value, bounds), self.kinds)
        state = entry.run(entry.start(), self.head)
        if state is None:
            raise NotCertified("a CTA ends without an item of work")
        variable = self.program.emitter.variable
        changing = []
        for register in self.written:
            held = state.registers.get(variable(register))
            if is_number(held) and poly_of(held).equals(self.items.first):
                changing.append(register)
        for old, new in self.items.names.items():
            state = substituted(state, old, new, machine.facts, self.kinds)
        for register in changing:
            state.registers[variable(register)] = Word(self.items.current, 32, machine.facts)
        # This invariant says that, besides the item, the body changes nothing. ``finish`` checks it.
        nothing = Invariant(words={}, kinds={}, sums={}, unknown=(), unknown_places=(), written=(), read=())
        self.turns = Turns(nothing, state, self.program.live(self.head), variable)
        self.changing = changing
        return state

    def finish(self, machine: Machine, state: State | None, name: str, value: Polynomial) -> None:
        """Check the state in which the body has ended (None at the kernel's end), for the problems in which a name has
        a value."""
        if state is None:
            if not self.items.last:
                raise NotCertified("a CTA ends before its last item of work")
            return
        if self.items.last:
            raise NotCertified("a CTA goes on after its last item of work")
        machine.finish()
        following = substituted(self.turns.first, name, value, machine.facts, self.kinds)
        for register in self.changing:
            item = Word(self.items.current + self.items.step, 32, machine.facts)
            following.registers[self.program.emitter.variable(register)] = item
        Turns(self.turns.invariant, following, self.turns.live, self.turns.variable).check(
            Polynomial.of(0), state, machine.facts, self.kinds
        )
