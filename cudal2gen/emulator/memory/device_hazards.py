"""Findings of global accesses: initialisation, regions, races between threads and CTAs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from cudal2gen.emulator.memory.arena import Buffer
from cudal2gen.emulator.memory.device_state import DeviceState
from cudal2gen.emulator.memory.places import ROW, Form, Places, Rows, put, take
from cudal2gen.emulator.memory.tags import SCOPE, SCOPE_SHIFT, THREAD, TICK_SHIFT, Run, Tags
from cudal2gen.emulator.state.arrays import SHIFT, Array
from cudal2gen.emulator.state.batch import BatchState
from cudal2gen.emulator.state.clocks import Clocks
from cudal2gen.emulator.state.participants import Participant
from cudal2gen.emulator.state.scopes import CHECKED, READ_MODIFY_WRITE, SIZE_SHIFT, Scope, scope_of


class Origin(NamedTuple):
    """The instructions that left the tags of an access's granules, if they are recorded; the sizes of strong
    ones."""

    sites: Array | None
    granules: Places
    sizes: Array | None = None

    def site(self, element: int) -> int:
        """Of one element, -1 if it is not recorded."""
        return -1 if self.sites is None else int(take(self.sites, self.granules)[element]) - 1

    def alike(self, strong: int) -> Array | bool:
        """Which of them, if strong, cover what a strong access covers, no more and no less? Read-modify-writes are
        atomic for each other whatever their sizes."""
        size = strong >> SIZE_SHIFT
        if self.sizes is None or not size:
            return True
        sizes = take(self.sizes, self.granules)
        both_modify = sizes & size & READ_MODIFY_WRITE != 0
        return np.asarray(both_modify | (sizes | READ_MODIFY_WRITE == size | READ_MODIFY_WRITE))


def places_of_bytes(buffer: Buffer, offset: Array, width: int, form: Form) -> Places:
    """The bytes of an access in the buffer, of one that is not scattered."""
    if form is Form.PACKED:
        start = int(offset[0]) - buffer.start
        return slice(start, start + len(offset) * width)
    return Rows(offset[::ROW] - buffer.start, ROW * width)


def _kept(run: Run, strong: int, keep: Callable[[Run], bool], size: Callable[[Places, int], None]) -> bool:
    """Is an access kept as a run, by what its tags have for reads or for writes: ``keep``, and ``size`` of strong
    ones?"""
    if not keep(run):
        return False
    if strong >> SIZE_SHIFT:
        size(slice(run.start, run.stop), strong >> SIZE_SHIFT)
    return True


class DeviceHazards:
    """Checks before every global access of a batch; offsets are the arena's, one per lane of ``lanes`` (None: all);
    ``form``: how these lie in memory."""

    def __init__(self, batch: BatchState, clocks: Clocks, state: DeviceState) -> None:
        self.batch, self.clocks, self.state = batch, clocks, state
        self.launch = batch.launch
        self.hazards = batch.launch.options.hazards
        # Instructions are recorded granule by granule.
        self.keeps_runs = batch.are_in_a_row and not self.launch.recording
        self._row_of_cta: dict[int, int] = {}
        # The last stamp of all lanes, and the tick and scope that it is for.
        self._last_stamp: tuple[int, Array] = (-1, batch.gthread)

    def before_read(
        self,
        buffer: Buffer,
        lanes: Array | None,
        offset: Array,
        width: int,
        site: int,
        strong: int,
        form: Form = Form.SCATTERED,
    ) -> None:
        """A read of ``width`` bytes; ``strong`` reads do not race with strong writes that their scope reaches."""
        if buffer.written is not None:
            self._check_written(buffer, lanes, offset, width, site, form)
        if not self.hazards:
            return
        tags = self.state.tags(buffer, self.launch.recording)
        if form is Form.PACKED and self.keeps_runs:
            run = self._run(buffer, lanes, offset, width, strong)
            if _kept(run, strong, tags.read_run, tags.size_read):
                return
        stamp = self._stamp(lanes, strong)
        kind = "plain-first-load" if strong & CHECKED else "global-race"
        for touched in self._granules(buffer, offset, width, form):
            if tags.is_written:
                tagged, origin = take(tags.written, touched), Origin(tags.written_at, touched, tags.written_sizes)
                if self._check_order("read after write", tagged, lanes, offset, site, strong, origin, kind=kind):
                    break
            put(tags.read, touched, stamp)
            if strong >> SIZE_SHIFT:
                tags.size_read(touched, strong >> SIZE_SHIFT)
            if tags.read_at is not None:
                put(tags.read_at, touched, site + 1)

    def before_constant_read(
        self, buffer: Buffer, lanes: Array | None, offset: Array, width: int, site: int, form: Form
    ) -> None:
        """A read through the read-only path (``ld.global.nc``): nobody writes these bytes during the launch."""
        if not self.hazards:
            return
        tags = self.state.tags(buffer, self.launch.recording)
        if tags.read_only is None:
            tags.read_only = np.zeros(tags.granules, bool)
        for touched in self._granules(buffer, offset, width, form):
            put(tags.read_only, touched, True)
            if not tags.is_written:
                continue
            bad = take(tags.written, touched) != 0
            if bad.any():
                text = "reads by ld.global.nc what this launch has written"
                self._report_read_only(text, lanes, offset, bad, site)
                return

    def _report_read_only(self, text: str, lanes: Array | None, offset: Array, bad: Array, site: int) -> None:
        offenders = np.flatnonzero(bad) if lanes is None else lanes[bad]
        at = int(offset[np.flatnonzero(bad)[0]]) + self.state.arena.base
        self.batch.report_lanes("read-only-path", text, site, offenders, at)

    def _granules(self, buffer: Buffer, offset: Array, width: int, form: Form = Form.SCATTERED) -> Iterator[Places]:
        """Per granule of an access, its number in the buffer for every lane."""
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
        lanes: Array | None,
        offset: Array,
        site: int,
        strong: int,
        origin: Origin,
        differs: Callable[[], Array] | None = None,
        kind: str = "global-race",
    ) -> bool:
        """Report accesses that do not come after the tagged ones. ``differs``: which of them change what is there;
        others race with nobody."""
        if not tags.any():
            return False
        # Fast path: most lanes touch granules that only they have touched.
        bad = (tags & THREAD) != (self.batch.gthread if lanes is None else self.batch.gthread[lanes])
        if not bad.any():
            return False
        bad &= tags != 0
        if not bad.any():
            return False
        compared = 0 if strong & CHECKED else strong
        lanes = self.batch.everyone if lanes is None else lanes
        bad &= self._unordered(lanes, tags, compared, hazard == "write after read", origin)
        if bad.any() and differs is not None:
            bad &= differs()
        if bad.any():
            self._race(kind, hazard, site, lanes, offset, tags, bad, origin, compared)
        return bool(bad.any())

    def _check_written(
        self, buffer: Buffer, lanes: Array | None, offset: Array, width: int, site: int, form: Form
    ) -> None:
        assert buffer.written is not None
        if form is not Form.SCATTERED and take(buffer.written, places_of_bytes(buffer, offset, width, form)).all():
            return
        relative = offset - buffer.start
        defined = buffer.written[relative]
        if width > 1:
            defined = defined & buffer.written[relative + (width - 1)]
        if not defined.all():
            self._report_unwritten(
                "reads memory that nobody has written", lanes, relative + buffer.start, defined == 0, site, True
            )

    def before_atomic(self, buffer: Buffer, lanes: Array, offset: Array, width: int, site: int, strong: int) -> None:
        """A read-modify-write."""
        if buffer.written is not None:
            undefined = buffer.written[offset - buffer.start] == 0
            if undefined.any():
                self._report_unwritten(
                    "atomic on memory that nobody has written", lanes, offset, undefined, site, False
                )
        self.before_write(buffer, lanes, offset, width, site, None, strong)
        if self.hazards and scope_of(strong) < Scope.GPU:
            # Lanes of several CTAs may have changed one place in this very instruction.
            for touched in self._granules(buffer, offset, width):
                tags = self.state.tags(buffer, self.launch.recording)
                origin = Origin(tags.written_at, touched, tags.written_sizes)
                self._check_order("write after write", take(tags.written, touched), lanes, offset, site, strong, origin)

    def _report_unwritten(
        self, text: str, lanes: Array | None, offset: Array, bad: Array, site: int, doubtful: bool
    ) -> None:
        arena = self.state.arena
        offenders = np.flatnonzero(bad) if lanes is None else lanes[bad]
        at = int(offset[np.flatnonzero(bad)[0]]) + arena.base
        self.batch.report_lanes("uninitialised-global", text, site, offenders, at, doubtful=doubtful)

    def before_write(
        self,
        buffer: Buffer,
        lanes: Array | None,
        offset: Array,
        width: int,
        site: int,
        value: Array | None,
        strong: int,
        form: Form = Form.SCATTERED,
    ) -> None:
        """A write of ``value`` (None: not known yet). Writing what is already there races with nobody."""
        self.check_allowed(buffer, lanes, offset, width, site)
        if not self.hazards:
            return
        tags = self.state.tags(buffer, self.launch.recording)
        if form is Form.PACKED and self.keeps_runs:
            run = self._run(buffer, lanes, offset, width, strong)
            if _kept(run, strong, tags.write_run, tags.size_written):
                return
        stamp = self._stamp(lanes, strong)
        shared_places = False
        differs = None if value is None else partial(self._bytes_differ, offset, value, width)
        for touched in self._granules(buffer, offset, width, form):
            if tags.read_only is not None and take(tags.read_only, touched).any():
                bad = take(tags.read_only, touched) & (True if differs is None else differs())
                if bad.any():
                    self._report_read_only("writes what this launch reads by ld.global.nc", lanes, offset, bad, site)
            self._check_before_write(tags, touched, lanes, offset, site, strong, differs)
            put(tags.written, touched, stamp)
            if strong >> SIZE_SHIFT:
                tags.size_written(touched, strong >> SIZE_SHIFT)
            if tags.written_at is not None:
                put(tags.written_at, touched, site + 1)
            if value is not None and form is not Form.PACKED:
                shared_places = shared_places or bool((take(tags.written, touched) != stamp).any())
        if shared_places and value is not None:
            self._check_duplicates(lanes, offset, value, width, site)

    def _check_before_write(
        self,
        tags: Tags,
        touched: Places,
        lanes: Array | None,
        offset: Array,
        site: int,
        strong: int,
        differs: Callable[[], Array] | None,
    ) -> None:
        """A write of granules comes after earlier writes and reads of them."""
        if tags.is_written:
            origin = Origin(tags.written_at, touched, tags.written_sizes)
            hazard = "write after write"
            if self._check_order(hazard, take(tags.written, touched), lanes, offset, site, strong, origin, differs):
                return
        if tags.is_read:
            origin = Origin(tags.read_at, touched, tags.read_sizes)
            self._check_order(
                "write after read", take(tags.read, touched), lanes, offset, site, strong, origin, differs
            )

    def _run(self, buffer: Buffer, lanes: Array | None, offset: Array, width: int, strong: int) -> Run:
        """A packed access as a run."""
        shift = self.state.granule_shift
        start, per = (int(offset[0]) - buffer.start) >> shift, width >> shift
        first = 0 if lanes is None else lanes[0]
        return Run(start, start + len(offset) * per, per, int(self.batch.gthread[first]), self._moment(strong))

    def _moment(self, strong: int) -> int:
        scope = scope_of(strong) if strong else 0
        return self.launch.tick << TICK_SHIFT | scope << SCOPE_SHIFT

    def _stamp(self, lanes: Array | None, strong: int) -> Array:
        """The tags that lanes leave now."""
        moment = self._moment(strong)
        if lanes is not None:
            return np.asarray(self.batch.gthread[lanes] | moment)
        if self._last_stamp[0] != moment:
            self._last_stamp = moment, self.batch.gthread | moment
        return self._last_stamp[1]

    def check_allowed(self, buffer: Buffer, lanes: Array | None, offset: Array, width: int, site: int) -> None:
        """A write may go to this buffer, and within its region."""
        batch, arena = self.batch, self.state.arena
        if buffer.role == "input":
            at = int(offset[0]) + arena.base
            everyone = batch.everyone if lanes is None else lanes
            batch.report_lanes("input-modified", "writes to an input", site, everyone, at)
        if buffer.allowed is not None:
            relative = offset - buffer.start
            allowed = buffer.allowed[relative] & buffer.allowed[relative + (width - 1)]
            if not allowed.all():
                bad = np.flatnonzero(allowed == 0)
                at = int(offset[bad[0]]) + arena.base
                batch.report_lanes(
                    "outside-region",
                    "writes outside the declared region",
                    site,
                    bad if lanes is None else lanes[bad],
                    at,
                )

    def _unordered(self, lanes: Array, tags: Array, strong: int, reads: bool, origin: Origin) -> Array:
        """Which of these tagged accesses (``reads``: they read) race with what the lanes do now?

        An access is ordered if it is the lane's own, if both are strong and alike and their scopes reach each other, or
        if its thread's tick is known: within a CTA and a cluster by the clocks, elsewhere by fences and flags.
        """
        batch = self.batch
        thread = tags & THREAD
        bad: Array = thread != batch.gthread[lanes]
        if strong and bad.any():
            bad &= ~(self._morally_strong(lanes, tags, thread, scope_of(strong)) & origin.alike(strong))
        if not bad.any():
            return bad
        todo = np.flatnonzero(bad)
        cta, local, tick = thread[todo] // batch.width, thread[todo] % batch.width, tags[todo] >> TICK_SHIFT
        pending = lanes[todo]
        own = batch.ctas[batch.row_of[pending]]
        ordered = np.zeros(len(todo), bool)
        inside = np.flatnonzero(cta == own)
        if inside.size:
            near = pending[inside]
            horizon = self.clocks.horizon(batch.row_of[near], batch.warp[near], local[inside] >> 5)
            ordered[inside] = tick[inside] < horizon
        if batch.cluster_size > 1:
            for i in np.flatnonzero(~ordered):
                row = self._rows().get(int(cta[i]))
                if row is not None:
                    lane = pending[i]
                    ordered[i] = self.clocks.ordered_in_cluster(
                        int(batch.row_of[lane]), int(batch.warp[lane]), row, int(local[i] >> 5), int(tick[i]), reads
                    )
        if self.state.order.active:
            self._by_flags(ordered, own, pending, cta, local, tick, strong)
        bad[todo[ordered]] = False
        return bad

    def _rows(self) -> dict[int, int]:
        """CTA -> its row."""
        if not self._row_of_cta:
            self._row_of_cta = {int(cta): row for row, cta in enumerate(self.batch.ctas)}
        return self._row_of_cta

    def _morally_strong(self, lanes: Array, tags: Array, thread: Array, scope: Scope) -> Array:
        """Which tagged accesses are strong, of scopes that reach the lanes, as the lanes' scope reaches them?"""
        reach = np.minimum(tags >> SCOPE_SHIFT & SCOPE, int(scope))
        out: Array = reach >= Scope.GPU
        rest = np.flatnonzero((reach > 0) & ~out)
        if rest.size:
            other, own = thread[rest] // self.batch.width, self.batch.ctas[self.batch.row_of[lanes[rest]]]
            cluster_of = self.launch.cluster_of
            near = np.array([cluster_of(int(a)) == cluster_of(int(b)) for a, b in zip(other, own, strict=True)], bool)
            out[rest] = (other == own) | (near & (reach[rest] >= Scope.CLUSTER))
        return out

    def _by_flags(
        self, ordered: Array, own: Array, lanes: Array, cta: Array, local: Array, tick: Array, strong: int
    ) -> None:
        """Marks the accesses that fences and flags order, warp by warp."""
        batch, order = self.batch, self.state.order
        rest = np.flatnonzero(~ordered)
        if not rest.size:
            return
        keys = own[rest] * batch.warps_per_cta + batch.warp[lanes[rest]]
        for key in np.unique(keys):
            some = rest[keys == key]
            warp = int(batch.warp[lanes[some[0]]])
            ordered[some] = order.ordered(int(own[some[0]]), warp, cta[some], local[some], tick[some], strong > 0)

    def _race(
        self,
        kind: str,
        hazard: str,
        site: int,
        lanes: Array,
        offset: Array,
        tags: Array,
        bad: Array,
        origin: Origin,
        strong: int,
    ) -> None:
        batch, arena = self.batch, self.state.arena
        first = int(np.flatnonzero(bad)[0])
        cta, thread = divmod(int(tags[first]) & THREAD, batch.width)
        where = self.launch.cta_index(cta)
        at = int(offset[first]) + arena.base
        relation = "in the same CTA" if where == batch.cta_index(int(batch.row_of[lanes[first]])) else "in another CTA"
        both_strong = strong and int(tags[first]) >> SCOPE_SHIFT & SCOPE
        mixed = both_strong and not np.broadcast_to(origin.alike(strong), len(tags))[first]
        sizes = ": both are strong, but of different sizes" if mixed else ""
        batch.report_lanes(
            kind,
            f"{hazard} by a thread {relation}, with no barrier or release and acquire between{sizes}",
            site,
            lanes[bad],
            at,
            other=Participant(self.launch.site(origin.site(first)), where, (thread,)),
        )

    def _bytes_differ(self, offset: Array, value: Array, width: int) -> Array:
        old = self.state.arena.views[width][offset >> SHIFT[width]]
        a = np.ascontiguousarray(old).view(np.uint8).reshape(-1, width)
        b = np.ascontiguousarray(value).view(np.uint8).reshape(-1, width)
        return np.asarray((a != b).any(axis=1))

    def _check_duplicates(self, lanes: Array | None, offset: Array, value: Array, width: int, site: int) -> None:
        """Reports a race where several lanes write different values to one place in one instruction."""
        arena = self.state.arena
        lanes = self.batch.everyone if lanes is None else lanes
        words = np.ascontiguousarray(value).view(np.uint8).reshape(-1, width)
        last: dict[int, bytes] = {}
        for i, at in enumerate(offset):
            content = words[i].tobytes()
            if last.setdefault(int(at), content) != content:
                address = int(at) + arena.base
                self.batch.report_lanes(
                    "global-race",
                    "several threads write different values to one place in one instruction",
                    site,
                    lanes[offset == at],
                    address,
                )
                return
