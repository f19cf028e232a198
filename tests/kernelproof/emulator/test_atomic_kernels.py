"""Proves that right kernels which count and sum by atomics have exact results and no findings, and that each planted
fault is found.
"""

from __future__ import annotations

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import Memory, Options
from kernelproof.emulator.state.reports import Report
from tests.kernelproof.emulator.build import compile_file

# Numbers that are counted, bins that count them, and CTAs that share the bins.
COUNT, BINS, CTAS = 1000, 16, 4


def histogram(name: str, options: Options) -> tuple[bool, list[Report]]:
    """Whether the counts are right, and the findings."""
    data = np.random.default_rng(0).integers(0, BINS, COUNT).astype(np.uint8)
    memory = Memory()
    counts = memory.upload(np.zeros(BINS, np.uint32), "inout")
    program = emulator.load(compile_file("atomics", ".ptx"))
    arguments = [memory.upload(data, "input"), COUNT, counts]
    result = program.launch(f"histogram_{name}", CTAS, 64, arguments, memory=memory, options=options)
    return bool((counts.download() == np.bincount(data, minlength=BINS)).all()), result.reports


def kinds(reports: list[Report]) -> set[str]:
    """The kinds of the findings that are errors."""
    return {report.kind for report in reports if report.is_error}


@pytest.mark.parametrize("name", ["RIGHT", "FENCED"])
@pytest.mark.parametrize("options", [Options(), Options(adverse=True), Options(lanes=64)])
def test_right_histograms(name: str, options: Options) -> None:
    assert histogram(name, options) == (True, [])


@pytest.mark.parametrize("options", [Options(), Options(lanes=64)])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NO_BARRIER_BEFORE", "shared-race"),
        ("NO_BARRIER_AFTER", "shared-race"),
        ("PLAIN_COUNT", "shared-race"),
        ("PLAIN_BESIDE", "shared-race"),
        ("PLAIN_READ", "shared-race"),
        ("PLAIN_TOTAL", "global-race"),
        ("CTA_SCOPE", "global-race"),
    ],
)
def test_faults_of_histograms(name: str, kind: str, options: Options) -> None:
    _, reports = histogram(name, options)
    assert {report.kind for report in reports} == {kind}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("RIGHT", set()),
        ("NO_RELEASE", {"global-race"}),
        ("NO_ACQUIRE", {"global-race"}),
        ("NARROW_FENCES", {"global-race"}),
    ],
)
@pytest.mark.parametrize("lanes", [None, 64])
def test_sums_under_a_lock(name: str, found: set[str], lanes: int | None) -> None:
    memory = Memory()
    total, lock = (memory.upload(np.zeros(1, np.uint32), "inout") for _ in range(2))
    values = memory.upload(np.arange(1, 9, dtype=np.uint32), "input")
    program = emulator.load(compile_file("atomics", ".ptx"))
    result = program.launch(f"sum_{name}", 8, 64, [values, total, lock], memory=memory, options=Options(lanes=lanes))
    assert kinds(result.reports) == found
    assert (int(total.download()[0]), int(lock.download()[0])) == (36, 0)
