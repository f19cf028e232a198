"""Reads definitions, workloads and solutions of FlashInfer-Bench, which are JSON texts.

Their format is described in github.com/flashinfer-ai/flashinfer-bench, docs/flashinfer-trace.
"""

from __future__ import annotations

import random
import re
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from kernelproof.ground.errors import WrongInput, invalid, parse_json, reading

MOST_WORKLOADS = 2  # how many of a definition's workloads are used: the smallest ones
DRAWN_EXTENTS = (3, 40)  # range of an axis's extent in a case that is drawn, before it is made odd

Model = TypeVar("Model", bound=BaseModel)


class Axis(BaseModel):
    """An extent of tensors. ``value`` is None if each workload states its own."""

    type: Literal["const", "var"]
    value: int | None = None


class Operand(BaseModel):
    """A tensor or a scalar. ``shape``: the names of a tensor's axes; None for a scalar."""

    shape: list[str] | None
    dtype: str


class Definition(BaseModel):
    """The operation that solutions compute.

    ``reference``: the text of a module with a function ``run``. ``constraints``: expressions that the extents of the
    axes must satisfy; None if there are none.
    """

    name: str
    axes: dict[str, Axis]
    inputs: dict[str, Operand]
    outputs: dict[str, Operand]
    reference: str
    constraints: list[str] | None = None
    # This field is not in the format: the grader adds the scalars of the workload.
    scalars: dict[str, int | float | bool] = {}


class Source(BaseModel):
    """A file of a solution: its path in the solution's folder, and its text."""

    path: str = Field(pattern=r"^\w[\w+-]*(?:[./]\w[\w+-]*)*$")  # a relative path without ".."
    content: str


class Build(BaseModel):
    """How a solution is built. ``entry_point``: ``FILE::FUNCTION``. ``destination_passing_style``: whether outputs are
    the last arguments of its function; otherwise the function returns them. ``binding``: how Python calls C++;
    None stands for tvm-ffi."""

    language: str
    entry_point: str = Field(pattern=r"^[^:]+::\w+$")
    destination_passing_style: bool = True
    binding: str | None = None


class Solution(BaseModel):
    """The files of a solution, and the function in one of them that solves a definition."""

    definition: str
    spec: Build
    sources: list[Source]

    @property
    def entry(self) -> tuple[str, str]:
        """The file and the function."""
        path, _, function = self.spec.entry_point.partition("::")
        return path, function

    def inlined(self) -> str:
        """The CUDA and C++ files as one text. The solution's own headers replace the includes of them, each once."""
        known = {source.path: source.content for source in self.sources}
        included: set[str] = set()

        def header(match: re.Match[str]) -> str:
            path = next((path for path in known if path == match[1] or path.endswith(f"/{match[1]}")), None)
            if path is None:
                return match[0]
            if path in included:
                return ""
            included.add(path)
            return _OWN_INCLUDE.sub(header, known[path])

        units = [path for path in known if path.endswith((".cu", ".cpp", ".cc"))]
        return "\n".join(_OWN_INCLUDE.sub(header, known[path]) for path in units)


_OWN_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*\"([\w./+-]+)\"[^\n]*$", re.M)


def parse(kind: type[Model], text: str, what: str) -> Model:
    """Read a JSON text as one of the classes above. ``what`` names the text in the error. Raises WrongInput."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise invalid(what, error) from None


def cases(path: Path, definition: Definition, seed: int) -> tuple[list[dict[str, int]], dict[str, Any]]:
    """The cases of a definition, as extents by axis, and its scalars.

    The cases are the definition's smallest workloads and one that the seed draws. Workloads are files where the
    benchmark's data set has them: in the folder ``workloads`` beside ``definitions``. Raises WrongInput for inputs that
    no workload gives.
    """
    fixed = {name: axis.value for name, axis in definition.axes.items() if axis.value is not None}
    stated: list[dict[str, int]] = []
    scalars: dict[str, Any] = {}
    for workload in _workloads(path, definition.name):
        stated.append({**fixed, **workload["axes"]})
        for name, given in workload["inputs"].items():
            if given["type"] not in ("random", "scalar"):
                raise WrongInput(f"{definition.name}: input {name} comes from a file, which is not read")
            if given["type"] == "scalar":
                scalars.setdefault(name, given["value"])
    if missing := [name for name, item in definition.inputs.items() if item.shape is None and name not in scalars]:
        raise WrongInput(f"{path}: no workload beside it gives the scalar {missing[0]}")
    chosen = sorted(stated, key=lambda case: prod(case.values()))[:MOST_WORKLOADS]
    varying = sorted(set(definition.axes) - set(fixed))
    # With constraints no case is drawn, since its extents might violate them. Odd extents are no multiples of a tile.
    if varying and not definition.constraints:
        rng = random.Random(seed)
        chosen.append({**fixed, **{name: rng.randint(*DRAWN_EXTENTS) | 1 for name in varying}})
    return chosen or [fixed], scalars


def _workloads(path: Path, name: str) -> list[dict[str, Any]]:
    """The workloads of a definition; none if it has no file of workloads. Raises WrongInput for an unreadable file."""
    roots = [parent.parent / "workloads" for parent in path.resolve().parents if parent.name == "definitions"]
    files = [file for root in roots[:1] for file in sorted(root.rglob(f"{name}.jsonl"))]
    out = []
    for file in files:
        with reading(file):
            lines = file.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            try:
                workload = parse_json(line)["workload"]
                out.append({"axes": dict(workload["axes"]), "inputs": dict(workload["inputs"])})
            except (WrongInput, ValueError, KeyError, TypeError):
                raise WrongInput(f"{file}:{number}: no workload") from None
    return out
