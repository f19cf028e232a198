"""Estimates the time of a kernel without a GPU. An estimate never replaces a measurement."""

from cudal2gen.timing.model.estimate import (
    Estimate,
    Floor,
    ModelledKernel,
    estimate,
    estimate_kernel,
    floor,
    hides_issue,
    kernel_of,
)
from cudal2gen.timing.model.frozen import frozen_us

__all__ = [
    "Estimate", "Floor", "ModelledKernel", "estimate", "estimate_kernel", "floor", "frozen_us", "hides_issue",
    "kernel_of",
]  # fmt: skip
