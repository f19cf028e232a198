"""Proves environments, executors and the store of trials without a GPU."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest

from cudal2gen import results
from cudal2gen.kernel import parse, space
from cudal2gen.results import INCUMBENT
from cudal2gen.results.ratios import Ratio
from cudal2gen.timing import model
from cudal2gen.timing.evidence import is_development
from cudal2gen.tuner import executor
from cudal2gen.tuner.environment import ModelEnvironment, Replay, Unrecorded, agreement, trial_of
from tests.cudal2gen.hanging import Hanging
from tests.cudal2gen.searched import SMALL, timed_trial


def test_the_model_is_deterministic_noisy_and_not_the_plain_one() -> None:
    candidates = space.candidates(SMALL)
    records = candidates.records[:200]
    first, second = ModelEnvironment(seed=3), ModelEnvironment(seed=4)
    assert np.array_equal(first.true_us(records), ModelEnvironment(seed=3).true_us(records))
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
    """The common part can be learned on one problem for another; the part of each problem cannot."""
    environment = ModelEnvironment(seed=1)
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
    (trial,) = ModelEnvironment().evaluate(SMALL, [stranger])
    assert (trial.outcome, trial.reason) == (
        "illegal",
        "m=128, n=512, k=256: is a record for 128_512_256, not 256_512_256",
    )


def test_replay_answers_what_was_recorded_and_refuses_the_rest(tmp_path: Path) -> None:
    records = space.candidates(SMALL).records[:3]
    recorded = ModelEnvironment(seed=2).evaluate(SMALL, records[:2])
    path = tmp_path / "trials.jsonl"
    results.append(recorded, path)
    replay = Replay(results.trials(path))
    answers = replay.evaluate(SMALL, [records[1], records[0]])
    assert [trial.median_us for trial in answers] == [recorded[1].median_us, recorded[0].median_us]
    assert {trial.environment for trial in answers} == {"replay"}
    with pytest.raises(Unrecorded, match=r"256_512_256: no trial of hgemm_\w+ is recorded"):
        replay.evaluate(SMALL, records)


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


@pytest.mark.slow
def test_a_kernel_that_hangs_or_dies_costs_its_own_trial_only() -> None:
    by_stages = {
        record.ring_steps: record for record in space.candidates(SMALL).records if record.family == "sm90_wgmma"
    }
    worker = executor.Worker(Hanging, seconds=2.0)
    try:
        job = executor.EvaluationJob(SMALL, (by_stages[4], by_stages[2], by_stages[5], by_stages[3]), "short")
        trials = worker.submit(job).result()
    finally:
        worker.close()
    assert [trial.outcome for trial in trials] == ["measured", "time-out", "measured", "wrong result"]
    assert trials[1].reason == "no answer within 2 s"
    assert trials[3].reason == "the process that ran it ended (exit code 3)"


def test_trials_survive_the_store(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    record = space.candidates(SMALL).records[0]
    failure = trial_of(ModelEnvironment(), SMALL, record, "short", "compile error", reason="line 3: no")
    of_a_removed_proposer = timed_trial(record, 8.0, 9.0).model_copy(update={"proposer": "evolution"})
    results.append([of_a_removed_proposer, failure], path)
    first, second = results.trials(path)
    assert first.faster_than(INCUMBENT) == Ratio(*[pytest.approx(1.125)] * 3)
    assert (second.median_us, second.reason) == (math.inf, "line 3: no")
    assert parse(first.record) == record
    assert json.loads(path.read_text().splitlines()[0])["kind"] == "trial"


def test_half_of_the_problems_are_held_out_and_always_the_same_half() -> None:
    """The last bit of a hash of n and k decides, so nothing is ever learned from a problem that was once held out."""
    sizes = [(64 * n, 64 * k) for n in range(1, 33) for k in range(1, 33)]
    last = [hashlib.sha256(f"{n}_{k}".encode()).digest()[-1] for n, k in sizes]
    development = [is_development(n, k) for n, k in sizes]
    assert development == [byte % 2 == 0 for byte in last]
    assert sum(development) / len(sizes) == pytest.approx(0.5, abs=0.05)
