"""Models flags in shared memory: strong writes publish clocks, and readers learn them by an acquire or a fence.

``memory.order`` does the same for global memory. Here a clock is one row of the CTA's (or cluster's) clocks, so two
clocks merge by an elementwise maximum.
"""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.memory.flags import Flags, Knowledge, Knows, Moment, Side, Write, clocks_up_to, ordered_steps
from kernelproof.emulator.memory.order import GlobalOrder
from kernelproof.emulator.memory.strong_loads import Accepts, Reader, StrongLoads
from kernelproof.emulator.state.arrays import Array, Mask
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.scopes import ORDERS, Scope, scope_of
from kernelproof.emulator.state.warp_clocks import WarpClocks


class SharedFlags:
    """The flags of a batch of CTAs, by byte offset in the batch's shared memory. CTAs are named by their rows."""

    def __init__(self, batch: BatchState, clocks: WarpClocks) -> None:
        self.batch, self.clocks, self.launch = batch, clocks, batch.launch
        self.hazards = batch.launch.options.hazards
        self.loads = StrongLoads(batch, clocks, "shared")
        self.flags: Flags[Array] = Flags(np.maximum, self.loads.weak)
        self.observed, self.flags_are_read = self.loads.observed, self.loads.flags_are_read
        # (Row, warp) -> scope -> the clock that the warp has fenced; and the clock that it has read but not yet
        # acquired.
        self.fenced: dict[tuple[int, int], dict[Scope, Array]] = {}
        self.learned: dict[tuple[int, int], dict[Scope, Array]] = {}
        # Cluster -> the clock of what comes before its last fence.sc. Such fences only bound how old the value may be
        # that a load of the cluster's warps returns; see ``GlobalOrder``.
        self.before_fences: dict[int, Array] = {}
        # The order by flags in global memory; None if that is not modelled for shared memory.
        self.device_order: GlobalOrder | None = None

    @property
    def active(self) -> bool:
        """Has any fence or release been executed yet?"""
        return bool(self.fenced or self.flags) or self.loads.weak

    def _side(self, row: int) -> Side:
        """The CTA of a row as a side of a synchronisation."""
        return Side.of(row, row // self.batch.cluster_size)

    # --- reads ---

    def read(
        self,
        lanes: Array,
        offset: Array,
        strong: int,
        site: int,
        values: Array,
        accepts: Accepts | None = None,
    ) -> Array:
        """Execute strong loads where memory holds ``values``, one per lane. An acquire learns the clocks of the writes
        that it reads directly, a relaxed load at the next fence. Returns the values that the loads read, which may be
        older. ``accepts``: which older values an element may read."""
        return self.loads.read(self, self.flags, lanes, offset, strong, site, values, accepts)

    # ``Learners`` describes the methods ``reader``, ``learn_write``, ``knowledge`` and ``knows``.

    def reader(self, row: int, warp: int) -> Reader:
        return row, warp

    def learn_write(self, row: int, warp: int, place: int, write: Write[Array], strong: int) -> None:  # noqa: ARG002
        """Note that a warp has read a write: an acquire learns its clocks, any other read keeps them in ``learned``."""
        clocks = self.flags.clocks(write, self._side(row), scope_of(strong))
        if strong & ORDERS:
            for clock in clocks.values():
                self._acquire(row, warp, clock)
        elif clocks:
            self.learned[row, warp] = self.flags.merged(self.learned.get((row, warp), {}), clocks)

    def _others(self, row: int, warp: int, cumulative: bool) -> list[Array]:
        """The clocks, besides its own, of the writes that a warp's loads must not miss; see ``GlobalOrder.bounds``."""
        clocks = [*self.learned.get((row, warp), {}).values()] if cumulative else []
        before = self.before_fences.get(row // self.batch.cluster_size)
        return clocks if before is None else [*clocks, before]

    def knowledge(self, row: int, warp: int, cumulative: bool) -> Knowledge:
        clocks = (clock.tobytes() for clock in self._others(row, warp, cumulative))
        return b"".join((self.clocks.contents(row, warp), *clocks)), 0, cumulative

    def knows(self, row: int, warp: int, cumulative: bool) -> Knows:
        """A function that says whether an access of another warp at a tick happens before this warp's next load."""
        clocks = self._others(row, warp, cumulative)

        def knows(other_row: int, other_warp: int, tick: int) -> bool:
            return self.clocks.is_before(row, warp, other_row, other_warp, tick, clocks)

        return knows

    def ordered_by_device(self, lanes: Array, thread: Array, several: Array, tick: Array) -> Array:
        """Per element: does an access to the CTA's shared memory by a thread at a tick happen before the lane's present
        access, because of a flag in global memory? ``several``: some thread of that thread's warp made the access."""
        order, batch = self.device_order, self.batch
        assert order is not None
        cta, warp = batch.ctas[batch.row_of[lanes]], batch.warp[lanes]
        out = order.ordered(cta, warp, cta, thread, tick, False)
        for i in np.flatnonzero(several & ~out).tolist():
            out[i] = order.covers(int(cta[i]), int(warp[i]), int(thread[i]) >> 5, int(tick[i]))
        return out

    def _acquire(self, row: int, warp: int, clock: Array) -> None:
        """Merge a clock into the warp's own, so that what it covers happens before the warp's next access."""
        # The table has an entry per warp and column, which only grow.
        table = self.clocks.rows()
        np.maximum(table[row, warp], clock, out=table[row, warp])

    # --- writes ---

    def modify(
        self, lanes: Array, offset: Array, read: int, write: int, site: int, old: Array | None, new: Array | None
    ) -> None:
        """Note atomics, which are executed one after the other: each reads before it writes, and a later lane may
        acquire what an earlier one has released. ``read``, ``write``: the strengths of the two. ``old``, ``new``: see
        ``_publish``."""
        if not self.hazards:
            return
        for elements in ordered_steps(lanes, offset, old is not None):
            lane, place = int(lanes[elements[0]]), offset[elements[:1]]
            history = self.flags.places.get(int(place[0]))
            if history is not None:
                row, warp = int(self.batch.row_of[lane]), int(self.batch.warp[lane])
                self.learn_write(row, warp, int(place[0]), history.last, read)
            values = None if old is None or new is None else (old[elements], new[elements])
            self._publish(lanes[elements[:1]], place, write, site, values, lanes[elements], keep=True)

    def _publish(
        self,
        lanes: Array | None,
        offset: Array,
        strong: int,
        site: int,
        values: tuple[Array, Array] | None,
        represented_lanes: Array | None = None,
        keep: bool = False,
    ) -> None:
        """Note strong writes. A release publishes the clock of everything before it, a relaxed write the clock that its
        warp has fenced. ``values``: the values before and after, if they are recorded. ``represented_lanes``: all
        lanes for which the first one writes; None: each lane writes for itself. ``keep``: see ``Flags.write``."""
        batch, scope, release = self.batch, scope_of(strong), bool(strong & ORDERS)
        for i, place in enumerate(offset.tolist()):
            lane = i if lanes is None else int(lanes[i])
            row, warp = int(batch.row_of[lane]), int(batch.warp[lane])
            clocks = self.fenced.get((row, warp), {})
            if release:
                releasing_lanes = np.array([lane]) if represented_lanes is None else represented_lanes
                clocks = clocks_up_to(scope, self.clocks.present(row, warp, releasing_lanes))
            moment = Moment(row, warp, self.launch.tick, site)
            pair = None if values is None or not self.active else (values[0][i], values[1][i])
            self.flags.write(place, self._side(row), scope, moment, clocks, release=release, keep=keep, values=pair)
        if release:
            self.launch.tick += 1

    # --- fences ---

    def fence(self, m: Mask, scope: Scope, acquire: bool, release: bool, sequential: bool, restricted: bool) -> None:
        """A fence by the lanes of ``m``. ``release``: flags that are written later publish what the warps did before
        the fence. ``acquire``: the warps acquire the clocks that they have read. ``restricted``: both only for shared
        memory. ``sequential``: it is a fence.sc."""
        if not self.hazards:
            return
        mask = self.batch.running(m)
        warps = self.clocks.warps_in(mask) if self.flags_are_read else np.zeros((0, 0), bool)
        for row, warp in np.argwhere(warps).tolist():
            key = row, warp
            pending = self.learned.get(key, {}) if acquire else {}
            # The part of a clock that a restricted fence leaves out remains pending for another fence.
            for clock in self.flags.take(dict(pending) if restricted else pending, scope):
                self._acquire(row, warp, self.clocks.in_shared(clock) if restricted else clock)
            if release:
                first = row * self.batch.width + 32 * warp
                present = self.clocks.present(row, warp, first + np.flatnonzero(mask[first : first + 32]))
                clocks = clocks_up_to(scope, self.clocks.in_shared(present) if restricted else present)
                self.fenced[key] = self.flags.merged(self.fenced.get(key, {}), clocks)
                if sequential and self.observed:
                    cluster = row // self.batch.cluster_size
                    before = self.before_fences.get(cluster, present)
                    self.before_fences[cluster] = np.maximum(before, present)
        self.launch.tick += 1

    def fenced_by(self, lanes: Array, scope: Scope) -> Array | None:
        """The clock that the warps of these lanes have fenced at a scope; None if there is none."""
        keys = {(int(self.batch.row_of[lane]), int(self.batch.warp[lane])) for lane in lanes}
        clocks = [self.fenced[key][scope] for key in keys if scope in self.fenced.get(key, ())]
        return np.asarray(np.maximum.reduce(clocks)) if clocks else None

    def learn(self, lanes: Array, scope: Scope, clock: Array) -> None:
        """The warps of these lanes have read a clock by a relaxed access: their next fence of the scope acquires it."""
        for key in {(int(self.batch.row_of[lane]), int(self.batch.warp[lane])) for lane in lanes}:
            self.learned[key] = self.flags.merged(self.learned.get(key, {}), {scope: clock})
