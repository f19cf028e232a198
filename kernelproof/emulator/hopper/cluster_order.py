"""Decides which accesses to the shared memory of a cluster are ordered; their tags name threads of any of its CTAs."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from kernelproof.emulator.hopper.async_reads import AsyncReads
from kernelproof.emulator.hopper.cluster_clocks import ClusterClocks
from kernelproof.emulator.hopper.peers import Peers
from kernelproof.emulator.memory.recorded import RecordedSites
from kernelproof.emulator.memory.shared import SharedMemory
from kernelproof.emulator.memory.shared_checks import READ_AFTER_WRITE, WRITE_AFTER_READ, Granules
from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.participants import Participant
from kernelproof.emulator.state.sites import Site

# The actor of a tag has 16 bits and identifies the maker of the access:
#   rank << 10 | thread               one thread; ranks are below 16 and threads below 1024
#   SEVERAL + (rank << 5 | warp)      several lanes of a warp
#   PSEUDO + column of the clocks     asynchronous work
# The three ranges do not overlap, and comparing an actor with SEVERAL and PSEUDO tells them apart.
RANK_THREADS = 10
THREAD_OF_ACTOR = (1 << RANK_THREADS) - 1
SEVERAL, PSEUDO = 1 << 14, 1 << 15
ACTOR = (1 << 16) - 1
NARROW = "they are of different CTAs, and the synchronisation between is of CTA scope only"


@lru_cache(maxsize=64)
def _column_of_actor(warps: int, columns: int) -> Array:
    """A table, actor -> the column of the clocks by which its accesses are ordered."""
    actor = np.arange(1 << 16)
    thread = (actor >> RANK_THREADS) * warps + ((actor & THREAD_OF_ACTOR) >> 5)
    several = ((actor - SEVERAL) >> 5) * warps + ((actor - SEVERAL) & 31)
    table = np.where(actor < SEVERAL, thread, np.where(actor < PSEUDO, several, actor - PSEUDO))
    return np.minimum(table, columns - 1)


@lru_cache(maxsize=64)
def _all_lanes_column_of_actor(warps: int, columns: int, all_lanes_offset: int) -> Array:
    """``_column_of_actor`` with one difference: a single thread has the column that stands for all lanes of its warp,
    which is ``all_lanes_offset`` after the warp's other column."""
    return np.asarray(_column_of_actor(warps, columns) + all_lanes_offset * (np.arange(1 << 16) < SEVERAL))


class ClusterOrder(SharedMemory):
    """Shared memory of a batch of complete clusters, with the order of accesses to it.

    Asynchronous accesses are of 16-byte elements. The tag of such an access names a column of the clocks. The access
    happens before the next access of a warp if the warp's clock has a later tick in that column. ``async_reads`` keeps
    the last asynchronous read of every element by each warpgroup (wgmma) and each warp (bulk stores).

    A barrier orders threads but no asynchronous work. So no tag can be dismissed as old: ``fresh`` is 0, and every
    access is checked.
    """

    TAG = np.uint64
    BITS, UNWRITTEN, IN_FLIGHT, MAX_TICK = 16, (1 << 64) - 1, 1 << 63, 1 << 46
    DEFERS = False

    def __init__(self, batch: BatchState, clocks: ClusterClocks, peers: Peers, size: int, granule: int) -> None:
        self.cluster_clocks, self.peers = clocks, peers
        super().__init__(batch, clocks, size, granule)
        self.column_of = _column_of_actor(clocks.warps, clocks.columns)
        self.all_lanes_column_of = _all_lanes_column_of_actor(clocks.warps, clocks.columns, clocks.all_lanes_offset)
        self.async_reads = AsyncReads(clocks.groups + clocks.warps, self.data.size >> 4)

    def _reader_columns(self) -> int:
        return self.cluster_clocks.wgmma

    def _actors(self) -> tuple[Array, Array, Array]:
        batch = self.batch
        rank = batch.rank[batch.row_of]
        thread = (rank << RANK_THREADS | batch.thread).astype(np.uint64)
        several = (SEVERAL + (rank << 5 | batch.warp)).astype(np.uint64)
        return thread, several, (rank * batch.warps_per_cta + batch.warp).astype(np.int64)

    def _first_fresh(self, base: int) -> int:  # noqa: ARG002
        return 0

    def _split(self, tags: Array) -> tuple[Array, Array, Array]:
        """The actors, ticks and columns of the clocks of tags."""
        actor = (tags & ACTOR).astype(np.int64)
        # The tick of a tag counts from t0 and is one too large, because 0 and LONG_AGO are no ticks.
        ticks = ((tags & (self.IN_FLIGHT - 1)) >> self.BITS).astype(np.int64) - 1 + self.t0
        return actor, ticks, self.column_of[actor]

    def _deciding_columns(self, actor: Array, column: Array, hazard: str) -> Array:
        """The entries of the clock that decide whether an access is ordered: those for *visible* or for *ended*
        accesses (see ``ClusterClocks``). A write must be visible before a read of its data; a thread's write also
        before it is overwritten. Reads, and bulk copies that are overwritten, need only have ended."""
        if hazard == READ_AFTER_WRITE:
            return column
        ended = self.cluster_clocks.ended
        return column + ended if hazard == WRITE_AFTER_READ else column + ended * (actor >= PSEUDO)

    def _ordered(self, lanes: Array, tags: Array, hazard: str) -> Array:
        """Per element, whether the tagged access happens before the lane's present one."""
        batch, clocks = self.batch, self.cluster_clocks
        actor, ticks, _ = self._split(tags)
        column = self._deciding_columns(actor, self.all_lanes_column_of[actor], hazard)
        # An access is ordered if it is the lane's own, or if the clock of the lane's warp includes it. Clocks that only
        # some lanes have acquired, or released, are rare and take longer, so they are tried last.
        out: Array = actor == self.actor[lanes].astype(np.int64)
        out |= ticks < clocks.ticks[batch.row_of[lanes], batch.warp[lanes], column]
        if clocks.private and not out.all():
            undecided = np.flatnonzero(~out)
            out[undecided] = clocks.ordered_privately(lanes[undecided], column[undecided], ticks[undecided])
        if clocks.releases.active and not out.all():
            undecided = np.flatnonzero(~out & (actor < SEVERAL))
            writers, limits = self._released(lanes[undecided], tags[undecided], hazard)
            out[undecided] = clocks.releases.have_released(writers, ticks[undecided], limits)
        return out

    def _released(self, lanes: Array, tags: Array, hazard: str) -> tuple[Array, Array]:
        """For tags of single threads: the numbers of these threads' lanes in the batch; and, for each of ``lanes``, the
        tick up to which it has acquired releases by some lanes of the thread's warp."""
        batch, clocks = self.batch, self.cluster_clocks
        actor, _, column = self._split(tags)
        column = self._deciding_columns(actor, column, hazard)
        rows = batch.row_of[lanes]
        limits: Array = clocks.ticks[rows, batch.warp[lanes], column]
        for i in range(len(lanes)) if clocks.private else ():
            limits[i] = clocks.of_lane(int(lanes[i]))[column[i]]
        # The rows of a cluster follow each other, each with ``width`` lanes.
        first = rows - batch.rank[rows]
        return (first + (actor >> RANK_THREADS)) * batch.width + (actor & THREAD_OF_ACTOR), limits

    def _some_lanes_released(self, lanes: Array, tags: Array, hazard: str) -> Array:
        """The answer of the base class, by the clocks of the cluster."""
        actor, ticks, column = self._split(tags)
        batch, out = self.batch, np.zeros(len(tags), bool)
        own = self.cluster_clocks.first[batch.row_of[lanes]] + batch.warp[lanes]
        single = np.flatnonzero((actor < SEVERAL) & (column != own))
        out[single] = ticks[single] < self._released(lanes[single], tags[single], hazard)[1]
        return out

    def _report_unordered(self, hazard: str, bad: Array, tags: Array, granules: Granules, doubtful: bool) -> None:
        """Report races. If the accesses are of two CTAs and are ordered at CTA scope only, the rule is
        ``memory-scope``."""
        if self.cluster_clocks.ended and hazard != WRITE_AFTER_READ:
            narrow = bad.copy()
            narrow[bad] = self._ordered(granules.lane[bad], tags[bad], WRITE_AFTER_READ)
            if narrow.any():
                text = f"{hazard}: {NARROW}"
                self._report("memory-scope", text, granules, narrow, tags, doubtful=doubtful)
                bad = bad & ~narrow
        if bad.any():
            super()._report_unordered(hazard, bad, tags, granules, doubtful)

    def participant(self, tag: int, row: int, granule: int, reader: bool, lane: int | None = None) -> Participant:
        """Who made the access of a tag."""
        actor, clocks = tag & ACTOR, self.cluster_clocks
        site = self._recorded_site(granule, int(self.column_of[actor]) if reader else None, lane)
        threads: tuple[int, ...] = ()
        agent = ""
        if actor < SEVERAL:
            rank, threads = actor >> RANK_THREADS, (actor & THREAD_OF_ACTOR,)
        elif actor < PSEUDO:
            rank, agent = (actor - SEVERAL) >> 5, f"a lane of warp {(actor - SEVERAL) & 31}"
        else:
            column = actor - PSEUDO
            if column >= clocks.barriers:
                return Participant(site, agent="a bulk copy")
            if column < clocks.bulk:
                rank, async_reader = divmod(column - clocks.wgmma, clocks.groups)
                agent = clocks.agent(async_reader)
            else:
                rank, warp = divmod(column - clocks.bulk, clocks.warps)
                agent = f"a bulk store of warp {warp}"
        return Participant(site, self.batch.cta_index(self.peers.row_of_rank(row, rank)), threads, agent)

    def _recorded_site(self, granule: int, column: int | None, lane: int | None) -> Site:
        """The instruction of a recorded access. ``column``: that of the reader, None for the writer."""
        if column is not None and column >= self.cluster_clocks.barriers:
            # A bulk copy to another CTA reads under the column of an mbarrier, but is recorded under that of its warp.
            chunk = granule * self.granule >> 4
            actors = (self.async_reads.tags[:, chunk] & self.TAG(ACTOR)).astype(np.int64)
            readers = np.flatnonzero(actors == PSEUDO | column)
            row = granule * self.granule // self.stride
            column = self._reader_column(row, int(readers[0])) if len(readers) else None
        return super()._recorded_site(granule, column, lane)

    def _columns_of(self, tags: Array) -> Array:
        # Records have no columns for bulk copies; see ``_recorded_site``.
        return np.minimum(self.column_of[(tags & ACTOR).astype(np.int64)], self.cluster_clocks.barriers - 1)

    def _make_recorded(self, granules: int) -> RecordedSites:
        # The columns: one for each warp, then one for each asynchronous reader, of which bulk stores come last.
        return RecordedSites(granules, self.cluster_clocks.barriers)

    def _reader_column(self, row: int, reader: int) -> int:
        """The column of the clocks of an asynchronous reader of a row."""
        clocks = self.cluster_clocks
        if reader < clocks.groups:
            return clocks.wgmma_column(row, reader)
        return clocks.bulk_column(row, reader - clocks.groups)
