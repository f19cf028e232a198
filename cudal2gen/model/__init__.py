"""How long a kernel takes, estimated without a GPU: a prior, never a measurement."""

from cudal2gen.model.estimate import Estimate, Kernel, estimate, estimate_kernel, hides_issue, kernel_of

__all__ = ["Estimate", "Kernel", "estimate", "estimate_kernel", "hides_issue", "kernel_of"]
