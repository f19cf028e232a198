"""What can go wrong: the report, its collection, and the happens-before order of a launch.

Time is one counter per launch, the *tick*: it advances at every synchronisation, never at an access. An access leaves a
tag (tick, thread) on the words that it touched. It is ordered before a later access of another thread iff that thread
has learned, through synchronisation, of a tick of the first thread that is greater than the tag's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class EmulatorError(Exception):
    """The machine cannot go on: an unknown instruction, a missing kernel, a wrong argument."""


@dataclass(slots=True)
class Report:
    """One finding. Repetitions at the same instruction are counted in ``count``, the rest describes the first.

    ``kind`` is one of: ``global-out-of-bounds``, ``global-misaligned``, ``shared-out-of-bounds``,
    ``shared-misaligned``, ``local-out-of-bounds``, ``uninitialised-shared``, ``uninitialised-global``, ``in-flight``
    (data of an asynchronous copy touched before its wait, or a CTA that exits under one), ``shared-race``,
    ``global-race``, ``unwritten-output``, ``outside-region``, ``input-modified``, ``barrier-divergence``,
    ``deadlock``, ``warp-divergence``, ``trap``, ``runaway``, ``launch-error``; of sm_90: ``mbarrier`` (misused, or
    not visibly initialised), ``proxy-fence`` (fence.proxy.async missing), ``wgmma-registers`` (accumulators in
    flight, wgmma.fence missing), ``cluster`` (a peer's shared memory before its start or after its end),
    ``tensor-map``, ``registers`` (setmaxnreg), ``grid-dependency`` (global memory before griddepcontrol.wait).
    ``line`` and ``text`` are the PTX instruction, ``source`` the CUDA line (if compiled with ``-lineinfo``), ``cta``
    (x, y, z), ``threads`` linear thread numbers, ``address`` a byte offset (shared) or a device address (global).
    """

    kind: str
    message: str
    kernel: str = ""
    line: int = 0
    text: str = ""
    source: str = ""
    cta: tuple[int, int, int] | None = None
    threads: tuple[int, ...] = ()
    address: int | None = None
    count: int = 1

    def __str__(self) -> str:
        where = f" [{self.source}]" if self.source else ""
        ptx = f" at PTX line {self.line}: {self.text}" if self.line else ""
        who = ""
        if self.cta is not None:
            shown = ", ".join(map(str, self.threads[:8])) + (", ..." if len(self.threads) > 8 else "")
            who = f" (CTA {self.cta}" + (f", threads {shown}" if shown else "") + ")"
        times = f" x{self.count}" if self.count > 1 else ""
        return f"{self.kind}: {self.message}{who}{ptx}{where}{times}"


@dataclass(slots=True)
class Site:
    """Where an access comes from, for reports."""

    line: int
    text: str
    source: str


class Reports:
    """Findings of a launch, one per (kind, instruction)."""

    LIMIT = 200

    def __init__(self, kernel: str, sites: list[Site]) -> None:
        self.kernel, self.sites = kernel, sites
        self.found: dict[tuple[Any, ...], Report] = {}
        # Findings that only matter if the value read reaches an output.
        self.doubtful: set[tuple[Any, ...]] = set()

    def add(
        self,
        kind: str,
        message: str,
        site: int | None = None,
        cta: tuple[int, int, int] | None = None,
        threads: Iterable[int] = (),
        address: int | None = None,
        count: int = 1,
        doubtful: bool = False,
    ) -> None:
        key = (kind, site, None if site is not None else message)
        if not doubtful:
            self.doubtful.discard(key)
        elif key not in self.found:
            self.doubtful.add(key)
        old = self.found.get(key)
        if old is not None:
            old.count += count
            return
        if len(self.found) >= self.LIMIT:
            return
        at = self.sites[site] if site is not None else Site(0, "", "")
        self.found[key] = Report(
            kind, message, self.kernel, at.line, at.text, at.source, cta, tuple(threads), address, count
        )

    def acquit(self) -> None:
        """Drop the doubtful findings."""
        for key in self.doubtful:
            self.found.pop(key, None)
        self.doubtful.clear()

    def list(self) -> list[Report]:
        return sorted(self.found.values(), key=lambda r: r.line)


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
    """What one warp knows of other CTAs: ``seen`` is ordered before it, ``pending`` was read from a flag without a
    fence yet, ``published`` is what its next relaxed write of a flag makes known."""

    seen: Clock = field(default_factory=dict)
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

    def fence(self, cta: int, warp: int, lanes: Array, known: Array, tick: int) -> None:
        """``lanes``: thread numbers in the CTA; ``known``: per thread, what the CTA's barriers order before this
        warp."""
        self.active = True
        view = self.view(cta, warp)
        view.seen = merged(view.seen, view.pending)
        view.pending = {}
        row = known.copy()
        row[lanes] = tick + 1
        view.published = merged(merged(view.published, view.seen), {cta: row})
        fenced = self.fenced.get(cta)
        if fenced is None:
            fenced = self.fenced[cta] = np.zeros(self.threads, np.int64)
        fenced[lanes] = tick + 1

    def barrier(self, cta: int, warps: Iterable[int], threads: Array) -> None:
        """The given warps of a CTA have met; ``threads`` are the participants."""
        if not self.active:
            return
        seen: Clock = {}
        pending: Clock = {}
        published: Clock = {}
        warps = list(warps)
        any_view = False
        for warp in warps:
            old = self.views.get((cta, warp))
            if old is not None:
                any_view = True
                seen, pending = merged(seen, old.seen), merged(pending, old.pending)
                published = merged(published, old.published)
        fenced = self.fenced.get(cta)
        if fenced is not None:
            row = np.zeros(self.threads, np.int64)
            row[threads] = fenced[threads]
            published = merged(published, {cta: row})
        elif not any_view:
            return
        for warp in warps:
            self.views[(cta, warp)] = WarpView(seen, pending, published)

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
                view.seen = merged(view.seen, clock)
            else:
                view.pending = merged(view.pending, clock)

    def ordered(self, cta: int, warp: int, other: Array, thread: Array, tick: Array, strong: bool) -> Array:
        """Per element: is the access of (CTA ``other``, ``thread``) at ``tick`` ordered before this warp's present?"""
        out = np.zeros(len(tick), bool)
        view = self.views.get((cta, warp))
        if view is None:
            return out
        clock = merged(view.seen, view.pending) if strong else view.seen
        for source in np.unique(other):
            row = clock.get(int(source))
            if row is not None:
                sel = other == source
                out[sel] = row[thread[sel]] > tick[sel]
        return out
