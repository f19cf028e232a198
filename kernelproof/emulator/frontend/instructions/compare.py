"""Translates setp and set, which compare integers and floats, to Python text."""

from __future__ import annotations

from kernelproof.emulator import arithmetic
from kernelproof.emulator.frontend.emitter import Emitter, Value
from kernelproof.emulator.frontend.instruction import HALVES, INTEGERS, instruction
from kernelproof.emulator.frontend.instructions.bits import LOGIC_OPERATORS
from kernelproof.emulator.frontend.instructions.floating import flush_operand
from kernelproof.emulator.frontend.instructions.integer import width_of
from kernelproof.emulator.frontend.mutation_operators import compare as compare_otherwise
from kernelproof.emulator.frontend.ptx import Instr, Pair

# Comparisons of PTX -> operators of Python. Others, such as unordered ones, are in ``arithmetic.COMPARE``.
_UNSIGNED_OPERATORS = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_ORDERED_OPERATORS = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_INTEGER_OPERATORS = {**_UNSIGNED_OPERATORS, **_ORDERED_OPERATORS, "ne": "!="}
_FLOAT_CODES = {"f32": "f4", "f64": "f8"}  # PTX type -> NumPy type code
_PAIR_TYPES = ("f16x2", "bf16x2")


def _comparison(e: Emitter, ins: Instr, kind: str) -> Value:
    """The comparison of operands 1 and 2, which have the type ``kind``."""
    (a, b), test = ins.operands[1:3], ins.parts[1]
    if kind not in INTEGERS:
        return _float_comparison(e, ins, kind)
    bits = width_of(kind)
    if kind[0] == "s" and test not in ("eq", "ne"):
        x, y = e.signed(a, bits), e.signed(b, bits)
    else:
        x, y = e.raw(a, bits), e.raw(b, bits)
    if test not in _INTEGER_OPERATORS:
        raise e.fail()
    return Value(f"{x.text} {_INTEGER_OPERATORS[test]} {y.text}", "p", x.uniform and y.uniform)


def _float_comparison(e: Emitter, ins: Instr, kind: str) -> Value:
    """The comparison of operands 1 and 2, which are floats of the type ``kind``."""
    (a, b), test = ins.operands[1:3], ins.parts[1]
    if kind == "bf16":
        x, y = (f"A.bf16_to_f32({e.array(op, 'u2')})" for op in (a, b))
    elif kind == "f16":
        x, y = (flush_operand(ins, op, e.array(op, "f2")) for op in (a, b))
    elif kind in _FLOAT_CODES:
        x, y = (
            flush_operand(ins, a, e.array(a, _FLOAT_CODES[kind])),
            flush_operand(ins, b, e.number(b, _FLOAT_CODES[kind])),
        )
    else:
        raise e.fail()
    if test in _ORDERED_OPERATORS:
        return Value(f"({x} {_ORDERED_OPERATORS[test]} {y})", "p", False)
    if test not in arithmetic.COMPARE:
        raise e.fail()
    return Value(f"A.COMPARE[{test!r}]({x}, {y})", "p", False)


def _is_integer(ins: Instr) -> bool:
    return ins.parts[-1] in INTEGERS


@instruction("setp", uniform=_is_integer, mutations=(compare_otherwise,))
def setp(e: Emitter, ins: Instr) -> None:
    """setp with one or two destinations; pairs of halves need two."""
    d = ins.operands[0]
    combine = next((p for p in ins.parts[2:-1] if p in LOGIC_OPERATORS), None)
    pairs = ins.parts[-1] in _PAIR_TYPES
    value = Value(_packed_test(e, ins), "p", False) if pairs else _comparison(e, ins, ins.parts[-1])
    operand = e.predicate(ins.operands[3]) if combine else None
    uniform = value.uniform and (operand is None or operand.uniform)

    def result(text: str) -> Value:
        if operand is None or combine is None:
            return Value(text, "p", uniform)
        if uniform:
            return Value(f"bool({text}) {LOGIC_OPERATORS[combine]} bool({operand.text})", "p", True)
        left = f"K(int({text}), 0)" if value.uniform else f"({text})"
        right = f"K(int({operand.text}), 0)" if operand.uniform else f"({operand.text})"
        return Value(f"{left} {LOGIC_OPERATORS[combine]} {right}", "p", False)

    if not isinstance(d, Pair):
        if pairs:
            raise e.fail("it needs two destinations")
        e.assign(d, result(value.text))
        return
    holds = e.temp(value.text)
    if pairs:
        first, second = f"{holds}[::2]", f"{holds}[1::2]"
    else:
        first, second = holds, f"(not {holds})" if value.uniform else f"~{holds}"
    yes, no = e.temp(result(first).text), e.temp(result(second).text)
    e.assign(d.first, Value(yes, "p", uniform))
    if d.second.name != "_":
        e.assign(d.second, Value(no, "p", uniform))


@instruction("set")
def set_(e: Emitter, ins: Instr) -> None:
    """set: all ones (or 1.0) where the comparison holds."""
    # The type of the result, and that of the operands.
    types = [p for p in ins.parts if p in INTEGERS or p in HALVES or p in _FLOAT_CODES]
    if types[-1] in _PAIR_TYPES:
        _set_packed(e, ins, types)
        return
    d = ins.operands[0]
    dst, src = types[0], types[-1]
    combine = next((p for p in ins.parts[2:] if p in LOGIC_OPERATORS), None)
    v = _comparison(e, ins, src)
    text = f"K(int({v.text}), 0)" if v.uniform else f"({v.text})"
    if combine:
        text = f"({text} {LOGIC_OPERATORS[combine]} ({e.predicate_array(ins.operands[3])}))"
    bits = 16 if dst in ("f16", "bf16") else width_of(dst)
    # The bits of 1.0, or all ones for an integer result.
    true = {"f16": 0x3C00, "bf16": 0x3F80, "f32": 0x3F800000}.get(dst, (1 << bits) - 1)
    k = f"u{bits // 8}"
    e.assign(d, Value(f"np.where({text}, {k}.type({true}), {k}.type(0))", k, False))


def _packed_test(e: Emitter, ins: Instr) -> str:
    """The text of a comparison of pairs of halves: an array with a result for each half, the lower half first."""
    a, b = ins.operands[1:3]
    if ins.parts[1] not in arithmetic.COMPARE:
        raise e.fail()
    words = f"{e.array(a, 'u4')}, {e.array(b, 'u4')}"
    return f"A.packed_test({ins.parts[-1]!r}, {ins.parts[1]!r}, {words}, {'ftz' in ins.parts})"


def _set_packed(e: Emitter, ins: Instr, types: list[str]) -> None:
    """set of pairs of halves: 1.0 in each half, or all ones for an integer result."""
    if types[0] not in (*_PAIR_TYPES, "u32", "s32") or len(ins.operands) > 3:
        raise e.fail()
    true = {"f16x2": 0x3C00, "bf16x2": 0x3F80}.get(types[0], 0xFFFF)
    e.assign(ins.operands[0], Value(f"({_packed_test(e, ins)} * u2.type({true})).view(u4)", "u4", False))
