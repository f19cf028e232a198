"""Findings of global accesses: initialisation, regions, races between threads and CTAs."""

from __future__ import annotations

import numpy as np

from cudal2gen.emulator.memory.arena import Buffer
from cudal2gen.emulator.memory.device_state import ATOMIC, THREAD, TICK_SHIFT, DeviceState
from cudal2gen.emulator.state.arrays import SHIFT, Array
from cudal2gen.emulator.state.batch import BatchState
from cudal2gen.emulator.state.clocks import Clocks


class DeviceHazards:
    """Checks before every global access of a batch; offsets are the arena's, one per lane of ``lanes`` (None: all)."""

    def __init__(self, batch: BatchState, clocks: Clocks, state: DeviceState) -> None:
        self.batch, self.clocks, self.state = batch, clocks, state
        self.launch = batch.launch
        self.hazards = batch.launch.options.hazards
        self.row_of_cta = {int(cta): row for row, cta in enumerate(batch.ctas)}

    def before_read(
        self, buffer: Buffer, lanes: Array | None, offset: Array, width: int, site: int, strong: bool
    ) -> None:
        """A read of ``width`` bytes; ``strong`` reads do not race with strong writes."""
        relative = offset - buffer.start
        self._check_written(buffer, lanes, relative, width, site)
        if not self.hazards:
            return
        tags = self.state.tags(buffer)
        if lanes is None:
            lanes = self.batch.everyone
        stamp = self.batch.gthread[lanes] | self._stamp(strong)
        granules = relative // self.state.granule
        for k in range(max(1, width // self.state.granule)):
            touched = granules + k
            old = tags.written[touched]
            if old.any():
                bad = self._unordered(lanes, old, strong) & (old != 0)
                if bad.any():
                    self._race("read after write by a thread", site, lanes, offset, old, bad)
                    break
            tags.read[touched] = stamp

    def _check_written(self, buffer: Buffer, lanes: Array | None, relative: Array, width: int, site: int) -> None:
        if buffer.written is None:
            return
        defined = buffer.written[relative]
        if width > 1:
            defined = defined & buffer.written[relative + (width - 1)]
        if not defined.all():
            self._report_unwritten(
                "reads memory that nobody has written", lanes, relative + buffer.start, defined == 0, site, True
            )

    def before_atomic(self, buffer: Buffer, lanes: Array, offset: Array, width: int, site: int) -> None:
        """A read-modify-write."""
        if buffer.written is not None:
            undefined = buffer.written[offset - buffer.start] == 0
            if undefined.any():
                self._report_unwritten(
                    "atomic on memory that nobody has written", lanes, offset, undefined, site, False
                )
        self.before_write(buffer, lanes, offset, width, site, None, True)

    def _report_unwritten(
        self, text: str, lanes: Array | None, offset: Array, bad: Array, site: int, doubtful: bool
    ) -> None:
        arena = self.state.arena
        mine = np.flatnonzero(bad) if lanes is None else lanes[bad]
        at = int(offset[np.flatnonzero(bad)[0]]) + arena.base
        self.batch.report_lanes(
            "uninitialised-global", f"{text}: {arena.describe(at)}", site, mine, at, doubtful=doubtful
        )

    def before_write(
        self,
        buffer: Buffer,
        lanes: Array | None,
        offset: Array,
        width: int,
        site: int,
        value: Array | None,
        strong: bool,
    ) -> None:
        """A write of ``value`` (None: not known yet). Writing what is already there races with nobody."""
        relative = offset - buffer.start
        self._check_allowed(buffer, lanes, offset, width, site)
        if not self.hazards:
            return
        tags = self.state.tags(buffer)
        if lanes is None:
            lanes = self.batch.everyone
        stamp = self.batch.gthread[lanes] | self._stamp(strong)
        granules = relative // self.state.granule
        shared_places = False
        for k in range(max(1, width // self.state.granule)):
            touched = granules + k
            for old, what in (
                (tags.written[touched], "write after write by a thread"),
                (tags.read[touched], "write after read by a thread"),
            ):
                if old.any():
                    bad = self._unordered(lanes, old, strong) & (old != 0)
                    if bad.any() and value is not None:
                        bad &= self._bytes_differ(offset, value, width)
                    if bad.any():
                        self._race(what, site, lanes, offset, old, bad)
                        break
            tags.written[touched] = stamp
            shared_places = shared_places or (value is not None and bool((tags.written[touched] != stamp).any()))
        if shared_places and value is not None:
            self._check_duplicates(lanes, offset, value, width, site)

    def _stamp(self, strong: bool) -> int:
        return (self.launch.tick << TICK_SHIFT) | (ATOMIC if strong else 0)

    def _check_allowed(self, buffer: Buffer, lanes: Array | None, offset: Array, width: int, site: int) -> None:
        batch, arena = self.batch, self.state.arena
        if buffer.role == "input":
            at = int(offset[0]) + arena.base
            everyone = batch.everyone if lanes is None else lanes
            batch.report_lanes("input-modified", f"writes to an input: {arena.describe(at)}", site, everyone, at)
        if buffer.allowed is not None:
            relative = offset - buffer.start
            allowed = buffer.allowed[relative] & buffer.allowed[relative + (width - 1)]
            if not allowed.all():
                bad = np.flatnonzero(allowed == 0)
                at = int(offset[bad[0]]) + arena.base
                text = f"writes outside the declared region: {arena.describe(at)}"
                batch.report_lanes("outside-region", text, site, bad if lanes is None else lanes[bad], at)

    def _unordered(self, lanes: Array, tags: Array, strong: bool) -> Array:
        """Which of these tagged accesses race with what the lanes do now?

        An access is ordered if it is the lane's own, if both are strong, or if its thread's tick is known: within a CTA
        and a cluster by the clocks, elsewhere by fences and flags.
        """
        batch = self.batch
        thread = tags & THREAD
        bad: Array = thread != batch.gthread[lanes]
        if strong:
            bad &= (tags & ATOMIC) == 0
        if not bad.any():
            return bad
        todo = np.flatnonzero(bad)
        cta, local, tick = thread[todo] // batch.width, thread[todo] % batch.width, tags[todo] >> TICK_SHIFT
        mine = lanes[todo]
        own = batch.ctas[batch.row_of[mine]]
        ordered = np.zeros(len(todo), bool)
        inside = np.flatnonzero(cta == own)
        if inside.size:
            near = mine[inside]
            horizon = self.clocks.horizon(batch.row_of[near], batch.warp[near], local[inside] >> 5)
            ordered[inside] = tick[inside] < horizon
        if batch.cluster_size > 1:
            for i in np.flatnonzero(~ordered):
                row = self.row_of_cta.get(int(cta[i]))
                if row is not None:
                    lane = mine[i]
                    ordered[i] = self.clocks.ordered_in_cluster(
                        int(batch.row_of[lane]), int(batch.warp[lane]), row, int(local[i] >> 5), int(tick[i])
                    )
        if self.state.order.active:
            self._by_flags(ordered, own, mine, cta, local, tick, strong)
        bad[todo[ordered]] = False
        return bad

    def _by_flags(
        self, ordered: Array, own: Array, mine: Array, cta: Array, local: Array, tick: Array, strong: bool
    ) -> None:
        """Mark what fences and flags order, warp by warp."""
        batch, order = self.batch, self.state.order
        rest = np.flatnonzero(~ordered)
        if not rest.size:
            return
        keys = own[rest] * batch.warps_per_cta + batch.warp[mine[rest]]
        for key in np.unique(keys):
            some = rest[keys == key]
            warp = int(batch.warp[mine[some[0]]])
            ordered[some] = order.ordered(int(own[some[0]]), warp, cta[some], local[some], tick[some], strong)

    def _race(self, what: str, site: int, lanes: Array, offset: Array, tags: Array, bad: Array) -> None:
        batch, arena = self.batch, self.state.arena
        first = int(np.flatnonzero(bad)[0])
        cta, thread = divmod(int(tags[first]) & THREAD, batch.width)
        where = self.launch.cta_index(cta)
        at = int(offset[first]) + arena.base
        relation = "in the same CTA" if where == batch.cta_index(int(batch.row_of[lanes[first]])) else "in another CTA"
        batch.report_lanes(
            "global-race",
            f"{what} {relation}, with no barrier or release and acquire between: {arena.describe(at)} "
            f"(the other side: CTA {where}, thread {thread})",
            site,
            lanes[bad],
            at,
        )

    def _bytes_differ(self, offset: Array, value: Array, width: int) -> Array:
        old = self.state.arena.views[width][offset >> SHIFT[width]]
        a = np.ascontiguousarray(old).view(np.uint8).reshape(-1, width)
        b = np.ascontiguousarray(value).view(np.uint8).reshape(-1, width)
        return np.asarray((a != b).any(axis=1))

    def _check_duplicates(self, lanes: Array, offset: Array, value: Array, width: int, site: int) -> None:
        """Several lanes wrote one place in one instruction: a race unless they wrote the same."""
        arena = self.state.arena
        words = np.ascontiguousarray(value).view(np.uint8).reshape(-1, width)
        last: dict[int, bytes] = {}
        for i, at in enumerate(offset):
            content = words[i].tobytes()
            if last.setdefault(int(at), content) != content:
                address = int(at) + arena.base
                self.batch.report_lanes(
                    "global-race",
                    "several threads write different values to one place in one instruction: "
                    + arena.describe(address),
                    site,
                    lanes[offset == at],
                    address,
                )
                return
