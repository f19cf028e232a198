"""Runs many sessions concurrently: several problems, and for each problem several sessions with different random draws.

A session's thread mostly waits for a server. Kernels are compiled and proven in separate processes, one for each core,
which are started before any thread. The executor times one kernel after the other. So the questions of one session and
the proofs of another do not wait for each other.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress

from cudal2gen.kernel import Fields, Record
from cudal2gen.results import Trial
from cudal2gen.tuner.executor import EvaluationJob, Executor
from cudal2gen.tuner.writing import judging
from cudal2gen.tuner.writing.judging import Examination
from cudal2gen.tuner.writing.proof import CheckLimits
from cudal2gen.tuner.writing.session import Session
from kernelproof.ground import workers

MAX_SESSIONS = 64  # most concurrent sessions
SHOW_SECONDS = 5.0  # seconds between two calls of ``show``

Examine = Callable[[Record, Fields, CheckLimits, frozenset[str]], Examination]


class SerialExecutor:
    """Lets several threads share an executor, by making one call at a time."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self._lock = executor, threading.Lock()
        self.name, self.on, self.in_order = executor.name, executor.on, executor.in_order

    def prepare(self, records: Sequence[Record]) -> None:
        """See ``Executor``."""
        with self._lock:
            self._executor.prepare(records)

    def submit(self, job: EvaluationJob, rank: int = 0) -> Future[list[Trial]]:
        """See ``Executor``."""
        with self._lock:
            return self._executor.submit(job, rank)

    def in_flight(self) -> int:
        """See ``Executor``."""
        return self._executor.in_flight()

    def close(self) -> None:
        """See ``Executor``."""
        self._executor.close()


@contextmanager
def provers(count: int | None = None) -> Iterator[Examine]:
    """A context that gives ``judging.examine`` in ``count`` processes, by default one for each core.

    The processes start when the context is entered, so enter it before threads start.
    """
    cores = count or os.cpu_count() or 1
    pool = ProcessPoolExecutor(cores, multiprocessing.get_context("spawn"), workers.serve_only, (os.getpid(),))
    # Each submission starts a process. A process ends with the thread that started it, so this thread starts them all.
    for future in [pool.submit(os.getpid) for _ in range(cores)]:
        future.result()

    def examine(record: Record, launch: Fields, limits: CheckLimits, known_codes: frozenset[str]) -> Examination:
        return pool.submit(judging.examine, record, launch, limits, known_codes).result()

    try:
        yield examine
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def run(sessions: Sequence[Session], at_once: int = MAX_SESSIONS, show: Callable[[], None] = lambda: None) -> None:
    """Runs the sessions in their order, at most ``at_once`` concurrently.

    ``show`` is called every ``SHOW_SECONDS`` seconds and at the end. If sessions raise exceptions, the first is raised
    after all sessions have ended. The threads are daemons, so an interruption of the main thread ends the process; the
    next start continues from what the sessions have stored.
    """
    queue, errors = deque(sessions), list[BaseException]()

    def work() -> None:
        with suppress(IndexError):
            while True:
                session = queue.popleft()
                try:
                    session.run()
                except BaseException as error:
                    errors.append(error)

    count = max(1, min(at_once, len(sessions)))
    threads = [threading.Thread(target=work, daemon=True, name=f"session {number}") for number in range(count)]
    for thread in threads:
        thread.start()
    while alive := [thread for thread in threads if thread.is_alive()]:
        alive[0].join(SHOW_SECONDS)
        show()
    show()
    if errors:
        raise errors[0]
