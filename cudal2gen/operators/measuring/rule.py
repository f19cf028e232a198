"""Decides whether a kernel that was timed against torch is used.

Two effects make a slower kernel look faster than torch:

- Noise differs from pair to pair of samples. Therefore a lower bound on the median of the pairs' ratios must show a
  gain.
- A bias stays the same however often a pair is repeated. One cause is the addresses of a contender's operands and code.
  The rule assumes that it has the standard deviation ``BIAS``. It favours the best of several kernels. The spread of
  all kernels' first samples shows how much of their differences a bias can explain. The winner's lead over the others
  is reduced by that fraction (empirical Bayes), and what remains must exceed ``GAIN``.

``launch/race_rule.h`` has the same rule for callers in C. ``tests/cudal2gen/test_race_rule.py`` simulates thousands of
races, with spikes, drifts, flips and biases. A lower ``GAIN`` would gain more if there is no bias, and lose more if
there is one. The functions take arrays of races, whose last axis has the pairs, or the kernels, of a race.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

from cudal2gen.results.choice import MARGIN

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

BIAS = 0.03  # standard deviation of a contender's bias, as a log ratio of times
GAIN = 0.1  # least expected gain over torch with which a kernel is accepted
PRIOR = 1.0  # ``BIAS`` counts in the estimate of the spread as much as this many kernels
FARTHEST = 0.2  # a first sample's log ratio counts as at most this far from the median: beyond it may be a spike
RISK = 0.005  # probability that the median of the pairs lies below its bound


def promising(logs: Array) -> Array:
    """Whether a kernel deserves a duel with torch. ``logs``: its log ratios to torch in the heat."""
    import numpy as np

    return np.asarray(np.median(logs, axis=-1) >= math.log1p(MARGIN))


def accepts(logs: Array, field: Array) -> Array:
    """Whether a kernel is accepted.

    ``logs``: the log ratio of torch's time to the kernel's for each pair of the duel, of shape (..., pairs). ``field``:
    for each kernel of the race the log ratio of its first samples, of shape (..., kernels).
    """
    import numpy as np

    rank = bound_rank(logs.shape[-1])
    if rank == 0:
        return np.zeros(logs.shape[:-1], bool)
    bound = np.sort(logs, axis=-1)[..., rank - 1]
    return (bound >= math.log1p(MARGIN)) & (expected(np.median(logs, axis=-1), field) >= math.log1p(GAIN))


def expected(log: Array, field: Array) -> Array:
    """The log ratio to expect of a winner whose measured log ratio is ``log``, without its bias."""
    import numpy as np

    middle = np.median(field, axis=-1)
    deviations = np.clip(field - middle[..., None], -FARTHEST, FARTHEST)
    spread = ((deviations**2).sum(axis=-1) + PRIOR * BIAS**2) / (field.shape[-1] - 1 + PRIOR)
    # ``spread`` is the variance of true differences plus that of the bias; the factor is the fraction of the former.
    return np.asarray(middle + np.maximum(0.0, 1 - BIAS**2 / spread) * (log - middle))


@cache
def bound_rank(pairs: int) -> int:
    """The rank, from 1, of the sample that serves as the lower bound on the median; 0 for too few pairs.

    It is the highest rank whose sample is below the median with a probability of at least 1 - ``RISK``, for any
    distribution of the samples.
    """
    # The sample of rank r + 1 is above the median if at most r samples are below; each is with probability 1/2.
    rank, below = 0, 0.0
    while (below := below + math.comb(pairs, rank) / 2**pairs) <= RISK:
        rank += 1
    return rank
