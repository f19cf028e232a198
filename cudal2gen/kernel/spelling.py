"""Records as text: parsing and revising them, and errors as ``field=value: rule``."""

from __future__ import annotations

import json
from typing import Any, get_args

from pydantic import ValidationError

from cudal2gen.kernel.record import Record

FAMILIES: dict[str, type[Record]] = {}


class IllegalRecord(ValueError):
    """A record that breaks a rule; the message names field, value and rule."""


def register(family: type[Record]) -> type[Record]:
    """Adds a family; ``parse`` takes records of the families that were added."""
    (name,) = get_args(family.model_fields["family"].annotation)
    FAMILIES[name] = family
    return family


def parse(fields: dict[str, Any] | str | bytes) -> Record:
    """A record from a JSON line or from its fields; raises IllegalRecord with every broken rule in one line."""
    # By way of JSON in any case: there lists may stand for tuples, and a number is never text or truth.
    line = json.dumps(fields) if isinstance(fields, dict) else fields
    try:
        return _family(line).model_validate_json(line)
    except ValidationError as error:
        raise IllegalRecord(explain(error)) from None


def _family(line: str | bytes) -> type[Record]:
    """The class of a line's family; of a line that is no JSON object the base class, which says what is wrong."""
    try:
        values = json.loads(line, object_pairs_hook=_unrepeated)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return Record
    if not isinstance(values, dict):
        return Record
    if "family" not in values:
        raise IllegalRecord("family: field required")
    name = values["family"]
    if not isinstance(name, str) or name not in FAMILIES:
        raise IllegalRecord(f"family={json.dumps(name)}: must be one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise IllegalRecord(f"{', '.join(repeated)}: appears more than once")
    return dict(pairs)


def explain(error: ValidationError) -> str:
    """pydantic's findings as ``field=value: rule``, without its model names."""
    lines = []
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        message = message[0].lower() + message[1:] if item["type"] != "value_error" else message
        value = json.dumps(item["input"], default=str)
        shown = f"={value}" if where and item["type"] not in ("missing", "extra_forbidden") else ""
        lines.append(f"{where}{shown}: {message}" if where else message)
    return "; ".join(lines)


def revise(record: Record, **changes: Any) -> Record:
    """The record with fields changed, validated anew (pydantic's model_copy would skip the rules)."""
    return parse(record.model_dump(mode="json") | changes)
