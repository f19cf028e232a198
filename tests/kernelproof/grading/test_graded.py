"""Proves that a graded set is one JSON object and one page, and that a solution's text cannot inject markup."""

from __future__ import annotations

import re
from pathlib import Path

from kernelproof.grading.graded import GradedSet, GradedSolution, exit_outcome, pairs
from kernelproof.grading.verdict import Finding, Verdict

HOSTILE = "</td><script>alert(1)</script> | `x` [a](b)\n# title"


def graded_set() -> GradedSet:
    """A set of a right, a wrong and an unchecked solution. ``HOSTILE`` stands for every text that a solution can
    choose: its name, the message of a finding, and what was not checked."""
    wrong = Finding.of("wrong-value", HOSTILE, HOSTILE)
    return GradedSet(
        entries=[
            GradedSolution(name="a.py", verdict=Verdict(right=True, outcome="right", seconds=1.5)),
            GradedSolution(name=HOSTILE, verdict=Verdict(right=False, outcome="wrong", findings=[wrong], seconds=2.5)),
            GradedSolution(name="c.py", verdict=Verdict(right=False, outcome="not checked", not_checked=[HOSTILE])),
        ]
    )


def test_a_set_is_counted_and_read_back() -> None:
    assert graded_set().counts == {"right": 1, "wrong": 1, "not checked": 1}
    assert GradedSet.model_validate_json(graded_set().model_dump_json()) == graded_set()
    assert exit_outcome(["right", "not checked", "wrong"]) == "wrong"
    assert exit_outcome(["right", "not checked"]) == "not checked"
    assert exit_outcome(["right"]) == exit_outcome([]) == "right"


def test_no_text_of_a_solution_leaves_its_cell() -> None:
    page, summary = graded_set().html(), graded_set().markdown()
    assert "<script" not in page
    # Rows: 3 headers, 1 broken rule, 3 solutions, 2 explanations.
    assert page.count("<tr>") == 3 + 1 + 3 + 2
    for line in summary.splitlines():
        assert not line.startswith("# title")
        assert not re.search(r"(?<!\\)[<`\[]", line)
    assert "wrong-value" in page
    assert "wrong-value" in summary


def test_solutions_find_the_reference_of_their_name(tmp_path: Path) -> None:
    """In a folder of references, suffixes do not count and a reference may be a folder. A task (a folder with
    task.yml) or a single file is the reference of all solutions."""
    for name in ("s/1.py", "s/2.py", "s/3.cu", "r/1.py", "r/3/func_forward.py", "r/9.py", "t/task.yml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    s, r = tmp_path / "s", tmp_path / "r"
    assert pairs(s, r) == [(s / "1.py", r / "1.py"), (s / "3.cu", r / "3")]
    assert [reference for _, reference in pairs(s, tmp_path / "t")] == [tmp_path / "t"] * 3
    assert pairs(s, r / "1.py")[1] == (s / "2.py", r / "1.py")
