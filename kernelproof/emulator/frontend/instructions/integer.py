"""Translates integer arithmetic of PTX (add, mul, mad, div, min, abs, sums with carries) to Python text.

In this text, ``A`` is the package ``arithmetic``, ``M`` is the batch, and ``K(value, bytes)`` is an array with the int
``value`` in every lane. Uniform operands give expressions of Python ints, which have no width, so their results are
masked to the register's bits; all other operands give expressions of arrays, which wrap around by themselves.
"""

from __future__ import annotations

from kernelproof.emulator.frontend.emitter import Emitter, Value
from kernelproof.emulator.frontend.instruction import INTEGERS, instruction
from kernelproof.emulator.frontend.mutation_operators import zero_result
from kernelproof.emulator.frontend.ptx import Imm, Instr, Operand


def width_of(kind: str) -> int:
    """The bits of an integer type."""
    return int(kind[1:])


def _is_plain(ins: Instr) -> bool:
    """Does an instruction neither saturate nor write the carry?"""
    return not {"sat", "cc"} & set(ins.parts)


def _type_codes(kind: str) -> tuple[int, str, str]:
    """The bits, the NumPy type code (as ``i4``) and the unsigned type code (as ``u4``) of a PTX integer type."""
    size = width_of(kind) // 8
    return 8 * size, f"{'i' if kind[0] == 's' else 'u'}{size}", f"u{size}"


def binary(e: Emitter, ins: Instr, template: str) -> None:
    """Write an operation on two operands. ``template``, such as ``{a} + {b}``, is its text for ints and for arrays."""
    bits, _, u = _type_codes(ins.parts[-1])
    d, a, b = ins.operands
    x, y = e.raw(a, bits), e.raw(b, bits)
    text = template.format(a=x.text, b=y.text)
    if x.uniform and y.uniform:
        e.assign(d, Value(f"({text}) & {(1 << bits) - 1}", u, True))
    else:
        e.assign(d, Value(text, u, False))


@instruction("add", "sub", types=INTEGERS, uniform=_is_plain)
def add(e: Emitter, ins: Instr) -> None:
    """add and sub."""
    binary(e, ins, "{a} + {b}" if ins.base == "add" else "{a} - {b}")


@instruction("add.sat", "sub.sat", types=frozenset(("s32",)))
def add_saturated(e: Emitter, ins: Instr) -> None:
    """add.sat and sub.sat."""
    d, a, b = ins.operands
    e.assign(d, Value(f"A.saturate_add({e.array(a, 'i4')}, {e.array(b, 'i4')}, {ins.base == 'sub'})", "i4", False))


@instruction("add.cc", "sub.cc", "addc", "subc", types=INTEGERS)
def carry(e: Emitter, ins: Instr) -> None:
    """add.cc, addc, sub.cc, subc."""
    _, _, u = _type_codes(ins.parts[-1])
    d, a, b = ins.operands
    _add_carry(e, ins, d, e.array(a, u), e.array(b, u), u)


def _add_carry(e: Emitter, ins: Instr, d: Operand, x: str, y: str, u: str) -> None:
    """Write a sum with carries. The carry is kept in the Python variable ``cc``."""
    carry_in = "cc" if ins.base in ("addc", "subc", "madc") else "None"
    e.line(f"cc_out = A.add_carry({x}, {y}, {carry_in}, {ins.base in ('sub', 'subc')})")
    if "cc" in ins.parts:
        e.line("cc = cc_out[1]")
    e.assign(d, Value("cc_out[0]", u, False))


@instruction("mul", types=INTEGERS, uniform=_is_plain)
def mul(e: Emitter, ins: Instr) -> None:
    """mul: lo, hi, wide."""
    d, a, b = ins.operands
    _product(e, ins, d, a, b, None)


@instruction("mad", types=INTEGERS, uniform=_is_plain)
def mad(e: Emitter, ins: Instr) -> None:
    """mad: lo, hi, wide."""
    d, a, b, c = ins.operands
    _product(e, ins, d, a, b, c)


@instruction("mad.hi.sat", types=frozenset(("s32",)))
def mad_saturated(e: Emitter, ins: Instr) -> None:
    """mad.hi.sat of s32."""
    d, a, b, c = (ins.operands[0], *(e.array(op, "i4") for op in ins.operands[1:]))
    e.assign(d, Value(f"A.saturate_add(A.mulhi({a}, {b}), {c}, False)", "i4", False))


@instruction("mul24", "mad24", types=frozenset(("u32", "s32")))
def mul24(e: Emitter, ins: Instr) -> None:
    """mul24 and mad24: lo, hi."""
    kind = "i4" if ins.parts[-1] == "s32" else "u4"
    d, a, b = ins.operands[:3]
    text = f"A.product24({e.array(a, kind)}, {e.array(b, kind)}, {'hi' in ins.parts})"
    if "sat" in ins.parts:
        text = f"A.saturate_add({text}.view(i4), {e.array(ins.operands[3], 'i4')}, False).view(u4)"
    elif ins.base == "mad24":
        text = f"{text} + {e.array(ins.operands[3], 'u4')}"
    e.assign(d, Value(text, "u4", False))


@instruction("mad.cc", "madc", types=INTEGERS)
def mad_carry(e: Emitter, ins: Instr) -> None:
    """mad.cc and madc."""
    _, t, u = _type_codes(ins.parts[-1])
    d, a, b, c = ins.operands
    if "hi" in ins.parts:
        product = f"A.mulhi({e.array(a, t)}, {e.array(b, t)}).view({u})"
    else:
        product = f"({e.array(a, u)} * {e.array(b, u)})"
    _add_carry(e, ins, d, product, e.array(c, u), u)


def _product(e: Emitter, ins: Instr, d: Operand, a: Operand, b: Operand, c: Operand | None) -> None:
    """Write a * b, or a * b + c."""
    if "wide" in ins.parts:
        _assign_sum(e, d, _wide_product(e, ins.parts[-1], a, b), c)
    elif "hi" in ins.parts:
        _high_product(e, ins.parts[-1], d, a, b, c)
    else:
        bits, _, u = _type_codes(ins.parts[-1])
        x, y = e.raw(a, bits), e.raw(b, bits)
        if x.uniform and y.uniform:
            product = Value(f"(({x.text} * {y.text}) & {(1 << bits) - 1})", u, True)
        else:
            product = Value(f"{x.text} * {y.text}", u, False)
        _assign_sum(e, d, product, c)


def _typed_operands(e: Emitter, kind: str, a: Operand, b: Operand) -> tuple[Value, Value]:
    """Two operands of the type ``kind``, as signed numbers if it is signed."""
    bits = width_of(kind)
    return (e.signed(a, bits), e.signed(b, bits)) if kind[0] == "s" else (e.raw(a, bits), e.raw(b, bits))


def _assign_sum(e: Emitter, d: Operand, product: Value, c: Operand | None) -> None:
    """Write the product, plus ``c`` if there is one. A uniform sum is reduced to its width, because Python ints have
    none."""
    if c is None:
        e.assign(d, product)
        return
    bits = 8 * int(product.kind[1:])
    addend = e.raw(c, bits)
    text = f"{product.text} + {addend.text}"
    if product.uniform and addend.uniform:
        e.assign(d, Value(f"({text}) & {(1 << bits) - 1}", product.kind, True))
    else:
        e.assign(d, Value(text, product.kind, False))


def _wide_product(e: Emitter, kind: str, a: Operand, b: Operand) -> Value:
    """A product of twice the width of its operands."""
    bits, t, _ = _type_codes(kind)
    x, y = _typed_operands(e, kind, a, b)
    size = 2 * bits // 8
    if x.uniform and y.uniform:
        return Value(f"(({x.text} * {y.text}) & {(1 << 2 * bits) - 1})", f"u{size}", True)
    # One factor is an array; the product of ``x``, widened, and an int has the wide type, too.
    if x.uniform:
        x, y = y, x
    wide = f"{t[0]}{size}"
    factor = y.text if y.uniform else f"{y.text}.astype({wide})"
    text = f"({x.text}.astype({wide}) * {factor})"
    return Value(f"{text}.view(u{size})" if t[0] == "i" else text, f"u{size}", False)


def _high_product(e: Emitter, kind: str, d: Operand, a: Operand, b: Operand, c: Operand | None) -> None:
    """Write the upper half of a product, plus ``c`` if there is one."""
    bits, t, u = _type_codes(kind)
    x, y = _typed_operands(e, kind, a, b)
    addend = e.raw(c, bits) if c is not None else None
    if x.uniform and y.uniform and (addend is None or addend.uniform):
        text = f"({x.text} * {y.text}) >> {bits}"
        if addend is not None:
            text = f"({text}) + {addend.text}"
        e.assign(d, Value(f"({text}) & {(1 << bits) - 1}", u, True))
        return
    text = f"A.mulhi({e.array(a, t)}, {e.array(b, t)}).view({u})"
    e.assign(d, Value(f"{text} + {addend.text}" if addend is not None else text, u, False))


@instruction("div", "rem", types=INTEGERS, uniform=True, mutations=(zero_result,))
def div(e: Emitter, ins: Instr) -> None:
    """div and rem."""
    function = "divide" if ins.base == "div" else "remainder"
    d, a, b = ins.operands
    bits, t, u = _type_codes(ins.parts[-1])
    x, y = _typed_operands(e, ins.parts[-1], a, b)
    if isinstance(b, Imm) and b.value:
        _by_sign(e, ins, f"A.{function}_int", f"A.{function}")
    elif x.uniform and y.uniform:
        # A division by zero is reported by M.quotient, which also chooses the result. For a uniform divisor it is
        # called with arrays, so that the result has the same bits as for a varying one.
        divisor, mask = e.temp(y.text), (1 << bits) - 1
        quotient = f"A.{function}_int({x.text}, {divisor}) & {mask}"
        zero = f"int(M.quotient(K({quotient}, {bits // 8}), K(0, {bits // 8}), {e.lanes()})[0])"
        e.assign(d, Value(f"({quotient} if {divisor} else {zero})", u, True))
    else:
        divisor = e.temp(e.array(b, t))
        text = f"M.quotient(A.{function}({e.array(a, t)}, {divisor}), {divisor}, {e.lanes()})"
        e.assign(d, Value(text, t, False))


@instruction("min", "max", types=INTEGERS, uniform=lambda ins: "relu" not in ins.parts)
def minimum(e: Emitter, ins: Instr) -> None:
    """min and max."""
    if "relu" in ins.parts:
        d, a, b = ins.operands
        e.assign(d, Value(f"np.maximum(np.{ins.base}imum({e.array(a, 'i4')}, {e.array(b, 'i4')}), 0)", "i4", False))
    else:
        _by_sign(e, ins, ins.base, f"np.{ins.base}imum")


def _by_sign(e: Emitter, ins: Instr, of_ints: str, of_arrays: str) -> None:
    """Write a function of two operands whose result depends on their signs. ``of_ints``, ``of_arrays``: its names in
    the text for Python ints and for arrays."""
    d, a, b = ins.operands
    bits, t, u = _type_codes(ins.parts[-1])
    x, y = _typed_operands(e, ins.parts[-1], a, b)
    if x.uniform and y.uniform:
        e.assign(d, Value(f"{of_ints}({x.text}, {y.text}) & {(1 << bits) - 1}", u, True))
    else:
        e.assign(d, Value(f"{of_arrays}({e.array(a, t)}, {e.array(b, t)})", t, False))


@instruction("abs", "neg", types=INTEGERS, uniform=True)
def negate(e: Emitter, ins: Instr) -> None:
    """abs and neg."""
    bits, _, u = _type_codes(ins.parts[-1])
    d, a = ins.operands
    x = e.signed(a, bits)
    if x.uniform:
        text = f"abs({x.text})" if ins.base == "abs" else f"(-{x.text})"
        e.assign(d, Value(f"{text} & {(1 << bits) - 1}", u, True))
    else:
        e.assign(d, Value(f"np.{'abs' if ins.base == 'abs' else 'negative'}({x.text})", x.kind, False))
