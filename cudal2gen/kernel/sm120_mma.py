"""Defines the family sm120_mma: a producer fills a ring by TMA, consumer warpgroups multiply by mma.sync."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from cudal2gen.kernel.problem import Problem
from cudal2gen.kernel.record import FAMILY, Fields
from cudal2gen.kernel.sm90 import Overlap
from cudal2gen.kernel.tma_ring import (
    UNTUNED,
    HintA,
    HintB,
    RasterAxis,
    RasterGroup,
    RingBk,
    SplitK,
    Stages,
    StoreD,
    StreamK,
    deepest_ring,
    widest_row,
)
from cudal2gen.kernel.warpgroups import Consumers, MinBlocks, Registers, Schedule, Tile, Warpgroups
from cudal2gen.kernel.work import CtaWork
from kernelproof.ground.chips import Chip
from kernelproof.ground.integers import ceil_div

GROUP_M = 64  # rows of four warps, 16 each
# The fewest registers that ptxas 13.0 needs: for a consumer besides its accumulators, and for a producer.
LIVE_REGISTERS = 32
PRODUCER_REGISTERS = 24
# What the tuner tries: bm, bn, schedule, consumers and registers; slices of k.
TILES: tuple[Tile, ...] = (
    *((128, bn, "cooperative", 2, [40, 232]) for bn in (64, 96, 128, 160, 192)),
    *((64, bn, "cooperative", 1, None) for bn in (32, 64, 96, 128)),
    *((64, bn, "pingpong", 2, [40, 232]) for bn in (64, 128, 192)),
    *((128, bn, "pingpong", 2, [40, 232]) for bn in (64, 96, 128)),
)
SPLITS = (1, 2, 4, 8)


class Sm120Mma(Warpgroups):
    """A persistent kernel: a producer loads by TMA into a ring, consumers multiply by ldmatrix and mma.sync; for
    sm_120f.

    Compute capability 12.0 has neither wgmma nor tensor memory, and its TMA has no multicast. Each warp of a warpgroup
    multiplies 16 of every 64 rows by all columns of the tile. It loads a fragment of the columns once for all its rows.
    """

    family: Annotated[Literal["sm120_mma"], FAMILY]
    swap_ab: Annotated[
        bool, Field(description="compute D^T = B^T A^T: n along the rows of a warpgroup, m along its columns")
    ]
    bk: RingBk
    stages: Stages
    consumers: Consumers
    schedule: Schedule
    raster_axis: RasterAxis
    raster_group: RasterGroup
    split_k: SplitK
    epilogue: StoreD
    registers: Registers
    hint_a: HintA
    hint_b: HintB
    pdl: Overlap
    min_blocks: MinBlocks
    stream_k: StreamK = False
    cluster: Annotated[
        tuple[Literal[1], Literal[1]], Field(description="always [1, 1]: TMA of 12.0 brings a box to one CTA")
    ] = (1, 1)

    atom_rows: ClassVar[int] = GROUP_M
    instruction: ClassVar[str] = "mma.sync"
    fragment: ClassVar[str] = "warpgroup"

    @classmethod
    def plain(cls, problem: Problem) -> dict[str, Any]:
        """A 128 x 128 tile for two warpgroups. If D has few rows, they become columns of the instruction."""
        swap_ab = problem.m <= GROUP_M
        bm = ceil_div(problem.m, 16) * 16 if swap_ab else 128
        return {
            "bm": bm,
            "bn": 128,
            "swap_ab": swap_ab,
            "bk": problem.element.chunk,
            "stages": 2 if bm > GROUP_M else 3,
            "consumers": 2,
            "schedule": "cooperative",
            "raster_axis": "m",
            "split_k": 1,
            "epilogue": "direct" if problem.n % problem.element.vector else "tma",
            "registers": [40, 232],
            "min_blocks": 1,
            **UNTUNED,
        }

    def violations(self) -> Iterator[str]:
        if broken := [*self._tile_violations(), *self.stream_violations()]:
            yield from broken
            return
        yield from self.row_violations()
        yield from self.count_violations()
        yield from self.group_violations()
        yield from self._register_violations()
        yield from self.occupancy_violations()

    def _tile_violations(self) -> Iterator[str]:
        """Rules for the division of a tile into consumers and fragments."""
        yield from self.share_violations()
        along_cols = "bm" if self.swap_ab else "bn"
        if self.cols % 16:
            yield f"{along_cols}={self.cols}: must be a multiple of 16, the columns that one ldmatrix brings"
            return
        yield from self.gate_violations(along_cols, self.cols)

    def _register_violations(self) -> Iterator[str]:
        """Rules for setmaxnreg and for the registers of a consumer."""
        if self.registers is not None and (broken := list(self.pool_violations(*self.registers))):
            yield from broken
            return
        yield from self.consumer_violations()

    @property
    def live_registers(self) -> int:
        """Registers that a consumer needs besides its accumulators. The numbers are what ptxas 13.0 needs for each part
        of a fusion."""
        fusion, width = self.fusion, self.output.bytes
        live = LIVE_REGISTERS + 8 * fusion.gate + (40 if fusion.residual or fusion.aux else 0)
        if not self.swap_ab:
            return live + (8 * width if fusion.residual and fusion.aux else 0)
        # If operands are swapped, every 8 columns belong to another row of D, whose address and bias take registers.
        # Elements of C are loaded one by one, and ptxas issues all loads of a thread first: each takes a register.
        live += self.cols // 8 if fusion.bias == "m" else 0
        if fusion.aux and not fusion.residual:
            live += self.cols // 8 * width
        elif width == 4:
            live += self.cols // 4 + 8
        share = self.rows * self.cols // (128 * self.sharers)
        return live + (max(0, share - 40) if fusion.residual else 0)

    @property
    def producer_registers(self) -> int:
        return PRODUCER_REGISTERS

    @property
    def arch(self) -> str:
        """The suffix ``f`` unlocks setmaxnreg on this and later architectures of its family."""
        return "sm_120f"

    @property
    def chunk_cols(self) -> int:
        return widest_row(self.cols, self.element)

    @property
    def atom_cols(self) -> int:
        return self.cols

    # For the tuner and the cost model.

    FOLLOWING: ClassVar[frozenset[str]] = Warpgroups.FOLLOWING | {"registers", "swap_ab"}

    @classmethod
    def serves(cls, chip: Chip) -> bool:
        capability = chip.capability
        return capability.has_tma and not (capability.has_wgmma or capability.has_tcgen05)

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Fields]:
        """Tiles and splits of k, each with as many stages as fit and with one fewer."""
        tiles = [(False, tile) for tile in TILES] + [(True, tile) for tile in cls.swapped_tiles(problem)]
        for (swap_ab, tile), split_k, bk in product(tiles, SPLITS, cls.depths(problem)):
            bm, bn, schedule, consumers, registers = tile
            if cls.wastes_tile(problem, bm, bn):
                continue
            if split_k > 1 and ceil_div(problem.k, bk) < 2 * split_k:
                continue
            epilogue = "direct" if split_k > 1 or problem.n % problem.element.vector else "tma"
            deepest = deepest_ring(problem, bm + bn, bk, 4 * consumers if epilogue == "tma" else 0)
            for stages in range(deepest, max(1, deepest - 2), -1):
                yield {
                    "bm": bm, "bn": bn, "bk": bk, "stages": stages, "consumers": consumers, "schedule": schedule,
                    "raster_axis": "m" if problem.m >= problem.n else "n", "split_k": split_k, "swap_ab": swap_ab,
                    "epilogue": epilogue, "registers": registers, "min_blocks": 1, **UNTUNED,
                }  # fmt: skip

    @property
    def work(self) -> CtaWork:
        """Every warp reads 16 of every 64 rows and all columns of its warpgroup's share."""
        warps = 4 * self.sharers
        read_bytes = (self.rows + warps * self.cols) * self.k_step * self.element.bytes
        return CtaWork(
            "mma.sync",
            l2_bytes=self.step_bytes,
            shared_bytes=read_bytes + self.step_bytes,
            raster_band=self.raster_group,
            store="tma" if self.stores_tiles == "tma" else "direct",
            epilogue_hidden=self.schedule == "pingpong",
            tensor_maps=True,
            summed_by="all",
        )
