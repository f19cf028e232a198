"""Asks a language model over the network or from a transcript, and handles failures and the budget of tokens.

``Chat`` sends questions to a ``Wire``: a ``server``, or a ``ReplayWire``, which answers from a transcript. After a
transient failure it retries. If the server rejects a response format, it uses a simpler one. After a failure it backs
off, longer after each further failure, but never for good. Every exchange is a line of a ``transcript``, from which a
restarted run continues.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cudal2gen import results
from cudal2gen.kernel import Fields, Problem
from cudal2gen.tuner.curriculum import Stage, stage_of
from cudal2gen.tuner.language_model import transcript
from cudal2gen.tuner.language_model.server import LATEST_RETRY, RATE_LIMIT, Endpoint, ServerWire
from cudal2gen.tuner.language_model.transcript import (
    FORMS,
    AnswerOutcome,
    ChatRequest,
    Exchange,
    Form,
    History,
    NotSent,
    Reply,
    State,
    Unavailable,
    Usage,
    answer_key,
)
from cudal2gen.tuner.memory import tokens
from kernelproof.ground.errors import WrongInput

FORMAT_ERRORS = (400, 415, 422, 501)  # the statuses with which servers reject an unknown response_format
OVERLOAD = (RATE_LIMIT, 502, 503, 504, 529)  # a rate limit, or an overloaded or restarting server: it passes
PAUSES = (1.0, 4.0)  # seconds before each retry after a transient failure
LONGEST_PAUSE = 20.0  # most seconds before a retry; if a server asks for more, the chat backs off instead
# A back-off lasts as long as the failure took, at least MIN_BACKOFF_S, and twice as long after each further failure in
# a row, at most MAX_BACKOFF_S. A failure within QUICK_FAILURE_S is cheap, so the back-off after it also ends when 1, 2,
# 4, .. questions, at most MAX_SKIPPED, have been skipped.
MIN_BACKOFF_S, MAX_BACKOFF_S, QUICK_FAILURE_S, MAX_SKIPPED = 1.0, 600.0, 1.0, 4
STEP_S = 1.0  # longest wait, in seconds, before ``stop`` is checked again


class Wire(Protocol):
    """Makes one exchange. ``live``: whether it is with a server, for which a chat waits and backs off."""

    @property
    def live(self) -> bool: ...

    def send(self, request: ChatRequest, form: Form, problem: Problem) -> Reply:
        """The answer. Raises Unavailable, and no other error, if there is none."""
        ...


class ReplayWire:
    """Answers from a transcript, failures included. Equal questions get their answers in the recorded order.

    Raises WrongInput if the file is missing or has a line that is not a transcript's.
    """

    live = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._exchanges: dict[tuple[str, Form], deque[Exchange]] = {}
        for line in transcript.read(path):
            if isinstance(line, Exchange):
                self._exchanges.setdefault((line.digest, line.form), deque()).append(line)

    def send(self, request: ChatRequest, form: Form, problem: Problem) -> Reply:
        """See ``Wire``. Raises Unavailable for a question that is not in the transcript."""
        exchanges = self._exchanges.get((request.digest, form))
        if not exchanges:
            raise Unavailable(f"{self._path} has no answer to this question on {problem.mnk}, or no further one")
        return exchanges.popleft().reply


@dataclass
class Chat:
    """Sends questions to a wire. Several threads may use one chat.

    - ``path``: the transcript to which every exchange is added before its answer is used, under the name ``run``.
    - ``history``: what earlier starts of the run left in the transcript. A stored answer that was not used is returned
      for its question, and nothing is sent.
    - ``budget``: most tokens of the run, in and out; ``problem_budget``: most tokens of one problem. A question that
      would exceed one of them is not sent.
    - ``pause`` waits for a number of seconds, ``clock`` gives the time in seconds; tests replace them.

    After a server rejects a response format, all further questions use a simpler one. After a failure the chat backs
    off, longer each time up to ``MAX_BACKOFF_S`` seconds, or until the time that the server names. Questions during a
    back-off raise NotSent; a caller that has no other work calls ``wait_for_server``. Until an exchange succeeds again,
    each question is tried only once.
    """

    wire: Wire
    path: Path | None = None
    budget: int | None = None
    pause: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    run: str = ""
    history: History = field(default_factory=History)
    problem_budget: int | None = None
    failure: Unavailable | None = None  # the last one since an answer
    _forms: tuple[Form, ...] = FORMS
    _failures: int = 0  # since an answer
    _backoff_end: float = -math.inf
    _skips: float = 0.0  # most further questions that the present back-off skips
    _limited: bool = False  # whether the last failure was a rate limit or an overload, which pass
    _failing_since: float = 0.0  # the time of the first failure since an answer
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def ask(self, request: ChatRequest, problem: Problem) -> Reply:
        """The answer. Raises NotSent; Unavailable if no response format gets an answer; OSError of the transcript."""
        if recorded := self.history.unused(request.digest):
            return recorded.reply
        self._check(request, problem)
        begin = self.clock()
        try:
            reply = self._send_in_some_form(request, problem)
        except NotSent:
            raise
        except Unavailable as error:
            self._back_off(error, self.clock() - begin)
            raise
        with self._lock:
            self._failures, self._backoff_end, self._limited, self.failure = 0, -math.inf, False, None
        return reply

    @property
    def usage(self) -> Usage:
        """Tokens and cost of all exchanges of the run, including its earlier starts."""
        return self.history.usage

    def wait_for_server(self, stop: Callable[[], bool], announce: Callable[[float], None]) -> bool:
        """Waits for the end of a back-off that a rate limit or an overload caused. Returns whether to ask again now.

        Returns False without waiting after any other failure, and if the back-off ends more than ``LATEST_RETRY``
        seconds after the first failure since an answer. Also returns False if ``stop`` ends the wait. ``announce``
        receives the number of seconds before the wait begins. A replay does not wait: it returns once whether the last
        recorded failure was a rate limit or an overload, since the recorded run asked again then.
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
        self, request: ChatRequest, reply: Reply, problem: Problem, proposals: Sequence[Fields] = (), *,
        stage: Stage | None = None, reward: float | None = None, fault: str = "", right: bool | None = None,
    ) -> None:  # fmt: skip
        """Adds the outcome of an answer to the transcript, if the chat has one. ``stage``: by default the problem's.
        The other arguments are fields of ``AnswerOutcome``."""
        key = answer_key(request.digest, reply.text)
        self.history.conclude(key)
        outcome = AnswerOutcome(
            run=self.run,
            exchange=key,
            problem=problem.model_dump(mode="json"),
            stage=stage or stage_of(problem),
            proposals=tuple(proposals),
            reward=reward,
            fault=fault,
            right=right,
        )
        self._record(outcome)

    def keep(self, problem: Problem, of: str, content: Fields) -> None:
        """Adds a ``State`` to the transcript, if there is a transcript. ``of`` names what ``content`` describes."""
        self._record(State(run=self.run, problem=problem.title, of=of, content=content))

    def _check(self, request: ChatRequest, problem: Problem) -> None:
        """Raises NotSent during a back-off, and if the question would exceed the budget."""
        if not self.wire.live:
            return
        reason, is_spent = "", False
        size = sum(tokens(message.content) for message in request.messages)
        if self.budget is not None and self.usage.tokens + size > self.budget:
            is_spent = True
            reason = (
                f"the budget of {self.budget} tokens is spent{', earlier starts included' * bool(self.usage.earlier)}, "
                "so nothing more is asked; raise llm.token_budget in --settings, or begin another run by --seed"
            )
        elif self.problem_budget is not None and self.history.spent[problem.title] + size > self.problem_budget:
            is_spent = True
            reason = (
                f"{problem.title}: its {self.problem_budget} tokens are spent; raise llm.problem_tokens in --settings"
            )
        elif self._is_backing_off():
            reason = "the model is not asked for a while after a failure"
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
            raise NotSent(reason, for_good=is_spent, retry_after=None if is_spent else self._backoff_end - self.clock())

    def _send_in_some_form(self, request: ChatRequest, problem: Problem) -> Reply:
        """Tries the response formats in their order, and remembers the first that the server accepts."""
        for form in self._forms:
            try:
                reply = self._send_with_retries(request, form, problem)
            except Unavailable as error:
                if error.status not in FORMAT_ERRORS or error.understood or form == FORMS[-1]:
                    raise
            else:
                self._forms = FORMS[FORMS.index(form) :]
                return reply
        raise AssertionError("the last form either answers or raises")

    def _send_with_retries(self, request: ChatRequest, form: Form, problem: Problem) -> Reply:
        """Sends a question again after each of ``PAUSES`` while the failure is transient; after other questions have
        failed, only once."""
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

    def _send(self, request: ChatRequest, form: Form, problem: Problem) -> Reply:
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
        except NotSent as error:
            self._record(Exchange(**question | {"messages": ()}, error=str(error), for_good=error.for_good))
            raise
        except Unavailable as error:
            details = {name: getattr(error, name) for name in ("status", "for_good", "passing", "retry_after")}
            cost = self._cost_of_lost(request, error)
            self._count(Exchange(**question, error=str(error) or "no answer", **details | cost))
            raise
        except SystemExit:
            self._count(Exchange(**question, error="interrupted", **self._cost_of_lost(request)))
            raise
        self._count(Exchange(**question, **reply.model_dump()))
        return reply

    @staticmethod
    def _cost_of_lost(request: ChatRequest, error: Unavailable | None = None) -> Fields:
        """The estimated cost of an exchange that broke off after the server had begun: the tokens of its prompt. Empty
        if the server refused the question or could not be reached."""
        if error is not None and (error.status or error.passing):
            return {}
        return {"tokens_in": sum(tokens(message.content) for message in request.messages), "estimated": True}

    def _count(self, exchange: Exchange) -> None:
        """Counts and stores an exchange, before its answer is used."""
        with self._lock:
            self.history.count(exchange)
        self._record(exchange)

    def _record(self, line: transcript.Line) -> None:
        """Adds a line to the transcript, if there is one."""
        if self.path is not None:
            results.append([line], self.path)

    def _is_backing_off(self) -> bool:
        """Whether to skip a question because of a back-off; counts the skipped question."""
        with self._lock:
            is_backing_off = self._skips > 0 and self.clock() < self._backoff_end
            self._skips -= is_backing_off
            return is_backing_off

    def _back_off(self, error: Unavailable, duration_s: float) -> None:
        """Begins a back-off after a failure that took ``duration_s`` seconds."""
        self._limited = not error.for_good and (error.retry_after is not None or error.status in OVERLOAD)
        self.failure = error
        if not self.wire.live:
            return
        with self._lock:
            self._failures += 1
            if self._failures == 1:
                self._failing_since = self.clock()
            if error.status in FORMAT_ERRORS and self._failures == 1:
                return  # perhaps only this question was too long
            factor = 2.0 ** min(self._failures - 1, 30)  # the limit only prevents an overflow
            seconds = error.retry_after or min(max(MIN_BACKOFF_S, duration_s) * factor, MAX_BACKOFF_S)
            quick = duration_s < QUICK_FAILURE_S and not error.retry_after
            self._skips = min(factor, MAX_SKIPPED) if quick else math.inf
            self._backoff_end = self.clock() + seconds
            error.retry_after = seconds


def connect(
    endpoint: Endpoint | None, path: Path | None = None, replay: Path | None = None, budget: int | None = None,
    run: str = "", problem_budget: int | None = None,
) -> Chat:  # fmt: skip
    """The chat of a command line: with the endpoint's server, or with the transcript ``replay``.

    ``path``: the transcript to write; a ``run`` with a name continues from its earlier starts there. ``budget`` and
    ``problem_budget``: most tokens of the run, and of each problem. Raises WrongInput without a server, MissingLibrary
    without the openai library.
    """
    if replay is not None:
        return Chat(ReplayWire(replay))
    if endpoint is None or not endpoint.url or not endpoint.model:
        raise WrongInput("a language model needs --llm NAME@URL, or llm.replay in --settings")
    if not endpoint.url.startswith(("http://", "https://")):
        raise WrongInput(f"--llm {endpoint.model}@{endpoint.url}: the URL must begin with http:// or https://")
    return Chat(
        ServerWire(endpoint), path, budget, problem_budget=problem_budget, run=run, history=History.of(path, run)
    )
