"""Exchanges with a language model, over the network or from a transcript; their cost and their failures.

``ServerWire`` makes one exchange with the ``openai`` library, bounded in time and bytes. ``RecordingWire`` stores every
exchange, failed ones too; ``ReplayWire`` answers from such a file only. ``Chat`` uses one of them, repeats an exchange
after a transient failure, and falls back to a plainer form of response where the server rejects a schema.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from pydantic import TypeAdapter, ValidationError

from cudal2gen import results
from cudal2gen.errors import WrongInput, reading
from cudal2gen.kernel import Problem, explain
from cudal2gen.tuner.memory import tokens
from cudal2gen.tuner.proposal import MissingLibrary

if TYPE_CHECKING:
    import openai

KEY = "CUDAL2GEN_LLM_KEY"  # the variable of the key; never OPENAI_API_KEY, which belongs to one particular server
Form = Literal["schema", "object", "text"]
FORMS: tuple[Form, ...] = ("schema", "object", "text")  # response_format json_schema, json_object, or none
NOT_UNDERSTOOD = (400, 415, 422, 501)  # a server's status for an unknown response_format
HOPELESS = (401, 402, 403, 404)
TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504, 529)
PAUSES = (1.0, 4.0)  # seconds before each repetition after a transient failure
MOST_BYTES = 1 << 20  # of an answer
LONGEST_ERROR = 400  # characters of a server's message


class Message(NamedTuple):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class Request(NamedTuple):
    """A conversation, and the JSON schema of its answer."""

    messages: tuple[Message, ...]
    schema: dict[str, Any]

    @property
    def digest(self) -> str:
        """A hash of conversation and schema, independent of server and form."""
        text = json.dumps([list(map(list, self.messages)), self.schema], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class Reply(results.Line):
    """An answer. ``cost``: in the prices' currency. ``estimated``: token counts are estimates, the server sent none."""

    text: str = ""
    refusal: str = ""
    cut_off: bool = False
    tokens_in: int = 0
    tokens_out: int = 0
    cost: float = 0.0
    estimated: bool = False
    seconds: float = 0.0
    model: str = ""


class Unavailable(RuntimeError):
    """No answer. ``status``: of HTTP, 0 without a response. ``for_good``: permanent; ``passing``: transient."""

    def __init__(self, message: str, status: int = 0, for_good: bool = False, passing: bool = False) -> None:
        super().__init__(message)
        self.status, self.for_good, self.passing = status, for_good, passing


class Wire(Protocol):
    """Makes one exchange."""

    def send(self, request: Request, form: Form, problem: Problem) -> Reply:
        """The answer. Raises Unavailable, and no other error, where there is none."""
        ...


@dataclass(frozen=True)
class Endpoint:
    """A server and a model. ``seconds``: for a whole exchange. Prices: per million tokens, in any currency."""

    url: str
    model: str
    key: str = ""
    seconds: float = 120.0
    max_tokens: int = 4096
    temperature: float | None = None
    price_in: float = 0.0
    price_out: float = 0.0

    @classmethod
    def from_environment(cls, url: str, model: str, variable: str = KEY, **options: Any) -> Endpoint:
        """With the key in an environment variable, which a local server may not need."""
        return cls(url, model, os.environ.get(variable, ""), **options)

    def cost(self, tokens_in: int, tokens_out: int) -> float:
        """The cost of one exchange."""
        return (tokens_in * self.price_in + tokens_out * self.price_out) / 1e6


class ServerWire:
    """Exchanges over the network. Its constructor raises MissingLibrary without the ``openai`` library."""

    def __init__(self, endpoint: Endpoint) -> None:
        try:
            import openai
        except ImportError:
            raise MissingLibrary("proposer llm needs the openai library: pip install 'cudal2gen[llm]'") from None
        self._endpoint, self._library = endpoint, openai
        # max_retries=0: Chat repeats exchanges, so the transcript has each one. api_key="none": without an argument the
        # library would send OPENAI_API_KEY, another server's key, to this server.
        self._client = openai.OpenAI(
            base_url=endpoint.url, api_key=endpoint.key or "none", timeout=endpoint.seconds, max_retries=0
        )
        self._limit = "max_tokens"

    def send(self, request: Request, form: Form, problem: Problem) -> Reply:  # noqa: ARG002
        """See ``Wire``."""
        begin = time.monotonic()
        library = self._library
        try:
            # Streaming bytes lets _body stop at its limits of time and size if a server is slow or endless.
            with self._client.with_streaming_response.chat.completions.create(
                **self._arguments(request, form)
            ) as response:
                body = self._body(response, begin + self._endpoint.seconds)
        except library.APITimeoutError:
            raise Unavailable(f"no answer from {self._endpoint.url} within {self._endpoint.seconds:g} s") from None
        except library.APIConnectionError as error:
            reason = self._safe(str(error.__cause__ or error))
            raise Unavailable(f"{self._endpoint.url} cannot be reached: {reason}", passing=True) from None
        except library.APIStatusError as error:
            raise self._refused(error) from None
        except library.OpenAIError as error:
            raise Unavailable(f"{self._endpoint.url}: {self._safe(str(error))}") from None
        return self._reply(body, request, time.monotonic() - begin)

    def _arguments(self, request: Request, form: Form) -> dict[str, Any]:
        messages = [message._asdict() for message in request.messages]
        arguments: dict[str, Any] = {"model": self._endpoint.model, "messages": messages}
        arguments[self._limit] = self._endpoint.max_tokens
        if self._endpoint.temperature is not None:
            arguments["temperature"] = self._endpoint.temperature
        if form == "schema":
            named = {"name": "proposals", "schema": request.schema}
            arguments["response_format"] = {"type": "json_schema", "json_schema": named}
        elif form == "object":
            arguments["response_format"] = {"type": "json_object"}
        return arguments

    def _body(self, response: Any, deadline: float) -> bytes:
        body = bytearray()
        try:
            for part in response.iter_bytes():
                body += part
                if len(body) > MOST_BYTES:
                    raise Unavailable(f"{self._endpoint.url}: the answer is longer than {MOST_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise Unavailable(f"no whole answer from {self._endpoint.url} in {self._endpoint.seconds:g} s")
        except Unavailable:
            raise
        except Exception as error:  # of the HTTP library; its class depends on the client's version
            raise Unavailable(f"{self._endpoint.url}: the answer broke off: {type(error).__name__}") from None
        return bytes(body)

    def _refused(self, error: openai.APIStatusError) -> Unavailable:
        status = error.status_code
        if status == 400 and "max_completion_tokens" in error.message and self._limit == "max_tokens":
            # Newer models of some servers accept only the limit's new name.
            self._limit = "max_completion_tokens"
            return Unavailable(f"{self._endpoint.url} wants max_completion_tokens", status, passing=True)
        text = f"{self._endpoint.url} answers {status}: {self._safe(error.message)}"
        return Unavailable(text, status, for_good=status in HOPELESS, passing=status in TRANSIENT)

    def _safe(self, text: str) -> str:
        """A server's message in one line without the key, which some servers repeat."""
        key = self._endpoint.key
        return " ".join((text.replace(key, "***") if key else text).split())[:LONGEST_ERROR]

    def _reply(self, body: bytes, request: Request, seconds: float) -> Reply:
        from openai.types.chat import ChatCompletion

        try:
            answer = ChatCompletion.model_validate_json(body)
            choice = answer.choices[0]
        except (ValidationError, IndexError, RecursionError):
            raise Unavailable(f"{self._endpoint.url}: the answer is no chat completion; check --llm-url") from None
        text, usage = choice.message.content or "", answer.usage
        prompt_tokens = sum(tokens(message.content) for message in request.messages)
        tokens_in, tokens_out = (
            (usage.prompt_tokens, usage.completion_tokens) if usage else (prompt_tokens, tokens(text))
        )
        refusal = choice.message.refusal or ("by a filter" if choice.finish_reason == "content_filter" else "")
        return Reply(
            text=text,
            refusal=refusal,
            cut_off=choice.finish_reason == "length",
            tokens_in=tokens_in,
            tokens_out=tokens_out,
            cost=self._endpoint.cost(tokens_in, tokens_out),
            estimated=usage is None,
            seconds=round(seconds, 3),
            model=answer.model,
        )


class Exchange(Reply):
    """A line of a transcript: a reply, or ``error`` without one, with its question and form."""

    kind: Literal["exchange"] = "exchange"
    digest: str
    problem: str
    form: Form
    messages: tuple[Message, ...]
    error: str = ""
    status: int = 0
    for_good: bool = False
    passing: bool = False

    @property
    def reply(self) -> Reply:
        """The answer. Raises Unavailable as the exchange did."""
        if self.error:
            raise Unavailable(self.error, self.status, self.for_good, self.passing)
        return Reply(**self.model_dump(include=set(Reply.model_fields)))


class RecordingWire:
    """A wire that appends every exchange to a file before it returns. Raises OSError."""

    def __init__(self, wire: Wire, path: Path) -> None:
        self._wire, self._path = wire, path

    def send(self, request: Request, form: Form, problem: Problem) -> Reply:
        """See ``Wire``."""
        place = problem.title
        question: dict[str, Any] = {
            "digest": request.digest,
            "problem": place,
            "form": form,
            "messages": request.messages,
        }
        try:
            reply = self._wire.send(request, form, problem)
        except Unavailable as error:
            failed = {name: getattr(error, name) for name in ("status", "for_good", "passing")}
            results.append([Exchange(**question, error=str(error) or "no answer", **failed)], self._path)
            raise
        results.append([Exchange(**question, **reply.model_dump())], self._path)
        return reply


class ReplayWire:
    """A wire that answers from a transcript, with its failures; equal questions in their recorded order.

    Raises WrongInput without the file, and for a line that is no exchange.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._exchanges: dict[tuple[str, Form], deque[Exchange]] = {}
        # Only a line feed ends a line, because answers may contain other line breaks of Unicode. Bytes after the last
        # line feed are from a killed process.
        with reading(path):
            content = path.read_bytes()
        for number, line in enumerate(content.split(b"\n")[:-1], 1):
            try:
                exchange = TypeAdapter(Exchange).validate_json(line)
            except ValidationError as error:
                raise WrongInput(f"{path}:{number}: {explain(error)}; no exchange of --llm-transcript") from None
            self._exchanges.setdefault((exchange.digest, exchange.form), deque()).append(exchange)

    def send(self, request: Request, form: Form, problem: Problem) -> Reply:
        """See ``Wire``. Raises Unavailable for a question that is not in the transcript."""
        exchanges = self._exchanges.get((request.digest, form))
        if not exchanges:
            raise Unavailable(f"{self._path} has no answer to this question on {problem.mnk}, or no further one")
        return exchanges.popleft().reply


@dataclass
class Usage:
    """Sums over the exchanges so far."""

    exchanges: int = 0
    failed: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    cost: float = 0.0

    def __str__(self) -> str:
        exchanges = f"{self.exchanges} exchanges" + (f", {self.failed} of them failed" if self.failed else "")
        cost = f", cost {self.cost:.4f}" if self.cost else ""
        return f"{exchanges}, {self.tokens_in} tokens in, {self.tokens_out} out{cost}"


class Chat:
    """Asks a wire. After a server rejects a form of response, all further questions use a plainer one."""

    def __init__(self, wire: Wire, pause: Callable[[float], None] = time.sleep) -> None:
        self._wire, self._pause = wire, pause
        self._forms = FORMS
        self.usage = Usage()

    def ask(self, request: Request, problem: Problem) -> Reply:
        """An answer. Raises Unavailable where the plainest form fails too."""
        for form in self._forms:
            try:
                reply = self._patiently(request, form, problem)
            except Unavailable as error:
                if error.status not in NOT_UNDERSTOOD or form == FORMS[-1]:
                    raise
            else:
                self._forms = self._forms[self._forms.index(form) :]
                return reply
        raise AssertionError("the last form either answers or raises")

    def _patiently(self, request: Request, form: Form, problem: Problem) -> Reply:
        for pause in (*PAUSES, None):
            try:
                return self._send_counted(request, form, problem)
            except Unavailable as error:
                if pause is None or not error.passing:
                    raise
                self._pause(pause)
        raise AssertionError("the last try either answers or raises")

    def _send_counted(self, request: Request, form: Form, problem: Problem) -> Reply:
        self.usage.exchanges += 1
        try:
            reply = self._wire.send(request, form, problem)
        except Unavailable:
            self.usage.failed += 1
            raise
        self.usage.tokens_in += reply.tokens_in
        self.usage.tokens_out += reply.tokens_out
        self.usage.cost += reply.cost
        return reply


def connect(endpoint: Endpoint | None, transcript: Path | None = None, replay: Path | None = None) -> Chat:
    """The chat of a command line. Raises WrongInput, MissingLibrary."""
    if replay is not None:
        return Chat(ReplayWire(replay), pause=lambda _: None)
    if endpoint is None or not endpoint.url or not endpoint.model:
        raise WrongInput("proposer llm needs --llm-url and --llm-model, or --llm-replay FILE")
    wire: Wire = ServerWire(endpoint)
    return Chat(RecordingWire(wire, transcript) if transcript else wire)
