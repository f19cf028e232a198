"""Proves which states of a role's stores to shared memory are equal: those of equal copies by equal lanes."""

from __future__ import annotations

import numpy as np

from kernelproof.certificates.pipelines import Stores

PLACES = np.arange(8)  # the elements of a small buffer


def stores_with_copies_begun(*copies: tuple[int, int]) -> Stores:
    """The state after bulk copies have begun to read what was stored. A copy is its lane, and the first of the two
    elements that it reads."""
    stores = Stores.none(8)
    stores.write(PLACES)
    stores.fence()
    stores.meet()
    for lane, first in copies:
        stores.begin(lane, PLACES[first : first + 2])
    # All places count as being read, so only the copies themselves can tell two states apart.
    stores.read[:] = Stores.READING
    return stores


def test_copies_in_no_group_are_part_of_a_state() -> None:
    assert stores_with_copies_begun((0, 0)).key == stores_with_copies_begun((0, 0)).key
    assert stores_with_copies_begun((0, 0)).key != stores_with_copies_begun((0, 2)).key, "another place"
    assert stores_with_copies_begun((0, 0)).key != stores_with_copies_begun((1, 0)).key, "another lane"
    assert stores_with_copies_begun((0, 0), (1, 4)).key != stores_with_copies_begun((0, 4), (1, 0)).key, (
        "places of the other lane"
    )


def test_copies_of_a_group_are_told_from_those_of_none() -> None:
    committed = stores_with_copies_begun((0, 0))
    committed.commit(0)
    assert committed.key != stores_with_copies_begun((0, 0)).key
