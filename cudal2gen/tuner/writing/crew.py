"""Many sessions at a time: several problems, and for each several trajectories, which draw and read differently.

A session's thread mostly waits for a server. Kernels are compiled and proven in processes of their own, as many as
there are cores, which begin before any thread does; the executor times one kernel after the other. So no question waits
for another session's proofs, and no proof for another session's questions.
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

AT_ONCE = 64  # most sessions at a time
LOOK_S = 5.0  # seconds between looks at what they have done

Examine = Callable[[Record, Fields, CheckLimits, frozenset[str]], Examination]


class SerialExecutor:
    """An executor for several threads, of whose submissions one is made at a time."""

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
    """``judging.examine`` in ``count`` processes, by default one for each core. They begin here, so enter this before
    threads begin."""
    cores = count or os.cpu_count() or 1
    pool = ProcessPoolExecutor(cores, multiprocessing.get_context("spawn"), workers.serve_only, (os.getpid(),))
    # Each of these starts a process. They end with the thread that started them, which is this one.
    for begun in [pool.submit(os.getpid) for _ in range(cores)]:
        begun.result()

    def examine(record: Record, launch: Fields, bounds: CheckLimits, known: frozenset[str]) -> Examination:
        return pool.submit(judging.examine, record, launch, bounds, known).result()

    try:
        yield examine
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def run(sessions: Sequence[Session], at_once: int = AT_ONCE, look: Callable[[], None] = lambda: None) -> None:
    """Runs sessions, at most ``at_once`` at a time, in their order. ``look`` is called every ``LOOK_S`` seconds and at
    the end. Raises what one of them raised, after all ended.

    The threads are daemons: an interruption of the main thread ends the process, and what they stored is taken up.
    """
    waiting, errors = deque(sessions), list[BaseException]()

    def work() -> None:
        with suppress(IndexError):
            while True:
                session = waiting.popleft()
                try:
                    session.run()
                except BaseException as error:
                    errors.append(error)

    count = max(1, min(at_once, len(sessions)))
    threads = [threading.Thread(target=work, daemon=True, name=f"session {place}") for place in range(count)]
    for thread in threads:
        thread.start()
    while alive := [thread for thread in threads if thread.is_alive()]:
        alive[0].join(LOOK_S)
        look()
    look()
    if errors:
        raise errors[0]
