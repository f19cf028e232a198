"""Names the places of findings: the allocation, parameter or shared variable, and the index of the element."""

from __future__ import annotations

import math
import re
import struct
from dataclasses import replace

from kernelproof.emulator.frontend.ptx import Function
from kernelproof.emulator.host.declarations import Declaration, parameters, shared_variable, source_text
from kernelproof.emulator.memory.arena import Buffer, Memory
from kernelproof.emulator.state.launch_state import KernelFacts, SharedVariable
from kernelproof.emulator.state.mangled import plain_name
from kernelproof.emulator.state.participants import Place, Space
from kernelproof.emulator.state.reports import Report

# How ``Memory.label`` writes an allocation without a name.
_NUMBERED = re.compile(r"\bbuffer (\d+)(?= \()")


class Naming:
    """Names places in one launch of ``function``. ``block``: the launch's parameter block."""

    def __init__(self, memory: Memory, function: Function, block: bytes, facts: KernelFacts) -> None:
        self.memory, self.function, self.block, self.facts = memory, function, block, facts

    def name(self, report: Report) -> None:
        """Name the place of a report, and the allocations that its message mentions. An access to freed memory, which
        was reported as out of bounds, becomes ``use-after-free``."""
        place = report.place
        if place is None or place.buffer:
            return
        freed = self.memory.find_freed(place.address - self.memory.base)
        if report.kind == "global-out-of-bounds" and freed is not None and freed.freed_at is not None:
            report.kind = "use-after-free"
        frames = report.access.site.frames
        text = source_text(frames[-1].file) if frames else ""
        report.message = _NUMBERED.sub(lambda match: self._numbered(int(match[1]), text), report.message)
        if place.space is Space.SHARED:
            report.place = self._shared(place, text)
        else:
            report.place = self._global(place, text)

    # --- shared memory ---

    def _shared(self, place: Place, text: str) -> Place:
        """A place in shared memory with its variable and index. ``text``: the CUDA source."""
        variable = self._shared_variable(place.address)
        if variable is None:
            return place
        offset = place.address - variable.offset
        declared = shared_variable(text, variable.name, variable.nbytes)
        named = replace(place, buffer=variable.name, offset=offset)
        return _with_index(named, declared, declared.extents if declared is not None else ())

    def _shared_variable(self, offset: int) -> SharedVariable | None:
        """The variable that contains an offset in shared memory. Beyond the static memory it is the ``extern`` array,
        which has 0 bytes here because the launch sets its size."""
        dynamic = None
        for variable in self.facts.shared_variables:
            if variable.offset <= offset < variable.offset + variable.nbytes:
                return variable
            if variable.nbytes == 0 and offset >= variable.offset:
                dynamic = variable
        return dynamic

    # --- global memory ---

    def _global(self, place: Place, text: str) -> Place:
        """A place in global memory with its allocation (or the nearest one) and index. ``text``: the CUDA source."""
        memory, arena_offset = self.memory, place.address - self.memory.base
        freed = memory.find_freed(arena_offset)
        nearest = (
            (freed, freed.history) if freed is not None and freed.freed_at is not None else memory.nearest(arena_offset)
        )
        if nearest is None:
            return place
        buffer, note = nearest
        declared = self._parameter(buffer, text)
        named = replace(
            place, buffer=self._buffer_name(buffer, declared), offset=arena_offset - buffer.start, note=note
        )
        if buffer.is_typed:
            declared = Declaration("", buffer.element_name, buffer.shape)
            return _with_index(named, declared, buffer.shape, buffer.dtype.itemsize)
        return _with_index(named, declared, ())

    def _numbered(self, number: int, text: str) -> str:
        """The name of the allocation that ``Memory.label`` calls ``buffer <number>``."""
        buffer = self.memory.buffers[number]
        return self._buffer_name(buffer, self._parameter(buffer, text))

    def _buffer_name(self, buffer: Buffer, declared: Declaration | None) -> str:
        """The name by which a user knows an allocation."""
        if buffer.name:
            return plain_name(buffer.name)
        if declared is not None and declared.name:
            return declared.name
        return self.memory.name(buffer)

    def _parameter(self, buffer: Buffer, text: str) -> Declaration | None:
        """The kernel's parameter that points into a buffer; None if there is none."""
        function = self.function
        names = parameters(text, plain_name(function.name), len(function.params))
        for number, (param, offset) in enumerate(zip(function.params, function.offsets, strict=True)):
            # Every aligned word of 8 bytes may be a pointer, since a parameter may be a struct.
            for byte in range(0, param.size - 7, 8):
                (address,) = struct.unpack_from("<Q", self.block, offset + byte)
                if buffer.start <= address - self.memory.base < max(buffer.end, buffer.start + 1):
                    if param.size > 8:
                        return Declaration(f"the pointer at byte {byte} of parameter {number}", "")
                    return names[number] if names else Declaration(f"parameter {number}", "")
        return None


def _with_index(place: Place, declared: Declaration | None, extents: tuple[int | None, ...], unit: int = 0) -> Place:
    """The place with its index in elements: (row, column, ...) if all extents but the first are known, else one linear
    index. ``unit``: bytes of an element, 0: as declared."""
    unit = unit or (declared.element_bytes if declared is not None else 0)
    if declared is None or not unit:
        return place
    index = place.offset // unit
    inner = [extent for extent in extents[1:] if extent]
    if len(inner) != max(len(extents) - 1, 0):
        inner = []
    indices: list[int] = []
    for extent in (math.prod(inner[i:]) for i in range(len(inner))):
        indices.append(index // extent)
        index %= extent
    return replace(place, element=declared.element, index=(*indices, index))
