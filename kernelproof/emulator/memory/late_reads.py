"""Reads of shared memory whose tags are deferred: a barrier ends most of them before another write there."""

from __future__ import annotations

from typing import NamedTuple

from kernelproof.emulator.state.arrays import Array

# Most reads that are held back, which bounds memory.
MAX_READS = 64


class LateRead(NamedTuple):
    """A read of elements of ``width`` bytes, all in the bytes [low, high) of their CTAs' shared memory. ``stamp``: the
    tags without their actors; ``tags`` and ``columns``: per element, the reader's tag and column."""

    low: int
    high: int
    width: int
    at: Array
    stamp: int
    tags: Array
    columns: Array


class LateReads:
    """Invariant: whoever looks at the tags of readers in some bytes has called ``take`` for them."""

    def __init__(self) -> None:
        self.reads: list[LateRead] = []

    @property
    def is_full(self) -> bool:
        """Must the reads leave their tags before another is added?"""
        return len(self.reads) >= MAX_READS

    def forget(self, fresh: int) -> None:
        """Drops reads older than ``fresh``: they are ordered before every access to come."""
        if self.reads and self.reads[0].stamp < fresh:
            self.reads = [read for read in self.reads if read.stamp >= fresh]

    def take(self, low: int, high: int) -> list[LateRead]:
        """Removes all reads, oldest first, if one of them touches bytes [low, high); the caller leaves their tags."""
        if not any(read.low < high and low < read.high for read in self.reads):
            return []
        reads, self.reads = self.reads, []
        return reads
