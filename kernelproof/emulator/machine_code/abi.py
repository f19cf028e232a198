"""Maps each word that a launch writes to constant bank 0 to its content, by architecture.

A cubin says where its parameters begin. The offsets of the other words were found by kernels that read them;
``tests/kernelproof/emulator/test_machine_code_hopper.py`` compiles these kernels again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernelproof.emulator.memory.shared import WINDOW_START
from kernelproof.emulator.state.windows import SHIFT_TO_WINDOW, Window

_SIZES = ("%ntid.x", "%ntid.y", "%ntid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z")
# The prefix of a word that holds the reciprocal of a special register, in single precision, rounded to nearest.
RECIPROCAL = "1/"
# Upper word of the local window, minus 1. Stack pointers are negative 32-bit words, so adding the lower word carries 1
# into the upper.
LOCAL_WINDOW = "local"


def _consecutive(start: int, *names: str) -> dict[int, str]:
    """Offset -> name, for consecutive words of which those with an empty name are left out."""
    return {start + 4 * i: name for i, name in enumerate(names) if name}


def _cluster(shape: int, reciprocals: int, counts: int, rank: int) -> dict[int, str]:
    """The words about clusters, by the offsets at which they begin: a cluster's extents, their reciprocals, the number
    of clusters along each axis, and the number of a cluster's CTAs."""
    extents = [f"%cluster_nctaid.{axis}" for axis in "xyz"]
    return (
        _consecutive(shape, *extents)
        | _consecutive(reciprocals, *(RECIPROCAL + extent for extent in extents))
        | _consecutive(counts, *(f"%nclusterid.{axis}" for axis in "xyz"))
        | {rank: "%cluster_nctarank"}
    )


# The two words of the descriptor of global memory. Accesses ignore them. They are neither addresses nor small numbers,
# so code that takes them for an address or a size goes wrong visibly.
_DESCRIPTOR = (str(0xBAD0DE5C), str(0xBAD1DE5C))
# The words of sm_80 to sm_89, of sm_90, and of sm_100 and later. "0" stands for the stack pointer, which does not
# matter.
_AMPERE = _consecutive(0, *_SIZES) | {0x28: "0"} | _consecutive(0x118, *_DESCRIPTOR)
_HOPPER = (
    _consecutive(0, *_SIZES)
    | {0x28: "0", 0x2C: "%dynamic_smem_size", 0x10C: "%nsmid", 0x114: "0", 0x140: "%is_explicit_cluster"}
    | _consecutive(0x208, *_DESCRIPTOR)
    | _cluster(shape=0x144, reciprocals=0x150, counts=0x15C, rank=0x188)
)
_BLACKWELL = (
    _consecutive(0x360, *_SIZES[:3], "%is_explicit_cluster", *_SIZES[3:], "0")
    | {0x2AC: "%dynamic_smem_size", 0x2D0: "%nsmid", 0x16C: "0"}
    | _consecutive(0x358, *_DESCRIPTOR)
    | _cluster(shape=0x2A0, reciprocals=0x2B0, counts=0x2C0, rank=0x2CC)
)


@dataclass(frozen=True)
class Bank:
    """Constant bank 0 of a kernel. All offsets are in bytes.

    ``parameters``: name, offset and size of each parameter. ``words``: offset of another word -> what it holds, see
    ``word``. ``base``: the byte at which the cubin's area for parameters begins, even if there are none.
    ``base_address_offset``: the offset of the two words with the generic address of the byte at ``base``. ``shared``:
    the shared address of the CTA's first shared byte. ``shared_address_offset``: the offset of the two words with the
    generic address of the CTA's first shared byte. ``local_address_offset``: the offset of the two words that, added to
    a pointer into the stack, give its generic address. ``stack``: bytes of the stack, from whose end pointers count.
    """

    parameters: Sequence[tuple[str, int, int]]
    words: Mapping[int, str]
    base: int
    base_address_offset: int | None
    shared: int
    shared_address_offset: int | None
    local_address_offset: int
    stack: int

    @classmethod
    def of(cls, sm: str, base: int, parameters: Sequence[tuple[str, int, int]], stack: int) -> Bank | None:
        """The bank of an architecture; None if its words are not known."""
        if sm.startswith("sm_8"):
            return cls(
                parameters,
                _AMPERE,
                base,
                None,
                shared=0,
                shared_address_offset=0x18,
                local_address_offset=0x20,
                stack=stack,
            )
        if sm.startswith("sm_90"):
            return cls(
                parameters,
                _HOPPER,
                base,
                0x198,
                WINDOW_START,
                shared_address_offset=None,
                local_address_offset=0x20,
                stack=stack,
            )
        if sm.startswith(("sm_10", "sm_12")):
            return cls(
                parameters,
                _BLACKWELL,
                base,
                0x348,
                WINDOW_START,
                shared_address_offset=None,
                local_address_offset=0x2F8,
                stack=stack,
            )
        return None

    @property
    def start(self) -> int:
        """The byte at which the first parameter begins, which may lie after ``base``; 0 if there is none."""
        return min((start for _, start, _ in self.parameters), default=0)

    def word(self, offset: int) -> str | None:
        """The content of a word: a number, a special register (``%..``), ``RECIPROCAL`` and a special register,
        ``LOCAL_WINDOW`` (see there), or ``name+offset`` in a parameter. None if it is not known."""
        for name, start, size in self.parameters:
            if start <= offset < start + size:
                return f"{name}+{offset - start}" if offset > start else name
        if self.shared_address_offset is not None and offset in (
            self.shared_address_offset,
            self.shared_address_offset + 4,
        ):
            address = (Window.SHARED << SHIFT_TO_WINDOW) + WINDOW_START - self.shared
            return str(address >> 8 * (offset - self.shared_address_offset) & 0xFFFFFFFF)
        if self.base_address_offset is not None and offset in (self.base_address_offset, self.base_address_offset + 4):
            address = (Window.PARAM << SHIFT_TO_WINDOW) + self.base - self.start
            return str(address >> 8 * (offset - self.base_address_offset) & 0xFFFFFFFF)
        if offset in (self.local_address_offset, self.local_address_offset + 4):
            return LOCAL_WINDOW if offset > self.local_address_offset else str(self.stack)
        return self.words.get(offset)
