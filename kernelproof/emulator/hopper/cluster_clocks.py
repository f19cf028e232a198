"""Computes which accesses to a cluster's shared memory happen before others, by vector clocks of its warps.

The clocks implement the causality order of the PTX memory consistency model. As in ``warp_clocks``, time is the
launch's tick, and there is a clock per warp, which has two entries for each warp. It also has entries for asynchronous
readers and mbarriers.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kernelproof.emulator.state.arrays import Array, Mask, Scalar, distinct
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.reports import EmulatorError
from kernelproof.emulator.state.warp_clocks import WarpClocks

MAX_BARRIERS = 128


class ClusterClocks(WarpClocks):
    """The clocks of a batch, which consists of complete clusters.

    ``table`` has shape (row, warp, column). Each column belongs to an agent that accesses memory. The columns are, in
    this order: the cluster's warps, the wgmma of its warpgroups, the bulk stores of its warps, the bulk copies that
    each mbarrier completes, and the cluster barrier, whose tick says that all CTAs have started. The last columns,
    ``all_lanes_offset`` after those of the warps, stand for the warps with all their lanes (see ``WarpClocks``). An
    entry is a tick: accesses of the column's agent before that tick happen before the warp's next access. Entries never
    shrink.

    Order has two degrees. Accesses of an agent before its entry are *visible*: the warp may read what they wrote. A
    second entry, ``ended`` columns further, says which accesses have *ended*: the warp may overwrite what they read.
    Within a CTA both entries are equal; an arrival of CTA scope at another CTA's mbarrier raises only the second one.
    Without clusters ``ended`` is 0, and both are the same entry. Invariant: visible <= ended.

    In kernels with fences that are restricted to shared memory, a third entry, ``device`` columns after the first,
    says which writes to global memory are visible; in other kernels ``device`` is 0. Invariant: the third entry is at
    most the first.

    ``private`` has the clocks that only some lanes of a warp have acquired, until those lanes synchronise with the
    others.
    """

    def __init__(self, batch: BatchState) -> None:
        super().__init__(batch)
        self.cluster = batch.cluster_size
        self.warps = batch.warps_per_cta
        self.groups = self._product_columns()
        # The first column of each kind.
        self.wgmma = self.cluster * self.warps
        self.bulk = self.wgmma + self.cluster * self.groups
        self.barriers = self.bulk + self.cluster * self.warps
        self.started = self.barriers + MAX_BARRIERS * self.cluster
        self.all_lanes_offset = self.started + 1
        self.columns = self.all_lanes_offset + self.cluster * self.warps
        self.ended = self.columns if self.cluster > 1 else 0
        first = self.columns + self.ended
        self.device = first if batch.launch.kernel.restricts else 0
        self.length = first + (self.columns if self.device else 0)
        # The distances of the two or three entries of an agent. Without clusters, or without restricted fences, some
        # entries are the same.
        self.parts = tuple(sorted({0, self.ended, self.device}))
        self.ticks: Array = np.zeros((batch.count, self.warps, self.length), np.int64)
        self.table = self.ticks
        # (row, warp) -> pairs of lanes (32 bools) and the clock that only they have acquired.
        self.private: dict[tuple[int, int], list[tuple[Array, Array]]] = {}
        # Per row: the column of its warp 0.
        self.first: Array = batch.rank * self.warps
        self.used_barriers: dict[int, int] = {}
        # The columns of the warps of the CTA of rank 0.
        self.of_warps = np.concatenate((np.arange(self.warps), np.arange(self.warps) + self.all_lanes_offset))
        for row in range(batch.count):
            self.set(self.ticks[row], self.of_warps + self.first[row], batch.launch.tick)

    # --- columns ---

    def _product_columns(self) -> int:
        """The number of columns per CTA for matrix products that read shared memory: one per warpgroup."""
        return -(-self.warps // 4)

    def agent(self, reader: int) -> str:
        """Whose reads a column of matrix products orders, in words for reports. ``reader``: its number among the CTA's
        columns of matrix products."""
        return f"a wgmma of warpgroup {reader}"

    def empty(self) -> Array:
        """A clock whose entries are all 0."""
        return np.zeros(self.length, np.int64)

    def only_ended(self, clock: Array) -> Array:
        """A copy of a clock in which the same accesses have ended, but none are visible."""
        if not self.ended:
            return self.empty()
        out = self.in_shared(clock).copy()
        out[: self.ended] = 0
        return out

    def in_shared(self, clock: Array) -> Array:
        """A copy of a clock in which no writes to global memory are visible."""
        out = clock.copy()
        out[self.device or self.length :] = 0
        return out

    def own(self, row: int) -> slice:
        """The columns of a row's warps, by which releases of some lanes are ordered."""
        first = int(self.first[row])
        return slice(first, first + self.warps)

    def column(self, row: int, warp: int) -> int:
        """The column of a warp's accesses."""
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

    # --- questions about order ---

    def horizon(self, row: Array | int, warp: Array | int, other: Array, by_all_lanes: Array | bool = False) -> Array:
        """See ``WarpClocks.horizon``; the entries are those for visibility in global memory."""
        return np.asarray(
            self.ticks[row, warp, other + self.first[row] + self.device + self.all_lanes_offset * by_all_lanes]
        )

    def contents(self, row: int, warp: int) -> bytes:
        learned = (clock.tobytes() for _, clock in self.private.get((row, warp), ()))
        return b"".join((self.ticks[row, warp].tobytes(), *learned))

    def is_before(
        self, row: int, warp: int, other_row: int, other_warp: int, tick: int, clocks: Iterable[Array]
    ) -> bool:
        """Whether an access of another warp at a tick happens before the present of a warp, by its own clock or by one
        of ``clocks``."""
        if row // self.cluster != other_row // self.cluster:
            return False
        column = int(self.first[other_row]) + other_warp
        learned = (clock for _, clock in self.private.get((row, warp), ()))
        return any(int(clock[column]) > tick for clock in (self.ticks[row, warp], *learned, *clocks))

    def ordered_in_cluster(self, row: int, warp: int, other_row: int, other_warp: int, tick: int, read: bool) -> bool:
        """Does an access of ``other_warp`` at ``tick`` happen before the next access of ``warp``? False for warps of
        different clusters. ``read``: the access is a read, so it is enough that it has ended."""
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
        """Per element: does an access at ``ticks`` of an agent (``columns``) happen before the lane's next access, by a
        clock that the lane has acquired without its warp? Shape (elements,), bool."""
        batch = self.batch
        out = np.zeros(len(lanes), bool)
        warps = batch.row_of[lanes].astype(np.int64) * batch.warps_per_cta + batch.warp[lanes]
        for number in np.unique(warps):
            entries = self.private.get(divmod(int(number), batch.warps_per_cta), ())
            of_warp = np.flatnonzero(warps == number) if entries else warps
            for members, clock in entries:
                out[of_warp] |= members[batch.lane[lanes[of_warp]]] & (clock[columns[of_warp]] > ticks[of_warp])
        return out

    # --- release and acquire ---

    def knowledge(self, lanes: Array) -> Array:
        """The union of the clocks of these lanes: those of their warps, and those that only they have acquired."""
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
        """The clock that a release by these lanes publishes: the union of their clocks, and their own accesses before
        the present tick. ``whole``: the release counts as a release by all lanes of their warps. The caller has
        advanced the tick."""
        clock, tick = self.knowledge(lanes), self.batch.launch.tick
        warps = distinct(lanes >> 5)
        columns = self.first[warps // self.warps] + warps % self.warps
        self.set(clock, columns, tick)
        are_whole = np.ones(len(warps), bool) if whole else self.releases.are_whole(lanes, warps)
        all_lanes_columns = columns + self.all_lanes_offset
        if are_whole.all():
            self.set(clock, all_lanes_columns, tick)
            return clock
        # Only some lanes of the other warps release. For all lanes of such a warp, the release covers only accesses
        # before the last instruction that the lanes executed together, at tick ``gathered``.
        are_partial = ~are_whole
        self.set(clock, all_lanes_columns[are_whole], tick)
        self.releases.add(lanes if are_partial.all() else lanes[are_partial[np.searchsorted(warps, lanes >> 5)]], tick)
        gathered = self.releases.gathered.reshape(-1)[warps[are_partial]]
        for part in self.parts:
            entries = all_lanes_columns[are_partial] + part
            clock[entries] = np.maximum(clock[entries], gathered)
        return clock

    def acquire(self, lanes: Array, clock: Array) -> None:
        """Join a clock to the clocks of these lanes. If they are only some lanes of a warp, the clock is kept as
        ``private`` until they synchronise with the others."""
        batch = self.batch
        warps = lanes >> 5
        batch_warps = distinct(warps)
        if len(lanes) == 32 * len(batch_warps):
            # The usual case: complete warps. Lanes are grouped by warp, so 32 lanes per distinct warp means that none
            # is missing. The reshaped table has one row per warp of the batch.
            table = self.ticks.reshape(-1, self.ticks.shape[2])
            table[batch_warps] = np.maximum(table[batch_warps], clock)
            return
        for number in batch_warps:
            own_lanes = lanes[warps == number] & 31
            row, warp = divmod(int(number), self.warps)
            alive = batch.alive[32 * number : 32 * number + 32]
            if len(own_lanes) >= int(alive.sum()):
                # These are all lanes that have not exited, so they count as the complete warp.
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
        """Raise the entry of a column to a tick for warps of a row, in all degrees of order."""
        for part in self.parts:
            self.ticks[row, warps, column + part] = np.maximum(self.ticks[row, warps, column + part], tick)

    def _join_private(self, synchronised: Array | None) -> None:
        """Join the private clocks of lanes to the clock of their warp. ``synchronised``: the warps, bool (row, warp);
        None: all."""
        for row, warp in list(self.private):
            if synchronised is None or synchronised[row, warp]:
                for _, clock in self.private.pop((row, warp)):
                    np.maximum(self.ticks[row, warp], clock, out=self.ticks[row, warp])

    # --- barriers ---

    def meet_all(self) -> None:
        """All warps of each CTA meet: each knows what any of them knew."""
        self.base[:] = self.launch.tick
        self._join_private(None)
        for row in range(self.batch.count):
            horizon = self.ticks[row]
            joined = horizon.max(axis=0)
            self.set(joined, self.of_warps + self.first[row], self.launch.tick)
            horizon[:] = joined

    def meet(self, row: int, warps: Array, waiting: Array, whole: bool, released: Array | None) -> None:
        """The base class's ``meet``, with clocks of all warps of the cluster."""
        synchronised = np.zeros((self.batch.count, self.warps), bool)
        synchronised[row, warps] = True
        self._join_private(synchronised)
        horizon = self.ticks[row]
        joined = horizon[warps].max(axis=0)
        for column in (self.first[row], self.first[row] + self.all_lanes_offset):
            self.set(joined, warps + column, self.launch.tick)
        horizon[waiting] = joined if released is None else np.maximum(joined, released)
        if whole and len(waiting) == len(warps):
            self.base[row] = self.launch.tick

    def warp_sync(self, m: Mask, members: Scalar = 0xFFFFFFFF) -> None:  # noqa: ARG002
        """See ``WarpClocks.warp_sync``. Here some lanes of a warp synchronise all of it."""
        if not self.launch.options.hazards:
            return
        self.launch.tick += 1
        synchronised = self.warps_in(m)
        if self.private:
            self._join_private(synchronised)
        rows, warps = np.nonzero(synchronised)
        for part in self.parts:
            column = warps + self.first[rows] + part
            self.ticks[rows, warps, column] = self.ticks[rows, warps, column + self.all_lanes_offset] = self.launch.tick
