"""Parses the values of ``try --set``, which takes several for each field.

A setting may be a list such as ``bm=64,128``, a range such as ``stages=2..5``, or both. Every combination of the
fields' values becomes one edit of the record.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import chain, product

from cudal2gen.cli.changes import RANGE, spelled_edit
from cudal2gen.kernel import FAMILIES, Edit, Fieldset, Problem, Record, fieldset
from kernelproof.ground.command_line.messages import refuse

PROBLEM_FIELDS = frozenset({*Problem.model_fields, "origin"})  # fields that a grid cannot vary

Values = Sequence[str] | range


def edits(record: Record, settings: Sequence[str], limit: int) -> dict[str, Edit]:
    """The edits for all combinations of the settings' values, by their text. A field that is set twice takes the values
    of both settings.

    Ends the command if a setting makes no sense, or if there are more combinations than ``limit``.
    """
    families = [
        family
        for setting in settings
        if setting.startswith("family=")
        for family in setting.removeprefix("family=").split(",")
    ]
    choices: dict[str, list[Values]] = {}
    for setting in settings:
        name, equals, _ = setting.partition("=")
        if not equals:
            refuse(f"--set {setting}: expected FIELD=VALUE")
        if name in PROBLEM_FIELDS:
            refuse(
                f"--set {setting}: a grid varies one problem's kernel only; choose the problem by --mnk, --gpu and its "
                "other options"
            )
        choices.setdefault(name, []).extend(_alternatives(families or [record.family], setting))
    count = math.prod(sum(map(len, values)) for values in choices.values())
    if count > limit:
        refuse(f"--set: {count} edits are more than {limit}; give fewer values, or --limit {count}")
    columns = [[f"{name}={value}" for value in chain(*values)] for name, values in choices.items()]
    return {" ".join(row): spelled_edit(record, row) for row in product(*columns)}


def _alternatives(families: Sequence[str], setting: str) -> list[Values]:
    """The values of one setting, as text. A range stays a range, because it may be too long to list."""
    name, _, text = setting.partition("=")
    fields = next((fields for fields in map(_fieldset, families) if fields and name in fields.values), None)
    if fields and name in fields.lists and "[" not in text:
        return [[text]]  # 2,4,1 is one value of such a field
    values: list[Values] = []
    for part in _parts(text):
        if not part:
            refuse(f"--set {setting}: a value is missing beside a comma or the =")
        match = RANGE.fullmatch(part)
        values.append(_range(setting, match, fields.values[name] if fields else ()) if match else [part])
    return values


def _fieldset(family: str) -> Fieldset | None:
    """The fields of a family; None if there is no such family."""
    return fieldset(FAMILIES[family]) if family in FAMILIES else None


def _parts(text: str) -> list[str]:
    """The parts of a text between commas; commas within brackets do not separate."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _range(setting: str, match: re.Match[str], accepted: Sequence[object]) -> Values:
    """The numbers of a range, both ends included.

    ``a..b`` are the values from a to b that the field accepts; ``a..b..step`` counts in steps, as in a shell.
    ``accepted``: the values that the field accepts, if they are few; otherwise empty, and ``a..b`` counts by 1.
    """
    first, last, step = (int(group) if group else 0 for group in match.groups())
    numbers = range(first, last + 1, step or 1)
    if match[3] and not step:
        refuse(f"--set {setting}: {match[0]} has steps of 0; write a step of 1 or more, as in 64..256..64")
    if not numbers:
        refuse(f"--set {setting}: {match[0]} is no range; write the smaller number first, as in 2..5")
    if step or not (integers := [value for value in accepted if type(value) is int]):
        return numbers
    values = [str(value) for value in integers if value in numbers]
    if not values:
        refuse(f"--set {setting}: the field takes no value of {match[0]}, but {', '.join(map(str, integers))}")
    return values
