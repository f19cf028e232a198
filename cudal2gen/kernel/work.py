"""Defines ``CtaWork``, which counts what a kernel's main loop and epilogue do, for cost models and any GPU's rates."""

from __future__ import annotations

from typing import Literal, NamedTuple

LINE = 128  # bytes of a line of the caches

Instruction = Literal["mma.sync", "wgmma", "tcgen05.mma"]


class CtaWork(NamedTuple):
    """The work of one CTA.

    ``instruction``: the instruction that multiplies; a GPU has a rate for each. ``issuers``: the warpgroups that issue
    it. ``lines``: pieces of rows of up to 128 bytes that threads load in one k-step; an SM looks up one per clock.
    ``shared_bytes``: bytes that one k-step reads from and writes to shared memory. ``l2_bytes``: bytes that one k-step
    loads from the L2; bytes that a cluster shares are divided among its CTAs. ``raster_band``: how many tiles along the
    extent ``raster_along`` are computed side by side before the other extent advances. ``store``: whether D is stored
    by TMA or by the threads. ``epilogue_hidden``: whether the next tile's main loop runs during the epilogue.
    ``tensor_maps``: whether the first load waits for a tensor map. ``issue_clocks``: a warp's issue slots and stalls in
    one k-step, 0 if unknown. ``summed_by``: which CTAs add the partial sums of a tile whose k is split: those of its
    cluster, the last one to arrive, or all of them in equal shares.
    """

    instruction: Instruction
    l2_bytes: float
    issuers: int = 1
    shared_bytes: int = 0
    lines: int = 0
    raster_band: int = 8
    raster_along: Literal["m", "n"] = "m"
    store: Literal["tma", "direct"] = "direct"
    epilogue_hidden: bool = False
    tensor_maps: bool = False
    issue_clocks: int = 0
    summed_by: Literal["cluster", "last", "all"] = "last"

    @property
    def asynchronous(self) -> bool:
        """Whether tensor cores read operands from shared memory while the issuing warps continue."""
        return self.instruction != "mma.sync"
