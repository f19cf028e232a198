"""cvt (PTX ISA, "cvt"): conversions between integer and float types. Arrays hold raw bits in unsigned types, shape
(lanes,)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernelproof.emulator.arithmetic.floats import bf16_to_f32, directed, f32_to_bf16, flush, round_odd_f32, saturate
from kernelproof.emulator.arithmetic.types import F, S, U, type_bits
from kernelproof.emulator.state.arrays import Array

Conversion = Callable[[Array], Array]
# Modifiers that round to an integral value.
_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
# The NaN that a conversion gives, by destination.
_NAN = {"f16": 0x7FFF, "f32": 0x7FFFFFFF}


def converter(dst: str, src: str, mode: str, ftz: bool, sat: bool) -> Conversion:
    """The function for ``cvt.mode.dst.src``: raw bits of ``src`` (in its own width) -> raw bits of ``dst``."""
    if dst == "f32" and src == "f16" and not sat:
        return lambda raw: np.ascontiguousarray(raw).view(np.float16).astype(np.float32).view(np.uint32)
    if dst == "f16" and src == "f32" and mode == "rn" and not sat and not ftz:
        return lambda raw: raw.view(np.float32).astype(np.float16).view(np.uint16)
    if dst[0] in "us" and src[0] in "us":
        return lambda raw: _integer_to_integer(_decoded(raw, src, ftz), dst, src, sat)
    if dst[0] in "us":
        return lambda raw: _float_to_integer(_decoded(raw, src, ftz), dst, mode)
    return lambda raw: _to_float(_decoded(raw, src, ftz), dst, src, mode, ftz, sat)


def _decoded(raw: Array, src: str, ftz: bool) -> Array:
    """Raw bits -> numbers; bf16 becomes float32."""
    x = np.ascontiguousarray(raw)
    if src == "bf16":
        return bf16_to_f32(x)
    if src[0] == "f":
        y: Array = x.view(F[src])
        return flush(y) if ftz and src == "f32" else y
    return x.view(S[type_bits(src)]) if src[0] == "s" else x


def _integer_to_integer(x: Array, dst: str, src: str, sat: bool) -> Array:
    """Truncated or extended by the source's sign; with ``sat`` clamped to the range of ``dst``."""
    bits = type_bits(dst)
    if sat:
        low, high = _range(dst)
        return np.array([min(max(int(v), low), high) & ((1 << bits) - 1) for v in x], U[bits])
    out: Array = x.astype(S[bits] if src[0] == "s" else U[bits]).view(U[bits])
    return out


def _float_to_integer(x: Array, dst: str, mode: str) -> Array:
    """Rounded and clamped to the range of ``dst``. NaN gives zero, in 64 bits only the top bit."""
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
    return np.where(nan, unsigned(1 << 63 if bits == 64 else 0), out).astype(unsigned)


def _to_float(x: Array, dst: str, src: str, mode: str, ftz: bool, sat: bool) -> Array:
    """Computed in float64, which holds every source but 64-bit integers exactly, and rounded once."""
    if src[0] in "us":
        wide = type_bits(src) == 64 and (dst != "f64" or mode != "rn")
        y = x.astype(np.longdouble if wide else np.float64)
    else:
        y = x.astype(np.float64)
        if mode in _INTEGRAL:
            y = _INTEGRAL[mode](y)
    rounding = mode if mode in ("rz", "rm", "rp") else "rn"
    if dst == "bf16":
        if rounding == "rn":
            return f32_to_bf16(round_odd_f32(np.asarray(y, np.float64)))
        return f32_to_bf16(directed(y, np.float32, rounding), rounding)
    out = directed(y, F[dst], rounding)
    if sat:
        out = saturate(out)
    if ftz and dst == "f32":
        out = flush(out)
    unsigned = U[type_bits(dst)]
    raw = np.ascontiguousarray(out).view(unsigned)
    if dst in _NAN and src[0] in "fb" and src != dst:
        raw = np.where(np.isnan(out), unsigned(_NAN[dst]), raw)
    return np.asarray(raw)


def _range(kind: str) -> tuple[int, int]:
    bits = int(kind[1:])
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def pack_f32(high: Array, low: Array, kind: str, mode: str, relu: bool) -> Array:
    """cvt of two float32 (raw) to f16x2 or bf16x2: one word, ``high`` in the upper half. ``relu``: negative numbers,
    but not NaN, become 0."""
    convert = converter(kind, "f32", mode, False, False)

    def narrow(raw: Array) -> Array:
        out = convert(raw)
        if relu:
            out = np.where(
                (out & 0x8000).astype(bool) & ~((out & 0x7FFF) > (0x7C00 if kind == "f16" else 0x7F80)), 0, out
            )
        return out.astype(np.uint32)

    packed: Array = narrow(high) << np.uint32(16) | narrow(low)
    return packed


def to_tf32(raw: Array, mode: str) -> Array:
    """cvt to tf32 with mode rna, rn or rz: a float32 with 10 bits of mantissa."""
    nan = np.isnan(raw.view(np.float32))
    if mode == "rna":
        out = raw + np.uint32(0x1000)
    elif mode == "rn":
        out = raw + np.uint32(0xFFF) + (raw >> np.uint32(13) & np.uint32(1))
    else:
        out = raw
    out = np.where((raw & np.uint32(0x7F800000)) == np.uint32(0x7F800000), raw, out) & np.uint32(0xFFFFE000)
    return np.where(nan, np.uint32(0x7FFFFFFF), out).astype(np.uint32)
