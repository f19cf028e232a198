"""Models clusterlaunchcontrol of the PTX ISA: a running cluster cancels a cluster that has not started, to do its work.

A response has four words and is opaque to programs. Machine code reads the first three: the x of the first CTA of the
cancelled cluster; its y and z, 16 bits each; and in bit 0 whether a cluster was cancelled. The emulator marks the
fourth word as that of a response.

Hardware has been seen to answer that no cluster is pending although many are (QuACK, notes on cluster launch control,
July 2026). So in adverse order every third request of a launch gets that answer, and the pending clusters start later.
"""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.hopper.async_reads import Elements
from kernelproof.emulator.hopper.cluster_memory import ClusterMemory
from kernelproof.emulator.hopper.mbarrier import MBarriers
from kernelproof.emulator.hopper.peers import WITHIN, Peers
from kernelproof.emulator.memory.shared import WINDOW_START
from kernelproof.emulator.state.arrays import MOVER, Array, Mask
from kernelproof.emulator.state.batch_state import BatchState

# The fourth word of a response: a cluster was cancelled, or none. Its upper bytes spell "CLC".
CANCELLED, NOT_CANCELLED = 0x434C4301, 0x434C4300
RULE = "cluster-launch-control"
NBYTES = 16  # of a response


class ClusterLaunches:
    """The requests of a batch. ``refused_clusters``: clusters (by their first rows) that have read a response without a
    cancelled cluster; another request of such a cluster is undefined."""

    def __init__(self, batch: BatchState, peers: Peers, shared: ClusterMemory, mbarriers: MBarriers) -> None:
        self.batch, self.launch = batch, batch.launch
        self.peers, self.shared, self.mbarriers = peers, shared, mbarriers
        self.refused_clusters: set[int] = set()

    def _first_row(self, row: int) -> int:
        """The first row of a row's cluster."""
        return row - int(self.batch.rank[row])

    # --- requests ---

    def try_cancel(self, address: Array, bar: Array, multicast: bool, m: Mask, site: int) -> None:
        """clusterlaunchcontrol.try_cancel.async. ``address``, ``bar``: per lane, the shared memory addresses of the
        response and of the mbarrier. ``multicast``: the response goes to all CTAs of the cluster."""
        for lane in self.batch.lanes(m).tolist():
            row = int(self.batch.row_of[lane])
            offset, bar_offset = ((int(each[lane]) & WITHIN) - WINDOW_START for each in (address, bar))
            if (offset + WINDOW_START) % NBYTES:
                text = f"a response at shared offset {offset}, which is no multiple of {NBYTES}"
                self.batch.report_lane("shared-misaligned", text, site, lane, offset)
                continue
            if self._first_row(row) in self.refused_clusters:
                text = "a request after one whose response says that nothing was cancelled"
                self.batch.report_lane(RULE, text, site, lane)
            rows = [row]
            if multicast:
                rows = [self._first_row(row) + rank for rank in range(self.batch.cluster_size)]
                self._check_alive(rows, lane, site)
            response = self._response()
            for target in rows:
                self._respond(target, offset, bar_offset, response, lane, site)

    def _check_alive(self, rows: list[int], lane: int, site: int) -> None:
        """Report a multicast request in a cluster of which a CTA has exited."""
        alive = self.batch.alive.reshape(-1, self.batch.width)[rows].any(axis=1)
        if not alive.all():
            text = "a request for all CTAs of the cluster, although one of them has exited"
            self.batch.report_lane(RULE, text, site, lane)

    def _response(self) -> Array:
        """Cancel a cluster if one has not started; returns the 16 bytes of the response."""
        queue = self.launch.queue
        queue.requests += 1
        spurious = self.launch.options.adverse and queue.requests % 3 == 0
        first = None if spurious else queue.cancel()
        self.launch.version += 1
        words = (0, 0, 0, NOT_CANCELLED)
        if first is not None:
            x, y, z = self.launch.cta_index(first)
            words = (x, y | z << 16, 1, CANCELLED)
        return np.array(words, np.uint32).view(MOVER[NBYTES])

    def _respond(self, row: int, offset: int, bar_offset: int, response: Array, lane: int, site: int) -> None:
        """Send a response to one CTA as an asynchronous write, which completes on the mbarrier."""
        lanes = np.array([lane])
        if row != self.batch.row_of[lane] and self.launch.options.hazards:
            self.peers.visit(row, lanes, site, remember=False)
        bar = self.mbarriers.find(row, bar_offset, lanes, site, asynchronous=True)
        if bar is not None and self.shared.fits(offset, offset + NBYTES, lane, site):
            target_elements = Elements(self.shared.chunks(row, np.array([offset])), offset, offset + NBYTES)
            if self.launch.options.hazards:
                self.shared.check_reads_fenced(target_elements, lane, row, site, "a response replaces")
            self.mbarriers.start_copy(target_elements, response, NBYTES, bar, lane, row, site)

    # --- responses ---

    def _words(self, response: Array) -> Array:
        """Responses, one of 16 bytes per lane, as words (uint32), shape (lanes, 4)."""
        return np.ascontiguousarray(response).view(np.uint32).reshape(-1, 4)

    def is_canceled(self, response: Array, m: Mask) -> Array:
        """clusterlaunchcontrol.query_cancel.is_canceled: per lane, does the response name a cancelled cluster?"""
        state = self._words(response)[:, 3]
        lanes = self.batch.lanes(m)
        for row in np.unique(self.batch.row_of[lanes[state[lanes] == NOT_CANCELLED]]).tolist():
            self.refused_clusters.add(self._first_row(row))
        return np.asarray(state == CANCELLED)

    def first_ctaid(self, response: Array, axis: int, m: Mask, site: int) -> Array:
        """clusterlaunchcontrol.query_cancel.get_first_ctaid: per lane, the index along ``axis`` (0, 1 or 2) of the
        cancelled cluster's first CTA. If nothing was cancelled, this is reported, and the result is unspecified."""
        words = self._words(response)
        lanes = self.batch.lanes(m)
        if (undefined := lanes[words[lanes, 3] != CANCELLED]).size:
            text = "reads the first CTA of a response that says that nothing was cancelled: it is undefined"
            self.batch.report_lane(RULE, text, site, int(undefined[0]))
        number = words[:, 1] >> 16 * (axis - 1) & 0xFFFF if axis else words[:, 0]
        return np.where(words[:, 3] == CANCELLED, number, self.batch.unspecified(4))
