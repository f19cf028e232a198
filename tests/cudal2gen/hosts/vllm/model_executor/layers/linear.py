"""A layer's method; it imports the choice by name, as vLLM's does."""

from __future__ import annotations

from typing import Any

import torch

from vllm.model_executor.layers.utils import dispatch_unquantized_gemm


class UnquantizedLinearMethod:
    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return dispatch_unquantized_gemm()(layer, x, layer.weight, bias)
