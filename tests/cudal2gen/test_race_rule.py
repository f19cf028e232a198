"""Proves by thousands of simulated races what the rule of autotuning gains, and how rarely it chooses a slower
kernel."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.packages import require

require("torch")

from cudal2gen.operators.measuring import races, rule  # noqa: E402

pytestmark = pytest.mark.torch
KERNELS = 8  # kernels of a simulated race, as many as take part in a real one
SLOWER = -math.log(1.01)  # log ratio of torch's time to that of a kernel that is 1 % slower


class Kind(NamedTuple):
    """The disturbances of a race's samples, as differences of log times, or as shares of the samples.

    - ``noise``: the standard deviation of each sample.
    - ``spikes``: the share of samples that take 10 to 170 % longer.
    - ``drift``: how much longer all contenders take after two hundred samples.
    - ``flips``: the share of samples before which the L2 becomes cold or hot; with a cold L2 samples take 35 % longer.
    - ``bias``: the standard deviation of the contenders, constant over the samples of each.
    - ``ripple``: the amplitude of a sine that all contenders share. Its period is four samples, as long as a duel's
      round.
    """

    noise: float = 0.01
    spikes: float = 0.0
    drift: float = 0.0
    flips: float = 0.0
    bias: float = 0.0
    ripple: float = 0.0


# The disturbances under which the rule decides, by name.
KINDS = {
    "quiet": Kind(noise=0.002),
    "usual": Kind(),
    "noisy": Kind(noise=0.03),
    "a few spikes": Kind(spikes=0.05),
    "spikes": Kind(spikes=0.15),
    "drift": Kind(drift=0.1),
    "flips": Kind(flips=0.1),
    "bias": Kind(bias=0.03),
    "bias and drift": Kind(bias=0.03, drift=0.1),
    "noisy flips": Kind(noise=0.03, flips=0.05),
    "ripple": Kind(ripple=0.05),
    "bias and spikes": Kind(bias=0.03, spikes=0.15),
}


class SimulatedRaces:
    """Races of one kind, which are simulated together. ``true``: log ratios of torch's time to each kernel's without
    disturbances, of shape (races, kernels)."""

    def __init__(self, kind: Kind, true: Any, seed: int) -> None:
        self.kind, self.true, self.random = kind, true, np.random.default_rng(seed)
        self.count = len(true)
        self.rows = np.arange(self.count)
        times = np.concatenate([np.zeros((self.count, 1)), -true], axis=1)  # torch is contender 0
        self.times = times + self.random.normal(0, kind.bias, times.shape)
        self.cold, self.samples = np.zeros(self.count, bool), 0  # whether the L2 of each race is cold; samples so far

    def sample(self, contender: Any) -> Any:
        """The log times of a sample of one contender in each race, of shape (races,). ``contender``: its number in each
        race, 0 for torch."""
        kind, random = self.kind, self.random
        self.cold ^= random.random(self.count) < kind.flips
        self.samples += 1
        spiked = random.random(self.count) < kind.spikes
        disturbed = random.normal(0, kind.noise, self.count) + spiked * random.uniform(0.1, 1.0, self.count)
        common = kind.drift * self.samples / 200 + kind.ripple * math.sin(math.pi / 4 * (2 * self.samples + 1))
        return self.times[self.rows, contender] + disturbed + 0.3 * self.cold + common  # exp(0.3) is 35 % more

    def pairs(self, contenders: list[Any], rounds: int) -> list[Any]:
        """Log ratios of torch to each contender, of shape (races, 2 * rounds).

        A round samples torch and the contenders forwards and then backwards, or the other way round. Which comes first
        follows the Thue-Morse sequence, so that drifts and periods of the clocks cancel out.
        """
        columns: list[list[Any]] = [[] for _ in range(len(contenders) + 1)]
        entrants = [np.zeros(self.count, int), *contenders]
        for count in range(rounds):
            order = range(len(entrants))[:: -1 if count.bit_count() % 2 else 1]
            for number in (*order, *reversed(order)):
                columns[number].append(self.sample(entrants[number]))
        vendor, *kernels = (np.array(column).T for column in columns)
        return [vendor - kernel for kernel in kernels]

    def run(self) -> tuple[Any, Any]:
        """Whether each race takes a kernel, and the true log ratio of the one that won, each of shape (races,).

        As in ``races``, first samples choose finalists, a heat chooses the best of them, and a duel with torch decides.
        """
        torch_ = np.zeros(self.count, int)
        first = np.stack(
            [
                np.median(
                    [self.sample(torch_) - self.sample(np.full(self.count, number)) for _ in range(races.FIRST_PAIRS)],
                    axis=0,
                )
                for number in range(1, self.true.shape[1] + 1)
            ],
            axis=1,
        )
        finalists = np.argsort(-first, axis=1)[:, : races.FINALISTS] + 1
        heat = np.stack(self.pairs(list(finalists.T), races.MIN_ROUNDS))
        winner = np.median(heat, axis=2).argmax(axis=0)
        best = finalists[self.rows, winner]
        (duel,) = self.pairs([best], races.MAX_ROUNDS)
        taken = rule.promising(heat[winner, self.rows]) & rule.accepts(duel, first)
        return taken, self.true[self.rows, best - 1]


def drawn_ratios(count: int, seed: int) -> Any:
    """True log ratios of torch to kernels, of shape (races, kernels). On average the best contender of a race, which
    may be torch, takes 8.4 % less time than torch."""
    return np.random.default_rng(seed).normal(-0.04, 0.09, (count, KERNELS))


def gain_figures(kind: Kind, count: int, seed: int = 1) -> tuple[float, float, float]:
    """Three figures of ``count`` races: the share of the possible gain that is kept; the possible gain, as a share of
    torch's time; and the share of races that take a kernel which is at least 1 % slower than torch."""
    true = drawn_ratios(count, seed)
    taken, log = SimulatedRaces(kind, true, seed).run()
    possible = np.maximum(1 - np.exp(-true.max(axis=1)), 0).mean()
    return (
        float(np.where(taken, 1 - np.exp(-log), 0).mean() / possible),
        float(possible),
        float((taken & (log <= SLOWER)).mean()),
    )


def loss_rate(kind: Kind, count: int, seed: int = 2) -> float:
    """The share of races that take a kernel where all are 1 % slower than torch."""
    taken, _ = SimulatedRaces(kind, np.full((count, KERNELS), SLOWER), seed).run()
    return float(taken.mean())


@pytest.mark.parametrize("name", KINDS)
def test_a_thousand_races_of_each_kind(name: str) -> None:
    """There are 12,000 races in all, and as many with slower kernels only."""
    share, possible, slower = gain_figures(KINDS[name], 1000)
    assert possible == pytest.approx(0.084, abs=0.005)
    assert share >= 0.5
    assert slower <= 0.005
    assert loss_rate(KINDS[name], 1000) <= 0.005


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("bias", 0.0035), ("bias and spikes", 0.0055)])
def test_a_bias_rarely_favours_a_slower_kernel(name: str, most: float) -> None:
    """With 20,000 races, a rate of 0.5 % is known to 0.05 %."""
    assert loss_rate(KINDS[name], 20_000) <= most


def test_few_pairs_prove_nothing() -> None:
    """All of 7 pairs are above their median with a probability of 2**-7, more than the risk of 0.5 %."""
    assert [rule.bound_rank(pairs) for pairs in (1, 7, 8, 12, 60)] == [0, 0, 1, 2, 20]
    for pairs, taken in ((7, False), (8, True)):
        assert bool(rule.accepts(np.full(pairs, 0.5), np.array([0.5]))) == taken


def test_the_lead_over_a_narrow_field_is_a_bias() -> None:
    """A kernel that is 12 % faster than torch is not accepted among kernels that are as fast as torch, because the best
    of them may be favoured by a bias. Among kernels with large differences one that is 15 % faster is."""
    pairs = np.full(60, math.log(1.12))
    narrow = np.array([0.0, 0.01, -0.01, 0.02, -0.02, 0.0, 0.03, math.log(1.12)])
    wide = np.array([-0.3, 0.2, -0.2, -0.1, 0.15, -0.4, 0.25, math.log(1.12)])
    assert not rule.accepts(pairs, narrow)
    assert rule.accepts(np.full(60, math.log(1.15)), wide)
    assert rule.accepts(pairs, np.full(8, math.log(1.12))), "all of them are faster"


@given(st.lists(st.floats(1, 1e4), min_size=1, max_size=12), st.floats(0.5, 4))
def test_a_kernel_wins_by_one_percent_beyond_noise(torch_us: list[float], factor: float) -> None:
    """Samples that differ by a constant factor have no noise. If half of the pairs are much slower, it does not win."""
    assume(abs(factor - 1.01) > 1e-6)
    own = [us / factor for us in torch_us]
    assert races.faster(torch_us, own) == (factor > 1.01)
    timings = [SimpleNamespace(samples_us=samples) for samples in (own, torch_us)]
    assert races._is_win(SimpleNamespace(timings=timings)) == (factor > 1.01)  # type: ignore[arg-type]
    assert not races.faster(torch_us * 2, own + [us * 10 for us in torch_us])
