"""Keeps reads of shared memory that race with a write, so that repeated executions can give them other values."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernelproof.emulator.state.arrays import MOVER, Array

# The most suspects, summed over CTAs, that repeated executions try. If there are more, all races count as errors.
MAX_SUSPECTS = 1 << 17


class Suspect(NamedTuple):
    """Racing reads of some granules of a batch's shared memory by one column of readers, from tick ``first`` to
    ``last``."""

    column: int
    first: int
    last: int
    granules: Array


class Suspects:
    """The racing reads of a launch, by the number of their batch's first CTA."""

    def __init__(self) -> None:
        self.of_batch: dict[int, list[Suspect]] = {}
        self.count = 0

    def add(self, batch: int, suspect: Suspect, ctas: int) -> bool:
        """Add a suspect, whose granules lie in so many CTAs; returns False if there are too many."""
        self.count += ctas
        if self.count <= MAX_SUSPECTS:
            self.of_batch.setdefault(batch, []).append(suspect)
        return self.count <= MAX_SUSPECTS


class Trial(NamedTuple):
    """A repeated execution in which the suspects read ``pattern`` in every byte."""

    suspects: Suspects
    pattern: int

    def replace_values(self, values: Array, batch: int, tick: int, columns: Array, granules: Array) -> Array:
        """The values of a read, with the pattern in place of those that a suspect reads. ``columns``: per element, the
        reader's column. ``granules``: shape (elements, granules of an element)."""
        concerned = np.zeros(len(values), bool)
        for suspect in self.suspects.of_batch.get(batch, ()):
            if suspect.first <= tick <= suspect.last:
                concerned |= (columns == suspect.column) & np.isin(granules, suspect.granules).any(axis=1)
        if not concerned.any():
            return values
        width = values.dtype.itemsize
        out = values.copy()
        out[concerned] = np.frombuffer(bytes([self.pattern]) * width, MOVER[width])[0]
        return out
