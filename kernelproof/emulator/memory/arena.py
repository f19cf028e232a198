"""Allocates device memory in one arena of host memory, so that device pointers are real host addresses.

A pointer therefore passes unchanged through a C launcher, and every access can be traced to the buffer that it belongs
to. Guard gaps between buffers make accesses beyond a buffer's end visible.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right, insort
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from kernelproof.emulator.memory.host_view import PAGE, HostView, PageAccess
from kernelproof.emulator.memory.tensors import TorchTensor, element_name, host_array, is_tensor
from kernelproof.emulator.state.arrays import MOVER, POISON, Array
from kernelproof.emulator.state.reports import EmulatorError

# What NumPy takes as an index: slices, integers or a mask, alone or in a tuple.
Index = slice | int | EllipsisType | Array

ROLES = ("input", "output", "inout", "scratch")
SHORT_ROLES = {"in": "input", "out": "output"}  # as the command line spells them
ALIGN = 256


class AllocationSite(Protocol):
    """Where a program allocated or freed memory. Its text names a line. Its truth value is False if the place is not
    known."""

    def __bool__(self) -> bool: ...

    @property
    def variable(self) -> str:
        """The variable that got the address; "" if it is not known."""


@dataclass(eq=False)
class Buffer:
    """An allocation. ``address`` is the device pointer, ``nbytes`` its size.

    ``role``: an ``input`` must not be written; an ``output`` or ``scratch`` must not be read before it is written; an
    ``output`` must be written everywhere in its region, which is where ``allowed`` permits. ``written`` has one byte
    per byte of the buffer, nonzero where it was written (None: all of it is defined). ``allowed`` says in the same way
    where it may be written (None: everywhere). ``element`` names a type of elements that NumPy lacks, such as bfloat16;
    ``dtype`` is then an integer of that size. ``of_host``: the host reads and writes it directly, without a runtime
    call, also while kernels run. ``allocated_at`` and ``freed_at``: where a program did so; None if that is not known.
    """

    memory: Memory
    start: int
    nbytes: int
    role: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    written: Array | None = None
    allowed: Array | None = None
    name: str = ""
    element: str = ""
    of_host: bool = False
    allocated_at: AllocationSite | None = None
    freed_at: AllocationSite | None = None

    @property
    def element_name(self) -> str:
        """The type of its elements, for messages."""
        return self.element or str(self.dtype)

    @property
    def address(self) -> int:
        """The device pointer."""
        return self.memory.base + self.start

    @property
    def end(self) -> int:
        """Arena offset after the last byte."""
        return self.start + self.nbytes

    @property
    def history(self) -> str:
        """Where it was freed and allocated, in words."""
        freed = f"freed at {self.freed_at}" if self.freed_at else ""
        allocated = f"allocated at {self.allocated_at}" if self.allocated_at else ""
        return ", ".join(part for part in (freed, allocated) if part)

    @property
    def is_typed(self) -> bool:
        """Has the buffer a shape and an element type, which it gets from an uploaded array?"""
        return self.dtype != np.uint8 or self.shape != (self.nbytes,)

    def bytes(self) -> Array:
        """A view of the buffer's bytes, not a copy: shape (nbytes,), uint8."""
        return self.memory.data[self.start : self.end]

    def download(self) -> Array:
        """A copy of the contents in the shape and dtype of the upload."""
        return self.bytes().view(self.dtype).reshape(self.shape).copy()

    def unwritten(self) -> Array:
        """Byte offsets in the region that were never written, shape (n,)."""
        if self.written is None:
            return np.zeros(0, np.int64)
        missing = self.written == 0
        if self.allowed is not None:
            missing &= self.allowed != 0
        return np.flatnonzero(missing)


def _start(buffer: Buffer) -> int:
    """The key by which freed buffers are sorted."""
    return buffer.start


# Linux's value, for versions of Python that do not name it.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def _reserve(capacity: int, *, shared: bool) -> Array:
    """Reserve ``capacity`` bytes of address space, which takes memory only where it is touched. ``shared``: a second
    mapping can show the same bytes. If the system refuses, try half of it, and so on down to 64 MiB. Raises OSError."""
    kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    while True:
        try:
            block = mmap.mmap(-1, capacity, flags=kind | mmap.MAP_ANONYMOUS | _NORESERVE)
            return np.frombuffer(block, np.uint8)
        except OSError:
            if capacity <= 1 << 26:
                raise
            capacity //= 2


class Memory:
    """Global memory. ``capacity`` bytes of address space are reserved; only pages that are touched take memory.

    ``guard``: bytes of forbidden memory after each buffer. ``protected``: device pointers are addresses in a second
    mapping, the ``host_view``, in which host code may touch only memory that belongs to the host. The emulator must
    then not pass device pointers to C: ``own_address`` converts them.

    Invariants: ``starts`` is ascending and has the starts of ``buffers``. An address is never given to another buffer,
    so an access to a freed buffer remains out of bounds. ``freed_buffers`` are in ascending order. No page of the
    host's view has both memory of the host (``of_host``) and other buffers.
    """

    def __init__(self, capacity: int = 1 << 35, guard: int = 4096, *, protected: bool = False) -> None:
        self.data: Array = _reserve(capacity, shared=protected)
        capacity = len(self.data)
        self.host_view = HostView(self.data) if protected else None
        self.base = self.host_view.base if self.host_view is not None else int(self.data.ctypes.data)
        self.capacity, self.guard = capacity, guard
        # Width of an access in bytes -> ``data`` as an array of elements of that width (``MOVER``).
        self.views: dict[int, Array] = {w: self.data.view(t) for w, t in MOVER.items()}
        self.starts: list[int] = []
        self.buffers: list[Buffer] = []
        self.freed_buffers: list[Buffer] = []
        self.next = guard  # the arena offset from which on the next buffer is allocated
        # Counts frees, restored buffers and writes by calls of the runtime; not what kernels and host code write.
        self.writes = 0
        # (Text of the module, name of the variable) -> its buffer.
        self.globals: dict[tuple[str, str], Buffer] = {}

    def __del__(self) -> None:
        view: HostView | None = getattr(self, "host_view", None)
        if view is not None:
            view.close()

    def own_address(self, address: int) -> int:
        """The address at which the emulator itself finds the byte that a program has at ``address``. An address outside
        of the arena is returned unchanged."""
        offset = address - self.base
        return (
            address
            if self.host_view is None or not 0 <= offset < self.capacity
            else int(self.data.ctypes.data) + offset
        )

    def allocate(
        self, nbytes: int, role: str = "scratch", guard: int | None = None, name: str = "", *, of_host: bool = False
    ) -> Buffer:
        """Allocate ``nbytes`` bytes at a multiple of 256. ``guard``: bytes of forbidden memory that follow, at least
        256.

        The contents of ``output`` and ``scratch`` count as unwritten, those of ``input`` and ``inout`` as defined.
        Raises EmulatorError when the arena is full or the role unknown.
        """
        role = SHORT_ROLES.get(role, role)
        if role not in ROLES:
            raise EmulatorError(f"role {role!r}: one of {', '.join(ROLES)}")
        alignment = PAGE if of_host and self.host_view is not None else ALIGN
        start = -(-self.next // alignment) * alignment
        gap = max(self.guard if guard is None else max(guard, ALIGN), alignment)
        if start + nbytes + gap > self.capacity:
            raise EmulatorError(f"out of device memory: {nbytes} bytes needed, {self.capacity - start} left")
        self.next = start + nbytes + gap
        buffer = Buffer(self, start, nbytes, role, (nbytes,), np.dtype(np.uint8), name=name, of_host=of_host)
        if of_host and self.host_view is not None:
            self.host_view.protect(start, buffer.end, PageAccess.FULL)
        if role in ("output", "scratch"):
            buffer.written = np.zeros(nbytes, np.uint8)
        self.starts.append(start)
        self.buffers.append(buffer)
        return buffer

    def upload(
        self,
        array: ArrayLike | TorchTensor,
        role: str = "input",
        *,
        guard: int | None = None,
        region: Index | tuple[Index, ...] | None = None,
        name: str = "",
    ) -> Buffer:
        """Copy ``array`` to the device and return its buffer. An ``output`` takes only shape and dtype from the array;
        its bytes are 0xFF at first, which are NaNs.

        ``array`` may also be a CPU tensor of PyTorch. ``download`` returns bfloat16 and fp8 as the integers of their
        bits. ``guard``: bytes of forbidden memory that follow. ``region``: an index into the array (slices or a mask),
        outside of which the kernel must not write, and need not. Raises EmulatorError as ``allocate``.
        """
        element = element_name(array) if is_tensor(array) else ""
        content = host_array(array) if is_tensor(array) else array
        source = np.ascontiguousarray(content)
        buffer = self.allocate(source.nbytes, role, guard, name)
        role = buffer.role
        buffer.shape, buffer.dtype, buffer.element = np.shape(content), source.dtype, element
        if role == "output":
            buffer.bytes()[:] = POISON
        elif role != "scratch":
            buffer.bytes()[:] = source.reshape(-1).view(np.uint8)
        if region is not None:
            allowed = np.zeros(source.shape, bool)
            allowed[region] = True
            buffer.allowed = np.repeat(allowed.reshape(-1).view(np.uint8), source.itemsize)
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Free a buffer. Its addresses are not reused, so later accesses to it are out of bounds. Raises ValueError for
        a buffer that is not allocated."""
        self.writes += 1
        i = self.buffers.index(buffer)
        del self.buffers[i], self.starts[i]
        insort(self.freed_buffers, buffer, key=_start)
        if buffer.of_host and self.host_view is not None:
            self.host_view.protect(buffer.start, buffer.end, PageAccess.NONE)

    def restore(self, buffer: Buffer) -> None:
        """Allocate a freed buffer again, at its old address, with undefined contents. Raises ValueError for a buffer
        that is not freed."""
        self.writes += 1
        self.freed_buffers.remove(buffer)
        buffer.freed_at = None
        i = bisect_right(self.starts, buffer.start)
        self.starts.insert(i, buffer.start)
        self.buffers.insert(i, buffer)
        buffer.written = np.zeros(buffer.nbytes, np.uint8) if buffer.role in ("output", "scratch") else None

    def find(self, offset: int) -> Buffer | None:
        """The buffer that contains an arena offset; None if it lies between buffers."""
        i = bisect_right(self.starts, offset) - 1
        if i >= 0 and offset < self.buffers[i].end:
            return self.buffers[i]
        return None

    def find_freed(self, offset: int) -> Buffer | None:
        """The freed buffer that contained an arena offset; None if there was none."""
        i = bisect_right(self.freed_buffers, offset, key=_start) - 1
        return self.freed_buffers[i] if i >= 0 and offset < self.freed_buffers[i].end else None

    def nearest(self, offset: int) -> tuple[Buffer, str] | None:
        """The buffer that contains an arena offset and "", or the nearest buffer and its distance in words; None for an
        offset outside of the arena."""
        inside = self.find(offset)
        if inside is not None:
            return inside, ""
        i = bisect_right(self.starts, offset) - 1
        if not 0 <= offset < self.capacity or not self.buffers:
            return None
        if i < 0:
            return self.buffers[0], f"{self.starts[0] - offset} bytes before its start"
        before = self.buffers[i]
        after = self.buffers[i + 1] if i + 1 < len(self.buffers) else None
        if after is not None and after.start - offset < offset - before.end:
            return after, f"{after.start - offset} bytes before its start"
        return before, f"{offset - before.end} bytes past its end"

    def describe(self, address: int) -> str:
        """Where a device address lies, in words."""
        offset = address - self.base
        freed = self.find_freed(offset)
        if freed is not None:
            history = f" ({freed.history})" if freed.history else ""
            return f"byte {offset - freed.start} of {freed.nbytes} that were freed{history}"
        nearest = self.nearest(offset)
        if nearest is None:
            return "outside any allocation"
        buffer, distance = nearest
        return f"{distance or f'byte {address - self.base - buffer.start}'} of {self.label(buffer)}"

    def name(self, buffer: Buffer) -> str:
        """A buffer's name: its own, the name of the variable that got its address, or its number."""
        known = buffer.name or (buffer.allocated_at.variable if buffer.allocated_at is not None else "")
        return known or (f"buffer {self.buffers.index(buffer)}" if buffer in self.buffers else "a freed buffer")

    def label(self, buffer: Buffer) -> str:
        """A buffer in words."""
        role = "" if buffer.role == "scratch" else f"{buffer.role}, "
        return f"{self.name(buffer)} ({role}{buffer.nbytes} bytes)"
