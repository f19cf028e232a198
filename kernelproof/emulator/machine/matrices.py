"""Executes mma.sync, movmatrix and wmma of a batch (PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions").

The PTX ISA specifies how elements lie in the registers of mma.sync. It leaves that open for wmma, so this file chooses
a layout.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.arithmetic.operands import ELEMENT_BITS, elements, rounded
from kernelproof.emulator.arithmetic.tensor_rounding import ROUNDINGS
from kernelproof.emulator.machine.tensor import Accumulator, Fragment, Grid, Registers, Shape, TensorUnit
from kernelproof.emulator.memory.device import DeviceMemory
from kernelproof.emulator.memory.local import GenericMemory
from kernelproof.emulator.memory.shared import SharedMemory
from kernelproof.emulator.state.arrays import MOVER, Array, Mask
from kernelproof.emulator.state.batch_state import BatchState


class WmmaTile(NamedTuple):
    """The tile that a wmma.load or wmma.store moves: ``part`` a, b, c or d of a product of ``size`` (m16n16k16, ...),
    its ``layout`` (row or col), its state space, and the type ``kind`` of its elements (f16, s8, ...)."""

    part: str
    layout: str
    size: str
    space: str
    kind: str


class WmmaForm(NamedTuple):
    """A kind of wmma.mma: its size, the layouts of A and B, and the types of D (``acc``), A, B and C.
    ``saturate``: sums are clamped to finite numbers. ``xor``: for single bits, count those that differ, not those that
    are set in both."""

    size: str
    layout_a: str
    layout_b: str
    acc: str
    kind_a: str
    kind_b: str
    kind_c: str
    saturate: bool
    xor: bool


class DenseForm(NamedTuple):
    """A kind of mma.sync that is evaluated immediately, unlike those of ``TensorUnit``. D has ``rows`` x 8 elements;
    ``k`` is the depth; ``kind_a``, ``kind_b`` and ``acc`` are the types. ``saturate`` and ``xor``: see ``WmmaForm``."""

    rows: int
    k: int
    kind_a: str
    kind_b: str
    acc: str
    saturate: bool
    xor: bool

    @property
    def per_register(self) -> int:
        """Elements in a register of A or B."""
        return 1 if self.kind_a == "f64" else 32 // ELEMENT_BITS[self.kind_a]


class MatrixInstructions:
    """The matrix instructions of a batch. Registers are uint32 arrays, one element per lane."""

    def __init__(self, batch: BatchState, shared: SharedMemory, memory: DeviceMemory, generic: GenericMemory) -> None:
        self.batch, self.size, self.lane = batch, batch.size, batch.lane
        self.spaces: dict[str, SharedMemory | DeviceMemory | GenericMemory] = {
            "shared": shared,
            "global": memory,
            "generic": generic,
        }
        self.unit = TensorUnit(batch.size, ROUNDINGS.get(batch.launch.options.rounding))

    def mma(self, shape: Shape, a: Registers, b: Registers, c: Registers, m: Mask, site: int) -> list[Accumulator]:
        """mma.sync: D = A * B + C."""
        self.batch.require_whole_warps(m, site)
        return self.unit.mma(shape, a, b, c)

    def grid(self, grid: Grid, a: Fragment, b: Fragment, c: Registers, m: Mask) -> tuple[Accumulator, ...]:
        """A grid of mma.sync: each fragment of A with each fragment of B."""
        if m is not None:
            for site in grid.sites:
                self.batch.require_whole_warps(m, site)
        return self.unit.grid(grid, a, b, c)

    def dense(self, form: DenseForm, a: Fragment, b: Fragment, c: Fragment, m: Mask, site: int) -> list[Array]:
        """mma.sync of kinds that ``TensorUnit`` does not support.

        Layout (PTX ISA): A's register (step, half) holds elements of row 8 * half + lane / 4. A step has 4 *
        per_register columns, of which the register holds ``per_register``, from column lane % 4 * per_register on. In
        B, columns take the place of rows.
        """
        self.batch.require_whole_warps(m, site)
        warps, halves, per_register = self.size // 32, form.rows // 8, form.per_register
        steps = form.k // (4 * per_register)
        left = _fragment(a, form.kind_a).reshape(steps, halves, warps, 8, 4, per_register).transpose(2, 1, 3, 0, 4, 5)
        right = _fragment(b, form.kind_b).reshape(steps, warps, 8, 4, per_register).transpose(1, 0, 3, 4, 2)
        left, right = left.reshape(warps, form.rows, form.k), right.reshape(warps, form.k, 8)
        packed = form.acc == "f16"
        cells = _fragment(c, form.acc).reshape(halves, 1 if packed else 2, warps, 8, 4, 2 if packed else 1)
        addend = cells.transpose(2, 0, 3, 4, 1, 5).reshape(warps, form.rows, 8)
        out = rounded(_product(left, right, form.xor) + addend, form.acc, form.saturate)
        by_register = out.reshape(warps, halves, 8, 4, *((1, 2) if packed else (2, 1))).transpose(1, 4, 0, 2, 3, 5)
        word = np.uint64 if form.acc == "f64" else np.uint32
        raw = np.ascontiguousarray(by_register).view(word).reshape(-1, self.size)
        return list(raw)

    def movmatrix(self, value: Array, m: Mask, site: int) -> Array:
        """movmatrix.trans of one 8x8 matrix of 16-bit elements."""
        self.batch.require_whole_warps(m, site)
        cells = value.view(np.uint16).reshape(-1, 8, 8).transpose(0, 2, 1)
        return np.ascontiguousarray(cells).view(np.uint32).reshape(-1)

    # --- wmma ---

    def _places(self, tile: WmmaTile, address: Array, stride: Array | None) -> tuple[list[Array], int]:
        """Addresses of the chunks that each lane moves, and the bytes of a chunk. A lane's fragment has n elements.
        Element e of lane l is element l * n + e of the matrix: counted row by row for an accumulator, and in memory's
        order for A and B."""
        m, n, k = _extents(tile.size)
        # Elements smaller than a byte share bytes along k. From here on, such a byte counts as one element.
        per_byte = max(1, 8 // ELEMENT_BITS[tile.kind])
        k //= per_byte
        rows, columns = {"a": (m, k), "b": (k, n)}.get(tile.part, (m, n))
        # Elements are counted line by line. A line, ``length`` elements, is a row, or a column of A or B in col layout.
        # ``contiguous``: the elements of a line are neighbours in memory. ``step``: from a line (or else from an
        # element of a line) to the next one in memory.
        length = rows if tile.part in "ab" and tile.layout == "col" else columns
        count = rows * columns // 32
        element_bytes = max(8, ELEMENT_BITS[tile.kind]) // 8
        if stride is not None:
            stride = stride // per_byte
        contiguous = tile.part in "ab" or tile.layout == "row"
        step = stride.astype(np.int64) if stride is not None else np.int64(length if contiguous else rows)
        chunk = min(count, 16 // element_bytes, length) if contiguous else 1
        base = address.astype(np.int64)
        out = []
        for first in range(0, count, chunk):
            element = self.lane.astype(np.int64) * count + first
            line, column = element // length, element % length
            offset = line * step + column if contiguous else column * step + line
            out.append((base + offset * element_bytes).astype(address.dtype))
        return out, chunk * element_bytes

    def _require_alignment(
        self, tile: WmmaTile, registers: int, address: Array, stride: Array | None, m: Mask, site: int
    ) -> None:
        """Report addresses and strides that are not aligned. The first element needs multiples of the lane's fragment,
        at most 32 bytes (PTX ISA, "wmma.load"); rows at most 16 bytes (CUDA C++ Programming Guide)."""
        lanes = self.batch.lanes(m)
        first_bytes = min(32, registers * _word(tile.kind)().itemsize)
        row_bytes = min(16, first_bytes)
        bad = (address[lanes] & address.dtype.type(first_bytes - 1)) != 0
        if stride is not None:
            bad |= (stride[lanes].astype(np.int64) * ELEMENT_BITS[tile.kind] & 8 * row_bytes - 1) != 0
        if bad.any():
            text = f"a wmma tile of this type needs multiples of {first_bytes} bytes as its address and of "
            text += f"{row_bytes} as its stride"
            self.batch.report_lanes("matrix-alignment", text, site, lanes[bad])

    def wmma_load(
        self, tile: WmmaTile, address: Array, stride: Array | None, registers: int, m: Mask, site: int
    ) -> list[Array]:
        """wmma.load: the fragment's registers."""
        self.batch.require_whole_warps(m, site)
        self._require_alignment(tile, registers, address, stride, m, site)
        places, width = self._places(tile, address, stride)
        space = self.spaces[tile.space]
        chunks = [np.ascontiguousarray(space.load(place, width, m, site)) for place in places]
        raw = [chunk.view(np.uint8).reshape(self.size, width) for chunk in chunks]
        words = np.ascontiguousarray(np.concatenate(raw, axis=1)).view(_word(tile.kind))
        # A fragment may have more registers than its elements need. The others repeat them.
        return [np.ascontiguousarray(words[:, i % words.shape[1]]) for i in range(registers)]

    def wmma_store(
        self, tile: WmmaTile, address: Array, stride: Array | None, values: Fragment, m: Mask, site: int
    ) -> None:
        """wmma.store of an accumulator."""
        self.batch.require_whole_warps(m, site)
        self._require_alignment(tile, len(values), address, stride, m, site)
        places, width = self._places(tile, address, stride)
        raw = np.ascontiguousarray(np.stack(values, axis=1)).view(np.uint8)
        for i, place in enumerate(places):
            chunk = np.ascontiguousarray(raw[:, i * width : (i + 1) * width]).reshape(-1).view(MOVER[width])
            self.spaces[tile.space].store(place, chunk, width, m, site)

    def wmma(self, form: WmmaForm, a: Fragment, b: Fragment, c: Fragment, m: Mask, site: int) -> list[Array]:
        """wmma.mma: D = A * B + C, rounded as for mma.sync."""
        self.batch.require_whole_warps(m, site)
        rows, columns, depth = _extents(form.size)
        left = self._matrix(a, rows, depth, form.kind_a, form.layout_a == "col")
        right = self._matrix(b, depth, columns, form.kind_b, form.layout_b == "col")
        sums = _product(left, right, form.xor) + self._matrix(c, rows, columns, form.kind_c, False)
        out = rounded(sums, form.acc, form.saturate)
        cells = np.ascontiguousarray(out).reshape(self.size, -1).view(_word(form.acc))
        return [np.ascontiguousarray(cells[:, i]) for i in range(cells.shape[1])]

    def _matrix(self, registers: Fragment, rows: int, columns: int, kind: str, transposed: bool) -> Array:
        """A fragment as numbers, shape (warps, rows, columns)."""
        count = rows * columns // 32 * ELEMENT_BITS[kind] // (8 * _word(kind)().itemsize)
        words = np.ascontiguousarray(np.stack(registers[:count], axis=1))
        values = elements(words.view(np.uint8), kind)
        warps = self.size // 32
        if transposed:
            return values.reshape(warps, columns, rows).transpose(0, 2, 1)
        return values.reshape(warps, rows, columns)


def _word(kind: str) -> type[np.uint32] | type[np.uint64]:
    """The type of a register with elements of this type."""
    return np.uint64 if kind == "f64" else np.uint32


def _fragment(registers: Fragment, kind: str) -> Array:
    """The elements of registers, shape (registers, lanes * elements per register)."""
    return elements(np.stack(registers).view(np.uint8), kind)


def _product(left: Array, right: Array, xor: bool) -> Array:
    """Matrix products. For single bits, the number of bits that are set in both or, with ``xor``, that differ."""
    common = np.matmul(left, right)
    if not xor:
        return np.asarray(common)
    return np.asarray(left.sum(axis=2, keepdims=True) + right.sum(axis=1, keepdims=True) - 2 * common)


def _extents(size: str) -> tuple[int, int, int]:
    """The extents (m, n, k) of a size such as ``m16n16k16``."""
    m, n, k = (int(x) for x in re.findall(r"\d+", size))
    return m, n, k
