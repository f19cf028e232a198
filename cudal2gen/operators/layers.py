"""Lets a model's linear layers use our kernels, and undoes that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cudal2gen.operators.casting import autocast_type
from cudal2gen.operators.fused_operators import linear
from cudal2gen.operators.registration import refuse_script
from kernelproof.ground.element import ELEMENTS, F32, dtypes

if TYPE_CHECKING:
    import torch

TYPES = tuple(element.torch_dtype for element in ELEMENTS.values())
CAST_TYPES = (*TYPES, F32.torch_dtype)  # types that autocast casts to one of ``TYPES``


class Replaced(NamedTuple):
    """What ``patch`` did.

    - ``layers``: the names of the replaced layers.
    - ``left``: the names of other linear layers, each with the reason.
    - ``fused``: the names of modules that compute several of their layers in one call, each with those layers.
    """

    layers: list[str]
    left: dict[str, str]
    fused: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.layers)} layers replaced", *(f"  {name}" for name in self.layers)]
        lines += [f"{len(self.fused)} modules fused"] if self.fused else []
        lines += [f"  {name}: {layers}" for name, layers in self.fused.items()]
        lines += [f"{len(self.left)} left as they were"] if self.left else []
        return "\n".join([*lines, *(f"  {name}: {why}" for name, why in self.left.items())])


def check_model(model: object) -> None:
    """Raises TypeError for a value that is no module."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}; give the model itself")


def replace_layers(model: torch.nn.Module) -> Replaced:
    """Lets every ``nn.Linear`` of fp16, bf16 or fp32 in a model compute by ``cudal2gen.linear``, in calls for which
    ``has_our_types`` is true."""
    import torch

    replaced = Replaced([], {}, {})
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            if why_not := _why_not(module):
                replaced.left[name] = why_not
            else:
                set_forward(module, forward_linear)
                replaced.layers.append(name)
    return replaced


def unpatch(model: torch.nn.Module) -> list[str]:
    """Undoes ``patch`` and returns the names of the modules that it had changed. Raises TypeError for a value that is
    no module."""
    check_model(model)
    undone = []
    for name, module in model.named_modules():
        if is_patched(module):
            del module.__dict__["forward"], module.__dict__["__prepare_scriptable__"]
            undone.append(name)
    return undone


class Forward(partial[Any]):
    """The forward of a patched module. It is an attribute of the module, and is copied and pickled with the module."""


def set_forward(module: torch.nn.Module, forward: Callable[..., Any], *arguments: Any) -> None:
    """Lets a module compute by ``forward(module, *arguments, ...)``, until ``unpatch``."""
    module.forward = Forward(forward, module, *arguments)
    module.__prepare_scriptable__ = partial(
        refuse_script, "patch", "a patched model (unpatch takes it back) or anything"
    )


def is_patched(module: torch.nn.Module) -> bool:
    """Whether ``patch`` gave the module its forward."""
    return isinstance(module.__dict__.get("forward"), Forward)


def has_our_types(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether our operators compute a layer with this input and weight: both have the same one of ``TYPES``, or
    autocast casts them to one.

    Each call tests this, because a model may be converted or moved after ``patch``.
    """
    cast_type = autocast_type(x.device.type)
    if cast_type is None:
        return x.dtype == weight.dtype and x.dtype in TYPES
    return cast_type in TYPES and x.dtype in CAST_TYPES and weight.dtype in CAST_TYPES


def is_uncast(weight: torch.Tensor) -> bool:
    """Whether a product reads the weight itself, and not a copy that autocast casts."""
    return autocast_type(weight.device.type) in (None, weight.dtype)


def _why_not(module: torch.nn.Module) -> str:
    """Why a layer is left unchanged; "" if it is replaced."""
    import torch

    if type(module) is not torch.nn.Linear:
        return f"a {type(module).__name__}, which may compute something else"
    if is_patched(module):
        return "replaced before"
    if "forward" in module.__dict__:
        return "has a forward of its own"
    if module.weight.dtype not in CAST_TYPES:
        return f"its weights are {module.weight.dtype}, not {dtypes(module.weight)}, and no autocast makes them so"
    return ""


def forward_linear(module: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:  # the name that torch gives it
    """The forward of a replaced layer."""
    import torch

    if has_our_types(input, module.weight):
        return linear(input, module.weight, module.bias)
    return torch.nn.functional.linear(input, module.weight, module.bias)
