"""All numbers of k-tiles: few of them one by one, the others by an invariant of the main loop.

The loop is periodic: it takes ``period`` turns until its ring is at the same stage again, and in the last turns it does
something else (it copies nothing more), at most ``ahead`` turns before the end. With T k-tiles the cases are

    T = 1, ..., ahead                       each executed from entry to exit
    T = period * q + ahead + 1 + r, q >= 0  for each r below the period: from the state of the loop's head after
                                            period * q turns to the exit

and that state is right: for q = 0 it is what the entry leads to if T > ahead; and if it is right for q and
T > period * q + ahead + period, then ``period`` turns lead to the one for q + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kernelproof.certificates.cells import Kinds
from kernelproof.certificates.contract import Bounds, Contract
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.guessing import guess
from kernelproof.certificates.invariants import Invariant, Turns, rebound, substituted
from kernelproof.certificates.items import ItemLoop, Items
from kernelproof.certificates.machine import Machine, State
from kernelproof.certificates.polynomials import Polynomial
from kernelproof.certificates.program import Program
from kernelproof.ground.schema import Schema

TILES, TURN, REST = "k_tiles", "k_turn", "k_rest"


@dataclass(frozen=True)
class Ring:
    """What is stated of a main loop: see the module. ``most``: the most k-tiles. ``only``: the number of k-tiles, if
    there is but one, else 0. ``items``: of the loop around it, if CTAs are persistent."""

    period: int
    ahead: int
    most: int
    only: int = 0
    items: Items | None = None


class Case(Schema):
    """A case of the proof that holds: what it covers, and how many instructions it took."""

    covers: str
    instructions: int


class MainLoop:
    """Proves a kernel for every number of k-tiles, under a contract in which their number is the name ``TILES``.

    ``invariant``: what is stated of the loop; if it is None and may be guessed, it is here when the cases are proven.
    """

    def __init__(
        self, program: Program, contract: Contract, ring: Ring, invariant: Invariant | None = None, guesses: bool = True
    ) -> None:
        self.program, self.contract, self.ring = program, contract, ring
        self.invariant, self.guesses = invariant, guesses
        self.kinds = Kinds()
        heads = [head for head, body in program.loops.items() if any(map(program.multiplies, body))]
        inner = [head for head in heads if not any(h != head and h in program.loops[head] for h in heads)]
        if len(inner) > 1:
            raise NotCertified("several loops multiply")
        self.head = inner[0] if inner else None
        self.items: ItemLoop | None = None
        if ring.items is not None:
            products = [block.index for block in program.blocks if program.multiplies(block.index)]
            # Unrolled products have no loop of their own: the one around them is that over items.
            own = program.loops[self.head] if self.head is not None else set(products)
            if self.head is not None and not any(own < body for body in program.loops.values()):
                own, self.head = set(products), None
            self.items = ItemLoop(program, ring.items, own, self.kinds)
        self.stops = () if self.head is None else (self.head,)

    def cases(self) -> Iterator[Case]:
        """Every case, proven. Raises NotCertified at the first that is not."""
        ring = self.ring
        if ring.only and (self.head is None or ring.only <= ring.ahead + 2 * ring.period):
            yield self._whole(ring.only)
            return
        if self.head is None:
            raise NotCertified("no loop multiplies, and the number of k-tiles is not known")
        for tiles in range(1, 0 if ring.only else min(ring.ahead, ring.most) + 1):
            yield self._whole(tiles)
        machine, first = self._entry()
        if first is None:
            yield Case(covers=f"more than {ring.ahead} k-tiles", instructions=machine.steps)
            return
        live = self.program.live(self.head)
        if self.invariant is None:
            if not self.guesses:
                raise NotCertified("the certificate lacks the invariant of the main loop")
            self.invariant = self._guessed(first, live)
        turns = Turns(self.invariant, first, live, self.program.emitter.variable)
        turns.check(Polynomial.of(0), first, machine.facts, self.kinds)
        yield Case(covers=f"more than {ring.ahead} k-tiles, up to the loop", instructions=machine.steps)
        yield self._step(turns)
        for rest in range(ring.period):
            least = ring.ahead + 1 + rest
            if not ring.only or (ring.only - least) % ring.period == 0:
                yield self._exit(turns, least)

    def _machine(self, tiles: Polynomial, bounds: Bounds) -> Machine:
        """A machine for the problems with so many k-tiles."""
        return Machine(self.program, self.contract.where(TILES, tiles, bounds), self.kinds)

    def _tiles(self, least: int) -> tuple[Polynomial, Bounds]:
        """The number of k-tiles of all problems with at least so many."""
        if self.ring.only:
            return Polynomial.of(self.ring.only), {}
        return Polynomial.named(TILES), {(TILES,): (least, max(least, self.ring.most))}

    def _at_least(self, least: int) -> Machine:
        """A machine for these problems."""
        return self._machine(*self._tiles(least))

    def _whole(self, tiles: int) -> Case:
        machine = self._machine(Polynomial.of(tiles), {})
        self._to_end(machine, self._start(machine, Polynomial.of(tiles), {}), Polynomial.of(tiles))
        return Case(covers=f"{tiles} k-tiles", instructions=machine.steps)

    def _entry(self) -> tuple[Machine, State | None]:
        """The state in which the loop is reached first; None if all CTAs end before."""
        machine = self._at_least(self.ring.ahead + 1)
        state = self._start(machine, *self._tiles(self.ring.ahead + 1))
        return machine, machine.run(state, *self.stops)

    def _start(self, machine: Machine, tiles: Polynomial, bounds: Bounds) -> State:
        """The state in which a CTA, or an item of a persistent one, begins."""
        return machine.start() if self.items is None else self.items.start(machine, TILES, tiles, bounds)

    def _to_end(self, machine: Machine, state: State, tiles: Polynomial) -> None:
        """Run to the end of the CTA or of its item, and check what it has done, in the problems with so many
        k-tiles."""
        if self.items is None:
            machine.run(state)
        else:
            self.items.finish(machine, machine.run(state, self.items.head), TILES, tiles)

    def _period(self, machine: Machine, state: State) -> State:
        """The state after a period of turns."""
        for _ in range(self.ring.period):
            after = machine.run(state, *self.stops)
            if after is None:
                raise NotCertified("the main loop ends before its last turn")
            state = after
        return state

    def _guessed(self, first: State, live: list[str]) -> Invariant:
        machine = self._at_least(self.ring.ahead + 1 + self.ring.period)
        second = self._period(machine, rebound(first, lambda poly: poly, machine.facts))
        return guess(first, second, live, self.program.emitter.variable, self.kinds)

    def _step(self, turns: Turns) -> Case:
        """A period of turns from any state that has enough k-tiles left."""
        ring, turn = self.ring, Polynomial.named(TURN)
        least = ring.ahead + ring.period + 1
        if ring.only:
            tiles = Polynomial.of(ring.only)
            bounds: Bounds = {(TURN,): (0, (ring.only - least) // ring.period)}
        else:
            tiles = turn * ring.period + Polynomial.named(REST) + least
            bounds = {(TURN,): (0, ring.most // ring.period), (REST,): (0, ring.most)}
        machine = self._machine(tiles, bounds)
        state = self._period(machine, self._at(turns, turn, tiles, machine))
        expected = Turns(turns.invariant, turns.first, turns.live, turns.variable)
        expected.first = substituted(turns.first, TILES, tiles, machine.facts, self.kinds)
        expected.check(turn + 1, state, machine.facts, self.kinds)
        return Case(covers=f"a period of {ring.period} turns", instructions=machine.steps)

    def _exit(self, turns: Turns, least: int) -> Case:
        """From a state with so many k-tiles left to the end."""
        ring = self.ring
        if ring.only:
            turn, tiles = Polynomial.of((ring.only - least) // ring.period), Polynomial.of(ring.only)
            machine = self._machine(tiles, {})
        else:
            turn = Polynomial.named(TURN)
            tiles = turn * ring.period + least
            machine = self._machine(tiles, {(TURN,): (0, ring.most // ring.period)})
        self._to_end(machine, self._at(turns, turn, tiles, machine), tiles)
        return Case(covers=f"{ring.period} * q + {least} k-tiles", instructions=machine.steps)

    def _at(self, turns: Turns, turn: Polynomial, tiles: Polynomial, machine: Machine) -> State:
        """The state of a turn in the problems with so many k-tiles."""
        return substituted(turns.at(turn, machine.facts, self.kinds), TILES, tiles, machine.facts, self.kinds)
