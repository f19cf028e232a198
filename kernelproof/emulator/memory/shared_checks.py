"""Checks accesses to shared memory: finds earlier accesses that race with a new one, and reports them.

Two accesses race if they touch the same granule, at least one of them writes, and the clocks order neither before the
other. Atomics and strong accesses do not race with each other. ``SharedTags`` has the last accesses to each granule.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.memory.late_copies import faults_of_undefined
from kernelproof.emulator.memory.shared_tags import SharedTags, any_granule
from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.lane_releases import APART
from kernelproof.emulator.state.lanes import SEVERAL
from kernelproof.emulator.state.participants import Participant
from kernelproof.emulator.state.sites import NOWHERE, Site
from kernelproof.emulator.state.suspects import Suspect
from kernelproof.emulator.state.warp_clocks import WarpClocks

# The kinds of hazard. Each names the new access first, then the earlier one after which it is not ordered.
READ_AFTER_WRITE, WRITE_AFTER_WRITE, WRITE_AFTER_READ = "read after write", "write after write", "write after read"


class Granules(NamedTuple):
    """Granules of an access by instruction ``site``. ``lane`` and ``element`` have an entry per granule: the lane that
    touches it now, and the number of its element in the access. ``offset`` has an entry per element of the access: its
    first byte in ``data``."""

    site: int
    lane: Array
    element: Array
    offset: Array


class SharedChecks(SharedTags):
    """The checks of a batch's shared memory, ``size`` bytes per CTA. In all methods ``elements`` has indices of
    elements of the access's width in the batch's shared memory, and ``offset`` their byte offsets there."""

    # Are tags deferred? Most tags become old at a barrier before any check reads them. So the tags of reads by
    # whole warps are written only when a check is about to read them, and the tags and poison of a copy under way only
    # if an access touches its destination before it lands. Subclasses without such barriers switch this off.
    DEFERS = True

    def __init__(self, batch: BatchState, clocks: WarpClocks, size: int, granule: int) -> None:
        # Bytes from one CTA's row to the next; at least 128 unused bytes keep an access from reaching the next row.
        self.size, self.stride = size, -(-size // 128) * 128 + 128
        super().__init__(batch, clocks, batch.count * self.stride, granule)
        # Window addresses [low, high) of the access that was located last. ``locate`` sets them, and the checks of that
        # access read them, so no other access may be located in between.
        self.extent = 0, 0
        self.defers = self.DEFERS and not batch.launch.recording

    def _actors_of(self, tags: Array) -> Array:
        """The actors in tags. A tag is tick << BITS | actor."""
        return np.asarray((tags & ((1 << self.BITS) - 1)).astype(np.int64))

    def _ticks_of(self, tags: Array) -> Array:
        """The ticks in tags, which there count from ``t0`` and are one too large: see ``SharedTags``."""
        return np.asarray((tags >> self.BITS).astype(np.int64) - 1 + self.t0)

    def _ordered(self, lanes: Array, tags: Array, hazard: str) -> Array:  # noqa: ARG002
        """For each tag: does its access happen before the lane's present access? ``hazard``: the kind of hazard; only
        subclasses distinguish kinds."""
        batch = self.batch
        actor, ticks = self._actors_of(tags), self._ticks_of(tags)
        # A lane's own accesses are ordered before it. The tag of "several lanes" may also stand for other lanes of its
        # warp, so only the tag of a single thread counts as the lane's own.
        several = actor >= SEVERAL
        warp_of = np.where(several, actor - SEVERAL, actor >> 5)
        thread = np.where(several, warp_of << 5, actor)
        own: Array = (actor == batch.thread[lanes]) & ~several
        ordered = own | self.clocks.covers(lanes, thread, ticks, several)
        if self.device_order is not None and self.device_order.active and not ordered.all():
            undecided = np.flatnonzero(~ordered)
            ordered[undecided] = self.ordered_by_device(
                lanes[undecided], thread[undecided], several[undecided], ticks[undecided]
            )
        return ordered

    def _some_lanes_released(self, lanes: Array, tags: Array, hazard: str) -> Array:  # noqa: ARG002
        """For each tag whose access does not happen before the lane's present access: does it happen before a release
        by another lane of its warp that the lane has acquired?"""
        batch, out = self.batch, np.zeros(len(tags), bool)
        actor = self._actors_of(tags)
        single = np.flatnonzero(actor < SEVERAL)
        ticks = self._ticks_of(tags[single])
        rows, warps = batch.row_of[lanes[single]], batch.warp[lanes[single]]
        out[single] = self.clocks.released_by_others(rows, warps, actor[single], ticks)
        return out

    def participant(self, tag: int, row: int, granule: int, reader: bool, lane: int | None = None) -> Participant:
        """The other side of a race: the thread or warp that left a tag in a row's shared memory, by a read if
        ``reader``, else by a write. ``lane``: that of this side in the batch, whose own reads are no side."""
        actor = tag & ((1 << self.BITS) - 1)
        cta = self.batch.cta_index(row)
        warp = actor - SEVERAL if actor >= SEVERAL else actor >> 5
        site = self._recorded_site(granule, warp if reader else None, lane)
        if actor >= SEVERAL:
            return Participant(site, cta, agent=f"a lane of warp {warp}")
        return Participant(site, cta, (actor,))

    def _recorded_site(self, granule: int, column: int | None, lane: int | None) -> Site:
        """The instruction of the last read of a granule by a column of readers, other than by ``lane``, or of its last
        write (None)."""
        if self.recorded is None:
            return NOWHERE
        if column is None:
            return self.launch.site(int(self.recorded.writer[granule]))
        if lane is None:
            return self.launch.site(int(self.recorded.readers[granule, column]))
        return self.launch.site(int(self._last_reads(np.array([granule]), np.array([column]), np.array([lane]))[0]))

    def _last_reads(self, granules: Array, columns: Array, lanes: Array) -> Array:
        """The instructions of the last reads of granules by columns of readers, other than by lanes of the batch."""
        assert self.recorded is not None
        return self.recorded.last_reads(granules, columns, self.reader_column[lanes], self.batch.thread[lanes] & 31)

    # --- checks ---
    #
    # Most accesses are ordered by a barrier, so each check first compares tags with ``fresh``: the access of a smaller
    # tag happens before all later ones. Only the others are expanded to one entry per granule and compared with clocks.

    def _check_read(
        self, lanes: Array | None, tags: Array, site: int, offset: Array, can_be_tried: bool = False
    ) -> None:
        """Report a read of unwritten bytes, of the destination of a copy under way, or a read that races with a write.
        ``tags``: the last writers, shape (elements,) or (elements, granules). ``offset``: bytes in ``data``.
        ``can_be_tried``: a repeated execution can give the reads other values."""
        # UNWRITTEN and IN_FLIGHT are larger than every tick, so one comparison finds them too.
        fresh = self._fresh_of(lanes)
        if int(tags.max()) < fresh:
            return
        checked = np.flatnonzero(any_granule(np.asarray(tags >= fresh)))
        flat, element = tags[checked].reshape(-1), checked
        if tags.ndim > 1:
            element = np.repeat(checked, tags.shape[1])
        lane = element if lanes is None else lanes[element]
        granules = Granules(site, lane, element, offset)
        for kind, text, bad, doubtful in faults_of_undefined(flat, self.IN_FLIGHT, self.UNWRITTEN, reading=True):
            writers = None if kind == "uninitialised-shared" else flat
            self._report(kind, text, granules, bad, writers, doubtful=doubtful)
        landed = flat < self.IN_FLIGHT
        if landed.any():
            doubt = partial(self._suspect_readers, lane, offset[element] // self.granule) if can_be_tried else None
            self._check_order(READ_AFTER_WRITE, landed, flat, granules, doubt)

    def _suspect_readers(self, lane: Array, granules: Array, bad: Array) -> bool:
        """Add the present reads of lanes to the suspects. Returns whether a repeated execution can try them."""
        columns, tick = self.reader_column[lane], self.launch.tick
        return all(
            self._add_suspect(Suspect(int(column), tick, tick, granules[bad & (columns == column)]))
            for column in np.unique(columns[bad])
        )

    def _add_suspect(self, suspect: Suspect) -> bool:
        """Add a suspect. Returns whether a repeated execution can try it."""
        ctas = len(np.unique(suspect.granules * self.granule // self.stride))
        return self.launch.suspects.add(int(self.batch.ctas[0]), suspect, ctas)

    def _suspect_column(self, lane: Array, column: int, granules: Array, tags: Array, bad: Array) -> bool:
        """Add to the suspects all reads of a column that do not happen before the lanes' present access. Returns
        whether a repeated execution can try them. ``tags``: those of the last reads."""
        horizon = self._horizon_of(lane[bad], column)
        # A lane's read that other lanes of its warp have not released may be older than the horizon of the warp.
        first = int(np.minimum(horizon, self._ticks_of(tags[bad])).min())
        return self._add_suspect(Suspect(column, first, self.launch.tick, np.unique(granules[bad])))

    def _horizon_of(self, lanes: Array, column: int) -> Array:
        """Per lane: the tick before which reads of a column happen before its present access."""
        batch = self.batch
        return self.clocks.horizon(batch.row_of[lanes], batch.warp[lanes], np.full(len(lanes), column))

    def trial_values(self, values: Array, lanes: Array | None, elements: Array) -> Array:
        """The values that a read returns: in a trial, those of suspects are replaced."""
        trial, per_element = self.launch.trial, values.dtype.itemsize // self.granule
        if trial is None:
            return values
        columns = self.reader_column if lanes is None else self.reader_column[lanes]
        granules = elements[:, None] * per_element + np.arange(per_element)
        return trial.replace_values(values, int(self.batch.ctas[0]), self.launch.tick, columns, granules)

    def _check_write(
        self,
        lanes: Array | None,
        width: int,
        elements: Array,
        site: int,
        offset: Array,
        same: Callable[[], Array] | None = None,
        after_reads: bool = True,
    ) -> None:
        """Report a write to elements that races with earlier accesses, or overwrites the destination of a copy
        under way. ``same``: a mask of the elements that already hold the value; such a write does not race with the
        last one. ``after_reads``: also check earlier reads."""
        if not self._extent_may_race(lanes):
            return
        writer, latest, readers = self.rows[width]
        tags, reads = writer.take(elements, axis=0), latest.take(elements, axis=0)
        fresh = self._fresh_of(lanes)
        recent_tags = ((tags >= fresh) & (tags != self.UNWRITTEN)) | (reads >= fresh)
        if not recent_tags.any():
            return
        checked = np.flatnonzero(any_granule(recent_tags))
        per_element = tags.shape[1] if tags.ndim > 1 else 1
        element = np.repeat(checked, per_element)
        lane = element if lanes is None else lanes[element]
        granules = Granules(site, lane, element, offset)
        flat = tags[checked].reshape(-1)
        for kind, text, bad, doubtful in faults_of_undefined(flat, self.IN_FLIGHT, self.UNWRITTEN, reading=False):
            self._report(kind, text, granules, bad, flat, doubtful=doubtful)
        racing = (flat >= fresh) & (flat < self.IN_FLIGHT)
        if same is not None and racing.any():
            racing &= ~np.repeat(same()[checked], per_element)
        self._check_order(WRITE_AFTER_WRITE, racing, flat, granules)
        if not after_reads or not (reads[checked] >= fresh).any():
            return
        last_reads = readers[elements[checked]].reshape(-1, self.columns)
        recent = last_reads >= fresh
        # A thread does not race with its own reads, whose tags are in the column of its warp. For each granule, ``own``
        # selects the entry in the column of the lane that writes it.
        own = np.arange(0, recent.size, self.columns) + self.reader_column[lane]
        recent.reshape(-1)[own] &= (last_reads.reshape(-1)[own] & ((1 << self.BITS) - 1)) != self.actor[lane]
        # One finding per column, because a finding names one earlier reader.
        for column in np.flatnonzero(recent.any(axis=0)) if recent.any() else ():
            places = (elements[checked, None] * per_element + np.arange(per_element)).reshape(-1)
            tags = last_reads[:, column]
            doubt = partial(self._suspect_column, lane, int(column), places, tags)
            self._check_order(WRITE_AFTER_READ, recent[:, column], tags, granules, doubt)

    def _check_order(
        self,
        hazard: str,
        bad: Array,
        tags: Array,
        granules: Granules,
        doubt: Callable[[Array], bool] | None = None,
    ) -> None:
        """Report those of the ``bad`` granules whose access does not happen after that of their tags. ``doubt``: adds
        the reads to the suspects, and returns whether a repeated execution can show if their values matter; the finding
        is doubtful then."""
        # A new array, because the caller uses its mask again. Each step tests only the granules that remain.
        bad = bad & ((tags & ((1 << self.BITS) - 1)) != self.actor[granules.lane])
        if bad.any():
            bad[bad] = ~self._ordered(granules.lane[bad], tags[bad], hazard)
            if bad.any():
                doubtful = doubt is not None and doubt(bad)
                self._report_unordered(hazard, bad, tags, granules, doubtful)

    def _report_unordered(self, hazard: str, bad: Array, tags: Array, granules: Granules, doubtful: bool) -> None:
        """Report races at the ``bad`` granules, with a reason for those that another lane's release does not cover."""
        partly_released = bad.copy()
        partly_released[bad] = self._some_lanes_released(granules.lane[bad], tags[bad], hazard)
        for part, why in ((bad & ~partly_released, " without a barrier between"), (partly_released, f": {APART}")):
            if part.any():
                reader = hazard == WRITE_AFTER_READ
                self._report("shared-race", hazard + why, granules, part, tags, doubtful=doubtful, reader=reader)

    def _report(
        self,
        kind: str,
        message: str,
        granules: Granules,
        bad: Array,
        tags: Array | None = None,
        *,
        doubtful: bool = False,
        reader: bool = False,
    ) -> None:
        """Report a finding at the ``bad`` granules. ``tags``: those of the earlier accesses, if these are a side of the
        finding. ``reader``: the tags are of reads."""
        parts = [bad] if tags is None or self.recorded is None else self._by_site(granules, bad, tags, reader)
        for part in parts:
            self._report_part(kind, message, granules, part, tags, doubtful, reader)

    def _by_site(self, granules: Granules, bad: Array, tags: Array, reader: bool) -> list[Array]:
        """Split the mask ``bad`` by the instructions that have left the tags, since each pair of instructions is a
        finding of its own."""
        assert self.recorded is not None
        marked = np.flatnonzero(bad)
        # The granules of an element follow each other.
        element = granules.element
        starts = np.flatnonzero(np.concatenate(([True], element[1:] != element[:-1])))
        number_in_element = np.arange(len(element)) - np.repeat(starts, np.diff(starts, append=len(element)))
        granule_numbers = granules.offset[element[marked]] // self.granule + number_in_element[marked]
        if reader:
            sites = self._last_reads(granule_numbers, self._columns_of(tags[marked]), granules.lane[marked])
        else:
            sites = self.recorded.writer[granule_numbers]
        out = []
        for site in np.unique(sites):
            part = np.zeros(len(bad), bool)
            part[marked[sites == site]] = True
            out.append(part)
        return out

    def _columns_of(self, tags: Array) -> Array:
        """For each tag, the column of readers of the warp or copy that has left it."""
        actor = self._actors_of(tags)
        return np.where(actor >= SEVERAL, actor - SEVERAL, actor >> 5)

    def _report_part(
        self,
        kind: str,
        message: str,
        granules: Granules,
        bad: Array,
        tags: Array | None,
        doubtful: bool,
        reader: bool,
    ) -> None:
        """Report a finding at the ``bad`` granules as one; see ``_report``."""
        site, lane, element, offset = granules
        lanes = np.unique(lane[bad])
        first = int(np.flatnonzero(bad)[0])
        cta = int(self.batch.row_of[lanes[0]])
        threads = self.batch.thread[lanes[self.batch.row_of[lanes] == cta]]
        offset_in_data = int(offset[element[first]])
        # The granules of an element follow each other.
        granule = offset_in_data // self.granule + int(np.count_nonzero(element[:first] == element[first]))
        earlier = None if tags is None else self.participant(int(tags[first]), cta, granule, reader, int(lane[first]))
        self.batch.report(
            kind, message, site, cta, threads,
            address=offset_in_data % self.stride, count=len(lanes), doubtful=doubtful, other=earlier,
        )  # fmt: skip

    def _extent_may_race(self, lanes: Array | None) -> bool:
        """May a write by lanes (None: all) to the bytes that were located last race? This is a cheap test of the
        extent, of which only False is certain."""
        if not self.defers:
            return True
        # Lanes write to their own CTAs only. There, accesses with tags below ``fresh`` happen before the write.
        fresh = self._fresh_of(lanes)
        self._write_deferred_tags(self.late_reads.take(*self.extent, fresh))
        return self.recent.overlap(*self.extent, fresh)

    def _elements_may_race(self, elements: Array, width: int) -> bool:
        """May a write to these elements race? This is a cheap test of their tags, of which only False is certain."""
        writer, latest, _ = self.rows[width]
        fresh = max(self.fresh, 1)
        if bool((latest.take(elements, axis=0) >= fresh).any()):
            return True
        tags = writer.take(elements, axis=0)
        return bool(((tags >= fresh) & (tags != self.UNWRITTEN)).any())
