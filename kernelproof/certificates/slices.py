"""Split-k: checks that a CTA stores its partial sums to a workspace, and that the last CTA of a tile adds all of them.

Each CTA of a tile sums a slice of its k, and stores its sums to its own slab of the workspace. Its threads execute a
fence and a barrier, and then one thread counts the CTA in the tile's counter. Counters are zero before a launch, so of
a tile's ``count`` CTAs exactly one finds ``count - 1`` there, and all others less: that one arrives last. The increment
wraps around at ``count - 1``, so the launch leaves the counter at zero. After another barrier and fence the last CTA
sees all slabs, and adds them in the order of slices. All CTAs of a tile execute the same text with the same threads, so
the other slabs have sums of the same elements at the same places as its own.

``machine`` calls ``Workspace`` at each of these instructions. ``part_machine`` uses ``ItemWorkspace`` for pipelines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np

from kernelproof.certificates.cells import Cells, same_elements
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.polynomials import Lanes, Polynomial

EMPTY = -1  # in place of the number of a kind


@dataclass(frozen=True)
class Slices:
    """A CTA's slice of its tile's k.

    ``count``: how many slices the tile has, and so CTAs and slabs. ``own``: the number of the CTA's slice, from 0 on.
    ``tile``: the number of the tile; its slab for slice s is number tile * count + s. ``elements``: how many sums a
    slab has. ``arrived``: how many of the tile's CTAs were counted before this one. ``slab``: the number of the own
    slab, if it is another one.
    """

    count: int
    own: Polynomial
    tile: Polynomial
    elements: int
    arrived: Polynomial
    slab: Polynomial | None = None

    @property
    def own_slab(self) -> Polynomial:
        """The number of the CTA's own slab."""
        return self.tile * self.count + self.own if self.slab is None else self.slab

    @property
    def last(self) -> bool:
        """Whether the CTA arrives last."""
        return self.arrived.equals(Polynomial.of(self.count - 1))

    def mapped(self, change: Callable[[Polynomial], Polynomial]) -> Slices:
        """The slice for other problems: its polynomials are changed by a function, except for ``arrived``."""
        slab = None if self.slab is None else change(self.slab)
        return replace(self, own=change(self.own), tile=change(self.tile), slab=slab)


class Stage(IntEnum):
    """How far a CTA is with its partial sums. Each stage follows the one before it. All threads reach a stage together,
    except for COUNTED."""

    SUMMING = 0  # no partial sum is stored yet
    STORED = 1  # partial sums are stored
    FENCED = 2  # all threads have executed a fence after that
    MET = 3  # and then a barrier
    COUNTED = 4  # one thread has counted the CTA
    SYNCHRONIZED = 5  # all threads have executed another barrier
    VISIBLE = 6  # and another fence: if the CTA arrives last, it may load all slabs


@dataclass
class SlabContents:
    """What a CTA has stored to its slab, and how far it is. ``kinds``, ``rows``, ``cols``: for each place of the slab,
    in units of a sum, the number of the sum's kind (EMPTY for none) and its offsets, as in ``Cells``."""

    stage: Stage
    kinds: Lanes
    rows: Lanes
    cols: Lanes

    @classmethod
    def nothing(cls, elements: int) -> SlabContents:
        """An empty slab."""
        return cls(Stage.SUMMING, *(np.full(elements, EMPTY, np.int64) for _ in range(3)))

    def same(self, other: SlabContents) -> bool:
        """Whether two CTAs have stored the same and are equally far."""
        return self.stage == other.stage and same_elements(self, other)

    def copied(self) -> SlabContents:
        """A copy that changes independently."""
        return SlabContents(self.stage, self.kinds.copy(), self.rows.copy(), self.cols.copy())


class Complete(Cells):
    """Sums over all slices, to which nothing can be added but zeros. ``is_float``: as in ``Partial``."""

    __slots__ = ("is_float",)

    def __init__(self, sums: Cells) -> None:
        super().__init__(sums.kinds, sums.rows, sums.cols, sums.width)
        self.is_float = False

    def view(self, kind: Any) -> Complete:
        super().view(kind)
        out = Complete(self)
        out.is_float = np.dtype(kind).kind == "f"
        return out

    def __add__(self, other: Any) -> Complete:
        is_zero = isinstance(other, np.ndarray) and other.dtype.kind == "f" and not other.any()
        if not (self.is_float and is_zero):
            raise NotCertified("something else than zeros is added to a sum over all slices")
        return Complete(self)

    __radd__ = __add__


class Partial(Cells):
    """Partial sums, or what was added of them so far: the sums over the slices from ``first`` to before ``end``, of
    ``count``. ``whole``: the complete sums of the same elements, which an addition returns once it has all slices."""

    __slots__ = ("count", "end", "first", "is_float", "whole")

    def __init__(self, whole: Cells, first: Polynomial, end: Polynomial, count: Polynomial) -> None:
        super().__init__(np.zeros_like(whole.kinds), whole.rows, whole.cols, whole.width)
        self.whole, self.first, self.end, self.count = whole, first, end, count
        self.is_float = False

    def view(self, kind: Any) -> Partial:
        """The same sums, seen as floats or as bits: only floats are added. Raises NotCertified for another width."""
        super().view(kind)
        out = Partial(self.whole, self.first, self.end, self.count)
        out.is_float = np.dtype(kind).kind == "f"
        return out

    def part(self, start: int, stop: int) -> Partial:
        """The sums from number ``start`` to before ``stop`` of each lane."""
        return Partial(self.whole.part(start, stop), self.first, self.end, self.count)

    def __add__(self, other: Any) -> Cells:
        """The sum, as floats, with zeros, or with the next slices: the first summand must have all slices before those
        of the second one. Raises NotCertified otherwise, so no slice is added twice or out of order."""
        is_float = other.is_float if isinstance(other, Partial) else np.asarray(other).dtype.kind == "f"
        if not (self.is_float and is_float):
            raise NotCertified("partial sums are not added as floats")
        if isinstance(other, Partial):
            first, second = (self, other) if not self.first.terms else (other, self)
            same = same_elements(first.whole, second.whole) and self.count.equals(other.count)
            if first.first.terms or not second.first.equals(first.end) or not same:
                raise NotCertified("partial sums are not added each once, in the order of slices")
            end = second.end
        else:
            if np.any(np.asarray(other)):
                raise NotCertified("something else is added to a partial sum")
            first, end = self, self.end
        if not first.first.terms and end.equals(self.count):
            return Complete(first.whole)
        return Partial(first.whole, first.first, end, self.count)

    __radd__ = __add__


class Workspace:
    """A CTA's use of the workspace. ``slices``: the CTA's slice; None if k has none: then every use raises
    NotCertified. ``contents``: what the CTA has stored, and how far it is."""

    def __init__(self, slices: Slices | None) -> None:
        self.slices = slices
        self.contents = SlabContents.nothing(slices.elements if slices else 0)

    def _own_slice(self) -> Slices:
        """The CTA's slice. Raises NotCertified if k has no slices."""
        if self.slices is None:
            raise NotCertified("a kernel whose k has no slices uses a workspace")
        return self.slices

    def store(self, slab: Polynomial, at: Lanes, cells: Cells) -> None:
        """Lanes store sums to slab number ``slab``, at places ``at`` in units of a sum, shape (lanes, sums of a lane).
        Raises NotCertified if the slab is not the CTA's own, a place has a sum already, or the CTA may be counted."""
        slices, contents = self._own_slice(), self.contents
        if contents.stage >= Stage.MET:
            raise NotCertified("a CTA stores partial sums after it may have been counted")
        if not slab.equals(slices.own_slab):
            raise NotCertified(f"a CTA stores partial sums to slab {slab}, which is not its own")
        if np.unique(at).size != at.size or (contents.kinds[at] != EMPTY).any():
            raise NotCertified("a partial sum is stored twice to one place")
        contents.kinds[at], contents.rows[at], contents.cols[at] = cells.kinds, cells.rows, cells.cols
        contents.stage = Stage.STORED

    def load(self, slab: Polynomial, at: Lanes) -> Cells:
        """The partial sums that a CTA of the tile has stored to slab number ``slab``, at places ``at`` as in ``store``.
        Raises NotCertified unless the CTA arrives last and may see them."""
        slices, contents = self._own_slice(), self.contents
        if not slices.last or contents.stage != Stage.VISIBLE:
            raise NotCertified("partial sums are loaded before all CTAs of the tile are known to have stored theirs")
        number = slab - slices.tile * slices.count
        if not number.is_constant or not isinstance(number.constant, int) or not 0 <= number.constant < slices.count:
            raise NotCertified(f"partial sums are loaded from slab {slab}, which is none of the tile's")
        if (contents.kinds[at] == EMPTY).any():
            raise NotCertified("a partial sum is loaded from where none is stored")
        whole = Cells(contents.kinds[at], contents.rows[at], contents.cols[at], 4)
        return Partial(whole, number, number + 1, Polynomial.of(slices.count))

    def fence(self) -> None:
        """A fence at the scope of the device, by all threads."""
        following = {Stage.STORED: Stage.FENCED, Stage.SYNCHRONIZED: Stage.VISIBLE}
        self.contents.stage = following.get(self.contents.stage, self.contents.stage)

    def barrier(self) -> None:
        """A barrier of all threads."""
        following = {Stage.FENCED: Stage.MET, Stage.COUNTED: Stage.SYNCHRONIZED}
        self.contents.stage = following.get(self.contents.stage, self.contents.stage)

    @property
    def highest(self) -> int:
        """The highest value of a counter, at which its increment wraps around to 0."""
        return self._own_slice().count - 1

    def arrive(self, counter: Polynomial) -> Polynomial:
        """One thread adds 1 to the counter of tile number ``counter``. Returns the counter's value before. Raises
        NotCertified unless it is the CTA's tile, all is stored, and the CTA was not counted before."""
        slices = self._own_slice()
        if self.contents.stage != Stage.MET:
            raise NotCertified("a CTA is counted before a fence and a barrier after its partial sums, or twice")
        if not counter.equals(slices.tile):
            raise NotCertified(f"a CTA is counted for tile {counter}, which is not its own")
        self.contents.stage = Stage.COUNTED
        return slices.arrived

    def finish(self) -> None:
        """Raise NotCertified if a CTA ends without having stored all sums of its slab, or without being counted."""
        if self.slices is not None and (self.contents.stage < Stage.COUNTED or (self.contents.kinds == EMPTY).any()):
            raise NotCertified("a CTA ends without leaving all of its partial sums")


class ItemWorkspace(Workspace):
    """The use of the workspace by a group of consumers, for one item. The group stores its partial sums and executes
    its barrier. Then one thread counts the item, with release, which covers all stores before the barrier."""

    def fence(self) -> None:
        """Do nothing: a group needs no fence, since its count releases."""

    def barrier(self) -> None:
        """A barrier of all threads of the group."""
        if self.contents.stage == Stage.STORED:
            self.contents.stage = Stage.MET
