"""Proves that ``solver.counterexample`` finds counterexamples, and gives up on a hard question by work, not by time."""

from __future__ import annotations

import pytest

from kernelproof.certificates import solver
from tests.packages import require

require("z3")
# x^3 + y^3 - z^3, and x, y and z at least 2. That it is nowhere 0 is Fermat's theorem for cubes, which no solver knows.
CUBES = {("x", "x", "x"): 1, ("y", "y", "y"): 1, ("z", "z", "z"): -1}
AT_LEAST_TWO = [{(name,): 1, (): -2} for name in "xyz"]


def test_a_question_has_a_counterexample_or_none() -> None:
    bounds = {("x",): (0, 9)}
    assert solver.counterexample({("x",): 1}, bounds, []) is None
    found = solver.counterexample({("x",): 1, (): -5}, bounds, [])
    assert found is not None
    assert 0 <= found["x"] < 5


def test_a_hard_question_ends_by_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """x^3 + y^3 - z^3 is assumed to be at least 0 and asked to be at least 1; a counterexample would make it 0, so two
    cubes would add up to a cube."""
    monkeypatch.setattr(solver, "MOST_WORK", 1_000_000)
    with pytest.raises(solver.Unanswered):
        solver.counterexample({**CUBES, (): -1}, {}, [*AT_LEAST_TWO, CUBES])
