"""Proves what the script for HeCBench reads from a Makefile, how it reduces sizes, and which errors make it fail."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scripts import hecbench, hecbench_programs

# A program that says what arguments it expects.
MAIN = """
int main(int argc, char* argv[]) {
    if (argc != 4) printf("Usage: %s <width> <height> <repeat>\\n", argv[0]);
    int w = atoi(argv[1]), h = atoi(argv[2]);
}
"""


def test_repetitions_become_two_and_sizes_small() -> None:
    width, height, repeat = hecbench_programs.smaller_arguments(["8192", "1000", "100"], MAIN)
    assert repeat == "2"
    assert int(width) * int(height) <= hecbench_programs.ELEMENTS
    assert 8192 % int(width) == 0
    assert 1000 % int(height) == 0


@pytest.mark.parametrize("arguments", [["0.5", "a.txt", "7"], ["-v", "--mode=fast"]])
def test_what_is_no_size_stays(arguments: list[str]) -> None:
    assert hecbench_programs.smaller_arguments(arguments, "") == arguments


def test_options_are_named_by_themselves() -> None:
    smaller = hecbench_programs.smaller_arguments(["--iterations=500", "-s", "65536"], "")
    assert smaller[0] == "--iterations=2"
    assert smaller[1] == "-s"
    assert int(smaller[2]) <= hecbench_programs.ELEMENTS


def test_many_sizes_share_the_elements() -> None:
    smaller = hecbench_programs.smaller_arguments(["512", "512", "512", "512"], "")
    assert min(map(int, smaller)) >= hecbench_programs.LEAST
    assert math.prod(map(int, smaller)) <= hecbench_programs.ELEMENTS


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of HeCBench with one benchmark."""
    folder = tmp_path / "src" / "scale-cuda"
    (folder / "kernels").mkdir(parents=True)
    (folder / "main.cu").write_text(MAIN)
    (folder / "kernels" / "scale.cu").write_text("")
    (folder / "Makefile").write_text(
        "main: main.o scale.o\n\t$(CC) -o $@ $^ -lm\n"
        "main.o: main.cu\n\t$(CC) -std=c++17 -arch=$(ARCH) -I../include \\\n\t -c $< -o $@\n"
        "scale.o: kernels/scale.cu\n\t$(CC) -Xcompiler -fopenmp -c $< -o $@\n"
        "run: main\n\tMODE=2 ./main 8192 64 100\n"
    )
    return tmp_path


def test_a_makefile_gives_sources_flags_and_arguments(checkout: Path) -> None:
    with hecbench_programs.runs_of(checkout, "scale") as runs:
        (run,) = runs
    assert [path.name for path in run.sources] == ["main.cu", "scale.cu"]
    assert run.flags.split() == [
        "-std=c++17", "-arch=sm_80", f"-I{checkout}/src/include", "-Xcompiler=-fopenmp", "-lm",
    ]  # fmt: skip
    assert run.arguments == ["256", "64", "2"]


def test_edits_are_made_in_a_copy(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = checkout / "data.json"
    data.write_text(json.dumps({"programs": {"scale": {"edits": {"main.cu": [["argc != 4", "argc < 4"]]}}}}))
    monkeypatch.setattr(hecbench_programs, "DATA", data)
    with hecbench_programs.runs_of(checkout, "scale") as runs:
        assert "argc < 4" in runs[0].sources[0].read_text()
    assert "argc != 4" in (checkout / "src" / "scale-cuda" / "main.cu").read_text()
    assert [path.name for path in (checkout / "src").iterdir()] == ["scale-cuda"]


def exit_code(folder: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, object], run: dict[str, object]) -> int:
    """The exit code of ``table`` for the run of a program x."""
    monkeypatch.setattr(hecbench, "DATA", folder / "data.json")
    hecbench.DATA.write_text(json.dumps({"judgements": {}, "complaints": {}, **data}))
    results = folder / "results.jsonl"
    results.write_text(json.dumps({"program": "x", "runs": [{"arguments": [], "reason": "", **run}]}) + "\n")
    return CliRunner().invoke(hecbench.app, ["table", str(results)]).exit_code


@pytest.mark.parametrize(
    ("verdict", "lines", "code"),
    [("true", ["a.cu:1", "a.cu:2"], 0), ("false", ["a.cu:1", "a.cu:2"], 1), ("true", ["a.cu:1"], 1)],
)
def test_an_error_needs_a_judgement_that_it_is_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: str, lines: list[str], code: int
) -> None:
    judgement = {"rule": "shared-race", "lines": lines, "verdict": verdict, "reason": "no barrier"}
    finding = {"rule": "shared-race", "lines": ["a.cu:1", "a.cu:2"], "count": 1, "text": ""}
    run = {"outcome": "errors", "findings": [finding]}
    assert exit_code(tmp_path, monkeypatch, {"judgements": {"x": [judgement]}}, run) == code


@pytest.mark.parametrize(("explained", "code"), [({}, 1), ({"x": "its reference is not initialised"}, 0)])
def test_a_program_that_says_fail_needs_an_explanation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, explained: dict[str, str], code: int
) -> None:
    run = {"outcome": "clean", "findings": [], "launches": 1, "complaints": ["FAIL"]}
    assert exit_code(tmp_path, monkeypatch, {"complaints": explained}, run) == code
