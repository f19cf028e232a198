"""Vector clocks of the warps of a CTA: ticks before which accesses of other warps are ordered before their present."""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.state.arrays import Array, Mask
from kernelproof.emulator.state.batch_state import BatchState


class WarpClocks:
    """Happens-before between the warps of each CTA of a batch.

    ``base[row]`` is the tick of the CTA's last barrier: what happened before it is ordered before every warp. As long
    as nothing but barriers of whole CTAs happens, that is all; ``table`` (row, warp, column) is made when some warps
    come to know more than others, and column c is then warp c of the same CTA. Invariant: base[row] <= table[row].
    """

    def __init__(self, batch: BatchState) -> None:
        self.batch, self.launch = batch, batch.launch
        self.base: Array = np.zeros(batch.count, np.int64)
        self.table: Array | None = None

    def start(self) -> None:
        """The batch begins at this tick: earlier accesses belong to other batches."""
        self.base[:] = self.launch.tick

    def horizon(self, row: Array, warp: Array, other: Array) -> Array:
        """Ticks before which accesses of warp ``other`` are ordered before warp ``warp`` of the same CTA, per
        element."""
        if self.table is None:
            return np.asarray(self.base[row])
        return np.asarray(self.table[row, warp, other])

    def horizon_of_threads(self, row: int, warp: int) -> Array:
        """What a warp knows of every thread of its CTA, shape (width,)."""
        warps = np.arange(self.batch.width) >> 5
        return np.asarray(self.horizon(np.full(len(warps), row), np.full(len(warps), warp), warps))

    def ordered_in_cluster(self, row: int, warp: int, other_row: int, other_warp: int, tick: int, read: bool) -> bool:
        """Is an access of another CTA of the cluster ordered before a warp's present? Not without clusters."""
        del row, warp, other_row, other_warp, tick, read
        return False

    def in_shared(self, clock: Array) -> Array:
        """A clock as far as it concerns accesses to shared memory: without clusters no fence tells them apart."""
        return clock

    def rows(self) -> Array:
        """The table, made if need be."""
        if self.table is None:
            warps = self.batch.warps_per_cta
            self.table = np.repeat(self.base, warps * warps).reshape(self.batch.count, warps, warps)
        return self.table

    def present(self, row: int, warp: int) -> Array:
        """The clock that a release of a warp passes on at the next tick: all that it knows, and did so far."""
        clock: Array = self.rows()[row, warp].copy()
        clock[warp] = self.launch.tick + 1
        return clock

    def meet_all(self) -> None:
        """All threads of all CTAs have passed a barrier; the tick has advanced."""
        self.base[:] = self.launch.tick
        if self.table is not None:
            self.table[:] = self.launch.tick

    def meet(self, row: int, warps: Array, whole: bool) -> None:
        """Warps of a CTA (``whole``: all its threads) have passed a barrier together; the tick has advanced."""
        tick = self.launch.tick
        if whole:
            self.base[row] = tick
            if self.table is not None:
                self.table[row] = tick
            return
        horizon = self.rows()[row]
        best = horizon[warps].max(axis=0)
        best[warps] = tick
        horizon[warps] = best

    def warp_sync(self, m: Mask) -> None:
        """The lanes of ``m`` have synchronised with those of their warp: their accesses are ordered from now on."""
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
