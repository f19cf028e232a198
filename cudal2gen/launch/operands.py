"""Handles the torch tensors of a product: draws them at random, checks them against a record, and pads them.

Leading dimensions and shapes count elements. Tensors of a batch have three dimensions; the first counts its products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from cudal2gen.kernel import Layout, Problem, Record, Use, aligned, ceil_div
from cudal2gen.kernel.fusion import ALPHA, BETA
from cudal2gen.kernel.launch import LaunchOperands, Matrix
from cudal2gen.kernel.problem import rows_along_k
from kernelproof.ground.element import F16, F32, Element

if TYPE_CHECKING:
    import torch

Empty = Callable[..., "torch.Tensor"]  # allocates a tensor of the given extents, with undefined content

ALIGNMENT = 256  # bytes to which torch's allocator aligns


def typed(empty: Empty, dtype: torch.dtype) -> Empty:
    """A function that allocates tensors of this type with ``empty``, which allocates elements of 16 bits."""

    def of_type(*shape: int) -> torch.Tensor:
        count = math.prod(shape)
        return empty(ceil_div(count * dtype.itemsize, 2)).view(dtype)[:count].view(shape)

    return of_type


@dataclass(frozen=True)
class Operands:
    """One set of matrices: ``a`` (m,k), ``b`` (n,k), the same B as ``b_nn`` (k,n), and ``d`` (m,n).

    All are row-major, except that ``a`` is a transposed view if the layout stores A as (k,m). D of a gated record is
    (m,n/2).

    In a strided batch the shapes are (products,m,k) and so on; a B that all products share is expanded along the
    products. In a grouped batch only B has a third dimension, (groups,n,k), and ``ends`` has the row after each group's
    last one, int32, ascending, on the device.

    A fused record also reads ``bias``, ``c``, ``alpha`` and ``beta``, and may store ``aux``. ``bias`` is (n) or (m) in
    the type of A and B; a batch may have one for each product, and groups one for each group along n. ``c`` has the
    shape and type of D. ``aux`` is (m,n) or (products,m,n) in D's type.
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
    ends: torch.Tensor | None = None

    def stored_a(self, layout: Layout) -> torch.Tensor:
        """A in the form that the layout has."""
        return self.a if rows_along_k(layout).a else self.a.mT

    def stored_b(self, layout: Layout) -> torch.Tensor:
        """B in the form that the layout has."""
        return self.b if rows_along_k(layout).b else self.b_nn

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The tensors that a kernel reads, by field."""
        tensors = {"a": self.a, "b": self.b, "b_nn": self.b_nn, "bias": self.bias, "c": self.c, "ends": self.ends}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    @property
    def products(self) -> int:
        """The number of products of a batch or of groups; 1 for a single product."""
        return self.b.shape[0] if self.b.ndim == 3 else 1


def check(record: Record, operands: Operands) -> Problem:
    """The problem of these tensors. Raises ValueError if the record's kernel does not compute it."""
    a, b, d = operands.stored_a(record.layout), operands.stored_b(record.layout), operands.d
    grouped = record.grouped
    strided = record.batched and not grouped
    _check_matrix("A", a, record.element, strided)
    _check_matrix("B", b, record.element, record.batched)
    _check_matrix("D", d, record.output, strided)
    (m, k), n = operands.a.shape[-2:], b.shape[-2 if record.along_k.b else -1]
    rows_b, d_shape = ((n, k) if record.along_k.b else (k, n)), (m, record.fusion.d_cols(n))
    batches = {tensor.shape[:-2] for tensor in ((a, d) if grouped else (a, b, d))}
    if tuple(b.shape[-2:]) != rows_b or tuple(d.shape[-2:]) != d_shape or len(batches) > 1:
        raise ValueError(f"A {tuple(a.shape)}, B {tuple(b.shape)} as {record.layout} and D {tuple(d.shape)} do not fit")
    if strided and operands.products > 1 and d.stride(0) == 0:
        raise ValueError(f"D: {operands.products} products would be stored in one matrix; it must not be expanded")
    problem = record.problem.revised(m=m, n=n, k=k)
    _check_ends(problem, operands)
    _check_fused(problem, operands)
    return problem


def _check_matrix(name: str, tensor: torch.Tensor, element: Element, several: bool) -> None:
    """Raises ValueError unless a tensor is a matrix of this type, or ``several`` of them, with contiguous rows."""
    dimensions = 3 if several else 2
    if tensor.ndim != dimensions or tensor.stride(-1) != 1 or tensor.dtype != element.torch_dtype:
        expected = (
            f"matrices of {element.title}, (products, rows, columns)," if several else f"a matrix of {element.title}"
        )
        raise ValueError(
            f"{name}: expected {expected} with contiguous rows, "
            f"got {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
        )


def _check_ends(problem: Problem, operands: Operands) -> None:
    """Raises ValueError unless groups, and only groups, have ends."""
    import torch

    ends, groups = operands.ends, operands.products
    if ends is None and not problem.grouped:
        return
    actual = "none" if ends is None else f"{ends.dtype} {tuple(ends.shape)} with strides {ends.stride()}"
    if not problem.grouped:
        raise ValueError(f"ends: batch={problem.batch} has none, got {actual}")
    if ends is None or tuple(ends.shape) != (groups,) or ends.dtype != torch.int32 or ends.stride(0) != 1:
        raise ValueError(f"ends: expected torch.int32 ({groups},), contiguous, one for each B, got {actual}")


def _check_fused(problem: Problem, operands: Operands) -> None:
    """Raises ValueError if a part of the fusion is absent, superfluous, or of another shape or type."""
    fusion, ab, d = problem.fusion, problem.element, problem.output
    m, n, width, products = problem.m, problem.n, problem.d_cols, operands.products
    batch = (products,) if problem.batched and not problem.grouped else ()
    # A bias is one vector for all products or groups, or one for each; groups of rows share a bias along m.
    bias: list[tuple[int, ...]] = [] if fusion.bias == "none" else [(n if fusion.bias == "n" else m,)]
    if bias and (batch or (problem.grouped and fusion.bias == "n")):
        bias = [*bias, (products, *bias[0])]
    shapes: dict[str, list[tuple[int, ...]]] = {
        "bias": bias,
        "C": [(*batch, m, width)] if fusion.residual else [],
        "aux": [(*batch, m, n)] if fusion.aux else [],
    }
    for (name, legal), tensor, element in zip(
        shapes.items(), (operands.bias, operands.c, operands.aux), (ab, d, d), strict=True
    ):
        if not legal and tensor is not None:
            raise ValueError(f"{name}: fusion={fusion} has none, got {tuple(tensor.shape)}")
        if not legal:
            continue
        actual = f"{tensor.dtype} {tuple(tensor.shape)}" if tensor is not None else "none"
        if tensor is None or tuple(tensor.shape) not in legal or tensor.dtype != element.torch_dtype:
            expected = " or ".join(map(str, legal))
            raise ValueError(f"{name}: fusion={fusion} has one of {element.title} {expected}, got {actual}")
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}: expected contiguous rows, got strides {tensor.stride()}")
    for name, value, declared in (("alpha", operands.alpha, fusion.scale), ("beta", operands.beta, fusion.residual)):
        if value != 1.0 and not declared:
            raise ValueError(f"{name}={value}: fusion={fusion} has none, so it must be 1")


def matrix_of(matrix: torch.Tensor) -> Matrix:
    """The leading dimension of a matrix, and whether it starts at a multiple of 16 bytes. In a batch, all must."""
    starts = [matrix.data_ptr()] + ([matrix.stride(0) * matrix.element_size()] if matrix.ndim == 3 else [])
    return Matrix(matrix.stride(-2), all(start % 16 == 0 for start in starts))


def matrices(operands: Operands, layout: Layout) -> LaunchOperands:
    """Leading dimensions and alignments of A and B as the layout stores them, and of D."""
    a, b = operands.stored_a(layout), operands.stored_b(layout)
    return LaunchOperands(matrix_of(a), matrix_of(b), matrix_of(operands.d))


TensorCopy = tuple["torch.Tensor", "torch.Tensor"]  # (target, source)


@dataclass
class LaunchTensors:
    """The tensors that a kernel is launched on, and the copies between them and the caller's tensors.

    ``operands``: the tensors; their ``b`` and ``b_nn`` are one tensor, in the record's layout. ``before``: copies from
    the caller's tensors to padded ones before the launch. ``after``: copies back after it. Each copy is a pair of
    target and source.
    """

    operands: Operands
    before: list[TensorCopy] = field(default_factory=list)
    after: list[TensorCopy] = field(default_factory=list)

    @property
    def copies(self) -> list[TensorCopy]:
        """All copies, those before the launch first."""
        return [*self.before, *self.after]


class _Extents(NamedTuple):
    """Rows and columns of each operand, as it is stored, at the sizes that are launched."""

    a: tuple[int, int]
    b: tuple[int, int]
    d: tuple[int, int]
    aux: tuple[int, int]
    bias: int


def _extents(record: Record, use: Use) -> _Extents:
    """The extents of each operand at the sizes with which a record is launched."""
    (m, n, k), fusion = use.launched, record.fusion
    bias = {"none": 0, "n": n, "m": m}[fusion.bias]
    a, b = (m, k) if record.along_k.a else (k, m), (n, k) if record.along_k.b else (k, n)
    return _Extents(a, b, (m, fusion.d_cols(n)), (m, n), bias)


def launch_tensors(record: Record, operands: Operands, use: Use, empty: Empty | None) -> LaunchTensors:
    """The operands as the record's kernel takes them. They must have passed ``check`` before.

    Matrices that the kernel does not take where they lie are replaced by padded ones, filled with zeros, in memory from
    ``empty`` (from torch if ``empty`` is None).
    """
    extents, launch, vector = _extents(record, use), record.launch, record.element.vector
    b, n = operands.stored_b(record.layout), use.launched.n
    tensors = LaunchTensors(replace(operands, b=b, b_nn=b))

    def padded_copy(like: torch.Tensor, shape: tuple[int, int], *, read: bool) -> torch.Tensor:
        """A padded matrix that is filled from ``like`` before the launch (``read``), or copied to ``like`` after it."""
        if like.ndim == 3 and like.stride(0) == 0:  # shared by all products
            return padded_copy(like[0], shape, read=read).expand(like.shape[0], -1, -1)
        padded = _zeros(like, (*like.shape[:-2], *shape), vector, empty)
        inside = padded[..., : like.shape[-2], : like.shape[-1]]
        (tensors.before if read else tensors.after).append((inside, like) if read else (like, inside))
        return padded

    changed: dict[str, Any] = {}
    copies_a, copies_b, copies_d = use.copied
    if copies_a:
        padded = padded_copy(operands.stored_a(record.layout), extents.a, read=True)
        changed["a"] = padded if record.along_k.a else padded.mT
    if copies_b:
        changed["b"] = changed["b_nn"] = padded_copy(b, extents.b, read=True)
    if copies_d:
        changed["d"] = padded_copy(operands.d, extents.d, read=False)
    c, aux, bias = operands.c, operands.aux, operands.bias
    if c is not None and (tuple(c.shape[-2:]) != extents.d or not launch.takes_c(n, matrix_of(c))):
        changed["c"] = padded_copy(c, extents.d, read=True)
    if aux is not None and (tuple(aux.shape[-2:]) != extents.aux or not launch.takes_aux(n, matrix_of(aux))):
        changed["aux"] = padded_copy(aux, extents.aux, read=False)
    if bias is not None and (bias.shape[-1] != extents.bias or not _starts_on_vectors(bias)):
        several = bias.ndim == 2
        padded = padded_copy(bias if several else bias[None], (len(bias) if several else 1, extents.bias), read=True)
        changed["bias"] = padded if several else padded[0]
    tensors.operands = replace(tensors.operands, **changed)
    return tensors


def _starts_on_vectors(bias: torch.Tensor) -> bool:
    """Whether a bias, or each of several, starts at a multiple of 16 bytes."""
    spacing = bias.stride(0) * bias.element_size() if bias.ndim == 2 else 0
    return bool(bias.data_ptr() % 16 == 0 and spacing % 16 == 0)


def _zeros(like: torch.Tensor, shape: tuple[int, ...], vector: int, empty: Empty | None) -> torch.Tensor:
    """Zeros of this shape. The distance of rows is a multiple of ``vector`` elements."""
    padded = (*shape[:-1], aligned(shape[-1], vector))
    matrix = like.new_empty(padded) if empty is None else typed(empty, like.dtype)(*padded)
    return matrix.zero_()[..., : shape[-1]]


def draw(problem: Problem, count: int, generator: torch.Generator, device: Any, products: int = 1) -> list[Operands]:
    """``count`` sets of standard normal operands for this many products.

    A is stored as the problem's layout has it, B in both forms. Every matrix, bias and C starts at a multiple of 256
    bytes. Groups have equally many rows. D and aux are NaN. alpha and beta, if the fusion has them, are ``ALPHA`` and
    ``BETA``.
    """
    import torch

    fusion, ab, output = problem.fusion, problem.element, problem.output
    batch_b = (products,) if problem.batched else ()
    batch = () if problem.grouped else batch_b

    def tensors(element: Element, *shape: int) -> torch.Tensor:
        return _allocate_sets(element, (count, *batch, *shape), device)

    def tensors_b(*shape: int) -> torch.Tensor:
        return _allocate_sets(ab, (count, *batch_b, *shape), device)

    along_a = problem.along_k.a
    a = tensors(ab, problem.m, problem.k) if along_a else tensors(ab, problem.k, problem.m).mT
    b = tensors_b(problem.n, problem.k)
    b_nn, d = tensors_b(problem.k, problem.n), tensors(output, problem.m, problem.d_cols)
    more: dict[str, torch.Tensor] = {}
    if fusion.bias != "none":
        more["bias"] = tensors_b(problem.n) if fusion.bias == "n" else tensors(ab, problem.m)
    if fusion.residual:
        more["c"] = tensors(output, problem.m, problem.d_cols)
    for matrix in (a, b, *more.values()):
        # torch cannot draw types of 8 bits, so they are drawn in fp32 and rounded.
        drawn = torch.empty_like(matrix, dtype=F32.torch_dtype) if matrix.element_size() < F16.bytes else matrix
        for product in drawn:
            product.normal_(generator=generator)
        if drawn is not matrix:
            matrix.copy_(drawn)
    b_nn.copy_(b.transpose(-2, -1))
    if fusion.aux:
        more["aux"] = tensors(output, problem.m, problem.n)
    for stale in (d, *([more["aux"]] if fusion.aux else [])):
        stale.fill_(float("nan"))
    if problem.grouped:
        ends = torch.arange(1, products + 1, dtype=torch.int64) * problem.m // products
        more["ends"] = ends.to(device=device, dtype=torch.int32).expand(count, products)
    scalars = {"alpha": ALPHA if fusion.scale else 1.0, "beta": BETA if fusion.residual else 1.0}
    return [
        Operands(a[i], b[i], b_nn[i], d[i], **{name: part[i] for name, part in more.items()}, **scalars)
        for i in range(count)
    ]


def _allocate_sets(element: Element, shape: tuple[int, ...], device: Any) -> torch.Tensor:
    """Memory of this shape. ``shape[0]`` counts the sets; each starts at a multiple of 256 bytes."""
    import torch

    count, inside = shape[0], shape[1:]
    length = math.prod(inside)
    padded = ceil_div(length * element.bytes, ALIGNMENT) * ALIGNMENT // element.bytes
    pool = torch.empty(count * padded, dtype=element.torch_dtype, device=device)
    return pool.view(count, padded)[:, :length].unflatten(1, inside)
