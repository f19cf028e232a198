"""Proves how the CTAs of a cluster add the sums that have come to them: ``cluster_sums`` says what happens before.

The proof follows any thread of a CTA's consumers from its last wait to its end. The thread's number is a polynomial in
a few names. The proof of the role has shown which values the registers of each thread have at that wait. If the values
of a register are a polynomial in these names, the proof goes on with the polynomial; other registers are unknown. The
thread loads sums, adds those of all slices in the order of the slices, and stores the results that lie within D. All
threads together load sums of one slice at a time. All threads of all CTAs together store each element of the tile once.

``count_stores`` follows threads whose registers hold complete sums in the same way (``single_shot``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import Any

import numpy as np

from kernelproof.certificates.cells import UNKNOWN, Cells, Kind, Kinds
from kernelproof.certificates.cluster_sums import NOBODY, SUM_BYTES, ClusterSums
from kernelproof.certificates.conditions import OpenFacts, settled
from kernelproof.certificates.contract import Contract, Matrix, Tile
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.invariants import bits_of, is_number, poly_of
from kernelproof.certificates.loops import Case
from kernelproof.certificates.pipelines import Pipeline, Protocol
from kernelproof.certificates.polynomials import ZERO, Lanes, Polynomial
from kernelproof.certificates.program import Program
from kernelproof.certificates.progress import Key, Stored
from kernelproof.certificates.role_state import RoleState
from kernelproof.certificates.share import LANES
from kernelproof.certificates.shared_memory import ELEMENT
from kernelproof.certificates.slices import Partial
from kernelproof.certificates.thread_machine import Registers, ThreadMachine
from kernelproof.certificates.words import Word, polynomial
from kernelproof.emulator.hopper.peers import RANK_SHIFT, WITHIN
from kernelproof.emulator.state.arrays import Mask
from kernelproof.ground.chips import WARP

CLUSTER_SUM = "sum of a cluster"
WARPGROUP = 4  # warps
named = Polynomial.named


class ConsumerThread:
    """Any thread of those that store sums, which are the ``threads`` threads from thread ``start`` on. ``extents``:
    the names in its number, and how many values each has; a name with a larger step comes first."""

    def __init__(self, start: int, threads: int) -> None:
        self.start = start
        warps = threads // WARP
        if threads % WARP:
            raise NotCertified(f"sums are added by {threads} threads, which are no whole warps")
        steps = {"warp": (warps, WARP)}
        if warps == 2 or warps % WARPGROUP == 0:
            # Warps may be in two columns of a tile, so the bits of their number have names.
            steps = {
                "warpgroup": (-(-warps // WARPGROUP), WARPGROUP * WARP),
                "warp_pair": (1 + (warps > 2), 2 * WARP), "warp_odd": (2, WARP),
            }  # fmt: skip
        steps |= LANES
        self.steps = {name: (count, step) for name, (count, step) in steps.items() if count > 1}
        names = sorted(self.steps, key=lambda name: -self.steps[name][1])
        self.extents = {name: self.steps[name][0] for name in names}
        self.names_in_warp = set(LANES)
        self.lane_names = set(self.extents)
        points = np.array(list(product(*map(range, self.extents.values()))), np.int64)
        self.points = dict(zip(self.extents, points.T, strict=True))
        self.count = len(points)

    @property
    def lane(self) -> Polynomial:
        """The thread's number in its warp."""
        return sum((named(name, step) for name, (_, step) in LANES.items()), ZERO)

    @property
    def thread(self) -> Polynomial:
        """The thread's number in its CTA."""
        return sum((named(name, step) for name, (_, step) in self.steps.items()), Polynomial.of(self.start))

    def values(self, poly: Polynomial) -> Lanes:
        """The value of a polynomial for each thread, in the order of their numbers. Raises NotCertified if it depends
        on more than the thread's number."""
        if set(poly.names()) - self.extents.keys():
            raise NotCertified(f"{poly} depends on more than the thread")
        total = np.zeros(self.count, np.int64)
        for monomial, coefficient in poly.in_lane(0).items():
            total = total + coefficient * prod((self.points[x] for x in monomial), start=np.ones_like(total))
        return total

    def fitted(self, values: Lanes) -> Polynomial | None:
        """The polynomial of degree 1 that has these values for all threads; None if there is none."""
        shape = tuple(self.extents.values())
        grid = np.broadcast_to(values, (self.count,)).astype(np.int64).reshape(shape)
        first = int(grid.flat[0])
        out = Polynomial.of(first)
        for axis, (name, size) in enumerate(self.extents.items()):
            if size > 1:
                out = out + named(name, int(np.take(grid, 1, axis).flat[0]) - first)
        return out if np.array_equal(self.values(out), grid.reshape(-1)) else None

    def known(self, value: Any, facts: OpenFacts) -> Any:
        """What a register holds in any thread, by its value in each thread; ``UNKNOWN`` if that is no polynomial."""
        if not is_number(value) or (isinstance(value, np.ndarray) and value.dtype == bool):
            same = isinstance(value, np.ndarray) and value.size and (value == value.flat[0]).all()
            return np.array([value.flat[0]]) if same else UNKNOWN
        out = ZERO
        for monomial, coefficient in poly_of(value).terms.items():
            factor = Polynomial.of(coefficient) if isinstance(coefficient, int) else self.fitted(coefficient)
            if factor is None:
                return UNKNOWN
            out = out + factor * Polynomial({monomial: 1})
        return Word(out, bits_of(value), facts)


class ClusterSumMachine(ThreadMachine):
    """The machine of any consumer thread in the CTA with a ``rank``, of ``ranks`` CTAs. Methods raise NotCertified.
    ``sums``: the sums that are sent to this CTA."""

    def __init__(
        self, program: Program, contract: Contract, facts: OpenFacts, kinds: Kinds, thread: ConsumerThread,
        sums: ClusterSums, rank: int, ranks: int,
    ) -> None:  # fmt: skip
        super().__init__(program, contract, facts, kinds, thread)
        self.consumer, self.sums, self.rank, self.ranks = thread, sums, rank, ranks

    def units(self) -> dict[str, dict[str, Callable[..., Any]]]:
        """The units of a thread that adds sums and stores them. Others are not covered."""
        peers: dict[str, Callable[..., Any]] = {
            "variable": lambda offset, width: np.full(1, self._rank_bits + offset, f"u{width}"),
            "of_cta": lambda address, *_: address,
        }
        return {
            "G": {"store": self.store}, "S": {"load": self.load_sums}, "E": peers,
            "I": {"lanes": self.lanes_of, "constant": self.constant}, "W": {"shfl": self.shuffle},
            "Y": {"converge": lambda *_: None}, "T": {"movmatrix": self.movmatrix}, "J": {}, "Z": {},
            "P": {"constant": self.constant},
        }  # fmt: skip

    @property
    def _rank_bits(self) -> int:
        """The CTA's rank, shifted to the bits in which an address of the cluster's shared memory has it."""
        return self.rank << RANK_SHIFT

    def lanes_of(self, name: str) -> Any:
        if name == "%cluster_ctarank":
            return np.full(1, self.rank, "u4")
        return super().lanes_of(name)

    def load_sums(self, address: Any, size: int, m: Mask, site: int, _strength: int = 0) -> Partial:
        """ld.shared of sums that were sent to this CTA. All threads must load those of one slice."""
        if m is not None or size % SUM_BYTES:
            raise NotCertified("a load of sums under a predicate, or of a part of one")
        places = (self.consumer.values(polynomial(address, 32)) & 0xFFFFFFFF) ^ self._rank_bits
        if (places > WITHIN).any():
            raise NotCertified("sums are loaded from another CTA")
        self.program.traffic.shared(site, places, np.arange(len(places)), size)
        # Places are elements of ELEMENT bytes; the sums that lie there are numbered in units of SUM_BYTES.
        at = self.memory.places(places, size)[:, :: SUM_BYTES // ELEMENT] * ELEMENT // SUM_BYTES
        sources, rows, cols = (each[at] for each in self.sums.at)
        source = int(sources.flat[0])
        if (sources != source).any() or source == NOBODY:
            raise NotCertified("a sum is loaded to where none has come, or threads load those of different slices")
        own, ranks = Polynomial.of(source), Polynomial.of(self.ranks)
        return Partial(self.sums_at(rows, cols, SUM_BYTES), own, own + 1, ranks)

    def sums_at(self, rows: Lanes, cols: Lanes, width: int) -> Cells:
        """Sums as elements of any thread. ``rows``, ``cols``: their places in D's tile, for each thread and element."""
        numbers, offsets = [], []
        for at in zip(rows.T, cols.T, strict=True):
            row, col = map(self.consumer.fitted, at)
            if row is None or col is None:
                raise NotCertified("threads load sums of elements that do not follow from their numbers")
            numbers.append(self.kinds.number(Kind(CLUSTER_SUM, row.varying, col.varying)))
            offsets.append((int(row.constant), int(col.constant)))
        places = np.array(offsets, np.int64).T
        return Cells(np.array([numbers], np.int64), places[:1], places[1:], width)

    def _place(self, value: Cells, i: int) -> tuple[Polynomial, Polynomial]:
        """The row and column in D's tile of a thread's sum number ``i``."""
        kind = self.kinds[int(value.kinds[0, i])]
        if kind is None or kind.source != CLUSTER_SUM:
            raise NotCertified("what is stored to D is not a sum over all slices")
        return kind.row + int(value.rows[0, i]), kind.col + int(value.cols[0, i])

    def movmatrix(self, value: Any, m: Mask, _site: int) -> Cells:
        """movmatrix.trans of 8 x 8 sums of each warp: lane l has elements 2 * (l % 4) and the next of row l / 4."""
        value = settled(value)
        if m is not None or self.depth or not isinstance(value, Cells) or isinstance(value, Partial):
            raise NotCertified("movmatrix by a part of a warp, or of what are no sums")
        if value.width != 2 or value.kinds.shape[1] != 2:
            raise NotCertified("movmatrix of what are not two sums of 16 bits")
        places = zip(*(self._place(value, i) for i in range(2)), strict=True)
        rows, cols = (
            np.stack([self.consumer.values(each) for each in along], 1).reshape(-1, 8, 8).transpose(0, 2, 1)
            for along in places
        )
        return self.sums_at(rows.reshape(-1, 2), cols.reshape(-1, 2), 2)

    # --- D

    def store_sum(self, address: Any, value: Cells, d: Matrix) -> None:
        """A lane stores a sum of all slices to its element of D. Refused unless the element is the sum's own, and
        stored once."""
        matrix, place = self._elements_at(address, d.width, True, self.all_lanes)
        target, tile = self.kinds[place.one_kind], self.contract.tile
        assert tile is not None
        row, col = self._place(value, 0)
        if matrix.name != d.name or target is None:
            raise NotCertified("a sum is stored to what is not D")
        at = target.row + int(place.rows.flat[0]), target.col + int(place.cols.flat[0])
        if not at[0].equals(tile.row + row) or not at[1].equals(tile.col + col):
            raise NotCertified("D gets the sum of another element")
        key = (row.key, col.key), 0, False
        if key in self.progress.stored:
            raise NotCertified("a sum is stored twice")
        self.progress.stored[key] = Stored(*at, ZERO, False)


def count_stores(
    machine: ClusterSumMachine, block: int, registers: Registers, tile: Tile, counts: Lanes
) -> None:  # fmt: skip
    """Prove what any thread stores from a block to its end, and add to ``counts`` how often all threads of the CTA
    store each element of the tile."""
    thread, ends = machine.consumer, list[dict[Key, Stored]]()

    def reached(block: int | None, _: Registers) -> None:
        if block is not None:
            raise NotCertified("a thread goes on after its sums")
        ends.append(machine.progress.stored)

    machine.follow(block, registers, None, (), reached)
    if not ends or any(each.keys() != ends[0].keys() for each in ends):
        raise NotCertified("a thread stores different sums on its ways to its end")
    for each in ends[0].values():
        rows, cols = (thread.values(each.row - tile.row), thread.values(each.col - tile.col))
        if rows.min() < 0 or cols.min() < 0 or rows.max() >= tile.rows or cols.max() >= tile.cols:
            raise NotCertified("a sum is stored outside of its tile")
        counts += np.bincount(rows * tile.cols + cols, minlength=len(counts))


def check_counts(counts: Lanes) -> None:
    """Raise NotCertified unless each element of a tile is stored once. ``counts``: how often each is stored."""
    if (counts != 1).any():
        raise NotCertified(
            f"{int((counts == 0).sum())} elements of a tile of D are not stored, "
            f"{int((counts > 1).sum())} more than once"
        )


class ClusterSumProof:
    """Proves what the consumers of all CTAs of a cluster do after their waits. ``ctas``: for each CTA its contract, its
    pipeline, what its roles have shown, and the states after its last wait."""

    def __init__(
        self, program: Program, kinds: Kinds, ctas: list[tuple[Contract, Pipeline, Protocol, list[RoleState]]]
    ) -> None:
        self.program, self.kinds, self.ctas = program, kinds, ctas

    def cases(self) -> Iterator[Case]:
        """Prove the sums of every CTA. Raises NotCertified."""
        tile = self.ctas[0][0].tile
        assert tile is not None
        counts = np.zeros(tile.rows * tile.cols, np.int64)
        for _, _, protocol, _ in self.ctas:
            protocol.sums.check()
        for cta in self.ctas:
            yield self._prove_sums(*cta, tile, counts)
        check_counts(counts)

    def _prove_sums(
        self, contract: Contract, pipeline: Pipeline, protocol: Protocol, states: list[RoleState], tile: Tile,
        counts: Lanes,
    ) -> Case:  # fmt: skip
        """Prove what any thread of a CTA adds, and add to ``counts`` how often it stores each element of the tile."""
        if len(states) != 1:
            raise NotCertified(f"the consumers of a CTA have their sums in {len(states)} ways")
        ((start, end),) = pipeline.groups
        thread = ConsumerThread(start, end - start)
        facts = OpenFacts.of(contract.facts)
        facts.bounds |= {(name,): (0, size - 1) for name, size in thread.extents.items()}
        machine = ClusterSumMachine(
            self.program, contract, facts, self.kinds, thread, protocol.sums, pipeline.rank, pipeline.ranks
        )  # fmt: skip
        registers: Registers = {name: thread.known(value, facts) for name, value in states[0].registers.items()}
        count_stores(machine, states[0].block, registers, tile, counts)
        return Case(
            covers=f"any consumer of CTA {pipeline.rank} adds the sums of the cluster", instructions=machine.steps
        )
