"""The instrument: order, statistics, L2 states, refusals, budget and resumption, on a device whose clock is ours."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from cudal2gen import bench, results
from cudal2gen.bench import Reference, Settings, TooGood, Work, baselines, measure, states, stratified
from cudal2gen.bench.check import bands
from cudal2gen.cli import options
from cudal2gen.generation import answers, catalog
from cudal2gen.kernel import Problem, Record
from cudal2gen.launch.gpu import alone
from cudal2gen.launch.launcher import LaunchError
from cudal2gen.launch.operands import Operands
from cudal2gen.results import choice, ratios
from kernelproof.ground.chips import GPUS, CardFacts
from tests import commands
from tests.cudal2gen.devices import ENVIRONMENT, FakeDevice, FakeKernel, Product
from tests.cudal2gen.paths import small

pytestmark = pytest.mark.torch


def problem(m: int, n: int, k: int, acc: str = "f32") -> Problem:
    return Problem(gpu="h200", acc=acc, layout="tn", m=m, n=n, k=k)  # type: ignore[arg-type]


def measured(
    device: FakeDevice, contenders: list[Any], work: Work, of: Problem, **settings: Any
) -> results.Measurement:
    (measurement,) = measure(device, of, contenders, [work], Settings(warmup_seconds=0.0, **settings))
    return measurement


EXCEEDED = Work("device", "exceeded")
COLD, HOT, SERVER = Work("device", "cold"), Work("device", "hot"), Work("server", "hot")
SMALL = problem(64, 64, 64)


def test_a_drifting_device_favours_nobody() -> None:
    """The card slows by a third during the measurement; in turns, the ratio stays what it is."""
    device = FakeDevice(drift=10.0)
    kernel, vendor = Product(device, "cudal2gen", 8.0), Product(device, "torch.matmul", 10.0)
    measurement = measured(device, [kernel, vendor], HOT, SMALL)
    timing = measurement.timing("torch.matmul")
    assert timing is not None
    assert timing.event_us[-1] / timing.event_us[0] > 1.3
    ratio = results.speedup(measurement, "torch.matmul")
    assert ratio is not None
    assert ratio.value == pytest.approx(1.25, rel=0.01)
    assert ratio.low <= 1.25 <= ratio.high


def test_rounds_are_mirrored_in_random_order() -> None:
    device = FakeDevice()
    names = ["a", "b", "c"]
    contenders = [Product(device, name, 5.0) for name in names]
    measured(device, contenders, HOT, SMALL, benchmark_seconds=1.0)
    order = [name for name in device.log if name in names]
    # The first calls and the warm-up of the graphs come before the rounds; a sample has a call to warm up for each.
    per_sample = 2 * bench.calls_per_sample(SMALL, ENVIRONMENT)
    start = 3 + 3 * per_sample
    rounds = [order[at] for at in range(start, start + 15 * 6 * per_sample, per_sample)]
    for at in range(0, len(rounds), 6):
        assert rounds[at : at + 3] == rounds[at + 3 : at + 6][::-1]
        assert sorted(rounds[at : at + 3]) == names
    assert len({tuple(rounds[at : at + 3]) for at in range(0, len(rounds), 6)}) > 1


def test_noise_has_an_interval_that_holds_the_truth() -> None:
    device = FakeDevice()
    kernel, vendor = Product(device, "cudal2gen", 8.0, noise=0.2), Product(device, "torch.matmul", 8.4, noise=0.2)
    ratio = results.speedup(measured(device, [kernel, vendor], HOT, SMALL), "torch.matmul")
    assert ratio is not None
    assert ratio.low < 1.05 < ratio.high
    assert ratio.high - ratio.low > 0.001


def test_cold_evicts_before_each_sample_and_uses_a_set_per_call() -> None:
    device = FakeDevice()
    measurement = measured(device, [Product(device, "cudal2gen", 8.0)], COLD, SMALL)
    (timing,) = measurement.timings
    assert timing.calls == bench.MAX_CALLS
    # One warm-up of the graph, then a sample for each eviction.
    assert device.evictions == len(timing.event_us) + 1
    assert timing.event_us == pytest.approx([8.0] * len(timing.event_us))


@pytest.mark.parametrize(("work", "sets"), [(COLD, bench.MAX_CALLS), (SERVER, bench.RACE_CALLS), (EXCEEDED, 1)])
def test_sets_of_operands(work: Work, sets: int) -> None:
    device = FakeDevice()
    set_counts = []
    operands = device.operands

    def watched(of: Problem, count: int, seed: int, products: int) -> Any:
        set_counts.append(count)
        return operands(of, count, seed, products)

    device.operands = watched  # type: ignore[method-assign]
    measured(device, [Product(device, "cudal2gen", 8.0)], work, SMALL)
    assert set_counts == [sets]


def test_states_of_the_l2() -> None:
    large = problem(256, 256, 256)
    assert states(SMALL, "device", 1 << 16) == ("cold", "hot")
    assert states(large, "device", 1 << 16) == ("exceeded",)
    assert states(SMALL, "server", 1 << 16) == ("hot",)


def test_the_host_is_inside_the_clock_of_the_paper_modes() -> None:
    device = FakeDevice()
    measurement = measured(
        device, [Product(device, "cudal2gen", 8.0)], SERVER, SMALL, target_qps=500.0, benchmark_seconds=2.0
    )
    (timing,) = measurement.timings
    # The fake synchronises in a microsecond of the host's time.
    assert timing.wall_us == pytest.approx([9.0] * len(timing.wall_us))
    assert timing.event_us == pytest.approx([8.0] * len(timing.event_us))
    assert timing.median_us == pytest.approx(9.0)
    assert measurement.target_qps == 500.0
    pauses = device.log.count("sleep")
    assert pauses == 2 * len(timing.wall_us)
    assert device.time / pauses == pytest.approx(1 / 500, rel=0.2)


def test_padding_is_inside_and_shown() -> None:
    device = FakeDevice()
    kernel = FakeKernel(device, small(gpu="h200", acc="f32"), 8.0, copies_us=3.0)
    (timing,) = measured(device, [kernel], HOT, SMALL).timings
    assert timing.padding_us == pytest.approx(3.0)
    assert timing.record == kernel.record.name


def test_conditions_are_read_in_each_round() -> None:
    device = FakeDevice()
    measurement = measured(device, [Product(device, "cudal2gen", 8000.0)], HOT, SMALL, benchmark_seconds=2.0)
    rounds = len(measurement.timings[0].event_us) / 2
    assert len(measurement.conditions.sm_mhz) == rounds
    assert measurement.conditions.throttle == ("SwPowerCap",)


@pytest.mark.parametrize("contender", ["cudal2gen", "cublas-nn"])
def test_better_than_the_hardware_stops_the_run(contender: str) -> None:
    slowed = ENVIRONMENT.model_copy(update={"max_sm_mhz": 1})
    device = FakeDevice(environment=slowed)
    slow, fast = Product(device, "torch.matmul", 500.0), Product(device, contender, 0.9)
    with pytest.raises(TooGood, match=rf"{contender} on 64_64_64 f32: 0.900 us, but NVIDIA H200 cannot .* 0.970 us"):
        measured(device, [slow, fast], HOT, SMALL)
    device = FakeDevice()
    with pytest.raises(TooGood, match=r"0.400 us, but .* less than 0.500 us"):
        measured(device, [Product(device, contender, 0.4)], HOT, SMALL)


def test_the_floor_of_a_cold_problem_is_its_reading() -> None:
    skinny = problem(64, 64, 8192)
    bandwidth = 2 * 3201e6 * 6144 / 8
    assert ENVIRONMENT.floor_us(skinny, cold=True) == pytest.approx(2 * 8192 * 128 / bandwidth * 1e6)
    assert ENVIRONMENT.floor_us(skinny, cold=False) == pytest.approx(2 * 64 * 64 * 8192 / (4096 * 132 * 1980e6) * 1e6)


def test_the_groups_of_a_product_share_its_rows() -> None:
    """Of a strided batch each product has all of m."""
    strided, grouped = (problem(64, 64, 8192).revised(batch=batch) for batch in ("strided", "grouped"))
    flops, a, b, d = 2 * 64 * 64 * 8192, 2 * 64 * 8192, 2 * 64 * 8192, 2 * 64 * 64
    assert (strided.flops_of(8), grouped.flops_of(8)) == (8 * flops, flops)
    assert (strided.traffic_of(8), grouped.traffic_of(8)) == (8 * (a + b + d), a + 8 * b + d)
    floors = [ENVIRONMENT.floor_us(each, cold=False, products=8) for each in (strided, grouped)]
    assert floors[0] == pytest.approx(8 * floors[1])


def spoil_one(operands: Any, launches: int) -> None:
    operands.d[63, 17] += 5


def spoil_late(operands: Any, launches: int) -> None:
    if launches > 100:
        operands.d[:] = 0


def unwritten(operands: Any, launches: int) -> None:
    operands.d[5] = float("nan")


@pytest.mark.parametrize("faulty", [spoil_one, spoil_late, unwritten])
def test_wrong_after_the_timing_is_no_result(faulty: Any) -> None:
    device = FakeDevice()
    measurement = measured(
        device, [Product(device, "cudal2gen", 8.0, faulty=faulty), Product(device, "b", 9.0)], HOT, SMALL
    )
    assert [timing.contender for timing in measurement.timings] == ["b"]
    assert measurement.absent["cudal2gen"].startswith("wrong result after the timing: an error of")


def test_every_tile_of_a_large_problem_is_checked() -> None:
    """A wrong 64x64 tile anywhere in D is found by the rows and columns that are compared."""
    rows = bands(16384)
    assert len(rows) == 256
    assert {row // 64 for row in rows} == set(range(256))
    assert len({row % 64 for row in rows}) > 16
    assert bands(100) == list(range(100))
    for extent in (257, 511, 700, 16400):
        edges = [extent * band // 256 for band in range(257)]
        assert all(edges[band] <= at < edges[band + 1] for band, at in enumerate(bands(extent))), extent
    assert sorted({col // 16 for col in bands(4096)}) == list(range(256))


@pytest.mark.parametrize("acc", ["f16", "f32"])
@pytest.mark.parametrize("k", [64, 4096])
def test_the_check_separates_rounding_from_faults(acc: str, k: int) -> None:
    """Rounding passes; half of k left out does not, be it in one tile of 16 by 16 or in all of D."""
    import torch

    torch.manual_seed(0)
    a, b = torch.randn(64, k).half(), torch.randn(64, k).half()
    exact = a.double() @ b.double().T
    if acc == "f32":
        rounded = exact.half()
    else:
        rounded = torch.zeros(64, 64).half()
        for at in range(0, k, 8):
            rounded = (rounded.double() + a[:, at : at + 8].double() @ b[:, at : at + 8].double().T).half()
    part = (a[:, : k // 2].double() @ b[:, : k // 2].double().T).half()
    tile = rounded.clone()
    tile[16:32, 48:] = part[16:32, 48:]
    device = FakeDevice()
    operands = Operands(a, b, b.T.contiguous(), torch.zeros(64, 64).half())
    reference = Reference(problem(64, 64, k, acc), operands)
    error, finding = reference.error(device, lambda: operands.d.copy_(rounded))
    assert finding == ""
    assert error == pytest.approx(float((rounded.double() - exact).abs().max()))
    for d in (tile, part):
        error, finding = reference.error(device, lambda d=d: operands.d.copy_(d))  # type: ignore[misc]
        assert finding.startswith("wrong result after the timing: an error of ")
        assert error == pytest.approx(float((d.double() - exact).abs().max()))


def test_who_cannot_run_is_named() -> None:
    device = FakeDevice()
    measurement = measured(
        device, [Product(device, "cudal2gen", 8.0), Product(device, "x", 1.0, absent="no such algorithm")], HOT, SMALL
    )
    assert measurement.absent == {"x": "no such algorithm"}


def test_stratified_order_is_a_sample_at_any_length() -> None:
    grid = [problem(m, n, k) for m in (64, 512, 4096) for n in (64, 512, 4096, 16384) for k in (64, 2048, 16384)]
    order = stratified(grid)
    assert sorted(order, key=lambda problem: problem.key) == sorted(grid, key=lambda problem: problem.key)
    classes = {problem.size_class for problem in grid}
    assert {problem.size_class for problem in order[: len(classes)]} == classes
    assert order[0].size_class == "large"
    assert stratified(grid, seed=1) != order


def records() -> list[Record]:
    return [small(gpu="h200", acc="f32", m=m, n=n, k=64, stages=2) for m in (64, 128) for n in (64, 128)]


def run(store: Path, device: FakeDevice, us: float = 8.0, **options: Any) -> bench.Outcome:
    progress = options.pop("progress", lambda *_: None)
    plan = bench.Plan(
        options.pop("records", records()),
        lambda record: FakeKernel(device, record, us),
        lambda record: FakeKernel(device, record, us).digest,
        options.pop("baselines", [Product(device, "torch.matmul", 9.0)]),
        options.pop("settings", Settings(warmup_seconds=0.0)),
        store,
        **options,
    )
    return bench.run(device, plan, progress)


@pytest.mark.slow
def test_what_is_stored_is_not_measured_again(tmp_path: Path) -> None:
    store = tmp_path / "m.jsonl"
    first = run(store, FakeDevice())
    assert (first.measured, first.stored, first.left, first.faults) == (len(stored(store)), 0, 0, [])
    again = run(store, FakeDevice())
    assert (again.measured, again.stored) == (0, 4)
    assert run(store, FakeDevice(), again=True).measured == first.measured
    other = ENVIRONMENT.model_copy(update={"id": "other", "driver": "590"})
    assert run(store, FakeDevice(environment=other)).measured == first.measured
    more = [Product(device := FakeDevice(), "torch.matmul", 9.0), Product(device, "cublas-nn", 9.0)]
    assert run(store, device, baselines=more).measured == first.measured
    assert run(store, FakeDevice()).measured == 0
    hosted = Settings(protocols=("offline",), warmup_seconds=0.0, benchmark_seconds=0.001)
    assert run(store, FakeDevice(), settings=hosted).measured == 4


def test_other_data_of_the_same_binary_is_measured_again(tmp_path: Path) -> None:
    store = tmp_path / "m.jsonl"
    narrow, wide = (
        small(gpu="h200", acc="f32", m=64, n=160, k=64, stages=2, raster="zsplit", swizzle_stride=stride)
        for stride in (32, 64)
    )
    assert narrow.name == wide.name
    for record, measured in ((narrow, 2), (narrow, 0), (wide, 2)):
        assert run(store, FakeDevice(), records=[record]).measured == measured
    assert [measurement.options for measurement in stored(store)[1:3]] == [
        {"swizzle_stride": 32},
        {"swizzle_stride": 64},
    ]


def stored(path: Path) -> list[results.Measurement]:
    return results.measurements(path).measurements


@pytest.mark.slow
def test_a_budget_ends_the_run_and_says_what_is_left(tmp_path: Path) -> None:
    steps = []
    device = FakeDevice()
    settings = Settings(warmup_seconds=0.0, benchmark_seconds=0.5)
    outcome = run(
        tmp_path / "m.jsonl", device, us=2000.0, settings=settings, budget_seconds=6.0,
        progress=lambda *step: steps.append(step),
    )  # fmt: skip
    assert 0 < outcome.left < 4
    assert device.time < 6.0
    assert [done for done, _, _ in steps] == list(range(1, 5 - outcome.left))
    assert steps[-1][2] <= 6.0 - device.time + 1e-6
    assert run(tmp_path / "m.jsonl", device, us=2000.0, settings=settings).stored == 4 - outcome.left


@pytest.mark.slow
def test_the_device_is_warmed_up_before_the_first_problem_alone(tmp_path: Path) -> None:
    device = FakeDevice()
    opened_at: list[float] = []
    first_calls: list[float] = []

    def note(operands: Any, launches: int) -> None:
        if launches == 1:
            first_calls.append(device.time)

    def open_kernel(record: Record) -> FakeKernel:
        opened_at.append(device.time)
        return FakeKernel(device, record, 8.0, faulty=note)

    store, settings = tmp_path / "m.jsonl", Settings(warmup_seconds=2.0)
    outcome = bench.run(device, bench.Plan(records(), open_kernel, lambda record: record.name, [], settings, store))
    assert (outcome.measured, len(first_calls)) == (8, 4)
    waits = [call - start for start, call in zip(opened_at, first_calls, strict=True)]
    assert 2.0 < waits[0] < 2.1
    assert max(waits[1:]) < 0.1
    assert device.log[: device.log.index("cudal2gen")] == ["evict"] * device.log.index("cudal2gen")


def test_the_time_left_is_counted_by_class() -> None:
    large, other_large, tiny = problem(4096, 4096, 4096), problem(4096, 4096, 8192), problem(64, 64, 64)
    assert large.size_class == other_large.size_class != tiny.size_class
    clock = [100.0]
    left = bench.TimeLeft(lambda: clock[0], 98.0, [large, other_large, tiny, tiny], budget_seconds=None)
    assert left.seconds == 4.0, "a second each, as long as nothing was measured"
    with left.spent_on(large):
        clock[0] += 10
    assert left.seconds == 30.0, "of another class, the mean of all"
    with left.spent_on(tiny):
        clock[0] += 2
    assert (left.expected(large.size_class), left.expected(tiny.size_class)) == (10.0, 2.0)
    assert left.seconds == 12.0
    with suppress(RuntimeError), left.spent_on(tiny):
        clock[0] += 50
        raise RuntimeError
    assert left.seconds == 10.0, "one that failed is not left, and says nothing of others"
    assert left.allows(large)
    limited = bench.TimeLeft(lambda: clock[0], clock[0] - 5, [large, tiny], budget_seconds=9.0)
    with limited.spent_on(tiny):
        clock[0] += 3
    assert limited.seconds == 1.0, "the budget ends first: 5 and 3 seconds of 9 are spent"
    assert not limited.allows(large)
    generous = bench.TimeLeft(lambda: clock[0], clock[0], [large], budget_seconds=1.0)
    assert generous.allows(large), "a problem that takes just what is left"
    assert generous.seconds == 1.0


@pytest.mark.slow
def test_a_kernel_that_stops_the_device_is_not_tried_again(tmp_path: Path) -> None:
    class Stopped(FakeDevice):
        """After an error the device answers nothing else."""

        stopped = False

        def synchronize(self) -> None:
            if self.stopped:
                raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
            super().synchronize()

    class Unloaded(FakeKernel):
        def close(self) -> None:
            if device.stopped:
                raise LaunchError(700, "an illegal memory access was encountered")

    def crash(operands: Any, launches: int) -> None:
        device.stopped = True

    device = Stopped()
    first = stratified(record.problem for record in records())[0]

    def open_kernel(record: Record) -> FakeKernel:
        return Unloaded(device, record, 8.0, faulty=crash if record.problem == first else None)

    def go() -> bench.Outcome:
        store, settings = tmp_path / "m.jsonl", Settings(warmup_seconds=0.0)
        plan = bench.Plan(records(), open_kernel, lambda record: open_kernel(record).digest, [], settings, store)
        return bench.run(device, plan)

    with pytest.raises(bench.Stopped, match=f"{first.mnk}: .* stopped the device: CUDA error: an illegal"):
        go()
    device.stopped = False
    outcome = go()
    assert (outcome.stored, outcome.faults) == (1, [])
    assert len({measurement.mnk for measurement in stored(tmp_path / "m.jsonl")}) == 4


@pytest.mark.slow
def test_what_the_device_survives_is_the_problems_fault(tmp_path: Path) -> None:
    """Too little memory, say: the others are measured, and this one is tried again."""
    device = FakeDevice()
    operands, first = device.operands, stratified(record.problem for record in records())[0]

    def short(of: Problem, count: int, seed: int, products: int = 1) -> Any:
        if of == first:
            raise RuntimeError("CUDA out of memory\nmore")
        return operands(of, count, seed, products)

    device.operands = short  # type: ignore[method-assign]
    outcome = run(tmp_path / "m.jsonl", device)
    assert outcome.faults == [f"{first.mnk}: CUDA out of memory"]
    assert len({measurement.mnk for measurement in stored(tmp_path / "m.jsonl")}) == 3
    assert run(tmp_path / "m.jsonl", FakeDevice()).stored == 3


def test_a_baseline_that_fails_in_its_own_way_is_absent() -> None:
    def fail(operands: Any, launches: int) -> None:
        raise ArithmeticError("CUBLAS_STATUS_NOT_SUPPORTED")

    device = FakeDevice()
    measurement = measured(
        device, [Product(device, "cudal2gen", 8.0), Product(device, "b", 9.0, faulty=fail)], HOT, SMALL
    )
    assert measurement.absent == {"b": "ArithmeticError: CUBLAS_STATUS_NOT_SUPPORTED"}


CHILD = """
import sys, time
import torch
from pathlib import Path
from tests.cudal2gen import test_bench, devices
class Slow(devices.FakeDevice):
    def evict(self):
        time.sleep(0.0005)
        super().evict()
print("ready", flush=True)
test_bench.run(Path(sys.argv[1]), Slow())
"""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@pytest.mark.slow
def test_kills_at_random_lose_no_finished_measurement(tmp_path: Path) -> None:
    store = tmp_path / "m.jsonl"
    rng = random.Random(5)
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    lines: list[str] = []
    for number in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(store)], stdout=subprocess.PIPE, env=environment, text=True
        )
        assert child.stdout is not None
        child.stdout.readline()
        before, last = _size(store), time.monotonic() + 20
        # Two of three are let come to a measurement, however slow the machine is.
        while number % 3 and child.poll() is None and _size(store) == before and time.monotonic() < last:
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.05 if number % 3 else 0.3))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        now = store.read_bytes().decode().splitlines(keepends=True) if store.exists() else []
        whole = [line for line in now if line.endswith("\n")]
        assert whole[: len(lines)] == lines
        lines = whole
    done = subprocess.run([sys.executable, "-c", CHILD, str(store)], env=environment, check=True, capture_output=True)
    assert done.returncode == 0
    counts = Counter((measurement.mnk, measurement.l2) for measurement in stored(store))
    assert set(counts.values()) == {1}
    assert len({mnk for mnk, _ in counts}) == 4
    assert len(lines) > 3, "the kills came while it measured"


def test_medians_and_ratios_by_hand() -> None:
    device = FakeDevice()
    measurement = measured(
        device,
        [Product(device, "cudal2gen", 8.0), Product(device, "cublas-nn", 12.0), Product(device, "cublas-tn", 10.0)],
        HOT,
        SMALL,
    )
    assert median(measurement.timings[0].event_us) == pytest.approx(8.0)
    best = measurement.timing("cublas-max")
    assert best is not None
    assert best.contender == "cublas-tn"
    assert measurement.timing("cublaslt-heuristic-max") is None
    ratio = results.speedup(measurement, "cublas-max")
    assert ratio is not None
    assert ratio == pytest.approx((1.25, 1.25, 1.25))
    mean = ratios.geomean([2.0, 0.5, 4.0])
    assert mean is not None
    assert mean.value == pytest.approx(math.exp(math.log(4.0) / 3))
    assert mean.low < mean.value < mean.high
    assert ratios.geomean([]) is None


class FakeCard(FakeDevice):
    """What the command line opens in the place of a GPU."""

    facts = CardFacts.of("NVIDIA H200", (9, 0), 132)
    records_of = "h200"

    def __init__(self, index: int) -> None:
        super().__init__()

    def check(self, record: Record) -> None:
        assert record.arch.startswith("sm_90")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The bench command on a fake card; answers exit code, output, and errors."""
    from typer.testing import CliRunner

    from cudal2gen import cli
    from cudal2gen.bench import baselines
    from cudal2gen.launch import gpu
    from cudal2gen.validator.device import BuiltKernel

    def opened(built: BuiltKernel, card: FakeCard) -> FakeKernel:
        kernel = FakeKernel(card, built.record, 8.0)
        kernel.digest = built.artifact.digest
        return kernel

    monkeypatch.setattr(gpu, "connect", FakeCard)
    monkeypatch.setattr(BuiltKernel, "open", opened)
    real = baselines.contenders
    monkeypatch.setattr(baselines, "_check_vendor", lambda: None)

    def contenders(names: list[str], acc: Any, device: Any, tuned: Path) -> list[Any]:
        real(names, acc, device, tuned)
        return [Product(device, name, 9.0) for name in names]

    monkeypatch.setattr(baselines, "contenders", contenders)

    monkeypatch.setenv("CUDAL2GEN_RESULTS", str(tmp_path))

    def invoke(*arguments: str) -> Any:
        out = () if any("records=" in word for word in arguments) else ("--out", str(tmp_path / "m.jsonl"))
        return CliRunner().invoke(cli.app, ["bench", "--timing", "warmup=0", *out, *arguments])

    return invoke


@pytest.mark.slow
def test_the_command_measures_and_resumes(command: Any, tmp_path: Path) -> None:
    chosen = ["--mnk", "64_64_64", "--mnk", "128_64_64", "--acc", "f32"]
    done = command(*chosen)
    assert done.exit_code == 0, done.output
    assert "2 problems, 0 of them stored before: 4 measurements added" in done.stdout
    assert "0 problems left, 0 faults" in done.stdout
    assert {measurement.gpu for measurement in stored(tmp_path / "m.jsonl")} == {"h200"}
    assert stored(tmp_path / "m.jsonl")[0].contenders[:2] == ["cudal2gen", "torch.matmul"]
    assert len(stored(tmp_path / "m.jsonl")[0].contenders) == 11
    assert "2 of them stored before: 0 measurements" in command(*chosen).stdout
    assert "0 of them stored before: 4 measurements" in command(*chosen, "--again").stdout
    hosted = command(
        "--mnk", "64_64_64", "--acc", "f32", "--timing", "protocol=server+offline", "--timing", "seconds=0.01"
    )
    assert "2 measurements added" in hosted.stdout
    few = command("--mnk", "64_64_64", "--acc", "f32", "--again", "--baselines", "cublas-nn,cublas-tn")
    assert few.exit_code == 0
    assert stored(tmp_path / "m.jsonl")[-1].contenders == ["cudal2gen", "cublas-nn", "cublas-tn", "cublas-max"]


def test_missing_vendor_packages_are_reported_before_anything_is_compiled(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cudal2gen.bench import baselines
    from cudal2gen.generation import compiler
    from cudal2gen.launch import gpu

    def missing() -> None:
        raise gpu.GpuError("cuBLAS and cuBLASLt cannot be called")

    compiled: list[Any] = []
    monkeypatch.setattr(baselines, "_check_vendor", missing)
    monkeypatch.setattr(compiler, "build", lambda *records, **_: compiled.append(records))
    done = command("--mnk", "64_64_64", "--acc", "f32")
    assert (done.exit_code, compiled) == (3, [])
    assert done.stderr.splitlines()[-1] == "error: cuBLAS and cuBLASLt cannot be called"


def test_a_stopped_device_is_one_line_of_the_command(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise bench.Stopped("64_64_64: k or a baseline stopped the device: CUDA error: an illegal memory access")

    monkeypatch.setattr(bench, "run", stop)
    done = command("--mnk", "64_64_64", "--acc", "f32")
    assert (done.exit_code, done.stderr.splitlines()[-1][:26]) == (1, "error: 64_64_64: k or a ba")


def test_a_measurement_is_of_the_card_that_takes_it(command: Any, tmp_path: Path) -> None:
    done = command("--mnk", "64_64_64", "--acc", "f32", "--gpu", "h100")
    assert done.exit_code == 2
    assert "h100: this is NVIDIA H200, and measurements are of the card that takes them; leave out" in done.stderr
    assert not (tmp_path / "m.jsonl").exists()


@pytest.mark.slow
def test_a_card_without_records_is_measured_with_the_nearest_ones_under_its_own_name(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pcie = CardFacts.of("NVIDIA H100 PCIe", (9, 0), 114)
    own = {"id": "pcie", "gpu": "", "name": pcie.name, "sms": pcie.sms}
    monkeypatch.setattr(FakeCard, "facts", pcie)
    monkeypatch.setattr(FakeCard, "records_of", pcie.stand_ins(GPUS)[0])
    monkeypatch.setattr(
        FakeCard, "__init__", lambda self, _: FakeDevice.__init__(self, 0.0, ENVIRONMENT.model_copy(update=own))
    )
    done = command("--mnk", "64_64_64", "--acc", "f32", "--baselines", "torch.matmul")
    assert done.exit_code == 0, done.output
    assert (
        "NVIDIA H100 PCIe (sm_90, 114 SMs) has no records of its own: measuring those of h100, under its" in done.stderr
    )
    measured = results.measurements(tmp_path / "m.jsonl")
    assert {row.gpu for row in measured.measurements} == {"h100"}
    assert [(card.gpu, card.name, card.sms) for card in measured.environments.values()] == [("", pcie.name, 114)]
    # So no pack, and no choice, of an H100 takes what another card measured.
    records = answers.measured_records(measured.measurements[0].problem, measured)
    assert choice.tabulate("h100", records, measured).rows == []
    whole = {id_: card.model_copy(update={"gpu": "h100"}) for id_, card in measured.environments.items()}
    assert len(choice.tabulate("h100", records, measured._replace(environments=whole)).rows) == 1


@pytest.mark.slow
def test_the_command_takes_another_gpus_records(command: Any, tmp_path: Path) -> None:
    done = command("--mnk", "64_64_64", "--acc", "f32", "--where", "records=rtx3090", "--baselines", "none")
    assert done.exit_code == 0, done.output
    record = catalog.find(Problem(gpu="rtx3090", acc="f32", layout="tn", m=64, n=64, k=64)).record
    timing = stored(tmp_path / "rtx3090-records.jsonl")[0].timings[0]
    assert timing.record == record.name
    assert not (tmp_path / "measurements.jsonl").exists(), "they would replace those of the card's own records"
    odd = command("--mnk", "65_64_64", "--acc", "f32", "--where", "records=rtx3090", "--baselines", "none")
    assert odd.exit_code == 0, odd.output
    assert "that of rtx3090 64_64_64 stands in, by mma.sync at 62% of h200's tensor cores, predicated" in odd.stderr
    assert stored(tmp_path / "rtx3090-records.jsonl")[-1].mnk == "65_64_64"


@pytest.mark.slow
def test_the_command_measures_a_list_of_problems_at_their_own_sizes(command: Any, tmp_path: Path) -> None:
    """And what was measured is explained: by the record that was made for it."""
    problems = tmp_path / "problems.jsonl"
    line = '{"gpu":"h200","acc":"f32","layout":"tn","m":%d,"n":%d,"k":%d,"count":2}\n'
    problems.write_text(line % (17, 96, 72) + line % (64, 64, 64) + line.replace("tn", "nn") % (64, 64, 64))
    done = command("--where", f"problems={problems}", "--acc", "f32")
    assert done.exit_code == 0, done.output
    assert "1 problems of" in done.stderr
    assert "are not for h200 f32 tn, and left out" in done.stderr
    assert "no record for h200 f32 tn 17_96_72; taking that of" in done.stderr
    assert {measurement.mnk for measurement in stored(tmp_path / "m.jsonl")} == {"17_96_72", "64_64_64"}
    arguments = [
        "explain",
        "--mnk",
        "17_96_72",
        "--gpu",
        "h200",
        "--acc",
        "f32",
        "--from",
        str(tmp_path / "m.jsonl"),
    ]
    explanation = commands.run(*arguments).stdout
    assert "of 17_96_72; launched as 17_96_72, no copies" in explanation
    assert "17_96_72 was measured: 1.125x" in explanation
    assert "no problem for h200 f16 tn" in command("--where", f"problems={problems}", "--acc", "f16").stderr
    assert "no catalog" not in command("--where", f"problems={tmp_path}/none.jsonl", "--acc", "f32").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --mnk M_N_K, --all, --class NAME, --sample N and --problems FILE"),
        (["--all", "--where", "sample=3"], "give one of"),
        (["--mnk", "64_64"], "expected three sizes"),
        (
            ["--mnk", "64_64_64", "--timing", "protocol=hot"],
            "invalid value for '--timing protocol': 'hot' is not one of 'device', 'offline', 'server'",
        ),
        (["--mnk", "64_64_64", "--budget", "8x"], "invalid value for '--budget': '8x' is not a duration"),
        (["--mnk", "64_64_64", "--budget", "-1m"], "invalid value for '--budget': '-1m' is not a duration"),
        (
            ["--mnk", "64_64_64", "--baselines", "cublaslt"],
            "invalid value for '--baselines': 'cublaslt' is not one of 'torch.matmul'",
        ),
    ],
)
def test_what_the_command_refuses(command: Any, arguments: list[str], message: str) -> None:
    done = command(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize(("text", "seconds"), [("8m", 480.0), ("90s", 90.0), ("1.5h", 5400.0), ("7", 7.0)])
def test_durations(text: str, seconds: float) -> None:
    assert options.seconds(text) == seconds


def test_two_at_once_would_measure_each_other(command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDAL2GEN_CACHE_DIR", str(tmp_path / "cache"))
    chosen = ["--mnk", "64_64_64", "--acc", "f32", "--baselines", "none"]
    with alone(0):
        refused = command(*chosen)
    assert refused.exit_code == 3
    assert "another process measures on device 0" in refused.stderr
    assert command(*chosen).exit_code == 0


def test_without_a_gpu_the_command_says_so() -> None:
    done = commands.run("bench", "--mnk", "64_64_64")
    assert done.returncode == 3
    assert done.stderr.startswith("error: torch sees no CUDA device; without one, the emulator runs kernels")


# --- fused and batched problems ---


class Timed:
    """A baseline that torch computes on the CPU, and that takes ``us`` microseconds. ``spoils``: what it leaves out."""

    def __init__(self, device: FakeDevice, name: str, us: float, **spoils: Any) -> None:
        (self.contender,) = baselines.contenders([name], "f32", device, Path("none"))
        self.device, self.name, self.us, self.spoils = device, name, us, spoils

    detail = ""

    def prepare(self, problem: Problem, race: Any) -> None:
        self.contender.prepare(problem, race)

    def bind(self, operands: Operands) -> Any:
        call = self.contender.bind(replace(operands, **self.spoils))

        def timed() -> Any:
            answer = call()
            self.device.spend(self.us, self.name)
            return answer

        return timed


FUSIONS = ["bias_n+silu", "alpha+bias_m+residual+gelu", "bias_n+relu", "residual", "bias_n+residual+gelu_tanh"]


@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_fused_problem_is_measured_against_what_torch_has_for_it(fusion: str) -> None:
    device, of = FakeDevice(), SMALL.revised(fusion=fusion)
    names = baselines.usual(of)
    assert names == ("torch.unfused", "torch.epilogue")
    measurement = measured(device, [Timed(device, name, 9.0) for name in names], COLD, of)
    assert measurement.problem == of
    unfused = measurement.timing("torch.unfused")
    assert unfused is not None
    assert 0 < unfused.error < 0.1
    exists = fusion in ("bias_n+relu", "residual")
    assert measurement.absent == ({} if exists else {"torch.epilogue": f"torch has no epilogue for {fusion}"})
    again = results.Measurement.model_validate_json(measurement.model_dump_json())
    assert again == measurement
    assert again.flops == SMALL.flops


def test_a_batch_counts_all_its_products() -> None:
    device, of = FakeDevice(), SMALL.revised(batch="strided")
    assert baselines.usual(of) == ("torch.bmm",)
    measurement = measured(device, [Timed(device, "torch.bmm", 9.0)], COLD, of, products=5)
    assert (measurement.products, measurement.flops) == (5, 5 * SMALL.flops)
    assert measurement.types == "f32 batched x5"
    assert '"products":5' in measurement.model_dump_json()
    slow = ENVIRONMENT.model_copy(update={"max_sm_mhz": 1})
    of_five, of_single = (slow.floor_us(of, cold=False, products=products) for products in (5, 1))
    assert of_five == pytest.approx(5 * of_single)
    device = FakeDevice(environment=slow)
    with pytest.raises(TooGood, match=r"torch.bmm on 64_64_64 f32: 3.000 us, but .* less than 4.8"):
        measured(device, [Timed(device, "torch.bmm", 3.0)], HOT, of, products=5)


@pytest.mark.parametrize(
    ("fusion", "spoils"),
    [("bias_n+silu", {"bias": torch.zeros(64).half()}), ("alpha", {"alpha": 1.0}), ("residual", {"beta": 0.5})],
)
def test_a_part_that_a_contender_leaves_out_is_noticed(fusion: str, spoils: dict[str, Any]) -> None:
    device = FakeDevice()
    contender = Timed(device, "torch.unfused", 9.0, **spoils)
    measurement = measured(device, [contender], COLD, SMALL.revised(fusion=fusion))
    assert "wrong result after the timing" in measurement.absent["torch.unfused"]


def test_groups_are_measured_against_torchs() -> None:
    device, of = FakeDevice(), SMALL.revised(batch="grouped", ab="bf16")
    assert baselines.usual(of) == ("torch.grouped_mm",)
    measurement = measured(device, [Timed(device, "torch.grouped_mm", 9.0)], COLD, of, products=3)
    assert measurement.absent == {}
    assert 0 < measurement.timings[0].error < 0.2
    (operands,) = device.operands(of, 1, 0, 3)
    reference = Reference(of, operands)

    def product(late: int) -> Any:
        return torch._grouped_mm(operands.a, operands.b_nn, offs=operands.ends + late)

    assert reference.error(device, lambda: product(0))[1] == ""
    assert "wrong result" in reference.error(device, lambda: product(-1))[1]


def test_a_wrong_product_of_a_batch_is_noticed() -> None:
    device, of = FakeDevice(), SMALL.revised(batch="strided")
    (operands,) = device.operands(of, 1, 0, 5)
    reference = Reference(of, operands)

    def bmm() -> None:
        torch.bmm(operands.a, operands.b_nn, out=operands.d)

    assert reference.error(device, bmm)[1] == ""
    for product in (0, 2, 4):

        def spoiled(product: int = product) -> None:
            bmm()
            operands.d[product, 5] += 1.0

        assert "wrong result" in reference.error(device, spoiled)[1]


def test_a_kernel_may_round_once() -> None:
    """What stores between its parts is within the looser bound, not within that of a kernel."""
    device, of = FakeDevice(), problem(64, 64, 16).revised(fusion="alpha+bias_n+residual")
    (operands,) = device.operands(of, 1, 0)
    timed = Timed(device, "torch.unfused", 9.0)
    timed.prepare(of, None)
    reference, call = Reference(of, operands), timed.bind(operands)
    assert "wrong result" in reference.error(device, call, strict=True)[1]
    assert reference.error(device, call, strict=False)[1] == ""


def test_a_batch_of_another_number_of_products_is_not_stored_yet() -> None:
    environment = ENVIRONMENT.model_copy(update={"l2_bytes": 1 << 20})
    device, record = FakeDevice(environment=environment), small(gpu="h200", acc="f32", batch="strided")
    stored = measured(device, [FakeKernel(device, record, 8.0)], COLD, record.problem, products=5)
    for products, left in ((5, ["hot"]), (4, ["cold", "hot"])):
        settings = Settings(products=products)
        work = bench.schedule.pending(record, record.name, (), settings, environment, [stored])
        assert [item.l2 for item in work] == left
