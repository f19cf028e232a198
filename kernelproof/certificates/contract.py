"""The contract by which a kernel is proven: its operands, the sizes its launcher accepts, and what a CTA must write."""

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
    """An operand in global memory.

    ``base``: a name such that the operand begins at ``base * alignment`` bytes. ``offset``: elements from there to the
    CTA's own part. ``ld``: elements from one row to the next. ``rows``, ``cols``: its extents. ``type``: that of an
    element, as PTX names it. ``across``: the matrix is stored by columns, and ``ld`` is from one column to the next.
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
        """The address of the CTA's own part."""
        return Polynomial.named(self.base, self.alignment) + self.offset * self.width

    @property
    def extents(self) -> tuple[Polynomial, Polynomial]:
        """Rows and columns in memory, where a row is ``ld`` elements."""
        return (self.cols, self.rows) if self.across else (self.rows, self.cols)

    def place(self, offset: Polynomial) -> tuple[Polynomial, Polynomial]:
        """A pair (row, col) with width * (row * ld + col) = offset, a byte offset from the address. Several pairs are
        possible. The caller checks the one that is returned against the extents. Raises NotCertified for an address
        inside of an element."""
        if any(np.any(np.asarray(c) % self.width) for c in offset.terms.values()):
            raise NotCertified(f"an address in {self.name} that is not one of an element")
        offset = Polynomial({monomial: c // self.width for monomial, c in offset.terms.items()})
        return self._of_known_ld(offset) if self.ld.is_constant else self._of_unknown_ld(offset)

    def _of_known_ld(self, offset: Polynomial) -> tuple[Polynomial, Polynomial]:
        """Split an offset in elements by a leading dimension that is a number."""
        row: dict[Monomial, Any] = {}
        col: dict[Monomial, Any] = {}
        step = int(self.ld.constant)
        for monomial, c in offset.terms.items():
            if not monomial:
                row[monomial], col[monomial] = c // step, c % step
            elif np.any(np.asarray(c) % step):
                col[monomial] = c
            else:
                row[monomial] = c // step
        return Polynomial(row), Polynomial(col)

    def _of_unknown_ld(self, offset: Polynomial) -> tuple[Polynomial, Polynomial]:
        """Split an offset in elements by a name that the leading dimension has: its terms with that name belong to the
        row."""
        name = self._leading()
        factor = self.ld.terms[(name,)]
        row: dict[Monomial, Any] = {}
        for monomial, c in offset.terms.items():
            if name in monomial:
                if np.any(np.asarray(c) % factor):
                    raise NotCertified(f"an address in {self.name} that is not in a row of it")
                rest = list(monomial)
                rest.remove(name)
                row[tuple(rest)] = c // factor
        rows = Polynomial(row)
        return rows, offset - rows * self.ld

    def _leading(self) -> str:
        """A name in the leading dimension that columns hardly ever have: one for the tiles beyond the CTA's own, or for
        the k-tiles that are left. If there is none, the last name in the alphabet."""
        names = sorted(monomial[0] for monomial in self.ld.terms if len(monomial) == 1)
        if not names:
            raise NotCertified(f"the leading dimension of {self.name} is {self.ld}")
        return next((name for name in ("right", "below", "over", "more", "k_rest") if name in names), names[-1])


@dataclass(frozen=True)
class BoxMap:
    """A tensor map of an operand, the parameter at byte ``parameter``: boxes of ``rows`` x ``cols`` elements, columns
    contiguous, swizzled over ``span`` bytes. Elements outside of the operand are loaded as zeros and never stored."""

    matrix: str
    parameter: int
    rows: int
    cols: int
    span: int


@dataclass(frozen=True)
class Tile:
    """The part of D that a CTA must write: ``rows`` x ``cols`` elements from (row, col) on."""

    row: Polynomial
    col: Polynomial
    rows: int
    cols: int


@dataclass(frozen=True)
class Contract:
    """A launch whose sizes are not known, for one CTA.

    - ``lanes``: the threads of a CTA. ``block``: the same along x, y and z; None if all are along x.
    - ``shared_bytes``: dynamic shared memory of a CTA.
    - ``parameters``: byte offset -> value and bits. ``maps``: the tensor maps among them.
    - ``special``: the special registers of the CTA and of the grid.
    - ``sum_end``: the number of k in a complete sum. ``first``: the k at which the CTA's slice begins; k is counted
      from there.
    - ``tile``: the part of D that the CTA writes; None for nothing.
    - ``slices``: how the CTAs of a tile share its k; None if a tile has one CTA.
    - ``step``: the k of a k-tile if D has sums of A's rows; 0 if D is a product.
    """

    lanes: int
    shared_bytes: int
    parameters: Mapping[int, tuple[Polynomial, int]]
    special: Mapping[str, Polynomial]
    matrices: tuple[Matrix, ...]
    sum_end: Polynomial
    tile: Tile | None
    facts: Facts
    slices: Slices | None = None
    block: tuple[int, int, int] | None = None
    step: int = 0
    maps: tuple[BoxMap, ...] = ()
    first: Polynomial = ZERO

    @property
    def is_product(self) -> bool:
        """Whether D is a product of two operands, and not sums of the rows of one."""
        return not self.step

    @property
    def writes(self) -> bool:
        """Whether the CTA writes its tile of D. Of CTAs that share a tile's k, only the one that arrives last does."""
        return self.slices is None or self.slices.last

    def type_of(self, name: str) -> str:
        """The type of an operand's elements; empty if there is no such operand."""
        return next((matrix.type for matrix in self.matrices if matrix.name == name), "")

    def where(self, name: str, value: Polynomial, bounds: Bounds) -> Contract:
        """The contract for the problems in which a name has a value. ``bounds``: of the names in that value."""

        def replaced(poly: Polynomial) -> Polynomial:
            return poly.substituted(name, value)

        def tiled(tile: Tile) -> Tile:
            return replace(tile, row=replaced(tile.row), col=replaced(tile.col))

        return Contract(
            self.lanes,
            self.shared_bytes,
            {at: (replaced(poly), bits) for at, (poly, bits) in self.parameters.items()},
            {register: replaced(poly) for register, poly in self.special.items()},
            tuple(
                replace(x, ld=replaced(x.ld), rows=replaced(x.rows), cols=replaced(x.cols), offset=replaced(x.offset))
                for x in self.matrices
            ),
            replaced(self.sum_end),
            tiled(self.tile) if self.tile else None,
            self.facts.where(name, value, bounds),
            self.slices.mapped(replaced) if self.slices else None,
            self.block,
            self.step,
            self.maps,
            replaced(self.first),
        )
