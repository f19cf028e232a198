"""Ends the program within two seconds of SIGTERM, SIGINT or SIGHUP, and cleans up first if possible.

The signal raises SystemExit in the main thread, so that results are closed and compilers and scratch folders removed.
If the main thread hangs in a call that never returns, a second thread ends the process after ``GRACE_S``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kernelproof.ground.command_line.messages import EXIT_SIGNAL

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GRACE_S = 1.0  # time for cleaning up before the process is ended without it
SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it
_received: list[int] = []  # the number of the signal that is ending this process; empty until one arrives


def handle() -> None:
    """Installs the handlers: from now on these signals raise SystemExit(EXIT_SIGNAL + number) in the main thread.

    Python runs handlers only between two of its own instructions, so they never run while the main thread waits in a
    call, such as for a device that hangs. The C-level handler still writes the signal's number to a pipe; a thread
    reads it there and ends the process after ``GRACE_S``. Signals that were ignored (by nohup) stay ignored.
    """
    wakeups, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    threading.Thread(target=_end, args=(wakeups,), daemon=True).start()


@contextmanager
def exit_restored() -> Iterator[None]:
    """A context that raises the SystemExit of a signal if a library replaced it by an exception of its own.

    pydantic does this: it turns every exception in a serializer into a ValueError.
    """
    try:
        yield
    except Exception:
        if _received:
            sys.exit(EXIT_SIGNAL + _received[0])
        raise


def _leave(number: int, _frame: FrameType | None) -> None:
    """Handles a signal in the main thread: ends the process by SystemExit."""
    _received.append(number)
    for other in ENDING:
        signal.signal(other, signal.SIG_IGN)  # a second signal would interrupt the cleaning up
    sys.exit(EXIT_SIGNAL + number)


def _end(wakeups: int) -> None:
    """Runs in a thread: waits for a signal's number in the pipe, and ends the process after ``GRACE_S``."""
    while (number := os.read(wakeups, 1)[0]) not in ENDING:
        pass
    time.sleep(GRACE_S)
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), SHOW_CURSOR.encode())
    os._exit(EXIT_SIGNAL + number)
