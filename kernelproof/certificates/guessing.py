"""Guesses the invariant of a loop from the states of two iterations. A wrong guess only makes a proof fail.

``loops`` and ``roles`` execute the loop's first iteration (or the first iterations, until its ring is at the same stage
again) and pass the states before and after. What has changed is assumed to change by as much every time. For example,
with k-tiles of 32 elements:

- a register held ``a + 2 * lda * (l / 4)`` and then ``a + 2 * lda * (l / 4) + 64``: its step is 64;
- a register held elements of A(128 * tile_m, 0) and then elements of A(128 * tile_m, 32): the step of their kind is 32;
- an accumulator was zero and then had the products of k < 32: it gains 32 products in each iteration;
- what fits none of these forms is stated to be unknown. If the kernel needs it, the proof fails.
"""

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
from kernelproof.certificates.shared_memory import ELEMENT
from kernelproof.ground.chips import WARP


class _Steps:
    """By how much k grows for each kind of elements from one iteration to the next. ``steps``: number of a kind in the
    first state -> its step. If elements of a kind suggest different steps, the first one counts."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds, self.steps = kinds, dict[int, int]()

    def unexplained(self, a: Cells, b: Cells) -> Lanes:
        """Note the steps from elements ``a`` in one iteration to ``b`` in the next, which have the same shape. Returns
        a mask of the elements whose change is no step in k, or another step than that of their kind."""
        out = np.zeros(a.kinds.shape, bool)
        for x, y in kind_pairs(a.kinds, b.kinds):
            where = (a.kinds == x) & (b.kinds == y)
            step = self._step(self.kinds[x], self.kinds[y], (b.rows - a.rows)[where], (b.cols - a.cols)[where])
            if step is None or self.steps.setdefault(x, step) != step:
                out |= where
        return out

    @staticmethod
    def _step(a: Kind | None, b: Kind | None, rows: Lanes, cols: Lanes) -> int | None:
        """The step in k from elements of kind ``a`` to those of ``b``, whose offsets differ by ``rows`` and ``cols``.
        It is the difference of the kinds plus that of the offsets, which must be the same for all elements. None if
        anything else than k differs."""
        step = kind_step(a, b)
        if step is None or a is None:
            return step
        if a.summed is not None:
            return None if rows.any() or cols.any() else step
        return None if rows.any() or (cols != cols[0]).any() else step + int(cols[0])


def guess(first: State, second: State, live: Iterable[str], variable: Callable[[str], str], kinds: Kinds) -> Invariant:
    """The invariant that the states at the loop's head in iterations 0 and 1 suggest. ``live``: the registers that may
    be read later. ``variable``: a register's name in the PTX -> its name in the emulator's text."""
    steps = _Steps(kinds)
    words, sums, terms, unknown = {}, {}, dict[str, int](), []
    for register in sorted(live):
        a, b = first.registers.get(variable(register)), second.registers.get(variable(register))
        # Sums of A's elements grow by as many k as their ``done`` does.
        if isinstance(a, Terms) and isinstance(b, Terms):
            more = b.settled().done - a.settled().done
            if more.is_constant and isinstance(more.constant, int):
                terms[register] = more.constant
            else:
                unknown.append(register)
            continue
        # An accumulator is zero in iteration 0, which stands for a sum of no products.
        places = _sum_places(a, b, kinds)
        if places is not None and isinstance(b, Cells):
            kind = kinds[b.one_kind]
            assert kind is not None
            empty = kinds.number(kind._replace(summed=SummedRange(ZERO, 0)))
            if not steps.unexplained(Cells(np.full_like(b.kinds, empty), b.rows, b.cols, b.width), b).any():
                sums[register] = places
                continue
            unknown.append(register)
        elif isinstance(a, Cells) and isinstance(b, Cells) and a.kinds.shape == b.kinds.shape:
            if steps.unexplained(a, b).any():
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
    unexplained = steps.unexplained(Cells(x.kinds, x.rows, x.cols, ELEMENT), Cells(y.kinds, y.rows, y.cols, ELEMENT))
    texts = {kind.text: step for number, step in steps.steps.items() if step and (kind := kinds[number]) is not None}
    return Invariant(
        words=words,
        kinds=texts,
        sums=sums,
        terms=terms,
        unknown=tuple(unknown),
        unknown_places=_ranges(unexplained & (x.kinds != 0)),
        written=_ranges(x.writer != y.writer),
        read=_ranges(x.reader != y.reader),
    )


def _sum_places(zeros: Any, sums: Any, kinds: Kinds) -> SumPlaces | None:
    """For a register that was ``zeros`` and now holds ``sums`` of products: the elements of D to which they belong.
    None for other registers."""
    if not (is_zero(zeros) and isinstance(sums, Cells)) or sums.bytes != zeros.dtype.itemsize:
        return None
    kind = kinds[sums.one_kind]
    if kind is None or kind.summed is None or len(sums.rows) % WARP:
        return None
    rows, cols = sums.rows[::WARP, 0], sums.cols[::WARP, 0]  # of lane 0 of each warp
    return SumPlaces(
        row=kind.row.spelled, col=kind.col.spelled, rows=tuple(rows.tolist()), cols=tuple(cols.tolist()),
        width=sums.width,
    )  # fmt: skip


def _ranges(mask: Lanes) -> Ranges:
    """The (first, last) places of the runs in which a mask, of shape (places,), is true."""
    places = np.flatnonzero(mask)
    if not len(places):
        return ()
    starts = places[np.flatnonzero(np.diff(places, prepend=-2) > 1)]
    lasts = places[np.flatnonzero(np.diff(places, append=places[-1] + 2) > 1)]
    return tuple(zip(starts.tolist(), lasts.tolist(), strict=True))
