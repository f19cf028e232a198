"""The words of constant bank 0 that a launch fills in, by architecture.

A cubin says where its parameters begin. The places of the launch's sizes were found by kernels that read them, which
``tests/kernelproof/emulator/test_machine_code.py`` compiles again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernelproof.emulator.memory.shared import WINDOW_START
from kernelproof.emulator.state.windows import SHIFT_TO_WINDOW, Window

_SIZES = ("%ntid.x", "%ntid.y", "%ntid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z")


@dataclass(frozen=True)
class Bank:
    """Constant bank 0 of a kernel: where its words lie, in bytes.

    ``parameters``: name, offset and size of each parameter. ``sizes``: the first of the sizes of block and grid.
    ``stack``: the word from which the stack pointer starts. ``window``: the descriptor of global memory, two words
    whose content does not matter. ``shared``: the shared address of a CTA's first byte. ``generic``: the generic
    address of that byte, two words.
    """

    parameters: Sequence[tuple[str, int, int]]
    sizes: int
    stack: int
    window: int
    shared: int
    generic: int

    @classmethod
    def of(cls, sm: str, parameters: Sequence[tuple[str, int, int]]) -> Bank | None:
        """The bank of an architecture; None if its places are not known."""
        if sm.startswith("sm_8"):
            return cls(parameters, sizes=0, stack=0x28, window=0x118, shared=0, generic=0x18)
        return None

    @property
    def start(self) -> int:
        """The byte at which the parameters begin."""
        return min((start for _, start, _ in self.parameters), default=0)

    def word(self, offset: int) -> str | None:
        """What a word holds: a number, a special register (``%..``), or ``name+offset`` in a parameter. None: not
        known."""
        for name, start, size in self.parameters:
            if start <= offset < start + size:
                return f"{name}+{offset - start}" if offset > start else name
        if self.sizes <= offset < self.sizes + 4 * len(_SIZES) and offset % 4 == 0:
            return _SIZES[(offset - self.sizes) // 4]
        if offset == self.stack or offset in (self.window, self.window + 4):
            return "0"
        if offset in (self.generic, self.generic + 4):
            address = (Window.SHARED << SHIFT_TO_WINDOW) + WINDOW_START - self.shared
            return str(address >> 8 * (offset - self.generic) & 0xFFFFFFFF)
        return None
