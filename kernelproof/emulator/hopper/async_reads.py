"""The last asynchronous reads of shared memory, by matrix products and by bulk stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.state.arrays import Array, sparse_zeros


class Elements(NamedTuple):
    """16-byte elements of a CTA's shared memory: their indices ``at`` in the batch's, all within the CTA's bytes [low,
    high)."""

    at: Array
    low: int
    high: int


class ProductPlaces(NamedTuple):
    """All operands of a matrix product: ``at``, the indices of their 16-byte elements in the batch's shared memory, and
    ``tags``, the indices of those elements in ``AsyncReads.flat``. ``readers``: each reader, the bytes [low, high) of
    its CTA that it reads, and whether it reads for another column than its own."""

    at: Array
    tags: Array
    readers: tuple[tuple[int, int, int, bool], ...]


@dataclass(slots=True)
class Extent:
    """The smallest range of bytes [low, high) of a CTA that contains all reads. ``mixed``: some reads were for columns
    other than the reader's own."""

    low: int
    high: int
    mixed: bool = False

    def add(self, low: int, high: int, mixed: bool = False) -> None:
        """Note that [low, high) is read."""
        self.low, self.high, self.mixed = min(self.low, low), max(self.high, high), self.mixed or mixed

    def meets(self, low: int, high: int) -> bool:
        """Has some of [low, high) been read?"""
        return self.low < high and low < self.high


class AsyncReads:
    """The last read of every 16-byte element by each asynchronous reader of its CTA: a tag, 0 for none. ``tags`` has
    shape (readers, elements). Invariant: a reader has tags only in its extent, so a write outside of all extents needs
    no look at tags. Extents only grow."""

    def __init__(self, readers: int, elements: int) -> None:
        self.tags: Array = sparse_zeros((readers, elements), np.uint64)
        self.flat = self.tags.reshape(-1)
        self.extents: dict[int, Extent] = {}

    def add(self, reader: int, low: int, high: int, mixed: bool = False) -> None:
        """Note that a reader reads some of the bytes [low, high) of a CTA; the caller writes its tags."""
        extent = self.extents.get(reader)
        if extent is None:
            self.extents[reader] = Extent(low, high, mixed)
        else:
            extent.add(low, high, mixed)

    def readers(self, low: int, high: int) -> list[int]:
        """The readers that may have read bytes [low, high) of a CTA."""
        return sorted(reader for reader, extent in self.extents.items() if extent.meets(low, high))

    def is_mixed(self, reader: int) -> bool:
        """Has a reader read for other columns than its own?"""
        return self.extents[reader].mixed
