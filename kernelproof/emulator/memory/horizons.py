"""Caches up to which tick a warp's accesses happen before another warp's: this spares lookups in vector clocks."""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.state.arrays import Array

# At most 2^14 pairs of warps are cached. The number of a pair is multiplied by 2^64 / golden ratio, modulo 2^64, and
# the top 14 bits of the product are the pair's slot. This spreads consecutive numbers evenly (Fibonacci hashing).
_SLOT_BITS = 14
_TO_SLOT, _MULTIPLIER = np.uint64(64 - _SLOT_BITS), np.uint64(0x9E3779B97F4A7C15)


class Horizons:
    """A cache: a pair of warps -> a tick. The first warp's accesses before this tick happen before the second warp's
    next access. Vector clocks only grow, so what was true of a tick once remains true. The caller numbers the pairs,
    from 0 on. A pair may push another one out of the cache."""

    def __init__(self) -> None:
        # Number of the pair plus one, 0 for none.
        self._pairs: Array = np.zeros(1 << _SLOT_BITS, np.int64)
        self._ticks: Array = np.zeros(1 << _SLOT_BITS, np.int64)

    @staticmethod
    def _slots(pairs: Array) -> Array:
        """The slots in which pairs are cached."""
        return np.asarray((pairs.view(np.uint64) * _MULTIPLIER >> _TO_SLOT).view(np.int64))

    def known_before(self, pairs: Array, ticks: Array) -> Array:
        """Per element: is an access by the pair's first warp at this tick known to happen before the next access of the
        second warp? False means that it is not known."""
        slots = self._slots(pairs)
        return np.asarray((ticks < self._ticks[slots]) & (self._pairs[slots] == pairs + 1))

    def put(self, pairs: Array, ticks: Array) -> None:
        """Cache a tick for each pair."""
        slots = self._slots(pairs)
        self._pairs[slots], self._ticks[slots] = pairs + 1, ticks
