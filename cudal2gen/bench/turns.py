"""Times several of our kernels on one problem alternately, so that their times can be compared.

The tuner and ``try`` use this for kernels that may not work: one that fails, or whose time is impossible, is reported
and does not stop the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from cudal2gen.bench.protocols import Condition, Settings, TooGood, measure, states
from cudal2gen.kernel import Problem
from cudal2gen.launch.gpu import Contender, GpuError, KernelContender, MeasuringDevice
from cudal2gen.launch.launcher import LaunchError
from cudal2gen.results import Timing


class Turns(NamedTuple):
    """The timings by contender, and the reasons of the kernels that have none.

    ``absent``: contenders that do not run or compute wrong results. ``too_good``: kernels whose time is shorter than
    the hardware allows.
    """

    timings: Mapping[str, Timing]
    absent: Mapping[str, str]
    too_good: Mapping[str, str]


def in_turns(
    device: MeasuringDevice,
    problem: Problem,
    kernels: Mapping[str, Callable[[], KernelContender]],
    others: Sequence[Contender] = (),
    *,
    seconds: float,
    warmup_seconds: float = 0.0,
    seed: int = 0,
) -> Turns:
    """Times kernels and ``others`` (baselines) under the ``device`` protocol, with a cold L2 where that differs.

    ``kernels``: functions that open a kernel, by the name under which its timing is returned. ``seconds``: time spent
    on each contender. A kernel whose time is impossible is excluded, and the others are timed anew, because their
    samples alternated with its. Raises TooGood if one of ``others`` has an impossible time, because then the clock is
    wrong and no time is valid.
    """
    too_good: dict[str, str] = {}
    while remaining := {name: open_kernel for name, open_kernel in kernels.items() if name not in too_good}:
        try:
            timings, absent = _measure(device, problem, remaining, others, seconds, warmup_seconds, seed)
        except TooGood as error:
            if error.contender not in remaining:
                raise
            too_good[error.contender] = str(error)
            warmup_seconds = 0.0
            continue
        return Turns(timings, absent, too_good)
    return Turns({}, {}, too_good)


def _measure(
    device: MeasuringDevice,
    problem: Problem,
    kernels: Mapping[str, Callable[[], KernelContender]],
    others: Sequence[Contender],
    seconds: float,
    warmup_seconds: float,
    seed: int,
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Opens the kernels and times them with ``others``. Returns the timings and the reasons of absent contenders.
    Raises TooGood."""
    with ExitStack() as stack:
        contenders, refused = list(others), dict[str, str]()
        for name, open_kernel in kernels.items():
            try:
                kernel = open_kernel()
            except (LaunchError, GpuError) as error:
                refused[name] = str(error)
                continue
            stack.callback(kernel.close)
            kernel.name = name
            contenders.append(kernel)
        work = Condition("device", states(problem, "device", device.environment.l2_bytes)[0])
        settings = Settings(
            warmup_seconds=warmup_seconds, benchmark_seconds=seconds * max(1, len(contenders)), seed=seed
        )
        (measurement,) = measure(device, problem, contenders, [work], settings)
    return {timing.contender: timing for timing in measurement.timings}, dict(measurement.absent) | refused
