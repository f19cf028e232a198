"""Models barrier.cluster of the PTX ISA, at which all threads of a cluster that have not exited wait for each other."""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.hopper.cluster_clocks import ClusterClocks
from kernelproof.emulator.hopper.mbarrier import MBarriers
from kernelproof.emulator.machine.scheduler import Scheduler, Step
from kernelproof.emulator.state.arrays import Array, Mask, distinct
from kernelproof.emulator.state.batch_state import BatchState


class ClusterBarrier:
    """The barrier of one cluster.

    ``generation`` counts completions. ``arrived``: a bool per thread of the cluster, whether it has arrived for the
    next completion. ``clock``: the union of the clocks that these threads have released. ``done_clock``: that union at
    the last completion.
    """

    __slots__ = ("arrived", "clock", "done_clock", "generation")

    def __init__(self, size: int) -> None:
        self.generation = 0
        self.arrived: Array = np.zeros(size, bool)
        self.clock: Array | None = None
        self.done_clock: Array | None = None

    def describe(self, row: int) -> str:  # noqa: ARG002
        """The state in words, for reports of deadlocks."""
        return f"barrier.cluster, where {int(self.arrived.sum())} threads of the cluster have arrived"


class ClusterBarriers:
    """The cluster barriers of a batch."""

    def __init__(self, batch: BatchState, scheduler: Scheduler, clocks: ClusterClocks, mbarriers: MBarriers) -> None:
        self.batch, self.launch, self.scheduler = batch, batch.launch, scheduler
        self.clocks, self.mbarriers = clocks, mbarriers
        self.hazards = batch.launch.options.hazards
        self.lanes_per_cluster = batch.cluster_size * batch.width
        self.clusters = [ClusterBarrier(self.lanes_per_cluster) for _ in range(batch.count // batch.cluster_size)]
        # Per lane: the generation for which it has arrived but not yet waited, -1 for none.
        self.arrived_at: Array = np.full(batch.size, -1, np.int64)

    def _members(self, index: int) -> slice:
        """The lanes of a cluster."""
        return slice(index * self.lanes_per_cluster, (index + 1) * self.lanes_per_cluster)

    def arrive(self, m: Mask, release: bool, site: int) -> None:
        """barrier.cluster.arrive by the lanes of ``m``. ``release``: false for a relaxed arrival."""
        batch = self.batch
        mask = batch.running(m)
        self.launch.tick += 1
        for index, cluster in enumerate(self.clusters):
            members = self._members(index)
            lanes = np.flatnonzero(mask[members]) + members.start
            if lanes.size == 0:
                continue
            again = self.arrived_at[lanes] >= 0
            if again.any():
                text = "arrives at barrier.cluster again without having waited"
                batch.report_lanes("barrier-divergence", text, site, lanes[again])
            self.arrived_at[lanes] = cluster.generation
            cluster.arrived[lanes - members.start] = True
            if self.hazards:
                # A relaxed arrival still passes on which accesses the lanes know to have ended. A release by some lanes
                # of a warp takes effect only when its other lanes have arrived, too.
                clocks = self.clocks
                clock = clocks.publish(lanes, True) if release else clocks.only_ended(clocks.knowledge(lanes))
                cluster.clock = clock if cluster.clock is None else np.maximum(cluster.clock, clock)
            self._settle(index)

    def _settle(self, index: int) -> None:
        """If every thread that has not exited has arrived, complete the generation and wake the threads that wait."""
        batch, cluster = self.batch, self.clusters[index]
        # Exited threads count as arrived, so an exit can complete a generation (``exited``).
        alive = batch.alive[self._members(index)]
        if not cluster.arrived.any() or (alive & ~cluster.arrived).any():
            return
        self.mbarriers.has_changed = True
        self.launch.tick += 1
        cluster.generation += 1
        cluster.arrived[:] = False
        clock = self.clocks.empty() if cluster.clock is None else cluster.clock
        self.clocks.set(clock, self.clocks.started, self.launch.tick)
        cluster.done_clock, cluster.clock = clock, None
        self.launch.version += 1
        sleepers = self.scheduler.asleep(cluster)
        if sleepers.any():
            self._leave(cluster, np.flatnonzero(sleepers))
            self.scheduler.release(cluster, sleepers)

    def _leave(self, cluster: ClusterBarrier, lanes: Array) -> None:
        """Let lanes pass the barrier: they acquire the clock of its last generation."""
        self.arrived_at[lanes] = -1
        if self.hazards and cluster.done_clock is not None:
            self.clocks.acquire(lanes, cluster.done_clock)

    def wait(self, m: Mask, resume: int, site: int) -> Step:
        """barrier.cluster.wait: lanes whose generation is complete continue at the block ``resume``, others sleep."""
        batch = self.batch
        mask = batch.running(m).copy()
        awake = np.zeros(batch.size, bool)
        for index, cluster in enumerate(self.clusters):
            members = self._members(index)
            lanes = np.flatnonzero(mask[members]) + members.start
            if lanes.size == 0:
                continue
            not_arrived = self.arrived_at[lanes] < 0
            if not_arrived.any():
                text = "waits at barrier.cluster without having arrived"
                batch.report_lanes("barrier-divergence", text, site, lanes[not_arrived])
            is_complete = not_arrived | (self.arrived_at[lanes] < cluster.generation)
            if is_complete.any():
                self._leave(cluster, lanes[is_complete])
                awake[lanes[is_complete]] = True
            if not is_complete.all():
                sleepers = np.zeros(batch.size, bool)
                sleepers[lanes[~is_complete]] = True
                self.scheduler.sleep(cluster, sleepers, resume, site)
        if (awake == mask).all():
            return self.scheduler.go(resume, m)
        return self.scheduler.next(resume, awake) if awake.any() else self.scheduler.pick()

    def exited(self, lanes: Array) -> None:
        """Complete the generations that waited only for lanes which have exited."""
        for index in distinct(lanes // self.lanes_per_cluster):
            self._settle(int(index))
