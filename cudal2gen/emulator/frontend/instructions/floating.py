"""Handlers of floating-point instructions: f16, bf16, their pairs, f32, f64. Results are varying."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudal2gen.emulator.arithmetic import arithmetic
from cudal2gen.emulator.frontend.ptx import Imm, Instr, Operand, Vec
from cudal2gen.emulator.frontend.translate import Emitter, Value, instruction

_REAL = {"f32": "f4", "f64": "f8"}
_HALF = ("f16", "bf16", "f16x2", "bf16x2")
_ROUNDING = ("rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi")


def _function(ins: Instr) -> Any:
    """The NumPy function of float arrays behind an opcode."""
    base = ins.base
    if base in ("min", "max"):
        nan, larger = "NaN" in ins.parts, base == "max"
        if "abs" in ins.parts or "xorsign" in ins.parts:
            return None
        return lambda a, b: arithmetic.fmin(a, b, nan, larger)
    return {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
        "fma": lambda a, b, c: a * b + c,
        "mad": lambda a, b, c: a * b + c,
        "abs": np.abs,
        "neg": np.negative,
        "ex2": np.exp2,
        "tanh": np.tanh,
        "rcp": lambda a: 1 / a,
        "sqrt": np.sqrt,
        "rsqrt": lambda a: 1 / np.sqrt(a),
    }.get(base)


def _halves(e: Emitter, ins: Instr, kind: str) -> None:
    base = ins.base
    d, *operands = ins.operands
    u = "u4" if kind.endswith("x2") else "u2"
    texts = ", ".join(e.array(op, u) for op in operands)
    if base in ("abs", "neg"):
        bit = 0x80008000 if u == "u4" else 0x8000
        mask = bit ^ (0xFFFFFFFF if u == "u4" else 0xFFFF)
        e.assign(d, Value(f"{texts} & {mask}" if base == "abs" else f"{texts} ^ {bit}", u, False))
        return
    function = _function(ins)
    if function is None:
        raise e.fail()
    if base in ("fma", "mad") and kind.startswith("f16"):
        function = arithmetic.fma16
    elif base in ("ex2", "tanh", "div", "rcp", "sqrt", "rsqrt") and kind.startswith("f16"):
        inner = function

        def function(*args: Any) -> Any:
            return inner(*(x.astype(np.float64) for x in args)).astype(np.float16)

    if "relu" in ins.parts:
        wrapped = function

        def function(*args: Any) -> Any:
            out = wrapped(*args)
            return np.where(out < 0, out.dtype.type(0), out)

    elif "sat" in ins.parts:
        saturated = function

        def function(*args: Any) -> Any:
            return arithmetic.saturate(saturated(*args))

    name = e.bind("fn", function)
    call = "packed" if kind.endswith("x2") else "scalar16"
    e.assign(d, Value(f"A.{call}({kind!r}, {name}, {texts})", u, False))


def _finish(ins: Instr, text: str, kind: str) -> Value:
    if "ftz" in ins.parts:
        text = f"A.flush({text})"
    if "sat" in ins.parts:
        text = f"A.saturate({text})"
    return Value(text, _REAL[kind], False)


def _operand(e: Emitter, ins: Instr, op: Operand, kind: str, force_array: bool = False) -> str:
    text = e.array(op, _REAL[kind]) if force_array else e.number(op, _REAL[kind])
    if "ftz" in ins.parts and kind == "f32" and not isinstance(op, Imm):
        text = f"A.flush({text})"
    return text


def arithmetic2(e: Emitter, ins: Instr) -> None:
    """add, sub, mul, div, min, max of floats."""
    kind = ins.parts[-1]
    if kind in _HALF:
        _halves(e, ins, kind)
        return
    if kind not in _REAL or "bf16" in ins.parts or "f16" in ins.parts:
        raise e.fail()
    d, a, b = ins.operands[:3]
    if len(ins.operands) > 3:
        raise e.fail()
    mode = next((p for p in ins.parts if p in ("rz", "rm", "rp")), None)
    if mode is not None:
        if kind != "f32" or ins.base not in ("add", "sub", "mul"):
            raise e.fail("directed rounding of this operation")
        x, y = _operand(e, ins, a, kind, True), _operand(e, ins, b, kind, True)
        one = e.bind("one", np.float32(1))
        minus_zero = e.bind("mz", np.float32(-0.0))
        text = (
            f"A.fma32({x}, {y}, np.full(M.size, {minus_zero}), {mode!r})"
            if ins.base == "mul"
            else f"A.fma32({x}, np.full(M.size, {one}), {'' if ins.base == 'add' else '-'}{y}, {mode!r})"
        )
    elif ins.base in ("min", "max"):
        name = e.bind("fn", _function(ins))
        if _function(ins) is None:
            raise e.fail()
        text = f"{name}({_operand(e, ins, a, kind, True)}, {_operand(e, ins, b, kind, True)})"
    else:
        symbol = {"add": "+", "sub": "-", "mul": "*", "div": "/"}.get(ins.base)
        if symbol is None:
            raise e.fail()
        text = f"({_operand(e, ins, a, kind, True)} {symbol} {_operand(e, ins, b, kind)})"
    e.assign(d, _finish(ins, text, kind))


@instruction("fma")
def fma(e: Emitter, ins: Instr) -> None:
    """fma of all float types."""
    kind = ins.parts[-1]
    if kind in _HALF:
        _halves(e, ins, kind)
        return
    if kind not in _REAL:
        raise e.fail()
    d, a, b, c = ins.operands
    texts = ", ".join(_operand(e, ins, op, kind, True) for op in (a, b, c))
    mode = next((p for p in ins.parts if p in ("rz", "rm", "rp")), "rn")
    if kind == "f64":
        if mode != "rn":
            raise e.fail("directed rounding of f64")
        e.assign(d, Value(f"A.fma64({texts})", "f8", False))
        return
    e.assign(d, _finish(ins, f"A.fma32({texts}, {mode!r})", kind))


@instruction("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def arithmetic1(e: Emitter, ins: Instr) -> None:
    """abs, neg and the functions of one argument."""
    kind = ins.parts[-1]
    if kind in _HALF:
        _halves(e, ins, kind)
        return
    if kind not in _REAL:
        raise e.fail()
    d, a = ins.operands
    x = _operand(e, ins, a, kind, True)
    if ins.base in ("abs", "neg"):
        bits = 32 if kind == "f32" else 64
        u = f"u{bits // 8}"
        raw = e.array(a, u)
        sign = 1 << (bits - 1)
        e.assign(d, Value(f"{raw} & {sign - 1}" if ins.base == "abs" else f"{raw} ^ {sign}", u, False))
        return
    e.assign(d, _finish(ins, f"A.unary32({ins.base!r}, {x})", kind))


@instruction("copysign")
def copysign(e: Emitter, ins: Instr) -> None:
    """copysign: the sign of the first operand on the second."""
    kind = ins.parts[-1]
    d, a, b = ins.operands
    k = _REAL[kind]
    e.assign(d, Value(f"np.copysign({e.array(b, k)}, {e.array(a, k)})", k, False))


@instruction("testp")
def testp(e: Emitter, ins: Instr) -> None:
    """testp: the class of a number."""
    d, a = ins.operands
    e.assign(d, Value(f"A.test_float({ins.parts[1]!r}, {e.array(a, _REAL[ins.parts[-1]])})", "p", False))


def compare(e: Emitter, a: Operand, b: Operand, kind: str, test: str) -> Value:
    """Float comparison of setp and set."""
    if kind == "bf16":
        x, y = (f"A.bf16_to_f32({e.array(op, 'u2')})" for op in (a, b))
    elif kind == "f16":
        x, y = e.array(a, "f2"), e.array(b, "f2")
    elif kind in _REAL:
        x, y = e.array(a, _REAL[kind]), e.number(b, _REAL[kind])
    else:
        raise e.fail()
    if test in ("eq", "lt", "le", "gt", "ge"):
        symbol = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}[test]
        return Value(f"({x} {symbol} {y})", "p", False)
    if test not in arithmetic.COMPARE:
        raise e.fail()
    return Value(f"A.COMPARE[{test!r}]({x}, {y})", "p", False)


def set_packed(e: Emitter, ins: Instr, types: list[str]) -> None:
    """set on f16x2 and bf16x2."""
    kind = types[-1]
    d, a, b = ins.operands[:3]
    if types[0] not in ("f16x2", "bf16x2") or len(ins.operands) > 3:
        raise e.fail()
    test = arithmetic.COMPARE[ins.parts[1]]

    def function(x: Any, y: Any) -> Any:
        return test(x, y).astype(x.dtype)

    name = e.bind("fn", function)
    e.assign(d, Value(f"A.packed({kind!r}, {name}, {e.array(a, 'u4')}, {e.array(b, 'u4')})", "u4", False))


def convert(e: Emitter, ins: Instr) -> None:
    """cvt where a float takes part."""
    parts = ins.parts
    dst, src = parts[-2], parts[-1]
    mode = next((p for p in parts if p in _ROUNDING), "rn" if dst[0] in "fb" else "rzi")
    d = ins.operands[0]
    if dst in ("f16x2", "bf16x2"):
        if src != "f32" or len(ins.operands) != 3:
            raise e.fail()
        high, low = ins.operands[1:]
        relu = "relu" in parts
        text = f"A.pack_f32({e.array(high, 'u4')}, {e.array(low, 'u4')}, {dst[:-2]!r}, {mode!r}, {relu})"
        e.assign(d, Value(text, "u4", False))
        return
    if dst == "tf32":
        e.assign(d, Value(f"A.to_tf32({e.array(ins.operands[1], 'u4')}, {mode!r})", "u4", False))
        return
    known = {"f16", "bf16", "f32", "f64", "u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"}
    if dst not in known or src not in known or "relu" in parts or isinstance(ins.operands[1], Vec):
        raise e.fail()
    function = e.bind("cvt", arithmetic.converter(dst, src, mode, "ftz" in parts, "sat" in parts))
    s_bits = 16 if src == "bf16" else int(src[1:])
    d_bits = 16 if dst == "bf16" else int(dst[1:])
    sign = "i" if dst[0] == "s" else "u"
    text = f"{function}({e.array(ins.operands[1], f'u{s_bits // 8}')})"
    if sign == "i":
        text += f".view(i{d_bits // 8})"
    e.assign(d, Value(text, f"{sign}{d_bits // 8}", False))
