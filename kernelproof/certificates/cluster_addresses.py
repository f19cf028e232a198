"""Converts addresses of shared memory in a cluster between the program's form and the one that units take.

``emulator.hopper.peers`` describes the two forms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.machine import Machine
from kernelproof.certificates.polynomials import Lanes
from kernelproof.emulator.hopper.peers import MAX_RANK, RANK_SHIFT, WITHIN
from kernelproof.emulator.state.arrays import Mask


class ClusterAddresses(Machine):
    """A machine of a CTA that may belong to a cluster. ``rank``: the CTA's; ``ranks``: how many CTAs there are."""

    rank: int
    ranks: int

    @property
    def addresses(self) -> dict[str, Callable[..., Any]]:
        """The methods of the unit that converts addresses."""
        return {
            "variable": self.variable, "mapa": self.map_address, "of_cta": self.of_cta, "of_cluster": self.of_cluster,
        }  # fmt: skip

    def lanes_of(self, name: str) -> Any:
        if name == "%cluster_ctarank":
            return np.full(self.lanes, self.rank, "u4")
        return super().lanes_of(name)

    @property
    def _rank_bits(self) -> int:
        """The own CTA's rank, shifted to the bits in which an address of the program has it."""
        return self.rank << RANK_SHIFT

    def variable(self, offset: int, width: int) -> Lanes:
        """The program's address of a variable of the own CTA, for each lane."""
        return np.full(self.lanes, self._rank_bits + offset, f"u{width}")

    def map_address(self, address: Any, rank: Any) -> Lanes:
        """mapa: the same place in another CTA. Its rank is checked where the address is used."""
        at, ranks = (self._number(each).astype(np.int64) for each in (address, rank))
        return np.broadcast_to(at & WITHIN | (ranks & MAX_RANK) << RANK_SHIFT, (self.lanes,)).astype("u4")

    def of_cta(self, address: Any, m: Mask, _site: int) -> Lanes:
        """Convert an address to the form that units take. Raises NotCertified if it does not lie in the own CTA."""
        near = self._near(address)
        lanes = self.active(m)
        if lanes is not None and (near[lanes] > WITHIN).any():
            raise NotCertified("an instruction on the own CTA's shared memory has an address of another CTA's")
        return near & WITHIN

    def of_cluster(self, address: Any) -> Lanes:
        """Convert an address in any CTA to the form that units take."""
        near = self._near(address)
        return np.where(near > WITHIN, (near ^ self._rank_bits) + (1 << RANK_SHIFT), near)

    def _near(self, address: Any) -> Lanes:
        """An address xor the own rank's bits: at most WITHIN exactly if the address lies in the own CTA."""
        number = np.broadcast_to(self._number(address), (self.lanes,)).astype(np.int64) & 0xFFFFFFFF
        return number ^ self._rank_bits

    def cluster_places(self, address: Any, lanes: Lanes) -> tuple[Lanes, Lanes]:
        """The ranks of the CTAs in which lanes' addresses of shared memory lie, and the addresses there."""
        place = np.broadcast_to(self._number(address), (self.lanes,))[lanes].astype(np.int64)
        # An address in another CTA has that CTA's rank, plus 1, above the place in shared memory.
        ranks = np.where(place > WITHIN, (place >> RANK_SHIFT) - 1, self.rank)
        return ranks, place & WITHIN

    def peers(self, address: Any) -> tuple[Lanes, Lanes]:
        """Like ``cluster_places``, for all lanes. Raises NotCertified if an address lies outside of the cluster."""
        ranks, places = self.cluster_places(address, self.all_lanes)
        if (ranks >= self.ranks).any():
            raise NotCertified(f"an address in CTA {int(ranks.max())} of a cluster of {self.ranks}")
        return ranks, places

    def _one(self, value: Any, lanes: Lanes | None = None) -> int:
        """A number that must be known, and the same in these lanes (by default in all)."""
        number = np.broadcast_to(self._number(value), (self.lanes,))
        number = number if lanes is None else number[lanes]
        if (number != number[0]).any():
            raise NotCertified("lanes use different mbarriers or phases at once")
        return int(number[0])
