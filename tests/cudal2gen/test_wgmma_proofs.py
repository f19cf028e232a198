"""Proves that kernels which multiply by wgmma are certified, and refused with any planted fault in their PTX."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from cudal2gen.kernel import Record
from cudal2gen.validator.contracts import refusal
from tests.cudal2gen.paths import PINGPONG, TWO_CONSUMERS, ring
from tests.cudal2gen.test_proofs import prove_and_recheck, ptx_of, reason_of_refusal

# Kernels with a ring of two stages: one consumer, two in turns, swapped operands, and clusters of two and four CTAs.
SMALL = ring(stages=2)
TURNS = ring(stages=2, **PINGPONG)
SWAPPED = ring(stages=2, swap_ab=True, bm=32, bn=64)
AHEAD = ring(stages=2, cluster=[2, 1], prefetch_b=True)
PAIR, SQUARE = ring(stages=2, cluster=[2, 1]), ring(stages=2, cluster=[2, 2])
COVERED: dict[str, Record] = {
    "f32": SMALL,
    "f16": ring(stages=2, acc="f16"),
    "in turns": TURNS,
    "clusters of two": PAIR,
    "clusters of two, in turns": ring(stages=2, cluster=[1, 2], **PINGPONG),
    "clusters of four": SQUARE,
    "operands swapped": SWAPPED,
    "weights asked for ahead": AHEAD,
    "operands swapped, f16, clusters of two": ring(stages=2, acc="f16", swap_ab=True, bm=32, bn=64, cluster=[1, 2]),
    "two consumers, setmaxnreg": ring(**TWO_CONSUMERS, registers=[40, 232]),
    "columns that are divided by 13": ring(stages=2, bn=208, atom_n=208),
    "rows of B across k, two boxes of D": ring(stages=2, layout="nn", bn=96, atom_n=96),
}
NOT_COVERED: dict[str, Record] = {
    "slices in a workspace, in clusters": ring(split_k=3, reduce="workspace", cluster=[2, 1]),
    "the last wave is shared out, stored directly": ring(stream_k=True, epilogue="direct"),
    "stored directly": ring(epilogue="direct"),
    "D of fp32": ring(acc="f32", d="f32"),
    "fused": ring(fusion="bias_n"),
    "batched": ring(batch="strided"),
}
BUILT_AHEAD = [*COVERED.values()]


class Edit(NamedTuple):
    """A change of a text: match number ``which`` of a pattern is replaced."""

    pattern: str
    replacement: str
    which: int = 0
    record: Record = SMALL

    def apply(self, ptx: str) -> str:
        """The changed text."""
        ptx = re.sub(r"\n\s*(\.loc|//)[^\n]*", "", ptx)
        found = list(re.finditer(self.pattern, ptx, re.DOTALL))
        match = found[self.which]
        changed = ptx[: match.start()] + match.expand(self.replacement) + ptx[match.end() :]
        assert changed != ptx
        return changed

    def refusal(self) -> str:
        """Why the kernel of ``record`` is not certified after the change; empty if it is."""
        return reason_of_refusal(self.record, self.apply(ptx_of(self.record)))


# A wait for an mbarrier: its address and parity. In its place: no wait, and a wait for parity 0.
TRY_WAIT = r"mbarrier\.try_wait\.parity\.shared::cta\.b64 p, (\[%r\d+\]), (%r\d+);"
NO_WAIT = r"setp.eq.u32 p, \2, \2;"
EARLIER = r"mbarrier.try_wait.parity.shared::cta.b64 p, \1, 0;"
PRODUCER, CONSUMER = 0, 1  # indices of their waits in the text
# A wait until at most one group of products is in flight, and until none is.
WAIT_1, WAIT_0 = r"wgmma\.wait_group\.sync\.aligned 1;", r"wgmma\.wait_group\.sync\.aligned 0;"
# The end of a group of products, and a product: its first two sums, its descriptors and its predicate.
COMMIT = r"wgmma\.commit_group\.sync\.aligned;"
MMA = r"(wgmma\.mma_async\.[^{]*\{)(%f\d+), (%f\d+)([^}]*\}, %rd\d+, %rd\d+, )(p)(, 1, 1, 0, 0;)"
BRANCH = r".*?@%p\d+ bra \s*(?P<to>\$L__BB_\d+);.*?\n(?P=to):"  # a branch, to the label at which its ways meet
# An arrival of a consumer that releases a stage, and one at the address that group 4 of a larger pattern matched.
RELEASE = r"mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];"
RELEASE_AT = r"mbarrier\.arrive\.shared::cta\.b64 _, \[\4\];"
# An arrival of the producer that says how many bytes a stage gets.
EXPECT = r"(mov\.u32 \s*(%r\d+), )\d+;(\s*mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, \[%r\d+\], \2;)"
MODE = "4611686293305294848"  # a descriptor's high word: swizzle of 128 bytes, 1024 from 8 rows to the next
# The stage after the last of two is the first again, and the parity is toggled.
NEXT_STAGE = r"(add\.s32 \s*(%r\d+), %r\d+, 1;\s*setp\.eq\.s32 \s*%p\d+, \2, )2;"
TOGGLE = r"xor\.b32 \s*(%r\d+), \1, %r\d+;"
# The end of a loop: whether more k-tiles follow.
MORE = r"setp\.lt\.u32( \s*%p\d+, %r\d+, %r\d+;\s*@%p\d+ bra \s*\$L__BB_\d+;\s*\$L__BB_\d+:\s*"
FAULTS: dict[str, Edit] = {
    # Groups of products.
    "products are not waited for in the loop": Edit(WAIT_1, ""),
    "two groups may be in flight in the loop": Edit(WAIT_1, "wgmma.wait_group.sync.aligned 2;"),
    "the last products are not waited for": Edit(WAIT_0, ""),
    "one group may be in flight after the loop": Edit(WAIT_0, "wgmma.wait_group.sync.aligned 1;"),
    "products are committed to no group": Edit(COMMIT, ""),
    "a stage is handed back before the wait in the loop": Edit(rf"({WAIT_1})({BRANCH})", r"\2\n\1"),
    "the last stage is handed back before the wait": Edit(rf"({WAIT_0})({BRANCH})", r"\2\n\1"),
    # Registers.
    "there is no wgmma.fence": Edit(r"wgmma\.fence\.sync\.aligned;", ""),
    "an accumulator is written between fence and wgmma": Edit(MMA, r"mov.f32 \2, 0f00000000;\n\g<0>"),
    "an accumulator is written in flight": Edit(rf"{MMA}(.*?{COMMIT})", r"\g<0>\nmov.f32 \3, 0f00000000;"),
    "an accumulator is read in flight": Edit(rf"{MMA}(.*?{COMMIT})", r"\g<0>\n{.reg .f32 x; add.f32 x, \2, \2; }"),
    "an accumulator is read after the loop before the wait": Edit(
        rf"{MMA}(.*?)({WAIT_0})", r"\1\2, \3\4\5\6\7{.reg .f32 x; add.f32 x, \2, \2; }\n\8",
    ),
    "two registers of an accumulator are exchanged": Edit(MMA, r"\1\3, \2\4\5\6", 1),
    # mbarriers, phases and bytes.
    "the producer does not wait": Edit(TRY_WAIT, NO_WAIT, PRODUCER),
    "the producer waits for phase 0": Edit(TRY_WAIT, EARLIER, PRODUCER),
    "consumers do not wait": Edit(TRY_WAIT, NO_WAIT, CONSUMER),
    "consumers wait for phase 0": Edit(TRY_WAIT, EARLIER, CONSUMER),
    "too few bytes are expected": Edit(EXPECT, r"\g<1>12160;\3"),
    "too many bytes are expected": Edit(EXPECT, r"\g<1>12304;\3"),
    "a stage is not handed back in the loop": Edit(RELEASE, ""),
    "the last stage is not handed back": Edit(RELEASE, "", 1),
    "a stage is handed back twice": Edit(RELEASE, r"\g<0>\n\g<0>"),
    "the stage in flight is handed back": Edit(
        r"(shl\.b32 \s*(%r\d+), )%r\d+(, 4;\s*add\.s32 \s*(%r\d+), \2, %r\d+;.{,60}" + rf"{RELEASE_AT}"
        r".*?shl\.b32 \s*%r\d+, (%r\d+), 4;)", r"\1\5\3",
    ),
    "an empty stage expects an arrival more": Edit(r"(mov\.u32 \s*%r\d+, )4;", r"\g<1>5;"),
    "mbarriers are not published": Edit(r"fence\.mbarrier_init\.release\.cluster;", ""),
    "consumers use a third stage": Edit(NEXT_STAGE, r"\g<1>3;", 1),
    "the producer uses a third stage": Edit(NEXT_STAGE, r"\g<1>3;"),
    "the consumers' parity stays": Edit(TOGGLE, "", 1),
    "the producer's parity stays": Edit(TOGGLE, ""),
    "what is no tensor map is prefetched": Edit(
        r"cp\.async\.bulk\.prefetch\.tensor\.2d\.L2\.global \[(%rd\d+),[^;]*;",
        r"add.s64 \1, \1, 64;\n\g<0>\nsub.s64 \1, \1, 64;", record=AHEAD,
    ),
    # Products.
    "k-tiles begin with what accumulators hold": Edit(r"setp\.ne\.b32 p, %r\d+, 0;", "setp.eq.b32 p, 0, 0;"),
    "each k-tile begins with zeros": Edit(r"setp\.ne\.b32 p, %r\d+, 0;", "setp.ne.b32 p, 0, 0;"),
    "products of k are lost": Edit(r"setp\.ne\.b32 p, %r\d+, 0;", "setp.ne.b32 p, 0, 0;", 2),
    "a wgmma is executed twice": Edit(MMA, r"\g<0>\n\g<0>"),
    "a wgmma is missing": Edit(MMA, "", 3),
    "B is negated": Edit(MMA, r"\1\2, \3\4\5, 1, -1, 0, 0;"),
    "A is taken for rows across k": Edit(MMA, r"\1\2, \3\4\5, 1, 1, 1, 0;"),
    "operands are taken for bf16": Edit(r"\.f32\.f16\.f16 ", ".f32.bf16.bf16 "),
    # Descriptors.
    "a swizzle of 64 bytes": Edit(MODE, str(int(MODE) ^ 0xC000000000000000)),
    "rows of B are 512 bytes apart": Edit(MODE, str(int(MODE) ^ 0x60 << 32), 1),
    "a swizzle with another base": Edit(MODE, str(int(MODE) | 1 << 49)),
    "a bit outside the fields": Edit(MODE, str(int(MODE) | 1 << 52)),
    "B begins 16 bytes later": Edit(r"(add\.s32 \s*(%r\d+), %r\d+, )8192;(?=\s*and\.b32 \s*%r\d+, \2)", r"\g<1>8208;"),
    "stages are 16 bytes too close": Edit(r"(mul\.lo\.s32 \s*%r\d+, %r\d+, )768;", r"\g<1>767;"),
    "A's block of k is another one": Edit(r"(add\.s32 \s*%r\d+, %r\d+, )2;(?=\s*cvt\.u64)", r"\g<1>4;"),
    # Boxes and the stores of D.
    "k-tiles overlap": Edit(r"(shl\.b32 \s*(%r\d+), %r\d+, )6;(?=.{,200}\{ \2, %r)", r"\g<1>5;"),
    "a box of B is loaded 1024 bytes later": Edit(
        r"(add\.s32 \s*(%r\d+), %r\d+, )8192;(?=.{,200}\[\2\])", r"\g<1>9216;",
    ),
    "one k-tile too many": Edit(rf"{MORE}{WAIT_0})", r"setp.le.u32\1"),
    "neighbours of D are exchanged": Edit(r"(cvt\.rn\.f16x2\.f32 %r\d+, )(%f\d+), (%f\d+);", r"\1\3, \2;"),
    "a store begins at another row": Edit(
        r"(cp\.async\.bulk\.tensor\.2d\.global\.\S+ \[%rd\d+, \{ )(%r\d+), (%r\d+)", r"\1\3, \2",
    ),
    "there is no fence before the store": Edit(r"fence\.proxy\.async\.shared::cta;", ""),
    "buffers may be read while they are written": Edit(r"cp\.async\.bulk\.wait_group\.read 0;", ""),
    # Turns of two groups.
    "a turn is not handed on": Edit(r"mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];", "", 1, TURNS),
    "a turn is not waited for": Edit(TRY_WAIT, NO_WAIT, 1, TURNS),
    "a turn has the other parity": Edit(TRY_WAIT, r"mbarrier.try_wait.parity.shared::cta.b64 p, \1, 0;", 1, TURNS),
    # Swapped operands.
    "a swapped D is not transposed": Edit(r"(stmatrix[^ ]*\.x4)\.trans", r"\1", record=SWAPPED),
    # Clusters.
    "CTAs do not wait for each other to begin": Edit(r"barrier\.cluster\.(arrive|wait)[^;]*;", "", record=PAIR),
    "a CTA does not wait for the others to begin": Edit(
        r"barrier\.cluster\.wait[^;]*;", "bar.sync 0;", record=PAIR,
    ),
    "mbarriers of a cluster are not published": Edit(r"fence\.mbarrier_init[^;]*;", "", record=PAIR),
    "B is loaded for the first CTA alone": Edit(r"(mov\.u16 \s*%rs\d+, )3;", r"\g<1>1;", record=PAIR),
    "B is loaded for a third CTA": Edit(r"(mov\.u16 \s*%rs\d+, )3;", r"\g<1>7;", record=PAIR),
    "A is loaded for both CTAs": Edit(
        r"(tx::bytes)(\.L2::cache_hint )(\[%r\d+\], \[%rd\d+, \{ %r\d+, %r\d+ \}\], \[%r\d+\])",
        r"\1.multicast::cluster\2\3, 3", record=PAIR,
    ),
    "both CTAs load the same half of B": Edit(
        r"(shl\.b32 \s*%r\d+, %r\d+, )4;(?=\s*shl\.b32 \s*%r\d+, %r\d+, 11;)", r"\g<1>31;", record=PAIR,
    ),
    "both halves of B go to one place": Edit(
        r"(shl\.b32 \s*%r\d+, %r\d+, )11;(\s*or\.b32 \s*%r\d+, %r\d+, 8192;)", r"\g<1>32;\2", record=PAIR,
    ),
    "stages are handed back to the own CTA alone": Edit(
        r"(mapa[^,]*, %r\d+, )%r\d+;", r"\g<1>%cluster_ctarank;", record=PAIR,
    ),
    "stages are handed back to the first CTA alone": Edit(
        r"setp\.gt\.u32( \s*%p\d+, %r\d+, )1;", r"setp.gt.u32\g<1>0;", record=PAIR,
    ),
    "an empty stage expects too few arrivals": Edit(
        r"(mov\.u32 \s*%r\d+, )8;(?=\s*mbarrier\.init)", r"\g<1>4;", record=PAIR,
    ),
    "only the own half of B is expected": Edit(EXPECT, r"\g<1>10240;\3", record=PAIR),
    "a CTA may end before stages are handed back": Edit(TRY_WAIT, NO_WAIT, 1, PAIR),
    "a stage is handed back to the own CTA only in the end": Edit(
        r"mbarrier\.arrive\.shared::cluster(\.b64 _, \[)", r"mbarrier.arrive.shared::cta\1", 1, PAIR,
    ),
    "a CTA stores the other one's tile": Edit(
        r"(cp\.async\.bulk\.tensor\.2d\.global\.\S+ \[%rd\d+, \{ %r\d+, )(%r\d+)",
        r"xor.b32 \2, \2, 64;\n\1\2", record=PAIR,
    ),
    "stages are handed back to the CTA across": Edit(
        r"(or\.pred \s*%p\d+, )(%p\d+), %p\d+;(?=\s*@%p\d+ bra [^;]*;\s*add\.s32[^;]*;\s*mapa)",
        r"\1\2, \2;", record=SQUARE,
    ),
    "the last wait has the other parity": Edit(TRY_WAIT, EARLIER, 2, PAIR),
}  # fmt: skip
HARMLESS: dict[str, tuple[Edit, str]] = {
    "bytes between chunks of A": (
        Edit(r"(or\.b32 \s*%r\d+, %r\d+, )33554432;", r"\g<1>16777216;"),
        "an operand along k has no leading offset: its 32 bytes lie in one row of the swizzle",
    ),
    "the rank's bits in A's descriptor": (
        Edit(r"and\.b32( \s*%r\d+, %r\d+, )262128;", r"and.b32\g<1>-16;", record=PAIR),
        "they become a part of the leading offset, which an operand along k does not have",
    ),
    "the kernel before is waited for before its dependents may start": (
        Edit(r"griddepcontrol\.launch_dependents;", r"griddepcontrol.wait;\n\g<0>"),
        "the next kernel waits for the end of this one in any case",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", COVERED)
def test_a_covered_kernel_is_certified_and_its_certificate_holds(name: str) -> None:
    prove_and_recheck(COVERED[name])


@pytest.mark.parametrize("name", NOT_COVERED)
def test_what_is_not_covered_is_refused(name: str) -> None:
    assert refusal(NOT_COVERED[name])


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused(fault: str) -> None:
    assert FAULTS[fault].refusal()


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_change_is_certified(name: str) -> None:
    """This shows that a change as such is no reason for a refusal."""
    edit, _why = HARMLESS[name]
    assert not edit.refusal()
