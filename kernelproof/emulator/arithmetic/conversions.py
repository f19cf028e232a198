"""Converts between integer and float types, as cvt of the PTX ISA does.

Arrays hold raw bits in unsigned types and have the shape (lanes,), unless a function says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np

from kernelproof.emulator.arithmetic.floats import (
    bf16_to_f32,
    f32_to_bf16,
    f64_to_bf16,
    flush,
    has_nan,
    round_directed,
    saturate,
    with_canonical_nan,
)
from kernelproof.emulator.arithmetic.types import F, S, U, type_bits
from kernelproof.emulator.state.arrays import Array

Conversion = Callable[[Array], Array]
# Modifiers that round to an integral value.
_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@cache
def converter(dst: str, src: str, mode: str, ftz: bool, sat: bool) -> Conversion:
    """The function for ``cvt.mode.dst.src``, from raw bits of ``src`` (in its own width) to raw bits of ``dst``. The
    same arguments give the same object."""
    if dst == "f32" and src == "f16" and not sat:
        return _widen_f16
    if dst == "f16" and src == "f32" and mode == "rn" and not sat and not ftz:
        return _narrow_f32
    if dst[0] in "us" and src[0] in "us":
        return lambda raw: _integer_to_integer(_decode(raw, src, ftz), dst, src, sat)
    if dst[0] in "us":
        return lambda raw: _float_to_integer(_decode(raw, src, ftz), dst, mode)
    return lambda raw: _to_float(_decode(raw, src, ftz), dst, src, mode, ftz, sat)


def _decode(raw: Array, src: str, ftz: bool) -> Array:
    """The numbers of type ``src`` that raw bits represent; those of bf16 as float32."""
    x = np.ascontiguousarray(raw)
    if src == "bf16":
        return bf16_to_f32(x)
    if src[0] == "f":
        y: Array = x.view(F[src])
        return flush(y) if ftz and src == "f32" else y
    return x.view(S[type_bits(src)]) if src[0] == "s" else x


def _integer_to_integer(x: Array, dst: str, src: str, sat: bool) -> Array:
    """Truncate integers, or extend them as the source's type demands; with ``sat``, clamp them to the range of
    ``dst``."""
    bits = type_bits(dst)
    if sat:
        low, high = _range(dst)
        return np.array([min(max(int(v), low), high) & ((1 << bits) - 1) for v in x], U[bits])
    out: Array = x.astype(S[bits] if src[0] == "s" else U[bits]).view(U[bits])
    return out


def _float_to_integer(x: Array, dst: str, mode: str) -> Array:
    """Round floats to integers and clamp them to the range of ``dst``. NaN gives 0; but if the source is f64 or ``dst``
    has 64 bits, it gives the number with only the top bit set."""
    bits = type_bits(dst)
    unsigned = U[bits]
    low, high = _range(dst)
    rounded = _INTEGRAL.get(mode, np.trunc)(x.astype(np.float64))
    nan = np.isnan(rounded)
    top, bottom = rounded >= float(high), rounded <= float(low)
    # NumPy's cast of a number that is out of range is undefined, so these become 0 and are set afterwards.
    safe = np.where(nan | top | bottom, 0.0, rounded)
    out = safe.astype(np.uint64 if dst == "u64" else np.int64).astype(unsigned)
    mask = (1 << bits) - 1
    out = np.where(top, unsigned(high & mask), np.where(bottom, unsigned(low & mask), out))
    nan_result = 1 << bits - 1 if bits == 64 or x.dtype == np.float64 else 0
    return np.where(nan, unsigned(nan_result), out).astype(unsigned)


def _to_float(x: Array, dst: str, src: str, mode: str, ftz: bool, sat: bool) -> Array:
    """Convert numbers to the float type ``dst``. This is one rounding in effect, because the wider numbers in between
    are exact or rounded to odd."""
    y = _widen(x, dst, src, mode)
    if sat:
        y = saturate(y)
    rounding = mode if mode in ("rz", "rm", "rp") else "rn"
    if dst == "bf16":
        if rounding == "rn":
            return f64_to_bf16(y)
        return f32_to_bf16(round_directed(y, np.float32, rounding), rounding)
    out = round_directed(y, F[dst], rounding)
    if ftz and dst == "f32":
        out = flush(out)
    out = np.ascontiguousarray(out)
    if dst != "f64" and has_nan(out):
        out = with_canonical_nan(out, np.isnan(out))
    return out.view(U[type_bits(dst)])


# The two most frequent conversions have short versions: f16 to f32, and f32 to f16.
def _widen_f16(raw: Array) -> Array:
    """f16 to f32, as bits."""
    x = np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
    return (with_canonical_nan(x, np.isnan(x)) if has_nan(x) else x).view(np.uint32)


def _narrow_f32(raw: Array) -> Array:
    """f32 to f16, rounded to nearest, as bits."""
    x = raw.view(np.float32)
    out = x.astype(np.float16)
    return (with_canonical_nan(out, np.isnan(x)) if has_nan(x) else out).view(np.uint16)


def _widen(x: Array, dst: str, src: str, mode: str) -> Array:
    """The numbers as float64, rounded to integral values if the mode says so.

    64-bit integers need not fit in a float64. They are rounded to odd, unless ``dst`` is f64. Then they are rounded to
    nearest if that is the mode, and otherwise converted exactly to long doubles.
    """
    if src[0] in "us":
        if type_bits(src) < 64 or (dst == "f64" and mode == "rn"):
            return x.astype(np.float64)
        return x.astype(np.longdouble) if dst == "f64" else _integers_to_odd(x)
    y = x.astype(np.float64)
    return _INTEGRAL[mode](y) if mode in _INTEGRAL else y


def _integers_to_odd(x: Array) -> Array:
    """Convert 64-bit integers to float64, rounded to odd. Integers of more than 53 bits lose their 11 lower bits; if
    any of these is set, the bit above them is set."""
    low, one = x.dtype.type(0x7FF), x.dtype.type(0x800)
    odd = np.where(x & low, (x & ~low) | one, x)
    small = (x < 1 << 53) & (x > -1 << 53) if x.dtype.kind == "i" else x < 1 << 53
    return np.where(small, x, odd).astype(np.float64)


def _range(kind: str) -> tuple[int, int]:
    """The least and the largest number of an integer type."""
    bits = int(kind[1:])
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


# By destination type: the bits of positive infinity, and those of the largest finite number.
_INFINITY = {"f16": 0x7C00, "bf16": 0x7F80, "tf32": 0x7F800000}
_LARGEST = {"f16": 0x7BFF, "bf16": 0x7F7F, "tf32": 0x7F7FE000}


def narrower(kind: str, mode: str, relu: bool, finite: bool) -> Conversion:
    """The function for cvt of float32 (raw) to f16, bf16 or tf32 (raw). ``relu``: negative numbers and -0, but not NaN,
    become +0. ``finite``: numbers that overflow become the largest finite one."""
    convert = partial(to_tf32, mode=mode) if kind == "tf32" else converter(kind, "f32", mode, False, False)
    if not relu and not finite:
        return convert
    sign, infinity = 1 << (31 if kind == "tf32" else 15), _INFINITY[kind]

    def narrow(raw: Array) -> Array:
        out = convert(raw)
        magnitude = out & ~out.dtype.type(sign)
        if finite:
            out = np.where(magnitude == infinity, (out & sign) | _LARGEST[kind], out)
        if relu:
            out = np.where((out & sign).astype(bool) & (magnitude <= infinity), 0, out)
        return out.astype(magnitude.dtype)

    return narrow


def pack_f32(high: Array, low: Array, convert: Conversion) -> Array:
    """cvt of two float32 (raw) to f16x2 or bf16x2: one word, ``high`` in the upper half."""
    packed: Array = convert(high).astype(np.uint32) << np.uint32(16) | convert(low).astype(np.uint32)
    return packed


def to_tf32(raw: Array, mode: str) -> Array:
    """cvt to tf32 with mode rna, rn or rz: a float32 with 10 bits of mantissa."""
    nan = np.isnan(raw.view(np.float32))
    # The lower 13 bits are cut off. Before that, rna adds half of the last kept bit, and rn adds a little less, unless
    # the last kept bit is 1: then a tie is rounded up to an even number. Infinities are not rounded.
    if mode == "rna":
        out = raw + np.uint32(0x1000)
    elif mode == "rn":
        out = raw + np.uint32(0xFFF) + (raw >> np.uint32(13) & np.uint32(1))
    else:
        out = raw
    out = np.where((raw & np.uint32(0x7F800000)) == np.uint32(0x7F800000), raw, out) & np.uint32(0xFFFFE000)
    return np.where(nan, np.uint32(0x7FFFFFFF), out).astype(np.uint32)
