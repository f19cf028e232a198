"""Measures many problems within a time budget, and resumes where an earlier run ended.

Each measurement is stored as it is taken, and a later run skips what is stored for the same card, binary and
contenders. Problems are ordered so that a run that ends early has measured a sample of all size classes. A kernel that
makes the device unusable is stored as absent, so that no later run tries it again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from cudal2gen import results
from cudal2gen.bench.protocols import (
    Condition,
    Settings,
    TooGood,
    first_line,
    measure,
    measurement_of,
    states,
    target_qps,
)
from cudal2gen.kernel import Problem, Record, SizeClass
from cudal2gen.launch.gpu import Contender, GpuError, KernelContender, MeasuringDevice
from cudal2gen.launch.launcher import LaunchError
from cudal2gen.results import KERNEL, Environment, Measurement
from kernelproof.ground.errors import Failure

# The order in which size classes take turns.
CLASSES: tuple[SizeClass, ...] = ("large", "split-k", "medium", "small-m", "tiny", "huge")


class Stopped(Failure):
    """A kernel or a library has made the device unusable for this process, so the run ends."""


@dataclass
class RunOutcome:
    """What a run did.

    - ``measured``: the number of measurements that it took.
    - ``stored``: the number of problems that were stored before.
    - ``left``: the number of problems for which the time was too short.
    - ``faults``: one line for each kernel or problem that failed.
    """

    measured: int = 0
    stored: int = 0
    left: int = 0
    faults: list[str] = field(default_factory=list)


def stratified(problems: Iterable[Problem], seed: int = 0) -> list[Problem]:
    """The problems in an order in which the size classes take turns, random within each class.

    The first problems of this order are thus always a sample of all classes.
    """
    classes: dict[SizeClass, list[Problem]] = {name: [] for name in CLASSES}
    for problem in problems:
        classes[problem.size_class].append(problem)
    rng = random.Random(seed)
    for members in classes.values():
        rng.shuffle(members)
    return [problem for turn in zip_longest(*classes.values()) for problem in turn if problem is not None]


def pending(
    record: Record,
    digest: str,
    names: Iterable[str],
    settings: Settings,
    environment: Environment,
    stored: Iterable[Measurement],
) -> list[Condition]:
    """The measurements of a record that are not among those ``stored`` for its problem on this card.

    A stored measurement counts if binary, launch options, load and number of products are the same, and if it covers
    every contender in ``names``. If our kernel was absent, it counts in any case, so that a kernel that does not run
    is not tried again.
    """
    names = set(names)
    measured = {
        Condition(measurement.protocol, measurement.l2)
        for measurement in stored
        if (measurement.digest, measurement.options) == (digest, record.launch_options)
        and (KERNEL in measurement.absent or names <= set(measurement.contenders) | set(measurement.absent))
        and measurement.target_qps == target_qps(settings, measurement.protocol)
        and measurement.products == settings.products
    }
    return [
        Condition(protocol, l2)
        for protocol in settings.protocols
        for l2 in states(record.problem, protocol, environment.l2_bytes, settings.products)
        if (protocol, l2) not in measured
    ]


def _on_this_card(stored: results.Measurements, environment: Environment) -> dict[Problem, list[Measurement]]:
    """The stored measurements with the same card, driver and library versions, by problem."""
    by_problem: dict[Problem, list[Measurement]] = {}
    for measurement in stored.measurements:
        if _card(stored.environments[measurement.environment]) == _card(environment):
            by_problem.setdefault(measurement.problem, []).append(measurement)
    return by_problem


def _card(environment: Environment) -> tuple[object, ...]:
    """The key that must be equal for a stored measurement to count: the card's name, the driver, and versions."""
    return environment.name, environment.driver, environment.versions


class TimeLeft:
    """Estimates how long the rest of a run takes, from the time that measured problems of each size class took.

    ``now``: the clock, in seconds; ``begin``: when the run began. ``budget_seconds``: None for no limit.
    """

    def __init__(
        self, now: Callable[[], float], begin: float, problems: Iterable[Problem], budget_seconds: float | None
    ) -> None:
        self._now, self._begin, self._budget = now, begin, budget_seconds
        self._spent: dict[SizeClass, list[float]] = {}
        self._to_come = Counter(problem.size_class for problem in problems)

    def allows(self, problem: Problem) -> bool:
        """Whether the rest of the budget is enough for this problem."""
        return self._budget is None or self._elapsed + self.expected(problem.size_class) <= self._budget

    @contextmanager
    def spent_on(self, problem: Problem) -> Iterator[None]:
        """Counts the problem as done, and adds the time of the block to its class unless the block raises."""
        self._to_come.subtract([problem.size_class])
        start = self._now()
        yield
        self._spent.setdefault(problem.size_class, []).append(self._now() - start)

    def expected(self, size_class: SizeClass) -> float:
        """Expected seconds for one problem: the mean of its class, or of all classes, or one second at the start."""
        times = self._spent.get(size_class) or [seconds for times in self._spent.values() for seconds in times]
        return sum(times) / len(times) if times else 1.0

    @property
    def seconds(self) -> float:
        """Expected seconds until all problems are measured or the budget is spent, whichever is sooner."""
        expected = sum(count * self.expected(size_class) for size_class, count in self._to_come.items())
        return expected if self._budget is None else min(expected, self._budget - self._elapsed)

    @property
    def _elapsed(self) -> float:
        """Seconds since the beginning."""
        return self._now() - self._begin


@dataclass(frozen=True)
class BenchPlan:
    """What a run measures, and the file (``store``) to which it appends measurements.

    ``open_kernel`` loads a record's kernel, and ``digest`` gives the digest of its binary. ``again``: measure problems
    again that are stored already. ``budget_seconds``: a problem that would exceed it is not begun; None for no limit.
    """

    records: Sequence[Record]
    open_kernel: Callable[[Record], KernelContender]
    digest: Callable[[Record], str]
    baselines: Sequence[Contender]
    settings: Settings
    store: Path
    budget_seconds: float | None = None
    again: bool = False


class PlannedRecord(NamedTuple):
    """A record, the digest of its binary, and the measurements to take of it."""

    record: Record
    digest: str
    work: list[Condition]


def run(
    device: MeasuringDevice, plan: BenchPlan, progress: Callable[[int, int, float], None] = lambda *_: None
) -> RunOutcome:
    """Measures a plan's records in stratified order and stores each measurement as it is taken.

    ``progress`` is called with the number of problems done, the number of all, and the expected seconds left. Raises
    TooGood, and Stopped if a kernel made the device unusable; that kernel is stored as absent and not tried again.
    """
    begin, environment = device.now(), device.environment
    stored = results.measurements(plan.store)
    by_problem = {} if plan.again else _on_this_card(stored, environment)
    names = [baseline.name for baseline in plan.baselines]
    record_of = {record.problem: record for record in plan.records}
    tasks = []
    for problem in stratified(record_of, plan.settings.seed):
        record = record_of[problem]
        digest = plan.digest(record)
        work = pending(record, digest, names, plan.settings, environment, by_problem.get(problem, ()))
        if work:
            tasks.append(PlannedRecord(record, digest, work))
    outcome = RunOutcome(stored=len(record_of) - len(tasks))
    if tasks and environment.id not in stored.environments:
        results.append([environment], plan.store)
    time_left = TimeLeft(device.now, begin, [task.record.problem for task in tasks], plan.budget_seconds)
    for number, task in enumerate(tasks):
        problem = task.record.problem
        if not time_left.allows(problem):
            outcome.left = len(tasks) - number
            break
        try:
            with time_left.spent_on(problem):
                _run_task(device, plan, task, number > 0, outcome)
        except TooGood:
            raise
        except RuntimeError as error:
            # CUDA errors come in two kinds. After an illegal access or a failed launch every later call in this process
            # fails; after others, such as too little device memory, the next problem can be measured.
            if _is_stopped(device):
                raise _give_up(environment, plan, task, error) from error
            outcome.faults.append(f"{problem.mnk}: {first_line(error)}")
            continue
        progress(number + 1, len(tasks), time_left.seconds)
    return outcome


def _run_task(device: MeasuringDevice, plan: BenchPlan, task: PlannedRecord, warm: bool, outcome: RunOutcome) -> None:
    """Measures one record, stores each measurement and updates ``outcome``; an absent kernel of ours is a fault."""
    problem = task.record.problem
    try:
        with plan.open_kernel(task.record) as kernel:
            for measurement in measure(device, problem, [kernel, *plan.baselines], task.work, plan.settings, warm):
                results.append([measurement], plan.store)
                outcome.measured += 1
                if reason := measurement.absent.get(KERNEL):
                    outcome.faults.append(f"{problem.mnk}: {reason}")
    except (GpuError, LaunchError) as error:
        outcome.faults.append(f"{problem.mnk}: {error}")


def _give_up(environment: Environment, plan: BenchPlan, task: PlannedRecord, error: Exception) -> Stopped:
    """Stores that this kernel stopped the device, so that no later run tries it again."""
    problem, reason = task.record.problem, f"stopped the device: {first_line(error)}"
    absent, options = {KERNEL: reason}, task.record.launch_options
    given_up = [
        measurement_of(environment, problem, item, task.digest, options, plan.settings, absent=absent)
        for item in task.work
    ]
    results.append(given_up, plan.store)
    return Stopped(f"{problem.mnk}: {task.record.name} or a baseline {reason}")


def _is_stopped(device: MeasuringDevice) -> bool:
    """Whether the device refuses all further work in this process."""
    try:
        device.synchronize()
    except RuntimeError:
        return True
    return False
