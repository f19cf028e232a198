"""Reads ``.loc`` directives, which give the chain of CUDA lines of each PTX instruction.

A directive names a line, the function that contains it, and the line of the call if that function was inlined. The call
has its own directive, which names the next call; so the chain is followed from directive to directive.
"""

from __future__ import annotations

import re

from kernelproof.emulator.state.mangled import plain_name
from kernelproof.emulator.state.sites import Frame

# Groups of a directive: (1) file number, (2) line, (3) column; if the function was inlined also (4) the label of its
# name and the (5) file number, (6) line and (7) column of the call.
_DIRECTIVE = re.compile(
    r"(\d+)\s+(\d+)\s+(\d+)(?:\s*,\s*function_name\s+([\w$]+)(?:\s*\+\s*\d+)?\s*,\s*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?"
)
# A label in .debug_str, and the bytes of the string there.
_STRING = re.compile(r"^([\w$]+):\s*\n((?:\s*\.b8[ \t][\d, \t]*\n)+)", re.M)
# The numbers of file, line and column by which a .loc directive names a place in a CUDA file.
_Place = tuple[str, str, str]


class Locations:
    """The locations of a PTX text, function by function.

    ``files``: number -> path. ``function``: the present function. ``chains``: for the place of each of its directives
    so far, the chain of CUDA lines that the place stands for: the line itself, then the line of the call into which it
    was inlined, and so on.
    """

    def __init__(self, text: str, files: dict[int, str]) -> None:
        self.text, self.files = text, files
        self.function = ""
        self.chains: dict[_Place, tuple[Frame, ...]] = {}
        self._names: dict[str, str] | None = None

    def enter(self, function: str) -> None:
        """Make a PTX function the present one, before its directives are read."""
        self.function = plain_name(function)
        self.chains = {}

    def frames(self, directive: str) -> tuple[Frame, ...]:
        """The CUDA lines of a directive's arguments, the innermost first; none for code without a line."""
        m = _DIRECTIVE.match(directive)
        if m is None or m[2] == "0":
            return ()
        if m[4] is None:
            chain: tuple[Frame, ...] = (self._frame(m[1], m[2], self.function),)
        else:
            outer = self.chains.get((m[5], m[6], m[7]))
            # The call has no directive if optimisation has removed all other code of its line.
            chain = (self._frame(m[1], m[2], self._name(m[4])), *(outer or (self._frame(m[5], m[6], ""),)))
        self.chains[m[1], m[2], m[3]] = chain
        return chain

    def _frame(self, file: str, line: str, function: str) -> Frame:
        """A line of the file with this number; its path is "?" if the number is unknown."""
        return Frame(self.files.get(int(file), "?"), int(line), function)

    def _name(self, label: str) -> str:
        """The function whose mangled name is at a label of ``.debug_str``; "" if there is no such label."""
        if self._names is None:
            self._names = {}
            start = self.text.find(".debug_str")
            for m in _STRING.finditer(self.text, max(start, 0)) if start >= 0 else ():
                raw = bytes(int(number) for number in re.findall(r"\d+", m[2].replace(".b8", "")))
                self._names[m[1]] = plain_name(raw.split(b"\0")[0].decode(errors="replace"))
        return self._names.get(label, "")
