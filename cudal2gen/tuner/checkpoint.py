"""Policies on disk: one file with the tokens, the numbers and the optimiser's state, replaced by one rename."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudal2gen.tuner.features import Vocabulary
from cudal2gen.tuner.network import CAPACITY
from cudal2gen.tuner.policy import Policy
from kernelproof.ground import files
from kernelproof.ground.errors import WrongInput

if TYPE_CHECKING:
    import torch

FORMAT = 1


class CheckpointError(WrongInput):
    """A file that holds no policy of this version; the message says what to do."""


def save(policy: Policy, path: Path) -> None:
    """Writes a checkpoint by one rename: a reader sees the old one or the new one."""
    import torch

    size = len(policy.vocabulary)
    nets = {
        part: {
            name: tensor[:size].clone() if name == "heads" else tensor.clone() for name, tensor in net.tensors.items()
        }
        for part, net in (("prior", policy.prior), ("learned", policy.learned))
    }
    checkpoint = {"format": FORMAT, "tokens": policy.vocabulary.tokens[1:], "steps": policy.steps, "nets": nets}
    if policy.optimizer:
        checkpoint["optimizer"] = _resized(policy.optimizer.state_dict(), size)
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    files.write(path, buffer.getvalue())


def load(path: Path, seed: int = 0) -> Policy:
    """A checkpoint's policy with its optimiser's state. Raises CheckpointError."""
    import torch

    try:
        checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
        if checkpoint["format"] != FORMAT:
            raise CheckpointError(f"{path} is of format {checkpoint['format']}, not {FORMAT}; remove it to start anew")
        policy = Policy(seed)
        policy.vocabulary, policy.steps = Vocabulary(checkpoint["tokens"]), checkpoint["steps"]
        for part, net in (("prior", policy.prior), ("learned", policy.learned)):
            for name, tensor in net.tensors.items():
                stored = checkpoint["nets"][part][name]
                tensor[: len(stored)].copy_(stored)
        if "optimizer" in checkpoint:
            policy.optimizer = torch.optim.Adam(policy.learned.tensors.values(), lr=policy.learning_rate)
            policy.optimizer.load_state_dict(_resized(checkpoint["optimizer"], CAPACITY))
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file fails in many ways
        raise CheckpointError(f"{path} holds no policy ({type(error).__name__}); remove it to start anew") from None
    return policy


def _resized(state: dict[str, Any], rows: int) -> dict[str, Any]:
    """An optimiser's state whose tensors of the heads (the net's parameter 0) have ``rows`` rows, zero-padded."""
    import torch

    def resize(value: torch.Tensor) -> torch.Tensor:
        if value.ndim != 2:
            return value
        resized = torch.zeros(rows, value.shape[1])
        count = min(rows, len(value))
        resized[:count] = value[:count]
        return resized

    heads = {name: resize(value) for name, value in state["state"].get(0, {}).items()}
    return state | {"state": state["state"] | {0: heads}}
