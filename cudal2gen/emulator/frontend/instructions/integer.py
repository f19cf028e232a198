"""Handlers of integer, logic, predicate and bit instructions."""

from __future__ import annotations

from cudal2gen.emulator.frontend.ptx import Imm, Instr, Mem, Operand, Pair, Reg, Sym, Vec
from cudal2gen.emulator.frontend.translate import Emitter, Value, instruction

_INTEGER = frozenset(("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64", "b8", "b16", "b32", "b64"))


def _type(ins: Instr) -> str:
    return ins.parts[-1]


def _width(kind: str) -> int:
    return int(kind[1:])


def is_integer(ins: Instr) -> bool:
    """Whether an instruction works on plain integers, without saturation or carry."""
    return _type(ins) in _INTEGER and "sat" not in ins.parts and "cc" not in ins.parts


def _plain(ins: Instr) -> bool:
    return is_integer(ins) and ins.parts[0] not in ("addc", "subc", "madc")


def binary(e: Emitter, ins: Instr, template: str, signed: bool) -> None:
    """An operation on two operands whose text is the same for ints and arrays."""
    kind = _type(ins)
    bits = _width(kind)
    d, a, b = ins.operands
    get = e.signed if signed else e.raw
    x, y = get(a, bits), get(b, bits)
    out = f"{'i' if signed else 'u'}{bits // 8}"
    if x.uniform and y.uniform:
        text = template.format(a=x.text, b=y.text)
        e.assign(d, Value(f"({text}) & {(1 << bits) - 1}", f"u{bits // 8}", True))
    else:
        e.assign(d, Value(template.format(a=x.text, b=y.text), out, False))


@instruction("add", "sub", uniform=_plain)
def add(e: Emitter, ins: Instr) -> None:
    """add and sub, with .cc and .sat."""
    kind = _type(ins)
    if kind not in _INTEGER:
        from cudal2gen.emulator.frontend.instructions import floating

        return floating.arithmetic2(e, ins)
    if "cc" in ins.parts:
        return carry(e, ins)
    d, a, b = ins.operands
    if "sat" in ins.parts:
        e.assign(d, Value(f"A.saturate_add({e.array(a, 'i4')}, {e.array(b, 'i4')}, {ins.base == 'sub'})", "i4", False))
        return None
    if kind in ("u16x2", "s16x2"):
        raise e.fail()
    return binary(e, ins, "{a} + {b}" if ins.base == "add" else "{a} - {b}", False)


@instruction("addc", "subc")
def carry(e: Emitter, ins: Instr) -> None:
    """add.cc, addc, sub.cc, subc: the carry lives in one hidden register of the block."""
    kind = _type(ins)
    u = f"u{_width(kind) // 8}"
    d, a, b = ins.operands
    old = "cc" if ins.base in ("addc", "subc") else "None"
    e.line(f"cc_out = A.add_carry({e.array(a, u)}, {e.array(b, u)}, {old}, {ins.base in ('sub', 'subc')})")
    if "cc" in ins.parts:
        e.line("cc = cc_out[1]")
    e.assign(d, Value("cc_out[0]", u, False))


@instruction("mul", "mul24", uniform=_plain)
def mul(e: Emitter, ins: Instr) -> None:
    """mul: lo, hi, wide."""
    kind = _type(ins)
    if kind not in _INTEGER:
        from cudal2gen.emulator.frontend.instructions import floating

        return floating.arithmetic2(e, ins)
    d, a, b = ins.operands
    _product(e, ins, kind, d, a, b, None)
    return None


@instruction("mad", "mad24", "madc", uniform=_plain)
def mad(e: Emitter, ins: Instr) -> None:
    """mad: lo, hi, wide, with carries."""
    kind = _type(ins)
    d, a, b, c = ins.operands
    if kind not in _INTEGER:
        from cudal2gen.emulator.frontend.instructions import floating

        return floating.fma(e, ins)
    if "sat" in ins.parts:
        raise e.fail()
    if "cc" in ins.parts or ins.base == "madc":
        u = f"u{_width(kind) // 8}"
        t = "i" if kind[0] == "s" else "u"
        t += u[1:]
        product = (
            f"A.mulhi({e.array(a, t)}, {e.array(b, t)}).view({u})"
            if "hi" in ins.parts
            else f"({e.array(a, u)} * {e.array(b, u)})"
        )
        old = "cc" if ins.base == "madc" else "None"
        e.line(f"cc_out = A.add_carry({product}, {e.array(c, u)}, {old}, False)")
        if "cc" in ins.parts:
            e.line("cc = cc_out[1]")
        e.assign(d, Value("cc_out[0]", u, False))
        return None
    _product(e, ins, kind, d, a, b, c)
    return None


def _product(  # noqa: PLR0915
    e: Emitter, ins: Instr, kind: str, d: Operand, a: Operand, b: Operand, c: Operand | None
) -> None:
    bits, sign = _width(kind), kind[0] == "s"
    get = e.signed if sign else e.raw
    if ins.base in ("mul24", "mad24"):
        raise e.fail()
    if "wide" in ins.parts:
        x, y = get(a, bits), get(b, bits)
        wide = 2 * bits
        k = f"{'i' if sign else 'u'}{wide // 8}"
        add = e.raw(c, wide) if c is not None else None
        if x.uniform and y.uniform:
            text, uniform = f"{x.text} * {y.text}", True
            text = f"(({text}) & {(1 << wide) - 1})"
        else:
            if x.uniform:
                x, y = y, x
            other = y.text if y.uniform else f"{y.text}.astype({k})"
            text, uniform = f"({x.text}.astype({k}) * {other})", False
            if k[0] == "i":
                text += f".view(u{wide // 8})"
        if add is not None:
            text = f"{text} + {add.text}"
            uniform = uniform and add.uniform
            if uniform:
                text = f"({text}) & {(1 << wide) - 1}"
        e.assign(d, Value(text, f"u{wide // 8}", uniform))
        return
    if "hi" in ins.parts:
        x, y = get(a, bits), get(b, bits)
        add = e.raw(c, bits) if c is not None else None
        u = f"u{bits // 8}"
        if x.uniform and y.uniform and (add is None or add.uniform):
            text = f"({x.text} * {y.text}) >> {bits}"
            if add is not None:
                text = f"({text}) + {add.text}"
            e.assign(d, Value(f"({text}) & {(1 << bits) - 1}", u, True))
            return
        t = f"{'i' if sign else 'u'}{bits // 8}"
        text = f"A.mulhi({e.array(a, t)}, {e.array(b, t)}).view({u})"
        if add is not None:
            text += f" + {add.text}"
        e.assign(d, Value(text, u, False))
        return
    x, y = e.raw(a, bits), e.raw(b, bits)
    add = e.raw(c, bits) if c is not None else None
    if x.uniform and y.uniform:
        text = f"(({x.text} * {y.text}) & {(1 << bits) - 1})"
        uniform = True
    else:
        text, uniform = f"{x.text} * {y.text}", False
    if add is not None:
        text = f"{text} + {add.text}"
        uniform = uniform and add.uniform
        if uniform:
            text = f"({text}) & {(1 << bits) - 1}"
    e.assign(d, Value(text, f"u{bits // 8}", uniform))


@instruction("div", "rem", uniform=is_integer)
def div(e: Emitter, ins: Instr) -> None:
    """div and rem."""
    kind = _type(ins)
    if kind not in _INTEGER:
        from cudal2gen.emulator.frontend.instructions import floating

        return floating.arithmetic2(e, ins)
    d, a, b = ins.operands
    bits = _width(kind)
    sign = kind[0] == "s"
    get = e.signed if sign else e.raw
    x, y = get(a, bits), get(b, bits)
    if x.uniform and y.uniform:
        f = f"A.divide_int({x.text}, {y.text})" if ins.base == "div" else f"A.remainder_int({x.text}, {y.text})"
        e.assign(d, Value(f"{f} & {(1 << bits) - 1}", f"u{bits // 8}", True))
        return None
    t = f"{'i' if sign else 'u'}{bits // 8}"
    f = "divide" if ins.base == "div" else "remainder"
    e.assign(d, Value(f"A.{f}({e.array(a, t)}, {e.array(b, t)})", t, False))
    return None


@instruction("min", "max", uniform=is_integer)
def minimum(e: Emitter, ins: Instr) -> None:
    """min and max."""
    kind = _type(ins)
    if kind not in _INTEGER:
        from cudal2gen.emulator.frontend.instructions import floating

        return floating.arithmetic2(e, ins)
    bits, sign = _width(kind), kind[0] == "s"
    d, a, b = ins.operands
    get = e.signed if sign else e.raw
    x, y = get(a, bits), get(b, bits)
    k = f"{'i' if sign else 'u'}{bits // 8}"
    if x.uniform and y.uniform:
        e.assign(d, Value(f"{ins.base}({x.text}, {y.text}) & {(1 << bits) - 1}", f"u{bits // 8}", True))
    else:
        e.assign(d, Value(f"np.{ins.base}imum({x.text}, {y.text})", k, False))
    return None


@instruction("abs", "neg", uniform=is_integer)
def negate(e: Emitter, ins: Instr) -> None:
    """abs and neg."""
    kind = _type(ins)
    if kind not in _INTEGER:
        from cudal2gen.emulator.frontend.instructions import floating

        return floating.arithmetic1(e, ins)
    bits = _width(kind)
    d, a = ins.operands
    x = e.signed(a, bits)
    mask = (1 << bits) - 1
    if x.uniform:
        text = f"abs({x.text})" if ins.base == "abs" else f"(-{x.text})"
        e.assign(d, Value(f"{text} & {mask}", f"u{bits // 8}", True))
    else:
        e.assign(d, Value(f"np.{'abs' if ins.base == 'abs' else 'negative'}({x.text})", x.kind, False))
    return None


@instruction("and", "or", "xor", uniform=True)
def logic(e: Emitter, ins: Instr) -> None:
    """and, or, xor on words and predicates."""
    symbol = _SYMBOLS[ins.base]
    if _type(ins) == "pred":
        d, a, b = ins.operands
        x, y = e.predicate(a), e.predicate(b)
        if x.uniform and y.uniform:
            e.assign(d, Value(f"bool({x.text}) {symbol} bool({y.text})", "p", True))
        else:
            e.assign(d, Value(f"({e.predicate_array(a)}) {symbol} ({e.predicate_array(b)})", "p", False))
        return
    binary(e, ins, f"{{a}} {symbol} {{b}}", False)


@instruction("not", "cnot", uniform=True)
def invert(e: Emitter, ins: Instr) -> None:
    """not and cnot."""
    d, a = ins.operands
    if _type(ins) == "pred":
        x = e.predicate(a)
        e.assign(d, Value(f"not {x.text}" if x.uniform else f"~({x.text})", "p", x.uniform))
        return
    bits = _width(_type(ins))
    v = e.raw(a, bits)
    k = f"u{bits // 8}"
    if ins.base == "cnot":
        e.assign(d, Value(f"int({v.text} == 0)" if v.uniform else f"({v.text} == 0).astype({k})", k, v.uniform))
    elif v.uniform:
        e.assign(d, Value(f"{v.text} ^ {(1 << bits) - 1}", k, True))
    else:
        e.assign(d, Value(f"~{v.text}", k, False))


@instruction("shl", "shr", uniform=True)
def shift(e: Emitter, ins: Instr) -> None:
    """shl and shr: counts beyond the width give 0 or the sign."""
    kind = _type(ins)
    bits = _width(kind)
    d, a, b = ins.operands
    sign = kind[0] == "s"
    v = e.signed(a, bits) if sign else e.raw(a, bits)
    n = e.raw(b, 32)
    k = v.kind
    u = f"u{bits // 8}"
    if isinstance(b, Imm):
        count = min(b.value & 0xFFFFFFFF, bits)
        if ins.base == "shl":
            if v.uniform:
                e.assign(d, Value(f"({v.text} << {count}) & {(1 << bits) - 1}", u, True))
            elif count >= bits:
                e.assign(d, Value("0", u, True))
            else:
                e.assign(d, Value(f"{v.text} << {count}", k, False))
        elif v.uniform:
            e.assign(d, Value(f"({v.text} >> {count}) & {(1 << bits) - 1}", u, True))
        elif count >= bits:
            e.assign(d, Value(f"{v.text} >> {bits - 1}", k, False) if sign else Value("0", u, True))
        else:
            e.assign(d, Value(f"{v.text} >> {count}", k, False))
        return
    if v.uniform and n.uniform:
        count_text = f"min({n.text}, {bits})"
        symbol = "<<" if ins.base == "shl" else ">>"
        e.assign(d, Value(f"({v.text} {symbol} {count_text}) & {(1 << bits) - 1}", u, True))
        return
    array = e.array(a, k)
    e.assign(d, Value(f"A.{ins.base}({array}, {n.text})", k, False))


@instruction("lop3")
def lop3(e: Emitter, ins: Instr) -> None:
    """lop3 by its truth table."""
    d, a, b, c, table = ins.operands[:5]
    if not isinstance(table, Imm) or isinstance(d, Pair):
        raise e.fail()
    e.assign(
        d,
        Value(f"A.lop3({e.array(a, 'u4')}, {e.array(b, 'u4')}, {e.array(c, 'u4')}, {table.value & 255})", "u4", False),
    )


@instruction("prmt")
def prmt(e: Emitter, ins: Instr) -> None:
    """prmt with all its modes."""
    d, a, b, c = ins.operands
    mode = "" if ins.parts[-1] == "b32" else ins.parts[-1]
    e.assign(d, Value(f"A.prmt({e.array(a, 'u4')}, {e.array(b, 'u4')}, {e.array(c, 'u4')}, {mode!r})", "u4", False))


@instruction("shf")
def shf(e: Emitter, ins: Instr) -> None:
    """shf: funnel shift."""
    d, a, b, c = ins.operands
    left, wrap = "l" in ins.parts, "wrap" in ins.parts
    e.assign(
        d, Value(f"A.funnel({e.array(a, 'u4')}, {e.array(b, 'u4')}, {e.array(c, 'u4')}, {left}, {wrap})", "u4", False)
    )


@instruction("bfe")
def bfe(e: Emitter, ins: Instr) -> None:
    """bfe: bit field extract."""
    kind = _type(ins)
    k = f"{'i' if kind[0] == 's' else 'u'}{_width(kind) // 8}"
    d, a, b, c = ins.operands
    e.assign(d, Value(f"A.bfe({e.array(a, k)}, {e.array(b, 'u4')}, {e.array(c, 'u4')})", f"u{k[1:]}", False))


@instruction("bfi")
def bfi(e: Emitter, ins: Instr) -> None:
    """bfi: bit field insert."""
    u = f"u{_width(_type(ins)) // 8}"
    d, a, b, c, f = ins.operands
    e.assign(d, Value(f"A.bfi({e.array(a, u)}, {e.array(b, u)}, {e.array(c, 'u4')}, {e.array(f, 'u4')})", u, False))


@instruction("popc", "clz", "brev", "bfind")
def count(e: Emitter, ins: Instr) -> None:
    """popc, clz, brev, bfind."""
    kind = _type(ins)
    k = f"{'i' if kind[0] == 's' else 'u'}{_width(kind) // 8}"
    d, a = ins.operands
    if ins.base == "bfind":
        e.assign(d, Value(f"A.bfind({e.array(a, k)}, {'shiftamt' in ins.parts})", "u4", False))
    else:
        e.assign(d, Value(f"A.{ins.base}({e.array(a, k)})", k if ins.base == "brev" else "u4", False))


@instruction("bmsk")
def bmsk(e: Emitter, ins: Instr) -> None:
    """bmsk: a mask of bits."""
    d, a, b = ins.operands
    e.assign(d, Value(f"A.bit_mask({e.array(a, 'u4')}, {e.array(b, 'u4')}, {'clamp' in ins.parts})", "u4", False))


@instruction("szext")
def szext(e: Emitter, ins: Instr) -> None:
    """szext: extend from a bit."""
    d, a, b = ins.operands
    e.assign(
        d,
        Value(
            f"A.extend({e.array(a, 'u4')}, {e.array(b, 'u4')}, {'clamp' in ins.parts}, {_type(ins)[0] == 's'})",
            "u4",
            False,
        ),
    )


@instruction("sad")
def sad(e: Emitter, ins: Instr) -> None:
    """sad: sum of absolute difference."""
    kind = _type(ins)
    bits = _width(kind)
    k = f"{'i' if kind[0] == 's' else 'u'}{bits // 8}"
    d, a, b, c = ins.operands
    x, y = e.array(a, k), e.array(b, k)
    u = f"u{bits // 8}"
    e.assign(d, Value(f"{e.array(c, u)} + np.where({x} < {y}, {y} - {x}, {x} - {y}).view({u})", u, False))


@instruction("dp4a")
def dp4a(e: Emitter, ins: Instr) -> None:
    """dp4a: four byte products."""
    d, a, b, c = ins.operands
    sa, sb = (p == "s32" for p in ins.parts[1:3])
    e.assign(d, Value(f"A.dot4({e.array(a, 'u4')}, {e.array(b, 'u4')}, {e.array(c, 'u4')}, {sa}, {sb})", "u4", False))


@instruction("dp2a")
def dp2a(e: Emitter, ins: Instr) -> None:
    """dp2a: two products of halves and bytes."""
    d, a, b, c = ins.operands
    sa, sb = (p == "s32" for p in ins.parts[2:4])
    text = f"A.dot2({e.array(a, 'u4')}, {e.array(b, 'u4')}, {e.array(c, 'u4')}, {sa}, {sb}, {ins.parts[1] == 'hi'})"
    e.assign(d, Value(text, "u4", False))


_SYMBOLS = {"and": "&", "or": "|", "xor": "^"}
_SIGNLESS = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_SIGNED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def compare(e: Emitter, a: Operand, b: Operand, kind: str, test: str) -> Value:
    """The comparison of setp and set."""
    if kind[0] in "fb" and kind not in ("b16", "b32", "b64"):
        from cudal2gen.emulator.frontend.instructions import floating

        return floating.compare(e, a, b, kind, test)
    bits = _width(kind)
    if kind[0] == "s" and test not in ("eq", "ne"):
        x, y = e.signed(a, bits), e.signed(b, bits)
    else:
        x, y = e.raw(a, bits), e.raw(b, bits)
    symbol = _SIGNLESS.get(test) or _SIGNED.get(test)
    if symbol is None:
        raise e.fail()
    return Value(f"{x.text} {symbol} {y.text}", "p", x.uniform and y.uniform)


def _integer_compare(ins: Instr) -> bool:
    return ins.parts[-1] in _INTEGER


@instruction("setp", uniform=_integer_compare)
def setp(e: Emitter, ins: Instr) -> None:
    """setp with one or two destinations."""
    d, a, b = ins.operands[:3]
    test = ins.parts[1]
    combine = next((p for p in ins.parts[2:-1] if p in ("and", "or", "xor")), None)
    value = compare(e, a, b, ins.parts[-1], test)
    symbol = _SYMBOLS.get(combine or "", "")
    first, second = (d.first, d.second) if isinstance(d, Pair) else (d, None)
    other = e.predicate(ins.operands[3]) if combine else None
    uniform = value.uniform and (other is None or other.uniform)

    def result(text: str) -> Value:
        if other is None:
            return Value(text, "p", uniform)
        if uniform:
            return Value(f"bool({text}) {symbol} bool({other.text})", "p", True)
        left = f"K(int({text}), 0)" if value.uniform else f"({text})"
        right = f"K(int({other.text}), 0)" if other.uniform else f"({other.text})"
        return Value(f"{left} {symbol} {right}", "p", False)

    if second is None:
        e.assign(first, result(value.text))
        return
    held = e.temp(value.text)
    inverse = f"(not {held})" if value.uniform else f"~{held}"
    yes, no = e.temp(result(held).text), e.temp(result(inverse).text)
    e.assign(first, Value(yes, "p", uniform))
    if second.name != "_":
        e.assign(second, Value(no, "p", uniform))


@instruction("set")
def set_(e: Emitter, ins: Instr) -> None:
    """set: all ones (or 1.0) where the comparison holds."""
    d, a, b = ins.operands[:3]
    types = [
        p
        for p in ins.parts
        if (p[0] in "busf" and p[1:].replace("x2", "").isdigit()) or p in ("bf16", "bf16x2", "f16x2")
    ]
    if types[-1] in ("f16x2", "bf16x2"):
        from cudal2gen.emulator.frontend.instructions import floating

        return floating.set_packed(e, ins, types)
    dst, src = types[0], types[-1]
    test = ins.parts[1]
    combine = next((p for p in ins.parts[2:] if p in ("and", "or", "xor")), None)
    v = compare(e, a, b, src, test)
    text = f"K(int({v.text}), 0)" if v.uniform else f"({v.text})"
    if combine:
        text = f"({text} {_SYMBOLS[combine]} ({e.predicate_array(ins.operands[3])}))"
    bits = 16 if dst in ("f16", "bf16") else _width(dst)
    one = {"f16": 0x3C00, "bf16": 0x3F80, "f32": 0x3F800000}.get(dst, (1 << bits) - 1)
    k = f"u{bits // 8}"
    e.assign(d, Value(f"np.where({text}, {k}.type({one}), {k}.type(0))", k, False))
    return None


@instruction("selp", uniform=True)
def selp(e: Emitter, ins: Instr) -> None:
    """selp on any type."""
    kind = _type(ins)
    bits = 16 if kind == "bf16" else 32 if kind.endswith("x2") else _width(kind)
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
    bits = _width(kind)
    d, a, b, c = ins.operands
    test = f"{e.array(c, 'f4')} >= 0" if ins.parts[-1] == "f32" else f"{e.array(c, 'i4')} >= 0"
    k = f"u{bits // 8}"
    e.assign(d, Value(f"WHERE({test}, {e.array(a, k)}, {e.array(b, k)})", k, False))


def _simple_move(ins: Instr) -> bool:
    d, s = ins.operands
    return isinstance(d, Reg) and not isinstance(s, Vec)


@instruction("mov", uniform=_simple_move)
def mov(e: Emitter, ins: Instr) -> None:
    """mov, including packing and unpacking of vectors."""
    d, s = ins.operands
    kind = _type(ins)
    if kind == "pred":
        v = e.predicate(s)
        e.assign(d, v)
        return
    if isinstance(d, Vec):
        parts = d.items
        total = _total(e, s, kind)
        each = total // len(parts)
        name = e.temp(f"SPLIT({e.array(s, f'u{total // 8}')}, {len(parts)}, {each // 8}, M.size)")
        for i, part in enumerate(parts):
            if isinstance(part, Reg) and part.name != "_":
                e.assign(part, Value(f"{name}[{i}]", f"u{each // 8}", False))
        return
    if isinstance(s, Vec):
        total = _total(e, d, kind)
        each = total // len(s.items)
        texts = ", ".join(e.array(item, f"u{each // 8}") for item in s.items)
        e.assign(d, Value(f"JOIN(({texts}), {each // 8})", f"u{total // 8}", False))
        return
    bits = 32 if kind.endswith("x2") else 16 if kind == "bf16" else _width(kind)
    if isinstance(s, Reg) and isinstance(d, Reg) and d.name in e.lazy and e.guard is None:
        if s.name in e.lazy:
            e.line(f"{e.variable(d.name)} = {e.variable(s.name)}")
            return
        if e.graph.asynchronous and bits == e.bits(d.name):
            # A copy between registers is the compiler's, and does not count as an access to an accumulator.
            e.line(f"{e.variable(d.name)} = {e.array(s, f'u{bits // 8}')}")
            return
    e.assign(d, e.raw(s, bits))


def _total(e: Emitter, op: Operand, kind: str) -> int:
    total = e.operand_bits(op) or _width(kind)
    if total not in (16, 32, 64):
        raise e.fail()
    return total


@instruction("cvta", uniform=True)
def cvta(e: Emitter, ins: Instr) -> None:
    """Generic <-> shared, local, global, const, param addresses."""
    d, a = ins.operands
    if isinstance(a, Mem):
        a = Sym(a.base.name, a.offset) if isinstance(a.base, Sym) else a.base
    v = e.raw(a, 64)
    to = "to" in ins.parts
    space = next(
        (p.split(":")[0] for p in ins.parts if p.split(":")[0] in ("shared", "local", "global", "const", "param")), ""
    )
    window = {"shared": 1, "local": 2, "param": 3}.get(space, 0) << 56
    if not window:
        e.assign(d, v)
    elif to:
        e.assign(d, Value(f"{v.text} & 0xFFFFFFFF", "u8", v.uniform))
    else:
        e.assign(d, Value(f"{v.text} | {window}", "u8", v.uniform))


@instruction("isspacep", uniform=False)
def isspacep(e: Emitter, ins: Instr) -> None:
    """isspacep: which window an address lies in."""
    d, a = ins.operands
    space = next(p.split(":")[0] for p in ins.parts[1:])
    number = {"global": 0, "const": 0, "shared": 1, "local": 2, "param": 3}[space]
    e.assign(d, Value(f"({e.array(a, 'u8')} >> 56) == {number}", "p", False))


def _integer_cvt(ins: Instr) -> bool:
    return ins.parts[-1] in _INTEGER and ins.parts[-2] in _INTEGER and "sat" not in ins.parts


@instruction("cvt", uniform=_integer_cvt)
def cvt(e: Emitter, ins: Instr) -> None:
    """cvt between integers; the others are in ``floating``."""
    dst, src = ins.parts[-2], ins.parts[-1]
    if _integer_cvt(ins):
        d, a = ins.operands
        v = e.signed(a, _width(src)) if src[0] == "s" else e.raw(a, _width(src))
        if v.uniform:
            e.assign(d, Value(f"({v.text}) & {(1 << _width(dst)) - 1}", f"u{_width(dst) // 8}", True))
            if dst[0] == "s" and _width(dst) < (e.operand_bits(d) or 0):
                # A narrow signed result is sign-extended into a wider register.
                assert isinstance(d, Reg)
                name = e.variable(d.name)
                if e.is_uniform(d.name):
                    e.line(f"{name} = S{_width(dst)}({name}) & {(1 << (e.operand_bits(d) or 32)) - 1}")
                else:
                    raise e.fail("narrow signed conversion of a uniform value")
            return
        k = f"{'i' if dst[0] == 's' else 'u'}{_width(dst) // 8}"
        if _width(dst) == _width(src):
            e.assign(d, Value(f"{v.text}.view({k})" if v.kind != k else v.text, k, False))
        elif _width(dst) > _width(src):
            e.assign(d, Value(f"{v.text}.astype({'i' if src[0] == 's' else 'u'}{k[1:]}).view({k})", k, False))
        else:
            e.assign(d, Value(f"{v.text}.astype({k})", k, False))
        return
    from cudal2gen.emulator.frontend.instructions import floating

    floating.convert(e, ins)
