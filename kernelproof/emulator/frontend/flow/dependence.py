"""Finds instructions that depend on the contents of memory: by an address, a guard, or whether they are executed."""

from __future__ import annotations

from typing import NamedTuple

from kernelproof.emulator.frontend.flow.blocks import Block
from kernelproof.emulator.frontend.flow.loops import immediate_postdominators, reachable
from kernelproof.emulator.frontend.instruction import INTEGERS, Writes, defs_uses, facts
from kernelproof.emulator.frontend.ptx import Instr, Mem, TensorOperand
from kernelproof.emulator.frontend.registers import registers

# Instructions whose result comes from memory; parameters and constants do not count.
_LOADS = ("ld", "ldu", "atom", "ldmatrix", "wmma", "tcgen05")


class Dependence(NamedTuple):
    """The instructions that depend on loaded values: by an address, a guard, an operand other than a stored value, or
    whether they are executed. ``lines``: their PTX lines. ``writes``: some of them write memory or wait for other
    threads."""

    lines: frozenset[int]
    writes: bool


def memory_dependence(blocks: list[Block]) -> Dependence:
    """The instructions that depend on loaded values. Values that are stored and loaded again count as loaded, so the
    answer is a superset."""
    lists = [list(block.all()) for block in blocks]
    joins = immediate_postdominators(blocks)
    loaded: set[str] = set()
    controlled: set[int] = set()  # blocks whose execution depends on loaded values
    known = -1
    # Both sets only grow; they are complete when a pass over all blocks adds nothing.
    while known != len(loaded) + len(controlled):
        known = len(loaded) + len(controlled)
        for block, instructions in zip(blocks, lists, strict=True):
            for ins in instructions:
                defs, uses = defs_uses(ins)
                if _loads(ins) or block.index in controlled or not loaded.isdisjoint(uses):
                    loaded.update(defs)
            if block.cond is not None and block.cond.name in loaded:
                controlled |= reachable(blocks, block.targets, joins[block.index])
    dependent = [
        ins
        for block, instructions in zip(blocks, lists, strict=True)
        for ins in instructions
        if block.index in controlled or not loaded.isdisjoint(_deciding(ins))
    ]
    return Dependence(frozenset(ins.line for ins in dependent), any(map(_affects_others, dependent)))


def loaded_registers(blocks: list[Block]) -> set[str]:
    """The registers whose values are computed from results of plain loads; control flow is ignored.

    Results of atomics do not count, because the inputs do not decide them: an example is which CTA arrives last.
    """
    instructions = [(*defs_uses(ins), _loads(ins) and ins.base != "atom") for block in blocks for ins in block.all()]
    loaded: set[str] = set()
    known = -1
    while known != len(loaded):
        known = len(loaded)
        for defs, uses, is_load in instructions:
            if is_load or not loaded.isdisjoint(uses):
                loaded.update(defs)
    return loaded


def compares_loaded(ins: Instr, loaded: set[str]) -> bool:
    """Does an instruction compare floats, or bits for equality, that are computed from loaded values?"""
    if ins.base not in ("setp", "set", "testp") or (ins.parts[-1] in INTEGERS and ins.parts[1] not in ("eq", "ne")):
        return False
    return any(name in loaded for operand in ins.operands[1:3] for name in registers(operand))


def _loads(ins: Instr) -> bool:
    """Does the result of an instruction come from memory other than parameters and constants?"""
    return ins.base in _LOADS and not {"param", "const"} & set(ins.parts)


def _deciding(ins: Instr) -> set[str]:
    """The registers that decide whether and where an instruction acts: those of its addresses and its guard; if it has
    no address, all that it reads."""
    addresses = [operand for operand in ins.operands if isinstance(operand, Mem | TensorOperand)]
    if not addresses:
        return set(defs_uses(ins)[1])
    names = {name for operand in addresses for name in registers(operand)}
    return names if ins.guard is None else names | {ins.guard.name}


def _affects_others(ins: Instr) -> bool:
    """May an instruction write memory or wait for other threads?"""
    form = facts(ins)
    return form is None or form.waits or Writes.MEMORY in form.writes
