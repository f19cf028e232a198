"""A cubin to instructions: text by nvdisasm, scheduling by the control word of the encoding.

An instruction of Volta and later has 128 bits. The control word is bits 105 to 125: stall (4), yield (1, inverted),
write barrier (3), read barrier (3), wait mask (6), operand reuse (4): CuControlCode.py of cloudcores/CuAssembler.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cudal2gen.toolchain import find_nvdisasm

BYTES = 16  # of an instruction
NO_BARRIER = 7

SECTION = re.compile(
    r"\s*\.section\s+(?:\.text\.([^\s,\"]+))?"
)  # any section ends the one before; those of code are named
END = ".section .end"
REGISTERS = re.compile(r"EIATTR_REGCOUNT.*?index@\((\S+)\)\s+/\*\w+\*/\s+\.word\s+0x([0-9a-f]+)", re.DOTALL)
LABEL = re.compile(r"(\.L\w+):")
CODE = re.compile(
    r"\s*/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;?\s*\}?\s*/\* 0x([0-9a-f]{16}) \*/"
)
UPPER = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
TARGET = re.compile(r"`\((\.L\w+)\)")


class DisassemblyError(RuntimeError):
    """nvdisasm refused a file, or wrote what this decoder does not read."""


@dataclass(frozen=True)
class Control:
    """How an instruction is scheduled. ``stall``: cycles to the warp's next issue; barriers are 0 to 5, or None."""

    stall: int
    yields: bool
    write_barrier: int | None
    read_barrier: int | None
    waits: tuple[int, ...]
    reuse: int

    @classmethod
    def decode(cls, upper: int) -> Control:
        """The control word of an instruction, from the upper 64 bits of its encoding."""
        word = upper >> 41
        write, read, mask = word >> 5 & 7, word >> 8 & 7, word >> 11 & 63
        return cls(
            stall=word & 15,
            yields=not word >> 4 & 1,
            write_barrier=None if write == NO_BARRIER else write,
            read_barrier=None if read == NO_BARRIER else read,
            waits=tuple(barrier for barrier in range(6) if mask >> barrier & 1),
            reuse=word >> 17 & 15,
        )


@dataclass(frozen=True)
class Instruction:
    """``opcode`` with its modifiers, as in ``HMMA.16816.F16``; ``target``: the address that a branch names."""

    address: int
    guard: str | None
    opcode: str
    operands: tuple[str, ...]
    control: Control
    target: int | None = None

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".", 1)[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.opcode.split(".")[1:])

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{self.address:04x}  {guard}{self.opcode} {', '.join(self.operands)}"


@dataclass(frozen=True)
class Function:
    """One function of a cubin; ``registers``: of a thread, as ptxas allocated them."""

    name: str
    registers: int
    instructions: tuple[Instruction, ...]


def disassemble(cubin: Path) -> list[Function]:
    """The functions of a cubin, in its order. Raises ToolchainError without nvdisasm, DisassemblyError for the rest."""
    command = [str(find_nvdisasm()), "-hex", "-ndf", str(cubin)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise DisassemblyError(f"{cubin}: {process.stderr.strip() or 'nvdisasm failed'}")
    functions = list(_functions(process.stdout))
    if not functions:
        raise DisassemblyError(f"{cubin}: has no code that nvdisasm shows")
    return functions


def _functions(listing: str) -> Iterator[Function]:
    registers = {name: int(count, 16) for name, count in REGISTERS.findall(listing)}
    name, lines = "", list[str]()
    for line in [*listing.splitlines(), END]:
        if section := SECTION.match(line):
            if name:
                yield _function(name, registers.get(name, 0), lines)
            name, lines = section.group(1) or "", []
        lines.append(line)


def _function(name: str, registers: int, lines: list[str]) -> Function:
    """A function from its section's lines: each instruction has two, with the lower and the upper half of its bits."""
    labels, pending = dict[str, int](), list[str]()
    rows: list[tuple[re.Match[str], int]] = []
    code: re.Match[str] | None = None
    for line in lines:
        if match := LABEL.match(line):
            pending.append(match.group(1))
        elif match := CODE.match(line):
            code = match
            labels |= dict.fromkeys(pending, int(match.group(1), 16))
            pending.clear()
        elif code is not None and (match := UPPER.match(line)):
            rows.append((code, int(match.group(1), 16)))
            code = None
    return Function(name, registers, tuple(_instruction(code, upper, labels) for code, upper in rows))


def _instruction(code: re.Match[str], upper: int, labels: dict[str, int]) -> Instruction:
    address, guard, opcode, operands, _ = code.groups()
    label = TARGET.search(operands)
    return Instruction(
        address=int(address, 16),
        guard=guard,
        opcode=opcode.rstrip(";"),
        operands=tuple(operand.strip() for operand in operands.split(",")) if operands else (),
        control=Control.decode(upper),
        target=labels.get(label.group(1)) if label else None,
    )
