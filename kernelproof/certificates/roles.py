"""Proves one role of a pipeline, for every number of items and of k-tiles.

A role has a loop over items, and in it a loop over the item's k-tiles. Each head is reached in states of one form:

- At the head of the loop over k-tiles, t of them have passed. Registers hold what an invariant says of iteration t,
  except for **controls**: numbers, such as a stage or a parity, that depend on the position in the ring alone. There
  are as many positions as transactions in two rounds of the ring. For each position two claims are proven, for any t:
  an iteration leads to t + 1 and the next position, and the last iteration leads to the loop's exit.
- At the head of the loop over items, registers hold what they held at the entry, except for the item's number and for
  controls of this loop. The proof enumerates all controls that items can reach from those of the entry, for every
  number of k-tiles modulo two rounds.

Where wgmma multiplies, the products of a k-tile are in flight while the next one is waited for. Before the first
iteration nothing is in flight. That iteration is therefore **peeled**: it is executed by itself from every position,
both as the only one and as the first of several. After the loop, products in flight are waited for and their stages
handed back. This belongs to the last iteration, up to the block from which on no instruction touches an mbarrier or a
wgmma.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from kernelproof.certificates.cells import UNKNOWN, Kinds, Unknown
from kernelproof.certificates.contract import Bounds, Contract
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.guessing import guess
from kernelproof.certificates.invariants import Invariant, Turns, rebound
from kernelproof.certificates.item_roles import ItemRole
from kernelproof.certificates.loops import REST, TILES, TURN
from kernelproof.certificates.pipelines import Protocol
from kernelproof.certificates.polynomials import Lanes, Polynomial
from kernelproof.certificates.program import Program
from kernelproof.certificates.role_controls import Controls, is_known, known_number, number_key
from kernelproof.certificates.role_loops import (
    after_items,
    block_after_waits,
    exits_of,
    is_asynchronous,
    loops_of,
    registers_of,
    tail_of,
)
from kernelproof.certificates.role_machine import RoleMachine
from kernelproof.certificates.role_state import CONSUMER, MULTIPLIER, PRODUCER, RoleState, Track

# The invariant of registers that no iteration changes.
NOTHING = Invariant(words={}, kinds={}, sums={}, unknown=(), unknown_places=(), written=(), read=())
named = Polynomial.named


# The state after an item, None at the CTA's end; and placeholders, which the inner loop's controls hold from its exit
# on.
End = tuple[RoleState | None, dict[str, Unknown]]


@dataclass
class Inner:
    """What is proven of the loop over k-tiles, once for each key of ``Role.inners``.

    ``first`` and ``last``: the states in which the loop is reached and left. ``names``: its controls. ``controls`` and
    ``after``: by position in the ring, the values of the controls at the loop's head, and after the loop.
    """

    first: RoleState | None = None
    last: RoleState | None = None
    names: list[str] = field(default_factory=list)
    controls: dict[int, dict[str, Any]] = field(default_factory=dict)
    after: dict[int, dict[str, Any]] = field(default_factory=dict)


class Role(ItemRole):
    """Proves a producer, or a role that multiplies.

    ``invariant``: of the loop over k-tiles. If it is None and ``guesses`` allows it, the proof guesses and then stores
    it. ``meeting``: the block at which threads of all roles meet, None if they do not meet again.
    """

    def __init__(
        self, program: Program, contract: Contract, protocol: Protocol, kinds: Kinds, threads: Lanes, role: str,
        group: int, invariant: Invariant | None, guesses: bool, meeting: int | None = None,
    ) -> None:  # fmt: skip
        pipeline = protocol.pipeline
        # Where a CTA has one item, its loop over k-tiles stands for that over items too.
        items, self.head = loops_of(program, role, not pipeline.adds)
        body = program.loops[self.head]
        self.exits = exits_of(program, self.head)
        after = meeting
        if role == CONSUMER and pipeline.parts:
            after = after_items(program, items)
        elif role == CONSUMER and pipeline.adds:
            after = block_after_waits(program, self.exits)
        super().__init__(program, contract, protocol, kinds, threads, role, group, items, after)
        self.invariant, self.guesses = invariant, guesses
        self.peeled = int(role == MULTIPLIER or (role == CONSUMER and any(is_asynchronous(program, x) for x in body)))
        self.in_flight = 0  # k-tiles whose products are in flight at the head, except in iteration 0
        if role == CONSUMER and self.peeled:
            tail, exit_ = tail_of(program, items, self.exits)
            body, self.exits = body | tail, [exit_]
        self.in_loop, self.written_in_loop = registers_of(program, body)
        # The loop is proven for each kind of items and each place of accumulators in tensor memory, since registers
        # depend on these.
        self.inners: dict[tuple[int, int], Inner] = {}
        self.inner = Inner()
        self.checked_heads = set[object]()  # keys of items that are known to reach the loop over k-tiles as they must
        self.checked_kinds = set[int]()  # the kinds of items for which the contract of the inner loop holds
        self.ends: dict[object, list[End]] = {}

    # --- the loop over items

    def prove(self, entry: RoleState) -> None:
        if not self.pipeline.adds:
            super().prove(entry)
            return
        for _ in self._from_head(self.at_entry(entry, 0)):
            raise NotCertified("a CTA goes on after its item of work")

    def body(self, at: Controls) -> Iterator[Controls]:
        groups = len(self.pipeline.groups)
        if self.role == CONSUMER and at.state.track.item % groups != self.group:
            yield from self._skip(at)
            return
        if self.kind.is_empty:
            yield from self._pass_over(at)
            return
        machine = self.machine(named(TILES), {})
        state = self._run_until(machine, self._item_start(at, machine), self.head, self.items)
        if state is None or state.block != self.head:
            raise NotCertified("an item is not computed")
        yield from self._from_head(state, at)

    def _pass_over(self, at: Controls) -> Iterator[Controls]:
        """Prove that the role skips an item without k-tiles."""
        for last, known in self._cases():
            machine = self.machine(Polynomial.of(0), {}, *known)
            machine.skipped = 0
            state = self._run_to_item_end(machine, self._item_start(at, machine), last, self.head)
            self._check_next_item(last, state)
            if state is not None:
                machine.end_item()
                yield Controls(self._controls(state, {}, {}), state)

    def _from_head(self, state: RoleState, at: Controls | None = None) -> Iterator[Controls]:
        """``body`` from the ``state`` in which an item reaches the loop over k-tiles. ``at``: the item's controls; None
        where a CTA has one item."""
        tensor = self.pipeline.tensor
        place = state.track.item % tensor.tiles if tensor and self.role == MULTIPLIER else 0
        self.inner = self.inners.setdefault((0 if self.pipeline.loop else self.kind_number, place), Inner())
        # Items of one kind with the same controls have the same registers here. Stores of D before do not matter: no
        # iteration may touch their memory.
        known = (self.kind_number, place, state.track.position, at.numbers) if at else None
        if known not in self.checked_heads:
            self._check_head(state)
            if self.peeled:
                self._only_iteration(state)
            if known:
                self.checked_heads.add(known)
        for (end, placeholders), position in self._ends(state):
            if end is None:
                continue
            controls = self._controls(end, placeholders, self.inner.after[position])
            end = end.copied()
            end.track.position = position
            yield Controls(controls, end)

    def _skip(self, at: Controls) -> Iterator[Controls]:
        """Prove that a group skips an item of another group, for any number of k-tiles modulo two rounds."""
        for rest in range(self.pipeline.round):
            tiles = named(TURN) * self.pipeline.round + rest
            bounds: Bounds = {(TURN,): (0 if rest else 1, self.pipeline.most // self.pipeline.round)}
            for last, known in self._cases():
                machine = self.machine(tiles, bounds, *known)
                machine.skipped = rest
                state = self._run_to_item_end(machine, self._item_start(at, machine), last, self.head)
                self._check_next_item(last, state)
                if state is not None:
                    machine.end_item()
                    yield Controls(self._controls(state, {}, {}), state)

    # --- the loop over k-tiles

    def _check_head(self, state: RoleState) -> None:
        """Check that an item reaches the first iteration that is not peeled in the state from which the inner loop is
        proven. The first item defines that state, and the loop is proven then."""
        machine = self.machine(named(TILES), {})
        if self.peeled:
            machine = self.machine(named(TILES), {}, named(TILES) - 2)
            state = self._first_iteration(state, machine)
        if self.inner.first is None:
            self.inner.first, self.in_flight = state, len(state.track.held or {})
            self._prove_loop()
        self._check_loop()
        position, first = state.track.position, self._for_kind(self.inner.first, machine)
        self._turns(first, position).check(Polynomial.of(0), state, machine.facts, self.kinds)
        self._check_track(state, self._track(self.inner.first.track, position, Polynomial.of(self.peeled)))

    def _for_kind(self, state: RoleState, machine: RoleMachine) -> RoleState:
        """A state of the inner loop, in which values for items of the kind replace the names of the loop's contract."""
        for old, new in self.kind.loop.items():
            state = self._with_value(state, old, new, machine)
        return state

    def _check_loop(self) -> None:
        """Check that the contract of the inner loop holds for items of the kind. Raises NotCertified."""
        loop, facts, values = self.pipeline.loop, self.kind.contract.facts, self.kind.loop
        if loop is None or self.kind_number in self.checked_kinds:
            return
        assumed = list(loop.facts.assumed)
        for monomial, (low, high) in loop.facts.bounds.items():
            if monomial and facts.bounds.get(monomial) != (low, high):
                value = Polynomial({monomial: 1})
                assumed += [value - low, high - value]
        for each in assumed:
            for old, new in values.items():
                each = each.substituted(old, new)
            if not facts.holds(each):
                raise NotCertified(f"the main loop is proven for items with {each} at least 0 only")
        self.checked_kinds.add(self.kind_number)

    def _loop_machine(self, tiles: Polynomial, bounds: Bounds, notes_loads: bool = False) -> RoleMachine:
        """A machine for iterations of the inner loop."""
        return self.machine(tiles, bounds, notes_loads=notes_loads, contract=self.pipeline.loop)

    def _first_iteration(self, head: RoleState, machine: RoleMachine) -> RoleState:
        """The state after the peeled iteration, where others follow it."""
        if not head.track.idle:
            raise NotCertified("an item begins while a stage is read")
        state = self._run_until(machine, self._with_value(head, TILES, machine.tiles, machine), self.head, *self.exits)
        if state is None or state.block != self.head:
            raise NotCertified("the main loop ends before its last iteration")
        self._check_kept(head, state)
        return state

    def _only_iteration(self, head: RoleState) -> None:
        """Check that the peeled iteration, where it is the only one, leads to where the last of several leads."""
        assert self.inner.last is not None
        machine = self.machine(Polynomial.of(1), {})
        start = self._with_value(head, TILES, Polynomial.of(1), machine)
        state = self._run_until(machine, start, self.head, *self.exits)
        if state is None or state.block == self.head:
            raise NotCertified("the main loop goes on after its last iteration")
        self._check_kept(start, state)
        last = self._for_kind(self._with_value(self.inner.last, TURN, Polynomial.of(0), machine), machine)
        self._check_left(last, state, machine)

    def _check_left(self, last: RoleState, state: RoleState, machine: RoleMachine) -> None:
        """Check that a state after the inner loop is ``last``, from which the proof goes on, at its own position."""
        position = state.track.position
        if state.block != last.block:
            raise NotCertified("the main loop is left for different places")
        last = last.copied()
        last.registers |= self.inner.after[position]
        turns = Turns(NOTHING, last, self._compared_registers(state.block), self.variable)
        turns.check(Polynomial.of(0), state, machine.facts, self.kinds)
        self._check_track(state, replace(last.track, position=position))

    @staticmethod
    def _check_track(state: RoleState, expected: Track) -> None:
        """Check that a role is as far as it must be at the head of the inner loop, or after that loop."""
        if not state.track.alike(expected) or state.track.stores.open:
            raise NotCertified("an iteration of the main loop begins or ends in the middle of a k-tile, or out of turn")

    @staticmethod
    def _check_kept(start: RoleState, state: RoleState) -> None:
        """Check that neither D nor the shared memory that belongs to warps has changed between two states."""
        if state.track.stores.key != start.track.stores.key or not state.stored_the_same(start):
            raise NotCertified("D, or memory of a warp, is written in the main loop")

    def _compared_registers(self, block: int) -> list[str]:
        """The registers that are live in a block and are used or written in the inner loop."""
        return [name for name in self.program.live(block) if name in self.in_loop]

    def _turns(self, first: RoleState, position: int) -> Turns:
        """The states of the inner loop's head at a position. Registers that the loop does not use are unknown."""
        assert self.invariant is not None
        first = first.copied()
        first.registers |= self.inner.controls[position]
        for register in self.program.live(self.head):
            if register not in self.in_loop:
                first.registers[self.variable(register)] = UNKNOWN
        first.track = self._track(first.track, position, Polynomial.of(self.peeled))
        return Turns(self.invariant, first, self._compared_registers(self.head), self.variable)

    def _prove_loop(self) -> None:
        """Prove the inner loop: iterations that are not the last from every position, then the last from each."""
        assert self.inner.first is not None
        round_, start = self.pipeline.round, self.inner.first.track.position
        if self.invariant is None:
            if not self.guesses:
                raise NotCertified("the certificate lacks the invariant of a role")
            proven = self.instructions
            self.invariant = self._guess_invariant()
            self.instructions = proven  # a guess proves nothing
        stated = self.invariant.words.keys() | self.invariant.sums.keys() | set(self.invariant.unknown)
        self.inner.names = [
            self.variable(register) for register in self._compared_registers(self.head)
            if register in self.written_in_loop and register not in stated
            and is_known(self.inner.first.registers.get(self.variable(register)))
        ]  # fmt: skip
        self.inner.controls[start] = {name: known_number(self.inner.first.registers[name]) for name in self.inner.names}
        for position in (*range(start, round_), *range(start)):
            self._iteration(position)
        if {n: number_key(v) for n, v in self.inner.controls[start].items()} != {
            n: number_key(self.inner.first.registers[n]) for n in self.inner.names
        }:
            raise NotCertified("the numbers of the ring are not the same after two rounds")
        for position in range(round_):
            self._last_iteration(position)

    def _guess_invariant(self) -> Invariant:
        """The invariant that two rounds of the ring suggest: their steps, divided by their number of iterations."""
        assert self.inner.first is not None
        round_ = self.pipeline.round
        tiles = named(REST) + (round_ + 1 + self.peeled)
        machine = self._loop_machine(tiles, {(REST,): (1, self.pipeline.most)})
        first = state = self._with_value(self.inner.first, TILES, tiles, machine)
        for _ in range(round_):
            after = self._run_until(machine, state, self.head, *self.exits)
            if after is None or after.block != self.head:
                raise NotCertified("the main loop ends before its last iteration")
            state = after
        whole_round = guess(first, state, self._compared_registers(self.head), self.variable, self.kinds)
        steps = [*whole_round.kinds.values(), *(step for word in whole_round.words.values() for step in word.values())]
        if any(step % round_ for step in steps):
            raise NotCertified("two rounds of the ring do not consist of iterations that are alike")
        return whole_round.model_copy(
            update={
                "words": {
                    name: {x: step // round_ for x, step in word.items()} for name, word in whole_round.words.items()
                },
                "kinds": {text: step // round_ for text, step in whole_round.kinds.items()},
            }
        )

    def _state(self, position: int, tiles: Polynomial, machine: RoleMachine) -> RoleState:
        """The state at the inner loop's head in iteration TURN, at a position."""
        assert self.inner.first is not None
        turns = self._turns(self._with_value(self.inner.first, TILES, tiles, machine), position)
        state = turns.at(named(TURN) - self.peeled, machine.facts, self.kinds)
        assert isinstance(state, RoleState)
        state.track = self._track(state.track, position, named(TURN))
        return state

    def _track(self, track: Track, position: int, turn: Polynomial) -> Track:
        """The track at the inner loop's head in an iteration."""
        out = track.at(position, turn, self.pipeline.stages, self.in_flight)
        if self.role == MULTIPLIER and self.pipeline.tensor:
            out.tensor = out.tensor.summed(turn * self.pipeline.tensor.depth)
        return out

    def _iteration(self, position: int) -> None:
        """Prove any iteration that is not the last one, at a position."""
        assert self.inner.first is not None
        tiles, most = named(TURN) + named(REST) + 1, self.pipeline.most
        machine = self._loop_machine(tiles, {(TURN,): (self.peeled, most), (REST,): (1, most)}, notes_loads=True)
        start = self._state(position, tiles, machine)
        state = self._run_until(machine, start, self.head, *self.exits)
        if state is None or state.block != self.head:
            raise NotCertified("the main loop ends before its last iteration")
        self._check_kept(start, state)
        following = (position + 1) % self.pipeline.round
        self._check_track(state, self._track(start.track, following, named(TURN) + 1))
        self.inner.controls[following] = {name: known_number(state.registers.get(name)) for name in self.inner.names}
        turns = self._turns(self._with_value(self.inner.first, TILES, tiles, machine), following)
        turns.check(named(TURN) + 1 - self.peeled, state, machine.facts, self.kinds)

    def _last_iteration(self, position: int) -> None:
        """Prove the last iteration, to the loop's exit, at a position."""
        tiles = named(TURN) + 1
        machine = self._loop_machine(tiles, {(TURN,): (self.peeled, self.pipeline.most)}, notes_loads=True)
        start = self._state(position, tiles, machine)
        state = self._run_until(machine, start, self.head, *self.exits)
        if state is None or state.block == self.head:
            raise NotCertified("the main loop goes on after its last iteration")
        self._check_kept(start, state)
        following = (position + 1) % self.pipeline.round
        self.inner.after[following] = {name: known_number(state.registers.get(name)) for name in self.inner.names}
        if self.inner.last is None:
            # The blocks after a peeled loop belong to its last iteration, and the group may hand on its turn in them.
            track = state.track if self.peeled else start.track
            passed = replace(start.track, handed=track.handed, sums=track.sums)
            in_flight, self.in_flight = self.in_flight, 0
            self._check_track(state, self._track(passed, following, tiles))
            self.in_flight = in_flight
            self.inner.last = state
            return
        self._check_left(self.inner.last, state, machine)

    def _ends(self, head: RoleState) -> Iterator[tuple[End, int]]:
        """Run from the inner loop's exit to the end of the item, for every position. ``head``: the state in which the
        item has reached the loop. Yields the ends that are reached, each with its position."""
        assert self.inner.last is not None
        others = [self.variable(x) for x in self.program.live(self.inner.last.block) if x not in self.in_loop]
        known = tuple((x, number_key(head.registers[x])) for x in others if is_known(head.registers.get(x)))
        # Placeholders stand for controls, so positions share their ends. The producer of a cluster is an exception: it
        # waits for stages once more at its end.
        drains = self.role == PRODUCER and self.pipeline.drains
        for position in range(self.pipeline.round):
            at = position if drains else None
            key = self.kind_number, known, head.track.stores.key, head.track.item, at
            if key not in self.ends:
                self.ends[key] = list(self._ends_at(head, others, at))
            for end in self.ends[key]:
                yield end, position

    def _ends_at(self, head: RoleState, others: list[str], position: int | None) -> Iterator[End]:
        """The ends of an item that leaves the inner loop at a position in the ring, or at any if that is None."""
        assert self.inner.last is not None
        contracts = self.kind.after_products if self.role == CONSUMER else ()
        for (last, known), contract in product(self._cases(), contracts or (None,)):
            machine = self.machine(named(TILES), {}, *known, contract=contract)
            state = self._for_kind(self._with_value(self.inner.last, TURN, named(TILES) - 1, machine), machine)
            for name in others:
                state.registers[name] = head.registers.get(name)
            placeholders = {name: Unknown() for name in self.inner.names} if position is None else {}
            state.registers |= placeholders or self.inner.after[position or 0]
            bound = rebound(state, lambda poly: poly, machine.facts)
            assert isinstance(bound, RoleState)
            state = bound
            state.track.stores, state.track.item = head.track.stores.copied(), head.track.item
            state.track.position = position or 0
            end = self._run_to_item_end(machine, state, last)
            self._check_next_item(last, end)
            if end is not None:
                machine.end_item()
            yield end, placeholders
