"""Instructions that the lanes of a warp execute together, and releases by single lanes, which come after them.

The PTX ISA promises order of memory accesses only for bar.warp.sync. But what a lane did before an instruction of its
whole warp, such as mma.sync, is over in practice when another lane releases after it, so it is not held against a
program (see ``LaneReleases.gather``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kernelproof.emulator.frontend.instruction import Writes, facts
from kernelproof.emulator.frontend.ptx import Instr, Mem, TensorOperand

_TOGETHER = frozenset(("mma", "wmma", "ldmatrix", "stmatrix", "movmatrix"))


def may_release(instructions: Iterable[Instr]) -> bool:
    """May a kernel have releases by single lanes of a warp to threads of its CTA?"""
    return any(
        ins.base in ("mbarrier", "fence", "membar") or not {"release", "acq_rel", "mbarrier"}.isdisjoint(ins.parts)
        for ins in instructions
    )


def gathered(instructions: Sequence[Instr]) -> frozenset[int]:
    """The places in a block at which its lanes must be noted to have executed instructions together: numbers of the
    instructions that come next. One note does for a run of such instructions, up to the next one that touches memory or
    to the end of the block."""
    places, open_run = set(), False
    for i, ins in enumerate(instructions):
        if _is_of_warps(ins):
            open_run = True
        elif open_run and _touches_memory(ins):
            places.add(i)
            open_run = False
    if open_run:
        places.add(len(instructions))
    return frozenset(places)


def _is_of_warps(ins: Instr) -> bool:
    form = facts(ins)
    return ins.base in _TOGETHER or "sync" in ins.parts or (form is not None and bool(form.meets))


def _touches_memory(ins: Instr) -> bool:
    form = facts(ins)
    is_access = any(isinstance(operand, Mem | TensorOperand) for operand in ins.operands)
    return is_access or form is None or form.writes is not Writes.RESULT
