"""Records the origin of a tensor's contents: the kernels and the operators of torch that had a part in it.

The ledger (a ``TorchDispatchMode``) sees every operator of torch and every launch of a kernel. Each of them sets the
*origin* of the storages that it writes: the operator or launch, plus the origins of all storages that it reads. So the
origin of a result names everything that had a part in it, whatever called it: a layer, an inherited method, or a
fallback after an exception.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# What an operator computes: products of matrices, sums over elements, or each element by itself.
Kind = Literal["products", "sums", "elements"]
# Operators that allocate, move, reshape or convert, or draw random numbers. They do none of a reference's work.
_MOVES = frozenset((
    "_assert_async", "_conj", "_local_scalar_dense", "_pin_memory", "_reshape_alias", "_reshape_copy", "_to_copy",
    "_unsafe_view", "alias", "arange", "as_strided", "as_strided_", "cat", "clone", "constant_pad_nd", "contiguous",
    "copy", "copy_", "detach", "detach_", "diagonal", "empty", "empty_like", "empty_strided", "expand", "eye",
    "fill", "fill_", "flip", "full", "full_like", "index", "index_put", "index_put_", "index_select", "is_pinned",
    "item", "lift", "lift_fresh", "lift_fresh_copy", "linspace", "narrow",
    "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "pad", "permute",
    "record_stream", "repeat", "repeat_interleave", "reshape", "resize_", "roll", "scalar_tensor", "select", "set_",
    "slice", "slice_scatter", "split", "split_with_sizes", "squeeze", "squeeze_", "stack", "sym_numel", "sym_size",
    "sym_stride", "sym_storage_offset", "t", "t_", "to", "transpose", "transpose_", "unbind",
    "unfold", "unsafe_split", "unsqueeze", "unsqueeze_", "view", "view_as_complex", "view_as_real", "zero_", "zeros",
    "zeros_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "uniform_", "normal_",
    "bernoulli_", "random_", "prim_device",
))  # fmt: skip
# Operators that compute every element from many, although their outputs are as large as their inputs.
_SUMMING = frozenset((
    "_softmax", "_log_softmax", "_safe_softmax", "native_layer_norm", "native_batch_norm", "native_group_norm",
    "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "topk", "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training", "_fused_rms_norm", "rms_norm", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d",
))  # fmt: skip


class Operator(NamedTuple):
    """An operator of torch that did work. ``work``: its multiplications and additions if its kind is "products",
    otherwise the elements that it read and wrote."""

    name: str
    kind: Kind
    work: int


@dataclass(frozen=True)
class Origin:
    """What had a part in a storage's contents, as indices into the ledger's ``operators`` and ``launches`` and into the
    ``inputs`` of a call."""

    operators: frozenset[int] = frozenset()
    launches: frozenset[int] = frozenset()
    inputs: frozenset[int] = frozenset()

    def __or__(self, other: Origin) -> Origin:
        return Origin(self.operators | other.operators, self.launches | other.launches, self.inputs | other.inputs)


NOTHING = Origin()


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors among an operator's arguments that it writes, as its schema says; lists of tensors count whole."""
    arguments = func._schema.arguments if hasattr(func, "_schema") else ()
    values = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tensors(values)


@dataclass
class Ledger(TorchDispatchMode):  # type: ignore[misc] # torch's class is untyped
    """Origins by the address of a storage. ``kept`` holds the tensors alive, so that no address is used twice."""

    operators: list[Operator] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)
    origins: dict[int, Origin] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False, since otherwise torch would import torch._dynamo, which takes seconds."""
        return False

    def begin(self, inputs: Sequence[Any]) -> None:
        """Forget all origins, and begin a call with these tensors as its inputs."""
        for part in (self.operators, self.launches, self.origins, self.kept):
            part.clear()
        for number, tensor in enumerate(inputs):
            self.origins[address(tensor)] = self.union([address(tensor)]) | Origin(inputs=frozenset((number,)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.add_operator(func, tensors((args, kwargs)), tensors(result), args, kwargs, result)
        return result

    def add_operator(
        self, func: Any, inputs: list[Any], outputs: list[Any], args: Any = (), kwargs: Any = None, result: Any = None
    ) -> None:
        """Record an operator that has run. ``inputs``, ``outputs``: the tensors among its arguments and results.
        ``args``, ``kwargs``, ``result``: the same arguments and results as a whole, from which torch counts products.
        """
        name = func._schema.name.partition("::")[2] if hasattr(func, "_schema") else str(func)
        origin = self.union(map(address, inputs))
        if name not in _MOVES:
            self.operators.append(_operator(func, name, inputs, outputs, args, kwargs or {}, result))
            origin |= Origin(frozenset((len(self.operators) - 1,)))
        read = set(map(address, inputs))
        mutates = getattr(getattr(func, "_schema", None), "is_mutable", False)
        for tensor in outputs:
            if (at := address(tensor)) in read and not mutates:
                continue  # a view: the storage keeps its origin
            self.origins[at] = origin
            self.kept.append(tensor)
        for tensor in _written(func, args, kwargs or {}):
            self.origins[address(tensor)] = origin

    def add_launch(self, kernel: str, read: Iterable[int], written: Iterable[int]) -> None:
        """Record a launch of the kernel named ``kernel``. ``read``, ``written``: addresses of storages."""
        self.launches.append(kernel)
        written = set(written)
        # A launch may write only a part of a storage, so the earlier origin of what it writes remains.
        origin = self.union({*read, *written}) | Origin(launches=frozenset((len(self.launches) - 1,)))
        for at in written:
            self.origins[at] = origin

    def union(self, storages: Iterable[int]) -> Origin:
        """The union of the origins of some storages."""
        operators: set[int] = set()
        launches: set[int] = set()
        inputs: set[int] = set()
        for at in storages:
            origin = self.origins.get(at, NOTHING)
            operators |= origin.operators
            launches |= origin.launches
            inputs |= origin.inputs
        return Origin(frozenset(operators), frozenset(launches), frozenset(inputs))

    def work(self, origin: Origin) -> dict[str, int]:
        """The work of an origin's operators by kind, in the units of ``Operator.work``."""
        out: Counter[str] = Counter()
        for number in origin.operators:
            out[self.operators[number].kind] += self.operators[number].work
        return dict(out)

    def names(self, origin: Origin) -> dict[str, int]:
        """How often each operator of an origin ran."""
        return dict(Counter(self.operators[number].name for number in sorted(origin.operators)))


def tensors(values: Any) -> list[Any]:
    """All tensors in nested values."""
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def address(tensor: Any) -> int:
    """The address of a tensor's storage; -1 for a tensor without one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return -1


def _operator(
    func: Any, name: str, inputs: list[Any], outputs: list[Any], args: Any, kwargs: Any, result: Any
) -> Operator:
    """The entry for an operator: products if torch has a formula for its operations, sums if its output is smaller than
    its largest input, else elements."""
    count = flop_registry.get(getattr(func, "_overloadpacket", None))
    if count is not None:
        try:
            return Operator(name, "products", int(count(*args, **kwargs, out_val=result)))
        except Exception:  # torch's formula does not take these arguments, so the sizes below decide
            pass
    sizes = [prod(tensor.shape) for tensor in inputs], [prod(tensor.shape) for tensor in outputs]
    largest = [max(part, default=0) for part in sizes]
    sums = name in _SUMMING or largest[0] > largest[1]
    return Operator(name, "sums" if sums else "elements", sum(sizes[0]) + sum(sizes[1]))
