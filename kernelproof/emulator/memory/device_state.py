"""Keeps what all CTAs of a launch share of device memory: the arena, tags of last accesses, and order between CTAs."""

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
    """Granules of ``size`` bytes of a buffer, from byte ``first`` on. Masks say which of them a launch or copy has
    read, has written, and has accessed by ``strong`` accesses; None for none."""

    buffer: Buffer
    size: int
    read: Array | None
    written: Array | None
    first: int = 0
    strong: Array | None = None


class DeviceState:
    """The arena with the launch's tags, and the order of accesses of different CTAs.

    ``symbols``: addresses of the module's variables. ``parameters``: the kernel's parameter block. ``overlapping``: the
    launch may begin before the previous one has ended, so global data must not be accessed before griddepcontrol.wait.
    ``origins``: instruction -> the pointers from which its address may be computed. ``written``: the pointers through
    which the kernel may write; None if one cannot be followed.
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
        since the buffer that is meant is then unknown."""
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
        """The tags of a buffer, with granules no wider than an access of ``width`` bytes. There are enough of them for
        an access of 16 bytes that reaches beyond the buffer's end."""
        tags = self._tags.get(id(buffer))
        if tags is None:
            granules = -(-buffer.nbytes // width) + 16 // width
            tags = self._tags[id(buffer)] = Tags(granules, recording, SHIFT[width])
        elif 1 << tags.shift > width:
            tags.refine(SHIFT[width])
        return tags

    def touched(self, wanted: Callable[[Buffer], bool]) -> list[AccessedGranules]:
        """The granules of each wanted buffer that the launch has accessed, as far as accesses are tagged."""
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
