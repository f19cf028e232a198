"""The numeric parts of the policy: the network of its logits, its losses, and the distribution that draws follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cudal2gen.tuner.features import CONTEXT, NUMBERS

if TYPE_CHECKING:
    import torch

HIDDEN = 24
CAPACITY = 4096  # most tokens of a policy


class Net:
    """One summand of the logits, the prior or the learned part; its output is zero until training."""

    def __init__(self, seed: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        width = NUMBERS + CONTEXT
        self.heads = torch.zeros(CAPACITY, CONTEXT)
        self.inner = torch.randn(width, HIDDEN, generator=generator) / width**0.5
        self.bias = torch.zeros(HIDDEN)
        self.outer = torch.zeros(HIDDEN)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"heads": self.heads, "inner": self.inner, "bias": self.bias, "outer": self.outer}

    def trainable(self, flag: bool) -> None:
        """Switches gradients on or off."""
        for tensor in self.tensors.values():
            tensor.requires_grad_(flag)

    def logits(self, context: torch.Tensor, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """One logit per row of ``ids`` and ``numbers``."""
        import torch

        per_token = self.heads @ context
        around = context.expand(len(numbers), -1)
        inside = torch.tanh(torch.cat([numbers, around], 1) @ self.inner + self.bias)
        return per_token[ids].sum(1) + inside @ self.outer

    def of_tokens(self, context: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the alternatives of a free field."""
        logits: torch.Tensor = self.heads[ids] @ context
        return logits


def leave_one_out(rewards: Sequence[float], normalise: bool = False) -> list[float]:
    """Each reward minus the mean of the others; divided by the group's standard deviation where ``normalise``."""
    count, total = len(rewards), sum(rewards)
    if count < 2:
        raise ValueError(f"{count} rewards make no group: an advantage needs at least two")
    advantages = [reward - (total - reward) / (count - 1) for reward in rewards]
    if not normalise:
        return advantages
    spread = float(np.std(rewards))
    return [advantage / spread for advantage in advantages] if spread > 1e-9 else [0.0] * count


def bradley_terry(logits: torch.Tensor, scores: Sequence[float], margin: float = 0.0) -> tuple[torch.Tensor, int]:
    """Mean over pairs of -log sigmoid(logit of the better - logit of the worse), and how many pairs there are."""
    import torch

    values = torch.tensor(scores)
    better, worse = torch.nonzero(values[:, None] > values[None, :] + margin, as_tuple=True)
    if not len(better):
        return torch.zeros(()), 0
    return torch.nn.functional.softplus(logits[worse] - logits[better]).mean(), len(better)


def cumulative(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Cumulative probabilities of softmax(logits); the last is exactly 1, so no draw falls beyond it."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    sums: NDArray[np.float64] = np.cumsum(weights) / weights.sum()
    sums[-1] = 1.0
    return sums
