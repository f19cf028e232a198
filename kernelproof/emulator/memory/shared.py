"""Executes and checks the accesses of a batch to shared memory, which has one row of bytes per CTA."""

from __future__ import annotations

from functools import partial

import numpy as np

from kernelproof.emulator.memory.late_copies import NEVER_OLD, LateCopies, LateCopy
from kernelproof.emulator.memory.late_reads import LateRead
from kernelproof.emulator.memory.located import LocatedAccesses
from kernelproof.emulator.memory.shared_checks import Granules, SharedChecks
from kernelproof.emulator.memory.shared_tags import any_granule
from kernelproof.emulator.state.arrays import MOVER, SHIFT, Array, Mask, equal_bits
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.scopes import VOLATILE
from kernelproof.emulator.state.warp_clocks import WarpClocks

# Shared addresses start here: the first KiB of the window belongs to the system on recent devices.
WINDOW_START = 1024

# Per lane of an access: the lanes (None: all), the indices of elements of the access's width in the batch's shared
# memory (called ``elements`` here), and the byte offsets there.
SharedAccess = tuple[Array | None, Array, Array]


class SharedMemory(SharedChecks):
    """``size`` bytes of shared memory per CTA. Addresses are window addresses: uint32, one per lane of the batch."""

    def __init__(self, batch: BatchState, clocks: WarpClocks, size: int, granule: int) -> None:
        super().__init__(batch, clocks, size, granule)
        self.counters = batch.launch.counters
        poison = batch.launch.poison
        self.data: Array = np.full(batch.count * self.stride, poison, np.uint8)
        self.poison = {w: np.frombuffer(bytes([poison]) * 16, t)[0] for w, t in MOVER.items()}
        # All views share the bytes of ``data``. The stride is a multiple of 128, so elements of any width are aligned.
        self.views: dict[int, Array] = {w: self.data.view(t) for w, t in MOVER.items()}
        # Per lane: what to add to a window address to get an offset in ``data``.
        self.row: Array = batch.row_of.astype(np.int64) * self.stride - WINDOW_START
        self.located = LocatedAccesses(batch.size)
        self.late_copies = LateCopies()

    # --- places ---

    def of_cta(self, address: Array, m: Mask, site: int) -> Array:  # noqa: ARG002
        """Addresses in the lane's own CTA, in the form that the other methods take. Without clusters: unchanged."""
        return address

    def of_cluster(self, address: Array) -> Array:
        """Addresses in any CTA of the cluster, in the form that the other methods take. Without clusters: unchanged."""
        return address

    def locate(self, address: Array, width: int, m: Mask, site: int) -> SharedAccess | None:
        """Check bounds and alignment. Returns (lanes, element index, byte offset), or None if no lane remains."""
        self._follow_tick()
        lanes, addresses = None, address
        if m is None:
            place = self.located.find(address, width, site)
            if place is not None:
                elements, offset, self.extent = place
                self.write_deferred_copies(*self.extent)
                return None, elements, offset
        else:
            lanes = self.batch.lanes(m)
            if lanes.size == 0:
                return None
            address = address[lanes]
        low, high = int(address.min()), int(address.max())
        self.extent = low, high + width
        self.write_deferred_copies(*self.extent)
        top = WINDOW_START + self.size - width
        if low < WINDOW_START or high > top or int(np.bitwise_or.reduce(address)) & (width - 1):
            lanes, address = self._drop_invalid(address, width, self.batch.everyone if lanes is None else lanes, site)
            if lanes.size == 0:
                return None
        if lanes is None:
            offset = address + self.row
            elements = offset >> SHIFT[width]
            self.located.remember(addresses, width, site, elements, offset, self.extent)
            return None, elements, offset
        offset = address + self.row[lanes]
        return lanes, offset >> SHIFT[width], offset

    def _drop_invalid(self, address: Array, width: int, lanes: Array, site: int) -> tuple[Array, Array]:
        """Report invalid lanes, and return the others with their addresses."""
        wide = address.astype(np.int64)
        outside = (wide < WINDOW_START) | (wide > WINDOW_START + self.size - width)
        misaligned = ((wide & (width - 1)) != 0) & ~outside
        beyond = f"{width}-byte access outside the {self.size} bytes of shared memory"
        uneven = f"{width}-byte access at an address that is no multiple of {width}"
        for bad, kind, text in ((outside, "shared-out-of-bounds", beyond), (misaligned, "shared-misaligned", uneven)):
            if bad.any():
                first_offset = int(wide[np.flatnonzero(bad)[0]]) - WINDOW_START
                self.batch.report_lanes(kind, text, site, lanes[bad], first_offset)
        good = ~(outside | misaligned)
        return lanes[good], address[good]

    # --- loads and stores ---

    def load(self, address: Array, width: int, m: Mask, site: int, strong: int = 0) -> Array:
        """Read ``width`` bytes per lane; returns an array of MOVER[width], shape (lanes of the batch,).

        ``strong``: the load reads a flag (see ``state.scopes``). It does not race with strong writes, and it learns the
        clocks that they have published.
        """
        access = self.locate(address, width, m, site)
        if access is None:
            return self.batch.poison(width)
        lanes, elements, offset = access
        if self.counters is not None:
            self.counters.shared("ld.shared", address, width, m)
        values: Array = self.views[width][elements]
        if self.hazards and strong == VOLATILE:
            self._read_volatile(lanes, elements, width, site, offset)
        elif self.hazards and strong:
            values = self._poll(lanes, elements, width, site, offset, strong, values)
        elif self.hazards:
            self._read(lanes, elements, width, site, offset)
        if self.launch.trial is not None and strong in (0, VOLATILE):
            values = self.trial_values(values, lanes, elements)
        return values if lanes is None else self.batch.spread(values, lanes, width)

    def _read(self, lanes: Array | None, elements: Array, width: int, site: int, offset: Array) -> None:
        """Check a read by threads and tag it."""
        self._check_read(lanes, self.rows[width][0].take(elements, axis=0), site, offset, can_be_tried=True)
        self._tag_read(lanes, elements, width, together=False)
        if self.recorded is not None:
            chosen = slice(None) if lanes is None else lanes
            column, lane = self.reader_column[chosen], self.batch.thread[chosen] & 31
            self.recorded.record_read(elements, width // self.granule, column, site, lane)

    def _read_volatile(self, lanes: Array | None, elements: Array, width: int, site: int, offset: Array) -> None:
        """Check a volatile read as a weak one, except at granules that an atomic has written; see ``VOLATILE``."""
        everyone = self.batch.everyone if lanes is None else lanes
        plain = self._is_plain(elements, width)
        if plain.any():
            self._read(everyone[plain], elements[plain], width, site, offset[plain])
        self.volatile_rows(width)[elements] = True

    def read_together(self, lanes: Array | None, elements: Array, width: int, site: int, offset: Array) -> None:
        """Check and tag a read by whole warps, such as ldmatrix: it is tagged as one of several lanes."""
        self._check_read(lanes, self.rows[width][0].take(elements, axis=0), site, offset, can_be_tried=True)
        self._tag_read(lanes, elements, width, together=True)
        if self.recorded is not None:
            column = self.reader_column if lanes is None else self.reader_column[lanes]
            self.recorded.record_read(elements, width // self.granule, column, site)

    def _tag_read(self, lanes: Array | None, elements: Array, width: int, *, together: bool) -> None:
        """Tag a read of the bytes that were located last, or defer that. ``together``: see ``LateRead``."""
        read = LateRead(*self.extent, width, lanes, elements, self.stamp, together)
        if not self.defers or self.late_reads.is_full:
            everything = self.late_reads.take(low=0, high=1 << 32, fresh=0)
            self._write_deferred_tags([*everything, read])
        else:
            self.late_reads.reads.append(read)

    def store(
        self,
        address: Array,
        value: Array,
        width: int,
        m: Mask,
        site: int,
        strong: int = 0,
        kind: str = "st.shared",
    ) -> None:
        """Write MOVER[width] values, one per lane. ``strong``: the store writes a flag (see ``state.scopes``).
        ``kind``: its name among the counters."""
        access = self.locate(address, width, m, site)
        if access is None:
            return
        lanes, elements, offset = access
        if lanes is not None:
            value = value[lanes]
        if self.counters is not None:
            self.counters.shared(kind, address, width, m)
        view = self.views[width]
        self.launch.count_store(lambda: bool(equal_bits(view[elements], value).all()))
        if not self.hazards:
            view[elements] = value
            return
        self._check_write(lanes, width, elements, site, offset, lambda: self._is_same_store(width, elements, value))
        tag = self.lane_tag if lanes is None else self.lane_tag[lanes]
        self.tag_written(width, elements, tag, site, bool(strong))
        if strong:
            self.flag_rows(width)[elements] = True
        self.recent.add(*self.extent, self.stamp)
        old = view[elements] if strong and self.observed else None
        view[elements] = value
        if strong and self.flags_are_read:
            self._publish(lanes, offset, strong, site, None if old is None else (old, value))
        # If several lanes store to one word, the others find the last one's tag and value here.
        replaced = self.last_writers(width, elements) != tag
        if replaced.any():
            differ = replaced & ~equal_bits(view[elements], value)
            if differ.any():
                text = "several threads write different values in one instruction"
                lane = self.batch.everyone if lanes is None else lanes
                self._report("shared-race", text, Granules(site, lane, np.arange(len(elements)), offset), differ)
            # If lanes write the same value, the tag is that of the first one: a warp mostly lets that lane release.
            self.tag_written(width, elements[::-1], tag[::-1], strong=bool(strong))

    def _is_same_store(self, width: int, elements: Array, value: Array) -> Array:
        """Per element: does a store of this value repeat the last store? After an atomic it does not, even if the
        atomic has left this value by chance, since the atomic gives another result after the store than before it."""
        same = equal_bits(self.views[width][elements], value)
        return same & (self._is_plain(elements, width) | self.are_flags(elements, width)) if self.strong_rows else same

    def write_pending(self, lanes: Array | None, elements: Array, width: int, site: int, offset: Array) -> LateCopy:
        """Start a copy by threads to the elements that ``locate`` returned last. They are poison until it lands."""
        copy = LateCopy(*self.extent, lanes, elements, width)
        if self.hazards:
            if self._extent_may_race(lanes) and self._elements_may_race(elements, width):
                self._check_write(lanes, width, elements, site, offset)
            if self.recorded is not None:
                self.recorded.record_write(elements, width // self.granule, site)
        self.late_copies.copies.append(copy)
        if not self.defers:
            self.write_deferred_copies(copy.low, copy.high)
        return copy

    def write_deferred_copies(self, low: int = 0, high: int = 1 << 32) -> None:
        """Write the deferred poison and tags of copies under way to bytes [low, high). This must be called before an
        access touches these bytes, and before such a copy is split by lane."""
        for copy in self.late_copies.take(low, high):
            if self.hazards:
                actor = self.actor if copy.lanes is None else self.actor[copy.lanes]
                self.tag_written(copy.width, copy.elements, actor | self.TAG(self.IN_FLIGHT))
                self.recent.add(copy.low, copy.high, NEVER_OLD)
            self.views[copy.width][copy.elements] = self.poison[copy.width]

    def land_own(self, copy: LateCopy, data: Array) -> None:
        """Write the data of a thread's copy, as if the thread stored it now."""
        self._follow_tick()
        self.late_copies.land(copy)
        self.write_deferred_copies(copy.low, copy.high)
        self.views[copy.width][copy.elements] = data
        if self.hazards:
            self.tag_written(
                copy.width, copy.elements, self.lane_tag if copy.lanes is None else self.lane_tag[copy.lanes]
            )
            self.recent.add(copy.low, copy.high, self.stamp)
        self.launch.version += 1

    # --- atomics and flags ---

    def touch(self, address: Array, width: int, m: Mask, site: int) -> tuple[Array, Array] | None:
        """Check and tag a read-modify-write, which the caller then executes and passes to ``modify``. Returns (lanes,
        element index), None if no lane remains. Atomics do not race with each other."""
        access = self.locate(address, width, m, site)
        if access is None:
            return None
        lanes, elements, offset = access
        everyone = self.batch.everyone if lanes is None else lanes
        if self.hazards:
            self._check_atomic(everyone, elements, width, site, offset)
            self.tag_written(
                width, elements, self.lane_tag if lanes is None else self.lane_tag[lanes], site, strong=True
            )
            self.recent.add(*self.extent, self.stamp)
        return everyone, elements

    def _check_atomic(self, lanes: Array, elements: Array, width: int, site: int, offset: Array) -> None:
        """Report atomics that race with plain accesses."""
        plain = self._is_plain(elements, width)
        if plain.any():
            self._check_read(lanes[plain], self.rows[width][0][elements][plain], site, offset[plain])
        if not self._extent_may_race(lanes):
            return
        # Most elements were last written by an atomic, and no thread has read them since. They need no check.
        read = self.rows[width][1][elements] >= self._fresh_of(lanes)
        todo = plain | any_granule(read)
        # Volatile reads do not race with atomics, so earlier reads count only at elements without volatile ones.
        volatile = self.are_volatile(elements, width)
        for part, after_reads in ((todo & ~volatile, True), (todo & volatile, False)):
            chosen = np.flatnonzero(part)
            if chosen.size:
                strong_before = partial(np.invert, plain[chosen])
                self._check_write(
                    lanes[chosen], width, elements[chosen], site, offset[chosen], strong_before, after_reads
                )

    def _is_plain(self, elements: Array, width: int) -> Array:
        """A mask of the elements that were last written by a plain access, not by an atomic or a write of a flag. Only
        those can race with strong accesses."""
        if not self.strong_rows:
            return np.ones(len(elements), bool)
        return any_granule(self.rows[width][0][elements] != self.strong_rows[width][elements])

    def _poll(
        self, lanes: Array | None, elements: Array, width: int, site: int, offset: Array, strong: int, values: Array
    ) -> Array:
        """Check a strong load where memory holds ``values``. Returns the values that it reads, which may be older."""
        if lanes is None:
            lanes = self.batch.everyone
        plain = self._is_plain(elements, width)
        if plain.any():
            self._check_read(lanes[plain], self.rows[width][0][elements][plain], site, offset[plain])
        return self.read(lanes, offset, strong, site, values)
