"""Emulates add, min and max of u16x2, and the SIMD video instructions (vadd2, vadd4, ..), on the bytes or half-words of
32-bit words.

Words are raw uint32, shape (lanes,). Parts are int64, shape (lanes, parts), the lowest part first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernelproof.emulator.arithmetic.types import S, U
from kernelproof.emulator.state.arrays import Array

_OPERATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    # Averages that end in .5 are rounded away from zero.
    "avrg": lambda a, b: (a + b + (a + b >= 0)) >> 1,
    "absdiff": lambda a, b: np.abs(a - b),
    "min": np.minimum,
    "max": np.maximum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _parts(words: Array, signed: bool, count: int) -> Array:
    """The ``count`` parts of each word, as numbers."""
    bits = 32 // count
    return np.asarray(np.ascontiguousarray(words).view(S[bits] if signed else U[bits]).reshape(-1, count), np.int64)


def _join(parts: Array) -> Array:
    """Join the parts of each word; bits of a number that exceed its part are dropped."""
    count = parts.shape[1]
    words: Array = np.ascontiguousarray(parts.astype(U[32 // count])).view(np.uint32).reshape(-1)
    return words


def pairwise(a: Array, b: Array, operation: str, signed: bool, relu: bool) -> Array:
    """add, min or max of u16x2 or s16x2; ``relu``: negative results become 0."""
    out = _OPERATIONS[operation](_parts(a, signed, 2), _parts(b, signed, 2))
    return _join(np.maximum(out, 0) if relu else out)


def video(
    a: Array, b: Array, c: Array, count: int, operation: str, signs: tuple[bool, bool, bool], sat: bool, add: bool
) -> Array:
    """vadd2, vadd4 and their relatives on ``count`` parts. ``signs``: whether the results, a and b are signed. ``sat``:
    results are clamped to the type of a part. ``add``: the result is one word, c plus the sum of all parts, modulo
    2**32; otherwise the parts are packed into a word."""
    signed, signed_a, signed_b = signs
    out = _OPERATIONS[operation](_parts(a, signed_a, count), _parts(b, signed_b, count)).astype(np.int64)
    if sat:
        bits = 32 // count
        low = -(1 << bits - 1) if signed else 0
        out = np.clip(out, low, low + (1 << bits) - 1)
    if add:
        return np.asarray((out.sum(axis=1) + c.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32))
    return _join(out)
