"""Which function computes a layer without quantisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

platform = "cuda"
calls: list[str] = []


def default_unquantized_gemm(
    layer: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    calls.append(type(layer).__name__)
    return torch.nn.functional.linear(x, weight, bias)


def rocm_unquantized_gemm(*_: Any) -> torch.Tensor:
    raise NotImplementedError


def dispatch_unquantized_gemm() -> Callable[..., torch.Tensor]:
    return rocm_unquantized_gemm if platform == "rocm" else default_unquantized_gemm
