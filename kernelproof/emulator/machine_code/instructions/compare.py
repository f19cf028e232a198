"""Lowers comparisons of integers, and logic of predicates."""

from __future__ import annotations

from kernelproof.emulator.machine_code.lowering import Lowering, mnemonic
from kernelproof.sass import Instruction

_ORDERS = ("LT", "LE", "GT", "GE", "EQ", "NE")
_BOOLEANS = ("AND", "OR", "XOR")


@mnemonic("ISETP UISETP", "LT LE GT GE EQ NE U32 S64 U64 AND OR XOR EX")
def compare(low: Lowering, ins: Instruction) -> None:
    """``p = (a <> b) op r`` and ``q = !(a <> b) op r``, where <> is the comparison. ``.EX`` compares upper words; the
    last predicate is the result of the comparison of the lower ones."""
    p, q, a, b, r, *below = ins.operands
    order = next(part for part in ins.modifiers if part in _ORDERS)
    boolean = next(part for part in ins.modifiers if part in _BOOLEANS)
    kind = next((part.lower() for part in ins.modifiers if part in ("U32", "S64", "U64")), "s32")
    x, y = (low.pair(text) if kind[1:] == "64" else low.word(text) for text in (a, b))
    if "EX" in ins.modifiers:
        lower = low.predicate(below[0])
        equal = low.computed("setp.eq.u32", x, y, kind="pred")
        if order == "EQ":
            outcome = low.both_hold(equal, lower)
        elif order == "NE":
            outcome = low.either_holds(low.inverse(equal), lower)
        else:
            above = low.computed(f"setp.{order[0].lower()}t.{kind}", x, y, kind="pred")
            outcome = low.either_holds(above, low.both_hold(equal, lower))
    else:
        outcome = low.computed(f"setp.{order.lower()}.{kind}", x, y, kind="pred")
    low.set_comparison((p, q), outcome, boolean, r)


@mnemonic("PLOP3 UPLOP3", "LUT")
def predicate_logic(low: Lowering, ins: Instruction) -> None:
    """Two results, each by a truth table of the same three predicates. A source may be the sign of a register."""
    p, q, a, b, c, first, second = ins.operands
    sources = [_sign(low, text) if text.endswith(".SIGN") else low.predicate(text) for text in (a, b, c)]
    values = [_table(low, sources, int(table, 0)) for table in (first, second)]
    for name, value in zip((p, q), values, strict=True):
        low.set_predicate(name, value)


def _sign(low: Lowering, text: str) -> str:
    """Whether a register (``R9.SIGN``) is negative."""
    return low.computed("setp.lt.s32", low.word(text.removesuffix(".SIGN")), "0", kind="pred")


def _table(low: Lowering, sources: list[str], table: int) -> str:
    """The predicate of a truth table, by Shannon's expansion: the table's half for a true first source, or its half for
    a false one."""
    if not sources:
        return str(table & 1)
    head, *rest = sources
    half = 1 << len(rest)
    if head in ("0", "1"):
        return _table(low, rest, table >> half if head == "1" else table)
    yes, no = _table(low, rest, table >> half), _table(low, rest, table)
    if yes == no:
        return yes
    return low.either_holds(low.both_hold(head, yes), low.both_hold(low.inverse(head), no))
