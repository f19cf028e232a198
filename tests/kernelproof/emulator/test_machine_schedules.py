"""Proves that a wait which is removed from machine code is found, and that the finding names both instructions."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import Memory
from kernelproof.sass import Instruction, disassemble, hazards
from tests import commands
from tests.kernelproof.cubin_edits import edit_cubin, rescheduled_code
from tests.kernelproof.emulator import build

# A kernel that adds 1 to a number per thread.
SOURCE = """__global__ void shifted(const float* x, float* y) {
  float value = x[threadIdx.x];
  y[threadIdx.x] = value + 1.0f;
}
"""


@pytest.fixture(scope="module")
def cubin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled kernel of ``SOURCE``, with source lines."""
    return Path(shutil.copy(build.compile_cubin(SOURCE, "-lineinfo"), tmp_path_factory.mktemp("schedules")))


def instruction(cubin: Path, name: str) -> Instruction:
    """The first instruction with this opcode, without modifiers."""
    return next(item for item in disassemble(cubin)[0].instructions if item.name == name)


def remove_wait(cubin: Path) -> Path:
    """The kernel with an addition that does not wait for the load."""
    (function,) = disassemble(cubin)
    add = instruction(cubin, "FADD")
    path = cubin.with_name("edited.cubin")
    path.write_bytes(edit_cubin(cubin.read_bytes(), function.name, {add.address: rescheduled_code(add, waits=())}))
    return path


@pytest.mark.slow
def test_an_edit_changes_one_instruction(cubin: Path) -> None:
    before, after = (disassemble(path)[0].instructions for path in (cubin, remove_wait(cubin)))
    changed = [(a.text, b.text) for a, b in zip(before, after, strict=True) if a != b]
    assert changed == [(instruction(cubin, "FADD").text,) * 2]
    assert instruction(remove_wait(cubin), "FADD").control.waits == ()


@pytest.mark.slow
def test_a_finding_names_both_instructions_and_their_lines(cubin: Path) -> None:
    memory = Memory()
    x, y = memory.upload(np.zeros(32, np.float32)), memory.upload(np.zeros(32, np.float32), "output")
    assert emulator.load(cubin).launch("shifted", 1, 32, [x, y], memory=memory).reports == []
    path = remove_wait(cubin)
    (report,) = emulator.load(path).launch("shifted", 1, 32, [x, y], memory=memory).reports
    assert (report.kind, report.is_error) == ("register-hazard", True)
    assert report.other is not None
    for site, name in ((report.access.site, "FADD"), (report.other.site, "LDG")):
        assert (site.line, site.machine_code) == (instruction(cubin, name).address, True)
        assert site.text.startswith(name)
    ptx = [side.site.ptx_line for side in (report.access, report.other)]
    assert ptx == [instruction(cubin, name).ptx_line for name in ("FADD", "LDG")]
    assert ptx[0] > ptx[1] > 0
    assert [side.site.home.line for side in (report.access, report.other) if side.site.home] == [3, 2]


@pytest.mark.slow
def test_the_command_ends_with_1(cubin: Path) -> None:
    where = "--launch=shifted<<<1,32>>>", "--args=in:f32[32]=zeros out:f32[32]", "--machine-code", "--json"
    codes = []
    for path in (cubin, remove_wait(cubin)):
        done = commands.run("check", str(path), *where, program="kernelproof")
        findings = json.loads(done.stdout)["findings"]
        codes.append(
            (done.returncode, [(item["rule"], item["access"]["address"], item["access"]["ptx"]) for item in findings])
        )
    assert codes == [(0, []), (1, [("register-hazard", instruction(cubin, "FADD").address, "")])]


def test_functions_of_unknown_architectures_have_no_hazards(cubin: Path) -> None:
    (function,) = disassemble(remove_wait(cubin))
    assert len(hazards(function)) == 1
    assert hazards(replace(function, sm="sm_70")) == []
