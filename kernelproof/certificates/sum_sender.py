"""Executes a role of a CTA in a cluster whose CTAs send each other their sums, as ``cluster_sums`` says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kernelproof.certificates.cluster_machine import ClusterMachine
from kernelproof.certificates.cluster_sums import Waited
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.pipelines import FIRST_STAGE, FIRST_WARP
from kernelproof.certificates.role_state import CONSUMER, SETUP
from kernelproof.certificates.sum_peer import SumPeer
from kernelproof.emulator.state.arrays import Mask


class SumSender(SumPeer, ClusterMachine):
    """The machine of a role that may send sums to other CTAs. Methods raise NotCertified for a wrong order."""

    def units(self) -> dict[str, dict[str, Callable[..., Any]]]:
        """The units of a role in a cluster, and stores to other CTAs."""
        return super().units() | {"F": {"store": self.send}}

    def initialise(self, address: Any, count: Any, m: Mask, site: int) -> None:
        super().initialise(address, count, m, site)
        lanes = self.active(m)
        assert lanes is not None
        self.initialisers[self._one(address, lanes)] = int(lanes[0])

    def arrive(
        self, address: Any, count: int, expected: Any, m: Mask, site: int, order: int, drops: bool
    ) -> None:  # fmt: skip
        """An arrival at an mbarrier. One that expects bytes before the items is that for the sums of other CTAs."""
        lanes = self.active(m)
        if self.role != SETUP or not self.pipeline.adds or expected is None or lanes is None:
            super().arrive(address, count, expected, m, site, order, drops)
            return
        at, total = self.expected_bytes(address, count, expected, lanes, order, drops)
        if self.track.announced:
            raise NotCertified("bytes of sums are expected too late")
        self.protocol.mbarrier(self.protocol.sums.arrived, 0, at, "the sums")
        self.protocol.sums.expect(total)

    def arrive_elsewhere(self, at: int, arrivals: frozenset[tuple[int, int]]) -> None:
        """mbarrier.arrive by warps that have read their last stage, at ``freed`` of CTAs."""
        track = self.track
        if not self.pipeline.adds:
            super().arrive_elsewhere(at, arrivals)
            return
        if not track.step.equals(self.tiles) or track.held or track.reading or track.opened:
            raise NotCertified("a warp says that a ring is free before it has read all of its own")
        for rank in {rank for _, rank in arrivals}:
            if rank not in range(self.pipeline.ranks):
                raise NotCertified(f"an arrival at CTA {rank} of a cluster of {self.pipeline.ranks}")
            peer = self.protocol.cluster[rank]
            peer.mbarrier(peer.sums.freed, 0, at, "rings that are free")
        track.sums = track.sums.arrive(arrivals)

    def wait_elsewhere(self, at: int) -> int:
        """The parity of a wait for free rings, or for the sums that come."""
        track, sums = self.track, self.protocol.sums
        if not self.pipeline.adds or not track.step.equals(self.tiles):
            return super().wait_elsewhere(at)
        if track.sums.waited == Waited.NOTHING:
            self.protocol.mbarrier(sums.freed, 0, at, "rings that are free")
            if len(track.sums.freed) != len(self.warps) * self.pipeline.ranks:
                raise NotCertified("a warp waits for rings before it has said to all CTAs that its own is free")
            track.sums = replace(track.sums, waited=Waited.FREED)
        elif track.sums.waited == Waited.FREED:
            self.protocol.mbarrier(sums.arrived, 0, at, "the sums")
            self._note_sent()
            track.sums = replace(track.sums, waited=Waited.ARRIVED)
        else:
            raise NotCertified("a second wait for the sums of the cluster")
        return 0

    def _note_sent(self) -> None:
        """Note the sums that have been sent at the CTAs that get them. That all have come, their adders show."""
        protocol = self.protocol
        if protocol.sums.sent:
            raise NotCertified("a CTA sends its sums in several ways")
        protocol.sums.sent = True
        for each in self.track.sums.sent:
            protocol.cluster[each.rank].sums.receive(self.pipeline.rank, each)

    def finish_item(self) -> None:
        """Check that a group has sent its sums, and has waited for those that it adds before it stores to D."""
        if not self.pipeline.adds:
            super().finish_item()
        elif self.track.sums.waited != Waited.ARRIVED or self.written or not self.track.granted:
            raise NotCertified("a group stores to D before the sums of the cluster have come")

    def send(self, address: Any, value: Any, size: int, signal: Any, m: Mask, _site: int) -> None:
        """st.async of complete sums over the slice into the rings of CTAs, by all threads of the group."""
        self._together(m)
        tile = self.contract.tile
        if self.role != CONSUMER or not self.pipeline.adds or tile is None:
            raise NotCertified("a store to another CTA that is not a consumer's of partial sums")
        for sent, signal_at, elements in self.sums_to_peers(address, value, size, signal, tile):
            peer = self.protocol.cluster[sent.rank]
            peer.mbarrier(peer.sums.arrived, 0, signal_at, "the sums")
            owners = peer.owner[elements]
            if ((owners < FIRST_STAGE) | (owners >= FIRST_WARP)).any():
                raise NotCertified("a sum is sent to shared memory that is not of the ring")
            self.track.sums = self.track.sums.send(sent)
