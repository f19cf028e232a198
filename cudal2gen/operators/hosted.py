"""Linear layers of a host (vLLM, SGLang) that calls its own function unless a kernel was measured faster.

``hopes`` says whether any number of rows of a weight could run on a kernel, so that a host's other layers, and their
compiled graphs, stay as they are. ``by_kernel`` makes the calls of the rest that a kernel wins.
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


def hopes(n: int, k: int, dtype: torch.dtype, kind: str, index: int | None, biased: bool) -> bool:
    """Whether a linear layer with a weight (n,k) on the device ``kind:index`` may run on a kernel for any number of
    rows, with the packs and preferences of now."""
    element = name_of(dtype)
    if element is None:
        return False
    device = CPU if kind == "cpu" else ELSEWHERE if kind != "cuda" or index is None else index
    return current().hopes(n, k, element, device, biased)


def by_kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The layer's result if a kernel computes it, or if this call measures; None if it is the host's."""
    plan = plan_linear(x, weight, bias, invariance())
    if not plan.on_kernel and plan.run is plan.by_torch:
        plan.calls += 1
        return None
    if undispatched(x, weight, bias):
        return run_linear(x, weight, bias)
    return cast("torch.Tensor", call("linear", x, weight, bias))
