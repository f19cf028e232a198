"""Proves that tags, which say who last accessed each granule of memory, are the same as runs and in a plain table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelproof.emulator.hopper.cluster_order import ClusterOrder
from kernelproof.emulator.memory.recorded import SEVERAL_LANES, RecordedSites
from kernelproof.emulator.memory.shared_tags import SharedTags, any_granule, put_in_granules
from kernelproof.emulator.memory.tags import THREAD, GranuleRun, Tags
from kernelproof.emulator.state.arrays import groups_are_equal

# Granules of the memory that is tagged.
GRANULES = 64


@st.composite
def runs(draw: st.DrawFn) -> GranuleRun:
    """Draws a run of granules that lanes own in order, one or two each."""
    per = draw(st.sampled_from((1, 2)))
    start = draw(st.integers(0, GRANULES // 2))
    lanes = draw(st.integers(1, (GRANULES - start) // per))
    return GranuleRun(start, start + lanes * per, per, draw(st.sampled_from((0, 1, 7))), draw(st.integers(1, 3)) << 34)


@pytest.mark.parametrize("tags", [SharedTags, ClusterOrder])
def test_ticks_and_actors_of_a_tag_do_not_meet(tags: type[SharedTags]) -> None:
    largest = (tags.MAX_TICK - 1) << tags.BITS | (1 << tags.BITS) - 1
    assert largest < tags.IN_FLIGHT
    assert tags.IN_FLIGHT.bit_count() == 1
    assert tags.IN_FLIGHT | (1 << tags.BITS) - 1 < tags.UNWRITTEN <= np.iinfo(tags.TAG).max


@given(st.lists(st.tuples(st.booleans(), runs()), max_size=12))
def test_runs_are_granules(accesses: list[tuple[bool, GranuleRun]]) -> None:
    tags = Tags(GRANULES, recording=False)
    read, written = np.zeros(GRANULES, np.int64), np.zeros(GRANULES, np.int64)
    for is_write, run in accesses:
        stamp = np.repeat(np.arange((run.stop - run.start) // run.per_thread) + run.thread, run.per_thread) | run.moment
        here = slice(run.start, run.stop)
        strangers = [(table[here] != 0) & (table[here] & THREAD != stamp & THREAD) for table in (read, written)]
        if not (tags.write_run(run) if is_write else tags.read_run(run)):
            break
        assert not np.any(strangers)
        (written if is_write else read)[here] = stamp
    assert (tags.is_read, tags.is_written) == (bool(read.any()), bool(written.any()))
    assert np.array_equal(tags.read, read)
    assert np.array_equal(tags.written, written)
    assert not tags.read_run(GranuleRun(0, 1, 1, 0, 1 << 34))


def test_the_same_threads_again_keep_their_run() -> None:
    tags = Tags(GRANULES, recording=False)
    run = GranuleRun(8, 16, 1, 32, 1 << 34)
    assert tags.read_run(run)
    assert tags.write_run(run._replace(moment=2 << 34))
    assert tags.write_run(GranuleRun(16, 24, 1, 40, 2 << 34))
    assert not tags.write_run(GranuleRun(15, 17, 1, 39, 3 << 34))
    assert not tags.read_run(GranuleRun(8, 16, 1, 33, 3 << 34))
    assert tags.written[8] == 2 << 34 | 32


@given(st.lists(st.tuples(st.booleans(), runs()), max_size=6), st.integers(0, 6), st.booleans())
def test_granules_that_become_narrower_keep_their_tags(
    accesses: list[tuple[bool, GranuleRun]], moment: int, as_table: bool
) -> None:
    """The granules of ``tags`` are halved after ``moment`` accesses, those of ``narrow`` are halves from the start.

    ``as_table``: whether ``tags`` is no longer stored as runs by then, because its table was read.
    """
    tags, narrow = Tags(GRANULES, recording=True, shift=2), Tags(2 * GRANULES, recording=True, shift=1)
    for number, (is_write, run) in enumerate(accesses):
        if number == moment:
            assert not as_table or len(tags.read) == GRANULES
            tags.refine(1)
        # The same bytes as granules of ``narrow``, and of ``tags`` once these are halved.
        parts = 1 if number >= moment else 2
        half = run._replace(start=2 * run.start, stop=2 * run.stop, per_thread=2 * run.per_thread)
        kept = [
            t.write_run(r) if is_write else t.read_run(r)
            for t, r in ((tags, run if parts == 2 else half), (narrow, half))
        ]
        assert kept[0] == kept[1] or as_table
        granules = np.arange(run.start, run.stop)
        wide = granules if parts == 2 else (2 * granules[:, None] + np.arange(2)).reshape(-1)
        for table, places in ((tags, wide), (narrow, (2 * granules[:, None] + np.arange(2)).reshape(-1))):
            table.keep_earlier(by_other_cta=is_write, granules=places, tags=np.full(len(places), 7 << 34), sites=3)
            table.record_read_size(places, 5)
    if len(accesses) <= moment:
        tags.refine(1)
    assert (tags.granules, tags.shift) == (2 * GRANULES, 1)
    if not as_table:
        assert np.array_equal(tags.written, narrow.written)
        assert np.array_equal(tags.read, narrow.read)
    for far, earlier in narrow.earlier.items():
        assert np.array_equal(tags.earlier[far].tags, earlier.tags)
        assert np.array_equal(tags.earlier[far].sites, earlier.sites)
    assert accesses == [] or np.array_equal(tags.read_sizes, narrow.read_sizes)


@pytest.mark.parametrize("granules", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("kind", [np.uint32, np.uint64, bool])
def test_elements_of_several_granules(granules: int, kind: type[np.generic]) -> None:
    """Compares three functions on elements of this many granules with NumPy."""
    draw = np.random.default_rng(granules)
    shape = (40, granules) if granules > 1 else (40,)
    table = draw.integers(2, size=shape).astype(kind)
    at, values = draw.integers(40, size=60), draw.integers(2, size=60).astype(kind)
    expected = table.copy()
    expected[at] = values.reshape(-1, *[1] * (table.ndim - 1))
    put_in_granules(table, at, values)
    assert (table == expected).all()
    flat = np.repeat(np.arange(8), granules)
    assert groups_are_equal(flat, granules)
    for i in range(len(flat)):
        assert groups_are_equal(np.where(np.arange(len(flat)) == i, -1, flat), granules) == (granules == 1)
    assert granules == 1 or not groups_are_equal(np.repeat(np.arange(16), granules // 2), granules)
    few = draw.random(shape) < 0.2
    assert (any_granule(few) == few.reshape(40, -1).any(axis=1)).all()


@pytest.mark.parametrize("seed", range(12))
def test_recorded_sites_are_those_of_the_whole_history(seed: int) -> None:
    """The last read of a granule by a column of readers other than by one lane of it, and the last write."""
    generator = np.random.default_rng(seed)
    granules, columns, lanes = 16, 3, 4
    recorded = RecordedSites(granules, columns)
    reads: dict[tuple[int, int], list[tuple[int, int]]] = {
        (granule, column): [(SEVERAL_LANES, -1)] for granule in range(granules) for column in range(columns)
    }
    written = [-1] * granules
    for site in range(40):
        per = int(generator.choice((1, 2, 4)))
        elements = generator.integers(0, granules // per, lanes)
        if (kind := generator.integers(4)) == 0:
            recorded.record_write(elements, per, site)
            for element in elements:
                written[element * per : element * per + per] = [site] * per
            continue
        column = int(generator.integers(columns)) if kind == 1 else generator.integers(0, columns, lanes)
        lane = None if kind == 2 else generator.permutation(lanes)
        recorded.record_read(elements, per, column, site, lane)
        readers: dict[tuple[int, int], set[int]] = {}
        for i, (element, of) in enumerate(zip(elements, np.broadcast_to(column, lanes), strict=True)):
            for granule in range(element * per, element * per + per):
                readers.setdefault((granule, int(of)), set()).add(SEVERAL_LANES if lane is None else int(lane[i]))
        for place, several in readers.items():
            reads[place].append((several.pop() if len(several) == 1 else SEVERAL_LANES, site))
    assert recorded.writer.tolist() == written
    places = np.array([(*place, own, lane) for place in reads for own in range(columns) for lane in range(lanes)])
    expected = [
        next(site for reader, site in reversed(reads[granule, column]) if (column, reader) != (own, lane))
        for granule, column, own, lane in places.tolist()
    ]
    assert recorded.last_reads(*places.T).tolist() == expected
