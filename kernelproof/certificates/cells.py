"""Data known by their origin: which element of an operand, or which sum of products, a register or address holds.

A proof does not know the values of A and B, only where each datum comes from. It is an element such as A(row, col), or
the sum of A(row, k) * B(col, k) over a set of k. ``machine`` gives a load from an operand such elements, copies and
``products`` pass them on, and a store to D must have exactly the sum that belongs there.

The parts of row and col that depend on the problem are the same for many elements. So they are kept once, as a ``Kind``
with a number, and each element has that number and two offsets. For example, lane l may hold A(128 * tile_m + l / 4,
32 * k_turn + l % 4): the kind is A(128 * tile_m, 32 * k_turn), and the offsets are l / 4 and l % 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.polynomials import ZERO, Lanes, Polynomial

KEPT = "kept"  # how the ``source`` of a kind begins that stands for a value in shared memory
_MOST_BEYOND = 4096  # limit on how far a product's k may be ahead of ``done``
Key = frozenset[tuple[tuple[str, ...], int]]  # the ``key`` of a polynomial


@dataclass(frozen=True)
class SummedRange:
    """The k whose products a sum has: all from 0 to before ``done``, and ``done + i`` for each set bit i of ``beyond``.

    Bit 0 of ``beyond`` is never set: ``done`` would be larger. For example, after the products of k < 64, and of 65 and
    67, ``done`` is 64 and ``beyond`` 0b1010. When k = 64 is added, ``done`` becomes 66 and ``beyond`` 0b10.
    """

    done: Polynomial
    beyond: int

    @property
    def key(self) -> tuple[Key, int]:
        """A key that is equal for equal sets of k."""
        return self.done.key, self.beyond

    def plus(self, base: Polynomial, offsets: tuple[int, ...]) -> SummedRange:
        """The range after adding the products of k = ``base`` + offset, for each offset.

        Raises NotCertified if the range contains one of these k already, or if their distance from ``done`` is not a
        known number.
        """
        gap = base - self.done
        if not gap.is_constant or not isinstance(gap.constant, int):
            raise NotCertified(f"products from k = {base} on are added to a sum that has those before k = {self.done}")
        beyond = self.beyond
        for offset in offsets:
            bit = gap.constant + offset
            if bit < 0 or beyond >> bit & 1:
                raise NotCertified(f"the products of k = {base + offset} are added twice")
            if bit > _MOST_BEYOND:
                raise NotCertified(f"products of k = {base + offset} are added before those of k = {self.done}")
            beyond |= 1 << bit
        run = ((beyond + 1) & ~beyond).bit_length() - 1  # how many low bits are set: these k now precede ``done``
        return SummedRange(self.done + run, beyond >> run)


class Kind(NamedTuple):
    """What elements have in common.

    ``source``: the operand, such as ``A``; ``sum`` for sums of products; or KEPT and a number. ``row``, ``col``: the
    parts of row and col that depend on the problem, in elements. ``summed``: the k of a sum; None for other elements.
    """

    source: str
    row: Polynomial
    col: Polynomial
    summed: SummedRange | None = None

    @property
    def is_kept(self) -> bool:
        """Whether ``Kinds.keep`` has made this kind."""
        return self.source.startswith(KEPT)

    @property
    def text(self) -> str:
        """The kind in words, which are different for different kinds."""
        k = f" over k < {self.summed.done}, {self.summed.beyond:x}" if self.summed else ""
        return f"{self.source}({self.row}, {self.col}){k}"


class Kinds:
    """Gives kinds numbers, so that arrays of elements can hold them. Number 0 (None) stands for elements that are not
    known, from which nothing may be computed. ``kept``: the values of ``keep``, in its order."""

    def __init__(self) -> None:
        self._by_number: list[Kind | None] = [None]
        self._numbers: dict[object, int] = {}
        self.kept: list[Cells] = []

    def number(self, kind: Kind) -> int:
        """The number of a kind; equal kinds have the same one."""
        key = (kind.source, kind.row.key, kind.col.key, kind.summed.key if kind.summed else None)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._by_number)
            self._by_number.append(kind)
        return number

    def keep(self, value: Cells) -> int:
        """The number of a new kind, for elements of shared memory to which ``value`` is stored, such as sums of A's
        elements. The row of such an element is the lane of ``value`` that has stored it. The value is one of this
        execution: where a state is used for other problems or iterations, such elements become unknown."""
        self.kept.append(value)
        return self.number(Kind(f"{KEPT} {len(self.kept) - 1}", ZERO, ZERO))

    def kept_by(self, number: int) -> Cells | None:
        """The value for which ``keep`` has returned a number; None for other numbers."""
        kind = self._by_number[number]
        return self.kept[int(kind.source.split()[1])] if kind is not None and kind.is_kept else None

    def __getitem__(self, number: int) -> Kind | None:
        """The kind with a number; None for 0."""
        return self._by_number[number]


class Elements(Protocol):
    """Elements of matrices in arrays of one shape: the numbers of their kinds, and their rows and columns."""

    kinds: Lanes
    rows: Lanes
    cols: Lanes


def same_elements(a: Elements, b: Elements) -> bool:
    """Whether two hold the same elements at the same places."""
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("kinds", "rows", "cols"))


class Cells:
    """The elements that a register, or a vector of registers, holds in each lane.

    ``kinds``: their numbers in ``Kinds``. ``rows``, ``cols``: offsets from the kind's row and col. All three arrays are
    integers of shape (lanes, elements of a lane), and never change. ``width``: bytes of an element.
    """

    __slots__ = ("_one_kind", "cols", "kinds", "rows", "width")
    __array_ufunc__ = None

    def __init__(self, kinds: Lanes, rows: Lanes, cols: Lanes, width: int) -> None:
        self.kinds, self.rows, self.cols, self.width = kinds, rows, cols, width
        self._one_kind = -1  # the value of ``one_kind``; -1 before it is first asked for

    # By default Python would compare identities, and a branch by data would seem decided.
    def __eq__(self, other: object) -> Any:
        raise NotCertified("data decide a branch or a predicate")

    __ne__ = __eq__
    __hash__ = None  # type: ignore[assignment]

    def view(self, kind: Any) -> Cells:
        """The same elements, seen as another type of the same width, which does not change their origin. Raises
        NotCertified for a type of another width."""
        if np.dtype(kind).itemsize != self.width:
            raise NotCertified("an element is taken apart")
        return self

    def part(self, start: int, stop: int) -> Cells:
        """The elements from number ``start`` to before ``stop`` of each lane."""
        return Cells(self.kinds[:, start:stop], self.rows[:, start:stop], self.cols[:, start:stop], self.width)

    def of_width(self, width: int) -> Cells:
        """The same elements after a conversion to a type of ``width`` bytes."""
        return Cells(self.kinds, self.rows, self.cols, width)

    def of_lanes(self, lanes: Lanes) -> Cells:
        """The elements of some lanes. ``lanes``: their numbers, or a mask."""
        return Cells(self.kinds[lanes], self.rows[lanes], self.cols[lanes], self.width)

    def where(self, test: Lanes, other: Cells) -> Cells:
        """These elements in the lanes in which a test holds, those of ``other`` elsewhere. ``test``: shape (lanes,)."""
        t = test[:, None]
        return Cells(
            np.where(t, self.kinds, other.kinds), np.where(t, self.rows, other.rows),
            np.where(t, self.cols, other.cols), self.width,
        )  # fmt: skip

    @property
    def bytes(self) -> int:
        """Bytes of all elements of a lane."""
        return int(self.kinds.shape[1]) * self.width

    @property
    def one_kind(self) -> int:
        """The number of the kind that all elements have; 0 if they have several, or are not known."""
        if self._one_kind < 0:
            first = int(self.kinds.flat[0])
            self._one_kind = first if (self.kinds == first).all() else 0
        return self._one_kind


def joined(parts: list[Cells]) -> Cells:
    """The elements of several registers side by side, as of a vector. Raises NotCertified for different widths."""
    if len({part.width for part in parts}) > 1:
        raise NotCertified("elements of different widths in one access")
    return Cells(
        np.concatenate([part.kinds for part in parts], 1), np.concatenate([part.rows for part in parts], 1),
        np.concatenate([part.cols for part in parts], 1), parts[0].width,
    )  # fmt: skip


def unknown(lanes: int, count: int, width: int) -> Cells:
    """Elements of which nothing is known, ``count`` of ``width`` bytes in each lane."""
    zero = np.zeros((lanes, count), np.int64)
    return Cells(zero, zero, zero, width)


class Unknown:
    """A register of which nothing is known. It can be copied. A comparison raises NotCertified, every other operation
    TypeError or AttributeError."""

    __array_ufunc__ = None

    def __eq__(self, other: object) -> Any:
        raise NotCertified("a branch or a predicate by what is not known")

    __ne__ = __eq__
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = Unknown()
