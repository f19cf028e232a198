"""Converts elements of matrix operands to float32 or float64, sums to the types of accumulators, and floats to fp8.

Operands of mma, wmma, wgmma and tcgen05.mma are widened to float32, which represents every f16, bf16, tf32 and fp8
number exactly. Integers become float64.
"""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.arithmetic.floats import bf16_to_f32
from kernelproof.emulator.state.arrays import Array

# Bits of an element by PTX type.
ELEMENT_BITS = {
    "f64": 64, "tf32": 32, "f32": 32, "s32": 32, "f16": 16, "bf16": 16, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8,
    "s4": 4, "u4": 4, "b1": 1,
}  # fmt: skip
# fp8 type -> bits of the mantissa, bias of the exponent, code of the largest finite number (OCP 8-bit floating point).
_FP8 = {"e4m3": (3, 7, 0x7E), "e5m2": (2, 15, 0x7B)}


def _magnitudes(kind: str) -> Array:
    """The magnitudes of the codes 0 to 127, as float32. Codes beyond that of the largest finite number are infinity
    (e5m2) or NaN."""
    mantissa, bias, last = _FP8[kind]
    codes = np.arange(128)
    exponent, fraction = codes >> mantissa, codes & ((1 << mantissa) - 1)
    significand = np.where(exponent > 0, fraction + (1 << mantissa), fraction)
    out = significand * 2.0 ** (np.maximum(exponent, 1) - bias - mantissa)
    out[last + 1 :] = np.nan
    if kind == "e5m2":
        out[last + 1] = np.inf
    return np.asarray(out.astype(np.float32))


_MAGNITUDES = {kind: _magnitudes(kind) for kind in _FP8}
_DECODED = {kind: np.concatenate([values, -values]) for kind, values in _MAGNITUDES.items()}
# The numbers halfway between those of neighbouring codes, at which rounding to nearest changes its result.
_MIDDLES = {
    kind: (values[:last].astype(np.float64) + values[1 : last + 1]) / 2
    for kind, values in _MAGNITUDES.items()
    for last in (_FP8[kind][2],)
}


def f8_to_f32(raw: Array, kind: str) -> Array:
    """Raw e4m3 or e5m2 -> float32."""
    out: Array = _DECODED[kind][raw]
    return out


def f64_to_f8(x: Array, kind: str) -> Array:
    """float64 -> raw e4m3 or e5m2, rounded to nearest, ties to even. Larger numbers become the largest finite one
    (``.satfinite``), NaN becomes 0x7F."""
    magnitude = np.abs(x)
    middles = _MIDDLES[kind]
    # The number of middles below a magnitude is the code of the nearest number; at a middle, the even code is chosen.
    code = np.searchsorted(middles, magnitude)
    tie = (code < len(middles)) & (middles[np.minimum(code, len(middles) - 1)] == magnitude)
    code = code + (tie & (code & 1 == 1))
    out = code | np.signbit(x).astype(np.int64) << 7
    return np.where(np.isnan(x), 0x7F, out).astype(np.uint8)


def pack_f8(high: Array, low: Array, kind: str, relu: bool) -> Array:
    """Two float arrays -> e4m3x2 or e5m2x2 (raw uint16), the first in the upper byte."""
    codes = []
    for values in (high, low):
        wide = values.astype(np.float64)
        codes.append(f64_to_f8(np.where(wide <= 0, 0.0, wide) if relu else wide, kind).astype(np.uint16))
    packed: Array = codes[0] << np.uint16(8) | codes[1]
    return packed


def unpack_f8(raw: Array, kind: str, relu: bool) -> Array:
    """e4m3x2 or e5m2x2 (raw uint16) -> f16x2 (raw uint32); f16 holds every fp8 number exactly."""
    halves = f8_to_f32(np.ascontiguousarray(raw).view(np.uint8), kind).astype(np.float16)
    if relu:
        halves = np.where(halves <= 0, np.float16(0), halves)
    bits = np.where(np.isnan(halves), np.uint16(0x7FFF), halves.view(np.uint16))
    return np.ascontiguousarray(bits).view(np.uint32)


# If an f16 in the upper half of an int32 is shifted right by 3 with its sign, then its sign, exponent and mantissa are
# where a float32 has them; _KEPT_BITS selects these bits. Only the bias of the exponent differs (15 instead of 127),
# which a factor of 2**112 corrects. Subnormal f16 are subnormal float32 before that multiplication, so the processor
# must not flush subnormals to zero (``_are_finite`` tests this).
_KEPT_BITS = np.int32(0x8FFFE000 - (1 << 32))
_BIAS_FACTOR = np.float32(2.0**112)
_TINY = np.array([1], np.int32).view(np.float32)


def _are_finite(raw: Array) -> bool:
    """Are all f16 (raw uint16) finite, and does the processor compute with subnormal float32? Only then does
    ``_upper_halves`` give the right numbers."""
    # An f16 that is not finite has all bits of its exponent: without its sign it is at least 0x7C00, or twice that
    # here.
    return int((raw << np.uint16(1)).max(initial=0)) < 2 * 0x7C00 and bool((_TINY * _BIAS_FACTOR)[0])


def _upper_halves(words: Array) -> Array:
    """The float32 values of finite f16 in the upper halves of int32 words, which are changed in place."""
    words >>= 3
    words &= _KEPT_BITS
    out: Array = words.view(np.float32)
    out *= _BIAS_FACTOR
    return out


def f16_to_f32(raw: Array) -> Array:
    """Raw f16 (uint16) -> float32; several times faster than NumPy's conversion if all numbers are finite."""
    if not _are_finite(raw):
        return np.asarray(raw.view(np.float16).astype(np.float32))
    words = raw.view(np.int16).astype(np.int32)
    words <<= 16
    return _upper_halves(words)


def halves(raw: Array, kind: str) -> Array:
    """The float32 values of 16-bit operands (uint16), f16 or bf16."""
    return f16_to_f32(raw) if kind == "f16" else bf16_to_f32(raw)


def split_halves(words: Array, kind: str) -> Array:
    """Words (..., n) of two f16 or bf16 each -> float32 (..., 2, n): first all lower halves, then all upper ones."""
    if kind == "f16" and not _are_finite(words.view(np.uint16)):
        pairs = words.view(np.float16).astype(np.float32).reshape(*words.shape, 2)
        return np.ascontiguousarray(np.moveaxis(pairs, -1, -2))
    out = np.empty((*words.shape[:-1], 2, words.shape[-1]), np.uint32)
    np.left_shift(words, 16, out=out[..., 0, :])
    np.bitwise_and(words, 0xFFFF0000, out=out[..., 1, :])
    return _upper_halves(out.view(np.int32)) if kind == "f16" else out.view(np.float32)


def elements(raw: Array, kind: str) -> Array:
    """Raw bytes (uint8, shape (..., n)) -> the 8 n / bits numbers of type ``kind`` in them, the lowest bits first.
    Floats become float32 (f64: float64). Integers become float64, in which sums of their products are exact."""
    data = np.ascontiguousarray(raw)
    if kind in _FP8:
        return f8_to_f32(data, kind)
    if kind == "f16":
        return f16_to_f32(data.view(np.uint16))
    if kind == "bf16":
        return bf16_to_f32(data.view(np.uint16))
    if kind == "tf32":
        # The tensor core reads the upper 19 bits.
        return np.asarray((data.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32))
    if kind in ("f32", "f64"):
        return data.view(np.float32 if kind == "f32" else np.float64)
    if kind in ("s8", "u8", "s32"):
        return np.asarray(data.view({"s8": np.int8, "u8": np.uint8, "s32": np.int32}[kind]).astype(np.float64))
    # Several elements of 4 bits or 1 bit are in each byte.
    bits = ELEMENT_BITS[kind]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    parts = (data[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    signed = np.where(parts > 7, parts.astype(np.float64) - 16, parts) if kind == "s4" else parts
    return np.asarray(signed.astype(np.float64).reshape(*data.shape[:-1], -1))


def rounded(values: Array, kind: str, saturate: bool = False) -> Array:
    """Sums converted to an accumulator's type ``kind`` (s32, f16, f32 or f64), rounded to nearest. s32 wraps around.
    With ``saturate``, sums are clamped to the finite numbers of the type, and NaN becomes 0."""
    if kind == "s32":
        integers = values.astype(np.int64)
        if saturate:
            integers = np.clip(integers, -(1 << 31), (1 << 31) - 1)
        return integers.astype(np.int32)
    out = values.astype({"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind])
    if saturate:
        largest = np.finfo(out.dtype).max
        out = np.where(np.isnan(out), 0, np.clip(out, -largest, largest)).astype(out.dtype)
    return np.asarray(out)
