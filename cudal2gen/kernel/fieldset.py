"""Lists the fields that a kernel family decides, and the values that their types allow."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, get_args

from cudal2gen.kernel.problem import Problem
from cudal2gen.kernel.record import Fields, Origin, Record
from kernelproof.ground.schema import Schema

# Most values listed for a tuple. For an integer range half as many, which leaves room for the other choices of a type,
# such as null.
MAX_VALUES = 128
# Fields of a record that a family does not decide.
FIXED = frozenset({"problem", "family", "origin", *Problem.model_fields})


@dataclass(frozen=True)
class Fieldset:
    """The fields that a family decides, flat: a part of a nested field is named ``field.part``.

    ``values``: the JSON values that each field's type allows, or none if there are too many to list. ``parts``: the
    schemas of nested fields. ``lists``: the fields whose values are lists, such as ``cluster``.
    """

    family: type[Record]
    values: Mapping[str, tuple[Any, ...]]
    parts: Mapping[str, type[Schema]]
    lists: frozenset[str]

    def flat(self, fields: Fields) -> Fields:
        """The decisions in ``fields`` by flat name. An optional field that is absent has its neutral value."""
        flat: Fields = {}
        for name in self.values:
            field, _, part = name.partition(".")
            holder, schema = (fields.get(field), self.parts[field]) if part else (fields, self.family)
            if isinstance(holder, dict) and (part or field) in holder:
                flat[name] = holder[part or field]
            elif (part or field) in schema.NEUTRAL:
                flat[name] = json.loads(json.dumps(schema.NEUTRAL[part or field]))  # lists, as JSON has them
        return flat

    def nested(self, flat: Fields) -> Fields:
        """Converts flat decisions to a JSON record's nested form."""
        fields: Fields = {}
        for name, value in flat.items():
            field, _, part = name.partition(".")
            if part:
                fields.setdefault(field, {})[part] = value
            else:
                fields[field] = value
        return fields

    def record(self, problem: Problem, origin: Origin, flat: Fields) -> Record:
        """Builds a record without validation; ``flat`` must satisfy the field types, but may break the family's
        rules."""
        fields: Fields = {
            name: self.parts[name].model_construct(**{part: _frozen(v) for part, v in value.items()})
            if name in self.parts
            else _frozen(value)
            for name, value in self.nested(flat).items()
        }
        (family,) = get_args(self.family.model_fields["family"].annotation)
        return self.family.model_construct(problem=problem, family=family, origin=origin, **fields)


@cache
def fieldset(family: type[Record]) -> Fieldset:
    """The fields of a family, read off its types."""
    schema = family.model_json_schema()
    values: dict[str, tuple[Any, ...]] = {}
    parts: dict[str, type[Schema]] = {}
    for name, field in family.model_fields.items():
        if name in FIXED:
            continue
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Schema):
            parts[name] = kind
            for part, node in kind.model_json_schema()["properties"].items():
                values[f"{name}.{part}"] = tuple(_values(node))
        else:
            values[name] = tuple(_values(schema["properties"][name]))
    lists = frozenset(name for name in values if _is_list(schema["properties"].get(name, {})))
    return Fieldset(family, values, parts, lists)


def _is_list(node: Mapping[str, Any]) -> bool:
    """Whether a type, given as JSON schema, allows lists."""
    return node.get("type") == "array" or any(map(_is_list, node.get("anyOf", ())))


def _values(node: Mapping[str, Any]) -> list[Any]:
    """The values of a type, from its JSON schema; none for a range or a tuple with too many."""
    if "const" in node:
        return [node["const"]]
    if "enum" in node:
        return list(node["enum"])
    if "anyOf" in node:
        return [value for choice in node["anyOf"] for value in _values(choice)]
    match node.get("type"):
        case "boolean":
            return [False, True]
        case "null":
            return [None]
        case "integer":
            return _integers(node["minimum"], node["maximum"], node.get("multipleOf", 1))
        case "array" if "prefixItems" in node:
            columns = [_values(item) for item in node["prefixItems"]]
            return list(map(list, product(*columns))) if math.prod(map(len, columns)) <= MAX_VALUES else []
        case "array" if node.get("maxItems") == 1:
            return [[], *([value] for value in _values(node["items"]))]
    return []


def _integers(least: int, most: int, step: int) -> list[int]:
    """Every multiple of ``step`` if the range is short. Otherwise multiples of ``least``, or 0 alone if that is 0.
    Empty if still too many."""
    numbers = range(-(-least // step) * step, most + 1, step)
    if len(numbers) > MAX_VALUES // 2:
        numbers = range(least, most + 1, least or most + 1)
    return list(numbers) if len(numbers) <= MAX_VALUES // 2 else []


def spell(value: Any) -> str:
    """A JSON value as ``--set`` takes it."""
    if isinstance(value, list) and len(value) > 1:
        return ",".join(map(spell, value))
    return value if isinstance(value, str) else json.dumps(value)


def _frozen(value: Any) -> Any:
    """A JSON value as records hold it: lists are tuples there."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
