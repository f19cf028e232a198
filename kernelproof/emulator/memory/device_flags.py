"""Executes strong accesses and fences of a batch on global memory: what they order, and which values loads return."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from kernelproof.emulator.memory.chains import Clock
from kernelproof.emulator.memory.flags import Knowledge, Knows, Moment, Side, Write, ordered_steps
from kernelproof.emulator.memory.order import GlobalOrder
from kernelproof.emulator.memory.strong_loads import Accepts, Reader, StrongLoads
from kernelproof.emulator.state.arrays import Array, Mask
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.scopes import ORDERS, Scope, scope_of
from kernelproof.emulator.state.warp_clocks import WarpClocks


class DeviceFlags:
    """The flags in global memory (places of strong accesses), as the threads of a batch write and read them; see
    ``GlobalOrder``."""

    def __init__(self, batch: BatchState, clocks: WarpClocks, order: GlobalOrder) -> None:
        self.batch, self.clocks, self.order, self.launch = batch, clocks, order, batch.launch
        self.loads = StrongLoads(batch, clocks, "global")
        self.observed, self.flags_are_read = self.loads.observed, self.loads.flags_are_read
        if self.loads.weak:
            order.active = order.flags.traced = True

    @property
    def active(self) -> bool:
        """Has any fence or release been executed yet?"""
        return self.order.active

    @cached_property
    def _sides(self) -> list[Side]:
        """Per row: its CTA and cluster."""
        return [Side.of(cta, self.launch.cluster_of(cta)) for cta in self.batch.ctas.tolist()]

    @cached_property
    def _rows(self) -> dict[int, int]:
        """CTA -> its row."""
        return {side.cta: row for row, side in enumerate(self._sides)}

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
        """Execute strong loads, which find ``values``, one per lane, and acquire what the writers of these have
        released. Returns the values; a load may get an older value than the last. ``accepts``: which older values an
        element may read."""
        return self.loads.read(self, self.order.flags, lanes, offset, strong, site, values, accepts)

    # ``Learners`` describes the next four methods.

    def reader(self, row: int, warp: int) -> Reader:
        return self._sides[row].cta, warp

    def learn_write(self, row: int, warp: int, place: int, write: Write[Clock], strong: int) -> None:
        self.order.read_flag(place, self._sides[row], warp, scope_of(strong), bool(strong & ORDERS), write)

    def knowledge(self, row: int, warp: int, cumulative: bool) -> Knowledge:
        return self.clocks.contents(row, warp), self.order.version(self._sides[row].cta, warp), cumulative

    def knows(self, row: int, warp: int, cumulative: bool) -> Knows:
        """A function that says whether an access of a CTA's warp at a tick happens before this warp's next load."""
        batch, clocks, order = self.batch, self.clocks, self.order
        own_cta = self._sides[row].cta
        bounds: list[Clock] | None = None

        def knows(cta: int, other_warp: int, tick: int) -> bool:
            nonlocal bounds
            if cta == own_cta and clocks.is_before(row, warp, row, other_warp, tick, ()):
                return True
            if bounds is None:
                bounds = order.bounds(own_cta, warp, cumulative)
            for bound in bounds:
                if order.chains.covers(bound, cta, other_warp, tick):
                    return True
            if batch.cluster_size == 1 or cta == own_cta:
                return False
            other_row = self._rows.get(cta)
            return other_row is not None and clocks.ordered_in_cluster(row, warp, other_row, other_warp, tick, False)

        return knows

    # --- writes ---

    def write(
        self, lanes: Array | None, offset: Array, strong: int, site: int, old: Array | None, new: Array | None
    ) -> None:
        """Note strong stores. ``old``, ``new``: the values before and after, if values are recorded."""
        tick, present, scope = self.launch.tick, self._released_clocks(lanes, strong), scope_of(strong)
        rows, warps = self.batch.warps_of_lanes(lanes)
        previous_key: tuple[int, int, int, bytes] | None = None
        for i, place in enumerate(offset.tolist()):
            row, warp = rows[i], warps[i]
            values = None if old is None or new is None else (old[i], new[i])
            # If several lanes of a warp store the same value at the same address, one write stands for all of them.
            key = row, warp, place, b"" if values is None else values[1].tobytes()
            if key == previous_key:
                continue
            previous_key = key
            side = self._sides[row]
            moment, clock = Moment(side.cta, warp, tick, site), present.get((side.cta, warp))
            self.order.write_flag(place, side, moment, scope, False, clock, values)

    def modify(
        self, lanes: Array, offset: Array, read: int, write: int, site: int, old: Array | None, new: Array | None
    ) -> None:
        """Note atomics, which are executed one after the other: each reads before it writes, and a later lane may
        acquire what an earlier one has released. ``read``, ``write``: the strengths of the two. ``old``, ``new``: see
        ``write``."""
        order, tick = self.order, self.launch.tick
        acquires, read_scope, write_scope = bool(read & ORDERS), scope_of(read), scope_of(write)
        steps = list(ordered_steps(lanes, offset, old is not None))
        first = lanes[[elements[0] for elements in steps]]
        releases = bool(write & ORDERS) and self.launch.options.hazards
        covered = self.clocks.horizons_of_threads(self.batch.row_of[first], self.batch.warp[first]) if releases else ()
        rows, warps = self.batch.warps_of_lanes(first)
        places, threads = offset.tolist(), self.batch.thread[lanes].tolist()
        for i, elements in enumerate(steps):
            place, warp, side = places[elements[0]], warps[i], self._sides[rows[i]]
            order.read_flag(place, side, warp, read_scope, acquires)
            values = None if old is None or new is None else (old[elements[0]], new[elements[0]])
            moment, clock = Moment(side.cta, warp, tick, site), None
            if releases:
                # Accesses of the present tick are released, and later ones are not.
                tick += 1
                for element in elements:
                    covered[i][threads[element]] = tick
                clock = order.present(side.cta, warp, covered[i])
            order.write_flag(place, side, moment, write_scope, True, clock, values)
        self.launch.tick = tick

    def _released_clocks(self, lanes: Array | None, strong: int) -> dict[tuple[int, int], Clock]:
        """(CTA, warp) -> the clock that these lanes release; empty for relaxed writes."""
        present: dict[tuple[int, int], Clock] = {}
        if strong & ORDERS and self.launch.options.hazards:
            batch = self.batch
            mask = batch.alive
            if lanes is not None:
                mask = np.zeros(batch.size, bool)
                mask[lanes] = True
            for row, warp, _, covered in self._released(mask):
                cta = self._sides[row].cta
                present[cta, warp] = self.order.present(cta, warp, covered)
            # Later accesses of these lanes are not released.
            self.launch.tick += 1
        return present

    def _released(self, mask: Array) -> Iterator[tuple[int, int, Array, Array]]:
        """For each warp with lanes in the mask: its row, its number, its lanes in the mask (bool), and the row of a
        release by them now (see ``GlobalOrder.present``)."""
        batch = self.batch
        by_warp = mask.reshape(-1, 32)
        numbers = np.flatnonzero(by_warp.any(axis=1))
        rows, warps = np.divmod(numbers, batch.warps_per_cta)
        lanes: Array = by_warp[numbers]
        covered = self.clocks.horizons_of_threads(rows, warps)
        # Accesses of the present tick are released, too.
        element, lane = lanes.nonzero()
        covered[element, 32 * warps[element] + lane] = self.launch.tick + 1
        yield from zip(rows.tolist(), warps.tolist(), lanes, covered, strict=True)

    # --- fences ---

    def fence(self, m: Mask, scope: Scope, acquire: bool, release: bool, sequential: bool) -> None:
        """A fence by the lanes of ``m``. Arguments: see ``SharedFlags.fence``."""
        fenced = self.launch.tick + 1
        for row, warp, lanes, covered in self._released(self.batch.running(m)):
            self.order.fence(
                self._sides[row].cta, warp, lanes, covered, fenced, scope, acquire, release,
                sequential and self.observed,
            )  # fmt: skip
