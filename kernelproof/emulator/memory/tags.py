"""The last accesses to each granule of a buffer in one launch.

As long as consecutive lanes touch consecutive granules, the accesses are kept as runs, one entry each. The first access
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
# The tick of writes that are under way. It is the largest one: no synchronisation orders them before another thread.
UNDER_WAY = (1 << 29) - 1
# Runs of a buffer at most; with more of them its tags are kept granule by granule.
MAX_RUNS = 4096


class GranuleRun(NamedTuple):
    """Granules from ``start`` to before ``stop``, touched by threads from number ``thread`` on, ``per`` granules each.
    ``moment``: tick and scope of their tags."""

    start: int
    stop: int
    per: int
    thread: int
    moment: int

    def is_again(self, other: GranuleRun) -> bool:
        """Do the same threads touch the same granules in both runs?"""
        return self[:4] == other[:4]


class Runs:
    """Runs that have no granule in common, in ascending order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._runs: list[GranuleRun] = []

    def __bool__(self) -> bool:
        return bool(self._runs)

    def meets(self, run: GranuleRun) -> bool:
        """Did another thread touch a granule of this run, or is there no room for one more?"""
        if len(self._runs) >= MAX_RUNS:
            return True
        at = bisect_left(self._starts, run.start)
        if at and self._runs[at - 1].stop > run.start:
            return True
        return at < len(self._runs) and self._starts[at] < run.stop and not self._runs[at].is_again(run)

    def put(self, run: GranuleRun) -> None:
        """Add a run that meets no other one. It replaces an earlier run of the same threads."""
        at = bisect_left(self._starts, run.start)
        if at < len(self._runs) and self._starts[at] == run.start:
            self._runs[at] = run
        else:
            self._starts.insert(at, run.start)
            self._runs.insert(at, run)

    def refine(self, parts: int) -> None:
        """Each granule becomes so many."""
        self._starts = [start * parts for start in self._starts]
        self._runs = [
            run._replace(start=run.start * parts, stop=run.stop * parts, per=run.per * parts) for run in self._runs
        ]

    def tags(self, granules: int) -> Array:
        """The tags of the runs, granule by granule."""
        out = np.zeros(granules, np.int64)
        for start, stop, per, thread, moment in self._runs:
            stamp = np.arange(thread, thread + (stop - start) // per) | moment
            for k in range(per):
                out[start + k : stop : per] = stamp
        return out


class EarlierReads:
    """Reads that others than the last reader of each granule have made: the last one by each, and where instructions
    are recorded, also which one that was."""

    __slots__ = ("at", "tags")

    def __init__(self, granules: int, recording: bool) -> None:
        self.tags: Array = np.zeros(granules, np.int64)
        self.at: Array | None = np.zeros(granules, np.int32) if recording else None

    def refine(self, parts: int) -> None:
        """Each granule becomes so many."""
        self.tags = self.tags.repeat(parts)
        self.at = None if self.at is None else self.at.repeat(parts)


class Tags:
    """The tags of the last write and the last read of every granule of a buffer in this launch; where instructions are
    recorded, also which instruction that was (its number plus one, 0: none).

    Accesses stay runs as long as every access is a run and no run meets one of other threads; from then on reads, or
    writes, are kept granule by granule. Arrays are made only when something needs them.

    A granule has 1 << ``shift`` bytes. It is as wide as the buffer's narrowest access so far.
    """

    __slots__ = (
        "_read", "_read_runs", "_written", "_written_runs", "copied", "earlier", "granules", "read_at", "read_only",
        "read_sizes", "shift", "written_at", "written_sizes",
    )  # fmt: skip
    _BY_GRANULE = (
        "_read", "_written", "copied", "read_at", "read_only", "read_sizes", "written_at", "written_sizes",
    )  # fmt: skip

    def __init__(self, granules: int, recording: bool, shift: int = 0) -> None:
        self.granules, self.shift = granules, shift
        self._written_runs, self._read_runs = Runs(), Runs()
        self._written: Array | None = None
        self._read: Array | None = None
        # Whether the last reader is another thread or of another CTA -> reads before those in ``read``.
        self.earlier: dict[bool, EarlierReads] = {}
        # Granules that a bulk store has written, once there are any.
        self.copied: Array | None = None
        # Granules read through the read-only path, once there are any.
        self.read_only: Array | None = None
        # Sizes of strong accesses (codes of ``state.scopes``), made at the first one. Entries of granules that a weak
        # access touched last are stale: the tag says so by its scope 0.
        self.read_sizes: Array | None = None
        self.written_sizes: Array | None = None
        self.written_at: Array | None = np.zeros(granules, np.int32) if recording else None
        self.read_at: Array | None = np.zeros(granules, np.int32) if recording else None

    def refine(self, shift: int) -> None:
        """Make granules narrower."""
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
        """The tags of the last writes, granule by granule from now on."""
        if self._written is None:
            self._written, self._written_runs = self._written_runs.tags(self.granules), Runs()
        return self._written

    @property
    def read(self) -> Array:
        """The tags of the last reads, granule by granule from now on."""
        if self._read is None:
            self._read, self._read_runs = self._read_runs.tags(self.granules), Runs()
        return self._read

    def read_run(self, run: GranuleRun) -> bool:
        """Keep a read as a run, if only its own threads have touched what they read; returns whether it is kept."""
        if self._read is not None or self._written is not None:
            return False
        if self._written_runs.meets(run) or self._read_runs.meets(run):
            return False
        self._read_runs.put(run)
        return True

    def keep_earlier(self, far: bool, granules: Places, tags: Array, sites: Array | int | None) -> None:
        """Keep reads of granules beside the last ones, which are of other threads or (``far``) of other CTAs.
        ``sites``: their instructions plus one, where those are recorded."""
        earlier = self.earlier.get(far)
        if earlier is None:
            earlier = self.earlier[far] = EarlierReads(self.granules, self.read_at is not None)
        put(earlier.tags, granules, tags)
        if earlier.at is not None and sites is not None:
            put(earlier.at, granules, sites)

    def size_read(self, granules: Places, size: int) -> None:
        """Record the size of a strong read."""
        if self.read_sizes is None:
            self.read_sizes = np.zeros(self.granules, np.uint8)
        put(self.read_sizes, granules, size)

    def size_written(self, granules: Places, size: int) -> None:
        """Record the size of a strong write."""
        if self.written_sizes is None:
            self.written_sizes = np.zeros(self.granules, np.uint8)
        put(self.written_sizes, granules, size)

    def write_run(self, run: GranuleRun) -> bool:
        """Keep a write as a run, if only its own threads have touched what they write; returns whether it is kept."""
        if self._read is not None or self._written is not None or self.read_only is not None:
            return False
        if self._written_runs.meets(run) or self._read_runs.meets(run):
            return False
        self._written_runs.put(run)
        return True
