"""Proves a kernel for every number of k-tiles: few numbers one by one, all others by an invariant of the main loop.

The main loop multiplies one k-tile after another, from a ring of stages in shared memory. It is periodic: after
``period`` k-tiles its ring is at the same stage again. In its last iterations, at most ``ahead`` k-tiles before the
end, it does something else (it copies nothing more). With T k-tiles the cases are

    T = 1, ..., ahead                       each executed from entry to exit
    T = period * q + ahead + 1 + r, q >= 0  for each r below the period: from the state of the loop's head after
                                            period * q k-tiles to the exit

The state at the loop's head is proven by induction: if T > ahead, the entry leads to the state for q = 0; and if
T > period * q + ahead + period, a period leads from the state for q to the state for q + 1.

For example, a ring of 4 stages has period 4 and ahead 3. T = 1, 2 and 3 are executed. Then one case goes from the entry
to the loop for any T > 3, one shows that 4 k-tiles preserve the invariant, and four lead to the exit for T = 4 * q + 4,
..., 4 * q + 7 with a symbolic q.

If the compiler has unrolled the loop, an iteration takes several k-tiles, and T modulo that number decides in the entry
how many iterations there are. Then the period is a multiple of that number too, and each r has an entry, an induction
and an exit of its own.

``certificate`` calls ``MainLoop`` for each claim about a kernel that is no pipeline. ``machine`` executes the cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from math import lcm

from kernelproof.certificates.cells import Kinds
from kernelproof.certificates.contract import WIDTHS, Bounds, Contract
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.guessing import guess
from kernelproof.certificates.invariants import Invariant, Turns, substituted
from kernelproof.certificates.items import ItemLoop, Items
from kernelproof.certificates.machine import Machine, State
from kernelproof.certificates.polynomials import Polynomial
from kernelproof.certificates.program import Program, place_of
from kernelproof.ground.chips import WARP
from kernelproof.ground.schema import Schema

# Names in polynomials. TILES: the number of k-tiles. TURN: the number q of periods before the one that is executed.
# REST: how many steps of a ``Family`` the number of k-tiles is above the family's least number.
TILES, TURN, REST = "k_tiles", "k_turn", "k_rest"
MULTIPLICATIONS_PER_MMA = 16 * 8 * 16  # multiplications of one mma.sync of a warp (m16n8k16)


@dataclass(frozen=True)
class Ring:
    """What a claim says about a main loop, which is often a ring of stages.

    ``period``, ``ahead``: numbers of k-tiles, see the module; if ``period`` is 0, both are searched for. ``least``,
    ``most``: the fewest and the most k-tiles. ``only``: the number of k-tiles if only one is possible, else 0.
    ``items``: what the claim says about the loop around this one; None if CTAs are not persistent. ``peeled``: how many
    iterations come before iteration 0 of the invariant, because they differ from the others.
    """

    period: int
    ahead: int
    most: int
    only: int = 0
    items: Items | None = None
    least: int = 1
    peeled: int = 0


class Case(Schema):
    """A case of the proof that holds. ``covers``: which problems, in words. ``instructions``: how many were executed
    for it."""

    covers: str
    instructions: int


class Phase(IntEnum):
    """How far a proof has come. A failure in FEW is no fault of the ``Ring``; one in a later phase may be."""

    FEW = 0  # numbers of k-tiles that are executed one by one
    ENTRY = 1  # up to the loop, for more k-tiles than those
    LOOP = 2  # from the loop on


@dataclass(frozen=True)
class Family:
    """Numbers of k-tiles that are proven together: ``least + step * REST`` for every REST from 0 on; if ``only`` is not
    0, that number alone."""

    least: int
    step: int
    only: int

    def tiles(self, steps_above: Polynomial) -> Polynomial:
        """The number of k-tiles that is some steps above the least one."""
        return Polynomial.of(self.only) if self.only else steps_above * self.step + self.least


class MainLoop:
    """Proves a kernel for every number of k-tiles, under a contract in which their number is the name ``TILES``.

    ``invariant``: that of the main loop. If it is None, ``cases`` guesses it and stores it here; this needs ``guesses``
    = True. ``phase``: how far the proof has come. Raises NotCertified for kernels that are not covered.
    """

    def __init__(
        self, program: Program, contract: Contract, ring: Ring, invariant: Invariant | None = None, guesses: bool = True
    ) -> None:
        if program.graph.hopper:
            raise NotCertified("instructions of sm_90 and later are covered in pipelines only")
        if program.graph.spin_heads:
            raise NotCertified("a loop that waits for memory is not covered")
        self.program, self.contract, self.ring = program, contract, ring
        self.invariant, self.guesses = invariant, guesses
        self.kinds = Kinds()
        # The work of a block: its mma.sync or, for sums of rows, the bytes that a thread loads.
        self.work = program.products if contract.is_product else program.loaded
        heads = [head for head, body in program.loops.items() if any(map(self.work, body))]
        inner = [head for head in heads if not any(h != head and h in program.loops[head] for h in heads)]
        # The innermost loop with most work is the main loop. All iterations of other loops are executed.
        self.head = max(inner, key=lambda head: sum(map(self.work, program.loops[head])), default=None)
        self.items: ItemLoop | None = None
        if ring.items is not None:
            products = [block.index for block in program.blocks if program.products(block.index)]
            # If the main loop was unrolled completely, the loop that contains the products is the one over items.
            own = program.loops[self.head] if self.head is not None else set(products)
            if self.head is not None and not any(own < body for body in program.loops.values()):
                own, self.head = set(products), None
            self.items = ItemLoop(program, ring.items, own, self.kinds)
        self.stops = () if self.head is None else (self.head,)  # the blocks at which an execution pauses
        self.unrolled, self.iterations_per_tile = self._unrolling()
        self.phase = Phase.FEW
        self.period = lcm(ring.period, self.unrolled)
        # At least one iteration after the peeled ones must exist in the general cases, and numbers of k-tiles below
        # ``least`` need no proof.
        self.ahead = max(ring.ahead, self.unrolled * (1 + ring.peeled) - 1, ring.least - 1)

    def _unrolling(self) -> tuple[int, int]:
        """The k-tiles of an iteration and the iterations of a k-tile, of which at least one is 1: the loop's work
        compared with that of a k-tile. This is a guess: with a wrong one the proof fails."""
        tile = self.contract.tile
        if self.head is None or tile is None:
            return 1, 1
        # The length of the sum is a polynomial; its coefficient of TILES is the number of k in one k-tile.
        multiplications = tile.rows * tile.cols * self.contract.sum_end.in_lane(0)[(TILES,)]
        if self.contract.is_product:
            work_of_tile = multiplications // (MULTIPLICATIONS_PER_MMA * self.contract.lanes // WARP)
        else:
            work_of_tile = multiplications * WIDTHS[self.contract.type_of("A")] // self.contract.lanes
        work_of_loop = sum(map(self.work, self.program.loops[self.head]))
        return max(1, work_of_loop // max(1, work_of_tile)), max(1, work_of_tile // max(1, work_of_loop))

    def cases(self) -> Iterator[Case]:
        """Yield every case once it is proven. Raises NotCertified at the first one that is not."""
        ring = self.ring
        if ring.only and (self.head is None or ring.only <= self.ahead + 2 * self.period):
            yield self._prove_number(ring.only)
            return
        if self.head is None:
            raise _without_loop(self.program, self.contract)
        for tiles in range(ring.least, 0 if ring.only else min(self.ahead, ring.most) + 1):
            yield self._prove_number(tiles)
        if self.unrolled == 1 or ring.only:
            yield from self._family(Family(self.ahead + 1, 1, ring.only))
            return
        for remainder in range(self.period):
            yield from self._family(Family(self.ahead + 1 + remainder, self.period, 0))

    def _family(self, family: Family) -> Iterator[Case]:
        """Prove a family of numbers of k-tiles, all larger than those that are executed one by one."""
        self.phase = Phase.ENTRY
        machine, first = self._entry(family)
        self.phase = Phase.LOOP
        name = f"{family.step} * q + {family.least} k-tiles" if family.step > 1 else f"more than {self.ahead} k-tiles"
        if first is None:
            yield Case(covers=name, instructions=machine.steps)
            return
        assert self.head is not None
        live = self.program.live(self.head)
        if self.invariant is None:
            if not self.guesses:
                raise NotCertified("the certificate lacks the invariant of the main loop")
            self.invariant = self._guess_invariant(family, first, live)
        turns = Turns(self.invariant, first, live, self.program.emitter.variable)
        turns.check(Polynomial.of(0), first, machine.facts, self.kinds)
        yield Case(covers=f"{name}, up to the loop", instructions=machine.steps)
        yield self._prove_period(family, turns)
        for remainder in range(0, self.period, family.step):
            if not family.only or (family.only - family.least - remainder) % self.period == 0:
                yield self._prove_exit(family, turns, remainder)

    def _machine(self, tiles: Polynomial, bounds: Bounds) -> Machine:
        """A machine for the problems with ``tiles`` k-tiles. ``bounds``: of the names in that polynomial."""
        return Machine(self.program, self.contract.where(TILES, tiles, bounds), self.kinds)

    def _prove_number(self, tiles: int) -> Case:
        """Prove one number of k-tiles by an execution from the entry to the exit."""
        number = Polynomial.of(tiles)
        machine = self._machine(number, {})
        self._to_end(machine, self._start(machine, number, {}), Polynomial.of(0))
        return Case(covers=f"{tiles} k-tiles", instructions=machine.steps)

    def _entry(self, family: Family) -> tuple[Machine, State | None]:
        """The machine of a family's problems, and the state at the main loop's head after the iterations that the ring
        peels. The state is None if the kernel ends before."""
        tiles, bounds = family.tiles(Polynomial.named(REST)), self._rest_bounds()
        machine = self._machine(tiles, bounds)
        state = machine.run(self._start(machine, tiles, bounds), *self.stops)
        for _ in range(self.ring.peeled):
            state = machine.run(state, *self.stops) if state is not None else None
        return machine, state

    def _rest_bounds(self) -> Bounds:
        """The bounds of the name REST."""
        return {(REST,): (0, self.ring.most)}

    def _start(self, machine: Machine, tiles: Polynomial, bounds: Bounds) -> State:
        """The state in which a CTA, or an item of a persistent one, begins."""
        return machine.start() if self.items is None else self.items.start(machine, TILES, tiles, bounds)

    def _to_end(self, machine: Machine, state: State, steps_above: Polynomial) -> None:
        """Run to the end of the CTA, or of its item, and check what it has done. ``steps_above``: the value of REST in
        these problems."""
        if self.items is None:
            machine.run(state)
        else:
            self.items.finish(machine, machine.run(state, self.items.head), REST, steps_above)

    def _after_period(self, machine: Machine, state: State) -> State:
        """The state at the loop's head after a period of k-tiles. Raises NotCertified if it stores to D or the
        workspace, of which an invariant says nothing."""
        before = state
        for _ in range(self.period * self.iterations_per_tile // self.unrolled):
            after = machine.run(state, *self.stops)
            if after is None:
                raise NotCertified("the main loop ends before its last iteration")
            state = after
        if not state.stored_the_same(before):
            raise NotCertified("D or the workspace is written in the main loop")
        return state

    def _guess_invariant(self, family: Family, first: State, live: list[str]) -> Invariant:
        """The invariant that the loop's first period suggests."""
        steps_above = Polynomial.named(REST) + self.period // family.step
        machine = self._machine(family.tiles(steps_above), self._rest_bounds())
        start = substituted(first, REST, steps_above, machine.facts, self.kinds)
        return guess(start, self._after_period(machine, start), live, self.program.emitter.variable, self.kinds)

    def _prove_period(self, family: Family, turns: Turns) -> Case:
        """The induction step: prove that a period leads from the state for q = TURN to that for q + 1, if enough
        k-tiles are left. ``turns`` counts periods as iterations."""
        turn = Polynomial.named(TURN)
        # T is at least q + 1 periods more than the family's least number. So after q periods one more is left, and then
        # at least the k-tiles of an exit.
        steps_above = (turn + 1) * (self.period // family.step) + Polynomial.named(REST)
        least = family.least + self.period
        most = (family.only - least) // self.period if family.only else self.ring.most // self.period
        machine = self._machine(family.tiles(steps_above), {(TURN,): (0, most)} | self._rest_bounds())
        state = self._after_period(machine, self._state_at(turns, turn, steps_above, machine))
        expected = Turns(turns.invariant, turns.first, turns.live, turns.variable)
        expected.first = substituted(turns.first, REST, steps_above, machine.facts, self.kinds)
        expected.check(turn + 1, state, machine.facts, self.kinds)
        return Case(covers=f"a period of {self.period} k-tiles", instructions=machine.steps)

    def _prove_exit(self, family: Family, turns: Turns, remainder: int) -> Case:
        """Prove the way from the loop's head after q = TURN periods to the end, where ``remainder`` more k-tiles are
        left than the family's least number."""
        least = family.least + remainder
        if family.only:
            turn, bounds = Polynomial.of((family.only - least) // self.period), Bounds()
        else:
            turn, bounds = Polynomial.named(TURN), {(TURN,): (0, self.ring.most // self.period)}
        # The remainder counts k-tiles. It counts steps too, because it is 0 unless a step is one k-tile.
        steps_above = turn * (self.period // family.step) + remainder
        machine = self._machine(family.tiles(steps_above), bounds)
        self._to_end(machine, self._state_at(turns, turn, steps_above, machine), steps_above)
        return Case(covers=f"{self.period} * q + {least} k-tiles", instructions=machine.steps)

    def _state_at(self, turns: Turns, turn: Polynomial, steps_above: Polynomial, machine: Machine) -> State:
        """The state at the loop's head after ``turn`` periods. ``steps_above``: the value of REST in the machine's
        problems."""
        return substituted(turns.at(turn, machine.facts, self.kinds), REST, steps_above, machine.facts, self.kinds)


def _without_loop(program: Program, contract: Contract) -> NotCertified:
    """The error for a kernel that has no main loop although its number of k-tiles is not fixed."""
    if not contract.is_product:
        return NotCertified("no loop loads from global memory, and the number of k-tiles is not known")
    of_wmma = (ins for ins in program.graph.instructions() if ins.base == "wmma")
    if first := next(of_wmma, None):
        return NotCertified("products by wmma are not covered; those by mma.sync are", place_of(first))
    return NotCertified("no loop multiplies by mma.sync, and products in other ways are not covered")
