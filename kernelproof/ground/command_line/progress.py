"""Shows progress on stderr: as a bar on a terminal, as occasional lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOG_INTERVAL_S = 10.0  # least seconds between two lines in a log

Report = Callable[[int, int], None]  # called with the number of items that are done, and that of all


@contextmanager
def bar(title: str) -> Iterator[Report | None]:
    """Shows a progress bar and yields the function that updates it; yields None if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as display:
        task = display.add_task(title, total=None)

        def report(done: int, total: int) -> None:
            display.update(task, completed=done, total=total)

        yield report


@contextmanager
def countdown(title: str) -> Iterator[Callable[[int, int, float], None]]:
    """Yields a function that shows progress, given problems done, problems in all and seconds left.

    It updates a bar on a terminal, and otherwise prints a line every ten seconds.
    """
    with bar(title) as update:
        printed = 0.0

        def report(done: int, total: int, seconds_left: float) -> None:
            nonlocal printed
            if update:
                update(done, total)
            elif time.monotonic() - printed > LOG_INTERVAL_S:
                printed = time.monotonic()
                print(f"{done} of {total} problems, about {seconds_left:.0f} s left", file=sys.stderr, flush=True)

        yield report
