"""Runtime calls about memory: allocations, copies, fills, variables of modules."""

from __future__ import annotations

import ctypes
import struct

import numpy as np

from kernelproof.emulator.host.cuda import (
    INVALID_SYMBOL,
    INVALID_VALUE,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    SUCCESS,
    LaunchRefused,
)
from kernelproof.emulator.host.execution import load_globals
from kernelproof.emulator.host.graphs import Graph
from kernelproof.emulator.host.images import registered
from kernelproof.emulator.host.program import owners
from kernelproof.emulator.host.runtime_state import Call, RuntimeState, put
from kernelproof.emulator.host.standin import Words, standin
from kernelproof.emulator.host.streams import Streams
from kernelproof.emulator.memory.arena import Buffer
from kernelproof.emulator.memory.device_state import Touched
from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.reports import EmulatorError

# cudaMemcpyKind.
TO_DEVICE, FROM_DEVICE, DEVICE_TO_DEVICE = 1, 2, 3
# cudaMemoryType.
PINNED, DEVICE, MANAGED = 1, 2, 3


class MemoryCalls:
    """Calls about memory. Device ranges are checked against the arena's buffers; what the host writes counts as
    written."""

    def __init__(self, state: RuntimeState, streams: Streams) -> None:
        self.state, self.memory, self.streams, self.graphs = state, state.memory, streams, streams.graphs
        self.kinds: dict[int, int] = {}  # address of an allocation -> its cudaMemoryType
        self.calls: dict[str, Call] = {
            "malloc": self.malloc,
            "malloc_host": self.malloc_host,
            "malloc_async": self.malloc_async,
            "free": self.free,
            "free_async": self.free_async,
            "memcpy": self.memcpy,
            "memset": self.memset,
            "memcpy_to_symbol": self.memcpy_to_symbol,
            "memcpy_from_symbol": self.memcpy_from_symbol,
            "symbol_address": self.symbol_address,
            "mem_info": self.mem_info,
            "host_pointer": self.host_pointer,
            "pointer_attributes": self.pointer_attributes,
            "init_module": self.init_module,
        }

    def _region(self, address: int, count: int) -> Buffer | None:
        """The buffer that contains a device range; None for host memory. Raises LaunchRefused for a device range
        outside of every buffer."""
        offset = address - self.memory.base
        if not 0 <= offset < self.memory.capacity:
            return None
        buffer = self.memory.find(offset)
        if buffer is None or offset + count > buffer.end:
            raise LaunchRefused(INVALID_VALUE, f"{count} bytes at {hex(address)}: {self.memory.describe(address)}")
        return buffer

    def _check(self, address: int, count: int, stream: int) -> bool:
        """Is it a device range? Work that is recorded for a graph may also use memory that graphs allocate when they
        run. Raises LaunchRefused as ``_region`` does."""
        if stream in self.graphs.capturing and self.graphs.memory.covers(address, count):
            return True
        return self._region(address, count) is not None

    def _touch(self, address: int, count: int) -> Buffer | None:
        """The buffer of a range that is about to be written; None for host memory."""
        buffer = self._region(address, count) if count else None
        if buffer is not None and buffer.written is not None:
            start = address - buffer.address
            buffer.written[start : start + count] = 1
        return buffer

    def _allocate(self, out: int, nbytes: int, role: str, kind: int) -> int:
        try:
            buffer = self.memory.allocate(max(1, nbytes), role)
        except EmulatorError:
            return OUT_OF_MEMORY
        self.kinds[buffer.address] = kind
        buffer.of_host = kind != DEVICE
        put(out, "Q", buffer.address)
        return SUCCESS

    def malloc(self, a: Words) -> int:
        """cudaMalloc: out, bytes."""
        return self._allocate(a[0], a[1], "scratch", DEVICE)

    def malloc_host(self, a: Words) -> int:
        """cudaMallocHost and cudaMallocManaged: out, bytes, whether it is managed. Host and device use one address. The
        host writes without a call, so all of the memory counts as written."""
        return self._allocate(a[0], a[1], "inout", MANAGED if a[2] else PINNED)

    def malloc_async(self, a: Words) -> int:
        """cudaMallocAsync: out, bytes, stream. Work on other streams has to wait for the allocation."""
        graph = self.graphs.captured.get(a[2])
        if graph is not None:
            return self._allocate_in_graph(a[0], a[1], a[2], graph)
        code = self._allocate(a[0], a[1], "scratch", DEVICE)
        if code == SUCCESS:
            (address,) = struct.unpack("<Q", ctypes.string_at(a[0], 8))
            buffer = self._begins(address)
            assert buffer is not None
            self.streams.touch_whole(a[2], "an allocation", buffer)
        return code

    def _allocate_in_graph(self, out: int, nbytes: int, stream: int, graph: Graph) -> int:
        try:
            buffer = self.graphs.memory.reserve(graph.memory, nbytes)
        except EmulatorError:
            return OUT_OF_MEMORY
        put(out, "Q", buffer.address)
        return self.graphs.give(stream, lambda on: self.graphs.memory.allocate(buffer, on))

    def free_async(self, a: Words) -> int:
        """cudaFreeAsync: address, stream. It has to wait for work on other streams."""
        if not a[0]:
            return SUCCESS
        graph = self.graphs.captured.get(a[1])
        if graph is not None:
            freed = self.graphs.memory.freed_by(graph.memory, a[0])
            return self.graphs.give(a[1], lambda on: self.graphs.memory.free(freed, on))
        buffer = self._begins(a[0])
        if buffer is None:
            return INVALID_VALUE
        self.streams.touch_whole(a[1], "a free", buffer)
        return self.free(a)

    def _begins(self, address: int) -> Buffer | None:
        """The buffer that begins at an address."""
        buffer = self.memory.find(address - self.memory.base)
        return buffer if buffer is not None and buffer.address == address else None

    def free(self, a: Words) -> int:
        """cudaFree."""
        if not a[0]:
            return SUCCESS
        buffer = self._begins(a[0])
        if buffer is None:
            return INVALID_VALUE
        self.streams.forget(buffer)
        self.memory.free(buffer)
        return SUCCESS

    def memcpy(self, a: Words) -> int:
        """cudaMemcpy: destination, source, bytes, kind, stream, whether it is asynchronous."""
        to, source, count, kind, stream, asynchronous = (a[i] for i in range(6))
        for address, on_device, side in (
            (to, kind in (TO_DEVICE, DEVICE_TO_DEVICE), "destination"),
            (source, kind in (FROM_DEVICE, DEVICE_TO_DEVICE), "source"),
        ):
            if count and on_device and not self._inside(address):
                raise LaunchRefused(INVALID_VALUE, f"the {side} {hex(address)} of a copy is not device memory")
        if count:  # a copy of no bytes may begin at a buffer's end
            self._check(to, count, stream)
            self._check(source, count, stream)
        return self.streams.give(stream, lambda on: self._copy(to, source, count, on, bool(asynchronous)))

    def _copy(self, to: int, source: int, count: int, stream: int, asynchronous: bool) -> int:
        if count:
            read, written = self._region(source, count), self._region(to, count)
            self._account(stream, "a copy", (read, source), (written, to), count, asynchronous)
            if written is not None:
                start = to - written.address
                if written.written is not None:
                    defined: Array | int = 1
                    if read is not None and read.written is not None:
                        defined = read.written[source - read.address :][:count].copy()
                    written.written[start : start + count] = defined
                self._note_change(written, start, (ctypes.c_uint8 * count).from_address(source))
            ctypes.memmove(to, source, count)
        return SUCCESS

    def _note_change(self, buffer: Buffer, start: int, data: ctypes.Array[ctypes.c_uint8]) -> None:
        """Count a write that changes the content: launches are only known to repeat while the count stays."""
        new = np.ctypeslib.as_array(data)
        if not np.array_equal(buffer.bytes()[start : start + len(new)], new):
            self.memory.writes += 1

    def _inside(self, address: int) -> bool:
        return 0 <= address - self.memory.base < self.memory.capacity

    def _account(
        self,
        stream: int,
        name: str,
        read: tuple[Buffer | None, int],
        written: tuple[Buffer | None, int],
        count: int,
        asynchronous: bool,
    ) -> None:
        """Tell the streams of a copy or a fill."""
        touched = []
        for (buffer, address), writes in ((read, False), (written, True)):
            if buffer is not None and self.streams.several:
                mask = np.broadcast_to(np.True_, count)
                first = address - buffer.address
                touched.append(Touched(buffer, 1, None if writes else mask, mask if writes else None, first))
        self.streams.touch(stream, name, touched, wait=not asynchronous)

    def memset(self, a: Words) -> int:
        """cudaMemset: destination, value, bytes, bytes of the value, stream, whether it is asynchronous."""
        to, value, count, size, stream, asynchronous = (a[i] for i in range(6))
        if count and not self._check(to, count, stream):
            raise LaunchRefused(INVALID_VALUE, f"memset of {hex(to)}, which is not device memory")
        return self.streams.give(stream, lambda on: self._fill(to, value, count, size, on, bool(asynchronous)))

    def _fill(self, to: int, value: int, count: int, size: int, stream: int, asynchronous: bool) -> int:
        buffer = self._touch(to, count)
        if buffer is not None:
            self._account(stream, "a memset", (None, 0), (buffer, to), count, asynchronous)
            pattern = np.frombuffer((value & (1 << 8 * size) - 1).to_bytes(size, "little"), np.uint8)
            start = to - buffer.address
            content = buffer.bytes()[start : start + count]
            if not _filled(content, pattern):
                self.memory.writes += 1
                content[:] = np.tile(pattern, count // size) if size > 1 else pattern
        return SUCCESS

    def _symbol(self, host: int) -> int:
        """The device address of a variable, by the address of its host symbol."""
        owner, image = ctypes.c_int(0), ctypes.c_int(0)
        raw = standin().emulator_variable(host, ctypes.byref(owner), ctypes.byref(image))
        if raw is None:
            raise LaunchRefused(INVALID_SYMBOL, f"{hex(host)} is no registered variable")
        return self._placed(owner.value, image.value, raw.decode())

    def _placed(self, owner: int, image: int, name: str) -> int:
        """The address of a variable of a registered module. Raises LaunchRefused."""
        program = owners.get(owner) or registered(image, self.state.device, self.state.policy.machine_code)
        address = load_globals(program.module, self.memory).get(name)
        if address is None:
            raise LaunchRefused(INVALID_SYMBOL, f"variable {name} is in no loaded PTX")
        return address

    def init_module(self, _: Words) -> int:
        """Set the pointers through which the host reads __managed__ variables; called before it reads one."""
        pointer, owner, image, number = ctypes.c_void_p(), ctypes.c_int(0), ctypes.c_int(0), 0
        while raw := standin().emulator_managed(number, *map(ctypes.byref, (pointer, owner, image))):
            assert pointer.value is not None
            put(pointer.value, "Q", self._placed(owner.value, image.value, raw.decode()))
            number += 1
        return SUCCESS

    def symbol_address(self, a: Words) -> int:
        """cudaGetSymbolAddress: out, symbol."""
        put(a[0], "Q", self._symbol(a[1]))
        return SUCCESS

    def memcpy_to_symbol(self, a: Words) -> int:
        """cudaMemcpyToSymbol: symbol, source, bytes, offset, stream, whether it is asynchronous."""
        to, source, count = self._symbol(a[0]) + a[3], a[1], a[2]
        self._region(to, count)
        asynchronous = bool(a[5])
        return self.streams.give(a[4], lambda on: self._copy(to, source, count, on, asynchronous))

    def memcpy_from_symbol(self, a: Words) -> int:
        """cudaMemcpyFromSymbol: destination, symbol, bytes, offset, stream, whether it is asynchronous."""
        to, source, count = a[0], self._symbol(a[1]) + a[3], a[2]
        self._region(source, count)
        asynchronous = bool(a[5])
        return self.streams.give(a[4], lambda on: self._copy(to, source, count, on, asynchronous))

    def host_pointer(self, a: Words) -> int:
        """cudaHostGetDevicePointer: out, pinned memory."""
        if not self._inside(a[1]):
            raise LaunchRefused(NOT_SUPPORTED, "device access to memory of cudaHostRegister: use cudaHostAlloc")
        put(a[0], "Q", a[1])
        return SUCCESS

    def pointer_attributes(self, a: Words) -> int:
        """cudaPointerGetAttributes: out, pointer."""
        buffer = self.memory.find(a[1] - self.memory.base) if self._inside(a[1]) else None
        kind = 0 if buffer is None else self.kinds.get(buffer.address, DEVICE)
        on_host = a[1] if kind != DEVICE else 0
        ctypes.memset(a[0], 0, 24 + 64)
        put(a[0], "2i2Q", kind, 0 if kind else -2, a[1] if kind else 0, on_host)
        return SUCCESS

    def mem_info(self, a: Words) -> int:
        """cudaMemGetInfo: out free, out total."""
        put(a[0], "Q", self.memory.capacity - self.memory.next)
        put(a[1], "Q", self.memory.capacity)
        return SUCCESS


def _filled(content: Array, pattern: Array) -> bool:
    """Do the bytes repeat a pattern of 1, 2 or 4 bytes? They are compared as words, because programs clear caches by
    large fills."""
    whole = len(content) // 8 * 8
    words = content[:whole].view(np.uint64)
    word = np.tile(pattern, 8 // len(pattern)).view(np.uint64)[0]
    rest = content[whole:]
    return bool((words == word).all()) and np.array_equal(rest, np.tile(pattern, len(rest) // len(pattern)))
