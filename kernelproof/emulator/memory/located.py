"""Addresses of shared memory that all lanes have accessed before: a loop uses the same few in every turn."""

from __future__ import annotations

from kernelproof.emulator.state.arrays import Array

# Addresses that are remembered at most, summed over lanes.
MAX_LANE_ADDRESSES = 1 << 20


class Located:
    """Valid accesses by all lanes: element index, byte offset, and the window addresses [low, high) of their bytes.

    Invariant: the arrays kept here never change in place. An entry is found by its first address, and compared whole.
    """

    def __init__(self, lanes: int) -> None:
        self.most = MAX_LANE_ADDRESSES // lanes
        self.places: dict[tuple[int, int, int], tuple[Array, Array, Array, tuple[int, int]]] = {}

    def find(self, address: Array, width: int, site: int) -> tuple[Array, Array, tuple[int, int]] | None:
        """What was found when the instruction accessed these addresses before; None if it has not."""
        place = self.places.get((int(address[0]), width, site))
        if place is None or not (place[0] == address).all():
            return None
        return place[1:]

    def remember(
        self, address: Array, width: int, site: int, at: Array, offset: Array, extent: tuple[int, int]
    ) -> None:
        """Remember a valid access by all lanes."""
        if len(self.places) >= self.most:
            self.places.clear()
        self.places[int(address[0]), width, site] = address, at, offset, extent
