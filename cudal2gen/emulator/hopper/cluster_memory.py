"""Shared memory of clusters: tags that name any CTA's threads, asynchronous readers and writers, proxies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cudal2gen.emulator.hopper.clocks import distinct
from cudal2gen.emulator.memory.arena import MOVER, SHIFT
from cudal2gen.emulator.memory.shared import WINDOW_START, SharedMemory

if TYPE_CHECKING:
    from cudal2gen.emulator.machine.batch import Batch

Array = NDArray[Any]
Mask = Array | None

# mapa puts rank + 1 above the address within the CTA's window.
RANK_SHIFT = 24
# Actors: rank << 10 | thread, SEVERAL + (rank << 5 | warp), PSEUDO + column of a clock.
SEVERAL, PSEUDO = 1 << 14, 1 << 15
RANK_THREADS = 10


_tables: dict[tuple[int, int], Array] = {}


def _table(make: Callable[[], Array], warps: int, columns: int) -> Array:
    key = (warps, columns)
    if key not in _tables:
        _tables[key] = make()
    out: Array = _tables[key]
    return out


class ClusterMemory(SharedMemory):
    """Shared memory whose words remember asynchronous accesses and those of other CTAs of the cluster."""

    TAG = np.uint64
    BITS, SEVERAL, UNWRITTEN, IN_FLIGHT, MAX_TICK = 16, SEVERAL, (1 << 64) - 1, 1 << 63, 1 << 46

    def __init__(self, batch: Batch, size: int, granule: int) -> None:
        self.clocks = batch.clocks
        super().__init__(batch, size, granule)
        self.column = _table(self._column_table, self.warps, self.clocks.columns)
        # Last asynchronous reads of 16-byte elements, by warpgroup (wgmma) and then by warp (bulk stores).
        n = self.data.size >> 4
        self.async_readers: Array = np.zeros((self.clocks.groups + self.clocks.warps, n), np.uint64)
        # Per lane, the tick of its last fence.proxy.async; per (row, warp), what its last one covers.
        self.proxy_fenced: Array = np.zeros(batch.size, np.int64)
        self.proxy_known: dict[tuple[int, int], Array] = {}
        # Accesses to other CTAs: row -> {column: (tick, site)} of the last one.
        self.visits: dict[int, dict[int, tuple[int, int]]] = {}

    def _reader_columns(self) -> int:
        return int(self.clocks.wgmma)

    def _actors(self) -> tuple[Array, Array, Array]:
        batch = self.batch
        rank = batch.rank[batch.row_of]
        thread = (rank << RANK_THREADS | batch.thread).astype(np.uint64)
        several = (SEVERAL + (rank << 5 | batch.warp)).astype(np.uint64)
        return thread, several, (rank * self.warps + batch.warp).astype(np.int64)

    def barrier_all(self) -> None:
        """A barrier orders threads, not what is asynchronous: every access is checked."""
        self.retag()
        self.fresh = 0

    # --- order ---

    def _column_table(self) -> Array:
        """Actor -> column of clocks."""
        actor, warps = np.arange(1 << 16), self.warps
        thread = (actor >> RANK_THREADS) * warps + ((actor & 1023) >> 5)
        several = ((actor - SEVERAL) >> 5) * warps + ((actor - SEVERAL) & 31)
        table = np.where(actor < SEVERAL, thread, np.where(actor < PSEUDO, several, actor - PSEUDO))
        out: Array = np.minimum(table, self.clocks.columns - 1)
        return out

    def _ordered(self, lanes: Array, tags: Array) -> Array:
        batch = self.batch
        actor = (tags & 0xFFFF).astype(np.int64)
        ticks = ((tags & (self.IN_FLIGHT - 1)) >> 16).astype(np.int64) - 1 + self.t0
        column = self.column[actor]
        out: Array = actor == self.actor[lanes].astype(np.int64)
        out |= ticks < self.clocks.known[batch.row_of[lanes], batch.warp[lanes], column]
        if self.clocks.private and not out.all():
            for i in np.flatnonzero(~out):
                out[i] = self.clocks.ordered_privately(int(lanes[i]), int(column[i]), int(ticks[i]))
        return out

    def _who(self, tag: int, row: int) -> str:
        actor, clocks = tag & 0xFFFF, self.clocks
        if actor < SEVERAL:
            rank, what = actor >> RANK_THREADS, f"thread {actor & 1023}"
        elif actor < PSEUDO:
            rank, what = (actor - SEVERAL) >> 5, f"a lane of warp {(actor - SEVERAL) & 31}"
        else:
            column = actor - PSEUDO
            if column < clocks.bulk:
                rank, group = divmod(column - clocks.wgmma, clocks.groups)
                what = f"a wgmma of warpgroup {group}"
            elif column < clocks.barriers:
                rank, warp = divmod(column - clocks.bulk, clocks.warps)
                what = f"a bulk store of warp {warp}"
            else:
                return "a bulk copy"
        return what if rank == self.batch.rank[row] else f"{what} of the cluster's CTA {rank}"

    # --- asynchronous accesses, in units of 16 bytes of one CTA ---

    def chunks(self, row: int, offsets: Array) -> Array:
        """Byte offsets in a CTA's shared memory -> indices of 16-byte elements."""
        out: Array = (offsets + row * self.stride) >> 4
        return out

    def fits(self, low: int, high: int, lane: int, site: int) -> bool:
        """Are bytes [low, high) inside the CTA's shared memory? Reports if not."""
        if low >= 0 and high <= self.size:
            return True
        self.batch.report_lanes(
            "shared-out-of-bounds",
            f"bytes {low} to {high} of the {self.size} bytes of shared memory",
            site,
            np.array([lane]),
            low,
        )
        return False

    def _complain(self, kind: str, text: str, site: int, lane: int, at: int, doubtful: bool = False) -> None:
        offset = at * 16 % self.stride
        self.batch.report_lanes(kind, f"{text}, shared offset {offset}", site, np.array([lane]), offset, doubtful)

    def async_read(
        self, at: Array, lane: int, row: int, reader: int, site: int, what: str, column: int | None = None
    ) -> None:
        """An asynchronous read of 16-byte elements of CTA ``row`` on behalf of a lane, to be remembered as reader
        ``reader`` of that CTA (warpgroups, then warps). It has ended for those who know ``column`` of the clocks (None:
        the reader's own)."""
        tags = self.rows[16][0][at]
        if tags.ndim > 1:
            at_of = np.repeat(at, tags.shape[1])
            tags = tags.reshape(-1)
        else:
            at_of = at
        first = tags[0]
        if first < self.IN_FLIGHT and int(first) & 0xFFFF >= PSEUDO and (tags == first).all():
            # One bulk copy wrote it all, the usual case.
            tags, at_of = tags[:1], at_of[:1]
        elif int(tags.max()) >= self.IN_FLIGHT:
            for bad, kind, text, doubtful in (
                (tags == self.UNWRITTEN, "uninitialised-shared", "reads shared memory that nobody has written", True),
                (
                    (tags >= self.IN_FLIGHT) & (tags != self.UNWRITTEN),
                    "in-flight",
                    "reads data of an asynchronous copy that has not been waited for",
                    True,
                ),
            ):
                if bad.any():
                    self._complain(kind, f"{what} {text}", site, lane, int(at_of[bad][0]), doubtful)
            good = tags < self.IN_FLIGHT
            tags, at_of = tags[good], at_of[good]
        actor = (tags & 0xFFFF).astype(np.int64)
        ticks = (tags >> 16).astype(np.int64) - 1 + self.t0
        columns = self.column[actor]
        clock = self.clocks.of(lane)
        bad = (ticks >= clock[columns]) & (actor != int(self.actor[lane]))
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            who = self._who(int(tags[i]), row)
            self._complain(
                "shared-race",
                f"{what} reads after a write without synchronisation between (the other side: {who})",
                site,
                lane,
                int(at_of[i]),
            )
        generic = (actor < SEVERAL) & ~bad & (tags > self.LONG_PAST)
        if generic.any():
            self._proxy(actor, ticks, columns, generic, lane, at_of, site, f"{what} reads", row)
        ender = self._reader_actor(row, reader) if column is None else column
        self.async_readers[reader, at] = self.TAG(self.stamp | PSEUDO | ender)

    LONG_PAST = 1 << 16

    def _reader_actor(self, row: int, reader: int) -> int:
        """The clock's column of an asynchronous reader of a row."""
        clocks, rank = self.clocks, int(self.batch.rank[row])
        if reader < clocks.groups:
            return int(clocks.wgmma + rank * clocks.groups + reader)
        return int(clocks.bulk + rank * clocks.warps + reader - clocks.groups)

    def _check_write(
        self, lanes: Array | None, width: int, at: Array, site: int, offset: Array, same: Any = None
    ) -> None:
        super()._check_write(lanes, width, at, site, offset, same)
        seen = self.async_readers[:, (at * width) >> 4]
        for reader in np.flatnonzero(seen.any(axis=1)):
            tags = seen[reader]
            late = np.flatnonzero(tags)
            lane = late if lanes is None else lanes[late]
            bad = ~self._ordered(lane, tags[late])
            if bad.any():
                text = "write after read without a barrier between"
                self._report("shared-race", text, site, lane, late, offset, bad, tags[late])

    def _proxy(
        self,
        actor: Array,
        ticks: Array,
        column: Array,
        generic: Array,
        lane: int,
        at: Array,
        site: int,
        what: str,
        row: int,
    ) -> None:
        """Writes of threads that an asynchronous access follows need a fence.proxy.async between, by the writer or by
        whoever issues the access."""
        batch = self.batch
        first = row - int(batch.rank[row])
        writer = ((first + (actor[generic] >> RANK_THREADS)) * batch.width) + (actor[generic] & 1023)
        bad = ticks[generic] >= self.proxy_fenced[writer]
        if bad.any():
            known = self.proxy_known.get((int(batch.row_of[lane]), int(batch.warp[lane])))
            if known is not None:
                bad &= ticks[generic] >= known[column[generic]]
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            place = at[generic][i]
            thread = int(actor[generic][i]) & 1023
            self._complain(
                "proxy-fence",
                f"{what} what thread {thread} wrote without a fence.proxy.async between",
                site,
                lane,
                int(place),
            )

    def fence_proxy(self, m: Mask) -> None:
        """fence.proxy.async by the lanes of ``m``."""
        batch = self.batch
        if not self.hazards:
            return
        batch.launch.tick += 1
        lanes = np.arange(batch.size) if m is None else batch.lanes(m)
        self.proxy_fenced[lanes] = batch.launch.tick
        for warp in distinct(lanes >> 5):
            row, index = divmod(int(warp), self.warps)
            self.proxy_known[(row, index)] = self.clocks.of(int(lanes[lanes >> 5 == warp][0])).copy()
        self.retag()

    def async_write(self, at: Array, lane: int, row: int, column: int, site: int, width: int = 16) -> None:
        """A copy into elements of ``width`` bytes of CTA ``row`` starts: till it lands they are undefined."""
        if self.hazards:
            writer, _, readers = self.rows[width]
            clock = self.clocks.of(lane)
            tags = writer[at]
            flat = tags.reshape(-1)
            where = np.repeat(at, flat.size // len(at)) * width // 16
            flying = (flat >= self.IN_FLIGHT) & (flat != self.UNWRITTEN)
            if flying.any():
                self._complain(
                    "in-flight",
                    "overwrites the destination of an asynchronous copy that has not been waited for",
                    site,
                    lane,
                    int(where[flying][0]),
                )
            plain = np.flatnonzero((flat < self.IN_FLIGHT) & (flat > self.LONG_PAST))
            if plain.size:
                some = flat[plain]
                actor = (some & 0xFFFF).astype(np.int64)
                ticks = (some >> 16).astype(np.int64) - 1 + self.t0
                columns = self.column[actor]
                bad = (ticks >= clock[columns]) & (actor != int(self.actor[lane]))
                self._race_report("write after write", bad, some, where[plain], lane, row, site)
                generic = (actor < SEVERAL) & ~bad
                if generic.any() and width == 16:
                    self._proxy(actor, ticks, columns, generic, lane, where[plain], site, "a bulk copy overwrites", row)
            seen = readers[at].reshape(-1, self.columns)
            for reader in np.flatnonzero(seen.any(axis=0)):
                self._check_reads(seen[:, reader], where, clock, lane, row, site)
            chunks = at * width >> 4
            asleep = self.async_readers[:, chunks]
            for reader in np.flatnonzero(asleep.any(axis=1)):
                self._check_reads(asleep[reader], chunks, clock, lane, row, site)
            writer[at] = self.TAG(self.IN_FLIGHT | PSEUDO | column)
        self.views[width][at] = self.poison[width]

    def _check_reads(self, tags: Array, at: Array, clock: Array, lane: int, row: int, site: int) -> None:
        """A bulk copy overwrites what was read under these tags."""
        actor = (tags & 0xFFFF).astype(np.int64)
        ticks = (tags >> 16).astype(np.int64) - 1 + self.t0
        bad = (tags != 0) & (ticks >= clock[self.column[actor]]) & (actor != int(self.actor[lane]))
        self._race_report("write after read", bad, tags, at, lane, row, site)

    def _race_report(self, what: str, bad: Array, tags: Array, at: Array, lane: int, row: int, site: int) -> None:
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            self._complain(
                "shared-race",
                f"a bulk copy starts: {what} without synchronisation between (the other side: "
                f"{self._who(int(tags[i]), row)})",
                site,
                lane,
                int(at[i]),
            )

    def land(self, at: Array, data: Array, column: int, tick: int, width: int = 16) -> None:
        """A copy has arrived; whoever waited for ``tick`` of ``column`` may read it."""
        self.views[width][at] = data
        if self.hazards:
            self.rows[width][0][at] = self.TAG((tick - self.t0) << 16 | PSEUDO | column)
        self.batch.launch.version += 1

    def take_copies(self, lanes: Array) -> list[Any]:
        """The cp.async of these lanes that have not landed, which now belong to an mbarrier."""
        out = []
        for group in ("open", "flying"):
            kept = []
            for copy in getattr(self, group):
                mine = np.arange(self.batch.size) if copy.lanes is None else copy.lanes
                inside = np.isin(mine, lanes)
                if inside.any():
                    out.append(type(copy)(mine[inside], copy.at[inside], copy.data[inside], copy.width, None))
                if not inside.all():
                    number = copy.group if copy.group is None or isinstance(copy.group, int) else copy.group[~inside]
                    kept.append(type(copy)(mine[~inside], copy.at[~inside], copy.data[~inside], copy.width, number))
            setattr(self, group, kept)
        return out

    # --- other CTAs ---

    def locate(self, address: Array, width: int, m: Mask, site: int) -> tuple[Array | None, Array, Array] | None:
        lanes = None
        if m is not None:
            lanes = self.batch.lanes(m)
            if lanes.size == 0:
                return None
        chosen = address if lanes is None else address[lanes]
        if int(chosen.max()) < 1 << RANK_SHIFT:
            return super().locate(address, width, m, site)
        if lanes is None:
            lanes = np.arange(self.batch.size)
        lanes, rows = self.batch.barriers.rows(chosen, lanes, site)
        low = address & np.uint32((1 << RANK_SHIFT) - 1)
        mask = np.zeros(self.batch.size, bool)
        mask[lanes] = True
        found = super().locate(low, width, mask, site)
        if found is None:
            return None
        kept, _, _ = found
        assert kept is not None
        if len(kept) != len(lanes):
            rows = rows[np.isin(lanes, kept)]
        offset = low[kept].astype(np.int64) - WINDOW_START + rows * self.stride
        return kept, offset >> SHIFT[width], offset


__all__ = ["MOVER", "PSEUDO", "RANK_SHIFT", "ClusterMemory"]
