"""The share of a tile's partial sums that a group of consumers adds: which vectors, and which thread adds which."""

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
from kernelproof.certificates.pipelines import WARP, Parts
from kernelproof.certificates.polynomials import ZERO, Lanes, Polynomial
from kernelproof.certificates.slices import SlabContents

VECTOR = 4
# The names of a thread's number: how many values each has, and what it adds to the number.
LANES: dict[str, tuple[int, int]] = {"lane_odd": (2, 1), "lane_pair": (2, 2), "row_odd": (2, 4), "row_pair": (4, 8)}
WARPS: dict[str, tuple[int, int]] = {"warp": (4, WARP)}
# Names: the first vector of the share in its tile, the vectors of the share after that one, the vectors that other
# groups have counted, and the column and row of a vector.
AT, LEFT, BEFORE, VECTOR_COLUMN, VECTOR_ROW = "vector_at", "vectors_left", "vectors_before", "vector_col", "vector_row"
named = Polynomial.named


@dataclass
class Share:
    """The vectors of a tile that one group adds, and a thread of the group that adds them.

    The group is number ``group`` of the ``groups`` of a CTA, and has the ``threads`` threads from ``start`` on.
    ``first``: whether the thread is the group's first one; otherwise it is any other thread of its warpgroup number
    ``warpgroup``. ``tile``: the tile's number. The group adds its vectors from ``at`` to before ``last``. ``meeting``:
    the number of the group's barrier. ``slab``: what an item leaves in the workspace. ``column``: that of the first
    vector of an iteration, None if it is any; ``further``: what is at least 0 then.
    """

    parts: Parts
    group: int
    groups: int
    start: int
    threads: int
    first: bool
    warpgroup: int
    meeting: int
    slab: SlabContents
    tile: Polynomial = ZERO
    at: Polynomial = ZERO
    last: Polynomial = ZERO
    column: Polynomial | None = None
    further: tuple[Polynomial, ...] = ()
    _checked: set[object] = field(default_factory=set)

    @property
    def count(self) -> int:
        """The parts of a tile."""
        return self.parts.count

    @property
    def vectors(self) -> int:
        """The vectors that a thread has of a tile."""
        return self.parts.vectors

    @property
    def before(self) -> Polynomial:
        """The vectors that other groups have counted before this one."""
        return named(BEFORE)

    @property
    def extents(self) -> dict[str, int]:
        """How many values each name of the thread's number has."""
        return {} if self.first else {name: count for name, (count, _) in (LANES | WARPS).items()}

    @property
    def local(self) -> Polynomial:
        """The thread's number in the group."""
        own = Polynomial.of(4 * WARP * self.warpgroup)
        return own if self.first else sum((named(name, step) for name, (_, step) in (LANES | WARPS).items()), own)

    @property
    def thread(self) -> Polynomial:
        """The thread's number in the CTA."""
        return self.local + self.start

    @property
    def lane(self) -> Polynomial:
        """The thread's number in its warp."""
        return ZERO if self.first else sum((named(name, step) for name, (_, step) in LANES.items()), ZERO)

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
        """How many vectors a row of them has; all, if they are not a multiple of a row."""
        columns, vectors = self.parts.columns, self.parts.vectors
        return columns if vectors % columns == 0 else vectors

    @property
    def vector(self) -> Polynomial:
        """The number in the tile of the first vector of any iteration, as a polynomial."""
        column = rests.number(VECTOR_COLUMN, self.columns) if self.column is None else self.column
        return column + named(VECTOR_ROW, self.columns) if self.columns < self.vectors else column

    def iterations(self) -> Iterator[Share]:
        """The share for iterations that begin in different columns, all together. Where further vectors of one may be
        the first of a row, or of ``rests.block``, it is known in which column it begins."""
        others, block = self.parts.together - 1, rests.block(self.columns)
        if not others or block == self.vectors:
            yield self
            return
        before, last = rests.blocks(VECTOR_COLUMN, self.columns), self.columns // block - 1
        within = rests.number(VECTOR_COLUMN, self.columns) - before
        # Where the rest within a block has parts too, each of its values is a case of its own.
        most = block - 1 - others if len(rests.parts(VECTOR_COLUMN, self.columns)) <= 2 else -1
        if most >= 0:
            yield replace(self, column=before + within, further=(most - within,))
        for column in range(max(0, most + 1), block):
            if last:
                yield replace(self, column=before + column, further=((last - 1) * block - before,))
            yield replace(self, column=Polynomial.of(last * block + column))

    @property
    def column_limits(self) -> tuple[Polynomial, ...]:
        """Polynomials in the column of an iteration's first vector that are at least 0."""
        return (*rests.limits(VECTOR_COLUMN, self.columns), *self.further)

    @property
    def vector_extents(self) -> dict[str, int]:
        """How many values each name of a vector has."""
        column = {name: most + 1 for name, (_, most) in rests.parts(VECTOR_COLUMN, self.columns).items()}
        return column | {VECTOR_ROW: self.vectors // self.columns}

    @property
    def bounds(self) -> Bounds:
        """The bounds of all names."""
        out: Bounds = {(name,): (0, size - 1) for name, size in (self.extents | self.vector_extents).items()}
        return out | rests.bounds(AT, self.vectors) | {(BEFORE,): (0, self.vectors - 1), (LEFT,): (0, 1 << 40)}

    @property
    def limits(self) -> tuple[Polynomial, ...]:
        """Further polynomials that are at least 0."""
        others = () if self.first else (self.local - 1,)
        return (*rests.limits(AT, self.vectors), *self.column_limits, *others)

    def vector_of(self, position: Polynomial) -> tuple[Polynomial, int]:
        """The vector of this thread to which a place in a slab belongs, and the number of the sum in the vector. Raises
        NotCertified if the place belongs to another thread."""
        vector, rest = (position - self.local * VECTOR).divided(VECTOR * self.threads)
        if not rest.is_constant or not isinstance(rest.constant, int) or not 0 <= rest.constant < VECTOR:
            raise NotCertified(f"the partial sum at {position} of a slab is not of this thread's vectors")
        return vector, rest.constant

    def turned(self, vector: Polynomial, element: int) -> Polynomial:
        """The place in a slab of the sum that this thread has after movmatrix, where it had one of a vector before.

        A warp has 8 x 8 sums, and each lane two neighbours in row lane / 4, which movmatrix transposes.
        """
        lane, odd = ZERO, ZERO
        if not self.first:
            lane = named("lane_odd", 8) + named("lane_pair", 16) + named("row_pair")
            odd = named("row_odd")
        lane = self.local - self.lane + lane + 4 * (element % 2)
        return (vector * self.threads + lane) * VECTOR + odd + element // 2 * 2

    def check_place(self, vector: Polynomial, position: Polynomial, row: Polynomial, col: Polynomial) -> None:
        """Check that items leave at a place of a slab the sum of (row, col) of the tile, for every thread and for every
        value of the vector that the place belongs to."""
        key = position.key, row.key, col.key, vector.key, *(limit.key for limit in self.further)
        if key in self._checked:
            return
        extents = {name: size for name, size in (self.extents | self.vector_extents).items() if size > 1}
        if {*position.names(), *row.names(), *col.names()} - extents.keys():
            raise NotCertified(f"D gets sums at ({row}, {col}) of its tile, which depends on more than the thread")
        # All values of the names, one row each; and for each name a column of values.
        points = np.array(list(product(*map(range, extents.values()))), np.int64).reshape(-1, len(extents))
        at = dict(zip(extents, points.T, strict=True))
        for limit in self.column_limits:
            points = points[self._evaluated(limit, at, len(points)) >= 0]
            at = dict(zip(extents, points.T, strict=True))
        places = self._evaluated(position, at, len(points))
        inside = (places >= 0) & (places < len(self.slab.rows))
        # Only vectors after the tile's last one may lie beyond the slab: nothing is stored for them.
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
        """A polynomial at ``size`` points. ``at``: name -> its value at each point."""
        total: Any = np.zeros(size, np.int64)
        for monomial, coefficient in value.in_lane(0).items():
            total = total + coefficient * prod((at[name] for name in monomial), start=np.ones(size, np.int64))
        return np.asarray(total)
