"""What a proof is told of a kernel: its operands, the sizes that its launcher accepts, and what a CTA must write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kernelproof.certificates.facts import Facts
from kernelproof.certificates.polynomials import ZERO, Monomial, Polynomial

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
    written: bool
    across: bool = False
    offset: Polynomial = ZERO

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return WIDTHS[self.type]

    @property
    def address(self) -> Polynomial:
        return Polynomial.named(self.base, self.alignment) + self.offset * self.width


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
    nothing."""

    lanes: int
    shared_bytes: int
    parameters: Mapping[int, tuple[Polynomial, int]]
    special: Mapping[str, Polynomial]
    matrices: tuple[Matrix, ...]
    sum_end: Polynomial
    tile: Tile | None
    facts: Facts

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
            ),
        )
