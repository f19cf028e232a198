"""Data known by their origin: for registers and shared memory, which elements of the operands they hold, not values.

An element is A(row, col) of an operand, or a sum of products A(row, k) * B(col, k) over a set of k. The parts of row
and col that depend on the problem are the same for many elements, so they are kept once, as a ``Kind`` with a number;
each element has that number and two offsets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.polynomials import ZERO, Lanes, Polynomial

KEPT = "kept"
Key = frozenset[tuple[tuple[str, ...], int]]


@dataclass(frozen=True)
class SummedRange:
    """The k whose products a sum has: all from 0 to before ``done``, and ``done + i`` for each set bit i of
    ``beyond``."""

    done: Polynomial
    beyond: int

    @property
    def key(self) -> tuple[Key, int]:
        return self.done.key, self.beyond

    def plus(self, base: Polynomial, offsets: tuple[int, ...]) -> SummedRange:
        """The range after products of more k are added: ``base`` plus each offset. Raises NotCertified if it has one of
        them already, or if their distance from ``done`` is not known."""
        gap = base - self.done
        if not gap.is_constant or not isinstance(gap.constant, int):
            raise NotCertified(f"products from k = {base} on are added to a sum that has those before k = {self.done}")
        beyond = self.beyond
        for offset in offsets:
            at = gap.constant + offset
            if at < 0 or beyond >> at & 1:
                raise NotCertified(f"the products of k = {base + offset} are added twice")
            if at > 4096:
                raise NotCertified(f"products of k = {base + offset} are added before those of k = {self.done}")
            beyond |= 1 << at
        run = ((beyond + 1) & ~beyond).bit_length() - 1  # how many low bits are set: these k now precede ``done``
        return SummedRange(self.done + run, beyond >> run)


class Kind(NamedTuple):
    """What elements have in common: the operand (or ``sum``), and the parts of row and col that depend on the problem.
    ``summed``: the k of a sum."""

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
        """The kind in words; different ones for different kinds."""
        k = f" over k < {self.summed.done}, {self.summed.beyond:x}" if self.summed else ""
        return f"{self.source}({self.row}, {self.col}){k}"


class Kinds:
    """Numbers for kinds. Number 0 stands for elements that are not known, from which nothing may be computed."""

    def __init__(self) -> None:
        self.all: list[Kind | None] = [None]
        self._numbers: dict[object, int] = {}
        self.kept: list[Cells] = []

    def number(self, kind: Kind) -> int:
        """The number of a kind; equal kinds have the same one."""
        key = (kind.source, kind.row.key, kind.col.key, kind.summed.key if kind.summed else None)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.all)
            self.all.append(kind)
        return number

    def keep(self, value: Cells) -> int:
        """Number a new kind for a value that is stored to shared memory. The row of such an element is its lane in
        ``value``. When a state is carried over to other problems, such elements become unknown."""
        self.kept.append(value)
        return self.number(Kind(f"{KEPT} {len(self.kept) - 1}", ZERO, ZERO))

    def kept_by(self, number: int) -> Cells | None:
        """The value for which ``keep`` has returned a number; None for other numbers."""
        kind = self.all[number]
        return self.kept[int(kind.source.split()[1])] if kind is not None and kind.is_kept else None

    def __getitem__(self, number: int) -> Kind | None:
        return self.all[number]


class Cells:
    """The elements that a register holds in each lane. All arrays have shape (lanes, elements of a lane) and never
    change. ``kinds``: numbers of kinds. ``rows``, ``cols``: offsets from the kind's row and col. ``width``: bytes of an
    element."""

    __slots__ = ("_one_kind", "cols", "kinds", "rows", "width")
    __array_ufunc__ = None

    def __init__(self, kinds: Lanes, rows: Lanes, cols: Lanes, width: int) -> None:
        self.kinds, self.rows, self.cols, self.width = kinds, rows, cols, width
        self._one_kind = -1

    # Python's own answer would be that two elements are equal if they are one object.
    def __eq__(self, other: object) -> Any:
        raise NotCertified("data decide a branch or a predicate")

    __ne__ = __eq__
    __hash__ = None  # type: ignore[assignment]

    def view(self, kind: Any) -> Cells:
        """The same elements. A view as another type of the same width does not change which elements they are."""
        if np.dtype(kind).itemsize != self.width:
            raise NotCertified("an element is taken apart")
        return self

    def part(self, start: int, stop: int) -> Cells:
        """Some of each lane's elements."""
        return Cells(self.kinds[:, start:stop], self.rows[:, start:stop], self.cols[:, start:stop], self.width)

    def of_width(self, width: int) -> Cells:
        """The elements as numbers of another width."""
        return Cells(self.kinds, self.rows, self.cols, width)

    def of_lanes(self, lanes: Lanes) -> Cells:
        """The elements that some lanes have."""
        return Cells(self.kinds[lanes], self.rows[lanes], self.cols[lanes], self.width)

    def where(self, test: Lanes, other: Cells) -> Cells:
        """These elements in the lanes in which a test holds, others elsewhere."""
        t = test[:, None]
        return Cells(
            np.where(t, self.kinds, other.kinds), np.where(t, self.rows, other.rows),
            np.where(t, self.cols, other.cols), self.width,
        )  # fmt: skip

    @property
    def bytes(self) -> int:
        """Bytes of a lane."""
        return int(self.kinds.shape[1]) * self.width

    @property
    def one_kind(self) -> int:
        """The number of the kind that all elements have, 0 if there are several."""
        if self._one_kind < 0:
            first = int(self.kinds.flat[0])
            self._one_kind = first if (self.kinds == first).all() else 0
        return self._one_kind


def joined(parts: list[Cells]) -> Cells:
    """The elements of several registers side by side."""
    if len({part.width for part in parts}) > 1:
        raise NotCertified("elements of different widths in one access")
    return Cells(
        np.concatenate([part.kinds for part in parts], 1), np.concatenate([part.rows for part in parts], 1),
        np.concatenate([part.cols for part in parts], 1), parts[0].width,
    )  # fmt: skip


def unknown(lanes: int, count: int, width: int) -> Cells:
    """Elements of which nothing is known."""
    zero = np.zeros((lanes, count), np.int64)
    return Cells(zero, zero, zero, width)


class Unknown:
    """A register of which nothing is known: it can be copied, and every other use of it fails."""

    __array_ufunc__ = None

    def __eq__(self, other: object) -> Any:
        raise NotCertified("a branch or a predicate by what is not known")

    __ne__ = __eq__
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = Unknown()
