"""Translates instructions that move values (mov, selp, slct) and convert addresses (cvta, isspacep) to Python text."""

from __future__ import annotations

from collections.abc import Iterator

from kernelproof.emulator.frontend.emitter import Emitter, Value
from kernelproof.emulator.frontend.instruction import instruction
from kernelproof.emulator.frontend.instructions.floating import flush_operand
from kernelproof.emulator.frontend.instructions.integer import width_of
from kernelproof.emulator.frontend.mutation_operators import Change, Statement, zero_result
from kernelproof.emulator.frontend.ptx import Instr, Mem, Operand, Reg, Sym, Vec
from kernelproof.emulator.state.windows import SHIFT_TO_WINDOW, Window, window_of


@instruction("selp", uniform=True)
def selp(e: Emitter, ins: Instr) -> None:
    """selp on any type."""
    kind = ins.parts[-1]
    bits = 16 if kind == "bf16" else 32 if kind.endswith("x2") else width_of(kind)
    d, a, b, p = ins.operands
    test = e.predicate(p)
    x, y = e.raw(a, bits), e.raw(b, bits)
    k = f"u{bits // 8}"
    if test.uniform:
        if x.uniform and y.uniform:
            e.assign(d, Value(f"{x.text} if {test.text} else {y.text}", k, True))
        else:
            e.assign(d, Value(f"({e.array(a, k)} if {test.text} else {e.array(b, k)})", k, False))
        return
    left = f"{k}.type({x.text})" if x.uniform else x.text
    right = f"{k}.type({y.text})" if y.uniform else y.text
    e.assign(d, Value(f"WHERE({test.text}, {left}, {right})", k, False))


@instruction("slct")
def slct(e: Emitter, ins: Instr) -> None:
    """slct by the sign of the third operand."""
    kind = ins.parts[-2]
    bits = width_of(kind)
    d, a, b, c = ins.operands
    test = f"{flush_operand(ins, c, e.array(c, 'f4'))} >= 0" if ins.parts[-1] == "f32" else f"{e.array(c, 'i4')} >= 0"
    k = f"u{bits // 8}"
    e.assign(d, Value(f"WHERE({test}, {e.array(a, k)}, {e.array(b, k)})", k, False))


def _is_scalar_move(ins: Instr) -> bool:
    """Does a mov neither pack nor unpack a vector?"""
    d, s = ins.operands
    return isinstance(d, Reg) and not isinstance(s, Vec)


def _zero_cta(s: Statement) -> Iterator[Change]:
    """A mutation: the number of a CTA is always 0."""
    if "%ctaid." in s.text:
        yield from zero_result(s)


@instruction("mov", uniform=_is_scalar_move, mutations=(_zero_cta,))
def mov(e: Emitter, ins: Instr) -> None:
    """mov, including packing and unpacking of vectors."""
    d, s = ins.operands
    kind = ins.parts[-1]
    if kind == "pred":
        v = e.predicate(s)
        e.assign(d, v)
        return
    if isinstance(d, Vec):
        _unpack(e, d, s, kind)
        return
    if isinstance(s, Vec):
        total = _packed_bits(e, d, kind)
        nbytes = total // len(s.items) // 8
        e.assign(d, Value(f"JOIN({e.arrays(s.items, f'u{nbytes}')}, {nbytes})", f"u{total // 8}", False))
        return
    bits = 32 if kind.endswith("x2") else 16 if kind == "bf16" else width_of(kind)
    if isinstance(s, Reg) and isinstance(d, Reg) and d.name in e.lazy and e.guard is None:
        if s.name in e.lazy:
            e.line(f"{e.variable(d.name)} = {e.variable(s.name)}")
            return
        if e.hopper and bits == e.bits(d.name):
            # The compiler has inserted this copy between registers; it does not count as an access to an accumulator.
            e.line(f"{e.variable(d.name)} = {e.array(s, f'u{bits // 8}')}")
            return
    e.assign(d, e.raw(s, bits))


def _unpack(e: Emitter, d: Vec, s: Operand, kind: str) -> None:
    """Write a mov that unpacks a register into the elements of a vector."""
    total = _packed_bits(e, s, kind)
    nbytes = total // len(d.items) // 8
    name = e.temp(f"SPLIT({e.array(s, f'u{total // 8}')}, {len(d.items)}, {nbytes}, M.size)")
    for i, target in enumerate(d.items):
        if isinstance(target, Reg) and target.name != "_":
            e.assign(target, Value(f"{name}[{i}]", f"u{nbytes}", False))


def _packed_bits(e: Emitter, op: Operand, kind: str) -> int:
    """The bits of ``op``, the side of a mov that is one register, not a vector."""
    total = e.operand_bits(op) or width_of(kind)
    if total not in (16, 32, 64, 128):
        raise e.fail()
    return total


def _is_local_to_generic(ins: Instr) -> bool:
    """Does a cvta convert an address of local memory to a generic one?"""
    return "local" in ins.parts and "to" not in ins.parts


@instruction("cvta", uniform=lambda ins: not _is_local_to_generic(ins))
def cvta(e: Emitter, ins: Instr) -> None:
    """cvta: addresses of shared, local, global, const and param memory to generic ones, and back."""
    d, a = ins.operands
    if isinstance(a, Mem):
        a = Sym(a.base.name, a.offset) if isinstance(a.base, Sym) else a.base
    if _is_local_to_generic(ins):
        e.assign(d, Value(f"L.generic({e.array(a, 'u8')})", "u8", False))
        return
    v = e.raw(a, 64)
    to = "to" in ins.parts
    space = next(
        (p.split(":")[0] for p in ins.parts if p.split(":")[0] in ("shared", "local", "global", "const", "param")), ""
    )
    window = window_of(space) << SHIFT_TO_WINDOW
    if not window:
        e.assign(d, v)
    elif to:
        if isinstance(a, Sym):
            e.assign(d, Value(f"{v.text} & 0xFFFFFFFF", "u8", v.uniform))
            return
        address = f"K({v.text}, 8)" if v.uniform else v.text
        text = f"N.convert({address}, {e.bind('window', window_of(space))}, {e.lanes()})"
        e.assign(d, Value(f"int({text}[0])" if v.uniform else text, "u8", v.uniform))
    else:
        e.assign(d, Value(f"{v.text} | {window}", "u8", v.uniform))


@instruction("isspacep")
def isspacep(e: Emitter, ins: Instr) -> None:
    """isspacep: whether an address lies in the window of a state space. Parameters lie in the global window, and a
    CTA's shared memory lies in that of its cluster."""
    d, a = ins.operands
    space = ins.parts[1]
    address = e.array(a, "u8")
    window = f"({address} >> {SHIFT_TO_WINDOW})"
    if space == "global":
        text = f"({window} == {int(Window.GLOBAL)}) | ({window} >= {int(Window.PARAM)})"
    elif space in ("shared", "shared:cta") and e.hopper:
        text = f"({window} == {int(Window.SHARED)}) & E.is_of_cta({address})"
    else:
        text = f"{window} == {int(window_of(space.split(':')[0]))}"
    e.assign(d, Value(text, "p", False))
