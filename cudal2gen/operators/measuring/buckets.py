"""Groups products of few rows into buckets of rows, for each of which one measurement of a weight suffices.

Servers compute products with many different small numbers of rows. Up to ``LARGEST`` rows, a product takes the time of
reading its weight: each row needs two operations for each 16-bit element of the weight, so r rows need r operations per
byte, and GPUs reach their peak at 153 (A100, 80 GB) to 295 (H100 SXM) operations per byte, by their data sheets. So the
time is nearly the same for all rows of a bucket (b/2, b], where b is a power of two. A bucket is measured at both ends,
and a kernel is used for it if it wins at both. A shape that is called ``HOT_CALLS`` times is measured itself. Above
``LARGEST`` rows the time is proportional to their number, so each number of rows has its own measurement.

In grouped products, as in a mixture of experts, the rows of all groups are counted together, and the last bucket ends
at ``LARGEST`` rows per group on average. The number of rows of each group is known on the device only, and differs from
call to call. If weights are not read because their groups have no rows, that holds for kernels and for torch.
"""

from __future__ import annotations

from typing import NamedTuple

from cudal2gen.kernel import Problem, serving
from cudal2gen.kernel.launch import LaunchOperands
from cudal2gen.results.choice import Choice, Row, Table

LARGEST = 256  # most rows of a bucket; in a grouped problem, per group on average
HOT_CALLS = 1000  # with products of tens of microseconds, this many calls take about as long as a race


class Bucket(NamedTuple):
    """The numbers of rows from ``least`` to ``most``, both included."""

    least: int
    most: int


def _bucket(rows: int) -> Bucket:
    """The bucket (b/2, b] that has this number of rows, where b is a power of two."""
    most = 1 << (rows - 1).bit_length()
    return Bucket(most // 2 + 1, most)


BUCKETS = tuple(_bucket(rows) for rows in range(1, LARGEST + 1))  # the bucket of each number of rows, from 1 on


def bucket(problem: Problem, products: int = 1) -> Bucket:
    """The bucket of a problem's number of rows, which are those of all groups together.

    The bucket has only this number if there are more than ``LARGEST`` rows, in a strided batch, and if A is stored as
    (k,m), which servers do not use. ``products``: the number of products; of groups, if the problem is grouped.
    """
    largest = LARGEST * (products if problem.grouped else 1)
    if problem.m > largest or (problem.batched and not problem.grouped) or not problem.along_k.a:
        return Bucket(problem.m, problem.m)
    if problem.m <= LARGEST:
        return BUCKETS[problem.m - 1]
    least, most = _bucket(problem.m)
    return Bucket(least, min(most, largest))  # ``largest`` is no power of two if the number of groups is none


def with_rows(problem: Problem, rows: int) -> Problem:
    """The problem with another number of rows."""
    return problem if rows == problem.m else problem.model_copy(update={"m": rows})


def measured(table: Table, problem: Problem, products: int = 1) -> tuple[Row, ...]:
    """The measurements of a problem's bucket: its upper and lower end, or only the upper one if no kernel wins there.
    Empty if a measurement is missing."""
    least, most = bucket(problem, products)
    if (upper := table.measured(with_rows(problem, most), products)) is None:
        return ()
    if not upper.wins or least == most:
        return (upper,)
    lower = table.measured(with_rows(problem, least), products)
    return () if lower is None else (lower, upper)


def wins(table: Table, problem: Problem, products: int = 1) -> bool:
    """Whether one kernel beats torch by measurements of the problem, or else at all measured ends of its bucket."""
    row = table.measured(problem, products)
    rows = (row,) if row is not None else measured(table, problem, products)
    return bool(rows) and all(end.wins for end in rows) and len({end.kernel for end in rows}) == 1


def choose(
    table: Table, problem: Problem, operands: LaunchOperands, extra_us: float = 0.0, products: int = 1
) -> Choice | None:  # fmt: skip
    """The choice for a problem by the measurements of its bucket. None if these are missing, or if the problem itself
    was measured. The arguments are those of ``Table.choose``."""
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
