"""Floating-point instructions on f16, bf16, their pairs, f32 and f64. Results are varying registers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernelproof.emulator import arithmetic
from kernelproof.emulator.frontend.emitter import Emitter, Value
from kernelproof.emulator.frontend.instruction import FLOATS, HALVES, REALS, instruction
from kernelproof.emulator.frontend.mutation_operators import lose, lose_nan, twice
from kernelproof.emulator.frontend.ptx import Imm, Instr, Operand
from kernelproof.emulator.state.arrays import Array

_REAL = {"f32": "f4", "f64": "f8"}
Function = Callable[..., Array]
_FUNCTIONS: dict[str, Function] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "fma": lambda a, b, c: a * b + c,
    "mad": lambda a, b, c: a * b + c,
    "ex2": np.exp2,
    "tanh": np.tanh,
    "rcp": lambda a: 1 / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
}
# Functions of f16 that are computed in float64 and rounded once.
_WIDENED = ("ex2", "tanh", "div", "rcp", "sqrt", "rsqrt")
_SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


def _extremum(e: Emitter, ins: Instr) -> Function:
    """min or max."""
    if "abs" in ins.parts or "xorsign" in ins.parts:
        raise e.fail()
    nan, larger = "NaN" in ins.parts, ins.base == "max"
    return lambda a, b: arithmetic.fmin(a, b, nan, larger)


# --- halves


def _half_function(e: Emitter, ins: Instr) -> Function:
    """The NumPy function of float arrays behind an opcode on halves."""
    base, is_f16 = ins.base, ins.parts[-1].startswith("f16")
    if base in ("min", "max"):
        function = _extremum(e, ins)
    elif base in ("fma", "mad") and is_f16:
        function = arithmetic.fma16
    elif base in _FUNCTIONS:
        function = _FUNCTIONS[base]
    else:
        raise e.fail()
    if base in _WIDENED and is_f16:
        function = _widened(function)
    if "ftz" in ins.parts and is_f16:
        function = _without_subnormals(function)
    if "relu" in ins.parts:
        return _relu(function)
    return _saturated(function) if "sat" in ins.parts else function


def _widened(function: Function) -> Function:
    return lambda *arrays: function(*(x.astype(np.float64) for x in arrays)).astype(np.float16)


def _without_subnormals(function: Function) -> Function:
    return lambda *arrays: arithmetic.flush(function(*map(arithmetic.flush, arrays)))


def _relu(function: Function) -> Function:
    def relu(*arrays: Array) -> Array:
        out = function(*arrays)
        return np.where(out < 0, out.dtype.type(0), out)

    return relu


def _saturated(function: Function) -> Function:
    return lambda *arrays: arithmetic.saturate(function(*arrays))


@instruction(
    "add", "sub", "mul", "div", "min", "max", "fma", "mad", "rcp", "sqrt", "rsqrt", "ex2", "tanh", types=HALVES
)
def halves(e: Emitter, ins: Instr) -> None:
    """Arithmetic of f16 and bf16, alone or in pairs."""
    e.refuse("oob", "f32")  # fma that drops operands out of bounds; sums in f32 of halves
    kind = ins.parts[-1]
    d, *operands = ins.operands
    u, call = ("u4", "packed") if kind.endswith("x2") else ("u2", "scalar16")
    name = e.bind("fn", _half_function(e, ins))
    texts = ", ".join(e.array(op, u) for op in operands)
    e.assign(d, Value(f"A.{call}({kind!r}, {name}, {texts})", u, False))


# --- f32 and f64


@instruction("abs", "neg", types=FLOATS)
def sign(e: Emitter, ins: Instr) -> None:
    """abs and neg: a change of the sign bit."""
    d, a = ins.operands
    ones = {"f16": 0x8000, "bf16": 0x8000, "f32": 1 << 31, "f64": 1 << 63}.get(ins.parts[-1], 0x80008000)
    u, full = ("u2", 0xFFFF) if ones == 0x8000 else ("u8", (1 << 64) - 1) if ones >> 63 else ("u4", 0xFFFFFFFF)
    raw = f"{flushed(ins, a, e.array(a, 'f4'))}.view(u4)" if ins.parts[-1] == "f32" else e.array(a, u)
    e.assign(d, Value(f"{raw} & {full ^ ones}" if ins.base == "abs" else f"{raw} ^ {ones}", u, False))


def flushed(ins: Instr, op: Operand, text: str) -> str:
    """An operand of f16 or f32 as the instruction takes it: with ``.ftz``, subnormals are zero."""
    return f"A.flush({text})" if "ftz" in ins.parts and not isinstance(op, Imm) else text


def _finish(ins: Instr, text: str, kind: str) -> Value:
    if "ftz" in ins.parts:
        text = f"A.flush({text})"
    if "sat" in ins.parts:
        text = f"A.saturate({text})"
    return Value(text, _REAL[kind], False)


def _operand(e: Emitter, ins: Instr, op: Operand, kind: str, as_array: bool = True) -> str:
    text = e.array(op, _REAL[kind]) if as_array else e.number(op, _REAL[kind])
    return flushed(ins, op, text) if kind == "f32" else text


def _directed(ins: Instr) -> str | None:
    return next((p for p in ins.parts if p in ("rz", "rm", "rp")), None)


@instruction("min", "max", types=REALS, mutations=(lose_nan,))
@instruction("sub", "div", types=REALS)
@instruction("add", "mul", types=REALS, mutations=(lose, twice))
def arithmetic2(e: Emitter, ins: Instr) -> None:
    """add, sub, mul, div, min, max of floats."""
    kind = ins.parts[-1]
    if "bf16" in ins.parts or "f16" in ins.parts or len(ins.operands) > 3:
        raise e.fail()
    d, a, b = ins.operands
    mode = _directed(ins)
    if mode is not None:
        text = _rounded(e, ins, a, b, mode)
    elif ins.base in ("min", "max"):
        name = e.bind("fn", _extremum(e, ins))
        text = f"{name}({_operand(e, ins, a, kind)}, {_operand(e, ins, b, kind)})"
    else:
        second = _operand(e, ins, b, kind, as_array=False)
        text = f"({_operand(e, ins, a, kind)} {_SYMBOLS[ins.base]} {second})"
    e.assign(d, _finish(ins, text, kind))


def _rounded(e: Emitter, ins: Instr, a: Operand, b: Operand, mode: str) -> str:
    """A sum, difference or product with directed rounding, as a fused multiply-add."""
    kind = ins.parts[-1]
    if kind != "f32" or ins.base not in ("add", "sub", "mul"):
        raise e.fail("directed rounding of this operation")
    x, y = _operand(e, ins, a, kind), _operand(e, ins, b, kind)
    if ins.base == "mul":
        minus_zero = e.bind("mz", np.float32(-0.0))
        return f"A.fma32({x}, {y}, np.full(M.size, {minus_zero}), {mode!r})"
    unit = e.bind("unit", np.float32(1))
    return f"A.fma32({x}, np.full(M.size, {unit}), {'' if ins.base == 'add' else '-'}{y}, {mode!r})"


@instruction("fma", types=REALS, mutations=(lose, twice))
@instruction("mad", types=REALS)
def fma(e: Emitter, ins: Instr) -> None:
    """fma and mad of f32 and f64."""
    kind = ins.parts[-1]
    d, a, b, c = ins.operands
    texts = ", ".join(_operand(e, ins, op, kind) for op in (a, b, c))
    mode = _directed(ins) or "rn"
    if kind == "f64":
        if mode != "rn":
            raise e.fail("directed rounding of f64")
        e.assign(d, Value(f"A.fma64({texts})", "f8", False))
        return
    e.assign(d, _finish(ins, f"A.fma32({texts}, {mode!r})", kind))


@instruction("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh", types=REALS)
def function1(e: Emitter, ins: Instr) -> None:
    """The functions of one argument."""
    kind = ins.parts[-1]
    d, a = ins.operands
    e.assign(d, _finish(ins, f"A.unary32({ins.base!r}, {_operand(e, ins, a, kind)})", kind))


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
