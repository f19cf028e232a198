"""Kernels of one problem are timed in turns. A kernel that fails does not stop the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from cudal2gen.bench.protocols import Settings, TooGood, Work, measure, states
from cudal2gen.kernel import Problem
from cudal2gen.launch.gpu import Contender, Device, GpuError, Kernel
from cudal2gen.launch.launcher import LaunchError
from cudal2gen.results import Timing


class Turns(NamedTuple):
    """Samples by contender. ``absent``: reasons of those that do not run or are wrong; ``too_good``: of kernels whose
    time is below what the hardware allows."""

    timings: Mapping[str, Timing]
    absent: Mapping[str, str]
    too_good: Mapping[str, str]


def in_turns(
    device: Device,
    problem: Problem,
    kernels: Mapping[str, Callable[[], Kernel]],
    others: Sequence[Contender] = (),
    *,
    seconds: float,
    warmup_seconds: float = 0.0,
    seed: int = 0,
) -> Turns:
    """The ``device`` protocol, from a cold L2 where there is a difference, of kernels that are opened by name.

    ``seconds``: of timing for each contender. Raises TooGood where one of ``others`` is too good: then the clock is
    wrong, and no time is valid.
    """
    too_good: dict[str, str] = {}
    while waiting := {name: opened for name, opened in kernels.items() if name not in too_good}:
        try:
            timings, absent = _measured(device, problem, waiting, others, seconds, warmup_seconds, seed)
        except TooGood as error:
            if error.contender not in waiting:
                raise
            too_good[error.contender] = str(error)
            warmup_seconds = 0.0
            continue
        return Turns(timings, absent, too_good)
    return Turns({}, {}, too_good)


def _measured(
    device: Device,
    problem: Problem,
    kernels: Mapping[str, Callable[[], Kernel]],
    others: Sequence[Contender],
    seconds: float,
    warmup_seconds: float,
    seed: int,
) -> tuple[dict[str, Timing], dict[str, str]]:
    with ExitStack() as stack:
        contenders, refused = list(others), dict[str, str]()
        for name, opened in kernels.items():
            try:
                kernel = opened()
            except (LaunchError, GpuError) as error:
                refused[name] = str(error)
                continue
            stack.callback(kernel.close)
            kernel.name = name
            contenders.append(kernel)
        work = Work("device", states(problem, "device", device.environment.l2_bytes)[0])
        settings = Settings(
            warmup_seconds=warmup_seconds, benchmark_seconds=seconds * max(1, len(contenders)), seed=seed
        )
        (measurement,) = measure(device, problem, contenders, [work], settings)
    return {timing.contender: timing for timing in measurement.timings}, dict(measurement.absent) | refused
