"""Proves how compute-sanitizer is run and its output read, with a stand-in for the tool."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cudal2gen.generation import compiler
from cudal2gen.kernel import Record
from cudal2gen.launch.launcher import LaunchError
from cudal2gen.validator import Shape, sanitizer
from kernelproof import emulator
from kernelproof.ground.element import Element
from tests.cudal2gen.paths import PATHS, small

# Outputs of compute-sanitizer: without a finding, with a race, with a fault, and on a GPU that it refuses.
CLEAN = "========= COMPUTE-SANITIZER\nlaunching\nlaunched once\n========= ERROR SUMMARY: 0 errors\n"
RACES = "========= COMPUTE-SANITIZER\nlaunching\n========= Error: Race reported between Write access at hgemm+0x40\n"
FAULT = "========= COMPUTE-SANITIZER\nlaunching\n========= Invalid __global__ write of size 16\n=========   at x\n"
REFUSED = (
    "========= COMPUTE-SANITIZER\n========= Error: Device not supported. Please refer to the documentation\n"
    "=========\n========= Program hit cudaErrorUnknown (error 999) on CUDA API call to cudaMalloc.\n"
    "error: cudaMalloc: unknown error (cudaError 999)\n========= ERROR SUMMARY: 1 error\n"
)


def launch(record: Record) -> sanitizer.SingleLaunch:
    """A launch of two tiles along each axis and two steps of k for each slice."""
    m, n, k = (2 * record.bm, 2 * record.bn, 2 * record.k_step * record.split_k)
    shape = Shape(m, n, record.baked_k or k)
    directory = compiler.build([record])[0].directory
    return sanitizer.launch_of(record, shape, directory, compiler.launcher(), emulator.runtime_path())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single", "nn", "split_k f32 zsplit", "predicate nn", "small direct baked"])
def test_the_process_launches_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with emulator.session(device=emulator.Device(sm_count=2)) as session:
        sanitizer.main([json.dumps(asdict(launch(PATHS[name])))])
    assert capsys.readouterr().out == "launching\nlaunched once\n"
    assert len(session.launches) == 1
    assert session.reports == []


def test_a_short_d_is_there_to_be_found() -> None:
    with emulator.session() as session:
        sanitizer.run(replace(launch(small()), missing_d=64))
    assert any("global-out-of-bounds" in str(report) for report in session.reports)


def test_a_wrong_product_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Element.spell
    monkeypatch.setattr(Element, "spell", lambda element, number: right(element, 2 if number == 1 else number))
    with emulator.session(), pytest.raises(LaunchError, match="the first element of D is not 128"):
        sanitizer.run(launch(small()))


@pytest.mark.parametrize(
    ("output", "summary", "count"),
    [
        (CLEAN, "0 errors", 0),
        (CLEAN.replace("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"),
         "0 errors", 0),
        (FAULT + "========= ERROR SUMMARY: 32 errors\n", "32 errors", 1),
        (FAULT + "========= ERROR SUMMARY: 1 error\n", "1 errors", 1),
        (RACES + "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n", "1 errors", 1),
        (RACES + "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n", "2 errors", 1),
        (REFUSED, "not run: Error: Device not supported. Please refer to the documentation", 0),
        # One tool never ran the program, and one stopped early.
        ("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n",
         "not run: the tool reports no launch", 0),
        ("========= COMPUTE-SANITIZER\nlaunching\nlaunched once\n", "not run: the tool reports no launch", 0),
        ("launching\nerror: no kernel image (cudaError 209)\n========= ERROR SUMMARY: 0 errors\n",
         "not run: error: no kernel image (cudaError 209)", 0),
        ("", "not run: the tool reports no launch", 0),
    ],
)  # fmt: skip
def test_outputs_are_read_so_that_nothing_passes_unseen(output: str, summary: str, count: int) -> None:
    answer, findings = sanitizer.answer(output)
    assert answer == summary
    assert len(findings) == count
    if findings:
        assert "Invalid __global__ write" in findings[0] or "Race reported" in findings[0]


def tool(path: Path, body: str) -> Path:
    """A program that stands in for a sanitizer."""
    path.write_text(f"#!{sys.executable}\nimport sys, os, time\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_a_tool_is_run_over_the_process(tmp_path: Path) -> None:
    """The stand-in executes the process's command in an emulator session, and counts what that reports."""
    watching = tool(
        tmp_path / "compute-sanitizer",
        "module = sys.argv.index('-m')\n"
        "assert sys.argv[1:3] == ['--tool', 'memcheck'], sys.argv\n"
        "assert sys.argv[module + 1] == 'cudal2gen.validator.sanitizer'\n"
        "sys.path.insert(0, os.environ['PYTHONPATH'].split(os.pathsep)[0])\n"
        "from kernelproof import emulator\n"
        "from cudal2gen.validator import sanitizer\n"
        "print('========= COMPUTE-SANITIZER')\n"
        "with emulator.session() as session:\n"
        "    sanitizer.main(sys.argv[module + 2:])\n"
        "for report in session.reports: print('=========', report.kind)\n"
        "print('========= ERROR SUMMARY:', len(session.reports), 'errors')\n",
    )
    small_launch = launch(small())
    assert sanitizer.check(small_launch, "memcheck", sanitizer=watching) == ("0 errors", [])
    summary, findings = sanitizer.check(replace(small_launch, missing_d=64), "memcheck", sanitizer=watching)
    assert summary != "0 errors"
    assert findings == [f"{summary}, first: global-out-of-bounds"]


def test_a_tool_that_does_not_run_is_told_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_launch = launch(small())
    slow = tool(tmp_path / "slow", "time.sleep(60)")
    assert sanitizer.check(small_launch, "memcheck", sanitizer=slow, timeout_s=0.5) == (
        "not run: took more than 0.5 s",
        [],
    )
    absent = tmp_path / "gone"
    assert sanitizer.check(small_launch, "memcheck", sanitizer=absent) == (
        f"not run: {absent}: No such file or directory",
        [],
    )
    monkeypatch.setattr(sanitizer, "program", lambda: None)
    assert sanitizer.check(small_launch, "racecheck") == ("not run: compute-sanitizer is not installed", [])


def test_without_a_gpu_the_process_fails_in_one_line(tmp_path: Path) -> None:
    """The stand-in runtime has no device outside a session."""
    bare = tool(tmp_path / "bare", "os.execv(sys.argv[sys.argv.index('-m') - 1], sys.argv[sys.argv.index('-m') - 1:])")
    summary, findings = sanitizer.check(launch(small()), "memcheck", sanitizer=bare)
    assert summary.startswith("not run: error: ")
    assert "no CUDA-capable device" in summary
    assert findings == []
