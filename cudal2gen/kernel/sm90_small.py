"""Defines the family sm90_small, whose CTAs load all of their k at once: for problems that are limited by latency."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from cudal2gen.kernel.launch import Cluster, Launch
from cudal2gen.kernel.problem import Problem
from cudal2gen.kernel.record import FAMILY, Fields
from cudal2gen.kernel.sm90 import CLUSTER_SPLITS, Overlap, Sm90Kernel
from cudal2gen.kernel.smem_tiles import SmemTiles, Swizzle
from cudal2gen.kernel.work import CtaWork
from kernelproof.ground.integers import ceil_div

MAX_ACCUMULATORS = 128  # registers of a thread, which leave room for fragments


class Sm90Small(SmemTiles, Sm90Kernel):
    """A CTA requests all of its k at once by cp.async, without a ring; up to four warps multiply it as it arrives.

    The family is for problems that are limited by latency, on sm_90a. A CTA holds ``k_chunks`` chunks of 64 k; the
    ``split_k`` CTAs of a cluster share the k of a tile.
    """

    family: Annotated[Literal["sm90_small"], FAMILY]
    k_chunks: Annotated[int, Field(ge=1, le=32, description="chunks of 64 k that a CTA holds in shared memory at once")]
    split_k: Annotated[Literal[1, 2, 4, 8], Field(description="CTAs of a cluster that share the k of a tile")]
    pdl: Overlap = False

    CONVENTION: ClassVar[type[Launch]] = Cluster
    DATA_FIELDS: ClassVar[frozenset[str]] = Sm90Kernel.DATA_FIELDS | {option.name for option in Cluster.options}
    FOLLOWING: ClassVar[frozenset[str]] = Sm90Kernel.FOLLOWING | {"k_chunks"}

    @classmethod
    def plain(cls, problem: Problem) -> dict[str, Any]:
        """A 32 x 32 tile, or 16 rows if D has no more; up to 8 slices of k of up to 8 chunks each."""
        chunks = ceil_div(problem.k, problem.element.chunk)
        split_k = next((split for split in (1, *CLUSTER_SPLITS) if ceil_div(chunks, split) <= 8), CLUSTER_SPLITS[-1])
        return {
            "bm": 16 if problem.m <= 16 else 32,
            "bn": 32,
            "k_chunks": min(32, ceil_div(chunks, split_k)),
            "split_k": split_k,
        }

    def violations(self) -> Iterator[str]:
        if broken := list(self._tile_violations()):
            yield from broken
            return
        yield from self.row_violations()
        yield from self.count_violations()
        if self.grouped:
            yield "batch=grouped: must be none or strided for family sm90_small, which has no code for groups of rows"
        chunks = ceil_div(self.k, self.k_step)
        if (slice_chunks := ceil_div(chunks, self.split_k)) > self.k_chunks:
            share = f"k={self.k} / split_k={self.split_k}" if self.split_k > 1 else f"k={self.k}"
            yield f"k_chunks={self.k_chunks}: must be at least {slice_chunks}, the chunks of {self.k_step} in {share}"
        yield from self.smem_violations(f"k_chunks={self.k_chunks}")

    def _tile_violations(self) -> Iterator[str]:
        """Rules for the division of a tile among warps, and for the registers of its accumulators."""
        for field, extent, warps in (("bm", self.bm, self.warps[0]), ("bn", self.bn, self.warps[1])):
            if extent % (16 * warps):
                yield f"{field}={extent}: must be a multiple of {16 * warps}, {warps} warps of 16"
        if not (self.bm % 16 or self.bn % 16) and self.accumulator_registers > MAX_ACCUMULATORS:
            yield (
                f"bn={self.bn}: {self.accumulator_registers} accumulator registers exceed the "
                f"{MAX_ACCUMULATORS} that leave room for fragments"
            )

    @property
    def k_step(self) -> int:
        """The k of a chunk, which is 128 bytes of a row."""
        return self.element.chunk

    @property
    def steps_in_flight(self) -> int:
        """All chunks: they are requested at once."""
        return self.k_chunks

    @property
    def warps(self) -> tuple[int, int]:
        """Up to four warps, in a grid as square as the tile allows."""
        along_m = min(2, self.bm // 16)
        return along_m, max(1, min(4 // along_m, self.bn // 16))

    @property
    def swizzle_along_k(self) -> Swizzle:
        """The 128-byte swizzle, because a row of a chunk has 128 bytes."""
        return (3, 3, 3)

    @property
    def constant_stages(self) -> bool:
        return True

    @property
    def copy_cols_along_k(self) -> int:
        """The eight vectors of a chunk's row."""
        return 8

    @property
    def smem_bytes(self) -> int:
        """Bytes of all operands, and of the partial sums that the cluster's CTAs send to this one."""
        operands = self.k_chunks * self.step_bytes
        return operands + (self.cluster_sum_bytes(self.threads, self.fusion.gate) if self.split_k > 1 else 0)

    @property
    def cluster_ctas(self) -> int:
        return self.split_k

    @property
    def most_k(self) -> int:
        return self.k_step * self.k_chunks * self.split_k

    @property
    def estimated_registers(self) -> int:
        """Accumulators, fragments and addressing; a rough estimate for pruning."""
        return self.accumulator_registers + 4 * self.warp_m + 2 * self.warp_n + 32

    @property
    def tile(self) -> str:
        return f"{self.bm}x{self.bn}_c{self.k_chunks}"

    @property
    def launch(self) -> Cluster:
        return Cluster(**self.launch_facts, reduce="cluster" if self.split_k > 1 else "none", steps=self.k_chunks)

    @property
    def other_options(self) -> list[dict[str, int]]:
        """Overlap with the previous kernel."""
        return [{"pdl": 1}]

    # For the tuner and the cost model.

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Fields]:
        """For problems limited by latency, with at most 2^20 elements of D: a power of two of chunks, at most 8, and up
        to 8 CTAs that share the k of a tile. These limits are a choice that keeps the tuner's search small."""
        if problem.m * problem.n > 1 << 20:
            return
        chunks = ceil_div(problem.k, problem.element.chunk)
        for split_k in (1, *CLUSTER_SPLITS):
            k_chunks = 1 << (ceil_div(chunks, split_k) - 1).bit_length()  # the least power of two that suffices
            if k_chunks > 8 or split_k > chunks:
                continue
            for bm, bn in ((16, 32), (32, 32), (32, 64), (64, 64)):
                yield {"bm": bm, "bn": bn, "k_chunks": k_chunks, "split_k": split_k}

    @property
    def work(self) -> CtaWork:
        return super().work._replace(summed_by="cluster")
