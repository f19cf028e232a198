"""Tracks which accesses happen before which between CTAs, through fences and strong accesses to global memory.

Time is one counter per launch, the *tick*. Every synchronisation advances it, and accesses do not. An access leaves a
tag (tick, thread) at its granules. It happens before a later access of another thread if and only if that thread has
learned, by synchronisation, a tick of the first thread that is larger than the tag's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kernelproof.emulator.memory.chains import BARRIER, Chains, Clock, KnownRows, merged
from kernelproof.emulator.memory.flags import (
    Flags,
    Moment,
    Seen,
    SequentialFence,
    Side,
    Write,
    clocks_up_to,
    distinct,
    latest_of,
    merged_by_key,
)
from kernelproof.emulator.state.arrays import Array, runs_of
from kernelproof.emulator.state.scopes import SCOPES, Scope


def merged_by_scope(a: dict[Scope, Clock], b: dict[Scope, Clock]) -> dict[Scope, Clock]:
    """The union of clocks, scope by scope. Clocks that several scopes share are merged once."""
    return merged_by_key(a, b, merged)


def latest(a: SequentialFence[Clock] | None, b: SequentialFence[Clock] | None) -> SequentialFence[Clock] | None:
    """The later of two fence.sc, either of which may be missing."""
    return b if a is None else a if b is None or b.number <= a.number else b


@dataclass(slots=True)
class WarpView:
    """What a warp knows of other CTAs.

    - ``acquired``: the clock of what happens before its next access.
    - ``pending``: scope -> a clock that it has read from flags; it happens before what follows the next fence.
    - ``published``: scope -> the clock that its next relaxed write of a flag publishes.
    - ``last_fence``: the last fence.sc that it comes after.
    - ``found``: (place, whether the read acquires) -> a write that it has read, whose clocks are not yet merged.
    - ``version``: changes whenever any of these does.
    - ``shared``: whether warps of a CTA that have met at a barrier share this object, which then never changes.
    """

    acquired: Clock = field(default_factory=dict)
    pending: dict[Scope, Clock] = field(default_factory=dict)
    published: dict[Scope, Clock] = field(default_factory=dict)
    last_fence: SequentialFence[Clock] | None = None
    found: dict[tuple[int, bool], tuple[Write[Clock], Side, Scope]] = field(default_factory=dict)
    version: int = 0
    shared: bool = False

    def shares(self, other: WarpView) -> bool:
        """Are the clocks of two warps the same objects?"""
        return (
            self.acquired is other.acquired
            and self.pending is other.pending
            and self.published is other.published
            and self.last_fence is other.last_fence
        )

    def copy(self) -> WarpView:
        """The same knowledge, for one warp."""
        return WarpView(self.acquired, self.pending, self.published, self.last_fence)

    def joined(self, other: WarpView) -> WarpView:
        """The union of what two warps know."""
        return WarpView(
            merged(self.acquired, other.acquired),
            merged_by_scope(self.pending, other.pending),
            merged_by_scope(self.published, other.published),
            latest(self.last_fence, other.last_fence),
        )


class GlobalOrder:
    """Happens-before between CTAs by release and acquire patterns on global memory.

    A relaxed write of a flag publishes accesses before a fence of its warp, or before a fence of threads that met the
    warp at a barrier afterwards. A release publishes all accesses before it. The clock that a relaxed read finds orders
    weak accesses only after a fence. ``active`` is False until the first fence or release, so other kernels cost
    nothing.

    Every fence.sc synchronises with those after it (PTX ISA, "Fence-SC order"), but a program cannot tell in which
    order they come. So they order no accesses here. They only bound how old the value may be that a load returns.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.warps = -(-threads // 32)
        self.active = False
        self.chains = Chains(threads)
        self.views: dict[tuple[int, int], WarpView] = {}
        # CTAs whose warps all know the same: these have met at a barrier, and since then no warp has read a flag or
        # executed a fence.
        self._synchronised: set[int] = set()
        # CTA -> per scope (from CTA on, so row ``scope - 1``) and thread, the tick before which the thread's accesses
        # are fenced at that scope.
        self.fenced: dict[int, Array] = {}
        self.flags: Flags[Clock] = Flags(merged)
        # The last fence.sc, with the clock of what comes before it.
        self._last_fence: SequentialFence[Clock] = SequentialFence(0, {})
        self._versions = 0

    def view(self, cta: int, warp: int) -> WarpView:
        """What a warp knows, after the clocks of the writes that it has read are merged."""
        out = self._view(cta, warp)
        if out.found:
            for (_, acquires), (write, side, scope) in out.found.items():
                self._learn(out, self.flags.clocks(write, side, scope), acquires)
            out.found.clear()
        return out

    def _own_view(self, cta: int, warp: int) -> WarpView:
        """What a warp knows, as an object that may change; see ``_view``."""
        out = self._view(cta, warp)
        if out.shared:
            out = self.views[cta, warp] = out.copy()
        self._versions += 1
        out.version = self._versions
        return out

    def _view(self, cta: int, warp: int) -> WarpView:
        """What a warp knows, with writes in ``found`` that are not merged yet."""
        key = (cta, warp)
        out = self.views.get(key)
        if out is None:
            out = self.views[key] = WarpView()
        return out

    def _learn(self, view: WarpView, clocks: dict[Scope, Clock], acquires: bool) -> None:
        """Merge the clocks of a write that a warp has read."""
        if not acquires:
            view.pending = merged_by_scope(view.pending, clocks)
            return
        for clock in distinct(clocks.values()):
            view.acquired = merged(view.acquired, clock)

    def version(self, cta: int, warp: int) -> int:
        """A number that differs whenever a warp knows more of other CTAs."""
        view = self.views.get((cta, warp))
        return 0 if view is None else view.version

    def present(self, cta: int, warp: int, covered: Array) -> Clock:
        """The clock of what happens before a warp's next access. ``covered``: the row of a release by some of its
        lanes: per thread of the CTA, the tick before which accesses happen before the release. It must not change
        later."""
        self.active = True
        return self.chains.released(self.view(cta, warp).acquired, cta, warp, covered)

    def fence(
        self,
        cta: int,
        warp: int,
        lanes: Array,
        covered: Array,
        tick: int,
        scope: Scope,
        acquire: bool,
        release: bool,
        sequential: bool,
    ) -> None:
        """A fence by these lanes of a warp (bool), of their accesses before a tick. ``acquire``, ``release``: its
        directions. ``sequential``: it is a fence.sc, which bounds the age of values. ``covered``: see ``present``."""
        self.active = True
        self._synchronised.discard(cta)
        self.view(cta, warp)
        view = self._own_view(cta, warp)
        if acquire and view.pending:
            # Views of one CTA share ``pending`` after a barrier, so it is copied before it changes.
            view.pending = dict(view.pending)
            for clock in distinct(self.flags.take(view.pending, scope)):
                view.acquired = merged(view.acquired, clock)
        if not release:
            return
        present = self.present(cta, warp, covered)
        view.published = merged_by_scope(view.published, clocks_up_to(scope, present))
        fenced = self.fenced.get(cta)
        if fenced is None:
            fenced = self.fenced[cta] = np.zeros((len(SCOPES), self.threads), np.int64)
        fenced[:scope, 32 * warp : 32 * warp + 32][:, lanes] = tick
        if sequential:
            self._last_fence = view.last_fence = SequentialFence(
                self._last_fence.number + 1, merged(self._last_fence.clock, present)
            )

    def known_to(self, cta: int, warps: Iterable[int], threads: Array) -> WarpView:
        """The union of what these warps of a CTA know, and of what these ``threads`` of them have fenced."""
        # Warps that have met at a barrier and learned nothing since share their clocks, which are merged once.
        views: list[WarpView] = []
        for warp in warps:
            view = self.views.get((cta, warp))
            if view is None:
                continue
            if view.found:
                self.view(cta, warp)
            if not views or not (view is views[-1] or view.shares(views[-1])):
                views.append(view)
        out = views[0].copy() if views else WarpView()
        for view in views[1:]:
            out = out.joined(view)
        fenced = self.fenced.get(cta)
        if fenced is None:
            return out
        clocks: dict[Scope, Clock] = {}
        last_row = b""
        for scope in SCOPES:
            row = np.zeros(self.threads, np.int64)
            row[threads] = fenced[scope - 1, threads]
            if row.tobytes() != last_row:
                last_row, clock = row.tobytes(), self.chains.released({}, cta, BARRIER, row)
            clocks[scope] = clock
        out.published = merged_by_scope(out.published, clocks)
        return out

    def unsynchronised(self, ctas: Array) -> list[int]:
        """Those of ``ctas`` whose warps may know different things."""
        return [cta for cta in ctas.tolist() if cta not in self._synchronised] if self.active else []

    def barrier(
        self, cta: int, warps: Iterable[int], waiting: Sequence[int], threads: Array, released: WarpView | None = None
    ) -> None:
        """These warps of a CTA have met at a barrier, with these ``threads``. The warps that were ``waiting`` now know
        what any of the warps knew, and their relaxed writes publish what any of the threads has fenced. ``released``:
        the same knowledge of threads that arrived and did not wait."""
        if not self.active or (cta in self._synchronised and released is None):
            return
        if self.flags.seen:
            seen: Seen = {}
            for warp in warps:
                seen = latest_of(seen, self.flags.seen.get((cta, warp), {}))
            self.flags.seen.update({(cta, warp): seen for warp in waiting})
        known = self.known_to(cta, warps, threads)
        if released is not None:
            known = known.joined(released)
        if known.acquired or known.pending or known.published:
            self._versions += 1
            known.version, known.shared = self._versions, True
            for warp in waiting:
                self.views[(cta, warp)] = known
        if len(waiting) == self.warps:
            self._synchronised.add(cta)

    def write_flag(
        self,
        place: int,
        side: Side,
        moment: Moment,
        scope: Scope,
        keep: bool,
        clock: Clock | None,
        values: tuple[np.generic, np.generic] | None,
    ) -> None:
        """Note a strong write. ``keep``: it is a read-modify-write, which continues the release sequence. ``clock``:
        the clock that it releases; None if it is relaxed and publishes what the warp has fenced. ``values``: see
        ``Flags.write``."""
        if self.active:
            view = self._view(moment.cta, moment.warp)
            clocks = view.published if clock is None else clocks_up_to(scope, clock)
            self.flags.write(
                place, side, scope, moment, clocks,
                release=clock is not None, keep=keep, values=values, last_fence=view.last_fence,
            )  # fmt: skip

    def read_flag(
        self, place: int, side: Side, warp: int, scope: Scope, acquire: bool, write: Write[Clock] | None = None
    ) -> None:
        """Note a strong read: an acquire learns the flag's clocks directly, a relaxed read at the next fence.
        ``write``: the one whose value it returns; None for the last one."""
        if write is None:
            history = self.flags.places.get(place)
            if history is None:
                return
            write = history.last
        if not write.own and write.before is None and write.last_fence is None:
            return
        self._synchronised.discard(side.cta)
        view = self._own_view(side.cta, warp)
        view.last_fence = latest(view.last_fence, write.last_fence)
        old = view.found.get((place, acquire))
        if old is not None and (old[1:] != (side, scope) or not write.continues(old[0])):
            self._learn(view, self.flags.clocks(*old), acquire)
        view.found[place, acquire] = write, side, scope

    def bounds(self, cta: int, warp: int, cumulative: bool) -> list[Clock]:
        """The clocks of the writes that a warp's loads must not miss, which includes what its last fence.sc comes
        after. ``cumulative``: clocks that it has read from flags count even without a fence."""
        view = self.views.get((cta, warp))
        if view is None:
            return []
        if view.found:
            view = self.view(cta, warp)
        clocks = [view.acquired, *([] if view.last_fence is None else [view.last_fence.clock])]
        if cumulative:
            clocks += distinct(view.pending.values())
        return [clock for clock in clocks if clock]

    def ordered(self, cta: Array, warp: Array, other: Array, thread: Array, tick: Array, strong: bool) -> Array:
        """Per element: does the access by (CTA ``other``, ``thread``) at ``tick`` happen before the next access of
        ``warp`` of ``cta``? If that next access is ``strong``, clocks that the warp has read from flags count even
        without a fence (cumulativity)."""
        if len(tick) == 1:
            clock = self._clock_of(int(cta[0]), int(warp[0]), strong)
            known_rows = self.chains.known_rows(clock, int(other[0]))
            return np.array([bool(known_rows) and bool(self.chains.row(known_rows)[thread[0]] > tick[0])])
        numbers, known = self._known(cta, warp, other, strong)
        return np.asarray(self._look_up([self.chains.row(chains) for chains in known], numbers, thread) > tick)

    def horizons_of_warps(self, cta: Array, warp: Array, other: Array, strong: bool) -> Array:
        """The ticks before which all accesses of each warp of CTA ``other`` happen before the next access of ``warp``
        of ``cta``, shape (elements, warps). ``strong``: see ``ordered``."""
        numbers, known = self._known(cta, warp, other, strong)
        # An element of which nothing is known has number -1, which is the last row.
        nothing = np.zeros(self.warps, np.int64)
        return np.stack([*(self.chains.least(chains) for chains in known), nothing])[numbers]

    def _known(self, cta: Array, warp: Array, other: Array, strong: bool) -> tuple[Array, list[KnownRows]]:
        """Per element: what ``warp`` of ``cta`` knows of CTA ``other``, as an index into the list that is also returned
        (-1: nothing). ``strong``: see ``ordered``."""
        # Neighbouring elements mostly have the same reader and the same other CTA, so these are looked up once per run.
        # If all warps of a CTA know the same, its first one stands for all.
        starts, lengths = runs_of(cta)
        differ = np.repeat([number not in self._synchronised for number in cta[starts].tolist()], lengths)
        reader = cta * self.warps + warp * differ
        starts, lengths = runs_of(reader, other)
        number_of: dict[KnownRows, int] = {(): -1}
        numbers = []
        clocks: dict[int, Clock] = {}
        for warp_number, other_cta in zip(reader[starts].tolist(), other[starts].tolist(), strict=True):
            clock = clocks.get(warp_number)
            if clock is None:
                clock = clocks[warp_number] = self._clock_of(
                    warp_number // self.warps, warp_number % self.warps, strong
                )
            numbers.append(number_of.setdefault(self.chains.known_rows(clock, other_cta), len(number_of) - 1))
        del number_of[()]
        return np.repeat(numbers, lengths), list(number_of)

    @staticmethod
    def _look_up(rows: list[Array], numbers: Array, columns: Array) -> Array:
        """Look up ``rows[number][column]`` for each element. An element of number -1 has no row and gets 0."""
        out = np.zeros(len(numbers), np.int64)
        if rows:
            known = np.flatnonzero(numbers >= 0)
            out[known] = np.stack(rows)[numbers[known], columns[known]]
        return out

    def covers(self, cta: int, warp: int, other_warp: int, tick: int) -> bool:
        """Does an access by some thread of another warp of the same CTA at a tick happen before a warp's next
        access?"""
        return self.chains.covers(self._clock_of(cta, warp, False), cta, other_warp, tick)

    def _clock_of(self, cta: int, warp: int, strong: bool) -> Clock:
        """The clock of what happens before a warp's next access, which is strong if ``strong``."""
        view = self.views.get((cta, warp))
        if view is None:
            return {}
        if view.found:
            view = self.view(cta, warp)
        clock = view.acquired
        for pending in view.pending.values() if strong else ():
            clock = merged(clock, pending)
        return clock
