"""Proves that questions about integers are answered, and that a hard one ends by its work and not by a clock."""

from __future__ import annotations

import pytest

from kernelproof.certificates import solver
from tests.packages import require

require("z3")
CUBES = {("x", "x", "x"): 1, ("y", "y", "y"): 1, ("z", "z", "z"): -1}
AT_LEAST_TWO = [{(name,): 1, (): -2} for name in "xyz"]


def test_a_question_has_a_counterexample_or_none() -> None:
    bounds = {("x",): (0, 9)}
    assert solver.counterexample({("x",): 1}, bounds, []) is None
    found = solver.counterexample({("x",): 1, (): -5}, bounds, [])
    assert found is not None
    assert 0 <= found["x"] < 5


def test_a_hard_question_ends_by_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question is whether two cubes add up to a cube, which no solver decides."""
    monkeypatch.setattr(solver, "MOST_WORK", 1_000_000)
    with pytest.raises(solver.Unanswered):
        solver.counterexample({**CUBES, (): -1}, {}, [*AT_LEAST_TWO, CUBES])
