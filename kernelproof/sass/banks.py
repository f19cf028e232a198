"""Bank conflicts of a sub-core's register file: even and odd registers are two banks with one read port each.

A port reads one register of a warp (1024 bits) per cycle. Each place among the operands has a small cache: an operand
marked ``.reuse`` stays there until another instruction takes the place, and reading it again needs no port. Huerta et
al. (MICRO 2025, arXiv 2503.20481) measured this on an RTX A6000: an FFMA with three registers of one bank takes the
port for three cycles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kernelproof.sass.decoding import Instruction
from kernelproof.sass.pipes import Pipe, pipe_use
from kernelproof.sass.registers import VECTOR, read_operands

EVEN = VECTOR // 3  # mask of the even registers: 0b..0101
FIXED = frozenset((Pipe.TENSOR, Pipe.ALU, Pipe.FMA, Pipe.FP16))  # pipes that stall until their operands are read


class PortUse(NamedTuple):
    """Cycles for which the read port of each bank is taken."""

    even: int
    odd: int


def port_uses(instructions: Sequence[Instruction]) -> list[PortUse]:
    """How long each instruction of a straight sequence takes the read ports, if one warp runs alone."""
    cached: dict[int, int] = {}  # mask of the registers that the cache of each operand place holds
    uses = []
    for instruction in instructions:
        needed = 0
        for place, (mask, reused) in enumerate(read_operands(instruction)):
            needed |= mask & ~cached.get(place, 0)
            cached[place] = mask if reused else 0
        uses.append(PortUse((needed & EVEN).bit_count(), (needed & EVEN << 1 & VECTOR).bit_count()))
    return uses


def conflict_cycles(instructions: Sequence[Instruction], sm: str) -> list[float]:
    """Cycles that each instruction costs because of bank conflicts: by how long its busier read port is taken beyond
    its pipe. 0 for pipes that do not wait for their operands."""
    return [
        max(0.0, max(ports) - use.busy_cycles) if use.pipe in FIXED else 0.0
        for ports, use in zip(
            port_uses(instructions), (pipe_use(instruction, sm) for instruction in instructions), strict=True
        )
    ]
