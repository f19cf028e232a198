"""Lowers moves between predicates and the bits of a register."""

from __future__ import annotations

from kernelproof.emulator.machine_code.lowering import Lowering, mnemonic
from kernelproof.emulator.machine_code.operands import Register, operand
from kernelproof.sass import Instruction

# Modifier -> the first bit of the byte that it names.
_BYTES = {"B0": 0, "B1": 8, "B2": 16, "B3": 24}
_PREDICATES = range(7)  # P0 to P6; P7 is PT, which is always true


@mnemonic("P2R", " ".join(_BYTES))
def to_register(low: Lowering, ins: Instruction) -> None:
    """The predicates that a mask names become bits of a byte of the result. Its other bits are those of the source."""
    result, _, source, text = ins.operands
    start, mask = _start(ins.modifiers), int(text, 0)
    total = low.word(source)
    kept = ~(mask << start) & 0xFFFFFFFF
    total = str(int(total) & kept) if total.isdigit() else low.computed("and.b32", total, str(kept))
    for number in _PREDICATES:
        if mask >> number & 1:
            bit = low.computed("selp.b32", str(1 << start + number), "0", low.predicate(f"P{number}"))
            total = bit if total == "0" else low.computed("or.b32", total, bit)
    low.set(result, total)


@mnemonic("R2P")
def from_register(low: Lowering, ins: Instruction) -> None:
    """The bits of a byte become the predicates that a mask names."""
    _, text, mask = ins.operands
    source = operand(text)
    assert isinstance(source, Register)
    start, word = _start(source.parts), low.bits(source)
    for number in _PREDICATES:
        if int(mask, 0) >> number & 1:
            bit = low.computed("and.b32", word, str(1 << start + number)) if word != "0" else "0"
            value = "0" if bit == "0" else low.computed("setp.ne.u32", bit, "0", kind="pred")
            low.set_predicate(f"P{number}", value)


def _start(parts: tuple[str, ...]) -> int:
    """The position of the byte that a modifier names; 0 by default."""
    return next((_BYTES[part] for part in parts if part in _BYTES), 0)
