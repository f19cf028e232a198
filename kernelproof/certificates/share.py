"""The share of a tile's partial sums that a group of consumers adds: which vectors, and which thread adds which."""

from __future__ import annotations

from dataclasses import dataclass, field
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
LANES: dict[str, int] = {"lane_pair": 4, "lane_row": 8}
WARPS: dict[str, int] = {"warp": 4}
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
    the number of the group's barrier. ``slab``: what an item leaves in the workspace.
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
        if self.first:
            return {}
        return LANES | WARPS

    @property
    def local(self) -> Polynomial:
        """The thread's number in the group."""
        steps = {"lane_pair": 1, "lane_row": 4, "warp": WARP}
        own = Polynomial.of(4 * WARP * self.warpgroup)
        return sum((named(name, steps[name]) for name in self.extents), own)

    @property
    def thread(self) -> Polynomial:
        """The thread's number in the CTA."""
        return self.local + self.start

    @property
    def lane(self) -> Polynomial:
        """The thread's number in its warp."""
        return ZERO if self.first else named("lane_pair") + named("lane_row", 4)

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
        """The number of any vector in the tile, as a polynomial."""
        column = rests.number(VECTOR_COLUMN, self.columns)
        return column + named(VECTOR_ROW, self.columns) if self.columns < self.vectors else column

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
        return (*rests.limits(AT, self.vectors), *rests.limits(VECTOR_COLUMN, self.columns), *others)

    def vector_of(self, position: Polynomial) -> tuple[Polynomial, int]:
        """The vector of this thread to which a place in a slab belongs, and the number of the sum in the vector. Raises
        NotCertified if the place belongs to another thread."""
        vector, rest = (position - self.local * VECTOR).divided(VECTOR * self.threads)
        if not rest.is_constant or not isinstance(rest.constant, int) or not 0 <= rest.constant < VECTOR:
            raise NotCertified(f"the partial sum at {position} of a slab is not of this thread's vectors")
        return vector, rest.constant

    def check_place(self, position: Polynomial, row: Polynomial, col: Polynomial) -> None:
        """Check that items leave at a place of a slab the sum of (row, col) of the tile, for every thread and
        vector."""
        key = position.key, row.key, col.key
        if key in self._checked:
            return
        extents = {name: size for name, size in (self.extents | self.vector_extents).items() if size > 1}
        if {*position.names(), *row.names(), *col.names()} - extents.keys():
            raise NotCertified(f"D gets sums at ({row}, {col}) of its tile, which depends on more than the thread")
        # All values of the names, one row each; and for each name a column of values.
        points = np.array(list(product(*map(range, extents.values()))), np.int64).reshape(-1, len(extents))
        at = dict(zip(extents, points.T, strict=True))
        for limit in rests.limits(VECTOR_COLUMN, self.columns):
            points = points[self._evaluated(limit, at, len(points)) >= 0]
            at = dict(zip(extents, points.T, strict=True))
        places = self._evaluated(position, at, len(points))
        inside = (places >= 0) & (places < len(self.slab.rows))
        # Only vectors after the tile's last one may lie beyond the slab: nothing is stored for them.
        if (self._evaluated(self.vector_of(position)[0], at, len(points))[~inside] < self.vectors).any():
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
