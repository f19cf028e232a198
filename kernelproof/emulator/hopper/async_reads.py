"""Records the last asynchronous reads of shared memory, by matrix products and by bulk stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.state.arrays import Array, sparse_zeros


class Elements(NamedTuple):
    """Some elements of a CTA's shared memory, of 16 bytes unless another width is named. ``indices``: their numbers in
    the shared memory of the batch. All lie within bytes [low, high) of the CTA's."""

    indices: Array
    low: int
    high: int


class ProductPlaces(NamedTuple):
    """All operands of a matrix product: ``indices``, the indices of their 16-byte elements in the batch's shared
    memory, and ``tags``, the indices of their tags in ``AsyncReads.flat``. ``readers``: per reader its number, low and
    high of the bytes of its CTA that it reads, and whether the column in its tags is another one than its own."""

    indices: Array
    tags: Array
    readers: tuple[tuple[int, int, int, bool], ...]


@dataclass(slots=True)
class Extent:
    """The smallest range of bytes [low, high) of a CTA that contains all reads. ``mixed``: the tags of some reads have
    another column of the clocks than the reader's own."""

    low: int
    high: int
    mixed: bool = False

    def add(self, low: int, high: int, mixed: bool = False) -> None:
        """Extend the range to contain [low, high)."""
        self.low, self.high, self.mixed = min(self.low, low), max(self.high, high), self.mixed or mixed

    def overlaps(self, low: int, high: int) -> bool:
        """Has the range bytes in common with [low, high)?"""
        return self.low < high and low < self.high


class AsyncReads:
    """The last read of every 16-byte element by each asynchronous reader of its CTA.

    ``tags``, shape (readers, elements), has the tag of that read, 0 for none. Invariant: a reader has tags only in its
    extent, so a write outside of all extents needs no look at tags. Extents only grow.
    """

    def __init__(self, readers: int, elements: int) -> None:
        self.tags: Array = sparse_zeros((readers, elements), np.uint64)
        self.flat = self.tags.reshape(-1)
        self.extents: dict[int, Extent] = {}

    def add(self, reader: int, low: int, high: int, mixed: bool = False) -> None:
        """Extend a reader's extent to bytes [low, high) of a CTA; the caller writes the tags of the read."""
        extent = self.extents.get(reader)
        if extent is None:
            self.extents[reader] = Extent(low, high, mixed)
        else:
            extent.add(low, high, mixed)

    def readers(self, low: int, high: int) -> list[int]:
        """The readers that may have read bytes [low, high) of a CTA."""
        return sorted(reader for reader, extent in self.extents.items() if extent.overlaps(low, high))

    def is_mixed(self, reader: int) -> bool:
        """Do some tags of a reader have another column than its own?"""
        return self.extents[reader].mixed
