"""Statistics of speedups (the baseline's time over our kernel's), and rank correlation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev
from typing import NamedTuple

from cudal2gen.results.ratios import Ratio, geomean


class Summary(NamedTuple):
    """Speedups over problems. ``std``: of a sample, 0 for one problem; ``wins``, ``losses``: shares above and below 1.

    ``sure_wins``, ``sure_losses``: shares whose whole 95 % interval is above, below 1.
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
    """Statistics over problems; None without ratios. The mean of one problem has that problem's interval, since its
    bootstrap over problems would have none."""
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
    """Speedups of a dispatcher that takes the baseline where that is faster: at least 1, bounds too."""
    return [Ratio(max(1.0, value), max(1.0, low), max(1.0, high)) for value, low, high in ratios]


def share(flags: Iterable[bool]) -> float:
    """The share (0 to 1) of flags that are true; NaN without flags."""
    values = list(flags)
    return sum(values) / len(values) if values else math.nan
