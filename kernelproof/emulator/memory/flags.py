"""Models flags: places that strong accesses write, the values that readers may find there, and clocks that they learn.

This is how a release synchronises with an acquire (PTX ISA, "Release and Acquire Patterns"): a write leaves a clock at
its place. A reader of its value, or of the value of a read-modify-write that continues its release sequence, takes the
clock. A reader may find any write that coherence allows, not only the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.scopes import SCOPES, Scope

Clock = TypeVar("Clock")
Key = TypeVar("Key")
# The readers for which a clock is published: all threads of a CTA, a cluster, or the device.
Group = tuple[Scope, int]
GRID: Group = (Scope.GPU, 0)
# A function: does an access by (CTA, warp) at a tick happen before what a reader does now?
Knows = Callable[[int, int, int], bool]
# A value that differs whenever a warp knows more than before. Its last part: whether the warp also knows what it has
# read from flags without a fence.
Knowledge = tuple[bytes, int, bool]
# (CTA, warp) -> the last of its strong writes, counted over the launch, that has been seen, directly or through others.
Seen = dict[tuple[int, int], int]
NOTHING_KNOWN: Knowledge = (b"", -1, False)

# A scope -> it and the narrower ones.
_REACHES = {scope: SCOPES[:scope] for scope in SCOPES}

# The most writes of a place that are kept; if there are more, half of them are dropped.
MAX_WRITES = 2048
# The length of a release sequence after which clocks are merged in any case; before, they are merged when needed.
MAX_SEQUENCE = 64
# The most moments that are kept at which a warp has read a place.
MAX_MARKS = 8
# A polling reader is given this many of the oldest values, and as many of the newest, one by one. It is given every
# n-th value in between, so that they are not many more than this number.
ONE_BY_ONE = 32


class Side(NamedTuple):
    """The CTA of a thread on one side of a synchronisation. ``groups``: scope -> the group of threads that it
    includes."""

    cta: int
    groups: dict[Scope, Group]

    @classmethod
    def of(cls, cta: int, cluster: int) -> Side:
        """The side of a CTA of a cluster."""
        return cls(cta, {Scope.CTA: (Scope.CTA, cta), Scope.CLUSTER: (Scope.CLUSTER, cluster), Scope.GPU: GRID})


class Moment(NamedTuple):
    """The tick of a write, its instruction (``site``), and the writer: ``cta`` is the linear number of its CTA or, for
    shared memory, the row in the batch; ``warp`` is its warp's number in the CTA."""

    cta: int
    warp: int
    tick: int
    site: int


def clocks_up_to(scope: Scope, clock: Clock) -> dict[Scope, Clock]:
    """Scope -> clock, for a clock that is published at a scope and so at all narrower ones."""
    return dict.fromkeys(_REACHES[scope], clock)


def merged_by_key(a: dict[Key, Clock], b: dict[Key, Clock], merge: Callable[[Clock, Clock], Clock]) -> dict[Key, Clock]:
    """The union of clocks, key by key. Neither is changed, and clocks that several keys share are merged once."""
    if not a or not b:
        return a or b
    out = dict(a)
    # Keys that share a clock follow each other, so the last merge is kept.
    before: tuple[Clock, Clock, Clock] | None = None
    for key, clock in b.items():
        old = a.get(key)
        if old is not None:
            if before is None or before[0] is not old or before[1] is not clock:
                before = old, clock, merge(old, clock)
            clock = before[2]
        out[key] = clock
    return out


def latest_of(a: Seen, b: Seen) -> Seen:
    """The union of what two warps have seen."""
    return a | {writer: max(number, a.get(writer, 0)) for writer, number in b.items()}


def distinct(clocks: Iterable[Clock]) -> Iterable[Clock]:
    """The clocks, each once."""
    return {id(clock): clock for clock in clocks}.values()


def ordered_steps(lanes: Array, offset: Array, single_lanes: bool) -> Iterable[list[int]]:
    """Divides the elements of an atomic into steps, which happen one after the other. Each step is a list of indices
    into ``lanes``, which must ascend.

    A step has the lanes of a warp that modify one place. With ``single_lanes`` it has one lane, because others may then
    see the values in between. ``offset``: the place that each lane modifies.
    """
    if single_lanes:
        return [[i] for i in range(len(lanes))]
    steps: dict[tuple[int, int], list[int]] = {}
    for i, key in enumerate(zip((lanes >> 5).tolist(), offset.tolist(), strict=True)):
        steps.setdefault(key, []).append(i)
    return steps.values()


class SequentialFence(NamedTuple, Generic[Clock]):
    """The fence.sc number ``number`` of a launch, with the clock of what comes before it."""

    number: int
    clock: Clock


class Write(Generic[Clock]):
    """A write in the modification order of a place, by ``number``.

    ``value``: the new value; None if values are not recorded. ``moment``: None for a weak write, and for the initial
    value. ``own``: the clocks that it publishes itself. ``before``: the write whose release sequence it continues; None
    if there is none, or if ``own`` includes that write's clocks. ``last_fence``: the writer's last fence.sc. ``seen``:
    see ``Flags``.
    """

    __slots__ = ("before", "last_fence", "moment", "number", "own", "seen", "value")

    def __init__(
        self,
        number: int,
        value: np.generic | None,
        moment: Moment | None = None,
        own: dict[Group, Clock] | None = None,
        before: Write[Clock] | None = None,
        last_fence: SequentialFence[Clock] | None = None,
    ) -> None:
        self.number, self.value, self.moment = number, value, moment
        self.own: dict[Group, Clock] = own or {}
        self.before, self.last_fence = before, last_fence
        self.seen: Seen = {}

    def continues(self, other: Write[Clock]) -> bool:
        """Is this write known to publish all clocks that an earlier write publishes?"""
        write: Write[Clock] | None = self
        while write is not None and write.number > other.number:
            write = write.before
        return write is other

    def published(self, merge: Callable[[Clock, Clock], Clock]) -> dict[Group, Clock]:
        """The clocks that a reader of this value may learn: its own, and those of the release sequence before it."""
        if self.before is not None:
            sequence, write = [self.own], self.before
            while write.before is not None:
                sequence.append(write.own)
                write = write.before
            total = write.own
            for own in reversed(sequence):
                total = merged_by_key(total, own, merge)
            self.own, self.before = total, None
        return self.own


class Mark(NamedTuple):
    """A note that a warp has read write ``number`` at a tick."""

    tick: int
    number: int


class GivenValue(NamedTuple):
    """The last value that a polling loop was given: that of write ``number``, in the loop's ``iteration``."""

    iteration: int
    number: int


class History(Generic[Clock]):
    """The modification order of a place, as far back as it is kept: consecutive ``writes``, the last one last. If
    values are not recorded, only the last write is kept.

    ``marks``: (CTA, warp) -> which writes it has read, the last one last. ``given``: ((CTA, warp), head of a polling
    loop, or None outside of such loops) -> the last value that was given there. Lanes of a warp may poll a place in
    several loops at the same time, each at its own pace. ``releases``: (CTA, warp) -> the clocks that its releases at
    the place have published; its later writes publish them, too. No reader is given a write before number ``floor``.
    """

    __slots__ = ("bounds", "floor", "given", "marks", "newest_mark", "releases", "writes")

    def __init__(self, first: Write[Clock]) -> None:
        self.writes = [first]
        self.floor = first.number
        self.marks: dict[tuple[int, int], list[Mark]] = {}
        self.given: dict[tuple[tuple[int, int], int | None], GivenValue] = {}
        # The largest number of a write that has been read.
        self.newest_mark = 0
        self.releases: dict[tuple[int, int], dict[Group, Clock]] = {}
        # ((CTA, warp), kind of knowledge) -> its knowledge when it was last asked for, and the oldest write that it
        # might read then.
        self.bounds: dict[tuple[tuple[int, int], bool], tuple[Knowledge, int]] = {}

    @property
    def last(self) -> Write[Clock]:
        return self.writes[-1]

    def at(self, number: int) -> Write[Clock]:
        """The write with this number in the modification order."""
        return self.writes[number - self.writes[0].number]

    def add(self, write: Write[Clock]) -> None:
        """Add the next write."""
        if write.value is None:
            self.writes[-1] = write
            return
        self.writes.append(write)
        if write.moment is None:
            # A weak write is ordered before every later read of the place, or races with it.
            self.floor = write.number
        if len(self.writes) > MAX_WRITES:
            del self.writes[: MAX_WRITES // 2]
            self.floor = max(self.floor, self.writes[0].number)

    def oldest(self, reader: tuple[int, int], knows: Knows, knowledge: Knowledge) -> int:
        """The number of the oldest write that a warp may read: not older than those that it has read or written, that
        happen before its load, or that reads happening before its load have read. ``knowledge`` must differ whenever
        ``knows`` does."""
        before, low = self.bounds.get((reader, knowledge[2]), (NOTHING_KNOWN, self.floor))
        if before != knowledge:
            for write in reversed(self.writes):
                if write.number <= low:
                    break
                if write.moment is None:
                    continue
                cta, writer, tick, _ = write.moment
                if (cta, writer) == reader or knows(cta, writer, tick):
                    low = write.number
            # Mostly no mark is newer than the bound so far.
            for warp, marks in self.marks.items() if self.newest_mark > low else ():
                for mark in reversed(marks):
                    if mark.number <= low:
                        break
                    if warp == reader or knows(*warp, mark.tick):
                        low = mark.number
            self.bounds[reader, knowledge[2]] = knowledge, low
        return max(low, self.floor)

    def newest_seen(self, oldest: int, seen: Seen) -> int:
        """The number of the newest write, from the ``oldest`` on, that a reader must find if all accesses of the launch
        happen in a single order. ``seen``: the writes that it has seen."""
        for write in reversed(self.writes):
            if write.number > oldest and write.moment is not None:
                writer = write.moment[:2]
                if write.seen[writer] <= seen.get(writer, 0):
                    return write.number
        return oldest

    def following(self, number: int) -> int:
        """The number of the write that a polling reader is given after that of ``number``: the next one, unless that
        lies between the oldest and the newest ``ONE_BY_ONE`` writes. Then some writes are skipped."""
        first, last = self.writes[0].number, self.last.number
        if number - first >= ONE_BY_ONE and last - number > ONE_BY_ONE:
            return min(number + max(1, (last - first) // ONE_BY_ONE), last - ONE_BY_ONE)
        return min(number + 1, last)

    def mark(self, reader: tuple[int, int], mark: Mark, knowledge: Knowledge) -> None:
        """Note that a warp has read a write. ``knowledge``: the warp's, with what it has learned from that write."""
        marks = self.marks.setdefault(reader, [])
        if marks and marks[-1].tick == mark.tick:
            marks[-1] = mark
        else:
            marks.append(mark)
        self.newest_mark = max(self.newest_mark, mark.number)
        if len(marks) > MAX_MARKS:
            # A reader that the forgotten read happens before, but no later one, must not read anything older.
            self.floor = max(self.floor, marks.pop(0).number)
        self.bounds[reader, knowledge[2]] = knowledge, mark.number
        # This bounds later loads of both kinds of knowledge.
        other = reader, not knowledge[2]
        if other in self.bounds:
            known, low = self.bounds[other]
            self.bounds[other] = known, max(low, mark.number)


class Flags(Generic[Clock]):
    """The histories of the places that have been written strongly.

    A write of scope s publishes its clock to the writer's CTA, cluster and device, as far as s includes them. A read
    looks up its own CTA, cluster and device, as far as its own scope includes them. So the two synchronise if and only
    if each scope includes the other side.

    ``seen``, if ``traced``: (CTA, warp) -> the strong writes that it has made, has seen, or has seen through the
    writers of those; fences play no part. If a warp reads an older value after it has seen a write, no single order of
    all accesses explains that: only a weak memory model allows it.
    """

    def __init__(self, merge: Callable[[Clock, Clock], Clock], traced: bool = False) -> None:
        self._merge, self.traced = merge, traced
        self.seen: dict[tuple[int, int], Seen] = {}
        self._strong_writes = 0
        self.places: dict[int, History[Clock]] = {}

    def __bool__(self) -> bool:
        return bool(self.places)

    def write(
        self,
        place: int,
        side: Side,
        scope: Scope,
        moment: Moment,
        clocks: dict[Scope, Clock],
        *,
        release: bool,
        keep: bool = False,
        values: tuple[np.generic, np.generic] | None = None,
        last_fence: SequentialFence[Clock] | None = None,
    ) -> None:
        """Note a strong write. ``clocks``: those that it publishes, by scope. ``release``: it does so itself, and not
        by an earlier fence. ``keep``: it is a read-modify-write, which continues the release sequence. ``values``: the
        values before and after, if they are recorded. ``last_fence``: see ``Write``."""
        # A key is the writer's own CTA, cluster or device, so readers elsewhere do not find the clock.
        own = {side.groups[reach]: clock for reach, clock in clocks.items() if reach <= scope}
        history = self.places.get(place)
        old, new = values or (None, None)
        if history is None:
            # The write publishes nothing, and ends no release sequence.
            if not own and new is None:
                return
            history = self.places[place] = History(Write(0, old))
        elif old is not None and history.last.value is not None and old.tobytes() != history.last.value.tobytes():
            history.add(Write(history.last.number + 1, old))
        writer = moment.cta, moment.warp
        if release:
            own = history.releases[writer] = history.releases.get(writer, {}) | own
        elif writer in history.releases:
            own = merged_by_key(history.releases[writer], own, self._merge)
        before = history.last if keep else None
        if before is not None and not own:
            # It publishes exactly what the previous write does.
            own, before = before.own, before.before
        write = Write(history.last.number + 1, new, moment, own, before, last_fence)
        if new is None or write.number % MAX_SEQUENCE == 0:
            write.published(self._merge)
        if self.traced:
            self._strong_writes += 1
            if keep:
                self.see(writer, history.last)
            write.seen = self.seen[writer] = self.seen.get(writer, {}) | {writer: self._strong_writes}
        history.add(write)
        for key in ((writer, False), (writer, True)):
            if key in history.bounds:
                history.bounds[key] = history.bounds[key][0], write.number

    def see(self, reader: tuple[int, int], write: Write[Clock]) -> None:
        """Note that a warp has read a write."""
        if self.traced and write.seen:
            self.seen[reader] = latest_of(self.seen.get(reader, {}), write.seen)

    def clocks(self, write: Write[Clock], side: Side, scope: Scope) -> dict[Scope, Clock]:
        """The clocks that a strong read of a write's value learns, by scope. ``side``, ``scope``: the reader's."""
        published = write.own if write.before is None else write.published(self._merge)
        found = {}
        if published:
            for reach in _REACHES[scope]:
                clock = published.get(side.groups[reach])
                if clock is not None:
                    found[reach] = clock
        return found

    def take(self, pending: dict[Scope, Clock], scope: Scope) -> list[Clock]:
        """Remove from ``pending`` and return the clocks that a fence of this scope makes the warp's own."""
        return [pending.pop(reach) for reach in SCOPES if reach <= scope and reach in pending]

    def merged(self, a: dict[Scope, Clock], b: dict[Scope, Clock]) -> dict[Scope, Clock]:
        """The union of clocks, scope by scope."""
        return merged_by_key(a, b, self._merge)
