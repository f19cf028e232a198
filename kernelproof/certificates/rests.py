"""Names for a number below a size, from which the quotients that compilers compute follow.

A compiler divides by a constant with an odd factor by a product and a shift: it divides by 6 before it divides by 96 or
192, and twice a number by 5 before it divides by 20 or 160. So the number is a sum of such a quotient and of its rest.
"""

from __future__ import annotations

from kernelproof.certificates.polynomials import ZERO, Polynomial

named = Polynomial.named


def parts(name: str, size: int) -> dict[str, tuple[int, int]]:
    """The names whose sum the number is, each with its factor and its largest value."""
    if size % 6 == 0:
        return {f"{name}_sixth": (6, size // 6 - 1), f"{name}_rest": (1, 5)}
    if size % 5 == 0:
        return {f"{name}_fifth": (5, size // 5 - 1), f"{name}_half": (3, 1), f"{name}_rest": (1, 2)}
    return {name: (1, size - 1)}


def number(name: str, size: int) -> Polynomial:
    """The number itself."""
    return sum((named(part, factor) for part, (factor, _) in parts(name, size).items()), ZERO)


def bounds(name: str, size: int) -> dict[tuple[str, ...], tuple[int, int]]:
    """The bounds of its names."""
    return {(part,): (0, most) for part, (_, most) in parts(name, size).items()}


def limits(name: str, size: int) -> tuple[Polynomial, ...]:
    """What else is at least 0: a rest by 5 is 3 * half + rest, and below 5."""
    return (4 - named(f"{name}_half", 3) - named(f"{name}_rest"),) if f"{name}_half" in parts(name, size) else ()
