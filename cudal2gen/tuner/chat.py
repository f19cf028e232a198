"""Exchanges with a language model, over the network or from a transcript; their cost and their failures.

``ServerWire`` makes one exchange with the ``openai`` library, bounded in time and bytes; ``ReplayWire`` answers from a
transcript only. ``Chat`` uses one of them, repeats an exchange after a transient failure, falls back to a plainer form
of response where the server rejects a schema, and rests after a failure: longer each time, never for good.
Every exchange is a line of a ``transcript``, from which a restarted run goes on.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from cudal2gen import results
from cudal2gen.kernel import Fields, Problem
from cudal2gen.tuner import completions, transcript
from cudal2gen.tuner.curriculum import Stage, stage
from cudal2gen.tuner.memory import tokens
from cudal2gen.tuner.transcript import (
    FORMS,
    Exchange,
    Form,
    History,
    Outcome,
    Reply,
    Request,
    State,
    Unasked,
    Unavailable,
    Usage,
    answer_key,
)
from kernelproof.ground.errors import MissingLibrary, WrongInput

if TYPE_CHECKING:
    import openai

KEY = "CUDAL2GEN_LLM_KEY"  # the variable of the key; never OPENAI_API_KEY, which belongs to one particular server
NOT_UNDERSTOOD = (400, 415, 422, 501)  # a server's status for an unknown response_format
RATE_LIMIT = 429
RESTING = (RATE_LIMIT, 502, 503, 504, 529)  # a limit, or an overloaded or restarting server: worth waiting for
HOPELESS = (401, 402, 403, 404)
TRANSIENT = (408, 409, 425, RATE_LIMIT, 500, 502, 503, 504, 529)
PAUSES = (1.0, 4.0)  # seconds before each repetition after a transient failure
LONGEST_PAUSE = 20.0  # most seconds that a server may ask for before a repetition; for more, the model rests
# After a failure the model rests as long as the failure took, at least MIN_BACKOFF_S seconds, and twice as long after
# each further failure in a row, at most MAX_BACKOFF_S. A failure within QUICK_FAILURE_S is cheap: after it the rest
# also ends when MAX_SKIPPED questions, or fewer, were skipped.
MIN_BACKOFF_S, MAX_BACKOFF_S, QUICK_FAILURE_S, MAX_SKIPPED = 1.0, 600.0, 1.0, 4
LATEST_RETRY = 3600.0  # most seconds that a server's own request for time is honoured
STEP_S = 1.0  # seconds between looks while waiting for the end of a rest
MAX_BYTES = 1 << 20  # most bytes of an answer
KEY_HINT = "set its key in the variable CUDAL2GEN_LLM_KEY, or name another one by --llm-key"
HINTS = {401: KEY_HINT, 403: KEY_HINT, 404: "look at --llm-url, which mostly ends in /v1, and at --llm-model"}


class Symptom(NamedTuple):
    """A refusal that servers tell by words and not by status. ``for_good``: every other question would meet it."""

    words: re.Pattern[str]
    hint: str
    for_good: bool


SYMPTOMS = (
    Symptom(
        re.compile(r"insufficient_quota|exceeded your current quota|credit balance", re.I),
        "add credit, or set another key",
        True,
    ),
    Symptom(re.compile(r"\btemperature\b", re.I), "leave --llm-temperature out for this model", True),
    Symptom(
        re.compile(r"context[ _](?:length|size|window)|maximum context|prompt is too long", re.I),
        "serve the model with a longer context, or lower --llm-max-tokens, which counts towards it",
        False,
    ),
    Symptom(
        re.compile(r"content[ _](?:filter|management|policy)", re.I),
        "the server's filter refuses the question: ask another model or server",
        False,
    ),
)
LONGEST_ERROR = 400  # characters of a server's message


class Wire(Protocol):
    """Makes one exchange. ``live``: with a server, which rests after failures; a transcript has its rests."""

    @property
    def live(self) -> bool: ...

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
    max_tokens: int = 8192
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

    live = True

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
            raise self._too_late("no answer") from None
        except library.APIConnectionError as error:
            reason = self._safe(str(error.__cause__ or error))
            hint = " (http or https?); SSL_CERT_FILE names certificates of your own" if "SSL" in reason else ""
            raise Unavailable(
                f"{self._endpoint.url} cannot be reached: {reason}; look at --llm-url{hint}", passing=True
            ) from None
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
                if len(body) > MAX_BYTES:
                    raise Unavailable(f"{self._endpoint.url}: the answer is longer than {MAX_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise self._too_late("no whole answer")
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
        message = error.message.removeprefix(f"Error code: {status} - ")
        named = f"{message} {error.code or ''} {error.type or ''}"  # what kind it is may stand beside the message
        symptom = next((item for item in SYMPTOMS if status in (400, RATE_LIMIT) and item.words.search(named)), None)
        hint = symptom.hint if symptom else HINTS.get(status, "")
        text = f"{self._endpoint.url} answers {status}: {self._safe(message)}{f'; {hint}' if hint else ''}"
        seconds = retry_after(error.response.headers, time.time())
        for_good = symptom.for_good if symptom else status in HOPELESS
        passing = status in TRANSIENT and symptom is None
        return Unavailable(text, status, for_good, passing, seconds, understood=symptom is not None)

    def _too_late(self, what: str) -> Unavailable:
        seconds = f"{self._endpoint.seconds:g} s"
        return Unavailable(f"{what} from {self._endpoint.url} within {seconds}; --llm-timeout SECONDS allows more")

    def _safe(self, text: str) -> str:
        """A server's message in one line without the key, which some servers repeat."""
        key = self._endpoint.key
        return " ".join((text.replace(key, "***") if key else text).split())[:LONGEST_ERROR]

    def _reply(self, body: bytes, request: Request, seconds: float) -> Reply:
        try:
            answer = completions.read(body)
        except completions.ServerError as error:
            text = f"{self._endpoint.url} answers: {self._safe(str(error))}"
            raise Unavailable(text, error.status, error.status in HOPELESS, error.status in TRANSIENT) from None
        except ValueError:
            begin = self._safe(body[:4096].decode(errors="replace"))[:60]
            raise Unavailable(
                f"{self._endpoint.url}: the answer is no chat completion, it begins {begin!r}; check --llm-url"
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
    """Seconds until a server wants to be asked again, by its header ``Retry-After``: a number, or a date of HTTP.

    ``now``: seconds of the epoch. None without a header that can be read; at most ``LATEST_RETRY``.
    """
    value = headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now
        except (ValueError, OverflowError):  # the latter for a year beyond what integers hold
            return None
    return min(max(seconds, 0.0), LATEST_RETRY) if math.isfinite(seconds) else None


class ReplayWire:
    """A wire that answers from a transcript, with its failures; equal questions in their recorded order.

    Raises WrongInput without the file, and for a line that is none of a transcript.
    """

    live = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._exchanges: dict[tuple[str, Form], deque[Exchange]] = {}
        for line in transcript.read(path):
            if isinstance(line, Exchange):
                self._exchanges.setdefault((line.digest, line.form), deque()).append(line)

    def send(self, request: Request, form: Form, problem: Problem) -> Reply:
        """See ``Wire``. Raises Unavailable for a question that is not in the transcript."""
        exchanges = self._exchanges.get((request.digest, form))
        if not exchanges:
            raise Unavailable(f"{self._path} has no answer to this question on {problem.mnk}, or no further one")
        return exchanges.popleft().reply


@dataclass
class Chat:
    """Asks a wire; several threads may. After a server rejects a form of response, all further questions use a plainer
    one. ``path``: the transcript that every exchange is added to before it counts, under the name of the ``run``.
    ``history``: what earlier starts of the run left there; a paid answer that was not used answers its question.
    ``budget``: of the run's tokens, in and out; no question is asked that would begin beyond it. ``pause`` and
    ``clock``: seconds, for tests.

    A failure rests the model for a time that grows to ``MAX_BACKOFF_S`` seconds; a server that names a time is asked
    again then. Questions meanwhile are ``Unasked``; a caller without other work waits with ``wait_for_server``. While
    failures last, each question is tried once.
    """

    wire: Wire
    path: Path | None = None
    budget: int | None = None
    pause: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    run: str = ""
    history: History = field(default_factory=History)
    failure: Unavailable | None = None  # the last one since an answer
    _forms: tuple[Form, ...] = FORMS
    _failures: int = 0
    _backoff_end: float = -math.inf
    _skips: float = 0.0
    _limited: bool = False  # whether the last failure was a limit of the server's, which ends
    _failing_since: float = 0.0
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def ask(self, request: Request, problem: Problem) -> Reply:
        """An answer. Raises Unavailable where the plainest form fails too, Unasked, and OSError of the transcript."""
        if recorded := self.history.unused(request.digest):
            return recorded.reply
        self._check(request, problem)
        begin = self.clock()
        try:
            reply = self._in_some_form(request, problem)
        except Unasked:
            raise
        except Unavailable as error:
            self._back_off(error, self.clock() - begin)
            raise
        with self._lock:
            self._failures, self._backoff_end, self._limited, self.failure = 0, -math.inf, False, None
        return reply

    @property
    def usage(self) -> Usage:
        """Sums over the exchanges of the run, those of earlier starts included."""
        return self.history.usage

    def wait_for_server(self, stop: Callable[[], bool], announce: Callable[[float], None]) -> bool:
        """Waits for the end of a rest that a limit of the server's began; whether there was one. ``announce`` receives
        its seconds first.

        False, at once, for rests after other failures and for one that ends more than ``LATEST_RETRY`` seconds after
        the first failure since an answer; False if ``stop`` ends it. A replay does not wait.
        """
        if not self.wire.live:
            limited, self._limited = self._limited, False
            return limited
        with self._lock:
            end = self._backoff_end
            if not self._limited or self.clock() >= end or end > self._failing_since + LATEST_RETRY:
                return False
        announce(end - self.clock())
        while (seconds_left := end - self.clock()) > 0:
            if stop():
                return False
            self.pause(min(seconds_left, STEP_S))
        return True

    def conclude(
        self, request: Request, reply: Reply, problem: Problem, proposals: Sequence[Fields] = (), *,
        of_stage: Stage | None = None, reward: float | None = None, fault: str = "",
    ) -> None:  # fmt: skip
        """Adds an answer's ``Outcome`` to the transcript, if there is one. ``of_stage``: the problem's if None."""
        key = answer_key(request.digest, reply.text)
        self.history.conclude(key)
        outcome = Outcome(
            run=self.run,
            exchange=key,
            problem=problem.model_dump(mode="json"),
            stage=of_stage or stage(problem),
            proposals=tuple(proposals),
            reward=reward,
            fault=fault,
        )
        self._record(outcome)

    def keep(self, problem: Problem, of: str, content: Fields) -> None:
        """Adds a ``State`` to the transcript, if there is one."""
        self._record(State(run=self.run, problem=problem.title, of=of, content=content))

    def _check(self, request: Request, problem: Problem) -> None:
        """Raises Unasked while the model rests, and where the question would exceed the budget."""
        if not self.wire.live:
            return
        reason, is_spent = "", False
        size = sum(tokens(message.content) for message in request.messages)
        if self.budget is not None and self.usage.tokens + size > self.budget:
            is_spent = True
            reason = (
                f"the budget of {self.budget} tokens is spent{', earlier starts included' * bool(self.usage.earlier)}, "
                "so nothing more is asked; --llm-budget TOKENS raises it, another --seed begins a run with its own"
            )
        elif self._is_backing_off():
            reason = "the model rests after a failure"
        if reason:
            self._record(
                Exchange(
                    run=self.run,
                    digest=request.digest,
                    problem=problem.title,
                    form=self._forms[0],
                    error=reason,
                    for_good=is_spent,
                )
            )
            raise Unasked(reason, for_good=is_spent, retry_after=None if is_spent else self._backoff_end - self.clock())

    def _in_some_form(self, request: Request, problem: Problem) -> Reply:
        for form in self._forms:
            try:
                reply = self._patiently(request, form, problem)
            except Unavailable as error:
                if error.status not in NOT_UNDERSTOOD or error.understood or form == FORMS[-1]:
                    raise
            else:
                self._forms = FORMS[FORMS.index(form) :]
                return reply
        raise AssertionError("the last form either answers or raises")

    def _patiently(self, request: Request, form: Form, problem: Problem) -> Reply:
        for pause in (*PAUSES, None):
            try:
                return self._send(request, form, problem)
            except Unavailable as error:
                seconds = error.retry_after or 0.0
                if pause is None or not error.passing or seconds > LONGEST_PAUSE or self._failures:
                    raise
                if self.wire.live:
                    self.pause(max(pause, seconds))
        raise AssertionError("the last try either answers or raises")

    def _send(self, request: Request, form: Form, problem: Problem) -> Reply:
        """One exchange, counted and recorded."""
        question: dict[str, Any] = {
            "run": self.run,
            "digest": request.digest,
            "problem": problem.title,
            "form": form,
            "messages": request.messages,
        }
        try:
            reply = self.wire.send(request, form, problem)
        except Unasked as error:
            self._record(Exchange(**question | {"messages": ()}, error=str(error), for_good=error.for_good))
            raise
        except Unavailable as error:
            details = {name: getattr(error, name) for name in ("status", "for_good", "passing", "retry_after")}
            self._count(Exchange(**question, error=str(error) or "no answer", **details | self._lost(request, error)))
            raise
        except SystemExit:
            self._count(Exchange(**question, error="interrupted", **self._lost(request)))
            raise
        self._count(Exchange(**question, **reply.model_dump()))
        return reply

    @staticmethod
    def _lost(request: Request, error: Unavailable | None = None) -> Fields:
        """What an exchange cost whose answer was lost after the server had begun with it: its prompt at the least."""
        if error is not None and (error.status or error.passing):
            return {}
        return {"tokens_in": sum(tokens(message.content) for message in request.messages), "estimated": True}

    def _count(self, exchange: Exchange) -> None:
        """An answer is stored before it is used."""
        with self._lock:
            self.usage.add(exchange, failed=bool(exchange.error))
        self._record(exchange)

    def _record(self, line: transcript.Line) -> None:
        if self.path is not None:
            results.append([line], self.path)

    def _is_backing_off(self) -> bool:
        """Whether to skip a question because the model rests; counts the skipped question."""
        with self._lock:
            resting = self._skips > 0 and self.clock() < self._backoff_end
            self._skips -= resting
            return resting

    def _back_off(self, error: Unavailable, duration_s: float) -> None:
        """Begins a rest after a failure that took ``duration_s`` seconds."""
        self._limited = not error.for_good and (error.retry_after is not None or error.status in RESTING)
        self.failure = error
        if not self.wire.live:
            return
        with self._lock:
            self._failures += 1
            if self._failures == 1:
                self._failing_since = self.clock()
            if error.status in NOT_UNDERSTOOD and self._failures == 1:
                return  # perhaps the question was too long; the next one may be shorter
            factor = 2.0 ** min(self._failures - 1, 30)
            seconds = error.retry_after or min(max(MIN_BACKOFF_S, duration_s) * factor, MAX_BACKOFF_S)
            quick = duration_s < QUICK_FAILURE_S and not error.retry_after
            self._skips = min(factor, MAX_SKIPPED) if quick else math.inf
            self._backoff_end = self.clock() + seconds
            error.retry_after = seconds


def connect(
    endpoint: Endpoint | None, path: Path | None = None, replay: Path | None = None, budget: int | None = None,
    run: str = "",
) -> Chat:  # fmt: skip
    """The chat of a command line; a ``run`` with a name goes on from its earlier starts. Raises WrongInput,
    MissingLibrary."""
    if replay is not None:
        return Chat(ReplayWire(replay))
    if endpoint is None or not endpoint.url or not endpoint.model:
        raise WrongInput("a language model needs --llm-url and --llm-model, or --llm-replay FILE")
    if not endpoint.url.startswith(("http://", "https://")):
        raise WrongInput(f"--llm-url {endpoint.url}: must begin with http:// or https://")
    return Chat(ServerWire(endpoint), path, budget, run=run, history=History.of(path, run))
