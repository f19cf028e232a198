"""The tuner without torch: what is legal, what a reward is, environments, proposers, races, and the store of trials."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudal2gen import results
from cudal2gen.generation import catalog
from cudal2gen.kernel import IllegalRecord, Problem, Record, fit, parse, revise, space
from cudal2gen.results import INCUMBENT, KERNEL, Effort, Timing, Trial
from cudal2gen.results.ratios import Ratio
from cudal2gen.timing import model
from cudal2gen.tuner import benchmark, campaign, curve, executor, race, reward
from cudal2gen.tuner.environment import Model, Replay, Unrecorded, agreement, trial_of
from cudal2gen.tuner.proposal import Proposal, Question, proposal
from cudal2gen.tuner.proposers import Evolution, Mixture, Nearest, Random
from cudal2gen.tuner.roster import Roster
from tests import processes
from tests.cudal2gen.hanging import Hanging
from tests.packages import require

SMALL = Problem(gpu="h200", acc="f32", layout="tn", m=256, n=512, k=256)
AMPERE = Problem(gpu="a100", acc="f16", layout="tn", m=512, n=1024, k=512)


def samples(contender: str, us: Sequence[float]) -> Timing:
    return Timing(contender=contender, calls=1, event_us=tuple(us), error=0.0)


def timed_trial(
    record: Record, us: float | Sequence[float], incumbent_us: float | Sequence[float] | None = None, **details: Any
) -> Trial:
    times = [us] * 6 if isinstance(us, float) else us
    timings = [samples(KERNEL, times)]
    if incumbent_us is not None:
        timings.append(samples(INCUMBENT, [incumbent_us] * 6 if isinstance(incumbent_us, float) else incumbent_us))
    return trial_of(Model(), record.problem, record, "short", "measured", timings=tuple(timings), **details)


# What is legal


@pytest.mark.parametrize("problem", [SMALL, AMPERE], ids=["h200", "a100"])
def test_candidates_are_legal_distinct_and_cover_their_families(problem: Problem) -> None:
    candidates = space.candidates(problem)
    assert len({record.kernel_key for record in candidates.records}) == len(candidates.records)
    assert all(parse(record.model_dump(mode="json")) == record for record in candidates.records)
    families = {record.family for record in candidates.records}
    assert families == ({"sm90_wgmma", "sm90_small"} if problem.gpu == "h200" else {"sm80_multistage"})
    narrow = space.candidates(problem.model_copy(update={"n": 128, "k": 512}))
    assert "sm80_multistage" in {record.family for record in narrow.records}, "also beside wgmma"
    assert {record.bm for record in candidates.records} >= {64, 128}
    assert all(record.estimated_registers <= 255 for record in candidates.records)


extents = st.one_of(st.integers(1, 300), st.sampled_from([1000, 4096, 12289, 16384]))
vectors = st.one_of(st.integers(1, 40).map(lambda count: 8 * count), extents)


@settings(max_examples=30)
@given(m=extents, n=vectors, k=vectors, gpu=st.sampled_from(["h200", "a100", "rtx3090"]), seed=st.integers(0, 99))
def test_no_illegal_record_is_ever_drawn(m: int, n: int, k: int, gpu: str, seed: int) -> None:
    """Any values of free fields on any structure are legal.

    A problem without candidates is one that TMA cannot read (rows that are not whole vectors), which leaves an H200 the
    few that are worth it beside wgmma, or a D of at most eight columns.
    """
    problem = Problem(gpu=gpu, acc="f16", layout="nn" if seed % 2 else "tn", m=m, n=n, k=k)
    unaligned = k % 8 or (problem.layout == "nn" and n % 8)
    try:
        candidates = space.candidates(problem, 40, seed)
    except IllegalRecord:
        assert n <= 8 or (gpu == "h200" and unaligned), "the space refuses a problem that kernels serve"
        return
    families = {record.family for record in candidates.records}
    assert not (unaligned and "sm90_wgmma" in families)
    rng = random.Random(seed)
    for _ in range(5):
        assert candidates.draw(rng, "test").problem == problem  # validated, or drawn raises
    row = rng.randrange(len(candidates.records))
    heads = candidates.heads[candidates.records[row].family]
    for choice in itertools.islice(itertools.product(*(range(len(values)) for values in heads.values())), 200):
        candidates.compose(row, dict(zip(heads, choice, strict=True)), "test")


def test_what_a_rule_forbids_is_no_candidate() -> None:
    """A k that is not whole vectors leaves nothing for TMA; predicates on Ampere need it too, so the caller pads."""
    with pytest.raises(IllegalRecord, match="no family has a legal record for h200 f32 tn 256_512_100"):
        space.candidates(SMALL.model_copy(update={"k": 100}))
    unaligned = space.candidates(AMPERE.model_copy(update={"k": 100}))
    assert {record.padding for record in unaligned.records} == {"pad"}  # type: ignore[union-attr]


def test_another_problems_decisions_are_adopted_where_legal_else_the_nearest() -> None:
    candidates = space.candidates(SMALL)
    record = candidates.compose(3, {}, "x")
    larger = revise(record, m=512)
    assert space.decisions(space.adopt(larger, candidates, "nearest")) == space.decisions(record)
    deep = space.candidates(SMALL.model_copy(update={"k": 4096, "m": 64, "n": 64}))
    split = next(record for record in deep.records if record.family == "sm90_wgmma" and record.split_k == 16)
    adopted = space.adopt(split, candidates, "nearest")  # 4 steps of k cannot be split by 16
    assert adopted.problem == SMALL
    assert adopted.split_k < 16
    assert space.decisions(adopted) == space.decisions(fit(split, {}, SMALL).record), "the nearest legal record"
    assert space.differing(split, adopted).keys() <= {"split_k", "reduce", "cluster"}
    # Near a record of another GPU there may be none that is any good: a candidate takes its place.
    stranger = revise(catalog.find(AMPERE).record, split_k=16)  # of which there are 8 steps here
    assert stranger.family not in candidates.families
    assert space.adopt(stranger, candidates, "nearest").family in candidates.families


def test_differing_names_fields_with_both_values() -> None:
    candidates = space.candidates(SMALL)
    record = next(record for record in candidates.records if record.family == "sm90_wgmma")
    assert space.differing(record, revise(record, raster_group=2)) == {"raster_group": (8, 2)}


# The reward


def test_the_paper_reward_by_hand() -> None:
    cases = [reward.Case(1.5, 0.25), reward.Case(0.5, 0.75)]
    # mean(1.5 - 0.1*0.25, 0.5 - 0.1*0.75) - 0.001*200 = mean(1.475, 0.425) - 0.2
    assert reward.reward(cases, 200, alpha=0.1, beta=0.001) == pytest.approx(0.75)
    assert reward.reward(cases[:1], 0, alpha=0.0, beta=1.0) == 1.5
    with pytest.raises(ValueError, match="at least"):
        reward.reward([], 0, 0.1, 0.1)


def test_the_reward_of_trials_has_errors_lengths_and_failures() -> None:
    from cudal2gen.generation.renderer import render

    record = space.candidates(SMALL).records[0]
    fast, slow = timed_trial(record, 8.0, 12.0, max_diff=0.5), timed_trial(record, 10.0, 5.0)
    without_length = reward.Settings(alpha=0.2, beta=0.0)
    # mean(12/8 - 0.2*0.5, 5/10)
    assert reward.of_trials([fast, slow], without_length) == pytest.approx(0.95)
    value = reward.of_trials([fast], reward.Settings(alpha=0.0, beta=1e-5))
    assert value == pytest.approx(1.5 - 1e-5 * len(render(record)))
    failure = trial_of(Model(), SMALL, record, "short", "spill", reason="spills 8 bytes")
    assert reward.of_trials([fast, failure], reward.Settings(failed=-1.0)) == -1.0
    assert reward.of_trials([fast, failure], reward.Settings()) == 0.0
    # 12/8 - 0.01*0.5: by default errors cost a hundredth, and length nothing.
    assert reward.of_trials([fast], reward.Settings()) == pytest.approx(1.495)


def test_the_lower_bound_of_speed_is_below_a_noisy_median_and_at_a_quiet_one() -> None:
    record = space.candidates(SMALL).records[0]
    bounded = reward.Settings(alpha=0.0, lower_bound=True)
    assert reward.of_trials([timed_trial(record, 8.0, 12.0)], bounded) == pytest.approx(1.5)
    noisy = timed_trial(record, [8.0, 9.0, 7.0, 8.5, 7.5, 8.0], [12.0, 11.0, 13.0, 12.5, 11.5, 12.0])
    assert reward.of_trials([noisy], bounded) < 1.45
    with pytest.raises(ValueError, match="incumbent was not timed beside it"):
        reward.of_trials([timed_trial(record, 8.0)], bounded)


def test_a_baseline_is_the_reference_before_the_incumbent() -> None:
    record = space.candidates(SMALL).records[0]
    timings = (samples(KERNEL, [8.0] * 6), samples(INCUMBENT, [12.0] * 6), samples("cublas-tn", [10.0] * 6))
    trial = trial_of(Model(), SMALL, record, "short", "measured", timings=timings)
    assert reward.of_trials([trial], reward.Settings(alpha=0.0)) == pytest.approx(1.25)
    assert trial.cost == pytest.approx(8 / 12)
    ratio = trial.faster_than("cublas-tn")
    assert ratio is not None
    assert tuple(ratio) == pytest.approx((1.25, 1.25, 1.25))


# Environments


def test_the_model_is_deterministic_noisy_and_not_the_plain_one() -> None:
    candidates = space.candidates(SMALL)
    records = candidates.records[:200]
    first, second = Model(seed=3), Model(seed=4)
    assert np.array_equal(first.true_us(records), Model(seed=3).true_us(records))
    hidden = first.hidden(records)
    assert 0.03 < hidden.std() < 0.2
    assert abs(np.corrcoef(hidden, second.hidden(records))[0, 1]) < 0.6
    estimates = np.array([model.frozen_us(record) for record in records])
    assert np.allclose(first.true_us(records), estimates * np.exp(hidden))
    trials = first.evaluate(SMALL, records)
    noise = np.log([trial.median_us for trial in trials]) - np.log(first.true_us(records))
    # The median of five samples with 1 % noise each: about 0.54 %.
    assert 0.003 < noise.std() < 0.008
    assert all(trial.measured and trial.environment == "model" for trial in trials)


def test_the_hidden_terms_differ_between_problems_but_not_wholly() -> None:
    """What is shared can be learned on one problem for another, what is each one's own cannot."""
    environment = Model(seed=1)
    pools = [space.candidates(SMALL.model_copy(update={"n": n})).records for n in (4096, 8192)]
    by_decision = [
        dict(zip((repr(space.decisions(record)) for record in pool), environment.hidden(pool), strict=True))
        for pool in pools
    ]
    shared = sorted(by_decision[0].keys() & by_decision[1].keys())
    pairs = np.array([[by_decision[0][decision], by_decision[1][decision]] for decision in shared])
    assert len(shared) > 300
    assert 0.4 < np.corrcoef(pairs.T)[0, 1] < 0.95


def test_a_record_of_another_problem_is_a_failure_not_an_error() -> None:
    stranger = space.candidates(SMALL.model_copy(update={"m": 128})).records[0]
    (trial,) = Model().evaluate(SMALL, [stranger])
    assert (trial.outcome, trial.reason) == (
        "illegal",
        "m=128, n=512, k=256: is a record for 128_512_256, not 256_512_256",
    )


def test_replay_answers_what_was_recorded_and_refuses_the_rest(tmp_path: Path) -> None:
    records = space.candidates(SMALL).records[:3]
    recorded = Model(seed=2).evaluate(SMALL, records[:2])
    path = tmp_path / "trials.jsonl"
    results.append(recorded, path)
    replay = Replay(results.trials(path))
    answers = replay.evaluate(SMALL, [records[1], records[0]])
    assert [trial.median_us for trial in answers] == [recorded[1].median_us, recorded[0].median_us]
    assert {trial.environment for trial in answers} == {"replay"}
    with pytest.raises(Unrecorded, match=r"256_512_256: no trial of hgemm_\w+ is recorded"):
        replay.evaluate(SMALL, records)
    assert not replay.has_trial(SMALL, records[0], "long")


def test_the_models_rank_correlation_with_what_was_measured() -> None:
    records = space.candidates(SMALL).records[:40]
    estimates = [model.estimate(record).us for record in records]
    measured = [
        timed_trial(record, us).model_copy(update={"environment": "gpu", "on": "NVIDIA H200"})
        for record, us in zip(records, estimates, strict=True)
    ]
    assert agreement(measured) == pytest.approx(1.0)
    backwards = [
        timed_trial(record, 1e3 / us).model_copy(update={"environment": "gpu", "on": "NVIDIA H200"})
        for record, us in zip(records, estimates, strict=True)
    ]
    assert agreement(backwards) == pytest.approx(-1.0)
    assert math.isnan(agreement([timed_trial(records[0], 5.0)])), "modelled times are no measurements"


# Proposers


def question(problem: Problem = SMALL, trials: Sequence[Trial] = ()) -> Question:
    keys = frozenset(parse(trial.record).kernel_key for trial in trials)
    return Question(space.candidates(problem), tuple(trials), None, keys)


def test_random_proposes_all_kinds() -> None:
    proposals = Random(1).propose(question(), 200)
    assert len({item.record.name for item in proposals if item.record}) > 100
    assert all(item.record and item.record.problem == SMALL for item in proposals)


def test_nearest_takes_the_nearest_first_and_never_the_asked_problem_itself() -> None:
    candidates = space.candidates(SMALL)
    nearest, farthest, same_problem = (
        revise(candidates.records[index], m=m) for index, m in ((3, 512), (40, 2048), (9, 256))
    )
    proposals = Nearest([farthest, same_problem, nearest]).propose(question(), 8)
    assert [space.decisions(item.record) for item in proposals if item.record] == [
        space.decisions(nearest),
        space.decisions(farthest),
    ]
    assert Nearest([nearest]).propose(question(trials=[timed_trial(revise(nearest, m=256), 5.0)]), 8) == []


def test_evolution_stays_near_the_best() -> None:
    best = space.candidates(SMALL).records[100]
    trials = [timed_trial(best, 5.0)]
    proposals = Evolution(0, parents=1).propose(question(trials=trials), 40)
    distances = [len(space.differing(best, item.record)) for item in proposals if item.record]
    random_distances = [
        len(space.differing(best, item.record)) for item in Random(0).propose(question(), 40) if item.record
    ]
    assert sum(distances) / len(distances) < 0.6 * sum(random_distances) / len(random_distances)


def test_tpe_learns_what_is_fast() -> None:
    require("optuna")
    environment, proposer = Model(seed=1), Roster(["tpe"], lambda: None, []).proposer(SMALL)  # type: ignore[arg-type, return-value]
    noisy, true = benchmark.search(environment, proposer, space.candidates(SMALL), 48, 8)
    assert len(noisy) == len(true) == 48
    assert np.median(true[32:]) < np.median(true[:8])


def test_heuristics_become_legal_candidates_with_their_tiles() -> None:
    require("nvMatmulHeuristics")
    large = Problem(gpu="h200", acc="f32", layout="tn", m=4096, n=4096, k=4096)
    request = question(large)
    proposer = Roster(["heuristics"], lambda: None, []).proposer(SMALL)  # type: ignore[arg-type, return-value]
    tiles = {(item.record.bm, item.record.bn) for item in proposer.propose(request, 16) if item.record}
    assert tiles & {(128, 256), (256, 128)}
    assert proposer.propose(request, 16) == [], "what it knows is said once"


def test_a_mixture_shares_and_fills_up() -> None:
    neighbour = revise(space.candidates(SMALL).records[3], m=512)
    mixture = Mixture([Nearest([neighbour]), Random(0), Evolution(0)])
    proposals = mixture.propose(question(), 9)
    assert len(proposals) == 9
    assert [item.proposer for item in proposals].count("nearest") == 1


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="oracle: must be of cost-model, policy, prior, llm, nearest"):
        Roster(["random", "oracle"], lambda: None, [])  # type: ignore[arg-type, return-value]


# Races


class Scripted:
    """A proposer with a list, as a language model's answers would be."""

    name = "scripted"

    def __init__(self, proposals: Sequence[Proposal]) -> None:
        self.queue, self.observed = list(proposals), 0

    def propose(self, question: Question, count: int) -> list[Proposal]:
        answer, self.queue = self.queue[:count], self.queue[count:]
        return answer

    def observe(self, question: Question, trials: Sequence[Trial]) -> None:
        self.observed += len(trials)


def incumbent() -> Record:
    """The slowest there is, so that something improves."""
    records = space.candidates(SMALL).records
    return records[int(Model(seed=5).true_us(records).argmax())]


def test_a_race_stores_what_it_does_and_ends_with_a_paired_gain() -> None:
    environment = Model(lambda _: incumbent(), seed=5)
    store: list[Trial] = []
    contest = race.Race(space.candidates(SMALL), incumbent())
    race.run(
        contest,
        Mixture([Random(0), Evolution(0)]),
        executor.InProcess(environment),
        store.extend,
        race.Settings(40, 8, prune=None),
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
    assert contest.improved


def test_nothing_is_evaluated_twice_and_illegal_answers_are_trials_with_the_rule() -> None:
    candidates = space.candidates(SMALL)
    legal = proposal("scripted", candidates.fields[0])
    illegal = proposal("scripted", candidates.fields[0] | {"stages": 99})
    assert illegal.record is None
    assert "stages" in illegal.violation
    batches: list[int] = []
    environment = Model(seed=1)

    class Watched(executor.InProcess):
        def run(self, jobs: Any) -> Any:
            batches.extend(len(job.records) for job in jobs if job.effort == "short")
            return super().run(jobs)

    contest = race.Race(candidates, None)
    scripted = Scripted([legal, legal, illegal, illegal, legal])
    race.run(contest, scripted, Watched(environment), lambda _: None, race.Settings(8, 2, prune=None))
    assert batches == [1]
    assert contest.failures == {"illegal": 1}
    assert "stages" in next(trial.reason for trial in contest.trials if not trial.measured)
    assert contest.stop_reason == "nothing new was proposed"
    assert scripted.observed == 2


def test_what_the_model_thinks_hopeless_is_not_compiled() -> None:
    candidates = space.candidates(SMALL)
    estimates = [model.estimate(record).us for record in candidates.records]
    slowest = proposal("scripted", candidates.fields[int(np.argmax(estimates))])
    contest = race.Race(candidates, None)
    race.run(contest, Scripted([slowest]), executor.InProcess(Model()), lambda _: None, race.Settings(8, prune=1.5))
    assert (contest.trials, contest.pruned) == ([], 1)


def test_patience_and_time_end_a_race() -> None:
    contest = race.Race(space.candidates(SMALL), None)
    race.run(
        contest,
        Random(0),
        executor.InProcess(Model(seed=1)),
        lambda _: None,
        race.Settings(400, patience=16, prune=None),
    )
    assert contest.stop_reason == "no improvement in 16 evaluations"
    assert len(contest.short_trials) < 400
    unstarted = race.Race(space.candidates(SMALL), None)
    race.run(
        unstarted, Random(0), executor.InProcess(Model()), lambda _: None, race.Settings(64), out_of_time=lambda: True
    )
    assert (unstarted.stop_reason, unstarted.trials) == ("out of time", [])


def test_no_gain_without_a_clear_interval() -> None:
    """The incumbent itself, or a winner whose interval holds 1, improves nothing."""
    record = space.candidates(SMALL).records[0]
    rival = revise(record, bn=record.bn) if record.family == "sm90_small" else revise(record, raster_group=2)
    draw = timed_trial(rival, [8.0, 9.0, 8.0, 9.0, 8.0, 8.5], [8.4, 8.6, 8.5, 8.5, 8.4, 8.6]).model_copy(
        update={"effort": "long"}
    )
    likely = draw.faster_than(INCUMBENT)
    assert likely is not None
    assert likely.low < 1 < likely.value
    assert not race.Race(space.candidates(SMALL), record, [draw]).improved
    incumbent_itself = timed_trial(record, 8.0, 9.0).model_copy(update={"effort": "long"})
    assert not race.Race(space.candidates(SMALL), record, [incumbent_itself]).improved
    better = timed_trial(rival, 8.0, 9.0).model_copy(update={"effort": "long"})
    chosen = race.Race(space.candidates(SMALL), record, [better])
    assert (chosen.promising, chosen.improved) == (True, False), "the samples that chose it prove nothing"
    again = better.model_copy(update={"effort": "final"})
    assert race.Race(space.candidates(SMALL), record, [better, again]).improved
    assert not race.Race(
        space.candidates(SMALL), record, [better, draw.model_copy(update={"effort": "final"})]
    ).improved
    before_the_long_timing = [better.model_copy(update={"effort": effort}) for effort in ("short", "medium")]
    contest = race.Race(space.candidates(SMALL), record, before_the_long_timing)
    assert contest.winner == before_the_long_timing[1]
    assert contest.gain is None
    assert not contest.improved


class Null:
    """Every record takes the incumbent's time, within noise; ``bias``: what a measurement of it is off, by chance."""

    name, on = "gpu", "a card"

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def evaluate(self, problem: Problem, records: Sequence[Record], effort: Effort = "short") -> list[Trial]:
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
    """The best of three noisy times is promising in a tenth of the searches, and one of all of them wins at most."""
    own = space.candidates(SMALL, 40)
    candidates = space.Candidates(SMALL, own.fields[1:], own.records[1:])
    promising = improved = 0
    for seed in range(60):
        contest = race.Race(candidates, own.records[0])
        place = executor.InProcess(Null(seed))  # type: ignore[arg-type]
        race.run(contest, Random(seed), place, lambda _: None, race.Settings(8, prune=None))
        promising += any(trial.effort == "final" for trial in contest.trials)
        improved += contest.improved
    assert promising >= 4
    assert improved <= 1


# Campaigns, and the catalog


def test_a_campaign_takes_up_what_was_stored(tmp_path: Path) -> None:
    problems = [SMALL, SMALL.model_copy(update={"n": 1024})]
    store = tmp_path / "trials.jsonl"

    def go(evaluations: int) -> campaign.Standing:
        settings = race.Settings(evaluations, prune=None)
        plan = campaign.Plan(problems, lambda _: None, lambda _: Random(7), store, "r", settings)
        return campaign.run(plan, executor.InProcess(Model()))

    go(8)
    before = store.read_text()
    resumed = go(8)
    assert store.read_text() == before, "nothing is evaluated twice"
    assert [contest.stop_reason for contest in resumed.races] == ["finished before"] * 2
    assert [len(contest.candidates.records) for contest in resumed.races] == [0, 0], (
        "or a thousand problems fill the memory"
    )
    assert len(before.splitlines()) == 2 * (8 + 8 + 3)


def test_within_a_budget_each_problem_gets_some_candidates_before_any_gets_more(tmp_path: Path) -> None:
    """The budget ends in the second turn, by a clock that evaluations advance."""
    problems = [SMALL.model_copy(update={"n": n}) for n in (512, 768, 1024)]
    store, clock = tmp_path / "trials.jsonl", [0.0]
    slow = {
        problem: max(space.candidates(problem).records, key=lambda record: model.estimate(record).us)
        for problem in problems
    }

    class Timed(Model):
        def evaluate(self, problem: Problem, records: Any, effort: Any = "short") -> list[Trial]:
            clock[0] += len(records) if effort == "short" else 0.1
            return super().evaluate(problem, records, effort)

    plan = campaign.Plan(
        problems, slow.__getitem__, lambda _: Random(7), store, "r", race.Settings(24, prune=None), budget_seconds=30
    )
    ended: list[Problem] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: clock[0])
        standing = campaign.run_in_turns(
            plan, executor.InProcess(Timed(slow.__getitem__)), after=lambda item: ended.append(item.problem)
        )
    counts = [len(contest.evaluations) for contest in standing.races]
    assert counts == [8, 8, 8], "all within 21 of 30 s, and the batch under way"
    assert [trial.problem for trial in results.trials(store)[:12:4]] == problems
    assert ended == problems
    assert standing.early_ends(24) == {"out of time": 3}
    assert {contest.winner.effort for contest in standing.races if contest.winner} == {"final"}, (
        "gains are timed longer"
    )
    assert clock[0] < 30


KILLED = """
import sys, time
from pathlib import Path
from tests.cudal2gen.test_tuner import *

class Hangs(Model):  # in the middle of the campaign
    batches = 0

    def evaluate(self, *question):
        self.batches += 1
        if self.batches > 8:
            time.sleep(300)
        return super().evaluate(*question)

settings = race.Settings(64, 4, prune=None)
plan = campaign.Plan([SMALL], lambda _: None, lambda _: Random(7), Path(sys.argv[1]), "r", settings)
campaign.run(plan, executor.InProcess(Hangs()))
"""


def test_a_killed_campaign_loses_no_trial_and_repeats_none(tmp_path: Path) -> None:
    store = tmp_path / "trials.jsonl"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(store)])
    processes.until(lambda: store.exists() and len(store.read_text().splitlines()) >= 12)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with store.open("a") as file:
        file.write('{"kind":"trial","environment":"mo')  # what a kill in the middle of a write leaves
    with pytest.warns(UserWarning, match="not a whole line"):
        before = results.trials(store)
    assert 12 <= len(before) < 64
    plan = campaign.Plan([SMALL], lambda _: None, lambda _: Random(7), store, "r", race.Settings(64, 4, prune=None))
    with pytest.warns(UserWarning, match="not a whole line"):
        standing = campaign.run(plan, executor.InProcess(Model()))
    after = results.trials(store)
    assert after[: len(before)] == before
    keys = [parse(trial.record).kernel_key for trial in after if trial.effort == "short"]
    assert len(keys) == len(set(keys)) == 64
    assert standing.evaluations == 64


def winner(environment: str = "gpu", on: str = "NVIDIA H200") -> race.Race:
    record = incumbent()
    rival = space.candidates(SMALL).compose(5, {}, "policy")
    best = timed_trial(rival, 8.0, 9.0, digest="d1").model_copy(
        update={"effort": "final", "environment": environment, "on": on, "proposer": "policy"}
    )
    return race.Race(space.candidates(SMALL), record, [best])


def test_only_what_a_gpu_measured_and_a_verdict_cleared_is_written() -> None:
    assert campaign.may_write(winner(), verdict_clean=True) == ""
    assert campaign.may_write(winner(), verdict_clean=False) == "its kernel has no clean verdict"
    of_another = "it was measured on NVIDIA H100 80GB HBM3, not on h200"
    assert campaign.may_write(winner(on="NVIDIA H100 80GB HBM3"), verdict_clean=True) == of_another
    for card in ("a card of no table", "NVIDIA H100 PCIe, 114 SMs", "NVIDIA H200, 66 SMs"):
        refusal = campaign.may_write(winner(on=card), verdict_clean=True)
        assert refusal == f"it was measured on {card}, not on h200"
    assert "model environment" in campaign.may_write(winner("model"), verdict_clean=True)
    assert "replay environment" in campaign.may_write(winner("replay"), verdict_clean=True)
    assert (
        campaign.may_write(race.Race(space.candidates(SMALL), None), verdict_clean=True)
        == "nothing improved beyond noise"
    )


def test_a_run_takes_up_what_its_own_card_measured(tmp_path: Path) -> None:
    store = tmp_path / "trials.jsonl"
    cards = ("NVIDIA H200", "NVIDIA H100 PCIe, 114 SMs", "NVIDIA H200")
    trials = [winner(on=card).trials[0].model_copy(update={"run": "r", "name": f"{i}"}) for i, card in enumerate(cards)]
    results.append(trials, store)
    plan = campaign.Plan([SMALL], lambda _: None, lambda _: Random(7), store, "r", race.Settings())
    for card, names in ((cards[0], ["0", "2"]), (cards[1], ["1"]), ("", ["0", "1", "2"])):
        assert [trial.name for trial in plan.stored(card)[SMALL]] == names
    assert [trial.on_its_gpu for trial in trials] == [True, False, True]


def test_the_answer_says_where_it_comes_from(tmp_path: Path) -> None:
    answer = campaign.catalog_record(winner())
    assert answer.origin.structure == "tuned"
    assert answer.origin.source == "cudal2gen tune, measured on NVIDIA H200, proposed by policy"
    assert set(answer.origin.changed) == set(space.differing(incumbent(), answer))
    path = tmp_path / "kernels.jsonl"
    catalog.save([incumbent()], path)
    catalog.put(answer, path)
    assert catalog.load(path) == [answer]
    assert any(line.startswith(tuple(answer.origin.changed)) for line in campaign.diff(winner()))
    with pytest.raises(ValueError, match="nothing improved"):
        campaign.catalog_record(race.Race(space.candidates(SMALL), None))


def test_the_incumbent_is_the_problems_own_record_else_the_nearest_that_is_legal() -> None:
    record = incumbent()
    neighbour = revise(record, m=512)
    find = campaign.Incumbents([neighbour, record])
    assert find(SMALL) == record
    resized = find(SMALL.model_copy(update={"m": 384}))
    assert resized is not None
    assert (resized.m, space.decisions(resized)) == (384, space.decisions(neighbour))
    assert campaign.Incumbents([])(SMALL) is None


# Executors


@pytest.mark.slow
def test_a_kernel_that_hangs_or_dies_costs_its_own_trial_only() -> None:
    by_stages = {
        record.ring_steps: record for record in space.candidates(SMALL).records if record.family == "sm90_wgmma"
    }
    worker = executor.Worker(Hanging, seconds=2.0)
    try:
        job = executor.Job(SMALL, (by_stages[4], by_stages[2], by_stages[5], by_stages[3]), "short")
        (result,) = worker.run([job])
    finally:
        worker.close()
    assert [trial.outcome for trial in result.trials] == ["measured", "time-out", "measured", "wrong result"]
    assert result.trials[1].reason == "no answer within 2 s"
    assert result.trials[3].reason == "the process that ran it ended (exit code 3)"


def test_a_jobs_key_is_its_content() -> None:
    first, second = space.candidates(SMALL).records[:2]
    assert executor.Job(SMALL, (first, second), "short").key == executor.Job(SMALL, (first, second), "short").key
    keys = {
        executor.Job(SMALL, records, effort).key for records in ((first,), (second,)) for effort in ("short", "long")
    }  # type: ignore[arg-type]
    assert len(keys) == 4


# Curves and the benchmark's arithmetic


def test_regret_and_evaluations_until_close_by_hand() -> None:
    # What looks best: 10, then 8 (noisy 7.9), then the 9 that noise makes look like 7.
    selected = benchmark.selected_us([10.0, 7.9, 8.5, 7.0], [10.0, 8.0, 8.4, 9.0])
    assert selected == [10.0, 8.0, 8.0, 9.0]
    assert benchmark.regret(selected, 8.0, 1) == pytest.approx(0.2)
    assert benchmark.regret(selected, 8.0, 64) == pytest.approx(1 / 9)
    assert benchmark.until_close(selected, 8.0) == math.inf, "it does not keep what it had"
    assert benchmark.until_close([10.0, 8.1, 8.0], 8.0) == 2
    assert benchmark.until_close([8.0], 8.0) == 1


def test_scores_average_seeds_and_resample_problems() -> None:
    runs = [[[10.0] * 8, [5.0] * 8], [[8.0] * 8, [8.0] * 8]]
    score = benchmark.summarise("x", [runs], [[5.0, 8.0]], 8)
    # Problem one: regrets 0.5 and 0, mean 0.25; problem two: 0.
    assert score.regret == pytest.approx((0.125,) * 4)
    assert score.bounds[0] == pytest.approx((0.0, 0.25))
    assert score.reached == 0.75
    assert score.close == 1


def test_held_out_sizes_are_nowhere_else() -> None:
    published = [record for record in catalog.load() if record.gpu == "a100" and record.acc == "f16"]
    held_out, train = benchmark.split(published, benchmark.Settings())
    assert (len(held_out), len(train)) == (20, 160)
    assert not {item.mnk for item in held_out} & {item.mnk for item in train}
    assert not {item.mnk for item in held_out} & {item.mnk for item in benchmark.other_sizes(published, held_out)}
    assert len(benchmark.other_sizes(published, held_out)) == 980
    assert len({item.size_class for item in held_out}) >= 5


def test_a_curve_is_one_svg_without_scripts() -> None:
    picture = curve.svg(
        "a < b", "evaluations", "regret", [curve.Curve("x", [(8, 0.2), (64, 0.1)], [(0.1, 0.3), (0.0, 0.2)])]
    )
    assert picture.count("<polyline") == 1
    assert picture.count("<polygon") == 1
    assert "a &lt; b" in picture
    assert "script" not in picture
    with pytest.raises(ValueError, match="no curve has a point"):
        curve.svg("t", "x", "y", [])


def test_trials_survive_the_store(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    record = space.candidates(SMALL).records[0]
    failure = trial_of(Model(), SMALL, record, "short", "compile error", reason="line 3: no")
    results.append([timed_trial(record, 8.0, 9.0), failure], path)
    first, second = results.trials(path)
    assert first.faster_than(INCUMBENT) == Ratio(*[pytest.approx(1.125)] * 3)
    assert (second.median_us, second.reason) == (math.inf, "line 3: no")
    assert parse(first.record) == record
    assert json.loads(path.read_text().splitlines()[0])["kind"] == "trial"


ORDER = [
    "environment", "on_gpu", "reward", "features", "network", "policy", "checkpoint", "proposal",
    "proposers", "facts", "regression", "cost_model", "climbing", "recorded", "training", "roster",
    "ahead", "executor", "ray_executor", "race", "memory", "curriculum", "completions", "transcript", "chat", "answers",
    "prompt", "llm", "exports", "flight", "campaign", "progress", "curve", "benchmark", "ranking",
]  # fmt: skip


def test_the_tuners_modules_import_strictly_downwards_and_are_all_described(checkout: Path) -> None:
    described = (checkout / "docs" / "tuner.md").read_text()
    modules = {path.stem for path in (checkout / "cudal2gen" / "tuner").glob("*.py")} - {"__init__"}
    assert modules == set(ORDER)
    for index, name in enumerate(ORDER):
        assert f"`{name}`" in described
        text = (checkout / "cudal2gen" / "tuner" / f"{name}.py").read_text()
        for later in ORDER[index:]:
            assert f"from cudal2gen.tuner.{later} import" not in text, (name, later)
