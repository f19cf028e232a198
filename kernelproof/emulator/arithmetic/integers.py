"""Computes PTX's operations on integers and bits on NumPy arrays.

Arrays have the shape (lanes,) and hold raw bits, unless a function says otherwise. NumPy does not define a shift by the
width of a type or more. So a function clamps each count before it shifts, and sets the results of larger counts
separately (``np.where``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernelproof.emulator.arithmetic.types import U
from kernelproof.emulator.state.arrays import Array


def _low_ones(count: Array) -> Array:
    """64-bit masks whose lowest ``count`` bits are set; a count (uint64) is at most 64."""
    shifted = np.uint64(1) << np.minimum(count, np.uint64(63))
    return np.where(count >= 64, np.uint64(0xFFFFFFFFFFFFFFFF), shifted - np.uint64(1))


def shl(a: Array, n: Any) -> Array:
    """shl: shift left; counts of the width or more give 0."""
    bits = a.dtype.itemsize * 8
    count = np.asarray(n).astype(np.uint64)
    wide = a.astype(np.uint64) << np.minimum(count, 63).astype(np.uint64)
    return np.where(count >= bits, 0, wide).astype(a.dtype)


def shr(a: Array, n: Any) -> Array:
    """shr: shift right; counts of the width or more give 0, or copies of the sign for signed arrays."""
    bits = a.dtype.itemsize * 8
    count = np.minimum(np.asarray(n).astype(np.uint64), bits)
    if a.dtype.kind == "i":
        return np.asarray((a >> np.minimum(count, bits - 1).astype(a.dtype)).astype(a.dtype))
    return np.where(count >= bits, 0, a >> np.minimum(count, bits - 1).astype(a.dtype)).astype(a.dtype)


def lop3(a: Array, b: Array, c: Array, table: int) -> Array:
    """lop3: a boolean function of three words; bit 4a+2b+c of ``table`` is its value for bits a, b and c."""
    # The result is the "or" of one term for each bit i that is set in the table. The term is true where the bits of a,
    # b and c are the three bits of i.
    out = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def prmt(a: Array, b: Array, selector: Array, mode: str) -> Array:
    """prmt: each byte of the result is one of the eight bytes of the pair b:a. Byte 0 is the lowest one of ``a``, and
    byte 7 the highest one of ``b``.

    If ``mode`` is "", four bits of the selector belong to each byte of the result: the lower three are the number of
    the source byte. If the fourth is set, the result is not the source byte but eight copies of its sign bit.

    Otherwise ``mode`` is f4e, b4e, rc8, ecl, ecr or rc16, and the lower two bits of the selector choose all four source
    bytes.
    """
    pair = b.astype(np.uint64) << np.uint64(32) | a.astype(np.uint64)
    out = np.zeros(len(pair), np.uint32)
    s = np.broadcast_to(selector, out.shape).astype(np.uint32)
    for i in range(4):
        if mode == "":
            field = s >> np.uint32(4 * i) & np.uint32(15)
            source, copies_sign = field & np.uint32(7), (field & np.uint32(8)) != 0
        else:
            c = (s & np.uint32(3)).astype(np.int64)
            copies_sign = np.zeros(len(out), bool)
            # For each mode, the source of byte i of the result.
            sources = {
                "f4e": c + i,  # four bytes forward from byte c
                "b4e": (c - i) % 8,  # four bytes backward from byte c
                "rc8": c,  # byte c, four times
                "ecl": np.maximum(c, i),  # byte max(c, i): bytes below c are replaced by byte c
                "ecr": np.minimum(c, i),  # byte min(c, i): bytes above c are replaced by byte c
                "rc16": (c & 1) * 2 + (i & 1),  # the lower or (c is odd) the upper half of a, twice
            }
            source = sources[mode].astype(np.uint32)
        byte = (pair >> (source.astype(np.uint64) * np.uint64(8)) & np.uint64(255)).astype(np.uint32)
        byte = np.where(copies_sign, np.where(byte & 128, 255, 0), byte).astype(np.uint32)
        out |= byte << np.uint32(8 * i)
    return out


def funnel(low: Array, high: Array, count: Array, left: bool, wrap: bool) -> Array:
    """shf: the upper word of the 64-bit pair high:low after a shift to the ``left``, or its lower word after a shift to
    the right.

    ``wrap``: the count is taken modulo 32. Otherwise counts above 32 have the effect of 32.
    """
    n = np.broadcast_to(count, low.shape).astype(np.uint64)
    n = n & np.uint64(31) if wrap else np.minimum(n, np.uint64(32))
    pair = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    if left:
        return ((pair << n) >> np.uint64(32)).astype(np.uint32)
    return (pair >> n & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def bfe(a: Array, start: Any, length: Any) -> Array:
    """bfe: extract ``length`` bits of ``a`` from bit ``start`` on. They are extended by their highest bit if the type
    of ``a`` is signed, else by zeros. Bits beyond the width of ``a`` count as copies of its sign, or as zeros."""
    bits = a.dtype.itemsize * 8
    raw = a.view(U[bits]).astype(np.uint64)
    # PTX reads only the lower 8 bits of start and length, so both are from 0 to 255.
    pos = np.broadcast_to(np.asarray(start).astype(np.uint64) & np.uint64(255), raw.shape)
    size = np.broadcast_to(np.asarray(length).astype(np.uint64) & np.uint64(255), raw.shape)
    low = np.where(pos >= bits, 0, raw >> np.minimum(pos, np.uint64(63)))
    n = np.minimum(size, np.uint64(bits))
    field = low & _low_ones(n)
    if a.dtype.kind == "i":
        # The sign is the highest bit of the field, or of ``a`` if the field extends beyond it. A field of 0 bits has
        # none.
        sign_bit = np.minimum(pos + size - np.uint64(1), np.uint64(bits - 1))
        sign = np.where(size == 0, 0, raw >> sign_bit & np.uint64(1)).astype(bool)
        # Copies of the sign are above the bits of the field that are in ``a``.
        available = np.where(pos >= bits, 0, np.minimum(n, np.uint64(bits) - np.minimum(pos, np.uint64(bits))))
        keep = _low_ones(available)
        field = np.where(sign, (field & keep) | ~keep, field & keep)
    return field.astype(U[bits])


def bfi(a: Array, b: Array, start: Any, length: Any) -> Array:
    """bfi: insert the low ``length`` bits of ``a`` into ``b`` at bit ``start``. Bits beyond the width of ``b`` are
    dropped."""
    bits = b.dtype.itemsize * 8
    # PTX reads only the lower 8 bits of start and length, as for bfe.
    pos = np.broadcast_to(np.asarray(start).astype(np.uint64) & np.uint64(255), b.shape)
    size = np.minimum(np.broadcast_to(np.asarray(length).astype(np.uint64) & np.uint64(255), b.shape), np.uint64(bits))
    shift = np.minimum(pos, np.uint64(63))
    mask = np.where(pos >= bits, np.uint64(0), _low_ones(size) << shift)
    return ((b.astype(np.uint64) & ~mask) | ((a.astype(np.uint64) << shift) & mask)).astype(b.dtype)


def popc(a: Array) -> Array:
    """popc: the number of one bits."""
    return np.bitwise_count(a).astype(np.uint32)


def clz(a: Array) -> Array:
    """clz: the number of leading zeros, by bisection."""
    bits = a.dtype.itemsize * 8
    # Invariant: the result is n minus the number of bits of ``rest`` without leading zeros. At the end, ``rest`` is 0
    # or 1.
    rest = a.astype(np.uint64)
    n = np.full(a.shape, bits, np.int64)
    for step in (32, 16, 8, 4, 2, 1):
        big = (rest >> np.uint64(step)) != 0
        n = np.where(big, n - step, n)
        rest = np.where(big, rest >> np.uint64(step), rest)
    return np.where(rest != 0, n - 1, n).astype(np.uint32)


def bfind(a: Array, amount: bool) -> Array:
    """bfind: the position of the most significant one bit (signed: of the highest bit that differs from the sign),
    0xFFFFFFFF if there is none. ``amount``: the result is not that position but the count of the left shift that moves
    this bit to the top."""
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
    """mul.hi: the upper half of the product of two arrays of the same type."""
    bits = a.dtype.itemsize * 8
    if bits <= 32:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return (a.astype(wide) * b.astype(wide) >> wide(bits)).astype(a.dtype)
    ua, ub = a.view(np.uint64), b.view(np.uint64)
    low = np.uint64(0xFFFFFFFF)
    s32 = np.uint64(32)
    # Schoolbook multiplication with digits of 32 bits. A product of two digits is at most (2**32 - 1)**2, so no sum of
    # such a product and two digits exceeds 64 bits.
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
    """div: the quotient rounded toward zero. A division by zero gives all ones, as current GPUs do."""
    if a.dtype.kind == "u":
        return np.asarray(
            np.where(b == 0, a.dtype.type(~a.dtype.type(0)), a // np.where(b == 0, 1, b).astype(a.dtype)).astype(
                a.dtype
            )
        )
    unsigned = U[a.dtype.itemsize * 8]
    # The magnitude of the least integer fits only in the unsigned type.
    ua, ub = np.abs(a).view(unsigned), np.abs(b).view(unsigned)
    q = (ua // np.where(ub == 0, 1, ub).astype(unsigned)).view(a.dtype)
    q = np.where((a < 0) != (b < 0), -q, q)
    return np.asarray(np.where(b == 0, a.dtype.type(-1), q).astype(a.dtype))


def remainder(a: Array, b: Array) -> Array:
    """rem: the remainder with the sign of the dividend. A division by zero gives the dividend."""
    if a.dtype.kind == "u":
        return np.where(b == 0, a, a % np.where(b == 0, 1, b).astype(a.dtype)).astype(a.dtype)
    unsigned = U[a.dtype.itemsize * 8]
    ua, ub = np.abs(a).view(unsigned), np.abs(b).view(unsigned)
    r = (ua % np.where(ub == 0, 1, ub).astype(unsigned)).view(a.dtype)
    return np.where(b == 0, a, np.where(a < 0, -r, r)).astype(a.dtype)


def divide_int(a: int, b: int) -> int:
    """div of uniform registers (Python ints): the quotient rounded toward zero. A division by zero gives -1, which is
    all ones in any width."""
    if b == 0:
        return -1
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


def remainder_int(a: int, b: int) -> int:
    """rem of uniform registers (Python ints): the remainder with the sign of the dividend. A division by zero gives the
    dividend."""
    if b == 0:
        return a
    r = abs(a) % abs(b)
    return -r if a < 0 else r


def saturate_add(a: Array, b: Array, subtract: bool) -> Array:
    """add.sat, or sub.sat (``subtract``): the sum or difference of int32, clamped to the range of int32."""
    wide = a.astype(np.int64) - b.astype(np.int64) if subtract else a.astype(np.int64) + b.astype(np.int64)
    return np.clip(wide, -(1 << 31), (1 << 31) - 1).astype(np.int32)


def add_carry(a: Array, b: Array, carry: Array | None, subtract: bool) -> tuple[Array, Array]:
    """add.cc, addc, or (``subtract``) sub.cc, subc: the sum or difference of unsigned arrays, and a bool array that
    says where there is a carry or borrow out. ``carry``: the carry or borrow in; None for none."""
    # A sum has wrapped around exactly if it is less than an addend. At most one of the two steps wraps around.
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
    """dp4a: the products of the four pairs of bytes of two words, added to the word ``c`` modulo 2**32."""
    x = a.view(np.int8 if signed_a else np.uint8).astype(np.int64).reshape(-1, 4)
    y = b.view(np.int8 if signed_b else np.uint8).astype(np.int64).reshape(-1, 4)
    return np.asarray(((x * y).sum(axis=1) + c.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32))


def dot2(a: Array, b: Array, c: Array, signed_a: bool, signed_b: bool, high: bool) -> Array:
    """dp2a: the products of the half-words of ``a`` and the two lower bytes (``high``: the two upper bytes) of ``b``,
    added to the word ``c`` modulo 2**32."""
    x = a.view(np.int16 if signed_a else np.uint16).astype(np.int64).reshape(-1, 2)
    y = b.view(np.int8 if signed_b else np.uint8).astype(np.int64).reshape(-1, 4)[:, 2 if high else 0 :][:, :2]
    return np.asarray(((x * y).sum(axis=1) + c.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32))


def bit_mask(start: Array, length: Array, clamp: bool) -> Array:
    """bmsk: words with ones in ``length`` bits from bit ``start`` on. Ones beyond bit 31 are dropped.

    ``clamp``: a start or length above 32 has the effect of 32. Otherwise both are taken modulo 32.
    """
    a, b = start.astype(np.uint64), length.astype(np.uint64)
    if not clamp:
        a, b = a & np.uint64(31), b & np.uint64(31)
    n = np.minimum(b, np.uint64(32))
    ones = (np.uint64(1) << n) - np.uint64(1)
    return np.where(a >= 32, 0, ones << np.minimum(a, np.uint64(32)) & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def extend(a: Array, length: Array, clamp: bool, signed: bool) -> Array:
    """szext: the lower ``length`` bits of ``a``, extended by the highest of them (``signed``) or by zeros.

    ``clamp``: a length above 32 has the effect of 32. Otherwise it is taken modulo 32.
    """
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
    """mul24: the product of the lower 24 bits of each factor, which are signed numbers if the arrays are signed. The
    result has the upper 32 of its 48 bits (``high``) or the lower 32."""
    # The two shifts replace the upper 8 bits by zeros, or by copies of bit 23 in a signed array.
    eight = a.dtype.type(8)
    wide = (a << eight >> eight).astype(np.int64) * (b << eight >> eight).astype(np.int64)
    return np.asarray((wide >> 16 if high else wide).astype(np.uint32))


def nth_set_bit(mask: Array, base: Array, offset: Array) -> Array:
    """fns: the position of the ``offset``-th set bit, counted from bit ``base`` upward, or downward if ``offset`` is
    negative. For 0 it is ``base`` if that bit is set. The result is 0xFFFFFFFF if there is no such bit."""
    n, start = offset.view(np.int32).astype(np.int64), base.astype(np.int64)
    out = np.full(mask.shape, 0xFFFFFFFF, np.uint32)
    # ``missing`` is how many set bits are still to be found. The bit that reduces it to 0 is the result; further set
    # bits make it negative. For the offset 0, only bit ``base`` is looked at.
    missing = np.maximum(np.abs(n), 1)
    for step in range(32):
        position = start + np.where(n < 0, -step, step)
        inside = (position >= 0) & (position < 32) & ((n != 0) | (step == 0))
        found = inside & (mask >> np.clip(position, 0, 31).astype(np.uint32) & np.uint32(1)).astype(bool)
        missing = missing - found
        out = np.where(found & (missing == 0), position, out).astype(np.uint32)
    return out
