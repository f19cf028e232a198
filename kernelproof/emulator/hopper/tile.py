"""Registers of wgmma: accumulators and A operands, the group that uses them, and sums not yet written to registers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernelproof.emulator.arithmetic.operands import ELEMENT_BITS, f16_to_f32, rounded
from kernelproof.emulator.machine.tensor import Accumulator
from kernelproof.emulator.state.arrays import Array


class WgmmaForm(NamedTuple):
    """A kind of wgmma.mma_async: ``n`` columns, types of A and B (of equal width) and of the accumulator.
    ``registers``: A comes from registers, not from shared memory. ``along_a``, ``along_b``: the operand is M- or
    N-major. ``sign``: of A times that of B. ``saturate``: s32 sums are clamped."""

    n: int
    kind_a: str
    kind_b: str
    acc: str
    registers: bool
    along_a: bool
    along_b: bool
    sign: float
    saturate: bool = False

    @property
    def k(self) -> int:
        """Elements along k: 32 bytes."""
        return 256 // ELEMENT_BITS[self.kind_a]


class Sums(NamedTuple):
    """D of some warpgroups, shape (warpgroups, 64, n), float16, float32 or int32. ``starts``: their first lanes."""

    starts: tuple[int, ...]
    block: Array

    def spread(self, registers: Array) -> None:
        """Write D into accumulator registers (registers, lanes). Layout (PTX ISA): rows are 16 * warp + 8 * half + lane
        / 4, columns 8 * i + lane % 4 * 2 + j, and two float16 share a register."""
        count, n = len(self.starts), self.block.shape[2]
        cells = self.block.reshape(count, 4, 2, 8, n // 8, 4, 2)
        if self.block.dtype == np.float16:
            ordered = np.ascontiguousarray(cells.transpose(0, 4, 2, 1, 3, 5, 6)).view(np.uint32)
        else:
            ordered = np.ascontiguousarray(cells.transpose(0, 4, 2, 6, 1, 3, 5)).view(np.uint32)
        for start, part in zip(self.starts, ordered.reshape(count, -1, 128), strict=True):
            registers[:, start : start + 128] = part


def accumulated(form: WgmmaForm, product: Array, before: Array | None, keep: list[bool]) -> Array:
    """D from products (warpgroups, 64, n): D of ``before`` is added for warpgroups in ``keep``. The array ``product``
    may be overwritten."""
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
    """The registers of a wgmma and, per warpgroup, the last group that uses them. Registers of A are only ``lent``:
    they may be read meanwhile. ``sums``, if there are any, hold what the registers of some warpgroups contain, in place
    of the content of ``base`` (registers, lanes)."""

    __slots__ = ("_registers", "base", "group", "lent", "sums")

    def __init__(self, base: Array, group: Array, lent: bool = False, sums: Sums | None = None) -> None:
        self.base, self.group, self.lent, self.sums = base, group, lent, sums
        self._registers: Array | None = base if sums is None else None

    @property
    def registers(self) -> Array:
        """Raw bits, shape (registers, lanes); do not change them."""
        # Written at the first use only: sums usually go from one wgmma to the next and are read once, at the end.
        if self._registers is None:
            assert self.sums is not None
            self._registers = self.base.copy()
            self.sums.spread(self._registers)
        return self._registers

    def gathered(self, starts: tuple[int, ...], form: WgmmaForm) -> Array:
        """D of the warpgroups that begin at these lanes, in the form of ``Sums.block``."""
        # The usual case in a main loop: the last wgmma had the same shape, so its sums are taken as they are.
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
        """Is it the same register of the same tile?"""
        return self.tile is other.tile and self.index == other.index

    def get(self) -> Array:
        """Raw bits per lane."""
        out: Array = self.tile.registers[self.index]
        return out


# What a register may hold that wgmma or mma writes. None: it was not written yet.
Register = Array | TileRegister | Accumulator | None
