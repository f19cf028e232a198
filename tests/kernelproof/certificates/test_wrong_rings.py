"""Proves that a small kernel with a ring of stages is certified, and is refused with any planted fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kernelproof.certificates import TILES, Claim, Contract, NotCertified, Pipeline, Polynomial, recheck
from tests.kernelproof.certificates import rings

named = Polynomial.named

LOAD_A = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r17], [%q1, {%r19, %r12}], [%r16];"
LOAD_B = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r18], [%q2, {%r19, %r20}], [%r16];"
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r16], %r21;"
WAIT_P = "mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r15+2056], %r11;"
WAIT_C = "mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r45+2048], %r31;"
WAIT_T = "mbarrier.try_wait.parity.shared::cta.b64 %p14, [%r65+2112], %r63;"
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%r45+2056];"
MMA_A = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r50, %r51, %r52, %r53}, [%r47];"
STORE = "stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r43], {%r58, %r59};"
STORE_D = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%q3, {%r61, %r60}], [%r42];"
COMMIT = "cp.async.bulk.commit_group;"
FENCE = "fence.proxy.async.shared::cta;"
MEET = "bar.warp.sync -1;"
INIT = "mbarrier.init.shared::cta.b64 [%r1+2048], %r4;"
SYNC = "bar.sync 0;"

# Maps each fault to the part of the text that it changes, and to what stands there instead. Faults
# of ``TURNS`` are planted in the kernel with two groups.
FAULTS: dict[str, tuple[str, str]] = {
    # What all threads do before they have roles.
    "every thread initialises mbarriers": ("@%p1 bra READY;", ""),
    "an mbarrier is initialised after the barrier": (SYNC, f"{SYNC} @%p1 bra X; {INIT} X:"),
    "an mbarrier is not initialised": (INIT, ""),
    "an mbarrier is initialised twice": (INIT, INIT + INIT),
    "an mbarrier expects no arrival": ("mov.u32 %r4, 1;", "mov.u32 %r4, 0;"),
    "full expects two arrivals": ("mov.u32 %r4, 1;", "mov.u32 %r4, 2;"),
    "empty expects two arrivals": ("mov.u32 %r5, 1;", "mov.u32 %r5, 2;"),
    "mbarriers are not published": ("fence.mbarrier_init.release.cluster;", ""),
    "mbarriers are published by one thread": (
        "READY:\n  fence.mbarrier_init.release.cluster;", "fence.mbarrier_init.release.cluster;\nREADY:",
    ),
    "threads do not meet": (SYNC, ""),
    "threads meet twice": (SYNC, SYNC + SYNC),
    "a part of the threads meets": (SYNC, "bar.sync 0, 32;"),
    "one warp leaves out the barrier": (SYNC, "setp.ge.u32 %p2, %r2, 32; @%p2 bra SKIP; bar.sync 0; SKIP:"),
    "threads end before the barrier": (SYNC, f"@%p1 bra END; {SYNC}"),
    "all threads end before the barrier": (SYNC, f"setp.ge.u32 %p2, %r2, 64; @!%p2 bra END; {SYNC}"),
    "a wait by threads without a role": (
        SYNC, f"{SYNC} mov.u32 %r11, 0; TRY_N: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r1+2048], %r11;"
        "@!%p4 bra TRY_N;",
    ),
    "an arrival by threads without a role": (SYNC, f"{SYNC} mbarrier.arrive.shared::cta.b64 _, [%r1+2048];"),
    "a store to shared memory by threads without a role": (
        SYNC, f"{SYNC} stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {{%r2}};",
    ),
    "a store of D by threads without a role": (
        SYNC, f"{SYNC} mov.u32 %r60, 0; cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
        " [%q3, {%r60, %r60}], [%r1];",
    ),
    "setmaxnreg by a part of a warpgroup": (SYNC, f"{SYNC} setmaxnreg.inc.sync.aligned.u32 256;"),
    "the kernel before is not waited for": ("griddepcontrol.wait;", ""),
    "every lane of the first warp loads": ("@%p3 bra END;", ""),
    "no thread loads": ("setp.ne.u32 %p3, %r2, 0;", "setp.ne.u32 %p3, %r2, 32;"),
    "one warp too few multiplies": ("setp.ge.u32 %p2, %r2, 32;", "setp.ge.u32 %p2, %r2, 33;"),
    # The producer.
    "the producer does not wait": (WAIT_P, "setp.eq.u32 %p4, %r1, %r1;"),
    "the producer's wait is tried once": ("@!%p4 bra TRY_P;", ""),
    "the producer's wait goes on while it fails": ("@!%p4 bra TRY_P;", "@%p4 bra TRY_P;"),
    "the producer's wait tries another parity": ("@!%p4 bra TRY_P;", "xor.b32 %r11, %r11, 1; @!%p4 bra TRY_P;"),
    "the producer's next try has another parity": (
        "@!%p4 bra TRY_P;", "@%p4 bra OPEN; xor.b32 %r11, %r11, 1; bra.uni TRY_P; OPEN:",
    ),
    "the producer loads between two tries": ("@!%p4 bra TRY_P;", "fence.proxy.async.shared::cta; @!%p4 bra TRY_P;"),
    "the producer waits for the other phase": ("mov.u32 %r11, 1;", "mov.u32 %r11, 0;"),
    "the producer waits for the other stage": ("[%r15+2056], %r11", "[%r15+2072], %r11"),
    "the producer waits for full": ("[%r15+2056], %r11", "[%r15+2048], %r11"),
    "the producer's wait does not acquire": (
        WAIT_P, WAIT_P.replace("parity.shared", "parity.relaxed.cta.shared"),
    ),
    "the producer waits twice": (WAIT_P, f"{WAIT_P} @!%p4 bra TRY_P; TRY_2: {WAIT_P.replace('%p4', '%p5')}"
                                 "@!%p5 bra TRY_2;"),
    "a phase is wrong in the second round": ("xor.b32 %r11, %r11, %r23;", ""),
    "a phase is wrong in the third round": (
        "xor.b32 %r11, %r11, %r23;", "sub.s32 %r11, %r11, %r23; max.s32 %r11, %r11, 0;",
    ),
    "a stage is skipped": ("selp.b32 %r10, 0, %r22, %p5;", "selp.b32 %r10, 1, %r22, %p5;"),
    "too few bytes are expected": ("mov.u32 %r21, 768;", "mov.u32 %r21, 752;"),
    "the bytes of one box are expected": ("mov.u32 %r21, 768;", "mov.u32 %r21, 512;"),
    "too many bytes are expected": ("mov.u32 %r21, 768;", "mov.u32 %r21, 784;"),
    "no bytes are expected": ("mov.u32 %r21, 768;", "mov.u32 %r21, 0;"),
    "more bytes are expected than an mbarrier counts": ("mov.u32 %r21, 768;", "mov.u32 %r21, 1048576;"),
    "bytes are not announced": (EXPECT, ""),
    "bytes are announced twice": (EXPECT, EXPECT + EXPECT),
    "bytes are announced before the wait": ("TRY_P:", f"add.s32 %r16, %r15, 2048; mov.u32 %r21, 768; {EXPECT}\nTRY_P:"),
    "bytes are announced at the other stage": (EXPECT, f"xor.b32 %r24, %r16, 16; {EXPECT.replace('%r16', '%r24')}"),
    "bytes are announced at empty": (EXPECT, EXPECT.replace("[%r16]", "[%r16+8]")),
    "bytes are announced at no mbarrier": (EXPECT, EXPECT.replace("[%r16]", "[%r16+64]")),
    "the producer arrives without bytes": (EXPECT, "mbarrier.arrive.shared::cta.b64 _, [%r16];"),
    "an announcement does not release": (EXPECT, EXPECT.replace("shared", "relaxed.cta.shared")),
    "A is not loaded": (LOAD_A, ""),
    "B is not loaded": (LOAD_B, ""),
    "A is loaded twice": (LOAD_A, LOAD_A + LOAD_A),
    "A is loaded twice, as many bytes as are expected": (
        f"mov.u32 %r21, 768;\n  {EXPECT}\n  {LOAD_A}", f"mov.u32 %r21, 1280; {EXPECT} {LOAD_A} {LOAD_A}",
    ),
    "A is loaded under a predicate": (LOAD_A, f"@!%p3 {LOAD_A}"),
    "A's bytes count at empty": (LOAD_A, LOAD_A.replace("[%r16]", "[%r15+2056]")),
    "A's bytes count at the other stage": (LOAD_A, f"xor.b32 %r24, %r16, 16; {LOAD_A.replace('[%r16]', '[%r24]')}"),
    "B is loaded to the place of A": ("add.s32 %r18, %r17, 512;", "add.s32 %r18, %r17, 0;"),
    "B is loaded over the end of A": ("add.s32 %r18, %r17, 512;", "add.s32 %r18, %r17, 384;"),
    "B is loaded to the next stage": ("add.s32 %r18, %r17, 512;", "add.s32 %r18, %r17, 768;"),
    "B is loaded to a place that is not aligned": ("add.s32 %r18, %r17, 512;", "add.s32 %r18, %r17, 528;"),
    "B is loaded beyond shared memory": ("add.s32 %r18, %r17, 512;", "add.s32 %r18, %r17, 2048;"),
    "B is loaded before shared memory": ("add.s32 %r18, %r17, 512;", "add.s32 %r18, %r17, -2048;"),
    "B is loaded over mbarriers": ("add.s32 %r18, %r17, 512;", "add.s32 %r18, %r1, 2048;"),
    "A is loaded from the map of D": (LOAD_A, LOAD_A.replace("%q1", "%q3")),
    "A is loaded from the map of B": (LOAD_A, LOAD_A.replace("%q1", "%q2")),
    "A is loaded from the middle of its map": (LOAD_A, "add.s64 %q4, %q1, 64;" + LOAD_A.replace("%q1", "%q4")),
    "A is loaded from a map in global memory": (LOAD_A, "mov.u64 %q4, 64;" + LOAD_A.replace("%q1", "%q4")),
    "coordinates are exchanged": (LOAD_A, LOAD_A.replace("{%r19, %r12}", "{%r12, %r19}")),
    "a box of three dimensions": (LOAD_A, LOAD_A.replace(".2d", ".3d").replace("%r12}", "%r12, %r20}")),
    "k begins one later": ("shl.b32 %r19, %r13, 4;", "shl.b32 %r19, %r13, 4; add.s32 %r19, %r19, 1;"),
    "k-tiles are half as long": ("shl.b32 %r19, %r13, 4;", "shl.b32 %r19, %r13, 3;"),
    "k of the stage in place of the k-tile": ("shl.b32 %r19, %r13, 4;", "shl.b32 %r19, %r10, 4;"),
    "rows of the next tile": ("shl.b32 %r12, %r8, 4;", "shl.b32 %r12, %r8, 4; add.s32 %r12, %r12, 16;"),
    "rows that the stage shifts": (
        "add.s32 %r18, %r17, 512;", "add.s32 %r18, %r17, 512; shl.b32 %r12, %r8, 4; add.s32 %r12, %r12, %r10;",
    ),
    "rows that the phase shifts": (
        "add.s32 %r18, %r17, 512;", "add.s32 %r18, %r17, 512; shl.b32 %r12, %r8, 4; add.s32 %r12, %r12, %r11;",
    ),
    "rows that overflow": ("shl.b32 %r12, %r8, 4;", "shl.b32 %r12, %r8, 12;"),
    "the last k-tile is not loaded": (
        "setp.lt.s32 %p6, %r13, %r7;", "add.s32 %r24, %r13, 1; setp.lt.s32 %p6, %r24, %r7;",
    ),
    "one k-tile more is loaded": ("setp.lt.s32 %p6, %r13, %r7;", "setp.le.s32 %p6, %r13, %r7;"),
    "one k-tile is loaded": ("setp.lt.s32 %p6, %r13, %r7;", "setp.lt.s32 %p6, %r7, 1;"),
    "the producer takes every second item": ("%p6 bra LOAD;", "%p6 bra LOAD; add.s32 %r8, %r8, %r9;"),
    "the producer takes one item more": ("setp.lt.s32 %p7, %r8, %r6;", "setp.le.s32 %p7, %r8, %r6;"),
    "the producer takes one item": ("setp.lt.s32 %p7, %r8, %r6;", "setp.lt.s32 %p7, %r6, 1;"),
    "the producer's items have no k-tile": (
        "ITEM_P:", "ITEM_P: setp.ge.s32 %p6, %r8, 0; @%p6 bra LOADED;",
    ),
    # A consumer's loop over k-tiles.
    "a consumer does not wait": (WAIT_C, "setp.eq.u32 %p9, %r1, %r1;"),
    "a consumer's wait is tried once": ("@!%p9 bra TRY_C;", ""),
    "a consumer waits for the other phase": (WAIT_C, f"xor.b32 %r70, %r31, 1; {WAIT_C.replace('%r31', '%r70')}"),
    "a consumer waits for the other stage": (WAIT_C, f"xor.b32 %r70, %r45, 16; {WAIT_C.replace('%r45', '%r70')}"),
    "a consumer waits for empty": (WAIT_C, WAIT_C.replace("2048", "2056")),
    "one lane of a consumer waits": (WAIT_C, f"@%p8 {WAIT_C}"),
    "a stage is handed back twice": (ARRIVE, ARRIVE + ARRIVE),
    "the other stage is handed back": (ARRIVE, f"xor.b32 %r70, %r45, 16; {ARRIVE.replace('%r45', '%r70')}"),
    "a stage is handed back at full": (ARRIVE, ARRIVE.replace("2056", "2048")),
    "a stage is not handed back": (ARRIVE, ""),
    "a stage is handed back by all lanes": ("@!%p8 bra RETURNED;", ""),
    "lanes hand back different stages": (
        "@!%p8 bra RETURNED;\n  " + ARRIVE,
        f"shl.b32 %r70, %r32, 4; add.s32 %r70, %r70, %r1; setp.lt.u32 %p15, %r32, 2; @!%p15 bra RETURNED;"
        f"{ARRIVE.replace('%r45', '%r70')}",
    ),
    "a stage is handed back by two arrivals": (ARRIVE, "mov.u32 %r70, 2; " + ARRIVE.replace("];", "], %r70;")),
    "an arrival with bytes": (
        ARRIVE, "mov.u32 %r70, 16; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r45+2056], %r70;",
    ),
    "an arrival that does not release": (ARRIVE, ARRIVE.replace("arrive.", "arrive.relaxed.cta.")),
    "an arrival that drops out": (ARRIVE, ARRIVE.replace("arrive.", "arrive_drop.")),
    "lanes do not meet after their reads": (f"{MEET}\n  @!%p8 bra RETURNED;", "@!%p8 bra RETURNED;"),
    "half of the lanes meet": (f"{MEET}\n  @!%p8 bra RETURNED;", "bar.warp.sync 65535; @!%p8 bra RETURNED;"),
    "one lane meets itself": (f"{MEET}\n  @!%p8 bra RETURNED;", "@!%p8 bra RETURNED; bar.warp.sync -1;"),
    "a stage is read before the wait": (
        "TRY_C:", f"mul.lo.s32 %r46, %r10, 768; add.s32 %r47, %r46, %r34; {MMA_A}\nTRY_C:",
    ),
    "a stage is read after it was handed back": ("RETURNED:", f"RETURNED: {MMA_A}"),
    "the other stage is read": (MMA_A, f"xor.b32 %r70, %r10, 1; mad.lo.s32 %r47, %r70, 768, %r34; {MMA_A}"),
    "A is read from both stages": (MMA_A, f"add.s32 %r47, %r47, 384; {MMA_A}"),
    "half of the lanes read": (MMA_A, f"@%p8 {MMA_A}"),
    "a row of A is read unswizzled": ("xor.b32 %r35, %r35, %r36;", ""),
    "B is read from A's rows": ("[%r48+512]", "[%r48]"),
    "B is read from the next rows": ("[%r48+512]", "[%r48+528]"),
    "halves of k are exchanged for B": ("{%r54, %r55}, {%f1", "{%r55, %r54}, {%f1"),
    "rows of A are exchanged": ("{%r50, %r51, %r52, %r53}, {%r54", "{%r51, %r50, %r53, %r52}, {%r54"),
    "a product is added twice": (MEET + "\n  @!%p8 bra RETURNED", "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                                 "{%f1, %f2, %f3, %f4}, {%r50, %r51, %r52, %r53}, {%r54, %r55}, {%f1, %f2, %f3, %f4};"
                                 f"{MEET} @!%p8 bra RETURNED"),
    "sums begin with one": ("mov.f32 %f1, 0f00000000;", "mov.f32 %f1, 0f3F800000;"),
    "sums go on from the item before": ("mov.f32 %f4, %f1;\n", ""),
    "sums of the last k-tile": (
        "RETURNED:", "RETURNED: mov.f32 %f1, 0f00000000;",
    ),
    "one k-tile too few is multiplied": (
        "setp.lt.s32 %p11, %r44, %r7;", "add.s32 %r70, %r44, 1; setp.lt.s32 %p11, %r70, %r7;",
    ),
    "one k-tile too many is multiplied": ("setp.lt.s32 %p11, %r44, %r7;", "setp.le.s32 %p11, %r44, %r7;"),
    "a consumer's phase does not change": ("xor.b32 %r31, %r31, %r57;", ""),
    "a consumer's phase is wrong in the third round": (
        "xor.b32 %r31, %r31, %r57;", "add.s32 %r31, %r31, %r57; min.s32 %r31, %r31, 1;",
    ),
    "a number grows with each k-tile": (
        "RETURNED:", "RETURNED: add.s32 %r71, %r71, 1; setp.eq.s32 %p15, %r71, 0; @%p15 bra MULTIPLY;",
    ),
    "D is written in the main loop": ("RETURNED:", f"RETURNED: mov.u32 %r58, 0; mov.u32 %r59, 0; {STORE}"),
    # A consumer's store of D.
    "buffers are written while they are read": ("cp.async.bulk.wait_group.read 0;\nOVER:", "OVER:"),
    "a bulk group is left while a buffer is written": (
        "cp.async.bulk.wait_group.read 0;\nOVER:", "cp.async.bulk.wait_group.read 1;\nOVER:",
    ),
    "lanes do not meet after the wait for stores": (f"OVER:\n  {MEET}", "OVER:"),
    "stores are not committed": (COMMIT, ""),
    "no fence of the asynchronous proxy": (FENCE, ""),
    "the fence is after the warp's barrier": (f"{FENCE}\n  {MEET}", f"{MEET}\n  {FENCE}"),
    "lanes do not meet after the fence": (f"{FENCE}\n  {MEET}", FENCE),
    "one lane executes the fence": (FENCE, f"@!%p8 bra NOFENCE; {FENCE} NOFENCE:"),
    "a store of registers twice": (STORE, STORE + STORE),
    "lanes store to one row": ("shl.b32 %r43, %r33, 4;", "shl.b32 %r43, %r37, 4;"),
    "sums are stored over a stage": ("add.s32 %r42, %r42, 1536;", "add.s32 %r42, %r42, 1280;"),
    "sums are stored over mbarriers": ("add.s32 %r42, %r42, 1536;", "add.s32 %r42, %r42, 2048;"),
    "sums are stored beyond shared memory": ("add.s32 %r42, %r42, 1536;", "add.s32 %r42, %r42, 3072;"),
    "sums are stored to an address of the problem": (
        "add.s32 %r43, %r43, %r42;\n", "add.s32 %r43, %r43, %r42; shl.b32 %r72, %r9, 7; add.s32 %r43, %r43, %r72;\n",
    ),
    "bits of fp32 sums are stored": ("cvt.rn.f16x2.f32 %r58, %f2, %f1;", "mov.b32 %r58, %f2;"),
    "zeros are stored": ("cvt.rn.f16x2.f32 %r58, %f2, %f1;", "mov.b32 %r58, 0;"),
    "neighbours are exchanged": ("cvt.rn.f16x2.f32 %r58, %f2, %f1;", "cvt.rn.f16x2.f32 %r58, %f1, %f2;"),
    "halves of a tile are exchanged": ("{%r58, %r59};", "{%r59, %r58};"),
    "D of the next tile": ("shl.b32 %r60, %r8, 4;", "shl.b32 %r60, %r8, 4; add.s32 %r60, %r60, 16;"),
    "tiles of CTAs overlap": ("shl.b32 %r60, %r8, 4;", "shl.b32 %r60, %r8, 3;"),
    "D of the next columns": ("mov.u32 %r61, 0;", "mov.u32 %r61, 8;"),
    "D by columns": (STORE_D, STORE_D.replace("{%r61, %r60}", "{%r60, %r61}")),
    "D is stored by every lane": ("@!%p8 bra STORED;", ""),
    "D is stored twice": (STORE_D, STORE_D + STORE_D),
    "D is not stored": (STORE_D, ""),
    "D is added to": (
        STORE_D, STORE_D.replace("cp.async", "cp.reduce.async").replace("shared::cta.", "shared::cta.add."),
    ),
    "D is stored to A": (STORE_D, STORE_D.replace("%q3", "%q1")),
    "D is stored from a stage": (STORE_D, STORE_D.replace("[%r42]", "[%r1]")),
    "D is stored from a place that is not aligned": (STORE_D, STORE_D.replace("[%r42]", "[%r42+16]")),
    "a CTA ends before its stores have read": ("cp.async.bulk.wait_group.read 0;\nEND:", "END:"),
    "one lane waits for its stores, another has stored": (
        "@!%p8 bra STORED;", "setp.eq.s32 %p15, %r32, 1; @!%p15 bra STORED;",
    ),
    "a consumer takes every second item": ("NEXT:", "NEXT: add.s32 %r8, %r8, %r9;"),
    "a consumer takes one item more": ("setp.lt.s32 %p12, %r8, %r6;", "setp.le.s32 %p12, %r8, %r6;"),
    "a consumer takes one item": ("setp.lt.s32 %p12, %r8, %r6;", "setp.lt.s32 %p12, %r6, 1;"),
    "a consumer has no loop over items": ("@%p12 bra ITEM_C;", ""),
    "a consumer computes no item": ("ITEM_C:", "ITEM_C: setp.ge.s32 %p15, %r8, 0; @%p15 bra NEXT;"),
    "an item does not begin with its own sums": ("mov.u32 %r44, 0;\nMULTIPLY:", "mov.u32 %r44, 1;\nMULTIPLY:"),
    "a consumer ends in the middle of an item": ("NEXT:", "NEXT: bra.uni END;"),
}  # fmt: skip
TURNS: dict[str, tuple[str, str]] = {
    "a turn is not waited for": (WAIT_T, "setp.eq.u32 %p14, %r1, %r1;"),
    "a turn has the other parity": ("xor.b32 %r63, %r41, 1;", "mov.u32 %r63, %r41;"),
    "a turn's parity does not change": ("xor.b32 %r63, %r63, 1;", ""),
    "a group waits for the other one's turn": (WAIT_T, f"xor.b32 %r70, %r65, 8; {WAIT_T.replace('%r65', '%r70')}"),
    "a turn is not handed on": ("mbarrier.arrive.shared::cta.b64 _, [%r66+2120];", ""),
    "a turn is handed on twice": (
        "mbarrier.arrive.shared::cta.b64 _, [%r66+2120];", "mbarrier.arrive.shared::cta.b64 _, [%r66+2120];" * 2,
    ),
    "a turn is handed to the own group": ("[%r66+2120]", "[%r65+2112]"),
    "a turn is handed on before the products": (
        "mov.u32 %r44, 0;\nMULTIPLY:",
        "@!%p8 bra EARLY; mbarrier.arrive.shared::cta.b64 _, [%r66+2120]; EARLY: mov.u32 %r44, 0;\nMULTIPLY:",
    ),
    "both groups take an item": ("setp.eq.s32 %p13, %r62, %r41;", "setp.eq.s32 %p13, %r41, %r41;"),
    "no group takes an item": ("setp.eq.s32 %p13, %r62, %r41;", "setp.eq.s32 %p13, %r62, 2;"),
    "groups do not alternate": ("xor.b32 %r62, %r62, 1;", ""),
    "the other group's k-tiles are not passed": ("add.s32 %r67, %r10, %r7;", "mov.u32 %r67, %r10;"),
    "the other group's k-tiles are counted once too often": (
        "add.s32 %r67, %r10, %r7;", "add.s32 %r67, %r10, %r7; add.s32 %r67, %r67, 1;",
    ),
    "the other group's rounds are not counted": ("xor.b32 %r68, %r68, %r31;", "mov.u32 %r68, %r31;"),
    "a stage is waited for before the turn": (
        "TRY_T:", f"TRY_E: {WAIT_C.replace('%r45', '%r1').replace('%p9', '%p15')} @!%p15 bra TRY_E;\nTRY_T:",
    ),
    "a turn is waited for in another group's item": (
        "  setp.eq.s32 %p13", "TRY_E: " + WAIT_T.replace("%p14", "%p15") + "@!%p15 bra TRY_E;\n  setp.eq.s32 %p13",
    ),
    "groups store to one buffer": ("shl.b32 %r42, %r41, 8;", "mov.u32 %r42, 0;"),
    "D is stored from the other group's buffer": (
        STORE_D, f"xor.b32 %r70, %r42, 256; {STORE_D.replace('%r42', '%r70')}",
    ),
    "turns share one mbarrier": ("[%r1+2120], %r5", "[%r1+2112], %r5"),
    "a turn expects two arrivals": (
        "mbarrier.init.shared::cta.b64 [%r1+2112], %r5;",
        "mov.u32 %r72, 2; mbarrier.init.shared::cta.b64 [%r1+2112], %r72;",
    ),
}  # fmt: skip


def of_pipeline(**fields: object) -> Callable[[Claim], Claim]:
    """A change of what a claim states of a pipeline."""
    return lambda claim: claim._replace(ring=replace(claim.ring, **fields))  # type: ignore[type-var]


def of_contracts(change: Callable[[Contract], Contract]) -> Callable[[Claim], Claim]:
    """A change of both contracts of a claim: up to the first item, and of an item."""

    def applied(claim: Claim) -> Claim:
        assert isinstance(claim.ring, Pipeline)
        return claim._replace(
            contract=change(claim.contract), ring=replace(claim.ring, entry=change(claim.ring.entry))
        )  # fmt: skip

    return applied


def box(name: str, **fields: object) -> Callable[[Contract], Contract]:
    """A change of the tensor map of an operand."""
    return lambda x: replace(x, maps=tuple(replace(each, **fields) if each.matrix == name else each for each in x.maps))  # type: ignore[arg-type]


def matrix(name: str, **fields: object) -> Callable[[Contract], Contract]:
    """A change of an operand."""
    return lambda x: replace(
        x, matrices=tuple(replace(each, **fields) if each.name == name else each for each in x.matrices)
    )  # type: ignore[arg-type]


# Launches for which the kernel is not right, as changes of a claim.
LAUNCHES: dict[str, Callable[[Claim], Claim]] = {
    "A is not swizzled": of_contracts(box("A", span=16)),
    "A is swizzled over more bytes": of_contracts(box("A", span=64)),
    "B is not swizzled": of_contracts(box("B", span=16)),
    "boxes of A have half of the rows": of_contracts(box("A", rows=8)),
    "boxes of A have more rows": of_contracts(box("A", rows=24)),
    "boxes of B have half of k": of_contracts(box("B", cols=8)),
    "boxes of D have half of the rows": of_contracts(box("D", rows=8)),
    "boxes of D have two tiles": of_contracts(box("D", rows=32)),
    "the map of A is that of B": of_contracts(box("A", parameter=128)),
    "there is no map of D": of_contracts(lambda x: replace(x, maps=x.maps[:2])),
    "A is stored by columns": of_contracts(matrix("A", across=True)),
    "D is stored by columns": of_contracts(matrix("D", across=True)),
    "A is bf16": of_contracts(matrix("A", type="bf16")),
    "A is fp32": of_contracts(matrix("A", type="f32")),
    "D is bf16": of_contracts(matrix("D", type="bf16")),
    "D is fp32": of_contracts(matrix("D", type="f32")),
    "A is written": of_contracts(matrix("A", written=True)),
    "D is read": of_contracts(matrix("D", written=False)),
    "k is longer": of_contracts(lambda x: replace(x, sum_end=x.sum_end + 1)),
    "k is one k-tile shorter": of_contracts(lambda x: replace(x, sum_end=x.sum_end - 16)),
    "k begins one k-tile later": of_contracts(lambda x: replace(x, first=Polynomial.of(16))),
    "less shared memory": of_contracts(lambda x: replace(x, shared_bytes=2064)),
    "a tile of more columns": of_contracts(lambda x: replace(x, tile=replace(x.tile, cols=16))),
    "a tile of fewer rows": of_contracts(lambda x: replace(x, tile=replace(x.tile, rows=8))),
    "a tile one row below": of_contracts(lambda x: replace(x, tile=replace(x.tile, row=x.tile.row + 1))),
    "a tile one column on": of_contracts(lambda x: replace(x, tile=replace(x.tile, col=Polynomial.of(1)))),
    "no tile": of_contracts(lambda x: replace(x, tile=None)),
    "a parameter of 64 bits": of_contracts(
        lambda x: replace(x, parameters=x.parameters | {384: (x.parameters[384][0], 64)})
    ),
    "a parameter is not passed": of_contracts(lambda x: replace(x, parameters={384: x.parameters[384]})),
    "a special register has no value": of_contracts(lambda x: replace(x, special={})),
    "CTAs are numbered along y": of_contracts(lambda x: replace(x, special={"%ctaid.y": x.special["%ctaid.x"]})),
    "one k-tile more than the kernel is told": of_contracts(
        lambda x: replace(x, parameters=x.parameters | {388: (named(TILES) - 1, 32)})
    ),
    "one tile more than the kernel is told": of_contracts(
        lambda x: replace(x, parameters=x.parameters | {384: (x.parameters[384][0] - 1, 32)})
    ),
    "a warp more": lambda claim: of_contracts(lambda x: replace(x, lanes=96))(
        of_pipeline(groups=((32, 96),))(claim)
    ),
    "a second group": lambda claim: of_contracts(lambda x: replace(x, lanes=96))(
        of_pipeline(groups=((32, 64), (64, 96)))(claim)
    ),
    "three stages": of_pipeline(stages=3),
    "one stage": of_pipeline(stages=1),
    "the first item is the one after": of_pipeline(first=named("cta_x") + 1),
    "the items are those of the next CTA": of_pipeline(current=named("at") + 1),
    "CTAs take successive items": of_pipeline(step=Polynomial.of(1)),
    "an item more is left": of_pipeline(left=named("rest") - named("grid_x") + 1),
    "an item less is left": of_pipeline(left=named("rest") - named("grid_x") - 1),
    "tiles that the kernel is not told": of_pipeline(names={"tiles_m": named("at") + named("rest") + 2}),
    "another CTA reads the bytes": of_pipeline(share=384),
    "stages are handed back to another CTA": of_pipeline(returns=frozenset((1,))),
}  # fmt: skip


def changed(before: str, after: str, turns: bool = False) -> str:
    """The kernel's text with a fault. Fails if the right text has no place for it."""
    text = rings.text(turns)
    assert before in text
    return text.replace(before, after)


@pytest.mark.parametrize("turns", [False, True], ids=["one group", "two groups"])
def test_the_kernel_without_a_fault_is_certified_and_its_certificate_holds(turns: bool) -> None:
    stated = rings.claim(turns)
    certificate = rings.proven(rings.text(turns), stated)
    recheck(certificate, rings.text(turns), lambda _program: [rings.claim(turns)])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_ring_is_refused(fault: str) -> None:
    with pytest.raises(NotCertified):
        rings.proven(changed(*FAULTS[fault]), rings.claim())


@pytest.mark.parametrize("fault", TURNS)
def test_a_fault_of_turns_is_refused(fault: str) -> None:
    with pytest.raises(NotCertified):
        rings.proven(changed(*TURNS[fault], turns=True), rings.claim(turns=True))


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_launch_for_which_the_kernel_is_wrong_is_refused(launch: str) -> None:
    with pytest.raises(NotCertified):
        rings.proven(rings.text(), LAUNCHES[launch](rings.claim()))
