"""Builds a batch of CTAs with the units of sm_80. Batches of newer architectures extend it."""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.machine.barriers import Barriers, Meetings
from kernelproof.emulator.machine.collectives import Warps
from kernelproof.emulator.machine.matrices import MatrixInstructions
from kernelproof.emulator.machine.matrix_memory import MatrixMemory
from kernelproof.emulator.machine.output import Output
from kernelproof.emulator.machine.scheduler import Scheduler
from kernelproof.emulator.machine.special_registers import SpecialRegisters
from kernelproof.emulator.memory.atomics import Atomics
from kernelproof.emulator.memory.copies import AsyncCopies
from kernelproof.emulator.memory.device import DeviceMemory
from kernelproof.emulator.memory.device_state import DeviceState
from kernelproof.emulator.memory.local import GenericMemory, LocalMemory, ParameterBlock
from kernelproof.emulator.memory.shared import SharedMemory
from kernelproof.emulator.state.arrays import Array, Mask
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.launch_state import LaunchState
from kernelproof.emulator.state.warp_clocks import WarpClocks


class AmpereBatch(BatchState):
    """Some CTAs of a launch, with all units that execute their instructions.

    A translated kernel is a Python generator, which keeps all registers in its local variables and calls the units. It
    yields when every lane of its batch waits for another CTA. Newer architectures add units in subclasses.
    """

    def __init__(self, launch: LaunchState, device: DeviceState, ctas: Array) -> None:
        super().__init__(launch, ctas)
        shared_bytes = launch.kernel.shared_static + launch.geometry.shared_bytes
        self.scheduler = Scheduler(self)
        self.make_shared(shared_bytes, launch.kernel.shared_granule)
        clocks, shared = self.clocks, self.shared
        shared.device_order = device.order
        self.barriers = Barriers(self, self.scheduler, clocks, device.order)
        self.meetings = Meetings(self, self.scheduler)
        self.memory = DeviceMemory(self, clocks, device, shared)
        self.copies = AsyncCopies(self, self.memory, shared)
        self.scheduler.on_exit.append(self.copies.drop_exited)
        self.local = LocalMemory(self, launch.kernel.local_bytes)
        self.parameters = ParameterBlock(self, device.parameters)
        self.generic = GenericMemory(self, self.memory, shared, self.local, self.parameters)
        self.atomics = Atomics(self, self.memory, shared)
        self.warps = Warps(self, clocks)
        self.matrices = MatrixInstructions(self, shared, self.memory, self.generic)
        self.matrix_memory = MatrixMemory(self, shared)
        self.output = Output(self, self.memory, self.generic)
        self.special = SpecialRegisters(self)
        launch.tick += 1
        clocks.start()

    def make_shared(self, nbytes: int, granule: int) -> None:
        """Make ``clocks`` and ``shared``, which the other units need. Subclasses make their own."""
        self.clocks = WarpClocks(self)
        self.shared = SharedMemory(self, self.clocks, nbytes, granule)

    def address_of(self, symbol: str) -> int:
        """The device address of a module's variable."""
        return self.memory.state.symbols[symbol]

    def grid_workspace(self, symbol: str, site: int) -> int:
        """The address of the workspace in which the CTAs of a cooperative grid meet."""
        if not self.launch.geometry.cooperative:
            text = "uses the workspace of a cooperative grid, but the launch is not cooperative"
            self.report_lanes("grid-sync", text, site, np.flatnonzero(self.alive))
        return self.address_of(symbol)

    def trap(self, site: int, message: str, m: Mask) -> None:
        """Report that lanes execute a trap."""
        lanes = np.flatnonzero(self.running(m))
        if len(lanes):
            self.report_lanes("trap", message, site, lanes)
