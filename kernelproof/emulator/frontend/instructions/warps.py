"""Translates shuffles, votes, matches, reductions and election, which a warp executes together, to Python text.

In this text, ``W`` is the batch's unit of warp-wide operations.
"""

from __future__ import annotations

from kernelproof.emulator.frontend.emitter import Emitter, Value
from kernelproof.emulator.frontend.instruction import instruction
from kernelproof.emulator.frontend.ptx import TYPE_BYTES, Instr, Operand, Pair, Reg, Sym


def is_discarded(op: Operand) -> bool:
    """Is the destination the sink ``_``?"""
    return isinstance(op, Sym | Reg) and op.name == "_"


def _assign_pair(e: Emitter, d: Operand, call: str) -> None:
    """Write the two results of a call to the destinations ``d|p``, a word and a predicate; either may be missing."""
    first, second = (d.first, d.second) if isinstance(d, Pair) else (d, None)
    out = e.temp(call)
    if not is_discarded(first):
        e.assign(first, Value(f"{out}[0]", "u4", False))
    if second is not None and not is_discarded(second):
        e.assign(second, Value(f"{out}[1]", "p", False))


@instruction("shfl.sync", meets="lanes")
def shfl(e: Emitter, ins: Instr) -> None:
    """shfl.sync."""
    mode = next(part for part in ins.parts if part in ("up", "down", "bfly", "idx"))
    d, a, b, c, members = ins.operands
    scalars = ", ".join(e.scalar(op) for op in (b, c, members))
    _assign_pair(e, d, f"W.shfl({mode!r}, {e.array(a, 'u4')}, {scalars}, {e.lanes()})")


@instruction("vote.sync", meets="lanes")
def vote(e: Emitter, ins: Instr) -> None:
    """vote.sync, with its modifiers in any order."""
    d, a, members = ins.operands
    mode = next(part for part in ins.parts if part in ("any", "all", "uni", "ballot"))
    text = f"W.vote({mode!r}, {e.predicate_array(a)}, {e.scalar(members)}, {e.lanes()})"
    e.assign(d, Value(text, "u4" if mode == "ballot" else "p", False))


@instruction("match", meets="lanes")
def match(e: Emitter, ins: Instr) -> None:
    """match.sync."""
    d, a, members = ins.operands
    value = e.array(a, f"u{TYPE_BYTES[ins.parts[-1]]}")
    _assign_pair(e, d, f"W.match({ins.parts[1]!r}, {value}, {e.scalar(members)}, {e.lanes()})")


@instruction("redux", types=frozenset(("u32", "s32", "b32")), meets="lanes")
def redux(e: Emitter, ins: Instr) -> None:
    """redux.sync on integers."""
    d, a, members = ins.operands
    signed = ins.parts[-1] == "s32"
    text = f"W.redux({ins.parts[2]!r}, {e.array(a, 'u4')}, {e.scalar(members)}, {e.lanes()}, {signed})"
    e.assign(d, Value(text, "u4", False))


@instruction("activemask")
def activemask(e: Emitter, ins: Instr) -> None:
    """activemask: the lanes that execute it together."""
    e.assign(ins.operands[0], Value(f"W.activemask({e.mask()})", "u4", False))


@instruction("elect", meets="lanes")
def elect(e: Emitter, ins: Instr) -> None:
    """elect.sync: the lowest lane of the members."""
    d, members = ins.operands
    _assign_pair(e, d, f"W.elect({e.scalar(members)}, {e.lanes()})")
