"""Executes a CTA whose tile may reach beyond the problem: elements of A and B beyond their extents are zeros.

A copy of a vector says how many bytes it reads; the rest of its place in shared memory becomes zeros. So after a copy
that reads exactly those elements that lie within the operand, the place holds the operand as if zeros surrounded it.
Products with these zeros add nothing to a sum. How many bytes a copy reads depends on the problem and differs between
lanes. It is therefore a ``Chosen`` whose conditions have an answer per lane.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kernelproof.certificates import abstract
from kernelproof.certificates.cells import Kinds
from kernelproof.certificates.conditions import Chosen, Condition, OpenFacts, at_least, chosen, settled
from kernelproof.certificates.contract import Contract
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.machine import Machine
from kernelproof.certificates.polynomials import ZERO, Lanes, Polynomial
from kernelproof.certificates.program import Program
from kernelproof.certificates.words import Word, polynomial
from kernelproof.emulator.state.arrays import Mask

COUNT_BITS = 32  # of the register that says how many bytes a copy reads


class EdgeMachine(Machine):
    """The machine of a CTA whose tile may reach beyond the problem."""

    facts: OpenFacts

    def __init__(self, program: Program, contract: Contract, kinds: Kinds) -> None:
        super().__init__(program, replace(contract, facts=OpenFacts.of(contract.facts)), kinds)
        select: Callable[..., Any] = lambda test, yes, no: chosen(test, yes, no, abstract.select)  # noqa: E731
        numpy = {"where": select, "minimum": _extreme(False), "maximum": _extreme(True), "negative": lambda a: -a}
        self.scope |= {"SEL": select, "WHERE": select, "np": abstract.Named(numpy, np)}

    def issue(self, target: Any, source: Any, size: int, count: Any, m: Mask, site: int, *_: int) -> None:
        """cp.async, by all lanes, of those elements of vectors that lie within an operand."""
        lanes = self.active(m)
        if lanes is None:
            return
        self._together(m)
        matrix, row, col = self._operand_at(source, size, False, lanes)
        for gap, what in ((row, "before its first row"), (col, "before the start of a row")):
            if not self.facts.holds(gap):
                raise NotCertified(f"a copy of {matrix.name}({row}, {col}) may begin {what}")
        number, (rows, cols) = size // matrix.width, matrix.extents
        below, left = rows - 1 - row, cols - col  # further rows; elements from here to the end of the row
        # Conditions, each with the bytes that a copy must read there: the whole vector within a row; nothing below the
        # last row or after a row's end; a part across a row's end.
        cases = [
            (at_least(self.facts, below, left - number), Polynomial.of(size)),
            (at_least(self.facts, -below - 1), ZERO),
            (at_least(self.facts, below, -left), ZERO),
        ]
        if any(np.any(np.asarray(c) % number) for c in left.terms.values()):  # vectors may lie across the end of a row
            cases.append((at_least(self.facts, below, left - 1, -left + number - 1), left * matrix.width))
        copied = np.array([size], "u4") if count is None else count
        for case, expected in cases:
            possible = case.known() != 0
            with self.facts.side(case):
                if not self._is(copied, expected, possible):
                    raise NotCertified(f"a copy of {matrix.name} may not read {expected} bytes where {case}")
        # k is counted from the start of the CTA's slice.
        first = self.contract.first
        row, col = (row - first, col) if matrix.across else (row, col - first)
        self.memory.copy(
            self.shared_places(target, size, lanes, site), lanes,
            self._elements(matrix, row, col, size, lanes, site),
        )  # fmt: skip

    def _is(self, value: Any, expected: Polynomial, lanes: Lanes) -> bool:
        """Whether a number is known to be the expected one in those lanes for which the mask ``lanes`` is true."""
        if not lanes.any():
            return True
        if isinstance(value, Chosen):
            for test, each in ((value.test, value.yes), (~value.test, value.no)):
                possible = lanes & (test.known() != 0)
                with self.facts.side(test):
                    if not self._is(each, expected, possible):
                        return False
            return True
        if not isinstance(value, Word | np.ndarray | np.integer):
            return False
        gap = polynomial(value, COUNT_BITS) - expected
        return all(bool(((self.facts.known(each) == 1) | ~lanes).all()) for each in (gap, -gap))


def _extreme(largest: bool) -> Callable[[Any, Any], Any]:
    """The function that returns the larger, or the smaller, of two numbers: a ``Chosen`` if it is not known which that
    is."""

    def extreme(a: Any, b: Any) -> Any:
        a, b = settled(a), settled(b)
        if isinstance(a, Chosen):
            return a.each(lambda value: extreme(value, b))
        if isinstance(b, Chosen):
            return b.each(lambda value: extreme(a, value))
        if not isinstance(a, Word) and not isinstance(b, Word):
            return (np.maximum if largest else np.minimum)(a, b)
        test = settled(a <= b)
        yes, no = (b, a) if largest else (a, b)
        return Chosen(test, yes, no) if isinstance(test, Condition) else abstract.select(test, yes, no)

    return extreme
