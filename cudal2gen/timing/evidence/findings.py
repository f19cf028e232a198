"""Computes bootstrap intervals of figures, and splits problems into development and held-out ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cudal2gen.results import ratios
from cudal2gen.timing.evidence.section import Finding

RESAMPLES = 1000  # resamples of a bootstrap interval

Array = np.ndarray[Any, np.dtype[np.float64]]


def is_development(n: int, k: int) -> bool:
    """Whether problems with this n and k are for development; the others, about half, are held out. A hash decides, so
    that the split never changes; m has no influence, so that nearly equal problems are on the same side."""
    return int(hashlib.sha256(f"{n}_{k}".encode()).hexdigest(), 16) % 2 == 0


def rank_correlation(x: Array, y: Array) -> float:
    """Spearman's rank correlation of two arrays."""
    return ratios.spearman(x.tolist(), y.tolist())


def interval(count: int, statistic: Callable[[np.ndarray[Any, np.dtype[np.int64]]], float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of a statistic over ``count`` problems.

    ``statistic`` gets the indices of the problems in a resample, an array of ``count`` numbers from 0 to ``count`` - 1
    with repetitions, and returns the figure for these problems.
    """
    generator = np.random.default_rng(0)
    values = [statistic(generator.integers(0, count, count)) for _ in range(RESAMPLES)]
    low, high = ratios.percentile_interval(values).tolist()
    return low, high


def mean_finding(
    part: str, subject: str, figure: str, values: Sequence[float], target: str | None, baselines: dict[str, float]
) -> Finding:
    """The finding whose value is the mean over problems. ``values``: one per problem. The other
    parameters are fields of ``Finding``."""
    array = np.array(values)
    low, high = interval(len(array), lambda indices: float(array[indices].mean()))
    return Finding(part, subject, figure, len(array), float(array.mean()), low, high, target, baselines)
