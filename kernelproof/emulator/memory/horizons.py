"""Caches what warps know of others, so that accesses which are ordered need no look into clocks."""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.state.arrays import Array

# At most 2^14 pairs of warps are cached. The slot of a pair is the top bits of its number times 2^64 / golden ratio:
# this product spreads numbers that follow each other (Fibonacci hashing).
_SLOT_BITS = 14
_TO_SLOT, _MULTIPLIER = np.uint64(64 - _SLOT_BITS), np.uint64(0x9E3779B97F4A7C15)


class Horizons:
    """A cache: a pair of warps -> a tick. The first warp's accesses before this tick happen before the second warp's
    next access. Clocks only grow, so a tick that was true once remains true. The caller numbers the pairs, from 0 on. A
    pair may push another one out of the cache."""

    def __init__(self) -> None:
        # Number of the pair plus one, 0 for none.
        self._pairs: Array = np.zeros(1 << _SLOT_BITS, np.int64)
        self._ticks: Array = np.zeros(1 << _SLOT_BITS, np.int64)

    @staticmethod
    def _slots(pairs: Array) -> Array:
        """The slots in which pairs are cached."""
        return np.asarray((pairs.view(np.uint64) * _MULTIPLIER >> _TO_SLOT).view(np.int64))

    def cover(self, pairs: Array, ticks: Array) -> Array:
        """Per element, whether accesses at a tick are known to happen before. False means that it is not known."""
        slots = self._slots(pairs)
        return np.asarray((ticks < self._ticks[slots]) & (self._pairs[slots] == pairs + 1))

    def put(self, pairs: Array, ticks: Array) -> None:
        """Cache the ticks of pairs."""
        slots = self._slots(pairs)
        self._pairs[slots], self._ticks[slots] = pairs + 1, ticks
