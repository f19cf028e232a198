"""Replaces calls by the bodies of the called functions, and call parameters (``.param``) by moves of registers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from kernelproof.emulator.frontend.ptx import (
    TYPE_BYTES,
    Function,
    Imm,
    Instr,
    Label,
    Mem,
    Module,
    Operand,
    Pair,
    PtxError,
    Reg,
    Sym,
    TensorOperand,
    Variable,
    Vec,
    refused,
)
from kernelproof.emulator.frontend.registers import SPECIALS
from kernelproof.emulator.state.mangled import plain_name
from kernelproof.emulator.state.sites import Frame as SourceFrame

# Functions of the CUDA runtime that have no body -> the bytes of each argument.
_SYSTEM_ARGUMENTS = {"vprintf": (8, 8), "__assertfail": (8, 8, 4, 8, 8)}
Rename = Callable[[str], str]
# The most inlined calls. A kernel with more of them is refused, because its body would become too large.
MAX_CLONES = 4000
# Part of the name of a function that is not modelled -> the reason in words. The first that fits counts.
REFUSED_CALLS = {
    "malloc": "device malloc is not modelled",
    "free": "device malloc is not modelled",
    "cudaGraph": "conditional nodes of graphs and launches of graphs by a kernel are not modelled",
    "cuda": "dynamic parallelism is not modelled",
}


def rename_operand(op: Operand, reg: Rename, sym: Rename) -> Operand:
    """An operand in which registers are renamed by ``reg`` and symbols by ``sym``."""
    if isinstance(op, Reg):
        return Reg(reg(op.name), op.negated)
    if isinstance(op, Sym):
        return Sym(sym(op.name), op.offset)
    if isinstance(op, Mem):
        base = op.base
        if isinstance(base, Reg):
            return Mem(Reg(reg(base.name)), op.offset)
        return Mem(Sym(sym(base.name), base.offset), op.offset) if isinstance(base, Sym) else op
    if isinstance(op, TensorOperand):
        renamed = rename_operand(Mem(op.base, op.offset), reg, sym)
        assert isinstance(renamed, Mem)
        return TensorOperand(renamed.base, renamed.offset, tuple(rename_operand(x, reg, sym) for x in op.coordinates))
    if isinstance(op, Vec):
        return Vec(tuple(rename_operand(x, reg, sym) for x in op.items))
    if isinstance(op, Pair):
        return Pair(Reg(reg(op.first.name)), Reg(reg(op.second.name)))
    return op


def _overlap(parts: set[tuple[int, int]]) -> bool:
    """Do any two of these parts, given as (offset, bytes), overlap?"""
    ordered = sorted(parts)
    return any(a + width > b for (a, width), (b, _) in pairwise(ordered))


@dataclass
class _Frame:
    """A function that is being inlined. ``prefix``: the start of its names in the kernel. ``symbols``: its symbols ->
    their names in the kernel. ``return_label``: where a return branches to, None in the kernel itself. ``callers``:
    the functions on the chain of calls, this one included. ``call_lines``: the CUDA lines of the call."""

    function: Function
    prefix: str
    symbols: dict[str, str]
    return_label: str | None
    callers: tuple[str, ...]
    call_lines: tuple[SourceFrame, ...]


class Inliner:
    """Makes one body of a kernel and all functions that it calls. Afterwards ``kinds`` has the types of the body's
    registers and ``variables`` its variables, all under unique names."""

    def __init__(self, module: Module, kernel: Function) -> None:
        self.module, self.kernel = module, kernel
        self.kinds: dict[str, str] = {}
        self.variables: list[Variable] = []
        self.clones = 0
        # The names of call parameters in the kernel.
        self.call_parameters: set[str] = set()

    def run(self) -> list[Instr | Label]:
        """The body without calls. A call parameter becomes registers if every read of it has the offset and width of a
        write; otherwise it becomes local memory."""
        items = list(self._expand(self.kernel, "", {}, (), None))
        # How each call parameter is accessed: name -> {(offset, bytes)}, and which of those are written.
        accesses: dict[str, set[tuple[int, int]]] = {}
        written: dict[str, set[tuple[int, int]]] = {}
        for item in items:
            if isinstance(item, Instr):
                for name, offset, width, store in self._param_access(item):
                    accesses.setdefault(name, set()).add((offset, width))
                    if store:
                        written.setdefault(name, set()).add((offset, width))
        # A register can stand for a part of a parameter only if every read of it has the offset and width of a write.
        # Parameters with other reads, such as a struct that is copied by bytes, stay in local memory.
        in_memory = {name for name, parts in accesses.items() if parts != written.get(name) or _overlap(parts)}
        for name in in_memory:
            size = max(offset + width for offset, width in accesses[name])
            self.variables.append(Variable(name, "local", size, 16))
        out: list[Instr | Label] = []
        for item in items:
            touched = self._param_access(item) if isinstance(item, Instr) else []
            if not touched or isinstance(item, Label):
                out.append(item)
            elif touched[0][0] in in_memory:
                parts = tuple("local" if p.split(":")[0] == "param" else p for p in item.parts)
                out.append(replace(item, op=".".join(parts), parts=parts))
            else:
                store = item.base == "st"
                mem, value = item.operands[0 if store else 1], item.operands[1 if store else 0]
                assert isinstance(mem, Mem)
                out += self._move(item, mem, value, item.guard)
        return out

    def _param_access(self, item: Instr) -> list[tuple[str, int, int, bool]]:
        """The elements of a call parameter that a ld.param or st.param accesses, each as (parameter, offset, bytes, is
        it stored)."""
        if item.base not in ("ld", "st") or not any(p.split(":")[0] == "param" for p in item.parts):
            return []
        mem = item.operands[1 if item.base == "ld" else 0]
        value = item.operands[0 if item.base == "ld" else 1]
        if not isinstance(mem, Mem) or not isinstance(mem.base, Sym) or mem.base.name not in self.call_parameters:
            return []
        width = TYPE_BYTES[item.parts[-1]]
        count = len(value.items) if isinstance(value, Vec) else 1
        start = mem.offset + mem.base.offset
        return [(mem.base.name, start + i * width, width, item.base == "st") for i in range(count)]

    def _expand(
        self,
        fn: Function,
        prefix: str,
        symbols: dict[str, str],
        callers: tuple[str, ...],
        return_label: str | None,
        call_lines: tuple[SourceFrame, ...] = (),
    ) -> Iterator[Instr | Label]:
        """The statements of a function with unique names, and with calls replaced by the bodies of the called
        functions. Other arguments: see ``_Frame``. Raises PtxError for a recursion."""
        if fn.name in callers:
            raise PtxError(fn.line, f"recursive call of {fn.name} is not modelled")
        self.clones += 1
        if self.clones > MAX_CLONES:
            raise PtxError(fn.line, f"more than {MAX_CLONES} inlined calls: calls as deep as these are not modelled")
        self.call_parameters.update(symbols.values())
        frame = _Frame(
            fn, prefix, {**symbols, **self._declare(fn, prefix)}, return_label, (*callers, fn.name), call_lines
        )
        labels = {item.name for item in fn.body if isinstance(item, Label)} | set(fn.branch_targets)

        def reg(name: str) -> str:
            if name == "_" or (name[0] == "%" and name in SPECIALS) or name.startswith("%envreg"):
                return name
            unique = prefix + name
            if unique not in self.kinds:
                self.kinds[unique] = fn.register_type(name, line)
            return unique

        def sym(name: str) -> str:
            return prefix + name if name in labels else frame.symbols.get(name, name)

        line = fn.line
        for item in fn.body:
            line = item.line
            if isinstance(item, Label):
                yield Label(prefix + item.name, item.line)
            elif item.base == "call":
                yield from self._call(item, reg, sym, frame)
            else:
                yield self._instruction(item, frame, reg, sym)

    def _declare(self, fn: Function, prefix: str) -> dict[str, str]:
        """The names of a function's variables in the kernel."""
        names = {}
        for variable in fn.variables:
            # A function's static shared memory exists once per CTA, however often it is called. Its local variables
            # exist once per call, so each inlined copy has its own.
            name = variable.name if variable.space == "shared" else prefix + variable.name
            names[variable.name] = name
            if variable.space == "param":
                self.call_parameters.add(name)
            elif all(v.name != name for v in self.variables):
                self.variables.append(replace(variable, name=name))
        return names

    def _instruction(self, item: Instr, frame: _Frame, reg: Rename, sym: Rename) -> Instr:
        """An instruction with unique names. A return from an inlined function becomes a branch."""
        guard = Reg(reg(item.guard.name), item.guard.negated) if item.guard is not None else None
        frames = item.frames + frame.call_lines
        if frame.return_label is not None and item.base == "ret":
            target = (Sym(frame.return_label),)
            return replace(item, op="bra", parts=("bra",), operands=target, guard=guard, frames=frames)
        if item.base != "brx":
            operands = tuple(rename_operand(op, reg, sym) for op in item.operands)
            return replace(item, operands=operands, guard=guard, frames=frames)
        targets = item.operands[1]
        names = None
        if isinstance(targets, Sym):
            names = frame.function.branch_targets.get(targets.name)
        elif isinstance(targets, Vec):
            names = tuple(t.name for t in targets.items if isinstance(t, Sym))
        if names is None:
            raise PtxError(item.line, "brx.idx without .branchtargets")
        labels = Vec(tuple(Sym(frame.prefix + name) for name in names))
        return replace(item, operands=(rename_operand(item.operands[0], reg, sym), labels), guard=guard, frames=frames)

    def _move(self, item: Instr, mem: Mem, value: Operand, guard: Reg | None) -> Iterator[Instr]:
        """The moves that replace a ld.param or st.param of a call, from or to registers that stand for bytes of the
        parameter."""
        assert isinstance(mem.base, Sym)
        kind = item.parts[-1]
        width = {"8": 1, "16": 2, "32": 4, "64": 8}.get(kind.lstrip("busf"), 0)
        if not width:
            raise PtxError(item.line, f"{item.op}: parameter type is not modelled")
        start = mem.offset + mem.base.offset
        bits = max(16, 8 * width)  # PTX computes in registers of 16 bits and more
        for i, element in enumerate(value.items if isinstance(value, Vec) else (value,)):
            slot = f"{mem.base.name}+{start + i * width}:{width}"
            self.kinds.setdefault(slot, f"b{bits}")
            declared = self.kinds.get(element.name) if isinstance(element, Reg) else f"b{bits}"
            have = int((declared or ("b16" if item.base == "st" else "b32")).lstrip("busf"))
            if item.base == "st":
                op = f"cvt.u{bits}.u{have}" if bits < have else f"mov.b{bits}"
                operands: tuple[Operand, ...] = (Reg(slot), element)
            else:
                op = _widening(kind, width, bits, have)
                operands = (element, Reg(slot))
            yield replace(item, op=op, parts=tuple(op.split(".")), operands=operands, guard=guard)

    def _call(self, item: Instr, reg: Rename, sym: Rename, caller: _Frame) -> Iterator[Instr | Label]:
        """The statements that replace a call. Raises PtxError for calls that are not modelled."""
        groups = list(item.operands)
        first = groups[0] if groups else None
        results: tuple[Operand, ...] = ()
        if isinstance(first, Vec):
            results = first.items
            groups.pop(0)
        callee = groups.pop(0) if groups else None
        arguments = groups[0].items if groups and isinstance(groups[0], Vec) else ()
        guard = Reg(reg(item.guard.name), item.guard.negated) if item.guard is not None else None
        target = self.module.functions.get(callee.name) if isinstance(callee, Sym) else None
        if target is None and isinstance(callee, Sym):
            yield from self._system_call(replace(item, guard=guard), callee.name, arguments, results, sym)
            return
        if not all(isinstance(actual, Sym) for actual in arguments + results):
            raise refused(item, "register arguments of a call are not modelled")
        actuals = [sym(actual.name) for actual in arguments + results if isinstance(actual, Sym)]
        self.clones += 1
        call = f"call#{self.clones}:"
        return_label = f"{call}return"
        if guard is not None:
            skip = Reg(guard.name, not guard.negated)
            yield replace(item, op="bra", parts=("bra",), operands=(Sym(return_label),), guard=skip)
        if target is not None:
            yield from self._body(item, target, actuals, caller, return_label)
        elif isinstance(callee, Reg):
            # A call through a pointer becomes a chain of comparisons with the address of each function that it may
            # reach. If none is equal, ``emu_nofunction`` reports it and the lanes exit.
            address = Reg(reg(callee.name))
            for function in self._callable(len(arguments), len(results), caller.callers):
                different, other = f"{call}{function.name}:different", f"{call}{function.name}:other"
                self.kinds[different] = "pred"
                number = Imm(self.module.function_addresses[function.name])
                test = "setp.ne.u64"
                operands = (Reg(different), address, number)
                yield replace(item, op=test, parts=tuple(test.split(".")), operands=operands, guard=None)
                yield replace(item, op="bra", parts=("bra",), operands=(Sym(other),), guard=Reg(different))
                yield from self._body(item, function, actuals, caller, return_label)
                yield replace(item, op="bra", parts=("bra",), operands=(Sym(return_label),), guard=None)
                yield Label(other, item.line)
            yield replace(item, op="emu_nofunction", parts=("emu_nofunction",), operands=(), guard=None)
            yield replace(item, op="exit", parts=("exit",), operands=(), guard=None)
        else:
            raise refused(item, "this form of a call is not modelled")
        yield Label(return_label, item.line)

    def _body(
        self, item: Instr, function: Function, actuals: list[str], caller: _Frame, return_label: str
    ) -> Iterator[Instr | Label]:
        """The body of a called function. ``actuals``: the names of arguments and results in the kernel."""
        formals = [formal.name for formal in function.params + function.results]
        prefix = f"{function.name}#{self.clones + 1}:"
        symbols = dict(zip(formals, actuals, strict=False))
        return self._expand(function, prefix, symbols, caller.callers, return_label, item.frames + caller.call_lines)

    def _callable(self, arguments: int, results: int, callers: tuple[str, ...]) -> list[Function]:
        """Functions that an indirect call may reach: those whose address is taken and that have these numbers of
        arguments and results. ``callers`` are left out, because reaching one of them would be a recursion."""
        return [
            function
            for function in self.module.functions.values()
            if function.name in self.module.addressed and function.name not in callers
            and (len(function.params), len(function.results)) == (arguments, results)
        ]  # fmt: skip

    def _system_call(
        self, item: Instr, name: str, arguments: tuple[Operand, ...], results: tuple[Operand, ...], sym: Rename
    ) -> Iterator[Instr]:
        """The instructions for a call of vprintf or __assertfail, which have no body. Raises PtxError for other
        functions without a body."""
        if name not in _SYSTEM_ARGUMENTS:
            undefined = f"no file defines {plain_name(name)} (several files: --nvcc-args -rdc=true)"
            raise refused(item, next((why for part, why in REFUSED_CALLS.items() if part in name), undefined))
        op = "emu_" + name.strip("_")
        actuals: list[Operand] = []
        for argument, width in zip(arguments, _SYSTEM_ARGUMENTS[name], strict=False):
            if isinstance(argument, Sym):
                slot = f"{sym(argument.name)}+0:{width}"
                self.kinds.setdefault(slot, f"b{8 * width}")
                actuals.append(Reg(slot))
        yield replace(item, op=op, parts=(op,), operands=tuple(actuals))
        for result in results:
            if isinstance(result, Sym):
                operands = (Mem(Sym(sym(result.name)), 0), Imm(0))
                yield replace(item, op="st.param.b32", parts=("st", "param", "b32"), operands=operands)


def _widening(kind: str, width: int, bits: int, have: int) -> str:
    """The opcode that loads a parameter of type ``kind`` (``width`` bytes in a register of ``bits``) into a register of
    ``have`` bits."""
    sign = "s" if kind[0] == "s" else "u"
    if bits != have:
        return f"cvt.{sign}{have}.{sign}{8 * width}"
    if width == 1:
        return f"cvt.{sign}16.{sign}8"
    return f"mov.b{bits}" if kind[0] in "bf" else f"cvt.{kind[0]}{bits}.{kind}"
