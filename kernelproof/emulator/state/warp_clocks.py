"""Vector clocks of the warps of a CTA: which accesses of other warps happen before a warp's present.

This models the causality order of the PTX memory consistency model between the warps of one CTA. Time is the launch's
tick, which every synchronisation advances. An access is tagged with the tick at which it happens; it happens before
warp w's present iff its tick is smaller than what w's clock holds for the warp that made it.

Clocks are kept per warp: what one lane passes on covers all that its warp has done. So a race that only the other lanes
of a releasing warp have is not found.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kernelproof.emulator.state.arrays import Array, Mask
from kernelproof.emulator.state.batch_state import BatchState


class WarpClocks:
    """Happens-before between the warps of each CTA of a batch.

    ``base[row]`` is the tick of the last barrier of the whole CTA: everything before it happens before every warp's
    present. As long as there are only such barriers, ``base`` is the whole clock. ``table`` (row, warp, other warp) is
    made when some warps learn more than others. Invariants: base[row] <= table[row], and no entry ever shrinks.
    """

    def __init__(self, batch: BatchState) -> None:
        self.batch, self.launch = batch, batch.launch
        self.base: Array = np.zeros(batch.count, np.int64)
        self.table: Array | None = None

    @property
    def is_even(self) -> bool:
        """Have all CTAs of the batch passed the same barriers, as a whole, and their warps learned nothing else?"""
        return self.table is None and bool((self.base == self.base[0]).all())

    def start(self) -> None:
        """Begin the batch at the present tick: earlier accesses belong to other batches."""
        self.base[:] = self.launch.tick

    def horizon(self, row: Array | int, warp: Array | int, other: Array) -> Array:
        """Per element: the tick before which accesses of warp ``other`` happen before warp ``warp`` of the same CTA."""
        if self.table is None:
            return np.asarray(self.base[row])
        return np.asarray(self.table[row, warp, other])

    def horizon_of_threads(self, row: int, warp: int) -> Array:
        """The clock of a warp, per thread of its CTA, shape (width,)."""
        if self.table is None:
            return np.full(self.batch.width, self.base[row])
        return np.repeat(self.horizon(row, warp, np.arange(self.batch.warps_per_cta)), 32)

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

    def rows(self) -> Array:
        """The table, which is made at the first call."""
        if self.table is None:
            warps = self.batch.warps_per_cta
            self.table = np.repeat(self.base, warps * warps).reshape(self.batch.count, warps, warps)
        return self.table

    def present(self, row: int, warp: int) -> Array:
        """The clock that a warp publishes by a release: what it knows of others, and all that it has done itself,
        accesses of the present tick included. The caller advances the tick afterwards."""
        clock: Array = self.rows()[row, warp].copy()
        clock[warp] = self.launch.tick + 1
        return clock

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
        best[warps] = tick
        horizon[waiting] = best if released is None else np.maximum(best, released)

    def warp_sync(self, m: Mask) -> None:
        """The lanes of ``m`` have synchronised with the others of their warp: what they did before happens before what
        they do from now on. This is the diagonal of the table, a warp's clock of itself."""
        if not self.launch.options.hazards:
            return
        table = self.rows()
        self.launch.tick += 1
        row, warp = np.nonzero(self.warps_in(m))
        table[row, warp, warp] = self.launch.tick

    def warps_in(self, m: Mask) -> Array:
        """Per (row, warp): does the mask hold a lane of the warp?"""
        shape = (self.batch.count, self.batch.warps_per_cta)
        if m is None:
            return np.ones(shape, bool)
        return np.asarray(m.reshape(*shape, 32).any(axis=2))
