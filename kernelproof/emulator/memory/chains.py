"""Keeps the vector clocks between CTAs: which releases of other CTAs' warps happen before a point in the program.

A release covers a **row**: for each thread of its CTA, the tick before which the thread's accesses happen before the
release. Rows of which each one covers the previous one form a **chain**; the releases of a warp mostly do. So a clock
needs only one number per chain: how many of its rows happen before. These numbers are stored in blocks, which clocks
share.
"""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.state.arrays import Array

# Chains per block.
BLOCK_SHIFT = 8
PER_BLOCK = 1 << BLOCK_SHIFT
# The most joined rows that are cached.
MAX_JOINED = 1024
# Stands for a warp's number in releases by a barrier of the CTA.
BARRIER = -1
# Number of a block -> for each chain of the block, how many of its rows are known. Neither changes in place.
Clock = dict[int, Array]
# Pairs: a chain, and how many of its rows are known.
KnownRows = tuple[tuple[int, int], ...]


def merged(a: Clock, b: Clock) -> Clock:
    """The union of two clocks. Clocks and blocks are shared where possible."""
    if not b or a is b:
        return a
    if not a:
        return b
    if len(a) < len(b):
        a, b = b, a
    out = a
    for block, numbers in b.items():
        own = a.get(block)
        if own is numbers:
            continue
        if own is not None:
            numbers = _maximum(own, numbers)
            if numbers is own:
                continue
            if numbers is b[block] and len(a) == 1:
                return b
        if out is a:
            out = dict(a)
        out[block] = numbers
    return out


def _maximum(a: Array, b: Array) -> Array:
    """The maximum of two blocks, element by element: one of the two arrays if possible, so that clocks share it."""
    maximum = np.maximum(a, b)
    content = maximum.tobytes()
    if content == a.tobytes():
        return a
    return b if content == b.tobytes() else maximum


class Chains:
    """The rows of all releases of a launch. ``threads``: how many a row has, a multiple of 32."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        # For each chain: its rows; and a cache, number of rows -> the largest tick of every warp in the last of them.
        self._rows: list[list[Array]] = []
        self._ticks_by_warp: list[dict[int, list[int]]] = []
        # CTA -> its chains. (CTA, warp) -> the chains that releases by that warp continue.
        self._chains_of_cta: dict[int, list[int]] = {}
        self._chains_of_warp: dict[tuple[int, int], list[int]] = {}
        # Caches of ``row`` and ``least`` for several chains: neighbouring accesses need the same ones.
        self._joined: dict[KnownRows, Array] = {}
        self._least: dict[KnownRows, Array] = {}

    def released(self, known: Clock, cta: int, warp: int, row: Array) -> Clock:
        """The clock of a release by a warp of a CTA, or by its BARRIER, that covers a row and what is ``known``."""
        chain = self._chain(cta, warp, row)
        rows = self._rows[chain]
        # If the warp has done nothing since its last release, the row is there already.
        if not rows or rows[-1].tobytes() != row.tobytes():
            rows.append(row)
        block, at = chain >> BLOCK_SHIFT, chain & (PER_BLOCK - 1)
        before = known.get(block)
        if before is None:
            numbers = np.zeros(PER_BLOCK, np.int32)
        elif before[at] >= len(rows):
            return known
        else:
            numbers = before.copy()
        numbers[at] = len(rows)
        return {**known, block: numbers}

    def _chain(self, cta: int, warp: int, row: Array) -> int:
        """The chain that a row continues or begins."""
        own = self._chains_of_warp.setdefault((cta, warp), [])
        for chain in reversed(own):
            if (self._rows[chain][-1] <= row).all():
                return chain
        chain = len(self._rows)
        self._rows.append([])
        self._ticks_by_warp.append({})
        self._chains_of_cta.setdefault(cta, []).append(chain)
        own.append(chain)
        return chain

    def known_rows(self, clock: Clock, cta: int) -> KnownRows:
        """The chains of a CTA of which a clock covers rows, with the number of these rows."""
        out: KnownRows = ()
        for chain in self._chains_of_cta.get(cta, ()):
            block = clock.get(chain >> BLOCK_SHIFT)
            number = 0 if block is None else int(block[chain & (PER_BLOCK - 1)])
            if number:
                out += ((chain, number),)
        return out

    def row(self, known_rows: KnownRows) -> Array:
        """Per thread of a CTA: the tick before which the known rows cover its accesses."""
        if len(known_rows) == 1:
            ((chain, number),) = known_rows
            return self._rows[chain][number - 1]
        row = self._joined.get(known_rows)
        if row is None:
            if len(self._joined) >= MAX_JOINED:
                self._joined.clear()
            row = np.maximum.reduce([self._rows[chain][number - 1] for chain, number in known_rows])
            self._joined[known_rows] = row
        return row

    def least(self, known_rows: KnownRows) -> Array:
        """Per warp of a CTA: the least of ``row`` over its threads."""
        out = self._least.get(known_rows)
        if out is None:
            if len(self._least) >= MAX_JOINED:
                self._least.clear()
            out = self._least[known_rows] = np.minimum.reduce(self.row(known_rows).reshape(-1, 32), axis=1)
        return out

    def covers(self, clock: Clock, cta: int, warp: int, tick: int) -> bool:
        """Does a clock cover the access of some thread of a warp at a tick?"""
        for chain in self._chains_of_cta.get(cta, ()):
            block = clock.get(chain >> BLOCK_SHIFT)
            number = 0 if block is None else int(block[chain & (PER_BLOCK - 1)])
            if not number:
                continue
            ticks = self._ticks_by_warp[chain].get(number)
            if ticks is None:
                ticks = self._rows[chain][number - 1].reshape(-1, 32).max(axis=1).tolist()
                self._ticks_by_warp[chain][number] = ticks
            if ticks[warp] > tick:
                return True
        return False
