"""Proves that wrong machine code is found by executing the PTX and the cubin and comparing what they write.

The code is wrong by planted errors of eleven kinds, or by known errors of ptxas.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from examples import miscompilations
from kernelproof import emulator
from kernelproof.emulator import Memory
from kernelproof.ground import toolchain
from tests.kernelproof.emulator.build import assemble

# Threads of a launch, each with an operand of its own.
LANES = 64
# A kernel around a text that computes from an operand.
KERNEL = """.version 8.7
.target {target}
.address_size 64
.visible .entry k(.param .u64 in, .param .u64 out)
{{
.reg .b64 %a<5>; .reg .b32 %r<20>; .reg .f32 %f<6>; .reg .b16 %h<5>; .reg .pred %p<3>;
.shared .align 4 .b8 buf[256];
ld.param.u64 %a0, [in]; ld.param.u64 %a1, [out]; mov.u32 %r0, %tid.x;
mul.wide.u32 %a2, %r0, 8; add.s64 %a3, %a0, %a2; mul.wide.u32 %a2, %r0, 16; add.s64 %a4, %a1, %a2;
ld.global.v2.b32 {{%r1, %r2}}, [%a3];
{body}
st.global.v4.b32 [%a4], {{%r8, %r9, %r10, %r11}}; ret;
}}
"""
# A body that uses each of two numbers in %r1 and %r2, and leaves four results in %r8 to %r11.
RIGHT = """mov.u32 %r12, buf; shl.b32 %r13, %r0, 2; add.s32 %r12, %r12, %r13; st.shared.b32 [%r12], %r1; bar.sync 0;
xor.b32 %r13, %r12, 128; ld.shared.b32 %r3, [%r13]; add.s32 %r3, %r3, 11;
sub.s32 %r4, %r2, %r3; neg.s32 %r5, %r1; max.s32 %r5, %r5, %r2; shr.s32 %r6, %r4, 3; setp.le.s32 %p0, %r1, %r2;
@%p0 add.s32 %r6, %r6, 100; cvt.rn.f32.s32 %f0, %r1; cvt.rn.f32.s32 %f1, %r4; fma.rn.f32 %f2, %f0, 0f3F8CCCCD, %f1;
cvt.u64.u32 %a2, %r13; mov.b32 %r8, %f2; mad.lo.s32 %r9, %r5, 3, %r6; mov.u32 %r10, %r4; and.b32 %r11, %r6, 65535;"""
# By error: a part of RIGHT, and the text that replaces it, as if the compiler had made the error.
PLANTED = {
    "a constant is dropped": ("add.s32 %r3, %r3, 11", "add.s32 %r3, %r3, 0"),
    "a sign is lost": ("neg.s32 %r5, %r1", "mov.b32 %r5, %r1"),
    "operands are exchanged": ("sub.s32 %r4, %r2, %r3", "sub.s32 %r4, %r3, %r2"),
    "another register is read": ("mad.lo.s32 %r9, %r5", "mad.lo.s32 %r9, %r4"),
    "a comparison is strict": ("setp.le.s32 %p0, %r1, %r2", "setp.lt.s32 %p0, %r1, %r2"),
    "a guard is inverted": ("@%p0 add", "@!%p0 add"),
    "a shift is unsigned": ("shr.s32", "shr.u32"),
    "a product is rounded of its own": (
        "fma.rn.f32 %f2, %f0, 0f3F8CCCCD, %f1", "mul.rn.f32 %f2, %f0, 0f3F8CCCCD; add.rn.f32 %f2, %f2, %f1",
    ),
    "a value is cut": ("and.b32 %r11, %r6, 65535", "and.b32 %r11, %r6, 255"),
    "a barrier is left out": ("bar.sync 0;", ""),
    "a store goes elsewhere": ("st.shared.b32 [%r12]", "st.shared.b32 [buf+252]"),
}  # fmt: skip


def words() -> np.ndarray:
    """Two int32 numbers per lane, of shape (LANES, 2): one from -32 up, and 6 in every third lane or else the same."""
    values = np.arange(-32, 32, dtype=np.int32).repeat(2).reshape(LANES, 2)
    values[::3, 1] = 6
    return values


def outcome(source: str | Path) -> tuple[bytes, set[str]]:
    """The bytes that a kernel writes, and the rules of its findings."""
    memory = Memory()
    out = memory.upload(np.zeros((LANES, 4), np.uint32), "output")
    result = emulator.load(source).launch("k", 1, LANES, [memory.upload(words()), out], memory=memory)
    return out.bytes().tobytes(), {report.kind for report in result.reports if report.is_error}


@pytest.mark.slow
def test_every_planted_miscompilation_is_found() -> None:
    right = KERNEL.format(target="sm_80", body=RIGHT)
    expected = outcome(right)
    assert outcome(assemble(right)) == expected
    for name, (old, new) in PLANTED.items():
        wrong = right.replace(old, new)
        assert wrong != right, name
        assert outcome(assemble(wrong)) != expected, name


# Releases of ptxas, and whether they are known to make the errors of examples/miscompilations.py.
WRONG, MENDED = {"12.8.93", "12.9.86", "13.0.88"}, {"13.4.59"}


def ptxas_here() -> dict[str, Path]:
    """The ptxas of the toolkit, and that of Triton, by version."""
    found = [toolchain.discover().ptxas]
    if (triton := importlib.util.find_spec("triton")) and triton.origin:
        found += Path(triton.origin).parent.glob("backends/nvidia/bin/ptxas-blackwell")
    return {miscompilations.version(ptxas): ptxas for ptxas in found}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "target"), [(body, target) for body, targets in miscompilations.KERNELS.values() for target in targets]
)
def test_a_known_miscompilation_is_found(body: str, target: str) -> None:
    ptx = miscompilations.text(body, target)
    for version, ptxas in ptxas_here().items():
        assert miscompilations.wrong_lanes(ptx, target, ptxas, 0) == 0
        wrong = miscompilations.wrong_lanes(ptx, target, ptxas, 3)
        if version in WRONG | MENDED:
            assert bool(wrong) == (version in WRONG), version
