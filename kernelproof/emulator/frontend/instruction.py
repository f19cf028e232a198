"""Registers the forms of instructions, with the facts about each that analysis, translation and mutation need.

A new instruction is one function under ``@instruction(...)``, in a module of ``instructions`` or anywhere else::

    @instruction("toy.copy", types=WORDS, writes=Writes.MEMORY, completed_by=("toy.wait",), mutations=(drop,))
    def toy_copy(e: Emitter, ins: Instr) -> None: ...

The first paragraph of the handler's docstring lists what is modelled of the opcode. Error messages and the table of
instructions in the documentation quote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Flag
from inspect import cleandoc

from kernelproof.emulator.frontend.emitter import Emitter
from kernelproof.emulator.frontend.mutation_operators import Mutation
from kernelproof.emulator.frontend.ptx import Instr, Mem, Operand, Sym, TensorOperand, Vec
from kernelproof.emulator.frontend.registers import registers

INTEGERS = frozenset(("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64", "b8", "b16", "b32", "b64"))
REALS = frozenset(("f32", "f64"))
HALVES = frozenset(("f16", "bf16", "f16x2", "bf16x2"))
FLOATS = REALS | HALVES

Handler = Callable[[Emitter, Instr], None]
# A fact that is true or false for all instructions of a form, or a test of an instruction.
Test = bool | Callable[[Instr], bool]


class Writes(Flag):
    """What an instruction writes: its first operand, memory (or the state of a unit), both or nothing."""

    NOTHING = 0
    RESULT = 1
    MEMORY = 2


@dataclass(frozen=True)
class InstructionForm:
    """One form of an opcode.

    - ``opcode``: the base and the modifiers that the form must have, in any order. ``types``: the values that the last
      part of the opcode may have (None: any). ``serves``: a further test of the parts.
    - ``emit`` writes the Python text.
    - ``writes``: see ``Writes``. ``updates``: the result is read, too, and changes only for active lanes.
    - ``uniform``: equal operands give an equal result, which the handler can compute on Python ints.
    - ``polls``: the result depends on memory that other threads may write.
    - ``waits``: lanes may have to wait at the instruction, so it ends a block; the handler calls ``Emitter.wait``.
    - ``meets``: which threads must reach the instruction together: "" (none), ``lanes`` (those in its last operand),
      ``warp``, or ``warps`` (the warpgroup). A warp or warpgroup waits only once for a sequence of such instructions.
    - ``completed_by``: opcodes that wait for the end of the asynchronous work that it begins; empty if it begins none.
    - ``expands``: the instructions that it consists of, in order.
    - ``accumulates``: operands whose registers it may leave incomplete.
    - ``hopper``, ``blackwell``: it needs the units of sm_90, or those of sm_100 as well.
    - ``access``: bytes of its smallest access to a state space, 0 for none; the smallest of a kernel decides how many
      bytes a tag covers.
    - ``mutations``: mistakes that a programmer may make with it.
    """

    opcode: str
    emit: Handler
    types: frozenset[str] | None = None
    serves: Callable[[tuple[str, ...]], bool] | None = None
    writes: Writes = Writes.RESULT
    updates: bool = False
    uniform: Test = False
    polls: Test = False
    waits: bool = False
    meets: str = ""
    completed_by: tuple[str, ...] = ()
    expands: Callable[[Instr], Iterable[Instr]] | None = None
    accumulates: Callable[[Instr], Iterable[Operand]] | None = None
    hopper: bool = False
    blackwell: bool = False
    access: Callable[[Instr, str], int] | None = None
    mutations: tuple[Mutation, ...] = ()

    @property
    def asynchronous(self) -> bool:
        """Does it take effect later than it is executed?"""
        return bool(self.completed_by)

    def fits(self, parts: tuple[str, ...]) -> bool:
        """Is an instruction with these parts of this form?"""
        if self.types is not None and parts[-1] not in self.types:
            return False
        if self.serves is not None and not self.serves(parts):
            return False
        return set(self.opcode.split(".")) <= set(parts)


# Base of an opcode -> its forms; and, as a cache, parts of an opcode -> the form that serves them.
_forms: dict[str, list[InstructionForm]] = {}
_form_of: dict[tuple[str, ...], InstructionForm | None] = {}


def instruction(
    *opcodes: str,
    types: frozenset[str] | None = None,
    serves: Callable[[tuple[str, ...]], bool] | None = None,
    writes: Writes = Writes.RESULT,
    updates: bool = False,
    uniform: Test = False,
    polls: Test = False,
    waits: bool = False,
    meets: str = "",
    completed_by: tuple[str, ...] = (),
    expands: Callable[[Instr], Iterable[Instr]] | None = None,
    accumulates: Callable[[Instr], Iterable[Operand]] | None = None,
    hopper: bool = False,
    blackwell: bool = False,
    access: Callable[[Instr, str], int] | None = None,
    mutations: tuple[Mutation, ...] = (),
) -> Callable[[Handler], Handler]:
    """Register the decorated handler for forms of opcodes. The other arguments are the facts of ``InstructionForm``.
    Raises ValueError for a form that is uniform and writes memory."""
    if uniform and Writes.MEMORY in writes:
        raise ValueError(f"{opcodes}: what writes memory is not uniform")

    def register(handler: Handler) -> Handler:
        for opcode in opcodes:
            form = InstructionForm(
                opcode, handler, types, serves, writes, updates, uniform, polls, waits, meets, completed_by, expands,
                accumulates, hopper or blackwell, blackwell, access, mutations,
            )  # fmt: skip
            _forms.setdefault(opcode.split(".")[0], []).append(form)
        _form_of.clear()
        return handler

    return register


def unregister(*opcodes: str) -> None:
    """Forget forms that were registered under these opcodes."""
    for opcode in opcodes:
        base = opcode.split(".")[0]
        _forms[base] = [form for form in _forms.get(base, []) if form.opcode != opcode]
    _form_of.clear()


def registered() -> Iterator[InstructionForm]:
    """All forms."""
    for forms in _forms.values():
        yield from forms


def facts(ins: Instr) -> InstructionForm | None:
    """The form of an instruction; None for an unknown instruction. If several forms fit, the one with the most
    modifiers is chosen, and among those the one whose first modifier comes earliest in the opcode."""
    parts = ins.parts
    try:
        return _form_of[parts]
    except KeyError:
        forms = [form for form in _forms.get(parts[0], ()) if form.fits(parts)]
        form = _form_of[parts] = max(forms, key=lambda form: _rank(form, parts), default=None)
        return form


def modelled_forms(ins: Instr) -> str:
    """The forms of a refused instruction's opcode that are supported, as the end of a sentence."""
    form = facts(ins)
    if form is not None and form.emit.__doc__:
        text = cleandoc(form.emit.__doc__).split("\n\n")[0].replace("\n", " ")
        return f"; modelled: {text.rstrip('.')}"
    opcodes = sorted({form.opcode.replace(":", "::") for form in _forms.get(ins.base, ())})
    return f"; modelled: {', '.join(opcodes)}" if opcodes else f"; nothing of {ins.base} is modelled"


def _rank(form: InstructionForm, parts: tuple[str, ...]) -> tuple[int, int]:
    """How specific a form is for an opcode with these parts; the largest rank wins."""
    modifiers = form.opcode.split(".")[1:]
    return len(modifiers), -min((parts.index(m) for m in modifiers), default=0)


def holds(test: Test, ins: Instr) -> bool:
    """Does a fact hold for an instruction?"""
    return test if isinstance(test, bool) else test(ins)


def is_uniform(ins: Instr) -> bool:
    """Do equal operands give an equal result, which the handler can compute on Python ints?"""
    form = facts(ins)
    return form is not None and holds(form.uniform, ins)


def waits(ins: Instr) -> bool:
    """May lanes have to wait at an instruction?"""
    form = facts(ins)
    return form is not None and form.waits


def needs_hopper(ins: Instr) -> bool:
    """Does an instruction need the units of sm_90? It does if its form says so, or if it has an address, scope or
    register of the cluster, or a proxy."""
    form = facts(ins)
    if (form is not None and form.hopper) or any("cluster" in p or p == "proxy" for p in ins.parts[1:]):
        return True
    return any(name.startswith("%cluster") for op in ins.operands for name in registers(op))


def needs_blackwell(ins: Instr) -> bool:
    """Does an instruction need the units of sm_100?"""
    form = facts(ins)
    return form is not None and form.blackwell


def symbols(ins: Instr) -> Iterator[str]:
    """Names of the variables in the operands."""
    for operand in ins.operands:
        base = operand.base if isinstance(operand, Mem | TensorOperand) else operand
        for item in base.items if isinstance(base, Vec) else (base,):
            if isinstance(item, Sym):
                yield item.name


def defs_uses(ins: Instr) -> tuple[list[str], list[str]]:
    """The registers that an instruction writes, and those that it reads. A guarded instruction also reads the old
    values of the registers that it writes."""
    defs, uses = results_and_operands(ins)
    form = facts(ins)
    if ins.guard is not None or (form is not None and form.updates):
        uses += defs
    return defs, uses


def results_and_operands(ins: Instr) -> tuple[list[str], list[str]]:
    """The registers of an instruction's result, and those of its other operands and its guard."""
    form = facts(ins)
    operands = ins.operands
    defs: list[str] = []
    # The result is the first operand. Some forms may omit it, and then their first operand is an address.
    if operands and (form is None or Writes.RESULT in form.writes) and not isinstance(operands[0], Mem):
        defs = [name for name in registers(operands[0]) if name != "_"]
        operands = operands[1:]
    uses = [name for op in operands for name in registers(op) if name != "_"]
    if ins.guard is not None:
        uses.append(ins.guard.name)
    return defs, uses
