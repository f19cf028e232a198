"""Launches that change nothing: programs that measure time launch the same kernel on the same data many times.

The machine is deterministic. If a launch left every byte of device memory as it was, the same launch (kernel, geometry,
parameters) changes nothing again until something else does.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from cudal2gen.emulator.frontend.ptx import Module
from cudal2gen.emulator.host.execution import Launch, Snapshot
from cudal2gen.emulator.memory.arena import Memory

_Key = tuple[int, str, object, bytes]


class Repetitions:
    """Which launches are known to change nothing now."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._modules: dict[int, Module] = {}  # kept, so that their identities stay theirs
        # Launches that left memory as it was, and the version of memory that they saw.
        self._fixed: dict[_Key, tuple[int, int]] = {}
        self._changes = 0

    def changes_nothing(self, launch: Launch) -> bool:
        """Would the launch change nothing?"""
        fixed = self._fixed.get(_key(launch))
        return fixed is not None and fixed == self._version()

    @contextmanager
    def observed(self, launch: Launch) -> Iterator[None]:
        """Around an execution: notes whether it changes memory."""
        key = _key(launch)
        before = Snapshot.of(self.memory)
        self._modules[key[0]] = launch.module
        yield
        if before is not None and before.matches():
            self._fixed[key] = self._version()
        else:
            self._changes += 1

    def forget(self, launch: Launch) -> None:
        """The launch does more than change memory: it prints."""
        self._fixed.pop(_key(launch), None)

    def _version(self) -> tuple[int, int]:
        """Changes with every execution that changes memory, and with what the host writes."""
        return self._changes, self.memory.writes + _written_by_host(self.memory)


def _written_by_host(memory: Memory) -> int:
    """A check sum of memory that the host writes without a call."""
    total = 0
    for buffer in memory.buffers:
        if buffer.written is None and buffer.role == "inout":
            total = zlib.crc32(buffer.bytes().data, total)
    return total


def _key(launch: Launch) -> _Key:
    return id(launch.module), launch.kernel, launch.geometry, launch.parameters
