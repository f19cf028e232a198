"""Proves that contributed measurements name no machine, and that impossible ones are refused."""

from __future__ import annotations

import getpass
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudal2gen import report, results
from cudal2gen.report import contribution
from cudal2gen.report.groups import by_conditions
from cudal2gen.results import KERNEL, Measurement, Measurements
from tests.commands import run
from tests.cudal2gen import measured
from tests.cudal2gen.measured import H200, noisy_measurement, timing

MNK = (1024, 1024, 1024)


@pytest.fixture
def random() -> np.random.Generator:
    """A generator with the same numbers in every test."""
    return np.random.default_rng(0)


def faults(tmp_path: Path, *rows: Measurement, **environment: Any) -> list[str]:
    """What an inspection finds in a file with these measurements of an H200, whose environment is changed."""
    store = Measurements({H200.id: H200.model_copy(update=environment)}, list(rows))
    return report.inspect(measured.write(store, tmp_path / "stranger.jsonl")).faults


def row_with_own_timing(row: Measurement, **fields: Any) -> Measurement:
    """The row with other fields of our kernel's timing."""
    first, *others = row.timings
    return row.model_copy(update={"timings": (first.model_copy(update=fields), *others)})


def test_an_honest_campaign_has_no_faults(tmp_path: Path) -> None:
    campaign = measured.campaign(30)
    inspection = report.inspect(measured.write(campaign, tmp_path / "own.jsonl"))
    assert inspection.faults == []
    assert inspection.summary == f"{len(campaign.measurements)} measurements of 30 problems on NVIDIA H200"


def test_every_fault_is_named(tmp_path: Path, random: np.random.Generator) -> None:
    row = noisy_measurement(MNK, random, samples=6)
    group = by_conditions(Measurements({H200.id: H200}, [row]))[0]
    floor = group.floor_us(row)
    first = row.timings[0].event_us
    assert faults(tmp_path, row) == []
    cases: dict[str, Measurement] = {
        "TFLOP/s is above the roofline's": row_with_own_timing(
            row, event_us=tuple(us * floor / max(first) / 2 for us in first)
        ),
        "is below the card's floor of": row_with_own_timing(row, event_us=(floor * 0.9, *first[1:])),
        "5 samples; a measurement has 6": row.model_copy(
            update={"timings": tuple(t.model_copy(update={"event_us": t.event_us[:5]}) for t in row.timings)}
        ),
        "all samples are": row_with_own_timing(row, event_us=(first[0],) * 6),
        "its result is wrong by inf": row_with_own_timing(row, error=float("inf")),
        "only one contender": row.model_copy(update={"timings": row.timings[:1]}),
        "sample for sample those of 1024_1024_1024, device, L2 cold, cudal2gen": row.model_copy(
            update={"timings": (*row.timings, timing("copy", first))}
        ),
    }
    for words, wrong in cases.items():
        (tmp_path / "stranger.jsonl").unlink(missing_ok=True)
        assert any(words in fault for fault in faults(tmp_path, wrong)), words
    (tmp_path / "stranger.jsonl").unlink()
    assert any("the same measurement appears 2 times" in fault for fault in faults(tmp_path, row, row))
    (tmp_path / "stranger.jsonl").unlink()
    assert "max_sm_mhz not stated" in faults(tmp_path, row, max_sm_mhz=0)[0]


# Changes of the environment of an H200, and the beginning of the fault; "" for none.
CLAIMS = [
    ({"gpu": "h100"}, "gpu is h100, but NVIDIA H200 with 132 SMs is h200: "),
    (
        {"name": "NVIDIA H100 PCIe", "sms": 114},
        "gpu is h200, but NVIDIA H100 PCIe with 114 SMs is no model of the catalog",
    ),
    ({"sms": 66}, "gpu is h200, but NVIDIA H200 with 66 SMs is no model of the catalog"),
    ({"gpu": "", "name": "NVIDIA H100 PCIe", "sms": 114}, ""),
    ({"gpu": ""}, ""),
]


@pytest.mark.parametrize(("claim", "words"), CLAIMS)
def test_the_claimed_model_is_that_of_the_card(
    tmp_path: Path, random: np.random.Generator, claim: dict[str, Any], words: str
) -> None:
    sentences = [fault for fault in faults(tmp_path, noisy_measurement(MNK, random), **claim) if "gpu is" in fault]
    assert len(sentences) == bool(words)
    for sentence in sentences:
        assert sentence.startswith(f"{tmp_path / 'stranger.jsonl'}:1: {words}")
        assert "measure again with 'cudal2gen bench', or set gpu to" in sentence


@given(st.lists(st.integers(90, 99), min_size=6, max_size=8), st.booleans(), st.booleans())
def test_a_series_of_samples_is_somebodys_own_unless_it_is_constant(
    samples: list[int], copied: bool, own_row: bool
) -> None:
    """A series that no clock reads is that fault only. Of the others none occurs twice, be it in two measurements."""
    series, other = [float(us) for us in samples], [float(us + 20) for us in samples]
    pairs = [(series, other), (other if own_row else series, series if own_row else other)]
    rows = [
        measured.measurement((1024, 1024, 512 * number), [timing(KERNEL, ours), timing("torch.matmul", theirs)])
        for number, (ours, theirs) in enumerate(pairs[: 1 + copied], 1)
    ]
    found = [*contribution._copies(Measurements({H200.id: H200}, rows))]
    varies = len(set(samples)) > 1
    assert len(found) == (2 if copied and varies else 0), found
    faults = [fault for row in rows for fault in contribution._sample_faults(row)]
    assert len(faults) == (0 if varies else 2 * len(rows)), faults


def test_an_impossible_row_is_not_hidden_by_a_later_one(tmp_path: Path, random: np.random.Generator) -> None:
    row = noisy_measurement(MNK, random)
    fast = row_with_own_timing(row, event_us=tuple(us / 50 for us in row.timings[0].event_us))
    assert any("roofline" in fault for fault in faults(tmp_path, fast, row))


def test_lines_that_are_no_measurements_are_faults(tmp_path: Path, random: np.random.Generator) -> None:
    path = measured.write(Measurements({}, [noisy_measurement(MNK, random)]), tmp_path / "x.jsonl")
    with path.open("a") as file:
        file.write('{"kind": "measurement"}\nnot json\n')
    sentences = report.inspect(path).faults
    assert any("names an environment that no line before it describes" in fault for fault in sentences)
    assert sum("skipped" in fault for fault in sentences) == 3
    assert sentences[-1] == "no measurement is in it"


def test_names_of_the_machine_stay_at_home(random: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "quasar.lab.example")
    monkeypatch.setattr(getpass, "getuser", lambda: "eleonora")
    row = noisy_measurement(MNK, random).model_copy(
        update={
            "absent": {"cublas": "no library at /home/eleonora/my libs/libcublas.so.13 on quasar"},
            "environment": "quasar-0",
        }
    )
    row = row_with_own_timing(row, detail="~/build/x/kernel.cubin; B/A ratio, 3/4, fp16/fp32 of eleonora")
    environment = H200.model_copy(update={"id": "quasar-0", "versions": {"cuda": "13.0", "nvcc": "/opt/cuda/bin/nvcc"}})
    small = noisy_measurement((64, 64, 64), random).model_copy(update={"environment": "quasar-0"})
    store = Measurements({"quasar-0": environment, "other": H200}, [row, small])
    result = report.anonymous(store)
    only, small = result.measurements
    assert list(result.environments) == [only.environment] == [small.environment] == ["card-1"]
    assert only.absent == {"cublas": "no library at libcublas.so.13 on (name)"}
    kernel = only.timing(KERNEL)
    assert kernel is not None
    assert kernel.detail == "kernel.cubin; B/A ratio, 3/4, fp16/fp32 of (name)"
    assert result.environments["card-1"].versions == {"cuda": "13.0", "nvcc": "nvcc"}
    assert kernel.event_us == row.timings[0].event_us


def test_report_verifies_what_contribute_writes(tmp_path: Path) -> None:
    campaign = measured.campaign(8)
    own, out = measured.write(campaign, tmp_path / "own.jsonl"), tmp_path / "out.jsonl"
    done = run("contribute", str(own), "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        f"{out}: {len(campaign.measurements)} measurements of 8 problems on NVIDIA H200; faults: none\n"
    )
    rows = results.measurements(out)
    assert [row.timings for row in rows.measurements] == [row.timings for row in campaign.measurements]
    with out.open("a") as file:
        file.write(rows.measurements[0].model_dump_json() + "\n")
    refused = run("report", "--verify", str(out))
    assert refused.returncode == 1
    assert refused.stdout.splitlines()[-1].endswith("faults: 1")
    assert run("report", "--verify", str(tmp_path / "missing")).returncode == 2
    empty = run("contribute", "--out", str(out), env={"CUDAL2GEN_RESULTS": str(tmp_path / "nowhere")})
    assert empty.returncode == 2
    assert "cudal2gen bench" in empty.stderr
