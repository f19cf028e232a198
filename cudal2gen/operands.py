"""The torch tensors of a product: drawn, checked against what a record computes, and copied where a kernel asks for it.

Leading dimensions and shapes count elements. A batch has matrices of three dimensions, its products first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from cudal2gen.element import Element
from cudal2gen.kernel import Layout, Problem, Record, Use, aligned, ceil_div
from cudal2gen.kernel.fusion import ALPHA, BETA
from cudal2gen.kernel.launch import Matrix
from cudal2gen.kernel.launch import Operands as LaunchOperands

if TYPE_CHECKING:
    import torch

Empty = Callable[..., "torch.Tensor"]

ALIGNMENT = 256  # bytes, as torch's allocator gives them


def typed(empty: Empty, dtype: torch.dtype) -> Empty:
    """``empty``, whose elements have 16 bits, for tensors of this type."""
    words = dtype.itemsize // 2

    def of_type(*shape: int) -> torch.Tensor:
        return empty(*shape[:-1], shape[-1] * words).view(dtype)

    return of_type


@dataclass(frozen=True)
class Operands:
    """One set of matrices, row-major: ``a`` (m,k), ``b`` (n,k), the same B as ``b_nn`` (k,n), and ``d`` (m,n).

    Of a batch these are (products,m,k) and so on; a B that all products share is expanded along the products. What a
    fused record reads besides: ``bias`` (n) or (m) in the type of A and B, ``c`` as D, ``alpha`` and ``beta``; what it
    stores besides: ``aux`` (m,n) in D's type. D of a gated record is (m,n/2).
    """

    a: torch.Tensor
    b: torch.Tensor
    b_nn: torch.Tensor
    d: torch.Tensor
    bias: torch.Tensor | None = None
    c: torch.Tensor | None = None
    aux: torch.Tensor | None = None
    alpha: float = 1.0
    beta: float = 1.0

    def stored(self, layout: Layout) -> torch.Tensor:
        """B as the layout has it."""
        return self.b if layout == "tn" else self.b_nn

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The tensors that are read, by their field."""
        tensors = {"a": self.a, "b": self.b, "b_nn": self.b_nn, "bias": self.bias, "c": self.c}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    @property
    def products(self) -> int:
        """Products of a batch; 1 of a single product."""
        return self.d.shape[0] if self.d.ndim == 3 else 1


def check(record: Record, operands: Operands) -> Problem:
    """The problem that these tensors pose. Raises ValueError where it is none that the record's kernel computes."""
    if record.grouped:
        raise ValueError("batch=grouped: no verdict or timing on a device yet; the emulator has them, --on emulator")
    a, b, d = operands.a, operands.stored(record.layout), operands.d
    for name, tensor, element in (("A", a, record.element), ("B", b, record.element), ("D", d, record.output)):
        _check_matrix(name, tensor, element, record.batched)
    (m, k), n = a.shape[-2:], b.shape[-2 if record.layout == "tn" else -1]
    rows_b, d_shape = ((n, k) if record.layout == "tn" else (k, n)), (m, record.fusion.d_cols(n))
    batches = {tensor.shape[:-2] for tensor in (a, b, d)}
    if tuple(b.shape[-2:]) != rows_b or tuple(d.shape[-2:]) != d_shape or len(batches) > 1:
        raise ValueError(f"A {tuple(a.shape)}, B {tuple(b.shape)} as {record.layout} and D {tuple(d.shape)} do not fit")
    if operands.products > 1 and d.stride(0) == 0:
        raise ValueError(f"D: {operands.products} products would be stored in one matrix; it must not be expanded")
    problem = record.problem.revised(m=m, n=n, k=k)
    _check_fused(problem, operands)
    return problem


def _check_matrix(name: str, tensor: torch.Tensor, element: Element, batched: bool) -> None:
    dimensions = 3 if batched else 2
    if tensor.ndim != dimensions or tensor.stride(-1) != 1 or tensor.dtype != element.torch_dtype:
        what = f"a batch of matrices of {element.title}, (products, rows, columns)," if batched else "a matrix of "
        what += "" if batched else element.title
        raise ValueError(
            f"{name}: expected {what} with contiguous rows, "
            f"got {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
        )


def _check_fused(problem: Problem, operands: Operands) -> None:
    """Raises ValueError for a part of the fusion that is absent or of another shape or type, and for one too many."""
    fusion, ab, d = problem.fusion, problem.element, problem.output
    m, n, width = problem.m, problem.n, problem.d_cols
    bias_shape = {"none": None, "n": (n,), "m": (m,)}[fusion.bias]
    for name, tensor, shape, element in (
        ("bias", operands.bias, bias_shape, ab),
        ("C", operands.c, (m, width) if fusion.residual else None, d),
        ("aux", operands.aux, (m, n) if fusion.aux else None, d),
    ):
        if shape is None and tensor is not None:
            raise ValueError(f"{name}: fusion={fusion} has none, got {tuple(tensor.shape)}")
        if shape is None:
            continue
        there = f"{tensor.dtype} {tuple(tensor.shape)}" if tensor is not None else "none"
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != element.torch_dtype:
            raise ValueError(f"{name}: fusion={fusion} has one of {element.title} {shape}, got {there}")
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}: expected contiguous rows, got strides {tensor.stride()}")
    for name, value, has in (("alpha", operands.alpha, fusion.scale), ("beta", operands.beta, fusion.residual)):
        if value != 1.0 and not has:
            raise ValueError(f"{name}={value}: fusion={fusion} has none, so it must be 1")


def lies(matrix: torch.Tensor) -> Matrix:
    """How a matrix lies, or every one of a batch."""
    starts = [matrix.data_ptr()] + ([matrix.stride(0) * matrix.element_size()] if matrix.ndim == 3 else [])
    return Matrix(matrix.stride(-2), all(start % 16 == 0 for start in starts))


def matrices(operands: Operands, layout: Layout) -> LaunchOperands:
    """How A, B as the layout has it, and D lie."""
    return LaunchOperands(lies(operands.a), lies(operands.stored(layout)), lies(operands.d))


Pair = tuple["torch.Tensor", "torch.Tensor"]  # target and source of a copy


@dataclass
class Launched:
    """Tensors as a kernel takes them. ``b`` and ``b_nn`` are the same one, in the record's layout. ``before`` and
    ``after``: the copies that make them what the caller has, target and source, around the launch."""

    operands: Operands
    before: list[Pair] = field(default_factory=list)
    after: list[Pair] = field(default_factory=list)

    @property
    def copies(self) -> list[Pair]:
        return [*self.before, *self.after]


class _Extents(NamedTuple):
    """Rows and columns of each operand at the sizes that are launched."""

    a: tuple[int, int]
    b: tuple[int, int]
    d: tuple[int, int]
    aux: tuple[int, int]
    bias: int


def _extents(record: Record, use: Use) -> _Extents:
    (m, n, k), fusion = use.launched, record.fusion
    bias = {"none": 0, "n": n, "m": m}[fusion.bias]
    return _Extents((m, k), (n, k) if record.layout == "tn" else (k, n), (m, fusion.d_cols(n)), (m, n), bias)


def launched(record: Record, operands: Operands, use: Use, empty: Empty | None) -> Launched:
    """The operands, checked before, as the record's kernel takes them: wide matrices of zeros, of memory that ``empty``
    gives (torch's own without), in the place of those that it does not take where they lie."""
    extents, launch = _extents(record, use), record.launch
    stored, n = operands.stored(record.layout), use.launched.n
    ready = Launched(replace(operands, b=stored, b_nn=stored))

    def wide(like: torch.Tensor, shape: tuple[int, int], *, read: bool) -> torch.Tensor:
        if like.ndim == 3 and like.stride(0) == 0:  # one matrix for all products
            return wide(like[0], shape, read=read).expand(like.shape[0], -1, -1)
        whole = _zeros(like, (*like.shape[:-2], *shape), empty)
        inside = whole[..., : like.shape[-2], : like.shape[-1]]
        (ready.before if read else ready.after).append((inside, like) if read else (like, inside))
        return whole

    changed: dict[str, Any] = {}
    copies_a, copies_b, copies_d = use.copied
    if copies_a:
        changed["a"] = wide(operands.a, extents.a, read=True)
    if copies_b:
        changed["b"] = changed["b_nn"] = wide(stored, extents.b, read=True)
    if copies_d:
        changed["d"] = wide(operands.d, extents.d, read=False)
    c, aux, bias = operands.c, operands.aux, operands.bias
    if c is not None and (tuple(c.shape) != extents.d or not launch.takes_c(n, lies(c))):
        changed["c"] = wide(c, extents.d, read=True)
    if aux is not None and (tuple(aux.shape) != extents.aux or not launch.takes_aux(n, lies(aux))):
        changed["aux"] = wide(aux, extents.aux, read=False)
    if bias is not None and (len(bias) != extents.bias or bias.data_ptr() % 16):
        changed["bias"] = wide(bias[None], (1, extents.bias), read=True)[0]
    ready.operands = replace(ready.operands, **changed)
    return ready


def _zeros(like: torch.Tensor, shape: tuple[int, ...], empty: Empty | None) -> torch.Tensor:
    """Zeros of this shape, whose rows start on 16 bytes."""
    padded = (*shape[:-1], aligned(shape[-1]))
    whole = like.new_empty(padded) if empty is None else typed(empty, like.dtype)(*padded)
    return whole.zero_()[..., : shape[-1]]


def draw(problem: Problem, count: int, generator: torch.Generator, device: Any, products: int = 1) -> list[Operands]:
    """``count`` sets of standard normal operands, of so many products; every matrix, bias and C starts at a multiple of
    256 bytes. D and aux are NaN; alpha and beta of a fusion that has them are those of its tests."""
    fusion, ab, output = problem.fusion, problem.element, problem.output
    extents = (products,) if problem.batched else ()

    def tensors(element: Element, *shape: int) -> torch.Tensor:
        return _sets(element, (count, *extents, *shape), device)

    a, b = tensors(ab, problem.m, problem.k), tensors(ab, problem.n, problem.k)
    b_nn, d = tensors(ab, problem.k, problem.n), tensors(output, problem.m, problem.d_cols)
    more: dict[str, torch.Tensor] = {}
    if fusion.bias != "none":
        more["bias"] = tensors(ab, problem.n if fusion.bias == "n" else problem.m)
    if fusion.residual:
        more["c"] = tensors(output, problem.m, problem.d_cols)
    for matrix in (a, b, *more.values()):
        for drawn in matrix:
            drawn.normal_(generator=generator)
    b_nn.copy_(b.transpose(-2, -1))
    if fusion.aux:
        more["aux"] = tensors(output, problem.m, problem.n)
    for stale in (d, *([more["aux"]] if fusion.aux else [])):
        stale.fill_(float("nan"))
    scalars = {"alpha": ALPHA if fusion.scale else 1.0, "beta": BETA if fusion.residual else 1.0}
    return [
        Operands(a[i], b[i], b_nn[i], d[i], **{name: part[i] for name, part in more.items()}, **scalars)
        for i in range(count)
    ]


def _sets(element: Element, shape: tuple[int, ...], device: Any) -> torch.Tensor:
    """Memory of this shape, ``shape[0]`` sets, each of which starts at a multiple of 256 bytes."""
    import torch

    count, inside = shape[0], shape[1:]
    size = ceil_div(math.prod(inside) * element.bytes, ALIGNMENT) * ALIGNMENT // element.bytes
    pool = torch.empty(count * size, dtype=element.torch_dtype, device=device)
    return pool[: count * size].view(count, size)[:, : math.prod(inside)].unflatten(1, inside)
