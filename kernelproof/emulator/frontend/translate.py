"""Translates a kernel's control-flow graph to one Python generator function.

The function is a loop. In each iteration, a binary tree of comparisons leads to the code of the next block, whose
number is ``b``. ``m`` is the mask of the running lanes. A block computes its values for all lanes of the batch, but
touches memory only for the lanes in the mask. At its end it merges the registers that other blocks access: lanes
outside of the mask keep their old values. Then the scheduler decides which block comes next, and for which lanes. The
handler of an instruction (see ``instruction``) writes its text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kernelproof.emulator import arithmetic
from kernelproof.emulator.frontend.emitter import (
    BLACKWELL_UNITS,
    HOPPER_UNITS,
    UNITS,
    Emitter,
    EmitterFacts,
    UnknownInstruction,
    unsupported,
)
from kernelproof.emulator.frontend.flow.blocks import Block
from kernelproof.emulator.frontend.flow.dependence import compares_loaded, loaded_registers
from kernelproof.emulator.frontend.flow.graph import Graph, build
from kernelproof.emulator.frontend.flow.provenance import origins, written_pointers
from kernelproof.emulator.frontend.flow.swaps import checked_loads
from kernelproof.emulator.frontend.flow.windows import window_readings
from kernelproof.emulator.frontend.gathering import gather_places, may_release
from kernelproof.emulator.frontend.instruction import (
    InstructionForm,
    defs_uses,
    modelled_forms,
    results_and_operands,
    symbols,
)
from kernelproof.emulator.frontend.instructions import facts
from kernelproof.emulator.frontend.instructions.memory import observed_spaces, read_flags
from kernelproof.emulator.frontend.product_grids import join_products
from kernelproof.emulator.frontend.ptx import TYPE_BYTES, Function, Instr, Module, Pair, Reg, Variable
from kernelproof.emulator.frontend.registers import registers
from kernelproof.emulator.machine.execution import KernelFunction
from kernelproof.emulator.machine.scheduler import BLOCKED, DONE
from kernelproof.emulator.machine.tensor import Accumulator, force
from kernelproof.emulator.memory.shared import WINDOW_START
from kernelproof.emulator.state.arrays import MOVER, Array
from kernelproof.emulator.state.launch_state import KernelFacts, SharedVariable
from kernelproof.emulator.state.mangled import plain_name
from kernelproof.emulator.state.reports import EmulatorError
from kernelproof.emulator.state.scopes import restricted

CANCEL = ("clusterlaunchcontrol", "try_cancel")


@dataclass(eq=False)
class Compiled(KernelFacts):
    """A translated kernel: its ``function``, and the text of that function (``source``). ``conservative``: its lanes
    may overtake each other. ``hopper``, ``blackwell``: it needs the units of sm_90, of sm_100."""

    function: KernelFunction
    source: str
    conservative: bool
    hopper: bool
    blackwell: bool


class Layout:
    """The places of a kernel's variables. ``symbols``: name -> (state space, offset or window address).
    ``shared_static``, ``local_bytes``: bytes of static shared memory and, per thread, of local memory.
    ``shared_variables``: the variables in shared memory, which reports name."""

    def __init__(self, module: Module, graph: Graph) -> None:
        self.symbols: dict[str, tuple[str, int]] = {}
        variables = [*module.variables.values(), *graph.variables]
        mentioned = {name for ins in graph.instructions() for name in symbols(ins)}
        shared = [v for v in variables if v.space == "shared" and v.name in mentioned]
        # Variables without a size (.extern .shared) begin where the static memory ends.
        self.shared_static = self._place(sorted(shared, key=lambda v: v.size == 0), "shared", WINDOW_START, 1)
        # A name that occurs in several scopes or files is followed by "@@" and the number of its scope or file.
        self.shared_variables = tuple(
            SharedVariable(plain_name(v.name.split("@@")[0]), self.symbols[v.name][1] - WINDOW_START, v.size)
            for v in shared
        )
        local = self._place([v for v in graph.variables if v.space == "local"], "local", 0, 16)
        self.local_bytes = -(-local // 16) * 16
        for variable in variables:
            if variable.space in ("global", "const"):
                self.symbols[variable.name] = (variable.space, 0)
        for function, address in module.function_addresses.items():
            self.symbols.setdefault(function, ("code", address))
        for param, offset in zip(graph.function.params, graph.function.offsets, strict=True):
            self.symbols[param.name] = ("param", offset)

    def _place(self, variables: list[Variable], space: str, base: int, least_align: int) -> int:
        """Place variables one after the other from ``base`` on; returns the bytes that they need."""
        offset = 0
        for variable in variables:
            align = max(variable.align, least_align)
            offset = -(-offset // align) * align
            self.symbols[variable.name] = (space, base + offset)
            offset += variable.size
        return offset


def lazy_registers(graph: Graph) -> set[str]:
    """Registers that may hold an incomplete accumulator: results of mma, wgmma and tcgen05.ld, and copies of them."""
    lazy: set[str] = set()
    moves: list[tuple[str, str]] = []
    for ins in graph.instructions():
        form = facts(ins)
        if form is not None and form.accumulates is not None:
            for operand in form.accumulates(ins):
                lazy.update(registers(operand))
        elif ins.base == "mov" and len(ins.operands) == 2:
            target, source = ins.operands
            if isinstance(target, Reg) and isinstance(source, Reg):
                moves.append((target.name, source.name))
    # A copy of a lazy register is lazy, and so are copies of that copy. So this is repeated until nothing is added.
    changed = True
    while changed:
        changed = False
        for name, origin in moves:
            if origin in lazy and name not in lazy and name not in graph.uniform:
                lazy.add(name)
                changed = True
    return lazy


def _read_registers(graph: Graph) -> set[str]:
    """Registers whose value an instruction or a branch uses."""
    conditions = {block.cond.name for block in graph.blocks if block.cond is not None}
    return conditions.union(*(results_and_operands(ins)[1] for ins in graph.instructions()))


class _Translator:
    """Writes the function of one kernel. The emitter holds the lines of the block that is being written."""

    def __init__(self, module: Module, graph: Graph, counters: bool, waiting: frozenset[int]) -> None:
        self.graph, self.counters, self.waiting = graph, counters, waiting
        self.layout = Layout(module, graph)
        lazy = lazy_registers(graph)
        emitter_facts = EmitterFacts(
            graph.kinds, graph.uniform, lazy, _read_registers(graph), checked_loads(graph.blocks), self.layout.symbols,
            graph.hopper,
            polls=bool(graph.spin_heads),
            origins=origins(graph.instructions(), graph.kinds, self.layout.symbols, graph.function.machine_code),
            machine_code=graph.function.machine_code,
        )  # fmt: skip
        self.gathers = may_release(graph.instructions())
        self.loaded = loaded_registers(graph.blocks) if counters else set[str]()
        # Registers that some path reads before it writes them. ``uncertain``: those of them that are reported.
        self.unset = self._unset_registers()
        accumulators = self._wgmma_accumulators()
        self.uncertain = [name for name in self.unset if name not in accumulators]
        self.scope: dict[str, object] = dict(NAMESPACE)
        self.emitter = Emitter(emitter_facts, self.scope)

    def compile(self) -> Compiled:
        """The kernel's function and facts."""
        graph, e = self.graph, self.emitter
        code: list[list[str]] = []
        for block in graph.blocks:
            e.lines, e.indent, e.products = [], "", []
            self._block(block)
            code.append(join_products(e.lines, e.products, e.bind))
        polled = frozenset().union(*(polling.reads for polling in graph.spin_heads.values()))
        units = UNITS | (HOPPER_UNITS if graph.hopper else {}) | (BLACKWELL_UNITS if graph.blackwell else {})
        out = ["def kernel(M):", " " + "; ".join(f"{name} = M.{unit}" for name, unit in units.items())]
        out += self._initial_registers()
        out += [" b, m, w = R.start()", " while True:"]
        self._tree(code, 0, len(code), "  ", out)
        source = "\n".join(out) + "\n"
        defined: dict[str, KernelFunction] = {}
        # The text consists of numbers and names of our own; names of the PTX file occur only as quoted strings.
        exec(compile(source, f"<{graph.function.name}>", "exec"), self.scope, defined)
        return Compiled(
            name=graph.function.name,
            sites=e.sites,
            shared_static=self.layout.shared_static,
            shared_variables=self.layout.shared_variables,
            shared_granule=_shared_granule(graph),
            local_bytes=self.layout.local_bytes,
            clobbers=[frozenset(c) for c in graph.clobbers],
            live_in=[frozenset(s) for s in graph.live_in],
            block_lines=[b.line for b in graph.blocks],
            polling_variables={
                head: frozenset(map(e.variable, loop.deciding)) for head, loop in graph.spin_heads.items()
            },
            polling_heads={site: head for head, loop in graph.spin_heads.items() for site in e.sites_of(loop.reads)},
            learned=frozenset(head for head in graph.spin_heads if graph.blocks[head].line in self.waiting),
            block_opcodes=[_opcodes(block) for block in graph.blocks],
            attributes=graph.function.attributes,
            origins=e.address_origins,
            written=written_pointers(graph.instructions(), e.origins),
            uncertain=[(name, site) for name, site in e.first_uses.items() if site >= 0],
            hazards=graph.function.hazards,
            cancels=any(ins.parts[:2] == CANCEL for ins in graph.instructions()),
            restricts=any(ins.base == "fence" and restricted(ins.parts) for ins in graph.instructions()),
            machine_code=graph.function.machine_code,
            window_readings=[e.sites[e.site_of(ins)] for ins in window_readings([*graph.instructions()])],
            flag_spaces=frozenset().union(*(read_flags(ins, e.read_registers) for ins in graph.instructions())),
            observed_spaces=frozenset().union(
                *(observed_spaces(ins, id(ins) in polled) for ins in graph.instructions())
            ),
            function=defined["kernel"],
            source=source,
            conservative=graph.conservative,
            hopper=graph.hopper,
            blackwell=graph.blackwell,
        )

    def _unset_registers(self) -> list[str]:
        """Registers that some path reads before it writes them."""
        graph = self.graph
        written: set[str] = set()
        read: set[str] = set()
        for ins in graph.instructions():
            defs, uses = defs_uses(ins)
            written.update(defs)
            read.update(uses)
        read |= {b.cond.name for b in graph.blocks if b.cond is not None}
        return sorted(name for name in graph.live_in[0] | (read - written) if name in graph.kinds)

    def _wgmma_accumulators(self) -> set[str]:
        """The accumulators of wgmma. They may be unset before the first product, because a predicate decides whether it
        is added to their old value."""
        parts = [ins.operands[0] for ins in self.graph.instructions() if ins.parts[:2] == ("wgmma", "mma_async")]
        return {name for operand in parts for name in registers(operand)}

    def _initial_registers(self) -> list[str]:
        """Lines that give registers their first value. Registers that may be read before they are written get the
        launch's unspecified value (accumulators of wgmma: 0), others get None."""
        graph, e = self.graph, self.emitter
        out = []
        for name in self.unset:
            bits = e.bits(name)
            # The product of this and the unspecified byte has that byte in every byte of the register.
            ones = sum(1 << i for i in range(0, bits, 8)) if bits > 1 else 1
            value = f"M.launch.unspecified * {ones}" if bits > 1 else "M.launch.unspecified & 1"
            if name not in self.uncertain:
                value = "0"
            text = value if name in graph.uniform else f"K({value}, {0 if bits == 1 else bits // 8})"
            out.append(f" {e.variable(name)} = {text}")
        # Merges, and the checks of wgmma, read a register's Python variable before its first write, so it must exist.
        empty = graph.shared_across | e.lazy if e.hopper else graph.shared_across
        others = [e.variable(n) for n in sorted(empty) if n in e.kinds and n not in set(self.unset)]
        for i in range(0, len(others), 50):
            out.append(" " + " = ".join(others[i : i + 50]) + " = None")
        return out

    def _tree(self, code: list[list[str]], low: int, high: int, pad: str, out: list[str]) -> None:
        """Write the tree of comparisons that leads to the blocks from ``low`` to before ``high``."""
        if high - low == 1:
            if self.counters:
                out.append(f"{pad}M.launch.counters.block({low}, M.size, m)")
            out += [pad + text for text in code[low]] or [pad + "pass"]
            return
        middle = (low + high) // 2
        out.append(f"{pad}if b < {middle}:")
        self._tree(code, low, middle, pad + " ", out)
        out.append(f"{pad}else:")
        self._tree(code, middle, high, pad + " ", out)

    # --- a block ---

    def _block(self, block: Block) -> None:
        """Write the code of a block. Registers are merged only if other lanes are at other blocks (``w``)."""
        e = self.emitter
        # Arrays never change in place, so saving a register costs a reference, not a copy.
        merged = self._merged_registers(block)
        saved = {name: f"o_{e.variable(name)}" for name in merged}
        if merged:
            e.line("if w:")
            e.line(" " + "; ".join(f"{saved[name]} = {e.variable(name)}" for name in merged))
        places = gather_places(block.instrs) if self.gathers else frozenset()
        for i, ins in enumerate(block.instrs):
            if i in places:
                e.line("W.gather(m)")
            self._emit(ins)
        if len(block.instrs) in places:
            e.line("W.gather(m)")
        if block.end == "wait":
            assert block.last is not None
            e.resume = block.targets[0]
            self._emit(block.last)
        if merged:
            e.line("if w:")
            for name in merged:
                e.line(" " + self._merge(name, saved[name]))
        self._end(block)

    def _merged_registers(self, block: Block) -> list[str]:
        """Registers that the block writes and other blocks access, so that lanes outside of the mask must keep their
        old values. Results of instructions that change only active lanes (``updates``) need no merge."""
        written: set[str] = set()
        for ins in block.all():
            form = facts(ins)
            if form is None or not form.updates:
                written.update(defs_uses(ins)[0])
        graph = self.graph
        return sorted(
            n for n in written if n in graph.shared_across and n not in graph.uniform and n in self.emitter.kinds
        )

    def _merge(self, name: str, saved: str) -> str:
        """The line that merges a register with its saved value."""
        e = self.emitter
        v = e.variable(name)
        if name not in e.lazy:
            return f"{v} = SEL(m, {v}, {saved})"
        if e.hopper:
            return f"{v} = X.merge(m, {v}, {saved})"
        return f"{v} = SEL(m, FORCE({v}), FORCE({saved}))"

    def _emit(self, ins: Instr) -> None:
        """Write one instruction, with its guard."""
        e = self.emitter
        e.current, e.guard, e.indent = ins, None, ""
        for name in self.uncertain:
            if name not in e.first_uses and name in defs_uses(ins)[1]:
                e.first_uses[name] = e.site()
        form = facts(ins)
        try:
            if form is None:
                raise unsupported(ins)
            self._emit_guarded(form, ins)
        except UnknownInstruction as error:
            raise UnknownInstruction(f"{error}{modelled_forms(ins)}") from None
        except (IndexError, KeyError, ValueError, StopIteration) as error:
            raise UnknownInstruction(f"{unsupported(ins, 'form not modelled')}{modelled_forms(ins)}") from error
        e.guard, e.indent = None, ""

    def _emit_guarded(self, form: InstructionForm, ins: Instr) -> None:
        """Write one instruction. A uniform guard becomes an ``if``; a varying one narrows the mask."""
        e = self.emitter
        if ins.guard is not None:
            p = e.predicate(ins.guard)
            if p.uniform:
                e.line(f"if {p.text}:")
                e.indent = " "
                e.line("pass")
            else:
                e.guard = p.text
        form.emit(e, ins)
        if self.loaded and compares_loaded(ins, self.loaded):
            d = ins.operands[0]
            d = d.first if isinstance(d, Pair) else d
            assert isinstance(d, Reg)
            truth = e.raw(d, e.bits(d.name)) if ins.base == "set" else e.predicate(d)
            operands = [e.raw(operand, 8 * TYPE_BYTES[ins.parts[-1]]).text for operand in ins.operands[1:3]]
            e.line(f"M.launch.counters.comparison({truth.text}, ({', '.join(operands)},), {e.lanes()})")

    # --- the end of a block ---

    def _end(self, block: Block) -> None:
        """Write the end of a block: a jump, branch, wait or exit."""
        e = self.emitter
        if block.end == "exit":
            e.line("b, m, w = R.exit(m)")
            e.line(f"if b == {DONE}: return")
            self._wait_while_blocked()
        elif block.end == "jump":
            self._goto(block, block.targets[0])
        elif block.end == "cond":
            self._branch(block)
        elif block.end == "switch":
            assert block.cond is not None
            e.current = block.last
            e.line(f"b, m, w = R.switch({e.array(block.cond, 'u4')}, {tuple(block.targets)}, m)")
        else:
            e.line(f"b, m, w = {e.waiting}")
            self._wait_while_blocked()
            e.line(f"if b == {DONE}: return")

    def _branch(self, block: Block) -> None:
        """Write a conditional branch."""
        e = self.emitter
        assert block.cond is not None
        yes, no = block.targets
        p = e.predicate(block.cond)
        if yes == no:
            self._goto(block, yes)
            return
        if p.uniform:
            for head, target in ((f"if {p.text}:", yes), ("else:", no)):
                e.line(head)
                e.indent = " "
                self._goto(block, target)
                e.indent = ""
            return
        back = [t for t in (yes, no) if (block.index, t) in self.graph.back_edges]
        spinning = [t for t in back if t in self.graph.spin_heads]
        if back:
            self._count_backward(block)
        if spinning:
            e.line(f"b, m, w = R.spin_branch({p.text}, {yes}, {no}, {spinning[0]}, m)")
            self._wait_while_blocked()
        else:
            e.line(f"b, m, w = R.branch({p.text}, {yes}, {no}, m)")

    def _count_backward(self, block: Block) -> None:
        """Write a call that counts a backward branch, by which the scheduler finds endless loops."""
        # Reports name this instruction. A block that simply continues at its successor has no branch.
        self.emitter.current = next(filter(None, (block.last, *reversed(block.instrs))), self.emitter.current)
        head = next(t for t in block.targets if (block.index, t) in self.graph.back_edges)
        self.emitter.line(f"R.backward({self.emitter.site()}, {head}, m)")

    def _wait_while_blocked(self) -> None:
        """Write the loop that lets other CTAs run while every lane of the batch waits for them."""
        e = self.emitter
        e.line(f"while b == {BLOCKED}:")
        e.line(" yield")
        e.line(" b, m, w = R.resume()")

    def _goto(self, block: Block, target: int) -> None:
        """Write a jump to a block."""
        e = self.emitter
        if (block.index, target) in self.graph.back_edges:
            self._count_backward(block)
            if target in self.graph.spin_heads:
                e.line(f"b, m, w = R.spin({target}, m)")
                self._wait_while_blocked()
                return
        # If all lanes are together, they simply continue; otherwise the scheduler picks the block that comes first.
        e.line(f"b = {target}")
        e.line("if w: b, m, w = R.next(b, m)")


def _opcodes(block: Block) -> dict[str, int]:
    """How often each opcode occurs in a block."""
    out: dict[str, int] = {}
    for ins in [*block.instrs, *([block.last] if block.last is not None else [])]:
        out[ins.op] = out.get(ins.op, 0) + 1
    return out


def _shared_granule(graph: Graph) -> int:
    """Bytes of the smallest access to shared memory, which are the bytes that one tag describes."""
    smallest = 16
    for ins in graph.instructions():
        form = facts(ins)
        if form is not None and form.access is not None:
            smallest = min(smallest, form.access(ins, "shared") or 16)
    return smallest


def _signed(bits: int) -> Callable[[int], int]:
    """A function that reads unsigned bits of this width as a signed int."""
    top, full = 1 << (bits - 1), 1 << bits
    return lambda x: x - full if x & top else x


def _select(p: Array, new: Array | Accumulator, old: Array | None) -> Array | Accumulator:
    """A register after an assignment under a mask. A register that has no value yet takes the new one in all lanes."""
    if old is None:
        return new
    return np.where(p, force(new), old)


def _split(values: Array, n: int, width: int, lanes: int) -> Array:
    """Split the value of a vector load into its ``n`` elements of ``width`` bytes; shape (n, lanes)."""
    return np.ascontiguousarray(values.view(f"u{width}").reshape(lanes, n).T)


def _join(parts: tuple[Array, ...], width: int) -> Array:
    """Join elements of ``width`` bytes to one wide value per lane, for a vector store."""
    n = len(parts)
    out = np.empty((len(parts[0]), n), f"u{width}")
    for i, part in enumerate(parts):
        out[:, i] = part
    return out.reshape(-1).view(MOVER[n * width])


# The names that a kernel's text may use in addition to the units of its batch.
NAMESPACE: dict[str, object] = {
    "np": np,
    "FORCE": force,
    "SEL": _select,
    "SPLIT": _split,
    "JOIN": _join,
    "WHERE": np.where,
    **{f"S{bits}": _signed(bits) for bits in (8, 16, 32, 64)},
    "A": arithmetic,
    **{kind: np.dtype(kind) for kind in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8")},
}


def translate(module: Module, name: str, counters: bool = False, conservative: bool = False) -> Compiled:
    """Translate kernel ``name`` of a module. The module keeps the result for the next call.

    ``counters``: the function also feeds the performance counters. ``conservative``: see ``build``. Loops in
    ``Module.waiting``, which earlier executions have found to wait for other threads, are translated as such.

    Raises EmulatorError for an unknown kernel, and UnknownInstruction (an EmulatorError) or PtxError for code that is
    not modelled; these two name the PTX line.
    """
    waiting = frozenset(module.waiting.get(name, ()))
    key = (name, counters, conservative, waiting)
    out = module.translated.get(key)
    if not isinstance(out, Compiled):
        kernel: Function | None = module.kernels.get(name)
        if kernel is None:
            raise EmulatorError(f"no kernel {name!r} in this file; it has {', '.join(module.kernels) or 'none'}")
        out = module.translated[key] = _Translator(
            module, build(module, kernel, conservative, waiting), counters, waiting
        ).compile()
    return out
