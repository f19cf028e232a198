"""Advises on a record: finds other values of one field that shorten the time of the model's cheap form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cudal2gen.kernel import IllegalRecord, Record
from cudal2gen.kernel.fieldset import fieldset, spell
from cudal2gen.timing.model import estimate
from kernelproof.profile import Advice

MAX_EDITS = 4  # most fields for which another value is proposed


def edits(record: Record) -> Iterator[Advice]:
    """The best other value of each field, for the ``MAX_EDITS`` fields that shorten the modelled time the most.

    Values that make the record illegal, or likely to spill registers, are left out.
    """
    before = estimate(record).us
    best: dict[str, Advice] = {}
    for field, value in other_values(record):
        try:
            candidate = record.at(record.problem, **{field: tuple(value) if isinstance(value, list) else value})
        except IllegalRecord:
            continue
        after = before if candidate.spill_remarks else estimate(candidate).us
        if after < (best[field].after if field in best else before):
            change = f"--set {field}={spell(value)}"
            best[field] = Advice(change=change, figure="time", form="cheap form", before=before, after=after)
    yield from sorted(best.values(), key=lambda advice: advice.after)[:MAX_EDITS]


def other_values(record: Record) -> Iterator[tuple[str, Any]]:
    """Every field of the record's family with every value that its type lists, except the value that the record has.

    Values are as JSON has them. Some of them break a rule between fields.
    """
    fields = fieldset(type(record))
    for field, value in fields.flat(record.decisions()).items():
        if "." not in field:  # a dot names a part of a field
            yield from ((field, other) for other in fields.values[field] if other != value)
