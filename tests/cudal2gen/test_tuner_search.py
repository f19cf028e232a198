"""Proves what ends a search and a campaign, what they store, and what enters the catalog."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudal2gen import results
from cudal2gen.generation import catalog
from cudal2gen.kernel import Problem, Record, parse, revise, space
from cudal2gen.results import INCUMBENT, KERNEL, Effort, Timing, Trial
from cudal2gen.timing import model
from cudal2gen.tuner import campaign, executor, search
from cudal2gen.tuner.climbing import HillClimbing
from cudal2gen.tuner.environment import ModelEnvironment, trial_of
from cudal2gen.tuner.proposal import proposal_of_fields
from cudal2gen.tuner.proposers import Random
from kernelproof.ground.errors import SkippedLine
from tests import processes
from tests.cudal2gen.searched import SMALL, Scripted, incumbent, timed_trial


@pytest.mark.slow
def test_a_search_stores_what_it_does_and_ends_with_a_paired_gain() -> None:
    environment = ModelEnvironment(lambda _: incumbent(), seed=5)
    store: list[Trial] = []
    contest = search.Search(space.candidates(SMALL), incumbent())
    search.run(
        contest,
        HillClimbing(Random(0), "climbing"),
        executor.InProcess(environment),
        store.extend,
        search.SearchLimits(40, 8, prune=None),
        "r",
    )
    assert store == contest.trials
    assert len(contest.short_trials) == 40
    assert contest.stop_reason == "40 evaluations"
    assert [sum(trial.effort == effort for trial in store) for effort in ("medium", "long", "final")] == [8, 3, 1]
    assert {trial.run for trial in store} == {"r"}
    assert contest.curve == sorted(contest.curve, reverse=True)
    assert contest.curve[-1] == min(trial.cost for trial in contest.short_trials if trial.measured) < math.inf
    assert contest.improved
    gain, winner = contest.gain, contest.winner
    assert gain is not None
    assert winner is not None
    true = environment.true_us([incumbent(), parse(winner.record)])
    assert gain.low <= true[0] / true[1] * 1.01
    assert gain.high >= true[0] / true[1] * 0.99


def test_nothing_is_evaluated_twice_and_illegal_answers_are_trials_with_the_rule() -> None:
    candidates = space.candidates(SMALL)
    legal = proposal_of_fields("scripted", candidates.fields[0])
    illegal = proposal_of_fields("scripted", candidates.fields[0] | {"stages": 99})
    assert illegal.record is None
    assert "stages" in illegal.violation
    batches: list[int] = []
    environment = ModelEnvironment(seed=1)

    class Watched(executor.InProcess):
        def submit(self, job: executor.EvaluationJob, rank: int = 0) -> Future[list[Trial]]:
            batches.extend([len(job.records)] if job.effort == "short" else [])
            return super().submit(job, rank)

    contest = search.Search(candidates, None)
    scripted = Scripted([legal, legal, illegal, illegal, legal])
    search.run(contest, scripted, Watched(environment), lambda _: None, search.SearchLimits(8, 2, prune=None))
    assert batches == [1]
    assert contest.failures == {"illegal": 1}
    assert "stages" in next(trial.reason for trial in contest.trials if not trial.measured)
    assert contest.stop_reason == "nothing new was proposed"
    assert scripted.observed == 2


def test_what_the_model_thinks_hopeless_is_not_compiled() -> None:
    candidates = space.candidates(SMALL)
    estimates = [model.estimate(record).us for record in candidates.records]
    slowest = proposal_of_fields("scripted", candidates.fields[int(np.argmax(estimates))])
    contest = search.Search(candidates, None)
    search.run(
        contest,
        Scripted([slowest]),
        executor.InProcess(ModelEnvironment()),
        lambda _: None,
        search.SearchLimits(8, prune=1.5),
    )
    assert (contest.trials, contest.pruned) == ([], 1)


def test_patience_and_time_end_a_search() -> None:
    contest = search.Search(space.candidates(SMALL), None)
    search.run(
        contest,
        Random(0),
        executor.InProcess(ModelEnvironment(seed=1)),
        lambda _: None,
        search.SearchLimits(400, patience=16, prune=None),
    )
    assert contest.stop_reason == "no improvement in 16 evaluations"
    assert len(contest.short_trials) < 400
    unstarted = search.Search(space.candidates(SMALL), None)
    search.run(
        unstarted,
        Random(0),
        executor.InProcess(ModelEnvironment()),
        lambda _: None,
        search.SearchLimits(64),
        out_of_time=lambda: True,
    )
    assert (unstarted.stop_reason, unstarted.trials) == ("out of time", [])


@pytest.mark.slow
def test_no_gain_without_a_clear_interval() -> None:
    """The incumbent itself, or a winner whose interval contains 1, is no improvement."""
    record = space.candidates(SMALL).records[0]
    rival = revise(record, raster_group=2)
    draw = timed_trial(rival, [8.0, 9.0, 8.0, 9.0, 8.0, 8.5], [8.4, 8.6, 8.5, 8.5, 8.4, 8.6]).model_copy(
        update={"effort": "long"}
    )
    likely = draw.faster_than(INCUMBENT)
    assert likely is not None
    assert likely.low < 1 < likely.value
    assert not search.Search(space.candidates(SMALL), record, [draw]).improved
    incumbent_itself = timed_trial(record, 8.0, 9.0).model_copy(update={"effort": "long"})
    assert not search.Search(space.candidates(SMALL), record, [incumbent_itself]).improved
    better = timed_trial(rival, 8.0, 9.0).model_copy(update={"effort": "long"})
    chosen = search.Search(space.candidates(SMALL), record, [better])
    assert (chosen.promising, chosen.improved) == (True, False), "the samples that chose it prove nothing"
    again = better.model_copy(update={"effort": "final"})
    assert search.Search(space.candidates(SMALL), record, [better, again]).improved
    assert not search.Search(
        space.candidates(SMALL), record, [better, draw.model_copy(update={"effort": "final"})]
    ).improved
    before_the_long_timing = [better.model_copy(update={"effort": effort}) for effort in ("short", "medium")]
    contest = search.Search(space.candidates(SMALL), record, before_the_long_timing)
    assert contest.winner == before_the_long_timing[1]
    assert contest.gain is None
    assert not contest.improved


class EqualTimes:
    """An environment in which every record takes the incumbent's time, 10 us, within noise drawn by ``seed``."""

    name, on = "gpu", "a card"

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def evaluate(self, problem: Problem, records: Sequence[Record], effort: Effort = "short") -> list[Trial]:
        """A measured trial of each record. Errors are relative: 0.2 % for all samples of a record, 1 % for each."""
        samples, contenders = (6 if effort == "short" else 30), len(records) + 1
        bias = self._rng.normal(0, 0.002, contenders)
        us = 10 * np.exp(self._rng.normal(0, 0.01, (samples, contenders)) + bias)
        timings = [
            Timing(contender=contender, calls=9, event_us=tuple(us[:, place]), error=0.0)
            for place, contender in enumerate([KERNEL] * len(records) + [INCUMBENT])
        ]
        return [
            trial_of(self, problem, record, effort, "measured", timings=(timing, timings[-1]))  # type: ignore[arg-type]
            for record, timing in zip(records, timings[:-1], strict=True)
        ]


def test_where_nothing_is_faster_nothing_wins() -> None:
    """The best of three noisy times is promising in a tenth of the searches, and at most one of all searches has a
    winner."""
    own = space.candidates(SMALL, 40)
    candidates = space.Candidates(SMALL, own.fields[1:], own.records[1:])
    promising = improved = 0
    for seed in range(60):
        contest = search.Search(candidates, own.records[0])
        place = executor.InProcess(EqualTimes(seed))  # type: ignore[arg-type]
        search.run(contest, Random(seed), place, lambda _: None, search.SearchLimits(8, prune=None))
        promising += any(trial.effort == "final" for trial in contest.trials)
        improved += contest.improved
    assert promising >= 4
    assert improved <= 1


def test_a_campaign_takes_up_what_was_stored(tmp_path: Path) -> None:
    problems = [SMALL, SMALL.model_copy(update={"n": 1024})]
    store = tmp_path / "trials.jsonl"

    def run_campaign(evaluations: int) -> campaign.CampaignState:
        settings = search.SearchLimits(evaluations, prune=None)
        plan = campaign.CampaignPlan(problems, lambda _: None, lambda _: Random(7), store, "r", settings)
        return campaign.run(plan, executor.InProcess(ModelEnvironment()))

    run_campaign(8)
    before = store.read_text()
    resumed = run_campaign(8)
    assert store.read_text() == before, "nothing is evaluated twice"
    assert [contest.stop_reason for contest in resumed.searches] == ["finished before"] * 2
    assert [len(contest.candidates.records) for contest in resumed.searches] == [0, 0], (
        "or a thousand problems fill the memory"
    )
    # Each problem has 8 short trials, and the 8 and 3 best of them are timed for longer.
    assert len(before.splitlines()) == 2 * (8 + 8 + 3)


@pytest.mark.slow
def test_within_a_budget_each_problem_gets_some_candidates_before_any_gets_more(tmp_path: Path) -> None:
    """The budget ends in the second round, by a clock that evaluations advance."""
    problems = [SMALL.model_copy(update={"n": n}) for n in (512, 768, 1024)]
    store, clock = tmp_path / "trials.jsonl", [0.0]
    slow = {
        problem: max(space.candidates(problem).records, key=lambda record: model.estimate(record).us)
        for problem in problems
    }

    class Timed(ModelEnvironment):
        def evaluate(self, problem: Problem, records: Any, effort: Any = "short") -> list[Trial]:
            clock[0] += len(records) if effort == "short" else 0.1
            return super().evaluate(problem, records, effort)

    plan = campaign.CampaignPlan(
        problems,
        slow.__getitem__,
        lambda _: Random(7),
        store,
        "r",
        search.SearchLimits(24, prune=None),
        budget_seconds=30,
        learn=lambda contest: learned.append((contest.problem, len(contest.evaluations))),
    )
    ended: list[Problem] = []
    learned: list[tuple[Problem, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: clock[0])
        state = campaign.run_in_turns(
            plan, executor.InProcess(Timed(slow.__getitem__)), after=lambda item: ended.append(item.problem)
        )
    counts = [len(contest.evaluations) for contest in state.searches]
    assert counts == [8, 8, 8], "all within 21 of 30 s, and the batch under way"
    assert [trial.problem for trial in results.trials(store)[:12:4]] == problems
    assert ended == problems
    assert learned[:6] == [(problem, count) for count in (4, 8) for problem in problems], (
        "each turn teaches the next one"
    )
    assert state.early_ends(24) == {"out of time": 3}
    assert {contest.winner.effort for contest in state.searches if contest.winner} == {"final"}, (
        "gains are timed longer"
    )
    assert clock[0] < 30


# The program of a process that is killed in the middle of a campaign. Its argument is the file of trials.
HANGING_PROGRAM = """
import sys, time
from pathlib import Path
from tests.cudal2gen.test_tuner_search import *


class Hangs(ModelEnvironment):  # hangs in the middle of the campaign
    batches = 0

    def evaluate(self, *question):
        self.batches += 1
        if self.batches > 8:
            time.sleep(300)
        return super().evaluate(*question)

settings = search.SearchLimits(64, 4, prune=None)
plan = campaign.CampaignPlan([SMALL], lambda _: None, lambda _: Random(7), Path(sys.argv[1]), "r", settings)
campaign.run(plan, executor.InProcess(Hangs()))
"""


@pytest.mark.slow
def test_a_killed_campaign_loses_no_trial_and_repeats_none(tmp_path: Path) -> None:
    store = tmp_path / "trials.jsonl"
    process = subprocess.Popen([sys.executable, "-c", HANGING_PROGRAM, str(store)])
    processes.wait_until(lambda: store.exists() and len(store.read_text().splitlines()) >= 12)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with store.open("a") as file:
        file.write('{"kind":"trial","environment":"mo')  # what a kill in the middle of a write leaves
    with pytest.warns(SkippedLine):
        before = results.trials(store)
    assert 12 <= len(before) < 64
    plan = campaign.CampaignPlan(
        [SMALL], lambda _: None, lambda _: Random(7), store, "r", search.SearchLimits(64, 4, prune=None)
    )
    with pytest.warns(SkippedLine):
        state = campaign.run(plan, executor.InProcess(ModelEnvironment()))
    after = results.trials(store)
    assert after[: len(before)] == before
    keys = [parse(trial.record).kernel_key for trial in after if trial.effort == "short"]
    assert len(keys) == len(set(keys)) == 64
    assert state.evaluations == 64


def winning_search(environment: str = "gpu", on: str = "NVIDIA H200") -> search.Search:
    """A search whose best trial, measured on this card, is faster than the incumbent."""
    record = incumbent()
    rival = space.candidates(SMALL).compose(5, {}, "cost-model")
    best = timed_trial(rival, 8.0, 9.0, digest="d1").model_copy(
        update={"effort": "final", "environment": environment, "on": on, "proposer": "cost-model"}
    )
    return search.Search(space.candidates(SMALL), record, [best])


@pytest.mark.slow
def test_only_what_a_gpu_measured_and_a_verdict_cleared_is_written() -> None:
    assert campaign.write_obstacle(winning_search(), verdict_clean=True) == ""
    assert campaign.write_obstacle(winning_search(), verdict_clean=False) == "its kernel has no clean verdict"
    of_another = "it was measured on NVIDIA H100 80GB HBM3, not on h200"
    assert campaign.write_obstacle(winning_search(on="NVIDIA H100 80GB HBM3"), verdict_clean=True) == of_another
    for card in ("a card of no table", "NVIDIA H100 PCIe, 114 SMs", "NVIDIA H200, 66 SMs"):
        refusal = campaign.write_obstacle(winning_search(on=card), verdict_clean=True)
        assert refusal == f"it was measured on {card}, not on h200"
    assert "model environment" in campaign.write_obstacle(winning_search("model"), verdict_clean=True)
    assert "replay environment" in campaign.write_obstacle(winning_search("replay"), verdict_clean=True)
    assert (
        campaign.write_obstacle(search.Search(space.candidates(SMALL), None), verdict_clean=True)
        == "nothing improved beyond noise"
    )


@pytest.mark.slow
def test_a_run_takes_up_what_its_own_card_measured(tmp_path: Path) -> None:
    store = tmp_path / "trials.jsonl"
    cards = ("NVIDIA H200", "NVIDIA H100 PCIe, 114 SMs", "NVIDIA H200")
    trials = [
        winning_search(on=card).trials[0].model_copy(update={"run": "r", "name": f"{i}"})
        for i, card in enumerate(cards)
    ]
    results.append(trials, store)
    plan = campaign.CampaignPlan([SMALL], lambda _: None, lambda _: Random(7), store, "r", search.SearchLimits())
    for card, names in ((cards[0], ["0", "2"]), (cards[1], ["1"]), ("", ["0", "1", "2"])):
        assert [trial.name for trial in plan.stored(card)[SMALL]] == names
    assert [trial.on_its_gpu for trial in trials] == [True, False, True]


@pytest.mark.slow
def test_the_answer_says_where_it_comes_from(tmp_path: Path) -> None:
    answer = campaign.catalog_record(winning_search())
    assert answer.origin.structure == "tuned"
    assert answer.origin.source == "cudal2gen tune, measured on NVIDIA H200, proposed by cost-model"
    assert set(answer.origin.changed) == set(space.differing(incumbent(), answer))
    path = tmp_path / "kernels.jsonl"
    catalog.save([incumbent()], path)
    catalog.put(answer, path)
    assert catalog.load(path) == [answer]
    assert any(line.startswith(tuple(answer.origin.changed)) for line in campaign.diff(winning_search()))
    with pytest.raises(ValueError, match="nothing improved"):
        campaign.catalog_record(search.Search(space.candidates(SMALL), None))


def test_the_incumbent_is_the_problems_own_record_else_the_nearest_that_is_legal() -> None:
    record = incumbent()
    neighbour = revise(record, m=512)
    find = campaign.Incumbents([neighbour, record])
    assert find(SMALL) == record
    resized = find(SMALL.model_copy(update={"m": 384}))
    assert resized is not None
    assert (resized.m, space.decisions(resized)) == (384, space.decisions(neighbour))
    assert campaign.Incumbents([])(SMALL) is None
