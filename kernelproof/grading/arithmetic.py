"""Counts the floating-point operations of PTX instructions, and finds those that compute in a too narrow type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from kernelproof.ground.chips import WARP

# The rank of a type is higher if its significand has more bits. Integers and types that are not listed have rank 0.
RANKS = {"f64": 7, "f32": 6, "tf32": 5, "f16": 4, "bf16": 3, "e4m3": 2, "e5m2": 1}
# Parts of opcodes: the sizes of a matrix instruction, a type, a scalar operation, an atomic sum, and an integer type at
# the end.
_TILE = re.compile(r"m(\d+)n(\d+)k(\d+)")
_TYPE = re.compile(
    r"\.(f64|f32|tf32|f16x2|f16|bf16x2|bf16|e4m3x2|e4m3|e5m2x2|e5m2|e2m3|e3m2|e2m1|s8|u8|s4|u4|b1|s32)\b"
)
_ARITHMETIC = re.compile(r"(fma|mad|mul|add|sub)\.")
_ATOMIC_ADD = re.compile(r"(atom|red)\..*\badd\..*(f64|f32|f16|f16x2|bf16|bf16x2)$")
_INTEGER = re.compile(r"\.(s16|u16|s32|u32|s64|u64)$")


class MatrixInstruction(NamedTuple):
    """A matrix instruction: operations per warp, the narrower of its operand types, and the accumulator's type."""

    flops: int
    operands: str
    accumulator: str


def rank(name: str) -> int:
    """How precise a type is; 0 for integers and for types of less than 8 bits."""
    return RANKS.get(name, 0)


def matrix(opcode: str) -> MatrixInstruction | None:
    """Describes an mma, wmma.mma or wgmma instruction; None for all others."""
    if not opcode.startswith(("mma.", "wmma.mma.", "wgmma.mma_async")):
        return None
    tile = _TILE.search(opcode)
    types = [match[1] for match in _TYPE.finditer(opcode)]
    if tile is None or not types:
        return None
    m, n, k = map(int, tile.groups())
    accumulator = types[0]
    # The names of fp16 wmma instructions contain only the types of D and C.
    operands = ["f16"] if opcode.startswith("wmma") and len(types) < 4 else types[1:3]
    return MatrixInstruction(2 * m * n * k, min(operands, key=rank, default="f16"), accumulator)


def scalar_flops(opcode: str, integers: bool) -> int:
    """The operations of one lane. Those on integers count only if ``integers`` is True."""
    if _ATOMIC_ADD.match(opcode):
        return 2 if "x2" in opcode else 1
    if (match := _ARITHMETIC.match(opcode)) is None:
        # dp4a and dp2a add four or two products.
        return {"dp4a": 8, "dp2a": 4}.get(opcode.split(".", maxsplit=1)[0], 0) if integers else 0
    integer = _INTEGER.search(opcode) is not None
    if integer and not integers:
        return 0
    lanes = 2 if "x2" in opcode else 1
    return lanes * (2 if match[1] in ("fma", "mad") else 1)


def flops(opcodes: Mapping[str, int], wgmma_flops: int, integers: bool) -> tuple[int, int]:
    """Upper bounds of the operations of executed instructions: of all of them, and of those on matrix units.

    ``opcodes``: opcode -> how often warps executed it, summed over all warps; all 32 lanes count. ``wgmma_flops``: the
    operations of wgmma instructions, which are counted elsewhere. ``integers``: whether integer operations count.
    """
    by_matrix, by_cores = wgmma_flops, 0
    for opcode, runs in opcodes.items():
        if opcode.startswith("wgmma."):
            continue
        unit = matrix(opcode)
        if unit is not None:
            by_matrix += runs * unit.flops
        else:
            by_cores += runs * WARP * scalar_flops(opcode, integers)
    return by_matrix + by_cores, by_matrix


class Downgrade(NamedTuple):
    """An instruction of lower precision than required.

    ``part``: what is imprecise, "operands", "accumulator", "conversion" or "sums". ``type``: the instruction's type,
    where ``required`` is needed. ``runs``: how often warps executed it; for "sums", the narrow floating-point
    operations of all such instructions, of which ``opcode`` is one.
    """

    opcode: str
    part: str
    type: str
    required: str
    runs: int


def downgrades(
    opcodes: Mapping[str, int], operands: str | None, accumulator: str | None, flops_needed: float, products: bool
) -> list[Downgrade]:
    """The instructions that multiply, sum or convert in a narrower type than required; None allows any type.

    ``flops_needed``: floating-point operations that the problem needs. Sums outside of matrix units count only if they
    amount to a quarter of these, because a scale or an epilogue in fp16 is no accumulator. If ``products`` is True,
    multiplications count in the same way, since they round products before these are summed. It is False for kernels
    that unpack weights, which may multiply in narrow types.
    """
    out, narrow_flops = [], 0.0
    narrow = ("", "")
    for opcode, runs in opcodes.items():
        unit = matrix(opcode)
        if unit is not None:
            if operands and rank(unit.operands) < rank(operands):
                out.append(Downgrade(opcode, "operands", unit.operands, operands, runs))
            if accumulator and rank(unit.accumulator) < rank(accumulator):
                out.append(Downgrade(opcode, "accumulator", unit.accumulator, accumulator, runs))
            continue
        converted = _converted_type(opcode)
        if operands and converted and rank(converted) < rank(operands):
            out.append(Downgrade(opcode, "conversion", converted, operands, runs))
        kind = _rounded_type(opcode, products)
        if accumulator and kind and rank(kind) < rank(accumulator):
            narrow_flops += runs * WARP * scalar_flops(opcode, integers=False)
            narrow = (opcode, kind)
    if accumulator and flops_needed and narrow_flops >= flops_needed / 4:
        out.append(Downgrade(narrow[0], "sums", narrow[1], accumulator, int(narrow_flops)))
    if operands:
        dots = [(opcode, runs) for opcode, runs in opcodes.items() if opcode.startswith(("dp4a.", "dp2a."))]
        out += [Downgrade(opcode, "operands", "8-bit integers", operands, runs) for opcode, runs in dots]
    return out


def _converted_type(opcode: str) -> str:
    """The narrower type to which a conversion rounds a float; "" for all other instructions.

    Integers of at most 8 bits count as such a type, since converting to them is quantisation; wider integers do not.
    """
    if not opcode.startswith("cvt."):
        return ""
    types = [match[1].removesuffix("x2") for match in _TYPE.finditer(opcode)]
    if len(types) < 2:
        return ""
    target, origin = types[0], types[1]
    if rank(origin) == 0 or rank(target) >= rank(origin):
        return ""
    if rank(target) == 0:
        return target if target in ("s8", "u8", "s4", "u4") else ""
    return target


def _rounded_type(opcode: str, products: bool) -> str:
    """The float type to which an addition or fma rounds, or a multiplication if ``products`` is True; else ""."""
    if not opcode.startswith(("fma.", "add.", "sub.", "mad.", *(["mul."] if products else []))):
        return ""
    types = [match[1].removesuffix("x2") for match in _TYPE.finditer(opcode)]
    return types[-1] if types and rank(types[-1]) else ""
