"""Vector clocks of the warps of a cluster, over warps, asynchronous readers and mbarriers.

This is the causality order of the PTX memory consistency model for shared memory of a cluster. As in ``warp_clocks``,
time is the launch's tick, and clocks are kept per warp, with two entries for each.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kernelproof.emulator.state.arrays import Array, Mask, distinct
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.reports import EmulatorError
from kernelproof.emulator.state.warp_clocks import WarpClocks

MAX_BARRIERS = 128


class ClusterClocks(WarpClocks):
    """The clocks of a batch of whole clusters.

    ``table`` has shape (row, warp, column). Each column belongs to an agent that accesses memory. The columns are, in
    this order: the cluster's warps, the wgmma of its warpgroups, the bulk stores of its warps, the bulk copies that
    each mbarrier completes, and the cluster barrier, whose tick says that all CTAs have started. Last, ``together``
    columns after those of the warps, come the warps with all their lanes (see ``WarpClocks``). An entry is a tick:
    what the column's agent did before that tick happens before what the warp does now. Entries never shrink.

    Order has two degrees. What a column did before its entry is *visible*: the warp may read what it wrote. A second
    entry, ``ended`` columns further, says what has *ended*: what it read before may be overwritten. Within a CTA both
    are the same; an arrival of CTA scope at another CTA's mbarrier passes on the second one only. Without clusters
    ``ended`` is 0, and both are one entry. Invariant: visible <= ended.

    In kernels with fences that are restricted to shared memory, a third entry, ``device`` columns after the first,
    says what is visible in global memory; in others ``device`` is 0. Invariant: visible in global memory <= visible.

    What only some lanes of a warp have learned is kept in ``private``, until those lanes synchronise with the others.
    """

    def __init__(self, batch: BatchState) -> None:
        super().__init__(batch)
        self.cluster = batch.cluster_size
        self.warps = batch.warps_per_cta
        self.groups = self._products()
        # The first column of each kind.
        self.wgmma = self.cluster * self.warps
        self.bulk = self.wgmma + self.cluster * self.groups
        self.barriers = self.bulk + self.cluster * self.warps
        self.started = self.barriers + MAX_BARRIERS * self.cluster
        self.together = self.started + 1
        self.columns = self.together + self.cluster * self.warps
        self.ended = self.columns if self.cluster > 1 else 0
        first = self.columns + self.ended
        self.device = first if batch.launch.kernel.restricts else 0
        self.length = first + (self.columns if self.device else 0)
        # Without clusters, or without restricted fences, parts coincide.
        self.parts = tuple(sorted({0, self.ended, self.device}))
        self.ticks: Array = np.zeros((batch.count, self.warps, self.length), np.int64)
        self.table = self.ticks
        # (row, warp) -> lanes of the warp (32 bools) and what they alone have learned.
        self.private: dict[tuple[int, int], list[tuple[Array, Array]]] = {}
        # Per row: the column of its warp 0.
        self.first: Array = batch.rank * self.warps
        self.used_barriers: dict[int, int] = {}
        # The columns of the warps of the CTA of rank 0.
        self.of_warps = np.concatenate((np.arange(self.warps), np.arange(self.warps) + self.together))
        for row in range(batch.count):
            self.set(self.ticks[row], self.of_warps + self.first[row], batch.launch.tick)

    # --- columns ---

    def _products(self) -> int:
        """Columns per CTA for the products that read shared memory: one per warpgroup."""
        return -(-self.warps // 4)

    def agent(self, group: int) -> str:
        """Who reads shared memory for a CTA's column of products, in words."""
        return f"a wgmma of warpgroup {group}"

    def empty(self) -> Array:
        """A clock that knows nothing."""
        return np.zeros(self.length, np.int64)

    def only_ended(self, clock: Array) -> Array:
        """A clock that knows the same accesses to have ended, and none of them to be visible."""
        if not self.ended:
            return self.empty()
        out = self.in_shared(clock).copy()
        out[: self.ended] = 0
        return out

    def in_shared(self, clock: Array) -> Array:
        """A copy of a clock that knows nothing of global memory."""
        out = clock.copy()
        out[self.device or self.length :] = 0
        return out

    def own(self, row: int) -> slice:
        """The columns of a row's warps, for what some of their lanes have released."""
        first = int(self.first[row])
        return slice(first, first + self.warps)

    def column(self, row: int, warp: int) -> int:
        return int(self.first[row]) + warp

    def present(self, row: int, warp: int, lanes: Array | None = None) -> Array:
        """The clock that a warp's release publishes: see ``WarpClocks.present``."""
        clock: Array = self.ticks[row, warp].copy()
        for _, learned in self.private.get((row, warp), ()):
            np.maximum(clock, learned, out=clock)
        self._cover(clock, row, warp, lanes, self.launch.tick + 1)
        return clock

    def wgmma_column(self, row: int, group: int) -> int:
        """The column of a warpgroup's wgmma."""
        return int(self.wgmma + self.batch.rank[row] * self.groups + group)

    def bulk_column(self, row: int, warp: int) -> int:
        """The column of a warp's bulk stores."""
        return int(self.bulk + self.batch.rank[row] * self.warps + warp)

    def barrier_column(self, row: int) -> int:
        """A column for a new mbarrier of this CTA. Raises EmulatorError if there are too many."""
        cluster = row // self.cluster
        used = self.used_barriers.get(cluster, 0)
        if used >= MAX_BARRIERS * self.cluster:
            raise EmulatorError(f"more than {MAX_BARRIERS} mbarriers per CTA are not modelled")
        self.used_barriers[cluster] = used + 1
        return self.barriers + used

    # --- what is known ---

    def horizon(self, row: Array | int, warp: Array | int, other: Array, together: Array | bool = False) -> Array:
        """See ``WarpClocks.horizon``; what counts is visibility in global memory."""
        return np.asarray(self.ticks[row, warp, other + self.first[row] + self.device + self.together * together])

    def total(self, row: int, warp: int) -> int:
        learned = sum(int(clock.sum()) for _, clock in self.private.get((row, warp), ()))
        return int(np.add.reduce(self.ticks[row, warp])) + learned

    def is_before(
        self, row: int, warp: int, other_row: int, other_warp: int, tick: int, clocks: Iterable[Array]
    ) -> bool:
        if row // self.cluster != other_row // self.cluster:
            return False
        column = int(self.first[other_row]) + other_warp
        learned = (clock for _, clock in self.private.get((row, warp), ()))
        return any(int(clock[column]) > tick for clock in (self.ticks[row, warp], *learned, *clocks))

    def ordered_in_cluster(self, row: int, warp: int, other_row: int, other_warp: int, tick: int, read: bool) -> bool:
        """Does an access (``read``: a read) of a warp of the same cluster happen before a warp's present?"""
        if row // self.cluster != other_row // self.cluster:
            return False
        column = self.first[other_row] + other_warp + (self.ended if read else self.device)
        return bool(self.ticks[row, warp, column] > tick)

    def of_lane(self, lane: int) -> Array:
        """The clock of one lane; do not change it."""
        batch = self.batch
        row, warp = int(batch.row_of[lane]), int(batch.warp[lane])
        horizon: Array = self.ticks[row, warp]
        for lanes, clock in self.private.get((row, warp), ()):
            if lanes[batch.lane[lane]]:
                horizon = np.maximum(horizon, clock)
        return horizon

    def of_cta(self, row: int) -> Array:
        """The union of the clocks of a CTA's warps and lanes."""
        clock: Array = self.ticks[row].max(axis=0)
        for (private_row, _), entries in self.private.items():
            if private_row == row:
                for _, learned in entries:
                    clock = np.maximum(clock, learned)
        return clock

    def ordered_privately(self, lanes: Array, columns: Array, ticks: Array) -> Array:
        """Per element: does an access happen before this lane by what the lane has learned apart from its warp?"""
        batch = self.batch
        out = np.zeros(len(lanes), bool)
        warps = batch.row_of[lanes].astype(np.int64) * batch.warps_per_cta + batch.warp[lanes]
        for number in np.unique(warps):
            entries = self.private.get(divmod(int(number), batch.warps_per_cta), ())
            own = np.flatnonzero(warps == number) if entries else warps
            for members, clock in entries:
                out[own] |= members[batch.lane[lanes[own]]] & (clock[columns[own]] > ticks[own])
        return out

    # --- release and acquire ---

    def knowledge(self, lanes: Array) -> Array:
        """The union of the clocks of the warps of these lanes, with what the lanes themselves have learned."""
        batch = self.batch
        row, last = int(batch.row_of[lanes[0]]), int(batch.row_of[lanes[-1]])
        if row != last:
            rows = batch.row_of[lanes]
            clocks = [self.knowledge(lanes[rows == r]) for r in distinct(rows)]
            return np.asarray(np.maximum.reduce(clocks))
        warps = distinct(batch.warp[lanes])
        clock: Array = self.ticks[row, warps].max(axis=0)
        if self.private:
            for warp in warps:
                for members, learned in self.private.get((row, int(warp)), ()):
                    if members[batch.lane[lanes[batch.warp[lanes] == warp]]].any():
                        clock = np.maximum(clock, learned)
        return clock

    def publish(self, lanes: Array, whole: bool = False) -> Array:
        """The clock that a release by these lanes publishes: all that their warps know, and what they did before this
        tick. ``whole``: the rest of their warps does the same, or the release does not count. The caller has advanced
        the tick."""
        clock, tick = self.knowledge(lanes), self.batch.launch.tick
        warps = distinct(lanes >> 5)
        columns = self.first[warps // self.warps] + warps % self.warps
        self.set(clock, columns, tick)
        are_whole = np.ones(len(warps), bool) if whole else self.releases.are_whole(lanes, warps)
        together = columns + self.together
        if are_whole.all():
            self.set(clock, together, tick)
            return clock
        apart = ~are_whole
        self.set(clock, together[are_whole], tick)
        self.releases.add(lanes if apart.all() else lanes[apart[np.searchsorted(warps, lanes >> 5)]], tick)
        gathered = self.releases.gathered.reshape(-1)[warps[apart]]
        for part in self.parts:
            at = together[apart] + part
            clock[at] = np.maximum(clock[at], gathered)
        return clock

    def acquire(self, lanes: Array, clock: Array) -> None:
        """These lanes learn a clock: a whole warp as a warp, a part of one privately until it synchronises."""
        batch = self.batch
        warps = lanes >> 5
        starts = distinct(warps)
        if len(lanes) == 32 * len(starts):
            # The usual case: whole warps. Lanes are grouped by warp, so 32 lanes per distinct warp means that none is
            # missing. The reshaped table has one row per warp of the batch.
            table = self.ticks.reshape(-1, self.ticks.shape[2])
            table[starts] = np.maximum(table[starts], clock)
            return
        for start in starts:
            own_lanes = lanes[warps == start] & 31
            row, warp = divmod(int(start), self.warps)
            alive = batch.alive[32 * start : 32 * start + 32]
            if len(own_lanes) >= int(alive.sum()):
                # All lanes that are alive: exited ones learn nothing and synchronise with nobody.
                np.maximum(self.ticks[row, warp], clock, out=self.ticks[row, warp])
                continue
            members = np.zeros(32, bool)
            members[own_lanes] = True
            entries = self.private.setdefault((row, warp), [])
            for i, (others, old) in enumerate(entries):
                if np.array_equal(others, members):
                    entries[i] = (members, np.maximum(old, clock))
                    break
            else:
                entries.append((members, clock.copy()))

    def learn(self, row: int, warps: Array, column: int, tick: int) -> None:
        """Warps of a row learn that a column's accesses before a tick have ended."""
        for part in self.parts:
            self.ticks[row, warps, column + part] = np.maximum(self.ticks[row, warps, column + part], tick)

    def _share(self, synchronised: Array | None) -> None:
        """The lanes of ``synchronised`` warps (bool per row and warp; None: all) learn each other's private clocks."""
        for row, warp in list(self.private):
            if synchronised is None or synchronised[row, warp]:
                for _, clock in self.private.pop((row, warp)):
                    np.maximum(self.ticks[row, warp], clock, out=self.ticks[row, warp])

    # --- barriers ---

    def meet_all(self) -> None:
        self.base[:] = self.launch.tick
        self._share(None)
        for row in range(self.batch.count):
            horizon = self.ticks[row]
            best = horizon.max(axis=0)
            self.set(best, self.of_warps + self.first[row], self.launch.tick)
            horizon[:] = best

    def meet(self, row: int, warps: Array, waiting: Array, whole: bool, released: Array | None) -> None:
        synchronised = np.zeros((self.batch.count, self.warps), bool)
        synchronised[row, warps] = True
        self._share(synchronised)
        horizon = self.ticks[row]
        best = horizon[warps].max(axis=0)
        for column in (self.first[row], self.first[row] + self.together):
            self.set(best, warps + column, self.launch.tick)
        horizon[waiting] = best if released is None else np.maximum(best, released)
        if whole and len(waiting) == len(warps):
            self.base[row] = self.launch.tick

    def warp_sync(self, m: Mask) -> None:
        if not self.launch.options.hazards:
            return
        self.launch.tick += 1
        synchronised = self.warps_in(m)
        if self.private:
            self._share(synchronised)
        rows, warps = np.nonzero(synchronised)
        for part in self.parts:
            column = warps + self.first[rows] + part
            self.ticks[rows, warps, column] = self.ticks[rows, warps, column + self.together] = self.launch.tick
