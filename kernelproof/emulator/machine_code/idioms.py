"""Recognises the code that ptxas generates for tcgen05.alloc, .relinquish_alloc_permit and .dealloc.

Come here if a new version of ptxas generates other code, which is reported as "this use of tensor memory is not
modelled". Allocation is a protocol in the first kilobyte of shared memory, which belongs to the system: a word has a
bit for each allocated block of columns, an mbarrier synchronises the two CTAs of a pair, and traps, whose names say
what they guard, are called on errors. The emulator has no such memory, but it has the instructions of PTX. So each
piece of code is replaced by one instruction that branches to the end of the piece.

The listings below are those of ptxas 13.0 for a kernel of one CTA or of a pair, without waits and moves that do not
matter. Anchors, by which a piece is found, are marked by ``<--``. Registers and offsets from the base differ between
kernels; the system's own offsets (0x14, 0x18, 0x1c) and the names of traps do not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kernelproof.emulator.machine_code.lowering import UnknownMachineCode
from kernelproof.emulator.state.sites import place
from kernelproof.sass import Instruction
from kernelproof.sass.decoding import BYTES

_Replacement = Callable[[list[Instruction], int, str], None]
ALLOCATE, FREE, RELINQUISH = "TMEM_ALLOC", "TMEM_DEALLOC", "TMEM_RELINQUISH"
RELEASED = "TMEM_RELEASED"  # saves the address that is released, before ptxas overwrites its register
REPLACED = frozenset((ALLOCATE, FREE))
_MAX_DISTANCE = 16  # the most instructions between two parts of a piece of code
_GRANULE = 32  # columns
_REGISTER = re.compile(r"U?R\d+")
_ENDED_FLAG = re.compile(r"\[U?R\d+(?:\+URZ)?\+0x1c\]$")  # the system's byte that says whether allocation has ended
_TAKEN_WORD = re.compile(r"\[U?R\d+(?:\+URZ)?\+0x14\]$")  # the system's word of columns that are taken


def with_allocations(instructions: Sequence[Instruction]) -> list[Instruction]:
    """The instructions of a function, in which one instruction replaces each allocation and release of tensor
    memory."""
    out = list(instructions)
    takes = [i for i, ins in enumerate(out) if ins.opcode.startswith("UTCATOMSWS") and "FIND_AND_SET" in ins.modifiers]
    if not takes and not any(ins.name == "UTCATOMSWS" for ins in out):
        return out
    suffix = ".2CTA" if any("2CTA" in out[i].modifiers for i in takes) else ""
    for i, ins in enumerate(out):
        if ins.name == "CALL" and "phase_invalid_during_alloc" in ins.operands[-1]:
            _replace(_replace_allocation, out, i, suffix)
        elif ins.name == "UTCATOMSWS" and "AND" in ins.modifiers:
            _replace(_replace_release, out, i, suffix)
        elif ins.name == "UVIRTCOUNT":
            _replace(_replace_relinquish, out, i, suffix)
        elif ins.opcode in ("STS.U8", "LDS.U8") and any(_ENDED_FLAG.match(text) for text in ins.operands):
            # @P0 STS.U8 [UR4+0x1c], R0 sets the flag, and LDS.U8 R0, [UR4+0x1c] reads it. Both become no operation.
            out[i] = replace(ins, opcode="YIELD", guard=None, operands=())
    return out


def replaced_addresses(instructions: Sequence[Instruction]) -> list[range]:
    """The addresses of the code of each allocation and release, in instructions that ``with_allocations`` returned."""
    return [
        range(ins.address, ins.target, BYTES) for ins in instructions if ins.name in REPLACED and ins.target is not None
    ]


def _replace(piece: _Replacement, out: list[Instruction], index: int, suffix: str) -> None:
    """Replace the piece of code around the instruction at an index. Raises UnknownMachineCode if a part of it is not
    found."""
    try:
        piece(out, index, suffix)
    except (StopIteration, ValueError, AssertionError) as error:
        where, text = place(out[index].address, True), out[index].text
        raise UnknownMachineCode(f"{where}: this use of tensor memory is not modelled: {text}") from error


# tcgen05.alloc [base + 0x34080], 512:
#
#         LDS.U8 R0, [UR4+0x1c]                       has this CTA given up the right to allocate?
#         ISETP.NE.AND P0, PT, R0, RZ, PT
#     @P0 BRA TRAP                                    <-- ``branch``: here the allocation is put
#         UMOV UR6, 0x10                              <-- the granules of 32 columns, by ``_literal``
#         UTCATOMSWS.FIND_AND_SET.ALIGN UP1, UR6, UR6 <-- ``take``: finds free granules; repeated while there are none
#         STS [UR5+0x34080], R6                       the first column is stored
#         ATOMS.OR RZ, [UR4+0x14], R0                 the granules are marked as taken
#         BRA NEXT
#   TRAP: IMAD.MOV.U32 R0, RZ, RZ, -0x1               <-- ``begin``: the target of the branch
#         STS [UR5+0x34080], R0                       <-- ``store``: its operand is the address for the column
#         CALL ..trap_phase_invalid_during_alloc      <-- ``call``
#   NEXT:
#
# From ``branch`` on, it is replaced by the instructions between TRAP and the store that compute UR5, and then by
# TMEM_ALLOC [UR5+0x34080], 512, which branches to NEXT. The code between is never reached.
def _replace_allocation(out: list[Instruction], call: int, suffix: str) -> None:
    """Put an allocation in the place of the branch to a trap. ``call``: the call in that trap."""
    store = next(i for i in range(call, call - _MAX_DISTANCE, -1) if out[i].opcode == "STS")
    starts = range(store, store - _MAX_DISTANCE, -1)
    begin, branch = next(
        (i, j)
        for i in starts
        for j, ins in enumerate(out[:store])
        if ins.name == "BRA" and ins.target == out[i].address
    )
    assert begin <= store
    take = next(i for i in range(branch, call) if out[i].name == "UTCATOMSWS")
    granules = _literal(out, take, out[take].operands[-1])
    # The instructions that compute the address come first. They get the addresses of those that they replace.
    chain = _chain(out[begin:store], out[store].operands[0])
    for index, ins in enumerate(chain, branch):
        out[index] = replace(ins, address=out[index].address)
    last = branch + len(chain)
    out[last] = replace(
        out[last], guard=None, opcode=ALLOCATE + suffix, target=out[call].address + BYTES,
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
    return next(value for value, name in map(_number_moved, reversed(out[:before])) if name == register)


def _number_moved(ins: Instruction) -> tuple[int, str]:
    """The number that an instruction moves to a register, and that register; else zero and an empty name."""
    if ins.opcode == "HFMA2" and ins.operands[1:3] == ("-RZ", "RZ"):
        # HFMA2 R5, -RZ, RZ, 0, 8.94069671630859375e-07 moves two halves: 0xf, which is 15 * 2^-24.
        high, low = (int(np.float16(text).view(np.uint16)) for text in ins.operands[3:])
        return high << 16 | low, ins.operands[0]
    moves = ins.name in ("UMOV", "MOV") or ins.opcode == "IMAD.MOV.U32"
    return (int(ins.operands[-1], 0), ins.operands[0]) if moves and ins.operands[-1].startswith("0x") else (0, "")


# tcgen05.relinquish_alloc_permit:
#
#         WARPSYNC.ALL                                <-- ``meeting``
#         ELECT P1, URZ, PT                           <-- ``elect``
#    @!P1 BRA NEXT                                    often left out: then the whole warp executes what follows
#         UVIRTCOUNT.DEALLOC.SMPOOL 0x80              <-- ``index``
#         STS.U8 [UR4+0x1c], R0                       the flag that allocation has ended
#   NEXT:
#
# Warps relinquish as a whole. So TMEM_RELINQUISH stands at ``index``, or at ``meeting`` if a branch leaves one lane at
# ``index``.
def _replace_relinquish(out: list[Instruction], index: int, suffix: str) -> None:
    """Put the end of a warp's right to allocate in the place of the instruction at an index, or of the warp's meeting
    before it."""
    nearby = range(index - 1, max(-1, index - _MAX_DISTANCE), -1)
    elect = next((i for i in nearby if out[i].name == "ELECT"), index)
    whole = index
    if any(out[i].name == "BRA" and out[i].guard is not None for i in range(elect, index)):
        whole = next(i for i in nearby if i < elect and out[i].opcode == "WARPSYNC.ALL")
        out[index] = replace(out[index], opcode="YIELD", operands=())
    out[whole] = replace(out[whole], opcode=RELINQUISH + suffix, operands=())


# tcgen05.dealloc %taddr, 512:
#
#         ULOP3.LUT UR4, UR20, 0xffff, URZ, ..        <-- ``start``: the column, from the address UR20
#         LDS R0, [UR6+0x14]                          <-- ``begin``: the granules that are taken
#         UMOV UR5, 0xffff                            <-- the mask of granules: the widest literal that is shifted
#         USHF.R.U32.HI UR4, URZ, 0x5, UR4
#         USHF.L.U32 UR5, UR5, UR4, URZ               the mask of those that are given back
#         ..                                          compared with the ones that are taken, else a trap
#         UTCATOMSWS.AND URZ, UR5                     <-- ``give_back``
#     @P0 ATOMS.AND RZ, [UR6+0x14], R2
#         BRA NEXT
#         CALL ..trap_col_being_dealloced_not_returned_by_alloc
#         BRA NEXT
#         CALL ..trap_unallocated_columns_being_dealloced   <-- ``end``: the last trap
#   NEXT:
#
# It is replaced by TMEM_RELEASED UR20 at ``start``, before UR4 is overwritten, and by TMEM_DEALLOC 512 at ``begin``,
# which branches to NEXT. If the address has just been loaded, ptxas puts ``begin`` before ``start``. Then ``begin``
# becomes no operation, and TMEM_DEALLOC follows TMEM_RELEASED.
def _replace_release(out: list[Instruction], give_back: int, suffix: str) -> None:
    """Put a release in the place of the load before the ``UTCATOMSWS.AND`` at index ``give_back``."""
    begin = next(
        i for i in range(give_back, -1, -1) if out[i].opcode == "LDS" and _TAKEN_WORD.match(out[i].operands[1])
    )
    end = next(
        i for i in range(give_back + 1, len(out))
        if out[i].name == "CALL" and "unallocated_columns" in out[i].operands[-1]
    )  # fmt: skip
    start = next(
        i for i in (*range(begin, max(-1, begin - _MAX_DISTANCE), -1), *range(begin, give_back))
        if out[i].name in ("ULOP3", "LOP3") and out[i].operands[2] == "0xffff"
    )  # fmt: skip
    window = out[max(0, begin - _MAX_DISTANCE) : give_back]
    shifted = {ins.operands[1].removesuffix(".reuse") for ins in window if ins.opcode in ("SHF.L.U32", "USHF.L.U32")}
    moved = [value for value, name in map(_number_moved, window) if name in shifted]
    columns = max(mask.bit_count() for mask in moved) * _GRANULE
    out[start] = replace(out[start], opcode=RELEASED, operands=(out[start].operands[1],))
    if start > begin:
        out[begin] = replace(out[begin], guard=None, opcode="YIELD", operands=())
        begin = start + 1
    out[begin] = replace(
        out[begin], guard=None, opcode=FREE + suffix, target=out[end].address + BYTES, operands=(str(columns),)
    )
