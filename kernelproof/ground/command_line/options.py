"""Defines options that subcommands of cudal2gen and kernelproof share, and parsers for values unknown to Typer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from typer.models import OptionInfo


class Names(tuple[str, ...]):
    """Names that a user separates by commas."""


def names_when_needed(flag: str, names: Callable[[], Sequence[str]], help_text: str) -> OptionInfo:
    """An option that takes one of some names.

    ``names`` is called only when a value is parsed or completed, because its module may import NumPy.
    """

    def parse(text: str) -> str:
        return _matching_name(text, names())

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    option: OptionInfo = typer.Option(flag, metavar="NAME", parser=parse, autocompletion=complete, help=help_text)
    return option


def listed_names(flag: str, names: Callable[[], Sequence[str]], help_text: str) -> OptionInfo:
    """Like ``names_when_needed``, for an option that takes several names, separated by commas."""

    def parse(value: str | Names) -> Names:
        return Names(_matching_name(name, names()) for name in (value.split(",") if isinstance(value, str) else value))

    def complete(incomplete: str) -> list[str]:
        *before, last = incomplete.split(",")
        return [",".join([*before, name]) for name in names() if name.startswith(last) and name not in before]

    option: OptionInfo = typer.Option(flag, metavar="NAME,...", parser=parse, autocompletion=complete, help=help_text)
    return option


def _matching_name(text: str, names: Sequence[str]) -> str:
    """The name that equals a text if upper and lower case count as equal. Raises BadParameter."""
    for name in names:
        if name.casefold() == text.strip().casefold():
            return name
    raise typer.BadParameter(f"{text!r} is not one of {', '.join(map(repr, names))}")


def seconds(text: str) -> float:
    """The seconds of a duration such as 90s, 8m or 1.5h; a number without a unit means seconds. Raises BadParameter."""
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        duration = float(number) * units[unit]
    except ValueError:
        duration = -1.0
    if not 0 < duration < float("inf"):
        raise typer.BadParameter(f"{text!r} is not a duration such as 90s, 8m or 1h")
    return duration


Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
