"""Translates bulk copies (cp.async.bulk, cp.reduce.async.bulk) and the groups of their stores to Python text.

In this text, ``C`` is the batch's unit of bulk copies (``hopper.bulk``).
"""

from __future__ import annotations

from collections.abc import Iterator

from kernelproof.emulator.frontend.emitter import Emitter
from kernelproof.emulator.frontend.instruction import Writes, instruction
from kernelproof.emulator.frontend.instructions.memory import copy_access
from kernelproof.emulator.frontend.mutation_operators import (
    Change,
    Statement,
    adjust,
    drop,
    shift_register,
    swap,
    weaken,
)
from kernelproof.emulator.frontend.ptx import Instr, Mem, Operand, TensorOperand
from kernelproof.emulator.hopper.bulk import Delivery

_REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_WAITS = ("mbarrier.try_wait", "mbarrier.test_wait", "cp.async.bulk.wait_group")
# Mutations of bulk copies: dropped, or shifted by one row of a swizzle pattern.
_MUTATIONS = (drop, shift_register(128))


def _spaces(e: Emitter, ins: Instr) -> tuple[str, str]:
    """The state spaces of destination and source. Raises UnknownInstruction for modifiers that are not modelled."""
    heads = [p.split(":")[0] for p in ins.parts]
    spaces = [h for h in heads if h in ("shared", "global")]
    e.refuse("im2col", "im2col_no_offs", "gather4", "scatter4", "cp_mask", "ignore_oob")
    if len(spaces) != 2:
        raise e.fail()
    return spaces[0], spaces[1]


def _delivery(e: Emitter, ins: Instr, target: Operand, bar: Operand, ranks_operand: int) -> str:
    """The text of a ``Delivery``, which says where a copy to shared memory goes and on which mbarrier it completes.
    ``ranks_operand``: the number of the operand that has the ranks of a multicast."""
    ranks = e.array(ins.operands[ranks_operand], "u2") if _is_multicast(ins) else "None"
    reach = next(p for p in ins.parts if p.startswith("shared"))
    paired = "cta_group:2" in ins.parts
    return f"{e.bind('delivery', Delivery)}({e.shared(target, reach)}, {e.shared(bar, reach)}, {ranks}, {paired})"


@instruction(
    "cp.async.bulk", writes=Writes.MEMORY, completed_by=_WAITS, hopper=True, access=copy_access, mutations=_MUTATIONS
)
def copy(e: Emitter, ins: Instr) -> None:
    """cp.async.bulk of consecutive bytes to or from shared memory."""
    destination, origin = _spaces(e, ins)
    if "reduce" in ins.parts:
        raise e.fail()
    target, source, size = ins.operands[:3]
    count = e.array(size, "u4")
    if destination == "global":
        e.line(f"C.store({e.address(target, 'global')}, {e.shared(source, 'shared:cta')}, {count}, {e.lanes()})")
        return
    from_shared = origin == "shared"
    start = e.shared(source, "shared:cta") if from_shared else e.address(source, "global")
    e.line(f"C.load({start}, {count}, {_delivery(e, ins, target, ins.operands[3], 4)}, {e.lanes()}, {from_shared})")


def _is_multicast(ins: Instr) -> bool:
    """Does this copy write to several CTAs of a cluster?"""
    return any(p.split(":")[0] == "multicast" for p in ins.parts)


def _change_receivers(s: Statement) -> Iterator[Change]:
    """A mutation: CTA 0 is left out of a multicast, or is added to its receivers."""
    if _is_multicast(s.ins):
        yield from adjust("mask", 3, "b16", "xor.b16", "1")(s)


def _box(e: Emitter, tensor: TensorOperand) -> str:
    """The text of two arguments: the address of a box's tensor map, and the box's coordinates."""
    coordinates = ", ".join(e.array(c, "u4") for c in tensor.coordinates)
    return f"{e.address(Mem(tensor.base, tensor.offset), 'generic')}, [{coordinates}]"


@instruction(
    "cp.async.bulk.tensor",
    writes=Writes.MEMORY,
    completed_by=_WAITS,
    hopper=True,
    mutations=(*_MUTATIONS, _change_receivers),
)
def copy_tensor(e: Emitter, ins: Instr) -> None:
    """cp.async.bulk.tensor and its reductions: a box of a tiled tensor map to or from shared memory."""
    destination, origin = _spaces(e, ins)
    tensor = next(op for op in ins.operands if isinstance(op, TensorOperand))
    box = _box(e, tensor)
    if (destination, origin) == ("shared", "global"):
        target, _, bar = ins.operands[:3]
        e.line(f"C.load_tensor({box}, {_delivery(e, ins, target, bar, 3)}, {e.lanes()})")
        return
    reduction = next((p for p in ins.parts if p in _REDUCTIONS), "") if "reduce" in ins.parts else ""
    source = e.shared(ins.operands[1], "shared:cta")
    e.line(f"C.store_tensor({box}, {source}, {reduction!r}, {e.lanes()})")


@instruction("cp.async.bulk.prefetch", writes=Writes.NOTHING, hopper=True, mutations=_MUTATIONS)
def prefetch(e: Emitter, ins: Instr) -> None:
    """Prefetches have no effect on values."""


@instruction("cp.async.bulk.prefetch.tensor", writes=Writes.NOTHING, hopper=True, mutations=_MUTATIONS)
def prefetch_tensor(e: Emitter, ins: Instr) -> None:
    """cp.async.bulk.prefetch.tensor, which has no effect on values; but its tensor map must be one."""
    tensor = next(op for op in ins.operands if isinstance(op, TensorOperand))
    e.line(f"C.prefetch_tensor({_box(e, tensor)}, {e.lanes()})")


@instruction("cp.async.bulk.commit_group", writes=Writes.MEMORY, hopper=True, mutations=(drop,))
def commit(e: Emitter, ins: Instr) -> None:  # noqa: ARG001
    """cp.async.bulk.commit_group."""
    e.line(f"C.commit({e.mask()})")


def _wait_for_reads(s: Statement) -> Iterator[Change]:
    """A mutation: a wait for stores waits only until they have read their sources."""
    if "read" not in s.ins.parts:
        yield s.become("read", s.text.replace("wait_group", "wait_group.read", 1))


@instruction(
    "cp.async.bulk.wait_group", writes=Writes.MEMORY, hopper=True, mutations=(drop, weaken, swap, _wait_for_reads)
)
def wait(e: Emitter, ins: Instr) -> None:
    """cp.async.bulk.wait_group."""
    e.line(f"C.wait({e.literal(ins.operands[0])}, {'read' in ins.parts}, {e.mask()})")
