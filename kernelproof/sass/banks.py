"""The read ports of a sub-core's register file: even and odd registers are two banks, each reads 1024 bits a cycle.

An operand marked ``.reuse`` stays in a small cache, by its place among the operands; an instruction that reads the same
registers in the same place, before another one takes that place, needs no port for it. Huerta et al. (MICRO 2025,
arXiv 2503.20481) measured this on an RTX A6000: an FFMA of three registers of one bank takes its port for three cycles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kernelproof.sass.decoding import Instruction
from kernelproof.sass.pipes import Pipe, pipe_use
from kernelproof.sass.registers import VECTOR, read_operands

EVEN = VECTOR // 3  # mask of the even registers
FIXED = frozenset((Pipe.TENSOR, Pipe.ALU, Pipe.FMA, Pipe.FP16))  # pipes whose operands come at a fixed time


class PortUse(NamedTuple):
    """Cycles that each bank's read port is taken."""

    even: int
    odd: int


def port_uses(instructions: Sequence[Instruction]) -> list[PortUse]:
    """The read ports that each instruction of a straight sequence takes, one warp running alone."""
    cached: dict[int, int] = {}
    uses = []
    for instruction in instructions:
        needed = 0
        for place, (mask, reused) in enumerate(read_operands(instruction)):
            needed |= mask & ~cached.get(place, 0)
            cached[place] = mask if reused else 0
        uses.append(PortUse((needed & EVEN).bit_count(), (needed & EVEN << 1 & VECTOR).bit_count()))
    return uses


def conflict_cycles(instructions: Sequence[Instruction], sm: str) -> list[float]:
    """Cycles by which the busier port outlasts the instruction's pipe, for pipes that wait for their operands."""
    return [
        max(0.0, max(ports) - use.busy_cycles) if use.pipe in FIXED else 0.0
        for ports, use in zip(
            port_uses(instructions), (pipe_use(instruction, sm) for instruction in instructions), strict=True
        )
    ]
