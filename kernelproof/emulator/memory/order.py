"""Happens-before between CTAs, through fences and atomics on global memory.

Time is one counter per launch, the *tick*: every synchronisation advances it, no access does. An access leaves a tag
(tick, thread) on the words that it touches. It happens before a later access of another thread iff that thread has
learned, through synchronisation, a tick of the first thread that is greater than the tag's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kernelproof.emulator.memory.flags import Flags, Side, up_to
from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.scopes import SCOPES, Scope

Clock = dict[int, Array]  # CTA -> per thread, the tick before which its accesses are known to have happened


def merged(a: Clock, b: Clock) -> Clock:
    """The union of two clocks. Neither is changed, and rows are shared where possible."""
    if not b or a is b:
        return a
    if not a:
        return b
    out = dict(a)
    for cta, row in b.items():
        own = out.get(cta)
        out[cta] = row if own is None else own if own is row else np.maximum(own, row)
    return out


def merged_by_scope(a: dict[Scope, Clock], b: dict[Scope, Clock]) -> dict[Scope, Clock]:
    """The union of clocks, scope by scope."""
    if not a or not b:
        return a or b
    return a | {scope: merged(a[scope], clock) if scope in a else clock for scope, clock in b.items()}


@dataclass(slots=True)
class WarpView:
    """What one warp knows of other CTAs. ``acquired`` happens before its present. By scope: ``pending`` was read from
    flags and comes into force with the next fence; ``published`` is what the warp's next relaxed write of a flag
    publishes."""

    acquired: Clock = field(default_factory=dict)
    pending: dict[Scope, Clock] = field(default_factory=dict)
    published: dict[Scope, Clock] = field(default_factory=dict)

    def joined(self, other: WarpView) -> WarpView:
        """What two warps know, taken together."""
        return WarpView(
            merged(self.acquired, other.acquired),
            merged_by_scope(self.pending, other.pending),
            merged_by_scope(self.published, other.published),
        )


class GlobalOrder:
    """Happens-before between CTAs by release and acquire patterns on global memory.

    A relaxed write of a flag publishes what its warp has fenced, or what threads fenced that met the warp at a barrier
    afterwards. A release publishes everything that precedes it. What a relaxed read finds counts for weak accesses only
    after a fence. ``active`` stays False until the first fence or release, so other kernels pay nothing.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.warps = -(-threads // 32)
        self.active = False
        self.views: dict[tuple[int, int], WarpView] = {}
        # By CTA and scope, per thread: the tick before which its accesses are fenced.
        self.fenced: dict[tuple[int, Scope], Array] = {}
        self.flags: Flags[Clock] = Flags(merged)

    def view(self, cta: int, warp: int) -> WarpView:
        key = (cta, warp)
        out = self.views.get(key)
        if out is None:
            out = self.views[key] = WarpView()
        return out

    def present(self, cta: int, warp: int, lanes: Array, horizon: Array, tick: int) -> Clock:
        """The clock of what happens before a warp's present. ``lanes``: thread numbers in the CTA; ``horizon``: per
        thread, what the CTA's own clocks order before this warp. Accesses of the present tick are included."""
        self.active = True
        row = horizon.copy()
        # Accesses of the present tick are part of what is released.
        row[lanes] = tick + 1
        return merged(self.view(cta, warp).acquired, {cta: row})

    def fence(
        self,
        cta: int,
        warp: int,
        lanes: Array,
        horizon: Array,
        tick: int,
        scope: Scope,
        acquire: bool,
        release: bool,
    ) -> None:
        """A fence by a warp. ``acquire``, ``release``: its directions; other arguments: see ``present``."""
        self.active = True
        view = self.view(cta, warp)
        # Views of one CTA share ``pending`` after a barrier, so it is copied before it changes.
        view.pending = dict(view.pending)
        for clock in self.flags.take(view.pending, scope) if acquire else ():
            view.acquired = merged(view.acquired, clock)
        if not release:
            return
        clocks = up_to(scope, self.present(cta, warp, lanes, horizon, tick))
        view.published = merged_by_scope(view.published, clocks)
        for each in clocks:
            self.fenced.setdefault((cta, each), np.zeros(self.threads, np.int64))[lanes] = tick + 1

    def known_to(self, cta: int, warps: Iterable[int], threads: Array) -> WarpView:
        """What these warps of a CTA know, taken together, with what these ``threads`` of them have fenced."""
        out = WarpView()
        for warp in warps:
            old = self.views.get((cta, warp))
            if old is not None:
                out = out.joined(old)
        for scope in SCOPES:
            fenced = self.fenced.get((cta, scope))
            if fenced is not None:
                row = np.zeros(self.threads, np.int64)
                row[threads] = fenced[threads]
                out.published = merged_by_scope(out.published, {scope: {cta: row}})
        return out

    def barrier(
        self, cta: int, warps: Iterable[int], waiting: Iterable[int], threads: Array, released: WarpView | None = None
    ) -> None:
        """These warps of a CTA have met at a barrier, with these ``threads``. From now on those that were ``waiting``
        know what any of them knew, and their relaxed writes publish what any of the threads has fenced. ``released``:
        the same of threads that arrived and went on."""
        if not self.active:
            return
        known = self.known_to(cta, warps, threads)
        if released is not None:
            known = known.joined(released)
        if known.acquired or known.pending or known.published:
            for warp in waiting:
                self.views[(cta, warp)] = WarpView(known.acquired, known.pending, known.published)

    def write_flag(self, place: int, side: Side, warp: int, scope: Scope, keep: bool, clock: Clock | None) -> None:
        """A strong write. ``keep``: it is a read-modify-write, which continues the release sequence. ``clock``: what it
        releases; None: it is relaxed and publishes what the warp has fenced."""
        if self.active:
            clocks = self.view(side.cta, warp).published if clock is None else up_to(scope, clock)
            self.flags.write(place, side, scope, clocks, keep)

    def read_flag(self, place: int, side: Side, warp: int, scope: Scope, acquire: bool) -> None:
        """A strong read: an acquire learns the flag's clocks at once, a relaxed read at the next fence."""
        clocks = self.flags.read(place, side, scope)
        if clocks:
            view = self.view(side.cta, warp)
            if acquire:
                for clock in clocks.values():
                    view.acquired = merged(view.acquired, clock)
            else:
                view.pending = merged_by_scope(view.pending, clocks)

    def ordered(self, cta: int, warp: int, other: Array, thread: Array, tick: Array, strong: bool) -> Array:
        """Per element: does the access by (CTA ``other``, ``thread``) at ``tick`` happen before this warp's present?
        ``strong``: a strong access also counts what the warp has read from flags without a fence (cumulativity)."""
        out = np.zeros(len(tick), bool)
        view = self.views.get((cta, warp))
        if view is None:
            return out
        clock = view.acquired
        if strong:
            for pending in view.pending.values():
                clock = merged(clock, pending)
        for source in np.unique(other):
            row = clock.get(int(source))
            if row is not None:
                sel = other == source
                out[sel] = row[thread[sel]] > tick[sel]
        return out
