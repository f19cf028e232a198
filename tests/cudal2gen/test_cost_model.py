"""Proves what the cost model learns and proposes, which trials it holds out, and what a replay may propose.

The cost model corrects the times of the timing model by networks that are trained on measured times. A replay is an
environment whose times were recorded before.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudal2gen import results
from cudal2gen.kernel import FAMILIES, IllegalRecord, Problem, Record, parse, space
from cudal2gen.timing import model
from cudal2gen.timing.recordings import autoheuristic, tile
from cudal2gen.timing.recordings.autoheuristic import RecordedSizes, Recording, Tile
from cudal2gen.tuner import benchmark, campaign, cost_model, executor, ranking, recorded, regression, search
from cudal2gen.tuner.climbing import CostModelProposer, HillClimbing, ModelOrder, neighbours
from cudal2gen.tuner.cost_model import CostModel, TimedRecords
from cudal2gen.tuner.environment import ModelEnvironment, Replay
from cudal2gen.tuner.facts import facts
from cudal2gen.tuner.proposal import Question
from cudal2gen.tuner.proposers import Nearest, Random
from cudal2gen.tuner.regression import TrainingRows
from cudal2gen.tuner.training import Learning
from kernelproof.ground.errors import WrongInput
from tests.cudal2gen.test_evidence import SHAPES, TILES, write_recordings

SMALL = Problem(gpu="a100", acc="f16", layout="tn", m=512, n=1024, k=512)


def problem_of(sizes: RecordedSizes | tuple[int, int, int], gpu: str = "a100") -> Problem:
    """The fp16 problem of these sizes m, n, k with an fp32 accumulator."""
    m, n, k = sizes
    return Problem(gpu=gpu, acc="f32", layout="nn", m=m, n=n, k=k)


def recordings(deep_is_fast: bool = False, gpu: str = "a100") -> dict[Problem, Recording]:
    """Twelve problems whose times are the timing model's, except for an effect of bk that it cannot know: tiles of one
    bk take half of the modelled time. This is 64 if ``deep_is_fast``, else 32."""
    sample = {}
    for sizes in SHAPES:
        problem = problem_of(sizes, gpu)
        times = {}
        for own in TILES:
            factor = 0.5 if (own.bk == 64) == deep_is_fast else 1.0
            times[own] = factor * model.estimate_kernel(tile.record_of(problem, own).modelled).us
        sample[problem] = Recording(RecordedSizes(*sizes), times, 10.0)
    return sample


def train_small_model(sample: dict[Problem, Recording]) -> CostModel:
    """A cost model of three networks, trained on recordings."""
    return cost_model.train(list(recorded.timed(sample.items()).values()), members=3, epochs=60)


# Recordings


def test_rows_keep_the_layout_of_b_and_a_by_columns_is_left_out(tmp_path: Path) -> None:
    """The strides of A and B follow the types in a line of a recording. B of one problem is changed to columns, which
    is layout tn. A of another problem is changed to columns, and that problem is left out."""
    write_recordings(tmp_path / "a100.txt", lambda sizes, own: 10.0 * own.bm)
    loaded = autoheuristic.problems([tmp_path])
    assert set(loaded) == {problem_of(sizes) for sizes in SHAPES}
    text = (tmp_path / "a100.txt").read_text()
    (tmp_path / "a100.txt").write_text(
        text.replace(
            "256,512,1024,torch.float16,torch.float16,512,1,1024,1",
            "256,512,1024,torch.float16,torch.float16,512,1,1,512",
        ).replace("1024,768,1024,torch.float16,torch.float16,768,1", "1024,768,1024,torch.float16,torch.float16,1,1024")
    )
    changed = autoheuristic.problems([tmp_path / "a100.txt"])
    assert set(loaded) - set(changed) == {problem_of((256, 1024, 512)), problem_of((1024, 1024, 768))}
    (transposed,) = set(changed) - set(loaded)
    assert (transposed.layout, transposed.mnk) == ("tn", "256_1024_512")


def test_a_recorded_tile_is_a_record_that_nothing_proposes() -> None:
    tile.register()
    problem = problem_of(SHAPES[0])
    record = tile.record_of(problem, Tile(64, 64, 32, 4, 4))
    assert parse(record.model_dump(mode="json")) == record
    assert tile.kernel_of(record) == record.modelled
    assert not any(candidate.family == "triton_tile" for candidate in space.candidates(problem, 50).records)
    assert "triton_tile" in FAMILIES


@given(
    st.sampled_from((16, 32, 64, 128)), st.sampled_from((16, 64, 256)), st.sampled_from((16, 32, 128)),
    st.integers(1, 6), st.sampled_from((1, 2, 4, 8)),
)  # fmt: skip
def test_a_recorded_tile_takes_what_its_configuration_says(bm: int, bn: int, bk: int, stages: int, warps: int) -> None:
    """A ring has a buffer for every stage but the one that is multiplied, and at least one."""
    record = tile.record_of(problem_of(SHAPES[0]), Tile(bm, bn, bk, stages, warps))
    buffers = 1 if stages == 1 else stages - 1
    assert record.smem_bytes == buffers * 2 * (bm + bn) * bk
    assert (record.threads, record.k_step, record.ring_steps, record.split_k) == (32 * warps, bk, stages, 1)
    sums = bm * bn // (32 * warps)
    assert (record.accumulator_registers, record.configuration) == (sums, Tile(bm, bn, bk, stages, warps))
    assert sums < record.estimated_registers <= 255 or record.estimated_registers == 255
    assert record.name.endswith(f"_{bm}x{bn}x{bk}_s{stages}_w{warps}")


def test_a_replay_has_what_was_recorded_and_refuses_the_rest() -> None:
    problem, recording = next(iter(recordings().items()))
    replay = Replay(recorded.as_trials(problem, recording))
    candidates = replay.candidates(problem)
    assert {record.configuration for record in candidates.records} == set(TILES)  # type: ignore[attr-defined]
    assert replay.least_us(problem) == pytest.approx(min(recording.tiles.values()))
    unrecorded = tile.record_of(problem, Tile(256, 16, 16, 2, 8))
    assert "was not recorded for" in candidates.refusal(unrecorded)
    adopted = space.adopt(unrecorded, candidates, "nearest")
    assert candidates.refusal(adopted) == ""
    contest = search.Search(candidates, None)
    proposals = [Random(0), Nearest([unrecorded.at(problem_of(SHAPES[3]))])]
    for proposer in proposals:
        search.run(contest, proposer, executor.InProcess(replay), lambda _: None, search.SearchLimits(64, prune=None))
        contest.stop_reason = ""
    assert not contest.failures
    assert {trial.environment for trial in contest.trials} == {"replay"}
    with pytest.raises(IllegalRecord, match="no trial is recorded on A100, recorded by AutoHeuristic"):
        replay.candidates(problem_of((8, 8, 8)))


def test_an_unrecorded_proposal_is_a_failed_trial_not_the_end() -> None:
    from cudal2gen.tuner.proposal import legal_proposal
    from tests.cudal2gen.searched import Scripted

    problem, recording = next(iter(recordings().items()))
    replay = Replay(recorded.as_trials(problem, recording))
    stranger = legal_proposal("scripted", tile.record_of(problem, Tile(256, 16, 16, 2, 8)))
    contest = search.Search(replay.candidates(problem), None)
    search.run(
        contest, Scripted([stranger]), executor.InProcess(replay), lambda _: None, search.SearchLimits(8, prune=None)
    )
    assert contest.failures == {"illegal": 1}
    assert "was not recorded for" in contest.trials[0].reason


@pytest.mark.slow
def test_files_of_trials_and_of_recordings_are_read_alike(tmp_path: Path) -> None:
    write_recordings(tmp_path / "a100.txt", lambda sizes, own: 10.0 * own.bm)
    own = ModelEnvironment(seed=1).evaluate(SMALL, space.candidates(SMALL).records[:3])
    results.append(own, tmp_path / "trials.jsonl")
    both = recorded.trials([tmp_path, tmp_path / "trials.jsonl"])
    assert len(both) == len(SHAPES) * len(TILES) + 3
    assert recorded.trials([tmp_path / "trials.jsonl"], lambda problem: problem.acc == "f16") == own
    with pytest.raises(WrongInput, match="no recorded trial of the chosen GPU"):
        recorded.trials([tmp_path], lambda problem: problem.gpu == "h200")
    with pytest.raises(WrongInput, match="no such file or folder"):
        recorded.trials([tmp_path / "absent"])


def test_a_campaign_over_recordings_counts_what_it_misses(tmp_path: Path) -> None:
    sample = recordings()
    replay = Replay([trial for item in list(sample.items())[:3] for trial in recorded.as_trials(*item)])
    plan = campaign.CampaignPlan(
        replay.problems, lambda _: None, lambda _: Random(0), tmp_path / "t.jsonl", "r",
        search.SearchLimits(64, prune=None), find_candidates=replay.candidates,
    )  # fmt: skip
    standing = campaign.run(plan, executor.InProcess(replay))
    assert campaign.replay_summary(standing, replay.least_us).endswith(
        "0.00% slower than the best recorded ones on average, 3 of 3 problems' best was found"
    )


# The regression and the cost model


def test_networks_learn_an_order_and_ignore_a_problems_own_scale() -> None:
    """Each of 30 problems adds a large number of its own to the target, and networks learn the rest of it."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(0, 1, (600, 3)).astype(np.float32)
    problem = np.repeat(np.arange(30), 20)
    target = np.sin(inputs[:, 0]) + 0.5 * inputs[:, 1]
    scales = rng.normal(0, 10, 30)[problem]
    samples = TrainingRows(inputs, (target + scales).astype(np.float32), np.ones(600, np.float32), problem)
    ensemble = regression.fit(samples, members=2, epochs=80, seed=1)
    fresh = rng.normal(0, 1, (200, 3)).astype(np.float32)
    expected = np.sin(fresh[:, 0]) + 0.5 * fresh[:, 1]
    for member in ensemble.predict(fresh):
        assert np.corrcoef(member, expected)[0, 1] > 0.98


def test_gradients_are_those_of_differences() -> None:
    """The gradient of each array's last element is compared with a central difference of the weighted errors' sum."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(0, 1, (8, 3)).astype(np.float32)
    arrays = {name: array.astype(np.float64) for name, array in regression._start(inputs, 2, 4, rng).items()}
    ensemble = regression.Ensemble(arrays)  # type: ignore[arg-type]
    error = rng.normal(0, 1, (2, 8))
    _, hidden = ensemble._forward(inputs[None])
    for name, gradient in ensemble.gradients(inputs[None], error, hidden).items():  # type: ignore[arg-type]
        place = tuple(np.array(arrays[name].shape) - 1)
        before = arrays[name][place]
        values = []
        for step in (1e-5, -1e-5):
            arrays[name][place] = before + step
            values.append(float((error * ensemble._forward(inputs[None])[0]).sum()))
        arrays[name][place] = before
        total = np.broadcast_to(gradient, arrays[name].shape)[place]
        assert total == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-4), name


def test_no_network_sees_the_problems_by_which_it_is_judged() -> None:
    """One problem of four differs from the others. The three networks that see it learn it, and the fourth does not."""
    inputs = np.tile(np.linspace(-1, 1, 20, dtype=np.float32)[:, None], (4, 1))
    problem = np.repeat(np.arange(4), 20)
    target = np.where(problem == 3, -1, 1) * inputs[:, 0]
    samples = TrainingRows(
        np.column_stack([inputs, problem == 3]).astype(np.float32), target, np.ones(80, np.float32), problem
    )
    ensemble = regression.fit(samples, members=4, epochs=80, batch=1, seed=1)
    unseen = ensemble.left_out(samples)
    slopes = [np.polyfit(inputs[:20, 0], unseen[20 * place : 20 * place + 20], 1)[0] for place in range(4)]
    assert min(slopes[:3]) > 0.7
    assert slopes[3] > 0, "as the others, for all that it knows"
    seen = [np.polyfit(inputs[:20, 0], member[60:], 1)[0] for member in ensemble.predict(samples.inputs)]
    assert max(seen[:3]) < -0.7
    with pytest.raises(ValueError, match="two problems"):
        regression.fit(TrainingRows(*(part[:20] for part in samples)), members=2, epochs=1)


@pytest.mark.parametrize("rows", [5, regression.ROWS, 3 * regression.ROWS + 7])
def test_products_in_parts_are_products(rows: int) -> None:
    """Products of matrices are computed in parts of ``regression.ROWS`` rows, the last of which may be shorter."""
    rng = np.random.default_rng(0)
    shared, own, matrices = (rng.normal(0, 1, shape) for shape in ((1, rows, 7), (3, rows, 7), (3, 7, 4)))
    for values in (shared, own):
        product = regression.product(values, matrices)  # type: ignore[arg-type]
        np.testing.assert_allclose(product, values @ matrices, rtol=1e-12)
        expected = values.transpose(0, 2, 1) @ product
        np.testing.assert_allclose(regression.inner(values, product), expected, rtol=1e-12)  # type: ignore[arg-type]
    assert regression.ROWS * regression.HIDDEN**2 <= 1 << 18, "from there on OpenBLAS wakes other cores"


def test_what_the_timing_model_misses_is_learned_for_other_problems() -> None:
    sample = recordings()
    apart = dict(list(sample.items())[-3:])  # the last three problems, which are not trained
    learned = train_small_model(dict(list(sample.items())[:-3]))
    for problem, recording in apart.items():
        records = [tile.record_of(problem, own) for own in recording.tiles]
        us = list(recording.tiles.values())
        chosen = us[int(np.argmin(learned.times(records)))]
        assert chosen / min(us) - 1 < 0.05
        assert us[int(np.argmin(benchmark.modelled_times(records)))] / min(us) - 1 > 0.3, "the estimate alone is wrong"


def test_trials_of_the_problem_correct_the_model_nearby_and_make_it_sure() -> None:
    """Four of the tiles have trials, of which the first is slower than the networks say. The model agrees with these
    trials and is sure of them, and takes over their scale for tiles without trials."""
    learned = train_small_model(recordings())
    problem = problem_of(SHAPES[0])
    records = [tile.record_of(problem, own) for own in TILES]
    inputs = learned.inputs(facts(records), learned.tokens)
    members = learned.prior(inputs)
    prior_mean = members.mean(0)
    # Costs are ratios to an incumbent, here microseconds times exp(-7). The scale must not matter.
    log_cost = prior_mean[:4].astype(np.float64) - 7.0 + np.array([0.3, 0.0, 0.0, 0.0])
    some = cost_model.Inputs(*(part[:4] for part in inputs))
    mean, deviation = learned.posterior(some, log_cost, noise=1e-3).predict(inputs, members)
    assert mean[:4] == pytest.approx(log_cost, abs=0.02)
    assert (mean[4:] - prior_mean[4:]).mean() == pytest.approx(-7.0, abs=0.2)
    assert deviation[:4].max() < 0.3 * deviation[8:].min()


def test_what_does_not_hold_for_other_problems_is_not_believed() -> None:
    """Times are the timing model's except for noise. The networks' correction is dropped, and the noise remains."""
    rng, sample = np.random.default_rng(0), recordings()
    timed = list(recorded.timed(sample.items()).values())
    by_chance = [
        TimedRecords(own.records, list(benchmark.modelled_times(own.records) * np.exp(rng.normal(0, 0.1, len(own.us)))))
        for own in timed
    ]
    learned = cost_model.train(by_chance, members=3, epochs=60)
    records = [tile.record_of(problem_of(SHAPES[0]), own) for own in TILES]
    corrections = np.log(learned.times(records)) - np.log(benchmark.modelled_times(records))
    assert corrections.std() < 0.03
    assert 0.04 < learned.spread < 0.2


def test_a_campaign_learns_from_its_trials_and_begins_with_the_timing_model() -> None:
    problems = list(recordings().items())
    learning = Learning([slowest_record(problems[0][0])])
    records = [tile.record_of(problems[-1][0], own) for own in TILES]
    assert learning.model.times(records) == pytest.approx(benchmark.modelled_times(records), rel=1e-3)
    trials = [trial for item in problems[:-1] for trial in recorded.as_trials(*item)]
    learning.learn(trials[: 3 * len(TILES)])
    assert learning.model.ensemble is None, "three problems say nothing of a fourth"
    learning.learn(trials)
    assert learning.model.ensemble is not None
    assert learning.record_count == len(trials), "what is told twice counts once"
    model = learning.model
    learning.learn(trials[:4])
    assert learning.model is model, "nothing is new"
    us = problems[-1][1].tiles.values()
    assert list(us)[int(np.argmin(learning.model.times(records)))] / min(us) < 1.05
    # The pool has the best record of each problem, or its initial record if nothing was measured.
    best = {record.problem: record for record in learning.pool}
    assert len(best) == len(problems) - 1
    for problem, recording in problems[:-1]:
        assert recording.tiles[best[problem].configuration] == min(recording.tiles.values())  # type: ignore[attr-defined]


def slowest_record(problem: Problem) -> Record:
    """The recorded record of a problem that takes longest."""
    recording = recordings()[problem]
    return tile.record_of(problem, max(recording.tiles, key=recording.tiles.__getitem__))


# Proposers


def environment_search(proposer: object, evaluations: int) -> float:
    """The share by which the best of a search's ``evaluations`` records is slower than the best of 150 candidates."""
    environment, candidates = ModelEnvironment(seed=1), space.candidates(SMALL, 150)
    trials = benchmark.search(environment, proposer, candidates, evaluations, 8)  # type: ignore[arg-type]
    assert len(trials) == evaluations
    least = float(environment.true_us(candidates.records).min())
    return benchmark.selected_times(environment, trials)[0][-1] / least - 1


@pytest.mark.thorough
@pytest.mark.slow
def test_a_campaign_teaches_later_searches() -> None:
    environment = ModelEnvironment(seed=1)
    problems = [SMALL.model_copy(update={"n": n, "m": m}) for n in (512, 2048, 4096) for m in (256, 1024)]
    learning = benchmark.campaign(environment, problems, benchmark.BenchmarkPlan(evaluations=16), 0)
    assert learning.record_count == 6 * 16
    informed = environment_search(CostModelProposer(learning.model, learning.pool), 4)
    assert informed < np.mean([environment_search(Random(seed), 4) for seed in range(4)]) - 0.05
    assert environment_search(CostModelProposer(CostModel()), 16) < 0.05, "also without any training"


def test_the_first_answer_has_the_models_best_and_the_nearest_record() -> None:
    learned = train_small_model(recordings())
    problem = problem_of(SHAPES[0])
    replay = Replay(recorded.as_trials(problem, recordings()[problem]))
    near = tile.record_of(problem_of(SHAPES[1]), TILES[0])
    proposer = CostModelProposer(learned, [near])
    first, second = proposer.propose(Question(replay.candidates(problem)), 8)
    candidates = replay.candidates(problem).records
    assert first.record is not None
    assert first.record.kernel_key == candidates[int(np.argmin(learned.times(candidates)))].kernel_key
    assert second.record is not None
    assert second.record.configuration == TILES[0]  # type: ignore[attr-defined]


def test_climbing_takes_neighbours_of_the_best() -> None:
    """The first proposals are the best by the timing model. Later ones are records that were not tried."""
    candidates = space.candidates(SMALL, 150)
    start = ModelOrder("timing model", benchmark.modelled_times)
    first = start.propose(Question(candidates), 3)
    estimates = benchmark.modelled_times(candidates.records)
    assert first[0].record is not None
    assert benchmark.modelled_times([first[0].record])[0] == pytest.approx(min(estimates))
    environment = ModelEnvironment(seed=1)
    records = [item.record for item in first if item.record]
    trials = environment.evaluate(SMALL, [*records, candidates.records[7]])
    keys = frozenset(record.kernel_key for record in [*records, candidates.records[7]])
    request = Question(candidates, tuple(trials), None, keys)
    assert any(True for _ in neighbours(candidates, request.ranked[0].record)), "the best record has neighbours"
    proposals = HillClimbing(start, "climbing").propose(request, 8)
    assert len(proposals) == 2
    assert all(item.record and item.record.kernel_key not in keys for item in proposals)


# The comparison on recordings


@pytest.mark.slow
def test_sizes_are_held_out_whole_over_gpus_and_what_learns_never_has_them() -> None:
    both = recordings() | recordings(gpu="h100")
    settings = ranking.RankingPlan(folds=4, seeds=1)
    held_out: list[Problem] = []
    for fold in ranking.folds(both, settings, lambda _: None):
        sizes = {(problem.m, problem.n, problem.k) for problem in fold.held_out}
        assert not sizes & {(problem.m, problem.n, problem.k) for problem in fold.trained}
        assert not sizes & {(record.m, record.n, record.k) for own in fold.best.values() for record in own}
        held_out += fold.held_out
    assert sorted(problem.key for problem in held_out) == sorted(problem.key for problem in both)


@pytest.mark.slow
def test_the_table_of_recordings_has_regrets_by_hand_and_says_what_is_missed() -> None:
    sample = recordings()
    settings = ranking.RankingPlan(folds=3, seeds=1, searched=3)
    ranked, searched = ranking.compare(sample, settings)
    by_name = {row.name: row for row in ranked}
    expected = [
        list(recording.tiles.values())[
            int(np.argmin(benchmark.modelled_times([tile.record_of(problem, own) for own in recording.tiles])))
        ]
        / min(recording.tiles.values())
        - 1
        for problem, recording in sample.items()
    ]
    assert by_name["timing model"].regret[0] == pytest.approx(np.mean(expected))
    assert by_name["cost model"].regret[0] < 0.5 * by_name["timing model"].regret[0]
    assert {row.name for row in searched} >= {"nearest + hill climbing", "cost model", "portfolio", "random"}
    assert all(row.regret[-1] <= row.regret[0] for row in searched)
    text = ranking.markdown(ranked, searched, ranking.largest_quarter(sample, settings), settings)
    assert text.index("Ranking") < text.index("Search")
    missed = by_name["cost model"]._replace(regret=(0.016, 0.0))
    assert ranking.claims([missed]) == ["a100: the cost model's top-1 regret is 1.60%, target 1.5%: MISSED."]


def test_intervals_cover_environments_and_problems() -> None:
    """``regrets`` has the shape (environments, problems, evaluations)."""
    regrets = np.zeros((2, 3, 1))
    regrets[1] = 0.1  # the environments account for the whole difference
    means, ((low, high),) = benchmark.interval(regrets)
    assert means == pytest.approx((0.05,))
    assert (low, high) == pytest.approx((0.0, 0.1))


# By m, n, k: the modelled microseconds of a problem's first candidate.
FROZEN_US = {(4096, 4096, 4096): 2179.3162318840577, (64, 4096, 256): 7.4855072463768115}


@pytest.mark.slow
def test_the_environments_model_is_frozen() -> None:
    """Its times are those of 2026-11-22, whatever the timing model says today."""
    for (m, n, k), us in FROZEN_US.items():
        record = space.candidates(SMALL.model_copy(update={"m": m, "n": n, "k": k})).records[0]
        assert model.frozen_us(record) == pytest.approx(us, rel=1e-9)
        assert not math.isclose(model.estimate(record).us, us, rel_tol=1e-3)


@given(st.integers(0, 3), st.booleans())
def test_a_proposers_search_starts_from_the_best_trial_else_from_the_incumbent(count: int, known: bool) -> None:
    trials = [SimpleNamespace(record={"bm": 64 + number}) for number in range(count)]
    incumbent = SimpleNamespace(decisions=lambda: {"bm": 32}) if known else None
    question: Any = SimpleNamespace(ranked=trials, incumbent=incumbent)
    proposer = object.__new__(CostModelProposer)
    assert proposer._starts(question) == [{"bm": 64} if count else {"bm": 32} if known else {}]


@given(st.lists(st.floats(1, 9), min_size=1, max_size=10), st.floats(0.5, 1))
def test_the_regret_of_a_search_is_that_of_its_trials_so_far(times: list[float], best: float) -> None:
    """``times``: those of the kernel that a search would choose after each trial. It may have fewer trials than are
    compared."""
    problem = problem_of(SHAPES[0])
    replay: Any = SimpleNamespace(candidates=lambda of: "candidates")
    tiles = SimpleNamespace(tiles={"a": best + 1, "b": best})
    fold: Any = SimpleNamespace(seed=1, held_out=defaultdict(lambda: tiles))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "proposers", lambda *_: {"one": 1, "two": 2})
        patch.setattr(benchmark, "search", lambda *arguments: arguments)
        patch.setattr(benchmark, "selected_times", lambda replay, contest: (times, contest))
        regrets = ranking._searches(fold, problem, replay)
    expected = [(times[:count][-1] - best) / best for count in (1, 2, 4, 8)]
    assert regrets == {"one": pytest.approx(expected), "two": pytest.approx(expected)}
