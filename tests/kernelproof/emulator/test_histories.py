"""Proves by drawn histories of a place which writes a reader may find there, and which clocks it learns from them.

The references apply the rules of the PTX memory model to the list of all events. A clock is a set of numbers here.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelproof.emulator.memory import flags
from kernelproof.emulator.memory.flags import Flags, Group, Mark, Moment, Side, clocks_up_to
from kernelproof.emulator.state.scopes import SCOPES, Scope

Clock = frozenset[int]
PLACE = 64
WARPS = range(6)
# Two warps in each CTA; CTAs 0 and 1 are a cluster, and CTA 2 is another one.
SIDES = [Side.of(warp // 2, warp // 4) for warp in WARPS]


class Publication(NamedTuple):
    """A strong write by a warp.

    ``release``: whether it publishes a clock itself. ``fence``: the scope of an earlier fence that lets it publish one;
    None without a fence. ``keep``: whether it is a read-modify-write. ``weak``: whether a weak write comes before it.
    """

    warp: int
    scope: Scope
    release: bool
    fence: Scope | None
    keep: bool
    weak: bool


SCOPE = st.sampled_from(SCOPES)
RARELY = st.sampled_from((False, False, True))
WRITE = st.builds(Publication, st.sampled_from(WARPS), SCOPE, st.booleans(), st.none() | SCOPE, st.booleans(), RARELY)


def expected_clocks(writes: list[Publication]) -> list[dict[Group, Clock]]:
    """What each write publishes to each group of readers: its own clocks, those of its writer's earlier releases, and,
    if it is a read-modify-write, what the write before it publishes."""
    out: list[dict[Group, Clock]] = []
    releases: dict[int, dict[Group, Clock]] = {}
    for number, write in enumerate(writes):
        widest = write.scope if write.release else write.fence
        reached = [scope for scope in SCOPES if widest is not None and scope <= min(write.scope, widest)]
        own: dict[Group, Clock] = {SIDES[write.warp].groups[scope]: frozenset((number,)) for scope in reached}
        sources = [own, releases.get(write.warp, {})]
        merged = {group: frozenset().union(*(x.get(group, ()) for x in sources)) for x in sources for group in x}
        if write.release:
            merged = {group: own.get(group) or clock for group, clock in merged.items()}
            releases[write.warp] = merged
        if write.keep and out and not write.weak:
            before = out[-1]
            merged = {x: merged.get(x, frozenset()) | before.get(x, frozenset()) for x in merged.keys() | before.keys()}
        out.append(merged)
    return out


@settings(max_examples=80)
@given(st.lists(WRITE, min_size=1, max_size=12), st.booleans())
def test_a_reader_learns_what_the_release_sequence_of_a_write_publishes(writes: list[Publication], lazy: bool) -> None:
    """A release of a warp at a place replaces its earlier ones there, whose accesses it orders as well."""
    expected = expected_clocks(writes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flags, "MAX_SEQUENCE", 64 if lazy else 3)
        found = Flags[Clock](operator.or_)
        last = 0
        for number, write in enumerate(writes):
            clock = frozenset((number,))
            widest = write.scope if write.release else write.fence
            clocks = {} if widest is None else clocks_up_to(widest, clock)
            old, new = np.uint32(last + (1000 + number) * write.weak), np.uint32(number + 1)
            moment = Moment(SIDES[write.warp].cta, write.warp % 2, number, 0)
            found.write(PLACE, SIDES[write.warp], write.scope, moment, clocks, release=write.release, keep=write.keep,
                        values=(old, new))  # fmt: skip
            last = number + 1
    strong = [write for write in found.places[PLACE].writes if write.moment is not None]
    assert [int(write.value or 0) for write in strong] == list(range(1, len(writes) + 1))
    for write, groups in zip(strong, expected, strict=True):
        for side in SIDES:
            for scope in SCOPES:
                reached = {reach: groups.get(side.groups[reach]) for reach in SCOPES if reach <= scope}
                learned = {reach: clock for reach, clock in reached.items() if clock is not None}
                assert found.clocks(write, side, scope) == learned


# What a warp does: it writes, reads one of the writes that it may read (counted from the newest), or learns everything
# that another warp has done.
EVENT = st.tuples(st.sampled_from(("write", "read", "read", "learn")), st.sampled_from(WARPS), st.integers(0, 5),
                  st.booleans())  # fmt: skip


@settings(max_examples=80)
@given(st.lists(EVENT, min_size=2, max_size=flags.MAX_MARKS + 16))
def test_a_reader_finds_no_write_that_coherence_forbids(events: list[tuple[str, int, int, bool]]) -> None:
    """A warp may not find a write that is older than one that it has read or written, or than one whose write or read
    it knows of. There are two kinds of knowledge, of which the second includes the first."""
    found = Flags[Clock](operator.or_)
    reads = dict.fromkeys(WARPS, 0)
    accesses: list[tuple[int, int, int]] = []  # warp, tick, and number of the write that it wrote or read
    # (warp, kind) -> for each warp the tick before which its accesses are known.
    known = {(warp, kind): dict.fromkeys(WARPS, 0) for warp in WARPS for kind in (False, True)}
    found.write(PLACE, SIDES[0], Scope.GPU, Moment(9, 9, 0, 0), {}, release=False, values=(np.uint32(0), np.uint32(1)))
    for tick, (event, warp, choice, kind) in enumerate(events, 1):
        history = found.places[PLACE]
        key = warp // 2, warp % 2
        if event == "write":
            number = history.last.number + 1
            moment = Moment(*key, tick, 0)
            found.write(PLACE, SIDES[warp], Scope.GPU, moment, {}, release=False,
                        values=(np.uint32(number - 1), np.uint32(number)))  # fmt: skip
            accesses.append((warp, tick, number))
            continue
        if event == "learn":
            for each in (kind, True):
                other = known[choice % len(WARPS), each]
                mine = known[warp, each]
                known[warp, each] = {x: max(mine[x], other[x]) for x in WARPS} | {choice % len(WARPS): tick}
            continue
        reads[warp] += 1
        if reads[warp] > flags.MAX_MARKS:
            continue  # an older mark would be forgotten
        clock = known[warp, kind]
        allowed = [number for other, at, number in accesses if other == warp or at < clock[other]]
        oldest = history.oldest(
            key, lambda cta, index, at, clock=clock: cta < 9 and at < clock[2 * cta + index],
            (repr(clock).encode(), 0, kind),
        )  # fmt: skip
        assert oldest == max(allowed, default=0)
        number = max(oldest, history.last.number - choice)
        history.mark(key, Mark(tick, number), (repr(clock).encode(), 0, kind))
        accesses.append((warp, tick, number))


# A strong write, a read-modify-write or a read, by a warp, at one of three places. A read is of the newest write or of
# one before it, as the last number says.
STEP = st.tuples(st.sampled_from(("write", "modify", "read", "read")), st.sampled_from(WARPS), st.integers(0, 2),
                 st.integers(0, 3))  # fmt: skip


@settings(max_examples=60)
@given(st.lists(STEP, min_size=4, max_size=40))
def test_the_newest_write_that_a_warp_has_seen_is_that_of_a_list_of_all(steps: list[tuple[str, int, int, int]]) -> None:
    """A warp has seen its own writes, those that it has read or modified, and all that their writers had seen."""
    found = Flags[Clock](operator.or_, traced=True)
    seen: dict[int, set[tuple[int, int]]] = {warp: set() for warp in WARPS}
    carried: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for tick, (kind, warp, place, back) in enumerate(steps, 1):
        key = warp // 2, warp % 2
        history = found.places.get(place)
        newest = history.last.number if history is not None else 0
        if kind == "read":
            number = max(1, newest - back)
            if history is not None:
                found.see(key, history.at(number))
                seen[warp] |= carried[place, number]
        else:
            moment = Moment(*key, tick, 0)
            found.write(place, SIDES[warp], Scope.GPU, moment, {}, release=False, keep=kind == "modify",
                        values=(np.uint32(newest), np.uint32(newest + 1)))  # fmt: skip
            if kind == "modify":
                seen[warp] |= carried.get((place, newest), set())
            seen[warp].add((place, newest + 1))
            carried[place, newest + 1] = set(seen[warp])
        for at, present in found.places.items():
            for reader in WARPS:
                for oldest in (0, present.last.number // 2):
                    numbers = [number for where, number in seen[reader] if where == at and number > oldest]
                    mine = found.seen.get((reader // 2, reader % 2), {})
                    assert present.newest_seen(oldest, mine) == max(numbers, default=oldest)
