"""Base classes of the mma.sync families: how warps divide a CTA tile, k that is compiled in ("baked"), and padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from cudal2gen.kernel.launch import Launch, Raster, Sizes, Tiles
from cudal2gen.kernel.problem import Problem, aligned
from cudal2gen.kernel.record import Fields, Record
from kernelproof.ground.chips import REGISTERS_THREAD, Chip
from kernelproof.ground.integers import ceil_div

Padding = Literal["none", "predicate", "pad"]

MMA_M, MMA_N = 16, 8  # rows and columns of D that one mma.sync computes
MAX_GRID_YZ = 65535  # most CTAs of a grid along y, and along z
SPLITS = (1, 2, 4)  # slices of k that the tuner tries
# In the catalog, whose records do not spill: the most accumulator registers of a thread, and the fewest registers that
# a thread has besides them.
MAX_ACCUMULATORS, MIN_OTHER_REGISTERS = 160, 24
MAX_UNROLLED = 64  # steps; code and compile time grow with them


class MmaTiles(Record):
    """A CTA tile that is divided among warps, which multiply by mma.sync."""

    @property
    def warps(self) -> tuple[int, int]:
        """Warps along m and along n."""
        raise NotImplementedError

    @property
    def threads(self) -> int:
        return 32 * self.warps[0] * self.warps[1]

    @property
    def warp_m(self) -> int:
        """16-row MMA blocks of one warp."""
        return self.bm // (MMA_M * self.warps[0])

    @property
    def warp_n(self) -> int:
        """8-column MMA blocks of one warp; always even, because ldmatrix.x4 loads two."""
        return self.bn // (MMA_N * self.warps[1])

    @property
    def accumulator_registers(self) -> int:
        return self.bm * self.bn // self.threads // (2 if self.acc == "f16" else 1)

    @property
    def keeps_parts(self) -> bool:
        """Whether slices of k are summed in device memory; a cluster sums them in shared memory."""
        return False

    @property
    def loads_fused_early(self) -> bool:
        """Whether a bias is loaded before the main loop; not if slices are summed first or registers are short."""
        return self.split_k == 1


class MmaSyncKernel(MmaTiles):
    """A family for sm_80 and later: the number of warps is a decision, k may be baked, and tiles may be predicated."""

    mma_repeat: Annotated[
        tuple[Annotated[int, Field(ge=1, le=8)], Annotated[int, Field(ge=1, le=8)], Literal[1]],
        Field(description="warps of a CTA along m, n and k; a warp repeats its MMAs over the rest of the tile"),
    ]
    unroll_k: Annotated[bool, Field(description="unroll the whole main loop; needs bake [k] and split_k 1")]
    bake: Annotated[
        tuple[Literal["k"], ...],
        Field(max_length=1, description="[k] compiles k in, and packed rows along k; [] does not"),
    ]
    padding: Annotated[
        Padding,
        Field(description="for sizes that are no multiple of the tile: predicate checks bounds, pad: the caller pads"),
    ]
    split_k: Annotated[
        int,
        Field(ge=1, le=64, description="slices of k; if several, the last CTA of a tile adds the partial sums"),
    ]

    CONVENTION: ClassVar[type[Launch]] = Tiles
    FOLLOWING: ClassVar[frozenset[str]] = frozenset({"padding"})
    SIZE_VARIANTS: ClassVar[tuple[Fields, ...]] = ({}, {"padding": "predicate"}, {"padding": "pad"})

    def shared_violations(self) -> Iterator[str]:
        yield from super().shared_violations()
        if self.threads > 1024:
            yield f"mma_repeat={list(self.mma_repeat)}: {self.threads} threads exceed the 1024 of a CTA"
        if self.bm % (MMA_M * self.mma_repeat[0]):
            yield f"bm={self.bm}: must be a multiple of 16*mma_repeat[0] = {MMA_M * self.mma_repeat[0]}"
        if self.bn % (2 * MMA_N * self.mma_repeat[1]):
            yield f"bn={self.bn}: must be a multiple of 16*mma_repeat[1] = {2 * MMA_N * self.mma_repeat[1]}"
        if self.unroll_k and (steps := ceil_div(self.k, self.k_step)) > MAX_UNROLLED:
            yield f"unroll_k=true: {steps} steps of k exceed the {MAX_UNROLLED} that are unrolled"
        if self.unroll_k and (not self.bake or self.split_k > 1):
            yield "unroll_k=true: needs k in bake and split_k=1, so that the number of steps is a constant"

    def problem_violations(self) -> Iterator[str]:
        """Rules that tie the tile to the problem."""
        if self.padding == "none":
            for field, extent, tile in (("bm", self.m, self.bm), ("bn", self.n, self.bn), ("bk", self.k, self.k_step)):
                if extent % tile:
                    yield (
                        f"{field}={tile}: does not divide {field[1]}={extent}; "
                        "padding must be predicate or pad for such a tile"
                    )
        if self.padding == "predicate":
            # Rows along m or n may end within a vector: those copies are predicated. Rows along k may not.
            yield from self.vector_violations(*(name for name in self.problem.row_extents if name == "k"))
        elif self.grouped:
            yield f"padding={self.padding}: must be predicate for batch=grouped, whose groups end at any row"
        yield from self.group_violations()
        rows = self.tiles_m * self.split_k
        if rows > MAX_GRID_YZ and not self.persistent:
            yield f"bm={self.bm}: {rows} rows of CTAs exceed the grid's {MAX_GRID_YZ}"
        yield from self.count_violations()

    @property
    def launch(self) -> Tiles:
        raise NotImplementedError

    @property
    def persistent(self) -> bool:
        """Whether CTAs take tiles until none is left, instead of one each."""
        return self.launch.raster == "persistent"

    @property
    def grid_is_tiles(self) -> bool:
        return not self.persistent and not self.grouped

    @property
    def warps(self) -> tuple[int, int]:
        return self.mma_repeat[:2]

    @property
    def keeps_parts(self) -> bool:
        return self.split_k > 1

    @property
    def smem_static_bytes(self) -> int:
        """Bytes that split k adds: the flag of the last CTA to arrive, padded to 16 bytes for the data after it."""
        return 16 if self.split_k > 1 else 0

    @property
    def register_limit(self) -> int:
        """Registers that the compiler may give to a thread."""
        return REGISTERS_THREAD

    @property
    def spill_remarks(self) -> list[str]:
        """A warning if the record has more accumulators than any kernel that is known to compile without spills."""
        most = self.register_limit
        if self.accumulator_registers <= min(MAX_ACCUMULATORS, most - MIN_OTHER_REGISTERS):
            return []
        return [f"{self.accumulator_registers} accumulator registers of the {most} there are: it is likely to spill"]

    @property
    def predicated(self) -> bool:
        return self.padding == "predicate"

    def wider(self, sizes: Sizes) -> Sizes:
        """The sizes rounded up to whole tiles."""
        return Sizes(aligned(sizes.m, self.bm), aligned(sizes.n, self.bn), aligned(sizes.k, self.k_step))

    def code(self) -> dict[str, Any]:
        fields = super().code()
        fields["baked"] = {"k": self.baked_k} if self.bake else {}
        # A caller who pads hands over a problem that the tile divides: the kernel is the same.
        fields["padding"] = "predicate" if self.predicated else "none"
        return fields

    @property
    def baked_k(self) -> int:
        """The k that is compiled in, 0 for none. If the caller pads, it is the padded k."""
        k = aligned(self.k, self.k_step) if self.caller_pads else self.k
        return k if self.bake else 0

    def tiles_launch(self, raster: Raster) -> Tiles:
        """The launch of a kernel with pointers to matrices and a grid of tiles."""
        return Tiles(
            **self.launch_facts,
            raster=raster,
            predicated=int(self.predicated),
            baked_n=0,
            baked_k=self.baked_k,
            counters="returned" if self.split_k > 1 else "cleared",
        )

    # For the tuner and the cost model.

    @classmethod
    def serves(cls, chip: Chip) -> bool:
        """Whether the family is proposed for a GPU: not if it has wgmma, of whose rate mma.sync reaches two thirds."""
        return not chip.capability.has_wgmma

    @classmethod
    def least_padding(cls, problem: Problem, bm: int, bn: int, k_step: int) -> Padding:
        """The cheapest ``padding`` with which a tile is legal."""
        if not (problem.grouped or problem.m % bm or problem.n % bn or problem.k % k_step):
            return "none"
        return "pad" if any(problem.along_k) and problem.k % problem.element.vector else "predicate"
