"""Translates SIMD video instructions, and integer arithmetic on pairs of half-words, to Python text.

In this text, ``A`` is the package ``arithmetic``.
"""

from __future__ import annotations

from kernelproof.emulator.frontend.emitter import Emitter, Value
from kernelproof.emulator.frontend.instruction import instruction
from kernelproof.emulator.frontend.ptx import Instr

_OPERATIONS = ("vadd", "vsub", "vavrg", "vabsdiff", "vmin", "vmax", "vset")


def _has_pairs(parts: tuple[str, ...]) -> bool:
    """Are the operands pairs of 16-bit integers?"""
    # The modifier .relu may follow the type.
    return not {"u16x2", "s16x2"}.isdisjoint(parts)


@instruction("add", "min", "max", serves=_has_pairs)
def pairwise(e: Emitter, ins: Instr) -> None:
    """add, min and max of u16x2 and s16x2."""
    d, a, b = ins.operands
    signed, relu = "s16x2" in ins.parts, "relu" in ins.parts
    text = f"A.pairwise({e.array(a, 'u4')}, {e.array(b, 'u4')}, {ins.base!r}, {signed}, {relu})"
    e.assign(d, Value(text, "u4", False))


@instruction(*(f"{operation}{count}" for operation in _OPERATIONS for count in (2, 4)))
def video(e: Emitter, ins: Instr) -> None:
    """vadd2, vadd4, vsub2, vsub4, vavrg2, vavrg4, vabsdiff2, vabsdiff4, vmin2, vmin4, vmax2, vmax4, vset2 and vset4 of
    whole words, without selectors."""
    d, a, b, c = ins.operands
    operation, count = ins.base[1:-1], int(ins.base[-1])
    signed = [part == "s32" for part in ins.parts if part in ("s32", "u32")]  # of the result, a and b
    # vset has an order (such as lt) in place of an operation, and its result, 0 or 1, has no type.
    if operation == "set":
        operation, signed = next(part for part in ins.parts[1:] if part not in ("s32", "u32", "add")), [False, *signed]
    words = ", ".join(e.array(op, "u4") for op in (a, b, c))
    flags = f"{tuple(signed)}, {'sat' in ins.parts}, {'add' in ins.parts[1:]}"
    e.assign(d, Value(f"A.video({words}, {count}, {operation!r}, {flags})", "u4", False))
