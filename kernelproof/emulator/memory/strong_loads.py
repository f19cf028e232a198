"""Which value a strong load returns: any write of the place that coherence allows its warp, not only the last one.

A load in a loop that polls returns the oldest value that its warp may still read, and in each turn of the loop the next
one. So the loop is left at the oldest value that lets it go on. Other loads return the last value, or, in an execution
with ``Variation.oldest``, the oldest one. Read-modify-writes always read the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernelproof.emulator.memory.flags import History, Knowledge, Knows, Mark, Write
from kernelproof.emulator.state.batch_state import BatchState

# CTA (or row of the batch) and warp.
Reader = tuple[int, int]
# May an element of an access read this value, which is not the last one?
Accepts = Callable[[int, np.generic], bool]


class StrongLoads:
    """The strong loads of a batch's threads from one state space, where values are recorded if it is ``observed``."""

    def __init__(self, batch: BatchState, space: str) -> None:
        self.batch, self.launch = batch, batch.launch
        self.observed = space in batch.launch.kernel.observes and batch.launch.options.hazards

    def choose(
        self,
        history: History[Any],
        value: np.generic,
        reader: Reader,
        knows: Knows,
        knowledge: Knowledge,
        site: int,
        lane: int,
        accepts: Callable[[np.generic], bool] | None = None,
    ) -> tuple[Write[Any], Mark | None]:
        """The write that a load by instruction ``site`` reads, and the mark that it leaves in the history. ``value``:
        what the place holds; ``lane``: any of the warp that loads from it; ``accepts``: which older values it may
        read."""
        last = history.last
        if last.value is None or last.value.dtype != value.dtype:
            return last, None
        if last.value.tobytes() != value.tobytes():
            # A weak write came behind the last strong one.
            history.add(Write(last.number + 1, value))
        head = self.launch.kernel.polls.get(site)
        turns = None if head is None else self.batch.turns.get(head)
        turn = 0 if turns is None else int(turns[lane])
        oldest = history.oldest(reader, knows, knowledge)
        number = self._number(history, reader, oldest, head, turn)
        if head is None and not self.launch.oldest and oldest < number:
            self.launch.newest_only.add(site)
        write = history.at(number)
        refused = accepts is not None and write.value is not None and not accepts(write.value)
        if refused and write is not history.last:
            write = history.last
        if write is not history.last:
            # There is a newer value to come: memory is as good as changed for whoever polls.
            self.launch.version += 1
        return write, Mark(self.launch.tick, write.number, head, turn)

    def _number(self, history: History[Any], reader: Reader, oldest: int, head: int | None, turn: int) -> int:
        """The number of the write that a load reads, of those from the ``oldest`` on. ``head``, ``turn``: see
        ``Mark``."""
        last = history.last.number
        if oldest == last or (head is None and not self.launch.oldest):
            return last
        marks = history.marks.get(reader)
        # A loop that polls is not given the same value again, so that it comes to its end.
        if marks and marks[-1].head == head and (head is None or marks[-1].turn != turn):
            return max(oldest, history.following(marks[-1].number))
        return oldest
