"""After the timing every result is compared with the fp64 product, within the accumulator's error bound."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cudal2gen import fused
from cudal2gen.correctness import BOUND, Bounds, Comparison, in_order
from cudal2gen.gpu import Call, Device
from cudal2gen.kernel import Problem
from cudal2gen.operands import Operands

if TYPE_CHECKING:
    import torch

BANDS = 256  # of rows and of columns of D, in each of which one is compared
ROUNDINGS = 4  # to D's type: of the product, alpha, a bias and C, by who adds them one after the other


class _Part(NamedTuple):
    """Rows, or columns, of one product of a batch: what their D may be, by a kernel and by who rounds in between."""

    product: int
    rows: list[int] | slice
    cols: list[int] | slice
    strict: _Bounds
    loose: _Bounds

    def compare(self, d: torch.Tensor, strict: bool) -> Comparison:
        """D of all products against the bounds of this part."""
        own = d[self.product] if d.ndim == 3 else d
        return (self.strict if strict else self.loose).compare(own[self.rows][:, self.cols])


class _Bounds(Protocol):
    def compare(self, d: torch.Tensor) -> Comparison: ...


class _FusedBounds:
    """A fused product's reference as bounds of D."""

    def __init__(self, reference: fused.Reference[torch.Tensor]) -> None:
        self._reference = reference

    def compare(self, d: torch.Tensor) -> Comparison:
        reference = self._reference
        comparison = Comparison(BOUND, d.numel())
        errors = abs(d.double() - reference.result).nan_to_num(nan=float("inf"))
        comparison.bound(errors, reference.allowed)
        comparison.count(range(d.shape[0]), errors > reference.allowed, reference.result, d)
        return comparison


class Reference:
    """The product of one set of operands, as far as it is compared: a row and a column in each of 256 bands; of a batch
    those of its first, middle and last product.

    Contenders add in orders of their own, so the bound is that of sums in order. A fused problem has a second, looser
    one for contenders that store between its parts.
    """

    def __init__(self, problem: Problem, operands: Operands) -> None:
        self._problem, self._operands = problem, operands
        count = operands.products
        self._parts: list[_Part] = []
        for product in sorted({0, count // 2, count - 1}):
            self._parts += self._parts_of(product)

    def _parts_of(self, product: int) -> Iterator[_Part]:
        """A row and a column in each band of a product."""
        problem, operands = self._problem, self._operands
        a, b = (operands.a[product], operands.b[product]) if problem.batched else (operands.a, operands.b)
        rows, cols, every = bands(problem.m), bands(problem.n), slice(None)
        # Columns of a gated D come from pairs of the product's: rows alone compare it.
        for some_rows, some_cols in ((rows, every), (every, cols))[: 1 if problem.fusion.gate else 2]:
            strict, loose = (
                self._bounds(a[some_rows], b[some_cols], some_rows, some_cols, roundings)
                for roundings in (0, ROUNDINGS)
            )
            yield _Part(product, some_rows, some_cols, strict, loose)

    def _bounds(
        self, a: torch.Tensor, b: torch.Tensor, rows: list[int] | slice, cols: list[int] | slice, roundings: int
    ) -> _Bounds:
        """The bounds of D's part that these rows of A (m,k) and B (n,k) make."""
        problem, own, order = self._problem, self._operands, in_order(self._problem.k)
        if not problem.fusion:
            return Bounds(problem.acc, a, b, order, problem.output)
        along = rows if problem.fusion.bias == "m" else cols
        read = fused.FusedOperands(
            None if own.bias is None else own.bias[along],
            None if own.c is None else own.c[rows][:, cols],
            own.alpha,
            own.beta,
        )
        return _FusedBounds(
            fused.reference(problem.acc, problem.fusion, "normal", a, b, read, order, problem.output, roundings)
        )

    def error(self, device: Device, call: Call, strict: bool = True) -> tuple[float, str]:
        """The largest |D - reference| of a fresh call, and a finding where an element exceeds its bound. ``strict``:
        whether the contender rounds a fused D once."""
        d = self._operands.d
        d.fill_(float("nan"))
        call()
        device.synchronize()
        largest, finding = 0.0, ""
        for part in self._parts:
            comparison = part.compare(d, strict)
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
