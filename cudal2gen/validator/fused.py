"""Compares fused products with their fp64 reference: draws the operands besides A and B, and bounds D's error.

D = activation(Z), Z = alpha A B + bias + beta C, see ``kernel.fusion``. The bound of an element adds, in this order:

1. the rounding error of the sum (``correctness.sum_error``) times alpha; one rounding to fp16 for fp16 sums of slices;
2. one rounding in fp32 for each part of Z, and the sum so far times the steepest slope of the activation;
3. the activation's own error;
4. with a gate, each half's error times the other half's magnitude, and one rounding in fp32;
5. one rounding to D's type.

Inputs whose sums are all exact leave no error before the activation: D is then the reference rounded once, if there is
no gate and no activation but relu.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from cudal2gen.kernel import Acc
from cudal2gen.kernel.fusion import ALPHA, BETA, GATE_COLS, Activation, Fusion
from cudal2gen.validator.correctness import (
    BOUND,
    BOUNDED,
    CHUNK,
    MAX_FULL_BOUND,
    Array,
    Comparison,
    Order,
    library,
    operands,
    rounding_error,
    sum_error,
)
from kernelproof.ground.element import F16, SINGLE_ERROR, Element

if TYPE_CHECKING:
    import torch

# Steepest slopes: of silu at 2.4, of both gelu at sqrt(2), rounded up.
SLOPES: dict[Activation, float] = {"none": 1.0, "relu": 1.0, "silu": 1.1, "gelu": 1.13, "gelu_tanh": 1.13}
# Error of a kernel's silu and gelu_tanh, x / (1 + 2^(x f(x))). ex2.approx and rcp.approx err by at most 2 ulp each (PTX
# ISA 9.0: 2^-22 and 1 ulp), the sum and the products by half an ulp each. ``evaluation_error`` adds the error of
# the exponent.
SIGMOID_ULPS = 16.0
# Absolute error of a kernel's normal distribution: 7.5e-8 of the polynomial (Abramowitz and Stegun 26.2.17), and the
# roundings of its terms, whose magnitudes sum to less than 2.3.
NORMAL_ERROR = 8 * SINGLE_ERROR
FLUSHED = 2.0**-118  # largest silu or gelu that becomes 0 because ex2 overflows or its result is flushed


class FusedOperands(NamedTuple, Generic[Array]):
    """The operands besides A and B: bias (n,) or (m,) in the type of A and B, C (m,n) in the type of D. An operand is
    None if the fusion does not have it."""

    bias: Array | None
    c: Array | None
    alpha: float = ALPHA
    beta: float = BETA

    def of_rows(self, fusion: Fusion, rows: slice) -> FusedOperands[Array]:
        """The operands of these rows of D."""
        bias = self.bias if self.bias is None or fusion.bias == "n" else self.bias[rows]
        return FusedOperands(bias, None if self.c is None else self.c[rows], self.alpha, self.beta)


@overload
def draw(
    fusion: Fusion,
    inputs: str,
    m: int,
    n: int,
    rng: np.random.Generator,
    element: Element,
    output: Element,
    *,
    k: int = 1,
) -> FusedOperands[NDArray[Any]]: ...
@overload
def draw(
    fusion: Fusion,
    inputs: str,
    m: int,
    n: int,
    rng: torch.Generator,
    element: Element,
    output: Element,
    *,
    k: int = 1,
) -> FusedOperands[torch.Tensor]: ...
def draw(
    fusion: Fusion,
    inputs: str,
    m: int,
    n: int,
    rng: np.random.Generator | torch.Generator,
    element: Element,
    output: Element,
    *,
    k: int = 1,
) -> FusedOperands[NDArray[Any]] | FusedOperands[torch.Tensor]:
    """Operands of one kind of ``INPUTS``, drawn from NumPy's or torch's generator. The kinds ``cancelling`` and
    ``special`` give normal ones, without NaN and infinities.

    Normal operands are scaled to the size of sums of ``k`` products. Otherwise the error bound of such sums would hide
    a wrong bias or C.
    """
    kind = "integers" if inputs in ("binary", "sparse", "integers") else "normal"
    extent = {"none": 0, "n": n, "m": m}[fusion.bias]  # length of the bias
    # About sqrt(k), the standard deviation of a sum of k products of normal numbers; a power of two scales exactly.
    scale = 1 << (k.bit_length() // 2 if kind == "normal" else 0)
    # One branch per library, because their arrays do not mix.
    if isinstance(rng, np.random.Generator):
        vector = operands(kind, extent, 1, 1, rng, element)[0][:, 0] * scale if extent else None
        matrix = operands(kind, m, 1, n, rng, output)[0] * scale if fusion.residual else None
        return FusedOperands(_rounded(vector, element), _rounded(matrix, output))
    bias = operands(kind, extent, 1, 1, rng, element)[0][:, 0] * scale if extent else None
    c = operands(kind, m, 1, n, rng, output)[0] * scale if fusion.residual else None
    return FusedOperands(_rounded(bias, element), _rounded(c, output))


def _rounded(values: Array | None, element: Element) -> Array | None:
    """The values rounded to an element, in its type."""
    return None if values is None else library(values).rounded(values, element)


def apply(activation: Activation, z: Array) -> Array:
    """The activation in fp64. For minus infinity it gives NaN if the formula has 0 times infinity, like torch."""
    arrays = library(z)
    result = z
    with np.errstate(all="ignore"):
        if activation == "relu":
            result = arrays.where(z < 0, arrays.zeros(z), z)
        elif activation == "silu":
            result = z / (1 + arrays.exp(-z))
        elif activation == "gelu_tanh":
            # 1 + tanh(u) is 2 / (1 + exp(-2 u)), which keeps its digits where u is negative.
            result = z / (1 + arrays.exp(-2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        elif activation == "gelu":
            result = 0.5 * z * (1 + arrays.erf(z / math.sqrt(2)))
    return result


def evaluation_error(activation: Activation, z: Array, result: Array) -> Array:
    """A bound of the error with which a kernel evaluates an activation of the exact argument ``z``, elementwise.

    ``result``: the activation of ``z`` in fp64.
    """
    error: Array = library(z).zeros(z)
    if activation == "gelu":
        error = NORMAL_ERROR * abs(z) + 4 * SINGLE_ERROR * abs(result) + FLUSHED
    elif activation in ("silu", "gelu_tanh"):
        # |x f(x)|, rounded up: log2(e) x for silu; 2 sqrt(2 / pi) log2(e) (x + 0.044715 x^3) for gelu_tanh.
        exponent = 1.45 * abs(z) if activation == "silu" else abs(z) * (2.31 + 0.103 * z * z)
        # The exponent has a few relative roundings; e^x - 1 < 2 x for an exponent's small error x.
        error = (4 * exponent + SIGMOID_ULPS) * SINGLE_ERROR * abs(result) + FLUSHED
    return error


@dataclass(frozen=True)
class Reference(Generic[Array]):
    """The fused product in fp64 (``result``), and by how much each element of D may differ from it (``allowed``)."""

    result: Array
    allowed: Array
    exact: bool  # whether D must equal the reference rounded once
    # Elements in which infinity is multiplied by a value that may be 0 within its error. There NaN and both infinities
    # are right.
    undetermined: Array | bool = False


@dataclass(frozen=True)
class FusedProduct(Generic[Array]):
    """A fused product of A (m,k) and B (n,k).

    ``inputs``: the kind of all inputs, one of ``INPUTS``. ``operands``: the operands besides A and B. ``order``: the k
    of each partial sum, a record's ``k_order``. ``output``: the type of D.
    """

    acc: Acc
    fusion: Fusion
    inputs: str
    a: Array
    b: Array
    operands: FusedOperands[Array]
    order: Order
    output: Element

    def of_rows(self, rows: slice) -> FusedProduct[Array]:
        """The product that gives these rows of D."""
        return replace(self, a=self.a[rows], operands=self.operands.of_rows(self.fusion, rows))

    def reference(self, roundings: int = 0) -> Reference[Array]:
        """The product in fp64 with its error bounds.

        ``roundings``: how often a contender rounds to D's type before the activation. A contender that adds the parts
        one by one rounds each sum; a fused kernel does not round.
        """
        fusion, operands = self.fusion, self.operands
        arrays = library(self.a)
        wide_a, wide_b = arrays.wide(self.a), arrays.wide(self.b)
        with np.errstate(all="ignore"):
            product = arrays.product(wide_a, wide_b)
            scale = operands.alpha if fusion.scale else 1.0
            z, magnitude = scale * product, abs(scale * product)
            for part in _addends(fusion, operands):
                z, magnitude = z + part, magnitude + abs(part)
            error = arrays.zeros(z)
            sums_are_exact = self.inputs not in BOUNDED and (
                self.acc == "f32" or float(abs(product).max()) <= F16.exact
            )
            if not sums_are_exact:
                error = abs(scale) * sum_error(self.acc, wide_a, wide_b, product, self.order)
                if self.acc == "f16" and len(self.order) > 1:
                    error = error + abs(scale) * rounding_error(product, error, F16)
                # After the sum: three fp32 operations (alpha, bias, beta C), and the roundings of a contender.
                error = error + (3 * SINGLE_ERROR + roundings * self.output.unit_roundoff) * (magnitude + error)
            result, error, undetermined = _activation_result(fusion, z, error)
            allowed = error + rounding_error(result, error, self.output)
        exact = sums_are_exact and not fusion.gate and fusion.activation in ("none", "relu")
        return Reference(result, allowed, exact, undetermined)

    def compare(self, d: Array) -> Comparison:
        """Compares D (m,n) with the reference, by the criterion of the inputs, some rows at a time.

        As for plain products (``correctness``), the bound of an fp16 accumulator on a large problem is computed for
        some rows only; the other rows are allowed twice the largest of these bounds.
        """
        (m, n), k = d.shape, self.a.shape[1]
        stride = m * n * k // MAX_FULL_BOUND if self.acc == "f16" and self.inputs in BOUNDED else 0
        comparison = Comparison(BOUND, m * n)
        ceiling: float | None = None
        if stride > 1:
            sample = slice(None, None, stride)
            bounds = self.of_rows(sample).reference()
            _add_rows(comparison, range(0, m, stride), self.inputs, bounds, d[sample], self.output, None)
            comparison.compared += f" in {len(range(0, m, stride))} rows, twice its largest in all"
            ceiling = 2 * float(bounds.allowed.max())
        # With a ceiling only the values matter, so the bound is that of fp32 sums, which is cheap to compute.
        product = self if ceiling is None else replace(self, acc="f32")
        step = max(1, CHUNK // n)
        for top in range(0, m, step):
            rows = slice(top, min(m, top + step))
            bounds = product.of_rows(rows).reference()
            _add_rows(comparison, range(rows.start, rows.stop), self.inputs, bounds, d[rows], self.output, ceiling)
        return comparison

    def compare_stored(self, d: Array, aux: Array | None) -> Comparison:
        """Compares D, and the Z that ``aux`` stores. If Z is wrong, its comparison is returned."""
        comparison = self.compare(d)
        if aux is None:
            return comparison
        of_z = replace(self, fusion=self.fusion.before_activation).compare(aux)
        return replace(of_z, first=f"aux, {of_z.first}") if of_z.wrong else comparison


def _activation_result(fusion: Fusion, z: Array, error: Array) -> tuple[Array, Array, Array | bool]:
    """The result of activation and gate for Z, its error given Z's, and which elements are undetermined."""
    first, first_error = _half(fusion, z, 0), _half(fusion, error, 0)
    result = apply(fusion.activation, first)
    result_error = SLOPES[fusion.activation] * first_error + evaluation_error(fusion.activation, first, result)
    if not fusion.gate:
        return result, result_error, False
    factor, factor_error = _half(fusion, z, 1), _half(fusion, error, 1)
    gated = result * factor
    gated_error = (
        abs(result) * factor_error + result_error * (abs(factor) + factor_error) + SINGLE_ERROR * abs(gated) + FLUSHED
    )
    return gated, gated_error, (abs(factor) == math.inf) & (abs(result) <= result_error)


def _half(fusion: Fusion, z: Array, half: int) -> Array:
    """If D is gated, the first or the second half of each ``GATE_COLS`` columns: Z1 or Z3 of ``kernel.fusion``. Else
    all columns."""
    if not fusion.gate:
        return z
    m, n = z.shape
    return z.reshape(m, n // GATE_COLS, 2, GATE_COLS // 2)[:, :, half].reshape(m, n // 2)


def _addends(fusion: Fusion, fused: FusedOperands[Array]) -> Iterator[Array]:
    """Bias and beta C, which are added to the product, in shapes that broadcast over D."""
    if fused.bias is not None:
        bias = library(fused.bias).wide(fused.bias)
        yield bias[None, :] if fusion.bias == "n" else bias[:, None]
    if fused.c is not None:
        yield fused.beta * library(fused.c).wide(fused.c)


def _add_rows(
    comparison: Comparison,
    rows: range,
    inputs: str,
    bounds: Reference[Array],
    d: Array,
    output: Element,
    ceiling: float | None,
) -> None:
    """Adds these rows of D to a comparison. ``bounds``: the reference of these rows. ``ceiling``: one bound for all
    errors, in place of a bound for each."""
    arrays = library(d)
    wide = arrays.wide(d)
    with np.errstate(all="ignore"):
        rounded = arrays.wide(arrays.rounded(bounds.result, output))
        errors = abs(wide - bounds.result)
        if inputs == "special":
            comparison.compared = "NaN and infinities in their places"
            equal = (arrays.nan(rounded) & arrays.nan(wide)) | (rounded == wide)
            finite = (abs(rounded) < math.inf) & (abs(wide) < math.inf)
            comparison.count(rows, ~(equal | finite | bounds.undetermined), bounds.result, d)
            comparison.max_error = float(comparison.wrong)
            return
        errors[arrays.nan(errors)] = math.inf
        # Values beyond the range of the output are right if they are stored as infinity.
        errors[(abs(wide) == math.inf) & (wide == rounded)] = 0.0
        if ceiling is not None:
            comparison.count(rows, errors > ceiling, bounds.result, d)
        elif bounds.exact:
            comparison.compared = "equality" if comparison.allowed is None else comparison.compared
            comparison.count(rows, wide != rounded, bounds.result, d)
            comparison.max_error = max(comparison.max_error, float(errors.max()))
        else:
            comparison.compared = BOUND if comparison.compared == "equality" else comparison.compared
            comparison.add_errors(errors, bounds.allowed)
            comparison.count(rows, errors > bounds.allowed, bounds.result, d)
