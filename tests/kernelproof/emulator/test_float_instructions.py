"""Proves every floating-point instruction and conversion against a reference on exact fractions."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernelproof.emulator.lane_arithmetic import execute, signed, words

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


def test_packed_halves() -> None:
    h1, h2, h3, h7 = 0x3C00, 0x4000, 0x4200, 0x4700
    pair = h2 << 16 | h1
    assert execute("add.f16x2 %D, %A, %B;", 32, [(pair, pair, 0)]) == [0x4400 << 16 | h2]
    assert execute("fma.rn.f16x2 %D, %A, %B, %C;", 32, [(pair, h3 << 16 | h3, h1 << 16 | h1)]) == [h7 << 16 | 0x4400]
    assert execute("cvt.rn.f16x2.f32 %D, %A, %B;", 32, [(bits32(2), bits32(1), 0)]) == [pair]
    assert execute("cvt.rn.bf16x2.f32 %D, %A, %B;", 32, [(bits32(2), bits32(1), 0)]) == [0x4000 << 16 | 0x3F80]
    assert execute("fma.rn.relu.f16x2 %D, %A, %B, %C;", 32, [(pair, 0xC200 << 16 | h3, 0)]) == [h3]
