"""Proves every integer instruction against a reference on Python's big integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings

from kernelproof import emulator
from kernelproof.emulator import Memory
from tests.kernelproof.emulator.lane_arithmetic import EDGES, M32, M64, execute, signed, triples

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
