"""How long a kernel takes, estimated without a GPU: a prior, never a measurement."""

from cudal2gen.model.estimate import Estimate, Kernel, estimate, estimate_kernel, hides_issue, kernel_of
from cudal2gen.model.frozen import frozen_us

__all__ = ["Estimate", "Kernel", "estimate", "estimate_kernel", "frozen_us", "hides_issue", "kernel_of"]
