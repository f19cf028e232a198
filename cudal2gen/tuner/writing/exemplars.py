"""Chooses the kernels that a prompt to the language model shows, by the method of CUDA-L1 (arXiv 2507.14111).

CUDA-L2 uses this method too. Kernels are grouped into buckets by speed. Distinct buckets are drawn with probabilities
that are the softmax of their mean speeds, and from each of them one kernel at random. So a prompt shows kernels of
different speeds, from whose differences a model can learn, and not always the same fast kernels.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean

BUCKET = 0.05  # width of a bucket, in the logarithm of the speed
TEMPERATURE = 0.3  # temperature of the softmax; a mean speed that is higher by 0.3 makes a bucket e times as likely


def draw(speeds: Sequence[float], count: int, seed: str) -> list[int]:
    """The indices of at most ``count`` kernels, one of each drawn bucket, the fastest first.

    ``speeds``: each kernel's speed over the incumbent's, positive. Equal ``seed`` and speeds give equal draws.
    """
    generator = random.Random(seed)
    buckets: dict[int, list[int]] = {}
    for index, speed in enumerate(speeds):
        buckets.setdefault(math.floor(math.log(speed) / BUCKET), []).append(index)
    chosen: list[int] = []
    while buckets and len(chosen) < count:
        names = sorted(buckets)
        means = [fmean(speeds[index] for index in buckets[name]) for name in names]
        weights = [math.exp((mean - max(means)) / TEMPERATURE) for mean in means]
        (name,) = generator.choices(names, weights)
        chosen.append(generator.choice(buckets.pop(name)))
    return sorted(chosen, key=lambda index: -speeds[index])
