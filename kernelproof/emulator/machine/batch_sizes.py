"""Chooses how many CTAs a batch has. CTAs that execute together share the cost of each step, as long as they take the
same steps."""

from __future__ import annotations

from kernelproof.emulator.state.launch_state import LaunchState
from kernelproof.emulator.state.options import MAX_LANES, MIN_LANES

# The most bytes of shared and of local memory in a batch that is wider than ``MIN_LANES``.
SHARED_BYTES, LOCAL_BYTES = 1 << 22, 1 << 24
# A batch with twice the lanes may take this many times the steps before it counts as slower.
MAX_STEP_GROWTH = 1.5


class BatchSizes:
    """The batch sizes of a launch, which grow while that makes execution faster. ``planned``: the sizes of an earlier
    execution of the same launch. A repeated execution must form the same batches, because races suspected in the first
    one are named by batch number."""

    def __init__(self, launch: LaunchState) -> None:
        self.launch = launch
        self.planned = list(launch.batches)
        launch.batches.clear()
        geometry, lanes = launch.geometry, launch.options.lanes
        self.cluster = geometry.cluster_size
        self.threads = max(32, -(-geometry.threads // 32) * 32)
        self.size = self._ctas_for(MIN_LANES if lanes is None else lanes)
        self.max_size = self.size if lanes is not None else max(self.size, self._ctas_for(self._most_lanes()))
        # CTAs and steps of the widest batch that has ended.
        self.widest: tuple[int, int] | None = None

    def _most_lanes(self) -> int:
        """The most lanes of a batch, within the limits of memory."""
        kernel = self.launch.kernel
        shared = max(1, kernel.shared_static + self.launch.geometry.shared_bytes)
        return min(MAX_LANES, SHARED_BYTES // shared * self.threads, LOCAL_BYTES // max(1, kernel.local_bytes))

    def _ctas_for(self, lanes: int) -> int:
        """The number of CTAs with at most ``lanes`` lanes: a multiple of the cluster size, at least one cluster."""
        return max(1, lanes // self.threads // self.cluster) * self.cluster

    def next(self, max_size: int) -> int:
        """The number of CTAs of the next batch, at most ``max_size``."""
        count = min(max_size, self.planned.pop(0) if self.planned else self.size)
        self.launch.batches.append(count)
        return count

    def record_end(self, count: int, steps: int) -> None:
        """Note that a batch of ``count`` CTAs has ended after ``steps`` steps of its scheduler. The next batch is
        wider, unless wider batches take many more steps, as they do when their CTAs take different branches."""
        if count != self.size or self.size >= self.max_size:
            return
        if self.widest is not None and count > self.widest[0]:
            old_count, old_steps = self.widest
            # ``count / old_count`` is 2 after a doubling; the limit grows with it. One step is added, so that batches
            # of very few steps do not count as slower by chance.
            if steps > MAX_STEP_GROWTH * (old_steps + 1) * count / old_count / 2:
                self.size = self.max_size = old_count
                return
        self.widest = count, steps
        self.size = min(self.max_size, 2 * self.size)
