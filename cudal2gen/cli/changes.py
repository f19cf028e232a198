"""``--set FIELD=VALUE``: a record with fields changed, and with ``--fit`` others after them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cudal2gen.cli.messages import note, refuse
from cudal2gen.kernel import (
    FAMILIES,
    Fields,
    Fit,
    IllegalRecord,
    IllegalValue,
    Origin,
    Record,
    fieldset,
    fit_fields,
    parse,
    unknown_field,
)

MOST_SETTINGS = 5  # that a refusal spells


def changed(record: Record, changes: Sequence[str], *, fit: bool = False, title: str = "") -> Record:
    """The record with fields set, validated anew; its origin names what differs.

    With ``fit`` other fields follow where the rules make them, and a note gives each, after ``title``. Raises
    IllegalRecord; without ``fit`` its message gives the settings that would make the record legal.
    """
    if not changes:
        return record
    before = record.model_dump(mode="json")
    fields, named = _edited(record, before, changes)
    edited = _fitted(fields, named, title) if fit else _parsed(fields, named)
    after = edited.model_dump(mode="json")
    touched = {name for name in before.keys() | after.keys() if before.get(name, ...) != after.get(name, ...)}
    if not touched or "origin" in touched:
        return edited
    differing = tuple(sorted({*record.origin.changed, *touched & after.keys()}))
    origin = Origin(source=record.origin.source, structure="modelled", changed=differing)
    return edited.at(edited.problem, origin=origin)


def _edited(record: Record, before: Fields, changes: Sequence[str]) -> tuple[Fields, set[str]]:
    """A line's fields after the changes, and the names that these fix: ``prefetch.kind`` for a part of a field."""
    fields, named = _start(record, before, changes), set[str]()
    family = FAMILIES.get(fields["family"])
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            refuse(f"--set {change}: expected FIELD=VALUE")
        name, dot, part = name.partition(".")
        if family and name not in family.line_fields():
            refuse(unknown_field(family, name))
        if dot and not isinstance(fields.get(name), dict):
            refuse(f"--set {change}: {name} has no parts")
        fields[name] = fields[name] | {part: _value(text)} if dot else _field(name, text, fields.get(name))
        # A prefetch without a distance names its kind alone.
        by_kind = name == "prefetch" and not dot and text[:1] != "{" and ":" not in text
        named.add(f"{name}.{part}" if dot else "prefetch.kind" if by_kind else name)
    return fields, named


def _parsed(fields: Fields, named: set[str]) -> Record:
    """The record, or IllegalRecord with the settings that a fit would add."""
    try:
        return parse(fields)
    except IllegalValue:
        raise
    except IllegalRecord as error:
        refusal = error
    try:
        settings = [f"--set {difference.setting}" for difference in fit_fields(fields, named).differences]
    except IllegalRecord:
        raise refusal from None
    by_hand = f" {' '.join(settings)}, or with" if 0 < len(settings) <= MOST_SETTINGS else ""
    raise IllegalRecord(f"{refusal}; legal with{by_hand} --fit")


def _fitted(fields: Fields, named: set[str], title: str) -> Record:
    try:
        fit: Fit = fit_fields(fields, named)
    except IllegalRecord as error:
        raise (IllegalRecord(f"{title}: {error}") if title else error) from None
    for difference in fit.differences:
        note(f"{title + ': ' if title else ''}{difference}")
    return fit.record


def _start(record: Record, fields: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """The fields to change. For another family: what it shares with the old one, below its own plain decisions."""
    family = next((change.removeprefix("family=") for change in changes if change.startswith("family=")), record.family)
    if family == record.family or family not in FAMILIES:
        return dict(fields) | {"family": family}
    choices = {name: values for name, values in fieldset(FAMILIES[family]).values.items() if values}
    shared = {
        name: value
        for name, value in fields.items()
        if name in FAMILIES[family].line_fields()
        and not (isinstance(value, str) and value not in choices.get(name, value))
    }
    return shared | FAMILIES[family].plain(record.problem) | {"family": family}


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
