"""Lowers wgmma (HGMMA of 16-bit floats and TF32, IGMMA of integers, QGMMA of FP8), and its fences and groups.

An example is ``HGMMA.64x64x16.F32 R24, gdesc[UR8].tnspB, R24, !UPT, gsb0``. Its operands are, in this order:

- the first register of the result, R24;
- A, if it is in registers: the first of four;
- the first of four uniform registers, which hold the descriptors of A (if it is in shared memory) and of B, with the
  modifiers tnspA, tnspB, negA and negB;
- the first register of the sums to which products are added. It must be that of the result; RZ is allowed if products
  are not added;
- a predicate: whether products are added to the sums. If it is missing, they are;
- ``gsb0``, if the product ends a commit group, which has this product and those before it.
"""

from __future__ import annotations

import re

from kernelproof.emulator.machine_code.lowering import Lowering, is_predicate, is_zero, mnemonic
from kernelproof.emulator.machine_code.operands import Register, operand
from kernelproof.sass import Instruction

_DESCRIPTORS = re.compile(r"gdesc\[(UR\d+)\]((?:\.\w+)*)$")
_SHAPE = re.compile(r"64x(\d+)x(\d+)$")
_SIZES = " ".join(f"64x{8 * n}x{k}" for n in range(1, 33) for k in (8, 16, 32))
_GROUP = "gsb0"  # the scoreboard that counts groups of products


@mnemonic("HGMMA", f"{_SIZES} F16 F32 BF16 TF32")
@mnemonic("IGMMA", f"{_SIZES} S8 U8 SAT")
@mnemonic("QGMMA", f"{_SIZES} F16 F32 E4M3 E5M2")
def multiply(low: Lowering, ins: Instruction) -> None:
    """wgmma.mma_async."""
    shape, *kinds = ins.modifiers
    match = _SHAPE.match(shape)
    assert match is not None
    columns, depth = int(match[1]), int(match[2])
    kinds = [kind.lower() for kind in kinds if kind != "SAT"]
    sums = "s32" if ins.name == "IGMMA" else kinds.pop(0)
    left, right = (kinds or ["f16"])[0], (kinds or ["f16"])[-1]
    saturated = ".satfinite" if "SAT" in ins.modifiers else ""
    op = f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.{sums}.{left}.{right}{saturated}"
    result, *rest = ins.operands
    # The operand with the descriptors. A comes before it if A is in registers.
    descriptor_index = next(i for i, text in enumerate(rest) if text.startswith("gdesc"))
    descriptor_match = _DESCRIPTORS.match(rest[descriptor_index])
    assert descriptor_match is not None
    first, parts = operand(descriptor_match[1]), descriptor_match[2].split(".")
    assert isinstance(first, Register)
    a_is_shared = descriptor_index == 0
    if not a_is_shared and rest[0][0] == "-":
        parts.append("negA")
    a = low.join(low.bits(first), low.bits(first, 1)) if a_is_shared else low.words(rest[0].lstrip("-"), 4)
    b = low.join(low.bits(first, 2), low.bits(first, 3))
    old, *options = rest[descriptor_index + 1 :]
    accumulates = low.unnegated(next((low.predicate(text) for text in options if is_predicate(text)), "1"))
    if not (is_zero(old) and accumulates == "0") and old != result:
        raise low.refusal("sums in other registers than the result are not modelled")
    options = [text for text in options if not is_predicate(text)]
    if set(options) - {_GROUP}:
        raise low.refusal(f"{options[0]} is not modelled")
    count = columns // (4 if sums == "f16" else 2)
    low.emit(op, low.targets(result, count), a, b, accumulates, *_trailing(parts, sums, depth, a_is_shared))
    if options:
        low.emit("wgmma.commit_group.sync.aligned")


def _trailing(parts: list[str], sums: str, depth: int, a_is_shared: bool) -> list[str]:
    """The last operands, if the PTX form has them: the signs of A and B, and whether they are M- or N-major."""
    if sums == "s32":
        return []
    signs = ["-1" if f"neg{which}" in parts else "1" for which in "AB"]
    transposed = [str(int(f"tnsp{which}" in parts)) for which in "AB"] if depth == 16 else []
    return signs + (transposed if a_is_shared else transposed[1:])


@mnemonic("WARPGROUP", "ARRIVE DEPBAR LE")
def order(low: Lowering, ins: Instruction) -> None:
    """wgmma.fence, and wgmma.wait_group."""
    if "ARRIVE" in ins.modifiers:
        low.emit("wgmma.fence.sync.aligned")
        return
    board, count = ins.operands
    assert board == _GROUP
    low.emit("wgmma.wait_group.sync.aligned", str(int(count, 0)))
