"""Finds instructions that read the upper bits of generic addresses of shared and local memory.

These bits say where the device has its windows of shared and local memory. They differ between devices, drivers and
emulators, and no computation needs them. Registers are followed through address arithmetic, not through memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kernelproof.emulator.frontend.instruction import results_and_operands
from kernelproof.emulator.frontend.ptx import Imm, Instr, Operand, Pair, Reg, Vec

OFFSET_BITS = 24  # the most bits of an address inside a window
# Instructions whose result is a generic address if an operand is one.
_ARITHMETIC = ("mov", "add", "sub", "mad", "selp", "or", "xor", "and", "min", "max", "cvt")
_BIT_COUNTS = ("clz", "popc", "brev", "bfind")
_FLOATS = ("f16", "f32", "f64")


def window_readings(instructions: Sequence[Instr]) -> list[Instr]:
    """Those instructions of a kernel that read the upper bits of a generic address."""
    used = {name for ins in instructions for name in results_and_operands(ins)[1]}
    addresses: set[str] = set()  # registers that may hold a generic address
    known = -1  # how many of them were known before the last round; a round that finds no further one is the last
    while known != len(addresses):
        known = len(addresses)
        for ins in instructions:
            if _makes_address(ins) or _keeps_address(ins, addresses):
                addresses.update(_names(ins.operands[:1]))
    return [ins for ins in instructions if _reads_window(ins, addresses, used)]


def _makes_address(ins: Instr) -> bool:
    """Does it convert an address of shared or local memory to a generic one?"""
    spaces = [part for part in ins.parts if part.startswith(("shared", "local"))]
    return ins.base == "cvta" and "to" not in ins.parts and bool(spaces)


def _keeps_address(ins: Instr, addresses: set[str]) -> bool:
    """Is the result a generic address, as an operand is? A difference of two addresses is none, and neither are the low
    bits of an address."""
    is_wide = ins.parts[-1].endswith("64") or "wide" in ins.parts
    if ins.base not in _ARITHMETIC or not is_wide or isinstance(ins.operands[0], Vec):
        return False
    if ins.base == "cvt" and not ins.parts[-2].endswith("64"):
        return False
    sources = [name in addresses for name in _names(ins.operands[1:])]
    if ins.base == "sub":
        return sources.count(True) == 1
    if ins.base == "and" and (mask := _mask(ins)) is not None:
        return any(sources) and mask >= 1 << OFFSET_BITS
    return any(sources)


def _reads_window(ins: Instr, addresses: set[str], used: set[str]) -> bool:
    """Does it read upper bits of an address? A comparison with zero or another address does not. ``used``: the
    registers that some instruction of the kernel reads."""
    operands = ins.operands[1:]
    if addresses.isdisjoint(_names(operands)):
        return False
    match ins.base:
        case "shr" | "bfe":
            shift = operands[1]
            return not isinstance(shift, Imm) or shift.value >= OFFSET_BITS
        case "and":
            mask = _mask(ins)
            return mask is not None and mask != 0 and mask % (1 << OFFSET_BITS) == 0
        case "setp" | "set":
            return any(isinstance(item, Imm) and abs(item.value) >> OFFSET_BITS for item in operands[:2])
        case "mov":  # an address that is unpacked: {low, high}
            return isinstance(ins.operands[0], Vec) and not used.isdisjoint(_names(ins.operands[0].items[1:]))
        case "cvt":
            return ins.parts[-2] in _FLOATS
    return ins.base in _BIT_COUNTS


def _mask(ins: Instr) -> int | None:
    """The mask of an ``and`` with a constant, as an unsigned number of 64 bits."""
    masks = (item.value % (1 << 64) for item in ins.operands[1:] if isinstance(item, Imm))
    return next(masks, None)


def _names(operands: tuple[Operand, ...]) -> Iterator[str]:
    """The names of the registers among operands, also in vectors; addresses of memory accesses are left out."""
    for item in operands:
        if isinstance(item, Reg):
            yield item.name
        elif isinstance(item, Vec):
            yield from _names(item.items)
        elif isinstance(item, Pair):
            yield from _names((item.first, item.second))
