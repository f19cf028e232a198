"""Translates cvt, which converts between all types of integers and floats, to Python text."""

from __future__ import annotations

from kernelproof.emulator import arithmetic
from kernelproof.emulator.arithmetic.types import type_bits
from kernelproof.emulator.frontend.emitter import Emitter, Value
from kernelproof.emulator.frontend.instruction import INTEGERS, instruction
from kernelproof.emulator.frontend.instructions.integer import width_of
from kernelproof.emulator.frontend.mutation_operators import retype, truncate
from kernelproof.emulator.frontend.ptx import Instr, Vec

_SCALARS = frozenset(("f16", "bf16", "f32", "f64", "u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"))
_ROUNDING = ("rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi")


def _between_integers(parts: tuple[str, ...]) -> bool:
    return parts[-2] in INTEGERS and "sat" not in parts


@instruction("cvt", types=INTEGERS, serves=_between_integers, uniform=True)
def convert_integer(e: Emitter, ins: Instr) -> None:
    """cvt between integers: the low bits, or extension by the sign of the source."""
    dst, src = ins.parts[-2:]
    d, a = ins.operands
    dst_bits, src_bits = width_of(dst), width_of(src)
    v = e.signed(a, src_bits) if src[0] == "s" else e.raw(a, src_bits)
    if v.uniform:
        text, have = f"({v.text}) & {(1 << dst_bits) - 1}", e.operand_bits(d) or dst_bits
        # A narrow signed result is extended in a wider register.
        if dst[0] == "s" and dst_bits < have:
            text, dst_bits = f"S{dst_bits}({text}) & {(1 << have) - 1}", have
        e.assign(d, Value(text, f"u{dst_bits // 8}", True))
        return
    k = f"{'i' if dst[0] == 's' else 'u'}{dst_bits // 8}"
    if dst_bits == src_bits:
        text = v.text if v.kind == k else f"{v.text}.view({k})"
    elif dst_bits > src_bits:
        text = f"{v.text}.astype({'i' if src[0] == 's' else 'u'}{k[1:]}).view({k})"
    else:
        text = f"{v.text}.astype({k})"
    e.assign(d, Value(text, k, False))


_FP8 = frozenset(("e4m3x2", "e5m2x2"))


def _convert_fp8(e: Emitter, ins: Instr) -> None:
    """cvt from two f32 or one f16x2 to a pair of fp8, and from a pair of fp8 to f16x2."""
    parts = ins.parts
    dst, src = parts[-2:]
    relu = "relu" in parts
    d, a = ins.operands[:2]
    if dst == "f16x2" and src in _FP8:
        e.assign(d, Value(f"A.unpack_f8({e.array(a, 'u2')}, {src[:-2]!r}, {relu})", "u4", False))
    elif src == "f32" and "satfinite" in parts:
        high, low = e.array(a, "f4"), e.array(ins.operands[2], "f4")
        e.assign(d, Value(f"A.pack_f8({high}, {low}, {dst[:-2]!r}, {relu})", "u2", False))
    elif src == "f16x2" and "satfinite" in parts:
        word = e.temp(f"{e.array(a, 'u4')}.view('f2')")
        e.assign(d, Value(f"A.pack_f8({word}[1::2], {word}[::2], {dst[:-2]!r}, {relu})", "u2", False))
    else:
        raise e.fail()


def _narrow(e: Emitter, ins: Instr, mode: str) -> None:
    """cvt from f32 to f16, bf16 and their pairs, or tf32, with their modifiers."""
    e.refuse("sat", "ftz")
    dst, src = ins.parts[-2:]
    d, *operands = ins.operands
    kind = dst.removesuffix("x2")
    if kind not in ("f16", "bf16", "tf32") or src != "f32" or len(operands) != 1 + (kind != dst):
        raise e.fail()
    name = e.bind("cvt", arithmetic.narrower(kind, mode, "relu" in ins.parts, "satfinite" in ins.parts))
    arrays = ", ".join(e.array(op, "u4") for op in operands)
    if kind != dst:
        e.assign(d, Value(f"A.pack_f32({arrays}, {name})", "u4", False))
    else:
        e.assign(d, Value(f"{name}({arrays})", "u4" if kind == "tf32" else "u2", False))


def _with_float(parts: tuple[str, ...]) -> bool:
    return not (parts[-1] in INTEGERS and _between_integers(parts))


@instruction("cvt", serves=_with_float, mutations=(retype, truncate))
def convert(e: Emitter, ins: Instr) -> None:
    """cvt from or to a float, or with saturation."""
    e.refuse("pack", "rs")
    parts = ins.parts
    dst, src = parts[-2:]
    mode = next((p for p in parts if p in _ROUNDING), "rn" if dst[0] in "fb" else "rzi")
    if _FP8 & {dst, src}:
        _convert_fp8(e, ins)
        return
    if dst in ("f16x2", "bf16x2", "tf32") or {"relu", "satfinite"} & set(parts):
        _narrow(e, ins, mode)
        return
    d, a = ins.operands
    if not {dst, src} <= _SCALARS or isinstance(a, Vec):
        raise e.fail()
    function = e.bind("cvt", arithmetic.converter(dst, src, mode, "ftz" in parts, "sat" in parts))
    text = f"{function}({e.array(a, f'u{type_bits(src) // 8}')})"
    k = f"{'i' if dst[0] == 's' else 'u'}{type_bits(dst) // 8}"
    e.assign(d, Value(f"{text}.view({k})" if k[0] == "i" else text, k, False))
