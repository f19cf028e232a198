"""The last asynchronous reads of shared memory, by matrix products and bulk stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.state.arrays import Array, sparse_zeros


class Elements(NamedTuple):
    """Elements of a CTA's shared memory: indices ``at`` in the batch's, all in the bytes [low, high) of the CTA."""

    at: Array
    low: int
    high: int


class ProductPlaces(NamedTuple):
    """All operands of a matrix product: indices ``at`` of their 16-byte elements in the batch's shared memory, and of
    these elements in ``AsyncReads.flat``; each reader, with the bytes [low, high) of its CTA that it reads, and whether
    it reads for another column than its own."""

    at: Array
    tags: Array
    readers: tuple[tuple[int, int, int, bool], ...]


@dataclass(slots=True)
class Extent:
    """What has been read lies in the bytes [low, high) of its CTAs; ``mixed``: for columns other than the reader's own,
    too."""

    low: int
    high: int
    mixed: bool = False

    def add(self, low: int, high: int, mixed: bool = False) -> None:
        """[low, high) is read."""
        self.low, self.high, self.mixed = min(self.low, low), max(self.high, high), self.mixed or mixed

    def meets(self, low: int, high: int) -> bool:
        """Has some of [low, high) been read?"""
        return self.low < high and low < self.high


class AsyncReads:
    """``tags`` (readers, elements of 16 bytes): the last read of every element by each asynchronous reader of its CTA,
    0 for none. Invariant: tags of a reader stand only in its extent."""

    def __init__(self, readers: int, elements: int) -> None:
        self.tags: Array = sparse_zeros((readers, elements), np.uint64)
        self.flat = self.tags.reshape(-1)
        self.extents: dict[int, Extent] = {}

    def add(self, reader: int, low: int, high: int, mixed: bool = False) -> None:
        """A reader reads some of the bytes [low, high) of a CTA; the caller leaves its tags."""
        extent = self.extents.get(reader)
        if extent is None:
            self.extents[reader] = Extent(low, high, mixed)
        else:
            extent.add(low, high, mixed)

    def readers(self, low: int, high: int) -> list[int]:
        """Who may have read bytes [low, high) of a CTA."""
        return sorted(reader for reader, extent in self.extents.items() if extent.meets(low, high))

    def is_mixed(self, reader: int) -> bool:
        """Has a reader read on behalf of columns other than its own?"""
        return self.extents[reader].mixed
