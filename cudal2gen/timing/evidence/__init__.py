"""Compares predictions of the timing model, and of simple baselines, with measurements that others published.

Half of the problems, chosen by a digest of (n, k), are for development. The other half is held out until the model is
final. This repository has none of the data except facts about published kernels (``configs/published``).
"""

from cudal2gen.timing.evidence.choices import published_choices, published_tiles
from cudal2gen.timing.evidence.findings import is_development
from cudal2gen.timing.evidence.regret import recorded_choices
from cudal2gen.timing.evidence.section import Finding
from cudal2gen.timing.evidence.speedups import published_speedups
from cudal2gen.timing.evidence.vendors import recorded_vendors

__all__ = [
    "Finding",
    "is_development",
    "published_choices",
    "published_speedups",
    "published_tiles",
    "recorded_choices",
    "recorded_vendors",
]
