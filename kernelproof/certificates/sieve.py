"""Finds, among many polynomials that are at least 0, those few that may show that another one is.

A polynomial is shown to be at least 0 by subtracting one of these, or a sum of two, if the difference is at least 0 by
the bounds of names. Bounds of all differences are computed at once here, in floating point. Those that may be at least
0 are left for the exact test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kernelproof.certificates.polynomials import CONSTANT, Monomial, Polynomial

BoundsOf = Callable[[Monomial], tuple[int, int]]
# By how much a bound in floating point may be too small: a part of the sum of its terms' sizes, far above the rounding
# errors of fp64, and a constant. Bounds are integers, so one above -0.5 may be 0.
RELATIVE, ABSOLUTE = 1e-9, 0.5
Matrix = np.ndarray[Any, np.dtype[np.float64]]


class Sieve:
    """Some polynomials, with the same coefficients in all lanes. ``bounds``: the function that returns the least and
    the largest value of a product of names."""

    def __init__(self, rows: Sequence[Polynomial], bounds: BoundsOf) -> None:
        self.bounds = bounds
        monomials = dict.fromkeys(monomial for row in rows for monomial in row.terms)
        self.index: dict[Monomial, int] = {monomial: i for i, monomial in enumerate(monomials)}
        limits = [bounds(monomial) if monomial else (1, 1) for monomial in monomials]
        self.least, self.most = (np.array([x[i] for x in limits], np.float64) for i in (0, 1))
        self.rows: Matrix = np.zeros((len(rows), len(monomials)))
        for i, row in enumerate(rows):
            for monomial, coefficient in row.terms.items():
                self.rows[i, self.index[monomial]] = coefficient

    def with_sums(self) -> Sieve:
        """A sieve of these polynomials and of all sums of two of them. The arrays ``first`` and ``second`` of this
        sieve then have the numbers of the two polynomials of each sum, with first <= second."""
        out = Sieve((), self.bounds)
        out.index, out.least, out.most = self.index, self.least, self.most
        self.first, self.second = np.triu_indices(len(self.rows))
        out.rows = np.concatenate([self.rows, self.rows[self.first] + self.rows[self.second]])
        return out

    def below(self, value: Polynomial) -> list[int]:
        """The numbers of those polynomials to which a value may be equal, or larger."""
        if not len(self.rows):
            return []
        mine = np.zeros(len(self.index))
        rest = scale = 0.0
        for monomial, coefficient in value.terms.items():
            at = self.index.get(monomial)
            if at is not None:
                mine[at] = coefficient
                continue
            least, most = self.bounds(monomial) if monomial != CONSTANT else (1, 1)
            part = float(coefficient) * float(least if coefficient > 0 else most)
            rest, scale = rest + part, scale + abs(part)
        # A difference is least if names with positive coefficients are least, and the others largest.
        gaps = mine - self.rows
        positive, negative = np.maximum(gaps, 0) @ self.least, np.minimum(gaps, 0) @ self.most
        low = positive + negative + rest
        found = low >= -ABSOLUTE - RELATIVE * (positive - negative + scale)
        return [int(x) for x in np.flatnonzero(found)]
