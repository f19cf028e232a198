"""Proves what the mutants of statements compute, which is what the docstrings of the mutations say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kernelproof import emulator

# Numbers that no two of these results are equal for.
X, Y, Z, N, M = 3.1425, 1.4142135, -2.7182817, 1000, 96
KERNEL = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 out, .param .u32 n, .param .f32 x, .param .f32 y, .param .f32 z, .param .u64 m) {
  .reg .b32 %n, %r; .reg .f32 %x, %y, %z, %f; .reg .f64 %e, %g, %d; .reg .b16 %h; .reg .b64 %o, %m; .reg .pred %p;
  ld.param.u64 %o, [out];
  ld.param.f32 %x, [x];
  ld.param.f32 %y, [y];
  ld.param.f32 %z, [z];
  STATEMENT
  st.global.TYPE [%o], RESULT;
  ret;
}
"""


def f32(value: float) -> float:
    """The nearest fp32 number."""
    return float(np.float32(value))


SUM, PRODUCT = f32(X) + f32(Y), f32(X) * f32(Y)
# X rounded to the nearest fp16 number, which is larger than X.
X_IN_FP16 = float(np.float16(X))
WIDE = "cvt.f64.f32 %e, %x; cvt.f64.f32 %g, %y;"
INTEGERS = "mov.u32 %n, 1000; mov.u32 %r, 7;"
# A statement, with what is before it and after it; the register of its result and the register's type; that result, and
# by kind those of its mutants.
STATEMENTS = [
    ("", "add.f32 %f, %x, %y;", "", "%f", "f32", SUM, {"addend": f32(X), "twice": f32(SUM) + f32(Y)}),
    ("", "add.rn.f32 %f, %x, %y;", "", "%f", "f32", SUM, {"addend": f32(X), "twice": f32(SUM) + f32(Y)}),
    ("", "mul.f32 %f, %x, %y;", "", "%f", "f32", PRODUCT, {"factor": f32(X), "twice": f32(PRODUCT) * f32(Y)}),
    (
        "", "fma.rn.f32 %f, %x, %y, %z;", "", "%f", "f32", PRODUCT + f32(Z),
        {"addend": PRODUCT, "product": f32(Z), "twice": f32(PRODUCT + f32(Z)) + f32(Z)},
    ),
    (WIDE, "add.f64 %d, %e, %g;", "", "%d", "f64", SUM, {"addend": f32(X)}),
    (WIDE, "mul.f64 %d, %e, %g;", "", "%d", "f64", PRODUCT, {"factor": f32(X)}),
    ("", "min.NaN.f32 %f, %x, 0f7FC00000;", "", "%f", "f32", math.nan, {"nan": f32(X)}),
    ("", "max.f32 %f, %x, 0f7FC00000;", "", "%f", "f32", f32(X), {}),
    ("", "ld.param.u32 %n, [n];", "", "%n", "u32", N, {"nudge": N + 8}),
    ("", "ld.param.u64 %m, [m];", "", "%m", "u64", M, {"nudge": M + 8}),
    ("", "ld.param.f32 %f, [x];", "", "%f", "f32", f32(X), {}),
    (INTEGERS, "div.u32 %n, %n, %r;", "", "%n", "u32", 1000 // 7, {"first": 0}),
    (INTEGERS, "rem.u32 %n, %n, %r;", "", "%n", "u32", 1000 % 7, {"first": 0}),
    ("", "mov.u32 %n, %ctaid.x;", "", "%n", "u32", 4, {"first": 0}),
    (
        "", "cvt.rn.f16.f32 %h, %x;", "cvt.f32.f16 %f, %h;", "%f", "f32", X_IN_FP16,
        {"truncate": X_IN_FP16 - 2**-9, "retype": 2.142578125},
    ),
    ("mov.b16 %h, 0x4049;", "cvt.f32.bf16 %f, %h;", "", "%f", "f32", 3.140625, {"retype": 2.142578125}),
    ("mov.b16 %h, 0x4049;", "cvt.f32.f16 %f, %h;", "", "%f", "f32", 2.142578125, {"retype": 3.140625}),
    *(
        ("", f"setp.{test} %p, {a}, {b};", "selp.u32 %n, 1, 0, %p;", "%n", "u32", int(holds), {"compare": int(other)})
        for a, b in ((1, 2), (2, 2), (2, 1))
        for test, holds, other in (
            ("lt.s32", a < b, a <= b), ("le.s32", a <= b, a < b), ("gt.s32", a > b, a >= b),
            ("ge.s32", a >= b, a > b), ("eq.s32", a == b, a != b), ("ne.u32", a != b, a == b),
            ("lo.u32", a < b, a <= b), ("ls.u32", a <= b, a < b), ("hi.u32", a > b, a >= b), ("hs.u64", a >= b, a > b),
        )
    ),
    *(
        (
            f"mov.u32 %n, 5; setp.lt.s32 %p, {a}, {b};", f"@{mark}%p mov.u32 %n, 6;", "", "%n", "u32",
            6 if (a < b) != bool(mark) else 5, {"negate": 5 if (a < b) != bool(mark) else 6, "unguard": 6},
        )
        for a, b in ((1, 2), (2, 1))
        for mark in ("", "!")
    ),
    *(
        (
            f"mov.u32 %n, 5; setp.lt.s32 %p, {a}, {b};", f"@{mark}%p bra over;", "mov.u32 %n, 6; over:", "%n", "u32",
            5 if (a < b) != bool(mark) else 6, {"negate": 6 if (a < b) != bool(mark) else 5, "unguard": 5, "never": 6},
        )
        for a, b in ((1, 2), (2, 1))
        for mark in ("", "!")
    ),
]  # fmt: skip


def result_of(text: str, kind: str) -> float:
    """What the fifth CTA of a kernel stores."""
    memory = emulator.Memory()
    out = memory.upload(
        np.zeros(1, {"f32": np.float32, "f64": np.float64, "u32": np.uint32, "u64": np.uint64}[kind]), "inout"
    )
    result = emulator.load(text).launch("k", 5, 1, [out, N, X, Y, Z, M], memory=memory, ctas=[4])
    assert not [report for report in result.reports if report.is_error]
    return float(out.download()[0])


@pytest.mark.parametrize(("before", "statement", "after", "register", "kind", "right", "wrong"), STATEMENTS)
def test_a_mutant_computes_what_its_mutation_says(
    before: str, statement: str, after: str, register: str, kind: str, right: float, wrong: dict[str, float]
) -> None:
    text = KERNEL.replace("STATEMENT", f"{before}\n{statement}\n{after}").replace("TYPE", kind)
    text = text.replace("RESULT", register)
    exact = {"rel": {"f32": 1e-6, "f64": 1e-15}.get(kind, 0), "abs": 0, "nan_ok": True}
    assert result_of(text, kind) == pytest.approx(right, **exact)
    line = 1 + text.splitlines().index(statement)
    found = {m.kind: result_of(m.text, kind) for m in emulator.mutants(text, arithmetic=True) if m.line == line}
    assert found == pytest.approx(wrong, **exact)
    others = {m.kind for m in emulator.mutants(text) if m.line == line}
    assert others == wrong.keys() - emulator.ARITHMETIC
