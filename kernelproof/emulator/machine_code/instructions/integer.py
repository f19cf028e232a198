"""Lowers integer arithmetic, shifts and logic of words.

An addition may write its carry to a predicate, by which numbers of 64 bits and more are added word by word. With a
carry, a negated source counts as its complement plus one, as in the adder.
"""

from __future__ import annotations

from kernelproof.emulator.machine_code.lowering import Lowering, is_predicate, is_zero, mnemonic
from kernelproof.emulator.machine_code.operands import Constant, Register, operand
from kernelproof.emulator.memory.shared import WINDOW_START
from kernelproof.sass import Instruction


def _split_predicates(operands: tuple[str, ...], results: int) -> tuple[str, list[str], list[str], list[str]]:
    """The result, its carries out (at most ``results``), the sources, and the carries in."""
    rest = list(operands[1:])
    carries: list[str] = []
    while len(carries) < results and rest and is_predicate(rest[0]):
        carries.append(rest.pop(0))
    while carries and carries[-1] in ("PT", "UPT"):  # later machine code also names carries that are not used
        carries.pop()
    inputs: list[str] = []
    while rest and is_predicate(rest[-1]):
        inputs.insert(0, rest.pop())
    return operands[0], carries, rest, inputs


@mnemonic("IADD3 UIADD3", "X 64")
def add3(low: Lowering, ins: Instruction) -> None:
    """The sum of three words and, with ``.X``, of up to two carries. Its two carries out say whether the sum carries at
    least 1, and at least 2."""
    if "64" in ins.modifiers:
        _add_pairs(low, ins)
        return
    result, carries, sources, inputs = _split_predicates(ins.operands, 2)
    if not carries:
        total = low.word(sources[0])
        for source in sources[1:]:
            total = _plus(low, total, low.word(source))
        for p in inputs:
            total = _plus(low, total, low.number(low.predicate(p)))
        low.set(result, total)
        return
    total = "0"
    for source in sources:
        total = _plus(low, total, _unsigned(low, source), "s64")
    for p in inputs:
        total = _plus(low, total, low.number(low.predicate(p)), "s64")
    low.set(result, low.computed("cvt.u32.u64", total) if not total.isdigit() else str(int(total) & 0xFFFFFFFF))
    for count, p in enumerate(carries, 1):
        low.set_predicate(p, _at_least(low, total, count << 32))


def _add_pairs(low: Lowering, ins: Instruction) -> None:
    """The sum of numbers of 64 bits."""
    result, carries, sources, inputs = _split_predicates(ins.operands, 2)
    if carries or any(low.predicate(p) != "0" for p in inputs):
        raise low.refusal("carries of a sum of 64 bits are not modelled")
    total = "0"
    for source in sources:
        total = _plus64(low, total, low.pair(source))
    low.set_pair(result, total)


@mnemonic("IADD UIADD", "64")
def add_pair(low: Lowering, ins: Instruction) -> None:
    """The sum of two numbers of 64 bits."""
    if "64" not in ins.modifiers:
        raise low.refusal("a sum of two words is not modelled")
    _add_pairs(low, ins)


@mnemonic("VIADD UVIADD", "16x2 S32 ISAT")
def add2(low: Lowering, ins: Instruction) -> None:
    """The sum of two words or, with ``.16x2``, of their halves. ``.ISAT`` keeps it within the signed numbers."""
    result, a, b = ins.operands
    if "ISAT" in ins.modifiers:
        assert not a.startswith("-")
        op = "sub.sat.s32" if b.startswith("-") else "add.sat.s32"
        low.set(result, low.computed(op, low.word(a), low.word(b.removeprefix("-"))))
        return
    if "16x2" in ins.modifiers:
        low.set(result, low.computed("add.u16x2", *(low.computed("mov.b32", low.word(text)) for text in (a, b))))
        return
    low.set(result, _plus(low, low.word(a), low.word(b)))


def _plus(low: Lowering, a: str, b: str, kind: str = "s32") -> str:
    """The sum of two sources; literals are folded."""
    if "0" in (a, b):
        # The other source is the sum, extended to 64 bits if that is the type.
        a, b = (b, "0") if a == "0" else (a, b)
        return a if b == "0" and (kind == "s32" or a.isdigit() or low.kinds[a] == "b64") else _widened(low, a)
    if a.isdigit() and b.isdigit():
        return str(int(a) + int(b) & (0xFFFFFFFF if kind == "s32" else (1 << 64) - 1))
    if kind == "s64":
        a, b = _widened(low, a), _widened(low, b)
    return low.computed(f"add.{kind}", a, b, kind="b64" if kind == "s64" else "b32")


def _widened(low: Lowering, source: str) -> str:
    """A source as 64 bits, extended by zeros."""
    return source if source.isdigit() or low.kinds[source] == "b64" else low.computed("cvt.u64.u32", source, kind="b64")


def _unsigned(low: Lowering, text: str) -> str:
    """A source as the adder takes it, in 64 bits: a negated one is its complement plus one."""
    source = operand(text)
    if not isinstance(source, Register | Constant) or not source.signs:
        return _widened(low, low.word(text))
    bits = low.bits(source)
    complement = str(~int(bits) & 0xFFFFFFFF) if bits.isdigit() else low.computed("not.b32", bits)
    wide = _widened(low, complement)
    return wide if source.signs == "~" else _plus(low, wide, "1", "s64")


def _at_least(low: Lowering, value: str, bound: int) -> str:
    """A predicate: is an unsigned value of 64 bits at least a bound?"""
    if value.isdigit():
        return str(int(int(value) >= bound))
    return low.computed("setp.ge.u64", value, str(bound), kind="pred")


@mnemonic("IMAD UIMAD", "MOV IADD SHL U32 X WIDE HI")
def multiply_add(low: Lowering, ins: Instruction) -> None:
    """a * b + c. ``.MOV``, ``.IADD`` and ``.SHL`` are nvdisasm's names for products by 0, 1 or a power of two."""
    if "WIDE" in ins.modifiers or "HI" in ins.modifiers:
        _multiply_wide(low, ins)
        return
    result, carries, (a, b, c), inputs = _split_predicates(ins.operands, 1)
    if carries:
        raise low.refusal("a carry out of a product of one word is not modelled")
    total = _product(low, low.word(a), low.word(b), low.word(c))
    for p in inputs:
        total = _plus(low, total, low.number(low.predicate(p)))
    low.set(result, total)


def _product(low: Lowering, a: str, b: str, c: str) -> str:
    """a * b + c, by simpler instructions where literals allow that."""
    if "0" in (a, b):
        return c
    if "1" in (a, b):
        return _plus(low, b if a == "1" else a, c)
    if b.isdigit() and int(b).bit_count() == 1 and not a.isdigit():
        return _plus(low, low.computed("shl.b32", a, str(int(b).bit_length() - 1)), c)
    if c == "0":
        return low.computed("mul.lo.s32", a, b)
    return low.computed("mad.lo.s32", a, b, c)


def _multiply_wide(low: Lowering, ins: Instruction) -> None:
    """The product of two words plus a number of 64 bits; with ``.HI`` the upper word of that."""
    result, carries, (a, b, c), inputs = _split_predicates(ins.operands, 1)
    kind = "u32" if "U32" in ins.modifiers else "s32"
    x, y = low.word(a), low.word(b)
    product = "0" if "0" in (x, y) else low.computed(f"mul.wide.{kind}", x, y, kind="b64")
    addend = low.pair(c)
    total = _plus64(low, product, addend)
    for p in inputs:
        total = _plus64(low, total, _widened(low, low.number(low.predicate(p))))
    if "HI" not in ins.modifiers:
        low.set_pair(result, total)
    elif total.isdigit():
        low.set(result, str(int(total) >> 32))
    else:
        low.emit("mov.b64", f"{{{low.temp()}, {low.target(result)}}}", total)
    for p in carries:
        if inputs:
            raise low.refusal("carries into and out of a wide product are not modelled together")
        carried = "0" if "0" in (product, addend) else low.computed("setp.lt.u64", total, addend, kind="pred")
        low.set_predicate(p, carried)


def _plus64(low: Lowering, a: str, b: str) -> str:
    """The sum of two sources of 64 bits."""
    if "0" in (a, b):
        return b if a == "0" else a
    return low.computed("add.s64", a, b, kind="b64")


@mnemonic("LEA ULEA", "HI X SX32")
def shift_add(low: Lowering, ins: Instruction) -> None:
    """(a << s) + b. With ``.HI``, the upper word of (c:a << s), plus b; with ``.SX32``, c is the sign extension of
    a."""
    result, carries, sources, inputs = _split_predicates(ins.operands, 1)
    if "HI" in ins.modifiers:
        if "SX32" in ins.modifiers:
            a, b, s = sources
            shift = 32 - int(s, 0)
            part = low.computed("shr.s32", low.word(a), str(shift)) if shift else low.word(a)
        else:
            a, b, c, s = sources
            part = _upper_word_shifted_left(low, low.word(a), low.word(c), int(s, 0))
    else:
        a, b, s = sources
        part = low.computed("shl.b32", low.word(a), s) if int(s, 0) and not is_zero(a) else low.word(a)
    if not carries:
        total = _plus(low, part, low.word(b))
        for p in inputs:
            total = _plus(low, total, low.number(low.predicate(p)))
        low.set(result, total)
        return
    total = _plus(low, _widened(low, part), _unsigned(low, b), "s64")
    for p in inputs:
        total = _plus(low, total, low.number(low.predicate(p)), "s64")
    low.set(result, str(int(total) & 0xFFFFFFFF) if total.isdigit() else low.computed("cvt.u32.u64", total))
    low.set_predicate(carries[0], _at_least(low, total, 1 << 32))


def _upper_word_shifted_left(low: Lowering, a: str, c: str, shift: int) -> str:
    """The upper word of c:a << shift."""
    if shift == 0:
        return c
    bottom = "0" if a == "0" else low.computed("shr.u32", a, str(32 - shift))
    top = "0" if c == "0" else low.computed("shl.b32", c, str(shift))
    if "0" in (top, bottom):
        return top if bottom == "0" else bottom
    return low.computed("or.b32", top, bottom)


@mnemonic("SHF USHF", "L R W U32 S32 U64 S64 HI")
def funnel_shift(low: Lowering, ins: Instruction) -> None:
    """One word of the 64 bits c:a after a shift (``.L`` or ``.R``) by a count: with ``.HI`` the upper word, else the
    lower one. With ``.W`` the count is taken modulo the width of the type, 32 or 64 bits. Otherwise counts beyond the
    width shift everything out."""
    result, a, count, c = ins.operands
    left, high, wraps = "L" in ins.modifiers, "HI" in ins.modifiers, "W" in ins.modifiers
    kind = next((part for part in ins.modifiers if part[1:] in ("32", "64")), "U32")
    shift_count = low.word(count)
    if wraps:
        most = 31 if kind[1:] == "32" else 63
        shift_count = (
            str(int(shift_count) & most) if shift_count.isdigit() else low.computed("and.b32", shift_count, str(most))
        )
    if left != high:  # one word is enough: the lower one of a left shift, the upper one of a right shift
        word = low.word(a if left else c)
        op = "shl.b32" if left else f"shr.{kind[0].lower()}32"
        low.set(result, "0" if word == "0" else low.computed(op, word, shift_count))
        return
    value = low.join(low.word(a), low.word(c))
    # A shift of c:a by 32 moves all of one word out; larger counts of the 32-bit forms do the same.
    if kind[1:] == "32" and not wraps:
        shift_count = (
            str(min(int(shift_count), 32)) if shift_count.isdigit() else low.computed("min.u32", shift_count, "32")
        )
    shifted = low.computed("shl.b64" if left else f"shr.{kind[0].lower()}64", value, shift_count, kind="b64")
    halves = (low.temp(), low.target(result)) if high else (low.target(result), low.temp())
    low.emit("mov.b64", f"{{{', '.join(halves)}}}", shifted)


@mnemonic("LOP3 ULOP3", "LUT PAND")
def logic3(low: Lowering, ins: Instruction) -> None:
    """The bits of three words by a truth table. A predicate result says whether any bit is set, combined with the last
    predicate by OR (with ``.PAND`` by AND)."""
    operands = list(ins.operands)
    p = operands.pop(0) if is_predicate(operands[0]) else ""
    result, a, b, c, table, other = operands
    value = _table(low, low.word(a), low.word(b), low.word(c), int(table, 0))
    if b == "0xffffff" and any(
        query.name == "QSPC" and "S" in query.modifiers and query.operands[-1] == f"[{a}]" for query in low.preceding(4)
    ):
        # This converts a generic address, which was found to lie in shared memory, to a shared address. In some machine
        # code, shared memory begins at another address than in the emulator.
        value = low.computed("sub.s32", value, str(WINDOW_START - low.bank.shared))
    low.set(result, value)
    if p:
        any_bit = str(int(int(value) != 0)) if value.isdigit() else low.computed("setp.ne.u32", value, "0", kind="pred")
        low.set_predicate(p, low.logic("AND" if "PAND" in ins.modifiers else "OR", any_bit, low.predicate(other)))


# The truth tables of the sources themselves: bit 4a + 2b + c of a table is its value for bits a, b and c.
_A, _B, _C = 0xF0, 0xCC, 0xAA


def _table(low: Lowering, a: str, b: str, c: str, table: int) -> str:
    """The bits of three words by a truth table. Simpler instructions are used if sources are zero or do not matter."""
    # If a source is zero, copy the part of the table for 0 to the part for 1, so that the source does not matter.
    if a == "0":
        table = (table & 0x0F) * 0x11
    if b == "0":
        table = (table & 0x33) * 0x05
    if c == "0":
        table = (table & 0x55) * 0x03
    if table in (0, 0xFF):
        return "0" if table == 0 else str(0xFFFFFFFF)
    for source, own in ((a, _A), (b, _B), (c, _C)):
        if table == own:
            return source
        if table == own ^ 0xFF:
            return low.computed("not.b32", source)
    for (x, own_x), (y, own_y) in (((a, _A), (b, _B)), ((a, _A), (c, _C)), ((b, _B), (c, _C))):
        for op, bits in (("and", own_x & own_y), ("or", own_x | own_y), ("xor", own_x ^ own_y)):
            if table == bits:
                return low.computed(f"{op}.b32", x, y)
    return low.computed("lop3.b32", a, b, c, str(table))


@mnemonic("IMNMX UIMNMX VIMNMX UVIMNMX", "U32 S32 S64 U64 U16x2 S16x2 RELU")
def minimum(low: Lowering, ins: Instruction) -> None:
    """The minimum of two numbers if the predicate holds, else the maximum. With ``.RELU``, at least zero."""
    kind = next((part.lower() for part in ins.modifiers if part != "RELU"), "s32")
    # Later machine code also names predicates that are not used: some next to the result, and one after the order.
    number_positions = [i for i, text in enumerate(ins.operands) if not is_predicate(text)]
    result, a, b = (ins.operands[i] for i in number_positions)
    order, *others = ins.operands[number_positions[2] + 1 :]
    if set(ins.operands[: number_positions[1]]) - {result, "PT", "UPT"} or set(others) - {"!PT", "!UPT"}:
        raise low.refusal("predicates of a minimum are not modelled")
    if kind[1:] == "64":
        low.set_pair(result, _extreme(low, kind, low.pair(a), low.pair(b), low.predicate(order)))
        return
    value = _extreme(low, kind, low.word(a), low.word(b), low.predicate(order))
    if kind == "s16x2" and "RELU" in ins.modifiers:
        low.set(result, low.computed("max.s16x2", value, "0"))
        return
    low.set(result, _at_least_zero(low, ins, value))


@mnemonic("VIMNMX3 UVIMNMX3", "U32 RELU")
def minimum3(low: Lowering, ins: Instruction) -> None:
    """The minimum of three numbers if the predicate holds, else the maximum. With ``.RELU``, at least zero."""
    result, *sources, order = ins.operands
    kind = "u32" if "U32" in ins.modifiers else "s32"
    value, *others = map(low.word, sources)
    for other in others:
        value = _extreme(low, kind, value, other, low.predicate(order))
    low.set(result, _at_least_zero(low, ins, value))


@mnemonic("VIADDMNMX UVIADDMNMX", "U32 RELU")
def add_minimum(low: Lowering, ins: Instruction) -> None:
    """The minimum of a sum and a third word if the predicate holds, else the maximum."""
    result, a, b, c, order = ins.operands
    kind = "u32" if "U32" in ins.modifiers else "s32"
    total = _plus(low, low.word(a), low.word(b))
    low.set(result, _at_least_zero(low, ins, _extreme(low, kind, total, low.word(c), low.predicate(order))))


def _extreme(low: Lowering, kind: str, a: str, b: str, order: str) -> str:
    """The minimum of two sources where ``order`` holds, else the maximum."""
    size = "b64" if kind[1:] == "64" else "b32"
    if order in ("0", "1"):
        return low.computed(f"{'min' if order == '1' else 'max'}.{kind}", a, b, kind=size)
    least, most = (low.computed(f"{op}.{kind}", a, b, kind=size) for op in ("min", "max"))
    if order[0] == "!":
        least, most, order = most, least, order[1:]
    return low.computed(f"selp.{size}", least, most, order, kind=size)


def _at_least_zero(low: Lowering, ins: Instruction, value: str) -> str:
    """A value; with ``.RELU``, at least zero."""
    return low.computed("max.s32", value, "0") if "RELU" in ins.modifiers else value


@mnemonic("IABS")
def absolute(low: Lowering, ins: Instruction) -> None:
    """The magnitude of a word."""
    low.set(ins.operands[0], low.computed("abs.s32", low.word(ins.operands[1])))


@mnemonic("SGXT USGXT", "U32 W")
def extend(low: Lowering, ins: Instruction) -> None:
    """The lower bits of a word, as many as the second source says, extended by zeros (``.U32``) or by their sign. With
    ``.W`` that number is taken modulo 32, else at most 32."""
    result, a, count = ins.operands
    kind, mode = "u32" if "U32" in ins.modifiers else "s32", "wrap" if "W" in ins.modifiers else "clamp"
    low.set(result, low.computed(f"szext.{mode}.{kind}", low.word(a), low.word(count)))


@mnemonic("BMSK UBMSK", "W")
def mask(low: Lowering, ins: Instruction) -> None:
    """A mask whose set bits begin at the position in the first source; the second source is their number. With ``.W``
    both are taken modulo 32, else at most 32."""
    result, position, count = ins.operands
    mode = "wrap" if "W" in ins.modifiers else "clamp"
    low.set(result, low.computed(f"bmsk.{mode}.b32", low.word(position), low.word(count)))


@mnemonic("POPC UPOPC")
def count_bits(low: Lowering, ins: Instruction) -> None:
    """The number of bits that are set."""
    low.set(ins.operands[0], low.computed("popc.b32", low.word(ins.operands[1])))


@mnemonic("BREV UBREV")
def reverse(low: Lowering, ins: Instruction) -> None:
    """The bits of a word in the opposite order."""
    low.set(ins.operands[0], low.computed("brev.b32", low.word(ins.operands[1])))


@mnemonic("FLO UFLO", "U32 SH")
def leading_bit(low: Lowering, ins: Instruction) -> None:
    """The position of the leading one (of a negative number: of the leading zero). With ``.SH``, the shift by which it
    becomes the highest bit."""
    kind = "u32" if "U32" in ins.modifiers else "s32"
    shift = ".shiftamt" if "SH" in ins.modifiers else ""
    low.set(ins.operands[0], low.computed(f"bfind{shift}.{kind}", low.word(ins.operands[-1])))
