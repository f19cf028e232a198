"""Draws shapes in addition to the stated ones: from the user's ranges, or without ranges one near the stated shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd

import numpy as np

from kernelproof.grading.expressions import Shape
from kernelproof.ground.errors import WrongInput

LEAST_DRAWN = 8  # sizes up to this are those of filters, strides and the like, which are not changed
LARGEST_STEP = 16  # if one size is stated, drawn sizes are multiples of its greatest common divisor with this


def drawn_shapes(first: Shape, ranges: Mapping[str, tuple[int, int]], seed: int) -> list[dict[str, int]]:
    """Draw two more shapes from the ranges: one with any numbers, and one with odd numbers, which no tile divides.

    Raises WrongInput.
    """
    if not ranges:
        return []
    if unknown := sorted(set(ranges) - set(first)):
        raise WrongInput(f"draws: {', '.join(unknown)}: the shapes have {', '.join(first)}")
    # The second number of a seed keeps the random numbers of this function and of ``unstated_shape`` apart.
    rng = np.random.default_rng([seed, 1])
    anywhere = {**first, **{name: int(rng.integers(low, high + 1)) for name, (low, high) in ranges.items()}}
    odd = {**first, **{name: _odd(int(rng.integers(low, high + 1)), low, high) for name, (low, high) in ranges.items()}}
    return [anywhere, odd]


def _odd(number: int, low: int, high: int) -> int:
    """The odd number next to ``number`` within [low, high], or ``number`` if there is none."""
    return next((n for n in (number | 1, number - 1) if n % 2 and low <= n <= high), number)


def unstated_shape(stated: Sequence[Shape], seed: int) -> dict[str, int] | None:
    """Draw a shape that was not stated and is no larger than the stated ones. None if there is no such shape.

    A size that varies among the stated shapes is drawn between the least and the largest, as a multiple of their
    greatest common divisor. A size that does not vary is drawn from half of it up to it.
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
