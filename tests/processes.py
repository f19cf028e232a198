"""Finds processes that descend from a test by a variable that they inherit, and waits for conditions."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kernelproof.ground import process_tree, workers

# A variable that a test's processes inherit, so that they are found.
MARK = "CUDAL2GEN_TEST_MARK"
# The time within which a command must end after a signal, however busy the machine is. A process that ignores the
# signal lives for LIFE_S.
END_S, LIFE_S = 30.0, 120.0


def marked_environment(name: object) -> dict[str, str]:
    """This process's environment with a variable that descendants inherit, by which ``living_processes`` finds them."""
    return os.environ | {MARK: str(name)}


def living_processes(name: object) -> dict[int, str]:
    """The command lines, by process id, of the processes that were started with ``marked_environment(name)`` and have
    not ended."""
    variable = f"{MARK}={name}".encode()
    commands = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and variable in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_text(errors="replace")
                commands[int(entry.name)] = command.replace("\0", " ")
    return commands


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end while the file is read
        return False


@contextmanager
def use_memory(gib: float) -> Iterator[None]:
    """Makes this process use this much memory during the block."""
    pages = b"x" * int(gib * process_tree.GIB)
    yield
    del pages


def hold_memory(gib: float, seconds: float = LIFE_S) -> None:
    """Uses this much memory for some time."""
    with use_memory(gib):
        time.sleep(seconds)


def kill(name: object) -> None:
    """Kills the processes that a failed test has left."""
    for pid in living_processes(name):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], object], seconds: float = 300.0) -> float:
    """Waits for a condition and returns the seconds that it took. Fails if it takes longer than ``seconds``."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + seconds, "in vain"
        time.sleep(0.01)
    return time.monotonic() - begin


def workers_of(pid: int) -> list[int]:
    """The workers among the processes that a process has started, which the system kills first if memory runs out."""
    children = [name for path in Path(f"/proc/{pid}/task").glob("*/children") for name in path.read_text().split()]
    victims = []
    for name in children:
        with suppress(OSError):
            if Path(f"/proc/{name}/oom_score_adj").read_text().strip() == workers.FIRST_VICTIM:
                victims.append(int(name))
    return victims
