"""A hook of mkdocs: replaces the marker ``<!-- record fields -->`` by tables of the record classes' fields."""

from __future__ import annotations

from html import escape
from inspect import cleandoc
from typing import Any

from pydantic import BaseModel

from cudal2gen.kernel import FAMILIES, Problem

MARKER = "<!-- record fields -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its tables. mkdocs calls this for every page."""
    return markdown.replace(MARKER, tables()) if MARKER in markdown else markdown


def tables() -> str:
    """Markdown: a table of the problem's fields, then one of the decisions of every family."""
    blocks = ["## Problem", table(Problem, set())]
    for name, family in FAMILIES.items():
        blocks += [f"## {name}", cleandoc(family.__doc__ or ""), table(family, {"problem", "family", "origin"})]
    return "\n\n".join(blocks)


def table(model: type[BaseModel], hidden: set[str]) -> str:
    """Markdown: name, legal values and description of each field of a model but the ``hidden`` ones."""
    schema = model.model_json_schema()
    rows = ["| field | values | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        if name not in hidden:
            values = spelled(schema["properties"][name], schema.get("$defs", {}))
            rows.append(f"| `{name}` | {plain(values)} | {plain(field.description or '')} |")
    return "\n".join(rows)


def plain(text: str) -> str:
    """Text that Markdown prints literally inside a table."""
    return escape(text, quote=False).replace("|", "&#124;").replace("_", "&#95;").replace("*", "&#42;")


def spelled(node: dict[str, Any], definitions: dict[str, Any]) -> str:
    """The values that a JSON schema allows, in words. Rules of a record may forbid more of them."""
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
