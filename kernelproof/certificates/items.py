"""Persistent CTAs: proves the outer loop of a kernel in which a CTA computes one item of work after the other.

An item, such as a tile of D, has a number in registers, which grows by a step from one iteration of the outer loop to
the next. The body of the loop is proven for any item, by induction. It begins in the state at the loop's entry, with
the item's number in those registers. Where it reaches the loop's head again, the state must be the same, with the next
item's number. ``loops`` proves the body, which contains the main loop over k, and calls ``ItemLoop`` where it begins
and ends.
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
    """What is stated of the loop over items, whose numbers are polynomials.

    ``entry``: the contract up to the loop. ``first``: the number of the CTA's first item, in names of that contract.
    ``names``: names of that contract -> their values in names of the body's contract. ``current``: the number of the
    body's item. ``step``: the difference from it to the CTA's next item. ``last``: whether it is the CTA's last item.
    """

    entry: Contract
    first: Polynomial
    names: dict[str, Polynomial]
    current: Polynomial
    step: Polynomial
    last: bool


class ItemLoop:
    """The loop over items of one kernel. ``inner``: the blocks of the main loop, or those to which it was unrolled.
    ``head``: the block at which the loop begins. ``written``: the live registers that it writes. Raises NotCertified
    unless exactly one loop contains the blocks of ``inner`` and others."""

    def __init__(self, program: Program, items: Items, inner: Iterable[int], kinds: Kinds) -> None:
        self.program, self.items, self.kinds = program, items, kinds
        outer = [head for head, body in program.loops.items() if body.issuperset(inner) and body != set(inner)]
        if len(outer) != 1:
            raise NotCertified("no loop over the items of a CTA contains its products")
        (self.head,) = outer
        written = {
            name
            for block in program.loops[self.head]
            for ins in program.blocks[block].all()
            for name in defs_uses(ins)[0]
        }
        self.written = [name for name in program.live(self.head) if name in written]

    def start(self, machine: Machine, name: str, value: Polynomial, bounds: Bounds) -> State:
        """The state in which the body begins, for the problems in which the name (the number of k-tiles) has a value.
        ``machine``: that of these problems. ``bounds``: of the names in the value. Also keeps what ``finish`` checks.
        Raises NotCertified if the kernel ends before the loop."""
        entry = Machine(self.program, self.items.entry.where(name, value, bounds), self.kinds)
        state = entry.run(entry.start(), self.head)
        if state is None:
            raise NotCertified("a CTA ends without an item of work")
        variable = self.program.emitter.variable
        changing = []  # the registers that hold the item's number
        for register in self.written:
            held = state.registers.get(variable(register))
            if is_number(held) and poly_of(held).equals(self.items.first):
                changing.append(register)
        for old, new in self.items.names.items():
            state = substituted(state, old, new, machine.facts, self.kinds)
        for register in changing:
            state.registers[variable(register)] = Word(self.items.current, 32, machine.facts)
        # This invariant says that the body changes nothing but the item's number. ``finish`` checks that.
        nothing = Invariant(words={}, kinds={}, sums={}, unknown=(), unknown_places=(), written=(), read=())
        self.turns = Turns(nothing, state, self.program.live(self.head), variable)
        self.changing = changing
        return state

    def finish(self, machine: Machine, state: State | None, name: str, value: Polynomial) -> None:
        """Check the state in which the body has ended: at the loop's head, or at the kernel's end if it is None. The
        problems are those in which the name has a value. Raises NotCertified unless the state is that of the next item,
        or the kernel has ended after the last one."""
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
