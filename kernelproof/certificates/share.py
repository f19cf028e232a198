"""Describes the partial sums of a tile that a group of consumers adds, and to which thread and vector each belongs.

``sum_proof`` says how groups share the vectors of all tiles. This module has the numbers for that proof, as polynomials
in names: those of a thread, of a vector and of a share. A tile has one slab of the workspace for each slice of k. In a
slab, sum number e of vector v of thread t (its number in the group) is at (v * threads + t) * VECTOR + e.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

import numpy as np

from kernelproof.certificates import rests
from kernelproof.certificates.contract import Bounds
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.pipelines import Parts
from kernelproof.certificates.polynomials import ZERO, Lanes, Polynomial
from kernelproof.certificates.slices import SlabContents
from kernelproof.ground.chips import WARP

VECTOR = 4  # sums of a vector
# The parts of a thread's number in its warpgroup: name -> how many values it has, and its factor in the number. So
# lane = lane_odd + 2 * lane_pair + 4 * row_odd + 8 * row_pair, where lane / 4 is the row of an 8 x 8 matrix of mma.
LANES: dict[str, tuple[int, int]] = {"lane_odd": (2, 1), "lane_pair": (2, 2), "row_odd": (2, 4), "row_pair": (4, 8)}
WARPS: dict[str, tuple[int, int]] = {"warp": (4, WARP)}
# Names in polynomials. ``vector_at``: the number in its tile of the share's first vector. ``vectors_left``: the vectors
# of the share after that one, in all tiles. ``vectors_before``: the vectors of the tile that other groups have counted.
# ``vector_col``, ``vector_row``: a vector of the tile, as column + row * columns.
AT, LEFT, BEFORE, VECTOR_COLUMN, VECTOR_ROW = "vector_at", "vectors_left", "vectors_before", "vector_col", "vector_row"
named = Polynomial.named


@dataclass
class Share:
    """The vectors of a tile that one group adds, and a thread of the group that adds them.

    - ``group``, ``groups``: the group's number, and how many a CTA has. ``start``, ``threads``: its first thread's
      number in the CTA, and how many it has.
    - ``is_first_thread``: whether the thread is the group's first one; otherwise it is any other thread of the group's
      warpgroup number ``warpgroup``.
    - ``barrier_number``: the number of the group's barrier (bar.sync).
    - ``slab``: which sums an item stores to its slab.
    - ``tile``: the tile's number. ``at``, ``end``: the group adds the tile's vectors from ``at`` to before ``end``.
    - ``column``: the column of the first vector of an iteration; None for any. ``further``: polynomials that are at
      least 0 because of that column.
    """

    parts: Parts
    group: int
    groups: int
    start: int
    threads: int
    is_first_thread: bool
    warpgroup: int
    barrier_number: int
    slab: SlabContents
    tile: Polynomial = ZERO
    at: Polynomial = ZERO
    end: Polynomial = ZERO
    column: Polynomial | None = None
    further: tuple[Polynomial, ...] = ()
    _checked: set[object] = field(default_factory=set)  # the keys of places that ``check_place`` has proven

    @property
    def count(self) -> Polynomial:
        """The parts of a tile: its slices of k, which are also its slabs."""
        count = self.parts.count
        return Polynomial.of(count) if isinstance(count, int) else count

    @property
    def first_slab(self) -> Polynomial:
        """The number of the slab of a tile's first part."""
        return self.tile * self.count if self.parts.first is None else self.parts.first

    @property
    def vectors(self) -> int:
        """The vectors of a tile that each thread has in a slab."""
        return self.parts.vectors

    @property
    def before(self) -> Polynomial:
        """The number of the tile's vectors that other groups have counted before this one."""
        return named(BEFORE)

    @property
    def extents(self) -> dict[str, int]:
        """Name in the thread's number -> how many values it has, from 0 on. Empty for the first thread."""
        return {} if self.is_first_thread else {name: count for name, (count, _) in (LANES | WARPS).items()}

    @property
    def number_in_group(self) -> Polynomial:
        """The thread's number in the group."""
        own = Polynomial.of(4 * WARP * self.warpgroup)
        return (
            own
            if self.is_first_thread
            else sum((named(name, step) for name, (_, step) in (LANES | WARPS).items()), own)
        )

    @property
    def thread(self) -> Polynomial:
        """The thread's number in the CTA."""
        return self.number_in_group + self.start

    @property
    def lane(self) -> Polynomial:
        """The thread's number in its warp."""
        return ZERO if self.is_first_thread else sum((named(name, step) for name, (_, step) in LANES.items()), ZERO)

    @property
    def lane_names(self) -> set[str]:
        """The names that tell threads of a group apart."""
        return set(self.extents)

    @property
    def names_in_warp(self) -> set[str]:
        """The names that tell lanes of a warp apart."""
        return set(LANES) & set(self.extents)

    @property
    def columns(self) -> int:
        """How many vectors a row of the tile's vectors has; all of them, if rows are not equally long."""
        columns, vectors = self.parts.columns, self.parts.vectors
        return columns if vectors % columns == 0 else vectors

    @property
    def _column_parts(self) -> dict[str, tuple[int, int]]:
        """The parts of the number of a column, as in ``rests``; if columns lie in chunks, the chunk and the rest."""
        chunk = self.parts.chunk
        if chunk and self.columns % chunk == 0 and self.columns > chunk:
            return {f"{VECTOR_COLUMN}_chunk": (chunk, self.columns // chunk - 1), VECTOR_COLUMN: (1, chunk - 1)}
        return rests.parts(VECTOR_COLUMN, self.columns)

    @property
    def _in_chunks(self) -> bool:
        """Whether a row of vectors has several chunks."""
        return f"{VECTOR_COLUMN}_chunk" in self._column_parts

    @property
    def _column_number(self) -> Polynomial:
        """The number of a column as a polynomial in its parts."""
        return sum((named(part, factor) for part, (factor, _) in self._column_parts.items()), ZERO)

    @property
    def _column_rests(self) -> tuple[Polynomial, ...]:
        """Polynomials in the parts of a column that are at least 0."""
        return () if self._in_chunks else rests.limits(VECTOR_COLUMN, self.columns)

    @property
    def _block(self) -> int:
        """The columns of a block: within one, the parts of the next vector's column are polynomials."""
        return self.parts.chunk if self._in_chunks else rests.block(self.columns)

    @property
    def _before_block(self) -> Polynomial:
        """The number of the first column in a column's block."""
        if self._in_chunks:
            return named(f"{VECTOR_COLUMN}_chunk", self.parts.chunk)
        return rests.blocks(VECTOR_COLUMN, self.columns)

    @property
    def vector(self) -> Polynomial:
        """The number in the tile of the first vector of an iteration: of any, or of those in ``column``."""
        column = self._column_number if self.column is None else self.column
        return column + named(VECTOR_ROW, self.columns) if self.columns < self.vectors else column

    def iterations(self) -> Iterator[Share]:
        """This share for each set of iterations of the loop over vectors that is proven separately. Together they begin
        with every vector of the tile.

        An iteration adds ``parts.per_iteration`` vectors, whose rows and columns are known as polynomials only if all
        of them lie in the same block of ``rests.block`` columns. Iterations for which they do are one case. Each other
        column within a block in which an iteration may begin is a case of its own, with a known number. For example,
        with rows of 12 vectors, blocks of 6, and 2 vectors in an iteration, the columns 6 * i + j with j <= 4 are one
        case. The other cases are column 5, from which the next vector is in the next block, and column 11, from which
        it is in the next row.
        """
        others, block = self.parts.per_iteration - 1, self._block
        if not others or block == self.vectors:
            yield self
            return
        before, last = self._before_block, self.columns // block - 1
        within = self._column_number - before
        # Where the rest within a block has parts too, each of its values is a case of its own.
        most = block - 1 - others if len(self._column_parts) <= 2 else -1
        if most >= 0:
            yield replace(self, column=before + within, further=(most - within,))
        for column in range(max(0, most + 1), block):
            if last:  # in any block of a row except for the last one, and then in the last one
                yield replace(self, column=before + column, further=((last - 1) * block - before,))
            yield replace(self, column=Polynomial.of(last * block + column))

    @property
    def column_limits(self) -> tuple[Polynomial, ...]:
        """Polynomials in the column of an iteration's first vector that are at least 0."""
        return (*self._column_rests, *self.further)

    @property
    def vector_extents(self) -> dict[str, int]:
        """Name in the number of a vector -> how many values it has, from 0 on."""
        column = {name: most + 1 for name, (_, most) in self._column_parts.items()}
        return column | {VECTOR_ROW: self.vectors // self.columns}

    @property
    def bounds(self) -> Bounds:
        """The least and the largest value of all names of the share, its thread and its vectors."""
        out: Bounds = {(name,): (0, size - 1) for name, size in (self.extents | self.vector_extents).items()}
        return out | rests.bounds(AT, self.vectors) | {(BEFORE,): (0, self.vectors - 1), (LEFT,): (0, 1 << 40)}

    @property
    def limits(self) -> tuple[Polynomial, ...]:
        """Further polynomials that are at least 0. That a thread is not the group's first one is among them."""
        others = () if self.is_first_thread else (self.number_in_group - 1,)
        return (*rests.limits(AT, self.vectors), *self.column_limits, *others)

    def vector_of(self, position: Polynomial) -> tuple[Polynomial, int]:
        """The vector of this thread to which a place in a slab belongs, and the number of the sum in the vector (0 to
        3): the v and e with position = (v * threads + t) * VECTOR + e for the thread's number t. Raises NotCertified if
        the place belongs to another thread."""
        vector, rest = (position - self.number_in_group * VECTOR).divided(VECTOR * self.threads)
        if not rest.is_constant or not isinstance(rest.constant, int) or not 0 <= rest.constant < VECTOR:
            raise NotCertified(f"the partial sum at {position} of a slab is not of this thread's vectors")
        return vector, rest.constant

    def turned(self, vector: Polynomial, element: int) -> Polynomial:
        """The place in a slab of the sum that this thread has after movmatrix, where it had sum number ``element`` of
        ``vector`` before.

        Sums 0 and 1 of a vector are in one register, and 2 and 3 in another one. movmatrix transposes the 8 x 8 sums
        that a register has in a warp. Lane l holds the columns 2 * (l % 4) + h of row l / 4, where h is element % 2.
        After the transposition it has the sum of row 2 * (l % 4) + h and column l / 4. Before, that sum was in lane
        4 * (2 * (l % 4) + h) + (l / 4) / 2, as the one with h = (l / 4) % 2.
        """
        source, half = ZERO, ZERO  # what depends on l in the number of that lane, and (l / 4) % 2
        if not self.is_first_thread:
            source = named("lane_odd", 8) + named("lane_pair", 16) + named("row_pair")
            half = named("row_odd")
        holder = self.number_in_group - self.lane + source + 4 * (element % 2)
        return (vector * self.threads + holder) * VECTOR + half + element // 2 * 2

    def check_place(self, vector: Polynomial, position: Polynomial, row: Polynomial, col: Polynomial) -> None:
        """Check that items store the sum of element (row, col) of the tile to a place of their slabs, for every thread
        and every vector. ``vector``: the number of the one that the place belongs to. ``position``: the place, as a
        polynomial like ``row`` and ``col``. All values of the names are tried. Raises NotCertified."""
        key = position.key, row.key, col.key, vector.key, *(limit.key for limit in self.further)
        if key in self._checked:
            return
        extents = {name: size for name, size in (self.extents | self.vector_extents).items() if size > 1}
        if {*position.names(), *row.names(), *col.names()} - extents.keys():
            raise NotCertified(f"D gets sums at ({row}, {col}) of its tile, which depends on more than the thread")
        # ``points`` has a row for each combination of values, and a column for each name; ``at`` has these columns.
        points = np.array(list(product(*map(range, extents.values()))), np.int64).reshape(-1, len(extents))
        at = dict(zip(extents, points.T, strict=True))
        for limit in self.column_limits:
            points = points[self._evaluated(limit, at, len(points)) >= 0]
            at = dict(zip(extents, points.T, strict=True))
        places = self._evaluated(position, at, len(points))
        inside = (places >= 0) & (places < len(self.slab.rows))
        # Only vectors after the tile's last one may lie beyond the slab: their sums are not stored.
        if (self._evaluated(vector, at, len(points))[~inside] < self.vectors).any():
            raise NotCertified("a partial sum lies beyond its slab")
        same = (self.slab.rows[places[inside]] == self._evaluated(row, at, len(points))[inside]) & (
            self.slab.cols[places[inside]] == self._evaluated(col, at, len(points))[inside]
        )
        if not same.all():
            raise NotCertified("D gets the sum of another element")
        self._checked.add(key)

    @staticmethod
    def _evaluated(value: Polynomial, at: dict[str, Lanes], size: int) -> Lanes:
        """The values of a polynomial at ``size`` points, shape (size,). ``at``: name -> its value at each point."""
        total: Any = np.zeros(size, np.int64)
        for monomial, coefficient in value.in_lane(0).items():
            total = total + coefficient * prod((at[name] for name in monomial), start=np.ones(size, np.int64))
        return np.asarray(total)
