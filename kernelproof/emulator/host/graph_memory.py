"""Manages the memory that nodes of CUDA graphs allocate and free.

The address of such memory is fixed when the allocation node is made. The memory exists from the moment at which a
launch of the graph reaches that node, until work on a stream, another launch or the host frees it. The rules are in
"Graph Memory Nodes" of the CUDA C++ Programming Guide, and in the descriptions of cudaGraphAddMemAllocNode,
cudaGraphAddMemFreeNode and cudaGraphLaunch in cuda_runtime_api.h of CUDA 13.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kernelproof.emulator.host.cuda import INVALID_VALUE, SUCCESS, LaunchRefused
from kernelproof.emulator.host.runtime_state import Call, put
from kernelproof.emulator.host.standin import Words
from kernelproof.emulator.memory.arena import Buffer, Memory

# cudaGraphMemAttributeType.
USED, USED_HIGH, RESERVED, RESERVED_HIGH = range(4)


@dataclass(eq=False)
class MemoryNodes:
    """The buffers that the nodes of one graph allocate, and those that they free."""

    allocated: list[Buffer] = field(default_factory=list)
    freed: list[Buffer] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.allocated or self.freed)


class GraphMemory:
    """The memory of all graphs of a session.

    ``account(stream, name, buffer)`` is called for work on a stream that touches all bytes of a buffer. ``name`` says
    what work it is. ``forget(buffer)`` is called before a buffer is freed.
    """

    def __init__(
        self, memory: Memory, account: Callable[[int, str, Buffer], None], forget: Callable[[Buffer], None]
    ) -> None:
        self.memory, self.account, self.forget = memory, account, forget
        self.owners: dict[Buffer, MemoryNodes] = {}  # buffer -> nodes of the graph that allocates it
        self.freed_elsewhere: set[Buffer] = set()  # buffers that a node of another graph frees
        self.used_high = self.reserved = self.reserved_high = 0  # bytes
        self.calls: dict[str, Call] = {
            "graph_memory": self.attribute,
            "graph_memory_reset": self.reset_attribute,
            "graph_memory_trim": self.trim,
        }

    # --- when nodes are made ---

    def reserve_address(self, nodes: MemoryNodes, nbytes: int) -> Buffer:
        """A buffer for a new node that allocates; it has an address, but does not exist yet. Raises EmulatorError if
        the arena is full."""
        buffer = self.memory.allocate(max(1, nbytes))
        self.memory.free(buffer)
        self.owners[buffer] = nodes
        nodes.allocated.append(buffer)
        return buffer

    def add_free(self, nodes: MemoryNodes, address: int) -> Buffer:
        """Record that a new node frees the buffer at ``address``, and return the buffer.

        Raises LaunchRefused if no graph allocates it, if a node of the same graph frees it already, or if the graph
        that allocates it and another one would both free it.
        """
        buffer = next((buffer for buffer in self.owners if buffer.address == address), None)
        if buffer is None:
            raise LaunchRefused(INVALID_VALUE, f"a graph frees {address:#x}, which no node of a graph allocates")
        owner = self.owners[buffer]
        if buffer in nodes.freed:
            raise LaunchRefused(INVALID_VALUE, f"two nodes of a graph free {address:#x}")
        freed_by_others = self.freed_elsewhere if nodes is owner else owner.freed
        if buffer in freed_by_others:
            raise LaunchRefused(INVALID_VALUE, f"the graph that allocates {address:#x} and another one free it")
        nodes.freed.append(buffer)
        if nodes is not owner:
            self.freed_elsewhere.add(buffer)
        return buffer

    def covers(self, address: int, count: int) -> bool:
        """Do these bytes lie in memory that some graph allocates?"""
        return any(buffer.address <= address <= buffer.address + buffer.nbytes - count for buffer in self.owners)

    # --- when graphs run ---

    def allocate(self, buffer: Buffer, stream: int) -> int:
        """Let memory exist, with undefined contents, because a launch has reached the node that allocates it."""
        self.memory.restore(buffer)
        self.account(stream, "an allocation", buffer)
        self.reserved = max(self.reserved, self._used())
        self.used_high = max(self.used_high, self._used())
        self.reserved_high = max(self.reserved_high, self.reserved)
        return SUCCESS

    def free(self, buffer: Buffer, stream: int) -> int:
        """Free memory, because a launch has reached the node that frees it. Raises LaunchRefused if it does not
        exist."""
        if not self.exists(buffer):
            raise LaunchRefused(INVALID_VALUE, f"a graph frees {buffer.address:#x}, which is not allocated by then")
        self.account(stream, "a free", buffer)
        self.forget(buffer)
        self.memory.free(buffer)
        return SUCCESS

    def begin_launch(self, nodes: MemoryNodes, stream: int, auto_free: bool) -> None:
        """Check that the memory of earlier launches of a graph is free; with ``auto_free``, free it. Raises
        LaunchRefused."""
        for buffer in nodes.allocated:
            if not self.exists(buffer):
                continue
            if not auto_free:
                raise LaunchRefused(
                    INVALID_VALUE,
                    f"a graph is launched again before the {buffer.nbytes} bytes at {buffer.address:#x} are freed that "
                    "it allocated; free them, or instantiate it with cudaGraphInstantiateFlagAutoFreeOnLaunch",
                )
            self.free(buffer, stream)

    def exists(self, buffer: Buffer) -> bool:
        """Is the buffer allocated at present?"""
        return self.memory.find(buffer.start) is buffer

    # --- attributes of the device ---

    def _used(self) -> int:
        """Bytes of memory that exists at present."""
        return sum(buffer.nbytes for buffer in self.owners if self.exists(buffer))

    def attribute(self, a: Words) -> int:
        """cudaDeviceGetGraphMemAttribute: attribute, out bytes."""
        values = {
            USED: self._used(),
            USED_HIGH: self.used_high,
            RESERVED: self.reserved,
            RESERVED_HIGH: self.reserved_high,
        }
        if a[0] not in values:
            return INVALID_VALUE
        put(a[1], "Q", values[a[0]])
        return SUCCESS

    def reset_attribute(self, a: Words) -> int:
        """cudaDeviceSetGraphMemAttribute: attribute. A high-water mark becomes the present value."""
        if a[0] == USED_HIGH:
            self.used_high = self._used()
        elif a[0] == RESERVED_HIGH:
            self.reserved_high = self.reserved
        else:
            return INVALID_VALUE
        return SUCCESS

    def trim(self, _: Words) -> int:
        """cudaDeviceGraphMemTrim: memory that is not in use is returned to the system."""
        self.reserved = self._used()
        return SUCCESS
