"""Stands in for SGLang's module: the method of a linear layer, and the kernels that SGLang may choose for bf16."""

from __future__ import annotations

from enum import Enum

import torch

# SGLang's switches that change which kernel a layer takes. Tests set them.
_batch_invariant = _enable_bf16_splitk_gemm = False


class Bf16GemmBackend(Enum):
    """The kernels for bf16 that a user of SGLang can ask for."""

    AUTO = "auto"
    CUTEDSL = "cutedsl"
    GEMV = "gemv"
    TORCH = "torch"


_BF16_GEMM_BACKEND = Bf16GemmBackend.AUTO


def get_bf16_gemm_backend() -> Bf16GemmBackend:
    """The choice of the user."""
    return _BF16_GEMM_BACKEND


def is_batch_invariant_mode_enabled() -> bool:
    return _batch_invariant


class UnquantizedLinearMethod:
    """Computes layers by torch."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The layer's result of shape (..., n), for x of (..., k), the layer's weight of (n, k) and a bias of (n,)."""
        return torch.nn.functional.linear(x, layer.weight, bias)

    def apply_with_addend(
        self, layer: torch.nn.Module, x: torch.Tensor, addend: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The layer's result plus ``addend``, which has the result's shape."""
        return self.apply(layer, x, bias).add_(addend)

    def apply_into(
        self, layer: torch.nn.Module, x: torch.Tensor, output: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Writes the layer's result into ``output`` of shape (m, n), for x of (m, k), and returns it."""
        torch.mm(x, layer.weight.t(), out=output)
        return output if bias is None else output.add_(bias)
