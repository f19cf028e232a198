"""Lowers arithmetic in double precision. A number is a pair of registers; a literal has only its upper word."""

from __future__ import annotations

import struct

from kernelproof.emulator.machine_code.lowering import Lowering, mnemonic
from kernelproof.emulator.machine_code.modifiers import ORDERS, ROUNDINGS, comparison, rounding
from kernelproof.emulator.machine_code.operands import NAMED_FLOATS, Constant, Literal, Register, operand
from kernelproof.sass import Instruction

# Name of a number -> the upper word of its bits.
_NAMED_UPPER_WORDS = {"INF": 0x7FF00000, "QNAN": 0x7FFFFFFF, "SNAN": 0x7FF7FFFF}


def _literal(text: str) -> int:
    """The 64 bits of a literal, of which the lower 32 are zero."""
    negative, name = text.startswith("-"), text.lstrip("+-")
    if name in NAMED_FLOATS:
        return (_NAMED_UPPER_WORDS[name] | negative << 31) << 32
    if name.startswith("0x"):
        return (int(text, 0) & 0xFFFFFFFF) << 32
    bits = int.from_bytes(struct.pack("<d", float(text)), "little")
    return bits & ~0xFFFFFFFF  # it was printed with enough digits for its upper word


def double(low: Lowering, text: str) -> str:
    """A source in double precision."""
    source = operand(text)
    if isinstance(source, Literal):
        return f"0d{_literal(source.text):016X}"
    bits = low.join(low.bits(source), low.bits(source, 1))
    for sign in reversed(source.signs if isinstance(source, Register | Constant) else ""):
        bits = low.computed("neg.f64" if sign == "-" else "abs.f64", _number(bits), kind="b64")
    return _number(bits)


def _number(bits: str) -> str:
    """Bits as an operand in double precision: a literal in PTX's form, or a register."""
    return f"0d{int(bits):016X}" if bits.isdigit() else bits


def upper_double(low: Lowering, text: str) -> str:
    """The number whose upper word is a source; its lower word is zero."""
    source = operand(text)
    if isinstance(source, Literal):
        return f"0d{_literal(source.text):016X}"
    bits = low.join("0", low.bits(source))
    for sign in reversed(source.signs if isinstance(source, Register | Constant) else ""):
        bits = low.computed("neg.f64" if sign == "-" else "abs.f64", _number(bits), kind="b64")
    return _number(bits)


@mnemonic("DADD DMUL DFMA", ROUNDINGS)
def arithmetic(low: Lowering, ins: Instruction) -> None:
    """add, mul and fma."""
    op = {"DADD": "add", "DMUL": "mul", "DFMA": "fma"}[ins.name]
    result, *sources = ins.operands
    total = low.computed(f"{op}{rounding(ins)}.f64", *(double(low, text) for text in sources), kind="b64")
    low.set_pair(result, total)


@mnemonic("DSETP", f"{ORDERS} AND OR XOR MIN MAX")
def compare(low: Lowering, ins: Instruction) -> None:
    """As FSETP. ``.MIN`` and ``.MAX`` give two predicates: the first source is the minimum or maximum, and both sources
    are NaN."""
    p, q, a, b, r = ins.operands
    x, y = double(low, a), double(low, b)
    if extreme := next((part.lower() for part in ins.modifiers if part in ("MIN", "MAX")), ""):
        taken = low.computed(f"{extreme}.f64", x, y, kind="b64")
        first = low.computed("setp.eq.b64", taken, x, kind="pred")
        left, right = (low.computed("setp.nan.f64", value, value, kind="pred") for value in (x, y))
        low.set_predicate(p, low.either_holds(first, right))
        low.set_predicate(q, low.both_hold(left, right))
        return
    order, boolean = comparison(ins)
    outcome = low.computed(f"setp.{order}.f64", x, y, kind="pred")
    low.set_comparison((p, q), outcome, boolean, r)
