"""Tracks copies to shared memory that are under way, and the extents of recent tags.

The destination of a copy under way is poison, so that an access that does not wait for the copy finds no data. Most
copies land before any access touches their destination. Then poison and tags need not be written at all, so this module
keeps copies until an access touches their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelproof.emulator.state.arrays import Array

# The most extents that are kept. If there is one more, all are merged to a single one. That is imprecise but safe:
# checks then look at tags that they could have skipped.
MAX_EXTENTS = 64
# The stamp of tags that do not become old at any barrier.
NEVER_OLD = 1 << 64


@dataclass(slots=True, eq=False)
class LateCopy:
    """A copy of lanes (None: all) to ``elements`` of ``width`` bytes (indices in the batch's shared memory), all within
    the bytes [low, high) of their CTAs' shared memory. The bytes do not change until the copy lands or an access
    touches them."""

    low: int
    high: int
    lanes: Array | None
    elements: Array
    width: int


class LateCopies:
    """Copies whose poison and tags have not been written.

    Invariant: an access calls ``take`` for its bytes before it reads them or their tags.
    """

    def __init__(self) -> None:
        self.copies: list[LateCopy] = []

    def take(self, low: int, high: int) -> list[LateCopy]:
        """Remove and return the copies to any of the bytes [low, high), oldest first. The caller writes poison and
        tags."""
        out = [copy for copy in self.copies if copy.low < high and low < copy.high]
        if out:
            self.copies = [copy for copy in self.copies if copy not in out]
        return out

    def land(self, copy: LateCopy) -> None:
        """Remove a copy that lands, which needs no poison any more."""
        if copy in self.copies:
            self.copies.remove(copy)


class Extents:
    """Extents (low, high, stamp) of shared memory with recent tags: those that no barrier orders before all later
    accesses."""

    def __init__(self) -> None:
        self.items: list[tuple[int, int, int]] = []

    def add(self, low: int, high: int, stamp: int) -> None:
        """Note that bytes [low, high) have tags with this stamp."""
        item = low, high, stamp
        if self.items and self.items[-1] == item:
            return
        self.items.append(item)
        if len(self.items) > MAX_EXTENTS:
            lows, highs, stamps = zip(*self.items, strict=True)
            self.items = [(min(lows), max(highs), max(stamps))]

    def forget(self, fresh: int) -> None:
        """Drop extents whose tags are below ``fresh``: these happen before all later accesses."""
        self.items = [item for item in self.items if item[2] >= fresh]

    def overlap(self, low: int, high: int, fresh: int) -> bool:
        """May bytes [low, high) have tags from ``fresh`` on?"""
        return any(first < high and low < end and stamp >= fresh for first, end, stamp in self.items)


def faults_of_undefined(
    tags: Array, in_flight: int, unwritten: int, reading: bool
) -> list[tuple[str, str, Array, bool]]:
    """The faults of an access to unwritten bytes (reads only), or to the destination of a copy under way: (kind, text,
    mask of the tags, doubtful) of each. ``tags``: those of the last writes. ``in_flight``: the bit that the tags of a
    copy under way have. ``unwritten``: the tag of unwritten bytes."""
    in_flight_tags = (tags >= in_flight) & (tags != unwritten)
    verb = "reads data" if reading else "overwrites the destination"
    text = f"{verb} of an asynchronous copy that has not been waited for"
    out = [("in-flight", text, in_flight_tags, reading)]
    if reading:
        is_unwritten = tags == unwritten
        out.insert(0, ("uninitialised-shared", "reads shared memory that nobody has written", is_unwritten, True))
    return [finding for finding in out if finding[2].any()]
