"""Executors evaluate the records of searches: in this process, in a separate process, or on a cluster.

All of them implement the protocol ``Executor``; the one for a cluster is in ``ray_executor``. A job names a problem,
records and an effort, but no worker, so an executor that loses a worker can repeat the job on another one.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from cudal2gen.kernel import Problem, Record
from cudal2gen.results import Effort, Outcome, Trial
from cudal2gen.tuner.background_builds import BackgroundBuilds, Build
from cudal2gen.tuner.environment import Environment, EvaluationPlace, trial_of
from kernelproof.ground import workers

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


IN_FLIGHT = 12  # concurrent searches with background compilation: one is measured, the others propose or compile
START_SECONDS = 300.0  # seconds for a process to import its modules and find its device


class EvaluationJob(NamedTuple):
    """Records of one problem that an environment evaluates together, by alternating between them."""

    problem: Problem
    records: tuple[Record, ...]
    effort: Effort


class NoAnswer(NamedTuple):
    """Why a process gave no answer, and the outcome that the record's trial gets.

    ``retry``: whether to repeat the job, because the fault may be that of the worker or the node.
    """

    reason: str
    outcome: Outcome
    retry: bool = False


class Executor(EvaluationPlace, Protocol):
    """Evaluates jobs, one measurement at a time on each GPU. A job's trials are one for each record, in their order.

    ``in_order``: jobs end in the order of their submission.
    """

    in_order: bool

    def prepare(self, records: Sequence[Record]) -> None:
        """Begins the work for these records that needs no GPU, such as compiling, and returns immediately."""
        ...

    def submit(self, job: EvaluationJob, rank: int = 0) -> Future[list[Trial]]:
        """Begins a job, or puts it into a queue in which lower ranks go first. Always called on the same thread."""
        ...

    def in_flight(self) -> int:
        """How many problems to search at a time so that no worker waits for work."""
        ...

    def close(self) -> None:
        """Ends the workers. Their unfinished jobs are lost; a later run repeats them."""
        ...


class InProcess:
    """Evaluates in this process, one job after the other, for environments that cannot hang."""

    in_order = True

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.name, self.on = environment.name, environment.on

    def prepare(self, records: Sequence[Record]) -> None:
        """Does nothing, because an evaluation also compiles its records."""

    def submit(self, job: EvaluationJob, rank: int = 0) -> Future[list[Trial]]:  # noqa: ARG002 - nothing is ever queued
        """Evaluates the job before it returns."""
        ended: Future[list[Trial]] = Future()
        ended.set_result(self.environment.evaluate(job.problem, job.records, job.effort))
        return ended

    def in_flight(self) -> int:
        """1, because nothing else happens during an evaluation."""
        return 1

    def close(self) -> None:
        """Does nothing: there are no workers."""


class Worker:
    """Evaluates in a separate process, which is killed and replaced after ``seconds`` without an answer.

    A kernel that hangs or breaks the device therefore affects only its own trial: the records of a lost job are
    evaluated again one by one, and a record without an answer then is a failure. ``build`` compiles records in this
    process, on ``cores`` cores, as soon as they are proposed; without ``build`` each evaluation compiles its records.
    """

    in_order = True

    def __init__(
        self,
        make: Callable[[], Environment],
        seconds: float = 120.0,
        build: Build | None = None,
        cores: int | None = None,
    ) -> None:
        self._make, self._seconds = make, seconds
        self._background_builds = BackgroundBuilds(build, cores) if build else None
        self._worker: workers.Worker | None = None
        # A worker process ends with the thread that started it, so this thread lives as long as the executor.
        self._queue = ThreadPoolExecutor(1, "measurement")
        self._closed = False
        self._connection()

    def prepare(self, records: Sequence[Record]) -> None:
        """See ``Executor``."""
        if self._background_builds is not None:
            self._background_builds.add(records)

    def submit(self, job: EvaluationJob, rank: int = 0) -> Future[list[Trial]]:  # noqa: ARG002 - the order is that of submission
        """Puts the job into the queue, whose order is that of submission."""
        return self._queue.submit(self._evaluate_compiled, job)

    def in_flight(self) -> int:
        """2 without background compilation: one problem is measured while a proposer works on the other.

        With background compilation the number is the same on every machine, because it decides which earlier searches
        a search can learn from.
        """
        return 2 if self._background_builds is None else IN_FLIGHT

    def _evaluate_compiled(self, job: EvaluationJob) -> list[Trial]:
        """Evaluates a job after builds in the background have compiled its kernels."""
        if self._background_builds is not None:
            self._background_builds.wait(job.records)
        return self._evaluate(job)

    def _evaluate(self, job: EvaluationJob) -> list[Trial]:
        """The trials of a job. If its process ended, each record is tried alone, so that only the one at fault
        fails."""
        answer = self._ask((job.problem, job.records, job.effort))
        if isinstance(answer, list):
            return answer
        if len(job.records) > 1:
            return [trial for record in job.records for trial in self._evaluate(job._replace(records=(record,)))]
        return [trial_of(self, job.problem, job.records[0], job.effort, answer.outcome, reason=answer.reason)]

    def _ask(self, question: Any) -> Any:
        """The answer of the running process, or of a new one. See ``_answer``."""
        return self._answer(self._connection(), question, self._seconds)

    def _answer(self, worker: workers.Worker, question: Any, seconds: float) -> Any:
        """The process's answer to a question (see ``_serve``); or a ``NoAnswer``, after which the process has ended."""
        try:
            worker.pipe.send(question)
            if not worker.pipe.poll(seconds):
                self._end()
                return NoAnswer(f"no answer within {seconds:g} s", "time-out")
            answer = worker.pipe.recv()
        except (EOFError, OSError):
            death = worker.death()
            self._end()
            return NoAnswer(f"the process that ran it {death}", "wrong result")
        if isinstance(answer, NoAnswer):
            # After an exception the environment's state is undefined.
            self._end()
        return answer

    def _connection(self) -> workers.Worker:
        """The process that evaluates, started if there is none. Raises RuntimeError if it cannot start."""
        if self._closed:
            raise RuntimeError("the executor was closed")
        if self._worker is None:
            worker = self._worker = workers.Worker("spawn", _serve, self._make)
            answer = self._answer(worker, None, START_SECONDS)
            if not isinstance(answer, tuple):
                raise RuntimeError(f"the evaluation's process did not start: {answer.reason}")
            self.name, self.on = answer
            return worker
        return self._worker

    def close(self) -> None:
        """Kills the process and drops the queued jobs."""
        self._closed = True
        if self._background_builds is not None:
            self._background_builds.close()
        self._queue.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None


def _serve(pipe: Connection, make: Callable[[], Environment]) -> None:
    """The loop of the worker process: it evaluates each job from the pipe. A question None asks for name and device."""
    environment: Environment | None = None
    while True:
        question = pipe.recv()
        try:
            environment = environment or make()
            if question is None:
                pipe.send((environment.name, environment.on))
            else:
                pipe.send(environment.evaluate(*question))
        except Exception as error:
            reason = f"{type(error).__name__}: {error or traceback.format_exc(limit=1)}"
            pipe.send(NoAnswer(reason, "wrong result"))
