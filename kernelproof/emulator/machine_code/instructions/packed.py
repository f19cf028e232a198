"""Lowers dot products of bytes and halves, sums of differences, and comparisons of two halves in a register."""

from __future__ import annotations

from kernelproof.emulator.machine_code.instructions.floating import half_sources, xorsign
from kernelproof.emulator.machine_code.lowering import Lowering, mnemonic
from kernelproof.emulator.machine_code.modifiers import ORDERS, comparison
from kernelproof.sass import Instruction


@mnemonic("IDP", "4A 2A LO HI S8 U8 S16 U16")
def dot(low: Lowering, ins: Instruction) -> None:
    """dp4a, and dp2a of the lower or upper two bytes of the second source."""
    types = [f"{part[0].lower()}32" for part in ins.modifiers if part[0] in "SU"]
    kind = "dp4a" if "4A" in ins.modifiers else "dp2a.hi" if "HI" in ins.modifiers else "dp2a.lo"
    result, *sources = ins.operands
    low.set(result, low.computed(f"{kind}.{'.'.join(types)}", *map(low.word, sources)))


@mnemonic("VABSDIFF", "U32")
def difference(low: Lowering, ins: Instruction) -> None:
    """sad: the magnitude of a difference, plus the third source."""
    result, *sources = ins.operands
    low.set(result, low.computed(f"sad.{'u32' if 'U32' in ins.modifiers else 's32'}", *map(low.word, sources)))


@mnemonic("VABSDIFF4", "U8 S8 ACC")
def byte_differences(low: Lowering, ins: Instruction) -> None:
    """vabsdiff4: the magnitudes of the differences of four bytes or, with ``.ACC``, their sum plus the last source."""
    result, *sources = ins.operands
    kind = "s32" if "S8" in ins.modifiers else "u32"
    option = ".add" if "ACC" in ins.modifiers else ""
    op = f"vabsdiff4.u32.{kind}.{kind}{option}"
    low.set(result, low.computed(op, *map(low.word, sources)))


@mnemonic("HSETP2", f"{ORDERS} AND OR XOR BF16_V2 FTZ")
def compare(low: Lowering, ins: Instruction) -> None:
    """Comparisons of the lower and of the upper halves, each combined with a predicate."""
    kind = "bf16x2" if "BF16_V2" in ins.modifiers else "f16x2"
    order, boolean = comparison(ins)
    p, q, *texts, r = ins.operands
    pair = low.temp("pred"), low.temp("pred")
    ftz = ".ftz" if "FTZ" in ins.modifiers else ""
    low.emit(f"setp.{order}{ftz}.{kind}", f"{pair[0]}|{pair[1]}", *_pairs(low, texts, kind))
    value = low.predicate(r)
    for result, outcome in zip((p, q), pair, strict=True):
        low.set_predicate(result, low.logic(boolean, outcome, value))


@mnemonic("HSET2", f"{ORDERS} AND OR XOR BF BF16_V2 FTZ")
def compare_to_halves(low: Lowering, ins: Instruction) -> None:
    """Comparisons whose results are halves of a word: 0 if they do not hold, else 1.0 with ``.BF`` or all ones."""
    kind = "bf16x2" if "BF16_V2" in ins.modifiers else "f16x2"
    order, _ = comparison(ins)
    result, *texts, r = ins.operands
    if low.predicate(r) != "1":
        raise low.refusal("a predicate in this comparison is not modelled")
    ftz = ".ftz" if "FTZ" in ins.modifiers else ""
    result_kind = kind if "BF" in ins.modifiers else "u32"
    low.set(result, low.computed(f"set.{order}{ftz}.{result_kind}.{kind}", *_pairs(low, texts, kind)))


@mnemonic("HMNMX2", "NAN BF16_V2 FTZ XORSIGN")
def minimum(low: Lowering, ins: Instruction) -> None:
    """The minima of two pairs of halves if the predicate holds, else the maxima."""
    kind = "bf16x2" if "BF16_V2" in ins.modifiers else "f16x2"
    result, *texts, p = ins.operands
    test = low.predicate(p)
    if test not in ("0", "1"):
        raise low.refusal("a predicate that varies is not modelled here")
    signs, texts = xorsign(low, ins, texts)
    options = (".ftz" if "FTZ" in ins.modifiers else "") + (".NaN" if "NAN" in ins.modifiers else "")
    op = f"{'min' if test == '1' else 'max'}{options}{signs}.{kind}"
    low.set(result, low.computed(op, *_pairs(low, texts, kind)))


def _pairs(low: Lowering, texts: list[str], kind: str) -> list[str]:
    """Two sources of two halves each."""
    return half_sources(low, texts, 2, kind)
