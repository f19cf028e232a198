"""Proves the loop of a role over a CTA's items of work, one item after the other.

At the head of that loop, registers hold what they held at the entry, except for the item's number and for **controls**:
numbers, such as a stage or a parity, that depend on how far the role is in its rings alone. All controls are enumerated
to which items can lead from those of the entry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kernelproof.certificates.cells import UNKNOWN, Kinds, Unknown
from kernelproof.certificates.contract import Bounds, Contract
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.invariants import Invariant, is_number, poly_of, substituted
from kernelproof.certificates.loops import TILES
from kernelproof.certificates.pipelines import Protocol
from kernelproof.certificates.polynomials import Lanes, Polynomial
from kernelproof.certificates.program import Program
from kernelproof.certificates.role_controls import Controls, is_known, known_number
from kernelproof.certificates.role_loops import registers_of
from kernelproof.certificates.role_machine import RoleMachine
from kernelproof.certificates.role_state import RoleState, Split
from kernelproof.certificates.slices import SlabContents
from kernelproof.certificates.tensor_machine import machine_of
from kernelproof.certificates.words import Word

MOST_CONTROLS = 4096  # limit on the states at the head of the loop over items; rings need far fewer
named = Polynomial.named


class ItemRole(ABC):
    """Proves one role, from the state in which it reaches the loop over items, whose head is ``items``.

    ``what``: the role's name. ``group``: the number of its group. ``after``: the block at which it is left for what
    follows its items, None for the kernel's end; ``adding``: the states in which it gets there.
    """

    def __init__(
        self, program: Program, contract: Contract, protocol: Protocol, kinds: Kinds, threads: Lanes, what: str,
        group: int, items: int, after: int | None,
    ) -> None:  # fmt: skip
        self.program, self.contract, self.protocol, self.kinds = program, contract, protocol, kinds
        self.threads, self.what, self.group, self.items, self.after = threads, what, group, items, after
        self.pipeline = protocol.pipeline
        self.invariant: Invariant | None = None  # of an inner loop, where the role has one
        self.variable = program.emitter.variable
        self.adding: list[RoleState] = []
        self.written = registers_of(program, program.loops[items])[1]
        self.instructions = 0
        self.machines: dict[object, RoleMachine] = {}
        self.bases: dict[RoleMachine, RoleState] = {}

    @abstractmethod
    def body(self, at: Controls) -> Iterable[Controls]:
        """Prove an item that begins with these controls, and return all controls to which it may lead."""

    def machine(self, tiles: Polynomial, bounds: Bounds, *assumed: Polynomial, keeps: bool = False) -> RoleMachine:
        """A machine for the problems whose items have ``tiles`` k-tiles, kept with the answers of its facts.

        ``bounds``: of the names in ``tiles``. ``assumed``: numbers that are at least 0 in these problems. ``keeps``:
        see ``RoleMachine``.
        """
        key = tiles.key, tuple(each.key for each in assumed), keeps
        if key not in self.machines:
            self.machines[key] = self._machine(tiles, bounds, assumed, keeps)
        return self.machines[key]

    def _machine(self, tiles: Polynomial, bounds: Bounds, assumed: tuple[Polynomial, ...], keeps: bool) -> RoleMachine:
        """The new machine that ``machine`` returns."""
        same = tiles.equals(named(TILES))
        contract = self.contract if same else self.contract.where(TILES, tiles, bounds)
        if assumed:
            contract = replace(contract, facts=contract.facts.also({}, *assumed))
        return machine_of(self.pipeline)(
            self.program, contract, self.kinds, self.protocol, self.threads, self.what, self.group, tiles, keeps
        )

    def _ran(self, machine: RoleMachine, state: RoleState, *stops: int) -> RoleState | None:
        """The state in which one of the blocks ``stops`` is reached; None where the role ends. A role may
        end before that, at the block ``after``."""
        machine.steps = 0
        try:
            after = machine.run(state, *stops, *(() if self.after is None else (self.after,)))
        except Split:
            raise NotCertified("threads of a role go different ways in the middle of its items") from None
        self.instructions += machine.steps
        assert after is None or isinstance(after, RoleState)
        if after is not None and after.block == self.after:
            machine.finish()
            self.adding.append(after)
            return None
        return after

    def _put(self, state: RoleState, name: str, value: Polynomial, machine: RoleMachine) -> RoleState:
        """A state, with its track, for the problems in which a name has a value."""
        out = substituted(state, name, value, machine.facts, self.kinds)
        assert isinstance(out, RoleState)
        out.track = out.track.substituted(name, value)
        return out

    # --- items

    def prove(self, entry: RoleState) -> None:
        """Prove all items of the role. ``entry``: the state in which it first reaches the loop over items."""
        entry = self.at_entry(entry)
        first = self.pipeline.first
        self.item_registers: list[str] = []
        controls: dict[str, Any] = {}
        for register in self.program.live(self.items):
            name = self.variable(register)
            value = entry.registers.get(name)
            if register not in self.written:
                continue
            if is_number(value) and poly_of(value).equals(first):
                self.item_registers.append(name)
            elif is_known(value):
                controls[name] = known_number(value)
            else:
                entry.registers[name] = UNKNOWN
        self.entry, self.control_names = entry, sorted(controls)
        todo, seen = [Controls(controls, entry)], set[object]()
        while todo:
            at = todo.pop()
            if at.key in seen:
                continue
            seen.add(at.key)
            if len(seen) > MOST_CONTROLS:
                raise NotCertified("the numbers at the head of the loop over items never come again")
            todo += self.body(at)

    def at_entry(self, entry: RoleState) -> RoleState:
        """The state at the entry, for the contract of an item."""
        machine = self.machine(named(TILES), {})
        for old, new in self.pipeline.names.items():
            entry = self._put(entry, old, new, machine)
        entry.track.held = {}
        return entry

    def _at_item(self, at: Controls, machine: RoleMachine) -> RoleState:
        """The state at the head of the loop over items, for any item and the problems of a machine."""
        if machine not in self.bases:
            base = self.entry.copied()
            base.left = SlabContents.nothing(machine.slices.slices.elements if machine.slices.slices else 0)
            for name in self.item_registers:
                base.registers[name] = Word(self.pipeline.current, 32, machine.facts)
            self.bases[machine] = self._put(base, TILES, machine.tiles, machine)
        state = self.bases[machine].copied()
        state.registers |= at.registers
        state.track = at.state.track.copied()
        return state

    def _controls(self, end: RoleState, covers: dict[str, Unknown], left: dict[str, Any]) -> dict[str, Any]:
        """The controls after an item that ends in the state ``end``. ``covers``: placeholders for the inner loop's
        controls. A register that still holds a placeholder has that control's value, which is in ``left``."""
        out = {}
        for name in self.control_names:
            value = end.registers.get(name)
            value = next((left[inner] for inner, cover in covers.items() if value is cover), value)
            out[name] = known_number(value)
        return out

    def _next_item(self, last: bool, state: RoleState | None) -> None:
        """Check the state after an item, None at the CTA's end: its registers hold the next item, if there is one."""
        if state is None:
            if not last:
                raise NotCertified("a CTA ends before its last item of work")
            return
        if last or state.block != self.items:
            raise NotCertified("a CTA goes on after its last item of work")
        following = self.pipeline.current + self.pipeline.step
        for name in self.item_registers:
            value = state.registers.get(name)
            if not is_number(value) or not poly_of(value).equals(following):
                raise NotCertified("the item after an item is not that of the CTA")

    def _variants(self) -> tuple[tuple[bool, Polynomial], ...]:
        """Whether an item is the CTA's last: both cases, each with a polynomial that is at least 0 in it."""
        variants = (False, self.pipeline.left), (True, -self.pipeline.left - 1)
        return variants[1:] if self.pipeline.adds else variants
