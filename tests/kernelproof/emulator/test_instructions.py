"""Every arithmetic instruction against an independent reference on Python's big integers and exact fractions."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelproof import emulator
from kernelproof.emulator import Memory

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def signed(x: int, bits: int) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


@cache
def kernel(body: str, out: str, guard: str = "") -> emulator.Program:
    """A kernel whose lane t computes ``body`` from %a %b %c (b64 at 24 * t) as %A %B %C (b32), %h %k %l (b16), stores
    ``out`` (b64)."""
    text = f"""
.version 8.6
.target sm_90
.address_size 64
.visible .entry k(.param .u64 x, .param .u64 y) {{
  .reg .b32 %t, %A, %B, %C, %D, %E; .reg .b64 %a, %b, %c, %d, %p, %q, %o;
  .reg .b16 %h, %k, %l, %m; .reg .pred %P, %Q, %R;
  ld.param.u64 %p, [x];
  ld.param.u64 %q, [y];
  mov.u32 %t, %tid.x;
  mad.wide.u32 %p, %t, 24, %p;
  mad.wide.u32 %q, %t, 8, %q;
  ld.global.u64 %a, [%p];
  ld.global.u64 %b, [%p+8];
  ld.global.u64 %c, [%p+16];
  cvt.u32.u64 %A, %a;
  cvt.u32.u64 %B, %b;
  cvt.u32.u64 %C, %c;
  cvt.u16.u64 %h, %a;
  cvt.u16.u64 %k, %b;
  cvt.u16.u64 %l, %c;
  mov.b64 %o, 0;
  {body}
  {out}
  st.global.u64 [%q], %o;
  ret;
}}
"""
    return emulator.load(text)


OUT = {64: "mov.b64 %o, %d;", 32: "cvt.u64.u32 %o, %D;", 16: "cvt.u64.u16 %o, %m;", 1: "selp.b64 %o, 1, 0, %P;"}


def execute(body: str, width: int, triples: list[tuple[int, int, int]]) -> list[int]:
    memory = Memory()
    x = memory.upload(np.array(triples, np.uint64))
    y = memory.upload(np.empty(len(triples), np.uint64), "output")
    result = kernel(body, OUT[width]).launch("k", 1, len(triples), [x, y], memory=memory)
    by_zero = body[:4] in ("div.", "rem.") and ".f" not in body and any(b % (1 << width) == 0 for _, b, _ in triples)
    assert [report.kind for report in result.reports] == ["division-by-zero"] * by_zero
    return [int(v) for v in y.download()]


EDGES = [
    0,
    1,
    2,
    31,
    32,
    33,
    63,
    64,
    255,
    256,
    0x7F,
    0x80,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    M32,
    1 << 32,
    M64 >> 1,
    1 << 63,
    M64,
]
words = st.one_of(st.sampled_from(EDGES), st.integers(0, M64), st.integers(0, 100))
triples = st.lists(st.tuples(words, words, words), min_size=1, max_size=40)

Reference = Callable[[int, int, int], int]


def lop3(table: int) -> Reference:
    def f(a: int, b: int, c: int) -> int:
        return sum((table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32))

    return f


def prmt(a: int, b: int, c: int) -> int:
    pool, out = (b & M32) << 32 | a & M32, 0
    for i in range(4):
        s = c >> 4 * i & 15
        byte = pool >> 8 * (s & 7) & 255
        sign = 255 if byte & 128 else 0
        out |= (sign if s & 8 else byte) << 8 * i
    return out


def bfe(bits: int, sign: bool) -> Reference:
    def f(a: int, b: int, c: int) -> int:
        a &= (1 << bits) - 1
        pos, size = b & 255, c & 255
        fill = 0
        if sign and size:
            fill = a >> min(pos + size - 1, bits - 1) & 1
        return sum((a >> (pos + i) & 1 if i < size and pos + i < bits else fill) << i for i in range(bits))

    return f


def bfi(bits: int) -> Reference:
    def f(a: int, b: int, c: int) -> int:
        pos, size, out = c & 255, c >> 8 & 255, b & ((1 << bits) - 1)
        for i in range(size):
            if pos + i < bits:
                out = out & ~(1 << (pos + i)) | (a >> i & 1) << (pos + i)
        return out

    return f


def shift(bits: int, kind: str) -> Reference:
    def f(a: int, b: int, c: int) -> int:
        n = min(b & M32, bits)
        if kind == "shl":
            return a << n
        return (signed(a, bits) if kind == "shr.s" else a & ((1 << bits) - 1)) >> n

    return f


def funnel(left: bool, wrap: bool) -> Reference:
    def f(a: int, b: int, c: int) -> int:
        n = c & 31 if wrap else min(c & M32, 32)
        pair = (b & M32) << 32 | a & M32
        return (pair << n) >> 32 if left else pair >> n

    return f


def quotient(bits: int, sign: bool, rest: bool) -> Reference:
    def f(a: int, b: int, c: int) -> int:
        x, y = (signed(a, bits), signed(b, bits)) if sign else (a & ((1 << bits) - 1), b & ((1 << bits) - 1))
        if y == 0:
            return x if rest else -1
        q = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
        return x - q * y if rest else q

    return f


def bfind(bits: int, sign: bool) -> Reference:
    def f(a: int, b: int, c: int) -> int:
        x = signed(a, bits) if sign else a & ((1 << bits) - 1)
        return (~x if x < 0 else x).bit_length() - 1

    return f


INTEGER: list[tuple[str, int, Reference]] = []
for bits, d, a, b, c in ((32, "%D", "%A", "%B", "%C"), (64, "%d", "%a", "%b", "%c"), (16, "%m", "%h", "%k", "%l")):
    INTEGER += [
        (f"add.u{bits} {d}, {a}, {b};", bits, lambda a, b, c: a + b),
        (f"sub.s{bits} {d}, {a}, {b};", bits, lambda a, b, c: a - b),
        (f"sub.u{bits} {d}, {a}, 7;", bits, lambda a, b, c: a - 7),
        (f"add.s{bits} {d}, {a}, -5;", bits, lambda a, b, c: a - 5),
        (f"mul.lo.s{bits} {d}, {a}, {b};", bits, lambda a, b, c: a * b),
        (f"mad.lo.u{bits} {d}, {a}, {b}, {c};", bits, lambda a, b, c: a * b + c),
        (f"mul.hi.u{bits} {d}, {a}, {b};", bits, lambda a, b, c, n=bits: (a & (1 << n) - 1) * (b & (1 << n) - 1) >> n),
        (f"mul.hi.s{bits} {d}, {a}, {b};", bits, lambda a, b, c, n=bits: signed(a, n) * signed(b, n) >> n),
        (f"min.s{bits} {d}, {a}, {b};", bits, lambda a, b, c, n=bits: min(signed(a, n), signed(b, n))),
        (f"max.u{bits} {d}, {a}, {b};", bits, lambda a, b, c, n=bits: max(a & (1 << n) - 1, b & (1 << n) - 1)),
        (f"abs.s{bits} {d}, {a};", bits, lambda a, b, c, n=bits: abs(signed(a, n))),
        (f"neg.s{bits} {d}, {a};", bits, lambda a, b, c: -a),
        (f"and.b{bits} {d}, {a}, {b};", bits, lambda a, b, c: a & b),
        (f"or.b{bits} {d}, {a}, 0x55;", bits, lambda a, b, c: a | 0x55),
        (f"xor.b{bits} {d}, {a}, {b};", bits, lambda a, b, c: a ^ b),
        (f"not.b{bits} {d}, {a};", bits, lambda a, b, c: ~a),
        (f"cnot.b{bits} {d}, {a};", bits, lambda a, b, c, n=bits: int(a & (1 << n) - 1 == 0)),
        (f"shl.b{bits} {d}, {a}, %B;", bits, shift(bits, "shl")),
        (f"shr.u{bits} {d}, {a}, %B;", bits, shift(bits, "shr.u")),
        (f"shr.s{bits} {d}, {a}, %B;", bits, shift(bits, "shr.s")),
        (f"shl.b{bits} {d}, {a}, 13;", bits, lambda a, b, c: a << 13),
        (f"shr.s{bits} {d}, {a}, 9;", bits, lambda a, b, c, n=bits: signed(a, n) >> 9),
        (f"shr.s{bits} {d}, {a}, 99;", bits, lambda a, b, c, n=bits: signed(a, n) >> 99),
        (f"shl.b{bits} {d}, {a}, 64;", bits, lambda a, b, c: 0),
        (f"div.s{bits} {d}, {a}, {b};", bits, quotient(bits, True, False)),
        (f"div.u{bits} {d}, {a}, {b};", bits, quotient(bits, False, False)),
        (f"rem.s{bits} {d}, {a}, {b};", bits, quotient(bits, True, True)),
        (f"rem.u{bits} {d}, {a}, {b};", bits, quotient(bits, False, True)),
        (f"sad.s{bits} {d}, {a}, {b}, {c};", bits, lambda a, b, c, n=bits: abs(signed(a, n) - signed(b, n)) + c),
        (f"setp.lt.s{bits} %P, {a}, {b};", 1, lambda a, b, c, n=bits: signed(a, n) < signed(b, n)),
        (f"setp.ge.u{bits} %P, {a}, {b};", 1, lambda a, b, c, n=bits: a & (1 << n) - 1 >= b & (1 << n) - 1),
        (f"setp.hi.u{bits} %P, {a}, 33;", 1, lambda a, b, c, n=bits: a & (1 << n) - 1 > 33),
        (f"setp.gt.s{bits} %P, {a}, -3;", 1, lambda a, b, c, n=bits: signed(a, n) > -3),
        (f"setp.eq.b{bits} %Q, {b}, {c}; setp.ne.and.s{bits} %P|%R, {a}, {b}, !%Q;", 1,
         lambda a, b, c, n=bits: (a - b) % (1 << n) != 0 and (b - c) % (1 << n) != 0),
        (f"setp.lt.u{bits} %Q, {b}, {c}; setp.lt.xor.u{bits} %R|%P, {a}, {b}, %Q;", 1,
         lambda a, b, c, n=bits: (not (a & (1 << n) - 1 < b & (1 << n) - 1)) ^ (b & (1 << n) - 1 < c & (1 << n) - 1)),
        (f"setp.lt.s{bits} %P, {a}, {b}; selp.b{bits} {d}, {a}, {b}, %P;", bits,
         lambda a, b, c, n=bits: min(signed(a, n), signed(b, n))),
        (f"mov.b{bits} {d}, {a}; setp.lt.s{bits} %P, {a}, {b}; @%P mov.b{bits} {d}, {c};", bits,
         lambda a, b, c, n=bits: c if signed(a, n) < signed(b, n) else a),
        (f"mov.b{bits} {d}, {a}; setp.lt.s{bits} %P, {a}, {b}; @!%P add.s{bits} {d}, {d}, {c};", bits,
         lambda a, b, c, n=bits: a if signed(a, n) < signed(b, n) else a + c),
    ]  # fmt: skip
for bits, d, a, b, c in ((32, "%D", "%A", "%B", "%C"), (64, "%d", "%a", "%b", "%c")):
    INTEGER += [
        (f"popc.b{bits} %D, {a};", 32, lambda a, b, c, n=bits: (a & (1 << n) - 1).bit_count()),
        (f"clz.b{bits} %D, {a};", 32, lambda a, b, c, n=bits: n - (a & (1 << n) - 1).bit_length()),
        (f"brev.b{bits} {d}, {a};", bits, lambda a, b, c, n=bits: int(f"{a & (1 << n) - 1:0{n}b}"[::-1], 2)),
        (f"bfind.u{bits} %D, {a};", 32, bfind(bits, False)),
        (f"bfind.s{bits} %D, {a};", 32, bfind(bits, True)),
        (f"bfe.u{bits} {d}, {a}, %B, %C;", bits, bfe(bits, False)),
        (f"bfe.s{bits} {d}, {a}, %B, %C;", bits, bfe(bits, True)),
        (f"shr.u32 %E, %C, 8; bfi.b{bits} {d}, {a}, {b}, %C, %E;", bits, bfi(bits)),
        (f"add.cc.u{bits} {d}, {a}, {b}; addc.u{bits} {d}, {c}, 0;", bits,
         lambda a, b, c, n=bits: c + ((a & (1 << n) - 1) + (b & (1 << n) - 1) >> n)),
        (f"sub.cc.u{bits} {d}, {a}, {b}; subc.u{bits} {d}, {c}, 0;", bits,
         lambda a, b, c, n=bits: c - int(a & (1 << n) - 1 < b & (1 << n) - 1)),
    ]  # fmt: skip
INTEGER += [
    ("mul.wide.u32 %d, %A, %B;", 64, lambda a, b, c: (a & M32) * (b & M32)),
    ("mul.wide.s32 %d, %A, %B;", 64, lambda a, b, c: signed(a, 32) * signed(b, 32)),
    ("mul.wide.s32 %d, %A, -3;", 64, lambda a, b, c: signed(a, 32) * -3),
    ("mad.wide.s32 %d, %A, %B, %c;", 64, lambda a, b, c: signed(a, 32) * signed(b, 32) + c),
    ("mul.wide.s16 %D, %h, %k;", 32, lambda a, b, c: signed(a, 16) * signed(b, 16)),
    ("mul.wide.u16 %D, %h, %k;", 32, lambda a, b, c: (a & 0xFFFF) * (b & 0xFFFF)),
    ("mad.hi.s32 %D, %A, %B, %C;", 32, lambda a, b, c: (signed(a, 32) * signed(b, 32) >> 32) + c),
    ("add.sat.s32 %D, %A, %B;", 32, lambda a, b, c: max(-(1 << 31), min((1 << 31) - 1, signed(a, 32) + signed(b, 32)))),
    ("mad.lo.cc.u32 %D, %A, %B, %C; madc.hi.u32 %D, %A, %B, 0;", 32,
     lambda a, b, c: (((a & M32) * (b & M32) & M32) + (c & M32) >> 32) + ((a & M32) * (b & M32) >> 32)),
    ("add.cc.u32 %D, %A, %B; addc.cc.u32 %D, %C, 0; addc.u32 %D, %A, 0;", 32,
     lambda a, b, c: a + ((c & M32) + ((a & M32) + (b & M32) >> 32) >> 32)),
    ("sub.cc.u32 %D, %A, %B; subc.cc.u32 %D, %C, 0; subc.u32 %D, %A, 0;", 32,
     lambda a, b, c: a - int((c & M32) < int(a & M32 < b & M32))),
    ("lop3.b32 %D, %A, %B, %C, 0xE8;", 32, lop3(0xE8)),
    ("lop3.b32 %D, %A, %B, %C, 0x2D;", 32, lop3(0x2D)),
    ("prmt.b32 %D, %A, %B, %C;", 32, prmt),
    ("prmt.b32 %D, %A, %B, 0x7531;", 32, lambda a, b, c: prmt(a, b, 0x7531)),
    ("shf.l.wrap.b32 %D, %A, %B, %C;", 32, funnel(True, True)),
    ("shf.r.wrap.b32 %D, %A, %B, %C;", 32, funnel(False, True)),
    ("shf.l.clamp.b32 %D, %A, %B, %C;", 32, funnel(True, False)),
    ("shf.r.clamp.b32 %D, %A, %B, %C;", 32, funnel(False, False)),
    ("dp4a.s32.u32 %D, %A, %B, %C;", 32,
     lambda a, b, c: c + sum(signed(a >> 8 * i, 8) * (b >> 8 * i & 255) for i in range(4))),
    ("slct.b32.s32 %D, %A, %B, %C;", 32, lambda a, b, c: a if signed(c, 32) >= 0 else b),
    ("set.lt.u32.s32 %D, %A, %B;", 32, lambda a, b, c: M32 if signed(a, 32) < signed(b, 32) else 0),
    ("mov.b64 {%D, %E}, %a; sub.u32 %D, %E, %D;", 32, lambda a, b, c: (a >> 32) - a),
    ("mov.b64 %d, {%B, %A};", 64, lambda a, b, c: (a & M32) << 32 | b & M32),
    ("mov.b32 %D, {%h, %k};", 32, lambda a, b, c: (b & 0xFFFF) << 16 | a & 0xFFFF),
    ("mov.b32 {%m, %h}, %A; xor.b16 %m, %m, %h;", 16, lambda a, b, c: a ^ a >> 16),
    ("cvt.s32.s16 %D, %h;", 32, lambda a, b, c: signed(a, 16)),
    ("cvt.u32.u16 %D, %h;", 32, lambda a, b, c: a & 0xFFFF),
    ("cvt.s64.s32 %d, %A;", 64, lambda a, b, c: signed(a, 32)),
    ("cvt.s32.s8 %D, %A;", 32, lambda a, b, c: signed(a, 8)),
    ("cvt.u32.u8 %D, %A;", 32, lambda a, b, c: a & 255),
    ("cvt.s16.s8 %m, %A;", 16, lambda a, b, c: signed(a, 8)),
    ("cvt.sat.u8.s32 %D, %A;", 32, lambda a, b, c: max(0, min(255, signed(a, 32)))),
    ("cvt.sat.s16.s64 %D, %a;", 32, lambda a, b, c: max(-32768, min(32767, signed(a, 64)))),
    ("setp.lt.s32 %P, %A, %B; setp.gt.s32 %Q, %B, %C; and.pred %P, %P, %Q; not.pred %P, %P;", 1,
     lambda a, b, c: not (signed(a, 32) < signed(b, 32) > signed(c, 32))),
]  # fmt: skip


@pytest.mark.parametrize(("body", "width", "reference"), INTEGER, ids=[body for body, _, _ in INTEGER])
@settings(max_examples=12)
@given(cases=triples)
def test_integer(body: str, width: int, reference: Reference, cases: list[tuple[int, int, int]]) -> None:
    cases = cases + [(a, b, c) for a, b, c in zip(EDGES, EDGES[5:] + EDGES[:5], EDGES[11:] + EDGES[:11], strict=True)]
    cases += [(M64, 1, M64), (0, 1, 0), (M64, M64, M64)]
    mask = (1 << width) - 1
    assert execute(body, width, cases) == [int(reference(*case)) & mask for case in cases]


# --- floats
# ------------------------------------------------------------------------------------------------------------

FORMATS = {"f16": (10, 5), "bf16": (7, 8), "f32": (23, 8), "f64": (52, 11)}


def value(raw: int, kind: str) -> Fraction | str:
    """Raw bits -> the exact number, or ``nan``, ``inf``, ``-inf``."""
    mantissa, exponent = FORMATS[kind]
    sign = -1 if raw >> (mantissa + exponent) & 1 else 1
    e, m = raw >> mantissa & ((1 << exponent) - 1), raw & ((1 << mantissa) - 1)
    bias = (1 << (exponent - 1)) - 1
    if e == (1 << exponent) - 1:
        return "nan" if m else "inf" if sign > 0 else "-inf"
    if e == 0:
        return sign * Fraction(m, 1 << mantissa) * Fraction(2) ** (1 - bias)
    return sign * (1 + Fraction(m, 1 << mantissa)) * Fraction(2) ** (e - bias)


def rounded(x: Fraction, kind: str, mode: str = "rn") -> int:
    """The nearest raw bits of a number (the sign of zero is +)."""
    mantissa, exponent = FORMATS[kind]
    bias = (1 << (exponent - 1)) - 1
    sign, mag = (1, -x) if x < 0 else (0, x)
    if mag == 0:
        return 0
    e = max(mag.numerator.bit_length() - mag.denominator.bit_length() - 1, 1 - bias)
    while mag >= Fraction(2) ** (e + 1):
        e += 1
    unit = Fraction(2) ** (e - mantissa)
    n, rest = divmod(mag, unit)
    up = {
        "rn": rest * 2 > unit or (rest * 2 == unit and n % 2 == 1),
        "rz": False,
        "rm": bool(sign and rest),
        "rp": bool(not sign and rest),
    }[mode]
    n += up
    raw = int(n) + ((e + bias - 1) << mantissa)
    top = ((1 << exponent) - 1) << mantissa
    if raw >= top:
        toward_zero = mode == "rz" or (mode == "rm" and not sign) or (mode == "rp" and sign)
        raw = top - 1 if toward_zero else top
    return raw | sign << (mantissa + exponent)


def special(raw: int, kind: str) -> bool:
    return isinstance(value(raw, kind), str)


def floats(kind: str) -> st.SearchStrategy[int]:
    mantissa, exponent = FORMATS[kind]
    bits = 1 + mantissa + exponent
    unit = ((1 << (exponent - 1)) - 1) << mantissa
    # Neighbours of one, of the smallest and the largest numbers, and numbers of similar size.
    near = (
        st.integers(unit - 5, unit + 5)
        | st.integers(1, 5)
        | st.integers((1 << (bits - 1)) - (1 << mantissa) - 5, (1 << (bits - 1)) - (1 << mantissa) - 1)
    )
    similar = st.integers(unit - (3 << mantissa), unit + (3 << mantissa))
    return st.builds(
        lambda raw, sign: raw | sign << (bits - 1),
        near | similar | st.integers(0, (1 << (bits - 1)) - 1),
        st.integers(0, 1),
    )


def check(kind_out: str, got: int, want: Fraction, mode: str = "rn") -> None:
    expected = rounded(want, kind_out, mode)
    mantissa, exponent = FORMATS[kind_out]
    if want == 0:
        assert got & ((1 << (mantissa + exponent)) - 1) == 0
    else:
        assert got == expected, f"got {got:x} want {expected:x}"


FLOAT: list[tuple[str, str, Callable[[Fraction, Fraction, Fraction], Fraction | None], str]] = []
for kind, d, a, b, c in (
    ("f16", "%m", "%h", "%k", "%l"),
    ("bf16", "%m", "%h", "%k", "%l"),
    ("f32", "%D", "%A", "%B", "%C"),
    ("f64", "%d", "%a", "%b", "%c"),
):
    FLOAT += [
        (f"add.rn.{kind} {d}, {a}, {b};", kind, lambda x, y, z: x + y, "rn"),
        (f"sub.rn.{kind} {d}, {a}, {b};", kind, lambda x, y, z: x - y, "rn"),
        (f"mul.rn.{kind} {d}, {a}, {b};", kind, lambda x, y, z: x * y, "rn"),
        (f"fma.rn.{kind} {d}, {a}, {b}, {c};", kind, lambda x, y, z: x * y + z, "rn"),
        (f"neg.{kind} {d}, {a};", kind, lambda x, y, z: -x, "rn"),
        (f"abs.{kind} {d}, {a};", kind, lambda x, y, z: abs(x), "rn"),
        (f"min.{kind} {d}, {a}, {b};", kind, lambda x, y, z: min(x, y), "rn"),
        (f"max.{kind} {d}, {a}, {b};", kind, lambda x, y, z: max(x, y), "rn"),
    ]
FLOAT += [
    *((f"add.{mode}.f32 %D, %A, %B;", "f32", lambda x, y, z: x + y, mode) for mode in ("rz", "rm", "rp")),
    *((f"mul.{mode}.f32 %D, %A, %B;", "f32", lambda x, y, z: x * y, mode) for mode in ("rz", "rm", "rp")),
    *((f"fma.{mode}.f32 %D, %A, %B, %C;", "f32", lambda x, y, z: x * y + z, mode) for mode in ("rz", "rm", "rp")),
    ("div.rn.f32 %D, %A, %B;", "f32", lambda x, y, z: x / y if y else None, "rn"),
    ("rcp.rn.f32 %D, %A;", "f32", lambda x, y, z: 1 / x if x else None, "rn"),
    ("div.rn.f64 %d, %a, %b;", "f64", lambda x, y, z: x / y if y else None, "rn"),
    ("copysign.f32 %D, %A, %B;", "f32", lambda x, y, z: abs(y) * (1 if x > 0 else -1) if x and y else None, "rn"),
]


@pytest.mark.parametrize(("body", "kind", "reference", "mode"), FLOAT, ids=[f[0] for f in FLOAT])
@settings(max_examples=12)
@given(data=st.data())
def test_float(body: str, kind: str, reference: Any, mode: str, data: Any) -> None:
    numbers = floats(kind)
    cases = data.draw(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=24))
    cases = [case for case in cases if not any(special(x, kind) for x in case)] or [(0, 0, 0)]
    got = execute(body, {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}[kind], cases)
    for raw, case in zip(got, cases, strict=True):
        x, y, z = (value(v, kind) for v in case)
        want = reference(x, y, z)
        if want is not None:
            check(kind, raw, want, mode)


CONVERSIONS = [
    (dst, src, mode)
    for dst, src in [
        ("f16", "f32"),
        ("bf16", "f32"),
        ("f32", "f64"),
        ("f16", "f64"),
        ("f32", "f16"),
        ("f64", "f32"),
        ("f32", "bf16"),
        ("f64", "f16"),
    ]
    for mode in (
        ("rn", "rz", "rm", "rp")
        if (dst, src) in (("f32", "f64"), ("f16", "f32"))
        else ("rn", "rz")
        if dst == "bf16"
        else ("rn",)
    )
]


@pytest.mark.parametrize(("dst", "src", "mode"), CONVERSIONS)
@settings(max_examples=25)
@given(data=st.data())
def test_float_conversion(dst: str, src: str, mode: str, data: Any) -> None:
    out, inputs = (
        {"f16": "%m", "bf16": "%m", "f32": "%D", "f64": "%d"}[dst],
        {"f16": "%h", "bf16": "%h", "f32": "%A", "f64": "%a"}[src],
    )
    widening = (dst, src) in (("f32", "f16"), ("f64", "f32"), ("f32", "bf16"), ("f64", "f16"))
    drawn = value(data.draw(floats(dst)), dst)
    # Values next to one that the result can hold: ties and near ties.
    narrow = rounded(drawn, src) if isinstance(drawn, Fraction) and not widening else 0
    raws = [
        *data.draw(st.lists(floats(src), min_size=1, max_size=24)),
        *([] if special(narrow, src) else [narrow, narrow + 1, narrow | 1]),
    ]
    raws = [r for r in raws if not special(r, src)] or [0]
    body = f"cvt.{dst}.{src} {out}, {inputs};" if widening else f"cvt.{mode}.{dst}.{src} {out}, {inputs};"
    for raw, got in zip(
        raws, execute(body, {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}[dst], [(r, 0, 0) for r in raws]), strict=True
    ):
        check(dst, got, value(raw, src), mode)  # type: ignore[arg-type]


ROUND = {"rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil, "rni": round}


@pytest.mark.parametrize("mode", list(ROUND))
@pytest.mark.parametrize(
    ("dst", "src"),
    [("s32", "f32"), ("u32", "f32"), ("s64", "f64"), ("u64", "f32"), ("s16", "f16"), ("u8", "f32"), ("s32", "f64")],
)
@settings(max_examples=12)
@given(data=st.data())
def test_float_to_integer(dst: str, src: str, mode: str, data: Any) -> None:
    bits = int(dst[1:])
    raws = [r for r in data.draw(st.lists(floats(src), min_size=1, max_size=24)) if not special(r, src)] or [0]
    width = {8: 32, 16: 16, 32: 32, 64: 64}[bits]
    out = {16: "%m", 32: "%D", 64: "%d"}[width]
    got = execute(
        f"cvt.{mode}.{dst}.{src} {out}, {({'f16': '%h', 'f32': '%A', 'f64': '%a'})[src]};",
        width,
        [(r, 0, 0) for r in raws],
    )
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if dst[0] == "s" else (0, (1 << bits) - 1)
    for raw, result in zip(raws, got, strict=True):
        want = max(low, min(high, ROUND[mode](value(raw, src))))  # type: ignore[operator]
        assert result == want & ((1 << width) - 1)


@pytest.mark.parametrize(
    ("dst", "src", "mode"),
    [
        ("f32", "s32", "rn"),
        ("f32", "u64", "rn"),
        ("f32", "s64", "rz"),
        ("f16", "s32", "rn"),
        ("f64", "u64", "rn"),
        ("f32", "u32", "rp"),
        ("f64", "s32", "rn"),
    ],
)
@settings(max_examples=20)
@given(numbers=st.lists(words, min_size=1, max_size=30))
def test_integer_to_float(dst: str, src: str, mode: str, numbers: list[int]) -> None:
    bits = int(src[1:])
    out, inputs = {"f16": "%m", "f32": "%D", "f64": "%d"}[dst], {32: "%A", 64: "%a"}[bits]
    got = execute(
        f"cvt.{mode}.{dst}.{src} {out}, {inputs};", {"f16": 16, "f32": 32, "f64": 64}[dst], [(n, 0, 0) for n in numbers]
    )
    for n, raw in zip(numbers, got, strict=True):
        check(dst, raw, Fraction(signed(n, bits) if src[0] == "s" else n & ((1 << bits) - 1)), mode)


def bits32(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


NAN, INF, ZERO, MINUS = 0x7FC00000, 0x7F800000, 0, 0x80000000
COMPARISONS = {
    "lt": [0, 0, 1, 0, 0], "leu": [1, 1, 1, 1, 0], "eq": [0, 0, 0, 1, 0], "ne": [0, 0, 1, 0, 1], "neu": [1, 1, 1, 0, 1],
    "gt": [0, 0, 0, 0, 1], "num": [0, 0, 1, 1, 1], "nan": [1, 1, 0, 0, 0], "geu": [1, 1, 0, 1, 1],
}  # fmt: skip


@pytest.mark.parametrize("test", list(COMPARISONS))
def test_float_comparison(test: str) -> None:
    cases = [
        (NAN, bits32(1), 0),
        (bits32(2), NAN, 0),
        (bits32(1), bits32(2), 0),
        (ZERO, MINUS, 0),
        (INF, bits32(3e38), 0),
    ]
    assert execute(f"setp.{test}.f32 %P, %A, %B;", 1, cases) == COMPARISONS[test]


def test_float_specials() -> None:
    assert execute("min.f32 %D, %A, %B;", 32, [(NAN, bits32(1), 0), (ZERO, MINUS, 0)]) == [bits32(1), MINUS]
    assert execute("max.NaN.f32 %D, %A, %B;", 32, [(bits32(1), bits32(2), 0)]) == [bits32(2)]
    assert execute("mul.ftz.f32 %D, %A, %B;", 32, [(1, bits32(2), 0), (bits32(1e-30), bits32(1e-10), 0)]) == [0, 0]
    assert execute("add.sat.f32 %D, %A, %B;", 32, [(bits32(2), bits32(3), 0), (NAN, 0, 0), (bits32(-2), 0, 0)]) == [
        bits32(1),
        0,
        0,
    ]
    (got,) = execute("fma.rn.f32 %D, %A, %B, %C;", 32, [(INF, 0, 0)])
    assert got & 0x7FFFFFFF > INF
    assert execute("cvt.rzi.s32.f32 %D, %A;", 32, [(NAN, 0, 0), (INF, 0, 0)]) == [0, 0x7FFFFFFF]
    assert execute("testp.finite.f32 %P, %A;", 1, [(NAN, 0, 0), (INF, 0, 0), (1, 0, 0)]) == [0, 0, 1]


def test_subnormals_are_flushed_on_the_way_in() -> None:
    subnormal, least = 0x007FFFFF, 0x00800000
    for sign in (0, MINUS):
        cases = [(subnormal | sign, 0, 0), (least | sign, 0, 0)]
        assert execute("neg.ftz.f32 %D, %A;", 32, cases) == [sign ^ MINUS, least | (sign ^ MINUS)]
        assert execute("abs.ftz.f32 %D, %A;", 32, cases) == [0, least]
        assert execute("setp.ne.ftz.f32 %P, %A, %B;", 1, cases) == [0, 1]
        assert execute("setp.neu.ftz.f32 %P, %A, 0f00000000;", 1, cases) == [0, 1]
        assert execute("setp.ne.f32 %P, %A, %B;", 1, cases) == [1, 1]
    halves = [(0x03FF, 0x3C00, 0), (0x8400, 0x3C00, 0), (0x0401, 0x3800, 0)]
    assert execute("mul.ftz.f16 %m, %h, %k;", 16, halves) == [0, 0x8400, 0]
    assert execute("mul.f16 %m, %h, %k;", 16, halves) == [0x03FF, 0x8400, 0x0200]
    pairs = [(0x03FF8400, 0x3C003C00, 0)]
    assert execute("fma.rn.ftz.f16x2 %D, %A, %B, %C;", 32, pairs) == [0x8400]
    negative = [(bits32(5), bits32(7), 1 | MINUS)]
    assert execute("slct.ftz.f32.f32 %D, %A, %B, %C;", 32, negative) == [bits32(5)]
    assert execute("slct.f32.f32 %D, %A, %B, %C;", 32, negative) == [bits32(7)]
    assert execute("cvt.sat.f32.f16 %D, %h;", 32, [(0x4000, 0, 0), (0xC000, 0, 0)]) == [bits32(1), 0]


@pytest.mark.parametrize(
    ("statement", "modifier"),
    [
        ("cvt.rn.satfinite.f16.f32 %m, %A;", "satfinite"),
        ("cvt.rn.satfinite.bf16x2.f32 %D, %A, %B;", "satfinite"),
        ("cvt.rna.satfinite.tf32.f32 %D, %A;", "satfinite"),
        ("cvt.rn.relu.tf32.f32 %D, %A;", "relu"),
        ("cvt.pack.sat.s16.s32 %D, %A, %B;", "pack"),
        ("max.relu.s32 %D, %A, %B;", "relu"),
        ("fma.rn.oob.f16 %m, %h, %k, %l;", "oob"),
        ("add.f32.f16 %D, %h, %A;", "f32"),
        ("fma.rn.f32.bf16 %D, %h, %k, %A;", "f32"),
        ("set.eq.ftz.f16x2.f16x2 %D, %A, %B;", "ftz"),
    ],
)
def test_a_modifier_that_changes_the_result_is_refused(statement: str, modifier: str) -> None:
    with pytest.raises(emulator.UnknownInstruction, match=rf"\.{modifier} is not modelled: .*; modelled: "):
        execute(statement, 32, [(0, 0, 0)])


def test_packed_halves() -> None:
    h1, h2, h3, h7 = 0x3C00, 0x4000, 0x4200, 0x4700
    pair = h2 << 16 | h1
    assert execute("add.f16x2 %D, %A, %B;", 32, [(pair, pair, 0)]) == [0x4400 << 16 | h2]
    assert execute("fma.rn.f16x2 %D, %A, %B, %C;", 32, [(pair, h3 << 16 | h3, h1 << 16 | h1)]) == [h7 << 16 | 0x4400]
    assert execute("cvt.rn.f16x2.f32 %D, %A, %B;", 32, [(bits32(2), bits32(1), 0)]) == [pair]
    assert execute("cvt.rn.bf16x2.f32 %D, %A, %B;", 32, [(bits32(2), bits32(1), 0)]) == [0x4000 << 16 | 0x3F80]
    assert execute("fma.rn.relu.f16x2 %D, %A, %B, %C;", 32, [(pair, 0xC200 << 16 | h3, 0)]) == [h3]


def test_uniform_and_varying_values_agree() -> None:
    """The same chain on launch constants (Python ints) and on lanes (arrays)."""
    chain = """
  add.s32 %r2, %r1, -7; mul.lo.s32 %r3, %r2, 48271; shr.s32 %r4, %r3, 5; xor.b32 %r5, %r4, %r3; shl.b32 %r6, %r5, 3;
  div.s32 %r7, %r6, 77; rem.s32 %r8, %r6, 13; min.s32 %r9, %r7, %r8; abs.s32 %r10, %r9; neg.s32 %r11, %r10;
  not.b32 %r12, %r11;
  mul.hi.s32 %r13, %r12, %r6; mul.wide.s32 %rd5, %r13, %r6; cvt.u32.u64 %r14, %rd5; cvt.s64.s32 %rd6, %r14;
  shr.s64 %rd7, %rd6, 9;
  cvt.u32.u64 %r15, %rd7; setp.lt.s32 %p1, %r15, %r14; selp.b32 %r16, %r15, %r3, %p1; mad.lo.s32 %r17, %r16, 3, %r12;
  cvt.s32.s8 %r18, %r17;
  add.s32 %r19, %r18, %r17; sub.s32 %r20, %r19, %r16; cvt.u32.u16 %r21, %rs1; max.u32 %r22, %r20, %r21;
  cnot.b32 %r23, %r22; add.s32 %r24, %r22, %r23;
"""

    def source(first: str) -> str:
        return f""".version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 p, .param .u32 n) {{
  .reg .b32 %r<30>; .reg .b64 %rd<9>; .reg .b16 %rs<3>; .reg .pred %p<2>;
  ld.param.u64 %rd1, [p]; mov.u32 %r0, %tid.x; {first} cvt.u16.u32 %rs1, %r1; {chain}
  mul.wide.u32 %rd2, %r0, 4; add.s64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], %r24; ret;
}}
"""

    varying = "ld.param.u32 %r29, [n]; sub.s32 %r28, %r0, %r0; add.s32 %r1, %r29, %r28;"
    for n in (0, 1, 7, 1000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFF0, 123456789):
        results = []
        for first in ("ld.param.u32 %r1, [n];", varying):
            memory = Memory()
            out = memory.upload(np.empty(32, np.uint32), "output")
            assert emulator.load(source(first)).launch("k", 1, 32, [out, n], memory=memory).reports == []
            results.append(out.download())
        np.testing.assert_array_equal(results[0], results[1])
