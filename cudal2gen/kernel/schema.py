"""Defines the errors of records, and words pydantic's findings so that they name field, value and rule."""

from __future__ import annotations

from pydantic import ValidationError

from kernelproof.ground import schema
from kernelproof.ground.errors import WrongInput


class IllegalRecord(WrongInput):
    """A record that breaks a rule; the message names field, value and rule."""


class IllegalValue(IllegalRecord):
    """A field that is unknown, or a value that its field never takes: no other field makes it legal."""


def explain(error: ValidationError) -> str:
    """pydantic's errors as ``field=value: rule``. Fields of a record's problem are named as a catalog line has them."""
    return schema.explain(error, "'cudal2gen show' lists the fields; a newer version may have more", outer="problem")


def refusal(error: ValidationError) -> IllegalRecord:
    """pydantic's errors as an exception: IllegalRecord if other values of other fields can mend the record, because a
    rule between fields is broken or a field is absent; else IllegalValue."""
    mendable = all(
        item["type"] == "value_error" or (item["type"] == "missing" and isinstance(item["loc"][-1], str))
        for item in error.errors(include_url=False)
    )
    return (IllegalRecord if mendable else IllegalValue)(explain(error))
