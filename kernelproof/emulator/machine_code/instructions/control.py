"""Branches, exits, barriers, and instructions that only guide convergence.

Lanes that diverge meet again at the post-dominator of their branch, as in the other form of a kernel, so BSSY, BSYNC
and BREAK do nothing of their own. WARPSYNC orders memory between the lanes of its mask.
"""

from __future__ import annotations

from kernelproof.emulator.machine_code.lowering import TRUE, Lowering, is_predicate, label_of, mnemonic
from kernelproof.sass import Instruction


@mnemonic("BRA", "U")
def branch(low: Lowering, ins: Instruction) -> None:
    """A jump, taken where its guard and a predicate among its operands hold."""
    condition = low.predicate(ins.operands[0]) if is_predicate(ins.operands[0]) else TRUE
    assert ins.target is not None
    low.branch("bra", label_of(ins.target), condition)


@mnemonic("CALL", "REL NOINC")
def call(low: Lowering, ins: Instruction) -> None:
    """A jump to a subroutine of the same function, which has got the address behind it in a register."""
    assert ins.target is not None
    low.branch("bra", label_of(ins.target))


@mnemonic("RET", "REL NODEC")
def give_back(low: Lowering, ins: Instruction) -> None:
    """A jump to the address in a register, which is one behind a call."""
    address = low.word(ins.operands[0].split()[0])  # the function stands behind it
    for place in low.returns:
        low.branch("bra", label_of(place), low.computed("setp.eq.u32", address, str(place), kind="pred"))
    low.emit("trap")


@mnemonic("EXIT")
def leave(low: Lowering, ins: Instruction) -> None:
    """The end of the lanes for which the guard and the predicate hold."""
    condition = low.predicate(ins.operands[0]) if ins.operands else TRUE
    low.branch("exit", "", condition)


@mnemonic("NOP BSSY BSYNC BREAK YIELD", "RECONVERGENT")
def nothing(low: Lowering, ins: Instruction) -> None:
    """Instructions that change no register and no memory."""


@mnemonic("WARPSYNC", "ALL")
def warp_sync(low: Lowering, ins: Instruction) -> None:
    """bar.warp.sync of the lanes that a word names."""
    members = str(0xFFFFFFFF) if "ALL" in ins.modifiers else low.word(ins.operands[0])
    low.emit("bar.warp.sync", members)


@mnemonic("BAR", "SYNC ARV DEFER_BLOCKING")
def barrier(low: Lowering, ins: Instruction) -> None:
    """bar.sync and bar.arrive, of all threads or of a number of them."""
    op = "barrier.sync" if "SYNC" in ins.modifiers else "barrier.arrive"
    low.emit(op, *map(low.word, ins.operands))


@mnemonic("NANOSLEEP")
def pause(low: Lowering, ins: Instruction) -> None:
    """A hint to wait so many nanoseconds."""
    low.emit("nanosleep.u32", low.word(ins.operands[0]))
