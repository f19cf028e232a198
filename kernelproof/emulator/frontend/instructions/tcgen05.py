"""Translates tcgen05 instructions (allocation, loads, stores and products in tensor memory, fences) to Python text.

In this text, ``TA`` is the batch's unit ``blackwell.allocation``, ``TM`` is ``blackwell.accesses``, and ``TP`` is
``blackwell.products``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kernelproof.emulator.blackwell.accesses import TensorAccess
from kernelproof.emulator.blackwell.fragments import SHAPES
from kernelproof.emulator.blackwell.products import Operands
from kernelproof.emulator.frontend.emitter import Emitter
from kernelproof.emulator.frontend.instruction import Writes, instruction
from kernelproof.emulator.frontend.mutation_operators import (
    Change,
    Mutation,
    Statement,
    adjust,
    drop,
    shift_register,
    swap,
)
from kernelproof.emulator.frontend.ptx import Imm, Instr, Mem, Operand, Reg, Vec


def _group(e: Emitter, ins: Instr) -> int:
    """The cta_group of an instruction, 1 or 2."""
    group = next((part for part in ins.parts if part.startswith("cta_group:")), None)
    if group is None:
        raise e.fail("cta_group is missing")
    return int(group[-1])


# --- allocation


def _half_columns(s: Statement) -> Iterator[Change]:
    """A mutation: half of the columns are allocated or freed."""
    columns = s.ins.operands[-1]
    if isinstance(columns, Imm):
        yield s.become("fewer", re.sub(r"\b\d+\s*;$", f"{columns.value // 2};", s.text))


def _after_relinquish(s: Statement) -> Iterator[Change]:
    """A mutation: the allocation comes after a relinquish_alloc_permit."""
    group = next(part for part in s.ins.parts if part.startswith("cta_group")).replace(":", "::")
    yield s.become("late", f"tcgen05.relinquish_alloc_permit.{group}.sync.aligned; {s.text}")


def _other_group(s: Statement) -> Iterator[Change]:
    """A mutation: the other cta_group."""
    groups = {"cta_group::1": "cta_group::2", "cta_group::2": "cta_group::1"}
    for group, replacement in groups.items():
        if group in s.text:
            yield s.become("group", s.text.replace(group, replacement))


@instruction(
    "tcgen05.alloc", writes=Writes.MEMORY, waits=True, meets="warp", blackwell=True,
    mutations=(_half_columns, _after_relinquish), access=lambda _ins, space: 4 if space == "shared" else 0,
)  # fmt: skip
def alloc(e: Emitter, ins: Instr) -> None:
    """tcgen05.alloc."""
    address, columns = ins.operands
    e.wait("TA.alloc", str(_group(e, ins)), e.shared(address), e.array(columns, "u4"))


@instruction("tcgen05.dealloc", writes=Writes.MEMORY, meets="warp", blackwell=True, mutations=(drop, _half_columns))
def dealloc(e: Emitter, ins: Instr) -> None:
    """tcgen05.dealloc."""
    address, columns = ins.operands
    e.line(f"TA.dealloc({_group(e, ins)}, {e.array(address, 'u4')}, {e.array(columns, 'u4')}, {e.lanes()})")


@instruction("tcgen05.relinquish_alloc_permit", writes=Writes.MEMORY, meets="warp", blackwell=True)
def relinquish(e: Emitter, ins: Instr) -> None:
    """tcgen05.relinquish_alloc_permit."""
    e.line(f"TA.relinquish({_group(e, ins)}, {e.lanes()})")


# --- loads and stores

NEXT_LANES = 32 << 16  # added to an address in tensor memory: the lanes of the next warp


def _access(e: Emitter, ins: Instr) -> TensorAccess:
    """The modifiers of a load or store. Shape .16x32bx2 has one more operand, the columns between its parts."""
    shape = next((part for part in ins.parts if part in SHAPES), None)
    times = next((int(part[1:]) for part in ins.parts if re.fullmatch(r"x\d+", part)), 0)
    if shape is None or not times or "red" in ins.parts:
        raise e.fail()
    packed = bool({"pack:16b", "unpack:16b"} & set(ins.parts))
    split = e.literal(next(op for op in ins.operands if isinstance(op, Imm))) if shape == "16x32bx2" else 0
    return TensorAccess(shape, times, packed, split)


def _destination(ins: Instr) -> Iterator[Operand]:
    """The operand of tcgen05.ld whose registers are incomplete until tcgen05.wait::ld."""
    yield ins.operands[0]


def _registers(e: Emitter, operand: Operand, access: TensorAccess) -> tuple[Operand, ...]:
    """The registers of a load or store, as many as its modifiers need."""
    items = operand.items if isinstance(operand, Vec) else (operand,)
    if len(items) != SHAPES[access.shape][0] * access.times:
        raise e.fail("wrong number of registers")
    return items


@instruction(
    "tcgen05.ld", meets="warp", completed_by=("tcgen05.wait:ld", "emu_loaded"), accumulates=_destination,
    blackwell=True, mutations=(swap, shift_register(NEXT_LANES)),
)  # fmt: skip
def load(e: Emitter, ins: Instr) -> None:
    """tcgen05.ld."""
    access = _access(e, ins)
    items = _registers(e, ins.operands[0], access)
    names = [e.variable(item.name) for item in items if isinstance(item, Reg)]
    if len(names) != len(items):
        raise e.fail("register expected")
    call = f"TM.load({e.bind('access', access)}, {e.address(ins.operands[1], 'shared')}, {e.lanes()})"
    if e.guard is None:
        e.line(f"{', '.join(names)}, = {call}")
        return
    guard, loaded = e.mask(), e.temp(call)
    for i, name in enumerate(names):
        e.line(f"{name} = X.merge({guard}, {loaded}[{i}], {name})")


@instruction(
    "tcgen05.st", writes=Writes.MEMORY, meets="warp", completed_by=("tcgen05.wait:st",), blackwell=True,
    mutations=(drop, shift_register(NEXT_LANES)),
)  # fmt: skip
def store(e: Emitter, ins: Instr) -> None:
    """tcgen05.st."""
    access = _access(e, ins)
    values = e.arrays(_registers(e, ins.operands[-1], access), "u4")
    e.line(f"TM.store({e.bind('access', access)}, {e.address(ins.operands[0], 'shared')}, {values}, {e.lanes()})")


@instruction("tcgen05.wait:ld", writes=Writes.MEMORY, meets="warp", blackwell=True, mutations=(drop, swap))
def wait_load(e: Emitter, ins: Instr) -> None:  # noqa: ARG001
    """tcgen05.wait::ld."""
    e.line(f"TM.wait_load({e.lanes()})")


@instruction("emu_loaded", writes=Writes.MEMORY, blackwell=True)
def loaded(e: Emitter, ins: Instr) -> None:  # noqa: ARG001
    """A wait of machine code for a scoreboard that loads of tensor memory take. Some lanes of a warp may execute it."""
    e.line(f"TM.wait_scoreboard({e.lanes()})")


@instruction("tcgen05.wait:st", writes=Writes.MEMORY, meets="warp", blackwell=True, mutations=(drop, swap))
def wait_store(e: Emitter, ins: Instr) -> None:  # noqa: ARG001
    """tcgen05.wait::st."""
    e.line(f"TM.wait_store({e.lanes()})")


@instruction("tcgen05.fence:before_thread_sync", writes=Writes.NOTHING, blackwell=True, mutations=(drop, swap))
def fence_before(e: Emitter, ins: Instr) -> None:  # noqa: ARG001
    """tcgen05.fence::before_thread_sync."""
    e.line(f"TM.fence_before({e.mask()})")


@instruction("tcgen05.fence:after_thread_sync", writes=Writes.NOTHING, blackwell=True, mutations=(drop, swap))
def fence_after(e: Emitter, ins: Instr) -> None:  # noqa: ARG001
    """tcgen05.fence::after_thread_sync."""
    e.line(f"TM.fence_after({e.mask()})")


# --- products


def _descriptor(kind: str, op: str, operand: str) -> Mutation:
    """A mutation: the descriptor of B is changed by an instruction ``op`` with this operand."""
    return adjust(kind, 2, "b64", op, operand)


def _always_accumulate(s: Statement) -> Iterator[Change]:
    """A mutation: the products are always added to the accumulator."""
    index = next(i for i, op in enumerate(s.ins.operands) if i > 3 and isinstance(op, Reg))
    changed = s.with_operand(index, " mutant")
    yield s.become("keep", f"{{ .reg .pred mutant; setp.eq.u32 mutant, 0, 0; {changed} }}")


# What a mutation changes in descriptors: the swizzle mode of B (bits 61 to 63); in the instruction descriptor the
# lowest bit of N / 8 (from bit 17 on), and the types of A and B (bits 7 and 10), f16 to bf16 or back.
_SWIZZLE, _N, _TYPES = "0x4000000000000000", "0x20000", "0x480"
# Modifiers of tcgen05.mma whose products are not modelled.
_UNMODELLED = ("sp", "ws", "ashift", "block_scale", "collector:b")


@instruction(
    "tcgen05.mma",
    writes=Writes.MEMORY,
    completed_by=("mbarrier.try_wait", "mbarrier.test_wait"),
    blackwell=True,
    mutations=(
        drop,
        _descriptor("step", "add.u64", "2"),
        _descriptor("swizzle", "xor.b64", _SWIZZLE),
        adjust("shape", 3, "b32", "xor.b32", _N),
        adjust("type", 3, "b32", "xor.b32", _TYPES),
        _always_accumulate,
    ),
)
def mma(e: Emitter, ins: Instr) -> None:
    """tcgen05.mma of kind::f16, A in shared or tensor memory."""
    # Only machine code has kind::of_descriptor, which means that the instruction descriptor decides the kind.
    parts = ins.parts
    unmodelled = [part for part in parts if part.split(":")[0] in _UNMODELLED or part.startswith("scale_vec")]
    if not {"kind:f16", "kind:of_descriptor"} & set(parts) or unmodelled:
        kinds = unmodelled or [part for part in parts if part.startswith("kind:")]
        raise e.fail(f"{', '.join(f'.{part}' for part in kinds).replace(':', '::')} is not modelled")
    group = _group(e, ins)
    d, a, b, descriptor, *trailing = ins.operands
    disabled = "None"
    if trailing and isinstance(trailing[0], Vec):
        mask = trailing.pop(0)
        if not isinstance(mask, Vec) or len(mask.items) != 4 * group:
            raise e.fail("wrong number of registers of disabled lanes")
        # Compilers usually write literal zeros, which leave all lanes enabled.
        if any(not isinstance(item, Imm) or item.value for item in mask.items):
            disabled = e.arrays(mask.items, "u4")
    accumulates = e.predicate_array(trailing[0])
    scale = e.literal(trailing[1]) if len(trailing) > 1 else 0
    a_in_tensor_memory = isinstance(a, Mem)
    left = e.address(a, "shared") if a_in_tensor_memory else e.array(a, "u8")
    addresses = f"{e.address(d, 'shared')}, {left}, {e.array(b, 'u8')}, {e.array(descriptor, 'u4')}"
    operands = f"{group}, {a_in_tensor_memory}, {addresses}, {disabled}, {accumulates}, {scale}, {'kind:f16' in parts}"
    e.line(f"TP.mma({e.bind('operands', Operands)}({operands}), {e.lanes()})")


def _own_cta_only(s: Statement) -> Iterator[Change]:
    """A mutation: only the own CTA gets the arrival of a multicast."""
    if any(part.startswith("multicast") for part in s.ins.parts):
        head = s.text.split(None, 1)[0].replace(".multicast::cluster", "")
        yield s.become("alone", f"{head} {s.operands[0]};")


@instruction(
    "tcgen05.commit", writes=Writes.MEMORY, blackwell=True, mutations=(drop, swap, _own_cta_only, _other_group)
)
def commit(e: Emitter, ins: Instr) -> None:
    """tcgen05.commit."""
    multicast = any(part.startswith("multicast") for part in ins.parts)
    ranks = e.array(ins.operands[1], "u2") if multicast else "None"
    e.line(f"TP.commit({_group(e, ins)}, {e.shared(ins.operands[0])}, {ranks}, {e.lanes()})")


@instruction("tcgen05.cp", "tcgen05.shift", writes=Writes.MEMORY, blackwell=True)
def copy_or_shift(e: Emitter, ins: Instr) -> None:
    """none: copies of scale factors and shifts of accumulators serve kinds of products that are not modelled."""
    raise e.fail(f"{'.'.join(ins.parts[:2])} is not modelled: kind::f16 needs no scale factors in tensor memory")
