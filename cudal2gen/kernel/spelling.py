"""Parses records from text and revises them. A record's line is flat: the problem's fields, then the record's."""

from __future__ import annotations

import json
from typing import Any, get_args

from pydantic import ValidationError

from cudal2gen.kernel.problem import Problem
from cudal2gen.kernel.record import Record
from cudal2gen.kernel.schema import IllegalRecord, refusal
from kernelproof.ground.errors import WrongInput, brief, parse_json, printable
from kernelproof.ground.schema import spelled

PROBLEM_FIELDS = tuple(Problem.model_fields)
FAMILIES: dict[str, type[Record]] = {}  # by name, in the order of registration


def register(family: type[Record]) -> type[Record]:
    """Adds a family, whose records ``parse`` then accepts."""
    (name,) = get_args(family.model_fields["family"].annotation)
    FAMILIES[name] = family
    return family


def parse(fields: dict[str, Any] | str | bytes) -> Record:
    """A record from a JSON line or from its fields. Raises IllegalRecord with every broken rule in one line.

    The exception is IllegalValue if a field is unknown or never takes such a value, whatever the other fields are.
    """
    try:
        values = fields if isinstance(fields, dict) else parse_json(fields, _distinct_names)
    except IllegalRecord:
        raise
    except WrongInput as error:
        raise IllegalRecord(str(error)) from None
    if not isinstance(values, dict):
        raise IllegalRecord("a record must be a JSON object")
    family = _family(values)
    if "problem" in values:
        raise IllegalRecord("problem: extra inputs are not permitted; its fields stand in the line themselves")
    decisions = dict(values)
    problem = {name: decisions.pop(name) for name in PROBLEM_FIELDS if name in decisions}
    try:
        # Validated as JSON: there a list may stand for a tuple, and a number is never taken for text or a truth value.
        text = json.dumps({"problem": problem, **decisions})
    except (ValueError, RecursionError, TypeError) as error:
        raise IllegalRecord(f"not JSON: {brief(str(error))}") from None
    try:
        return family.model_validate_json(text)
    except ValidationError as error:
        raise refusal(error) from None


def _family(values: dict[str, Any]) -> type[Record]:
    """The family that a line names. Raises IllegalRecord if it names none or an unknown one."""
    if "family" not in values:
        raise IllegalRecord("family: field required")
    name = values["family"]
    if not isinstance(name, str) or name not in FAMILIES:
        raise IllegalRecord(f"family={spelled(name)}: must be one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _distinct_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from its names and values. Raises IllegalRecord if a name repeats, which Python's json accepts."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = sorted(name for name in values if names.count(name) > 1)
        raise IllegalRecord(f"{brief(printable(', '.join(repeated)))}: appears more than once")
    return values


def revise(record: Record, **changes: Any) -> Record:
    """The record with fields changed to JSON values. It is validated again, which ``model_copy`` would not do."""
    if changes.keys() <= Problem.model_fields.keys():
        return record.at(record.problem.revised(**changes))
    return parse(record.model_dump(mode="json") | changes)
