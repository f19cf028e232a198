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
    """The racing reads of a launch. ``by_batch``: number of a batch's first CTA -> the racing reads of the batch."""

    def __init__(self) -> None:
        self.by_batch: dict[int, list[Suspect]] = {}
        self.count = 0

    def add(self, batch: int, suspect: Suspect, ctas: int) -> bool:
        """Add a suspect, whose granules lie in ``ctas`` CTAs; returns False if there are too many."""
        self.count += ctas
        if self.count <= MAX_SUSPECTS:
            self.by_batch.setdefault(batch, []).append(suspect)
        return self.count <= MAX_SUSPECTS


class Trial(NamedTuple):
    """A repeated execution in which the suspects read ``pattern`` in every byte."""

    suspects: Suspects
    pattern: int

    def replace_values(self, values: Array, batch: int, tick: int, columns: Array, granules: Array) -> Array:
        """The values of a read, with the pattern in place of those that a suspect reads. ``columns``: per element, the
        reader's column. ``granules``: shape (elements, granules of an element)."""
        suspected = np.zeros(len(values), bool)
        for suspect in self.suspects.by_batch.get(batch, ()):
            if suspect.first <= tick <= suspect.last:
                suspected |= (columns == suspect.column) & np.isin(granules, suspect.granules).any(axis=1)
        if not suspected.any():
            return values
        width = values.dtype.itemsize
        out = values.copy()
        out[suspected] = np.frombuffer(bytes([self.pattern]) * width, MOVER[width])[0]
        return out
