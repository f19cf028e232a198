"""Proves that a language model proposes during evaluations, together with other proposers, and alone."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cudal2gen import results
from cudal2gen.kernel import Problem, Record
from cudal2gen.results import Trial
from cudal2gen.tuner import campaign, executor, search
from cudal2gen.tuner.environment import ModelEnvironment
from cudal2gen.tuner.language_model import chat
from cudal2gen.tuner.language_model.chat import Chat, ReplayWire
from cudal2gen.tuner.language_model.server import ServerWire
from cudal2gen.tuner.language_model.transcript import Reply
from cudal2gen.tuner.llm_proposer import LlmProposer
from cudal2gen.tuner.memory import Memory
from cudal2gen.tuner.proposers import Mixture, Random
from tests.cudal2gen.asking import (
    PROBLEM,
    Clock,
    candidates,
    endpoint,
    incumbent,
    llm_proposer,
    question,
    search_trials,
)
from tests.cudal2gen.chat_server import Step, fails, limits, proposes, says, serve_script
from tests.packages import require

require("openai")


def test_a_search_goes_on_without_the_model() -> None:
    warnings: list[str] = []
    with serve_script(fails(401), forever=True) as server:
        trials = search_trials(Mixture([llm_proposer(server, warnings), Random(1)]))
    assert len([trial for trial in trials if trial.effort == "short"]) == 12
    assert {trial.proposer for trial in trials} == {"random"}
    assert len(warnings) == 1


class Handshakes:
    """An environment whose evaluations end once an exchange with the server has begun and ended during them, except
    for the last of ``evaluations``. ``overlaps`` counts these exchanges.

    The server answers only during an evaluation, so if exchanges and evaluations were not concurrent, neither would
    end.
    """

    name: Any = "model"
    on = "handshakes"

    def __init__(self, model: ModelEnvironment, evaluations: int) -> None:
        self.model, self.left = model, evaluations
        self.request, self.evaluation = threading.Event(), threading.Event()
        self.overlaps = 0

    def evaluate(self, problem: Problem, records: Sequence[Record], effort: Any = "short") -> list[Trial]:
        """In a short evaluation that is not the last: lets the server answer, and waits until the answer has been
        received."""
        self.left -= len(records)
        if effort == "short" and self.left > 0:
            self.evaluation.set()
            self.overlaps += self.request.wait(120)
            for thread in threading.enumerate():
                if thread.name == "llm":
                    thread.join(120)
            self.request.clear()
            self.evaluation.clear()
        return self.model.evaluate(problem, records, effort)

    def answers(self, groups: Iterator[int]) -> Any:
        """A step of the scripted server: it waits for an evaluation, and proposes the next two ``raster_group``."""

        def step(handler: Any) -> None:
            self.request.set()
            assert self.evaluation.wait(120)
            proposes(*[("incumbent", {"raster_group": next(groups)}) for _ in range(2)])(handler)

        return step


def test_requests_run_during_evaluations() -> None:
    environment = Handshakes(ModelEnvironment(lambda _: incumbent(), seed=5), 16)
    with serve_script(environment.answers(itertools.count(9)), forever=True) as server:
        talk = Chat(ServerWire(endpoint(server, seconds=60)))
        contest = search.Search(candidates(), incumbent())
        search.run(
            contest, Mixture([LlmProposer(talk, Memory(), in_background=True), Random(1)]),
            executor.InProcess(environment), lambda _: None, search.SearchLimits(evaluations=16, batch=4, prune=None),
        )  # fmt: skip
    assert contest.stop_reason == "16 evaluations"
    assert environment.overlaps == 3, "each batch but the last is evaluated while a question is under way"
    assert len(server.requests) == 3, "no question is asked during the last batch"
    batches = [[trial.proposer for trial in contest.short_trials[start : start + 4]] for start in range(0, 16, 4)]
    assert batches[0] == ["random"] * 4, "the first batch does not wait"
    assert [batch.count("llm") for batch in batches[1:]] == [2, 2, 2]


def test_alone_it_is_waited_for() -> None:
    steps = [proposes(("incumbent", {"raster_group": group}), ("incumbent", {"stages": 3})) for group in range(9, 13)]
    with serve_script(*steps, forever=True) as server:
        talk = Chat(ServerWire(endpoint(server)))
        contest = search.Search(candidates(), incumbent())
        environment = ModelEnvironment(lambda _: incumbent(), seed=5)
        search.run(
            contest, LlmProposer(talk, Memory(), in_background=True), executor.InProcess(environment), lambda _: None,
            search.SearchLimits(evaluations=4, batch=2, prune=None),
        )  # fmt: skip
    assert contest.stop_reason == "4 evaluations"
    assert {trial.proposer for trial in contest.short_trials} == {"llm"}


def run_alone(
    talk: Chat, path: Path, in_background: bool = False, out_of_time: Any = lambda: False, warn: Any = str
) -> search.Search:
    """Runs a search of four evaluations, two at a time, with no other proposer, and appends its trials to ``path``."""
    proposer, model = (
        LlmProposer(talk, Memory(), in_background=in_background, warn=warn),
        ModelEnvironment(lambda _: incumbent(), seed=5),
    )
    return search.run(
        search.Search(candidates(), incumbent()), proposer, executor.InProcess(model),
        lambda trials: results.append(trials, path), search.SearchLimits(evaluations=4, batch=2, prune=None), "run",
        out_of_time,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True])
def test_alone_it_waits_as_long_as_the_server_asks(in_background: bool, tmp_path: Path) -> None:
    clock, warnings = Clock(), list[str]()
    steps = [proposes(("incumbent", {"raster_group": group}), ("incumbent", {"stages": 3})) for group in range(9, 13)]
    with serve_script(limits("300"), limits("600"), *[limits("30")] * 4, *steps, forever=True) as server:
        talk = Chat(ServerWire(endpoint(server)), tmp_path / "t.jsonl", None, clock.pause, clock)
        contest = run_alone(talk, tmp_path / "trials.jsonl", in_background, warn=warnings.append)
    assert contest.stop_reason == "4 evaluations"
    assert {trial.proposer for trial in contest.short_trials} == {"llm"}
    assert sum(clock.pauses) == 300 + 600 + 4 * 30
    assert max(clock.pauses) <= chat.STEP_S, "between pauses, the search checks whether the campaign has ended"
    waits = "proposer llm: nobody else proposes, so the search waits 300 s, after which the server may be asked"
    assert waits in warnings[1]
    if not in_background:
        replayed = run_alone(Chat(ReplayWire(tmp_path / "t.jsonl")), tmp_path / "again.jsonl")
        assert [trial.record for trial in replayed.trials] == [trial.record for trial in contest.trials]


@pytest.mark.parametrize(
    ("step", "seconds"), [(limits("1000"), 3000), (limits("7200"), 3600), (fails(401), 0), (fails(500), 5)]
)
def test_alone_it_waits_an_hour_at_most_and_for_no_other_failure(step: Step, seconds: int, tmp_path: Path) -> None:
    """Three waits of 1000 s fit an hour, and a wait of 7200 s is cut off. A server error is only retried, after pauses
    of 1 and 4 s."""
    clock = Clock()
    with serve_script(step, forever=True) as server:
        talk = Chat(ServerWire(endpoint(server)), None, None, clock.pause, clock)
        contest = run_alone(talk, tmp_path / "trials.jsonl")
    assert contest.stop_reason == "nothing new was proposed"
    assert sum(clock.pauses) == seconds


def test_the_end_of_a_campaign_ends_waiting(tmp_path: Path) -> None:
    clock = Clock()
    with serve_script(limits("3000"), forever=True) as server:
        talk = Chat(ServerWire(endpoint(server)), None, None, clock.pause, clock)
        contest = run_alone(talk, tmp_path / "trials.jsonl", out_of_time=lambda: clock.now >= 1060)
    assert contest.stop_reason == "out of time"
    assert sum(clock.pauses) == 60


def test_what_an_exchange_in_the_background_raises_is_raised_where_it_is_collected() -> None:
    class BrokenWire:
        live = True

        def send(self, *_: Any) -> Reply:
            raise OSError("disk full")

    proposer = LlmProposer(Chat(BrokenWire()), Memory(), in_background=True)
    assert proposer.propose(question(), 2) == []
    with pytest.raises(OSError, match="disk full"):
        proposer.wait(PROBLEM)


def test_illegal_ideas_cost_no_evaluations() -> None:
    ideas = [("incumbent", {"stages": 90 + number}) for number in range(4)]
    with serve_script(proposes(*ideas, ("incumbent", {"stages": 3})), forever=True) as server:
        contest = search.Search(candidates(), incumbent())
        search.run(
            contest, Mixture([llm_proposer(server), Random(1)]),
            executor.InProcess(ModelEnvironment(lambda _: incumbent(), seed=5)), lambda _: None,
            search.SearchLimits(evaluations=12, batch=4, prune=None),
        )  # fmt: skip
    outcomes = [trial.outcome for trial in contest.short_trials]
    assert outcomes.count("measured") == len(contest.evaluations) == len(contest.curve) == 12
    assert outcomes.count("illegal") == 4, "each illegal idea is stored once, with its rule"


def test_nothing_but_illegal_ideas_end_a_search() -> None:
    ideas = (proposes(("incumbent", {"stages": 90 + number})) for number in itertools.count())
    with serve_script(*itertools.islice(ideas, 9), forever=True) as server:
        contest = search.Search(candidates(), incumbent())
        search.run(
            contest, llm_proposer(server), executor.InProcess(ModelEnvironment(lambda _: incumbent(), seed=5)),
            lambda _: None,
            search.SearchLimits(evaluations=12, batch=4, prune=None),
        )  # fmt: skip
    assert contest.stop_reason == "nothing new was proposed"
    assert contest.evaluations == []


def test_a_problem_without_usable_answers_is_left_out_for_some_rounds() -> None:
    with serve_script(says("no idea"), forever=True) as server:
        proposer = llm_proposer(server)
        rounds = []
        for _ in range(12):
            before = len(server.requests)
            proposer.propose(question(), 2)
            rounds.append(len(server.requests) > before)
    assert rounds == [True, True, False, True, False, False, True, False, False, False, False, True]


def test_campaigns_may_have_it(tmp_path: Path) -> None:
    with serve_script(proposes(("incumbent", {"stages": 3})), forever=True) as server:
        environment = ModelEnvironment(lambda _: incumbent(), seed=5)
        mixture = Mixture([llm_proposer(server), Random(1)])
        settings = search.SearchLimits(evaluations=6, batch=3, prune=None)
        plan = campaign.CampaignPlan(
            [PROBLEM], lambda _: incumbent(), lambda _: mixture, tmp_path / "trials.jsonl", "run", settings
        )
        state = campaign.run(plan, executor.InProcess(environment))
    assert {trial.proposer for trial in state.searches[0].short_trials} == {"llm", "random"}
