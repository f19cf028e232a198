"""Orders the lanes of a warp by synchronisations of some of them, such as those of a tile of 8 lanes."""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.state.arrays import Array, bits_of
from kernelproof.emulator.state.batch_state import BatchState

# Warps whose lanes learn from each other in one step: each takes 256 KiB.
STEP = 16


class LaneSyncs:
    """``ticks[warp, lane, other]``: accesses of the other lane before this tick happen before the lane's present, by
    synchronisations of some lanes of the warp. Those of whole warps are in the clocks of warps.

    ``groups``: per warp, which lanes have met which ones at the last synchronisation. If the same lanes meet again,
    they know the same already. ``last``: per warp, the tick of its last such synchronisation. A release by some lanes
    counts as covering what any lane of the warp did before.
    """

    def __init__(self, batch: BatchState) -> None:
        self.batch = batch
        # Whether there is any such synchronisation. Until then the arrays are not made.
        self.active = False
        self.last: Array = np.zeros(batch.size >> 5, np.int64)
        self.ticks: Array = np.zeros((0, 32, 32), np.int64)
        self.groups: Array = np.zeros((0, 32, 32), bool)

    def partial_warps(self, arriving: Array, words: Array) -> Array:
        """Per warp: does a mask of its ``arriving`` lanes, shape (warps, 32), leave out a living lane? ``words``: the
        masks."""
        if (words == 0xFFFFFFFF).all():
            return np.zeros(len(words), bool)
        absent = self.batch.alive.reshape(-1, 1, 32) & ~bits_of(words)
        return np.asarray((absent.any(axis=2) & arriving).any(axis=1))

    def meet(self, arriving: Array, words: Array, tick: int) -> None:
        """Lanes of some warps, shape (warps, 32), meet those of them that their masks name."""
        if not self.active:
            self.active = True
            self.ticks, self.groups = (np.zeros((len(words), 32, 32), kind) for kind in (np.int64, bool))
        warps = np.flatnonzero(arriving.any(axis=1))
        groups = bits_of(words[warps]) & arriving[warps, None, :] & arriving[warps, :, None]
        known = self.ticks[warps]
        changed = np.flatnonzero((groups != self.groups[warps]).any(axis=(1, 2)))
        for start in range(0, len(changed), STEP):
            some = changed[start : start + STEP]
            learned = np.where(groups[some, :, :, None], known[some, None, :, :], 0).max(axis=2)
            known[some] = np.maximum(known[some], learned)
        known[groups] = tick
        self.ticks[warps], self.groups[warps], self.last[warps] = known, groups, tick

    def cover(self, lanes: Array, others: Array, ticks: Array, several: Array) -> Array:
        """Per element: does the access of lane ``others`` of a lane's own warp at a tick happen before the lane's
        present? ``several``: it is by any lane of the warp, of which one that the lane has met suffices."""
        known = self.ticks[lanes >> 5, lanes & 31]
        until = np.where(several, known.max(axis=1), known[np.arange(len(lanes)), others])
        return np.asarray(ticks < until)
