"""``Schema``: sets of fields to which new fields can be added without renaming old records; errors name fields."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer

from kernelproof.ground.errors import WrongInput, brief, printable

MAX_RULES = 3  # most rules in a message
LONGEST_RULE = 240  # most characters of a rule


class IllegalRecord(WrongInput):
    """A record that breaks a rule; the message names field, value and rule."""


class IllegalValue(IllegalRecord):
    """A field that is unknown, or a value that its field never takes: no other field makes it legal."""


class Schema(BaseModel):
    """A strict set of fields, frozen after validation, without unknown fields.

    How a schema grows: a field without a default belongs to the first version and is always written. A field that is
    added later has a default, its neutral value, with which everything is as it was before the field existed. Neutral
    values are left out wherever fields are written (``model_dump``, a catalog line, the code behind a name and its
    digest), and readers fill them in. So old lines, names and digests stay valid.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    NEUTRAL: ClassVar[dict[str, Any]] = {}  # the default of every field that has one

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.NEUTRAL = {name: field.default for name, field in cls.model_fields.items() if not field.is_required()}

    @model_serializer(mode="wrap")
    def _spell(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return self._without_neutral(handler(self))

    def _without_neutral(self, spelled: dict[str, Any]) -> dict[str, Any]:
        for name, neutral in self.NEUTRAL.items():
            if getattr(self, name) == neutral:
                spelled.pop(name, None)
        return spelled

    @classmethod
    def without_neutral(cls, spelled: dict[str, Any]) -> dict[str, Any]:
        """Fields and values without those of this schema that are neutral; fields of other schemas are kept."""
        return {name: value for name, value in spelled.items() if name not in cls.NEUTRAL or value != cls.NEUTRAL[name]}


def explain(error: ValidationError) -> str:
    """pydantic's errors as ``field=value: rule``, without model names; a problem's fields are named as in a line."""
    lines = []
    for item in error.errors(include_url=False):
        place = item["loc"][1:] if item["loc"][:1] == ("problem",) else item["loc"]
        field = printable(".".join(str(part) for part in place))
        message = item["msg"].removeprefix("Value error, ")
        message = message[0].lower() + message[1:] if item["type"] != "value_error" else message
        if item["type"] == "missing" and isinstance(place[-1], int):  # an item of a list, whose input is the list
            field, message = field.rpartition(".")[0], f"value {place[-1] + 1} of it is missing"
        elif item["type"] == "too_long":
            most, length = item["ctx"]["max_length"], item["ctx"]["actual_length"]
            message = f"takes at most {most} item{'s' if most > 1 else ''}, not {length}"
        blamed = field and item["type"] != "extra_forbidden" and not message.endswith("field required")
        value = f"={spelled(item['input'])}" if blamed else ""
        if item["type"] == "extra_forbidden":
            message = "extra inputs are not permitted; 'cudal2gen show' lists the fields; a newer version may have more"
        lines.append(brief(f"{brief(field)}{value}: {message}" if field else message, LONGEST_RULE))
    more = [f"and {len(lines) - MAX_RULES} more"] if len(lines) > MAX_RULES else []
    return "; ".join([*lines[:MAX_RULES], *more])


def spelled(value: Any) -> str:
    """A value as JSON, shortened in its middle if it is long; the name of its type if JSON cannot express it."""
    try:
        return brief(json.dumps(value, default=str))
    except (ValueError, RecursionError):
        return f"<{type(value).__name__}>"


def refusal(error: ValidationError) -> IllegalRecord:
    """pydantic's errors as an exception: IllegalRecord if other fields could mend them, otherwise IllegalValue."""
    mendable = all(
        item["type"] == "value_error" or (item["type"] == "missing" and isinstance(item["loc"][-1], str))
        for item in error.errors(include_url=False)
    )
    return (IllegalRecord if mendable else IllegalValue)(explain(error))
