"""Batch invariance: one kernel for all numbers of rows of a weight, so that a row's result has the same bits whatever
other rows are computed with it.

A kernel adds up a row by steps of k whose order follows from k and from the kernel's own tile and split of k, wherever
in a tile or a batch the row lies. Two sorts of kernels are left out: stream-k, which shares out k by the number of
tiles and of SMs, and texts that were written by hand, of whose order nothing is known.

Of the kernels nearest to each number of ``ROWS``, the one is taken whose modelled time is least on the geometric mean
over ``ROWS``, each relative to the fastest kernel there. A fused or strided problem takes the counterpart of the plain
product's kernel, so that all of them add up in one order; a grouped one has a choice of its own, because its kernels
cannot split k. What is chosen does not depend on the call's rows. Nor does what is copied, once A lies in rows
(``plan_requests.in_rows``): where k is no whole number of vectors, every kernel takes copies of A and B.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cudal2gen.kernel import Problem
from cudal2gen.kernel.fusion import NONE, PLAIN
from cudal2gen.kernel.launch import LaunchOperands, Sizes
from cudal2gen.kernel.serving import sizes_of
from cudal2gen.results.choice import Choice, Table, TableKernel

ROWS = (1, 16, 256, 4096)  # numbers of rows by which kernels are compared
NEAR = 64  # kernels that the timing model compares for each of them
SERVED = (1, 2, 3, *ROWS)  # a kernel that serves these serves any, up to its grid's limit of tiles
NO_KERNEL = "no kernel serves every number of rows alike"
NOT_MEASURED = "no kernel was measured faster for any number of rows of this weight"


class Chosen(NamedTuple):
    """What computes every number of rows: the kernel's number in the table, or None; and why."""

    number: int | None
    reason: str
    short: str


class OneKernel:
    """The kernels that a process uses for all numbers of rows. Each is decided once: what is measured later changes
    none."""

    def __init__(self) -> None:
        self._chosen: dict[tuple[Any, ...], Chosen] = {}

    def forget(self) -> None:
        """Decides anew from now on, for other packs."""
        self._chosen.clear()

    def choose(self, table: Table, problem: Problem, operands: LaunchOperands, measured: bool, device: int) -> Choice:
        """The choice for a problem. Every number of rows gets the same kernel; only its use differs. ``measured``: only
        a kernel that was measured faster for some number of rows; ``device``: the index of the table's."""
        plain = problem if problem.grouped else problem.revised(fusion=PLAIN, batch=NONE)
        key = (device, table.gpu, plain.kind, plain.n, plain.k, measured)
        if (chosen := self._chosen.get(key)) is None:
            chosen = self._chosen[key] = _decided(table, plain, measured)
        number = chosen.number
        if number is not None and problem.kind != plain.kind:
            number = table.counterpart(number, problem)
        if number is None:
            reason = chosen if chosen.number is None else _none(f"its kernel is not here{problem.suffix}")
            return Choice(None, None, reason.reason, reason.short)
        kernel = table.kernels[number]
        use = kernel.use(Sizes(problem.m, problem.n, problem.k), operands)
        if use is None:
            return Choice(None, None, f"{kernel.record.name} does not take these operands", "operands not taken")
        return Choice(number, use, chosen.reason, chosen.short)


def _none(reason: str) -> Chosen:
    return Chosen(None, reason, reason)


def _decided(table: Table, problem: Problem, measured: bool) -> Chosen:
    """The kernel for all numbers of rows of a plain or grouped problem."""
    sizes, computing = sizes_of(problem), [i for i, kernel in enumerate(table.kernels) if kernel.computes(problem)]
    if not computing:
        return _none(f"no kernels for {table.gpu} {problem.types} {problem.layout}{problem.suffix}")
    won = {row.kernel for row in table.rows if row.wins and row.kind == problem.kind and row.sizes[1:] == sizes[1:]}
    if measured and not won:
        return _none(NOT_MEASURED)
    near = list(dict.fromkeys(number for rows in ROWS for number in _nearest(table, computing, _at(problem, rows))))
    candidates = [number for number in computing if number in won] if measured else near
    times = {number: _modelled_us(table.kernels[number], problem) for number in {*near, *candidates}}
    fastest = [min(column) for column in zip(*times.values(), strict=True)]
    factors = {number: [us / least for us, least in zip(times[number], fastest, strict=True)] for number in candidates}
    ranked = sorted(candidates, key=lambda number: math.prod(factors[number]))
    number = next((number for number in ranked if _serves(table.kernels[number], problem)), None)
    if number is None:
        return _none(NO_KERNEL)
    mean, worst = math.prod(factors[number]) ** (1 / len(ROWS)), max(factors[number])
    reason = (
        f"one kernel for every number of rows of a weight {problem.n}x{problem.k}, that of "
        f"{table.kernels[number].sizes.text}: modelled {mean:.2f} times the time of the fastest kernel for each number "
        f"(mean of {', '.join(map(str, ROWS))} rows), at most {worst:.2f} times ({ROWS[factors[number].index(worst)]})"
    )
    return Chosen(number, reason, "batch-invariant")


def _nearest(table: Table, computing: Iterable[int], problem: Problem) -> list[int]:
    """The ``NEAR`` kernels whose records are nearest to a problem."""
    return sorted(computing, key=lambda number: (table.kernels[number].distance(problem), number))[:NEAR]


def _serves(kernel: TableKernel, problem: Problem) -> bool:
    """Whether a kernel takes every number of rows, and adds up each row in an order that depends on k alone."""
    record = kernel.record
    if record.shares_last_wave or record.TEXTUAL:
        return False
    served = [Sizes(rows, problem.n, problem.k) for rows in SERVED]
    return all(kernel.use(sizes, LaunchOperands.packed(problem.layout, sizes)) is not None for sizes in served)


def _modelled_us(kernel: TableKernel, problem: Problem, numbers: Sequence[int] = ROWS) -> list[float]:
    """The time that the model expects of a kernel's design for each of these numbers of rows."""
    record = kernel.record
    from cudal2gen.timing import model  # imported late, as in races

    return [model.estimate(record.model_copy(update={"problem": _at(problem, rows)})).us for rows in numbers]


def _at(problem: Problem, rows: int) -> Problem:
    return problem.model_copy(update={"m": rows})
