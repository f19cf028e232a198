"""What a user is told, and the exit code that goes with it."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from cudal2gen.errors import LONGEST, MissingTool, UserError, WrongInput, brief, printable

EXIT_FAILED, EXIT_USAGE, EXIT_TOOL = 1, 2, 3
EXIT_CODES: tuple[tuple[type[UserError], int], ...] = (
    (WrongInput, EXIT_USAGE),
    (MissingTool, EXIT_TOOL),
    (UserError, EXIT_FAILED),
)


def note(text: str) -> None:
    """One line beside the result, on stderr."""
    print(f"note: {_line(text)}", file=sys.stderr)


def error(text: str) -> None:
    """One line on stderr: what is wrong, where, and what to do next."""
    print(f"error: {_line(text)}", file=sys.stderr)


def _line(text: str) -> str:
    return brief(printable(text.replace("\n", "; ")), LONGEST)


def refuse(message: str) -> NoReturn:
    """Ends a command whose input is wrong."""
    raise WrongInput(message)


def report(failure: UserError | OSError) -> int:
    """Prints an error that a user can mend, a line for each of several, and gives the exit code."""
    if isinstance(failure, UserError):
        for line in filter(None, str(failure).split("\n")):
            error(line)
        return next(code for kind, code in EXIT_CODES if isinstance(failure, kind))
    where = os.fsdecode(failure.filename) if isinstance(failure.filename, str | bytes) else "output"
    error(f"{where}: {failure.strerror or failure}")
    return EXIT_FAILED
