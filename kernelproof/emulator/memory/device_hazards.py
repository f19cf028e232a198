"""Findings of global accesses: reads of unwritten bytes, writes outside of regions, races between threads.

Two accesses race if they touch the same granule, one of them writes, neither happens before the other, and they are
not both strong with scopes that include each other's thread ("morally strong" in the PTX ISA).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from kernelproof.emulator.memory.device_state import DeviceState
from kernelproof.emulator.memory.global_access import GlobalAccess, OrderedTags, TagOrigin
from kernelproof.emulator.memory.places import ROW, Form, Places, Rows, numbers, put, take
from kernelproof.emulator.memory.tags import SCOPE, SCOPE_SHIFT, THREAD, TICK_SHIFT, UNDER_WAY, GranuleRun, Tags
from kernelproof.emulator.state.arrays import SHIFT, Array
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.lane_releases import APART
from kernelproof.emulator.state.participants import Participant
from kernelproof.emulator.state.scopes import CHECKED, SIZE_SHIFT, Scope, scope_of
from kernelproof.emulator.state.warp_clocks import WarpClocks


class DeviceHazards:
    """The checks before every global access of a batch.

    Each buffer has the tag of the last write and of the last read of every granule; if the launch may write it, also of
    the last read by another thread than the last reader, and by another CTA. Reads before those are forgotten.
    """

    def __init__(self, batch: BatchState, clocks: WarpClocks, state: DeviceState) -> None:
        self.batch, self.clocks, self.state = batch, clocks, state
        self.launch = batch.launch
        self.hazards = batch.launch.options.hazards
        # A run is one entry for the consecutive granules of a whole access. It relies on consecutive lanes having
        # consecutive thread numbers, and it stores no instruction, so a launch that records those uses single tags.
        self.keeps_runs = batch.are_in_a_row and not self.launch.recording
        self._row_of_cta: dict[int, int] = {}
        # The tags that all lanes leave at one moment (tick and scope), kept because consecutive accesses share it.
        self._last_stamp: tuple[int, Array] = (-1, batch.gthread)
        self._ordered = OrderedTags()

    def before_read(self, access: GlobalAccess) -> None:
        """Check and tag a read. A strong read does not race with strong writes that its scope reaches."""
        buffer, lanes, _, _, site, strong, form = access
        if buffer.written is not None:
            self._check_written(access, buffer.written)
        if not self.hazards:
            return
        tags = self.state.tags(buffer, self.launch.recording)
        if form is Form.PACKED and self._is_kept(access, tags.read_run, tags.size_read):
            return
        stamp = self._stamp(lanes, strong)
        kind = "plain-first-load" if strong & CHECKED else "global-race"
        racing: Array | None = None
        for touched in self._granules(access):
            if tags.is_written:
                tagged, origin = take(tags.written, touched), TagOrigin(tags.written_at, touched, tags.written_sizes)
                racing = self._check_order("read after write", tagged, access, origin, kind=kind, reported=racing)
            self._tag_read(tags, touched, stamp, access)
            if strong >> SIZE_SHIFT:
                tags.size_read(touched, strong >> SIZE_SHIFT)
            if tags.read_at is not None:
                put(tags.read_at, touched, site + 1)

    def _tag_read(self, tags: Tags, touched: Places, stamp: Array, access: GlobalAccess) -> None:
        """Tag granules as read. Where the launch may write the buffer, also keep who else has read them: a thread that
        writes may be their last reader itself."""
        if not self.state.may_write(access.buffer):
            put(tags.read, touched, stamp)
            return
        before = take(tags.read, touched)
        which = numbers(touched)
        self._keep_earlier(tags, which, before, stamp, None if tags.read_at is None else take(tags.read_at, touched))
        put(tags.read, touched, stamp)
        if access.form is not Form.PACKED:
            # Of several lanes that read one granule in this instruction, only the last one's tag stands there now.
            self._keep_earlier(tags, which, stamp, take(tags.read, touched), access.site + 1)

    def _keep_earlier(
        self, tags: Tags, granules: Array, earlier: Array, later: Array, sites: Array | int | None
    ) -> None:
        """Keep the ``earlier`` reads of granules where the ``later`` ones are of another thread, or of another CTA."""
        other = (earlier != 0) & ((earlier ^ later) & THREAD != 0)
        if not other.any():
            return
        width = self.batch.width
        far = other & ((earlier & THREAD) // width != (later & THREAD) // width)
        for is_far, which in ((False, other), (True, far)):
            if which.any():
                kept = sites[which] if isinstance(sites, np.ndarray) else sites
                tags.keep_earlier(is_far, granules[which], earlier[which], kept)

    def before_constant_read(self, access: GlobalAccess) -> None:
        """Check and tag a read through the read-only path (``ld.global.nc``): nobody may write these bytes in the
        launch."""
        if not self.hazards:
            return
        tags = self.state.tags(access.buffer, self.launch.recording)
        if tags.read_only is None:
            tags.read_only = np.zeros(tags.granules, bool)
        for touched in self._granules(access):
            put(tags.read_only, touched, True)
            if not tags.is_written:
                continue
            bad = take(tags.written, touched) != 0
            if bad.any():
                self._report("read-only-path", "reads by ld.global.nc what this launch has written", access, bad)
                return

    # --- bulk copies

    def begin_copy(self, access: GlobalAccess) -> None:
        """Check and tag the write of a bulk store. It is under way, so not ordered before anything, until its group is
        complete."""
        tags = self.state.tags(access.buffer, self.launch.recording)
        if tags.copied is None:
            tags.copied = np.zeros(tags.granules, bool)
        # UNDER_WAY stands for a tick later than all others, so no horizon of the clocks exceeds it.
        moment = UNDER_WAY << TICK_SHIFT | self._moment(access.strong) & SCOPE << SCOPE_SHIFT
        for touched in self._granules(access):
            put(tags.written, touched, self.batch.gthread[access.lanes] | moment)
            put(tags.copied, touched, True)

    def end_copy(self, access: GlobalAccess) -> None:
        """A bulk store is complete: retag the bytes that nobody has overwritten meanwhile as if its lanes wrote now."""
        tags = self.state.tags(access.buffer, self.launch.recording)
        stamp = self._stamp(access.lanes, access.strong)
        for touched in self._granules(access):
            old = take(tags.written, touched)
            still = (old >> TICK_SHIFT == UNDER_WAY) & (old & THREAD == stamp & THREAD)
            put(tags.written, touched, np.where(still, stamp, old))

    def before_copy(self, access: GlobalAccess) -> None:
        """Check a bulk copy's read. A proxy fence must stand between what threads have written and the copy, in the
        writer's CTA or in the CTA of the thread that copies."""
        self.before_read(access)
        tags = self.state.tags(access.buffer, self.launch.recording)
        if not self.hazards or not tags.is_written:
            return
        own = int(self.batch.ctas[self.batch.row_of[access.lanes[0]]]) if access.lanes is not None else 0
        fences = self.state.proxy_fences
        for touched in self._granules(access):
            written = take(tags.written, touched)
            generic = written != 0
            if tags.copied is not None:
                generic &= ~take(tags.copied, touched)
            for tag in np.unique(written[generic]).tolist():
                writer, tick = (tag & THREAD) // self.batch.width, tag >> TICK_SHIFT
                if max(fences.get(writer, 0), fences.get(own, 0)) <= tick:
                    text = "a bulk copy reads what a thread wrote to global memory without a fence.proxy.async between"
                    self._report("proxy-fence", text, access, written == tag)
                    return

    def _report(self, kind: str, text: str, access: GlobalAccess, bad: Array, doubtful: bool = False) -> None:
        """Report those of an access's lanes that ``bad`` marks."""
        which = np.flatnonzero(bad)
        at = int(access.offset[which[0]]) + self.state.arena.base
        offenders = which if access.lanes is None else access.lanes[which]
        self.batch.report_lanes(kind, text, access.site, offenders, at, doubtful)

    def _granules(self, access: GlobalAccess) -> Iterator[Places]:
        """For each granule that an access of one lane covers: the granule's number in the buffer, for every lane."""
        buffer, _, offset, width, _, _, form = access
        shift = self.state.granule_shift
        per = max(1, width >> shift)
        if form is Form.PACKED:
            start = (int(offset[0]) - buffer.start) >> shift
            for k in range(per):
                yield slice(start + k, start + len(offset) * per, per)
            return
        if form is Form.ROWS and per == 1:
            yield Rows((offset[::ROW] - buffer.start) >> shift)
            return
        first = (offset - buffer.start) >> shift
        for k in range(per):
            yield first + k if k else first

    def _check_order(
        self,
        hazard: str,
        tags: Array,
        access: GlobalAccess,
        origin: TagOrigin,
        differs: Callable[[], Array] | None = None,
        kind: str = "global-race",
        reported: Array | None = None,
    ) -> Array | None:
        """Report lanes whose access does not happen after the tagged one. ``differs``: which of them store another
        value than the tagged access, if that is a store; two stores of one value do not race. ``reported``: lanes for
        whose access a race has been reported, None if there are none; returns them with those of this call."""
        lanes, reads = access.lanes, hazard == "write after read"
        if (not access.strong and self._ordered.has(lanes, tags, reads)) or not tags.any():
            return reported
        # The tests are in order of cost, and each leaves fewer lanes. Most lanes touch granules that only they have
        # touched; tag 0 means that nobody has.
        bad = (tags & THREAD) != (self.batch.gthread if lanes is None else self.batch.gthread[lanes])
        if not bad.any():
            return reported
        bad &= tags != 0
        if reported is not None:
            bad &= ~reported
        if not bad.any():
            return reported
        compared = 0 if access.strong & CHECKED else access.strong
        everyone = self.batch.everyone if lanes is None else lanes
        bad &= self._unordered(everyone, tags, compared, reads, origin)
        if not bad.any():
            # A wide access asks for each of its granules, and a write for the last reads of three kinds.
            again = access.width > self.state.granule or reads
            if again and not access.strong and reported is None:
                self._ordered.add(lanes, tags, reads)
            return reported
        if differs is not None:
            # An atomic has another outcome after the store than before it, even if it left this value by chance.
            bad &= differs() | origin.are_atomics(tags)
        if not bad.any():
            return reported
        for part in origin.by_site(bad):
            self._report_race(kind, hazard, access, tags, part, origin, compared)
        return np.asarray(bad if reported is None else bad | reported)

    def _check_written(self, access: GlobalAccess, written: Array) -> None:
        """Report a read of bytes that nobody has written. Only the first and last byte of each element are tested."""
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
            for touched in self._granules(access):
                tags = self.state.tags(buffer, self.launch.recording)
                origin = TagOrigin(tags.written_at, touched, tags.written_sizes)
                self._check_order("write after write", take(tags.written, touched), access, origin)

    def before_write(self, access: GlobalAccess, value: Array | None) -> None:
        """Check and tag a write of ``value`` (None: not known yet)."""
        self.check_allowed(access)
        if not self.hazards:
            return
        buffer, lanes, _, _, site, strong, form = access
        tags = self.state.tags(buffer, self.launch.recording)
        if form is Form.PACKED and self._is_kept(access, tags.write_run, tags.size_written):
            return
        stamp = self._stamp(lanes, strong)
        shared_places = False
        racing: Array | None = None
        differs = None if value is None else partial(self._bytes_differ, access, value)
        for touched in self._granules(access):
            if tags.read_only is not None and take(tags.read_only, touched).any():
                bad = take(tags.read_only, touched) & (True if differs is None else differs())
                if bad.any():
                    self._report("read-only-path", "writes what this launch reads by ld.global.nc", access, bad)
            racing = self._check_before_write(tags, touched, access, differs, racing)
            put(tags.written, touched, stamp)
            if strong >> SIZE_SHIFT:
                tags.size_written(touched, strong >> SIZE_SHIFT)
            if tags.written_at is not None:
                put(tags.written_at, touched, site + 1)
            # If two lanes write one granule, only one tag is left; the other lane does not find its own. Lanes of a
            # packed access have granules of their own.
            if value is not None and form is not Form.PACKED:
                shared_places = shared_places or bool((take(tags.written, touched) != stamp).any())
        if shared_places and value is not None:
            self._check_duplicates(access, value)

    def _check_before_write(
        self,
        tags: Tags,
        touched: Places,
        access: GlobalAccess,
        differs: Callable[[], Array] | None,
        reported: Array | None,
    ) -> Array | None:
        """Report a write of granules that does not happen after earlier writes and reads of them. ``reported``, and
        what is returned: see ``_check_order``."""
        if tags.is_written:
            origin = TagOrigin(tags.written_at, touched, tags.written_sizes)
            tagged = take(tags.written, touched)
            reported = self._check_order("write after write", tagged, access, origin, differs, reported=reported)
        if tags.is_read:
            origin = TagOrigin(tags.read_at, touched, tags.read_sizes)
            tagged = take(tags.read, touched)
            reported = self._check_order("write after read", tagged, access, origin, reported=reported)
        for earlier in tags.earlier.values():
            tagged, origin = take(earlier.tags, touched), TagOrigin(earlier.at, touched)
            reported = self._check_order("write after read", tagged, access, origin, reported=reported)
        return reported

    def _is_kept(
        self, access: GlobalAccess, keep: Callable[[GranuleRun], bool], size: Callable[[Places, int], None]
    ) -> bool:
        """Try to store a packed access as a run; returns whether that was possible. ``keep`` stores it, as a read or as
        a write, and ``size`` stores the size of a strong access. If it was possible, no other thread has touched these
        granules, so the access needs no check."""
        if not self.keeps_runs:
            return False
        run, strong = self._run(access), access.strong
        if not keep(run):
            return False
        if strong >> SIZE_SHIFT:
            size(slice(run.start, run.stop), strong >> SIZE_SHIFT)
        return True

    def _run(self, access: GlobalAccess) -> GranuleRun:
        """A packed access as a run."""
        buffer, lanes, offset, width, _, strong, _ = access
        shift = self.state.granule_shift
        start, per = (int(offset[0]) - buffer.start) >> shift, width >> shift
        first = 0 if lanes is None else lanes[0]
        return GranuleRun(start, start + len(offset) * per, per, int(self.batch.gthread[first]), self._moment(strong))

    def _moment(self, strong: int) -> int:
        """The upper part of a tag: tick and scope."""
        scope = scope_of(strong) if strong else 0
        return self.launch.tick << TICK_SHIFT | scope << SCOPE_SHIFT

    def _stamp(self, lanes: Array | None, strong: int) -> Array:
        """The tags that lanes leave at present."""
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

    def _unordered(self, lanes: Array, tags: Array, strong: int, reads: bool, origin: TagOrigin) -> Array:
        """Which of these tagged accesses (``reads``: they read) race with what the lanes do now?

        No race: the access is the lane's own; or both are strong, of one size, with scopes that reach each other; or it
        happens before the lane's present, which the clocks decide within a CTA and a cluster, and fences and flags
        elsewhere.
        """
        batch = self.batch
        thread = tags & THREAD
        bad: Array = thread != batch.gthread[lanes]
        if strong and bad.any():
            bad &= ~(self._morally_strong(lanes, tags, thread, scope_of(strong)) & origin.matches_size(strong))
        if not bad.any():
            return bad
        # What is left is decided in three steps, each for the accesses that the step before has not ordered: clocks of
        # warps within a CTA, clocks within a cluster, and fences and flags across the grid.
        todo = np.flatnonzero(bad)
        cta, local, tick = thread[todo] // batch.width, thread[todo] % batch.width, tags[todo] >> TICK_SHIFT
        pending = lanes[todo]
        own = batch.ctas[batch.row_of[pending]]
        ordered = np.zeros(len(todo), bool)
        inside = np.flatnonzero(cta == own)
        if inside.size:
            near = pending[inside]
            ordered[inside] = self.clocks.covers(batch.row_of[near], batch.warp[near], local[inside], tick[inside])
        if batch.cluster_size > 1:
            for i in np.flatnonzero(~ordered):
                row = self._rows().get(int(cta[i]))
                if row is not None:
                    lane = pending[i]
                    ordered[i] = self.clocks.ordered_in_cluster(
                        int(batch.row_of[lane]), int(batch.warp[lane]), row, int(local[i] >> 5), int(tick[i]), reads
                    )
        left = np.flatnonzero(~ordered) if self.state.order.active else ()
        if len(left):
            warp = batch.warp[pending[left]]
            ordered[left] = self.state.order.ordered(own[left], warp, cta[left], local[left], tick[left], strong > 0)
        bad[todo[ordered]] = False
        return bad

    def _rows(self) -> dict[int, int]:
        """CTA -> its row."""
        if not self._row_of_cta:
            self._row_of_cta = {int(cta): row for row, cta in enumerate(self.batch.ctas)}
        return self._row_of_cta

    def _morally_strong(self, lanes: Array, tags: Array, thread: Array, scope: Scope) -> Array:
        """Which tagged accesses are strong, with a scope that reaches the lane, while the lane's scope reaches them?"""
        # The narrower of the two scopes must include both threads. Scope 0 marks a weak access, which is never strong.
        # From GPU scope on every thread of the launch is included; narrower scopes depend on the two CTAs.
        reach = np.minimum(tags >> SCOPE_SHIFT & SCOPE, int(scope))
        out: Array = reach >= Scope.GPU
        narrow = np.flatnonzero((reach > 0) & ~out)
        if narrow.size:
            tagged, present = thread[narrow] // self.batch.width, self.batch.ctas[self.batch.row_of[lanes[narrow]]]
            pairs = zip(tagged.tolist(), present.tolist(), strict=True)
            out[narrow] = reach[narrow] >= np.array([self.launch.scope_of_both(a, b) for a, b in pairs])
        return out

    def _report_race(
        self, kind: str, hazard: str, access: GlobalAccess, tags: Array, bad: Array, origin: TagOrigin, strong: int
    ) -> None:
        """Report a race of those of an access's lanes that ``bad`` marks. ``strong``: the access's strength as far as
        it protects against races."""
        batch = self.batch
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
        threads = batch.thread[offenders[batch.row_of[offenders] == row[0]]].tolist()
        sides = [(access.site, batch.cta_index(int(row[0])), threads), (site, self.launch.cta_index(cta), [thread])]
        if same_cta:
            text = f"{hazard} by a thread in the same CTA"
        else:
            # Which of them comes first depends on the order of CTAs, so the findings do not say it.
            text = f"{' and '.join(sorted(hazard.split(' after ')))} by threads of two CTAs"
            if site > access.site:
                sides.reverse()
        (where, index, who), (other, other_index, others) = sides
        self.launch.reports.add(
            kind,
            f"{text}, with no barrier or release and acquire between{why}",
            where,
            index,
            sorted(who),
            address=int(access.offset[first]) + self.state.arena.base,
            count=len(offenders),
            other=Participant(self.launch.site(other), other_index, tuple(others)),
        )

    def _bytes_differ(self, access: GlobalAccess, value: Array) -> Array:
        """Which elements hold something other than the value that is about to be written?"""
        width = access.width
        content = self.state.arena.views[width][access.offset >> SHIFT[width]]
        a = np.ascontiguousarray(content).view(np.uint8).reshape(-1, width)
        b = np.ascontiguousarray(value).view(np.uint8).reshape(-1, width)
        return np.asarray((a != b).any(axis=1))

    def _check_duplicates(self, access: GlobalAccess, value: Array) -> None:
        """Report several lanes that write different values to one place in one instruction."""
        words = np.ascontiguousarray(value).view(np.uint8).reshape(-1, access.width)
        content: dict[int, bytes] = {}
        for word, at in zip(words, access.offset.tolist(), strict=True):
            if content.setdefault(at, word.tobytes()) != word.tobytes():
                text = "several threads write different values to one place in one instruction"
                self._report("global-race", text, access, access.offset == at)
                return
