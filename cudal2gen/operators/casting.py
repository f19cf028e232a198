"""Autocast: in which type torch's products compute now, and operands in that type.

Operators follow it as torch's own products do. Autocast kernels of theirs cast the operands and call the operator again
(``registration``); below them, autocast is off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from cudal2gen.operators.check_modes import TORCH, lazy, undispatched

if TYPE_CHECKING:
    import torch

# Devices with an autocast and the keys of its kernels, found once: torch.compile of 2.11 does not trace the question.
KEYS = {
    kind: f"Autocast{kind.upper()}"
    for kind in ("cpu", "cuda", "hpu", "mps", "mtia", "xla", "xpu")
    if TORCH.amp.is_autocast_available(kind)
}
_is_on, _type_of = TORCH.is_autocast_enabled, TORCH.get_autocast_dtype  # local names are faster to look up


def autocast_type(kind: str) -> torch.dtype | None:
    """The type to which autocast casts a product's operands on a kind of device; None if it is off there."""
    on = kind in KEYS and _is_on(kind)
    return _type_of(kind) if on else None


def casts(tensor: torch.Tensor) -> bool:
    """Whether autocast is on for a tensor's device."""
    # A tensor says where it lies in a fifth of the time that the device's name takes.
    kind = "cuda" if tensor.is_cuda else "cpu" if tensor.is_cpu else tensor.device.type
    return kind in KEYS and _is_on(kind)


def undispatched_without(tensors: Sequence[torch.Tensor | None]) -> bool:
    """``undispatched`` of any number of tensors, none of them ``lazy``, and without autocast."""
    given = [tensor for tensor in tensors if tensor is not None]
    return all(undispatched(tensor, tensor) for tensor in given) and not lazy(*given) and not casts(given[0])


def following(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is called as torch's products are under autocast: with operands in its type, and without it."""

    @wraps(run)
    def call(*arguments: Any, **options: Any) -> Any:
        import torch

        if not torch._C._is_any_autocast_enabled():
            return run(*arguments, **options)
        arguments = followed(arguments)
        with torch._C._DisableAutocast():  # of all devices
            return run(*arguments, **options)

    return call


def followed(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values, of which tensors are in the type that autocast asks for."""
    return tuple(_cast(value) if isinstance(value, TORCH.Tensor) else value for value in values)


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in autocast's type; itself if that is its type, or if autocast casts none like it."""
    import torch

    asked = autocast_type(tensor.device.type)
    if asked in (None, tensor.dtype) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    if tensor.requires_grad and tensor.is_leaf:
        # Autocast keeps what it casts of a parameter until its outermost context ends, but only its own operators get
        # that. This one's result is a view of its operand. Where autocast does not know it (CPU), it casts nothing.
        tensor = torch.einsum("...->...", tensor)
    return tensor.to(asked)
