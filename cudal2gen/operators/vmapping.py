"""Computes operators under ``torch.vmap``: the mapped dimension becomes the first batch dimension of a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Mapped = tuple["torch.Tensor", int]  # the result, and its mapped dimension
ProductCall = Callable[..., "torch.Tensor"]


def in_front(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    """The tensor with its mapped dimension ``dim`` moved to the front; the tensor itself if ``dim`` is None."""
    return tensor if dim is None else tensor.movedim(dim, 0)


def matmul(product: ProductCall, in_dims: tuple[Any, ...], a: torch.Tensor, b: torch.Tensor, *options: Any) -> Mapped:
    """The operator ``product`` under vmap. Vectors first become matrices, so that the batch dimensions of a and b
    correspond."""
    # The dimensions of each tensor without the mapped one, as the mapped function sees it.
    ranks = [tensor.ndim - (dim is not None) for tensor, dim in zip((a, b), in_dims, strict=False)]
    a, b = in_front(a, in_dims[0]), in_front(b, in_dims[1])
    a, b = a.unsqueeze(-2) if ranks[0] == 1 else a, b.unsqueeze(-1) if ranks[1] == 1 else b
    rank = max(2, *ranks)
    a, b = (tensor if dim is None else _widened(tensor, rank + 1) for tensor, dim in zip((a, b), in_dims, strict=False))
    d = product(a, b, *options)
    d = d.squeeze(-1) if ranks[1] == 1 else d
    return (d.squeeze(-1 if ranks[1] == 1 else -2) if ranks[0] == 1 else d), 0


def _widened(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """The tensor with dimensions of one element inserted after its first dimension, up to this rank."""
    return tensor.reshape(tensor.shape[0], *(1,) * (rank - tensor.ndim), *tensor.shape[1:])


def linear(
    product: ProductCall, layer: ProductCall, in_dims: tuple[Any, ...], x: torch.Tensor, weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> Mapped:  # fmt: skip
    """A linear layer under vmap. ``product`` and ``layer``: the operators matmul and linear. If weights are mapped, the
    layer is computed as a batch of products."""
    x_dim, weight_dim, bias_dim = (*in_dims, None)[:3]
    if weight_dim is None and bias_dim is None:
        return layer(in_front(x, x_dim), weight, bias), 0
    x, weight = in_front(x, x_dim), in_front(weight, weight_dim)
    # ``lead``: the dimensions of a single layer's x before K. A product takes only one such dimension, so merge them.
    lead = x.shape[:-1] if x_dim is None else x.shape[1:-1]
    mapped = () if x_dim is None else x.shape[:1]
    d = product(x.reshape(*mapped, lead.numel(), x.shape[-1]), weight.mT)
    d = d.reshape(*d.shape[:-2], *lead, d.shape[-1])
    if bias is None:
        return d, 0
    # d is (mapped, *lead, N) if x or the weight is mapped, else (*lead, N). A mapped bias is (mapped, N).
    bias = in_front(bias, bias_dim)
    wide = bias.view(*bias.shape[:-1], *(1,) * len(lead), bias.shape[-1])
    return (d.expand(*wide.shape[:1], *d.shape) if d.ndim == len(lead) + 1 else d) + wide, 0
