"""Finds accesses of host code that race with asynchronous copies of memory that CUDA has not allocated.

Such memory is here called the program's own. A copy to it may continue after the call has returned ("API
synchronization behavior" of the CUDA runtime: it might be synchronous), so the host must wait before it reads. A copy
from it is different: the driver first copies it to a buffer, so the host may change it after the call, unless it is
registered.

Until the host knows that a copy is over, the pages that contain nothing but the copied memory are protected. Programs
that the check compiles allocate full pages (checking/host_calls.c). In other programs, small arrays share their pages
with other data, and their races are not found.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kernelproof.emulator.host.standin import standin
from kernelproof.emulator.host.work import BufferAccess, Clock
from kernelproof.emulator.memory.host_view import PAGE, PageAccess


@dataclass(frozen=True)
class CopiedRange:
    """A range of the program's own memory, ``count`` bytes from ``address`` on, and the copy that uses it. ``pages``:
    the address at which the protected pages begin."""

    address: int
    count: int
    access: BufferAccess
    pages: int

    def overlaps(self, address: int, count: int) -> bool:
        """Does the range have bytes in common with ``count`` bytes at ``address``?"""
        return self.address < address + count and address < self.address + self.count


class OwnMemory:
    """The pending copies from and to the program's own memory.

    ``host``: the clock of the work that the host knows to be over. ``report(copied, address, writes)`` is called for an
    access of host code that races with a copy.
    """

    def __init__(self, host: Clock, report: Callable[[CopiedRange, int, bool], None]) -> None:
        self.host, self.report = host, report
        self.copies: list[CopiedRange] = []
        self.registered: dict[int, int] = {}  # address of memory of cudaHostRegister -> its bytes

    def is_registered(self, address: int) -> bool:
        """Does an address lie in memory of cudaHostRegister?"""
        return any(start <= address < start + count for start, count in self.registered.items())

    def watch(self, address: int, count: int, access: BufferAccess) -> None:
        """Protect the bytes of a copy that host code does not wait for."""
        self._drop([copied for copied in self.copies if copied.overlaps(address, count)])
        allowed = PageAccess.NONE if access.written is not None else PageAccess.READ
        start, end = ctypes.c_size_t(), ctypes.c_size_t()
        library = standin()
        if library.emulator_own_pages(
            ctypes.c_size_t(address), ctypes.c_size_t(count), ctypes.byref(start), ctypes.byref(end)
        ) and library.emulator_watch_own(start, end, int(allowed)):
            self.copies.append(CopiedRange(address, count, access, start.value))

    def settle(self) -> None:
        """End the protection for copies that the host knows to be over."""
        self._drop([copied for copied in self.copies if copied.access.is_over(self.host)])

    def touch(self, address: int, count: int, writes: bool) -> bool:
        """Judge an access of host code that has faulted. Returns True if it conflicts with no copy and the pages remain
        protected while guard.c makes this one access; else their protection has ended."""
        page = address // PAGE * PAGE
        overlapping = [copied for copied in self.copies if copied.overlaps(page, address + count - page + PAGE)]
        # A host function on a stream may know of copies that the rest of the host does not know to be over.
        pending = [copied for copied in overlapping if not copied.access.is_over(self.host)]
        conflicts = [c for c in pending if c.overlaps(address, count) and (writes or c.access.written is not None)]
        for copied in conflicts:
            self.report(copied, max(address, copied.address), writes)
        if not conflicts and count == 1 and self._protect_bytes(page, pending):
            return True
        self._drop(overlapping)
        return False

    def _protect_bytes(self, page: int, copies: list[CopiedRange]) -> bool:
        """Let guard.c allow accesses to those bytes of a page that no copy uses; returns whether it can."""
        mask = np.zeros(PAGE, np.uint8)  # per byte of the page: bit 0 forbids writes, bit 1 forbids reads
        for copied in copies:
            first, end = max(copied.address - page, 0), min(copied.address + copied.count - page, PAGE)
            mask[first : max(first, end)] |= 1 if copied.access.written is None else 3
        allowed = PageAccess.NONE if any(copied.access.written is not None for copied in copies) else PageAccess.READ
        return bool(standin().emulator_add_partial_page(page, int(allowed), mask.tobytes()))

    def _drop(self, copies: list[CopiedRange]) -> None:
        """End the protection of ranges and forget them."""
        for copied in copies:
            self.copies.remove(copied)
            standin().emulator_unwatch_own(ctypes.c_size_t(copied.pages))
