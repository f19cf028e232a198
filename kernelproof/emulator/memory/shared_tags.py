"""Keeps the tags of shared memory: the last accesses to each granule.

A granule is as wide as the kernel's smallest access.
"""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.memory.late_copies import NEVER_OLD, Extents
from kernelproof.emulator.memory.late_reads import LateRead, LateReads
from kernelproof.emulator.memory.recorded import RecordedSites
from kernelproof.emulator.memory.shared_flags import SharedFlags
from kernelproof.emulator.state.arrays import MOVER, Array, distinct, sparse_zeros
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.warp_clocks import WarpClocks

# The tag of a write that happens before all later accesses.
LONG_AGO = 1


def any_granule(of_elements: Array) -> Array:
    """A mask of the elements for which a mask of shape (elements,) or (elements, granules) is true in any granule."""
    if of_elements.ndim == 1:
        return of_elements
    granules = of_elements.shape[1]
    if granules > 8:
        return np.asarray(of_elements.any(axis=1))
    # NumPy compares words much faster than it reduces short rows.
    return np.asarray(np.ascontiguousarray(of_elements).view(MOVER[granules]).reshape(-1) != 0)


def put_in_granules(of_elements: Array, elements: Array, values: Array) -> None:
    """Write a value per element to all granules of ``elements``. ``of_elements``: the array that is changed, shape
    (elements,) or (elements, granules)."""
    if of_elements.ndim == 1:
        of_elements[elements] = values
        return
    # NumPy writes opaque elements several times faster than short rows.
    granules = of_elements.shape[1]
    element = np.dtype(f"V{of_elements.itemsize * granules}")
    of_elements.reshape(-1).view(element)[elements] = values.repeat(granules).view(element)


class SharedTags(SharedFlags):
    """The tags of a batch's shared memory, ``nbytes`` bytes in all.

    A tag is tick << BITS | actor. Per granule there are three kinds: ``writer`` is the tag of the last write,
    ``readers`` that of the last read by each column of readers (a column per warp of the CTA), ``latest`` that of the
    last read by anyone. The ticks in tags count from ``t0`` and start at 2, so that LONG_AGO is below all of them. A
    write under way has the bit IN_FLIGHT; UNWRITTEN, the largest value, has it too.

    Invariants:
    - the tag of an access has the launch's tick at the time of the access (``_follow_tick``);
    - the access of a tag below ``fresh`` happens before all later ones, so checks begin with one comparison (with
      ``_fresh_of`` the lanes of the access);
    - no tick in ``readers`` is later than the one in ``latest``.
    """

    TAG: type[np.uint32] | type[np.uint64] = np.uint32
    BITS, UNWRITTEN, IN_FLIGHT, MAX_TICK = 11, 0xFFFFFFFF, 0x80000000, 1 << 20

    def __init__(self, batch: BatchState, clocks: WarpClocks, nbytes: int, granule: int) -> None:
        super().__init__(batch, clocks)
        self.granule = granule
        # Readers are distinguished by column.
        self.columns = self._reader_columns()
        # ``tagged`` is the tick that ``stamp`` and ``lane_tag`` carry.
        self.t0 = self.tagged = batch.launch.tick
        self.fresh = 0
        # Do all CTAs have the same ``fresh``? If not, the last result of ``_fresh_of`` is kept: lanes, and theirs.
        self._are_even = True
        self._last_fresh: tuple[Array | None, int] = None, 0
        # The last lanes of ``_fresh_of``, and their rows.
        self._rows_of: tuple[Array, Array] = batch.everyone, batch.everyone
        self._last_lane_tag: tuple[int, Array] = -1, batch.everyone
        self.late_reads = LateReads()
        # Invariant if tags are deferred: outside of these extents every tag is old, and none is that of a copy under
        # way. So a write that touches none of them needs no check.
        self.recent = Extents()
        if self.hazards:
            self._make_tags(nbytes // granule)
        if nbytes:
            self._retag()

    def _make_tags(self, n: int) -> None:
        """Make the tags of ``n`` granules."""
        self.writer: Array = np.full(n, self.UNWRITTEN, self.TAG)
        self.latest: Array = np.zeros(n, self.TAG)
        self.readers: Array = sparse_zeros((n, self.columns), self.TAG)
        self.reader_tags = self.readers.reshape(-1)
        # Width of an access in bytes -> views of the same tags by element, of width / granule granules each. So a check
        # indexes tags by element number and computes no granules. Accesses narrower than a granule do not occur.
        self.rows: dict[int, tuple[Array, Array, Array]] = {}
        for w in MOVER:
            if w >= self.granule:
                per_element = w // self.granule
                self.rows[w] = (
                    self.writer.reshape(-1, per_element) if per_element > 1 else self.writer,
                    self.latest.reshape(-1, per_element) if per_element > 1 else self.latest,
                    self.readers.reshape(-1, per_element, self.columns),
                )
        # The same views of the tags that granules got at their last atomic or write of a flag, once there is one. If a
        # granule's present tag differs from that, a plain access was the last one that wrote it.
        self.strong_rows: dict[int, Array] = {}
        # Granules that volatile loads have read, and those that stores have used as flags, once there are any.
        self.volatile: Array | None = None
        self.flagged: Array | None = None
        self.actor, self.collective, self.reader_column = self._actors()
        self.recorded = self._make_recorded(n) if self.launch.recording else None

    def _make_recorded(self, granules: int) -> RecordedSites:
        """The record of instructions; subclasses make their own."""
        return RecordedSites(granules, self.columns)

    def _reader_columns(self) -> int:
        """How many columns of readers there are."""
        return self.batch.warps_per_cta

    def _actors(self) -> tuple[Array, Array, Array]:
        """Per lane: its actor as a thread, its actor as one of several lanes of its warp, and its column as a
        reader."""
        identities = self.batch.identities
        return identities.actor, identities.actor_of_warp, identities.warp

    def _follow_tick(self) -> None:
        """Make sure that new tags have the present tick. Every access calls this first."""
        if self.tagged != self.launch.tick:
            self._retag()

    def _retag(self) -> None:
        """Begin the tags of the present tick, and forget accesses that have become old."""
        self.tagged = self.launch.tick
        tick = self.tagged - self.t0
        if tick >= self.MAX_TICK:
            # Ticks no longer fit into tags, so they count from now on again, and all earlier accesses become LONG_AGO.
            # Races with those are then missed, but no false finding can result.
            self.t0, tick = self.tagged - 1, 1
            if self.hazards:
                self.writer[self.writer < self.IN_FLIGHT] = LONG_AGO
                self.latest[:] = 0
                self.readers[:] = 0
                self.late_reads.reads.clear()
                self.recent.forget(NEVER_OLD)
        # ``fresh`` only grows while ``t0`` is the same, so what is old now remains old and may be forgotten.
        self.fresh = self._first_fresh(int(self.clocks.base.min()))
        self._last_fresh = None, self.fresh
        self._are_even = self.fresh == self._first_fresh(int(self.clocks.base.max()))
        self.late_reads.forget(self.fresh)
        self.recent.forget(self.fresh)
        self.stamp = (tick + 1) << self.BITS

    @property
    def lane_tag(self) -> Array:
        """Per lane, its tag now."""
        if self._last_lane_tag[0] != self.stamp:
            self._last_lane_tag = self.stamp, self.actor | self.TAG(self.stamp)
        return self._last_lane_tag[1]

    def _first_fresh(self, base: int) -> int:
        """The smallest tag that is not older than a barrier of a complete CTA at tick ``base``."""
        return max(1, base - self.t0 + 1) << self.BITS

    def _fresh_of(self, lanes: Array | None) -> int:
        """``fresh`` for accesses of lanes (None: all) to their own CTAs' memory. These CTAs may have passed later
        barriers than others of the batch. At least 1, so that tag 0, of untouched granules, is below it."""
        if lanes is None or self._are_even:
            return max(self.fresh, 1)
        # Arrays of lanes never change in place.
        if self._last_fresh[0] is not lanes:
            if self._rows_of[0] is not lanes:
                self._rows_of = lanes, distinct(self.batch.row_of[lanes])
            base = self.clocks.base[self._rows_of[1]]
            self._last_fresh = lanes, max(self._first_fresh(int(base.min())), 1)
        return self._last_fresh[1]

    def tag_written(
        self, width: int, elements: Array, tag: Array, site: int | None = None, strong: bool = False
    ) -> None:
        """Tag all granules of elements as written, and record ``site`` as the instruction that wrote them. For a
        copy whose data lands now, ``site`` is None: its instruction was recorded when the copy began. ``strong``: the
        write is an atomic or a write of a flag."""
        put_in_granules(self.rows[width][0], elements, tag)
        if strong and not self.strong_rows:
            granules = np.zeros_like(self.writer)
            self.strong_rows = {w: granules.reshape(rows[0].shape) for w, rows in self.rows.items()}
        if self.strong_rows:
            # A plain write stores 0, which no tag is: its own tag may equal that of an atomic of the same thread.
            put_in_granules(self.strong_rows[width], elements, tag if strong else np.zeros_like(tag))
        if self.recorded is not None and site is not None:
            self.recorded.record_write(elements, width // self.granule, site)

    def volatile_rows(self, width: int) -> Array:
        """The granules that volatile loads have read, by element like ``rows``."""
        if self.volatile is None:
            self.volatile = np.zeros(len(self.writer), bool)
        return self.volatile.reshape(self.rows[width][0].shape)

    def flag_rows(self, width: int) -> Array:
        """The granules that stores have used as flags, by element like ``rows``."""
        if self.flagged is None:
            self.flagged = np.zeros(len(self.writer), bool)
        return self.flagged.reshape(self.rows[width][0].shape)

    def are_volatile(self, elements: Array, width: int) -> Array:
        """A mask of the elements that volatile loads have read."""
        if self.volatile is None:
            return np.zeros(len(elements), bool)
        return any_granule(self.volatile_rows(width)[elements])

    def are_flags(self, elements: Array, width: int) -> Array:
        """A mask of the elements that stores have used as flags."""
        return np.zeros(len(elements), bool) if self.flagged is None else any_granule(self.flag_rows(width)[elements])

    def last_writers(self, width: int, elements: Array) -> Array:
        """The tag of the last write to the first granule of each element."""
        writer = self.rows[width][0]
        return np.asarray(writer[elements] if writer.ndim == 1 else writer[elements, 0])

    def _write_deferred_tags(self, reads: list[LateRead]) -> None:
        """Write the tags of deferred reads, oldest first."""
        for read in reads:
            self.recent.add(read.low, read.high, read.stamp)
            chosen = slice(None) if read.lanes is None else read.lanes
            if not read.together:
                self._write_tags_of_threads(read, chosen)
                continue
            _, latest, readers = self.rows[read.width]
            # Later accesses compare ``latest`` only with ``fresh``, so it needs no actor.
            latest[read.elements] = read.stamp
            tags = self.collective[chosen] | self.TAG(read.stamp)
            readers[read.elements, :, self.reader_column[chosen]] = tags[:, None]

    def _write_tags_of_threads(self, read: LateRead, chosen: Array | slice) -> None:
        """Write the tags of a read by the threads of ``chosen`` lanes.

        A column of readers, which belongs to a warp, has one tag per granule, but several lanes of the warp may read
        the granule. The tag is that of the thread while it is the only reader since the warp last synchronised.
        Otherwise it is the tag of "several lanes of the warp".
        """
        elements, per_element, latest = read.elements, read.width // self.granule, self.rows[read.width][1]
        stamp = self.TAG(read.stamp)
        lane_tag, collective_tag = self.actor[chosen] | stamp, self.collective[chosen] | stamp
        # ``reader_tags`` is flat, by granule and then by column. ``first``: each element's first granule, own column.
        first = elements * (per_element * self.columns) + self.reader_column[chosen]
        before = latest.take(elements, axis=0)
        put_in_granules(latest, elements, lane_tag)
        # Every lane stores its tag and then reads it back: if several lanes share a granule, only the last one finds
        # its own. Most granules have one reader, in this instruction and since the CTA last synchronised.
        is_alone = not (before >= self._fresh_of(read.lanes)).any()
        is_alone = is_alone and bool((lane_tag == latest.take(elements, axis=0).T).all())
        tag = lane_tag if is_alone else self._tags_among_others(first, lane_tag, collective_tag, chosen)
        for k in range(per_element):
            self.reader_tags[first + k * self.columns] = tag
        # If lanes share a granule in this very instruction, only the tag of the last one is there.
        replaced = np.zeros(0, bool) if is_alone else self.reader_tags[first] != tag
        if replaced.any():
            for k in range(per_element):
                self.reader_tags[first[replaced] + k * self.columns] = collective_tag[replaced]

    def _tags_among_others(self, first: Array, lane_tag: Array, collective_tag: Array, chosen: Array | slice) -> Array:
        """The tags of lanes that read granules which other lanes of their warps may have read."""
        old, actor = self.reader_tags[first], (1 << self.BITS) - 1
        # Reads before the warp last synchronised do not count: they happen before what its lanes do now. If CTAs have
        # passed different barriers, ``fresh`` is too old for that, because the CTA with the oldest barrier sets it.
        fresh: Array = np.asarray(self.fresh, self.TAG)
        # A deferred read is tagged late. If its warp has synchronised since then, other readers count as old here, and
        # the read may get the tag of its thread instead of that of several lanes. Checks find a thread unordered in
        # more cases, so no race is missed; an execution that records instructions decides whether it is one.
        if not self.clocks.is_even:
            row, warp = self.batch.row_of[chosen], self.batch.warp[chosen]
            horizon = (self.clocks.horizon(row, warp, warp) - self.t0 + 1) << self.BITS
            fresh = np.maximum(horizon, self.fresh).astype(self.TAG)
        several = (old >= fresh) & ((old & actor) != (lane_tag & actor)) & (old != 0)
        return np.where(several, collective_tag, lane_tag)
