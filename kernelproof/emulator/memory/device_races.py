"""Races in global memory: which of the accesses that lanes find tagged do not happen before what the lanes do now."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from kernelproof.emulator.memory.device_state import DeviceState
from kernelproof.emulator.memory.global_access import TagOrigin
from kernelproof.emulator.memory.tags import SCOPE, SCOPE_SHIFT, THREAD, TICK_SHIFT
from kernelproof.emulator.state.arrays import Array, runs_of
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.scopes import CHECKED, Scope, scope_of
from kernelproof.emulator.state.warp_clocks import WarpClocks

# Answers that are kept at most.
MAX_KEPT = 256


class DeviceRaces:
    """The order of accesses to global memory, as lanes of a batch ask for it."""

    def __init__(self, batch: BatchState, clocks: WarpClocks, state: DeviceState) -> None:
        self.batch, self.clocks, self.state, self.launch = batch, clocks, state, batch.launch
        # The lanes that were asked for last, and their warps.
        self._last_warps: tuple[Array, Array] = batch.everyone, batch.everyone >> 5
        # Warps, other warps, and whether strong accesses count -> per pair: the tick before which what the other warp
        # did is known to happen before the warp's present. The present goes on, so these are lower bounds.
        self._horizons: dict[tuple[bytes, bytes, bool], Array] = {}

    def among(
        self,
        lanes: Array | None,
        tags: Array,
        strong: int,
        reads: bool,
        origin: TagOrigin,
        reported: Array | None = None,
    ) -> Array | None:
        """Which lanes (of all, if None) race with tagged accesses, one of each lane? None: no lane. ``strong``: the
        strength of what the lanes do; ``reads``: the tags are of reads; ``origin``: theirs; ``reported``: lanes that do
        not count."""
        # The tests are in order of cost, and each leaves fewer lanes. Most lanes touch granules that only they have
        # touched; tag 0 means that nobody has. What others have touched is mostly known to come before, warp by warp.
        if not tags[0]:
            if not tags.any():
                return None
        elif not strong and int(tags[0]) & THREAD != self.batch.gthread[0 if lanes is None else lanes[0]]:
            starts, _ = runs_of(self._warps_of(lanes), tags >> 5)
            if 4 * len(starts) <= len(tags):
                first = starts if lanes is None else lanes[starts]
                if self._warps_ordered(first, tags[starts], False, reads).all():
                    return None
        thread = tags & THREAD
        bad = thread != (self.batch.gthread if lanes is None else self.batch.gthread[lanes])
        if not bad.any():
            return None
        bad &= tags != 0
        if reported is not None:
            bad &= ~reported
        if strong and not strong & CHECKED and bad.any():
            everyone = self.batch.everyone if lanes is None else lanes
            bad &= ~(self._morally_strong(everyone, tags, thread, scope_of(strong)) & origin.matches_size(strong))
        todo = bad.nonzero()[0]
        if not todo.size:
            return None
        cumulative = strong > 0 and not strong & CHECKED
        ordered = self._ordered(todo if lanes is None else lanes[todo], tags[todo], cumulative, reads)
        bad[todo[ordered]] = False
        return None if ordered.all() else bad

    def _warps_of(self, lanes: Array | None) -> Array:
        """The warps of lanes (None: all), counted over the batch. Arrays of lanes never change in place."""
        if lanes is None:
            lanes = self.batch.everyone
        if self._last_warps[0] is not lanes:
            self._last_warps = lanes, lanes >> 5
        return self._last_warps[1]

    def _ordered(self, lanes: Array, tags: Array, strong: bool, reads: bool) -> Array:
        """Per element: does the tagged access (``reads``: it read) happen before the lane's present? ``strong``: before
        its strong accesses."""
        # Neighbouring lanes mostly find what one warp did at one moment, so whole warps are compared first.
        starts, lengths = runs_of(lanes >> 5, tags >> 5)
        if 4 * len(starts) > len(tags):
            return self._threads_ordered(lanes, tags, strong, reads)
        out = self._warps_ordered(lanes[starts], tags[starts], strong, reads).repeat(lengths)
        left = np.flatnonzero(~out)
        if left.size:
            out[left] = self._threads_ordered(lanes[left], tags[left], strong, reads)
        return out

    def _warps_ordered(self, lanes: Array, tags: Array, strong: bool, reads: bool) -> Array:
        """``_ordered``, for all that the warp of a tagged access did at that moment. False is no answer."""
        batch, tick = self.batch, tags >> TICK_SHIFT
        others = (tags & THREAD) >> 5
        key = (lanes >> 5).tobytes(), others.tobytes(), strong
        # Clocks only grow, and neighbouring accesses ask for the same warps.
        known = self._horizons.get(key)
        if known is not None and (tick < known).all():
            return np.ones(len(tick), bool)
        if len(self._horizons) >= MAX_KEPT:
            self._horizons.clear()
        row, warp = batch.row_of[lanes], batch.warp[lanes]
        own, cta, other = batch.ctas[row], others // batch.warps_per_cta, others % batch.warps_per_cta
        horizon = self._horizons[key] = np.zeros(len(tick), np.int64)
        inside = cta == own
        if inside.any():
            horizon[inside] = self.clocks.horizon(row[inside], warp[inside], other[inside], True)
        left = np.flatnonzero(~inside) if self.state.order.active else ()
        if len(left):
            horizon[left] = self.state.order.horizon_of_warps(own[left], warp[left], cta[left], other[left], strong)
        out: Array = (tick < horizon) | (tags == 0)
        if batch.cluster_size > 1:
            self._ask_clusters(out, row, warp, cta, other, tick, reads)
        return out

    def _threads_ordered(self, lanes: Array, tags: Array, strong: bool, reads: bool) -> Array:
        """``_ordered``, element by element. Three steps, each for what the step before has not ordered: clocks of warps
        within a CTA, clocks within a cluster, and fences and flags across the grid."""
        batch = self.batch
        thread, tick = tags & THREAD, tags >> TICK_SHIFT
        row, warp = batch.row_of[lanes], batch.warp[lanes]
        own, cta, local = batch.ctas[row], thread // batch.width, thread % batch.width
        out = cta == own
        inside = np.flatnonzero(out)
        if inside.size:
            out[inside] = self.clocks.covers(row[inside], warp[inside], local[inside], tick[inside])
        if batch.cluster_size > 1:
            self._ask_clusters(out, row, warp, cta, local >> 5, tick, reads)
        left = np.flatnonzero(~out) if self.state.order.active else ()
        if len(left):
            out[left] = self.state.order.ordered(own[left], warp[left], cta[left], local[left], tick[left], strong)
        return np.asarray(out)

    def _ask_clusters(
        self, out: Array, row: Array, warp: Array, cta: Array, other: Array, tick: Array, reads: bool
    ) -> None:
        """Set the elements of ``out`` for which the clocks of a cluster say that what warp ``other`` of ``cta`` did at
        a tick happens before the present of a warp."""
        for i in np.flatnonzero(~out).tolist():
            of_cta = self._rows.get(int(cta[i]))
            if of_cta is not None:
                out[i] = self.clocks.ordered_in_cluster(
                    int(row[i]), int(warp[i]), of_cta, int(other[i]), int(tick[i]), reads
                )

    @cached_property
    def _rows(self) -> dict[int, int]:
        """CTA -> its row."""
        return {cta: row for row, cta in enumerate(self.batch.ctas.tolist())}

    def _morally_strong(self, lanes: Array, tags: Array, thread: Array, scope: Scope) -> Array:
        """Which tagged accesses are strong, with a scope that reaches the lane, while the lane's scope reaches them?"""
        # The narrower of the two scopes must include both threads. Scope 0 marks a weak access, which is never strong.
        # From GPU scope on every thread of the launch is included; narrower scopes depend on the two CTAs.
        reach = np.minimum(tags >> SCOPE_SHIFT & SCOPE, int(scope))
        out: Array = reach >= Scope.GPU
        narrow = np.flatnonzero((reach > 0) & ~out)
        if narrow.size:
            tagged, present = thread[narrow] // self.batch.width, self.batch.ctas[self.batch.row_of[lanes[narrow]]]
            pairs = zip(tagged.tolist(), present.tolist(), strict=True)
            out[narrow] = reach[narrow] >= np.array([self.launch.scope_of_both(a, b) for a, b in pairs])
        return out
