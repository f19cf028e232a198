"""Executes a role of a CTA in a cluster. It may address other CTAs' memory and arrive at the cluster's barrier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.part_machine import PartMachine
from kernelproof.certificates.role_state import SETUP
from kernelproof.emulator.state.arrays import Mask


class ClusterMachine(PartMachine):
    """The machine of a role whose CTA may belong to a cluster. Methods raise NotCertified for an instruction that no
    proof covers."""

    def units(self) -> dict[str, dict[str, Callable[..., Any]]]:
        """The units of every role, and those for clusters."""
        barrier: dict[str, Callable[..., Any]] = {"arrive": self.announce, "wait": self.await_cluster}
        return super().units() | {"E": self.addresses, "D": barrier}

    def announce(self, m: Mask, _releases: bool, _site: int) -> None:
        """barrier.cluster.arrive. The fence before it publishes the mbarriers, so the arrival need not release."""
        self._together(m)
        if self.role != SETUP or not self.track.fenced or self.track.announced:
            raise NotCertified("a CTA arrives at its cluster's barrier twice, or without a fence after its mbarriers")
        self.track.announced = True

    def await_cluster(self, m: Mask, *_: int) -> None:
        """barrier.cluster.wait, which must come after the CTA's own arrival."""
        self._together(m)
        if self.role != SETUP or not self.track.announced or not self.track.fenced:
            raise NotCertified("a wait for a cluster's barrier at which the CTA has not arrived")
        self.track.gathered = True
