"""Copies into shared memory that are under way, and the extents of bytes that have tags.

A copy that is under way poisons its destination, so that an access that does not wait for it finds no data. Most copies
land before any access touches their destination, and then poison and tags need not be written at all. So this module
keeps such copies until an access touches their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelproof.emulator.state.arrays import Array

# The most extents that are kept apart. One more merges all into a single extent, which is imprecise but safe: checks
# then look at tags that they could have skipped.
MAX_EXTENTS = 64
# The stamp of tags that no barrier makes old.
ENDLESS = 1 << 64


@dataclass(slots=True, eq=False)
class LateCopy:
    """A copy of lanes (None: all) to elements ``at`` of ``width`` bytes, all within the bytes [low, high) of their
    CTAs' shared memory. The bytes stay as they are until the copy lands or an access looks at them."""

    low: int
    high: int
    lanes: Array | None
    at: Array
    width: int


class LateCopies:
    """Copies whose poison and tags have not been written.

    Invariant: before an access reads bytes or their tags, it has called ``take`` for those bytes.
    """

    def __init__(self) -> None:
        self.copies: list[LateCopy] = []

    def take(self, low: int, high: int) -> list[LateCopy]:
        """Remove and return the copies that touch bytes [low, high), oldest first; the caller writes poison and
        tags."""
        out = [copy for copy in self.copies if copy.low < high and low < copy.high]
        if out:
            self.copies = [copy for copy in self.copies if copy not in out]
        return out

    def land(self, copy: LateCopy) -> None:
        """A copy lands: it needs no poison any more."""
        if copy in self.copies:
            self.copies.remove(copy)


class Extents:
    """Extents of shared memory that may have tags which no barrier has made old: (low, high, stamp)."""

    def __init__(self) -> None:
        self.items: list[tuple[int, int, int]] = []

    def add(self, low: int, high: int, stamp: int) -> None:
        """Note that tags of this stamp stand in [low, high)."""
        item = low, high, stamp
        if self.items and self.items[-1] == item:
            return
        self.items.append(item)
        if len(self.items) > MAX_EXTENTS:
            lows, highs, stamps = zip(*self.items, strict=True)
            self.items = [(min(lows), max(highs), max(stamps))]

    def forget(self, fresh: int) -> None:
        """Drop extents whose tags are below ``fresh``: those happen before every access to come."""
        self.items = [item for item in self.items if item[2] >= fresh]

    def meet(self, low: int, high: int) -> bool:
        """May a tag that still matters stand in [low, high)?"""
        return any(first < high and low < end for first, end, _ in self.items)


def undefined(tags: Array, in_flight: int, unwritten: int, reading: bool) -> list[tuple[str, str, Array, bool]]:
    """Accesses to bytes that are unwritten (reads only) or in a copy under way: (kind, text, mask, doubtful) of each
    fault. ``in_flight``: the bit that tags of such a copy have. ``unwritten``: the tag of unwritten bytes."""
    flying = (tags >= in_flight) & (tags != unwritten)
    verb = "reads data" if reading else "overwrites the destination"
    text = f"{verb} of an asynchronous copy that has not been waited for"
    out = [("in-flight", text, flying, reading)]
    if reading:
        blank = tags == unwritten
        out.insert(0, ("uninitialised-shared", "reads shared memory that nobody has written", blank, True))
    return [finding for finding in out if finding[2].any()]
