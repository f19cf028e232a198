"""Flags: places that threads write strongly, with what their readers may find there and learn from it.

This is how a release synchronises with an acquire (PTX ISA, "Release and Acquire Patterns"): a write leaves a clock at
its place, and who reads its value, or that of a read-modify-write which continues its release sequence, takes it. A
reader may find any write that coherence allows it, not only the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.scopes import SCOPES, Scope

Clock = TypeVar("Clock")
Key = TypeVar("Key")
# A clock for everything, by the readers that it is meant for: those of a CTA, a cluster, or the device.
Group = tuple[Scope, int]
GRID: Group = (Scope.GPU, 0)
# Does a reader know what a warp of a CTA did at a tick? Arguments: CTA, warp, tick.
Knows = Callable[[int, int, int], bool]
# Something that differs whenever a warp knows more than before; last, whether what it has read from flags without a
# fence is part of what it knows.
Knowledge = tuple[int, int, bool]
# By CTA and warp: which of its strong writes, counted over the launch, has been seen last, by whatever way.
Seen = dict[tuple[int, int], int]
NOTHING_KNOWN: Knowledge = (-1, -1, False)

# A scope -> it and the narrower ones.
_REACHES = {scope: SCOPES[:scope] for scope in SCOPES}

# Writes of a place that are kept at most; half of them are dropped when there are more.
MAX_WRITES = 2048
# Writes whose clocks are merged only when they are asked for.
MAX_SEQUENCE = 64
# Moments at which a warp has read a place that are kept at most.
MAX_MARKS = 8
# Values that a reader who polls is given one by one, from the oldest on and up to the newest; of those in between it is
# given every n-th, so that there are not many more than this number.
ONE_BY_ONE = 32


class Side(NamedTuple):
    """The CTA of a thread on one side of a synchronisation, and by scope the key of the threads that it comprises."""

    cta: int
    groups: dict[Scope, Group]

    @classmethod
    def of(cls, cta: int, cluster: int) -> Side:
        """The side of a CTA of a cluster."""
        return cls(cta, {Scope.CTA: (Scope.CTA, cta), Scope.CLUSTER: (Scope.CLUSTER, cluster), Scope.GPU: GRID})


class Moment(NamedTuple):
    """Who writes a place, when, and by which instruction."""

    cta: int
    warp: int
    tick: int
    site: int


def up_to(scope: Scope, clock: Clock) -> dict[Scope, Clock]:
    """A clock that is published at a scope is published at all smaller scopes, too."""
    return dict.fromkeys(_REACHES[scope], clock)


def merged_by_key(a: dict[Key, Clock], b: dict[Key, Clock], merge: Callable[[Clock, Clock], Clock]) -> dict[Key, Clock]:
    """The union of clocks, key by key. Neither is changed, and clocks that several keys share are merged once."""
    if not a or not b:
        return a or b
    out = dict(a)
    # Keys that share a clock follow each other.
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
    """What has been seen by either of two."""
    return a | {writer: max(number, a.get(writer, 0)) for writer, number in b.items()}


def distinct(clocks: Iterable[Clock]) -> Iterable[Clock]:
    """The clocks, each once."""
    return {id(clock): clock for clock in clocks}.values()


def in_turn(lanes: Array, offset: Array, each: bool) -> Iterable[list[int]]:
    """The elements of an atomic, by ascending lanes, in the groups that happen at one time: the lanes of a warp that
    modify one place; ``each``: every lane by itself, because others may see the values in between."""
    if each:
        return [[i] for i in range(len(lanes))]
    groups: dict[tuple[int, int], list[int]] = {}
    for i, key in enumerate(zip((lanes >> 5).tolist(), offset.tolist(), strict=True)):
        groups.setdefault(key, []).append(i)
    return groups.values()


class Fences(NamedTuple, Generic[Clock]):
    """The first fences of kind sc of a launch: the number of the last one, and what comes before it."""

    number: int
    clock: Clock


class Write(Generic[Clock]):
    """A write in the modification order of a place, by ``number``.

    ``value``: what it left there; None if values are not recorded. ``moment``: None for a weak write, and for what the
    place held at first. ``own``: what it publishes itself. ``before``: the write whose release sequence it continues;
    None also when ``own`` includes what that one publishes. ``fences``: what its writer's last fence.sc comes after.
    ``seen``: see ``Flags``.
    """

    __slots__ = ("before", "fences", "moment", "number", "own", "seen", "value")

    def __init__(
        self,
        number: int,
        value: np.generic | None,
        moment: Moment | None = None,
        own: dict[Group, Clock] | None = None,
        before: Write[Clock] | None = None,
        fences: Fences[Clock] | None = None,
    ) -> None:
        self.number, self.value, self.moment = number, value, moment
        self.own: dict[Group, Clock] = own or {}
        self.before, self.fences = before, fences
        self.seen: Seen = {}

    def continues(self, other: Write[Clock]) -> bool:
        """Is it known to publish all that an earlier write publishes?"""
        write: Write[Clock] | None = self
        while write is not None and write.number > other.number:
            write = write.before
        return write is other

    def published(self, merge: Callable[[Clock, Clock], Clock]) -> dict[Group, Clock]:
        """What a reader of its value may learn: what it and the sequence before it publish."""
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
    """A warp has read the write of a number, at a tick."""

    tick: int
    number: int


class Given(NamedTuple):
    """The value that a polling loop was given last: that of write ``number``, in the loop's ``iteration``."""

    iteration: int
    number: int


class History(Generic[Clock]):
    """The modification order of a place, as far back as it is kept: consecutive ``writes``, the last one last. Without
    recorded values only the last one is kept.

    ``marks``: by CTA and warp, what it has read, the last reading last. ``given``: by CTA, warp and head of a loop
    (None: outside of such loops), the last value of the place that was given to it there. Lanes of a warp may poll one
    place in several loops at a time, each at its own pace. ``releases``: what a warp's releases at the place have
    published, which its later writes publish, too. No reader is given a write before ``floor``.
    """

    __slots__ = ("bounds", "floor", "given", "marks", "newest_mark", "releases", "writes")

    def __init__(self, first: Write[Clock]) -> None:
        self.writes = [first]
        self.floor = first.number
        self.marks: dict[tuple[int, int], list[Mark]] = {}
        self.given: dict[tuple[tuple[int, int], int | None], Given] = {}
        # The largest number of a write that has been read.
        self.newest_mark = 0
        self.releases: dict[tuple[int, int], dict[Group, Clock]] = {}
        # By CTA and warp, for both kinds of knowledge: what it knew, and the oldest write that it might read.
        self.bounds: dict[tuple[tuple[int, int], bool], tuple[Knowledge, int]] = {}

    @property
    def last(self) -> Write[Clock]:
        return self.writes[-1]

    def at(self, number: int) -> Write[Clock]:
        """The write of a number."""
        return self.writes[number - self.writes[0].number]

    def add(self, write: Write[Clock]) -> None:
        """Add the next write."""
        if write.value is None:
            self.writes[-1] = write
            return
        self.writes.append(write)
        if write.moment is None:
            # Other than strong writes are ordered before whoever reads the place, or race with that.
            self.floor = write.number
        if len(self.writes) > MAX_WRITES:
            del self.writes[: MAX_WRITES // 2]
            self.floor = max(self.floor, self.writes[0].number)

    def oldest(self, reader: tuple[int, int], knows: Knows, knowledge: Knowledge) -> int:
        """The number of the oldest write that a warp may read: not older than what it has read or written, what it
        knows to have been written, and what it knows others to have read. ``knowledge`` differs when ``knows`` does."""
        before, low = self.bounds.get((reader, knowledge[2]), (NOTHING_KNOWN, self.floor))
        if before != knowledge:
            for write in reversed(self.writes):
                if write.number <= low:
                    break
                if write.moment is not None and (write.moment[:2] == reader or knows(*write.moment[:3])):
                    low = write.number
            # Most marks are of the reader's own bound or older.
            for warp, marks in self.marks.items() if self.newest_mark > low else ():
                for mark in reversed(marks):
                    if mark.number <= low:
                        break
                    if warp == reader or knows(*warp, mark.tick):
                        low = mark.number
            self.bounds[reader, knowledge[2]] = knowledge, low
        return max(low, self.floor)

    def seen(self, oldest: int, seen: Seen) -> int:
        """The number of the newest write, from the ``oldest`` on, that somebody would read who has seen this and finds
        all accesses in one order."""
        for write in reversed(self.writes):
            if write.number > oldest and write.moment is not None:
                writer = write.moment[:2]
                if write.seen[writer] <= seen.get(writer, 0):
                    return write.number
        return oldest

    def following(self, number: int) -> int:
        """The number of the write that a polling reader is given after that of ``number``."""
        first, last = self.writes[0].number, self.last.number
        if number - first >= ONE_BY_ONE and last - number > ONE_BY_ONE:
            return min(number + max(1, (last - first) // ONE_BY_ONE), last - ONE_BY_ONE)
        return min(number + 1, last)

    def mark(self, reader: tuple[int, int], mark: Mark, knowledge: Knowledge) -> None:
        """Note that a warp has read a write. ``knowledge``: including what it has learned from that."""
        marks = self.marks.setdefault(reader, [])
        if marks and marks[-1].tick == mark.tick:
            marks[-1] = mark
        else:
            marks.append(mark)
        self.newest_mark = max(self.newest_mark, mark.number)
        if len(marks) > MAX_MARKS:
            # Who knows of the forgotten reading, and of no later one, must not read anything older.
            self.floor = max(self.floor, marks.pop(0).number)
        self.bounds[reader, knowledge[2]] = knowledge, mark.number
        # No later load may read anything older, whether what is known without a fence bounds it or not.
        other = reader, not knowledge[2]
        if other in self.bounds:
            known, low = self.bounds[other]
            self.bounds[other] = known, max(low, mark.number)


class Flags(Generic[Clock]):
    """The histories of the places that have been written strongly.

    A write of scope s publishes to the writer's CTA, cluster and device, as far as s. A read looks up its own CTA,
    cluster and device, as far as its own scope. So the two synchronise iff each scope reaches the other side.

    ``seen``, if it is ``traced``: by warp, the strong writes that it has seen or made, or that those had seen who made
    them. Fences play no part in it. Who has seen a write, and then reads an older value, reads what no order of all
    accesses explains; only the weakness of memory does.
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
        fences: Fences[Clock] | None = None,
    ) -> None:
        """A strong write. ``clocks``: what it publishes at each scope; ``release``: it does so by itself, not by a
        fence before it. ``keep``: it is a read-modify-write, which continues the release sequence. ``values``: what the
        place held before and holds now, if that is recorded."""
        # The key is the writer's own CTA, cluster or device, so a reader elsewhere has another key.
        own = {side.groups[reach]: clock for reach, clock in clocks.items() if reach <= scope}
        history = self.places.get(place)
        old, new = values or (None, None)
        if history is None:
            # There is nothing to publish, and nothing that the write could end.
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
            # It publishes exactly what the one before it does.
            own, before = before.own, before.before
        write = Write(history.last.number + 1, new, moment, own, before, fences)
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
        """A warp has read a write."""
        if self.traced and write.seen:
            self.seen[reader] = latest_of(self.seen.get(reader, {}), write.seen)

    def clocks(self, write: Write[Clock], side: Side, scope: Scope) -> dict[Scope, Clock]:
        """The clocks that a strong read of a write's value finds, by scope."""
        published = write.own if write.before is None else write.published(self._merge)
        found = {}
        if published:
            for reach in _REACHES[scope]:
                clock = published.get(side.groups[reach])
                if clock is not None:
                    found[reach] = clock
        return found

    def take(self, pending: dict[Scope, Clock], scope: Scope) -> list[Clock]:
        """Remove from ``pending`` the clocks that a fence of this scope brings into force, and return them."""
        return [pending.pop(reach) for reach in SCOPES if reach <= scope and reach in pending]

    def merged(self, a: dict[Scope, Clock], b: dict[Scope, Clock]) -> dict[Scope, Clock]:
        """The union of clocks, scope by scope."""
        return merged_by_key(a, b, self._merge)
