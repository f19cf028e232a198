"""Decodes a cubin into instructions. nvdisasm prints their text and source lines; their bits say how they are
scheduled.

An instruction of Volta and later has 128 bits. Bits 105 to 125 are the control word; from the lowest bit up it has the
stall count (4 bits), yield (1, inverted), write barrier (3), read barrier (3), wait mask (6) and operand reuse (4).
This layout is that of CuControlCode.py in cloudcores/CuAssembler. The bits of the reuse field belong to operands Ra, Rb
and Rc; nvdisasm prints them as ``.reuse``.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from kernelproof.ground.errors import WrongInput
from kernelproof.ground.toolchain import find_nvdisasm
from kernelproof.sass.elf import Resources, resources

BYTES = 16  # size of an instruction
CUBIN_HINT = "give a cubin: 'cuobjdump -xelf all FILE' extracts those of a program"
SCOREBOARDS = 6  # of a warp
NO_BARRIER = 7  # in the fields of barriers, in place of a scoreboard

# The header of any section ends the section before it. Only sections of code have the group, a function's name.
SECTION = re.compile(r"\s*\.section\s+(?:\.text\.([^\s,\"]+))?")
LAST_HEADER = ".section .end"  # appended to a listing, so that a header follows its last section
TARGET = re.compile(r"\.target\s+(\S+)")
OLD_TARGET = re.compile(r"\bEF_CUDA_SM(\d+)\b(.*EF_CUDA_ACCELERATORS)?")  # the target in cubins of CUDA 12
LABEL = re.compile(r"([.$]\w[\w$.]*):")  # where a label is defined; JUMP matches where an operand refers to it
# An instruction has two lines: address, guard, opcode, operands and lower 64 bits, then the upper 64 bits.
FIRST_LINE = re.compile(
    r"\s*/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;?\s*\}?\s*/\* 0x([0-9a-f]{16}) \*/"
)
SECOND_LINE = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
JUMP = re.compile(r"`\(([.$]\w[\w$.]*)\)")
PTX_TEXT = '//## File ".nv_debug_ptx_txt"'  # the section with the text of the PTX
SOURCE = re.compile(r'//## File "([^"]*)", line (\d+)')
# 64-bit addresses. For sm_8x nvdisasm leaves out the descriptor (a pair of uniform registers) of their memory window.
WIDE_ADDRESS = re.compile(r"\[U?R\w+\.64\b")


class DisassemblyError(WrongInput):
    """nvdisasm refuses a file, or prints no code that this decoder reads."""


@dataclass(frozen=True)
class Control:
    """How ptxas scheduled an instruction.

    ``stall``: cycles until the warp's next issue. ``write_barrier``: the scoreboard (0 to 5) that the instruction
    frees when its result is available; ``read_barrier``: the one that it frees when its operands have been read; each
    is None if it takes no such scoreboard. ``waits``: scoreboards that must be free before it issues. ``reuse``: mask
    of operands that are kept in the operand cache.
    """

    stall: int
    yields: bool
    write_barrier: int | None
    read_barrier: int | None
    waits: tuple[int, ...]
    reuse: int

    @classmethod
    def decode(cls, upper: int) -> Control:
        """Decodes the control word, given the upper 64 bits of an instruction."""
        word = upper >> 41  # bit 105 of the instruction
        write, read, mask = word >> 5 & 7, word >> 8 & 7, word >> 11 & 63
        return cls(
            stall=word & 15,
            yields=not word >> 4 & 1,
            write_barrier=None if write == NO_BARRIER else write,
            read_barrier=None if read == NO_BARRIER else read,
            waits=tuple(barrier for barrier in range(SCOREBOARDS) if mask >> barrier & 1),
            reuse=word >> 17 & 15,
        )


# The control of an instruction that waits for nothing and takes no scoreboard.
FREE = Control(stall=1, yields=False, write_barrier=None, read_barrier=None, waits=(), reuse=0)


class SourceLine(NamedTuple):
    """A line of the source text that an instruction comes from; lines count from 1."""

    file: str
    line: int


@dataclass(frozen=True)
class Instruction:
    """A decoded instruction.

    ``address``: its offset in the function, in bytes. ``guard``: the predicate under which it executes, as in ``!P0``.
    ``opcode``: with modifiers, as in ``HMMA.16816.F16``. ``target``: the address that a branch jumps to; ``targets``:
    all addresses to which a jump by a table may lead. ``source``: its source line, then the line at which that
    function was inlined, and so on outwards; empty without -lineinfo. ``ptx_line``: the line of PTX from which ptxas
    made it, 0 if the cubin does not say. ``code``: its 128 bits as a number, 0 if it was not read from a file.
    """

    address: int
    guard: str | None
    opcode: str
    operands: tuple[str, ...]
    control: Control
    target: int | None = None
    source: tuple[SourceLine, ...] = ()
    targets: tuple[int, ...] = ()
    ptx_line: int = 0
    code: int = 0

    @classmethod
    def bare(cls, opcode: str, guard: str | None = None) -> Instruction:
        """An instruction without operands, for functions that need only the opcode or the guard."""
        return cls(0, guard, opcode, (), FREE)

    @cached_property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".", 1)[0]

    @cached_property
    def modifiers(self) -> tuple[str, ...]:
        """The parts of the opcode after its name, as in ``("16816", "F16")``."""
        return tuple(self.opcode.split(".")[1:])

    @property
    def text(self) -> str:
        """The instruction as nvdisasm prints it."""
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}".rstrip()

    def __str__(self) -> str:
        return f"{self.address:04x}  {self.text}"


NO_RESOURCES = Resources()


@dataclass(frozen=True)
class Function:
    """One function of a cubin.

    ``registers``: per thread, as ptxas allocated them. ``sm``: the architecture, as in ``sm_90a``; the ``f`` of code
    for a family is missing, because nvdisasm 13.0 does not print it.
    """

    name: str
    registers: int
    instructions: tuple[Instruction, ...]
    sm: str = "sm_80"
    resources: Resources = NO_RESOURCES


def disassemble(cubin: Path) -> list[Function]:
    """The functions of a cubin, in the order of the file.

    Raises ToolchainError if nvdisasm is not installed, and DisassemblyError if it cannot read the file.
    """
    command = [str(find_nvdisasm()), "-hex", "-ndf", "-c", "-gi", "-gp", str(cubin)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise DisassemblyError(f"{cubin}: {process.stderr.strip() or 'nvdisasm failed'}; {CUBIN_HINT}")
    functions = list(_functions(process.stdout, resources(cubin)))
    if not functions:
        raise DisassemblyError(f"{cubin}: has no code that nvdisasm shows; {CUBIN_HINT}")
    return functions


def _functions(listing: str, kernels: Mapping[str, Resources]) -> Iterator[Function]:
    """The functions in nvdisasm's listing. ``kernels``: the resources of each function, by name."""
    sm = ""
    if target := TARGET.search(listing):
        sm = target.group(1)
    elif target := OLD_TARGET.search(listing):
        sm = f"sm_{target.group(1)}{'a' if target.group(2) else ''}"
    name, lines = "", list[str]()
    for line in [*listing.splitlines(), LAST_HEADER]:
        if ".section" in line and (section := SECTION.match(line)):
            if name:
                own = kernels.get(name, NO_RESOURCES)
                yield Function(name, own.registers, _instructions(lines, sm, own.jumps), sm, own)
            name, lines = section.group(1) or "", []
        elif name:
            lines.append(line)


class _ListingRow(NamedTuple):
    """An instruction in nvdisasm's listing: the match of ``FIRST_LINE``, the upper 64 bits of its encoding, its source
    lines, and the line of its PTX."""

    code: re.Match[str]
    upper: int
    source: tuple[SourceLine, ...]
    ptx_line: int


def _instructions(lines: list[str], sm: str, jumps: Mapping[int, tuple[int, ...]]) -> tuple[Instruction, ...]:
    """The instructions of a section. Labels and source lines precede the instruction to which they belong."""
    labels, pending = dict[str, int](), list[str]()
    frames: list[str] = []  # the source lines that were printed since the last instruction
    source: tuple[SourceLine, ...] = ()
    ptx_line = 0
    rows: list[_ListingRow] = []
    code: re.Match[str] | None = None
    for line in lines:
        if code is not None and (match := SECOND_LINE.match(line)):
            rows.append(_ListingRow(code, int(match.group(1), 16), source, ptx_line))
            code = None
        elif match := FIRST_LINE.match(line):
            code = match
            if frames:
                source, frames = _source(frames), []
            labels |= dict.fromkeys(pending, int(match.group(1), 16))
            pending.clear()
        elif PTX_TEXT in line and (match := SOURCE.search(line)):
            ptx_line = int(match.group(2))
        elif "//## File" in line:
            frames.append(line)
        elif match := LABEL.match(line):
            pending.append(match.group(1))
    return tuple(_instruction(row, labels, sm, jumps) for row in rows)


def _source(lines: list[str]) -> tuple[SourceLine, ...]:
    """The source lines of an instruction. nvdisasm prints one per inlined function, the innermost first."""
    matches = (SOURCE.search(line) for line in lines)
    return tuple(SourceLine(match.group(1), int(match.group(2))) for match in matches if match)


def _instruction(
    row: _ListingRow, labels: dict[str, int], sm: str, jumps: Mapping[int, tuple[int, ...]]
) -> Instruction:
    """An instruction of the listing. ``labels``: addresses by label. ``jumps``: the targets of each jump by a table."""
    address, guard, opcode, operands, lower = row.code.groups()
    label = JUMP.search(operands) if "`" in operands else None
    if sm.startswith("sm_8") and WIDE_ADDRESS.search(operands):
        operands = _with_window(opcode, operands, int(lower, 16), row.upper)
    return Instruction(
        address=int(address, 16),
        guard=guard,
        opcode=opcode.rstrip(";"),
        operands=tuple(operand.strip() for operand in operands.split(",")) if operands else (),
        control=Control.decode(row.upper),
        target=labels.get(label.group(1)) if label else None,
        source=row.source,
        ptx_line=row.ptx_line,
        targets=jumps.get(int(address, 16), ()),
        code=row.upper << 64 | int(lower, 16),
    )


def _with_window(opcode: str, operands: str, lower: int, upper: int) -> str:
    """The operands with ``desc[UR4]`` before a 64-bit address, as nvdisasm prints them for sm_90 and later.

    The number of the uniform register is at different bits in loads and in stores.
    """
    uniform = (lower >> 32 if opcode.startswith("LDG.") or opcode.startswith("LD.") else upper) & 63
    return WIDE_ADDRESS.sub(lambda match: f"desc[UR{uniform}]{match.group()}", operands)
