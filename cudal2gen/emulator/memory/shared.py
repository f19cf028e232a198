"""Shared memory of a batch of CTAs: one row of bytes per CTA, tags for the ordering hazards, cp.async with late
landing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cudal2gen.emulator.memory.arena import MOVER, SHIFT

if TYPE_CHECKING:
    from cudal2gen.emulator.machine.batch import Batch

Array = NDArray[Any]
Mask = Array | None

# Shared addresses start here, as the first kilobyte of the window belongs to the system on recent devices.
WINDOW_START = 1024
# Generic addresses of shared and local memory: no host pointer has such a top byte.
GENERIC_SHARED = 1 << 56
GENERIC_LOCAL = 2 << 56

# A tag is tick << 11 | actor. Actors below 1024 are threads, 1024 + w is "several lanes of warp w".
ACTOR_BITS = 11
ACTOR = (1 << ACTOR_BITS) - 1
SEVERAL = 1024
UNWRITTEN = 0xFFFFFFFF
IN_FLIGHT = 0x80000000
MAX_TICK = 1 << 20
# The tag of something long past: ordered before everything, but written.
LONG_AGO = 1


class SharedMemory:
    """``size`` bytes per CTA. Addresses are window addresses (uint32, one per lane of the batch)."""

    # How a tag is built; a cluster needs wider ones.
    TAG: Any = np.uint32
    BITS, SEVERAL, UNWRITTEN, IN_FLIGHT, MAX_TICK = ACTOR_BITS, SEVERAL, UNWRITTEN, IN_FLIGHT, MAX_TICK

    def __init__(self, batch: Batch, size: int, granule: int) -> None:
        self.batch, self.size = batch, size
        self.stride = -(-size // 128) * 128 + 128
        count = batch.count
        poison = batch.launch.poison
        self.data: Array = np.full(count * self.stride, poison, np.uint8)
        self.poison = {w: np.frombuffer(bytes([poison]) * 16, t)[0] for w, t in MOVER.items()}
        self.views = {w: self.data.view(t) for w, t in MOVER.items()}
        self.row = (np.repeat(np.arange(count, dtype=np.int64) * self.stride, batch.width) - WINDOW_START).astype(
            np.int64
        )
        self.hazards = batch.launch.options.hazards
        self.counters = batch.launch.counters
        self.granule = granule
        self.warps = batch.width // 32
        # Readers are told apart by column: the warps of the CTA.
        self.columns = self._reader_columns()
        self.t0 = batch.launch.tick
        # Tags at or above this belong to accesses that no barrier of the whole CTA has ordered yet.
        self.fresh = 0
        if self.hazards:
            n = count * self.stride // granule
            self.writer: Array = np.full(n, self.UNWRITTEN, self.TAG)
            self.latest: Array = np.zeros(n, self.TAG)
            self.readers: Array = np.zeros((n, self.columns), self.TAG)
            self.rows = {
                w: (
                    self.writer.reshape(-1, w // granule) if w > granule else self.writer,
                    self.latest.reshape(-1, w // granule) if w > granule else self.latest,
                    self.readers.reshape(-1, max(1, w // granule), self.columns),
                )
                for w in MOVER
                if w >= granule
            }
            self.actor, self.collective, self.warp_column = self._actors()
        self.retag()
        # Element -> the tag that the last atomic or flag write left there.
        self.atomics: dict[int, int] = {}
        # Flags in shared memory. Byte offset -> what the setter had fenced; (row, warp) -> what the warp has fenced,
        # and what it has polled since its last fence.
        self.flags: dict[int, Array] = {}
        self.fenced: dict[tuple[int, int], Array] = {}
        self.learned: dict[tuple[int, int], Array] = {}
        # cp.async per lane: groups committed so far, an int while all lanes agree.
        self.committed: int | Array = 0
        self.open: list[_Copy] = []
        self.flying: list[_Copy] = []

    # --- tags ---

    def _reader_columns(self) -> int:
        return self.warps

    def _actors(self) -> tuple[Array, Array, Array]:
        """Per lane: its tag as a thread, as one of several lanes of its warp, and its column as a reader."""
        batch = self.batch
        several = (SEVERAL + batch.warp).astype(np.uint32)
        return batch.thread.astype(np.uint32), several, batch.warp.astype(np.int64)

    def retag(self) -> None:
        """The tick has changed: new tags for the accesses to come."""
        tick = self.batch.launch.tick - self.t0
        if tick >= self.MAX_TICK:
            self.t0 = self.batch.launch.tick - 1
            if self.hazards:
                self.writer[self.writer < self.IN_FLIGHT] = LONG_AGO
                self.latest[:] = 0
                self.readers[:] = 0
            self.fresh = 1 << self.BITS
            tick = 1
        self.tick = tick + 1
        if self.hazards:
            self.stamp = self.tick << self.BITS
            self.mine = self.actor | self.TAG(self.stamp)
            self.ours = self.collective | self.TAG(self.stamp)

    def barrier_all(self) -> None:
        """All threads of all CTAs have met, and the tick advanced."""
        self.retag()
        self.fresh = self.tick << self.BITS

    def _ordered(self, lanes: Array, tags: Array) -> Array:
        """Is each tagged access ordered before the present of the lane that now touches the word?"""
        batch = self.batch
        actor = (tags & ACTOR).astype(np.int64)
        ticks = (tags >> ACTOR_BITS).astype(np.int64) - 1 + self.t0
        several = actor >= SEVERAL
        warp_of = np.where(several, actor - SEVERAL, actor >> 5)
        out = (actor == batch.thread[lanes]) & ~several
        cta = batch.row_of[lanes]
        mine = batch.warp[lanes]
        out |= ticks < batch.known(cta, mine, warp_of)
        result: Array = out
        return result

    def _check_read(self, lanes: Array | None, tags: Array, site: int, offset: Array) -> None:
        suspicious: Array = np.asarray(tags >= max(self.fresh, 1))
        if tags.ndim > 1:
            suspicious = np.asarray(suspicious.any(axis=1))
            which = np.flatnonzero(suspicious)
            if which.size == 0:
                return
            per = tags.shape[1]
            flat = tags[which].reshape(-1)
            rows = np.repeat(which, per)
        else:
            which = np.flatnonzero(suspicious)
            if which.size == 0:
                return
            flat, rows = tags[which], which
        lane = rows if lanes is None else lanes[rows]
        bad = flat == self.UNWRITTEN
        if bad.any():
            self._report(
                "uninitialised-shared",
                "reads shared memory that nobody has written",
                site,
                lane,
                rows,
                offset,
                bad,
                doubtful=True,
            )
        flying = (flat >= self.IN_FLIGHT) & ~bad
        if flying.any():
            self._report(
                "in-flight",
                "reads data of an asynchronous copy that has not been waited for",
                site,
                lane,
                rows,
                offset,
                flying,
                flat,
                doubtful=True,
            )
        rest = ~(bad | flying)
        if rest.any():
            rest[rest] = ~self._ordered(lane[rest], flat[rest])
            if rest.any():
                self._report(
                    "shared-race", "read after write without a barrier between", site, lane, rows, offset, rest, flat
                )

    def _check_write(
        self, lanes: Array | None, width: int, at: Array, site: int, offset: Array, same: Any = None
    ) -> None:
        writer, latest, readers = self.rows[width]
        tags, reads = writer[at], latest[at]
        fresh = max(self.fresh, 1)
        hot = ((tags >= fresh) & (tags != self.UNWRITTEN)) | (reads >= fresh)
        which = np.flatnonzero(hot.any(axis=1) if hot.ndim > 1 else hot)
        if which.size == 0:
            return
        per = tags.shape[1] if tags.ndim > 1 else 1
        rows = np.repeat(which, per)
        lane = rows if lanes is None else lanes[rows]
        flat = tags[which].reshape(-1)
        flying = (flat >= self.IN_FLIGHT) & (flat != self.UNWRITTEN)
        if flying.any():
            self._report(
                "in-flight",
                "overwrites the destination of an asynchronous copy that has not been waited for",
                site,
                lane,
                rows,
                offset,
                flying,
                flat,
            )
        clash = (flat >= fresh) & (flat < self.IN_FLIGHT)
        if same is not None and clash.any():
            # Writing what is already there is harmless whoever comes first.
            clash &= ~np.repeat(same()[which], per)
        if clash.any():
            clash[clash] = ~self._ordered(lane[clash], flat[clash])
            if clash.any():
                self._report(
                    "shared-race", "write after write without a barrier between", site, lane, rows, offset, clash, flat
                )
        seen = readers[at[which]].reshape(-1, self.columns)
        for column in np.flatnonzero(seen.max(axis=0) >= fresh):
            tag = seen[:, column]
            late = tag >= fresh
            if late.any():
                late[late] = ~self._ordered(lane[late], tag[late])
                if late.any():
                    self._report(
                        "shared-race", "write after read without a barrier between", site, lane, rows, offset, late, tag
                    )

    def _report(
        self,
        kind: str,
        message: str,
        site: int,
        lane: Array,
        rows: Array,
        offset: Array,
        bad: Array,
        tags: Array | None = None,
        doubtful: bool = False,
    ) -> None:
        lanes = np.unique(lane[bad])
        first = int(np.flatnonzero(bad)[0])
        cta = self.batch.row_of[lanes[0]]
        threads = self.batch.thread[lanes[self.batch.row_of[lanes] == cta]]
        if tags is not None:
            message += f" (the other side: {self._who(int(tags[first]), int(cta))})"
        address = int(offset[rows[first]])
        text = f"{message}, shared offset {address}"
        self.batch.report(kind, text, site, int(cta), threads, address, len(lanes), doubtful)

    def _who(self, tag: int, row: int) -> str:  # noqa: ARG002
        """The other side of a race, in words."""
        actor = tag & ACTOR
        return f"a lane of warp {actor - SEVERAL}" if actor >= SEVERAL else f"thread {actor}"

    # --- access ---

    def locate(self, address: Array, width: int, m: Mask, site: int) -> tuple[Array | None, Array, Array] | None:
        """Bounds and alignment: (lanes or None for all, element index, byte offset), or None if nothing is left."""
        lanes = None
        if m is not None:
            lanes = self.batch.lanes(m)
            if lanes.size == 0:
                return None
            address = address[lanes]
        low, high = int(address.min()), int(address.max())
        if (
            low < WINDOW_START
            or high > WINDOW_START + self.size - width
            or int(np.bitwise_or.reduce(address)) & (width - 1)
        ):
            lanes, address = self._invalid(address, width, lanes, site)
            if lanes is not None and lanes.size == 0:
                return None
        row = self.row if lanes is None else self.row[lanes]
        offset = address + row
        return lanes, offset >> SHIFT[width], offset

    def _invalid(self, address: Array, width: int, lanes: Array | None, site: int) -> tuple[Array | None, Array]:
        if lanes is None:
            lanes = np.arange(self.batch.size)
        wide = address.astype(np.int64)
        outside = (wide < WINDOW_START) | (wide > WINDOW_START + self.size - width)
        crooked = (wide & (width - 1)) != 0
        for bad, kind, text in (
            (outside, "shared-out-of-bounds", f"{width}-byte access outside the {self.size} bytes of shared memory"),
            (
                crooked & ~outside,
                "shared-misaligned",
                f"{width}-byte access at an address that is no multiple of {width}",
            ),
        ):
            if bad.any():
                first = int(np.flatnonzero(bad)[0])
                at = int(wide[first]) - WINDOW_START
                cta = int(self.batch.row_of[lanes[first]])
                mine = lanes[bad]
                self.batch.report(
                    kind,
                    f"{text}, shared offset {at}",
                    site,
                    cta,
                    self.batch.thread[mine[self.batch.row_of[mine] == cta]],
                    at,
                    int(bad.sum()),
                )
        good = ~(outside | crooked)
        return lanes[good], address[good]

    def load(self, address: Array, width: int, m: Mask, site: int, strong: bool = False) -> Array:
        """``width`` bytes per lane -> array of MOVER[width], shape (lanes of the batch,).

        ``strong``: polls a flag; it does not race with strong writes and learns what they published.
        """
        found = self.locate(address, width, m, site)
        if found is None:
            return self.batch.poison(width)
        lanes, at, offset = found
        if self.counters is not None:
            self.counters.shared("ld.shared", address, width, m)
        if self.hazards and strong:
            self._poll(lanes, at, width, site, offset)
        elif self.hazards:
            self._read(lanes, at, width, site, offset)
        got: Array = self.views[width][at]
        return got if lanes is None else self.batch.spread(got, lanes, width)

    def _poll(self, lanes: Array | None, at: Array, width: int, site: int, offset: Array) -> None:
        if lanes is None:
            lanes = np.arange(self.batch.size)
        tags = self.rows[width][0][at]
        heads = tags if tags.ndim == 1 else tags[:, 0]
        plain = np.array([self.atomics.get(int(a)) != int(t) for a, t in zip(at, heads, strict=True)], bool)
        if plain.any():
            chosen = lanes[plain]
            relative = (offset - (offset // self.stride) * self.stride)[plain]
            self._check_read(chosen, tags[plain], site, relative)
        for lane, place in zip(lanes, offset, strict=True):
            news = self.flags.get(int(place))
            if news is not None:
                key = (int(self.batch.row_of[lane]), int(self.batch.warp[lane]))
                old = self.learned.get(key)
                self.learned[key] = news if old is None else np.maximum(old, news)

    def publish(self, lanes: Array | None, at: Array, width: int, offset: Array) -> None:
        """A strong write: whoever reads it learns what its warp had fenced."""
        writer = self.rows[width][0]
        now = writer[at] if writer.ndim == 1 else writer[at, 0]
        self.atomics.update(zip((int(a) for a in at), (int(t) for t in now), strict=True))
        for lane, place in zip(np.arange(self.batch.size) if lanes is None else lanes, offset, strict=True):
            news = self.fenced.get((int(self.batch.row_of[lane]), int(self.batch.warp[lane])))
            if news is not None:
                self.flags[int(place)] = news

    def fence(self, m: Mask) -> None:
        """A fence of any scope: what the warps did before is published by later flags, what they polled counts."""
        batch = self.batch
        if not self.hazards:
            return
        known = batch.ticks()
        mask = (batch.alive if m is None else m).reshape(batch.count, self.warps, 32).any(axis=2)
        for row, warp in zip(*np.nonzero(mask), strict=True):
            key = (int(row), int(warp))
            if key in self.learned:
                known[row, warp] = np.maximum(known[row, warp], self.learned.pop(key))
            self.fenced[key] = known[row, warp].copy()
            self.fenced[key][batch.first_column(int(row)) + warp] = batch.launch.tick + 1
        batch.launch.tick += 1
        self.retag()

    def _read(self, lanes: Array | None, at: Array, width: int, site: int, offset: Array) -> None:
        writer, latest, readers = self.rows[width]
        self._check_read(lanes, writer[at], site, offset - (offset // self.stride) * self.stride)
        latest[at] = self.stamp
        mine = self.mine if lanes is None else self.mine[lanes]
        column = self.warp_column if lanes is None else self.warp_column[lanes]
        old = readers[at, 0, column]
        # Several lanes of a warp: remember that it is not just this thread, as long as the warp has not synchronised.
        fresh: Any = self.fresh
        if self.batch.known_ticks is not None:
            # What the warp has synchronised since does not count.
            warp = self.batch.warp if lanes is None else self.batch.warp[lanes]
            row = self.batch.row_of if lanes is None else self.batch.row_of[lanes]
            fresh = np.maximum((self.batch.known(row, warp, warp) - self.t0 + 1) << self.BITS, self.fresh)
            fresh = fresh.astype(self.TAG)
        actor = (1 << self.BITS) - 1
        several = (old >= fresh) & ((old & actor) != (mine & actor)) & (old != 0)
        tag = np.where(several, self.ours if lanes is None else self.ours[lanes], mine) if several.any() else mine
        readers[at, :, column] = tag[:, None]
        back = readers[at, 0, column] != tag
        if back.any():
            ours = self.ours if lanes is None else self.ours[lanes]
            readers[at[back], :, column[back]] = ours[back][:, None]

    def store(
        self,
        address: Array,
        value: Array,
        width: int,
        m: Mask,
        site: int,
        strong: bool = False,
        kind: str = "st.shared",
    ) -> None:
        """Write MOVER[width] values, one per lane. ``strong``: sets a flag that other threads poll."""
        found = self.locate(address, width, m, site)
        if found is None:
            return
        lanes, at, offset = found
        if lanes is not None:
            value = value[lanes]
        if self.counters is not None:
            self.counters.shared(kind, address, width, m)
        view = self.views[width]
        if self.hazards:
            relative = offset - (offset // self.stride) * self.stride
            self._check_write(lanes, width, at, site, relative, lambda: _same(view[at], value))
            writer = self.rows[width][0]
            mine = self.mine if lanes is None else self.mine[lanes]
            writer[at] = mine if writer.ndim == 1 else mine[:, None]
            view[at] = value
            if strong:
                self.publish(lanes, at, width, offset)
            back = (writer[at] if writer.ndim == 1 else writer[at, 0]) != mine
            if back.any():
                differ = back & ~_same(view[at], value)
                if differ.any():
                    lane = np.arange(self.batch.size) if lanes is None else lanes
                    rows = np.arange(len(at))
                    self._report(
                        "shared-race",
                        "several threads write different values in one instruction",
                        site,
                        lane,
                        rows,
                        relative,
                        differ,
                    )
        else:
            view[at] = value
        self.batch.launch.version += 1

    def atomic(self, address: Array, width: int, m: Mask, site: int) -> tuple[Array, Array] | None:
        """(lanes, element index) of a read-modify-write; the caller performs it. Atomics do not race with each
        other."""
        found = self.locate(address, width, m, site)
        if found is None:
            return None
        lanes, at, offset = found
        if lanes is None:
            lanes = np.arange(self.batch.size)
        if self.hazards:
            relative = offset - (offset // self.stride) * self.stride
            writer = self.rows[width][0]
            tags = writer[at] if writer.ndim == 1 else writer[at, 0]
            words = [int(a) for a in at]
            # What an atomic wrote last is no race; anything else is an access like any other.
            plain = np.array([self.atomics.get(a) != int(t) for a, t in zip(words, tags, strict=True)], bool)
            if plain.any():
                self._check_read(lanes[plain], writer[at][plain], site, relative[plain])
            self._check_write(lanes, width, at, site, relative, lambda: ~plain)
            mine = self.mine[lanes]
            writer[at] = mine if writer.ndim == 1 else mine[:, None]
            now = writer[at] if writer.ndim == 1 else writer[at, 0]
            self.atomics.update(zip(words, (int(t) for t in now), strict=True))
        return lanes, at

    def ldmatrix(self, address: Array, matrices: int, m: Mask, site: int, transpose: bool) -> list[Array]:
        """8x8 matrices of 16-bit elements; row addresses come from the first 8 * ``matrices`` lanes of each warp."""
        batch = self.batch
        rows = 8 * matrices
        if m is not None:
            batch.require_whole_warps(m, site)
        if rows < 32:
            chosen = np.zeros((batch.size // 32, 32), bool)
            chosen[:, :rows] = True
            mask: Mask = chosen.reshape(-1) if m is None else chosen.reshape(-1) & m
        else:
            mask = m
        found = self.locate(address, 16, mask, site)
        if found is None:
            return [batch.poison(4)] * matrices
        lanes, at, offset = found
        if self.counters is not None:
            self.counters.shared("ldmatrix", address, 16, mask)
        if self.hazards:
            writer, latest, readers = self.rows[16]
            tags = writer[at]
            if (tags >= max(self.fresh, 1)).any():
                self._check_read(lanes, tags, site, offset - (offset // self.stride) * self.stride)
            latest[at] = self.stamp
            column = self.warp_column if lanes is None else self.warp_column[lanes]
            readers[at, :, column] = (self.ours if lanes is None else self.ours[lanes])[:, None]
        got = self.views[16][at]
        if lanes is not None:
            got = batch.spread(got, lanes, 16)
        warps = batch.size // 32
        if transpose:
            cells = got.view(np.uint16).reshape(warps, 4, 8, 8)[:, :matrices].transpose(1, 0, 3, 2)
            regs = np.ascontiguousarray(cells).view(np.uint32).reshape(matrices, batch.size)
        else:
            words = got.view(np.uint32).reshape(warps, 4, 32)[:, :matrices].transpose(1, 0, 2)
            regs = np.ascontiguousarray(words).reshape(matrices, batch.size)
        return list(regs)

    def stmatrix(self, address: Array, values: tuple[Array, ...], m: Mask, site: int, transpose: bool) -> None:
        """8x8 matrices of 16-bit elements; row addresses come from the first 8 * n lanes of each warp."""
        batch = self.batch
        matrices = len(values)
        if m is not None:
            batch.require_whole_warps(m, site)
        warps = batch.size // 32
        cells = np.stack(values).view(np.uint16).reshape(matrices, warps, 8, 8)
        if transpose:
            cells = cells.transpose(0, 1, 3, 2)
        rows = np.zeros((warps, 4, 8, 8), np.uint16)
        rows[:, :matrices] = cells.transpose(1, 0, 2, 3)
        mask: Mask = m
        if matrices < 4:
            chosen = np.zeros((warps, 32), bool)
            chosen[:, : 8 * matrices] = True
            mask = chosen.reshape(-1) if m is None else chosen.reshape(-1) & m
        self.store(address, rows.reshape(-1).view(MOVER[16]), 16, mask, site, kind="stmatrix")

    # --- cp.async ---

    def copy(self, address: Array, data: Array, width: int, m: Mask, site: int) -> None:
        """Issue cp.async: ``data`` (already read) lands when its group is waited for; till then the target is
        poison."""
        found = self.locate(address, width, m, site)
        if found is None:
            return
        lanes, at, offset = found
        if lanes is not None:
            data = data[lanes]
        if self.counters is not None:
            self.counters.shared("cp.async", address, width, m)
        if self.hazards:
            if self._hot(at, width):
                self._check_write(lanes, width, at, site, offset - (offset // self.stride) * self.stride)
            writer = self.rows[width][0]
            tag = (self.actor if lanes is None else self.actor[lanes]) | self.TAG(self.IN_FLIGHT)
            writer[at] = tag if writer.ndim == 1 else tag[:, None]
        self.views[width][at] = self.poison[width]
        self.open.append(_Copy(lanes, at, data, width, None))

    def _hot(self, at: Array, width: int) -> bool:
        writer, latest, _ = self.rows[width]
        fresh = max(self.fresh, 1)
        if bool((latest[at] >= fresh).any()):
            return True
        tags = writer[at]
        return bool(((tags >= fresh) & (tags != self.UNWRITTEN)).any())

    def commit(self, m: Mask) -> None:
        """cp.async.commit_group by the lanes of ``m``."""
        everyone = m is None or self.batch.is_everyone(m)
        if everyone and isinstance(self.committed, int):
            for copy in self.open:
                copy.group = self.committed
            self.flying += self.open
            self.open = []
            self.committed += 1
            return
        committed = self._per_lane()
        mask = np.ones(self.batch.size, bool) if m is None else m
        kept = []
        for copy in self.open:
            lanes = np.arange(self.batch.size) if copy.lanes is None else copy.lanes
            inside = mask[lanes]
            if inside.any():
                chosen = lanes[inside]
                self.flying.append(_Copy(chosen, copy.at[inside], copy.data[inside], copy.width, committed[chosen]))
            if not inside.all():
                outside = ~inside
                kept.append(_Copy(lanes[outside], copy.at[outside], copy.data[outside], copy.width, None))
        self.open = kept
        self.committed = np.where(mask, committed + 1, committed)

    def _per_lane(self) -> Array:
        if isinstance(self.committed, int):
            return np.full(self.batch.size, self.committed, np.int64)
        return self.committed

    def wait(self, pending: int, m: Mask) -> None:
        """cp.async.wait_group: all but the ``pending`` newest groups of the lanes in ``m`` land."""
        everyone = m is None or self.batch.is_everyone(m)
        kept: list[_Copy] = []
        for copy in self.flying:
            if everyone and isinstance(self.committed, int) and isinstance(copy.group, int):
                if copy.group < self.committed - pending:
                    self._land(copy, None)
                else:
                    kept.append(copy)
                continue
            lanes = np.arange(self.batch.size) if copy.lanes is None else copy.lanes
            ready = (self._per_lane()[lanes] - pending) > copy.group
            if m is not None:
                ready &= m[lanes]
            if ready.all():
                self._land(copy, None)
            elif not ready.any():
                kept.append(copy)
            else:
                self._land(copy, ready)
                late = ~ready
                group = copy.group if isinstance(copy.group, int) else copy.group[late]  # type: ignore[index]
                kept.append(_Copy(lanes[late], copy.at[late], copy.data[late], copy.width, group))
        self.flying = kept

    def wait_all(self, m: Mask) -> None:
        """cp.async.wait_all: also what was never committed."""
        self.commit(m)
        self.wait(0, m)

    def _land(self, copy: _Copy, chosen: Array | None) -> None:
        at, data, lanes = copy.at, copy.data, copy.lanes
        if chosen is not None:
            lanes = (np.arange(self.batch.size) if lanes is None else lanes)[chosen]
            at, data = at[chosen], data[chosen]
        self.views[copy.width][at] = data
        if self.hazards:
            writer = self.rows[copy.width][0]
            mine = self.mine if lanes is None else self.mine[lanes]
            writer[at] = mine if writer.ndim == 1 else mine[:, None]
        self.batch.launch.version += 1


class _Copy:
    """One issued cp.async: the lanes, where it lands, what lands, its group per lane."""

    __slots__ = ("at", "data", "group", "lanes", "width")

    def __init__(self, lanes: Array | None, at: Array, data: Array, width: int, group: int | Array | None) -> None:
        self.lanes, self.at, self.data, self.width, self.group = lanes, at, data, width, group


def _same(a: Array, b: Array) -> Array:
    """Bitwise equality per element (complex128 stands for 16 bytes)."""
    if a.dtype.itemsize == 16:
        x, y = (
            np.ascontiguousarray(a).view(np.uint64).reshape(-1, 2),
            np.ascontiguousarray(b).view(np.uint64).reshape(-1, 2),
        )
        same: Array = (x == y).all(axis=1)
        return same
    return np.asarray(a == b)
