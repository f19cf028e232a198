"""Defines ``Schema``, the base class of documents that programs write and read back, and explains errors in them."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer

from kernelproof.ground.errors import brief, printable

MAX_RULES = 3  # most rules in a message
LONGEST_RULE = 240  # most characters of a rule


class Schema(BaseModel):
    """A pydantic model that is frozen after validation, converts no types, and refuses unknown fields.

    Schemas grow without changing old documents: a field without a default belongs to the first version and is always
    written. A field that is added later has a default, its neutral value. A document with this value means the same as
    a document without the field. Fields with their neutral value are left out when a model is serialised, and readers
    fill them in.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    NEUTRAL: ClassVar[dict[str, Any]] = {}  # the neutral value of every field that has one

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.NEUTRAL = {name: field.default for name, field in cls.model_fields.items() if not field.is_required()}

    @model_serializer(mode="wrap")
    def _spell(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return self._without_neutral(handler(self))

    def _without_neutral(self, spelled: dict[str, Any]) -> dict[str, Any]:
        """Removes the fields that have their neutral value from a serialised model."""
        for name, neutral in self.NEUTRAL.items():
            if getattr(self, name) == neutral:
                spelled.pop(name, None)
        return spelled

    @classmethod
    def without_neutral(cls, spelled: dict[str, Any]) -> dict[str, Any]:
        """Serialised fields without those of this schema that have their neutral value. Other schemas' fields are
        kept."""
        return {name: value for name, value in spelled.items() if name not in cls.NEUTRAL or value != cls.NEUTRAL[name]}


def explain(error: ValidationError, unknown: str = "a newer version may have more", outer: str = "") -> str:
    """The text of pydantic's errors, as ``field=value: rule; ...``, with at most ``MAX_RULES`` of them.

    ``unknown``: what a message adds about a field that does not exist. ``outer``: a field whose name is left out before
    the names of the fields inside it.
    """
    lines = []
    for item in error.errors(include_url=False):
        place = item["loc"][1:] if outer and item["loc"][:1] == (outer,) else item["loc"]
        field = printable(".".join(str(part) for part in place))
        message = item["msg"].removeprefix("Value error, ")
        message = message[0].lower() + message[1:] if item["type"] != "value_error" else message
        if item["type"] == "missing" and isinstance(place[-1], int):  # the error's input is the list, not the item
            field, message = field.rpartition(".")[0], f"value {place[-1] + 1} of it is missing"
        elif item["type"] == "too_long":
            most, length = item["ctx"]["max_length"], item["ctx"]["actual_length"]
            message = f"takes at most {most} item{'s' if most > 1 else ''}, not {length}"
        is_value_wrong = field and item["type"] != "extra_forbidden" and not message.endswith("field required")
        value = f"={spelled(item['input'])}" if is_value_wrong else ""
        if item["type"] == "extra_forbidden":
            message = f"extra inputs are not permitted; {unknown}"
        lines.append(brief(f"{brief(field)}{value}: {message}" if field else message, LONGEST_RULE))
    more = [f"and {len(lines) - MAX_RULES} more"] if len(lines) > MAX_RULES else []
    return "; ".join([*lines[:MAX_RULES], *more])


def spelled(value: Any) -> str:
    """A value as JSON, shortened in the middle if it is long. If JSON cannot spell it, the name of its type."""
    try:
        return brief(json.dumps(value, default=str))
    except (ValueError, RecursionError):
        return f"<{type(value).__name__}>"
