"""Lowers branches, exits, barriers, and instructions that only guide convergence, to PTX.

Lanes that diverge join again at the postdominator of their branch, as they do in PTX, so BSSY and BREAK do nothing.
WARPSYNC orders memory between the lanes of its mask. With ``.EXCLUSIVE`` it also separates them from other lanes, which
meet again at the next BSYNC or return. So instructions in between have the mask as their members.
"""

from __future__ import annotations

from collections.abc import Mapping

from kernelproof.emulator.machine_code.lowering import TRUE, Lowering, is_predicate, label_of, mnemonic
from kernelproof.emulator.machine_code.operands import Register, operand
from kernelproof.sass import Instruction
from kernelproof.sass.decoding import BYTES


@mnemonic("BRA", "U ANY CONV DIV")
def branch(low: Lowering, ins: Instruction) -> None:
    """A branch. A lane takes it if its guard and the predicate among its operands, if there is one, hold for the lane.
    With ``.CONV`` all active lanes take it if the lanes for which the guard holds are exactly those of a mask; with
    ``.DIV``, if they are not."""
    condition = low.predicate(ins.operands[0]) if is_predicate(ins.operands[0]) else TRUE
    if "CONV" in ins.modifiers or "DIV" in ins.modifiers:
        order = "eq" if "CONV" in ins.modifiers else "ne"
        together, guard = low.computed("activemask.b32"), low.without_guard()
        if guard != TRUE:
            together = low.computed("vote.sync.ballot.b32", guard, together)
        condition = low.computed(f"setp.{order}.u32", together, low.word(ins.operands[0]), kind="pred")
    assert ins.target is not None
    low.branch("bra", label_of(ins.target), condition)


@mnemonic("CALL", "REL ABS NOINC")
def call(low: Lowering, ins: Instruction) -> None:
    """A jump to a subroutine of the same function, which gets the return address in a register. A call through a
    register leads to one of the functions after the kernel or, with ``.ABS``, to a function of the system."""
    if ins.target is not None:
        low.branch("bra", label_of(ins.target))
        return
    if "ABS" in ins.modifiers:
        called = low.data.system_functions()
        if called == {PRINT}:
            _print(low)
            return
        if others := called - {"__assertfail"}:
            raise low.refusal(f"a call of {' or '.join(sorted(others))} is not modelled")
        low.emit("trap")
        return
    _jump(low, low.word(ins.operands[0].split()[0]), {place: place for place in low.data.functions()})


PRINT = "vprintf"  # the one function of the system that returns


def _print(low: Lowering) -> None:
    """vprintf. The registers from R4 on have the addresses of the format and of its arguments, and get the result."""
    addresses = [low.guarded_register("b64") for _ in range(2)]
    for address, register in zip(addresses, ("R4", "R6"), strict=True):
        low.emit("mov.b64", address, low.pair(register))
    low.emit("emu_vprintf", *addresses)
    low.set("R4", "0")


@mnemonic("BRX")
def branch_by_table(low: Lowering, ins: Instruction) -> None:
    """A jump to the address of the next instruction plus an offset plus a register."""
    register, offset = ins.operands[0].split()[:2]
    base = ins.address + BYTES + int(offset, 0)
    _jump(low, low.word(register), {place - base & 0xFFFFFFFF: place for place in ins.targets})


def _jump(low: Lowering, value: str, places: Mapping[int, int]) -> None:
    """A jump by a value. ``places``: value -> address. Other values end in a trap."""
    if not places:
        raise low.refusal("the places to which this jump may lead are not known")
    for number, place in places.items():
        low.branch("bra", label_of(place), low.computed("setp.eq.u32", value, str(number), kind="pred"))
    low.emit("trap")


@mnemonic("RET", "REL NODEC")
def return_to_caller(low: Lowering, ins: Instruction) -> None:
    """A jump to the address in a register. It must be the address of an instruction that follows a call."""
    low.members = None
    address = low.word(ins.operands[0].split()[0])  # the function's name follows the register
    _jump(low, address, {place: place for place in low.returns})


@mnemonic("EXIT")
def exit_lanes(low: Lowering, ins: Instruction) -> None:
    """The exit of the lanes for which the guard and the predicate hold."""
    condition = low.predicate(ins.operands[0]) if ins.operands else TRUE
    low.branch("exit", "", condition)


@mnemonic("LEPC")
def load_return_address(low: Lowering, ins: Instruction) -> None:
    """Loads the address to which a function of the system shall return. Nothing here reads it, so it is 0: functions of
    the system either never return, or go on with the instruction after the call."""
    low.set_pair(ins.operands[0], "0")


@mnemonic("BPT", "TRAP")
def trap(low: Lowering, ins: Instruction) -> None:  # noqa: ARG001
    """A trap, which ends the program with an error."""
    low.emit("trap")


@mnemonic("BMOV", "32 CLEAR")
def move_barrier(low: Lowering, ins: Instruction) -> None:
    """Saves a convergence barrier in a register before a call, or restores it afterwards. Nothing here reads its value,
    so the register gets 0."""
    if isinstance(operand(ins.operands[0]), Register):
        low.set(ins.operands[0], "0")


@mnemonic("NOP")
def no_operation(low: Lowering, ins: Instruction) -> None:  # noqa: ARG001
    """ptxas generates a NOP for a bar.warp.sync at which the lanes have converged. They execute each instruction
    together, so accesses before the NOP are ordered before those after it."""
    low.emit("bar.warp.sync", low.computed("activemask.b32"))


@mnemonic("BSSY BSYNC BREAK YIELD", "RECONVERGENT RELIABLE")
def guide_convergence(low: Lowering, ins: Instruction) -> None:
    """Instructions that change no register and no memory. After BSYNC lanes execute together again."""
    if ins.name == "BSYNC":
        low.members = None


@mnemonic("WARPSYNC", "ALL COLLECTIVE EXCLUSIVE")
def warp_sync(low: Lowering, ins: Instruction) -> None:
    """bar.warp.sync of the lanes in a mask. They execute what follows together, without other lanes: with
    ``.COLLECTIVE`` those up to ENDCOLLECTIVE, with ``.EXCLUSIVE`` those up to BSYNC or the return."""
    members = str(0xFFFFFFFF) if "ALL" in ins.modifiers else low.word(ins.operands[0])
    if {"COLLECTIVE", "EXCLUSIVE"} & set(ins.modifiers):
        low.members = low.computed("mov.b32", members)
    if "COLLECTIVE" not in ins.modifiers:
        low.emit("bar.warp.sync", members)


@mnemonic("ENDCOLLECTIVE")
def end_collective(low: Lowering, ins: Instruction) -> None:  # noqa: ARG001
    """The end of the instructions that begin with WARPSYNC.COLLECTIVE."""
    low.members = None


_REDUCED, _REDUCED_PREDICATE = "%reduced", "%reduced_predicate"  # registers with the result of the last BAR.RED


@mnemonic("BAR", "SYNC ARV RED POPC AND OR DEFER_BLOCKING")
def barrier(low: Lowering, ins: Instruction) -> None:
    """bar.sync, bar.arrive and bar.red, by all threads of the CTA or by a number of them."""
    if "RED" in ins.modifiers:
        *numbers, text = ins.operands
        predicate = low.predicate(text)
        if predicate in ("0", "1"):
            predicate = low.computed("setp.eq.u32", predicate, "1", kind="pred")
        low.kinds |= {_REDUCED: "b32", _REDUCED_PREDICATE: "pred"}
        words = [low.word(number) for number in numbers]
        if "POPC" in ins.modifiers:
            low.emit("barrier.red.popc.u32", _REDUCED, *words, predicate)
        else:
            mode = "and" if "AND" in ins.modifiers else "or"
            low.emit(f"barrier.red.{mode}.pred", _REDUCED_PREDICATE, *words, predicate)
        return
    op = "barrier.sync" if "SYNC" in ins.modifiers else "barrier.arrive"
    low.before_sync()
    low.emit(op, *map(low.word, ins.operands))
    low.after_sync()


@mnemonic("B2R", "RESULT")
def read_reduction(low: Lowering, ins: Instruction) -> None:
    """The result of the last BAR.RED: a number, or a predicate."""
    low.kinds |= {_REDUCED: "b32", _REDUCED_PREDICATE: "pred"}
    if len(ins.operands) == 1:
        low.set(ins.operands[0], _REDUCED)
    else:
        low.set_predicate(ins.operands[1], _REDUCED_PREDICATE)


@mnemonic("NANOSLEEP", "SYNCS")
def pause(low: Lowering, ins: Instruction) -> None:
    """A hint to wait so many nanoseconds."""
    low.emit("nanosleep.u32", low.word(ins.operands[0]))
