"""Polynomials over named integers with a coefficient per lane: the values of registers while the problem is unknown.

For example, let ``lda`` be the leading dimension of an fp16 matrix at byte address ``a``, and let lane l read from row
l / 4. Its address is ``a + 2 * (l / 4) * lda``: the name ``a`` has the coefficient 1, and ``lda`` the coefficients 0,
0, 0, 0, 2, 2, 2, 2, 4, ... of lanes 0, 1, 2, ...

A coefficient is an int, which is the same in every lane, or an int64 array with one element per lane. Sums and products
of arrays wrap at 2^64. That is harmless, since a register equals its polynomial only modulo 2^32 or 2^64. All registers
of symbolic execution (``words``) and all facts that a proof asks about (``facts``) are such polynomials.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

Lanes = np.ndarray[Any, np.dtype[Any]]  # an array whose first axis is the lanes of a CTA
Coefficient = int | Lanes
Monomial = tuple[str, ...]  # names in ascending order, with repetitions; empty for the constant
CONSTANT: Monomial = ()


def same_everywhere(values: Lanes) -> bool:
    """Whether all lanes have the same value."""
    return bool((values == values.flat[0]).all())


class Polynomial:
    """A sum of monomials times coefficients, in normal form: no coefficient is zero, and none that is the same in every
    lane is an array. Objects never change."""

    __slots__ = ("_key", "terms")

    def __init__(self, terms: Mapping[Monomial, Coefficient]) -> None:
        self.terms: dict[Monomial, Coefficient] = {}
        self._key: frozenset[tuple[Monomial, int]] | None = None
        for monomial, coefficient in terms.items():
            if isinstance(coefficient, np.ndarray):
                if same_everywhere(coefficient):
                    coefficient = int(coefficient.flat[0])
                else:
                    self.terms[monomial] = coefficient
                    continue
            if coefficient:
                self.terms[monomial] = coefficient

    @classmethod
    def of(cls, value: Coefficient) -> Polynomial:
        """The constant polynomial of a number, or of a number per lane."""
        if isinstance(value, np.ndarray | np.generic) and value.size == 1:
            value = int(value.flat[0])  # the same in all lanes
        return cls({CONSTANT: value})

    @classmethod
    def named(cls, name: str, factor: int = 1) -> Polynomial:
        """The polynomial of a named integer times a factor."""
        return cls({(name,): factor})

    def __add__(self, other: Polynomial | int) -> Polynomial:
        return self.plus(other, 1)

    def __sub__(self, other: Polynomial | int) -> Polynomial:
        return self.plus(other, -1)

    def __rsub__(self, other: int) -> Polynomial:
        return Polynomial.of(other) - self

    def __neg__(self) -> Polynomial:
        return self.scaled(-1)

    def plus(self, other: Polynomial | int, factor: int) -> Polynomial:
        """This polynomial plus another one times a factor."""
        terms = dict(self.terms)
        for monomial, coefficient in (other if isinstance(other, Polynomial) else Polynomial.of(other)).terms.items():
            added = coefficient if factor == 1 else coefficient * factor
            terms[monomial] = terms[monomial] + added if monomial in terms else added
        return Polynomial(terms)

    def scaled(self, factor: Coefficient) -> Polynomial:
        """The polynomial times a number, or a number per lane."""
        return Polynomial({monomial: coefficient * factor for monomial, coefficient in self.terms.items()})

    def __mul__(self, other: Polynomial | int) -> Polynomial:
        if isinstance(other, int):
            return self.scaled(other)
        terms: dict[Monomial, Coefficient] = {}
        for left, x in self.terms.items():
            for right, y in other.terms.items():
                monomial = tuple(sorted(left + right)) if left and right else left or right
                product = x * y
                terms[monomial] = terms[monomial] + product if monomial in terms else product
        return Polynomial(terms)

    @property
    def constant(self) -> Coefficient:
        """The coefficient of the monomial without names."""
        return self.terms.get(CONSTANT, 0)

    @property
    def varying(self) -> Polynomial:
        """The polynomial without its constant."""
        return Polynomial({monomial: c for monomial, c in self.terms.items() if monomial})

    @property
    def is_constant(self) -> bool:
        """Whether the polynomial has no names. Its constant may still differ between lanes."""
        return not any(self.terms)

    @property
    def same_in_all_lanes(self) -> bool:
        """Whether no coefficient differs between lanes."""
        return all(isinstance(coefficient, int) for coefficient in self.terms.values())

    @property
    def key(self) -> frozenset[tuple[Monomial, int]]:
        """A key that is equal for equal polynomials. Raises TypeError if a coefficient differs between lanes."""
        if self._key is None:
            self._key = frozenset((monomial, int(c)) for monomial, c in self.terms.items())
        return self._key

    def equals(self, other: Polynomial) -> bool:
        """Whether the two polynomials are the same in every lane."""
        return self is other or not (self - other).terms

    def names(self) -> Iterator[str]:
        """The names that occur, each as often as it occurs."""
        for monomial in self.terms:
            yield from monomial

    def substituted(self, name: str, value: Polynomial) -> Polynomial:
        """This polynomial with ``value`` in place of a name."""
        if not any(name in monomial for monomial in self.terms):
            return self
        out = Polynomial({monomial: c for monomial, c in self.terms.items() if name not in monomial})
        for monomial, coefficient in self.terms.items():
            power = monomial.count(name)
            if power:
                term = Polynomial({tuple(each for each in monomial if each != name): coefficient})
                for _ in range(power):
                    term = term * value
                out = out + term
        return out

    def divided(self, divisor: int) -> tuple[Polynomial, Polynomial]:
        """A pair (q, r) with self = divisor * q + r, for a positive divisor.

        For example, 7 * x - 5 * y - 1 divided by 4 has q = x - y - 1 and r = 3 * x - y + 3. Each coefficient of r is
        smaller in magnitude than the divisor and has the sign that it has in self; the constant of r is from 0 to
        below the divisor. So q is the rounded quotient only where r as a whole is from 0 to below the divisor, which
        the caller proves.
        """
        quotient: dict[Monomial, Coefficient] = {}
        rest: dict[Monomial, Coefficient] = {}
        for monomial, coefficient in self.terms.items():
            quotient[monomial] = coefficient // divisor
            if monomial:
                # ``//`` rounds down. Coefficients of names are rounded towards 0 instead: then -x has the quotient 0
                # and the small remainder -x, not the remainder (divisor - 1) * x.
                rounded_away = (coefficient < 0) & (coefficient % divisor != 0)
                quotient[monomial] = quotient[monomial] + rounded_away
            rest[monomial] = coefficient - quotient[monomial] * divisor
        return Polynomial(quotient), Polynomial(rest)

    def where(self, test: Lanes, other: Polynomial) -> Polynomial:
        """This polynomial in the lanes in which ``test`` holds, the other one elsewhere."""
        monomials = self.terms.keys() | other.terms.keys()
        return Polynomial({x: np.where(test, self.terms.get(x, 0), other.terms.get(x, 0)) for x in monomials})

    def of_lanes(self, lanes: Lanes) -> Polynomial:
        """The polynomial with the coefficients of some lanes only. ``lanes``: their numbers, or a mask."""
        return Polynomial({x: c[lanes] if isinstance(c, np.ndarray) else c for x, c in self.terms.items()})

    def in_lane(self, lane: int) -> dict[Monomial, int]:
        """The coefficients of one lane, with monomials whose coefficient is 0 in that lane."""
        return {x: int(c[lane]) if isinstance(c, np.ndarray) else c for x, c in self.terms.items()}

    def __repr__(self) -> str:
        """The polynomial as a sum, with monomials in ascending order."""
        terms = (f"{_coefficient_text(c)}{'*' if x else ''}{'*'.join(x)}" for x, c in sorted(self.terms.items()))
        return " + ".join(terms) or "0"

    @classmethod
    def parsed(cls, terms: Mapping[str, int]) -> Polynomial:
        """The polynomial for a dict that ``spelled`` has returned."""
        return cls({tuple(sorted(filter(None, text.split("*")))): c for text, c in terms.items()})

    @property
    def spelled(self) -> dict[str, int]:
        """The polynomial as a dict for JSON: names joined by ``*`` -> coefficient, and "" -> the constant. Raises
        TypeError if a coefficient differs between lanes."""
        return {"*".join(monomial): int(c) for monomial, c in sorted(self.terms.items())}


def _coefficient_text(coefficient: Coefficient) -> str:
    """A coefficient as text: its range, if it differs between lanes."""
    if isinstance(coefficient, int):
        return str(coefficient)
    return f"({coefficient.min()}..{coefficient.max()} by lane)"


ZERO = Polynomial({})
