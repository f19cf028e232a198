"""What is known of the named integers of a proof, and the questions that it can answer about polynomials."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kernelproof.certificates.polynomials import Coefficient, Lanes, Monomial, Polynomial
from kernelproof.certificates.solver import Unanswered, counterexample

# Beyond this a bound is as good as none, and sums of int64 arrays of bounds could wrap.
UNBOUNDED, NO_BOUND = 1 << 61, 1 << 62


class NotCertified(Exception):
    """A proof that did not succeed: why, and where in the PTX. ``refuted``: a named integer -> a value for which the
    claim is false, where one is known; ``extents``: rows and columns of each operand there."""

    def __init__(self, why: str, where: str = "", refuted: dict[str, int] | None = None) -> None:
        super().__init__(why)
        self.why, self.where, self.refuted = why, where, refuted
        self.extents: dict[str, tuple[int, int]] = {}

    def __str__(self) -> str:
        return f"{self.why}{f' [{self.where}]' if self.where else ''}"


class Quotient(NamedTuple):
    """A polynomial is a number times ``whole`` plus ``rest``, which is less than that number and not negative."""

    dividend: Polynomial
    divisor: int
    whole: Polynomial
    rest: Polynomial


@dataclass
class Facts:
    """Bounds of names and of products of names, all of which are at least 0, and polynomials that are at least 0.

    ``quotients``: of names that are defined so. ``questions``: how many were answered by bounds, and how many by the
    solver.
    """

    bounds: dict[Monomial, tuple[int, int]]
    assumed: list[Polynomial] = field(default_factory=list)
    questions: dict[str, int] = field(default_factory=lambda: {"bounds": 0, "solver": 0})
    quotients: list[Quotient] = field(default_factory=list)
    _products: dict[Monomial, tuple[int, int]] = field(default_factory=dict)

    def also(self, bounds: dict[Monomial, tuple[int, int]], *assumed: Polynomial) -> Facts:
        """These facts and more."""
        return Facts(self.bounds | bounds, [*self.assumed, *assumed], self.questions, self.quotients)

    def _monomial(self, monomial: Monomial) -> tuple[int, int]:
        known = self.bounds.get(monomial) or self._products.get(monomial)
        if known is not None:
            return known
        low, high = 1, 1
        for name in monomial:
            a, b = self.bounds[(name,)]
            low, high = low * a, min(high * b, UNBOUNDED)
        # A product that contains a bounded one: the bound of that, times the rest.
        for inner, (_, most) in self.bounds.items():
            if len(inner) > 1 and (rest := _without(monomial, inner)) is not None:
                high = min(high, most * self._monomial(rest)[1])
        self._products[monomial] = low, high
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
        low, high = self.interval(value)
        answer = np.where(np.asarray(high) < 0, 0, np.where(np.asarray(low) >= 0, 1, -1))
        if (answer == -1).any():
            for each in self.assumed:
                answer = np.where(np.asarray(self.interval(value - each)[0]) >= 0, 1, answer)
                answer = np.where(np.asarray(self.interval(value + each + 1)[1]) <= 0, 0, answer)
        return np.atleast_1d(answer)

    def evaluated(self, value: Polynomial, names: dict[str, int]) -> int:
        """A polynomial that is the same in all lanes, for these values of names; others have their least value."""
        total = 0
        for monomial, coefficient in value.in_lane(0).items():
            for name in monomial:
                coefficient *= names.get(name, self.bounds[(name,)][0])
            total += coefficient
        return total

    def spelled_by_quotients(self, value: Polynomial) -> Iterator[Polynomial]:
        """A polynomial, and the same one with the quotient and rest of each known dividend in its place."""
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
        return self._asks(value) is None

    def refutation(self, value: Polynomial) -> dict[str, int] | None:
        """Values of the names for which a polynomial is negative in some lane; None if there are none."""
        return self._asks(value)

    def _asks(self, value: Polynomial) -> dict[str, int] | None:
        self.questions["solver"] += 1
        for terms in _distinct(value):
            try:
                model = counterexample(terms, self.bounds, [each.in_lane(0) for each in self.assumed])
            except Unanswered as error:
                raise NotCertified(str(error)) from None
            if model is not None:
                return model
        return None


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
    """A lower bound of a sum, by those of its parts. One beyond ``UNBOUNDED`` is lowered to that, and a sum of which a
    part has none has none."""
    total = _clipped(low) + _clipped(other)
    without = (np.asarray(low) <= -UNBOUNDED) | (np.asarray(other) <= -UNBOUNDED) | (np.asarray(total) <= -UNBOUNDED)
    if isinstance(total, int):
        return -NO_BOUND if without else total
    return np.where(without, -NO_BOUND, total)


def _clipped(bound: Coefficient) -> Coefficient:
    if isinstance(bound, int):
        return max(-UNBOUNDED, min(bound, UNBOUNDED))
    return np.clip(bound, -UNBOUNDED, UNBOUNDED)


def _distinct(value: Polynomial) -> Iterator[dict[Monomial, int]]:
    """The coefficients of every lane, each different set of them once."""
    arrays = [c for c in value.terms.values() if isinstance(c, np.ndarray)]
    lanes = [0] if not arrays else np.unique(np.stack(arrays), axis=1, return_index=True)[1]
    for lane in lanes:
        yield value.in_lane(int(lane))
