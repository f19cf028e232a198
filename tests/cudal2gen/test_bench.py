"""Proves how ``bench`` orders, times and resumes measurements, and what it refuses, on a device whose clock the test
sets.
"""

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
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from cudal2gen import bench, results
from cudal2gen.bench import Condition, Reference, Settings, TooGood, measure, states, stratified
from cudal2gen.bench.check import bands
from cudal2gen.kernel import Problem, Record
from cudal2gen.launch.launcher import LaunchError
from cudal2gen.launch.operands import Operands
from cudal2gen.results import ratios
from tests.cudal2gen.devices import ENVIRONMENT, FakeDevice, FakeKernel, FakeProduct
from tests.cudal2gen.paths import small

pytestmark = pytest.mark.torch


def problem(m: int, n: int, k: int, acc: str = "f32") -> Problem:
    """The problem of these sizes on an H200 in layout tn."""
    return Problem(gpu="h200", acc=acc, layout="tn", m=m, n=n, k=k)  # type: ignore[arg-type]


def measure_one(
    device: FakeDevice, contenders: list[Any], work: Condition, of: Problem, **settings: Any
) -> results.Measurement:
    """The measurement of one problem in one condition, without warm-up."""
    (measurement,) = measure(device, of, contenders, [work], Settings(warmup_seconds=0.0, **settings))
    return measurement


# A protocol and a state of the L2.
EXCEEDED = Condition("device", "exceeded")
# Conditions of a measurement: who measures, and whether the L2 is cold.
COLD, HOT, SERVER = Condition("device", "cold"), Condition("device", "hot"), Condition("server", "hot")
SMALL = problem(64, 64, 64)


def test_a_drifting_device_favours_nobody() -> None:
    """The card slows by a third during the measurement. Since contenders alternate, the ratio is not affected."""
    device = FakeDevice(drift=10.0)
    kernel, vendor = FakeProduct(device, "cudal2gen", 8.0), FakeProduct(device, "torch.matmul", 10.0)
    measurement = measure_one(device, [kernel, vendor], HOT, SMALL)
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
    contenders = [FakeProduct(device, name, 5.0) for name in names]
    measure_one(device, contenders, HOT, SMALL, benchmark_seconds=1.0)
    order = [name for name in device.log if name in names]
    # The first calls and the graphs' warm-up precede the rounds. Each call of a sample is preceded by one that warms
    # up.
    per_sample = 2 * bench.calls_per_sample(SMALL, ENVIRONMENT)
    start = 3 + 3 * per_sample
    rounds = [order[at] for at in range(start, start + 15 * 6 * per_sample, per_sample)]
    for at in range(0, len(rounds), 6):
        assert rounds[at : at + 3] == rounds[at + 3 : at + 6][::-1]
        assert sorted(rounds[at : at + 3]) == names
    assert len({tuple(rounds[at : at + 3]) for at in range(0, len(rounds), 6)}) > 1


def test_noise_has_an_interval_that_holds_the_truth() -> None:
    device = FakeDevice()
    kernel, vendor = (
        FakeProduct(device, "cudal2gen", 8.0, noise=0.2),
        FakeProduct(device, "torch.matmul", 8.4, noise=0.2),
    )
    ratio = results.speedup(measure_one(device, [kernel, vendor], HOT, SMALL), "torch.matmul")
    assert ratio is not None
    assert ratio.low < 1.05 < ratio.high
    assert ratio.high - ratio.low > 0.001


def test_cold_evicts_before_each_sample_and_uses_a_set_per_call() -> None:
    device = FakeDevice()
    measurement = measure_one(device, [FakeProduct(device, "cudal2gen", 8.0)], COLD, SMALL)
    (timing,) = measurement.timings
    assert timing.calls == bench.MAX_CALLS
    # The graph is warmed up once; then each eviction is followed by a sample.
    assert device.evictions == len(timing.event_us) + 1
    assert timing.event_us == pytest.approx([8.0] * len(timing.event_us))


@pytest.mark.parametrize(("work", "sets"), [(COLD, bench.MAX_CALLS), (SERVER, bench.RACE_SETS), (EXCEEDED, 1)])
def test_sets_of_operands(work: Condition, sets: int) -> None:
    device = FakeDevice()
    set_counts = []
    operands = device.operands

    def watched(of: Problem, count: int, seed: int, products: int) -> Any:
        set_counts.append(count)
        return operands(of, count, seed, products)

    device.operands = watched  # type: ignore[method-assign]
    measure_one(device, [FakeProduct(device, "cudal2gen", 8.0)], work, SMALL)
    assert set_counts == [sets]


def test_states_of_the_l2() -> None:
    large = problem(256, 256, 256)
    assert states(SMALL, "device", 1 << 16) == ("cold", "hot")
    assert states(large, "device", 1 << 16) == ("exceeded",)
    assert states(SMALL, "server", 1 << 16) == ("hot",)


def test_the_host_is_inside_the_clock_of_the_paper_modes() -> None:
    device = FakeDevice()
    measurement = measure_one(
        device, [FakeProduct(device, "cudal2gen", 8.0)], SERVER, SMALL, target_qps=500.0, benchmark_seconds=2.0
    )
    (timing,) = measurement.timings
    # The fake device takes a microsecond of the host's time to synchronise.
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
    (timing,) = measure_one(device, [kernel], HOT, SMALL).timings
    assert timing.padding_us == pytest.approx(3.0)
    assert timing.record == kernel.record.name


def test_conditions_are_read_in_each_round() -> None:
    device = FakeDevice()
    measurement = measure_one(device, [FakeProduct(device, "cudal2gen", 8000.0)], HOT, SMALL, benchmark_seconds=2.0)
    rounds = len(measurement.timings[0].event_us) / 2
    assert len(measurement.conditions.sm_mhz) == rounds
    assert measurement.conditions.throttle == ("SwPowerCap",)


@pytest.mark.parametrize("contender", ["cudal2gen", "cublas-nn"])
def test_better_than_the_hardware_stops_the_run(contender: str) -> None:
    """At 1 MHz, 2 * 64**3 FLOP take 0.970 us on 132 SMs of 4096 FLOP a clock. No kernel at all takes less than
    0.5 us."""
    slowed = ENVIRONMENT.model_copy(update={"max_sm_mhz": 1})
    device = FakeDevice(environment=slowed)
    slow, fast = FakeProduct(device, "torch.matmul", 500.0), FakeProduct(device, contender, 0.9)
    with pytest.raises(TooGood, match=r"0\.900 us.* 0\.970 us") as caught:
        measure_one(device, [slow, fast], HOT, SMALL)
    assert caught.value.contender == contender
    device = FakeDevice()
    with pytest.raises(TooGood, match=r"0\.400 us.* 0\.500 us"):
        measure_one(device, [FakeProduct(device, contender, 0.4)], HOT, SMALL)


def test_the_floor_of_a_cold_problem_is_its_reading() -> None:
    # The bus has 6144 bits and two transfers a clock of 3201 MHz. A and B have 8192 * 64 halves each. Without the
    # reading, the tensor cores of 132 SMs take the time of 4096 FLOP a clock at 1980 MHz.
    skinny = problem(64, 64, 8192)
    bandwidth = 2 * 3201e6 * 6144 / 8
    assert ENVIRONMENT.floor_us(skinny, cold=True) == pytest.approx(2 * 8192 * 128 / bandwidth * 1e6)
    assert ENVIRONMENT.floor_us(skinny, cold=False) == pytest.approx(2 * 64 * 64 * 8192 / (4096 * 132 * 1980e6) * 1e6)


def test_the_groups_of_a_product_share_its_rows() -> None:
    """In a strided batch each product has all m rows; groups share them."""
    strided, grouped = (problem(64, 64, 8192).revised(batch=batch) for batch in ("strided", "grouped"))
    flops, a, b, d = 2 * 64 * 64 * 8192, 2 * 64 * 8192, 2 * 64 * 8192, 2 * 64 * 64
    assert (strided.flops_of(8), grouped.flops_of(8)) == (8 * flops, flops)
    assert (strided.traffic_of(8), grouped.traffic_of(8)) == (8 * (a + b + d), a + 8 * b + d)
    floors = [ENVIRONMENT.floor_us(each, cold=False, products=8) for each in (strided, grouped)]
    assert floors[0] == pytest.approx(8 * floors[1])


# Faults of contenders, which are called after each launch. ``launches``: their number so far.
def spoil_one(operands: Any, launches: int) -> None:
    """Changes one element of D after each launch."""
    operands.d[63, 17] += 5


def spoil_late(operands: Any, launches: int) -> None:
    """Clears D from the 101st launch on, which is after the first check."""
    if launches > 100:
        operands.d[:] = 0


def leave_row_unwritten(operands: Any, launches: int) -> None:
    """Leaves a row of D unwritten."""
    operands.d[5] = float("nan")


@pytest.mark.parametrize("faulty", [spoil_one, spoil_late, leave_row_unwritten])
def test_wrong_after_the_timing_is_no_result(faulty: Any) -> None:
    device = FakeDevice()
    measurement = measure_one(
        device, [FakeProduct(device, "cudal2gen", 8.0, faulty=faulty), FakeProduct(device, "b", 9.0)], HOT, SMALL
    )
    assert [timing.contender for timing in measurement.timings] == ["b"]
    assert measurement.absent["cudal2gen"].startswith("wrong result after the timing: an error of")


def test_every_tile_of_a_large_problem_is_checked() -> None:
    """The compared rows and columns find a wrong 64x64 tile anywhere in D."""
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
    """Rounding passes. A product without half of k fails, be it in one tile of 16 by 16 or in all of D."""

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
    measurement = measure_one(
        device,
        [FakeProduct(device, "cudal2gen", 8.0), FakeProduct(device, "x", 1.0, absent="no such algorithm")],
        HOT,
        SMALL,
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
    """Records for four problems."""
    return [small(gpu="h200", acc="f32", m=m, n=n, k=64, stages=2) for m in (64, 128) for n in (64, 128)]


def run_campaign(store: Path, device: FakeDevice, us: float = 8.0, **options: Any) -> bench.RunOutcome:
    """Runs a campaign on the fake device, on which our kernels take ``us``; ``options`` are fields of the plan."""
    progress = options.pop("progress", lambda *_: None)
    plan = bench.BenchPlan(
        options.pop("records", records()),
        lambda record: FakeKernel(device, record, us),
        lambda record: FakeKernel(device, record, us).digest,
        options.pop("baselines", [FakeProduct(device, "torch.matmul", 9.0)]),
        options.pop("settings", Settings(warmup_seconds=0.0)),
        store,
        **options,
    )
    return bench.run(device, plan, progress)


@pytest.mark.slow
def test_what_is_stored_is_not_measured_again(tmp_path: Path) -> None:
    store = tmp_path / "m.jsonl"
    first = run_campaign(store, FakeDevice())
    assert (first.measured, first.stored, first.left, first.faults) == (len(stored_measurements(store)), 0, 0, [])
    again = run_campaign(store, FakeDevice())
    assert (again.measured, again.stored) == (0, 4)
    assert run_campaign(store, FakeDevice(), again=True).measured == first.measured
    other = ENVIRONMENT.model_copy(update={"id": "other", "driver": "590"})
    assert run_campaign(store, FakeDevice(environment=other)).measured == first.measured
    more = [FakeProduct(device := FakeDevice(), "torch.matmul", 9.0), FakeProduct(device, "cublas-nn", 9.0)]
    assert run_campaign(store, device, baselines=more).measured == first.measured
    assert run_campaign(store, FakeDevice()).measured == 0
    hosted = Settings(protocols=("offline",), warmup_seconds=0.0, benchmark_seconds=0.001)
    assert run_campaign(store, FakeDevice(), settings=hosted).measured == 4


def test_other_data_of_the_same_binary_is_measured_again(tmp_path: Path) -> None:
    store = tmp_path / "m.jsonl"
    narrow, wide = (
        small(gpu="h200", acc="f32", m=64, n=160, k=64, stages=2, raster="zsplit", swizzle_stride=stride)
        for stride in (32, 64)
    )
    assert narrow.name == wide.name
    for record, count in ((narrow, 2), (narrow, 0), (wide, 2)):
        assert run_campaign(store, FakeDevice(), records=[record]).measured == count
    assert [measurement.options for measurement in stored_measurements(store)[1:3]] == [
        {"swizzle_stride": 32},
        {"swizzle_stride": 64},
    ]


def stored_measurements(path: Path) -> list[results.Measurement]:
    """The measurements in a file."""
    return results.measurements(path).measurements


@pytest.mark.slow
def test_a_budget_ends_the_run_and_says_what_is_left(tmp_path: Path) -> None:
    steps = []
    device = FakeDevice()
    settings = Settings(warmup_seconds=0.0, benchmark_seconds=0.5)
    outcome = run_campaign(
        tmp_path / "m.jsonl", device, us=2000.0, settings=settings, budget_seconds=6.0,
        progress=lambda *step: steps.append(step),
    )  # fmt: skip
    assert 0 < outcome.left < 4
    assert device.time < 6.0
    assert [done for done, _, _ in steps] == list(range(1, 5 - outcome.left))
    assert steps[-1][2] <= 6.0 - device.time + 1e-6
    assert run_campaign(tmp_path / "m.jsonl", device, us=2000.0, settings=settings).stored == 4 - outcome.left


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
    outcome = bench.run(
        device, bench.BenchPlan(records(), open_kernel, lambda record: record.name, [], settings, store)
    )
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

    def go() -> bench.RunOutcome:
        store, settings = tmp_path / "m.jsonl", Settings(warmup_seconds=0.0)
        plan = bench.BenchPlan(records(), open_kernel, lambda record: open_kernel(record).digest, [], settings, store)
        return bench.run(device, plan)

    with pytest.raises(bench.Stopped, match=f"{first.mnk}: .* stopped the device: CUDA error: an illegal"):
        go()
    device.stopped = False
    outcome = go()
    assert (outcome.stored, outcome.faults) == (1, [])
    assert len({measurement.mnk for measurement in stored_measurements(tmp_path / "m.jsonl")}) == 4


@pytest.mark.slow
def test_what_the_device_survives_is_the_problems_fault(tmp_path: Path) -> None:
    """After an error such as too little memory the other problems are measured, and this one is tried again."""
    device = FakeDevice()
    operands, first = device.operands, stratified(record.problem for record in records())[0]

    def short(of: Problem, count: int, seed: int, products: int = 1) -> Any:
        if of == first:
            raise RuntimeError("CUDA out of memory\nmore")
        return operands(of, count, seed, products)

    device.operands = short  # type: ignore[method-assign]
    outcome = run_campaign(tmp_path / "m.jsonl", device)
    assert outcome.faults == [f"{first.mnk}: CUDA out of memory"]
    assert len({measurement.mnk for measurement in stored_measurements(tmp_path / "m.jsonl")}) == 3
    assert run_campaign(tmp_path / "m.jsonl", FakeDevice()).stored == 3


def test_a_baseline_that_fails_in_its_own_way_is_absent() -> None:
    def fail(operands: Any, launches: int) -> None:
        raise ArithmeticError("CUBLAS_STATUS_NOT_SUPPORTED")

    device = FakeDevice()
    measurement = measure_one(
        device, [FakeProduct(device, "cudal2gen", 8.0), FakeProduct(device, "b", 9.0, faulty=fail)], HOT, SMALL
    )
    assert measurement.absent == {"b": "ArithmeticError: CUBLAS_STATUS_NOT_SUPPORTED"}


# A process that measures slowly enough to be killed in the middle. It prints a line when it begins.
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
test_bench.run_campaign(Path(sys.argv[1]), Slow())
"""


def _size(path: Path) -> int:
    """A file's bytes, 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


@pytest.mark.thorough
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
        # Two of three processes may finish a measurement first, however slow the machine is.
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
    counts = Counter((measurement.mnk, measurement.l2) for measurement in stored_measurements(store))
    assert set(counts.values()) == {1}
    assert len({mnk for mnk, _ in counts}) == 4
    assert len(lines) > 3, "the kills came while it measured"


def test_medians_and_ratios_by_hand() -> None:
    device = FakeDevice()
    measurement = measure_one(
        device,
        [
            FakeProduct(device, "cudal2gen", 8.0),
            FakeProduct(device, "cublas-nn", 12.0),
            FakeProduct(device, "cublas-tn", 10.0),
        ],
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
