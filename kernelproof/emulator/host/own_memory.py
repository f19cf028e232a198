"""Asynchronous copies from and to memory of the program's own, which CUDA has not allocated.

A copy to such memory may go on when the call has returned ("API synchronization behavior" of the CUDA runtime: it might
be synchronous), so the host must wait before it reads. Memory that is only read is copied to a buffer of the driver's
first, and may be changed at once, unless it is registered.

Until the host knows that a copy is over, the pages are protected that the memory has for itself. Programs that are
compiled by the check allocate whole pages (checking/host_calls.c); of others' small arrays nothing is seen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kernelproof.emulator.host.standin import standin
from kernelproof.emulator.host.work import BufferAccess, Clock
from kernelproof.emulator.memory.host_view import PAGE
from kernelproof.emulator.memory.host_view import PageAccess as Allowed


@dataclass(frozen=True)
class Copied:
    """Bytes of the program's own from ``address`` on, and the copy that uses them. ``pages``: where the protected pages
    begin."""

    address: int
    count: int
    access: BufferAccess
    pages: int

    def meets(self, address: int, count: int) -> bool:
        """Does it have bytes in common with a range?"""
        return self.address < address + count and address < self.address + self.count


class OwnMemory:
    """Copies from and to memory of the program's own. ``host``: the clock of what the host knows to be over.
    ``report``: is told of an access of host code: what is copied there, the address, whether it writes."""

    def __init__(self, host: Clock, report: Callable[[Copied, int, bool], None]) -> None:
        self.host, self.report = host, report
        self.copies: list[Copied] = []
        self.registered: dict[int, int] = {}  # address -> bytes

    def is_registered(self, address: int) -> bool:
        """Does an address lie in memory of cudaHostRegister?"""
        return any(start <= address < start + count for start, count in self.registered.items())

    def watch(self, address: int, count: int, access: BufferAccess) -> None:
        """A copy that host code does not wait for uses these bytes."""
        self._drop([copied for copied in self.copies if copied.meets(address, count)])
        allowed = Allowed.NONE if access.written is not None else Allowed.READ
        start, end = ctypes.c_size_t(), ctypes.c_size_t()
        library = standin()
        if library.emulator_own_pages(
            ctypes.c_size_t(address), ctypes.c_size_t(count), ctypes.byref(start), ctypes.byref(end)
        ) and library.emulator_watch_own(start, end, int(allowed)):
            self.copies.append(Copied(address, count, access, start.value))

    def settle(self) -> None:
        """Open the memory of copies that the host knows to be over."""
        self._drop([copied for copied in self.copies if copied.access.is_over(self.host)])

    def touch(self, address: int, count: int, writes: bool) -> bool:
        """Host code touches bytes. Are they used by no copy, so that the access can be made alone and the pages stay
        protected? Else they are open from now on."""
        page = address // PAGE * PAGE
        near = [copied for copied in self.copies if copied.meets(page, address + count - page + PAGE)]
        # A host function on a stream may know of copies that the rest of the host does not know to be over.
        pending = [copied for copied in near if not copied.access.is_over(self.host)]
        used = [c for c in pending if c.meets(address, count) and (writes or c.access.written is not None)]
        for copied in used:
            self.report(copied, max(address, copied.address), writes)
        if not used and count == 1 and self._alone(page, pending):
            return True
        self._drop(near)
        return False

    def _alone(self, page: int, copies: list[Copied]) -> bool:
        """Let guard.c know which bytes of a page are in use."""
        mask = np.zeros(PAGE, np.uint8)
        for copied in copies:
            first, end = max(copied.address - page, 0), min(copied.address + copied.count - page, PAGE)
            mask[first : max(first, end)] |= 1 if copied.access.written is None else 3
        allowed = Allowed.NONE if any(copied.access.written is not None for copied in copies) else Allowed.READ
        return bool(standin().emulator_partial(page, int(allowed), mask.tobytes()))

    def _drop(self, copies: list[Copied]) -> None:
        for copied in copies:
            self.copies.remove(copied)
            standin().emulator_leave_own(ctypes.c_size_t(copied.pages))
