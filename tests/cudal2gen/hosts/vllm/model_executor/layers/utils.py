"""Stands in for vLLM's module that chooses the function of a layer without quantisation."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

# vLLM's switches that change which kernel a layer takes. Tests set them.
envs = SimpleNamespace(VLLM_BATCH_INVARIANT=False)
current_platform = SimpleNamespace(is_rocm=lambda: False)


def default_unquantized_gemm(
    layer: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The layer's result of shape (..., n), for x of (..., k), a weight of (n, k) and a bias of (n,)."""
    return torch.nn.functional.linear(x, weight, bias)


def rocm_unquantized_gemm(*_: Any) -> torch.Tensor:
    """The function for AMD's GPUs, which no test calls."""
    raise NotImplementedError


def dispatch_unquantized_gemm(linear_backend: str = "auto") -> Callable[..., torch.Tensor]:
    """The function of the platform's layers. A user's ``linear_backend`` is ignored."""
    return rocm_unquantized_gemm if current_platform.is_rocm() else default_unquantized_gemm
