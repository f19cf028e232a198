"""``explain``: the decision for a call and its reason, as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cudal2gen.operators.dispatch import Plan, current
from cudal2gen.operators.fused_operators import linear, plan_fused, swiglu
from cudal2gen.operators.grouped import grouped_mm, plan_grouped
from cudal2gen.operators.torch_operators import bmm, matmul, plan_linear, plan_matmul

if TYPE_CHECKING:
    import torch


def explain(call: torch.Tensor | Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """What a call without gradients does and why, in one line: ``explain(cudal2gen.linear, x, w, activation="silu")``;
    of several packs for a GPU also which is used.

    ``call``: matmul, bmm, linear, swiglu or grouped_mm, behind it its arguments; tensors alone are matmul's. Raises
    what the call raises, and TypeError for another function.
    """
    if not callable(call):
        plan = _matmul(call, *arguments, **options)
    elif call in _PLANS:
        plan = _PLANS[call](*arguments, **options)
    else:
        names = ", ".join(sorted(function.__name__ for function in _PLANS))
        raise TypeError(f"explain: expected tensors or one of {names}, got {call!r}")
    chosen = plan.name if plan.on_kernel else "torch"
    return "; ".join((f"{chosen}: {plan.reason}", *current().shadowed))


def _matmul(
    a: torch.Tensor, b: torch.Tensor, acc: str = "f32", out_dtype: torch.dtype | None = None
) -> Plan:  # fmt: skip
    return plan_matmul(a, b, acc, out_dtype)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> Plan:
    if activation is None:
        return plan_linear(x, weight, bias)
    return plan_fused(x, weight, bias, activation, gate=False, aux=False)


def _swiglu(x: torch.Tensor, w13: torch.Tensor) -> Plan:
    return plan_fused(x, w13, None, "silu", gate=True, aux=False)


_PLANS: dict[Callable[..., Any], Callable[..., Plan]] = {
    matmul: _matmul,
    bmm: _matmul,
    linear: _linear,
    swiglu: _swiglu,
    grouped_mm: plan_grouped,
}
