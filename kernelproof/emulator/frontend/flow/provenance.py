"""Finds the parameters and module variables from which an address is computed, and those through which a kernel writes.

The analysis ignores control flow: a register counts as holding every pointer that any of its writes may give it. The
result may therefore name too many pointers, but never too few.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kernelproof.emulator.frontend.instruction import Writes, defs_uses, facts, symbols
from kernelproof.emulator.frontend.ptx import TYPE_BYTES, Instr, Mem, Reg, Sym, TensorOperand, Vec
from kernelproof.emulator.state.launch_state import Origin

Origins = frozenset[Origin]
_NO_POINTERS: Origins = frozenset()
_SPACES = ("shared", "global", "local", "param")
# Instructions whose 64-bit result may be a pointer that cannot be traced, such as one that was loaded from memory.
_UNTRACEABLE = frozenset(("ld", "ldu", "atom", "shfl", "mapa", "getctarank"))


def origins(
    instructions: Iterable[Instr],
    kinds: Mapping[str, str],
    places: Mapping[str, tuple[str, int]],
    words: bool = False,
) -> dict[str, Origins]:
    """Each 64-bit register -> the pointers that its value may be computed from, over all of its writes.

    A register is absent if it may hold a pointer that cannot be traced, or if its value comes from no pointer.
    ``kinds``: the declared type of each register, such as u64. ``places``: state space and offset of each variable and
    parameter. ``words``: a pointer may also be in two 32-bit registers, as in machine code; then the result has these
    registers, too.
    """
    widths = ("64", "32") if words else ("64",)
    # Per write: the register, the pointers that the instruction contributes, and the registers that it reads.
    writes: list[tuple[str, Origins | None, list[str]]] = []
    for ins in instructions:
        defs, uses = defs_uses(ins)
        wide = [name for name in defs if kinds.get(name, "").endswith(widths)]
        if wide:
            contributed = _contributed_pointers(ins, places, words)
            sources = [] if contributed is None or ins.base == "ld" else uses
            writes += [(name, contributed, sources) for name in wide]
    result: dict[str, Origins | None] = {name: _NO_POINTERS for name, _, _ in writes}
    # A fixed point: sets only grow, and None (cannot be traced) is never taken back, so the loop ends.
    changed = True
    while changed:
        changed = False
        for name, contributed, sources in writes:
            before = result[name]
            if before is None:
                continue
            after: Origins | None = None if contributed is None else before | contributed
            for source in sources:
                part = result.get(source, _NO_POINTERS)
                after = None if after is None or part is None else after | part
            if after != before:
                result[name], changed = after, True
    return {name: pointers for name, pointers in result.items() if pointers}


def _contributed_pointers(ins: Instr, places: Mapping[str, tuple[str, int]], words: bool) -> Origins | None:
    """The pointers that an instruction itself contributes; None if it may contribute one that cannot be traced."""
    if ins.base in ("ld", "ldu"):
        address = ins.operands[1]
        width = TYPE_BYTES.get(ins.parts[-1], 8)
        if (
            isinstance(address, Mem)
            and isinstance(address.base, Sym)
            and places.get(address.base.name, ("",))[0] == "param"
        ):
            first = places[address.base.name][1] + address.base.offset + address.offset
            count = len(ins.operands[0].items) if isinstance(ins.operands[0], Vec) else 1
            # A parameter is named by its offset in bytes. Only 64-bit values can be pointers. With ``words``, a 32-bit
            # load stands for the aligned 64-bit parameter that contains it.
            if words and width == 4:
                return frozenset((first + i * width) & ~7 for i in range(count))
            return frozenset(first + i * width for i in range(count)) if width == 8 else _NO_POINTERS
        return None if width >= (4 if words else 8) else _NO_POINTERS
    packed = ins.base == "mov" and len(ins.operands) > 1 and isinstance(ins.operands[1], Vec) and not words
    if ins.base in _UNTRACEABLE or packed:
        return None
    return frozenset(name for name in symbols(ins) if places.get(name, ("",))[0] in ("global", "const"))


def written_pointers(instructions: Iterable[Instr], pointers: Mapping[str, Origins]) -> Origins | None:
    """The pointers through which global memory may be written; None if an address cannot be traced. ``pointers``: the
    result of ``origins``."""
    out: set[Origin] = set()
    for ins in instructions:
        form = facts(ins)
        spaces = [part.split(":")[0] for part in ins.parts if part.split(":")[0] in _SPACES]
        if form is None or Writes.MEMORY not in form.writes or (spaces and spaces[0] != "global"):
            continue
        address = next((operand for operand in ins.operands if isinstance(operand, Mem | TensorOperand)), None)
        if address is None:
            continue
        pointers_of_address = (
            pointers.get(address.base.name) if isinstance(address, Mem) and isinstance(address.base, Reg) else None
        )
        if pointers_of_address is None:
            return None
        out |= pointers_of_address
    return frozenset(out)
