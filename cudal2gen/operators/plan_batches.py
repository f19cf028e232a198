"""Batch dimensions of a product: its matrices as evenly spaced ones, or as the rows of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from cudal2gen.kernel.launch import Batches, Sizes


class MatrixStrides(NamedTuple):
    """Strides, in elements, of a tensor's matrices: to the next row and column, and along its other dimensions."""

    rows: int
    cols: int
    batch: tuple[int, ...] = ()


def sizes_of(a: Sequence[int], b: Sequence[int]) -> Sizes:
    """The extents of each product of tensors of these shapes: a vector a is a row, a vector b a column."""
    m = a[-2] if len(a) > 1 else 1
    n = b[-1] if len(b) > 1 else 1
    return Sizes(m, n, a[-1])


def matrix_strides(
    shape: Sequence[int], strides: Sequence[int], batch: Sequence[int], column: bool = False
) -> MatrixStrides:
    """The strides of a tensor's matrices, which are repeated where a batch dimension is broadcast. ``column``: whether
    a vector is a column."""
    if len(shape) == 1:
        rows, cols = (strides[0], 1) if column else (0, strides[0])
        return MatrixStrides(rows, cols, (0,) * len(batch))
    if not batch:
        return MatrixStrides(strides[-2], strides[-1], ())
    dimensions = tuple(zip(shape[:-2], strides[:-2], strict=True))
    repeated = ((1, 0),) * (len(batch) - len(dimensions)) + dimensions
    spread = tuple(0 if extent == 1 else stride for extent, stride in repeated)
    return MatrixStrides(strides[-2], strides[-1], spread)


def broadcast(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """``torch.broadcast_shapes`` of batch dimensions that fit, whose first call would import sympy: half a second."""
    rank = max(len(a), len(b))
    if not rank:
        return ()
    pairs = zip((1,) * (rank - len(a)) + tuple(a), (1,) * (rank - len(b)) + tuple(b), strict=True)
    return tuple(of_b if of_a == 1 else of_a for of_a, of_b in pairs)


def step(extents: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride that visits all elements of some dimensions in order; None if no single stride does."""
    # A dimension of one element is never stepped along, so its stride does not matter.
    dimensions = [pair for pair in zip(extents, strides, strict=True) if pair[0] != 1]
    for (_, outer), (extent, inner) in pairwise(dimensions):
        if outer != extent * inner:
            return None
    return dimensions[-1][1] if dimensions else 0


def folded(
    a: MatrixStrides, b: MatrixStrides, batch: Sequence[int], sizes: Sizes
) -> tuple[Sizes, MatrixStrides] | None:  # fmt: skip
    """The products as one, of all rows of A with the B that they share; None if they do not share it."""
    if any(extent != 1 and stride for extent, stride in zip(batch, b.batch, strict=True)):
        return None
    rows = step((*batch, sizes.m), (*a.batch, a.rows))
    if rows is None or rows <= 0:
        return None
    return sizes._replace(m=math.prod(batch) * sizes.m), a._replace(rows=rows, batch=())


def spaced(batch: Sequence[int], a: MatrixStrides, b: MatrixStrides, d: MatrixStrides) -> tuple[Batches | None, str]:
    """The products as a strided batch; or None, and the reason."""
    steps = [step(batch, matrices.batch) for matrices in (a, b, d)]
    uneven = [name for name, stride in zip("ABD", steps, strict=True) if stride is None]
    if uneven:
        return None, f"batch dimensions of {' and '.join(uneven)} without a common stride"
    return Batches(math.prod(batch), *(stride or 0 for stride in steps)), ""


def apart(extents: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two elements of a tensor share memory: each stride is larger than the distance that all smaller
    strides together reach. False also where that is undecided."""
    reach = 0
    for stride, extent in sorted(_steps(extents, strides)):
        if stride <= reach:
            return False
        reach += (extent - 1) * stride
    return True


def overlapping(extents: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two of a tensor's elements surely lie in one place: there are more elements than places, or steps back
    along one dimension and forth along another lead to where they began."""
    if 0 in extents:
        return False
    steps = _steps(extents, strides)
    if math.prod(extents) > 1 + sum((extent - 1) * stride for stride, extent in steps):
        return True
    for (first, of_first), (second, of_second) in combinations(steps, 2):
        common = math.gcd(first, second)
        if common and second // common < of_first and first // common < of_second:
            return True
    return any(not stride for stride, _ in steps)


def _steps(extents: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Stride and extent of each dimension of more than one element."""
    return [(stride, extent) for extent, stride in zip(extents, strides, strict=True) if extent > 1]
