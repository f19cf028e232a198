"""Numbers the lanes of a batch. All batches of a launch with the same number of CTAs share these arrays."""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.state.arrays import Array

# In tags of shared memory, actors below this number are threads of the CTA, which has at most 1024. SEVERAL + w stands
# for several lanes of warp w.
SEVERAL = 1024


class Lanes:
    """The lanes of ``count`` CTAs of ``threads`` threads, ``width`` lanes (whole warps) each. No array ever changes.

    Per lane: ``row_of`` (its CTA's place in the batch), ``thread`` and ``warp`` of the CTA, ``lane`` of the warp;
    ``place`` is ``row * width + thread``; ``alive``: whether the CTA has such a thread. ``actor`` and
    ``actor_of_warp`` identify the lane in tags of shared memory, alone or as one of several lanes of its warp.
    ``special`` keeps special registers that are the same in every batch.
    """

    def __init__(self, count: int, threads: int) -> None:
        self.count = count
        self.width = -(-threads // 32) * 32
        self.size = count * self.width
        self.row_of: Array = np.repeat(np.arange(count), self.width)
        self.thread: Array = np.tile(np.arange(self.width), count)
        self.warp: Array = self.thread >> 5
        self.lane: Array = (self.thread & 31).astype(np.uint32)
        self.place: Array = np.arange(self.size)
        self.alive: Array = self.thread < threads
        self._ramps: dict[int, Array] = {}
        self.actor: Array = self.thread.astype(np.uint32)
        self.actor_of_warp: Array = (SEVERAL + self.warp).astype(np.uint32)
        self.special: dict[str, Array] = {}

    def ramp(self, stride: int) -> Array:
        """0, stride, 2 * stride, ... (int64, one per lane)."""
        out = self._ramps.get(stride)
        if out is None:
            out = self._ramps[stride] = self.place * stride
        return out
