"""Finds register hazards: instructions that read or overwrite a register before an earlier one is done with it.

The hardware does not check this. ptxas encodes the waits in the control words, and an edited or reordered program that
misses a wait computes with old values in some of its runs. Which waits are needed was learnt from ptxas's own output
(``scheduling``). Where that output is ambiguous, nothing is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kernelproof.sass.completions import unawaited
from kernelproof.sass.decoding import SCOREBOARDS, Function, Instruction
from kernelproof.sass.in_flight import NEVER, Dependency, DependencyKind, InFlight
from kernelproof.sass.paths import Paths
from kernelproof.sass.registers import VECTOR, access, read_operands, register_names
from kernelproof.sass.scheduling import SchedulingFacts, facts

# The first bit of the number of the register in operand slots A, B and C; None if the slot has no register. Bits 9 to
# 11 name the form of an instruction. A literal, constant or uniform register takes bits 32 to 63. If it is the last
# operand (forms 2, 3 and 7), the register before it is in the bits of slot C. ptxas's reuse flags show it.
SLOTS: tuple[int | None, ...] = (24, 32, 64)
LITERAL_LAST: tuple[int | None, ...] = (24, 64, None)
ADDITION: tuple[int | None, ...] = (24, None, 32)  # of two registers: the second one is in slot C


@dataclass(frozen=True)
class RegisterHazard:
    """Two instructions of which ``later`` reads or overwrites ``registers`` of ``earlier`` too early.

    Without ``registers``: ``later`` is issued before ``earlier`` has taken effect. ``why``: which wait is missing, as a
    clause of a message.
    """

    earlier: Instruction
    later: Instruction
    registers: tuple[str, ...]
    why: str


def hazards(function: Function) -> list[RegisterHazard]:
    """The hazards of a function on any path, in the order of the later instructions' addresses.

    The list is empty for an architecture whose schedules are not known. If several instructions depend on the same
    registers of one earlier instruction in the same way, only the first of them is reported.
    """
    schedule = facts(function.sm)
    if schedule is None:
        return []
    flight = InFlight(function, schedule)
    found: dict[tuple[int, DependencyKind, int], RegisterHazard] = {}
    for dependency in sorted(flight.dependencies(), key=lambda dependency: (dependency.later, dependency.cycles)):
        key = dependency.earlier, dependency.kind, dependency.registers
        why = "" if key in found else _too_early(dependency, flight, schedule)
        if why:
            names = tuple(register_names(dependency.registers))
            found[key] = RegisterHazard(flight.code[dependency.earlier], flight.code[dependency.later], names, why)
    early = [RegisterHazard(earlier, later, (), why) for earlier, later, why in unawaited(function)]
    return sorted([*found.values(), *_stale_cache_reads(function), *early], key=lambda hazard: hazard.later.address)


def _too_early(dependency: Dependency, flight: InFlight, schedule: SchedulingFacts) -> str:
    """What is wrong with a dependency, as a clause of a message; empty if nothing is."""
    earlier, later = flight.code[dependency.earlier], flight.code[dependency.later]
    names = ", ".join(register_names(dependency.registers))
    verb = "is" if dependency.registers.bit_count() == 1 else "are"
    if dependency.kind is DependencyKind.FIXED:
        needed = schedule.latency(earlier, later, dependency.registers)
        if dependency.cycles >= needed:
            return ""
        cycles = f"{dependency.cycles} cycle{'s' if dependency.cycles > 1 else ''}"
        return f"{names} {verb} read {cycles} after the issue of {earlier.name}, which takes {needed}"
    waited = _scoreboard_names(sum(1 << board for board in later.control.waits) & dependency.scoreboards)
    guards = _scoreboard_names(dependency.scoreboards)
    if waited:
        early = f"{waited} is waited for in the cycle after it was taken"
    elif guards:
        early = f"nothing has waited for {guards}"
    else:
        early = "it takes no scoreboard"
    if dependency.kind is DependencyKind.OPERAND:
        return f"{names} {verb} overwritten while {earlier.name} may still read: {early}"
    done = "read" if dependency.kind is DependencyKind.READ else "overwritten"
    return f"{names} {verb} {done} before the result of {earlier.name} is there: {early}"


def _scoreboard_names(mask: int) -> str:
    """The names of the scoreboards in a mask, for a message."""
    return ", ".join(f"scoreboard {board}" for board in range(SCOREBOARDS) if mask >> board & 1)


def _stale_cache_reads(function: Function) -> Iterator[RegisterHazard]:
    """Reads of operands in the operand cache whose register was overwritten after it was cached.

    The reuse flag keeps an operand in one of three slots until an instruction reads another register in that slot, or
    until the warp jumps. The cache does not see writes to the register.
    """
    code, ends = function.instructions, Paths(function).ends
    for start, end in ends.items():
        for at in range(start, end):
            flags = code[at].control.reuse
            for slot in range(len(SLOTS)):
                if flags >> slot & 1 and code[at].guard not in NEVER:
                    yield from _stale_read(code[at:end], slot)


def _slots(instruction: Instruction) -> tuple[int | None, ...]:
    """The first bit of the number of the register in each operand slot of an instruction."""
    form = instruction.code >> 9 & 7
    if form in (2, 3, 7):
        return LITERAL_LAST
    return ADDITION if form == 1 and instruction.name in ("FADD", "HADD2") else SLOTS


def _number(instruction: Instruction, slot: int) -> int | None:
    """The number of the register in a slot of an instruction."""
    first = _slots(instruction)[slot]
    return None if first is None else instruction.code >> first & 255


def _stale_read(code: tuple[Instruction, ...], slot: int) -> Iterator[RegisterHazard]:
    """The hazard of the operand that the first instruction caches in a slot, if a later one reads it there when it is
    stale."""
    number = _number(code[0], slot)
    # The flag decides, not ``.reuse`` in the text, which nvdisasm omits if the instruction also writes the operand.
    kept = next((mask for mask, _ in read_operands(code[0]) if mask and _first_register(mask) == number), 0)
    writer = code[0] if access(code[0]).writes & kept else None
    for instruction in code[1:]:
        if not kept:
            return
        read_number = _number(instruction, slot)
        reads = [mask for mask, _ in read_operands(instruction) if mask & VECTOR]
        if read_number is not None and read_number in map(_first_register, reads) and instruction.guard not in NEVER:
            # The bits of a slot may also belong to a literal. So the instruction must read the register more often than
            # its other slots name it.
            others = sum(_number(instruction, other) == number for other in range(len(SLOTS)) if other != slot)
            certain = sum(_first_register(mask) == number for mask in reads) > others
            if read_number == number and writer is not None and certain:
                names = tuple(register_names(kept))
                why = f"{names[0]} is taken from the operand cache, as it was before {writer} has written it"
                yield RegisterHazard(code[0], instruction, names, why)
            return
        if access(instruction).writes & kept and instruction.guard not in NEVER:
            writer = instruction


def _first_register(mask: int) -> int:
    """The number of the first register of a mask."""
    return (mask & -mask).bit_length() - 1
