"""Keeps the tags of global memory: the last accesses to each granule of a buffer in one launch.

As long as consecutive lanes access consecutive granules, accesses are stored as runs, one entry each. The first access
of another form expands them to one tag per granule. In most kernels one thread reads and writes each element, so runs
suffice.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.memory.places import Places, put
from kernelproof.emulator.state.arrays import Array

# A tag is tick << 34 | scope << 32 | thread of the launch. The scope is that of a strong access, 0 for a weak one; the
# tag 0 means untouched in this launch.
THREAD = (1 << 32) - 1
SCOPE_SHIFT, SCOPE = 32, 3
TICK_SHIFT = 34
# Stands for the tick of a write that is under way. No tick is larger, so the write is ordered before nothing.
UNDER_WAY = (1 << 29) - 1
# The most runs of a buffer. If there are more, its tags are stored granule by granule.
MAX_RUNS = 4096


class GranuleRun(NamedTuple):
    """Granules from ``start`` to before ``stop`` that threads from number ``thread`` on have accessed, ``per_thread``
    granules each. ``moment``: tick and scope of their tags."""

    start: int
    stop: int
    per_thread: int
    thread: int
    moment: int

    def repeats(self, other: GranuleRun) -> bool:
        """Do the same threads access the same granules in both runs?"""
        return self[:4] == other[:4]


class Runs:
    """Runs that have no granule in common, in ascending order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._runs: list[GranuleRun] = []

    def __bool__(self) -> bool:
        return bool(self._runs)

    def conflicts_with(self, run: GranuleRun) -> bool:
        """Have other threads accessed granules of this run, or are there too many runs to add another one?"""
        if len(self._runs) >= MAX_RUNS:
            return True
        index = bisect_left(self._starts, run.start)
        if index and self._runs[index - 1].stop > run.start:
            return True
        return index < len(self._runs) and self._starts[index] < run.stop and not self._runs[index].repeats(run)

    def put(self, run: GranuleRun) -> None:
        """Add a run that conflicts with no other. It replaces an earlier run of the same threads and granules."""
        index = bisect_left(self._starts, run.start)
        if index < len(self._runs) and self._starts[index] == run.start:
            self._runs[index] = run
        else:
            self._starts.insert(index, run.start)
            self._runs.insert(index, run)

    def refine(self, parts: int) -> None:
        """Split each granule into so many."""
        self._starts = [start * parts for start in self._starts]
        self._runs = [
            run._replace(start=run.start * parts, stop=run.stop * parts, per_thread=run.per_thread * parts)
            for run in self._runs
        ]

    def tags(self, granules: int) -> Array:
        """The tags of the runs, granule by granule."""
        out = np.zeros(granules, np.int64)
        for start, stop, per_thread, thread, moment in self._runs:
            stamp = np.arange(thread, thread + (stop - start) // per_thread) | moment
            for k in range(per_thread):
                out[start + k : stop : per_thread] = stamp
        return out


class EarlierReads:
    """For each granule a read before the last one, by another thread or CTA than the last reader's: its tag and, if
    instructions are recorded, its instruction plus one."""

    __slots__ = ("sites", "tags")

    def __init__(self, granules: int, recording: bool) -> None:
        self.tags: Array = np.zeros(granules, np.int64)
        self.sites: Array | None = np.zeros(granules, np.int32) if recording else None

    def refine(self, parts: int) -> None:
        """Split each granule into so many."""
        self.tags = self.tags.repeat(parts)
        self.sites = None if self.sites is None else self.sites.repeat(parts)


class Tags:
    """The tags of the last write and the last read of every granule of a buffer in this launch. If instructions are
    recorded, also the instruction of each (its number plus one; 0 for none).

    Accesses are stored as runs until an access is no run, or conflicts with a run of other threads. From then on reads,
    or writes, are stored granule by granule. Arrays are made only when they are needed.

    A granule has 1 << ``shift`` bytes. It is as wide as the buffer's narrowest access so far.
    """

    __slots__ = (
        "_read", "_read_runs", "_written", "_written_runs", "copied", "earlier", "granules", "read_only", "read_sites",
        "read_sizes", "shift", "written_sites", "written_sizes",
    )  # fmt: skip
    _BY_GRANULE = (
        "_read", "_written", "copied", "read_sites", "read_only", "read_sizes", "written_sites", "written_sizes",
    )  # fmt: skip

    def __init__(self, granules: int, recording: bool, shift: int = 0) -> None:
        self.granules, self.shift = granules, shift
        self._written_runs, self._read_runs = Runs(), Runs()
        self._written: Array | None = None
        self._read: Array | None = None
        # Reads before those in ``read``: by another thread than the last reader's (False), and by another CTA (True).
        self.earlier: dict[bool, EarlierReads] = {}
        # Granules that a bulk store has written, once there are any.
        self.copied: Array | None = None
        # Granules read through the read-only path, once there are any.
        self.read_only: Array | None = None
        # Sizes of strong accesses (codes of ``state.scopes``), made at the first one. If the last access to a granule
        # was weak, which its tag says by scope 0, its entry here is stale.
        self.read_sizes: Array | None = None
        self.written_sizes: Array | None = None
        self.written_sites: Array | None = np.zeros(granules, np.int32) if recording else None
        self.read_sites: Array | None = np.zeros(granules, np.int32) if recording else None

    def refine(self, shift: int) -> None:
        """Make granules narrower: 1 << ``shift`` bytes."""
        parts = 1 << (self.shift - shift)
        self.granules, self.shift = self.granules * parts, shift
        for runs in (self._written_runs, self._read_runs):
            runs.refine(parts)
        for earlier in self.earlier.values():
            earlier.refine(parts)
        for name in self._BY_GRANULE:
            array = getattr(self, name)
            if array is not None:
                setattr(self, name, array.repeat(parts))

    @property
    def is_written(self) -> bool:
        """Has any thread written to the buffer?"""
        return self._written is not None or bool(self._written_runs)

    @property
    def is_read(self) -> bool:
        """Has any thread read from the buffer?"""
        return self._read is not None or bool(self._read_runs)

    @property
    def written(self) -> Array:
        """The tags of the last writes, which are stored granule by granule from now on."""
        if self._written is None:
            self._written, self._written_runs = self._written_runs.tags(self.granules), Runs()
        return self._written

    @property
    def read(self) -> Array:
        """The tags of the last reads, which are stored granule by granule from now on."""
        if self._read is None:
            self._read, self._read_runs = self._read_runs.tags(self.granules), Runs()
        return self._read

    def read_run(self, run: GranuleRun) -> bool:
        """Store a read as a run, if only its own threads have accessed its granules; returns whether it is stored."""
        if self._read is not None or self._written is not None:
            return False
        if self._written_runs.conflicts_with(run) or self._read_runs.conflicts_with(run):
            return False
        self._read_runs.put(run)
        return True

    def keep_earlier(self, by_other_cta: bool, granules: Places, tags: Array, sites: Array | int | None) -> None:
        """Store reads before the last reads of granules. They are by other threads than the last readers or, with
        ``by_other_cta``, by other CTAs. ``sites``: their instructions plus one, if those are recorded."""
        earlier = self.earlier.get(by_other_cta)
        if earlier is None:
            earlier = self.earlier[by_other_cta] = EarlierReads(self.granules, self.read_sites is not None)
        put(earlier.tags, granules, tags)
        if earlier.sites is not None and sites is not None:
            put(earlier.sites, granules, sites)

    def record_read_size(self, granules: Places, size: int) -> None:
        """Record the size of a strong read."""
        if self.read_sizes is None:
            self.read_sizes = np.zeros(self.granules, np.uint8)
        put(self.read_sizes, granules, size)

    def record_write_size(self, granules: Places, size: int) -> None:
        """Record the size of a strong write."""
        if self.written_sizes is None:
            self.written_sizes = np.zeros(self.granules, np.uint8)
        put(self.written_sizes, granules, size)

    def write_run(self, run: GranuleRun) -> bool:
        """Store a write as a run, if only its own threads have accessed its granules; returns whether it is stored."""
        if self._read is not None or self._written is not None or self.read_only is not None:
            return False
        if self._written_runs.conflicts_with(run) or self._read_runs.conflicts_with(run):
            return False
        self._written_runs.put(run)
        return True
