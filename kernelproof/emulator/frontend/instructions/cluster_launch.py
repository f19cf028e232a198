"""Translates clusterlaunchcontrol, by which a running cluster cancels clusters that have not started, to Python text.

In this text, ``CL`` is the batch's unit ``blackwell.cluster_launch``.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernelproof.emulator.frontend.emitter import Emitter, Value
from kernelproof.emulator.frontend.instruction import Writes, instruction
from kernelproof.emulator.frontend.mutation_operators import Change, Statement, drop
from kernelproof.emulator.frontend.ptx import Instr, Reg, Vec


def _always_cancelled(s: Statement) -> Iterator[Change]:
    """A mutation: every response counts as a cancelled cluster."""
    yield s.become("always", f"setp.eq.u32 {s.operands[0].strip()}, 0, 0;")


@instruction(
    "clusterlaunchcontrol.try_cancel",
    writes=Writes.MEMORY,
    completed_by=("mbarrier.try_wait", "mbarrier.test_wait"),
    blackwell=True,
    mutations=(drop,),
)
def try_cancel(e: Emitter, ins: Instr) -> None:
    """clusterlaunchcontrol.try_cancel.async."""
    response, bar = ins.operands
    multicast = any(part.startswith("multicast") for part in ins.parts)
    reach = next((part for part in ins.parts if part.startswith("shared")), "generic")
    e.line(f"CL.try_cancel({e.shared(response, reach)}, {e.shared(bar, reach)}, {multicast}, {e.lanes()})")


@instruction("clusterlaunchcontrol.query_cancel.is_canceled", blackwell=True, mutations=(_always_cancelled,))
def is_canceled(e: Emitter, ins: Instr) -> None:
    """clusterlaunchcontrol.query_cancel.is_canceled."""
    d, response = ins.operands
    e.assign(d, Value(f"CL.is_canceled({e.array(response, 'u16')}, {e.mask()})", "p", False))


# A suffix such as ::x belongs to its part of the opcode, so ``get_first_ctaid::x`` is not the part ``get_first_ctaid``
# (all coordinates). Hence the two registrations below: one for that part, one for the parts in this table.
_AXES = {f"get_first_ctaid:{name}": axis for axis, name in enumerate("xyz")}


@instruction("clusterlaunchcontrol.query_cancel.get_first_ctaid", blackwell=True)
@instruction(
    "clusterlaunchcontrol.query_cancel", serves=lambda parts: not _AXES.keys().isdisjoint(parts), blackwell=True
)
def first_ctaid(e: Emitter, ins: Instr) -> None:
    """clusterlaunchcontrol.query_cancel.get_first_ctaid: all coordinates, or one of them."""
    d, response = ins.operands
    words = e.array(response, "u16")
    axis = next((_AXES[part] for part in ins.parts if part in _AXES), None)
    # The fourth element of a vector is unspecified, so nothing is written to it.
    targets = d.items[:3] if isinstance(d, Vec) else (d,)
    for i, target in enumerate(targets):
        if isinstance(target, Reg) and target.name != "_":
            text = f"CL.first_ctaid({words}, {i if axis is None else axis}, {e.lanes()})"
            e.assign(target, Value(text, "u4", False))
