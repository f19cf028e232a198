"""Records which instruction last accessed each granule of shared memory, to name both sides of a race."""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.state.arrays import Array

NO_LANE, SEVERAL_LANES = -1, -2  # in place of a lane of a warp


class RecordedSites:
    """For each granule the instruction of its last write, and of the last read by each column of readers; -1 for none.

    A lane's own read never races with its own access. So two reads are kept per granule and column: ``readers`` has the
    last read, which lane ``lanes`` made, and ``others`` the last read by another lane than that. A launch records all
    this only in a repeated execution, after an execution without records has found a race.
    """

    def __init__(self, granules: int, columns: int) -> None:
        self.writer: Array = np.full(granules, -1, np.int32)
        self.readers, self.others = (np.full((granules, columns), -1, np.int32) for _ in range(2))
        self.lanes: Array = np.full((granules, columns), NO_LANE, np.int8)

    def record_write(self, elements: Array, granules_per_element: int, site: int) -> None:
        """Record a write of elements (indices), of ``granules_per_element`` granules each."""
        self.writer.reshape(-1, granules_per_element)[elements] = site

    def record_read(
        self, elements: Array, granules_per_element: int, column: Array | int, site: int, lane: Array | None = None
    ) -> None:
        """Record a read of elements (indices) by columns of readers. ``lane``: the lane of its warp that reads each
        element; None: several lanes together."""
        for k in range(granules_per_element):
            place = elements * granules_per_element + k, column
            if lane is None:
                self.lanes[place], self.others[place] = SEVERAL_LANES, site
            else:
                changes = self.lanes[place] != lane
                self.others[place] = np.where(changes, self.readers[place], self.others[place])
                self.lanes[place] = lane
                # If several lanes of a warp read a granule in this instruction, only the last one finds itself.
                shared = self.lanes[place] != lane
                if shared.any():
                    several = place[0][shared], np.broadcast_to(column, elements.shape)[shared]
                    self.lanes[several], self.others[several] = SEVERAL_LANES, site
            self.readers[place] = site

    def last_reads(self, granules: Array, columns: Array, own_columns: Array, lanes: Array) -> Array:
        """The instructions of the last reads of granules by columns of readers, other than by the given lanes, whose
        own columns are ``own_columns``."""
        own = (columns == own_columns) & (self.lanes[granules, columns] == lanes)
        return np.where(own, self.others[granules, columns], self.readers[granules, columns])
