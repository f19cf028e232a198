"""Proves that every covered path of the templates is certified, and that a kernel with a fault never is."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from cudal2gen.generation import compiler
from cudal2gen.generation.compiler import Artifact
from cudal2gen.kernel import Record
from cudal2gen.validator import proofs
from cudal2gen.validator.contracts import claims, problems, refusal
from kernelproof.certificates import Certificate, NotCertified, prove
from kernelproof.emulator import mutants
from tests.cudal2gen.constants import changed_constants
from tests.cudal2gen.faulty import Faulty
from tests.cudal2gen.mutation import equivalence, survivors
from tests.cudal2gen.paths import PATHS, small
from tests.cudal2gen.strategies import TO_GLOBAL, prefetch
from tests.draws import draw_few_by_key, draw_part

# The paths of the templates, and records whose loops compilers change: they take two k-tiles in an iteration, or count
# tiles by a multiplication.
KERNELS: dict[str, Record] = PATHS | {
    "unrolled": small(bk=32, stages=2, mma_repeat=[2, 2, 1], smem_swizzle=[2, 3, 3], **prefetch("single_intra_tile")),
    "persistent bn 96": small(bm=64, bn=96, m=128, n=192, raster="persistent"),
    "f32": small(acc="f32"),
    "three warps": small(bn=96, n=192, mma_repeat=[1, 3, 1], g2s_cols=8),
    "split in three": small(split_k=3),
    "split zsplit": small(split_k=2, raster="zsplit", swizzle_stride=32, acc="f32"),
    "batched": small(batch="strided"),
    "batched d nn": small(batch="strided", acc="f32", d="f32", layout="nn", **TO_GLOBAL),
}
# Kernels that are certified, with every prefetch kind, epilogue, raster and layout for which certificates exist.
COVERED = [
    "single", "single one stage", "single_intra_tile", "none bk 16", "none one stage", "multi", "pingpong", "staggered",
    "nn f32 global", "staged with 16 bytes", "direct", "zsplit", "persistent", "small direct", "unrolled",
    "persistent bn 96", "f32", "batched", "batched d nn", "three warps", "split_k", "split in three", "split zsplit",
    "small direct split_k", "nt", "tt unrolled",
]  # fmt: skip
# Kernels for which there is no certificate.
NOT_COVERED = [
    "predicate", "multistage d split persistent", "batched zsplit split", "once d split",
]  # fmt: skip
# Twelve of the covered kernels, with every family, prefetch, raster and epilogue. Their texts are changed.
MUTATED = [
    "single", "single one stage", "single_intra_tile", "none one stage", "multi", "pingpong", "nn f32 global", "direct",
    "zsplit", "small direct", "unrolled", "split_k",
]  # fmt: skip

# Faults that small problems or few k-tiles do not show: the text, and its replacement.
HIDDEN = {
    "a product of 32 bits for the row of D": ("int64_t(row) * gemm.ldd", "row * gemm.ldd"),
    "a stage of the ring is skipped in its third round": (
        "write = write + 1 == kStages ? 0 : write + 1;",
        "write = copied == 3 * kStages ? write : write + 1 == kStages ? 0 : write + 1;",
    ),
    "a k-tile more than stages, in odd rows of tiles": (
        "copied < tiles",
        "copied < tiles - (tiles == kStages + 1 && tile_m % 2)",
    ),
}
FAULTY = {fault: Faulty(PATHS["single"], *text) for fault, text in HIDDEN.items()}
BUILT_AHEAD = [*(KERNELS[name] for name in COVERED), *FAULTY.values()]


def ptx_of(record: Record | Faulty) -> str:
    """The PTX of a record, or of a record with a fault."""
    artifact = record.build() if isinstance(record, Faulty) else compiler.build([record])[0]
    return artifact.ptx.read_text()


def prove_and_recheck(record: Record) -> None:
    """Proves a record's kernel, and checks the certificate after writing and reading it."""
    ptx = ptx_of(record)
    certificate = prove(ptx, partial(claims, record), problems(record))
    proofs.recheck(Certificate.model_validate_json(certificate.model_dump_json()), record, ptx)


def reason_of_refusal(record: Record, ptx: str) -> str:
    """Why a text is not certified; empty if it is."""
    try:
        prove(ptx, partial(claims, record))
    except NotCertified as error:
        return str(error)
    return ""


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", COVERED)
def test_a_covered_kernel_is_certified_and_its_certificate_holds(name: str) -> None:
    prove_and_recheck(KERNELS[name])


@pytest.mark.parametrize("name", NOT_COVERED)
def test_what_is_not_covered_is_refused(name: str) -> None:
    assert refusal(PATHS[name])


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTY)
def test_a_fault_that_executions_miss_is_refused(fault: str) -> None:
    assert reason_of_refusal(PATHS["single"], ptx_of(FAULTY[fault]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("cvt.rn.f16x2.f32", "cvt.rn.relu.f16x2.f32"),
        ("cvt.rn.f16x2.f32", "cvt.rz.f16x2.f32"),
        ("cvt.rn.f16x2.f32", "cvt.rn.bf16x2.f32"),
        ("f32.f16.f16.f32", "f32.bf16.bf16.f32"),
    ],
)
def test_numbers_of_another_type_or_rounding_are_refused(before: str, after: str) -> None:
    record = KERNELS["f32"]
    ptx = ptx_of(record)
    assert before in ptx
    assert reason_of_refusal(record, ptx.replace(before, after))


@pytest.mark.slow
def test_an_overflow_comes_with_a_problem() -> None:
    with pytest.raises(NotCertified) as error:
        prove(ptx_of(FAULTY["a product of 32 bits for the row of D"]), partial(claims, PATHS["single"]))
    # Only an offset beyond 32 bits overflows, so the problem that the proof names has many rows.
    assert error.value.extents["D"][0] > 1 << 7


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATED)
def test_a_changed_text_is_refused_or_harmless(name: str) -> None:
    """Changes are of waits, barriers, fences, predicates, accesses, products, and constants of addresses, swizzles and
    stages."""
    record = KERNELS[name]
    (artifact,) = compiler.build([record])
    ptx = artifact.ptx.read_text()
    changed = [*mutants(ptx, arithmetic=True), *changed_constants(ptx)]
    few = draw_few_by_key(lambda mutant: mutant.kind, changed, 1)
    certified = [mutant for mutant in few if not reason_of_refusal(record, mutant.text)]
    assert len(certified) < len(few) / 2, "most changes are faults"
    unexplained = [x for x in certified if x.kind.startswith("constant") or not equivalence(record, x, ptx)]
    executed = list(survivors(record, artifact, compiler.launcher(), unexplained))
    assert executed == unexplained, "what is certified has no finding in any execution"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shift-source", "drop bar.sync"])
def test_a_failed_proof_is_confirmed_by_an_execution(kind: str, tmp_path: Path) -> None:
    """A copy that reads past its row fails at sizes that the proof names. A missing barrier fails at some of the
    validator's sizes."""
    record = PATHS["single"]
    (artifact,) = compiler.build([record])
    directory = shutil.copytree(artifact.directory, tmp_path / artifact.digest)
    faulty = Artifact(directory, artifact.ptxas)
    faulty.ptx.write_text(next(x.text for x in mutants(artifact.ptx.read_text()) if x.name.startswith(kind)))
    proof, certified = proofs.prove(record, faulty, compiler.launcher())
    assert (proof.outcome, certified) == ("refuted", None)
    assert "executed" in proof.executed
    assert proof.why


@pytest.mark.slow
def test_every_step_of_adding_slices_is_needed() -> None:
    """A kernel adds slices of k by fences, barriers, and accesses to the counter and the partial sums. Every third
    change of these steps is tried: the proof refuses it, or it is harmless."""
    record = PATHS["split_k"]
    (artifact,) = compiler.build([record])
    ptx = artifact.ptx.read_text()
    lines = ptx.splitlines()
    first = next(number for number, line in enumerate(lines, 1) if "st.global.v2.f32" in line)
    steps = ("fence.acq_rel", "atom", "bar.sync", "st.global.v2", "ld.global.cg", "st.shared.u8", "ld.shared.u8", "@%p")
    changed = [x for x in mutants(ptx) if x.line >= first and any(step in lines[x.line - 1] for step in steps)]
    assert len(changed) > 60
    certified = [mutant for mutant in draw_part(changed, 3) if not reason_of_refusal(record, mutant.text)]
    for mutant in certified:
        swapped_with = mutant.text.splitlines()[mutant.line - 1]
        harmless = mutant.kind == "swap" and not any(step in swapped_with for step in steps)
        assert harmless or equivalence(record, mutant, ptx), mutant.name


@pytest.mark.slow
def test_a_certificate_of_another_text_or_invariant_does_not_hold() -> None:
    record = PATHS["single"]
    ptx = ptx_of(record)
    certificate = prove(ptx, partial(claims, record), problems(record))
    with pytest.raises(NotCertified, match="other problems"):
        proofs.recheck(certificate.model_copy(update={"problems": ()}), record, ptx)
    changed = json.loads(certificate.model_dump_json())
    words = changed["claims"][0]["invariant"]["words"]
    register = next(iter(words))
    words[register] = {name: step + 2 for name, step in words[register].items()}
    with pytest.raises(NotCertified):
        proofs.recheck(Certificate.model_validate_json(json.dumps(changed)), record, ptx)
    with pytest.raises(NotCertified, match="another text"):
        proofs.recheck(certificate, record, ptx + "\n")
    without = json.loads(certificate.model_dump_json())
    without["claims"][0]["invariant"] = None
    with pytest.raises(NotCertified, match="lacks"):
        proofs.recheck(Certificate.model_validate_json(json.dumps(without)), record, ptx)
