"""Reads the answers of a language model that chooses records, and defines their JSON schema.

A proposal in an answer names a base record and the fields that it changes. If the rules then require further changes,
``kernel.fit`` makes them. If no legal record has the changes, the proposal is a ``Fault`` with the violated rule.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from cudal2gen.kernel import FAMILIES, IllegalRecord, Record, explain, fit, space
from cudal2gen.tuner.language_model import answer_text
from cudal2gen.tuner.language_model.transcript import Reply
from cudal2gen.tuner.proposal import Proposal

PROPOSER = "llm"
MAX_FAULTS = 12  # most faults of one answer that are reported
LONGEST_REASON = 300  # most characters of a rule or a reason in a prompt
LONGEST_IDEA, DEEPEST = 2000, 32  # most characters of a proposal, most nested brackets in it
FORM = 'the JSON object asked for, {"reasoning": "...", "proposals": [...]}'
FIXED = frozenset({"family", *space.NO_DECISION})  # fields that cannot be changed; the base determines the family


class Idea(BaseModel):
    """One proposal in the model's answer, before it is checked against the rules."""

    model_config = ConfigDict(extra="ignore")

    base: str
    changes: dict[str, Any]
    why: str = ""


class Fault(NamedTuple):
    """What is wrong with one idea, or with an answer. ``proposal``: the rejected proposal, which is recorded; None if
    the item was malformed or its base is unknown."""

    text: str
    proposal: Proposal | None = None


@cache
def schema(families: tuple[str, ...]) -> dict[str, Any]:
    """The JSON schema of an answer: reasoning, then proposals with the fields that may change.

    Reasoning comes first because a model writes in order, and so reasons before it proposes. If families limit a field
    differently, it accepts the values of any of them; the rules check combinations afterwards.
    """
    schemas: dict[str, list[Any]] = {}
    for family in families:
        model_schema = FAMILIES[family].model_json_schema()
        for name, field_schema in model_schema["properties"].items():
            if name not in FIXED and (
                plain_schema := _without_titles(field_schema, model_schema.get("$defs", {}))
            ) not in schemas.setdefault(name, []):
                schemas[name].append(plain_schema)
    fields = {
        name: alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}
        for name, alternatives in schemas.items()
    }
    idea = {
        "type": "object",
        "properties": {
            "base": {"type": "string"},
            "changes": {"type": "object", "properties": fields, "additionalProperties": False},
            "why": {"type": "string"},
        },
        "required": ["base", "changes", "why"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"reasoning": {"type": "string"}, "proposals": {"type": "array", "items": idea}},
        "required": ["reasoning", "proposals"],
        "additionalProperties": False,
    }


def _without_titles(node: Any, definitions: Mapping[str, Any]) -> Any:
    """A schema without titles, descriptions, defaults and references, which some servers do not support."""
    if isinstance(node, list):
        return [_without_titles(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _without_titles(definitions[node["$ref"].rsplit("/", 1)[-1]], definitions)
    left_out = ("title", "description", "default")
    # Below "properties" the keys are names of fields: one that is called "title" or "default" is kept.
    return {
        name: {field: _without_titles(value, definitions) for field, value in item.items()}
        if name == "properties"
        else _without_titles(item, definitions)
        for name, item in node.items()
        if name not in left_out
    }


def parse_ideas(reply: Reply, limit: int) -> tuple[list[Idea], list[Fault]]:
    """The well-formed ideas among an answer's first ``limit`` proposals, and the faults of the malformed ones."""
    items = answer_text.last_list(answer_text.text_of(reply), "proposals")
    if items is None:
        return [], [Fault(answer_text.why_unreadable(reply, FORM, "answer shorter, with fewer proposals"))]
    ideas, faults = [], []
    for item in items[:limit]:
        if not _plausible(item):
            why = "too long, too deep, or contains numbers or text that JSON cannot represent"
            faults.append(Fault(f"a proposal is malformed: {why}"))
            continue
        try:
            ideas.append(Idea.model_validate(item))
        except ValidationError as error:
            faults.append(Fault(f"a proposal is malformed: {explain(error)[:LONGEST_REASON]}"))
    return ideas, faults


def _plausible(item: Any) -> bool:
    """Whether an item is short and shallow enough for a proposal, and can be encoded as UTF-8 JSON, since a
    rejected proposal is stored in a trial."""
    try:
        text = json.dumps(item, ensure_ascii=False, allow_nan=False)
        text.encode()  # raises UnicodeEncodeError for half a surrogate pair
    except (ValueError, RecursionError):
        return False
    return len(text) <= LONGEST_IDEA and text.count("[") + text.count("{") <= DEEPEST


def proposal_of(idea: Idea, bases: Mapping[str, Record]) -> Proposal | Fault:
    """The nearest legal record that has an idea's changes, as a proposal; or the idea's fault."""
    base = bases.get(idea.base)
    if base is None:
        return Fault(f"{idea_line(idea)}: base must be one of {', '.join(bases)}")
    decisions = space.decisions(base)
    note = idea.why[:LONGEST_REASON]
    fields = decisions | {str(name)[:LONGEST_REASON]: value for name, value in idea.changes.items()}
    if unknown := sorted(name for name in idea.changes if name in FIXED or name not in decisions):
        violation = "; ".join(
            f"{name}: is part of the question" if name in FIXED else f"{name}: {base.family} has no such field"
            for name in unknown
        )[:LONGEST_REASON]
    else:
        try:
            near, differences = fit(base, idea.changes)
            record = space.credited(near, PROPOSER)
            moves = "".join(f"; {difference}" for difference in differences)
            return Proposal(PROPOSER, space.decisions(record), record, note=f"{note}{moves}"[:LONGEST_REASON])
        except IllegalRecord as error:
            violation = str(error)[:LONGEST_REASON]
    return Fault(f"{idea_line(idea)}: {violation}", Proposal(PROPOSER, fields, None, violation, note))


def idea_line(idea: Idea) -> str:
    """The idea as one line for a message."""
    return f"{idea.base[:40]} with {json.dumps(idea.changes)[:LONGEST_REASON]}"


def correction(faults: Iterable[Fault], count: int) -> str:
    """The user message that lists the faults and asks for ``count`` further proposals."""
    document = {"refused": [fault.text for fault in faults][:MAX_FAULTS], "proposals still wanted": count}
    return json.dumps(document) + "\nAnswer again in the same form, with corrected proposals only."
