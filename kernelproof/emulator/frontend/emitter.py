"""Writes the Python text of basic blocks: registers, operands, addresses, results.

Registers are local variables of the kernel's function. A uniform register, which has one value for all lanes, is a
Python int (raw bits, unsigned); a varying one is an array of raw bits with one element per lane of the batch. Arrays of
registers never change in place, so several registers may share one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.frontend.product_grids import ProductLine
from kernelproof.emulator.frontend.ptx import GRID_WORKSPACE, TYPE_BYTES, Imm, Instr, Mem, Operand, Reg, Sym
from kernelproof.emulator.frontend.registers import CLOCKS, LAUNCH_CONSTANTS, SPECIALS, WORKSPACE_HALVES
from kernelproof.emulator.state.launch_state import Origin
from kernelproof.emulator.state.reports import EmulatorError
from kernelproof.emulator.state.sites import Site

# The names that a kernel's text uses for the units of its batch: letters, because they occur in almost every line. For
# example, ``K(value, bytes)`` is the method ``constant``, which makes an array with the int ``value`` in every lane. In
# addition ``M`` is the batch, ``A`` the package ``arithmetic``, ``b`` the next block, ``m`` the mask of the running
# lanes (None: all), and ``w`` whether other lanes are at other blocks. Units of sm_90 and sm_100 have names only in
# kernels that need them.
UNITS = {
    "K": "constant", "R": "scheduler", "J": "barriers", "Y": "meetings", "S": "shared", "G": "memory", "Z": "copies",
    "U": "output", "L": "local", "P": "parameters", "N": "generic", "Q": "atomics", "W": "warps", "T": "matrices",
    "H": "matrix_memory", "I": "special",
}  # fmt: skip
HOPPER_UNITS = {
    "E": "peers", "B": "mbarriers", "D": "cluster_barriers", "C": "bulk", "X": "warpgroups", "O": "registers",
    "V": "map_edits", "F": "async_stores",
}  # fmt: skip
# ``X`` is the unit that checks registers which asynchronous instructions use: of wgmma on sm_90, of tcgen05.ld on
# sm_100.
BLACKWELL_UNITS = {
    "X": "pending", "TA": "allocation", "TM": "accesses", "TP": "products", "CL": "cluster_launches",
}  # fmt: skip


class UnknownInstruction(EmulatorError):
    """An instruction that the emulator does not support; the message names PTX line and opcode."""


class Value(NamedTuple):
    """The text of a Python expression, and the type of its value. ``kind`` is a NumPy type code (``u4``, ``i8``,
    ``f4``, ...), or ``p`` for a predicate. A uniform value is a Python int of raw bits, signed if the kind is ``i``."""

    text: str
    kind: str
    uniform: bool


# Instructions of textures and surfaces.
TEXTURES = frozenset(("tex", "tld4", "txq", "suld", "sust", "sured", "suq", "istypep"))


def unsupported(ins: Instr, why: str = "unknown instruction") -> UnknownInstruction:
    """The error for an instruction that is not supported."""
    if ins.base in TEXTURES:
        why = "textures and surfaces are not modelled"
    where = f" [{Site(frames=ins.frames).source}]" if ins.frames else ""
    return UnknownInstruction(f"PTX line {ins.line}: {why}: {ins.op} in `{ins.text}`{where}")


@dataclass
class EmitterFacts:
    """The facts about a kernel's registers and variables that the emitter uses.

    ``kinds``: declared types of registers. ``uniform``: registers with one value for all lanes. ``lazy``: registers
    that may hold an accumulator which is not computed or not complete yet. ``read_registers``: those whose value an
    instruction or a branch uses. ``checked_loads``: loads (by identity) whose value a compare-and-swap checks.
    ``symbols``: variable -> (state space, offset). ``hopper``: the kernel needs the units of sm_90. ``polls``: the
    kernel has loops that wait for memory. ``origins``: 64-bit register -> pointers that it may be computed from.
    ``machine_code``: the kernel is lowered from a cubin, so the line of an instruction is its address.
    """

    kinds: dict[str, str]
    uniform: set[str]
    lazy: set[str]
    read_registers: set[str]
    checked_loads: set[int]
    symbols: dict[str, tuple[str, int]]
    hopper: bool
    polls: bool
    origins: dict[str, frozenset[Origin]]
    machine_code: bool


class Emitter:
    """Writes the lines of a block, into ``lines``. ``current`` is the instruction that is being written; ``guard`` is
    the text of its predicate if that varies between lanes. ``scope``: the Python objects that the text may name.

    Methods raise UnknownInstruction for an operand that they cannot translate.
    """

    def __init__(self, facts: EmitterFacts, scope: dict[str, object]) -> None:
        self.kinds, self.uniform, self.lazy, self.symbols = facts.kinds, facts.uniform, facts.lazy, facts.symbols
        self.read_registers, self.checked_loads = facts.read_registers, facts.checked_loads
        self.hopper, self.polls = facts.hopper, facts.polls
        self.origins, self.machine_code = facts.origins, facts.machine_code
        # Number of an instruction -> the pointers from which its address may be computed.
        self.address_origins: dict[int, frozenset[Origin]] = {}
        # Register that some path reads before it writes it -> the first instruction that reads it.
        self.first_uses: dict[str, int] = {}
        self.scope = scope
        self.lines: list[str] = []
        self.indent = ""
        # The unguarded mma.sync of the block.
        self.products: list[ProductLine] = []
        self.sites: list[Site] = []
        self.current: Instr | None = None
        self.guard: str | None = None
        # If the block ends with a wait: the block at which lanes continue, and the text of the call that waits.
        self.resume = 0
        self.waiting = ""
        self._variables: dict[str, str] = {}
        self._site_of: dict[int, int] = {}
        self._temps = 0

    # --- text ---

    def line(self, text: str) -> None:
        """Add a line to the block."""
        self.lines.append(self.indent + text)

    def temp(self, text: str) -> str:
        """Bind an expression to a fresh name."""
        self._temps += 1
        name = f"t{self._temps}"
        self.line(f"{name} = {text}")
        return name

    def bind(self, prefix: str, value: object) -> str:
        """Make a Python object visible to the kernel's function; returns its name there."""
        # Objects are compared by identity, so an object that many instructions use has one name.
        for name, old in self.scope.items():
            if old is value:
                return name
        name = f"{prefix}_{len(self.scope)}"
        self.scope[name] = value
        return name

    def variable(self, name: str) -> str:
        """The local variable of a register."""
        out = self._variables.get(name)
        if out is None:
            out = self._variables[name] = f"v{len(self._variables)}"
        return out

    def wait(self, call: str, *arguments: str) -> None:
        """End the block with a call that may put lanes to sleep; they continue at the next block."""
        self.waiting = f"{call}({', '.join((*arguments, 'm', str(self.resume), str(self.site())))})"

    def fail(self, why: str = "unknown instruction") -> UnknownInstruction:
        """The error for the current instruction."""
        assert self.current is not None
        return unsupported(self.current, why)

    def refuse(self, *modifiers: str) -> None:
        """Raise UnknownInstruction if the current instruction has one of these modifiers, as a part of the opcode or
        before or after ``::`` in a part."""
        assert self.current is not None
        for part in self.current.parts:
            if not set(modifiers).isdisjoint(part.split(":")):
                raise self.fail(f".{part.replace(':', '::')} is not modelled")

    def site(self) -> int:
        """The number of the current instruction in the table of sites."""
        assert self.current is not None
        return self.site_of(self.current)

    def site_of(self, ins: Instr) -> int:
        """The number of an instruction in the table of sites."""
        number = self._site_of.get(id(ins))
        if number is None:
            number = self._site_of[id(ins)] = len(self.sites)
            self.sites.append(
                Site(
                    ins.line, " ".join(ins.text.split()), ins.frames, self.machine_code, ins.ptx_line,
                    id(ins) in self.checked_loads,
                )
            )  # fmt: skip
        return number

    def sites_of(self, instructions: Iterable[int]) -> list[int]:
        """The numbers of instructions, given by identity; those without a number are left out."""
        return [self._site_of[identity] for identity in instructions if identity in self._site_of]

    def mask(self) -> str:
        """The mask of the current instruction: that of the block, narrowed by a varying guard."""
        if self.guard is None:
            return "m"
        return self.temp(f"({self.guard}) if m is None else ({self.guard}) & m")

    def trace(self, op: Operand) -> None:
        """Record the pointers from which the address of the current instruction is computed."""
        if isinstance(op, Mem):
            pointers: frozenset[Origin] | None = None
            if isinstance(op.base, Reg):
                pointers = self.origins.get(op.base.name)
            elif isinstance(op.base, Sym) and self.symbols.get(op.base.name, ("",))[0] in ("global", "const"):
                pointers = frozenset((op.base.name,))
            if pointers:
                self.address_origins[self.site()] = pointers

    def lanes(self) -> str:
        """The last two arguments of most units' methods: mask and site."""
        return f"{self.mask()}, {self.site()}"

    # --- operands ---

    def bits(self, name: str) -> int:
        """Width of a register in bits; 1 for a predicate."""
        kind = self.kinds[name]
        # Registers of 8-bit types are kept in 16 bits, the narrowest type that most instructions of PTX have.
        return 1 if kind == "pred" else 8 * max(2, TYPE_BYTES[kind])

    def is_uniform(self, name: str) -> bool:
        """Does the register have one value for all lanes?"""
        if name in SPECIALS:
            return name in LAUNCH_CONSTANTS
        return name in self.uniform

    def operand_bits(self, op: Operand) -> int | None:
        """Width of an operand that is a declared register."""
        return self.bits(op.name) if isinstance(op, Reg) and op.name in self.kinds else None

    def raw(self, op: Operand, bits: int) -> Value:
        """An operand as unsigned bits of the given width (8, 16, 32, 64)."""
        kind = f"u{bits // 8}"
        mask = (1 << bits) - 1
        if isinstance(op, Imm):
            return Value(str(immediate(op, bits) & mask), kind, True)
        if isinstance(op, Reg):
            if op.name in SPECIALS:
                return self._special(op.name, bits)
            if op.name not in self.kinds:
                raise self.fail(f"special register {op.name}")
            have = self.bits(op.name)
            if have == 1:
                raise self.fail("predicate used as a number")
            # Uniform values are narrowed by a mask, because Python ints have no width; arrays by a cast.
            text = self.variable(op.name)
            if self.is_uniform(op.name):
                return Value(text if have <= bits else f"({text} & {mask})", kind, True)
            if op.name in self.lazy:
                text = f"X.read({text}, m, {self.site()})" if self.hopper else f"FORCE({text})"
            return Value(text if have == bits else f"{text}.astype({kind})", kind, False)
        if isinstance(op, Sym):
            return self._symbol(op, bits)
        raise self.fail("operand not understood")

    def _special(self, name: str, bits: int) -> Value:
        """A special register as unsigned bits."""
        kind = f"u{bits // 8}"
        if name in WORKSPACE_HALVES:
            address = f"M.grid_workspace({GRID_WORKSPACE!r}, {self.site()})"
            text = f"({address} >> {WORKSPACE_HALVES[name]} & 0xFFFFFFFF)"
            return Value(text, kind, True)
        if name in LAUNCH_CONSTANTS:
            return Value(f"I.constant({name!r})", kind, True)
        if name in CLOCKS:
            return Value(f"I.clock({bits}, m)", kind, False)
        text = f"I.lanes({name!r})"
        return Value(text if bits == 32 else f"{text}.astype({kind})", kind, False)

    def _symbol(self, op: Sym, bits: int) -> Value:
        """The address of a variable, plus the symbol's offset in bytes, as unsigned bits."""
        place = self.symbols.get(op.name)
        kind = f"u{bits // 8}"
        if place is None:
            raise self.fail(f"symbol {op.name} is not a variable")
        space, offset = place
        if space in ("global", "const"):
            text = f"M.address_of({op.name!r})"
            return Value(f"({text} + {op.offset})" if op.offset else text, kind, True)
        if space == "shared" and self.hopper:
            # The address contains the rank of the CTA in its cluster, so it varies.
            return Value(f"E.variable({offset + op.offset}, {bits // 8})", kind, False)
        return Value(str(offset + op.offset), kind, True)

    def signed(self, op: Operand, bits: int) -> Value:
        """An operand as a signed integer."""
        v = self.raw(op, bits)
        kind = f"i{bits // 8}"
        if v.uniform:
            if isinstance(op, Imm):
                n = int(v.text)
                return Value(f"({n - (1 << bits) if n >> (bits - 1) else n})", kind, True)
            return Value(f"S{bits}({v.text})", kind, True)
        return Value(f"{v.text}.view({kind})", kind, False)

    def array(self, op: Operand, kind: str) -> str:
        """The text of an operand as an array of the given type, whether it is uniform or varying."""
        bits = 8 * int(kind[1:])
        v = self.raw(op, bits)
        text = f"K({v.text}, {bits // 8})" if v.uniform else v.text
        return text if kind[0] == "u" else f"{text}.view({kind})"

    def arrays(self, ops: tuple[Operand, ...], kind: str) -> str:
        """The text of a tuple of arrays, one for each operand."""
        return f"({', '.join(self.array(op, kind) for op in ops)},)"

    def number(self, op: Operand, kind: str) -> str:
        """The text of an operand as a float array. A literal is a float scalar; if it is NaN, an array, which keeps its
        bits."""
        if isinstance(op, Imm):
            bits = 8 * int(kind[1:])
            value = np.array([immediate(op, bits) & ((1 << bits) - 1)], f"u{bits // 8}").view(kind)[0]
            return self.bind("c", value) if not math.isnan(float(value)) else self.array(op, kind)
        return self.array(op, kind)

    def scalar(self, op: Operand) -> str:
        """The text of a 32-bit operand: an int if it is uniform, else an array."""
        return self.raw(op, 32).text

    def literal(self, op: Operand) -> int:
        """The value of an operand that must be a literal. Raises UnknownInstruction for others."""
        if not isinstance(op, Imm):
            raise self.fail("a literal is expected")
        return op.value

    def predicate(self, op: Operand) -> Value:
        """A predicate operand."""
        if isinstance(op, Imm):
            return Value(str(bool(op.value)), "p", True)
        if not isinstance(op, Reg):
            raise self.fail("predicate expected")
        text = self.variable(op.name)
        if self.is_uniform(op.name):
            return Value(f"(not {text})" if op.negated else text, "p", True)
        return Value(f"~{text}" if op.negated else text, "p", False)

    def predicate_array(self, op: Operand) -> str:
        """The text of a predicate operand as an array."""
        v = self.predicate(op)
        return f"K(int({v.text}), 0)" if v.uniform else v.text

    def address(self, op: Operand, space: str) -> str:
        """The text of an address operand as an array: uint32 for shared memory, else uint64. The address of a variable
        is in the variable's state space, whatever ``space`` is."""
        if not isinstance(op, Mem):
            raise self.fail("address expected")
        width = 4 if space == "shared" else 8
        bits = 8 * width
        base, offset = op.base, op.offset
        if isinstance(base, Sym):
            space, start = self.symbols.get(base.name, ("", 0))
            if space == "shared":
                return f"K({start + base.offset + offset}, {width})"
            return f"K({self._symbol(Sym(base.name, base.offset + offset), bits).text}, {width})"
        if isinstance(base, Imm):
            return f"K({(base.value + offset) & ((1 << bits) - 1)}, {width})"
        v = self.raw(base, bits)
        if v.uniform:
            text = f"({v.text} + {offset}) & {(1 << bits) - 1}" if offset else v.text
            return f"K({text}, {width})"
        return f"({v.text} + {offset & ((1 << bits) - 1)})" if offset else v.text

    def shared(self, op: Operand, reach: str = "") -> str:
        """The text of an address of shared memory in the form that the units expect (see ``hopper.peers``). ``reach``:
        ``shared:cluster``, ``shared:cta`` or ``generic``; empty: the first of these parts of the opcode, or
        ``generic``."""
        if isinstance(op, Mem) and isinstance(op.base, Sym):
            return self.address(op, "shared")
        assert self.current is not None
        reach = reach or next((p for p in self.current.parts if p.startswith("shared")), "generic")
        if reach == "generic":
            return f"N.in_shared({self.address(op, 'generic')}, {self.lanes()})"
        address = self.address(op, "shared")
        if not self.hopper:
            return address
        return f"E.of_cluster({address})" if reach == "shared:cluster" else f"E.of_cta({address}, {self.lanes()})"

    # --- results ---

    def assign(self, op: Operand, value: Value) -> None:
        """Write a result to a register. A narrow value is extended according to the sign of its kind. Under a varying
        guard it is merged with the old value."""
        if not isinstance(op, Reg):
            raise self.fail("destination expected")
        if op.name == "_":
            # The destination that drops a result. The text may still have effects, such as those of an atomic.
            self.line(value.text)
            return
        name = self.variable(op.name)
        text = self._fit(op.name, value)
        old = name
        if op.name in self.lazy:
            if self.hopper:
                self.line(f"X.overwrite({name}, {self.lanes()})")
            old = f"X.plain({name})" if self.hopper else f"FORCE({name})"
        if self.guard is not None:
            text = f"SEL({self.guard}, {text}, {old})"
        self.line(f"{name} = {text}")

    def _fit(self, name: str, value: Value) -> str:
        """The text of a value as raw bits of a register's width."""
        bits = self.bits(name)
        text, kind = value.text, value.kind
        if bits == 1:
            return f"K(int({text}), 0)" if value.uniform and not self.is_uniform(name) else text
        if value.uniform:
            if kind[0] == "i" or 8 * int(kind[1:]) > bits:
                text = f"({text}) & {(1 << bits) - 1}"
            return text if self.is_uniform(name) else f"K({text}, {bits // 8})"
        if self.is_uniform(name):
            raise AssertionError(f"varying value for uniform register {name}")
        if 8 * int(kind[1:]) != bits:
            signed = kind[0] == "i"
            text = f"{_parenthesize(text)}.astype({'i' if signed else 'u'}{bits // 8})"
            return f"{text}.view(u{bits // 8})" if signed else text
        return text if kind[0] == "u" else f"{_parenthesize(text)}.view(u{bits // 8})"


def immediate(op: Imm, bits: int) -> int:
    """The raw bits of a literal in a type of this width. Float literals are converted between single and double."""
    if op.kind == "f" and bits == 64:
        return int.from_bytes(struct.pack("<d", struct.unpack("<f", struct.pack("<I", op.value))[0]), "little")
    if op.kind == "d" and bits == 32:
        return int.from_bytes(struct.pack("<f", struct.unpack("<d", struct.pack("<Q", op.value))[0]), "little")
    return op.value


def _parenthesize(text: str) -> str:
    """An expression in parentheses, unless it needs none before a method call."""
    plain = text.replace("_", "a").replace(".", "a").isalnum()
    return text if plain or (text.endswith(")") and text[0] not in "~-(") else f"({text})"
