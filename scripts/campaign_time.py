"""Campaign time against the number of GPUs, simulated: the campaign's own scheduling under a virtual clock.

    python scripts/campaign_time.py --problems 1000 --svg docs/campaign-time.svg > table.md

Nothing is measured on a GPU. Races are real ones, in the model environment; how long a kernel compiles and is timed is
drawn from a heavy-tailed distribution, by kernel. A race's steps do not depend on the cluster, so they are found once.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import zlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cudal2gen import catalog
from cudal2gen.files import write
from cudal2gen.kernel import Problem, Record
from cudal2gen.results import Effort, Trial
from cudal2gen.tuner import curve, flight, race, ray_executor, space
from cudal2gen.tuner.environment import Environment, Model
from cudal2gen.tuner.executor import InProcess, Job
from cudal2gen.tuner.flight import RankedRace, Waiting
from cudal2gen.tuner.proposal import Question
from cudal2gen.tuner.proposers import Random
from cudal2gen.tuner.race import Evaluation, ProposerStep, Race

WORKERS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Times:
    """Means in seconds, ``proposer`` for an answer of one, the others for a kernel; ``spread``: the standard
    deviation of a kernel's logarithm. ``compilers``: CPU cores beside each GPU that compile; one core proposes."""

    compilation: float = 1.2
    timing: tuple[tuple[Effort, float], ...] = (("short", 1.0), ("medium", 2.5), ("long", 6.0))
    proposer: float = 0.1
    spread: float = 0.8
    compilers: int = 8

    def factor(self, record: Record) -> float:
        """What a kernel takes beside the mean one."""
        return _factor(repr(record.kernel_key), self.spread)

    def compile_s(self, job: Job) -> float:
        """One core compiles all of a job."""
        return sum(self.compilation * self.factor(record) for record in job.records)

    def measure_s(self, job: Job) -> float:
        """One GPU times all of a job."""
        return sum(dict(self.timing)[job.effort] * self.factor(record) for record in job.records)


@cache
def _factor(key: str, spread: float) -> float:
    return random.Random(zlib.crc32(key.encode())).lognormvariate(-spread * spread / 2, spread)


class Cluster:
    """``flight.Host``: GPUs, compiling cores and one core of proposers, under a virtual clock.

    As on a Ray cluster a job is compiled before it waits for a GPU, jobs of earlier problems are first, and GPUs
    without work take parts of short jobs. ``environment`` answers evaluations; without one their trials are empty.
    ``measured``: (begin, end, effort) of each part of a job on a GPU.
    """

    def __init__(self, workers: int, times: Times, environment: Environment | None = None) -> None:
        self.workers, self.now = workers, 0.0
        self.measured: list[tuple[float, float, Effort]] = []
        self._times, self._environment = times, environment
        self._ended: list[Waiting] = []
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._compilers = [0.0] * (workers * times.compilers)  # when each is free
        self._proposer_free_at, self._free, self._jobs = 0.0, workers, 0
        self._queue: list[tuple[int, int, Job, Callable[[], None]]] = []

    def start(self, step: ProposerStep | Evaluation, rank: int) -> Waiting:
        """See ``Host``."""
        future: Waiting = Future()
        if isinstance(step, ProposerStep):
            step.run()
            self._proposer_free_at = max(self.now, self._proposer_free_at) + self._times.proposer
            self._at(self._proposer_free_at, lambda: self._end(future, []))
            return future
        job = step.job
        parts = ray_executor.parts(job, self.workers // (self._jobs + 1))
        self._jobs += 1
        missing = len(parts)

        def part_ended() -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                self._jobs -= 1
                self._end(future, self._environment.evaluate(*job) if self._environment else [])

        for part in parts:
            begin = max(self.now, heapq.heappop(self._compilers))
            end = begin + self._times.compile_s(part)
            heapq.heappush(self._compilers, end)
            self._at(end, lambda part=part: self._compiled(part, rank, part_ended))  # type: ignore[misc]
        return future

    def first(self, waiting: Collection[Waiting]) -> Collection[Waiting]:
        """See ``Host``: lets time pass."""
        while not self._ended:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        ended, self._ended = self._ended, []
        assert all(future in waiting for future in ended)
        return ended

    def _end(self, future: Waiting, trials: list[Trial]) -> None:
        future.set_result(trials)
        self._ended.append(future)

    def utilisation(self, begin: float = 0.0, end: float | None = None) -> float:
        """The GPUs' mean busy share (0 to 1) of a span of seconds, of all by default."""
        end = self.now if end is None else end
        busy = sum(max(0.0, min(end, last) - max(begin, first)) for first, last, _ in self.measured)
        return busy / (self.workers * (end - begin))

    def _at(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._order), happen))

    def _compiled(self, part: Job, rank: int, ended: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (rank, next(self._order), part, ended))
        self._measure()

    def _measure(self) -> None:
        while self._free and self._queue:
            _, _, part, ended = heapq.heappop(self._queue)
            self._free -= 1
            end = self.now + self._times.measure_s(part)
            self.measured.append((self.now, end, part.effort))
            self._at(end, lambda ended=ended: self._measured(ended))  # type: ignore[misc]

    def _measured(self, ended: Callable[[], None]) -> None:
        self._free += 1
        ended()
        self._measure()


class Plan(NamedTuple):
    """A race that has been run, and its jobs, None for each step of the proposer between them."""

    race: Race
    jobs: Sequence[Job | None]


def plan(problem: Problem, evaluations: int) -> Plan:
    """Runs a race of random candidates in the model environment."""
    run = Race(space.candidates(problem, 200), None)
    executor, jobs = InProcess(Model()), list[Job | None]()
    settings = race.Settings(evaluations, prune=None)
    for step in race.steps(run, Random(0), executor, lambda _: None, settings):
        if isinstance(step, ProposerStep):
            step.run()
            jobs.append(None)
        else:
            step.trials.extend(executor.submit(step.job).result())
            jobs.append(step.job)
    run.candidates = space.Candidates(problem, (), ())
    return Plan(run, jobs)


def simulate(plans: Sequence[Plan], workers: int, times: Times, in_flight: int) -> Cluster:
    """The cluster after a campaign of these races."""
    cluster = Cluster(workers, times)
    question = Question(space.Candidates(plans[0].race.problem, (), ()))
    step = ProposerStep(Random(0), question, (), 0, [])

    def begin(rank: int) -> RankedRace | None:
        if rank == len(plans):
            return None
        steps = (step if job is None else Evaluation(job, list[Trial]()) for job in plans[rank].jobs)
        return RankedRace(rank, plans[rank].race, steps)

    flight.run_races(begin, cluster, in_flight, lambda _: None, lambda _: None)
    return cluster


def table(plans: Sequence[Plan], times: Times) -> tuple[str, list[curve.Curve]]:
    """Times and utilisation by the number of workers, as Markdown and as curves."""
    lines = [
        "| GPUs | hours | GPUs busy | busy in the tenths of that time | one problem at a time, hours | GPUs busy |",
        "|---:|---:|---:|---|---:|---:|",
    ]
    together, apart, ideal = list[tuple[float, float]](), list[tuple[float, float]](), list[tuple[float, float]]()
    for workers in WORKERS:
        many = simulate(plans, workers, times, workers * ray_executor.AHEAD)
        single = simulate(plans, workers, times, 1)
        together.append((workers, many.now / 3600))
        apart.append((workers, single.now / 3600))
        busy = sum(end - begin for begin, end, _ in many.measured)
        ideal.append((workers, busy / workers / 3600))
        tenths = [many.utilisation(many.now * tenth / 10, many.now * (tenth + 1) / 10) for tenth in range(10)]
        lines.append(
            f"| {workers} | {many.now / 3600:.2f} | {many.utilisation():.1%} | "
            f"{' '.join(f'{share:.0%}' for share in tenths)} | {single.now / 3600:.2f} | {single.utilisation():.1%} |"
        )
    curves = [
        curve.Curve("one problem at a time", apart),
        curve.Curve("four per GPU", together),
        curve.Curve("all GPUs busy", ideal),
    ]
    return "\n".join(lines) + "\n", curves


def problems(count: int) -> list[Problem]:
    """Sizes of the catalog on an H200, in a random order."""
    sizes = sorted({(record.m, record.n, record.k) for record in catalog.load()})
    random.Random(0).shuffle(sizes)
    return [Problem(gpu="h200", acc="f32", layout="tn", m=m, n=n, k=k) for m, n, k in sizes[:count]]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--problems", type=int, default=1000)
    options.add_argument("--evaluations", type=int, default=64)
    options.add_argument("--svg", type=Path)
    arguments = options.parse_args()
    plans = [plan(problem, arguments.evaluations) for problem in problems(arguments.problems)]
    text, curves = table(plans, Times())
    print(text, end="")
    if arguments.svg is not None:
        title = f"Campaign of {len(plans)} problems, simulated: hours by the number of GPUs"
        write(arguments.svg, curve.svg(title, "GPUs", "hours", curves, logarithmic=True))


if __name__ == "__main__":
    main()
