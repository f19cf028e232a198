"""Computes PTX's operations on floats on NumPy arrays: rounding, fused multiply-add, bfloat16, halves, comparisons.

Arrays have the shape (lanes,). Several functions compute in float64 and round the result to fewer bits. If the float64
number is itself rounded, two roundings could give another result than one. Rounding *to odd* in float64 prevents this:
an inexact number is rounded to the neighbour whose last bit is one, which is never halfway between two narrower
numbers.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kernelproof.emulator.arithmetic.directed_rounding import libm
from kernelproof.emulator.arithmetic.types import U
from kernelproof.emulator.state.arrays import Array

# The bits of the NaN that min, max, .relu and conversions give.
_CANONICAL_NAN: dict[Any, int] = {np.float16: 0x7FFF, np.float32: 0x7FFFFFFF, np.float64: 0x7FFFFFFFFFFFFFFF}


def bf16_to_f32(raw: Array) -> Array:
    """Raw bfloat16 -> float32."""
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: Array, mode: str = "rn") -> Array:
    """float32 -> raw bfloat16, with rounding rn, rz, rm or rp; NaN becomes 0x7FFF."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    if mode == "rn":
        # Round half to even: add 0x7FFF, and one more if the last kept bit is odd.
        out = (bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)
    else:
        out = bits >> np.uint32(16)
        inexact = (bits & np.uint32(0xFFFF)) != 0
        negative = (bits >> np.uint32(31)) != 0
        up = inexact & (~negative if mode == "rp" else negative if mode == "rm" else np.zeros(len(bits), bool))
        out = out + up.astype(np.uint32)
    return np.where(np.isnan(x), np.uint32(0x7FFF), out).astype(np.uint16)


def f64_to_bf16(x: Array) -> Array:
    """float64 -> raw bfloat16, rounded once: the float32 in between is rounded to odd."""
    return f32_to_bf16(round_odd_f32(x))


def round_odd_f32(x: Array) -> Array:
    """float64 -> float32, rounded to odd: an inexact number becomes the neighbour whose last bit is one. Rounding the
    result again to fewer bits then gives the same as rounding once."""
    y = x.astype(np.float32)
    exact = y.astype(np.float64)
    inexact = (exact != x) & np.isfinite(x) & np.isfinite(y)
    # Of an inexact number's two neighbours, take the one toward zero and set its last bit: if that bit was 0, the
    # result is the other neighbour.
    truncated = np.where(np.abs(exact) > np.abs(x), np.nextafter(y, np.float32(0)), y)
    bits = truncated.view(np.uint32)
    return np.where(inexact, bits | np.uint32(1), y.view(np.uint32)).astype(np.uint32).view(np.float32)


def round_directed(x: Array, dtype: Any, mode: str) -> Array:
    """Round float64 (or longdouble) values to a narrower float with mode rn, rz, rm or rp (rna and "" count as rn)."""
    y = x.astype(dtype)
    if mode in ("rn", "rna", ""):
        return np.asarray(y)
    back = y.astype(x.dtype)
    info = np.finfo(dtype)
    # A finite number that has been rounded to infinity is replaced by the largest finite one, so that the comparisons
    # below step to the right neighbour.
    y = np.where(np.isinf(y) & np.isfinite(x), np.copysign(dtype(info.max), y), y).astype(dtype)
    over = np.isinf(back) & np.isfinite(x)
    back = np.where(over, y.astype(x.dtype), back)
    zero, inf = dtype(0), dtype(np.inf)
    if mode == "rz":
        out = np.where(np.abs(back) > np.abs(x), np.nextafter(y, zero), y)
    elif mode == "rm":
        out = np.where(back > x, np.nextafter(y, -inf), y)
    else:
        out = np.where(back < x, np.nextafter(y, inf), y)
    return np.asarray(out.astype(dtype))


def flush(x: Array) -> Array:
    """.ftz: subnormal numbers -> zero of the same sign."""
    bits = x.view(U[8 * x.dtype.itemsize])
    sign, normal = _SIGN_AND_NORMAL[x.dtype.itemsize]
    # Shifting removes the sign, and subtracting 1 makes zero the largest number, so one comparison finds subnormals.
    subnormal = (bits << 1) - 1 < 2 * normal - 1
    if not subnormal.any():
        return x
    return np.asarray(np.where(subnormal, bits & sign, bits).astype(bits.dtype).view(x.dtype))


# By the bytes of a float: its sign bit, and the bits of its least normal number.
_SIGN_AND_NORMAL = {2: (1 << 15, 1 << 10), 4: (1 << 31, 1 << 23), 8: (1 << 63, 1 << 52)}


def flush_bf16(x: Array) -> Array:
    """.ftz of bfloat16 held in float64."""
    return np.where(np.abs(x) < 2.0**-126, np.copysign(0.0, x), x)


def saturate(x: Array) -> Array:
    """.sat for floats: clamp to [0, 1], NaN -> 0."""
    out = np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0)).astype(x.dtype)
    return np.asarray(out)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """Fused multiply-add of float32, rounded once.

    The product is exact in float64. Rounding the float64 sum to float32 is wrong only if that sum is inexact and lies
    halfway between two float32: its 29 lower bits are then a one and 28 zeros. Subnormal results have fewer bits, so
    all of them take the slow path.
    """
    p = a.astype(np.float64) * b.astype(np.float64)
    cc = c.astype(np.float64)
    s = p + cc
    out = s.astype(np.float32)
    bits = s.view(np.uint64)
    halfway = (bits & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    # Results with the exponent of a float32 subnormal, except zero: shifting removes the sign, and subtracting 1 makes
    # zero the largest number. 0x381 << 52 is the float64 of 2**-126, the least normal float32.
    halfway |= (bits << np.uint64(1)) - np.uint64(1) < np.uint64(2 * (0x381 << 52) - 1)
    if halfway.any():
        halfway &= _error(p, cc, s) != 0
    if halfway.any():
        out[halfway] = _round_odd_sum(p[halfway], cc[halfway], s[halfway]).astype(np.float32)
    return np.asarray(out)


def fma32_widened(a: Array, b: Array, c: Array) -> Array:
    """Fused multiply-add of float32 for use in ``toward``: the product is exact in float64, and both roundings are in
    the same direction."""
    return np.asarray((a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32))


def _error(p: Array, c: Array, s: Array) -> Array:
    """The exact error of ``s``, the rounded sum of p and c, which is p + c - s (Knuth's two-sum)."""
    t = s - p
    return np.asarray((p - (s - t)) + (c - t))


def _round_odd_sum(p: Array, c: Array, s: Array) -> Array:
    """p + c rounded to odd. ``s`` is their sum rounded to nearest. If it is inexact and its last bit is 0, it is
    replaced by its neighbour on the side of the exact sum."""
    error, bits = _error(p, c, s), s.view(np.int64)
    fix = (error != 0) & ((bits & 1) == 0) & np.isfinite(s)
    if not fix.any():
        return s
    # Floats are sign and magnitude, so adding 1 to the bits leads to the neighbour away from zero, for either sign.
    away = (error > 0) == (s > 0)
    return np.where(fix, np.where(away, bits + 1, bits - 1), bits).view(np.float64)


@cache
def _c_fma() -> Any:
    """The function fma of the C library."""
    function = libm().fma
    function.restype = ctypes.c_double
    function.argtypes = [ctypes.c_double] * 3
    return function


def fma64(a: Array, b: Array, c: Array) -> Array:
    """Fused multiply-add of float64 through the C library."""
    fma = _c_fma()
    a, b, c = np.broadcast_arrays(a, b, c)
    out = [fma(float(x), float(y), float(z)) for x, y, z in zip(a, b, c, strict=True)]
    return np.array(out, np.float64)


def fma16(a: Array, b: Array, c: Array) -> Array:
    """Fused multiply-add of float16, computed in float64 and rounded to float16."""
    # The float64 sum is inexact only if the result is c or infinite, so rounding it again does no harm.
    return np.asarray((a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float16))


def fma_bf16(a: Array, b: Array, c: Array) -> Array:
    """Fused multiply-add of bfloat16 in float64: the product is exact, and the sum is rounded to odd."""
    p = a * b
    return _round_odd_sum(p, c, p + c)


def fmin(a: Array, b: Array, nan: bool, larger: bool) -> Array:
    """min, or max (``larger``). -0 is less than +0. The result is NaN if both operands are NaN. If one of them is NaN,
    the result is NaN with ``nan``, else the other operand."""
    pick_a = (a > b) if larger else (a < b)
    tie = (a == b) & (np.signbit(a) != np.signbit(b))
    pick_a = np.where(tie, np.signbit(a) != larger, pick_a)
    out = np.where(pick_a, a, b)
    if not (has_nan(a) or has_nan(b)):
        return out
    na, nb = np.isnan(a), np.isnan(b)
    if not nan:
        out = np.where(na, b, np.where(nb, a, out))
    return with_canonical_nan(out, na | nb if nan else na & nb)


def has_nan(x: Array) -> bool:
    """Is one of the numbers NaN?"""
    # The sum of squares is NaN exactly if a number is, and BLAS computes it fast, except for float16.
    if x.dtype == np.float16:
        return bool(np.isnan(x).any())
    return math.isnan(np.dot(x, x))


def with_canonical_nan(x: Array, nan: Array) -> Array:
    """The numbers, with the canonical NaN at elements where ``nan`` is true."""
    unsigned = U[8 * x.dtype.itemsize]
    bits = np.where(nan, unsigned(_CANONICAL_NAN[x.dtype.type]), x.view(unsigned)).astype(unsigned)
    return np.asarray(bits.view(x.dtype))


def fmin_signed(a: Array, b: Array, nan: bool, larger: bool) -> Array:
    """min or max with .xorsign.abs: the magnitude is that of ``fmin`` of the magnitudes, the sign is the exclusive or
    of the signs. NaN has no sign."""
    out = fmin(np.abs(a), np.abs(b), nan, larger)
    return np.where((np.signbit(a) != np.signbit(b)) & ~np.isnan(out), -out, out)


def relu(x: Array) -> Array:
    """.relu: negative numbers and -0 become +0, NaN becomes the canonical one."""
    return with_canonical_nan(np.where(x <= 0, x.dtype.type(0), x), np.isnan(x))


def elementary(name: str, x: Array) -> Array:
    """The function ``name`` of PTX, such as ex2 or rsqrt, computed in float64 and rounded to the type of ``x``."""
    wide = x.astype(np.float64)
    if name == "ex2":
        out = np.exp2(wide)
    elif name == "lg2":
        out = np.log2(wide)
    elif name == "rcp":
        out = 1.0 / wide
    elif name == "sqrt":
        out = np.sqrt(wide)
    elif name == "rsqrt":
        out = 1.0 / np.sqrt(wide)
    elif name == "sin":
        out = np.sin(wide)
    elif name == "cos":
        out = np.cos(wide)
    else:
        out = np.tanh(wide)
    return np.asarray(out.astype(x.dtype))


def approximate64(name: str, x: Array) -> Array:
    """rcp.approx.ftz.f64 and rsqrt.approx.ftz.f64: the lower words of operand and result are treated as zero."""

    def upper(y: Array) -> Array:
        return flush((y.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64))

    out = upper(elementary(name, upper(x)))
    return np.where(np.isnan(x), np.float64(np.nan), out)


def divide_approximately(a: Array, b: Array) -> Array:
    """div.approx.f32: a / b rounded once. For finite divisors beyond 2**126 in magnitude, the result is a times zero
    with the sign of b."""
    # By the PTX ISA, the result is zero for these divisors, or NaN if a is infinite.
    tiny = (np.abs(b) > np.float32(2.0**126)) & np.isfinite(b)
    out = a / b
    return np.where(tiny, a * np.copysign(np.float32(0), b), out) if tiny.any() else out


def test_float(test: str, x: Array) -> Array:
    """testp: is each number of the class ``test`` (finite, infinite, number, notanumber, normal or subnormal)?"""
    if test == "finite":
        return np.asarray(np.isfinite(x))
    if test == "infinite":
        return np.asarray(np.isinf(x))
    if test == "number":
        return np.asarray(~np.isnan(x))
    if test == "notanumber":
        return np.asarray(np.isnan(x))
    tiny = np.finfo(x.dtype).tiny
    subnormal = (np.abs(x) < tiny) & (x != 0)
    if test == "subnormal":
        return np.asarray(subnormal)
    # Zeros count as normal.
    return np.asarray(np.isfinite(x) & ~subnormal)


# The comparisons of setp. Those from eq to ge are ordered: false for NaN. Those from equ to geu are unordered: true for
# NaN.
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "equ": lambda a, b: (a == b) | np.isnan(a) | np.isnan(b),
    "neu": lambda a, b: a != b,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~np.isnan(a) & ~np.isnan(b),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}


def packed_test(kind: str, test: str, a: Array, b: Array, ftz: bool) -> Array:
    """Compare the halves of f16x2 or bf16x2 words (raw uint32). The result has the shape (2 * lanes,); the lower half
    of each word comes first."""
    halves = [np.ascontiguousarray(x).view(np.uint16) for x in (a, b)]
    numbers = [x.view(np.float16) if kind == "f16x2" else bf16_to_f32(x) for x in halves]
    return np.asarray(COMPARE[test](*(flush(x) if ftz else x for x in numbers)))


def packed(kind: str, function: Callable[..., Array], *operands: Array) -> Array:
    """Apply a function of float arrays to both halves of f16x2 or bf16x2 words (raw uint32)."""
    halves = [np.ascontiguousarray(x).view(np.uint16) for x in operands]
    return scalar16(kind[:-2], function, *halves).view(np.uint32)


def scalar16(kind: str, function: Callable[..., Array], *operands: Array) -> Array:
    """Apply a function of float arrays to f16 or bf16 (raw uint16): bf16 is computed in float64 and rounded once."""
    if kind == "f16":
        return np.ascontiguousarray(np.asarray(function(*(x.view(np.float16) for x in operands)), np.float16)).view(
            np.uint16
        )
    wide = [bf16_to_f32(x).astype(np.float64) for x in operands]
    return f64_to_bf16(np.asarray(function(*wide), np.float64))
