"""Operations on integers and bits as PTX defines them.

Arrays have the shape (lanes,) and hold raw bits, unless a function says otherwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernelproof.emulator.arithmetic.types import U
from kernelproof.emulator.state.arrays import Array


def shl(a: Array, n: Any) -> Array:
    """shl: shift left; counts beyond the width give 0."""
    bits = a.dtype.itemsize * 8
    count = np.asarray(n).astype(np.uint64)
    wide = a.astype(np.uint64) << np.minimum(count, 63).astype(np.uint64)
    return np.where(count >= bits, 0, wide).astype(a.dtype)


def shr(a: Array, n: Any) -> Array:
    """shr: shift right; counts beyond the width give 0, or copies of the sign for signed arrays."""
    bits = a.dtype.itemsize * 8
    count = np.minimum(np.asarray(n).astype(np.uint64), bits)
    if a.dtype.kind == "i":
        return np.asarray((a >> np.minimum(count, bits - 1).astype(a.dtype)).astype(a.dtype))
    return np.where(count >= bits, 0, a >> np.minimum(count, bits - 1).astype(a.dtype)).astype(a.dtype)


def lop3(a: Array, b: Array, c: Array, table: int) -> Array:
    """lop3: a boolean function of three words; bit 4a+2b+c of ``table`` is its value for bits a, b and c."""
    out = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def prmt(a: Array, b: Array, selector: Array, mode: str) -> Array:
    """prmt: choose four of the eight bytes of the pair b:a. Without a mode, each 4 bits of the selector choose a byte
    by their lower three; with the upper one set, all bits of the result are the byte's sign."""
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
    """bfe: extract ``length`` bits from bit ``start`` on. They are extended by their sign if the type of ``a`` is
    signed."""
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
        # If the field extends beyond the word, copies of the sign are in its place there.
        available = np.where(pos >= bits, 0, np.minimum(n, np.uint64(bits) - np.minimum(pos, np.uint64(bits))))
        keep = np.where(
            available >= 64,
            np.uint64(0xFFFFFFFFFFFFFFFF),
            (np.uint64(1) << np.minimum(available, np.uint64(63))) - np.uint64(1),
        )
        field = np.where(sign, (field & keep) | ~keep, field & keep)
    return field.astype(U[bits])


def bfi(a: Array, b: Array, start: Any, length: Any) -> Array:
    """bfi: insert the low ``length`` bits of ``a`` into ``b`` at bit ``start``."""
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
    """popc: the number of one bits."""
    return np.bitwise_count(a).astype(np.uint32)


def clz(a: Array) -> Array:
    """clz: the number of leading zeros, by bisection."""
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
    """bfind: the position of the most significant one bit (signed: of the highest bit that differs from the sign),
    0xFFFFFFFF if there is none. ``amount``: the shift that moves it to the top, instead of the position."""
    bits = a.dtype.itemsize * 8
    raw = a.view(U[bits])
    if a.dtype.kind == "i":
        raw = np.where(a < 0, ~raw, raw)
    lead = clz(raw)
    none = raw == 0
    value = lead if amount else (bits - 1 - lead.astype(np.int64)).astype(np.uint32)
    return np.where(none, np.uint32(0xFFFFFFFF), value).astype(np.uint32)


def brev(a: Array) -> Array:
    """brev: reverse the bits, by exchanging neighbouring groups of 1, 2, 4, ... bits."""
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
    """mul.hi: the upper half of a product of arrays of the same type. 64-bit factors are multiplied in 32-bit
    halves."""
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
        # As an unsigned number, a negative operand is too large by 2**64, so the upper half is too large by the other
        # operand.
        high = high - np.where(a < 0, ub, np.uint64(0)) - np.where(b < 0, ua, np.uint64(0))
        return np.asarray(high.view(np.int64))
    return np.asarray(high)


def divide(a: Array, b: Array) -> Array:
    """Truncating division; division by zero gives all ones, as current GPUs do."""
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
    """Remainder with the sign of the dividend; the remainder by zero is the dividend."""
    if a.dtype.kind == "u":
        return np.where(b == 0, a, a % np.where(b == 0, 1, b).astype(a.dtype)).astype(a.dtype)
    unsigned = U[a.dtype.itemsize * 8]
    ua, ub = np.abs(a).view(unsigned), np.abs(b).view(unsigned)
    r = (ua % np.where(ub == 0, 1, ub).astype(unsigned)).view(a.dtype)
    return np.where(b == 0, a, np.where(a < 0, -r, r)).astype(a.dtype)


def divide_int(a: int, b: int) -> int:
    """Truncating division of signed ints that all lanes share."""
    if b == 0:
        return -1
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


def remainder_int(a: int, b: int) -> int:
    """Remainder of ints that all lanes share, with the sign of the dividend; by zero it is the dividend."""
    if b == 0:
        return a
    r = abs(a) % abs(b)
    return -r if a < 0 else r


def saturate_add(a: Array, b: Array, subtract: bool) -> Array:
    """add.sat and sub.sat of int32."""
    wide = a.astype(np.int64) - b.astype(np.int64) if subtract else a.astype(np.int64) + b.astype(np.int64)
    return np.clip(wide, -(1 << 31), (1 << 31) - 1).astype(np.int32)


def add_carry(a: Array, b: Array, carry: Array | None, subtract: bool) -> tuple[Array, Array]:
    """add.cc, addc and their relatives: the sum of unsigned arrays, and whether there is a carry out. For a subtraction
    the carry is a borrow."""
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
    """dp4a: the sum of the products of four pairs of bytes, and a 32-bit word."""
    x = a.view(np.int8 if signed_a else np.uint8).astype(np.int64).reshape(-1, 4)
    y = b.view(np.int8 if signed_b else np.uint8).astype(np.int64).reshape(-1, 4)
    return np.asarray(((x * y).sum(axis=1) + c.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32))


def dot2(a: Array, b: Array, c: Array, signed_a: bool, signed_b: bool, high: bool) -> Array:
    """dp2a: the sum of two products of a half-word and a byte, and a 32-bit word. ``high``: the bytes are the upper
    ones."""
    x = a.view(np.int16 if signed_a else np.uint16).astype(np.int64).reshape(-1, 2)
    y = b.view(np.int8 if signed_b else np.uint8).astype(np.int64).reshape(-1, 4)[:, 2 if high else 0 :][:, :2]
    return np.asarray(((x * y).sum(axis=1) + c.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32))


def bit_mask(start: Array, length: Array, clamp: bool) -> Array:
    """bmsk: a field of ones from bit ``start``, ``length`` bits long."""
    a, b = start.astype(np.uint64), length.astype(np.uint64)
    if not clamp:
        a, b = a & np.uint64(31), b & np.uint64(31)
    n = np.minimum(b, np.uint64(32))
    ones = (np.uint64(1) << n) - np.uint64(1)
    return np.where(a >= 32, 0, ones << np.minimum(a, np.uint64(32)) & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def extend(a: Array, length: Array, clamp: bool, signed: bool) -> Array:
    """szext: sign- or zero-extend the lower ``length`` bits."""
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


def product24(a: Array, b: Array, high: bool) -> Array:
    """mul24: the product of the lower 24 bits of each factor, signed for signed arrays. The result has the upper 32 of
    its 48 bits (``high``) or the lower 32."""
    eight = a.dtype.type(8)
    wide = (a << eight >> eight).astype(np.int64) * (b << eight >> eight).astype(np.int64)
    return np.asarray((wide >> 16 if high else wide).astype(np.uint32))


def nth_set_bit(mask: Array, base: Array, offset: Array) -> Array:
    """fns: the position of the ``offset``-th set bit, counted from bit ``base`` upward, or downward if ``offset`` is
    negative. For 0 it is ``base`` if that bit is set. The result is 0xFFFFFFFF if there is no such bit."""
    n, start = offset.view(np.int32).astype(np.int64), base.astype(np.int64)
    out = np.full(mask.shape, 0xFFFFFFFF, np.uint32)
    left = np.maximum(np.abs(n), 1)
    for step in range(32):
        at = start + np.where(n < 0, -step, step)
        inside = (at >= 0) & (at < 32) & ((n != 0) | (step == 0))
        found = inside & (mask >> np.clip(at, 0, 31).astype(np.uint32) & np.uint32(1)).astype(bool)
        left = left - found
        out = np.where(found & (left == 0), at, out).astype(np.uint32)
    return out
