"""Skips launches whose effect is already known. Programs that measure time launch the same kernel many times.

The emulator is deterministic, so the same launch (kernel, geometry and parameters) on the same contents of memory has
the same effect. There are two cases. A launch that left every byte as it was changes nothing again until something else
changes memory. A launch that changed bytes, for example after a memset that resets its outputs, is repeated by writing
those bytes again.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kernelproof.emulator.frontend.ptx import Module
from kernelproof.emulator.host.execution import KernelLaunch, Snapshot
from kernelproof.emulator.memory.arena import Memory
from kernelproof.emulator.memory.device_state import AccessedGranules

# A launch: identity of its module, kernel, geometry and parameters. The contents of memory are not part of it.
_Key = tuple[int, str, object, bytes]
# The most bytes of all stored effects together, and of all stored accesses together.
EFFECTS_LIMIT, ACCESSES_LIMIT = 1 << 29, 1 << 27


class _Effect(NamedTuple):
    """The effect of a launch: the contents of all memory before it, and the new contents of what it changed."""

    before: Snapshot
    changed: Snapshot

    @property
    def nbytes(self) -> int:
        return self.before.nbytes + self.changed.nbytes


class Repetitions:
    """Launches whose effect on the present contents of memory is known."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        # Keys contain the id of a module. A module that is freed could leave its id to another one.
        self._modules: dict[int, Module] = {}
        # Launches that left memory unchanged, each with the version of memory on which it ran.
        self._unchanging: dict[_Key, tuple[int, int]] = {}
        # The last effect of each launch that changed memory, the latest last.
        self._effects: dict[_Key, _Effect] = {}
        # The accesses of each launch, by which its order with other streams and the host is checked. The latest launch
        # comes last.
        self._touched: dict[_Key, list[AccessedGranules]] = {}
        self._changes = 0

    def repeat(self, launch: KernelLaunch) -> bool:
        """Apply a launch's effect without executing it. Returns False, and leaves memory as it is, if the effect is not
        known. Sets ``launch.remembered``."""
        key = _key(launch)
        launch.remembered = self._touched.get(key, [])
        unchanged_version = self._unchanging.get(key)
        if unchanged_version is not None and unchanged_version == self._version():
            return True
        effect = self._effects.get(key)
        if effect is None or not effect.before.covers(self.memory) or not effect.before.matches():
            return False
        effect.changed.restore()
        self._changes += 1
        return True

    @contextmanager
    def observed(self, launch: KernelLaunch) -> Iterator[None]:
        """A context in which a launch is executed, and after which its effect on memory is stored."""
        key = _key(launch)
        before = launch.before = Snapshot.of(self.memory)
        self._modules[key[0]] = launch.module
        yield
        self._keep_accesses(key, launch.touched())
        # None: memory was too large to be copied, so the effect is not known.
        changed = before.changed() if before is not None else None
        if changed == []:
            self._unchanging[key] = self._version()
            return
        self._changes += 1
        self._effects.pop(key, None)
        if before is not None and changed:
            self._keep(key, _Effect(before, Snapshot(changed)))

    def _keep(self, key: _Key, effect: _Effect) -> None:
        """Store an effect, and drop the oldest ones while all together exceed the limit."""
        self._effects[key] = effect
        total = sum(item.nbytes for item in self._effects.values())
        for old in list(self._effects):
            if total <= EFFECTS_LIMIT:
                break
            total -= self._effects.pop(old).nbytes

    def _keep_accesses(self, key: _Key, touched: list[AccessedGranules]) -> None:
        """Store what a launch touches. While all together exceed the limit, the oldest launches are forgotten."""
        self._touched.pop(key, None)
        if touched:
            self._touched[key] = touched
        total = sum(map(_mask_bytes, self._touched.values()))
        for old in list(self._touched):
            if total <= ACCESSES_LIMIT or old == key:
                break
            total -= _mask_bytes(self._touched.pop(old))
            self._unchanging.pop(old, None)
            self._effects.pop(old, None)

    def forget(self, launch: KernelLaunch) -> None:
        """Drop a launch's effect. It is called for launches that print, because memory is not all that they change."""
        self._unchanging.pop(_key(launch), None)
        self._effects.pop(_key(launch), None)

    def _version(self) -> tuple[int, int]:
        """Two numbers, of which one changes whenever a launch or the host has changed memory."""
        return self._changes, self.memory.writes + _written_by_host(self.memory)


def _written_by_host(memory: Memory) -> int:
    """A checksum of the memory that the host can write directly, which no count of runtime calls would show."""
    total = 0
    for buffer in memory.buffers:
        if buffer.written is None and buffer.role == "inout":
            total = zlib.crc32(buffer.bytes().data, total)
    return total


def _mask_bytes(touched: list[AccessedGranules]) -> int:
    """The bytes of stored accesses."""
    return sum(len(mask) for part in touched for mask in (part.read, part.written) if mask is not None)


def _key(launch: KernelLaunch) -> _Key:
    """What determines the effect of a launch, apart from the contents of memory."""
    return id(launch.module), launch.kernel, launch.geometry, launch.parameters
