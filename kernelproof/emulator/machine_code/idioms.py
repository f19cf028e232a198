"""Finds the code that ptxas makes of tcgen05.alloc, .relinquish_alloc_permit and .dealloc.

Allocation is a protocol in the first kilobyte of shared memory, which belongs to the system: bits of the columns that
are taken, an mbarrier between the two CTAs of a pair, and calls of traps whose names say what they guard. The emulator
has no such memory. It has the instructions of PTX, so each piece of code becomes one instruction that leads behind it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from kernelproof.sass import Instruction
from kernelproof.sass.decoding import BYTES

ALLOCATE, FREE, RELINQUISH = "TMEM_ALLOC", "TMEM_DEALLOC", "TMEM_RELINQUISH"
REPLACED = frozenset((ALLOCATE, FREE))
_NEAR = 16  # instructions between the parts of a piece of code
_GRANULE = 32  # columns
_FLAG = re.compile(r"\[U?R\d+(?:\+URZ)?\+0x1c\]$")  # the system's byte that says whether allocation has ended
_TAKEN = re.compile(r"\[U?R\d+(?:\+URZ)?\+0x14\]$")  # the system's word of columns that are taken


def with_allocations(instructions: Sequence[Instruction]) -> list[Instruction]:
    """The instructions of a function with one in place of each allocation and release of tensor memory."""
    out = list(instructions)
    takes = [i for i, ins in enumerate(out) if ins.opcode.startswith("UTCATOMSWS") and "FIND_AND_SET" in ins.modifiers]
    if not takes and not any(ins.name == "UTCATOMSWS" for ins in out):
        return out
    suffix = ".2CTA" if any("2CTA" in out[i].modifiers for i in takes) else ""
    for i, ins in enumerate(out):
        if ins.name == "CALL" and "phase_invalid_during_alloc" in ins.operands[-1]:
            _allocation(out, i, suffix)
        elif ins.name == "UTCATOMSWS" and "AND" in ins.modifiers:
            _release(out, i, suffix)
        elif ins.name == "UVIRTCOUNT":
            out[i] = replace(ins, opcode=RELINQUISH + suffix, operands=())
        elif ins.opcode in ("STS.U8", "LDS.U8") and any(_FLAG.match(text) for text in ins.operands):
            out[i] = replace(ins, opcode="YIELD", guard=None, operands=())
    return out


def _allocation(out: list[Instruction], call: int, suffix: str) -> None:
    """The branch to the trap is the start: behind it columns are sought."""
    store = next(i for i in range(call, call - _NEAR, -1) if out[i].opcode == "STS")
    starts = range(store, store - _NEAR, -1)
    begin, branch = next(
        (i, j)
        for i in starts
        for j, ins in enumerate(out[:store])
        if ins.name == "BRA" and ins.target == out[i].address
    )
    assert begin <= store
    take = next(i for i in range(branch, call) if out[i].name == "UTCATOMSWS")
    granules = _literal(out, take, out[take].operands[-1])
    out[branch] = replace(
        out[branch], guard=None, opcode=ALLOCATE + suffix, target=out[call].address + BYTES,
        operands=(out[store].operands[0], str(granules * _GRANULE)),
    )  # fmt: skip


def _literal(out: Sequence[Instruction], before: int, register: str) -> int:
    """The number that an instruction before another one moves to a register."""
    found = next(ins for ins in reversed(out[:before]) if ins.name in ("UMOV", "MOV") and ins.operands[0] == register)
    return int(found.operands[1], 0)


def _release(out: list[Instruction], at: int, suffix: str) -> None:
    """The load of the columns that are taken is the start; the last trap is the end."""
    begin = next(i for i in range(at, -1, -1) if out[i].opcode == "LDS" and _TAKEN.match(out[i].operands[1]))
    end = next(
        i for i, ins in enumerate(out) if i > at and ins.name == "CALL" and "unallocated_columns" in ins.operands[-1]
    )
    window = out[max(0, begin - _NEAR) : at]
    address = next(ins.operands[1] for ins in window if ins.name in ("ULOP3", "LOP3") and ins.operands[2] == "0xffff")
    masks = [int(ins.operands[1], 0) for ins in window if ins.name == "UMOV" and ins.operands[1].startswith("0x")]
    columns = max(mask.bit_count() for mask in masks if mask & (mask + 1) == 0) * _GRANULE
    out[begin] = replace(
        out[begin], guard=None, opcode=FREE + suffix, target=out[end].address + BYTES, operands=(address, str(columns))
    )
