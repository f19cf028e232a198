"""Computes with floating-point numbers as signed fractions: decoding, exact operations, and one rounding at the end."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

# Bits of the mantissa and of the exponent. A tf32 is in the upper bits of a word.
FORMATS = {"f16": (10, 5), "bf16": (7, 8), "tf32": (10, 8), "f32": (23, 8), "f64": (52, 11)}
# Bits of a register below a format.
SPARE = {"tf32": 13}


class Number(NamedTuple):
    """A sign and a magnitude, None for infinity. A Number that is None is NaN."""

    negative: bool
    magnitude: Fraction | None


# An operation on numbers, of which the last argument is the mode of rounding.
Operation = Callable[..., "Number | None"]
ZERO = Fraction(0)


class Nan(NamedTuple):
    """Any NaN of a format."""

    kind: str


class Within(NamedTuple):
    """Any number of a format within a relative or absolute distance of another one."""

    kind: str
    near: float
    relative: float
    absolute: float


class Halves(NamedTuple):
    """The wanted halves of a word, the lower one first."""

    low: Want
    high: Want


class Either(NamedTuple):
    """Any of several results, of which the ISA does not say which one."""

    first: int
    second: int


# A wanted result, as raw bits or as a set of them.
Want = int | Nan | Within | Halves | Either


def agrees(got: int, want: Want) -> bool:
    """Whether a result is the wanted one."""
    if isinstance(want, int):
        return got == want
    if isinstance(want, Halves):
        return agrees(got & 0xFFFF, want.low) and agrees(got >> 16, want.high)
    if isinstance(want, Either):
        return got in want
    number = decode(got, want.kind)
    if isinstance(want, Nan) or number is None:
        return isinstance(want, Nan) and number is None
    largest = magnitude_of((top(want.kind) - 1), want.kind)
    if number.magnitude is None:
        return abs(Fraction(want.near)) * (1 + Fraction(want.relative)) >= largest and number.negative == (
            want.near < 0
        )
    error = abs((-1 if number.negative else 1) * number.magnitude - Fraction(want.near))
    least = magnitude_of(1 << FORMATS[want.kind][0], want.kind)
    allowed = max(abs(Fraction(want.near)) * Fraction(want.relative), Fraction(want.absolute))
    # A subnormal result may be flushed.
    return error <= allowed or (abs(Fraction(want.near)) <= least and error <= least)


def bits_of(kind: str) -> int:
    """The number of bits that a format uses."""
    return 1 + sum(FORMATS[kind])


def top(kind: str) -> int:
    """The code of infinity."""
    mantissa, exponent = FORMATS[kind]
    return ((1 << exponent) - 1) << mantissa


def one(kind: str) -> int:
    """The code of 1."""
    mantissa, exponent = FORMATS[kind]
    return ((1 << exponent - 1) - 1) << mantissa


def magnitude_of(code: int, kind: str) -> Fraction:
    """The magnitude of a finite code without sign."""
    mantissa, exponent = FORMATS[kind]
    bias = (1 << exponent - 1) - 1
    e, m = code >> mantissa, code & ((1 << mantissa) - 1)
    if e == 0:
        return Fraction(m, 1 << mantissa + bias - 1)
    scale = e - bias - mantissa
    return Fraction(m + (1 << mantissa)) * (Fraction(1 << scale) if scale >= 0 else Fraction(1, 1 << -scale))


def decode(raw: int, kind: str) -> Number | None:
    """The number of raw bits. Bits above the format are ignored."""
    raw = raw >> SPARE.get(kind, 0) & ((1 << bits_of(kind)) - 1)
    sign, code = raw >> bits_of(kind) - 1, raw & ((1 << bits_of(kind) - 1) - 1)
    if code > top(kind):
        return None
    return Number(bool(sign), None if code == top(kind) else magnitude_of(code, kind))


def encode(number: Number | None, kind: str, mode: str = "rn") -> Want:
    """The raw bits of a number, rounded by rn, rz, rm, rp or rna."""
    if number is None:
        return Nan(kind)
    sign = int(number.negative) << bits_of(kind) - 1
    if number.magnitude is None:
        return (sign | top(kind)) << SPARE.get(kind, 0)
    if number.magnitude == 0:
        return sign << SPARE.get(kind, 0)
    mantissa, exponent = FORMATS[kind]
    bias = (1 << exponent - 1) - 1
    x = number.magnitude
    e = x.numerator.bit_length() - x.denominator.bit_length()
    e -= x < (Fraction(1 << e) if e >= 0 else Fraction(1, 1 << -e))
    e = max(e, 1 - bias)
    scale = mantissa - e
    n, rest = divmod(x.numerator << max(scale, 0), x.denominator << max(-scale, 0))
    unit = x.denominator << max(-scale, 0)
    up = {
        "rn": 2 * rest > unit or (2 * rest == unit and n % 2 == 1),
        "rna": 2 * rest >= unit,
        "rz": False,
        "rm": number.negative and rest > 0,
        "rp": not number.negative and rest > 0,
    }[mode]
    code = n + up + ((e + bias - 1) << mantissa)
    if code >= top(kind):
        stays = mode == "rz" or (mode == "rm" and not number.negative) or (mode == "rp" and number.negative)
        code = top(kind) - 1 if stays else top(kind)
    return (sign | code) << SPARE.get(kind, 0)


# --- operations; ``mode`` only decides the sign of a zero sum


def total(x: Number | None, y: Number | None, mode: str = "rn") -> Number | None:
    """x + y."""
    if x is None or y is None:
        return None
    if x.magnitude is None or y.magnitude is None:
        if x.magnitude is None and y.magnitude is None and x.negative != y.negative:
            return None
        return x if x.magnitude is None else y
    if x.magnitude == 0 and y.magnitude == 0 and x.negative == y.negative:
        return x
    value = (-x.magnitude if x.negative else x.magnitude) + (-y.magnitude if y.negative else y.magnitude)
    return Number(value < 0 or (value == 0 and mode == "rm"), abs(value))


def negated(x: Number | None) -> Number | None:
    """-x."""
    return None if x is None else Number(not x.negative, x.magnitude)


def product(x: Number | None, y: Number | None, _mode: str = "rn") -> Number | None:
    """x * y."""
    if x is None or y is None:
        return None
    negative = x.negative != y.negative
    if x.magnitude is None or y.magnitude is None:
        return None if ZERO in (x.magnitude, y.magnitude) else Number(negative, None)
    return Number(negative, x.magnitude * y.magnitude)


def quotient(x: Number | None, y: Number | None, _mode: str = "rn") -> Number | None:
    """x / y."""
    if x is None or y is None:
        return None
    negative = x.negative != y.negative
    if y.magnitude is None:
        return None if x.magnitude is None else Number(negative, ZERO)
    if y.magnitude == 0:
        return None if x.magnitude == 0 else Number(negative, None)
    return Number(negative, None if x.magnitude is None else x.magnitude / y.magnitude)


def root(x: Number | None, _mode: str = "rn") -> Number | None:
    """The square root. If it is not exact, a last bit far below every rounding is set."""
    if x is None or x.magnitude == 0:
        return x
    if x.negative or x.magnitude is None:
        return None if x.negative else x
    shift = 2200
    scaled = (x.magnitude.numerator << 2 * shift) // x.magnitude.denominator
    whole = math.isqrt(scaled)
    exact = Fraction(whole, 1 << shift)
    return Number(False, exact if exact * exact == x.magnitude else exact + Fraction(1, 1 << shift + 1))


def real(x: Number) -> float:
    """The number as a Python float."""
    magnitude = math.inf if x.magnitude is None else float(x.magnitude)
    return -magnitude if x.negative else magnitude
