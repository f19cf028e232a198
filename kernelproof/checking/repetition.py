"""Launches on the same data: programs that measure time launch the same kernel many times.

The machine is deterministic, so the same launch (kernel, geometry, parameters) on the same contents of memory has the
same effect. If it left every byte as it was, it changes nothing again until something else does; if it changed some, as
behind a memset that resets its outputs, they are put there again.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kernelproof.emulator.frontend.ptx import Module
from kernelproof.emulator.host.execution import KernelLaunch, Snapshot
from kernelproof.emulator.memory.arena import Memory

_Key = tuple[int, str, object, bytes]
# Bytes of device memory that the effects of launches keep, in all.
EFFECTS_LIMIT = 1 << 29


class _Effect(NamedTuple):
    """All of memory before a launch, and what the launch changed."""

    before: Snapshot
    changed: Snapshot

    @property
    def nbytes(self) -> int:
        return self.before.nbytes + self.changed.nbytes


class Repetitions:
    """Launches whose effect on the present contents of memory is known."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._modules: dict[int, Module] = {}  # kept alive, so that their ids are not reused
        # Launches that left memory as it was, and the version of memory that they saw.
        self._fixed: dict[_Key, tuple[int, int]] = {}
        # The last effect of each launch that changed memory, the latest last.
        self._effects: dict[_Key, _Effect] = {}
        self._changes = 0

    def repeat(self, launch: KernelLaunch) -> bool:
        """Applies a launch's known effect without executing it; False if it is not known."""
        key = _key(launch)
        fixed = self._fixed.get(key)
        if fixed is not None and fixed == self._version():
            return True
        effect = self._effects.get(key)
        if effect is None or not effect.before.covers(self.memory) or not effect.before.matches():
            return False
        effect.changed.restore()
        self._changes += 1
        return True

    @contextmanager
    def observed(self, launch: KernelLaunch) -> Iterator[None]:
        """Around an execution: notes whether it changes memory."""
        key = _key(launch)
        before = launch.before = Snapshot.of(self.memory)
        self._modules[key[0]] = launch.module
        yield
        changed = before.changed() if before is not None else None
        if changed == []:
            self._fixed[key] = self._version()
            return
        self._changes += 1
        self._effects.pop(key, None)
        if before is not None and changed:
            self._keep(key, _Effect(before, Snapshot(changed)))

    def _keep(self, key: _Key, effect: _Effect) -> None:
        """Keep an effect, and forget the oldest ones beyond the limit."""
        self._effects[key] = effect
        total = sum(item.nbytes for item in self._effects.values())
        for old in list(self._effects):
            if total <= EFFECTS_LIMIT:
                break
            total -= self._effects.pop(old).nbytes

    def forget(self, launch: KernelLaunch) -> None:
        """Marks a launch as never to be repeated, because it also prints."""
        self._fixed.pop(_key(launch), None)
        self._effects.pop(_key(launch), None)

    def _version(self) -> tuple[int, int]:
        """Changes with every execution that changes memory, and with what the host writes."""
        return self._changes, self.memory.writes + _written_by_host(self.memory)


def _written_by_host(memory: Memory) -> int:
    """A checksum of memory that the host writes without a runtime call."""
    total = 0
    for buffer in memory.buffers:
        if buffer.written is None and buffer.role == "inout":
            total = zlib.crc32(buffer.bytes().data, total)
    return total


def _key(launch: KernelLaunch) -> _Key:
    return id(launch.module), launch.kernel, launch.geometry, launch.parameters
