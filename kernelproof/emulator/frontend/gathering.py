"""Finds the instructions that all lanes of a warp execute together, after which a single lane may release.

The PTX ISA orders memory accesses of different lanes only by bar.warp.sync. But in practice, accesses before a
warp-wide instruction such as mma.sync are complete when any lane of the warp releases after it. So programs that rely
on this are not reported (see ``LaneReleases.gather``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kernelproof.emulator.frontend.instruction import Writes, facts
from kernelproof.emulator.frontend.ptx import Instr, Mem, TensorOperand

_WARP_WIDE = frozenset(("mma", "wmma", "ldmatrix", "stmatrix", "movmatrix"))


def may_release(instructions: Iterable[Instr]) -> bool:
    """May a kernel have releases by single lanes of a warp to threads of its CTA?"""
    return any(
        ins.base in ("mbarrier", "fence", "membar") or not {"release", "acq_rel", "mbarrier"}.isdisjoint(ins.parts)
        for ins in instructions
    )


def gather_places(instructions: Sequence[Instr]) -> frozenset[int]:
    """The places in a block before which a call of ``LaneReleases.gather`` must be inserted, as numbers of
    instructions.

    The call records that the lanes have executed warp-wide instructions together. One call is enough for a sequence of
    such instructions; it comes before the next instruction that touches memory, or at the end of the block.
    """
    places, open_run = set(), False
    for i, ins in enumerate(instructions):
        if _is_warp_wide(ins):
            open_run = True
        elif open_run and _touches_memory(ins):
            places.add(i)
            open_run = False
    if open_run:
        places.add(len(instructions))
    return frozenset(places)


def _is_warp_wide(ins: Instr) -> bool:
    """Do the lanes of a warp execute an instruction together?"""
    form = facts(ins)
    return ins.base in _WARP_WIDE or "sync" in ins.parts or (form is not None and bool(form.meets))


def _touches_memory(ins: Instr) -> bool:
    """May an instruction access memory?"""
    form = facts(ins)
    is_access = any(isinstance(operand, Mem | TensorOperand) for operand in ins.operands)
    return is_access or form is None or form.writes is not Writes.RESULT
