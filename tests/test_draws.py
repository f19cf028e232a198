"""Proves that draws do not depend on what else the process did, and that ``one_in`` takes the cases that it states."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

# A test module: seven cases of which one in three is taken, two of which one in two is taken, and a test without cases.
CASES = """
import pytest

@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", range(7), ids="case{}".format)
def test_cases(case): pass

@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", range(2))
def test_others(case): pass

def test_alone(): pass
"""


def collect(folder: Path, *arguments: str, profile: str = "ci") -> list[str]:
    """The names of the cases that pytest collects of CASES with the settings of this checkout."""
    root = Path(__file__).parents[1]
    (folder / "test_cases.py").write_text(CASES)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    variables = os.environ | {"PYTHONPATH": str(root), "HYPOTHESIS_PROFILE": profile}
    done = subprocess.run(
        [*command, "-c", str(root / "pyproject.toml"), "--rootdir", str(folder), *arguments, str(folder)],
        capture_output=True, text=True, check=True, env=variables, cwd=folder,
    )  # fmt: skip
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.parametrize(
    ("arguments", "profile", "number"),
    [((), "ci", 3 + 1 + 1), ((), "thorough", 7 + 2 + 1), (("-k", "case5"), "ci", 1)],
)
@pytest.mark.slow
def test_a_case_in_three_is_taken(arguments: tuple[str, ...], profile: str, number: int, tmp_path: Path) -> None:
    """The profile ``thorough`` takes all cases, and a case that -k selects is always taken."""
    names = collect(tmp_path, *arguments, profile=profile)
    assert len(names) == number, names
    if not arguments and profile == "ci":
        assert names == [*(f"test_cases[case{case}]" for case in (0, 3, 6)), "test_others[0]", "test_alone"]


CONSTANT = 918273645  # a number that no other module has


def draw_numbers() -> list[int]:
    """A few hundred numbers as a test draws them."""
    numbers: list[int] = []

    @settings(max_examples=30, database=None)
    @given(st.lists(st.integers(0, 10**12), min_size=20, max_size=20))
    def draw(values: list[int]) -> None:
        numbers.extend(values)

    draw()
    return numbers


def test_modules_that_other_tests_import_change_no_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default Hypothesis also draws constants of imported modules, here a hundred numbers."""
    path = tmp_path / "imported.py"
    before = draw_numbers()
    path.write_text(f"NUMBERS = [{', '.join(str(CONSTANT + number) for number in range(100))}]\n")
    spec = importlib.util.spec_from_file_location("imported", path)
    assert spec is not None
    monkeypatch.setitem(sys.modules, "imported", importlib.util.module_from_spec(spec))
    assert draw_numbers() == before
