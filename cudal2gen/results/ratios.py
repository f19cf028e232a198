"""Speedups with bootstrap intervals, and their geometric mean over problems.

The i-th samples of two contenders make a pair, since they were taken in turns. A ratio is exp of the median of the
pairs' log ratios; its interval is the percentile bootstrap over pairs.
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

RESAMPLES = 2000

Pair = tuple[Sequence[float], Sequence[float]]  # (samples of the baseline, samples of the contender)


class Ratio(NamedTuple):
    """A speedup and its bootstrap 95 % interval."""

    value: float
    low: float
    high: float


def interval(ratio: Ratio) -> str:
    """A speedup with its 95 % interval, as a table shows it."""
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


class Unpaired(WrongInput):
    """Samples of two contenders that were not taken in turns."""


def paired(baseline: Sequence[float], contender: Sequence[float]) -> Ratio:
    """The baseline's time over the contender's. Raises Unpaired where the numbers of samples differ."""
    (ratio,) = least_each([[(baseline, contender)]])
    assert ratio is not None
    return ratio


def least_each(rivals: Sequence[Sequence[Pair] | None]) -> list[Ratio | None]:
    """The least ratio of each group of pairs: a contender's speedup over the fastest of several baselines.

    Each baseline is resampled by itself and a resample chooses the fastest anew, so the interval covers the choice. A
    thousand groups take a fraction of a second.
    """
    import numpy as np

    logs = [None if group is None else np.stack([_logs(*pair) for pair in group]) for group in rivals]
    ratios: list[Ratio | None] = [None] * len(logs)
    for shape in {group.shape for group in logs if group is not None}:
        places = [place for place, group in enumerate(logs) if group is not None and group.shape == shape]
        groups = np.stack([group for group in logs if group is not None and group.shape == shape])
        medians = [resampled_medians(groups[:, part], part) for part in range(shape[0])]
        bounds = percentile_interval(np.min(medians, axis=0), axis=1)
        columns = np.exp([np.median(groups, axis=2).min(axis=1), *bounds]).tolist()
        for place, value, low, high in zip(places, *columns, strict=True):
            ratios[place] = Ratio(value, low, high)
    return ratios


def _logs(baseline: Sequence[float], contender: Sequence[float]) -> Array:
    import numpy as np

    if len(baseline) != len(contender):
        raise Unpaired(f"{len(baseline)} and {len(contender)} samples make no pairs")
    logs: Array = np.log(baseline) - np.log(contender)
    return logs


def percentile_interval(resamples: Array | Sequence[Any], axis: int = 0) -> Array:
    """The bounds of the 95 % percentile interval along an axis of bootstrap resamples: lower, upper."""
    import numpy as np

    bounds: Array = np.percentile(resamples, (2.5, 97.5), axis=axis)
    return bounds


def resampled_medians(rows: Array, seed: int = 0) -> Array:
    """Bootstrap medians of each row: (rows, RESAMPLES). Rows that differ in ``seed`` are resampled independently."""
    import numpy as np

    lower, upper = _middle_ranks(rows.shape[1], seed)
    ordered = np.sort(rows, axis=1)
    return (ordered[:, lower] + ordered[:, upper]) / 2


@cache
def _middle_ranks(samples: int, seed: int) -> tuple[Ranks, Ranks]:
    """The order statistics that are a resample's two middle ones, which are equal where ``samples`` is odd.

    A resample draws each sample with equal chance, so it may as well draw ranks: one table of draws then serves every
    row of so many samples, and no resample is sorted again.
    """
    import numpy as np

    ranks = np.sort(np.random.default_rng(seed).integers(0, samples, (RESAMPLES, samples)), axis=1)
    return ranks[:, (samples - 1) // 2], ranks[:, samples // 2]


def geomean(ratios: Iterable[float]) -> Ratio | None:
    """Geometric mean over problems, with the bootstrap interval over problems. None where there is no problem."""
    import numpy as np

    logs = np.log(np.fromiter(ratios, np.float64))
    if not logs.size:
        return None
    picks = np.random.default_rng(0).integers(0, logs.size, (RESAMPLES, logs.size))
    low, high = percentile_interval(logs[picks].mean(axis=1))
    return Ratio(math.exp(float(logs.mean())), math.exp(float(low)), math.exp(float(high)))


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Rank correlation, ties at their mean rank; NaN where one side does not vary."""
    import numpy as np

    if len(set(x)) < 2 or len(set(y)) < 2:
        return math.nan
    return float(np.corrcoef([_ranks(x), _ranks(y)])[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    import numpy as np

    _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ranks: list[float] = (np.cumsum(counts) - (counts - 1) / 2)[inverse].tolist()
    return ranks
