"""Keeps the vector clocks of a CTA's warps: which accesses of other warps happen before a warp's next access.

This models the causality order of the PTX memory consistency model between the warps of one CTA. Time is the launch's
tick, which every synchronisation advances. An access is tagged with the tick at which it happens. It happens before
warp w's next access if and only if its tick is smaller than the entry of w's clock for the warp that made it.

A clock has two entries for each warp. Accesses before the tick of the second entry were released by all lanes of that
warp. Accesses between the two ticks were released by some lanes only, and ``LaneReleases`` says by which.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kernelproof.emulator.state.arrays import Array, Mask, Scalar
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.lane_releases import LaneReleases
from kernelproof.emulator.state.lane_syncs import LaneSyncs


class WarpClocks:
    """Happens-before between the warps of each CTA of a batch.

    ``base[row]`` is the tick of the CTA's last barrier of all threads: all accesses before it happen before every
    warp's next access. As long as there are only such barriers, ``base`` is the complete clock. ``table`` (row, warp,
    column) is made when some warps learn more than others. It has two columns for each warp: the column of the warp's
    number is for accesses that some of its lanes have released, and the one ``all_lanes_offset`` further is for
    accesses that all have. Invariants: base[row] <= table[row], no entry ever shrinks, and the entry for all lanes is
    never the larger one.
    """

    def __init__(self, batch: BatchState) -> None:
        self.batch, self.launch = batch, batch.launch
        self.releases, self.lane_syncs = LaneReleases(batch), LaneSyncs(batch)
        # The distance from a warp's column for some lanes to its column for all lanes together.
        self.all_lanes_offset = batch.warps_per_cta
        # Where the parts of a clock begin. Each has all columns; subclasses have several.
        self.parts: tuple[int, ...] = (0,)
        self.base: Array = np.zeros(batch.count, np.int64)
        self.table: Array | None = None

    @property
    def is_even(self) -> bool:
        """Have all CTAs of the batch passed the same barriers with all threads, and have warps learned nothing else?"""
        return self.table is None and bool((self.base == self.base[0]).all())

    def start(self) -> None:
        """Begin the batch at the present tick: earlier accesses belong to other batches."""
        self.base[:] = self.launch.tick

    def horizon(self, row: Array | int, warp: Array | int, other: Array, by_all_lanes: Array | bool = False) -> Array:
        """Per element: the tick before which accesses of warp ``other`` happen before the next access of ``warp`` (both
        of CTA ``row``), if their lanes have released them; with ``by_all_lanes``, in any case."""
        if self.table is None:
            return np.asarray(self.base[row])
        return np.asarray(self.table[row, warp, other + self.all_lanes_offset * by_all_lanes])

    def covers(self, lanes: Array, thread: Array, tick: Array, several: Array | bool = False) -> Array:
        """Per element: does the access of a thread of the same CTA at a tick happen before a lane's next access?
        ``several``: the access is by this thread or another of its warp, so a release by any lane of the warp
        suffices."""
        row, warp = self.batch.row_of[lanes], self.batch.warp[lanes]
        out: Array = tick < self.horizon(row, warp, thread >> 5, np.logical_not(several))
        if self.releases.active and not out.all():
            undecided = np.flatnonzero(~(out | several))
            limits = self.horizon(row[undecided], warp[undecided], thread[undecided] >> 5)
            out[undecided] = self.releases.have_released(
                row[undecided] * self.batch.width + thread[undecided], tick[undecided], limits
            )
        if self.lane_syncs.active and not out.all():
            undecided = np.flatnonzero(~out & (thread >> 5 == warp))
            out[undecided] = self.lane_syncs.are_ordered(
                lanes[undecided], thread[undecided] & 31, tick[undecided],
                np.broadcast_to(several, len(tick))[undecided],
            )  # fmt: skip
        return out

    def released_by_others(self, row: Array, warp: Array, thread: Array, tick: Array) -> Array:
        """Per element: does the access of a thread of another warp at a tick come before a release by some lane of its
        warp, which happens before a warp's next access?"""
        other = thread >> 5
        return np.asarray((other != warp) & (tick < self.horizon(row, warp, other)))

    def horizons_of_threads(self, rows: Array, warps: Array) -> Array:
        """The clocks of some warps, per thread of their CTAs, shape (warps, width): a new array."""
        others = np.arange(self.batch.warps_per_cta)
        horizon = np.broadcast_to(self.horizon(rows[:, None], warps[:, None], others), (len(rows), len(others)))
        if self.lane_syncs.active:
            horizon, each = horizon.copy(), np.arange(len(rows))
            by_some_lanes = self.lane_syncs.last[rows * self.batch.warps_per_cta + warps]
            horizon[each, warps] = np.maximum(horizon[each, warps], by_some_lanes)
        return horizon.repeat(32, axis=1)

    def contents(self, row: int, warp: int) -> bytes:
        """Bytes that differ whenever the clock of a warp does."""
        return bytes((self.base[row] if self.table is None else self.table[row, warp]).tobytes())

    def is_before(
        self, row: int, warp: int, other_row: int, other_warp: int, tick: int, clocks: Iterable[Array]
    ) -> bool:
        """Does the access of warp ``other_warp`` at a tick happen before the next access of ``warp``, by that warp's
        clock or by one of ``clocks``?"""
        if row != other_row:
            return False
        if self.table is None:
            return bool(self.base[row] > tick)
        return any(int(clock[other_warp]) > tick for clock in (self.table[row, warp], *clocks))

    def ordered_in_cluster(self, row: int, warp: int, other_row: int, other_warp: int, tick: int, read: bool) -> bool:
        """Does an access of another CTA of the cluster happen before a warp's next access? Without clusters never."""
        del row, warp, other_row, other_warp, tick, read
        return False

    def in_shared(self, clock: Array) -> Array:
        """The part of a clock that concerns shared memory. Without clusters no fence distinguishes shared memory."""
        return clock

    def column(self, row: int, warp: int) -> int:  # noqa: ARG002
        """The column of a warp in clocks, for accesses that some of its lanes have released."""
        return warp

    def set(self, clock: Array, columns: int | Array, tick: int) -> None:
        """Set entries of a clock, in all its parts. ``clock`` may also be an array of clocks, which are its last
        axis."""
        for part in self.parts:
            clock[..., columns + part] = tick

    def rows(self) -> Array:
        """The table, which is made at the first call."""
        if self.table is None:
            warps = self.batch.warps_per_cta
            columns = 2 * warps
            self.table = np.repeat(self.base, warps * columns).reshape(self.batch.count, warps, columns)
        return self.table

    def present(self, row: int, warp: int, lanes: Array | None = None) -> Array:
        """The clock that a release by ``lanes`` of a warp (lanes of the batch; None: all) publishes: that of the warp,
        with the accesses of these lanes up to the present tick. The caller must then advance the tick."""
        clock: Array = self.rows()[row, warp].copy()
        self._cover(clock, row, warp, lanes, self.launch.tick + 1)
        return clock

    def _cover(self, clock: Array, row: int, warp: int, lanes: Array | None, tick: int) -> None:
        """Add accesses to a clock that a warp publishes: those of ``lanes`` (None: all of the warp) before a tick, and
        those of the warp's other lanes before all lanes last executed an instruction together."""
        column = self.column(row, warp)
        self.set(clock, column, tick)
        if lanes is None or self.releases.are_whole(lanes, np.array([row * self.batch.warps_per_cta + warp]))[0]:
            self.set(clock, column + self.all_lanes_offset, tick)
            return
        self.releases.add(lanes, tick)
        gathered = max(
            int(self.releases.gathered[row, warp]),
            int(self.lane_syncs.last[row * self.batch.warps_per_cta + warp]),
        )
        for part in self.parts:
            entry = column + self.all_lanes_offset + part
            clock[entry] = max(int(clock[entry]), gathered)

    def meet_all(self) -> None:
        """All threads of all CTAs have passed a barrier; the tick has advanced."""
        self.base[:] = self.launch.tick
        if self.table is not None:
            self.table[:] = self.launch.tick

    def meet(self, row: int, warps: Array, waiting: Array, whole: bool, released: Array | None) -> None:
        """Warps of a CTA (``whole``: all its threads) have met at a barrier, and the tick has advanced. The warps that
        were ``waiting`` now know what any of the warps knew. ``released``: the clock of warps that arrived and did not
        wait, which the waiting ones learn too."""
        tick = self.launch.tick
        if whole and len(waiting) == len(warps):
            self.base[row] = tick
            if self.table is not None:
                self.table[row] = tick
            return
        horizon = self.rows()[row]
        joined = horizon[warps].max(axis=0)
        joined[warps] = joined[warps + self.all_lanes_offset] = tick
        horizon[waiting] = joined if released is None else np.maximum(joined, released)

    def warp_sync(self, m: Mask, members: Scalar = 0xFFFFFFFF) -> None:
        """The lanes of ``m`` have synchronised with those of their warp that ``members`` names: earlier accesses of
        these happen before their later ones. If they are all lanes of the warp, this is noted in the entries that the
        warp's clock has for the warp itself."""
        if not self.launch.options.hazards:
            return
        self.launch.tick += 1
        synchronised = self.warps_in(m)
        if not isinstance(members, int) or members != 0xFFFFFFFF:
            arriving, words = self.batch.running(m).reshape(-1, 32), self.batch.words(members)
            partial = self.lane_syncs.partial_warps(arriving, words)
            if partial.any():
                self.lane_syncs.meet(arriving & partial[:, None], words, self.launch.tick)
                synchronised = synchronised & ~partial.reshape(synchronised.shape)
        table = self.rows()
        row, warp = np.nonzero(synchronised)
        table[row, warp, warp] = table[row, warp, warp + self.all_lanes_offset] = self.launch.tick

    def warps_in(self, m: Mask) -> Array:
        """Per (row, warp): does the mask include a lane of the warp?"""
        shape = (self.batch.count, self.batch.warps_per_cta)
        if m is None:
            return np.ones(shape, bool)
        return np.asarray(m.reshape(*shape, 32).any(axis=2))
