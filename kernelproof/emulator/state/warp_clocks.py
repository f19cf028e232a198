"""Vector clocks of the warps of a CTA: which accesses of other warps happen before a warp's present.

This models the causality order of the PTX memory consistency model between the warps of one CTA. Time is the launch's
tick, which every synchronisation advances. An access is tagged with the tick at which it happens; it happens before
warp w's present iff its tick is smaller than what w's clock holds for the warp that made it.

Clocks are kept per warp, with two entries: before the first one, some lanes of that warp have released what they did;
before the second one, all of them have. What is between was released by some lanes; ``LaneReleases`` says by which.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kernelproof.emulator.state.arrays import Array, Mask
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.lane_releases import LaneReleases


class WarpClocks:
    """Happens-before between the warps of each CTA of a batch.

    ``base[row]`` is the tick of the last barrier of the whole CTA: everything before it happens before every warp's
    present. As long as there are only such barriers, ``base`` is the whole clock. ``table`` (row, warp, column) is made
    when some warps learn more than others. Another warp of the CTA has two columns: that of its number is for what any
    of its lanes has released; the other one, ``together`` further, for what all its lanes did. Invariants: base[row] <=
    table[row], no entry ever shrinks, and the entry of all lanes is never the larger one.
    """

    def __init__(self, batch: BatchState) -> None:
        self.batch, self.launch = batch, batch.launch
        self.releases = LaneReleases(batch)
        self.together = batch.warps_per_cta
        # Where the parts of a clock begin. Each has all columns; subclasses have several.
        self.parts: tuple[int, ...] = (0,)
        self.base: Array = np.zeros(batch.count, np.int64)
        self.table: Array | None = None

    @property
    def is_even(self) -> bool:
        """Have all CTAs of the batch passed the same barriers, as a whole, and their warps learned nothing else?"""
        return self.table is None and bool((self.base == self.base[0]).all())

    def start(self) -> None:
        """Begin the batch at the present tick: earlier accesses belong to other batches."""
        self.base[:] = self.launch.tick

    def horizon(self, row: Array | int, warp: Array | int, other: Array, together: Array | bool = False) -> Array:
        """Per element: the tick before which accesses of warp ``other`` happen before warp ``warp`` of the same CTA, as
        far as some lane has released them; ``together``: of all its lanes."""
        if self.table is None:
            return np.asarray(self.base[row])
        return np.asarray(self.table[row, warp, other + self.together * together])

    def covers(self, row: Array, warp: Array, thread: Array, tick: Array, several: Array | bool = False) -> Array:
        """Per element: does what a thread of the same CTA did at a tick happen before a warp's present? ``several``: it
        was the thread or another of its warp, and a release by any of them will do."""
        out: Array = tick < self.horizon(row, warp, thread >> 5, np.logical_not(several))
        if self.releases.active and not out.all():
            left = np.flatnonzero(~(out | several))
            until = self.horizon(row[left], warp[left], thread[left] >> 5)
            out[left] = self.releases.cover(row[left] * self.batch.width + thread[left], tick[left], until)
        return out

    def released_by_others(self, row: Array, warp: Array, thread: Array, tick: Array) -> Array:
        """Per element: does what a thread of another warp did at a tick precede a release by a lane of its warp, and
        that release a warp's present?"""
        other = thread >> 5
        return np.asarray((other != warp) & (tick < self.horizon(row, warp, other)))

    def horizons_of_threads(self, rows: Array, warps: Array) -> Array:
        """The clocks of some warps, per thread of their CTAs, shape (warps, width): a new array."""
        others = np.arange(self.batch.warps_per_cta)
        horizon = np.broadcast_to(self.horizon(rows[:, None], warps[:, None], others), (len(rows), len(others)))
        return horizon.repeat(32, axis=1)

    def total(self, row: int, warp: int) -> int:
        """A number that differs whenever the clock of a warp does."""
        return int(self.base[row]) if self.table is None else int(np.add.reduce(self.table[row, warp]))

    def is_before(
        self, row: int, warp: int, other_row: int, other_warp: int, tick: int, clocks: Iterable[Array]
    ) -> bool:
        """Does what a warp of the batch did at a tick happen before another warp's present, by its own clock or by
        others that it has?"""
        if row != other_row:
            return False
        if self.table is None:
            return bool(self.base[row] > tick)
        return any(int(clock[other_warp]) > tick for clock in (self.table[row, warp], *clocks))

    def ordered_in_cluster(self, row: int, warp: int, other_row: int, other_warp: int, tick: int, read: bool) -> bool:
        """Does an access of another CTA of the cluster happen before a warp's present? Never without clusters."""
        del row, warp, other_row, other_warp, tick, read
        return False

    def in_shared(self, clock: Array) -> Array:
        """The part of a clock that concerns shared memory. Without clusters no fence distinguishes shared memory."""
        return clock

    def column(self, row: int, warp: int) -> int:  # noqa: ARG002
        """The column of a warp in clocks, for what some of its lanes have released."""
        return warp

    def set(self, clock: Array, columns: int | Array, tick: int) -> None:
        """Let the holder of a clock know what the columns did before the tick. ``clock`` may also be several clocks, in
        its last axis."""
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
        """The clock that a release by ``lanes`` of a warp (lanes of the batch; None: all) publishes: what the warp
        knows of others, and what the lanes did, accesses of the present tick included. The caller advances the tick
        afterwards."""
        clock: Array = self.rows()[row, warp].copy()
        self._cover(clock, row, warp, lanes, self.launch.tick + 1)
        return clock

    def _cover(self, clock: Array, row: int, warp: int, lanes: Array | None, tick: int) -> None:
        """Let the clock that a warp publishes cover what these of its lanes did before a tick (None: all of them), and
        what the others did before they last executed an instruction together."""
        column = self.column(row, warp)
        self.set(clock, column, tick)
        if lanes is None or self.releases.are_whole(lanes, np.array([row * self.batch.warps_per_cta + warp]))[0]:
            self.set(clock, column + self.together, tick)
            return
        self.releases.add(lanes, tick)
        gathered = int(self.releases.gathered[row, warp])
        for part in self.parts:
            at = column + self.together + part
            clock[at] = max(int(clock[at]), gathered)

    def meet_all(self) -> None:
        """All threads of all CTAs have passed a barrier; the tick has advanced."""
        self.base[:] = self.launch.tick
        if self.table is not None:
            self.table[:] = self.launch.tick

    def meet(self, row: int, warps: Array, waiting: Array, whole: bool, released: Array | None) -> None:
        """Warps of a CTA (``whole``: all its threads) have met at a barrier; the tick has advanced. Those of them that
        were ``waiting`` know what any of them knew, and what others ``released`` that arrived and went on."""
        tick = self.launch.tick
        if whole and len(waiting) == len(warps):
            self.base[row] = tick
            if self.table is not None:
                self.table[row] = tick
            return
        horizon = self.rows()[row]
        best = horizon[warps].max(axis=0)
        best[warps] = best[warps + self.together] = tick
        horizon[waiting] = best if released is None else np.maximum(best, released)

    def warp_sync(self, m: Mask) -> None:
        """The lanes of ``m`` have synchronised with the others of their warp: what they did before happens before what
        they do from now on. This is what a warp's clock says of the warp itself."""
        if not self.launch.options.hazards:
            return
        table = self.rows()
        self.launch.tick += 1
        row, warp = np.nonzero(self.warps_in(m))
        table[row, warp, warp] = table[row, warp, warp + self.together] = self.launch.tick

    def warps_in(self, m: Mask) -> Array:
        """Per (row, warp): does the mask hold a lane of the warp?"""
        shape = (self.batch.count, self.batch.warps_per_cta)
        if m is None:
            return np.ones(shape, bool)
        return np.asarray(m.reshape(*shape, 32).any(axis=2))
