"""The question and the answer: a GEMM problem, and one frozen record per kernel family.

A record is one line of ``configs/kernels.jsonl``. Every legality rule is written once, in the ``violations`` of its
family; catalog, CLI, tuner and tests all go through it by validating a record. Sizes named ``bm bn bk`` are in
elements, ``*_bytes`` in bytes; problems are always in m, n, k order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

Acc = Literal["f16", "f32"]
Layout = Literal["tn", "nn"]
Baked = Literal["n", "k"]
Padding = Literal["none", "predicate", "pad"]
SizeClass = Literal["small-m", "split-k", "tiny", "medium", "large", "huge"]
# Offsets within a CTA tile are 32-bit: a row may have so many elements.
Extent = Annotated[int, Field(ge=1, le=2**24)]
Swizzle = tuple[Annotated[int, Field(ge=0, le=5)], Annotated[int, Field(ge=3, le=5)], Annotated[int, Field(ge=0, le=6)]]
Setmaxnreg = Annotated[int, Field(ge=24, le=240, multiple_of=8)]
Hint = Literal["normal", "first", "last"]
MmaRepeat = tuple[Annotated[int, Field(ge=1, le=8)], Annotated[int, Field(ge=1, le=8)], Literal[1]]

VECTOR = 8  # halves in the 16-byte vector that cp.async, ldmatrix rows and global stores move
MMA_M, MMA_N, MMA_K = 16, 8, 16  # mma.sync.m16n8k16
WGMMA_M = 64  # rows of one wgmma, 16 per warp
CHUNK = 64  # halves in the 128 bytes that the widest swizzle of TMA covers
MAX_BOX = 256  # rows or columns of one TMA box
STORE_BUFFERS = 2  # tiles per warp on their way to global memory
HINTS = ("normal", "first", "last")  # L2 eviction priorities
CLUSTER_SPLITS = (2, 4, 8)  # 8 CTAs are the largest portable cluster
# What ptxas wants beside the accumulators: of one wgmma at entry (C7602), and live in the main loop (C7511, spills).
ATOM_REGISTERS, LIVE_REGISTERS = 26, 32
LIVE_REGISTERS_DIRECT, LIVE_REGISTERS_ACROSS = 56, 48  # of an epilogue that stores by itself, with bounds
PRODUCER_REGISTERS = (24, 32)  # in general, and for a cluster in boxes of 16 columns
MMA_SYNC_ACCUMULATORS = 128
MAX_GRID_YZ = 65535
MAX_UNROLLED = 64  # steps; code and compile time grow with them


class Gpu(NamedTuple):
    """Limits of one GPU model, from the CUDA programming guide's table of compute capabilities."""

    title: str
    sm: str
    sms: int
    smem_block_bytes: int
    smem_sm_bytes: int
    threads_sm: int
    blocks_sm: int


GPUS: dict[str, Gpu] = {
    "a100": Gpu("A100", "sm_80", 108, 163 << 10, 164 << 10, 2048, 32),
    "rtx3090": Gpu("GeForce RTX 3090", "sm_86", 82, 99 << 10, 100 << 10, 1536, 16),
    "l40s": Gpu("L40S", "sm_89", 142, 99 << 10, 100 << 10, 1536, 24),
    "h100": Gpu("H100", "sm_90", 132, 227 << 10, 228 << 10, 2048, 32),
    "h200": Gpu("H200", "sm_90", 132, 227 << 10, 228 << 10, 2048, 32),
    "rtx5090": Gpu("GeForce RTX 5090", "sm_120", 170, 99 << 10, 100 << 10, 1536, 24),
}
REGISTERS_SM = 65536
REGISTERS_THREAD = 255


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b."""
    return -(-a // b)


def aligned(extent: int, to: int = VECTOR) -> int:
    """The smallest multiple of ``to`` that is not below an extent."""
    return ceil_div(extent, to) * to


class Frozen(BaseModel):
    """Nothing changes after validation, nothing unknown gets in."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Problem(Frozen):
    """What is asked: D(m,n) = A(m,k) B, fp16 in and out, on one GPU.

    ``acc`` is the accumulator really in the MMA. ``layout`` ``tn``: B is stored (n,k); ``nn``: B is stored (k,n).
    """

    gpu: str
    acc: Acc
    layout: Layout
    m: Extent
    n: Extent
    k: Extent

    @property
    def mnk(self) -> str:
        return f"{self.m}_{self.n}_{self.k}"

    @property
    def key(self) -> tuple[str, str, str, int, int, int]:
        return (self.gpu, self.acc, self.layout, self.m, self.n, self.k)

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each of m*n*k."""
        return 2 * self.m * self.n * self.k

    @property
    def traffic_bytes(self) -> int:
        """Each operand once between device memory and the chip: the least that any kernel moves."""
        return 2 * (self.m * self.k + self.n * self.k + self.m * self.n)

    @property
    def size_class(self) -> SizeClass:
        """What limits problems of this kind; tuning and benchmarks are spread over these classes."""
        if self.m <= 64:
            return "small-m"
        if self.m * self.n <= 1 << 20 and self.k >= 2048:
            return "split-k"
        if self.flops <= 10**8:
            return "tiny"
        return "medium" if self.flops <= 10**10 else "large" if self.flops <= 10**12 else "huge"


class Origin(Frozen):
    """Where a record's decisions come from, and which of its fields differ from that source."""

    source: str
    structure: Literal["exact", "nearest", "tuned", "modelled"]
    changed: tuple[str, ...] = ()


class Prefetch(Frozen):
    """Order of shared-to-register loads and MMAs in a k-tile; ``distance`` in k-blocks, given for ``multi`` only."""

    kind: Literal["single", "single_intra_tile", "none", "multi", "pingpong", "staggered"]
    distance: Annotated[int, Field(ge=2, le=8)] | None = None


class KernelBase(Problem):
    """What all families share: problem, origin, CTA tile, and what follows from them."""

    family: str
    origin: Origin
    bm: Annotated[int, Field(ge=16, le=512)]
    bn: Annotated[int, Field(ge=16, le=512)]

    DATA_FIELDS: ClassVar[frozenset[str]] = frozenset({"gpu", "m", "n", "k", "origin"})

    if TYPE_CHECKING:  # a field of every family, each with bounds and a place in the line of its own
        split_k: int

    @classmethod
    def plain(cls, problem: Problem) -> dict[str, Any]:  # noqa: ARG003
        """Decisions to start from where another family's say nothing, as JSON values; sensible, not tuned."""
        return {}

    @model_validator(mode="after")
    def _legal(self) -> KernelBase:
        # Shared rules first: a family's own rules divide by what these guarantee.
        broken = list(self.shared_violations()) or list(self.violations())
        if broken:
            raise ValueError("; ".join(broken))
        return self

    def shared_violations(self) -> Iterator[str]:
        """Broken rules that a family's own build on, as ``field=value: rule``, in the record's own names."""
        if self.gpu not in GPUS:
            yield f"gpu={self.gpu}: must be one of {', '.join(GPUS)}"

    def violations(self) -> Iterator[str]:
        """A family's own broken rules, in the same form."""
        raise NotImplementedError

    def count_violations(self) -> Iterator[str]:
        """Rules on how much work there is: slices of k and CTA tiles."""
        if self.split_k > (steps := ceil_div(self.k, self.k_step)):
            yield f"split_k={self.split_k}: exceeds the {steps} k-steps of {self.k_step}"
        if self.ctas > 2**30:
            yield f"bm={self.bm}: {self.ctas} CTA tiles exceed the {2**30} that are counted"

    @property
    def arch(self) -> str:
        """What nvcc and ptxas compile for."""
        return self.target.sm

    @property
    def k_step(self) -> int:
        """Elements of k that one step of the main loop takes."""
        raise NotImplementedError

    @property
    def ring_steps(self) -> int:
        """k-steps that are in shared memory at a time, 1 where there is no ring: the k around it are worth a test."""
        return 1

    def k_order(self, k: int) -> list[list[list[int]]]:
        """The k of every partial sum in the order in which MMAs add them: slices of k, each of groups of up to 8.

        A group is half an MMA, the smallest step after which an accumulator may be rounded.
        """
        total = ceil_div(k, self.k_step)
        ends = [min(k, total * part // self.split_k * self.k_step) for part in range(self.split_k + 1)]
        return [[list(range(at, min(at + 8, end))) for at in range(start, end, 8)] for start, end in pairwise(ends)]

    @property
    def launch(self) -> dict[str, str | int]:
        """What the generic launcher must know of the compiled kernel; data fields come at ``open``."""
        raise NotImplementedError

    @property
    def launch_options(self) -> dict[str, int]:
        """Data fields that the launcher takes when it opens the kernel."""
        return {}

    def launched_with(self, options: dict[str, int]) -> Self:
        """The record whose ``launch_options`` are these where they differ: data fields, so the binary is the same."""
        return self.model_copy(update=options)

    @property
    def other_options(self) -> list[dict[str, int]]:
        """Values of the launch options that a test should try beside the record's own."""
        return []

    @property
    def grid_is_tiles(self) -> bool:
        """Whether a CTA's place in the grid is its tile's place in D, so that a part of a grid is a part of D."""
        return False

    @property
    def stores_vectors(self) -> bool:
        """Whether rows of D must be aligned to 16 bytes."""
        return True

    @property
    def most_k(self) -> int:
        """The largest k that the kernel takes, 0 for any."""
        return 0

    @property
    def cluster_ctas(self) -> int:
        """CTAs that are launched together, 1 where there are no clusters."""
        return 1

    @property
    def facts(self) -> dict[str, int | str]:
        """What a reader of the record should see beside what all families derive."""
        return {}

    @property
    def problem(self) -> Problem:
        return Problem(**{name: getattr(self, name) for name in Problem.model_fields})

    @property
    def target(self) -> Gpu:
        return GPUS[self.gpu]

    @property
    def threads(self) -> int:
        raise NotImplementedError

    @property
    def tiles_m(self) -> int:
        return ceil_div(self.m, self.bm)

    @property
    def tiles_n(self) -> int:
        return ceil_div(self.n, self.bn)

    @property
    def ctas(self) -> int:
        """CTA tiles of the problem, slices of k included."""
        return self.tiles_m * self.tiles_n * self.split_k

    @property
    def padding_waste(self) -> float:
        """Work on padding, as a fraction of the useful work."""
        return self.tiles_m * self.bm * self.tiles_n * self.bn / (self.m * self.n) - 1

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return 0

    @property
    def smem_static_bytes(self) -> int:
        return 0

    def ctas_per_sm(self, registers: int) -> int:
        """CTAs that one SM holds at ``registers`` per thread, by the rules of NVIDIA's occupancy calculator."""
        gpu, warps = self.target, self.threads // 32
        # Each of an SM's four partitions has a quarter of the registers, given to whole warps in units of 256.
        register_warps = REGISTERS_SM // 4 // (ceil_div(registers * 32, 256) * 256) * 4
        by_smem = gpu.smem_sm_bytes // (
            ceil_div(self.smem_bytes + self.smem_static_bytes, 128) * 128 + 1024
        )  # 1 KiB is the system's
        return min(gpu.blocks_sm, gpu.threads_sm // self.threads, register_warps // warps, by_smem)

    def waves(self, registers: int) -> float:
        """How often the GPU is filled; infinite where no CTA fits."""
        resident = self.ctas_per_sm(registers) * self.target.sms
        return self.ctas / resident if resident else float("inf")

    @property
    def accumulator_registers(self) -> int:
        """Registers of a thread that hold its part of the tile."""
        raise NotImplementedError

    @property
    def remarks(self) -> list[str]:
        """What its author should know of a legal record."""
        return []

    @property
    def predicated(self) -> bool:
        """Whether the tile may reach beyond the problem."""
        return True

    @property
    def caller_pads(self) -> bool:
        """Whether the caller hands over a problem that the tile divides."""
        return False

    def code(self) -> dict[str, Any]:
        """The fields that the rendered text depends on, as JSON values; records with equal code share one text."""
        return self.model_dump(mode="json", exclude=set(self.DATA_FIELDS))

    def named(self, tile: str) -> str:
        digest = hashlib.sha256(json.dumps(self.code(), sort_keys=True).encode()).hexdigest()
        return f"hgemm_{self.family}_{self.acc}_{self.layout}_{tile}_{digest[:10]}"

    @property
    def baked_n(self) -> int:
        """The n that is compiled in, 0 for none."""
        return 0

    @property
    def baked_k(self) -> int:
        """The k that is compiled in, 0 for none."""
        return 0


class MmaSyncKernel(KernelBase):
    """What the families share whose warps multiply by mma.sync, and whose tiles are predicated by hand."""

    mma_repeat: MmaRepeat
    unroll_k: bool
    bake: tuple[Baked, ...]
    padding: Padding
    split_k: Annotated[int, Field(ge=1, le=64)]

    def shared_violations(self) -> Iterator[str]:
        yield from super().shared_violations()
        if self.threads > 1024:
            yield f"mma_repeat={list(self.mma_repeat)}: {self.threads} threads exceed the 1024 of a CTA"
        if self.bm % (MMA_M * self.mma_repeat[0]):
            yield f"bm={self.bm}: must be a multiple of 16*mma_repeat[0] = {MMA_M * self.mma_repeat[0]}"
        if self.bn % (2 * MMA_N * self.mma_repeat[1]):
            yield f"bn={self.bn}: must be a multiple of 16*mma_repeat[1] = {2 * MMA_N * self.mma_repeat[1]}"
        if self.bake not in ((), ("k",), ("n", "k")):
            yield f"bake={list(self.bake)}: must be [], [k] or [n, k]"
        if self.unroll_k and (steps := ceil_div(self.k, self.k_step)) > MAX_UNROLLED:
            yield f"unroll_k=true: {steps} steps of k exceed the {MAX_UNROLLED} that are unrolled"
        if self.unroll_k and ("k" not in self.bake or self.split_k > 1):
            yield "unroll_k=true: needs k in bake and split_k=1, only a known number of steps can be unrolled"

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
            if self.k % VECTOR:
                yield f"k={self.k}: must be a multiple of {VECTOR}, rows along k are read in 16-byte vectors"
            if self.layout == "nn" and self.baked_n % VECTOR:
                yield f"n={self.n}: must be a multiple of {VECTOR} where it is baked in, rows of B are packed then"
        rows = self.tiles_m * self.split_k
        if rows > MAX_GRID_YZ and not self.persistent:
            yield f"bm={self.bm}: {rows} rows of CTAs exceed the grid's {MAX_GRID_YZ}"
        yield from self.count_violations()

    @property
    def persistent(self) -> bool:
        """Whether CTAs take tiles until none is left, instead of one each."""
        return self.launch["raster"] == "persistent"

    @property
    def grid_is_tiles(self) -> bool:
        return not self.persistent

    @property
    def stores_vectors(self) -> bool:
        return not self.predicated

    @property
    def threads(self) -> int:
        return 32 * self.mma_repeat[0] * self.mma_repeat[1]

    @property
    def warp_m(self) -> int:
        """16-row MMA blocks of one warp."""
        return self.bm // (MMA_M * self.mma_repeat[0])

    @property
    def warp_n(self) -> int:
        """8-column MMA blocks of one warp; always even, ldmatrix.x4 brings two."""
        return self.bn // (MMA_N * self.mma_repeat[1])

    @property
    def smem_static_bytes(self) -> int:
        """Shared memory that a split of k adds: the last arrival's flag, padded to the alignment of what follows."""
        return 16 if self.split_k > 1 else 0

    @property
    def accumulator_registers(self) -> int:
        return self.bm * self.bn // self.threads // (2 if self.acc == "f16" else 1)

    @property
    def remarks(self) -> list[str]:
        """What its author should know of a legal record."""
        if self.accumulator_registers < REGISTERS_THREAD:
            return []
        wanted = self.accumulator_registers
        return [f"{wanted} accumulator registers of the {REGISTERS_THREAD} there are: it will spill, and compile long"]

    @property
    def predicated(self) -> bool:
        return self.padding == "predicate"

    @property
    def caller_pads(self) -> bool:
        return self.padding == "pad"

    def code(self) -> dict[str, Any]:
        fields = super().code()
        fields["baked"] = {name: getattr(self, f"baked_{name}") for name in self.bake}
        # A caller who pads hands over a problem that the tile divides: the kernel is the same.
        fields["padding"] = "predicate" if self.predicated else "none"
        return fields

    @property
    def baked_n(self) -> int:
        """The n that is compiled in, as the kernel is handed it: padded where the caller pads; 0 for none."""
        n = self.tiles_n * self.bn if self.padding == "pad" else self.n
        return n if "n" in self.bake else 0

    @property
    def baked_k(self) -> int:
        """The same of k."""
        step = self.k_step
        k = ceil_div(self.k, step) * step if self.padding == "pad" else self.k
        return k if "k" in self.bake else 0


class Sm80Multistage(MmaSyncKernel):
    """A ring of cp.async stages in shared memory, ldmatrix and mma.sync; for sm_80, 86, 89, 90 and 120."""

    family: Literal["sm80_multistage"]
    bk: Annotated[int, Field(ge=16, le=256)]
    stages: Annotated[int, Field(ge=1, le=13)]
    min_blocks: Annotated[int, Field(ge=1, le=32)]
    smem_swizzle: Swizzle
    smem_swizzle_c: Swizzle | None
    g2s_cols: Literal[1, 2, 4, 8, 16, 32]
    g2s_slot: Annotated[int, Field(ge=0, le=15)]
    raster: Literal["plain", "zsplit", "persistent"]
    swizzle_stride: Extent | None
    prefetch: Prefetch
    epilogue: Literal["staged", "direct", "global"]
    c_batch: Annotated[int, Field(ge=1, le=64)] | None
    r2s_bytes: Literal[4, 8, 16] | None

    DATA_FIELDS: ClassVar[frozenset[str]] = KernelBase.DATA_FIELDS | {"swizzle_stride"}

    def violations(self) -> Iterator[str]:
        if self.bk % MMA_K:
            yield f"bk={self.bk}: must be a multiple of {MMA_K}, the k of one MMA"
            return
        yield from self.problem_violations()
        yield from self._copy_violations()
        yield from self._mainloop_violations()
        yield from self._epilogue_violations()
        yield from self._raster_violations()
        gpu, needed = self.target, self.smem_bytes + self.smem_static_bytes
        if needed > gpu.smem_block_bytes:
            blamed = f"stages={self.stages}" if self.ring_bytes >= self.staging_bytes else f"epilogue={self.epilogue}"
            yield f"{blamed}: {needed} bytes of shared memory exceed the {gpu.smem_block_bytes} of {self.gpu}"
        if self.min_blocks > 1 and self.min_blocks * self.threads > gpu.threads_sm:
            yield f"min_blocks={self.min_blocks}: {self.threads} threads each exceed the {gpu.threads_sm} of an SM"

    def _copy_violations(self) -> Iterator[str]:
        vectors = self.bk // VECTOR
        if vectors % self.g2s_cols:
            yield f"g2s_cols={self.g2s_cols}: must divide the {vectors} vectors of a row of bk={self.bk}"
        if self.threads % self.g2s_cols:
            yield f"g2s_cols={self.g2s_cols}: must divide the {self.threads} threads"
        sizes = {"bm*bk": self.bm * self.bk, "bn*bk": self.bn * self.bk}
        yield from _swizzle_violations("smem_swizzle", self.smem_swizzle, sizes)

    def _mainloop_violations(self) -> Iterator[str]:
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
        staged = self.epilogue != "global"
        if (self.r2s_bytes is not None) != staged:
            yield f"r2s_bytes={self.r2s_bytes}: is given unless epilogue is global"
            return
        if (self.c_batch is not None) != (self.epilogue == "staged"):
            yield f"c_batch={self.c_batch}: is given for epilogue staged, and only there"
            return
        if (self.smem_swizzle_c is not None) != (self.r2s_bytes == 4):
            yield f"smem_swizzle_c={_list(self.smem_swizzle_c)}: is given iff r2s_bytes is 4 (rows are staged)"
            return
        if self.c_batch is not None:
            if self.c_batch > self.mma_tiles:
                yield f"c_batch={self.c_batch}: exceeds the {self.mma_tiles} MMA tiles of a warp"
            elif self.staging_bytes > self.ring_bytes:
                yield f"c_batch={self.c_batch}: {self.staging_bytes} staged bytes exceed the ring's {self.ring_bytes}"
        if self.smem_swizzle_c is not None:
            size = {"bm*bn": self.bm * self.bn} if self.epilogue == "direct" else {"MMA tile": 8 * self.threads}
            yield from _swizzle_violations("smem_swizzle_c", self.smem_swizzle_c, size)

    def _raster_violations(self) -> Iterator[str]:
        if (self.swizzle_stride is not None) != (self.raster == "zsplit"):
            yield f"swizzle_stride={self.swizzle_stride}: is given for raster zsplit, and only there"
        elif self.slices_n > MAX_GRID_YZ:
            yield f"swizzle_stride={self.swizzle_stride}: {self.slices_n} slices exceed the grid's {MAX_GRID_YZ}"

    @property
    def k_step(self) -> int:
        """A k-tile."""
        return self.bk

    @property
    def ring_steps(self) -> int:
        return self.stages

    @property
    def k_blocks(self) -> int:
        """MMA steps in one k-tile."""
        return self.bk // MMA_K

    @property
    def prefetch_distance(self) -> int:
        """k-blocks by which a fragment is loaded ahead of its MMA; inside one tile for single_intra_tile."""
        kind = self.prefetch.kind
        return 0 if kind == "none" else self.prefetch.distance or 1

    @property
    def across_tiles(self) -> bool:
        """Whether the first fragments of a k-tile are loaded while the previous one is being multiplied."""
        return self.prefetch.kind not in ("none", "single_intra_tile")

    @property
    def last_slot(self) -> int:
        return self.k_blocks - (self.prefetch_distance if self.across_tiles else 1)

    @property
    def copies_in_slot(self) -> bool:
        """Whether the next copy is issued by k-block alone; else it precedes the wait, or there is one stage."""
        return self.stages > 1 and not (self.across_tiles and self.g2s_slot == self.last_slot)

    @property
    def g2s_cols_b(self) -> int:
        """Threads along the contiguous extent of B: as A's for tn; for nn as many as a 128-byte line serves."""
        if self.layout == "tn":
            return self.g2s_cols
        vectors = self.bn // VECTOR
        return min(vectors & -vectors, 8)

    @property
    def smem_swizzle_b(self) -> Swizzle:
        """B's swizzle: as A's for tn; for nn the one whose source bits are the low bits of the row."""
        if self.layout == "tn":
            return self.smem_swizzle
        vectors = self.bn // VECTOR
        return (3, 3, max(3, (vectors & -vectors).bit_length() - 1))

    @property
    def swizzle_period(self) -> int:
        """16-byte vectors after which both swizzles repeat: steps by its multiples are plain additions."""
        return max(1 << (bits + base - 3 + shift) for bits, base, shift in (self.smem_swizzle, self.smem_swizzle_b))

    @property
    def static_steps_a(self) -> bool:
        """Whether ldmatrix addresses of A advance by constants: rows by sums, columns by xor."""
        vectors = self.bk // VECTOR
        return vectors & (vectors - 1) == 0 and MMA_M * self.mma_repeat[0] * vectors % self.swizzle_period == 0

    @property
    def static_steps_b(self) -> bool:
        """The same for B; for nn its rows run along k."""
        if self.layout == "nn":
            return MMA_K * (self.bn // VECTOR) % self.swizzle_period == 0
        vectors = self.bk // VECTOR
        return vectors & (vectors - 1) == 0 and 2 * MMA_N * self.mma_repeat[1] * vectors % self.swizzle_period == 0

    @property
    def mma_tiles(self) -> int:
        """16x16 MMA tiles of one warp, the unit of ``c_batch``."""
        return self.warp_m * self.warp_n // 2

    @property
    def ring_bytes(self) -> int:
        return self.stages * (self.bm + self.bn) * self.bk * 2

    @property
    def staging_tiles(self) -> int:
        """MMA tiles of a warp in one round through shared memory."""
        return {"staged": self.c_batch or 0, "direct": self.mma_tiles, "global": 0}[self.epilogue]

    @property
    def staging_bytes(self) -> int:
        return self.staging_tiles * self.threads * 16

    @property
    def smem_bytes(self) -> int:
        return max(self.ring_bytes, self.staging_bytes)

    @property
    def slices_n(self) -> int:
        """grid.z: slices of ``swizzle_stride`` columns, counted on the padded extent."""
        return ceil_div(self.tiles_n * self.bn, self.swizzle_stride) if self.swizzle_stride else 1

    @property
    def estimated_registers(self) -> int:
        """Accumulators, live fragments and addressing; a rough guide for pruning, ptxas decides."""
        live = {"none": 1, "single_intra_tile": 2, "staggered": 2}.get(self.prefetch.kind, 1 + self.prefetch_distance)
        fragments = (4 * self.warp_m + 2 * self.warp_n) * min(live, self.k_blocks)
        if self.prefetch.kind == "staggered":
            fragments -= 2 * self.warp_n
        return self.accumulator_registers + fragments + 32 + (8 if self.predicated else 0)

    @property
    def remarks(self) -> list[str]:
        """What its author should know of a legal record."""
        found = super().remarks
        reachable = self.ctas_per_sm(1)
        if self.min_blocks > reachable:
            found.append(f"min_blocks={self.min_blocks} only bounds registers: {reachable} CTAs fit on an SM otherwise")
        if self.epilogue == "staged" and self.c_batch == self.mma_tiles and self.acc == "f16":
            found.append("epilogue staged with all MMA tiles in one round moves what direct moves")
        if self.prefetch.kind == "pingpong" and self.warp_m == 1:
            found.append("prefetch pingpong with one MMA row per warp orders instructions as single does")
        if self.raster == "zsplit" and self.slices_n == 1:
            found.append("swizzle_stride covers all of n: the zsplit raster is the plain one")
        return found

    @property
    def name(self) -> str:
        return self.named(f"{self.bm}x{self.bn}x{self.bk}_s{self.stages}")

    @property
    def launch(self) -> dict[str, str | int]:
        """What the generic launcher must know of the compiled kernel; data fields come at ``open``."""
        return _launch(self, self.raster)

    @property
    def launch_options(self) -> dict[str, int]:
        """Data fields that the launcher takes when it opens the kernel."""
        return {"swizzle_stride": self.swizzle_stride} if self.swizzle_stride else {}


class Sm80Direct(MmaSyncKernel):
    """Fragments straight from global memory, no shared memory: for problems too small to fill a ring."""

    family: Literal["sm80_direct"]

    def violations(self) -> Iterator[str]:
        yield from self.problem_violations()

    @property
    def k_step(self) -> int:
        """Two MMAs: a 16-byte vector of a row per lane feeds both."""
        return 2 * MMA_K

    def k_order(self, k: int) -> list[list[list[int]]]:
        """As in the base; of a lane's eight k, each half of a step's two MMAs takes two."""
        halves = [[lane * VECTOR + pair + e for lane in range(4) for e in (0, 1)] for pair in (0, 2, 4, 6)]
        return [
            [
                [start + offset for offset in half if start + offset < k]
                for start in range(part[0][0], part[-1][-1] + 1, self.k_step)
                for half in halves
            ]
            for part in super().k_order(k)
        ]

    @property
    def estimated_registers(self) -> int:
        """Accumulators, two generations of fragments and addressing; a rough guide for pruning."""
        return self.accumulator_registers + 2 * (8 * self.warp_m + 4 * self.warp_n) + 32

    @property
    def name(self) -> str:
        return self.named(f"{self.bm}x{self.bn}")

    @property
    def launch(self) -> dict[str, str | int]:
        """What the generic launcher must know of the compiled kernel."""
        return _launch(self, "plain")


class Sm90Kernel(KernelBase):
    """What the families for compute capability 9.0 share: TMA's tiles, and wgmma's view of them.

    ``swap_ab`` computes D^T = B^T A^T: n runs along the 64 rows of a wgmma and m along its columns, of which there may
    be as few as 16. The tile keeps its meaning: bm rows and bn columns of D.
    """

    swap_ab: bool

    def shared_violations(self) -> Iterator[str]:
        yield from super().shared_violations()
        if self.gpu in GPUS and self.target.sm != "sm_90":
            able = ", ".join(name for name, gpu in GPUS.items() if gpu.sm == "sm_90")
            yield f"gpu={self.gpu}: {self.family} needs one of {able}"

    def alignment_violations(self) -> Iterator[str]:
        """Packed rows must be whole 16-byte vectors, for tensor maps as for cp.async."""
        if self.k % VECTOR:
            yield f"k={self.k}: must be a multiple of {VECTOR}, rows along k start on 16 bytes"
        if self.n % VECTOR and (self.layout == "nn" or self.launch["box_d_cols"]):
            yield f"n={self.n}: must be a multiple of {VECTOR}, rows along n start on 16 bytes"

    def register_violations(self, atom_n: int, blamed: str, consumer_registers: int) -> Iterator[str]:
        """ptxas's own limits: operands of one wgmma against the registers at entry, the tile against a thread's."""
        atom = atom_n // (4 if self.acc == "f16" else 2)
        if atom + ATOM_REGISTERS > self.entry_registers:
            yield (
                f"{blamed}: {atom} accumulator registers of one wgmma, and {ATOM_REGISTERS} beside them, "
                f"exceed the {self.entry_registers} that {self.threads} threads start with"
            )
        elif self.accumulator_registers + self.live_registers > consumer_registers:
            yield (
                f"{'bm' if self.swap_ab else 'bn'}={self.cols}: "
                f"{self.accumulator_registers} accumulator registers, and {self.live_registers} beside them, "
                f"exceed the {consumer_registers} of a consumer thread"
            )

    @property
    def arch(self) -> str:
        """The ``a`` unlocks wgmma and setmaxnreg, on exactly this architecture."""
        return "sm_90a"

    @property
    def live_registers(self) -> int:
        """Registers of a consumer beside its accumulators."""
        return LIVE_REGISTERS

    @property
    def ctas_at_least(self) -> int:
        """CTAs that ptxas must leave registers for on an SM."""
        return 1

    @property
    def entry_registers(self) -> int:
        """Registers that a thread starts with: the file shared out among warpgroups, in units of 8."""
        most = REGISTERS_SM // self.ctas_at_least // (ceil_div(self.threads, 128) * 128)
        return min(REGISTERS_THREAD, most // 8 * 8)

    @property
    def rows(self) -> int:
        """Extent of the tile along the rows of a wgmma."""
        return self.bn if self.swap_ab else self.bm

    @property
    def cols(self) -> int:
        """Extent of the tile along the columns of a wgmma."""
        return self.bm if self.swap_ab else self.bn

    @property
    def stores_vectors(self) -> bool:
        return bool(self.launch["box_d_cols"]) or not self.predicated

    @property
    def facts(self) -> dict[str, int | str]:
        return {
            "arch": self.arch,
            "accumulator_registers": self.accumulator_registers,
            "entry_registers": self.entry_registers,
            "cluster_ctas": self.cluster_ctas,
        }


class Sm90Wgmma(Sm90Kernel):
    """TMA into a ring of mbarriers, wgmma in consumer warpgroups beside a producer, persistent; for sm_90a."""

    family: Literal["sm90_wgmma"]
    bk: Literal[64, 128]
    stages: Annotated[int, Field(ge=2, le=16)]
    cluster: tuple[Literal[1, 2, 4], Literal[1, 2, 4]]
    consumers: Literal[1, 2, 3]
    warps_n: Literal[1, 2]
    atom_n: Annotated[int, Field(ge=16, le=256, multiple_of=16)]
    schedule: Literal["cooperative", "pingpong"]
    raster_axis: Literal["m", "n"]
    raster_group: Annotated[int, Field(ge=1, le=64)]
    split_k: Annotated[int, Field(ge=1, le=64)]
    reduce: Literal["cluster", "workspace"] | None
    epilogue: Literal["tma", "direct"]
    registers: tuple[Setmaxnreg, Setmaxnreg] | None
    hint_a: Hint
    hint_b: Hint
    pdl: bool
    min_blocks: Literal[1, 2]

    DATA_FIELDS: ClassVar[frozenset[str]] = KernelBase.DATA_FIELDS | {
        "raster_axis",
        "raster_group",
        "hint_a",
        "hint_b",
        "pdl",
    }

    @classmethod
    def plain(cls, problem: Problem) -> dict[str, Any]:
        """A 128-row tile, as wide as the problem feeds; few rows of D become columns of the wgmma."""
        swap_ab = problem.m <= WGMMA_M
        bm = ceil_div(problem.m, 16) * 16 if swap_ab else 128
        bn = 256 if not swap_ab and ceil_div(problem.m, bm) * ceil_div(problem.n, 256) >= 66 else 128
        stages = min(8, 220_000 // ((bm + bn) * 128))
        return {
            "bm": bm,
            "bn": bn,
            "swap_ab": swap_ab,
            "bk": 64,
            "stages": stages,
            "cluster": [1, 1],
            "consumers": 2,
            "warps_n": 1,
            "atom_n": bm if swap_ab else bn,
            "schedule": "cooperative",
            "raster_axis": "m",
            "raster_group": 8,
            "split_k": 1,
            "reduce": None,
            "epilogue": "direct" if problem.n % VECTOR else "tma",
            "registers": [40, 232],
            "hint_a": "normal",
            "hint_b": "normal",
            "pdl": False,
            "min_blocks": 1,
        }

    def violations(self) -> Iterator[str]:
        if broken := [*self._tile_violations(), *self._split_violations()]:
            yield from broken
            return
        yield from self.alignment_violations()
        yield from self.count_violations()
        yield from self._box_violations()
        yield from self._register_violations()
        gpu = self.target
        if self.smem_bytes > gpu.smem_block_bytes:
            yield (
                f"stages={self.stages}: {self.smem_bytes} bytes of shared memory "
                f"exceed the {gpu.smem_block_bytes} of {self.gpu}"
            )
        elif self.min_blocks > (fitting := gpu.smem_sm_bytes // (ceil_div(self.smem_bytes, 128) * 128 + 1024)):
            yield (
                f"min_blocks={self.min_blocks}: {self.smem_bytes} bytes of shared memory each, {fitting} fits on an SM"
            )

    def _tile_violations(self) -> Iterator[str]:
        if self.schedule == "pingpong" and self.consumers != 2:
            yield f"consumers={self.consumers}: must be 2 for schedule pingpong, which gives each its own tile"
        if self.consumers % self.warps_n or (self.schedule == "pingpong" and self.warps_n > 1):
            yield f"warps_n={self.warps_n}: must divide the {self.sharers} consumer warpgroups that share a tile"
            return
        field = ("bn", "bm") if self.swap_ab else ("bm", "bn")
        if self.rows % (unit := WGMMA_M * self.sharers // self.warps_n):
            shared = f"{self.sharers // self.warps_n} warpgroups of {WGMMA_M} rows each"
            yield f"{field[0]}={self.rows}: must be a multiple of {unit}, {shared}"
        if self.cols % (self.warps_n * self.atom_n):
            part = f"{field[1]}={self.cols}" + (f" / warps_n={self.warps_n}" if self.warps_n > 1 else "")
            yield f"atom_n={self.atom_n}: must divide {part}"

    def _split_violations(self) -> Iterator[str]:
        if (self.reduce is not None) != (self.split_k > 1):
            yield f"reduce={_null(self.reduce)}: is given for split_k above 1, and only there"
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
        if (size := self.bm * self.bn * 4) > self.ring_bytes:
            yield f"reduce=cluster: {size} bytes of partial sums exceed the ring's {self.ring_bytes}"

    def _box_violations(self) -> Iterator[str]:
        cluster_m, cluster_n = self.cluster
        if cluster_m * cluster_n > 4:
            yield f"cluster={list(self.cluster)}: {cluster_m * cluster_n} CTAs exceed 4"
        if self.bm % (8 * cluster_n):
            yield f"bm={self.bm}: must be a multiple of 8*cluster[1] = {8 * cluster_n}, a CTA's part of the rows of A"
        if self.layout == "tn" and self.bn % (8 * cluster_m):
            yield f"bn={self.bn}: must be a multiple of 8*cluster[0] = {8 * cluster_m}, a CTA's part of the rows of B"

    def _register_violations(self) -> Iterator[str]:
        consumer = self.entry_registers
        if self.registers is not None:
            producer, consumer = self.registers
            wanted, pool = producer + self.consumers * consumer, (self.consumers + 1) * (self.entry_registers // 8 * 8)
            if wanted > pool:
                yield (
                    f"registers={list(self.registers)}: {wanted} for a producer and {self.consumers} consumers "
                    f"exceed the {pool} that {self.threads} threads start with; the kernel would wait forever"
                )
                return
            if producer > self.entry_registers or consumer < self.entry_registers // 8 * 8:
                yield (
                    f"registers={list(self.registers)}: the producer must give and consumers take, "
                    f"from the {self.entry_registers} that {self.threads} threads start with"
                )
                return
            if producer < self.producer_registers:
                yield (
                    f"registers={list(self.registers)}: a producer for cluster {list(self.cluster)} "
                    f"and boxes of {self.chunk_b} columns needs {self.producer_registers} registers"
                )
        yield from self.register_violations(self.atom_n, f"atom_n={self.atom_n}", consumer)

    @property
    def k_step(self) -> int:
        """A k-tile."""
        return self.bk

    @property
    def ring_steps(self) -> int:
        return self.stages

    @property
    def sharers(self) -> int:
        """Consumer warpgroups that share one tile."""
        return 1 if self.schedule == "pingpong" else self.consumers

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def ctas_at_least(self) -> int:
        return self.min_blocks

    @property
    def live_registers(self) -> int:
        if self.epilogue == "tma" or self.reduces_in_cluster:
            return LIVE_REGISTERS
        # Across the accumulators' rows, each 8 columns are another row of D: its address is kept.
        return LIVE_REGISTERS_ACROSS + self.cols // 4 if self.swap_ab else LIVE_REGISTERS_DIRECT

    @property
    def producer_registers(self) -> int:
        """Registers that the producer needs at least, or it spills."""
        narrow = self.cluster != (1, 1) and self.layout == "nn" and self.chunk_b == 16
        return PRODUCER_REGISTERS[narrow]

    @property
    def accumulator_registers(self) -> int:
        return self.bm * self.bn // (128 * self.sharers) // (2 if self.acc == "f16" else 1)

    @property
    def atoms_m(self) -> int:
        """64-row blocks of one warpgroup."""
        return self.rows // (WGMMA_M * (self.sharers // self.warps_n))

    @property
    def atoms_n(self) -> int:
        """wgmma instructions side by side in one warpgroup."""
        return self.cols // (self.warps_n * self.atom_n)

    @property
    def chunk_b(self) -> int:
        """Columns of a box of B whose rows run along n: as many as one swizzle covers, and no wgmma straddles."""
        return WGMMA_M if self.swap_ab else _widest(self.atom_n)

    @property
    def boxes_a(self) -> int:
        """Boxes of rows in which a CTA loads its part of A."""
        return ceil_div(self.bm // self.cluster[1], MAX_BOX)

    @property
    def boxes_b(self) -> int:
        """The same of B where its rows run along k."""
        return ceil_div(self.bn // self.cluster[0], MAX_BOX)

    @property
    def store_group(self) -> int:
        """Accumulator columns that a warp stores at a time."""
        return _widest(self.atom_n)

    @property
    def ring_bytes(self) -> int:
        return self.stages * (self.bm + self.bn) * self.bk * 2

    @property
    def store_bytes(self) -> int:
        """Buffers of the epilogue: two per consumer warp, of 16 rows or columns of D."""
        return self.consumers * 4 * STORE_BUFFERS * 16 * self.store_group * 2 if self.epilogue == "tma" else 0

    @property
    def smem_bytes(self) -> int:
        """Ring, epilogue buffers, the ring's two mbarriers per stage, and 32 bytes of order barriers and flags."""
        return self.ring_bytes + self.store_bytes + 16 * self.stages + 32

    @property
    def reduces_in_cluster(self) -> bool:
        return self.reduce == "cluster"

    @property
    def cluster_ctas(self) -> int:
        return self.split_k if self.reduces_in_cluster else self.cluster[0] * self.cluster[1]

    @property
    def ctas(self) -> int:
        """CTA tiles of the problem, those of clusters that reach beyond it and slices of k included."""
        clusters = ceil_div(self.tiles_m, self.cluster[0]) * ceil_div(self.tiles_n, self.cluster[1])
        return clusters * self.cluster[0] * self.cluster[1] * self.split_k

    @property
    def estimated_registers(self) -> int:
        """What ptxas will report: the entry value with setmaxnreg, else a rough guide."""
        return self.entry_registers if self.registers else min(self.entry_registers, self.accumulator_registers + 38)

    @property
    def remarks(self) -> list[str]:
        """What its author should know of a legal record."""
        found = super().remarks
        if self.layout == "nn" and self.chunk_b < CHUNK:
            found.append(f"boxes of B are {self.chunk_b} columns wide: {self.bn // self.chunk_b} of them per k-tile")
        tiles = self.tiles_m * self.tiles_n * self.split_k
        if self.schedule == "pingpong" and tiles <= self.target.sms:
            found.append("schedule pingpong with one tile per CTA leaves every second warpgroup without work")
        if self.tiles_m % self.cluster[0] or self.tiles_n % self.cluster[1]:
            found.append(f"cluster={list(self.cluster)} reaches beyond the {self.tiles_m} x {self.tiles_n} tiles")
        if self.target.sms % self.cluster_ctas:
            found.append(f"clusters of {self.cluster_ctas} leave SMs idle")
        return found

    @property
    def name(self) -> str:
        return self.named(f"{self.bm}x{self.bn}x{self.bk}_s{self.stages}")

    @property
    def launch(self) -> dict[str, str | int]:
        """What the generic launcher must know of the compiled kernel; data fields come at ``open``."""
        b_rows = self.bn // self.cluster[0] // self.boxes_b if self.layout == "tn" else self.bk // self.cluster[0]
        return {
            "entry": self.name,
            "launch": "tma",
            "layout": self.layout,
            "threads": self.threads,
            "smem_bytes": self.smem_bytes,
            "bm": self.bm,
            "bn": self.bn,
            "bk": self.bk,
            "split_k": self.split_k,
            "reduce": self.reduce or "none",
            "persistent": int(not self.reduces_in_cluster),
            "cluster_m": self.cluster[0],
            "cluster_n": self.cluster[1],
            "box_a_cols": 64,
            "box_a_rows": self.bm // self.cluster[1] // self.boxes_a,
            "box_b_cols": 64 if self.layout == "tn" else self.chunk_b,
            "box_b_rows": b_rows,
            **_box_d(self, self.store_group if self.epilogue == "tma" else 0),
        }

    @property
    def launch_options(self) -> dict[str, int]:
        """Data fields that the launcher takes when it opens the kernel."""
        return {
            "raster_axis": "mn".index(self.raster_axis),
            "raster_group": self.raster_group,
            "hint_a": HINTS.index(self.hint_a),
            "hint_b": HINTS.index(self.hint_b),
            "pdl": int(self.pdl),
        }

    def launched_with(self, options: dict[str, int]) -> Self:
        """The record whose ``launch_options`` are these where they differ."""
        spelled: dict[str, Callable[[int], Any]] = {
            "raster_axis": "mn".__getitem__, "hint_a": HINTS.__getitem__, "hint_b": HINTS.__getitem__, "pdl": bool,
        }  # fmt: skip
        return self.model_copy(update={name: spelled.get(name, int)(value) for name, value in options.items()})

    @property
    def other_options(self) -> list[dict[str, int]]:
        """Both axes, bands of one tile and of more than there are, all hints, overlap."""
        return [
            {"raster_axis": 1, "raster_group": 1, "hint_a": 1, "hint_b": 2, "pdl": 1},
            {"raster_axis": 0, "raster_group": 2, "hint_a": 2, "hint_b": 0},
            {"raster_axis": 1, "raster_group": 64, "hint_b": 1},
        ]


class Sm90Small(Sm90Kernel):
    """All of a CTA's k is in shared memory at once, no ring; for problems whose time is latency, on sm_90a.

    ``k_chunks`` of 64 are what a CTA holds; ``split_k`` CTAs of a cluster share the k of a tile. ``exact``: the tile
    divides m and n, and the k is compiled in. Engine ``tma_wgmma`` has one warpgroup per 64 rows, ``cpasync_mma`` up to
    four warps of mma.sync, whose tiles may be 16 rows high.
    """

    family: Literal["sm90_small"]
    k_chunks: Annotated[int, Field(ge=1, le=32)]
    engine: Literal["tma_wgmma", "cpasync_mma"]
    exact: bool
    split_k: Literal[1, 2, 4, 8]

    @classmethod
    def plain(cls, problem: Problem) -> dict[str, Any]:
        """A 64 x 64 tile, or as few rows as D has; slices of k until one fits into shared memory."""
        swap_ab = problem.m < WGMMA_M
        bm, chunks = ceil_div(problem.m, 16) * 16 if swap_ab else 64, ceil_div(problem.k, CHUNK)
        split_k = next((split for split in (1, 2, 4) if ceil_div(chunks, split) <= 8), 8)
        return {
            "bm": bm,
            "bn": 64,
            "swap_ab": swap_ab,
            "k_chunks": min(32, ceil_div(chunks, split_k)),
            "engine": "tma_wgmma",
            "exact": False,
            "split_k": split_k,
        }

    def violations(self) -> Iterator[str]:
        if broken := list(self._tile_violations()):
            yield from broken
            return
        yield from self.alignment_violations()
        yield from self.count_violations()
        chunks = ceil_div(self.k, CHUNK)
        if (slice_chunks := ceil_div(chunks, self.split_k)) > self.k_chunks:
            each = f" / split_k={self.split_k}" if self.split_k > 1 else ""
            yield f"k_chunks={self.k_chunks}: the {chunks} chunks of {CHUNK} in k={self.k}{each} are {slice_chunks}"
        if self.exact:
            units = {"m": self.bm, "n": self.bn, "k": CHUNK * self.split_k}
            for name, unit in units.items():
                if getattr(self, name) % unit:
                    yield f"exact=true: {name}={getattr(self, name)} must be a multiple of {unit}"
        gpu = self.target
        if self.smem_bytes > gpu.smem_block_bytes:
            yield (
                f"k_chunks={self.k_chunks}: {self.smem_bytes} bytes of shared memory "
                f"exceed the {gpu.smem_block_bytes} of {self.gpu}"
            )
        if self.split_k > 1 and (size := self.bm * self.bn * 4) > self.operand_bytes:
            yield f"split_k={self.split_k}: {size} bytes of partial sums exceed the operands' {self.operand_bytes}"

    def _tile_violations(self) -> Iterator[str]:
        if self.engine == "cpasync_mma":
            if self.swap_ab:
                yield "swap_ab=true: is for engine tma_wgmma, an mma.sync is 16 rows high anyway"
            for field, extent, warps in (("bm", self.bm, self.mma_repeat[0]), ("bn", self.bn, self.mma_repeat[1])):
                if extent % (16 * warps):
                    yield f"{field}={extent}: must be a multiple of {16 * warps}, {warps} warps of 16"
            if not (self.bm % 16 or self.bn % 16) and self.accumulator_registers > MMA_SYNC_ACCUMULATORS:
                yield (
                    f"bn={self.bn}: {self.accumulator_registers} accumulator registers exceed the "
                    f"{MMA_SYNC_ACCUMULATORS} that leave room for fragments"
                )
            return
        along, across = ("bn", "bm") if self.swap_ab else ("bm", "bn")
        if self.rows % WGMMA_M or self.rows > MAX_BOX:
            yield f"{along}={self.rows}: must be 64, 128, 192 or {MAX_BOX}, a warpgroup takes {WGMMA_M} rows"
        elif self.cols % 16 or self.cols > MAX_BOX:
            yield f"{across}={self.cols}: must be a multiple of 16 up to {MAX_BOX}, the columns of one wgmma"
        else:
            yield from self.register_violations(self.cols, f"{across}={self.cols}", self.entry_registers)

    @property
    def k_step(self) -> int:
        """A chunk: one box of TMA, 128 bytes of each row."""
        return CHUNK

    @property
    def bk(self) -> int:
        return CHUNK

    @property
    def stages(self) -> int:
        """Chunks in shared memory; none is used twice."""
        return self.k_chunks

    @property
    def threads(self) -> int:
        if self.engine == "tma_wgmma":
            return 2 * self.rows
        return 32 * self.mma_repeat[0] * self.mma_repeat[1]

    @property
    def mma_repeat(self) -> tuple[int, int, int]:
        """Warps of mma.sync along m and n: up to four, as square as the tile allows."""
        warps_m = min(2, self.bm // 16)
        return warps_m, max(1, min(4 // warps_m, self.bn // 16)), 1

    @property
    def warp_m(self) -> int:
        """16-row MMA blocks of one warp."""
        return self.bm // (MMA_M * self.mma_repeat[0])

    @property
    def warp_n(self) -> int:
        """8-column MMA blocks of one warp; always even, ldmatrix.x4 brings two."""
        return self.bn // (MMA_N * self.mma_repeat[1])

    @property
    def accumulator_registers(self) -> int:
        return self.bm * self.bn // self.threads // (2 if self.acc == "f16" else 1)

    @property
    def predicated(self) -> bool:
        return not self.exact

    @property
    def bake(self) -> tuple[Baked, ...]:
        return ("k",) if self.exact else ()

    @property
    def baked_k(self) -> int:
        return self.k if self.exact else 0

    @property
    def chunk_b(self) -> int:
        """Columns of a box of B whose rows run along n: as many as one swizzle covers, and the tile has."""
        return WGMMA_M if self.swap_ab else _widest(self.bn)

    @property
    def prefetch(self) -> Prefetch:
        """Fragments of mma.sync are loaded right before use: at most a few MMAs follow."""
        return Prefetch(kind="none")

    @property
    def smem_swizzle(self) -> Swizzle:
        """The 128-byte swizzle, of rows of one chunk."""
        return (3, 3, 3)

    @property
    def smem_swizzle_b(self) -> Swizzle:
        """The same for rows of k; rows along n are swizzled by the bits of their number."""
        vectors = self.bn // VECTOR
        return (3, 3, 3) if self.layout == "tn" else (3, 3, max(3, (vectors & -vectors).bit_length() - 1))

    @property
    def swizzle_period(self) -> int:
        """16-byte vectors after which both swizzles repeat: steps by its multiples are plain additions."""
        return max(1 << (bits + base - 3 + shift) for bits, base, shift in (self.smem_swizzle, self.smem_swizzle_b))

    @property
    def static_steps_a(self) -> bool:
        """Whether ldmatrix addresses of A advance by constants: rows by sums, columns by xor."""
        return MMA_M * self.mma_repeat[0] * (CHUNK // VECTOR) % self.swizzle_period == 0

    @property
    def static_steps_b(self) -> bool:
        """The same for B; for nn its rows run along k."""
        rows = (self.bn if self.layout == "nn" else self.mma_repeat[1] * CHUNK) * 16
        return rows // VECTOR % self.swizzle_period == 0

    @property
    def g2s_cols(self) -> int:
        """Threads along a row of a copy: its eight vectors."""
        return 8

    @property
    def g2s_cols_b(self) -> int:
        vectors = self.bn // VECTOR
        return 8 if self.layout == "tn" else min(vectors & -vectors, 8)

    @property
    def operand_bytes(self) -> int:
        return (self.bm + self.bn) * CHUNK * 2 * self.k_chunks

    @property
    def ring_bytes(self) -> int:
        return self.operand_bytes

    @property
    def smem_bytes(self) -> int:
        """Operands, and an mbarrier per chunk where TMA brings it."""
        return self.operand_bytes + (8 * self.k_chunks if self.engine == "tma_wgmma" else 0)

    @property
    def cluster_ctas(self) -> int:
        return self.split_k

    @property
    def most_k(self) -> int:
        return CHUNK * self.k_chunks * self.split_k

    def code(self) -> dict[str, Any]:
        fields = super().code()
        fields["baked"] = {"k": self.baked_k} if self.exact else {}
        return fields

    @property
    def estimated_registers(self) -> int:
        """Accumulators and addressing, fragments of mma.sync; a rough guide for pruning."""
        fragments = 4 * self.warp_m + 2 * self.warp_n if self.engine == "cpasync_mma" else 0
        return self.accumulator_registers + fragments + 32

    @property
    def name(self) -> str:
        return self.named(f"{self.bm}x{self.bn}_c{self.k_chunks}")

    @property
    def launch(self) -> dict[str, str | int]:
        """What the generic launcher must know of the compiled kernel."""
        tma = self.engine == "tma_wgmma"
        facts: dict[str, str | int] = {
            "entry": self.name,
            "launch": "tma" if tma else "cluster",
            "layout": self.layout,
            "threads": self.threads,
            "smem_bytes": self.smem_bytes,
            "bm": self.bm,
            "bn": self.bn,
            "bk": CHUNK,
            "split_k": self.split_k,
            "reduce": "cluster" if self.split_k > 1 else "none",
            "persistent": 0,
            "steps": self.k_chunks,
            "exact": int(self.exact),
            "baked_k": self.baked_k,
            "cluster_m": 1,
            "cluster_n": 1,
            "box_d_cols": 0,
            "box_d_rows": 0,
        }
        if tma:
            facts |= {
                "box_a_cols": CHUNK,
                "box_a_rows": self.bm,
                "box_b_cols": CHUNK if self.layout == "tn" else self.chunk_b,
                "box_b_rows": self.bn if self.layout == "tn" else CHUNK,
            }
        return facts


def _widest(extent: int) -> int:
    """The widest swizzled row, in halves, that divides an extent."""
    return next(width for width in (64, 32, 16) if extent % width == 0)


def _null(value: str | None) -> str:
    return "null" if value is None else value


def _box_d(record: Sm90Wgmma, group: int) -> dict[str, str | int]:
    """A warp's stores: 16 rows of D and a group of its columns, or the other way round; zeros without TMA."""
    cols, rows = (16, group) if record.swap_ab else (group, 16)
    return {"box_d_cols": cols if group else 0, "box_d_rows": rows if group else 0}


Record = Sm80Multistage | Sm80Direct | Sm90Wgmma | Sm90Small
FAMILIES: dict[str, type[Record]] = {
    "sm80_multistage": Sm80Multistage,
    "sm80_direct": Sm80Direct,
    "sm90_wgmma": Sm90Wgmma,
    "sm90_small": Sm90Small,
}
_KERNEL: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="family")])


class IllegalRecord(ValueError):
    """A record that breaks a rule; the message names field, value and rule."""


def parse(fields: dict[str, Any] | str | bytes) -> Record:
    """A record from a JSON line or from its fields; raises IllegalRecord with every broken rule in one line."""
    try:
        if not isinstance(fields, dict):
            _refuse_repeated_keys(fields)
        # By way of JSON in any case: there lists may stand for tuples, and a number is never text or truth.
        return _KERNEL.validate_json(json.dumps(fields) if isinstance(fields, dict) else fields)
    except ValidationError as error:
        raise IllegalRecord(explain(error)) from None


def _refuse_repeated_keys(line: str | bytes) -> None:
    def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise IllegalRecord(f"{', '.join(repeated)}: appears more than once")
        return dict(pairs)

    try:
        json.loads(line, object_pairs_hook=check)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return  # the parser that follows says it better


def explain(error: ValidationError) -> str:
    """pydantic's findings as ``field=value: rule``, without its model names."""
    lines = []
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"] if part not in FAMILIES)
        if item["type"] == "union_tag_not_found":
            lines.append("family: field required")
            continue
        message = item["msg"].removeprefix("Value error, ")
        message = message[0].lower() + message[1:] if item["type"] != "value_error" else message
        value = json.dumps(item["input"], default=str)
        shown = f"={value}" if where and item["type"] not in ("missing", "extra_forbidden") else ""
        lines.append(f"{where}{shown}: {message}" if where else message)
    return "; ".join(lines)


def revise(record: Record, **changes: Any) -> Record:
    """The record with fields changed, validated anew (pydantic's model_copy would skip the rules)."""
    return parse(record.model_dump(mode="json") | changes)


def _swizzle_violations(field: str, swizzle: Swizzle, sizes: dict[str, int]) -> Iterator[str]:
    bits, base, shift = swizzle
    if shift < bits:
        yield f"{field}={list(swizzle)}: the shift must not be below the bits, or the permutation is not one"
    for name, halves in sizes.items():
        if halves % (1 << (bits + base)):
            block = 1 << (bits + base)
            yield f"{field}={list(swizzle)}: permutes blocks of {block} halves, {name}={halves} is no multiple"


def _list(value: tuple[int, ...] | None) -> list[int] | None:
    return None if value is None else list(value)


def _launch(record: Sm80Multistage | Sm80Direct, raster: str) -> dict[str, str | int]:
    return {
        "entry": record.name,
        "launch": "tiles",
        "raster": raster,
        "layout": record.layout,
        "threads": record.threads,
        "smem_bytes": record.smem_bytes,
        "bm": record.bm,
        "bn": record.bn,
        "bk": record.k_step,
        "split_k": record.split_k,
        "predicated": int(record.predicated),
        "baked_n": record.baked_n,
        "baked_k": record.baked_k,
    }
