"""Proves the policy's advantages, gradients, divergences and masks against values by hand, and that it learns."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest

from cudal2gen.generation import catalog
from cudal2gen.kernel import Problem, parse, space
from cudal2gen.tuner import checkpoint
from cudal2gen.tuner.environment import Model
from cudal2gen.tuner.features import CONTEXT, NUMBERS, Vocabulary, context, encode_candidates, numbers
from cudal2gen.tuner.network import bradley_terry, leave_one_out
from cudal2gen.tuner.policy import Action, Group, Policy, Ranked, by_problem, compare, practise
from cudal2gen.tuner.proposal import Question
from cudal2gen.tuner.proposers import PolicyProposer
from tests.packages import require

torch = require("torch")
torch.set_num_threads(1)
pytestmark = pytest.mark.torch

SMALL = Problem(gpu="h200", acc="f32", layout="tn", m=256, n=512, k=256)


def sizes(m: int, n: int, k: int, gpu: str = "h200") -> Problem:
    return SMALL.model_copy(update={"m": m, "n": n, "k": k, "gpu": gpu})


def test_the_advantage_is_against_the_mean_of_the_others() -> None:
    # 4 - (1+1)/2, 1 - (4+1)/2, 1 - (4+1)/2
    assert leave_one_out([4.0, 1.0, 1.0]) == [3.0, -1.5, -1.5]
    # The standard deviation of 4, 1, 1 is sqrt(2).
    assert leave_one_out([4.0, 1.0, 1.0], normalise=True) == pytest.approx([3 / 2**0.5, -1.5 / 2**0.5, -1.5 / 2**0.5])
    assert leave_one_out([2.0, 2.0], normalise=True) == [0.0, 0.0]
    with pytest.raises(ValueError, match="1 rewards make no group"):
        leave_one_out([1.0])


def test_bradley_terry_by_hand() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0], requires_grad=True)
    loss, pairs = bradley_terry(logits, [3.0, 2.0, 2.0])
    # The first beats the others; the others are even. softplus(-1) and softplus(-2), their mean.
    assert pairs == 2
    assert float(loss.detach()) == pytest.approx((math.log1p(math.exp(-1)) + math.log1p(math.exp(-2))) / 2)
    loss.backward()
    errors = [1 / (1 + math.exp(1)), 1 / (1 + math.exp(2))]
    assert logits.grad.tolist() == pytest.approx([-sum(errors) / 2, errors[0] / 2, errors[1] / 2])
    assert bradley_terry(logits, [1.0, 1.0, 1.05], margin=0.1)[1] == 0


def test_an_untrained_policy_is_uniform_and_equals_its_prior() -> None:
    policy = Policy()
    view = policy.view(space.candidates(SMALL))
    rows = len(view.candidates.records)
    row = next(index for index, record in enumerate(view.candidates.records) if record.family == "sm90_wgmma")
    log_probability = policy.log_probability(
        view, [Action(row, {"raster_axis": 0, "raster_group": 1, "hint_a": 2, "hint_b": 0})]
    )
    assert float(log_probability) == pytest.approx(-math.log(rows) - math.log(2 * 4 * 3 * 3), rel=1e-4)
    assert float(policy.divergence(view)) == pytest.approx(0.0, abs=1e-5)


def test_probabilities_sum_to_one_and_draws_follow_them() -> None:
    policy = Policy(1)
    view = policy.view(space.candidates(sizes(64, 64, 64)))
    policy.learned.heads[: len(policy.vocabulary)] = torch.randn(len(policy.vocabulary), CONTEXT) * 0.3
    probabilities = torch.softmax(policy.logits(view), 0).numpy()
    frequencies = np.bincount([action.row for action in policy.draw(view, 20000)], minlength=len(probabilities)) / 20000
    assert np.abs(frequencies - probabilities).max() < 0.02
    distinct = [action.row for action in policy.draw(view, 50, distinct=True)]
    assert len(set(distinct)) == 50


def test_divergence_by_hand() -> None:
    policy = Policy()
    view = policy.view(space.candidates(sizes(64, 64, 64)))
    token = int(view.ids[0, 1])
    policy.learned.heads[token, 0] = 1.0  # the first feature is 1: the logit of every row with the token rises by 1
    have = (view.ids == token).any(1).numpy()
    share = have.mean()
    total = share * math.e + 1 - share
    tilted = share * math.e / total
    by_hand = tilted * math.log(math.e / total) + (1 - tilted) * math.log(1 / total)
    assert 0 < share < 1
    assert float(policy.divergence(view)) == pytest.approx(by_hand, rel=1e-4)


def test_a_step_of_the_policy_gradient_makes_the_better_draw_likelier() -> None:
    policy = Policy()
    view = policy.view(space.candidates(SMALL))
    actions = policy.draw(view, 8)
    rewards = [1.0] + [0.0] * 7
    before = policy.log_probability(view, actions).detach()
    policy.follow_rewards([Group(view, actions, rewards)], kl=0.0)
    after = policy.log_probability(view, actions).detach()
    assert after[0] > before[0] + 0.1
    assert (after[1:] - before[1:]).mean() < after[0] - before[0]
    assert policy.steps == 1


def test_the_kl_cost_holds_the_policy_at_its_prior() -> None:
    divergences = []
    for kl in (0.0, 10.0):
        policy = Policy(3)
        view = policy.view(space.candidates(SMALL))
        for _ in range(20):
            actions = policy.draw(view, 8)
            policy.follow_rewards([Group(view, actions, [float(action.row % 7) for action in actions])], kl)
        divergences.append(float(policy.divergence(view).detach()))
    assert divergences[1] < 0.1 * divergences[0]


@pytest.mark.slow
def test_every_proposal_is_legal_new_and_for_the_problem() -> None:
    policy = Policy(5)
    for problem in (SMALL, sizes(17, 40, 72), sizes(512, 1024, 512, "a100")):
        question = Question(space.candidates(problem))
        first = PolicyProposer(policy).propose(question, 32)
        keys = frozenset(item.record.kernel_key for item in first if item.record)
        assert len(keys) == len(first)
        assert all(item.record and item.record.problem == problem for item in first)
        later = PolicyProposer(policy).propose(Question(question.candidates, proposed_keys=keys), 32)
        assert not keys & {item.record.kernel_key for item in later if item.record}


def published(acc: str = "f16", every: int = 16) -> list[catalog.Record]:
    return [record for record in catalog.load() if (record.gpu, record.acc) == ("a100", acc)][::every]


@pytest.mark.slow
def test_imitation_prefers_what_was_published_on_other_sizes() -> None:
    records = published()
    policy = Policy(0)
    policy.imitate(records[::2], seconds=8, passes=4, rivals=64)
    ranks = []
    for record in records[1::8]:
        rivals = space.candidates(record.problem, 96).records
        scores = policy.scores(record.problem, [record, *rivals], prior_only=True).detach().numpy()
        ranks.append(float((scores[1:] < scores[0]).mean()))
    # By chance one half.
    assert np.mean(ranks) > 0.9
    assert policy.steps == 0
    assert float(policy.learned.heads.abs().max()) == 0, "what is learned from rewards is still nothing"


@pytest.mark.slow
def test_both_updates_help_on_sizes_never_trained_on_and_shuffled_rewards_do_not() -> None:
    environment = Model(seed=1)
    train = [sizes(m, n, k) for m in (128, 1024) for n in (512, 2048) for k in (256, 2048)]
    held_out = [sizes(256, 1024, 512), sizes(2048, 1024, 1024), sizes(512, 512, 4096)]
    base = Policy(0)
    views = [base.view(space.candidates(problem)) for problem in train]
    rng = np.random.default_rng(0)

    def rewards(problem: Problem, records: object) -> list[float]:
        return [-math.log(trial.median_us) for trial in environment.evaluate(problem, records)]  # type: ignore[arg-type]

    ranked = []
    for view in views:
        rows = rng.choice(len(view.candidates.records), 48, replace=False)
        records = [view.candidates.records[row] for row in rows]
        ranked.append(Ranked(records, rewards(view.candidates.problem, records)))
    contrast, group, shuffled = base.copy(1), base.copy(2), base.copy(3)
    compare(contrast, ranked, rounds=30, problems=4)
    compare(
        shuffled,
        [Ranked(ranking.records, rng.permutation(ranking.scores).tolist()) for ranking in ranked],
        30,
        problems=4,
    )
    assert practise(group, views, rewards, rounds=20, problems=3, kl=0.05) == 20 * 3 * 16

    def expected(policy: Policy) -> float:
        """The mean logarithm of speed that a draw has, over problems held out."""
        values = []
        for problem in held_out:
            view = policy.view(space.candidates(problem))
            probabilities = torch.softmax(policy.logits(view), 0).detach().numpy()
            values.append(float(probabilities @ -np.log(environment.true_us(view.candidates.records))))
        return float(np.mean(values))

    start = expected(base)
    assert expected(contrast) > start + 0.2
    assert expected(group) > start + 0.2
    assert abs(expected(shuffled) - start) < 0.1


def test_adapting_to_a_problem_leaves_the_policy_as_it_was_unless_it_is_to_keep_it() -> None:
    environment, candidates = Model(seed=2), space.candidates(SMALL)
    for keep in (False, True):
        policy = Policy(0)
        proposer = PolicyProposer(policy, adapt=4, group=True, keep=keep)
        question = Question(candidates)
        records = [item.record for item in proposer.propose(question, 8) if item.record]
        trials = environment.evaluate(SMALL, records)
        proposer.observe(Question(candidates, tuple(trials)), trials)
        assert policy.steps == 0
        proposer.conclude()
        assert policy.steps == (5 if keep else 0)
        scores = proposer._open_session(question)[0].scores(SMALL, records).detach().numpy()
        fastest = int(np.argmin([trial.median_us for trial in trials]))
        assert scores[fastest] > np.median(scores)
    frozen = PolicyProposer(policy, frozen=True)
    frozen.observe(Question(candidates, tuple(trials)), trials)
    assert policy.steps == 5


def test_a_checkpoint_is_small_and_goes_on_where_it_was(tmp_path: Path) -> None:
    policy, candidates = Policy(0), space.candidates(SMALL)
    view = policy.view(candidates)
    ranked = [Ranked(candidates.records[:40], [float(score) for score in range(40)])]
    for _ in range(3):
        policy.contrast(ranked)
    path = tmp_path / "deep" / "policy.pt"
    checkpoint.save(policy, path)
    assert path.stat().st_size < 400_000
    loaded = checkpoint.load(path)
    assert loaded.steps == 3
    assert torch.allclose(loaded.logits(loaded.view(candidates)), policy.logits(view))
    # The optimiser's state is there too: the next step is the same one.
    assert policy.contrast(ranked) == pytest.approx(loaded.contrast(ranked))
    assert torch.allclose(loaded.logits(loaded.view(candidates)), policy.logits(view), atol=1e-6)
    assert list(path.parent.iterdir()) == [path]


def test_a_damaged_checkpoint_is_said_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "policy.pt"
    checkpoint.save(Policy(0), path)
    torch.save(torch.load(path, weights_only=True) | {"format": 0}, path)
    with pytest.raises(checkpoint.CheckpointError, match=r"policy.pt is of format 0, not 1; remove it to start anew"):
        checkpoint.load(path)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(checkpoint.CheckpointError, match=r"policy.pt holds no policy .*remove it to start anew"):
        checkpoint.load(path)


def test_features_are_finite_and_tell_problems_apart() -> None:
    for problem in (SMALL, sizes(1, 1 << 20, 8), sizes(16384, 16384, 16384)):
        features = context(problem)
        assert features.shape == (CONTEXT,)
        assert np.isfinite(features).all()
        assert np.abs(features).max() < 12
    assert not np.array_equal(context(SMALL), context(sizes(256, 512, 256, "a100")))
    candidates = space.candidates(SMALL, 50)
    encoded = encode_candidates(Vocabulary(), candidates)
    assert encoded.numbers.shape == (len(candidates.records), NUMBERS)
    assert np.isfinite(encoded.numbers).all()
    split = next(record for record in space.candidates(SMALL).records if record.split_k == 2)
    assert numbers(split)[9] == 1.0, "log2 of the slices"
    assert numbers(split)[7] == pytest.approx(math.log2(256 // split.k_step // 2) / 5)


def test_records_are_grouped_by_problem() -> None:
    elsewhere = sizes(512, 512, 512)
    records = [*space.candidates(SMALL).records[:2], space.candidates(elsewhere).records[0]]
    (only,) = by_problem(records, [1.0, 2.0, 3.0])
    assert (list(only.records), list(only.scores)) == (records[:2], [1.0, 2.0])


@pytest.mark.slow
def test_ten_thousand_proposals_a_second() -> None:
    """On one core; a fifth of it is asked for here, since machines that run tests are slow and busy."""
    policy = Policy(0)
    view = policy.view(space.candidates(sizes(4096, 4096, 4096)))
    best = 0.0
    for _ in range(3):
        start, count = time.process_time(), 0
        while time.process_time() - start < 0.2:
            actions = policy.draw(view, 512)
            records = [view.candidates.compose(action.row, action.choices, "policy") for action in actions]
            count += len(records)
        best = max(best, count / (time.process_time() - start))
    assert all(parse(record.model_dump(mode="json")) == record for record in records[:20])
    assert best > 2000, f"{best:.0f} proposals a second"
