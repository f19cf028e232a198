"""Orders the lanes of a warp by synchronisations of some of them, such as those of a tile of 8 lanes."""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.state.arrays import Array, bits_of
from kernelproof.emulator.state.batch_state import BatchState

# How many warps are handled in one step, which takes 256 KiB for each of them.
STEP = 16


class LaneSyncs:
    """Which accesses of other lanes of its warp each lane knows to be over.

    ``ticks[warp, lane, other]``: accesses of the other lane before this tick happen before the lane's next access, by
    synchronisations of some lanes of the warp. Synchronisations of whole warps are in the clocks of warps.

    ``groups``: per warp and lane, the lanes that it has met at the last synchronisation, and ``met``: the tick of that,
    which is not in ``ticks`` yet. If the same lanes meet again, only that tick changes. ``last``: per warp, the tick of
    its last such synchronisation. A release by some lanes counts as covering what any lane of the warp did before.
    """

    def __init__(self, batch: BatchState) -> None:
        self.batch = batch
        # Whether there is any such synchronisation. Until then the arrays are not made.
        self.active = False
        self.last: Array = np.zeros(batch.size >> 5, np.int64)
        self.met: Array = np.zeros((0, 32), np.int64)
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
        """Each ``arriving`` lane, shape (warps, 32), meets the arriving lanes that its mask (``words``) names."""
        if not self.active:
            self.active, self.met = True, np.zeros((len(words), 32), np.int64)
            self.ticks, self.groups = (np.zeros((len(words), 32, 32), kind) for kind in (np.int64, bool))
        warps = np.flatnonzero(arriving.any(axis=1))
        groups = bits_of(words[warps]) & arriving[warps, None, :] & arriving[warps, :, None]
        changed = np.flatnonzero((groups != self.groups[warps]).any(axis=(1, 2)))
        for start in range(0, len(changed), STEP):
            some = changed[start : start + STEP]
            known = self._known(warps[some])
            # Each lane learns what the lanes that it meets know.
            learned = np.where(groups[some, :, :, None], known[:, None, :, :], 0).max(axis=2)
            self.ticks[warps[some]], self.groups[warps[some]] = np.maximum(known, learned), groups[some]
        self.met[warps] = np.where(arriving[warps], tick, 0)
        self.last[warps] = tick

    def _known(self, warps: Array, *lanes: Array) -> Array:
        """``ticks`` of warps, or of a lane of each, with those of the last synchronisation."""
        at = warps, *lanes
        return np.asarray(np.maximum(self.ticks[at], np.where(self.groups[at], self.met[at][..., None], 0)))

    def are_ordered(self, lanes: Array, others: Array, ticks: Array, several: Array) -> Array:
        """Per element: does the access at a tick by lane ``others`` of the lane's own warp happen before the lane's
        next access? ``several``: the access is by several lanes of the warp, and it suffices to have met one."""
        known = self._known(lanes >> 5, lanes & 31)
        horizon = np.where(several, known.max(axis=1), known[np.arange(len(lanes)), others])
        return np.asarray(ticks < horizon)
