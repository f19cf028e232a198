"""Advises which field of a record to change: finds values that shorten its time by the formulas of ``model.estimate``.

The timing model has two forms; advice is given by the cheap one, which needs no machine code."""

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
    """Each field of the record's family, with each value that its type lists, except the value that the record has.

    Values have the types of JSON, such as a list for a tuple. A record with one of them may be illegal, because it
    breaks a rule between fields.
    """
    fields = fieldset(type(record))
    for field, value in fields.flat(record.decisions()).items():
        if "." not in field:  # a dot names a part of a field
            yield from ((field, other) for other in fields.values[field] if other != value)
