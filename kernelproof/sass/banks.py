"""Counts bank conflicts of a sub-core's register file: even and odd registers are two banks with one read port each.

A port reads one register of a warp (1024 bits) per cycle. Each operand position (first, second, third source) has a
small cache. An operand marked ``.reuse`` remains in it until another instruction reads an operand in that position;
reading the cached register again needs no port. Huerta et al. (MICRO 2025, arXiv 2503.20481) measured this on an RTX
A6000: an FFMA with three registers of one bank occupies the port for three cycles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kernelproof.sass.decoding import Instruction
from kernelproof.sass.pipes import Pipe, pipe_use
from kernelproof.sass.registers import VECTOR, read_operands

EVEN = VECTOR // 3  # mask of the even registers: 0b..0101
WAITING_PIPES = frozenset((Pipe.TENSOR, Pipe.ALU, Pipe.FMA, Pipe.FP16))  # stall until operands are read


class PortUse(NamedTuple):
    """Cycles for which the read port of each bank is occupied."""

    even: int
    odd: int


def port_uses(instructions: Sequence[Instruction]) -> list[PortUse]:
    """Cycles for which each instruction of a straight-line sequence occupies the read ports, if one warp runs alone."""
    cached: dict[int, int] = {}  # operand position -> mask of the registers in its cache
    uses = []
    for instruction in instructions:
        needed = 0
        for position, (mask, reused) in enumerate(read_operands(instruction)):
            needed |= mask & ~cached.get(position, 0)
            cached[position] = mask if reused else 0
        uses.append(PortUse((needed & EVEN).bit_count(), (needed & EVEN << 1 & VECTOR).bit_count()))
    return uses


def conflict_cycles(instructions: Sequence[Instruction], sm: str) -> list[float]:
    """Extra cycles of each instruction because of bank conflicts: those for which its busier read port is occupied
    beyond the cycles of its pipe. They are 0 for pipes that do not wait for their operands."""
    return [
        max(0.0, max(ports) - use.busy_cycles) if use.pipe in WAITING_PIPES else 0.0
        for ports, use in zip(
            port_uses(instructions), (pipe_use(instruction, sm) for instruction in instructions), strict=True
        )
    ]
