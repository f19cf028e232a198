"""Proves that a dataclass becomes a group of options, and that their values become the dataclass."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

import cudal2gen.cli
import kernelproof.cli
from kernelproof.ground.command_line.groups import Offer, OneOf, Shared, verb
from kernelproof.ground.command_line.program import VerbGroup

MOST_OF_A_VERB = 20  # options
MOST_IN_ALL = 170  # options of both programs and all their verbs


@dataclass(frozen=True)
class Paint:
    """A group with an option of each kind."""

    color: Annotated[str, OneOf(("red", "blue"), "any"), typer.Option("--color", help="Color.")] = "red"
    finish: Annotated[str | None, OneOf(("matt",)), typer.Option("--finish")] = None
    layers: Annotated[tuple[int, ...], typer.Option("--layer", help="Thickness; repeatable.")] = ()
    name: Annotated[str, typer.Option("--name", help="Name.")] = "paint"


# An application with verbs of its own, which only note how they are called.
app = typer.Typer(cls=VerbGroup, rich_markup_mode=None)
calls: list[tuple[object, ...]] = []  # for each call of a verb, the arguments that it received


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


def run_toy(*arguments: str) -> tuple[int, str]:
    """The exit code and the output of the toy program; ``calls`` has what its verbs received."""
    calls.clear()
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_values_arrive_in_the_group() -> None:
    assert run_toy("plain") == (0, "")
    assert calls == [(Paint(), False)]
    assert type(calls[0][0].color) is str
    run_toy("plain", "--color", "blue", "--finish", "matt", "--layer", "1", "--layer", "2", "--dry")
    assert calls == [(Paint("blue", "matt", (1, 2)), True)]


def test_an_offer_chooses_fields_defaults_and_helps() -> None:
    run_toy("some", "--layer", "3")
    assert calls == [(Paint("any", layers=(3,)),)]
    _, text = run_toy("some", "--help")
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
    code, text = run_toy(*arguments)
    assert (code, text.count("\n"), calls) == (2, 1, [])
    assert message in text
    assert "--help'" in text


@dataclass(frozen=True)
class Wall:
    """A group whose fields ``site``, ``height`` and ``stone`` share the option --where. Those with ``short`` have an
    option of their own as well."""

    site: Annotated[str, OneOf(("north", "south"), "any"), Shared("site", "where it stands", short=True)] = "north"
    height: Annotated[int, Shared("height", "in metres", int, short=True)] = 2
    stone: Annotated[str, OneOf(("lime", "sand"), "any"), Shared("stone", "what it is made of")] = "lime"
    doors: Annotated[tuple[str, ...], typer.Option("--door", help="Names of doors.")] = ()


@verb(app, "build")
def build(wall: Annotated[Wall, Offer(wildcards=("site", "stone"), indexed=("site",))]) -> None:
    calls.append((wall,))


@verb(app, "find")
def find(
    wall: Annotated[Wall, Offer(only=("site", "height", "doors"), shared=("doors",), defaults={"height": 1})],
) -> None:
    calls.append((wall,))


@pytest.mark.parametrize(
    ("words", "wall"),
    [
        ("build", Wall()),
        ("build --where height=3 --where stone=SAND", Wall("north", 3, "sand")),
        ("build --height 3 --where height=4", Wall("north", 4)),
        ("build --height=3 --where stone=any", Wall("north", 3, "any")),
        # ``site`` is an indexed choice: its value may have a number, and capitals do not matter.
        ("build --site South:2", Wall("south:2")),
        ("find", Wall("north", 1)),
        ("find --site south", Wall("south", 1)),
        ("find --where site=south --height 5", Wall("south", 5)),
        ("find --door left --where door=right", Wall("north", 1, doors=("left", "right"))),
    ],
)
def test_fields_share_an_option(words: str, wall: Wall) -> None:
    assert run_toy(*words.split()) == (0, "")
    assert calls == [(wall,)]


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("build --where stone=clay", "'--where stone'"),
        ("build --where height=high", "'--height'"),
        ("build --height", "'--height'"),
        ("build --where roof=flat", "'--where'"),
        ("build --where stone", "'--where'"),
        ("build --site east", "'--site'"),
        ("build --site north:x", "'--site'"),
        ("build --stone lime", "'--stone'"),
        ("find --where stone=lime", "'--where'"),
        ("find --site any", "'--site'"),
    ],
)
def test_a_field_that_is_refused_is_named_by_its_option(words: str, flag: str) -> None:
    code, text = run_toy(*words.split())
    assert (code, text.count("\n"), calls) == (2, 1, [])
    assert flag in text or flag.strip("'") in text


def option_counts(program: typer.Typer) -> dict[str, int]:
    """The number of options of each verb without --help, and under the program's name those of the program itself."""
    group = typer.main.get_command(program)
    assert isinstance(group, TyperGroup)
    verbs = {"": group, **group.commands}
    return {
        name: sum(option.param_type_name == "option" and option.name != "help" for option in verb.params)
        for name, verb in verbs.items()
    }


def test_the_options_of_a_verb_fit_a_page() -> None:
    counts = {
        f"{name} {verb_name}".strip(): count
        for name, program in (("cudal2gen", cudal2gen.cli.app), ("kernelproof", kernelproof.cli.app))
        for verb_name, count in option_counts(program).items()
    }
    assert {name: count for name, count in counts.items() if count > MOST_OF_A_VERB} == {}
    assert sum(counts.values()) <= MOST_IN_ALL


@pytest.mark.slow
def test_options_of_the_program_may_follow_a_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (("-j", "3", "list"), ("list", "-j", "3"), ("list", "-j3"), ("list", "--jobs=3")):
        monkeypatch.setenv("CUDAL2GEN_JOBS", "1")
        assert CliRunner().invoke(cudal2gen.cli.app, [*words, "--mnk", "64_64_64"]).exit_code == 0
        assert os.environ["CUDAL2GEN_JOBS"] == "3", words
    assert CliRunner().invoke(cudal2gen.cli.app, ["list", "-j", "0"]).exit_code == 2
    assert CliRunner().invoke(cudal2gen.cli.app, ["list", "-j"]).exit_code == 2
