"""Finds accesses of host code that race with work on streams, by page protection.

The emulator does work as soon as it is issued, so its results are in memory earlier than on a GPU. Until the host knows
that the work is over, host code must not touch the pages that the work has written, and may only read the pages that
the work has read. A forbidden access faults and is then judged byte by byte. Accesses of host code to device memory
fault as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kernelproof.emulator.host.own_memory import CopiedRange, OwnMemory
from kernelproof.emulator.host.runtime_state import Call, RuntimeState
from kernelproof.emulator.host.standin import Words, standin
from kernelproof.emulator.host.work import BufferAccess, Clock
from kernelproof.emulator.memory.arena import Buffer
from kernelproof.emulator.memory.host_view import PAGE, HostView, PageAccess
from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.mangled import plain_name
from kernelproof.emulator.state.participants import Place, Space
from kernelproof.emulator.state.reports import Report

ALLOWED, FORBIDDEN = 0, 1  # answers to guard.c for an access that has faulted
# How many accesses outside of every allocation are reported and let pass. The next one ends the program.
MAX_STRAY = 64


@dataclass
class _Watch:
    """The protection of a buffer's pages.

    ``pages``: what host code may do with each page (a ``PageAccess``), shape (pages,). ``accesses``: the pending work
    that this protection follows from. ``stale``: a page has been opened meanwhile, so the protection has to be computed
    again.
    """

    pages: Array
    accesses: list[BufferAccess] = field(default_factory=list)
    stale: bool = False


class HostOrder:
    """Protects memory from host code, and judges the accesses of host code that fault.

    ``host``: the clock of the work that the host knows to be over. ``history``: start of a buffer -> work that has
    touched it. Without a second mapping of the memory (``Memory.host_view``) no memory is protected.
    """

    def __init__(self, state: RuntimeState, host: Clock, history: dict[int, list[BufferAccess]]) -> None:
        self.state, self.memory, self.host, self.history = state, state.memory, host, history
        self.watches: dict[Buffer, _Watch] = {}
        self.opened: list[tuple[int, int]] = []  # parts of the arena that host code may touch until the next call
        self.strays = 0
        self.has_partial = False  # guard.c has a list of pages of which only some bytes are forbidden
        self.own_memory = OwnMemory(host, self._report_own)
        self.calls: dict[str, Call] = {"host_access": self.access, "host_range": self.access_range}

    def watches_over(self, buffer: Buffer) -> bool:
        """Are accesses of host code to a buffer compared with work on streams?"""
        return buffer.of_host and self.memory.host_view is not None

    def watch(self, buffer: Buffer) -> None:
        """Begin to protect a buffer, which work has touched."""
        if buffer not in self.watches and self.watches_over(buffer):
            count = -(-max(buffer.nbytes, 1) // PAGE)
            self.watches[buffer] = _Watch(np.full(count, PageAccess.FULL, np.uint8))

    def forget(self, buffer: Buffer) -> None:
        """End the protection of a buffer that is about to be freed."""
        self.watches.pop(buffer, None)

    # --- protection ---

    def settle(self) -> None:
        """Protect pages according to what the host knows to be over. The session calls this at the end of every runtime
        call."""
        view = self.memory.host_view
        if view is None:
            return
        self.own_memory.settle()
        while self.opened:
            view.protect(*self.opened.pop(), PageAccess.NONE)
        if self.watches and not standin().emulator_is_guarding():
            self._give_up(view)
        if self.has_partial:
            standin().emulator_forget_partial_pages()
            self.has_partial = False
        for buffer, watch in list(self.watches.items()):
            pending = self._pending(buffer)
            if watch.stale or pending != watch.accesses:
                self._protect_for(view, buffer, watch, pending)
            if not pending:
                del self.watches[buffer]

    def _give_up(self, view: HostView) -> None:
        """Remove all protection and report it, because the program handles SIGSEGV itself and must not see our
        faults."""
        self.state.reports.append(
            Report("launch-error", "the program handles SIGSEGV itself, so accesses of host code are not ordered")
        )
        for buffer, watch in self.watches.items():
            self._protect(view, buffer, watch, np.full_like(watch.pages, PageAccess.FULL))
        self.watches.clear()

    def _pending(self, buffer: Buffer) -> list[BufferAccess]:
        """The accesses to a buffer by work that the host does not know to be over. Those that a finding excuses are
        left out."""
        return [a for a in self.history.get(buffer.start, ()) if not a.excused and not a.is_over(self.host)]

    def _protect_for(self, view: HostView, buffer: Buffer, watch: _Watch, pending: list[BufferAccess]) -> None:
        """Protect the pages of a buffer as the pending accesses require."""
        # If accesses have only been added, they are applied to the present protection; else it is computed anew.
        only_added = not watch.stale and pending[: len(watch.accesses)] == watch.accesses
        pages = watch.pages.copy() if only_added else np.full_like(watch.pages, PageAccess.FULL)
        for access in pending[len(watch.accesses) if only_added else 0 :]:
            for mask, allowed in ((access.read, PageAccess.READ), (access.written, PageAccess.NONE)):
                if mask is not None:
                    pages[access.pages(mask, PAGE, len(pages))] &= np.uint8(allowed)
        self._protect(view, buffer, watch, pages)
        watch.accesses, watch.stale = pending, False

    def _protect(self, view: HostView, buffer: Buffer, watch: _Watch, pages: Array) -> None:
        """Set the protection of pages that differ from the present one; one call for each run of equal pages."""
        edges = np.flatnonzero(np.diff(pages)) + 1
        for first, end in zip([0, *edges.tolist()], [*edges.tolist(), len(pages)], strict=True):
            if (watch.pages[first:end] != pages[first]).any():
                start = buffer.start + first * PAGE
                view.protect(start, start + (end - first) * PAGE, PageAccess(int(pages[first])))
        watch.pages = pages

    @contextmanager
    def acting(self, clock: Clock) -> Iterator[None]:
        """Surround a host function that is itself work on a stream. Within, the host's clock is that of the stream: the
        function may touch the results of work that comes before it there, and no others."""
        host, watches, view = self.host, dict(self.watches), self.memory.host_view
        self.host = self.own_memory.host = clock
        for buffer, watch in watches.items():
            if view is not None:
                self._protect_for(view, buffer, watch, self._pending(buffer))
        yield
        self.host = self.own_memory.host = host
        self.watches.update(watches)
        for watch in self.watches.values():
            watch.stale = True
        self.settle()

    # --- accesses ---

    def access(self, a: Words) -> int:
        """Judge an access of host code that has faulted. Words: address, whether it writes. Returns ALLOWED or
        FORBIDDEN."""
        view, arena_offset, writes = self.memory.host_view, a[0] - self.memory.base, bool(a[1])
        assert view is not None
        if not 0 <= arena_offset < self.memory.capacity:
            self.has_partial |= self.own_memory.touch(a[0], 1, writes)
            return ALLOWED
        buffer = self.memory.find(arena_offset)
        if buffer is None:
            return self._stray(view, arena_offset, writes)
        if not buffer.of_host:
            self._report("host-access", f"host code {_verb(writes)} device memory", arena_offset, buffer)
            self._open(view, buffer.start, buffer.end)
            if buffer.written is not None:
                buffer.written[:] = 1
            return ALLOWED
        watch, offset = self.watches.get(buffer), arena_offset - buffer.start
        if watch is None or not self._judge_watched(buffer, watch, offset, writes):
            view.protect(arena_offset, arena_offset + 1, PageAccess.FULL)
        return ALLOWED

    def access_range(self, a: Words) -> int:
        """Judge an access that host code makes by a system call. Words: address, bytes, whether they are written."""
        address, count, writes = a[0], a[1], a[2]
        self.own_memory.touch(address, count, bool(writes))
        first, end = max(address, self.memory.base), min(address + count, self.memory.base + self.memory.capacity)
        while first < end:
            buffer = self.memory.find(first - self.memory.base)
            watch = self.watches.get(buffer) if buffer is not None else None
            if buffer is None or not buffer.of_host:
                self.access((first, writes))
            elif watch is not None:
                self._open_range(buffer, watch, first - buffer.address, end - buffer.address, bool(writes))
            first = self.memory.base + buffer.end if buffer is not None else first + PAGE
        return ALLOWED

    def _open_range(self, buffer: Buffer, watch: _Watch, first: int, end: int, writes: bool) -> None:
        """Judge an access to the bytes from offset ``first`` to before ``end`` of a buffer, and open their pages."""
        assert self.memory.host_view is not None
        for access in self._pending(buffer):
            for mask in (access.written, access.read if writes else None):
                common = np.flatnonzero(access.bytes_of(mask, first, min(end, buffer.nbytes) - first))
                if len(common):
                    self._judge(buffer, first + int(common[0]), writes)
                    break
        pages = slice(first // PAGE, -(-end // PAGE))
        watch.pages[pages] = PageAccess.FULL
        watch.stale = True
        self.memory.host_view.protect(buffer.start + first, buffer.start + min(end, buffer.nbytes), PageAccess.FULL)

    def _judge_watched(self, buffer: Buffer, watch: _Watch, offset: int, writes: bool) -> bool:
        """Judge an access to a protected page. Returns whether the page remains protected while guard.c makes this one
        access; else the caller has to open the page."""
        page = offset // PAGE
        if watch.pages[page] == PageAccess.READ:
            writes = True  # only writes fault on such a page
        watch.stale = True
        if not self._judge(buffer, offset, writes):
            mask = np.zeros(PAGE, np.uint8)  # per byte of the page: bit 0 forbids writes, bit 1 forbids reads
            for access in self._pending(buffer):
                mask[access.bytes_of(access.read, page * PAGE, PAGE)] |= 1
                mask[access.bytes_of(access.written, page * PAGE, PAGE)] |= 3
            place = self.memory.base + buffer.start + page * PAGE
            if standin().emulator_add_partial_page(place, int(watch.pages[page]), mask.tobytes()):
                self.has_partial = True
                return True
        watch.pages[page] = PageAccess.FULL
        return False

    def _judge(self, buffer: Buffer, offset: int, writes: bool) -> bool:
        """Report the access to a byte of a buffer if pending work conflicts with it; returns whether some does."""
        found = False
        for access in self._pending(buffer):
            written = access.touches(access.written, offset)
            if not written and not (writes and access.touches(access.read, offset)):
                continue
            access.excused = True
            if found:
                continue
            found = True
            name = plain_name(access.name)
            if access.touches(access.strong, offset):
                # The host may learn from such a value that other data is there, in an order that is not modelled.
                for other in self._accesses_of(access):
                    other.excused = True
                use = "writes" if written else "reads"
                text = f"host code {_verb(writes)} what {access.name} {use} with system scope, at {self.state.site}"
                self.state.reports.append(Report("launch-error", text, access.name))
                continue
            text = f"host code {_verb(writes)} what {name} may still {'write' if written else 'read'}"
            self._report("host-race", text, buffer.start + offset, buffer, access)
        return found

    def _accesses_of(self, access: BufferAccess) -> Iterator[BufferAccess]:
        """All accesses of the work that ``access`` belongs to, and of earlier work on its stream."""
        for accesses in self.history.values():
            yield from (a for a in accesses if a.stream == access.stream and a.tick <= access.tick)

    def _stray(self, view: HostView, arena_offset: int, writes: bool) -> int:
        """Report an access outside of every allocation; returns ALLOWED or FORBIDDEN."""
        freed = self.memory.find_freed(arena_offset)
        if freed is not None:
            self._report("use-after-free", f"host code {_verb(writes)} memory that was freed", arena_offset, freed)
        else:
            nearest = self.memory.nearest(arena_offset)
            self._report(
                "host-access",
                f"host code {_verb(writes)} outside of every allocation",
                arena_offset,
                nearest and nearest[0],
            )
        self.strays += 1
        if self.strays > MAX_STRAY:
            return FORBIDDEN
        self._open(view, arena_offset, arena_offset + 1)
        return ALLOWED

    def _report_own(self, copied: CopiedRange, address: int, writes: bool) -> None:
        """Report an access of host code to memory of its own that a copy still uses."""
        use = "write" if copied.access.written is not None else "read"
        text = f"host code {_verb(writes)} what a copy may still {use}, in memory of its own"
        sides = self.state.site.participant(), copied.access.site.participant(copied.access.name)
        place = Place(Space.GLOBAL, address, "what is copied", address - copied.address)
        self.state.reports.append(Report("host-race", text, "", *sides, place))

    def _open(self, view: HostView, start: int, end: int) -> None:
        """Allow all accesses to a part of the arena (offsets) until the next runtime call."""
        view.protect(start, end, PageAccess.FULL)
        self.opened.append((start, end))

    def _report(
        self, rule: str, text: str, arena_offset: int, buffer: Buffer | None, access: BufferAccess | None = None
    ) -> None:
        """Report a finding at the present line of host code. ``arena_offset``: that of the byte. ``buffer``: the buffer
        that contains the byte, or the nearest one. ``access``: the work on the other side."""
        place = None
        if buffer is not None:
            nearest = "" if buffer.start <= arena_offset < buffer.end else self.memory.nearest(arena_offset)
            note = ", ".join(part for part in (nearest[1] if nearest else "", buffer.history) if part)
            place = Place(
                Space.GLOBAL,
                self.memory.base + arena_offset,
                self.memory.name(buffer),
                arena_offset - buffer.start,
                note=note,
            )
        other = access.site.participant(plain_name(access.name)) if access is not None else None
        kernel = access.name if access is not None and not access.name.startswith("a ") else ""
        self.state.reports.append(Report(rule, text, kernel, self.state.site.participant(), other, place))


def _verb(writes: bool) -> str:
    """The verb for an access in messages."""
    return "writes" if writes else "reads"
