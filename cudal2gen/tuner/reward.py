"""Computes the reward of CUDA-L2: the mean over test cases of speed minus error, minus the length of the text.

    reward = mean over cases of (t_ref / t_custom - alpha * max_diff) - beta * length

``max_diff`` is in D's units, ``length`` in characters of the rendered source, and the times have a common unit. A
failure has the reward ``RewardWeights.failed``, whatever its times.

``of_written`` is the reward of a kernel whose CUDA text a language model wrote. It is ``failed`` plus

- nothing, if the kernel is not legal or does not compile;
- ``COMPILED``, if it compiles but was not measured, for example because it is wrong;
- ``RIGHT`` plus the formula above with one case, if it was measured. t_ref is then the time of the fastest kernel that
  the question showed. Speeds that differ by at most ``EQUAL`` count as equal, so a copy of that kernel has the speed 1,
  however it is disguised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, pstdev
from typing import NamedTuple

from cudal2gen.generation.renderer import render
from cudal2gen.kernel import Record, parse
from cudal2gen.results import INCUMBENT, Trial

COMPILED, RIGHT = 0.1, 0.3  # see the module: what a written kernel earns if it compiles, and if it was measured
EQUAL = 0.01  # relative difference up to which two speeds count as equal
MAX_DEVIATIONS = 1.5  # number of standard deviations to which ``smooth`` clips rewards
DISCOUNT = 0.4  # the weight of the next answer's return in an answer's own (``returns``)


@dataclass(frozen=True)
class RewardWeights:
    """Weights of the reward, and how the speed is computed.

    - ``alpha`` and ``beta``: the weights of the module's formula.
    - ``lower_bound``: the speed is the lower end of its 95 % interval, so that noise earns nothing.
    - ``reference``: the contender whose time is t_ref; None for the fastest baseline, or else the incumbent.
    - ``failed``: the reward of a failure.
    """

    alpha: float = 0.01
    beta: float = 0.0
    lower_bound: bool = False
    reference: str | None = None
    failed: float = 0.0


class RewardCase(NamedTuple):
    """One test case: the speed over the reference's, and the largest absolute error of D."""

    speed: float
    max_diff: float


def reward(cases: Sequence[RewardCase], length: int, alpha: float, beta: float) -> float:
    """The formula of this module's docstring. Raises ValueError without cases."""
    if not cases:
        raise ValueError("a reward needs at least one test case")
    return sum(case.speed - alpha * case.max_diff for case in cases) / len(cases) - beta * length


def of_trials(trials: Sequence[Trial], weights: RewardWeights) -> float:
    """The reward of one record, whose trials are its test cases; ``failed`` if any of them failed.

    Raises ValueError without trials, or if the reference was not timed together with the record.
    """
    if not all(trial.measured for trial in trials):
        return weights.failed
    cases = [RewardCase(speed(trial, weights), trial.max_diff) for trial in trials]
    length = source_length(trials[0]) if weights.beta and trials else 0
    return reward(cases, length, weights.alpha, weights.beta)


def speed(trial: Trial, weights: RewardWeights) -> float:
    """t_ref / t_custom of one measured trial. Raises ValueError if the reference was not timed together with it."""
    reference = weights.reference or trial.baseline or INCUMBENT
    if not weights.lower_bound and (reference_timing := trial.timing(reference)):
        return reference_timing.median_us / trial.median_us
    ratio = trial.faster_than(reference)
    if ratio is None:
        raise ValueError(f"{trial.problem.mnk} {trial.name}: {reference} was not timed beside it; time both in turns")
    return ratio.low


def over_incumbent(trial: Trial, weights: RewardWeights) -> float:
    """The speed of a measured kernel over the incumbent's."""
    return speed(trial, replace(weights, reference=INCUMBENT))


def of_written(trial: Trial, weights: RewardWeights, best: float) -> float:
    """The reward of a kernel whose text a language model wrote. ``best``: the speed of the fastest kernel that the
    question showed, over the incumbent's. Raises ValueError if the incumbent was not timed together with the kernel."""
    if trial.outcome in ("illegal", "compile error"):
        return weights.failed
    if not trial.measured:
        return weights.failed + COMPILED
    relative = over_incumbent(trial, weights) / best
    relative = 1.0 if abs(relative - 1) <= EQUAL else relative
    length = source_length(trial) if weights.beta else 0
    own = reward([RewardCase(relative, trial.max_diff)], length, weights.alpha, weights.beta)
    return weights.failed + RIGHT + own


def smooth(rewards: Sequence[float]) -> list[float]:
    """The rewards of one question's answers in standard deviations from their mean, clipped at ``MAX_DEVIATIONS``
    (CUDA-L1).

    A single lucky kernel, or a cheat that was not detected, then has no more influence on a model than the others.
    """
    mean = fmean(rewards)
    deviation = pstdev(rewards) + 1e-9  # not 0 if all rewards are equal
    return [min(max((value - mean) / deviation, -MAX_DEVIATIONS), MAX_DEVIATIONS) for value in rewards]


def returns(rewards: Sequence[float]) -> list[float]:
    """For each answer of a conversation its reward, plus ``DISCOUNT`` times the return of the next answer.

    So the answer i places later counts DISCOUNT^i of its reward (Kevin, arXiv 2507.11948).
    """
    values: list[float] = []
    for own in reversed(rewards):
        values.append(own + DISCOUNT * (values[-1] if values else 0.0))
    return values[::-1]


def source_length(trial: Trial) -> int:
    """The number of characters of the rendered source."""
    return _length(parse(trial.record))


@cache
def _length(record: Record) -> int:
    """The number of characters of a record's CUDA text."""
    return len(render(record))
