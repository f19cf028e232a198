"""Proves that the cache of what warps know of each other never answers more than was stored in it."""

from __future__ import annotations

import numpy as np
import pytest

from kernelproof.emulator.memory.horizons import Horizons


@pytest.mark.parametrize("seed", range(3))
def test_no_more_is_known_than_was_stored(seed: int) -> None:
    draw = np.random.default_rng(seed)
    horizons, stored = Horizons(), {}
    pair_count = [40, 5_000, 1 << 40][seed]
    for _ in range(60):
        pairs = np.unique(draw.integers(pair_count, size=500))
        # An entry only grows.
        ticks = np.array([stored.get(pair, 0) for pair in pairs.tolist()]) + draw.integers(5, size=len(pairs))
        horizons.put(pairs, ticks)
        stored.update(zip(pairs.tolist(), ticks.tolist(), strict=True))
        # An entry may push out another one, but most of the last ones are there.
        assert horizons.known_before(pairs, ticks - 1).mean() > 0.9
        asked = np.concatenate([pairs, draw.integers(pair_count, size=500)])
        moments = draw.integers(8, size=len(asked))
        known = horizons.known_before(asked, moments)
        assert not (known & (moments >= np.array([stored.get(pair, 0) for pair in asked.tolist()]))).any()
