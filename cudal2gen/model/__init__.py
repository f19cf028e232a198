"""How long a kernel takes, estimated without a GPU: a prior, never a measurement."""

from cudal2gen.model.estimate import (
    Estimate,
    Floor,
    Kernel,
    estimate,
    estimate_kernel,
    floor,
    hides_issue,
    kernel_of,
)
from cudal2gen.model.frozen import frozen_us

__all__ = [
    "Estimate", "Floor", "Kernel", "estimate", "estimate_kernel", "floor", "frozen_us", "hides_issue", "kernel_of",
]  # fmt: skip
