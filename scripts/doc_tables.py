"""A hook of mkdocs that fills pages with tables from the code, so that no table is written by hand.

A page asks for a table by a comment:

- ``<!-- record fields -->``: the fields of each record class;
- ``<!-- commands -->``: all commands of ``cudal2gen`` with their options and defaults;
- ``<!-- rules -->`` and ``<!-- instructions -->``: what the emulator reports, and what it executes;
- ``<!-- profile fields -->`` and ``<!-- launch fields -->``: what ``profile --json`` prints, and ``--launch`` reads.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from html import escape
from inspect import cleandoc
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from pydantic import BaseModel

from cudal2gen import cli
from cudal2gen.kernel import FAMILIES, Problem
from kernelproof.emulator import RULES
from kernelproof.emulator.frontend import instruction
from kernelproof.emulator.frontend.emitter import TEXTURES
from kernelproof.emulator.frontend.flow.inline import REFUSED_CALLS
from kernelproof.ground.command_line.groups import SharedField, VerbCommand
from kernelproof.ground.pages import grid
from kernelproof.profile import LaunchFacts, figures

# The name of an option's value in the table, by type, if the option has neither choices nor a name for it.
KINDS = {int: "integer", float: "number", Path: "path"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its tables. mkdocs calls this for every page.

    The first line of a code block may have words for the tests, such as ``console gpu``. Markdown takes a line with
    more than a language for text, so they are removed.
    """
    markdown = re.sub(r"^( *```\w+) [\w -]+$", r"\1", markdown, flags=re.MULTILINE)
    for marker, content in (
        ("<!-- record fields -->", tables),
        ("<!-- commands -->", commands),
        ("<!-- rules -->", rules),
        ("<!-- instructions -->", instructions),
        ("<!-- profile fields -->", profile),
        ("<!-- launch fields -->", launch),
    ):
        if marker in markdown:
            markdown = markdown.replace(marker, content())
    return markdown


def rules() -> str:
    """Markdown: every rule whose violation is a finding."""
    rows = [(f"[`{name}`]({name}.md)", rule.severity.value, rule.meaning) for name, rule in RULES.items()]
    return grid(("rule", "severity", "what is wrong"), rows, left=3)


def instructions() -> str:
    """Markdown: every instruction form that the emulator executes, and the instructions that it refuses by name."""
    rows = []
    for form in sorted(instruction.registered(), key=lambda form: form.opcode):
        if not form.opcode.startswith("emu_"):
            types = ", ".join(sorted(form.types)) if form.types else "as PTX has them"
            state = ["sm_90" if form.hopper else "", "lands with its wait" if form.asynchronous else ""]
            text = plain(cleandoc(form.emit.__doc__ or "").split("\n\n")[0].replace("\n", " "))
            rows.append((f"`{form.opcode}`", types, ", ".join(filter(None, state)), text))
    names = ", ".join(f"`{base}`" for base in sorted(TEXTURES))
    refused = f"Refused by name: {names}; calls of {', '.join(f'`{name}*`' for name in REFUSED_CALLS)}; recursion."
    return f"{grid(('opcode', 'types', '', 'what'), rows, left=4)}\n\n{refused}"


def tables() -> str:
    """Markdown: a table of the problem's fields, then one of the decisions of every family."""
    blocks = ["## Problem", table(Problem, set())]
    for name, family in FAMILIES.items():
        blocks += [f"## {name}", cleandoc(family.__doc__ or ""), table(family, {"problem", "family", "origin"})]
    return "\n\n".join(blocks)


def profile() -> str:
    """Markdown: the fields of a profile and of its parts."""
    parts = (
        figures.Profile,
        figures.MainLoop,
        figures.Occupancy,
        figures.Time,
        figures.Advice,
        figures.Line,
        figures.Issue,
        figures.WarpRole,
        figures.Ring,
    )
    return "\n\n".join(f"### {part.__name__}\n\n{cleandoc(part.__doc__ or '')}\n\n{meanings(part)}" for part in parts)


def launch() -> str:
    """Markdown: the fields of a launch."""
    return table(LaunchFacts, set())


def meanings(model: type[BaseModel]) -> str:
    """Markdown: name and description of each field of a model."""
    rows = [(f"`{name}`", plain(field.description or "")) for name, field in model.model_fields.items()]
    return grid(("field", "meaning"), rows, left=2)


def table(model: type[BaseModel], hidden: set[str]) -> str:
    """Markdown: name, legal values and description of each field of a model, without the ``hidden`` ones."""
    schema = model.model_json_schema()
    rows = []
    for name, field in model.model_fields.items():
        if name not in hidden:
            values = spelled(schema["properties"][name], schema.get("$defs", {}))
            rows.append((f"`{name}`", plain(values), plain(field.description or "")))
    return grid(("field", "values", "meaning"), rows, left=3)


def plain(text: str) -> str:
    """Text that Markdown prints literally inside a table."""
    return escape(text, quote=False).replace("|", "&#124;").replace("_", "&#95;").replace("*", "&#42;")


def spelled(node: dict[str, Any], definitions: dict[str, Any]) -> str:
    """The values that a JSON schema allows, in words. The rules of a record may forbid some of these."""
    if "$ref" in node:
        return spelled(definitions[node["$ref"].rsplit("/", 1)[-1]], definitions)
    if "enum" in node or "const" in node:
        return ", ".join(str(value) for value in node.get("enum", [node.get("const")]))
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(spelled(part, definitions) for part in node["anyOf"]))
    if "properties" in node:
        parts = [f"{name}: {spelled(part, definitions)}" for name, part in node["properties"].items()]
        return "{" + "; ".join(parts) + "}"
    if "prefixItems" in node:
        return "[" + "; ".join(spelled(part, definitions) for part in node["prefixItems"]) + "]"
    if "items" in node:
        return "[] or [" + spelled(node["items"], definitions) + "]"
    if "minimum" in node or "maximum" in node:
        return f"{node.get('minimum', '')} to {node.get('maximum', '')}"
    return {"boolean": "true, false", "string": "text", "null": "null"}.get(node.get("type", ""), "any")


def commands() -> str:
    """Markdown: the program's own options, each verb with a table of its options, and defaults that differ."""
    program: Any = typer.main.get_command(cli.app)
    callback = cli.app.registered_callback
    blocks = ["## Before the verb"]
    if callback and callback.callback:
        blocks.append(_options(program, callback.callback))
    for registered in cli.app.registered_commands:
        command = program.commands[registered.name]
        arguments = "".join(f" {parameter.metavar}" for parameter in command.params if not _is_option(parameter))
        blocks += [f"## {registered.name}", f"    cudal2gen {registered.name}{arguments} [options]"]
        blocks += [plain(command.help or "")]
        if registered.callback:
            blocks.append(_options(command, registered.callback))
    return "\n\n".join([*blocks, "## Defaults that differ", _differing_defaults(program.commands)])


def _is_option(parameter: Any) -> bool:
    """Whether a parameter of a command is an option, and not an argument."""
    return str(parameter.opts[0]).startswith("-")


def _options(command: Any, function: Callable[..., Any]) -> str:
    """Markdown: option, values, default and meaning, a row for each parameter of a command."""
    hints = {name: parameter.annotation for name, parameter in inspect.signature(function).parameters.items()}
    if any(isinstance(hint, str) for hint in hints.values()):
        hints = get_type_hints(function, include_extras=True)
    rows = []
    for parameter in command.params:
        if parameter.name in hints:
            spellings = (*parameter.opts, *parameter.secondary_opts) if _is_option(parameter) else (parameter.metavar,)
            names = ", ".join(f"`{name}`" for name in spellings)
            values = plain(_values(parameter, hints[parameter.name]))
            shared = [field for field in _shared_fields(command) if field.shared.option in spellings]
            help_text = "Fields, as below, with their values." if shared else parameter.help or ""
            rows.append((names, values, plain(_default(parameter)), plain(help_text)))
            for field in shared:
                default = plain(str(_shared_default(field) or ""))
                rows.append((f"`{field.spelling}`", ", ".join(field.values), default, plain(field.shared.help)))
    return grid(("option", "values", "default", "meaning"), rows, left=4)


def _shared_fields(command: Any) -> Sequence[SharedField]:
    """The fields of a verb that share options; the program itself has none."""
    return command.shared_fields if isinstance(command, VerbCommand) else ()


def _shared_default(field: SharedField) -> object:
    """The default of an option that several commands share; None if it may be given several times."""
    return None if field.repeatable else field.default


def _values(parameter: Any, hint: object) -> str:
    """The values that an option takes: its choices, or a name for its value; empty for a flag."""
    kinds = [kind for kind in _kinds(hint) if isinstance(kind, type)]
    if bool in kinds:
        return ""
    if choices := [str(member.value) for kind in kinds if issubclass(kind, Enum) for member in kind]:
        return ", ".join(choices)
    literals = [kind for kind in _kinds(hint) if isinstance(kind, str)]
    return str(
        parameter.metavar or ", ".join(literals) or next((KINDS[kind] for kind in kinds if kind in KINDS), "text")
    )


def _kinds(hint: object) -> Iterator[object]:
    """The types and literals within an annotation."""
    parts = get_args(hint)
    if hasattr(hint, "__metadata__"):
        parts = parts[:1]
    if not parts:
        yield hint
    for part in parts:
        yield from _kinds(part)


def _default(parameter: Any) -> str:
    """A default as a user types it; empty if the option has none."""
    if parameter.required:
        return "required"
    default = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
    if default is None or default is False or default in ((), []):
        return ""
    return ",".join(map(str, default)) if isinstance(default, tuple | list) else str(default)


def _differing_defaults(verbs: Mapping[str, Any]) -> str:
    """Markdown: options whose default depends on the verb."""
    defaults: dict[str, dict[str, list[str]]] = {}
    for name, command in verbs.items():
        for parameter in filter(_is_option, command.params):
            default = _default(parameter) or "none"
            defaults.setdefault(parameter.opts[0], {}).setdefault(default, []).append(name)
        for field in _shared_fields(command):
            default = str(_shared_default(field) or "none")
            defaults.setdefault(field.spelling, {}).setdefault(default, []).append(name)
    rows = []
    for option, verbs_by_default in sorted(defaults.items()):
        if len(verbs_by_default) > 1:
            rows += [(f"`{option}`", plain(default), ", ".join(names)) for default, names in verbs_by_default.items()]
    return grid(("option", "default", "in"), rows, left=3)
