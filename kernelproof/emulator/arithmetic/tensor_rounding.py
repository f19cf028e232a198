"""Adds products of f16 or bf16 to fp32 sums with the rounding of the tensor cores of some GPUs, by a published rule.

The rule and its figures are those of Hawkeye (MLSys 2026, arXiv 2603.20421). No result was compared with a GPU here.
This mode is an option; by default ``machine.tensor`` rounds a sum once.

The rule: products are added in groups, together with the sum so far. Each term is truncated toward zero at a number of
bits below the largest exponent in the group (the exponent of a product is the sum of its factors' exponents). The
truncated terms are added exactly, and the new sum is truncated to fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernelproof.emulator.state.arrays import Array

ZERO_EXPONENT = -10_000  # stands for the exponent of zero; every number has a larger one


class TensorRounding(NamedTuple):
    """The rule of one GPU. ``group_size``: products in a group. ``kept_bits``: how many bits of a term are kept below
    the largest exponent of its group. ``min_exponent`` replaces a largest exponent that is smaller."""

    group_size: int
    kept_bits: int
    min_exponent: int


# Name of the option -> rule. Other GPUs are not modelled bit by bit.
ROUNDINGS = {"a100": TensorRounding(8, 24, -132), "h100": TensorRounding(16, 25, -133)}
ROUNDED_KINDS = ("f16", "bf16")  # of A and B


def add_products(a: Array, b: Array, c: Array, rounding: TensorRounding) -> Array:
    """C + A B in fp32. A has the shape (.., m, k), B (.., k, n), and C (.., m, n); their elements are exact in fp32."""
    left, right = a.astype(np.float64), np.swapaxes(b, -1, -2).astype(np.float64)
    total = c.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, left.shape[-1], rounding.group_size):
            group = slice(start, start + rounding.group_size)
            total = _add_group(left[..., group], right[..., group], total, rounding)
    return total.astype(np.float32)


def _add_group(a: Array, b: Array, total: Array, rounding: TensorRounding) -> Array:
    """The sum after one group: A (.., m, w), B (.., n, w), the sum so far (.., m, n), all fp32 numbers in fp64."""
    products = a[..., :, None, :] * b[..., None, :, :]
    exponents = _exponent(a)[..., :, None, :] + _exponent(b)[..., None, :, :]
    largest = np.maximum(np.maximum(exponents.max(-1), _exponent(total)), rounding.min_exponent)
    # After multiplication by 2**shift, the integer part of a term has exactly the bits that are kept.
    shift = rounding.kept_bits - largest
    kept = np.trunc(np.ldexp(products, shift[..., None])).sum(-1) + np.trunc(np.ldexp(total, shift))
    plain = products.sum(-1) + total
    return np.where(np.isfinite(plain), _toward_zero(np.ldexp(kept, -shift)), plain)


def _exponent(values: Array) -> Array:
    """The exponent of the leading bit; ZERO_EXPONENT for zero, infinities and NaN."""
    finite = np.isfinite(values) & (values != 0)
    return np.where(finite, np.frexp(np.where(finite, values, 1.0))[1] - 1, ZERO_EXPONENT)


def _toward_zero(values: Array) -> Array:
    """The nearest fp32 number that is not larger in magnitude, as fp64."""
    near = values.astype(np.float32)
    beyond = np.abs(near.astype(np.float64)) > np.abs(values)
    return np.where(beyond, np.nextafter(near, np.float32(0)), near).astype(np.float64)
