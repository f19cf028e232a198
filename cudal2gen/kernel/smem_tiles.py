"""k-tiles of A and B in shared memory, as cp.async writes and ldmatrix reads them: swizzles, copies, constant steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from cudal2gen.kernel.mma_sync import MMA_M, MMA_N, MmaTiles
from cudal2gen.kernel.work import LINE, Work
from kernelproof.ground.integers import ceil_div

Swizzle = tuple[Annotated[int, Field(ge=0, le=5)], Annotated[int, Field(ge=3, le=5)], Annotated[int, Field(ge=0, le=6)]]


class SmemTiles(MmaTiles):
    """Tiles for mma.sync whose operands lie in shared memory: rows of 16-byte vectors, permuted by a swizzle.

    Rows of A run along k, those of B too for layout tn, else along n. A swizzle is CuTe's ``Swizzle<bits, base,
    shift>`` on elements.
    """

    @property
    def swizzle_a(self) -> Swizzle:
        raise NotImplementedError

    @property
    def copy_cols_a(self) -> int:
        """Threads along a row of A in a copy."""
        raise NotImplementedError

    @property
    def constant_stages(self) -> bool:
        """Whether each load from shared memory names its stage as a constant: the loop over k is unrolled whole."""
        raise NotImplementedError

    @property
    def swizzle_b(self) -> Swizzle:
        """B's swizzle: as A's for tn; for nn the one whose source bits are the low bits of the row."""
        if self.layout == "tn":
            return self.swizzle_a
        vectors = self.bn // self.element.vector
        return (3, 3, max(3, (vectors & -vectors).bit_length() - 1))

    @property
    def copy_cols_b(self) -> int:
        """Threads along a row of B: as A's for tn; for nn as many as a 128-byte line serves."""
        if self.layout == "tn":
            return self.copy_cols_a
        vectors = self.bn // self.element.vector
        return min(vectors & -vectors, 8)

    @property
    def swizzle_period(self) -> int:
        """16-byte vectors after which both swizzles repeat: steps by its multiples are plain additions."""
        return max(1 << (bits + base - 3 + shift) for bits, base, shift in (self.swizzle_a, self.swizzle_b))

    @property
    def static_steps_a(self) -> bool:
        """Whether ldmatrix addresses of A advance by constants: rows by sums, columns by xor."""
        vectors = self.k_step // self.element.vector
        return power_of_two(vectors) and MMA_M * self.warps[0] * vectors % self.swizzle_period == 0

    @property
    def static_steps_b(self) -> bool:
        """The same for B; for nn its rows run along n, and a step is of k."""
        if self.layout == "nn":
            return self.element.mma_k * (self.bn // self.element.vector) % self.swizzle_period == 0
        vectors = self.k_step // self.element.vector
        return power_of_two(vectors) and 2 * MMA_N * self.warps[1] * vectors % self.swizzle_period == 0

    @property
    def work(self) -> Work:
        """A warp reads the rows and columns that it multiplies: A once per column of warps, B once per row of them."""
        warps_m, warps_n = self.warps
        read = (self.bm * warps_n + self.bn * warps_m) * self.k_step * self.element.bytes
        along_k = ceil_div(self.k_step * self.element.bytes, LINE)
        of_b = self.bn * along_k if self.layout == "tn" else self.k_step * ceil_div(self.bn * self.element.bytes, LINE)
        return Work(
            "mma.sync",
            self.step_bytes,
            shared_bytes=read + self.step_bytes,
            lines=self.bm * along_k + of_b,
        )


def power_of_two(extent: int) -> bool:
    """Whether a positive extent has one bit."""
    return extent & (extent - 1) == 0


def swizzle_violations(field: str, swizzle: Swizzle, sizes: dict[str, int]) -> Iterator[str]:
    """Whether a swizzle permutes 16-byte vectors within blocks that the sizes, in elements, are multiples of."""
    bits, base, shift = swizzle
    if shift < bits:
        yield f"{field}={list(swizzle)}: the shift must not be below the bits, or the permutation is not one"
    for name, extent in sizes.items():
        if extent % (1 << (bits + base)):
            block = 1 << (bits + base)
            yield f"{field}={list(swizzle)}: permutes blocks of {block} elements, {name}={extent} is no multiple"
