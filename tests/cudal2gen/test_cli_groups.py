"""Groups of options: a dataclass becomes options of a verb, and their values the dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from kernelproof.ground.command_line.groups import Offer, OneOf, verb
from kernelproof.ground.command_line.program import Program


@dataclass(frozen=True)
class Paint:
    """A group with an option of each kind."""

    color: Annotated[str, OneOf(("red", "blue"), "any"), typer.Option("--color", help="Color.")] = "red"
    finish: Annotated[str | None, OneOf(("matt",)), typer.Option("--finish")] = None
    layers: Annotated[tuple[int, ...], typer.Option("--layer", help="Thickness; repeatable.")] = ()
    name: Annotated[str, typer.Option("--name", help="Name.")] = "paint"


app = typer.Typer(cls=Program, rich_markup_mode=None)
calls: list[tuple[object, ...]] = []


@verb(app, "plain")
def paint_all(paint: Paint, *, dry: Annotated[bool, typer.Option("--dry")] = False) -> None:
    calls.append((paint, dry))


@verb(app, "some")
def paint_some(
    paint: Annotated[
        Paint,
        Offer(
            only=("color", "layers"), single=("layers",), wildcards=("color",), defaults={"color": "any"},
            helps={"color": "Any color."},
        ),
    ],
) -> None:  # fmt: skip
    calls.append((paint,))


def run(*arguments: str) -> tuple[int, str]:
    calls.clear()
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_values_arrive_in_the_group() -> None:
    assert run("plain") == (0, "")
    assert calls == [(Paint(), False)]
    assert type(calls[0][0].color) is str
    run("plain", "--color", "blue", "--finish", "matt", "--layer", "1", "--layer", "2", "--dry")
    assert calls == [(Paint("blue", "matt", (1, 2)), True)]


def test_an_offer_chooses_fields_defaults_and_helps() -> None:
    run("some", "--layer", "3")
    assert calls == [(Paint("any", layers=(3,)),)]
    _, text = run("some", "--help")
    assert "Any color." in text
    assert "--name" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plain", "--color", "any"], "error: invalid value for '--color': 'any' is not one of 'red', 'blue'"),
        (["some", "--color", "green"], "'green' is not one of 'red', 'blue', 'any'"),
        (["some"], "error: missing option '--layer'"),
        (["some", "--layer", "1", "--name", "x"], "error: no such option"),
        (["plain", "--layer", "thin"], "error: invalid value for '--layer'"),
        (["pain"], "error: no such command 'pain'. Did you mean 'plain'?"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    code, text = run(*arguments)
    assert (code, text.count("\n"), calls) == (2, 1, [])
    assert message in text
    assert "--help'" in text
