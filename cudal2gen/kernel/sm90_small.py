"""The family sm90_small: all k of a CTA in shared memory at once, for problems whose time is latency; for sm_90a."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from cudal2gen.kernel.mma_sync import MMA_M, MMA_N, MMA_SYNC_ACCUMULATORS, Baked, Swizzle
from cudal2gen.kernel.problem import VECTOR, Problem, ceil_div
from cudal2gen.kernel.sm80_multistage import Prefetch
from cudal2gen.kernel.sm90 import CHUNK, MAX_BOX, WGMMA_M, Sm90Kernel, widest


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
        return WGMMA_M if self.swap_ab else widest(self.bn)

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
    def tile(self) -> str:
        return f"{self.bm}x{self.bn}_c{self.k_chunks}"

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
