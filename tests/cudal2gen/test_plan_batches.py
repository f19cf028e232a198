"""Proves what is said of the strides of a batch by the addresses of all of its elements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.packages import require

require("torch")
from cudal2gen.operators import plan_batches  # noqa: E402
from cudal2gen.operators.plan_batches import MatrixStrides, Sizes  # noqa: E402

pytestmark = pytest.mark.torch

Dimensions = list[tuple[int, int]]
EXTENT, STRIDE = st.sampled_from((1, 2, 3, 4)), st.sampled_from((0, 1, 2, 3, 4, 6, 8, 12, 24))
DIMENSIONS = st.lists(st.tuples(EXTENT, STRIDE), max_size=4)
FEW = settings(max_examples=80)


def addresses(extents: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The addresses of all elements, in the order of their indices."""
    return [
        sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in product(*map(range, extents))
    ]


@st.composite
def surrounding_dimensions(draw: st.DrawFn) -> Dimensions:
    """Dimensions of which each surrounds the smaller ones, in any order."""
    stride, dimensions = draw(st.integers(1, 3)), []
    for extent in draw(st.lists(EXTENT, max_size=4)):
        dimensions.append((extent, stride))
        stride *= extent + draw(st.integers(0, 1))
    return list(draw(st.permutations(dimensions)))


def split(dimensions: Dimensions) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The extents and the strides."""
    return tuple(extent for extent, _ in dimensions), tuple(stride for _, stride in dimensions)


@FEW
@given(DIMENSIONS | surrounding_dimensions())
def test_a_common_stride_leads_through_all_elements(dimensions: Dimensions) -> None:
    places = addresses(*split(dimensions))
    first = places[1] if len(places) > 1 else 0
    is_even = places == [first * at for at in range(len(places))]
    assert plan_batches.common_stride(*split(dimensions)) == (first if is_even else None)


@FEW
@given(surrounding_dimensions())
def test_dimensions_that_surround_each_other_are_distinct(dimensions: Dimensions) -> None:
    assert plan_batches.are_distinct(*split(dimensions))


@FEW
@given(DIMENSIONS, DIMENSIONS, st.booleans())
def test_shapes_of_a_product_are_those_of_numpy(a: Dimensions, b: Dimensions, column: bool) -> None:
    (*batch_a, m), (*batch_b, n) = ((1, *split(x)[0]) for x in (a, b))
    try:
        expected = np.broadcast_shapes(tuple(batch_a), tuple(batch_b))
    except ValueError:
        assume(False)
    assert plan_batches.broadcast(batch_a, batch_b) == expected
    left, right = np.ones((*batch_a, m, 5)), np.ones((*batch_b, 5, n))
    sizes = plan_batches.sizes_of(left.shape, right.shape)
    assert (*expected, sizes.m, sizes.n) == np.matmul(left, right).shape
    assert sizes.k == 5
    spread = np.broadcast_to(left, (*expected, m, 5))
    stated = plan_batches.matrix_strides(left.shape, [x // 8 for x in left.strides], expected)
    ours = (*stated.batch, stated.rows, stated.cols)
    # The stride along a dimension of one element does not matter.
    pairs = zip(ours, (x // 8 for x in spread.strides), spread.shape, strict=True)
    assert all(mine == its or extent == 1 for mine, its, extent in pairs)
    vector = plan_batches.matrix_strides((7,), (3,), expected, column)
    assert vector == MatrixStrides(*((3, 1) if column else (0, 3)), (0,) * len(expected))


def test_a_vector_is_a_row_on_the_left_and_a_column_on_the_right() -> None:
    assert plan_batches.sizes_of((5,), (5, 3)) == Sizes(1, 3, 5)
    assert plan_batches.sizes_of((2, 5), (5,)) == Sizes(2, 1, 5)


@FEW
@given(DIMENSIONS | surrounding_dimensions(), EXTENT, STRIDE, st.data())
def test_a_fold_has_the_rows_of_all_products(dimensions: Dimensions, m: int, rows: int, data: st.DataObject) -> None:
    batch, strides = split(dimensions)
    shared = tuple(data.draw(st.sampled_from((0, 0, 0, 5))) for _ in batch)
    a, b = MatrixStrides(rows, 1, strides), MatrixStrides(9, 1, shared)
    folded = plan_batches.fold(a, b, batch, Sizes(m, 7, 5))
    places = addresses((*batch, m), (*strides, rows))
    is_shared = len(set(addresses(batch, shared))) == 1
    is_even = len(places) > 1 and places[1] > 0 and places == [places[1] * at for at in range(len(places))]
    assert (folded is not None) == (is_shared and is_even)
    if folded is not None:
        assert folded == (Sizes(len(places), 7, 5), MatrixStrides(places[1], 1, ()))


@FEW
@given(st.lists(EXTENT, max_size=3), st.data())
def test_a_strided_batch_has_the_matrices_of_all_products(batch: list[int], data: st.DataObject) -> None:
    strides = []
    for _ in "abd":
        packed = [x // 8 for x in np.zeros(batch).strides]
        drawn = [data.draw(STRIDE) for _ in batch]
        strides.append(data.draw(st.sampled_from(([0] * len(batch), packed, drawn))))
    matrices = [MatrixStrides(5, 1, tuple(each)) for each in strides]
    batches, why = plan_batches.strided_batch(batch, *matrices)
    places = [addresses(batch, each) for each in strides]
    first = [place[1] if len(place) > 1 else 0 for place in places]
    even = [place == [step * at for at in range(len(place))] for place, step in zip(places, first, strict=True)]
    assert (batches is not None) == all(even) == (not why)
    if batches is not None:
        assert (batches.products, batches.a, batches.b, batches.d) == (len(places[0]), *first)
    else:
        assert [name in why.split() for name in "ABD"] == [not each for each in even]
