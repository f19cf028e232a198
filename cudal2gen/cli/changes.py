"""Applies the options ``--set FIELD=VALUE`` and ``--fit`` to a record.

``--set`` changes fields of the record. If the result breaks a rule, the error names the settings that would make it
legal; ``--fit`` makes these changes itself and prints each as a note.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from cudal2gen.kernel import FAMILIES, Edit, IllegalRecord, IllegalValue, Record, in_family, unknown_field
from kernelproof.ground.command_line.messages import note, refuse

MOST_SETTINGS = 5  # an error proposes at most this many further settings; beyond that it proposes --fit alone
SHAPE = re.compile(r"\d{1,9}(?:x\d{1,9})+")  # a list such as 2x2x1
RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})(?:\.\.(\d{1,9}))?")  # 2..5, or 64..256..64 with a step


def changed(record: Record, changes: Sequence[str], *, fit: bool = False, title: str = "") -> Record:
    """The record with the fields set and validated; its origin names the fields that differ.

    With ``fit`` other fields change where the rules require it, and a note that begins with ``title`` names each.
    Raises IllegalRecord; without ``fit`` its message proposes settings that would make the record legal.
    """
    if not changes:
        return record
    edit = spelled_edit(record, changes)
    try:
        return _fitted(edit, title) if fit else _parsed(edit)
    except IllegalValue as error:
        if any(_spells_several(change, edit) for change in changes):
            raise IllegalValue(f"{error}; 'cudal2gen try' takes several values") from None
        raise


def _spells_several(change: str, edit: Edit) -> bool:
    """Whether a setting gives a list or a range to a field that takes one value, as only ``try`` accepts."""
    name, _, text = change.partition("=")
    before, after = edit.record.model_dump(mode="json").get(name), edit.fields.get(name)
    spells_list = isinstance(after, list) and not isinstance(before, list) and text[:1] != "["
    return spells_list or RANGE.fullmatch(text) is not None


def spelled_edit(record: Record, changes: Sequence[str]) -> Edit:
    """The edit that ``FIELD=VALUE`` settings describe. Ends the command if one cannot be read."""
    chosen = next((change.removeprefix("family=") for change in changes if change.startswith("family=")), record.family)
    fields, named = in_family(record, chosen), set[str]()
    family = FAMILIES.get(chosen)
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            refuse(f"--set {change}: expected FIELD=VALUE")
        name, dot, part = name.partition(".")
        if family and name not in family.line_fields():
            refuse(unknown_field(family, name, record.gpu))
        if dot and not isinstance(fields.get(name), dict):
            refuse(f"--set {change}: {name} has no parts")
        fields[name] = fields[name] | {part: _value(text)} if dot else _field(name, text, fields.get(name))
        # "prefetch=multi" sets only the kind, so a fit may still choose the distance.
        by_kind = name == "prefetch" and not dot and text[:1] != "{" and ":" not in text
        named.add(f"{name}.{part}" if dot else "prefetch.kind" if by_kind else name)
    return Edit(record, fields, frozenset(named))


def _parsed(edit: Edit) -> Record:
    """The edited record. Raises IllegalRecord, whose message proposes the settings that a fit would add."""
    try:
        return edit.parsed()
    except IllegalValue:
        raise
    except IllegalRecord as error:
        refusal = error
    try:
        settings = [f"--set {difference.setting}" for difference in edit.fitted().differences]
    except IllegalRecord:
        raise refusal from None
    by_hand = f" {' '.join(settings)}, or with" if 0 < len(settings) <= MOST_SETTINGS else ""
    raise IllegalRecord(f"{refusal}; legal with{by_hand} --fit")


def _fitted(edit: Edit, title: str) -> Record:
    """The edited record after a fit; a note that begins with ``title`` names each further change.

    Raises IllegalRecord.
    """
    try:
        record, differences = edit.fitted()
    except IllegalRecord as error:
        raise (IllegalRecord(f"{title}: {error}") if title else error) from None
    for difference in differences:
        note(f"{title + ': ' if title else ''}{difference}")
    return record


def _field(name: str, text: str, old: Any) -> Any:
    """A field's value from its spelling: JSON, or ``2,2,1`` or ``2x2x1`` for a list and ``multi:3`` for a prefetch.

    ``old``: the field's value so far, which tells whether the field takes a list.
    """
    if name == "prefetch" and not text.startswith("{"):
        kind, _, distance = text.partition(":")
        return {"kind": kind, "distance": _value(distance) if distance else None}
    if text.startswith("[") and isinstance(value := _value(text), str):  # no JSON, such as [a,b] without quotes
        text = value.strip("[]")
    if isinstance(old, list) and not text.startswith("[") and text != "null":
        parts = text.split("x") if SHAPE.fullmatch(text) else text.split(",")
        return [_value(part.strip()) for part in parts if part.strip()]
    return [_value(part) for part in text.split(",")] if "," in text and text[0] not in "[{" else _value(text)


def _value(text: str) -> Any:
    """The JSON value that the text spells, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
