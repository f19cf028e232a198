"""Edits a record: a user sets field values, which are then checked against the rules or fitted to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cudal2gen.kernel.fieldset import fieldset
from cudal2gen.kernel.fitting import Fit, fit_fields
from cudal2gen.kernel.record import Fields, Origin, Record
from cudal2gen.kernel.schema import IllegalValue
from cudal2gen.kernel.spelling import FAMILIES, parse
from cudal2gen.kernel.suggestions import unknown_field


class Edit(NamedTuple):
    """A record with some of its fields set to other values.

    ``fields``: the record's line with these values, legal or not. ``named``: the names of the fields that were set,
    which a fit must keep; a part of a field is written ``prefetch.kind``.
    """

    record: Record
    fields: Fields
    named: frozenset[str]

    def parsed(self) -> Record:
        """The record with exactly these fields. Raises IllegalRecord."""
        return self._with_origin(parse(self.fields))

    def fitted(self) -> Fit:
        """The nearest legal record in which the named fields have their values; see ``fit``. Raises IllegalRecord."""
        fit = fit_fields(self.fields, self.named)
        return fit._replace(record=self._with_origin(fit.record))

    def _with_origin(self, edited: Record) -> Record:
        """The edited record; its origin names the fields that differ, unless the edit sets the origin itself."""
        before, after = self.record.model_dump(mode="json"), edited.model_dump(mode="json")
        touched = {name for name in before.keys() | after.keys() if before.get(name, ...) != after.get(name, ...)}
        if not touched or "origin" in touched:
            return edited
        origin = self.record.origin
        differing = tuple(sorted({*origin.changed, *touched & after.keys()}))
        return edited.at(edited.problem, origin=Origin(source=origin.source, structure="edited", changed=differing))


def edit(record: Record, values: Mapping[str, Any]) -> Edit:
    """The edit that gives fields, or parts of them (``prefetch.kind``), these JSON values.

    Another ``family`` starts from the fields that both families share. Raises IllegalValue for a name that the family
    does not have.
    """
    fields = in_family(record, str(values.get("family", record.family)))
    family = FAMILIES.get(fields["family"])
    for name, value in values.items():
        field, _, part = name.partition(".")
        if family and field not in family.line_fields():
            raise IllegalValue(unknown_field(family, field, record.gpu))
        if part and not isinstance(fields.get(field), dict):
            raise IllegalValue(f"{name}: {field} has no parts")
        fields[field] = fields[field] | {part: value} if part else value
    return Edit(record, fields, frozenset(values))


def in_family(record: Record, family: str) -> Fields:
    """A record's line to edit. For another family: the fields that the two share, overridden by its plain decisions."""
    fields = record.model_dump(mode="json")
    if family == record.family or family not in FAMILIES:
        return fields | {"family": family}
    kind = FAMILIES[family]
    choices = {name: values for name, values in fieldset(kind).values.items() if values}
    shared = {
        name: value
        for name, value in fields.items()
        if name in kind.line_fields() and not (isinstance(value, str) and value not in choices.get(name, value))
    }
    return shared | kind.plain(record.problem) | {"family": family}
