"""Data classes for parsed PTX: a module, its kernels and functions, their instructions, labels and operands.

They represent syntax only. The meaning of an opcode is defined where it is registered (``instruction``), and control
flow is analysed in ``flow``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from kernelproof.emulator.state.sites import Frame, Hazard, Site


class PtxError(Exception):
    """The text is not PTX that the emulator understands. The message starts with ``line N:``."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line


class LinkError(Exception):
    """Modules cannot be linked to one program. The message names the symbol that is missing or defined twice."""


class Linkage(Enum):
    """The linkage of a name. LOCAL: only its own module sees it. EXTERN: it is a variable that another module defines.
    Definitions of STRONG and WEAK names are seen by all modules."""

    LOCAL = ""
    STRONG = "visible"
    WEAK = "weak"
    EXTERN = "extern"


class Reg(NamedTuple):
    """A register, or a special register such as ``%tid.x``. ``negated``: the ``!`` of a predicate operand."""

    name: str
    negated: bool = False


class Imm(NamedTuple):
    """A literal. ``value`` is an int, or the raw bits if ``kind`` is ``f`` (single) or ``d`` (double precision)."""

    value: int
    kind: str = "i"


class Sym(NamedTuple):
    """The address of a variable, a label or a function, plus a byte offset."""

    name: str
    offset: int = 0


class Mem(NamedTuple):
    """``[base + offset]``, the offset in bytes."""

    base: Reg | Sym | Imm
    offset: int = 0


class TensorOperand(NamedTuple):
    """``[base + offset, {c0, c1, ...}]``: a tensor map's address and the coordinates of a box, innermost first."""

    base: Reg | Sym | Imm
    offset: int
    coordinates: tuple[Operand, ...]


class Vec(NamedTuple):
    """``{a, b, ...}``; also the parenthesised lists of a call."""

    items: tuple[Operand, ...]


class Pair(NamedTuple):
    """``p|q``: two destinations."""

    first: Reg
    second: Reg


Operand = Reg | Imm | Sym | Mem | TensorOperand | Vec | Pair


@dataclass(slots=True)
class Instr:
    """One instruction. ``parts`` is the opcode split at the dots, ``guard`` is ``@p`` or ``@!p``. ``frames`` are the
    CUDA lines, the innermost first (none without ``-lineinfo``). In machine code, ``line`` is the instruction's address
    and ``ptx_line`` the line of the PTX from which it was compiled, 0 if that is not known."""

    op: str
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Reg | None
    line: int
    frames: tuple[Frame, ...]
    text: str
    ptx_line: int = 0

    @property
    def base(self) -> str:
        """The opcode up to the first dot."""
        return self.parts[0]

    @property
    def has_system_scope(self) -> bool:
        """Is it an access to global memory by which a kernel may communicate with the host while it runs? That is so
        for system scope, which volatile accesses have, too."""
        if self.base not in ("ld", "st", "atom", "red") or any(part.startswith("shared") for part in self.parts):
            return False
        return not {"volatile", "sys", "mmio"}.isdisjoint(self.parts)


def refused(ins: Instr, why: str) -> PtxError:
    """The error for an instruction that the emulator refuses, with PTX line, opcode and CUDA line."""
    where = f" [{Site(frames=ins.frames).source}]" if ins.frames else ""
    return PtxError(ins.line, f"{why}: {ins.op} in `{' '.join(ins.text.split())}`{where}")


@dataclass(slots=True)
class Label:
    """A branch target. ``line`` is its PTX line."""

    name: str
    line: int


@dataclass(slots=True)
class Variable:
    """A declared variable. ``size`` is in bytes (0: ``.extern .shared``). ``init`` has the bytes of its initialiser,
    ``pointers`` the places in it that hold addresses: (byte offset, symbol, addend). ``kind``: the type of its
    elements. ``managed``: the host reads and writes it as well. ``within``: the variable of which it is a part, and its
    byte offset there."""

    name: str
    space: str
    size: int
    align: int
    init: bytes | None = None
    pointers: tuple[tuple[int, str, int], ...] = ()
    line: int = 0
    kind: str = ""
    managed: bool = False
    within: tuple[str, int] | None = None


@dataclass(slots=True)
class Function:
    """An ``.entry`` or ``.func`` with a body.

    ``params`` have their sizes in bytes; ``offsets`` are byte offsets by the kernel ABI. ``registers``: name ->
    declared type. ``ranges``: prefix of the registers that a declaration such as ``%r<9>`` numbers -> (type, how many).
    ``branch_targets``: name of a list (.branchtargets) -> labels. ``attributes``: name, such as ``maxntid`` -> its
    numbers. ``machine_code``: lowered from a cubin, so lines are addresses, and pointers are pairs of words.
    ``hazards``: faults in the schedule of machine code.
    """

    name: str
    entry: bool
    params: list[Variable]
    results: list[Variable]
    line: int
    body: list[Instr | Label] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    ranges: dict[str, tuple[str, int]] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    attributes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    machine_code: bool = False
    hazards: tuple[Hazard, ...] = ()

    def register_type(self, name: str, line: int) -> str:
        """The declared type (``b32``, ``pred``, ...) of a register. Raises PtxError, which names ``line``, if it is not
        declared."""
        kind = self.registers.get(name)
        if kind is not None:
            return kind
        match = _NUMBERED.match(name)
        if match is not None:
            entry = self.ranges.get(match.group(1))
            if entry is not None and int(match.group(2)) < entry[1]:
                self.registers[name] = entry[0]
                return entry[0]
        raise PtxError(line, f"register {name} is not declared")

    @property
    def offsets(self) -> list[int]:
        """The byte offset of every parameter, each aligned to its own alignment."""
        out, offset = [], 0
        for p in self.params:
            offset = -(-offset // p.align) * p.align
            out.append(offset)
            offset += p.size
        return out

    @property
    def param_bytes(self) -> int:
        """The bytes of the parameter block."""
        return self.offsets[-1] + self.params[-1].size if self.params else 0


# The variable for the workspace of a cooperative grid: 8 bytes, of which the second word counts arrivals.
GRID_WORKSPACE = "%grid_workspace"
# The first address of functions; no buffer has such an address.
CODE_START = 0xFC << 56


@dataclass
class Module:
    """A parsed PTX file. ``target``: such as ``sm_80``. ``version``: that of the PTX ISA, such as ``8.7``. ``kernels``,
    ``functions``: those with a body, by name. ``declared``: names of functions without a body. ``variables``: those of
    module scope. ``files``: number in .loc directives -> path. ``linkage``: of kernels, functions and variables."""

    target: str
    version: str
    kernels: dict[str, Function]
    functions: dict[str, Function]
    declared: set[str]
    variables: dict[str, Variable]
    files: dict[int, str]
    text: str
    linkage: dict[str, Linkage] = field(default_factory=dict)
    # Translations of kernels, which are kept here so that they live as long as the module.
    translated: dict[tuple[str, bool, bool, frozenset[int]], object] = field(default_factory=dict)
    # Kernel -> lines of the heads of loops that have turned out to wait for other threads.
    waiting: dict[str, set[int]] = field(default_factory=dict)

    @cached_property
    def function_addresses(self) -> dict[str, int]:
        """An address for each function, by name, which differs from all addresses of data."""
        return {name: CODE_START + 16 * i for i, name in enumerate(self.functions)}

    def may_signal_host(self, kernel: str) -> bool:
        """May a kernel communicate with the host while it runs, by its own accesses or those of functions that it may
        call?"""
        body = self.kernels[kernel].body
        calls = any(isinstance(item, Instr) and item.base == "call" for item in body)
        bodies = [body, *(function.body for function in self.functions.values() if calls)]
        return any(isinstance(item, Instr) and item.has_system_scope for body in bodies for item in body)

    @cached_property
    def addressed(self) -> set[str]:
        """Functions whose address an instruction or an initialiser takes."""
        names = {symbol for variable in self.variables.values() for _, symbol, _ in variable.pointers}
        for function in (*self.kernels.values(), *self.functions.values()):
            for item in function.body:
                if isinstance(item, Instr) and item.base == "mov":
                    names |= {op.name for op in item.operands if isinstance(op, Sym)}
        return names & self.functions.keys()


TYPE_BYTES = {
    "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4,
    "f32": 4, "f16x2": 4, "bf16x2": 4, "tf32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16, "pred": 1,
    "e4m3": 1, "e5m2": 1, "e4m3x2": 2, "e5m2x2": 2, "u16x2": 4, "s16x2": 4,
}  # fmt: skip

_NUMBERED = re.compile(r"(.*?)(\d+)$", re.S)
