"""Processes that descend from a test, told by a variable that they inherit, and waiting for what they do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

MARK = "CUDAL2GEN_TEST_MARK"


def marked(name: object) -> dict[str, str]:
    """This environment with a variable that descendants inherit."""
    return os.environ | {MARK: str(name)}


def alive(name: object) -> list[str]:
    """The command lines of the processes with that mark that have not ended."""
    variable = f"{MARK}={name}".encode()
    commands = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and variable in (entry / "environ").read_bytes().split(b"\0"):
                commands.append((entry / "cmdline").read_text(errors="replace").replace("\0", " "))
        except OSError:
            continue
    return commands


def until(condition: Callable[[], object], seconds: float = 60.0) -> float:
    """Waits for a condition; answers how long that took, and fails where it takes longer than ``seconds``."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + seconds, "in vain"
        time.sleep(0.01)
    return time.monotonic() - begin
