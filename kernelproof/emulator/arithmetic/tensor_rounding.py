"""How tensor cores of some GPUs add products of f16 and bf16 to fp32 sums, bit by bit, as published.

The figures are those of Hawkeye (MLSys 2026, arXiv 2603.20421). No result was compared with a GPU here; this mode is an
option beside the model of ``machine.tensor``, which rounds a sum once. The rule: products are added in groups, together
with the sum so far. Each term is cut off, toward zero, a number of bits below the largest exponent in the group (a
product's exponent is the sum of its factors'). The rest is added exactly, and the new sum is cut off to fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernelproof.emulator.state.arrays import Array

NONE = -10_000  # the exponent of zero


class TensorRounding(NamedTuple):
    """``width``: products in a group. ``bits``: bits kept below the largest exponent, which counts as at least
    ``floor``."""

    width: int
    bits: int
    floor: int


# Roundings by the name of the option; other GPUs are not modelled bit by bit.
ROUNDINGS = {"a100": TensorRounding(8, 24, -132), "h100": TensorRounding(16, 25, -133)}
ROUNDED_KINDS = ("f16", "bf16")  # of A and B


def add_products(a: Array, b: Array, c: Array, rounding: TensorRounding) -> Array:
    """C + A B in fp32, of A (.., m, k), B (.., k, n) and C (.., m, n) that fp32 has exactly."""
    left, right = a.astype(np.float64), np.swapaxes(b, -1, -2).astype(np.float64)
    total = c.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, left.shape[-1], rounding.width):
            some = slice(start, start + rounding.width)
            total = _group(left[..., some], right[..., some], total, rounding)
    return total.astype(np.float32)


def _group(a: Array, b: Array, total: Array, rounding: TensorRounding) -> Array:
    """One group: A (.., m, w), B (.., n, w), the sum so far (.., m, n); fp32 numbers in fp64."""
    products = a[..., :, None, :] * b[..., None, :, :]
    exponents = _exponent(a)[..., :, None, :] + _exponent(b)[..., None, :, :]
    largest = np.maximum(np.maximum(exponents.max(-1), _exponent(total)), rounding.floor)
    # Scaled by 2**unit, the integer part is what is kept of a term.
    unit = rounding.bits - largest
    kept = np.trunc(np.ldexp(products, unit[..., None])).sum(-1) + np.trunc(np.ldexp(total, unit))
    plain = products.sum(-1) + total
    return np.where(np.isfinite(plain), _toward_zero(np.ldexp(kept, -unit)), plain)


def _exponent(values: Array) -> Array:
    """The exponent of the leading bit, NONE for zero; infinities and NaN are handled by the caller."""
    finite = np.isfinite(values) & (values != 0)
    return np.where(finite, np.frexp(np.where(finite, values, 1.0))[1] - 1, NONE)


def _toward_zero(values: Array) -> Array:
    """The nearest fp32 number that is not larger in magnitude, as fp64."""
    near = values.astype(np.float32)
    beyond = np.abs(near.astype(np.float64)) > np.abs(values)
    return np.where(beyond, np.nextafter(near, np.float32(0)), near).astype(np.float64)
