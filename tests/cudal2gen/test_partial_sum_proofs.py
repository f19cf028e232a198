"""Proves that pipelines with split k are certified, and refused with any fault in the code that adds partial sums."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from cudal2gen.kernel import Record
from tests.cudal2gen.paths import warps
from tests.cudal2gen.test_proofs import prove_and_recheck, ptx_of, reason_of_refusal

# Kernels that add partial sums: of both consumers together, and of consumers that take turns.
SUMS = warps(bm=64, bn=32, stages=2, split_k=4)
IN_TURNS = warps(bm=64, bn=32, stages=2, consumers=2, schedule="pingpong", split_k=2, acc="f16")
COVERED: dict[str, Record] = {"cooperative": SUMS, "in turns": IN_TURNS, "nn": warps(split_k=2, layout="nn", stages=2)}
BUILT_AHEAD = [*COVERED.values()]


class Edit(NamedTuple):
    """A change of the PTX: ``replacement`` for the first match of ``pattern`` after the text ``after``."""

    after: str
    pattern: str
    replacement: str


# Texts after which faults are planted: the wait for the other slices, the count of added vectors, and the sum of all
# slices.
WAIT, COUNT, ADDED = "ld.acquire", "atom.relaxed", "cvt.rn.f16x2"
# The key names the part of the protocol that has the fault.
FAULTS: dict[str, Edit] = {
    "a slab's stride of tiles": Edit("or.pred", r"(mul.wide.s32 \t%rd\d+, %r\d+, )32768", r"\g<1>16384"),
    "a slab's stride of slices": Edit("or.pred", r"(mul.wide.s32 \t%rd\d+, %r\d+, )8192", r"\g<1>4096"),
    "two vectors at one place": Edit("st.global.v4", r"\+4096\]", "+2048]"),
    "a vector is not left": Edit("st.global.v4", r"st.global.v4.f32 \t\[%rd\d+\+6144\].*?;", ""),
    "two sums of a vector change places": Edit("or.pred", r"(st.global.v4.f32.*\{)(%f\d+), (%f\d+)", r"\1\3, \2"),
    "a group does not meet after its stores": Edit("st.global.v4", r"bar.sync %r\d+, 128;", ""),
    "half a group meets after its stores": Edit("st.global.v4", r"(bar.sync %r\d+), 128;", r"\1, 64;"),
    "a group meets at the CTA's barrier": Edit("st.global.v4", r"bar.sync %r\d+, 128;", "bar.sync 0, 128;"),
    "an item is counted without release": Edit("", "red.release.gpu", "red.relaxed.gpu"),
    "an item is counted for its CTA": Edit("", "red.release.gpu", "red.release.cta"),
    "an item is counted for its cluster": Edit("", "red.release.gpu", "red.release.cluster"),
    "an item counts as two": Edit("red.release", r"\], 1;", "], 2;"),
    "an item is not counted": Edit("", r"red.release.*?;", ""),
    "all threads count an item": Edit("bar.sync %r", r"@%p\d+ bra \t\S+;", ""),
    "the next tile is counted": Edit("bar.sync %r", r"(mul.wide.s32 \t%rd\d+, %r\d+, )4;", r"\g<1>8;"),
    "shares of twice as many vectors": Edit("red.release", r"(mul.wide.s32 \t%rd\d+, %r\d+, )4;", r"\g<1>8;"),
    "a share ends one group later": Edit("red.release", r"(add.s32 \t%r\d+, %r\d+, )1;", r"\g<1>2;"),
    "a share's end overflows 32 bits": Edit("-4294967296", r"@%p\d+ bra \t\S+;", ""),
    "large shares by 32 bits": Edit("red.release", "-4294967296", "-8589934592"),
    "a share that is empty": Edit("div.s64", r"setp.ge.s64", "setp.gt.s64"),
    "a wait for half of the parts": Edit(WAIT, "65532", "65534"),
    "a wait for twice as many parts": Edit(WAIT, "65532", "65528"),
    "a wait for parts or vectors": Edit(WAIT, "65532", "4294967292"),
    "a wait that does not acquire": Edit("", "ld.acquire.gpu", "ld.relaxed.gpu"),
    "a wait that acquires for the CTA": Edit("", "ld.acquire.gpu", "ld.acquire.cta"),
    "a volatile wait": Edit("", "ld.acquire.gpu", "ld.volatile"),
    "no wait": Edit(WAIT, r"@%p\d+ bra \t\S+;", ""),
    "a count before the wait": Edit(
        "shr.s64", r"(?=ld.acquire.*?(\[%rd\d+\]))", r"red.relaxed.gpu.global.add.u32 \1, 0; ",
    ),
    "vectors are counted one bit lower": Edit(WAIT, r"(shl.b32 \t%r\d+, %r\d+, )16", r"\g<1>15"),
    "vectors are counted for the CTA": Edit("", "atom.relaxed.gpu", "atom.relaxed.cta"),
    "vectors are counted by or": Edit("", "atom.relaxed.gpu.global.add.u32", "atom.relaxed.gpu.global.or.b32"),
    "no meeting after the wait": Edit(COUNT, r"bar.sync %r\d+, 128;", ""),
    "half a group meets after the wait": Edit(COUNT, r"(bar.sync %r\d+), 128;", r"\1, 64;"),
    "the last but one clears": Edit(COUNT, r"(setp.ne.s32 \t%p\d+, %r\d+, )4;", r"\g<1>3;"),
    "nobody clears": Edit(COUNT, r"(setp.ne.s32 \t%p\d+, %r\d+, )4;", r"\g<1>5;"),
    "all groups clear": Edit(COUNT, r"or.pred( +\t%p1, %p\d+), %p\d+;", r"mov.pred\1;"),
    "all threads clear": Edit(COUNT, r"or.pred( +\t%p1), %p\d+,", r"mov.pred\1,"),
    "a counter is cleared by a weak store": Edit("", "st.relaxed.gpu", "st"),
    "a counter is cleared for the CTA": Edit("", "st.relaxed.gpu", "st.relaxed.cta"),
    "a counter is not cleared": Edit("", r"st.relaxed.gpu.*?;", ""),
    "slabs of the next tile but one": Edit(COUNT, r"(shr.s64 \t%rd\d+, %rd\d+, )17", r"\g<1>16"),
    "another slice's slab": Edit("ld.global.cg", r"(add.s64 \t%rd\d+, %rd\d+, )8192;", r"\g<1>16384;"),
    "a slab after those of the tile": Edit("ld.global.cg", r"(add.s64 \t%rd\d+, %rd\d+, )24576;", r"\g<1>32768;"),
    "vectors lie half as far apart": Edit(COUNT, r"(mul.wide.s32 \t%rd\d+, %r\d+, )2048", r"\g<1>1024"),
    "a vector after the last one is loaded": Edit("ld.global.cg", r"setp.lt.s32", "setp.le.s32"),
    "loads through the read-only path": Edit("", "ld.global.cg", "ld.global.nc"),
    "a slice is not added": Edit("ld.global.cg", r"(add.f32 \t%f\d+, )%f\d+(, %f\d+;)", r"\g<1>0f00000000\2"),
    "a one is added": Edit("ld.global.cg", r"(add.f32 \t%f\d+, %f\d+, )0f00000000", r"\g<1>0f3F800000"),
    "sums are cut off": Edit("ld.global.cg", "cvt.rn.f16x2", "cvt.rz.f16x2"),
    "neighbours change places": Edit("ld.global.cg", r"(cvt.rn.f16x2.f32 %r\d+), (%f\d+), (%f\d+)", r"\1, \3, \2"),
    "columns of another vector": Edit(ADDED, r"(shl.b32 \t%r\d+, %r\d+, )3;", r"\g<1>4;"),
    "rows nine lower": Edit(ADDED, r"(add.s32 \t%r\d+, %r\d+, )8;", r"\g<1>9;"),
    "a row after the last one": Edit(ADDED, r"setp.ge.s32", "setp.gt.s32"),
    "a pair beyond the last column": Edit(ADDED, r"(add.s32 \t%r\d+, %r\d+, )2;", r"\g<1>1;"),
    "a pair that is not aligned": Edit(ADDED, r"(and.b64  \t%rd\d+, %rd\d+, )3;", r"\g<1>1;"),
    "an element beyond the last column": Edit("st.global.u32", r"setp.ge.s32", "setp.gt.s32"),
    "the first element twice": Edit("st.global.u32", r"(st.global.u16 \t\[%rd\d+\+2\], )%rs1", r"\g<1>%rs2"),
    "a row's offset overflows": Edit(
        ADDED, r"mul.wide.s32 \t(%rd\d+), (%r\d+), (%r\d+);", r"mul.lo.s32 \2, \2, \3; cvt.s64.s32 \1, \2;",
    ),
    "tiles of half as many vectors": Edit("div.s64", r"(shr.s64 \t%rd\d+, %rd\d+, )2;", r"\g<1>3;"),
    "tiles end one vector earlier": Edit("div.s64", r"(min.s64 \t%rd\d+, %rd\d+, )4;", r"\g<1>3;"),
    "tiles end one vector later": Edit("div.s64", r"(min.s64 \t%rd\d+, %rd\d+, )4;", r"\g<1>5;"),
}  # fmt: skip
# Faults of two groups that take turns.
FAULTS_IN_TURNS: dict[str, Edit] = {
    "both groups meet at one barrier": Edit("st.global.v4", r"bar.sync %r\d+, 128;", "bar.sync 1, 128;"),
    "both groups meet at one barrier after their wait": Edit(COUNT, r"bar.sync %r\d+, 128;", "bar.sync 1, 128;"),
    "groups meet together": Edit(COUNT, r"(bar.sync %r\d+), 128;", r"\1, 256;"),
    "both groups of a CTA have one share": Edit("red.release", r"(shr.u32 \t%r\d+, %r\d+, )7;", r"\g<1>8;"),
    "groups of two CTAs have one share": Edit("red.release", r"(shl.b32 \t%r\d+, %r\d+, )1;", r"\g<1>0;"),
    "shares of half as many groups": Edit(
        "red.release", r"(%nctaid.x;(?:.*\n)*?\tshl.b32 \t%r\d+, %r\d+, )1;", r"\g<1>0;"
    ),
    "a wait for one of two parts": Edit(WAIT, "65534", "65535"),
    "the upper sum twice": Edit("or.pred", r"(cvt.f32.f16 %f\d+), high", r"\1, low"),
    "the other slice first": Edit(COUNT, r"(add.f32 \t%f\d+, %f)\d+(, 0f00000000)", r"\g<1>41\2"),
    "all threads wait": Edit("shr.s64", r"@%p\d+ bra \t\S+;(?=(?:\s|//.*|\.loc.*)*\S+:(?:\s|//.*|\.loc.*)*ld.acq)", ""),
    "a share of the whole grid": Edit("red.release", r"(add.s32 \t%r\d+, %r\d+, )1;", r"\g<1>2;"),
}
# Changes of a predicate or a constant that do not change what a kernel computes.
HARMLESS: dict[str, tuple[Edit, str]] = {
    "pairs only if one more column fits": (
        Edit(ADDED, r"(add.s32 \t%r\d+, %r\d+, )2;", r"\g<1>3;"), "the other pairs are stored element by element",
    ),
    "pairs only at multiples of 8": (
        Edit(ADDED, r"(and.b64  \t%rd\d+, %rd\d+, )3;", r"\g<1>7;"), "the other pairs are stored element by element",
    ),
}  # fmt: skip


def edited_ptx(edit: Edit, record: Record = SUMS) -> str:
    """The record's PTX with a change."""
    text = ptx_of(record)
    at = text.index(edit.after)
    changed, count = re.subn(edit.pattern, edit.replacement, text[at:], count=1)
    assert count == 1, "the pattern occurs"
    return text[:at] + changed


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", COVERED)
def test_a_kernel_that_adds_partial_sums_is_certified_and_its_certificate_holds(name: str) -> None:
    prove_and_recheck(COVERED[name])


@pytest.mark.slow
@pytest.mark.one_in(9)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused(fault: str) -> None:
    assert reason_of_refusal(SUMS, edited_ptx(FAULTS[fault]))


@pytest.mark.slow
@pytest.mark.one_in(6)
@pytest.mark.parametrize("fault", FAULTS_IN_TURNS)
def test_a_fault_of_groups_in_turns_is_refused(fault: str) -> None:
    assert reason_of_refusal(IN_TURNS, edited_ptx(FAULTS_IN_TURNS[fault], IN_TURNS))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("change", HARMLESS)
def test_a_harmless_change_is_certified(change: str) -> None:
    assert not reason_of_refusal(SUMS, edited_ptx(HARMLESS[change][0]))
