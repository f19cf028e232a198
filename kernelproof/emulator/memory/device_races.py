"""Decides which accesses to global memory race: those whose tagged predecessor does not happen before them."""

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

# The most horizons that are cached.
MAX_KEPT = 256


class DeviceRaces:
    """Decides whether tagged accesses to global memory happen before what lanes of a batch do now."""

    def __init__(self, batch: BatchState, clocks: WarpClocks, state: DeviceState) -> None:
        self.batch, self.clocks, self.state, self.launch = batch, clocks, state, batch.launch
        # The last lanes of ``_warps_of``, and their warps.
        self._last_warps: tuple[Array, Array] = batch.everyone, batch.everyone >> 5
        # (Warps, other warps, whether strong accesses count) -> for each pair the tick before which accesses of the
        # other warp happen before the warp's present. Clocks only grow, so these remain lower bounds.
        self._horizons: dict[tuple[bytes, bytes, bool], Array] = {}

    def racing_lanes(
        self,
        lanes: Array | None,
        tags: Array,
        strong: int,
        reads: bool,
        origin: TagOrigin,
        reported: Array | None = None,
    ) -> Array | None:
        """A mask of the lanes (None: all) whose access races with the one that left their tag; None if none races.
        ``tags``: one per lane. ``strong``: the strength of the lanes' access. ``reads``: the tags are of
        reads. ``origin``: that of the tags. ``reported``: lanes that are left out."""
        # The tests are in order of cost, and each leaves fewer lanes. Most granules were accessed by the lane itself
        # only, or not at all, which is tag 0. Accesses of others are mostly ordered, which clocks of warps show.
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
        undecided = bad.nonzero()[0]
        if not undecided.size:
            return None
        cumulative = strong > 0 and not strong & CHECKED
        ordered = self._ordered(undecided if lanes is None else lanes[undecided], tags[undecided], cumulative, reads)
        bad[undecided[ordered]] = False
        return None if ordered.all() else bad

    def _warps_of(self, lanes: Array | None) -> Array:
        """The warps of lanes (None: all), counted over the batch. The last result is kept, since arrays of lanes never
        change in place."""
        if lanes is None:
            lanes = self.batch.everyone
        if self._last_warps[0] is not lanes:
            self._last_warps = lanes, lanes >> 5
        return self._last_warps[1]

    def _ordered(self, lanes: Array, tags: Array, strong: bool, reads: bool) -> Array:
        """Per element: does the tagged access (a read, if ``reads``) happen before the lane's next access, which is
        strong if ``strong``?"""
        # Neighbouring lanes mostly find tags of one warp and one moment, so warps are compared first.
        starts, lengths = runs_of(lanes >> 5, tags >> 5)
        if 4 * len(starts) > len(tags):
            return self._threads_ordered(lanes, tags, strong, reads)
        out = self._warps_ordered(lanes[starts], tags[starts], strong, reads).repeat(lengths)
        undecided = np.flatnonzero(~out)
        if undecided.size:
            out[undecided] = self._threads_ordered(lanes[undecided], tags[undecided], strong, reads)
        return out

    def _warps_ordered(self, lanes: Array, tags: Array, strong: bool, reads: bool) -> Array:
        """``_ordered`` for all accesses at that moment by the tagged access's warp. False means that it is not
        known."""
        batch, tick = self.batch, tags >> TICK_SHIFT
        others = (tags & THREAD) >> 5
        key = (lanes >> 5).tobytes(), others.tobytes(), strong
        cached = self._horizons.get(key)
        if cached is not None and (tick < cached).all():
            return np.ones(len(tick), bool)
        if len(self._horizons) >= MAX_KEPT:
            self._horizons.clear()
        row, warp = batch.row_of[lanes], batch.warp[lanes]
        own_cta, cta, other = batch.ctas[row], others // batch.warps_per_cta, others % batch.warps_per_cta
        horizon = self._horizons[key] = np.zeros(len(tick), np.int64)
        in_own_cta = cta == own_cta
        if in_own_cta.any():
            horizon[in_own_cta] = self.clocks.horizon(row[in_own_cta], warp[in_own_cta], other[in_own_cta], True)
        of_other_ctas = np.flatnonzero(~in_own_cta) if self.state.order.active else ()
        if len(of_other_ctas):
            horizon[of_other_ctas] = self.state.order.horizon_of_warps(
                own_cta[of_other_ctas], warp[of_other_ctas], cta[of_other_ctas], other[of_other_ctas], strong
            )
        out: Array = (tick < horizon) | (tags == 0)
        if batch.cluster_size > 1:
            self._add_cluster_order(out, row, warp, cta, other, tick, reads)
        return out

    def _threads_ordered(self, lanes: Array, tags: Array, strong: bool, reads: bool) -> Array:
        """``_ordered``, element by element. It tries three kinds of order, each for the elements that remain: clocks of
        warps within a CTA, clocks within a cluster, and fences and flags across the grid."""
        batch = self.batch
        thread, tick = tags & THREAD, tags >> TICK_SHIFT
        row, warp = batch.row_of[lanes], batch.warp[lanes]
        own_cta, cta, local = batch.ctas[row], thread // batch.width, thread % batch.width
        out = cta == own_cta
        in_own_cta = np.flatnonzero(out)
        if in_own_cta.size:
            out[in_own_cta] = self.clocks.covers(row[in_own_cta], warp[in_own_cta], local[in_own_cta], tick[in_own_cta])
        if batch.cluster_size > 1:
            self._add_cluster_order(out, row, warp, cta, local >> 5, tick, reads)
        undecided = np.flatnonzero(~out) if self.state.order.active else ()
        if len(undecided):
            out[undecided] = self.state.order.ordered(
                own_cta[undecided], warp[undecided], cta[undecided], local[undecided], tick[undecided], strong
            )
        return np.asarray(out)

    def _add_cluster_order(
        self, out: Array, row: Array, warp: Array, cta: Array, other: Array, tick: Array, reads: bool
    ) -> None:
        """Set the elements of ``out`` for which a cluster's clocks say that the access of warp ``other`` of ``cta`` at
        a tick happens before the present of warp ``warp`` of ``row``."""
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
        """A mask of the tagged accesses that are strong with a scope which includes the lane, if the lane's scope also
        includes them."""
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
