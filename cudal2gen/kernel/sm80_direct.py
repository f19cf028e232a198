"""Defines the family sm80_direct, which loads fragments from global memory: for problems too small to fill a ring."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Literal

from cudal2gen.kernel.launch import Tiles
from cudal2gen.kernel.mma_sync import SPLITS, MmaSyncKernel
from cudal2gen.kernel.problem import Problem
from cudal2gen.kernel.record import FAMILY, Fields
from cudal2gen.kernel.work import CtaWork
from kernelproof.ground.element import VECTOR_BYTES
from kernelproof.ground.integers import ceil_div


class Sm80Direct(MmaSyncKernel):
    """Fragments are loaded directly from global memory, without shared memory: for problems too small to fill a
    ring."""

    family: Annotated[Literal["sm80_direct"], FAMILY]

    def violations(self) -> Iterator[str]:
        if not self.along_k.a:
            yield f"layout={self.layout}: must be tn or nn, lanes load rows of A (m,k); choose a family with a ring"
            return
        yield from self.problem_violations()

    @property
    def k_step(self) -> int:
        """The k of two MMAs: each lane loads a 16-byte vector per row, which is enough for both."""
        return 2 * self.element.mma_k

    def k_order(self, k: int) -> list[list[list[int]]]:
        """The slices of the base class, with each step's k in the order in which lanes load it.

        Four lanes load a step, each 16 bytes: for 2-byte elements, lane l loads k = 8 l to 8 l + 7. An MMA sums its k
        in two groups, each of which has one pair of neighbours from every lane. So the first MMA's two groups are
        8 l + {0, 1} and 8 l + {2, 3}, the second's are 8 l + {4, 5} and 8 l + {6, 7}.
        """
        groups = [[lane * self.element.vector + pair + e for lane in range(4) for e in (0, 1)] for pair in (0, 2, 4, 6)]
        return [
            [
                [start + offset for offset in group if start + offset < k]
                for start in range(part[0][0], part[-1][-1] + 1, self.k_step)
                for group in groups
            ]
            for part in super().k_order(k)
        ]

    @property
    def estimated_registers(self) -> int:
        """Accumulators, two sets of fragments and addressing; a rough estimate for pruning."""
        return self.accumulator_registers + 2 * (8 * self.warp_m + 4 * self.warp_n) + 32

    @property
    def tile(self) -> str:
        return f"{self.bm}x{self.bn}"

    @property
    def launch(self) -> Tiles:
        """The launch of a grid of tiles in row order."""
        return self.tiles_launch("plain")

    # For the tuner and the cost model.

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Fields]:
        """Tiles of one warp, for problems too small to fill a ring: D has at most 2^18 elements and k at most 64 steps.
        These limits are a choice that keeps the tuner's search small."""
        step = 2 * problem.element.mma_k
        if problem.m * problem.n > 1 << 18 or problem.k > 64 * step:
            return
        for bm, bn, split_k in product((16, 32), (16, 32, 64), SPLITS):
            if ceil_div(problem.k, step) >= split_k:
                yield {
                    "bm": bm, "bn": bn, "mma_repeat": [1, 1, 1], "unroll_k": False, "bake": [],
                    "padding": cls.least_padding(problem, bm, bn, step), "split_k": split_k,
                }  # fmt: skip

    @property
    def work(self) -> CtaWork:
        """Every warp loads its own fragments from the L2."""
        warps_m, warps_n = self.warps
        fragments = (self.bm * warps_n + self.bn * warps_m) * self.k_step * self.element.bytes
        return CtaWork("mma.sync", fragments, lines=fragments // VECTOR_BYTES)
