"""Orders accesses to tensor memory by vector clocks: each warp has one, and a copy from its last tcgen05 fence."""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.hopper.cluster_clocks import ClusterClocks
from kernelproof.emulator.state.arrays import Array, Mask, distinct
from kernelproof.emulator.state.batch_state import BatchState


class TensorClocks(ClusterClocks):
    """The clocks of a cluster, in which every warp has two columns in place of those of wgmma.

    One is for the tcgen05.mma that the warp issues; a clock gets its ticks by waiting for their commit. The other one
    is for the warp's tcgen05.ld and .st; a clock gets its ticks from a tcgen05.fence::before_thread_sync that follows
    their completion.

    ``fence_clocks``, shape (row, warp, column): the clock of a warp at its last tcgen05.fence::after_thread_sync.
    ``lane_fence_clocks``: lane -> its clock at the last such fence that it executed without the rest of its warp.
    Invariant: fence_clocks <= ticks.
    """

    def __init__(self, batch: BatchState) -> None:
        super().__init__(batch)
        self.fence_clocks: Array = np.zeros_like(self.ticks)
        self.lane_fence_clocks: dict[int, Array] = {}

    def _product_columns(self) -> int:
        return 2 * self.warps

    def agent(self, reader: int) -> str:
        """Whose accesses a column orders, in words for reports. ``reader``: its number among the CTA's columns."""
        if reader < self.warps:
            return f"a tcgen05.mma of warp {reader}"
        return f"tensor memory accesses of warp {reader - self.warps}"

    def product_column(self, row: int, warp: int) -> int:
        """The column of a warp's tcgen05.mma."""
        return self.wgmma_column(row, warp)

    def access_column(self, row: int, warp: int) -> int:
        """The column of a warp's tcgen05.ld and .st."""
        return self.wgmma_column(row, self.warps + warp)

    def is_product(self, columns: Array) -> Array:
        """Which of these columns of asynchronous work belong to tcgen05.mma?"""
        out: Array = (columns - self.wgmma) % self.groups < self.warps
        return out

    def fence_after(self, m: Mask) -> None:
        """tcgen05.fence::after_thread_sync by the lanes of ``m``."""
        batch = self.batch
        lanes = batch.lanes(m)
        alive = batch.alive.reshape(-1, 32).sum(axis=1)
        warps, counts = distinct(lanes >> 5), np.bincount(lanes >> 5, minlength=len(alive))
        for warp in warps.tolist():
            row, index = divmod(warp, self.warps)
            members = lanes[lanes >> 5 == warp]
            # If all lanes that have not exited execute the fence together, it counts for the warp.
            if counts[warp] >= alive[warp]:
                np.maximum(self.fence_clocks[row, index], self.knowledge(members), out=self.fence_clocks[row, index])
                continue
            for lane in members.tolist():
                self.lane_fence_clocks[lane] = self.of_lane(lane).copy()

    def fence_clock_of(self, lane: int) -> Array:
        """The clock of one lane at its last fence; do not change it."""
        batch = self.batch
        common: Array = self.fence_clocks[batch.row_of[lane], batch.warp[lane]]
        own = self.lane_fence_clocks.get(lane)
        return common if own is None else np.maximum(common, own)
