"""Translates instructions on mbarriers, and those other than bulk copies that complete on mbarriers, to Python text.

In this text, ``B`` is the batch's unit ``hopper.mbarrier``, and ``F`` is ``hopper.async_stores``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kernelproof.emulator.frontend.emitter import Emitter, Value
from kernelproof.emulator.frontend.instruction import Writes, instruction
from kernelproof.emulator.frontend.instructions.memory import join_elements
from kernelproof.emulator.frontend.instructions.warps import is_discarded
from kernelproof.emulator.frontend.mutation_operators import (
    Change,
    Mutation,
    Statement,
    adjust,
    drop,
    narrow,
    shift,
    vector_bytes,
)
from kernelproof.emulator.frontend.ptx import TYPE_BYTES, Instr, Mem, Reg, Vec
from kernelproof.emulator.state.scopes import ORDERS, Scope, scope_in


def _order(ins: Instr) -> int:
    """The memory order of an arrival or a wait: its scope, and whether it releases or acquires."""
    return scope_in(ins.parts, Scope.CTA) | (0 if "relaxed" in ins.parts else ORDERS)


# --- arrivals


def _expect_more_bytes(s: Statement) -> Iterator[Change]:
    """A mutation: 16 bytes more are expected."""
    if "expect_tx" in s.ins.parts:
        yield from adjust("bytes", len(s.ins.operands) - 1, "b32", "add.u32", "16")(s)


@instruction(
    "mbarrier.arrive", writes=Writes.RESULT | Writes.MEMORY, hopper=True, mutations=(drop, _expect_more_bytes, narrow)
)
@instruction(
    "mbarrier.arrive_drop", writes=Writes.RESULT | Writes.MEMORY, hopper=True, mutations=(_expect_more_bytes, narrow)
)
def arrive(e: Emitter, ins: Instr) -> None:
    """mbarrier.arrive, with a state or without, after expect_tx or with a count."""
    operands = list(ins.operands)
    state = operands.pop(0) if not isinstance(operands[0], Mem) else None
    address = e.shared(operands[0])
    extra = e.array(operands[1], "u4") if len(operands) > 1 else None
    count, expected = "1", "None"
    if extra is not None and "expect_tx" in ins.parts:
        expected = extra
    elif extra is not None:
        count = extra
    mask = e.mask()
    text = f"B.arrive({address}, {count}, {expected}, {mask}, {e.site()}, {_order(ins)}, {'arrive_drop' in ins.parts})"
    if state is None or is_discarded(state):
        e.line(text)
    else:
        e.assign(state, Value(text, "u8", False))


def _write_call(e: Emitter, ins: Instr, method: str) -> None:
    """Write a call of a method of the mbarriers with an address and a number, the instruction's two operands."""
    mem, number = ins.operands
    e.line(f"B.{method}({e.shared(mem)}, {e.array(number, 'u4')}, {e.lanes()})")


@instruction("mbarrier.expect_tx", writes=Writes.MEMORY, hopper=True, mutations=(drop, _expect_more_bytes))
def expect(e: Emitter, ins: Instr) -> None:
    """mbarrier.expect_tx."""
    _write_call(e, ins, "expect")


@instruction("mbarrier.complete_tx", writes=Writes.MEMORY, hopper=True, mutations=(drop,))
def complete(e: Emitter, ins: Instr) -> None:
    """mbarrier.complete_tx."""
    _write_call(e, ins, "complete")


@instruction("cp.async.mbarrier.arrive", writes=Writes.MEMORY, hopper=True)
def copies_arrive(e: Emitter, ins: Instr) -> None:
    """cp.async.mbarrier.arrive."""
    address = e.shared(ins.operands[0])
    e.line(f"B.copies_arrive({address}, {'noinc' in ins.parts}, {e.lanes()})")


@instruction(
    "st.async",
    writes=Writes.MEMORY,
    completed_by=("mbarrier.try_wait", "mbarrier.test_wait"),
    hopper=True,
    mutations=(shift(0, "shift", vector_bytes), drop),
)
def store_async(e: Emitter, ins: Instr) -> None:
    """st.async: a store that completes on an mbarrier of the destination's CTA."""
    width = TYPE_BYTES[ins.parts[-1]]
    mem, value, bar = ins.operands
    items = value.items if isinstance(value, Vec) else (value,)
    data = join_elements(e, items, width)
    place, signal = (e.shared(op, "shared:cluster") for op in (mem, bar))
    e.line(f"F.store({place}, {data}, {width * len(items)}, {signal}, {e.lanes()})")


# --- init and inval


def _change_count(kind: str, op: str) -> Mutation:
    """A mutation: one arrival more, or one less, is expected."""
    return adjust(kind, 1, "b32", op, "1")


@instruction(
    "mbarrier.init",
    writes=Writes.MEMORY,
    hopper=True,
    mutations=(_change_count("count", "add.u32"), _change_count("discount", "sub.u32")),
)
def init(e: Emitter, ins: Instr) -> None:
    """mbarrier.init."""
    _write_call(e, ins, "init")


@instruction("mbarrier.inval", writes=Writes.MEMORY, hopper=True)
def invalidate(e: Emitter, ins: Instr) -> None:
    """mbarrier.inval."""
    address = e.shared(ins.operands[0])
    e.line(f"B.invalidate({address}, {e.lanes()})")


# --- waits


def _skip_wait(s: Statement) -> Iterator[Change]:
    """A mutation: there is no wait, or its result is always true."""
    if isinstance(s.ins.operands[0], Reg):
        # The first operand of the text after the opcode: the predicate of the result.
        name = s.text.split(s.ins.parts[1], 1)[1].split(None, 1)[1].split(",", maxsplit=1)[0].strip()
        yield s.become("skip", f"setp.eq.u32 {name}, 0, 0;")
        yield s.become("once", f"{s.text} setp.eq.u32 {name}, 0, 0;")


def _flip_parity(s: Statement) -> Iterator[Change]:
    """A mutation: the wait is for the other parity."""
    if "parity" in s.ins.parts:
        yield from adjust("parity", 2, "b32", "xor.b32", "1")(s)


def _wait_arguments(e: Emitter, ins: Instr, index: int) -> str:
    """The text of a wait's arguments: its address (operand number ``index``), the phase, whether the phase is given as
    a parity, and the memory order."""
    parity = "parity" in ins.parts
    token = e.array(ins.operands[index + 1], "u4" if parity else "u8")
    return f"{e.shared(ins.operands[index])}, {token}, {parity}, {_order(ins)}"


@instruction("mbarrier.test_wait", polls=True, hopper=True, mutations=(_skip_wait, _flip_parity, narrow))
def test_wait(e: Emitter, ins: Instr) -> None:
    """mbarrier.test_wait."""
    e.assign(ins.operands[0], Value(f"B.test_wait({_wait_arguments(e, ins, 1)}, {e.lanes()})", "p", False))


def _wait_and_result(ins: Instr) -> Iterator[Instr]:
    """Expand a try_wait to a wait, which ends a block, and an instruction that reads its result."""
    yield replace(ins, op="emu_try_wait", parts=("emu_try_wait", *ins.parts[2:]), operands=ins.operands[1:])
    yield replace(ins, op="emu_waited", parts=("emu_waited",), operands=ins.operands[:1])


@instruction("mbarrier.try_wait", expands=_wait_and_result, hopper=True, mutations=(_skip_wait, _flip_parity, narrow))
def try_wait(e: Emitter, ins: Instr) -> None:  # noqa: ARG001
    """mbarrier.try_wait; its expansion is written instead."""
    raise e.fail()


@instruction("emu_try_wait", writes=Writes.NOTHING, waits=True, hopper=True)
def wait(e: Emitter, ins: Instr) -> None:
    """The waiting part of a try_wait."""
    e.wait("B.try_wait", _wait_arguments(e, ins, 0))


@instruction("emu_waited", hopper=True)
def wait_result(e: Emitter, ins: Instr) -> None:
    """The result of the preceding try_wait."""
    e.assign(ins.operands[0], Value("B.waited()", "p", False))
