"""Reads chat completions as servers write them: the text, the reasoning, and the numbers of tokens.

Servers differ in secondary fields, such as ``service_tier`` and ``finish_reason``, and the ``openai`` library's own
model refuses a whole answer if one of them has an unknown value. So this module reads only the fields that are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import pydantic_core


class Completion(NamedTuple):
    """An answer. ``finish``: why it ends. ``counts``: tokens in and out, None if the server does not send them."""

    text: str
    reasoning: str
    refusal: str
    finish: str
    counts: tuple[int, int] | None
    model: str


class ServerError(ValueError):
    """The body has an error instead of an answer. ``status``: the code that it names, 0 for none."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def read(body: bytes) -> Completion:
    """The first choice of the completion in a response body.

    Raises ServerError for a body that names an error, ValueError for a body that is not a completion.
    """
    match answer := _joined_chunks(body) if body.lstrip().startswith(b"data:") else _json(body):
        case {"choices": [{"message": {**message}} as choice, *_]}:
            text, reasoning = _text_and_reasoning(message)
            return Completion(
                text,
                reasoning,
                _string(message.get("refusal")),
                _string(choice.get("finish_reason")),
                _counts(answer.get("usage")),
                _string(answer.get("model")),
            )
        case {"error": {"message": str(text), "code": int(status)}}:
            raise ServerError(text, status)
        case {"error": {"message": str(text)} | str(text)}:
            raise ServerError(text, 0)
    raise ValueError("no chat completion")


def _json(body: bytes) -> Any:
    """The value of a body. json.loads would accept NaN and half a surrogate pair, which no transcript can store."""
    return pydantic_core.from_json(body, allow_inf_nan=False)


def _joined_chunks(body: bytes) -> dict[str, Any]:
    """The completion that a stream of server-sent events spells out; or the first chunk that is an error.

    Some servers stream although the request does not ask for it.
    """
    message: dict[str, Any] = {"content": ""}
    answer: dict[str, Any] = {"choices": [{"message": message}]}
    ended = False
    for line in body.splitlines():
        event = line.removeprefix(b"data:").strip()
        ended |= event == b"[DONE]"
        if not line.startswith(b"data:") or event == b"[DONE]":
            continue
        chunk = _json(event)
        if not isinstance(chunk, dict) or "error" in chunk:
            return chunk if isinstance(chunk, dict) else {}
        answer |= {name: chunk[name] for name in ("model", "usage") if chunk.get(name)}
        for choice in chunk.get("choices") or ():
            match choice:
                case {"index": int(index)} if index:
                    continue
                case {"delta": {**delta}}:
                    for name in ("content", "reasoning_content", "reasoning", "refusal"):
                        message[name] = _string(message.get(name)) + _string(delta.get(name))
                    if finish := choice.get("finish_reason"):
                        answer["choices"][0]["finish_reason"] = finish
                        ended = True
    if not ended:
        raise ValueError("a stream without its end")
    return answer


def split_reasoning(text: str) -> tuple[str, str]:
    """The reasoning of a <think> block at the start of a text, and the text after it.

    The opening tag may be missing, because chat templates write it into the prompt. The closing tag is missing if the
    answer was cut off.
    """
    if match := re.match(r"\s*(?:<think>)?(.*?)</think>", text, re.DOTALL):
        return match[1], text[match.end() :]
    if text.lstrip().startswith("<think>"):
        return text.lstrip().removeprefix("<think>"), ""
    return "", text


def _text_and_reasoning(message: Mapping[object, object]) -> tuple[str, str]:
    """A message's text, and its reasoning from a field, a part of the content, or a <think> block.

    If a model calls a tool although none was offered, the arguments of the call are its answer.
    """
    content = message.get("content")
    own = next((text for key in ("reasoning_content", "reasoning") if (text := _string(message.get(key)))), "")
    reasoning, text = split_reasoning(_joined(content, "text"))
    calls = message.get("tool_calls")
    if not text.strip() and isinstance(calls, list):
        text = next(_arguments(calls), "")
    return text, (own + _joined(content, "thinking") + reasoning).strip()


def _joined(content: object, kind: str) -> str:
    """The parts of a content that are of this kind, joined. A string is one part of kind ``text``."""
    if isinstance(content, str):
        return content if kind == "text" else ""
    parts = content if isinstance(content, list) else []
    values = (part.get(kind) for part in parts if isinstance(part, dict) and part.get("type") == kind)
    return "".join(_joined(value, "text") for value in values)


def _arguments(calls: Iterable[object]) -> Iterator[str]:
    """The arguments of a message's calls of functions, as texts."""
    for call in calls:
        match call:
            case {"function": {"arguments": str(arguments)}} if arguments:
                yield arguments


def _counts(usage: object) -> tuple[int, int] | None:
    """Tokens in and out; None if the counts are missing, negative, or no integers."""
    match usage:
        case {"prompt_tokens": int(tokens_in), "completion_tokens": int(tokens_out)}:
            possible = not isinstance(tokens_in, bool) and not isinstance(tokens_out, bool)
            return (tokens_in, tokens_out) if possible and min(tokens_in, tokens_out) >= 0 else None
    return None


def _string(value: object) -> str:
    """The value if it is a text, else ""."""
    return value if isinstance(value, str) else ""
