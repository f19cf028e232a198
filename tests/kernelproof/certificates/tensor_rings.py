"""A small kernel whose accumulators are in tensor memory, alone or in a pair of CTAs, with its contract.

One thread of a CTA loads, another one multiplies tiles of 128 x 16 elements, 16 k at a time, and four warps store the
sums of a tile while the next one is multiplied. In a pair, the first CTA multiplies for both, whose tiles lie one below
the other, and each CTA loads half of B.
"""

from __future__ import annotations

from kernelproof.certificates import Claim, TensorPlan
from tests.kernelproof.certificates.stated_rings import StatedRing

ROWS, COLS, DEPTH, STAGES, PLACES = 128, 16, 16, 2, 2  # of a tile, of a k-tile, of the ring, of accumulators

# Shared memory: two stages of 4608 bytes, of which 4096 are A's; from 9216 on a buffer of D for each warp; from 13312
# on the mbarriers full and empty of each stage, then summed and stored of each place; at 13376 the address of tensor
# memory.
TEXT = """
.version 8.7
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 s[];
.visible .entry k(
  .param .align 64 .b8 a[128], .param .align 64 .b8 b[128], .param .align 64 .b8 d[128],
  .param .u32 tiles, .param .u32 steps)
.maxntid 256, 1, 1
{
  .reg .pred %p<20>; .reg .b16 %h<4>; .reg .b32 %r<90>; .reg .f32 %f<20>; .reg .b64 %q<8>;
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
  RANK
  setp.eq.u32 %p1, %r3, 2;
  @%p1 bra ALLOCATE;
  setp.ne.u32 %p2, %r2, 0;
  @%p2 bra READY;
  mov.u32 %r4, 1;
  mov.u32 %r5, ARRIVALS;
  mbarrier.init.shared::cta.b64 [%r1+13312], %r4;
  mbarrier.init.shared::cta.b64 [%r1+13320], %r4;
  mbarrier.init.shared::cta.b64 [%r1+13328], %r4;
  mbarrier.init.shared::cta.b64 [%r1+13336], %r4;
  mbarrier.init.shared::cta.b64 [%r1+13344], %r4;
  STORED_0
  mbarrier.init.shared::cta.b64 [%r1+13360], %r4;
  STORED_1
  bra.uni READY;
ALLOCATE:
  add.s32 %r6, %r1, 13376;
  tcgen05.alloc.cta_group::GROUP.sync.aligned.shared::cta.b32 [%r6], 32;
  tcgen05.relinquish_alloc_permit.cta_group::GROUP.sync.aligned;
READY:
  fence.mbarrier_init.release.cluster;
  BEGIN
  bar.sync 0;
  ld.shared.u32 %r6, [%r1+13376];
  griddepcontrol.wait;
  ld.param.u32 %r7, [tiles];
  ld.param.u32 %r8, [steps];
  mov.u32 %r9, %ctaid.x;
  mov.u32 %r10, %nctaid.x;
  HALVE
  mov.u32 %r11, 0;
  setp.eq.u32 %p3, %r3, 1;
  @%p3 bra MULTIPLIER;
  setp.ge.u32 %p4, %r3, 4;
  @%p4 bra STORE;
  setp.ne.u32 %p5, %r2, 0;
  @%p5 bra END;
  mov.u32 %r12, 1;
ITEM_P:
  TILE_P
  mov.u32 %r14, 0;
LOAD:
  shl.b32 %r15, %r11, 4;
  add.s32 %r16, %r1, %r15;
TRY_P:
  mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r16+13320], %r12;
  @!%p6 bra TRY_P;
  add.s32 %r17, %r16, 13312;
  mul.lo.s32 %r18, %r11, 4608;
  add.s32 %r18, %r1, %r18;
  add.s32 %r19, %r18, 4096;
  shl.b32 %r20, %r14, 4;
  EXPECT
  BOX [%r18], [%q1, {%r20, %r13}], [%r17];
  BOX [%r19], [%q2, {%r20, %r22}], [%r17];
  add.s32 %r23, %r11, 1;
  setp.eq.s32 %p7, %r23, 2;
  selp.b32 %r11, 0, %r23, %p7;
  selp.u32 %r24, 1, 0, %p7;
  xor.b32 %r12, %r12, %r24;
  add.s32 %r14, %r14, 1;
  setp.lt.s32 %p8, %r14, %r8;
  @%p8 bra LOAD;
  add.s32 %r9, %r9, %r10;
  setp.lt.s32 %p9, %r9, %r7;
  @%p9 bra ITEM_P;
  DRAIN_P
  bra.uni END;
MULTIPLIER:
  ALONE
  setp.ne.u32 %p5, %r32, 0;
  @%p5 bra END;
  mov.u32 %r30, 0;
  mov.u32 %r31, 0;
  mov.u32 %r33, 1;
ITEM_M:
  shl.b32 %r34, %r31, 4;
  add.s32 %r34, %r34, %r1;
TRY_A:
  mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r34+13352], %r33;
  @!%p6 bra TRY_A;
  tcgen05.fence::after_thread_sync;
  shl.b32 %r35, %r31, 4;
  add.s32 %r35, %r35, %r6;
  mov.u32 %r36, 0;
MULTIPLY:
  shl.b32 %r37, %r11, 4;
  add.s32 %r37, %r37, %r1;
TRY_M:
  mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r37+13312], %r30;
  @!%p6 bra TRY_M;
  tcgen05.fence::after_thread_sync;
  mul.lo.s32 %r38, %r11, 4608;
  add.s32 %r38, %r38, %r1;
  and.b32 %r38, %r38, 262143;
  shr.u32 %r38, %r38, 4;
  add.s32 %r38, %r38, 65536;
  add.s32 %r39, %r38, 256;
  mov.u32 %r40, 3221241872;
  mov.b64 %q5, {%r38, %r40};
  mov.b64 %q6, {%r39, %r40};
  setp.ne.s32 %p10, %r36, 0;
  mov.u32 %r41, SHAPE;
  tcgen05.mma.cta_group::GROUP.kind::f16 [%r35], %q5, %q6, %r41, %p10;
  add.s32 %r42, %r37, 13320;
  COMMIT [%r42]MASK;
  add.s32 %r43, %r11, 1;
  setp.eq.s32 %p7, %r43, 2;
  selp.b32 %r11, 0, %r43, %p7;
  selp.u32 %r44, 1, 0, %p7;
  xor.b32 %r30, %r30, %r44;
  add.s32 %r36, %r36, 1;
  setp.lt.s32 %p8, %r36, %r8;
  @%p8 bra MULTIPLY;
  add.s32 %r45, %r34, 13344;
  COMMIT [%r45]MASK;
  add.s32 %r46, %r31, 1;
  setp.eq.s32 %p11, %r46, 2;
  selp.b32 %r31, 0, %r46, %p11;
  selp.u32 %r47, 1, 0, %p11;
  xor.b32 %r33, %r33, %r47;
  add.s32 %r9, %r9, %r10;
  setp.lt.s32 %p9, %r9, %r7;
  @%p9 bra ITEM_M;
  DRAIN_M
  bra.uni END;
STORE:
  mov.u32 %r50, 0;
  and.b32 %r51, %r3, 3;
  shl.b32 %r52, %r51, 21;
  add.s32 %r52, %r52, %r6;
  shl.b32 %r53, %r51, 10;
  add.s32 %r53, %r53, %r1;
  add.s32 %r53, %r53, 9216;
  and.b32 %r54, %r2, 15;
  shl.b32 %r55, %r54, 5;
  shr.u32 %r56, %r32, 4;
  shr.u32 %r57, %r54, 2;
  and.b32 %r57, %r57, 1;
  xor.b32 %r56, %r56, %r57;
  shl.b32 %r56, %r56, 4;
  add.s32 %r55, %r55, %r56;
  add.s32 %r55, %r55, %r53;
  setp.eq.s32 %p12, %r32, 0;
  STORED_AT
ITEM_S:
  shl.b32 %r58, %r11, 4;
  add.s32 %r59, %r58, %r1;
TRY_S:
  mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r59+13344], %r50;
  @!%p6 bra TRY_S;
  tcgen05.fence::after_thread_sync;
  add.s32 %r60, %r58, %r52;
  add.s32 %r61, %r60, 1048576;
  tcgen05.ld.sync.aligned.16x256b.x2.b32 {%f1, %f2, %f3, %f4, %f5, %f6, %f7, %f8}, [%r60];
  tcgen05.ld.sync.aligned.16x256b.x2.b32 {%f9, %f10, %f11, %f12, %f13, %f14, %f15, %f16}, [%r61];
  tcgen05.wait::ld.sync.aligned;
  tcgen05.fence::before_thread_sync;
  bar.warp.sync -1;
  @!%p12 bra RETURNED;
  add.s32 %r62, %r58, %r63;
  ARRIVE [%r62];
RETURNED:
  @!%p12 bra OVER;
  cp.async.bulk.wait_group.read 0;
OVER:
  bar.warp.sync -1;
  cvt.rn.f16x2.f32 %r64, %f2, %f1;
  cvt.rn.f16x2.f32 %r65, %f4, %f3;
  cvt.rn.f16x2.f32 %r66, %f6, %f5;
  cvt.rn.f16x2.f32 %r67, %f8, %f7;
  stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r55], {%r64, %r65, %r66, %r67};
  cvt.rn.f16x2.f32 %r64, %f10, %f9;
  cvt.rn.f16x2.f32 %r65, %f12, %f11;
  cvt.rn.f16x2.f32 %r66, %f14, %f13;
  cvt.rn.f16x2.f32 %r67, %f16, %f15;
  stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r55+512], {%r64, %r65, %r66, %r67};
  fence.proxy.async.shared::cta;
  bar.warp.sync -1;
  @!%p12 bra STORED;
  TILE_S
  shl.b32 %r69, %r51, 5;
  add.s32 %r68, %r68, %r69;
  mov.u32 %r69, 0;
  cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%q3, {%r69, %r68}], [%r53];
  cp.async.bulk.commit_group;
STORED:
  add.s32 %r70, %r11, 1;
  setp.eq.s32 %p7, %r70, 2;
  selp.b32 %r11, 0, %r70, %p7;
  selp.u32 %r71, 1, 0, %p7;
  xor.b32 %r50, %r50, %r71;
  add.s32 %r9, %r9, %r10;
  setp.lt.s32 %p9, %r9, %r7;
  @%p9 bra ITEM_S;
  cp.async.bulk.wait_group.read 0;
  tcgen05.fence::before_thread_sync;
END:
  bar.warp.sync -1;
  bar.sync 0;
  FINISH
  @!%p1 bra DONE;
  tcgen05.fence::after_thread_sync;
  tcgen05.dealloc.cta_group::GROUP.sync.aligned.b32 %r6, 32;
DONE:
  ret;
}
"""
INIT_STORED = "mbarrier.init.shared::cta.b64 [%r1+{}], %r5;"
ALONE = {
    "RANK": "",
    "STORED_0": INIT_STORED.format(13352),
    "STORED_1": INIT_STORED.format(13368),
    "STORED_AT": "add.s32 %r63, %r1, 13352;",
    "ARRIVALS": "4",
    "GROUP": "1",
    "BEGIN": "",
    "HALVE": "",
    "TILE_P": "shl.b32 %r13, %r9, 7; mov.u32 %r22, 0;",
    "EXPECT": "mov.u32 %r21, 4608;\n  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r17], %r21;",
    "BOX": "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes",
    "DRAIN_P": "",
    "ALONE": "",
    "SHAPE": "134479888",  # 128 x 16, f16 summed in f32
    "COMMIT": "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64",
    "MASK": "",
    "DRAIN_M": "",
    "ARRIVE": "mbarrier.arrive.shared::cta.b64 _,",
    "TILE_S": "shl.b32 %r68, %r9, 7;",
    "FINISH": "",
}
# What differs in a pair. Only the first CTA multiplies, expects bytes, and waits for its places of accumulators.
IN_PAIR = {
    "RANK": "mov.u32 %r80, %cluster_ctarank;",
    "STORED_AT": "add.s32 %r63, %r1, 13352; mov.u32 %r81, 0; mapa.shared::cluster.u32 %r63, %r63, %r81;",
    "ARRIVALS": "8",
    "GROUP": "2",
    "BEGIN": "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;",
    "HALVE": "shr.u32 %r9, %r9, 1; shr.u32 %r10, %r10, 1;",
    "TILE_P": "shl.b32 %r13, %r9, 8; shl.b32 %r81, %r80, 7; add.s32 %r13, %r13, %r81; shl.b32 %r22, %r80, 3;",
    "EXPECT": """setp.ne.u32 %p13, %r80, 0;
  @%p13 bra EXPECTED;
  mov.u32 %r21, 8704;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r17], %r21;
EXPECTED:
  and.b32 %r17, %r17, -16777217;""",
    "BOX": "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::2",
    "DRAIN_P": """shl.b32 %r82, %r11, 4; add.s32 %r82, %r82, %r1;
TRY_1:
  mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r82+13320], %r12;
  @!%p6 bra TRY_1;
  xor.b32 %r82, %r82, 16; xor.b32 %r12, %r12, %r11;
TRY_2:
  mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r82+13320], %r12;
  @!%p6 bra TRY_2;""",
    "ALONE": "setp.ne.u32 %p5, %r80, 0; @%p5 bra END; mov.u16 %h1, 3;",
    "SHAPE": "268697616",  # 256 x 16, f16 summed in f32
    "COMMIT": "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64",
    "MASK": ", %h1",
    "DRAIN_M": """shl.b32 %r82, %r31, 4; add.s32 %r82, %r82, %r1;
TRY_3:
  mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r82+13352], %r33;
  @!%p6 bra TRY_3;
  xor.b32 %r82, %r82, 16; xor.b32 %r33, %r33, %r31;
TRY_4:
  mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r82+13352], %r33;
  @!%p6 bra TRY_4;""",
    "ARRIVE": "mbarrier.arrive.release.cluster.shared::cluster.b64 _,",
    "TILE_S": "shl.b32 %r68, %r9, 8; shl.b32 %r81, %r80, 7; add.s32 %r68, %r68, %r81;",
    "FINISH": "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;",
}


def text(ranks: int = 1) -> str:
    """The kernel's PTX. ``ranks``: the CTAs of a cluster, 2 for a pair."""
    out = TEXT
    for name, part in (ALONE | (IN_PAIR if ranks > 1 else {})).items():
        out = out.replace(f"  {name}\n", f"  {part}\n").replace(f"{name} [", f"{part} [")
        if name in ("ARRIVALS", "GROUP", "SHAPE", "MASK"):
            out = out.replace(name, part)
    return out


def claim(ranks: int = 1) -> Claim:
    """All launches of clusters of ``ranks`` CTAs."""
    stated = StatedRing(
        ROWS, COLS, DEPTH, STAGES, ((128, 256),), 13392, box_d=(32, COLS, 32), loaded_bytes=4352,
        tensor=TensorPlan(PLACES, DEPTH, ranks > 1),
    )  # fmt: skip
    return stated.claim(ranks)
