"""Checks global accesses: reads of unwritten bytes, writes outside of regions, races between threads.

Two accesses race if they touch the same granule, one of them writes, neither happens before the other, and they are
not both strong with scopes that include each other's thread ("morally strong" in the PTX ISA).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from kernelproof.emulator.memory.device_races import DeviceRaces
from kernelproof.emulator.memory.device_state import DeviceState
from kernelproof.emulator.memory.global_access import GlobalAccess, TagOrigin
from kernelproof.emulator.memory.places import ROW, Form, Places, Rows, numbers, put, take
from kernelproof.emulator.memory.tags import SCOPE, SCOPE_SHIFT, THREAD, TICK_SHIFT, UNDER_WAY, GranuleRun, Tags
from kernelproof.emulator.state.arrays import SHIFT, Array, groups_are_equal
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.lane_releases import APART
from kernelproof.emulator.state.participants import Participant
from kernelproof.emulator.state.scopes import CHECKED, SIZE_SHIFT, Scope, scope_of
from kernelproof.emulator.state.warp_clocks import WarpClocks


class DeviceHazards:
    """The checks before every global access of a batch.

    Each buffer has a tag for the last write and a tag for the last read of every granule. If the launch may write the
    buffer, each granule also has the last read by a thread other than the last reader, and the last read by a CTA other
    than the last reader's. Earlier reads are forgotten.
    """

    def __init__(self, batch: BatchState, clocks: WarpClocks, state: DeviceState) -> None:
        self.batch, self.clocks, self.state = batch, clocks, state
        self.races = DeviceRaces(batch, clocks, state)
        self.launch = batch.launch
        self.hazards = batch.launch.options.hazards
        # A run is one entry for the consecutive granules of a whole access. It relies on consecutive lanes having
        # consecutive thread numbers, and it stores no instruction, so a launch that records those uses single tags.
        self.keeps_runs = batch.are_in_a_row and not self.launch.recording
        # The tags that all lanes leave at one moment (tick and scope). Consecutive accesses mostly share them.
        self._last_stamp: tuple[int, Array] = (-1, batch.gthread)
        self._last_tiled: tuple[Array, int, Array] = batch.everyone, 1, batch.everyone

    def before_read(self, access: GlobalAccess) -> None:
        """Check and tag a read. A strong read does not race with strong writes that its scope reaches."""
        buffer, lanes, _, _, site, strong, form = access
        if buffer.written is not None:
            self._check_written(access, buffer.written)
        if not self.hazards:
            return
        tags = self.state.tags(buffer, self.launch.recording, access.width)
        if form is Form.PACKED and self._store_as_run(access, tags, writes=False):
            return
        covered, per_lane = self._all_granules(access, tags.shift)
        if tags.is_written and not self._comes_after([tags.written], covered, per_lane, access, reads=False):
            racing: Array | None = None
            for touched in self._granules(access, tags.shift):
                tagged, origin = take(tags.written, touched), TagOrigin(tags.written_sites, touched, tags.written_sizes)
                racing = self._check_order("read after write", tagged, access, origin, reported=racing)
        stamp = self._stamp(lanes, strong)
        self._tag_read(tags, covered, stamp if per_lane == 1 else stamp.repeat(per_lane), access)
        if strong >> SIZE_SHIFT:
            tags.record_read_size(covered, strong >> SIZE_SHIFT)
        if tags.read_sites is not None:
            put(tags.read_sites, covered, site + 1)

    def _tag_read(self, tags: Tags, touched: Places, stamp: Array, access: GlobalAccess) -> None:
        """Tag granules as read. If the launch may write the buffer, also keep earlier readers, since a thread that
        writes may be the last reader itself."""
        if not self.state.may_write(access.buffer):
            put(tags.read, touched, stamp)
            return
        before = take(tags.read, touched)
        self._keep_earlier(
            tags, touched, before, stamp, None if tags.read_sites is None else take(tags.read_sites, touched)
        )
        put(tags.read, touched, stamp)
        if access.form is not Form.PACKED:
            # If several lanes read a granule in this instruction, it now has the tag of the last one only.
            after = take(tags.read, touched)
            if (after != stamp).any():
                self._keep_earlier(tags, touched, stamp, after, access.site + 1)

    def _keep_earlier(
        self, tags: Tags, places: Places, earlier: Array, later: Array, sites: Array | int | None
    ) -> None:
        """Keep the ``earlier`` reads of granules that ``later`` reads by another thread, or another CTA, replace."""
        before, after = earlier & THREAD, later & THREAD
        other = (before != after) & (earlier != 0)
        if not other.any():
            return
        width = self.batch.width
        of_other_cta = other & (before // width != after // width)
        for by_other_cta, replaced in ((False, other), (True, of_other_cta)):
            if replaced.all():
                tags.keep_earlier(by_other_cta, places, earlier, sites)
            elif replaced.any():
                kept = sites[replaced] if isinstance(sites, np.ndarray) else sites
                tags.keep_earlier(by_other_cta, numbers(places)[replaced], earlier[replaced], kept)

    def before_constant_read(self, access: GlobalAccess) -> None:
        """Check and tag a read through the read-only path (``ld.global.nc``): the launch must not write these bytes."""
        if not self.hazards:
            return
        tags = self.state.tags(access.buffer, self.launch.recording, access.width)
        if tags.read_only is None:
            tags.read_only = np.zeros(tags.granules, bool)
        for touched in self._granules(access, tags.shift):
            put(tags.read_only, touched, True)
            if not tags.is_written:
                continue
            bad = take(tags.written, touched) != 0
            if bad.any():
                self._report("read-only-path", "reads by ld.global.nc what this launch has written", access, bad)
                return

    # --- bulk copies

    def begin_copy(self, access: GlobalAccess) -> None:
        """Check and tag the write of a bulk store. Until its group is complete it is under way, and ordered before
        nothing."""
        tags = self.state.tags(access.buffer, self.launch.recording, access.width)
        if tags.copied is None:
            tags.copied = np.zeros(tags.granules, bool)
        # UNDER_WAY stands in place of a tick and is larger than all ticks, so no horizon of the clocks exceeds it.
        moment = UNDER_WAY << TICK_SHIFT | self._moment(access.strong) & SCOPE << SCOPE_SHIFT
        for touched in self._granules(access, tags.shift):
            put(tags.written, touched, self.batch.gthread[access.lanes] | moment)
            put(tags.copied, touched, True)

    def end_copy(self, access: GlobalAccess) -> None:
        """Tag the bytes of a bulk store that is now complete as if its lanes wrote them now, unless they have been
        overwritten meanwhile."""
        tags = self.state.tags(access.buffer, self.launch.recording, access.width)
        stamp = self._stamp(access.lanes, access.strong)
        for touched in self._granules(access, tags.shift):
            old = take(tags.written, touched)
            is_under_way = (old >> TICK_SHIFT == UNDER_WAY) & (old & THREAD == stamp & THREAD)
            put(tags.written, touched, np.where(is_under_way, stamp, old))

    def before_copy(self, access: GlobalAccess) -> None:
        """Check a bulk copy's read. A proxy fence must lie between the writes of threads and the copy, in the writer's
        CTA or in the CTA of the thread that copies."""
        self.before_read(access)
        tags = self.state.tags(access.buffer, self.launch.recording, access.width)
        if not self.hazards or not tags.is_written:
            return
        own_cta = int(self.batch.ctas[self.batch.row_of[access.lanes[0]]]) if access.lanes is not None else 0
        fences = self.state.proxy_fences
        for touched in self._granules(access, tags.shift):
            written = take(tags.written, touched)
            generic = written != 0
            if tags.copied is not None:
                generic &= ~take(tags.copied, touched)
            for tag in np.unique(written[generic]).tolist():
                writer, tick = (tag & THREAD) // self.batch.width, tag >> TICK_SHIFT
                if max(fences.get(writer, 0), fences.get(own_cta, 0)) <= tick:
                    text = "a bulk copy reads what a thread wrote to global memory without a fence.proxy.async between"
                    self._report("proxy-fence", text, access, written == tag)
                    return

    def _report(self, kind: str, text: str, access: GlobalAccess, bad: Array, doubtful: bool = False) -> None:
        """Report the lanes of an access that the mask ``bad`` marks."""
        marked = np.flatnonzero(bad)
        address = int(access.offset[marked[0]]) + self.state.arena.base
        offenders = marked if access.lanes is None else access.lanes[marked]
        self.batch.report_lanes(kind, text, access.site, offenders, address, doubtful)

    def _granules(self, access: GlobalAccess, shift: int) -> Iterator[Places]:
        """Yield the numbers of the granules, of 1 << ``shift`` bytes, that an access covers: first each lane's first
        granule, then each lane's second, and so on."""
        buffer, _, offset, width, _, _, form = access
        per_lane = max(1, width >> shift)
        if form is Form.PACKED:
            start = (int(offset[0]) - buffer.start) >> shift
            for k in range(per_lane):
                yield slice(start + k, start + len(offset) * per_lane, per_lane)
            return
        if form is Form.ROWS and per_lane == 1:
            yield Rows((offset[::ROW] - buffer.start) >> shift)
            return
        first = (offset - buffer.start) >> shift
        for k in range(per_lane):
            yield first + k if k else first

    def _all_granules(self, access: GlobalAccess, shift: int) -> tuple[Places, int]:
        """The numbers of all granules, of 1 << ``shift`` bytes, that an access covers, lane by lane; and how many a
        lane has."""
        buffer, _, offset, width, _, _, form = access
        per_lane = max(1, width >> shift)
        if form is Form.PACKED:
            start = (int(offset[0]) - buffer.start) >> shift
            return slice(start, start + len(offset) * per_lane), per_lane
        if form is Form.ROWS:
            return Rows((offset[::ROW] - buffer.start) >> shift, ROW * per_lane), per_lane
        first = (offset - buffer.start) >> shift
        return (first if per_lane == 1 else Rows(first, per_lane)), per_lane

    def _comes_after(
        self, kinds: Sequence[Array], covered: Places, per_lane: int, access: GlobalAccess, reads: bool
    ) -> bool:
        """Is a weak access known to happen after all accesses that have left tags of these kinds at its granules? If
        not, each tag must be checked by itself. ``kinds``: arrays of tags, one per granule of the buffer. ``covered``,
        ``per_lane``: see ``_all_granules``. ``reads``: the tags are of reads."""
        # Strong accesses may be allowed to race, which only the checks of single tags decide. For one kind of tags and
        # one granule per lane, this would take as long as those checks.
        if access.strong or len(kinds) * per_lane < 2:
            return not kinds
        of_kinds = [take(kind, covered) for kind in kinds]
        tags = of_kinds[0] if len(of_kinds) == 1 else np.concatenate(of_kinds)
        lanes = access.lanes
        if len(kinds) > 1:
            lanes = self._tiled(lanes, len(kinds))
        # The granules of an element mostly have one tag, since elements are mostly accessed as a whole.
        if groups_are_equal(tags, per_lane):
            tags = tags[::per_lane]
        else:
            lanes = (self.batch.everyone if lanes is None else lanes).repeat(per_lane)
        return self.races.racing_lanes(lanes, tags, 0, reads, TagOrigin(None, covered)) is None

    def _tiled(self, lanes: Array | None, times: int) -> Array:
        """Lanes (None: all), repeated ``times`` times. The last result is kept, since consecutive accesses mostly have
        the same lanes, and arrays of lanes never change."""
        if lanes is None:
            lanes = self.batch.everyone
        if self._last_tiled[0] is not lanes or self._last_tiled[1] != times:
            self._last_tiled = lanes, times, np.tile(lanes, times)
        return self._last_tiled[2]

    def _check_order(
        self,
        hazard: str,
        tags: Array,
        access: GlobalAccess,
        origin: TagOrigin,
        differs: Callable[[], Array] | None = None,
        reported: Array | None = None,
    ) -> Array | None:
        """Report lanes whose access does not happen after the tagged access. ``differs``: a function that says which
        lanes store another value than memory holds; two stores of the same value do not race. ``reported``: lanes for
        which a race has been reported (None: none). Returns these lanes and those that are reported now."""
        reads = hazard == "write after read"
        bad = self.races.racing_lanes(access.lanes, tags, access.strong, reads, origin, reported)
        if bad is None:
            return reported
        if differs is not None:
            # An atomic gives another result after the store than before it, even if it left the stored value by chance.
            bad &= differs() | origin.are_atomics(tags)
        if not bad.any():
            return reported
        for part in origin.by_site(bad):
            self._report_race(hazard, access, tags, part, origin)
        return np.asarray(bad if reported is None else bad | reported)

    def _check_written(self, access: GlobalAccess, written: Array) -> None:
        """Report a read of bytes that were never written. Only the first and last byte of each element are tested."""
        if access.form is not Form.SCATTERED and take(written, access.bytes).all():
            return
        relative = access.offset - access.buffer.start
        defined = written[relative]
        if access.width > 1:
            defined = defined & written[relative + (access.width - 1)]
        if not defined.all():
            text = "reads memory that nobody has written"
            self._report("uninitialised-global", text, access, defined == 0, doubtful=True)

    def before_atomic(self, access: GlobalAccess) -> None:
        """Check and tag a read-modify-write."""
        buffer = access.buffer
        if buffer.written is not None:
            undefined = buffer.written[access.offset - buffer.start] == 0
            if undefined.any():
                text = "atomic on memory that nobody has written"
                self._report("uninitialised-global", text, access, undefined)
        self.before_write(access, None)
        if self.hazards and scope_of(access.strong) < Scope.GPU:
            # An atomic of CTA scope races with lanes of other CTAs in the same instruction. ``before_write`` has just
            # stored their tags, so a second check finds them.
            tags = self.state.tags(buffer, self.launch.recording, access.width)
            racing: Array | None = None
            for touched in self._granules(access, tags.shift):
                origin = TagOrigin(tags.written_sites, touched, tags.written_sizes)
                tagged = take(tags.written, touched)
                racing = self._check_order("write after write", tagged, access, origin, reported=racing)

    def before_write(self, access: GlobalAccess, value: Array | None) -> None:
        """Check and tag a write of ``value`` (None if it is not known yet)."""
        self.check_allowed(access)
        if not self.hazards:
            return
        buffer, lanes, _, _, site, strong, form = access
        tags = self.state.tags(buffer, self.launch.recording, access.width)
        if form is Form.PACKED and self._store_as_run(access, tags, writes=True):
            return
        covered, per_lane = self._all_granules(access, tags.shift)
        self._check_all_before_write(tags, covered, per_lane, access, value)
        stamp = self._stamp(lanes, strong)
        stamps = stamp if per_lane == 1 else stamp.repeat(per_lane)
        put(tags.written, covered, stamps)
        if strong >> SIZE_SHIFT:
            tags.record_write_size(covered, strong >> SIZE_SHIFT)
        if tags.written_sites is not None:
            put(tags.written_sites, covered, site + 1)
        # If two lanes write one granule, one of them does not find its own tag there. In a packed access all lanes have
        # different granules.
        if value is not None and form is not Form.PACKED and bool((take(tags.written, covered) != stamps).any()):
            self._check_duplicates(access, value)

    def _check_all_before_write(
        self, tags: Tags, covered: Places, per_lane: int, access: GlobalAccess, value: Array | None
    ) -> None:
        """Report a write that does not happen after earlier accesses to its granules, or that changes bytes which are
        read through the read-only path. ``covered``, ``per_lane``: see ``_all_granules``. ``value``: see
        ``before_write``."""
        if tags.read_only is None:
            reads = [tags.read] if tags.is_read else []
            reads += [earlier.tags for earlier in tags.earlier.values()]
            writes = [tags.written] if tags.is_written else []
            # Only the clocks of clusters order reads and writes differently.
            if self.batch.cluster_size == 1:
                reads, writes = [], reads + writes
            if self._comes_after(reads, covered, per_lane, access, True) and self._comes_after(
                writes, covered, per_lane, access, False
            ):
                return
        racing: Array | None = None
        differs = None if value is None else partial(self._bytes_differ, access, value)
        for touched in self._granules(access, tags.shift):
            if tags.read_only is not None and take(tags.read_only, touched).any():
                bad = take(tags.read_only, touched) & (True if differs is None else differs())
                if bad.any():
                    self._report("read-only-path", "writes what this launch reads by ld.global.nc", access, bad)
            racing = self._check_before_write(tags, touched, access, differs, racing)

    def _check_before_write(
        self,
        tags: Tags,
        touched: Places,
        access: GlobalAccess,
        differs: Callable[[], Array] | None,
        reported: Array | None,
    ) -> Array | None:
        """Report a write of granules that does not happen after earlier writes and reads of them. ``reported`` and the
        result: see ``_check_order``."""
        if tags.is_written:
            origin = TagOrigin(tags.written_sites, touched, tags.written_sizes)
            tagged = take(tags.written, touched)
            reported = self._check_order("write after write", tagged, access, origin, differs, reported=reported)
        if tags.is_read:
            origin = TagOrigin(tags.read_sites, touched, tags.read_sizes)
            tagged = take(tags.read, touched)
            reported = self._check_order("write after read", tagged, access, origin, reported=reported)
        for earlier in tags.earlier.values():
            tagged, origin = take(earlier.tags, touched), TagOrigin(earlier.sites, touched)
            reported = self._check_order("write after read", tagged, access, origin, reported=reported)
        return reported

    def _store_as_run(self, access: GlobalAccess, tags: Tags, *, writes: bool) -> bool:
        """Try to store a packed access as a run, and return whether that was possible. If it was, no other thread has
        accessed these granules, so the access needs no check."""
        if not self.keeps_runs:
            return False
        run, strong = self._run(access, tags.shift), access.strong
        if not (tags.write_run(run) if writes else tags.read_run(run)):
            return False
        if strong >> SIZE_SHIFT:
            record_size = tags.record_write_size if writes else tags.record_read_size
            record_size(slice(run.start, run.stop), strong >> SIZE_SHIFT)
        return True

    def _run(self, access: GlobalAccess, shift: int) -> GranuleRun:
        """A packed access as a run."""
        buffer, lanes, offset, width, _, strong, _ = access
        start, per_lane = (int(offset[0]) - buffer.start) >> shift, width >> shift
        first = 0 if lanes is None else lanes[0]
        return GranuleRun(
            start, start + len(offset) * per_lane, per_lane, int(self.batch.gthread[first]), self._moment(strong)
        )

    def _moment(self, strong: int) -> int:
        """The upper part of a tag now: tick and scope. A load that a swap checks is weak."""
        scope = scope_of(strong) if strong and not strong & CHECKED else 0
        return self.launch.tick << TICK_SHIFT | scope << SCOPE_SHIFT

    def _stamp(self, lanes: Array | None, strong: int) -> Array:
        """The tags that lanes (None: all) leave now."""
        moment = self._moment(strong)
        if lanes is not None:
            return np.asarray(self.batch.gthread[lanes] | moment)
        if self._last_stamp[0] != moment:
            self._last_stamp = moment, self.batch.gthread | moment
        return self._last_stamp[1]

    def check_allowed(self, access: GlobalAccess) -> None:
        """Report a write to an input, or outside of an output's region."""
        buffer = access.buffer
        if buffer.role == "input":
            self._report("input-modified", "writes to an input", access, np.ones(len(access.offset), bool))
        if buffer.allowed is not None:
            relative = access.offset - buffer.start
            allowed = buffer.allowed[relative] & buffer.allowed[relative + (access.width - 1)]
            if not allowed.all():
                self._report("outside-region", "writes outside the declared region", access, allowed == 0)

    def _report_race(self, hazard: str, access: GlobalAccess, tags: Array, bad: Array, origin: TagOrigin) -> None:
        """Report a race of the lanes of an access that the mask ``bad`` marks."""
        batch, strong = self.batch, 0 if access.strong & CHECKED else access.strong
        lanes = batch.everyone if access.lanes is None else access.lanes
        first = int(np.flatnonzero(bad)[0])
        cta, thread = divmod(int(tags[first]) & THREAD, batch.width)
        row, warp = batch.row_of[lanes[[first]]], batch.warp[lanes[[first]]]
        same_cta = cta == int(batch.ctas[row[0]])
        both_strong = strong and int(tags[first]) >> SCOPE_SHIFT & SCOPE
        mixed = both_strong and not np.broadcast_to(origin.matches_size(strong), len(tags))[first]
        why = ": both are strong, but of different sizes" if mixed else ""
        tick = tags[[first]] >> TICK_SHIFT
        if same_cta and self.clocks.released_by_others(row, warp, np.array([thread]), tick)[0]:
            why = f": {APART}"
        if int(tags[first]) >> TICK_SHIFT == UNDER_WAY:
            why = ": nothing has waited for that bulk store (cp.async.bulk.wait_group, without .read)"
        offenders, site = lanes[bad], origin.site(first)
        # Without recorded instructions a read that came first counts as a usual one; the launch is then executed again.
        checked = access.strong & CHECKED or (hazard == "write after read" and self.launch.site(site).is_checked_load)
        threads = batch.thread[offenders[batch.row_of[offenders] == row[0]]].tolist()
        sides = [(access.site, batch.cta_index(int(row[0])), threads), (site, self.launch.cta_index(cta), [thread])]
        if same_cta:
            text = f"{hazard} by a thread in the same CTA"
        else:
            # Which access comes first depends on the order of CTAs, so the finding does not say it.
            text = f"{' and '.join(sorted(hazard.split(' after ')))} by threads of two CTAs"
            if site > access.site:
                sides.reverse()
        (first_site, first_cta, first_threads), (other_site, other_cta, other_threads) = sides
        self.launch.reports.add(
            "plain-first-load" if checked else "global-race",
            f"{text}, with no barrier or release and acquire between{why}",
            first_site,
            first_cta,
            sorted(first_threads),
            address=int(access.offset[first]) + self.state.arena.base,
            count=len(offenders),
            other=Participant(self.launch.site(other_site), other_cta, tuple(other_threads)),
        )

    def _bytes_differ(self, access: GlobalAccess, value: Array) -> Array:
        """A mask of the elements whose memory differs from the value that is about to be written."""
        width = access.width
        content = self.state.arena.views[width][access.offset >> SHIFT[width]]
        a = np.ascontiguousarray(content).view(np.uint8).reshape(-1, width)
        b = np.ascontiguousarray(value).view(np.uint8).reshape(-1, width)
        return np.asarray((a != b).any(axis=1))

    def _check_duplicates(self, access: GlobalAccess, value: Array) -> None:
        """Report several lanes that write different values to one place in one instruction."""
        words = np.ascontiguousarray(value).view(np.uint8).reshape(-1, access.width)
        content: dict[int, bytes] = {}
        for word, place in zip(words, access.offset.tolist(), strict=True):
            if content.setdefault(place, word.tobytes()) != word.tobytes():
                text = "several threads write different values to one place in one instruction"
                self._report("global-race", text, access, access.offset == place)
                return
