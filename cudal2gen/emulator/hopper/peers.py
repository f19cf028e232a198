"""The CTAs of a cluster as each other sees them: shared::cluster addresses, and who may touch whom."""

from __future__ import annotations

import numpy as np

from cudal2gen.emulator.hopper.clocks import ClusterClocks
from cudal2gen.emulator.state.arrays import Array
from cudal2gen.emulator.state.batch import BatchState

# mapa puts rank + 1 above the address within the CTA's window.
RANK_SHIFT = 24
WITHIN = (1 << RANK_SHIFT) - 1


class Peers:
    """Addresses of other CTAs of the cluster, and the last accesses to each CTA by others."""

    def __init__(self, batch: BatchState, clocks: ClusterClocks) -> None:
        self.batch, self.launch, self.clocks = batch, batch.launch, clocks
        self.hazards = batch.launch.options.hazards
        # Row -> {column of the clocks: (tick, site) of its last access}.
        self.visits: dict[int, dict[int, tuple[int, int]]] = {}

    def mapa(self, address: Array, rank: Array) -> Array:
        """mapa of shared or generic addresses; the rank is checked where the address is used."""
        low = address & address.dtype.type(~(0xFF << RANK_SHIFT) & ((1 << 8 * address.itemsize) - 1))
        out: Array = low | ((rank & 0x3F) + 1).astype(address.dtype) << address.dtype.type(RANK_SHIFT)
        return out

    def rank_of(self, address: Array) -> Array:
        """getctarank."""
        rank = (address >> address.dtype.type(RANK_SHIFT) & address.dtype.type(0xFF)).astype(np.int64)
        own = self.batch.rank[self.batch.row_of]
        return np.where(rank > 0, rank - 1, own).astype(np.uint32)

    def row_of_rank(self, row: int, rank: int) -> int:
        """The row of another rank of a row's cluster."""
        return row - int(self.batch.rank[row]) + rank

    def rows(self, address: Array, lanes: Array, site: int, remember: bool = True) -> tuple[Array, Array]:
        """Lanes and the rows of the CTAs that their shared::cluster addresses name; wrong ranks are reported.
        ``remember``: the access ends with the instruction, so the CTA must outlive it."""
        batch = self.batch
        rank = (address >> RANK_SHIFT).astype(np.int64) - 1
        own = batch.row_of[lanes]
        rows = np.where(rank < 0, own, own - batch.rank[own] + rank)
        bad = rank >= batch.cluster_size
        if bad.any():
            text = f"names CTA {int(rank[bad][0])} of a cluster of {batch.cluster_size}"
            batch.report_lanes("cluster", text, site, lanes[bad])
            lanes, rows = lanes[~bad], rows[~bad]
        if self.hazards:
            away = rows != batch.row_of[lanes]
            if away.any():
                for row in np.unique(rows[away]):
                    self.visit(int(row), lanes[away & (rows == row)], site, remember)
        return lanes, rows

    def visit(self, row: int, lanes: Array, site: int, remember: bool = True) -> None:
        """Lanes of other CTAs touch CTA ``row``: it must have started, and must not have ended."""
        batch, clocks = self.batch, self.clocks
        whose = f"touches the shared memory of CTA {batch.cta_index(row)}"
        for lane in lanes[np.unique(lanes >> 5, return_index=True)[1]]:
            horizon = clocks.of(int(lane))
            if not horizon[-1] and not horizon[clocks.own(row)].any():
                text = f"{whose} before a cluster barrier says that it has started"
                batch.report_lanes("cluster", text, site, lanes)
        if not batch.alive[row * batch.width : (row + 1) * batch.width].any():
            batch.report_lanes("cluster", f"{whose}, which has exited", site, lanes)
            return
        if remember:
            visits = self.visits.setdefault(row, {})
            for column in np.unique(clocks.first[batch.row_of[lanes]] + batch.warp[lanes]):
                visits[int(column)] = (self.launch.tick, site)

    def exited(self, row: int) -> None:
        """A CTA ends: its shared memory goes, so every access of others must have come before."""
        clock = self.clocks.of_cta(row)
        for column, (tick, site) in self.visits.get(row, {}).items():
            if tick >= clock[column]:
                rank, warp = divmod(column, self.clocks.warps)
                self.batch.report(
                    "cluster",
                    f"warp {warp} of the cluster's CTA {rank} touches this CTA's shared memory, and this CTA may exit "
                    "before: none of its threads waits for it",
                    site,
                    row,
                    (),
                )
