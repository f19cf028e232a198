"""Records releases by some lanes of a warp, and says which accesses they cover."""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.state.arrays import Array, Mask
from kernelproof.emulator.state.batch_state import BatchState

# How many releases of a lane are remembered.
RELEASES_KEPT = 8
# The reason, in a finding, why a release by another lane of its warp does not cover an access.
APART = "another lane of its warp has released, and no __syncwarp() comes before that"


class LaneReleases:
    """The releases of a batch's lanes without the rest of their warps.

    Such a release covers all earlier accesses of the lanes that release. It covers accesses of the warp's other lanes
    only before the last instruction that all lanes of the warp executed together. ``gathered``, per row and warp,
    has the tick of that instruction plus 1. A warp's clock has the tick of the last release by any of its lanes;
    ``cover`` then says whether the lane that made an access has released it by that tick.

    ``ticks``, shape (RELEASES_KEPT, lanes): the tick before which a release covers the lane's accesses. Row 0 is for
    each lane's last release, row 1 for the one before it, and so on.
    """

    def __init__(self, batch: BatchState) -> None:
        self.batch, self.launch = batch, batch.launch
        # Has there been any such release? Until then clocks need no check by lane.
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
        """A mask of those ``warps`` of the batch whose living lanes are all among ``lanes``. Both must ascend."""
        if len(lanes) == 32 * len(warps):
            return np.ones(len(warps), bool)
        alive = np.add.reduce(self.batch.alive.reshape(-1, 32)[warps], axis=1)
        if len(lanes) == len(warps):
            return np.asarray(alive == 1)
        return np.asarray(np.bincount(np.searchsorted(warps, lanes >> 5), minlength=len(warps)) >= alive)

    def add(self, lanes: Array, tick: int) -> None:
        """These lanes release what they did before a tick."""
        if not self.active:
            self.active, self.ticks = True, np.zeros((RELEASES_KEPT, self.batch.size), np.int64)
        self.ticks[1:, lanes] = self.ticks[:-1, lanes]
        self.ticks[0, lanes] = tick

    def have_released(self, lanes: Array, ticks: Array, limits: Array) -> Array:
        """Per element: has a lane released its access at a tick by the tick in ``limits``? If the release is no longer
        kept, the answer is yes, so that no order is denied that may exist."""
        releases = self.ticks[:, lanes]
        known = ((releases > ticks) & (releases <= limits)).any(axis=0) | (releases[-1] > ticks)
        return np.asarray(known & (ticks < limits))
