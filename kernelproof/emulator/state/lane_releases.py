"""Releases by some lanes of a warp: whose accesses they pass on."""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.state.arrays import Array, Mask
from kernelproof.emulator.state.batch_state import BatchState

# Releases of a lane that are remembered.
KEPT = 8
# Why an access does not come before what follows a release by another lane of its warp.
APART = "another lane of its warp has released, and no __syncwarp() comes before that"


class LaneReleases:
    """What the lanes of a batch have released without the rest of their warps.

    Such a release passes on what its own lanes did before it, and what the others did before the warp last executed an
    instruction together (``gathered``, per row and warp: the tick before which that was). Whoever learns of it knows
    the warp's last release, and asks here whether the lane that made an access has released it by then.
    ``ticks[i, lane]``: a lane's last release but ``i``, which covers what it did before that tick.
    """

    def __init__(self, batch: BatchState) -> None:
        self.batch, self.launch = batch, batch.launch
        # Is there any? Until then no clock needs a closer look.
        self.active = False
        self.gathered: Array = np.zeros((batch.count, batch.warps_per_cta), np.int64)
        self._last: tuple[Mask, int] = None, -1
        self.ticks: Array = np.zeros((0, batch.size), np.int64)

    def gather(self, m: Mask) -> None:
        """The lanes of ``m`` have executed an instruction of whole warps, such as mma.sync."""
        tick = self.launch.tick + 1
        # Masks never change in place, and such instructions come in runs.
        if self._last[1] == tick and self._last[0] is m:
            return
        self._last = m, tick
        if m is None:
            self.gathered[:] = tick
        else:
            self.gathered.reshape(-1)[m.reshape(-1, 32).any(axis=1)] = tick

    def are_whole(self, lanes: Array, warps: Array) -> Array:
        """Which of the ``warps`` of the batch have no living lane beside these? Both ascend."""
        if len(lanes) == 32 * len(warps):
            return np.ones(len(warps), bool)
        alive = np.add.reduce(self.batch.alive.reshape(-1, 32)[warps], axis=1)
        if len(lanes) == len(warps):
            return np.asarray(alive == 1)
        return np.asarray(np.bincount(np.searchsorted(warps, lanes >> 5), minlength=len(warps)) >= alive)

    def add(self, lanes: Array, tick: int) -> None:
        """These lanes release what they did before a tick."""
        if not self.active:
            self.active, self.ticks = True, np.zeros((KEPT, self.batch.size), np.int64)
        self.ticks[1:, lanes] = self.ticks[:-1, lanes]
        self.ticks[0, lanes] = tick

    def cover(self, lanes: Array, ticks: Array, until: Array) -> Array:
        """Per element: has a lane released what it did at a tick, by the tick ``until``? Where that is forgotten, yes:
        an order is never denied that may exist."""
        releases = self.ticks[:, lanes]
        known = ((releases > ticks) & (releases <= until)).any(axis=0) | (releases[-1] > ticks)
        return np.asarray(known & (ticks < until))
