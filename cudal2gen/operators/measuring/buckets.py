"""Buckets of rows: one measurement for all products of few rows with one weight, as a server computes them.

Up to ``LARGEST`` rows, a product takes the time of reading its weight. A row needs two operations for each 16-bit
element of the weight, and GPUs reach their peak at 153 (A100, 80 GB) to 295 (H100 SXM) operations per byte, by their
data sheets. So the time is nearly the same for all rows of a bucket (b/2, b], where b is a power of two. A bucket is
measured at both ends, and a kernel serves it if it wins at both. A shape that is called ``HOT_CALLS`` times is measured
by itself. More rows than ``LARGEST`` take time in proportion, so each number of them has a measurement of its own.

The rows of groups, as in a mixture of experts, are counted together, and the last bucket ends at ``LARGEST`` rows per
group on average: how many rows each group has is known on the device only, and differs from call to call. If groups
without rows leave weights unread, they do so for a kernel and for torch alike.
"""

from __future__ import annotations

from typing import NamedTuple

from cudal2gen.kernel import Problem, serving
from cudal2gen.kernel.launch import LaunchOperands
from cudal2gen.results.choice import Choice, Row, Table

LARGEST = 256
HOT_CALLS = 1000  # with products of tens of microseconds, this many calls take about as long as a race


class Bucket(NamedTuple):
    """The rows from ``least`` to ``most``, both included."""

    least: int
    most: int


def _bucket(rows: int) -> Bucket:
    most = 1 << (rows - 1).bit_length()
    return Bucket(most // 2 + 1, most)


BUCKETS = tuple(_bucket(rows) for rows in range(1, LARGEST + 1))  # the bucket of each number of rows, from 1 on


def bucket(problem: Problem, products: int = 1) -> Bucket:
    """The bucket of a problem's rows, counted over all groups. Many rows, those of a strided batch, and those of an A
    (k,m), to which no server adds rows, are a bucket of their own. ``products``: of a launch; the number of groups if
    the problem is grouped."""
    largest = LARGEST * (products if problem.grouped else 1)
    if problem.m > largest or (problem.batched and not problem.grouped) or not problem.along_k.a:
        return Bucket(problem.m, problem.m)
    if problem.m <= LARGEST:
        return BUCKETS[problem.m - 1]
    least, most = _bucket(problem.m)
    return Bucket(least, min(most, largest))  # not more rows a group, where their number is no power of two


def at(problem: Problem, rows: int) -> Problem:
    """The problem with another number of rows."""
    return problem if rows == problem.m else problem.model_copy(update={"m": rows})


def measured(table: Table, problem: Problem, products: int = 1) -> tuple[Row, ...]:
    """What was measured of a problem's bucket: both ends, or the upper end alone if no kernel wins it. Empty if a
    measurement is missing."""
    least, most = bucket(problem, products)
    if (upper := table.measured(at(problem, most), products)) is None:
        return ()
    if not upper.wins or least == most:
        return (upper,)
    lower = table.measured(at(problem, least), products)
    return () if lower is None else (lower, upper)


def wins(table: Table, problem: Problem, products: int = 1) -> bool:
    """Whether a kernel beats torch by measurements of the problem or of its bucket."""
    row = table.measured(problem, products)
    rows = (row,) if row is not None else measured(table, problem, products)
    return bool(rows) and all(each.wins for each in rows) and len({each.kernel for each in rows}) == 1


def choose(
    table: Table, problem: Problem, operands: LaunchOperands, extra_us: float = 0.0, products: int = 1
) -> Choice | None:  # fmt: skip
    """The choice for a problem that was not measured itself, by the measurements of its bucket; None without these.
    Arguments as of ``Table.choose``."""
    least, most = bucket(problem, products)
    if least == most or table.measured(problem, products) is not None:
        return None
    if not (rows := measured(table, problem, products)):
        return None
    scope = f"{problem.mnk}{problem.suffix} is in the bucket of {least} to {most} rows"
    sizes, reasons = serving.sizes_of(problem), []
    choice = Choice(None, None, "", "")
    for row in rows:
        choice = table.by_row(row, sizes, operands, extra_us)
        reasons.append(choice.reason)
        if choice.kernel is None:
            break
    reason = f"{scope}; {'; '.join(reasons)}"
    if choice.kernel is not None and len({row.kernel for row in rows}) > 1:
        return Choice(None, None, f"{reason}: by different kernels", "bucket measured, no kernel wins it", rows=rows)
    if choice.kernel is None:
        return Choice(None, None, reason, f"bucket {choice.short}", rows=rows)
    return Choice(choice.kernel, choice.use, reason, "bucket measured", rows=rows)
