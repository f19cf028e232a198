"""Defines the errors that a user can fix. A message says what is wrong, where (``file:line:``), and what to do next.

Each package derives its errors from the three classes below. The command line prints their message, and the class
decides the exit code. Any other exception is a defect of this program and shows its traceback.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

LONGEST = 480  # most characters of a message on a terminal
LONGEST_VALUE = 60  # most characters of a value within a message
_GAP = " ... "


class UserError(Exception):
    """Base of the errors that a user can fix. If there are several, the message has one per line."""


class WrongInput(UserError, ValueError):
    """An option, a file, or the content of a file is wrong."""


class Failure(UserError, RuntimeError):
    """A kernel fails, or a file cannot be written."""


class MissingTool(UserError, RuntimeError):
    """A compiler, a library or a device is missing."""


class MissingLibrary(MissingTool):
    """A proposer's library is not installed; the message has the command that installs it."""


class SkippedLine(UserWarning):
    """A damaged line of a store was skipped. The message says where and why."""


def installation(extra: str) -> str:
    """The command that installs an optional part of this project, which no package index has, from its checkout."""
    return f"pip install '.[{extra}]' in the checkout"


def brief(text: str, longest: int = LONGEST_VALUE) -> str:
    """The text, shortened in its middle if it is longer than ``longest`` characters."""
    if len(text) <= longest:
        return text
    tail = (longest - len(_GAP)) // 3
    return text[: longest - len(_GAP) - tail] + _GAP + text[-tail:]


def printable(text: str) -> str:
    """The text with escapes in place of control characters and of code points that are not characters, such as half of
    a surrogate pair."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def parse_json(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of an untrusted JSON text. ``pairs`` builds objects, as in ``json.loads``. Raises WrongInput."""
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text, object_pairs_hook=pairs)
    except UserError:
        raise
    except json.JSONDecodeError as error:
        fault = f"{error.msg} at character {error.pos + 1}"
    except UnicodeDecodeError as error:
        fault = f"byte {error.start + 1} is not UTF-8"
    except RecursionError:
        fault = "nested too deeply"
    except ValueError:  # Python's limit
        fault = f"a number has more than {sys.get_int_max_str_digits()} digits"
    raise WrongInput(f"not JSON: {fault}")


def invalid(what: str, error: ValidationError) -> WrongInput:
    """The error to raise if pydantic refuses a value. It names the first field that is wrong, and why."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return WrongInput(f"{what}: {place + ': ' if place else ''}{brief(first['msg'], 200)}")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """A context that turns an OSError, or a file that is not text, into WrongInput, because the user can name another
    file."""
    try:
        yield
    except OSError as error:
        raise WrongInput(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise WrongInput(f"cannot read {path}: no UTF-8 text") from None
