"""The reward of CUDA-L2: the mean over test cases of speed minus error, minus the length of the text.

    reward = mean over cases of (t_ref / t_custom - alpha * max_diff) - beta * length

``max_diff`` is in D's units, ``length`` in characters of the rendered source, and the times have a common unit. A
failure has the reward ``RewardWeights.failed``, whatever its times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from cudal2gen.generation.renderer import render
from cudal2gen.kernel import Record, parse
from cudal2gen.results import INCUMBENT, Trial


@dataclass(frozen=True)
class RewardWeights:
    """Weights of the reward. ``lower_bound``: the speed is the lower end of its 95 % interval, so noise earns nothing.

    ``reference``: the contender whose time is t_ref. If None, it is the fastest baseline, or the incumbent without one.
    """

    alpha: float = 0.01
    beta: float = 0.0
    lower_bound: bool = False
    reference: str | None = None
    failed: float = 0.0


class Case(NamedTuple):
    """One test case: the speed over the reference's, and the largest absolute difference from its result."""

    speed: float
    max_diff: float


def reward(cases: Sequence[Case], length: int, alpha: float, beta: float) -> float:
    """The formula of this module's docstring. Raises ValueError without cases."""
    if not cases:
        raise ValueError("a reward needs at least one test case")
    return sum(case.speed - alpha * case.max_diff for case in cases) / len(cases) - beta * length


def of_trials(trials: Sequence[Trial], weights: RewardWeights) -> float:
    """The reward of one record, whose trials are its test cases; ``failed`` if any of them failed.

    Raises ValueError if the reference was not timed beside the record.
    """
    if not all(trial.measured for trial in trials):
        return weights.failed
    cases = [Case(speed(trial, weights), trial.max_diff) for trial in trials]
    length = source_length(trials[0]) if weights.beta and trials else 0
    return reward(cases, length, weights.alpha, weights.beta)


def speed(trial: Trial, weights: RewardWeights) -> float:
    """t_ref / t_custom of one measured trial."""
    reference = weights.reference or trial.baseline or INCUMBENT
    if not weights.lower_bound and (reference_timing := trial.timing(reference)):
        return reference_timing.median_us / trial.median_us
    ratio = trial.faster_than(reference)
    if ratio is None:
        raise ValueError(f"{trial.problem.mnk} {trial.name}: {reference} was not timed beside it; time both in turns")
    return ratio.low


def source_length(trial: Trial) -> int:
    """Characters of the rendered source."""
    return _length(parse(trial.record))


@cache
def _length(record: Record) -> int:
    return len(render(record))
