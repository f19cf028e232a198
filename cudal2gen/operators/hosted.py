"""Computes linear layers of a host (vLLM, SGLang) if a kernel was measured faster than the host's own function.

``may_win`` says whether a layer could run on a kernel for some number of rows. The host leaves its other layers, and
their compiled graphs, unchanged. For the layers that remain, ``by_kernel`` makes the calls that a kernel wins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from cudal2gen.operators.check_modes import invariance, undispatched
from cudal2gen.operators.dispatch import current
from cudal2gen.operators.plan_requests import CPU, ELSEWHERE
from cudal2gen.operators.registration import call
from cudal2gen.operators.torch_operators import plan_linear, run_linear
from kernelproof.ground.element import name_of

if TYPE_CHECKING:
    import torch


def may_win(n: int, k: int, dtype: torch.dtype, kind: str, index: int | None, biased: bool) -> bool:
    """Whether a linear layer with a weight (n,k) on the device ``kind:index`` may run on a kernel for some number of
    rows, with the present packs and preferences."""
    element = name_of(dtype)
    if element is None:
        return False
    device = CPU if kind == "cpu" else ELSEWHERE if kind != "cuda" or index is None else index
    return current().may_win(n, k, element, device, biased)


def by_kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The layer's result if a kernel computes it or if this call measures; None if the host must compute it."""
    plan = plan_linear(x, weight, bias, invariance())
    if not plan.on_kernel and plan.run is plan.by_torch:
        plan.calls += 1
        return None
    if undispatched(x, weight, bias):
        return run_linear(x, weight, bias)
    return cast("torch.Tensor", call("linear", x, weight, bias))
