"""Lists cases of cvt between all types but fp8, whose expected results are exact numbers that are rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from tests.kernelproof.emulator import exact
from tests.kernelproof.emulator.exact import FORMATS, Either, Halves, Nan, Number, Want
from tests.kernelproof.emulator.float_cases import flush
from tests.kernelproof.emulator.integer_cases import number
from tests.kernelproof.emulator.lane_arithmetic import Case, Group
from tests.kernelproof.emulator.operand_draws import integers, sources

# From the three operands: the expected result.
Function = Callable[[int, int, int], Want]
# The types that ``cvt`` converts between.
INTEGERS = tuple(f"{s}{bits}" for bits in (8, 16, 32, 64) for s in "us")
FLOATS = ("f16", "bf16", "f32", "f64")
# Operand and result registers by number of bits. Bytes are in words.
_FROM = {8: "%A", 16: "%h", 32: "%A", 64: "%a"}
_TO = {8: (32, "%D"), 16: (16, "%m"), 32: (32, "%D"), 64: (64, "%d")}
_INTEGRAL: dict[str, Callable[[Fraction], int]] = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


def _width(kind: str) -> int:
    """The width of a type in bits."""
    return exact.bits_of(kind) if kind in FORMATS else int(kind[1:])


def _case(opcode: str, dst: str, src: str, want: Function) -> Case:
    """A case of cvt, with the register widths that the types need."""
    width, register = _TO[_width(dst)]
    return Case(f"cvt{opcode}.{dst}.{src} {register}, {_FROM[_width(src)]};", width, want)


def _limits(kind: str) -> tuple[int, int]:
    """The least and the largest number of an integer type."""
    bits = int(kind[1:])
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def _cases_between_integers(src: str) -> list[Case]:
    """Conversions from an integer type to all integer types, with and without saturation."""
    out = []
    for dst in INTEGERS:
        low, high = _limits(dst)

        def clamp(a: int, _b: int, _c: int, low: int = low, high: int = high) -> int:
            return max(low, min(high, number(a, src)))

        # A narrow signed result is extended into a wider register.
        out.append(_case("", dst, src, lambda a, b, c, dst=dst: number(number(a, src), dst)))
        if _limits(src)[0] < low or _limits(src)[1] > high:
            out.append(_case(".sat", dst, src, clamp))
    return out


def _cases_to_integers(src: str) -> list[Case]:
    """Conversions from a float type to integers, in all roundings. NaN gives zero or, for 64-bit types, the sign bit
    alone."""
    out = []
    for dst in INTEGERS if src != "bf16" else INTEGERS[2:]:
        for mode, integral in _INTEGRAL.items():
            for ftz in ("", ".ftz") if src == "f32" else ("",):
                low, high = _limits(dst)
                of_nan = 1 << int(dst[1:]) - 1 if src == "f64" or dst[1:] == "64" else 0

                def want(
                    a: int, _b: int, _c: int, integral: Callable[[Fraction], int] = integral, ftz: str = ftz,
                    low: int = low, high: int = high, of_nan: int = of_nan, dst: str = dst,
                ) -> Want:  # fmt: skip
                    x = exact.decode(flush(a & ((1 << _width(src)) - 1), src) if ftz else a, src)
                    if x is None:
                        return number(of_nan, dst)
                    if x.magnitude is None:
                        return low if x.negative else high
                    return max(low, min(high, integral(-x.magnitude if x.negative else x.magnitude)))

                out.append(_case(f".{mode}{ftz}", dst, src, want))
    return out


def _cases_from_integers(src: str) -> list[Case]:
    """Conversions from an integer type to all float types, in all roundings."""
    out = []
    for dst in FLOATS:
        if dst == "bf16" and _width(src) == 8:
            continue
        for mode in ("rn", "rz", "rm", "rp"):
            for sat in ("", ".sat") if dst != "bf16" else ("",):

                def want(a: int, _b: int, _c: int, dst: str = dst, mode: str = mode, sat: str = sat) -> Want:
                    x = number(a, src)
                    x = max(0, min(1, x)) if sat else x
                    return exact.encode(Number(x < 0, Fraction(abs(x))), dst, mode)

                out.append(_case(f".{mode}{sat}", dst, src, want))
    return out


def _float_conversion(dst: str, src: str, mode: str, how: str) -> Function:
    """A conversion between floats, with .ftz of f32, .sat, .relu and .satfinite. With rni and so on it rounds to
    integral values."""
    # The codes of a result are compared as integers: the sign bit, and the largest finite number.
    sign = 1 << exact.bits_of(dst) - 1 + exact.SPARE.get(dst, 0)
    largest = exact.top(dst) - 1 << exact.SPARE.get(dst, 0)

    def want(a: int, _b: int, _c: int) -> Want:
        a &= (1 << _width(src)) - 1
        x = exact.decode(flush(a, "f32") if "ftz" in how and src == "f32" else a, src)
        if x is None:
            return 0 if "sat" in how.split(".") else _canonical_nan(dst, src)
        if mode in _INTEGRAL and x.magnitude is not None:
            value = _INTEGRAL[mode](-x.magnitude if x.negative else x.magnitude)
            x = Number(x.negative, Fraction(abs(value)))
        out = exact.encode(x, dst, mode if mode not in _INTEGRAL else "rn")
        assert isinstance(out, int)
        if "satfinite" in how and out & (sign - 1) > largest:
            out = out & sign | largest
        elif "sat" in how.split("."):
            out = 0 if out & sign else min(out, exact.one(dst))
        if "ftz" in how and dst == "f32":
            out = flush(out, "f32")
        if "relu" in how and out & sign:
            return Either(0, out) if out == sign else 0
        return out

    return want


def _canonical_nan(dst: str, src: str) -> Want:
    """The canonical NaN of a conversion. The ISA does not define the one of f64, of tf32, and of a rounding within a
    type."""
    if dst == src or dst in ("f64", "tf32"):
        return Nan(dst)
    return (1 << exact.bits_of(dst) - 1) - 1


def _cases_between_floats(src: str) -> list[Case]:
    """Conversions between float types: to the same type with rounding to an integer, to a wider type, or to a narrower
    one."""
    out = []
    for dst in FLOATS:
        if dst == src:
            modes: tuple[str, ...] = ("", *_INTEGRAL)
        elif _widens(dst, src):
            modes = ("",)
        else:
            modes = ("rn", "rz", "rm", "rp")
        hows = [""]
        if "f32" in (dst, src):
            hows.append(".ftz")
        if "bf16" not in (dst, src):
            hows += [f"{how}.sat" for how in hows]
        for mode in modes:
            for how in hows if mode != "" or dst != src or src != "bf16" else ():
                opcode = f"{'.' if mode else ''}{mode}{how}"
                out.append(_case(opcode, dst, src, _float_conversion(dst, src, mode or "rn", how)))
    return out


def _widens(dst: str, src: str) -> bool:
    """Whether each number of one format is a number of the other."""
    return all(x >= y for x, y in zip(FORMATS[dst], FORMATS[src], strict=True))


def _cases_to_narrow_floats() -> list[Case]:
    """Conversions from f32 to narrower formats with ReLU and saturation, also of pairs."""
    out = []
    for dst in ("f16", "bf16", "tf32"):
        for mode in ("rn", "rz") if dst != "tf32" else ("rn", "rz", "rna"):
            for how in ("", ".relu", ".satfinite", ".relu.satfinite"):
                if mode == "rna" and "relu" in how:
                    continue
                want = _float_conversion(dst, "f32", mode, how)
                register = "%D" if dst == "tf32" else "%m"
                width = 32 if dst == "tf32" else 16
                out.append(Case(f"cvt.{mode}{how}.{dst}.f32 {register}, %A;", width, want))
                if dst != "tf32":
                    out.append(
                        Case(f"cvt.{mode}{how}.{dst}x2.f32 %D, %A, %B;", 32,
                             lambda a, b, c, want=want: Halves(want(b, 0, 0), want(a, 0, 0)))
                    )  # fmt: skip
    return out


# The cases by name of their group, each with the operands that they are executed on.
GROUPS = {
    **{
        f"cvt from {src}": Group(_cases_between_integers(src) + _cases_from_integers(src), integers(20), uniform=True)
        for src in INTEGERS
    },
    **{f"cvt from {src} to integers": Group(_cases_to_integers(src), sources(src, ()), uniform=True) for src in FLOATS},
    **{
        f"cvt from {src} to floats": Group(
            _cases_between_floats(src),
            sources(src, tuple(dst for dst in FLOATS if not _widens(dst, src))),
            uniform=True,
        )
        for src in FLOATS
    },
    "cvt to narrow floats": Group(_cases_to_narrow_floats(), sources("f32", ("f16", "bf16", "tf32"))),
}
