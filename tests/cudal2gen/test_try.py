"""Proves that ``try`` reads the values of a grid, makes one kernel per record and a row per outcome, resumes, and
alternates timings.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudal2gen import places, results, validator
from cudal2gen.bench import grid
from cudal2gen.cli import spellings
from cudal2gen.generation import catalog, compiler
from cudal2gen.generation.compiler import BuildError
from cudal2gen.kernel import Problem, Record, fieldset, parse
from cudal2gen.results import Case, Timing, Verdict
from kernelproof.ground.errors import WrongInput
from kernelproof.ground.workers import Lost
from tests import commands
from tests.cudal2gen.rehearsal import LAUNCH_US

# The problem, its record in the catalog, and the values of a grid around it.
PROBLEM = Problem(gpu="h200", acc="f32", layout="tn", m=256, n=1024, k=256)
START = catalog.find(PROBLEM).record
CHOICES = {"bn": (32, 64), "stages": (2, 4)}
BUILT_AHEAD = [candidate.record for candidate in grid.fit(START, CHOICES).candidates]


def run_try(*arguments: str, mnk: str = PROBLEM.mnk, **environment: object) -> subprocess.CompletedProcess[str]:
    """Runs ``cudal2gen try`` for an H200 with fp32 sums; ``environment`` adds variables."""
    variables = {name: str(value) for name, value in environment.items()}
    return commands.run("try", "--gpu", "h200", "--acc", "f32", "--mnk", mnk, *arguments, env=variables)


@pytest.fixture(scope="module")
def judged_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of results with the emulator's verdicts of CHOICES."""
    folder = tmp_path_factory.mktemp("judged")
    rows = grid.judged(grid.built(grid.fit(START, CHOICES).candidates), store=folder / "verdicts.jsonl")
    assert all(row.right for row in rows)
    return folder


@pytest.fixture
def own_catalog(tmp_path: Path) -> Path:
    """A copy of the shipped catalog."""
    return Path(shutil.copy(places.shipped("configs") / "kernels.jsonl", tmp_path))


def verdict(record: Record, digest: str, *findings: str) -> Verdict:
    """A verdict of one case with these findings."""
    case = Case(
        m=1, n=1, k=1, swizzle_stride=None, inputs="normal", compared="equality", max_error=0.0, allowed=None, ctas=1,
        findings=findings,
    )  # fmt: skip
    return Verdict(record=record.name, digest=digest, on="emulator", cases=(case,), counters={})


@st.composite
def spelled_values(draw: st.DrawFn) -> tuple[str, list[int]]:
    """Draws some of the numbers 2 to 12: their text as a user types it, and the numbers."""
    texts, values = [], []
    for _ in range(draw(st.integers(1, 4))):
        first, last = sorted(draw(st.tuples(st.integers(2, 12), st.integers(2, 12))))
        step = draw(st.integers(1, 3))
        text, numbers = draw(
            st.sampled_from(
                [
                    (f"{first}", [first]),
                    (f"{first}..{last}", range(first, last + 1)),
                    (f"{first}..{last}..{step}", range(first, last + 1, step)),
                ]
            )
        )
        texts.append(text)
        values += numbers
    return ",".join(texts), values


@given(spelled_values(), spelled_values(), spelled_values())
def test_lists_ranges_and_mixtures_spell_every_combination(
    stages: tuple[str, list[int]], more: tuple[str, list[int]], groups: tuple[str, list[int]]
) -> None:
    settings = [f"stages={stages[0]}", f"raster_group={groups[0]}", f"stages={more[0]}"]
    spelled = spellings.edits(START, settings, limit=10_000)
    rings = dict.fromkeys([*stages[1], *more[1]])
    expected = [f"stages={ring} raster_group={group}" for ring in rings for group in dict.fromkeys(groups[1])]
    assert list(spelled) == expected
    for spelling, edit in spelled.items():
        assert spelling == " ".join(f"{name}={edit.fields[name]}" for name in ("stages", "raster_group"))
        assert edit.named == {"stages", "raster_group"}


@given(
    st.text(alphabet='0123456789.,[]{}:="a -', max_size=12), st.sampled_from(["stages", "cluster", "bm", "pdl", "x"])
)
def test_any_text_spells_edits_or_is_refused_in_words(text: str, name: str) -> None:
    try:
        spelled = spellings.edits(START, [f"{name}={text}"], limit=50)
    except WrongInput as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert "--set" in message or message.startswith(f"{name}: no field"), message
        return
    assert 0 < len(spelled) <= 50
    assert all(edit.named == {name} for edit in spelled.values())


def test_values_that_are_lists_are_separated_by_brackets_or_by_settings() -> None:
    for settings in (["cluster=[1,2],[2,1]"], ["cluster=1,2", "cluster=2,1"]):
        edits = spellings.edits(START, settings, limit=10)
        assert [edit.fields["cluster"] for edit in edits.values()] == [[1, 2], [2, 1]]
    assert [edit.fields["bm"] for edit in spellings.edits(START, ["bm=64..112"], limit=10).values()] == [
        64,
        80,
        96,
        112,
    ]


def test_a_grid_has_each_kernel_once_and_its_refusals_with_their_rules() -> None:
    values = {"bn": (32, 33, 64), "raster_axis": (START.model_dump()["raster_axis"],)}
    kernels, refusals = grid.fit(START, values)
    axis = values["raster_axis"][0]
    assert [candidate.edits for candidate in kernels] == [
        (f"bn=32 raster_axis={axis}",),
        (f"bn=64 raster_axis={axis}",),
    ]
    assert [candidate.start for candidate in kernels] == [True, False], "32 is what the record has"
    assert [refusal.edit for refusal in refusals] == [f"bn=33 raster_axis={axis}"]
    assert "bn=33" in refusals[0].reason
    assert len({candidate.record.kernel_key for candidate in kernels}) == len(kernels)
    for candidate in kernels:
        assert parse(candidate.record.model_dump(mode="json")) == candidate.record
    moved = kernels[1].record
    assert moved.origin.changed == tuple(sorted({"bn", *(difference.field for difference in kernels[1].differences)}))


def test_named_values_stay_and_differences_are_what_moved() -> None:
    big = catalog.find(Problem(gpu="h200", acc="f16", layout="tn", m=4096, n=4096, k=4096)).record
    before = fieldset(type(big)).flat(big.model_dump(mode="json"))
    for candidate in grid.fit(big, {"bm": (64, 128), "stages": range(3, 6)}).candidates:
        after = fieldset(type(big)).flat(candidate.record.model_dump(mode="json"))
        if not candidate.start:
            (spelling,) = candidate.edits
            assert spelling == f"bm={after['bm']} stages={after['stages']}"
        moved = {name for name in before if before[name] != after[name]} - {"bm", "stages"}
        assert {difference.field for difference in candidate.differences} == moved


@pytest.mark.slow
def test_what_ptxas_refuses_is_a_row_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, judged_results: Path
) -> None:
    kernels = grid.fit(START, CHOICES).candidates
    artifacts: list[Any] = list(compiler.build([candidate.record for candidate in kernels]))
    faults: list[dict[str, Any]] = [{"spill_load_bytes": 24}, {"stack_bytes": 8}, {"losses": ("C7510 wgmma waits",)}]
    for index, fault in enumerate(faults):
        artifact = artifacts[index]
        artifacts[index] = replace(artifact, ptxas=replace(artifact.ptxas, **fault))
    artifacts[3] = BuildError("k did not compile: ptxas fatal: no")
    monkeypatch.setattr(compiler, "attempt", lambda *_, **__: artifacts)
    rows = grid.judged(grid.built(kernels), store=judged_results / "verdicts.jsonl")
    assert [row.outcome for row in rows] == ["spill", "spill", "slow", "compile error", "right"]
    assert [bool(row.reason) for row in rows] == [True, True, True, True, False]
    assert [row.verdict is None for row in rows] == [True, True, True, True, False]
    assert grid.best(rows, 9) == rows[4:]


def test_an_interrupted_call_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "verdicts.jsonl"
    built = grid.built(grid.fit(START, CHOICES).candidates)
    executed: list[str] = []

    def judge(work: Any, _library: Path, _jobs: int) -> Iterator[Verdict]:
        for record, artifact in work:
            executed.append(artifact.digest)
            yield verdict(record, artifact.digest)

    monkeypatch.setattr(validator, "validate_all", judge)

    def interrupt(done: int, total: int) -> None:
        assert total == len(built)
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grid.judged(built, progress=interrupt, store=store)
    first, executed[:] = set(executed), []
    assert {digest for digest, _ in results.latest(store)} == first
    rows = grid.judged(built, store=store)
    assert not first & set(executed)
    assert len(executed) == len(built) - 2
    assert [row.stored for row in rows].count(True) == 2
    assert all(row.right for row in rows)
    executed.clear()
    assert all(row.stored for row in grid.judged(built, store=store))
    assert not executed


def test_a_kernel_whose_process_dies_is_a_row_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = grid.built(grid.fit(START, CHOICES).candidates)
    victim = built[1].record.name

    def judge(work: Any, _library: Path, _jobs: int) -> Iterator[Verdict | Lost]:
        for record, artifact in work:
            yield Lost(victim, "was ended") if record.name == victim else verdict(record, artifact.digest)

    monkeypatch.setattr(validator, "validate_all", judge)
    rows = grid.judged(built, store=tmp_path / "verdicts.jsonl")
    assert [(row.outcome, row.reason) for row in rows if row.reason] == [("no verdict", "was ended")]
    assert [row.right for row in rows].count(False) == 1


def test_right_kernels_are_ranked_by_measured_time_where_there_is_one() -> None:
    candidates = grid.fit(START, {"bn": (32, 64, 128), "stages": (2, 4)}).candidates
    rows = [grid.TriedKernel(candidate, outcome="right") for candidate in candidates]
    assert grid.best(rows, 2) == sorted(rows, key=lambda row: row.modelled_us)[:2]
    samples = [Timing(contender="x", calls=1, event_us=(us,), error=0.0) for us in (9.0, 3.0, 7.0)]
    timed = [replace(row, timing=timing) for row, timing in zip(rows, samples, strict=False)]
    wrong = replace(rows[3], outcome="wrong result", reason="no", timing=samples[1])
    assert grid.best([*timed, wrong, *rows[4:]], 9) == [timed[1], timed[2], timed[0]]
    assert grid.ranked([wrong, *rows[4:], *timed])[:3] == [timed[1], timed[2], timed[0]]
    assert grid.ranked([wrong, *rows])[-1] is wrong


def test_rows_keep_their_order_where_the_modelled_one_is_none() -> None:
    record = catalog.find(Problem(gpu="a100", acc="f16", layout="tn", m=4096, n=4096, k=64)).record
    rows = [grid.TriedKernel(item, outcome="right") for item in grid.fit(record, {"bn": (64, 128)}).candidates]
    assert len({row.modelled_us for row in rows}) > 1
    for order in (rows, rows[::-1]):
        assert grid.ranked(order) == order


@pytest.mark.slow
def test_the_verb_prints_one_table_and_goes_on_from_stored_verdicts(judged_results: Path, tmp_path: Path) -> None:
    lines = (judged_results / "verdicts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "verdicts.jsonl").write_text("".join(lines[1:]))
    settings = ("--set", "bn=32,64,63", "--set", "stages=2,4")
    done = run_try(*settings, CUDAL2GEN_RESULTS=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done
    header, *rows = done.stdout.splitlines()
    assert header.split() == [
        *("edit", "follows", "registers", "spills", "smem", "CTAs/SM", "waves", "verdict", "modelled", "us")
    ]
    assert sum(" right " in row for row in rows) == 5, "four edits, and the record as it is"
    assert sum(row.startswith("refused: bn=63 ") for row in rows) == 2
    assert ": 5 right; 4 had a verdict; times are modelled, not measured; rank correlation 0.62 " in rows[-1]
    assert len((tmp_path / "verdicts.jsonl").read_text().splitlines()) == 5
    again = json.loads(run_try(*settings, "--json", "--best", "2", CUDAL2GEN_RESULTS=tmp_path).stdout)
    assert again["problem"] == PROBLEM.model_dump()
    assert [row["edit"] for row in again["refused"]] == ["bn=63 stages=2", "bn=63 stages=4"]
    assert len(again["kernels"]) == 2
    documented = (places.checkout() or Path()).joinpath("docs/edit.md").read_text()
    for key in (*again, *again["kernels"][0]):
        assert f"`{key}`" in documented, key
    assert len((tmp_path / "verdicts.jsonl").read_text().splitlines()) == 5, "none is made twice"


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.torch
def test_on_a_gpu_right_kernels_are_timed_in_turns(judged_results: Path, own_catalog: Path, tmp_path: Path) -> None:
    done = run_try(
        *("--set", "bn=16", "--time", "--json"),
        mnk="64_64_64",
        CUDAL2GEN_GPU="tests.cudal2gen.rehearsal:H200",
        CUDAL2GEN_CACHE_DIR=tmp_path,  # which has the lock of each device
        CUDAL2GEN_RESULTS=judged_results,
        CUDAL2GEN_CATALOG=own_catalog,
    )
    assert done.returncode == 0, done
    assert [row["measured_us"] for row in json.loads(done.stdout)["kernels"]] == [LAUNCH_US, LAUNCH_US]


@pytest.mark.slow
def test_the_best_right_kernel_goes_into_the_catalog(judged_results: Path, own_catalog: Path) -> None:
    worse = next(candidate.record for candidate in grid.fit(START, CHOICES).candidates if candidate.record.bn == 64)
    catalog.put(worse, own_catalog)
    arguments = ("--set", "bn=32", "--set", "stages=4", "--write")
    done = run_try(*arguments, CUDAL2GEN_CATALOG=own_catalog, CUDAL2GEN_RESULTS=judged_results)
    assert done.returncode == 0, done
    record = catalog.find(PROBLEM, own_catalog).record
    assert (record.bn, record.ring_steps) == (32, 4)
    assert "written to" in done.stdout
    before = own_catalog.read_bytes()
    again = run_try(*arguments, CUDAL2GEN_CATALOG=own_catalog, CUDAL2GEN_RESULTS=judged_results)
    assert "nothing is written" in again.stderr
    assert own_catalog.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "nothing to try; give --set"),
        (
            ("--set", "bn=16..256", "--set", "bm=16..256"),
            2,
            "256 edits are more than 100; give fewer values, or --limit 256",
        ),
        (("--set", "bn=31,33"), 2, "all 2 edits are refused, bn=31 by: "),
        (("--set", "stage=2"), 2, "did you mean stages"),
        (("--set", "m=2"), 2, "a grid varies one problem"),
        (("--set", "bn=32", "--time"), 3, "no CUDA device"),
    ],
)
def test_refusals_are_one_line_with_the_readmes_exit_codes(arguments: tuple[str, ...], code: int, words: str) -> None:
    done = run_try(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
