"""Detects endless loops: the emulator is deterministic, so a batch that returns to an earlier state never ends."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

# The state of a batch: its counters, and its registers and masks by name (arrays as bytes).
State = tuple[tuple[int, ...], dict[str, object]]
# The first iteration whose state is compared, and the longest period that is found. If a period is longer, the
# comparison begins again at twice the iteration, so that few states are copied.
FIRST_ITERATION, MAX_PERIOD = 1 << 12, 64


def state_of(values: Mapping[str, object], counters: tuple[int, ...]) -> State:
    """A copy of everything that decides what a batch does next. Values other than numbers and arrays are units of the
    machine, or registers that are computed when they are read; these are equal only if they are the same object."""
    return counters, {name: _comparable(value) for name, value in values.items()}


def _comparable(value: object) -> object:
    """A value that later changes do not affect, and that compares equal by content if it is a number or an array."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tobytes()
    return value if isinstance(value, (int, float)) else (id(value), value)


class Recurrence:
    """Compares the states of some iterations with an earlier state, from iteration ``first`` on."""

    def __init__(self, first: int = FIRST_ITERATION) -> None:
        self.first = first
        self.earlier: State | None = None

    def is_due(self, iteration: int) -> bool:
        """Must ``period`` be called for this iteration?"""
        return iteration >= self.first

    def period(self, iteration: int, state: State) -> int:
        """The number of iterations after which the state repeats, 0 if no repetition was found."""
        if self.earlier is None:
            self.first, self.earlier = iteration, state
        elif state == self.earlier:
            return iteration - self.first
        elif iteration - self.first >= MAX_PERIOD:
            self.first, self.earlier = 2 * self.first, None
        return 0
