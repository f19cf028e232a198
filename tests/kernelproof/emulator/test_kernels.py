"""Proves that right kernels give the exact numbers without a report, and wrong ones a report that names the mistake."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import Memory, Options
from kernelproof.emulator.frontend.flow import dataflow
from tests.kernelproof.emulator.build import compile_file
from tests.kernelproof.emulator.kernel_cases import (
    CORRECT_DEVICE,
    CORRECT_SHARED,
    DEVICE,
    WRONG_DEVICE,
    WRONG_SHARED,
    Case,
    program,
    rng,
    run_case,
    source_line,
)


def label(value: Any) -> str:
    """A case's name in pytest: kernel and lanes."""
    return f"{value.kernel}-{value.options.lanes}" if isinstance(value, Case) else ""


@pytest.mark.parametrize("case", CORRECT_SHARED + CORRECT_DEVICE, ids=label)
def test_correct(case: Case) -> None:
    reports = run_case(case)
    assert [r for r in reports if r.is_error] == []
    # The one kernel that reads a value without using it has a benign finding.
    assert [r.kind for r in reports] == ["uninitialised-shared"] * (case.kernel == "garbage_dropped")
    assert all(r.severity is emulator.Severity.BENIGN and "reaches no memory" in r.message for r in reports)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "where"), WRONG_SHARED + WRONG_DEVICE, ids=label)
def test_wrong(case: Case, where: str) -> None:
    reports = run_case(case)
    assert {r.kind for r in reports} == case.kinds
    assert all(r.is_error for r in reports)
    for report in reports:
        assert report.kind in ("unwritten-output", "runaway") or (report.line > 0 and report.text and report.threads)
    if where:
        line = source_line(case.file, where)
        assert any(f"{case.file}.cu:{line}" in r.source for r in reports), [r.source for r in reports]


@pytest.mark.parametrize("case", CORRECT_SHARED + CORRECT_DEVICE, ids=label)
def test_without_hazards_the_numbers_are_the_same(case: Case) -> None:
    plain = Case(**{**vars(case), "options": Options(hazards=False, lanes=case.options.lanes)})
    assert run_case(plain) == []


def test_floats() -> None:
    x = rng.standard_normal((32, 2)).astype(np.float16)
    memory = Memory()
    a, out, f = (
        memory.upload(x),
        memory.upload(np.empty_like(x), "output"),
        memory.upload(np.empty(32, np.float32), "output"),
    )
    assert program(DEVICE).launch("halves", 1, 32, [a, out, f, 32], memory=memory).reports == []
    b = np.roll(x, -1, 0)
    wide_a, wide_b = x.astype(np.float64), b.astype(np.float64)
    want = np.maximum((wide_a * wide_b + (x + b).astype(np.float64)).astype(np.float16), x - b)
    np.testing.assert_array_equal(out.download(), want)
    near = want[:, 0].astype(np.float64) + wide_b[:, 0] * np.exp(wide_a[:, 1]) + 1 / np.sqrt(np.abs(wide_a[:, 1]) + 1)
    np.testing.assert_allclose(f.download(), near, rtol=2e-6)


@pytest.mark.parametrize("case", CORRECT_SHARED + CORRECT_DEVICE, ids=label)
def test_lanes_that_leave_lockstep_are_noticed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the static analysis of divergence, the machine must notice at run time and start over."""
    monkeypatch.setattr(dataflow, "_separated_registers", lambda *_: set())
    fresh = emulator.load(compile_file(case.file, ".ptx").read_text())
    monkeypatch.setattr(sys.modules[__name__], "program", lambda _: fresh)
    assert [r for r in run_case(case) if r.is_error] == []
