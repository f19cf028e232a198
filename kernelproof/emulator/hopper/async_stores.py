"""Stores to the shared memory of a cluster that an mbarrier completes (PTX ISA, "st.async")."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernelproof.emulator.hopper.async_reads import Elements
from kernelproof.emulator.hopper.cluster_memory import ClusterMemory
from kernelproof.emulator.hopper.mbarrier import MBarrier, MBarriers
from kernelproof.emulator.hopper.peers import RANK_SHIFT, WITHIN, Peers
from kernelproof.emulator.memory.shared import WINDOW_START
from kernelproof.emulator.state.arrays import SHIFT, Array, Mask
from kernelproof.emulator.state.batch_state import BatchState


class Places(NamedTuple):
    """Where lanes store: per lane, the row of the CTA, the offset in its shared memory, the offset of the mbarrier, and
    whether the mbarrier lies in the same CTA."""

    lanes: Array
    rows: Array
    offsets: Array
    bar_offsets: Array
    together: Array

    def at(self, chosen: Array) -> Places:
        return Places(*(column[chosen] for column in self))


class AsyncStores:
    """The data of a store lands with the phase of its mbarrier, as that of a bulk copy does."""

    def __init__(self, batch: BatchState, peers: Peers, shared: ClusterMemory, mbarriers: MBarriers) -> None:
        self.batch, self.peers, self.shared, self.mbarriers = batch, peers, shared, mbarriers

    def store(self, address: Array, value: Array, width: int, bar_address: Array, m: Mask, site: int) -> None:
        """st.async of ``width`` bytes per lane."""
        everyone = self.batch.lanes(m)
        # No cluster lifetime is remembered: the mbarrier's phase says that the data has arrived.
        lanes, rows = self.peers.rows(address[everyone], everyone, site, remember=False)
        to, bar = address[lanes], bar_address[lanes]
        offsets, bar_offsets = ((chosen & WITHIN).astype(np.int64) - WINDOW_START for chosen in (to, bar))
        places = Places(lanes, rows, offsets, bar_offsets, to >> RANK_SHIFT == bar >> RANK_SHIFT)
        bars = rows * self.shared.stride + bar_offsets
        for number in np.unique(bars):
            group = places.at(bars == number)
            if not self._store_at_once(group, value, width, site):
                for i in range(len(group.lanes)):
                    self._store_one(group.at(np.array([i])), value, width, site)

    def _store_at_once(self, places: Places, value: Array, width: int, site: int) -> bool:
        """Fast path: make all stores that complete on one mbarrier, if no check needs a closer look at one of them;
        otherwise do nothing and return False."""
        lanes, row = places.lanes, int(places.rows[0])
        low, high = int(places.offsets.min()), int(places.offsets.max()) + width
        bar = self.mbarriers.bars.get((row, int(places.bar_offsets[0])))
        if bar is None or not places.together.all() or low < 0 or high > self.shared.size:
            return False
        if (places.offsets % width).any() or np.unique(places.offsets).size < len(lanes):
            return False
        # Between two of the stores the phase must not complete, nor the mbarrier be overwritten.
        if low < bar.offset + 8 and bar.offset < high:
            return False
        if not bar.pending and bar.bytes < len(lanes) * width:
            return False
        to = self._elements(places, width, low, high)
        if not self.shared.may_follow(to, lanes, width):
            return False
        self.mbarriers.find(row, bar.offset, lanes, site)
        self._write(to, value[lanes], width, bar, site)
        return True

    def _store_one(self, places: Places, value: Array, width: int, site: int) -> None:
        lane, row, offset = int(places.lanes[0]), int(places.rows[0]), int(places.offsets[0])
        if not places.together[0]:
            text = "the mbarrier lies outside of the CTA that the store goes to"
            self.batch.report_lane("cluster", text, site, lane)
            return
        bar = self.mbarriers.find(row, int(places.bar_offsets[0]), places.lanes, site)
        if bar is None or not self.shared.fits(offset, offset + width, lane, site):
            return
        if offset % width:
            text = f"st.async of {width} bytes to shared offset {offset}, which is no multiple of {width}"
            self.batch.report_lane("shared-misaligned", text, site, lane)
            return
        to = self._elements(places, width, offset, offset + width)
        self.shared.check_async_write(to, lane, row, site, width)
        self._write(to, value[places.lanes], width, bar, site)

    def _elements(self, places: Places, width: int, low: int, high: int) -> Elements:
        return Elements((places.offsets + places.rows * self.shared.stride) >> SHIFT[width], low, high)

    def _write(self, to: Elements, data: Array, width: int, bar: MBarrier, site: int) -> None:
        self.shared.start_write(to.at, bar.column, site, width)
        self.mbarriers.take_off(to.at, data, width, bar, site)
