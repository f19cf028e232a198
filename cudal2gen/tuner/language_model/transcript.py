"""Defines the lines of transcripts of a language model, and reads from them what earlier starts of a run did.

A transcript has three kinds of lines:

- ``Exchange``: a request with its answer, or with an error instead. An error without ``messages`` is a question that
  was not sent, because of a back-off or because the budget was spent.
- ``AnswerOutcome``: the result of using an answer. It names the answer by its ``Exchange.key``.
- ``State``: data that a session of writing needs after a restart, to show the model the same kernels again.

``tuner.exports`` joins exchanges and outcomes as training data.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
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


class ChatRequest(NamedTuple):
    """A conversation so far, and the JSON schema of the answer to it."""

    messages: tuple[Message, ...]
    schema: dict[str, Any]

    @property
    def digest(self) -> str:
        """A hash of conversation and schema. It does not depend on the server or the response format."""
        text = json.dumps([list(map(list, self.messages)), self.schema], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class Reply(results.Line):
    """An answer. ``reasoning``: the model's reasoning before it, if the server or the text separates the two.

    ``refusal``: why the model refused to answer; empty if it did not. ``cut_off``: the answer reached the limit of
    tokens. ``cost``: in the prices' currency. ``estimated``: the token counts are estimates, because the server sent
    none.
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
    """There is no answer.

    - ``status``: the HTTP status, 0 without a response.
    - ``for_good``: asking again fails until somebody changes the settings, the account or the server.
    - ``passing``: the failure is transient, so asking again may succeed.
    - ``understood``: the cause is known, and another response format would not help.
    - ``retry_after``: the seconds that the server asks to wait; from ``Chat.ask``, those of its back-off. None if
      unknown.
    """

    def __init__(
        self, message: str, status: int = 0, for_good: bool = False, passing: bool = False,
        retry_after: float | None = None, understood: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.for_good, self.passing, self.retry_after = status, for_good, passing, retry_after
        self.understood = understood

    @property
    def final(self) -> Failure:
        """The ``Failure`` to raise in a command that cannot continue without the model."""
        return Failure(f"the model cannot be asked: {self}; then the same command continues from there")


class NotSent(Unavailable):
    """The question was not sent, because of a back-off after a failure or (``for_good``) because a budget is spent."""


class Exchange(Reply):
    """A line of a transcript: a question, the response format, and the reply, or an ``error`` instead.

    ``digest``: that of the ``ChatRequest``; ``form``: the response format. ``messages`` are empty if the question was
    not sent. ``status`` to ``retry_after`` are those of the error; see ``Unavailable``.
    """

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
        """A hash of question and answer, by which an outcome names its exchange."""
        return answer_key(self.digest, self.text)

    @property
    def reply(self) -> Reply:
        """The answer. Raises Unavailable or NotSent if the exchange had none."""
        if self.error:
            kind = Unavailable if self.messages else NotSent
            raise kind(self.error, self.status, self.for_good, self.passing, self.retry_after)
        return Reply(**self.model_dump(include=set(Reply.model_fields)))


class AnswerOutcome(results.Line):
    """A line of a transcript: the result of using an answer.

    - ``exchange``: the answer's ``Exchange.key``; ``problem``: the fields of the problem.
    - ``proposals``: the decisions of the proposed records; for an illegal one its fields and a ``violation``.
    - ``fault``: what was wrong with the rest of the answer.
    - ``reward`` and ``right``: the answer's reward, and whether all of it was legal and right. They are None if they
      follow from the trials of the proposals.
    """

    kind: Literal["outcome"] = "outcome"
    run: str = ""
    exchange: str
    problem: Fields
    stage: Stage
    proposals: tuple[Fields, ...] = ()
    reward: float | None = None
    fault: str = ""
    right: bool | None = None


class State(results.Line):
    """A line of a transcript: data that a session of writing needs after a restart.

    ``of`` names what the ``content`` describes: the incumbent (its fields), a trial (its report and counters), or a
    question (the kernels that it shows).
    """

    kind: Literal["state"] = "state"
    run: str = ""
    problem: str
    of: str
    content: Fields


Line = Exchange | AnswerOutcome | State


def answer_key(digest: str, text: str) -> str:
    """A hash of a question's digest and an answer's text."""
    return hashlib.sha256(f"{digest}\n{text}".encode(errors="surrogatepass")).hexdigest()[:32]


def read(path: Path) -> Iterator[Line]:
    """The lines of a transcript. Raises WrongInput if the file is missing or has a line that is not a transcript's."""
    adapter: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="kind")])
    with reading(path), path.open("rb") as file:
        # Only a line feed ends a line, because answers may contain Unicode's other line breaks. A killed process may
        # leave bytes after the last line feed.
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield adapter.validate_json(line)
            except ValidationError as error:
                raise WrongInput(f"{path}:{number}: {explain(error)}; no line of a transcript") from None


@dataclass
class Usage:
    """Sums over the exchanges of a run, including those of its earlier starts.

    ``earlier``: exchanges of earlier starts; ``answered``: exchanges of this start that got an answer.
    """

    exchanges: int = 0
    earlier: int = 0
    failed: int = 0
    answered: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    cost: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens in and out."""
        return self.tokens_in + self.tokens_out

    def add(self, reply: Reply, failed: bool = False) -> None:
        """Adds an exchange to the sums."""
        self.exchanges += 1
        self.failed += failed
        self.answered += not failed
        self.tokens_in += reply.tokens_in
        self.tokens_out += reply.tokens_out
        self.cost += reply.cost

    def __str__(self) -> str:
        exchanges = f"{self.exchanges} exchanges" + (f", {self.failed} of them failed" if self.failed else "")
        exchanges += f", {self.earlier} of them in earlier starts" if self.earlier else ""
        cost = f", cost {self.cost:.4f}" if self.cost else ""
        return f"{exchanges}, {self.tokens_in} tokens in, {self.tokens_out} out{cost}"


class History:
    """What the earlier starts of a run left in a transcript: the ``usage``, and the answers that were paid for.

    An answer without an ``AnswerOutcome`` was never used, so ``unused`` returns it if its question is asked again. To
    save memory, only the last of a problem's ``answers`` keeps the contents of its messages.
    """

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self.usage = Usage()
        self.spent: Counter[str] = Counter()  # tokens in and out by problem
        self._answers: dict[str, list[Exchange]] = {}
        self._outcomes: dict[str, list[AnswerOutcome]] = {}
        self._states: dict[tuple[str, str], Fields] = {}
        self._unused: dict[str, deque[Exchange]] = {}
        self._concluded: set[str] = set()
        for line in lines:
            if isinstance(line, Exchange):
                self._add(line)
            elif isinstance(line, AnswerOutcome):
                self._outcomes.setdefault(Problem.model_validate(line.problem).title, []).append(line)
                self.conclude(line.exchange)
            else:
                self._states[line.problem, line.of] = line.content
        self.usage.earlier, self.usage.answered = self.usage.exchanges, 0

    @classmethod
    def of(cls, path: Path | None, run: str) -> History:
        """The history of a run in a transcript, which need not exist yet; empty for a run without a name."""
        if path is None or not run or not path.is_file():
            return cls()
        return cls(line for line in read(path) if line.run == run)

    def _add(self, exchange: Exchange) -> None:
        """Counts an exchange and keeps its answer. From now on only the roles of the messages are kept for the
        problem's earlier answers."""
        if not exchange.messages:
            return  # a question that was not sent
        self.count(exchange)
        if exchange.error:
            return
        answers = self._answers.setdefault(exchange.problem, [])
        if answers:
            roles = tuple(Message(message.role, "") for message in answers[-1].messages)
            answers[-1] = answers[-1].model_copy(update={"messages": roles})
        answers.append(exchange)
        self._unused.setdefault(exchange.key, deque()).append(exchange)

    def count(self, exchange: Exchange) -> None:
        """Adds an exchange to the sums of the run and of its problem."""
        self.usage.add(exchange, failed=bool(exchange.error))
        self.spent[exchange.problem] += exchange.tokens_in + exchange.tokens_out

    def conclude(self, key: str) -> None:
        """Marks an answer as used."""
        self._concluded.add(key)
        if answers := self._unused.get(key):
            answers.popleft()

    def concluded(self, key: str) -> bool:
        """Whether an answer has an outcome."""
        return key in self._concluded

    def unused(self, digest: str) -> Exchange | None:
        """An answer to this question that was not used, if there is one."""
        oldest = (queue[0] for queue in self._unused.values() if queue)
        return next((exchange for exchange in oldest if exchange.digest == digest), None)

    def answers(self, problem: Problem) -> list[Exchange]:
        """The answers on a problem, in their order."""
        return self._answers.get(problem.title, [])

    def outcomes(self, problem: Problem) -> list[AnswerOutcome]:
        """The outcomes of answers on a problem, in their order."""
        return self._outcomes.get(problem.title, [])

    def state(self, problem: Problem, of: str) -> Fields | None:
        """The content of the last ``State`` of this name."""
        return self._states.get((problem.title, of))
