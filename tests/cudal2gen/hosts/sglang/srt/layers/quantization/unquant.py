"""A layer's method."""

from __future__ import annotations

from typing import Any

import torch

calls: list[str] = []


class UnquantizedLinearMethod:
    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(type(layer).__name__)
        return torch.nn.functional.linear(x, layer.weight, bias)
