"""Operators under ``torch.vmap``: the mapped dimension becomes the first batch dimension of a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Mapped = tuple["torch.Tensor", int]  # the result, and its mapped dimension
ProductCall = Callable[..., "torch.Tensor"]


def first(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    """The tensor with its mapped dimension, if it has one, in front."""
    return tensor if dim is None else tensor.movedim(dim, 0)


def matmul(product: ProductCall, in_dims: tuple[Any, ...], a: torch.Tensor, b: torch.Tensor, *options: Any) -> Mapped:
    """``product``, mapped. Vectors become matrices first, so that batch dimensions of a and b correspond."""
    ranks = [tensor.ndim - (dim is not None) for tensor, dim in zip((a, b), in_dims, strict=False)]
    a, b = first(a, in_dims[0]), first(b, in_dims[1])
    a, b = a.unsqueeze(-2) if ranks[0] == 1 else a, b.unsqueeze(-1) if ranks[1] == 1 else b
    rank = max(2, *ranks)
    a, b = (tensor if dim is None else _widened(tensor, rank + 1) for tensor, dim in zip((a, b), in_dims, strict=False))
    d = product(a, b, *options)
    d = d.squeeze(-1) if ranks[1] == 1 else d
    return (d.squeeze(-1 if ranks[1] == 1 else -2) if ranks[0] == 1 else d), 0


def _widened(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """The tensor with dimensions of one element inserted after the first, up to this rank."""
    return tensor.reshape(tensor.shape[0], *(1,) * (rank - tensor.ndim), *tensor.shape[1:])


def linear(
    product: ProductCall, layer: ProductCall, in_dims: tuple[Any, ...], x: torch.Tensor, weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> Mapped:  # fmt: skip
    """``layer``, mapped. ``product`` and ``layer`` are the operators matmul and linear; mapped weights make a batch."""
    x_dim, weight_dim, bias_dim = (*in_dims, None)[:3]
    if weight_dim is None and bias_dim is None:
        return layer(first(x, x_dim), weight, bias), 0
    x, weight = first(x, x_dim), first(weight, weight_dim)
    # ``lead``: the dimensions of x that a single layer has before K. A product takes one of them, so they are merged.
    lead = x.shape[:-1] if x_dim is None else x.shape[1:-1]
    mapped = () if x_dim is None else x.shape[:1]
    d = product(x.reshape(*mapped, lead.numel(), x.shape[-1]), weight.mT)
    d = d.reshape(*d.shape[:-2], *lead, d.shape[-1])
    if bias is None:
        return d, 0
    bias = first(bias, bias_dim)
    wide = bias.view(*bias.shape[:-1], *(1,) * len(lead), bias.shape[-1])
    return (d.expand(*wide.shape[:1], *d.shape) if d.ndim == len(lead) + 1 else d) + wide, 0
