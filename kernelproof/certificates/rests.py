"""Splits a number below a known size into named parts, so that the quotients that compilers compute are known.

A compiler divides by a constant with an odd factor by a multiplication and a shift. It divides by 6 before it divides
by 96 or 192, twice a number by 5 before it divides by 20 or 160, and four times a number by 13 before it divides by
208. So the number is named as a sum: a multiple of the divisor, whose quotient then is a name, and the remainder. That
is a sum too, so that each part adds its own quotient.
"""

from __future__ import annotations

from kernelproof.certificates.polynomials import ZERO, Polynomial

named = Polynomial.named
# From which remainders modulo 13 on, four times the remainder has a larger quotient by 13. At most one is a part.
QUARTERS = {"four": 4, "seven": 7, "ten": 10}


def parts(name: str, size: int) -> dict[str, tuple[int, int]]:
    """The parts of which a number below ``size`` is the sum: name -> its factor and its largest value."""
    if size % 6 == 0:
        return {f"{name}_sixth": (6, size // 6 - 1), f"{name}_rest": (1, 5)}
    if size % 5 == 0:
        return {f"{name}_fifth": (5, size // 5 - 1), f"{name}_half": (3, 1), f"{name}_rest": (1, 2)}
    if size % 13 == 0:
        steps = {f"{name}_{spelled}": (step, 1) for spelled, step in QUARTERS.items()}
        return {f"{name}_thirteenth": (13, size // 13 - 1), **steps, f"{name}_rest": (1, 3)}
    return {name: (1, size - 1)}


def block(size: int) -> int:
    """The number of which one part is a multiple; the size if there is none."""
    return next((factor for factor in (6, 5, 13) if size % factor == 0), size)


def blocks(name: str, size: int) -> Polynomial:
    """The part that is a multiple of ``block``."""
    own = {part: factor for part, (factor, _) in parts(name, size).items() if factor == block(size)}
    return sum((named(part, factor) for part, factor in own.items()), ZERO)


def number(name: str, size: int) -> Polynomial:
    """The number as a polynomial in the names of its parts."""
    return sum((named(part, factor) for part, (factor, _) in parts(name, size).items()), ZERO)


def bounds(name: str, size: int) -> dict[tuple[str, ...], tuple[int, int]]:
    """The bounds of the number's names."""
    return {(part,): (0, most) for part, (_, most) in parts(name, size).items()}


def limits(name: str, size: int) -> tuple[Polynomial, ...]:
    """Further polynomials that are at least 0: the remainder modulo 5 is 3 * half + rest, which must be below 5; that
    modulo 13 is a step of QUARTERS, or none, and a rest below the next one."""
    names = parts(name, size)
    if f"{name}_half" in names:
        return (4 - named(f"{name}_half", 3) - named(f"{name}_rest"),)
    if f"{name}_four" in names:
        steps = sum((named(f"{name}_{step}") for step in QUARTERS), ZERO)
        return 1 - steps, 3 - steps - named(f"{name}_rest")
    return ()
