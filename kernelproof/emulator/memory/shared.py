"""Shared memory of a batch: one row of bytes per CTA, checked accesses, atomics and polled flags.

Two accesses race if they touch the same granule, at least one of them writes, and the clocks order neither before the
other. Atomics and strong accesses do not race with each other. ``SharedTags`` keeps the last accesses to each granule.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.memory.late_copies import ENDLESS, LateCopies, LateCopy, undefined
from kernelproof.emulator.memory.late_reads import LateRead
from kernelproof.emulator.memory.located import Located
from kernelproof.emulator.memory.shared_tags import SharedTags
from kernelproof.emulator.state.arrays import MOVER, SHIFT, Array, Mask, equal_bits
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.lanes import SEVERAL
from kernelproof.emulator.state.participants import Participant
from kernelproof.emulator.state.scopes import VOLATILE
from kernelproof.emulator.state.sites import NOWHERE, Site
from kernelproof.emulator.state.suspects import Suspect
from kernelproof.emulator.state.warp_clocks import WarpClocks

# Shared addresses start here: the first KiB of the window belongs to the system on recent devices.
WINDOW_START = 1024

# The kinds of hazard. Each names the present access first and then the earlier one that it does not come after.
READ_AFTER_WRITE, WRITE_AFTER_WRITE, WRITE_AFTER_READ = "read after write", "write after write", "write after read"

# lanes (None: all), element index, byte offset in the batch's shared memory.
SharedAccess = tuple[Array | None, Array, Array]


class Granules(NamedTuple):
    """The granules of an access, by instruction ``site``, that earlier accesses have touched. ``lane`` and ``element``
    have one entry per granule: the lane that touches it now, and the number of its element in the access. ``offset``
    has one entry per element: its first byte in ``data``."""

    site: int
    lane: Array
    element: Array
    offset: Array


class SharedMemory(SharedTags):
    """``size`` bytes of shared memory per CTA. Addresses are window addresses: uint32, one per lane of the batch."""

    # Deferral: most tags become old at a barrier before any check reads them. So the tags of reads by whole warps are
    # written only when a check is about to read them, and the tags and poison of a copy under way only if an access
    # touches its destination before it lands. Subclasses in which no tag becomes old at a barrier switch this off.
    DEFERS = True

    def __init__(self, batch: BatchState, clocks: WarpClocks, size: int, granule: int) -> None:
        # Bytes from one CTA's row to the next; at least 128 unused bytes keep an access from reaching the next row.
        self.size, self.stride = size, -(-size // 128) * 128 + 128
        super().__init__(batch, clocks, batch.count * self.stride, granule)
        self.counters = batch.launch.counters
        poison = batch.launch.poison
        self.data: Array = np.full(batch.count * self.stride, poison, np.uint8)
        self.poison = {w: np.frombuffer(bytes([poison]) * 16, t)[0] for w, t in MOVER.items()}
        # All views share the bytes of ``data``. The stride is a multiple of 128, so elements of any width are aligned.
        self.views: dict[int, Array] = {w: self.data.view(t) for w, t in MOVER.items()}
        # Per lane: what to add to a window address to get an offset in ``data``.
        self.row: Array = batch.row_of.astype(np.int64) * self.stride - WINDOW_START
        # Window addresses [low, high) of the access that was located last. ``locate`` sets it, and the checks of that
        # access read it, so no other access may be located in between.
        self.extent = 0, 0
        self.located = Located(batch.size)
        self.defers = self.DEFERS and not batch.launch.recording
        self.late_copies = LateCopies()

    def _ordered(self, lanes: Array, tags: Array, hazard: str) -> Array:  # noqa: ARG002
        """For each tag: does its access happen before what the lane does now? ``hazard``: the kind of order that is
        needed; only subclasses distinguish them."""
        batch = self.batch
        # A tag is tick << BITS | actor. Ticks in tags count from ``t0`` and are one too large: see ``SharedTags``.
        actor = (tags & ((1 << self.BITS) - 1)).astype(np.int64)
        ticks = (tags >> self.BITS).astype(np.int64) - 1 + self.t0
        # A lane's own access is ordered before it, but the tag of "several lanes" may stand for other lanes of the warp
        # too. So only the tag of a single thread counts as the lane's own.
        several = actor >= SEVERAL
        warp_of = np.where(several, actor - SEVERAL, actor >> 5)
        own: Array = (actor == batch.thread[lanes]) & ~several
        ordered = own | (ticks < self.clocks.horizon(batch.row_of[lanes], batch.warp[lanes], warp_of))
        if self.device_order is not None and self.device_order.active and not ordered.all():
            left = np.flatnonzero(~ordered)
            thread = np.where(several, warp_of << 5, actor)[left]
            ordered[left] = self.ordered_by_device(lanes[left], thread, several[left], ticks[left])
        return ordered

    def participant(self, tag: int, row: int, granule: int, reader: bool) -> Participant:
        """The other side of a race: who left a tag in a row's shared memory, as ``reader`` or as writer."""
        actor = tag & ((1 << self.BITS) - 1)
        cta = self.batch.cta_index(row)
        warp = actor - SEVERAL if actor >= SEVERAL else actor >> 5
        site = self._recorded_site(granule, warp if reader else None)
        if actor >= SEVERAL:
            return Participant(site, cta, agent=f"a lane of warp {warp}")
        return Participant(site, cta, (actor,))

    def _recorded_site(self, granule: int, column: int | None) -> Site:
        """The instruction of the last read of a granule by a column of readers, or of its last write (None)."""
        return NOWHERE if self.recorded is None else self.launch.site(self.recorded.last(granule, column))

    # --- checks ---
    #
    # Most accesses are ordered by a barrier, so each check first compares tags with ``fresh``: a smaller tag happens
    # before every access to come. Only the others are expanded to one entry per granule and compared with the clocks.

    def _check_read(self, lanes: Array | None, tags: Array, site: int, offset: Array, tried: bool = False) -> None:
        """Report a read of unwritten bytes, of bytes of a copy under way, or one that races with a write. ``tags``: the
        last writers, (elements,) or (elements, granules). ``offset``: bytes in ``data``. ``tried``: a further execution
        can give the reads other values."""
        # UNWRITTEN and IN_FLIGHT are larger than every tick, so one comparison finds them too. ``max`` excludes tag 0.
        suspicious: Array = np.asarray(tags >= max(self.fresh, 1))
        which = np.flatnonzero(suspicious.any(axis=1) if tags.ndim > 1 else suspicious)
        if which.size == 0:
            return
        flat, element = tags[which].reshape(-1), which
        if tags.ndim > 1:
            element = np.repeat(which, tags.shape[1])
        lane = element if lanes is None else lanes[element]
        granules = Granules(site, lane, element, offset)
        for kind, text, bad, doubtful in undefined(flat, self.IN_FLIGHT, self.UNWRITTEN, reading=True):
            writers = None if kind == "uninitialised-shared" else flat
            self._report(kind, text, granules, bad, writers, doubtful=doubtful)
        landed = flat < self.IN_FLIGHT
        if landed.any():
            doubt = partial(self._suspect_readers, lane, offset[element] // self.granule) if tried else None
            self._check_order(READ_AFTER_WRITE, landed, flat, granules, doubt)

    def _suspect_readers(self, lane: Array, granules: Array, bad: Array) -> bool:
        """Add current reads of lanes to the suspects; returns whether a further execution can try them."""
        columns, tick = self.reader_column[lane], self.launch.tick
        return all(
            self._add_suspect(Suspect(int(column), tick, tick, granules[bad & (columns == column)]))
            for column in np.unique(columns[bad])
        )

    def _add_suspect(self, suspect: Suspect) -> bool:
        ctas = len(np.unique(suspect.granules * self.granule // self.stride))
        return self.launch.suspects.add(int(self.batch.ctas[0]), suspect, ctas)

    def _suspect_column(self, lane: Array, column: int, granules: Array, bad: Array) -> bool:
        """Add all reads of a column that the lanes do not know to be over to the suspects; returns whether a further
        execution can try them."""
        first = int(self._over(lane[bad], column).min())
        return self._add_suspect(Suspect(column, first, self.launch.tick, np.unique(granules[bad])))

    def _over(self, lanes: Array, column: int) -> Array:
        """Per lane: the tick before which it knows reads of a column to have happened."""
        batch = self.batch
        return self.clocks.horizon(batch.row_of[lanes], batch.warp[lanes], np.full(len(lanes), column))

    def tried(self, values: Array, lanes: Array | None, at: Array) -> Array:
        """The values of a read; in a trial, those of suspects are replaced."""
        trial, per = self.launch.trial, values.dtype.itemsize // self.granule
        if trial is None:
            return values
        columns = self.reader_column if lanes is None else self.reader_column[lanes]
        granules = at[:, None] * per + np.arange(per)
        return trial.values(values, int(self.batch.ctas[0]), self.launch.tick, columns, granules)

    def _check_write(
        self,
        lanes: Array | None,
        width: int,
        at: Array,
        site: int,
        offset: Array,
        same: Callable[[], Array] | None = None,
        after_reads: bool = True,
    ) -> None:
        """Report a write to elements ``at`` that races with earlier accesses or meets a copy under way. ``same``: which
        elements already hold the value; such a write is harmless whichever comes first. ``after_reads``: earlier reads
        count, too."""
        if not self._may_be_hot():
            return
        writer, latest, readers = self.rows[width]
        tags, reads = writer[at], latest[at]
        fresh = max(self.fresh, 1)
        hot = ((tags >= fresh) & (tags != self.UNWRITTEN)) | (reads >= fresh)
        which = np.flatnonzero(hot.any(axis=1) if hot.ndim > 1 else hot)
        if which.size == 0:
            return
        per = tags.shape[1] if tags.ndim > 1 else 1
        element = np.repeat(which, per)
        lane = element if lanes is None else lanes[element]
        granules = Granules(site, lane, element, offset)
        flat = tags[which].reshape(-1)
        for kind, text, bad, doubtful in undefined(flat, self.IN_FLIGHT, self.UNWRITTEN, reading=False):
            self._report(kind, text, granules, bad, flat, doubtful=doubtful)
        clash = (flat >= fresh) & (flat < self.IN_FLIGHT)
        if same is not None and clash.any():
            clash &= ~np.repeat(same()[which], per)
        self._check_order(WRITE_AFTER_WRITE, clash, flat, granules)
        if not after_reads or not (reads[which] >= fresh).any():
            return
        last_reads = readers[at[which]].reshape(-1, self.columns)
        recent = last_reads >= fresh
        # A thread does not race with its own reads. Those stand in the column of the thread's warp, so ``own`` selects,
        # for each granule, the entry in the column of the lane that writes it.
        own = np.arange(0, recent.size, self.columns) + self.reader_column[lane]
        recent.reshape(-1)[own] &= (last_reads.reshape(-1)[own] & ((1 << self.BITS) - 1)) != self.actor[lane]
        # One finding per column, because a finding names one earlier reader.
        for column in np.flatnonzero(recent.any(axis=0)) if recent.any() else ():
            places = (at[which, None] * per + np.arange(per)).reshape(-1)
            doubt = partial(self._suspect_column, lane, int(column), places)
            self._check_order(WRITE_AFTER_READ, recent[:, column], last_reads[:, column], granules, doubt)

    def _check_order(
        self,
        hazard: str,
        bad: Array,
        tags: Array,
        granules: Granules,
        doubt: Callable[[Array], bool] | None = None,
    ) -> None:
        """Report those of the ``bad`` granules whose access does not happen after that of their tags. ``doubt``: makes
        the finding doubtful if a further execution can show whether the values that these reads returned matter."""
        # A new array, because the caller's mask is used again. Each step tests only the granules that are left.
        bad = bad & ((tags & ((1 << self.BITS) - 1)) != self.actor[granules.lane])
        if bad.any():
            bad[bad] = ~self._ordered(granules.lane[bad], tags[bad], hazard)
            if bad.any():
                doubtful = doubt is not None and doubt(bad)
                self._report_unordered(hazard, bad, tags, granules, doubtful)

    def _report_unordered(self, hazard: str, bad: Array, tags: Array, granules: Granules, doubtful: bool) -> None:
        text = f"{hazard} without a barrier between"
        reader = hazard == WRITE_AFTER_READ
        self._report("shared-race", text, granules, bad, tags, doubtful=doubtful, reader=reader)

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
        """Report a finding at the ``bad`` granules. ``tags``: who touched each granule before, if that is a side of the
        finding; ``reader``: the tags are of reads."""
        parts = [bad] if tags is None or self.recorded is None else self._by_site(granules, bad, tags, reader)
        for part in parts:
            self._report_part(kind, message, granules, part, tags, doubtful, reader)

    def _by_site(self, granules: Granules, bad: Array, tags: Array, reader: bool) -> list[Array]:
        """The ``bad`` granules, by the instructions that have left their tags: each pair is a finding of its own."""
        assert self.recorded is not None
        which = np.flatnonzero(bad)
        # The granules of an element follow each other.
        element = granules.element
        starts = np.flatnonzero(np.concatenate(([True], element[1:] != element[:-1])))
        within = np.arange(len(element)) - np.repeat(starts, np.diff(starts, append=len(element)))
        at = granules.offset[element[which]] // self.granule + within[which]
        sites = self.recorded.readers[at, self._columns_of(tags[which])] if reader else self.recorded.writer[at]
        out = []
        for site in np.unique(sites):
            part = np.zeros(len(bad), bool)
            part[which[sites == site]] = True
            out.append(part)
        return out

    def _columns_of(self, tags: Array) -> Array:
        """The columns of the readers that left these tags."""
        actor = (tags & ((1 << self.BITS) - 1)).astype(np.int64)
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
        site, lane, element, offset = granules
        lanes = np.unique(lane[bad])
        first = int(np.flatnonzero(bad)[0])
        cta = int(self.batch.row_of[lanes[0]])
        threads = self.batch.thread[lanes[self.batch.row_of[lanes] == cta]]
        at = int(offset[element[first]])
        # The granules of an element follow each other.
        granule = at // self.granule + int(np.count_nonzero(element[:first] == element[first]))
        earlier = None if tags is None else self.participant(int(tags[first]), cta, granule, reader)
        self.batch.report(
            kind, message, site, cta, threads,
            address=at % self.stride, count=len(lanes), doubtful=doubtful, other=earlier,
        )  # fmt: skip

    # --- places ---

    def of_cta(self, address: Array, m: Mask, site: int) -> Array:  # noqa: ARG002
        """Addresses in the lane's own CTA, in the form that the other methods take. Without clusters: unchanged."""
        return address

    def of_cluster(self, address: Array) -> Array:
        """Addresses in any CTA of the cluster, in the form that the other methods take. Without clusters: unchanged."""
        return address

    def locate(self, address: Array, width: int, m: Mask, site: int) -> SharedAccess | None:
        """Check bounds and alignment; returns (lanes, element index, byte offset), or None if no lane is left."""
        self._follow_tick()
        lanes, whole = None, address
        if m is None:
            place = self.located.find(address, width, site)
            if place is not None:
                at, offset, self.extent = place
                self.leave_copies(*self.extent)
                return None, at, offset
        else:
            lanes = self.batch.lanes(m)
            if lanes.size == 0:
                return None
            address = address[lanes]
        low, high = int(address.min()), int(address.max())
        self.extent = low, high + width
        self.leave_copies(*self.extent)
        top = WINDOW_START + self.size - width
        if low < WINDOW_START or high > top or int(np.bitwise_or.reduce(address)) & (width - 1):
            lanes, address = self._drop_invalid(address, width, self.batch.everyone if lanes is None else lanes, site)
            if lanes.size == 0:
                return None
        if lanes is None:
            offset = address + self.row
            at = offset >> SHIFT[width]
            self.located.remember(whole, width, site, at, offset, self.extent)
            return None, at, offset
        offset = address + self.row[lanes]
        return lanes, offset >> SHIFT[width], offset

    def _drop_invalid(self, address: Array, width: int, lanes: Array, site: int) -> tuple[Array, Array]:
        wide = address.astype(np.int64)
        outside = (wide < WINDOW_START) | (wide > WINDOW_START + self.size - width)
        misaligned = ((wide & (width - 1)) != 0) & ~outside
        beyond = f"{width}-byte access outside the {self.size} bytes of shared memory"
        uneven = f"{width}-byte access at an address that is no multiple of {width}"
        for bad, kind, text in ((outside, "shared-out-of-bounds", beyond), (misaligned, "shared-misaligned", uneven)):
            if bad.any():
                at = int(wide[np.flatnonzero(bad)[0]]) - WINDOW_START
                self.batch.report_lanes(kind, text, site, lanes[bad], at)
        good = ~(outside | misaligned)
        return lanes[good], address[good]

    # --- loads and stores ---

    def load(self, address: Array, width: int, m: Mask, site: int, strong: int = 0) -> Array:
        """Read ``width`` bytes per lane; returns an array of MOVER[width], shape (lanes of the batch,).

        ``strong``: the load polls a flag (see ``state.scopes``). It does not race with strong writes, and it learns
        what they published.
        """
        access = self.locate(address, width, m, site)
        if access is None:
            return self.batch.poison(width)
        lanes, at, offset = access
        if self.counters is not None:
            self.counters.shared("ld.shared", address, width, m)
        values: Array = self.views[width][at]
        if self.hazards and strong == VOLATILE:
            self._read_volatile(lanes, at, width, site, offset)
        elif self.hazards and strong:
            values = self._poll(lanes, at, width, site, offset, strong, values)
        elif self.hazards:
            self._read(lanes, at, width, site, offset)
        if self.launch.trial is not None and strong in (0, VOLATILE):
            values = self.tried(values, lanes, at)
        return values if lanes is None else self.batch.spread(values, lanes, width)

    def _read(self, lanes: Array | None, at: Array, width: int, site: int, offset: Array) -> None:
        """Check a read and leave its tags.

        A column of readers has room for one tag per granule, but several lanes of its warp may read the granule. So the
        tag is that of the thread while it is the only reader since the warp last synchronised, else that of "several
        lanes of the warp".
        """
        per, some = width // self.granule, slice(None) if lanes is None else lanes
        self._leave_tags(self.late.take(*self.extent))
        writer, latest, _ = self.rows[width]
        self._check_read(lanes, writer[at], site, offset, tried=True)
        self.recent.add(*self.extent, self.stamp)
        lane_tag, column = self.lane_tag[some], self.reader_column[some]
        first = at * (per * self.columns) + column
        before = latest[at]
        latest[at] = own_tag = lane_tag if per == 1 else lane_tag[:, None]
        # Every lane stores its tag and then reads it back: if several lanes share a granule, only the last one's is
        # left. Most granules have one reader, in this instruction and since the CTA last synchronised.
        is_alone = not (before >= max(self.fresh, 1)).any() and bool((latest[at] == own_tag).all())
        tag = lane_tag if is_alone else self._tag_beside_others(first, lane_tag, some)
        for k in range(per):
            self.reader_tags[first + k * self.columns] = tag
        # Lanes that share a granule in this very instruction: only the last one's tag stands there.
        back = np.zeros(0, bool) if is_alone else self.reader_tags[first] != tag
        if back.any():
            for k in range(per):
                self.reader_tags[first[back] + k * self.columns] = self.collective_tag[some][back]
        if self.recorded is not None:
            self.recorded.read(at, per, column, site)

    def _read_volatile(self, lanes: Array | None, at: Array, width: int, site: int, offset: Array) -> None:
        """Check a volatile read as a weak one, but for granules that an atomic has written; see ``VOLATILE``."""
        everyone = self.batch.everyone if lanes is None else lanes
        plain = self._is_plain(at, width)
        if plain.any():
            self._read(everyone[plain], at[plain], width, site, offset[plain])
        self.volatile_rows(width)[at] = True

    def _tag_beside_others(self, first: Array, lane_tag: Array, some: Array | slice) -> Array:
        """The tags of lanes that read granules which other lanes of their warps may have read."""
        old, actor = self.reader_tags[first], (1 << self.BITS) - 1
        # Reads before the warp last synchronised do not count: they happen before all that its lanes do now. Where CTAs
        # have passed different barriers, ``fresh`` will not do: it is as old as the CTA that waits or ended first.
        fresh: Array = np.asarray(self.fresh, self.TAG)
        if not self.clocks.is_even:
            row, warp = self.batch.row_of[some], self.batch.warp[some]
            horizon = (self.clocks.horizon(row, warp, warp) - self.t0 + 1) << self.BITS
            fresh = np.maximum(horizon, self.fresh).astype(self.TAG)
        several = (old >= fresh) & ((old & actor) != (lane_tag & actor)) & (old != 0)
        return np.where(several, self.collective_tag[some], lane_tag)

    def read_together(self, lanes: Array | None, at: Array, width: int, site: int, offset: Array) -> None:
        """Check and tag a read by whole warps, such as ldmatrix: it is tagged as one of several lanes."""
        tags = self.rows[width][0].take(at, axis=0)
        if int(tags.max()) >= max(self.fresh, 1):
            self._check_read(lanes, tags, site, offset, tried=True)
        column = self.reader_column if lanes is None else self.reader_column[lanes]
        tag = self.collective_tag if lanes is None else self.collective_tag[lanes]
        read = LateRead(*self.extent, width, at, self.stamp, tag, column)
        if not self.defers or self.late.is_full:
            self._leave_tags([*self.late.take(0, 1 << 32), read])
        else:
            self.late.reads.append(read)
        if self.recorded is not None:
            self.recorded.read(at, width // self.granule, column, site)

    def store(
        self,
        address: Array,
        value: Array,
        width: int,
        m: Mask,
        site: int,
        strong: int = 0,
        kind: str = "st.shared",
    ) -> None:
        """Write MOVER[width] values, one per lane. ``strong``: the store sets a flag that other threads poll (see
        ``state.scopes``). ``kind``: its name among the counters."""
        access = self.locate(address, width, m, site)
        if access is None:
            return
        lanes, at, offset = access
        if lanes is not None:
            value = value[lanes]
        if self.counters is not None:
            self.counters.shared(kind, address, width, m)
        view = self.views[width]
        self.launch.stores(lambda: bool(equal_bits(view[at], value).all()))
        if not self.hazards:
            view[at] = value
            return
        self._check_write(lanes, width, at, site, offset, lambda: equal_bits(view[at], value))
        tag = self.lane_tag if lanes is None else self.lane_tag[lanes]
        self.tag_written(width, at, tag, site, bool(strong))
        self.recent.add(*self.extent, self.stamp)
        old = view[at] if strong and self.observed else None
        view[at] = value
        if strong and self.flags_are_read:
            self._publish(lanes, offset, strong, site, None if old is None else (old, value))
        # If several lanes store to one word, the last one's tag and value are left, which the others find here.
        back = self.last_writers(width, at) != tag
        if back.any():
            differ = back & ~equal_bits(view[at], value)
            if differ.any():
                text = "several threads write different values in one instruction"
                lane = self.batch.everyone if lanes is None else lanes
                self._report("shared-race", text, Granules(site, lane, np.arange(len(at)), offset), differ)

    def write_pending(self, lanes: Array | None, at: Array, width: int, site: int, offset: Array) -> LateCopy:
        """Start a copy by threads into the elements ``at``, which were located last. They are poison until it lands."""
        copy = LateCopy(*self.extent, lanes, at, width)
        if self.hazards:
            if self._may_be_hot() and self._is_hot(at, width):
                self._check_write(lanes, width, at, site, offset)
            if self.recorded is not None:
                self.recorded.wrote(at, width // self.granule, site)
        self.late_copies.copies.append(copy)
        if not self.defers:
            self.leave_copies(copy.low, copy.high)
        return copy

    def leave_copies(self, low: int = 0, high: int = 1 << 32) -> None:
        """Write the deferred poison and tags of the copies under way to bytes [low, high). Call this before an access
        touches those bytes, and before such a copy is split by lane."""
        for copy in self.late_copies.take(low, high):
            if self.hazards:
                actor = self.actor if copy.lanes is None else self.actor[copy.lanes]
                self.tag_written(copy.width, copy.at, actor | self.TAG(self.IN_FLIGHT))
                self.recent.add(copy.low, copy.high, ENDLESS)
            self.views[copy.width][copy.at] = self.poison[copy.width]

    def _may_be_hot(self) -> bool:
        """Could a write to the bytes located last race? A cheap test of the extent as a whole: False is certain."""
        self._leave_tags(self.late.take(*self.extent))
        return not self.defers or self.recent.meet(*self.extent)

    def _is_hot(self, at: Array, width: int) -> bool:
        """Could a write to these elements race? A cheap test of their tags: False is certain."""
        writer, latest, _ = self.rows[width]
        fresh = max(self.fresh, 1)
        if bool((latest[at] >= fresh).any()):
            return True
        tags = writer[at]
        return bool(((tags >= fresh) & (tags != self.UNWRITTEN)).any())

    def land_own(self, copy: LateCopy, data: Array) -> None:
        """The data of a thread's own copy arrives, as if the thread wrote it now."""
        self._follow_tick()
        self.late_copies.land(copy)
        self.leave_copies(copy.low, copy.high)
        self.views[copy.width][copy.at] = data
        if self.hazards:
            self.tag_written(copy.width, copy.at, self.lane_tag if copy.lanes is None else self.lane_tag[copy.lanes])
            self.recent.add(copy.low, copy.high, self.stamp)
        self.launch.version += 1

    # --- atomics and flags ---

    def touch(self, address: Array, width: int, m: Mask, site: int) -> tuple[Array, Array] | None:
        """Check and tag a read-modify-write, which the caller then performs and passes to ``modify``; returns (lanes,
        element index). Atomics do not race with each other."""
        access = self.locate(address, width, m, site)
        if access is None:
            return None
        lanes, at, offset = access
        everyone = self.batch.everyone if lanes is None else lanes
        if self.hazards:
            self._check_atomic(everyone, at, width, site, offset)
            self.tag_written(width, at, self.lane_tag if lanes is None else self.lane_tag[lanes], site, strong=True)
            self.recent.add(*self.extent, self.stamp)
        return everyone, at

    def _check_atomic(self, lanes: Array, at: Array, width: int, site: int, offset: Array) -> None:
        """Report atomics that race with plain accesses."""
        plain = self._is_plain(at, width)
        if plain.any():
            self._check_read(lanes[plain], self.rows[width][0][at][plain], site, offset[plain])
        if not self._may_be_hot():
            return
        # Most elements were last written by an atomic, and no thread has read them since. They need no check.
        read = self.rows[width][1][at] >= max(self.fresh, 1)
        todo = plain | (read.any(axis=1) if read.ndim > 1 else read)
        volatile = self.are_volatile(at, width)
        for part, reads in ((todo & ~volatile, True), (todo & volatile, False)):
            which = np.flatnonzero(part)
            if which.size:
                strong_before = partial(np.invert, plain[which])
                self._check_write(lanes[which], width, at[which], site, offset[which], strong_before, reads)

    def _is_plain(self, at: Array, width: int) -> Array:
        """Which elements were last written by something other than an atomic or a flag write? Only those can race."""
        if not self.strong_rows:
            return np.ones(len(at), bool)
        differ = self.rows[width][0][at] != self.strong_rows[width][at]
        return np.asarray(differ.any(axis=1) if differ.ndim > 1 else differ)

    def _poll(
        self, lanes: Array | None, at: Array, width: int, site: int, offset: Array, strong: int, values: Array
    ) -> Array:
        """Check a strong load of ``values``; returns the values that it reads."""
        if lanes is None:
            lanes = self.batch.everyone
        plain = self._is_plain(at, width)
        if plain.any():
            self._check_read(lanes[plain], self.rows[width][0][at][plain], site, offset[plain])
        return self.read(lanes, offset, strong, site, values)
