"""Child programs that end, with everything they start, when a block ends or this process dies, even by SIGKILL.

Between the two stands a supervisor, which is this file run by itself (standard library only). It leads a session of its
own, in which the program and whatever that starts run. Its standard input is a pipe that only this process writes to:
when the pipe closes, or at SIGTERM, the supervisor kills the session.
"""

from __future__ import annotations

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

NOT_STARTED = 127  # exit code of a program that cannot be started, as a shell's
GIB = 1 << 30
LOOK_S = 0.2  # seconds between looks at the memory of a session


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> Iterator[Popen[str]]:
    """Runs a program for the length of the block; its output and errors are one text stream, ``stdout``.

    Its exit code is 128 plus the signal's number where a signal ended it, and ``NOT_STARTED`` where it does not run.
    """
    import subprocess

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
            # A process forked since may hold the pipe open too, so this does not wait for it to close.
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
    """Runs a program in this session until it ends, or until stdin is closed or SIGTERM comes; then kills the session.

    Answers the program's exit code.
    """
    wakeups, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)  # first, so that no signal is missed
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    child = os.fork()
    if not child:
        _execute(command)
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
    """Limits of a process that this one has just forked and that leads a session: of its time, of the memory that it
    and all that it starts add to what it inherited, which a large parent has much of, and of ``processes`` (0: none)
    that it starts."""

    def __init__(self, leader: int, seconds: float, gib: float, processes: int = 0) -> None:
        self._leader, self._nbytes, self._processes = leader, gib * GIB, processes
        self._looked = time.perf_counter()
        self._end = self._looked + seconds
        self._inherited = _anonymous_bytes(os.getpid())
        self._excessive = False  # whether the last look found too much memory

    def passed(self) -> Literal["", "time", "memory", "processes"]:
        """The limit that is exceeded, "" for none. Cheap: memory is read every ``LOOK_S`` seconds only."""
        now = time.perf_counter()
        if now > self._end:
            return "time"
        members = {self._leader}
        if self._processes:  # counted often: those that start others for ever leave no time to count them later
            members |= {*session(self._leader)}
            if len(members) > self._processes:
                return "processes"
        if now < self._looked + LOOK_S:
            return ""
        self._looked = now
        members |= {*session(self._leader)}
        resident = resident_bytes(members) - self._inherited
        excessive = resident > self._nbytes and added_bytes(members) > self._nbytes
        # Two looks in a row must agree: a process that ends during a look hands its shared pages to those read later,
        # which then count them a second time.
        twice, self._excessive = self._excessive and excessive, excessive
        return "memory" if twice else ""


def resident_bytes(processes: Iterable[int]) -> int:
    """Resident bytes of some processes; shared pages count once per process."""
    return sum(_pages(pid)[0] for pid in processes)


def added_bytes(processes: Iterable[int]) -> int:
    """The memory that some processes have and this one has not, in bytes: pages that they share count once. Slow.

    Where further processes share this one's memory, it is a lower bound: no less than what each has for itself.
    """
    maps = [_rollup(pid) for pid in processes]
    parent = _rollup(os.getpid())
    private = sum(sizes["Private_Clean"] + sizes["Private_Dirty"] for sizes in maps)
    # A page shared by n processes counts 1/n for each, so the share of this process is missing from the sum.
    inherited = parent["Anonymous"] - parent["Pss_Anon"]
    return max(private, sum(sizes["Pss"] for sizes in maps) - inherited)


def _rollup(pid: int) -> Counter[str]:
    """Sizes of a process's memory by kind, in bytes; none of a process that has ended. One that may not be looked at,
    for which a process can see by itself, has all that it has resident for itself: no limit is evaded so."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:  # noqa: PTH123
            lines = [line.split() for line in file.readlines()[1:]]
    except OSError:
        resident, _ = _pages(pid)
        return Counter(Pss=resident, Private_Dirty=resident)
    return Counter({words[0].rstrip(":"): 1024 * int(words[1]) for words in lines})


def _anonymous_bytes(pid: int) -> int:
    """Memory that a fork inherits at once: the resident pages that are of no file and not shared."""
    resident, shared = _pages(pid)
    return resident - shared


def _pages(pid: int) -> tuple[int, int]:
    """The bytes that a process has resident, and those of files and shared memory among them; none if it has ended."""
    try:
        with open(f"/proc/{pid}/statm") as file:  # noqa: PTH123
            _, resident, shared = map(int, file.read().split()[:3])
    except OSError:
        return 0, 0
    size = os.sysconf("SC_PAGESIZE")
    return resident * size, shared * size


def kill_session(leader: int) -> None:
    """Kills all processes of a session but its leader, those too that they start meanwhile."""
    while members := [pid for pid in session(leader) if pid != leader]:
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.001)


def session(leader: int) -> list[int]:
    """The processes of a session that have not ended, and what they started in sessions of their own."""
    members, parents = [], {}
    for name in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208 - pathlib takes as long as all the rest
        try:
            with open(f"/proc/{name}/stat", errors="replace") as file:  # noqa: PTH123
                # After the name in parentheses: state, parent, process group, session.
                state, parent, _, session = file.read().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if state in "ZX":
            continue
        if int(session) == leader:
            members.append(int(name))
        else:
            parents[int(name)] = int(parent)
    while outside := [pid for pid, parent in parents.items() if parent in {leader, *members}]:
        members += outside
        for pid in outside:
            del parents[pid]
    return members


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1:]))
