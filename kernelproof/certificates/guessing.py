"""Guesses the invariant of a loop from the states of two iterations. A wrong guess only makes a proof fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kernelproof.certificates.cells import Cells, Kind, Kinds, SummedRange
from kernelproof.certificates.invariants import (
    Invariant,
    Ranges,
    SumPlaces,
    bits_of,
    is_number,
    is_zero,
    kind_pairs,
    kind_step,
    poly_of,
)
from kernelproof.certificates.machine import State
from kernelproof.certificates.polynomials import ZERO, Lanes
from kernelproof.certificates.reductions import Terms


class _Steps:
    """By how much k grows for each kind from one iteration to the next, as elements at the same places suggest. If
    elements of a kind suggest different steps, the first one counts."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds, self.steps = kinds, dict[int, int]()

    def lost(self, a: Cells, b: Cells) -> Lanes:
        """Note the steps of elements from one iteration to the next. Returns a mask of the elements that have none, or
        another step than their kind."""
        lost = np.zeros(a.kinds.shape, bool)
        for x, y in kind_pairs(a.kinds, b.kinds):
            where = (a.kinds == x) & (b.kinds == y)
            step = self._step(self.kinds[x], self.kinds[y], (b.rows - a.rows)[where], (b.cols - a.cols)[where])
            if step is None or self.steps.setdefault(x, step) != step:
                lost |= where
        return lost

    @staticmethod
    def _step(a: Kind | None, b: Kind | None, rows: Lanes, cols: Lanes) -> int | None:
        """The step from one kind to another, by which offsets of rows and columns grow; None if it is not one in k."""
        step = kind_step(a, b)
        if step is None or a is None:
            return step
        if a.summed is not None:
            return None if rows.any() or cols.any() else step
        return None if rows.any() or (cols != cols[0]).any() else step + int(cols[0])


def guess(first: State, second: State, live: Iterable[str], variable: Callable[[str], str], kinds: Kinds) -> Invariant:
    """The invariant that the states of iterations 0 and 1 suggest. ``live``: the registers that are read later.
    ``variable``: a register's name in the PTX -> its name in the emulator's text."""
    steps = _Steps(kinds)
    words, sums, terms, unknown = {}, {}, dict[str, int](), []
    for register in sorted(live):
        a, b = first.registers.get(variable(register)), second.registers.get(variable(register))
        if isinstance(a, Terms) and isinstance(b, Terms):
            more = b.settled().done - a.settled().done
            if more.is_constant and isinstance(more.constant, int):
                terms[register] = more.constant
            else:
                unknown.append(register)
            continue
        places = _sum_places(a, b, kinds)
        if places is not None and isinstance(b, Cells):
            kind = kinds[b.one_kind]
            assert kind is not None
            empty = kinds.number(kind._replace(summed=SummedRange(ZERO, 0)))
            if not steps.lost(Cells(np.full_like(b.kinds, empty), b.rows, b.cols, b.width), b).any():
                sums[register] = places
                continue
            unknown.append(register)
        elif isinstance(a, Cells) and isinstance(b, Cells) and a.kinds.shape == b.kinds.shape:
            if steps.lost(a, b).any():
                unknown.append(register)
        elif is_number(a) and is_number(b) and bits_of(a) == bits_of(b):
            step = poly_of(b) - poly_of(a)
            if not step.same_in_all_lanes:
                unknown.append(register)
            elif step.terms:
                words[register] = step.spelled
        else:
            unknown.append(register)
    x, y = first.shared, second.shared
    lost = steps.lost(Cells(x.kinds, x.rows, x.cols, 2), Cells(y.kinds, y.rows, y.cols, 2)) & (x.kinds != 0)
    texts = {kind.text: step for number, step in steps.steps.items() if step and (kind := kinds[number]) is not None}
    return Invariant(
        words=words,
        kinds=texts,
        sums=sums,
        terms=terms,
        unknown=tuple(unknown),
        unknown_places=_ranges(lost),
        written=_ranges(x.writer != y.writer),
        read=_ranges(x.reader != y.reader),
    )


def _sum_places(zeros: Any, sums: Any, kinds: Kinds) -> SumPlaces | None:
    """For a register that was zero and now holds sums of products: the elements of D to which they belong. None for
    other registers."""
    if not (is_zero(zeros) and isinstance(sums, Cells)) or sums.bytes != zeros.dtype.itemsize:
        return None
    kind = kinds[sums.one_kind]
    if kind is None or kind.summed is None or len(sums.rows) % 32:
        return None
    rows, cols = sums.rows[::32, 0], sums.cols[::32, 0]  # of lane 0 of each warp
    return SumPlaces(
        row=kind.row.spelled, col=kind.col.spelled, rows=tuple(rows.tolist()), cols=tuple(cols.tolist()),
        width=sums.width,
    )  # fmt: skip


def _ranges(mask: Lanes) -> Ranges:
    """Runs of places at which a mask is true."""
    places = np.flatnonzero(mask)
    if not len(places):
        return ()
    starts = places[np.flatnonzero(np.diff(places, prepend=-2) > 1)]
    lasts = places[np.flatnonzero(np.diff(places, append=places[-1] + 2) > 1)]
    return tuple(zip(starts.tolist(), lasts.tolist(), strict=True))
