"""Describes the participants of a finding (threads and their instructions), and the memory that it is about."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from kernelproof.emulator.state.sites import NOWHERE, Site

Dim3 = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Participant:
    """The threads that execute an instruction. ``threads``: linear numbers in the CTA (x, y, z). ``agent``: a copy or a
    matrix product that acts for them, in words; or what is known of the thread, if its number is not."""

    site: Site = NOWHERE
    cta: Dim3 | None = None
    threads: tuple[int, ...] = ()
    agent: str = ""

    @property
    def warp(self) -> int | None:
        """The first thread's warp."""
        return self.threads[0] >> 5 if self.threads else None

    @property
    def lane(self) -> int | None:
        """The first thread's lane of its warp."""
        return self.threads[0] & 31 if self.threads else None

    @property
    def where(self) -> tuple[object, ...]:
        """The CUDA lines and the kind of instruction; without ``-lineinfo``, the PTX line and instruction."""
        site = self.site
        opcode = re.sub(r"^@\S+\s*", "", site.text).split(".")[0]
        return (site.frames, opcode) if site.frames else (site.line, site.text)

    @property
    def who(self) -> str:
        """CTA and threads, as text."""
        threads = ", ".join(map(str, self.threads[:8])) + (", ..." if len(self.threads) > 8 else "")
        parts = [f"CTA {self.cta}" if self.cta is not None else "", self.agent]
        if threads:
            parts.append(f"thread{'s' if len(self.threads) > 1 else ''} {threads}")
        return ", ".join(part for part in parts if part)

    @property
    def at(self) -> str:
        """The instruction, as text."""
        source = f" [{self.site.source}]" if self.site.frames else ""
        return f"at {self.site.place}: {self.site.text}{source}"


class Space(StrEnum):
    """A state space."""

    GLOBAL = "global"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class Place:
    """The first byte of an access. ``address``: a byte offset in shared memory, or a device address. ``buffer``: the
    variable, parameter or allocation in which it lies, or to which it is closest ("" if unknown). ``offset``: bytes
    from the buffer's start; negative or beyond the end for an access outside. ``element``: the type of the buffer's
    elements. ``index``: the element, as (row, column) if the shape is known. ``note``: more, in words."""

    space: Space
    address: int
    buffer: str = ""
    offset: int = 0
    element: str = ""
    index: tuple[int, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        if not self.buffer:
            text = f"{self.space} {'offset' if self.space is Space.SHARED else 'address'} "
            text += str(self.address) if self.space is Space.SHARED else hex(self.address & (1 << 64) - 1)
        elif self.index:
            text = self.buffer + "".join(f"[{i}]" for i in self.index)
        else:
            text = f"byte {self.offset} of {self.buffer}"
        return f"{text} ({self.note})" if self.note else text


def place_of_finding(kind: str, address: int | None) -> Place | None:
    """The place of a finding of a rule, whose buffer is filled in later; None without an address. Small addresses are
    offsets in shared memory, unless the rule is about global memory."""
    if address is None:
        return None
    shared = not kind.startswith("global") and -(1 << 30) < address < 1 << 30
    return Place(Space.SHARED if shared else Space.GLOBAL, address)
