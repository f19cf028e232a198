"""Stands in for SGLang's module: the method of a linear layer, and the kernels that SGLang may choose for bf16."""

from __future__ import annotations

from enum import Enum

import torch

_batch_invariant = _enable_bf16_splitk_gemm = False


class Bf16GemmBackend(Enum):
    AUTO = "auto"
    CUTEDSL = "cutedsl"
    GEMV = "gemv"
    TORCH = "torch"


_BF16_GEMM_BACKEND = Bf16GemmBackend.AUTO


def get_bf16_gemm_backend() -> Bf16GemmBackend:
    return _BF16_GEMM_BACKEND


def is_batch_invariant_mode_enabled() -> bool:
    return _batch_invariant


class UnquantizedLinearMethod:
    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.weight, bias)

    def apply_with_addend(
        self, layer: torch.nn.Module, x: torch.Tensor, addend: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.apply(layer, x, bias).add_(addend)

    def apply_into(
        self, layer: torch.nn.Module, x: torch.Tensor, output: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        torch.mm(x, layer.weight.t(), out=output)
        return output if bias is None else output.add_(bias)
