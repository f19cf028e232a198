"""Translates mapa and getctarank, which concern addresses of other CTAs of a cluster, and setmaxnreg to Python text.

In this text, ``E`` and ``O`` are the batch's units ``hopper.peers`` and ``hopper.register_pool``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kernelproof.emulator.frontend.emitter import Emitter, Value
from kernelproof.emulator.frontend.instruction import Writes, instruction
from kernelproof.emulator.frontend.mutation_operators import Change, Statement
from kernelproof.emulator.frontend.ptx import Imm, Instr


def _own_variable(s: Statement) -> Iterator[Change]:
    """A mutation: the address is that of the own CTA's variable, not that of another CTA's."""
    d, a = (part.strip() for part in s.text.split(None, 1)[1].split(",")[:2])
    yield s.become("own", f"mov.b{s.ins.parts[-1][1:]} {d}, {a};")


@instruction("mapa", hopper=True, mutations=(_own_variable,))
def mapa(e: Emitter, ins: Instr) -> None:
    """mapa: the address of the same variable in another CTA of the cluster."""
    d, a, rank = ins.operands
    kind = "u8" if ins.parts[-1] == "u64" else "u4"
    e.assign(d, Value(f"E.mapa({e.array(a, kind)}, {e.array(rank, 'u4')})", kind, False))


@instruction("getctarank", hopper=True)
def getctarank(e: Emitter, ins: Instr) -> None:
    """getctarank: the rank of the CTA that an address belongs to."""
    d, a = ins.operands
    kind = "u8" if ins.parts[-1] == "u64" else "u4"
    e.assign(d, Value(f"E.rank_of({e.array(a, kind)})", "u4", False))


def _more_registers(s: Statement) -> Iterator[Change]:
    """A mutation: setmaxnreg asks for 8 registers more."""
    count = s.ins.operands[0]
    if isinstance(count, Imm):
        yield s.become("raise", re.sub(r"\b\d+\s*;$", f"{count.value + 8};", s.text))


@instruction("setmaxnreg", writes=Writes.NOTHING, hopper=True, mutations=(_more_registers,))
def setmaxnreg(e: Emitter, ins: Instr) -> None:
    """setmaxnreg.inc and .dec."""
    e.line(f"O.change({e.literal(ins.operands[0])}, {'inc' in ins.parts}, {e.lanes()})")
