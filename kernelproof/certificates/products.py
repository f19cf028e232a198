"""Executes mma.sync symbolically: checks that fragments of A and B match, and that each product is added once.

``machine`` passes the registers of an mma.sync (m16n8k16) of all warps of a CTA. Registers of A must hold A(i, k) and
those of B B(j, k), for the same 16 k, where the PTX fragment layout expects them. The result is sums of products of
D(i, j): those that C had, and those of these k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kernelproof.certificates.cells import Cells, Kind, Kinds, SummedRange
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.polynomials import ZERO, Lanes, Polynomial
from kernelproof.emulator.machine.tensor import Shape
from kernelproof.ground.chips import WARP

MOST_FRAGMENTS = 256  # limit on the cached fragments; an iteration of a main loop has fewer


@dataclass
class Fragment:
    """The fragments of a CTA's warps: 16 rows of A or 8 columns of B each, over 16 k.

    ``source``: A or B. ``place``: the part of the row of A (or column of B) that depends on the problem. ``places``:
    the offset of each row (or column) from there, shape (warps, 16) or (warps, 8). ``base``: the part of k that depends
    on the problem. ``steps``: the 16 offsets of k, which are the same in all warps, in the order of the fragment's
    positions: mma.sync multiplies elements of A and B at the same position.
    """

    source: str
    place: Polynomial
    places: Lanes
    base: Polynomial
    steps: tuple[int, ...]


class Products:
    """Executes the mma.sync of a CTA's warps. ``operands``: the type of A and B. ``output``: the type of D. Fragments
    and places of D are cached by the identity of arrays, because each fragment is a factor of many products."""

    def __init__(self, kinds: Kinds, operands: str, output: str) -> None:
        self.kinds, self.operands, self.output = kinds, operands, output
        # ids of registers -> the registers, which keeps their ids valid, and their fragment.
        self._fragments: dict[tuple[int, ...], tuple[tuple[Cells, ...], Fragment]] = {}
        self._distinct_places: dict[tuple[tuple[int, ...], bytes], Lanes] = {}  # shape and content -> the array
        # ids of a row array and a column array of ``_distinct_places``, bytes of a sum -> the places of D's registers.
        self._d_places: dict[tuple[int, int, int], list[tuple[Lanes, Lanes]]] = {}

    def fragment(self, registers: tuple[Any, ...], halves: int) -> Fragment:
        """The fragment in ``registers`` of A (``halves`` = 2 halves of 8 rows) or of B (1 half of 8 columns). Raises
        NotCertified unless they hold 16 k of rows of an operand."""
        key = tuple(map(id, registers))
        known = self._fragments.get(key)
        if known is None:
            if len(self._fragments) > MOST_FRAGMENTS:
                self._fragments.clear()
            known = self._fragments[key] = (registers, self._fragment(registers, halves))
        return known[1]

    def _fragment(self, registers: tuple[Any, ...], halves: int) -> Fragment:
        """As ``fragment``, without the cache."""
        if not all(isinstance(each, Cells) and each.width == 2 for each in registers):
            raise NotCertified("an mma.sync multiplies what was not loaded from an operand")
        number = registers[0].one_kind
        kind = self.kinds[number]
        if kind is None or kind.summed is not None or any(each.one_kind != number for each in registers):
            raise NotCertified("an mma.sync multiplies elements that are not of one operand")
        rows, cols = (np.stack([getattr(each, name) for each in registers], 2) for name in ("rows", "cols"))
        # In lane 4 g + t, a register holds the k 2 t and 2 t + 1 of row g. The second half of the registers holds those
        # k + 8. In A, registers with odd numbers hold row g + 8. So the axes of ``shape`` are warp, g, t, element of a
        # register, half of k, half of rows. Reordered, they become (warps, rows, k), of which elements of a row must
        # have one offset of the row, and elements of a k one offset of k in all rows and warps.
        shape = (len(rows) // WARP, 8, 4, 2, len(registers) // halves, halves)
        matrices = [
            x.reshape(shape).transpose(0, 5, 1, 4, 2, 3).reshape(shape[0], 8 * halves, -1) for x in (rows, cols)
        ]
        rows, cols = matrices
        if (rows != rows[:, :, :1]).any() or (cols != cols[:1, :1, :]).any():
            raise NotCertified("the elements of a fragment of mma.sync are not 16 k of rows of an operand")
        return Fragment(kind.source, kind.row, self._distinct(rows[:, :, 0]), kind.col, tuple(cols[0, 0].tolist()))

    def multiply(self, shape: Shape, a: tuple[Any, ...], b: tuple[Any, ...], c: tuple[Any, ...]) -> list[Cells]:
        """D = A * B + C of all warps. ``a``, ``b``, ``c``: the registers of the operands, each with the lanes of the
        CTA. Returns the registers of D. Raises NotCertified if A and B differ in k, if C has sums of other elements of
        D or already has one of the products, and for shapes and types that are not covered."""
        if shape.k != 16 or shape.kind not in ("f16", "bf16"):
            raise NotCertified(f"{shape.name} is not covered")
        if shape.kind != self.operands or (shape.acc == "f16" and self.output != "f16"):
            raise NotCertified(f"{shape.name} multiplies elements of {self.operands} for a D of {self.output}")
        left, right = self.fragment(a, 2), self.fragment(b, 1)
        if (left.source, right.source) != ("A", "B"):
            raise NotCertified(f"an mma.sync multiplies {left.source} by {right.source}")
        if left.steps != right.steps or not left.base.equals(right.base):
            raise NotCertified("the fragments of A and B of an mma.sync have different k")
        before = self._sum(c, left, right)
        kind = Kind("sum", left.place, right.place, before.plus(left.base, left.steps))
        return self._registers(shape, self.kinds.number(kind), left, right)

    def _registers(self, shape: Shape, number: int, left: Fragment, right: Fragment) -> list[Cells]:
        """The registers of D, which hold sums of the kind with a ``number``."""
        width = 2 if shape.acc == "f16" else 4
        places = self._places_of_d(left, right, width)
        kinds = np.full(places[0][1].shape, number)
        return [Cells(kinds, rows, cols, width) for rows, cols in places]

    def _places_of_d(self, left: Fragment, right: Fragment, width: int) -> list[tuple[Lanes, Lanes]]:
        """The row and column offsets of the sums in each register of D, as two arrays of shape (lanes, sums of a
        register). ``width``: bytes of a sum. Lane 4 g + t has the columns 2 t and 2 t + 1 of rows g and g + 8."""
        key = (id(left.places), id(right.places), width)
        known = self._d_places.get(key)
        if known is not None:
            return known
        lane, out = np.arange(WARP), []
        for register in range(2 if width == 2 else 4):
            half, elements = (register, (0, 1)) if width == 2 else (register // 2, (register % 2,))
            rows = left.places[:, lane // 4 + 8 * half].reshape(-1, 1)
            cols = np.stack([right.places[:, lane % 4 * 2 + e] for e in elements], 2).reshape(len(rows), -1)
            out.append((np.broadcast_to(rows, cols.shape), cols))
        self._d_places[key] = out
        return out

    def _distinct(self, places: Lanes) -> Lanes:
        """The same array for all equal ones, so that ``_places_of_d`` recognises it by its id."""
        return self._distinct_places.setdefault((places.shape, places.tobytes()), places)

    def _sum(self, c: tuple[Any, ...], left: Fragment, right: Fragment) -> SummedRange:
        """The k whose products are in C. Raises NotCertified unless C is zero, or holds sums of the elements of D to
        which A and B belong, in the registers of D."""
        if all(isinstance(each, np.ndarray) and each.dtype.kind in "iu" and not each.any() for each in c):
            return SummedRange(ZERO, 0)
        numbers = {each.one_kind if isinstance(each, Cells) else 0 for each in c}
        kind = self.kinds[numbers.pop()] if len(numbers) == 1 else None
        if kind is None or kind.summed is None:
            raise NotCertified("an mma.sync adds to what is not one kind of sum, nor zero")
        if not (kind.row.equals(left.place) and kind.col.equals(right.place)):
            raise NotCertified("an mma.sync adds to the sum of another element of D")
        for each, (rows, cols) in zip(c, self._places_of_d(left, right, c[0].width), strict=True):
            same = each.rows is rows and each.cols is cols
            if not same and ((each.rows != rows).any() or (each.cols != cols).any()):
                raise NotCertified("an mma.sync adds to the sum of another element of D")
        return kind.summed
