"""Proves that every planted cheat breaks its rule, and that no honest kernel is accused."""

from __future__ import annotations

import pytest

from kernelproof.grading import Limits, check_source
from tests import processes
from tests.kernelproof.grading import cheats, honest, programs


@pytest.mark.one_in(5)
@pytest.mark.slow
@pytest.mark.parametrize("name", honest.PROGRAMS)
def test_honest_kernels_are_right(name: str) -> None:
    verdict = honest.PROGRAMS[name].verdict(isolated=False)
    assert verdict.right, str(verdict)
    assert not verdict.not_checked
    assert verdict.calls >= 10 * len(honest.PROGRAMS[name].shapes)


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", cheats.PROGRAMS)
def test_cheats_break_their_rule(name: str) -> None:
    program = cheats.PROGRAMS[name]
    verdict = program.verdict(isolated=False)
    assert not verdict.right
    assert verdict.outcome == "wrong"
    assert set(program.rules) <= verdict.rules, str(verdict)
    for finding in verdict.findings:
        assert finding.evidence, finding
        assert finding.hint


@pytest.mark.slow
def test_kept_state_is_shown_with_the_inputs_of_the_wrong_call() -> None:
    verdict = cheats.PROGRAMS["by_count"].verdict(isolated=False)
    shown = {item.rule: item.evidence.get("inputs") for item in verdict.findings}
    assert shown["state-kept"] == shown["wrong-value"] is not None, str(verdict)


def test_there_are_enough_of_them() -> None:
    assert len(honest.PROGRAMS) >= 50
    assert len(cheats.PROGRAMS) >= 50
    assert len(cheats.KINDS) >= 14


@pytest.mark.slow
def test_what_does_not_end_is_ended() -> None:
    with processes.use_memory(1.0):  # a check does not count memory that it inherits from this process
        verdict = check_source(
            programs.text("cheats.cu"), lambda x: 2 * x, [{"n": 8}], buffers=cheats.DOUBLE.buffers,
            launches=[{"entry": "spins", "block": 32, "args": ["x", "y", "n"]}], limits=Limits(seconds=1.5, gib=0.75),
        )  # fmt: skip
    assert (verdict.outcome, verdict.findings) == ("not checked", [])
    assert "did not end within 1.5 s" in verdict.not_checked[0]
    assert verdict.seconds < 120, "the kernel would run for days"
