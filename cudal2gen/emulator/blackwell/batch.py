"""A batch of whole clusters: the machine with the units of sm_100."""

from __future__ import annotations

from cudal2gen.emulator.blackwell.accesses import TensorAccesses
from cudal2gen.emulator.blackwell.allocation import Allocation
from cudal2gen.emulator.blackwell.clocks import TensorClocks
from cudal2gen.emulator.blackwell.cluster_launch import ClusterLaunches
from cudal2gen.emulator.blackwell.pending import PendingLoads
from cudal2gen.emulator.blackwell.products import TensorProducts
from cudal2gen.emulator.blackwell.tensor_memory import TensorMemory
from cudal2gen.emulator.hopper.batch import HopperBatch
from cudal2gen.emulator.memory.device_state import DeviceState
from cudal2gen.emulator.state.arrays import Array
from cudal2gen.emulator.state.launch import LaunchState


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
