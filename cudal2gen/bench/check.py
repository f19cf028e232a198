"""Checks after the timing that each contender computed the right product.

A benchmark must not count a fast wrong result. So every contender runs once more into a D filled with NaN, and D is
compared with the product in fp64. Comparing all of D would take longer than the timing, so D is divided into bands, and
one row or column of each band is compared. An element may differ by no more than the rounding error that the
accumulator's type allows for a sum of K terms in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cudal2gen.kernel import Problem
from cudal2gen.launch.gpu import Call, MeasuringDevice
from cudal2gen.launch.operands import Operands
from cudal2gen.validator import fused
from cudal2gen.validator.correctness import BOUND, Bounds, Comparison, in_order

if TYPE_CHECKING:
    import torch

BANDS = 256  # D has at most this many bands of rows, and of columns; one row or column of each is compared
ROUNDINGS = 4  # a contender without fusion rounds to D's type up to four times: product, alpha, bias and C


class _Product(NamedTuple):
    """One product of a launch: its index or its rows in D (``place``), and its operands."""

    place: int | slice
    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    c: torch.Tensor | None


class _Part(NamedTuple):
    """Some rows or columns of one product's D, and the values allowed there.

    ``strict`` are the bounds of contenders that round D once; ``loose`` those of contenders that store D after each
    step of a fusion.
    """

    place: int | slice
    rows: list[int] | slice
    cols: list[int] | slice
    strict: _Bounds
    loose: _Bounds

    def compare(self, d: torch.Tensor, strict: bool) -> Comparison:
        """Compares this part of ``d``, which holds all products of the launch, with its bounds."""
        return (self.strict if strict else self.loose).compare(d[self.place][self.rows][:, self.cols])


class _Bounds(Protocol):
    """The reference of some elements of D, and how far D may differ from it."""

    @property
    def result(self) -> torch.Tensor: ...
    def compare(self, d: torch.Tensor) -> Comparison: ...


class _FusedBounds:
    """The bounds of D that a fused product's reference gives."""

    def __init__(self, reference: fused.Reference[torch.Tensor]) -> None:
        self._reference = reference

    @property
    def result(self) -> torch.Tensor:
        """The fused product in fp64."""
        return self._reference.result

    def compare(self, d: torch.Tensor) -> Comparison:
        """Compares D with the fp64 reference, within the bound of each element."""
        reference = self._reference
        comparison = Comparison(BOUND, d.numel())
        errors = abs(d.double() - reference.result).nan_to_num(nan=float("inf"))
        comparison.add_errors(errors, reference.allowed)
        comparison.count(range(d.shape[0]), errors > reference.allowed, reference.result, d)
        return comparison


class Reference:
    """The fp64 product of one set of operands, in the rows and columns that are compared.

    These are one row and one column of each of up to 256 bands. In a batch, only the first, middle and last product
    are compared; in a grouped product, those of the groups that have rows. Contenders add in orders that we do not
    know, so the bound is the one for sequential summation, which is the loosest. A fused problem has a second bound
    for contenders that round D between the steps of the fusion.
    """

    def __init__(self, problem: Problem, operands: Operands) -> None:
        self._problem, self._operands = problem, operands
        self._parts = [part for product in self._products() for part in self._parts_of(product)]

    def _products(self) -> Iterator[_Product]:
        """The first, middle and last product; in a grouped problem, of those groups that have rows."""
        problem, operands = self._problem, self._operands
        # Group i has the rows from ends[i] to before ends[i + 1]; only a grouped problem has ends.
        ends = [0] if operands.ends is None else [0, *operands.ends.tolist()]
        filled = [i for i in range(operands.products) if not problem.grouped or ends[i + 1] > ends[i]]
        for i in sorted({filled[0], filled[len(filled) // 2], filled[-1]}) if filled else ():
            bias = operands.bias[i] if operands.bias is not None and operands.bias.ndim == 2 else operands.bias
            if not problem.batched:
                yield _Product(slice(None), operands.a, operands.b, bias, operands.c)
            elif not problem.grouped:
                yield _Product(i, operands.a[i], operands.b[i], bias, operands.c[i] if operands.c is not None else None)
            else:
                rows = slice(ends[i], ends[i + 1])
                group_bias = bias[rows] if bias is not None and problem.fusion.bias == "m" else bias
                yield _Product(
                    rows,
                    operands.a[rows],
                    operands.b[i],
                    group_bias,
                    operands.c[rows] if operands.c is not None else None,
                )

    def _parts_of(self, product: _Product) -> Iterator[_Part]:
        """The compared rows of a product, then the compared columns: one of each band."""
        problem, all_places = self._problem, slice(None)
        rows, cols = bands(product.a.shape[0]), bands(problem.n)
        # A column of a gated D comes from a pair of the product's columns, so single columns of the product do not
        # determine it; only complete rows are compared.
        for some_rows, some_cols in ((rows, all_places), (all_places, cols))[: 1 if problem.fusion.gate else 2]:
            loose = strict = self._bounds(product, some_rows, some_cols, 0)
            if problem.fusion:  # without a fusion every contender rounds D once
                loose = self._bounds(product, some_rows, some_cols, ROUNDINGS)
            yield _Part(product.place, some_rows, some_cols, strict, loose)

    def _bounds(self, product: _Product, rows: list[int] | slice, cols: list[int] | slice, roundings: int) -> _Bounds:
        """The bounds of these rows and columns of a product's D."""
        problem, operands, order = self._problem, self._operands, in_order(self._problem.k)
        a, b = product.a[rows], product.b[cols]
        if not problem.fusion:
            return Bounds(problem.acc, a, b, order, problem.output)
        biased = rows if problem.fusion.bias == "m" else cols
        fused_operands = fused.FusedOperands(
            None if product.bias is None else product.bias[biased],
            None if product.c is None else product.c[rows][:, cols],
            operands.alpha,
            operands.beta,
        )
        fused_product = fused.FusedProduct(
            problem.acc, problem.fusion, "normal", a, b, fused_operands, order, problem.output
        )
        return _FusedBounds(fused_product.reference(roundings))

    def error(self, device: MeasuringDevice, call: Call, strict: bool = True) -> tuple[float, str]:
        """Runs the contender once more; returns the largest |D - reference|, and a finding if D exceeds its bound.

        ``strict``: whether the contender rounds a fused D only once. The finding is empty if D is right.
        """
        d = self._operands.d
        # NaN marks elements that the call does not write: an earlier, right result cannot stand in for them.
        d.fill_(float("nan"))
        answer = call()
        device.synchronize()
        if self._problem.grouped and hasattr(answer, "shape"):  # torch's product of groups has no out=
            d.copy_(answer)
        largest, finding = self.compare(d, strict)
        return largest, f"wrong result after the timing: {finding}" if finding else ""

    @property
    def can_judge(self) -> bool:
        """Whether the reference can tell right from wrong: it compares something, and all of that is finite."""
        return bool(self._parts) and all(bool(part.strict.result.isfinite().all()) for part in self._parts)

    def compare(self, d: torch.Tensor, strict: bool = True) -> tuple[float, str]:
        """The largest |D - reference|, and a finding if an element exceeds its bound; see ``error``."""
        largest, finding = 0.0, ""
        for part in self._parts:
            comparison = part.compare(d, strict)
            largest = max(largest, comparison.largest_error)
            if comparison.wrong and not finding:
                finding = f"an error of {comparison.max_error:.4g}, {comparison.allowed:.4g} is allowed"
        return largest, finding


def bands(extent: int) -> list[int]:
    """One index in each of up to 256 bands of an extent.

    The place within the band varies, so that an error that repeats with the tile size is not missed.
    """
    count = min(extent, BANDS)
    edges = [extent * band // count for band in range(count + 1)]
    return [start + (7 * band) % (end - start) for band, (start, end) in enumerate(pairwise(edges))]
