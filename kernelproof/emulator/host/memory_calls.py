"""Answers runtime calls about memory, which allocate, free, copy and fill it, and find variables of modules."""

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
from kernelproof.emulator.host.graphs import CapturedGraph
from kernelproof.emulator.host.images import registered
from kernelproof.emulator.host.program import owners
from kernelproof.emulator.host.runtime_state import Call, RuntimeState, put
from kernelproof.emulator.host.standin import Words, standin
from kernelproof.emulator.host.streams import Streams
from kernelproof.emulator.memory.arena import Buffer
from kernelproof.emulator.memory.device_state import AccessedGranules
from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.reports import EmulatorError

# cudaMemcpyKind -> (is the destination device memory, is the source); None: the address decides.
_ON_DEVICE: dict[int, tuple[bool | None, bool | None]] = {
    0: (False, False),
    1: (True, False),
    2: (False, True),
    3: (True, True),
    4: (None, None),
}
# cudaMemoryType.
PINNED, DEVICE, MANAGED = 1, 2, 3
_INVALID_DEVICE = -2  # cudaInvalidDeviceId
# Bytes of a cudaPointerAttributes: type, device and two pointers, then reserved words.
_ATTRIBUTES_BYTES = 24 + 64
_KIND_NAMES = {PINNED: "pinned memory", DEVICE: "device memory", MANAGED: "managed memory"}


class MemoryCalls:
    """Runtime calls about memory. Ranges of device memory must lie in one buffer of the arena. Bytes that a copy or
    fill writes count as written."""

    def __init__(self, state: RuntimeState, streams: Streams) -> None:
        self.state, self.memory, self.streams, self.graphs = state, state.memory, streams, streams.graphs
        self.kinds: dict[int, int] = {}  # address of an allocation -> its cudaMemoryType
        self.is_reset = False  # has cudaDeviceReset been called?
        self.calls: dict[str, Call] = {
            "malloc": self.malloc,
            "malloc_host": self.malloc_host,
            "malloc_async": self.malloc_async,
            "free": self.free,
            "device_reset": self.reset_device,
            "host_register": self.register_host,
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
        """The buffer that contains ``count`` bytes at ``address``; None for host memory. Raises LaunchRefused if a
        range of device memory does not lie in one buffer."""
        offset = address - self.memory.base
        if not 0 <= offset < self.memory.capacity:
            return None
        buffer = self.memory.find(offset)
        if buffer is None or offset + count > buffer.end:
            freed = self.memory.find_freed(offset)
            rule = "use-after-free" if buffer is None and freed is not None and freed.freed_at is not None else ""
            text = f"{count} bytes at {hex(address)}: {self.memory.describe(address)}"
            raise LaunchRefused(INVALID_VALUE, text, rule)
        return buffer

    def _check(self, address: int, count: int, stream: int) -> bool:
        """Is a range device memory? Work that is recorded in a graph may also use memory that graphs allocate when they
        run. Raises LaunchRefused as ``_region`` does."""
        if stream in self.graphs.capturing and self.graphs.memory.covers(address, count):
            return True
        return self._region(address, count) is not None

    def _touch(self, address: int, count: int) -> Buffer | None:
        """Mark a range as written; returns its buffer, None for host memory or if it has no bytes."""
        buffer = self._region(address, count) if count else None
        if buffer is not None and buffer.written is not None:
            start = address - buffer.address
            buffer.written[start : start + count] = 1
        return buffer

    def _allocate(self, out: int, nbytes: int, role: str, kind: int) -> int:
        """Allocate a buffer with a role and a cudaMemoryType (``kind``); writes its address to ``out``."""
        try:
            buffer = self.memory.allocate(max(1, nbytes), role, of_host=kind != DEVICE)
        except EmulatorError:
            return OUT_OF_MEMORY
        self.kinds[buffer.address] = kind
        buffer.allocated_at = self.state.site
        put(out, "Q", buffer.address)
        return SUCCESS

    def malloc(self, a: Words) -> int:
        """cudaMalloc: out, bytes."""
        return self._allocate(a[0], a[1], "scratch", DEVICE)

    def malloc_host(self, a: Words) -> int:
        """cudaMallocHost and cudaMallocManaged: out, bytes, whether it is managed. Host and device use the same
        address. The host can write such memory without a call, so all of it counts as written."""
        return self._allocate(a[0], a[1], "inout", MANAGED if a[2] else PINNED)

    def malloc_async(self, a: Words) -> int:
        """cudaMallocAsync: out, bytes, stream. Work on other streams has to wait for the allocation."""
        graph = self.graphs.captured.get(a[2])
        if graph is not None:
            return self._allocate_in_graph(a[0], a[1], a[2], graph)
        code = self._allocate(a[0], a[1], "scratch", DEVICE)
        if code == SUCCESS:
            (address,) = struct.unpack("<Q", ctypes.string_at(a[0], 8))
            buffer = self._buffer_at(address)
            assert buffer is not None
            self.streams.touch_whole(a[2], "an allocation", buffer)
        return code

    def _allocate_in_graph(self, out: int, nbytes: int, stream: int, graph: CapturedGraph) -> int:
        """Record an allocation in a graph; writes its address to ``out``."""
        try:
            buffer = self.graphs.memory.reserve_address(graph.memory, nbytes)
        except EmulatorError:
            return OUT_OF_MEMORY
        buffer.allocated_at = self.state.site
        put(out, "Q", buffer.address)
        return self.graphs.give(stream, lambda actual_stream: self.graphs.memory.allocate(buffer, actual_stream))

    def free_async(self, a: Words) -> int:
        """cudaFreeAsync: address, stream. It must be ordered after work on other streams that uses the memory."""
        if not a[0]:
            return SUCCESS
        graph = self.graphs.captured.get(a[1])
        if graph is not None:
            freed = self.graphs.memory.add_free(graph.memory, a[0])
            return self.graphs.give(a[1], lambda actual_stream: self.graphs.memory.free(freed, actual_stream))
        buffer = self._buffer_to_free(a[0], "cudaFreeAsync", (DEVICE, MANAGED))
        self.streams.touch_whole(a[1], "a free", buffer)
        self._free(buffer)
        return SUCCESS

    def _buffer_at(self, address: int) -> Buffer | None:
        """The buffer that begins at an address."""
        buffer = self.memory.find(address - self.memory.base)
        return buffer if buffer is not None and buffer.address == address else None

    def free(self, a: Words) -> int:
        """cudaFree and cudaFreeHost: address, whether it is cudaFreeHost. The host waits for the device."""
        if not a[0]:
            return SUCCESS
        buffer = (
            self._buffer_to_free(a[0], "cudaFreeHost", (PINNED,))
            if a[1]
            else self._buffer_to_free(a[0], "cudaFree", (DEVICE, MANAGED))
        )
        self.streams.synchronize_device(a)
        self._free(buffer)
        return SUCCESS

    def _buffer_to_free(self, address: int, name: str, kinds: tuple[int, ...]) -> Buffer:
        """The buffer that the call ``name`` frees. Raises LaunchRefused if none begins at ``address``, or if its
        cudaMemoryType is not among ``kinds``."""
        buffer, variables = self._buffer_at(address), self.memory.globals.values()
        if buffer is not None and buffer not in variables and self._kind(address) in kinds:
            return buffer
        freed = self.memory.find_freed(address - self.memory.base) if self._inside(address) else None
        if freed is not None and freed.freed_at is not None:
            why = f"memory that was freed before ({freed.history})" if freed.history else "memory that was freed before"
        elif buffer is not None:
            allocated = f", allocated at {buffer.allocated_at}" if buffer.allocated_at else ""
            kind = "a variable" if buffer in variables else _KIND_NAMES[self._kind(address)]
            why = f"{self.memory.name(buffer)}, which is {kind}{allocated}"
        elif self._inside(address):
            why = self.memory.describe(address)
        else:
            why = f"{hex(address)}, which CUDA has not allocated"
        raise LaunchRefused(INVALID_VALUE, f"{name} of {why}", "invalid-free")

    def _free(self, buffer: Buffer) -> None:
        """Free a buffer and forget the accesses to it."""
        self.streams.forget(buffer)
        self.memory.free(buffer)

    def reset_device(self, a: Words) -> int:
        """cudaDeviceReset: the host waits for the device. Memory that is still allocated is no leak from now on."""
        self.is_reset = True
        return self.streams.synchronize_device(a)

    def leaked(self) -> list[Buffer]:
        """Allocations that the program has not freed; an empty list after cudaDeviceReset."""
        return [] if self.is_reset else [buffer for buffer in self.memory.buffers if buffer.address in self.kinds]

    def memcpy(self, a: Words) -> int:
        """cudaMemcpy: destination, source, bytes, kind, stream, whether it is asynchronous."""
        destination, source, count, kind, stream, asynchronous = (a[i] for i in range(6))
        if count:  # a copy of no bytes may begin at a buffer's end
            for address, on_device, side in (
                (destination, _ON_DEVICE[kind][0], "destination"), (source, _ON_DEVICE[kind][1], "source"),
            ):  # fmt: skip
                self._check_side(address, count, stream, on_device, side)
        return self.streams.give(
            stream, lambda actual_stream: self._copy(destination, source, count, actual_stream, bool(asynchronous))
        )

    def _check_side(self, address: int, count: int, stream: int, on_device: bool | None, side: str) -> None:
        """Refuse a side of a copy that exceeds its buffer, or that contradicts the copy's direction.

        ``on_device``: whether the direction places this side on the device; None: the address decides.
        """
        inside = self._check(address, count, stream)
        if inside and on_device is False and self._kind(address) == DEVICE:
            text = (
                f"the {side} of a copy is {self.memory.describe(address)}, device memory, where the direction says host"
            )
            raise LaunchRefused(INVALID_VALUE, text, "copy-direction")
        if not inside and on_device:
            raise LaunchRefused(
                INVALID_VALUE, f"the {side} of a copy, by its direction on the device, is {hex(address)}, which is not",
                "copy-direction",
            )  # fmt: skip

    def _kind(self, address: int) -> int:
        """The cudaMemoryType of an address; 0 for memory that CUDA has not allocated."""
        buffer = self.memory.find(address - self.memory.base) if self._inside(address) else None
        if buffer is None:
            return 0
        return self.kinds.get(buffer.address, MANAGED if buffer.of_host else DEVICE)

    def _waits(self, destination: int, source: int, asynchronous: bool) -> bool:
        """Does the call return only after the copy is done? See "API synchronization behavior" of the CUDA runtime."""
        kinds = {self._kind(destination), self._kind(source)}
        if asynchronous:
            return kinds <= {0, PINNED}  # from host to host
        return kinds != {DEVICE}

    def _copy(self, destination: int, source: int, count: int, stream: int, asynchronous: bool) -> int:
        """Copy bytes. Those that were undefined in the source are undefined in the destination."""
        if count:
            read, written = self._region(source, count), self._region(destination, count)
            wait = self._waits(destination, source, asynchronous)
            tick = self._account(stream, "a copy", (read, source), (written, destination), count, wait)
            own_destination, own_source = self.memory.own_address(destination), self.memory.own_address(source)
            if written is not None:
                start = destination - written.address
                if written.written is not None:
                    defined: Array | int = 1
                    if read is not None and read.written is not None:
                        defined = read.written[source - read.address :][:count].copy()
                    written.written[start : start + count] = defined
                # While the count of writes is the same, a launch with the same arguments has the same effect.
                new = np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(own_source))
                if not np.array_equal(written.bytes()[start : start + count], new):
                    self.memory.writes += 1
            ctypes.memmove(own_destination, own_source, count)
            if not wait:
                self._watch_own(stream, tick, destination, source, count)
        return SUCCESS

    def _watch_own(self, stream: int, tick: int, destination: int, source: int, count: int) -> None:
        """Protect the side of an asynchronous copy that CUDA has not allocated, until the host knows that it is
        over."""
        if not self._kind(destination):
            self.streams.watch_own(stream, tick, destination, count, writes=True)
        elif not self._kind(source) and self.streams.order.own_memory.is_registered(source):
            self.streams.watch_own(stream, tick, source, count, writes=False)

    def register_host(self, a: Words) -> int:
        """cudaHostRegister: address, bytes. cudaHostUnregister: address, 0."""
        registered = self.streams.order.own_memory.registered
        if a[1]:
            registered[a[0]] = a[1]
        else:
            registered.pop(a[0], None)
        return SUCCESS

    def _inside(self, address: int) -> bool:
        """Is an address in the range of the arena, which has all memory of CUDA?"""
        return 0 <= address - self.memory.base < self.memory.capacity

    def _account(
        self,
        stream: int,
        name: str,
        read: tuple[Buffer | None, int],
        written: tuple[Buffer | None, int],
        count: int,
        wait: bool,
    ) -> int:
        """Compare a copy or a fill with work on other streams. ``read`` and ``written``: buffer and address. ``wait``:
        the host waits for its end. Returns the number of the work on its stream."""
        touched = []
        for (buffer, address), writes in ((read, False), (written, True)):
            if buffer is not None and self.streams.matters(buffer):
                mask = np.broadcast_to(np.True_, count)
                first = address - buffer.address
                touched.append(AccessedGranules(buffer, 1, None if writes else mask, mask if writes else None, first))
        return self.streams.touch(stream, name, touched, wait=wait)

    def memset(self, a: Words) -> int:
        """cudaMemset: destination, value, bytes, bytes of the value, stream, whether it is asynchronous."""
        destination, value, count, size, stream, asynchronous = (a[i] for i in range(6))
        if count and not self._check(destination, count, stream):
            raise LaunchRefused(INVALID_VALUE, f"memset of {hex(destination)}, which is not device memory")
        return self.streams.give(
            stream, lambda actual_stream: self._fill(destination, value, count, size, actual_stream, bool(asynchronous))
        )

    def _fill(self, destination: int, value: int, count: int, size: int, stream: int, asynchronous: bool) -> int:
        """Fill ``count`` bytes with copies of a value of ``size`` bytes."""
        buffer = self._touch(destination, count)
        if buffer is not None:
            wait = not asynchronous and self._kind(destination) != DEVICE
            self._account(stream, "a memset", (None, 0), (buffer, destination), count, wait)
            pattern = np.frombuffer((value & (1 << 8 * size) - 1).to_bytes(size, "little"), np.uint8)
            start = destination - buffer.address
            content = buffer.bytes()[start : start + count]
            if not _repeats(content, pattern):
                self.memory.writes += 1
                content[:] = np.tile(pattern, count // size) if size > 1 else pattern
        return SUCCESS

    def _symbol(self, host: int) -> int:
        """The device address of a variable, by the address of its host symbol."""
        owner, image = ctypes.c_int(0), ctypes.c_int(0)
        raw = standin().emulator_variable(host, ctypes.byref(owner), ctypes.byref(image))
        if raw is None:
            raise LaunchRefused(INVALID_SYMBOL, f"{hex(host)} is no registered variable")
        return self._variable_address(owner.value, image.value, raw.decode())

    def _variable_address(self, owner: int, image: int, name: str) -> int:
        """The address of a variable of a registered module. Raises LaunchRefused."""
        program = owners.get(owner) or registered(image, self.state.device, self.state.policy.machine_code)
        address = load_globals(program.module, self.memory).get(name)
        if address is None:
            raise LaunchRefused(INVALID_SYMBOL, f"variable {name} is in no loaded PTX")
        return address

    def init_module(self, _: Words) -> int:
        """Set the pointers through which the host reads __managed__ variables. Host code that nvcc generates makes this
        call before the first such read."""
        pointer, owner, image, number = ctypes.c_void_p(), ctypes.c_int(0), ctypes.c_int(0), 0
        while raw := standin().emulator_managed(number, *map(ctypes.byref, (pointer, owner, image))):
            assert pointer.value is not None
            put(pointer.value, "Q", self._variable_address(owner.value, image.value, raw.decode()))
            number += 1
        return SUCCESS

    def symbol_address(self, a: Words) -> int:
        """cudaGetSymbolAddress: out, symbol."""
        put(a[0], "Q", self._symbol(a[1]))
        return SUCCESS

    def memcpy_to_symbol(self, a: Words) -> int:
        """cudaMemcpyToSymbol: symbol, source, bytes, offset, stream, whether it is asynchronous."""
        destination, source, count = self._symbol(a[0]) + a[3], a[1], a[2]
        self._region(destination, count)
        asynchronous = bool(a[5])
        return self.streams.give(
            a[4], lambda actual_stream: self._copy(destination, source, count, actual_stream, asynchronous)
        )

    def memcpy_from_symbol(self, a: Words) -> int:
        """cudaMemcpyFromSymbol: destination, symbol, bytes, offset, stream, whether it is asynchronous."""
        destination, source, count = a[0], self._symbol(a[1]) + a[3], a[2]
        self._region(source, count)
        asynchronous = bool(a[5])
        return self.streams.give(
            a[4], lambda actual_stream: self._copy(destination, source, count, actual_stream, asynchronous)
        )

    def host_pointer(self, a: Words) -> int:
        """cudaHostGetDevicePointer: out, address of pinned memory."""
        if not self._inside(a[1]):
            raise LaunchRefused(NOT_SUPPORTED, "device access to memory of cudaHostRegister: use cudaHostAlloc")
        put(a[0], "Q", a[1])
        return SUCCESS

    def pointer_attributes(self, a: Words) -> int:
        """cudaPointerGetAttributes: out, pointer."""
        kind = self._kind(a[1])
        on_host = a[1] if kind != DEVICE else 0
        ctypes.memset(a[0], 0, _ATTRIBUTES_BYTES)
        put(a[0], "2i2Q", kind, 0 if kind else _INVALID_DEVICE, a[1] if kind else 0, on_host)
        return SUCCESS

    def mem_info(self, a: Words) -> int:
        """cudaMemGetInfo: out free, out total."""
        put(a[0], "Q", self.memory.capacity - self.memory.next)
        put(a[1], "Q", self.memory.capacity)
        return SUCCESS


def _repeats(content: Array, pattern: Array) -> bool:
    """Do the bytes repeat a pattern of 1, 2 or 4 bytes? They are compared as words, because programs clear caches by
    large fills."""
    word_bytes = len(content) // 8 * 8
    words = content[:word_bytes].view(np.uint64)
    word = np.tile(pattern, 8 // len(pattern)).view(np.uint64)[0]
    rest = content[word_bytes:]
    return bool((words == word).all()) and np.array_equal(rest, np.tile(pattern, len(rest) // len(pattern)))
