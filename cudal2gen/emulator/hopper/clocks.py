"""What every warp of a cluster knows: vector clocks over warps, asynchronous readers and mbarriers.

A column of a clock belongs to something that touches memory: a warp, the wgmma of a warpgroup, the bulk stores of a
warp, or the bulk copies that an mbarrier completes. Its entry is a tick: what that column did before it is ordered
before the warp that holds the clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cudal2gen.emulator.state.hazards import EmulatorError

if TYPE_CHECKING:
    from cudal2gen.emulator.machine.batch import Batch

Array = NDArray[Any]
MAX_BARRIERS = 128


def distinct(values: Array) -> Array:
    """The distinct values of an array in ascending order."""
    if len(values) < 2:
        return values
    keep = np.empty(len(values), bool)
    keep[0] = True
    np.not_equal(values[1:], values[:-1], out=keep[1:])
    return values[keep]


class Clocks:
    """The clocks of a batch of whole clusters."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.cluster = batch.cluster_size
        self.warps = batch.width // 32
        self.groups = -(-self.warps // 4)
        self.wgmma = self.cluster * self.warps
        self.bulk = self.wgmma + self.cluster * self.groups
        self.barriers = self.bulk + self.cluster * self.warps
        # The last column is the cluster barrier: its tick says that all CTAs have started.
        self.columns = self.barriers + MAX_BARRIERS * self.cluster + 1
        self.known: Array = np.zeros((batch.count, self.warps, self.columns), np.int64)
        # What some lanes of a warp have learned and the others not yet: (row, warp) -> [lanes (32 bools), clock].
        self.private: dict[tuple[int, int], list[tuple[Array, Array]]] = {}
        # The first column of the row's own warps.
        self.first = batch.rank * self.warps
        self.barrier_columns: dict[int, int] = {}
        for row in range(batch.count):
            self.known[row, :, self.first[row] : self.first[row] + self.warps] = batch.launch.tick

    def barrier_column(self, row: int) -> int:
        """A fresh column for an mbarrier of this CTA."""
        cluster = row // self.cluster
        used = self.barrier_columns.get(cluster, 0)
        if used >= MAX_BARRIERS * self.cluster:
            raise EmulatorError(f"more than {MAX_BARRIERS} mbarriers per CTA are not modelled")
        self.barrier_columns[cluster] = used + 1
        return self.barriers + used

    def of(self, lane: int) -> Array:
        """The clock of one lane (not to be changed)."""
        batch = self.batch
        row, warp = int(batch.row_of[lane]), int(batch.warp[lane])
        known: Array = self.known[row, warp]
        for lanes, clock in self.private.get((row, warp), ()):
            if lanes[batch.lane[lane]]:
                known = np.maximum(known, clock)
        return known

    def publish(self, lanes: Array) -> Array:
        """Everything that the warps of these lanes did and know so far, at a new tick."""
        batch = self.batch
        row, last = int(batch.row_of[lanes[0]]), int(batch.row_of[lanes[-1]])
        if row != last:
            rows = batch.row_of[lanes]
            parts = [self.publish(lanes[rows == r]) for r in distinct(rows)]
            return np.maximum.reduce(parts)  # type: ignore[no-any-return]
        warps = distinct(batch.warp[lanes])
        clock: Array = self.known[row, warps].max(axis=0)
        if self.private:
            for warp in warps:
                for held, learned in self.private.get((row, int(warp)), ()):
                    if held[batch.lane[lanes[batch.warp[lanes] == warp]]].any():
                        clock = np.maximum(clock, learned)
        clock[self.first[row] + warps] = batch.launch.tick
        return clock

    def acquire(self, lanes: Array, clock: Array) -> None:
        """These lanes learn a clock; a whole warp as a warp, a part of one privately until it synchronises."""
        batch = self.batch
        warps = lanes >> 5
        for start in distinct(warps):
            mine = lanes[warps == start] & 31
            row, warp = divmod(int(start), self.warps)
            alive = batch.alive[32 * start : 32 * start + 32]
            if len(mine) >= int(alive.sum()):
                np.maximum(self.known[row, warp], clock, out=self.known[row, warp])
                continue
            held = np.zeros(32, bool)
            held[mine] = True
            entries = self.private.setdefault((row, warp), [])
            for i, (some, old) in enumerate(entries):
                if np.array_equal(some, held):
                    entries[i] = (held, np.maximum(old, clock))
                    break
            else:
                entries.append((held, clock.copy()))

    def share(self, met: Array | None = None) -> None:
        """The lanes of warps (rows, warps: bool; None: all) have synchronised: what one knows, all know."""
        for row, warp in list(self.private):
            if met is None or met[row, warp]:
                for _, clock in self.private.pop((row, warp)):
                    np.maximum(self.known[row, warp], clock, out=self.known[row, warp])

    def meet(self, row: int, warps: Array | slice) -> None:
        """Warps of a CTA have passed a barrier together; the tick has advanced."""
        known = self.known[row]
        best = known[warps].max(axis=0)
        mine = np.arange(self.first[row], self.first[row] + self.warps)
        best[mine if isinstance(warps, slice) else self.first[row] + warps] = self.batch.launch.tick
        known[warps] = best

    def ordered_privately(self, lane: int, column: int, tick: int) -> bool:
        """Is an access ordered before this lane by what it alone of its warp knows?"""
        batch = self.batch
        key = (int(batch.row_of[lane]), int(batch.warp[lane]))
        return any(held[batch.lane[lane]] and clock[column] > tick for held, clock in self.private.get(key, ()))
