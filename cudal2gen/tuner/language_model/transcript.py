"""Transcripts of exchanges with a language model: their lines, and what a run takes up from its earlier starts.

A transcript has three kinds of lines. ``Exchange`` is one request with its answer, or with the error in place of one;
``error`` with no ``messages`` is a question that was not asked, because the model rested or its budget was spent.
``Outcome`` says what became of an answer, whose ``Exchange.key`` it names: its ``proposals`` (fields of records, whose
trials have the times), or the ``reward`` itself where an answer is no record. ``tuner.exports`` joins the two.
``State`` is what a session of writing shows a model again after a restart.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from cudal2gen import results
from cudal2gen.kernel import Fields, Problem, explain
from cudal2gen.tuner.curriculum import Stage
from kernelproof.ground.errors import Failure, WrongInput, reading

Form = Literal["schema", "object", "text"]
FORMS: tuple[Form, ...] = ("schema", "object", "text")  # response_format json_schema, json_object, or none


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
    """An answer. ``reasoning``: what the model thought before it, where a server or the text keeps that apart.

    ``cost``: in the prices' currency. ``estimated``: token counts are estimates, the server sent none.
    """

    text: str = ""
    reasoning: str = ""
    refusal: str = ""
    cut_off: bool = False
    tokens_in: int = 0
    tokens_out: int = 0
    cost: float = 0.0
    estimated: bool = False
    seconds: float = 0.0
    model: str = ""


class Unavailable(RuntimeError):
    """No answer. ``status``: of HTTP, 0 without a response. ``for_good``: until somebody mends it; ``passing``:
    transient; ``understood``: another form of response would not help. ``retry_after``: seconds until the server wants
    to be asked again, and from ``Chat.ask`` until it is; None if neither says."""

    def __init__(
        self, message: str, status: int = 0, for_good: bool = False, passing: bool = False,
        retry_after: float | None = None, understood: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.for_good, self.passing, self.retry_after = status, for_good, passing, retry_after
        self.understood = understood

    @property
    def final(self) -> Failure:
        """What ends a command in which nothing but the model is asked."""
        return Failure(f"the model cannot be asked: {self}; then the same command goes on")


class Unasked(Unavailable):
    """No exchange took place: the model rests after a failure, or (``for_good``) its budget of tokens is spent."""


class Exchange(Reply):
    """A line of a transcript: a reply, or ``error`` without one, with its question and form."""

    kind: Literal["exchange"] = "exchange"
    run: str = ""
    digest: str
    problem: str
    form: Form
    messages: tuple[Message, ...] = ()
    error: str = ""
    status: int = 0
    for_good: bool = False
    passing: bool = False
    retry_after: float | None = None

    @property
    def key(self) -> str:
        """A hash of the question and the answer, by which an outcome names its exchange."""
        return answer_key(self.digest, self.text)

    @property
    def reply(self) -> Reply:
        """The answer. Raises Unavailable as the exchange did."""
        if self.error:
            kind = Unavailable if self.messages else Unasked
            raise kind(self.error, self.status, self.for_good, self.passing, self.retry_after)
        return Reply(**self.model_dump(include=set(Reply.model_fields)))


class Outcome(results.Line):
    """A line of a transcript: what became of an answer. ``exchange``: its ``Exchange.key``.

    ``proposals``: decisions of the records that it proposes, and of illegal ones their fields with ``violation``;
    ``fault`` says what was wrong with the rest of it. ``reward``: where the answer is no record. ``problem``: fields.
    """

    kind: Literal["outcome"] = "outcome"
    run: str = ""
    exchange: str
    problem: Fields
    stage: Stage
    proposals: tuple[Fields, ...] = ()
    reward: float | None = None
    fault: str = ""


class State(results.Line):
    """A line of a transcript: what a session of writing on a problem shows a model again after a restart. ``of``: the
    incumbent, whose fields ``content`` has, or a trial, of which it has what the trial lacks."""

    kind: Literal["state"] = "state"
    run: str = ""
    problem: str
    of: str
    content: Fields


Line = Exchange | Outcome | State


def answer_key(digest: str, text: str) -> str:
    """A hash of a question's digest and an answer's text."""
    return hashlib.sha256(f"{digest}\n{text}".encode(errors="surrogatepass")).hexdigest()[:32]


def read(path: Path) -> Iterator[Line]:
    """The lines of a transcript. Raises WrongInput without the file, and for a line of another kind."""
    adapter: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="kind")])
    with reading(path), path.open("rb") as file:
        # Only a line feed ends a line, because answers may contain other line breaks of Unicode. Bytes after the last
        # line feed are from a killed process.
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield adapter.validate_json(line)
            except ValidationError as error:
                raise WrongInput(f"{path}:{number}: {explain(error)}; no line of a transcript") from None


@dataclass
class Usage:
    """Sums over the exchanges of a run so far. ``earlier``: exchanges of its earlier starts, which are in the sums."""

    exchanges: int = 0
    earlier: int = 0
    failed: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    cost: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens in and out."""
        return self.tokens_in + self.tokens_out

    def add(self, reply: Reply, failed: bool = False) -> None:
        """Counts an exchange."""
        self.exchanges += 1
        self.failed += failed
        self.tokens_in += reply.tokens_in
        self.tokens_out += reply.tokens_out
        self.cost += reply.cost

    def __str__(self) -> str:
        exchanges = f"{self.exchanges} exchanges" + (f", {self.failed} of them failed" if self.failed else "")
        exchanges += f", {self.earlier} of them in earlier starts" if self.earlier else ""
        cost = f", cost {self.cost:.4f}" if self.cost else ""
        return f"{exchanges}, {self.tokens_in} tokens in, {self.tokens_out} out{cost}"


class History:
    """What the earlier starts of a run left in a transcript: ``usage``, and answers that were paid.

    An answer without an ``Outcome`` was never used: ``unused`` returns it for the same question. ``answers`` are those
    on a problem in their order; only the last of them has the contents of its messages.
    """

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self.usage = Usage()
        self._answers: dict[str, list[Exchange]] = {}
        self._outcomes: dict[str, list[Outcome]] = {}
        self._states: dict[tuple[str, str], Fields] = {}
        self._unused: dict[str, deque[Exchange]] = {}
        self._concluded: set[str] = set()
        for line in lines:
            if isinstance(line, Exchange):
                self._add(line)
            elif isinstance(line, Outcome):
                self._outcomes.setdefault(Problem.model_validate(line.problem).title, []).append(line)
                self.conclude(line.exchange)
            else:
                self._states[line.problem, line.of] = line.content
        self.usage.earlier = self.usage.exchanges

    @classmethod
    def of(cls, path: Path | None, run: str) -> History:
        """That of a run in a transcript, which need not exist yet; empty for a run without a name."""
        if path is None or not run or not path.is_file():
            return cls()
        return cls(line for line in read(path) if line.run == run)

    def _add(self, exchange: Exchange) -> None:
        if not exchange.messages:
            return  # a question that was not asked
        self.usage.add(exchange, failed=bool(exchange.error))
        if exchange.error:
            return
        answers = self._answers.setdefault(exchange.problem, [])
        if answers:
            roles = tuple(Message(message.role, "") for message in answers[-1].messages)
            answers[-1] = answers[-1].model_copy(update={"messages": roles})
        answers.append(exchange)
        self._unused.setdefault(exchange.key, deque()).append(exchange)

    def conclude(self, key: str) -> None:
        """Marks an answer as used."""
        self._concluded.add(key)
        if waiting := self._unused.get(key):
            waiting.popleft()

    def concluded(self, key: str) -> bool:
        """Whether an answer has an outcome."""
        return key in self._concluded

    def unused(self, digest: str) -> Exchange | None:
        """The answer to a question, if there is one that was not used."""
        waiting = (queue[0] for queue in self._unused.values() if queue)
        return next((exchange for exchange in waiting if exchange.digest == digest), None)

    def answers(self, problem: Problem) -> list[Exchange]:
        """The answers on a problem, in their order."""
        return self._answers.get(problem.title, [])

    def outcomes(self, problem: Problem) -> list[Outcome]:
        """What became of answers on a problem, in their order."""
        return self._outcomes.get(problem.title, [])

    def state(self, problem: Problem, of: str) -> Fields | None:
        """The content of the last ``State`` of this name."""
        return self._states.get((problem.title, of))
