"""Runs child programs that end, with all processes they started, when a block ends or this process dies.

This holds even if this process dies by SIGKILL. Between this process and the program there is a supervisor: this file,
run as a script that imports only the standard library. It leads a new session, in which the program and all processes
that it starts run. Its standard input is a pipe whose other end only this process holds. When the pipe closes, or at
SIGTERM, the supervisor kills the session.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path
    from subprocess import Popen

NOT_STARTED = 127  # exit code for a program that cannot be started, as in a shell
GIB = 1 << 30
MEASUREMENT_INTERVAL_S = 0.2  # seconds between two measurements of a session's memory


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> Iterator[Popen[str]]:
    """Runs a program during the block. Its output and errors are one text stream, ``stdout``.

    Its exit code is 128 plus the signal's number if a signal ended it, and ``NOT_STARTED`` if it cannot be started.
    """
    import subprocess

    # The supervisor reads ``lifeline``. Nothing is written to it; it becomes readable when the last process that has
    # ``hold`` open ends.
    lifeline, hold = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *command],
            stdin=lifeline, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", env=environment, cwd=folder, start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            # A process that was forked meanwhile may also hold the pipe open, so closing the pipe would not be enough.
            process.terminate()
            process.wait()
            if process.stdout:
                process.stdout.close()
    finally:
        os.close(lifeline)
        os.close(hold)


def output(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    folder: Path | None = None,
) -> tuple[int, str]:
    """A program's exit code and output. Raises subprocess.TimeoutExpired after ``timeout_s`` seconds."""
    with started(command, environment, folder) as process:
        text, _ = process.communicate(timeout=timeout_s)
    return process.returncode, text


def supervise(command: Sequence[str]) -> int:
    """Runs a program in this session until it ends, stdin is closed, or SIGTERM arrives; then kills the session.

    Returns the program's exit code.
    """
    wakeups, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)  # before the handlers and the fork, so that no signal is missed
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    child = os.fork()
    if not child:
        _execute(command)
    # The program may end between any two steps. Its SIGCHLD writes to ``wakeup``, so ``select`` then returns.
    while True:
        ready, _, _ = select.select([sys.stdin.fileno(), wakeups], [], [])
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if sys.stdin.fileno() in ready or signal.SIGTERM in os.read(wakeups, 1024):
            kill_session(os.getpid())
            _, status = os.waitpid(child, 0)
            break
    kill_session(os.getpid())
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _execute(command: Sequence[str]) -> None:
    """Becomes the program. If it cannot be started, prints why and exits with ``NOT_STARTED``."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(NOT_STARTED)


class Watch:
    """Limits of time, memory and processes for a process that this one has just forked and that leads a session.

    The counted memory is what the process and all processes that it starts have in addition to the memory that the fork
    inherited, which is much if the parent is large. ``processes``: how many processes may exist; 0 means no limit.
    """

    def __init__(self, leader: int, seconds: float, gib: float, processes: int = 0) -> None:
        self._leader, self._nbytes, self._processes = leader, gib * GIB, processes
        self._last_measurement = time.perf_counter()
        self._end = self._last_measurement + seconds
        # A fork inherits the resident pages that belong to no file and are not shared.
        resident, shared = _memory_sizes(os.getpid())
        self._inherited = resident - shared
        self._excessive = False  # whether the last measurement found too much memory

    def passed(self) -> Literal["", "time", "memory", "processes"]:
        """The exceeded limit, or "". Calls are cheap, because memory is measured only every ``MEASUREMENT_INTERVAL_S``
        seconds."""
        now = time.perf_counter()
        if now > self._end:
            return "time"
        members = {self._leader}
        if self._processes:  # counted at every call: a process that forks without end leaves no time to do so later
            members |= {*session(self._leader)}
            if len(members) > self._processes:
                return "processes"
        if now < self._last_measurement + MEASUREMENT_INTERVAL_S:
            return ""
        self._last_measurement = now
        members |= {*session(self._leader)}
        resident = resident_bytes(members) - self._inherited
        excessive = resident > self._nbytes and added_bytes(members, self._end) > self._nbytes
        # Two measurements in a row must agree. If a process ends during one, processes that are read after it count its
        # shared pages a second time.
        twice, self._excessive = self._excessive and excessive, excessive
        return "memory" if twice else ""


def resident_bytes(processes: Iterable[int]) -> int:
    """The resident bytes of some processes. A shared page counts once for each of them."""
    return sum(_memory_sizes(pid)[0] for pid in processes)


def added_bytes(processes: Iterable[int], end: float = math.inf) -> int:
    """The memory, in bytes, that some processes have and this one does not. Shared pages count once.

    The measurement is slow, and the kernel makes it wait for each fork of a process that forks without end. So it stops
    at ``end``, a reading of ``time.perf_counter``. The result is then a lower bound. It is one, too, if further
    processes share this one's memory, but at least the private memory of the processes that were read.
    """
    maps = []
    for pid in processes:
        if time.perf_counter() > end:
            break
        maps.append(_rollup(pid))
    parent = _rollup(os.getpid())
    private = sum(sizes["Private_Clean"] + sizes["Private_Dirty"] for sizes in maps)
    # A page shared by n processes counts 1/n for each, so the share of this process is missing from the sum.
    inherited = parent["Anonymous"] - parent["Pss_Anon"]
    return max(private, sum(sizes["Pss"] for sizes in maps) - inherited)


def _rollup(pid: int) -> Counter[str]:
    """The sizes of a process's memory by kind, in bytes; empty if it has ended.

    A process can forbid others to read this file. Then all its resident memory counts as private, so that it cannot
    evade a limit.
    """
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:  # noqa: PTH123
            lines = [line.split() for line in file.readlines()[1:]]
    except OSError:
        resident, _ = _memory_sizes(pid)
        return Counter(Pss=resident, Private_Dirty=resident)
    return Counter({words[0].rstrip(":"): 1024 * int(words[1]) for words in lines})


def _memory_sizes(pid: int) -> tuple[int, int]:
    """The resident bytes of a process, and how many of them are shared or belong to files; both 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/statm") as file:  # noqa: PTH123
            _, resident, shared = map(int, file.read().split()[:3])
    except OSError:
        return 0, 0
    size = os.sysconf("SC_PAGESIZE")
    return resident * size, shared * size


def kill_session(leader: int) -> None:
    """Kills all processes of a session except its leader, including those that they start meanwhile."""
    # Repeated until none is left, because a process may fork between the listing and its signal.
    while members := [pid for pid in session(leader) if pid != leader]:
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.001)


def session(leader: int) -> list[int]:
    """The processes of a session that have not ended, and the processes that they started in other sessions."""
    members, parents = [], {}
    for name in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208 - pathlib takes as long as all the rest
        try:
            with open(f"/proc/{name}/stat", errors="replace") as file:  # noqa: PTH123
                # After the name in parentheses: state, parent, process group, session.
                state, parent, _, session_leader = file.read().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if state in "ZX":
            continue
        if int(session_leader) == leader:
            members.append(int(name))
        else:
            parents[int(name)] = int(parent)
    # A process may leave the session by setsid, but it keeps its parent. So children of members are members, too.
    while outside := [pid for pid, parent in parents.items() if parent in {leader, *members}]:
        members += outside
        for pid in outside:
            del parents[pid]
    return members


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1:]))
