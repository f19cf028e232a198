"""Proves that host code which conflicts with work in flight is found at its lines, and right programs have no findings.

The cases are in ``checked/orders.cu``, where comments mark the lines that a finding names.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernelproof.checking import compilation, plan, supervision
from kernelproof.checking.result import Result
from kernelproof.emulator import RULES as RULE_TEXTS
from kernelproof.emulator import Participant, Report
from kernelproof.emulator.host.callsites import allocated_variable
from kernelproof.ground import toolchain
from tests.kernelproof.emulator import build
from tests.kernelproof.emulator.rule_examples import WITH_PROGRAMS, examples

SOURCE = Path(__file__).parent / "checked" / "orders.cu"
LINES = SOURCE.read_text().splitlines()
# The names of the program's cases. Those of right ones begin with "r ".
CASES = re.findall(r'^    \{"([^"]+)", \[\]', SOURCE.read_text(), re.M)
RIGHT = [case for case in CASES if case.startswith("r ")]
# The rule that a wrong case breaks, for those that break another one than host-race.
RULES = {
    "branches": "stream-race", "late branch": "stream-race",
    **dict.fromkeys(["device read", "device write", "device by driver", "device copied by host", "device variable",
                     "beyond pinned", "file from device"], "host-access"),
    **dict.fromkeys(["freed twice", "pinned freed twice", "freed in order twice", "wrong free",
                     "wrong free of the host", "inner free", "foreign free"], "invalid-free"),
    **dict.fromkeys(["freed, launched", "freed, copied", "freed, set", "freed, read by host"], "use-after-free"),
    **dict.fromkeys(["to the host", "from the host", "on the device", "between hosts"], "copy-direction"),
}  # fmt: skip
# "poll" cannot be checked and "leak" is only noted, so each has a test of its own.
WRONG = [case for case in CASES if case not in RIGHT and case not in ("poll", "leak")]


@pytest.fixture(scope="module")
def library() -> Path:
    """The compiled program."""
    return compilation.library([SOURCE], [], "sm_80", toolchain.discover())


def check_case(library: Path, case: str) -> Result:
    """The result of checking one case of the program."""
    program = plan.CheckPlan("sm_80", library, main=("orders", case), quiet=True)
    return supervision.run(program, "orders.cu", 120, 4)


def marked_lines(mark: str, case: str) -> set[int]:
    """The lines (from 1) whose comments have this mark and this case, such as "here" and the case's name."""
    words = re.compile(rf"\b{mark} {re.escape(case)}(?:;|$)")
    return {i for i, line in enumerate(LINES, 1) if words.search(line.partition("//")[2])}


def lines(side: Participant | None) -> set[int]:
    """The source line of a side of a finding, and the lines that called it."""
    return set() if side is None else {frame.line for frame in side.site.frames}


def test_there_are_enough_cases_of_each_kind() -> None:
    assert len(WRONG) >= 45
    assert len(RIGHT) >= 30
    assert RULES.keys() <= set(WRONG)


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_a_planted_defect_is_found_once_and_at_its_lines(library: Path, case: str) -> None:
    result = check_case(library, case)
    (finding,) = result.findings.values()
    assert finding.kind == RULES.get(case, "host-race")
    assert (result.code, result.refusals) == (1, {})
    assert finding.access.site.home is not None
    assert lines(finding.access) >= marked_lines("here", case)
    assert lines(finding.other) >= marked_lines("there", case)
    assert origins(finding) >= {*marked_lines("made", case), *marked_lines("freed", case)}


def origins(finding: Report) -> set[int]:
    """The lines at which memory was allocated and freed, from a finding's text."""
    return {int(line) for line in re.findall(r"orders\.cu:(\d+)", str(finding))}


@pytest.mark.slow
@pytest.mark.parametrize("case", RIGHT)
def test_right_programs_have_no_findings(library: Path, case: str) -> None:
    result = check_case(library, case)
    assert (dict(result.findings), result.ending, result.refusals, result.unsupported) == ({}, "", {}, [])
    assert (result.code, result.program_exit_code) == (0, 0)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("rule", sorted(WITH_PROGRAMS))
def test_the_programs_of_a_rules_page_are_as_it_says(rule: str) -> None:
    wrong, *right = examples(rule)
    result = check_text(wrong.code)
    (finding,) = result.findings.values()
    assert (finding.kind, finding.severity) == (rule, RULE_TEXTS[rule].severity)
    for side, mark in ((finding.access, "here"), (finding.other, "there")):
        home = side.site.home if side is not None else None
        assert wrong.marked(mark) == ([home.line] if home is not None else [])
    assert right
    for program in right:
        assert check_text(program.code).code == 0


def check_text(code: str) -> Result:
    """The check of a program's text."""
    library = compilation.library([build.stable_file(code)], [], "sm_80", toolchain.discover())
    return supervision.run(plan.CheckPlan("sm_80", library, main=("program",), quiet=True), "program.cu", 120, 4)


def test_what_host_code_learns_from_a_running_kernel_is_not_checked(library: Path) -> None:
    result = check_case(library, "poll")
    ((kernel, reason),) = result.refusals
    assert (result.code, result.program_exit_code, dict(result.findings)) == (2, 0, {})
    assert "produce" in kernel
    assert "orders.cu:" in reason


def test_what_is_never_freed_is_noted(library: Path) -> None:
    result = check_case(library, "leak")
    (note,) = result.notes
    (line,) = marked_lines("made", "leak")
    assert note.endswith(f"the first is p (100 bytes, allocated at orders.cu:{line})")
    assert (result.code, dict(result.findings)) == (0, {})


def test_a_finding_names_the_variable_and_the_byte(library: Path) -> None:
    (finding,) = check_case(library, "device write").findings.values()
    assert finding.place is not None
    assert (finding.place.buffer, finding.place.offset) == ("d", 3996)


def test_a_launch_is_the_line_that_launches_and_not_the_kernels(library: Path) -> None:
    (finding,) = check_case(library, "managed variable").findings.values()
    assert finding.other is not None
    home = finding.other.site.home
    assert home is not None
    assert {home.line} == marked_lines("there", "managed variable")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("cudaMalloc(&d, 4 * n);", "d"),
        ("check(cudaMallocHost((void **)&s.rows[i], 4));", "s.rows[i]"),
        ("cudaMalloc(&d, n); cudaMallocHost(&h, n);", ""),
        ("d = allocate(n);", ""),
    ],
)
def test_allocations_are_named_by_their_lines(line: str, name: str) -> None:
    assert allocated_variable(line) == name
