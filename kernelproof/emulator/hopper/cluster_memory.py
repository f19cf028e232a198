"""Models the shared memory of clusters, and checks asynchronous accesses to it.

This adds to ``SharedMemory`` the rules of the PTX ISA on distributed shared memory (shared::cluster), on the async
proxy and its fences, and on scopes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernelproof.emulator.hopper.async_reads import Elements, Extent, ProductPlaces
from kernelproof.emulator.hopper.cluster_clocks import ClusterClocks
from kernelproof.emulator.hopper.cluster_order import (
    ACTOR,
    NARROW,
    PSEUDO,
    RANK_THREADS,
    SEVERAL,
    THREAD_OF_ACTOR,
    ClusterOrder,
)
from kernelproof.emulator.hopper.peers import WITHIN, Peers
from kernelproof.emulator.memory.late_copies import faults_of_undefined
from kernelproof.emulator.memory.shared import WINDOW_START, SharedAccess
from kernelproof.emulator.memory.shared_checks import (
    READ_AFTER_WRITE,
    WRITE_AFTER_READ,
    WRITE_AFTER_WRITE,
    Granules,
)
from kernelproof.emulator.state.arrays import SHIFT, Array, Mask, distinct
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.lane_releases import APART
from kernelproof.emulator.state.participants import Participant


class ClusterMemory(ClusterOrder):
    """Shared memory whose tags record asynchronous accesses, and accesses of other CTAs of the cluster."""

    # Tags up to this one mean that there was no access, or one LONG_AGO.
    LONG_PAST = 1 << 16

    def __init__(self, batch: BatchState, clocks: ClusterClocks, peers: Peers, size: int, granule: int) -> None:
        super().__init__(batch, clocks, peers, size, granule)
        self.thread_reads = Extent(size, 0)
        # Per lane: the tick of its last fence.proxy.async. Per (row, warp): the warp's clock at its last such fence.
        self.proxy_fenced: Array = np.zeros(batch.size, np.int64)
        self.proxy_horizon: dict[tuple[int, int], Array] = {}

    # --- elements of 16 bytes ---

    def chunks(self, row: int, offsets: Array) -> Array:
        """Convert byte offsets in a CTA's shared memory to indices of 16-byte elements of the batch."""
        out: Array = (offsets + row * self.stride) >> 4
        return out

    def last_write(self, element: int) -> tuple[int, int]:
        """The last write of a 16-byte element: the writer's column of the clocks, and the tick. The column is -1 if
        there was no write, or one long ago."""
        tag = self.rows[16][0][element : element + 1].reshape(-1)[:1]
        if int(tag[0]) >= self.IN_FLIGHT or int(tag[0]) <= self.LONG_PAST:
            return -1, 0
        _, ticks, columns = self._split(tag)
        return int(columns[0]), int(ticks[0])

    def fits(self, low: int, high: int, lane: int, site: int) -> bool:
        """Are bytes [low, high) inside of the CTA's shared memory? Reports if they are not."""
        if low >= 0 and high <= self.size:
            return True
        text = f"bytes {low} to {high} of the {self.size} bytes of shared memory"
        self.batch.report_lane("shared-out-of-bounds", text, site, lane, low)
        return False

    def _report_element(
        self,
        kind: str,
        text: str,
        site: int,
        lane: int,
        element: int,
        doubtful: bool = False,
        other: Participant | None = None,
    ) -> None:
        """Report a finding about a 16-byte element of the batch."""
        self.batch.report_lane(kind, text, site, lane, element * 16 % self.stride, doubtful, other)

    def _read(self, lanes: Array | None, elements: Array, width: int, site: int, offset: Array) -> None:
        self._note_thread_reads()
        super()._read(lanes, elements, width, site, offset)

    def read_together(self, lanes: Array | None, elements: Array, width: int, site: int, offset: Array) -> None:
        self._note_thread_reads()
        super().read_together(lanes, elements, width, site, offset)

    def _note_thread_reads(self) -> None:
        """Extend the range that threads have read, so that copies outside of it need not look at tags of reads."""
        low, high = self.extent
        self.thread_reads.add(low - WINDOW_START, high - WINDOW_START)

    # --- asynchronous reads ---

    def async_read(
        self, source: Elements, lane: int, row: int, reader: int, site: int, reader_name: str, column: int | None = None
    ) -> None:
        """Check and tag an asynchronous read of 16-byte elements of CTA ``row`` on behalf of a lane. ``reader``: its
        number among the CTA's readers (warpgroups, then warps). ``column``: the column of the clocks whose later ticks
        imply that the read has ended (None: the reader's own)."""
        self._follow_tick()
        elements = source.indices
        tags = self.rows[16][0][elements]
        if not self._are_certainly_ordered(tags[None], np.array([lane]), self.batch.row_of[[lane]]):
            self._check_async_read(tags, elements, lane, row, site, reader_name)
        own_column = self._reader_column(row, reader)
        end_column = own_column if column is None else column
        self.async_reads.add(reader, source.low, source.high, end_column != own_column)
        self.async_reads.tags[reader, elements] = self.TAG(self.stamp | PSEUDO | end_column)
        if self.recorded is not None:
            self.recorded.record_read(elements, 16 // self.granule, own_column, site)

    def wgmma_read(
        self, elements: Array, extent: tuple[int, int], lanes: Array, rows: Array, readers: Array, site: int
    ) -> bool:
        """Fast path of ``async_read`` for the wgmma of several warpgroups. ``elements``: their indices, shape
        (warpgroups, elements). ``extent``: the bytes [low, high) of their CTAs that contain them. Returns False, having
        done nothing, if some reads need a closer look."""
        self._follow_tick()
        if not self._are_certainly_ordered(self.rows[16][0][elements], lanes, rows):
            return False
        clocks = self.cluster_clocks
        own_columns = clocks.wgmma + self.batch.rank[rows] * clocks.groups + readers
        for reader in readers.tolist():
            self.async_reads.add(reader, *extent)
        self.async_reads.tags[readers[:, None], elements] = (self.stamp | PSEUDO | own_columns).astype(self.TAG)[
            :, None
        ]
        if self.recorded is not None:
            for of_warpgroup, column in zip(elements, own_columns.tolist(), strict=True):
                self.recorded.record_read(of_warpgroup, 16 // self.granule, column, site)
        return True

    def product_reads(self, places: ProductPlaces, lane: int, column: int) -> tuple[int, int] | None:
        """Fast path of ``async_read`` for all operands of a matrix product. Returns the column and the tick of the bulk
        copies that wrote them; None, having done nothing, unless all belong to one phase of an mbarrier that the lane
        has waited for."""
        self._follow_tick()
        tags = self.rows[16][0].take(places.indices, axis=0)
        # If all elements have the same tag, they belong to one phase of one mbarrier, whose column and tick it names.
        tag = int(tags.flat[0])
        source, tick = (tag & ACTOR) - PSEUDO, (tag >> self.BITS) - 1 + self.t0
        if source < 0 or tag >= self.IN_FLIGHT or self.recorded is not None or (tags != self.TAG(tag)).any():
            return None
        if tick >= int(self.cluster_clocks.of_lane(lane)[source]):
            return None
        for reader in places.readers:
            self.async_reads.add(*reader)
        self.async_reads.flat[places.tags] = self.TAG(self.stamp | PSEUDO | column)
        return source, tick

    def store_reads(self, elements: Array, extent: tuple[int, int], lanes: Array, rows: Array) -> bool:
        """Fast path of ``async_read`` for bulk stores of several lanes. ``elements``: their indices, shape (lanes,
        elements). ``extent``: the bytes [low, high) of their CTAs that contain them. Returns False, having done
        nothing, unless threads of each lane's own CTA wrote all of them, executed a proxy fence afterwards, and
        synchronised with the lane."""
        self._follow_tick()
        batch, clocks = self.batch, self.cluster_clocks
        tags = self.rows[16][0].take(elements, axis=0).reshape(len(elements), -1)
        rank = (batch.rank[rows].astype(self.TAG) << self.TAG(RANK_THREADS))[:, None]
        # The bits of an actor above the 10 of the thread are the rank if, and only if, it is a single thread.
        if self.recorded is not None or ((tags ^ rank) & self.TAG(ACTOR ^ THREAD_OF_ACTOR)).any():
            return False
        warps, width = batch.warp[lanes], batch.width
        # Per lane and thread of its CTA: writes of the thread before this tick are fenced and visible to the lane.
        limit = self.proxy_fenced.reshape(-1, width)[rows]
        for i, (lane, row) in enumerate(zip(lanes.tolist(), rows.tolist(), strict=True)):
            # A lane needs no synchronisation with itself, but its own proxy fence.
            own_fence = int(limit[i, batch.thread[lane]])
            visible_ticks = clocks.of_lane(lane)[clocks.all_lanes_offset :][clocks.own(row)]
            np.minimum(limit[i], np.repeat(visible_ticks, 32)[:width], out=limit[i])
            limit[i, batch.thread[lane]] = own_fence
        ticks = (tags >> self.TAG(self.BITS)).astype(np.int64) - 1 + self.t0
        thread = (tags & self.TAG(THREAD_OF_ACTOR)).astype(np.int64)
        if (ticks >= np.take_along_axis(limit, thread, axis=1)).any():
            return False
        # All reads are correct. Only now may tags change, because False means that nothing has been done.
        columns = clocks.bulk + batch.rank[rows] * clocks.warps + warps
        readers = clocks.groups + warps
        for reader in readers.tolist():
            self.async_reads.add(reader, *extent)
        self.async_reads.tags[readers[:, None], elements] = (self.stamp | PSEUDO | columns).astype(self.TAG)[:, None]
        return True

    def _are_certainly_ordered(self, tags: Array, lanes: Array, rows: Array) -> bool:
        """Fast path: are reads by these lanes certainly ordered after the last writes of the elements? ``tags``: those
        of the writes, shape (lanes, elements, ...).

        It is True in two cases: one bulk copy that the lane has waited for wrote all elements; or threads of the lane's
        own CTA wrote them, and later all its threads executed a proxy fence and all its warps synchronised with the
        lane. False means only that a closer look is needed.
        """
        clocks = self.cluster_clocks
        tags = tags.reshape(len(tags), -1)
        last = tags.max(axis=1)
        if int(last.max()) >= self.IN_FLIGHT:
            return False
        actor, ticks, columns = self._split(last)
        warps = self.batch.warp[lanes]
        if (actor >= PSEUDO).all():
            # The last tag is that of asynchronous work. If all of a lane's tags equal it, one comparison decides.
            if (tags != last[:, None]).any():
                return False
            late = ticks >= clocks.ticks[rows, warps, columns]
            return all(int(ticks[i]) < int(clocks.of_lane(int(lanes[i]))[columns[i]]) for i in np.flatnonzero(late))
        if clocks.cluster > 1 or (tags & self.TAG(SEVERAL | PSEUDO)).any():
            return False
        # The least tick over all warps and all threads of the CTA is a bound that holds for every possible writer.
        width = self.batch.width
        synchronised_ticks = clocks.ticks[
            rows, warps, clocks.all_lanes_offset : clocks.all_lanes_offset + clocks.warps
        ].min(axis=1)
        fenced = self.proxy_fenced.reshape(-1, width)[rows].min(axis=1)
        return bool((ticks < np.minimum(synchronised_ticks, fenced)).all())

    def _check_async_read(self, tags: Array, elements: Array, lane: int, row: int, site: int, reader_name: str) -> None:
        """Report an asynchronous read of elements that races with the writes of these tags, or lacks a proxy fence."""
        tags, element_of_tag = self._writers_of(tags, elements, lane, site, reader_name)
        bad = ~self._ordered(np.full(len(tags), lane), tags, READ_AFTER_WRITE)
        self._report_race(f"{reader_name} reads", READ_AFTER_WRITE, bad, tags, element_of_tag, lane, row, site)
        # Threads write through the generic proxy, and only then a fence must lie between.
        generic = ((tags & ACTOR) < SEVERAL) & ~bad & (tags > self.LONG_PAST)
        if generic.any():
            self._check_proxy(tags[generic], lane, element_of_tag[generic], site, f"{reader_name} reads", row)

    def _writers_of(self, tags: Array, elements: Array, lane: int, site: int, reader_name: str) -> tuple[Array, Array]:
        """The tags of the last writes of elements that are read, and the element of each tag. Undefined elements are
        reported and left out."""
        element_of_tag = elements
        if tags.ndim > 1:
            element_of_tag = np.repeat(elements, tags.shape[1])
            tags = tags.reshape(-1)
        if int(tags.max()) >= self.IN_FLIGHT:
            for kind, text, bad, doubtful in faults_of_undefined(tags, self.IN_FLIGHT, self.UNWRITTEN, reading=True):
                other = self._copy_under(tags, element_of_tag, bad, kind)
                self._report_element(
                    kind, f"{reader_name} {text}", site, lane, int(element_of_tag[bad][0]), doubtful, other
                )
            good = tags < self.IN_FLIGHT
            tags, element_of_tag = tags[good], element_of_tag[good]
        return tags, element_of_tag

    def _copy_under(self, tags: Array, elements: Array, bad: Array, kind: str) -> Participant | None:
        """The copy in flight to the first of the ``bad`` elements; None for other kinds of findings."""
        if kind != "in-flight":
            return None
        element = int(elements[bad][0])
        granule = element * 16 // self.granule
        return self.participant(int(tags[bad][0]), element * 16 // self.stride, granule, reader=False)

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
        """Also checks that no asynchronous reader still needs the elements."""
        super()._check_write(lanes, width, elements, site, offset, same, after_reads)
        # Threads must not overwrite elements that asynchronous work may still be reading. The base class does not check
        # those reads. Their tags are kept per 16 bytes: elements * width >> 4 is the 16-byte element of each written
        # element.
        low, high = self.extent
        readers = self.async_reads.readers(low - WINDOW_START, high - WINDOW_START)
        if not readers:
            return
        reads = self.async_reads.tags[np.array(readers)[:, None], elements * width >> 4]
        reader, element = np.nonzero(reads)
        lane = element if lanes is None else lanes[element]
        if not element.size or self._ordered(lane, reads[reader, element], WRITE_AFTER_READ).all():
            return
        for number in range(len(readers)):
            of_reader = reader == number
            granules = Granules(site, lane[of_reader], element[of_reader], offset)
            all_read = np.ones(len(granules.element), bool)
            self._check_order(WRITE_AFTER_READ, all_read, reads[number, granules.element], granules)

    # --- proxies ---

    def fence_proxy(self, m: Mask) -> None:
        """fence.proxy.async by the lanes of ``m``. It covers their own accesses, and all that happen before it."""
        if not self.hazards:
            return
        self.launch.tick += 1
        lanes = self.batch.lanes(m)
        self.proxy_fenced[lanes] = self.launch.tick
        for warp in distinct(lanes >> 5):
            row, index = divmod(int(warp), self.batch.warps_per_cta)
            first = int(lanes[lanes >> 5 == warp][0])
            self.proxy_horizon[(row, index)] = self.cluster_clocks.of_lane(first).copy()

    def _check_proxy(self, tags: Array, lane: int, elements: Array, site: int, event: str, row: int) -> None:
        """Report an asynchronous access to elements that threads have written, unless a fence.proxy.async comes
        between, executed by the writer or by the thread that issues the access."""
        batch = self.batch
        actor, ticks, column = self._split(tags)
        # The lane of the batch that wrote: the rows of a cluster follow each other, each with ``width`` lanes.
        first = self.peers.row_of_rank(row, 0)
        writer = (first + (actor >> RANK_THREADS)) * batch.width + (actor & THREAD_OF_ACTOR)
        # Either of two fences is enough: the writer's own, after its write; or one of the warp that issues the access,
        # if the write happens before that fence.
        bad = ticks >= self.proxy_fenced[writer]
        if bad.any():
            horizon = self.proxy_horizon.get((int(batch.row_of[lane]), int(batch.warp[lane])))
            if horizon is not None:
                bad &= ticks >= horizon[column]
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            text = f"{event} what a thread wrote without a fence.proxy.async between"
            other = self.participant(int(tags[i]), row, int(elements[i]) * 16 // self.granule, reader=False)
            self._report_element("proxy-fence", text, site, lane, int(elements[i]), other=other)

    def check_reads_fenced(self, target: Elements, lane: int, row: int, site: int, event: str) -> None:
        """Report an asynchronous write of 16-byte elements that threads have read, unless a fence.proxy.async comes
        between, executed by the reader or by the thread that issues the write."""
        batch = self.batch
        horizon = self.proxy_horizon.get((int(batch.row_of[lane]), int(batch.warp[lane])))
        for reader, tags in enumerate(self.rows[16][2][target.indices].reshape(-1, self.columns).T):
            tag = tags.max(keepdims=True)
            if tag[0] <= self.LONG_PAST:
                continue
            actor, ticks, column = self._split(tag)
            rank, warp = divmod(reader, batch.warps_per_cta)
            first = self.peers.row_of_rank(row, rank) * batch.width + warp * 32
            # The tag does not say which of several lanes has read, so a fence by any of them counts.
            threads = first + (int(actor[0]) & 31 if actor[0] < SEVERAL else np.arange(32))
            covered = -1 if horizon is None else int(horizon[column[0]])
            if ticks[0] >= max(covered, int(self.proxy_fenced[threads].max())):
                text = f"{event} what a thread read without a fence.proxy.async between"
                element = int(target.indices[0])
                other = self.participant(int(tag[0]), row, element * 16 // self.granule, reader=True)
                self._report_element("proxy-fence", text, site, lane, element, other=other)

    # --- asynchronous writes ---

    def check_async_write(self, target: Elements, lane: int, row: int, site: int, width: int = 16) -> None:
        """Report a copy by a lane into elements of ``width`` bytes of CTA ``row`` that comes too early."""
        if self.hazards:
            self._follow_tick()
            tags = self.rows[width][0][target.indices]
            lanes = np.full(len(target.indices), lane)
            if not (self._may_overwrite(tags, target, lane, width) or self.may_follow(target, lanes, width)):
                self._report_early_write(tags, target, lane, row, site, width)

    def start_write(self, elements: Array, column: int, site: int, width: int = 16) -> None:
        """Start a checked copy into elements of ``width`` bytes: they are undefined until it lands."""
        if self.hazards:
            self.rows[width][0][elements] = self.TAG(self.IN_FLIGHT | PSEUDO | column)
            if self.recorded is not None:
                self.recorded.record_write(elements, width // self.granule, site)
        self.views[width][elements] = self.poison[width]

    def may_follow(self, target: Elements, lanes: Array, width: int) -> bool:
        """Fast path: is ``check_async_write`` certain to report nothing if each lane copies into its element of
        ``target``? False means only that a closer look is needed."""
        if not self.hazards:
            return True
        self._follow_tick()
        writer, latest, readers = self.rows[width]
        tags = writer[target.indices].reshape(len(lanes), -1)
        lane_of_tag = np.broadcast_to(lanes[:, None], tags.shape)
        in_flight = (tags >= self.IN_FLIGHT) & (tags != self.UNWRITTEN)
        written = (tags < self.IN_FLIGHT) & (tags > self.LONG_PAST)
        if in_flight.any() or not self._ordered(lane_of_tag[written], tags[written], WRITE_AFTER_WRITE).all():
            return False
        if width == 16 and ((tags[written] & ACTOR) < SEVERAL).any():  # a proxy fence may be missing
            return False
        if latest[target.indices].any():
            reads = readers[target.indices].reshape(-1, self.columns)
            place, reader = np.nonzero(reads)
            if not self._ordered(lane_of_tag.reshape(-1)[place], reads[place, reader], WRITE_AFTER_READ).all():
                return False
        for async_reader in self.async_reads.readers(target.low, target.high):
            reads = self.async_reads.tags[async_reader, target.indices * width >> 4]
            place = np.flatnonzero(reads)
            if not self._ordered(lanes[place], reads[place], WRITE_AFTER_READ).all():
                return False
        return True

    def _may_overwrite(self, tags: Array, target: Elements, lane: int, width: int) -> bool:
        """Fast path: may a copy certainly overwrite elements that were written under these tags?

        It is True if all of these hold: the elements were never written, or one bulk copy wrote all of them and the
        lane has waited for it; no thread has read them; all matrix products and bulk stores that read them have ended
        for the lane. False means only that a closer look is needed.
        """
        last, clock = int(tags.max()), self.cluster_clocks.of_lane(lane)
        ended = self.cluster_clocks.ended
        elements = target.indices
        if int(tags.min()) != last or width != 16:
            return False
        if self.thread_reads.overlaps(target.low, target.high) and self.rows[width][1][elements].any():
            return False
        if last != self.UNWRITTEN and last > self.LONG_PAST:
            actor = last & ACTOR
            if last >= self.IN_FLIGHT or actor < PSEUDO:
                return False
            if (last >> self.BITS) - 1 + self.t0 >= int(clock[actor - PSEUDO + ended]):
                return False
        for reader in self.async_reads.readers(target.low, target.high):
            reads = self.async_reads.tags[reader, elements]
            tag = int(reads.max())
            if not tag:
                continue
            # The largest tag has the latest tick. It stands for all reads only if they are of the same column.
            if self.async_reads.is_mixed(reader):
                others = (reads != 0) & ((reads ^ self.TAG(tag)) & self.TAG(ACTOR) != 0)
                if others.any():
                    return False
            if (tag >> self.BITS) - 1 + self.t0 >= int(clock[(tag & ACTOR) - PSEUDO + ended]):
                return False
        return True

    def _report_early_write(self, tags: Array, target: Elements, lane: int, row: int, site: int, width: int) -> None:
        """Report a copy into elements of ``width`` bytes that comes before their last writes (``tags``) or reads have
        ended."""
        _, latest, readers = self.rows[width]
        elements, flat = target.indices, tags.reshape(-1)
        element_of_tag = np.repeat(elements, flat.size // len(elements)) * width // 16
        self._check_overwrite(flat, element_of_tag, lane, row, site, width)
        if latest[elements].any():
            reads = readers[elements].reshape(-1, self.columns)
            for reader in np.flatnonzero(reads.any(axis=0)):
                self._check_reads(reads[:, reader], element_of_tag, lane, row, site)
        chunks = elements * width >> 4
        for async_reader in self.async_reads.readers(target.low, target.high):
            async_reads = self.async_reads.tags[async_reader, chunks]
            if async_reads.any():
                self._check_reads(async_reads, chunks, lane, row, site)

    def _check_overwrite(self, tags: Array, elements: Array, lane: int, row: int, site: int, width: int) -> None:
        """Report a bulk copy into elements that comes before their writes (``tags``) have ended."""
        for kind, text, bad, doubtful in faults_of_undefined(tags, self.IN_FLIGHT, self.UNWRITTEN, reading=False):
            other = self._copy_under(tags, elements, bad, kind)
            self._report_element(kind, text, site, lane, int(elements[bad][0]), doubtful, other)
        completed = np.flatnonzero((tags < self.IN_FLIGHT) & (tags > self.LONG_PAST))
        if completed.size:
            tags, elements = tags[completed], elements[completed]
            bad = ~self._ordered(np.full(len(tags), lane), tags, WRITE_AFTER_WRITE)
            self._report_race("a bulk copy starts", WRITE_AFTER_WRITE, bad, tags, elements, lane, row, site)
            generic = ((tags & ACTOR) < SEVERAL) & ~bad
            if generic.any() and width == 16:
                self._check_proxy(tags[generic], lane, elements[generic], site, "a bulk copy overwrites", row)

    def _check_reads(self, tags: Array, elements: Array, lane: int, row: int, site: int) -> None:
        """Report a bulk copy into elements that comes before their reads (``tags``) have ended."""
        bad = (tags != 0) & ~self._ordered(np.full(len(tags), lane), tags, WRITE_AFTER_READ)
        self._report_race("a bulk copy starts", WRITE_AFTER_READ, bad, tags, elements, lane, row, site)

    def _report_race(
        self, event: str, hazard: str, bad: Array, tags: Array, elements: Array, lane: int, row: int, site: int
    ) -> None:
        """Report an asynchronous access that is not ordered after the accesses whose tags are ``bad``."""
        if not bad.any():
            return
        i = int(np.flatnonzero(bad)[0])
        kind, why = "shared-race", " without synchronisation between"
        one, tag = np.array([lane]), tags[i : i + 1]
        # An access that has ended for this lane, though it is not visible to it, was released or acquired in too
        # narrow a scope.
        if self.cluster_clocks.ended and self._ordered(one, tag, WRITE_AFTER_READ)[0]:
            kind, why = "memory-scope", f": {NARROW}"
        elif self._some_lanes_released(one, tag, hazard)[0]:
            why = f": {APART}"
        other = self.participant(int(tags[i]), row, int(elements[i]) * 16 // self.granule, hazard == WRITE_AFTER_READ)
        self._report_element(kind, f"{event}: {hazard}{why}", site, lane, int(elements[i]), other=other)

    def land(self, elements: Array, data: Array, column: int, tick: int, width: int = 16) -> None:
        """Store the data of a copy. A thread may read it if its clock has a later tick than ``tick`` in ``column``."""
        self.views[width][elements] = data
        if self.hazards:
            self.rows[width][0][elements] = self.TAG((tick - self.t0) << self.BITS | PSEUDO | column)
        self.launch.version += 1

    # --- other CTAs ---

    def of_cta(self, address: Array, m: Mask, site: int) -> Array:
        """See ``Peers.of_cta``."""
        return self.peers.of_cta(address, m, site)

    def of_cluster(self, address: Array) -> Array:
        """See ``Peers.of_cluster``."""
        return self.peers.of_cluster(address)

    def locate(self, address: Array, width: int, m: Mask, site: int) -> SharedAccess | None:
        """See ``SharedMemory.locate``; addresses may also name other CTAs of the cluster."""
        lanes = self.batch.lanes(m)
        if lanes.size == 0:
            return None
        chosen = address if m is None else address[lanes]
        if int(chosen.max()) <= WITHIN:
            return super().locate(address, width, m, site)
        lanes, rows = self.peers.rows(chosen, lanes, site)
        low = address & np.uint32(WITHIN)
        mask = np.zeros(self.batch.size, bool)
        mask[lanes] = True
        access = super().locate(low, width, mask, site)
        if access is None:
            return None
        located = access[0]
        assert located is not None
        if len(located) != len(lanes):
            rows = rows[np.isin(lanes, located)]
        offset = low[located].astype(np.int64) - WINDOW_START + rows * self.stride
        return located, offset >> SHIFT[width], offset
