"""Draws arguments and contents of files, and checks that every program answers them with a documented exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import typer
from hypothesis import settings
from hypothesis import strategies as st

from cudal2gen import cli
from kernelproof.ground.command_line.messages import report
from kernelproof.ground.errors import UserError
from tests.draws import THOROUGH

# The codes with which a command may end, whatever it is given.
EXIT_CODES = {0, 1, 2, 3}
# Limits in processor seconds of this process, for examples that take milliseconds, and in seconds of the clock, for
# those that wait. They are large, so that a busy machine does not matter.
SECONDS, CLOCK_SECONDS = 120, 1800
COMMAND = typer.main.get_command(cli.app)

# Integers beyond 32 and 64 bits, beyond fp64, and longer than Python turns into text by default.
HUGE = st.sampled_from([2**31, 2**63, 2**64, 10**30, 10**300, 10**4000, -(10**30)])
NUMBERS = st.one_of(
    st.integers(-3, 300), HUGE, st.floats(), st.sampled_from([0.5, 1e308, float("nan"), float("inf"), -0.0])
)
TEXTS = st.one_of(
    st.sampled_from(["", "f16", "a100", "A100", "null", "x" * 5000, "\ud800", "\u2028", "\x1b[31m", "\x00", "ä\r\nb"]),
    st.text(max_size=20),
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(TEXTS, values, max_size=3),
    max_leaves=6,
)
# JSON texts that are nested deeply.
DEEP = st.sampled_from([f"{'[' * depth}{']' * depth}" for depth in (200, 900, 5000)])


def examples(quick: int, thorough: int = 10_000) -> Callable[[Any], Any]:
    """Settings with ``quick`` examples in ``make test``, and ``thorough`` ones in ``make thorough``."""
    return settings(max_examples=thorough if THOROUGH else quick, deadline=None)


@st.composite
def mutate_lines(draw: st.DrawFn, lines: list[str]) -> bytes:
    """One of ``lines``, each a JSON object, with values replaced, keys removed or added, or its bytes damaged."""
    fields = json.loads(draw(st.sampled_from(lines)))
    names = list(fields)
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
        how = draw(st.sampled_from(["replace", "replace", "scale", "inside", "remove", "add"]))
        value = fields.get(name)
        if how == "scale" and isinstance(value, int) and abs(value) < 2**40:
            fields[name] = int(value * draw(st.sampled_from([0, 0.5, 2, 3, 1000])) + draw(st.integers(-1, 1)))
        elif how == "inside" and isinstance(value, dict | list) and value:
            inner = draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
            value[inner] = draw(VALUES)
        elif how == "remove":
            fields.pop(name, None)
        elif how == "add":
            fields[draw(TEXTS)] = draw(VALUES)
        else:
            fields[name] = draw(VALUES)
    return draw(damage(json.dumps(fields).encode()))


@st.composite
def damage(draw: st.DrawFn, content: bytes) -> bytes:
    """The bytes unchanged, cut off, with a bit flipped, a key repeated, or something inserted."""
    how = draw(st.sampled_from(["whole", "whole", "whole", "cut", "flip", "insert", "repeat"]))
    at = draw(st.integers(0, max(0, len(content) - 1)))
    if how == "cut":
        return content[:at]
    if how == "flip" and content:
        return content[:at] + bytes([content[at] ^ 1 << draw(st.integers(0, 7))]) + content[at + 1 :]
    if how == "insert":
        middle = draw(
            st.one_of(st.binary(max_size=4), st.sampled_from([b"\xef\xbb\xbf", b"\0", b"9" * 5000, b"1e999"]))
        )
        return content[:at] + middle + content[at:]
    if how == "repeat" and content[:1] == b"{":
        return b'{"m":64,"m":64,' + content[1:]
    return content


# Contents of a file that need not be JSON.
ANYTHING = st.one_of(VALUES.map(lambda value: json.dumps(value).encode()), DEEP.map(str.encode), st.binary(max_size=40))


@contextlib.contextmanager
def limit_time(seconds: float = SECONDS, clock_seconds: float = CLOCK_SECONDS) -> Iterator[None]:
    """Fails if the block takes longer, in processor seconds of this process or by the clock."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        limit = f"{seconds} s of this process" if number == signal.SIGPROF else f"{clock_seconds} s"
        raise AssertionError(f"hangs: {limit}")

    timers = (
        (signal.SIGPROF, signal.ITIMER_PROF, seconds), (signal.SIGALRM, signal.ITIMER_REAL, clock_seconds),
    )  # fmt: skip
    before = [signal.signal(number, stop) for number, _, _ in timers]
    for _, timer, limit in timers:
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


class Outcome(NamedTuple):
    """Exit code and output of a program run in this process."""

    code: int
    out: str
    err: str


def run_in_process(*arguments: str) -> Outcome:
    """Runs a command line in this process. Exceptions other than SystemExit are defects, and are raised."""
    out, err = io.StringIO(), io.StringIO()
    environment = dict(os.environ)
    code: object = None
    with limit_time(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            COMMAND.main(list(arguments), prog_name="cudal2gen")
        except SystemExit as end:
            code = end.code
        finally:
            os.environ.clear()
            os.environ.update(environment)
    assert isinstance(code, int), code
    return Outcome(code, out.getvalue(), err.getvalue())


def check_outcome(outcome: Outcome) -> None:
    """Checks that the exit code is a documented one, and that an error has at least one line, and only short ones."""
    code, _, err = outcome
    assert code in EXIT_CODES, outcome
    lines = err.split("\n")
    assert lines.pop() == "", "whole lines"
    assert all(len(line) < 500 for line in lines), lines
    if code == 2 or (code == 3 and not outcome.out):
        assert any(line.startswith(("error: ", "Usage: ")) for line in lines), outcome


def refusal(action: Callable[[], object]) -> str:
    """The text of the user error that an action raises, "" if it raises none. It must be one short line."""
    with limit_time():
        try:
            action()
        except UserError as error:
            printed = io.StringIO()
            with contextlib.redirect_stderr(printed):
                report(error)
            assert len(printed.getvalue()) <= 500
            assert printed.getvalue().count("\n") == 1
            return str(error)
    return ""
