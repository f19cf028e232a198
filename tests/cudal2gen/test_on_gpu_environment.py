"""Proves the stages of the gpu environment, its failures and paired timings, with a stand-in for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cudal2gen import results
from cudal2gen.bench import baselines
from cudal2gen.generation.compiler import Artifact, BuildError, Ptxas
from cudal2gen.kernel import Problem, Record, revise, space
from cudal2gen.launch import gpu
from cudal2gen.launch.gpu import KernelContender
from cudal2gen.launch.launcher import LaunchError
from cudal2gen.launch.operands import Operands
from cudal2gen.results import INCUMBENT, Case, Environment, Measurements, Verdict
from cudal2gen.tuner import executor, on_gpu, search
from cudal2gen.tuner.on_gpu import GpuEnvironment, best_baseline
from cudal2gen.tuner.proposers import Random
from tests.cudal2gen import measured
from tests.cudal2gen.devices import ENVIRONMENT, FakeDevice, FakeKernel, FakeProduct

pytestmark = pytest.mark.torch

# A problem, its wgmma records, and what ptxas says of a kernel without spills.
PROBLEM = Problem(gpu="h200", acc="f32", layout="tn", m=128, n=256, k=128)
RECORDS = [record for record in space.candidates(PROBLEM).records if record.family == "sm90_wgmma"]
CLEAN = Ptxas("sm_90a", 168, 0, 0, 0, 0, 1)


def spoil_element(operands: Operands, _: int) -> None:
    """Spoils an element of D after a launch."""
    operands.d[0, 0] += 30


class FakeWorkshop:
    """A ``Workshop`` in which everything succeeds except for the outcomes that are set by record name."""

    def __init__(self, device: FakeDevice, us: Callable[[Record], float] = lambda _: 8.0) -> None:
        self.device, self.us = device, us
        self.faults: dict[str, Any] = {}
        self.log: list[str] = []

    def attempt(self, records: Sequence[Record]) -> list[Artifact | BuildError]:
        """Each record's binary, or why it is not built."""
        self.log += [f"build {record.name}" for record in records]
        return [self.outcome(record) for record in records]

    def outcome(self, record: Record) -> Artifact | BuildError:
        """The binary of a record: none if it does not compile, one with spills if that is its fault."""
        fault = self.faults.get(record.name)
        if fault == "compile":
            return BuildError(f"{record.name} does not compile\nline 7: expected a semicolon")
        return Artifact(Path(record.name), Ptxas("sm_90a", 168, 16, 8, 0, 0, 1) if fault == "spill" else CLEAN)

    def judge(self, record: Record, artifact: Artifact) -> Verdict:
        """A verdict with a finding if that is the fault of the record."""
        self.log.append(f"judge {record.name}")
        findings = ("wrong-value: 3 elements",) if self.faults.get(record.name) == "verdict" else ()
        case = Case(
            m=1, n=1, k=1, swizzle_stride=None, inputs="normal", compared="equality", max_error=0.0, allowed=None,
            ctas=1, findings=findings,
        )  # fmt: skip
        return Verdict(record=record.name, digest=artifact.digest, on="h200", cases=(case,), counters={})

    def open(self, record: Record, artifact: Artifact) -> KernelContender:
        """A contender with the record's time. Raises LaunchError if that is its fault."""
        if self.faults.get(record.name) == "launch":
            raise LaunchError(1, "cudaErrorInvalidValue")
        us = 0.01 if self.faults.get(record.name) == "too good" else self.us(record)
        faulty = spoil_element if self.faults.get(record.name) == "timing" else None
        self.log.append(f"open {record.name}")
        return FakeKernel(self.device, record, us, faulty=faulty)


def environment(shop: FakeWorkshop, incumbent: Record | None = None, **options: Any) -> GpuEnvironment:
    """The environment under test, without warm-up, whose incumbent for every problem is this record."""
    return GpuEnvironment(shop.device, shop, lambda _: incumbent, warmup_seconds=0.0, **options)  # type: ignore[arg-type]


def test_every_failure_has_its_kind_and_reason_and_the_rest_is_timed() -> None:
    shop = FakeWorkshop(FakeDevice())
    names = ["compile", "spill", "verdict", "launch", "timing", "too good"]
    records = RECORDS[:80:10]
    shop.faults = {record.name: fault for record, fault in zip(records, names, strict=False)}
    trials = environment(shop, RECORDS[99]).evaluate(PROBLEM, records)
    assert [trial.outcome for trial in trials] == [
        "compile error", "spill", "wrong result", "wrong result", "wrong result", "too good", "measured", "measured",
    ]  # fmt: skip
    reasons = [trial.reason for trial in trials]
    assert reasons[0] == f"{records[0].name} does not compile"
    assert reasons[1] == "spills 16 bytes (168 registers)"
    assert reasons[2] == "1_1_1 normal: wrong-value: 3 elements"
    assert reasons[3] == "cudaErrorInvalidValue (cudaError 1)"
    assert reasons[4].startswith("wrong result after the timing: an error of 30")
    assert "cannot do it in less than" in reasons[5]
    for trial in trials[6:]:
        assert {timing.contender for timing in trial.timings} == {"cudal2gen", INCUMBENT}
        assert trial.median_us == pytest.approx(8.0)


def test_what_does_not_compile_is_not_judged_and_what_is_wrong_is_not_timed() -> None:
    shop = FakeWorkshop(FakeDevice())
    spills, lies, clean = RECORDS[0], RECORDS[10], RECORDS[20]
    shop.faults = {spills.name: "spill", lies.name: "verdict"}
    environment(shop).evaluate(PROBLEM, [spills, lies, clean])
    assert f"judge {spills.name}" not in shop.log
    assert f"open {lies.name}" not in shop.log
    assert f"open {clean.name}" in shop.log


def test_ratios_are_paired_with_incumbent_and_baseline_while_the_card_slows() -> None:
    device = FakeDevice(drift=10.0)
    shop = FakeWorkshop(device, lambda record: 12.0 if record == RECORDS[50] else 8.0)
    vendor = FakeProduct(device, "cublaslt-autotuning-tn", 10.0)
    (trial,) = environment(shop, RECORDS[50], baseline=lambda _: vendor).evaluate(PROBLEM, [RECORDS[0]], "long")
    assert trial.baseline == "cublaslt-autotuning-tn"
    for contender, factor in ((INCUMBENT, 1.5), ("cublaslt-autotuning-tn", 1.25)):
        ratio = trial.faster_than(contender)
        assert ratio is not None
        assert ratio.value == pytest.approx(factor, rel=0.02)
        assert ratio.low > 1


def test_one_binary_launched_in_one_way_is_timed_once() -> None:
    shop = FakeWorkshop(FakeDevice())
    record = RECORDS[0]
    relabelled = record.model_copy(update={"origin": record.origin.model_copy(update={"source": "another"})})
    other_launch = revise(record, raster_group=2)
    trials = environment(shop).evaluate(PROBLEM, [record, relabelled, other_launch])
    assert [entry for entry in shop.log if entry.startswith("open")] == [f"open {record.name}"] * 2
    assert [entry for entry in shop.log if entry.startswith("judge")] == [f"judge {record.name}"]
    assert trials[0].timings == trials[1].timings
    assert all(trial.measured for trial in trials)


def test_another_problems_record_is_illegal_here() -> None:
    stranger = next(iter(space.candidates(PROBLEM.model_copy(update={"m": 256})).records))
    (trial,) = environment(FakeWorkshop(FakeDevice())).evaluate(PROBLEM, [stranger])
    assert trial.outcome == "illegal"


def test_kernels_are_closed_and_the_card_is_named() -> None:
    device = FakeDevice()
    trials = environment(FakeWorkshop(device), RECORDS[1]).evaluate(PROBLEM, [RECORDS[0], RECORDS[30]])
    assert device.log.count("closed") == 3
    assert {trial.on for trial in trials} == {"NVIDIA H200"}


@pytest.mark.slow
def test_a_search_on_the_device_finds_the_faster_record() -> None:
    """The clock is a function of the record. The widest tile wins, by the gain that follows from the clock."""
    device = FakeDevice()
    shop = FakeWorkshop(device, lambda record: 20.0 - record.bn / 32)
    slow = next(contest for contest in RECORDS if contest.bn == 64)
    contest = search.Search(space.candidates(PROBLEM), slow)
    place = executor.InProcess(environment(shop, slow))
    search.run(contest, Random(0), place, lambda _: None, search.SearchLimits(24, 8))
    winner, gain = contest.winner, contest.gain
    assert winner is not None
    assert gain is not None
    assert winner.effort == "final"
    assert gain.value == pytest.approx((20 - 64 / 32) / (20 - winner.record["bn"] / 32), rel=1e-3)
    assert winner.record["bn"] == max(trial.record["bn"] for trial in contest.short_trials)
    assert contest.improved


def test_the_best_stored_baseline_is_the_fastest_that_was_measured() -> None:
    fast, slow = measured.timing("cublas-nn", [5.0]), measured.timing("cublas-tn", [6.0])
    kernel = measured.timing("cudal2gen", [4.0])
    measurement = measured.measurement((128, 256, 128), [kernel, slow, fast], acc="f32")
    environments: dict[str, Environment] = {measured.H200.id: measured.H200, ENVIRONMENT.id: ENVIRONMENT}
    assert best_baseline(PROBLEM, Measurements(environments, [measurement])) == "cublas-nn"
    assert best_baseline(PROBLEM.model_copy(update={"k": 64}), Measurements(environments, [measurement])) is None


def test_a_card_has_the_best_measured_baseline_of_each_problem_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without measurements it is the library's autotuning for B as the problem stores it."""
    made: list[tuple[str, str]] = []

    def contenders(names: list[str], acc: str, card: Any, tuned: Path) -> list[Any]:
        made.extend((name, acc) for name in names)
        return [FakeProduct(device, name, 5.0) for name in names]

    device, measured_problem = FakeDevice(), PROBLEM.model_copy(update={"m": 384})
    timings = [measured.timing("cudal2gen", [4.0]), measured.timing("cublas-nn", [5.0])]
    stored = measured.measurement((384, 256, 128), timings, acc="f32")
    monkeypatch.setattr(gpu, "connect", lambda index: device)
    monkeypatch.setattr(on_gpu, "DeviceWorkshop", lambda card: FakeWorkshop(device))
    monkeypatch.setattr(baselines, "contenders", contenders)
    monkeypatch.setattr(results, "measurements", lambda path: Measurements({measured.H200.id: measured.H200}, [stored]))
    connected = on_gpu.connect(0, lambda _: None)
    other_layout, other_acc = (PROBLEM.model_copy(update=change) for change in ({"layout": "nn"}, {"acc": "f16"}))
    problems = [measured_problem, PROBLEM, other_layout, other_acc]
    found = [connected._baseline(problem) for problem in problems * 2]
    names = ["cublas-nn", *(f"cublaslt-autotuning-{name}" for name in ("tn", "nn", "tn"))]
    assert [baseline.name for baseline in found if baseline is not None] == names * 2
    assert found[:4] == found[4:]
    assert made == [*zip(names, ("f32", "f32", "f32", "f16"), strict=True)]
