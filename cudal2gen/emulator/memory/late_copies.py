"""Copies into shared memory that are under way and have left nothing there yet, and where accesses have left tags."""

from __future__ import annotations

from dataclasses import dataclass

from cudal2gen.emulator.state.arrays import Array

# More extents are not kept apart.
MOST = 64
# The stamp of what no barrier ends.
ENDLESS = 1 << 64


@dataclass(slots=True, eq=False)
class LateCopy:
    """A copy of lanes (None: all) to elements ``at`` of ``width`` bytes, all in the bytes [low, high) of their CTAs'
    shared memory: what it overwrites still stands there, until it lands or somebody looks."""

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
        """The copies that touch bytes [low, high), oldest first: they are to leave poison and tags now."""
        out = [copy for copy in self.copies if copy.low < high and low < copy.high]
        if out:
            self.copies = [copy for copy in self.copies if copy not in out]
        return out

    def land(self, copy: LateCopy) -> None:
        """A copy lands: there is nothing to leave any more."""
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
        if len(self.items) > MOST:
            lows, highs, stamps = zip(*self.items, strict=True)
            self.items = [(min(lows), max(highs), max(stamps))]

    def forget(self, fresh: int) -> None:
        """Tags below ``fresh`` matter to nobody any more."""
        self.items = [item for item in self.items if item[2] >= fresh]

    def meet(self, low: int, high: int) -> bool:
        """May such a tag stand in [low, high)?"""
        return any(first < high and low < end for first, end, _ in self.items)


def undefined(tags: Array, in_flight: int, unwritten: int, reading: bool) -> list[tuple[str, str, Array, bool]]:
    """Accesses to what nobody has written (reads only) or is still under way: (kind, text, which, doubtful).
    ``in_flight``: the bit of tags of what is under way; ``unwritten``: the tag of what nobody has written."""
    flying = (tags >= in_flight) & (tags != unwritten)
    verb = "reads data" if reading else "overwrites the destination"
    text = f"{verb} of an asynchronous copy that has not been waited for"
    out = [("in-flight", text, flying, reading)]
    if reading:
        blank = tags == unwritten
        out.insert(0, ("uninitialised-shared", "reads shared memory that nobody has written", blank, True))
    return [finding for finding in out if finding[2].any()]
