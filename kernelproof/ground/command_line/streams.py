"""Standard streams as a shell may leave them: closed, without a reader, or in a locale that is not UTF-8."""

from __future__ import annotations

import io
import locale
import os
import signal
import sys
from contextlib import suppress
from typing import Any, TextIO

from kernelproof.ground.command_line.messages import EXIT_SIGNAL

ENCODING = "utf-8"  # of every file that this program reads and writes


class _Output(io.FileIO):
    """A stream whose reader may leave, as `head` does: the program exits without a message, as if by SIGPIPE. Other
    pipes and sockets raise BrokenPipeError, so SIGPIPE itself stays ignored."""

    def write(self, data: Any, /) -> int:
        """Writes what fits."""
        try:
            return super().write(data)
        except BrokenPipeError:
            discard(self.fileno())
            sys.exit(EXIT_SIGNAL + signal.SIGPIPE)


def prepare() -> bool:
    """Opens the null device in place of closed streams, so that no other file gets their numbers, and answers whether
    standard output was there. Before anything else is opened."""
    written = sys.stdout is not None
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number is this one
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), ENCODING)
    sys.stdout, sys.stderr = _writer(1, sys.stdout), _writer(2, sys.stderr)
    if not sys.flags.utf8_mode and locale.getencoding().lower() != ENCODING:
        with suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, "C.UTF-8")  # the default of open() from here on
        os.environ["PYTHONUTF8"] = "1"  # and of workers
    return written


def discard(descriptor: int) -> None:
    """Sends to the null device what is still to be written, which would fail again when Python flushes at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def _writer(descriptor: int, stream: TextIO | None) -> TextIO:
    """The stream with escapes for what its encoding lacks: names of files may be any bytes."""
    if stream is not None and not isinstance(stream, io.TextIOWrapper):
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(descriptor, "w", closefd=False)),
        stream.encoding if stream else ENCODING,
        "backslashreplace",
        line_buffering=stream is None or stream.line_buffering or stream.write_through,
    )
