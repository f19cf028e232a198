"""Device memory of one launch, which all its CTAs share: the arena, tags of the last accesses, order between CTAs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.memory.arena import Buffer, Memory
from kernelproof.emulator.memory.order import GlobalOrder
from kernelproof.emulator.memory.tags import SCOPE, SCOPE_SHIFT, Tags
from kernelproof.emulator.state.arrays import SHIFT, Array
from kernelproof.emulator.state.launch_state import Origin
from kernelproof.emulator.state.scopes import Scope


class AccessedGranules(NamedTuple):
    """Granules of ``size`` bytes of a buffer, from byte ``first`` on, that a launch or copy has read and written
    (masks; None: none). ``strong``: those that it has touched by strong accesses."""

    buffer: Buffer
    size: int
    read: Array | None
    written: Array | None
    first: int = 0
    strong: Array | None = None


class DeviceState:
    """The arena with the launch's tags, and the order of accesses of different CTAs.

    ``symbols``: addresses of the module's variables. ``parameters``: the kernel's parameter block. ``overlapping``:
    the launch may begin before the one before it has ended, so global data must wait for griddepcontrol.wait.
    ``written``: the pointers through which the kernel may write, None if one cannot be followed.
    """

    def __init__(
        self,
        arena: Memory,
        threads: int,
        parameters: bytes = b"",
        symbols: dict[str, int] | None = None,
        overlapping: bool = False,
        origins: dict[int, frozenset[Origin]] | None = None,
        written: frozenset[Origin] | None = None,
    ) -> None:
        self.arena, self.parameters, self.overlapping = arena, parameters, overlapping
        self.symbols = symbols or {}
        self.order = GlobalOrder(-(-threads // 32) * 32)
        # CTA -> the tick of its last fence between accesses by threads and bulk copies in global memory.
        self.proxy_fences: dict[int, int] = {}
        # (CTA, scope) -> the tick of its last release to the tensor map proxy.
        self.map_releases: dict[tuple[int, Scope], int] = {}
        self._tags: dict[int, Tags] = {}
        # Instruction -> the buffers from which its address may be computed.
        self.targets = {site: buffers for site, names in (origins or {}).items() if (buffers := self._buffers(names))}

        # The buffers that the launch may write; None: any.
        buffers = self._buffers(written) if written else ()
        self.writable = frozenset(map(id, buffers)) if buffers or written == frozenset() else None

    def may_write(self, buffer: Buffer) -> bool:
        """May the launch write to a buffer?"""
        return self.writable is None or id(buffer) in self.writable

    def _buffers(self, origins: frozenset[Origin]) -> tuple[Buffer, ...]:
        """The buffers into which these parameters and variables point. Empty if one of them points between buffers,
        because then the access proves nothing."""
        buffers = []
        for origin in origins:
            if isinstance(origin, str):
                address = self.symbols.get(origin, 0)
            else:
                address = int.from_bytes(self.parameters[origin : origin + 8], "little")
            offset = address - self.arena.base
            if 0 <= offset < self.arena.capacity:
                buffer = self.arena.find(offset)
                if buffer is None:
                    return ()
                buffers.append(buffer)
        return tuple(buffers)

    def tags(self, buffer: Buffer, recording: bool, width: int = 16) -> Tags:
        """The tags of a buffer, with granules no wider than an access of ``width`` bytes. They have room for the widest
        access at its end, which may be misplaced by a part."""
        tags = self._tags.get(id(buffer))
        if tags is None:
            granules = -(-buffer.nbytes // width) + 16 // width
            tags = self._tags[id(buffer)] = Tags(granules, recording, SHIFT[width])
        elif 1 << tags.shift > width:
            tags.refine(SHIFT[width])
        return tags

    def touched(self, wanted: Callable[[Buffer], bool]) -> list[AccessedGranules]:
        """What the launch did to each buffer that is wanted, so far as accesses are tagged."""
        parts = []
        for buffer in self.arena.buffers:
            tags = self._tags.get(id(buffer))
            if tags is not None and wanted(buffer):
                masks = [tags.read if tags.is_read else None, tags.written if tags.is_written else None]
                read, written = (None if mask is None else mask != 0 for mask in masks)
                scopes = [mask >> SCOPE_SHIFT & SCOPE for mask in masks if mask is not None]
                strong = np.logical_or.reduce(scopes) if scopes else None
                parts.append(AccessedGranules(buffer, 1 << tags.shift, read, written, strong=strong))
        return parts
