"""Finds loops that wait for memory: their exit depends on values that other threads may write."""

from __future__ import annotations

from typing import NamedTuple

from kernelproof.emulator.frontend.flow.blocks import Block
from kernelproof.emulator.frontend.flow.dataflow import RegisterWrite
from kernelproof.emulator.frontend.flow.loops import bits, immediate_postdominators, reachable
from kernelproof.emulator.frontend.instruction import defs_uses, facts, holds
from kernelproof.emulator.frontend.ptx import Instr, Mem, TensorOperand

# State spaces and modifiers of loads that never return a value which another thread writes during the loop.
_UNSHARED_LOADS = frozenset(("param", "const", "local", "nc"))


class Polling(NamedTuple):
    """A loop that waits for memory. ``reads``: identities (``id``) of the instructions that read that memory.
    ``deciding``: the registers on which its branches, waits and memory accesses depend. If these registers and memory
    have the same content as in an earlier iteration, the loop repeats itself."""

    reads: frozenset[int]
    deciding: frozenset[str]


def spin_heads(
    blocks: list[Block], loops: dict[int, int], sites: dict[str, list[RegisterWrite]], waiting_lines: frozenset[int]
) -> dict[int, Polling]:
    """Heads of loops whose exit depends on memory that another thread may write, and of loops whose heads are at one of
    ``waiting_lines`` (PTX lines). The largest loop comes first. ``loops``: head -> the mask of the loop's blocks.
    ``sites``: register -> its writes."""
    controls: dict[int, set[str]] | None = None
    out = {}
    for head, mask in sorted(loops.items(), key=lambda loop: (-loop[1].bit_count(), loop[0])):
        inside = set(bits(mask))
        polled = {id(ins) for i in inside for ins in blocks[i].all() if _may_poll(ins)}
        polled |= _repeated_loads(blocks, inside, sites)
        if polled and controls is None:
            controls = _controlling_conditions(blocks)
        reads = _exit_reads(blocks, inside, sites, polled, controls or {}) if polled else frozenset()
        if reads or blocks[head].line in waiting_lines:
            out[head] = Polling(reads, _deciding_registers(blocks, inside, sites))
    return out


def _may_poll(ins: Instr) -> bool:
    """May the result of an instruction depend on memory that another thread writes?"""
    form = facts(ins)
    return form is not None and holds(form.polls, ins)


def _repeated_loads(blocks: list[Block], inside: set[int], sites: dict[str, list[RegisterWrite]]) -> set[int]:
    """Loads (by identity) that read the same address in every iteration of a loop with a fence: only another thread can
    change the value there. ``inside``: the blocks of the loop."""
    instructions = [ins for i in inside for ins in blocks[i].all()]
    if not any(ins.base in ("membar", "fence") for ins in instructions):
        return set()
    loads = (ins for ins in instructions if ins.base == "ld" and not _UNSHARED_LOADS.intersection(ins.parts))
    return {
        id(ins)
        for ins in loads
        if not any(write.block in inside for name in defs_uses(ins)[1] for write in sites.get(name, ()))
    }


def _controlling_conditions(blocks: list[Block]) -> dict[int, set[str]]:
    """Per block: the conditions of branches that decide whether it is executed."""
    joins = immediate_postdominators(blocks)
    out: dict[int, set[str]] = {}
    for block in blocks:
        if block.cond is not None:
            for i in reachable(blocks, block.targets, joins[block.index]):
                out.setdefault(i, set()).add(block.cond.name)
    return out


def _exit_reads(
    blocks: list[Block],
    inside: set[int],
    sites: dict[str, list[RegisterWrite]],
    polled: set[int],
    controls: dict[int, set[str]],
) -> frozenset[int]:
    """The ``polled`` instructions (by identity) on which the exit of a loop depends, by values or by branches.
    ``inside``: the blocks of the loop. ``controls``: the result of ``_controlling_conditions``."""
    exits = [i for i in inside if any(t not in inside for t in blocks[i].targets)]
    conditions = {cond.name for i in inside if (cond := blocks[i].cond) is not None}
    todo = [cond.name for i in exits if (cond := blocks[i].cond) is not None]
    todo += [name for i in exits for name in controls.get(i, ()) if name in conditions]
    visited = set(todo)
    stores = (ins for i in inside for ins in blocks[i].all() if _accesses_shared(ins, "st"))
    stored = frozenset(name for ins in stores for name in defs_uses(ins)[1])
    reads = set()
    while todo:
        for write in sites.get(todo.pop(), ()):
            if write.block in inside:
                if id(write.ins) in polled:
                    reads.add(id(write.ins))
                # One thread may poll for its CTA, and store the value in shared memory for the other threads.
                forwarded = stored if _accesses_shared(write.ins, "ld") else frozenset()
                deciding = conditions.intersection(controls.get(write.block, ()))
                fresh = [name for name in {*write.uses, *forwarded, *deciding} if name not in visited]
                visited.update(fresh)
                todo += fresh
    return frozenset(reads)


def _deciding_registers(blocks: list[Block], inside: set[int], sites: dict[str, list[RegisterWrite]]) -> frozenset[str]:
    """The registers of ``Polling.deciding`` for the loop with these blocks."""
    todo = [cond.name for i in inside if (cond := blocks[i].cond) is not None]
    for i in inside:
        for ins in blocks[i].all():
            form = facts(ins)
            if form is None or form.waits or any(isinstance(operand, Mem | TensorOperand) for operand in ins.operands):
                todo += defs_uses(ins)[1]
    out = set(todo)
    while todo:
        for write in sites.get(todo.pop(), ()):
            if write.block in inside:
                fresh = [name for name in write.uses if name not in out]
                out.update(fresh)
                todo += fresh
    return frozenset(out)


def _accesses_shared(ins: Instr, base: str) -> bool:
    """Is an instruction, with this base (ld or st) of its opcode, an access to shared memory?"""
    return ins.base == base and any(part.startswith("shared") for part in ins.parts)
