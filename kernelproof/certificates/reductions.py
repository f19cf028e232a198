"""Describes sums of elements of a row of A by their terms, to prove kernels that compute D(i) = sum over k of A(i,k).

The terms of a sum are some k of one row: all k below ``done`` for which k modulo ``step`` is in the set ``rests``, and
``done + j`` for each j in the set ``beyond``. A set is an integer with a bit for each element. So the sum that a thread
has after any number of iterations of a loop has one form, in which only ``done`` changes.

For example, 32 threads sum a row, and a step is 32 elements. After q iterations thread 5 has added the k = 5, 37, 69,
... below 32 * q: ``done`` is 32 * q, ``rests`` is {5} and ``beyond`` is empty. After it has loaded the next element
``beyond`` is {5} too. Once shuffles have added the sums of all threads, ``rests`` has all 32 elements: each k below
``done`` was added once.

``machine`` describes what is loaded from A by such sums, and checks with ``check_stored`` what is stored to D.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernelproof.certificates.cells import Cells, Kind, unknown
from kernelproof.certificates.contract import Tile
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.polynomials import Lanes, Polynomial
from kernelproof.emulator.machine.collectives import Warps
from kernelproof.ground.chips import WARP

MOST_BEYOND = 1 << 16  # limit on the bits of ``beyond``


class Terms(Cells):
    """The sums that a register, or a vector of registers, holds in each lane.

    - ``row``: the part of their rows that depends on the problem. ``rows``: the offsets of their rows from there.
    - ``step``, ``done``: the same for all sums. ``rests``, ``beyond`` (``sets`` of the constructor): a set per sum, as
      arrays of Python integers.
    - ``known``: a mask of the sums that are known. The others may be anything.
    - ``width``: bytes of a sum. ``is_float``: whether they were last viewed as floats.

    All arrays have shape (lanes, sums of a lane) and never change.
    """

    __slots__ = ("beyond", "done", "is_float", "known", "rests", "row", "step")

    def __init__(
        self, row: Polynomial, rows: Lanes, step: int, done: Polynomial, sets: tuple[Lanes, Lanes], known: Lanes,
        width: int = 4,
    ) -> None:  # fmt: skip
        # Kind number 0 makes these unknown elements for code that handles any ``Cells``.
        super().__init__(np.zeros(rows.shape, np.int64), rows, np.zeros(rows.shape, np.int64), width)
        self.row, self.step, self.done, self.known = row, step, done, known
        self.rests, self.beyond = sets
        self.is_float = False

    @classmethod
    def of_elements(cls, cells: Cells, kind: Kind, known: Lanes, step: int) -> Terms:
        """Elements of A as sums of one term each. ``kind``: that of the elements. ``known``: a mask of the lanes whose
        elements are known, of shape (lanes,). ``step``: the k of a k-tile. Raises NotCertified if the columns of the
        elements lie too far apart."""
        # ``done`` becomes the multiple of ``step`` at or below the least column.
        least = int(cells.cols[known].min()) // step * step
        offsets = np.where(known[:, None], cells.cols - least, 0)
        if offsets.max() >= MOST_BEYOND:
            raise NotCertified(f"the columns of elements of A lie more than {MOST_BEYOND} apart")
        one = np.frompyfunc(lambda offset: 1 << int(offset), 1, 1)(offsets)
        known = np.broadcast_to(known[:, None], cells.rows.shape)
        none = np.zeros(cells.rows.shape, object)
        return cls(kind.row, cells.rows, step, kind.col + least, (none, np.where(known, one, 0)), known, cells.width)

    def _selected(self, select: Callable[[Lanes], Lanes]) -> Terms:
        """The sums that a function selects from each array, such as those of some lanes."""
        sets = (select(self.rests), select(self.beyond))
        return Terms(self.row, select(self.rows), self.step, self.done, sets, select(self.known), self.width)

    def view(self, kind: Any) -> Terms:
        """The same sums, seen as floats or as bits: only floats are added. Raises NotCertified for another width."""
        super().view(kind)
        out = self._with(self.done)
        out.is_float = np.dtype(kind).kind == "f"
        return out

    def part(self, start: int, stop: int) -> Terms:
        """The sums from number ``start`` to before ``stop`` of each lane."""
        return self._selected(lambda array: array[:, start:stop])

    def of_lanes(self, lanes: Lanes) -> Terms:
        """The sums of some lanes. ``lanes``: their numbers, or a mask."""
        return self._selected(lambda array: array[lanes])

    def moved(self, more: Polynomial) -> Terms:
        """The sums with ``done`` larger by ``more``, and the other terms moved with it."""
        return self._with(self.done + more)

    def _with(self, done: Polynomial) -> Terms:
        """A copy of the sums with another ``done``, seen as bits."""
        return Terms(self.row, self.rows, self.step, done, (self.rests, self.beyond), self.known, self.width)

    def mapped(self, change: Callable[[Polynomial], Polynomial]) -> Terms:
        """The sums for other problems: their polynomials are changed by a function."""
        out = self._with(change(self.done))
        out.row = change(self.row)
        return out

    def of_width(self, width: int) -> Terms:
        """The same sums after a conversion to a type of ``width`` bytes."""
        out = self._with(self.done)
        out.width = width
        return out

    def where(self, test: Lanes, other: Any) -> Terms:
        """These sums in the lanes in which a test holds, ``other`` elsewhere: sums of the same row, zeros, which are
        sums without terms, or elements, which become unknown. ``test``: shape (lanes,). Raises NotCertified for other
        numbers, and for sums that have no common ``done``."""
        t = test[:, None]
        if isinstance(other, np.ndarray):
            other = np.broadcast_to(other, (len(self.rows),))
            if other.dtype.kind not in "iu" or other[~test].any():
                raise NotCertified("some lanes get sums of A, and others numbers")
            # Sums without terms, with the same rows.
            none, known = np.zeros(self.rows.shape, object), np.ones(self.rows.shape, bool)
            other = Terms(self.row, self.rows, self.step, self.done, (none, none), known, self.width)
        if not isinstance(other, Terms):
            sets = (self.rests, self.beyond)
            return Terms(self.row, self.rows, self.step, self.done, sets, self.known & t, self.width)
        done, mine, its = self._aligned(other)
        sets = (np.where(t, mine[0], its[0]), np.where(t, mine[1], its[1]))
        rows, known = np.where(t, self.rows, other.rows), np.where(t, self.known, other.known)
        return Terms(self.row, rows, self.step, done, sets, known, self.width)

    def _aligned(self, other: Terms) -> tuple[Polynomial, tuple[Lanes, Lanes], tuple[Lanes, Lanes]]:
        """A common ``done``, and the pairs (rests, beyond) of both sums relative to it. It is the smaller ``done``. The
        sums with the larger one must have no terms below it, so that all their terms can be counted from the smaller
        one. Raises NotCertified otherwise, or if the difference is not known."""
        if not self.row.equals(other.row) or self.width != other.width:
            raise NotCertified("sums of different rows of A meet")
        gap = other.done - self.done
        if not gap.is_constant or not isinstance(gap.constant, int) or abs(gap.constant) > MOST_BEYOND:
            raise NotCertified(f"sums of k from {self.done} and from {other.done} on meet")
        if gap.constant < 0:
            done, its, mine = other._aligned(self)
            return done, mine, its
        if gap.constant and other.rests.any():
            raise NotCertified(f"sums of all k below {self.done} and below {other.done} meet")
        beyond = np.left_shift(other.beyond, gap.constant) if gap.constant else other.beyond
        return self.done, (self.rests, self.beyond), (other.rests, beyond)

    def __add__(self, other: Any) -> Terms:
        """The sum of floats: with the terms of both. Raises NotCertified if they have a term in common, or terms of
        different rows, or if something else is added than zeros."""
        if isinstance(other, np.ndarray) and other.dtype.kind == "f" and not other.any() and self.is_float:
            return self
        if not (isinstance(other, Terms) and self.is_float and other.is_float):
            raise NotCertified("something else is added to a sum of elements of A")
        done, mine, its = self._aligned(other)
        known = self.known & other.known
        # Both sums count from the same ``done``, so a common term is a common element of their sets.
        for a, b in zip(mine, its, strict=True):
            if ((a & b).astype(bool) & known).any():
                raise NotCertified("an element of A is added twice")
        # A sum without terms belongs to no row, so it may be added to a sum of any row.
        empty = ~(mine[0] | mine[1]).astype(bool)
        some = (its[0] | its[1]).astype(bool)
        if (known & ~empty & some & (self.rows != other.rows)).any():
            raise NotCertified("sums of different rows of A are added")
        rows = np.where(empty, other.rows, self.rows)
        return Terms(self.row, rows, self.step, done, (mine[0] | its[0], mine[1] | its[1]), known, self.width)

    __radd__ = __add__

    def settled(self) -> Terms:
        """The same sums in a normal form, with the largest ``done`` that their terms allow.

        ``done`` grows by a step while it is a multiple of the step and the next ``step`` bits of ``beyond`` are the
        set ``rests``; from 0 on, they become that set. For example, with step 4, done 0 and beyond {1, 5} become done 8
        and rests {1}.
        """
        done, rests, beyond = self.done, self.rests, self.beyond
        if not done.terms:  # no k is below 0, so ``rests`` says nothing
            rests = np.zeros_like(rests)
        while beyond.any() and not done.divided(self.step)[1].terms:
            low = beyond & ((1 << self.step) - 1)
            if done.terms and (low != rests).any():
                break
            done, rests, beyond = done + self.step, low, np.right_shift(beyond, self.step)
        return Terms(self.row, self.rows, self.step, done, (rests, beyond), self.known, self.width)

    def same(self, other: Terms) -> bool:
        """Whether ``other`` has the same sums wherever these are known."""
        a, b = self.settled(), other.settled()
        if not (a.done.equals(b.done) and a.row.equals(b.row) and a.rows.shape == b.rows.shape and a.width == b.width):
            return False
        equal = b.known & (a.rests == b.rests) & (a.beyond == b.beyond) & (a.rows == b.rows)
        return bool((equal | ~a.known).all())

    def has_all(self, end: Polynomial) -> bool:
        """Whether every sum is known and has each k from 0 to before ``end`` as a term."""
        gap = end - self.done
        if not gap.is_constant or not isinstance(gap.constant, int) or not 0 <= gap.constant <= MOST_BEYOND:
            return False
        below = not self.done.terms or bool((self.rests == (1 << self.step) - 1).all())
        return below and bool((self.beyond == (1 << gap.constant) - 1).all()) and bool(self.known.all())

    def check_stored(self, place: Cells, target: Kind | None, tile: Tile, end: Polynomial) -> None:
        """Raise NotCertified unless these sums, of all k before ``end``, belong to the elements of D to which they are
        stored. ``place``: these elements. ``target``: their kind. ``tile``: the part of D that the CTA writes."""
        if not self.has_all(end):
            raise NotCertified(f"D gets sums that do not have each element of a row up to k = {end} once")
        if target is None or not (self.row.equals(tile.row) and target.row.equals(tile.row)):
            raise NotCertified("a CTA stores sums that are not of its own rows")
        same = self.width == place.width and target.col.equals(tile.col)
        if not same or (self.rows != place.rows).any():
            raise NotCertified("D gets the sum of another row, or one that is not of its type")


def kept_places(number: int, lanes: int, size: int) -> Cells:
    """The elements of shared memory after each lane has stored ``size`` bytes of a value, for which ``Kinds.keep`` has
    returned ``number``. Their row is the storing lane, their column says which 16 bits of the lane's value they are.
    All arrays have shape (lanes, size / 2)."""
    halves = np.broadcast_to(np.arange(size // 2), (lanes, size // 2))
    owners = np.broadcast_to(np.arange(lanes)[:, None], halves.shape)
    return Cells(np.full(halves.shape, number), owners, halves, 2)


def fetched(kept: Cells, places: Cells, lanes: Lanes, size: int) -> Cells:
    """The value that some ``lanes`` of a CTA of ``size`` load where ``kept`` has been stored; unknown in other lanes.

    ``places``: for each of the loading lanes the elements that shared memory has there, made by ``kept_places``. Raises
    NotCertified unless each lane loads the complete value of one lane.
    """
    if places.bytes != kept.bytes or (places.cols != np.arange(places.kinds.shape[1])).any():
        raise NotCertified("a part of a sum is loaded from shared memory")
    if (places.rows != places.rows[:, :1]).any():
        raise NotCertified("parts of several sums are loaded as one")
    owners, loading = np.zeros(size, np.int64), np.zeros(size, bool)
    owners[lanes], loading[lanes] = places.rows[:, 0], True
    return kept.of_lanes(owners).where(loading, unknown(size, kept.kinds.shape[1], kept.width))


class _FullBatch:
    """Stands for the emulator's batch and its clocks in ``Warps``: all lanes run, and findings raise NotCertified."""

    def __init__(self, lanes: int) -> None:
        self.size, self.lane, self.alive = lanes, np.arange(lanes) % WARP, np.ones(lanes, bool)

    def words(self, value: Any) -> Lanes:
        """A value of each lane, in an array of shape (warps, 32)."""
        return np.broadcast_to(np.asarray(value).astype(np.uint32), (self.size,)).reshape(-1, WARP)

    def report_lanes(self, _rule: str, text: str, *_: Any, **__: Any) -> None:
        """Raise NotCertified for a finding."""
        raise NotCertified(text)

    def warp_sync(self, *_: Any) -> None:
        """Do nothing, since a proof does not count a shuffle as an order between threads of a warp."""


def shuffled(mode: str, lanes: int, operands: list[Lanes], m: Any, site: int) -> tuple[Lanes, Lanes]:
    """shfl.sync by all ``lanes`` of a CTA: two arrays of shape (lanes,), the number in the CTA of the lane from which
    each lane gets its value, and whether that lane was in range. ``operands``: lane, clamp and members, as in PTX.
    ``m``: the mask of the lanes that execute it, or None for all. Raises NotCertified where the emulator reports an
    error."""
    batch: Any = _FullBatch(lanes)
    lane, clamp, members = operands
    return Warps(batch, batch).shfl(mode, np.arange(lanes), lane, clamp, members, m, site)
