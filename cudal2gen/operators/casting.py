"""Casts the operands of our operators as torch's autocast does for its own products.

``registration`` gives each operator an autocast kernel, which casts the operands and calls the operator again. Below
that kernel autocast is off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from cudal2gen.operators.check_modes import TORCH, lazy, undispatched

if TYPE_CHECKING:
    import torch

# The kinds of devices with autocast, and the dispatch keys of their autocast kernels. They are found once, because
# torch.compile of 2.11 cannot trace is_autocast_available.
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


def autocast_is_on(tensor: torch.Tensor) -> bool:
    """Whether autocast is on for a tensor's device."""
    # ``is_cuda`` and ``is_cpu`` take a fifth of the time of ``device.type``.
    kind = "cuda" if tensor.is_cuda else "cpu" if tensor.is_cpu else tensor.device.type
    return kind in KEYS and _is_on(kind)


def undispatched_without(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether a call with these tensors may skip torch's dispatcher: ``undispatched``, none ``lazy``, no autocast."""
    given = [tensor for tensor in tensors if tensor is not None]
    return all(undispatched(tensor, tensor) for tensor in given) and not lazy(*given) and not autocast_is_on(given[0])


def with_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that behaves as torch's products do under autocast: it casts its operands and calls ``run`` with
    autocast off."""

    @wraps(run)
    def call(*arguments: Any, **options: Any) -> Any:
        import torch

        if not torch._C._is_any_autocast_enabled():
            return run(*arguments, **options)
        arguments = cast_operands(arguments)
        with torch._C._DisableAutocast():  # on all devices
            return run(*arguments, **options)

    return call


def cast_operands(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values, with tensors cast to autocast's type."""
    return tuple(_cast(value) if isinstance(value, TORCH.Tensor) else value for value in values)


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in autocast's type; the tensor itself if it has that type, or if autocast does not cast its type."""
    import torch

    dtype = autocast_type(tensor.device.type)
    if dtype in (None, tensor.dtype) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    if tensor.requires_grad and tensor.is_leaf:
        # Autocast caches the cast copy of a parameter until its outermost context ends, but only for operators of
        # torch's. This einsum is such an operator, and its result is a view of the cached copy. On the CPU, where
        # autocast does not know einsum, it casts nothing.
        tensor = torch.einsum("...->...", tensor)
    return tensor.to(dtype)
