"""Computes speedups with 95 % confidence intervals, and their geometric mean over problems.

A measurement alternates its contenders, so the i-th samples of two of them were taken close together and make a
pair: drift of clocks and temperature cancels in the pair's ratio. The speedup is the exponential of the median log
ratio of all pairs. Its interval is the percentile bootstrap: the pairs are resampled ``RESAMPLES`` times, and the
interval lies between the 2.5 % and 97.5 % quantiles of the resampled medians.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from kernelproof.ground.errors import WrongInput

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]
    Ranks = np.ndarray[Any, np.dtype[np.int64]]

RESAMPLES = 2000  # resamples of a bootstrap interval

Pair = tuple[Sequence[float], Sequence[float]]  # (samples of the baseline, samples of the contender)


class Ratio(NamedTuple):
    """A speedup (1 means equally fast) and the low and high end of its 95 % interval."""

    value: float
    low: float
    high: float


def interval(ratio: Ratio) -> str:
    """A speedup with its interval as tables show it, such as "1.052 [1.031, 1.070]"."""
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


class Unpaired(WrongInput):
    """Two contenders have different numbers of samples, so they were not taken in turns and make no pairs."""


def paired(baseline: Sequence[float], contender: Sequence[float]) -> Ratio:
    """The contender's speedup: the baseline's time over the contender's. Raises Unpaired if the numbers of samples
    differ."""
    (ratio,) = least_ratios([[(baseline, contender)]])
    assert ratio is not None
    return ratio


def least_ratios(pair_groups: Sequence[Sequence[Pair] | None]) -> list[Ratio | None]:
    """For each group of pairs the least ratio: a contender's speedup over the fastest of several baselines.

    Each baseline is resampled independently, and every resample chooses the fastest baseline anew. The interval thus
    also covers the uncertainty of which baseline is the fastest. Groups of the same shape are computed together, so a
    thousand groups take a fraction of a second. The answer is None where the group is None. Raises Unpaired if the
    numbers of samples in a pair differ.
    """
    import numpy as np

    # For each group an array (baselines, samples) of log ratios.
    logs = [None if group is None else np.stack([_logs(*pair) for pair in group]) for group in pair_groups]
    ratios: list[Ratio | None] = [None] * len(logs)
    for shape in {group.shape for group in logs if group is not None}:
        places = [place for place, group in enumerate(logs) if group is not None and group.shape == shape]
        # ``groups``: (groups, baselines, samples). ``medians``: for each baseline (groups, RESAMPLES), drawn with a
        # seed of its own.
        groups = np.stack([group for group in logs if group is not None and group.shape == shape])
        medians = [resampled_medians(groups[:, baseline], baseline) for baseline in range(shape[0])]
        bounds = percentile_interval(np.min(medians, axis=0), axis=1)
        columns = np.exp([np.median(groups, axis=2).min(axis=1), *bounds]).tolist()
        for place, value, low, high in zip(places, *columns, strict=True):
            ratios[place] = Ratio(value, low, high)
    return ratios


def _logs(baseline: Sequence[float], contender: Sequence[float]) -> Array:
    """The log ratio of each pair: the baseline's time over the contender's. Raises Unpaired."""
    import numpy as np

    if len(baseline) != len(contender):
        raise Unpaired(f"{len(baseline)} and {len(contender)} samples make no pairs")
    logs: Array = np.log(baseline) - np.log(contender)
    return logs


def percentile_interval(resamples: Array | Sequence[Any], axis: int = 0) -> Array:
    """The lower and upper bound of the 95 % percentile interval along an axis of bootstrap resamples."""
    import numpy as np

    bounds: Array = np.percentile(resamples, (2.5, 97.5), axis=axis)
    return bounds


def resampled_medians(rows: Array, seed: int = 0) -> Array:
    """Medians of bootstrap resamples of each row, as an array of shape (rows, RESAMPLES).

    Calls with the same ``seed`` draw the same resamples; calls with different seeds are independent.
    """
    import numpy as np

    lower, upper = _middle_ranks(rows.shape[1], seed)
    ordered = np.sort(rows, axis=1)
    return (ordered[:, lower] + ordered[:, upper]) / 2


@cache
def _middle_ranks(samples: int, seed: int) -> tuple[Ranks, Ranks]:
    """For each resample, the ranks of its two middle samples (they are equal if ``samples`` is odd).

    A resample draws every sample with equal probability, so it may draw ranks of the sorted row instead of samples. The
    drawn ranks are sorted once here and serve every row with this number of samples; the rows themselves are sorted
    once, and no resample is sorted again.
    """
    import numpy as np

    ranks = np.sort(np.random.default_rng(seed).integers(0, samples, (RESAMPLES, samples)), axis=1)
    return ranks[:, (samples - 1) // 2], ranks[:, samples // 2]


def geomean(ratios: Iterable[float]) -> Ratio | None:
    """The geometric mean over problems, with an interval that resamples the problems; None if there is no problem."""
    import numpy as np

    logs = np.log(np.fromiter(ratios, np.float64))
    if not logs.size:
        return None
    picks = np.random.default_rng(0).integers(0, logs.size, (RESAMPLES, logs.size))
    low, high = percentile_interval(logs[picks].mean(axis=1))
    return Ratio(math.exp(float(logs.mean())), math.exp(float(low)), math.exp(float(high)))


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share their mean rank. It is NaN if one side does not vary."""
    import numpy as np

    if len(set(x)) < 2 or len(set(y)) < 2:
        return math.nan
    return float(np.corrcoef([_ranks(x), _ranks(y)])[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, from 1; equal values share the mean of their ranks."""
    import numpy as np

    # c equal values, the last of which has rank r, have the ranks r-c+1 to r, whose mean is r - (c-1)/2.
    _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ranks: list[float] = (np.cumsum(counts) - (counts - 1) / 2)[inverse].tolist()
    return ranks
