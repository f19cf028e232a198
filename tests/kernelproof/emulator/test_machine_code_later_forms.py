"""Proves that instructions of sm_80 to sm_120 that few kernels have compute what their PTX computes."""

from __future__ import annotations

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import Device, Memory
from kernelproof.ground.chips import GPUS
from kernelproof.sass import disassemble
from tests.kernelproof.emulator.build import assemble
from tests.kernelproof.emulator.test_machine_code_forms import is_nan

# The beginning of a text, and a kernel with room for a body.
HEAD = """.version 8.8
.target TARGET
.address_size 64
.extern .shared .align 128 .b8 buf[];
"""
ENTRY = """.visible .entry NAME(.param .u64 pa, .param .u64 pb)
{
.reg .b32 %r<10>; .reg .f32 %f<4>; .reg .b64 %a<4>; .reg .b64 %d<4>; .reg .b16 %h<4>; .reg .pred %p<4>; .reg .b32 %s<3>;
.local .align 16 .b8 array[64];
ld.param.u64 %a0, [pa]; ld.param.u64 %a1, [pb]; mov.u32 %r8, %tid.x; mul.wide.u32 %a2, %r8, 32;
add.s64 %a0, %a0, %a2; add.s64 %a1, %a1, %a2;
ld.global.v4.b32 {%r0,%r1,%r2,%r3}, [%a0]; ld.global.v4.b32 {%r4,%r5,%r6,%r7}, [%a0+16];
mov.b32 %f0, %r0; mov.b32 %f1, %r1; mov.b32 %f2, %r2; mov.b64 %d0, {%r0,%r1}; mov.b64 %d1, {%r2,%r3};
mov.b64 %d2, {%r4,%r5}; mov.b32 {%h0,%h1}, %r0; mov.u32 %s0, buf; shl.b32 %s1, %r8, 5; add.s32 %s1, %s0, %s1;
BODY
st.global.v4.b32 [%a1], {%r0,%r1,%r2,%r3}; ret;
}
"""
# A device of each target, and groups of targets.
GPU = {"sm_80": "a100", "sm_90a": "h200", "sm_100a": "b200", "sm_120a": "rtx5090"}
ALL, LATER, BLACKWELL = tuple(GPU), tuple(GPU)[1:], ("sm_100a", "sm_120a")
# Results in four registers, and moves of one f32, of 64 bits and of a half into them.
WORDS = "{%r0,%r1,%r2,%r3}"
SINGLE, PAIR, HALF = " mov.b32 %r0, %f2;", " mov.b64 {%r0,%r1}, %d3;", " cvt.u32.u16 %r0, %h2;"
MMA = f"mma.sync.aligned.SHAPE.row.col.TYPES {WORDS}, {{A}}, {{B}}, {WORDS};"


def mma(shape: str, types: str, left: int, right: int) -> str:
    """An mma.sync with so many registers of A and of B."""
    a, b = (", ".join(f"%r{(first + i) % 8}" for i in range(count)) for first, count in ((4, left), (1, right)))
    return MMA.replace("SHAPE", shape).replace("TYPES", types).replace("A}", f"{a}}}").replace("B}", f"{b}}}")


# %r9: the mask of the lanes whose number has the same remainder by 3, so a warp has three groups.
GROUPS = "mov.u32 %r9, %laneid; rem.u32 %r9, %r9, 3; mov.u32 %r4, 0x49249249; shl.b32 %r9, %r4, %r9; "

# PTX, an opcode to which ptxas translates it, and the targets on which it does.
FORMS = {
    "bytes": (mma("m16n8k32", "s32.s8.u8.s32", 4, 2), "IMMA.16832.S8.U8", ALL),
    "few bytes": (mma("m16n8k16", "s32.u8.s8.s32", 2, 1), "IMMA.16816.U8.S8", ALL),
    "saturated": (
        mma("m16n8k32", "s32.s8.s8.s32", 4, 2).replace("row.col", "row.col.satfinite"), "IMMA.16832.S8.S8.SAT", ALL,
    ),
    "eight bits": (
        mma("m16n8k32", "f32.e4m3.e5m2.f32", 4, 2).replace("{%r0,%r1,%r2,%r3}, {", "{%f0,%f1,%f2,%f3}, {")
        .replace("}, {%r0,%r1,%r2,%r3};", "}, {%f0,%f1,%f2,%f3}; mov.b32 %r0, %f0;"),
        "QMMA.16832.F32.E4M3.E5M2", ("sm_120a",),
    ),
    "nibbles": (mma("m16n8k64", "s32.s4.u4.s32", 4, 2), "IMMA.16864.S4.U4", ("sm_80",)),
    "sum of pairs": ("add.rz.f32x2 %d3, %d0, %d1;" + PAIR, "FADD2.RZ", ("sm_100a",)),
    "product of pairs": ("mul.ftz.f32x2 %d3, %d0, %d1;" + PAIR, "FMUL2.FTZ", ("sm_100a",)),
    "fma of pairs": ("fma.rn.f32x2 %d3, %d0, %d1, %d2;" + PAIR, "FFMA2", ("sm_100a",)),
    "least of three": ("min.f32 %f2, %f0, %f1, %f2;" + SINGLE, "FMNMX3", ("sm_100a",)),
    "most of three": ("max.NaN.f32 %f2, %f0, %f1, %f2;" + SINGLE, "FMNMX3.NAN", ("sm_100a",)),
    "least of halves": ("min.s16x2 %r0, %r1, %r2;", "VIMNMX.S16x2", LATER),
    "most of halves": ("max.u16x2 %r0, %r1, %r2;", "VIMNMX.U16x2", LATER),
    "halves above zero": ("max.relu.s16x2 %r0, %r1, %r2;", "VIMNMX.S16x2.RELU", LATER),
    "saturated byte": ("cvt.sat.u8.s32 %r0, %r1;", "I2I.U8.S32.SAT", ALL),
    "saturated signed half": ("cvt.sat.s16.s32 %h2, %r1; cvt.s32.s16 %r0, %h2;", "I2I.S16.S32.SAT", ALL),
    "bf16 of s32": ("cvt.rp.bf16.s32 %h2, %r1;" + HALF, "I2F.BF16.RP", LATER),
    "s32 of bf16": ("cvt.rmi.s32.bf16 %r0, %h0;", "F2I.BF16.FLOOR.NTZ", LATER),
    "tanh of halves": ("tanh.approx.f16x2 %r0, %r1;", "MUFU.TANH.F16", ALL),
    "tanh of bf16": ("tanh.approx.bf16x2 %r0, %r1;", "MUFU.TANH.BF16", LATER),
    "ex2 of halves": ("ex2.approx.f16x2 %r0, %r1;", "MUFU.EX2.F16", ALL),
    "ex2 of bf16": ("ex2.approx.ftz.bf16x2 %r0, %r1;", "MUFU.EX2.BF16", LATER),
    "match": ("and.b32 %r0, %r0, 1; mov.b64 %d0, {%r0, %r0}; match.any.sync.b64 %r0, %d0, -1;", "MATCH.ANY.U64", ALL),
    "least of a warp": ("redux.sync.min.u32 %r0, %r1, -1;", "CREDUX.MIN", ("sm_100a",)),
    "most of a warp": ("redux.sync.max.s32 %r0, %r1, -1;", "CREDUX.MAX.S32", ("sm_100a",)),
    "bf16 atomic": ("st.global.b32 [%a1+16], %r1; atom.global.add.noftz.bf16x2 %r0, [%a1+16], %r2;",
                    "ATOMG.E.ADD.BF16x2.RN.STRONG.GPU", LATER),
    "shared atomic": ("st.shared.b32 [%s1], %r0; atom.shared.add.f32 %f2, [%s1], %f1; ld.shared.b32 %r0, [%s1];",
                      "ATOMS.CAST.SPIN", BLACKWELL),
    "vote": ("setp.lt.s32 %p0, %r0, %r1; activemask.b32 %r2; vote.sync.ballot.b32 %r0, %p0, %r2;", "", ALL),
    "votes of groups": (
        f"{GROUPS}setp.lt.s32 %p0, %r0, %r1; vote.sync.ballot.b32 %r0, %p0, %r9; vote.sync.any.pred %p1, %p0, %r9;"
        " selp.b32 %r1, 1, 2, %p1;", "WARPSYNC.EXCLUSIVE", LATER,
    ),
    "votes of groups without exclusion": (
        f"{GROUPS}setp.lt.s32 %p0, %r0, %r1; vote.sync.ballot.b32 %r0, %p0, %r9;", "BRA.DIV", ("sm_80",),
    ),
    "sums of groups": (f"{GROUPS}redux.sync.add.s32 %r0, %r1, %r9;", "WARPSYNC.EXCLUSIVE", ALL),
    "matches in groups": (f"{GROUPS}and.b32 %r0, %r0, 1; match.any.sync.b32 %r0, %r0, %r9;", "MATCH.ANY", ALL),
    "leaders of groups": (
        f"{GROUPS}elect.sync %r0|%p1, %r9; selp.b32 %r1, 1, 2, %p1;", "WARPSYNC.EXCLUSIVE", LATER,
    ),
    "sum of a pair in memory": (
        "st.global.v4.b32 [%a1+16], {%r4,%r5,%r6,%r7}; atom.global.v2.f32.add {%f1,%f2}, [%a1+16], {%f0,%f1};"
        " mov.b32 %r0, %f1; mov.b32 %r1, %f2;", "ATOMG.E.ADD.F32x2.FTZ.RN.STRONG.GPU", LATER,
    ),
    "sums in memory": (
        "st.global.v4.b32 [%a1+16], {%r4,%r5,%r6,%r7};"
        " red.global.v4.f16x2.add.noftz [%a1+16], {%r0,%r1,%r2,%r3};", "REDG.E.ADD.F16x8.RN.STRONG.GPU", LATER,
    ),
    "saturated sum": ("add.sat.s32 %r0, %r0, %r1;", "", ALL),
    "saturated difference": ("sub.sat.s32 %r0, %r0, %r1;", "", ALL),
    "halves toward zero": ("cvt.rz.relu.f16x2.f32 %r0, %f0, %f1;", "F2FP.RELU.F16.F32.PACK_AB.RZ", LATER),
    "finite halves": ("cvt.rn.satfinite.f16x2.f32 %r0, %f0, %f1;", "F2FP.SATFINITE.F16.F32.PACK_AB", LATER),
    "finite bf16": ("cvt.rz.satfinite.bf16x2.f32 %r0, %f0, %f1;", "F2FP.SATFINITE.BF16.F32.PACK_AB.RZ", LATER),
    "one half": ("cvt.rn.relu.f16.f32 %h2, %f0;" + HALF, "F2FP.RELU.F16.F32.MERGE_C", LATER),
    "e4m3": ("cvt.rn.satfinite.relu.e4m3x2.f32 %h2, %f0, %f1;" + HALF,
             "F2FP.SATFINITE.RELU.E4M3.F32.PACK_AB_MERGE_C", LATER),
    "e5m2": ("cvt.rn.satfinite.e5m2x2.f32 %h2, %f0, %f1;" + HALF, "F2FP.SATFINITE.E5M2.F32.PACK_AB_MERGE_C", LATER),
    "e4m3 of halves": ("cvt.rn.satfinite.e4m3x2.f16x2 %h2, %r1;" + HALF,
                       "F2FP.SATFINITE.E4M3.F16.UNPACK_B_MERGE_C", LATER),
    "halves of e4m3": ("cvt.rn.f16x2.e4m3x2 %r0, %h0;", "F2FP.F16.E4M3.UNPACK_B", LATER),
    "halves of e5m2": ("cvt.rn.relu.f16x2.e5m2x2 %r0, %h0;", "F2FP.RELU.F16.E5M2.UNPACK_B", LATER),
    "tf32": ("cvt.rn.tf32.f32 %r0, %f0;", "F2FP.TF32.F32.PACK_B", LATER),
    "tf32 toward zero": ("cvt.rz.relu.tf32.f32 %r0, %f0;", "F2FP.RELU.TF32.F32.PACK_B.RZ", LATER),
    "sign of a product": ("min.xorsign.abs.f32 %f2, %f0, %f1;" + SINGLE, "FMNMX.XORSIGN", LATER),
    "signs of products": ("max.NaN.xorsign.abs.f16x2 %r0, %r1, %r2;", "HMNMX2.NAN.XORSIGN", LATER),
    "one if less": ("set.lt.f32.f32 %f2, %f0, %f1;" + SINGLE, "FSET.BF.LT.AND", LATER),
    "256 bits": (
        "ld.global.v8.b32 {%r7,%r6,%r5,%r4,%r3,%r2,%r1,%r0}, [%a0]; add.u32 %r7, %r7, 1;"
        " st.global.v8.b32 [%a1], {%r0,%r1,%r2,%r3,%r4,%r5,%r6,%r7};", "LDG.E.ENL2.256", BLACKWELL,
    ),
    "generic local": (
        "mov.u64 %a3, array; cvta.local.u64 %a3, %a3; and.b32 %r4, %r0, 3; mul.wide.u32 %a2, %r4, 4;"
        " add.s64 %a3, %a3, %a2; st.b32 [%a3+4], %r1; ld.b32 %r0, [%a3+4];", "", ALL,
    ),
}  # fmt: skip


# PTX that computes the same where the emulator does not execute that of the form.
SCALAR = {
    "least of three": "min.f32 %f0, %f0, %f1; min.f32 %f2, %f0, %f2; mov.b32 %r0, %f2;",
    "most of three": "max.NaN.f32 %f0, %f0, %f1; max.NaN.f32 %f2, %f0, %f2; mov.b32 %r0, %f2;",
    "sum of pairs": "add.rz.f32 %f0, %f0, %f2; mov.b32 %r0, %f0; mov.b32 %f1, %r1; mov.b32 %f2, %r3;"
    " add.rz.f32 %f1, %f1, %f2; mov.b32 %r1, %f1;",
    "product of pairs": "mul.ftz.f32 %f0, %f0, %f2; mov.b32 %r0, %f0; mov.b32 %f1, %r1; mov.b32 %f2, %r3;"
    " mul.ftz.f32 %f1, %f1, %f2; mov.b32 %r1, %f1;",
    "fma of pairs": "mov.b32 %f3, %r4; fma.rn.f32 %f0, %f0, %f2, %f3; mov.b32 %r0, %f0; mov.b32 %f2, %r3;"
    " mov.b32 %f3, %r5; fma.rn.f32 %f1, %f1, %f2, %f3; mov.b32 %r1, %f1;",
}


def text_of(target: str, bodies: list[str]) -> str:
    """A kernel for each body."""
    entries = [ENTRY.replace("NAME", f"k{number}").replace("BODY", body) for number, body in enumerate(bodies)]
    return HEAD.replace("TARGET", target) + "".join(entries)


@pytest.mark.slow
@pytest.mark.parametrize("target", ALL)
def test_each_form_computes_what_its_ptx_computes(target: str) -> None:
    forms = {name: form for name, form in FORMS.items() if target in form[2]}
    cubin = assemble(text_of(target, [body for body, _, _ in forms.values()]), target=target)
    ptx = emulator.load(text_of(target, [SCALAR.get(name, body) for name, (body, _, _) in forms.items()]))
    code = emulator.load(cubin)
    opcodes = {function.name: {ins.opcode for ins in function.instructions} for function in disassemble(cubin)}
    words = np.random.default_rng(4).integers(0, 1 << 32, (32, 8), np.uint32)
    words[:6] = np.array([0, 1, 0x3F800000, 0xBC003C00, 0x80000000, 0x7F800001, 77, 0xFFFFFF80], np.uint32)
    for number, (name, (_, opcode, _)) in enumerate(forms.items()):
        assert not opcode or opcode in opcodes[f"k{number}"], (name, sorted(opcodes[f"k{number}"]))
        results = []
        for program in (ptx, code):
            memory = Memory()
            out = memory.upload(np.full((32, 8), 5, np.uint32), "inout")
            result = program.launch(
                f"k{number}", 1, 32, [memory.upload(words), out], memory=memory, shared_bytes=1024,
                device=Device.of(GPUS[GPU[target]]),
            )  # fmt: skip
            results.append((out.download(), [report.kind for report in result.reports]))
        (expected, of_ptx), (found, of_code) = results
        assert (expected[:, :4] != 5).any(), name
        wrong = (expected != found) & ~(nan(expected) & nan(found))
        assert np.argwhere(wrong).tolist() == [], name
        assert (name, of_ptx) == (name, of_code)


def nan(words: np.ndarray) -> np.ndarray:
    """A mask of the words that ``is_nan`` calls NaN in each half of the eight words of a thread."""
    return np.concatenate([is_nan(np.ascontiguousarray(part)) for part in (words[:, :4], words[:, 4:])], axis=1)
