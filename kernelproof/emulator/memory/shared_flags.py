"""Flags in shared memory: clocks that strong writes publish, and that readers learn by an acquire or a fence.

The same patterns in global memory are in ``memory.order``. Here a clock is one row of the CTA's (or cluster's) clocks,
so learning it is an elementwise maximum.
"""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.memory.flags import Flags, Side, up_to
from kernelproof.emulator.state.arrays import Array, Mask
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.scopes import ORDERS, Scope, scope_of
from kernelproof.emulator.state.warp_clocks import WarpClocks


class SharedFlags:
    """The flags of a batch of CTAs, by byte offset in the batch's shared memory."""

    def __init__(self, batch: BatchState, clocks: WarpClocks) -> None:
        self.batch, self.clocks, self.launch = batch, clocks, batch.launch
        self.hazards = batch.launch.options.hazards
        self.flags: Flags[Array] = Flags(np.maximum)
        # (row, warp) -> by scope: the clock that the warp has fenced, and what it has polled but not yet acquired.
        self.fenced: dict[tuple[int, int], dict[Scope, Array]] = {}
        self.learned: dict[tuple[int, int], dict[Scope, Array]] = {}

    def _side(self, row: int) -> Side:
        return Side(row, row // self.batch.cluster_size)

    def _learn_flags(self, lanes: Array, offset: Array, strong: int) -> None:
        """Strong reads of these lanes find clocks at flags. An acquire learns them at once, a relaxed read at the next
        fence."""
        batch = self.batch
        for lane, place in zip(lanes, offset, strict=True):
            row, warp = int(batch.row_of[lane]), int(batch.warp[lane])
            clocks = self.flags.read(int(place), self._side(row), scope_of(strong))
            if strong & ORDERS:
                for clock in clocks.values():
                    self._bring_into_force(row, warp, clock)
            elif clocks:
                self.learned[row, warp] = self.flags.merged(self.learned.get((row, warp), {}), clocks)

    def _bring_into_force(self, row: int, warp: int, clock: Array) -> None:
        """From now on everything that the clock covers happens before the warp's present."""
        # The table has an entry per warp and column, and what is learned never shrinks.
        table = self.clocks.rows()
        np.maximum(table[row, warp], clock, out=table[row, warp])

    def _publish(self, lanes: Array | None, offset: Array, strong: int, keep: bool = False) -> None:
        """A strong write publishes a clock: a release everything that its warp did, a relaxed write what it fenced."""
        batch, scope = self.batch, scope_of(strong)
        for lane, place in zip(batch.everyone if lanes is None else lanes, offset, strict=True):
            row, warp = int(batch.row_of[lane]), int(batch.warp[lane])
            if strong & ORDERS:
                clocks = up_to(scope, self.clocks.present(row, warp))
            else:
                clocks = self.fenced.get((row, warp), {})
            # A write that publishes nothing still ends what an earlier write has published at its place.
            if clocks or self.flags:
                self.flags.write(int(place), self._side(row), scope, clocks, keep)
        if strong & ORDERS:
            self.launch.tick += 1

    def fence(self, m: Mask, scope: Scope, acquire: bool, release: bool, restricted: bool) -> None:
        """A fence by the lanes of ``m``. ``release``: flags that are written later publish what the warps did before
        it. ``acquire``: clocks that they have polled come into force. ``restricted``: both only for shared memory."""
        if not self.hazards:
            return
        for row, warp in zip(*np.nonzero(self.clocks.warps_in(self.batch.running(m))), strict=True):
            key = (int(row), int(warp))
            pending = self.learned.get(key, {}) if acquire else {}
            # The part that a restricted fence leaves out stays pending for another fence.
            for clock in self.flags.take(dict(pending) if restricted else pending, scope):
                self._bring_into_force(*key, self.clocks.in_shared(clock) if restricted else clock)
            if release:
                present = self.clocks.present(*key)
                clocks = up_to(scope, self.clocks.in_shared(present) if restricted else present)
                self.fenced[key] = self.flags.merged(self.fenced.get(key, {}), clocks)
        self.launch.tick += 1

    def fenced_by(self, lanes: Array, scope: Scope) -> Array | None:
        """The clock that the warps of these lanes have fenced at a scope."""
        keys = {(int(self.batch.row_of[lane]), int(self.batch.warp[lane])) for lane in lanes}
        clocks = [self.fenced[key][scope] for key in keys if scope in self.fenced.get(key, ())]
        return np.asarray(np.maximum.reduce(clocks)) if clocks else None

    def learn(self, lanes: Array, scope: Scope, clock: Array) -> None:
        """The warps of these lanes have read a clock by a relaxed access: the next fence of the scope learns it."""
        for key in {(int(self.batch.row_of[lane]), int(self.batch.warp[lane])) for lane in lanes}:
            self.learned[key] = self.flags.merged(self.learned.get(key, {}), {scope: clock})
