"""Reads the task of a benchmark from its files: the reference, the cases and the tolerance. Nothing is executed."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelproof.grading.benchmarks import flashinfer, recognition
from kernelproof.grading.benchmarks.recognition import Format
from kernelproof.ground.errors import WrongInput, reading

# KernelBench compares fp32 by 1e-2 in its first versions and by 1e-4 since; solutions were written for both.
KERNELBENCH_TOLERANCE = 1e-2
# In a task.yml: the block after ``tests:``, one test in it, such as - {"size": 128}, and a file that the task names.
_TESTS = re.compile(r"^tests:\s*$(.*?)^\S", re.M | re.S)
_TEST = re.compile(r"-\s*(\{.*\})\s*$", re.M)
_FILE = re.compile(r"\"name\":\s*\"([\w.]+)\",\s*\"source\":\s*\"([^\"@]+)\"")


@dataclass(frozen=True)
class BenchmarkTask:
    """What a solution has to do.

    ``text``: the reference, or the JSON definition of FlashInfer-Bench. ``cases``: the shapes; None stands for the
    shape in a KernelBench reference, made smaller. Outputs may differ from the reference by ``absolute`` + ``relative``
    * |reference|. ``modules``: the texts of files that the reference and the solution may import, by name. Cases whose
    inputs have more than ``most_elements`` elements together are left out.
    """

    format: Format
    text: str
    cases: tuple[dict[str, Any] | None, ...] = (None,)
    relative: float = KERNELBENCH_TOLERANCE
    absolute: float = KERNELBENCH_TOLERANCE
    modules: dict[str, str] = field(default_factory=dict)
    most_elements: int = 1 << 22


def task(path: Path, solution: str, seed: int = 0) -> BenchmarkTask:
    """Read a task from a Python reference, from a ``task.yml`` beside one, or from a JSON definition.

    ``seed`` draws sizes that the reference leaves open. Raises WrongInput.
    """
    if path.suffix == ".json":
        return _flashinfer(path, seed)
    if path.is_dir():
        path = next((path / name for name in ("task.yml", "func_forward.py") if (path / name).exists()), path)
    description = path if path.suffix in (".yml", ".yaml") else path.parent / "task.yml"
    if path.suffix in (".yml", ".yaml"):
        path = path.parent / "reference.py"
    text = _read(path)
    kind = recognition.format_of_reference(text)
    if kind == "GPU MODE":
        return _gpu_mode(text, path, description)
    if "forward_fn" in recognition.names(text) and not re.search(r"class\s+ModelNew", solution):
        return BenchmarkTask("robust-kbench", text)
    return BenchmarkTask("KernelBench", text)


def _flashinfer(path: Path, seed: int) -> BenchmarkTask:
    """The task of a definition of FlashInfer-Bench. Raises WrongInput."""
    definition = flashinfer.parse(flashinfer.Definition, _read(path), str(path))
    cases, definition.scalars = flashinfer.cases(path, definition, seed)
    # The tolerances are the benchmark's. Its constant axes cannot be made smaller, so cases may be larger than others.
    return BenchmarkTask(
        "FlashInfer-Bench", definition.model_dump_json(), tuple(cases), relative=1e-2, absolute=1e-2,
        most_elements=1 << 25,
    )  # fmt: skip


def _gpu_mode(text: str, path: Path, description: Path) -> BenchmarkTask:
    """The task of a GPU MODE reference. ``description``: its task.yml. Raises WrongInput if that has no shapes."""
    if not description.exists():
        raise WrongInput(f"{path}: its task.yml, which has the shapes, is not beside it")
    description_text = _read(description)
    tests = _TESTS.search(description_text + "\nend:")  # the added key ends the block of tests if it is the last one
    cases = [_case(match[1]) for match in _TEST.finditer(tests[1])] if tests else []
    if not cases:
        raise WrongInput(f'{description}: no tests in a form that is read, such as - {{"size": 128, "seed": 1}}')
    modules = {}
    for name, source in [*_FILE.findall(description_text), ("utils.py", "utils.py"), ("task.py", "task.py")]:
        file = description.parent / source
        if name not in ("eval.py", "reference.py") and file.exists() and name not in modules:
            modules[name] = _read(file)
    modules["reference.py"] = text
    relative, absolute = _tolerances(text)
    return BenchmarkTask("GPU MODE", text, tuple(cases), relative, absolute, modules)


def _case(text: str) -> dict[str, Any]:
    """The case in a test of a task.yml, without its seed; empty if the test is not readable."""
    try:
        case = ast.literal_eval(text.replace("true", "True").replace("false", "False"))
    except (ValueError, SyntaxError):
        return {}
    case = {str(name): value for name, value in case.items()} if isinstance(case, dict) else {}
    case.pop("seed", None)  # the grader draws its own seeds
    return case


def _tolerances(text: str) -> tuple[float, float]:
    """rtol and atol of the comparison that a reference of GPU MODE makes: numbers in its text, else its defaults."""
    found = {"rtol": 1e-5, "atol": 1e-8}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.keyword) and node.arg in found:
            try:
                found[node.arg] = float(ast.literal_eval(node.value))
            except (ValueError, TypeError):
                continue
    return found["rtol"], found["atol"]


def _read(path: Path) -> str:
    """The text of a file. Raises WrongInput."""
    with reading(path):
        return path.read_text()
