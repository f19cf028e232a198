"""Translates modifiers that several instructions share to those of PTX: roundings, and orders of comparisons."""

from __future__ import annotations

from kernelproof.sass import Instruction

# Modifiers, separated by blanks as ``mnemonic`` takes them.
ROUNDINGS = "RZ RM RP"
ORDERS = "LT LE GT GE EQ NE LTU LEU GTU GEU EQU NEU NUM NAN"


def rounding(ins: Instruction) -> str:
    """The rounding of a result, as PTX names it; to the nearest if the instruction names none."""
    return next((f".{part.lower()}" for part in ins.modifiers if part in ROUNDINGS.split()), ".rn")


def comparison(ins: Instruction) -> tuple[str, str]:
    """The order of a comparison, as PTX names it (lt, leu, ..), and the operation that combines its result with a
    predicate: AND, OR or XOR. nvdisasm prints both for every comparison."""
    order = next(part.lower() for part in ins.modifiers if part in ORDERS.split())
    return order, next(part for part in ins.modifiers if part in ("AND", "OR", "XOR"))
