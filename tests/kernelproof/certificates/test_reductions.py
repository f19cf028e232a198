"""Proves which terms the sum of a row's elements has after additions, shuffles and iterations of a loop."""

from __future__ import annotations

import numpy as np
import pytest

from kernelproof.certificates.cells import Cells, Kind, Kinds
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.polynomials import ZERO, Polynomial
from kernelproof.certificates.reductions import Terms, fetched, kept_places, shuffled

LANES, STEP = 32, 64  # the lanes of a warp, and the elements of a row in a k-tile
# The first element of the k-tile of any iteration.
ITERATION = Polynomial.named("iteration", STEP)


def elements(first: int, iteration: Polynomial = ZERO) -> Terms:
    """In lane l the element ``first`` + l of a k-tile, as a sum of one term. ``iteration``: the k-tile's first
    element."""
    rows = np.zeros((LANES, 1), np.int64)
    cells = Cells(np.ones_like(rows), rows, np.arange(LANES)[:, None] + first, 4)
    return Terms.of_elements(cells, Kind("A", ZERO, iteration), np.ones(LANES, bool), STEP).view("f4")


def total(terms: Terms) -> Terms:
    """The sum of all lanes, in every lane."""
    for offset in (16, 8, 4, 2, 1):
        operands = [np.full(LANES, each, "u4") for each in (offset, 31, 0xFFFFFFFF)]
        terms = terms.view("f4") + terms.of_lanes(shuffled("bfly", LANES, operands, None, 0)[0]).view("f4")
        terms = terms.view("f4")
    return terms


def test_all_iterations_have_all_terms_once() -> None:
    """Each lane adds two elements of every k-tile. By induction over iterations all lanes together have all elements.
    A sum that lacks half of a k-tile has not, and sums of different iterations are different."""
    first = (elements(0) + elements(32)).view("f4")
    assert not total(elements(0)).has_all(Polynomial.of(STEP))
    assert total(first).has_all(Polynomial.of(STEP))
    general = first.settled().moved(ITERATION).view("f4")
    later = (general + elements(0, ITERATION + STEP)).view("f4") + elements(32, ITERATION + STEP)
    assert first.settled().moved(ITERATION + STEP).same(later)
    assert not first.settled().moved(ITERATION).same(later)
    assert not first.settled().moved(ITERATION + STEP).same(general + elements(0, ITERATION + STEP))
    half = (elements(0).settled().view("f4") + elements(0, Polynomial.of(STEP))).view("f4")
    assert not total(half + elements(32, Polynomial.of(STEP))).settled().has_all(Polynomial.of(2 * STEP))
    assert total(later).has_all(ITERATION + 2 * STEP)
    assert not total(later).has_all(ITERATION + STEP)


def test_an_element_that_is_added_twice_is_refused() -> None:
    for other in (elements(0), elements(0).of_lanes(np.arange(LANES))):
        with pytest.raises(NotCertified, match="twice"):
            elements(0) + other.view("f4")
    with pytest.raises(NotCertified, match="twice"):
        total(total(elements(0)))


def test_only_floats_are_added_and_to_nothing_but_zero() -> None:
    assert (elements(0) + np.zeros(LANES, "f4")).has_all(ZERO) is False
    for wrong in (np.ones(LANES, "f4"), np.zeros(LANES, "u4"), elements(32).view("u4"), 1.0):
        with pytest.raises(NotCertified):
            elements(0) + wrong
    with pytest.raises(NotCertified):
        elements(0).view("u4") + elements(32)


def test_what_lanes_keep_in_shared_memory_is_theirs() -> None:
    """Lanes 8 to 11 load what lanes 0 to 3 have stored, which are the sums of elements 0 to 3 (a bit for each). Sums of
    4 bytes are not loaded by halves."""
    kinds, value = Kinds(), elements(0)
    places = kept_places(kinds.keep(value), LANES, 4)
    assert kinds.kept_by(places.one_kind) is value
    loaded = fetched(value, places.of_lanes(np.arange(4)), np.arange(8, 12), LANES)
    assert isinstance(loaded, Terms)
    assert loaded.known[:, 0].tolist() == [8 <= lane < 12 for lane in range(LANES)]
    assert loaded.beyond[8:12, 0].tolist() == [1, 2, 4, 8]
    with pytest.raises(NotCertified):
        fetched(value, Cells(places.kinds, places.rows, places.cols[:, ::-1], 2), np.arange(LANES), LANES)


def test_a_shuffle_from_a_lane_that_does_not_take_part_is_refused() -> None:
    operands = [np.full(LANES, each, "u4") for each in (16, 31, 0xFFFFFFFF)]
    with pytest.raises(NotCertified):
        shuffled("bfly", LANES, operands, np.arange(LANES) < 8, 0)
