"""Emulates cp.async (PTX ISA, "cp.async"): copies by threads from device to shared memory.

The hardware may copy at any time between the instruction and its wait. The emulator reads the source when the copy is
issued, and writes the data as late as the waits allow, so that a kernel that reads too early sees poison.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernelproof.emulator.memory.device import DeviceMemory
from kernelproof.emulator.memory.late_copies import LateCopy
from kernelproof.emulator.memory.shared import SharedMemory
from kernelproof.emulator.state.arrays import MOVER, Array, Mask, Scalar
from kernelproof.emulator.state.batch_state import BatchState


@dataclass(slots=True)
class Copy:
    """A cp.async that was issued. ``destination``: where in shared memory it lands. ``data``: what it will write there.

    ``group``: the number of its group, as one number while all lanes agree, else a number per lane; None before it is
    committed.
    """

    destination: LateCopy
    data: Array
    group: int | Array | None = None

    @property
    def lanes(self) -> Array | None:
        """The lanes that issued it (None: all)."""
        return self.destination.lanes

    def part(self, chosen: Array, everyone: Array) -> Copy:
        """The copy restricted to the lanes that the mask ``chosen`` marks (bool per lane of the copy). ``everyone``:
        the numbers of all lanes of the batch."""
        group = self.group if self.group is None or isinstance(self.group, int) else self.group[chosen]
        destination = self.destination
        lanes = (everyone if destination.lanes is None else destination.lanes)[chosen]
        return Copy(
            LateCopy(destination.low, destination.high, lanes, destination.elements[chosen], destination.width),
            self.data[chosen],
            group,
        )


class AsyncCopies:
    """The cp.async of a batch. Groups are counted per lane; ``committed``, the number of groups that were committed, is
    an int while all lanes agree.

    Invariants: ``open_copies`` have no group yet. Those in ``committed_copies`` have a group below their lanes'
    ``committed`` and have not landed, so their destinations hold poison. A copy lands when a wait of its lane covers
    its group, never earlier.
    """

    def __init__(self, batch: BatchState, device: DeviceMemory, shared: SharedMemory) -> None:
        self.batch, self.device, self.shared = batch, device, shared
        self.counters = batch.launch.counters
        self.committed: int | Array = 0
        self.open_copies: list[Copy] = []
        self.committed_copies: list[Copy] = []

    # --- issue ---

    def issue(
        self, destination: Array, source: Array, width: int, bytes_read: Scalar | None, m: Mask, site: int
    ) -> None:
        """cp.async of ``width`` bytes per lane. The first ``bytes_read`` (None: all) come from global memory, the rest
        is zero."""
        if self.counters is not None:
            self.counters.cp_async += self.batch.size if m is None else int(m.sum())
        if bytes_read is None:
            data = self.device.load(source, width, m, site)
        else:
            data = self._read_part(source, width, bytes_read, m, site)
        access = self.shared.locate(destination, width, m, site)
        if access is None:
            return
        lanes, elements, offset = access
        if lanes is not None:
            data = data[lanes]
        if self.counters is not None:
            self.counters.shared("cp.async", destination, width, m)
        self.open_copies.append(Copy(self.shared.write_pending(lanes, elements, width, site, offset), data))

    def _read_part(self, source: Array, width: int, bytes_read: Scalar, m: Mask, site: int) -> Array:
        """The first bytes of every lane from global memory, with zeros after them."""
        size = self.batch.size
        count = np.full(size, bytes_read, np.int64) if isinstance(bytes_read, int) else bytes_read.astype(np.int64)
        active = np.ones(size, bool) if m is None else m
        if (count[active] > width).any():
            bad = np.flatnonzero(active & (count > width))
            self.batch.report_lanes("global-out-of-bounds", f"src-size larger than {width}", site, bad)
        full = active & (count >= width)
        if full.all():
            return self.device.load(source, width, None, site)
        raw = np.zeros((size, width), np.uint8)
        if full.any():
            data = self.device.load(source, width, full, site)
            raw[full] = np.ascontiguousarray(data).view(np.uint8).reshape(-1, width)[full]
        for nbytes in np.unique(count[active & (count > 0) & (count < width)]):
            self._read_head(raw, source, width, int(nbytes), active & (count == nbytes), site)
        return raw.reshape(-1).view(MOVER[width])

    def _read_head(self, raw: Array, source: Array, width: int, nbytes: int, mask: Array, site: int) -> None:
        """Read ``nbytes`` for each lane in the mask. The address must be aligned for the whole copy, but only the bytes
        that are read must be valid."""
        misaligned = mask & ((source & np.uint64(width - 1)) != 0)
        if misaligned.any():
            wrong = np.flatnonzero(misaligned)
            self.batch.report_lanes("global-misaligned", f"{width}-byte copy", site, wrong, int(source[wrong[0]]))
        # ``step``, the lowest set bit of the size, is the width of the widest access that is aligned in every part.
        step = nbytes & -nbytes
        for k in range(0, nbytes, step):
            data = self.device.load(source + np.uint64(k), step, mask & ~misaligned, site)
            raw[mask, k : k + step] = np.ascontiguousarray(data).view(np.uint8).reshape(-1, step)[mask]

    # --- groups ---

    def commit(self, m: Mask) -> None:
        """cp.async.commit_group by the lanes of ``m``: their open copies become a group."""
        if isinstance(self.committed, int) and (m is None or self.batch.is_everyone(m)):
            for copy in self.open_copies:
                copy.group = self.committed
            self.committed_copies += self.open_copies
            self.open_copies = []
            self.committed += 1
            return
        # Only some lanes commit, or lanes have committed different numbers of groups before. So each open copy is split
        # by lane: the part of the lanes of ``m`` gets a group number per lane, and the rest stays open.
        self.shared.write_deferred_copies()
        committed = self._per_lane()
        mask = np.ones(self.batch.size, bool) if m is None else m
        remaining = []
        for copy in self.open_copies:
            chosen = mask[self._lanes(copy)]
            if chosen.any():
                part = copy.part(chosen, self.batch.everyone)
                part.group = committed[self._lanes(part)]
                self.committed_copies.append(part)
            if not chosen.all():
                remaining.append(copy.part(~chosen, self.batch.everyone))
        self.open_copies = remaining
        self.committed = np.where(mask, committed + 1, committed)

    def _lanes(self, copy: Copy) -> Array:
        """The lanes that issued a copy."""
        return self.batch.everyone if copy.lanes is None else copy.lanes

    def _per_lane(self) -> Array:
        """``committed`` as an array, one number per lane."""
        if isinstance(self.committed, int):
            return np.full(self.batch.size, self.committed, np.int64)
        return self.committed

    def wait(self, pending: int, m: Mask) -> None:
        """cp.async.wait_group: all but the ``pending`` newest groups of the lanes in ``m`` land. Later accesses of
        these lanes see the data. Other threads need a barrier in addition."""
        all_lanes_agree = isinstance(self.committed, int) and (m is None or self.batch.is_everyone(m))
        if not all_lanes_agree:
            self.shared.write_deferred_copies()
        remaining: list[Copy] = []
        for copy in self.committed_copies:
            if all_lanes_agree and isinstance(self.committed, int) and isinstance(copy.group, int):
                if copy.group < self.committed - pending:
                    self._land(copy)
                else:
                    remaining.append(copy)
                continue
            lanes = self._lanes(copy)
            ready: Array = (self._per_lane()[lanes] - pending) > copy.group
            if m is not None:
                ready &= m[lanes]
            if ready.any():
                self._land(copy if ready.all() else copy.part(ready, self.batch.everyone))
            if not ready.all():
                remaining.append(copy.part(~ready, self.batch.everyone) if ready.any() else copy)
        self.committed_copies = remaining

    def wait_all(self, m: Mask) -> None:
        """cp.async.wait_all, which also waits for copies that were never committed."""
        self.commit(m)
        self.wait(0, m)

    def take(self, lanes: Array) -> list[Copy]:
        """Remove and return the copies of these lanes that have not landed, for an mbarrier that tracks them from now
        on (cp.async.mbarrier.arrive)."""
        self.shared.write_deferred_copies()
        out: list[Copy] = []
        for copies in (self.open_copies, self.committed_copies):
            remaining = []
            for copy in copies:
                chosen = np.isin(self._lanes(copy), lanes)
                if chosen.any():
                    out.append(copy.part(chosen, self.batch.everyone))
                if not chosen.all():
                    remaining.append(copy.part(~chosen, self.batch.everyone))
            copies[:] = remaining
        return out

    def drop_exited(self, exited: Array) -> None:
        """Drop the copies of lanes that have exited (bool per lane). They never land, since nobody waits for them."""
        if self.open_copies or self.committed_copies:
            self.take(np.flatnonzero(exited))

    def _land(self, copy: Copy) -> None:
        """Write a copy's data to its destination."""
        self.shared.land_own(copy.destination, copy.data)
