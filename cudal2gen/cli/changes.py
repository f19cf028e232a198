"""``--set FIELD=VALUE``: a record with fields changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cudal2gen.cli.messages import refuse
from cudal2gen.kernel import FAMILIES, Record, parse


def changed(record: Record, changes: Sequence[str]) -> Record:
    """The record with fields set, validated anew; its origin names what differs. Raises IllegalRecord."""
    if not changes:
        return record
    before = record.model_dump(mode="json")
    fields = _start(record, before, changes)
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            refuse(f"--set {change}: expected FIELD=VALUE")
        name, dot, part = name.partition(".")
        if dot and not isinstance(fields.get(name), dict):
            refuse(f"--set {change}: {name} has no parts")
        fields[name] = fields[name] | {part: _value(text)} if dot else _field(name, text, fields.get(name))
    touched = {name for name, value in fields.items() if value != before.get(name, ...)}
    if touched and "origin" not in touched:
        differing = sorted({*record.origin.changed, *touched})
        fields["origin"] = {"source": record.origin.source, "structure": "modelled", "changed": differing}
    return parse(fields)


def _start(record: Record, fields: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """The fields to change. For another family: what it shares with the old one, below its own plain decisions."""
    family = next((change.removeprefix("family=") for change in changes if change.startswith("family=")), record.family)
    if family == record.family or family not in FAMILIES:
        return dict(fields)
    shared = {name: value for name, value in fields.items() if name in FAMILIES[family].line_fields()}
    return shared | FAMILIES[family].plain(record.problem)


def _field(name: str, text: str, old: Any) -> Any:
    """A field's value from its spelling: JSON, or ``2,2,1`` for a list and ``multi:3`` for a prefetch."""
    if name == "prefetch" and not text.startswith("{"):
        kind, _, distance = text.partition(":")
        return {"kind": kind, "distance": _value(distance) if distance else None}
    if text.startswith("[") and isinstance(value := _value(text), str):
        text = value.strip("[]")
    if isinstance(old, list) and not text.startswith("[") and text != "null":
        return [_value(part.strip()) for part in text.split(",") if part.strip()]
    return [_value(part) for part in text.split(",")] if "," in text and text[0] not in "[{" else _value(text)


def _value(text: str) -> Any:
    """JSON, or else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
