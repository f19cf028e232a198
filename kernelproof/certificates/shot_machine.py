"""Symbolically executes, for a certificate, one CTA that loads its whole k at once, until it adds or stores sums.

``single_shot`` describes clusters whose CTAs each compute one k slice of a tile. Sums go to shared memory that nothing
else uses, so senders need not wait until it is free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernelproof.certificates.cells import Kinds
from kernelproof.certificates.contract import Contract
from kernelproof.certificates.edges import EdgeMachine
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.pipelines import MBARRIER_BYTES
from kernelproof.certificates.polynomials import Lanes
from kernelproof.certificates.program import Program
from kernelproof.certificates.shared_memory import ELEMENT
from kernelproof.certificates.sum_peer import Sending, SumPeer
from kernelproof.certificates.waits import WaitingMachine
from kernelproof.emulator.state.arrays import Mask
from kernelproof.emulator.state.scopes import ORDERS


class ShotMachine(SumPeer, WaitingMachine, EdgeMachine):
    """The machine of the CTA with a ``rank`` among the ``ranks`` CTAs of its cluster. Methods raise NotCertified for
    instructions in a wrong order, or from other threads than they must.

    - ``granted``: the kernel that was launched before has ended.
    - ``used``: a mask over the elements of shared memory: those that the CTA has copied to or read.
    - ``mbarrier_address``: that of the mbarrier that counts the bytes of incoming sums. ``expected``: how many these
      are.
    - ``fenced``: no mbarrier was initialised since the last mbarrier-init fence. ``cluster_arrived``: the CTA has
      arrived at the cluster's barrier. ``met``: it has waited there.
    - ``sendings``: what it has sent. ``waited``: it has waited for the sums that come to it.
    """

    def __init__(self, program: Program, contract: Contract, kinds: Kinds, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        super().__init__(program, contract, kinds)
        self.granted = False
        self.used = np.zeros(self.memory.elements, bool)
        self.mbarrier_address: int | None = None
        self.expected: int | None = None
        self.fenced, self.cluster_arrived, self.met, self.waited = True, False, False, False
        self.sendings: list[Sending] = []

    def units(self) -> dict[str, dict[str, Callable[..., Any]]]:
        """The units of a CTA up to the place where it adds or stores sums. Nothing else is stored before."""
        mbarriers: dict[str, Callable[..., Any]] = {
            "init": self.initialise, "fence_init": self.fence_init, "try_wait": self.try_wait, "waited": self.waits,
            "arrive": self.arrive,
        }  # fmt: skip
        # Keys: the emulator's unit letters, see ``machine``. Methods that are missing here raise NotCertified.
        return {
            "G": {"grid_wait": self.grid_wait}, "Q": {}, "S": {},
            "H": {"load": self.load_matrices},
            "I": {"lanes": self.lanes_of, "constant": self.constant},
            "W": {"shfl": self.shuffle},
            "B": mbarriers,
            "D": {"arrive": self.announce, "wait": self.meet},
            "E": self.addresses,
            "F": {"store": self.send},
            "Y": {"converge": lambda *_: None},
        }  # fmt: skip

    def check_end(self) -> None:
        """Check what the CTA has done when it begins to add or store sums."""
        self.check_landed()
        if not self.granted:
            raise NotCertified("D is stored before the previous kernel is known to have ended")
        if self.ranks > 1 and not self.waited:
            raise NotCertified("a CTA stores to D before the sums of the cluster have come")

    # --- memory

    def grid_wait(self, m: Mask) -> None:
        """griddepcontrol.wait: the kernel that was launched before this one has ended."""
        self._together(m)
        self.granted = True

    def issue(self, target: Any, source: Any, size: int, count: Any, m: Mask, site: int, *_: int) -> None:
        if not self.granted:
            raise NotCertified("global memory is accessed before the previous kernel is known to have ended")
        super().issue(target, source, size, count, m, site)

    def shared_places(self, address: Any, size: int, lanes: Lanes, site: int) -> Lanes:
        places = super().shared_places(address, size, lanes, site)
        self.used[places] = True
        return places

    # --- the cluster

    def initialise(self, address: Any, count: Any, m: Mask, _site: int) -> None:
        """mbarrier.init of the only mbarrier, by one thread, before the cluster meets."""
        lanes = self.active(m)
        if (
            self.ranks == 1
            or lanes is None
            or len(lanes) != 1
            or self.mbarrier_address is not None
            or self.cluster_arrived
        ):
            raise NotCertified("an mbarrier is initialised that is not the one for sums, or after the CTA arrived")
        if self._one(count, lanes) != 1:
            raise NotCertified("the mbarrier of the sums does not expect one arrival")
        self.mbarrier_address = self._one(address, lanes)
        self.memory.places(np.array([self.mbarrier_address]), MBARRIER_BYTES)
        self.initialisers[self.mbarrier_address] = int(lanes[0])
        self.fenced = False

    def fence_init(self, m: Mask) -> None:
        """A fence after the initialisation of the mbarrier, by the thread that has initialised it."""
        lanes = self.active(m)
        if lanes is not None and set(self.initialisers.values()) <= set(lanes.tolist()):
            self.fenced = True

    def arrive(
        self, address: Any, count: int, expected: Any, m: Mask, _site: int, order: int, drops: bool
    ) -> None:  # fmt: skip
        """mbarrier.arrive.expect_tx: one thread says how many bytes of sums come to this CTA."""
        lanes = self.active(m)
        if lanes is None:
            return
        if expected is None or self.expected is not None or self.cluster_arrived:
            raise NotCertified("an arrival that does not say once, before the cluster meets, how many bytes come")
        _, self.expected = self.expected_bytes(address, count, expected, lanes, order, drops)

    def announce(self, m: Mask, _releases: bool, _site: int) -> None:
        """barrier.cluster.arrive. The fence before it publishes the mbarrier, so the arrival need not release."""
        self._together(m)
        if self.cluster_arrived or not self.fenced or self.expected is None:
            raise NotCertified("a CTA arrives at its cluster's barrier twice, or before its mbarrier is ready")
        self.cluster_arrived = True

    def meet(self, m: Mask, *_: int) -> None:
        """barrier.cluster.wait, which must come after the CTA's own arrival."""
        self._together(m)
        if not self.cluster_arrived or self.met:
            raise NotCertified("a wait for a cluster's barrier at which the CTA has not arrived")
        self.met = True

    def send(self, address: Any, value: Any, size: int, signal: Any, m: Mask, _site: int) -> None:
        """st.async of complete sums over the slice to CTAs of the cluster, by all threads."""
        self._together(m)
        tile = self.contract.tile
        if tile is None or not self.met or self.waited:
            raise NotCertified("a sum is sent before the cluster has met, or too late")
        self.sendings += self.sums_to_peers(address, value, size, signal, tile)

    def try_wait(self, address: Any, phase: Any, is_parity: bool, order: int, m: Mask, *_: int) -> None:
        """mbarrier.try_wait, by all threads, for the sums that come to this CTA."""
        self._together(m)
        if not is_parity or not order & ORDERS:
            raise NotCertified("a wait for a state, or one that does not acquire, is not covered")
        if not self.met or self.waited or self._one(address) != self.mbarrier_address or self._one(phase):
            raise NotCertified("a wait that is not the one for the sums of the cluster")
        self.polled = self.waited = True

    # --- shared memory

    @property
    def mbarrier_elements(self) -> Lanes:
        """The elements of shared memory that the mbarrier takes."""
        if self.mbarrier_address is None:
            return np.zeros(0, np.int64)
        first = (self.mbarrier_address - self.memory.start) // ELEMENT
        return np.arange(first, first + MBARRIER_BYTES // ELEMENT)
