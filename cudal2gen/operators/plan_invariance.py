"""Chooses for batch-invariant calls one kernel for all numbers of rows of a weight.

A row's result then has the same bits, whatever other rows are computed with it. A kernel sums a row over k in an order
that depends on k and on the kernel's tile and split of k, but not on the position of the row in a tile or a batch. Two
kinds of kernels are left out: stream-k, which divides k by the numbers of tiles and SMs, and texts that were written by
hand, whose order of summation is unknown.

The candidates are the kernels nearest to each number of ``ROWS``. The kernel with the least modelled time is chosen, by
the geometric mean over ``ROWS`` of its time relative to the fastest candidate. A fused or strided problem uses the
counterpart of the plain product's kernel, so that all of them sum in the same order. A grouped problem has a choice of
its own, because its kernels cannot split k.

The choice does not depend on the number of rows of a call. Whether operands are copied does not either, after
``plan_requests.in_rows``: if the rows along k are no multiples of 16 bytes, every kernel takes copies of A and B.
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

ROWS = (1, 16, 256, 4096)  # numbers of rows for which kernels are compared
NEAR = 64  # most kernels that the timing model compares for each of them
TESTED_ROWS = (1, 2, 3, *ROWS)  # a kernel that takes these takes any number of rows, up to its grid's limit of tiles
NO_KERNEL = "no kernel takes every number of rows"
NOT_MEASURED = "no kernel was measured faster for any number of rows of this weight"


class SharedKernel(NamedTuple):
    """The kernel for every number of rows: its number in the table, or None for torch; and the reason. ``short``: the
    reason without numbers, as in ``Choice``."""

    number: int | None
    reason: str
    short: str


class OneKernel:
    """The kernels that a process uses for all numbers of rows. Each is chosen once; later measurements do not change
    it."""

    def __init__(self) -> None:
        self._chosen: dict[tuple[Any, ...], SharedKernel] = {}

    def forget(self) -> None:
        """Forgets all choices, because the packs have changed."""
        self._chosen.clear()

    def choose(self, table: Table, problem: Problem, operands: LaunchOperands, measured: bool, device: int) -> Choice:
        """The choice for a problem. Every number of rows gets the same kernel; only its use (copies) may differ.

        ``measured``: whether the kernel must have been measured faster than torch for some number of rows. ``device``:
        the index of the device to which the table belongs.
        """
        plain = problem if problem.grouped else problem.revised(fusion=PLAIN, batch=NONE)
        key = (device, table.gpu, plain.kind, plain.n, plain.k, measured)
        if (chosen := self._chosen.get(key)) is None:
            chosen = self._chosen[key] = _decide(table, plain, measured)
        number = chosen.number
        if number is not None and problem.kind != plain.kind:
            number = table.counterpart(number, problem)
        if number is None:
            outcome = chosen if chosen.number is None else _no_kernel(f"its kernel is not here{problem.suffix}")
            return Choice(None, None, outcome.reason, outcome.short)
        kernel = table.kernels[number]
        use = kernel.use(Sizes(problem.m, problem.n, problem.k), operands)
        if use is None:
            return Choice(None, None, f"{kernel.record.name} does not take these operands", "operands not taken")
        return Choice(number, use, chosen.reason, chosen.short)


def _no_kernel(reason: str) -> SharedKernel:
    """The answer that no kernel serves all numbers of rows, and why."""
    return SharedKernel(None, reason, reason)


def _decide(table: Table, problem: Problem, measured: bool) -> SharedKernel:
    """The kernel for all numbers of rows of a plain or grouped problem. ``measured``: see ``OneKernel.choose``."""
    sizes, computing = sizes_of(problem), [i for i, kernel in enumerate(table.kernels) if kernel.computes(problem)]
    if not computing:
        return _no_kernel(f"no kernels for {table.gpu} {problem.types} {problem.layout}{problem.suffix}")
    # The kernels that were measured faster than torch for some number of rows of this weight.
    won = {row.kernel for row in table.rows if row.wins and row.kind == problem.kind and row.sizes[1:] == sizes[1:]}
    if measured and not won:
        return _no_kernel(NOT_MEASURED)
    near = list(dict.fromkeys(number for rows in ROWS for number in _nearest(table, computing, _at(problem, rows))))
    candidates = [number for number in computing if number in won] if measured else near
    # By kernel, a time for each of ``ROWS``; and its factor over the fastest kernel for that number of rows.
    times = {number: _modelled_us(table.kernels[number], problem) for number in {*near, *candidates}}
    fastest = [min(column) for column in zip(*times.values(), strict=True)]
    factors = {number: [us / least for us, least in zip(times[number], fastest, strict=True)] for number in candidates}
    ranked = sorted(candidates, key=lambda number: math.prod(factors[number]))
    number = next((number for number in ranked if _serves(table.kernels[number], problem)), None)
    if number is None:
        return _no_kernel(NO_KERNEL)
    mean, worst = math.prod(factors[number]) ** (1 / len(ROWS)), max(factors[number])
    reason = (
        f"one kernel for every number of rows of a weight {problem.n}x{problem.k}, that of "
        f"{table.kernels[number].sizes.text}: modelled {mean:.2f} times the time of the fastest kernel for each number "
        f"(mean of {', '.join(map(str, ROWS))} rows), at most {worst:.2f} times ({ROWS[factors[number].index(worst)]})"
    )
    return SharedKernel(number, reason, "batch-invariant")


def _nearest(table: Table, computing: Iterable[int], problem: Problem) -> list[int]:
    """The ``NEAR`` kernels whose records are nearest to a problem."""
    return sorted(computing, key=lambda number: (table.kernels[number].distance(problem), number))[:NEAR]


def _serves(kernel: TableKernel, problem: Problem) -> bool:
    """Whether a kernel takes every number of rows, and sums each row in an order that depends on k alone."""
    record = kernel.record
    if record.shares_last_wave or record.TEXTUAL:
        return False
    served = [Sizes(rows, problem.n, problem.k) for rows in TESTED_ROWS]
    return all(kernel.use(sizes, LaunchOperands.packed(problem.layout, sizes)) is not None for sizes in served)


def _modelled_us(kernel: TableKernel, problem: Problem, numbers: Sequence[int] = ROWS) -> list[float]:
    """The modelled times of a kernel in µs for each of these numbers of rows."""
    record = kernel.record
    from cudal2gen.timing import model  # imported late, as in races

    return [model.estimate(record.model_copy(update={"problem": _at(problem, rows)})).us for rows in numbers]


def _at(problem: Problem, rows: int) -> Problem:
    """The problem with this number of rows."""
    return problem.model_copy(update={"m": rows})
