"""Finds the operands of wgmma and tcgen05.mma in shared memory: addresses from a descriptor's fields, and values.

The layouts are those of the PTX ISA's "canonical layouts" and swizzling modes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.arithmetic.operands import elements, split_halves
from kernelproof.emulator.memory.shared import WINDOW_START
from kernelproof.emulator.state.arrays import Array


class Strides(NamedTuple):
    """The fields of a descriptor, in bytes: its start ``address``, the ``leading`` and the ``stride`` offset, and the
    ``span`` of a row of the swizzle pattern (16: no swizzle). ``base``: the row of 128 bytes, modulo 8, at which the
    pattern begins."""

    address: int
    leading: int
    stride: int
    base: int
    span: int


class Pattern(NamedTuple):
    """The places of an operand's 16-byte elements in a CTA's shared memory: their byte ``offsets``, their indices
    ``chunks`` (offsets / 16), and the bytes [low, high) that contain all of them."""

    offsets: Array
    chunks: Array
    low: int
    high: int


@lru_cache(maxsize=4096)
def pattern(strides: Strides, rows: int, rows_contiguous: bool) -> Pattern:
    """The 16-byte elements of an operand with ``rows`` rows and 32 bytes along k, in the order that ``numbers``
    expects. ``rows_contiguous``: the operand is M- or N-major, so rows are contiguous, not k (16-bit elements only)."""
    address, leading, stride, base, span = strides
    chunks_per_row = span // 16
    # A block has 8 lines of 16 bytes or, with a swizzle, of ``span`` bytes. A line runs along k, or along the rows if
    # these are contiguous. ``leading`` and ``stride`` are the distances from block to block in the two directions.
    if rows_contiguous:
        # M- or N-major: a 16-byte element holds 8 rows of one k.
        k, chunk = np.arange(16)[:, None], np.arange(rows // 8)[None, :]
        if chunks_per_row == 1:
            linear = chunk * stride + k % 8 * 16 + k // 8 * leading
        else:
            linear = chunk % chunks_per_row * 16 + chunk // chunks_per_row * leading + k % 8 * span + k // 8 * stride
    else:
        # K-major: a 16-byte element holds half of the 32 bytes along k of one row.
        r, chunk = np.arange(rows)[:, None], np.arange(2)[None, :]
        if chunks_per_row == 1:
            linear = r % 8 * 16 + r // 8 * stride + chunk * leading
        else:
            linear = r % 8 * span + r // 8 * stride + chunk * 16
    linear = linear.reshape(-1) + address
    # The swizzle: bits 4 to 6 of the address are xored with bits 7 to 9 less ``base``. A row of fewer 16-byte elements
    # than 8 uses fewer of these bits, log2(chunks_per_row).
    linear ^= (((linear >> 7) - base) & (chunks_per_row - 1)) << 4
    offsets = linear - WINDOW_START
    return Pattern(offsets, offsets >> 4, int(offsets.min()), int(offsets.max()) + 16)


def numbers(raw: Array, kind: str, rows: int, rows_contiguous: bool, transposed: bool) -> Array:
    """The numbers in 16-byte elements. ``raw`` has the shape (operands, elements of a pattern), the result (operands,
    rows, k), or (operands, k, rows) with ``transposed``. ``kind``: the PTX type. ``rows``, ``rows_contiguous``: see
    ``pattern``."""
    count = len(raw)
    if rows_contiguous:
        # The elements have 16 bits: for each of 16 values of k there are the elements along m or n.
        values = elements(raw.view(np.uint8), kind).reshape(count, 16, rows)
    elif transposed and kind in ("f16", "bf16"):
        words = np.ascontiguousarray(raw.view(np.uint32).reshape(count, rows, 8).transpose(0, 2, 1))
        values = split_halves(words, kind).reshape(count, 16, rows)
    else:
        values = elements(raw.view(np.uint8), kind).reshape(count, rows, -1).transpose(0, 2, 1)
    return values if transposed else values.transpose(0, 2, 1)
