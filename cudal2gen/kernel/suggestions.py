"""What a user may have meant by a field that a family does not have."""

from __future__ import annotations

from difflib import get_close_matches

from cudal2gen.kernel.fieldset import fieldset
from cudal2gen.kernel.record import Record
from cudal2gen.kernel.spelling import FAMILIES


def unknown_field(family: type[Record], name: str) -> str:
    """An error message for ``name`` that suggests the nearest field, the field with this value, or the family with
    it."""
    own = family.line_fields()
    title = _title(family)
    if near := [name.lower()] if name.lower() in own else get_close_matches(name.lower(), own, n=2):
        return f"{name}: no field of {title}; did you mean {' or '.join(near)}?"
    choices = fieldset(family).values
    if near := [f"{field}={name.lower()}" for field, values in choices.items() if name.lower() in values]:
        return f"{name}: no field of {title}; did you mean {' or '.join(near)}?"
    if families := [family_name for family_name, kind in FAMILIES.items() if name.lower() in kind.line_fields()]:
        return f"{name}: no field of {title}, but of {', '.join(families)}: add --set family={families[0]}"
    return f"{name}: no field of {title}, which has {', '.join(own)}"


def _title(family: type[Record]) -> str:
    return next(name for name, kind in FAMILIES.items() if kind is family)
