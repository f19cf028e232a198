"""``explain``: says in words which kernel a call uses, or why torch computes it."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

from cudal2gen.kernel.fusion import Activation
from cudal2gen.operators.casting import followed
from cudal2gen.operators.check_modes import INVARIANT, deterministic, foreign, invariance
from cudal2gen.operators.dispatch import current
from cudal2gen.operators.fused_operators import linear, plan_fused, swiglu
from cudal2gen.operators.grouped import grouped_mm, plan_grouped
from cudal2gen.operators.plan_requests import Epilogue, in_rows
from cudal2gen.operators.plans import CallPlan
from cudal2gen.operators.torch_operators import bmm, matmul, plan_linear, plan_matmul

if TYPE_CHECKING:
    import torch

DETERMINISTIC = "deterministic algorithms are on: what was measured counts, and nothing is measured anew"


def explain(call: torch.Tensor | Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Says in one line what a call without gradients does and why, and which of several packs for the GPU is used:
    ``explain(cudal2gen.linear, x, w, activation="silu")``.

    ``call`` is matmul, bmm, linear, swiglu or grouped_mm, followed by its arguments; with tensors alone it is matmul.
    Raises what the call raises, and TypeError for another function.
    """
    function, arguments = (call, arguments) if callable(call) else (matmul, (call, *arguments))
    if function not in _PLANS:
        names = ", ".join(sorted(function.__name__ for function in _PLANS))
        raise TypeError(f"explain: expected tensors or one of {names}, got {call!r}")
    alike = invariance(options.pop("batch_invariant", False))
    if function is not grouped_mm:  # it does not follow autocast
        arguments, options = followed(arguments), dict(zip(options, followed(tuple(options.values())), strict=True))
    try:
        bound = signature(_PLANS[function]).bind(alike, *arguments, **options)
    except TypeError as error:
        raise TypeError(f"explain: {error}; give all arguments of cudal2gen.{function.__name__} but out") from None
    rest = "refused" if alike == INVARIANT else "torch"
    if reason := foreign(bound.args, functions=True):
        return f"{rest}: {reason}"
    plan = _PLANS[function](*bound.args, **bound.kwargs)
    chosen = plan.name if plan.on_kernel else rest
    barred = [DETERMINISTIC] if current().mode != "off" and deterministic() else []
    return "; ".join((f"{chosen}: {plan.reason}", *barred, *current().shadowed))


def _matmul(
    alike: int, a: torch.Tensor, b: torch.Tensor, acc: str = "f32", out_dtype: torch.dtype | None = None
) -> CallPlan:  # fmt: skip
    return plan_matmul(_read(a, alike), b, acc, out_dtype, alike)


def _linear(
    alike: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> CallPlan:  # fmt: skip
    if activation is None:
        return plan_linear(_read(x, alike), weight, bias, alike)
    return plan_fused(_read(x, alike), weight, bias, Epilogue(cast("Activation", activation), False, False), alike)


def _swiglu(alike: int, x: torch.Tensor, w13: torch.Tensor) -> CallPlan:
    return plan_fused(_read(x, alike), w13, None, Epilogue("silu", True, False), alike)


def _grouped_mm(
    alike: int, mat_a: torch.Tensor, mat_b: torch.Tensor, offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> CallPlan:  # fmt: skip
    return plan_grouped(_read(mat_a, alike), mat_b, offs, bias, out_dtype, alike)


def _read(a: torch.Tensor, alike: int) -> torch.Tensor:
    """A as the call reads it."""
    return in_rows(a, current().memory) if alike else a


_PLANS: dict[Callable[..., Any], Callable[..., CallPlan]] = {
    matmul: _matmul,
    bmm: _matmul,
    linear: _linear,
    swiglu: _swiglu,
    grouped_mm: _grouped_mm,
}
