"""Strong accesses and fences of a batch on global memory: what they publish, what they learn, and which value a load
returns."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from kernelproof.emulator.memory.chains import Clock
from kernelproof.emulator.memory.flags import Knowledge, Knows, Moment, Side, Write, in_turn
from kernelproof.emulator.memory.order import GlobalOrder
from kernelproof.emulator.memory.strong_loads import Accepts, Reader, StrongLoads
from kernelproof.emulator.state.arrays import Array, Mask
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.scopes import ORDERS, Scope, scope_of
from kernelproof.emulator.state.warp_clocks import WarpClocks


class DeviceFlags:
    """The flags in global memory, as the threads of a batch write and read them; see ``GlobalOrder``."""

    def __init__(self, batch: BatchState, clocks: WarpClocks, order: GlobalOrder) -> None:
        self.batch, self.clocks, self.order, self.launch = batch, clocks, order, batch.launch
        self.loads = StrongLoads(batch, clocks, "global")
        self.observed, self.flags_are_read = self.loads.observed, self.loads.flags_are_read
        if self.loads.weak:
            order.active = order.flags.traced = True
        self._known_to: dict[tuple[int, int, bool], Knows] = {}

    @property
    def active(self) -> bool:
        """Has anything been fenced or released yet?"""
        return self.order.active

    @cached_property
    def _sides(self) -> list[Side]:
        """Per row: its CTA and cluster."""
        return [Side.of(cta, self.launch.cluster_of(cta)) for cta in self.batch.ctas.tolist()]

    @cached_property
    def _rows(self) -> dict[int, int]:
        """CTA -> its row."""
        return {side.cta: row for row, side in enumerate(self._sides)}

    def _warp_of(self, lane: int) -> tuple[int, int, Side]:
        """The row and the warp of a lane, and its side of a synchronisation."""
        row = int(self.batch.row_of[lane])
        return row, int(self.batch.warp[lane]), self._sides[row]

    # --- reads ---

    def read(
        self,
        lanes: Array | None,
        offset: Array,
        strong: int,
        site: int,
        values: Array,
        accepts: Accepts | None = None,
    ) -> Array:
        """Strong loads of ``values``, one per lane: what they find is learned. Returns the values, with older ones in
        place of those that are not the last. ``accepts``: which older values an element may read."""
        return self.loads.read(self, self.order.flags, lanes, offset, strong, site, values, accepts)

    def reader(self, row: int, warp: int) -> Reader:
        return self._sides[row].cta, warp

    def learn_write(self, row: int, warp: int, place: int, write: Write[Clock], strong: int) -> None:
        self.order.read_flag(place, self._sides[row], warp, scope_of(strong), bool(strong & ORDERS), write)

    def knowledge(self, row: int, warp: int, cumulative: bool) -> Knowledge:
        return self.clocks.total(row, warp), self.order.version(self._sides[row].cta, warp), cumulative

    def knows(self, row: int, warp: int, cumulative: bool) -> Knows:
        out = self._known_to.get((row, warp, cumulative))
        if out is not None:
            return out
        batch, clocks, order = self.batch, self.clocks, self.order
        own = self._sides[row].cta

        def knows(cta: int, other_warp: int, tick: int) -> bool:
            if cta == own and clocks.is_before(row, warp, row, other_warp, tick, ()):
                return True
            if order.knows(own, warp, cta, other_warp, tick, cumulative):
                return True
            if batch.cluster_size == 1 or cta == own:
                return False
            other_row = self._rows.get(cta)
            return other_row is not None and clocks.ordered_in_cluster(row, warp, other_row, other_warp, tick, False)

        self._known_to[row, warp, cumulative] = knows
        return knows

    # --- writes ---

    def write(
        self, lanes: Array | None, offset: Array, strong: int, site: int, old: Array | None, new: Array | None
    ) -> None:
        """Strong stores. ``old``, ``new``: what the places held and will hold, if values are recorded."""
        tick, present, scope = self.launch.tick, self._presents(lanes, strong), scope_of(strong)
        rows, warps = self.batch.warps_of_lanes(lanes)
        before: tuple[int, int, int, bytes] | None = None
        for i, at in enumerate(offset.tolist()):
            row, warp = rows[i], warps[i]
            values = None if old is None or new is None else (old[i], new[i])
            # If several lanes of a warp store the same value at the same address, one write stands for all of them.
            same = row, warp, at, b"" if values is None else values[1].tobytes()
            if same == before:
                continue
            before = same
            side = self._sides[row]
            moment, clock = Moment(side.cta, warp, tick, site), present.get((side.cta, warp))
            self.order.write_flag(at, side, moment, scope, False, clock, values)

    def modify(
        self, lanes: Array, offset: Array, read: int, write: int, site: int, old: Array | None, new: Array | None
    ) -> None:
        """Atomics, which have happened one after the other: each reads before it writes, and a later lane may acquire
        what an earlier one has released. ``read``, ``write``: their strengths; ``old``, ``new``: see ``write``."""
        order, acquires = self.order, bool(read & ORDERS)
        for elements in in_turn(lanes, offset, old is not None):
            first = elements[0]
            at = int(offset[first])
            _, warp, side = self._warp_of(int(lanes[first]))
            order.read_flag(at, side, warp, scope_of(read), acquires)
            values = None if old is None or new is None else (old[first], new[first])
            tick, present = self.launch.tick, self._presents(lanes[elements], write)
            moment, clock = Moment(side.cta, warp, tick, site), present.get((side.cta, warp))
            order.write_flag(at, side, moment, scope_of(write), True, clock, values)

    def _presents(self, lanes: Array | None, strong: int) -> dict[tuple[int, int], Clock]:
        """What releases by these lanes publish, by CTA and warp; empty for relaxed writes."""
        present: dict[tuple[int, int], Clock] = {}
        if strong & ORDERS and self.launch.options.hazards:
            for row, warp, its_lanes, horizon in self._warps_of(lanes):
                cta = int(self.batch.ctas[row])
                present[cta, warp] = self.order.present(cta, warp, its_lanes, horizon, self.launch.tick)
            # The clock covers what the lanes did until now, and not what they do later.
            self.launch.tick += 1
        return present

    def _warps_of(self, lanes: Array | None) -> Iterator[tuple[int, int, Array, Array]]:
        """``_warps`` of some lanes, in ascending order; None: all."""
        if lanes is None:
            yield from self._warps(None)
            return
        one_warp = lanes[0] >> 5 == lanes[-1] >> 5
        for part in [lanes] if one_warp else np.split(lanes, np.flatnonzero(np.diff(lanes >> 5)) + 1):
            row, warp, _ = self._warp_of(int(part[0]))
            yield row, warp, self.batch.thread[part], self.clocks.horizon_of_threads(row, warp)

    def _warps(self, m: Mask) -> Iterator[tuple[int, int, Array, Array]]:
        """Per warp with lanes in the mask: (row, warp, its threads in the mask, its clock per thread of the CTA)."""
        batch, clocks = self.batch, self.clocks
        mask = batch.running(m).reshape(batch.count, batch.warps_per_cta, 32)
        for row, warp in np.argwhere(mask.any(axis=2)).tolist():
            yield row, warp, np.flatnonzero(mask[row, warp]) + 32 * warp, clocks.horizon_of_threads(row, warp)

    # --- fences ---

    def fence(self, m: Mask, scope: Scope, acquire: bool, release: bool, sequential: bool) -> None:
        """A fence by the lanes of ``m``. Arguments: see ``SharedFlags.fence``."""
        for row, warp, lanes, horizon in self._warps(m):
            self.order.fence(
                self._sides[row].cta, warp, lanes, horizon, self.launch.tick, scope, acquire, release,
                sequential and self.observed,
            )  # fmt: skip
