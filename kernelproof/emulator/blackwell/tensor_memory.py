"""Models tensor memory (per CTA 128 lanes of 512 columns of 32 bits), and finds accesses to it that are not ordered.

The rules are the canonical patterns of PTX ISA 9.1, tcgen05, "Memory consistency model". An access is ordered after
another one if that one is complete for the accessing thread, and was so before the thread's last
tcgen05.fence::after_thread_sync:

- A tcgen05.mma is complete for threads that have waited for an mbarrier on which its commit has arrived.
- A tcgen05.ld or .st is complete for its own warp after that warp's tcgen05.wait. For other warps it is complete after
  the warp has also executed tcgen05.fence::before_thread_sync and synchronised with them.
- Products of one thread into the same accumulator, with the same shape, need none of this.

In this file a *lane* and a *column* are places in tensor memory, and a *row* is a CTA's number in the batch. A *thread*
is a lane of the batch. An *agent* is a column of the vector clocks (``TensorClocks``): it says whose access it was, a
warp's tcgen05.mma or its tcgen05.ld and .st.
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
UNFENCED = (
    "the access has ended, but no tcgen05.fence::after_thread_sync follows the synchronisation that tells this thread"
)


class Region(NamedTuple):
    """Columns [low, high) of some groups of 16 lanes, in the tensor memory of one CTA. ``row``: the CTA's number in the
    batch."""

    row: int
    groups: slice
    low: int
    high: int

    @property
    def cells(self) -> tuple[int, slice, slice]:
        """The indices of the region in arrays of shape (rows, groups, columns)."""
        return self.row, self.groups, slice(self.low, self.high)


class Issuer(NamedTuple):
    """The thread that issues a tcgen05.mma: its number in the batch, its CTA's row, its warp in the CTA, and the agent
    of its products in the clocks."""

    thread: int
    row: int
    warp: int
    agent: int


class PriorAccesses(NamedTuple):
    """The last earlier accesses to the cells of a region, in arrays with one element per cell: their ticks (0: no
    access), their agents, and their instructions. ``kind``: LOAD for reads, STORE for writes."""

    ticks: Array
    agents: Array
    sites: Array
    kind: int


class TensorMemory:
    """The tensor memory of a batch.

    Each cell (a column of 16 lanes) has tags: tick, agent and instruction of the last write, of the last read by a
    tcgen05.mma, and of the last tcgen05.ld by each warp that may touch it. A tick of 0 means that there was no such
    access. ``forms``: a number for the shape and accumulator of the product that wrote the cell.

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
        self._check_written(region, self._first_thread(row, warp), site)
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

    def _first_thread(self, row: int, warp: int) -> int:
        """The number in the batch of a warp's first thread."""
        return row * self.batch.width + 32 * warp

    # --- accesses of products ---

    def product_write(self, region: Region, issuer: Issuer, form: int, accumulates: bool, site: int) -> None:
        """Check and tag the write of a tcgen05.mma to its accumulator. ``form``: see ``forms``. ``accumulates``: the
        products are added to the accumulator's content."""
        if not self.hazards:
            return
        row = region.row
        key = region, issuer.agent, form, int(self.changes[row])
        # The usual case: the same product again, with no other access since.
        if self.last_product.get(row) == key:
            self.write_ticks[region.cells] = self.launch.tick
            return
        if accumulates:
            self._check_written(region, issuer.thread, site)
        writes = self._writes(region)
        same = (writes.agents == issuer.agent) & (self.forms[region.cells] == form)
        self._check_product(region, writes._replace(ticks=np.where(same, 0, writes.ticks)), issuer, site, "overwrites")
        for prior in self._reads(region):
            self._check_product(region, prior, issuer, site, "overwrites")
        self._tag_write(region, issuer.agent, form, site)
        self.changes[row] += 1
        self.last_product[row] = region, issuer.agent, form, int(self.changes[row])

    def product_read(self, region: Region, issuer: Issuer, site: int) -> None:
        """Check and tag the read of A by a tcgen05.mma."""
        if not self.hazards:
            return
        self._check_written(region, issuer.thread, site)
        self._check_product(region, self._writes(region), issuer, site, "reads")
        cells = region.cells
        self.read_ticks[cells], self.readers[cells] = self.launch.tick, issuer.agent
        self.read_sites[cells] = site
        self.changes[region.row] += 1

    def _tag_write(self, region: Region, agent: int, form: int, site: int) -> None:
        """Tag the cells of a region with a write at this tick."""
        cells = region.cells
        self.write_ticks[cells], self.writers[cells] = self.launch.tick, agent
        self.write_sites[cells], self.forms[cells] = site, form

    # --- checks ---

    def _check_written(self, region: Region, thread: int, site: int) -> None:
        """Report a read of cells that were never written."""
        missing = self.write_ticks[region.cells] == 0
        if missing.any():
            group, column = np.argwhere(missing)[0].tolist()
            first = (region.groups.start + group * (region.groups.step or 1)) * GROUP_LANES
            last = first + GROUP_LANES - 1
            text = f"reads column {region.low + column} of lanes {first} to {last}, which nobody has written"
            self.batch.report_lane("uninitialised-tensor-memory", text, site, thread, doubtful=True)

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
                agents = self.clocks.access_column(row, 0) + warps
                sites = self.load_sites[row, slot][cells[1:]]
                yield PriorAccesses(ticks, np.broadcast_to(agents[:, None], ticks.shape), sites, LOAD)

    def _check_access(
        self, region: Region, prior: PriorAccesses, warp: int, site: int, verb: str, earlier: str
    ) -> None:
        """Check an access of a warp against earlier ones. After an access of the same warp, a wait of the warp is
        needed. After other accesses, a fence is needed that follows the synchronisation which orders them. ``verb``,
        ``earlier``: words for the access and for the earlier accesses in reports."""
        clocks, row = self.clocks, region.row
        own = (prior.agents == clocks.access_column(row, warp)) & (prior.ticks > 0)
        thread = self._first_thread(row, warp)
        if own.any() and (verb, earlier) != ("reads", "reads"):
            bad = own & (prior.ticks >= self.wait_ticks[row, warp, prior.kind])
            if bad.any():
                name = ("ld", "st")[prior.kind]
                text = f"{verb} what this warp's tcgen05.{name} {earlier}: no tcgen05.wait::{name} follows it"
                self._report(region, prior, bad, thread, site, text)
        self._check(region, prior, ~own, clocks.fence_clocks[row, warp], clocks.ticks[row, warp], thread, site, verb)

    def _check_product(self, region: Region, prior: PriorAccesses, issuer: Issuer, site: int, verb: str) -> None:
        """Check an access of a tcgen05.mma against earlier ones, by the rules of ``_check_access``."""
        clocks = self.clocks
        own = prior.agents == clocks.access_column(issuer.row, issuer.warp)
        if own.any():
            bad = own & (prior.ticks > 0) & (prior.ticks >= self.wait_ticks[issuer.row, issuer.warp, prior.kind])
            if bad.any():
                name = ("ld", "st")[prior.kind]
                text = f"tcgen05.mma {verb} what its warp's tcgen05.{name} touches: no tcgen05.wait::{name} follows it"
                self._report(region, prior, bad, issuer.thread, site, text)
        fenced, present = clocks.fence_clock_of(issuer.thread), clocks.of_lane(issuer.thread)
        self._check(region, prior, ~own, fenced, present, issuer.thread, site, f"tcgen05.mma {verb}")

    def _check(
        self,
        region: Region,
        prior: PriorAccesses,
        foreign: Array,
        fenced: Array,
        present: Array,
        thread: int,
        site: int,
        event: str,
    ) -> None:
        """Report ``foreign`` accesses (bool per cell) that are not ordered before a thread's access, which ``event``
        names in words. ``fenced``: the thread's clock at its last fence. ``present``: its clock now."""
        clocks = self.clocks
        # An agent has two entries in a clock (see ClusterClocks). The first one says which of its accesses are visible:
        # an earlier write must be. The second one, ``ended_offset`` further, says which have ended, visible or not: of
        # an earlier read this is all that is required. Without clusters both are the same entry.
        ended_offset = clocks.ended if prior.kind == LOAD else 0
        bad = foreign & (prior.ticks > 0) & (prior.ticks >= fenced[prior.agents + ended_offset])
        if not bad.any():
            return
        first = tuple(np.argwhere(bad)[0])
        agent, tick = int(prior.agents[first]), int(prior.ticks[first])
        is_product = bool(clocks.is_product(prior.agents[first]))
        complete, why = self._missing_order(region.row, agent, tick, present, ended_offset, is_product, prior.kind)
        name = "a tcgen05.mma" if is_product else ("a tcgen05.ld", "a tcgen05.st")[prior.kind]
        verb = "writes" if prior.kind == STORE else "reads"
        rule = "tcgen05-fence" if complete and prior.kind == LOAD else "tensor-memory-race"
        self._report(region, prior, bad, thread, site, f"{event} what {name} {verb}: {why}", rule)

    def _missing_order(
        self, row: int, agent: int, tick: int, present: Array, ended_offset: int, is_product: bool, kind: int
    ) -> tuple[bool, str]:
        """Find what is missing between an earlier access and one that is not ordered after it. Returns whether the
        earlier access has ended and only a fence is missing; and the missing part in words."""
        if tick < present[agent + ended_offset]:
            return True, UNFENCED
        if is_product:
            return False, "no wait for an mbarrier on which its tcgen05.commit arrives comes between"
        # From ``clocks.wgmma`` on, each CTA of the cluster has ``clocks.groups`` agents, in the order of ranks: the
        # tcgen05.mma of each of its warps, then the tcgen05.ld and .st of each of them. This is one of the latter.
        rank, index = divmod(agent - self.clocks.wgmma, self.clocks.groups)
        warp = index - self.clocks.warps
        # The clocks begin with the agents of ordinary accesses: the warps of all CTAs, in the order of ranks. If the
        # thread has synchronised with the warp since the access, and the warp has waited for the access, only the
        # warp's fence is missing.
        plain = rank * self.clocks.warps + warp
        if tick < present[plain + ended_offset] and tick < self.wait_ticks[self._row_of_rank(row, rank), warp, kind]:
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
        thread: int,
        site: int,
        text: str,
        rule: str = "tensor-memory-race",
    ) -> None:
        """Report the first of the earlier accesses that are ``bad`` (bool per cell)."""
        first = tuple(np.argwhere(bad)[0])
        clocks = self.clocks
        rank, index = divmod(int(prior.agents[first]) - clocks.wgmma, clocks.groups)
        row = self._row_of_rank(region.row, rank)
        other = Participant(
            self.launch.site(int(prior.sites[first])), self.batch.cta_index(row), agent=clocks.agent(index)
        )
        self.batch.report_lane(rule, f"{text} (column {region.low + int(first[1])})", site, thread, other=other)

    def have_ended(self, row: int, low: int, high: int, thread: int) -> bool:
        """Have all accesses to columns [low, high) of a row ended, as far as a thread's clock tells? Accesses of the
        thread's own warp have ended after its wait, and a missing tcgen05 fence does not matter."""
        present, clocks = self.clocks.of_lane(thread), self.clocks
        own_warp = self.batch.warp[thread]
        own_agent = clocks.access_column(int(self.batch.row_of[thread]), int(own_warp))
        region = Region(row, slice(0, GROUPS), low, high)
        for prior in (self._writes(region), *self._reads(region)):
            late = (prior.ticks > 0) & (prior.ticks >= present[prior.agents + clocks.ended])
            for agent, tick in {(int(a), int(t)) for a, t in zip(prior.agents[late], prior.ticks[late], strict=True)}:
                is_product = bool(clocks.is_product(np.array(agent)))
                if agent == own_agent and tick < self.wait_ticks[row, own_warp, prior.kind]:
                    continue
                if not self._missing_order(row, agent, tick, present, clocks.ended, is_product, prior.kind)[0]:
                    return False
        return True
