"""Proves what the first calls of a shape measure and remember, on the emulated device with a clock of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

import cudal2gen
from cudal2gen import pack
from cudal2gen.bench import check
from cudal2gen.validator.correctness import Bounds
from kernelproof.ground.errors import WrongInput
from tests.cudal2gen import packed
from tests.cudal2gen.emulated import EmulatedDevice
from tests.packages import require

torch = require("torch")

from cudal2gen.operators import dispatch, meter  # noqa: E402
from cudal2gen.operators.measuring import buckets, contests, races  # noqa: E402
from cudal2gen.operators.measuring.tuned import Store  # noqa: E402
from tests.cudal2gen.racing import (  # noqa: E402
    A100,
    NAMES,
    SIZES,
    Clock,
    ClockedDevice,
    draw_product,
    launch_counts,
    measurements,
    simulated_process,
    store,
    tuner_of,
)

__all__ = ["store"]  # a fixture

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def opened_pack(tmp_path_factory: pytest.TempPathFactory) -> pack.Pack:
    """A pack of plain kernels without measurements."""
    table = packed.table([packed.RECORDS[name] for name in ("predicated", "whole", "split", "nn", "f16")])
    return pack.open_pack(packed.folder(table, tmp_path_factory.mktemp("packs") / "a100"))


@pytest.fixture(autouse=True)
def disable_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables buckets, so that each problem is measured for itself."""
    monkeypatch.setattr(buckets, "LARGEST", 0)


@pytest.mark.slow
def test_the_first_call_races_and_a_later_process_knows(device: EmulatedDevice, opened_pack: pack.Pack) -> None:
    clock = Clock(device, {NAMES["whole"]: 200.0, NAMES["predicated"]: 250.0}, 300.0)
    a, b, expected = draw_product(device)
    with simulated_process(opened_pack, ClockedDevice(device, clock)) as dispatcher:
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert dispatcher.stats() == {
            "kernel": {NAMES["whole"]: 2},
            "torch": {},
            "gained_us": {NAMES["whole"]: 200},
        }
        assert "was measured: 1.500x [1.500, 1.500] (cold L2, host time in, torch.matmul)" in cudal2gen.explain(
            a, b.t()
        )
        assert clock.seconds < races.SHAPE_SECONDS, "a race ends with its budget"
    (row,) = measurements()
    assert (row.problem.mnk, row.environment, row.l2) == ("30_24_64", A100.id, "cold")
    kernel, vendor = row.timings
    assert kernel.record == NAMES["whole"]
    assert len(kernel.event_us) == len(vendor.event_us) >= 2 * races.MIN_ROUNDS
    before = launch_counts(device)
    with simulated_process(opened_pack, ClockedDevice(device, clock)) as dispatcher:
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert launch_counts(device) == before | {"whole": before["whole"] + 1}
    with simulated_process(opened_pack, ClockedDevice(device, clock), mode="off") as dispatcher:
        cudal2gen.matmul(a, b.t())
        assert sum(dispatcher.stats()["torch"].values()) == 1, "without the mode a pack is what it was"


@pytest.mark.slow
def test_the_reference_of_a_race_is_computed_once(
    device: EmulatedDevice, opened_pack: pack.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for the reference's rows and its columns."""
    shapes: list[tuple[int, int]] = []

    def record_bounds(acc: Any, a: Any, b: Any, *others: Any) -> Bounds[Any]:
        shapes.append((len(a), len(b)))
        return Bounds(acc, a, b, *others)

    monkeypatch.setattr(check, "Bounds", record_bounds)
    clock = Clock(device, {NAMES["whole"]: 200.0, NAMES["predicated"]: 250.0}, 300.0)
    a, b, expected = draw_product(device)
    with simulated_process(opened_pack, ClockedDevice(device, clock)) as dispatcher:
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert dispatcher.stats()["kernel"] == {NAMES["whole"]: 1}
    assert shapes == [(30, 24), (30, 24)]


def test_a_slower_kernel_is_remembered_as_such(device: EmulatedDevice, opened_pack: pack.Pack) -> None:
    clock = Clock(device, {}, 300.0)
    clock.times_us = dict.fromkeys(NAMES.values(), 310.0)
    a, b, expected = draw_product(device)
    for _ in range(2):
        with simulated_process(opened_pack, ClockedDevice(device, clock)) as dispatcher:
            assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
            assert dispatcher.stats() == {"kernel": {}, "torch": {"measured, not faster": 1}}
    assert len(measurements()) == 1


@pytest.mark.slow
def test_a_loss_by_copies_is_not_that_of_packed_operands(device: EmulatedDevice, opened_pack: pack.Pack) -> None:
    """Misaligned rows are copied for kernels. A later call with packed operands of the same sizes races again."""
    clock = Clock(device, dict.fromkeys(NAMES.values(), 310.0), 300.0)
    a, b, expected = draw_product(device)
    apart = device.empty(30, 65)[:, :64]
    apart.copy_(a)
    with simulated_process(opened_pack, ClockedDevice(device, clock)):
        assert torch.equal(cudal2gen.matmul(apart, b.t()), expected)
        assert measurements() == []
        clock.times_us = dict.fromkeys(NAMES.values(), 200.0)
        for _ in range(2):  # the first one waits, since a race without a result is not repeated at once
            assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
    (stored,) = measurements()
    kernel, vendor = stored.timings
    assert (kernel.event_us[0], vendor.event_us[0]) == (200.0, 300.0)


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["driver", "max_sm_mhz", "name", "versions"])
def test_other_conditions_race_anew(device: EmulatedDevice, opened_pack: pack.Pack, changed: str) -> None:
    clock = Clock(device, {}, 300.0)
    a, b, _ = draw_product(device)
    values: dict[str, Any] = {"driver": "590", "max_sm_mhz": 1200, "name": "NVIDIA A800", "versions": {"torch": "3"}}
    for environment in (A100, A100.model_copy(update={"id": "other", changed: values[changed]})):
        clock.environment = environment
        with simulated_process(opened_pack, ClockedDevice(device, clock)):
            cudal2gen.matmul(a, b.t())
    assert [row.environment for row in measurements()] == [A100.id, "other"]


@pytest.mark.slow
def test_linear_races_its_product_alone(device: EmulatedDevice, opened_pack: pack.Pack) -> None:
    clock = Clock(device, {}, 300.0)
    x, weight, expected = draw_product(device)
    bias = device.empty(1, SIZES[1]).copy_(torch.ones(SIZES[1]))[0]
    with simulated_process(opened_pack, ClockedDevice(device, clock)) as dispatcher:
        assert torch.equal(
            cudal2gen.linear(x.view(2, 15, 64), weight, bias).view(30, 24), (expected.double() + 1).half()
        )
        assert sum(dispatcher.stats()["kernel"].values()) == 1
    assert len(measurements()) == 1


def test_what_is_not_raced(device: EmulatedDevice, opened_pack: pack.Pack) -> None:
    """There are no races in captures, with exhausted budgets, with numbers that cannot be compared, or with other
    preferences."""
    clock = Clock(device, {}, 300.0)
    a, b, _ = draw_product(device)
    timed = ClockedDevice(device, clock)
    with simulated_process(opened_pack, timed) as dispatcher:
        timed.captures = True
        cudal2gen.matmul(a, b.t())
        timed.captures = False
        dispatcher.forget()
        with cudal2gen.prefer("vendor"):
            cudal2gen.matmul(a, b.t())
        infinite = device.empty(*a.shape).fill_(float("inf"))
        cudal2gen.matmul(infinite, b.t())
        dispatcher.forget()
        tuner = tuner_of(dispatcher)
        assert tuner is not None
        tuner.tried.clear()
        tuner.spent = races.PROCESS_SECONDS
        cudal2gen.matmul(a, b.t())
    assert launch_counts(device) == {}
    assert measurements() == []


def test_without_a_clock_torch_computes(device: EmulatedDevice, opened_pack: pack.Pack) -> None:
    a, b, expected = draw_product(device)
    with simulated_process(opened_pack, ClockedDevice(device, None)) as dispatcher:
        with pytest.warns(UserWarning, match="no autotuning: NVML is missing"):
            assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert dispatcher.stats()["kernel"] == {}


@pytest.mark.slow
def test_the_background_races_while_the_device_is_idle(device: EmulatedDevice, opened_pack: pack.Pack) -> None:
    clock = Clock(device, {NAMES["whole"]: 200.0}, 300.0)
    a, b, expected = draw_product(device)
    wide = device.empty(30, 72)[:, :64].copy_(a)
    with simulated_process(opened_pack, ClockedDevice(device, clock), mode="background") as dispatcher:
        clock.busy = True
        for _ in range(3):
            assert torch.equal(cudal2gen.matmul(wide, b.t()), expected)
        assert launch_counts(device) == {}
        clock.busy = False
        calls = 0
        while not measurements():
            calls += 1
            before = sum(launch_counts(device).values())
            assert torch.equal(cudal2gen.matmul(wide, b.t()), expected)
            assert sum(launch_counts(device).values()) - before <= 2 * races.FINALISTS, "a call races a little"
            wide.mul_(1)
            assert calls < 100
        a.mul_(2), wide.copy_(a)
        assert torch.equal(cudal2gen.matmul(wide, b.t()), expected * 2)
        assert dispatcher.stats()["kernel"] == {NAMES["whole"]: 1}
        assert dispatcher.stats()["torch"] == {"nothing was measured within a factor of two": 3 + calls}


@pytest.mark.slow
def test_the_race_of_the_background_has_operands_of_its_own(device: EmulatedDevice, opened_pack: pack.Pack) -> None:
    """The caller overwrites its tensors between calls, which the race must not see."""
    clock = Clock(device, {}, 300.0)
    a, b, _ = draw_product(device)
    with simulated_process(opened_pack, ClockedDevice(device, clock), mode="background"):
        while not measurements():
            cudal2gen.matmul(a, b.t())
            a.add_(1), b.neg_()
        tuner = tuner_of(dispatch.current())
        assert tuner is not None
        assert tuner.store.first_runs.banned() == set()


# --- operands ---


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["once", "background"])
@pytest.mark.parametrize("operand_kind", ["repeated", "unit", "vector"])
def test_operands_with_other_dimensions_are_raced(
    device: EmulatedDevice, opened_pack: pack.Pack, operand_kind: str, mode: races.Mode
) -> None:
    """B is a batch, ``repeated`` or with an extent of one (``unit``), or A is a single row (``vector``)."""
    a, b, expected = draw_product(device)
    if operand_kind == "vector":
        left, right, expected = a[0], b.t(), expected[0]
    else:
        left, right, expected = a.view(2, 15, 64), b.t()[None], expected.view(2, 15, 24)
        right = right.expand(2, 64, 24) if operand_kind == "repeated" else right
    with simulated_process(opened_pack, ClockedDevice(device, Clock(device, {}, 300.0)), mode):
        for _ in range(90):
            assert torch.equal(cudal2gen.matmul(left, right), expected)
    assert len(measurements()) == 1
    assert Store(A100).first_runs.banned() == set()


def test_one_race_at_a_time_has_copies(
    device: EmulatedDevice, opened_pack: pack.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls have ever new shapes. A race without further calls is given up when another one begins."""
    copies: list[Any] = []
    copy = contests._copy
    monkeypatch.setattr(contests, "_copy", lambda *operands: copies.append(copy(*operands)) or copies[-1])
    a, b, _ = draw_product(device)
    clock = Clock(device, {}, 300.0)
    with simulated_process(opened_pack, ClockedDevice(device, clock), mode="background") as dispatcher:
        for rows in range(10, 20):
            cudal2gen.matmul(a[:rows], b.t())
        assert [matrix.shape[0] for matrix in copies] == [10, 64]
        clock.seconds += races.STALE_SECONDS
        cudal2gen.matmul(a[:15], b.t())
        assert [matrix.shape[0] for matrix in copies] == [10, 64, 15, 64]
        tuner = tuner_of(dispatcher)
        assert tuner is not None and tuner._owner is not None  # noqa: PT018
        dispatcher.forget()
        assert tuner._owner is None


@pytest.mark.slow
def test_autocast_and_gradients_stay_outside(device: EmulatedDevice, opened_pack: pack.Pack) -> None:
    """Both would slow down torch's product but not the kernel."""

    class NoGradientClock(Clock):
        """A clock that fails if a sample is taken within autocast or with gradients."""

        def elapsed_us(self, call: Callable[[], object], times: int) -> float:
            assert not torch.is_autocast_enabled("cpu")
            assert not torch.is_grad_enabled()
            return super().elapsed_us(call, times)

    a, b, expected = draw_product(device)
    with (
        simulated_process(opened_pack, ClockedDevice(device, NoGradientClock(device, {}, 300.0))),
        torch.autocast("cpu", torch.float16),
    ):
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
    assert len(measurements()) == 1


def test_a_second_device_is_timed_on_its_own_stream_which_waits_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[Any] = []  # those on which events were recorded
    held_us: list[tuple[int, float]] = []  # for each sample the device, and how long its stream waited for the host
    current: list[int] = [0]  # the devices that are current, the innermost last

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any = "of the current device") -> None:
            streams.append(stream)

        def synchronize(self) -> None: ...
        def elapsed_time(self, _: Any) -> float:
            return 0.5

    @contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(meter, "Card", lambda index: index)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: held_us.append((current[-1], cycles / meter.CYCLES_US)))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=0: f"of device {device}")
    clock = meter.CudaMeter(1)
    seconds = [0.0]
    monkeypatch.setattr(clock, "now", lambda: seconds[0])

    def call(us: float) -> None:
        seconds[0] += us / 1e6

    assert clock.elapsed_us(lambda: call(40.0), 3) == 500
    assert streams == ["of device 1"] * 2
    for us in (10.0, 10.0, 1000.0, 10.0):
        clock.elapsed_us(partial(call, us), 2)
    # The stream is held for a quarter more than the host is expected to take for the sample's 3 or 2 calls. The
    # expectation is 20 us a call at first. Then it is the longest call so far, at most 100 us, less a tenth for each
    # faster call.
    first, second = 1.25 * 3 * 20, [1.25 * 2 * us for us in (40, 36, 32.4, 100)]
    assert held_us == [(1, pytest.approx(us, abs=1e-2)) for us in (first, *second)]


def test_modes_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(races.VARIABLE, "always")
    with pytest.raises(WrongInput, match=f"^{races.VARIABLE}=always:"):
        dispatch.Dispatcher()
    monkeypatch.setenv(races.VARIABLE, "background")
    assert dispatch.Dispatcher().mode == "background"
    with pytest.raises(WrongInput, match="autotune=now"), cudal2gen.autotune("now"):  # type: ignore[arg-type]
        pass
    monkeypatch.delenv(races.VARIABLE)
    assert dispatch.Dispatcher().mode == "off"
