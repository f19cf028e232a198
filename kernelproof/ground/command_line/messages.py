"""Prints notes and errors on stderr, and maps each kind of error to its exit code."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import NoReturn

from kernelproof.ground import places
from kernelproof.ground.errors import LONGEST, MissingTool, UserError, WrongInput, brief, printable

# The exit codes of both programs. If signal n ended a program, its exit code is EXIT_SIGNAL + n, as shells expect.
EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_TOOL, EXIT_SIGNAL = 0, 1, 2, 3, 128
EXIT_CODES: tuple[tuple[type[UserError], int], ...] = (
    (WrongInput, EXIT_USAGE),
    (MissingTool, EXIT_TOOL),
    (UserError, EXIT_FAILED),
)


def note(text: str) -> None:
    """Prints a remark on stderr, in one line, so that stdout holds only the result."""
    print(f"note: {_line(text)}", file=sys.stderr)


def error(text: str) -> None:
    """Prints an error on stderr, in one line. It should say what is wrong, where, and what to do next."""
    print(f"error: {_line(text)}", file=sys.stderr)


def _line(text: str) -> str:
    """A text as one printable line of limited length."""
    return brief(printable(text.replace("\n", "; ")), LONGEST)


def refuse(message: str) -> NoReturn:
    """Ends a command because its input is wrong; the message says how to correct it."""
    raise WrongInput(message)


def report(failure: UserError | OSError) -> int:
    """Prints an error that the user can correct, one line for each line of its message, and returns the exit code."""
    if isinstance(failure, UserError):
        for line in filter(None, str(failure).split("\n")):
            error(line)
        return next(code for kind, code in EXIT_CODES if isinstance(failure, kind))
    reason = failure.strerror or failure
    if isinstance(failure.filename, str | bytes):
        path = os.fsdecode(failure.filename)
        error(f"{path}: {reason}{places.remedy(Path(path))}")
    elif failure.errno == errno.ENOENT and not _has_folder():
        error("the current folder was removed; change to another one")
    else:
        error(f"output: {reason}")
    return EXIT_FAILED


def _has_folder() -> bool:
    """Whether the folder that this process runs in still has a path."""
    try:
        return bool(Path.cwd())
    except FileNotFoundError:
        return False
