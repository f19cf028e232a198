"""Proves that kernels whose clusters add slices of k are certified, and refused with any fault in how they add."""

from __future__ import annotations

from itertools import product

import pytest

from cudal2gen.kernel import Record
from cudal2gen.validator.slice_facts import slice_of, with_slice
from kernelproof.certificates import TILES, Facts
from tests.cudal2gen.paths import IN_CLUSTER, TWO_CONSUMERS, ring
from tests.cudal2gen.test_proofs import prove_and_recheck, ptx_of, reason_of_refusal
from tests.cudal2gen.test_wgmma_proofs import NO_WAIT, TRY_WAIT, Edit

# Kernels whose clusters add slices of k.
SUMS = ring(stages=2, split_k=2, **IN_CLUSTER)
SWAPPED = ring(stages=2, split_k=4, swap_ab=True, bm=16, bn=64, atom_n=16, **IN_CLUSTER)  # 2 vectors for 4 CTAs
COVERED: dict[str, Record] = {
    "two slices": SUMS,
    "operands swapped, CTAs that add nothing": SWAPPED,
    "two consumers, 6 vectors for 4 CTAs": ring(
        split_k=4, **TWO_CONSUMERS, registers=[40, 232], bn=48, atom_n=48, stages=2, acc="f16", **IN_CLUSTER
    ),
    "eight slices, nn": ring(split_k=8, layout="nn", bn=64, atom_n=64, stages=2, k=600, **IN_CLUSTER),
}  # fmt: skip
BUILT_AHEAD = [*COVERED.values()]

# The number of a wait in the text: for all rings to be free, and for the sums to arrive.
FREED, ARRIVED = 1, 2
# Patterns of the PTX in which faults are: the end of the products; a wait for parity 1; bytes that a CTA expects; the
# address at another CTA; an arrival there; a vector that is sent; an addition; a loop that waits.
LAST_WAIT, PARITY_1 = r"wgmma\.wait_group\.sync\.aligned 0;", r"mbarrier.try_wait.parity.shared::cta.b64 p, \1, 1;"
EXPECT = r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, (?P<bar>\[%r\d+\]), (?P<bytes>%r\d+);"
REMOTE = r"mapa\.shared::cluster\.u32 (?P<to>%r\d+), (?P<at>%r\d+), (?P<rank>%r\d+);"
SAY = rf"{REMOTE}(?P<say>\s*mbarrier\.arrive\.shared::cluster\.b64 _, \[(?P=to)\];)"
SEND = r"(?P<send>st\.async\.\S+ \[%r\d+\], \{ )(?P<x>%f\d+), (?P<y>%f\d+)(?P<zw>[^;]*;)"
ADD = r"(?P<add>add\.f32 \s*%f\d+, )(?P<a>%f\d+), (?P<b>%f\d+);"
SPIN = r"(?P<spin>\$L__BB_\d+:\s*mov\.u32 [^;]*;\s*\{\s*\.reg \.pred p;\s*mbarrier\.try_wait[^$]*\$L__BB_\d+;)"


def address_in_cta(rank: str) -> str:
    """What stands in place of ``REMOTE`` for another rank."""
    return rf"mapa.shared::cluster.u32 \g<to>, \g<at>, {rank};"


FAULTS: dict[str, Edit] = {
    # Bytes that are expected.
    "too few bytes are expected": Edit(r"(or\.b32 \s*%r\d+, %r\d+, )8192;(\s*mbarrier)", r"\g<1>8176;\2"),
    "too many bytes are expected": Edit(r"(or\.b32 \s*%r\d+, %r\d+, )8192;(\s*mbarrier)", r"\g<1>8208;\2"),
    "no bytes are expected": Edit(EXPECT, r"mbarrier.arrive.shared::cta.b64 _, \g<bar>;"),
    "bytes are expected twice": Edit(EXPECT, r"\g<0>\n\g<0>"),
    "the mbarrier of the sums gets no arrival": Edit(EXPECT, ""),
    "bytes are expected by the mbarrier of free rings": Edit(
        r"(add\.s32 \s*%r\d+, %r\d+, )24616;(?=\s*mbarrier\.init)", r"\g<1>24608;",
    ),
    "bytes are expected after the cluster has met": Edit(
        rf"{EXPECT}(?P<to>.*?barrier\.cluster\.wait[^;]*;)",
        r"\g<to>\n{ .reg .pred q; setp.eq.u32 q, %r2, 0;\n"
        r"@q mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+24616], 8192; }",
    ),
    "bytes are expected by another thread": Edit(
        rf"{EXPECT}(?P<to>.*?)(?=fence\.mbarrier_init)",
        r"\g<to>\n{ .reg .pred q; setp.eq.u32 q, %r2, 64;\n"
        r"@q mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+24616], 8192; }\n",
    ),
    # Rings that are free.
    "rings are free after half of the warps": Edit(r"(mov\.u32 \s*%r\d+, )8;(?=\s*mbarrier\.init)", r"\g<1>4;"),
    "rings are free after one warp more": Edit(r"(mov\.u32 \s*%r\d+, )8;(?=\s*mbarrier\.init)", r"\g<1>9;"),
    "nobody says that a ring is free": Edit(SAY, ""),
    "each CTA says so to itself": Edit(SAY, rf"{address_in_cta('%cluster_ctarank')}\g<say>"),
    "all say so to the first CTA": Edit(SAY, rf"{address_in_cta('0')}\g<say>"),
    "they say so to the first CTA alone": Edit(r"and\.b32( \s*%r\d+, %r\d+, )30;", r"and.b32\g<1>31;"),
    "they say so to four CTAs": Edit(r"and\.b32( \s*%r\d+, %r\d+, )30;", r"and.b32\g<1>28;"),
    "they say so twice": Edit(SAY, r"\g<0>\g<say>"),
    "they say so before their products are done": Edit(
        rf"(?P<wait>{LAST_WAIT}.*?){SAY}",
        r"{ .reg .pred q; .reg .b32 x, y; and.b32 x, %r2, 31; setp.lt.u32 q, x, 2; add.s32 y, %r1, 24608;\n"
        r"mapa.shared::cluster.u32 y, y, x; @q mbarrier.arrive.shared::cluster.b64 _, [y]; }\n\g<wait>",
    ),
    "they say so at the mbarrier of the sums": Edit(
        r"(add\.s32 \s*(%r\d+), %r\d+, )24608;(?=\s*mapa)", r"\g<1>24616;",
    ),
    "rings are not waited for": Edit(TRY_WAIT, NO_WAIT, FREED),
    "rings are waited for in another phase": Edit(TRY_WAIT, PARITY_1, FREED),
    "the sums are waited for in place of rings": Edit(
        r"(add\.s32 \s*%r\d+, %r\d+, )24608;(?!\s*m)", r"\g<1>24616;",
    ),
    "CTAs do not wait for each other to begin": Edit(r"barrier\.cluster\.(arrive|wait)[^;]*;", ""),
    "a CTA does not wait for the others to begin": Edit(r"barrier\.cluster\.wait[^;]*;", "bar.sync 0;"),
    "mbarriers are not published": Edit(r"fence\.mbarrier_init[^;]*;", ""),
    # Sums on their way.
    "slices go to one place": Edit(r"(shl\.b32 \s*%r\d+, %r\d+, )8;(?=\s*add)", r"\g<1>0;"),
    "slices overlap": Edit(r"(shl\.b32 \s*%r\d+, %r\d+, )8;(?=\s*add)", r"\g<1>7;"),
    "threads send to places too far apart": Edit(r"(shl\.b32 \s*%r\d+, %r\d+, )4;(?=\s*mapa)", r"\g<1>5;"),
    "vectors go to one place": Edit(r"(add\.s32 \s*%r\d+, %r\d+, )2048;(?=\s*st\.async)", r"\g<1>0;"),
    "a vector goes after the ring": Edit(r"(add\.s32 \s*%r\d+, %r\d+, )2048;(?=\s*st\.async)", r"\g<1>24576;"),
    "all sums come to places up to the mbarriers": Edit(r"(add\.s32 \s*%r29, %r13, )-128;", r"\g<1>900;"),
    "a vector goes to the next one's place": Edit(
        r"(add\.s32 \s*%r\d+, %r\d+, )2048;(?=\s*st\.async)", r"\g<1>4096;",
    ),
    "sums go to the own CTA": Edit(rf"{REMOTE}(?=\s*add\.s32[^;]*;\s*add)", address_in_cta("%r71")),
    "bytes count at the own CTA": Edit(rf"{REMOTE}(?=\s*st)", address_in_cta("%r71")),
    "bytes count at the mbarrier of free rings": Edit(
        r"(add\.s32 \s*%r\d+, %r\d+, )24616;(?=\s*mapa)", r"\g<1>24608;",
    ),
    "all sums go to the first CTA": Edit(r"(mov\.u32 \s*%r\d+, )1;(?=\s*mapa)", r"\g<1>0;"),
    "sums go to a third CTA": Edit(r"(mov\.u32 \s*%r\d+, )1;(?=\s*mapa)", r"\g<1>2;"),
    "a vector is not sent": Edit(SEND, ""),
    "the last vector is not sent": Edit(SEND, "", 3),
    "a vector is sent twice": Edit(SEND, r"\g<0>\n\g<0>"),
    "two sums of a vector change places": Edit(SEND, r"\g<send>\g<y>, \g<x>\g<zw>"),
    "one sum is sent in place of two": Edit(SEND, r"\g<send>\g<x>, \g<x>\g<zw>"),
    "half of a vector is sent": Edit(
        r"st\.async(\.\S+)\.v4\.f32( \[%r\d+\], \{ %f\d+, %f\d+), %f\d+, %f\d+", r"st.async\1.v2.f32\2",
    ),
    "sums are sent before rings are free": Edit(
        rf"{SPIN}(?P<sends>.*?)(?=\$L__BB)", r"mov.u32 %r202, 0;\n\g<sends>\n\g<spin>",
    ),
    "the last vector is sent after the wait for sums": Edit(
        rf"{SEND}\s*{SPIN}", r"\g<spin>\n\g<send>\g<x>, \g<y>\g<zw>",
    ),
    # Sums that have come.
    "sums are not waited for": Edit(TRY_WAIT, NO_WAIT, ARRIVED),
    "sums are waited for in another phase": Edit(TRY_WAIT, PARITY_1, ARRIVED),
    "a wait for sums that may fail": Edit(
        r"(mbarrier\.try_wait\.parity[^;]*;\s*selp\.u32 \s*%r\d+, 1, )0(, p;)", r"\g<1>1\2", ARRIVED,
    ),
    "the next vector is loaded": Edit(r"(ld\.shared\.v4\.f32[^\[]*\[%r\d+)\]", r"\1+2048]"),
    "another slice is loaded": Edit(r"(mad\.lo\.s32 \s*%r\d+, %r\d+, )16,", r"\g<1>0,"),
    "a slice after the last one is loaded": Edit(r"(mad\.lo\.s32 \s*%r\d+, %r\d+, )16,", r"\g<1>32,"),
    "sums of the next thread are loaded": Edit(r"(ld\.shared\.v4\.f32[^\[]*\[%r\d+)\]", r"\1+16]"),
    "threads of odd rows load the other slice": Edit(
        r"(ld\.shared\.v4\.f32[^\[]*\[)(%r\d+)\];",
        r"{ .reg .b32 x; and.b32 x, %r2, 4; shl.b32 x, x, 10; add.s32 x, \2, x; \1x]; }",
    ),
    "the other CTA's sums are loaded": Edit(
        r"ld\.shared(\.v4\.f32[^\[]*\[)(%r\d+)\]", r"xor.b32 \2, \2, 16777216;\nld.shared::cluster\1\2]",
    ),
    "a slice is not added": Edit(ADD, r"\g<add>\g<a>, 0f00000000;"),
    "a slice is added twice": Edit(ADD, r"add.f32 \g<b>, \g<b>, \g<b>;\n\g<0>"),
    "a one is added": Edit(r"(add\.f32 \s*%f\d+, %f\d+, )0f00000000;", r"\g<1>0f3F800000;"),
    "slices are subtracted": Edit(r"add\.f32( \s*%f\d+, %f\d+, %f)", r"sub.f32\1"),
    "slices are added in another order": Edit(
        r"(ld\.shared\.v4\.f32[^\[]*\[%r\d+\+)2048(\].*?\+)4096\]", r"\g<1>4096\g<2>2048]", record=SWAPPED,
    ),
    "sums are cut off": Edit(r"cvt\.rn\.f16x2", "cvt.rz.f16x2"),
    "neighbours change places": Edit(r"(cvt\.rn\.f16x2\.f32 %r\d+), (%f\d+), (%f\d+)", r"\1, \3, \2"),
    "swapped sums are not transposed": Edit(r"movmatrix[^;]*;", "", record=SWAPPED),
    "swapped sums are transposed twice": Edit(r"(movmatrix[^;]*;)", r"\1\n\1", record=SWAPPED),
    "the other pair is transposed": Edit(
        r"(movmatrix\S* (%r\d+), )%r\d+;(.*?movmatrix\S* )(%r\d+)", r"\1\4;\3\4", record=SWAPPED,
    ),
    "a CTA that adds nothing ends before others say that their rings are free": Edit(
        SPIN, r"{ .reg .pred q; setp.gt.s32 q, %r60, 1; @q ret; }\n\g<spin>", record=SWAPPED,
    ),
    "a CTA that adds nothing does not wait for sums": Edit(
        SPIN, r"{ .reg .pred q; setp.gt.s32 q, %r60, 1; @q ret; }\n\g<spin>", 1, SWAPPED,
    ),
    # D.
    "both CTAs add the first vectors": Edit(r"sub\.s32 \s*(%r\d+), %r71, %r\d+;", r"mov.u32 \1, 0;"),
    "vectors of another column": Edit(r"(shl\.b32 \s*%r\d+, )(%r232), 3;", r"\1\2, 4;"),
    "the vector after the next one": Edit(r"(add\.s32 \s*%r\d+, %r71, )2;", r"\g<1>3;"),
    "rows sixteen lower": Edit(r"(or\.b32 \s*%r\d+, %r\d+, )8;", r"\g<1>16;"),
    "a row after the last one": Edit(r"setp\.ge\.s32( \s*%p\d+, %r43)", r"setp.gt.s32\1"),
    "a pair beyond the last column": Edit(r"(add\.s32 \s*%r44, %r\d+, )2;", r"\g<1>1;"),
    "an element beyond the last column": Edit(r"setp\.ge\.s32( \s*%p\d+, %r235)", r"setp.gt.s32\1"),
    "a pair that is not aligned": Edit(r"(and\.b64 \s*%rd\d+, %rd\d+, )3;", r"\g<1>1;"),
    "a row's offset overflows": Edit(
        r"mul\.wide\.s32 \s*(%rd\d+), (%r43), (%r\d+);", r"mul.lo.s32 \2, \2, \3; cvt.s64.s32 \1, \2;",
    ),
    "a pair is stored twice": Edit(r"st\.global\.u32[^;]*;", r"\g<0>\n\g<0>"),
    "an element is stored twice": Edit(r"(st\.global\.u16 \s*\[%rd\d+)\+2\], %rs2;", r"\1], %rs1;"),
    "the end of a row is not stored": Edit(r"st\.global\.u16 \s*\[%rd\d+\], %rs1;", ""),
    "operands are loaded although the kernel before runs": Edit(r"griddepcontrol\.wait;", ""),
    "D is stored although the kernel before runs": Edit(r"griddepcontrol\.wait;", "", 1),
    # Slices of k.
    "slices of half as many k-tiles": Edit(r"(shr\.u64 \s*%rd24, %rd23, )1;", r"\g<1>2;"),
    "a slice ends a slice later": Edit(r"(add\.s32 \s*%r121, %r71, )1;", r"\g<1>2;"),
    "the producer loads another slice": Edit(r"(add\.s32 \s*%r\d+, %r71, )1;", r"\g<1>2;"),
    "the producer begins at k = 0": Edit(r"mul\.wide\.s32 \s*(%rd72), %r71, (%r\d+);", r"mul.wide.s32 \1, 0, \2;"),
    "tiles of another cluster": Edit(r"(mov\.u32 \s*(%r100), %ctaid\.x;\s*shr\.u32 \s*%r101, \2, )1;", r"\g<1>0;"),
}  # fmt: skip
HARMLESS: dict[str, tuple[Edit, str]] = {
    "the two slices change places": (
        Edit(ADD, r"\g<add>\g<b>, \g<a>;"), "a sum of two is the same in both orders",
    ),
    "pairs only if one more column fits": (
        Edit(r"(add\.s32 \s*%r44, %r\d+, )2;", r"\g<1>3;"), "the other pairs are stored element by element",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", COVERED)
def test_a_kernel_whose_clusters_add_is_certified_and_its_certificate_holds(name: str) -> None:
    prove_and_recheck(COVERED[name])


@pytest.mark.slow
@pytest.mark.one_in(9)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused(fault: str) -> None:
    edit = FAULTS[fault]
    record = SUMS if edit.record is not SWAPPED else SWAPPED
    assert reason_of_refusal(record, edit.apply(ptx_of(record)))


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("change", HARMLESS)
def test_a_harmless_change_is_certified(change: str) -> None:
    """A harmless change is certified, so the faults above are not refused merely because a text was changed."""
    assert not reason_of_refusal(SUMS, HARMLESS[change][0].apply(ptx_of(SUMS)))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_facts_of_slices_hold_for_every_slice(count: int) -> None:
    """The facts about slices do not contradict each other for any number of slices; from a contradiction everything
    would follow."""
    for rank, total in product(range(count), range(count, 40)):
        first, end = total * rank // count, total * (rank + 1) // count
        names = {
            "all_tiles": total, "first_tile": first, TILES: end - first, "first_rest": total * rank % count,
            "end_rest": total * (rank + 1) % count,
        }  # fmt: skip
        facts = with_slice(Facts({(TILES,): (1, 40)}), rank, count, 64)
        assert [facts.evaluated(each, names) for each in slice_of(rank, count)] == [first, total]
        assert all(facts.evaluated(each, names) >= 0 for each in facts.assumed)
        assert all(low <= names[name] <= high for (name,), (low, high) in facts.bounds.items())
        for dividend, divisor, whole, rest in facts.quotients:
            values = [facts.evaluated(each, names) for each in (dividend, whole, rest)]
            assert divmod(values[0], divisor) == (values[1], values[2])
