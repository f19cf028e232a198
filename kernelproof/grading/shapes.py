"""Draws shapes beside the stated ones: from the user's ranges, or, without any, one near what is stated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd

import numpy as np

from kernelproof.grading.expressions import Shape
from kernelproof.ground.errors import WrongInput

LEAST_DRAWN = 8  # sizes up to this are those of kernels, strides and the like, and stay as they are
LARGEST_STEP = 16  # a single stated size is taken to be a multiple of what it shares with this


def drawn(first: Shape, ranges: Mapping[str, tuple[int, int]], seed: int) -> list[dict[str, int]]:
    """Draw two more shapes from the ranges: one with any numbers, and one with odd numbers, which no tile divides.

    Raises WrongInput.
    """
    if not ranges:
        return []
    if unknown := sorted(set(ranges) - set(first)):
        raise WrongInput(f"draws: {', '.join(unknown)}: the shapes have {', '.join(first)}")
    rng = np.random.default_rng([seed, 1])
    anywhere = {**first, **{name: int(rng.integers(low, high + 1)) for name, (low, high) in ranges.items()}}
    odd = {**first, **{name: _odd(int(rng.integers(low, high + 1)), low, high) for name, (low, high) in ranges.items()}}
    return [anywhere, odd]


def _odd(number: int, low: int, high: int) -> int:
    """The odd number next to ``number`` within [low, high], or ``number`` if there is none."""
    return next((n for n in (number | 1, number - 1) if n % 2 and low <= n <= high), number)


def unstated(stated: Sequence[Shape], seed: int) -> dict[str, int] | None:
    """Draw a shape that nobody stated, no larger than what is stated, of multiples that the stated sizes suggest.

    A size that varies is drawn between the least and the largest one, as a multiple of their greatest common divisor; a
    single one from its upper half. None if that leaves only the stated sizes.
    """
    rng = np.random.default_rng([seed, 2])
    out = dict(stated[0])
    for name, size in stated[0].items():
        sizes = sorted({shape[name] for shape in stated})
        low = sizes[0] if len(sizes) > 1 else size // 2
        step = gcd(*sizes) if len(sizes) > 1 else gcd(size, LARGEST_STEP)
        choices = range(-(-low // step) * step, sizes[-1] + 1, step)
        if sizes[0] > LEAST_DRAWN and len(choices) > len(sizes):
            while out[name] in sizes:
                out[name] = choices[int(rng.integers(len(choices)))]
    return out if out != stated[0] else None
