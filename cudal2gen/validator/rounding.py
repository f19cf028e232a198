"""Models how a tensor core may round, and computes how often each model predicts a device's results.

A tensor core adds up a product of matrices in steps: the 16 k of an instruction at once or in parts. In a step it adds
the products and the sum so far exactly, or it first aligns them to the largest one and cuts them off some bits below
it. Then it rounds the new sum to the accumulator's type, to nearest or toward zero. NVIDIA documents none of this, so
the models are compared with measurements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cudal2gen.kernel import Acc
from cudal2gen.results import Rounding
from kernelproof.ground.element import F16
from kernelproof.ground.pages import grid

Array = NDArray[Any]
Order = list[list[list[int]]]  # for each slice of k, its k in groups of up to 8, in the order of summation

SAMPLE = 32  # rows and columns of D that the models predict
ALIGNED_BITS = (23, 24, 25, 26)  # candidates: bits kept below the largest exponent of a step


class SumModel(NamedTuple):
    """A model of how a tensor core adds. ``width``: the k of a step, None for all k.

    ``bits``: how many bits below the largest exponent of a step are kept, None for all. ``toward_zero``: how the sum of
    a step is rounded to the accumulator's type; otherwise to nearest.
    """

    width: int | None
    bits: int | None
    toward_zero: bool

    @property
    def name(self) -> str:
        step = "all k" if self.width is None else f"{self.width} k"
        precision = "exact" if self.bits is None else f"{self.bits} bits"
        return f"{step}, {precision}, {'toward zero' if self.toward_zero else 'nearest'}"


def models(acc: Acc) -> Iterator[SumModel]:
    """The candidate models. For an fp16 accumulator, one of them rounds only once, after all k of a slice."""
    for width in (4, 8, 16):
        yield SumModel(width, None, False)
        yield SumModel(width, None, True)
        for bits in ALIGNED_BITS:
            yield SumModel(width, bits, acc == "f32")
    if acc == "f16":
        yield SumModel(None, None, False)


def predict(model: SumModel, acc: Acc, a: Array, b: Array, order: Order, output: np.dtype[Any] | None = None) -> Array:
    """The model's D (m,n) for A (m,k) and B (n,k), in their type or ``output``. ``order``: a record's ``k_order``."""
    slices = [_accumulate(model, acc, a.astype(np.float64), b.astype(np.float64), part) for part in order]
    total = slices[0]
    for more in slices[1:]:  # the reduction of a split k is in fp32
        total = (total + more).astype(np.float32).astype(np.float64)
    return total.astype(output or a.dtype)


def _accumulate(model: SumModel, acc: Acc, a: Array, b: Array, part: list[list[int]]) -> Array:
    """The model's sum (m,n) over the k of one slice, in fp64."""
    kind = np.dtype(F16.dtype if acc == "f16" else "float32")
    total = np.zeros((a.shape[0], b.shape[0]))
    for step in _steps(part, model.width):
        products = a[:, None, step] * b[None, :, step]  # (m,n,step)
        if model.bits is not None:
            products, total = _aligned(products, a[:, step], b[:, step], total, model.bits)
        total = _rounded(products.sum(-1) + total, kind, model.toward_zero)
    return total


def _steps(part: list[list[int]], width: int | None) -> Iterator[list[int]]:
    """The k of each step. ``part`` has groups of up to 8 k, half an MMA."""
    if width is None:
        yield [k for group in part for k in group]
    elif width == 16:
        for at in range(0, len(part), 2):
            yield [k for group in part[at : at + 2] for k in group]
    else:
        for group in part:
            yield from (group[at : at + width] for at in range(0, len(group), width))


def _aligned(products: Array, a: Array, b: Array, total: Array, bits: int) -> tuple[Array, Array]:
    """Products (m,n,step) and sum (m,n), cut off ``bits`` below the largest exponent of an element's step.

    A product's exponent is the sum of its factors' exponents, even if the product of their fractions is 2 or more.
    """
    zero_exponent = -10_000  # the exponent of 0, below all others
    factors = [np.where(values == 0, zero_exponent, np.frexp(values)[1] - 1) for values in (a, b)]
    exponents = factors[0][:, None, :] + factors[1][None, :, :]
    largest = np.maximum(exponents.max(-1), np.where(total == 0, zero_exponent, np.frexp(total)[1] - 1))
    # A value times 2^shift has the last kept bit in the place of 1, so that truncation cuts off all bits below. The
    # shift is limited, so that a step of zeros is not scaled beyond fp64.
    shift = bits - np.maximum(largest, -200)
    kept_products = np.ldexp(np.trunc(np.ldexp(products, shift[..., None])), -shift[..., None])
    return kept_products, np.ldexp(np.trunc(np.ldexp(total, shift)), -shift)


def _rounded(values: Array, kind: np.dtype[Any], toward_zero: bool) -> Array:
    """Values rounded to a type, as fp64."""
    result = values.astype(kind)  # to nearest
    if toward_zero:
        too_large = np.abs(result.astype(np.float64)) > np.abs(values)
        result = np.where(too_large, np.nextafter(result, kind.type(0)), result)
    return result.astype(np.float64)


def ulps(values: Array, others: Array) -> Array:
    """Distances of numbers of 16 or 32 bits in units of the last place. NaN agrees only with NaN."""
    distances: Array = np.abs(_ordinals(values) - _ordinals(others))
    nan, other_nan = np.isnan(values), np.isnan(others)
    return np.where(nan | other_nan, np.where(nan & other_nan, 0, 1 << 8 * values.itemsize), distances)


def _ordinals(values: Array) -> Array:
    """An integer for each number: 0 for zero, and neighbouring numbers of the type differ by one."""
    # Floating-point numbers are sign and magnitude, so a negative number becomes minus its magnitude.
    bits = values.view(f"i{values.itemsize}").astype(np.int64)
    return np.where(bits < 0, -(bits & (1 << 8 * values.itemsize - 1) - 1), bits)


def agreement(acc: Acc, a: Array, b: Array, d: Array, order: Order) -> dict[str, float]:
    """For each model the share of elements in D's first rows and columns that it predicts."""
    first = np.s_[:SAMPLE]
    corner = d[first, first]
    return {
        model.name: round(float((ulps(predict(model, acc, a[first], b[first], order, d.dtype), corner) == 0).mean()), 4)
        for model in models(acc)
    }


def markdown(lines: Iterable[Rounding]) -> str:
    """The comparisons as a Markdown table."""
    head = ["on", "acc", "family", "m_n_k", "inputs", "differing", "max ulp", "models that predict most", "of them"]
    rows = []
    for line in sorted(lines, key=lambda line: (line.on, line.acc, line.family, line.inputs, line.k, line.m, line.n)):
        best = line.best
        names = "; ".join(best[:3]) + (f" and {len(best) - 3} more" if len(best) > 3 else "")
        share = f"{100 * line.models[best[0]]:.1f} %" if best else ""
        problem = [line.on, line.acc, line.family, f"{line.m}_{line.n}_{line.k}", line.inputs]
        rows.append([*problem, f"{100 * line.differing:.2f} %", str(line.max_ulp), names, share])
    return grid(head, rows, left=5) + "\n"
