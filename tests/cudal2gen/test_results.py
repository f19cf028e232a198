"""Proves that verdicts are appended as a whole and read back, also from a file that a crash cut short."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cudal2gen import results
from cudal2gen.results import KERNEL, Case, Verdict, ratios
from kernelproof.ground.errors import SkippedLine
from tests.cudal2gen.measured import campaign, measurement, timing, write


def verdict(digest: str, *findings: str) -> Verdict:
    """A verdict of one case with these findings."""
    case = Case(
        m=1, n=2, k=3, swizzle_stride=None, inputs="binary", compared="equality", max_error=0.0, allowed=None, ctas=1,
        findings=findings,
    )  # fmt: skip
    return Verdict(record="r", digest=digest, on="emulator", cases=(case,), counters={"mma": 1.0})


def test_the_latest_verdict_of_a_binary_counts(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "verdicts.jsonl"
    results.append([verdict("a", "race"), verdict("b")], path)
    results.append([verdict("a")], path)
    verdicts = results.latest(path)
    assert set(verdicts) == {("a", "emulator"), ("b", "emulator")}
    assert verdicts["a", "emulator"].passed
    assert not verdict("a", "race").passed
    assert verdict("a", "race").findings == ["1_2_3 binary: race"]
    assert not Verdict(record="r", digest="c", on="emulator", cases=(), counters={}).passed, (
        "nothing run, nothing shown"
    )


def test_a_verdict_on_nan_is_read_back(tmp_path: Path) -> None:
    """If it were lost, an earlier verdict of the same binary would count."""
    path = tmp_path / "verdicts.jsonl"
    (case,) = verdict("a", "wrong-value").cases
    endless = verdict("a").model_copy(update={"cases": (case.model_copy(update={"max_error": math.inf}),)})
    results.append([verdict("a"), endless], path)
    assert results.latest(path)["a", "emulator"] == endless


def test_an_incomplete_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    results.append([verdict("a")], path)
    path.write_bytes(path.read_bytes() + b'{"record": "r", "dig\n\xff\n')
    results.append([verdict("b")], path)
    with pytest.warns(SkippedLine) as skipped:
        verdicts = results.latest(path)
    assert [str(each.message).split(": ")[0] for each in skipped] == [f"{path}:2", f"{path}:3"]
    assert {digest for digest, _ in verdicts} == {"a", "b"}


def test_an_incomplete_last_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    results.append([verdict("a")], path)
    path.write_bytes(path.read_bytes() + b'{"record": "r", "dig')
    results.append([verdict("b")], path)
    assert [json.loads(line)["digest"] for line in path.read_text().splitlines()] == ["a", "b"]


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """A limit on the file's size stands in for a full disk."""
    path = tmp_path / "verdicts.jsonl"
    results.append([verdict("a")], path)
    before = path.read_bytes()
    program = (
        "import resource, signal, sys; from pathlib import Path; sys.dont_write_bytecode = True;"
        "from cudal2gen import results;"
        "from tests.cudal2gen.test_results import verdict;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) + 100}, -1));"
        "results.append([verdict('b')], Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert path.read_bytes() == before


@given(st.integers(0, 140_000), st.lists(st.integers(0, 140_000), max_size=2))
def test_rows_follow_the_last_whole_line(size: int, breaks: list[int]) -> None:
    """A killed process may have left any part of a line behind, also a long one or the first."""
    before = bytearray(b"x" * size)
    for place in breaks:
        before[place : place + 1] = b"\n"
    with TemporaryDirectory() as folder:
        path = Path(folder) / "verdicts.jsonl"
        path.write_bytes(before)
        results.append([verdict("a")], path)
        row = verdict("a").model_dump_json().encode()
        assert path.read_bytes() == b"".join(before.splitlines(keepends=True)[: before.count(b"\n")]) + row + b"\n"


@pytest.mark.slow
def test_processes_that_append_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    program = (
        "import sys; from pathlib import Path; from cudal2gen import results;"
        "from tests.cudal2gen.test_results import verdict;"
        "[results.append([verdict(f'{sys.argv[2]}-{i}')], Path(sys.argv[1])) for i in range(20)]"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(path), str(who)]) for who in range(4)]
    assert [writer.wait(300) for writer in writers] == [0] * 4
    assert len(results.latest(path)) == 80


def test_the_store_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDAL2GEN_RESULTS", str(tmp_path))
    assert results.store() == tmp_path / "verdicts.jsonl"
    monkeypatch.delenv("CUDAL2GEN_RESULTS")
    assert results.store().parts[-2:] == ("results", "verdicts.jsonl")
    assert os.fspath(results.store()).startswith(os.fspath(Path(results.__file__).parents[2]))


@pytest.mark.parametrize("samples", [1, 2, 9, 20, 51])
def test_a_speedups_interval_is_the_bootstraps(samples: int) -> None:
    """The expected interval is computed from the median of every resample."""
    random = np.random.default_rng(samples)
    own, vendor = np.exp(random.normal(0, 0.1, samples)), np.exp(random.normal(0.2, 0.1, samples))
    measured = measurement((64, 64, 64), [timing(KERNEL, own), timing("torch.matmul", vendor)])
    ratio = results.speedup(measured, "torch.matmul")
    assert ratio is not None
    logs = [math.log(b / a) for a, b in zip(own, vendor, strict=True)]
    draws = [sorted(statistics.median(random.choice(logs, samples)) for _ in range(4000)) for _ in range(2)]
    assert ratio.value == pytest.approx(math.exp(statistics.median(logs)))
    for bound, tail in ((ratio.low, 0.025), (ratio.high, 0.975)):
        bounds = [math.exp(draw[int(4000 * (tail + off))]) for draw in draws for off in (-0.012, 0.012)]
        assert min(bounds) - 1e-9 <= bound <= max(bounds) + 1e-9


def test_many_speedups_are_those_of_each() -> None:
    rows = campaign(40)
    short = measurement((64, 64, 64), [timing(KERNEL, [1.0, 2.0, 3.0]), timing("cublas-nn", [2.0, 2.0, 2.0])])
    measured = [*rows.measurements, short]
    for baseline in ("cublas-nn", "cublas-max", "absent"):
        assert results.speedups(measured, baseline) == [results.speedup(row, baseline) for row in measured]
    assert results.speedups(measured, "cublas-max")[-1] is None, "tn was not measured"
    assert results.speedups([], "cublas-nn") == []


def test_samples_that_make_no_pairs_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"2 samples of torch\.matmul and 1 of cudal2gen make no pairs"):
        measurement((64, 128, 256), [timing(KERNEL, [1.0]), timing("torch.matmul", [1.0, 2.0])])
    with pytest.raises(ratios.Unpaired, match="2 and 1 samples make no pairs"):
        ratios.paired([1.0, 2.0], [1.0])


@pytest.mark.parametrize("event_us", [[], [0.0], [-1.0], [math.nan], [math.inf]])
def test_a_sample_is_positive_and_finite(event_us: list[float]) -> None:
    with pytest.raises(ValidationError):
        timing(KERNEL, event_us)


def test_measurements_are_read_back_and_damage_is_skipped(tmp_path: Path) -> None:
    rows = campaign(3)
    path = write(rows, tmp_path / "measurements.jsonl")
    assert results.measurements(path) == rows
    line = path.read_text().splitlines()[1]
    path.write_text(
        path.read_text() + line.replace("[2", "[NaN, 2", 1) + "\n" + line.replace("synthetic-h200", "x") + "\n"
    )
    with pytest.warns(SkippedLine):
        assert results.measurements(path) == rows


def trial(**samples: list[float]) -> results.Trial:
    """A measured trial, with the microseconds of each contender."""
    timings = tuple(timing(name, values) for name, values in samples.items())
    return results.Trial(
        environment="gpu", on="NVIDIA H200", run="r", gpu="h200", acc="f32", layout="tn", m=64, n=64, k=64,
        proposer="random", name="n", record={}, outcome="measured", timings=timings,
    )  # fmt: skip


@pytest.mark.parametrize("slower", ["cublas", "torch"])
def test_a_trials_baseline_is_the_fastest(slower: str) -> None:
    """The baseline is the faster of two in either order. The kernel and the incumbent are faster, but are no
    baselines."""
    samples = {"cublas": [3.0, 3.0], "torch": [3.0, 3.0], results.INCUMBENT: [2.0, 2.0], KERNEL: [1.0, 1.0]}
    row = trial(**samples | {slower: [4.0, 4.0]})
    assert row.baseline == {"cublas": "torch", "torch": "cublas"}[slower]
    assert row.cost == 0.5
    assert row.faster_than(row.baseline) == (pytest.approx(3.0),) * 3
    assert trial(**{KERNEL: [1.0]}).baseline is None
