"""SIGTERM, SIGINT and SIGHUP: an exit in good order where that is possible, and in any case within two seconds."""

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
GRACE_S = 1.0  # for compilers to be ended, scratch folders removed and results closed
SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it
_received: list[int] = []  # the number of the signal that ends this process


def handle() -> None:
    """From here on a signal that ends raises SystemExit(EXIT_SIGNAL + its number) in the main thread.

    Python raises between two of its instructions, so a call that never returns, such as a wait for a device that
    hangs, would go on: a thread ends the process after ``GRACE_S``. Signals that are ignored, as by nohup, stay so.
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
    """Raises the SystemExit of a signal where a library replaced it by an exception of its own.

    pydantic does so: whatever a serializer raises becomes a ValueError.
    """
    try:
        yield
    except Exception:
        if _received:
            sys.exit(EXIT_SIGNAL + _received[0])
        raise


def _leave(number: int, _frame: FrameType | None) -> None:
    _received.append(number)
    for other in ENDING:
        signal.signal(other, signal.SIG_IGN)  # a second one would interrupt what tidies up
    sys.exit(EXIT_SIGNAL + number)


def _end(wakeups: int) -> None:
    while (number := os.read(wakeups, 1)[0]) not in ENDING:
        pass
    time.sleep(GRACE_S)
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), SHOW_CURSOR.encode())
    os._exit(EXIT_SIGNAL + number)
