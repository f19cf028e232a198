"""Finds the code that ptxas makes of tcgen05.alloc, .relinquish_alloc_permit and .dealloc.

Allocation is a protocol in the first kilobyte of shared memory, which belongs to the system: bits of the columns that
are taken, an mbarrier between the two CTAs of a pair, and calls of traps whose names say what they guard. The emulator
has no such memory. It has the instructions of PTX, so each piece of code becomes one instruction that leads after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from kernelproof.emulator.machine_code.lowering import UnknownMachineCode
from kernelproof.emulator.state.sites import place
from kernelproof.sass import Instruction
from kernelproof.sass.decoding import BYTES

_Replacement = Callable[[list[Instruction], int, str], None]
ALLOCATE, FREE, RELINQUISH = "TMEM_ALLOC", "TMEM_DEALLOC", "TMEM_RELINQUISH"
RELEASED = "TMEM_RELEASED"  # takes the address that is released, before ptxas computes with it in its register
REPLACED = frozenset((ALLOCATE, FREE))
_NEAR = 16  # instructions between the parts of a piece of code
_GRANULE = 32  # columns
_REGISTER = re.compile(r"U?R\d+")
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
            _replace(_allocation, out, i, suffix)
        elif ins.name == "UTCATOMSWS" and "AND" in ins.modifiers:
            _replace(_release, out, i, suffix)
        elif ins.name == "UVIRTCOUNT":
            out[i] = replace(ins, opcode=RELINQUISH + suffix, operands=())
        elif ins.opcode in ("STS.U8", "LDS.U8") and any(_FLAG.match(text) for text in ins.operands):
            out[i] = replace(ins, opcode="YIELD", guard=None, operands=())
    return out


def _replace(piece: _Replacement, out: list[Instruction], at: int, suffix: str) -> None:
    """Replace the piece of code around an instruction. Raises UnknownMachineCode if a part of it is not found."""
    try:
        piece(out, at, suffix)
    except (StopIteration, ValueError, AssertionError) as error:
        where, text = place(out[at].address, True), out[at].text
        raise UnknownMachineCode(f"{where}: this use of tensor memory is not modelled: {text}") from error


def _allocation(out: list[Instruction], call: int, suffix: str) -> None:
    """The branch to the trap is the start: after it columns are sought."""
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
    # What computes the address comes first, in the places of instructions that are left out.
    chain = _chain(out[begin:store], out[store].operands[0])
    for at, ins in enumerate(chain, branch):
        out[at] = replace(ins, address=out[at].address)
    at = branch + len(chain)
    out[at] = replace(
        out[at], guard=None, opcode=ALLOCATE + suffix, target=out[call].address + BYTES,
        operands=(out[store].operands[0], str(granules * _GRANULE)),
    )  # fmt: skip


def _chain(code: Sequence[Instruction], operand: str) -> list[Instruction]:
    """The instructions that compute the registers of an operand, in their order."""
    chain, wanted = [], set(_REGISTER.findall(operand))
    for ins in reversed(code):
        if ins.operands and ins.operands[0] in wanted:
            assert ins.guard is None
            chain.append(ins)
            wanted = wanted - {ins.operands[0]} | set(_REGISTER.findall(" ".join(ins.operands[1:])))
    return chain[::-1]


def _literal(out: Sequence[Instruction], before: int, register: str) -> int:
    """The number that an instruction before another one moves to a register."""
    return next(value for value, name in map(_moved, reversed(out[:before])) if name == register)


def _moved(ins: Instruction) -> tuple[int, str]:
    """The number that an instruction moves to a register, and that register; else zero and an empty name."""
    moves = ins.name in ("UMOV", "MOV") or ins.opcode == "IMAD.MOV.U32"
    return (int(ins.operands[-1], 0), ins.operands[0]) if moves and ins.operands[-1].startswith("0x") else (0, "")


def _release(out: list[Instruction], at: int, suffix: str) -> None:
    """The load of the columns that are taken is the start; the last trap is the end."""
    begin = next(i for i in range(at, -1, -1) if out[i].opcode == "LDS" and _TAKEN.match(out[i].operands[1]))
    end = next(
        i for i, ins in enumerate(out) if i > at and ins.name == "CALL" and "unallocated_columns" in ins.operands[-1]
    )
    start = next(
        i for i in range(begin, begin - _NEAR, -1)
        if out[i].name in ("ULOP3", "LOP3") and out[i].operands[2] == "0xffff"
    )  # fmt: skip
    window = out[max(0, begin - _NEAR) : at]
    shifted = {ins.operands[1].removesuffix(".reuse") for ins in window if ins.opcode in ("SHF.L.U32", "USHF.L.U32")}
    moved = [value for value, name in map(_moved, window) if name in shifted]
    columns = max(mask.bit_count() for mask in moved) * _GRANULE
    out[start] = replace(out[start], opcode=RELEASED, operands=(out[start].operands[1],))
    out[begin] = replace(
        out[begin], guard=None, opcode=FREE + suffix, target=out[end].address + BYTES, operands=(str(columns),)
    )
