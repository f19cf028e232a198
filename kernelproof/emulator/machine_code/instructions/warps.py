"""Lowers instructions that the lanes of a warp execute together: shuffles, votes, matches and reductions.

Their members are the active lanes, which have converged, or those that WARPSYNC.COLLECTIVE names.
"""

from __future__ import annotations

from kernelproof.emulator.machine_code.lowering import Lowering, is_predicate, is_zero, mnemonic
from kernelproof.sass import Instruction


def _members(low: Lowering) -> str:
    """The mask of the lanes that execute an instruction together."""
    return low.members or low.computed("activemask.b32")


def _result(low: Lowering, text: str) -> str:
    """A register as a result. For the zero register it is a temporary, so that the instruction has no guard and all
    members take part."""
    return low.temp() if is_zero(text) else low.target(text)


@mnemonic("SHFL", "IDX UP DOWN BFLY")
def shuffle(low: Lowering, ins: Instruction) -> None:
    """shfl.sync. The predicate says whether the source lane is in range."""
    p, result, a, b, c = ins.operands
    target = _result(low, result)
    in_range = low.temp("pred")
    sources = low.word(a), low.word(b), low.word(c), _members(low)
    low.emit(f"shfl.sync.{ins.modifiers[0].lower()}.b32", f"{target}|{in_range}", *sources)
    low.set_predicate(p, in_range)


@mnemonic("VOTE VOTEU", "ANY ALL EQ")
def vote(low: Lowering, ins: Instruction) -> None:
    """vote.sync: the mask of the lanes for which a predicate holds; and whether it holds for any or all lanes, or (EQ)
    is the same in all."""
    operands = list(ins.operands)
    result = operands.pop(0) if not is_predicate(operands[0]) else ""
    p, source = operands
    value, members = low.predicate(source), _members(low)
    if result and not is_zero(result):
        low.emit("vote.sync.ballot.b32", low.target(result), value, members)
    mode = {"ANY": "any", "ALL": "all", "EQ": "uni"}[ins.modifiers[0]]
    low.set_predicate(p, low.computed(f"vote.sync.{mode}.pred", value, members, kind="pred"))


@mnemonic("MATCH", "ANY ALL U64")
def match(low: Lowering, ins: Instruction) -> None:
    """match.sync: the mask of the lanes that have the same word, or pair of words."""
    operands = list(ins.operands)
    p = operands.pop(0) if is_predicate(operands[0]) else ""
    result, value = operands
    target, same = _result(low, result), low.temp("pred")
    mode = ins.modifiers[0].lower()
    size, source = ("b64", low.pair(value)) if "U64" in ins.modifiers else ("b32", low.word(value))
    low.emit(f"match.{mode}.sync.{size}", f"{target}|{same}" if p else target, source, _members(low))
    if p:
        low.set_predicate(p, same)


@mnemonic("REDUX CREDUX", "SUM MIN MAX AND OR XOR S32 U32")
def reduce(low: Lowering, ins: Instruction) -> None:
    """redux.sync. The operation is AND if none is named."""
    mode = next((part for part in ins.modifiers if part in ("SUM", "MIN", "MAX", "OR", "XOR")), "AND")
    kind = "b32" if mode in ("AND", "OR", "XOR") else "s32" if "S32" in ins.modifiers else "u32"
    name = "add" if mode == "SUM" else mode.lower()
    low.emit(f"redux.sync.{name}.{kind}", _result(low, ins.operands[0]), low.word(ins.operands[1]), _members(low))


@mnemonic("ELECT")
def elect(low: Lowering, ins: Instruction) -> None:
    """elect.sync: the number of one of the lanes, and whether this lane is that one."""
    p, result, condition = ins.operands
    if low.predicate(condition) != "1":
        raise low.refusal("an election among lanes with a predicate is not modelled")
    leader, own = _result(low, result), low.temp("pred")
    low.emit("elect.sync", f"{leader}|{own}", _members(low))
    low.set_predicate(p, own)
