"""The addresses that a program gets for the emulated memory: a second mapping of the same pages.

The emulator reads and writes by its own mapping, which nothing protects, so kernels run at the same speed. In the
program's mapping every page says what host code may do there: nothing where device memory lies.
"""

from __future__ import annotations

import ctypes
import mmap
from enum import IntEnum

from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.reports import EmulatorError

PAGE = mmap.PAGESIZE
_MAY_MOVE = 1  # MREMAP_MAYMOVE


class PageAccess(IntEnum):
    """What host code may do with a page: the bits of mprotect."""

    NONE = 0
    READ = mmap.PROT_READ
    FULL = mmap.PROT_READ | mmap.PROT_WRITE


class HostView:
    """A second mapping of ``data``, which must be shared memory. At first host code may touch none of it."""

    def __init__(self, data: Array) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        remap = self.libc.mremap
        remap.restype, remap.argtypes = (
            ctypes.c_void_p,
            [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int],
        )
        # An old size of 0 leaves the mapping of shared pages where it is, and makes another one (mremap(2)).
        address = remap(data.ctypes.data, 0, len(data), _MAY_MOVE)
        if address is None or address == ctypes.c_void_p(-1).value:
            raise EmulatorError(
                "the system maps no memory twice, which tells accesses of host code from those of kernels"
            )
        self.base, self.nbytes = address, len(data)
        self.protect(0, self.nbytes, PageAccess.NONE)

    def protect(self, start: int, end: int, access: PageAccess) -> None:
        """Set what host code may do with the pages that hold these bytes, which are counted from the mapping's start.

        Raises EmulatorError if the system keeps no more different pages apart."""
        first = start // PAGE * PAGE
        nbytes = -(-end // PAGE) * PAGE - first
        if self.libc.mprotect(ctypes.c_void_p(self.base + first), ctypes.c_size_t(nbytes), int(access)):
            raise EmulatorError("the system protects no more pages of memory")

    def close(self) -> None:
        """Give the addresses back."""
        self.libc.munmap(ctypes.c_void_p(self.base), ctypes.c_size_t(self.nbytes))
