"""What a thread adds of partial sums: which of them movmatrix brings to it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kernelproof.certificates.pipelines import WARP, Parts
from kernelproof.certificates.polynomials import ZERO, Polynomial
from kernelproof.certificates.share import LANES, VECTOR, WARPS, Share
from kernelproof.certificates.slices import SlabContents

THREADS, VECTORS = 256, 6


def share(first: bool, warpgroup: int = 0, together: int = 1) -> Share:
    parts = Parts(4, VECTORS, 3, together, ZERO, ZERO, ZERO, ZERO)
    slab = SlabContents.nothing(VECTOR * VECTORS * THREADS)
    return Share(parts, 0, 1, 128, THREADS, first, warpgroup, 1, slab)


def evaluated(value: Polynomial, thread: int) -> int:
    names = {name: thread // step % count for name, (count, step) in (LANES | WARPS).items()}
    return sum(
        coefficient * names[monomial[0]] if monomial else coefficient
        for monomial, coefficient in value.in_lane(0).items()
    )


@pytest.mark.parametrize(("warpgroup", "vector", "pair"), [*product((0, 1), (0, 5), (0, 1))])
def test_movmatrix_brings_the_sums_that_a_transposed_matrix_has(warpgroup: int, vector: int, pair: int) -> None:
    places = np.arange(VECTOR * VECTORS * THREADS).reshape(VECTORS, THREADS // WARP, WARP, 2, 2)[vector, :, :, pair]
    turned = np.ascontiguousarray(places.reshape(-1, 8, 8).transpose(0, 2, 1)).reshape(THREADS, 2)
    for half in range(2):
        place = share(False, warpgroup).turned(Polynomial.of(vector), 2 * pair + half)
        own = turned[128 * warpgroup : 128 * (warpgroup + 1), half].tolist()
        assert [evaluated(place, thread) for thread in range(128)] == own
        first = share(True).turned(Polynomial.of(vector), 2 * pair + half)
        assert first.equals(Polynomial.of(int(turned[0, half])))


@pytest.mark.parametrize("together", range(1, 6))
def test_iterations_are_all_and_apart(together: int) -> None:
    """An iteration that begins in one of a range of columns stays in its row."""
    begins = [(0, 2) if each.within is None else each.within for each in share(True, together=together).iterations()]
    assert sorted(at for least, most in begins for at in range(least, most + 1)) == [0, 1, 2]
    assert all(least == most or most + together <= 3 for least, most in begins)
