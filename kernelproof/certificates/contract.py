"""What a proof is told of a kernel: its operands, the sizes that its launcher accepts, and what a CTA must write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kernelproof.certificates.facts import Facts, NotCertified
from kernelproof.certificates.polynomials import ZERO, Monomial, Polynomial
from kernelproof.certificates.slices import Slices

WIDTHS = {"f16": 2, "bf16": 2, "f32": 4}
Bounds = dict[Monomial, tuple[int, int]]


@dataclass(frozen=True)
class Matrix:
    """An operand whose rows are contiguous, of elements of a ``type`` as PTX names it.

    ``base``: the name of its address, a multiple of ``alignment`` bytes; ``offset``: elements from there to the CTA's
    own part of it. ``ld``: the elements from one row to the next. ``rows``, ``cols``: its extents; a matrix that is
    stored ``across`` has its columns in memory where others have their rows.
    """

    name: str
    base: str
    alignment: int
    ld: Polynomial
    rows: Polynomial
    cols: Polynomial
    type: str
    written: bool | None  # None: both read and written
    across: bool = False
    offset: Polynomial = ZERO

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return WIDTHS[self.type]

    @property
    def address(self) -> Polynomial:
        return Polynomial.named(self.base, self.alignment) + self.offset * self.width

    def place(self, offset: Polynomial) -> tuple[Polynomial, Polynomial]:
        """(row, col) of a byte offset from the address: offset = width * (row * ld + col). What it returns is checked
        against the extents by the caller, so any such pair will do."""
        ld = self.ld
        row: dict[Monomial, Any] = {}
        col: dict[Monomial, Any] = {}
        if ld.is_constant:
            step = int(ld.constant) * self.width
            for monomial, c in offset.terms.items():
                if not monomial:
                    row[monomial], col[monomial] = c // step, c % step
                elif np.any(np.asarray(c) % step):
                    col[monomial] = c
                else:
                    row[monomial] = c // step
        else:
            (((name,), factor),) = ld.terms.items()
            step = int(factor) * self.width
            for monomial, c in offset.terms.items():
                if name in monomial:
                    if np.any(np.asarray(c) % step):
                        raise NotCertified(f"an address in {self.name} that is not in a row of it")
                    rest = list(monomial)
                    rest.remove(name)
                    row[tuple(rest)] = c // step
                else:
                    col[monomial] = c
        if any(np.any(np.asarray(c) % self.width) for c in col.values()):
            raise NotCertified(f"an address in {self.name} that is not one of an element")
        return Polynomial(row), Polynomial({monomial: c // self.width for monomial, c in col.items()})


@dataclass(frozen=True)
class Tile:
    """The part of D that a CTA must write: ``rows`` x ``cols`` elements from (row, col) on; ``none`` of it where it has
    no work."""

    row: Polynomial
    col: Polynomial
    rows: int
    cols: int


@dataclass(frozen=True)
class Contract:
    """A launch whose sizes are not known. ``parameters``: byte offset -> value and bits. ``special``: the special
    registers of a CTA and of the grid. ``sum_end``: the k of the whole sum. ``tile``: what a CTA writes, None for
    nothing. ``slices``: how the CTAs of a tile share its k, None if it has but one."""

    lanes: int
    shared_bytes: int
    parameters: Mapping[int, tuple[Polynomial, int]]
    special: Mapping[str, Polynomial]
    matrices: tuple[Matrix, ...]
    sum_end: Polynomial
    tile: Tile | None
    facts: Facts
    slices: Slices | None = None

    @property
    def writes(self) -> bool:
        """Does the CTA write its tile of D? Of those that share a tile's k, the last one does."""
        return self.slices is None or self.slices.last

    def type_of(self, name: str) -> str:
        """The type of an operand's elements; empty if there is no such operand."""
        return next((matrix.type for matrix in self.matrices if matrix.name == name), "")

    def where(self, name: str, value: Polynomial, bounds: Bounds) -> Contract:
        """The contract for the problems in which a name has a value; ``bounds`` are those of the names in it."""

        def put(poly: Polynomial) -> Polynomial:
            return poly.substituted(name, value)

        def tiled(tile: Tile) -> Tile:
            return replace(tile, row=put(tile.row), col=put(tile.col))

        return Contract(
            self.lanes,
            self.shared_bytes,
            {at: (put(poly), bits) for at, (poly, bits) in self.parameters.items()},
            {register: put(poly) for register, poly in self.special.items()},
            tuple(
                replace(x, ld=put(x.ld), rows=put(x.rows), cols=put(x.cols), offset=put(x.offset))
                for x in self.matrices
            ),
            put(self.sum_end),
            tiled(self.tile) if self.tile else None,
            Facts(
                {x: limits for x, limits in self.facts.bounds.items() if name not in x} | bounds,
                [put(each) for each in self.facts.assumed],
                self.facts.questions,
                [
                    x._replace(dividend=put(x.dividend), whole=put(x.whole), rest=put(x.rest))
                    for x in self.facts.quotients
                ],
            ),
            self.slices.put(put) if self.slices else None,
        )
