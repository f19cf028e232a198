"""Translates addresses in the shared memory of other CTAs of a cluster, and checks that those CTAs are alive.

The PTX ISA describes such addresses under "mapa" and shared::cluster.
"""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.hopper.cluster_clocks import ClusterClocks
from kernelproof.emulator.state.arrays import MOVER, Array, Mask
from kernelproof.emulator.state.batch_state import BatchState

# An address of shared memory has two forms. In the program's form, bits 24 and up are the rank in the cluster of the
# CTA that it lies in, even for a CTA's own variables. In the units' form, these bits are 0 for the lane's own CTA, and
# rank + 1 for other CTAs. So an access to the own CTA, the usual case, needs no arithmetic on ranks.
RANK_SHIFT = 24
WITHIN = (1 << RANK_SHIFT) - 1  # the bits of an address below the rank
# The largest rank that fits; more than a cluster has.
MAX_RANK = 0x7F


class Peers:
    """The addresses of other CTAs of the cluster, and the last accesses to each CTA by other CTAs."""

    def __init__(self, batch: BatchState, clocks: ClusterClocks) -> None:
        self.batch, self.launch, self.clocks = batch, batch.launch, clocks
        self.hazards = batch.launch.options.hazards
        # Per lane: the bits of its CTA's rank in an address.
        self.own_rank_bits: Array = (batch.rank[batch.row_of] << RANK_SHIFT).astype(np.uint32)
        self._variables: dict[tuple[int, int], Array] = {}
        # Row -> column of the clocks -> (tick, instruction) of that warp's last access to the row's CTA.
        self.visits: dict[int, dict[int, tuple[int, int]]] = {}

    # --- addresses as the program computes them ---

    def variable(self, offset: int, width: int) -> Array:
        """The address of a variable in the lanes' own CTAs, as a register of ``width`` bytes."""
        key = (offset, width)
        out = self._variables.get(key)
        if out is None:
            out = self._variables[key] = (self.own_rank_bits + np.uint32(offset)).astype(MOVER[width])
        return out

    def mapa(self, address: Array, rank: Array) -> Array:
        """mapa of shared or generic addresses. The rank is checked when the address is used."""
        low = address & address.dtype.type(~(MAX_RANK << RANK_SHIFT) & ((1 << 8 * address.itemsize) - 1))
        out: Array = low | (rank & MAX_RANK).astype(address.dtype) << address.dtype.type(RANK_SHIFT)
        return out

    def rank_of(self, address: Array) -> Array:
        """getctarank: the rank in each address."""
        return np.asarray((address >> address.dtype.type(RANK_SHIFT) & address.dtype.type(MAX_RANK)).astype(np.uint32))

    def is_of_cta(self, address: Array) -> Array:
        """Which of these addresses of shared memory, generic or not, lie in the lanes' own CTAs?"""
        return np.asarray(self.rank_of(address) == self.own_rank_bits >> RANK_SHIFT)

    # --- addresses in the units' form ---

    def of_cta(self, address: Array, m: Mask, site: int) -> Array:
        """Addresses in shared::cta in the units' form. An address of another CTA is reported, and then replaced by the
        same offset in the own CTA."""
        # The exclusive or clears the rank bits exactly of those addresses that lie in the lane's own CTA.
        in_unit_form: Array = address ^ self.own_rank_bits
        if int(in_unit_form.max()) > WITHIN:
            foreign = self.batch.running(m) & (in_unit_form > WITHIN)
            if foreign.any():
                first = int(np.flatnonzero(foreign)[0])
                rank, own_rank = int(address[first]) >> RANK_SHIFT, int(self.own_rank_bits[first]) >> RANK_SHIFT
                text = f"an instruction on shared::cta of CTA {own_rank} of the cluster has an address of CTA {rank}"
                self.batch.report_lanes("shared-out-of-bounds", text, site, np.flatnonzero(foreign))
            in_unit_form &= np.uint32(WITHIN)
        return in_unit_form

    def of_cluster(self, address: Array) -> Array:
        """Addresses in shared::cluster in the units' form."""
        in_unit_form: Array = address ^ self.own_rank_bits
        if int(in_unit_form.max()) > WITHIN:
            in_unit_form = np.where(in_unit_form > WITHIN, address + np.uint32(1 << RANK_SHIFT), in_unit_form)
        return in_unit_form

    # --- accesses to other CTAs ---

    def row_of_rank(self, row: int, rank: int) -> int:
        """The row of the CTA with a rank in the cluster of CTA ``row``."""
        return row - int(self.batch.rank[row]) + rank

    def rows(self, address: Array, lanes: Array, site: int, remember: bool = True) -> tuple[Array, Array]:
        """The lanes, and for each the row of the CTA that its address (in the units' form) names. Lanes with a wrong
        rank are reported and left out. ``remember``: record the access, because that CTA must not exit before it. It is
        false for asynchronous accesses, whose mbarrier tells when they end."""
        batch = self.batch
        rank = (address >> RANK_SHIFT).astype(np.int64) - 1
        own_rows = batch.row_of[lanes]
        rows = np.where(rank < 0, own_rows, own_rows - batch.rank[own_rows] + rank)
        bad = rank >= batch.cluster_size
        if bad.any():
            text = f"names CTA {int(rank[bad][0])} of a cluster of {batch.cluster_size}"
            batch.report_lanes("cluster", text, site, lanes[bad])
            lanes, rows = lanes[~bad], rows[~bad]
        if self.hazards:
            is_foreign = rows != batch.row_of[lanes]
            if is_foreign.any():
                for row in np.unique(rows[is_foreign]):
                    self.visit(int(row), lanes[is_foreign & (rows == row)], site, remember)
        return lanes, rows

    def visit(self, row: int, lanes: Array, site: int, remember: bool = True) -> None:
        """Report an access of lanes of other CTAs to CTA ``row``, unless that CTA has certainly started and not ended.
        ``remember``: as for ``rows``."""
        batch, clocks = self.batch, self.clocks
        event = f"touches the shared memory of CTA {batch.cta_index(row)}"
        # The clock is that of the warp, so one lane of each warp is enough.
        first_lanes = lanes if len(lanes) == 1 else lanes[np.unique(lanes >> 5, return_index=True)[1]]
        for lane in first_lanes.tolist():
            horizon = clocks.of_lane(lane)
            its_warps = slice(clocks.own(row).start + clocks.ended, clocks.own(row).stop + clocks.ended)
            # The CTA has started if a cluster barrier has completed, or if the lane's clock has an access of its warps.
            if not horizon[clocks.started] and not horizon[its_warps].any():
                text = f"{event} before a cluster barrier says that it has started"
                batch.report_lanes("cluster", text, site, lanes)
        if not batch.alive[row * batch.width : (row + 1) * batch.width].any():
            batch.report_lanes("cluster", f"{event}, which has exited", site, lanes)
            return
        if remember:
            visits = self.visits.setdefault(row, {})
            for column in np.unique(clocks.first[batch.row_of[lanes]] + batch.warp[lanes]):
                visits[int(column)] = (self.launch.tick, site)

    def exited(self, row: int) -> None:
        """Report accesses of other CTAs to the shared memory of a CTA that has ended, unless they happen before its
        end."""
        clock = self.clocks.of_cta(row)
        for column, (tick, site) in self.visits.get(row, {}).items():
            if tick >= clock[column + self.clocks.ended]:
                rank, warp = divmod(column, self.clocks.warps)
                self.batch.report(
                    "cluster",
                    f"warp {warp} of the cluster's CTA {rank} touches this CTA's shared memory, and this CTA may exit "
                    "before: none of its threads waits for it",
                    site,
                    row,
                    (),
                )
