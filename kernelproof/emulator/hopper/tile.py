"""Models the registers that wgmma uses: accumulators and A operands, and the wgmma group that uses them.

The sums of a wgmma are written to registers only when another instruction reads them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernelproof.emulator.arithmetic.operands import ELEMENT_BITS, f16_to_f32, rounded
from kernelproof.emulator.machine.tensor import Accumulator
from kernelproof.emulator.state.arrays import Array


class WgmmaForm(NamedTuple):
    """The modifiers of a wgmma.mma_async: ``n`` columns, types of A and B (of equal width) and of the accumulator.
    ``registers``: A comes from registers, not from shared memory. ``m_major_a``, ``n_major_b``: the operand is M- or
    N-major. ``sign``: -1.0 if products are negated, else 1.0. ``saturate``: s32 sums are clamped."""

    n: int
    kind_a: str
    kind_b: str
    acc: str
    registers: bool
    m_major_a: bool
    n_major_b: bool
    sign: float
    saturate: bool = False

    @property
    def k(self) -> int:
        """Elements along k, which fill 32 bytes."""
        return 256 // ELEMENT_BITS[self.kind_a]


class Sums(NamedTuple):
    """D of some warpgroups before it is written to registers. ``block``: its elements, shape (warpgroups, 64, n),
    float16, float32 or int32. ``starts``: the warpgroups' first lanes."""

    starts: tuple[int, ...]
    block: Array

    def spread(self, registers: Array) -> None:
        """Write D into accumulator registers (registers, lanes). Layout (PTX ISA): rows are 16 * warp + 8 * half + lane
        / 4, columns 8 * i + lane % 4 * 2 + j, and two float16 share a register."""
        count, n = len(self.starts), self.block.shape[2]
        # The axes are warpgroup, warp, half, lane / 4, i, lane % 4 and j. Registers are numbered by i and half, and
        # those of 32-bit elements then by j.
        cells = self.block.reshape(count, 4, 2, 8, n // 8, 4, 2)
        if self.block.dtype == np.float16:
            ordered = np.ascontiguousarray(cells.transpose(0, 4, 2, 1, 3, 5, 6)).view(np.uint32)
        else:
            ordered = np.ascontiguousarray(cells.transpose(0, 4, 2, 6, 1, 3, 5)).view(np.uint32)
        for start, part in zip(self.starts, ordered.reshape(count, -1, 128), strict=True):
            registers[:, start : start + 128] = part


def add_accumulators(form: WgmmaForm, product: Array, before: Array | None, keep: list[bool]) -> Array:
    """The new D from products (warpgroups, 64, n). ``before``, the old D, is added for warpgroups with ``keep``. The
    array ``product`` may be overwritten."""
    if before is not None:
        wide = f16_to_f32(before.view(np.uint16)) if form.acc == "f16" else before
        if all(keep):
            np.add(wide, product, out=product)
        else:
            product[keep] = wide[keep] + product[keep]
    if form.acc == "f32":
        return product
    return product.astype(np.float16) if form.acc == "f16" else rounded(product, "s32", form.saturate)


class Tile:
    """The registers of one operand of a wgmma.

    ``group``: per warpgroup, the number of the last wgmma group that uses them. ``lent``: they are A operands, which
    other instructions may read, but not write, until that group is complete. ``base``, shape (registers, lanes), has
    their content, except for warpgroups in ``sums``, whose content is there.
    """

    __slots__ = ("_registers", "base", "group", "lent", "sums")

    def __init__(self, base: Array, group: Array, lent: bool = False, sums: Sums | None = None) -> None:
        self.base, self.group, self.lent, self.sums = base, group, lent, sums
        self._registers: Array | None = base if sums is None else None

    @property
    def registers(self) -> Array:
        """Raw bits, shape (registers, lanes); do not change them."""
        # Sums are written to registers only when these are used: usually they go from one wgmma to the next, and other
        # instructions read them once, at the end.
        if self._registers is None:
            assert self.sums is not None
            self._registers = self.base.copy()
            self.sums.spread(self._registers)
        return self._registers

    def block_of(self, starts: tuple[int, ...], form: WgmmaForm) -> Array:
        """D of the warpgroups that begin at these lanes, in the form of ``Sums.block``."""
        # The usual case in a main loop: the last wgmma had the same shape, so its sums are returned unchanged.
        if self.sums is not None and self.sums.starts == starts and self.sums.block.shape[2] == form.n:
            return self.sums.block
        # The inverse of ``Sums.spread``: the same axes in the opposite order.
        kind = {"f16": np.float16, "f32": np.float32, "s32": np.int32}[form.acc]
        registers = np.stack([self.registers[:, start : start + 128] for start in starts])
        count = len(starts)
        if form.acc == "f16":
            cells = registers.view(kind).reshape(count, form.n // 8, 2, 4, 8, 4, 2).transpose(0, 3, 2, 4, 1, 5, 6)
        else:
            cells = registers.view(kind).reshape(count, form.n // 8, 2, 2, 4, 8, 4).transpose(0, 4, 2, 5, 1, 6, 3)
        return np.ascontiguousarray(cells).reshape(count, 64, form.n)


class TileRegister:
    """One register of a tile."""

    __slots__ = ("index", "tile")

    def __init__(self, tile: Tile, index: int) -> None:
        self.tile, self.index = tile, index

    def is_same(self, other: TileRegister) -> bool:
        """Are both the same register of the same tile?"""
        return self.tile is other.tile and self.index == other.index

    def get(self) -> Array:
        """Raw bits per lane."""
        out: Array = self.tile.registers[self.index]
        return out


# The content of a register that wgmma or mma may write. None: the register has not been written yet.
Register = Array | TileRegister | Accumulator | None
