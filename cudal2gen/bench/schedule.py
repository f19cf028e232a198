"""A benchmark of many problems: their order, which are stored already, and when the time budget is spent."""

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
from cudal2gen.bench.protocols import Settings, TooGood, Work, first_line, measure, measurement_of, states, target_qps
from cudal2gen.kernel import Problem, Record, SizeClass
from cudal2gen.launch.gpu import Contender, Device, GpuError, Kernel
from cudal2gen.launch.launcher import LaunchError
from cudal2gen.results import KERNEL, Environment, Measurement
from kernelproof.ground.errors import Failure

# The first problem of each class is measured in this order; from there on the classes take turns.
CLASSES: tuple[SizeClass, ...] = ("large", "split-k", "medium", "small-m", "tiny", "huge")


class Stopped(Failure):
    """A kernel or a library has made the device unusable for this process."""


@dataclass
class Outcome:
    """What a run did: measurements taken, problems already stored, problems left, and faults, one line each."""

    measured: int = 0
    stored: int = 0
    left: int = 0
    faults: list[str] = field(default_factory=list)


def stratified(problems: Iterable[Problem], seed: int = 0) -> list[Problem]:
    """The problems in such an order that any beginning of it is a sample of all size classes."""
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
) -> list[Work]:
    """The work on a problem that is not stored yet for this card, binary, data and contenders."""
    names = set(names)
    measured = {
        Work(measurement.protocol, measurement.l2)
        for measurement in stored
        if (measurement.digest, measurement.options) == (digest, record.launch_options)
        and (KERNEL in measurement.absent or names <= set(measurement.contenders) | set(measurement.absent))
        and measurement.target_qps == target_qps(settings, measurement.protocol)
        and measurement.products == settings.products
    }
    return [
        Work(protocol, l2)
        for protocol in settings.protocols
        for l2 in states(record.problem, protocol, environment.l2_bytes, settings.products)
        if (protocol, l2) not in measured
    ]


def _on_this_card(stored: results.Measurements, environment: Environment) -> dict[Problem, list[Measurement]]:
    """Stored measurements by problem, of the same card, driver and library versions."""
    by_problem: dict[Problem, list[Measurement]] = {}
    for measurement in stored.measurements:
        if _card(stored.environments[measurement.environment]) == _card(environment):
            by_problem.setdefault(measurement.problem, []).append(measurement)
    return by_problem


def _card(environment: Environment) -> tuple[object, ...]:
    """What measurements of one card share: its name, driver and library versions."""
    return environment.name, environment.driver, environment.versions


class TimeLeft:
    """How long the rest of a run takes, judged by the problems of each size class that it has measured.

    ``now``: the clock, in seconds; ``begin``: when the run began.
    """

    def __init__(
        self, now: Callable[[], float], begin: float, problems: Iterable[Problem], budget_seconds: float | None
    ) -> None:
        self._now, self._begin, self._budget = now, begin, budget_seconds
        self._spent: dict[SizeClass, list[float]] = {}
        self._to_come = Counter(problem.size_class for problem in problems)

    def allows(self, problem: Problem) -> bool:
        """Whether the budget is enough for a problem of this class."""
        return self._budget is None or self._elapsed + self.expected(problem.size_class) <= self._budget

    @contextmanager
    def spent_on(self, problem: Problem) -> Iterator[None]:
        """Takes the problem off the rest, and times the block that measures it unless the block raises."""
        self._to_come.subtract([problem.size_class])
        start = self._now()
        yield
        self._spent.setdefault(problem.size_class, []).append(self._now() - start)

    def expected(self, size_class: SizeClass) -> float:
        """Seconds that a problem takes: the mean of its class, else of all classes, else one."""
        times = self._spent.get(size_class) or [seconds for times in self._spent.values() for seconds in times]
        return sum(times) / len(times) if times else 1.0

    @property
    def seconds(self) -> float:
        """Seconds to the end of all problems, or of the budget if that is sooner."""
        expected = sum(count * self.expected(size_class) for size_class, count in self._to_come.items())
        return expected if self._budget is None else min(expected, self._budget - self._elapsed)

    @property
    def _elapsed(self) -> float:
        return self._now() - self._begin


@dataclass(frozen=True)
class Plan:
    """What a run measures; measurements are appended to ``store``.

    ``open_kernel``, ``digest``: a record's kernel, and the digest of its binary. ``again``: what the store holds is
    measured again. ``budget_seconds``: no problem is begun that it does not leave time for.
    """

    records: Sequence[Record]
    open_kernel: Callable[[Record], Kernel]
    digest: Callable[[Record], str]
    baselines: Sequence[Contender]
    settings: Settings
    store: Path
    budget_seconds: float | None = None
    again: bool = False


class Task(NamedTuple):
    """A record, the digest of its binary, and the measurements to take of it."""

    record: Record
    digest: str
    work: list[Work]


def run(device: Device, plan: Plan, progress: Callable[[int, int, float], None] = lambda *_: None) -> Outcome:
    """Measures a plan's records in stratified order and stores each measurement as it is taken.

    ``progress`` is called with problems done, problems in all, and seconds left to the end of all or of the budget.
    Raises TooGood, and Stopped where a kernel took the device down; that kernel is not tried again.
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
            tasks.append(Task(record, digest, work))
    outcome = Outcome(stored=len(record_of) - len(tasks))
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
            if _stopped(device):
                raise _give_up(environment, plan, task, error) from error
            outcome.faults.append(f"{problem.mnk}: {first_line(error)}")  # such as device memory that is too small
            continue
        progress(number + 1, len(tasks), time_left.seconds)
    return outcome


def _run_task(device: Device, plan: Plan, task: Task, warm: bool, outcome: Outcome) -> None:
    """Measures one record, stores each measurement, and adds to the outcome; what our kernel refuses is a fault."""
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


def _give_up(environment: Environment, plan: Plan, task: Task, error: Exception) -> Stopped:
    """Stores that this kernel stopped the device, so that no later run tries it again."""
    problem, reason = task.record.problem, f"stopped the device: {first_line(error)}"
    absent, options = {KERNEL: reason}, task.record.launch_options
    given_up = [
        measurement_of(environment, problem, item, task.digest, options, plan.settings, absent=absent)
        for item in task.work
    ]
    results.append(given_up, plan.store)
    return Stopped(f"{problem.mnk}: {task.record.name} or a baseline {reason}")


def _stopped(device: Device) -> bool:
    """Whether the device refuses all work: an error of a kernel outlasts it."""
    try:
        device.synchronize()
    except RuntimeError:
        return True
    return False
