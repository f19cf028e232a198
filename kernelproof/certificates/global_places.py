"""Finds what lanes access in global memory: elements of an operand, a slab of the workspace, or a tile's counter."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernelproof.certificates.cells import Cells, Kind, Kinds
from kernelproof.certificates.contract import Contract, Matrix
from kernelproof.certificates.facts import Facts, NotCertified
from kernelproof.certificates.polynomials import Lanes, Polynomial
from kernelproof.certificates.program import Program
from kernelproof.certificates.words import polynomial

PARTIALS, ARRIVALS = "partials", "arrivals"  # operands: the workspace of slices, and the counters of their CTAs


class GlobalPlaces:
    """Locates a machine's accesses to global memory, by the machine's contract."""

    program: Program
    contract: Contract
    facts: Facts
    kinds: Kinds
    lanes: int

    def _operand_at(
        self, address: Any, size: int, written: bool, lanes: Lanes
    ) -> tuple[Matrix, Polynomial, Polynomial]:  # fmt: skip
        """The operand at an address, and the row and column in memory of what lanes access there, ``size`` bytes each.
        A row in memory is ``ld`` elements. Raises NotCertified unless accesses are aligned and to one operand; whether
        they lie within it is not checked."""
        poly = polynomial(address, 64)
        if len(lanes) != self.lanes:
            poly = poly.of_lanes(lanes)
        names = set(poly.names())
        matrix = next((x for x in self.contract.matrices if x.base in names), None)
        if matrix is None:
            raise NotCertified("a global address that is not computed from one operand's")
        if matrix.written not in (written, None):
            raise NotCertified(f"{matrix.name} is {'written' if written else 'read'}")
        offset = poly - matrix.address
        if any(x.base in offset.names() for x in self.contract.matrices):
            raise NotCertified("a global address that is not computed from one operand's")
        if any(np.any(np.asarray(c) % size) for c in poly.terms.values()):
            raise NotCertified(f"an access of {size} bytes to {matrix.name} may not be aligned")
        row, col = matrix.place(offset)
        # A column before the start of its row lies in the previous row.
        if (before := self.facts.known(col) == 0).any():
            carried = Polynomial.of(before.astype(np.int64))
            row, col = row - carried, col + carried * matrix.ld
        return matrix, row, col

    def _elements_at(
        self, address: Any, size: int, written: bool, lanes: Lanes, site: int | None = None
    ) -> tuple[Matrix, Cells]:
        """The operand and the elements that lanes access, ``size`` bytes each. ``site``: of the instruction, whose
        accesses are collected. Raises NotCertified unless the accesses are aligned and lie in one operand."""
        matrix, row, col = self._operand_at(address, size, written, lanes)
        count, (rows, cols) = size // matrix.width, matrix.extents
        for gap, what in (
            (row, "before its first row"), (rows - 1 - row, "after its last row"),
            (col, "before the start of a row"), (cols - count - col, "beyond the end of a row"),
        ):  # fmt: skip
            if not self.facts.holds(gap):
                where = f"{matrix.name}({row}, {col})"
                raise NotCertified(f"an access to {where} may lie {what}", refuted=self.facts.refutation(gap))
        return matrix, self._elements(matrix, row, col, size, lanes, site)

    def _elements(
        self, matrix: Matrix, row: Polynomial, col: Polynomial, size: int, lanes: Lanes, site: int | None
    ) -> Cells:
        """The elements of an operand that lanes access, by their row and first column in memory."""
        if not (row.varying.same_in_all_lanes and col.varying.same_in_all_lanes):
            raise NotCertified(f"the places of lanes in {matrix.name} differ by more than constants")
        count = size // matrix.width
        shape = (len(lanes), count)
        rows = np.broadcast_to(np.asarray(row.constant, np.int64).reshape(-1, 1), shape)
        cols = np.broadcast_to(np.asarray(col.constant, np.int64).reshape(-1, 1) + np.arange(count), shape)
        if site is not None:
            self.program.traffic.of_operand(site, matrix.name, rows[:, 0], cols[:, 0] * matrix.width, lanes, size)
        if matrix.across:
            row, col, rows, cols = col, row, cols, rows
        number = self.kinds.number(Kind(matrix.name, row.varying, col.varying))
        return Cells(np.full(shape, number), rows, cols, matrix.width)

    def _slab(self, place: Cells) -> Polynomial:
        """The slab of the workspace that places are in."""
        kind = self.kinds[place.one_kind]
        if kind is None or kind.col.terms or not (place.rows == place.rows.flat[0]).all():
            raise NotCertified("lanes access several slabs of the workspace")
        return kind.row + int(place.rows.flat[0])

    def _all_lanes(self, cells: Cells) -> Cells:
        """Elements that all lanes must access."""
        if len(cells.kinds) != self.lanes:
            raise NotCertified("some lanes of a CTA use the workspace, and others not")
        return cells

    def _register_of(self, cells: Cells, lanes: Lanes) -> Cells:
        """A register of all lanes that holds the elements of some; elements of the other lanes are unknown."""
        if len(lanes) == self.lanes:
            return cells
        arrays = []
        for each in (cells.kinds, cells.rows, cells.cols):
            arrays.append(np.zeros((self.lanes, each.shape[1]), np.int64))
            arrays[-1][lanes] = each
        return Cells(arrays[0], arrays[1], arrays[2], cells.width)

    @staticmethod
    def counter(address: Any, lanes: Lanes) -> Polynomial:
        """The number of the counter at an address. Raises NotCertified if the address is that of no counter."""
        number, rest = (polynomial(address, 64).of_lanes(lanes) - Polynomial.named(ARRIVALS, 4)).divided(4)
        if rest.terms:
            raise NotCertified("an atomic on what is no counter of a tile")
        return number
