"""Split-k: the CTAs of a tile store partial sums to a workspace, and the CTA that arrives last adds them, in order.

Each CTA stores its sums to its own slab of the workspace. Its threads fence and meet at a barrier, and then one thread
counts the CTA in the tile's counter. Counters are zero before a launch, so of a tile's ``count`` CTAs exactly one finds
``count - 1`` there, and all others less: that one arrives last. The increment wraps around at ``count - 1``, so the
launch leaves the counter at zero. After another barrier and fence the last CTA sees all slabs. All CTAs of a tile
execute the same text with the same threads, so the other slabs have sums of the same elements at the same places as its
own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np

from kernelproof.certificates.cells import Cells
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.polynomials import Lanes, Polynomial

EMPTY = -1


@dataclass(frozen=True)
class Slices:
    """A CTA's slice of its tile's k: number ``own`` of ``count``. ``tile``: the number of the tile. ``elements``: how
    many sums a slab has. ``arrived``: how many of the tile's CTAs were counted before this one."""

    count: int
    own: Polynomial
    tile: Polynomial
    elements: int
    arrived: Polynomial

    @property
    def last(self) -> bool:
        """Whether the CTA arrives last."""
        return self.arrived.equals(Polynomial.of(self.count - 1))

    def put(self, change: Callable[[Polynomial], Polynomial]) -> Slices:
        """The slice with its polynomials changed by a function, for other problems."""
        return replace(self, own=change(self.own), tile=change(self.tile))


class Stage(IntEnum):
    """How far a CTA is with its partial sums. A stage follows the one before it. All threads reach it together, except
    for COUNTED."""

    SUMMING = 0
    STORED = 1
    FENCED = 2
    MET = 3  # after a barrier
    COUNTED = 4  # one thread has counted the CTA
    TOLD = 5  # after another barrier
    SEEING = 6  # after another fence: all slabs may be loaded


@dataclass
class SlabContents:
    """What a CTA has stored to its slab: for each place the number of the kind (``EMPTY`` for none), row and column."""

    stage: Stage
    kinds: Lanes
    rows: Lanes
    cols: Lanes

    @classmethod
    def nothing(cls, elements: int) -> SlabContents:
        """An empty slab."""
        return cls(Stage.SUMMING, *(np.full(elements, EMPTY, np.int64) for _ in range(3)))

    def same(self, other: SlabContents) -> bool:
        """Whether the same has been stored to two slabs."""
        arrays = ((self.kinds, other.kinds), (self.rows, other.rows), (self.cols, other.cols))
        return self.stage == other.stage and all(np.array_equal(mine, its) for mine, its in arrays)

    def copied(self) -> SlabContents:
        return SlabContents(self.stage, self.kinds.copy(), self.rows.copy(), self.cols.copy())


class Partial(Cells):
    """Sums over the slices from ``first`` to before ``end``, of ``count``. Once all slices are added, ``whole`` takes
    their place: the elements as complete sums."""

    __slots__ = ("count", "end", "first", "is_float", "whole")

    def __init__(self, whole: Cells, first: int, end: int, count: int) -> None:
        super().__init__(np.zeros_like(whole.kinds), whole.rows, whole.cols, whole.width)
        self.whole, self.first, self.end, self.count = whole, first, end, count
        self.is_float = False

    def view(self, kind: Any) -> Partial:
        """The same sums, seen as floats or as bits: only floats are added."""
        super().view(kind)
        out = Partial(self.whole, self.first, self.end, self.count)
        out.is_float = np.dtype(kind).kind == "f"
        return out

    def part(self, start: int, stop: int) -> Partial:
        return Partial(self.whole.part(start, stop), self.first, self.end, self.count)

    def __add__(self, other: Any) -> Cells:
        is_float = other.is_float if isinstance(other, Partial) else np.asarray(other).dtype.kind == "f"
        if not (self.is_float and is_float):
            raise NotCertified("partial sums are not added as floats")
        if isinstance(other, Partial):
            first, second = (self, other) if self.first == 0 else (other, self)
            a, b = first.whole, second.whole
            same = all(np.array_equal(getattr(a, x), getattr(b, x)) for x in ("kinds", "rows", "cols"))
            if first.first != 0 or second.first != first.end or not same:
                raise NotCertified("partial sums are not added each once, in the order of slices")
            end = second.end
        else:
            if np.any(np.asarray(other)):
                raise NotCertified("something else is added to a partial sum")
            first, end = self, self.end
        if first.first == 0 and end == self.count:
            return first.whole
        return Partial(first.whole, first.first, end, self.count)

    __radd__ = __add__


class Workspace:
    """A CTA's use of the workspace. If k has no slices (None), every use raises NotCertified."""

    def __init__(self, slices: Slices | None) -> None:
        self.slices = slices
        self.left = SlabContents.nothing(slices.elements if slices else 0)

    def _sliced(self) -> Slices:
        """The CTA's slice. Raises NotCertified if k has no slices."""
        if self.slices is None:
            raise NotCertified("a kernel whose k has no slices uses a workspace")
        return self.slices

    def store(self, slab: Polynomial, at: Lanes, cells: Cells) -> None:
        """Lanes store sums to a slab, at places of shape (lanes, elements of a lane)."""
        slices, left = self._sliced(), self.left
        if left.stage >= Stage.MET:
            raise NotCertified("a CTA stores partial sums after it may have been counted")
        if not slab.equals(slices.tile * slices.count + slices.own):
            raise NotCertified(f"a CTA stores partial sums to slab {slab}, which is not its own")
        if np.unique(at).size != at.size or (left.kinds[at] != EMPTY).any():
            raise NotCertified("a partial sum is stored twice to one place")
        left.kinds[at], left.rows[at], left.cols[at] = cells.kinds, cells.rows, cells.cols
        left.stage = Stage.STORED

    def load(self, slab: Polynomial, at: Lanes) -> Cells:
        """The partial sums that a CTA of the tile has stored at places of its slab."""
        slices, left = self._sliced(), self.left
        if not slices.last or left.stage != Stage.SEEING:
            raise NotCertified("partial sums are loaded before all CTAs of the tile are known to have stored theirs")
        number = slab - slices.tile * slices.count
        if not number.is_constant or not isinstance(number.constant, int) or not 0 <= number.constant < slices.count:
            raise NotCertified(f"partial sums are loaded from slab {slab}, which is none of the tile's")
        if (left.kinds[at] == EMPTY).any():
            raise NotCertified("a partial sum is loaded from where none is stored")
        whole = Cells(left.kinds[at], left.rows[at], left.cols[at], 4)
        return Partial(whole, number.constant, number.constant + 1, slices.count)

    def fence(self) -> None:
        """A fence of the whole device, by all threads."""
        moved = {Stage.STORED: Stage.FENCED, Stage.TOLD: Stage.SEEING}
        self.left.stage = moved.get(self.left.stage, self.left.stage)

    def barrier(self) -> None:
        """A barrier of all threads."""
        moved = {Stage.FENCED: Stage.MET, Stage.COUNTED: Stage.TOLD}
        self.left.stage = moved.get(self.left.stage, self.left.stage)

    @property
    def highest(self) -> int:
        """The highest value of a counter."""
        return self._sliced().count - 1

    def arrive(self, counter: Polynomial) -> Polynomial:
        """One thread adds 1 to a counter. Returns the counter's value before."""
        slices = self._sliced()
        if self.left.stage != Stage.MET:
            raise NotCertified("a CTA is counted before a fence and a barrier behind its partial sums, or twice")
        if not counter.equals(slices.tile):
            raise NotCertified(f"a CTA is counted for tile {counter}, which is not its own")
        self.left.stage = Stage.COUNTED
        return slices.arrived

    def finish(self) -> None:
        """Check that a CTA has stored and counted all that the last CTA adds."""
        if self.slices is not None and (self.left.stage < Stage.COUNTED or (self.left.kinds == EMPTY).any()):
            raise NotCertified("a CTA ends without leaving all of its partial sums")


class ItemWorkspace(Workspace):
    """The use of the workspace by a group of consumers, for one item. The group stores its partial sums and meets at
    its barrier. Then one thread counts the item, with release, which covers all that was stored before the barrier."""

    def fence(self) -> None:
        """Do nothing: a group needs no fence."""

    def barrier(self) -> None:
        """A barrier of all threads of the group."""
        if self.left.stage == Stage.STORED:
            self.left.stage = Stage.MET
