"""Proves that kernels whose producer loads by TMA are certified, and refused with any planted fault."""

from __future__ import annotations

import json
from functools import partial

import pytest

from cudal2gen.generation import compiler
from cudal2gen.kernel import Record
from cudal2gen.validator import proofs
from cudal2gen.validator.contracts import claims, problems, refusal
from kernelproof.certificates import Certificate, NotCertified, prove
from kernelproof.emulator import mutants
from tests.cudal2gen.constants import changed_constants
from tests.cudal2gen.faulty import Faulty
from tests.cudal2gen.mutation import equivalence, survivors
from tests.cudal2gen.paths import PATHS, warps
from tests.cudal2gen.test_proofs import prove_and_recheck, ptx_of, reason_of_refusal
from tests.draws import draw_few_by_key

# One consumer, and two consumers that take turns with tiles.
SMALL = warps(bm=64, bn=32, stages=2)
TURNS = warps(bm=64, bn=32, stages=2, consumers=2, schedule="pingpong")
COVERED: dict[str, Record] = {
    "cooperative": SMALL,
    "in turns": TURNS,
    "two consumers, setmaxnreg": PATHS["warps two consumers"],
    "rows of two boxes of D, f16": warps(bn=96, stages=2, acc="f16"),
    "nn": PATHS["warps nn"],
}
# Paths whose kernels no contract describes.
NOT_COVERED = [
    "warps direct, any n",
    "warps swapped",
    "warps d",
    "warps workspace swapped",
    "warps stream",
    "warps fused bf16",
]

# By fault: the record, a part of its CUDA text, and the text that replaces the part. The first four faults show only in
# the third round of the ring, for one length of k or in large problems, so an execution may miss them.
WAIT_FULL = "wait(shared.full(place.stage), place.parity);"
FAULTS: dict[str, tuple[Record, str, str]] = {
    "a phase is wrong in the third round": (
        SMALL, "parity ^= 1;\n    }\n  }\n\n  CUTE_DEVICE void advance(int",
        "parity ^= ++rounds != 3;\n    }\n  }\n  int rounds = 0;\n  CUTE_DEVICE void advance(int",
    ),
    "a stage is skipped in its third round": (
        SMALL, "  CUTE_DEVICE void advance() {\n    if (++stage == kStages) {",
        "  int rounds = 0;\n  CUTE_DEVICE void advance() {\n    if (++rounds == 3 * kStages) ++stage;\n"
        "    if (++stage >= kStages) {",
    ),
    "the last k-tile beyond the ring is not loaded": (
        SMALL, "for (int step = work.first; step < work.last; ++step) {\n      const uint32_t stage",
        "for (int step = work.first; step < work.last - (work.last == kStages + 1); ++step) {\n      const uint32_t "
        "stage",
    ),
    "rows of tiles overflow 16 bits": (
        SMALL, "(cluster_m * kClusterM + int(rank % kClusterM)) * kBM",
        "int16_t((cluster_m * kClusterM + int(rank % kClusterM)) * kBM)",
    ),
    "too few bytes are expected": (SMALL, "expect_bytes(full, kStageBytes);", "expect_bytes(full, kStageBytes - 128);"),
    "too many bytes are expected": (SMALL, "expect_bytes(full, kStageBytes);", "expect_bytes(full, kStageBytes + 16);"),
    "the producer does not wait": (SMALL, "wait(shared.empty(place.stage), place.parity ^ 1);", ""),
    "the producer waits for the other phase": (SMALL, "place.parity ^ 1);", "place.parity);"),
    "consumers do not wait": (SMALL, WAIT_FULL, ""),
    "consumers wait for the other phase": (SMALL, WAIT_FULL, "wait(shared.full(place.stage), place.parity ^ 1);"),
    "consumers wait for the stage before": (
        SMALL, WAIT_FULL, "wait(shared.full((place.stage + kStages - 1) % kStages), place.parity);",
    ),
    "a stage is handed back before it is read": (
        SMALL, WAIT_FULL, WAIT_FULL + " __syncwarp(); release(empty, place.stage);",
    ),
    "a wait is tried once": (SMALL, "} while (!over);", "} while (false);"),
    "stages are handed back by all lanes": (
        SMALL, "return threadIdx.x % 32 == 0 ? shared.empty(0) : 0;", "return shared.empty(0);",
    ),
    "an arrival of a warp is missing": (SMALL, "kSharers * 4);", "kSharers * 4 + 1);"),
    "an arrival too few is expected": (SMALL, "kSharers * 4);", "kSharers * 4 - 1);"),
    "mbarriers are not published": (SMALL, 'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");', ""),
    "no fence of the asynchronous proxy": (
        SMALL, 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', "",
    ),
    "the fence is after the warp's barrier": (
        SMALL, 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");\n    __syncwarp();',
        '__syncwarp();\n    if (leader) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");',
    ),
    "buffers are written while they are read": (SMALL, "cp.async.bulk.wait_group.read %0;", "// %0"),
    "a CTA ends before its stores have read": (
        SMALL, "  wait_for_stores<0>();  // they must have read shared memory before the CTA exits", "",
    ),
    "the kernel before is not waited for": (SMALL, 'asm volatile("griddepcontrol.wait;" ::: "memory");', ""),
    "columns of the tile beside": (
        SMALL, "at_across = first + in_band - at_along * width.number",
        "at_across = first + (in_band + 1) % width.number",
    ),
    "a whole band is taken for the last one": (
        SMALL, "bands.across - first < bands.width.number", "bands.across - first <= bands.width.number",
    ),
    "the last band is divided by the width of others": (
        SMALL, "? bands.last_width : bands.width;", "? bands.width : bands.width;",
    ),
    "a quotient is one too small": (SMALL, "__umulhi(dividend + 1, multiplier)", "__umulhi(dividend, multiplier)"),
    "a quotient is twice as large": (SMALL, "multiplier) >> shift;", "multiplier) >> (shift ? shift - 1 : 0);"),
    "bands are told apart by their width": (SMALL, "bands.tiles.quotient(tile)", "bands.width.quotient(tile)"),
    "k begins one column later": (SMALL, "work.row, step * kBK,", "work.row, step * kBK + 1,"),
    "a swizzle of another row": (SMALL, "(lane / 16 ^ lane % 8) * 16", "(lane / 16 ^ lane % 4) * 16"),
    "a CTA takes each second item": (SMALL, "item += gridDim.x / kClusterCtas", "item += 2 * gridDim.x / kClusterCtas"),
    "a turn is not waited for": (TURNS, "wait(shared.order(warpgroup), parity);", ""),
    "a turn has the other parity": (TURNS, "uint32_t parity = warpgroup ^ 1;", "uint32_t parity = warpgroup;"),
    "a turn's parity does not change": (TURNS, "    parity ^= 1;\n", ""),
    "a turn is handed to the own warpgroup": (
        TURNS, "shared.order(2 - threadIdx.x / 128)", "shared.order(threadIdx.x / 128 - 1)",
    ),
    "the k-tiles of the other warpgroup are not passed": (TURNS, "place.advance(work.last - work.first);", ""),
    "the k-tiles of the other warpgroup are counted by the ring": (
        TURNS, "parity ^= (stage + steps) / kStages & 1;", "parity ^= steps / kStages & 1;",
    ),
    "both warpgroups take an item": (TURNS, "const bool mine = turn == warpgroup;", "const bool mine = true;"),
}  # fmt: skip
FAULTY = {fault: Faulty(*text) for fault, text in FAULTS.items()}
BUILT_AHEAD = [*COVERED.values(), *FAULTY.values()]


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", COVERED)
def test_a_covered_kernel_is_certified_and_its_certificate_holds(name: str) -> None:
    prove_and_recheck(COVERED[name])


@pytest.mark.parametrize("name", NOT_COVERED)
def test_what_is_not_covered_is_refused(name: str) -> None:
    assert refusal(PATHS[name])


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTY)
def test_a_fault_is_refused(fault: str) -> None:
    assert reason_of_refusal(FAULTS[fault][0], ptx_of(FAULTY[fault]))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("record", [SMALL, TURNS], ids=["cooperative", "in turns"])
def test_a_changed_text_is_refused_or_harmless(record: Record) -> None:
    """Changes are of waits, barriers, fences, predicates, phases, bytes, boxes, and constants of addresses, swizzles
    and stages."""
    (artifact,) = compiler.build([record])
    ptx = artifact.ptx.read_text()
    changed = [*mutants(ptx, arithmetic=True), *changed_constants(ptx)]
    few = draw_few_by_key(lambda mutant: (mutant.kind, mutant.name.split()[1]), changed, 1)
    certified = [mutant for mutant in few if not reason_of_refusal(record, mutant.text)]
    assert len(certified) < len(few) / 2, "most changes are faults"
    unexplained = [x for x in certified if x.kind.startswith("constant") or not equivalence(record, x, ptx)]
    executed = list(survivors(record, artifact, compiler.launcher(), unexplained))
    assert executed == unexplained, "what is certified has no finding in any execution"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["drop", "skip", "once", "parity", "bytes", "count"])
def test_a_changed_wait_barrier_or_fence_is_refused(kind: str) -> None:
    """Every wait, barrier or fence of one kind in the text is changed."""
    changed = [mutant for mutant in mutants(ptx_of(SMALL)) if mutant.kind == kind]
    assert changed
    assert not [mutant.name for mutant in draw_few_by_key(lambda x: x.name.split()[1], changed, 2)
                if not reason_of_refusal(SMALL, mutant.text)]  # fmt: skip


@pytest.mark.slow
def test_an_edited_invariant_does_not_hold() -> None:
    """An edit changes a step in the last role's ``words`` or ``kinds``, or removes all roles."""
    ptx = ptx_of(SMALL)
    certificate = prove(ptx, partial(claims, SMALL), problems(SMALL))
    for change in ("words", "kinds", "none"):
        edited = json.loads(certificate.model_dump_json())
        roles = edited["claims"][0]["roles"]
        if change == "none":
            edited["claims"][0]["roles"] = []
        else:
            steps = roles[-1][change]
            name = next(iter(steps))
            steps[name] = {x: step + 1 for x, step in steps[name].items()} if change == "words" else steps[name] + 16
        with pytest.raises(NotCertified):
            proofs.recheck(Certificate.model_validate_json(json.dumps(edited)), SMALL, ptx)
