"""Describes Triton's matrix products for the timing model, as Triton 3.0 (August 2024) compiles them.

On the H100, tiles with 64 rows or more and whole warpgroups are multiplied by wgmma; all others by mma.sync. Both load
by cp.async, without TMA. ``num_stages`` counts steps of the software pipeline, not buffers. With mma.sync there are
``num_stages - 1`` buffers. A load starts after the MMAs that free its buffer, so that ``num_stages - 2`` loads are
under way while a tile is multiplied; with 2 stages a warp waits for a load as soon as it has issued it. wgmma reads its
buffer while the loop continues, so it has one buffer more. With 1 stage, data goes through registers in place of a
ring.
"""

from __future__ import annotations

from cudal2gen.kernel import CtaWork, Problem, ceil_div
from cudal2gen.kernel.work import LINE
from cudal2gen.timing.model import ModelledKernel
from cudal2gen.timing.recordings.autoheuristic import RecordedSizes, Tile
from kernelproof.ground.chips import GPUS, REGISTERS_THREAD

GROUP = 8  # GROUP_M of the kernel's raster
MMA_ROWS, MMA_COLS, MMA_K = 16, 8, 16  # extents of an mma.sync, in elements
WGMMA_ROWS, WARPGROUP = 64, 4  # rows of a wgmma; warps of a warpgroup
LIVE_REGISTERS = 40  # registers per thread beside accumulators and fragments
ELEMENT_BYTES = 2  # bytes of an element
LOOP_CLOCKS, WGMMA_CLOCKS = 63, 12  # issue clocks of a warp per k-step and per wgmma, as in this project's loops


def problem_of(gpu: str, sizes: RecordedSizes) -> Problem:
    """The problem that a recording timed."""
    return Problem(gpu=gpu, acc="f32", layout="nn", m=sizes.m, n=sizes.n, k=sizes.k)


def kernel_of(problem: Problem, tile: Tile) -> ModelledKernel:
    """Triton's kernel with a tile for a problem."""
    chip, wgmma = GPUS[problem.gpu], uses_wgmma(problem.gpu, tile)
    step_bytes = (tile.bm + tile.bn) * tile.bk * ELEMENT_BYTES
    rows, columns = warps_of(tile)
    if wgmma:
        # Warpgroups are placed along m first, so the tile's columns are divided among ``along_n`` of them. Each part of
        # 64 rows by bn / along_n columns reads its own rows of A and columns of B from shared memory.
        groups = tile.warps // WARPGROUP
        along_n = ceil_div(groups, tile.bm // WGMMA_ROWS)
        atoms = tile.bm // WGMMA_ROWS * along_n
        read = atoms * (WGMMA_ROWS + tile.bn // along_n) * tile.bk * ELEMENT_BYTES
        fragments, buffers, flight = 0, tile.stages, tile.stages - 1
        issue = LOOP_CLOCKS + WGMMA_CLOCKS * ceil_div(atoms, groups) * ceil_div(tile.bk, MMA_K)
    else:
        # Each column of warps reads all of A, and each row of warps all of B. Warps that have no MMA tile of their own
        # are not counted.
        read = (
            (tile.bm * min(columns, tile.bn // MMA_COLS) + tile.bn * min(rows, tile.bm // MMA_ROWS))
            * tile.bk
            * ELEMENT_BYTES
        )
        # Registers of the fragments of two MMA steps: bytes / 4 / 32 lanes, twice.
        fragments = MMA_K * ELEMENT_BYTES * (tile.bm // rows + tile.bn // columns) // 4 // 32 * 2
        buffers, flight, issue = max(1, tile.stages - 1), max(0, tile.stages - 2), 0
    registers = min(REGISTERS_THREAD, tile.bm * tile.bn // (32 * tile.warps) + fragments + LIVE_REGISTERS)
    smem = max(buffers * step_bytes, tile.bm * tile.bn * ELEMENT_BYTES)
    work = CtaWork(
        "wgmma" if wgmma else "mma.sync",
        step_bytes,
        issuers=max(1, tile.warps // WARPGROUP),
        shared_bytes=read + step_bytes,
        lines=step_bytes // min(LINE, tile.bk * ELEMENT_BYTES),
        raster_band=GROUP,
        issue_clocks=issue,
    )
    resident = max(1, chip.capability.residency(32 * tile.warps, registers, smem).ctas)
    return ModelledKernel(problem, chip, work, tile.bm, tile.bn, tile.bk, 32 * tile.warps, tile.warps, flight, resident)


def uses_wgmma(gpu: str, tile: Tile) -> bool:
    """Whether Triton multiplies a tile by wgmma."""
    return GPUS[gpu].capability.has_wgmma and tile.bm >= WGMMA_ROWS and tile.warps % WARPGROUP == 0


def warps_of(tile: Tile) -> tuple[int, int]:
    """How many warps mma.sync has along m and n.

    Starting from one warp, their number is doubled along the extent in which a warp has more MMA tiles, with m
    preferred, until all warps are placed.
    """
    along_m = along_n = 1
    while along_m * along_n < tile.warps:
        rows = tile.bm / MMA_ROWS / along_m
        if rows >= tile.bn / (2 * MMA_COLS) / along_n and rows > 1:
            along_m *= 2
        else:
            along_n *= 2
    return along_m, along_n
