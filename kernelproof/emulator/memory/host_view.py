"""Protects emulated memory from host code: the program gets addresses in a second, protected mapping of the same pages.

The emulator uses its own mapping, which is not protected, so kernels are not slowed down. In the program's mapping each
page has the access rights of host code: none where device memory lies.
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
    """The access rights of host code to a page: the bits of mprotect."""

    NONE = 0
    READ = mmap.PROT_READ
    FULL = mmap.PROT_READ | mmap.PROT_WRITE


class HostView:
    """A second mapping of ``data``, which must be shared memory. At first host code may touch none of it.

    Raises EmulatorError if the system cannot map memory twice.
    """

    def __init__(self, data: Array) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        remap = self.libc.mremap
        remap.restype, remap.argtypes = (
            ctypes.c_void_p,
            [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int],
        )
        # For shared pages and an old size of 0, mremap keeps the mapping and makes another one (mremap(2)).
        address = remap(data.ctypes.data, 0, len(data), _MAY_MOVE)
        if address is None or address == ctypes.c_void_p(-1).value:
            raise EmulatorError(
                "the system cannot map memory twice, so accesses of host code cannot be told from those of kernels"
            )
        self.base, self.nbytes = address, len(data)
        self.protect(0, self.nbytes, PageAccess.NONE)

    def protect(self, start: int, end: int, access: PageAccess) -> None:
        """Set the access rights to the pages that contain bytes [start, end) of the mapping.

        Raises EmulatorError if the system supports no more ranges of different rights."""
        first = start // PAGE * PAGE
        nbytes = -(-end // PAGE) * PAGE - first
        if self.libc.mprotect(ctypes.c_void_p(self.base + first), ctypes.c_size_t(nbytes), int(access)):
            raise EmulatorError("the system protects no more pages of memory")

    def close(self) -> None:
        """Remove the mapping."""
        self.libc.munmap(ctypes.c_void_p(self.base), ctypes.c_size_t(self.nbytes))
