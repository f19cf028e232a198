"""Happens-before between CTAs, through fences and atomics on global memory.

Time is one counter per launch, the *tick*: it advances at every synchronisation, never at an access. An access leaves a
tag (tick, thread) on the words that it touched. It is ordered before a later access of another thread iff that thread
has learned, through synchronisation, of a tick of the first thread that is greater than the tag's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from cudal2gen.emulator.state.arrays import Array

Clock = dict[int, Array]  # CTA -> per thread, the tick before which its accesses are known


def merged(a: Clock, b: Clock) -> Clock:
    """The union of two clocks; neither is changed, rows are shared where possible."""
    if not b or a is b:
        return a
    if not a:
        return b
    out = dict(a)
    for cta, row in b.items():
        mine = out.get(cta)
        out[cta] = row if mine is None else mine if mine is row else np.maximum(mine, row)
    return out


@dataclass(slots=True)
class WarpView:
    """What one warp knows of other CTAs: ``acquired`` is ordered before it, ``pending`` was read from a flag without a
    fence yet, ``published`` is what its next relaxed write of a flag makes known."""

    acquired: Clock = field(default_factory=dict)
    pending: Clock = field(default_factory=dict)
    published: Clock = field(default_factory=dict)


class GlobalOrder:
    """Happens-before between CTAs through fences and atomics (release and acquire patterns) on global memory.

    A relaxed write of a flag publishes what was fenced, by the writer or, before a barrier, by the thread concerned. A
    release publishes all that precedes it. A relaxed read takes effect for weak loads only after a fence.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.warps = -(-threads // 32)
        self.active = False
        self.views: dict[tuple[int, int], WarpView] = {}
        self.fenced: dict[int, Array] = {}
        self.flags: dict[int, Clock] = {}

    def view(self, cta: int, warp: int) -> WarpView:
        key = (cta, warp)
        out = self.views.get(key)
        if out is None:
            out = self.views[key] = WarpView()
        return out

    def fence(self, cta: int, warp: int, lanes: Array, horizon: Array, tick: int) -> None:
        """``lanes``: thread numbers in the CTA; ``horizon``: per thread, what the CTA's barriers order before this
        warp."""
        self.active = True
        view = self.view(cta, warp)
        view.acquired = merged(view.acquired, view.pending)
        view.pending = {}
        row = horizon.copy()
        row[lanes] = tick + 1
        view.published = merged(merged(view.published, view.acquired), {cta: row})
        fenced = self.fenced.get(cta)
        if fenced is None:
            fenced = self.fenced[cta] = np.zeros(self.threads, np.int64)
        fenced[lanes] = tick + 1

    def barrier(self, cta: int, warps: Iterable[int], threads: Array) -> None:
        """These warps of a CTA have met; ``threads`` are the participants."""
        if not self.active:
            return
        acquired: Clock = {}
        pending: Clock = {}
        published: Clock = {}
        warps = list(warps)
        any_view = False
        for warp in warps:
            old = self.views.get((cta, warp))
            if old is not None:
                any_view = True
                acquired, pending = merged(acquired, old.acquired), merged(pending, old.pending)
                published = merged(published, old.published)
        fenced = self.fenced.get(cta)
        if fenced is not None:
            row = np.zeros(self.threads, np.int64)
            row[threads] = fenced[threads]
            published = merged(published, {cta: row})
        elif not any_view:
            return
        for warp in warps:
            self.views[(cta, warp)] = WarpView(acquired, pending, published)

    def write_flag(self, place: int, cta: int, warp: int, keep: bool) -> None:
        """A strong write (``keep``: read-modify-write, which continues the release sequence) at a location."""
        if self.active:
            published = self.view(cta, warp).published
            self.flags[place] = merged(self.flags.get(place, {}), published) if keep else published

    def read_flag(self, place: int, cta: int, warp: int, acquire: bool) -> None:
        clock = self.flags.get(place)
        if clock:
            view = self.view(cta, warp)
            if acquire:
                view.acquired = merged(view.acquired, clock)
            else:
                view.pending = merged(view.pending, clock)

    def ordered(self, cta: int, warp: int, other: Array, thread: Array, tick: Array, strong: bool) -> Array:
        """Per element: is the access of (CTA ``other``, ``thread``) at ``tick`` ordered before this warp's present?"""
        out = np.zeros(len(tick), bool)
        view = self.views.get((cta, warp))
        if view is None:
            return out
        clock = merged(view.acquired, view.pending) if strong else view.acquired
        for source in np.unique(other):
            row = clock.get(int(source))
            if row is not None:
                sel = other == source
                out[sel] = row[thread[sel]] > tick[sel]
        return out
