"""A model's linear layers on our kernels, and back."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from cudal2gen.element import dtypes, element_or_none
from cudal2gen.operators.fused_operators import linear

if TYPE_CHECKING:
    import torch


class Replaced(NamedTuple):
    """What ``patch`` did: names of replaced layers, and of other linear ones with the reason why they are as before."""

    layers: list[str]
    left: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.layers)} layers replaced", *(f"  {name}" for name in self.layers)]
        lines += [f"{len(self.left)} left as they were"] if self.left else []
        return "\n".join([*lines, *(f"  {name}: {why}" for name, why in self.left.items())])


def patch(model: torch.nn.Module) -> Replaced:
    """Lets every ``nn.Linear`` of fp16 or bf16 in a model compute by ``cudal2gen.linear``; parameters and hooks stay.

    A call with an input of another type than its weights, as under autocast, is torch's. A patched model is not patched
    again.
    """
    import torch

    done = Replaced([], {})
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            if why_not := _why_not(module):
                done.left[name] = why_not
            else:
                module.forward = partial(_forward, module)
                done.layers.append(name)
    return done


def unpatch(model: torch.nn.Module) -> list[str]:
    """Undoes ``patch``: the layers are as they were. Answers their names."""
    undone = []
    for name, module in model.named_modules():
        if _patched(module):
            del module.__dict__["forward"]
            undone.append(name)
    return undone


def _why_not(module: torch.nn.Module) -> str:
    """Why a layer is left as it is; empty for one that is replaced."""
    import torch

    if type(module) is not torch.nn.Linear:
        return f"a {type(module).__name__}, which may compute something else"
    if _patched(module):
        return "replaced before"
    if "forward" in module.__dict__:
        return "has a forward of its own"
    if element_or_none(module.weight.dtype) is None:
        return f"its weights are {module.weight.dtype}, not {dtypes(module.weight)}"
    return ""


def _patched(module: torch.nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func is _forward


def _forward(module: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    import torch

    # A model may be converted or moved after it was patched.
    if x.dtype == module.weight.dtype and element_or_none(x.dtype) is not None:
        return linear(x, module.weight, module.bias)
    return torch.nn.functional.linear(x, module.weight, module.bias)
