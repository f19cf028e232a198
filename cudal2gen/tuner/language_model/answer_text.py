"""Finds the JSON in a model's answer, which prose may surround because some servers do not enforce the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from cudal2gen.tuner.language_model.transcript import Reply

MAX_OPENINGS = 100  # most opening braces at which the search for an object is tried


def text_of(reply: Reply) -> str:
    """The text of an answer, or the model's reasoning if the text is empty, because some servers send the whole answer
    as reasoning."""
    return reply.text if reply.text.strip() else reply.reasoning


def last_list(text: str, name: str) -> list[Any] | None:
    """The list under ``name`` in the last object that has one; None if no object has one.

    The last object is taken because a model that reasons in its answer writes drafts first.
    """
    items = None
    for answer in _objects(text):
        if isinstance(value := answer.get(name), list):
            items = value
    return items


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The outermost JSON objects in a text."""
    start = 0
    for _ in range(MAX_OPENINGS):
        if (start := text.find("{", start)) < 0:
            return
        try:
            # strict=False: models write line breaks within strings as they are.
            value, start = json.JSONDecoder(strict=False).raw_decode(text, start)
        except (ValueError, RecursionError):
            start += 1
            continue
        yield value


def why_unreadable(reply: Reply, form: str, shorter: str) -> str:
    """A sentence on why an answer could not be read, for the model to correct it.

    ``form``: what the answer should have been. ``shorter``: advice if the answer was cut off after its text began.
    """
    if reply.cut_off and not reply.text.strip():
        return "the answer was cut off while reasoning: reason shorter (or raise llm.max_tokens in --settings)"
    if reply.cut_off:
        return f"the answer was cut off before its end: {shorter}"
    return f"the answer is not {form}"
