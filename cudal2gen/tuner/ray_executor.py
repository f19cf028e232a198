"""Evaluates records on a Ray cluster: free CPUs compile kernels, and one actor for each GPU times them.

An actor owns its GPU as long as it lives and evaluates one job at a time, so no two measurements share a GPU. Only the
driver keeps the list of jobs: it repeats a job whose worker or node was lost, and accepts one answer for each job.
Workers do not store trials.

Nodes need not share a disk. The files of a compiled kernel are sent to the node, where a single rename publishes them.
So a build directory that exists is complete on every node.
"""

from __future__ import annotations

import heapq
import itertools
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from cudal2gen import places, results
from cudal2gen.kernel import Problem, Record
from cudal2gen.results import Effort, Source, Trial, Verdict
from cudal2gen.tuner.environment import Environment, trial_of
from cudal2gen.tuner.executor import EvaluationJob, NoAnswer
from kernelproof.ground.errors import MissingTool
from kernelproof.ground.version import __version__

Parcel = dict[str, dict[str, bytes]]  # build directory -> file name -> content
GPU, CPU = "GPU", "CPU"  # Ray's names of resources; tests simulate GPUs by a resource of another name
AHEAD = 4  # concurrent searches for each GPU: one is measured while others compile, propose, or wait for a GPU
THREADS = 1024  # most threads of the driver; each job or part of a job has one, which sleeps until the job ends
UPDATE_SECONDS = 0.1  # least seconds between two queries of the cluster's state
PING_SECONDS = 20.0  # most seconds in which an idle worker must answer a ping
MAX_START_FAULTS = 3  # workers in a row that fail at their start, after which no further ones are started
LONGEST_LINE = 300  # most characters of a line of an error


class Unreachable(MissingTool):
    """No worker can measure: there is no cluster, it has no GPU, or no worker starts."""


class WorkerResults(NamedTuple):
    """A worker's trials and its new verdicts, both of which the driver stores because nodes need not share a disk."""

    trials: list[Trial]
    verdicts: list[Verdict]


def compiled(records: Sequence[Record]) -> Parcel:
    """Builds kernels and packs their files. Those that do not compile are left out; the measuring worker reports them.

    Raises ToolchainError without a compiler.
    """
    from cudal2gen.generation import compiler
    from kernelproof.ground import toolchain

    tools = toolchain.discover()
    built = compiler.attempt(records, tools=tools, jobs=1)
    return {
        artifact.digest: {path.name: path.read_bytes() for path in artifact.directory.iterdir()}
        for artifact in built
        if isinstance(artifact, compiler.Artifact)
    }


def keep_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Stores the verdicts that the driver's store lacks. A worker on the same disk has stored its verdicts already."""
    stored = results.latest() if verdicts else {}
    if missing := [verdict for verdict in verdicts if (verdict.digest, verdict.on) not in stored]:
        results.append(missing)


def unpack(parcel: Parcel, root: Path | None = None) -> None:
    """Puts packed kernels into the build directory, each by a single rename. Kernels that exist there are kept."""
    root = root or places.build_dir()
    for digest, files in parcel.items():
        if (root / digest).exists():
            continue
        root.mkdir(parents=True, exist_ok=True)
        scratch = root / f".parcel-{secrets.token_hex(8)}"
        scratch.mkdir()
        try:
            for name, content in files.items():
                (scratch / Path(name).name).write_bytes(content)
            scratch.rename(root / Path(digest).name)
        except OSError:
            if not (root / digest).exists():  # otherwise another process published it first
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _pack(prepare: Callable[[Sequence[Record]], Parcel], records: Sequence[Record]) -> Parcel:
    """Calls ``prepare`` on a CPU worker. The caller passes a reference in its place, so that Ray sends ``prepare`` once
    to each node and not with each task."""
    return prepare(records)


class Measurer:
    """The class of the actors. Each of them owns one GPU."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._environment = make()
        self._sent: set[str] = set()

    def identity(self) -> tuple[str, str, str]:
        """The environment's name, its device, and the version of this package on its node."""
        return self._environment.name, self._environment.on, __version__

    def evaluate(self, problem: Problem, records: Sequence[Record], effort: Effort, parcel: Parcel) -> WorkerResults:
        """See ``Environment``. The answer includes the verdicts that no earlier answer included."""
        unpack(parcel)
        trials = self._environment.evaluate(problem, records, effort)
        # Environments that check no kernels have no verdicts.
        verdicts: dict[str, Verdict] = getattr(self._environment, "verdicts", {})
        unsent = [verdict for digest, verdict in verdicts.items() if digest not in self._sent]
        self._sent |= verdicts.keys()
        return WorkerResults(trials, unsent)


class IdleWorkers:
    """Idle workers, and the jobs that wait for one.

    A worker goes to the job of the lowest rank; among equal ranks, to the one that has waited longest. Invariant, under
    the lock: either no worker is idle, or no job waits.
    """

    def __init__(self) -> None:
        self._lock, self._order = threading.Lock(), itertools.count()
        self._workers: deque[Any] = deque()
        self._waiting: list[tuple[int, int, SimpleQueue[Any]]] = []

    def put(self, worker: Any) -> None:
        """Gives a worker that became idle to a waiting job, or keeps it."""
        with self._lock:
            if self._waiting:
                heapq.heappop(self._waiting)[2].put(worker)
            else:
                self._workers.append(worker)

    def get(self, rank: int, seconds: float) -> Any:
        """A worker; None if none becomes idle for this job within ``seconds``. If many jobs wait, it waits longer: by
        ``seconds`` for every eight of them."""
        with self._lock:
            if self._workers:  # no job waits while a worker is idle
                return self._workers.popleft()
            slot: SimpleQueue[Any] = SimpleQueue()
            ticket = rank, next(self._order), slot
            heapq.heappush(self._waiting, ticket)
            seconds *= 1 + len(self._waiting) // 8  # fewer wake-ups where hundreds of threads wait
        try:
            return slot.get(timeout=seconds)
        except Empty:
            with self._lock:
                if ticket in self._waiting:
                    self._waiting.remove(ticket)
                    heapq.heapify(self._waiting)
                    return None
            return slot.get()  # ``put`` took the ticket between the time-out and the lock: its worker is in the slot


class RayExecutor:
    """``Executor`` on a Ray cluster, whose nodes may come and go.

    - ``make`` makes each actor's environment, on the node of its GPU.
    - ``prepare``: work for CPU workers before a job, such as ``compiled``; None if there is none.
    - ``resource``: Ray's name of the resource of which each measurement takes one.
    - ``seconds``: limit of a job, after which its worker is killed. ``patience``: seconds to wait for any worker.
    - ``losses``: number of attempts at a job whose worker is lost. After them each record is evaluated alone, and a
      record whose worker is lost again is a failure.
    - ``variables``: environment variables of the workers.
    - ``keep`` receives the verdicts of a job before its trials are returned.

    Raises ImportError without Ray, Unreachable if no worker can measure.
    """

    in_order = False

    def __init__(
        self,
        make: Callable[[], Environment],
        address: str | None = None,
        prepare: Callable[[Sequence[Record]], Parcel] | None = None,
        *,
        resource: str = GPU,
        seconds: float = 120.0,
        patience: float = 120.0,
        losses: int = 2,
        variables: dict[str, str] | None = None,
        keep: Callable[[Sequence[Verdict]], None] = lambda _: None,
    ) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        self._ray, self._resource, self._seconds = ray, resource, seconds
        self._patience, self._losses, self._keep = patience, losses, keep
        self._own_connection = not ray.is_initialized()
        if self._own_connection:
            self._connect(address, variables or {})
        needs: dict[str, Any] = {"num_cpus": 0, "resources": {resource: 1}}
        if resource in (GPU, CPU):
            needs = {"num_cpus": int(resource == CPU), "num_gpus": int(resource == GPU)}
        self._measurer = ray.remote(Measurer).options(max_restarts=0, max_concurrency=1, **needs)
        self._make = ray.put(make)
        self._prepare = ray.put(prepare) if prepare else None
        self._packer = ray.remote(_pack).options(num_cpus=1, max_retries=3)
        self._lock = threading.Lock()
        self._idle, self._updated_at = IdleWorkers(), 0.0
        self._pool = ThreadPoolExecutor(THREADS, "ray-job")
        self._jobs = 0  # jobs that have begun and not ended
        self._workers: list[Any] = []
        self._starting: list[tuple[Any, Any]] = []
        self._misfits: list[Any] = []  # actors with another device or version, which keep their GPUs and get no jobs
        self._fault, self._faults, self._closed = "", 0, False
        self.name: Source = "gpu"
        self.on = ""  # the first worker sets both
        self._idle.put(self._idle_worker(0))

    def _connect(self, address: str | None, variables: dict[str, str]) -> None:
        """Connects to the cluster at an address, the default one if None. Raises Unreachable."""
        try:
            if address and (match := re.fullmatch(r"(?:ray://)?([^:/]+):(\d+)", address)):
                # Without this check Ray would try for minutes and then end the process.
                socket.create_connection((match[1], int(match[2])), timeout=10).close()
            self._ray.init(
                address=address,
                runtime_env={"env_vars": variables} if variables else None,
                log_to_driver=False,
                logging_level="error",
            )
        except OSError as error:
            raise Unreachable(f"no Ray cluster at {address or 'the default address'}: {error}") from None

    def submit(self, job: EvaluationJob, rank: int = 0) -> Future[list[Trial]]:
        """Begins the job now. A short job is divided among GPUs that have no other work."""
        return self._begin(parts(job, len(self._workers) // (self._jobs + 1)), rank)

    def prepare(self, records: Sequence[Record]) -> None:
        """Does nothing: a job is compiled when it begins, before it waits for a GPU."""

    def in_flight(self) -> int:
        """``AHEAD`` for each GPU that the cluster has now."""
        return AHEAD * max(1, int(self._ray.cluster_resources().get(self._resource, 0)))

    def _begin(self, jobs: Sequence[EvaluationJob], rank: int) -> Future[list[Trial]]:
        """Begins the parts of one job. Returns a future of the trials of all parts."""
        all_trials: Future[list[Trial]] = Future()
        with self._lock:
            self._jobs += 1
        futures = [self._pool.submit(self._evaluate, job, rank) for job in jobs]
        missing = set(range(len(futures)))

        def join(index: int) -> None:
            with self._lock:
                missing.discard(index)
                if missing or all_trials.done():
                    return
                self._jobs -= 1
                all_trials.set_running_or_notify_cancel()
            try:
                all_trials.set_result([trial for future in futures for trial in future.result()])
            except BaseException as error:  # a part that was cancelled or had no worker fails the job
                all_trials.set_exception(error)

        for index, future in enumerate(futures):
            future.add_done_callback(lambda _, index=index: join(index))  # type: ignore[misc]
        return all_trials

    def workers(self) -> int:
        """The number of workers that can measure now."""
        self._update_workers()
        return len(self._workers)

    def close(self) -> None:
        """Ends the actors, and the connection to the cluster if this executor opened it."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for actor in [*self._workers, *self._misfits, *(actor for actor, _ in self._starting)]:
                self._ray.kill(actor)
            self._workers, self._starting = [], []
        if self._own_connection:
            self._ray.shutdown()

    def _evaluate(self, job: EvaluationJob, rank: int) -> list[Trial]:
        """A job's trials. Repeats the job if its worker is lost (see ``losses``). Raises Unreachable."""
        failure = NoAnswer("", "time-out", retry=True)
        for _ in range(self._losses):
            answer = self._ask(job, rank)
            if isinstance(answer, list):
                return answer
            failure = answer
            if not failure.retry:
                break
        if len(job.records) > 1:
            alone = [job._replace(records=(record,)) for record in job.records]
            return [trial for job in alone for trial in self._evaluate(job, rank)]
        return [trial_of(self, job.problem, job.records[0], job.effort, failure.outcome, reason=failure.reason)]

    def _ask(self, job: EvaluationJob, rank: int) -> list[Trial] | NoAnswer:
        """One attempt at a job: compiles its records, and evaluates them on a worker that has just answered a ping."""
        errors = self._ray.exceptions
        try:
            parcel = self._ray.get(self._packer.remote(self._prepare, job.records)) if self._prepare else {}
        except errors.RayTaskError as error:
            raise Unreachable(f"kernels cannot be compiled on the cluster: {_first_line(error.cause)}") from None
        except errors.RayError as error:
            return NoAnswer(f"the worker that compiled it was lost: {_first_line(error)}", "compile error", retry=True)
        actor = self._idle_worker(rank)
        pending = actor.evaluate.remote(job.problem, job.records, job.effort, parcel)
        try:
            answer: WorkerResults = self._ray.get(pending, timeout=self._seconds)
        except errors.GetTimeoutError:
            self._drop(actor)
            return NoAnswer(f"no answer within {self._seconds:g} s", "time-out", retry=False)
        except errors.RayTaskError as error:
            # After an exception the state of the environment is unknown.
            self._drop(actor)
            return NoAnswer(f"{type(error.cause).__name__}: {_first_line(error.cause)}", "wrong result", retry=False)
        except errors.RayError as error:
            self._drop(actor)
            return NoAnswer(f"the worker that ran it was lost: {_first_line(error)}", "wrong result", retry=True)
        self._idle.put(actor)
        with self._lock:
            self._keep(answer.verdicts)
        return answer.trials

    def _idle_worker(self, rank: int) -> Any:
        """An idle worker that answers a ping. Workers are started for GPUs without one. Raises Unreachable."""
        begin = time.monotonic()
        while not self._closed:
            self._update_workers()
            if (actor := self._idle.get(rank, UPDATE_SECONDS)) is None:
                if self._workers:  # busy workers
                    begin = time.monotonic()
                elif time.monotonic() - begin > self._patience:
                    raise Unreachable(self._absence())
                continue
            try:
                self._ray.get(actor.identity.remote(), timeout=PING_SECONDS)
            except self._ray.exceptions.RayError:  # the worker or its node died while idle
                self._drop(actor)
                continue
            return actor
        raise Unreachable("the executor was closed")

    def _absence(self) -> str:
        """Why there is no worker, in words."""
        count = self._ray.cluster_resources().get(self._resource, 0)
        reason = f"the last one that started: {self._fault}" if self._fault else "none became free"
        return f"no worker started within {self._patience:g} s; the cluster has {count:g} of {self._resource}; {reason}"

    def _update_workers(self) -> None:
        """Registers workers that have started, and starts one for each GPU without a worker.

        A misfit occupies its GPU, so no further worker is started for that GPU.
        """
        with self._lock:
            if time.monotonic() - self._updated_at < UPDATE_SECONDS:
                return
            self._updated_at = time.monotonic()
            for actor, identity in list(self._starting):
                if self._ray.wait([identity], timeout=0)[0]:
                    self._starting.remove((actor, identity))
                    self._register(actor, identity)
            if self._faults >= MAX_START_FAULTS:
                raise Unreachable(f"{MAX_START_FAULTS} workers in a row failed at their start: {self._fault}")
            count = int(self._ray.cluster_resources().get(self._resource, 0))
            for _ in range(count - len(self._workers) - len(self._starting) - len(self._misfits)):
                actor = self._measurer.remote(self._make)
                self._starting.append((actor, actor.identity.remote()))

    def _register(self, actor: Any, identity: Any) -> None:
        """Adds a worker that has started to the idle ones, or to the misfits if its device or version differs."""
        try:
            name, on, version = self._ray.get(identity)
        except self._ray.exceptions.RayError as error:
            # The last line of the error is the environment's own exception.
            self._fault, self._faults = _lines(error)[-1], self._faults + 1
            return
        if not self.on:
            self.name, self.on = name, on
        if (name, on, version) != (self.name, self.on, __version__):
            # Times on two models of GPU are not comparable. The misfit stays alive, so that _update_workers starts no
            # other worker on its GPU.
            self._fault = f"it measures {name} on {on}, version {version}, not {self.name} on {self.on}, {__version__}"
            self._misfits.append(actor)
            return
        self._faults = 0
        self._workers.append(actor)
        self._idle.put(actor)

    def _drop(self, actor: Any) -> None:
        """Ends a worker, which gets no further jobs."""
        with self._lock:
            if actor in self._workers:
                self._workers.remove(actor)
        self._ray.kill(actor)


def parts(job: EvaluationJob, count: int) -> list[EvaluationJob]:
    """The parts of a short job for several GPUs: each part times its records against the same incumbent.

    Jobs of more effort compare records with one another, so they have one part.
    """
    count = min(count, len(job.records)) if job.effort == "short" else 1
    if count < 2:
        return [job]
    size, rest = divmod(len(job.records), count)
    ends = [size * index + min(index, rest) for index in range(count + 1)]
    return [job._replace(records=job.records[start:end]) for start, end in pairwise(ends)]


def _lines(error: object) -> list[str]:
    """The lines of an error's message that are not blank; the name of the error's type if there is none."""
    return [line.strip()[:LONGEST_LINE] for line in str(error).splitlines() if line.strip()] or [type(error).__name__]


def _first_line(error: object) -> str:
    """The first line of an error."""
    return _lines(error)[0]
