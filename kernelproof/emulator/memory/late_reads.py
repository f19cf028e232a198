"""Defers the tags of reads of shared memory: most become old at a barrier before any check needs them."""

from __future__ import annotations

from typing import NamedTuple

from kernelproof.emulator.state.arrays import Array

# The most reads that are deferred: each keeps its arrays, so this bounds memory.
MAX_READS = 64


class LateRead(NamedTuple):
    """A read of ``elements`` of ``width`` bytes (indices in the batch's shared memory) by lanes (None: all), within
    bytes [low, high) of shared memory.

    ``stamp``: the tick part of the tags. ``together``: whether whole warps read together.
    """

    low: int
    high: int
    width: int
    lanes: Array | None
    elements: Array
    stamp: int
    together: bool


class LateReads:
    """Reads whose tags have not been written.

    Invariants: a check calls ``take`` for its bytes before it reads the tags of their readers; stamps ascend. A check
    of some CTAs needs no reads from before their last barrier, even if others have not passed one.
    """

    def __init__(self) -> None:
        self.reads: list[LateRead] = []

    @property
    def is_full(self) -> bool:
        """Must tags be written before another read is added?"""
        return len(self.reads) >= MAX_READS

    def forget(self, fresh: int) -> None:
        """Drop reads older than ``fresh``: they happen before all later accesses."""
        if self.reads and self.reads[0].stamp < fresh:
            self.reads = [read for read in self.reads if read.stamp >= fresh]

    def take(self, low: int, high: int, fresh: int) -> list[LateRead]:
        """If one of the reads that are not older than ``fresh`` touches bytes [low, high), remove and return all reads,
        oldest first. The caller writes their tags in this order, since a later read replaces an earlier one's tag."""
        if not any(read.low < high and low < read.high and read.stamp >= fresh for read in self.reads):
            return []
        reads, self.reads = self.reads, []
        return reads
