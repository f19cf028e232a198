"""Simulates how long a campaign of tuning takes by the number of GPUs, with the tuner's own scheduling.

    python scripts/campaign_time.py --problems 1000 --svg docs/campaign-time.svg > table.md
    python scripts/campaign_time.py --problems 20 --evaluations 16 --machine

``--machine`` compares, for one GPU, compiling ahead on the machine's cores with compiling while the GPU waits.

Nothing is measured on a GPU, and time is virtual. Searches are real ones in the model environment. The seconds in which
a kernel compiles and is timed are drawn for each kernel from a heavy-tailed distribution. The steps of a search do not
depend on the cluster, so each search runs once and is replayed on every cluster.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple

from cudal2gen.generation import catalog
from cudal2gen.kernel import Problem, Record, space
from cudal2gen.results import Effort, Trial
from cudal2gen.tuner import climbing, concurrent_searches, curve, executor, ray_executor, search
from cudal2gen.tuner.background_builds import CORES_EACH, MOST_EACH
from cudal2gen.tuner.concurrent_searches import RankedSearch, StepFuture
from cudal2gen.tuner.environment import Environment, ModelEnvironment
from cudal2gen.tuner.executor import EvaluationJob, InProcess
from cudal2gen.tuner.proposal import Proposal, Proposer, Question, legal_proposal
from cudal2gen.tuner.proposers import Random
from cudal2gen.tuner.search import Evaluation, ProposerStep, Search
from kernelproof.ground.files import write
from kernelproof.ground.pages import grid

# Numbers of workers that are compared.
WORKERS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Times:
    """Mean seconds of a kernel's compilation and timing, and of a proposer's answer.

    ``spread`` is the standard deviation of the logarithm of a kernel's factor. ``compilers``: the CPU cores per GPU
    that compile; one more core runs the proposers.
    """

    compilation: float = 1.2
    timing: tuple[tuple[Effort, float], ...] = (("short", 1.0), ("medium", 2.5), ("long", 6.0))
    proposer: float = 0.1
    spread: float = 0.8
    compilers: int = 8

    def factor(self, record: Record) -> float:
        """The factor by which this kernel takes longer than the mean kernel."""
        return _factor(repr(record.kernel_key), self.spread)

    def compile_s(self, job: EvaluationJob) -> float:
        """Seconds in which one core compiles all kernels of a job."""
        return sum(self.compilation * self.factor(record) for record in job.records)

    def measure_s(self, job: EvaluationJob) -> float:
        """Seconds in which one GPU times all kernels of a job."""
        return sum(dict(self.timing)[job.effort] * self.factor(record) for record in job.records)


@cache
def _factor(key: str, spread: float) -> float:
    """A log-normal number with mean 1, drawn by a key."""
    return random.Random(zlib.crc32(key.encode())).lognormvariate(-spread * spread / 2, spread)


class Cluster:
    """A ``concurrent_searches.StepRunner`` of GPUs, compiling cores and one core of proposers, under a virtual clock.

    As on a Ray cluster, a job is compiled before it waits for a GPU, jobs of earlier problems come first, and GPUs
    without work take parts of short jobs. ``environment`` evaluates the jobs; without one their trials are empty.
    ``measured``: (begin, end, effort) of each part of a job on a GPU, in seconds.
    """

    def __init__(self, workers: int, times: Times, environment: Environment | None = None) -> None:
        self.workers, self.now = workers, 0.0
        self.measured: list[tuple[float, float, Effort]] = []
        self._times, self._environment = times, environment
        self._ended: list[StepFuture] = []
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._compilers = [0.0] * (workers * times.compilers)  # the times at which they are free
        self._proposer_free_at, self._free_gpus, self._job_count = 0.0, workers, 0
        self._queue: list[tuple[int, int, EvaluationJob, Callable[[], None]]] = []

    def start(self, step: ProposerStep | Evaluation, rank: int) -> StepFuture:
        """See ``concurrent_searches.StepRunner``."""
        future: StepFuture = Future()
        if isinstance(step, ProposerStep):
            step.run()
            self._proposer_free_at = max(self.now, self._proposer_free_at) + self._times.proposer
            self._schedule(self._proposer_free_at, lambda: self._end(future, []))
            return future
        job = step.job
        parts = ray_executor.parts(job, self.workers // (self._job_count + 1))
        self._job_count += 1
        missing = len(parts)

        def part_ended() -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                self._job_count -= 1
                self._end(future, self._environment.evaluate(*job) if self._environment else [])

        for part in parts:
            begin = max(self.now, heapq.heappop(self._compilers))
            end = begin + self._times.compile_s(part)
            heapq.heappush(self._compilers, end)
            self._schedule(end, lambda part=part: self._queue_part(part, rank, part_ended))  # type: ignore[misc]
        return future

    def first(self, waiting: Collection[StepFuture]) -> Collection[StepFuture]:
        """See ``concurrent_searches.StepRunner``. Advances the clock to the next event that ends a step."""
        while not self._ended:
            self.now, _, action = heapq.heappop(self._events)
            action()
        ended, self._ended = self._ended, []
        assert all(future in waiting for future in ended)
        return ended

    def _end(self, future: StepFuture, trials: list[Trial]) -> None:
        """Ends a step, with the trials that it returns."""
        future.set_result(trials)
        self._ended.append(future)

    def utilisation(self, begin: float = 0.0, end: float | None = None) -> float:
        """The mean busy share of the GPUs (0 to 1) between two times in seconds, by default of the whole run."""
        end = self.now if end is None else end
        busy = sum(max(0.0, min(end, last) - max(begin, first)) for first, last, _ in self.measured)
        return busy / (self.workers * (end - begin))

    def _schedule(self, seconds: float, action: Callable[[], None]) -> None:
        """Lets an action happen at a time of the virtual clock."""
        heapq.heappush(self._events, (seconds, next(self._order), action))

    def _queue_part(self, part: EvaluationJob, rank: int, ended: Callable[[], None]) -> None:
        """Queues a compiled part of a job for a GPU. ``ended`` is called when the part has been timed."""
        heapq.heappush(self._queue, (rank, next(self._order), part, ended))
        self._measure()

    def _measure(self) -> None:
        """Starts to measure parts that are compiled, while a GPU is free, in the order of the queue."""
        while self._free_gpus and self._queue:
            _, _, part, ended = heapq.heappop(self._queue)
            self._free_gpus -= 1
            end = self.now + self._times.measure_s(part)
            self.measured.append((self.now, end, part.effort))
            self._schedule(end, lambda ended=ended: self._end_part(ended))  # type: ignore[misc]

    def _end_part(self, ended: Callable[[], None]) -> None:
        """Frees the GPU of a part, and starts the next one."""
        self._free_gpus += 1
        ended()
        self._measure()


class Machine(Cluster):
    """One GPU and ``cores`` CPU cores.

    With ``ahead`` kernels compile in the background, as by ``tuner.background_builds``, and steps end in the order in
    which they began. Without it an evaluation compiles its own kernels while the GPU waits. ``GPU_SECONDS``: the GPU's
    time for each kernel. ``UNIT_SECONDS`` and ``KERNEL_SECONDS``: a core's time for a translation unit and for each
    kernel in it, as measured for kernels of the catalog.
    """

    GPU_SECONDS: ClassVar[dict[Effort, float]] = {"short": 0.3, "medium": 0.5, "long": 1.2}
    UNIT_SECONDS, KERNEL_SECONDS = 1.3, 0.5

    def __init__(self, cores: int, ahead: bool) -> None:
        super().__init__(1, Times(timing=tuple(self.GPU_SECONDS.items())))
        self._compiles_ahead, self._cores = ahead, cores
        compile_cores = cores - (cores > CORES_EACH)
        self._idle_builders = max(1, compile_cores // CORES_EACH)  # builders without work
        self._builders, self._builder_cores = self._idle_builders, compile_cores // self._idle_builders
        self._records: deque[Record] = deque()
        self._queued_keys: set[object] = set()
        self._built_keys: set[object] = set()
        self._queued_jobs: deque[tuple[EvaluationJob, StepFuture]] = deque()
        self._ended_steps: set[StepFuture] = set()

    def start(self, step: ProposerStep | Evaluation, rank: int) -> StepFuture:  # noqa: ARG002
        """See ``concurrent_searches.StepRunner``."""
        future: StepFuture = Future()
        if isinstance(step, Evaluation):
            self._queued_jobs.append((step.job, future))
            self._prepare(step.job.records if self._compiles_ahead else ())
            return future
        records = [proposal.record for proposal in step.affordable if proposal.record] if self._compiles_ahead else []
        self._proposer_free_at = max(self.now, self._proposer_free_at) + self._times.proposer
        self._schedule(self._proposer_free_at, lambda: self._end_proposal(records, future))
        return future

    def first(self, waiting: Collection[StepFuture]) -> Collection[StepFuture]:
        """See ``concurrent_searches.StepRunner``."""
        oldest = next(iter(waiting))
        while oldest not in self._ended_steps:
            self.now, _, action = heapq.heappop(self._events)
            action()
            if not self._compiles_ahead and self._ended_steps:
                break
        ended = [oldest] if self._compiles_ahead else [future for future in waiting if future in self._ended_steps]
        self._ended_steps -= set(ended)
        return ended

    def _end(self, future: StepFuture, trials: list[Trial]) -> None:
        """Ends a step, with the trials that it returns."""
        future.set_result(trials)
        self._ended_steps.add(future)

    def _end_proposal(self, records: Sequence[Record], future: StepFuture) -> None:
        """Ends a proposal, whose records are then compiled ahead."""
        self._end(future, [])
        self._prepare(records)

    def _prepare(self, records: Sequence[Record]) -> None:
        """Queues records to be compiled ahead, and gives the queue's records to builders without work."""
        self._records += [record for record in records if record.kernel_key not in self._queued_keys]
        self._queued_keys |= {record.kernel_key for record in records}
        while self._idle_builders and self._records:
            self._idle_builders -= 1
            size = min(MOST_EACH * self._builder_cores, -(-len(self._records) // self._builders))
            batch = [self._records.popleft() for _ in range(size)]
            end = self.now + self._compile_s(batch, self._builder_cores)
            self._schedule(end, lambda batch=batch: self._compiled_ahead(batch))  # type: ignore[misc]
        self._measure()

    def _compiled_ahead(self, batch: Sequence[Record]) -> None:
        """Notes that a batch is compiled, and starts the next one."""
        self._built_keys |= {record.kernel_key for record in batch}
        self._idle_builders += 1
        self._prepare(())

    def _compile_s(self, records: Sequence[Record], cores: int) -> float:
        """Seconds in which several cores compile a batch, a translation unit each: the time of the longest unit."""
        size = max(1, -(-len(records) // cores))
        units = [records[start : start + size] for start in range(0, len(records), size)]
        kernels_s = max(sum(self.KERNEL_SECONDS * self._times.factor(record) for record in unit) for unit in units)
        return self.UNIT_SECONDS + kernels_s

    def _measure(self) -> None:
        """Starts the next job on a free GPU. Kernels that are not built yet delay it: the job compiles them itself, or
        waits where builders compile ahead."""
        if not self._free_gpus or not self._queued_jobs:
            return
        job, future = self._queued_jobs[0]
        missing = [record for record in job.records if record.kernel_key not in self._built_keys]
        if missing and self._compiles_ahead:
            return
        self._queued_jobs.popleft()
        self._free_gpus -= 1
        begin = self.now + (self._compile_s(missing, self._cores) if missing else 0.0)
        self._built_keys |= {record.kernel_key for record in missing}
        end = begin + self._times.measure_s(job)
        self.measured.append((begin, end, job.effort))
        self._schedule(end, lambda: self._end_job(future))

    def _end_job(self, future: StepFuture) -> None:
        """Frees the GPU of a job, and starts the next one."""
        self._free_gpus += 1
        self._end(future, [])
        self._measure()


class SearchPlan(NamedTuple):
    """A completed search and its steps: a job for each evaluation, None for each step of the proposer."""

    search: Search
    jobs: Sequence[EvaluationJob | None]


def plan(problem: Problem, evaluations: int, proposer: Proposer | None = None) -> SearchPlan:
    """Runs a search in the model environment, with random proposals by default, and records its steps."""
    run = Search(space.candidates(problem, 200), None)
    place, jobs = InProcess(ModelEnvironment()), list[EvaluationJob | None]()
    settings = search.SearchLimits(evaluations, prune=None)
    for step in search.steps(run, proposer or Random(0), place, lambda _: None, settings):
        if isinstance(step, ProposerStep):
            step.run()
            jobs.append(None)
        else:
            step.trials.extend(place.submit(step.job).result())
            jobs.append(step.job)
    run.candidates = space.Candidates(problem, (), ())
    return SearchPlan(run, jobs)


def simulate(plans: Sequence[SearchPlan], workers: int, times: Times, in_flight: int) -> Cluster:
    """Replays the searches on a cluster, with ``in_flight`` problems at a time, and returns it."""
    cluster = Cluster(workers, times)
    _run(plans, cluster, in_flight)
    return cluster


def on_one_machine(plans: Sequence[SearchPlan], cores: int, ahead: bool) -> Machine:
    """Replays the searches on one machine and returns it. Without ``ahead`` two problems are in flight."""
    machine = Machine(cores, ahead)
    _run(plans, machine, executor.IN_FLIGHT if ahead else 2)
    return machine


def _run(plans: Sequence[SearchPlan], host: concurrent_searches.StepRunner, in_flight: int) -> None:
    """Replays the searches on a host, with ``in_flight`` problems at a time."""
    question = Question(space.Candidates(plans[0].search.problem, (), ()))

    def steps(jobs: Sequence[EvaluationJob | None]) -> Iterator[ProposerStep | Evaluation]:
        for job, next_job in zip(jobs, [*jobs[1:], None], strict=True):
            records = next_job.records if next_job else ()
            proposals = [legal_proposal("", record) for record in records]
            yield Evaluation(job, []) if job else ProposerStep(Random(0), question, (), 0, proposals)

    def begin(rank: int) -> RankedSearch | None:
        return None if rank == len(plans) else RankedSearch(rank, plans[rank].search, steps(plans[rank].jobs))

    concurrent_searches.run_searches(begin, host, in_flight, lambda _: None, lambda _: None)


class SmallBatches(Random):
    """Proposes as few candidates at a time as the cost model does, which needs their trials for its next proposals."""

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """See ``climbing.answer_size``."""
        return super().propose(question, climbing.answer_size(question, count))


def machine_table(plans: Sequence[SearchPlan]) -> str:
    """Markdown: the busy share of one GPU and its evaluations per minute, by the number of CPU cores."""
    rows = []
    evaluations = sum(len(job.records) for plan in plans for job in plan.jobs if job and job.effort == "short")
    for cores in (2, 4, 8, 16):
        for ahead in (False, True):
            machine = on_one_machine(plans, cores, ahead)
            cells = [f"{machine.now / 60:.1f}", f"{machine.utilisation():.0%}"]
            speed = f"{60 * evaluations / machine.now:.0f}"
            rows.append(["ahead" if ahead else "in turn", cores, *cells, speed])
    return grid(("compiled", "cores", "minutes", "GPU busy", "evaluations a minute"), rows) + "\n"


def table(plans: Sequence[SearchPlan], times: Times) -> tuple[str, list[curve.Curve]]:
    """Times and utilisation by the number of GPUs, as Markdown and as curves."""
    columns = (
        "GPUs busy in each tenth of the time",
        "GPUs",
        "hours",
        "GPUs busy",
        "one problem at a time, hours",
        "GPUs busy",
    )
    rows: list[list[object]] = []
    together, apart, ideal = list[tuple[float, float]](), list[tuple[float, float]](), list[tuple[float, float]]()
    for workers in WORKERS:
        many = simulate(plans, workers, times, workers * ray_executor.AHEAD)
        single = simulate(plans, workers, times, 1)
        together.append((workers, many.now / 3600))
        apart.append((workers, single.now / 3600))
        busy = sum(end - begin for begin, end, _ in many.measured)
        ideal.append((workers, busy / workers / 3600))
        tenths = [many.utilisation(many.now * tenth / 10, many.now * (tenth + 1) / 10) for tenth in range(10)]
        times_together = [f"{many.now / 3600:.2f}", f"{many.utilisation():.1%}"]
        times_apart = [f"{single.now / 3600:.2f}", f"{single.utilisation():.1%}"]
        rows.append([" ".join(f"{share:.0%}" for share in tenths), workers, *times_together, *times_apart])
    curves = [
        curve.Curve("one problem at a time", apart),
        curve.Curve("four per GPU", together),
        curve.Curve("all GPUs busy", ideal),
    ]
    return grid(columns, rows) + "\n", curves


def problems(count: int) -> list[Problem]:
    """Sizes of the catalog, for an H200, in a random order that is always the same."""
    sizes = sorted({(record.m, record.n, record.k) for record in catalog.load()})
    random.Random(0).shuffle(sizes)
    return [Problem(gpu="h200", acc="f32", layout="tn", m=m, n=n, k=k) for m, n, k in sizes[:count]]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--problems", type=int, default=1000)
    options.add_argument("--evaluations", type=int, default=64)
    options.add_argument("--svg", type=Path)
    options.add_argument("--machine", action="store_true")
    arguments = options.parse_args()
    if arguments.machine:
        sizes = problems(arguments.problems)
        print(machine_table([plan(problem, arguments.evaluations, SmallBatches(0)) for problem in sizes]), end="")
        return
    plans = [plan(problem, arguments.evaluations) for problem in problems(arguments.problems)]
    text, curves = table(plans, Times())
    print(text, end="")
    if arguments.svg is not None:
        title = f"Campaign of {len(plans)} problems, simulated: hours by the number of GPUs"
        write(arguments.svg, curve.svg(title, "GPUs", "hours", curves, logarithmic=True))


if __name__ == "__main__":
    main()
