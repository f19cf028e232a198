"""Summarises the speedups of many problems: means, median, and shares of wins and losses.

A speedup is the baseline's time over our kernel's, so above 1 means that our kernel is faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev
from typing import NamedTuple

from cudal2gen.results.ratios import Ratio, geomean


class Summary(NamedTuple):
    """The statistics of the speedups on several problems (``shapes``: how many).

    ``std``: the sample standard deviation, 0 for one problem. ``wins``, ``losses``: the shares (0 to 1) of problems
    with a speedup above and below 1. ``sure_wins``, ``sure_losses``: the same, counting only problems whose whole 95 %
    interval is on that side of 1.
    """

    shapes: int
    mean: float
    median: float
    std: float
    geomean: Ratio
    wins: float
    losses: float
    sure_wins: float
    sure_losses: float


def summarise(ratios: Sequence[Ratio]) -> Summary | None:
    """The statistics of these speedups; None if there are none.

    The interval of the geometric mean comes from resampling the problems. With a single problem that interval would
    have no width, so the problem's own interval is used.
    """
    values = [ratio.value for ratio in ratios]
    mean = ratios[0] if len(ratios) == 1 else geomean(values)
    if mean is None:
        return None
    return Summary(
        shapes=len(values),
        mean=fmean(values),
        median=median(values),
        std=stdev(values) if len(values) > 1 else 0.0,
        geomean=mean,
        wins=share(value > 1 for value in values),
        losses=share(value < 1 for value in values),
        sure_wins=share(ratio.low > 1 for ratio in ratios),
        sure_losses=share(ratio.high < 1 for ratio in ratios),
    )


def best_of(ratios: Sequence[Ratio]) -> list[Ratio]:
    """The speedups of a dispatcher that uses the baseline wherever it is faster: values and bounds are at least 1."""
    return [Ratio(max(1.0, value), max(1.0, low), max(1.0, high)) for value, low, high in ratios]


def share(flags: Iterable[bool]) -> float:
    """The share (0 to 1) of flags that are true; NaN without flags."""
    values = list(flags)
    return sum(values) / len(values) if values else math.nan
