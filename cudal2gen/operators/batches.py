"""Batch dimensions: the shape of a product of tensors with any number of dimensions, and its matrices as evenly spaced
ones, or as the rows of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from cudal2gen.kernel.launch import Batches, Sizes

if TYPE_CHECKING:
    import torch


class Stack(NamedTuple):
    """Matrices of a tensor: strides of their rows and columns, and of its other dimensions."""

    rows: int
    cols: int
    batch: tuple[int, ...]


def result_shape(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """The shape of ``torch.matmul(a, b)``. Raises ValueError for tensors that it does not multiply."""
    import torch

    if not a.ndim or not b.ndim:
        raise ValueError(f"a and b must have dimensions, got shapes {tuple(a.shape)} and {tuple(b.shape)}")
    depth = b.shape[-2] if b.ndim > 1 else b.shape[0]
    if a.shape[-1] != depth:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} do not fit: K is {a.shape[-1]} and {depth}")
    end = (*a.shape[-2:-1], *(b.shape[-1:] if b.ndim > 1 else ()))
    if a.ndim <= 2 and b.ndim <= 2:
        return end
    try:
        return (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *end)
    except RuntimeError:
        raise ValueError(
            f"a {tuple(a.shape)} and b {tuple(b.shape)} do not fit: batch dimensions "
            f"{tuple(a.shape[:-2])} and {tuple(b.shape[:-2])}"
        ) from None


def sizes_of(a: torch.Tensor, b: torch.Tensor) -> Sizes:
    """The extents of each product: a vector a is a row, a vector b a column."""
    m = a.shape[-2] if a.ndim > 1 else 1
    n = b.shape[-1] if b.ndim > 1 else 1
    return Sizes(m, n, a.shape[-1])


def stack(tensor: torch.Tensor, batch: Sequence[int], column: bool = False) -> Stack:
    """A tensor's matrices, repeated where a batch dimension is broadcast. ``column``: how a vector is taken."""
    strides = tensor.stride()
    if tensor.ndim == 1:
        rows, cols = (strides[0], 1) if column else (0, strides[0])
        return Stack(rows, cols, (0,) * len(batch))
    dimensions = tuple(zip(tensor.shape[:-2], strides[:-2], strict=True))
    repeated = ((1, 0),) * (len(batch) - len(dimensions)) + dimensions
    spread = tuple(0 if extent == 1 else stride for extent, stride in repeated)
    return Stack(strides[-2], strides[-1], spread)


def step(extents: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride that visits all elements of some dimensions in order; None where no single one does."""
    dimensions = [pair for pair in zip(extents, strides, strict=True) if pair[0] != 1]
    for (_, outer), (extent, inner) in pairwise(dimensions):
        if outer != extent * inner:
            return None
    return dimensions[-1][1] if dimensions else 0


def folded(a: Stack, b: Stack, batch: Sequence[int], sizes: Sizes) -> tuple[Sizes, Stack] | None:
    """The products as one, of all rows of A with the B that they share; None where they are not."""
    if any(extent != 1 and stride for extent, stride in zip(batch, b.batch, strict=True)):
        return None
    rows = step((*batch, sizes.m), (*a.batch, a.rows))
    if rows is None or rows <= 0:
        return None
    return sizes._replace(m=math.prod(batch) * sizes.m), a._replace(rows=rows, batch=())


def spaced(batch: Sequence[int], a: Stack, b: Stack, d: Stack) -> tuple[Batches | None, str]:
    """The products as a strided batch; or None, and why they are none."""
    steps = [step(batch, matrices.batch) for matrices in (a, b, d)]
    uneven = [name for name, stride in zip("ABD", steps, strict=True) if stride is None]
    if uneven:
        return None, f"batch dimensions of {' and '.join(uneven)} without a common stride"
    return Batches(math.prod(batch), *(stride or 0 for stride in steps)), ""
