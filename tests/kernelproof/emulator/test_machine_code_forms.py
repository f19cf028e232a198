"""Proves that single instructions of machine code compute what their PTX computes, and that a module's data is found.

The data are constant banks, variables, jump tables and functions.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import Memory
from kernelproof.sass import disassemble
from tests.kernelproof.emulator import drawn_programs
from tests.kernelproof.emulator.build import assemble

# A module's variables, constants and function.
HEAD = """.version 8.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 buf[];
.const .align 4 .b32 table[8] = {3, 1, 4, 1, 5, 9, 2, 6};
.const .align 4 .b32 single = 77;
.global .align 4 .b32 state[4] = {11, 22, 33, 44};
.global .align 4 .b32 zeroed[2];
.global .align 8 .u64 pointer = state;
.func (.param .b32 result) helper (.param .b32 x)
{ .reg .b32 %v; ld.param.b32 %v, [x]; mul.lo.s32 %v, %v, %v; add.s32 %v, %v, 3; st.param.b32 [result], %v; ret; }
"""
# A kernel loads four words into %r0 to %r3, of which %f0, %f1, %d0 and %d1 have the bits, and stores these registers
# after the body. %s0 is the start of shared memory, and %s1 the thread's 8 bytes in it.
ENTRY = """.visible .entry NAME(.param .u64 pa, .param .u64 pb)
{
.reg .b32 %r<8>; .reg .f32 %f<4>; .reg .f64 %d<4>; .reg .b64 %a<6>; .reg .pred %p<4>; .reg .b32 %s<4>;
.local .align 16 .b8 array[256];
ld.param.u64 %a0, [pa]; ld.param.u64 %a1, [pb]; mov.u32 %r7, %tid.x; mul.wide.u32 %a2, %r7, 32; add.s64 %a0, %a0, %a2;
mul.wide.u32 %a2, %r7, 16; add.s64 %a1, %a1, %a2;
ld.global.v4.b32 {%r0,%r1,%r2,%r3}, [%a0];
mov.b32 %f0, %r0; mov.b32 %f1, %r1; mov.b64 %d0, {%r0,%r1}; mov.b64 %d1, {%r2,%r3};
mov.u32 %s0, buf; shl.b32 %s1, %r7, 3; add.s32 %s1, %s0, %s1;
BODY
st.global.v4.b32 [%a1], {%r0,%r1,%r2,%r3}; ret;
}
"""
# Returns the double in %d2.
TWO = "mov.b64 {%r0,%r1}, %d2; "
# Makes %a3 a generic address, of shared memory in some threads and of global memory in the others.
SOMEWHERE = (
    "mov.u64 %a3, buf; cvta.shared.u64 %a3, %a3; cvt.u64.u32 %a4, %r7; shl.b64 %a4, %a4, 3; add.s64 %a3, %a3, %a4;"
    " and.b32 %r4, %r0, 1; setp.eq.s32 %p0, %r4, 0; selp.b64 %a3, %a3, %a1, %p0; "
)
# By name: PTX, and an opcode to which ptxas translates it; "" if no opcode shows it.
FORMS = {
    "dp4a s": ("dp4a.s32.s32 %r0, %r1, %r2, %r3;", "IDP.4A.S8.S8"),
    "dp4a u": ("dp4a.u32.u32 %r0, %r1, %r2, %r3;", "IDP.4A.U8.U8"),
    "dp4a mixed": ("dp4a.u32.s32 %r0, %r1, %r2, %r3;", "IDP.4A.U8.S8"),
    "dp2a low": ("dp2a.lo.s32.s32 %r0, %r1, %r2, %r3;", "IDP.2A.LO.S16.S8"),
    "dp2a high": ("dp2a.hi.u32.u32 %r0, %r1, %r2, %r3;", "IDP.2A.HI.U16.U8"),
    "sad s": ("sad.s32 %r0, %r1, %r2, %r3;", "VABSDIFF"),
    "sad u": ("sad.u32 %r0, %r1, %r2, %r3;", "VABSDIFF.U32"),
    "add.f64": ("add.rn.f64 %d2, %d0, %d1; " + TWO, "DADD"),
    "add.f64 literal": ("add.rz.f64 %d2, %d0, 0d4008000000000000; " + TWO, "DADD.RZ"),
    "mul.f64 negative": ("neg.f64 %d1, %d1; mul.rm.f64 %d2, %d0, %d1; " + TWO, "DMUL.RM"),
    "fma.f64": ("fma.rn.f64 %d2, %d0, %d1, 0d400921FB54442D18; " + TWO, "DFMA"),
    "setp.f64": (
        "abs.f64 %d0, %d0; setp.gtu.f64 %p0, %d0, 0d7FF0000000000000; selp.b32 %r0, 1, 2, %p0;",
        "DSETP.GTU.AND",
    ),
    "min.f64": ("min.f64 %d2, %d0, %d1; " + TWO, "DSETP.MIN.AND"),
    "max.f64": ("max.f64 %d2, %d0, %d1; " + TWO, "DSETP.MAX.AND"),
    "rcp.f64": ("rcp.approx.ftz.f64 %d2, %d0; " + TWO, "MUFU.RCP64H"),
    "rsqrt.f64": ("abs.f64 %d0, %d0; rsqrt.approx.ftz.f64 %d2, %d0; " + TWO, "MUFU.RSQ64H"),
    "cvt to f64": ("cvt.f64.f32 %d2, %f0; " + TWO, "F2F.F64.F32"),
    "cvt from f64": ("cvt.rn.f32.f64 %f2, %d0; mov.b32 %r0, %f2;", "F2F.F32.F64"),
    "cvt of s64": ("mov.b64 %a3, %d0; cvt.rn.f64.s64 %d2, %a3; " + TWO, "I2F.F64.S64"),
    "cvt to s32": ("cvt.rzi.s32.f64 %r0, %d0;", "F2I.F64.TRUNC"),
    "floor": ("cvt.rmi.f64.f64 %d2, %d0; " + TWO, "FRND.F64.FLOOR"),
    "setp.f16x2": (
        "setp.gt.f16x2 %p0|%p1, %r0, %r1; selp.b32 %r0, 1, 2, %p0; selp.b32 %r1, 1, 2, %p1;",
        "HSETP2.GT.AND",
    ),
    "set.f16x2": ("set.le.f16x2.f16x2 %r0, %r1, %r2;", "HSET2.BF.LE.AND"),
    "min.f16x2": ("min.f16x2 %r0, %r1, %r2;", "HMNMX2"),
    "max.NaN.f16x2": ("max.NaN.f16x2 %r0, %r1, %r2;", "HMNMX2.NAN"),
    "count": ("setp.gt.s32 %p0, %r0, %r1; barrier.red.popc.u32 %r0, 0, %p0;", "BAR.RED.POPC.DEFER_BLOCKING"),
    "any": (
        "setp.eq.s32 %p0, %r0, %r1; barrier.red.or.pred %p1, 0, %p0; selp.b32 %r0, 1, 0, %p1;",
        "BAR.RED.OR.DEFER_BLOCKING",
    ),
    "all": (
        "setp.ne.s32 %p0, %r0, %r1; barrier.red.and.pred %p1, 0, !%p0; selp.b32 %r0, 1, 0, %p1;",
        "BAR.RED.AND.DEFER_BLOCKING",
    ),
    "atom.cas shared": (
        "st.shared.b64 [%s1], %d0; atom.shared.add.f32 %f2, [%s1], %f1; ld.shared.v2.b32 {%r0,%r1}, [%s1];",
        "ATOMS.CAST.SPIN",
    ),
    "atom.add.f64 shared": (
        "st.shared.b64 [%s1], %d0; atom.shared.add.f64 %d2, [%s1], %d1; ld.shared.v2.b32 {%r0,%r1}, [%s1];",
        "ATOMS.CAST.SPIN.64",
    ),
    "atom.inc of all": (
        "mov.u32 %r4, 0; st.shared.b32 [%s0], %r4; bar.sync 0; red.shared.add.u32 [%s0], 1; bar.sync 0;"
        " ld.shared.b32 %r0, [%s0];",
        "ATOMS.POPC.INC.32",
    ),
    "generic": (
        SOMEWHERE + "st.b32 [%a3], %r1;"
        " ld.b32 %r2, [%a3]; isspacep.shared %p1, %a3; selp.b32 %r3, 1, 0, %p1;",
        "QSPC.E.S",
    ),
    "copy of a part": (
        "and.b32 %r4, %r0, 15; cvta.to.global.u64 %a3, %a0; shl.b32 %r5, %r7, 3; add.s32 %s1, %s1, %r5;"
        " cp.async.cg.shared.global [%s1], [%a3], 16, %r4; cp.async.commit_group; cp.async.wait_group 0;"
        " ld.shared.v4.b32 {%r0,%r1,%r2,%r3}, [%s1];",
        "LDGSTS.E.BYPASS.128.ZFILL",
    ),
    "copy or zeros": (
        "and.b32 %r4, %r0, 4; cvta.to.global.u64 %a3, %a0; cp.async.ca.shared.global [%s1], [%a3], 4, %r4;"
        " cp.async.commit_group; cp.async.wait_group 0; ld.shared.b32 %r0, [%s1];",
        "LDGSTS.E",
    ),
    "cas": (
        "atom.global.cas.b32 %r0, [%a1], 0, %r2; atom.global.cas.b64 %a3, [%a1+8], 0, %d1; mov.b64 {%r1,%r3}, %a3;",
        "ATOMG.E.CAS.STRONG.GPU",
    ),
    "guarded atomics": (
        "mov.u32 %r4, 5; st.shared.v2.b32 [%s0], {%r4,%r4}; bar.sync 0; and.b32 %r4, %r0, 1; setp.eq.s32 %p0, %r4, 0;"
        " @%p0 red.shared.add.u32 [%s0+4], %r2; @%p0 red.shared.max.u32 [%s0], %r2; bar.sync 0;"
        " ld.shared.v2.b32 {%r0,%r1}, [%s0];",
        "ATOMS.ADD",
    ),
    "generic atomic": (
        SOMEWHERE + "st.b32 [%a3], %r1;"
        " red.add.noftz.f16x2 [%a3], %r2; ld.b32 %r0, [%a3];",
        "ATOM.E.ADD.F16x2.RN.STRONG.GPU",
    ),
    "vabsdiff4": ("vabsdiff4.u32.u32.u32 %r0, %r1, %r2, %r3;", "VABSDIFF4.U8"),
    "vabsdiff4 sum": ("vabsdiff4.u32.u32.u32.add %r0, %r1, %r2, %r3;", "VABSDIFF4.U8.ACC"),
    "setp of a magnitude": (
        "abs.f16x2 %r0, %r0; setp.geu.f16x2 %p0|%p1, %r0, %r1; selp.b32 %r0, 1, 2, %p0; selp.b32 %r1, 1, 2, %p1;",
        "HSETP2.GEU.AND",
    ),
    "array": (
        "".join(f"st.local.v4.b32 [array+{16 * i}], {{%r0,%r1,%r2,%r3}}; add.s32 %r0, %r0, 1;" for i in range(16))
        + " and.b32 %r4, %r3, 252; mov.u32 %r5, array; add.s32 %r5, %r5, %r4; st.local.b32 [%r5], %r4;"
        " and.b32 %r4, %r2, 252; mov.u32 %r5, array; add.s32 %r5, %r5, %r4; ld.local.b32 %r0, [%r5];",
        "STL.128",
    ),
    "constant": ("ld.const.b32 %r0, [single]; ld.const.b32 %r1, [table+8];", ""),
    "indexed constant": (
        "and.b32 %r4, %r0, 7; mul.wide.u32 %a3, %r4, 4; mov.u64 %a4, table; add.s64 %a4, %a4, %a3;"
        " ld.const.b32 %r0, [%a4];",
        "LDC",
    ),
    "variable": ("ld.global.b32 %r0, [state+4]; ld.global.b32 %r1, [zeroed+4];", ""),
    "pointer": ("ld.global.u64 %a3, [pointer]; ld.global.b32 %r0, [%a3+12];", ""),
    "table": (
        "and.b32 %r4, %r0, 3; TABLE: .branchtargets L0, L1, L2, L3; brx.idx %r4, TABLE; L0: add.s32 %r1, %r1, 5; bra E;"
        " L1: mul.lo.s32 %r1, %r1, %r2; bra E; L2: xor.b32 %r1, %r1, %r3; bra E; L3: not.b32 %r1, %r1; E:",
        "BRX",
    ),
    "call": (
        "{ .param .b32 x; .param .b32 y; st.param.b32 [x], %r1; call (y), helper, (x); ld.param.b32 %r1, [y]; }"
        " { .param .b32 x; .param .b32 y; st.param.b32 [x], %r2; call (y), helper, (x); ld.param.b32 %r2, [y]; }",
        "CALL.REL.NOINC",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def forms() -> tuple[emulator.Program, Path]:
    """All forms as kernels of one file: its PTX, and its cubin."""
    names = [f"k{number}" for number in range(len(FORMS))]
    entries = [
        ENTRY.replace("NAME", name).replace("BODY", body) for name, (body, _) in zip(names, FORMS.values(), strict=True)
    ]
    text = HEAD + "".join(entries)
    return emulator.load(text), assemble(text)


def run(program: emulator.Program, kernel: str, words: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """The words that a kernel writes, and the rules of its findings."""
    memory = Memory()
    out = memory.upload(np.zeros((len(words), 4), np.uint32), "inout")
    result = program.launch(kernel, 1, len(words), [memory.upload(words), out], memory=memory, shared_bytes=1024)
    return out.bytes().view(np.uint32).reshape(len(words), 4).copy(), [report.kind for report in result.reports]


def is_nan(words: np.ndarray) -> np.ndarray:
    """A mask of the words that are NaN in any form: as a double of the first two words, which concerns all words of the
    thread, as singles, or as halves."""
    doubles = np.repeat(np.isnan(np.ascontiguousarray(words[:, :2]).view(np.float64)), 4, axis=1)
    halves = np.isnan(words.view(np.float16)).reshape(len(words), 4, 2).any(axis=2)
    both: np.ndarray = doubles | np.isnan(words.view(np.float32)) | halves
    return both


@pytest.mark.slow
def test_each_form_computes_what_its_ptx_computes(forms: tuple[emulator.Program, Path]) -> None:
    ptx, cubin = forms
    code = emulator.load(cubin)
    opcodes = {function.name: {ins.opcode for ins in function.instructions} for function in disassemble(cubin)}
    words = drawn_programs.operands(3)
    words[:8, :4] = np.array([0, 0x3FF00000, 0, 0x80000000], np.uint32)  # doubles 1 and -0
    for number, (name, (_, opcode)) in enumerate(FORMS.items()):
        assert not opcode or opcode in opcodes[f"k{number}"], (name, sorted(opcodes[f"k{number}"]))
        (expected, of_ptx), (result, of_code) = (run(program, f"k{number}", words) for program in (ptx, code))
        wrong = (expected != result) & ~(is_nan(expected) & is_nan(result))
        assert np.argwhere(wrong).tolist() == [], name
        assert (name, of_ptx) == (name, of_code)
