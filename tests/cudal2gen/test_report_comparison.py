"""Proves that a comparison of two sets of measurements does not report noise as a change, and what ``report``
writes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudal2gen import report
from cudal2gen.generation import catalog
from cudal2gen.report.comparison import Pair
from cudal2gen.results import KERNEL, Measurement, Measurements
from cudal2gen.results.ratios import Ratio
from tests.cudal2gen.measured import campaign, measurement, shapes, timing, write
from tests.cudal2gen.reporting import EMPTY, rows, section, steady, store_of
from tests.cudal2gen.test_cli import error, run


@pytest.mark.thorough
@pytest.mark.slow
def test_a_thousand_shapes_report_in_seconds() -> None:
    names = {(record.m, record.n, record.k): record.name for record in catalog.load() if record.acc == "f16"}
    measurements, records = campaign(1000, names=names.get), catalog.load()
    started = time.process_time()
    document = report.report(measurements, records)
    page, text = document.html(), document.markdown()
    assert time.process_time() - started < 20
    assert len(page) < 4e6
    assert "| 1000 |" in text


@pytest.mark.slow
def test_a_comparison_finds_what_moved_and_only_that() -> None:
    before = campaign(60, seed=1)
    slow, fast = shapes(60)[7], shapes(60)[8]
    factor = {slow: 0.8, fast: 1.25}
    after = Measurements(before.environments, [_speed_up(measurement, factor) for measurement in before.measurements])
    document = report.comparison(before, after)
    part = section(document, "compared-0")
    assert rows(part.tables[0])[KERNEL]["shared shapes"] == "60"
    assert rows(part.tables[0])["torch.matmul"]["geomean [95 %]"] == "1.000 [1.000, 1.000]"
    assert [row[0] for row in part.tables[1].rows] == ["_".join(map(str, slow))]
    assert [row[0] for row in part.tables[2].rows] == ["_".join(map(str, fast))]
    assert part.tables[1].rows[0][2].startswith("0.800 [")
    expected = (0.8 * 1.25) ** (1 / 60)
    assert rows(part.tables[0])[KERNEL]["geomean [95 %]"].startswith(f"{expected:.3f} [")
    assert part.alerts == ()


def _speed_up(measurement: Measurement, factor: dict[tuple[int, int, int], float]) -> Measurement:
    """A measurement in which our kernel is faster by the factor for its sizes; 1 if there is none."""
    by = factor.get((measurement.m, measurement.n, measurement.k), 1.0)
    timings = tuple(
        sample.model_copy(update={"event_us": tuple(us / by for us in sample.event_us)})
        if sample.contender == KERNEL
        else sample
        for sample in measurement.timings
    )
    return measurement.model_copy(update={"timings": timings})


def test_a_machine_that_moved_is_noticed_by_the_baselines() -> None:
    before = store_of(*(steady(mnk, 10.0, 10.0) for mnk in shapes(20)))
    after = store_of(*(steady(mnk, 9.0, 9.0) for mnk in shapes(20)))
    part = section(report.comparison(before, after), "compared-0")
    assert part.alerts == ("torch.matmul itself moved by 1.111 [1.111, 1.111]: the two runs were not alike.",)


@pytest.mark.slow
def test_noise_alone_is_rarely_called_a_change() -> None:
    """Of two runs of equal kernels about one in twenty ratios is outside of its interval, in either direction."""
    a, b = (
        store_of(
            *(measurement for measurement in campaign(150, seed=seed).measurements if measurement.protocol == "offline")
        )
        for seed in (1, 2)
    )
    part = section(report.comparison(a, b), "compared-0")
    changed = len(part.tables[1].rows) + len(part.tables[2].rows)
    assert changed <= 0.12 * 150


def test_sets_that_share_nothing_are_not_compared() -> None:
    offline = steady((64, 64, 64), 1.0, 1.0, protocol="offline")
    document = report.comparison(store_of(steady((64, 64, 64), 1.0, 1.0)), store_of(offline))
    alerts = section(document, "compared").alerts
    assert alerts[0] == "only in A: NVIDIA H200, f16, tn, device, L2 cold"
    assert alerts[-1].endswith("there is nothing to compare.")
    assert report.comparison(EMPTY, EMPTY).html()


@pytest.mark.slow
def test_the_command_prints_or_writes(tmp_path: Path) -> None:
    env = {"CUDAL2GEN_RESULTS": str(tmp_path)}
    empty = run("report", env=env)
    assert (empty.returncode, empty.stderr) == (0, "")
    assert "No timing is in this report" in empty.stdout
    write(campaign(4), tmp_path / "measurements.jsonl")
    process = run("report", "--out", str(tmp_path / "r.html"), "--out", str(tmp_path / "r.md"), env=env)
    assert process.returncode == 0, process.stderr
    assert "Table 1" in (tmp_path / "r.md").read_text()
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert "No measurement matches" in run("report", "--gpu", "a100", env=env).stdout
    text = run("report", str(tmp_path / "measurements.jsonl"), "--acc", "f16")
    assert "NVIDIA H200, f16, tn, device, L2 cold" in text.stdout


def test_the_command_compares(tmp_path: Path) -> None:
    a, b = (write(campaign(4, seed=seed), tmp_path / f"{seed}.jsonl") for seed in (1, 2))
    process = run("report", "--compare", str(a), str(b))
    assert process.returncode == 0, process.stderr
    assert "Regressions beyond noise" in process.stdout
    assert "no results file at /nowhere" in error("report", "--compare", str(a), "/nowhere")
    assert "no results file at /nowhere" in error("report", "/nowhere")


@pytest.mark.slow
def test_samples_that_make_no_pairs_are_left_out_by_line(tmp_path: Path) -> None:
    paired = measurement((64, 64, 64), [timing(KERNEL, [1.0]), timing("torch.matmul", [2.0])])
    path = write(store_of(paired), tmp_path / "bad.jsonl")
    path.write_text(path.read_text().replace("[2.0]", "[2.0,2.0]"))
    done = run("report", str(path))
    assert done.returncode == 0
    assert f"note: {path}:2: a line of another form, skipped: measurement.timings=" in done.stderr
    assert "2 samples of torch.matmul and 1 of cudal2gen make no pairs" in done.stderr


@given(st.lists(st.sampled_from((0.5, 0.99, 1.0, 1.01, 2.0)), min_size=3, max_size=3).map(sorted))
def test_a_change_is_beyond_noise_if_its_interval_leaves_one_out(ends: list[float]) -> None:
    """The same measurement twice has the interval from 1 to 1, which is no change."""
    low, value, high = ends
    row: Any = None
    verdict = Pair(row, row, Ratio(value, low, high)).verdict
    assert (verdict == "within noise") == (low <= 1 <= high)
    assert verdict == "within noise" or (verdict == "faster") == (value > 1)
