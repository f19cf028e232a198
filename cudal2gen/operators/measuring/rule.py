"""The rule by which a kernel that was timed beside torch is taken.

Two things make a slower kernel look faster. Noise differs from pair to pair; so a bound on the median of the pairs must
lie above torch. A bias stays the same however often a pair is repeated: where the operands and the code of a contender
lie in memory, for one. It is taken to have the standard deviation ``BIAS``, and it favours the best of several kernels.
The spread of all kernels' first samples shows how much of their differences a bias can explain: the winner's lead over
the others is shrunk by that share (empirical Bayes), and what remains must still exceed ``GAIN``.

``tests/cudal2gen/test_race_rule.py`` simulates thousands of races, with spikes, drifts, flips and biases. A lower
``GAIN`` would keep more of what can be gained where there is no bias, and lose more where there is one. Functions take
arrays of races: their last axis has the pairs, or the kernels, of a race.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

from cudal2gen.results.choice import MARGIN

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

BIAS = 0.03  # standard deviation of the log ratio that a contender owes to chance and repetition does not change
GAIN = 0.095  # expected gain over torch from which a kernel is taken
PRIOR = 2.0  # weight of ``BIAS`` in the estimate of the spread, in kernels
FARTHEST = 0.2  # log ratio from the field's median beyond which a first sample is taken for a spike
RISK = 0.005  # probability that the median of the pairs lies below its bound


def promising(logs: Array) -> Array:
    """Whether a kernel is worth a duel, by its log ratios to torch in the heat."""
    import numpy as np

    return np.asarray(np.median(logs, axis=-1) >= math.log1p(MARGIN))


def taken(logs: Array, field: Array) -> Array:
    """Whether a kernel is taken. ``logs``: log ratios of torch's time to the kernel's, of each pair of the duel;
    ``field``: one log ratio of each kernel of the race, of its first samples."""
    import numpy as np

    rank = lowest_rank(logs.shape[-1])
    if rank == 0:
        return np.zeros(logs.shape[:-1], bool)
    bound = np.sort(logs, axis=-1)[..., rank - 1]
    return (bound >= math.log1p(MARGIN)) & (expected(np.median(logs, axis=-1), field) >= math.log1p(GAIN))


def expected(log: Array, field: Array) -> Array:
    """The log ratio that is expected of a winner whose measured one is ``log``."""
    import numpy as np

    middle = np.median(field, axis=-1)
    apart = np.clip(field - middle[..., None], -FARTHEST, FARTHEST)
    spread = ((apart**2).sum(axis=-1) + PRIOR * BIAS**2) / (field.shape[-1] - 1 + PRIOR)
    return np.asarray(middle + np.maximum(0.0, 1 - BIAS**2 / spread) * (log - middle))


@cache
def lowest_rank(pairs: int) -> int:
    """The rank, from 1, of the smallest log ratio that is below the median with a probability of at least 1 - ``RISK``,
    whatever their distribution; 0 for too few pairs."""
    rank, below = 0, 0.0
    while (below := below + math.comb(pairs, rank) / 2**pairs) <= RISK:
        rank += 1
    return rank
