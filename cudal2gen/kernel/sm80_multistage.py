"""Defines the family sm80_multistage: cp.async fills a ring in shared memory, ldmatrix and mma.sync multiply."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from cudal2gen.kernel.fieldset import spell
from cudal2gen.kernel.launch import Raster, Tiles
from cudal2gen.kernel.mma_sync import MAX_GRID_YZ, MMA_M, MMA_N, SPLITS, MmaSyncKernel
from cudal2gen.kernel.problem import MAX_EXTENT, Problem
from cudal2gen.kernel.record import FAMILY, Fields, Record, Ring
from cudal2gen.kernel.smem_tiles import SmemTiles, Swizzle, power_of_two, swizzle_violations
from cudal2gen.kernel.work import CtaWork
from kernelproof.ground.chips import GPUS, REGISTERS_SM, REGISTERS_THREAD, Chip
from kernelproof.ground.integers import ceil_div
from kernelproof.ground.schema import Schema

# What the tuner tries: bm and bn; warps along m, n and k; stages; orders of loads; columns of a zsplit raster's slice.
TILES = (
    *((16, bn) for bn in (16, 32, 64)),
    *((32, bn) for bn in (32, 64, 128)),
    *((64, bn) for bn in (32, 64, 96, 128, 192, 256)),
    *((96, bn) for bn in (64, 128, 256)),
    *((128, bn) for bn in (32, 64, 96, 128, 160, 192, 256)),
    *((160, 128), (256, 64), (256, 128), (256, 256)),
)
WARPS = ([1, 1, 1], [1, 2, 1], [2, 2, 1], [4, 2, 1], [2, 4, 1])
STAGES = (2, 3, 4, 6)
PREFETCHES: tuple[Fields, ...] = (
    {"kind": "single", "distance": None},
    {"kind": "none", "distance": None},
    {"kind": "single_intra_tile", "distance": None},
    {"kind": "multi", "distance": 2},
)
STRIDES = (512, 1024, 2048, 4096)
# The decisions with which D is stored directly from registers.
DIRECT_STORES: Fields = {"epilogue": "global", "c_batch": None, "r2s_bytes": None, "smem_swizzle_c": None}
COPY_REGISTERS = 16  # registers beyond the estimate that kernels of the catalog take for predicated copies


class Prefetch(Schema):
    """The order of loads from shared memory to registers and of MMAs in a k-tile."""

    kind: Annotated[
        Literal["single", "single_intra_tile", "none", "multi", "pingpong", "staggered"],
        Field(description="how fragments are loaded ahead of their MMAs"),
    ]
    distance: Annotated[
        Annotated[int, Field(ge=2, le=8)] | None,
        Field(description="k-blocks of 16 by which multi loads ahead, null otherwise"),
    ]


class Sm80Multistage(Ring, SmemTiles, MmaSyncKernel):
    """A ring of cp.async stages in shared memory, ldmatrix and mma.sync; for sm_80, 86, 89, 90 and 120."""

    family: Annotated[Literal["sm80_multistage"], FAMILY]
    bk: Annotated[int, Field(ge=16, le=256, description="k of a stage, elements")]
    stages: Annotated[int, Field(ge=1, le=13, description="k-tiles in shared memory; all but one are on their way")]
    min_blocks: Annotated[
        int, Field(ge=1, le=32, description="CTAs per SM that the compiler bounds registers for (__launch_bounds__)")
    ]
    smem_swizzle: Annotated[Swizzle, Field(description="Swizzle<bits, base, shift> of a stage, on elements")]
    smem_swizzle_c: Annotated[
        Swizzle | None, Field(description="swizzle of the staged D; given iff r2s_bytes is 4, null otherwise")
    ]
    g2s_cols: Annotated[
        Literal[1, 2, 4, 8, 16, 32],
        Field(description="threads along a row of a tile as it is copied; the others take further rows"),
    ]
    g2s_slot: Annotated[
        int, Field(ge=0, le=15, description="k-block of the main loop in which the next stage is requested, from 0")
    ]
    raster: Annotated[
        Raster,
        Field(
            description="order of tiles: plain rows, zsplit slices of columns, persistent CTAs that take tiles in turn"
        ),
    ]
    swizzle_stride: Annotated[
        Annotated[int, Field(ge=1, le=MAX_EXTENT)] | None,
        Field(description="columns in a slice of zsplit, elements; null otherwise"),
    ]
    prefetch: Annotated[Prefetch, Field(description="order of shared-to-register loads and MMAs in a k-tile")]
    epilogue: Annotated[
        Literal["staged", "direct", "global"],
        Field(
            description="D is stored via shared memory in rounds (staged: of c_batch; direct: few), or from registers"
        ),
    ]
    c_batch: Annotated[
        Annotated[int, Field(ge=1, le=64)] | None,
        Field(description="16x16 MMA tiles of a warp in one round of epilogue staged; null otherwise"),
    ]
    r2s_bytes: Annotated[
        Literal[4, 8, 16] | None, Field(description="bytes of one store to the staged D; null for epilogue global")
    ]

    DATA_FIELDS: ClassVar[frozenset[str]] = Record.DATA_FIELDS | {option.name for option in Tiles.options}

    def violations(self) -> Iterator[str]:
        if self.bk % (mma_k := self.element.mma_k):
            yield f"bk={self.bk}: must be a multiple of {mma_k}, the k of one MMA"
            return
        yield from self.problem_violations()
        yield from self._copy_violations()
        yield from self._mainloop_violations()
        yield from self._epilogue_violations()
        yield from self._raster_violations()
        yield from self.smem_violations(f"stages={self.stages}")
        if self.min_blocks > 1 and self.min_blocks * self.threads > (most := self.target.capability.threads_sm):
            yield f"min_blocks={self.min_blocks}: {self.threads} threads each exceed the {most} of an SM"

    def _copy_violations(self) -> Iterator[str]:
        """Rules for the copies into the ring: threads along a row, and the swizzle of a stage."""
        vectors = self.bk // self.element.vector
        if vectors % self.g2s_cols:
            yield f"g2s_cols={self.g2s_cols}: must divide the {vectors} vectors of a row of bk={self.bk}"
        if self.threads % self.g2s_cols:
            yield f"g2s_cols={self.g2s_cols}: must divide the {self.threads} threads"
        sizes = {"bm*bk": self.bm * self.bk, "bn*bk": self.bn * self.bk}
        yield from swizzle_violations("smem_swizzle", self.smem_swizzle, sizes)

    def _mainloop_violations(self) -> Iterator[str]:
        """Rules that tie the prefetch and the slot of the next copy to the k-blocks of a k-tile."""
        kind, distance = self.prefetch.kind, self.prefetch.distance
        if (distance is not None) != (kind == "multi"):
            yield f"prefetch.distance={distance}: is given for kind multi, and only there"
        elif self.prefetch_distance >= self.k_blocks:
            yield (
                f"prefetch={kind}: loads {self.prefetch_distance} k-blocks ahead, "
                f"which needs more than the {self.k_blocks} k-blocks of bk={self.bk}"
            )
        elif self.stages == 1 and self.g2s_slot:
            yield f"g2s_slot={self.g2s_slot}: must be 0 with one stage, its copy waits for the end of the tile"
        elif self.g2s_slot > self.last_slot:
            yield (
                f"g2s_slot={self.g2s_slot}: must not exceed {self.last_slot}, "
                f"the k-block of bk={self.bk} in which prefetch {kind} waits for the next tile"
            )

    def _epilogue_violations(self) -> Iterator[str]:
        """Rules for the way in which D is stored."""
        staged = self.epilogue != "global"
        if staged and self.problem.d == "f32":
            settings = " ".join(f"--set {field}={spell(value)}" for field, value in DIRECT_STORES.items())
            yield (f"epilogue={self.epilogue}: must be global for d=f32, whose pairs fill sectors ({settings})")
            return
        if (self.r2s_bytes is not None) != staged:
            yield f"r2s_bytes={self.r2s_bytes}: is given unless epilogue is global"
            return
        if (self.c_batch is not None) != (self.epilogue == "staged"):
            yield f"c_batch={self.c_batch}: is given for epilogue staged, and only there"
            return
        if (self.smem_swizzle_c is not None) != (self.r2s_bytes == 4):
            given = self.smem_swizzle_c and list(self.smem_swizzle_c)  # as JSON has it
            yield f"smem_swizzle_c={given}: is given iff r2s_bytes is 4 (rows are staged)"
            return
        if self.fusion.gate and staged and self.warp_n % 4:
            yield (
                f"bn={self.bn}: must be a multiple of 32*mma_repeat[1] = {32 * self.mma_repeat[1]} for gate in "
                f"epilogue {self.epilogue}, which stages 16 columns of D of each warp"
            )
            return
        if self.c_batch is not None:
            if self.c_batch > self.mma_tiles:
                yield f"c_batch={self.c_batch}: exceeds the {self.mma_tiles} MMA tiles of a warp"
            elif self.staging_bytes > self.ring_bytes:
                yield f"c_batch={self.c_batch}: {self.staging_bytes} staged bytes exceed the ring's {self.ring_bytes}"
        if self.smem_swizzle_c is not None:
            yield from swizzle_violations("smem_swizzle_c", self.smem_swizzle_c, {"MMA tile": 8 * self.threads})

    def _raster_violations(self) -> Iterator[str]:
        """The broken rules of the order of tiles."""
        if (self.swizzle_stride is not None) != (self.raster == "zsplit"):
            yield f"swizzle_stride={self.swizzle_stride}: is given for raster zsplit, and only there"
        elif self.grouped and self.raster == "zsplit":
            yield "raster=zsplit: must be plain or persistent for batch=grouped"
        elif self.slices_n > MAX_GRID_YZ:
            yield f"swizzle_stride={self.swizzle_stride}: {self.slices_n} slices exceed the grid's {MAX_GRID_YZ}"

    @property
    def k_blocks(self) -> int:
        """MMA steps in one k-tile."""
        return self.bk // self.element.mma_k

    @property
    def prefetch_distance(self) -> int:
        """How many k-blocks ahead of its MMA a fragment is loaded; within one k-tile for single_intra_tile."""
        kind = self.prefetch.kind
        return 0 if kind == "none" else self.prefetch.distance or 1

    @property
    def across_tiles(self) -> bool:
        """Whether the first fragments of a k-tile are loaded while the previous one is being multiplied."""
        return self.prefetch.kind not in ("none", "single_intra_tile")

    @property
    def last_slot(self) -> int:
        """The last k-block of a k-tile in which the next copy can be issued: the one that waits for the next tile."""
        return self.k_blocks - (self.prefetch_distance if self.across_tiles else 1)

    @property
    def copies_in_slot(self) -> bool:
        """Whether the next copy is issued in its own k-block. Otherwise it is issued just before the wait for the next
        tile, or there is only one stage."""
        return self.stages > 1 and not (self.across_tiles and self.g2s_slot == self.last_slot)

    @property
    def swizzle_along_k(self) -> Swizzle:
        return self.smem_swizzle

    @property
    def constant_stages(self) -> bool:
        return self.unroll_k

    @property
    def copy_cols_along_k(self) -> int:
        return self.g2s_cols

    @property
    def mma_tiles(self) -> int:
        """16x16 MMA tiles of D of one warp, the unit of ``c_batch``."""
        return self.warp_m * self.fusion.d_cols(self.warp_n) // 2

    @property
    def ring_bytes(self) -> int:
        """Shared memory of the stages of A and B."""
        return self.stages * self.step_bytes

    @property
    def staging_tiles(self) -> int:
        """MMA tiles of a warp in one round through shared memory.

        Epilogue direct takes as few rounds as the ring's memory allows, and makes them as equal as possible.
        """
        # A tile that is too small to be legal has no MMA tile, but its rules are evaluated too: avoid division by zero.
        rounds = max(1, ceil_div(self.mma_tiles, max(1, self.ring_bytes // (16 * self.threads))))
        return {"staged": self.c_batch or 0, "direct": ceil_div(self.mma_tiles, rounds), "global": 0}[self.epilogue]

    @property
    def staging_bytes(self) -> int:
        """Bytes of one round of D: each thread has 8 elements of 2 bytes of a 16x16 tile."""
        return self.staging_tiles * self.threads * 16

    @property
    def smem_bytes(self) -> int:
        return max(self.ring_bytes, self.staging_bytes)

    @property
    def static_steps_c(self) -> bool:
        """Whether the addresses of a thread's pairs in staged rows of D differ by constants."""
        return self.r2s_bytes == 4 and power_of_two(self.warps[1])

    @property
    def slices_n(self) -> int:
        """grid.z: slices of ``swizzle_stride`` columns, counted on the padded extent."""
        return ceil_div(self.tiles_n * self.bn, self.swizzle_stride) if self.swizzle_stride else 1

    @property
    def estimated_registers(self) -> int:
        """Accumulators, live fragments, and about 32 registers of addressing, 8 more with predicates; a rough guide for
        pruning, ptxas decides."""
        live = {"none": 1, "single_intra_tile": 2, "staggered": 2}.get(self.prefetch.kind, 1 + self.prefetch_distance)
        fragments = (4 * self.warp_m + 2 * self.warp_n) * min(live, self.k_blocks)
        if self.prefetch.kind == "staggered":
            fragments -= 2 * self.warp_n
        return self.accumulator_registers + fragments + 32 + (8 if self.predicated else 0)

    @property
    def register_limit(self) -> int:
        """Registers that ``__launch_bounds__`` leaves to a thread, in units of 8."""
        return min(REGISTERS_THREAD, REGISTERS_SM // (self.min_blocks * self.threads) // 8 * 8)

    @property
    def predicates_copies(self) -> bool:
        """Whether a copy beyond the last k-tile is switched off by a predicate, instead of a branch around all copies.

        Without a branch the main loop is one basic block, in which ptxas schedules copies between MMAs. That takes
        more registers, and ptxas spills if few are left.
        """
        return self.estimated_registers + COPY_REGISTERS <= self.register_limit

    @property
    def loads_fused_early(self) -> bool:
        # The bias takes 8 registers during the main loop.
        return super().loads_fused_early and self.estimated_registers + COPY_REGISTERS < self.register_limit - 8

    @property
    def loads_at_end(self) -> bool:
        """Whether single_intra_tile loads a k-tile's first fragments at the end of the k-tile before.

        There ptxas places them between MMAs, which it does not do at the start of a loop iteration. It takes more
        registers.
        """
        return self.estimated_registers <= self.register_limit + COPY_REGISTERS

    @property
    def remarks(self) -> list[str]:
        """Notes for the author of a legal record."""
        remarks = super().remarks
        if not any(self.along_k):
            remarks.append(f"layout={self.layout}: smem_swizzle and g2s_cols have no effect, since no rows run along k")
        reachable = self.ctas_per_sm(1)
        if self.min_blocks > reachable:
            remarks.append(
                f"min_blocks={self.min_blocks} only bounds registers: {reachable} CTAs fit on an SM otherwise"
            )
        if self.epilogue == "staged" and self.c_batch == self.mma_tiles and self.acc == "f16":
            remarks.append("epilogue staged with all MMA tiles in one round stores as direct does")
        if self.prefetch.kind == "pingpong" and self.warp_m == 1:
            remarks.append("prefetch pingpong with one MMA row per warp orders instructions as single does")
        if self.raster == "zsplit" and self.slices_n == 1:
            remarks.append("swizzle_stride covers all of n, so that raster zsplit orders tiles as plain does")
        return remarks

    @property
    def tile(self) -> str:
        return f"{self.bm}x{self.bn}x{self.bk}_s{self.stages}"

    @property
    def launch(self) -> Tiles:
        """The launch of a grid of tiles. The launcher gets the data fields when it opens the kernel."""
        return self.tiles_launch(self.raster)

    def output_fields(self, problem: Problem) -> Fields:
        """D of fp32 is stored directly from registers, because four lanes fill a sector with pairs of a row."""
        return DIRECT_STORES if problem.d == "f32" else {}

    def other_strides(self, n: int) -> list[int]:
        """Slices of one tile and of 3/2 tiles, because the record's own stride usually covers a test's small
        problems."""
        return [self.bn, self.bn * 3 // 2] if self.swizzle_stride is not None and n > self.bn else []

    # For the tuner and the cost model.

    @property
    def work(self) -> CtaWork:
        """CTAs advance along n first, within a slice of columns if there are slices."""
        band = ceil_div(self.swizzle_stride, self.bn) if self.swizzle_stride else self.tiles_n
        return super().work._replace(raster_band=band, raster_along="n")

    FREE_FIELDS: ClassVar[frozenset[str]] = frozenset({"raster", "swizzle_stride"})
    FOLLOWING: ClassVar[frozenset[str]] = MmaSyncKernel.FOLLOWING | {
        "smem_swizzle", "smem_swizzle_c", "g2s_cols", "g2s_slot", "swizzle_stride", "c_batch", "r2s_bytes",
        "prefetch.distance",
    }  # fmt: skip

    @classmethod
    def serves(cls, chip: Chip) -> bool:  # noqa: ARG003
        return True

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Fields]:
        """Tiles, warps, stages, orders of loads and splits of k. The copies and the staging of D follow from them.

        GPUs with wgmma get candidates for narrow problems only, because mma.sync reaches two thirds of wgmma's rate.
        There, tiles of other heights than 64 and 128 rows may fill the GPU better.
        """
        has_wgmma = GPUS[problem.gpu].capability.has_wgmma
        if has_wgmma and (min(problem.m, problem.n) > 128 or problem.k > 1024 or problem.k % problem.element.vector):
            return
        for (bm, bn), warps, bk in product(TILES, WARPS, (32, 64)):
            threads = 32 * warps[0] * warps[1]
            # A warp multiplies whole MMAs, two along n, and a thread sums 16 to 256 elements of D.
            if bm % (MMA_M * warps[0]) or bn % (2 * MMA_N * warps[1]) or not 16 <= bm * bn // threads <= 256:
                continue
            # Half of such a tile would lie beyond the problem, and a smaller tile exists.
            if (bm >= 2 * problem.m and bm > 16) or (bn >= 2 * problem.n and bn > 16):
                continue
            tiles, steps = ceil_div(problem.m, bm) * ceil_div(problem.n, bn), ceil_div(problem.k, bk)
            for stages, split_k in product(STAGES[::-1] if has_wgmma else STAGES, SPLITS):
                # A slice has at least two steps, and there are at most two slices per SM.
                if split_k > 1 and (steps < 2 * split_k or tiles * split_k > 2 * GPUS[problem.gpu].sms):
                    continue
                if stages > max(2, steps) or (has_wgmma and split_k > 1):
                    continue
                ring, mma_tiles = stages * (bm + bn) * bk * problem.element.bytes, bm * bn // (8 * threads)
                batches = [batch for batch in (4, 2, 1) if batch <= mma_tiles and batch * threads * 16 <= ring]
                for prefetch in PREFETCHES[:1] if has_wgmma else PREFETCHES:
                    yield {
                        "bm": bm, "bn": bn, "bk": bk, "stages": stages, "mma_repeat": warps, "min_blocks": 1,
                        "smem_swizzle": [3, 3, 3] if bk == 64 else [2, 3, 3], "smem_swizzle_c": [3, 3, 3],
                        "g2s_cols": 4, "g2s_slot": 0, "raster": "plain", "swizzle_stride": None, "prefetch": prefetch,
                        "unroll_k": False, "bake": [], "epilogue": "staged", "c_batch": batches[0] if batches else 1,
                        "r2s_bytes": 4, "padding": cls.least_padding(problem, bm, bn, bk), "split_k": split_k,
                        **(DIRECT_STORES if problem.d == "f32" else {}),
                    }  # fmt: skip

    @classmethod
    def free_fields(cls, problem: Problem) -> dict[str, list[Fields]]:
        """The raster: plain, or slices narrower than n."""
        strides = [stride for stride in STRIDES if stride < problem.n]
        plain: list[Fields] = [{"raster": "plain", "swizzle_stride": None}]
        return {"raster": plain + [{"raster": "zsplit", "swizzle_stride": stride} for stride in strides]}
