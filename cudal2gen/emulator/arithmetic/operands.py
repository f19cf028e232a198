"""Elements of matrix operands: fp8 and its rounding, and the numbers in the registers of mma, wmma and wgmma."""

from __future__ import annotations

import numpy as np

from cudal2gen.emulator.arithmetic.floats import bf16_to_f32
from cudal2gen.emulator.state.arrays import Array

# Bits of an element by PTX type.
ELEMENT_BITS = {
    "f64": 64, "tf32": 32, "f32": 32, "s32": 32, "f16": 16, "bf16": 16, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8,
    "s4": 4, "u4": 4, "b1": 1,
}  # fmt: skip
# Of fp8: bits of the mantissa, bias of the exponent, code of the largest finite number.
_EIGHTS = {"e4m3": (3, 7, 0x7E), "e5m2": (2, 15, 0x7B)}


def _magnitudes(kind: str) -> Array:
    """The numbers of the codes 0 to 127, as float32; codes beyond the largest finite one are infinity and NaN."""
    mantissa, bias, last = _EIGHTS[kind]
    codes = np.arange(128)
    exponent, fraction = codes >> mantissa, codes & ((1 << mantissa) - 1)
    significand = np.where(exponent > 0, fraction + (1 << mantissa), fraction)
    out = significand * 2.0 ** (np.maximum(exponent, 1) - bias - mantissa)
    out[last + 1 :] = np.nan
    if kind == "e5m2":
        out[last + 1] = np.inf
    return np.asarray(out.astype(np.float32))


_MAGNITUDES = {kind: _magnitudes(kind) for kind in _EIGHTS}
_DECODED = {kind: np.concatenate([values, -values]) for kind, values in _MAGNITUDES.items()}
_MIDDLES = {
    kind: (values[: last + 1][:-1].astype(np.float64) + values[1 : last + 1]) / 2
    for kind, values in _MAGNITUDES.items()
    for last in (_EIGHTS[kind][2],)
}


def f8_to_f32(raw: Array, kind: str) -> Array:
    """Raw e4m3 or e5m2 -> float32."""
    out: Array = _DECODED[kind][raw]
    return out


def f64_to_f8(x: Array, kind: str) -> Array:
    """float64 -> raw e4m3 or e5m2, to the nearest (ties to even), beyond the largest finite number to that one
    (``.satfinite``); NaN becomes 0x7F."""
    magnitude = np.abs(x)
    middles = _MIDDLES[kind]
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
        codes.append(f64_to_f8(np.where(wide < 0, 0.0, wide) if relu else wide, kind).astype(np.uint16))
    packed: Array = codes[0] << np.uint16(8) | codes[1]
    return packed


def unpack_f8(raw: Array, kind: str, relu: bool) -> Array:
    """e4m3x2 or e5m2x2 (raw uint16) -> f16x2 (raw uint32), which holds every such number."""
    halves = f8_to_f32(np.ascontiguousarray(raw).view(np.uint8), kind).astype(np.float16)
    if relu:
        halves = np.where(halves < 0, np.float16(0), halves)
    bits = np.where(np.isnan(halves), np.uint16(0x7FFF), halves.view(np.uint16))
    return np.ascontiguousarray(bits).view(np.uint32)


def elements(raw: Array, kind: str) -> Array:
    """Raw bytes (uint8, last axis contiguous) -> the numbers in them: floats as float32 (f64: float64), integers as
    float64, which holds every sum of their products."""
    data = np.ascontiguousarray(raw)
    if kind in _EIGHTS:
        return f8_to_f32(data, kind)
    if kind == "f16":
        return np.asarray(data.view(np.float16).astype(np.float32))
    if kind == "bf16":
        return bf16_to_f32(data.view(np.uint16))
    if kind == "tf32":
        # The tensor core reads the upper 19 bits.
        return np.asarray((data.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32))
    if kind in ("f32", "f64"):
        return data.view(np.float32 if kind == "f32" else np.float64)
    if kind in ("s8", "u8", "s32"):
        return np.asarray(data.view({"s8": np.int8, "u8": np.uint8, "s32": np.int32}[kind]).astype(np.float64))
    bits = ELEMENT_BITS[kind]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    parts = (data[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    signed = np.where(parts > 7, parts.astype(np.float64) - 16, parts) if kind == "s4" else parts
    return np.asarray(signed.astype(np.float64).reshape(*data.shape[:-1], -1))


def rounded(values: Array, kind: str, saturate: bool = False) -> Array:
    """Sums as an accumulator of type ``kind`` holds them; s32 wraps, or clamps with ``saturate``."""
    if kind == "s32":
        whole = values.astype(np.int64)
        if saturate:
            whole = np.clip(whole, -(1 << 31), (1 << 31) - 1)
        return whole.astype(np.int32)
    out = values.astype({"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind])
    if saturate:
        most = np.finfo(out.dtype).max
        out = np.where(np.isnan(out), 0, np.clip(out, -most, most)).astype(out.dtype)
    return np.asarray(out)
