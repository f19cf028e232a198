"""Executes the CTAs of a launch, batch by batch.

A batch runs until it ends, or until all its lanes wait for other CTAs. Batches that wait are resumed one after
the other. If a kernel waits for memory, only as many CTAs run at a time as the device holds, since on hardware only
these can wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from inspect import getgeneratorlocals

import numpy as np

from kernelproof.emulator.machine.ampere_batch import AmpereBatch
from kernelproof.emulator.machine.batch_sizes import BatchSizes
from kernelproof.emulator.machine.recurrence import Recurrence, State
from kernelproof.emulator.memory.device_state import DeviceState
from kernelproof.emulator.state.arrays import Array, reuse_memory
from kernelproof.emulator.state.launch_state import CLOCK_STEP, LaunchState
from kernelproof.emulator.state.queue import CtaQueue

# Rounds without progress after which the states of batches that poll memory are compared, and stores with the values
# that they replace. Time passes faster from then on, because CTAs may give up by a clock.
IDLE_ROUNDS = 64
# Rounds without progress after which CTAs that read a clock count as stuck: hours have passed on it by then.
MAX_TIMED_ROUNDS = 8192
# The most by which a clock advances per read.
MAX_CLOCK_STEP = 1 << 30

# The Python function of a kernel. Every resumption runs until all lanes of the batch wait for other CTAs.
Code = Generator[None, None, None]
KernelFunction = Callable[[AmpereBatch], Code]


@dataclass(slots=True, eq=False)
class RunningBatch:
    """A batch that has started and not ended, and the generator that executes its kernel."""

    batch: AmpereBatch
    code: Code

    def advance(self) -> bool:
        """Run the batch until it yields or ends; returns whether it has yielded."""
        try:
            next(self.code)
        except StopIteration:
            return False
        return True


def run(
    launch: LaunchState, device: DeviceState, function: KernelFunction, ctas: Array, batch_type: type[AmpereBatch]
) -> None:
    """Execute the CTAs with these linear numbers (whole clusters, rank by rank) in batches. Raises Runaway, Overtaken,
    Waits, or EmulatorError for what the emulator does not support."""
    reuse_memory()
    max_running = _resident_limit(launch, len(ctas))
    launch.queue = CtaQueue(ctas, launch.geometry.cluster_size, max_running)
    with np.errstate(all="ignore"):
        Execution(launch, device, function, batch_type, max_running).run_all(len(ctas))


def _resident_limit(launch: LaunchState, count: int) -> int:
    """How many CTAs may run at a time, a multiple of the cluster size. If CTAs can cancel others, one per SM, because
    it matters which have started. If they can wait for others, as many as the device holds. Otherwise all."""
    kernel, device, geometry = launch.kernel, launch.device, launch.geometry
    if not kernel.cancels and not kernel.polling_variables:
        return count
    shared_bytes = kernel.shared_static + geometry.shared_bytes
    ctas_per_sm = 1 if kernel.cancels else device.resident(geometry.threads, shared_bytes)
    size = geometry.cluster_size
    return max(size, ctas_per_sm * device.sm_count // size * size)


class Execution:
    """Runs the batches of a launch, one after the other. ``max_running``: how many CTAs may run at a time. The number
    grows if all CTAs that the device holds wait for others; the launch is then reported, because it needs more CTAs
    than the device holds."""

    def __init__(
        self,
        launch: LaunchState,
        device: DeviceState,
        function: KernelFunction,
        batch_type: type[AmpereBatch],
        max_running: int,
    ) -> None:
        self.launch, self.device, self.function, self.batch_type = launch, device, function, batch_type
        self.max_running = self.resident = max_running
        self.sizes = BatchSizes(launch)
        self.running: list[RunningBatch] = []
        # The most CTAs that have been running at a time.
        self.most_running = 0
        # Rounds since something last changed, and since a batch last started or ended.
        self.idle = self.unmoved_rounds = 0
        self.recurrence = Recurrence(IDLE_ROUNDS)

    def run_all(self, total: int) -> None:
        """Execute all CTAs of the queue, ``total`` in number."""
        launch, queue, rounds = self.launch, self.launch.queue, 0
        while queue or self.running:
            version = launch.version
            started = self._start()
            ended = self._round()
            if launch.options.progress and ended:
                launch.options.progress(total - len(queue) - launch.active, total)
            rounds += 1
            self._count_idle_rounds(moved=bool(started or ended), changed=launch.version != version)
            if self.running and (self._is_stuck() or rounds > (launch.options.loop_limit or rounds)):
                if not queue:
                    self._report_stuck()
                    return
                # The device holds no more CTAs. Run more anyway, to learn whether these are what the others wait for.
                self.max_running = 2 * self.max_running
                self.idle = 0
        if self.most_running > self.resident:
            self._refuse()

    def _start(self) -> int:
        """Start a batch if the device has room for more CTAs; returns how many CTAs have started."""
        launch = self.launch
        room = min(len(launch.queue), self.max_running - launch.active)
        if not room:
            return 0
        batch = self.batch_type(launch, self.device, launch.queue.take(self.sizes.next(room)))
        launch.active += batch.count
        self.most_running = max(self.most_running, launch.active)
        # The youngest batch runs first, since batches mostly wait for CTAs that have not run yet.
        self.running.insert(0, RunningBatch(batch, self.function(batch)))
        return batch.count

    def _round(self) -> int:
        """Run every batch until it yields or ends; returns how many have ended."""
        still_running = []
        for running in self.running:
            if running.advance():
                still_running.append(running)
            else:
                self.launch.active -= running.batch.count
                self.sizes.record_end(running.batch.count, running.batch.scheduler.steps)
        ended = len(self.running) - len(still_running)
        self.running = still_running
        return ended

    def _count_idle_rounds(self, moved: bool, changed: bool) -> None:
        """Count a round as idle or not. ``moved``: a batch has started or ended. ``changed``: memory has changed."""
        self.unmoved_rounds = 0 if moved else self.unmoved_rounds + 1
        if moved or changed:
            self.idle, self.recurrence = 0, Recurrence(IDLE_ROUNDS)
        else:
            self.idle += 1
        self.launch.idle = self.unmoved_rounds > IDLE_ROUNDS
        self.launch.clock_step = min(CLOCK_STEP << max(0, self.idle - IDLE_ROUNDS), MAX_CLOCK_STEP)

    def _is_stuck(self) -> bool:
        """Will no batch ever go on by itself? All of them poll or sleep, and either the state that decides their loops
        repeats, or they read a clock on which hours have passed."""
        if self.idle <= IDLE_ROUNDS:
            return False
        return bool(self.recurrence.period(self.idle, self._state())) or (
            self.idle > MAX_TIMED_ROUNDS and any(running.batch.special.reads_clock for running in self.running)
        )

    def _state(self) -> State:
        """The state that decides whether batches which poll memory ever go on."""
        batches = {
            str(running.batch.ctas[0]): running.batch.scheduler.polling_state(getgeneratorlocals(running.code))
            for running in self.running
        }
        return (self.launch.printed_characters,), dict(batches)

    def _report_stuck(self) -> None:
        """Report that no batch can go on: a deadlock, unless lanes wait for the host, for CTAs that were left out, or
        perhaps for work on another stream."""
        launch, batches = self.launch, [running.batch for running in self.running]
        absent = launch.geometry.ctas - sum(launch.batches) - launch.queue.cancelled
        text = ""
        if any(batch.memory.last_read is not None and batch.memory.last_read.of_host for batch in batches):
            text = "waits for memory that the host writes, which goes on only when the kernel has ended"
        elif absent:
            text = f"waits for some of the {absent} CTAs that are left out of {launch.geometry.ctas}"
        elif (
            launch.geometry.concurrent and not launch.newest and any(batch.scheduler.polls_global for batch in batches)
        ):
            text = "waits for memory that work on another stream may write, which is done here before or after it"
        if text:
            launch.reports.add("launch-error", f"{launch.kernel.name} {text}")
            return
        for batch in batches:
            batch.scheduler.report_stuck()

    def _refuse(self) -> None:
        """Report that CTAs have waited for others that the device starts only after the waiting ones end."""
        text = f"needs co-residency of {self.most_running} CTAs, which wait for each other; the device holds "
        text += str(self.resident)
        self.launch.reports.add("launch-error", f"{self.launch.kernel.name} {text}")


def in_clusters(ctas: Array, grid: tuple[int, int, int], cluster: tuple[int, int, int]) -> Array:
    """The CTAs of all clusters that contain one of ``ctas``, cluster by cluster and by rank within each. All are linear
    numbers: x + gx * (y + gy * z)."""
    (gx, gy, _), (cx, cy, cz) = grid, cluster
    x, y, z = ctas % gx, ctas // gx % gy, ctas // (gx * gy)
    # Linear numbers: the first CTA of each cluster, then the distance of each rank from it.
    first = np.unique(x // cx * cx + gx * (y // cy * cy + gy * (z // cz * cz)))
    rank = np.arange(cx * cy * cz)
    step = rank % cx + gx * (rank // cx % cy + gy * (rank // (cx * cy)))
    out: Array = (first[:, None] + step).reshape(-1)
    return out
