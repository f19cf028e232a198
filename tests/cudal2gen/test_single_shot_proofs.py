"""Proves that single-shot kernels get certificates, and that none does once a fault is planted."""

from __future__ import annotations

import pytest

from cudal2gen.generation import compiler
from cudal2gen.kernel import Record
from cudal2gen.validator.contracts import refusal
from kernelproof.emulator import mutants
from tests.cudal2gen.constants import changed_constants
from tests.cudal2gen.mutation import equivalence, survivors
from tests.cudal2gen.paths import once
from tests.cudal2gen.test_proofs import prove_and_recheck, ptx_of, reason_of_refusal
from tests.cudal2gen.test_wgmma_proofs import NO_WAIT, TRY_WAIT, Edit
from tests.draws import draw_few_by_key

# Kernels that get faults: with all k in one CTA, and with slices of k in a cluster of two.
WHOLE = once(k_chunks=2)
SUMS = once(k_chunks=1, split_k=2)
COVERED: dict[str, Record] = {
    "two chunks": WHOLE,
    "two slices": SUMS,
    "two slices of 3 chunks, f16": once(split_k=2, acc="f16"),
    "eight slices, CTAs that add nothing": once(bm=16, split_k=8, k_chunks=1, k=504),
    "one warp, nn": once(bm=16, bn=16, k_chunks=1, m=32, n=32, k=64, layout="nn"),
    "nt, three warps along n": once(bn=96, bm=96, m=192, n=192, layout="nt"),
    "bf16": once(ab="bf16"),
}  # fmt: skip
NOT_COVERED: dict[str, Record] = {
    "D of fp32": once(acc="f32", d="f32"),
    "fused": once(fusion="bias_n"),
    "batched": once(batch="strided"),
}
# Kernels from whose PTX mutants are sampled: all k-tiles in one CTA, and slices in a cluster.
MUTATED: dict[str, Record] = {
    "one chunk": once(k_chunks=1, k=64), "two chunks, f16": once(bm=16, k_chunks=2, acc="f16"), "two slices": SUMS,
}  # fmt: skip
BUILT_AHEAD = [*COVERED.values(), *MUTATED.values()]

# Patterns of the PTX that edits replace: a copy under a predicate, the test whether a row exists, an arrival with the
# bytes that a CTA expects, the sending of a vector, the rank of its receiver, and an addition.
GUARDED = r"(?P<guard>@p )(?P<copy>cp\.async\.cg\S+ \[(?P<to>%r\d+)\], \[(?P<from>%rd\d+)\], 16, (?P<bytes>%r\d+);)"
ROWS = r"(?P<rows>setp\.gt\.s32 \s*%p\d+, (?P<left>%r\d+), )(?P<row>\d+);(?=\s*selp\.b32)"
EXPECT = r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, (?P<bar>\[%r\d+\]), (?P<bytes>%r\d+);"
SEND = r"(?P<send>st\.async\.\S+ \[%r\d+\], \{ )(?P<x>%f\d+), (?P<y>%f\d+)(?P<zw>[^;]*;)"
RANK = r"(?P<to>mov\.u32 \s*%r\d+, )(?P<rank>[01]);(?=\s*mapa)"
ADD = r"(?P<add>add\.f32 \s*%f\d+, )(?P<a>%f\d+), (?P<b>%f\d+);"

# Each edit is applied to the PTX of its record: WHOLE, unless it names SUMS. It names registers as the result of ptx_of
# does. In WHOLE, these are
# - %r19 and %r20: n and k; %r45 and %r17: the row lengths of A and D;
# - %r56: the thread; %r59: its row of A; %r68: the k from its vector to the end;
# - %r21: its first place in shared memory;
# - %r91 and %r95: the bytes that it copies of its vectors of the first and second k-tile;
# - %p4 and %p1: whether its rows of A and B exist.
# In SUMS, %r19 holds the rank of the CTA, which is the number of its slice of k; %r2 holds the number of the thread,
# and %r83 the address at which shared memory begins.
FAULTS: dict[str, Edit] = {
    # Copies at the edge of A and B.
    "a row after the last one is copied": Edit(ROWS, r"setp.ge.s32 %p4, \g<left>, 0;"),
    "the last row is not copied": Edit(ROWS, r"\g<rows>1;"),
    "rows 16 later are copied by the first condition": Edit(ROWS, r"\g<rows>0;", 1),
    "k after its end is copied": Edit(r"max\.s32( \s*%r\d+, %r\d+, )0;", r"max.s32\g<1>8;"),
    "the last 8 k are not copied": Edit(r"(setp\.gt\.s32 \s*%p7, %r20, )64;", r"\g<1>72;"),
    "at most 7 of a vector's 8 k are copied": Edit(r"(min\.s32 \s*%r\d+, %r\d+, )8;", r"\g<1>7;"),
    "k of the next tile counts as that of this one": Edit(r"(add\.s32 \s*%r92, %r68, )-64;", r"\g<1>-56;"),
    "bytes of the other tile": Edit(r"(selp\.b32 \s*%r\d+, )%r95(, 0, %p4;)", r"\1%r91\2"),
    "a copy always reads all 16 bytes": Edit(GUARDED, r"@p cp.async.cg.shared.global [\g<to>], [\g<from>], 16;"),
    "rows of B count as rows of A": Edit(r"(selp\.b32 \s*%r\d+, %r91, 0, )%p1;", r"\g<1>%p4;"),
    "the second tile begins at the first": Edit(r"(add\.s64 \s*%rd14, %rd10, )128;", r"\g<1>0;"),
    "a vector goes to the next one's place": Edit(r"(add\.s32 \s*%r24, %r21, )2048;", r"\g<1>2064;"),
    "a row's offset overflows": Edit(
        r"mul\.wide\.s32 \s*(%rd20), (%r59), (%r45);", r"{ .reg .b32 x; mul.lo.s32 x, \2, \3; cvt.s64.s32 \1, x; }",
    ),
    "A is copied while the kernel before runs": Edit(r"griddepcontrol\.wait;", ""),
    "the kernel before is waited for after the copies": Edit(
        r"griddepcontrol\.wait;(?P<copies>.*?cp\.async\.commit_group;)", r"\g<copies>\ngriddepcontrol.wait;",
    ),
    # Waits and barriers.
    "no group is waited for": Edit(r"cp\.async\.wait_group 1;", "cp.async.wait_group 2;"),
    "the first tile is not waited for": Edit(r"cp\.async\.wait_group 1;", ""),
    "the last tile is not waited for": Edit(r"cp\.async\.wait_all;", ""),
    "the last tile's wait leaves a group": Edit(r"cp\.async\.wait_all;", "cp.async.wait_group 1;"),
    "a tile that is not there is copied, and never waited for": Edit(
        r"selp\.u32 \s*%r43, 1, 0, %p7;", "mov.u32 %r43, 1;",
    ),
    "groups are not committed": Edit(r"cp\.async\.commit_group;", ""),
    "threads do not meet before the first products": Edit(r"bar\.sync \s*0;", ""),
    "threads do not meet before the last products": Edit(r"bar\.sync \s*0;", "", 1),
    "one warp leaves out a barrier": Edit(
        r"bar\.sync \s*0;", r"{ .reg .pred q; setp.lt.u32 q, %r56, 96; @q bar.sync 0; }",
    ),
    # Products.
    "the second tile is never multiplied": Edit(r"(setp\.lt\.s32 \s*%p8, %r20, )65;", r"\g<1>129;"),
    "the second tile is always multiplied": Edit(r"(setp\.lt\.s32 \s*%p8, %r20, )65;", r"\g<1>0;"),
    "A of another block of k": Edit(r"(xor\.b32 \s*%r\d+, %r\d+, )32;", r"\g<1>64;"),
    "an accumulator that is not zero": Edit(r"mov\.f32( \s*%f\d+, )0f00000000;(?=\s*mma)", r"mov.f32\g<1>0f3F800000;"),
    # D.
    "a row after the last one is stored": Edit(r"setp\.ge\.s32( \s*%p9, )", r"setp.gt.s32\1"),
    "a pair beyond the last column": Edit(
        r"setp\.gt\.s32( \s*%p10, )%r13(, %r19;)", r"{ .reg .b32 x; sub.s32 x, %r13, 1; setp.gt.s32\1x\2 }",
    ),
    "a pair that is not aligned": Edit(r"setp\.ne\.s64 \s*%p12, %rd33, 0;", "setp.ne.s64 %p12, %rd33, %rd33;"),
    "an element beyond the last column": Edit(r"setp\.ge\.s32( \s*%p15, )", r"setp.gt.s32\1"),
    "the end of a row is not stored": Edit(r"st\.global\.u16 \s*\[%rd5\], %rs1;", ""),
    "a pair is stored twice": Edit(r"st\.global\.u32[^;]*;", r"\g<0>\n\g<0>"),
    "neighbours change places": Edit(r"(cvt\.rn\.f16x2\.f32 %r\d+), (%f\d+), (%f\d+)", r"\1, \3, \2"),
    "a row's offset in D overflows": Edit(
        r"mul\.wide\.s32 \s*(%rd1), (%r9), (%r17);", r"{ .reg .b32 x; mul.lo.s32 x, \2, \3; cvt.s64.s32 \1, x; }",
    ),
    # Bytes that are expected, and the mbarrier at which they count.
    "too few bytes are expected": Edit(r"(add\.s32 \s*%r23, %r25, )4096;", r"\g<1>4080;", record=SUMS),
    "too many bytes are expected": Edit(r"(add\.s32 \s*%r23, %r25, )4096;", r"\g<1>4112;", record=SUMS),
    "no bytes are expected": Edit(EXPECT, r"mbarrier.arrive.shared::cta.b64 _, \g<bar>;", record=SUMS),
    "bytes are expected twice": Edit(EXPECT, r"\g<0>\n\g<0>", record=SUMS),
    "bytes are expected by another thread": Edit(
        rf"(?P<variable>_ZZ\w+);(?P<first>\s*mov\.u32 \s*%r21.*?){EXPECT}(?P<to>.*?)(?=barrier\.cluster\.arrive)",
        r"\g<variable>;\g<first>\g<to>{ .reg .pred q; .reg .b32 x; setp.eq.u32 q, %r2, 64; mov.u32 x, \g<variable>;\n"
        r"@q mbarrier.arrive.expect_tx.shared::cta.b64 _, [x], 4096; }\n", record=SUMS,
    ),
    "the mbarrier expects two arrivals": Edit(r"(mov\.u32 \s*%r21, )1;", r"\g<1>2;", record=SUMS),
    "the mbarrier is not published": Edit(r"fence\.mbarrier_init[^;]*;", "", record=SUMS),
    "the mbarrier is published before it is initialised": Edit(
        r"(mbarrier\.init.*?)(fence\.mbarrier_init[^;]*;)", r"\2\n\1", record=SUMS,
    ),
    "another thread publishes the mbarrier": Edit(
        r"fence\.mbarrier_init[^;]*;(?P<to>.*?)(?=barrier\.cluster\.arrive)",
        r"\g<to>{ .reg .pred q; setp.eq.u32 q, %r2, 1; @!q bra $L_Q; fence.mbarrier_init.release.cluster;\n$L_Q: }\n",
        record=SUMS,
    ),
    "CTAs do not wait for each other to begin": Edit(
        r"barrier\.cluster\.arrive[^;]*;(.*?)barrier\.cluster\.wait[^;]*;", r"\1", record=SUMS,
    ),
    "a CTA does not wait for the others to begin": Edit(r"barrier\.cluster\.wait[^;]*;", "", record=SUMS),
    "a CTA waits for the others to begin after its sums are sent": Edit(
        r"barrier\.cluster\.wait[^;]*;(?P<sends>.*?)(?=\$L__BB)",
        r"\g<sends>\nbarrier.cluster.wait.acquire.aligned;\n", record=SUMS,
    ),
    # Sums on their way.
    "slices go to one place": Edit(r"(shl\.b32 \s*%r226, %r19, )7;", r"\g<1>32;", record=SUMS),
    "slices overlap": Edit(r"(shl\.b32 \s*%r226, %r19, )7;", r"\g<1>6;", record=SUMS),
    "sums go to where B is": Edit(
        r"(add\.s32 \s*%r218, %r83, )8192;(.*?add\.s32 \s*%r242, %r241, )8192;(.*?\[%r241\+)8192",
        r"\g<1>4096;\g<2>4096;\g<3>4096", record=SUMS,
    ),
    "sums go beyond shared memory": Edit(r"(add\.s32 \s*%r218, %r83, )8192;", r"\g<1>16384;", record=SUMS),
    "both vectors go to the first CTA": Edit(RANK, r"\g<to>0;", 1, SUMS),
    "a vector goes to a third CTA": Edit(RANK, r"\g<to>2;", 1, SUMS),
    "CTAs get each other's vectors": Edit(
        r"(mov\.u32 \s*%r214, )0;(.*?mov\.u32 \s*%r222, )1;", r"\g<1>1;\g<2>0;", record=SUMS,
    ),
    "bytes count at the own CTA": Edit(
        r"(mapa\.shared::cluster\.u32 %r220, %r213, )%r222;", r"\g<1>%r19;", record=SUMS,
    ),
    "a vector is not sent": Edit(SEND, "", record=SUMS),
    "a vector is sent twice": Edit(SEND, r"\g<0>\n\g<0>", record=SUMS),
    "two sums of a vector change places": Edit(SEND, r"\g<send>\g<y>, \g<x>\g<zw>", record=SUMS),
    "a vector is sent by every second warp": Edit(
        SEND, r"{ .reg .pred q; setp.lt.u32 q, %r2, 64; @q \g<0> }", record=SUMS,
    ),
    "the sum before the last products is sent": Edit(SEND, r"\g<send>%f57, \g<y>\g<zw>", record=SUMS),
    # Sums that have come.
    "sums are not waited for": Edit(TRY_WAIT, NO_WAIT, record=SUMS),
    "sums are waited for in another phase": Edit(
        r"(mbarrier\.try_wait\.parity\S* p, \[%r\d+\], )%r214;", r"\g<1>%r222;", record=SUMS,
    ),
    "a wait for sums that may fail": Edit(
        r"(mbarrier\.try_wait\.parity[^;]*;\s*selp\.u32 \s*%r\d+, 1, )0(, p;)", r"\g<1>1\2", record=SUMS,
    ),
    "sums of the next thread are loaded": Edit(r"(ld\.shared\.v4\.f32[^\[]*\[%r241\+)8192", r"\g<1>8208", record=SUMS),
    "another slice is loaded": Edit(r"(mad\.lo\.s32 \s*%r\d+, %r\d+, )16,", r"\g<1>0,", record=SUMS),
    "a slice is not added": Edit(ADD, r"\g<add>\g<a>, 0f00000000;", record=SUMS),
    "a slice is added twice": Edit(ADD, r"add.f32 \g<b>, \g<b>, \g<b>;\n\g<0>", record=SUMS),
    "both CTAs store the first vector": Edit(r"sub\.s32 \s*%r255, %r19, %r254;", "mov.u32 %r255, 0;", record=SUMS),
    # Slices of k.
    "slices of half as many k-tiles": Edit(r"(shr\.u64 \s*%rd16, %rd15, )1;", r"\g<1>2;", record=SUMS),
    "a slice ends where it begins": Edit(r"(add\.s32 \s*%r51, %r19, )1;", r"\g<1>0;", record=SUMS),
    "a slice begins at k = 0": Edit(r"(shl\.b32 \s*%r56, %r50, )6;", r"\g<1>32;", record=SUMS),
    "tiles of another cluster": Edit(r"(shr\.u32 \s*%r44, %r43, )1;", r"\g<1>0;", record=SUMS),
}  # fmt: skip
HARMLESS: dict[str, tuple[Edit, str]] = {
    "the first tile is copied without a condition": (
        Edit(GUARDED, r"\g<copy>"), "there is no problem without a k-tile",
    ),
    "every copy is waited for at once": (
        Edit(r"cp\.async\.wait_group 1;", "cp.async.wait_all;"), "more is waited for than is needed",
    ),
    "pairs only if one more column fits": (
        Edit(r"(setp\.gt\.s32 \s*%p10, )%r13(, %r19;)", r"{ .reg .b32 x; add.s32 x, %r13, 1; \1x\2 }"),
        "the other pairs are stored element by element",
    ),
    "the two slices change places": (
        Edit(ADD, r"\g<add>\g<b>, \g<a>;", record=SUMS), "a sum of two is the same in both orders",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", COVERED)
def test_a_covered_kernel_is_certified_and_its_certificate_holds(name: str) -> None:
    prove_and_recheck(COVERED[name])


@pytest.mark.parametrize("name", NOT_COVERED)
def test_what_is_not_covered_is_refused(name: str) -> None:
    assert refusal(NOT_COVERED[name])


@pytest.mark.one_in(8)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused(fault: str) -> None:
    edit = FAULTS[fault]
    # Without a record an Edit has its default, a kernel of the wgmma proofs; here that stands for WHOLE.
    record = SUMS if edit.record is SUMS else WHOLE
    assert reason_of_refusal(record, edit.apply(ptx_of(record)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("change", HARMLESS)
def test_a_harmless_change_is_certified(change: str) -> None:
    """Shows that editing the text is not by itself a reason for refusal."""
    edit, _why = HARMLESS[change]
    record = SUMS if edit.record is SUMS else WHOLE
    assert not reason_of_refusal(record, edit.apply(ptx_of(record)))


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATED)
def test_a_changed_text_is_refused_or_harmless(name: str) -> None:
    """Changes concern waits, barriers, fences, predicates, accesses, products, sums, and the constants in addresses,
    swizzles and comparisons. One change of each kind is made. A change that is certified must be equivalent to the
    original, or have no finding when it is executed."""
    record = MUTATED[name]
    (artifact,) = compiler.build([record])
    ptx = artifact.ptx.read_text()
    few = draw_few_by_key(lambda mutant: mutant.kind, [*mutants(ptx, arithmetic=True), *changed_constants(ptx)], 1)
    certified = [mutant for mutant in few if not reason_of_refusal(record, mutant.text)]
    assert len(certified) < len(few) / 2, "most changes are faults"
    unexplained = [x for x in certified if x.kind.startswith("constant") or not equivalence(record, x, ptx)]
    executed = list(survivors(record, artifact, compiler.launcher(), unexplained))
    assert executed == unexplained, "a certified change has a finding in an execution"
