"""Proves that a small product and small sums of rows are certified, and are refused with any planted fault."""

from __future__ import annotations

from functools import partial

import pytest

from kernelproof.certificates import Certificate, NotCertified, prove
from kernelproof.certificates.launches import claims
from tests.kernelproof.certificates.small_products import PRODUCT, TEXT, proven
from tests.kernelproof.certificates.subjects import Subject
from tests.kernelproof.certificates.test_wrong_kernels import row_sum, two_warps

COPY_A, COPY_B = "cp.async.cg.shared.global [%r27], [%q6], 16;", "cp.async.cg.shared.global [%r27+1024], [%q7], 16;"
WAIT, WAIT_ALL, COMMIT, SYNC = "cp.async.wait_group 1;", "cp.async.wait_all;", "cp.async.commit_group;", "bar.sync 0;"
LOAD_A = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r30, %r31, %r32, %r33}, [%r28];"
LOAD_B = "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r34, %r35}, [%r29+1024];"
MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32\n"
    "    {%f1, %f2, %f3, %f4}, {%r30, %r31, %r32, %r33}, {%r34, %r35}, {%f1, %f2, %f3, %f4};"
)
STORE, STORE_8 = "st.global.b32 [%q9], %r41;", "st.global.b32 [%q11], %r42;"
BEFORE_READ, BEHIND_READ = f"{WAIT}\n  {SYNC}", f"{SYNC}\n  mov.u32 %r25, %r26;"

# By fault: a part of the product's text, and its replacement.
FAULTS: dict[str, tuple[str, str]] = {
    # Copies, waits and barriers.
    "the copy of the next k-tile is waited for too late": (WAIT, "cp.async.wait_group 2;"),
    "no copy is waited for": (WAIT, ""),
    "copies are in no group": (f"LOADED:\n  {COMMIT}", "LOADED:"),
    "the wait is behind the barrier": (BEFORE_READ, f"{SYNC} {WAIT}"),
    "threads do not meet before they read": (BEFORE_READ, WAIT),
    "threads do not meet behind their reads": (BEHIND_READ, "mov.u32 %r25, %r26;"),
    "one warp does not meet": (BEFORE_READ, f"{WAIT} setp.eq.u32 %p4, %r15, 0; @!%p4 {SYNC}"),
    "one warp waits": (BEFORE_READ, f"setp.eq.u32 %p4, %r15, 0; @%p4 {WAIT} {SYNC}"),
    "one warp commits": (f"LOADED:\n  {COMMIT}", f"LOADED: setp.eq.u32 %p4, %r15, 0; @%p4 {COMMIT}"),
    "one warp waits for all": (WAIT_ALL, f"setp.eq.u32 %p4, %r15, 0; @%p4 {WAIT_ALL}"),
    "warps meet at barriers of their own": (BEFORE_READ, f"{WAIT} bar.sync %r15;"),
    "half of the threads meet": (BEFORE_READ, f"{WAIT} bar.sync 0, 32;"),
    "a CTA ends with a copy": (
        WAIT_ALL, f"{WAIT_ALL} sub.s64 %q6, %q6, 32; cp.async.cg.shared.global [%r13], [%q6], 16;",
    ),
    "a CTA ends with a group of copies": (
        WAIT_ALL, f"{WAIT_ALL} sub.s64 %q6, %q6, 32; cp.async.cg.shared.global [%r13], [%q6], 16; {COMMIT}",
    ),
    "the other stage is copied to": ("mad.lo.s32 %r27, %r26, 1280, %r13;", "mad.lo.s32 %r27, %r25, 1280, %r13;"),
    "stages overlap": ("mad.lo.s32 %r27, %r26, 1280, %r13;", "mad.lo.s32 %r27, %r26, 1024, %r13;"),
    "a stage lies beyond shared memory": ("mad.lo.s32 %r27, %r26, 1280, %r13;", "mad.lo.s32 %r27, %r26, 2560, %r13;"),
    "a stage lies before shared memory": ("mad.lo.s32 %r27, %r26, 1280, %r13;", "mad.lo.s32 %r27, %r26, -1280, %r13;"),
    "rows of A lie on each other": ("shl.b32 %r13, %r7, 5;", "shl.b32 %r13, %r7, 4;"),
    "a copy's target is not aligned": (COPY_A, "add.s32 %r27, %r27, 8; " + COPY_A),
    "a copy's target depends on the problem": (COPY_A, "add.s32 %r27, %r27, %r2; " + COPY_A),
    "a copy's source is not aligned": (COPY_A, "add.s64 %q6, %q6, 8; " + COPY_A),
    "a copy of half of a vector": (COPY_A, "mov.u32 %r43, 8; " + COPY_A.replace("16;", "16, %r43;")),
    "a copy of as many bytes as the problem says": (COPY_A, COPY_A.replace("16;", "16, %r2;")),
    "a copy of zeros": (COPY_A, "mov.u32 %r43, 0; " + COPY_A.replace("16;", "16, %r43;")),
    "A is not copied": (COPY_A, ""),
    "B is not copied": (COPY_B, ""),
    "B is copied by too few threads": ("setp.lt.u32 %p1, %r3, 16;", "setp.lt.u32 %p1, %r3, 15;"),
    "B is copied by too many threads": ("setp.lt.u32 %p1, %r3, 16;", "setp.lt.u32 %p1, %r3, 17;"),
    "D is copied": (COPY_A, COPY_A.replace("%q6", "%q3")),
    "a copy from a number": (COPY_A, "mov.u64 %q12, 4096; " + COPY_A.replace("%q6", "%q12")),
    "a copy from a sum of addresses": (COPY_A, "add.s64 %q12, %q6, %q2; " + COPY_A.replace("%q6", "%q12")),
    "a copy from an address of both operands": (COPY_A, "add.s64 %q12, %q6, %q2; sub.s64 %q12, %q12, %q1;"
                                                + COPY_A.replace("%q6", "%q12")),
    # Which elements.
    "A of the next rows": ("shl.b32 %r10, %r5, 5;", "shl.b32 %r10, %r5, 5; add.s32 %r10, %r10, 1;"),
    "A of the other axis' tile": ("shl.b32 %r10, %r5, 5;", "shl.b32 %r10, %r4, 5;"),
    "A of overlapping tiles": ("shl.b32 %r10, %r5, 5;", "shl.b32 %r10, %r5, 4;"),
    "B of the other axis' tile": ("shl.b32 %r11, %r4, 3;", "shl.b32 %r11, %r5, 3;"),
    "rows of A are n long": ("cvt.u64.u32 %q5, %r2;", "cvt.u64.u32 %q5, %r1;"),
    "rows of A are one element longer": ("cvt.u64.u32 %q5, %r2;", "cvt.u64.u32 %q5, %r2; add.s64 %q5, %q5, 8;"),
    "k of A begins at 8": ("shl.b32 %r9, %r8, 3;", "shl.b32 %r9, %r8, 3; add.s32 %r9, %r9, 8;"),
    "k of A begins before 0": ("shl.b32 %r9, %r8, 3;", "shl.b32 %r9, %r8, 3; sub.s32 %r9, %r9, 8;"),
    "halves of k are exchanged in A": (
        "add.s64 %q6, %q6, %q4;", "xor.b32 %r43, %r9, 8; cvt.u64.u32 %q12, %r43; add.s64 %q6, %q6, %q12;",
    ),
    "k-tiles are 8 apart": ("add.s64 %q6, %q6, 32;", "add.s64 %q6, %q6, 16;"),
    "k-tiles of B stay": ("add.s64 %q7, %q7, 32;", ""),
    "k is read beyond its end": ("setp.ge.s32 %p2, %r24, %r2;", "setp.gt.s32 %p2, %r24, %r2;"),
    "the last k-tile is not read": (
        "setp.ge.s32 %p2, %r24, %r2;", "add.s32 %r43, %r24, 16; setp.ge.s32 %p2, %r43, %r2;",
    ),
    "one k-tile more is multiplied": ("setp.lt.s32 %p3, %r24, %r2;", "setp.le.s32 %p3, %r24, %r2;"),
    "one k-tile too few is multiplied": (
        "setp.lt.s32 %p3, %r24, %r2;", "add.s32 %r43, %r24, 16; setp.lt.s32 %p3, %r43, %r2;",
    ),
    "one k-tile is multiplied": ("@%p3 bra MULTIPLY;", ""),
    "a k-tile is left out": (MMA, f"setp.eq.s32 %p4, %r24, 32; @%p4 bra OUT; {MMA} OUT:"),
    "the tenth k-tile is left out": (MMA, f"setp.eq.s32 %p4, %r24, 160; @%p4 bra OUT; {MMA} OUT:"),
    "stages do not alternate": ("xor.b32 %r26, %r25, 1;", "mov.u32 %r26, 0;"),
    "the other stage is read": (LOAD_A, "mad.lo.s32 %r28, %r26, 1280, %r19; " + LOAD_A),
    # Fragments.
    "rows of A are not unswizzled": ("xor.b32 %r17, %r17, %r18;", ""),
    "rows of B are not unswizzled": ("xor.b32 %r21, %r21, %r22;", ""),
    "a fragment of A is transposed": (LOAD_A, LOAD_A.replace("x4.shared", "x4.trans.shared")),
    "both warps have the rows of the first": ("shl.b32 %r19, %r15, 4;", "mov.u32 %r19, 0;"),
    "B is read from A": (LOAD_B, LOAD_B.replace("+1024", "")),
    "the registers of A are exchanged": (MMA, MMA.replace("{%r30, %r31, %r32, %r33}", "{%r30, %r32, %r31, %r33}")),
    "the registers of B are exchanged": (MMA, MMA.replace("{%r34, %r35}", "{%r35, %r34}")),
    "A is multiplied by A": (MMA, MMA.replace("{%r34, %r35}", "{%r30, %r32}")),
    "B is multiplied by A": (MMA, MMA.replace("{%r30, %r31, %r32, %r33}", "{%r34, %r34, %r35, %r35}")),
    "a number is multiplied": (MMA, MMA.replace("{%r34, %r35}", "{%r34, %r3}")),
    "sums are multiplied": (MMA, "cvt.rn.f16x2.f32 %r34, %f2, %f1; " + MMA),
    "a product of bf16": (MMA, MMA.replace("f32.f16.f16.f32", "f32.bf16.bf16.f32")),
    "a product of 8 k": (
        MMA, "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, {%r30, %r31}, {%r34},"
        " {%f1, %f2, %f3, %f4};",
    ),
    "a product of one warp": (MMA, f"setp.eq.u32 %p4, %r15, 0; @!%p4 bra ONE; {MMA} ONE:"),
    "a product is added twice": (MMA, MMA + MMA),
    "sums are exchanged": (MMA, MMA.replace("{%f1, %f2, %f3, %f4};", "{%f3, %f4, %f1, %f2};")),
    "sums begin with one": ("mov.f32 %f1, 0f00000000;", "mov.f32 %f1, 0f3F800000;"),
    "sums begin with the thread's number": ("mov.f32 %f1, 0f00000000;", "mov.b32 %f1, %r3;"),
    "sums are added to each other": (MMA, f"{MMA} add.f32 %f1, %f1, %f2;"),
    "one load of A by a part of the threads": (LOAD_A, f"setp.lt.u32 %p4, %r14, 16; @%p4 {LOAD_A}"),
    # D.
    "D of the next rows": (STORE, "add.s64 %q9, %q9, %q8; " + STORE),
    "D of the next columns": (STORE, "add.s64 %q9, %q9, 2; " + STORE),
    "D of the next pair of columns": (STORE, "add.s64 %q9, %q9, 4; " + STORE),
    "D of overlapping tiles": ("shl.b32 %r38, %r5, 5;", "shl.b32 %r38, %r5, 4;"),
    "D of the other axis' tile": ("shl.b32 %r40, %r4, 3;", "shl.b32 %r40, %r5, 3;"),
    "rows of D are k long": ("cvt.u64.u32 %q8, %r1;", "cvt.u64.u32 %q8, %r2;"),
    "rows of D overflow 32 bits": ("mul.lo.s64 %q9, %q9, %q8;", "mul.lo.s32 %r43, %r36, %r1; cvt.u64.u32 %q9, %r43;"),
    "D is stored to A": (STORE, "sub.s64 %q9, %q9, %q3; add.s64 %q9, %q9, %q1; " + STORE),
    "neighbours are exchanged": ("%r41, %f2, %f1;", "%r41, %f1, %f2;"),
    "rows 8 later are exchanged": (STORE_8, STORE_8.replace("%r42", "%r41")),
    "a part of D is not stored": (STORE_8, ""),
    "a part of D is stored twice": (STORE, STORE + STORE),
    "a part of D is stored by one warp": (STORE, f"setp.eq.u32 %p4, %r15, 0; @%p4 {STORE}"),
    "D is not stored": (f"{STORE}\n  {STORE_8}", ""),
    "D is stored in the main loop": (WAIT, f"{WAIT} st.global.b32 [%q3], %r3;"),
    "D gets numbers": (STORE, STORE.replace("%r41", "%r3")),
    "D gets elements of A": (STORE, STORE.replace("%r41", "%r30")),
    "D gets sums in fp32": (STORE, "st.global.f32 [%q9], %f1;"),
    "D is rounded to zero": ("cvt.rn.f16x2.f32 %r41", "cvt.rz.f16x2.f32 %r41"),
    "D is rounded to bf16": ("cvt.rn.f16x2.f32 %r41", "cvt.rn.bf16x2.f32 %r41"),
    "a pair of a sum and a number": ("%r41, %f2, %f1;", "%r41, %f2, 0f00000000;"),
    # Branches and numbers.
    "one warp ends before": (WAIT_ALL, f"setp.eq.u32 %p4, %r15, 0; @%p4 bra END; {WAIT_ALL}"),
    "one warp ends in the loop": (BEFORE_READ, f"{WAIT} setp.eq.u32 %p4, %r15, 0; @%p4 ret; {SYNC}"),
    "a loop without an end": (WAIT_ALL, f"AGAIN: bra.uni AGAIN; {WAIT_ALL}"),
    "a branch by what was loaded": (
        WAIT_ALL, f"ld.global.u16 %h1, [%q2]; setp.eq.s16 %p4, %h1, 0; @%p4 bra END; {WAIT_ALL}",
    ),
    "a store under a predicate of what was loaded": (
        STORE, f"ld.global.u16 %h1, [%q2]; setp.eq.s16 %p4, %h1, 0; @%p4 {STORE}",
    ),
    "a division by zero without a use": (WAIT_ALL, f"mov.u32 %r43, 0; div.u32 %r44, %r3, %r43; {WAIT_ALL}"),
    "a division by zero": (WAIT_ALL, f"mov.u32 %r43, 0; div.u32 %r44, %r3, %r43; {WAIT_ALL} add.s32 %r5, %r5, %r44;"),
    "a special register that has no value": ("mov.u32 %r5, %ctaid.y;", "mov.u32 %r5, %smid;"),
    "an atomic": (STORE, f"atom.global.add.u32 %r43, [%q9], 1; {STORE}"),
    "a read of D": (STORE, f"ld.global.b32 %r41, [%q9]; {STORE}"),
}  # fmt: skip
# Shared memory from its ninth byte on, in all accesses alike.
SHIFTED = ("s[2560];", "s[2568];"), ("mov.u32 %r6, s;", "mov.u32 %r6, s; add.s32 %r6, %r6, 8;")
CONTRACTS: dict[str, tuple[str, str]] = {
    "the grid has its axes exchanged": ('"n / 8", "m / 32"', '"m / 32", "n / 8"'),
    "sizes are exchanged": ('"m", "n", "k"]\nresult', '"n", "m", "k"]\nresult'),
    "the length of k is not passed": ('"m", "n", "k"]\nresult', '"m", "n", "unused"]\nresult'),
    "k is a multiple of 8": ("k = { multiple = 16", "k = { multiple = 8"),
    "A is aligned to 8 bytes": ('A = { type = "f16"', 'A = { type = "f16", alignment = 8'),
    "B is aligned to 2 bytes": ('B = { type = "f16"', 'B = { type = "f16", alignment = 2'),
    "D is aligned to 2 bytes": ('D = { type = "f16"', 'D = { type = "f16", alignment = 2'),
    "A is stored by columns": ('A = { type = "f16", shape = ["m", "k"] }', 'A = { type = "f16", shape = ["k", "m"] }'),
    "D is fp32": ('D = { type = "f16"', 'D = { type = "f32"'),
    "all are bf16": ('"f16"', '"bf16"'),
    "tiles are of 16 rows": ("tile = [32, 8]", "tile = [16, 8]"),
    "four warps": ("block = [64]", "block = [128]"),
    "one warp": ("block = [64]", "block = [32]"),
    "threads in two rows": ("block = [64]", "block = [32, 2]"),
}  # fmt: skip

# Sums of rows: of one warp, and of two that meet in shared memory.
ONE_WARP, TWO_WARPS = row_sum(), two_warps("bar.sync 0;")
STORE_SUM, SHUFFLE = "st.global.f32 [%q7], %f1;", "shfl.sync.bfly.b32 %r7|%p3, %r6, 8, 31, %r5;"
KEEP, FETCH = "st.shared.f32 [%r10], %f1;", "ld.shared.f32 %f3, [s+4];"
SUMS: dict[str, tuple[Subject, str, str]] = {
    "a shuffle by another distance": (ONE_WARP, SHUFFLE, SHUFFLE.replace("8,", "4,")),
    "a shuffle of half of the lanes": (ONE_WARP, "mov.u32 %r5, -1;", "mov.u32 %r5, 65535;"),
    "a shuffle by the sum of lanes before": (ONE_WARP, SHUFFLE, SHUFFLE.replace("bfly", "up").replace("31,", "0,")),
    "a shuffle within halves of a warp": (ONE_WARP, "%r6, 16, 31,", "%r6, 16, 4127,"),
    "a shuffle is missing": (ONE_WARP, SHUFFLE, "mov.b32 %r7, 0;"),
    "a shuffle of another register": (ONE_WARP, SHUFFLE, SHUFFLE.replace("%r6", "%r3")),
    "a shuffle under a predicate": (ONE_WARP, SHUFFLE, f"setp.lt.u32 %p5, %r3, 16; @%p5 {SHUFFLE}"),
    "a shuffle by a distance that depends on the problem": (ONE_WARP, SHUFFLE, SHUFFLE.replace("8,", "%r1,")),
    "sums are added twice": (ONE_WARP, "mov.u32 %r5, -1;", "mov.u32 %r5, -1; add.f32 %f1, %f1, %f1;"),
    "sums are multiplied": (ONE_WARP, STORE_SUM, f"mul.f32 %f1, %f1, 0f40000000; {STORE_SUM}"),
    "sums are subtracted": (ONE_WARP, STORE_SUM, f"neg.f32 %f1, %f1; {STORE_SUM}"),
    "one is added to sums": (ONE_WARP, STORE_SUM, f"add.f32 %f1, %f1, 0f3F800000; {STORE_SUM}"),
    "sums are added as integers": (
        ONE_WARP, STORE_SUM, f"mov.b32 %r8, %f1; add.s32 %r8, %r8, 1; mov.b32 %f1, %r8; {STORE_SUM}",
    ),
    "a lane's own sum is stored": (ONE_WARP, STORE_SUM, STORE_SUM.replace("%f1", "%f2")),
    "half of a sum is stored": (ONE_WARP, STORE_SUM, "mov.b32 {%h1, %h2}, %f1; st.global.u16 [%q7], %h1;"),
    "every lane stores": (ONE_WARP, "@%p4 bra END;", ""),
    "the sum of the next row": (ONE_WARP, STORE_SUM, f"add.s64 %q7, %q7, 4; {STORE_SUM}"),
    "the sum of the first row": (ONE_WARP, "shl.b64 %q6, %q3, 2;", "mov.u64 %q6, 0;"),
    "rows begin one element later": (ONE_WARP, "add.s64 %q4, %q1, %q4;", "add.s64 %q4, %q1, %q4; add.s64 %q4, %q4, 4;"),
    "every lane loads the first element": (ONE_WARP, "cvt.u64.u32 %q5, %r3;", "mov.u64 %q5, 0;"),
    "a row ends one k-tile earlier": (
        ONE_WARP, "setp.lt.s32 %p2, %r4, %r1;", "add.s32 %r8, %r4, 32; setp.lt.s32 %p2, %r8, %r1;",
    ),
    "a row ends one k-tile later": (ONE_WARP, "setp.lt.s32 %p2, %r4, %r1;", "setp.le.s32 %p2, %r4, %r1;"),
    "a k-tile is loaded twice": (ONE_WARP, "add.s64 %q4, %q4, 128;", "add.s64 %q4, %q4, 64;"),
    "a k-tile is left out": (ONE_WARP, "add.s64 %q4, %q4, 128;", "add.s64 %q4, %q4, 256;"),
    "sums are set back in the loop": (ONE_WARP, "LOOP:", "LOOP: mov.f32 %f1, 0f00000000;"),
    "D is written in the loop": (ONE_WARP, "LOOP:", f"LOOP: mov.u64 %q7, %q2; {STORE_SUM}"),
    "D is read by a copy": (ONE_WARP, "mov.u32 %r5, -1;", "mov.u32 %r5, -1; cp.async.ca.shared.global [s], [%q2], 4;"),
    "a sum is read before the barrier": (TWO_WARPS, "bar.sync 0;", f"{FETCH} bar.sync 0;"),
    "half of a sum is read": (TWO_WARPS, FETCH, "ld.shared.u16 %h1, [s+4]; cvt.u32.u16 %r8, %h1; mov.b32 %f3, %r8;"),
    "a sum is read as a byte": (TWO_WARPS, FETCH, "ld.shared.u8 %r8, [s+4]; mov.b32 %f3, %r8;"),
    "a sum is read where none is": (TWO_WARPS, FETCH, FETCH.replace("s+4", "s+8")),
    "a sum is read from its middle": (TWO_WARPS, FETCH, FETCH.replace("s+4", "s+2")),
    "a sum is read twice": (TWO_WARPS, FETCH, FETCH.replace("s+4", "s")),
    "warps keep their sums at one place": (TWO_WARPS, "shl.b32 %r9, %r8, 2;", "mov.u32 %r9, 0;"),
    "every lane keeps its sum at one place": (TWO_WARPS, "@%p5 bra A;", ""),
    "another lane keeps its own number": (TWO_WARPS, KEEP, "st.shared.u32 [%r10], %r3;"),
    "half of a sum is kept": (TWO_WARPS, KEEP, "mov.b32 {%h1, %h2}, %f1; st.shared.u16 [%r10], %h1;"),
    "a sum is kept at an address of the problem": (TWO_WARPS, KEEP, f"add.s32 %r10, %r10, %r1; {KEEP}"),
    "a sum is kept beyond shared memory": (TWO_WARPS, KEEP, f"add.s32 %r10, %r10, 256; {KEEP}"),
    "a sum is kept at an address that is not aligned": (TWO_WARPS, KEEP, f"add.s32 %r10, %r10, 2; {KEEP}"),
    "no thread reads a sum": (TWO_WARPS, FETCH, f"setp.eq.s32 %p6, %r3, 99; @%p6 {FETCH}"),
    "numbers of the problem are kept": (TWO_WARPS, FETCH, f"st.shared.u32 [s+8], %r1; {FETCH}"),
}  # fmt: skip


def changed(before: str, after: str) -> Subject:
    """The product with a fault in its text. Fails if the right text has no place for it."""
    assert before in TEXT
    return PRODUCT._replace(ptx=TEXT.replace(before, after))


def of_contract(before: str, after: str) -> Subject:
    """The product with another contract, whose formulas fit it."""
    subject = PRODUCT.revise_contract(before, after)
    if "tile = [16" in after:
        return subject.revise_contract("m / 32", "m / 16")
    return subject.revise_contract("A(i,k)", "A(k,i)") if '["k", "m"]' in after else subject


def test_the_product_without_a_fault_is_certified() -> None:
    assert proven(PRODUCT).claims
    # In both operands alike, the order of k does not matter.
    assert proven(changed("shl.b32 %r9, %r8, 3;", "xor.b32 %r9, %r8, 1; shl.b32 %r9, %r9, 3;")).claims


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_product_is_refused(fault: str) -> None:
    with pytest.raises(NotCertified):
        proven(changed(*FAULTS[fault]))


def test_accesses_that_agree_but_are_not_aligned_are_refused() -> None:
    text = TEXT
    for before, after in SHIFTED:
        assert before in text
        text = text.replace(before, after)
    with pytest.raises(NotCertified):
        proven(PRODUCT._replace(ptx=text))
    assert proven(PRODUCT._replace(ptx=text.replace("%r6, 8;", "%r6, 0;"))).claims


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_contract_that_the_product_does_not_fulfil_is_refused(contract: str) -> None:
    with pytest.raises(NotCertified):
        proven(of_contract(*CONTRACTS[contract]))


def proven_sum(subject: Subject, before: str = "", after: str = "") -> Certificate:
    """The certificate of sums of rows in whose text ``after`` stands for the first ``before``."""
    assert before in subject.ptx
    return prove(subject.ptx.replace(before, after, 1), partial(claims, subject.contract))


def test_the_sums_without_a_fault_are_certified() -> None:
    assert proven_sum(ONE_WARP).claims
    assert proven_sum(TWO_WARPS).claims


@pytest.mark.parametrize("fault", SUMS)
def test_a_fault_of_sums_is_refused(fault: str) -> None:
    with pytest.raises(NotCertified):
        proven_sum(*SUMS[fault])
