"""Shared parts of the tests of the language model that proposes records: a problem, records, a clock, a proposer."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from cudal2gen.kernel import FAMILIES, Problem, Record, parse, space
from cudal2gen.results import Trial
from cudal2gen.tuner import executor, search
from cudal2gen.tuner.environment import ModelEnvironment
from cudal2gen.tuner.language_model.chat import Chat
from cudal2gen.tuner.language_model.server import Endpoint, ServerWire
from cudal2gen.tuner.llm_proposer import LlmProposer
from cudal2gen.tuner.memory import Memory
from cudal2gen.tuner.proposal import Question
from tests.cudal2gen.chat_server import Server

# The problem that most of these tests ask about, and a small one with another accumulator.
PROBLEM = Problem(gpu="h200", acc="f32", layout="tn", m=4096, n=4096, k=4096)
SMALL = Problem(gpu="h200", acc="f16", layout="tn", m=256, n=256, k=256)
KEY = "sk-not-to-be-seen"  # the key of the server, which no output may contain
# A memory of no earlier run.
NO_NOTES = Memory()
# The family's plain record for ``SMALL``.
SMALL_RECORD = parse(space.base(SMALL, "sm90_wgmma") | FAMILIES["sm90_wgmma"].plain(SMALL))


@cache
def incumbent(problem: Problem = PROBLEM) -> Record:
    """The family's plain record for a problem, which the searches of these tests try to improve on."""
    return parse(space.base(problem, "sm90_wgmma") | FAMILIES["sm90_wgmma"].plain(problem))


@cache
def candidates(problem: Problem = PROBLEM) -> space.Candidates:
    """A problem's candidate records, at most 400."""
    return space.candidates(problem, most=400)


def question(trials: tuple[Trial, ...] = (), problem: Problem = PROBLEM) -> Question:
    """A question to a proposer after these trials, whose kernels count as tried."""
    keys = frozenset(parse(trial.record).kernel_key for trial in trials if trial.outcome != "illegal")
    return Question(candidates(problem), trials, incumbent(problem), keys)


def measure_trials(*changes: dict[str, Any]) -> tuple[Trial, ...]:
    """Trials of the incumbent with these changes, timed by the model environment."""
    decisions = incumbent().model_dump(mode="json")
    records = [parse(decisions | change) for change in changes]
    return tuple(ModelEnvironment(lambda _: incumbent(), seed=3).evaluate(PROBLEM, records))


def endpoint(server: Server, **options: Any) -> Endpoint:
    """The scripted server as a proposer's endpoint; ``options`` override fields."""
    return Endpoint(server.url, "scripted", KEY, **{"seconds": 5.0} | options)


class Clock:
    """A clock in seconds that a test sets; ``pause`` advances it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        """Advances the clock at once, and keeps the pause for the test."""
        self.pauses.append(seconds)
        self.now += seconds


def llm_proposer(
    server: Server, warnings: list[str] | None = None, memory: Memory = NO_NOTES, clock: Clock | None = None,
    tokens: int | None = None, **options: Any,
) -> LlmProposer:  # fmt: skip
    """A proposer that asks the scripted server. ``warnings`` collects what it warns of. ``tokens``: its budget, None
    for no limit."""
    clock = clock or Clock()
    return LlmProposer(
        Chat(ServerWire(endpoint(server, **options)), None, tokens, clock.pause, clock),
        memory,
        warn=([] if warnings is None else warnings).append,
    )


def document(request: dict[str, Any]) -> Any:
    """The JSON document in a request's user message."""
    return json.loads(request["messages"][1]["content"])


# An answer of the model with one legal proposal.
GOOD = json.dumps({"proposals": [{"base": "incumbent", "changes": {"stages": 3}, "why": ""}]})


def search_trials(proposer: Any) -> list[Trial]:
    """The trials of a search of twelve evaluations, four at a time, in the model environment. Nothing is stored."""
    environment = ModelEnvironment(lambda _: incumbent(), seed=5)
    contest = search.Search(candidates(), incumbent())
    settings = search.SearchLimits(evaluations=12, batch=4, prune=None)
    search.run(contest, proposer, executor.InProcess(environment), lambda _: None, settings, "run")
    return contest.trials
