"""``Work``: counts of a family's main loop and epilogue for cost models, independent of the GPU's rates."""

from __future__ import annotations

from typing import Literal, NamedTuple

LINE = 128  # bytes of a line of the caches

Instruction = Literal["mma.sync", "wgmma", "tcgen05.mma"]


class Work(NamedTuple):
    """What one CTA of a record does.

    ``instruction``: what multiplies; the GPU has a rate for each. ``issuers``: warpgroups that keep the tensor cores
    busy with it, where it is issued by warpgroups. ``lines``: pieces of rows, of 128 bytes at most, that threads ask
    for in one k-step; an SM looks up one of them a clock. ``shared_bytes``: bytes that one k-step reads from and
    writes to shared memory. ``l2_bytes``: bytes that one k-step asks of the L2; what a cluster shares counts once for
    all its CTAs. ``raster_band``, ``raster_along``: how many tiles along which extent are under way side by side,
    before the other extent advances. ``store``: how D leaves, by TMA or by stores of the threads. ``epilogue_hidden``:
    whether the next tile's main loop runs meanwhile. ``tensor_maps``: whether the first load waits for a tensor map.
    ``issue_clocks``: a warp's issue slots and stalls in one k-step, 0 where they are not known. ``summed_by``: who
    adds the partial sums of a tile whose k is shared out: the CTAs of its cluster, the last one to arrive, or all
    CTAs, shares alike.
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
        """Whether tensor cores read operands from shared memory while the issuing warps go on."""
        return self.instruction != "mma.sync"
