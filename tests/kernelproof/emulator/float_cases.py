"""Cases of floating-point instructions, with the results that the PTX ISA defines, as exact operations with one
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from tests.kernelproof.emulator import exact
from tests.kernelproof.emulator.exact import FORMATS, Either, Halves, Nan, Number, Operation, Want, Within
from tests.kernelproof.emulator.lane_arithmetic import Case, Group
from tests.kernelproof.emulator.operand_draws import floats, pairs

# The wanted result of three raw operands.
Function = Callable[[int, int, int], Want]
# By bits: the registers of a result and of three operands. The modes of rounding.
REGISTERS = {16: "%m, %h, %k, %l", 32: "%D, %A, %B, %C", 64: "%d, %a, %b, %c"}
MODES = ("rn", "rz", "rm", "rp")


def width_of(kind: str) -> int:
    """The bits of a register for a type, or for a pair of halves."""
    return 32 if kind.endswith("x2") else exact.bits_of(kind)


def case(opcode: str, kind: str, count: int, want: Function) -> Case:
    """An instruction on ``count`` operands of one type."""
    names = ", ".join(REGISTERS[width_of(kind)].split(", ")[: 1 + count])
    return Case(f"{opcode}.{kind} {names};", width_of(kind), on_both_halves(want) if kind.endswith("x2") else want)


def on_both_halves(want: Function) -> Function:
    """A function of numbers applied to both halves of words."""

    def halves(a: int, b: int, c: int) -> Want:
        return Halves(want(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF), want(*(x >> 16 & 0xFFFF for x in (a, b, c))))

    return halves


def flush(raw: int, kind: str) -> int:
    """The raw bits with subnormal numbers replaced by zero."""
    sign = 1 << exact.bits_of(kind) - 1
    return raw & sign if raw & (sign - 1) < 1 << FORMATS[kind][0] else raw


def rounding_function(operation: Operation, kind: str, count: int, mode: str = "rn", modifiers: str = "") -> Function:
    """The operation on exact numbers, rounded once, with .ftz, .sat and .relu."""
    sign = 1 << exact.bits_of(kind) - 1

    def want(*raws: int) -> Want:
        raws = tuple(x & (2 * sign - 1) for x in raws[:count])
        if "ftz" in modifiers:
            raws = tuple(flush(x, kind) for x in raws)
        numbers = [exact.decode(x, kind) for x in raws]
        out = exact.encode(operation(*numbers, mode), kind, mode)
        if not isinstance(out, int):
            return 0 if "sat" in modifiers else CANONICAL[kind] if "relu" in modifiers else out
        if "ftz" in modifiers:
            out = flush(out, kind)
        if "sat" in modifiers:
            return 0 if out & sign else min(out, exact.one(kind))
        if "relu" in modifiers and out & sign:
            return Either(0, out) if out == sign else 0
        return out

    return want


# The NaN that an instruction gives.
CANONICAL = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FFFFFFFFFFFFFFF}


def _difference(x: Number | None, y: Number | None, mode: str) -> Number | None:
    """x - y, rounded once."""
    return exact.total(x, exact.negated(y), mode)


def _fma(x: Number | None, y: Number | None, z: Number | None, mode: str) -> Number | None:
    """x y + z, rounded once."""
    return exact.total(exact.product(x, y), z, mode)


def _inverse(x: Number | None, mode: str) -> Number | None:
    """1 / x, rounded once."""
    return exact.quotient(Number(False, Fraction(1)), x, mode)


def _sum_modifiers(kind: str, mode: str) -> tuple[str, ...]:
    """The modifiers that the ISA allows for a sum of a type."""
    if kind == "f32":
        return ("", ".ftz", ".sat", ".ftz.sat") if mode in ("rn", "rm") else ("",)
    return ("", ".ftz", ".sat", ".ftz.sat") if kind.startswith("f16") else ("",)


def _sums(kind: str) -> list[Case]:
    """Sums, differences, products and fused products of a type, in all roundings and modifiers."""
    base = kind.removesuffix("x2")
    out = []
    for name, operation, count in (
        ("add", exact.total, 2),
        ("sub", _difference, 2),
        ("mul", exact.product, 2),
        ("fma", _fma, 3),
        ("mad", _fma, 3),
    ):
        if name == "mad" and kind not in ("f32", "f64"):
            continue
        for mode in MODES if kind in ("f32", "f64") else ("rn",):
            for how in (*_sum_modifiers(kind, mode), *((".relu",) if name == "fma" and base.endswith("16") else ())):
                want = rounding_function(operation, base, count, mode, how)
                out.append(case(f"{name}.{mode}{how}", kind, count, want))
    return out


def _quotients(kind: str) -> list[Case]:
    """Quotients, reciprocals and roots of a type, in all roundings."""
    out = []
    for mode in MODES:
        for how in ("", ".ftz") if kind == "f32" else ("",):
            for name, operation, count in (
                ("div", exact.quotient, 2),
                ("rcp", _inverse, 1),
                ("sqrt", exact.root, 1),
            ):
                out.append(
                    case(f"{name}.{mode}{how}", kind, count, rounding_function(operation, kind, count, mode, how))
                )
    return out


def _extremum(kind: str, larger: bool, modifiers: str) -> Function:
    """min or max; -0 is smaller than +0."""
    sign = 1 << exact.bits_of(kind) - 1

    def want(a: int, b: int, _: int) -> Want:
        a, b = a & (2 * sign - 1), b & (2 * sign - 1)
        if "ftz" in modifiers:
            a, b = flush(a, kind), flush(b, kind)
        negative = (a ^ b) & sign
        if "abs" in modifiers:
            a, b = a & ~sign, b & ~sign
        nans = [exact.decode(x, kind) is None for x in (a, b)]
        if all(nans) or (any(nans) and "NaN" in modifiers):
            return CANONICAL[kind] if kind != "f64" else Nan(kind)
        # Codes of numbers with the same sign have the order of the numbers.
        keys = [-(x & ~sign) - 1 if x & sign else x for x in (a, b)]
        first = keys[0] > keys[1] if larger else keys[0] < keys[1]
        out = b if nans[0] else a if nans[1] or first else b
        return out | negative if "abs" in modifiers else out

    return want


def _extrema(kind: str) -> list[Case]:
    """Minima and maxima of a type, with all modifiers."""
    how = ["", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs"] if kind != "f64" else [""]
    if kind.startswith(("f16", "f32")):
        how += [".ftz", ".ftz.NaN.xorsign.abs"]
    base = kind.removesuffix("x2")
    return [
        case(f"{name}{modifiers}", kind, 2, _extremum(base, name == "max", modifiers))
        for name in ("min", "max")
        for modifiers in how
    ]


def _signs(kind: str) -> list[Case]:
    """abs and neg."""
    base = kind.removesuffix("x2")

    def changed(absolute: bool, ftz: bool) -> Function:
        sign = 1 << exact.bits_of(base) - 1

        def want(a: int, _b: int, _c: int) -> Want:
            a &= 2 * sign - 1
            if exact.decode(a, base) is None:
                return Nan(base)
            a = flush(a, base) if ftz else a
            return a & ~sign if absolute else a ^ sign

        return want

    how = ("", ".ftz") if kind.startswith(("f16", "f32")) else ("",)
    return [case(f"{n}{h}", kind, 1, changed(n == "abs", bool(h))) for n in ("abs", "neg") for h in how]


# --- comparisons

_ORDERS: dict[str, Callable[[Fraction | float, Fraction | float], bool]] = {
    "eq": lambda x, y: x == y, "ne": lambda x, y: x != y, "lt": lambda x, y: x < y, "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y,
}  # fmt: skip
# All comparisons of setp; those that end in u hold if an operand is NaN.
TESTS = (*_ORDERS, *(f"{name}u" for name in _ORDERS), "num", "nan")


def holds(test: str, a: int, b: int, kind: str, ftz: bool = False) -> bool:
    """A comparison of setp on raw numbers."""
    x, y = (exact.decode(flush(raw, kind) if ftz else raw, kind) for raw in (a, b))
    if test in ("num", "nan"):
        return (x is None or y is None) == (test == "nan")
    if x is None or y is None:
        return test.endswith("u")
    p, q = ((math.inf if n.magnitude is None else n.magnitude) * (-1 if n.negative else 1) for n in (x, y))
    return _ORDERS[test.removesuffix("u") if test.endswith("u") else test](p, q)


def _comparisons(kind: str) -> list[Case]:
    """All comparisons of a type as setp and set, also with a second predicate."""
    names = ", ".join(REGISTERS[width_of(kind)].split(", ")[1:3])
    third = REGISTERS[width_of(kind)].split(", ")[3]
    # A setp of f32 or f64 may have a second result, the complement of the first.
    results = "%R|%P" if kind in ("f32", "f64") else "%P"
    mask = (1 << width_of(kind)) - 1
    ftzs = ("", ".ftz") if kind in ("f16", "f32") else ("",)
    out = []
    for test in TESTS:
        for ftz in ftzs:

            def want(a: int, b: int, _: int, test: str = test, ftz: str = ftz) -> int:
                return holds(test, a & mask, b & mask, kind, bool(ftz))

            def other(a: int, b: int, c: int, test: str = test, ftz: str = ftz) -> int:
                first = holds(test, a & mask, b & mask, kind, bool(ftz))
                return (first ^ (len(results) > 2)) ^ holds("lt", b & mask, c & mask, kind)

            out.append(Case(f"setp.{test}{ftz}.{kind} %P, {names};", 1, want))
            out.append(
                Case(f"setp.lt.{kind} %Q, {names.split(', ')[1]}, {third}; "
                     f"setp.{test}.xor{ftz}.{kind} {results}, {names}, %Q;", 1, other)
            )  # fmt: skip
            for dst in ("u32", "f32") if kind in ("f32", "f64") else (kind, "u16", "s32"):
                true = exact.one(dst) if dst[-3:] in ("f16", "f32") or dst == "bf16" else (1 << int(dst[1:])) - 1
                width, register = (16, "%m") if dst.endswith("16") else (32, "%D")
                out.append(
                    Case(f"set.{test}{ftz}.{dst}.{kind} {register}, {names};", width,
                         lambda a, b, c, want=want, true=true: true * want(a, b, c))
                )  # fmt: skip
    return out


def _pair_comparisons(kind: str) -> list[Case]:
    """All comparisons of a pair of 16-bit floats, whose halves are compared separately."""
    base = kind.removesuffix("x2")
    out = []
    for test in TESTS:
        for ftz in ("", ".ftz") if base == "f16" else ("",):

            def low(a: int, b: int, _: int, test: str = test, ftz: str = ftz) -> int:
                return holds(test, a & 0xFFFF, b & 0xFFFF, base, bool(ftz))

            def high(a: int, b: int, c: int, low: Callable[[int, int, int], int] = low) -> int:
                return low(a >> 16, b >> 16, c)

            out.append(Case(f"setp.{test}{ftz}.{kind} %P|%Q, %A, %B;", 1, low))
            out.append(Case(f"setp.{test}{ftz}.{kind} %Q|%P, %A, %B;", 1, high))
            for dst, true in ((kind, exact.one(base)), ("u32", 0xFFFF)):
                out.append(
                    Case(f"set.{test}{ftz}.{dst}.{kind} %D, %A, %B;", 32,
                         lambda a, b, c, low=low, high=high, true=true: true * (low(a, b, c) | high(a, b, c) << 16))
                )  # fmt: skip
    return out


def _classes(kind: str) -> list[Case]:
    """testp, copysign and slct."""
    a = REGISTERS[width_of(kind)].split(", ")[1]
    sign = 1 << exact.bits_of(kind) - 1

    def member(test: str, raw: int) -> bool:
        code = raw & (sign - 1)
        subnormal = 0 < code < 1 << FORMATS[kind][0]
        finite, nan = code < exact.top(kind), code > exact.top(kind)
        return {
            "finite": finite, "infinite": code == exact.top(kind), "number": not nan, "notanumber": nan,
            "normal": finite and not subnormal, "subnormal": subnormal,
        }[test]  # fmt: skip

    out = [
        Case(f"testp.{test}.{kind} %P, {a};", 1, lambda a, b, c, test=test: member(test, a))
        for test in ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    ]
    return [*out, case("copysign", kind, 2, lambda a, b, c: a & sign | b & (sign - 1))]


def _selections() -> list[Case]:
    """slct by the sign of an f32."""
    out = []
    for ftz in ("", ".ftz"):

        def want(a: int, b: int, c: int, ftz: str = ftz) -> int:
            return a if holds("ge", c & 0xFFFFFFFF, 0, "f32", bool(ftz)) else b

        out.append(Case(f"slct{ftz}.b32.f32 %D, %A, %B, %C;", 32, want))
        out.append(Case(f"slct{ftz}.f64.f32 %d, %a, %b, %C;", 64, want))
        out.append(Case(f"slct{ftz}.u16.f32 %m, %h, %k, %C;", 16, want))
    return out


# --- approximations, with the errors that the ISA allows


def _approximation(
    kind: str, function: Callable[[float], float], relative: float, absolute: float, ftz: bool = False
) -> Function:
    """An approximation of a function of one argument; its result for NaN is NaN."""
    sign = 1 << exact.bits_of(kind) - 1

    def want(a: int, _b: int, _c: int) -> Want:
        a &= 2 * sign - 1
        number = exact.decode(flush(a, kind) if ftz else a, kind)
        value = math.nan if number is None else function(exact.real(number))
        if math.isnan(value):
            return Nan(kind)
        if value == 0 or math.isinf(value):
            code = 0 if value == 0 else exact.top(kind)
            return code | (sign if math.copysign(1, value) < 0 else 0)
        return Within(kind, value, relative, absolute)

    return want


def _power(x: float) -> float:
    """2 to the power of x, without overflow."""
    return 2.0**x if -1100 < x < 1024 else 0.0 if x < 0 else math.inf


def _logarithm(x: float) -> float:
    """The binary logarithm, with the special values of IEEE 754."""
    return -math.inf if x == 0 else math.nan if x < 0 else math.log2(x) if x < math.inf else x


def _reciprocal(x: float) -> float:
    """1 / x, infinite where the quotient is beyond the largest double."""
    return math.copysign(math.inf, x) if abs(x) <= 2.0**-1024 else 1 / x


def _root(x: float) -> float:
    """The square root, with the special values of IEEE 754."""
    return x if x == 0 or x == math.inf else math.nan if x < 0 else math.sqrt(x)


def _inverse_root(x: float) -> float:
    """1 / sqrt(x)."""
    return _reciprocal(_root(x))


def _periodic(function: Callable[[float], float]) -> Callable[[float], float]:
    """The function, with NaN at infinity."""
    return lambda x: math.nan if math.isinf(x) else function(x)


def _approximations() -> list[Case]:
    """Approximate f32 instructions, with their greatest relative and absolute errors from the PTX ISA."""
    functions = (
        ("rcp.approx", _reciprocal, 2.0**-23, 0.0), ("sqrt.approx", _root, 2.0**-23, 0.0),
        ("rsqrt.approx", _inverse_root, 2.0**-22.9, 0.0), ("ex2.approx", _power, 2.0**-22, 0.0),
        ("lg2.approx", _logarithm, 2.0**-22, 2.0**-22), ("sin.approx", _periodic(math.sin), 0.0, 2.0**-20.5),
        ("cos.approx", _periodic(math.cos), 0.0, 2.0**-20.5),
    )  # fmt: skip
    out = [
        case(f"{name}{ftz}", "f32", 1, _approximation("f32", function, relative, absolute, bool(ftz)))
        for name, function, relative, absolute in functions
        for ftz in ("", ".ftz")
    ]
    return [
        *out,
        case("tanh.approx", "f32", 1, _approximation("f32", math.tanh, 2.0**-11, 0)),
        *(case(f"div.{how}", "f32", 2, _approximate_quotient(how)) for how in ("approx", "approx.ftz", "full")),
    ]


def _approximate_quotient(how: str) -> Function:
    """A quotient within two units in the last place. div.approx by a divisor beyond 2**126 gives zero, or NaN for
    infinity."""

    def want(a: int, b: int, _: int) -> Want:
        a, b = (flush(x & 0xFFFFFFFF, "f32") if "ftz" in how else x & 0xFFFFFFFF for x in (a, b))
        x, y = exact.decode(a, "f32"), exact.decode(b, "f32")
        huge = y is not None and y.magnitude is not None and y.magnitude > 1 << 126
        if huge and "approx" in how:
            if x is None or x.magnitude is None:
                return Nan("f32")
            return (a ^ b) & 1 << 31
        number = exact.quotient(x, y)
        if number is None:
            return Nan("f32")
        if number.magnitude is None or number.magnitude == 0:
            return exact.encode(number, "f32")
        return Within("f32", exact.real(number), 2.0**-22, 0)

    return want


def _half_approximations(kind: str) -> list[Case]:
    """Approximate 16-bit instructions, with their greatest errors from the PTX ISA."""
    base = kind.removesuffix("x2")
    if base == "f16":
        return [
            case("ex2.approx", kind, 1, _approximation(base, _power, 2.0**-9.9, 2.0**-24)),
            case("tanh.approx", kind, 1, _approximation(base, math.tanh, 0, 2.0**-10.987)),
        ]
    return [
        case("ex2.approx.ftz", kind, 1, _approximation(base, _power, 2.0**-7, 2.0**-126, True)),
        case("tanh.approx", kind, 1, _approximation(base, math.tanh, 0, 2.0**-8)),
    ]


def _coarse() -> list[Case]:
    """The approximations of f64, which read and write upper words."""

    def coarse(function: Callable[[float], float]) -> Function:
        near = _approximation("f64", function, 2.0**-19, 0, True)
        return lambda a, b, c: near(a & 0xFFFFFFFF00000000 if not _is_nan64(a) else a, b, c)

    return [
        case("rcp.approx.ftz", "f64", 1, coarse(_reciprocal)),
        case("rsqrt.approx.ftz", "f64", 1, coarse(_inverse_root)),
        case("rsqrt.approx", "f64", 1, _approximation("f64", _inverse_root, 2.0**-20, 0)),
    ]


def _is_nan64(raw: int) -> bool:
    """Whether the bits are a NaN of f64."""
    return exact.decode(raw, "f64") is None


# The cases, by the name of their group.
GROUPS = {
    **{f"{kind} sums": Group(_sums(kind), floats(kind, 1, True)) for kind in ("f16", "bf16", "f32", "f64")},
    **{f"{kind} sums": Group(_sums(kind), pairs(kind[:-2], 2, True)) for kind in ("f16x2", "bf16x2")},
    **{f"{kind} quotients": Group(_quotients(kind), floats(kind, 3)) for kind in ("f32", "f64")},
    **{
        f"{kind} extrema": Group(_extrema(kind) + _signs(kind), floats(kind, 4))
        for kind in ("f16", "bf16", "f32", "f64")
    },
    **{f"{kind} extrema": Group(_extrema(kind) + _signs(kind), pairs(kind[:-2], 5)) for kind in ("f16x2", "bf16x2")},
    **{
        f"{kind} comparisons": Group(_comparisons(kind), floats(kind, 6, count=50))
        for kind in ("f16", "bf16", "f32", "f64")
    },
    **{f"{kind} comparisons": Group(_pair_comparisons(kind), pairs(kind[:-2], 7)) for kind in ("f16x2", "bf16x2")},
    **{f"{kind} classes": Group(_classes(kind), floats(kind, 8)) for kind in ("f32", "f64")},
    "selections": Group(_selections(), floats("f32", 9)),
    "approximations": Group(_approximations(), floats("f32", 10)),
    "f64 approximations": Group(_coarse(), floats("f64", 11)),
    **{f"{kind} approximations": Group(_half_approximations(kind), floats(kind, 12)) for kind in ("f16", "bf16")},
    **{
        f"{kind} approximations": Group(_half_approximations(kind), pairs(kind[:-2], 13))
        for kind in ("f16x2", "bf16x2")
    },
}
