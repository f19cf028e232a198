"""mbarriers and cluster barriers: phases, transaction counts, who sleeps where, and what a wait lets know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cudal2gen.emulator.hopper.clocks import distinct
from cudal2gen.emulator.hopper.cluster_memory import RANK_SHIFT
from cudal2gen.emulator.memory.shared import WINDOW_START

if TYPE_CHECKING:
    from cudal2gen.emulator.machine.batch import Batch, Step

Array = NDArray[Any]
Mask = Array | None
MAX_COUNT = (1 << 20) - 1


class MBarrier:
    """One mbarrier object. ``phase`` counts completed phases; ``pending`` arrivals and ``bytes`` (expected minus
    arrived) are those of the current one; ``flights`` are its copies, which land when somebody has waited."""

    __slots__ = (
        "bytes", "clock", "column", "count", "done_clock", "done_tick", "fenced", "flights", "init_lane", "init_tick",
        "landing", "offset", "pending", "phase", "row", "trusted",
    )  # fmt: skip

    def __init__(self, row: int, offset: int, count: int, column: int, lane: int, tick: int) -> None:
        self.row, self.offset, self.count, self.column = row, offset, count, column
        self.init_lane, self.init_tick = lane, tick
        # The tick of a fence that makes the initialisation visible to the cluster and the asynchronous proxy.
        self.fenced = 0
        self.pending, self.bytes, self.phase = count, 0, 0
        self.clock: Array | None = None
        self.done_clock: Array | None = None
        self.done_tick = 0
        self.flights: list[Callable[[int], None]] = []
        self.landing: list[Callable[[int], None]] = []
        # Warps that are known to see the initialisation.
        self.trusted: set[int] = set()

    def passed(self, token: int, parity: bool) -> bool:
        """Is the phase of this parity (or this state) complete?"""
        return self.phase & 1 != token & 1 if parity else self.phase > token

    def describe(self, row: int) -> str:  # noqa: ARG002
        """State in words, for reports of deadlocks."""
        missing = f"{self.pending} of {self.count} arrivals"
        if self.bytes:
            missing += f" and {self.bytes} bytes"
        return f"the mbarrier at shared offset {self.offset}, whose phase {self.phase} lacks {missing}"


class ClusterBarrier:
    """barrier.cluster of one cluster: ``generation`` counts completions."""

    __slots__ = ("arrived", "clock", "done_clock", "generation", "tick")

    def __init__(self, size: int) -> None:
        self.generation = 0
        self.arrived: Array = np.zeros(size, bool)
        self.clock: Array | None = None
        self.done_clock: Array = np.zeros(0, np.int64)
        self.tick = 0

    def describe(self, row: int) -> str:  # noqa: ARG002
        """State in words."""
        return f"barrier.cluster, where {int(self.arrived.sum())} threads of the cluster have arrived"


class Barriers:
    """The mbarriers and cluster barriers of a batch."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.launch = batch, batch.launch
        self.hazards = batch.launch.options.hazards
        self.bars: dict[tuple[int, int], MBarrier] = {}
        self.results: Array = np.zeros(batch.size, bool)
        # Whose last try_wait ended by its time limit, in an adverse order.
        self.timed_out: Array = np.zeros(batch.size, bool)
        per = batch.cluster_size * batch.width
        self.clusters = [ClusterBarrier(per) for _ in range(batch.count // batch.cluster_size)]
        # Per lane: the generation in which it arrived at the cluster barrier, -1 where it has not.
        self.arrived_at: Array = np.full(batch.size, -1, np.int64)
        # Something has happened since sleepers were last woken by their time limit.
        self.progress = True

    # --- places ---

    def rows(self, address: Array, lanes: Array, site: int, remember: bool = True) -> tuple[Array, Array]:
        """Lanes and the rows of the CTAs that their shared::cluster addresses name; wrong ranks are reported."""
        batch = self.batch
        rank = (address >> RANK_SHIFT).astype(np.int64) - 1
        own = batch.row_of[lanes]
        rows = np.where(rank < 0, own, own - batch.rank[own] + rank)
        bad = rank >= batch.cluster_size
        if bad.any():
            batch.report_lanes(
                "cluster", f"names CTA {int(rank[bad][0])} of a cluster of {batch.cluster_size}", site, lanes[bad]
            )
            lanes, rows = lanes[~bad], rows[~bad]
        if self.hazards:
            away = rows != batch.row_of[lanes]
            if away.any():
                for row in np.unique(rows[away]):
                    self.visit(int(row), lanes[away & (rows == row)], site, remember)
        return lanes, rows

    def visit(self, row: int, lanes: Array, site: int, remember: bool = True) -> None:
        """Lanes of other CTAs touch CTA ``row``: it must have started, and must not have ended."""
        batch = self.batch
        clocks = batch.clocks
        theirs = slice(int(clocks.first[row]), int(clocks.first[row]) + clocks.warps)
        for lane in lanes[np.unique(lanes >> 5, return_index=True)[1]]:
            known = clocks.of(int(lane))
            if not known[-1] and not known[theirs].any():
                batch.report_lanes(
                    "cluster",
                    f"touches the shared memory of CTA {batch.cta_index(row)} before a cluster barrier says that it "
                    "has started",
                    site,
                    lanes,
                )
        if not batch.alive[row * batch.width : (row + 1) * batch.width].any():
            batch.report_lanes(
                "cluster", f"touches the shared memory of CTA {batch.cta_index(row)}, which has exited", site, lanes
            )
            return
        if not remember:
            return
        visits = batch.shared.visits.setdefault(row, {})  # type: ignore[attr-defined]
        for column in np.unique(clocks.first[batch.row_of[lanes]] + batch.warp[lanes]):
            visits[int(column)] = (self.launch.tick, site)

    def mapa(self, address: Array, rank: Array) -> Array:
        """mapa of shared or generic addresses; the rank is checked where the address is used."""
        low = address & address.dtype.type(~(0xFF << RANK_SHIFT) & ((1 << 8 * address.itemsize) - 1))
        out: Array = low | ((rank & 0x3F) + 1).astype(address.dtype) << address.dtype.type(RANK_SHIFT)
        return out

    def rank_of(self, address: Array) -> Array:
        """getctarank."""
        rank = (address >> address.dtype.type(RANK_SHIFT) & address.dtype.type(0xFF)).astype(np.int64)
        own = self.batch.rank[self.batch.row_of]
        return np.where(rank > 0, rank - 1, own).astype(np.uint32)

    def _groups(
        self, address: Array, m: Mask, site: int, token: Array | None = None
    ) -> Iterator[tuple[int, int, int, Array]]:
        """(row, offset, token, lanes) of every mbarrier that the lanes name."""
        batch = self.batch
        lanes = np.arange(batch.size) if m is None else batch.lanes(m)
        if lanes.size == 0:
            return
        chosen = address[lanes]
        if int(chosen.max()) >> RANK_SHIFT:
            lanes, rows = self.rows(chosen, lanes, site)
            chosen = address[lanes] & np.uint32((1 << RANK_SHIFT) - 1)
        else:
            rows = batch.row_of[lanes]
        offset = chosen.astype(np.int64) - WINDOW_START
        wrong = (offset < 0) | (offset + 8 > batch.shared.size) | (offset & 7 != 0)
        if wrong.any():
            at = int(offset[wrong][0])
            batch.report_lanes(
                "shared-out-of-bounds", f"an mbarrier at shared offset {at}: outside, or no multiple of 8", site,
                lanes[wrong], at,
            )  # fmt: skip
            lanes, rows, offset = lanes[~wrong], rows[~wrong], offset[~wrong]
        tokens = np.zeros(len(lanes), np.int64) if token is None else token[lanes].astype(np.int64)
        key = rows << 40 | offset << 20 | (tokens & 0xFFFFF)
        if lanes.size and (key == key[0]).all():
            yield int(rows[0]), int(offset[0]), int(tokens[0]), lanes
            return
        values, inverse = np.unique(key, return_inverse=True)
        for i in range(len(values)):
            some = np.flatnonzero(inverse == i)
            yield int(rows[some[0]]), int(offset[some[0]]), int(tokens[some[0]]), lanes[some]

    def find(self, row: int, offset: int, lanes: Array, site: int, asynchronous: bool = False) -> MBarrier | None:
        """The mbarrier there, or a report. Its initialisation must be visible to the lanes."""
        bar = self.bars.get((row, offset))
        batch = self.batch
        if bar is None:
            batch.report_lanes(
                "mbarrier", f"no mbarrier has been initialised at shared offset {offset}", site, lanes, offset
            )
            return None
        if self.hazards:
            if asynchronous and not bar.fenced and -1 not in bar.trusted:
                bar.trusted.add(-1)
                batch.report_lanes(
                    "mbarrier",
                    f"a bulk copy completes on the mbarrier at shared offset {offset}, whose initialisation no "
                    "fence.mbarrier_init or fence.proxy.async follows",
                    site, lanes, offset,
                )  # fmt: skip
            for warp in distinct(lanes >> 5):
                if int(warp) not in bar.trusted:
                    self._trust(bar, int(lanes[lanes >> 5 == warp][0]), site)
        return bar

    def _trust(self, bar: MBarrier, lane: int, site: int) -> None:
        batch = self.batch
        clocks = batch.clocks
        origin = int(batch.row_of[bar.init_lane])
        column = int(clocks.first[origin] + batch.warp[bar.init_lane])
        ok = lane == bar.init_lane or clocks.of(lane)[column] > bar.init_tick
        # A relaxed cluster barrier carries what fence.mbarrier_init released.
        ok = ok or 0 < bar.fenced < clocks.of(lane)[-1]
        bar.trusted.add(lane >> 5)
        if not ok:
            batch.report_lanes(
                "mbarrier",
                f"uses the mbarrier at shared offset {bar.offset} before its initialisation is known to be visible "
                "(no barrier between)",
                site, np.array([lane]), bar.offset,
            )  # fmt: skip

    # --- mbarrier ---

    def init(self, address: Array, count: Array, m: Mask, site: int) -> None:
        """mbarrier.init."""
        batch = self.batch
        for row, offset, _, lanes in self._groups(address, m, site):
            number = int(count[lanes[-1]])
            if not 1 <= number <= MAX_COUNT:
                batch.report_lanes("mbarrier", f"initialised with a count of {number}", site, lanes, offset)
                number = max(1, min(number, MAX_COUNT))
            old = self.bars.get((row, offset))
            if old is not None or len(lanes) > 1:
                batch.report_lanes(
                    "mbarrier",
                    f"the mbarrier at shared offset {offset} is initialised again without mbarrier.inval",
                    site,
                    lanes,
                    offset,
                )
            column = old.column if old is not None else batch.clocks.barrier_column(row)
            self.bars[(row, offset)] = MBarrier(row, offset, number, column, int(lanes[-1]), self.launch.tick)

    def invalidate(self, address: Array, m: Mask, site: int) -> None:
        """mbarrier.inval."""
        for row, offset, _, lanes in self._groups(address, m, site):
            if self.find(row, offset, lanes, site) is not None:
                del self.bars[(row, offset)]

    def fence_init(self, m: Mask) -> None:
        """fence.mbarrier_init or a proxy fence: what the lanes have initialised is released."""
        batch = self.batch
        fresh = [bar for bar in self.bars.values() if not bar.fenced]
        if fresh:
            self.launch.tick += 1
            for bar in fresh:
                if m is None or m[bar.init_lane]:
                    bar.fenced = self.launch.tick
            batch.shared.retag()

    def arrive(
        self,
        address: Array,
        count: Any,
        expected: Array | None,
        m: Mask,
        site: int,
        release: bool = True,
        drop: bool = False,
    ) -> Array:
        """mbarrier.arrive by every lane, after expect_tx of ``expected`` bytes. Returns the states."""
        batch = self.batch
        states = np.zeros(batch.size, np.uint64)
        groups = list(self._groups(address, m, site))
        self.launch.tick += 1
        for row, offset, _, lanes in groups:
            bar = self.find(row, offset, lanes, site)
            if bar is None:
                continue
            clock = batch.clocks.publish(lanes) if release and self.hazards else None
            for lane in lanes:
                states[lane] = bar.phase
                if expected is not None:
                    bar.bytes += int(expected[lane])
                n = count if type(count) is int else int(count[lane])
                if clock is not None:
                    bar.clock = clock if bar.clock is None else np.maximum(bar.clock, clock)
                    clock = None
                if n > bar.pending:
                    batch.report_lanes(
                        "mbarrier",
                        f"{n} arrivals at the mbarrier at shared offset {offset}, whose phase {bar.phase} expects "
                        f"{bar.pending} more of {bar.count}",
                        site, lanes, offset,
                    )  # fmt: skip
                    n = bar.pending
                bar.pending -= n
                if drop:
                    bar.count = max(1, bar.count - n)
                self._settle(bar)
        batch.shared.retag()
        return states

    def copies_arrive(self, address: Array, noinc: bool, m: Mask, site: int) -> None:
        """cp.async.mbarrier.arrive: the lanes' copies so far land with the phase, each lane arrives once for them.
        Without ``noinc`` the phase expects that arrival beside its own."""
        shared: Any = self.batch.shared
        for row, offset, _, lanes in list(self._groups(address, m, site)):
            bar = self.find(row, offset, lanes, site)
            if bar is None:
                continue
            for copy in shared.take_copies(lanes):

                def land(tick: int, copy: Any = copy, column: int = bar.column) -> None:
                    shared.land(copy.at, copy.data, column, tick, copy.width)

                bar.flights.append(land)
            if not noinc:
                bar.pending += len(lanes)
            mask = np.zeros(self.batch.size, bool)
            mask[lanes] = True
            self.arrive(address, 1, None, mask, site)

    def expect(self, address: Array, expected: Array, m: Mask, site: int) -> None:
        """mbarrier.expect_tx."""
        for row, offset, _, lanes in self._groups(address, m, site):
            bar = self.find(row, offset, lanes, site)
            if bar is not None:
                bar.bytes += int(expected[lanes].astype(np.int64).sum())

    def complete(self, address: Array, done: Array, m: Mask, site: int) -> None:
        """mbarrier.complete_tx."""
        for row, offset, _, lanes in self._groups(address, m, site):
            bar = self.find(row, offset, lanes, site)
            if bar is not None:
                bar.bytes -= int(done[lanes].astype(np.int64).sum())
                self._settle(bar)

    def deliver(self, bar: MBarrier, nbytes: int, land: Callable[[int], None]) -> None:
        """A bulk copy of ``nbytes`` completes on the barrier; ``land(tick)`` puts its data in place."""
        bar.flights.append(land)
        bar.bytes -= nbytes
        self._settle(bar)

    def _settle(self, bar: MBarrier) -> None:
        """Complete the phase if nothing is missing."""
        self.progress = True
        if bar.pending or bar.bytes:
            return
        self.launch.tick += 1
        bar.done_tick = self.launch.tick
        clock = bar.clock if bar.clock is not None else np.zeros(self.batch.clocks.columns, np.int64)
        clock[bar.column] = bar.done_tick
        bar.done_clock, bar.clock = clock, None
        # Nobody waited for the phase before: its data lands now, under its own tick.
        bar.landing += bar.flights
        bar.flights = []
        bar.phase += 1
        bar.pending = bar.count
        self.launch.version += 1
        self.batch.shared.retag()
        self._wake(bar)

    def _wake(self, bar: MBarrier) -> None:
        batch = self.batch
        free = np.zeros(batch.size, bool)
        for w in batch.waiting:
            if w.barrier is bar and bar.passed(w.token >> 1, bool(w.token & 1)):
                free |= w.mask
        if free.any():
            lanes = np.flatnonzero(free)
            self.acquire(bar, lanes)
            self.results[lanes] = True
            self.timed_out[lanes] = False
            batch.release(bar, free)

    def acquire(self, bar: MBarrier, lanes: Array) -> None:
        """The lanes have seen the last phase complete."""
        if bar.landing:
            landing, bar.landing = bar.landing, []
            for land in landing:
                land(bar.done_tick)
        if self.hazards and bar.done_clock is not None:
            self.batch.clocks.acquire(lanes, bar.done_clock)

    def try_wait(self, address: Array, token: Array, parity: bool, m: Mask, resume: int, site: int) -> Step:
        """mbarrier.try_wait: lanes whose phase is not complete sleep; in an adverse order only when they try again."""
        batch = self.batch
        if self.launch.counters is not None:
            warps = batch.alive if m is None else m
            self.launch.counters.mbarrier_waits += int(warps.reshape(-1, 32).any(axis=1).sum())
        asleep = None
        for row, offset, wanted, lanes in self._groups(address, m, site, token & 1 if parity else token):
            bar = self.find(row, offset, lanes, site)
            if bar is None or bar.passed(wanted, parity):
                self.results[lanes] = True
                self.timed_out[lanes] = False
                if bar is not None and bar.phase:
                    self.acquire(bar, lanes)
                continue
            if self.launch.options.adverse and not self.timed_out[lanes].all():
                self.results[lanes] = False
                self.timed_out[lanes] = True
                continue
            if asleep is None:
                asleep = np.zeros(batch.size, bool)
            asleep[lanes] = True
            mask = np.zeros(batch.size, bool)
            mask[lanes] = True
            batch.sleep(bar, mask, resume, site, wanted << 1 | int(parity))
        if asleep is None:
            return batch.go(resume, m)
        awake = (batch.alive if m is None else m) & ~asleep
        if awake.any():
            return batch.next(resume, awake)
        return batch.pick()

    def test_wait(self, address: Array, token: Array, parity: bool, m: Mask, site: int) -> Array:
        """mbarrier.test_wait: is the phase complete now?"""
        out = np.zeros(self.batch.size, bool)
        for row, offset, wanted, lanes in self._groups(address, m, site, token & 1 if parity else token):
            bar = self.find(row, offset, lanes, site)
            if bar is None or bar.passed(wanted, parity):
                out[lanes] = True
                if bar is not None and bar.phase:
                    self.acquire(bar, lanes)
        return out

    def waited(self) -> Array:
        """The result of the last try_wait of each lane."""
        return self.results.copy()

    def expire(self) -> bool:
        """Nothing can run: end the waits of all try_wait by their time limit, once per state of the world."""
        batch = self.batch
        if not self.progress:
            return False
        self.progress = False
        free = np.zeros(batch.size, bool)
        for w in batch.waiting:
            if isinstance(w.barrier, MBarrier):
                free |= w.mask
        if not free.any():
            return False
        self.results[free] = False
        for bar in {w.barrier for w in batch.waiting if isinstance(w.barrier, MBarrier)}:
            batch.release(bar, free)
        return True

    # --- barrier.cluster ---

    def _members(self, index: int) -> slice:
        per = self.batch.cluster_size * self.batch.width
        return slice(index * per, (index + 1) * per)

    def cluster_arrive(self, m: Mask, release: bool, site: int) -> None:
        """barrier.cluster.arrive; a relaxed one publishes no accesses."""
        batch = self.batch
        mask = batch.alive if m is None else m
        self.launch.tick += 1
        for index, cluster in enumerate(self.clusters):
            part = self._members(index)
            lanes = np.flatnonzero(mask[part]) + part.start
            if lanes.size == 0:
                continue
            again = self.arrived_at[lanes] >= 0
            if again.any():
                batch.report_lanes(
                    "barrier-divergence", "arrives at barrier.cluster again without having waited", site, lanes[again]
                )
            self.arrived_at[lanes] = cluster.generation
            cluster.arrived[lanes - part.start] = True
            if release and self.hazards:
                clock = batch.clocks.publish(lanes)
                cluster.clock = clock if cluster.clock is None else np.maximum(cluster.clock, clock)
            self._settle_cluster(index)
        batch.shared.retag()

    def _settle_cluster(self, index: int) -> None:
        batch, cluster, part = self.batch, self.clusters[index], self._members(index)
        alive = batch.alive[part]
        if not cluster.arrived.any() or (alive & ~cluster.arrived).any():
            return
        self.progress = True
        self.launch.tick += 1
        cluster.tick = self.launch.tick
        cluster.generation += 1
        cluster.arrived[:] = False
        clock = np.zeros(batch.clocks.columns, np.int64) if cluster.clock is None else cluster.clock
        clock[-1] = cluster.tick
        cluster.done_clock, cluster.clock = clock, None
        self.launch.version += 1
        free = np.zeros(batch.size, bool)
        for w in batch.waiting:
            if w.barrier is cluster:
                free |= w.mask
        if free.any():
            self._leave(cluster, np.flatnonzero(free))
            batch.release(cluster, free)

    def _leave(self, cluster: ClusterBarrier, lanes: Array) -> None:
        self.arrived_at[lanes] = -1
        if self.hazards:
            self.batch.clocks.acquire(lanes, cluster.done_clock)

    def cluster_wait(self, acquire: bool, m: Mask, resume: int, site: int) -> Step:
        """barrier.cluster.wait."""
        del acquire
        batch = self.batch
        mask = (batch.alive if m is None else m).copy()
        awake = np.zeros(batch.size, bool)
        for index, cluster in enumerate(self.clusters):
            part = self._members(index)
            lanes = np.flatnonzero(mask[part]) + part.start
            if lanes.size == 0:
                continue
            never = self.arrived_at[lanes] < 0
            if never.any():
                batch.report_lanes(
                    "barrier-divergence", "waits at barrier.cluster without having arrived", site, lanes[never]
                )
            done = never | (self.arrived_at[lanes] < cluster.generation)
            if done.any():
                self._leave(cluster, lanes[done])
                awake[lanes[done]] = True
            if not done.all():
                rest = np.zeros(batch.size, bool)
                rest[lanes[~done]] = True
                batch.sleep(cluster, rest, resume, site)
        if (awake == mask).all():
            return batch.go(resume, m)
        return batch.next(resume, awake) if awake.any() else batch.pick()

    # --- the end ---

    def exited(self, lanes: Array) -> None:
        """Lanes have left the kernel."""
        batch = self.batch
        for index in distinct(lanes // (batch.cluster_size * batch.width)):
            self._settle_cluster(int(index))
        for row in distinct(batch.row_of[lanes]):
            if not batch.alive[row * batch.width : (row + 1) * batch.width].any():
                self._last_has_left(int(row))

    def _last_has_left(self, row: int) -> None:
        """A CTA ends: its shared memory goes, so nothing may still be under way to it or from it."""
        batch = self.batch
        if not self.hazards:
            return
        shared: Any = batch.shared
        clocks = batch.clocks
        lane = row * batch.width
        clock = clocks.known[row].max(axis=0)
        for (r, _), entries in clocks.private.items():
            if r == row:
                for _, learned in entries:
                    clock = np.maximum(clock, learned)
        for column, (tick, site) in shared.visits.get(row, {}).items():
            if tick >= clock[column]:
                rank, warp = divmod(column, clocks.warps)
                batch.report(
                    "cluster",
                    f"warp {warp} of the cluster's CTA {rank} touches this CTA's shared memory, and this CTA may exit "
                    "before: none of its threads waits for it",
                    site, row, (),
                )  # fmt: skip
        for bar in self.bars.values():
            if bar.row == row and (bar.flights or bar.landing):
                batch.report(
                    "in-flight",
                    f"the CTA exits while bulk copies to it are under way ({bar.describe(row)})",
                    None, row, (lane - row * batch.width,),
                )  # fmt: skip
            if bar.row == row and 0 < bar.pending < bar.count:
                batch.report(
                    "mbarrier",
                    f"the CTA exits in the middle of a phase: too many arrivals, or too few, at {bar.describe(row)}",
                    None, row, (),
                )  # fmt: skip
        batch.bulk.exited(row)
        batch.warpgroups.exited(row)
