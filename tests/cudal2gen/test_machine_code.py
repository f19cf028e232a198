"""Proves that kernels are right in machine code, by records that cover every branch of their templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from cudal2gen import results, validator
from cudal2gen.generation import compiler
from cudal2gen.generation.renderer import render
from cudal2gen.kernel import Record
from cudal2gen.validator import machine_code
from kernelproof.emulator import UnknownMachineCode
from tests.cudal2gen.covering import BRANCHES
from tests.cudal2gen.faulty import Faulty
from tests.cudal2gen.paths import PATHS, small, tensor
from tests.draws import THOROUGH, draw_part_by_key

# The families for Ampere, and their records that are judged.
AMPERE = ("sm80_multistage", "sm80_direct")
OF_AMPERE = {name: PATHS[name] for name in (PATHS if THOROUGH else BRANCHES) if PATHS[name].family in AMPERE}
# ``make test`` executes every branch of the templates, judges every fifteenth of these records completely, and
# executes every twentieth record of Hopper and Blackwell. ``make thorough`` takes all records.
JUDGED_STEP, NEWER_STEP = 15, 20
NEWER = draw_part_by_key(
    lambda name: PATHS[name].family, [name for name in PATHS if PATHS[name].family not in AMPERE], NEWER_STEP
)
# The statement of the text that allocates tensor memory.
ALLOCATE = "  if (warp == 2) {\n    allocate_columns(shared.columns());\n  }\n"


def allocating_in_a_branch(record: Record) -> Faulty:
    """A kernel, which is right, with the statement that allocates in an else branch."""
    text = render(record)
    start, end = text.index("  if (warp == 1 && elected)"), text.index(ALLOCATE) + len(ALLOCATE)
    before = text[start:end]
    branch = f"  }} else{ALLOCATE[1:-1]} else if (warp == 3"
    return Faulty(record, before, before.replace(ALLOCATE, "").replace("  }\n  if (warp == 3", branch))


ALLOCATING = {
    "alone": allocating_in_a_branch(tensor()),
    "in a pair": allocating_in_a_branch(tensor(pair=True, cluster=[2, 1])),
}
BUILT_AHEAD = [*(PATHS[name] for name in (*OF_AMPERE, *NEWER)), *ALLOCATING.values()]


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), list(enumerate(OF_AMPERE)), ids=OF_AMPERE)
def test_every_branch_is_right_in_machine_code(number: int, name: str, library: Path) -> None:
    record = PATHS[name]
    (artifact,) = compiler.build([record])
    if THOROUGH or number % JUDGED_STEP == 0:
        verdict = machine_code.judge(record, artifact, library)
        assert isinstance(verdict, results.Verdict)
        assert verdict.findings == []
        assert verdict.passed
        return
    _right_on_its_smallest_problem(record, library)


@pytest.mark.slow
@pytest.mark.parametrize("name", NEWER)
def test_newer_architectures_are_right_in_machine_code(name: str, library: Path) -> None:
    _right_on_its_smallest_problem(PATHS[name], library)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALLOCATING)
def test_an_allocation_is_read_wherever_ptxas_puts_its_parts(name: str, library: Path) -> None:
    """In a branch, one lane alone ends the warp's right to allocate."""
    allocating = ALLOCATING[name]
    shape = min(validator.stress_shapes(allocating.record), key=lambda shape: shape.m * shape.n * shape.k)
    case = validator.run_case(allocating.record, allocating.build(), library, shape, "integers", machine_code=True)[0]
    assert case.findings == ()


def _right_on_its_smallest_problem(record: Record, library: Path) -> None:
    """Checks a record's machine code on its smallest problem. Sums of small integers are exact, so PTX gives the same
    bits."""
    (artifact,) = compiler.build([record])
    shape = min(validator.stress_shapes(record), key=lambda shape: shape.m * shape.n * shape.k)
    case, _ = validator.run_case(record, artifact, library, shape, "integers", machine_code=True)
    assert case.findings == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single", "single f32"])
def test_inexact_sums_are_the_same_in_both_forms_as_a_gpu_rounds(name: str, library: Path) -> None:
    """The default model sums in an order that depends on how many MMAs are computed together, so it is not used
    here."""
    record = PATHS[name]
    (artifact,) = compiler.build([record])
    shape = max(validator.stress_shapes(record), key=lambda shape: shape.m * shape.n * shape.k)
    modes = validator.Modes(rounding="a100")
    of_ptx, of_code = (
        validator.run_case(record, artifact, library, shape, "normal", machine_code=form, **modes)[1].d.tobytes()
        for form in (False, True)
    )
    assert of_ptx == of_code


def test_a_verdict_is_of_the_cubin_that_is_there(library: Path, tmp_path: Path) -> None:
    record = small()
    (artifact,) = compiler.build([record])
    cubin = artifact.cubin.read_bytes()
    verdict = results.Verdict(
        record=record.name, digest=artifact.digest, on=results.IN_MACHINE_CODE, cases=(), counters={},
        machine_code=results.MachineCode.of(cubin),
    )  # fmt: skip
    stored = {(verdict.digest, verdict.on): verdict}
    assert machine_code.stored_verdict(artifact, stored) == verdict
    folder = tmp_path / artifact.digest
    folder.mkdir()
    (folder / "kernel.cubin").write_bytes(cubin[:-1] + bytes([cubin[-1] ^ 1]))
    assert machine_code.stored_verdict(compiler.Artifact(folder, artifact.ptxas), stored) is None


def test_machine_code_that_is_not_executed_has_no_verdict(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_arguments: object, **_options: object) -> None:
        raise UnknownMachineCode("not modelled")

    record = small()
    (artifact,) = compiler.build([record])
    monkeypatch.setattr(machine_code, "validate", refused)
    answer = machine_code.judge(record, artifact, library)
    assert answer == machine_code.Unexecuted(record.name, artifact.digest, "not modelled")
