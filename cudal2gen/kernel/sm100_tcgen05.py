"""Defines the family sm100_tcgen05: TMA fills a ring, one thread multiplies into tensor memory, four warps store."""

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
    PrefetchB,
    RasterAxis,
    RasterGroup,
    RingBk,
    SplitK,
    Stages,
    StoreD,
    StreamK,
    TmaRing,
    deepest_ring,
    widest_row,
)
from cudal2gen.kernel.work import CtaWork
from kernelproof.ground.chips import GPUS, REGISTERS_THREAD, Chip
from kernelproof.ground.element import CHUNK_BYTES
from kernelproof.ground.integers import ceil_div

# tcgen05.mma (PTX ISA 9.7.16.2.1): its rows of D per CTA, and the most columns of D.
MMA_M, MMA_N = 128, 256
# Columns of tensor memory that an SM has, and of the smallest allocation (PTX ISA 9.7.16.1).
TENSOR_COLUMNS, MIN_COLUMNS = 512, 32
STORE_WARPS = 4  # warp i of a warpgroup can read lanes 32 i to 32 i + 31 of tensor memory
LOOP_CLOCKS = 40  # clocks of the issuing thread per k-tile: an assumption
# What the tuner tries: columns of a tile (the last one only in a pair); clusters, some of them pairs; slices of k.
WIDTHS = (32, 64, 96, 128, 160, 192, 224, 256, TENSOR_COLUMNS)
CLUSTERS: tuple[tuple[list[int], bool], ...] = (
    ([1, 1], False),
    ([2, 1], True),
    ([2, 2], True),
    ([1, 2], False),
    ([2, 1], False),
    ([2, 2], False),
)
WIDE_CLUSTER = CLUSTERS[1]  # the cluster of tiles that are wider than an instruction
SPLITS = (1, 2, 4, 8)
# Shared memory for scheduler clc: a response and its mbarrier, two slots of an item of work and two mbarriers, and the
# mbarrier that throttles claims.
CLAIM_BYTES = 80


class Sm100Tcgen05(TmaRing):
    """TMA loads into a ring, one thread multiplies by tcgen05.mma into tensor memory, four warps store; for sm_100f.

    Tensor memory holds the accumulators of up to two tiles, so that one is stored while the other is multiplied. In a
    ``pair`` one thread multiplies for two CTAs (cta_group::2): each CTA has 128 of the instruction's 256 rows and loads
    half of the operand on the column side. The instruction has 128 rows per CTA and 16 to 256 columns; a tile of up to
    512 columns is two instructions wide.
    """

    family: Annotated[Literal["sm100_tcgen05"], FAMILY]
    swap_ab: Annotated[
        bool, Field(description="compute D^T = B^T A^T: n along the 128 rows of the instruction, m along its columns")
    ]
    bk: RingBk
    stages: Stages
    cluster: Annotated[
        tuple[Literal[1, 2], Literal[1, 2]],
        Field(description="CTAs along m that share tiles of B, and along n that share tiles of A"),
    ]
    pair: Annotated[
        bool, Field(description="two CTAs, neighbours along the rows of the instruction, multiply as one of 256 rows")
    ]
    accumulators: Annotated[
        Literal[1, 2],
        Field(description="tiles whose accumulators tensor memory holds; 2: one is stored as the next is multiplied"),
    ]
    raster_axis: RasterAxis
    raster_group: RasterGroup
    split_k: SplitK
    epilogue: StoreD
    hint_a: HintA
    hint_b: HintB
    pdl: Overlap
    stream_k: StreamK = False
    scheduler: Annotated[
        Literal["static", "clc"],
        Field(description="a cluster's next tile: by its rank in a persistent grid, or claimed from a full grid"),
    ] = "static"
    prefetch_b: PrefetchB = False

    warp_rows: ClassVar[int] = 32
    atom_rows: ClassVar[int] = 16
    holds_tile: ClassVar[bool] = False
    instruction: ClassVar[str] = "instruction"
    fragment: ClassVar[str] = "load"

    @classmethod
    def plain(cls, problem: Problem) -> dict[str, Any]:
        """A tile of 128 rows, wide if the problem is large. If D has few rows, they become columns of the
        instruction."""
        swap_ab = problem.m <= MMA_M // 2
        bm = ceil_div(problem.m, 16) * 16 if swap_ab else MMA_M
        wide = ceil_div(problem.m, bm) * ceil_div(problem.n, MMA_N) >= GPUS[problem.gpu].sms // 2
        bn = MMA_N if not swap_ab and wide else MMA_M
        return {
            "bm": bm,
            "bn": bn,
            "swap_ab": swap_ab,
            "bk": problem.element.chunk,
            "stages": min(8, 200_000 // ((bm + bn) * CHUNK_BYTES)),  # of 232448 bytes of a CTA; the rest stores D
            "cluster": [1, 1],
            "pair": False,
            "accumulators": 2,
            "raster_axis": "m",
            "split_k": 1,
            "epilogue": "direct" if problem.n % problem.element.vector else "tma",
            **UNTUNED,
        }

    def violations(self) -> Iterator[str]:
        if broken := [*self._tile_violations(), *self.stream_violations()]:
            yield from broken
            return
        yield from self._claim_violations()
        yield from self.row_violations()
        yield from self.count_violations()
        yield from self.group_violations()
        if broken := list(self.smem_violations(f"stages={self.stages}")):
            yield from broken
        elif self.ctas_by_smem * self.columns > TENSOR_COLUMNS:
            yield (
                f"stages={self.stages}: {self.ctas_by_smem} CTAs, for which an SM has shared memory, wait for "
                f"{self.columns} columns of tensor memory each, and it has {TENSOR_COLUMNS}"
            )

    def _claim_violations(self) -> Iterator[str]:
        """The rule that clusters claim tiles only if no CTA waits for the sums of another."""
        if self.claims_tiles and self.keeps_parts:
            field = "stream_k=true" if self.stream_k else f"split_k={self.split_k}"
            yield f"scheduler=clc: must be static for {field}, whose CTAs add each other's sums and must run at once"

    def _tile_violations(self) -> Iterator[str]:
        """Rules that tie the tile to the instruction, to tensor memory and to the cluster."""
        along_rows, along_cols = ("bn", "bm") if self.swap_ab else ("bm", "bn")
        step = 32 if self.pair else 16
        if self.rows != MMA_M:
            yield f"{along_rows}={self.rows}: must be {MMA_M}, the rows of tcgen05.mma that a CTA has"
        if self.cols % (step * self.panels) or (self.swap_ab and self.panels > 1):
            wider = "swap_ab is for few rows of D" if self.swap_ab else f"or of {2 * step} up to {2 * MMA_N}, of two"
            yield (
                f"{along_cols}={self.cols}: must be a multiple of {step} up to {MMA_N}, columns of one tcgen05.mma, "
                f"{wider}"
            )
        elif self.accumulators * self.cols > TENSOR_COLUMNS:
            yield (
                f"accumulators={self.accumulators}: must be 1 for {along_cols}={self.cols}, a CTA has {TENSOR_COLUMNS} "
                f"columns of tensor memory"
            )
        if self.pair and not self._pairs_neighbours:
            cluster = "[1, 2] with swap_ab" if self.swap_ab else "[2, ..]"
            yield f"cluster={list(self.cluster)}: must be {cluster} for pair, CTAs whose ranks differ in the last bit"
        if self.cols % step == 0:
            yield from self.gate_violations(along_cols, self.cols)

    @property
    def _pairs_neighbours(self) -> bool:
        """Whether the CTAs of even and odd rank are neighbours along the rows of the instruction."""
        return self.cluster == (1, 2) if self.swap_ab else self.cluster[0] == 2

    @property
    def threads(self) -> int:
        """Four warps, which load, multiply, allocate, and rest or claim tiles; then the warpgroup that stores."""
        return 256

    @property
    def arch(self) -> str:
        """The suffix ``f`` unlocks tcgen05 on this and later architectures of its family; the code is that of ``a``."""
        return "sm_100f"

    @property
    def columns(self) -> int:
        """Columns of tensor memory that a CTA allocates: a power of two."""
        return max(MIN_COLUMNS, 1 << (self.accumulators * self.cols - 1).bit_length())

    @property
    def panels(self) -> int:
        return ceil_div(self.cols, MMA_N)

    @property
    def part_a(self) -> int:
        return self.bm // 2 if self.pair and self.swap_ab else self.bm

    @property
    def part_b(self) -> int:
        return self.bn // 2 if self.pair and not self.swap_ab else self.bn

    @property
    def sharers_a(self) -> int:
        return self.cluster[1] // 2 if self.pair and self.swap_ab else self.cluster[1]

    @property
    def sharers_b(self) -> int:
        return self.cluster[0] // 2 if self.pair and not self.swap_ab else self.cluster[0]

    @property
    def chunk_cols(self) -> int:
        return widest_row(self.part_a if self.swap_ab else self.panel_b, self.element)

    @property
    def store_warps(self) -> int:
        return STORE_WARPS

    @property
    def atom_cols(self) -> int:
        """Columns of one load from tensor memory."""
        return next(cols for cols in (64, 32, 16) if self.cols % cols == 0)

    @property
    def accumulator_registers(self) -> int:
        """Registers of one load from tensor memory, where the tile's accumulators are."""
        return self.atom_cols // (2 if self.acc == "f16" else 1)

    @property
    def estimated_registers(self) -> int:
        return min(REGISTERS_THREAD, self.accumulator_registers + 64)  # for addresses and the epilogue: a guess

    @property
    def barrier_bytes(self) -> int:
        """Two mbarriers per stage and per tile of accumulators, the address of these tiles, and the bytes of clc."""
        return 16 * self.stages + 48 + (CLAIM_BYTES if self.claims_tiles else 0)

    @property
    def tensor_tiles(self) -> int:
        return self.accumulators

    @property
    def paired(self) -> bool:
        return self.pair

    @property
    def prefetches_b(self) -> bool:
        return self.prefetch_b

    @property
    def claims_tiles(self) -> bool:
        return self.scheduler == "clc"

    @property
    def item_readers(self) -> int:
        """Warps of a cluster that take items of work: those that load, multiply (one warp for a pair), and store."""
        multiplying = self.cluster_ctas // 2 if self.pair else self.cluster_ctas
        return self.cluster_ctas * (1 + STORE_WARPS) + multiplying

    @property
    def tiles_at_once(self) -> int:
        return self.accumulators

    @property
    def warnings(self) -> list[str]:
        """Adds warnings about clusters that reach beyond the problem or leave SMs idle."""
        return [*super().warnings, *self.cluster_warnings()]

    @property
    def remarks(self) -> list[str]:
        """Adds a note if all tiles run at the same time, so that there is nothing to claim."""
        remarks = super().remarks
        at_once = self.target.sms * max(1, self.ctas_per_sm(self.estimated_registers))
        if self.claims_tiles and not self.batched and self.ctas <= at_once:
            remarks.append(f"scheduler=clc: {self.ctas} tiles run at once on {self.gpu}, so none is claimed")
        return remarks

    @property
    def facts(self) -> dict[str, int | str]:
        return super().facts | {"tensor_memory_columns": self.columns}

    # For the tuner and the cost model.

    FOLLOWING: ClassVar[frozenset[str]] = TmaRing.FOLLOWING | {"swap_ab"}

    @classmethod
    def serves(cls, chip: Chip) -> bool:
        return chip.capability.has_tcgen05

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Fields]:
        """Tiles, pairs and clusters, splits of k; as many stages as fit, then one and two fewer. If there are more
        tiles than run at once and k is not split, also clusters that claim tiles."""
        tiles = [(False, MMA_M, bn) for bn in WIDTHS if bn < 2 * problem.n or bn == WIDTHS[0]]
        if problem.m <= MMA_M // 2:
            # D has few rows, so D^T = B^T A^T, which has many, fills the 128 rows of the instruction better.
            tiles += [(True, ceil_div(problem.m, 16) * 16, MMA_M)]
        for (swap_ab, bm, bn), (cluster, pair), split_k, bk in product(tiles, CLUSTERS, SPLITS, cls.depths(problem)):
            cluster_mn = cluster[::-1] if swap_ab else cluster
            wide = bn > MMA_N
            if (split_k > 1 and ceil_div(problem.k, bk) < 2 * split_k) or (wide and (cluster, pair) != WIDE_CLUSTER):
                continue
            epilogue = "direct" if split_k > 1 or problem.n % problem.element.vector else "tma"
            # Rows of A and columns of B in a stage of one CTA. A pair halves the operand on the column side.
            extent = bm + bn - ((bm if swap_ab else bn) // 2 if pair else 0)
            deepest = deepest_ring(problem, extent, bk, STORE_WARPS if epilogue == "tma" else 0)
            depths = [(stages, "static") for stages in range(deepest, max(1, deepest - 3), -1)]
            waves = ceil_div(problem.m, bm) * ceil_div(problem.n, bn) / GPUS[problem.gpu].sms
            if waves > 1 and split_k == 1 and deepest > 1:
                depths.append((deepest, "clc"))
            for stages, scheduler in depths:
                yield {
                    "bm": bm, "bn": bn, "bk": bk, "stages": stages, "cluster": cluster_mn, "pair": pair,
                    "accumulators": 1 if wide else 2, "raster_axis": "m" if problem.m >= problem.n else "n",
                    "split_k": split_k, "swap_ab": swap_ab, "epilogue": epilogue, **UNTUNED,
                    **({"scheduler": scheduler} if scheduler != "static" else {}),
                }  # fmt: skip

    @property
    def work(self) -> CtaWork:
        """The CTAs of a pair share the operand on the column side; a cluster's CTAs share A along n and B along m.

        Every panel reads the operand on the row side again.
        """
        cluster_m, cluster_n = self.cluster
        rows_again = (self.panels - 1) * self.rows * self.k_step * self.element.bytes
        return CtaWork(
            "tcgen05.mma",
            l2_bytes=(self.bm / cluster_n + self.bn / cluster_m) * self.k_step * self.element.bytes,
            shared_bytes=2 * self.step_bytes + rows_again,
            raster_band=self.raster_group,
            store="tma" if self.stores_tiles == "tma" else "direct",
            epilogue_hidden=self.accumulators == 2,
            tensor_maps=True,
            issue_clocks=LOOP_CLOCKS,
            summed_by="all",
        )
