"""Draws mutants of this repository's Python code, package by package, and reports which the package's tests notice.

    python scripts/mutants.py --count 10 --seed 3 kernelproof/grading cudal2gen/report

A mutant changes one thing in one file: a comparison, an operator, a number, a condition, a returned value. Each is made
in a copy of the checkout, so nothing here changes. First run the tests that import the mutant's module, since they
notice most mutants, then those of the package (the "room") that ``TESTS`` names. They run with -x and a limit of time.
What fails or exceeds the limit must pass without the mutant, else that mutant is not counted. A mutant with which all
tests pass is printed with its place, for a person to judge, since some mutants change nothing.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
# The tests of each room: folders, or patterns of files below them. ``importing_tests`` adds others.
_KERNELPROOF, _CUDAL2GEN = "tests/kernelproof/test_{}.py", "tests/cudal2gen/test_{}.py"
TESTS = {
    "kernelproof/grading": ["tests/kernelproof/grading"],
    "kernelproof/emulator": ["tests/kernelproof/emulator"],
    "kernelproof/ground": [
        *map(_KERNELPROOF.format, ("sandbox", "workers", "doors")),
        *map(_CUDAL2GEN.format, ("element", "types", "files")),
    ],
    "kernelproof/certificates": ["tests/kernelproof/certificates", _CUDAL2GEN.format("*proofs")],
    **{f"kernelproof/{room}": [_KERNELPROOF.format(name) for name in names.split()] for room, names in {
        "checking": "check assembly causes loading sampling", "mcp_server": "mcp doors", "sass": "sass_*",
        "testing": "pytest_plugin", "triton_emulation": "triton_*",
        "profile": "profile profile_page", "cli": "check mcp profile",
    }.items()},
    **{f"cudal2gen/{room}": [_CUDAL2GEN.format(name) for name in names.split()] for room, names in {
        "kernel": "kernel family fitting layouts memory models register_rules serving tuner_space types",
        "generation": "catalog compiler device_text library products renderer selection",
        "launch": "gpu launcher native_* operand_way", "pack": "pack* warm_up",
        "operators": "operators fused_* grouped_operators torch_operators autocast race_*",
        "report": "report* advice", "results": "results choice evidence claims rekeyed_verdicts",
        "validator": "correctness rounding sanitizer validator fusion machine_code batches groups *proofs",
        "timing": "cost_model counters model simulation", "tuner": "tuner_* tune_cli trial llm_*", "bench": "bench*",
        "cli": "cli* tune_cli try",
    }.items()},
}  # fmt: skip
LIMIT_S = 600.0  # seconds after which the tests of a mutant are ended
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


class Mutant(NamedTuple):
    """A changed file: its path below the checkout, its text, and what was changed where."""

    path: Path
    text: str
    change: str


def sites(tree: ast.Module) -> list[ast.AST]:
    """The nodes that can be changed, without those of annotations and docstrings."""
    annotations = {id(part) for node in ast.walk(tree) for part in _annotation_nodes(node)}
    return [node for node in ast.walk(tree) if id(node) not in annotations and _change(node, apply=False)]


def _annotation_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of the annotations of a parameter, a variable or a function."""
    for field in ("annotation", "returns"):
        if isinstance(part := getattr(node, field, None), ast.AST):
            yield from ast.walk(part)


def _change(node: ast.AST, apply: bool = True) -> str:
    """Change a node in place; returns what was changed, or "" if there is nothing to change."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            new = _COMPARISONS[type(op)]()
            if apply:
                node.ops = [new]
            return f"{type(op).__name__} -> {type(new).__name__}"
        case ast.BinOp(op=operator) if type(operator) in _OPERATORS:
            changed = _OPERATORS[type(operator)]()
            if apply:
                node.op = changed
            return f"{type(operator).__name__} -> {type(changed).__name__}"
        case ast.BoolOp():
            if apply:
                node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            return "and <-> or"
        case ast.UnaryOp(op=ast.Not()):
            if apply:
                node.op, node.operand = ast.Not(), ast.UnaryOp(ast.Not(), node.operand)
            return "not x -> x"
        case ast.Constant(value=bool() as truth):
            if apply:
                node.value = not truth
            return f"{truth} -> {not truth}"
        case ast.Constant(value=int() as number):
            if apply:
                node.value = number + 1
            return f"{number} -> {number + 1}"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            if apply:
                node.value = ast.Constant(None)
            return "return x -> return None"
    return ""


def drawn_mutants(room: str, count: int, generator: random.Random, root: Path = ROOT) -> list[Mutant]:
    """Draw mutants of a room: every place in its files is equally likely, and none is drawn twice."""
    places = [
        (path.relative_to(root), number)
        for path in ([root / room] if (root / room).is_file() else sorted((root / room).rglob("*.py")))
        for number in range(len(sites(ast.parse(path.read_text()))))
    ]
    mutants = []
    for path, number in generator.sample(places, min(count, len(places))):
        tree = ast.parse((root / path).read_text())
        node = sites(tree)[number]
        line = getattr(node, "lineno", 0)
        change = _change(node)
        mutants.append(Mutant(path, ast.unparse(ast.fix_missing_locations(tree)), f"{path}:{line}: {change}"))
    return mutants


def room_tests(room: str, root: Path = ROOT) -> list[str]:
    """The files of the tests of a room, or of the room in which a file or folder lies."""
    patterns = next((TESTS[name] for name in TESTS if f"{room}/".startswith(f"{name}/")), [])
    found = [path for pattern in patterns for path in sorted(root.glob(pattern))]
    files = [file for path in found for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]
    return [str(file.relative_to(root)) for file in files]


def importing_tests(path: Path, root: Path = ROOT) -> list[str]:
    """The files of tests that import the module at a path."""
    package, name = ".".join(path.parent.parts), path.stem
    own = re.compile(
        rf"^\s*(?:from|import) {package}\.{name}\b|^\s*from {package} import (?:[^(\n]*|\([^)]*)\b{name}\b", re.M
    )
    return [
        str(file.relative_to(root)) for file in sorted(root.glob("tests/**/test_*.py")) if own.search(file.read_text())
    ]


class Counts(NamedTuple):
    """How many mutants were judged, and how many of them were noticed."""

    noticed: int = 0
    judged: int = 0

    def __str__(self) -> str:
        rate = f" ({self.noticed / self.judged:.0%})" if self.judged else ""
        return f"{self.noticed} of {self.judged} noticed{rate}"


class Runs:
    """Runs tests in a copy of the checkout. ``marks``: the tests that are run, by their pytest marks, in this order.
    ``seconds``: the limit of a run."""

    def __init__(self, checkout: Path, marks: Sequence[str], seconds: float) -> None:
        self.checkout, self.marks, self.seconds = checkout, marks, seconds

    def is_noticed(self, mutant: Mutant, tests: list[str]) -> bool | None:
        """Whether a test fails with a mutant, or tests exceed the limit. None if they do without the mutant, too."""
        target = self.checkout / mutant.path
        before = target.read_text()
        target.write_text(mutant.text)
        try:
            near = importing_tests(mutant.path, self.checkout)
            failing = self._first_failing(near, [file for file in tests if file not in near])
        finally:
            target.write_text(before)
        if failing is None:
            return False
        return True if self._failing(*failing) is None else None

    def _first_failing(self, *sets: list[str]) -> tuple[list[str], str] | None:
        """The first test of sets of files that fails, a file that cannot be imported, or a set that exceeds the limit;
        and its mark."""
        for mark, files in ((mark, files) for mark in self.marks for files in sets if files):
            if (failing := self._failing(files, mark)) is not None:
                return failing, mark
        return None

    def _failing(self, tests: list[str], mark: str) -> list[str] | None:
        """The first of these tests with a mark that fails, all of them if they exceed the limit; None if all pass."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", "-m", mark, *tests]
        # Processes that tests start in other folders import the copy, too, and not an installed package. All processes
        # of a run are one group, so that none outlives the limit.
        process = subprocess.Popen(
            command, cwd=self.checkout, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace",
            env=os.environ | {"PYTHONPATH": str(self.checkout)}, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=self.seconds)
        except subprocess.TimeoutExpired:
            return tests
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            return None
        names = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.M)
        return (names or tests)[:1]


def main() -> int:
    """Draw, run and report; the exit code is 1 if a mutant was not noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", default=list(TESTS), help="folders, or files of one")
    parser.add_argument("--count", type=int, default=10, help="mutants of each room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="leave out the tests that are marked slow")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="limit of a run of tests")
    arguments = parser.parse_args()
    # The quick tests run first: they notice most mutants.
    marks = ["not slow"] if arguments.quick else ["not slow", "slow"]
    total = Counts()
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".venv", ".git", "__pycache__", "dist"))
        compileall.compile_dir(checkout, quiet=1)
        runs = Runs(checkout, marks, arguments.seconds)
        for room in arguments.rooms:
            counts = judge(room, drawn_mutants(room, arguments.count, random.Random(f"{arguments.seed} {room}")), runs)
            print(f"{room}: {counts}", flush=True)
            total = Counts(total.noticed + counts.noticed, total.judged + counts.judged)
    print(f"all rooms: {total}")
    return 0 if 0 < total.judged == total.noticed else 1


def judge(room: str, mutants: list[Mutant], runs: Runs) -> Counts:
    """Run a room's tests with each of its mutants, and print those that are not noticed."""
    tests, noticed, valid = room_tests(room), 0, 0
    for mutant in mutants:
        answer = runs.is_noticed(mutant, tests)
        if answer is None:
            print(f"not counted, as its test fails without it: {mutant.change}", flush=True)
            continue
        valid += 1
        noticed += answer
        if not answer:
            print(f"not noticed: {mutant.change}", flush=True)
    return Counts(noticed, valid)


if __name__ == "__main__":
    sys.exit(main())
