"""Encodes and decodes tensor maps, refuses those that cuTensorMapEncodeTiled refuses, and finds boxes in memory.

A tensor map has 128 bytes, whose real encoding is not published. The emulator uses its own layout, which begins with
``MAGIC``.
"""

from __future__ import annotations

import struct
from itertools import chain
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.memory.arena import Memory
from kernelproof.emulator.memory.shared import WINDOW_START
from kernelproof.emulator.state.arrays import Array

MAGIC = b"TILEDMAP"
MAP_BYTES = 128
_LAYOUT = struct.Struct("<8s2iQ5Q5Q5H5H4B")
# The fields that tensormap.replace names: offset, format, and the distance from one dimension to the next.
FIELDS = {
    "elemtype": (8, "<i", 0), "rank": (12, "<i", 0), "global_address": (16, "<Q", 0), "global_dim": (24, "<Q", 8),
    "global_stride": (64, "<Q", 8), "box_dim": (104, "<H", 2), "element_stride": (114, "<H", 2),
    "interleave_layout": (124, "<B", 0), "swizzle_mode": (125, "<B", 0), "fill_mode": (127, "<B", 0),
}  # fmt: skip
# tensormap.replace's number of an element type -> CUtensorMapDataType, where they differ.
DEVICE_TYPES = {8: 10, 9: 8, 10: 9}
# CUtensorMapDataType -> bytes.
ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 4, 11: 4, 12: 4}
# CUtensorMapSwizzle -> bytes of a row of the pattern.
SWIZZLE_SPAN = {0: 16, 1: 32, 2: 64, 3: 128}


class TensorMap(NamedTuple):
    """The arguments of cuTensorMapEncodeTiled; dimension 0 is the innermost. ``dims``, ``box``: extents of the tensor
    and of a box in elements. ``strides``: bytes, of dimensions 1 and up. ``steps``: the element strides. The driver's
    enumerations number ``dtype``, ``interleave``, ``swizzle``, ``promotion`` and ``fill``."""

    dtype: int
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    interleave: int
    swizzle: int
    promotion: int
    fill: int

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of a box in shared memory."""
        out = self.element_bytes
        for extent in self.box:
            out *= extent
        return out

    def encode(self) -> bytes:
        """The map's ``MAP_BYTES`` bytes."""
        padded = ((*values, 0, 0, 0, 0, 0)[:5] for values in (self.dims, self.strides, self.box, self.steps))
        raw = _LAYOUT.pack(
            MAGIC, self.dtype, len(self.dims), self.address, *chain.from_iterable(padded), self.interleave,
            self.swizzle, self.promotion, self.fill,
        )  # fmt: skip
        return raw.ljust(MAP_BYTES, b"\0")


def decode(raw: bytes) -> TensorMap | None:
    """The map that 128 bytes encode; None if they do not begin with ``MAGIC``."""
    if raw[:8] != MAGIC:
        return None
    _, dtype, rank, address, *lists = _LAYOUT.unpack(raw[: _LAYOUT.size])
    dims, strides, box, steps = (tuple(lists[i : i + 5]) for i in (0, 5, 10, 15))
    return TensorMap(dtype, address, dims[:rank], strides[: rank - 1], box[:rank], steps[:rank], *lists[20:])


def refusal_of(map_: TensorMap) -> str:
    """The reason for which the driver would not encode this map; "" if it would."""
    # CUtensorMapInterleave is 0 for none, 1 for 16 bytes and 2 for 32 bytes. ``fill``: 0 for zeros, 1 for NaN.
    rank = len(map_.dims)
    if not 1 <= rank <= 5:
        return f"rank {rank}, allowed are 1 to 5"
    if map_.dtype not in ELEMENT_BYTES:
        return f"data type {map_.dtype} is unknown"
    if map_.swizzle not in SWIZZLE_SPAN or map_.interleave not in (0, 1, 2) or map_.fill not in (0, 1):
        return "interleave, swizzle or fill out of range"
    align = 32 if map_.interleave == 2 else 16
    if map_.address % align or not map_.address:
        return f"address {map_.address:#x} is no multiple of {align}"
    for i, extent in enumerate(map_.dims):
        if not 1 <= extent <= 1 << 32:
            return f"extent {extent} of dimension {i}, allowed are 1 to 2^32"
    for i, stride in enumerate(map_.strides):
        if stride % align or stride >= 1 << 40:
            return f"stride of {stride} bytes of dimension {i + 1}: a multiple of {align} below 2^40 is needed"
    for i, extent in enumerate(map_.box):
        if not 1 <= extent <= 256:
            return f"box extent {extent} of dimension {i}, allowed are 1 to 256"
    for i, step in enumerate(map_.steps):
        if not 1 <= step <= 8:
            return f"element stride {step} of dimension {i}, allowed are 1 to 8"
    inner = map_.box[0] * map_.element_bytes
    if map_.interleave == 0 and inner % 16:
        return f"the box's inner dimension has {inner} bytes, no multiple of 16"
    if map_.swizzle and inner > SWIZZLE_SPAN[map_.swizzle]:
        return f"the box's inner dimension has {inner} bytes, the swizzle spans {SWIZZLE_SPAN[map_.swizzle]}"
    if map_.interleave == 2 and map_.swizzle != 1:
        return "interleave 32B needs swizzle 32B"
    return ""


def swizzled(offset: int, nbytes: int, span: int) -> Array:
    """The offsets in shared memory at which the 16-byte elements of a box lie, in the order of the box.

    ``offset``: where the box begins in shared memory. ``nbytes``: its size. ``span``: the bytes of the swizzle's span.

    A swizzle with a span of 128 bytes replaces bits 4 to 6 of the address by their xor with bits 7 to 9. Shorter spans
    do so with fewer bits: a span of 64 bytes with two, of 32 with one, of 16 with none. The bits are those of the
    address in shared memory, not of the offset in the box.
    """
    linear = offset + WINDOW_START + np.arange(0, nbytes, 16)
    linear ^= ((linear >> 7) & (span // 16 - 1)) << 4
    return linear - WINDOW_START


class Box(NamedTuple):
    """The place of a box in global memory. ``rows``: the arena offset of every row, -1 for rows outside of the tensor.
    ``inner``: the bytes of a row, of which [low, high) lie inside of the tensor."""

    rows: Array
    inner: int
    low: int
    high: int


def place(map_: TensorMap, coordinates: list[int], memory: Memory) -> Box:
    """The place of the box at these coordinates. In its rows, the outermost dimension varies slowest."""
    # Each iteration adds one dimension, beginning with the outermost: every row so far becomes ``box[d]`` rows. A row
    # is valid if its coordinate is inside of the tensor in each of these dimensions.
    rows: Array = np.full(1, map_.address - memory.base, np.int64)
    valid: Array = np.ones(1, bool)
    for d in range(len(map_.dims) - 1, 0, -1):
        index = coordinates[d] + np.arange(map_.box[d]) * map_.steps[d]
        rows = (rows[:, None] + index * map_.strides[d - 1]).reshape(-1)
        valid = (valid[:, None] & (index >= 0) & (index < map_.dims[d])).reshape(-1)
    first, inner = coordinates[0] * map_.element_bytes, map_.box[0] * map_.element_bytes
    # The part of a row that lies inside of the tensor: negative coordinates cut its beginning, large ones its end.
    low = min(max(0, -first), inner)
    high = max(low, min(inner, map_.dims[0] * map_.element_bytes - first))
    return Box(np.where(valid, rows + first, -1), inner, low, high)


def place_inside(map_: TensorMap, coordinates: list[int], memory: Memory) -> tuple[int, int, int] | None:
    """The place of a box that is a plain rectangle of bytes, which is faster to find and to use than a ``Box``.

    Returns the arena offset of its first byte, the bytes from one row to the next, and the bytes from its first byte to
    its end. None unless the box has two dimensions, lies inside of its tensor, and consists of aligned 16-byte
    elements.
    """
    if len(map_.dims) != 2 or not all(
        first >= 0 and first + extent <= size
        for first, extent, size in zip(coordinates, map_.box, map_.dims, strict=True)
    ):
        return None
    (column, line), stride = coordinates, map_.strides[0]
    first, inner = (
        map_.address - memory.base + line * stride + column * map_.element_bytes,
        map_.box[0] * map_.element_bytes,
    )
    if (first | inner | stride) & 15:
        return None
    return first, stride, (map_.box[1] - 1) * stride + inner
