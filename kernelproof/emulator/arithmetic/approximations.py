"""Adds random errors to the results of approximate functions, within the bounds that the PTX ISA states.

Hardware computes ``ex2.approx`` and similar functions by tables whose contents are not published. By default, their
results here are rounded once and have no further error. For a drawn environment, each result gets an error, so that no
kernel can depend on a particular table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.arithmetic.floats import flush, flush_bf16
from kernelproof.emulator.state.arrays import Array


class ErrorBound(NamedTuple):
    """The largest error of a function's result. For f32 it is ``relative`` times the magnitude of the result, plus
    ``absolute``. For halves it is the smaller of these two numbers."""

    relative: float = 0.0
    absolute: float = 0.0


# Bounds of functions of f32, from the PTX ISA. For lg2, sin and cos it states them for a range of operands only.
ALLOWED = {
    "div": ErrorBound(relative=2**-22), "rcp": ErrorBound(relative=2**-23), "sqrt": ErrorBound(relative=2**-23),
    "rsqrt": ErrorBound(relative=2**-22.9), "ex2": ErrorBound(relative=2**-22), "lg2": ErrorBound(absolute=2**-22.6),
    "sin": ErrorBound(absolute=2**-20.9), "cos": ErrorBound(absolute=2**-20.9), "tanh": ErrorBound(relative=2**-11),
}  # fmt: skip
# Bounds of functions of halves. For tanh the PTX ISA states the absolute bound; the relative one limits the errors of
# results near zero.
HALF_ALLOWED = {
    ("ex2", "f16"): ErrorBound(relative=2**-9.9, absolute=np.inf),
    ("ex2", "bf16"): ErrorBound(relative=2**-7, absolute=np.inf),
    ("tanh", "f16"): ErrorBound(relative=2**-9, absolute=2**-10.987),
    ("tanh", "bf16"): ErrorBound(relative=2**-6, absolute=2**-8),
}
_HALF_FUNCTIONS: dict[str, Callable[[Array], Array]] = {"ex2": np.exp2, "tanh": np.tanh}
_SIGNIFICAND_BITS = {"f16": 11, "bf16": 8}
_UP_TO_ONE = ("sin", "cos", "tanh")  # functions whose magnitude is at most 1
# Results whose significand ends with this many zeros, such as ex2 of integers and rcp of powers of two, are exact on
# hardware, too.
_EXACT_TAIL = np.uint32(0xFFF)


def inexact(name: str, exact: Array, seed: int) -> Array:
    """Add a random error to each result of the approximate function ``name`` of f32, such as ex2.

    The error of a result depends on ``seed`` and the result only, so that equal operands give equal results. With the
    seed 0, ``exact`` is returned unchanged.
    """
    if not seed:
        return exact
    relative, absolute = ALLOWED[name]
    wide = np.where(np.isfinite(exact), exact, 0).astype(np.float64)
    perturbed = wide + _random_numbers(exact, seed) * (relative * np.abs(wide) + absolute)
    if name in _UP_TO_ONE:
        perturbed = np.clip(perturbed, -1, 1)
    return np.where(_is_exact(exact), exact, perturbed.astype(np.float32))


@lru_cache(maxsize=64)
def half_approximation(name: str, kind: str, ftz: bool, seed: int) -> Callable[[Array], Array]:
    """The approximate function ``name`` of halves (float16 arrays if ``kind`` is f16, bf16 numbers as float64), with
    random errors like those of ``inexact``.

    A result is rounded after its error has been added. The sum of error and rounding is within the bound.
    """
    flushed = (flush if kind == "f16" else flush_bf16) if ftz else None

    def function(operand: Array) -> Array:
        result = _HALF_FUNCTIONS[name]((flushed(operand) if flushed is not None else operand).astype(np.float64))
        if seed:
            result = _inexact_half(name, kind, result, seed)
        rounded = result.astype(np.float16) if kind == "f16" else result
        return flushed(rounded) if flushed is not None else rounded

    return function


def _inexact_half(name: str, kind: str, exact: Array, seed: int) -> Array:
    """Add a random error to results (float64) of a function of halves, before they are rounded."""
    relative, absolute = HALF_ALLOWED[name, kind]
    narrow = exact.astype(np.float32)
    wide = np.where(np.isfinite(exact), exact, 0)
    magnitude = np.abs(wide)
    # Rounding to the half will add an error of up to half of its last bit, which counts against the bound.
    last_bit = np.ldexp(1.0, np.frexp(magnitude)[1] - _SIGNIFICAND_BITS[kind])
    allowed = np.maximum(np.minimum(relative * magnitude, absolute) - last_bit / 2, 0)
    perturbed = wide + _random_numbers(narrow, seed) * allowed
    if name in _UP_TO_ONE:
        perturbed = np.clip(perturbed, -1, 1)
    return np.where(_is_exact(narrow), exact, perturbed)


def _random_numbers(exact: Array, seed: int) -> Array:
    """Numbers in [-1, 1) that depend only on a seed and on results of f32."""
    # A multiplicative hash (the last step of MurmurHash3) gives unrelated numbers for neighbouring results.
    mixed = exact.view(np.uint32) ^ np.uint32(seed * 0x9E3779B1 & 0xFFFFFFFF)
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(factor)
    return np.asarray(mixed / 2.0**31 - 1.0)


def _is_exact(exact: Array) -> Array:
    """Where do results of f32 get no error? Those that are infinite, NaN, or exact on hardware, too."""
    return np.asarray(~np.isfinite(exact) | ((exact.view(np.uint32) & _EXACT_TAIL) == 0))
