"""Device memory as all CTAs of a launch share it: the arena, who touched it last, happens-before between CTAs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cudal2gen.emulator.memory.arena import Buffer, Memory
from cudal2gen.emulator.memory.order import GlobalOrder
from cudal2gen.emulator.state.arrays import SHIFT, Array
from cudal2gen.emulator.state.launch import Origin

# A tag is tick << 34 | scope of a strong access (0: weak) << 32 | thread of the launch; 0: untouched in this launch.
THREAD = (1 << 32) - 1
SCOPE_SHIFT, SCOPE = 32, 3
TICK_SHIFT = 34


class Tags:
    """Last writer and reader of every granule of a buffer in this launch; where it is recorded, by what instruction
    (one more than its number). Nothing is kept of what nobody does: ``is_read``, ``is_written``: anybody so far?"""

    __slots__ = ("_read", "_written", "granules", "read_at", "read_only", "reads", "written_at")

    def __init__(self, granules: int, recording: bool) -> None:
        self.granules = granules
        self._written: Array | None = None
        self._read: Array | None = None
        # Of the last read, if it was packed: the threads of the launch, one per lane, and the granules.
        self.reads: tuple[Array, slice] | None = None
        # Granules read through the read-only path, once there are any.
        self.read_only: Array | None = None
        self.written_at: Array | None = np.zeros(granules, np.int32) if recording else None
        self.read_at: Array | None = np.zeros(granules, np.int32) if recording else None

    @property
    def is_written(self) -> bool:
        return self._written is not None

    @property
    def is_read(self) -> bool:
        return self._read is not None

    @property
    def written(self) -> Array:
        """The tags of the last writes."""
        if self._written is None:
            self._written = np.zeros(self.granules, np.int64)
        return self._written

    @property
    def read(self) -> Array:
        """The tags of the last reads."""
        if self._read is None:
            self._read = np.zeros(self.granules, np.int64)
        return self._read


class Touched(NamedTuple):
    """What work did to a buffer: which granules of ``size`` bytes, from byte ``first`` on, it read and wrote (None:
    none)."""

    buffer: Buffer
    size: int
    read: Array | None
    written: Array | None
    first: int = 0


class DeviceState:
    """The arena with the launch's tags per ``granule`` bytes, and the order of accesses of different CTAs.

    ``symbols``: addresses of the module's variables; ``parameters``: the kernel's parameter block; ``overlapping``:
    the launch may begin before its predecessor has ended, so global data waits for griddepcontrol.wait.
    """

    def __init__(
        self,
        arena: Memory,
        granule: int,
        threads: int,
        parameters: bytes = b"",
        symbols: dict[str, int] | None = None,
        overlapping: bool = False,
        origins: dict[int, frozenset[Origin]] | None = None,
    ) -> None:
        self.arena, self.granule, self.parameters, self.overlapping = arena, granule, parameters, overlapping
        self.granule_shift = SHIFT[granule]
        self.symbols = symbols or {}
        self.order = GlobalOrder(-(-threads // 32) * 32)
        self._tags: dict[int, Tags] = {}
        # Of an instruction: the buffers that its address may be computed from.
        self.targets = {site: buffers for site, names in (origins or {}).items() if (buffers := self._buffers(names))}

    def _buffers(self, origins: frozenset[Origin]) -> tuple[Buffer, ...]:
        """The buffers into which these parameters and variables point; none where that is uncertain, because a pointer
        points to no buffer."""
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

    def tags(self, buffer: Buffer, recording: bool) -> Tags:
        """The tags of a buffer; the widest access at its end has room."""
        tags = self._tags.get(id(buffer))
        if tags is None:
            granules = -(-buffer.nbytes // self.granule) + 16 // self.granule
            tags = self._tags[id(buffer)] = Tags(granules, recording)
        return tags

    def touched(self) -> list[Touched]:
        """What the launch did to each buffer, as far as accesses are tagged."""
        parts = []
        for buffer in self.arena.buffers:
            tags = self._tags.get(id(buffer))
            if tags is not None:
                read = tags.read != 0 if tags.is_read else None
                parts.append(Touched(buffer, self.granule, read, tags.written != 0 if tags.is_written else None))
        return parts
