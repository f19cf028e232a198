"""Records which instruction last accessed each granule of shared memory, to name both sides of a race."""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.state.arrays import Array


class RecordedSites:
    """For each granule the instruction of its last write, and of the last read by each column of readers; -1 for none.

    A launch records them only in a repeated execution, after one without them has found a race.
    """

    def __init__(self, granules: int, columns: int) -> None:
        self.writer: Array = np.full(granules, -1, np.int32)
        self.readers: Array = np.full((granules, columns), -1, np.int32)

    def wrote(self, at: Array, per: int, site: int) -> None:
        """Record a write of elements ``at`` of ``per`` granules each."""
        self.writer.reshape(-1, per)[at] = site

    def read(self, at: Array, per: int, column: Array | int, site: int) -> None:
        """Record a read of elements ``at`` by columns of readers."""
        self.readers.reshape(-1, per, self.readers.shape[1])[at, :, column] = site

    def last(self, granule: int, column: int | None) -> int:
        """The instruction of the last read of a granule by a column of readers, or of its last write (None)."""
        return int(self.writer[granule] if column is None else self.readers[granule, column])
