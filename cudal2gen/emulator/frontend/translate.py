"""A kernel's control-flow graph -> one Python generator function.

Registers are local variables: a uniform register is a Python int (raw bits, unsigned), a varying one an array of raw
bits with one element per lane of the batch. Registers are never changed in place, so arrays may be shared. Each basic
block is an arm of a binary tree of comparisons. Under a partial mask a block computes all lanes, touches memory for the
masked ones, and at its end merges those registers that other blocks can see.

Instructions are emitted by handlers registered in ``HANDLERS`` (opcode up to the first dot -> function); the tables
live in ``integer``, ``floating`` and ``movement``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cudal2gen.emulator.arithmetic import arithmetic
from cudal2gen.emulator.frontend import flow
from cudal2gen.emulator.frontend.flow import LAUNCH_CONSTANTS, SPECIALS, Graph
from cudal2gen.emulator.frontend.ptx import (
    TYPE_BYTES,
    Function,
    Imm,
    Instr,
    Mem,
    Module,
    Operand,
    Pair,
    PtxError,
    Reg,
    Sym,
    Tensor,
    Vec,
)
from cudal2gen.emulator.machine.batch import BLOCKED, DONE, Compiled
from cudal2gen.emulator.machine.tensor import force
from cudal2gen.emulator.memory.shared import GENERIC_LOCAL, GENERIC_SHARED, WINDOW_START
from cudal2gen.emulator.state.hazards import EmulatorError, Site

Handler = Callable[["Emitter", Instr], None]
HANDLERS: dict[str, Handler] = {}
# Opcodes that can be computed on Python ints: base -> test of the instruction.
UNIFORM: dict[str, Callable[[Instr], bool]] = {}
DTYPES = {"u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"}


class UnknownInstruction(EmulatorError):
    """An instruction that this machine does not know; the message names PTX line and opcode."""


class Value(NamedTuple):
    """Python text and what it evaluates to: ``kind`` is a NumPy type code (``u4``, ``i8``, ``f4``, ...) or ``p``; a
    uniform value is a Python int of raw bits (signed if the kind is ``i``)."""

    text: str
    kind: str
    uniform: bool


def _always(_: Instr) -> bool:
    return True


def instruction(*bases: str, uniform: Callable[[Instr], bool] | bool = False) -> Callable[[Handler], Handler]:
    """Register a handler for opcodes."""

    def register(handler: Handler) -> Handler:
        for base in bases:
            HANDLERS[base] = handler
            if uniform:
                UNIFORM[base] = _always if uniform is True else uniform
        return handler

    return register


def can_be_uniform(ins: Instr) -> bool:
    """Whether equal operands give an equal result that the handler can compute on ints."""
    test = UNIFORM.get(ins.base)
    return test is not None and test(ins)


def unsupported(ins: Instr, why: str = "unknown instruction") -> UnknownInstruction:
    where = f" [{ins.loc}]" if ins.loc is not None else ""
    return UnknownInstruction(f"PTX line {ins.line}: {why}: {ins.op} in `{ins.text}`{where}")


class Emitter:
    """Writes the function of one kernel."""

    def __init__(self, module: Module, graph: Graph, counters: bool) -> None:
        self.module, self.graph, self.counters = module, graph, counters
        self.kinds = graph.kinds
        self.lines: list[str] = []
        self.indent = ""
        self.names: dict[str, str] = {}
        self.scope: dict[str, Any] = dict(_NAMESPACE)
        self.sites: list[Site] = []
        self.temps = 0
        self.symbols: dict[str, tuple[str, int]] = {}
        self.current: Instr | None = None
        self.guard: str | None = None
        self.site_of: dict[int, int] = {}
        self.shared_static = 0
        self.local_bytes = 0
        self.lazy: set[str] = set()
        self.initialised: set[str] = set()
        self._place_variables()
        self._find_lazy()

    # --- variables ---

    def _place_variables(self) -> None:
        wanted = {op.name for ins in flow.all_instructions(self.graph) for op in _symbols(ins)}
        shared: list[Any] = []
        for variable in (*self.module.variables.values(), *self.graph.variables):
            if variable.space == "shared" and variable.name in wanted:
                shared.append(variable)
        at = 0
        for variable in sorted(shared, key=lambda v: v.size == 0):
            at = -(-at // variable.align) * variable.align
            self.symbols[variable.name] = ("shared", WINDOW_START + at)
            at += variable.size
        self.shared_static = at
        at = 0
        for variable in self.graph.variables:
            if variable.space == "local":
                at = -(-at // max(variable.align, 16)) * max(variable.align, 16)
                self.symbols[variable.name] = ("local", at)
                at += variable.size
        self.local_bytes = -(-at // 16) * 16
        for variable in (*self.module.variables.values(), *self.graph.variables):
            if variable.space in ("global", "const"):
                self.symbols[variable.name] = (variable.space, 0)
        for param, offset in zip(self.graph.function.params, self.graph.function.offsets, strict=True):
            self.symbols[param.name] = ("param", offset)

    def _find_lazy(self) -> None:
        """Registers that may hold a pending accumulator: results of mma, and copies of them."""
        moves: list[tuple[str, str]] = []
        for ins in flow.all_instructions(self.graph):
            if ins.base == "mma" or (ins.base == "wgmma" and ins.parts[1] == "mma_async"):
                self.lazy.update(flow.registers(ins.operands[0]))
                if ins.base == "wgmma" and isinstance(ins.operands[1], Vec):
                    # While the instruction is under way, its A registers may not be written.
                    self.lazy.update(flow.registers(ins.operands[1]))
            elif ins.base == "mov" and len(ins.operands) == 2:
                to, source = ins.operands
                if isinstance(to, Reg) and isinstance(source, Reg):
                    moves.append((to.name, source.name))
        changed = True
        while changed:
            changed = False
            for name, origin in moves:
                if origin in self.lazy and name not in self.lazy and name not in self.graph.uniform:
                    self.lazy.add(name)
                    changed = True

    # --- text ---

    def line(self, text: str) -> None:
        self.lines.append(self.indent + text)

    def temp(self, text: str) -> str:
        """Bind an expression to a fresh name."""
        self.temps += 1
        name = f"t{self.temps}"
        self.line(f"{name} = {text}")
        return name

    def bind(self, prefix: str, value: Any) -> str:
        """Make a Python object visible to the function."""
        for name, old in self.scope.items():
            if old is value:
                return name
        name = f"{prefix}_{len(self.scope)}"
        self.scope[name] = value
        return name

    def variable(self, name: str) -> str:
        out = self.names.get(name)
        if out is None:
            out = self.names[name] = f"v{len(self.names)}"
        return out

    def fail(self, why: str = "unknown instruction") -> UnknownInstruction:
        assert self.current is not None
        return unsupported(self.current, why)

    def site(self) -> int:
        """Number of the current instruction in the table of sites."""
        ins = self.current
        assert ins is not None
        key = id(ins)
        number = self.site_of.get(key)
        if number is None:
            number = self.site_of[key] = len(self.sites)
            self.sites.append(Site(ins.line, " ".join(ins.text.split()), str(ins.loc) if ins.loc is not None else ""))
        return number

    # --- operands ---

    def bits(self, name: str) -> int:
        """Width of a register in bits; 1 for a predicate."""
        kind = self.kinds[name]
        return 1 if kind == "pred" else 8 * max(2, TYPE_BYTES[kind])

    def is_uniform(self, name: str) -> bool:
        if name in SPECIALS:
            return name in LAUNCH_CONSTANTS
        return name in self.graph.uniform

    def operand_bits(self, op: Operand) -> int | None:
        return self.bits(op.name) if isinstance(op, Reg) and op.name in self.kinds else None

    def raw(self, op: Operand, bits: int) -> Value:
        """An operand as unsigned bits of the given width (8, 16, 32, 64)."""
        kind = f"u{bits // 8}"
        mask = (1 << bits) - 1
        if isinstance(op, Imm):
            return Value(str(_immediate(op, bits) & mask), kind, True)
        if isinstance(op, Reg):
            if op.name in SPECIALS:
                return self._special(op.name, bits)
            if op.name not in self.kinds:
                raise self.fail(f"special register {op.name}")
            have = self.bits(op.name)
            if have == 1:
                raise self.fail("predicate used as a number")
            text = self.variable(op.name)
            if self.is_uniform(op.name):
                return Value(text if have <= bits else f"({text} & {mask})", kind, True)
            if op.name in self.lazy:
                text = f"X.read({text}, m, {self.site()})" if self.graph.asynchronous else f"FORCE({text})"
            return Value(text if have == bits else f"{text}.astype({kind})", kind, False)
        if isinstance(op, Sym):
            return self._symbol(op, bits)
        raise self.fail("operand not understood")

    def _special(self, name: str, bits: int) -> Value:
        kind = f"u{bits // 8}"
        if name in LAUNCH_CONSTANTS:
            return Value(f"M.launch_constant({name!r})", kind, True)
        if name in ("%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"):
            return Value(f"M.clock({bits})", kind, False)
        text = f"M.special({name!r})"
        return Value(text if bits == 32 else f"{text}.astype({kind})", kind, False)

    def _symbol(self, op: Sym, bits: int) -> Value:
        place = self.symbols.get(op.name)
        kind = f"u{bits // 8}"
        if place is None:
            raise self.fail(f"symbol {op.name} is not a variable")
        space, at = place
        if space in ("global", "const"):
            text = f"M.address_of({op.name!r})"
            return Value(f"({text} + {op.offset})" if op.offset else text, kind, True)
        return Value(str(at + op.offset), kind, True)

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
        """An operand as an array of the given type, whatever it is."""
        bits = 8 * int(kind[1:])
        v = self.raw(op, bits)
        text = f"K({v.text}, {bits // 8})" if v.uniform else v.text
        return text if kind[0] == "u" else f"{text}.view({kind})"

    def number(self, op: Operand, kind: str) -> str:
        """An operand as a float array, or a float scalar for literals."""
        if isinstance(op, Imm):
            bits = 8 * int(kind[1:])
            value = np.array([_immediate(op, bits) & ((1 << bits) - 1)], f"u{bits // 8}").view(kind)[0]
            return self.bind("c", value) if not (math.isnan(float(value))) else self.array(op, kind)
        return self.array(op, kind)

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
        v = self.predicate(op)
        return f"K(int({v.text}), 0)" if v.uniform else v.text

    # --- results ---

    def assign(self, op: Operand, value: Value) -> None:
        """Write a result register; widens by the sign of the value's kind, merges under a varying guard."""
        if not isinstance(op, Reg):
            raise self.fail("destination expected")
        if op.name == "_":
            self.line(value.text)
            return
        name = self.variable(op.name)
        bits = self.bits(op.name)
        text, kind = value.text, value.kind
        if bits == 1:
            if value.uniform and not self.is_uniform(op.name):
                text = f"K(int({text}), 0)"
        elif value.uniform:
            if kind[0] == "i" or 8 * int(kind[1:]) > bits:
                text = f"({text}) & {(1 << bits) - 1}"
            if not self.is_uniform(op.name):
                text = f"K({text}, {bits // 8})"
        else:
            if self.is_uniform(op.name):
                raise AssertionError(f"varying value for uniform register {op.name}")
            have = 8 * int(kind[1:])
            if have != bits:
                text = f"{_paren(text)}.astype({kind[0] if kind[0] == 'i' else 'u'}{bits // 8})"
                if kind[0] == "i":
                    text += f".view(u{bits // 8})"
            elif kind[0] != "u":
                text = f"{_paren(text)}.view(u{bits // 8})"
        if op.name in self.lazy and self.graph.asynchronous:
            self.line(f"X.overwrite({name}, {self.mask()}, {self.site()})")
        if self.guard is not None:
            old = f"FORCE({name})" if op.name in self.lazy else name
            text = f"SEL({self.guard}, {text}, {old})"
        self.line(f"{name} = {text}")

    def mask(self) -> str:
        """The mask of the current instruction: the block's, narrowed by a varying guard."""
        if self.guard is None:
            return "m"
        return self.temp(f"({self.guard}) if m is None else ({self.guard}) & m")

    # --- addresses ---

    def address(self, op: Operand, space: str) -> str:
        """An address operand as an array: uint32 for shared memory, else uint64."""
        if not isinstance(op, Mem):
            raise self.fail("address expected")
        width = 4 if space == "shared" else 8
        bits = 8 * width
        base, offset = op.base, op.offset
        if isinstance(base, Sym):
            v = self._symbol(Sym(base.name, base.offset + offset), bits)
            return f"K({v.text}, {width})"
        if isinstance(base, Imm):
            return f"K({(base.value + offset) & ((1 << bits) - 1)}, {width})"
        v = self.raw(base, bits)
        if v.uniform:
            text = f"({v.text} + {offset}) & {(1 << bits) - 1}" if offset else v.text
            return f"K({text}, {width})"
        if not offset:
            return v.text
        return f"({v.text} + {offset & ((1 << bits) - 1)})"

    # --- the function ---

    def compile(self) -> Compiled:
        graph = self.graph
        code: list[list[str]] = []
        opcodes: list[dict[str, int]] = []
        for block in graph.blocks:
            self.lines, self.indent = [], ""
            self._block(block)
            code.append(self.lines)
            counted: dict[str, int] = {}
            for ins in [*block.instrs, *([block.last] if block.last is not None else [])]:
                counted[ins.op] = counted.get(ins.op, 0) + 1
            opcodes.append(counted)
        out = ["def kernel(M):", " K = M.constant; S = M.shared; G = M.memory; W = M.warps; T = M.matrices"]
        if graph.asynchronous:
            out.append(" B = M.barriers; C = M.bulk; X = M.warpgroups")
        entry = sorted(graph.live_in[0] | self._never_written())
        for name in entry:
            if name in self.kinds:
                bits = self.bits(name)
                zero = "0" if name in graph.uniform else f"K(0, {0 if bits == 1 else bits // 8})"
                out.append(f" {self.variable(name)} = {zero}")
                self.initialised.add(name)
        others = [self.variable(n) for n in graph.shared_across if n in self.kinds and n not in self.initialised]
        for i in range(0, len(others), 50):
            out.append(" " + " = ".join(others[i : i + 50]) + " = None")
        out += [" b, m, w = M.start()", " while True:"]
        self._tree(code, 0, len(code), "  ", out)
        source = "\n".join(out) + "\n"
        scope = self.scope
        exec(compile(source, f"<{graph.function.name}>", "exec"), scope)
        clobbers = [frozenset(c) for c in graph.clobbers]
        return Compiled(
            name=graph.function.name,
            function=scope["kernel"],
            sites=self.sites,
            shared_static=self.shared_static,
            shared_granule=_granule(graph, ("shared",)),
            global_granule=_granule(graph, ("global",)),
            local_bytes=self.local_bytes,
            clobbers=clobbers,
            live_in=[frozenset(s) for s in graph.live_in],
            block_lines=[b.line for b in graph.blocks],
            block_opcodes=opcodes,
            symbols=self.symbols,
            source=source,
            conservative=graph.conservative,
            has_clobbers=any(clobbers),
            asynchronous=graph.asynchronous,
            attributes=graph.function.attributes,
        )

    def _never_written(self) -> set[str]:
        written = {n for ins in flow.all_instructions(self.graph) for n in flow.defs_uses(ins)[0]}
        read = {n for ins in flow.all_instructions(self.graph) for n in flow.defs_uses(ins)[1]}
        read |= {b.cond.name for b in self.graph.blocks if b.cond is not None}
        return {n for n in read - written if n in self.kinds}

    def _tree(self, code: list[list[str]], low: int, high: int, pad: str, out: list[str]) -> None:
        if high - low == 1:
            if self.counters:
                out.append(f"{pad}M.launch.counters.block({low}, M, m)")
            out += [pad + text for text in code[low]] or [pad + "pass"]
            return
        middle = (low + high) // 2
        out.append(f"{pad}if b < {middle}:")
        self._tree(code, low, middle, pad + " ", out)
        out.append(f"{pad}else:")
        self._tree(code, middle, high, pad + " ", out)

    def _block(self, block: flow.Block) -> None:  # noqa: PLR0915
        graph = self.graph
        # wgmma leaves the registers of other warpgroups as they are.
        written = {n for ins in block.instrs if ins.base != "wgmma" for n in flow.defs_uses(ins)[0]}
        if block.end == "wait" and block.last is not None:
            written |= set(flow.defs_uses(block.last)[0])
        merge = sorted(n for n in written if n in graph.shared_across and n not in graph.uniform and n in self.kinds)
        saved = {n: f"o_{self.variable(n)}" for n in merge}
        if merge:
            self.line("if w:")
            self.line(" " + "; ".join(f"{saved[n]} = {self.variable(n)}" for n in merge))
        for ins in block.instrs:
            self.emit(ins)
        if block.end == "wait":
            assert block.last is not None
            self.current, self.guard = block.last, None
            operands = self._barrier_operands(block.last)
        if merge:
            self.line("if w:")
            for n in merge:
                v = self.variable(n)
                if n in self.lazy and graph.asynchronous:
                    self.line(f" {v} = X.merge(m, {v}, {saved[n]})")
                    continue
                new = f"FORCE({v})" if n in self.lazy else v
                old = f"FORCE({saved[n]})" if n in self.lazy else saved[n]
                self.line(f" {v} = SEL(m, {new}, {old})")
        at = block.index
        if block.end == "exit":
            self.line("b, m, w = M.exit(m)")
            self.line(f"if b == {DONE}: return")
            self._blocked()
        elif block.end == "jump":
            self._goto(at, block.targets[0])
        elif block.end == "cond":
            assert block.cond is not None
            yes, no = block.targets
            p = self.predicate(block.cond)
            if yes == no:
                self._goto(at, yes)
            elif p.uniform:
                self.line(f"if {p.text}:")
                self.indent = " "
                self._goto(at, yes)
                self.indent = ""
                self.line("else:")
                self.indent = " "
                self._goto(at, no)
                self.indent = ""
            else:
                back = [t for t in (yes, no) if (at, t) in graph.back_edges]
                spinning = [t for t in back if t in graph.spin_heads]
                if back:
                    self.line(f"M.backward({at}, m)")
                if spinning:
                    self.line(f"b, m, w = M.spin_branch({p.text}, {yes}, {no}, {spinning[0]}, m)")
                    self._blocked()
                else:
                    self.line(f"b, m, w = M.branch({p.text}, {yes}, {no}, m)")
        elif block.end == "switch":
            assert block.cond is not None
            self.current = block.last
            self.line(f"b, m, w = M.switch({self.array(block.cond, 'u4')}, {tuple(block.targets)}, m)")
        else:
            assert block.last is not None
            self.current = block.last
            self.line(f"b, m, w = {_waiting_call(block.last)}({operands}, m, {block.targets[0]}, {self.site()})")
            self._blocked()
            self.line(f"if b == {DONE}: return")

    def _blocked(self) -> None:
        self.line(f"while b == {BLOCKED}:")
        self.line(" yield")
        self.line(" b, m, w = M.resume()")

    def _goto(self, at: int, target: int) -> None:
        if (at, target) in self.graph.back_edges:
            self.line(f"M.backward({at}, m)")
            if target in self.graph.spin_heads:
                self.line(f"b, m, w = M.spin({target}, m)")
                self._blocked()
                return
        self.line(f"b = {target}")
        self.line("if w: b, m, w = M.next(b, m)")

    def _barrier_operands(self, ins: Instr) -> str:
        """Emit the reduction of bar.red, return ``number, count`` for the barrier, or the members of bar.warp.sync."""
        operands = list(ins.operands)
        if ins.base == "emu_converge":
            return self.raw(operands[0], 32).text if operands else "None"
        if ins.base == "emu_try_wait":
            parity = "parity" in ins.parts
            token = self.array(operands[1], "u4" if parity else "u8")
            return f"{self.address(operands[0], 'shared')}, {token}, {parity}"
        if "cluster" in ins.parts:
            return str(not any(p in ins.parts for p in ("relaxed",)))
        if "warp" in ins.parts:
            return self.raw(operands[0], 32).text
        if "red" in ins.parts:
            mode = next(p for p in ins.parts if p in ("popc", "and", "or"))
            destination = operands.pop(0)
            value = self.predicate_array(operands.pop())
            text = self.temp(f"M.bar_red({mode!r}, {value}, m, {self.site()})")
            self.assign(destination, Value(text, "u4" if mode == "popc" else "p", False))
        texts = []
        for op in operands[:2]:
            v = self.raw(op, 32)
            texts.append(v.text)
        while len(texts) < 2:
            texts.append("0")
        return ", ".join(texts)

    def emit(self, ins: Instr) -> None:
        """Emit one instruction, guard included."""
        self.current, self.guard, self.indent = ins, None, ""
        handler = HANDLERS.get(ins.base)
        if handler is None:
            raise unsupported(ins)
        if ins.guard is not None:
            p = self.predicate(ins.guard)
            if p.uniform:
                self.line(f"if {p.text}:")
                self.indent = " "
                before = len(self.lines)
                handler(self, ins)
                if len(self.lines) == before:
                    self.line("pass")
                self.indent = ""
                return
            self.guard = p.text
        try:
            handler(self, ins)
        except (IndexError, KeyError, ValueError, StopIteration) as error:
            raise unsupported(ins, f"form not modelled ({type(error).__name__}: {error})") from error
        self.guard = None


def _waiting_call(ins: Instr) -> str:
    """The method that may put lanes to sleep at a blocking instruction."""
    if ins.base == "emu_try_wait":
        return "B.try_wait"
    if ins.base == "emu_converge":
        return "M.converge"
    if "cluster" in ins.parts:
        return "B.cluster_wait"
    return "M.bar_warp" if "warp" in ins.parts else "M.barrier"


def _symbols(ins: Instr) -> list[Sym]:
    out = []
    for op in ins.operands:
        if isinstance(op, Sym):
            out.append(op)
        elif isinstance(op, Mem | Tensor) and isinstance(op.base, Sym):
            out.append(op.base)
        elif isinstance(op, Vec):
            out += [x for x in op.items if isinstance(x, Sym)]
    return out


def _paren(text: str) -> str:
    return (
        text
        if text.replace("_", "a").replace(".", "a").isalnum() or (text.endswith(")") and text[0] not in "~-(")
        else f"({text})"
    )


def _immediate(op: Imm, bits: int) -> int:
    """Raw bits of a literal in a type of this width."""
    import struct

    if op.kind == "i":
        return op.value
    if op.kind == "f":
        if bits == 64:
            return int.from_bytes(struct.pack("<d", struct.unpack("<f", struct.pack("<I", op.value))[0]), "little")
        return op.value
    if bits == 32:
        return int.from_bytes(struct.pack("<f", struct.unpack("<d", struct.pack("<Q", op.value))[0]), "little")
    return op.value


def _granule(graph: Graph, spaces: tuple[str, ...]) -> int:
    """The smallest access in a space: tags need not be finer."""
    smallest = 16
    for ins in flow.all_instructions(graph):
        base, parts = ins.base, set(ins.parts)
        heads = {p.split(":")[0] for p in parts}
        if base in ("ld", "st", "atom", "red", "ldu"):
            named = {"global", "shared", "local", "param", "const"} & heads
            if named and not named & set(spaces):
                continue
            width = TYPE_BYTES.get(ins.parts[-1], 4)
            if base in ("atom", "red"):
                width = min(TYPE_BYTES.get(p, 16) for p in ins.parts[1:])
            elif "v2" in parts:
                width *= 2
            elif "v4" in parts:
                width *= 4
            elif "v8" in parts:
                width *= 8
            smallest = min(smallest, width)
        elif base == "cp" and len(ins.operands) >= 3:
            size = ins.operands[2]
            if isinstance(size, Imm):
                smallest = min(smallest, size.value)
            if len(ins.operands) > 3 and "global" in spaces and "bulk" not in parts:
                smallest = min(smallest, 4)
        elif base == "wmma":
            smallest = min(smallest, 2)
    return smallest


def _s(bits: int) -> Callable[[int], int]:
    top, full = 1 << (bits - 1), 1 << bits

    def sign(x: int) -> int:
        return x - full if x & top else x

    return sign


def _sel(p: Any, new: Any, old: Any) -> Any:
    """Masked assignment; a register that has no value yet takes the new one."""
    if old is None:
        return new
    if type(new) is not np.ndarray:
        new = force(new)
    return np.where(p, new, old)


def _split(values: Any, n: int, width: int, lanes: int) -> Any:
    """A vector load -> its ``n`` elements of ``width`` bytes, one array each."""
    return np.ascontiguousarray(values.view(f"u{width}").reshape(lanes, n).T)


def _join(parts: tuple[Any, ...], width: int) -> Any:
    """Elements of ``width`` bytes -> one wide value per lane."""
    from cudal2gen.emulator.memory.arena import MOVER

    n = len(parts)
    out = np.empty((len(parts[0]), n), f"u{width}")
    for i, part in enumerate(parts):
        out[:, i] = part
    return out.reshape(-1).view(MOVER[n * width])


_NAMESPACE: dict[str, Any] = {
    "np": np,
    "FORCE": force,
    "SEL": _sel,
    "SPLIT": _split,
    "JOIN": _join,
    "WHERE": np.where,
    "S8": _s(8),
    "S16": _s(16),
    "S32": _s(32),
    "S64": _s(64),
    "A": arithmetic,
    "GENERIC_SHARED": GENERIC_SHARED,
    "GENERIC_LOCAL": GENERIC_LOCAL,
    **{k: np.dtype(k) for k in sorted(DTYPES)},
}


def translate(module: Module, name: str, counters: bool = False, conservative: bool = False) -> Compiled:
    """Compile kernel ``name`` of a module. Cached per module object.

    Raises UnknownInstruction (an EmulatorError) or PtxError, both naming the PTX line.
    """
    from cudal2gen.emulator.frontend.instructions import (
        asynchronous,  # noqa: F401
        floating,  # noqa: F401
        integer,  # noqa: F401
        movement,  # noqa: F401
    )

    key = (name, counters, conservative)
    out = module.translated.get(key)
    if not isinstance(out, Compiled):
        kernel: Function | None = module.kernels.get(name)
        if kernel is None:
            raise EmulatorError(f"no kernel {name!r} in this file; it has {', '.join(module.kernels) or 'none'}")
        graph = flow.build(module, kernel, can_be_uniform, conservative)
        out = module.translated[key] = Emitter(module, graph, counters).compile()
    return out


__all__ = ["HANDLERS", "Emitter", "Pair", "PtxError", "UnknownInstruction", "Value", "instruction", "translate"]
