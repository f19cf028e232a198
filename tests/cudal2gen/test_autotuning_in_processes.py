"""Proves that races keep to their budgets with other threads and processes, in graph captures and under deterministic
algorithms.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import cudal2gen
from cudal2gen import pack
from tests.cudal2gen.emulated import EmulatedDevice
from tests.packages import require

torch = require("torch")

from cudal2gen.operators import dispatch, plan_invariance  # noqa: E402
from cudal2gen.operators.measuring import buckets, races  # noqa: E402
from cudal2gen.operators.measuring.tuned import Store  # noqa: E402
from tests.cudal2gen.racing import (  # noqa: E402
    A100,
    NAMES,
    Clock,
    ClockedDevice,
    draw_product,
    measurements,
    simulated_process,
    store,
    tuner_of,
)
from tests.cudal2gen.test_autotuning import FAST, clock, measuring_dispatcher, opened_pack, summary  # noqa: E402

__all__ = ["clock", "measuring_dispatcher", "opened_pack", "store"]  # fixtures
pytestmark = pytest.mark.torch


# --- threads ---


class WaitingClock(Clock):
    """A clock whose first sample waits until a test lets it continue."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def elapsed_us(self, call: Callable[[], object], times: int) -> float:
        """Says that a sample has begun, and waits for the test."""
        self.begun.set()
        assert self.go_on.wait(300)
        return super().elapsed_us(call, times)


@pytest.mark.slow
def test_other_calls_do_not_wait_for_a_race(device: EmulatedDevice, opened_pack: pack.Pack) -> None:
    clock = WaitingClock(device, FAST, 300.0)
    a, b, expected = draw_product(device, (2, 24, 64))
    with simulated_process(opened_pack, ClockedDevice(device, clock)) as dispatcher:
        first = threading.Thread(target=cudal2gen.matmul, args=(a, b.t()))
        first.start()
        try:
            assert clock.begun.wait(300)
            for rows in (2, 1):  # the same shape, another one
                assert torch.equal(cudal2gen.matmul(a[:rows], b.t()), expected[:rows])
            assert dispatcher.stats() == {"kernel": {}, "torch": {"another thread measures": 2}}
            dispatcher.forget()
        finally:
            clock.go_on.set()
            first.join(300)
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert summary() == ["2_24_64 x1 torch.matmul"]
        assert torch.equal(cudal2gen.matmul(a[:1], b.t()), expected[:1])
        assert summary()[1:] == ["1_24_64 x1 torch.matmul"]


# --- budgets, captures, compilation ---


@pytest.mark.parametrize("mode", ["once", "background"])
@pytest.mark.parametrize("torch_us", [3.0, 1500.0, 2500.0, 60_000.0])
def test_a_race_keeps_its_budget(
    torch_us: float, mode: races.Mode, device: EmulatedDevice, opened_pack: pack.Pack
) -> None:
    a, b, expected = draw_product(device, (2, 24, 64))
    clock = Clock(device, dict.fromkeys(FAST, torch_us / 1.5) | {NAMES["whole"]: 20 * torch_us}, torch_us)
    with simulated_process(opened_pack, ClockedDevice(device, clock), mode) as dispatcher:
        for _ in range(1 if mode == "once" else 80):
            assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        tuner = tuner_of(dispatcher)
        assert tuner is not None
        assert 0 < tuner.spent == pytest.approx(clock.seconds)
        assert clock.seconds <= races.SHAPE_SECONDS
    assert bool(measurements()) == (torch_us <= 2000), "what does not fit is not begun"


@pytest.mark.slow
def test_a_process_keeps_its_budget(
    device: EmulatedDevice, measuring_dispatcher: dispatch.Dispatcher, clock: Clock
) -> None:
    a, b, _ = draw_product(device, (2, 320, 64))
    tuner = tuner_of(measuring_dispatcher)
    assert tuner is not None
    tuner.seconds = (0.1, 0.08)
    for cols in range(8, 48, 8):
        cudal2gen.matmul(a, b[:cols].t())
    assert 0.05 < clock.seconds <= 0.08 + 300e-6, "up to one call of torch, whose time is not known before"
    assert 2 <= len(measurements()) < 5


@pytest.mark.parametrize("mode", ["once", "background"])
def test_a_capture_measures_nothing_and_a_later_call_does(
    mode: races.Mode, device: EmulatedDevice, opened_pack: pack.Pack, clock: Clock
) -> None:
    a, b, expected = draw_product(device, (2, 24, 64))
    timed = ClockedDevice(device, clock)
    with simulated_process(opened_pack, timed, mode) as dispatcher:
        timed.captures = True
        for _ in range(3):
            assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert (clock.seconds, dispatcher.stats()["kernel"]) == (0, {})
        timed.captures = False
        for _ in range(1 if mode == "once" else 60):
            cudal2gen.matmul(a, b.t())
    assert len(summary()) == 1


@pytest.mark.slow
def test_compiled_calls_race_once(
    device: EmulatedDevice, measuring_dispatcher: dispatch.Dispatcher, clock: Clock
) -> None:
    a, b, expected = draw_product(device, (6, 24, 64))
    compiled = torch.compile(lambda a, b: cudal2gen.linear(a, b) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b), expected * 2)
    assert len(summary()) == 2, "the graph's call races, its tracing does not"
    spent = clock.seconds
    assert torch.equal(compiled(a, b), expected * 2)
    assert clock.seconds == spent
    with dispatch.replaced(dispatch.Dispatcher(mode="once")):
        operator = torch.ops.cudal2gen.linear.default
        torch.library.opcheck(operator, (torch.ones(3, 5).half().requires_grad_(), torch.ones(4, 5).half()))


# --- processes ---

# The program of another process. Its arguments: a pack, and what it is to do.
PROCESS = """
import os, sys, threading, time
from pathlib import Path
from cudal2gen import pack
import cudal2gen
from cudal2gen.operators.measuring import contests
from tests.cudal2gen import racing
from tests.cudal2gen.emulated import EmulatedDevice
from tests.cudal2gen.test_autotuning import FAST, PREDICATED

folder, what = sys.argv[1:]
bind = contests.bind
def hanging(device, kernel, use, request, layout):
    if request.sizes.n == 16 and use.launched.m == 2:
        print("in it", flush=True)
        time.sleep(600)
    return bind(device, kernel, use, request, layout)

with EmulatedDevice(PREDICATED) as device:
    timed = racing.ClockedDevice(device, racing.Clock(device, FAST, 300.0))
    with racing.simulated_process(pack.open_pack(Path(folder)), timed, "once" if what == "hang" else "background"):
        a, b, _ = racing.draw_product(device, (2, 24, 64))
        if what == "hang":
            cudal2gen.matmul(a, b.t())
            contests.bind = hanging
            cudal2gen.matmul(a, b[:16].t())
        for _ in range(4):
            cudal2gen.matmul(a, b.t())
        assert threading.enumerate() == [threading.main_thread()]
        print("ends within a race", flush=True)
"""


def start_process(opened_pack: pack.Pack, checkout: Path, what: str) -> subprocess.Popen[str]:
    """Starts ``PROCESS`` with a pack and the word for what it is to do."""
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(opened_pack.directory), what], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(checkout)},
    )  # fmt: skip


@pytest.mark.slow
def test_a_candidate_that_hangs_is_banned_and_nothing_is_lost(
    device: EmulatedDevice, opened_pack: pack.Pack, clock: Clock, checkout: Path
) -> None:
    other = start_process(opened_pack, checkout, "hang")
    assert other.stdout is not None
    assert other.stdout.readline() == "in it\n"
    other.send_signal(signal.SIGKILL)
    other.communicate()
    (digest,) = Store(A100).first_runs.banned()
    hanging = next(kernel.record.name for kernel in opened_pack.table.kernels if kernel.digest == digest)
    assert summary() == ["2_24_64 x1 torch.matmul"]
    a, b, expected = draw_product(device, (2, 24, 64))
    with simulated_process(opened_pack, ClockedDevice(device, clock)):
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert clock.seconds == 0, "the other process has measured it"
        assert torch.equal(cudal2gen.matmul(a, b[:16].t()), expected[:, :16])
    assert summary()[1:] == ["2_16_64 x1 torch.matmul"]
    assert {row.timings[0].record for row in measurements()[1:]}.isdisjoint({hanging})


@pytest.mark.slow
def test_a_race_in_the_background_ends_with_its_process(opened_pack: pack.Pack, checkout: Path) -> None:
    other = start_process(opened_pack, checkout, "end")
    text, _ = other.communicate(timeout=300)
    assert (other.returncode, text) == (0, "ends within a race\n")
    assert measurements() == []
    assert Store(A100).first_runs.banned() == set()


# --- deterministic algorithms ---


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "warn_only"), [("once", False), ("background", True)])
def test_deterministic_algorithms_begin_no_race(
    mode: races.Mode, warn_only: bool, device: EmulatedDevice, opened_pack: pack.Pack, clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Earlier measurements are used. A race begins when deterministic algorithms are switched off."""
    monkeypatch.setattr(buckets, "LARGEST", 0)
    a, b, expected = draw_product(device)
    with simulated_process(opened_pack, ClockedDevice(device, clock), mode) as dispatcher:
        with deterministic(warn_only):
            for _ in range(3):
                assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
            assert dispatcher.stats() == {"kernel": {}, "torch": {plan_invariance.NOT_MEASURED: 3}}
            assert cudal2gen.explain(a, b.t()).endswith("; deterministic algorithms are on: " + RULE)
            assert (measurements(), device.session.launches) == ([], [])
        for _ in range(60):
            assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
            if dispatcher.stats()["kernel"]:
                break
        assert len(measurements()) == 1
        assert "deterministic" not in cudal2gen.explain(a, b.t())
    with simulated_process(opened_pack, ClockedDevice(device, clock), mode) as dispatcher, deterministic(warn_only):
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert sum(dispatcher.stats()["kernel"].values()) == 1


# A part of the reason that ``explain`` gives.
RULE = "what was measured counts, and nothing is measured anew"


@contextmanager
def deterministic(warn_only: bool) -> Iterator[None]:
    """Demands deterministic algorithms of torch, as errors or as warnings."""
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
