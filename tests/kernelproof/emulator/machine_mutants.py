"""Plants faults in machine code, one at a time. Tests show that the schedule's check or the results reveal each fault.

``mutants`` draws faults of every kind of ``KINDS``. ``reason`` says why a fault that nothing shows is none. A function
of a kind gets the code, the index of an instruction, the draw and the number of registers; it returns the new bits of
instructions by address, or None where this fault cannot be planted.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from kernelproof.emulator.machine_code.idioms import replaced_addresses, with_allocations
from kernelproof.sass import Control, Function, Graph, Instruction, RegisterLiveness, access
from kernelproof.sass.pipes import MEMORY, pipe_use
from kernelproof.sass.registers import EFFECTS, PURE, STACK, read_operands, register_names, unread_instructions
from tests.kernelproof.cubin_edits import OPERANDS, RESULT, rescheduled_code, with_register
from tests.kernelproof.emulator.machine_walks import Use, Walker

# An instruction that does nothing.
NOP = Instruction.bare("NOP")
SCHEDULED = frozenset(("stall", "wait", "write barrier", "read barrier"))  # kinds that change only control words
# Opcodes that are not swapped: they change where execution continues, or who waits.
FIXED = frozenset(("BRA", "EXIT", "BSSY", "BSYNC", "CALL", "RET", "BAR", "NOP", "DEPBAR", "WARPSYNC", "BREAK"))


class Mutant(NamedTuple):
    """A planted fault: its kind, and the new bits of instructions by address."""

    kind: str
    codes: dict[int, int]


def rescheduled_function(function: Function, mutant: Mutant) -> Function:
    """The function with the control words of a mutant of a kind of ``SCHEDULED``."""
    code = (
        replace(item, control=Control.decode(mutant.codes[item.address] >> 64))
        if item.address in mutant.codes
        else item
        for item in function.instructions
    )
    return replace(function, instructions=tuple(code))


def mutants(function: Function, draw: random.Random, each: int) -> Iterator[Mutant]:
    """Up to ``each`` mutants of every kind, at drawn places that the entry reaches."""
    code = [item for block in Graph(function).blocks for item in block.instructions if _is_reached(function, item)]
    for kind, plant in KINDS.items():
        places = list(range(len(code)))
        draw.shuffle(places)
        found = (plant(code, at, draw, function.registers) for at in places)
        for _, codes in zip(range(each), filter(None, found), strict=False):
            yield Mutant(kind, codes)


def _is_reached(function: Function, instruction: Instruction) -> bool:
    """Whether an instruction stands before the last exit: ptxas fills the rest with jumps to themselves and NOPs."""
    last = max(item.address for item in function.instructions if item.name == "EXIT")
    return instruction.address <= last


Code = list[Instruction]


def _shorten_stall(code: Code, at: int, draw: random.Random, _: int) -> dict[int, int] | None:
    """Makes the next instruction issue too early."""
    item = code[at]
    if item.control.stall < 2:
        return None
    return {item.address: rescheduled_code(item, stall=draw.randrange(1, item.control.stall))}


def _drop_wait(code: Code, at: int, draw: random.Random, _: int) -> dict[int, int] | None:
    """Removes the wait for one of the scoreboards."""
    item = code[at]
    if not item.control.waits:
        return None
    dropped = draw.choice(item.control.waits)
    return {
        item.address: rescheduled_code(item, waits=tuple(board for board in item.control.waits if board != dropped))
    }


def _change_write_barrier(code: Code, at: int, draw: random.Random, _: int) -> dict[int, int] | None:
    """Changes the scoreboard by which others wait until an instruction has written its result."""
    return _change_barrier(code[at], "write_barrier", draw)


def _change_read_barrier(code: Code, at: int, draw: random.Random, _: int) -> dict[int, int] | None:
    """Changes the scoreboard by which others wait until an instruction has read its operands."""
    return _change_barrier(code[at], "read_barrier", draw)


def _change_barrier(item: Instruction, name: str, draw: random.Random) -> dict[int, int] | None:
    """Makes the instruction release another scoreboard, or none, when its result is ready or its operands are read."""
    own = getattr(item.control, name)
    if own is None:
        return None
    other = draw.choice([board for board in (*range(6), None) if board != own])
    return {item.address: rescheduled_code(item, **{name: other})}


def _change_register(code: Code, at: int, draw: random.Random, count: int) -> dict[int, int] | None:
    """Replaces the register of the result, or of an operand that is a single register."""
    item = code[at]
    numbers = [int(name[1:]) for name in register_names(access(item).writes) if name[0] == "R"][:1]
    fields = [(RESULT, number) for number in numbers]
    singles = {(mask & -mask).bit_length() - 1 for mask, _ in read_operands(item) if mask}
    # The descriptor of its memory follows the address of a load and the operand of a store.
    places = OPERANDS[: 1 if item.name.startswith("L") else 2] if item.name in MEMORY else OPERANDS
    fields += [(first, number) for first in places if (number := item.code >> first & 255) in singles]
    if not fields or item.name in FIXED:
        return None
    first, own = draw.choice(fields)
    other = draw.choice([number for number in range(0, count - 4, 4) if number != own] or [own + 4])
    return {item.address: with_register(item.code, first, other)}


def _keep_stale_operand(code: Code, at: int, draw: random.Random, _: int) -> dict[int, int] | None:
    """Sets the reuse flag on an operand that the instruction overwrites and that the next one may read in the same
    slot."""
    item = code[at]
    if at + 1 == len(code) or item.name in FIXED:
        return None
    singles = {(mask & -mask).bit_length() - 1 for mask, _ in read_operands(item) if mask}
    slots = [
        slot
        for slot, first in enumerate(OPERANDS)
        if item.code >> first & 255 in singles
        and access(item).writes >> (item.code >> first & 255) & 1
        and item.code >> first & 255 == code[at + 1].code >> first & 255
        and not item.control.reuse >> slot & 1
    ]
    return {item.address: rescheduled_code(item, reuse=item.control.reuse | 1 << draw.choice(slots))} if slots else None


def _swap_neighbours(code: Code, at: int, _: random.Random, __: int) -> dict[int, int] | None:
    """Swaps two neighbouring instructions with their control words."""
    if at + 1 == len(code) or {code[at].name, code[at + 1].name} & FIXED:
        return None
    first, second = code[at], code[at + 1]
    return {first.address: second.code, second.address: first.code}


# By kind of fault: a function that plants it at an instruction, or returns None where it has no place.
KINDS = {
    "stall": _shorten_stall, "wait": _drop_wait,
    "write barrier": _change_write_barrier, "read barrier": _change_read_barrier,
    "register": _change_register, "reuse": _keep_stale_operand, "swap": _swap_neighbours,
}  # fmt: skip


def reason(mutant: Mutant, before: Function, after: Function, uses: set[Use]) -> str:
    """Why a mutant that neither the schedule nor the results show computes the same; empty if no reason is known.

    ``uses``: those without a wait before the change, of opcodes for which ptxas does not always wait.
    """
    old = {item.address: item for item in before.instructions}
    new = {item.address: item for item in after.instructions}
    addresses = sorted(mutant.codes)
    if mutant.kind not in SCHEDULED and all(_is_replaced(before, address) for address in addresses):
        return "the emulator has one instruction for this code of the system"
    if mutant.kind == "swap":
        first, second = (old[address] for address in addresses)
        if _is_identity(first) or _is_identity(second):
            return "one moves a register to itself"
        a, b = access(first), access(second)
        if _repeats(before, second) or (_repeats(before, first) and not b.writes & (a.reads | a.writes)):
            return "one computes what its register already holds"
        if a.writes & (b.reads | b.writes) or b.writes & a.reads:
            return ""
        if {first.name, second.name} <= MEMORY and not _are_apart(first, second):
            return ""
        return "neither uses what the other writes"
    (address,) = addresses
    if mutant.kind == "register":
        if new[address].text == old[address].text:
            return "the field holds no register in this form"
        if _reads_a_copy(before, old[address], new[address]):
            return "both registers hold the same value"
        return "" if _matters(before, address) or _matters(after, address) else "no result depends on the instruction"
    return schedule_reason(before, after, uses)


# Instructions whose scoreboard decides what the emulator does: it counts groups of copies, or loads of tensor memory.
COUNTED = frozenset(("LDGDEPBAR", "UTMACMDFLUSH", "LDTM"))


def changes_execution(function: Function, mutant: Mutant) -> bool:
    """Whether the emulator may execute the function otherwise after a change of control words."""
    changed = next(item for item in function.instructions if item.address in mutant.codes)
    return changed.name in COUNTED or (
        mutant.kind == "wait" and any(item.name == "LDTM" for item in function.instructions)
    )


def _is_replaced(function: Function, address: int) -> bool:
    """Whether an instruction belongs to the code that ptxas generates to allocate or release tensor memory."""
    return any(address in each for each in replaced_addresses(with_allocations(function.instructions)))


def schedule_reason(before: Function, after: Function, known: set[Use]) -> str:
    """Why other control words are no fault; empty if no reason is known."""
    walker = Walker(after, before)
    uses = walker.uses() - known
    if not uses:
        return "no register is used before another wait"
    return "ptxas leaves no more time in other places" if all(map(walker.allowed, uses)) else ""


def _is_identity(item: Instruction) -> bool:
    """Whether an instruction moves a register to itself, perhaps by adding zeros."""
    registers = [text for text in item.operands if text != "PT"]
    if item.name == "IADD3" and not item.modifiers:
        return sorted(registers[1:]) == sorted((registers[0], "RZ", "RZ"))
    return item.name == "MOV" and item.operands[0] == item.operands[1]


def _repeats(function: Function, instruction: Instruction) -> bool:
    """Whether an instruction computes what its results already hold: on every path to it an equal one was executed, and
    nothing has written its registers since."""
    own = access(instruction)
    pure = pipe_use(instruction, function.sm).pipe in PURE and instruction.name not in EFFECTS
    if not pure or instruction.guard is not None or own.reads & own.writes:
        return False
    registers = own.reads | own.writes
    return _was_executed(function, instruction, registers, lambda item: item.opcode == instruction.opcode
                         and item.operands == instruction.operands)  # fmt: skip


def _reads_a_copy(function: Function, old: Instruction, new: Instruction) -> bool:
    """Whether two instructions differ in one register that they read, and one of these two is a copy of the other."""
    a, b = access(old).reads & ~access(new).reads, access(new).reads & ~access(old).reads
    if access(old).writes != access(new).writes or a.bit_count() != 1 or b.bit_count() != 1:
        return False
    pair = {*register_names(a), *register_names(b)}
    return _was_executed(function, old, a | b, lambda item: item.opcode in ("MOV", "IMAD.MOV.U32")
                         and item.operands[1:-1] in ((), ("RZ", "RZ"))
                         and {item.operands[0], item.operands[-1].removesuffix(".reuse")} == pair)  # fmt: skip


def _was_executed(
    function: Function, instruction: Instruction, registers: int, is_given: Callable[[Instruction], bool]
) -> bool:
    """Whether on every path to an instruction an unguarded one for which ``is_given`` holds was executed, and nothing
    has written ``registers`` since."""
    graph = Graph(function)
    home = next(block.index for block in graph.blocks if instruction in block.instructions)
    code = graph.blocks[home].instructions
    pending, seen = [(home, code[: code.index(instruction)])], set[int]()
    while pending:
        block, before = pending.pop()
        for item in reversed(before):
            if item.guard is None and is_given(item):
                break
            if access(item).writes & registers:
                return False
        else:
            if block == 0:
                return False
            earlier = [item for item in graph.predecessors[block] if item not in seen]
            seen.update(earlier)
            pending += [(item, graph.blocks[item].instructions) for item in earlier]
    return True


def _are_apart(first: Instruction, second: Instruction) -> bool:
    """Whether two accesses cannot conflict: they only load or exchange registers, or use one address register with
    different offsets."""
    if {first.name, second.name} <= {"LDG", "LDS", "S2R", "S2UR", "SHFL"}:
        return True
    places = [next((text for text in item.operands if "[" in text), "") for item in (first, second)]
    bases = [re.sub(r"\+?0x[0-9a-f]+", "", text) for text in places]
    return first.name == second.name and bases[0] == bases[1] and places[0] != places[1]


def _matters(function: Function, address: int) -> bool:
    """Whether an instruction remains after dead code is removed. A write of the stack pointer is dead if nothing reads
    it."""
    code = function.instructions
    if not any(access(item).reads & STACK for item in code):
        code = tuple(replace(NOP, address=item.address) if access(item).writes == STACK else item for item in code)
    while True:
        function = replace(function, instructions=code)
        dead = {item.address for item in unread_instructions(code, RegisterLiveness(Graph(function)), function.sm)}
        if not dead:
            return any(item.address == address and item.name != "NOP" for item in code)
        code = tuple(replace(NOP, address=item.address) if item.address in dead else item for item in code)
