"""Symbolic registers: NumPy's operators on integers whose value is a polynomial in the unknown sizes of a problem.

The emulator executes PTX as Python text on NumPy arrays with one element per lane. A proof executes the same text, with
a ``Word`` in place of every array whose value depends on the problem. So the meaning of an instruction is the
emulator's own, and this file defines only the operators and conversions that the text applies to arrays.

A word of ``bits`` bits equals its polynomial modulo 2^bits. Sums, products and shifts to the left need no more than
that. A comparison, an extension, a quotient or a shift to the right depends on the number itself, so there the
polynomial must be proven to lie within the type. Overflow is therefore never assumed away: what cannot be proven raises
NotCertified.
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
    """The values of one register in all lanes of a CTA.

    ``poly``: equal to the register modulo 2^``bits``. ``facts``: what is known of the names in it. ``signed``: whether
    the text treats the register as a signed number.
    """

    __slots__ = ("bits", "facts", "poly", "signed")
    # With None, ``array + word`` calls the word's ``__radd__`` once, and not for each element of the array.
    __array_ufunc__ = None

    def __init__(self, poly: Polynomial, bits: int, facts: Facts, signed: bool = False) -> None:
        self.poly, self.bits, self.facts, self.signed = poly, bits, facts, signed

    def _with(self, poly: Polynomial) -> Word:
        """A word of the same type with another polynomial."""
        return Word(poly, self.bits, self.facts, self.signed)

    # --- conversions

    def view(self, kind: Any) -> Word:
        """The same bits as a signed or unsigned number. Raises NotCertified for a type of another width or a float."""
        kind = np.dtype(kind)
        if kind.itemsize * 8 != self.bits or kind.kind not in "iu":
            raise NotCertified(f"a word of {self.bits} bits is taken for {kind}")
        return Word(self.poly, self.bits, self.facts, kind.kind == "i")

    def astype(self, kind: Any) -> Word:
        """The value in another width: truncated, or extended. Raises NotCertified if it is extended and not proven to
        fit its own type, or if it becomes a float."""
        kind = np.dtype(kind)
        if kind.kind not in "iu":
            raise NotCertified(f"{self.poly} becomes a number of type {kind}")
        bits = kind.itemsize * 8
        poly = self.number() if bits > self.bits else self.poly
        return Word(poly, bits, self.facts, kind.kind == "i")

    def number(self) -> Polynomial:
        """The polynomial of the number that the bits stand for, no longer modulo 2^bits. Raises NotCertified if the
        word's polynomial may lie outside of its type."""
        if self.poly.is_constant:
            return self._constant()
        # Coefficients are int64, so types of 64 bits are narrowed to 62, which no size or address of a proof exceeds.
        top = 1 << min(self.bits - 1 if self.signed else self.bits, 62)
        least = -top if self.signed else 0
        for gap in (self.poly - least, Polynomial.of(top - 1) - self.poly):
            if not self.facts.holds(gap):
                kind = f"{'signed' if self.signed else 'unsigned'} {self.bits} bits"
                raise NotCertified(f"{self.poly} may overflow {kind}", refuted=self.facts.refutation(gap))
        return self.poly

    def _constant(self) -> Polynomial:
        """As ``number``, for a word without names: its constant is reduced modulo 2^bits into the type."""
        number = self.poly.constant
        # An int64 array needs no reduction to 64 bits: it has wrapped.
        if isinstance(number, int) or self.bits < 64:
            number = number & ((1 << self.bits) - 1)
            # Two's complement: 2^bits less where the sign bit is set.
            number = number - (number >> (self.bits - 1) << self.bits) * (self.signed or self.bits == 64)
        # Numbers of 64 bits were taken as signed, as int64 arrays are: a negative one stands for 2^63 or more.
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
        """The other operand as a polynomial modulo 2^bits."""
        return polynomial(other, self.bits)

    # --- bits

    def __lshift__(self, count: Operand) -> Word:
        poly = self.poly.scaled(1 << _shift_count(count))
        if isinstance(self.facts, OpenFacts) and self.facts.names_of_high_bits:
            names = {(name,) for name in self.facts.names_of_high_bits.values()}
            # Multiples of 2^bits do not change the word.
            gone = {x for x in names & poly.terms.keys() if not np.any(np.asarray(poly.terms[x]) % (1 << self.bits))}
            poly = Polynomial({x: c for x, c in poly.terms.items() if x not in gone})
        return self._with(poly)

    def __rshift__(self, count: Operand) -> Word:
        """The number divided by a power of two and rounded down: a logical or an arithmetic shift, by ``signed``."""
        return self._with(self.quotient(1 << _shift_count(count)))

    def quotient(self, divisor: int) -> Polynomial:
        """The word's number divided by a positive one and rounded down. Raises NotCertified if the quotient is not
        known."""
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
        """How many low bits are known in every lane, since they come from the constant alone.

        For example, 8 * x + 5 has three: they are 101, because 8 * x is a multiple of 2^3.
        """
        step = 1 << self.bits
        for monomial, coefficient in self.poly.terms.items():
            if monomial:
                # ``step`` is the greatest common divisor of 2^bits and of all coefficients so far, in every lane.
                step = np.gcd.reduce(np.append(np.abs(np.asarray(coefficient)).reshape(-1), min(step, 1 << 62)))
        return (int(step) & -int(step)).bit_length() - 1

    def _bitwise(self, other: Operand, operation: Callable[..., Any]) -> Any:
        """``and``, ``or`` or ``xor`` with another number.

        The word is split at bit ``count``: it is ``high + known``, where ``known`` has its low bits, which the constant
        decides, and ``high`` is a multiple of 2^count. The low bits of the result are computed. For the others, the
        other operand (``mask``) must have one of the forms below; else NotCertified is raised.
        """
        if isinstance(other, Word):
            if other.poly.is_constant:
                return self._bitwise(np.asarray(other.poly.constant, np.int64), operation)
            return other._bitwise(self, operation) if self.poly.is_constant else self._disjoint(other, operation)
        if self.poly.is_constant:
            kind = f"i{self.bits // 8}"
            own = np.atleast_1d(np.asarray(self.poly.constant, np.int64)).astype(kind)
            given = np.asarray(other).astype(np.uint64).astype(kind)
            return np.asarray(operation(own, given)).view(f"u{kind[1:]}")
        count = min(self.low_bits(), self.bits)
        low_mask = (1 << count) - 1
        known = np.asarray(self.poly.constant) & low_mask
        high = self.poly - Polynomial.of(known)
        full = (1 << self.bits) - 1
        mask = np.asarray(other).astype(np.uint64) & np.uint64(full)
        above = mask >> np.uint64(count) if count < 64 else np.zeros_like(mask)
        low = operation(known, (mask & np.uint64(low_mask)).astype(np.int64))
        if not above.any():
            # With zeros above bit ``count``, ``and`` clears the bits that are not known; ``or`` and ``xor`` keep them.
            if operation is np.bitwise_and:
                return np.broadcast_to(low, self._lane_shape(low)).astype(f"u{self.bits // 8}")
            return self._with(high + Polynomial.of(low))
        if operation is np.bitwise_and and (above == full >> count).all():  # all unknown bits are kept
            return self._with(high + Polynomial.of(low))
        if operation is np.bitwise_and and (field := bit_field(mask)) is not None:
            return self._field(*field)
        if operation is np.bitwise_or and (field := bit_field(~mask & np.uint64(full))) is not None and not field[0]:
            # Bits from field[1] on become 1. With the lower ones unchanged that is their number minus 2^field[1].
            return self._with(self._rest(self.poly, field[1]) - (1 << field[1]))
        if operation is np.bitwise_xor and (field := bit_field(mask)) is not None and field[1] == field[0] + 1:
            return self._with_inverted(field[0])
        # If the word is below the lowest bit of the mask in any lane, no bit is in both: ``or`` and ``xor`` are sums.
        any_lane = int(np.bitwise_or.reduce(mask, axis=None))
        below = Polynomial.of((any_lane & -any_lane) - 1) - self.poly
        if operation is not np.bitwise_and and self.facts.holds(self.poly) and self.facts.holds(below):
            return self + other
        raise NotCertified(f"bits of {self.poly} are not known")

    def _field(self, low: int, end: int) -> Any:
        """The word ``and`` a mask of the bits from ``low`` to before ``end``: its value modulo 2^end minus that modulo
        2^low. With open facts it may be a ``Bits``, of which only a comparison with 0 is known."""
        if isinstance(self.facts, OpenFacts):
            with self.facts.without_solver(), suppress(NotCertified):
                rest = self._rest(self.poly, end)
                return self._with(rest - self._rest(rest, low))
            # One condition can still state whether the bits are all 0: that 2^end divides the word, or, for a field at
            # the top, that the number is below 2^low.
            if low == 0:
                return Bits(self.facts, Multiple(self.poly, 1 << end, False))
            number = Word(self.poly, self.bits, self.facts).number()
            if end == self.bits:
                return Bits(self.facts, AtLeast(number - (1 << low)))
            # What is above the field is a multiple of 2^end. A shift to the left drops it.
            higher = self.facts.higher(number, end, self.bits)
            return self._with(number - self._rest(number, low) - higher * (1 << end))
        rest = self._rest(self.poly, end)
        return self._with(rest - self._rest(rest, low))

    def _with_inverted(self, bit: int) -> Word:
        """The word with one bit inverted. Raises NotCertified if that bit is not known in every lane."""
        # The quotient of the word by 2^bit, modulo 2, is the bit itself. It is added if it is 0, and subtracted if 1.
        above = (self.poly - self._rest(self.poly, bit)).divided(1 << bit)[0].divided(2)[1]
        if not above.is_constant:
            raise NotCertified(f"bits of {self.poly} are not known")
        return self._with(self.poly + Polynomial.of((1 - 2 * np.asarray(above.constant)) << bit))

    def _rest(self, poly: Polynomial, bits: int) -> Polynomial:
        """The number from 0 to 2^bits - 1 that equals a polynomial modulo 2^bits. Raises NotCertified if it is not
        known."""
        rest = poly.divided(1 << bits)[1]
        if not (self.facts.holds(rest) and self.facts.holds(Polynomial.of((1 << bits) - 1) - rest)):
            raise NotCertified(f"bits of {poly} are not known")
        return rest

    def _lane_shape(self, low: Lanes) -> tuple[int, ...]:
        """The shape of an array with an element per lane: that of a coefficient, if one differs between lanes, else
        that of ``low``."""
        sizes = [c.shape for c in self.poly.terms.values() if isinstance(c, np.ndarray)]
        return sizes[0] if sizes else np.atleast_1d(low).shape

    def _disjoint(self, other: Word, operation: Callable[..., Any]) -> Any:
        """``or`` and ``xor`` of two words that have no bit in common, which is their sum: 2^n divides one of them, and
        the other one is from 0 to 2^n - 1. Of other words, open facts allow an ``or`` (``Union``); everything else
        raises NotCertified."""
        if operation is not np.bitwise_and:
            for high, low in ((self, other), (other, self)):
                n = high.low_bits()
                low_bits = np.asarray(high.poly.constant) & ((1 << n) - 1)
                fits = self.facts.holds(low.poly) and self.facts.holds(Polynomial.of((1 << n) - 1) - low.poly)
                if not low_bits.any() and fits:
                    return self._with(high.poly + low.poly)
        if operation is np.bitwise_or and isinstance(self.facts, OpenFacts):
            return Union(self, other)
        raise NotCertified(f"bits of {self.poly} and {other.poly} together are not known")

    # --- comparisons, which must be decided

    def _compare(self, other: Operand, swap: bool, strict: bool) -> Any:
        """The comparison self < other if ``strict``, else self <= other; with ``swap``, > and >=."""
        left, right = self.number(), self._as_number(other)
        gap = (left - right) if swap else (right - left)
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
        left, right = (Word(polynomial(x, self.bits), self.bits, self.facts, True).number() for x in (self, other))
        gap = left - right
        at_least = decided(gap, self.facts)
        return at_least & decided(-gap, self.facts)

    def __ne__(self, other: object) -> Any:
        return ~(self == other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self.poly}, {self.bits} bits>"


def _shift_count(count: Operand) -> int:
    """The count of a shift. Raises NotCertified unless it is known and the same in all lanes."""
    number = np.asarray(count)
    if isinstance(count, Word) or number.dtype == object or not (number == number.flat[0]).all():
        raise NotCertified("a shift by a number that is not known")
    return int(number.flat[0])


def bit_field(mask: Lanes) -> tuple[int, int] | None:
    """The lowest bit of a mask and the bit after its highest, such as (2, 5) for 0b11100; None unless the mask is the
    same in all lanes and its bits are adjacent."""
    first = int(mask.flat[0])
    if not first or (mask != mask.flat[0]).any():
        return None
    low = (first & -first).bit_length() - 1
    run = (first >> low) + 1
    return (low, low + run.bit_length() - 1) if run & (run - 1) == 0 else None


def polynomial(value: Operand, bits: int) -> Polynomial:
    """A word, or integers of ``bits`` bits, as a polynomial modulo 2^bits. Integers are taken as signed, which makes no
    difference modulo 2^bits. Raises NotCertified for floats and elements of operands."""
    if isinstance(value, Word):
        return value.poly
    number = np.asarray(value)
    if number.dtype == object or number.dtype.kind not in "iub":
        raise NotCertified("data decide an address or a branch")
    if number.size == 1:  # the same in all lanes
        unsigned = int(number.flat[0]) & ((1 << bits) - 1)
        return Polynomial.of(unsigned - (1 << bits) if unsigned >> (bits - 1) else unsigned)
    if number.dtype.itemsize * 8 != bits:
        number = number.astype(f"{number.dtype.kind}{bits // 8}")
    return Polynomial({CONSTANT: number.view(f"i{bits // 8}").astype(np.int64)})


def quotient(number: Polynomial, divisor: int, facts: Facts) -> Polynomial:
    """A number divided by a positive one and rounded down. Raises NotCertified if the quotient is not known.

    For example, 6 * q + r by 6 is q if facts show that 0 <= r <= 5. Where names are defined as quotients and
    remainders, the number is also tried with a dividend replaced by divisor * quotient + remainder.
    """
    for each in facts.spelled_by_quotients(number):
        whole, rest = each.divided(divisor)
        # The quotient is right if bounds show, in every lane, that the remainder is from 0 to below the divisor.
        if facts.known(rest).min() == 1 and facts.known(Polynomial.of(divisor - 1) - rest).min() == 1:
            return whole
    # The same with the solver, for the number as it is.
    whole, rest = number.divided(divisor)
    if facts.holds(rest) and facts.holds(Polynomial.of(divisor - 1) - rest):
        return whole
    raise NotCertified(f"the quotient of {number} and {divisor} is not known")


class Union:
    """The ``or`` of two words that may have bits in common. An ``and`` with a mask is known if the mask clears one of
    the words; otherwise it raises NotCertified."""

    __array_ufunc__ = None

    def __init__(self, first: Word, second: Word) -> None:
        self.first, self.second = first, second

    def __and__(self, mask: Operand) -> Any:
        parts = [self.first & mask, self.second & mask]
        nonzero = [each for each in parts if not (isinstance(each, Word) and not each.poly.terms)]
        if len(nonzero) > 1:
            raise NotCertified(f"bits of {self.first} and {self.second} together are not known")
        return nonzero[0] if nonzero else parts[0]

    __rand__ = __and__


class ScaledQuotient:
    """The high half of a product with the multiplier of a ``Reciprocal``. Only a shift of it is known: that by the
    name ``shift``, which is ``quotient``."""

    __array_ufunc__ = None

    def __init__(self, quotient: Word, shift: str) -> None:
        self.quotient, self.shift = quotient, shift

    def view(self, kind: Any) -> ScaledQuotient:
        """The same bits as an unsigned number. Raises NotCertified for any other type."""
        if np.dtype(kind) != np.dtype(np.uint32):
            raise NotCertified(f"the high half of a product is taken for {kind}")
        return self

    def shifted(self, count: Operand) -> Word:
        """The value shifted to the right. Raises NotCertified for any other count than ``shift``."""
        if not (isinstance(count, Word) and count.poly.equals(Polynomial.named(self.shift))):
            raise NotCertified("the high half of a product is shifted by another number than that of its reciprocal")
        return self.quotient


def decided(gap: Polynomial, facts: Facts) -> Any:
    """Whether a polynomial is at least 0, as an array of booleans, one per lane (of one element if all lanes have the
    same polynomial). If the answer depends on the problem, it is a Condition if facts are open; else Undecided is
    raised."""
    known = facts.known(gap)  # per lane: 1 yes, 0 no, -1 not known by bounds
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
    """A comparison that facts neither prove nor refute for all problems: whether ``gap`` is at least 0."""

    def __init__(self, gap: Polynomial) -> None:
        super().__init__(f"a branch or predicate depends on whether {gap} is at least 0")
        self.gap = gap
