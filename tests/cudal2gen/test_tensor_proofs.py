"""Proves that kernels with accumulators in tensor memory are certified, and refused with any fault in their PTX."""

from __future__ import annotations

import pytest

from cudal2gen.kernel import Record
from cudal2gen.validator.contracts import refusal
from kernelproof.emulator.frontend.mutate import Mutant, mutants
from tests.cudal2gen.paths import CLAIMED, PAIR, SWAPPED_TENSOR, TENSORS, WIDER_THAN_INSTRUCTION, tensor
from tests.cudal2gen.test_proofs import prove_and_recheck, ptx_of, reason_of_refusal
from tests.cudal2gen.test_wgmma_proofs import Edit
from tests.draws import THOROUGH

# Kernels that get faults: of one CTA, of a pair, and of a row of two CTAs; the last two with slices of k.
PLAIN = tensor()
# Kernels of a pair of CTAs, of a cluster along n, and of two slices of k without and with that cluster.
TWO = tensor(**PAIR)
ROW = tensor(cluster=[1, 2])
SPLIT, ROW_SPLIT = tensor(split_k=2), tensor(cluster=[1, 2], split_k=2)
COVERED: dict[str, Record] = {
    "pairs": TWO,
    "f32": PLAIN,
    "B across k, f16": TENSORS["tensor nn, narrow boxes"],
    "one tile of accumulators": TENSORS["tensor single accumulators"],
    "a row of two": ROW,
    "clusters of four, f16": TENSORS["tensor 2x2 f16"],
    "pairs, B across k, f16": TENSORS["tensor pair nn f16"],
    "pairs, two instructions wide": tensor(**PAIR, **WIDER_THAN_INSTRUCTION, bn=512),
    "two pairs": tensor(pair=True, cluster=[2, 2], bn=64),
    "operands swapped": TENSORS["tensor swapped nn"],
    "operands swapped, pairs": tensor(**SWAPPED_TENSOR | {"bm": 64}, pair=True, cluster=[1, 2]),
    "slices of k": SPLIT,
    "slices of k, a row of two": ROW_SPLIT,
    "slices of k, pairs, operands swapped, f16": tensor(
        **SWAPPED_TENSOR | {"bm": 64}, pair=True, cluster=[1, 2], split_k=4, acc="f16"
    ),
}
NOT_COVERED: dict[str, Record] = {
    "claimed tiles": tensor(**CLAIMED),
    "the last wave is shared out": tensor(stream_k=True),
    "slices of k in clusters of four": tensor(cluster=[2, 2], split_k=2),
    "stored directly": tensor(epilogue="direct"),
    "D of fp32": TENSORS["tensor d"],
    "fused": tensor(fusion="bias_n"),
}
BUILT_AHEAD = [*COVERED.values()] if THOROUGH else [TWO, PLAIN]  # the others are not drawn

TRY_WAIT = r"mbarrier\.try_wait\.parity\.shared::cta\.b64 p, (\[%r\d+\]), (%r\d+);"
NO_WAIT = r"setp.eq.u32 p, \2, \2;"
# Indices of waits in the text: the producer's, the multiplier's for accumulators and for a k-tile, the group's.
PRODUCER, ACCUMULATORS, STAGE, SUMS = range(4)
# Patterns of PTX in which faults are.
AFTER = r"tcgen05\.fence::after_thread_sync;"
COMMIT = r"tcgen05\.commit\.[^;]*;"
MMA = r"(tcgen05\.mma\.[^;\[]*\[%r\d+\], )(%rd\d+), (%rd\d+)(, %r\d+, p;)"
FORM, OTHER = r"(mov\.b32 \s*%r\d+, )134742032;", r"\g<1>{};"  # the descriptor of an instruction, and another one
MODE = "4611756662049472512"  # a descriptor's high word: swizzle of 128 bytes, 1024 from 8 rows to the next
PTX_LD = r"tcgen05\.ld\.sync\.aligned\.[^;]*;"
# A parity that is toggled, and the test whether the next stage or place is the first again.
TOGGLE = r"xor\.b32 \s*(%r\d+), \1, %r\d+;"
NEXT = r"(add\.s32 \s*(%r\d+), %r\d+, 1;\s*setp\.eq\.s32 \s*%p\d+, \2, )"
FAULTS: dict[str, Edit] = {
    # mbarriers and phases.
    "the producer does not wait": Edit(TRY_WAIT, NO_WAIT, PRODUCER, PLAIN),
    "accumulators are not waited for": Edit(TRY_WAIT, NO_WAIT, ACCUMULATORS, PLAIN),
    "a k-tile is not waited for": Edit(TRY_WAIT, NO_WAIT, STAGE, PLAIN),
    "sums are not waited for": Edit(TRY_WAIT, NO_WAIT, SUMS, PLAIN),
    "the producer's parity stays": Edit(TOGGLE, "", 0, PLAIN),
    "the multiplier's parity of stages stays": Edit(TOGGLE, "", 1, PLAIN),
    "the multiplier's parity of accumulators stays": Edit(TOGGLE, "", 2, PLAIN),
    "the group's parity stays": Edit(TOGGLE, "", 3, PLAIN),
    "the multiplier has a fourth stage": Edit(rf"{NEXT}3;", r"\g<1>4;", 1, PLAIN),
    "the multiplier has three places of accumulators": Edit(rf"{NEXT}2;", r"\g<1>3;", 0, PLAIN),
    "the group has three places of accumulators": Edit(rf"{NEXT}2;", r"\g<1>3;", 1, PLAIN),
    "a stage is handed back before its products": Edit(rf"(tcgen05\.mma.*)({COMMIT})", r"\2\n\1", 0, PLAIN),
    "a stage is not handed back": Edit(COMMIT, "", 0, PLAIN),
    "the sums are not committed": Edit(COMMIT, "", 1, PLAIN),
    "accumulators are not handed back": Edit(r"mbarrier\.arrive\.shared::cta\.b64 _, [^;]*;", "", 0, PLAIN),
    "an mbarrier of accumulators expects five arrivals": Edit(r"(mov\.b32 \s*%r\d+, )4;", r"\g<1>5;", 0, PLAIN),
    # Fences.
    "no fence after the wait for a k-tile": Edit(AFTER, "", 1, PLAIN),
    "no fence after the wait for sums": Edit(AFTER, "", 2, PLAIN),
    "no fence before columns are freed": Edit(AFTER, "", 3, PLAIN),
    "no fence before accumulators are handed back": Edit(r"tcgen05\.fence::before_thread_sync;", "", 0, PLAIN),
    # Products and their descriptors.
    "products lie beyond the columns": Edit(
        r"(shl\.b32 \s*%r\d+, %r\d+, )5;(?=\s*add\.s32 [^;]*;\s*mov\.b32 \s*%r\d+, 0;)", r"\g<1>6;", 0, PLAIN,
    ),
    "each k-tile begins with zeros": Edit(r"setp\.ne\.b32 p, %r\d+, 0;", "setp.ne.b32 p, 0, 0;", 0, PLAIN),
    "the first k-tile is added to what is there": Edit(r"setp\.ne\.b32 p, %r\d+, 0;", "setp.eq.b32 p, 0, 0;", 0, PLAIN),
    "products of k are lost": Edit(r"setp\.ne\.b32 p, %r\d+, 0;", "setp.ne.b32 p, 0, 0;", 2, PLAIN),
    "a product is missing": Edit(MMA, "", 2, PLAIN),
    "a product is added twice": Edit(MMA, r"\g<0>\n\g<0>", 1, PLAIN),
    "operands are exchanged": Edit(MMA, r"\1\3, \2\4", 1, PLAIN),
    "a swizzle of 64 bytes": Edit(MODE, str(int(MODE) ^ 6 << 61), 0, PLAIN),
    "rows of B are 512 bytes apart": Edit(MODE, str(int(MODE) ^ 0x60 << 32), 1, PLAIN),
    "a swizzle with another base": Edit(MODE, str(int(MODE) | 1 << 49), 0, PLAIN),
    "bits 46 to 48 are those of wgmma": Edit(MODE, str(int(MODE) ^ 1 << 46), 0, PLAIN),
    "A's block of k is another one": Edit(r"(add\.s32 \s*%r\d+, %r\d+, )2;(?=\s*cvt\.u64)", r"\g<1>4;", 0, PLAIN),
    "B's block of k is another one": Edit(r"(add\.s32 \s*%r\d+, %r\d+, )2;(?=\s*cvt\.u64)", r"\g<1>4;", 1, PLAIN),
    "stages are 16 bytes too close": Edit(r"(mul\.lo\.s32 \s*%r\d+, %r\d+, )1280;", r"\g<1>1279;", 0, PLAIN),
    "an instruction of 16 columns": Edit(FORM, OTHER.format(134742032 - (2 << 17)), 0, PLAIN),
    "an instruction of 64 rows": Edit(FORM, OTHER.format(134742032 - (4 << 24)), 0, PLAIN),
    "an instruction of bf16": Edit(FORM, OTHER.format(134742032 | 9 << 7), 0, PLAIN),
    "an instruction that negates A": Edit(FORM, OTHER.format(134742032 | 1 << 13), 0, PLAIN),
    # Tensor memory.
    "half of the columns are allocated": Edit(r"(tcgen05\.alloc[^;]*, )64;", r"\g<1>32;", 0, PLAIN),
    "half of the columns are freed": Edit(r"(tcgen05\.dealloc[^;]*, )64;", r"\g<1>32;", 0, PLAIN),
    "columns are not freed": Edit(r"tcgen05\.dealloc[^;]*;", "", 0, PLAIN),
    "another warp frees the columns": Edit(
        r"not\.pred( \s*%p\d+, %p\d+;\s*@%p\d+ bra[^;]*;\s*tcgen05\.fence)", r"mov.pred\1", 0, PLAIN,
    ),
    "a warp loads from lanes of another one": Edit(r"(shl\.b32 \s*%r\d+, %r\d+, )21;", r"\g<1>22;", 0, PLAIN),
    "rows from 16 on are those from 0 on": Edit(r"(add\.s32 \s*%r\d+, %r\d+, )1048576;", r"\g<1>0;", 0, PLAIN),
    "loads are not waited for": Edit(r"tcgen05\.wait::ld\.sync\.aligned;", "", 0, PLAIN),
    "loads are waited for before they begin": Edit(
        rf"({PTX_LD})(\s*tcgen05\.wait::ld\.sync\.aligned;)", r"\2\1", 0, PLAIN,
    ),
    "a load of another shape": Edit(r"16x256b\.x4", "16x128b.x8", 0, PLAIN),
    # Pairs and clusters.
    "the second CTA expects bytes itself": Edit(r"(and\.b32 \s*%r\d+, %r\d+, )-16777217;", r"\g<1>-1;", 0, TWO),
    "only the own CTA's bytes are expected": Edit(r"(mov\.b32 \s*(%r\d+), )36864;", r"\g<1>18432;", 0, TWO),
    "a pair's commit arrives in the first CTA alone": Edit(r"(mov\.b16 \s*%rs\d+, )3;", r"\g<1>1;", 0, TWO),
    "the second CTA multiplies too": Edit(r"and\.b32( \s*%r\d+, %r\d+, )1;", r"and.b32\g<1>0;", 0, TWO),
    "a multiplier may end too early": Edit(TRY_WAIT, NO_WAIT, 4, TWO),
    "an instruction of one CTA": Edit(r"tcgen05\.commit\.cta_group::2", "tcgen05.commit.cta_group::1", 0, TWO),
    "CTAs do not wait for each other to begin": Edit(
        r"barrier\.cluster\.arrive[^;]*;\s*barrier\.cluster\.wait[^;]*;(?=\s*bar)", "", 0, TWO,
    ),
    "CTAs do not wait for each other in the end": Edit(r"barrier\.cluster\.(arrive|wait)[^;]*;(?=\s*not)", "", 0, TWO),
    "a stage is handed back to the own CTA alone": Edit(r"(tcgen05\.commit[^;]*), %rs\d+;", r"\1, 1;", 0, ROW),
}  # fmt: skip
# A pattern of a branch by either of two conditions, where {} stands for the instruction after it; and the same branch
# by the first condition alone.
BEYOND, ROWS_ALONE = r"or\.pred( \s*%p\d+, )(%p\d+), %p\d+;(?=\s*@%p\d+ bra[^;]*;\s*{})", r"or.pred\1\2, \2;"
SLICE_FAULTS: dict[str, Edit] = {
    "sums of a tile beyond D are stored": Edit(BEYOND.format(r"sub\.s32"), ROWS_ALONE, 0, ROW_SPLIT),
    "a tile beyond D is waited for": Edit(BEYOND.format(r"setp\.ne\.s32"), ROWS_ALONE, 0, ROW_SPLIT),
    "slabs of a tile overlap": Edit(r"(mul\.wide\.s32 \s*%rd\d+, %r\d+, )32768;", r"\g<1>16384;", 0, ROW_SPLIT),
    "another tile is counted": Edit(
        r"(mul\.wide\.s32 \s*%rd\d+, %r\d+, )4;(?=[^;]*;\s*red\.)", r"\g<1>8;", 0, ROW_SPLIT,
    ),
    "a group does not meet before it counts": Edit(r"bar\.sync %r\d+, 128;", "", 0, ROW_SPLIT),
    "an item is counted without release": Edit(r"red\.release", "red.relaxed", 0, ROW_SPLIT),
    "one part of a tile is waited for": Edit(r"(and\.b32 \s*%r\d+, %r\d+, )65534;", r"\g<1>65535;", 0, ROW_SPLIT),
    "accumulators are handed back before their sums are loaded": Edit(
        rf"({PTX_LD}.*?wait::ld\.sync\.aligned;)(.*?)(mbarrier\.arrive\.shared::cta[^;]*;)", r"\3\1\2", 0, ROW_SPLIT,
    ),
}  # fmt: skip
HARMLESS: dict[str, tuple[Edit, str]] = {
    "no fence after the wait for accumulators": (
        Edit(AFTER, "", 0, PLAIN), "the one behind the next wait, for a k-tile, comes before all products, too",
    ),
    "no fence after all items": (
        Edit(r"tcgen05\.fence::before_thread_sync;", "", 1, PLAIN),
        "loads were ordered before what follows when the last accumulators were handed back",
    ),
    "products after the first are added to what is there": (
        Edit(r"setp\.ne\.b32 p, (%r\d+), 0;", r"setp.eq.b32 p, \1, \1;", 1, PLAIN), "they are in any case",
    ),
}  # fmt: skip
# Kinds of mechanical changes that leave a kernel right wherever they are certified: the instruction changes its place
# with one that does not depend on it, a policy of the cache is another number, a CTA beyond the last tile is not
# launched, and products behind the first of an item are added in any case.
HARMLESS_KINDS = frozenset(("swap", "nudge", "compare", "keep"))


def _changes() -> list[Mutant]:
    """Of the mechanical changes of a text, the first of each kind and instruction."""
    changes: dict[tuple[str, ...], Mutant] = {}
    for each in mutants(ptx_of(PLAIN), arithmetic=True):
        changes.setdefault(tuple(each.name.split()[:2]), each)
    return [each for each in changes.values() if each.kind not in HARMLESS_KINDS]


@pytest.mark.slow
@pytest.mark.one_in(14)
@pytest.mark.parametrize("name", COVERED)
def test_a_covered_kernel_is_certified_and_its_certificate_holds(name: str) -> None:
    prove_and_recheck(COVERED[name])


@pytest.mark.parametrize("name", NOT_COVERED)
def test_what_is_not_covered_is_refused(name: str) -> None:
    assert refusal(NOT_COVERED[name])


@pytest.mark.slow
@pytest.mark.one_in(8)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused(fault: str) -> None:
    assert FAULTS[fault].refusal()


@pytest.mark.thorough
@pytest.mark.parametrize("fault", SLICE_FAULTS)
def test_a_fault_with_slices_of_k_is_refused(fault: str) -> None:
    assert SLICE_FAULTS[fault].refusal()


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_change_is_certified(name: str) -> None:
    edit, _why = HARMLESS[name]
    assert not edit.refusal()


@pytest.mark.thorough
def test_mechanical_changes_are_refused_unless_their_kind_is_harmless() -> None:
    certified = [each.name for each in _changes() if not reason_of_refusal(PLAIN, each.text)]
    # A fence behind the wait for a k-tile makes up for the one behind the wait for accumulators.
    assert [name.split(" at ")[0] for name in certified] == ["drop tcgen05.fence::after_thread_sync"]
