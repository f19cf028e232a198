"""Proves that the compact clocks between CTAs order the same accesses as the rows that they stand for."""

from __future__ import annotations

import numpy as np
import pytest

from kernelproof.emulator.memory.chains import BARRIER, PER_BLOCK, Chains, Clock, merged

# Threads of a CTA, and a clock: for each CTA a row with a number for each of its threads.
THREADS = 64
Rows = dict[int, np.ndarray]


def join(a: Rows, b: Rows) -> Rows:
    """The maximum of rows, CTA by CTA."""
    zero = np.zeros(THREADS, np.int64)
    return {cta: np.maximum(a.get(cta, zero), b.get(cta, zero)) for cta in a.keys() | b.keys()}


@pytest.mark.parametrize("seed", range(4))
def test_clocks_cover_what_their_rows_cover(seed: int) -> None:
    draw = np.random.default_rng(seed)
    ctas = [2, 5, 300][seed % 3]
    chains = Chains(THREADS)
    known: list[tuple[Clock, Rows]] = [({}, {})]
    for tick in range(1, 400):
        cta, warp = int(draw.integers(ctas)), int(draw.integers(-1, 2))
        row = np.zeros(THREADS, np.int64)
        # A warp may release accesses of only some lanes, and an older state of the others. So rows of a warp may be
        # unordered.
        row[:] = int(draw.integers(tick)) if draw.integers(2) else 0
        row[draw.permutation(THREADS)[:8] if warp == BARRIER else np.arange(32 * warp, 32 * warp + 32)] = tick
        clock, rows = known[int(draw.integers(len(known)))]
        other, other_rows = known[int(draw.integers(len(known)))]
        clock = merged(chains.released(clock, cta, warp, row), other)
        known.append((clock, join(join(rows, {cta: row}), other_rows)))
    for clock, rows in known:
        for cta in range(ctas):
            of_cta = chains.known_rows(clock, cta)
            assert bool(of_cta) == (cta in rows)
            if of_cta:
                assert (chains.row(of_cta) == rows[cta]).all()
                tick = int(draw.integers(400))
                assert chains.covers(clock, cta, 1, tick) == (rows[cta][32:].max() > tick)


def test_clocks_share_what_they_have_in_common() -> None:
    chains = Chains(THREADS)
    clocks = [chains.released({}, cta, 0, np.full(THREADS, 5)) for cta in range(PER_BLOCK + 1)]
    one = merged(clocks[0], clocks[1])
    assert merged(one, clocks[0]) is one
    assert merged(clocks[1], one) is one
    both = merged(one, clocks[PER_BLOCK])
    assert len(both) == 2
    assert merged(both, one) is both
