"""Finds pairs of instructions whose registers meet too early: the later one does not wait for the earlier one.

The hardware checks none of this. ptxas writes the waits into the control words, and an edited or reordered program that
misses one computes with old values, in most runs or in few. What counts as a wait is what ptxas's own output keeps
(``scheduling``); where that leaves a doubt nothing is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kernelproof.sass.decoding import Function, Instruction
from kernelproof.sass.in_flight import NEVER, VECTOR, InFlight, Meets, RegisterMeeting
from kernelproof.sass.paths import Paths
from kernelproof.sass.registers import access, read_operands, register_names
from kernelproof.sass.scheduling import SchedulingFacts, facts

SLOTS = (24, 32, 64)  # the first bit of the number of the register in operand slots A, B and C


@dataclass(frozen=True)
class RegisterHazard:
    """An instruction and a later one that meets its registers too early. ``why``: in words."""

    earlier: Instruction
    later: Instruction
    registers: tuple[str, ...]
    why: str


def hazards(function: Function) -> list[RegisterHazard]:
    """The hazards of a function on any path, in the order of the later instructions' addresses. Empty for an
    architecture whose schedules are not known. Of several instructions that meet the same registers of one earlier
    instruction in the same way, the first is named."""
    known = facts(function.sm)
    if known is None:
        return []
    flight = InFlight(function, known)
    found: dict[tuple[int, Meets, int], RegisterHazard] = {}
    for meeting in sorted(flight.meetings(), key=lambda meeting: (meeting.later, meeting.cycles)):
        key = meeting.earlier, meeting.how, meeting.registers
        why = "" if key in found else _too_early(meeting, flight, known)
        if why:
            names = tuple(register_names(meeting.registers))
            found[key] = RegisterHazard(flight.code[meeting.earlier], flight.code[meeting.later], names, why)
    return sorted([*found.values(), *_stale(function)], key=lambda hazard: hazard.later.address)


def _too_early(meeting: RegisterMeeting, flight: InFlight, known: SchedulingFacts) -> str:
    """What is wrong with a meeting, in words; empty if nothing is."""
    earlier, later = flight.code[meeting.earlier], flight.code[meeting.later]
    names = ", ".join(register_names(meeting.registers))
    verb = "is" if meeting.registers.bit_count() == 1 else "are"
    if meeting.how is Meets.FIXED:
        needed = known.latency(earlier, later, meeting.registers)
        if meeting.cycles >= needed:
            return ""
        cycles = f"{meeting.cycles} cycle{'s' if meeting.cycles > 1 else ''}"
        return f"{names} {verb} read {cycles} after the issue of {earlier.name}, which takes {needed}"
    waited = _boards(sum(1 << board for board in later.control.waits) & meeting.scoreboards)
    guards = _boards(meeting.scoreboards)
    if waited:
        early = f"{waited} is waited for in the cycle after it was taken"
    elif guards:
        early = f"nothing has waited for {guards}"
    else:
        early = "it takes no scoreboard"
    if meeting.how is Meets.OPERAND:
        return f"{names} {verb} overwritten while {earlier.name} may still read: {early}"
    done = "read" if meeting.how is Meets.READ else "overwritten"
    return f"{names} {verb} {done} before the result of {earlier.name} is there: {early}"


def _boards(mask: int) -> str:
    return ", ".join(f"scoreboard {board}" for board in range(6) if mask >> board & 1)


def _stale(function: Function) -> Iterator[RegisterHazard]:
    """Reads from the operand cache of what has been overwritten since.

    A flag keeps the operand in one of three slots until an instruction reads another register in that slot, or until
    the warp jumps. The cache does not see writes.
    """
    code, ends = function.instructions, Paths(function).ends
    for start, end in ends.items():
        for at in range(start, end):
            flags = code[at].control.reuse
            for slot, first in enumerate(SLOTS):
                if flags >> slot & 1 and code[at].guard not in NEVER:
                    yield from _stale_reads(code[at:end], first)


def _stale_reads(code: tuple[Instruction, ...], first: int) -> Iterator[RegisterHazard]:
    """The read of a stale operand that the first instruction keeps in the slot at bit ``first``."""
    number = code[0].code >> first & 255
    # The flag counts, not the ``.reuse`` in the text: nvdisasm leaves it out where the instruction writes the operand.
    kept = next((mask for mask, _ in read_operands(code[0]) if mask and _first(mask) == number), 0)
    writer = code[0] if access(code[0]).writes & kept else None
    for instruction in code[1:]:
        if not kept:
            return
        held = instruction.code >> first & 255
        reads = [mask for mask, _ in read_operands(instruction) if mask & VECTOR]
        if held in map(_first, reads) and instruction.guard not in NEVER:
            # The bits of a slot may also belong to a literal: the register must not be explained by another slot.
            others = sum((instruction.code >> other & 255) == number for other in SLOTS if other != first)
            certain = sum(_first(mask) == number for mask in reads) > others
            if held == number and writer is not None and certain:
                names = tuple(register_names(kept))
                why = f"{names[0]} is taken from the operand cache, as it was before {writer} has written it"
                yield RegisterHazard(code[0], instruction, names, why)
            return
        if access(instruction).writes & kept and instruction.guard not in NEVER:
            writer = instruction


def _first(mask: int) -> int:
    """The number of the first register of a mask."""
    return (mask & -mask).bit_length() - 1
