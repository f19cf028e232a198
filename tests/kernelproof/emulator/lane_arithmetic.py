"""Runs a statement of PTX on triples of numbers, one lane each: for tests of arithmetic instructions."""

from __future__ import annotations

from functools import cache

import numpy as np
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
