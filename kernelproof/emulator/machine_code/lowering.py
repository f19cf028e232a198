"""Lowers instructions of machine code to PTX: the registry of mnemonics, and the methods by which their functions emit
PTX.

Registers keep their names (``%R4``, ``%UR4``, ``%P0``), and intermediate results are temporaries. The guard of a
machine instruction applies to every PTX instruction that writes memory or a register of the machine code. Temporaries
are always computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kernelproof.emulator.frontend.operands import operands as ptx_operands
from kernelproof.emulator.frontend.ptx import Instr, Label, Reg
from kernelproof.emulator.machine_code.abi import LOCAL_WINDOW, RECIPROCAL, Bank
from kernelproof.emulator.machine_code.data import Data, Half, Word
from kernelproof.emulator.machine_code.operands import (
    Address,
    Constant,
    Literal,
    Operand,
    Predicate,
    Register,
    operand,
)
from kernelproof.emulator.state.reports import EmulatorError
from kernelproof.emulator.state.sites import Frame, place
from kernelproof.sass import Instruction, waits

TRUE, FALSE, ZERO = "1", "0", "0"
_STORES = ("ST", "ATOM", "RED")  # how names of instructions that write memory begin

Handler = Callable[["Lowering", Instruction], None]


@dataclass(frozen=True)
class Mnemonic:
    """The function that lowers an opcode, and the modifiers that it supports; other modifiers are refused."""

    handler: Handler
    modifiers: frozenset[str]


_mnemonics: dict[str, Mnemonic] = {}


class UnknownMachineCode(EmulatorError):
    """Machine code that the emulator does not execute. The message names address, opcode and modifier."""


def mnemonic(names: str, modifiers: str = "") -> Callable[[Handler], Handler]:
    """Register the decorated function to lower these opcodes. ``modifiers``: all that it supports."""

    def register(handler: Handler) -> Handler:
        for name in names.split():
            _mnemonics[name] = Mnemonic(handler, frozenset(modifiers.split()))
        return handler

    return register


def registered() -> Iterator[str]:
    """All opcodes that can be lowered."""
    yield from _mnemonics


@dataclass
class Lowering:
    """The lowered body of one function, and the methods that append to it.

    ``bank``, ``data``: the contents of the constant banks. ``instructions``: those of the function.
    ``copy_scoreboards``, ``bulk_scoreboards``: the scoreboards that count groups of asynchronous copies and of bulk
    stores. ``load_scoreboards``: the mask of those that show when loads of tensor memory are complete. ``returns``: the
    addresses after calls. ``stack``: bytes of the stack, which grows down to the beginning of local memory. ``body``:
    the PTX so far. ``kinds``: register -> its type. ``current``: the instruction that is being lowered. ``members``:
    the lanes that execute it together, if an earlier instruction has named them.
    """

    bank: Bank
    data: Data
    instructions: Sequence[Instruction] = ()
    copy_scoreboards: frozenset[str] = frozenset()
    bulk_scoreboards: frozenset[str] = frozenset()
    load_scoreboards: int = 0
    returns: tuple[int, ...] = ()
    stack: int = 0
    body: list[Instr | Label] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    current: Instruction | None = None
    members: str | None = None
    _guard: Reg | None = None
    # Has a fence of GPU scope come since the last label, with no store after it?
    _fenced: bool = False
    # The predicate that a lane is the first active one of its warp, if it was computed since the last label or branch.
    _leader: str | None = None

    # --- instructions ---

    def lower(self, instruction: Instruction) -> None:
        """Append the PTX of an instruction. Raises UnknownMachineCode."""
        self.current, self._guard = instruction, None
        if waits(instruction) & self.load_scoreboards:
            self.emit("emu_loaded")
        entry = _mnemonics.get(instruction.name)
        if entry is None:
            raise self.refusal("this instruction is not modelled")
        unknown = [part for part in instruction.modifiers if part not in entry.modifiers]
        if unknown:
            raise self.refusal(f".{unknown[0]} is not modelled")
        if instruction.guard is not None:
            guard = operand(instruction.guard)
            assert isinstance(guard, Predicate)
            if guard.number is None and guard.negated:
                return  # @!PT: never executed
            if guard.number is not None:
                self._guard = Reg(self._named(guard.file, guard.number), guard.negated)
        try:
            entry.handler(self, instruction)
        except (ValueError, IndexError, AssertionError, StopIteration) as error:
            raise self.refusal("this form is not modelled") from error
        if instruction.name == "MEMBAR":
            self._fenced = bool({"GPU", "SYS"} & set(instruction.modifiers))
        elif instruction.name.startswith(_STORES):
            self._fenced = False
        elif instruction.name in ("BRA", "EXIT", "WARPSYNC", "BSYNC"):
            self._leader = None

    def following(self, count: int) -> Sequence[Instruction]:
        """The next ``count`` instructions after the current one, or fewer at the end, in the order of addresses."""
        assert self.current is not None
        index = self._places[self.current.address] + 1
        return self.instructions[index : index + count]

    def preceding(self, count: int) -> Sequence[Instruction]:
        """The last ``count`` instructions before the current one, or fewer at the start, in the order of addresses."""
        assert self.current is not None
        index = self._places[self.current.address]
        return self.instructions[max(0, index - count) : index]

    @cached_property
    def _places(self) -> dict[int, int]:
        """Address -> index of the instruction."""
        return {ins.address: i for i, ins in enumerate(self.instructions)}

    def release(self) -> str:
        """The modifier of an arrival: release at cluster scope if a fence comes before it, else PTX's default."""
        return ".release.cluster" if self._fenced else ""

    def refusal(self, why: str) -> UnknownMachineCode:
        """The error that refuses the current instruction."""
        ins = self.current
        assert ins is not None
        where = f" [{ins.source[0].file}:{ins.source[0].line}]" if ins.source else ""
        return UnknownMachineCode(f"{place(ins.address, True)}: {why}: {ins.text}{where}")

    def emit(self, op: str, *operands: str) -> None:
        """Append a PTX instruction. It gets the guard, unless its result is a temporary."""
        assert self.current is not None
        guard = None if operands and operands[0].startswith("%t") else self._guard
        self.body.append(self._instr(op, operands, guard))

    def before_sync(self) -> None:
        """Order earlier accesses to tensor memory before an arrival; see ``instructions.tensor_memory``."""
        if self.tensor_memory:
            self.emit("tcgen05.fence::before_thread_sync")

    def after_sync(self) -> None:
        """Order later accesses to tensor memory after a wait."""
        if self.tensor_memory:
            self.emit("tcgen05.fence::after_thread_sync")

    @cached_property
    def tensor_memory(self) -> bool:
        """Does the function use tensor memory?"""
        return any(ins.name in ("UTCHMMA", "LDTM") for ins in self.instructions)

    def once(self) -> None:
        """Restrict the current instruction to one lane of the warp: instructions of the uniform datapath execute once
        per warp."""
        if self._leader is None:
            before = self.computed("and.b32", self.computed("activemask.b32"), "%lanemask_lt")
            self._leader = self.computed("setp.eq.u32", before, ZERO, kind="pred")
        self.restrict(self._leader)

    def restrict(self, condition: str) -> None:
        """Restrict the PTX that follows for the current instruction to lanes for which a predicate holds."""
        guarded = self._and_guard(condition)
        self._guard = Reg(guarded.lstrip("!"), guarded[0] == "!")

    def without_guard(self) -> str:
        """Remove the current instruction's guard, and return it as a predicate."""
        guard, self._guard = self._and_guard(TRUE), None
        return guard

    def _and_guard(self, condition: str) -> str:
        """A predicate that holds if both the current instruction's guard and a condition do."""
        guard = ("!" if self._guard.negated else "") + self._guard.name if self._guard else TRUE
        return self.both_hold(guard, condition)

    def branch(self, op: str, target: str, condition: str = TRUE) -> None:
        """Append a branch or exit, taken under the guard and a condition."""
        guard = self._guard
        if condition != TRUE:
            guarded = self._and_guard(condition)
            if guarded == FALSE:
                return
            guard = Reg(guarded.lstrip("!"), guarded[0] == "!")
        self.body.append(self._instr(op, (target,) if target else (), guard))

    def label(self, address: int) -> None:
        """Append the label of an address."""
        self._fenced, self._leader = False, None
        self.body.append(Label(label_of(address), address))

    def _instr(self, op: str, operands: tuple[str, ...], guard: Reg | None) -> Instr:
        """A PTX instruction at the place of the current instruction."""
        ins = self.current
        assert ins is not None
        frames = tuple(Frame(line.file, line.line) for line in ins.source)
        return Instr(
            op, tuple(op.replace("::", ":").split(".")), ptx_operands(", ".join(operands), ins.address, {}), guard,
            ins.address, frames, ins.text, ins.ptx_line,
        )  # fmt: skip

    # --- registers ---

    def _named(self, file: str, number: int) -> str:
        """The PTX name of a register of the machine code."""
        name = f"%{file}{number}"
        self.kinds[name] = "pred" if "P" in file else "b32"
        return name

    def temp(self, kind: str = "b32") -> str:
        """A new register of a type."""
        name = f"%t{len(self.kinds)}"
        self.kinds[name] = kind
        return name

    def guarded_register(self, kind: str = "b32") -> str:
        """A new register for the result of an instruction that must keep its guard, since it also does something else.
        (An instruction whose result is a temporary has no guard.)"""
        name = f"%g{len(self.kinds)}"
        self.kinds[name] = kind
        return name

    def computed(self, op: str, *operands: str, kind: str = "b32") -> str:
        """Append an instruction whose result is a new temporary of a type, and return that."""
        out = self.temp(kind)
        self.emit(op, out, *operands)
        return out

    # --- sources ---

    def word(self, text: str, index: int = 0) -> str:
        """A source of 32 bits, with its signs applied as to an integer. ``index``: which of the consecutive registers,
        or words of a bank, that begin with the one that the operand names."""
        source = operand(text)
        if isinstance(source, Literal):
            number = source.integer
            return str((source.single if number is None else number) & 0xFFFFFFFF)
        out = self.bits(source, index)
        for sign in reversed(source.signs if isinstance(source, Register | Constant) else ""):
            op = {"-": "neg.s32", "~": "not.b32", "|": "abs.s32"}[sign]
            out = ZERO if out == ZERO and sign != "~" else self.computed(op, out)
        return out

    def bits(self, source: Operand, index: int = 0) -> str:
        """The bits of a register or of a word of a constant bank, without signs. Raises ValueError for a literal."""
        if isinstance(source, Register):
            return ZERO if source.number is None else self._named(source.file, source.number + index)
        if isinstance(source, Constant):
            return self._constant(source, 4 * index)
        raise ValueError(source)

    def words(self, text: str, count: int) -> str:
        """Consecutive registers as a vector operand."""
        items = [self.word(text, i) for i in range(count)]
        return f"{{{', '.join(items)}}}"

    def pair(self, text: str) -> str:
        """A source of 64 bits: a pair of registers, or a literal with its sign extended."""
        source = operand(text)
        if isinstance(source, Constant) and not source.signs and source.base is None:
            value = self.data.word(source.bank, source.offset)
            if isinstance(value, Half) and not value.upper:
                return self._address_of(value)
        if isinstance(source, Literal):
            assert source.integer is not None
            return str(source.integer & (1 << 64) - 1)
        out = self.join(self.bits(source), self.bits(source, 1))
        for sign in reversed(source.signs if isinstance(source, Register | Constant) else ""):
            out = self.computed({"-": "neg.s64", "~": "not.b64"}[sign], out, kind="b64")
        return out

    def join(self, low: str, high: str) -> str:
        """The 64 bits of two words."""
        if low.isdigit() and high.isdigit():
            return str(int(low) | int(high) << 32)
        if high == ZERO:
            return self.computed("cvt.u64.u32", low, kind="b64")
        return self.computed("mov.b64", f"{{{low}, {high}}}", kind="b64")

    def _constant(self, source: Constant, distance: int) -> str:
        """The word of a constant bank that lies ``distance`` bytes after a source."""
        if source.base is not None and source.base.number is not None:
            raise self.refusal("an index into a constant bank is modelled in LDC alone")
        offset = source.offset + distance
        value = self.data.word(source.bank, offset)
        if isinstance(value, int):
            return str(value)
        if isinstance(value, Word):
            return self.computed("ld.const.b32", f"[{value.variable}+{value.offset}]")
        if isinstance(value, Half):
            half = self.temp()
            halves = (self.temp(), half) if value.upper else (half, self.temp())
            self.emit("mov.b64", f"{{{', '.join(halves)}}}", self._address_of(value))
            return half
        meaning = self.bank.word(offset) if source.bank == 0 else None
        if meaning is None:
            raise self.refusal(f"word {offset:#x} of constant bank {source.bank} is not known")
        if meaning.isdigit():
            return meaning
        if meaning.startswith("%"):
            return self.computed("mov.u32", meaning)
        if meaning.startswith(RECIPROCAL):
            divisor = self.computed("cvt.rn.f32.u32", self.computed("mov.u32", meaning.removeprefix(RECIPROCAL)))
            return self.computed("rcp.rn.f32", divisor)
        if meaning == LOCAL_WINDOW:
            generic = self.computed("cvta.local.u64", self.computed("mov.b64", ZERO, kind="b64"), kind="b64")
            upper = self.computed("shr.u64", generic, "32", kind="b64")
            return self.computed("sub.s32", self.computed("cvt.u32.u64", upper), "1")
        return self.computed("ld.param.b32", f"[{meaning}]")

    def _address_of(self, half: Half) -> str:
        """The address of a variable, 64 bits."""
        return self.computed("mov.u64", f"{half.variable}+{half.addend}" if half.addend else half.variable, kind="b64")

    def predicate(self, text: str) -> str:
        """A predicate as a source: a register, perhaps with ``!``, or a literal."""
        source = operand(text)
        assert isinstance(source, Predicate)
        if source.number is None:
            return FALSE if source.negated else TRUE
        return ("!" if source.negated else "") + self._named(source.file, source.number)

    def sum64(self, text: str) -> str:
        """An address of 64 bits as a number: the source to which ``address`` adds the offset, and then the offset."""
        parsed = self._parsed_address(text)
        # ``address`` gives [source], [source+offset] or [source-offset].
        base = self.address(text)[1:-1].partition("+")[0].partition("-")[0]
        return self.computed("add.s64", base, str(parsed.offset & (1 << 64) - 1), kind="b64") if parsed.offset else base

    def address(self, text: str, wide: bool = False) -> str:
        """An address of 64 bits in global or generic memory, in brackets. ``wide``: its first register is a pair, even
        if the operand does not say so."""
        parsed = self._parsed_address(text)
        total = ZERO
        for i, source in enumerate(parsed.registers):
            if (parsed.wide or wide) and (i == 0 or source.wide):
                part = self.join(self.bits(source), self.bits(source, 1))
            else:
                part = self.bits(source)
                part = part if part == ZERO else self.computed("cvt.u64.u32", part, kind="b64")
            total = self._sum(total, part, "s64")
        return _bracketed(total, parsed.offset)

    def stack_address(self, text: str) -> str:
        """An address in local memory, in brackets. Addresses in the stack are negative, from its end."""
        parsed = self._parsed_address(text)
        total = str(self.stack)
        for source in parsed.registers:
            total = self._sum(total, self.bits(source), "s32")
        return f"[{int(total) + parsed.offset}]" if total.isdigit() else _bracketed(total, parsed.offset)

    def near_address(self, text: str, start: int) -> str:
        """An address of 32 bits in shared memory, in brackets, to which ``start`` is added."""
        parsed = self._parsed_address(text)
        total = ZERO
        for i, source in enumerate(parsed.registers):
            part = self.bits(source)
            if i == 0 and parsed.scale > 1 and part != ZERO:
                part = self.computed("shl.b32", part, str(parsed.scale.bit_length() - 1))
            total = self._sum(total, part, "s32")
        return _bracketed(total, parsed.offset + start)

    def _parsed_address(self, text: str) -> Address:
        """The parts of an address operand."""
        parsed = operand(text)
        assert isinstance(parsed, Address)
        return parsed

    def _sum(self, a: str, b: str, kind: str) -> str:
        """The sum of two sources of a type; no instruction is needed if one is zero."""
        if ZERO in (a, b):
            return b if a == ZERO else a
        return self.computed(f"add.{kind}", a, b, kind=f"b{kind[1:]}")

    # --- logic of predicates, with literals folded ---

    def inverse(self, p: str) -> str:
        """The negation of a predicate source."""
        if p in (TRUE, FALSE):
            return FALSE if p == TRUE else TRUE
        return p[1:] if p[0] == "!" else f"!{p}"

    def unnegated(self, p: str) -> str:
        """A predicate source without ``!``, for an operand that PTX does not allow to be negated."""
        return self.computed("not.pred", p[1:], kind="pred") if p[0] == "!" else p

    def both_hold(self, a: str, b: str) -> str:
        """The predicate ``a and b``."""
        if FALSE in (a, b):
            return FALSE
        if TRUE in (a, b):
            return b if a == TRUE else a
        return self.computed("and.pred", a, b, kind="pred")

    def either_holds(self, a: str, b: str) -> str:
        """The predicate ``a or b``."""
        return self.inverse(self.both_hold(self.inverse(a), self.inverse(b)))

    def logic(self, name: str, a: str, b: str) -> str:
        """``a`` AND, OR or XOR ``b``."""
        if name == "AND":
            return self.both_hold(a, b)
        if name == "OR":
            return self.either_holds(a, b)
        if a in (TRUE, FALSE) or b in (TRUE, FALSE):
            literal, other = (a, b) if a in (TRUE, FALSE) else (b, a)
            return self.inverse(other) if literal == TRUE else other
        return self.computed("xor.pred", a, b, kind="pred")

    def number(self, p: str) -> str:
        """1 or 0 for a predicate source."""
        if p in (TRUE, FALSE):
            return p
        return self.computed("selp.b32", "0", "1", p[1:]) if p[0] == "!" else self.computed("selp.b32", "1", "0", p)

    # --- results ---

    def target(self, text: str, index: int = 0) -> str:
        """A register as a result. For the zero register, a new one that is never read."""
        result = operand(text)
        assert isinstance(result, Register)
        return self.guarded_register() if result.number is None else self._named(result.file, result.number + index)

    def targets(self, text: str, count: int) -> str:
        """Consecutive registers as a vector result."""
        return f"{{{', '.join(self.target(text, i) for i in range(count))}}}"

    def set(self, text: str, value: str) -> None:
        """Write a word to a register."""
        if not is_zero(text):
            self.emit("mov.b32", self.target(text), value)

    def set_pair(self, text: str, value: str) -> None:
        """Write 64 bits to a pair of registers."""
        if not is_zero(text):
            self.emit("mov.b64", self.targets(text, 2), value)

    def set_predicate(self, text: str, value: str) -> None:
        """Write a predicate. A write to PT has no effect."""
        result = operand(text)
        assert isinstance(result, Predicate)
        if result.number is not None:
            name = self._named(result.file, result.number)
            if value[0] == "!":
                self.emit("not.pred", name, value[1:])
            else:
                self.emit("mov.pred", name, value)

    def target_predicate(self, text: str) -> str:
        """A predicate as a result. For PT, a new one that is never read."""
        result = operand(text)
        assert isinstance(result, Predicate)
        return self.guarded_register("pred") if result.number is None else self._named(result.file, result.number)

    def set_comparison(self, results: tuple[str, str], outcome: str, boolean: str, other: str) -> None:
        """Write the two results of a comparison: its ``outcome`` AND, OR or XOR another predicate, and the same for the
        negated outcome."""
        value = self.predicate(other)
        self.set_predicate(results[0], self.logic(boolean, outcome, value))
        self.set_predicate(results[1], self.logic(boolean, self.inverse(outcome), value))


def _bracketed(base: str, offset: int) -> str:
    """An address operand of PTX."""
    if base == ZERO:
        return f"[{offset}]"
    return f"[{base}{offset:+}]" if offset else f"[{base}]"


def is_zero(text: str) -> bool:
    """Is an operand the zero register?"""
    return text.split(".", maxsplit=1)[0] in ("RZ", "URZ")


def is_predicate(text: str) -> bool:
    """Is an operand a predicate?"""
    return isinstance(operand(text), Predicate)


def label_of(address: int) -> str:
    """The name of the label at an address."""
    return f"L{address:x}"
