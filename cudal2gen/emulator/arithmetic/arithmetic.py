"""NumPy arithmetic that PTX defines and NumPy does not: conversions, bit tricks, fused multiply-add, atomics.

Arrays hold raw bits in unsigned types unless a function says otherwise; shapes are (lanes,).
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
U: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
S: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
F: dict[str, Any] = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


# --- bits
# --------------------------------------------------------------------------------------------------------------


def shl(a: Array, n: Any) -> Array:
    """Shift left; counts beyond the width give 0."""
    bits = a.dtype.itemsize * 8
    count = np.asarray(n).astype(np.uint64)
    wide = a.astype(np.uint64) << np.minimum(count, 63).astype(np.uint64)
    return np.where(count >= bits, 0, wide).astype(a.dtype)


def shr(a: Array, n: Any) -> Array:
    """Shift right; counts beyond the width give 0, or the sign for signed arrays."""
    bits = a.dtype.itemsize * 8
    count = np.minimum(np.asarray(n).astype(np.uint64), bits)
    if a.dtype.kind == "i":
        return np.asarray((a >> np.minimum(count, bits - 1).astype(a.dtype)).astype(a.dtype))
    return np.where(count >= bits, 0, a >> np.minimum(count, bits - 1).astype(a.dtype)).astype(a.dtype)


def lop3(a: Array, b: Array, c: Array, table: int) -> Array:
    """Any boolean function of three words: bit 4a+2b+c of ``table``."""
    out = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def prmt(a: Array, b: Array, selector: Array, mode: str) -> Array:
    """Byte permute."""
    pool = b.astype(np.uint64) << np.uint64(32) | a.astype(np.uint64)
    out = np.zeros(len(pool), np.uint32)
    s = np.broadcast_to(selector, out.shape).astype(np.uint32)
    for i in range(4):
        if mode == "":
            nibble = s >> np.uint32(4 * i) & np.uint32(15)
            index, sign = nibble & np.uint32(7), (nibble & np.uint32(8)) != 0
        else:
            c = (s & np.uint32(3)).astype(np.int64)
            sign = np.zeros(len(out), bool)
            table = {
                "f4e": c + i,
                "b4e": (c - i) % 8,
                "rc8": c,
                "ecl": np.maximum(c, i),
                "ecr": np.minimum(c, i),
                "rc16": (c & 1) * 2 + (i & 1),
            }[mode]
            index = table.astype(np.uint32)
        byte = (pool >> (index.astype(np.uint64) * np.uint64(8)) & np.uint64(255)).astype(np.uint32)
        byte = np.where(sign, np.where(byte & 128, 255, 0), byte).astype(np.uint32)
        out |= byte << np.uint32(8 * i)
    return out


def funnel(low: Array, high: Array, count: Array, left: bool, wrap: bool) -> Array:
    """shf: 32 bits of the 64-bit pair high:low after a shift."""
    n = np.broadcast_to(count, low.shape).astype(np.uint64)
    n = n & np.uint64(31) if wrap else np.minimum(n, np.uint64(32))
    pair = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    if left:
        # A shift by 32 leaves the low word in the high half.
        return ((pair << n) >> np.uint64(32)).astype(np.uint32)
    return (pair >> n & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def bfe(a: Array, start: Any, length: Any) -> Array:
    """Bit field extract; the type of ``a`` (signed or not) decides the extension."""
    bits = a.dtype.itemsize * 8
    raw = a.view(U[bits]).astype(np.uint64)
    pos = np.broadcast_to(np.asarray(start).astype(np.uint64) & np.uint64(255), raw.shape)
    size = np.broadcast_to(np.asarray(length).astype(np.uint64) & np.uint64(255), raw.shape)
    low = np.where(pos >= bits, 0, raw >> np.minimum(pos, np.uint64(63)))
    n = np.minimum(size, np.uint64(bits))
    ones = np.where(
        n >= 64, np.uint64(0xFFFFFFFFFFFFFFFF), (np.uint64(1) << np.minimum(n, np.uint64(63))) - np.uint64(1)
    )
    field = low & ones
    if a.dtype.kind == "i":
        at = np.minimum(pos + size - np.uint64(1), np.uint64(bits - 1))
        sign = np.where(size == 0, 0, raw >> at & np.uint64(1)).astype(bool)
        # The sign fills what lies beyond the word, too.
        available = np.where(pos >= bits, 0, np.minimum(n, np.uint64(bits) - np.minimum(pos, np.uint64(bits))))
        keep = np.where(
            available >= 64,
            np.uint64(0xFFFFFFFFFFFFFFFF),
            (np.uint64(1) << np.minimum(available, np.uint64(63))) - np.uint64(1),
        )
        field = np.where(sign, (field & keep) | ~keep, field & keep)
    return field.astype(U[bits])


def bfi(a: Array, b: Array, start: Any, length: Any) -> Array:
    """Insert the low ``length`` bits of ``a`` into ``b`` at ``start``."""
    bits = b.dtype.itemsize * 8
    pos = np.broadcast_to(np.asarray(start).astype(np.uint64) & np.uint64(255), b.shape)
    size = np.minimum(np.broadcast_to(np.asarray(length).astype(np.uint64) & np.uint64(255), b.shape), np.uint64(bits))
    ones = np.where(
        size >= 64, np.uint64(0xFFFFFFFFFFFFFFFF), (np.uint64(1) << np.minimum(size, np.uint64(63))) - np.uint64(1)
    )
    shift = np.minimum(pos, np.uint64(63))
    mask = np.where(pos >= bits, np.uint64(0), ones << shift)
    return ((b.astype(np.uint64) & ~mask) | ((a.astype(np.uint64) << shift) & mask)).astype(b.dtype)


def popc(a: Array) -> Array:
    """Number of one bits."""
    return np.bitwise_count(a).astype(np.uint32)


def clz(a: Array) -> Array:
    """Leading zeros."""
    out = np.zeros(a.shape, np.uint32)
    bits = a.dtype.itemsize * 8
    rest = a.astype(np.uint64)
    n = np.full(a.shape, bits, np.int64)
    for step in (32, 16, 8, 4, 2, 1):
        big = (rest >> np.uint64(step)) != 0
        n = np.where(big, n - step, n)
        rest = np.where(big, rest >> np.uint64(step), rest)
    out[:] = np.where(rest != 0, n - 1, n)
    return out


def bfind(a: Array, amount: bool) -> Array:
    """Position of the most significant bit (signed: of the most significant non-sign bit), 0xFFFFFFFF if none."""
    bits = a.dtype.itemsize * 8
    raw = a.view(U[bits])
    if a.dtype.kind == "i":
        raw = np.where(a < 0, ~raw, raw)
    lead = clz(raw)
    none = raw == 0
    value = lead if amount else (bits - 1 - lead.astype(np.int64)).astype(np.uint32)
    return np.where(none, np.uint32(0xFFFFFFFF), value).astype(np.uint32)


def brev(a: Array) -> Array:
    """Reverse the bits."""
    bits = a.dtype.itemsize * 8
    out = a.astype(np.uint64)
    full = np.uint64((1 << bits) - 1)
    for step in (1, 2, 4, 8, 16, 32):
        if step >= bits:
            break
        period = 2 * step
        mask = np.uint64(sum(((1 << step) - 1) << i for i in range(0, bits, period)))
        out = ((out >> np.uint64(step)) & mask) | ((out & mask) << np.uint64(step))
    return (out & full).astype(a.dtype)


def mulhi(a: Array, b: Array) -> Array:
    """High half of a product; operands are arrays of the same type."""
    bits = a.dtype.itemsize * 8
    if bits <= 32:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return (a.astype(wide) * b.astype(wide) >> wide(bits)).astype(a.dtype)
    ua, ub = a.view(np.uint64), b.view(np.uint64)
    low = np.uint64(0xFFFFFFFF)
    s32 = np.uint64(32)
    a0, a1, b0, b1 = ua & low, ua >> s32, ub & low, ub >> s32
    mid = a1 * b0 + (a0 * b0 >> s32)
    mid2 = a0 * b1 + (mid & low)
    high = a1 * b1 + (mid >> s32) + (mid2 >> s32)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, ub, np.uint64(0)) - np.where(b < 0, ua, np.uint64(0))
        return np.asarray(high.view(np.int64))
    return np.asarray(high)


def divide(a: Array, b: Array) -> Array:
    """Truncating division; by zero gives all ones (what current GPUs give)."""
    if a.dtype.kind == "u":
        return np.asarray(
            np.where(b == 0, a.dtype.type(~a.dtype.type(0)), a // np.where(b == 0, 1, b).astype(a.dtype)).astype(
                a.dtype
            )
        )
    unsigned = U[a.dtype.itemsize * 8]
    ua, ub = np.abs(a).view(unsigned), np.abs(b).view(unsigned)
    q = (ua // np.where(ub == 0, 1, ub).astype(unsigned)).view(a.dtype)
    q = np.where((a < 0) != (b < 0), -q, q)
    return np.asarray(np.where(b == 0, a.dtype.type(-1), q).astype(a.dtype))


def remainder(a: Array, b: Array) -> Array:
    """Remainder with the sign of the dividend; by zero gives the dividend."""
    if a.dtype.kind == "u":
        return np.where(b == 0, a, a % np.where(b == 0, 1, b).astype(a.dtype)).astype(a.dtype)
    unsigned = U[a.dtype.itemsize * 8]
    ua, ub = np.abs(a).view(unsigned), np.abs(b).view(unsigned)
    r = (ua % np.where(ub == 0, 1, ub).astype(unsigned)).view(a.dtype)
    return np.where(b == 0, a, np.where(a < 0, -r, r)).astype(a.dtype)


def divide_int(a: int, b: int) -> int:
    """Uniform truncating division of signed ints."""
    if b == 0:
        return -1
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


def remainder_int(a: int, b: int) -> int:
    """Uniform remainder with the sign of the dividend; by zero gives the dividend."""
    if b == 0:
        return a
    r = abs(a) % abs(b)
    return -r if a < 0 else r


def saturate_add(a: Array, b: Array, subtract: bool) -> Array:
    """add.sat and sub.sat of int32."""
    wide = a.astype(np.int64) - b.astype(np.int64) if subtract else a.astype(np.int64) + b.astype(np.int64)
    return np.clip(wide, -(1 << 31), (1 << 31) - 1).astype(np.int32)


def add_carry(a: Array, b: Array, carry: Array | None, subtract: bool) -> tuple[Array, Array]:
    """(sum, carry out) of unsigned arrays; for a subtraction the carry is a borrow."""
    zero = np.zeros(a.shape, a.dtype)
    c = zero if carry is None else carry.astype(a.dtype)
    if subtract:
        first = a - b
        out = first - c
        borrow: Array = (a < b) | (first < c)
        return out, borrow
    first = a + b
    out = first + c
    over: Array = (first < a) | (out < first)
    return out, over


def dot4(a: Array, b: Array, c: Array, signed_a: bool, signed_b: bool) -> Array:
    """dp4a: four byte products added to a 32-bit word."""
    x = a.view(np.int8 if signed_a else np.uint8).astype(np.int64).reshape(-1, 4)
    y = b.view(np.int8 if signed_b else np.uint8).astype(np.int64).reshape(-1, 4)
    return np.asarray(((x * y).sum(axis=1) + c.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32))


def dot2(a: Array, b: Array, c: Array, signed_a: bool, signed_b: bool, high: bool) -> Array:
    """dp2a: two 16-bit by byte products added to a 32-bit word."""
    x = a.view(np.int16 if signed_a else np.uint16).astype(np.int64).reshape(-1, 2)
    y = b.view(np.int8 if signed_b else np.uint8).astype(np.int64).reshape(-1, 4)[:, 2 if high else 0 :][:, :2]
    return np.asarray(((x * y).sum(axis=1) + c.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32))


def bit_mask(start: Array, length: Array, clamp: bool) -> Array:
    """bmsk."""
    a, b = start.astype(np.uint64), length.astype(np.uint64)
    if not clamp:
        a, b = a & np.uint64(31), b & np.uint64(31)
    n = np.minimum(b, np.uint64(32))
    ones = (np.uint64(1) << n) - np.uint64(1)
    return np.where(a >= 32, 0, ones << np.minimum(a, np.uint64(32)) & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def extend(a: Array, length: Array, clamp: bool, signed: bool) -> Array:
    """szext: sign- or zero-extend from bit ``length``."""
    n = length.astype(np.int64)
    if not clamp:
        n = n & 31
    n = np.minimum(n, 32)
    raw = a.astype(np.int64) & 0xFFFFFFFF
    low = raw & ((np.int64(1) << n) - 1)
    if signed:
        sign = (n > 0) & ((raw >> np.maximum(n - 1, 0) & 1) != 0)
        low = np.where(sign, low - (np.int64(1) << n), low)
    return (low & 0xFFFFFFFF).astype(np.uint32)


# --- floating point
# ----------------------------------------------------------------------------------------------------


def bf16_to_f32(raw: Array) -> Array:
    """Raw bfloat16 -> float32."""
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: Array, mode: str = "rn") -> Array:
    """float32 -> raw bfloat16; NaN becomes 0x7FFF."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    if mode == "rn":
        out = (bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)
    else:
        out = bits >> np.uint32(16)
        inexact = (bits & np.uint32(0xFFFF)) != 0
        negative = (bits >> np.uint32(31)) != 0
        up = inexact & (~negative if mode == "rp" else negative if mode == "rm" else np.zeros(len(bits), bool))
        out = out + up.astype(np.uint32)
    return np.where(np.isnan(x), np.uint32(0x7FFF), out).astype(np.uint16)


def f64_to_bf16(x: Array) -> Array:
    """float64 -> raw bfloat16, rounded once (to odd in between)."""
    return f32_to_bf16(_round_odd_f32(x))


def _round_odd_f32(x: Array) -> Array:
    y = x.astype(np.float32)
    exact = y.astype(np.float64)
    inexact = (exact != x) & np.isfinite(x) & np.isfinite(y)
    toward = np.where(np.abs(exact) > np.abs(x), np.nextafter(y, np.float32(0)), y)
    bits = toward.view(np.uint32)
    return np.where(inexact, bits | np.uint32(1), y.view(np.uint32)).astype(np.uint32).view(np.float32)


def directed(x: Array, dtype: Any, mode: str) -> Array:
    """Round float64 (or longdouble) values to a narrower float with mode rn, rz, rm or rp."""
    y = x.astype(dtype)
    if mode in ("rn", "rna", ""):
        return np.asarray(y)
    back = y.astype(x.dtype)
    info = np.finfo(dtype)
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
    """.ftz: subnormal float32 -> zero of the same sign."""
    bits = x.view(np.uint32)
    return np.where(bits & np.uint32(0x7F800000), bits, bits & np.uint32(0x80000000)).astype(np.uint32).view(np.float32)


def saturate(x: Array) -> Array:
    """.sat for floats: clamp to [0, 1], NaN -> 0."""
    out = np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0)).astype(x.dtype)
    return np.asarray(out)


def fma32(a: Array, b: Array, c: Array, mode: str = "rn") -> Array:
    """Fused multiply-add of float32, rounded once: the float64 sum is rounded to odd first."""
    p = a.astype(np.float64) * b.astype(np.float64)
    cc = c.astype(np.float64)
    s = p + cc
    t = s - p
    error = (p - (s - t)) + (cc - t)
    bits = s.view(np.int64)
    fix = (error != 0) & ((bits & 1) == 0) & np.isfinite(s)
    if fix.any():
        # Move one unit toward the error when the last bit is even, so that the second rounding cannot be misled.
        away = (error > 0) == (s > 0)
        bits = np.where(fix, np.where(away, bits + 1, bits - 1), bits)
        s = bits.view(np.float64)
    return directed(s, np.float32, mode)


@cache
def _c_fma() -> Any:
    function = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6").fma
    function.restype = ctypes.c_double
    function.argtypes = [ctypes.c_double] * 3
    return function


def fma64(a: Array, b: Array, c: Array) -> Array:
    """Fused multiply-add of float64 through the C library."""
    one = _c_fma()
    a, b, c = np.broadcast_arrays(a, b, c)
    out = [one(float(x), float(y), float(z)) for x, y, z in zip(a, b, c, strict=True)]
    return np.array(out, np.float64)


def fma16(a: Array, b: Array, c: Array) -> Array:
    """Fused multiply-add of float16: exact in float64 before the one rounding."""
    return np.asarray((a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float16))


def fmin(a: Array, b: Array, nan: bool, larger: bool) -> Array:
    """min or max: NaN loses unless ``nan``; -0 counts as less than +0."""
    pick_a = (a > b) if larger else (a < b)
    tie = (a == b) & (np.signbit(a) != np.signbit(b))
    pick_a = np.where(tie, np.signbit(a) != larger, pick_a)
    out = np.where(pick_a, a, b)
    na, nb = np.isnan(a), np.isnan(b)
    out = np.where(na | nb, a.dtype.type(np.nan), out) if nan else np.where(na, b, np.where(nb, a, out))
    return np.asarray(out.astype(a.dtype))


def tanh(x: Array) -> Array:
    """tanh, computed in float64."""
    return np.asarray(np.tanh(x.astype(np.float64)).astype(x.dtype))


def unary32(name: str, x: Array) -> Array:
    """Transcendental and approximate functions: computed in float64, rounded once. The hardware's error is not
    modelled."""
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


def test_float(what: str, x: Array) -> Array:
    """testp."""
    if what == "finite":
        return np.asarray(np.isfinite(x))
    if what == "infinite":
        return np.asarray(np.isinf(x))
    if what == "number":
        return np.asarray(~np.isnan(x))
    if what == "notanumber":
        return np.asarray(np.isnan(x))
    tiny = np.finfo(x.dtype).tiny
    subnormal = (np.abs(x) < tiny) & (x != 0)
    if what == "subnormal":
        return np.asarray(subnormal)
    return np.asarray(np.isfinite(x) & ~subnormal & (x != 0))


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


def converter(dst: str, src: str, mode: str, ftz: bool, sat: bool) -> Callable[[Array], Array]:
    """The function for ``cvt.mode.dst.src``: raw bits of ``src`` (in its own width) -> raw bits of ``dst``."""
    s_bits, d_bits = _bits(src), _bits(dst)

    def decode(x: Array) -> Array:
        if src == "bf16":
            return bf16_to_f32(x)
        if src[0] == "f":
            y = x.view(F[src])
            return flush(y) if ftz and src == "f32" else y
        return x.view(S[s_bits]) if src[0] == "s" else x

    def run(raw: Array) -> Array:
        x = decode(np.ascontiguousarray(raw))
        if dst[0] in "us" and src[0] in "us":
            if sat:
                low, high = _range(dst)
                wide = x.astype(object)
                clipped = np.array([min(max(int(v), low), high) & ((1 << d_bits) - 1) for v in wide], U[d_bits])
                return clipped
            return x.astype(S[d_bits] if src[0] == "s" else U[d_bits]).view(U[d_bits])
        if dst[0] in "us":
            low, high = _range(dst)
            wide = x.astype(np.float64)
            rounded = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}.get(mode, np.trunc)(wide)
            nan = np.isnan(rounded)
            top, bottom = rounded >= float(high), rounded <= float(low)
            safe = np.where(nan | top | bottom, 0.0, rounded)
            out = safe.astype(np.uint64 if dst == "u64" else np.int64)
            out = out.astype(U[d_bits])
            mask = (1 << d_bits) - 1
            out = np.where(top, U[d_bits](high & mask), np.where(bottom, U[d_bits](low & mask), out))
            # NaN: zero, except that 64-bit results have only the top bit set.
            return np.where(nan, U[d_bits](1 << 63 if d_bits == 64 else 0), out).astype(U[d_bits])
        if src[0] in "us":
            y = x.astype(np.longdouble if s_bits == 64 and (dst != "f64" or mode != "rn") else np.float64)
        else:
            y = x.astype(np.float64)
            if mode in ("rni", "rzi", "rmi", "rpi"):
                y = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](y)
        rounding = mode if mode in ("rz", "rm", "rp") else "rn"
        if dst == "bf16":
            z = f32_to_bf16(
                _round_odd_f32(np.asarray(y, np.float64)) if rounding == "rn" else directed(y, np.float32, rounding),
                rounding,
            )
            return z
        out_f = directed(y, F[dst], rounding)
        if sat:
            out_f = saturate(out_f)
        if ftz and dst == "f32":
            out_f = flush(out_f)
        nan_bits = {"f16": 0x7FFF, "f32": 0x7FFFFFFF}.get(dst)
        got = np.ascontiguousarray(out_f).view(U[d_bits])
        if nan_bits is not None and src[0] in "fb" and src != dst:
            got = np.where(np.isnan(out_f), U[d_bits](nan_bits), got)
        return np.asarray(got)

    if dst == "f32" and src == "f16":
        return lambda raw: np.ascontiguousarray(raw).view(np.float16).astype(np.float32).view(np.uint32)
    if dst == "f16" and src == "f32" and mode == "rn" and not sat and not ftz:
        return lambda raw: raw.view(np.float32).astype(np.float16).view(np.uint16)
    return run


def _bits(kind: str) -> int:
    return 16 if kind == "bf16" else int(kind[1:])


def _range(kind: str) -> tuple[int, int]:
    bits = int(kind[1:])
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def pack_f32(high: Array, low: Array, kind: str, mode: str, relu: bool) -> Array:
    """cvt.f16x2.f32 and bf16x2: two float32 (raw) -> one word, the first in the upper half."""
    convert = converter(kind, "f32", mode, False, False)

    def one(raw: Array) -> Array:
        out = convert(raw)
        if relu:
            out = np.where(
                (out & 0x8000).astype(bool) & ~((out & 0x7FFF) > (0x7C00 if kind == "f16" else 0x7F80)), 0, out
            )
        return out.astype(np.uint32)

    packed: Array = one(high) << np.uint32(16) | one(low)
    return packed


def to_tf32(raw: Array, mode: str) -> Array:
    """cvt.rna.tf32.f32 (and rn, rz): 10 mantissa bits."""
    nan = np.isnan(raw.view(np.float32))
    if mode == "rna":
        out = raw + np.uint32(0x1000)
    elif mode == "rn":
        out = raw + np.uint32(0xFFF) + (raw >> np.uint32(13) & np.uint32(1))
    else:
        out = raw
    out = np.where((raw & np.uint32(0x7F800000)) == np.uint32(0x7F800000), raw, out) & np.uint32(0xFFFFE000)
    return np.where(nan, np.uint32(0x7FFFFFFF), out).astype(np.uint32)


# --- packed halves
# -----------------------------------------------------------------------------------------------------


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


# --- atomics
# -----------------------------------------------------------------------------------------------------------


def _apply(op: str, kind: str, old: Array, value: Array, compare: Array | None) -> Array:
    if op == "exch":
        return value
    if op == "cas":
        assert compare is not None
        return np.where(old == compare, value, old)
    if op in ("and", "or", "xor"):
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op](old, value)
    if op == "inc":
        return np.where(old >= value, 0, old + 1).astype(old.dtype)
    if op == "dec":
        return np.where((old == 0) | (old > value), value, old - 1).astype(old.dtype)
    combine: Callable[[Any, Any], Any] = {
        "add": lambda a, b: a + b,
        "min": lambda a, b: fmin(a, b, False, False) if a.dtype.kind == "f" else np.minimum(a, b),
        "max": lambda a, b: fmin(a, b, False, True) if a.dtype.kind == "f" else np.maximum(a, b),
    }[op]
    if kind in ("f16x2", "bf16x2"):
        return packed(kind, combine, old, value)
    if kind in ("f16", "bf16"):
        return scalar16(kind, combine, old, value)
    bits = old.dtype.itemsize * 8
    real = F[kind] if kind[0] == "f" else S[bits] if kind[0] == "s" else U[bits]
    return np.ascontiguousarray(combine(old.view(real), value.view(real))).view(old.dtype)


def modify(op: str, kind: str, view: Array, at: Array, value: Array, compare: Array | None) -> tuple[Array, bool]:
    """Atomically change ``view[at]``, in lane order where places repeat. Returns the old values and whether anything
    changed."""
    old = np.empty(len(at), view.dtype)
    left = np.arange(len(at))
    changed = False
    while left.size:
        _, first = np.unique(at[left], return_index=True)
        now = left[first]
        before = view[at[now]]
        after = _apply(op, kind, before, value[now], None if compare is None else compare[now])
        old[now] = before
        changed = changed or bool((after != before).any())
        view[at[now]] = after
        keep = np.ones(left.size, bool)
        keep[first] = False
        left = left[keep]
    return old, changed
