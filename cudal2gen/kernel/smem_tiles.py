"""Describes k-tiles of A and B in shared memory, which cp.async writes and ldmatrix reads: swizzles and addresses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from cudal2gen.kernel.mma_sync import MMA_M, MMA_N, MmaTiles
from cudal2gen.kernel.work import LINE, CtaWork
from kernelproof.ground.integers import ceil_div

# CuTe's bits, base and shift.
Swizzle = tuple[Annotated[int, Field(ge=0, le=5)], Annotated[int, Field(ge=3, le=5)], Annotated[int, Field(ge=0, le=6)]]


class SmemTiles(MmaTiles):
    """Tiles for mma.sync with operands in shared memory, in rows of 16-byte vectors that a swizzle permutes.

    Rows lie as in device memory: along k, or across it along m or n. A swizzle is CuTe's ``Swizzle<bits, base, shift>``
    on elements.
    """

    @property
    def swizzle_along_k(self) -> Swizzle:
        """The swizzle of operands whose rows run along k."""
        raise NotImplementedError

    @property
    def copy_cols_along_k(self) -> int:
        """Threads that copy one row of an operand whose rows run along k."""
        raise NotImplementedError

    @property
    def constant_stages(self) -> bool:
        """Whether each load from shared memory names its stage as a constant, because the loop over k is unrolled."""
        raise NotImplementedError

    @property
    def swizzle_a(self) -> Swizzle:
        """The swizzle of the tile of A."""
        return self.swizzle_along_k if self.along_k.a else _swizzle_across(self._vectors_across[0])

    @property
    def swizzle_b(self) -> Swizzle:
        """The swizzle of the tile of B."""
        return self.swizzle_along_k if self.along_k.b else _swizzle_across(self._vectors_across[1])

    @property
    def copy_cols_a(self) -> int:
        """Threads that copy one row of A."""
        return self.copy_cols_along_k if self.along_k.a else _copy_cols_across(self._vectors_across[0])

    @property
    def copy_cols_b(self) -> int:
        """Threads that copy one row of B."""
        return self.copy_cols_along_k if self.along_k.b else _copy_cols_across(self._vectors_across[1])

    @property
    def _vectors_across(self) -> tuple[int, int]:
        """16-byte vectors of the tile along m and along n: those of a row of A and B if it runs across k."""
        return self.bm // self.element.vector, self.bn // self.element.vector

    @property
    def swizzle_period(self) -> int:
        """16-byte vectors after which both swizzles repeat, so that steps by multiples of it are plain additions."""
        # A swizzle repeats after 2^(bits + base + shift) elements, and a vector has 2^3.
        return max(1 << (bits + base - 3 + shift) for bits, base, shift in (self.swizzle_a, self.swizzle_b))

    @property
    def static_steps_a(self) -> bool:
        """Whether ldmatrix addresses of A advance by constants: from row to row by sums, along a row by xor."""
        return self._static_steps(self.along_k.a, MMA_M * self.warps[0], self._vectors_across[0])

    @property
    def static_steps_b(self) -> bool:
        """Whether ldmatrix addresses of B advance by constants, like those of A."""
        return self._static_steps(self.along_k.b, 2 * MMA_N * self.warps[1], self._vectors_across[1])

    def _static_steps(self, along_k: bool, rows: int, vectors_across: int) -> bool:
        """Whether a step from one MMA to the next keeps the bits of an address that the swizzle reads.

        If rows run along k, a step advances by ``rows`` rows. Otherwise rows have ``vectors_across`` vectors each, and
        a step advances by the k of an MMA.
        """
        if not along_k:
            return self.element.mma_k * vectors_across % self.swizzle_period == 0
        vectors = self.k_step // self.element.vector
        return power_of_two(vectors) and rows * vectors % self.swizzle_period == 0

    @property
    def work(self) -> CtaWork:
        """Each warp reads the rows and columns that it multiplies: A is read by every column of warps, B by every
        row."""
        warps_m, warps_n = self.warps
        read_bytes = (self.bm * warps_n + self.bn * warps_m) * self.k_step * self.element.bytes
        return CtaWork(
            "mma.sync",
            self.step_bytes,
            shared_bytes=read_bytes + self.step_bytes,
            lines=self._lines(self.along_k.a, self.bm) + self._lines(self.along_k.b, self.bn),
        )

    def _lines(self, along_k: bool, extent: int) -> int:
        """Lines of the L2 that a k-step of an operand with this extent of the tile reads."""
        rows, cols = (extent, self.k_step) if along_k else (self.k_step, extent)
        return rows * ceil_div(cols * self.element.bytes, LINE)


def _swizzle_across(vectors: int) -> Swizzle:
    """The swizzle of an operand whose rows run across k, with ``vectors`` vectors of 16 bytes in each row. Its source
    bits, which it XORs into the place of a vector, are the low bits of the row."""
    # vectors & -vectors is the largest power of two that divides a row.
    return (3, 3, max(3, (vectors & -vectors).bit_length() - 1))


def _copy_cols_across(vectors: int) -> int:
    """Threads that copy one row across k: at most the 8 vectors of a 128-byte line, and a power of two that divides."""
    return min(vectors & -vectors, 8)


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
