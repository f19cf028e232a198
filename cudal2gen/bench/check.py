"""After the timing every result is compared with the fp64 product, within the accumulator's error bound."""

from __future__ import annotations

from itertools import pairwise

from cudal2gen.correctness import Bounds, in_order
from cudal2gen.gpu import Call, Device
from cudal2gen.kernel import Problem
from cudal2gen.operands import Operands

BANDS = 256  # of rows and of columns of D, in each of which one is compared


class Reference:
    """The product of one set of operands, as far as it is compared: a row and a column in each of 256 bands.

    Contenders add in orders of their own, so the bound is that of sums in order.
    """

    def __init__(self, problem: Problem, operands: Operands) -> None:
        self._operands = operands
        self._rows, self._cols = bands(problem.m), bands(problem.n)
        a, b, order = operands.a, operands.b, in_order(problem.k)
        self._of_rows = Bounds(problem.acc, a[self._rows], b, order, problem.output)
        self._of_cols = Bounds(problem.acc, a, b[self._cols], order, problem.output)

    def error(self, device: Device, call: Call) -> tuple[float, str]:
        """The largest |D - reference| of a fresh call, and a finding where an element exceeds its bound."""
        d = self._operands.d
        d.fill_(float("nan"))
        call()
        device.synchronize()
        largest, finding = 0.0, ""
        for bounds, part in ((self._of_rows, d[self._rows]), (self._of_cols, d[:, self._cols])):
            comparison = bounds.compare(part)
            largest = max(largest, comparison.largest_error)
            if comparison.wrong and not finding:
                finding = (
                    f"wrong result after the timing: an error of {comparison.max_error:.4g}, "
                    f"{comparison.allowed:.4g} is allowed"
                )
        return largest, finding


def bands(extent: int) -> list[int]:
    """One index in each of up to 256 bands, not always at the same place within it."""
    count = min(extent, BANDS)
    edges = [extent * band // count for band in range(count + 1)]
    return [start + (7 * band) % (end - start) for band, (start, end) in enumerate(pairwise(edges))]
