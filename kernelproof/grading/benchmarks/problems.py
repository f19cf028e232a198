"""Executes references and solutions that are Python modules, inside a room, with the sizes of a case.

A *case* is what a benchmark calls a shape: integers by name. In KernelBench they are the constants of the reference's
module; in the other formats they are the arguments of the function that makes the inputs.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
import operator as operators
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from kernelproof.grading.benchmarks.ledger import Ledger, tensors

Case = Mapping[str, int]
MAX_FIXED_CONSTANT = 8  # constants up to this are sizes of filters, strides and the like, which are not changed

_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operators.add, ast.Sub: operators.sub, ast.Mult: operators.mul, ast.FloorDiv: operators.floordiv,
}  # fmt: skip
LARGEST_FACTOR = 1 << 40  # the largest right operand of a constant expression; sizes are smaller


class SolutionError(Exception):
    """A solution lacks a class or function that its format needs."""


def constants(tree: ast.Module) -> dict[str, int]:
    """The positive integers that a module assigns to names at its outermost level, as constants or products, sums and
    so on of constants, such as ``1024 * 2``."""
    return {name: number for node in tree.body for name, _, number in _integer_assignments(node) if number > 0}


def _integer_assignments(node: ast.stmt) -> Iterator[tuple[str, ast.expr, int]]:
    """Yields each name to which a statement assigns an integer, with the expression and its value."""
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=False))
        for name, value in pairs:
            if isinstance(name, ast.Name) and (number := _integer(value)) is not None:
                yield name.id, value, number


def _integer(node: ast.expr) -> int | None:
    """The value of an expression of integer constants; None for all other expressions."""
    match node:
        case ast.Constant(value=number) if type(number) is int:
            return number
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC:
            first, second = _integer(left), _integer(right)
            if first is not None and second is not None and 0 < second < LARGEST_FACTOR:
                return _ARITHMETIC[type(operator)](first, second)
    return None


def _resize(tree: ast.Module, stated: Case, case: Case) -> None:
    """Replace the constants of a module that still have the values of the stated case."""
    for statement in tree.body:
        for name, value, number in _integer_assignments(statement):
            if name in case and number == stated[name]:
                assert isinstance(statement, ast.Assign)
                new = ast.Constant(case[name])
                if statement.value is value:
                    statement.value = new
                elif isinstance(statement.value, ast.Tuple):
                    statement.value.elts = [new if item is value else item for item in statement.value.elts]


def execute_text(text: str, name: str, stated: Case, case: Case) -> ModuleType:
    """Execute a module with the sizes of a case. The text is written to a file, which Triton's compiler and ``inspect``
    need."""
    if dict(stated) != dict(case):
        _resize(tree := ast.parse(text), stated, case)
        text = ast.unparse(tree)
    path = Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(text)
    return import_file(path, name)


def add_to_path(files: Mapping[str, str], folder: Path) -> None:
    """Write files into a folder and let Python import them. ``files``: texts by path in the folder."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def import_file(path: Path, name: str) -> ModuleType:
    """Execute a file as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def seed_all(seed: int) -> None:
    """Seed all generators of random numbers."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # references use NumPy's old generator


@contextmanager
def seeds_shifted(seed: int) -> Iterator[None]:
    """Add ``seed`` to every seed that a reference sets itself, since it would draw the same inputs for all calls, and a
    solution could know their results."""
    setters: list[tuple[Any, str]] = [
        (torch, "manual_seed"), (torch.cuda, "manual_seed"), (torch.cuda, "manual_seed_all"), (random, "seed"),
        (np.random, "seed"),
    ]  # fmt: skip
    originals = [getattr(module, name) for module, name in setters]

    def shifted(original: Callable[..., Any]) -> Callable[..., Any]:
        def setter(own: Any = None, *more: Any) -> Any:
            return original((own + seed) % (1 << 32) if isinstance(own, int) else own, *more)  # NumPy's have 32 bits

        return setter

    try:
        for (module, name), original in zip(setters, originals, strict=True):
            setattr(module, name, shifted(original))
        yield
    finally:
        for (module, name), original in zip(setters, originals, strict=True):
            setattr(module, name, original)


class KernelBench:
    """A reference with ``Model``, ``get_inputs`` and ``get_init_inputs``; robust-kbench adds ``forward_fn``.

    The classes of all formats have the same methods. ``inputs`` draws the inputs of a call, ``outputs`` computes the
    reference's outputs without changing the inputs, and ``exact`` computes them in fp64 or returns None. ``initial``:
    the arguments with which a solution's model is constructed.
    """

    def __init__(self, text: str, stated: Case, case: Case, seed: int) -> None:
        self.module = execute_text(text, "reference", stated, case)
        seed_all(seed)
        self.initial: Any = self.module.get_init_inputs() if hasattr(self.module, "get_init_inputs") else []
        seed_all(seed)
        self.model = construct(self.module.Model, self.initial)

    def inputs(self, seed: int) -> list[Any]:
        seed_all(seed)
        with seeds_shifted(seed):
            return list(self.module.get_inputs())

    def outputs(self, inputs: Sequence[Any], seed: int) -> Any:
        seed_all(seed)
        return copy.deepcopy(self.model)(*inputs)

    def exact(self, inputs: Sequence[Any], seed: int) -> Any:
        """The outputs in fp64, or None if the reference computes only in its own types."""
        try:
            seed_all(seed)
            return copy.deepcopy(self.model).double()(*in_fp64(inputs))
        except (RuntimeError, TypeError, ValueError):
            return None


class GpuMode:
    """A reference with ``ref_kernel`` and ``generate_input``."""

    def __init__(self, text: str, case: Case, _seed: int) -> None:
        self.module = execute_text(text, "reference", {}, {})
        self.case = dict(case)
        self.initial: Any = []

    def inputs(self, seed: int) -> list[Any]:
        seed_all(seed)
        values: dict[str, int] = dict(self.case)
        if "seed" in inspect.signature(self.module.generate_input).parameters:
            values["seed"] = seed
        return [self.module.generate_input(**values)]

    def outputs(self, inputs: Sequence[Any], seed: int) -> Any:
        seed_all(seed)
        return self.module.ref_kernel(copy.deepcopy(inputs[0]))

    def exact(self, inputs: Sequence[Any], seed: int) -> Any:  # noqa: ARG002
        """Returns None, because the results of such a reference depend on the types of its inputs."""
        return None


def construct(kind: Any, initial: Any) -> Any:
    """Construct a model. ``initial``: arguments, named arguments, or both, as ``get_init_inputs`` returned them."""
    if isinstance(initial, Mapping):
        return kind(**initial)
    nested = isinstance(initial, Sequence) and len(initial) == 2 and isinstance(initial[1], Mapping)
    if nested and isinstance(initial[0], list | tuple):
        return kind(*initial[0], **initial[1])
    return kind(*initial)


def in_fp64(values: Any) -> Any:
    """Nested values with fp64 in place of other floats."""
    return torch.utils._pytree.tree_map(
        lambda value: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value, values
    )


def cost(ledger: Ledger) -> int:
    """An estimate of the thread instructions of all recorded operators, and so of the time that kernels for them would
    take on the emulator."""
    return sum(item.work for item in ledger.operators)


def case_cost(text: str, stated: Case, case: Case) -> int:
    """The cost of a case, found by running it on torch's meta device. Raises whatever the reference raises if the sizes
    do not fit each other."""
    ledger = Ledger()
    with torch.device("meta"), torch.no_grad():
        problem = KernelBench(text, stated, case, 0)
        inputs = problem.inputs(0)
        with ledger:
            problem.outputs(inputs, 0)
    elements = sum(tensor.numel() for tensor in tensors(inputs))
    return cost(ledger) + int(elements)


def smaller_case(text: str, budget: int) -> tuple[dict[str, int], dict[str, int], int, int]:
    """The stated case of a KernelBench reference, a smaller one whose cost is below a budget, and the cost of each.

    The largest size is halved, again and again, as long as the reference accepts it. Halving keeps the divisors of a
    size, such as those of tiles, for as long as possible.
    """
    stated = constants(ast.parse(text))
    case = dict(stated)
    stated_cost = smallest = case_cost(text, stated, case)
    fixed = {name for name, value in case.items() if value <= MAX_FIXED_CONSTANT}
    while smallest > budget and (free := [name for name in case if name not in fixed]):
        name = max(free, key=lambda item: (case[item], item))
        trial = {**case, name: case[name] // 2}
        try:
            trial_cost = case_cost(text, stated, trial)
        except Exception:
            trial_cost = smallest
        if trial_cost >= smallest or trial[name] < 2:
            fixed.add(name)
            continue
        case, smallest = trial, trial_cost
    return stated, case, stated_cost, smallest
