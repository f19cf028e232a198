"""Names a number below a known size by parts, so that its quotients by 6, 5, 13 and 7 are polynomials in these names.

A proof knows a quotient only if it is a polynomial in names. Compilers divide by a constant with an odd factor by a
multiplication and a shift. For 96 and 192 they first divide by 6; for 20 and 160 they divide twice the number by 5; for
208 they divide four times the number by 13; for 224 they divide four times the number by 7. So a number x below a
multiple of 6, 5, 13 or 224 is named as a multiple of 6, 5, 13 or 7 plus a remainder, and the remainder again by parts,
so that each part adds its own quotient:

- x = 6 * x_sixth + x_rest, with x_rest <= 5. So x / 6 = x_sixth.
- x = 5 * x_fifth + 3 * x_half + x_rest, with x_half <= 1 and x_rest <= 2. So 2 * x / 5 = 2 * x_fifth + x_half: twice
  the remainder reaches 5 exactly if the remainder is 3 or 4.
- x = 13 * x_thirteenth + 4 * x_four + 7 * x_seven + 10 * x_ten + x_rest, where at most one of x_four, x_seven and x_ten
  is 1, and x_rest <= 3. So 4 * x / 13 = 4 * x_thirteenth + x_four + 2 * x_seven + 3 * x_ten: from the remainders 4, 7
  and 10 on, four times the remainder is at least 13, 26 and 39.
- x = 7 * x_seventh + 4 * x_bit2 + 2 * x_bit1 + x_bit0, where the last three are the bits of the remainder. So
  4 * x / 7 = 4 * x_seventh + 2 * x_bit2 + x_bit1.

``share`` names the columns of vectors and the beginnings of shares in this way. A caller gives x its ``number`` as a
polynomial, and its ``bounds`` and ``limits`` as facts.
"""

from __future__ import annotations

from kernelproof.certificates.polynomials import ZERO, Polynomial

named = Polynomial.named
# The remainders r modulo 13 from which on 4 * r / 13 is 1, 2 and 3, by the ends of their names.
QUARTERS = {"four": 4, "seven": 7, "ten": 10}


def parts(name: str, size: int) -> dict[str, tuple[int, int]]:
    """The parts of which a number below ``size`` is the sum: name -> its factor and its largest value, as in
    {"x_sixth": (6, 15), "x_rest": (1, 5)} for size 96. Its only part is ``name`` if no divisor of the module fits."""
    if size % 6 == 0:
        return {f"{name}_sixth": (6, size // 6 - 1), f"{name}_rest": (1, 5)}
    if size % 5 == 0:
        return {f"{name}_fifth": (5, size // 5 - 1), f"{name}_half": (3, 1), f"{name}_rest": (1, 2)}
    if size % 13 == 0:
        steps = {f"{name}_{spelled}": (step, 1) for spelled, step in QUARTERS.items()}
        return {f"{name}_thirteenth": (13, size // 13 - 1), **steps, f"{name}_rest": (1, 3)}
    if size % 224 == 0:
        bits = {f"{name}_bit{bit}": (1 << bit, 1) for bit in (2, 1, 0)}
        return {f"{name}_seventh": (7, size // 7 - 1), **bits}
    return {name: (1, size - 1)}


def block(size: int) -> int:
    """The divisor of the parts for a size: 6, 5, 13 or 7; the size itself if it has a single part."""
    return next((divisor for divisor, base in ((6, 6), (5, 5), (13, 13), (7, 224)) if size % base == 0), size)


def blocks(name: str, size: int) -> Polynomial:
    """The multiple of ``block`` in the number, such as 6 * x_sixth; 0 if the size is its own block."""
    own = {part: factor for part, (factor, _) in parts(name, size).items() if factor == block(size)}
    return sum((named(part, factor) for part, factor in own.items()), ZERO)


def number(name: str, size: int) -> Polynomial:
    """The number as a polynomial in the names of its parts, such as 6 * x_sixth + x_rest."""
    return sum((named(part, factor) for part, (factor, _) in parts(name, size).items()), ZERO)


def bounds(name: str, size: int) -> dict[tuple[str, ...], tuple[int, int]]:
    """The least and the largest value of the name of each part."""
    return {(part,): (0, most) for part, (_, most) in parts(name, size).items()}


def limits(name: str, size: int) -> tuple[Polynomial, ...]:
    """Further polynomials in the parts that are at least 0.

    They say that the remainder modulo 5, 3 * half + rest, is at most 4, and that the one modulo 7 is at most 6. They
    also say that at most one step of QUARTERS is in the remainder modulo 13, and that the rest is at most 3, or at most
    2 after a step.
    """
    names = parts(name, size)
    if f"{name}_half" in names:
        return (4 - named(f"{name}_half", 3) - named(f"{name}_rest"),)
    if f"{name}_four" in names:
        steps = sum((named(f"{name}_{step}") for step in QUARTERS), ZERO)
        return 1 - steps, 3 - steps - named(f"{name}_rest")
    if f"{name}_bit2" in names:
        return (6 - sum((named(part, factor) for part, (factor, _) in names.items() if factor < 7), ZERO),)
    return ()
