"""Clocks of the warps of a cluster for tensor memory: what they knew at their last tcgen05.fence::after_thread_sync."""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.hopper.cluster_clocks import ClusterClocks
from kernelproof.emulator.state.arrays import Array, Mask, distinct
from kernelproof.emulator.state.batch_state import BatchState


class TensorClocks(ClusterClocks):
    """The clocks of a cluster with two columns for every warp in place of wgmma's: one for the tcgen05.mma that it
    issues (whoever knows it has waited for their commit), and one for those of its tcgen05.ld and .st that are complete
    and that a tcgen05.fence::before_thread_sync has passed on.

    ``fenced`` (row, warp, column): what a warp knew at its last tcgen05.fence::after_thread_sync. ``alone``: the same
    for lanes that fenced apart from their warp. Invariant: fenced <= ticks.
    """

    def __init__(self, batch: BatchState) -> None:
        super().__init__(batch)
        self.fenced: Array = np.zeros_like(self.ticks)
        self.alone: dict[int, Array] = {}

    def _products(self) -> int:
        return 2 * self.warps

    def agent(self, group: int) -> str:
        """A CTA's column of products, as text."""
        if group < self.warps:
            return f"a tcgen05.mma of warp {group}"
        return f"tensor memory accesses of warp {group - self.warps}"

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
            # All living lanes of the warp fence together: the fence counts for the warp.
            if counts[warp] >= alive[warp]:
                np.maximum(self.fenced[row, index], self.knowledge(members), out=self.fenced[row, index])
                continue
            for lane in members.tolist():
                self.alone[lane] = self.of_lane(lane).copy()

    def fenced_of(self, lane: int) -> Array:
        """The clock of one lane at its last fence; do not change it."""
        batch = self.batch
        common: Array = self.fenced[batch.row_of[lane], batch.warp[lane]]
        own = self.alone.get(lane)
        return common if own is None else np.maximum(common, own)
