"""Defines ``HopperBatch``: a batch of complete clusters, with the units for the instructions that sm_90 adds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernelproof.emulator.hopper.async_stores import AsyncStores
from kernelproof.emulator.hopper.bulk import Bulk
from kernelproof.emulator.hopper.cluster_barrier import ClusterBarriers
from kernelproof.emulator.hopper.cluster_clocks import ClusterClocks
from kernelproof.emulator.hopper.cluster_memory import ClusterMemory
from kernelproof.emulator.hopper.map_edits import MapEdits
from kernelproof.emulator.hopper.map_proxy import MapProxy
from kernelproof.emulator.hopper.mbarrier import MBarriers
from kernelproof.emulator.hopper.peers import Peers
from kernelproof.emulator.hopper.register_pool import RegisterPool
from kernelproof.emulator.hopper.warpgroup import Warpgroups
from kernelproof.emulator.machine.ampere_batch import AmpereBatch
from kernelproof.emulator.memory.device_state import DeviceState
from kernelproof.emulator.state.arrays import Array, distinct
from kernelproof.emulator.state.launch_state import LaunchState


class HopperBatch(AmpereBatch):
    """A batch of a kernel that uses clusters, mbarriers, bulk copies, wgmma or setmaxnreg. Other kernels for sm_90 run
    in an ``AmpereBatch``, which is faster."""

    def __init__(self, launch: LaunchState, device: DeviceState, ctas: Array) -> None:
        super().__init__(launch, device, ctas)
        clocks, shared = self.cluster_clocks, self.cluster_memory
        self.mbarriers = MBarriers(self, self.scheduler, clocks, self.peers, shared, self.copies)
        self.cluster_barriers = ClusterBarriers(self, self.scheduler, clocks, self.mbarriers)
        map_proxy = MapProxy(self, clocks, self.memory)
        self.bulk = Bulk(self, clocks, self.peers, shared, self.mbarriers, self.memory, map_proxy)
        self.async_stores = AsyncStores(self, self.peers, shared, self.mbarriers)
        self.map_edits = MapEdits(self, shared, self.memory, map_proxy)
        self.warpgroups = Warpgroups(self, clocks, shared)
        self.registers = RegisterPool(self)
        # Each is called with the row of a CTA whose last thread has exited, and reports what the CTA left unfinished.
        self.last_checks: list[Callable[[int], None]] = [
            unit.exited for unit in (self.peers, self.mbarriers, self.bulk, self.registers)
        ]
        self.scheduler.on_exit.append(self._after_exit)

    # The base class calls this from its constructor, before any unit exists that needs the clocks.
    def make_shared(self, nbytes: int, granule: int) -> None:
        self.clocks = self.cluster_clocks = self.make_clocks()
        self.peers = Peers(self, self.cluster_clocks)
        self.cluster_memory = ClusterMemory(self, self.cluster_clocks, self.peers, nbytes, granule)
        self.shared = self.cluster_memory

    def make_clocks(self) -> ClusterClocks:
        """Make the clocks. Subclasses have other units, which need other columns, so they override this."""
        return ClusterClocks(self)

    def _after_exit(self, exited: Array) -> None:
        """Complete the cluster barriers that waited only for lanes which have exited, and check the CTAs that have
        ended."""
        lanes = np.flatnonzero(exited)
        self.cluster_barriers.exited(lanes)
        if not self.launch.options.hazards:
            return
        for row in distinct(self.row_of[lanes]):
            if not self.alive[row * self.width : (row + 1) * self.width].any():
                for check in self.last_checks:
                    check(int(row))
