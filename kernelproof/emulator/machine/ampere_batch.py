"""A batch of CTAs with the units that sm_80 has, and the loop over all batches of a launch."""

from __future__ import annotations

from collections.abc import Callable, Generator

import numpy as np

from kernelproof.emulator.machine.barriers import Barriers, Meetings
from kernelproof.emulator.machine.batch_sizes import BatchSizes
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
from kernelproof.emulator.memory.local import GenericMemory, LocalMemory, Parameters
from kernelproof.emulator.memory.shared import SharedMemory
from kernelproof.emulator.state.arrays import Array, Mask, reuse_memory
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.launch_state import LaunchState
from kernelproof.emulator.state.queue import CtaQueue
from kernelproof.emulator.state.warp_clocks import WarpClocks

# Rounds without any progress after which batches that poll memory count as stuck; and the same for CTAs that read a
# clock while they wait, because they may give up after some time (by then 16 million clock ticks).
MAX_IDLE_ROUNDS = 64
MAX_TIMED_ROUNDS = 8192


class AmpereBatch(BatchState):
    """Some CTAs of a launch with all the units that execute them.

    A translated kernel is a Python generator. It keeps all registers in its local variables and calls the units. It
    yields when every lane of its batch waits for another CTA. Newer architectures add units in subclasses.
    """

    def __init__(self, launch: LaunchState, device: DeviceState, ctas: Array) -> None:
        super().__init__(launch, ctas)
        shared_bytes = launch.kernel.shared_static + launch.geometry.shared_bytes
        self.scheduler = Scheduler(self)
        self.make_shared(shared_bytes, launch.kernel.shared_granule)
        clocks, shared = self.clocks, self.shared
        self.barriers = Barriers(self, self.scheduler, clocks, device.order)
        self.meetings = Meetings(self, self.scheduler)
        self.memory = DeviceMemory(self, clocks, device, shared)
        self.copies = AsyncCopies(self, self.memory, shared)
        self.local = LocalMemory(self, launch.kernel.local_bytes)
        self.parameters = Parameters(self, device.parameters)
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


# The Python function of a kernel. Every resumption runs until all lanes of the batch wait for other CTAs.
KernelFunction = Callable[[AmpereBatch], Generator[None, None, None]]


def run(
    launch: LaunchState, device: DeviceState, function: KernelFunction, ctas: Array, batch_type: type[AmpereBatch]
) -> None:
    """Execute the CTAs with these linear numbers (whole clusters, rank by rank) in batches.

    A batch runs until it ends or until all its lanes wait for other CTAs; batches that wait take turns. Raises Runaway,
    Overtaken, or EmulatorError for what the emulator does not support.
    """
    reuse_memory()
    sizes, resident = BatchSizes(launch), _resident(launch, len(ctas))
    queue = launch.queue = CtaQueue(ctas, launch.geometry.cluster_size, resident)
    running: list[tuple[AmpereBatch, Generator[None, None, None]]] = []
    idle_rounds = rounds = active = 0
    with np.errstate(all="ignore"):
        while len(queue) or running:
            starts = min(len(queue), resident - active)
            if starts:
                batch = batch_type(launch, device, queue.take(sizes.next(starts)))
                active += batch.count
                # The youngest batch runs first: others wait for CTAs that have not run yet, rarely for older ones.
                running.insert(0, (batch, function(batch)))
            before, count = launch.version, len(running)
            left = []
            for batch, code in running:
                if _continues(code):
                    left.append((batch, code))
                else:
                    active -= batch.count
                    sizes.ended(batch.count, batch.scheduler.steps)
            running = left
            if launch.options.progress and len(running) < count:
                launch.options.progress(len(ctas) - len(queue) - active, len(ctas))
            moved = launch.version != before or len(running) < count
            idle_rounds = 0 if moved or starts else idle_rounds + 1
            rounds += 1
            timed = any(batch.special.clock_reads > MAX_IDLE_ROUNDS for batch, _ in running)
            limit = MAX_TIMED_ROUNDS if timed else MAX_IDLE_ROUNDS
            if idle_rounds > limit or rounds > (launch.options.loop_limit or rounds):
                _report_stuck([batch for batch, _ in running])
                return


def _resident(launch: LaunchState, count: int) -> int:
    """CTAs that may run at a time. Where CTAs can cancel others it is one per SM, because then it matters which have
    started; otherwise all."""
    if not launch.kernel.cancels:
        return count
    size = launch.geometry.cluster_size
    return max(size, launch.device.sm_count // size * size)


def _report_stuck(batches: list[AmpereBatch]) -> None:
    """Report that no batch can go on: a deadlock, unless lanes wait for the host or for CTAs that were left out."""
    launch = batches[0].launch
    absent = launch.geometry.ctas - sum(launch.batches) - launch.queue.cancelled
    text = ""
    if any(batch.memory.last_read is not None and batch.memory.last_read.of_host for batch in batches):
        text = "waits for memory that the host writes, which goes on only when the kernel has ended"
    elif absent:
        text = f"waits for some of the {absent} CTAs that are left out of {launch.geometry.ctas}"
    if text:
        launch.reports.add("launch-error", f"{launch.kernel.name} {text}")
        return
    for batch in batches:
        batch.scheduler.report_stuck()


def _continues(code: Generator[None, None, None]) -> bool:
    """Run a batch until it yields; returns whether it has not ended."""
    try:
        next(code)
    except StopIteration:
        return False
    return True


def in_clusters(ctas: Array, grid: tuple[int, int, int], cluster: tuple[int, int, int]) -> Array:
    """The CTAs of all clusters that contain one of ``ctas``, cluster by cluster and by rank within each."""
    (gx, gy, _), (cx, cy, cz) = grid, cluster
    x, y, z = ctas % gx, ctas // gx % gy, ctas // (gx * gy)
    first = np.unique(x // cx * cx + gx * (y // cy * cy + gy * (z // cz * cz)))
    rank = np.arange(cx * cy * cz)
    step = rank % cx + gx * (rank // cx % cy + gy * (rank // (cx * cy)))
    out: Array = (first[:, None] + step).reshape(-1)
    return out
