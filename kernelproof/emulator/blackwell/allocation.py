"""Models the allocation of tensor memory: tcgen05.alloc, .dealloc and .relinquish_alloc_permit of the PTX ISA."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernelproof.emulator.blackwell.tensor_memory import COLUMNS, TensorMemory
from kernelproof.emulator.hopper.cluster_memory import ClusterMemory
from kernelproof.emulator.machine.scheduler import Scheduler, Step
from kernelproof.emulator.state.arrays import Array, Mask, distinct
from kernelproof.emulator.state.batch_state import BatchState

MIN_COLUMNS = 32
SIZES = (32, 64, 128, 256, 512)  # the numbers of columns that an alloc may request
RULE = "tensor-memory-allocation"


@dataclass(slots=True)
class ColumnBlock:
    """The columns that one tcgen05.alloc has returned: their number, and the instruction."""

    columns: int
    site: int


@dataclass(slots=True, eq=False)
class AllocationRequest:
    """A warp that waits in tcgen05.alloc for free columns and, with cta_group::2, for the alloc of its peer CTA.

    ``row``: the CTA's row of the batch. ``address``: per lane of the batch, where in shared memory the first column is
    stored. ``pair``: the instruction has cta_group::2. ``free``: the number of free columns at the last attempt.
    """

    row: int
    lanes: Array
    address: Array
    columns: int
    pair: bool
    site: int
    free: int = 0

    def describe(self, row: int) -> str:  # noqa: ARG002
        """What the warp waits for, in words."""
        if self.pair:
            return f"tcgen05.alloc.cta_group::2 of {self.columns} columns, which the CTA's peer must execute, too"
        return f"tcgen05.alloc of {self.columns} columns of tensor memory, of which {self.free} are free"


class Allocation:
    """The allocated columns of every CTA of a batch; a CTA's number in the batch is its row.

    ``owned``, bool, shape (rows, COLUMNS): which columns are allocated. ``blocks``: per row, first column -> block.
    ``group``: the cta_group of the tcgen05 instructions so far, 0 before the first one.
    """

    def __init__(self, batch: BatchState, scheduler: Scheduler, shared: ClusterMemory, memory: TensorMemory) -> None:
        self.batch, self.scheduler, self.shared, self.memory = batch, scheduler, shared, memory
        self.owned: Array = np.zeros((batch.count, COLUMNS), bool)
        # Blocks of a row that its peer has deallocated, which frees them in both CTAs: (row, first column) -> columns.
        self.withdrawn_blocks: dict[tuple[int, int], int] = {}
        self.blocks: list[dict[int, ColumnBlock]] = [{} for _ in range(batch.count)]
        self.relinquished: Array = np.zeros(batch.count, bool)
        # Per row: the number of columns of the last alloc, which the next one may not exceed.
        self.last_sizes: Array = np.full(batch.count, COLUMNS, np.int64)
        self.group = 0
        self.requests: list[AllocationRequest] = []

    def use_group(self, group: int, lanes: Array, site: int) -> None:
        """Report tcgen05 instructions with another cta_group than the kernel's earlier ones, and cta_group::2 without
        pairs of CTAs."""
        if self.group not in (0, group):
            text = f"cta_group::{group} in a kernel that has executed tcgen05 instructions of cta_group::{self.group}"
            self.batch.report_lanes("tcgen05-group", text, site, lanes)
        elif group == 2 and self.batch.cluster_size % 2:
            text = f"cta_group::2 in a cluster of {self.batch.cluster_size}: its CTAs are no pairs"
            self.batch.report_lanes("tcgen05-group", text, site, lanes)
        self.group = self.group or group

    def peer(self, row: int) -> int:
        """The row of the other CTA of a row's pair; ``row`` itself if the cluster ends with it."""
        other = int(self.batch.rank[row]) ^ 1
        return row if other >= self.batch.cluster_size else row - int(self.batch.rank[row]) + other

    def _warps(self, group: int, m: Mask, site: int) -> list[tuple[int, Array]]:
        """Pairs (row, lanes), one for every warp that executes an instruction."""
        lanes = self.batch.lanes(m)
        if not lanes.size:
            return []
        self.batch.require_whole_warps(m, site)
        self.use_group(group, lanes, site)
        warps = lanes >> 5
        return [(int(w) // self.batch.warps_per_cta, lanes[warps == w]) for w in distinct(warps)]

    # --- alloc ---

    def alloc(self, group: int, address: Array, columns: Array, m: Mask, resume: int, site: int) -> Step:
        """tcgen05.alloc: the warp sleeps until columns are free and, for cta_group::2, until the peer executes it,
        too."""
        asleep = np.zeros(self.batch.size, bool)
        for row, lanes in self._warps(group, m, site):
            count = self._checked_count(row, columns, lanes, site)
            request = AllocationRequest(row, lanes, address, count, group == 2, site)
            asleep[lanes] = True
            self.requests.append(request)
            self.scheduler.sleep(request, self._mask(lanes), resume, site)
        self._serve()
        awake = self.batch.running(m) & ~asleep
        return self.scheduler.next(resume, awake) if awake.any() else self.scheduler.pick()

    def _mask(self, lanes: Array) -> Array:
        """The mask of some lanes, shape (lanes of the batch,)."""
        mask = np.zeros(self.batch.size, bool)
        mask[lanes] = True
        return mask

    def _checked_count(self, row: int, columns: Array, lanes: Array, site: int) -> int:
        """The number of columns that a warp requests; an illegal number is reported and replaced by the next power of
        two from MIN_COLUMNS to COLUMNS."""
        count = int(columns[lanes[0]])
        texts = []
        if (columns[lanes] != count).any():
            texts.append("the lanes of a warp allocate different numbers of columns")
        if count not in SIZES:
            texts.append(f"tcgen05.alloc of {count} columns: a power of two from {MIN_COLUMNS} to {COLUMNS} is needed")
            count = min(max(MIN_COLUMNS, 1 << (max(count, 1) - 1).bit_length()), COLUMNS)
        elif count > self.last_sizes[row]:
            texts.append(f"tcgen05.alloc of {count} columns after one of {self.last_sizes[row]}: sizes may not grow")
        if self.relinquished[row]:
            texts.append("tcgen05.alloc after tcgen05.relinquish_alloc_permit of this CTA")
        for text in texts:
            self.batch.report_lanes(RULE, text, site, lanes)
        self.last_sizes[row] = count
        return count

    def _serve(self) -> None:
        """Grant the requests whose columns are free and, for pairs, whose peer has made its request, too."""
        for request in list(self.requests):
            if request not in self.requests:
                continue
            row = request.row
            partners = [request]
            if request.pair and self.peer(row) != row:
                peer = next((r for r in self.requests if r.pair and r.row == self.peer(row)), None)
                if peer is None:
                    continue
                partners.append(peer)
            places = [self._find(partner) for partner in partners]
            if min(places) < 0:
                continue
            for partner, column in zip(partners, places, strict=True):
                self._grant(partner, column)

    def _find(self, request: AllocationRequest) -> int:
        """The first column of a free block of the size requested, -1 if there is none."""
        owned = self.owned[request.row]
        request.free = int((~owned).sum())
        # Blocks are aligned to their size.
        starts = range(0, COLUMNS, request.columns)
        return next((column for column in starts if not owned[column : column + request.columns].any()), -1)

    def _grant(self, request: AllocationRequest, column: int) -> None:
        """Grant a request: store the first column in shared memory and wake the warp."""
        row, lanes = request.row, request.lanes
        self.owned[row, column : column + request.columns] = True
        self.blocks[row][column] = ColumnBlock(request.columns, request.site)
        self.memory.clear(row, column, column + request.columns)
        self.requests.remove(request)
        value = np.full(self.batch.size, column, np.uint32)
        self.shared.store(request.address, value, 4, self._mask(lanes[:1]), request.site)
        self.scheduler.release(request, self._mask(lanes))

    # --- dealloc ---

    def dealloc(self, group: int, address: Array, columns: Array, m: Mask, site: int) -> None:
        """tcgen05.dealloc. Columns that are not exactly the block of an alloc, or whose accesses have not ended, are
        reported."""
        for row, lanes in self._warps(group, m, site):
            column, count = int(address[lanes[0]]), int(columns[lanes[0]])
            block = self.blocks[row].get(column)
            if block is None or block.columns != count:
                text = f"tcgen05.dealloc of {count} columns at {column:#x}: "
                text += "no alloc gave that address" if block is None else f"its alloc gave {block.columns}"
                self.batch.report_lanes(RULE, text, site, lanes)
                if block is None:
                    continue
            elif self.memory.hazards:
                self._check_ended(group, row, column, count, lanes, site)
            self.owned[row, column : column + block.columns] = False
            del self.blocks[row][column]
            self.withdrawn_blocks.pop((row, column), None)
            if group == 2 and column in self.blocks[self.peer(row)]:
                self.withdrawn_blocks[self.peer(row), column] = block.columns
        self._serve()

    def _check_ended(self, group: int, row: int, column: int, count: int, lanes: Array, site: int) -> None:
        """Report columns that are deallocated although the order of the program does not guarantee that all accesses to
        them have ended. With cta_group::2, the columns of both CTAs of the pair are checked."""
        rows = {self.peer(row): "columns of the CTA's peer"} if group == 2 else {}
        rows[row] = "columns"
        for checked_row, name in rows.items():
            if not self.memory.have_ended(checked_row, column, column + count, int(lanes[0])):
                text = f"tcgen05.dealloc of {name} that may still be in use: nothing orders it after their accesses"
                self.batch.report_lanes("tensor-memory-race", text, site, lanes)

    def check_access(self, row: int, low: int, high: int, lane: int, site: int) -> None:
        """Report an access to columns that the peer has deallocated, because nothing orders the two. (An access that
        precedes the dealloc in this execution is reported by ``_check_ended``.)"""
        if any(
            row == owner and low < column + count and column < high
            for (owner, column), count in self.withdrawn_blocks.items()
        ):
            text = f"columns {low} to {high - 1} of tensor memory, which tcgen05.dealloc of the CTA's peer gives back: "
            text += "nothing orders it after this access"
            self.batch.report_lane("tensor-memory-race", text, site, lane)

    def relinquish(self, group: int, m: Mask, site: int) -> None:
        """tcgen05.relinquish_alloc_permit: the CTA must not allocate from now on."""
        for row, _ in self._warps(group, m, site):
            self.relinquished[row] = True

    def exited(self, row: int) -> None:
        """Report the columns that a CTA has not deallocated before it ends."""
        for column, block in self.blocks[row].items():
            text = f"the CTA exits without tcgen05.dealloc of {block.columns} columns at {column:#x}"
            self.batch.report(RULE, text, block.site, row, ())
