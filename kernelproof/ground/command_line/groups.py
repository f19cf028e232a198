"""Groups of options: a verb takes a frozen dataclass, and Typer sees one option per field of it.

    @dataclass(frozen=True)
    class Building:
        jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="...")] = None

    @verb(app, "build")
    def build(selection: Annotated[Selection, Offer(wildcards=("gpu",))], building: Building) -> None: ...

``verb`` replaces each dataclass parameter by its fields in the signature that Typer reads, and makes the dataclass of
the values that Typer returns. A field ``tuple[T, ...]`` is an option that may be repeated. ``Offer`` says which fields
of a group a verb has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache, wraps
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import ArgumentInfo, OptionInfo

Parameter = inspect.Parameter
Verb = Callable[..., None]


@dataclass(frozen=True)
class OneOf:
    """Beside an option: the values that it takes. Typer gets an enum of them, which it checks and completes.

    ``wildcard``: a further value that stands for all of them, in verbs that offer it.
    """

    names: tuple[str, ...]
    wildcard: str | None = None

    @cache  # noqa: B019 - the few choices of the program live as long as it does
    def enum(self, *, with_wildcard: bool) -> type[Enum]:
        """The values as an enum, whose members' names do not matter."""
        names = self.names if self.wildcard is None or not with_wildcard else (*self.names, self.wildcard)
        return cast("type[Enum]", Enum("Choice", [(name, name) for name in names]))


@dataclass(frozen=True)
class Offer:
    """Beside a parameter that is a group: what a verb offers of it.

    ``only``: these fields, all if empty. ``single``: repeatable fields that are required here, and take one value.
    ``wildcards``: fields whose wildcard is offered. ``defaults`` and ``helps`` replace those of the fields.
    """

    only: tuple[str, ...] = ()
    single: tuple[str, ...] = ()
    wildcards: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    helps: Mapping[str, str] = field(default_factory=dict)


def verb(app: typer.Typer, name: str, kind: type[TyperCommand] = TyperCommand) -> Callable[[Verb], Verb]:
    """Registers a function as a command of the program."""

    def register(function: Verb) -> Verb:
        app.command(name, cls=kind)(expanded(function))
        return function

    return register


def expanded(function: Verb) -> Verb:
    """The function with one keyword parameter for each option, in place of groups of options."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    parameters: list[Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        kind, marks = _split(hints[name])
        if kind is typer.Context:
            parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind))
            continue
        if not (isinstance(kind, type) and is_dataclass(kind)):
            parameters.append(_option(name, hints[name], parameter.default, Offer()))
            continue
        options = _options(kind, next((mark for mark in marks if isinstance(mark, Offer)), Offer()))
        groups[name] = (kind, [option.name for option in options])
        parameters += options

    @wraps(function)
    def call(**values: Any) -> None:
        values = {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}
        for name, (kind, options) in groups.items():
            values[name] = _group(kind, {option: values.pop(option) for option in options})
        function(**values)

    vars(call).update(
        __signature__=inspect.Signature(parameters),
        __annotations__={parameter.name: parameter.annotation for parameter in parameters},
    )
    return call


def _split(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type, and what is annotated beside it."""
    return (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())


def _repeatable(kind: Any) -> bool:
    return get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis


@cache
def _field_hints(group: Any) -> dict[str, Any]:
    """Annotations of a group's fields, which are evaluated once for all verbs."""
    return get_type_hints(group, include_extras=True)


def _options(group: Any, offer: Offer) -> list[Parameter]:
    """Parameters for the fields of a group that a verb offers."""
    hints = _field_hints(group)
    return [
        _option(member.name, hints[member.name], offer.defaults.get(member.name, member.default), offer)
        for member in fields(group)
        if not offer.only or member.name in offer.only
    ]


def _option(name: str, hint: Any, default: object, offer: Offer) -> Parameter:
    """A keyword parameter as Typer reads it: the type it converts to, and one ``typer.Option``."""
    kind, marks = _split(hint)
    (option,) = (mark for mark in marks if isinstance(mark, OptionInfo | ArgumentInfo))
    choice = next((mark for mark in marks if isinstance(mark, OneOf)), None)
    option = copy(option)
    option.case_sensitive = False  # of choices: --gpu A100
    option.help = offer.helps.get(name, option.help)
    if default is MISSING:
        default = Parameter.empty
    value: Any = get_args(kind)[0] if _repeatable(kind) else kind
    if choice is not None:
        value = choice.enum(with_wildcard=name in offer.wildcards)
        default = value(default) if isinstance(default, str) else default
    if name in offer.single:
        default = Parameter.empty
    elif _repeatable(kind):
        value, default = list[value], None
    if default is None:
        value = value | None
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[value, option])


def _group(kind: Any, values: dict[str, Any]) -> object:
    """The dataclass of the values that Typer returns."""
    kinds = {name: _split(hint)[0] for name, hint in _field_hints(kind).items()}
    return kind(**{name: _repeated(value) if _repeatable(kinds[name]) else value for name, value in values.items()})


def _repeated(value: Any) -> tuple[Any, ...]:
    values = tuple(value or ()) if isinstance(value, list | None) else (value,)
    return tuple(each.value if isinstance(each, Enum) else each for each in values)
