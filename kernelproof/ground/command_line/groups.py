"""Lets several verbs share groups of options, each written once as a frozen dataclass.

A verb takes the dataclass as a parameter, and Typer sees one option for each of its fields:

    @dataclass(frozen=True)
    class Building:
        jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="...")] = None

    @verb(app, "build")
    def build(selection: Annotated[Selection, Offer(wildcards=("gpu",))], building: Building) -> None: ...

``verb`` replaces each dataclass parameter by its fields in the signature that Typer reads, and builds the dataclass
from the values that Typer returns. A field of type ``tuple[T, ...]`` is an option that may be repeated. ``Offer`` says
which fields of a group a verb has.

Rarely used fields share one option, so that the help of a verb stays short: a field marked by ``Shared`` is given as
``--where NAME=VALUE``. Some of these fields also have the short form ``--NAME VALUE``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cache, wraps
from typing import Annotated, Any, NamedTuple, cast, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import ArgumentInfo, OptionInfo

Parameter = inspect.Parameter
Verb = Callable[..., None]


@dataclass(frozen=True)
class OneOf:
    """Annotates an option with the values that it accepts, which Typer checks and a shell completes.

    ``wildcard``: a further value that means all of them, in verbs that offer it.
    """

    names: tuple[str, ...]
    wildcard: str | None = None

    def offered(self, *, with_wildcard: bool) -> tuple[str, ...]:
        """The values that a verb accepts, with or without the wildcard."""
        return self.names if self.wildcard is None or not with_wildcard else (*self.names, self.wildcard)

    @cache  # noqa: B019 - the few choices of the program live as long as it does
    def enum(self, *, with_wildcard: bool) -> type[Enum]:
        """The values as an enum for Typer. The names of its members do not matter."""
        names = self.offered(with_wildcard=with_wildcard)
        return cast("type[Enum]", Enum("Choice", [(name, name) for name in names]))


@dataclass(frozen=True)
class Shared:
    """Annotates a field that has no option of its own but is given as ``option NAME=VALUE``.

    ``parse`` converts the text to the value and raises ValueError; it is not needed if the field also has a ``OneOf``.
    ``short``: whether ``--NAME VALUE`` is offered as a short form.
    """

    name: str
    help: str
    parse: Callable[[str], object] = str
    short: bool = False
    option: str = "--where"


class SharedField(NamedTuple):
    """A field that a verb offers in an option shared by several fields."""

    group: str  # the name of the verb's parameter to which the field belongs
    field: str
    shared: Shared
    values: tuple[str, ...]  # the accepted values; empty if ``parse`` decides
    default: object
    repeatable: bool  # whether the field is a tuple of all given values
    indexed: bool  # whether a value may have an index after a colon, such as h200:1

    @property
    def spelling(self) -> str:
        """How a user writes the field, without its value: "--acc" or "--where ab"."""
        return f"--{self.shared.name}" if self.shared.short else f"{self.shared.option} {self.shared.name}"

    def value(self, text: str) -> object:
        """The field's value for a text. Raises BadParameter."""
        try:
            if not self.values:
                return self.shared.parse(text)
            name, colon, index = text.partition(":") if self.indexed else (text, "", "")
            for value in self.values:
                if value.casefold() == name.casefold() and (index.isdecimal() or not colon):
                    return f"{value}{colon}{index}"
            raise ValueError(f"{text!r} is not one of {', '.join(map(repr, self.values))}")
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=f"'{self.spelling}'") from None


@dataclass(frozen=True)
class Offer:
    """Annotates a verb's parameter with the part of the group that the verb offers.

    ``only``: the offered fields; all if empty. ``single``: repeatable fields that are required here and take one value.
    ``wildcards``: fields whose wildcard is offered. ``indexed``: fields whose value may have an index after a colon.
    ``shared``: fields that are ``Shared`` here, with a short form, in place of the option that they have elsewhere.
    ``defaults`` and ``helps`` replace those of the fields.
    """

    only: tuple[str, ...] = ()
    single: tuple[str, ...] = ()
    wildcards: tuple[str, ...] = ()
    indexed: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    helps: Mapping[str, str] = field(default_factory=dict)


class VerbCommand(TyperCommand):
    """A command that takes ``--NAME VALUE`` for ``--where NAME=VALUE`` if the field has a short form."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Replaces short forms by the shared option. Words after ``--`` are not options and stay as they are."""
        short = self._short_forms()
        end = args.index("--") if "--" in args else len(args)
        words: list[str] = []
        waiting = iter(args[:end])
        for word in waiting:
            name, equals, value = word.partition("=")
            if name not in short:
                words.append(word)
            elif equals or (value := next(waiting, "")):
                words += [short[name], f"{name[2:]}={value}"]
            elif ctx.resilient_parsing:  # a shell completes the value of this last word
                ctx.meta[COMPLETED] = name
            else:
                ctx.fail(f"Option '{name}' requires an argument.")
        return super().parse_args(ctx, words + args[end:])

    def shell_complete(self, ctx: typer.Context, incomplete: str) -> list[Any]:  # type: ignore[override]
        """The completions of a word: after a short form the values of its field, otherwise options and short forms."""
        if name := ctx.meta.get(COMPLETED):
            prefix = f"{name[2:]}="
            items: list[Any] = self._option(self._short_forms()[name]).shell_complete(ctx, prefix + incomplete)
            for item in items:
                item.value = item.value.removeprefix(prefix)
            return items
        items = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("-"):
            items += [type(items[0])(name) for name in self._short_forms() if items and name.startswith(incomplete)]
        return items

    def _short_forms(self) -> dict[str, str]:
        """For each short form, the shared option that it stands for."""
        return {field.spelling: field.shared.option for field in self.shared_fields if field.shared.short}

    @property
    def shared_fields(self) -> tuple[SharedField, ...]:
        """The fields that share options."""
        fields: tuple[SharedField, ...] = getattr(self.callback, SHARED_FIELDS, ())
        return fields

    def _option(self, flag: str) -> Any:
        """The parameter of the command that has a flag, such as ``--where``."""
        return next(option for option in self.params if flag in option.opts)


COMPLETED = "kernelproof.completed_field"  # in a context's meta: the short form whose value a shell completes
SHARED_FIELDS = "shared_fields"  # the attribute of a verb's function that holds its fields that share options


def verb(app: typer.Typer, name: str, kind: type[TyperCommand] = VerbCommand) -> Callable[[Verb], Verb]:
    """Registers a function as a command of the program."""

    def register(function: Verb) -> Verb:
        app.command(name, cls=kind)(expanded(function))
        return function

    return register


def expanded(function: Verb) -> Verb:
    """Wraps a verb so that it has one keyword parameter for each option instead of groups of options."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    parameters: list[Parameter] = []
    settings: list[SharedField] = []
    for name, parameter in inspect.signature(function).parameters.items():
        kind, marks = _split(hints[name])
        if kind is typer.Context:
            parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind))
            continue
        if not (isinstance(kind, type) and is_dataclass(kind)):
            parameters.append(_option(name, hints[name], parameter.default, Offer()))
            continue
        offer = next((mark for mark in marks if isinstance(mark, Offer)), Offer())
        options = _options(kind, offer)
        groups[name] = (kind, [option.name for option in options])
        parameters += options
        settings += _settings(name, kind, offer)
    shared = {
        option: [setting for setting in settings if setting.shared.option == option]
        for option in dict.fromkeys(setting.shared.option for setting in settings)
    }
    for option, offered in shared.items():
        parameters.insert(_position(offered[0], groups, parameters), _shared_option(option, offered))

    @wraps(function)
    def call(**values: Any) -> None:
        values = {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}
        given: dict[str, dict[str, object]] = {}
        for option, offered in shared.items():
            for setting, value in _given_values(values.pop(_parameter(option)) or (), offered):
                fields_given = given.setdefault(setting.group, {})
                before = cast("tuple[object, ...]", fields_given.get(setting.field, ()))
                fields_given[setting.field] = (*before, value) if setting.repeatable else value
        for name, (kind, options) in groups.items():
            values[name] = _group(kind, {option: values.pop(option) for option in options} | given.get(name, {}))
        function(**values)

    vars(call).update(
        {SHARED_FIELDS: tuple(settings)},
        __signature__=inspect.Signature(parameters),
        __annotations__={parameter.name: parameter.annotation for parameter in parameters},
    )
    return call


def _position(
    setting: SharedField, groups: Mapping[str, tuple[type[Any], list[str]]], parameters: Sequence[Parameter]
) -> int:
    """Where --help lists a setting's option: after the options of the fields that precede it in its group."""
    kind, options = groups[setting.group]
    members = [member.name for member in fields(kind)]
    before = {name for name in members[: members.index(setting.field)] if name in options}
    return max((at + 1 for at, option in enumerate(parameters) if option.name in before), default=len(parameters))


def _parameter(option: str) -> str:
    """The name of the keyword parameter that receives an option."""
    return option.lstrip("-")


def _shared_option(name: str, settings: Sequence[SharedField]) -> Parameter:
    """The one option that these fields share."""
    described = " ".join(
        f"{setting.shared.name}: {setting.shared.help.rstrip('.')}"
        f"{' (' + ', '.join(setting.values) + ')' if setting.values else ''}."
        for setting in settings
    )
    short = [f"--{setting.shared.name}" for setting in settings if setting.shared.short]
    spelled = f" {', '.join(short)} also stand alone." if short else ""

    def check(value: list[str] | None) -> list[str] | None:
        """Parses the texts while Typer reads the command line, so that it names the option and the verb in an error."""
        list(_given_values(value or (), settings))
        return value

    spellings = [f"{setting.shared.name}={value}" for setting in settings for value in setting.values or ("",)]
    option = typer.Option(
        name,
        metavar="FIELD=VALUE",
        callback=check,
        autocompletion=_completion(spellings),
        help=f"Repeatable.{spelled} Fields: {described}",
    )
    return Parameter(
        _parameter(name), Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[list[str] | None, option]
    )


def _given_values(texts: Sequence[str], settings: Sequence[SharedField]) -> Iterator[tuple[SharedField, object]]:
    """Yields fields that share an option, with their values: first the defaults, then the given values in their order.

    A later value replaces an earlier one, so the given values override the defaults.
    """
    for setting in settings:
        if setting.default is not MISSING and not setting.repeatable:
            yield setting, setting.default
    known = {setting.shared.name: setting for setting in settings}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in known:
            raise typer.BadParameter(f"{text!r}: expected FIELD=VALUE, of the fields {', '.join(known)}")
        yield known[name], known[name].value(value)


def _settings(name: str, group: Any, offer: Offer) -> list[SharedField]:
    """The fields of a group that a verb offers in options that fields share. ``name``: the verb's parameter."""
    hints = _field_hints(group)
    settings: list[SharedField] = []
    for member in fields(group):
        if offer.only and member.name not in offer.only:
            continue
        kind, marks = _split(hints[member.name])
        shared = next((mark for mark in marks if isinstance(mark, Shared)), None)
        if member.name in offer.shared:
            (option,) = (mark for mark in marks if isinstance(mark, OptionInfo))
            # In an annotation, Typer stores the first flag as the option's default until it reads the function.
            shared = Shared(str(option.default).lstrip("-"), option.help or "", short=True)
        if shared is None:
            continue
        choice = next((mark for mark in marks if isinstance(mark, OneOf)), None)
        values = choice.offered(with_wildcard=member.name in offer.wildcards) if choice else ()
        shared = replace(shared, help=offer.helps.get(member.name, shared.help))
        default = offer.defaults.get(member.name, member.default)
        settings.append(
            SharedField(name, member.name, shared, values, default, _repeatable(kind), member.name in offer.indexed)
        )
    return settings


def _split(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type in an annotation, and the metadata of ``Annotated``; () without any."""
    return (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())


def _repeatable(kind: Any) -> bool:
    """Whether a field's type is ``tuple[T, ...]``, so that its option may be repeated."""
    return get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis


@cache
def _field_hints(group: Any) -> dict[str, Any]:
    """The annotations of a group's fields. They are evaluated once for all verbs."""
    return get_type_hints(group, include_extras=True)


def _options(group: Any, offer: Offer) -> list[Parameter]:
    """Parameters for the fields of a group that a verb offers."""
    hints = _field_hints(group)
    return [
        _option(member.name, hints[member.name], offer.defaults.get(member.name, member.default), offer)
        for member in fields(group)
        if (not offer.only or member.name in offer.only)
        and member.name not in offer.shared
        and any(isinstance(mark, OptionInfo | ArgumentInfo) for mark in _split(hints[member.name])[1])
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


def _completion(names: Sequence[str]) -> Callable[[str], list[str]]:
    """The function by which a shell completes one of some names."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def _group(kind: Any, values: dict[str, Any]) -> object:
    """Makes a group's dataclass from the values that Typer returns."""
    kinds = {name: _split(hint)[0] for name, hint in _field_hints(kind).items()}
    return kind(**{name: _as_tuple(value) if _repeatable(kinds[name]) else value for name, value in values.items()})


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """The values of a repeatable option: none, one or several, with enums replaced by their values."""
    values = tuple(value or ()) if isinstance(value, list | tuple | None) else (value,)
    return tuple(item.value if isinstance(item, Enum) else item for item in values)
