"""The errors of approximate functions, drawn within what the PTX ISA allows.

Hardware computes ``ex2.approx`` and the like by tables whose contents are not published. By default they are exact here
and rounded once. For a drawn environment each result gets an error, so that no kernel can depend on one table.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernelproof.emulator.state.arrays import Array


class Allowance(NamedTuple):
    """The largest error of a function of f32: a share of the result, and an amount that is added to it."""

    share: float = 0.0
    amount: float = 0.0


# PTX ISA, the sections of these instructions; lg2, sin and cos within the ranges for which it states a bound.
ALLOWED = {
    "div": Allowance(share=2**-22), "rcp": Allowance(share=2**-23), "sqrt": Allowance(share=2**-23),
    "rsqrt": Allowance(share=2**-22.9), "ex2": Allowance(share=2**-22), "lg2": Allowance(amount=2**-22.6),
    "sin": Allowance(amount=2**-20.9), "cos": Allowance(amount=2**-20.9), "tanh": Allowance(share=2**-11),
}  # fmt: skip
_BOUNDED = ("sin", "cos", "tanh")  # functions whose magnitude is at most 1
# Results with so few bits, such as ex2 of whole numbers and rcp of powers of two, are exact on hardware too.
_EXACT_TAIL = np.uint32(0xFFF)


def inexact(name: str, exact: Array, seed: int) -> Array:
    """Add a drawn error to each result of an approximate function of f32.

    The error of a result depends on ``seed`` and the result alone, so that equal operands give equal results. With the
    seed 0, results stay exact.
    """
    if not seed:
        return exact
    bits = exact.view(np.uint32)
    # A multiplicative hash (that of MurmurHash3's last step) spreads neighbouring results over all errors.
    mixed = bits ^ np.uint32(seed * 0x9E3779B1 & 0xFFFFFFFF)
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(factor)
    share, amount = ALLOWED[name]
    wide = np.where(np.isfinite(exact), exact, 0).astype(np.float64)
    drawn = wide + (mixed / 2.0**31 - 1.0) * (share * np.abs(wide) + amount)
    if name in _BOUNDED:
        drawn = np.clip(drawn, -1, 1)
    kept = ~np.isfinite(exact) | ((bits & _EXACT_TAIL) == 0)
    return np.where(kept, exact, drawn.astype(np.float32))
