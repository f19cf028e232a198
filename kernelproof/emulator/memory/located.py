"""Caches the places of accesses to shared memory, since a loop mostly accesses the same addresses in each iteration."""

from __future__ import annotations

from kernelproof.emulator.state.arrays import Array

# The most addresses that a cache holds, summed over lanes: at most 8 MiB each for addresses, elements and offsets.
MAX_LANE_ADDRESSES = 1 << 20


class LocatedAccesses:
    """The places of valid accesses by all lanes: element index, byte offset, and the addresses [low, high) of their
    bytes in the shared window.

    Invariant: the arrays kept here never change in place. An entry is looked up by the address of the first lane, the
    width in bytes and the instruction (``site``), and is used only if the addresses of all lanes are the same.
    """

    def __init__(self, lanes: int) -> None:
        self.max_entries = MAX_LANE_ADDRESSES // lanes
        self.places: dict[tuple[int, int, int], tuple[Array, Array, Array, tuple[int, int]]] = {}

    def find(self, address: Array, width: int, site: int) -> tuple[Array, Array, tuple[int, int]] | None:
        """The place of these addresses (elements, offsets, extent); None if it is not in the cache."""
        place = self.places.get((int(address[0]), width, site))
        if place is None or not (place[0] == address).all():
            return None
        return place[1:]

    def remember(
        self, address: Array, width: int, site: int, elements: Array, offset: Array, extent: tuple[int, int]
    ) -> None:
        """Add the place of a valid access by all lanes: the ``elements`` (indices), the byte offsets, and the extent
        [low, high) of the addresses. A full cache is emptied first."""
        if len(self.places) >= self.max_entries:
            self.places.clear()
        self.places[int(address[0]), width, site] = address, elements, offset, extent
