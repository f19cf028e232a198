"""Translates wgmma instructions (products of warpgroups, their fences and groups) to Python text.

In this text, ``X`` is the batch's unit ``hopper.warpgroup``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kernelproof.emulator.arithmetic.operands import ELEMENT_BITS
from kernelproof.emulator.frontend.emitter import Emitter
from kernelproof.emulator.frontend.instruction import Writes, instruction
from kernelproof.emulator.frontend.mutation_operators import (
    Change,
    Mutation,
    Statement,
    adjust,
    drop,
    retype,
    swap,
    weaken,
    without_last_warp,
)
from kernelproof.emulator.frontend.ptx import Instr, Operand, Reg, Vec
from kernelproof.emulator.hopper.tile import WgmmaForm


@instruction("wgmma.fence", writes=Writes.NOTHING, meets="warps", hopper=True, mutations=(drop,))
def fence(e: Emitter, ins: Instr) -> None:  # noqa: ARG001
    """wgmma.fence."""
    e.line(f"X.fence({e.mask()})")


@instruction("wgmma.commit_group", writes=Writes.NOTHING, hopper=True, mutations=(drop,))
def commit(e: Emitter, ins: Instr) -> None:  # noqa: ARG001
    """wgmma.commit_group."""
    e.line(f"X.commit({e.lanes()})")


@instruction("wgmma.wait_group", writes=Writes.NOTHING, hopper=True, mutations=(drop, weaken, swap, without_last_warp))
def wait(e: Emitter, ins: Instr) -> None:
    """wgmma.wait_group."""
    e.line(f"X.wait({e.literal(ins.operands[0])}, {e.mask()})")


def _descriptor(kind: str, op: str, operand: str) -> Mutation:
    """A mutation: the first operand that is a descriptor (A, or B if A is in registers) is changed by an instruction
    ``op`` with this operand."""

    def mutation(s: Statement) -> Iterator[Change]:
        index = 3 if isinstance(s.ins.operands[1], Vec) else 2
        yield from adjust(kind, index, "b64", op, operand)(s)

    return mutation


def _registers_in_use(ins: Instr) -> Iterator[Operand]:
    """The operands whose registers must not be written until the instruction is complete: D, and A if it is in
    registers."""
    yield ins.operands[0]
    if isinstance(ins.operands[1], Vec):
        yield ins.operands[1]


# The bits of a descriptor that name the swizzle mode.
_SWIZZLE = "0xC000000000000000"
# A product multiplies 32 bytes of each row of A.
_ROW_BITS = 256
_SIZE = re.compile(r"m64n(\d+)k(\d+)$")
# Type of A -> types of accumulators.
_ACCUMULATORS = {
    "f16": ("f16", "f32"), "bf16": ("f32",), "tf32": ("f32",), "e4m3": ("f16", "f32"), "e5m2": ("f16", "f32"),
    "s8": ("s32",), "u8": ("s32",),
}  # fmt: skip


def _form(e: Emitter, ins: Instr) -> WgmmaForm:
    """The modifiers of a product. After the predicate, the operands are the signs of A and B and, for operands in
    shared memory, whether they are M- or N-major; all of these may be missing."""
    parts = ins.parts
    size = next((match for part in parts if (match := _SIZE.match(part))), None)
    types = [part for part in parts if part in ELEMENT_BITS]
    if size is None or len(types) != 3 or {"sp", "popc"} & set(parts) or e.guard is not None:
        raise e.fail()
    acc, kind_a, kind_b = types
    columns, bits = int(size[1]), ELEMENT_BITS[kind_a]
    fits = bits == ELEMENT_BITS[kind_b] and acc in _ACCUMULATORS.get(kind_a, ()) and int(size[2]) == _ROW_BITS // bits
    if not fits or (bits == 16 and kind_a != kind_b) or columns % 8 or not 8 <= columns <= 256:
        raise e.fail()
    _, a, _, *trailing = ins.operands
    numbers = [e.literal(op) for op in trailing[1:]]
    registers = isinstance(a, Vec)
    sign_a, sign_b, *majors = [*numbers, 0, 0, 0, 0] if numbers else [1, 1, 0, 0]
    m_major_a, n_major_b = (False, bool(majors[0])) if registers else (bool(majors[0]), bool(majors[1]))
    sign = float(sign_a * sign_b)
    return WgmmaForm(columns, kind_a, kind_b, acc, registers, m_major_a, n_major_b, sign, "satfinite" in parts)


@instruction(
    "wgmma.mma_async",
    updates=True,
    meets="warps",
    completed_by=("wgmma.wait_group",),
    accumulates=_registers_in_use,
    hopper=True,
    # A descriptor counts bytes in units of 16, so the step by 2 is one of 32 bytes, the k of one product.
    mutations=(_descriptor("step", "add.u64", "2"), _descriptor("swizzle", "xor.b64", _SWIZZLE), retype),
)
def mma(e: Emitter, ins: Instr) -> None:
    """wgmma.mma_async of dense f16, bf16, tf32, e4m3, e5m2, s8 and u8."""
    form = _form(e, ins)
    d, a, b, *trailing = ins.operands
    if not isinstance(d, Vec) or len(d.items) != form.n // (4 if form.acc == "f16" else 2):
        raise e.fail("wrong number of registers")
    accumulates = e.predicate(trailing[0]).text
    name = e.bind("form", form)
    left = _tuple(_variables(e, a)) if isinstance(a, Vec) else e.array(a, "u8")
    names = _variables(e, d)
    call = f"X.mma({name}, {_tuple(names)}, {left}, {e.array(b, 'u8')}, {accumulates}, m, {e.site()})"
    e.line(f"{', '.join(names)} = {call}")
    if isinstance(a, Vec):
        # The registers of A must not be written until the product is complete, so the unit marks them as in use.
        names = _variables(e, a)
        e.line(f"{', '.join(names)} = X.lend({_tuple(names)}, m)")


def _tuple(names: list[str]) -> str:
    """The text of a tuple of these names."""
    return f"({', '.join(names)},)"


def _variables(e: Emitter, operand: Vec) -> list[str]:
    """Names of the variables of registers; emits no read, because they may hold incomplete accumulators."""
    names = [e.variable(item.name) for item in operand.items if isinstance(item, Reg)]
    if len(names) != len(operand.items):
        raise e.fail("register expected")
    return names
