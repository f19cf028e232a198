"""Describes the batch dimensions of a product as a strided batch, or as the rows of a single product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from cudal2gen.kernel.launch import Batches, Sizes


class MatrixStrides(NamedTuple):
    """Strides of a tensor's matrices in elements: to the next row, to the next column, and along each batch
    dimension."""

    rows: int
    cols: int
    batch: tuple[int, ...] = ()


def sizes_of(a: Sequence[int], b: Sequence[int]) -> Sizes:
    """The extents m, n, k of each product of tensors with these shapes. A vector a is a row, a vector b a column."""
    m = a[-2] if len(a) > 1 else 1
    n = b[-1] if len(b) > 1 else 1
    return Sizes(m, n, a[-1])


def matrix_strides(
    shape: Sequence[int], strides: Sequence[int], batch: Sequence[int], column: bool = False
) -> MatrixStrides:
    """The strides of a tensor's matrices. The stride along a batch dimension that is broadcast is 0.

    ``batch``: the common batch dimensions of the product. ``column``: whether a vector is a column.
    """
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
    """The same as ``torch.broadcast_shapes``, for batch dimensions that fit. The first call of torch's function would
    import sympy, which takes 0.5 s."""
    rank = max(len(a), len(b))
    if not rank:
        return ()
    pairs = zip((1,) * (rank - len(a)) + tuple(a), (1,) * (rank - len(b)) + tuple(b), strict=True)
    return tuple(b_extent if a_extent == 1 else a_extent for a_extent, b_extent in pairs)


def common_stride(extents: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of one dimension that has the elements of all these dimensions in the same order. None if no single
    stride leads from each element to the next."""
    # The stride of a dimension of one element does not matter.
    dimensions = [pair for pair in zip(extents, strides, strict=True) if pair[0] != 1]
    for (_, outer), (extent, inner) in pairwise(dimensions):
        if outer != extent * inner:
            return None
    return dimensions[-1][1] if dimensions else 0


def fold(
    a: MatrixStrides, b: MatrixStrides, batch: Sequence[int], sizes: Sizes
) -> tuple[Sizes, MatrixStrides] | None:  # fmt: skip
    """Folds a batch whose products share one B into one product, whose A has the rows of all A.

    Returns the sizes of that product and the strides of its A. None if the products have different B, or if one stride
    does not lead through all rows.
    """
    if any(extent != 1 and stride for extent, stride in zip(batch, b.batch, strict=True)):
        return None
    rows = common_stride((*batch, sizes.m), (*a.batch, a.rows))
    if rows is None or rows <= 0:
        return None
    return sizes._replace(m=math.prod(batch) * sizes.m), a._replace(rows=rows, batch=())


def strided_batch(
    batch: Sequence[int], a: MatrixStrides, b: MatrixStrides, d: MatrixStrides
) -> tuple[Batches | None, str]:
    """The products as a strided batch, and ""; or None, and the reason."""
    strides = [common_stride(batch, matrices.batch) for matrices in (a, b, d)]
    uneven = [name for name, stride in zip("ABD", strides, strict=True) if stride is None]
    if uneven:
        return None, f"batch dimensions of {' and '.join(uneven)} without a common stride"
    return Batches(math.prod(batch), *(stride or 0 for stride in strides)), ""


def are_distinct(extents: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether surely no two elements of a tensor share memory. False if they do, and if this test cannot decide.

    They do not if each stride is larger than the largest distance that the smaller strides together reach.
    """
    reach = 0
    for stride, extent in sorted(_strides_and_extents(extents, strides)):
        if stride <= reach:
            return False
        reach += (extent - 1) * stride
    return True


def do_overlap(extents: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether surely two of a tensor's elements share memory. False if they do not, and if this test cannot decide.

    They do if there are more elements than addresses, or if some steps along one dimension lead to the same address as
    some steps along another.
    """
    if 0 in extents:
        return False
    dimensions = _strides_and_extents(extents, strides)
    if math.prod(extents) > 1 + sum((extent - 1) * stride for stride, extent in dimensions):
        return True
    for (first, first_extent), (second, second_extent) in combinations(dimensions, 2):
        # ``second // common`` steps of ``first`` and ``first // common`` steps of ``second`` reach the same address.
        common = math.gcd(first, second)
        if common and second // common < first_extent and first // common < second_extent:
            return True
    return any(not stride for stride, _ in dimensions)


def _strides_and_extents(extents: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """The stride and the extent of each dimension of more than one element."""
    return [(stride, extent) for extent, stride in zip(extents, strides, strict=True) if extent > 1]
