"""Holds what is known of the named integers of a proof, and answers whether polynomials in them are at least 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from kernelproof.certificates.polynomials import ZERO, Coefficient, Lanes, Monomial, Polynomial
from kernelproof.certificates.solver import Unanswered, counterexample

# Beyond this a bound is as good as none, and sums of int64 arrays of bounds could wrap.
UNBOUNDED, NO_BOUND = 1 << 61, 1 << 62
# The most names of a polynomial for which values are tried, and of one whose corners are computed.
MOST_NAMES, MOST_CORNERED = 4, 8


class NotCertified(Exception):
    """A proof that did not succeed: why, and where in the PTX. ``refuted``: values of the names for which the claim is
    false, where such are known. ``extents``: each operand's rows and columns for these values."""

    def __init__(self, why: str, where: str = "", refuted: dict[str, int] | None = None) -> None:
        super().__init__(why)
        self.why, self.where, self.refuted = why, where, refuted
        self.extents: dict[str, tuple[int, int]] = {}

    def __str__(self) -> str:
        return f"{self.why}{f' [{self.where}]' if self.where else ''}"


class Quotient(NamedTuple):
    """The equation dividend = divisor * whole + rest, with 0 <= rest < divisor."""

    dividend: Polynomial
    divisor: int
    whole: Polynomial
    rest: Polynomial


class Fraction(NamedTuple):
    """A quotient: ``whole`` is ``dividend`` / ``divisor``, rounded down.

    ``given``: the quotient is known only where this is at least 0; None if it always is. There the dividend is at least
    0, and the divisor is positive. ``rest``: the remainder, if it has a name.
    """

    dividend: Polynomial
    divisor: Polynomial
    whole: Polynomial
    given: Polynomial | None = None
    rest: Polynomial | None = None

    def mapped(self, change: Callable[[Polynomial], Polynomial]) -> Fraction:
        """The fraction for other problems: its polynomials are changed by a function."""
        return Fraction(*(None if each is None else change(each) for each in self))  # type: ignore[arg-type]


class Reciprocal(NamedTuple):
    """A number by which a kernel divides by a multiplication, and the names of what it multiplies and shifts by.

    With s = floor(log2(divisor)), ``shift`` stands for s and ``multiplier`` for M = floor((2^(32 + s) - 1) / divisor).
    Then x / divisor, rounded down, is the high half of the product (x + 1) * M, shifted to the right by s, for all x
    from 0 to 2^31 - 1: ``tests/kernelproof/certificates/test_reciprocals.py`` says why.
    """

    divisor: Polynomial
    multiplier: str
    shift: str

    def mapped(self, change: Callable[[Polynomial], Polynomial]) -> Reciprocal:
        """The reciprocal for other problems: its divisor is changed by a function."""
        return self._replace(divisor=change(self.divisor))


class Minimum(NamedTuple):
    """``least`` is the smaller one of ``first`` and ``second``."""

    first: Polynomial
    second: Polynomial
    least: Polynomial


@dataclass
class Facts:
    """Bounds of names and of products of names, all of which are at least 0, and polynomials that are at least 0.

    ``quotients``: names that are defined as quotients and rests. ``fractions``, ``minima``: names that are defined as
    quotients by numbers that depend on the problem, and as the smaller one of two numbers. ``reciprocals``: the names
    by which the kernel divides. ``questions``: how many questions bounds answered, and how many the solver.
    """

    bounds: dict[Monomial, tuple[int, int]]
    assumed: list[Polynomial] = field(default_factory=list)
    questions: dict[str, int] = field(default_factory=lambda: {"bounds": 0, "solver": 0})
    quotients: list[Quotient] = field(default_factory=list)
    fractions: list[Fraction] = field(default_factory=list)
    minima: list[Minimum] = field(default_factory=list)
    reciprocals: list[Reciprocal] = field(default_factory=list)
    _bounded: dict[Monomial, tuple[int, int]] = field(default_factory=dict)
    # Of ``known``, by the polynomial: the answer, and how many of the assumed polynomials it takes into account.
    _answers: dict[object, tuple[Lanes, int]] = field(default_factory=dict)

    def extended(self, bounds: dict[Monomial, tuple[int, int]], *assumed: Polynomial) -> Facts:
        """These facts with further bounds and assumptions."""
        return Facts(
            self.bounds | bounds, [*self.assumed, *assumed], self.questions, self.quotients, self.fractions,
            self.minima, self.reciprocals,
        )  # fmt: skip

    def where(self, name: str, value: Polynomial, bounds: dict[Monomial, tuple[int, int]]) -> Facts:
        """The facts of the problems in which a name has a value. ``bounds``: of the names in that value."""

        def replaced(poly: Polynomial) -> Polynomial:
            return poly.substituted(name, value)

        return Facts(
            {x: limits for x, limits in self.bounds.items() if name not in x} | bounds,
            [replaced(each) for each in self.assumed],
            self.questions,
            [
                x._replace(dividend=replaced(x.dividend), whole=replaced(x.whole), rest=replaced(x.rest))
                for x in self.quotients
            ],
            [each.mapped(replaced) for each in self.fractions],
            [Minimum(*map(replaced, x)) for x in self.minima],
            [each.mapped(replaced) for each in self.reciprocals],
        )

    def fraction(self, dividend: Polynomial, divisor: Polynomial) -> tuple[Polynomial, Polynomial] | None:
        """The quotient and the remainder of two numbers if names are defined as these, else None."""
        for each in self.fractions:
            same = dividend.equals(each.dividend) and divisor.equals(each.divisor)
            if same and (each.given is None or self.known(each.given).min() == 1):
                return each.whole, dividend - divisor * each.whole if each.rest is None else each.rest
        return None

    def reciprocal(self, multiplier: Polynomial) -> Reciprocal | None:
        """The reciprocal whose multiplier a number is, else None."""
        return next((x for x in self.reciprocals if multiplier.equals(Polynomial.named(x.multiplier))), None)

    def minimum(self, first: Polynomial, second: Polynomial) -> Polynomial | None:
        """The smaller one of two numbers if a name is defined as that, else None."""
        for each in self.minima:
            for a, b in ((first, second), (second, first)):
                if a.equals(each.first) and b.equals(each.second):
                    return each.least
        return None

    def _monomial(self, monomial: Monomial) -> tuple[int, int]:
        """Bounds of a product of names."""
        known = self.bounds.get(monomial) or self._bounded.get(monomial)
        if known is not None:
            return known
        low, high = 1, 1
        for name in monomial:
            a, b = self.bounds[(name,)]
            low, high = low * a, min(high * b, UNBOUNDED)
        # If the product contains one with bounds of its own, its bound is theirs times that of the other names.
        for inner, (_, most) in self.bounds.items():
            if len(inner) > 1 and (rest := _without(monomial, inner)) is not None:
                high = min(high, most * self._monomial(rest)[1])
        self._bounded[monomial] = low, high
        return low, high

    def interval(self, value: Polynomial) -> tuple[Coefficient, Coefficient]:
        """Bounds of a polynomial, per lane; from ``-NO_BOUND`` or to ``NO_BOUND`` where there is none."""
        low: Coefficient = 0
        high: Coefficient = 0
        for monomial, coefficient in value.terms.items():
            least, most = self._monomial(monomial) if monomial else (1, 1)
            largest = abs(coefficient) if isinstance(coefficient, int) else int(np.abs(coefficient).max())
            if largest * most >= UNBOUNDED:
                a, b = _far(coefficient, least, most)
            elif isinstance(coefficient, int):
                a, b = sorted((coefficient * least, coefficient * most))
            else:
                a = np.minimum(coefficient * least, coefficient * most)
                b = np.maximum(coefficient * least, coefficient * most)
            low, high = _plus(low, a), -_plus(-high, -b)
        return low, high

    def known(self, value: Polynomial) -> Lanes:
        """For each lane (or once for all) whether a polynomial is at least 0: 1 yes, 0 no, -1 not known by bounds."""
        if not value.same_in_all_lanes:
            return self._known(value, 0)
        answer: Lanes
        answer, used = self._answers.get(value.key, (np.array([-1]), -1))
        # Assumptions are only added, so an answer stays right. One that is not known may become known by the new ones.
        if used < 0 or (used < len(self.assumed) and answer[0] == -1):
            answer = self._known(value, max(used, 0))
            self._answers[value.key] = answer, len(self.assumed)
        return answer

    def _known(self, value: Polynomial, used: int) -> Lanes:
        """The answer of ``known``: by the bounds of names, by one assumed polynomial, and by corners. The first
        ``used`` assumed polynomials, if any, are known not to suffice."""
        assumed = self.assumed[used:]
        low, high = self.interval(value)
        answer = np.where(np.asarray(high) < 0, 0, np.where(np.asarray(low) >= 0, 1, -1))
        if (answer == -1).any():
            single = self._single(value, assumed)
            answer = np.where(single != -1, single, answer)
        for gap in (value - each for each in (*(() if used else (ZERO,)), *assumed)):
            if not (answer == -1).any():
                return np.atleast_1d(answer)
            answer = np.where((answer == -1) & (self._least(gap) >= 0), 1, answer)
        # An assumed polynomial times a name is at least 0 too, since names are.
        for gap in self._products(value, assumed) if (answer == -1).any() else ():
            answer = np.where((answer == -1) & (np.asarray(self.interval(gap)[0]) >= 0), 1, answer)
        if (answer == -1).any() and value.same_in_all_lanes and self._follows(value, assumed):
            return np.ones_like(np.atleast_1d(answer))
        return np.atleast_1d(answer)

    def _single(self, value: Polynomial, assumed: list[Polynomial]) -> Lanes:
        """The answer by one of some assumed polynomials and the bounds of names."""
        answer = np.array([-1])
        for each in assumed:
            # Either value >= each >= 0, or value < -each <= 0.
            answer = np.where(np.asarray(self.interval(value - each)[0]) >= 0, 1, answer)
            answer = np.where(np.asarray(self.interval(value + each + 1)[1]) <= 0, 0, answer)
        return answer

    def _products(self, value: Polynomial, assumed: list[Polynomial]) -> Iterator[Polynomial]:
        """A polynomial without an assumed one, multiplied by one of its names."""
        for name in dict.fromkeys(value.names()):
            for each in assumed:
                if all(len(monomial) < 2 for monomial in each.terms):
                    yield value - each * Polynomial.named(name)

    def _follows(self, value: Polynomial, assumed: list[Polynomial]) -> bool:
        """Whether a polynomial is at least a multiple of one of these, which are at least 0. Multiples are tried that
        cancel one of the polynomial's negative terms up to a remainder."""
        for each in assumed:
            for monomial, one in each.terms.items():
                mine = value.terms.get(monomial, 0)
                times = int(mine) // int(one) if monomial and isinstance(one, int) and mine < one < 0 else 0
                if times and np.asarray(self.interval(value - each.scaled(times))[0]) >= 0:
                    return True
        return False

    def _least(self, value: Polynomial) -> Lanes:
        """The least value of a polynomial in each lane, by the bounds of names alone; ``-NO_BOUND`` if it is not found.
        Instead of a negative least value, -1 may be returned.

        A polynomial that is linear in each name has its least value where every name is at one of its bounds.
        """
        names = sorted(set(value.names()))
        if not names:
            return np.asarray(value.constant)
        if len(names) > MOST_CORNERED or any(len(set(monomial)) < len(monomial) for monomial in value.terms):
            return np.asarray(-NO_BOUND)
        # Most polynomials that are not known to be at least 0 are negative at one of these two.
        for side in (0, 1):
            if value.same_in_all_lanes and self._at_bounds(value, side) < 0:
                return np.asarray(-1)
        corners = np.array(list(product(*(self.bounds[(name,)] for name in names))), object).reshape(-1, len(names))
        at = {name: corners[:, i] for i, name in enumerate(names)}
        total: Any = 0
        largest = 0
        for monomial, coefficient in value.terms.items():
            term = prod((at[name] for name in monomial), start=np.ones(len(corners), object))
            most = abs(coefficient) if isinstance(coefficient, int) else int(np.abs(coefficient).max())
            largest += int(max(map(abs, term))) * most
            if largest >= UNBOUNDED:
                return np.asarray(-NO_BOUND)
            total = total + term.astype(np.int64)[:, None] * np.asarray(coefficient).reshape(1, -1)
        return np.asarray(total).min(axis=0) if value.terms else np.asarray(0)

    def _at_bounds(self, value: Polynomial, side: int) -> int:
        """A polynomial where all names have their lower bounds, or with ``side`` 1 their upper ones."""
        return sum(
            int(c) * prod(self.bounds[(name,)][side] for name in monomial) for monomial, c in value.terms.items()
        )  # fmt: skip

    def evaluated(self, value: Polynomial, names: dict[str, int]) -> int:
        """A polynomial that is the same in all lanes, for these values of names; others have their least value."""
        total = 0
        for monomial, coefficient in value.in_lane(0).items():
            for name in monomial:
                coefficient *= names.get(name, self.bounds[(name,)][0])
            total += coefficient
        return total

    def spelled_by_quotients(self, value: Polynomial) -> Iterator[Polynomial]:
        """A polynomial as it is, then with each known dividend replaced by divisor * quotient + rest."""
        yield value
        for dividend, divisor, whole, rest in self.quotients:
            monomial, one = next(iter(dividend.terms.items()))
            times = value.terms.get(monomial)
            if isinstance(times, int) and isinstance(one, int) and times % one == 0:
                yield value + (whole * divisor + rest - dividend) * (times // one)

    def holds(self, value: Polynomial) -> bool:
        """Is a polynomial at least 0 in every lane, for all values of the names?"""
        known = self.known(value)
        if (known != -1).all():
            self.questions["bounds"] += 1
            return bool((known == 1).all())
        return self.refutation(value) is None

    def refutation(self, value: Polynomial) -> dict[str, int] | None:
        """Values of the names for which a polynomial is negative in some lane; None if there are none. Asks the solver
        if no values at the names' bounds will do. Raises NotCertified if the solver has no answer."""
        self.questions["solver"] += 1
        for terms in _distinct(value):
            if (corner := self._corner(terms)) is not None:
                return corner
            try:
                model = counterexample(terms, self.bounds, [each.in_lane(0) for each in self.assumed])
            except Unanswered as error:
                raise NotCertified(str(error)) from None
            if model is not None:
                return model
        return None

    def _corner(self, terms: dict[Monomial, int]) -> dict[str, int] | None:
        """Values of names, at or next to their bounds, for which a sum is negative and all facts hold; None if none of
        those tried are such. Where they exist, no solver is needed."""
        names = sorted({name for monomial in terms for name in monomial})
        others = {name for each in self.assumed for monomial in each.terms for name in monomial} - set(names)
        least = {name: self.bounds[(name,)][0] for name in (*names, *others)}
        if len(names) > MOST_NAMES or not all((name,) in self.bounds for name in least):
            return None
        for values in product(*(_values_to_try(*self.bounds[(name,)]) for name in names)):
            point = least | dict(zip(names, values, strict=True))
            if _at(terms, point) < 0 and all(_at(each.in_lane(0), point) >= 0 for each in self.assumed):
                products = [x for x in self.bounds if len(x) > 1 and point.keys() >= set(x)]
                if all(self.bounds[x][0] <= _at({x: 1}, point) <= self.bounds[x][1] for x in products):
                    return point
        return None


def _values_to_try(low: int, high: int) -> list[int]:
    """Different values of a name with these bounds, for ``_corner``."""
    return [each for each in dict.fromkeys((low, low + 1, low + 2, high)) if each <= high]


def _at(terms: dict[Monomial, int], point: dict[str, int]) -> int:
    """The value of a sum of monomials."""
    return sum(coefficient * prod(point[name] for name in monomial) for monomial, coefficient in terms.items())


def _without(monomial: Monomial, inner: Monomial) -> Monomial | None:
    """A monomial divided by another one, None if that does not divide it."""
    rest = list(monomial)
    for name in inner:
        if name not in rest:
            return None
        rest.remove(name)
    return tuple(rest)


def _far(coefficient: Coefficient, least: int, most: int) -> tuple[Coefficient, Coefficient]:
    """Bounds of a coefficient times something from ``least`` to ``most``, where one of the two is large."""
    if isinstance(coefficient, int):
        a, b = sorted((coefficient * least, coefficient * most))
        return (a if a > -UNBOUNDED else -NO_BOUND), (b if b < UNBOUNDED else NO_BOUND)
    return np.where(coefficient >= 0, 0, -NO_BOUND), np.where(coefficient > 0, NO_BOUND, 0)


def _plus(low: Coefficient, other: Coefficient) -> Coefficient:
    """A lower bound of a sum, by those of its two parts. If one of them, or the sum, is ``-UNBOUNDED`` or less, there
    is none, which is ``-NO_BOUND``."""
    total = _clipped(low) + _clipped(other)
    without = (np.asarray(low) <= -UNBOUNDED) | (np.asarray(other) <= -UNBOUNDED) | (np.asarray(total) <= -UNBOUNDED)
    if isinstance(total, int):
        return -NO_BOUND if without else total
    return np.where(without, -NO_BOUND, total)


def _clipped(bound: Coefficient) -> Coefficient:
    """A bound limited to ``UNBOUNDED`` in size, so that sums of two do not wrap."""
    if isinstance(bound, int):
        return max(-UNBOUNDED, min(bound, UNBOUNDED))
    return np.clip(bound, -UNBOUNDED, UNBOUNDED)


def _distinct(value: Polynomial) -> Iterator[dict[Monomial, int]]:
    """The coefficients of the lanes in which a polynomial may be least. Names are at least 0, so a lane is left out if
    another one has no larger coefficient."""
    arrays = [c for c in value.terms.values() if isinstance(c, np.ndarray)]
    if not arrays:
        yield value.in_lane(0)
        return
    rows, lanes = np.unique(np.stack(arrays), axis=1, return_index=True)
    for i, lane in enumerate(lanes):
        # A lane is minimal if no other has coefficients that are all at most its own. Columns of ``rows`` differ, so
        # that a minimal lane passes the comparison with itself alone.
        if (rows <= rows[:, i : i + 1]).all(axis=0).sum() == 1:
            yield value.in_lane(int(lane))
