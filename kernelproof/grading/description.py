"""Reads the arguments of ``check_source`` from a file: from the names of a Python file, or from a JSON object."""

from __future__ import annotations

import inspect
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kernelproof.grading.source import Limits, check_source
from kernelproof.grading.tolerance import Tolerance
from kernelproof.ground.errors import WrongInput, brief, reading

# The parameters that a description can set, and those that it must.
PARAMETERS = inspect.signature(check_source).parameters
NEEDED = ("source", "reference", "shapes", "buffers")


def arguments(path: Path, source: Path | None = None) -> dict[str, Any]:
    """Read the arguments of ``check_source``; ``source``, if given, replaces the source that the file names.

    A Python file is executed, so it must be trusted. In a JSON file, the reference is written as ``FILE.py:FUNCTION``.
    File names are relative to the file. Raises WrongInput.
    """
    if path.suffix not in (".py", ".json"):
        raise WrongInput(f"{path}: describe in .py or .json what is graded; docs/kernelproof/grading.md says how")
    if path.suffix == ".py":
        values = {name: value for name, value in _names_after_execution(path).items() if name in PARAMETERS}
    else:
        values = _json_arguments(path)
    if source is not None:
        values["source"] = source
    if missing := [name for name in NEEDED if name not in values]:
        raise WrongInput(f"{path}: {', '.join(missing)} missing; arguments of check_source are needed")
    if isinstance(values["source"], Path):
        file = values["source"] if source is not None else path.parent / values["source"]
        with reading(file):
            values["source"] = file.read_text()
    return values


def _json_arguments(path: Path) -> dict[str, Any]:
    """The arguments of ``check_source`` in a JSON file. Raises WrongInput."""
    with reading(path):
        text = path.read_text()
    try:
        values = json.loads(text)
    except ValueError as error:
        raise WrongInput(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise WrongInput(f"{path}: an object with the arguments of check_source is needed")
    if unknown := sorted(set(values) - set(PARAMETERS)):
        raise WrongInput(f"{path}: {', '.join(unknown)}: no argument of check_source; it has {', '.join(PARAMETERS)}")
    for name, kind in (("tolerance", Tolerance), ("limits", Limits), ("source", Path)):
        if name in values:
            try:
                values[name] = TypeAdapter(kind).validate_python(values[name])
            except ValidationError as error:
                raise WrongInput(f"{path}: {name}: {brief(error.errors()[0]['msg'], 200)}") from None
    if "reference" in values:
        values["reference"] = _function(path, values["reference"])
    return values


def _function(path: Path, text: object) -> Callable[..., Any]:
    """The function that ``FILE.py:FUNCTION`` in the description ``path`` names. Raises WrongInput."""
    file, _, name = str(text).rpartition(":")
    if not file.endswith(".py"):
        raise WrongInput(f"{path}: reference {text!r}: write FILE.py:FUNCTION")
    function: Callable[..., Any] | None = _names_after_execution(path.parent / file).get(name)
    if function is None or not callable(function):
        raise WrongInput(f"{path}: reference: {file} has no function {name}")
    return function


def _names_after_execution(path: Path) -> dict[str, Any]:
    """Execute a Python file, which may import its neighbours, and return its names. Raises WrongInput if it fails."""
    with reading(path):
        path.read_bytes()
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        return runpy.run_path(str(path))
    except Exception as error:
        raise WrongInput(f"{path}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
