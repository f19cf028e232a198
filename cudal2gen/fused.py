"""What a fused product reads beside A and B, and the comparison of its D with the fp64 reference and an error bound.

D = activation(Z), Z = alpha A B + bias + beta C, see ``kernel.fusion``. The bound of an element: what rounding explains
of the sum (``correctness.sum_error``), alpha times as much; one rounding in fp32 for each part of Z; all of that times
the steepest slope of the activation; the activation's own error; one rounding to D's type. Inputs that make all sums
exact leave no error before the activation: without one, or with relu, D is then the reference rounded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cudal2gen.correctness import (
    BOUND,
    BOUNDED,
    SINGLE_ERROR,
    Comparison,
    Order,
    operands,
    rounding_error,
    sum_error,
)
from cudal2gen.element import F16, Element
from cudal2gen.kernel import Acc
from cudal2gen.kernel.fusion import Activation, Fusion

Array = NDArray[Any]

ALPHA, BETA = 1.5, -0.5  # of tests: exact in every type, neither neutral nor each other's negative
# Steepest slopes: of silu at 2.4, of both gelu at sqrt(2), rounded up.
SLOPES: dict[Activation, float] = {"none": 1.0, "relu": 1.0, "silu": 1.1, "gelu": 1.13, "gelu_tanh": 1.13}
# x times 1 / (1 + 2^(x f(x))): ex2.approx and rcp.approx err by 2 ulp each at most (PTX ISA 9.0, 2^-22 and 1 ulp), the
# sum and the products by half an ulp each; the exponent's own roundings count with their size, below.
SIGMOID_ULPS = 16.0
# Absolute, of the normal distribution: 7.5e-8 of its polynomial (Abramowitz and Stegun 26.2.17), and roundings of terms
# whose sum of magnitudes is below 2.3.
NORMAL_ERROR = 8 * SINGLE_ERROR
LEAST = 2.0**-118  # where ex2 overflows or its flushed result is 0: the largest silu or gelu that is lost so


class FusedOperands(NamedTuple):
    """What is read beside A and B: bias (n,) or (m,) in their type, C (m,n) in that of D; None without such a part."""

    bias: Array | None
    c: Array | None
    alpha: float = ALPHA
    beta: float = BETA


def draw(
    fusion: Fusion, inputs: str, m: int, n: int, rng: np.random.Generator, element: Element, output: Element
) -> FusedOperands:
    """Operands of one kind of ``INPUTS``, without the NaN of ``special``: those are of A and B."""
    kind = "integers" if inputs in ("binary", "sparse", "integers") else "normal"
    extent = {"none": 0, "n": n, "m": m}[fusion.bias]
    bias = operands(kind, extent, 1, 1, rng, element)[0][:, 0] if extent else None
    c = operands(kind, m, 1, n, rng, element)[0].astype(output.numpy_dtype) if fusion.residual else None
    return FusedOperands(bias, c)


def apply(activation: Activation, z: Array) -> Array:
    """The activation in fp64. It gives NaN for minus infinity where 0 times infinity does, as torch's."""
    result = z
    with np.errstate(all="ignore"):
        if activation == "relu":
            result = np.where(z < 0, 0.0, z)
        elif activation == "silu":
            result = z / (1 + np.exp(-z))
        elif activation == "gelu_tanh":
            # 1 + tanh(u) is 2 / (1 + exp(-2 u)), which keeps its digits where u is negative.
            result = z / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        elif activation == "gelu":
            result = 0.5 * z * (1 + _erf(z / math.sqrt(2)))
    return result


def _erf(z: Array) -> Array:
    erf: Array = np.vectorize(math.erf, otypes=[float])(z)
    return erf


def own_error(activation: Activation, z: Array, result: Array) -> Array:
    """What the kernel's evaluation of an activation adds, beyond the error that its argument has."""
    if activation == "gelu":
        return NORMAL_ERROR * abs(z) + 4 * SINGLE_ERROR * abs(result) + LEAST
    if activation in ("silu", "gelu_tanh"):
        exponent = 1.45 * abs(z) if activation == "silu" else abs(z) * (2.31 + 0.103 * z * z)
        # Two roundings of the exponent, or of three factors of it, each relative; e^x - 1 < 2 x for what stays small.
        return (4 * exponent + SIGMOID_ULPS) * SINGLE_ERROR * abs(result) + LEAST
    return np.zeros_like(z)


@dataclass(frozen=True)
class Reference:
    """``z`` before and ``result`` behind the activation, in fp64, and what each element of D may differ by."""

    result: Array
    allowed: Array
    exact: bool  # whether D is the reference rounded once


def reference(
    acc: Acc, fusion: Fusion, inputs: str, a: Array, b: Array, fused: FusedOperands, order: Order, output: Element
) -> Reference:
    """The fused product of A (m,k) and B (n,k)."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):
        product = wide_a @ wide_b.T
        scale = fused.alpha if fusion.scale else 1.0
        z, magnitude = scale * product, abs(scale * product)
        for part in _added(fusion, fused):
            z, magnitude = z + part, magnitude + abs(part)
        result = apply(fusion.activation, z)
        error = np.zeros_like(z)
        sums_are_exact = inputs not in BOUNDED and (acc == "f32" or float(abs(product).max()) <= F16.exact)
        if not sums_are_exact:
            error = abs(scale) * sum_error(acc, wide_a, wide_b, product, order)
            if acc == "f16" and len(order) > 1:
                error = error + abs(scale) * rounding_error(product, error, F16)
            error = error + 3 * SINGLE_ERROR * (magnitude + error)
        error = SLOPES[fusion.activation] * error + own_error(fusion.activation, z, result)
        allowed = error + rounding_error(result, error, output)
    return Reference(result, allowed, sums_are_exact and fusion.activation in ("none", "relu"))


def _added(fusion: Fusion, fused: FusedOperands) -> list[Array]:
    """The parts that are added to the product, to be broadcast over D."""
    parts: list[Array] = []
    if fused.bias is not None:
        bias = fused.bias.astype(np.float64)
        parts.append(bias[None, :] if fusion.bias == "n" else bias[:, None])
    if fused.c is not None:
        parts.append(fused.beta * fused.c.astype(np.float64))
    return parts


def compare(
    acc: Acc, fusion: Fusion, inputs: str, a: Array, b: Array, fused: FusedOperands, d: Array, order: Order,
    output: Element,
) -> Comparison:  # fmt: skip
    """D (m,n) against the fused product, by the criterion of the inputs."""
    bounds = reference(acc, fusion, inputs, a, b, fused, order, output)
    wide, rows = d.astype(np.float64), range(d.shape[0])
    comparison = Comparison(BOUND, d.size)
    with np.errstate(all="ignore"):
        rounded = bounds.result.astype(output.numpy_dtype).astype(np.float64)
        errors = abs(wide - bounds.result)
        if inputs == "special":
            comparison.compared = "NaN and infinities in their places"
            same = (np.isnan(rounded) & np.isnan(wide)) | (rounded == wide)
            finite = np.isfinite(rounded) & np.isfinite(wide)
            comparison.count(rows, ~(same | finite), bounds.result, d)
            comparison.max_error = float(comparison.wrong)
            return comparison
        errors[np.isnan(errors)] = np.inf
        if bounds.exact:
            comparison.compared = "equality"
            comparison.count(rows, wide != rounded, bounds.result, d)
            comparison.max_error = float(errors.max())
        else:
            comparison.bound(errors, bounds.allowed)
            comparison.count(rows, errors > bounds.allowed, bounds.result, d)
    return comparison
