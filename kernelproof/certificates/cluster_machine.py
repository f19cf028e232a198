"""A role of a CTA in a cluster: it addresses other CTAs' shared memory, and arrives at the cluster's barrier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.part_machine import PartMachine
from kernelproof.certificates.polynomials import Lanes
from kernelproof.certificates.role_state import SETUP
from kernelproof.emulator.hopper.peers import MAX_RANK, RANK_SHIFT, WITHIN
from kernelproof.emulator.state.arrays import Mask


class ClusterMachine(PartMachine):
    """The machine of a role whose CTA may belong to a cluster. ``emulator.hopper.peers`` describes the two forms of
    addresses: the program's, and the one that units take."""

    def units(self) -> dict[str, dict[str, Callable[..., Any]]]:
        """The units of every role, and those for clusters."""
        peers: dict[str, Callable[..., Any]] = {
            "variable": self.variable, "mapa": self.map_address, "of_cta": self.of_cta, "of_cluster": self.of_cluster,
        }  # fmt: skip
        barrier: dict[str, Callable[..., Any]] = {"arrive": self.announce, "wait": self.await_cluster}
        return super().units() | {"E": peers, "D": barrier}

    def lanes_of(self, name: str) -> Any:
        if name == "%cluster_ctarank":
            return np.full(self.lanes, self.pipeline.rank, "u4")
        return super().lanes_of(name)

    @property
    def _own(self) -> int:
        """The own CTA's rank, where an address of the program has it."""
        return self.pipeline.rank << RANK_SHIFT

    def variable(self, offset: int, width: int) -> Lanes:
        """The program's address of a variable of the own CTA, for each lane."""
        return np.full(self.lanes, self._own + offset, f"u{width}")

    def map_address(self, address: Any, rank: Any) -> Lanes:
        """mapa: the same place in another CTA. Its rank is checked where the address is used."""
        at, ranks = (self._number(each).astype(np.int64) for each in (address, rank))
        return np.broadcast_to(at & WITHIN | (ranks & MAX_RANK) << RANK_SHIFT, (self.lanes,)).astype("u4")

    def of_cta(self, address: Any, m: Mask, _site: int) -> Lanes:
        """Convert an address to the form that units take. It must lie in the own CTA."""
        near = self._near(address)
        lanes = self.active(m)
        if lanes is not None and (near[lanes] > WITHIN).any():
            raise NotCertified("an instruction on the own CTA's shared memory has an address of another CTA's")
        return near & WITHIN

    def of_cluster(self, address: Any) -> Lanes:
        """Convert an address in any CTA to the form that units take."""
        near = self._near(address)
        return np.where(near > WITHIN, (near ^ self._own) + (1 << RANK_SHIFT), near)

    def _near(self, address: Any) -> Lanes:
        """An address xor the own rank's bits: at most WITHIN exactly if the address lies in the own CTA."""
        number = np.broadcast_to(self._number(address), (self.lanes,)).astype(np.int64) & 0xFFFFFFFF
        return number ^ self._own

    def announce(self, m: Mask, _releases: bool, _site: int) -> None:
        """barrier.cluster.arrive. The fence before it publishes the mbarriers, so the arrival need not release."""
        self._together(m)
        if self.role != SETUP or not self.track.fenced or self.track.announced:
            raise NotCertified("a CTA arrives at its cluster's barrier twice, or without a fence behind its mbarriers")
        self.track.announced = True

    def await_cluster(self, m: Mask, *_: int) -> None:
        """barrier.cluster.wait, which must come after the CTA's own arrival."""
        self._together(m)
        if self.role != SETUP or not self.track.announced or not self.track.fenced:
            raise NotCertified("a wait for a cluster's barrier at which the CTA has not arrived")
