"""Runs references and solutions of FlashInfer-Bench inside a room (a sandboxed process), with torch."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kernelproof.emulator.memory.tensors import host_bytes
from kernelproof.grading.benchmarks import flashinfer, problems
from kernelproof.grading.benchmarks.cuda_face import Unsupported
from kernelproof.ground.errors import WrongInput


class FlashInfer:
    """A definition of FlashInfer-Bench, whose reference has a function ``run``."""

    def __init__(self, text: str, case: problems.Case, _seed: int) -> None:
        self.definition = flashinfer.Definition.model_validate_json(text)
        self.module = problems.execute_text(self.definition.reference, "reference", {}, {})
        self.case = dict(case)
        self.initial: Any = []

    def inputs(self, seed: int) -> list[Any]:
        """Draw the inputs of a call."""
        problems.seed_all(seed)
        return [self._input(name, operand) for name, operand in self.definition.inputs.items()]

    def _input(self, name: str, operand: flashinfer.Operand) -> Any:
        """Draw an input: normal numbers, or integers in the benchmark's range. Scalars are those of the workload."""
        if operand.shape is None:
            return self.definition.scalars[name]
        extents, dtype = [self.case[axis] for axis in operand.shape], torch_type(operand)
        if dtype.is_floating_point:
            return torch.randn(extents, dtype=torch.float32).to(dtype).cuda()
        low, high = (0, 2) if dtype is torch.bool else (-128, 128) if dtype is torch.int8 else (-1024, 1024)
        return torch.randint(low, high, extents, dtype=dtype).cuda()

    def outputs(self, inputs: Sequence[Any], seed: int) -> Any:
        """The outputs of the reference for copies of the inputs, so that it may change them."""
        problems.seed_all(seed)
        return ordered_outputs(self.module.run(*copy.deepcopy(list(inputs))), self.definition)

    def exact(self, inputs: Sequence[Any], seed: int) -> Any:
        """The outputs for inputs in fp64, in which the reference computes unless it names other types. None if it
        refuses such inputs."""
        try:
            problems.seed_all(seed)
            return ordered_outputs(self.module.run(*problems.in_fp64(inputs)), self.definition)
        except (RuntimeError, TypeError, ValueError):
            return None


def torch_type(operand: flashinfer.Operand) -> torch.dtype:
    """The type of an operand. Raises Unsupported for types that are not emulated."""
    kind = getattr(torch, operand.dtype, None)
    if not isinstance(kind, torch.dtype) or (kind.itemsize == 1 and kind.is_floating_point):
        raise Unsupported(f"tensors of {operand.dtype}")
    return kind


def ordered_outputs(result: Any, definition: flashinfer.Definition) -> Any:
    """The outputs that a function returned, in the definition's order: a tensor if there is one, else a tuple."""
    if isinstance(result, Mapping):
        result = tuple(result[name] for name in definition.outputs)
    return result[0] if isinstance(result, tuple | list) and len(result) == 1 else result


def solution_function(text: str, definition: flashinfer.Definition, case: problems.Case, extensions: Any) -> Any:
    """The function of a solution of FlashInfer-Bench, which takes inputs and returns outputs.

    Raises SolutionError for a text that is no solution, and Unsupported for bindings that are not emulated.
    """
    try:
        solution = flashinfer.parse(flashinfer.Solution, text, "the solution")
    except WrongInput as error:
        raise problems.SolutionError(str(error)) from None
    path, name = solution.entry
    if solution.spec.language in ("cuda", "cpp"):
        if solution.spec.binding != "torch":
            raise Unsupported(f"the binding {solution.spec.binding or 'tvm-ffi'} of C++")
        function = getattr(extensions.load_inline("solution", "", solution.inlined()), name, None)
    else:
        folder = Path(tempfile.mkdtemp())
        problems.add_to_path({source.path: source.content for source in solution.sources}, folder)
        function = getattr(problems.import_file(folder / path, "solution"), name, None)
    if function is None:
        raise problems.SolutionError(f"the solution has no {solution.spec.entry_point}")
    if not solution.spec.destination_passing_style:
        return lambda *inputs: ordered_outputs(function(*inputs), definition)
    if any(operand.shape is None for operand in definition.outputs.values()):
        raise Unsupported("outputs that are scalars")

    def call(*inputs: Any) -> Any:
        outputs = []
        for operand in definition.outputs.values():
            output = torch.empty([case[axis] for axis in operand.shape or ()], dtype=torch_type(operand), device="cuda")
            with torch._C.DisableTorchFunction():
                host_bytes(output)[:] = 0xFF  # NaN
            outputs.append(output)
        function(*inputs, *outputs)
        return ordered_outputs(tuple(outputs), definition)

    return call
