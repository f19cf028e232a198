"""Evidence for the timing model: its predictions beside plain baselines, on measurements that others published.

Half of the problems, by a digest of (n, k), are for development; the other half is opened once, when the model is
final. Nothing of the data is in this repository but facts about published kernels (``configs/published``).
"""

from cudal2gen.timing.evidence.choices import published_choices, published_tiles
from cudal2gen.timing.evidence.findings import development
from cudal2gen.timing.evidence.regret import recorded_choices
from cudal2gen.timing.evidence.section import Finding
from cudal2gen.timing.evidence.speedups import published_speedups

__all__ = [
    "Finding",
    "development",
    "published_choices",
    "published_speedups",
    "published_tiles",
    "recorded_choices",
]
