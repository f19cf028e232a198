"""Proves that kernels whose clusters share out the last wave are certified, and refused with any fault."""

from __future__ import annotations

from typing import Any

import pytest

from cudal2gen.kernel import Record
from tests.cudal2gen.paths import SWAPPED, TWO_CONSUMERS, ring
from tests.cudal2gen.test_partial_sum_proofs import Edit, edited_ptx
from tests.cudal2gen.test_proofs import prove_and_recheck, reason_of_refusal

SHARED: dict[str, Any] = {"stages": 2, "stream_k": True}
PAIRS = ring(**SHARED, cluster=[1, 2])
COVERED: dict[str, Record] = {
    "pairs along n": PAIRS,
    "two by two": ring(**SHARED, cluster=[2, 2]),
    "operands swapped": ring(**SHARED | SWAPPED, atom_n=32, cluster=[1, 2]),
    "two warpgroups": ring(**SHARED | TWO_CONSUMERS, cluster=[2, 1], registers=[40, 232]),
    "no cluster": ring(**SHARED),
}
BUILT_AHEAD = [*COVERED.values()]
# The producer's text comes before the consumers', which begins with mapa. In each, the first rem.s32 gives the number
# of tiles in the last wave, and the second one the cluster whose share an item is.
CONSUMERS = "mapa"
SHARE = r"(rem.s32(?:.*\n)*?.*rem.s32(?:.*\n)*?\t"
# After the items: a group's share of the vectors, the tile's parts, the wait for them, the sums.
TILE, WAIT, COUNT, LOADED = "min.s64", "ld.acquire", "atom.relaxed", "ld.global.cg"
NEXT = r"(?:\s|//.*|\.loc.*)*"  # what may stand between two instructions
THRESHOLD = rf"(add.s32 \t%r\d+, %r\d+, )1;(?={NEXT}\S+:{NEXT}ld.acq)"
FAULTS: dict[str, Edit] = {
    # The producer's items.
    "loads: a share ends one cluster later": Edit("", SHARE + r"add.s32 \t%r\d+, %r\d+, )1;", r"\g<1>2;"),
    "loads: a tile ends one tile later": Edit(
        "", SHARE + r"div.s32(?:.*\n)*?\tdiv.s32(?:.*\n)*?\tadd.s32 \t%r\d+, %r\d+, )1;", r"\g<1>2;"
    ),
    "loads: a wave of fewer tiles": Edit("", r"(rem.s32(?:.*\n)*?\tadd.s32 \t%r\d+, %r\d+, )-1;", r"\g<1>-2;"),
    "loads: items if no wave is shared": Edit("", r"(rem.s32(?:.*\n)*?\tsetp.)eq(.s32 \t%p\d+, %r\d+, 0;)", r"\1ne\2"),
    "loads: one item of each share": Edit(
        "%nctaid.x", r"and.b32 +(\t%r\d+, %r\d+), -2;((?:.*\n)*?\tselp.b32 \t%r\d+, 0, %r)", r"shr.u32 \1, 1;\2"
    ),
    "loads: the halves of a share change places": Edit(
        "", SHARE + r"min.s32(?:.*\n)*?.*min.s32(?:.*\n)*?.*min.s32(?:.*\n)*?\tsetp.)lt(.s32)", r"\1ge\2"
    ),
    "loads: an empty item": Edit("", SHARE + r"setp.)ge(.s32)", r"\1gt\2"),
    "loads: shorter shares first": Edit("", SHARE + r")min.s32", r"\1max.s32"),
    # The consumers' items.
    "a share ends one cluster later": Edit(CONSUMERS, SHARE + r"add.s32 \t%r\d+, %r\d+, )1;", r"\g<1>2;"),
    "a tile ends one tile later": Edit(
        CONSUMERS, SHARE + r"div.s32(?:.*\n)*?\tdiv.s32(?:.*\n)*?\tadd.s32 \t%r\d+, %r\d+, )1;", r"\g<1>2;"
    ),
    "the share of the cluster modulo its waves": Edit(CONSUMERS, r"(rem.s32(?:.*\n)*?.*)rem.s32", r"\1div.s32"),
    "items if no wave is shared": Edit(CONSUMERS, r"(rem.s32(?:.*\n)*?\tsetp.)eq(.s32 \t%p\d+, %r\d+, 0;)", r"\1ne\2"),
    "the halves of a share change places": Edit(
        CONSUMERS, SHARE + r"min.s32(?:.*\n)*?.*min.s32(?:.*\n)*?.*min.s32(?:.*\n)*?\tsetp.)lt(.s32)", r"\1ge\2"
    ),
    "a part is taken for a whole tile": Edit(CONSUMERS, SHARE + r"setp.)eq(.s32)", r"\1ne\2"),
    "a whole tile is taken for a part": Edit(
        CONSUMERS, r"selp.b64 \t(%rd\d+), -1, (%rd\d+), %p\d+;", r"mov.b64 \1, \2;"
    ),
    "slabs of CTAs of a cluster overlap": Edit(
        CONSUMERS, rf"add.s32 \t(%r\d+), (%r\d+), (%r\d+);({NEXT})cvt.s64.s32", r"mov.b32 \1, \3;\4cvt.s64.s32"
    ),
    "slabs of a cluster's two parts overlap": Edit(
        CONSUMERS, SHARE + rf"cvt.s64.s32 \t%rd\d+, %r\d+;{NEXT}add.s64 \t%rd\d+, )(%rd\d+), %rd\d+;", r"\1\2, \2;"
    ),
    "the next tile is counted": Edit(CONSUMERS, SHARE + r"add.s64(?:.*\n)*?\tshl.b32 \t%r\d+, %r\d+, )1;", r"\g<1>2;"),
    "an empty item is computed": Edit(
        "selp.b64", r"setp.eq.s32 \t%p\d+, (%r\d+), (%r\d+);(?:.*\n)*?\t@%p\d+ bra \t\S+;", ""
    ),
    "parts are stored as tiles": Edit(CONSUMERS, r"setp.lt.s64", "setp.ge.s64"),
    "parts beyond D are left": Edit("setp.lt.s64", r"or.pred( +\t%p\d+), %p\d+, %p\d+;", r"setp.lt.s32\1, 0, 0;"),
    "two vectors at one place": Edit("st.global.v4", r"\+4096\]", "+2048]"),
    "a group does not meet after its stores": Edit("st.global.v4", r"bar.sync %r\d+, 128;", ""),
    "an item is counted without release": Edit("", "red.release.gpu", "red.relaxed.gpu"),
    "an item counts as two": Edit("red.release", r"\], 1;", "], 2;"),
    "an item is not counted": Edit("", r"red.release.*?;", ""),
    # Groups that add parts.
    "tiles of twice as many CTAs": Edit(
        "red.release", r"(%ctaid.x;(?:.*\n)*?\tshl.b32 \t%r\d+, %r\d+, )1;", r"\g<1>2;"
    ),
    "longer shares are two k-tiles longer": Edit(
        "-4294967296", r"(div.s32(?:.*\n)*?\tadd.s32 \t%r\d+, %r\d+, )1;", r"\g<1>2;"
    ),
    "a tile's first part by the other shares": Edit(TILE, r"setp.lt.s32", "setp.ge.s32"),
    "a tile's last k-tile is the next one's first": Edit(TILE, r"(add.s32 \t%r\d+, %r\d+, )-1;", r"\g<1>0;"),
    "a tile's last k-tile is left out": Edit(TILE, r"(add.s32 \t%r\d+, %r\d+, )-1;", r"\g<1>-2;"),
    "parts of the cluster before": Edit(
        TILE, r"(div.s32 \t%r\d+, %r\d+, %r\d+;(?:.*\n)*?\tadd.s32 \t(%r\d+), %r\d+, %r\d+;)", r"\1 sub.s32 \2, \2, 1;"
    ),
    "a tile with two parts is passed over": Edit(TILE, r"(setp.eq.s32 \t%p\d+, %r\d+, )0;", r"\g<1>1;"),
    "a tile with one part is added": Edit(TILE, r"setp.eq.s32 (\t%p\d+), %r\d+, 0;", r"setp.lt.s32 \1, 0, 0;"),
    "a wait for one part less": Edit(TILE, THRESHOLD, r"\g<1>0;"),
    "a wait for one part more": Edit(TILE, THRESHOLD, r"\g<1>2;"),
    "a wait for parts or vectors": Edit(WAIT, r"(and.b32 +\t%r\d+, %r\d+, )65535;", r"\g<1>131071;"),
    "a wait that does not acquire": Edit("", "ld.acquire.gpu", "ld.relaxed.gpu"),
    "no wait": Edit(WAIT, r"@%p\d+ bra \t\S+;", ""),
    "vectors are counted one bit lower": Edit(WAIT, r"(shl.b32 \t%r\d+, %r\d+, )16", r"\g<1>15"),
    "vectors are counted for the CTA": Edit("", "atom.relaxed.gpu", "atom.relaxed.cta"),
    "no meeting after the wait": Edit(COUNT, r"bar.sync %r\d+, 128;", ""),
    "the last but one clears": Edit(COUNT, r"(setp.eq.s32 \t%p\d+, %r\d+, )4;", r"\g<1>3;"),
    "a counter is not cleared": Edit("", r"st.relaxed.gpu.*?;", ""),
    "all groups clear": Edit(COUNT, r"and.pred( +\t%p\d+, %p\d+), %p\d+;", r"mov.pred\1;"),
    "a part is not loaded": Edit(LOADED, r"setp.lt.s32", "setp.gt.s32"),
    "slabs of half a tile": Edit(LOADED, r"(mul.wide.u32 \t%rd\d+, %r\d+, )4;", r"\g<1>2;"),
    "two parts change places": Edit(
        LOADED, r"(\tadd.s32 \t%r\d+, %r\d+, )1;(?=(?:.*\n){1,8}\tmul.wide.u32)", r"\g<1>2;"
    ),
    "a slice is left out of many parts": Edit(COUNT, r"(add.s32 \t(%r\d+), \2, )16;", r"\g<1>17;"),
    "a slice of many parts is added twice": Edit(COUNT, r"(add.s32 \t(%r\d+), \2, )16;", r"\g<1>15;"),
    "sums of many parts begin anew": Edit(
        COUNT, r"(add.f32 \t(%f\d+), %f\d+, %f\d+;)((?:(?!\tadd.f32).*\n)*?\tadd.s32 \t(%r\d+), \4, 16;)", (
            r"\1 mov.f32 \2, 0f00000000;\3"),
    ),
    "a thread ends while its stores read": Edit("st.relaxed", r"cp.async.bulk.wait_group.read 0;", ""),
    "a box is written while it is read": Edit("setp.lt.s64", r"cp.async.bulk.wait_group.read 0;", ""),
}  # fmt: skip
# Changes after which a kernel does the same.
HARMLESS: dict[str, tuple[Edit, str]] = {
    "no slab is skipped before the first part": (
        Edit(COUNT, r"(mul.wide.u32 \t%rd\d+, %r\d+, )4;", r"\g<1>2;"), "up to four parts are loaded, from 0 on",
    ),
    "a share that is empty": (
        Edit(COUNT, r"setp.le.s32", "setp.lt.s32"), "a group comes to a tile with at least one vector of it",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", COVERED)
def test_a_kernel_with_a_shared_last_wave_is_certified_and_its_certificate_holds(name: str) -> None:
    prove_and_recheck(COVERED[name])


@pytest.mark.slow
@pytest.mark.one_in(18)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused(fault: str) -> None:
    assert reason_of_refusal(PAIRS, edited_ptx(FAULTS[fault], PAIRS))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("change", HARMLESS)
def test_a_harmless_change_is_certified(change: str) -> None:
    assert not reason_of_refusal(PAIRS, edited_ptx(HARMLESS[change][0], PAIRS))
