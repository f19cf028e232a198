"""Defines the arrays that have one element per lane, and the NumPy types by which 1 to 16 bytes are copied."""

from __future__ import annotations

import math
import mmap
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
# Which lanes execute (bool per lane of the batch); None: all.
Mask = Array | None
# An operand at run time: one int that all lanes share, or an array of raw bits, one element per lane.
Scalar = int | Array
# Bytes of an element -> its type. complex128 is NumPy's only fast type of 16 bytes; copies keep its bits.
MOVER: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
}
SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4, 128: 7}  # log2 of the bytes of an access; 128 is the line of discard.L2
# The byte that undefined memory and registers hold. Repeated, it is a negative quiet NaN in fp16, bf16 and fp32, and an
# index that lies outside of every buffer.
POISON = 0xFF
# Smaller arrays are cleared when they are made, larger ones page by page when they are touched.
SPARSE_BYTES = 1 << 20


@cache
def reuse_memory(nbytes: int = 1 << 24) -> None:
    """Make the C library keep freed memory of arrays up to ``nbytes`` for reuse.

    glibc returns arrays of 128 KiB and more to the system and maps new ones page by page, which takes several times as
    long as the computation on them. Its threshold rises to the size of the largest array that was freed. So one array
    of that size, which is freed immediately, is enough.
    """
    np.empty(nbytes, np.uint8)


def sparse_zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
    """An array of zeros of which few elements will be touched. With NumPy's pages of 2 MiB the system would clear all
    of such a page at its first touch, and reused memory would be cleared completely. This array has small pages."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes < SPARSE_BYTES:
        return np.zeros(shape, dtype)
    pages = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(shape)


def runs_of(*keys: Array) -> tuple[Array, Array]:
    """The starts and lengths of runs of neighbouring elements that are equal in every key."""
    begins = np.ones(len(keys[0]), bool)
    begins[1:] = keys[0][1:] != keys[0][:-1]
    for key in keys[1:]:
        begins[1:] |= key[1:] != key[:-1]
    starts = begins.nonzero()[0]
    lengths = np.empty_like(starts)
    lengths[:-1] = starts[1:] - starts[:-1]
    lengths[-1:] = len(begins) - starts[-1:]
    return starts, lengths


def groups_are_equal(values: Array, length: int) -> bool:
    """Whether in each group of ``length`` neighbours, a power of two, all values are equal."""
    # Every step compares neighbours and drops one of each two. NumPy compares long columns faster than short rows.
    while length > 1:
        even = values[::2]
        if (even != values[1::2]).any():
            return False
        values, length = even, length >> 1
    return True


def distinct(values: Array) -> Array:
    """The distinct values of an ascending array."""
    if len(values) < 2:
        return values
    keep = np.empty(len(values), bool)
    keep[0] = True
    np.not_equal(values[1:], values[:-1], out=keep[1:])
    return values[keep]


def equal_bits(a: Array, b: Array) -> Array:
    """Bitwise equality per element (complex128 stands for 16 bytes)."""
    if a.dtype.itemsize == 16:
        x = np.ascontiguousarray(a).view(np.uint64).reshape(-1, 2)
        y = np.ascontiguousarray(b).view(np.uint64).reshape(-1, 2)
        equal: Array = (x == y).all(axis=1)
        return equal
    return np.asarray(a == b)


def bits_of(words: Array) -> Array:
    """32-bit words -> their bits, lowest first, in a new last axis (bool)."""
    raw = np.ascontiguousarray(words, "<u4").view(np.uint8)
    return np.unpackbits(raw, bitorder="little").view(bool).reshape(*words.shape, 32)


def words_of(bits: Array) -> Array:
    """Bits in the last axis (32, lowest first) -> words (uint32)."""
    out: Array = (bits.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=-1).astype(np.uint32)
    return out
