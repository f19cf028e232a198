"""Lowers SASS floating-point arithmetic, comparisons and conversions to PTX.

``-x`` inverts the sign bit of a source and ``|x|`` clears it, even if the source is a NaN. ``.FTZ`` flushes subnormal
numbers to zero. A modifier names the rounding unless it is to the nearest.
"""

from __future__ import annotations

from kernelproof.emulator.machine_code.instructions.doubles import double, upper_double
from kernelproof.emulator.machine_code.lowering import Lowering, mnemonic
from kernelproof.emulator.machine_code.modifiers import ORDERS, ROUNDINGS, comparison, rounding
from kernelproof.emulator.machine_code.operands import Constant, Literal, Register, operand
from kernelproof.sass import Instruction

_SIGN, _MAGNITUDE = str(0x80000000), str(0x7FFFFFFF)


def _options(ins: Instruction) -> str:
    """The modifiers ``.ftz`` and ``.sat`` of the PTX instruction."""
    return "".join(f".{part.lower()}" for part in ("FTZ", "SAT") if part in ins.modifiers)


def single(low: Lowering, text: str, register_offset: int = 0) -> str:
    """A source in single precision, as its bits. ``register_offset``: offset from the named register."""
    source = operand(text)
    if isinstance(source, Literal):
        return str(source.single)
    bits = low.bits(source, register_offset)
    for sign in reversed(source.signs if isinstance(source, Register | Constant) else ""):
        op, mask = ("xor.b32", _SIGN) if sign == "-" else ("and.b32", _MAGNITUDE)
        if bits.isdigit():
            bits = str(int(bits) ^ int(_SIGN) if sign == "-" else int(bits) & int(_MAGNITUDE))
        else:
            bits = low.computed(op, bits, mask)
    return f"0f{int(bits):08X}" if bits.isdigit() else bits


@mnemonic("FADD FMUL FFMA UFADD UFMUL UFFMA", f"FTZ SAT {ROUNDINGS}")
def arithmetic(low: Lowering, ins: Instruction) -> None:
    """add, mul and fma."""
    op = {"FADD": "add", "FMUL": "mul", "FFMA": "fma"}[ins.name.removeprefix("U")]
    result, *sources = ins.operands
    low.emit(f"{op}{rounding(ins)}{_options(ins)}.f32", low.target(result), *(single(low, text) for text in sources))


@mnemonic("FADD2 FMUL2 FFMA2", f"FTZ {ROUNDINGS}")
def pair_arithmetic(low: Lowering, ins: Instruction) -> None:
    """add, mul and fma of two numbers in a pair of registers each."""
    op = {"FADD2": "add", "FMUL2": "mul", "FFMA2": "fma"}[ins.name]
    result, *sources = ins.operands
    for text in sources:
        source = operand(text)
        assert isinstance(source, Register)
        assert tuple(source.parts) == ("F32x2", "HI_LO")
    opcode = f"{op}{rounding(ins)}{_options(ins)}.f32"
    values = [low.computed(opcode, *(single(low, text, plus) for text in sources)) for plus in (0, 1)]
    for plus, value in enumerate(values):
        low.emit("mov.b32", low.target(result, plus), value)


def xorsign(low: Lowering, ins: Instruction, texts: list[str]) -> tuple[str, list[str]]:
    """The modifiers of a minimum whose sign is the product of its sources' signs, and the sources. SASS writes each
    source as ``|x|``. PTX has ``.abs`` in the modifier instead, so the bars are removed."""
    if "XORSIGN" not in ins.modifiers:
        return "", texts
    if not all(text.count("|") == 2 and text.startswith("|") for text in texts):
        raise low.refusal("a source whose magnitude is not taken is not modelled")
    return ".xorsign.abs", [text.replace("|", "") for text in texts]


@mnemonic("FMNMX3", "FTZ NAN")
def min_or_max3(low: Lowering, ins: Instruction) -> None:
    """The minimum of three numbers if the predicate holds, else the maximum."""
    result, *texts, p = ins.operands
    a, b, c = (single(low, text) for text in texts)
    test = low.predicate(p)
    assert test in ("0", "1")
    op = f"{'min' if test == '1' else 'max'}{_options(ins)}{'.NaN' if 'NAN' in ins.modifiers else ''}.f32"
    low.emit(op, low.target(result), low.computed(op, a, b), c)


@mnemonic("FMNMX", "FTZ NAN XORSIGN")
def min_or_max(low: Lowering, ins: Instruction) -> None:
    """The minimum of two numbers if the predicate holds, else the maximum."""
    result, a, b, p = ins.operands
    signs, (a, b) = xorsign(low, ins, [a, b])
    x, y = single(low, a), single(low, b)
    options = _options(ins) + (".NaN" if "NAN" in ins.modifiers else "") + signs
    test = low.predicate(p)
    if test in ("0", "1"):
        low.emit(f"{'min' if test == '1' else 'max'}{options}.f32", low.target(result), x, y)
        return
    least, most = (low.computed(f"{op}{options}.f32", x, y) for op in ("min", "max"))
    if test[0] == "!":
        least, most, test = most, least, test[1:]
    low.emit("selp.b32", low.target(result), least, most, test)


@mnemonic("FSET", f"BF {ORDERS} FTZ AND OR XOR")
def compare_to_number(low: Lowering, ins: Instruction) -> None:
    """A comparison whose result is 1.0 if it holds, else 0, or without ``.BF`` a word of ones or of zeros."""
    result, a, b, p = ins.operands
    if low.predicate(p) != "1":
        raise low.refusal("a predicate in this comparison is not modelled")
    op = f"set.{comparison(ins)[0]}{_options(ins)}.{'f32' if 'BF' in ins.modifiers else 'u32'}.f32"
    low.emit(op, low.target(result), single(low, a), single(low, b))


@mnemonic("FSETP", f"{ORDERS} FTZ AND OR XOR")
def compare(low: Lowering, ins: Instruction) -> None:
    """``p = (a <> b) op r`` and ``q = !(a <> b) op r``, where <> is the comparison."""
    order, boolean = comparison(ins)
    p, q, a, b, r = ins.operands
    outcome = low.computed(f"setp.{order}{_options(ins)}.f32", single(low, a), single(low, b), kind="pred")
    low.set_comparison((p, q), outcome, boolean, r)


@mnemonic("FSEL", "FTZ")
def select(low: Lowering, ins: Instruction) -> None:
    """The first source if the predicate holds, else the second."""
    result, a, b, p = ins.operands
    test = low.predicate(p)
    if test[0] == "!":
        a, b, test = b, a, test[1:]
    low.emit("selp.b32", low.target(result), single(low, a), single(low, b), test)


_FUNCTIONS = {
    "RCP": "rcp", "RSQ": "rsqrt", "EX2": "ex2", "LG2": "lg2", "SQRT": "sqrt", "TANH": "tanh", "SIN": "sin",
    "COS": "cos",
}  # fmt: skip
# The modifiers for functions of doubles.
_OF_DOUBLES = {"RCP64H": "rcp", "RSQ64H": "rsqrt"}
_TWO_PI = "0f40C90FDB"


@mnemonic("MUFU", " ".join((*_FUNCTIONS, *_OF_DOUBLES, "F16", "BF16")))
def approximate(low: Lowering, ins: Instruction) -> None:
    """Approximations. In fp32 all except TANH flush subnormal numbers; in halves only EX2 of BF16 does.

    SIN and COS take numbers of full turns, not radians. Functions that end in 64H take the upper word of a double, and
    give the upper word of the result.
    """
    result, source = ins.operands
    if wide := _OF_DOUBLES.get(ins.modifiers[0]):
        value = low.computed(f"{wide}.approx.ftz.f64", upper_double(low, source), kind="b64")
        low.emit("mov.b64", f"{{{low.temp()}, {low.target(result)}}}", value)
        return
    function = _FUNCTIONS[ins.modifiers[0]]
    if ins.modifiers[1:]:
        kind = ins.modifiers[1].lower()
        options = ".ftz" if (function, kind) == ("ex2", "bf16") else ""
        _store(low, result, f"{function}.approx{options}.{kind}", kind, _value(low, source, kind))
        return
    options = "" if function == "tanh" else ".ftz"
    value = single(low, source)
    if function in ("sin", "cos"):
        value = low.computed("mul.rn.f32", value, _TWO_PI)
    low.emit(f"{function}.approx{options}.f32", low.target(result), value)


@mnemonic("FCHK", "DIVIDE")
def check_quotient(low: Lowering, ins: Instruction) -> None:
    """Sets p if a division needs the slow path, that is, if an exponent is near an end of its range or the two are far
    apart. The slow path is right for all operands."""
    p, *sources = ins.operands
    # The hardware's limits are unpublished; the limits below choose the slow path more often.
    exponents = [low.computed("bfe.u32", single(low, text), "23", "8") for text in sources]
    difference = low.computed("sub.s32", *exponents)
    slow = "0"
    for value, least, most in ((exponents[0], 32, 250), (exponents[1], 2, 252), (difference, -120, 120)):
        for order, bound in (("lt", least), ("gt", most)):
            slow = low.either_holds(slow, low.computed(f"setp.{order}.s32", value, str(bound), kind="pred"))
    low.set_predicate(p, slow)


# --- halves, two in a register


def halves(low: Lowering, text: str, kind: str) -> str:
    """A source of two halves. ``.H0_H0`` takes the lower half twice, ``.H1`` and ``.H1_H1`` the upper half twice."""
    source = operand(text)
    if isinstance(source, Literal):
        half = source.half if kind == "f16x2" else source.single >> 16
        return str(half | half << 16)
    assert isinstance(source, Register | Constant)
    bits = low.bits(source)
    for part in source.parts:
        bits = low.computed("prmt.b32", bits, "0", {"H0_H0": "0x1010", "H1": "0x3232", "H1_H1": "0x3232"}[part])
    for sign in reversed(source.signs):
        number = 0x80008000 if sign == "-" else 0x7FFF7FFF
        if bits.isdigit():
            bits = str(int(bits) ^ number if sign == "-" else int(bits) & number)
        else:
            bits = low.computed("xor.b32" if sign == "-" else "and.b32", bits, str(number))
    return bits


def half_sources(low: Lowering, texts: list[str], count: int, kind: str) -> list[str]:
    """``count`` sources of two halves each. A literal may be printed as two numbers, the upper half first."""
    out: list[str] = []
    rest = list(texts)
    while rest:
        text = rest.pop(0)
        first = operand(text)
        if isinstance(first, Literal) and len(out) + 1 + len(rest) > count:
            second = operand(rest.pop(0))
            assert isinstance(second, Literal)
            upper, lower = ((lit.half if kind == "f16x2" else lit.single >> 16) for lit in (first, second))
            out.append(str(upper << 16 | lower))
        else:
            out.append(halves(low, text, kind))
    assert len(out) == count
    return out


@mnemonic("HADD2 HMUL2 HFMA2", "F32 BF16_V2 FTZ SAT RELU MMA")
def half_arithmetic(low: Lowering, ins: Instruction) -> None:
    """add, mul and fma of two halves. ``HADD2.F32`` adds the lower ones in single precision."""
    kind = "bf16x2" if "BF16_V2" in ins.modifiers else "f16x2"
    op, count = {"HADD2": ("add", 2), "HMUL2": ("mul", 2), "HFMA2": ("fma", 3)}[ins.name]
    result, *texts = ins.operands
    sources = half_sources(low, texts, count, kind)
    if "F32" in ins.modifiers:
        assert ins.name == "HADD2"
        numbers = [_lower_half(low, source, kind[:-2]) for source in sources]
        low.emit("add.rn.f32", low.target(result), *numbers)
        return
    if all(source.isdigit() for source in sources) and ins.name == "HFMA2" and sources[0] in ("0", str(0x80008000)):
        low.set(result, sources[2])  # ptxas loads a literal as 0 * x + literal
        return
    options = ".relu" if "RELU" in ins.modifiers else _options(ins)
    low.emit(f"{op}.rn{options}.{kind}", low.target(result), *sources)


def _lower_half(low: Lowering, source: str, kind: str) -> str:
    """The lower half of a source, in single precision."""
    if kind == "bf16":
        return (
            low.computed("shl.b32", source, "16") if not source.isdigit() else f"0f{int(source) << 16 & 0xFFFFFFFF:08X}"
        )
    half = low.computed("cvt.u16.u32", source, kind="b16")
    return low.computed("cvt.f32.f16", half)


# --- conversions

_FLOATS = {"F16": "f16", "F32": "f32", "F64": "f64", "BF16": "bf16"}
_BYTES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}
_INTEGER_TYPES = "U8 S8 U16 S16 U32 S32 U64 S64"


def _value(low: Lowering, text: str, kind: str) -> str:
    """A source of a type, with its signs applied."""
    if kind == "f64":
        return double(low, text)
    if kind in ("f16", "bf16"):
        return low.computed("cvt.u16.u32", halves(low, text, f"{kind}x2"), kind="b16")
    if kind == "f32":
        return single(low, text)
    if kind[1:] == "64":
        return low.pair(text)
    word = low.word(text)
    return word if kind[1:] == "32" or word.isdigit() else low.computed(f"cvt.u{kind[1:]}.u32", word, kind="b16")


def _store(low: Lowering, text: str, op: str, kind: str, value: str) -> None:
    """Convert a value to a type by ``op``, and write it. A narrow result goes to the lower part of a word."""
    if kind.endswith("64"):
        low.set_pair(text, low.computed(op, value, kind="b64"))
    elif kind in ("f16", "bf16"):
        low.set(text, low.computed("cvt.u32.u16", low.computed(op, value, kind="b16")))
    else:
        low.emit(op, low.target(text), value)


def _to_integer(ins: Instruction) -> str:
    """PTX's modifier for rounding to an integer; to the nearest if the instruction names none."""
    modes = (("TRUNC", "rzi"), ("FLOOR", "rmi"), ("CEIL", "rpi"))
    return next((mode for part, mode in modes if part in ins.modifiers), "rni")


@mnemonic("F2I UF2I", f"F16 BF16 F32 F64 FTZ NTZ TRUNC FLOOR CEIL {_INTEGER_TYPES}")
def to_integer(low: Lowering, ins: Instruction) -> None:
    """Conversion of a number to an integer: of f32 to s32 if no types are named."""
    origin = next((_FLOATS[part] for part in ins.modifiers if part in _FLOATS), "f32")
    kind = next((part.lower() for part in ins.modifiers if part in _INTEGER_TYPES.split()), "s32")
    mode = _to_integer(ins)
    ftz = ".ftz" if "FTZ" in ins.modifiers and origin == "f32" else ""
    _store(low, ins.operands[0], f"cvt.{mode}{ftz}.{kind}.{origin}", kind, _value(low, ins.operands[1], origin))


@mnemonic("I2F I2FP UI2F UI2FP", f"F16 BF16 F32 F64 {ROUNDINGS} {_INTEGER_TYPES}")
def from_integer(low: Lowering, ins: Instruction) -> None:
    """Conversion of an integer to a number: of s32 to f32 if no types are named."""
    kind = next((_FLOATS[part] for part in ins.modifiers if part in _FLOATS), "f32")
    origin = next((part.lower() for part in ins.modifiers if part in _INTEGER_TYPES.split()), "s32")
    _store(low, ins.operands[0], f"cvt{rounding(ins)}.{kind}.{origin}", kind, _value(low, ins.operands[1], origin))


@mnemonic("I2I", f"SAT {_INTEGER_TYPES}")
def between_integers(low: Lowering, ins: Instruction) -> None:
    """Conversion to a narrower integer (the result's type is named first) that saturates."""
    kind, origin = (part.lower() for part in ins.modifiers if part in _INTEGER_TYPES.split())
    assert "SAT" in ins.modifiers
    assert kind[1:] in ("8", "16")
    narrow = low.computed(f"cvt.sat.{kind}.{origin}", _value(low, ins.operands[1], origin), kind="b16")
    low.set(ins.operands[0], low.computed(f"cvt.{kind[0]}32.{kind[0]}16", narrow))


@mnemonic("F2F FRND", f"F16 F32 F64 BF16 FTZ TRUNC FLOOR CEIL {ROUNDINGS}")
def between_floats(low: Lowering, ins: Instruction) -> None:
    """Conversion to another precision (the result's type is named first), or rounding to an integer (FRND)."""
    named = [_FLOATS[part] for part in ins.modifiers if part in _FLOATS]
    kind, origin = [*named, "f32", "f32"][:2]
    ftz = ".ftz" if "FTZ" in ins.modifiers and "f32" in (kind, origin) else ""
    if ins.name == "FRND":
        origin = kind
        mode = _to_integer(ins)
    else:
        mode = "" if _BYTES[kind] > _BYTES[origin] else rounding(ins)[1:]
    op = f"cvt{'.' if mode else ''}{mode}{ftz}.{kind}.{origin}"
    _store(low, ins.operands[0], op, kind, _value(low, ins.operands[1], origin))
