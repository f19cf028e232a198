"""Collects the products that a model computes, for ``tune-model``.

The model runs on tensors without data. That takes seconds for any model on any machine, even if the weights do not fit
into memory. A model whose control flow depends on values must run on real tensors.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from cudal2gen.kernel import Acc, Layout, Problem
from cudal2gen.kernel.problem import AlongK
from kernelproof.ground.element import ElementName, element_or_none, name_of
from kernelproof.ground.errors import WrongInput

if TYPE_CHECKING:
    import torch


class ModelError(WrongInput):
    """A model cannot be found or run; the message says why."""


class ModelProduct(NamedTuple):
    """A product that a model computes: the operator, the layout, m, n, k, and the type of A and B."""

    op: str
    layout: Layout
    m: int
    n: int
    k: int
    ab: ElementName = "f16"


class Collected(NamedTuple):
    """The products of a model.

    ``products``: how often the model computes each product of fp16 or bf16; a batch counts as its number of products.
    ``others``: the number of products of each other type.
    """

    products: Counter[ModelProduct]
    others: Counter[str]

    def problems(self, gpu: str, acc: Acc) -> list[dict[str, Any]]:
        """The products as JSON values with the fields of a ``Problem``, ``count`` and ``op``; those with the most work
        come first. ``acc``: the accumulator for fp16; bf16 is summed in fp32."""
        rows = []
        for product, count in self.products.items():
            fields = product._asdict() | {"gpu": gpu, "acc": acc if product.ab == "f16" else "f32"}
            op = fields.pop("op")
            try:
                problem = Problem.model_validate(fields)
            except ValidationError:
                continue  # an extent is 0 or exceeds MAX_EXTENT
            rows.append((count * problem.flops, problem.key, problem.model_dump() | {"count": count, "op": op}))
        return [row for *_, row in sorted(rows, key=lambda row: (-row[0], row[1], row[2]["op"]))]


def find_model(name: str) -> Callable[[], Any]:
    """The callable that ``module:callable`` or ``file.py:callable`` names; without ``:callable`` it is ``main``.

    Raises ModelError.
    """
    where, _, what = name.partition(":")
    what = what or "main"
    if where.endswith(".py") and not Path(where).is_file():
        raise ModelError(f"no file {where}")
    if not (where.endswith(".py") or all(part.isidentifier() for part in where.split("."))):
        raise ModelError(f"{where!r} names no model: give file.py:callable or module:callable")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except (Exception, SystemExit) as error:  # the model's code may raise anything
        raise ModelError(f"{where} cannot be imported: {_cause(error)}") from error
    function = getattr(module, what, None)
    if not callable(function):
        raise ModelError(f"{where} has no callable {what}")
    return function  # type: ignore[no-any-return]


def _from_file(path: Path) -> Any:
    """Imports a Python file as a module."""
    name = f"cudal2gen_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # classes defined in the file look up their module here
    spec.loader.exec_module(module)
    return module


def collect(run: Callable[[], Any], fake: bool = True, any_type: bool = False) -> Collected:
    """The products that a callable computes by torch. Raises ModelError if the callable fails.

    ``fake``: whether its tensors have no data. ``any_type``: whether every type counts as fp16. Gradients are off
    unless the callable turns them on.
    """
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

    collected = Collected(Counter(), Counter())
    tensors = FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
    modules = _conversions_replace_parameters() if fake else nullcontext()
    try:
        with tensors, modules, torch.no_grad(), _watched(collected, any_type):
            run()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ModelError(f"the model looks at values, which tensors without data lack ({error}): try --real") from error
    except (Exception, SystemExit) as error:  # the model's code may raise anything
        advice = " on tensors without data; --real uses real ones" if fake else ""
        raise ModelError(f"the model fails{advice}: {_cause(error)}") from error
    return collected


def _cause(error: BaseException) -> str:
    """What an exception says, as "file:line: class: first line of the message"; the line is the one that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = next(iter(str(error).splitlines()), "")
    place = "" if last.filename.startswith("<frozen") else f"{last.filename}:{last.lineno}: "
    return f"{place}{type(error).__name__}: {text}"


@contextmanager
def _conversions_replace_parameters() -> Iterator[None]:
    """A context in which ``model.half()`` and similar methods make new parameters. torch would swap the data of the old
    ones, which is not possible without data."""
    import torch

    def replaced(self: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
        for child in self.children() if recurse else ():
            child._apply(function)
        for name, tensor in self._parameters.items():
            if tensor is not None:
                self._parameters[name] = torch.nn.Parameter(function(tensor), tensor.requires_grad)
        for name, tensor in self._buffers.items():
            self._buffers[name] = None if tensor is None else function(tensor)
        return self

    kept, torch.nn.Module._apply = torch.nn.Module._apply, replaced
    try:
        yield
    finally:
        torch.nn.Module._apply = kept


@contextmanager
def _watched(collected: Collected, any_type: bool) -> Iterator[None]:
    """A context in which the products of all calls are added to ``collected``."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[misc]  # torch has no types here
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operands = _operands(func, args)
            if operands is not None:
                op, a, b, batch = operands
                if element_or_none(a.dtype) is not None or any_type:
                    collected.products[_product(op, a, b)] += batch
                else:
                    collected.others[str(a.dtype)] += batch
            return func(*args, **(kwargs or {}))

    with Watch():
        yield


def _operands(func: Any, args: Any) -> tuple[str, torch.Tensor, torch.Tensor, int] | None:
    """For an operator that is a product its name, A (.., m, k), B (.., k, n), and the number of products; None for
    other operators."""
    name = str(func).removesuffix(".default")
    if name in ("aten.mm", "cudal2gen.matmul", "cudal2gen.matmul.out"):
        return name, args[0], args[1], 1
    if name == "aten.addmm":
        return name, args[1], args[2], 1
    if name in ("aten.linear", "cudal2gen.linear"):
        return name, args[0].reshape(-1, args[0].shape[-1]), args[1].t(), 1
    if name in ("aten.bmm", "aten.baddbmm"):
        a, b = args[-2:] if name == "aten.baddbmm" else args[:2]
        return name, a, b, int(a.shape[0])
    return None


def _product(op: str, a: torch.Tensor, b: torch.Tensor) -> ModelProduct:
    """A product of a model, from its operands A (..,m,k) and B (..,k,n)."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    layout = AlongK(_in_rows(a), not _in_rows(b)).layout
    return ModelProduct(op, layout, int(m), int(n), int(k), name_of(a.dtype) or "f16")


def _in_rows(matrix: torch.Tensor) -> bool:
    """Whether a matrix is stored row-major; otherwise its transpose is."""
    rows, cols = matrix.shape[-2:]
    return bool(matrix.stride(-1) == 1 and (rows == 1 or cols > 1))
