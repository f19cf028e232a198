"""How long a kernel takes, estimated without a GPU: a prior, never a measurement."""

from cudal2gen.model.estimate import Estimate, estimate, hides_issue

__all__ = ["Estimate", "estimate", "hides_issue"]
