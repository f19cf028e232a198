"""Copies into shared memory under way whose poison and tags are deferred, and the extents that hold tags."""

from __future__ import annotations

from dataclasses import dataclass

from kernelproof.emulator.state.arrays import Array

# Most extents that are kept apart; beyond them all become one.
MAX_EXTENTS = 64
# The stamp of tags that no barrier ends.
ENDLESS = 1 << 64


@dataclass(slots=True, eq=False)
class LateCopy:
    """A copy of lanes (None: all) to elements ``at`` of ``width`` bytes, all in the bytes [low, high) of their CTAs'
    shared memory. The bytes that it overwrites stay as they are until it lands or an access looks at them."""

    low: int
    high: int
    lanes: Array | None
    at: Array
    width: int


class LateCopies:
    """Invariant: whoever looks at bytes, or at their tags, has called ``take`` for them."""

    def __init__(self) -> None:
        self.copies: list[LateCopy] = []

    def take(self, low: int, high: int) -> list[LateCopy]:
        """Removes the copies that touch bytes [low, high), oldest first; the caller leaves their poison and tags."""
        out = [copy for copy in self.copies if copy.low < high and low < copy.high]
        if out:
            self.copies = [copy for copy in self.copies if copy not in out]
        return out

    def land(self, copy: LateCopy) -> None:
        """A copy lands, so it leaves no poison."""
        if copy in self.copies:
            self.copies.remove(copy)


class Extents:
    """Bytes of shared memory in which tags stand that barriers have not ended: (low, high, stamp)."""

    def __init__(self) -> None:
        self.items: list[tuple[int, int, int]] = []

    def add(self, low: int, high: int, stamp: int) -> None:
        """Tags of this stamp stand in [low, high)."""
        item = low, high, stamp
        if self.items and self.items[-1] == item:
            return
        self.items.append(item)
        if len(self.items) > MAX_EXTENTS:
            lows, highs, stamps = zip(*self.items, strict=True)
            self.items = [(min(lows), max(highs), max(stamps))]

    def forget(self, fresh: int) -> None:
        """Drops tags below ``fresh``: they are ordered before every access to come."""
        self.items = [item for item in self.items if item[2] >= fresh]

    def meet(self, low: int, high: int) -> bool:
        """May such a tag stand in [low, high)?"""
        return any(first < high and low < end for first, end, _ in self.items)


def undefined(tags: Array, in_flight: int, unwritten: int, reading: bool) -> list[tuple[str, str, Array, bool]]:
    """Faults of accesses to unwritten bytes (reads only) or to bytes of a copy under way: (kind, text, mask, doubtful).
    ``in_flight``: the bit that tags of such a copy have; ``unwritten``: the tag of unwritten bytes."""
    flying = (tags >= in_flight) & (tags != unwritten)
    verb = "reads data" if reading else "overwrites the destination"
    text = f"{verb} of an asynchronous copy that has not been waited for"
    out = [("in-flight", text, flying, reading)]
    if reading:
        blank = tags == unwritten
        out.insert(0, ("uninitialised-shared", "reads shared memory that nobody has written", blank, True))
    return [finding for finding in out if finding[2].any()]
