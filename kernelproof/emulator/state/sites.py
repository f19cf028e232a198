"""Says where an instruction comes from: its PTX line, and the chain of CUDA lines through which it was inlined."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

# Headers of the toolkit, of CUTLASS and of the system: users do not edit these, so findings name another line.
_LIBRARY = re.compile(
    r"""(?:^|/)include/(?:.*/)?(?:cute|cutlass|cub|thrust|cuda|cooperative_groups|crt|nv)/
      | (?:^|/)(?:cute|cutlass|cub|thrust)/.*\.(?:h|hpp|cuh|inl)$
      | (?:^|/)(?:cuda[-.\d]*|cu\d+)/(?:bin/\.\./+)*(?:targets/[^/]+/)?include/
      | ^/usr/(?:include|lib)/""",
    re.X,
)


class Frame(NamedTuple):
    """A line of CUDA source, and the function that contains it ("" if the PTX does not say)."""

    file: str
    line: int
    function: str = ""

    @property
    def is_library(self) -> bool:
        """Is the file a header of the toolkit, of CUTLASS or of the system?"""
        return _LIBRARY.search(self.file) is not None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function else "")


@dataclass(frozen=True, slots=True)
class Site:
    """An instruction: its PTX line and text, and the CUDA lines of ``-lineinfo``, the innermost first, each inlined at
    the next one. In machine code ``line`` is its address, and ``ptx_line`` is the line of the PTX from which it was
    compiled, 0 if that is not known. ``is_checked_load``: a load whose value a compare-and-swap checks."""

    line: int = 0
    text: str = ""
    frames: tuple[Frame, ...] = ()
    machine_code: bool = False
    ptx_line: int = 0
    is_checked_load: bool = False

    @property
    def place(self) -> str:
        """Its place in the kernel, in words."""
        made_of = f", PTX line {self.ptx_line}" if self.ptx_line else ""
        return place(self.line, self.machine_code) + made_of

    @property
    def home(self) -> Frame | None:
        """The innermost line that is the user's own, else the outermost; None without ``-lineinfo``."""
        own = (frame for frame in self.frames if not frame.is_library)
        return next(own, self.frames[-1] if self.frames else None)

    @property
    def source(self) -> str:
        """The user's line, and the lines that lead from it to the instruction."""
        home = self.home
        if home is None:
            return ""
        inner = [frame for frame in reversed(self.frames[: self.frames.index(home)]) if frame != home]
        path = " > ".join(f"{PurePosixPath(frame.file).name}:{frame.line}" for frame in inner)
        return f"{home} > {path}" if path else str(home)

    @property
    def calls(self) -> tuple[Frame, ...]:
        """The lines at which the function of the user's line was inlined, the innermost first."""
        home = self.home
        return () if home is None else self.frames[self.frames.index(home) + 1 :]


class Hazard(NamedTuple):
    """Two instructions of machine code of which the later one reads or writes a register before the earlier one is done
    with it. ``why``: the reason, in words."""

    why: str
    earlier: Site
    later: Site


def place(line: int, machine_code: bool) -> str:
    """The place of an instruction, in words: its PTX line, or its address in machine code."""
    return f"machine code at {line:#06x}" if machine_code else f"PTX line {line}"


# The site of a finding that belongs to no instruction.
NOWHERE = Site()
