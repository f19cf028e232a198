"""Reads of shared memory that race with a write: a second execution gives them other values."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernelproof.emulator.state.arrays import MOVER, Array

# Most suspects that are executed again; with more of them all count as errors.
MAX_SUSPECTS = 2048


class Suspect(NamedTuple):
    """Reads of these granules of a batch's shared memory by one column of readers, from tick ``first`` to ``last``."""

    column: int
    first: int
    last: int
    granules: Array


class Suspects:
    """The racing reads of a launch, by the first CTA of their batch."""

    def __init__(self) -> None:
        self.of_batch: dict[int, list[Suspect]] = {}
        self.count = 0

    def add(self, batch: int, suspect: Suspect) -> bool:
        """Adds a suspect; False if there is no room for it."""
        self.count += 1
        if self.count <= MAX_SUSPECTS:
            self.of_batch.setdefault(batch, []).append(suspect)
        return self.count <= MAX_SUSPECTS


class Trial(NamedTuple):
    """A second execution, in which the suspects read ``pattern`` in every byte."""

    suspects: Suspects
    pattern: int

    def values(self, values: Array, batch: int, tick: int, columns: Array, granules: Array) -> Array:
        """The values of a read: ``columns`` of readers, and their granules, (lanes, granules of an element)."""
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
