"""Proves that races time calls as they are used: with cold operands, and with the host's time for an eager call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import cudal2gen
from cudal2gen import pack
from cudal2gen.kernel import serving
from tests.cudal2gen import idle_device
from tests.cudal2gen.emulated import EmulatedDevice
from tests.cudal2gen.racing import NAMES, Clock, ClockedDevice, draw_product, measurements, simulated_process, store
from tests.cudal2gen.test_native_calls import Reference, kernel_calls, product, reference
from tests.cudal2gen.test_races import disable_buckets, opened_pack
from tests.packages import require

torch = require("torch")

from cudal2gen.operators import call_kernels, emulated  # noqa: E402
from cudal2gen.operators.call_native import NATIVE  # noqa: E402
from cudal2gen.operators.measuring import contests, races  # noqa: E402
from cudal2gen.operators.plan_requests import Arguments, request_linear, request_matmul  # noqa: E402

pytestmark = pytest.mark.torch

__all__ = ["disable_buckets", "opened_pack", "reference", "store"]  # fixtures


class Watching(Clock):
    """A clock that counts samples, and those with a cold L2. ``host``: microseconds of the host for a call by the name
    of the launched kernel, "" for torch."""

    def __init__(self, *arguments: Any, host: dict[str, float] | None = None) -> None:
        super().__init__(*arguments)
        self.host, self.samples, self.cold = host or {}, 0, 0

    def elapsed_us(self, call: Callable[[], object], times: int) -> float:
        """Counts the samples, and those before which the L2 was made cold each time."""
        self.samples += 1
        self.cold += self.evicted == self.samples
        return super().elapsed_us(call, times)

    def host_us(self, call: Callable[[], object], times: int) -> float:
        """The host's time that the test set for the kernel that the call launches."""
        before = len(self.device.session.launches)
        call()
        launches = [launch.kernel for launch in self.device.session.launches[before:]]
        return times * self.host.get(launches[0] if launches else "", 0.0)


# The clock's microseconds of each kernel on the device.
TIMES = {NAMES["whole"]: 200.0, NAMES["predicated"]: 250.0}


@pytest.mark.slow
def test_the_l2_is_cold_before_each_sample(
    device: EmulatedDevice, opened_pack: pack.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls of a sample use different operands, one set for each call. A sample of torch has one call of 300 us, or
    four of 9 us, because a sample takes at least 30 us."""
    counts: list[int] = []
    real = contests.Contest.rotate
    monkeypatch.setattr(contests.Contest, "rotate", lambda own, count: (counts.append(count), real(own, count))[1])
    read: list[int] = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: (read.append(a.data_ptr()), mm(a, b))[1])
    for torch_us, calls in ((300.0, 1), (9.0, 4)):
        a, b, expected = draw_product(device, (30, 24, 64) if calls == 1 else (29, 24, 64))
        clock = Watching(device, dict.fromkeys(TIMES, torch_us / 1.5), torch_us)
        with simulated_process(opened_pack, ClockedDevice(device, clock)):
            assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert clock.samples == clock.cold > 30
        assert counts.pop() == calls
        assert len(set(read)) == calls
        read.clear()
    assert {measurement.l2 for measurement in measurements()} == {"cold"}


def test_operands_beyond_the_l2_are_cold_by_themselves(
    device: EmulatedDevice, opened_pack: pack.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contests.Contest, "rotate", lambda *_: pytest.fail("copies are not needed"))
    closed: list[object] = []
    real = contests.Contests.close
    monkeypatch.setattr(contests.Contests, "close", lambda own: (closed.append(own), real(own))[1])
    clock = Watching(device, TIMES, 300.0)
    clock.environment = clock.environment.model_copy(update={"l2_bytes": 1000})
    a, b, expected = draw_product(device)
    with simulated_process(opened_pack, ClockedDevice(device, clock)):
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
    assert clock.evicted == 1, "for the first sample, before it is known how long it takes"
    assert [measurement.l2 for measurement in measurements()] == ["exceeded"]
    assert len(closed) == 1, "C++ keeps nothing of a race"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("torch_us", "kernel_us", "wins"),
    [(10.0, 12.0, 1.5), (10.0, 310.0, 300 / 310), (290.0, 12.0, 1.5), (600.0, 610.0, 600 / 610), (600.0, 400.0, 1.5)],
)
def test_the_slower_one_of_host_and_device_counts(
    torch_us: float, kernel_us: float, wins: float, device: EmulatedDevice, opened_pack: pack.Pack
) -> None:
    """On the device the kernels take 200 and 250 us, and torch 300 us. ``torch_us``, ``kernel_us``: those of the host.
    ``wins``: torch's time divided by the kernel's, of which each is the longer of both."""
    host = dict.fromkeys(TIMES, kernel_us) | {"": torch_us}
    a, b, expected = draw_product(device)
    with simulated_process(opened_pack, ClockedDevice(device, Watching(device, TIMES, 300.0, host=host))):
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        said = cudal2gen.explain(a, b.t())
    kernel, vendor = measurements()[0].timings
    assert vendor.median_us / kernel.median_us == pytest.approx(wins, rel=1e-3)
    assert set(kernel.event_us) <= set(TIMES.values()), "the device's own times are kept"
    assert set(vendor.event_us) == {300.0}
    assert "cold L2, host time in" in said
    assert said.startswith("hgemm") == (wins > 1.4)


@pytest.mark.parametrize(("evicting_us", "fits"), [(500.0, True), (3000.0, False)])
def test_the_budget_pays_for_what_else_a_sample_takes(
    evicting_us: float, fits: bool, device: EmulatedDevice, opened_pack: pack.Pack
) -> None:
    class Evicting(Watching):
        """A clock on which it takes ``evicting_us`` to make the L2 cold."""

        def evict(self) -> None:
            super().evict()
            self.seconds += evicting_us / 1e6

    clock = Evicting(device, TIMES, 300.0)
    a, b, expected = draw_product(device)
    with simulated_process(opened_pack, ClockedDevice(device, clock)):
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
    assert clock.seconds <= races.SHAPE_SECONDS
    assert bool(measurements()) == fits
    assert clock.samples > 48 if fits else clock.samples == 1, "what does not fit is not begun"


@pytest.mark.parametrize("into", [False, True])
def test_planned_calls_are_timed_as_c_makes_them(
    into: bool, reference: Reference, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C++ makes the calls until the race ends, and then drops their plans. A call's own ``out`` is not written."""
    device, own_pack = idle_device.IdleDevice(tmp_path), idle_device.open_pack(tmp_path)
    a, b = (torch.randint(-2, 3, shape).half() for shape in ((48, 64), (64, 40)))
    assert NATIVE.serves(device.place, own_pack.torch_library)  # type: ignore[arg-type]
    with emulated(device, [own_pack], prefer="kernel") as dispatcher:
        request = request_matmul(a, b, "f32", torch.empty(48, 40).half() if into else None)
        assert request.problem is not None
        problem = request.problem.model_copy(update={"gpu": own_pack.gpu})
        packs = dispatcher._packs
        of_card = partial(packs.open, own_pack, index=-1, device=device)
        own = contests.Contests(device, request, Arguments(a, b), of_card, False)
        contest = own.on(problem)
        kernel = next(each for each in packs.table(own_pack).kernels if each.computes(problem))
        use = kernel.use(serving.sizes_of(problem), contest.operands)
        assert use is not None
        call = contest.planned(kernel, use)
        for count in (1, 2):
            assert torch.equal(call(), product(a, b))
            assert len(reference.streams) == count
        monkeypatch.setattr(contests, "on_gpu", lambda _: True)
        monkeypatch.setattr(call_kernels, "on_gpu", lambda _: True)
        by_torch = contest.planned_by_torch()
        assert torch.equal(by_torch(), torch.mm(a, b))
        own.close()
        call()
        assert len(reference.streams) == 2, "after the race Python makes the call"
        assert torch.equal(by_torch(), torch.mm(a, b))
        assert kernel_calls(dispatcher) == 0, "calls of a race are not counted as calls of a user"
        x, weight = a, b.t().contiguous()
        layer = contests.Contests(device, request_linear(x, weight, False), Arguments(x, weight), of_card, False)
        assert torch.equal(layer.on(problem.model_copy(update={"layout": "tn"})).planned_by_torch()(), torch.mm(a, b))
        layer.close()


def test_a_layer_is_timed_with_its_bias(reference: Reference, tmp_path: Any) -> None:
    """The calls of a race pass all three operands to C++."""
    reference.layout = "tn"
    device, own_pack = idle_device.IdleDevice(tmp_path), idle_device.open_pack(tmp_path, "bias_n")
    x, weight, bias = (torch.randint(-2, 3, shape).half() for shape in ((48, 64), (40, 64), (40,)))
    assert NATIVE.serves(device.place, own_pack.torch_library)  # type: ignore[arg-type]
    with emulated(device, [own_pack], prefer="kernel") as dispatcher:
        request = request_linear(x, weight, True).fused
        assert request.problem is not None
        problem = request.problem.model_copy(update={"gpu": own_pack.gpu})
        of_card = partial(dispatcher._packs.open, own_pack, index=-1, device=device)
        own = contests.Contests(device, request, Arguments(x, weight, bias), of_card, False)
        contest = own.on(problem)
        kernel = next(each for each in own_pack.table.kernels if each.computes(problem))
        use = kernel.use(serving.sizes_of(problem), contest.operands)
        assert use is not None
        assert torch.equal(contest.planned(kernel, use)(), product(x, weight.t()) + bias)
        assert [fused.bias for fused in reference.fused] == [bias.data_ptr()]
        own.close()
