"""Splits a number below a known size into named parts, so that the quotients that compilers compute are known.

A compiler divides by a constant with an odd factor by a multiplication and a shift. It divides by 6 before it divides
by 96 or 192, and it divides twice a number by 5 before it divides by 20 or 160. So the number is named as a sum: a
multiple of the divisor, whose quotient then is a name, and the remainder.
"""

from __future__ import annotations

from kernelproof.certificates.polynomials import ZERO, Polynomial

named = Polynomial.named


def parts(name: str, size: int) -> dict[str, tuple[int, int]]:
    """The parts of which a number below ``size`` is the sum: name -> its factor and its largest value."""
    if size % 6 == 0:
        return {f"{name}_sixth": (6, size // 6 - 1), f"{name}_rest": (1, 5)}
    if size % 5 == 0:
        return {f"{name}_fifth": (5, size // 5 - 1), f"{name}_half": (3, 1), f"{name}_rest": (1, 2)}
    return {name: (1, size - 1)}


def number(name: str, size: int) -> Polynomial:
    """The number as a polynomial in the names of its parts."""
    return sum((named(part, factor) for part, (factor, _) in parts(name, size).items()), ZERO)


def bounds(name: str, size: int) -> dict[tuple[str, ...], tuple[int, int]]:
    """The bounds of the number's names."""
    return {(part,): (0, most) for part, (_, most) in parts(name, size).items()}


def limits(name: str, size: int) -> tuple[Polynomial, ...]:
    """Further polynomials that are at least 0: the remainder modulo 5 is 3 * half + rest, which must be below 5."""
    return (4 - named(f"{name}_half", 3) - named(f"{name}_rest"),) if f"{name}_half" in parts(name, size) else ()
