"""What is drawn does not depend on what else this process did."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

CONSTANT = 918273645


def drawn() -> list[int]:
    """A few hundred numbers as a test draws them."""
    numbers: list[int] = []

    @settings(max_examples=30, database=None)
    @given(st.lists(st.integers(0, 10**12 + len(drawn.__name__)), min_size=20, max_size=20))
    def draw(values: list[int]) -> None:
        numbers.extend(values)

    draw()
    return numbers


def test_modules_that_other_tests_import_change_no_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "imported.py"
    before = drawn()
    path.write_text(f"NUMBERS = [{', '.join(str(CONSTANT + number) for number in range(100))}]\n")
    spec = importlib.util.spec_from_file_location("imported", path)
    assert spec is not None
    monkeypatch.setitem(sys.modules, "imported", importlib.util.module_from_spec(spec))
    assert drawn() == before
