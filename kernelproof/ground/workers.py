"""Computes the answers to tasks in worker processes.

Workers end when the thread that started them ends, even by SIGKILL. If a worker dies, only its task is lost: a ``Lost``
names the task, another worker takes its place, and the other tasks are answered.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeVar

PR_SET_PDEATHSIG = 1  # of prctl: sets the signal that this process gets when the thread that started it ends
# oom_score_adj of workers: when memory runs out, the system kills a worker rather than the process that waits for it.
# A limit of address space would not do, because the emulator reserves far more than it touches.
FIRST_VICTIM = "500"
JOIN_S = 5.0  # seconds for a process to end after its pipe was closed

Answer = TypeVar("Answer")


class Task(NamedTuple):
    """The arguments for one call of a function, and the name of the task in messages."""

    name: str
    arguments: tuple[object, ...]


class Lost(NamedTuple):
    """A task without an answer, because its process died or the function raised."""

    name: str
    reason: str


class Worker:
    """A process that runs ``serve(pipe, *arguments)``. The ``pipe`` that it gets is the other end of this object's.

    ``fork`` starts in milliseconds; ``spawn`` is for processes that use CUDA.
    """

    def __init__(self, method: Literal["fork", "spawn"], serve: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("fork") if method == "fork" else multiprocessing.get_context("spawn")
        self.pipe, other_end = multiprocessing.Pipe()
        self._process = context.Process(target=_run, args=(os.getpid(), serve, other_end, *arguments), daemon=True)
        self._process.start()
        # Only the worker holds its end now, so this object's end reports end-of-file when the worker dies.
        other_end.close()

    @property
    def pid(self) -> int:
        """The number of the process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs. Processes that it started may outlive it."""
        return self._process.is_alive()

    def exit_code(self) -> int | None:
        """The exit code of a process whose pipe is closed: minus the signal that ended it, None if it does not end."""
        end = time.monotonic() + JOIN_S
        while self.alive and time.monotonic() < end:  # join does not wait for a process that has closed all its files
            self._process.join(0.1)
            time.sleep(0.001)
        return self._process.exitcode

    def end(self) -> None:
        """Kills the process."""
        self._process.kill()
        self._process.join()
        self.pipe.close()

    def death(self) -> str:
        """Says how a process whose pipe is closed has ended, as the rest of a sentence."""
        code = self.exit_code()
        if code is None or code >= 0:
            return f"ended (exit code {code})"
        hint = "; if memory ran out, run again with fewer --jobs" if code == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"


def answers(function: Callable[..., Answer], tasks: Iterable[Task], jobs: int) -> Generator[Answer | Lost, None, None]:
    """The function's answers in the order in which they arrive, from up to ``jobs`` processes at a time.

    Closing the iterator kills the processes; use ``contextlib.closing``.
    """
    pool = _Pool(function)
    waiting = iter(tasks)
    try:
        while True:
            while len(pool.busy) < jobs and (task := next(waiting, None)):
                pool.give(task)
            if not pool.busy:
                return
            yield from pool.collect()
    finally:
        pool.end()


class _Pool(Generic[Answer]):
    """Idle and busy processes that call one function."""

    def __init__(self, function: Callable[..., Answer]) -> None:
        self._function = function
        self._idle: list[Worker] = []
        self.busy: dict[Connection, tuple[Worker, Task]] = {}

    def give(self, task: Task) -> None:
        """Sends a task to an idle process, or to a new one."""
        worker = self._idle.pop() if self._idle else Worker("fork", _serve, self._function)
        self.busy[worker.pipe] = worker, task
        with suppress(OSError):  # the process died while idle; ``collect`` will notice
            worker.pipe.send(task.arguments)

    def collect(self) -> list[Answer | Lost]:
        """Waits until a process has answered or died. Returns the answers of all processes that have."""
        answers: list[Answer | Lost] = []
        for pipe in wait(list(self.busy)):
            assert isinstance(pipe, Connection)
            worker, task = self.busy.pop(pipe)
            try:
                is_answered, answer = pipe.recv()
            except (EOFError, OSError):
                is_answered, answer = False, f"the process that ran it {worker.death()}"
            if is_answered:
                self._idle.append(worker)
                answers.append(answer)
            else:
                worker.end()
                answers.append(Lost(task.name, answer))
        return answers

    def end(self) -> None:
        """Kills all processes."""
        for worker in [*self._idle, *(worker for worker, _ in self.busy.values())]:
            worker.end()


def _serve(pipe: Connection, function: Callable[..., object]) -> None:
    """Answers tasks until the function raises; after that the state of this process is undefined."""
    while True:
        arguments: Sequence[object] = pipe.recv()
        try:
            pipe.send((True, function(*arguments)))
        except Exception as error:
            pipe.send((False, _reason(error)))
            return


def _reason(error: Exception) -> str:
    """An exception with the line that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"


def _run(parent: int, serve: Callable[..., None], pipe: Connection, *arguments: object) -> None:
    """The main function of a worker: calls ``serve`` until the pipe is closed."""
    serve_only(parent)
    with suppress(EOFError):
        serve(pipe, *arguments)


def serve_only(parent: int) -> None:
    """Prepares this process to serve its parent: it ends with the parent's thread, and leaves Ctrl-C to the parent."""
    _die_with(parent)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; only the parent handles it
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(FIRST_VICTIM)


def _die_with(parent: int) -> None:
    """Ends this process when the parent's thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before prctl was called
        os._exit(1)
