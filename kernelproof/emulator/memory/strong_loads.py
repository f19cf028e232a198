"""Chooses the value that a strong load returns: that of any write that coherence allows its warp, not only the last.

A load in a polling loop returns the oldest value that its warp may still read, and in each iteration of the loop the
next one. So the loop ends at the oldest value that ends it. In an execution with ``Variation.newest`` it gets the last
value only, as if it polled late. Other loads return the last value or, with ``Variation.oldest``, the oldest one.
Read-modify-writes always read the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

from kernelproof.emulator.memory.flags import Flags, GivenValue, History, Knowledge, Knows, Mark, Write
from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.launch_state import StaleRead
from kernelproof.emulator.state.participants import Participant
from kernelproof.emulator.state.scopes import ORDERS
from kernelproof.emulator.state.warp_clocks import WarpClocks

# A warp is given older values of at most this many places until its CTA meets at a barrier. Without a limit, a
# decoupled look-back would find old states everywhere and go back to the first CTA, in a time that grows with the
# square of the CTAs.
MAX_PLACES = 4
# CTA (or row of the batch) and warp.
Reader = tuple[int, int]
# A function: may an element of an access read this value, which is not the last one?
Accepts = Callable[[int, np.generic], bool]


class Learners(Protocol):
    """The warps of a batch as readers of the flags of a state space."""

    def reader(self, row: int, warp: int) -> Reader:
        """The name of a warp in the histories of flags."""

    def knows(self, row: int, warp: int, cumulative: bool) -> Knows:
        """A function that says whether an access happens before a warp's next load. It is valid until the warp learns
        more. ``cumulative``: see ``StrongLoads.is_cumulative``."""

    def knowledge(self, row: int, warp: int, cumulative: bool) -> Knowledge:
        """A value that changes whenever ``knows`` may become true of more accesses."""

    def learn_write(self, row: int, warp: int, place: int, write: Write[Any], strong: int) -> None:
        """Note that a warp has read a write of a flag: it learns the clocks that the write publishes."""


class StrongLoads:
    """The strong loads of a batch's threads from one state space. ``observed``: values of strong writes there are
    recorded. ``flags_are_read``: the kernel reads flags there; if not, the clocks that writes publish do not matter."""

    def __init__(self, batch: BatchState, clocks: WarpClocks, space: str) -> None:
        self.batch, self.clocks, self.launch, self.space = batch, clocks, batch.launch, space
        # (Row, warp) -> the tick of its CTA's last barrier, and the ids of histories of which it was given older values
        # since then.
        self._given: dict[tuple[int, int], tuple[int, set[int]]] = {}
        kernel, hazards = batch.launch.kernel, batch.launch.options.hazards
        self.observed = hazards and space in kernel.observed_spaces
        self.flags_are_read = hazards and space in kernel.flag_spaces
        # In adverse order values are recorded even if nothing is fenced or released.
        self.weak = self.observed and batch.launch.options.adverse

    def is_cumulative(self, site: int, acquires: bool) -> bool:
        """Whether flags that a warp has read without a fence count as ordering for its load ``site``, which then finds
        fewer old values than the memory model allows. Programs rely on that where volatile or relaxed loads read data
        after a flag. A load that polls or acquires reads a flag itself, so for it they do not count."""
        return not acquires and site not in self.launch.kernel.polling_heads

    def read(
        self, learners: Learners, flags: Flags[Any], lanes: Array | None, offset: Array, strong: int, site: int,
        values: Array, accepts: Accepts | None,
    ) -> Array:  # fmt: skip
        """Execute strong loads by these lanes (None: all) where memory holds ``values``, one per lane. Warps learn the
        clocks of the writes that they read. Returns the values that are read, which may be older. ``accepts``: which
        older values an element may read."""
        found = [(i, place, flags.places[place]) for i, place in enumerate(offset.tolist()) if place in flags.places]
        if not found:
            return values
        cumulative = self.is_cumulative(site, bool(strong & ORDERS))
        rows, warps = self.batch.warps_of_lanes(lanes)
        out = values
        # Lanes of a warp that load one place together read the same write.
        chosen: dict[tuple[int, int, int], Write[Any]] = {}
        for i, place, history in found:
            row, warp = rows[i], warps[i]
            write = chosen.get((row, warp, place))
            if write is None:
                reader = learners.reader(row, warp)
                knows, knowledge = learners.knows(row, warp, cumulative), learners.knowledge(row, warp, cumulative)
                accepts_value = None if accepts is None else partial(accepts, i)
                lane = i if lanes is None else int(lanes[i])
                write, mark = self.choose(
                    flags, history, values[i], reader, knows, knowledge, site, lane, accepts_value
                )
                learners.learn_write(row, warp, place, write, strong)
                flags.see(reader, write)
                if mark is not None:
                    history.mark(reader, mark, learners.knowledge(row, warp, cumulative))
                if accepts is None:
                    chosen[row, warp, place] = write
            if write.value is not None and write is not history.last:
                out = values.copy() if out is values else out
                out[i] = write.value
        return out

    def choose(
        self,
        flags: Flags[Any],
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
        the place's present value. ``lane``: any lane of the loading warp. ``accepts``: which older values the load may
        read."""
        last = history.last
        if last.value is None or last.value.dtype != value.dtype:
            return last, None
        if last.value.tobytes() != value.tobytes():
            # A weak write came after the last strong one.
            history.add(Write(last.number + 1, value))
        head = self.launch.kernel.polling_heads.get(site)
        iterations = None if head is None else self.batch.iterations.get(head)
        iteration = 0 if iterations is None else int(iterations[lane])
        oldest = history.oldest(reader, knows, knowledge)
        number = self._number_to_read(history, reader, oldest, head, iteration, lane)
        if head is None and oldest < number:
            if not self.launch.oldest:
                self.launch.older_allowed.add(site)
            number = self._number_if_overlooking(flags, history, reader, oldest, number, site, lane)
        write = history.at(number)
        last = history.last
        if write is not last and accepts is not None and write.value is not None and not accepts(write.value):
            write = last
        # Swaps that fail write the same value again, which is no change.
        newest = last.value
        if (
            write is not last
            and write.value is not None
            and newest is not None
            and write.value.tobytes() != newest.tobytes()
        ):
            # The loop will be given another value, so this counts as a change of memory.
            self.launch.version += 1
        history.given[reader, head] = GivenValue(iteration, write.number)
        return write, Mark(self.launch.tick, write.number)

    def _number_to_read(
        self, history: History[Any], reader: Reader, oldest: int, head: int | None, iteration: int, lane: int
    ) -> int:
        """The number of the write that a load reads, from the ``oldest`` on. ``head``: that of the polling loop with
        this load, which is in its ``iteration``; None outside of such loops."""
        last = history.last.number
        is_newest = self.launch.newest if head is not None else not self.launch.oldest
        if oldest == last or is_newest or self._has_seen_enough(history, lane):
            return last
        self.launch.polled_older |= head is not None
        last_given = history.given.get((reader, head))
        # A polling loop is not given the same value again, so that it ends.
        if last_given is not None and (head is None or last_given.iteration != iteration):
            return max(oldest, history.following(last_given.number))
        return oldest

    def _number_if_overlooking(
        self, flags: Flags[Any], history: History[Any], reader: Reader, oldest: int, number: int, site: int, lane: int
    ) -> int:
        """The number of the write that a load reads: ``number``, or ``oldest`` if this execution tries what happens
        when the instruction misses writes that its warp has seen but is not ordered after. Notes that the instruction
        can be tried."""
        launch, batch = self.launch, self.batch
        seen = history.newest_seen(oldest, flags.seen.get(reader, {})) if flags.traced else oldest
        if seen == oldest:
            return number
        if site not in launch.overlooked:
            store = history.at(oldest + 1).moment
            if store is not None:
                row = int(batch.row_of[lane])
                cta = store.cta if self.space == "global" else int(batch.ctas[store.cta])
                other = Participant(
                    launch.site(store.site), launch.cta_index(cta), agent=f"a lane of warp {store.warp}"
                )
                launch.overlooked[site] = StaleRead(batch.cta_index(row), int(batch.thread[lane]), other)
        return oldest if launch.overlooks == site else number

    def _has_seen_enough(self, history: History[Any], lane: int) -> bool:
        """Has the warp of a lane been given older values of ``MAX_PLACES`` other places since its CTA's last
        barrier?"""
        warp = int(self.batch.row_of[lane]), int(self.batch.warp[lane])
        barrier_tick = int(self.clocks.base[warp[0]])
        old_barrier_tick, places = self._given.get(warp, (-1, set()))
        if old_barrier_tick != barrier_tick:
            places = set()
            self._given[warp] = barrier_tick, places
        if len(places) < MAX_PLACES:
            places.add(id(history))
        return id(history) not in places
