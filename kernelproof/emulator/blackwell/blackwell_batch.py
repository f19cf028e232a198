"""Defines ``BlackwellBatch``: a batch of complete clusters, with the units of sm_90 and those that sm_100 adds."""

from __future__ import annotations

from kernelproof.emulator.blackwell.accesses import TensorAccesses
from kernelproof.emulator.blackwell.allocation import Allocation
from kernelproof.emulator.blackwell.cluster_launch import ClusterLaunches
from kernelproof.emulator.blackwell.pending import PendingLoads
from kernelproof.emulator.blackwell.products import TensorProducts
from kernelproof.emulator.blackwell.tensor_clocks import TensorClocks
from kernelproof.emulator.blackwell.tensor_memory import TensorMemory
from kernelproof.emulator.hopper.hopper_batch import HopperBatch
from kernelproof.emulator.memory.device_state import DeviceState
from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.launch_state import LaunchState


class BlackwellBatch(HopperBatch):
    """A batch of a kernel that uses tensor memory, its products, or cluster launch control."""

    def __init__(self, launch: LaunchState, device: DeviceState, ctas: Array) -> None:
        super().__init__(launch, device, ctas)
        clocks, shared = self.tensor_clocks, self.cluster_memory
        self.pending = PendingLoads(self)
        self.tensor_memory = TensorMemory(self, clocks)
        self.allocation = Allocation(self, self.scheduler, shared, self.tensor_memory)
        self.accesses = TensorAccesses(self, clocks, self.tensor_memory, self.allocation, self.pending)
        self.products = TensorProducts(
            self, clocks, self.peers, shared, self.mbarriers, self.tensor_memory, self.allocation
        )
        self.cluster_launches = ClusterLaunches(self, self.peers, shared, self.mbarriers)
        self.last_checks += [self.products.exited, self.allocation.exited]

    def make_clocks(self) -> TensorClocks:
        self.tensor_clocks = TensorClocks(self)
        return self.tensor_clocks
