"""Addresses of shared memory that all lanes have accessed before: loops come back to few of them."""

from __future__ import annotations

from kernelproof.emulator.state.arrays import Array

# Most addresses that are remembered, summed over lanes.
MAX_LANE_ADDRESSES = 1 << 20


class Located:
    """Valid accesses by all lanes: element index, byte offset, and the window addresses [low, high) of their bytes.
    Invariant: its arrays never change in place."""

    def __init__(self, lanes: int) -> None:
        self.most = MAX_LANE_ADDRESSES // lanes
        self.places: dict[tuple[int, int, int], tuple[Array, Array, Array, tuple[int, int]]] = {}

    def find(self, address: Array, width: int, site: int) -> tuple[Array, Array, tuple[int, int]] | None:
        """What an instruction found when it accessed these addresses before."""
        place = self.places.get((int(address[0]), width, site))
        if place is None or not (place[0] == address).all():
            return None
        return place[1:]

    def remember(
        self, address: Array, width: int, site: int, at: Array, offset: Array, extent: tuple[int, int]
    ) -> None:
        """All lanes have accessed these addresses."""
        if len(self.places) >= self.most:
            self.places.clear()
        self.places[int(address[0]), width, site] = address, at, offset, extent
