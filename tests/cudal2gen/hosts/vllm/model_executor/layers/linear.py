"""Stands in for vLLM's module: the method of a linear layer, which imports the chosen function by name like vLLM's."""

from __future__ import annotations

from typing import Any

import torch

from vllm.model_executor.layers.utils import dispatch_unquantized_gemm


class UnquantizedLinearMethod:
    """Computes layers by the function that vLLM chooses for the machine."""

    def __init__(self) -> None:
        self._gemm_impl: Any = dispatch_unquantized_gemm("auto")

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The layer's result of shape (..., n), for x of (..., k), the layer's weight of (n, k) and a bias of (n,)."""
        return self._gemm_impl(layer, x, layer.weight, bias)
