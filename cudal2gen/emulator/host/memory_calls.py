"""Runtime calls on memory: allocations, copies, module variables."""

from __future__ import annotations

import ctypes

from cudal2gen.emulator.host.cuda import INVALID_SYMBOL, INVALID_VALUE, OUT_OF_MEMORY, SUCCESS, LaunchRefused
from cudal2gen.emulator.host.execution import load_globals
from cudal2gen.emulator.host.program import owners
from cudal2gen.emulator.host.runtime_state import Call, RuntimeState, put
from cudal2gen.emulator.host.standin import Words, standin
from cudal2gen.emulator.memory.arena import Buffer
from cudal2gen.emulator.state.reports import EmulatorError


class MemoryCalls:
    """Device ranges are checked against the arena's buffers; what the host writes counts as written."""

    def __init__(self, state: RuntimeState) -> None:
        self.memory = state.memory
        self.calls: dict[str, Call] = {
            "malloc": self.malloc,
            "free": self.free,
            "memcpy": self.memcpy,
            "memset": self.memset,
            "memcpy_to_symbol": self.memcpy_to_symbol,
            "memcpy_from_symbol": self.memcpy_from_symbol,
            "symbol_address": self.symbol_address,
            "mem_info": self.mem_info,
        }

    def _region(self, address: int, count: int) -> Buffer | None:
        """The buffer behind a device range; None for host memory. Raises LaunchRefused for a device range outside any
        buffer."""
        offset = address - self.memory.base
        if not 0 <= offset < self.memory.capacity:
            return None
        buffer = self.memory.find(offset)
        if buffer is None or offset + count > buffer.end:
            raise LaunchRefused(INVALID_VALUE, f"{count} bytes at {hex(address)}: {self.memory.describe(address)}")
        return buffer

    def _touch(self, address: int, count: int) -> Buffer | None:
        """The region, about to be written."""
        buffer = self._region(address, count) if count else None
        if buffer is not None and buffer.written is not None:
            start = address - buffer.address
            buffer.written[start : start + count] = 1
        return buffer

    def malloc(self, a: Words) -> int:
        """cudaMalloc: out, bytes."""
        try:
            buffer = self.memory.allocate(max(1, a[1]), "scratch", name="cudaMalloc")
        except EmulatorError:
            return OUT_OF_MEMORY
        put(a[0], "Q", buffer.address)
        return SUCCESS

    def free(self, a: Words) -> int:
        """cudaFree."""
        if not a[0]:
            return SUCCESS
        buffer = self.memory.find(a[0] - self.memory.base)
        if buffer is None or buffer.address != a[0]:
            return INVALID_VALUE
        self.memory.free(buffer)
        return SUCCESS

    def memcpy(self, a: Words) -> int:
        """cudaMemcpy: destination, source, bytes."""
        if a[2]:
            self._region(a[1], a[2])
            self._touch(a[0], a[2])
            ctypes.memmove(a[0], a[1], a[2])
        return SUCCESS

    def memset(self, a: Words) -> int:
        """cudaMemset: destination, byte, bytes."""
        if a[2]:
            if self._touch(a[0], a[2]) is None:
                raise LaunchRefused(INVALID_VALUE, f"memset of {hex(a[0])}, which is not device memory")
            ctypes.memset(a[0], a[1] & 255, a[2])
        return SUCCESS

    def _symbol(self, host: int) -> int:
        """The device address of a variable, by its host symbol."""
        owner = ctypes.c_int(0)
        raw = standin().emulator_variable(host, ctypes.byref(owner))
        if raw is None:
            raise LaunchRefused(INVALID_SYMBOL, f"{hex(host)} is no registered variable")
        program = owners.get(owner.value)
        address = load_globals(program.module, self.memory).get(raw.decode()) if program is not None else None
        if address is None:
            raise LaunchRefused(INVALID_SYMBOL, f"variable {raw.decode()} is in no loaded PTX")
        return address

    def symbol_address(self, a: Words) -> int:
        """cudaGetSymbolAddress: out, symbol."""
        put(a[0], "Q", self._symbol(a[1]))
        return SUCCESS

    def memcpy_to_symbol(self, a: Words) -> int:
        """cudaMemcpyToSymbol: symbol, source, bytes, offset."""
        address = self._symbol(a[0]) + a[3]
        self._touch(address, a[2])
        ctypes.memmove(address, a[1], a[2])
        return SUCCESS

    def memcpy_from_symbol(self, a: Words) -> int:
        """cudaMemcpyFromSymbol: destination, symbol, bytes, offset."""
        address = self._symbol(a[1]) + a[3]
        self._region(address, a[2])
        ctypes.memmove(a[0], address, a[2])
        return SUCCESS

    def mem_info(self, a: Words) -> int:
        """cudaMemGetInfo: out free, out total."""
        put(a[0], "Q", self.memory.capacity - self.memory.next)
        put(a[1], "Q", self.memory.capacity)
        return SUCCESS
