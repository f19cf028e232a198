"""Defines ``explain``, which says in words which kernel a call uses, or why torch computes it."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

from cudal2gen.kernel.fusion import Activation
from cudal2gen.operators.casting import cast_operands
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
    """Says in one line what a call without gradients does and why, and which of several packs for the GPU is used.

    An example is ``explain(cudal2gen.linear, x, w, activation="silu")``. ``call`` is matmul, bmm, linear, swiglu or
    grouped_mm, followed by its arguments; tensors without a function are arguments of matmul. Raises what the call
    raises, and TypeError for another function.
    """
    function, arguments = (call, arguments) if callable(call) else (matmul, (call, *arguments))
    if function not in _PLANS:
        names = ", ".join(sorted(function.__name__ for function in _PLANS))
        raise TypeError(f"explain: expected tensors or one of {names}, got {call!r}")
    level = invariance(options.pop("batch_invariant", False))
    if function is not grouped_mm:  # it does not follow autocast
        arguments, options = (
            cast_operands(arguments),
            dict(zip(options, cast_operands(tuple(options.values())), strict=True)),
        )
    try:
        bound = signature(_PLANS[function]).bind(level, *arguments, **options)
    except TypeError as error:
        raise TypeError(f"explain: {error}; give all arguments of cudal2gen.{function.__name__} but out") from None
    without_kernel = "refused" if level == INVARIANT else "torch"  # what becomes of a call that no kernel computes
    if reason := foreign(bound.args, functions=True):
        return f"{without_kernel}: {reason}"
    plan = _PLANS[function](*bound.args, **bound.kwargs)
    chosen = plan.name if plan.on_kernel else without_kernel
    barred = [DETERMINISTIC] if current().mode != "off" and deterministic() else []
    return "; ".join((f"{chosen}: {plan.reason}", *barred, *current().shadowed))


def _matmul(
    level: int, a: torch.Tensor, b: torch.Tensor, acc: str = "f32", out_dtype: torch.dtype | None = None
) -> CallPlan:  # fmt: skip
    """The plan of cudal2gen.matmul. ``level`` as for ``_read``."""
    return plan_matmul(_read(a, level), b, acc, out_dtype, level)


def _linear(
    level: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> CallPlan:  # fmt: skip
    """The plan of cudal2gen.linear."""
    if activation is None:
        return plan_linear(_read(x, level), weight, bias, level)
    return plan_fused(_read(x, level), weight, bias, Epilogue(cast("Activation", activation), False, False), level)


def _swiglu(level: int, x: torch.Tensor, w13: torch.Tensor) -> CallPlan:
    """The plan of cudal2gen.swiglu."""
    return plan_fused(_read(x, level), w13, None, Epilogue("silu", True, False), level)


def _grouped_mm(
    level: int, mat_a: torch.Tensor, mat_b: torch.Tensor, offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> CallPlan:  # fmt: skip
    """The plan of cudal2gen.grouped_mm."""
    return plan_grouped(_read(mat_a, level), mat_b, offs, bias, out_dtype, level)


def _read(a: torch.Tensor, level: int) -> torch.Tensor:
    """The tensor that the call reads: a copy in rows if the call must be batch-invariant."""
    return in_rows(a, current().memory) if level else a


_PLANS: dict[Callable[..., Any], Callable[..., CallPlan]] = {
    matmul: _matmul,
    bmm: _matmul,
    linear: _linear,
    swiglu: _swiglu,
    grouped_mm: _grouped_mm,
}
