"""Proves which partial sums a thread adds, and which of them movmatrix brings to it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kernelproof.certificates.pipelines import Parts
from kernelproof.certificates.polynomials import ZERO, Polynomial
from kernelproof.certificates.share import LANES, VECTOR, WARPS, Share
from kernelproof.certificates.slices import SlabContents
from kernelproof.ground.chips import WARP

# Threads of both warpgroups, and vectors that each has.
THREADS, VECTORS = 256, 6


def share(first: bool, warpgroup: int = 0, columns: int = 3, rows: int = 2, together: int = 1) -> Share:
    """A warpgroup's share of a tile of 4 parts, with no vector stored yet."""
    parts = Parts(4, columns * rows, columns, together, ZERO, ZERO, ZERO, ZERO)
    slab = SlabContents.nothing(VECTOR * columns * rows * THREADS)
    return Share(parts, 0, 1, 128, THREADS, first, warpgroup, 1, slab)


def value(polynomial: Polynomial, names: dict[str, int]) -> int:
    """The value of a polynomial in lane 0 for values of its names."""
    terms = polynomial.in_lane(0).items()
    return sum(coefficient * names.get(monomial[0], 0) if monomial else coefficient for monomial, coefficient in terms)


def of_thread(polynomial: Polynomial, thread: int) -> int:
    """The value of a polynomial for a thread, by its lane and its warp."""
    return value(polynomial, {name: thread // step % count for name, (count, step) in (LANES | WARPS).items()})


@pytest.mark.parametrize(("warpgroup", "vector", "pair"), [*product((0, 1), (0, 5), (0, 1))])
def test_movmatrix_brings_the_sums_that_a_transposed_matrix_has(warpgroup: int, vector: int, pair: int) -> None:
    places = np.arange(VECTOR * VECTORS * THREADS).reshape(VECTORS, THREADS // WARP, WARP, 2, 2)[vector, :, :, pair]
    turned = np.ascontiguousarray(places.reshape(-1, 8, 8).transpose(0, 2, 1)).reshape(THREADS, 2)
    for half in range(2):
        place = share(False, warpgroup).turned(Polynomial.of(vector), 2 * pair + half)
        own = turned[128 * warpgroup : 128 * (warpgroup + 1), half].tolist()
        assert [of_thread(place, thread) for thread in range(128)] == own
        first = share(True).turned(Polynomial.of(vector), 2 * pair + half)
        assert first.equals(Polynomial.of(int(turned[0, half])))


@pytest.mark.parametrize(("columns", "rows"), [(3, 2), (4, 1), (8, 3), (12, 1), (12, 2), (20, 2), (5, 1), (26, 2)])
@pytest.mark.parametrize("together", [1, 2, 4, 8])
def test_iterations_begin_with_every_vector_once(columns: int, rows: int, together: int) -> None:
    whole = share(True, columns=columns, rows=rows, together=together)
    extents = {name: size for name, size in whole.vector_extents.items() if size > 1}
    points = [dict(zip(extents, each, strict=True)) for each in product(*map(range, extents.values()))]
    found = []
    for each in whole.iterations():
        begins = {
            tuple(point[name] for name in extents if name in each.vector.names()): value(each.vector, point)
            for point in points
            if all(
                value(limit, point) >= 0 for limit in each.column_limits if {*limit.names()} <= {*each.vector.names()}
            )
        }
        found += begins.values()
    assert sorted(found) == list(range(columns * rows))
