"""What a user is told, and the exit code that goes with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

from cudal2gen.catalog import CatalogError
from cudal2gen.kernel import IllegalRecord

EXIT_FAILED, EXIT_USAGE, EXIT_TOOL = 1, 2, 3


def note(text: str) -> None:
    """One line beside the result, on stderr."""
    print(f"note: {text}", file=sys.stderr)


def fail(message: str, code: int) -> NoReturn:
    """One line on stderr, and the end."""
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(code)


def refuse(message: str) -> NoReturn:
    """Ends a command whose input is wrong."""
    fail(message, EXIT_USAGE)


@contextmanager
def user_errors() -> Iterator[None]:
    """Errors that a user can mend end the command with one line and an exit code, without a traceback."""
    try:
        yield
    except (IllegalRecord, CatalogError) as error:
        refuse(str(error))
    except RuntimeError as error:
        from cudal2gen.bench import Stopped, TooGood
        from cudal2gen.compiler import BuildError
        from cudal2gen.gpu import GpuError
        from cudal2gen.pack import PackError
        from cudal2gen.toolchain import ToolchainError

        if isinstance(error, ToolchainError | GpuError):
            fail(str(error), EXIT_TOOL)
        if isinstance(error, BuildError | PackError | Stopped | TooGood):
            fail(str(error), EXIT_FAILED)
        raise


def write(path: Path, text: str) -> None:
    """Writes a file and the folders above it; refuses a path that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        refuse(f"cannot write {path}: {error.strerror}")
