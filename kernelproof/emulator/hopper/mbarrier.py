"""Executes and checks instructions on mbarriers (PTX ISA): phases, arrivals, transaction bytes, and waiting lanes.

An mbarrier also has the copies that complete on it: their data lands when the first lane has waited for the phase.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from kernelproof.emulator.hopper.async_reads import Elements
from kernelproof.emulator.hopper.cluster_clocks import ClusterClocks
from kernelproof.emulator.hopper.cluster_memory import ClusterMemory
from kernelproof.emulator.hopper.peers import RANK_SHIFT, WITHIN, Peers
from kernelproof.emulator.machine.scheduler import Scheduler, Step
from kernelproof.emulator.memory.copies import AsyncCopies
from kernelproof.emulator.memory.shared import WINDOW_START
from kernelproof.emulator.state.arrays import Array, Mask, Scalar, distinct
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.scopes import ORDERS, Scope, scope_of

# The most arrivals that a phase may have, and the most bytes that it may expect.
MAX_COUNT = (1 << 20) - 1
# Stores the data of a copy. The argument is the tick at which the phase completed: the data is visible to lanes whose
# clock has this tick in the mbarrier's column.
Landing = Callable[[int], None]
# Stands for the async proxy among warps.
ASYNC_PROXY = -1
# The fault of an mbarrier whose initialisation the async proxy may not see.
UNFENCED = "whose initialisation no fence.mbarrier_init or fence.proxy.async follows"


class MBarrier:
    """One mbarrier object.

    ``phase`` counts completed phases. The current phase expects ``count`` arrivals, of which ``pending`` are missing;
    ``bytes`` is the number of bytes that it expects minus those that have arrived. ``clocks``: the clocks that arrivals
    of the current phase release, by the scope that a wait needs to acquire them. ``done_clocks``: the same for the
    phase that was completed last.

    Data lands as late as the PTX ISA allows. ``flights`` are the copies of the current phase. When the phase completes
    they become ``landings``, and they land when the first thread has waited for it. Invariants:

    - a lane that has not waited never reads data that has landed;
    - a phase completes only with pending == bytes == 0;
    - 0 <= pending <= count, unless arrivals of cp.async have raised ``pending``;
    - ``done_clocks[CTA][column] == done_tick``.
    """

    __slots__ = (
        "bytes", "checked_warps", "clocks", "column", "commits", "copy_site", "count", "done_clocks", "done_tick",
        "fenced", "flights", "granules", "had_copies", "init_lane", "init_site", "init_tick", "landings", "offset",
        "pending", "phase", "row",
    )  # fmt: skip

    def __init__(self, row: int, offset: int, count: int, column: int, lane: int, tick: int, site: int) -> None:
        self.row, self.offset, self.count, self.column = row, offset, count, column
        self.init_lane, self.init_tick, self.init_site = lane, tick, site
        # The instruction of the last copy that completes on it.
        self.copy_site: int | None = None
        # The tick of a fence that makes the initialisation visible to the cluster and the asynchronous proxy.
        self.fenced = 0
        self.pending, self.bytes, self.phase = count, 0, 0
        self.clocks: dict[Scope, Array] = {}
        self.done_clocks: dict[Scope, Array] = {}
        self.done_tick = 0
        # Arrivals by asynchronous work in the current phase.
        self.commits = 0
        # Were copies, or such arrivals, part of the phase that was completed last?
        self.had_copies = False
        self.flights: list[Landing] = []
        self.landings: list[Landing] = []
        # Warps, or ``ASYNC_PROXY``, for which the initialisation was checked, so that each is checked, and reported,
        # once.
        self.checked_warps: set[int] = set()
        # The granules of shared memory that it occupies. ``init`` tags them UNWRITTEN, so any other tag there shows
        # that a store has overwritten the mbarrier.
        self.granules = slice(0)

    def release(self, scope: Scope, clock: Array) -> None:
        """Join a clock to that which waits acquire at a scope."""
        old = self.clocks.get(scope)
        self.clocks[scope] = clock if old is None else np.maximum(old, clock)

    def passed(self, token: int, parity: bool) -> bool:
        """Is the phase complete that ``token`` names, by its parity if ``parity``, else by its number?"""
        # The current phase is incomplete, so the phase of the other parity, which precedes it, is the complete one.
        # This is also true before any phase is complete: a wait for parity 1 of a new mbarrier returns immediately.
        return self.phase & 1 != token & 1 if parity else self.phase > token

    def describe(self, row: int) -> str:  # noqa: ARG002
        """The state in words, for reports of deadlocks."""
        missing = f"{self.pending} of {self.count} arrivals"
        if self.bytes > 0:
            missing += f" and {self.bytes} bytes"
        elif self.bytes:
            missing += f", and has {-self.bytes} bytes more than expect_tx named"
        return f"the mbarrier at shared offset {self.offset}, whose phase {self.phase} lacks {missing}"


class MBarriers:
    """The mbarriers of a batch, by row and byte offset in the CTA's shared memory."""

    def __init__(
        self,
        batch: BatchState,
        scheduler: Scheduler,
        clocks: ClusterClocks,
        peers: Peers,
        shared: ClusterMemory,
        copies: AsyncCopies,
    ) -> None:
        self.batch, self.launch, self.scheduler = batch, batch.launch, scheduler
        self.clocks, self.peers, self.shared, self.copies = clocks, peers, shared, copies
        self.hazards = batch.launch.options.hazards
        self.bars: dict[tuple[int, int], MBarrier] = {}
        # Per lane: the result of its last try_wait, and whether it ended by its time limit.
        self.results: Array = np.zeros(batch.size, bool)
        self.timed_out: Array = np.zeros(batch.size, bool)
        # Instruction -> the lanes whose wait there has ended by the time limit.
        self.expired_lanes: dict[int, Array] = {}
        # Per lane: the scope of its last try_wait, and whether that acquires.
        self.orders: Array = np.zeros(batch.size, np.int64)
        # Has any mbarrier changed since waits last ended by their time limit? Without this flag, the lanes of a program
        # that polls in a loop would be woken for ever, and its deadlock would never be reported.
        self.has_changed = True
        scheduler.alarms.append(self._expire)

    # --- places ---

    def places(
        self, address: Array, m: Mask, site: int, token: Array | None = None
    ) -> Iterator[tuple[int, int, int, Array]]:
        """Yield (row, offset, token, lanes) for every mbarrier that the lanes name. Bad addresses are reported."""
        batch = self.batch
        lanes = batch.lanes(m)
        if lanes.size == 0:
            return
        chosen = address[lanes]
        if int(chosen.max()) >> RANK_SHIFT:
            lanes, rows = self.peers.rows(chosen, lanes, site)
            chosen = address[lanes] & np.uint32(WITHIN)
        else:
            rows = batch.row_of[lanes]
        offset = chosen.astype(np.int64) - WINDOW_START
        wrong = (offset < 0) | (offset + 8 > self.shared.size) | (offset & 7 != 0)
        if wrong.any():
            first = int(offset[wrong][0])
            text = f"an mbarrier at shared offset {first}, which is outside of shared memory or no multiple of 8"
            batch.report_lanes("shared-out-of-bounds", text, site, lanes[wrong], first)
            lanes, rows, offset = lanes[~wrong], rows[~wrong], offset[~wrong]
            if lanes.size == 0:
                return
        tokens = np.zeros(len(lanes), np.int64) if token is None else token[lanes].astype(np.int64)
        # One number per (row, offset, token), so that lanes with equal numbers name the same phase of one mbarrier.
        # Offsets have at most 18 bits. Of a token only the low 20 bits count, so phases must differ by less than 2^20.
        key = rows << 40 | offset << 20 | (tokens & 0xFFFFF)
        if (key == key[0]).all():
            yield int(rows[0]), int(offset[0]), int(tokens[0]), lanes
            return
        cuts = np.flatnonzero(key[1:] != key[:-1]) + 1
        if (key[cuts] > key[cuts - 1]).all():
            # The usual case: keys ascend, so the lanes of each mbarrier are consecutive.
            for first, last in pairwise((0, *cuts.tolist(), len(key))):
                yield int(rows[first]), int(offset[first]), int(tokens[first]), lanes[first:last]
            return
        values, inverse = np.unique(key, return_inverse=True)
        for i in range(len(values)):
            members = np.flatnonzero(inverse == i)
            first = members[0]
            yield int(rows[first]), int(offset[first]), int(tokens[first]), lanes[members]

    def _named_barriers(self, address: Array, m: Mask, site: int) -> Iterator[tuple[MBarrier, Array]]:
        """Yield (mbarrier, lanes) for every mbarrier that the lanes name; missing ones are reported."""
        for row, offset, _, lanes in list(self.places(address, m, site)):
            bar = self.find(row, offset, lanes, site)
            if bar is not None:
                yield bar, lanes

    def find(self, row: int, offset: int, lanes: Array, site: int, asynchronous: bool = False) -> MBarrier | None:
        """The mbarrier at a place; None, and a report, if there is none. It is also reported if its initialisation is
        not visible to the lanes or, with ``asynchronous``, to the async proxy."""
        bar = self.bars.get((row, offset))
        batch = self.batch
        if bar is None:
            text = f"no mbarrier has been initialised at shared offset {offset}"
            batch.report_lanes("mbarrier", text, site, lanes, offset)
            return None
        if self.hazards:
            self._check_intact(bar, lanes, site)
            if asynchronous and not bar.fenced and ASYNC_PROXY not in bar.checked_warps:
                bar.checked_warps.add(ASYNC_PROXY)
                text = f"a bulk copy completes on the mbarrier at shared offset {offset}, {UNFENCED}"
                batch.report_lanes("mbarrier", text, site, lanes, offset)
            first, last = int(lanes[0]) >> 5, int(lanes[-1]) >> 5
            if bar.checked_warps.issuperset(range(first, last + 1)):
                return bar
            for warp in distinct(lanes >> 5):
                if int(warp) not in bar.checked_warps:
                    self._check_visible(bar, int(lanes[lanes >> 5 == warp][0]), site)
        return bar

    def _check_intact(self, bar: MBarrier, lanes: Array, site: int) -> None:
        """Report an mbarrier that a store has overwritten: then its granules are no longer tagged UNWRITTEN."""
        tags = self.shared.writer[bar.granules]
        if min(tags.tolist()) == self.shared.UNWRITTEN:
            return
        changed = np.flatnonzero(tags != self.shared.UNWRITTEN)
        if changed.size:
            first = int(changed[0])
            other = self.shared.participant(int(tags[first]), bar.row, bar.granules.start + first, reader=False)
            text = f"the mbarrier at shared offset {bar.offset} has been overwritten since its initialisation"
            self.batch.report_lanes("mbarrier-overwritten", text, site, lanes, bar.offset, other=other)

    def _check_visible(self, bar: MBarrier, lane: int, site: int) -> None:
        """Report an mbarrier whose initialisation does not happen before a lane's use; each warp is checked once."""
        batch, clocks = self.batch, self.clocks
        bar.checked_warps.add(lane >> 5)
        origin = int(batch.row_of[bar.init_lane])
        column = int(clocks.first[origin] + batch.warp[bar.init_lane])
        horizon = clocks.of_lane(lane)
        # The initialisation is visible in three cases: the lane executed it; the lane's clock includes it; or a fence
        # released it before a cluster barrier, even a relaxed one, that the lane has passed.
        started = horizon[clocks.started + clocks.parts[-1]]
        if lane == bar.init_lane or horizon[column] > bar.init_tick or 0 < bar.fenced < started:
            return
        text = (
            f"uses the mbarrier at shared offset {bar.offset} before its initialisation is known to be visible "
            "(no barrier between)"
        )
        batch.report_lane("mbarrier", text, site, lane, bar.offset)

    # --- init and inval ---

    def init(self, address: Array, count: Array, m: Mask, site: int) -> None:
        """mbarrier.init by the lanes of ``m``."""
        batch = self.batch
        for row, offset, _, lanes in self.places(address, m, site):
            number = int(count[lanes[-1]])
            if not 1 <= number <= MAX_COUNT:
                batch.report_lanes(
                    "mbarrier",
                    f"an mbarrier is initialised with a count of {number}; 1 to {MAX_COUNT} are possible",
                    site,
                    lanes,
                    offset,
                )
                number = max(1, min(number, MAX_COUNT))
            old = self.bars.get((row, offset))
            if old is not None or len(lanes) > 1:
                text = f"the mbarrier at shared offset {offset} is initialised again without mbarrier.inval"
                batch.report_lanes("mbarrier", text, site, lanes, offset)
            column = old.column if old is not None else self.clocks.barrier_column(row)
            bar = MBarrier(row, offset, number, column, int(lanes[-1]), self.launch.tick, site)
            self.bars[(row, offset)] = bar
            if self.hazards:
                start, unit = row * self.shared.stride + offset, self.shared.granule
                bar.granules = slice(start // unit, -(-(start + 8) // unit))
                self.shared.writer[bar.granules] = self.shared.UNWRITTEN

    def invalidate(self, address: Array, m: Mask, site: int) -> None:
        """mbarrier.inval by the lanes of ``m``."""
        for bar, _ in self._named_barriers(address, m, site):
            del self.bars[(bar.row, bar.offset)]

    def fence_init(self, m: Mask) -> None:
        """fence.mbarrier_init or a proxy fence by the lanes of ``m``: it releases the mbarriers that they have
        initialised."""
        unfenced = [bar for bar in self.bars.values() if not bar.fenced]
        if unfenced:
            self.launch.tick += 1
            for bar in unfenced:
                if m is None or m[bar.init_lane]:
                    bar.fenced = self.launch.tick

    # --- arrivals ---

    def arrive(
        self,
        address: Array,
        count: Scalar,
        expected: Array | None,
        m: Mask,
        site: int,
        order: int = Scope.CTA | ORDERS,
        drop: bool = False,
    ) -> Array:
        """mbarrier.arrive by every lane of ``m``, after expect_tx of ``expected`` bytes. ``order``: its scope, and
        whether it releases. ``drop``: later phases expect these arrivals no more. Returns the states (lanes,)
        uint64."""
        states = np.zeros(self.batch.size, np.uint64)
        groups = list(self.places(address, m, site))
        # A clock covers accesses before its tick. The new tick separates the lanes' accesses before they arrive, which
        # they release, from later ones.
        self.launch.tick += 1
        for row, offset, _, lanes in groups:
            bar = self.find(row, offset, lanes, site)
            if bar is None:
                continue
            # If no phase can complete before the group's last arrival, all lanes release together (one part). Otherwise
            # each lane releases with its own arrival, and so to the phase in which it arrives.
            total = count * len(lanes) if isinstance(count, int) else int(count[lanes].astype(np.int64).sum())
            parts = 1 if total <= bar.pending else len(lanes)
            if parts == 1 and expected is None and not drop:
                if self.hazards:
                    self._release(bar, lanes, order)
                states[lanes] = bar.phase
                self._count_down(bar, total, drop, lanes, site)
                continue
            for i, lane in enumerate(lanes):
                if self.hazards and i < parts:
                    self._release(bar, lanes if parts == 1 else lanes[i : i + 1], order)
                states[lane] = bar.phase
                if expected is not None:
                    self._add_bytes(bar, int(expected[lane]), lanes, site)
                self._count_down(bar, count if isinstance(count, int) else int(count[lane]), drop, lanes, site)
        return states

    def _release(self, bar: MBarrier, lanes: Array, order: int) -> None:
        """Join the clock that an arrival of lanes releases to those of the current phase. ``order``: the arrival's
        scope, and whether it releases.

        A release makes accesses visible that happen before it. A relaxed arrival makes those visible that happen before
        the lanes' last fence. Both do so only for lanes within the arrival's scope. For lanes beyond its scope, an
        arrival still implies that those accesses have ended, so the memory that they read may be overwritten.
        """
        clocks, scope = self.clocks, scope_of(order)
        # For lanes of the mbarrier's own CTA it is enough that waits acquire at CTA scope, for other lanes cluster
        # scope is needed.
        sides = [(lanes, Scope.CTA)]
        if clocks.cluster > 1:
            in_own_cta = self.batch.row_of[lanes] == bar.row
            sides = [(lanes[in_own_cta], Scope.CTA), (lanes[~in_own_cta], Scope.CLUSTER)]
        for releasing, reach in sides:
            if not releasing.size:
                continue
            clock = clocks.publish(releasing) if order & ORDERS else clocks.knowledge(releasing)
            visible = clock if order & ORDERS else self.shared.fenced_by(releasing, reach)
            if visible is not None and scope >= reach:
                bar.release(reach, visible)
            if visible is not clock or reach > Scope.CTA:
                bar.release(Scope.CTA, clocks.only_ended(clock))

    def _count_down(self, bar: MBarrier, n: int, drop: bool, lanes: Array, site: int) -> None:
        """Count ``n`` arrivals; the last one completes the phase. ``drop``: later phases expect ``n`` fewer."""
        if n > bar.pending:
            text = (
                f"{n} arrivals at the mbarrier at shared offset {bar.offset}, whose phase {bar.phase} expects "
                f"{bar.pending} more of {bar.count}"
            )
            self.batch.report_lanes("mbarrier", text, site, lanes, bar.offset)
            n = bar.pending
        bar.pending -= n
        if drop:
            bar.count = max(1, bar.count - n)
        self._settle(bar)

    def commit(self, row: int, offset: int, clock: Array, lanes: Array, site: int) -> None:
        """Count one arrival (tcgen05.commit), which comes when the work that the lanes have begun is complete. Lanes
        that wait for the phase acquire ``clock``."""
        bar = self.find(row, offset, lanes, site)
        if bar is not None:
            if self.hazards:
                bar.release(Scope.CTA, clock)
            bar.commits += 1
            self._count_down(bar, 1, False, lanes, site)

    def copies_arrive(self, address: Array, noinc: bool, m: Mask, site: int) -> None:
        """cp.async.mbarrier.arrive: the lanes' earlier cp.async copies land with the phase, and each lane arrives once
        for them. Without ``noinc`` the phase expects this arrival in addition to its count."""
        for bar, lanes in self._named_barriers(address, m, site):
            for copy in self.copies.take(lanes):
                bar.flights.append(self._landing_of(copy.destination.elements, copy.data, copy.destination.width, bar))
                bar.copy_site = site
            if not noinc:
                bar.pending += len(lanes)
            mask = np.zeros(self.batch.size, bool)
            mask[lanes] = True
            self.arrive(address, 1, None, mask, site)

    def _landing_of(self, indices: Array, data: Array, width: int, bar: MBarrier) -> Landing:
        """A function that stores a copy's data in the elements with these indices. It is to be called when the
        mbarrier's phase has been waited for."""
        return lambda tick: self.shared.land(indices, data, bar.column, tick, width)

    def expect(self, address: Array, expected: Array, m: Mask, site: int) -> None:
        """mbarrier.expect_tx by the lanes of ``m``."""
        for bar, lanes in self._named_barriers(address, m, site):
            self._add_bytes(bar, int(expected[lanes].astype(np.int64).sum()), lanes, site)

    def _add_bytes(self, bar: MBarrier, nbytes: int, lanes: Array, site: int) -> None:
        """Expect more bytes in the current phase."""
        bar.bytes += nbytes
        if bar.bytes > MAX_COUNT:
            text = (
                f"{bar.bytes} bytes are expected at the mbarrier at shared offset {bar.offset}; at most {MAX_COUNT} "
                "are possible"
            )
            self.batch.report_lanes("mbarrier", text, site, lanes, bar.offset)

    def complete(self, address: Array, nbytes: Array, m: Mask, site: int) -> None:
        """mbarrier.complete_tx by the lanes of ``m``."""
        for bar, lanes in self._named_barriers(address, m, site):
            bar.bytes -= int(nbytes[lanes].astype(np.int64).sum())
            self._settle(bar)

    def start_copy(
        self, elements: Elements, data: Array, width: int, bar: MBarrier, lane: int, row: int, site: int
    ) -> None:
        """Start a copy of ``data`` to elements of ``width`` bytes of a row's shared memory, which completes on the
        mbarrier."""
        self.shared.check_async_write(elements, lane, row, site, width)
        self.shared.start_write(elements.indices, bar.column, site, width)
        self.attach_copy(elements.indices, data, width, bar, site)

    def attach_copy(self, indices: Array, data: Array, width: int, bar: MBarrier, site: int) -> None:
        """Let data that a copy has begun to write (``ClusterMemory.start_write``) complete on the mbarrier.
        ``indices``: those of its elements of ``width`` bytes. Its bytes count as arrived now; the data lands when the
        first thread has waited for the phase."""
        bar.flights.append(self._landing_of(indices, data, width, bar))
        bar.copy_site = site
        bar.bytes -= data.size * width
        self._settle(bar)

    # --- phases ---

    def _settle(self, bar: MBarrier) -> None:
        """If no arrivals and no bytes are missing, complete the phase and wake the lanes that wait for it."""
        self.has_changed = True
        if bar.pending or bar.bytes:
            return
        self.launch.tick += 1
        bar.done_tick = self.launch.tick
        clock = bar.clocks.get(Scope.CTA)
        clock = self.clocks.empty() if clock is None else clock.copy()
        self.clocks.set(clock, bar.column, bar.done_tick)
        bar.done_clocks, bar.clocks = bar.clocks | {Scope.CTA: clock}, {}
        # ``landings`` may still have copies of an earlier phase, for which no lane has waited. They remain before the
        # new ones, so that data lands in the order of phases.
        bar.had_copies, bar.commits = bool(bar.flights or bar.commits), 0
        bar.landings += bar.flights
        bar.flights = []
        bar.phase += 1
        bar.pending = bar.count
        self.launch.version += 1
        self._wake(bar)

    def _wake(self, bar: MBarrier) -> None:
        """Wake the lanes whose phase is complete. All of them acquire before any of them runs."""
        free = np.zeros(self.batch.size, bool)
        for sleeper in self.scheduler.waiting:
            if sleeper.barrier is bar and bar.passed(sleeper.token >> 1, bool(sleeper.token & 1)):
                free |= sleeper.mask
        if free.any():
            lanes = np.flatnonzero(free)
            for order in distinct(np.sort(self.orders[lanes])):
                self._acquire(bar, lanes[self.orders[lanes] == order], int(order))
            self.results[lanes] = True
            self.timed_out[lanes] = False
            self.scheduler.release(bar, free)

    def _acquire(self, bar: MBarrier, lanes: Array, order: int) -> None:
        """Handle lanes whose wait has found the last phase complete: its data lands, and the lanes acquire the clocks
        that its arrivals released at the scope of the wait or a narrower one. After a relaxed wait the released
        accesses have only ended for the lanes; they become visible at the lanes' next fence."""
        landings, bar.landings = bar.landings, []
        for land in landings:
            land(bar.done_tick)
        if not self.hazards:
            return
        for scope, clock in bar.done_clocks.items():
            if scope > scope_of(order):
                continue
            if order & ORDERS:
                self.clocks.acquire(lanes, clock)
            else:
                self.clocks.acquire(lanes, self.clocks.only_ended(clock))
                self.shared.learn(lanes, scope, clock)

    def try_wait(self, address: Array, token: Array, parity: bool, order: int, m: Mask, resume: int, site: int) -> Step:
        """mbarrier.try_wait: lanes whose phase is not complete sleep. ``order``: the scope, and whether it acquires.

        A lane's first wait at this instruction (in adverse order: every wait, but never two in a row) ends by the time
        limit: the lane is told that the phase is not complete. Hardware may do so even if the phase is complete, unless
        its completion happens before the wait.
        """
        batch = self.batch
        self.orders[batch.lanes(m)] = order
        if self.launch.counters is not None:
            waiting = (batch.running(m) & ~self.timed_out).reshape(-1, 32).any(axis=1)
            self.launch.counters.mbarrier_waits += int(waiting.sum())
        asleep = None
        for row, offset, phase, lanes in self.places(address, m, site, token & 1 if parity else token):
            bar = self.find(row, offset, lanes, site)
            complete = bar is None or bar.passed(phase, parity)
            if bar is not None:
                lanes = self._expire_early(bar, complete, lanes, site)
                if lanes.size == 0:
                    continue
            if bar is None or complete:
                self.results[lanes] = True
                self.timed_out[lanes] = False
                if bar is not None and bar.phase:
                    self._acquire(bar, lanes, order)
                continue
            if asleep is None:
                asleep = np.zeros(batch.size, bool)
            asleep[lanes] = True
            mask = np.zeros(batch.size, bool)
            mask[lanes] = True
            # Lanes of one mbarrier may wait for different phases: the token says which, and in which form.
            self.scheduler.sleep(bar, mask, resume, site, phase << 1 | int(parity))
        if asleep is None:
            return self.scheduler.go(resume, m)
        awake = batch.running(m) & ~asleep
        if awake.any():
            return self.scheduler.next(resume, awake)
        return self.scheduler.pick()

    def _expire_early(self, bar: MBarrier, complete: bool, lanes: Array, site: int) -> Array:
        """End the wait of lanes by its time limit, unless the phase's completion happens before the wait, and never
        twice in a row. Returns the lanes whose wait continues."""
        expired = self.expired_lanes.setdefault(site, np.zeros(self.batch.size, bool))
        due = self.launch.options.adverse or not expired[lanes].all()
        if not due or self.timed_out[lanes].all():
            return lanes
        is_known = self._completion_is_known(bar, lanes) if complete else np.zeros(len(lanes), bool)
        ended = lanes[~is_known]
        self.results[ended] = False
        self.timed_out[ended] = expired[ended] = True
        return lanes[is_known]

    def _completion_is_known(self, bar: MBarrier, lanes: Array) -> Array:
        """Per lane: does the completion of the last phase certainly happen before its wait? That is so if the lane's
        clock includes the completion, or if it includes all arrivals of the phase, which had no asynchronous work."""
        if not self.hazards or bar.phase == 0:
            return np.ones(len(lanes), bool)
        batch, clocks = self.batch, self.clocks
        # The entries of the cluster's warps, which have the first columns (see ClusterClocks), in the phase's clock.
        arrived = bar.done_clocks[Scope.CTA][clocks.ended :][: clocks.wgmma]
        out = np.zeros(len(lanes), bool)
        for warp in distinct(lanes >> 5):
            lane = int(lanes[lanes >> 5 == warp][0])
            horizon = clocks.of_lane(lane)
            unknown = arrived > horizon[clocks.ended :][: clocks.wgmma]
            unknown[int(clocks.first[batch.row_of[lane]] + batch.warp[lane])] = False
            is_known = horizon[bar.column] >= bar.done_tick or not (bar.had_copies or unknown.any())
            out[lanes >> 5 == warp] = is_known
        return out

    def test_wait(self, address: Array, token: Array, parity: bool, order: int, m: Mask, site: int) -> Array:
        """mbarrier.test_wait: is the phase complete now? Returns a bool per lane."""
        out = np.zeros(self.batch.size, bool)
        for row, offset, phase, lanes in self.places(address, m, site, token & 1 if parity else token):
            bar = self.find(row, offset, lanes, site)
            if bar is None or bar.passed(phase, parity):
                out[lanes] = True
                if bar is not None and bar.phase:
                    self._acquire(bar, lanes, order)
        return out

    def waited(self) -> Array:
        """The result of the last try_wait of each lane."""
        return self.results.copy()

    def _expire(self) -> bool:
        """End all waits of try_wait by their time limit; returns whether any ended. The scheduler calls this when no
        lane can run. It ends waits only once per change of an mbarrier, so that a deadlock is found in the end."""
        if not self.has_changed:
            return False
        self.has_changed = False
        sleepers = [s for s in self.scheduler.waiting if isinstance(s.barrier, MBarrier)]
        if not sleepers:
            return False
        free = np.logical_or.reduce([s.mask for s in sleepers])
        self.results[free] = False
        for bar in {s.barrier for s in sleepers}:
            self.scheduler.release(bar, free)
        return True

    # --- the end ---

    def exited(self, row: int) -> None:
        """Report copies in flight to a CTA that has ended, and phases of its mbarriers for which some arrivals, but not
        all, have come."""
        for bar in self.bars.values():
            if bar.row != row:
                continue
            if bar.flights or bar.landings:
                text = f"the CTA exits while bulk copies to it are under way ({bar.describe(row)})"
                self.batch.report("in-flight", text, bar.copy_site, row, (), address=bar.offset)
            if 0 < bar.pending < bar.count:
                text = f"the CTA exits in the middle of a phase: too many arrivals, or too few, at {bar.describe(row)}"
                self.batch.report("phase-at-exit", text, bar.init_site, row, (), address=bar.offset)
