"""A small product by cp.async, ldmatrix and mma.sync with its contract, written for tests.

Two warps multiply a tile of 32 x 8 elements, 16 k at a time, from a ring of two stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kernelproof.certificates import Certificate, Claim, Program, Ring, prove
from kernelproof.certificates.launches import claims
from tests.kernelproof.certificates.subjects import Subject

CONTRACT = """
kernel = "k"
parameters = ["A", "B", "D", "m", "n", "k"]
result = "D(i,j) = sum over k of A(i,k) B(j,k)"

[sizes]
m = { multiple = 32, most = 1048576 }
n = { multiple = 8, most = 1048576 }
k = { multiple = 16, most = 1048576 }

[operands]
A = { type = "f16", shape = ["m", "k"] }
B = { type = "f16", shape = ["n", "k"] }
D = { type = "f16", shape = ["m", "n"] }

[launch]
grid = ["n / 8", "m / 32"]
block = [64]
tile = [32, 8]
"""
# A stage has 32 rows of A and then 8 of B, of 32 bytes each, whose halves are exchanged in rows 4 to 7 of each 8.
TEXT = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 d, .param .u32 m, .param .u32 n, .param .u32 k)
{
  .reg .pred %p<20>; .reg .b16 %h<4>; .reg .b32 %r<80>; .reg .f32 %f<8>; .reg .b64 %q<30>;
  .shared .align 128 .b8 s[2560];
  ld.param.u64 %q1, [a];
  ld.param.u64 %q2, [b];
  ld.param.u64 %q3, [d];
  ld.param.u32 %r1, [n];
  ld.param.u32 %r2, [k];
  mov.u32 %r3, %tid.x;
  mov.u32 %r4, %ctaid.x;
  mov.u32 %r5, %ctaid.y;
  mov.u32 %r6, s;
  shr.u32 %r7, %r3, 1;
  and.b32 %r8, %r3, 1;
  shl.b32 %r9, %r8, 3;
  cvt.u64.u32 %q4, %r9;
  cvt.u64.u32 %q5, %r2;
  shl.b32 %r10, %r5, 5;
  add.s32 %r10, %r10, %r7;
  cvt.u64.u32 %q6, %r10;
  mul.lo.s64 %q6, %q6, %q5;
  add.s64 %q6, %q6, %q4;
  shl.b64 %q6, %q6, 1;
  add.s64 %q6, %q1, %q6;
  shl.b32 %r11, %r4, 3;
  add.s32 %r11, %r11, %r7;
  cvt.u64.u32 %q7, %r11;
  mul.lo.s64 %q7, %q7, %q5;
  add.s64 %q7, %q7, %q4;
  shl.b64 %q7, %q7, 1;
  add.s64 %q7, %q2, %q7;
  shr.u32 %r12, %r7, 2;
  and.b32 %r12, %r12, 1;
  xor.b32 %r12, %r12, %r8;
  shl.b32 %r12, %r12, 4;
  shl.b32 %r13, %r7, 5;
  add.s32 %r13, %r13, %r12;
  add.s32 %r13, %r13, %r6;
  setp.lt.u32 %p1, %r3, 16;
  and.b32 %r14, %r3, 31;
  shr.u32 %r15, %r3, 5;
  and.b32 %r16, %r3, 15;
  shr.u32 %r17, %r14, 4;
  shr.u32 %r18, %r16, 2;
  and.b32 %r18, %r18, 1;
  xor.b32 %r17, %r17, %r18;
  shl.b32 %r17, %r17, 4;
  shl.b32 %r19, %r15, 4;
  add.s32 %r19, %r19, %r16;
  shl.b32 %r19, %r19, 5;
  add.s32 %r19, %r19, %r17;
  add.s32 %r19, %r19, %r6;
  and.b32 %r20, %r3, 7;
  shr.u32 %r21, %r16, 3;
  shr.u32 %r22, %r20, 2;
  xor.b32 %r21, %r21, %r22;
  shl.b32 %r21, %r21, 4;
  shl.b32 %r23, %r20, 5;
  add.s32 %r23, %r23, %r21;
  add.s32 %r23, %r23, %r6;
  mov.f32 %f1, 0f00000000;
  mov.f32 %f2, %f1;
  mov.f32 %f3, %f1;
  mov.f32 %f4, %f1;
  cp.async.cg.shared.global [%r13], [%q6], 16;
  @!%p1 bra FIRST;
  cp.async.cg.shared.global [%r13+1024], [%q7], 16;
FIRST:
  cp.async.commit_group;
  mov.u32 %r24, 0;
  mov.u32 %r25, 0;
MULTIPLY:
  add.s64 %q6, %q6, 32;
  add.s64 %q7, %q7, 32;
  add.s32 %r24, %r24, 16;
  xor.b32 %r26, %r25, 1;
  setp.ge.s32 %p2, %r24, %r2;
  @%p2 bra LOADED;
  mad.lo.s32 %r27, %r26, 1280, %r13;
  cp.async.cg.shared.global [%r27], [%q6], 16;
  @!%p1 bra LOADED;
  cp.async.cg.shared.global [%r27+1024], [%q7], 16;
LOADED:
  cp.async.commit_group;
  cp.async.wait_group 1;
  bar.sync 0;
  mad.lo.s32 %r28, %r25, 1280, %r19;
  mad.lo.s32 %r29, %r25, 1280, %r23;
  ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r30, %r31, %r32, %r33}, [%r28];
  ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r34, %r35}, [%r29+1024];
  mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
    {%f1, %f2, %f3, %f4}, {%r30, %r31, %r32, %r33}, {%r34, %r35}, {%f1, %f2, %f3, %f4};
  bar.sync 0;
  mov.u32 %r25, %r26;
  setp.lt.s32 %p3, %r24, %r2;
  @%p3 bra MULTIPLY;
  cp.async.wait_all;
  cvt.u64.u32 %q8, %r1;
  shr.u32 %r36, %r14, 2;
  shl.b32 %r37, %r15, 4;
  add.s32 %r36, %r36, %r37;
  shl.b32 %r38, %r5, 5;
  add.s32 %r36, %r36, %r38;
  cvt.u64.u32 %q9, %r36;
  mul.lo.s64 %q9, %q9, %q8;
  and.b32 %r39, %r14, 3;
  shl.b32 %r39, %r39, 1;
  shl.b32 %r40, %r4, 3;
  add.s32 %r39, %r39, %r40;
  cvt.u64.u32 %q10, %r39;
  add.s64 %q9, %q9, %q10;
  shl.b64 %q9, %q9, 1;
  add.s64 %q9, %q3, %q9;
  shl.b64 %q11, %q8, 4;
  add.s64 %q11, %q9, %q11;
  cvt.rn.f16x2.f32 %r41, %f2, %f1;
  cvt.rn.f16x2.f32 %r42, %f4, %f3;
  st.global.b32 [%q9], %r41;
  st.global.b32 [%q11], %r42;
END:
  ret;
}
"""
PRODUCT = Subject(TEXT, CONTRACT)


def proven(subject: Subject) -> Certificate:
    """The certificate of a subject, whose ring is stated so that none is searched for. Raises NotCertified."""

    def stated(program: Program) -> Iterator[Claim]:
        for claim in claims(subject.contract, program):
            assert isinstance(claim.ring, Ring)
            yield claim._replace(ring=replace(claim.ring, period=2, ahead=2))

    return prove(subject.ptx, stated)
