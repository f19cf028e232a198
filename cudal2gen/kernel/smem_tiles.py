"""k-tiles of A and B in shared memory, which cp.async writes and ldmatrix reads: swizzles, copies, constant steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from cudal2gen.kernel.mma_sync import MMA_M, MMA_N, MmaTiles
from cudal2gen.kernel.work import LINE, Work
from kernelproof.ground.integers import ceil_div

Swizzle = tuple[Annotated[int, Field(ge=0, le=5)], Annotated[int, Field(ge=3, le=5)], Annotated[int, Field(ge=0, le=6)]]


class SmemTiles(MmaTiles):
    """Tiles for mma.sync with operands in shared memory, in rows of 16-byte vectors that a swizzle permutes.

    Rows of A run along k; rows of B run along k for layout tn and along n for nn. A swizzle is CuTe's ``Swizzle<bits,
    base, shift>`` on elements.
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
        """The swizzle of B: that of A for tn; for nn the one whose source bits are the low bits of the row."""
        if self.layout == "tn":
            return self.swizzle_a
        vectors = self.bn // self.element.vector
        return (3, 3, max(3, (vectors & -vectors).bit_length() - 1))

    @property
    def copy_cols_b(self) -> int:
        """Threads along a row of B in a copy: as for A if tn; for nn as many as one line of 128 bytes serves."""
        if self.layout == "tn":
            return self.copy_cols_a
        vectors = self.bn // self.element.vector
        return min(vectors & -vectors, 8)

    @property
    def swizzle_period(self) -> int:
        """16-byte vectors after which both swizzles repeat, so that steps by multiples of it are plain additions."""
        return max(1 << (bits + base - 3 + shift) for bits, base, shift in (self.swizzle_a, self.swizzle_b))

    @property
    def static_steps_a(self) -> bool:
        """Whether ldmatrix addresses of A advance by constants: rows by sums, columns by xor."""
        vectors = self.k_step // self.element.vector
        return power_of_two(vectors) and MMA_M * self.warps[0] * vectors % self.swizzle_period == 0

    @property
    def static_steps_b(self) -> bool:
        """The same for B. For nn its rows run along n, and a step advances along k."""
        if self.layout == "nn":
            return self.element.mma_k * (self.bn // self.element.vector) % self.swizzle_period == 0
        vectors = self.k_step // self.element.vector
        return power_of_two(vectors) and 2 * MMA_N * self.warps[1] * vectors % self.swizzle_period == 0

    @property
    def work(self) -> Work:
        """Each warp reads the rows and columns that it multiplies: A is read by every column of warps, B by every
        row."""
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
    """Whether a positive extent is a power of two."""
    return extent & (extent - 1) == 0


def swizzle_violations(field: str, swizzle: Swizzle, sizes: dict[str, int]) -> Iterator[str]:
    """The rule that a swizzle permutes 16-byte vectors within blocks that divide the sizes, which are in elements."""
    bits, base, shift = swizzle
    if shift < bits:
        yield f"{field}={list(swizzle)}: the shift must not be below the bits, or the permutation is not one"
    for name, extent in sizes.items():
        if extent % (1 << (bits + base)):
            block = 1 << (bits + base)
            yield f"{field}={list(swizzle)}: permutes blocks of {block} elements, {name}={extent} is no multiple"
