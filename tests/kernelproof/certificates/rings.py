"""A small kernel whose producer loads boxes by TMA into a ring of stages, with its contract, written for tests.

A CTA has a warp whose first thread loads, and one warp or two that multiply tiles of 16 x 8 elements, 16 k at a time.
Two warps take turns with tiles. Its proof takes milliseconds, since a tile is one mma.sync and there are two stages.
"""

from __future__ import annotations

from kernelproof.certificates import Claim, prove
from kernelproof.certificates.certificate import Certificate
from tests.kernelproof.certificates.stated_rings import StatedRing

ROWS, COLS, DEPTH, STAGES = 16, 8, 16, 2  # of a tile, of a k-tile, of the ring

# Shared memory: two stages of 768 bytes, of which 512 are A's; from 1536 on a buffer of D for each group; from 2048 on
# the mbarriers full and empty of each stage; from 2112 on those of turns.
SETUP = """
.version 8.7
.target sm_90
.address_size 64
.extern .shared .align 1024 .b8 s[];
.visible .entry k(
  .param .align 64 .b8 a[128], .param .align 64 .b8 b[128], .param .align 64 .b8 d[128],
  .param .u32 tiles, .param .u32 steps)
{
  .reg .pred %p<20>; .reg .b32 %r<80>; .reg .f32 %f<8>; .reg .b64 %q<8>;
  mov.u32 %r1, s;
  mov.u32 %r2, %tid.x;
  shr.u32 %r3, %r2, 5;
  mov.b64 %q1, a;
  cvta.param.u64 %q1, %q1;
  mov.b64 %q2, b;
  cvta.param.u64 %q2, %q2;
  mov.b64 %q3, d;
  cvta.param.u64 %q3, %q3;
  setp.ne.u32 %p1, %r2, 0;
  @%p1 bra READY;
  mov.u32 %r4, 1;
  mov.u32 %r5, ARRIVALS;
  mbarrier.init.shared::cta.b64 [%r1+2048], %r4;
  mbarrier.init.shared::cta.b64 [%r1+2056], %r5;
  mbarrier.init.shared::cta.b64 [%r1+2064], %r4;
  mbarrier.init.shared::cta.b64 [%r1+2072], %r5;
  TURNS
READY:
  fence.mbarrier_init.release.cluster;
  bar.sync 0;
  griddepcontrol.wait;
  ld.param.u32 %r6, [tiles];
  ld.param.u32 %r7, [steps];
  mov.u32 %r8, %ctaid.x;
  mov.u32 %r9, %nctaid.x;
  mov.u32 %r10, 0;
  setp.ge.u32 %p2, %r2, 32;
  @%p2 bra CONSUMER;
  setp.ne.u32 %p3, %r2, 0;
  @%p3 bra END;
"""
PRODUCER = """
  mov.u32 %r11, 1;
ITEM_P:
  shl.b32 %r12, %r8, 4;
  mov.u32 %r13, 0;
LOAD:
  shl.b32 %r14, %r10, 4;
  add.s32 %r15, %r1, %r14;
TRY_P:
  mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r15+2056], %r11;
  @!%p4 bra TRY_P;
  add.s32 %r16, %r15, 2048;
  mul.lo.s32 %r17, %r10, 768;
  add.s32 %r17, %r1, %r17;
  add.s32 %r18, %r17, 512;
  shl.b32 %r19, %r13, 4;
  mov.u32 %r20, 0;
  mov.u32 %r21, 768;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r16], %r21;
  cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r17], [%q1, {%r19, %r12}], [%r16];
  cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r18], [%q2, {%r19, %r20}], [%r16];
  add.s32 %r22, %r10, 1;
  setp.eq.s32 %p5, %r22, 2;
  selp.b32 %r10, 0, %r22, %p5;
  selp.u32 %r23, 1, 0, %p5;
  xor.b32 %r11, %r11, %r23;
  add.s32 %r13, %r13, 1;
  setp.lt.s32 %p6, %r13, %r7;
  @%p6 bra LOAD;
LOADED:
  add.s32 %r8, %r8, %r9;
  setp.lt.s32 %p7, %r8, %r6;
  @%p7 bra ITEM_P;
  bra.uni END;
"""
# The rows of a lane for ldmatrix: of A rows 0 to 15 and then their second 8 k, of B rows 0 to 7 of both halves of k.
CONSUMER = """
CONSUMER:
  mov.u32 %r31, 0;
  and.b32 %r32, %r2, 31;
  and.b32 %r33, %r2, 15;
  shl.b32 %r34, %r33, 5;
  shr.u32 %r35, %r32, 4;
  shr.u32 %r36, %r33, 2;
  and.b32 %r36, %r36, 1;
  xor.b32 %r35, %r35, %r36;
  shl.b32 %r35, %r35, 4;
  add.s32 %r34, %r34, %r35;
  add.s32 %r34, %r34, %r1;
  and.b32 %r37, %r2, 7;
  shl.b32 %r38, %r37, 5;
  shr.u32 %r39, %r33, 3;
  shr.u32 %r40, %r37, 2;
  xor.b32 %r39, %r39, %r40;
  shl.b32 %r39, %r39, 4;
  add.s32 %r38, %r38, %r39;
  add.s32 %r38, %r38, %r1;
  add.s32 %r41, %r3, -1;
  shl.b32 %r42, %r41, 8;
  add.s32 %r42, %r42, %r1;
  add.s32 %r42, %r42, 1536;
  shl.b32 %r43, %r33, 4;
  add.s32 %r43, %r43, %r42;
  setp.eq.s32 %p8, %r32, 0;
  FIRST
ITEM_C:
  MINE
  mov.f32 %f1, 0f00000000;
  mov.f32 %f2, %f1;
  mov.f32 %f3, %f1;
  mov.f32 %f4, %f1;
  mov.u32 %r44, 0;
MULTIPLY:
  shl.b32 %r45, %r10, 4;
  add.s32 %r45, %r1, %r45;
TRY_C:
  mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r45+2048], %r31;
  @!%p9 bra TRY_C;
  mul.lo.s32 %r46, %r10, 768;
  add.s32 %r47, %r46, %r34;
  add.s32 %r48, %r46, %r38;
  ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r50, %r51, %r52, %r53}, [%r47];
  ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r54, %r55}, [%r48+512];
  mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
    {%f1, %f2, %f3, %f4}, {%r50, %r51, %r52, %r53}, {%r54, %r55}, {%f1, %f2, %f3, %f4};
  bar.warp.sync -1;
  @!%p8 bra RETURNED;
  mbarrier.arrive.shared::cta.b64 _, [%r45+2056];
RETURNED:
  add.s32 %r56, %r10, 1;
  setp.eq.s32 %p10, %r56, 2;
  selp.b32 %r10, 0, %r56, %p10;
  selp.u32 %r57, 1, 0, %p10;
  xor.b32 %r31, %r31, %r57;
  add.s32 %r44, %r44, 1;
  setp.lt.s32 %p11, %r44, %r7;
  @%p11 bra MULTIPLY;
  HAND_ON
  @!%p8 bra OVER;
  cp.async.bulk.wait_group.read 0;
OVER:
  bar.warp.sync -1;
  cvt.rn.f16x2.f32 %r58, %f2, %f1;
  cvt.rn.f16x2.f32 %r59, %f4, %f3;
  stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r43], {%r58, %r59};
  fence.proxy.async.shared::cta;
  bar.warp.sync -1;
  @!%p8 bra STORED;
  shl.b32 %r60, %r8, 4;
  mov.u32 %r61, 0;
  cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%q3, {%r61, %r60}], [%r42];
  cp.async.bulk.commit_group;
STORED:
NEXT:
  add.s32 %r8, %r8, %r9;
  AFTER
  setp.lt.s32 %p12, %r8, %r6;
  @%p12 bra ITEM_C;
  cp.async.bulk.wait_group.read 0;
END:
  ret;
}
"""
# Of two groups that take turns: what is initialised, what a group begins with, what it does with an item that is not
# its own, how it waits for its turn, and how it hands the turn on.
IN_TURNS = {
    "TURNS": "mbarrier.init.shared::cta.b64 [%r1+2112], %r5; mbarrier.init.shared::cta.b64 [%r1+2120], %r5;",
    "FIRST": "mov.u32 %r62, 0; xor.b32 %r63, %r41, 1; shl.b32 %r64, %r41, 3; add.s32 %r65, %r64, %r1;"
    " sub.s32 %r66, %r1, %r64;",
    "MINE": """
  setp.eq.s32 %p13, %r62, %r41;
  @%p13 bra OWN;
  add.s32 %r67, %r10, %r7;
  and.b32 %r10, %r67, 1;
  shr.u32 %r68, %r67, 1;
  xor.b32 %r68, %r68, %r31;
  and.b32 %r31, %r68, 1;
  bra.uni NEXT;
OWN:
TRY_T:
  mbarrier.try_wait.parity.shared::cta.b64 %p14, [%r65+2112], %r63;
  @!%p14 bra TRY_T;
  xor.b32 %r63, %r63, 1;
""",
    "HAND_ON": "bar.warp.sync -1; @!%p8 bra HANDED; mbarrier.arrive.shared::cta.b64 _, [%r66+2120]; HANDED:",
    "AFTER": "xor.b32 %r62, %r62, 1;",
}


def text(turns: bool = False) -> str:
    """The kernel's PTX. ``turns``: with two warps that take turns with tiles, and not with one."""
    out = SETUP + PRODUCER + CONSUMER
    for name, part in IN_TURNS.items():
        out = out.replace(f"  {name}\n", f"  {part}\n" if turns else "")
    return out.replace("ARRIVALS", "1")


def claim(turns: bool = False) -> Claim:
    """All launches: any number of tiles, k-tiles and CTAs, of which none is without a tile."""
    groups = ((32, 64), (64, 96)) if turns else ((32, 64),)
    return StatedRing(ROWS, COLS, DEPTH, STAGES, groups, 2176, box_d=(ROWS, COLS, 16)).claim()


def proven(ptx: str, stated: Claim) -> Certificate:
    """The certificate of a text by a claim. Raises NotCertified."""
    return prove(ptx, lambda _program: [stated])
