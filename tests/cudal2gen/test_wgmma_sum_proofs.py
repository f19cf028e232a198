"""Proves that kernels which multiply by wgmma and add slices of k are certified, and refused with any fault."""

from __future__ import annotations

from typing import Any

import pytest

from cudal2gen.kernel import Record
from tests.cudal2gen.paths import SWAPPED, TWO_CONSUMERS, ring
from tests.cudal2gen.test_partial_sum_proofs import COUNT, FAULTS, WAIT, Edit, edited_ptx
from tests.cudal2gen.test_proofs import prove_and_recheck, reason_of_refusal

SLICED: dict[str, Any] = {"stages": 2, "reduce": "workspace", "epilogue": "direct"}
# Kernels whose CTAs sum slices of k: as they are, with swapped operands, with several slices after each other, with two
# rows of vectors at once.
SUMS = ring(**SLICED, split_k=4)
TRANSPOSED = ring(**SLICED | SWAPPED, split_k=4, atom_n=32)
LOOPED = ring(**SLICED | TWO_CONSUMERS, split_k=16, k=1024, acc="f16", registers=[40, 232])
ROWS = ring(**SLICED, split_k=4, bm=128)
COVERED: dict[str, Record] = {
    "four slices": SUMS,
    "operands swapped": TRANSPOSED,
    "a loop over slices, two warpgroups": LOOPED,
    "vectors of two rows at once": ROWS,
}
BUILT_AHEAD = [*COVERED.values()]
# Faults of other kernels' sums that have a place here.
COMMON = (
    "two vectors at one place", "a vector is not left", "a group does not meet after its stores",
    "half a group meets after its stores", "an item is counted without release", "an item is counted for its CTA",
    "an item counts as two", "an item is not counted", "all threads count an item", "shares of twice as many vectors",
    "a share ends one group later", "large shares by 32 bits", "a wait for half of the parts",
    "a wait for twice as many parts", "a wait that does not acquire", "a count before the wait",
    "vectors are counted for the CTA", "no meeting after the wait", "a counter is cleared by a weak store",
    "a counter is not cleared", "another slice's slab", "a vector after the last one is loaded",
    "loads through the read-only path", "a slice is not added", "a one is added", "columns of another vector",
    "a row after the last one", "an element beyond the last column", "tiles of half as many vectors",
    "tiles end one vector later",
)  # fmt: skip
# How the PTX loads a partial sum that another CTA has stored, and how a warp transposes a matrix of 8 by 8.
LOADED = "ld.global.cg"
MOVE = r"movmatrix.sync.aligned.m8n8.trans.b16 (%r\d+), (%r\d+);"
NEXT_MOVE = rf"((?:\s|//.*|\.loc.*)*){MOVE}"
FAULTS_HERE: dict[str, tuple[Record, Edit]] = {
    # Items.
    "a slice ends one k-tile later": (
        SUMS, Edit("", r"(mul.lo.s32 \t%r\d+, %r\d+, (%r\d+);(?:.*\n)*?\tadd.s32 \t%r\d+, %r\d+, )\2;", r"\g<1>1;"),
    ),
    "a slab's stride of tiles": (SUMS, Edit("or.pred", r"(shl.b64 \t%rd\d+, %rd\d+, )2;", r"\g<1>1;")),
    "a slab's stride of slices": (SUMS, Edit("or.pred", r"(shl.b64 \t%rd\d+, %rd\d+, )9;", r"\g<1>8;")),
    "sums are left while products are in flight": (
        SUMS, Edit("", r"wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;"),
    ),
    "sums of the first half of registers twice": (
        SUMS, Edit("st.global.v4", r"(\+2048\], \{)%f\d+, %f\d+, %f\d+, %f\d+(\};)", r"\1%f453, %f452, %f451, %f450\2"),
    ),
    # Shares and counters.
    "a share that is empty": (SUMS, Edit("div.u32", "setp.le.s64", "setp.lt.s64")),
    "the last but one clears": (SUMS, Edit(COUNT, r"(setp.eq.s32 \t%p\d+, %r\d+, )4;", r"\g<1>3;")),
    "all groups clear": (SUMS, Edit(COUNT, r"and.pred( +\t%p\d+, %p\d+), %p\d+;", r"mov.pred\1;")),
    "all threads clear": (SUMS, Edit(COUNT, r"and.pred( +\t%p\d+), %p\d+,", r"mov.pred\1,")),
    "slabs of the next tile but one": (SUMS, Edit(COUNT, r"(shr.s64 \t%rd\d+, %rd\d+, )21", r"\g<1>20")),
    "vectors lie half as far apart": (SUMS, Edit(COUNT, r"(mul.wide.s32 \t%rd\d+, %r\d+, )128", r"\g<1>64")),
    "rows of another warp": (SUMS, Edit("div.u32", r"(and.b32 +\t%r\d+, %r\d+, )48;", r"\g<1>16;")),
    "rows nine lower": (SUMS, Edit("div.u32", r"(or.b32 +\t%r\d+, %r\d+, )8;", r"\g<1>9;")),
    "rows that two lanes have": (SUMS, Edit("div.u32", r"(or.b32 +\t%r\d+, %r\d+, )8;", r"\g<1>4;")),
    "the first element twice": (
        SUMS, Edit("st.global.u16", r"(st.global.u16 \t\[%rd\d+\+2\], )%rs2", r"\g<1>%rs1"),
    ),
    "a row's offset overflows": (
        SUMS, Edit(
            LOADED, r"mul.lo.s64 \t(%rd\d+), (%rd\d+), (%rd\d+);",
            r"{.reg .b32 x, y; cvt.u32.u64 x, \2; cvt.u32.u64 y, \3; mul.lo.s32 x, x, y; cvt.s64.s32 \1, x;}",
        ),
    ),
    # Two vectors at once, of which the second may be the first one of the next row.
    "columns of a row of eight vectors": (
        ROWS, Edit("cvt.rn", r"(add.s32 \t%r\d+, %r\d+, 1;(?:.*\n)*?\tand.b32 +\t%r\d+, %r\d+, )536870908;",
                   r"\g<1>536870904;"),
    ),
    # Two warpgroups that share a tile, and a loop over slices.
    "one of two warpgroups meets after the stores": (
        LOOPED, Edit("st.global.v4", r"(bar.sync %r\d+, )256;", r"\g<1>128;"),
    ),
    "one of two warpgroups meets after the wait": (LOOPED, Edit(COUNT, r"(bar.sync %r\d+, )256;", r"\g<1>128;")),
    "warpgroups leave their sums in one place": (
        LOOPED, Edit("or.pred", r"(and.b32 +\t%r\d+, %r\d+, |add.s32 \t%r\d+, %r\d+, )(255|-128);", r"\g<1>127;"),
    ),
    "a wait for one of 16 parts": (LOOPED, Edit(WAIT, "65520", "65535")),
    "half of the slices": (LOOPED, Edit(LOADED, r"(setp.lt.u32 \t%p\d+, %r\d+, )16;", r"\g<1>8;")),
    "one slice too many": (LOOPED, Edit(LOADED, r"(setp.lt.u32 \t%p\d+, %r\d+, )16;", r"\g<1>17;")),
    "slices from the second one on": (
        LOOPED, Edit(COUNT, r"(selp.u32 \t%r\d+, 1, 0, %p\d+;(?:.*\n)*?\tmov.u32 \t%r\d+, )0;", r"\g<1>1;"),
    ),
    "slices twice": (LOOPED, Edit(LOADED, r"(add.s32 \t(%r\d+), \2, )8;", r"\g<1>4;")),
    "a slice is left out": (LOOPED, Edit(LOADED, r"(add.s32 \t%r\d+, %r\d+, )3;", r"\g<1>4;")),
    "slabs of half a tile": (LOOPED, Edit(COUNT, r"(mul.wide.u32 \t%rd\d+, %r\d+, )4;", r"\g<1>2;")),
    "sums begin with those of the vector before": (
        LOOPED, Edit(LOADED, r"(add.f32 \t%f\d+, )(%f\d+)(, %f\d+;)", r"\1%f127\3"),
    ),
    # Operands swapped: movmatrix transposes the sums of a warp.
    "the upper rows are not transposed": (TRANSPOSED, Edit("", MOVE, r"mov.b32 \1, \2;")),
    "no rows are transposed": (TRANSPOSED, Edit("", MOVE + NEXT_MOVE, r"mov.b32 \1, \2;\3mov.b32 \4, \5;")),
    "the upper rows are transposed twice": (TRANSPOSED, Edit("", MOVE, r"\g<0>\n\g<0>")),
    "the lower rows are transposed instead of the upper ones": (TRANSPOSED, Edit("", MOVE + NEXT_MOVE, (
        r"movmatrix.sync.aligned.m8n8.trans.b16 \1, \5;\3movmatrix.sync.aligned.m8n8.trans.b16 \4, \2;"))),
    "only the first thread transposes": (TRANSPOSED, Edit(COUNT, MOVE, r"@%p40 \g<0>")),
    "only the other threads transpose": (TRANSPOSED, Edit(COUNT, MOVE, r"@!%p40 \g<0>")),
    "the first thread keeps what it had": (
        TRANSPOSED, Edit(COUNT, MOVE, r"{.reg .b32 x; mov.b32 x, \2; \g<0> selp.b32 \1, x, \1, %p40;}"),
    ),
    "the first thread transposes the lower rows": (
        TRANSPOSED, Edit(COUNT, MOVE + NEXT_MOVE, (
            r"{.reg .b32 x; selp.b32 x, \5, \2, %p40; movmatrix.sync.aligned.m8n8.trans.b16 \1, x;}\3"
            r"movmatrix.sync.aligned.m8n8.trans.b16 \4, \5;")),
    ),
    "the first thread goes another way to its movmatrix": (
        TRANSPOSED, Edit(COUNT, MOVE, r"@%p40 bra MOVE; \g<0> bra MOVED; MOVE: \g<0> MOVED:"),
    ),
    "neighbours change places before they are transposed": (
        TRANSPOSED, Edit(LOADED, r"(cvt.rn.f16x2.f32 %r\d+), (%f\d+), (%f\d+)", r"\1, \3, \2"),
    ),
    "one row is stored for the next one": (TRANSPOSED, Edit("", r"(st.global.u16 \t\[%rd\d+)\+2(\], %rs2)", r"\1+0\2")),
}  # fmt: skip
# Changes after which a kernel does the same.
HARMLESS: dict[str, tuple[Edit, str]] = {
    "shares by 64 bits": (Edit("-4294967296", r"@%p\d+ bra \t\S+;", ""), "the quotient is the same in more bits"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", COVERED)
def test_a_kernel_that_adds_slices_is_certified_and_its_certificate_holds(name: str) -> None:
    prove_and_recheck(COVERED[name])


@pytest.mark.slow
@pytest.mark.one_in(9)
@pytest.mark.parametrize("fault", COMMON)
def test_a_fault_of_sums_is_refused(fault: str) -> None:
    assert reason_of_refusal(SUMS, edited_ptx(FAULTS[fault], SUMS))


@pytest.mark.slow
@pytest.mark.one_in(9)
@pytest.mark.parametrize("fault", FAULTS_HERE)
def test_a_fault_is_refused(fault: str) -> None:
    record, edit = FAULTS_HERE[fault]
    assert reason_of_refusal(record, edited_ptx(edit, record))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("change", HARMLESS)
def test_a_harmless_change_is_certified(change: str) -> None:
    assert not reason_of_refusal(SUMS, edited_ptx(HARMLESS[change][0], SUMS))
