"""Proves that readings of the upper bits of generic addresses are found, and that address arithmetic is none."""

from __future__ import annotations

import pytest

from kernelproof.emulator import load
from kernelproof.emulator.frontend.flow.windows import window_readings
from kernelproof.emulator.frontend.ptx import Instr

# %a is a generic address of shared memory, %b is a second one, %l one of local memory, and %g is a pointer argument.
PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 g) {{
    .local .align 8 .b8 depot[16];
    .shared .align 4 .b8 s[64];
    .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %a, %b, %l, %g, %t<9>; .reg .f32 %f<3>;
    mov.u64 %t1, s;
    cvta.shared.u64 %a, %t1;
    add.s64 %b, %a, 16;
    mov.u64 %t2, depot;
    cvta.local.u64 %l, %t2;
    ld.param.u64 %t3, [g];
    cvta.to.global.u64 %g, %t3;
    {lines}
    ret;
}}
"""
# Lines that read upper bits, and lines that do not.
READINGS = [
    "shr.u64 %t4, %a, 56;", "shr.u64 %t4, %l, 24;", "shr.u64 %t4, %b, %r1;", "bfe.u64 %t4, %a, 40, 8;",
    "and.b64 %t4, %a, -72057594037927936;", "setp.gt.u64 %p1, %b, 281474976710656;", "clz.b64 %r1, %a;",
    "mov.b64 {%r1, %r2}, %a; st.global.u32 [%g], %r2;", "cvt.rn.f32.u64 %f1, %l;",
    "mad.wide.u32 %t4, %r1, 4, %a; xor.b64 %t5, %t4, 1; shr.u64 %t6, %t5, 32;",
    "@%p1 mov.u64 %t4, %a; selp.b64 %t5, %t4, %g, %p2; shr.s64 %t6, %t5, 30;",
]  # fmt: skip
# Texts that look at bits of an address that do not tell its window, or do not look at all.
HONEST = [
    "sub.s64 %t4, %b, %a; shr.u64 %t5, %t4, 40;", "shr.u64 %t4, %g, 56;", "shr.u64 %t4, %a, 23;",
    "and.b64 %t4, %a, 127; shr.u64 %t5, %t4, 30;", "and.b64 %t4, %a, -16; st.u32 [%t4], %r1;",
    "setp.eq.s64 %p1, %a, 0;", "setp.eq.s64 %p1, %a, %b;", "cvt.u32.u64 %r1, %a; shr.u32 %r2, %r1, 24;",
    "cvta.to.shared.u64 %t4, %a; shr.u64 %t5, %t4, 24;", "mov.b64 {%r1, %r2}, %a; st.global.u32 [%g], %r1;",
    "ld.u64 %t4, [%a]; shr.u64 %t5, %t4, 56;", "cvt.u64.u32 %t4, %r1; shr.u64 %t5, %t4, 24;",
]  # fmt: skip


def readings(lines: str) -> int:
    """How many instructions of the kernel with these lines read a window."""
    kernel = load(PTX.format(lines=lines)).module.kernels["k"]
    return len(window_readings([item for item in kernel.body if isinstance(item, Instr)]))


@pytest.mark.parametrize("lines", READINGS)
def test_upper_bits_are_read(lines: str) -> None:
    assert readings(lines) == 1


@pytest.mark.parametrize("lines", HONEST)
def test_addresses_are_computed(lines: str) -> None:
    assert readings(lines) == 0
