"""Reads of shared memory whose tags have not been written: most become old at a barrier before a check needs them."""

from __future__ import annotations

from typing import NamedTuple

from kernelproof.emulator.state.arrays import Array

# The most reads that are held back: each keeps its arrays, so this bounds memory.
MAX_READS = 64


class LateRead(NamedTuple):
    """A read of elements of ``width`` bytes, all within the bytes [low, high) of their CTAs' shared memory. ``stamp``:
    the tick part of the tags. ``tags`` and ``columns``: per element, the reader's tag and its column."""

    low: int
    high: int
    width: int
    at: Array
    stamp: int
    tags: Array
    columns: Array


class LateReads:
    """Reads whose tags have not been written.

    Invariants: before a check reads the readers' tags of some bytes, it has called ``take`` for those bytes; stamps
    ascend.
    """

    def __init__(self) -> None:
        self.reads: list[LateRead] = []

    @property
    def is_full(self) -> bool:
        """Must the reads write their tags before another read is added?"""
        return len(self.reads) >= MAX_READS

    def forget(self, fresh: int) -> None:
        """Drop reads older than ``fresh``: they happen before every access to come."""
        if self.reads and self.reads[0].stamp < fresh:
            self.reads = [read for read in self.reads if read.stamp >= fresh]

    def take(self, low: int, high: int) -> list[LateRead]:
        """If one of the reads touches bytes [low, high), remove and return all of them, oldest first; the caller writes
        their tags. The order matters: a later read replaces an earlier one's tag."""
        if not any(read.low < high and low < read.high for read in self.reads):
            return []
        reads, self.reads = self.reads, []
        return reads
