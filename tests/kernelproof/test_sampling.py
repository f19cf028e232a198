"""Tests which CTAs of a grid ``sampler`` chooses if only some of them are to be executed."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from kernelproof.checking.sampling import sampler

EXTENTS = st.tuples(*[st.integers(1, 7)] * 3)


@given(EXTENTS, st.integers(1, 40), st.integers(0, 3))
def test_a_sample_has_the_corners_and_random_ctas(grid: tuple[int, int, int], count: int, seed: int) -> None:
    chosen = sampler(count, seed)(grid)
    every = [(x, y, z) for z, y, x in product(*map(range, reversed(grid)))]  # in the order of linear CTA numbers
    assert chosen == sorted(set(chosen) & set(range(len(every))))
    if len(every) <= count:
        assert len(chosen) == len(every)
        return
    corners = {number for number, place in enumerate(every)
               if all(at in (0, extent - 1) for at, extent in zip(place, grid, strict=True))}  # fmt: skip
    assert corners <= set(chosen)
    assert count <= len(chosen) <= count + len(corners)
    assert chosen == sampler(count, seed)(grid)


def test_samples_of_different_seeds_differ() -> None:
    samples = {tuple(sampler(8, seed)((40, 40, 40))) for seed in range(20)}
    assert len(samples) == 20
