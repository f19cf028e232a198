"""Proves that the steps of the GitHub Action pass for right programs and fail for wrong ones.

They run here as the action runs them, except that pip only prints what it would install and other actions are left out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.kernelproof.emulator.build import stable_folder
from tests.kernelproof.grading import solutions
from tests.packages import require

yaml = require("yaml")
# A right program, one with a race, and a test file that runs the latter.
RIGHT = """
__global__ void reverse(float *x) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = tile[63 - threadIdx.x];
}
int main(int argc, char **argv) {
  float *x;
  cudaMalloc(&x, 256);
  cudaMemset(x, 0, 256);
  reverse<<<1, 64>>>(x);
  return cudaDeviceSynchronize() + argc - 1;
}
"""
WRONG = RIGHT.replace("  __syncthreads();\n", "")
TEST = """
import numpy as np
def test_reverse(cuda_emulator):
    cuda_emulator.compile("wrong.cu").launch("reverse", block=64, args=[np.ones(64, "f4")])
"""
# Replaces pip, which would install another version of the tested package.
NO_PIP = 'python() { echo "not run: python $*"; }\n'


class Outcome(NamedTuple):
    """The exit code and output of a step that ran."""

    code: int
    output: str


def definition(checkout: Path) -> dict[str, Any]:
    """The action's definition."""
    action: dict[str, Any] = yaml.safe_load((checkout / "action.yml").read_text())
    return action


def run_action(checkout: Path, folder: Path, **inputs: str) -> dict[str, Outcome]:
    """Runs the steps that the runner would run; returns their outcomes by name."""
    action = definition(checkout)
    unknown = inputs.keys() - action["inputs"].keys()
    assert not unknown, unknown
    values = {f"inputs.{name}": inputs.get(name, entry["default"]) for name, entry in action["inputs"].items()}
    values |= {"github.action_path": str(checkout), "runner.temp": str(folder / "temp")}

    def expand(text: str) -> str:
        return re.sub(r"\$\{\{ (.*?) \}\}", lambda match: values[match[1]], text)

    outcomes = {}
    for step in action["runs"]["steps"]:
        if "uses" in step or not holds(step.get("if", "success()"), values):
            continue
        script = folder / "script.sh"
        script.write_text((NO_PIP if step["name"] == "Install" else "") + step["run"])
        variables = {name: expand(text) for name, text in step["env"].items()}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        process = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)], check=False,
            env=os.environ | variables | {"GITHUB_ACTIONS": "true", "PATH": path, "PYTEST_ADDOPTS": ""},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        outcomes[step["name"]] = Outcome(process.returncode, process.stdout)
    return outcomes


def holds(condition: str, values: dict[str, str]) -> bool:
    """Whether a step's condition holds. ``values``: the values of its expressions, such as whether earlier steps
    failed."""
    condition = re.sub(r"inputs\.[\w-]+", lambda match: repr(values[match[0]]), condition)
    condition = condition.replace("&&", "and").replace("||", "or")
    return bool(eval(condition, {"success": lambda: True, "failure": lambda: False}))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for what steps write. They run in the folder of the programs."""
    programs = {"right.cu": RIGHT, "wrong.cu": WRONG, "test_wrong.py": TEST}
    monkeypatch.chdir(stable_folder(programs))
    return tmp_path


@pytest.mark.slow
def test_a_wrong_program_has_annotations_and_fails(checkout: Path, folder: Path) -> None:
    programs = """
right.cu
wrong.cu --gpu "h200"
right.cu -- 'an argument'
"""
    outcomes = run_action(checkout, folder, check=programs, requirements="numpy pytest-xdist")
    assert outcomes["Install"] == (0, f"not run: python -m pip install {checkout}[nvcc] pytest numpy pytest-xdist\n")
    code, output = outcomes["Check"]
    assert code == 1
    line = 1 + WRONG.split("\n").index("  x[threadIdx.x] = tile[63 - threadIdx.x];")
    annotations = [text for text in output.split("\n") if text.startswith("::error")]
    assert annotations
    assert all(text.startswith(f"::error file=wrong.cu,line={line},title=shared-race::") for text in annotations)
    groups = output.split("::group::kernelproof check ")[1:]
    assert [re.findall(r": (?:no findings|\d errors?)$", text, re.M) for text in groups] == [
        [": no findings"], [f": {len(annotations)} error{'s' * (len(annotations) > 1)}"], [": no findings"]
    ]  # fmt: skip
    assert "the program ended with exit code 1" in groups[2]
    files = [json.loads((folder / "temp" / "kernelproof" / f"{number}.sarif").read_text()) for number in (1, 2, 3)]
    assert [len(file["runs"][0]["results"]) for file in files] == [0, len(annotations), 0]
    assert outcomes["Test"] == (0, "")


@pytest.mark.slow
def test_right_programs_pass_and_tests_are_annotated(checkout: Path, folder: Path) -> None:
    outcomes = run_action(checkout, folder, check="right.cu", pytest="-q -p kernelproof.testing.plugin test_wrong.py")
    assert outcomes["Check"].code == 0
    assert "::error" not in outcomes["Check"].output
    code, output = outcomes["Test"]
    assert code == 1
    assert re.search(r"^::error file=wrong\.cu,line=5,title=shared-race::reverse: ", output, re.MULTILINE)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.torch
def test_graded_solutions_are_in_the_summary(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    texts = {
        "problem.py": solutions.REFERENCE, "found/kernel.py": solutions.HONEST,
        "found/none.py": solutions.REFERENCE + "\nclass ModelNew(Model):\n    pass\n",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "temp").mkdir()
    summary = tmp_path / "summary.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    outcomes = run_action(
        checkout, tmp_path, grade="found --reference problem.py\n\nfound/kernel.py --reference problem.py"
    )
    assert "Check" not in outcomes
    code, output = outcomes["Grade"]
    assert code == 1, output
    assert output.count("::group::kernelproof grade found") == 2
    page = summary.read_text()
    assert "kernel.py" in page
    assert "none.py" in page
    assert "no-kernel" in page
    assert not (tmp_path / "temp" / "graded.md").exists()


def test_every_input_is_used_and_described(checkout: Path) -> None:
    action = definition(checkout)
    text = (checkout / "action.yml").read_text()
    for name, entry in action["inputs"].items():
        assert entry["description"], name
        assert f"inputs.{name}" in text, name
        assert f"`{name}`" in (checkout / "docs" / "kernelproof" / "ci.md").read_text(), name
    assert action["runs"]["using"] == "composite"
    # Scripts get inputs as variables, so that text of a pull request is never executed.
    assert not any("${{" in step.get("run", "") for step in action["runs"]["steps"])
