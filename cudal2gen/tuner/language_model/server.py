"""Makes one exchange with a chat-completions server through the ``openai`` library, bounded in time and bytes."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from cudal2gen.kernel import Problem
from cudal2gen.tuner.language_model import completions
from cudal2gen.tuner.language_model.transcript import ChatRequest, Form, Reply, Unavailable
from cudal2gen.tuner.memory import tokens
from kernelproof.ground.errors import MissingLibrary, installation

if TYPE_CHECKING:
    import openai

KEY = "CUDAL2GEN_LLM_KEY"  # environment variable of the key; not OPENAI_API_KEY, which belongs to one certain server
RATE_LIMIT = 429  # the HTTP status of a server that had too many requests
PERMANENT = (401, 402, 403, 404)  # statuses after which every further question fails too
TRANSIENT = (408, 409, 425, RATE_LIMIT, 500, 502, 503, 504, 529)  # statuses after which the question is repeated
LATEST_RETRY = 3600.0  # most seconds that the chat waits if a server asks for time
MAX_BYTES = 1 << 20  # most bytes of an answer
FRAME_BYTES = 512  # additional bytes that a stream may need for the event of each token
FEWEST_TOKENS = 4096  # least limit of an answer's tokens; a context that is too short makes the limit a quarter
LONGEST_ERROR = 400  # most characters of a server's message
KEY_HINT = f"set its key in the variable {KEY}, or name another one by llm.key in --settings"
# What the user can do after a status; and the words by which servers say that the question exceeds the context.
HINTS = {401: KEY_HINT, 403: KEY_HINT, 404: "look at NAME@URL of --llm: the URL mostly ends in /v1"}
TOO_LONG = re.compile(r"context[ _](?:length|size|window)|maximum context|prompt is too long", re.I)


class Symptom(NamedTuple):
    """A kind of refusal that shows in the words of a server's message and not in its status.

    ``for_good``: every further question would be refused too.
    """

    words: re.Pattern[str]
    hint: str
    for_good: bool


SYMPTOMS = (
    Symptom(
        re.compile(r"insufficient_quota|exceeded your current quota|credit balance", re.I),
        "add credit, or set another key",
        True,
    ),
    Symptom(re.compile(r"\btemperature\b", re.I), "leave llm.temperature out of --settings for this model", True),
    Symptom(
        re.compile(r"reasoning[ _.]effort", re.I),
        "set llm.reasoning_effort in --settings to what this model knows, or leave it out",
        True,
    ),
    Symptom(
        TOO_LONG,
        "serve the model with a longer context, or lower llm.max_tokens in --settings, which counts towards it",
        False,
    ),
    Symptom(
        re.compile(r"content[ _](?:filter|management|policy)", re.I),
        "the server's filter refuses the question: ask another model or server",
        False,
    ),
)


@dataclass(frozen=True)
class Endpoint:
    """A model at a server. ``seconds``: limit of a whole exchange. Prices are per million tokens, in any currency.

    The defaults suit models that reason for minutes before they answer: many tokens, and a stream, which proxies do not
    cut off for silence. ``max_tokens``: most tokens of an answer, reasoning included. ``temperature`` and
    ``reasoning_effort``: values of the request's fields of these names, which None and "" leave out. ``extra_body``:
    further fields of each request, such as a chat template's arguments.
    """

    url: str
    model: str
    key: str = ""
    seconds: float = 900.0
    max_tokens: int = 32768
    temperature: float | None = None
    reasoning_effort: str = ""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = True
    price_in: float = 0.0
    price_out: float = 0.0

    @classmethod
    def from_environment(cls, url: str, model: str, variable: str = KEY, **options: Any) -> Endpoint:
        """An endpoint whose key is in an environment variable; a local server may need none."""
        return cls(url, model, os.environ.get(variable, ""), **options)

    def cost(self, tokens_in: int, tokens_out: int) -> float:
        """The cost of one exchange."""
        return (tokens_in * self.price_in + tokens_out * self.price_out) / 1e6


class ServerWire:
    """Exchanges over the network. Its constructor raises MissingLibrary without the ``openai`` library."""

    live = True

    def __init__(self, endpoint: Endpoint) -> None:
        try:
            import openai
        except ImportError:
            raise MissingLibrary(f"proposer llm needs the openai library: {installation('llm')}") from None
        self._endpoint, self._library = endpoint, openai
        # max_retries=0, because Chat repeats exchanges, so that the transcript has each one. api_key="none", because
        # without it the library would send OPENAI_API_KEY, the key of another server, to this one.
        self._client = openai.OpenAI(
            base_url=endpoint.url, api_key=endpoint.key or "none", timeout=endpoint.seconds, max_retries=0
        )
        # ``_adapt`` changes these when the server refuses them, and the exchange is repeated. ``_limit`` is the name of
        # the request's field that limits the answer's tokens.
        self._limit, self._tokens, self._stream = "max_tokens", endpoint.max_tokens, endpoint.stream

    def send(self, request: ChatRequest, form: Form, problem: Problem) -> Reply:  # noqa: ARG002
        """See ``Wire``."""
        begin = time.monotonic()
        library = self._library
        try:
            # Bytes are streamed so that _body can stop at its limits if an answer is slow or endless.
            with self._client.with_streaming_response.chat.completions.create(
                **self._arguments(request, form)
            ) as response:
                body = self._body(response, begin + self._endpoint.seconds)
        except library.APITimeoutError:
            raise self._timeout("no answer") from None
        except library.APIConnectionError as error:
            reason = self._safe(str(error.__cause__ or error))
            hint = " (http or https?); SSL_CERT_FILE names certificates of your own" if "SSL" in reason else ""
            raise Unavailable(
                f"{self._endpoint.url} cannot be reached: {reason}; look at the URL of --llm{hint}", passing=True
            ) from None
        except library.APIStatusError as error:
            raise self._refusal(error) from None
        except library.OpenAIError as error:
            raise Unavailable(f"{self._endpoint.url}: {self._safe(str(error))}") from None
        return self._reply(body, request, time.monotonic() - begin)

    def _arguments(self, request: ChatRequest, form: Form) -> dict[str, Any]:
        """The arguments of the client's call. ``form``: how the answer's form is demanded."""
        messages = [message._asdict() for message in request.messages]
        arguments: dict[str, Any] = {"model": self._endpoint.model, "messages": messages}
        arguments[self._limit] = self._tokens
        if self._stream:
            arguments |= {"stream": True, "stream_options": {"include_usage": True}}
        if self._endpoint.reasoning_effort:
            arguments["reasoning_effort"] = self._endpoint.reasoning_effort
        if self._endpoint.extra_body:
            arguments["extra_body"] = dict(self._endpoint.extra_body)
        if self._endpoint.temperature is not None:
            arguments["temperature"] = self._endpoint.temperature
        if form == "schema":
            named = {"name": "proposals", "schema": request.schema}
            arguments["response_format"] = {"type": "json_schema", "json_schema": named}
        elif form == "object":
            arguments["response_format"] = {"type": "json_object"}
        return arguments

    def _body(self, response: Any, deadline: float) -> bytes:
        """The response's bytes. Raises Unavailable if they are too many, or not complete at ``deadline``.

        ``deadline``: seconds of time.monotonic().
        """
        body = bytearray()
        try:
            for part in response.iter_bytes():
                body += part
                frames = FRAME_BYTES * self._tokens if body.startswith(b"data:") else 0
                if len(body) > (most := MAX_BYTES + frames):
                    raise Unavailable(f"{self._endpoint.url}: the answer is longer than {most} bytes")
                if time.monotonic() > deadline:
                    raise self._timeout("no whole answer")
        except Unavailable:
            raise
        except Exception as error:  # an error of the HTTP library, whose class depends on the client's version
            raise Unavailable(f"{self._endpoint.url}: the answer broke off: {type(error).__name__}") from None
        return bytes(body)

    def _refusal(self, error: openai.APIStatusError) -> Unavailable:
        """The error for a response with a failure status, with a hint what to do."""
        status = error.status_code
        if status in (400, 422) and (change := self._adapt(error.message)):
            return Unavailable(f"{self._endpoint.url} wants {change}", status, passing=True)
        message = error.message.removeprefix(f"Error code: {status} - ")
        words = f"{message} {error.code or ''} {error.type or ''}"  # some servers name the reason in code or type alone
        symptom = next((item for item in SYMPTOMS if status in (400, RATE_LIMIT) and item.words.search(words)), None)
        hint = symptom.hint if symptom else HINTS.get(status, "")
        text = f"{self._endpoint.url} answers {status}: {self._safe(message)}{f'; {hint}' if hint else ''}"
        seconds = retry_after(error.response.headers, time.time())
        for_good = symptom.for_good if symptom else status in PERMANENT
        passing = status in TRANSIENT and symptom is None
        return Unavailable(text, status, for_good, passing, seconds, understood=symptom is not None)

    def _adapt(self, message: str) -> str:
        """Changes the arguments of further requests as a server's refusal demands. Returns what the server wants; empty
        if nothing was changed."""
        if "max_completion_tokens" in message and self._limit == "max_tokens":
            self._limit = "max_completion_tokens"  # newer models of some servers accept only this name
            return self._limit
        if self._stream and re.search(r"\bstream", message):
            self._stream = False
            return "no stream"
        if TOO_LONG.search(message) and self._tokens >= 4 * FEWEST_TOKENS:
            self._tokens //= 4
            return f"at most {self._tokens} tokens of an answer"
        return ""

    def _timeout(self, what: str) -> Unavailable:
        """The error that something did not come in time."""
        seconds = f"{self._endpoint.seconds:g} s"
        return Unavailable(f"{what} from {self._endpoint.url} within {seconds}; llm.seconds in --settings allows more")

    def _safe(self, text: str) -> str:
        """A server's message in one line, without the key, which some servers repeat."""
        key = self._endpoint.key
        return " ".join((text.replace(key, "***") if key else text).split())[:LONGEST_ERROR]

    def _reply(self, body: bytes, request: ChatRequest, seconds: float) -> Reply:
        """The reply in the body of an answer, which took ``seconds``. Raises Unavailable for an error of the server."""
        try:
            answer = completions.read(body)
        except completions.ServerError as error:
            text = f"{self._endpoint.url} answers: {self._safe(str(error))}"
            raise Unavailable(text, error.status, error.status in PERMANENT, error.status in TRANSIENT) from None
        except ValueError:
            begin = self._safe(body[:4096].decode(errors="replace"))[:60]
            raise Unavailable(
                f"{self._endpoint.url}: the answer is no chat completion, it begins {begin!r}; check the URL of --llm"
            ) from None
        prompt_tokens = sum(tokens(message.content) for message in request.messages)
        tokens_in, tokens_out = answer.counts or (prompt_tokens, tokens(answer.text + answer.reasoning))
        return Reply(
            text=answer.text,
            reasoning=answer.reasoning,
            refusal=answer.refusal or ("by a filter" if answer.finish == "content_filter" else ""),
            cut_off=answer.finish == "length",
            tokens_in=tokens_in,
            tokens_out=tokens_out,
            cost=self._endpoint.cost(tokens_in, tokens_out),
            estimated=answer.counts is None,
            seconds=round(seconds, 3),
            model=answer.model,
        )


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """The seconds that a response's header ``Retry-After`` asks for, at most ``LATEST_RETRY``; None if it has none.

    The header has a number of seconds or a date. ``now``: the time in seconds since the epoch.
    """
    value = headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now
        except (ValueError, OverflowError):  # OverflowError: the year exceeds what integers hold
            return None
    return min(max(seconds, 0.0), LATEST_RETRY) if math.isfinite(seconds) else None
