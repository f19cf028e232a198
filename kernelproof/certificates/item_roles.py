"""Proves the loop of a role over a CTA's items of work, one item after the other.

At the head of that loop, registers hold what they held at the entry, except for the item's number and for **controls**:
numbers, such as a stage or a parity, that depend on how far the role is in its rings alone. The proof enumerates all
controls that items can reach from those of the entry.
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
from kernelproof.certificates.pipelines import ItemKind, Protocol
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

    ``role``: its name. ``group``: the number of its group. ``after``: the block at which the code after the role's
    items begins, None if the kernel ends there. ``states_after``: the states in which the role reaches that block.
    """

    def __init__(
        self, program: Program, contract: Contract, protocol: Protocol, kinds: Kinds, threads: Lanes, role: str,
        group: int, items: int, after: int | None,
    ) -> None:  # fmt: skip
        self.program, self.protocol, self.kinds = program, protocol, kinds
        self.item_kinds = protocol.pipeline.kinds_of(contract)
        self.kind_number = 0  # of the item that is proven
        self.threads, self.role, self.group, self.items, self.after = threads, role, group, items, after
        self.pipeline = protocol.pipeline
        self.invariant: Invariant | None = None  # of an inner loop, where the role has one
        self.variable = program.emitter.variable
        self.states_after: list[RoleState] = []
        self.written = registers_of(program, program.loops[items])[1]
        self.instructions = 0
        self.machines: dict[object, RoleMachine] = {}
        self.entries: list[RoleState] = []  # for each kind of items, the state in which its first one is reached
        self.bases: dict[RoleMachine, RoleState] = {}  # what ``_item_start`` returns, before controls and track are set

    @abstractmethod
    def body(self, at: Controls) -> Iterable[Controls]:
        """Prove an item that begins with these controls, and return all controls to which it may lead."""

    def machine(
        self, tiles: Polynomial, bounds: Bounds, *assumed: Polynomial, notes_loads: bool = False,
        contract: Contract | None = None,
    ) -> RoleMachine:  # fmt: skip
        """A machine for the problems whose items have ``tiles`` k-tiles, kept with the answers of its facts.

        ``bounds``: of the names in ``tiles``. ``assumed``: numbers that are at least 0 in these problems.
        ``notes_loads``: see ``RoleMachine``. ``contract``: None for that of the kind of items.
        """
        stated = contract or self.kind.contract
        key = id(stated), tiles.key, tuple(each.key for each in assumed), notes_loads
        if key not in self.machines:
            self.machines[key] = self._machine(stated, tiles, bounds, assumed, notes_loads)
        return self.machines[key]

    def _machine(
        self, contract: Contract, tiles: Polynomial, bounds: Bounds, assumed: tuple[Polynomial, ...], notes_loads: bool
    ) -> RoleMachine:
        """The new machine that ``machine`` returns."""
        if not tiles.equals(named(TILES)):
            contract = contract.where(TILES, tiles, bounds)
        if assumed:
            contract = replace(contract, facts=contract.facts.extended({}, *assumed))
        return machine_of(self.pipeline)(
            self.program, contract, self.kinds, self.protocol, self.threads, self.role, self.group, tiles, notes_loads
        )

    def _run_until(self, machine: RoleMachine, state: RoleState, *stops: int) -> RoleState | None:
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
            self.states_after.append(after)
            return None
        return after

    def _run_to_item_end(self, machine: RoleMachine, state: RoleState, last: bool, *stops: int) -> RoleState | None:
        """``_run_until`` from a state in an item to the head of the loop over items, or to a block of ``stops``. If the
        item is the CTA's ``last`` one, the loop is also left, whether the kernel decides that at the loop's head or
        before."""
        end = self._run_until(machine, state, self.items, *stops)
        if last and end is not None and end.block == self.items:
            end = self._run_until(machine, end, self.items, *stops)
            if end is not None and end.block != self.items:
                raise NotCertified("a CTA goes on after its last item of work")
        return end

    def _with_value(self, state: RoleState, name: str, value: Polynomial, machine: RoleMachine) -> RoleState:
        """A state, with its track, for the problems in which a name has a value."""
        out = substituted(state, name, value, machine.facts, self.kinds)
        assert isinstance(out, RoleState)
        out.track = out.track.substituted(name, value)
        return out

    # --- items

    def prove(self, entry: RoleState) -> None:
        """Prove all items of the role, of every kind. Raises NotCertified. ``entry``: the state in which it first
        reaches the loop over items."""
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
        self.control_names = sorted(controls)
        self.entries = [self.at_entry(entry, number) for number in range(len(self.item_kinds))]
        todo, seen = [Controls(controls, self.entries[0])], set[object]()
        while todo:
            at = todo.pop()
            if at.key in seen:
                continue
            seen.add(at.key)
            if len(seen) > MOST_CONTROLS:
                raise NotCertified("the numbers at the head of the loop over items never come again")
            for number in range(len(self.item_kinds)):
                self.kind_number = number
                todo += self.body(at)

    def at_entry(self, entry: RoleState, number: int) -> RoleState:
        """The state ``entry`` for the contract of items of kind ``number``, whose names it then uses."""
        self.kind_number = number
        machine = self.machine(named(TILES), {})
        for old, new in self.kind.names.items():
            entry = self._with_value(entry, old, new, machine)
        entry = entry.copied()
        entry.track.held = {}
        return entry

    @property
    def kind(self) -> ItemKind:
        """The kind of the item that is proven."""
        return self.item_kinds[self.kind_number]

    @property
    def entry(self) -> RoleState:
        """The state in which the first item of the kind is reached."""
        return self.entries[self.kind_number]

    def _item_start(self, at: Controls, machine: RoleMachine) -> RoleState:
        """The state at the head of the loop over items, for any item and the problems of a machine."""
        if machine not in self.bases:
            base = self.entry.copied()
            base.slab = SlabContents.nothing(machine.slices.slices.elements if machine.slices.slices else 0)
            for name in self.item_registers:
                base.registers[name] = Word(self.kind.current, 32, machine.facts)
            self.bases[machine] = self._with_value(base, TILES, machine.tiles, machine)
        state = self.bases[machine].copied()
        state.registers |= at.registers
        state.track = at.state.track.copied()
        return state

    def _controls(self, end: RoleState, placeholders: dict[str, Unknown], left: dict[str, Any]) -> dict[str, Any]:
        """The controls after an item that ends in the state ``end``. ``placeholders``: by name of an inner loop's
        control. A register that still holds a placeholder has that control's value, which is in ``left``."""
        out = {}
        for name in self.control_names:
            value = end.registers.get(name)
            value = next((left[inner] for inner, placeholder in placeholders.items() if value is placeholder), value)
            out[name] = known_number(value)
        return out

    def _check_next_item(self, last: bool, state: RoleState | None) -> None:
        """Check the state after an item, None at the CTA's end: its registers hold the next item, if there is one."""
        if state is None:
            if not last:
                raise NotCertified("a CTA ends before its last item of work")
            return
        if last or state.block != self.items:
            raise NotCertified("a CTA goes on after its last item of work")
        following = self.kind.current + self.pipeline.step
        for name in self.item_registers:
            value = state.registers.get(name)
            if not is_number(value) or not poly_of(value).equals(following):
                raise NotCertified("the item after an item is not that of the CTA")

    def _cases(self) -> tuple[tuple[bool, tuple[Polynomial, ...]], ...]:
        """The cases of an item of this kind: whether it is the CTA's last, and polynomials that are then at least 0."""
        return self.kind.last
