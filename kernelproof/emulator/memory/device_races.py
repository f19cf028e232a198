"""Decides which accesses to global memory race: those whose tagged predecessor does not happen before them."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from kernelproof.emulator.memory.device_state import DeviceState
from kernelproof.emulator.memory.global_access import TagOrigin
from kernelproof.emulator.memory.horizons import Horizons
from kernelproof.emulator.memory.tags import SCOPE, SCOPE_SHIFT, THREAD, TICK_SHIFT
from kernelproof.emulator.state.arrays import Array, runs_of
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.scopes import CHECKED, Scope, scope_of
from kernelproof.emulator.state.warp_clocks import WarpClocks

# Warps are compared before threads if the runs of lanes that have the same warps have this mean length or more.
MIN_RUN_LENGTH = 4


class DeviceRaces:
    """Decides whether tagged accesses to global memory happen before what lanes of a batch do now."""

    def __init__(self, batch: BatchState, clocks: WarpClocks, state: DeviceState) -> None:
        self.batch, self.clocks, self.state, self.launch = batch, clocks, state, batch.launch
        # The last lanes of ``_warps_of``, and their warps.
        self._last_warps: tuple[Array, Array] = batch.everyone, batch.everyone >> 5
        # What each warp of the batch knows of each warp of the launch, by whether its access is strong.
        self._horizons: dict[bool, Horizons] = {}

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
        reads. ``origin``: of which accesses the tags are. ``reported``: a mask of lanes that are left out, because
        their races were reported before."""
        # The tests are in order of cost, and each leaves fewer lanes. Most granules were accessed by the lane itself
        # only, or not at all, which is tag 0. Accesses of others are mostly ordered, which clocks of warps show.
        if not tags[0]:
            if not tags.any():
                return None
        elif not strong and not all(self._is_own(lanes, tags, i) for i in (0, -1)):
            starts, _ = runs_of(self._warps_of(lanes), tags >> 5)
            if MIN_RUN_LENGTH * len(starts) <= len(tags):
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

    def _is_own(self, lanes: Array | None, tags: Array, i: int) -> bool:
        """Whether the lane with the tag number ``i`` left this tag itself."""
        return int(tags[i]) & THREAD == int(self.batch.gthread[i if lanes is None else lanes[i]])

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
        if MIN_RUN_LENGTH * len(starts) > len(tags):
            return self._threads_ordered(lanes, tags, strong, reads)
        out = self._warps_ordered(lanes[starts], tags[starts], strong, reads).repeat(lengths)
        undecided = np.flatnonzero(~out)
        if undecided.size:
            out[undecided] = self._threads_ordered(lanes[undecided], tags[undecided], strong, reads)
        return out

    def _warps_ordered(self, lanes: Array, tags: Array, strong: bool, reads: bool) -> Array:
        """``_ordered`` for all accesses at that moment by the tagged access's warp. False means that it is not
        known."""
        tick, others = tags >> TICK_SHIFT, (tags & THREAD) >> 5
        horizons = self._horizons.get(strong)
        if horizons is None:
            horizons = self._horizons[strong] = Horizons()
        pairs = others * (self.batch.size >> 5) + (lanes >> 5)
        out: Array = horizons.known_before(pairs, tick) | (tags == 0)
        unknown = (~out).nonzero()[0]
        if unknown.size:
            self._learn(horizons, lanes[unknown], others[unknown], strong)
            out[unknown] = horizons.known_before(pairs[unknown], tick[unknown])
            if self.batch.cluster_size > 1:
                cta, other = np.divmod(others, self.batch.warps_per_cta)
                self._add_cluster_order(out, self.batch.row_of[lanes], self.batch.warp[lanes], cta, other, tick, reads)
        return out

    def _learn(self, horizons: Horizons, lanes: Array, others: Array, strong: bool) -> None:
        """Store what the warps of lanes know now of the warps ``others`` of the launch."""
        batch, all_warps = self.batch, self.batch.size >> 5
        row, warp, cta = batch.row_of[lanes], batch.warp[lanes], others // batch.warps_per_cta
        own_cta = batch.ctas[row]
        in_own_cta = cta == own_cta
        if in_own_cta.any():
            other = others[in_own_cta] % batch.warps_per_cta
            known = self.clocks.horizon(row[in_own_cta], warp[in_own_cta], other, True)
            horizons.put(others[in_own_cta] * all_warps + (lanes[in_own_cta] >> 5), known)
        of_other_ctas = np.flatnonzero(~in_own_cta) if self.state.order.active else ()
        if len(of_other_ctas):
            # All warps of the other CTA at once: the next access mostly asks for another one of them.
            first = of_other_ctas[runs_of(lanes[of_other_ctas] >> 5, cta[of_other_ctas])[0]]
            known = self.state.order.horizons_of_warps(own_cta[first], warp[first], cta[first], strong)
            others = cta[first, None] * batch.warps_per_cta + np.arange(batch.warps_per_cta)
            horizons.put((others * all_warps + (lanes[first, None] >> 5)).reshape(-1), known.reshape(-1))

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
            out[in_own_cta] = self.clocks.covers(lanes[in_own_cta], local[in_own_cta], tick[in_own_cta])
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
