"""Makes the standard streams usable whatever the shell did with them.

A shell may close them, stop reading them (as ``head`` does), or set a locale that cannot encode UTF-8.
"""

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
    """A stream whose reader may leave early, as `head` does. The program then exits silently, as if by SIGPIPE.

    SIGPIPE itself stays ignored, so that other pipes and sockets raise BrokenPipeError, which their users handle.
    """

    def write(self, data: Any, /) -> int:
        """Writes as much of the data as the stream takes, and returns the number of bytes written."""
        try:
            return super().write(data)
        except BrokenPipeError:
            discard(self.fileno())
            sys.exit(EXIT_SIGNAL + signal.SIGPIPE)


def prepare() -> bool:
    """Replaces closed streams by the null device, and makes both outputs accept any text and end the program silently
    when their reader leaves. Returns whether standard output was open.

    It must run before any file is opened. Otherwise that file would get the number of a closed stream, and messages
    would be written into it.
    """
    is_open = sys.stdout is not None
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
            locale.setlocale(locale.LC_CTYPE, "C.UTF-8")  # makes UTF-8 the default of open()
        os.environ["PYTHONUTF8"] = "1"  # the same for child processes
    return is_open


def discard(descriptor: int) -> None:
    """Redirects a stream to the null device. Python flushes what is left of the stream's buffer at exit, and that write
    would fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def _writer(descriptor: int, stream: TextIO | None) -> TextIO:
    """A stream for a descriptor that escapes characters which its encoding lacks, since file names may be any bytes."""
    if stream is not None and not isinstance(stream, io.TextIOWrapper):
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(descriptor, "w", closefd=False)),
        stream.encoding if stream else ENCODING,
        "backslashreplace",
        line_buffering=stream is None or stream.line_buffering or stream.write_through,
    )
