"""Calls that measure by themselves: on the emulated device, by a clock whose times the tests state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cudal2gen
from cudal2gen import pack, results
from cudal2gen.bench import check
from cudal2gen.launch.launcher import LaunchError
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
    Timed,
    drawn,
    measurements,
    own,
    process,
    raced,
    store,
    tuner_of,
)

__all__ = ["store"]  # a fixture

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> pack.Pack:
    """A pack of which nothing was measured."""
    table = packed.table([packed.RECORDS[name] for name in ("predicated", "whole", "split", "nn", "f16")])
    return pack.open_pack(packed.folder(table, tmp_path_factory.mktemp("packs") / "a100"))


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """No buckets: each problem is measured for itself."""
    monkeypatch.setattr(buckets, "LARGEST", 0)


def test_the_first_call_races_and_a_later_process_knows(device: EmulatedDevice, opened: pack.Pack) -> None:
    clock = Clock(device, {NAMES["whole"]: 200.0, NAMES["predicated"]: 250.0}, 300.0)
    a, b, expected = drawn(device)
    with process(opened, Timed(device, clock)) as dispatcher:
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert dispatcher.stats() == {
            "kernel": {NAMES["whole"]: 2},
            "torch": {},
            "gained_us": {NAMES["whole"]: 200},
        }
        assert "was measured: 1.500x [1.500, 1.500] (hot L2, torch.matmul)" in cudal2gen.explain(a, b.t())
        assert clock.seconds < races.SHAPE_SECONDS, "a race ends with its budget"
    (row,) = measurements()
    assert (row.problem.mnk, row.environment, row.l2) == ("30_24_64", A100.id, "hot")
    kernel, vendor = row.timings
    assert kernel.record == NAMES["whole"]
    assert len(kernel.event_us) == len(vendor.event_us) >= 2 * races.MIN_ROUNDS
    before = raced(device)
    with process(opened, Timed(device, clock)) as dispatcher:
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert raced(device) == before | {"whole": before["whole"] + 1}
    with process(opened, Timed(device, clock), mode="off") as dispatcher:
        cudal2gen.matmul(a, b.t())
        assert sum(dispatcher.stats()["torch"].values()) == 1, "without the mode a pack is what it was"


def test_the_reference_of_a_race_is_computed_once(
    device: EmulatedDevice, opened: pack.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows of D, and of columns."""
    shapes: list[tuple[int, int]] = []

    def bounds(acc: Any, a: Any, b: Any, *others: Any) -> Bounds[Any]:
        shapes.append((len(a), len(b)))
        return Bounds(acc, a, b, *others)

    monkeypatch.setattr(check, "Bounds", bounds)
    clock = Clock(device, {NAMES["whole"]: 200.0, NAMES["predicated"]: 250.0}, 300.0)
    a, b, expected = drawn(device)
    with process(opened, Timed(device, clock)) as dispatcher:
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert dispatcher.stats()["kernel"] == {NAMES["whole"]: 1}
    assert shapes == [(30, 24), (30, 24)]


def test_a_slower_kernel_is_remembered_as_such(device: EmulatedDevice, opened: pack.Pack) -> None:
    clock = Clock(device, {}, 300.0)
    clock.times_us = dict.fromkeys(NAMES.values(), 310.0)
    a, b, expected = drawn(device)
    for _ in range(2):
        with process(opened, Timed(device, clock)) as dispatcher:
            assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
            assert dispatcher.stats() == {"kernel": {}, "torch": {"measured, not faster": 1}}
    assert len(measurements()) == 1


def test_a_loss_by_copies_is_not_that_of_packed_operands(device: EmulatedDevice, opened: pack.Pack) -> None:
    """Rows that begin anywhere are copied for kernels: a later call of the same sizes races its own operands."""
    clock = Clock(device, dict.fromkeys(NAMES.values(), 310.0), 300.0)
    a, b, expected = drawn(device)
    apart = device.empty(30, 65)[:, :64]
    apart.copy_(a)
    with process(opened, Timed(device, clock)):
        assert torch.equal(cudal2gen.matmul(apart, b.t()), expected)
        assert measurements() == []
        clock.times_us = dict.fromkeys(NAMES.values(), 200.0)
        for _ in range(2):  # the first one waits, as a race that told nothing is not repeated at once
            assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
    (stored,) = measurements()
    kernel, vendor = stored.timings
    assert (kernel.event_us[0], vendor.event_us[0]) == (200.0, 300.0)


@pytest.mark.parametrize("changed", ["driver", "max_sm_mhz", "name", "versions"])
def test_other_conditions_race_anew(device: EmulatedDevice, opened: pack.Pack, changed: str) -> None:
    clock = Clock(device, {}, 300.0)
    a, b, _ = drawn(device)
    values: dict[str, Any] = {"driver": "590", "max_sm_mhz": 1200, "name": "NVIDIA A800", "versions": {"torch": "3"}}
    for environment in (A100, A100.model_copy(update={"id": "other", changed: values[changed]})):
        clock.environment = environment
        with process(opened, Timed(device, clock)):
            cudal2gen.matmul(a, b.t())
    assert [row.environment for row in measurements()] == [A100.id, "other"]


def test_linear_races_its_product_alone(device: EmulatedDevice, opened: pack.Pack) -> None:
    clock = Clock(device, {}, 300.0)
    x, weight, expected = drawn(device)
    bias = device.empty(1, SIZES[1]).copy_(torch.ones(SIZES[1]))[0]
    with process(opened, Timed(device, clock)) as dispatcher:
        assert torch.equal(
            cudal2gen.linear(x.view(2, 15, 64), weight, bias).view(30, 24), (expected.double() + 1).half()
        )
        assert sum(dispatcher.stats()["kernel"].values()) == 1
    assert len(measurements()) == 1


def test_what_is_not_raced(device: EmulatedDevice, opened: pack.Pack) -> None:
    """Captures, exhausted budgets, numbers that cannot be compared, batches, other preferences."""
    clock = Clock(device, {}, 300.0)
    a, b, _ = drawn(device)
    timed = Timed(device, clock)
    with process(opened, timed) as dispatcher:
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
    assert raced(device) == {}
    assert measurements() == []


def test_without_a_clock_torch_computes(device: EmulatedDevice, opened: pack.Pack) -> None:
    a, b, expected = drawn(device)
    with process(opened, Timed(device, None)) as dispatcher:
        with pytest.warns(UserWarning, match="no autotuning: NVML is missing"):
            assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert dispatcher.stats()["kernel"] == {}


def test_the_background_races_while_the_device_is_idle(device: EmulatedDevice, opened: pack.Pack) -> None:
    clock = Clock(device, {NAMES["whole"]: 200.0}, 300.0)
    a, b, expected = drawn(device)
    wide = device.empty(30, 72)[:, :64].copy_(a)
    with process(opened, Timed(device, clock), mode="background") as dispatcher:
        clock.busy = True
        for _ in range(3):
            assert torch.equal(cudal2gen.matmul(wide, b.t()), expected)
        assert raced(device) == {}
        clock.busy = False
        calls = 0
        while not measurements():
            calls += 1
            before = sum(raced(device).values())
            assert torch.equal(cudal2gen.matmul(wide, b.t()), expected)
            assert sum(raced(device).values()) - before <= 2 * races.FINALISTS, "a call races a little"
            wide.mul_(1)
            assert calls < 100
        a.mul_(2), wide.copy_(a)
        assert torch.equal(cudal2gen.matmul(wide, b.t()), expected * 2)
        assert dispatcher.stats()["kernel"] == {NAMES["whole"]: 1}
        assert dispatcher.stats()["torch"] == {"nothing was measured within a factor of two": 3 + calls}


def test_the_race_of_the_background_has_operands_of_its_own(device: EmulatedDevice, opened: pack.Pack) -> None:
    """A caller overwrites its tensors between calls."""
    clock = Clock(device, {}, 300.0)
    a, b, _ = drawn(device)
    with process(opened, Timed(device, clock), mode="background"):
        while not measurements():
            cudal2gen.matmul(a, b.t())
            a.add_(1), b.neg_()
        tuner = tuner_of(dispatch.current())
        assert tuner is not None
        assert tuner.store.first_runs.banned() == set()


# --- kernels that fail ---


def last_reason(digest: str) -> str:
    """Of the last entry of a kernel."""
    return [row.reason for run, row in Store(A100).first_runs.trials().items() if run.digest == digest][-1]


def test_a_wrong_kernel_is_banned_for_good(
    device: EmulatedDevice, opened: pack.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(device, {NAMES["whole"]: 1.0}, 300.0)
    a, b, expected = drawn(device)
    bind = contests.bind

    def wrong(device_: Any, kernel: Any, use: Any, request: Any, layout: Any) -> Any:
        run = bind(device_, kernel, use, request, layout)

        def off(a: Any, b: Any, out: Any) -> Any:
            d = run(a, b, out)
            if device.session.launches[-1].kernel == NAMES["whole"]:
                d[3, 5] += 1
            return d

        return off

    monkeypatch.setattr(contests, "bind", wrong)
    with process(opened, Timed(device, clock)) as dispatcher:
        with pytest.warns(UserWarning, match=f"{NAMES['whole']}: an error of 1, .* it is not used on this card"):
            assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert list(dispatcher.stats()["kernel"]) == [NAMES["predicated"]]
    (digest,) = Store(A100).first_runs.banned()
    assert "an error of 1" in last_reason(digest)
    before = raced(device)["whole"]
    with process(opened, Timed(device, clock)):
        cudal2gen.matmul(a[:20], b.t())
    assert raced(device)["whole"] == before


def test_a_kernel_faster_than_the_card_is_banned(device: EmulatedDevice, opened: pack.Pack) -> None:
    clock = Clock(device, {NAMES["whole"]: 0.1}, 300.0)
    a, b, _ = drawn(device)
    with process(opened, Timed(device, clock)) as dispatcher:
        cudal2gen.matmul(a, b.t())
        assert list(dispatcher.stats()["kernel"]) == [NAMES["predicated"]]
    assert len(Store(A100).first_runs.banned()) == 1


def test_a_stale_result_does_not_pass(
    device: EmulatedDevice, opened: pack.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that leaves an element unwritten shows it, whatever the memory held before."""
    a, b, expected = drawn(device)

    class Stale(Timed):
        def empty(self, like: Any, *shape: int) -> Any:
            return super().empty(like, *shape).copy_(expected)

    monkeypatch.setattr(contests, "bind", lambda stale, *_: lambda a, b, out: stale.empty(a, *expected.shape))
    with process(opened, Stale(device, Clock(device, {}, 300.0))), pytest.warns(UserWarning, match="an error of inf"):
        cudal2gen.matmul(a, b.t())
    assert len(Store(A100).first_runs.banned()) >= 2
    assert measurements() == []


def test_a_refused_launch_costs_the_kernel_only(
    device: EmulatedDevice, opened: pack.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> Any:
        raise LaunchError(1, "no")

    monkeypatch.setattr(contests, "bind", refused)
    a, b, expected = drawn(device)
    with process(opened, Timed(device, Clock(device, {}, 300.0))):
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
    assert {row.reason for row in Store(A100).first_runs.trials().values()} == {"does not run: no (cudaError 1)"}
    assert Store(A100).first_runs.banned() == set(), (
        "a later process tries again: memory or the driver may have been the reason"
    )


def test_a_kernel_that_faults_after_its_first_run_is_banned(device: EmulatedDevice, opened: pack.Pack) -> None:
    class Faulty(Clock):
        def elapsed_us(self, call: Callable[[], object], times: int) -> float:
            us = super().elapsed_us(call, times)
            if us < times * self.torch_us:
                raise RuntimeError("an illegal memory access")
            return us

    clock = Faulty(device, {NAMES["whole"]: 200.0, NAMES["predicated"]: 400.0, NAMES["split"]: 400.0}, 300.0)
    a, b, expected = drawn(device)
    with process(opened, Timed(device, clock)), pytest.warns(UserWarning, match="an illegal memory access"):
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
    (digest,) = Store(A100).first_runs.banned()
    assert last_reason(digest) == "fails after its first run: an illegal memory access"


def test_the_callers_own_work_costs_no_race_its_budget(device: EmulatedDevice, opened: pack.Pack) -> None:
    """Half a second of work is on the stream when the call comes."""

    class Behind(Clock):
        pending = 0.5

        def synchronize(self) -> None:
            self.seconds, self.pending = self.seconds + self.pending, 0.0
            super().synchronize()

        def elapsed_us(self, call: Callable[[], object], times: int) -> float:
            self.synchronize()
            return super().elapsed_us(call, times)

    a, b, expected = drawn(device)
    with process(opened, Timed(device, Behind(device, {}, 300.0))):
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
    assert len(measurements()) == 1


@pytest.mark.parametrize("mode", ["once", "background"])
@pytest.mark.parametrize("name", ["autotune", "autotune-first-runs"])
def test_a_store_that_cannot_be_used_stops_the_races(
    device: EmulatedDevice, opened: pack.Pack, store: Path, name: str, mode: races.Mode
) -> None:
    (store / f"{name}.jsonl").mkdir()
    a, b, expected = drawn(device)
    with process(opened, Timed(device, Clock(device, {}, 300.0)), mode):
        with pytest.warns(UserWarning, match=rf"no autotuning: .*{name}.jsonl.*by CUDAL2GEN_RESULTS") as warned:
            products = [cudal2gen.matmul(a, b.t()) for _ in range(3)]
        assert len(own(warned)) == 1
        assert all(torch.equal(d, expected) for d in products)
        tuner = tuner_of(dispatch.current())
        assert tuner is not None
        assert tuner.halted
    assert raced(device) == {}


def full(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From now on a file of the store takes nothing."""
    append = results.append

    def appended(lines: Any, path: Path) -> None:
        if path.name == f"{name}.jsonl":
            raise OSError(28, "No space left on device", str(path))
        append(lines, path)

    monkeypatch.setattr(results, "append", appended)


@pytest.mark.parametrize("mode", ["once", "background"])
def test_what_a_full_store_does_not_take_counts_in_the_process(
    device: EmulatedDevice, opened: pack.Pack, mode: races.Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, expected = drawn(device)
    clock = Clock(device, {NAMES["whole"]: 200.0}, 300.0)
    with process(opened, Timed(device, clock), mode) as dispatcher, monkeypatch.context() as patch:
        full(patch, "autotune")
        with pytest.warns(UserWarning, match=r"cannot use .*autotune.jsonl: No space left.*make room there") as warned:
            products = [cudal2gen.matmul(a, b.t()) for _ in range(60)]
        assert all(torch.equal(d, expected) for d in products)
        assert len(own(warned)) == 1
        assert dispatcher.stats()["kernel"][NAMES["whole"]] > 1
        dispatcher.forget()
        before = clock.seconds
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert torch.equal(cudal2gen.matmul(a[:20], b.t()), expected[:20])
        assert clock.seconds == before, "nothing more is raced"
        assert "was measured: 1.500x" in cudal2gen.explain(a, b.t())
        assert measurements() == []
        patch.undo()
        tuner = tuner_of(dispatcher)
        assert tuner is not None
        tuner.store.add([])
    assert [row.mnk for row in measurements()] == ["30_24_64"], "stored where a later race can"


def test_what_was_measured_counts_where_nothing_can_be_banned(
    device: EmulatedDevice, opened: pack.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that later processes cannot write to."""
    a, b, expected = drawn(device)
    clock = Clock(device, {NAMES["whole"]: 200.0}, 300.0)
    with process(opened, Timed(device, clock)):
        cudal2gen.matmul(a, b.t())
    full(monkeypatch, "autotune-first-runs")
    before = raced(device)
    with process(opened, Timed(device, clock)) as dispatcher:
        with pytest.warns(UserWarning, match=r"cannot use .*autotune-first-runs.jsonl: No space left"):
            assert torch.equal(cudal2gen.matmul(a[:20], b.t()), expected[:20])
        assert raced(device) == before, "no kernel runs that could not be banned"
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert dispatcher.stats()["kernel"] == {NAMES["whole"]: 1}


def test_a_pack_with_other_kernels_races_once_more(
    device: EmulatedDevice, opened: pack.Pack, tmp_path: Path
) -> None:  # fmt: skip
    """A loss stands until a pack has kernels that were not there; a win whose kernel is gone is none."""
    few = packed.table([packed.RECORDS["predicated"]])
    older = pack.open_pack(packed.folder(few, tmp_path / "older"))
    a, b, expected = drawn(device)
    clock = Clock(device, dict.fromkeys(NAMES.values(), 310.0) | {NAMES["whole"]: 200.0}, 300.0)

    def called(with_pack: pack.Pack, seconds: float = races.PROCESS_SECONDS) -> tuple[list[str], bool]:
        """What computed, and whether something was raced."""
        before = clock.seconds
        with process(with_pack, Timed(device, clock)) as dispatcher:
            tuner = tuner_of(dispatcher)
            assert tuner is not None
            tuner.spent = races.PROCESS_SECONDS - seconds
            for _ in range(2):
                assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
            return [*dispatcher.stats()["kernel"], *dispatcher.stats()["torch"]], clock.seconds > before

    assert called(older) == (["measured, not faster"], True)
    assert called(older) == (["measured, not faster"], False)
    assert called(opened, seconds=0.0) == (["measured, not faster"], False), "without time the loss still counts"
    assert called(opened) == ([NAMES["whole"]], True)
    assert called(opened) == ([NAMES["whole"]], False)
    assert called(older) == (["measured, not faster"], False), "it has been raced with these"
    others = packed.table([packed.RECORDS["predicated"], packed.RECORDS["split"]])
    other = pack.open_pack(packed.folder(others, tmp_path / "other"))
    assert called(other, seconds=0.0) == (["measured, not faster"], False), "the kernel that won is gone"
    assert called(other) == (["measured, not faster"], True)
    assert len(measurements()) == 3


class Failing(Clock):
    def elapsed_us(self, call: Callable[[], object], times: int) -> float:
        raise RuntimeError("an event is gone")


@pytest.mark.parametrize("mode", ["once", "background"])
def test_a_race_that_fails_costs_no_call(device: EmulatedDevice, opened: pack.Pack, mode: races.Mode) -> None:
    a, b, expected = drawn(device)
    clock = Failing(device, {}, 300.0)
    with process(opened, Timed(device, clock), mode), pytest.warns(UserWarning, match="an event is gone"):
        products = [cudal2gen.matmul(a, b.t()) for _ in range(9)]
    assert all(torch.equal(d, expected) for d in products)
    assert Store(A100).first_runs.banned() == set()


@pytest.mark.parametrize("where", ["bind", "Contest.compare"])
def test_a_full_memory_bans_nothing(
    where: str, device: EmulatedDevice, opened: pack.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(f"cudal2gen.operators.measuring.contests.{where}", full)
    a, b, expected = drawn(device)
    with process(opened, Timed(device, Clock(device, {}, 300.0))), pytest.warns(UserWarning, match="no memory"):
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
    assert Store(A100).first_runs.banned() == set()


# --- operands ---


@pytest.mark.parametrize("mode", ["once", "background"])
@pytest.mark.parametrize("lies", ["repeated", "unit", "vector"])
def test_operands_with_other_dimensions_are_raced(
    device: EmulatedDevice, opened: pack.Pack, lies: str, mode: races.Mode
) -> None:
    """B of a batch, repeated or with an extent of one, and a row of A."""
    a, b, expected = drawn(device)
    if lies == "vector":
        left, right, expected = a[0], b.t(), expected[0]
    else:
        left, right, expected = a.view(2, 15, 64), b.t()[None], expected.view(2, 15, 24)
        right = right.expand(2, 64, 24) if lies == "repeated" else right
    with process(opened, Timed(device, Clock(device, {}, 300.0)), mode):
        for _ in range(90):
            assert torch.equal(cudal2gen.matmul(left, right), expected)
    assert len(measurements()) == 1
    assert Store(A100).first_runs.banned() == set()


def test_one_race_at_a_time_has_copies(
    device: EmulatedDevice, opened: pack.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of calls with ever new shapes; a race whose calls stay away is given up, another's begins."""
    copies: list[Any] = []
    copy = contests._copy
    monkeypatch.setattr(contests, "_copy", lambda *operands: copies.append(copy(*operands)) or copies[-1])
    a, b, _ = drawn(device)
    clock = Clock(device, {}, 300.0)
    with process(opened, Timed(device, clock), mode="background") as dispatcher:
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


def test_autocast_and_gradients_stay_outside(device: EmulatedDevice, opened: pack.Pack) -> None:
    """They would slow torch's product down, and not the kernel."""

    class Watching(Clock):
        def elapsed_us(self, call: Callable[[], object], times: int) -> float:
            assert not torch.is_autocast_enabled("cpu")
            assert not torch.is_grad_enabled()
            return super().elapsed_us(call, times)

    a, b, expected = drawn(device)
    with process(opened, Timed(device, Watching(device, {}, 300.0))), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
    assert len(measurements()) == 1


def test_a_second_device_is_timed_on_its_own_stream_which_waits_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[Any] = []
    held_us: list[tuple[int, float]] = []
    current: list[int] = [0]

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
    # A quarter more than the host took; less after faster calls, by a tenth each; of no more than 100 us a call.
    first, second = 1.25 * 3 * 20, [1.25 * 2 * us for us in (40, 36, 32.4, 100)]
    assert held_us == [(1, pytest.approx(us, abs=1e-2)) for us in (first, *second)]


# --- the choice ---


def test_a_slower_candidate_is_not_chosen_by_noise() -> None:
    """10,000 races by the statistics alone: kernels as fast as torch or slower, noise of 1 to 20 %, best of three."""
    random = np.random.default_rng(1)
    samples, chosen = 2 * races.MIN_ROUNDS, 0
    for _ in range(10_000):
        noise, slower = random.uniform(0.01, 0.2), 1 + random.exponential(0.05)
        vendor, again, confirmed, *kernels = np.exp(random.normal(0, noise, (3 + races.FINALISTS, samples)))
        best = min(kernels, key=np.median)
        # The median decides most of them, without an interval.
        if np.median(np.log(vendor) - np.log(best * slower)) > 0 and races.faster(vendor, best * slower):
            chosen += races.faster(again, confirmed * slower) and races.steadily_faster(again, confirmed * slower)
    assert chosen == 0


def test_a_faster_candidate_is_chosen() -> None:
    """By 5 % and more, with 1 % of noise."""
    random = np.random.default_rng(2)
    for _ in range(200):
        vendor, kernel = np.exp(random.normal(0, 0.01, (2, 2 * races.MIN_ROUNDS)))
        assert races.faster(vendor, kernel / 1.05)
        assert races.steadily_faster(vendor, kernel / 1.05)


def test_modes_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(races.VARIABLE, "always")
    with pytest.raises(WrongInput, match="CUDAL2GEN_AUTOTUNE=always: must be one of off, once, background"):
        dispatch.Dispatcher()
    monkeypatch.setenv(races.VARIABLE, "background")
    assert dispatch.Dispatcher().mode == "background"
    with pytest.raises(WrongInput, match="autotune=now"), cudal2gen.autotune("now"):  # type: ignore[arg-type]
        pass
    monkeypatch.delenv(races.VARIABLE)
    assert dispatch.Dispatcher().mode == "off"
