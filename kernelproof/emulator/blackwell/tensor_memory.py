"""Models tensor memory (per CTA 128 lanes of 512 columns of 32 bits), and finds accesses to it that are not ordered.

The rules are the canonical patterns of PTX ISA 9.1, tcgen05, "Memory consistency model". An access is ordered after
another one if that one is complete for the accessing thread, and was so before the thread's last
tcgen05.fence::after_thread_sync:

- A tcgen05.mma is complete for threads that have waited for an mbarrier on which its commit has arrived.
- A tcgen05.ld or .st is complete for its own warp after that warp's tcgen05.wait. For other warps it is complete after
  the warp has also executed tcgen05.fence::before_thread_sync and synchronised with them.
- Products of one thread into the same accumulator, with the same shape, need none of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.blackwell.tensor_clocks import TensorClocks
from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.participants import Participant

LANES, COLUMNS = 128, 512
# Lanes form groups of 16, of which every instruction touches all or none.
GROUP_LANES = 16
GROUPS = LANES // GROUP_LANES
LOAD, STORE = 0, 1
UNFENCED = "no tcgen05.fence::after_thread_sync follows the synchronisation that says so"


class Region(NamedTuple):
    """Columns [low, high) in groups of 16 lanes of a row's tensor memory."""

    row: int
    groups: slice
    low: int
    high: int

    @property
    def cells(self) -> tuple[int, slice, slice]:
        """The indices of the region in arrays of shape (rows, groups, columns)."""
        return self.row, self.groups, slice(self.low, self.high)


class Issuer(NamedTuple):
    """The thread that issues a tcgen05.mma: its lane of the batch, its row and warp, and its column of the clocks."""

    lane: int
    row: int
    warp: int
    column: int


class PriorAccesses(NamedTuple):
    """The last earlier accesses to the cells of a region, in arrays with one element per cell: their ticks (0: no
    access), their columns of the clocks, and their instructions. ``kind``: LOAD for reads, STORE for writes."""

    ticks: Array
    columns: Array
    sites: Array
    kind: int


class TensorMemory:
    """The tensor memory of a batch.

    Each cell (a column of 16 lanes) has tags: tick, column of the clocks and instruction of the last write, of the last
    read by a tcgen05.mma, and of the last tcgen05.ld by each warp that may touch it. A tick of 0 means that there was
    no such access. ``forms``: a number for the shape and accumulator of the product that wrote the cell.

    Warp w may touch only the 32 lanes from 32 * (w % 4) on. So of the warps 4 * slot to 4 * slot + 3, exactly one may
    touch a given cell, and it is enough to keep the last load per slot.
    """

    def __init__(self, batch: BatchState, clocks: TensorClocks) -> None:
        self.batch, self.launch, self.clocks = batch, batch.launch, clocks
        self.hazards = batch.launch.options.hazards
        self.slots = -(-batch.warps_per_cta // 4)
        shape = batch.count, GROUPS, COLUMNS
        # The content of cells that nothing has written.
        self.blank = np.uint32(batch.launch.poison * 0x01010101)
        self.data: Array = np.full((batch.count, LANES, COLUMNS), self.blank, np.uint32)
        self.write_ticks, self.read_ticks = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.load_ticks: Array = np.zeros((batch.count, self.slots, GROUPS, COLUMNS), np.int64)
        self.writers, self.readers = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        self.write_sites, self.read_sites = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        self.load_sites: Array = np.zeros(self.load_ticks.shape, np.int32)
        self.forms: Array = np.zeros(shape, np.int32)
        # Per row: the number of accesses, not counting products that repeat the last one; and that last product.
        self.changes: Array = np.zeros(batch.count, np.int64)
        self.last_product: dict[int, tuple[Region, int, int, int]] = {}
        # Shape (row, warp, kind): the tick of the warp's last wait for this kind of access, and the tick of its first
        # such access since then (0: none).
        self.wait_ticks: Array = np.zeros((batch.count, batch.warps_per_cta, 2), np.int64)
        self.pending_ticks: Array = np.zeros_like(self.wait_ticks)

    def clear(self, row: int, low: int, high: int) -> None:
        """Make columns undefined and forget accesses to them, because they have been allocated anew."""
        self.data[row, :, low:high] = self.blank
        for ticks in (self.write_ticks[row], self.read_ticks[row], *self.load_ticks[row]):
            ticks[:, low:high] = 0
        self.changes[row] += 1

    # --- waits and fences ---

    def wait(self, row: int, warp: int, kind: int) -> None:
        """tcgen05.wait::ld or ::st by a warp; the caller has advanced the tick."""
        self.wait_ticks[row, warp, kind] = self.launch.tick
        self.pending_ticks[row, warp, kind] = 0

    def completed_before(self, row: int, warp: int) -> int:
        """The tick of a warp's first access that is still pending, so all earlier ones are complete; the present tick
        if none is pending. The caller has advanced the tick."""
        pending = self.pending_ticks[row, warp]
        return int(min(pending[pending > 0], default=self.launch.tick))

    # --- accesses of warps ---

    def load(self, region: Region, warp: int, site: int) -> None:
        """Check and tag a tcgen05.ld of a warp."""
        if not self.hazards:
            return
        cells, row = region.cells, region.row
        self._check_written(region, self._lane(row, warp), site)
        self._check_access(region, self._writes(region), warp, site, "reads", "wrote")
        slot = row, warp // 4, *cells[1:]
        self.load_ticks[slot], self.load_sites[slot] = self.launch.tick, site
        self._begin(row, warp, LOAD)

    def store(self, region: Region, warp: int, site: int) -> None:
        """Check and tag a tcgen05.st of a warp."""
        if not self.hazards:
            return
        self._check_access(region, self._writes(region), warp, site, "overwrites", "wrote")
        for prior in self._reads(region):
            self._check_access(region, prior, warp, site, "overwrites", "reads")
        self._tag_write(region, self.clocks.access_column(region.row, warp), 0, site)
        self._begin(region.row, warp, STORE)

    def _begin(self, row: int, warp: int, kind: int) -> None:
        """Note that a warp's access is pending until its next wait."""
        self.changes[row] += 1
        if not self.pending_ticks[row, warp, kind]:
            self.pending_ticks[row, warp, kind] = self.launch.tick

    def _lane(self, row: int, warp: int) -> int:
        """The first lane of a warp in the batch."""
        return row * self.batch.width + 32 * warp

    # --- accesses of products ---

    def product_write(self, region: Region, issuer: Issuer, form: int, accumulates: bool, site: int) -> None:
        """Check and tag the write of a tcgen05.mma to its accumulator. ``form``: see ``forms``. ``accumulates``: the
        products are added to the accumulator's content."""
        if not self.hazards:
            return
        row = region.row
        key = region, issuer.column, form, int(self.changes[row])
        # The usual case: the same product again, with no other access since.
        if self.last_product.get(row) == key:
            self.write_ticks[region.cells] = self.launch.tick
            return
        if accumulates:
            self._check_written(region, issuer.lane, site)
        writes = self._writes(region)
        same = (writes.columns == issuer.column) & (self.forms[region.cells] == form)
        self._check_product(region, writes._replace(ticks=np.where(same, 0, writes.ticks)), issuer, site, "overwrites")
        for prior in self._reads(region):
            self._check_product(region, prior, issuer, site, "overwrites")
        self._tag_write(region, issuer.column, form, site)
        self.changes[row] += 1
        self.last_product[row] = region, issuer.column, form, int(self.changes[row])

    def product_read(self, region: Region, issuer: Issuer, site: int) -> None:
        """Check and tag the read of A by a tcgen05.mma."""
        if not self.hazards:
            return
        self._check_written(region, issuer.lane, site)
        self._check_product(region, self._writes(region), issuer, site, "reads")
        cells = region.cells
        self.read_ticks[cells], self.readers[cells] = self.launch.tick, issuer.column
        self.read_sites[cells] = site
        self.changes[region.row] += 1

    def _tag_write(self, region: Region, column: int, form: int, site: int) -> None:
        """Tag the cells of a region with a write at this tick."""
        cells = region.cells
        self.write_ticks[cells], self.writers[cells] = self.launch.tick, column
        self.write_sites[cells], self.forms[cells] = site, form

    # --- checks ---

    def _check_written(self, region: Region, lane: int, site: int) -> None:
        """Report a read of cells that were never written."""
        missing = self.write_ticks[region.cells] == 0
        if missing.any():
            group, column = np.argwhere(missing)[0].tolist()
            first = (region.groups.start + group * (region.groups.step or 1)) * GROUP_LANES
            last = first + GROUP_LANES - 1
            text = f"reads column {region.low + column} of lanes {first} to {last}, which nobody has written"
            self.batch.report_lane("uninitialised-tensor-memory", text, site, lane, doubtful=True)

    def _writes(self, region: Region) -> PriorAccesses:
        """The last writes of a region."""
        cells = region.cells
        return PriorAccesses(self.write_ticks[cells], self.writers[cells], self.write_sites[cells], STORE)

    def _reads(self, region: Region) -> Iterator[PriorAccesses]:
        """The last reads of a region: by tcgen05.mma, and by each of the warps that may touch its lanes."""
        cells, row = region.cells, region.row
        if self.read_ticks[cells].any():
            yield PriorAccesses(self.read_ticks[cells], self.readers[cells], self.read_sites[cells], LOAD)
        groups = np.arange(GROUPS)[region.groups]
        for slot in range(self.slots):
            ticks = self.load_ticks[row, slot][cells[1:]]
            if ticks.any():
                # Warp w may touch lanes 32 * (w % 4) and the next 31, two groups of 16, so slot and group determine it.
                warps = np.minimum(4 * slot + groups // 2, self.batch.warps_per_cta - 1)
                columns = self.clocks.access_column(row, 0) + warps
                sites = self.load_sites[row, slot][cells[1:]]
                yield PriorAccesses(ticks, np.broadcast_to(columns[:, None], ticks.shape), sites, LOAD)

    def _check_access(
        self, region: Region, prior: PriorAccesses, warp: int, site: int, verb: str, earlier: str
    ) -> None:
        """Check an access of a warp against earlier ones. After an access of the same warp, a wait of the warp is
        needed. After other accesses, a fence is needed that follows the synchronisation which orders them. ``verb``,
        ``earlier``: words for the access and for the earlier accesses in reports."""
        clocks, row = self.clocks, region.row
        own = (prior.columns == clocks.access_column(row, warp)) & (prior.ticks > 0)
        lane = self._lane(row, warp)
        if own.any() and (verb, earlier) != ("reads", "reads"):
            bad = own & (prior.ticks >= self.wait_ticks[row, warp, prior.kind])
            if bad.any():
                name = ("ld", "st")[prior.kind]
                why = f"no tcgen05.wait::{name} follows it"
                self._report(region, prior, bad, lane, site, f"{verb} what this warp's tcgen05.{name} {earlier}: {why}")
        self._check(region, prior, ~own, clocks.fence_clocks[row, warp], clocks.ticks[row, warp], lane, site, verb)

    def _check_product(self, region: Region, prior: PriorAccesses, issuer: Issuer, site: int, verb: str) -> None:
        """Check an access of a tcgen05.mma against earlier ones, by the rules of ``_check_access``."""
        clocks = self.clocks
        own = prior.columns == clocks.access_column(issuer.row, issuer.warp)
        if own.any():
            bad = own & (prior.ticks > 0) & (prior.ticks >= self.wait_ticks[issuer.row, issuer.warp, prior.kind])
            if bad.any():
                name = ("ld", "st")[prior.kind]
                text = f"tcgen05.mma {verb} what its warp's tcgen05.{name} touches: no tcgen05.wait::{name} follows it"
                self._report(region, prior, bad, issuer.lane, site, text)
        fenced, present = clocks.fence_clock_of(issuer.lane), clocks.of_lane(issuer.lane)
        self._check(region, prior, ~own, fenced, present, issuer.lane, site, f"tcgen05.mma {verb}")

    def _check(
        self,
        region: Region,
        prior: PriorAccesses,
        foreign: Array,
        fenced: Array,
        present: Array,
        lane: int,
        site: int,
        event: str,
    ) -> None:
        """Report ``foreign`` accesses (bool per cell) that have not ended by ``fenced``, the lane's clock at its last
        fence. ``present``: its clock now. ``event``: the lane's access in words."""
        clocks = self.clocks
        # It is enough that a load has ended; a write must be visible.
        ended = clocks.ended if prior.kind == LOAD else 0
        bad = foreign & (prior.ticks > 0) & (prior.ticks >= fenced[prior.columns + ended])
        if not bad.any():
            return
        first = tuple(np.argwhere(bad)[0])
        column, tick = int(prior.columns[first]), int(prior.ticks[first])
        is_product = bool(clocks.is_product(prior.columns[first]))
        complete, why = self._missing_order(region.row, column, tick, present, ended, is_product, prior.kind)
        name = "a tcgen05.mma" if is_product else ("a tcgen05.ld", "a tcgen05.st")[prior.kind]
        verb = "writes" if prior.kind == STORE else "reads"
        rule = "tcgen05-fence" if complete and prior.kind == LOAD else "tensor-memory-race"
        self._report(region, prior, bad, lane, site, f"{event} what {name} {verb}: {why}", rule)

    def _missing_order(
        self, row: int, column: int, tick: int, present: Array, ended: int, is_product: bool, kind: int
    ) -> tuple[bool, str]:
        """Find what is missing between an earlier access and one that is not ordered after it. Returns whether the
        earlier access has ended and only a fence is missing; and the missing part in words."""
        if tick < present[column + ended]:
            return True, UNFENCED
        if is_product:
            return False, "no wait for an mbarrier on which its tcgen05.commit arrives comes between"
        rank, index = divmod(column - self.clocks.wgmma, self.clocks.groups)
        warp = index - self.clocks.warps
        # The warp's ordinary column tells whether the thread has synchronised with the warp after its wait; then only
        # the fence of tcgen05 is missing.
        plain = rank * self.clocks.warps + warp
        if tick < present[plain + ended] and tick < self.wait_ticks[self._row_of_rank(row, rank), warp, kind]:
            return True, "no tcgen05.fence::before_thread_sync comes before the synchronisation between"
        return False, f"nothing orders it after that one's tcgen05.wait::{('ld', 'st')[kind]}"

    def _row_of_rank(self, row: int, rank: int) -> int:
        """The row of the CTA with a rank in the cluster of CTA ``row``."""
        return row - int(self.batch.rank[row]) + rank

    def _report(
        self,
        region: Region,
        prior: PriorAccesses,
        bad: Array,
        lane: int,
        site: int,
        text: str,
        rule: str = "tensor-memory-race",
    ) -> None:
        """Report the first of the earlier accesses that are ``bad`` (bool per cell)."""
        first = tuple(np.argwhere(bad)[0])
        clocks = self.clocks
        rank, index = divmod(int(prior.columns[first]) - clocks.wgmma, clocks.groups)
        row = self._row_of_rank(region.row, rank)
        other = Participant(
            self.launch.site(int(prior.sites[first])), self.batch.cta_index(row), agent=clocks.agent(index)
        )
        self.batch.report_lane(rule, f"{text} (column {region.low + int(first[1])})", site, lane, other=other)

    def have_ended(self, row: int, low: int, high: int, lane: int) -> bool:
        """Have all accesses to columns [low, high) of a row ended, as far as a lane's clock tells? Accesses of the
        lane's own warp have ended after its wait, and a missing tcgen05 fence does not matter."""
        present, clocks = self.clocks.of_lane(lane), self.clocks
        region = Region(row, slice(0, GROUPS), low, high)
        for prior in (self._writes(region), *self._reads(region)):
            late = (prior.ticks > 0) & (prior.ticks >= present[prior.columns + clocks.ended])
            for column, tick in {(int(c), int(t)) for c, t in zip(prior.columns[late], prior.ticks[late], strict=True)}:
                is_product = bool(clocks.is_product(np.array(column)))
                own = column == clocks.access_column(int(self.batch.row_of[lane]), int(self.batch.warp[lane]))
                if own and tick < self.wait_ticks[row, self.batch.warp[lane], prior.kind]:
                    continue
                if not self._missing_order(row, column, tick, present, clocks.ended, is_product, prior.kind)[0]:
                    return False
        return True
