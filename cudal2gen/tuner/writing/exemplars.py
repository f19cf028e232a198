"""Which kernels a question shows: the contrast of CUDA-L1 (arXiv 2507.14111), from which CUDA-L2 has it.

Kernels lie in buckets by speed. Distinct buckets are drawn, a fast one likelier than a slow one by the softmax of
their mean speeds, and from each of them one kernel, all equally likely. So a question shows kernels of different
speeds, whose difference can be reasoned about, and not the same fast ones again and again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean

BUCKET = 0.05  # width of a bucket, in the logarithm of the speed
TEMPERATURE = 0.3  # of the softmax: this much more speed makes a bucket e times as likely


def drawn(speeds: Sequence[float], count: int, seed: str) -> list[int]:
    """The places of at most ``count`` kernels, one of each drawn bucket, the fastest first. ``seed`` decides all."""
    generator = random.Random(seed)
    buckets: dict[int, list[int]] = {}
    for place, speed in enumerate(speeds):
        buckets.setdefault(math.floor(math.log(speed) / BUCKET), []).append(place)
    chosen: list[int] = []
    while buckets and len(chosen) < count:
        names = sorted(buckets)
        means = [fmean(speeds[place] for place in buckets[name]) for name in names]
        weights = [math.exp((mean - max(means)) / TEMPERATURE) for mean in means]
        (name,) = generator.choices(names, weights)
        chosen.append(generator.choice(buckets.pop(name)))
    return sorted(chosen, key=lambda place: -speeds[place])
