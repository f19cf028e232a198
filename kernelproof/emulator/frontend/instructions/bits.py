"""Translates PTX's instructions on bits (logic, shifts, bit fields, dot products of bytes) to Python text.

In this text, ``A`` is the package ``arithmetic``, whose functions have the details of each instruction.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernelproof.emulator.frontend.emitter import Emitter, Value
from kernelproof.emulator.frontend.instruction import instruction
from kernelproof.emulator.frontend.instructions.integer import binary, width_of
from kernelproof.emulator.frontend.mutation_operators import Change, Statement
from kernelproof.emulator.frontend.ptx import Imm, Instr, Pair

# PTX logic instruction -> operator of Python.
LOGIC_OPERATORS = {"and": "&", "or": "|", "xor": "^"}


def _keep_rank_bits(s: Statement) -> Iterator[Change]:
    """A mutation of code that makes descriptors: an address is not masked. The descriptor then contains bits of the
    CTA's rank in its cluster, which are above the 18 bits of the address."""
    mask = s.ins.operands[2]
    # The masks of 18 bits, of which those below the alignment of the operand may be missing.
    if isinstance(mask, Imm) and 0x3F000 <= mask.value <= 0x3FFFF:
        d, a, _ = s.operands
        yield s.become("unmask", f"mov.{s.ins.parts[-1]} {d}, {a};")


@instruction("and", uniform=True, mutations=(_keep_rank_bits,))
@instruction("or", "xor", uniform=True)
def logic(e: Emitter, ins: Instr) -> None:
    """and, or, xor on words and predicates."""
    symbol = LOGIC_OPERATORS[ins.base]
    if ins.parts[-1] == "pred":
        d, a, b = ins.operands
        x, y = e.predicate(a), e.predicate(b)
        if x.uniform and y.uniform:
            e.assign(d, Value(f"bool({x.text}) {symbol} bool({y.text})", "p", True))
        else:
            e.assign(d, Value(f"({e.predicate_array(a)}) {symbol} ({e.predicate_array(b)})", "p", False))
        return
    binary(e, ins, f"{{a}} {symbol} {{b}}")


@instruction("not", "cnot", uniform=True)
def invert(e: Emitter, ins: Instr) -> None:
    """not and cnot."""
    d, a = ins.operands
    if ins.parts[-1] == "pred":
        x = e.predicate(a)
        e.assign(d, Value(f"not {x.text}" if x.uniform else f"~({x.text})", "p", x.uniform))
        return
    bits = width_of(ins.parts[-1])
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
    kind = ins.parts[-1]
    bits = width_of(kind)
    d, a, b = ins.operands
    v = e.signed(a, bits) if kind[0] == "s" else e.raw(a, bits)
    n = e.raw(b, 32)
    symbol = "<<" if ins.base == "shl" else ">>"
    u = f"u{bits // 8}"
    if v.uniform and n.uniform:
        count = str(min(b.value & 0xFFFFFFFF, bits)) if isinstance(b, Imm) else f"min({n.text}, {bits})"
        e.assign(d, Value(f"({v.text} {symbol} {count}) & {(1 << bits) - 1}", u, True))
    elif not isinstance(b, Imm):
        e.assign(d, Value(f"A.{ins.base}({e.array(a, v.kind)}, {n.text})", v.kind, False))
    elif b.value & 0xFFFFFFFF < bits:
        e.assign(d, Value(f"{v.text} {symbol} {b.value & 0xFFFFFFFF}", v.kind, False))
    elif ins.base == "shr" and kind[0] == "s":
        e.assign(d, Value(f"{v.text} >> {bits - 1}", v.kind, False))
    else:
        e.assign(d, Value("0", u, True))


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
    kind = ins.parts[-1]
    k = f"{'i' if kind[0] == 's' else 'u'}{width_of(kind) // 8}"
    d, a, b, c = ins.operands
    e.assign(d, Value(f"A.bfe({e.array(a, k)}, {e.array(b, 'u4')}, {e.array(c, 'u4')})", f"u{k[1:]}", False))


@instruction("bfi")
def bfi(e: Emitter, ins: Instr) -> None:
    """bfi: bit field insert."""
    u = f"u{width_of(ins.parts[-1]) // 8}"
    d, a, b, c, f = ins.operands
    e.assign(d, Value(f"A.bfi({e.array(a, u)}, {e.array(b, u)}, {e.array(c, 'u4')}, {e.array(f, 'u4')})", u, False))


@instruction("popc", "clz", "brev", "bfind")
def count(e: Emitter, ins: Instr) -> None:
    """popc, clz, brev, bfind."""
    kind = ins.parts[-1]
    k = f"{'i' if kind[0] == 's' else 'u'}{width_of(kind) // 8}"
    d, a = ins.operands
    if ins.base == "bfind":
        e.assign(d, Value(f"A.bfind({e.array(a, k)}, {'shiftamt' in ins.parts})", "u4", False))
    else:
        e.assign(d, Value(f"A.{ins.base}({e.array(a, k)})", k if ins.base == "brev" else "u4", False))


@instruction("fns")
def fns(e: Emitter, ins: Instr) -> None:
    """fns: the n-th set bit."""
    d, *operands = ins.operands
    e.assign(d, Value(f"A.nth_set_bit({', '.join(e.array(op, 'u4') for op in operands)})", "u4", False))


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
            f"A.extend({e.array(a, 'u4')}, {e.array(b, 'u4')}, {'clamp' in ins.parts}, {ins.parts[-1][0] == 's'})",
            "u4",
            False,
        ),
    )


@instruction("sad")
def sad(e: Emitter, ins: Instr) -> None:
    """sad: sum of absolute difference."""
    kind = ins.parts[-1]
    bits = width_of(kind)
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
