"""Proves one role of a pipeline, for every number of items and of k-tiles.

A role has a loop over items, and in it a loop over the item's k-tiles. Each head is reached in states of one form:

- At the head of the loop over k-tiles, t of them have passed. Registers hold what an invariant says of iteration t,
  except for **controls**: numbers, such as a stage or a parity, that depend on the position in the ring alone. There
  are as many positions as transactions in two rounds of the ring. For each position two claims are proven, for any t:
  an iteration leads to t + 1 and the next position, and the last iteration leads to the loop's exit.
- At the head of the loop over items, registers hold what they held at the entry, except for the item's number and for
  controls of this loop. All controls are enumerated to which items can lead from those of the entry, whatever the
  number of an item's k-tiles is modulo two rounds.

Where wgmma multiplies, the products of a k-tile are in flight while the next one is waited for. Before the first
iteration nothing is in flight. That iteration is therefore **peeled**: it is executed by itself from every position,
both as the only one and as the first of several. After the loop, products in flight are waited for and their stages
handed back. This belongs to the last iteration, up to the block from which on no instruction touches an mbarrier or a
wgmma.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kernelproof.certificates.cells import UNKNOWN, Kinds, Unknown
from kernelproof.certificates.contract import Bounds, Contract
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.guessing import guess
from kernelproof.certificates.invariants import (
    Invariant,
    Turns,
    is_number,
    poly_of,
    rebound,
    substituted,
)
from kernelproof.certificates.loops import REST, TILES, TURN
from kernelproof.certificates.pipelines import Protocol
from kernelproof.certificates.polynomials import Lanes, Polynomial
from kernelproof.certificates.program import Program
from kernelproof.certificates.role_controls import Controls, is_known, known_number, number_key
from kernelproof.certificates.role_loops import (
    after_items,
    behind_waits,
    exits_of,
    is_asynchronous,
    loops_of,
    registers_of,
    tail_of,
)
from kernelproof.certificates.role_machine import RoleMachine
from kernelproof.certificates.role_state import CONSUMER, PRODUCER, RoleState, Split, Track
from kernelproof.certificates.slices import SlabContents
from kernelproof.certificates.warpgroup_machine import WarpgroupMachine
from kernelproof.certificates.words import Word

MOST_CONTROLS = 4096  # limit on the states at the head of the loop over items; rings need far fewer
# The invariant of registers that no iteration changes.
NOTHING = Invariant(words={}, kinds={}, sums={}, unknown=(), unknown_places=(), written=(), read=())
named = Polynomial.named


# The state after an item, None at the CTA's end; and placeholders, which the inner loop's controls hold from its exit
# on.
End = tuple[RoleState | None, dict[str, Unknown]]


class Role:
    """Proves one role, from the state in which it reaches the loop over items.

    ``group``: the number of a group of consumers, None for the producer. ``invariant``: of the loop over k-tiles. If it
    is None, it is guessed (where ``guesses`` allows that), and is here once the role is proven.
    """

    def __init__(
        self, program: Program, contract: Contract, protocol: Protocol, kinds: Kinds, threads: Lanes, group: int | None,
        invariant: Invariant | None, guesses: bool,
    ) -> None:  # fmt: skip
        self.program, self.contract, self.protocol, self.kinds = program, contract, protocol, kinds
        self.threads, self.group = threads, group
        self.pipeline = protocol.pipeline
        self.invariant, self.guesses = invariant, guesses
        self.variable = program.emitter.variable
        # Where a CTA has one item, its loop over k-tiles stands for that over items too.
        self.items, self.head = loops_of(program, PRODUCER if group is None else CONSUMER, not self.pipeline.adds)
        body = program.loops[self.head]
        self.exits = exits_of(program, self.head)
        # Where a group goes on to add partial sums, None if it does not, and the states in which it gets there.
        self.after: int | None = None
        if group is not None and self.pipeline.parts:
            self.after = after_items(program, self.items)
        elif group is not None and self.pipeline.adds:
            self.after = behind_waits(program, self.exits)
        self.adding: list[RoleState] = []
        self.peeled = int(group is not None and any(is_asynchronous(program, block) for block in body))
        self.behind = 0  # k-tiles whose products are in flight at the head, except in iteration 0
        if self.peeled:
            tail, end = tail_of(program, self.items, self.exits)
            body, self.exits = body | tail, [end]
        self.in_loop, self.written_in_loop = registers_of(program, body)
        self.written = registers_of(program, program.loops[self.items])[1]
        self.instructions = 0
        self.machines: dict[object, RoleMachine] = {}
        self.bases: dict[RoleMachine, RoleState] = {}
        self.controls: dict[int, dict[str, Any]] = {}  # of the loop over k-tiles, by position
        self.left: dict[int, dict[str, Any]] = {}  # the same controls after that loop
        self.first: RoleState | None = None  # the state in which that loop is reached
        self.last: RoleState | None = None  # the state in which it is left
        self.ends: dict[object, list[End]] = {}

    def machine(self, tiles: Polynomial, bounds: Bounds, *assumed: Polynomial, keeps: bool = False) -> RoleMachine:
        """A machine for the problems whose items have ``tiles`` k-tiles, kept with the answers of its facts."""
        key = tiles.key, tuple(each.key for each in assumed), keeps
        if key not in self.machines:
            self.machines[key] = self._machine(tiles, bounds, assumed, keeps)
        return self.machines[key]

    def _machine(self, tiles: Polynomial, bounds: Bounds, assumed: tuple[Polynomial, ...], keeps: bool) -> RoleMachine:
        same = tiles.equals(named(TILES))
        contract = self.contract if same else self.contract.where(TILES, tiles, bounds)
        if assumed:
            contract = replace(contract, facts=contract.facts.also({}, *assumed))
        role = PRODUCER if self.group is None else CONSUMER
        return WarpgroupMachine(
            self.program, contract, self.kinds, self.protocol, self.threads, role, self.group or 0, tiles, keeps
        )

    def _ran(self, machine: RoleMachine, state: RoleState, *stops: int) -> RoleState | None:
        """The state in which one of the blocks ``stops`` is reached; None where the role ends. A group that adds
        partial sums ends its role where it begins to."""
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

    # --- the loop over items

    def prove(self, entry: RoleState) -> None:
        """Prove all items of the role. ``entry``: the state in which it first reaches the loop over items."""
        machine = self.machine(named(TILES), {})
        for old, new in self.pipeline.names.items():
            entry = self._put(entry, old, new, machine)
        entry.track.held = {}
        if self.pipeline.adds:
            for _ in self._from_head(entry):
                raise NotCertified("a CTA goes on after its item of work")
            return
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
            todo += self._body(at)

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

    def _body(self, at: Controls) -> Iterator[Controls]:
        """Prove an item that begins with these controls, and yield all controls to which it may lead."""
        groups = len(self.pipeline.groups)
        if self.group is not None and at.state.track.item % groups != self.group:
            yield from self._skip(at)
            return
        machine = self.machine(named(TILES), {})
        state = self._ran(machine, self._at_item(at, machine), self.head, self.items)
        if state is None or state.block != self.head:
            raise NotCertified("an item is not computed")
        yield from self._from_head(state)

    def _from_head(self, state: RoleState) -> Iterator[Controls]:
        """The same, from the state in which an item reaches the loop over k-tiles."""
        self._check_head(state)
        if self.peeled:
            self._only_turn(state)
        for (end, covers), position in self._ends(state):
            if end is None:
                continue
            controls = self._controls(end, covers, self.left[position])
            end = end.copied()
            end.track.position = position
            yield Controls(controls, end)

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

    def _skip(self, at: Controls) -> Iterator[Controls]:
        """Prove that a group skips an item of another group, for any number of k-tiles modulo two rounds."""
        for rest in range(self.pipeline.round):
            tiles = named(TURN) * self.pipeline.round + rest
            bounds: Bounds = {(TURN,): (0 if rest else 1, self.pipeline.most // self.pipeline.round)}
            for last, known in self._variants():
                machine = self.machine(tiles, bounds, known)
                machine.skipped = rest
                state = self._ran(machine, self._at_item(at, machine), self.items, self.head)
                self._next_item(last, state)
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
            state = self._first_turn(state, machine)
        if self.first is None:
            self.first, self.behind = state, len(state.track.held or {})
            self._prove_loop()
        position = state.track.position
        self._turns(self.first, position).check(Polynomial.of(0), state, machine.facts, self.kinds)
        self._check_track(state, self._track(self.first.track, position, Polynomial.of(self.peeled)))

    def _first_turn(self, head: RoleState, machine: RoleMachine) -> RoleState:
        """The state after the peeled iteration, where others follow it."""
        if not head.track.idle:
            raise NotCertified("an item begins while a stage is read")
        state = self._ran(machine, self._put(head, TILES, machine.tiles, machine), self.head, *self.exits)
        if state is None or state.block != self.head:
            raise NotCertified("the main loop ends before its last turn")
        self._check_kept(head, state)
        return state

    def _only_turn(self, head: RoleState) -> None:
        """Check that the peeled iteration, where it is the only one, leads to where the last of several leads."""
        assert self.last is not None
        machine = self.machine(Polynomial.of(1), {})
        start = self._put(head, TILES, Polynomial.of(1), machine)
        state = self._ran(machine, start, self.head, *self.exits)
        if state is None or state.block == self.head:
            raise NotCertified("the main loop goes on after its last turn")
        self._check_kept(start, state)
        self._check_left(self._put(self.last, TURN, Polynomial.of(0), machine), state, machine)

    def _check_left(self, last: RoleState, state: RoleState, machine: RoleMachine) -> None:
        """Check that a state after the inner loop is ``last``, from which the proof goes on, at its own position."""
        position = state.track.position
        if state.block != last.block:
            raise NotCertified("the main loop is left for different places")
        last = last.copied()
        last.registers |= self.left[position]
        turns = Turns(NOTHING, last, self._looked_at(state.block), self.variable)
        turns.check(Polynomial.of(0), state, machine.facts, self.kinds)
        self._check_track(state, replace(last.track, position=position))

    @staticmethod
    def _check_track(state: RoleState, expected: Track) -> None:
        """Check that a role is as far as it must be at the head of the inner loop, or after that loop."""
        if not state.track.alike(expected) or state.track.stores.open:
            raise NotCertified("a turn of the main loop begins or ends in the middle of a k-tile, or out of turn")

    @staticmethod
    def _check_kept(start: RoleState, state: RoleState) -> None:
        """Check that neither D nor the shared memory that belongs to warps has changed between two states."""
        if state.track.stores.key != start.track.stores.key or not state.left_as(start):
            raise NotCertified("D, or memory of a warp, is written in the main loop")

    def _looked_at(self, block: int) -> list[str]:
        """The registers that are live in a block and are used or written in the inner loop."""
        return [name for name in self.program.live(block) if name in self.in_loop]

    def _turns(self, first: RoleState, position: int) -> Turns:
        """The states of the inner loop's head at a position. Registers that the loop does not use are unknown."""
        assert self.invariant is not None
        first = first.copied()
        first.registers |= self.controls[position]
        for register in self.program.live(self.head):
            if register not in self.in_loop:
                first.registers[self.variable(register)] = UNKNOWN
        first.track = self._track(first.track, position, Polynomial.of(self.peeled))
        return Turns(self.invariant, first, self._looked_at(self.head), self.variable)

    def _prove_loop(self) -> None:
        """Prove the inner loop: iterations that are not the last from every position, then the last from each."""
        assert self.first is not None
        round_, start = self.pipeline.round, self.first.track.position
        if self.invariant is None:
            if not self.guesses:
                raise NotCertified("the certificate lacks the invariant of a role")
            proven = self.instructions
            self.invariant = self._guessed()
            self.instructions = proven  # a guess proves nothing
        stated = self.invariant.words.keys() | self.invariant.sums.keys() | set(self.invariant.unknown)
        self.loop_controls = [
            self.variable(register) for register in self._looked_at(self.head)
            if register in self.written_in_loop and register not in stated
            and is_known(self.first.registers.get(self.variable(register)))
        ]  # fmt: skip
        self.controls[start] = {name: known_number(self.first.registers[name]) for name in self.loop_controls}
        for position in (*range(start, round_), *range(start)):
            self._turn(position)
        if {n: number_key(v) for n, v in self.controls[start].items()} != {
            n: number_key(self.first.registers[n]) for n in self.loop_controls
        }:
            raise NotCertified("the numbers of the ring are not the same after two rounds")
        for position in range(round_):
            self._last_turn(position)

    def _guessed(self) -> Invariant:
        """The invariant that two rounds of the ring suggest: their steps, divided by their number of iterations."""
        assert self.first is not None
        round_ = self.pipeline.round
        tiles = named(REST) + (round_ + 1 + self.peeled)
        machine = self.machine(tiles, {(REST,): (1, self.pipeline.most)})
        first = state = self._put(self.first, TILES, tiles, machine)
        for _ in range(round_):
            after = self._ran(machine, state, self.head, *self.exits)
            if after is None or after.block != self.head:
                raise NotCertified("the main loop ends before its last turn")
            state = after
        both = guess(first, state, self._looked_at(self.head), self.variable, self.kinds)
        steps = [*both.kinds.values(), *(step for word in both.words.values() for step in word.values())]
        if any(step % round_ for step in steps):
            raise NotCertified("two rounds of the ring do not consist of turns that are alike")
        return both.model_copy(
            update={
                "words": {name: {x: step // round_ for x, step in word.items()} for name, word in both.words.items()},
                "kinds": {text: step // round_ for text, step in both.kinds.items()},
            }
        )

    def _state(self, position: int, tiles: Polynomial, machine: RoleMachine) -> RoleState:
        """The state at the inner loop's head in iteration TURN, at a position."""
        assert self.first is not None
        turns = self._turns(self._put(self.first, TILES, tiles, machine), position)
        state = turns.at(named(TURN) - self.peeled, machine.facts, self.kinds)
        assert isinstance(state, RoleState)
        state.track = self._track(state.track, position, named(TURN))
        return state

    def _track(self, track: Track, position: int, turn: Polynomial) -> Track:
        """The track at the inner loop's head in an iteration."""
        return track.at(position, turn, self.pipeline.stages, self.behind)

    def _turn(self, position: int) -> None:
        """Prove any iteration that is not the last one, at a position."""
        assert self.first is not None
        tiles, most = named(TURN) + named(REST) + 1, self.pipeline.most
        machine = self.machine(tiles, {(TURN,): (self.peeled, most), (REST,): (1, most)}, keeps=True)
        start = self._state(position, tiles, machine)
        state = self._ran(machine, start, self.head, *self.exits)
        if state is None or state.block != self.head:
            raise NotCertified("the main loop ends before its last turn")
        self._check_kept(start, state)
        following = (position + 1) % self.pipeline.round
        self._check_track(state, self._track(start.track, following, named(TURN) + 1))
        self.controls[following] = {name: known_number(state.registers.get(name)) for name in self.loop_controls}
        turns = self._turns(self._put(self.first, TILES, tiles, machine), following)
        turns.check(named(TURN) + 1 - self.peeled, state, machine.facts, self.kinds)

    def _last_turn(self, position: int) -> None:
        """Prove the last iteration, to the loop's exit, at a position."""
        tiles = named(TURN) + 1
        machine = self.machine(tiles, {(TURN,): (self.peeled, self.pipeline.most)}, keeps=True)
        start = self._state(position, tiles, machine)
        state = self._ran(machine, start, self.head, *self.exits)
        if state is None or state.block == self.head:
            raise NotCertified("the main loop goes on after its last turn")
        self._check_kept(start, state)
        following = (position + 1) % self.pipeline.round
        self.left[following] = {name: known_number(state.registers.get(name)) for name in self.loop_controls}
        if self.last is None:
            # The blocks after a peeled loop belong to its last iteration, and the group may hand on its turn in them.
            track = state.track if self.peeled else start.track
            passed = replace(start.track, handed=track.handed, sums=track.sums)
            self._check_track(state, passed.at(following, tiles, self.pipeline.stages, 0))
            self.last = state
            return
        self._check_left(self.last, state, machine)

    def _ends(self, head: RoleState) -> Iterator[tuple[End, int]]:
        """Run from the inner loop's exit to the end of the item, for every position. ``head``: the state in which the
        item has reached the loop. Yields the ends that are reached, each with its position."""
        assert self.last is not None
        others = [self.variable(x) for x in self.program.live(self.last.block) if x not in self.in_loop]
        known = tuple((x, number_key(head.registers[x])) for x in others if is_known(head.registers.get(x)))
        # Placeholders stand for controls, so positions share their ends. The producer of a cluster is an exception: it
        # waits for stages once more at its end.
        drains = self.group is None and self.pipeline.drains
        for position in range(self.pipeline.round):
            at = position if drains else None
            key = known, head.track.stores.key, head.track.item, at
            if key not in self.ends:
                self.ends[key] = list(self._ended(head, others, at))
            for end in self.ends[key]:
                yield end, position

    def _ended(self, head: RoleState, others: list[str], position: int | None) -> Iterator[End]:
        """The ends of an item that leaves the inner loop at a position in the ring, or at any if that is None."""
        assert self.last is not None
        for last, known in self._variants():
            machine = self.machine(named(TILES), {}, known)
            state = self._put(self.last, TURN, named(TILES) - 1, machine)
            for name in others:
                state.registers[name] = head.registers.get(name)
            covers = {name: Unknown() for name in self.loop_controls} if position is None else {}
            state.registers |= covers or self.left[position or 0]
            bound = rebound(state, lambda poly: poly, machine.facts)
            assert isinstance(bound, RoleState)
            state = bound
            state.track.stores, state.track.item = head.track.stores.copied(), head.track.item
            state.track.position = position or 0
            end = self._ran(machine, state, self.items)
            self._next_item(last, end)
            if end is not None:
                machine.end_item()
            yield end, covers
