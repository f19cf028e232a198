"""Proves that steps of a CTA are accepted in the orders that make them safe, and in no other.

A drawn sequence of steps is a text with a letter for each step. Regular expressions say which step is safe behind which
text, independently of the stages that the code counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelproof.certificates import NotCertified
from kernelproof.certificates.cells import unknown
from kernelproof.certificates.cluster_sums import ClusterSums, Sent, SumTrack, Waited
from kernelproof.certificates.pipelines import MOST_BARRIERS, Protocol, Stores
from kernelproof.certificates.polynomials import ZERO, Polynomial
from kernelproof.certificates.slices import ItemWorkspace, Partial, SlabContents, Slices, Stage, Workspace
from kernelproof.certificates.tensor_memory import ItemSums, ProductPlaces, TensorColumns
from tests.kernelproof.certificates import rings

Step = Callable[[], object]
ELEMENTS = 32


def near(order: str, letters: str) -> st.SearchStrategy[str]:
    """Draws the order, and orders in which up to three steps are left out, exchanged for others or added."""
    change = st.tuples(st.integers(0, len(order)), st.integers(0, 1), st.sampled_from(["", *letters]))

    def changed(changes: list[tuple[int, int, str]]) -> str:
        out = order
        for at, left_out, added in changes:
            out = out[:at] + added + out[at + left_out :]
        return out

    return st.lists(change, max_size=3).map(changed)


def refused_at(order: str, steps: dict[str, Step]) -> int:
    """The index of the first step of an order that is refused; its length if none is."""
    for index, letter in enumerate(order):
        try:
            steps[letter]()
        except NotCertified:
            return index
    return len(order)


def expected(order: str, safe: dict[str, Callable[[str], bool]]) -> int:
    """What ``refused_at`` must return. ``safe``: whether a step is safe behind a text; others are always."""
    return next((i for i, letter in enumerate(order) if not safe.get(letter, bool)(order[:i] + " ")), len(order))


def workspace(kind: type[Workspace]) -> Workspace:
    """The workspace of a CTA that has the first of two slices of tile 0 and arrives last."""
    return kind(Slices(2, ZERO, ZERO, ELEMENTS, Polynomial.of(1)))


def steps_of(space: Workspace) -> dict[str, Step]:
    """The steps of partial sums: S stores one, F is a fence, B a barrier, C counts the CTA, L loads a sum."""
    places = iter(range(ELEMENTS))
    return {
        "S": lambda: space.store(ZERO, np.array([[next(places)]]), unknown(1, 1, 4)),
        "F": space.fence,
        "B": space.barrier,
        "C": lambda: space.arrive(ZERO),
        "L": lambda: space.load(ZERO, np.array([[0]])),
    }


@given(near("SSFBCBFL", "SFBCL"))
def test_a_cta_is_counted_behind_its_sums_and_loads_behind_all_counts(order: str) -> None:
    met = r"S[^S]*F[^S]*B[^S]*$"  # behind the last store a fence, and behind that a barrier
    safe = {
        "S": lambda text: not re.search(met, text) and "C" not in text,
        "C": lambda text: bool(re.search(met, text)) and "C" not in text,
        "L": lambda text: bool(re.search("C.*B.*F", text)),
    }
    assert refused_at(order, steps_of(workspace(Workspace))) == expected(order, safe)


@given(near("SSBC", "SFBC"))
def test_an_item_is_counted_behind_a_barrier_of_its_group(order: str) -> None:
    met = r"S[^S]*B[^S]*$"
    safe = {
        "S": lambda text: not re.search(met, text) and "C" not in text,
        "C": lambda text: bool(re.search(met, text)) and "C" not in text,
    }
    assert refused_at(order, steps_of(workspace(ItemWorkspace))) == expected(order, safe)


@given(near("SFBC", "SFBC"), st.integers(0, 1))
def test_a_cta_ends_behind_its_count_with_a_full_slab(order: str, missing: int) -> None:
    space = workspace(Workspace)
    steps = steps_of(space)
    steps["S"] = lambda: space.store(ZERO, np.arange(missing, ELEMENTS)[None], unknown(1, ELEMENTS - missing, 4))
    accepted = order[: refused_at(order, steps)]
    if "C" in accepted and not missing:
        space.finish()
    else:
        with pytest.raises(NotCertified):
            space.finish()


@pytest.mark.parametrize("slab", [-1, 0, 1, 2])
def test_partial_sums_lie_in_slabs_of_the_own_tile(slab: int) -> None:
    """The CTA has slice 1 of tile 3, whose slabs are 6 and 7; only slab 7 is its own."""
    space = Workspace(Slices(2, Polynomial.of(1), Polynomial.of(3), 2, Polynomial.of(1)))
    place, at = np.array([[0, 1]]), Polynomial.of(6 + slab)
    if slab != 1:
        with pytest.raises(NotCertified):
            space.store(at, place, unknown(1, 2, 4))
    space.store(Polynomial.of(7), place, unknown(1, 2, 4))
    with pytest.raises(NotCertified):
        space.store(Polynomial.of(7), place[:, :1], unknown(1, 1, 4))
    for step in (space.fence, space.barrier):
        step()
    with pytest.raises(NotCertified):
        space.arrive(Polynomial.of(2))
    assert space.arrive(Polynomial.of(3)).equals(Polynomial.of(1))
    for step in (space.barrier, space.fence):
        step()
    if slab in (0, 1):
        loaded = space.load(at, place)
        assert isinstance(loaded, Partial)
        assert [x.constant for x in (loaded.first, loaded.end, loaded.count)] == [slab, slab + 1, 2]
        assert (loaded.bytes, loaded.width, loaded.whole.bytes) == (8, 4, 8)
    else:
        with pytest.raises(NotCertified):
            space.load(at, place)


def test_of_a_tile_only_the_cta_that_arrives_last_loads_and_of_no_slices_none() -> None:
    assert [Workspace(Slices(count, ZERO, ZERO, 1, ZERO)).highest for count in (2, 3, 48)] == [1, 2, 47]
    early = Workspace(Slices(2, ZERO, ZERO, ELEMENTS, ZERO))
    assert refused_at("SFBCBFL", steps_of(early)) == 6
    Workspace(None).finish()
    without = steps_of(Workspace(None))
    assert [refused_at(order, without) for order in ("S", "C", "L", "FB")] == [0, 0, 0, 2]


@given(near("WFMBC0MWFMBC0", "WFMBC0"))
def test_a_bulk_store_reads_what_is_fenced_and_is_waited_for(order: str) -> None:
    """W: a warp writes its buffer. F: a fence of the asynchronous proxy. M: its lanes meet. B: a lane begins a bulk
    store of the buffer. C: it commits. 0: it waits for all groups. E: the thread ends."""
    stores, places = Stores.none(8), np.arange(4)
    steps: dict[str, Step] = {
        "W": lambda: stores.write(places), "F": stores.fence, "M": stores.meet, "B": lambda: stores.begin(0, places),
        "C": lambda: stores.commit(0), "0": lambda: stores.wait(0, 0), "E": stores.finish,
    }  # fmt: skip
    ready = r"W[^W]*F[^W]*M[^W]*$"
    safe = {
        "W": lambda text: (
            ("W" not in text or bool(re.search(ready, text)))
            and ("B" not in text or bool(re.search(r"B[^B]*C[^B]*0[^B]*M[^B]*$", text)))
        ),
        "B": lambda text: bool(re.search(ready, text)),
        "E": lambda text: "B" not in text or bool(re.search(r"B[^B]*C[^B]*0[^B]*$", text)),
    }
    assert refused_at(order + "E", steps) == expected(order + "E", safe)


@given(near("AAFSSX", "AFSX"))
def test_sums_are_sent_between_two_waits(order: str) -> None:
    """A: a warp says that its ring is free. F, X: the group waits for free rings, and for its sums. S: it sends one."""
    track = SumTrack()
    warps = iter(range(10))

    def change(step: Callable[[SumTrack], SumTrack]) -> Step:
        def changed() -> None:
            nonlocal track
            track = step(track)

        return changed

    sent = Sent(0, np.zeros(1, int), np.zeros(1, int), np.zeros(1, int))
    steps = {
        "A": change(lambda x: x.arrive(frozenset(((next(warps), 0),)))), "S": change(lambda x: x.send(sent)),
        "F": change(lambda x: SumTrack(max(x.waited, Waited.FREED), x.freed, x.sent)),
        "X": change(lambda x: SumTrack(Waited.ARRIVED, x.freed, x.sent)),
    }  # fmt: skip
    safe = {
        "A": lambda text: not set(text) & set("FX"),
        "S": lambda text: "F" in text and "X" not in text,
    }
    assert refused_at(order, steps) == expected(order, safe)
    with pytest.raises(NotCertified):
        SumTrack().arrive(frozenset(((1, 0),))).arrive(frozenset(((1, 0), (2, 0))))


@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4), max_size=4), st.integers(0, 9))
def test_no_two_sums_come_to_one_place_and_all_are_announced(sendings: list[list[int]], announced: int) -> None:
    sums = ClusterSums(32)
    sums.expect(4 * announced)
    with pytest.raises(NotCertified):
        sums.expect(4 * announced)
    taken = set[int]()
    for rank, places in enumerate(sendings):
        sent = Sent(rank, np.array(places), np.array(places), np.array(places))
        if len(set(places)) < len(places) or taken & set(places):
            with pytest.raises(NotCertified):
                sums.receive(rank, sent)
            return
        sums.receive(rank, sent)
        taken |= set(places)
        assert set(np.flatnonzero(sums.at.sources == rank)) == set(places)
    if announced == len(taken):
        sums.check()
    else:
        with pytest.raises(NotCertified):
            sums.check()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-1, MOST_BARRIERS + 1)), max_size=6))
def test_each_group_has_one_barrier_for_itself(uses: list[tuple[int, int]]) -> None:
    protocol, of = Protocol(8, rings.claim().ring), dict[int, int]()  # type: ignore[arg-type]
    for group, number in uses:
        alone = all(other == group for other, its in of.items() if its == number)
        if 1 <= number <= 15 and alone and of.get(group, number) == number:
            protocol.meeting(group, number)
            of[group] = number
        else:
            with pytest.raises(NotCertified):
                protocol.meeting(group, number)


def checked(full: dict[int, int], empty: dict[int, int], turns: dict[int, int], counts: dict[int, int]) -> bool:
    """Whether a CTA of two groups of four warps, with a ring of two stages, may have these mbarriers."""
    protocol = Protocol(8, rings.claim(turns=True).ring)  # type: ignore[arg-type]
    protocol.full, protocol.empty, protocol.turns, protocol.counts = full, empty, turns, counts
    try:
        protocol.check(4, 2)
    except NotCertified:
        return False
    return True


def test_each_mbarrier_has_one_purpose_and_the_arrivals_that_it_gets() -> None:
    full, empty, turns = {0: 0, 1: 8}, {0: 16, 1: 24}, {0: 32, 1: 40}
    counts = {0: 1, 8: 1, 16: 4, 24: 4, 32: 4, 40: 4}
    assert checked(full, empty, turns, counts)
    for address, count in counts.items():
        for other in {1, 3, 4, 5, 8} - {count}:
            assert not checked(full, empty, turns, counts | {address: other})
    for role in (full, empty, turns):
        for key, shared in ((1, 0), (1, 16), (1, 32)):
            if role[key] != shared and shared in {x for each in (full, empty, turns) for x in each.values()}:
                wrong = [each | {key: shared} if each is role else each for each in (full, empty, turns)]
                assert not checked(*wrong, counts)
        fewer = [{0: each[0]} if each is role else each for each in (full, empty, turns)]
        more = [each | {2: 48} if each is role else each for each in (full, empty, turns)]
        assert not checked(*fewer, counts)
        assert not checked(*more, counts | {48: counts[role[0]]})


def test_slabs_are_the_same_if_stage_and_sums_are() -> None:
    first = SlabContents.nothing(4)
    assert first.same(first.copied())
    for name in ("kinds", "rows", "cols"):
        other = first.copied()
        getattr(other, name)[2] += 1
        assert not first.same(other)
        assert first.same(SlabContents.nothing(4)), "a copy changes independently"
    for stage in list(Stage)[1:]:
        assert not first.same(replace(first, stage=stage))


def test_items_leave_their_sums_at_the_same_places() -> None:
    protocol = Protocol(8, rings.claim().ring)  # type: ignore[arg-type]
    protocol.leave(SlabContents.nothing(4))
    protocol.leave(SlabContents.nothing(4))
    for name in ("rows", "cols"):
        other = SlabContents.nothing(4)
        getattr(other, name)[3] = 1
        with pytest.raises(NotCertified):
            protocol.leave(other)


def test_a_stage_gets_the_same_places_in_every_round() -> None:
    """All boxes of a k-tile together fill the stage, each place once, and as in the round before."""
    protocol = Protocol(16, rings.claim().ring)  # type: ignore[arg-type]
    for places in (np.arange(4), np.arange(4, 8)):
        protocol.bring(places, 0, 0)
    protocol.send(0, {0: np.arange(8)[::-1]})
    for at in (np.arange(4), np.array([*range(7), 6]), np.array([*range(8), 0])):
        with pytest.raises(NotCertified):
            protocol.send(0, {0: at})
    protocol.bring(np.arange(8, 10), 0, 0)
    with pytest.raises(NotCertified):
        protocol.send(0, {0: np.arange(10)})
    with pytest.raises(NotCertified):
        protocol.bring(np.arange(9, 12), 0, 1)
    with pytest.raises(NotCertified):
        protocol.bring(np.arange(2), 1, 0)


def products(first: int = 0, row: int = 0, across: bool = False) -> ProductPlaces:
    """Products that belong to 16 columns of D from ``first`` on, and to 128 rows from ``row`` on."""
    return ProductPlaces(Polynomial.of(0), Polynomial.of(0), np.arange(128) + row, np.arange(16) + first, across)


def test_columns_of_tensor_memory_belong_to_one_item_and_its_elements() -> None:
    columns = TensorColumns()
    columns.allocate(64, 2, np.arange(2))
    columns.multiply(0, 0, products())
    columns.multiply(0, 0, products())
    columns.multiply(0, 16, products(16))
    columns.multiply(1, 32, products())
    for place, first, other in (
        (1, 0, products()),
        (0, 31, products()),
        (0, 0, products(1)),
        (0, 0, products(0, 1)),
        (0, 0, products(0, 0, True)),
    ):
        with pytest.raises(NotCertified):
            columns.multiply(place, first, other)
    columns.leave(0, ItemSums(), 4)
    columns.leave(0, ItemSums(), 4)
    for name in ("kinds", "rows", "cols"):
        other = ItemSums()
        getattr(other, name)[5, 7] = 1
        with pytest.raises(NotCertified):
            columns.leave(0, other, 4)


@pytest.mark.parametrize("address", [0, 48, 49, 63, 64, 127 << 16, 128 << 16, -1 << 16, (5 << 16) + 48])
def test_an_address_of_tensor_memory_lies_in_the_allocation(address: int) -> None:
    columns = TensorColumns()
    columns.allocate(64, 2, np.arange(2))
    lane, column = divmod(address, 1 << 16)
    if 0 <= lane < 128 and column + 16 <= 64:
        assert columns.location(address, 16) == (lane, column)
    else:
        with pytest.raises(NotCertified):
            columns.location(address, 16)
