"""Families: what each proposes for a problem, counted by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cudal2gen.kernel import Problem
from cudal2gen.tuner import space


def problem(**sizes: Any) -> Problem:
    return Problem(**({"gpu": "a100", "acc": "f32", "layout": "tn", "m": 64, "n": 64, "k": 128} | sizes))


def counts(asked: Problem) -> Counter[str]:
    """Legal structures of each family."""
    return Counter(record.family for record in space.candidates(asked).records)


@pytest.mark.parametrize(
    ("sizes", "structures"),
    [
        ({}, 2 * 3 * 3),  # rows 16, 32; columns 16, 32, 64; 1, 2, 4 slices of the four k-steps
        ({"k": 64}, 2 * 3 * 2),  # two k-steps have no four slices
        ({"k": 32}, 2 * 3),
        ({"m": 512, "n": 512, "k": 2048}, 2 * 3 * 3),
        ({"m": 1024, "n": 512, "k": 2048}, 0),  # enough work to fill a ring
        ({"k": 2080}, 0),
        ({"gpu": "h200"}, 0),
    ],
)
def test_tiles_without_a_ring_are_proposed_for_small_problems(sizes: dict[str, Any], structures: int) -> None:
    assert counts(problem(**sizes))["sm80_direct"] == structures
