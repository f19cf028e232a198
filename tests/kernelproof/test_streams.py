"""Proves how default streams of threads are ordered, and what is reported for kernels that wait forever."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelproof.checking import compilation, plan, supervision
from kernelproof.checking.result import Result
from kernelproof.ground import toolchain

SOURCE = Path(__file__).parent / "checked" / "threads.cu"


@pytest.fixture(scope="module")
def library() -> Path:
    """The compiled program, with a default stream for each thread."""
    return compilation.library([SOURCE], ["--default-stream", "per-thread"], "sm_80", toolchain.discover())


def check_case(library: Path, case: str) -> Result:
    """The result of checking one case of the program."""
    return supervision.run(plan.CheckPlan("sm_80", library, main=("threads", case), quiet=True), "threads.cu", 120, 4)


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        ("threads", {"stream-race"}),
        ("one thread", set()),
        ("a blocking stream", {"stream-race"}),
        ("legacy", set()),
        ("copied", set()),
    ],
)
def test_default_streams_of_threads(library: Path, case: str, kinds: set[str]) -> None:
    result = check_case(library, case)
    assert {finding.kind for finding in result.findings.values()} == kinds
    assert (result.code, result.refusals) == (1 if kinds else 0, {})


def test_a_kernel_that_waits_for_another_stream_is_not_checked(library: Path) -> None:
    result = check_case(library, "waits")
    ((kernel, _),) = result.refusals
    assert "waits" in kernel
    assert (result.code, dict(result.findings)) == (2, {})


@pytest.mark.slow
def test_the_note_names_the_missing_co_residency(library: Path) -> None:
    result = check_case(library, "gathers")
    ((kernel, _),) = result.refusals
    assert "gather" in kernel
    assert (result.code, dict(result.findings)) == (2, {})
    (note,) = result.notes
    assert "co-residency" in note
