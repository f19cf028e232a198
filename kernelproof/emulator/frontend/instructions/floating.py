"""Translates floating-point instructions on f16, bf16, their pairs, f32 and f64 to Python text.

All results are varying registers. In the text, ``A`` is the package ``arithmetic``, and ``I`` is the batch's unit of
special registers, which also adds the errors that a launch's environment draws for approximate functions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernelproof.emulator import arithmetic
from kernelproof.emulator.frontend.emitter import Emitter, Value
from kernelproof.emulator.frontend.instruction import FLOATS, HALVES, REALS, instruction
from kernelproof.emulator.frontend.mutation_operators import drop_operand, lose_nan, repeat_operand
from kernelproof.emulator.frontend.ptx import Imm, Instr, Operand
from kernelproof.emulator.state.arrays import Array

_FLOAT_CODES = {"f32": "f4", "f64": "f8"}  # PTX type -> NumPy type code
Function = Callable[..., Array]
_FUNCTIONS: dict[str, Function] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "rcp": lambda a: 1 / a,
    "sqrt": np.sqrt,
}
_SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


def _extremum(e: Emitter, ins: Instr) -> Function:
    """The function of a min or max: (array, array) -> array."""
    if ("abs" in ins.parts) != ("xorsign" in ins.parts) or len(ins.operands) > 3:
        raise e.fail()
    nan, larger = "NaN" in ins.parts, ins.base == "max"
    function = arithmetic.fmin_signed if "abs" in ins.parts else arithmetic.fmin
    return lambda a, b: function(a, b, nan, larger)


# --- halves


def _half_function(e: Emitter, ins: Instr) -> Function:
    """The function of float arrays that computes an instruction on halves."""
    base, is_f16 = ins.base, ins.parts[-1].startswith("f16")
    if base in ("min", "max"):
        function = _extremum(e, ins)
    elif base == "fma":
        function = arithmetic.fma16 if is_f16 else arithmetic.fma_bf16
    elif base in _FUNCTIONS:
        function = _FUNCTIONS[base]
    else:
        raise e.fail()
    if "ftz" in ins.parts:
        function = _without_subnormals(function, arithmetic.flush if is_f16 else arithmetic.flush_bf16)
    if "relu" in ins.parts:
        return lambda *arrays: arithmetic.relu(function(*arrays))
    if "sat" in ins.parts:
        return lambda *arrays: arithmetic.saturate(function(*arrays))
    return function


def _without_subnormals(function: Function, flush: Function) -> Function:
    """A function with .ftz: subnormal operands and results are replaced by zero."""
    return lambda *arrays: flush(function(*map(flush, arrays)))


@instruction("add", "sub", "mul", "min", "max", "fma", types=HALVES)
def halves(e: Emitter, ins: Instr) -> None:
    """Arithmetic of f16 and bf16, alone or in pairs."""
    e.refuse("oob", "f32")  # .oob: operands may be out of bounds; .f32: sums of halves are in f32
    _assign_halves(e, ins, e.bind("fn", _half_function(e, ins)))


@instruction("ex2", "tanh", types=HALVES)
def approximate_halves(e: Emitter, ins: Instr) -> None:
    """ex2 and tanh of f16 and bf16, alone or in pairs, with the errors that the launch's environment draws."""
    kind = ins.parts[-1].removesuffix("x2")
    _assign_halves(e, ins, f"I.approximation({ins.base!r}, {kind!r}, {'ftz' in ins.parts})")


def _assign_halves(e: Emitter, ins: Instr, function: str) -> None:
    """Write an instruction on halves as a call of ``function``, the text of a function of float arrays."""
    kind = ins.parts[-1]
    d, *operands = ins.operands
    u, call = ("u4", "packed") if kind.endswith("x2") else ("u2", "scalar16")
    texts = ", ".join(e.array(op, u) for op in operands)
    e.assign(d, Value(f"A.{call}({kind!r}, {function}, {texts})", u, False))


# --- f32 and f64


@instruction("abs", "neg", types=FLOATS)
def sign(e: Emitter, ins: Instr) -> None:
    """abs and neg: a change of the sign bit."""
    d, a = ins.operands
    # The sign bit; of a pair of halves, both sign bits.
    sign_bits = {"f16": 0x8000, "bf16": 0x8000, "f32": 1 << 31, "f64": 1 << 63}.get(ins.parts[-1], 0x80008000)
    u, all_bits = (
        ("u2", 0xFFFF) if sign_bits == 0x8000 else ("u8", (1 << 64) - 1) if sign_bits >> 63 else ("u4", 0xFFFFFFFF)
    )
    if "ftz" in ins.parts:
        float_kind = "f4" if ins.parts[-1] == "f32" else "f2"
        raw = f"A.flush({e.array(a, u)}.view({float_kind})).view({u})"
    else:
        raw = e.array(a, u)
    e.assign(d, Value(f"{raw} & {all_bits ^ sign_bits}" if ins.base == "abs" else f"{raw} ^ {sign_bits}", u, False))


def flush_operand(ins: Instr, op: Operand, text: str) -> str:
    """The text of an operand of f16 or f32; with ``.ftz``, its subnormals are replaced by zero."""
    return f"A.flush({text})" if "ftz" in ins.parts and not isinstance(op, Imm) else text


def _with_modifiers(ins: Instr, text: str, kind: str) -> Value:
    """The result ``text`` with the effects of ``.ftz`` and ``.sat``."""
    if "ftz" in ins.parts and kind == "f32":
        text = f"A.flush({text})"
    if "sat" in ins.parts:
        text = f"A.saturate({text})"
    return Value(text, _FLOAT_CODES[kind], False)


def _operand(e: Emitter, ins: Instr, op: Operand, kind: str, as_array: bool = True) -> str:
    """The text of an operand of f32 or f64, with the effect of ``.ftz``. If ``as_array`` is false, a literal is a
    scalar."""
    text = e.array(op, _FLOAT_CODES[kind]) if as_array else e.number(op, _FLOAT_CODES[kind])
    return flush_operand(ins, op, text) if kind == "f32" else text


def _write_directed(e: Emitter, ins: Instr, function: Function | None) -> bool:
    """Write the instruction as a call of ``function`` if its rounding is directed (.rz, .rm, .rp); returns whether it
    is. Raises UnknownInstruction if it is, but ``function`` is None."""
    mode = next((p for p in ins.parts if p in ("rz", "rm", "rp")), None)
    if mode is None:
        return False
    if function is None:
        raise e.fail("directed rounding of this operation")
    kind = ins.parts[-1]
    texts = ", ".join(_operand(e, ins, op, kind) for op in ins.operands[1:])
    e.assign(ins.operands[0], _with_modifiers(ins, f"A.toward({mode!r}, {e.bind('fn', function)}, {texts})", kind))
    return True


@instruction("min", "max", types=REALS, mutations=(lose_nan,))
@instruction("sub", "div", types=REALS)
@instruction("add", "mul", types=REALS, mutations=(drop_operand, repeat_operand))
def binary(e: Emitter, ins: Instr) -> None:
    """add, sub, mul, div, min, max of floats."""
    kind = ins.parts[-1]
    if "bf16" in ins.parts or "f16" in ins.parts or len(ins.operands) > 3:
        raise e.fail()
    d, a, b = ins.operands
    if _write_directed(e, ins, _FUNCTIONS.get(ins.base)):
        return
    if ins.base in ("min", "max"):
        name = e.bind("fn", _extremum(e, ins))
        text = f"{name}({_operand(e, ins, a, kind)}, {_operand(e, ins, b, kind)})"
    elif ins.base == "div" and "approx" in ins.parts:
        text = f"A.divide_approximately({_operand(e, ins, a, kind)}, {_operand(e, ins, b, kind)})"
    else:
        second = _operand(e, ins, b, kind, as_array=False)
        text = f"({_operand(e, ins, a, kind)} {_SYMBOLS[ins.base]} {second})"
    e.assign(d, _with_modifiers(ins, _with_error(ins, text, kind), kind))


def _with_error(ins: Instr, text: str, kind: str) -> str:
    """The result of an instruction; approximate ones on f32 get the error that the launch's environment draws."""
    is_approximate = kind == "f32" and ("approx" in ins.parts or "full" in ins.parts)
    return f"I.inexact({ins.base!r}, {text})" if is_approximate else text


@instruction("fma", types=REALS, mutations=(drop_operand, repeat_operand))
@instruction("mad", types=REALS)
def fma(e: Emitter, ins: Instr) -> None:
    """fma and mad of f32 and f64."""
    kind = ins.parts[-1]
    if _write_directed(e, ins, arithmetic.fma64 if kind == "f64" else arithmetic.fma32_widened):
        return
    d, *operands = ins.operands
    texts = ", ".join(_operand(e, ins, op, kind) for op in operands)
    e.assign(d, _with_modifiers(ins, f"A.{'fma64' if kind == 'f64' else 'fma32'}({texts})", kind))


@instruction("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh", types=REALS)
def unary(e: Emitter, ins: Instr) -> None:
    """rcp, sqrt, rsqrt, ex2, lg2, sin, cos and tanh of f32 and f64."""
    kind = ins.parts[-1]
    if _write_directed(e, ins, _FUNCTIONS.get(ins.base)):
        return
    d, a = ins.operands
    function = "approximate64" if kind == "f64" and "ftz" in ins.parts else "elementary"
    text = f"A.{function}({ins.base!r}, {_operand(e, ins, a, kind)})"
    e.assign(d, _with_modifiers(ins, _with_error(ins, text, kind), kind))


@instruction("copysign")
def copysign(e: Emitter, ins: Instr) -> None:
    """copysign: the sign of the first operand on the second."""
    kind = ins.parts[-1]
    d, a, b = ins.operands
    k = _FLOAT_CODES[kind]
    e.assign(d, Value(f"np.copysign({e.array(b, k)}, {e.array(a, k)})", k, False))


@instruction("testp")
def testp(e: Emitter, ins: Instr) -> None:
    """testp: the class of a number."""
    d, a = ins.operands
    e.assign(d, Value(f"A.test_float({ins.parts[1]!r}, {e.array(a, _FLOAT_CODES[ins.parts[-1]])})", "p", False))
