"""Proves which records are candidates of a search, and which reward a trial has."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudal2gen.generation import catalog
from cudal2gen.kernel import (
    IllegalRecord,
    Problem,
    Sm80Direct,
    Sm80Multistage,
    fit,
    parse,
    revise,
    sm80_multistage,
    sm90_wgmma,
    sm120_mma,
    space,
)
from cudal2gen.kernel.mma_sync import SPLITS
from cudal2gen.kernel.sm80_multistage import STAGES
from cudal2gen.results import INCUMBENT, KERNEL
from cudal2gen.tuner import reward
from cudal2gen.tuner.environment import ModelEnvironment, trial_of
from tests.cudal2gen.searched import AMPERE, SMALL, samples, timed_trial


@pytest.mark.parametrize("tiles", [sm80_multistage.TILES, sm120_mma.TILES, *sm90_wgmma.TILES.values()])
def test_tiles_that_are_tried_are_distinct_and_whole_for_an_mma(tiles: list[tuple[int, ...]]) -> None:
    """An MMA computes 16 x 8 elements or more, and a CTA stores rows of at least 32 bytes."""
    assert all(bm % 16 == bn % 16 == 0 < min(bm, bn) for bm, bn, *_ in tiles)
    assert len({str(tile) for tile in tiles}) == len(tiles)


@pytest.mark.slow
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


# Sizes m; and sizes n and k, of which many are whole vectors of 8 elements.
extents = st.one_of(st.integers(1, 300), st.sampled_from([1000, 4096, 12289, 16384]))
vectors = st.one_of(st.integers(1, 40).map(lambda count: 8 * count), extents)


@pytest.mark.slow
@settings(max_examples=30)
@given(m=extents, n=vectors, k=vectors, gpu=st.sampled_from(["h200", "a100", "rtx3090"]), seed=st.integers(0, 99))
def test_no_illegal_record_is_ever_drawn(m: int, n: int, k: int, gpu: str, seed: int) -> None:
    """Any values of free fields on any structure are legal.

    A problem without candidates has rows that TMA cannot read, since they are not whole vectors, so that an H200 only
    has the few candidates without TMA that are worthwhile, or it has a D of at most eight columns.
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
    """If k is not a multiple of a vector, there is no candidate with TMA. Predicates on Ampere need it too, so the
    caller pads."""
    with pytest.raises(IllegalRecord, match="no family has a legal record for h200 f32 tn 256_512_100"):
        space.candidates(SMALL.model_copy(update={"k": 100}))
    unaligned = space.candidates(AMPERE.model_copy(update={"k": 100}))
    assert {record.padding for record in unaligned.records} == {"pad"}  # type: ignore[union-attr]


@pytest.mark.slow
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
    # There may be no good record near a record of another GPU. In that case a candidate is used.
    stranger = revise(catalog.find(AMPERE).record, split_k=16)  # here k has only 8 steps
    assert stranger.family not in candidates.families
    assert space.adopt(stranger, candidates, "nearest").family in candidates.families


def test_differing_names_fields_with_both_values() -> None:
    candidates = space.candidates(SMALL)
    record = next(record for record in candidates.records if record.family == "sm90_wgmma")
    assert space.differing(record, revise(record, raster_group=2)) == {"raster_group": (8, 2)}


def test_the_paper_reward_by_hand() -> None:
    cases = [reward.RewardCase(1.5, 0.25), reward.RewardCase(0.5, 0.75)]
    # mean(1.5 - 0.1*0.25, 0.5 - 0.1*0.75) - 0.001*200 = mean(1.475, 0.425) - 0.2
    assert reward.reward(cases, 200, alpha=0.1, beta=0.001) == pytest.approx(0.75)
    assert reward.reward(cases[:1], 0, alpha=0.0, beta=1.0) == 1.5
    with pytest.raises(ValueError, match="at least"):
        reward.reward([], 0, 0.1, 0.1)


def test_the_reward_of_trials_has_errors_lengths_and_failures() -> None:
    from cudal2gen.generation.renderer import render

    record = space.candidates(SMALL).records[0]
    fast, slow = timed_trial(record, 8.0, 12.0, max_diff=0.5), timed_trial(record, 10.0, 5.0)
    without_length = reward.RewardWeights(alpha=0.2, beta=0.0)
    # mean(12/8 - 0.2*0.5, 5/10)
    assert reward.of_trials([fast, slow], without_length) == pytest.approx(0.95)
    value = reward.of_trials([fast], reward.RewardWeights(alpha=0.0, beta=1e-5))
    assert value == pytest.approx(1.5 - 1e-5 * len(render(record)))
    failure = trial_of(ModelEnvironment(), SMALL, record, "short", "spill", reason="spills 8 bytes")
    assert reward.of_trials([fast, failure], reward.RewardWeights(failed=-1.0)) == -1.0
    assert reward.of_trials([fast, failure], reward.RewardWeights()) == 0.0
    # 12/8 - 0.01*0.5, since by default an error costs a hundredth, and length costs nothing.
    assert reward.of_trials([fast], reward.RewardWeights()) == pytest.approx(1.495)


def test_the_lower_bound_of_speed_is_below_a_noisy_median_and_at_a_quiet_one() -> None:
    record = space.candidates(SMALL).records[0]
    bounded = reward.RewardWeights(alpha=0.0, lower_bound=True)
    assert reward.of_trials([timed_trial(record, 8.0, 12.0)], bounded) == pytest.approx(1.5)
    noisy = timed_trial(record, [8.0, 9.0, 7.0, 8.5, 7.5, 8.0], [12.0, 11.0, 13.0, 12.5, 11.5, 12.0])
    assert reward.of_trials([noisy], bounded) < 1.45
    with pytest.raises(ValueError, match="incumbent was not timed beside it"):
        reward.of_trials([timed_trial(record, 8.0)], bounded)


def test_a_baseline_is_the_reference_before_the_incumbent() -> None:
    record = space.candidates(SMALL).records[0]
    timings = (samples(KERNEL, [8.0] * 6), samples(INCUMBENT, [12.0] * 6), samples("cublas-tn", [10.0] * 6))
    trial = trial_of(ModelEnvironment(), SMALL, record, "short", "measured", timings=timings)
    assert reward.of_trials([trial], reward.RewardWeights(alpha=0.0)) == pytest.approx(1.25)
    assert trial.cost == pytest.approx(8 / 12)
    ratio = trial.faster_than("cublas-tn")
    assert ratio is not None
    assert tuple(ratio) == pytest.approx((1.25, 1.25, 1.25))


@given(st.sampled_from([32, 64]), st.integers(1, 9), st.integers(0, 1))
def test_a_ring_may_be_as_deep_as_the_loop_and_no_deeper(bk: int, steps: int, rest: int) -> None:
    """A stage that no step fills would only take shared memory; two are always there."""
    problem = Problem(gpu="a100", acc="f16", layout="tn", m=64, n=64, k=bk * (steps - rest) + 8 * rest)
    fields = [item for item in Sm80Multistage.candidates(problem) if item["bk"] == bk and item["split_k"] == 1]
    assert {item["stages"] for item in fields} == {stages for stages in STAGES if stages <= max(2, steps)}


@pytest.mark.parametrize("extent", [256, 8192])
@pytest.mark.parametrize("acc", ["f16", "f32"])
@pytest.mark.parametrize("gpu", ["a100", "h200", "rtx5090", "b200"])
def test_every_tile_that_is_tried_is_legal(gpu: str, acc: str, extent: int) -> None:
    """A tile without a legal record, such as one of 193 rows, would be left out of all searches without a word. Some
    families serve small problems only."""
    problem = Problem(gpu=gpu, acc=acc, layout="tn", m=extent, n=extent, k=extent)
    by_tile: dict[tuple[object, ...], list[space.Fields]] = {}
    for fields in space.proposals(problem):
        tile = tuple(fields.get(name) for name in ("family", "bm", "bn", "schedule", "consumers"))
        by_tile.setdefault(tile, []).append(fields)
    for tile, proposals in by_tile.items():
        assert any(is_legal(fields) for fields in proposals), tile


@given(st.integers(1, 1 << 12), st.integers(-1, 1), st.sampled_from((1, 2, 3, 4, 64)), st.integers(-1, 1))
def test_kernels_without_a_ring_are_tried_for_small_products_only(m: int, more: int, steps: int, rest: int) -> None:
    """D has up to 2^18 elements, and k up to 64 steps of 32. No slice of k is empty."""
    problem = Problem(
        gpu="a100", acc="f32", layout="tn", m=m, n=max(1, (1 << 18) // m + more), k=max(8, 32 * steps + rest)
    )
    tried = list(Sm80Direct.candidates(problem))
    assert bool(tried) == (problem.m * problem.n <= 1 << 18 and problem.k <= 64 * 32)
    slices = {fields["split_k"] for fields in tried}
    assert slices == ({count for count in SPLITS if 32 * (count - 1) < problem.k} if tried else set())
    assert len({str(fields) for fields in tried}) == len(tried) == 6 * len(slices)


def is_legal(fields: space.Fields) -> bool:
    """Whether a proposal is a record."""
    try:
        parse(fields)
    except IllegalRecord:
        return False
    return True
