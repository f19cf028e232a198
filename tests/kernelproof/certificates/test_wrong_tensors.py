"""Proves that a small kernel with accumulators in tensor memory is certified, and is refused with any planted fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kernelproof.certificates import Claim, Contract, NotCertified, Pipeline, TensorPlan, recheck
from tests.kernelproof.certificates import tensor_rings as rings
from tests.kernelproof.certificates.rings import proven

WAIT_A = "mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r34+13352], %r33;"
WAIT_M = "mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r37+13312], %r30;"
WAIT_S = "mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r59+13344], %r50;"
AFTER = "tcgen05.fence::after_thread_sync;"
BEFORE = "tcgen05.fence::before_thread_sync;\n  bar.warp.sync -1;"
MMA = "tcgen05.mma.cta_group::1.kind::f16 [%r35], %q5, %q6, %r41, %p10;"
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"
LOAD_1 = "tcgen05.ld.sync.aligned.16x256b.x2.b32 {%f1, %f2, %f3, %f4, %f5, %f6, %f7, %f8}, [%r60];"
LOAD_2 = "tcgen05.ld.sync.aligned.16x256b.x2.b32 {%f9, %f10, %f11, %f12, %f13, %f14, %f15, %f16}, [%r61];"
WAIT_LOADS = "tcgen05.wait::ld.sync.aligned;"
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%r62];"
ALLOCATE = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r6], 32;"
PERMIT = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, 32;"
ADDRESS = "ld.shared.u32 %r6, [%r1+13376];"
HIGH = "mov.u32 %r40, 3221241872;"  # of a descriptor: a swizzle of 32 bytes, and 256 bytes from 8 rows to the next
SHAPE = "mov.u32 %r41, 134479888;"
END = "END:\n  bar.warp.sync -1;\n  bar.sync 0;"


def shape(bits: int) -> tuple[str, str]:
    """The instruction's descriptor with these bits flipped."""
    return SHAPE, f"mov.u32 %r41, {134479888 ^ bits};"


def high(bits: int) -> tuple[str, str]:
    """The high word of both descriptors of shared memory with these bits flipped."""
    return HIGH, f"mov.u32 %r40, {3221241872 ^ bits};"


# Maps each fault to the part of the text that it changes, and to what stands there instead.
FAULTS: dict[str, tuple[str, str]] = {
    # The allocation.
    "two warps allocate": ("setp.eq.u32 %p1, %r3, 2;", "setp.ge.u32 %p1, %r3, 6;"),
    "half of a warp allocates": ("@%p1 bra ALLOCATE;", "setp.eq.u32 %p14, %r2, 64; @%p14 bra ALLOCATE;"),
    "columns are allocated twice": (ALLOCATE, f"{ALLOCATE} add.s32 %r6, %r6, 8; {ALLOCATE}"),
    "columns are not allocated": (ALLOCATE, ""),
    "16 columns are allocated": (ALLOCATE, ALLOCATE.replace("32;", "16;")),
    "48 columns are allocated": (ALLOCATE, ALLOCATE.replace("32;", "48;")),
    "columns are allocated for a pair": (ALLOCATE, ALLOCATE.replace("::1", "::2")),
    "columns are allocated after the barrier": ("griddepcontrol.wait;", f"@!%p1 bra X; {ALLOCATE} X:"),
    "the address is stored over an mbarrier": ("add.s32 %r6, %r1, 13376;", "add.s32 %r6, %r1, 13312;"),
    "the permit is given back before the allocation": (f"{ALLOCATE}\n  {PERMIT}", f"{PERMIT} {ALLOCATE}"),
    "the permit of a pair is given back": (PERMIT, PERMIT.replace("::1", "::2")),
    "the address is loaded before the barrier": (f"bar.sync 0;\n  {ADDRESS}", f"{ADDRESS} bar.sync 0;"),
    "another word is loaded": (ADDRESS, ADDRESS.replace("13376", "13380")),
    "half of the address is loaded": (ADDRESS, "ld.shared.u16 %h2, [%r1+13376]; cvt.u32.u16 %r6, %h2;"),
    # The multiplier.
    "accumulators are not waited for": (WAIT_A, "setp.eq.u32 %p6, %r1, %r1;"),
    "accumulators are waited for at summed": (WAIT_A, WAIT_A.replace("13352", "13344")),
    "accumulators' other place is waited for": (WAIT_A, f"xor.b32 %r72, %r34, 16; {WAIT_A.replace('%r34', '%r72')}"),
    "accumulators' other phase is waited for": ("mov.u32 %r33, 1;", "mov.u32 %r33, 0;"),
    "the phase of accumulators does not change": ("xor.b32 %r33, %r33, %r47;", ""),
    "accumulators are waited for twice": (
        WAIT_A, f"{WAIT_A} @!%p6 bra TRY_A; TRY_B: {WAIT_A.replace('%p6', '%p14')} @!%p14 bra TRY_B;",
    ),
    "one place of accumulators": ("setp.eq.s32 %p11, %r46, 2;", "setp.eq.s32 %p11, %r46, 1;"),
    "three places of accumulators": ("setp.eq.s32 %p11, %r46, 2;", "setp.eq.s32 %p11, %r46, 3;"),
    "a k-tile is not waited for": (WAIT_M, "setp.eq.u32 %p6, %r1, %r1;"),
    "a k-tile's other phase is waited for": (WAIT_M, f"xor.b32 %r72, %r30, 1; {WAIT_M.replace('%r30', '%r72')}"),
    "a k-tile's other stage is waited for": (WAIT_M, f"xor.b32 %r72, %r37, 16; {WAIT_M.replace('%r37', '%r72')}"),
    "a wait for a k-tile is tried once": ("@!%p6 bra TRY_M;", ""),
    "no fence after the wait for accumulators": (
        f"{AFTER}\n  mul.lo.s32 %r38", "mul.lo.s32 %r38",
    ),
    "no fence after the wait for sums": (f"{AFTER}\n  add.s32 %r60", "add.s32 %r60"),
    "every lane multiplies": ("setp.ne.u32 %p5, %r32, 0;", "setp.ne.u32 %p5, %r32, %r32;"),
    "no thread multiplies": ("setp.eq.u32 %p3, %r3, 1;", "setp.eq.u32 %p3, %r3, 9;"),
    "a product under a predicate": (MMA, f"@%p10 {MMA}"),
    "the product of a pair": (MMA, MMA.replace("::1", "::2")),
    "a product before the wait for its k-tile": ("TRY_M:", f"mov.u64 %q5, 0; setp.ne.s32 %p10, %r36, 0;"
                                                 f"{SHAPE} {MMA.replace('%q6', '%q5')}\nTRY_M:"),
    "a product after the commit of its stage": (
        f"{MMA}\n  add.s32 %r42, %r37, 13320;\n  {COMMIT} [%r42];",
        f"add.s32 %r42, %r37, 13320;\n  {COMMIT} [%r42]; {MMA}",
    ),
    "a product after the commit of its stage, in another block": (
        f"{COMMIT} [%r42];", f"{COMMIT} [%r42]; bra.uni X; X: {MMA}",
    ),
    "a product of bf16": shape(9 << 7),
    "a product of two types": shape(1 << 7),
    "a product of a type that does not exist": shape(7 << 7),
    "a product that is summed in f16": shape(1 << 4),
    "a product that negates A": shape(1 << 13),
    "a product of 64 rows": shape(12 << 24),
    "a product of 32 columns": shape(6 << 17),
    "a product of rows of A across k": shape(1 << 15),
    "a product of columns of B across k": shape(1 << 16),
    "a product with a bit that must be zero": shape(1 << 3),
    "a descriptor of an instruction that depends on the problem": (SHAPE, "mov.u32 %r41, %r8;"),
    "descriptors of wgmma": high(1 << 14),
    "no swizzle": high(6 << 29),
    "a swizzle of 64 bytes": high(2 << 29),
    "8 rows further on are other rows": high(24),
    "A from its second row on": ("shr.u32 %r38, %r38, 4;", "add.s32 %r38, %r38, 32; shr.u32 %r38, %r38, 4;"),
    "B from the next stage on": ("add.s32 %r39, %r38, 256;", "add.s32 %r39, %r38, 288;"),
    "B beyond shared memory": ("add.s32 %r39, %r38, 256;", "add.s32 %r39, %r38, 1024;"),
    "A is multiplied by itself": (MMA, MMA.replace("%q6", "%q5")),
    "A and B are exchanged": (MMA, MMA.replace("%q5, %q6", "%q6, %q5")),
    "A of the other stage": (
        "mul.lo.s32 %r38, %r11, 4608;", "xor.b32 %r38, %r11, 1; mul.lo.s32 %r38, %r38, 4608;",
    ),
    "a product is added twice": (MMA, f"{MMA} {MMA.replace('%p10', '1')}"),
    "a product is missing": (MMA, ""),
    "each k-tile begins with zeros": (MMA, MMA.replace("%p10", "0")),
    "the first k-tile is added to what is there": (MMA, MMA.replace("%p10", "1")),
    "whether products are added depends on the problem": (MMA, f"setp.gt.s32 %p10, %r10, 5; {MMA}"),
    "sums begin at another lane": (SHAPE, f"{SHAPE} add.s32 %r35, %r35, 1048576;"),
    "sums lie beyond the columns": (SHAPE, f"{SHAPE} add.s32 %r35, %r35, 24;"),
    "sums lie in the other place": ("shl.b32 %r35, %r31, 4;", "xor.b32 %r35, %r31, 1; shl.b32 %r35, %r35, 4;"),
    "both places share columns": ("shl.b32 %r35, %r31, 4;", "shl.b32 %r35, %r31, 3;"),
    "sums lie at a number": ("add.s32 %r35, %r35, %r6;", ""),
    "sums lie where the k-tile says": (SHAPE, f"{SHAPE} shl.b32 %r35, %r11, 4; add.s32 %r35, %r35, %r6;"),
    "a stage is not handed back": (f"{COMMIT} [%r42];", ""),
    "a stage is handed back twice": (f"{COMMIT} [%r42];", f"{COMMIT} [%r42];" * 2),
    "a stage is handed back at full": ("add.s32 %r42, %r37, 13320;", "add.s32 %r42, %r37, 13312;"),
    "the other stage is handed back": (
        "add.s32 %r42, %r37, 13320;", "xor.b32 %r42, %r37, 16; add.s32 %r42, %r42, 13320;",
    ),
    "a stage is handed back before its products": (MMA, f"add.s32 %r42, %r37, 13320; {COMMIT} [%r42]; {MMA}"),
    "a stage is handed back as by a thread": (f"{COMMIT} [%r42];", "mbarrier.arrive.shared::cta.b64 _, [%r42];"),
    "the sums are not committed": (f"{COMMIT} [%r45];", ""),
    "the sums are committed twice": (f"{COMMIT} [%r45];", f"{COMMIT} [%r45];" * 2),
    "the other place is committed": (
        "add.s32 %r45, %r34, 13344;", "xor.b32 %r45, %r34, 16; add.s32 %r45, %r45, 13344;",
    ),
    "the sums are committed at stored": ("add.s32 %r45, %r34, 13344;", "add.s32 %r45, %r34, 13352;"),
    "the sums are committed before the last k-tile": (
        "add.s32 %r42, %r37, 13320;\n  " + COMMIT + " [%r42];",
        f"add.s32 %r42, %r37, 13320;\n  {COMMIT} [%r42]; add.s32 %r45, %r34, 13344; {COMMIT} [%r45];",
    ),
    "an mbarrier of sums expects two arrivals": (
        "mbarrier.init.shared::cta.b64 [%r1+13344], %r4;", "mbarrier.init.shared::cta.b64 [%r1+13344], %r5;",
    ),
    "an mbarrier of stored sums expects one arrival": ("mov.u32 %r5, 4;", "mov.u32 %r5, 1;"),
    "one k-tile too few is multiplied": (
        "setp.lt.s32 %p8, %r36, %r8;", "add.s32 %r72, %r36, 1; setp.lt.s32 %p8, %r72, %r8;",
    ),
    "one k-tile too many is multiplied": ("setp.lt.s32 %p8, %r36, %r8;", "setp.le.s32 %p8, %r36, %r8;"),
    # The group that stores.
    "sums are not waited for": (WAIT_S, "setp.eq.u32 %p6, %r1, %r1;"),
    "sums are waited for twice": (
        WAIT_S, f"{WAIT_S} @!%p6 bra TRY_S; TRY_B: {WAIT_S.replace('%p6', '%p14')} @!%p14 bra TRY_B;",
    ),
    "sums' other phase is waited for": ("mov.u32 %r50, 0;", "mov.u32 %r50, 1;"),
    "sums' phase does not change": ("xor.b32 %r50, %r50, %r71;", ""),
    "sums' other place is waited for": (WAIT_S, f"xor.b32 %r72, %r59, 16; {WAIT_S.replace('%r59', '%r72')}"),
    "sums are loaded before the wait": ("TRY_S:", f"add.s32 %r60, %r58, %r52; {LOAD_1}\nTRY_S:"),
    "sums of the other place are loaded": (LOAD_1, f"xor.b32 %r72, %r58, 16; add.s32 %r60, %r72, %r52; {LOAD_1}"),
    "a warp loads another warp's lanes": ("shl.b32 %r52, %r51, 21;", "xor.b32 %r52, %r51, 1; shl.b32 %r52, %r52, 21;"),
    "warps exchange their rows": ("and.b32 %r51, %r3, 3;", "and.b32 %r51, %r3, 3; xor.b32 %r51, %r51, 1;"),
    "all warps load the first lanes": ("shl.b32 %r52, %r51, 21;", "mov.u32 %r52, 0;"),
    "lanes load from different addresses": (LOAD_1, f"add.s32 %r60, %r60, %r32; {LOAD_1}"),
    "the second half of rows is the first one": ("add.s32 %r61, %r60, 1048576;", "mov.u32 %r61, %r60;"),
    "columns are loaded from the ninth on": (LOAD_1, f"add.s32 %r60, %r60, 8; {LOAD_1}"),
    "sums are loaded from beyond the columns": (LOAD_1, f"add.s32 %r60, %r60, 32; {LOAD_1}"),
    "a load of another shape": (LOAD_1, LOAD_1.replace("16x256b.x2", "16x128b.x4")),
    "a load of packed sums": (LOAD_1, LOAD_1.replace("x2.b32", "x2.pack::16b.b32")),
    "one warp does not load": (LOAD_1, f"setp.eq.s32 %p14, %r51, 0; @%p14 bra NOT; {LOAD_1} NOT:"),
    "loads are not waited for": (WAIT_LOADS, ""),
    "loads are waited for before the last one begins": (f"{LOAD_2}\n  {WAIT_LOADS}", f"{WAIT_LOADS}\n  {LOAD_2}"),
    "a register is read while it is loaded": (WAIT_LOADS, f"cvt.rn.f16x2.f32 %r64, %f2, %f1; {WAIT_LOADS}"),
    "a register is overwritten while it is loaded": (WAIT_LOADS, f"mov.f32 %f3, 0f00000000; {WAIT_LOADS}"),
    "no fence before accumulators are handed back": (BEFORE, "bar.warp.sync -1;"),
    "lanes do not meet before accumulators are handed back": (BEFORE, "tcgen05.fence::before_thread_sync;"),
    "the fence is after the warp's barrier": (BEFORE, "bar.warp.sync -1; tcgen05.fence::before_thread_sync;"),
    "accumulators are not handed back": (ARRIVE, ""),
    "accumulators are handed back twice": (ARRIVE, ARRIVE * 2),
    "accumulators are handed back at summed": ("add.s32 %r63, %r1, 13352;", "add.s32 %r63, %r1, 13344;"),
    "accumulators of the other place are handed back": (
        "add.s32 %r62, %r58, %r63;", "xor.b32 %r62, %r58, 16; add.s32 %r62, %r62, %r63;",
    ),
    "accumulators are handed back before they are loaded": (
        "add.s32 %r60, %r58, %r52;", "@!%p12 bra EARLY; add.s32 %r62, %r58, %r63;" + ARRIVE
        + " EARLY: add.s32 %r60, %r58, %r52;",
    ),
    "accumulators are handed back by one warp": (
        "@!%p12 bra RETURNED;", "setp.eq.s32 %p14, %r2, 128; @!%p14 bra RETURNED;",
    ),
    "sums are loaded after the arrival": ("RETURNED:\n", f"RETURNED: {LOAD_1} {WAIT_LOADS}\n"),
    "neighbours are exchanged": ("cvt.rn.f16x2.f32 %r65, %f4, %f3;", "cvt.rn.f16x2.f32 %r65, %f3, %f4;"),
    "halves of a tile are exchanged": ("[%r55+512], {%r64, %r65, %r66, %r67}", "[%r55+512], {%r66, %r67, %r64, %r65}"),
    # The end.
    "lanes of a warp do not meet in the end": (END, "END:\n  bar.sync 0;"),
    "threads do not meet in the end": (END, "END:\n  bar.warp.sync -1;"),
    "warps meet after the CTA's barrier": (END, "END:\n  bar.warp.sync -1;\n  bar.sync 0; bar.warp.sync -1;"),
    "threads meet at another barrier": (END, END.replace("bar.sync 0;", "bar.sync 1;")),
    "a part of the threads meets": (END, END.replace("bar.sync 0;", "bar.sync 0, 128;")),
    "no fence before columns are freed": (f"{AFTER}\n  tcgen05.dealloc", "tcgen05.dealloc"),
    "the fence is before the barrier": (
        f"bar.sync 0;\n  \n  @!%p1 bra DONE;\n  {AFTER}", f"@!%p1 bra X; {AFTER} X: bar.sync 0; @!%p1 bra DONE;",
    ),
    "columns are not freed": (FREE, ""),
    "columns are freed twice": (FREE, FREE + FREE),
    "more columns are freed than allocated": (FREE, FREE.replace("32;", "64;")),
    "other columns are freed": (FREE, f"add.s32 %r6, %r6, 16; {FREE}"),
    "columns of a pair are freed": (FREE, FREE.replace("::1", "::2")),
    "another warp frees columns": ("@!%p1 bra DONE;", "setp.eq.u32 %p1, %r3, 3; @!%p1 bra DONE;"),
    "two warps free columns": ("@!%p1 bra DONE;", "setp.ge.u32 %p1, %r3, 6; @!%p1 bra DONE;"),
    "columns are freed before the barrier": (
        END, f"END:\n  bar.warp.sync -1; @!%p1 bra Y; {AFTER} {FREE} Y: bar.sync 0;",
    ),
    "one role ends by itself": ("@%p9 bra ITEM_P;\n", "@%p9 bra ITEM_P; ret;\n"),
    "threads of the first warp end by themselves": (
        "setp.ne.u32 %p5, %r2, 0;\n  @%p5 bra END;", "setp.ne.u32 %p5, %r2, 0;\n  @%p5 bra DONE;",
    ),
}  # fmt: skip
MMA_2 = MMA.replace("::1", "::2")
COMMIT_2 = "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
MEET = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;"
PAIR: dict[str, tuple[str, str]] = {
    "CTAs do not meet before they begin": (f"{MEET}\n  bar.sync 0;", "bar.sync 0;"),
    "CTAs do not meet in the end": (f"{MEET}\n  @!%p1 bra DONE;", "@!%p1 bra DONE;"),
    "CTAs do not wait in the end": (
        f"{MEET}\n  @!%p1 bra DONE;", "barrier.cluster.arrive.relaxed.aligned; @!%p1 bra DONE;",
    ),
    "CTAs meet before their threads in the end": (f"bar.sync 0;\n  {MEET}", f"{MEET}\n  bar.sync 0;"),
    "the second CTA multiplies too": ("setp.ne.u32 %p5, %r80, 0; @%p5 bra END;", ""),
    "the second CTA multiplies in place of the first": ("setp.ne.u32 %p5, %r80, 0;", "setp.eq.u32 %p5, %r80, 0;"),
    "the second CTA expects bytes": ("setp.ne.u32 %p13, %r80, 0;", "setp.ne.u32 %p13, %r80, 5;"),
    "the bytes of one CTA are expected": ("mov.u32 %r21, 8704;", "mov.u32 %r21, 4352;"),
    "bytes count in each CTA": ("and.b32 %r17, %r17, -16777217;", ""),
    "both CTAs load the same half of B": ("shl.b32 %r22, %r80, 3;", "mov.u32 %r22, 0;"),
    "halves of B are exchanged": ("shl.b32 %r22, %r80, 3;", "xor.b32 %r22, %r80, 1; shl.b32 %r22, %r22, 3;"),
    "a box of one CTA": ("complete_tx::bytes.cta_group::2 [%r18]", "complete_tx::bytes [%r18]"),
    "a product of one CTA": (MMA_2, MMA),
    "a product of 128 rows": ("mov.u32 %r41, 268697616;", "mov.u32 %r41, 134479888;"),
    "a commit of one CTA": (f"{COMMIT_2} [%r42]", f"{COMMIT_2.replace('::2', '::1')} [%r42]"),
    "a stage is handed back to the first CTA alone": (
        f"{COMMIT_2} [%r42], %h1;", f"mov.u16 %h2, 1; {COMMIT_2} [%r42], %h2;",
    ),
    "sums are committed to the first CTA alone": (
        f"{COMMIT_2} [%r45], %h1;", f"mov.u16 %h2, 1; {COMMIT_2} [%r45], %h2;",
    ),
    "a commit names an mbarrier of the second CTA": (
        f"{COMMIT_2} [%r45]", f"mov.u32 %r83, 1; mapa.shared::cluster.u32 %r45, %r45, %r83; {COMMIT_2} [%r45]",
    ),
    "accumulators are handed back to the own CTA": ("mov.u32 %r81, 0; mapa", "mov.u32 %r81, %r80; mapa"),
    "accumulators are handed back to the second CTA": ("mov.u32 %r81, 0; mapa", "mov.u32 %r81, 1; mapa"),
    "stored expects the own CTA's arrivals": ("mov.u32 %r5, 8;", "mov.u32 %r5, 4;"),
    "the first CTA ends before its places come back": (
        "TRY_3:\n  mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r82+13352], %r33;\n  @!%p6 bra TRY_3;", "TRY_3:",
    ),
    "the first CTA ends before its last place comes back": (
        "TRY_4:\n  mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r82+13352], %r33;\n  @!%p6 bra TRY_4;", "TRY_4:",
    ),
    "the last places are waited for in one phase": ("xor.b32 %r33, %r33, %r31;", ""),
    "the last stages are not waited for": (
        "TRY_2:\n  mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r82+13320], %r12;\n  @!%p6 bra TRY_2;", "TRY_2:",
    ),
    "D is that of the other CTA": (
        "shl.b32 %r81, %r80, 7; add.s32 %r68", "xor.b32 %r81, %r80, 1; shl.b32 %r81, %r81, 7; add.s32 %r68",
    ),
    "A is that of the other CTA": (
        "shl.b32 %r81, %r80, 7; add.s32 %r13", "xor.b32 %r81, %r80, 1; shl.b32 %r81, %r81, 7; add.s32 %r13",
    ),
}  # fmt: skip


def of_all(change: Callable[[Contract], Contract], **fields: object) -> Callable[[Claim], Claim]:
    """A change of both contracts of a claim, and of what it states of the pipeline."""

    def applied(claim: Claim) -> Claim:
        assert isinstance(claim.ring, Pipeline)
        ring = replace(claim.ring, entry=change(claim.ring.entry), **fields)  # type: ignore[arg-type]
        return claim._replace(contract=change(claim.contract), ring=ring)

    return applied


def of_type(name: str, kind: str) -> Callable[[Contract], Contract]:
    """The contract in which an operand has another type."""
    return lambda x: replace(x, matrices=tuple(replace(y, type=kind) if y.name == name else y for y in x.matrices))


LAUNCHES: dict[str, Callable[[Claim], Claim]] = {
    "one place of accumulators": of_all(lambda x: x, tensor=TensorPlan(1, 16, False)),
    "three places of accumulators": of_all(lambda x: x, tensor=TensorPlan(3, 16, False)),
    "k-tiles of 32 k": of_all(lambda x: x, tensor=TensorPlan(2, 32, False)),
    "the CTA is one of a pair": of_all(lambda x: x, tensor=TensorPlan(2, 16, True)),
    "A is bf16": of_all(of_type("A", "bf16")),
    "D is bf16": of_all(of_type("D", "bf16")),
    "a tile of fewer columns": of_all(lambda x: replace(x, tile=replace(x.tile, cols=8))),
    "the group has three warps": of_all(lambda x: x, groups=((128, 224),)),
    "k is longer": of_all(lambda x: replace(x, sum_end=x.sum_end + 16)),
}


# Faults of several parts of the text, none of which is a fault where the others are as they should be.
TOGETHER: dict[str, tuple[tuple[str, str], ...]] = {
    "48 columns are allocated and freed": (
        (ALLOCATE, ALLOCATE.replace("32;", "48;")), (FREE, FREE.replace("32;", "48;")),
    ),
    "columns are allocated twice, and the second ones are used": (
        (ALLOCATE, f"{ALLOCATE} add.s32 %r6, %r6, 8; {ALLOCATE}"), (ADDRESS, ADDRESS.replace("13376", "13384")),
    ),
    "all is for a pair": tuple((each, each.replace("::1", "::2")) for each in (ALLOCATE, PERMIT, MMA, FREE)),
}  # fmt: skip


def changed(before: str, after: str, ranks: int = 1) -> str:
    """The kernel's text with a fault. Fails if the right text has no place for it."""
    text = rings.text(ranks)
    assert before in text
    return text.replace(before, after)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_kernel_without_a_fault_is_certified_and_its_certificate_holds(ranks: int) -> None:
    recheck(proven(rings.text(ranks), rings.claim(ranks)), rings.text(ranks), lambda _program: [rings.claim(ranks)])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_tensor_memory_is_refused(fault: str) -> None:
    with pytest.raises(NotCertified):
        proven(changed(*FAULTS[fault]), rings.claim())


@pytest.mark.parametrize("fault", TOGETHER)
def test_faults_that_fit_each_other_are_refused(fault: str) -> None:
    text = rings.text()
    for before, after in TOGETHER[fault]:
        assert before in text
        text = text.replace(before, after)
    with pytest.raises(NotCertified):
        proven(text, rings.claim())


@pytest.mark.parametrize("fault", PAIR)
def test_a_fault_of_a_pair_is_refused(fault: str) -> None:
    with pytest.raises(NotCertified):
        proven(changed(*PAIR[fault], ranks=2), rings.claim(2))


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_launch_for_which_the_kernel_is_wrong_is_refused(launch: str) -> None:
    with pytest.raises(NotCertified):
        proven(rings.text(), LAUNCHES[launch](rings.claim()))
