"""Proves which partial sums a thread adds, and which of them movmatrix brings to it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kernelproof.certificates import NotCertified
from kernelproof.certificates.pipelines import Parts
from kernelproof.certificates.polynomials import ZERO, Polynomial
from kernelproof.certificates.share import LANES, VECTOR, WARPS, Share
from kernelproof.certificates.slices import SlabContents
from kernelproof.ground.chips import WARP

# Threads of both warpgroups, and vectors that each has.
THREADS, VECTORS = 256, 6


def share(first: bool, warpgroup: int = 0, columns: int = 3, rows: int = 2, together: int = 1) -> Share:
    """A warpgroup's share of a tile of 4 parts, with no vector stored yet.

    ``first``: whether the thread is the first of its group. A thread has ``rows`` rows of ``columns`` vectors, and adds
    ``together`` vectors in an iteration.
    """
    parts = Parts(4, columns * rows, columns, together, ZERO, ZERO, ZERO, ZERO)
    slab = SlabContents.nothing(VECTOR * columns * rows * THREADS)
    return Share(parts, 0, 1, 128, THREADS, first, warpgroup, 1, slab)


def value(polynomial: Polynomial, names: dict[str, int]) -> int:
    """The value of a polynomial in lane 0 for values of its names."""
    terms = polynomial.in_lane(0).items()
    return sum(coefficient * names.get(monomial[0], 0) if monomial else coefficient for monomial, coefficient in terms)


def value_of_thread(polynomial: Polynomial, thread: int) -> int:
    """The value of a polynomial for a thread, by its lane and its warp."""
    return value(polynomial, {name: thread // step % count for name, (count, step) in (LANES | WARPS).items()})


@pytest.mark.parametrize(("warpgroup", "vector", "pair"), [*product((0, 1), (0, 5), (0, 1))])
def test_movmatrix_brings_the_sums_that_a_transposed_matrix_has(warpgroup: int, vector: int, pair: int) -> None:
    places = np.arange(VECTOR * VECTORS * THREADS).reshape(VECTORS, THREADS // WARP, WARP, 2, 2)[vector, :, :, pair]
    turned = np.ascontiguousarray(places.reshape(-1, 8, 8).transpose(0, 2, 1)).reshape(THREADS, 2)
    for half in range(2):
        place = share(False, warpgroup).turned(Polynomial.of(vector), 2 * pair + half)
        own = turned[128 * warpgroup : 128 * (warpgroup + 1), half].tolist()
        assert [value_of_thread(place, thread) for thread in range(128)] == own
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


def share_of_stored_tile(element: int) -> tuple[Share, tuple[Polynomial, Polynomial, Polynomial, Polynomial]]:
    """A warpgroup's share of a stored tile, where the sum at place (v * THREADS + t) * VECTOR + e of a slab is that of
    row t and column 4 * v + e; and what ``check_place`` is asked about sum ``element`` of any vector."""
    whole = share(False)
    vectors, threads, elements = np.meshgrid(np.arange(VECTORS), np.arange(THREADS), np.arange(VECTOR), indexing="ij")
    whole.slab.rows[:], whole.slab.cols[:] = threads.ravel(), (4 * vectors + elements).ravel()
    place = (whole.vector * THREADS + whole.number_in_group) * VECTOR + element
    return whole, (whole.vector, place, whole.number_in_group, whole.vector * 4 + element)


@pytest.mark.parametrize("element", range(VECTOR))
def test_a_sum_comes_from_its_own_place(element: int) -> None:
    whole, question = share_of_stored_tile(element)
    whole.check_place(*question)
    whole.check_place(*question)
    assert whole.vector_of(question[1])[1] == element
    assert whole.vector_of(question[1])[0].equals(whole.vector)
    vector, place, row, col = question
    for wrong in (
        (vector, place + 4, row, col), (vector, place, row + 1, col), (vector, place, row, col + 1),
        (vector, place + VECTOR * THREADS * VECTORS, row, col), (vector, place - VECTOR * THREADS, row, col),
    ):  # fmt: skip
        with pytest.raises(NotCertified):
            share_of_stored_tile(element)[0].check_place(*wrong)
    with pytest.raises(NotCertified):
        whole.vector_of(place + VECTOR)
    # Vectors after the tile's last one are loaded, but never stored.
    beyond = VECTOR * THREADS * VECTORS
    whole.check_place(vector + VECTORS, place + beyond, row, col)


@pytest.mark.parametrize("place", [0, 1, 4 * 100 + 1, 4 * 127 + 3, 4 * (THREADS * (VECTORS - 1) + 127) + 2])
def test_a_single_wrong_place_of_a_slab_is_found(place: int) -> None:
    for contents in ("rows", "cols"):
        whole, question = share_of_stored_tile(place % VECTOR)
        getattr(whole.slab, contents)[place] += 1
        with pytest.raises(NotCertified):
            whole.check_place(*question)
    # A place of the other warpgroup's threads does not matter.
    whole, question = share_of_stored_tile(2)
    whole.slab.rows[4 * 200 + 2] += 1
    whole.check_place(*question)
