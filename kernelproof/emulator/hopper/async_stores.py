"""Executes st.async of the PTX ISA: stores to the shared memory of a cluster, whose completion an mbarrier signals."""

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
    """The destinations of stores, in arrays with one element per store: the lane that stores, the row of the CTA that
    it stores to, the byte offset in the shared memory of that CTA, the byte offset of the mbarrier, and
    (``in_one_cta``) whether the mbarrier lies in the same CTA as the destination."""

    lanes: Array
    rows: Array
    offsets: Array
    bar_offsets: Array
    in_one_cta: Array

    def select(self, chosen: Array) -> Places:
        """The destinations of some lanes: ``chosen`` has their indices, or a bool per lane."""
        return Places(*(column[chosen] for column in self))


class AsyncStores:
    """The asynchronous stores of a batch. Their data lands with the phase of their mbarrier, as that of a bulk copy."""

    def __init__(self, batch: BatchState, peers: Peers, shared: ClusterMemory, mbarriers: MBarriers) -> None:
        self.batch, self.peers, self.shared, self.mbarriers = batch, peers, shared, mbarriers

    def store(self, address: Array, value: Array, width: int, bar_address: Array, m: Mask, site: int) -> None:
        """st.async of ``width`` bytes per lane. ``address``, ``bar_address``: per lane of the batch, the addresses of
        the data and of the mbarrier (see ``hopper.peers``)."""
        active = self.batch.lanes(m)
        # The access need not be remembered until the other CTA exits: the mbarrier's phase tells when it has ended.
        lanes, rows = self.peers.rows(address[active], active, site, remember=False)
        targets, bar = address[lanes], bar_address[lanes]
        offsets, bar_offsets = ((chosen & WITHIN).astype(np.int64) - WINDOW_START for chosen in (targets, bar))
        places = Places(lanes, rows, offsets, bar_offsets, targets >> RANK_SHIFT == bar >> RANK_SHIFT)
        # One number per mbarrier of the batch. Stores that complete on the same mbarrier are made together.
        bars = rows * self.shared.stride + bar_offsets
        for number in np.unique(bars):
            group = places.select(bars == number)
            if not self._store_together(group, value, width, site):
                for i in range(len(group.lanes)):
                    self._store_one(group.select(np.array([i])), value, width, site)

    def _store_together(self, places: Places, value: Array, width: int, site: int) -> bool:
        """Fast path: make all stores that complete on one mbarrier, if no check needs a closer look at one of them;
        otherwise do nothing and return False."""
        lanes, row = places.lanes, int(places.rows[0])
        low, high = int(places.offsets.min()), int(places.offsets.max()) + width
        bar = self.mbarriers.bars.get((row, int(places.bar_offsets[0])))
        if bar is None or not places.in_one_cta.all() or low < 0 or high > self.shared.size:
            return False
        if (places.offsets % width).any() or np.unique(places.offsets).size < len(lanes):
            return False
        # Between two of the stores the phase must not complete, nor the mbarrier (8 bytes) be overwritten.
        if low < bar.offset + 8 and bar.offset < high:
            return False
        if not bar.pending and bar.bytes < len(lanes) * width:
            return False
        elements = self._elements(places, width, low, high)
        if not self.shared.may_follow(elements, lanes, width):
            return False
        self.mbarriers.find(row, bar.offset, lanes, site)
        self._write(elements, value[lanes], width, bar, site)
        return True

    def _store_one(self, places: Places, value: Array, width: int, site: int) -> None:
        """Make the store of one lane with every check; a wrong one is reported."""
        lane, row, offset = int(places.lanes[0]), int(places.rows[0]), int(places.offsets[0])
        if not places.in_one_cta[0]:
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
        elements = self._elements(places, width, offset, offset + width)
        self.shared.check_async_write(elements, lane, row, site, width)
        self._write(elements, value[places.lanes], width, bar, site)

    def _elements(self, places: Places, width: int, low: int, high: int) -> Elements:
        """The destinations as elements of ``width`` bytes, within bytes [low, high) of their CTA."""
        return Elements((places.offsets + places.rows * self.shared.stride) >> SHIFT[width], low, high)

    def _write(self, elements: Elements, data: Array, width: int, bar: MBarrier, site: int) -> None:
        """Begin checked stores of ``data`` to elements of ``width`` bytes, which complete on the mbarrier."""
        self.shared.start_write(elements.indices, bar.column, site, width)
        self.mbarriers.attach_copy(elements.indices, data, width, bar, site)
