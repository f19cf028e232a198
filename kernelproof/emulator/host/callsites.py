"""Finds the source lines of host code from return addresses, so that findings can name them.

Each runtime call, and each forbidden access of host code, keeps the return addresses of its callers. They are
translated to lines only when a finding needs them, by addr2line of the binutils, which every C compiler needs as well.
Programs that the check compiles have line tables. For other programs only the functions are found.
"""

from __future__ import annotations

import ctypes
import linecache
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from kernelproof.emulator.state.participants import Participant
from kernelproof.emulator.state.sites import Frame, Site

SECONDS = 60  # for one call of addr2line
# Files whose code is not the program's: C's own libraries and the stand-in runtime.
_SYSTEM = re.compile(r"^(?:/usr)?/lib|/emulator/runtime-\w+\.so$")
# Python, which calls the program.
_INTERPRETER = re.compile(r"/(?:libffi|_ctypes|libpython)[^/]*$")
# The first argument of a call that allocates: &x, (void **)&s.x, &x[i].
_ADDRESS_OF = re.compile(
    r"\w*(?i:alloc)\w*(?:<[^()]*>)?\s*\(\s*(?:\([^()]*\)|\w+_cast<[^()]*>\()?\s*&\s*([\w.\[\]>-]+)"
)
# Code that nvcc generates, in files of a temporary folder. A launch calls the kernel's host function, whose line is
# that of the kernel. The host function calls a stub whose name contains the kernel's mangled name.
_GENERATED = re.compile(r"\.cudafe1\.(?:stub\.c|cpp|gpu)$|^<built-in>$")
_STUB = re.compile(r"__(?:wrapper__)?device_stub_")


class _Symbol(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("at", ctypes.c_void_p),
    ]


# Address -> its source lines, the innermost first; each is inlined at the next one.
_frames_of: dict[int, tuple[Frame, ...]] = {}


@dataclass(frozen=True)
class HostSite:
    """A place in host code, given by return addresses, the innermost first. Its truth value is False if none of its
    source lines can be found."""

    addresses: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.frames)

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The source lines, the innermost first, its callers after it."""
        _look_up(address for address in self.addresses if address not in _frames_of)
        frames = list(_without_stubs(frame for address in self.addresses for frame in _frames_of[address]))
        # Lines in which a library's header calls the runtime do not help the reader of a finding.
        first_own = next((i for i, frame in enumerate(frames) if not frame.is_library), 0)
        return tuple(frames[first_own:])

    @property
    def site(self) -> Site:
        """The place in the form that findings use."""
        return Site(frames=self.frames)

    @property
    def variable(self) -> str:
        """The variable that the call at this place allocates; "" if it is not known (see ``allocated_variable``)."""
        home = self.site.home
        return "" if home is None else allocated_variable(linecache.getline(home.file, home.line))

    def participant(self, agent: str = "") -> Participant:
        """The place as one side of a finding. ``agent``: what acts there, such as a copy."""
        return Participant(self.site, agent=agent)

    def __str__(self) -> str:
        home = self.site.home
        return "an unknown line" if home is None else f"{PurePosixPath(home.file).name}:{home.line}"


UNKNOWN = HostSite()


def allocated_variable(line: str) -> str:
    """The variable that a line of source allocates, such as ``s.x`` of ``cudaMalloc(&s.x, n)``; "" unless there is
    exactly one."""
    names = {re.sub(r"\s", "", name) for name in _ADDRESS_OF.findall(line)}
    return names.pop() if len(names) == 1 else ""


def _without_stubs(frames: Iterable[Frame]) -> Iterator[Frame]:
    """The frames that lie in the program's own text: generated code and the host functions of kernels are left out."""
    stub = ""
    for frame in frames:
        name = frame.function.split("<")[0].rpartition("::")[2]
        if _STUB.match(name):
            stub = frame.function
        elif stub and f"{len(name)}{name}" in stub:
            stub = ""
        elif not _GENERATED.search(frame.file):
            yield frame


def _look_up(addresses: Iterable[int]) -> None:
    """Enter the frames of addresses into ``_frames_of``: none for addresses outside of the program."""
    by_file: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for address in addresses:
        _frames_of[address] = ()
        symbol = _Symbol()
        # A return address follows its call: one byte earlier is inside the call, and so on its line.
        if _dladdr(ctypes.c_void_p(address - 1), ctypes.byref(symbol)) and symbol.file and symbol.base:
            file = symbol.file.decode(errors="surrogateescape")
            if _is_foreign(file):
                continue
            by_file[file].append((address, address - 1 - symbol.base))
    for file, places in by_file.items():
        for (address, _), frames in zip(places, _lines(file, [offset for _, offset in places]), strict=False):
            _frames_of[address] = frames


_dladdr = ctypes.CDLL(None).dladdr


@cache
def _is_foreign(file: str) -> bool:
    """Does a file of machine code belong to the system, to the stand-in runtime or to Python?"""
    python = Path(sys.executable).resolve()
    return any(pattern.search(file) for pattern in (_SYSTEM, _INTERPRETER)) or Path(file).resolve() == python


def _lines(file: str, offsets: list[int]) -> list[tuple[Frame, ...]]:
    """The frames of each offset in a file of machine code; an empty list if addr2line is missing or fails."""
    program = shutil.which("addr2line")
    if program is None:
        return []
    command = [program, "-a", "-f", "-i", "-C", "-e", file, *map(hex, offsets)]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return []
    answers = re.split(r"^0x[0-9a-f]+\n", process.stdout, flags=re.M)[1:]
    return [tuple(_frames(answer)) for answer in answers]


def _frames(answer: str) -> Iterable[Frame]:
    """The frames of one answer of addr2line, which has pairs of lines: a function, then ``file:line``. The innermost
    function comes first; those that it is inlined into follow."""
    lines = answer.splitlines()
    for function, place in zip(lines[::2], lines[1::2], strict=False):
        m = re.match(r"(.*):(\d+)", place)
        if m is not None and m[2] != "0":
            name = function.replace("(anonymous namespace)", "").split("(")[0]
            yield Frame(m[1], int(m[2]), name.rpartition(" ")[2])
