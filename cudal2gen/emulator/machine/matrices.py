"""mma.sync, movmatrix and wmma of a batch."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from cudal2gen.emulator.machine.tensor import Accumulator, Fragment, Registers, Shape, TensorUnit
from cudal2gen.emulator.memory.device import DeviceMemory
from cudal2gen.emulator.memory.local import GenericMemory
from cudal2gen.emulator.memory.shared import SharedMemory
from cudal2gen.emulator.state.arrays import MOVER, Array, Mask
from cudal2gen.emulator.state.batch import BatchState


class WmmaTile(NamedTuple):
    """What wmma.load and wmma.store move: ``part`` a, b, c or d of a product of ``size`` (m16n16k16, ...), its
    ``layout`` (row, col), type (f16, f32) and state space."""

    part: str
    layout: str
    size: str
    space: str
    kind: str


class WmmaForm(NamedTuple):
    """A kind of wmma.mma: size, layouts of A and B, types of D and C."""

    size: str
    layout_a: str
    layout_b: str
    acc: str
    add: str


class MatrixInstructions:
    """Registers are uint32 arrays, one element per lane."""

    def __init__(self, batch: BatchState, shared: SharedMemory, memory: DeviceMemory, generic: GenericMemory) -> None:
        self.batch, self.size, self.lane = batch, batch.size, batch.lane
        self.spaces: dict[str, SharedMemory | DeviceMemory | GenericMemory] = {
            "shared": shared,
            "global": memory,
            "generic": generic,
        }
        self.unit = TensorUnit(batch.size)

    def mma(self, shape: Shape, a: Registers, b: Registers, c: Registers, m: Mask, site: int) -> list[Accumulator]:
        """mma.sync: D = A * B + C."""
        self.batch.require_whole_warps(m, site)
        return self.unit.mma(shape, a, b, c)

    def movmatrix(self, value: Array) -> Array:
        """movmatrix.trans of one 8x8 matrix of 16-bit elements."""
        cells = value.view(np.uint16).reshape(-1, 8, 8).transpose(0, 2, 1)
        return np.ascontiguousarray(cells).view(np.uint32).reshape(-1)

    # --- wmma ---

    def _places(self, tile: WmmaTile, address: Array, stride: Array | None) -> tuple[list[Array], int]:
        """Addresses of the chunks that each lane moves, and the bytes of a chunk. Element e of lane l of a fragment is
        element l * n + e of the matrix, row by row for the accumulator, along the memory layout for A and B."""
        m, n, k = _extents(tile.size)
        rows, columns = {"a": (m, k), "b": (k, n)}.get(tile.part, (m, n))
        length = rows if tile.part in "ab" and tile.layout == "col" else columns
        count = rows * columns // 32
        item = 2 if tile.kind == "f16" else 4
        contiguous = tile.part in "ab" or tile.layout == "row"
        step = stride.astype(np.int64) if stride is not None else np.int64(length if contiguous else rows)
        chunk = min(count, 16 // item, length) if contiguous else 1
        base = address.astype(np.int64)
        out = []
        for at in range(0, count, chunk):
            element = self.lane.astype(np.int64) * count + at
            line, inside = element // length, element % length
            offset = line * step + inside if contiguous else inside * step + line
            out.append((base + offset * item).astype(address.dtype))
        return out, chunk * item

    def wmma_load(
        self, tile: WmmaTile, address: Array, stride: Array | None, registers: int, m: Mask, site: int
    ) -> list[Array]:
        """wmma.load: fragment registers (the layout of a fragment is the machine's own)."""
        self.batch.require_whole_warps(m, site)
        places, width = self._places(tile, address, stride)
        space = self.spaces[tile.space]
        chunks = [np.ascontiguousarray(space.load(place, width, m, site)) for place in places]
        raw = [chunk.view(np.uint8).reshape(self.size, width) for chunk in chunks]
        words = np.ascontiguousarray(np.concatenate(raw, axis=1)).view(np.uint32)
        # The real fragment may have more registers than elements need: the rest repeats.
        return [np.ascontiguousarray(words[:, i % words.shape[1]]) for i in range(registers)]

    def wmma_store(
        self, tile: WmmaTile, address: Array, stride: Array | None, values: Fragment, m: Mask, site: int
    ) -> None:
        """wmma.store of an accumulator."""
        self.batch.require_whole_warps(m, site)
        places, width = self._places(tile, address, stride)
        raw = np.ascontiguousarray(np.stack(values, axis=1)).view(np.uint8)
        for i, place in enumerate(places):
            chunk = np.ascontiguousarray(raw[:, i * width : (i + 1) * width]).reshape(-1).view(MOVER[width])
            self.spaces[tile.space].store(place, chunk, width, m, site)

    def wmma(self, form: WmmaForm, a: Fragment, b: Fragment, c: Fragment, m: Mask, site: int) -> list[Array]:
        """wmma.mma: D = A * B + C, rounded as mma.sync is."""
        self.batch.require_whole_warps(m, site)
        rows, columns, depth = _extents(form.size)
        left = self._matrix(a, rows, depth, "f16", form.layout_a == "col")
        right = self._matrix(b, depth, columns, "f16", form.layout_b == "col")
        out = left @ right + self._matrix(c, rows, columns, form.add, False)
        rounded = out.astype(np.float16 if form.acc == "f16" else np.float32)
        cells = np.ascontiguousarray(rounded).reshape(self.size, -1).view(np.uint32)
        return [np.ascontiguousarray(cells[:, i]) for i in range(cells.shape[1])]

    def _matrix(self, registers: Fragment, rows: int, columns: int, kind: str, transposed: bool) -> Array:
        """A fragment as (warps, rows, columns) in fp32."""
        count = rows * columns // 32 * (2 if kind == "f16" else 4) // 4
        words = np.ascontiguousarray(np.stack(registers[:count], axis=1))
        values: Array = words.view(np.float16 if kind == "f16" else np.float32).astype(np.float32)
        warps = self.size // 32
        if transposed:
            return values.reshape(warps, columns, rows).transpose(0, 2, 1)
        return values.reshape(warps, rows, columns)


def _extents(size: str) -> tuple[int, int, int]:
    """m16n16k16 -> (16, 16, 16)."""
    m, n, k = (int(x) for x in re.findall(r"\d+", size))
    return m, n, k
