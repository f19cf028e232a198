"""Proves that each kernel is timed, or reported with a reason, when others fail or are impossibly fast."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudal2gen.bench import turns
from cudal2gen.bench.protocols import Condition, TooGood
from cudal2gen.launch.gpu import GpuError
from cudal2gen.launch.launcher import LaunchError
from tests.cudal2gen.asking import PROBLEM

# What a kernel does: it is timed, does not open, is absent when it is measured, or is impossibly fast.
KERNELS = st.lists(st.sampled_from(("timed", "launch", "gpu", "absent", "fast")), max_size=6)


@settings(max_examples=80)
@given(KERNELS, st.sampled_from(((), ("vendor",), ("vendor", "other"))), st.booleans())
def test_each_kernel_is_timed_or_has_a_reason(kinds: list[str], others: tuple[str, ...], is_clock_wrong: bool) -> None:
    """``is_clock_wrong``: whether the vendor's kernel seems impossibly fast, which only a wrong clock explains."""
    names = {f"kernel {number}": kind for number, kind in enumerate(kinds)}
    closed: list[str] = []
    calls: list[tuple[list[str], Any]] = []

    def open_fake(kind: str) -> Any:
        if kind in ("launch", "gpu"):
            raise LaunchError(1, kind) if kind == "launch" else GpuError(kind)
        kernel = SimpleNamespace(name="")
        kernel.close = lambda: closed.append(kernel.name)
        return kernel

    def measure(device: Any, problem: Any, contenders: list[Any], conditions: Any, options: Any) -> list[Any]:
        assert (problem, conditions) == (PROBLEM, [Condition("device", "cold")])
        present = [contender.name for contender in contenders]
        calls.append((present, options))
        fast = next((name for name in present if names.get(name) == "fast"), None)
        if is_clock_wrong and "vendor" in present and fast is None:
            raise TooGood("the clock", "vendor")
        if fast is not None:
            raise TooGood(f"{fast} is too fast", fast)
        timings = [SimpleNamespace(contender=name) for name in present if names.get(name) != "absent"]
        absent = [(name, "absent") for name in present if names.get(name) == "absent"]
        return [SimpleNamespace(timings=timings, absent=absent)]

    device: Any = SimpleNamespace(environment=SimpleNamespace(l2_bytes=1 << 40))
    kernels: Any = {name: lambda kind=kind: open_fake(kind) for name, kind in names.items()}
    vendors: Any = [SimpleNamespace(name=name) for name in others]

    def plan_turns() -> turns.Turns:
        return turns.in_turns(device, PROBLEM, kernels, vendors, seconds=2.0, warmup_seconds=3.0, seed=5)

    not_too_fast = [name for name, kind in names.items() if kind != "fast"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "measure", measure)
        if is_clock_wrong and "vendor" in others and not_too_fast:
            with pytest.raises(TooGood):
                plan_turns()
            return
        done = plan_turns()
    assert done.too_good == {name: f"{name} is too fast" for name, kind in names.items() if kind == "fast"}
    absent = {name: kind for name, kind in names.items() if kind in ("launch", "gpu", "absent")}
    assert {name: reason.split()[0] for name, reason in done.absent.items()} == absent
    timed = {name for name, kind in names.items() if kind == "timed"}
    assert done.timings.keys() == ({*timed, *others} if not_too_fast else set())
    assert all(done.timings[name].contender == name for name in done.timings)
    # Every round leaves out one kernel more and closes what it opened. Only the first round warms up.
    opening = [name for name, kind in names.items() if kind not in ("launch", "gpu")]
    assert sorted(closed) == sorted(name for present, _ in calls for name in present if name in opening)
    fast = [name for name, kind in names.items() if kind == "fast"]
    for number, (present, options) in enumerate(calls):
        assert present == [*others, *(name for name in opening if name not in fast[:number])]
        assert (options.warmup_seconds, options.seed) == (0.0 if number else 3.0, 5)
        assert options.benchmark_seconds == 2.0 * max(1, len(present))
