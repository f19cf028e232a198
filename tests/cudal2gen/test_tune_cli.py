"""Proves what a user of ``tune`` and ``compare`` sees."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cudal2gen import results
from cudal2gen.cli import learning
from cudal2gen.cli.selection import Selection
from cudal2gen.generation import catalog
from cudal2gen.kernel import Problem, space
from cudal2gen.timing.recordings import autoheuristic
from cudal2gen.tuner import benchmark, ranking
from tests.cudal2gen.test_cli import error, own_catalog, run
from tests.cudal2gen.test_evidence import write_recordings
from tests.packages import require

__all__ = ["own_catalog"]  # a fixture


@pytest.fixture
def place(tmp_path: Path, own_catalog: dict[str, str]) -> dict[str, str]:
    """The variables of commands that use a catalog, builds and results of the test's own."""
    folders = {"CUDAL2GEN_BUILD_DIR": str(tmp_path / "build"), "CUDAL2GEN_RESULTS": str(tmp_path / "results")}
    return own_catalog | folders


GAIN = (4096, 256, 64)  # few trials of the model environment beat the catalog's record for these sizes
# Options of a search whose times are those of the model.
MODELLED = ("--gpu", "h200", "--acc", "f32", "--environment", "model", "--proposers", "nearest,random")


@pytest.mark.slow
def test_a_modelled_gain_is_shown_and_never_written(place: dict[str, str], tmp_path: Path) -> None:
    before = Path(place["CUDAL2GEN_CATALOG"]).read_bytes()
    mnk = "_".join(map(str, GAIN))
    process = run("tune", "--mnk", mnk, "--evaluations", "24", *MODELLED, env=place)
    assert process.returncode == 0, process
    assert re.search(mnk + r": 1\.\d+ \[1\.\d+, 1\.\d+\] times the incumbent's speed, proposed by", process.stdout)
    assert (
        "not written: its times come from the model environment (analytic model with hidden terms, seed 0)"
        in process.stdout
    )
    assert "1 of 1 problems, 24 evaluations" in process.stdout
    assert len(process.stdout.splitlines()) == 5, "a line for a gain, not one for each field"
    assert Path(place["CUDAL2GEN_CATALOG"]).read_bytes() == before
    assert not Path(place["CUDAL2GEN_RESULTS"]).exists(), "modelled trials are no results"
    (stored,) = Path(place["CUDAL2GEN_BUILD_DIR"]).rglob("modelled-trials.jsonl")
    assert len(results.trials(stored)) == 24 + 8 + 3 + 1
    second = run("tune", "--mnk", mnk, "--evaluations", "24", *MODELLED, env=place)
    assert len(results.trials(stored)) == 24 + 8 + 3 + 1, "stored trials are not repeated"
    assert second.stdout.splitlines()[0] == process.stdout.splitlines()[0]


@pytest.mark.thorough
@pytest.mark.slow
def test_replay_needs_a_recording_and_searches_it_alone(place: dict[str, str], tmp_path: Path) -> None:
    run("tune", "--mnk", "64_64_64", "--evaluations", "4", *MODELLED, env=place)
    (stored,) = Path(place["CUDAL2GEN_BUILD_DIR"]).rglob("modelled-trials.jsonl")
    options = ("--gpu", "h200", "--acc", "f32", "--proposers", "random", "--seed", "9")
    recordings = ("--recordings", str(stored))
    process = run("tune", *options, *recordings, env=place)
    assert process.returncode == 0, process
    recorded = results.trials(stored)
    count = len({(trial.name, repr(trial.record)) for trial in recorded})
    assert f"1 of 1 problems, {count} evaluations" in process.stdout
    assert "0.00% slower than the best recorded ones on average, 1 of 1" in process.stdout
    (replayed,) = Path(place["CUDAL2GEN_BUILD_DIR"]).rglob("replayed-trials.jsonl")
    assert {trial.environment for trial in results.trials(replayed)} == {"replay"}
    assert results.trials(stored) == recorded, "a recording is only read"
    stranger = run("tune", "--mnk", "64_64_128", *options, *recordings, env=place)
    assert "64_64_128: no trial is recorded on analytic model" in stranger.stderr.replace("h200 f32 tn ", "")


@pytest.mark.slow
def test_a_budget_ends_it_and_a_class_chooses(place: dict[str, str]) -> None:
    process = run("tune", "--class", "tiny", "--budget", "2s", *MODELLED, env=place)
    match = re.search(r"(\d+) of (\d+) problems", process.stdout)
    assert match is not None
    tiny = {record.mnk for record in catalog.load() if record.problem.size_class == "tiny"}
    assert int(match[2]) == len(tiny)
    assert 0 < int(match[1]) < len(tiny)


@pytest.mark.slow
def test_a_models_own_problems_are_tuned(place: dict[str, str], tmp_path: Path) -> None:
    problem = Problem(gpu="h200", acc="f32", layout="tn", m=16, n=768, k=256)
    sister = problem.model_copy(update={"acc": "f16"})
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(item.model_dump() | {"count": 3}) + "\n" for item in (problem, sister)))
    process = run("tune", "--problems", str(path), "--evaluations", "8", *MODELLED, env=place)
    assert process.returncode == 0, process
    assert "1 of 1 problems, 8 evaluations" in process.stdout
    assert "note: 1 problems of" in process.stderr
    (stored,) = Path(place["CUDAL2GEN_BUILD_DIR"]).rglob("modelled-trials.jsonl")
    assert {(item.m, item.n, item.k, item.acc) for item in results.trials(stored)} == {(16, 768, 256, "f32")}


@pytest.mark.thorough
@pytest.mark.slow
def test_a_small_comparison(place: dict[str, str], tmp_path: Path) -> None:
    """A user runs ``compare`` for one problem after a campaign of six."""
    write_recordings(tmp_path / "a100.txt", lambda sizes, own: 5.0 + sizes.m / own.bm)
    process = run("compare", "--sample", "1", "--seeds", "1", "--recordings", str(tmp_path / "a100.txt"), env=place)
    assert process.returncode == 0, process
    measured = process.stdout
    options = ("--gpu", "a100", "--acc", "f16", "--sample", "1", "--seeds", "1")
    process = run("compare", *options, env=place)
    assert process.returncode == 0, process
    modelled = process.stdout
    assert modelled.startswith("# Ways of searching, a100 f16, compared in a model")
    assert re.search(r"^\| a100 \| cost model \| 12 \| \d", measured, re.MULTILINE)
    assert re.search(r"^\| a100 \| cost model \| 1 \| \d", measured, re.MULTILINE), "of one problem a search"
    assert "1 problems that were never tuned, 1 seeds of hidden terms, 1 of each search" in modelled
    for name in ("cost model", "nearest + hill climbing", "random"):
        assert re.search(rf"^\| {re.escape(name)} \|( \d+\.\d% \[\d+\.\d%, \d+\.\d%\] \|){{4}}", modelled, re.MULTILINE)


@pytest.mark.slow
def test_files_that_are_no_recordings_are_refused(place: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "a100_mixed_mm.txt").write_text("m,k,n\n1,2,3\n")
    assert error("compare", "--recordings", str(tmp_path), env=place).startswith(
        "--recordings: 0 sizes of fp16 products with timings of "
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--mnk", "64_64_64", "--environment", "oracle"),
            "'--environment': 'oracle'",
        ),
        (("--mnk", "64_64_64", "--environment", "model", "--recordings", "a.jsonl"), "--recordings: "),
        (
            ("--environment", "model"),
            "give one of --mnk M_N_K, --all, --class NAME, --sample N and --problems FILE",
        ),
        (
            ("--class", "vast", "--environment", "model"),
            "'--class': 'vast'",
        ),
        (
            ("--mnk", "64_64_64", *MODELLED[:-1], "oracle"),
            "'--proposers': 'oracle'",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: tuple[str, ...], message: str, place: dict[str, str]) -> None:
    assert message in error("tune", *arguments, env=place)


@pytest.mark.slow
def test_without_a_gpu_the_gpu_environment_says_so(place: dict[str, str]) -> None:
    require("torch")
    if __import__("torch").cuda.is_available():
        pytest.skip("there is a GPU")
    assert "torch sees no CUDA device" in error("tune", "--mnk", "64_64_64", code=3, env=place)


@pytest.mark.slow
def test_a_measured_gain_is_written_unless_it_is_a_dry_run(
    place: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trials are marked as measured and have a verdict. The test runs in this process with a store of its own."""
    from cudal2gen.cli import tuning
    from cudal2gen.results import Case, Verdict
    from cudal2gen.tuner import campaign, executor, search
    from cudal2gen.tuner.environment import ModelEnvironment
    from cudal2gen.tuner.proposers import Random

    for name, value in place.items():
        monkeypatch.setenv(name, value)
    problem = Problem(gpu="h200", acc="f32", layout="tn", m=GAIN[0], n=GAIN[1], k=GAIN[2])
    incumbents = campaign.Incumbents(catalog.load())
    contest = search.Search(space.candidates(problem), incumbents(problem))
    search.run(
        contest,
        Random(0),
        executor.InProcess(ModelEnvironment(incumbents)),
        lambda _: None,
        search.SearchLimits(32, prune=None),
    )
    contest.trials = [trial.model_copy(update={"environment": "gpu", "on": "NVIDIA H200"}) for trial in contest.trials]
    winner = contest.winner
    assert winner is not None
    tuning.write_improved(contest, dry_run=False)
    assert "not written: its kernel has no clean verdict" in capsys.readouterr().out
    case = Case(
        m=1, n=1, k=1, swizzle_stride=None, inputs="x", compared="x", max_error=0, allowed=None, ctas=1, findings=()
    )
    results.append([Verdict(record=winner.name, digest=winner.digest, on="h200", cases=(case,), counters={})])
    tuning.write_improved(contest, dry_run=True)
    assert "this is a dry run" in capsys.readouterr().out
    assert catalog.find(problem).record == incumbents(problem)
    tuning.write_improved(contest, dry_run=False)
    assert "written to" in capsys.readouterr().out
    assert catalog.find(problem).record == campaign.catalog_record(contest)
    assert catalog.find(problem).record.origin.structure == "tuned"


@pytest.mark.parametrize(("sample", "seeds"), [*product((None, 1, 7), (None, 1, 3))])
def test_a_comparison_has_the_problems_and_seeds_that_are_asked_for(
    sample: int | None, seeds: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Any] = []
    monkeypatch.setattr(autoheuristic, "problems", lambda paths: {})
    monkeypatch.setattr(learning.published, "structures", lambda: [])
    for module in (ranking, benchmark):
        monkeypatch.setattr(module, "compare", lambda of, plan, progress: plans.append(plan) or (of, plan))
        monkeypatch.setattr(module, "markdown", lambda *parts: "a page")
    monkeypatch.setattr(ranking, "largest_quarter", lambda recordings, plan: [])
    assert learning.compared_on_recordings((), sample, seeds) == "a page"
    plan = learning._plan(Selection(gpu="a100", sample=sample), "f16")
    assert learning.compared_in_the_model(plan, seeds) == "a page"
    recorded, modelled = plans
    usual = ranking.RankingPlan()
    assert (recorded.searched, recorded.seeds) == (sample or usual.searched, seeds or usual.seeds)
    assert (modelled.gpu, modelled.acc, modelled.environments) == ("a100", "f16", seeds or plan.environments)
    assert modelled.held_out == (sample or benchmark.BenchmarkPlan(gpu="a100", acc="f16").held_out)
