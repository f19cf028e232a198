"""Records which bytes each piece of work on a stream has accessed, and tells by vector clocks which work is over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernelproof.emulator.host.callsites import UNKNOWN, HostSite
from kernelproof.emulator.state.arrays import Array

Clock = dict[int, int]  # stream -> how many of its pieces of work are known to be over


@dataclass(eq=False)
class BufferAccess:
    """The bytes of one buffer that a piece of work has touched.

    ``tick``: the number of the work on its stream, from 1 on. ``read``, ``written``: boolean masks of granules of
    ``size`` bytes, the first of which begins at byte ``first`` of the buffer; None: no granule. Invariant: ``size`` is
    a power of two and at most a page, and ``first`` is a multiple of it. ``site``: the line of host code that issued
    the work. ``strong``: a mask of the granules by which the work may signal the host while it runs. ``excused``: a
    finding has already reported the host's access to these bytes.
    """

    stream: int
    tick: int
    name: str
    size: int
    read: Array | None
    written: Array | None
    first: int
    site: HostSite = UNKNOWN
    strong: Array | None = None
    excused: bool = False

    @property
    def end(self) -> int:
        """The byte after the last granule."""
        return self.first + self.size * max(len(mask) for mask in (self.read, self.written, ()) if mask is not None)

    def is_over(self, clock: Clock) -> bool:
        """Is the work over according to a clock?"""
        return self.tick <= clock.get(self.stream, 0)

    def window(self, mask: Array, size: int, first: int, end: int) -> Array:
        """The part of a mask from byte ``first`` to before ``end``, in granules of ``size`` bytes, which must divide
        those of the mask."""
        # Take the granules of the mask that overlap the range (the end is rounded up), split them into finer ones, and
        # drop what lies before and after the range.
        skipped = (first - self.first) // self.size
        coarse = mask[skipped : -((self.first - end) // self.size)]
        fine = coarse if size == self.size else np.repeat(coarse, self.size // size)
        return fine[(first - self.first - skipped * self.size) // size :][: (end - first) // size]

    def touches(self, mask: Array | None, byte: int) -> bool:
        """Does a mask of the work contain a byte of the buffer?"""
        granule = (byte - self.first) // self.size
        return mask is not None and 0 <= granule < len(mask) and bool(mask[granule])

    def bytes_of(self, mask: Array | None, start: int, count: int) -> Array:
        """Which of the ``count`` bytes of the buffer from ``start`` on a mask contains, shape (count,), bool."""
        out = np.zeros(count, bool)
        first, end = (
            max(start, self.first),
            0 if mask is None else min(start + count, self.first + self.size * len(mask)),
        )
        if mask is not None and first < end:
            out[first - start : end - start] = self.window(mask, 1, first, end)
        return out

    def pages(self, mask: Array, page: int, count: int) -> Array:
        """Which of the buffer's first ``count`` pages of ``page`` bytes have bytes of a mask, shape (count,), bool."""
        out = np.zeros(count, bool)
        if not mask.strides[0]:  # one value stands for all
            if len(mask) and mask[0]:
                out[self.first // page : (self.first + self.size * len(mask) - 1) // page + 1] = True
            return out
        # The pages that the mask reaches, and for each of them its first granule in the mask. By the invariant of
        # ``first`` and ``size`` no granule lies in two pages, so that of a page end where those of the next one begin.
        number = np.arange(self.first // page, min(count, (self.first + self.size * len(mask) - 1) // page + 1))
        starts = np.maximum(0, (number * page - self.first) // self.size)
        out[number] = np.logical_or.reduceat(mask, starts) if len(number) else False
        return out


def join(clock: Clock, other: Clock) -> None:
    """Raise each entry of a clock to that of another clock."""
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


def conflict(a: BufferAccess, b: BufferAccess) -> int | None:
    """The first byte that both pieces of work touch and at least one writes; None if there is none."""
    start, end, size = max(a.first, b.first), min(a.end, b.end), min(a.size, b.size)
    if start >= end:
        return None
    first = None
    for x, y in ((a.written, b.written), (a.written, b.read), (a.read, b.written)):
        if x is None or y is None:
            continue
        common = np.flatnonzero(a.window(x, size, start, end) & b.window(y, size, start, end))
        if len(common) and (first is None or start + common[0] * size < first):
            first = start + int(common[0]) * size
    return first
