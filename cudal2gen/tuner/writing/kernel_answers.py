"""Reads the answers of a language model that writes kernels, and defines their JSON schema.

An answer has complete texts or patches, with the fields of their launch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cudal2gen.kernel import LAUNCH_FIELDS, Fields, device_text, explain
from cudal2gen.tuner.language_model import answer_text
from cudal2gen.tuner.language_model.transcript import Reply
from cudal2gen.tuner.writing import patches
from kernelproof.ground.errors import brief

CHANGEABLE_FIELDS = (*LAUNCH_FIELDS, "padding", "options")
LONGEST_WHY = 600  # most characters of an idea's reason that are kept
FORM = "the JSON object with kernels, or fenced code"
_FENCE = re.compile(r"^```[ \t]*([\w+]*)[^\n]*\n(.*?)^```", re.M | re.S)
_CODE = frozenset(("cuda", "cu", "cpp", "c++", "c"))


class Idea(BaseModel):
    """A kernel in an answer: a complete text (``source``) or a ``patch`` of the text of ``base``, the fields of its
    ``launch`` that differ from the base's, and the reason ``why`` it should be faster."""

    model_config = ConfigDict(extra="ignore")

    base: str = "incumbent"
    why: str = ""
    launch: dict[str, int | str] = Field(default_factory=dict)
    patch: str = ""
    source: str = ""


class Base(NamedTuple):
    """A text to start from, with the fields of its launch."""

    text: str
    launch: Fields


class Draft(NamedTuple):
    """A text in normal form, with all fields of its launch. ``base``: the label of the kernel that it was made from;
    ``why``: the reason why it should be faster."""

    base: str
    why: str
    text: str
    launch: Fields


def schema() -> dict[str, Any]:
    """The JSON schema of an answer. Models write in this order, so reasons come before kernels."""
    text = {"type": "string"}
    values = {"anyOf": [{"type": "integer"}, text]}
    launch = {"type": "object", "properties": dict.fromkeys(CHANGEABLE_FIELDS, values), "additionalProperties": False}
    idea = {
        "type": "object",
        "properties": {"why": text, "base": text, "launch": launch, "patch": text, "source": text},
        "required": ["why", "base"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"reasoning": text, "kernels": {"type": "array", "items": idea}},
        "required": ["reasoning", "kernels"],
        "additionalProperties": False,
    }


def drafts(reply: Reply, bases: Mapping[str, Base], most: int) -> tuple[list[Draft], list[str]]:
    """At most ``most`` drafts of an answer, and the faults of its other ideas."""
    text = answer_text.text_of(reply)
    ideas = answer_text.last_list(text, "kernels")
    if ideas is None:
        ideas = list(_ideas_in_prose(text))
    if not ideas:
        return [], [answer_text.why_unreadable(reply, FORM, "answer with one patch")]
    sound, faults = [], []
    for number, item in enumerate(ideas[: 2 * most], 1):  # more than ``most``, because some may be faulty
        try:
            idea = item if isinstance(item, Idea) else Idea.model_validate(item)
            sound.append(_draft(idea, bases))
        except ValidationError as error:
            faults.append(f"kernel {number}: {explain(error)}")
        except ValueError as error:
            faults.append(f"kernel {number}: {error}")
    return sound[:most], faults


def _draft(idea: Idea, bases: Mapping[str, Base]) -> Draft:
    """The draft of an idea. Raises ValueError with an explanation for the model."""
    if idea.base not in bases:
        raise ValueError(f"base {brief(idea.base)}: must be one of {', '.join(bases)}")
    base = bases[idea.base]
    if unknown := sorted(idea.launch.keys() - set(CHANGEABLE_FIELDS)):
        raise ValueError(f"launch: {brief(', '.join(unknown))}: must be among {', '.join(CHANGEABLE_FIELDS)}")
    if bool(idea.source.strip()) == bool(idea.patch.strip()):
        raise ValueError("give either source, a whole text, or patch")
    text = idea.source if idea.source.strip() else patches.apply(base.text, idea.patch)
    if len(text) > device_text.MAX_CHARACTERS:
        raise ValueError(f"the text has {len(text)} characters, {device_text.MAX_CHARACTERS} at most")
    return Draft(idea.base, idea.why[:LONGEST_WHY], device_text.normal(text), base.launch | idea.launch)


def _ideas_in_prose(text: str) -> Iterator[Idea]:
    """The ideas in an answer that is not JSON. Fenced code is a complete text, and a fenced patch applies to the
    incumbent. A fenced JSON object before them has the changed fields of their launch."""
    launch: dict[str, int | str] = {}
    why = text.partition("```")[0].strip()
    for kind, content in _FENCE.findall(text):
        if kind.lower() == "json":
            launch = _json_object(content)
        elif kind.lower() in ("diff", "patch") or "<<<<< SEARCH" in content:
            yield Idea(why=why, launch=launch, patch=content)
        elif kind.lower() in _CODE and "__global__" in content:
            yield Idea(why=why, launch=launch, source=content)


def _json_object(content: str) -> dict[str, int | str]:
    """The whole numbers and texts of a JSON object; empty for any other text."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {name: item for name, item in value.items() if isinstance(item, int | str)}
