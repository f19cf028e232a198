"""Global memory as the threads of a batch see it: bounds, initialisation, races between threads and CTAs, atomics,
fences.

Generic addresses and local memory are here too, as a generic access is a global one unless its address says otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cudal2gen.emulator.arithmetic.arithmetic import modify
from cudal2gen.emulator.memory.arena import MOVER, SHIFT, Buffer

if TYPE_CHECKING:
    from cudal2gen.emulator.machine.batch import Batch

Array = NDArray[Any]
Mask = Array | None


class Tags:
    """Last writer and reader of every granule of a buffer in this launch: tick << 33 | atomic << 32 | global thread."""

    __slots__ = ("read", "written")

    def __init__(self, count: int) -> None:
        self.written: Array = np.zeros(count, np.int64)
        self.read: Array = np.zeros(count, np.int64)


THREAD = (1 << 32) - 1
ATOMIC = 1 << 32
TICK_SHIFT = 33


class DeviceMemory:
    """Global, generic and local accesses of a batch. Addresses are uint64, one per lane."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.launch = batch, batch.launch
        self.size, self.count, self.width = batch.size, batch.count, batch.width
        self.ctas, self.row_of, self.warp, self.gthread, self.alive = (
            batch.ctas,
            batch.row_of,
            batch.warp,
            batch.gthread,
            batch.alive,
        )
        local = batch.launch.compiled.local_bytes
        # Launched to overlap its predecessor: global data may not be touched before griddepcontrol.wait.
        self.guarded = batch.launch.overlapping and batch.launch.options.hazards
        self.waited: Array = np.zeros((self.count, self.width // 32), np.int64)
        self.local: Array = np.full((self.size, local) if local else (0, 0), 0xFF, np.uint8)

    # --- programmatic dependent launch ---

    def guard(self, lanes: Array | None, site: int) -> None:
        """Report global accesses that may come before the end of the launch before."""
        if not self.guarded:
            return
        if lanes is None:
            lanes = np.arange(self.size)
        rows, warps = self.row_of[lanes], self.warp[lanes]
        bad = self.waited[rows, warps] == 0
        for i in np.flatnonzero(bad):
            # A barrier after another warp's wait will do as well.
            row, warp = int(rows[i]), int(warps[i])
            when = self.waited[row]
            known = self.batch.known(np.full(len(when), row), np.full(len(when), warp), np.arange(len(when)))
            bad[i] = not ((when > 0) & (known > when)).any()
        if bad.any():
            self.batch.report_lanes(
                "grid-dependency",
                "touches global memory before griddepcontrol.wait, in a launch that may overlap the one before",
                site,
                lanes[bad],
            )

    # --- global memory ---

    def _locate(
        self, address: Array, width: int, m: Mask, site: int
    ) -> tuple[Array | None, Array, list[tuple[Buffer, Any]]] | None:
        """(lanes or None, arena offsets, [(buffer, selection)]) of a global access, invalid lanes reported and
        dropped."""
        lanes = None
        if m is not None:
            lanes = self.batch.lanes(m)
            if lanes.size == 0:
                return None
            address = address[lanes]
        memory = self.launch.memory
        offset = (address - np.uint64(memory.base)).view(np.int64)
        low, high = int(offset.min()), int(offset.max())
        buffer = memory.find(low) if low >= 0 else None
        if buffer is not None and high + width <= buffer.end and not int(np.bitwise_or.reduce(offset)) & (width - 1):
            return lanes, offset, [(buffer, None)]
        starts = np.array(memory.starts, np.int64)
        ends = np.array([b.end for b in memory.buffers], np.int64)
        which = np.searchsorted(starts, offset, side="right") - 1
        if len(starts):
            outside = (which < 0) | (offset + width > ends[np.maximum(which, 0)])
        else:
            outside = np.ones(len(offset), bool)
        crooked = (offset & (width - 1)) != 0
        bad = outside | crooked
        if bad.any():
            if lanes is None:
                lanes = np.arange(self.size)
            for wrong, kind in ((outside & ~crooked, "global-out-of-bounds"), (crooked, "global-misaligned")):
                if wrong.any():
                    first = int(np.flatnonzero(wrong)[0])
                    at = int(offset[first]) + memory.base
                    text = f"{width}-byte access at {hex(at & (1 << 64) - 1)}, {memory.describe(at)}"
                    self.batch.report_lanes(kind, text, site, lanes[wrong], at)
            good = ~bad
            lanes, offset, which = lanes[good], offset[good], which[good]
            if lanes.size == 0:
                return None
        return lanes, offset, [(memory.buffers[int(i)], np.flatnonzero(which == i)) for i in np.unique(which)]

    def _tags(self, buffer: Buffer) -> Tags:
        tags = self.launch.buffer_tags.get(id(buffer))
        if tags is None:
            granule = self.launch.compiled.global_granule
            tags = self.launch.buffer_tags[id(buffer)] = Tags(-(-buffer.nbytes // granule) + 16 // granule)
        return tags

    def _unordered(self, lanes: Array, tags: Array, strong: bool) -> Array:
        """Which of these tagged accesses race with what the lanes do now?"""
        thread = tags & THREAD
        bad: Array = thread != self.gthread[lanes]
        if strong:
            bad &= (tags & ATOMIC) == 0
        if not bad.any():
            return bad
        todo = np.flatnonzero(bad)
        cta, local, tick = thread[todo] // self.width, thread[todo] % self.width, tags[todo] >> TICK_SHIFT
        mine = lanes[todo]
        own = self.ctas[self.row_of[mine]]
        same = cta == own
        ok = np.zeros(len(todo), bool)
        if same.any():
            s = np.flatnonzero(same)
            ok[s] = tick[s] < self.batch.known(self.row_of[mine[s]], self.warp[mine[s]], local[s] >> 5)
        if self.batch.cluster_size > 1 and self.batch.known_ticks is not None:
            self._ordered_in_cluster(ok, cta, local >> 5, tick, mine)
        order = self.launch.order
        if order.active:
            rest = np.flatnonzero(~ok)
            if rest.size:
                keys = own[rest] * (self.width // 32) + self.warp[mine[rest]]
                for key in np.unique(keys):
                    sel = rest[keys == key]
                    ok[sel] = order.ordered(
                        int(own[sel[0]]), int(self.warp[mine[sel[0]]]), cta[sel], local[sel], tick[sel], strong
                    )
        bad[todo[ok]] = False
        return bad

    def _ordered_in_cluster(self, ok: Array, cta: Array, warp: Array, tick: Array, lanes: Array) -> None:
        """Accesses of other CTAs of the cluster may be ordered by its barriers and mbarriers."""
        batch = self.batch
        rows = {int(c): r for r, c in enumerate(self.ctas)}
        for i in np.flatnonzero(~ok):
            row, own = rows.get(int(cta[i])), int(self.row_of[lanes[i]])
            if row is not None and row // batch.cluster_size == own // batch.cluster_size:
                column = batch.first_column(row) + int(warp[i])
                assert batch.known_ticks is not None
                ok[i] = batch.known_ticks[own, self.warp[lanes[i]], column] > tick[i]

    def _race(self, what: str, site: int, lanes: Array, offset: Array, tags: Array, bad: Array) -> None:
        first = int(np.flatnonzero(bad)[0])
        other = int(tags[first]) & THREAD
        gx, gy, _ = self.launch.grid
        cta = other // self.width
        where = (cta % gx, cta // gx % gy, cta // (gx * gy))
        at = int(offset[first]) + self.launch.memory.base
        mine = self.batch.cta_index(int(self.row_of[lanes[first]]))
        relation = "in the same CTA" if where == mine else "in another CTA"
        self.batch.report_lanes(
            "global-race",
            f"{what} {relation}, with no barrier or release and acquire between: {self.launch.memory.describe(at)} "
            f"(the other side: CTA {where}, thread {other % self.width})",
            site,
            lanes[bad],
            at,
        )

    def before_read(
        self, buffer: Buffer, lanes: Array | None, offset: Array, width: int, site: int, strong: bool
    ) -> None:
        relative = offset - buffer.start
        if buffer.written is not None:
            known = buffer.written[relative]
            if width > 1:
                known = known & buffer.written[relative + (width - 1)]
            if not known.all():
                bad = known == 0
                mine = np.flatnonzero(bad) if lanes is None else lanes[bad]
                at = int(offset[np.flatnonzero(bad)[0]]) + self.launch.memory.base
                self.batch.report_lanes(
                    "uninitialised-global",
                    f"reads memory that nobody has written: {self.launch.memory.describe(at)}",
                    site,
                    mine,
                    at,
                    doubtful=True,
                )
        if not self.launch.options.hazards:
            return
        tags = self._tags(buffer)
        granule = self.launch.compiled.global_granule
        if lanes is None:
            lanes = np.arange(self.size)
        stamp = (self.launch.tick << TICK_SHIFT) | (ATOMIC if strong else 0)
        granules = relative // granule
        for k in range(max(1, width // granule)):
            touched = granules + k
            old = tags.written[touched]
            if old.any():
                bad = self._unordered(lanes, old, strong) & (old != 0)
                if bad.any():
                    self._race("read after write by a thread", site, lanes, offset, old, bad)
                    break
            tags.read[touched] = self.gthread[lanes] | stamp

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
        relative = offset - buffer.start
        memory = self.launch.memory
        if buffer.role == "input":
            everyone = np.arange(self.size) if lanes is None else lanes
            at = int(offset[0]) + memory.base
            self.batch.report_lanes("input-modified", f"writes to an input: {memory.describe(at)}", site, everyone, at)
        if buffer.allowed is not None:
            allowed = buffer.allowed[relative] & buffer.allowed[relative + (width - 1)]
            if not allowed.all():
                bad = np.flatnonzero(allowed == 0)
                mine = bad if lanes is None else lanes[bad]
                at = int(offset[bad[0]]) + memory.base
                self.batch.report_lanes(
                    "outside-region", f"writes outside the declared region: {memory.describe(at)}", site, mine, at
                )
        if not self.launch.options.hazards:
            return
        tags = self._tags(buffer)
        granule = self.launch.compiled.global_granule
        if lanes is None:
            lanes = np.arange(self.size)
        stamp = (self.launch.tick << TICK_SHIFT) | (ATOMIC if strong else 0)
        mine = self.gthread[lanes] | stamp
        granules = relative // granule
        for k in range(max(1, width // granule)):
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
            tags.written[touched] = mine
            if value is not None:
                back = tags.written[touched] != mine
                if back.any():
                    self._check_duplicates(lanes, offset, value, width, site)
                    break

    def _bytes_differ(self, offset: Array, value: Array, width: int) -> Array:
        old = self.launch.memory.views[width][offset >> SHIFT[width]]
        a = np.ascontiguousarray(old).view(np.uint8).reshape(-1, width)
        b = np.ascontiguousarray(value).view(np.uint8).reshape(-1, width)
        out: Array = (a != b).any(axis=1)
        return out

    def _check_duplicates(self, lanes: Array, offset: Array, value: Array, width: int, site: int) -> None:
        """Several lanes wrote one place in one instruction: a race unless they wrote the same."""
        words = np.ascontiguousarray(value).view(np.uint8).reshape(-1, width)
        last: dict[int, bytes] = {}
        for i, at in enumerate(offset):
            content = words[i].tobytes()
            old = last.setdefault(int(at), content)
            if old != content:
                self.batch.report_lanes(
                    "global-race",
                    "several threads write different values to one place in one instruction: "
                    + self.launch.memory.describe(int(at) + self.launch.memory.base),
                    site,
                    lanes[offset == at],
                    int(at) + self.launch.memory.base,
                )
                return

    def load(self, address: Array, width: int, m: Mask, site: int, strong: int = 0) -> Array:
        """Global load, ``width`` bytes per lane. ``strong``: 1 relaxed or volatile, 2 acquire."""
        found = self._locate(address, width, m, site)
        if found is None:
            return self.batch.poison(width)
        lanes, offset, places = found
        if self.guarded:
            self.guard(lanes, site)
        counters = self.launch.counters
        if counters is not None:
            counters.memory("ld.global", self.size, offset, lanes, width)
        for buffer, sel in places:
            if buffer.written is not None or buffer.role != "input":
                chosen, at = (
                    (lanes, offset)
                    if sel is None
                    else ((np.arange(self.size) if lanes is None else lanes)[sel], offset[sel])
                )
                self.before_read(buffer, chosen, at, width, site, strong > 0)
        if strong and self.launch.order.active:
            self._flags(lanes, offset, strong, read=True)
        got: Array = self.launch.memory.views[width][offset >> SHIFT[width]]
        return got if lanes is None else self.batch.spread(got, lanes, width)

    def store(self, address: Array, value: Array, width: int, m: Mask, site: int, strong: int = 0) -> None:
        """Global store. ``strong``: 1 relaxed or volatile, 2 release."""
        found = self._locate(address, width, m, site)
        if found is None:
            return
        lanes, offset, places = found
        if self.guarded:
            self.guard(lanes, site)
        if lanes is not None:
            value = value[lanes]
        if self.launch.counters is not None:
            self.launch.counters.memory("st.global", self.size, offset, lanes, width)
        for buffer, sel in places:
            if sel is None:
                self.before_write(buffer, lanes, offset, width, site, value, strong > 0)
                self.mark(buffer, offset, width)
            else:
                everyone = np.arange(self.size) if lanes is None else lanes
                self.before_write(buffer, everyone[sel], offset[sel], width, site, value[sel], strong > 0)
                self.mark(buffer, offset[sel], width)
        if strong:
            if strong > 1:
                self.fence(m)
            if self.launch.order.active:
                self._flags(lanes, offset, strong, write=True)
        self.launch.memory.views[width][offset >> SHIFT[width]] = value
        self.launch.version += 1

    def mark(self, buffer: Buffer, offset: Array, width: int) -> None:
        written = buffer.written
        if written is None:
            return
        relative = offset - buffer.start
        whole = len(written) - len(written) % width
        if buffer.nbytes == whole:
            written.view(MOVER[width])[relative >> SHIFT[width]] = _ONES[width]
        else:
            for k in range(width):
                written[relative + k] = 1

    def _flags(
        self,
        lanes: Array | None,
        offset: Array,
        strong: int,
        read: bool = False,
        write: bool = False,
        keep: bool = False,
    ) -> None:
        order = self.launch.order
        for i, at in enumerate(offset):
            lane = i if lanes is None else int(lanes[i])
            cta, warp = int(self.ctas[self.row_of[lane]]), int(self.warp[lane])
            if read:
                order.read_flag(int(at), cta, warp, strong > 1)
            if write:
                order.write_flag(int(at), cta, warp, keep)

    def fence(self, m: Mask) -> None:
        """membar.gl / fence at GPU scope or wider."""
        launch = self.launch
        if not launch.options.hazards:
            return
        mask = (self.alive if m is None else m).reshape(self.count, self.width // 32, 32)
        rows, warps = np.nonzero(mask.any(axis=2))
        per_warp = np.arange(self.width) >> 5
        for row, warp in zip(rows, warps, strict=True):
            lanes = np.flatnonzero(mask[row, warp]) + 32 * warp
            known = (
                self.batch.base_tick[row]
                if self.batch.known_ticks is None
                else self.batch.known_ticks[row, warp][self.batch.first_column(int(row)) + per_warp]
            )
            row_clock = np.full(self.width, known, np.int64) if self.batch.known_ticks is None else known
            launch.order.fence(int(self.ctas[row]), int(warp), lanes, row_clock, launch.tick)
        self.batch.shared.fence(m)

    def copy_async(self, destination: Array, source: Array, width: int, bytes_read: Any, m: Mask, site: int) -> None:
        """cp.async of ``width`` bytes per lane, the first ``bytes_read`` (None: all; int or array) from global memory,
        the rest zero."""
        if bytes_read is None:
            data = self.load(source, width, m, site)
            if self.launch.counters is not None:
                self.launch.counters.cp_async += self.size if m is None else int(m.sum())
            self.batch.shared.copy(destination, data, width, m, site)
            return
        count = np.full(self.size, bytes_read, np.int64) if type(bytes_read) is int else bytes_read.astype(np.int64)
        active = np.ones(self.size, bool) if m is None else m
        if self.launch.counters is not None:
            self.launch.counters.cp_async += int(active.sum())
        if (count[active] > width).any():
            self.batch.report_lanes(
                "global-out-of-bounds", f"src-size larger than {width}", site, np.flatnonzero(active & (count > width))
            )
        raw = np.zeros((self.size, width), np.uint8)
        full = active & (count >= width)
        if full.all():
            data = self.load(source, width, None, site)
        else:
            if full.any():
                data = self.load(source, width, full, site)
                raw[full] = np.ascontiguousarray(data).view(np.uint8).reshape(-1, width)[full]
            for size in np.unique(count[active & (count > 0) & (count < width)]):
                mask = active & (count == size)
                # Alignment is that of the whole copy; only the bytes that are read must be valid.
                crooked = mask & ((source & np.uint64(width - 1)) != 0)
                if crooked.any():
                    at = int(source[np.flatnonzero(crooked)[0]])
                    self.batch.report_lanes(
                        "global-misaligned",
                        f"{width}-byte copy from {hex(at)}, {self.launch.memory.describe(at)}",
                        site,
                        np.flatnonzero(crooked),
                        at,
                    )
                step = 1 if size & 1 else 2 if size & 2 else 4 if size & 4 else 8
                for k in range(0, int(size), step):
                    part = self.load(source + np.uint64(k), step, mask & ~crooked, site)
                    raw[mask, k : k + step] = np.ascontiguousarray(part).view(np.uint8).reshape(-1, step)[mask]
            data = raw.reshape(-1).view(MOVER[width])
        self.batch.shared.copy(destination, data, width, m, site)

    def atomic(
        self,
        op: str,
        kind: str,
        address: Array,
        value: Array,
        compare: Array | None,
        space: str,
        m: Mask,
        site: int,
        acquire: bool,
        release: bool,
    ) -> Array:
        """Read-modify-write, lane by lane in order. Returns the old values."""
        width = value.dtype.itemsize
        if release:
            self.fence(m)
        if space == "generic":
            space = "shared" if int(address[self.batch.lanes(m)[0] if m is not None else 0]) >> 56 == 1 else "global"
            if space == "shared":
                address = (address & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        lanes: Array | None
        if space == "shared":
            got = self.batch.shared.atomic(address, width, m, site)
            if got is None:
                return self.batch.poison(width)
            lanes, at = got
            view = self.batch.shared.views[width]
        else:
            found = self._locate(address, width, m, site)
            if found is None:
                return self.batch.poison(width)
            lanes, offset, places = found
            if lanes is None:
                lanes = np.arange(self.size)
            if self.guarded:
                self.guard(lanes, site)
            if self.launch.counters is not None:
                self.launch.counters.memory("atom.global", self.size, offset, lanes, width)
            for buffer, sel in places:
                some, place = (lanes, offset) if sel is None else (lanes[sel], offset[sel])
                if buffer.written is not None:
                    self._before_read_atomic(buffer, some, place, site)
                self.before_write(buffer, some, place, width, site, None, True)
                self.mark(buffer, place, width)
            at = offset >> SHIFT[width]
            view = self.launch.memory.views[width]
            if self.launch.order.active:
                # Read first, then write, lane by lane: a later lane may see the earlier one's release.
                for i in range(len(lanes)):
                    self._flags(
                        lanes[i : i + 1], offset[i : i + 1], 2 if acquire else 1, read=True, write=True, keep=True
                    )
        chosen = value[lanes]
        other = compare[lanes] if compare is not None else None
        old, changed = modify(op, kind, view, at, chosen, other)
        if changed:
            self.launch.version += 1
        out = np.zeros(self.size, value.dtype)
        out[lanes] = old
        return out

    def _before_read_atomic(self, buffer: Buffer, lanes: Array, offset: Array, site: int) -> None:
        assert buffer.written is not None
        known = buffer.written[offset - buffer.start]
        if not known.all():
            bad = known == 0
            at = int(offset[np.flatnonzero(bad)[0]]) + self.launch.memory.base
            self.batch.report_lanes(
                "uninitialised-global",
                f"atomic on memory that nobody has written: {self.launch.memory.describe(at)}",
                site,
                lanes[bad],
                at,
            )

    # --- generic addresses and local memory ---

    def generic_load(self, address: Array, width: int, m: Mask, site: int, strong: int = 0) -> Array:
        """A load whose address tells the space."""
        top = address >> np.uint64(56)
        if m is None and not top.any():
            return self.load(address, width, m, site, strong)
        out = self.batch.poison(width)
        active = np.ones(self.size, bool) if m is None else m
        for space, mask in (
            (0, active & (top == 0)),
            (1, active & (top == 1)),
            (2, active & (top == 2)),
            (3, active & (top > 2)),
        ):
            if mask.any():
                if space == 1:
                    got = self.batch.shared.load((address & np.uint64(0xFFFFFFFF)).astype(np.uint32), width, mask, site)
                elif space == 3:
                    got = self.batch.param_at(address & np.uint64(0xFFFFFFFF), width, mask, site)
                elif space == 2:
                    got = self.local_load(address & np.uint64(0xFFFFFFFF), width, mask, site)
                else:
                    got = self.load(address, width, mask, site, strong)
                out[mask] = got[mask]
        return out

    def generic_store(self, address: Array, value: Array, width: int, m: Mask, site: int, strong: int = 0) -> None:
        """A store whose address tells the space."""
        top = address >> np.uint64(56)
        if m is None and not top.any():
            self.store(address, value, width, m, site, strong)
            return
        active = np.ones(self.size, bool) if m is None else m
        low = address & np.uint64(0xFFFFFFFF)
        for space, mask in (
            (0, active & (top == 0)),
            (1, active & (top == 1)),
            (2, active & (top == 2)),
            (3, active & (top > 2)),
        ):
            if mask.any():
                if space == 1:
                    self.batch.shared.store(low.astype(np.uint32), value, width, mask, site)
                elif space == 2:
                    self.local_store(low, value, width, mask, site)
                else:
                    self.store(address, value, width, mask, site, strong)

    def _local(self, address: Array, width: int, m: Mask, site: int) -> tuple[Array, Array]:
        lanes = np.arange(self.size) if m is None else self.batch.lanes(m)
        offset = address[lanes].astype(np.int64)
        bad = (offset < 0) | (offset + width > self.local.shape[1]) | ((offset & (width - 1)) != 0)
        if bad.any():
            self.batch.report_lanes(
                "local-out-of-bounds",
                f"{width}-byte access at local offset {int(offset[bad][0])} of {self.local.shape[1]}",
                site,
                lanes[bad],
            )
            lanes, offset = lanes[~bad], offset[~bad]
        return lanes, offset

    def local_load(self, address: Array, width: int, m: Mask, site: int) -> Array:
        lanes, offset = self._local(address, width, m, site)
        got = self.local[lanes[:, None], offset[:, None] + np.arange(width)]
        return self.batch.spread(np.ascontiguousarray(got).reshape(-1).view(MOVER[width]), lanes, width)

    def local_store(self, address: Array, value: Array, width: int, m: Mask, site: int) -> None:
        lanes, offset = self._local(address, width, m, site)
        raw = np.ascontiguousarray(value[lanes]).view(np.uint8).reshape(-1, width)
        self.local[lanes[:, None], offset[:, None] + np.arange(width)] = raw


_ONES = {w: np.frombuffer(b"\1" * 16, t)[0] for w, t in MOVER.items()}
