"""Defines the family sm90_wgmma: a producer fills a ring by TMA, consumer warpgroups multiply by wgmma."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from cudal2gen.kernel.problem import Problem
from cudal2gen.kernel.record import FAMILY, Fields
from cudal2gen.kernel.sm90 import CLUSTER_SPLITS, Overlap
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
    SummedIn,
    deepest_ring,
    widest_row,
)
from cudal2gen.kernel.warpgroups import Consumers, MinBlocks, Registers, Schedule, Tile, Warpgroups
from cudal2gen.kernel.work import CtaWork
from kernelproof.ground.chips import GPUS
from kernelproof.ground.element import CHUNK_BYTES
from kernelproof.ground.integers import ceil_div

WGMMA_M = 64  # rows of one wgmma, 16 per warp
WGMMA_N = 256  # most columns of one wgmma
# Registers that ptxas needs besides the accumulators: at entry (else it warns with C7602), and in the main loop (else
# C7511, or it spills).
ATOM_REGISTERS, LIVE_REGISTERS = 26, 32
# Registers besides the accumulators for an epilogue that stores directly and checks bounds: usually, and with swap_ab.
LIVE_REGISTERS_DIRECT, LIVE_REGISTERS_ACROSS = 56, 48
# Clocks per k-tile for which the main loop stalls: outside of its wgmmas, and for each of them (code of ptxas 13.0).
LOOP_CLOCKS, WGMMA_CLOCKS = 63, 12
PRODUCER_REGISTERS = (24, 32)  # in general, and for a cluster with boxes of 16 columns

# What the tuner tries: bm, bn, schedule, consumers and registers of tiles that ptxas compiles without spills,
# by accumulator; clusters; splits of k with their reduction and stream_k.
TILES: dict[str, list[Tile]] = {
    "f32": [
        *[(128, bn, "cooperative", 2, [40, 232]) for bn in (64, 96, 128, 160, 192, 224, 256)],
        *[(256, bn, "cooperative", 2, [40, 232]) for bn in (64, 96, 128, 160, 192)],
        (256, 208, "cooperative", 2, [24, 240]),
        *[(192, bn, "cooperative", 3, [32, 160]) for bn in (128, 192)],
        *[(64, bn, "cooperative", 1, None) for bn in (32, 64, 96, 128, 192)],
        (128, 384, "cooperative", 2, [40, 232]),
        *[(64, bn, "pingpong", 2, [40, 232]) for bn in (64, 128, 192, 256)],
        *[(128, bn, "pingpong", 2, [40, 232]) for bn in (64, 96, 128, 160, 192)],
        (128, 208, "pingpong", 2, [24, 240]),
        (192, 128, "pingpong", 2, [40, 232]),
    ],
    "f16": [
        *[(128, bn, "cooperative", 2, [40, 232]) for bn in (64, 96, 128, 160, 192, 224, 256)],
        *[(256, bn, "cooperative", 2, [40, 232]) for bn in (64, 96, 128, 160, 192, 256)],
        *[(64, bn, "cooperative", 1, None) for bn in (32, 64, 96, 128, 192)],
        *[(64, bn, "pingpong", 2, [40, 232]) for bn in (64, 128, 192, 256)],
        *[(128, bn, "pingpong", 2, [40, 232]) for bn in (64, 128, 192, 256)],
        *[(192, bn, "pingpong", 2, [40, 232]) for bn in (128, 192, 256)],
    ],
}
CLUSTERS = ([1, 1], [2, 1], [1, 2], [4, 1], [2, 2], [1, 4])
SPLITS: tuple[tuple[int, str | None, bool], ...] = (
    (1, None, False),
    (1, None, True),
    *((slices, "cluster", False) for slices in CLUSTER_SPLITS),
    *((slices, "workspace", False) for slices in (4, 8, 16)),
)
MIN_SHARED_STEPS = 8  # fewest k-steps of a tile that are worth sharing out


class Sm90Wgmma(Warpgroups):
    """A persistent kernel: a producer loads by TMA into a ring, consumer warpgroups multiply by wgmma; for sm_90a.

    A wgmma has 64 rows and 16 to 256 columns.
    """

    family: Annotated[Literal["sm90_wgmma"], FAMILY]
    swap_ab: Annotated[
        bool, Field(description="compute D^T = B^T A^T: n along the 64 rows of a wgmma, m along its columns")
    ]
    bk: RingBk
    stages: Stages
    cluster: Annotated[
        tuple[Literal[1, 2, 4], Literal[1, 2, 4]],
        Field(description="CTAs along m that share tiles of B, and along n that share tiles of A, by multicast"),
    ]
    consumers: Consumers
    atom_n: Annotated[int, Field(ge=16, le=WGMMA_N, multiple_of=16, description="columns of one wgmma instruction")]
    schedule: Schedule
    raster_axis: RasterAxis
    raster_group: RasterGroup
    split_k: SplitK
    reduce: Annotated[
        Literal["cluster", "workspace"] | None,
        Field(description="where slices are summed: shared memory of a cluster, or device memory; null for split_k 1"),
    ]
    epilogue: StoreD
    registers: Registers
    hint_a: HintA
    hint_b: HintB
    pdl: Overlap
    min_blocks: MinBlocks
    stream_k: StreamK = False
    prefetch_b: PrefetchB = False

    atom_rows: ClassVar[int] = WGMMA_M
    instruction: ClassVar[str] = "wgmma"
    fragment: ClassVar[str] = "wgmma"

    @classmethod
    def plain(cls, problem: Problem) -> dict[str, Any]:
        """A tile of 128 rows, wide if the problem is large. If D has few rows, they become columns of the wgmma."""
        swap_ab = problem.m <= WGMMA_M
        bm = ceil_div(problem.m, 16) * 16 if swap_ab else 128
        # Wide tiles if they occupy at least half of the 132 SMs of an H100 or H200.
        bn = 256 if not swap_ab and ceil_div(problem.m, bm) * ceil_div(problem.n, 256) >= 66 else 128
        stages = min(8, 220_000 // ((bm + bn) * CHUNK_BYTES))  # of 232448 bytes of a CTA; the rest stores D
        return {
            "bm": bm,
            "bn": bn,
            "swap_ab": swap_ab,
            "bk": problem.element.chunk,
            "stages": stages,
            "cluster": [1, 1],
            "consumers": 2,
            "atom_n": bm if swap_ab else bn,
            "schedule": "cooperative",
            "raster_axis": "m",
            "split_k": 1,
            "reduce": None,
            "epilogue": "direct" if problem.n % problem.element.vector else "tma",
            "registers": [40, 232],
            "min_blocks": 1,
            **UNTUNED,
        }

    def violations(self) -> Iterator[str]:
        if broken := [*self._tile_violations(), *self._split_violations(), *self.stream_violations()]:
            yield from broken
            return
        yield from self.row_violations()
        yield from self.count_violations()
        yield from self.group_violations()
        yield from self._box_violations()
        yield from self._register_violations()
        yield from self.occupancy_violations()

    def _tile_violations(self) -> Iterator[str]:
        """Rules for the division of a tile into consumers and wgmmas."""
        yield from self.share_violations()
        if self.cols % self.atom_n:
            yield f"atom_n={self.atom_n}: must divide {'bm' if self.swap_ab else 'bn'}={self.cols}"
        yield from self.gate_violations("atom_n", self.atom_n)

    def _split_violations(self) -> Iterator[str]:
        """Rules for ``reduce``: most are about sums in the shared memory of a cluster."""
        if (self.reduce is not None) != (self.split_k > 1):
            yield f"reduce={self.reduce or 'null'}: is given for split_k above 1, and only there"
        if not self.reduces_in_cluster:
            return
        if self.split_k not in CLUSTER_SPLITS:
            yield f"split_k={self.split_k}: must be one of 2, 4, 8 for reduce cluster, a cluster has no more CTAs"
        if self.cluster != (1, 1):
            yield f"cluster={list(self.cluster)}: must be [1, 1] for reduce cluster, whose clusters share one tile"
        if self.schedule != "cooperative":
            yield "schedule=pingpong: must be cooperative for reduce cluster, one tile at a time"
        if self.epilogue != "direct":
            yield "epilogue=tma: must be direct for reduce cluster, each CTA stores scattered columns of the sum"
        size = self.cluster_sum_bytes(128 * self.sharers, self.fusion.gate and not self.swap_ab)
        if size > self.ring_bytes:
            yield f"reduce=cluster: {size} bytes of partial sums exceed the ring's {self.ring_bytes}"

    def _box_violations(self) -> Iterator[str]:
        """Rules for clusters, whose CTAs each load a part of a shared tile."""
        cluster_m, cluster_n = self.cluster
        if cluster_m * cluster_n > 4:
            yield f"cluster={list(self.cluster)}: {cluster_m * cluster_n} CTAs exceed 4"
        if self.along_k.a and self.bm % (8 * cluster_n):
            yield f"bm={self.bm}: must be a multiple of 8*cluster[1] = {8 * cluster_n}, a CTA's part of the rows of A"
        if self.along_k.b and self.bn % (8 * cluster_m):
            yield f"bn={self.bn}: must be a multiple of 8*cluster[0] = {8 * cluster_m}, a CTA's part of the rows of B"

    def _register_violations(self) -> Iterator[str]:
        """Rules for setmaxnreg, and for the registers at entry and in the main loop."""
        if self.registers is not None and (broken := list(self.pool_violations(*self.registers))):
            yield from broken
            return
        # A wgmma has 64 * atom_n sums, shared by 128 threads; a register holds one in fp32 or two in fp16.
        atom = self.atom_n // (4 if self.acc == "f16" else 2)
        if atom + ATOM_REGISTERS > self.entry_registers:
            yield (
                f"atom_n={self.atom_n}: {atom} accumulator registers of one wgmma, and {ATOM_REGISTERS} besides them, "
                f"exceed the {self.entry_registers} that {self.threads} threads start with"
            )
        else:
            yield from self.consumer_violations()

    @property
    def live_registers(self) -> int:
        """Registers that a consumer needs besides its accumulators."""
        if self.stores_tiles != "direct" or self.reduces_in_cluster:
            return LIVE_REGISTERS
        # If operands are swapped, every 8 columns belong to another row of D, whose address takes registers.
        return LIVE_REGISTERS_ACROSS + self.cols // 4 if self.swap_ab else LIVE_REGISTERS_DIRECT

    @property
    def producer_registers(self) -> int:
        """The fewest registers with which the producer does not spill."""
        narrow = self.cluster != (1, 1) and min(self.chunk_a, self.chunk_b) == 16
        return PRODUCER_REGISTERS[narrow]

    @property
    def chunk_cols(self) -> int:
        return widest_row(self.atom_n, self.element)

    @property
    def atom_cols(self) -> int:
        return self.atom_n

    @property
    def reduces_in_cluster(self) -> bool:
        """Whether the CTAs of a cluster sum slices of k in shared memory."""
        return self.reduce == "cluster"

    @property
    def prefetches_b(self) -> bool:
        return self.prefetch_b

    @property
    def persistent(self) -> bool:
        return not self.reduces_in_cluster

    @property
    def summed_in(self) -> SummedIn:
        return "stream" if self.stream_k else self.reduce or "none"

    @property
    def cluster_ctas(self) -> int:
        return self.split_k if self.reduces_in_cluster else super().cluster_ctas

    # For the tuner and the cost model.

    FOLLOWING: ClassVar[frozenset[str]] = Warpgroups.FOLLOWING | {"atom_n", "reduce", "registers", "swap_ab"}

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Fields]:
        """Tiles, clusters and splits of k, each with as many stages as fit, and with one and two fewer."""
        tiles = [(False, tile) for tile in TILES[problem.acc]] + [(True, tile) for tile in cls.swapped_tiles(problem)]
        choices = product(tiles, CLUSTERS, SPLITS, cls.depths(problem))
        for (swap_ab, tile), cluster, (split_k, reduce, stream_k), bk in choices:
            bm, bn, schedule, consumers, registers = tile
            if cls.wastes_tile(problem, bm, bn):
                continue
            splittable = cluster == [1, 1] and schedule == "cooperative"
            if split_k > 1 and (not splittable or ceil_div(problem.k, bk) < 2 * split_k):
                continue
            if stream_k and (schedule != "cooperative" or not cls._shares_last_wave(problem, bm, bn, bk, cluster)):
                continue
            epilogue = "direct" if reduce or problem.n % problem.element.vector else "tma"
            deepest = deepest_ring(problem, bm + bn, bk, 4 * consumers if epilogue == "tma" else 0)
            for stages in range(deepest, max(1, deepest - 3), -1):
                yield {
                    "bm": bm, "bn": bn, "bk": bk, "stages": stages, "cluster": cluster, "consumers": consumers,
                    "atom_n": bm if swap_ab else bn if bn <= WGMMA_N else bn // 2, "schedule": schedule,
                    "raster_axis": "m" if problem.m >= problem.n else "n", "split_k": split_k, "reduce": reduce,
                    "swap_ab": swap_ab, "epilogue": epilogue, "registers": registers, "min_blocks": 1, **UNTUNED,
                    **({"stream_k": True} if stream_k else {}),
                }  # fmt: skip

    @classmethod
    def _shares_last_wave(cls, problem: Problem, bm: int, bn: int, bk: int, cluster: list[int]) -> bool:
        """Whether stream_k may help: the last wave does not fill the GPU, and there are enough k-steps to share."""
        tiles = ceil_div(ceil_div(problem.m, bm), cluster[0]) * ceil_div(ceil_div(problem.n, bn), cluster[1])
        last_wave = tiles % (GPUS[problem.gpu].sms // (cluster[0] * cluster[1]))
        return problem.acc == "f32" and last_wave > 0 and ceil_div(problem.k, bk) >= MIN_SHARED_STEPS

    @property
    def work(self) -> CtaWork:
        """CTAs of a cluster share A along n and B along m, so each part is loaded from the L2 once."""
        cluster_m, cluster_n = self.cluster
        atoms = self.rows // WGMMA_M * (self.cols // self.atom_n)
        read_bytes = atoms * (WGMMA_M + self.atom_n) * self.k_step * self.element.bytes
        own_wgmmas = atoms // self.sharers * (self.k_step // self.element.mma_k)
        return CtaWork(
            "wgmma",
            l2_bytes=(self.bm / cluster_n + self.bn / cluster_m) * self.k_step * self.element.bytes,
            issuers=self.consumers,
            shared_bytes=read_bytes + self.step_bytes,
            raster_band=self.raster_group,
            store="tma" if self.stores_tiles == "tma" else "direct",
            epilogue_hidden=self.schedule == "pingpong",
            tensor_maps=True,
            issue_clocks=LOOP_CLOCKS + WGMMA_CLOCKS * own_wgmmas,
            summed_by="cluster" if self.reduces_in_cluster else "all",
        )
