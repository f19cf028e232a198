"""A small kernel that multiplies by wgmma, alone or in clusters of two CTAs, with its contract, written for tests.

The first thread of a CTA loads, and a warpgroup multiplies tiles of 64 x 8 elements, 16 k at a time. Products of a
k-tile are in flight while the next k-tile is waited for. In a cluster, whose CTAs have tiles one below the other, each
CTA loads half of B to both.
"""

from __future__ import annotations

from kernelproof.certificates import Claim
from tests.kernelproof.certificates.stated_rings import StatedRing

ROWS, COLS, DEPTH, STAGES = 64, 8, 16, 2  # of a tile, of a k-tile, of the ring
STAGE = 2304  # bytes, of which 2048 are A's

# Shared memory: two stages; from 4608 on a buffer of D for each warp; from 5632 on the mbarriers of each stage.
TEXT = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 s[];
.visible .entry k(
  .param .align 64 .b8 a[128], .param .align 64 .b8 b[128], .param .align 64 .b8 d[128],
  .param .u32 tiles, .param .u32 steps)
.maxntid 256, 1, 1
LIMIT
{
  .reg .pred %p<20>; .reg .b16 %h<2>; .reg .b32 %r<80>; .reg .f32 %f<8>; .reg .b64 %q<8>;
  mov.u32 %r1, s;
  mov.u32 %r2, %tid.x;
  shr.u32 %r3, %r2, 5;
  and.b32 %r32, %r2, 31;
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
  mbarrier.init.shared::cta.b64 [%r1+5632], %r4;
  mbarrier.init.shared::cta.b64 [%r1+5640], %r5;
  mbarrier.init.shared::cta.b64 [%r1+5648], %r4;
  mbarrier.init.shared::cta.b64 [%r1+5656], %r5;
READY:
  fence.mbarrier_init.release.cluster;
  BARRIER
  griddepcontrol.wait;
  ld.param.u32 %r6, [tiles];
  ld.param.u32 %r7, [steps];
  mov.u32 %r8, %ctaid.x;
  mov.u32 %r9, %nctaid.x;
  RANK
  mov.u32 %r10, 0;
  setp.ge.u32 %p2, %r2, 128;
  @%p2 bra CONSUMER;
  FEWER
  setp.ne.u32 %p3, %r2, 0;
  @%p3 bra END;
  mov.u32 %r11, 1;
ITEM_P:
  TILE_P
  mov.u32 %r13, 0;
LOAD:
  shl.b32 %r14, %r10, 4;
  add.s32 %r15, %r1, %r14;
TRY_P:
  mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r15+5640], %r11;
  @!%p4 bra TRY_P;
  add.s32 %r16, %r15, 5632;
  mul.lo.s32 %r17, %r10, 2304;
  add.s32 %r17, %r1, %r17;
  add.s32 %r18, %r17, 2048;
  shl.b32 %r19, %r13, 4;
  mov.u32 %r20, 0;
  mov.u32 %r21, 2304;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r16], %r21;
  cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r17], [%q1, {%r19, %r12}], [%r16];
  LOAD_B
  add.s32 %r22, %r10, 1;
  setp.eq.s32 %p5, %r22, 2;
  selp.b32 %r10, 0, %r22, %p5;
  selp.u32 %r23, 1, 0, %p5;
  xor.b32 %r11, %r11, %r23;
  add.s32 %r13, %r13, 1;
  setp.lt.s32 %p6, %r13, %r7;
  @%p6 bra LOAD;
  add.s32 %r8, %r8, %r9;
  setp.lt.s32 %p7, %r8, %r6;
  @%p7 bra ITEM_P;
  DRAIN
  bra.uni END;
CONSUMER:
  MORE
  mov.u32 %r31, 0;
  mov.u32 %r56, 0;
  and.b32 %r33, %r2, 15;
  add.s32 %r41, %r3, -4;
  shl.b32 %r42, %r41, 8;
  add.s32 %r42, %r42, %r1;
  add.s32 %r42, %r42, 4608;
  shl.b32 %r43, %r33, 4;
  add.s32 %r43, %r43, %r42;
  setp.eq.s32 %p8, %r32, 0;
  RETURNS
ITEM_C:
  mov.u32 %r44, 0;
MULTIPLY:
  shl.b32 %r45, %r10, 4;
  add.s32 %r45, %r1, %r45;
TRY_C:
  mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r45+5632], %r31;
  @!%p9 bra TRY_C;
  mul.lo.s32 %r46, %r10, 2304;
  add.s32 %r46, %r46, %r1;
  shr.u32 %r47, %r46, 4;
  add.s32 %r47, %r47, 65536;
  add.s32 %r48, %r47, 128;
  mov.u32 %r49, 3221225488;
  mov.b64 %q5, {%r47, %r49};
  mov.b64 %q6, {%r48, %r49};
  setp.ne.s32 %p15, %r44, 0;
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %q5, %q6, %p15, 1, 1, 0, 0;
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 1;
  and.pred %p16, %p15, %p17;
  @!%p16 bra RETURNED;
  shl.b32 %r50, %r56, 4;
  add.s32 %r50, %r50, %r64;
  ARRIVE [%r50];
RETURNED:
  mov.u32 %r56, %r10;
  add.s32 %r57, %r10, 1;
  setp.eq.s32 %p10, %r57, 2;
  selp.b32 %r10, 0, %r57, %p10;
  selp.u32 %r58, 1, 0, %p10;
  xor.b32 %r31, %r31, %r58;
  add.s32 %r44, %r44, 1;
  setp.lt.s32 %p11, %r44, %r7;
  @%p11 bra MULTIPLY;
  wgmma.wait_group.sync.aligned 0;
  @!%p17 bra LAST;
  shl.b32 %r50, %r56, 4;
  add.s32 %r50, %r50, %r64;
  ARRIVE [%r50];
LAST:
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
  TILE_C
  shl.b32 %r61, %r41, 4;
  add.s32 %r60, %r60, %r61;
  mov.u32 %r61, 0;
  cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%q3, {%r61, %r60}], [%r42];
  cp.async.bulk.commit_group;
STORED:
  add.s32 %r8, %r8, %r9;
  setp.lt.s32 %p12, %r8, %r6;
  @%p12 bra ITEM_C;
  cp.async.bulk.wait_group.read 0;
END:
  ret;
}
"""
BOX = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
ALONE = {
    "ARRIVALS": "4",
    "BARRIER": "bar.sync 0;",
    "RANK": "",
    "LIMIT": "",
    "FEWER": "",
    "MORE": "",
    "TILE_P": "shl.b32 %r12, %r8, 6;",
    "LOAD_B": BOX + " [%r18], [%q2, {%r19, %r20}], [%r16];",
    "DRAIN": "",
    "RETURNS": "setp.eq.s32 %p17, %r32, 0; add.s32 %r64, %r1, 5640;",
    "ARRIVE": "mbarrier.arrive.shared::cta.b64 _,",
    "TILE_C": "shl.b32 %r60, %r8, 6;",
}
# What differs in a cluster. Lanes 0 and 1 of each warp hand a stage back, each to the CTA with its number.
IN_CLUSTER = {
    "ARRIVALS": "8",
    "BARRIER": "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;",
    "RANK": "shr.u32 %r8, %r8, 1; shr.u32 %r9, %r9, 1; mov.u32 %r70, %cluster_ctarank;",
    "TILE_P": "shl.b32 %r12, %r8, 7; shl.b32 %r71, %r70, 6; add.s32 %r12, %r12, %r71;",
    "LOAD_B": "mov.u16 %h1, 3; shl.b32 %r72, %r70, 7; add.s32 %r18, %r18, %r72; shl.b32 %r20, %r70, 2;\n  "
    + BOX + ".multicast::cluster [%r18], [%q2, {%r19, %r20}], [%r16], %h1;",
    "DRAIN": """shl.b32 %r73, %r10, 4; add.s32 %r73, %r73, %r1;
TRY_1:
  mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r73+5640], %r11;
  @!%p4 bra TRY_1;
  xor.b32 %r73, %r73, 16; xor.b32 %r11, %r11, %r10;
TRY_2:
  mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r73+5640], %r11;
  @!%p4 bra TRY_2;
""",
    "RETURNS": "setp.lt.s32 %p17, %r32, 2; add.s32 %r64, %r1, 5640; and.b32 %r65, %r32, 1;"
    " mapa.shared::cluster.u32 %r64, %r64, %r65;",
    "ARRIVE": "mbarrier.arrive.release.cluster.shared::cluster.b64 _,",
    "TILE_C": "shl.b32 %r60, %r8, 7; shl.b32 %r71, %r70, 6; add.s32 %r60, %r60, %r71;",
}  # fmt: skip
# Of 128 registers that a thread has, those of one warpgroup give 88 to those of the other one.
MOVED = {
    "LIMIT": ".minnctapersm 2",
    "FEWER": "setmaxnreg.dec.sync.aligned.u32 40;",
    "MORE": "setmaxnreg.inc.sync.aligned.u32 216;",
}


def text(ranks: int = 1, moved: bool = False) -> str:
    """The kernel's PTX. ``ranks``: the CTAs of a cluster. ``moved``: warpgroups move registers by setmaxnreg."""
    out = TEXT
    for name, part in (ALONE | (IN_CLUSTER if ranks > 1 else {}) | (MOVED if moved else {})).items():
        out = out.replace(name, part)
    return out


def claim(ranks: int = 1) -> Claim:
    """All launches of clusters of ``ranks`` CTAs."""
    stated = StatedRing(ROWS, COLS, DEPTH, STAGES, ((128, 256),), 5696, box_d=(16, COLS, 16), loaded_bytes=2176)
    return stated.claim(ranks)
