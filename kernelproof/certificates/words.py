"""Words: registers whose value depends on the problem, in place of arrays in the text that the emulator generates.

The emulator executes instructions as Python text on NumPy arrays with one element per lane. A ``Word`` takes an array's
place in that text: it has the operators and conversions that the text uses, and its value is a polynomial. So the
meaning of an instruction is the emulator's own; this file defines NumPy's operators on values that are not known.

A word of ``bits`` bits equals its polynomial modulo 2^bits. Where more than those bits matter (in a comparison, an
extension, a quotient or a shift to the right), the polynomial must be proven to lie within the type. So overflow is
never assumed away.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from kernelproof.certificates.conditions import AtLeast, Bits, Condition, Multiple, OpenFacts
from kernelproof.certificates.facts import Facts, NotCertified
from kernelproof.certificates.polynomials import CONSTANT, Lanes, Polynomial

Operand = Any  # a word, an array, or a Python or NumPy integer


class Word:
    """A register of ``bits`` bits in every lane of a CTA. ``signed``: whether the text takes it for a signed number."""

    __slots__ = ("bits", "facts", "poly", "signed")
    # NumPy leaves operations with a word to the word.
    __array_ufunc__ = None

    def __init__(self, poly: Polynomial, bits: int, facts: Facts, signed: bool = False) -> None:
        self.poly, self.bits, self.facts, self.signed = poly, bits, facts, signed

    def _with(self, poly: Polynomial) -> Word:
        return Word(poly, self.bits, self.facts, self.signed)

    # --- looking at it in another way

    def view(self, kind: Any) -> Word:
        """The same bits, signed or unsigned."""
        kind = np.dtype(kind)
        if kind.itemsize * 8 != self.bits or kind.kind not in "iu":
            raise NotCertified(f"a word of {self.bits} bits is taken for {kind}")
        return Word(self.poly, self.bits, self.facts, kind.kind == "i")

    def astype(self, kind: Any) -> Word:
        """The value in another width: truncated or, if it is proven to fit its own type, extended."""
        kind = np.dtype(kind)
        if kind.kind not in "iu":
            raise NotCertified(f"{self.poly} becomes a number of type {kind}")
        bits = kind.itemsize * 8
        poly = self.number() if bits > self.bits else self.poly
        return Word(poly, bits, self.facts, kind.kind == "i")

    def number(self) -> Polynomial:
        """The value as a number. Raises NotCertified if the polynomial may lie outside of the type."""
        if self.poly.is_constant:
            return self._constant()
        # Arrays of coefficients have 64 bits, and no number of ours needs more than 62.
        top = 1 << min(self.bits - 1 if self.signed else self.bits, 62)
        least = -top if self.signed else 0
        for gap in (self.poly - least, Polynomial.of(top - 1) - self.poly):
            if not self.facts.holds(gap):
                kind = f"{'signed' if self.signed else 'unsigned'} {self.bits} bits"
                raise NotCertified(f"{self.poly} may overflow {kind}", refuted=self.facts.refutation(gap))
        return self.poly

    def _constant(self) -> Polynomial:
        """The value of a word that is known, as a number."""
        number = self.poly.constant
        if isinstance(number, int) or self.bits < 64:
            number = number & ((1 << self.bits) - 1)
            number = number - (number >> (self.bits - 1) << self.bits) * (self.signed or self.bits == 64)
        # A number of 64 bits is a signed one here, as those of arrays are.
        if self.bits == 64 and not self.signed and np.any(np.asarray(number) < 0):
            raise NotCertified("an unsigned number above 2^63")
        return Polynomial.of(number)

    # --- arithmetic modulo 2^bits

    def __add__(self, other: Operand) -> Word:
        return self._with(self.poly + self._poly(other))

    def __sub__(self, other: Operand) -> Word:
        return self._with(self.poly - self._poly(other))

    def __mul__(self, other: Operand) -> Word:
        return self._with(self.poly * self._poly(other))

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: Operand) -> Word:
        return self._with(self._poly(other) - self.poly)

    def __neg__(self) -> Word:
        return self._with(-self.poly)

    def __invert__(self) -> Word:
        """All bits inverted, which is -1 minus the number."""
        return self._with(Polynomial.of(-1) - self.poly)

    def _poly(self, other: Operand) -> Polynomial:
        return polynomial(other, self.bits)

    # --- bits

    def __lshift__(self, count: Operand) -> Word:
        return self._with(self.poly.scaled(1 << _literal(count)))

    def __rshift__(self, count: Operand) -> Word:
        """Division by a power of two, rounded down, of the value as a number."""
        return self._with(self.quotient(1 << _literal(count)))

    def quotient(self, divisor: int) -> Polynomial:
        """The value as a number, divided by a positive one and rounded down."""
        return quotient(self.number(), divisor, self.facts)

    def __and__(self, other: Operand) -> Any:
        return self._bitwise(other, np.bitwise_and)

    def __or__(self, other: Operand) -> Any:
        return self._bitwise(other, np.bitwise_or)

    def __xor__(self, other: Operand) -> Any:
        return self._bitwise(other, np.bitwise_xor)

    __rand__ = __and__
    __ror__ = __or__
    __rxor__ = __xor__

    def low_bits(self) -> int:
        """How many low bits are known in every lane: the others come from multiples of that power of two."""
        step = 1 << self.bits
        for monomial, coefficient in self.poly.terms.items():
            if monomial:
                step = np.gcd.reduce(np.append(np.abs(np.asarray(coefficient)).reshape(-1), min(step, 1 << 62)))
        return (int(step) & -int(step)).bit_length() - 1

    def _bitwise(self, other: Operand, operation: Callable[..., Any]) -> Any:
        """A bitwise operation with another number. The word's low bits are known (``low_bits``). On all bits above them
        the other number must have one of the forms below."""
        if isinstance(other, Word):
            if other.poly.is_constant:
                return self._bitwise(np.asarray(other.poly.constant, np.int64), operation)
            return other._bitwise(self, operation) if self.poly.is_constant else self._disjoint(other, operation)
        if self.poly.is_constant:
            kind = f"i{self.bits // 8}"
            mine = np.atleast_1d(np.asarray(self.poly.constant, np.int64)).astype(kind)
            its = np.asarray(other).astype(np.uint64).astype(kind)
            return np.asarray(operation(mine, its)).view(f"u{kind[1:]}")
        count = min(self.low_bits(), self.bits)
        mask = (1 << count) - 1
        known = np.asarray(self.poly.constant) & mask
        high = self.poly - Polynomial.of(known)
        mine, full = np.asarray(other).astype(np.uint64), (1 << self.bits) - 1
        mine = mine & np.uint64(full)
        above = mine >> np.uint64(count) if count < 64 else np.zeros_like(mine)
        low = operation(known, (mine & np.uint64(mask)).astype(np.int64))
        if not above.any():
            # With zeros above, ``and`` clears the bits that are not known; ``or`` and ``xor`` keep them.
            if operation is np.bitwise_and:
                return np.broadcast_to(low, self.lanes(low)).astype(f"u{self.bits // 8}")
            return self._with(high + Polynomial.of(low))
        if operation is np.bitwise_and and (above == full >> count).all():  # all are kept
            return self._with(high + Polynomial.of(low))
        if operation is np.bitwise_and and (field := bit_field(mine)) is not None:
            return self._field(*field)
        if operation is np.bitwise_or and (field := bit_field(~mine & np.uint64(full))) is not None and not field[0]:
            # All bits above some low ones become 1.
            return self._with(self._rest(self.poly, field[1]) - (1 << field[1]))
        if operation is np.bitwise_xor and (field := bit_field(mine)) is not None and field[1] == field[0] + 1:
            return self._with_inverted(field[0])
        least = int(np.bitwise_or.reduce(mine, axis=None))
        below = Polynomial.of((least & -least) - 1) - self.poly
        if operation is not np.bitwise_and and self.facts.holds(self.poly) and self.facts.holds(below):
            return self + other  # all bits of the number are below those of the mask
        raise NotCertified(f"bits of {self.poly} are not known")

    def _field(self, low: int, end: int) -> Any:
        """The bits from ``low`` to before ``end``: the word modulo 2^end minus the word modulo 2^low."""
        if isinstance(self.facts, OpenFacts):
            with self.facts.without_solver(), suppress(NotCertified):
                rest = self._rest(self.poly, end)
                return self._with(rest - self._rest(rest, low))
            # The value is not known, but whether it is 0 may be stated by one condition.
            if low == 0:
                return Bits(self.facts, Multiple(self.poly, 1 << end, False))
            if end == self.bits:
                number = Word(self.poly, self.bits, self.facts).number()
                return Bits(self.facts, AtLeast(number - (1 << low)))
        rest = self._rest(self.poly, end)
        return self._with(rest - self._rest(rest, low))

    def _with_inverted(self, bit: int) -> Word:
        """The word with one bit inverted, which must be known."""
        # What is above the lower bits, modulo 2: the bit itself.
        above = (self.poly - self._rest(self.poly, bit)).divided(1 << bit)[0].divided(2)[1]
        if not above.is_constant:
            raise NotCertified(f"bits of {self.poly} are not known")
        return self._with(self.poly + Polynomial.of((1 - 2 * np.asarray(above.constant)) << bit))

    def _rest(self, poly: Polynomial, bits: int) -> Polynomial:
        """A polynomial modulo 2^bits, as a number."""
        rest = poly.divided(1 << bits)[1]
        if not (self.facts.holds(rest) and self.facts.holds(Polynomial.of((1 << bits) - 1) - rest)):
            raise NotCertified(f"bits of {poly} are not known")
        return rest

    def lanes(self, low: Lanes) -> tuple[int, ...]:
        """The shape of an array with an element per lane."""
        sizes = [c.shape for c in self.poly.terms.values() if isinstance(c, np.ndarray)]
        return sizes[0] if sizes else np.atleast_1d(low).shape

    def _disjoint(self, other: Word, operation: Callable[..., Any]) -> Any:
        """``or`` and ``xor`` of words that have no bit in common: a power of two divides one, and exceeds the other."""
        if operation is not np.bitwise_and:
            for high, low in ((self, other), (other, self)):
                known = high.low_bits()
                least = np.asarray(high.poly.constant) & ((1 << known) - 1)
                fits = self.facts.holds(low.poly) and self.facts.holds(Polynomial.of((1 << known) - 1) - low.poly)
                if not least.any() and fits:
                    return self._with(high.poly + low.poly)
        if operation is np.bitwise_or and isinstance(self.facts, OpenFacts):
            return Union(self, other)
        raise NotCertified(f"bits of {self.poly} and {other.poly} together are not known")

    # --- comparisons, which must be decided

    def _compare(self, other: Operand, swap: bool, strict: bool) -> Any:
        """The comparison self < other; <= unless ``strict``; with ``swap``, > and >=."""
        mine, its = self.number(), self._as_number(other)
        gap = (mine - its) if swap else (its - mine)
        return decided(gap - 1 if strict else gap, self.facts)

    def _as_number(self, other: Operand) -> Polynomial:
        """The other side of a comparison as a number, with this word's signedness."""
        if isinstance(other, Word):
            return Word(other.poly, self.bits, self.facts, self.signed).number()
        number = np.asarray(other)
        if self.signed:
            return polynomial(number, self.bits)
        if number.ndim and (number.astype(np.uint64) >> np.uint64(63)).any():
            raise NotCertified("an unsigned number above 2^63")
        return Polynomial.of(number.astype(np.int64) if number.ndim else int(number))

    def __lt__(self, other: Operand) -> Any:
        return self._compare(other, False, True)

    def __le__(self, other: Operand) -> Any:
        return self._compare(other, False, False)

    def __gt__(self, other: Operand) -> Any:
        return self._compare(other, True, True)

    def __ge__(self, other: Operand) -> Any:
        return self._compare(other, True, False)

    def __eq__(self, other: object) -> Any:
        mine, its = (Word(polynomial(x, self.bits), self.bits, self.facts, True).number() for x in (self, other))
        gap = mine - its
        above = decided(gap, self.facts)
        return above & decided(-gap, self.facts)

    def __ne__(self, other: object) -> Any:
        return ~(self == other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self.poly}, {self.bits} bits>"


def _literal(count: Operand) -> int:
    """The count of a shift, which must be known and the same in all lanes."""
    number = np.asarray(count)
    if isinstance(count, Word) or number.dtype == object or not (number == number.flat[0]).all():
        raise NotCertified("a shift by a number that is not known")
    return int(number.flat[0])


def bit_field(mask: Lanes) -> tuple[int, int] | None:
    """The lowest bit of a mask and the one after its highest, if it is one run of bits, the same in all lanes."""
    first = int(mask.flat[0])
    if not first or (mask != mask.flat[0]).any():
        return None
    low = (first & -first).bit_length() - 1
    run = (first >> low) + 1
    return (low, low + run.bit_length() - 1) if run & (run - 1) == 0 else None


def polynomial(value: Operand, bits: int) -> Polynomial:
    """A word, or numbers of so many bits, as a polynomial. Numbers are taken as signed, which is the same modulo
    2^bits."""
    if isinstance(value, Word):
        return value.poly
    number = np.asarray(value)
    if number.dtype == object or number.dtype.kind not in "iub":
        raise NotCertified("data decide an address or a branch")
    if number.ndim == 0:
        whole = int(number) & ((1 << bits) - 1)
        return Polynomial.of(whole - (1 << bits) if whole >> (bits - 1) else whole)
    if number.dtype.itemsize * 8 != bits:
        number = number.astype(f"{number.dtype.kind}{bits // 8}")
    return Polynomial({CONSTANT: number.view(f"i{bits // 8}").astype(np.int64)})


def quotient(number: Polynomial, divisor: int, facts: Facts) -> Polynomial:
    """A number divided by a positive one and rounded down. Raises NotCertified if it is not known."""
    for each in facts.spelled_by_quotients(number):
        whole, rest = each.divided(divisor)
        if facts.known(rest).min() == 1 and facts.known(Polynomial.of(divisor - 1) - rest).min() == 1:
            return whole
    whole, rest = number.divided(divisor)
    if facts.holds(rest) and facts.holds(Polynomial.of(divisor - 1) - rest):
        return whole
    raise NotCertified(f"the quotient of {number} and {divisor} is not known")


class Union:
    """The ``or`` of two words that may have bits in common. Only bits of which one word has none are known."""

    __array_ufunc__ = None

    def __init__(self, first: Word, second: Word) -> None:
        self.first, self.second = first, second

    def __and__(self, mask: Operand) -> Any:
        parts = [self.first & mask, self.second & mask]
        left = [each for each in parts if not (isinstance(each, Word) and not each.poly.terms)]
        if len(left) > 1:
            raise NotCertified(f"bits of {self.first} and {self.second} together are not known")
        return left[0] if left else parts[0]

    __rand__ = __and__


def decided(gap: Polynomial, facts: Facts) -> Any:
    """Whether a polynomial is at least 0: a boolean per lane. If that depends on the problem, a Condition where facts
    are open; else it raises Undecided."""
    known = facts.known(gap)
    if isinstance(facts, OpenFacts) and (known == -1).any():
        return Condition(facts, (AtLeast(gap),))
    if (known == -1).any():
        if facts.holds(gap):
            known = np.ones_like(known)
        elif facts.holds(-gap - 1):
            known = np.zeros_like(known)
        else:
            raise Undecided(gap)
    facts.questions["bounds"] += 1
    size = next((len(c) for c in gap.terms.values() if isinstance(c, np.ndarray)), 1)
    return np.broadcast_to(known == 1, (size,))


class Undecided(NotCertified):
    """A comparison that holds for some problems and not for others: whether ``gap`` is at least 0."""

    def __init__(self, gap: Polynomial) -> None:
        super().__init__(f"a branch or predicate depends on whether {gap} is at least 0")
        self.gap = gap
