"""Requests: what a call asks to be computed, with its tensors as row-major matrices of a layout.

A tensor is described once, by ``facts``; all else here works on descriptions. Nothing reads an element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cudal2gen.kernel import Acc, IllegalRecord, Layout, Problem, aligned
from cudal2gen.kernel.fusion import PLAIN, Activation, Fusion
from cudal2gen.kernel.launch import Batches, LaunchOperands, Matrix, Sizes
from cudal2gen.kernel.problem import AlongK
from cudal2gen.operators import epilogues, plan_batches
from cudal2gen.operators.call_torch import torch_fused, torch_grouped, torch_linear, torch_matmul
from cudal2gen.operators.check_modes import FREE, INVARIANT, refusal
from cudal2gen.operators.check_operands import grouped_shape, output_name, result_shape
from cudal2gen.operators.plan_batches import MatrixStrides
from kernelproof.ground.element import VECTOR_BYTES, ElementName, OutputName, name_of

if TYPE_CHECKING:
    import torch

# (A, B, third) -> D, or D and Z if the fusion has ``aux``; third: out, bias, offsets, or the second B of a pair.
Run = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor | None"], Any]
Finish = Callable[["torch.Tensor", "torch.Tensor | None"], Any]
MaybeMatrix = Matrix | None  # None: no layout serves the strides
Kind = tuple[ElementName, OutputName, Acc, Layout]  # as a problem's

BIASED = Fusion(bias="n")
CPU, ELSEWHERE, META = -1, -2, -3  # devices of a request that are no CUDA device; META: nothing is computed


class Arguments(NamedTuple):
    """The tensors of a call: x or a; the weight or b; and a bias, the second weight of a gate, or offsets."""

    a: torch.Tensor
    b: torch.Tensor
    third: torch.Tensor | None = None


class Epilogue(NamedTuple):
    """What is applied to the sums; ``aux``: whether the sums with bias are wanted as well."""

    activation: Activation
    gate: bool
    aux: bool


class Request(NamedTuple):
    """A product that a call asks for.

    ``problem``: without its GPU; None if no kernel can compute it, for the reason ``obstacle``. ``operands``: the
    tensors as matrices, as the layout stores them. ``shape``: of the result. ``device``: the CUDA device's index,
    ``CPU``, ``ELSEWHERE`` or ``META``. ``by_torch``: torch's own product, with all that belongs to it. ``batches``: the
    products of a batch, each of ``sizes``. ``fusion``: what a kernel may apply to the sums; ``finish``: the same by
    torch, from a plain kernel's D and the bias. ``pair``: whether the caller has two weights of a gate, and B is their
    interleaved copy. ``invariance``: how far other numbers of rows are computed alike (``check_modes``).
    """

    problem: Problem | None
    obstacle: str
    sizes: Sizes
    operands: LaunchOperands
    shape: tuple[int, ...]
    device: int
    by_torch: Run
    batches: Batches = Batches()
    fusion: Fusion = PLAIN
    finish: Finish | None = None
    pair: bool = False
    into: bool = False
    invariance: int = FREE

    def alike(self, invariance: int) -> Request:
        """The same, computed as other numbers of rows are; torch does not compute it if it must be invariant."""
        if invariance == FREE or self.device == META:
            return self
        refused = invariance == INVARIANT
        by_torch = refusal("the launch was refused, or a graph is captured") if refused else self.by_torch
        return self._replace(invariance=invariance, by_torch=by_torch)

    @property
    def fused(self) -> Request:
        """The same with the fusion in the problem; without a problem if there is no such kernel."""
        if self.problem is None:
            return self
        shape = (*self.shape[:-1], self.fusion.d_cols(self.sizes.n))
        operands = self.operands._replace(d=Matrix(shape[-1]))
        try:
            problem = self.problem.revised(fusion=self.fusion)
        except IllegalRecord as error:
            return self._replace(problem=None, obstacle=str(error))
        return self._replace(problem=problem, shape=shape, operands=operands, finish=None)


class TensorFacts(NamedTuple):
    """What planning reads of a tensor. ``strides`` count elements; ``aligned``: whether it starts on 16 bytes;
    ``device``: as a request's. ``element``: the name of its type in a problem; None if there are no kernels for the
    type or the device, for the reason ``obstacle``."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    aligned: bool
    dtype: torch.dtype
    element_bytes: int
    device: int
    element: ElementName | None
    obstacle: str


def facts(tensor: torch.Tensor) -> TensorFacts:
    """Describes a tensor that has strides and memory."""
    elsewhere = META if tensor.is_meta else ELSEWHERE
    device = tensor.get_device() if tensor.is_cuda else CPU if tensor.is_cpu else elsewhere
    element, obstacle = name_of(tensor.dtype), ""
    if device == elsewhere:
        element, obstacle = None, f"no kernels on {tensor.device.type}"
    elif element is None:
        obstacle = f"no kernels of {tensor.dtype}"
    return TensorFacts(
        tuple(tensor.shape), tensor.stride(), tensor.data_ptr() % VECTOR_BYTES == 0, tensor.dtype,
        tensor.element_size(), device, element, obstacle,
    )  # fmt: skip


# --- tensors as matrices ---


def in_rows(a: torch.Tensor, memory: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A tensor whose rows a kernel reads in place if their length allows it: itself, or a contiguous copy in
    ``memory``. So how it lies decides nothing about the kernel."""
    try:
        in_place = a.data_ptr() % VECTOR_BYTES == 0
        if not a.is_contiguous():
            vectors = a.ndim == 2 and a.stride(0) * a.element_size() % VECTOR_BYTES == 0
            in_place = in_place and vectors and a.stride(1) == 1 and a.stride(0) >= a.shape[1]
        return a if in_place or a.is_meta else memory(a).copy_(a)
    except (RuntimeError, AttributeError):  # no strides or no memory; or no tensor
        return a


def matrix(tensor: TensorFacts, rows: int, cols: int, strides: MatrixStrides, step: int = 0) -> MaybeMatrix:
    """A tensor's first matrix, row-major; None if its rows are not contiguous. ``step``: elements to the next matrix,
    which must be aligned as well if the matrix is to be."""
    if cols > 1 and strides.cols != 1:
        return None
    # The only row of a matrix may be as far from the next as a kernel likes.
    ld = strides.rows if rows > 1 else aligned(cols, VECTOR_BYTES // tensor.element_bytes)
    if ld < cols:
        return None
    return Matrix(ld, tensor.aligned and step * tensor.element_bytes % VECTOR_BYTES == 0)


class Stored(NamedTuple):
    """An operand as a layout stores it: itself or its transpose, in rows; no matrix if neither has contiguous rows."""

    transposed: bool
    matrix: MaybeMatrix


def stored(tensor: TensorFacts, rows: int, cols: int, strides: MatrixStrides, step: int = 0) -> Stored:
    """A (m,k) or B (k,n) with these strides, in rows of its own or of its transpose."""
    as_it_is = matrix(tensor, rows, cols, strides, step)
    # A single row or column may be either; rows that start on 16 bytes need no copy.
    if as_it_is is None or as_it_is.ld * tensor.element_bytes % VECTOR_BYTES:
        transposed = strides._replace(rows=strides.cols, cols=strides.rows)
        if as_transposed := matrix(tensor, cols, rows, transposed, step):
            return Stored(True, as_transposed)
    return Stored(False, as_it_is)


def layout_of(a: Stored, b: Stored) -> Layout:
    """The layout of operands that are stored so."""
    return AlongK(not a.transposed, b.transposed).layout


class MatrixProblem(NamedTuple):
    """A problem on matrices: without its GPU, or None for the reason ``obstacle``."""

    problem: Problem | None
    obstacle: str
    operands: LaunchOperands


def matrix_problem(
    kind: Kind, sizes: Sizes, matrices: tuple[MaybeMatrix, MaybeMatrix, MaybeMatrix], **features: str
) -> MatrixProblem:  # fmt: skip
    """The problem of these matrices. ``features``: its further fields."""
    problem, obstacle = problem_of(kind, sizes, **features)
    if problem is not None and None in matrices:
        strange = [name for name, found in zip("ABD", matrices, strict=True) if found is None]
        problem, obstacle = None, f"strides of {' and '.join(strange)} that no layout serves"
    (a, b, d), packed = matrices, LaunchOperands.packed(kind[-1], sizes)
    return MatrixProblem(problem, obstacle, LaunchOperands(a or packed.a, b or packed.b, d or packed.d))


def problem_of(kind: Kind, sizes: Sizes, **features: str) -> tuple[Problem | None, str]:
    """The problem without its GPU; or None, and the reason. ``features``: further fields."""
    from pydantic import ValidationError

    try:
        ab, d, acc, layout = kind
        fields = {"gpu": "", "ab": ab, "d": d, "acc": acc, "layout": layout, **sizes._asdict(), **features}
        return Problem.model_validate(fields), ""
    except ValidationError:
        return None, "an extent is 0" if 0 in sizes else "an extent is too large"


# --- requests of each operator, whose operands are checked ---


def request_matmul(
    a: torch.Tensor, b: torch.Tensor, acc: Acc, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Request:
    """``torch.matmul(a, b)``: one product, also of all rows of A with a B that they share, or a batch."""
    request = product(facts(a), facts(b), acc, None if out is None else facts(out), out_dtype)
    return request if out is None else request._replace(into=True)


def product(
    a: TensorFacts, b: TensorFacts, acc: Acc, out: TensorFacts | None, out_dtype: torch.dtype | None
) -> Request:  # fmt: skip
    """``request_matmul`` of tensors that were described."""
    shape, sizes = result_shape(a.shape, b.shape), plan_batches.sizes_of(a.shape, b.shape)
    batch = plan_batches.broadcast(a.shape[:-2], b.shape[:-2])
    of_a = plan_batches.matrix_strides(a.shape, a.strides, batch)
    of_b = plan_batches.matrix_strides(b.shape, b.strides, batch, column=True)
    of_d = _strides_of_d(None if out is None else out.strides, batch, sizes, (len(a.shape) > 1, len(b.shape) > 1))
    extents, spacing, obstacle = sizes, Batches(), ""
    if 0 in batch:
        extents = sizes._replace(m=0)
    elif batch and (folded := _folded(of_a, of_b, of_d, batch, sizes)) is not None:
        extents, of_a, of_d = folded
    elif batch:
        even, obstacle = plan_batches.spaced(batch, of_a, of_b, of_d)
        spacing = even or spacing
    if out is not None and not plan_batches.apart(out.shape, out.strides):
        obstacle = "elements of out that may lie in one place"
    as_a = stored(a, extents.m, extents.k, of_a, spacing.a)
    as_b = stored(b, extents.k, extents.n, of_b, spacing.b)
    layout, d_type = layout_of(as_a, as_b), output_name(a.dtype, out_dtype)
    by_torch = torch_matmul if d_type == "same" else partial(torch_matmul, out_dtype=out_dtype)
    stated = MatrixProblem(None, a.obstacle or obstacle, LaunchOperands.packed(layout, extents))
    if a.element is not None and not obstacle:
        as_d = Matrix(extents.n) if out is None else matrix(out, extents.m, extents.n, of_d, spacing.d)
        features = {"batch": "strided"} if spacing.products != 1 else {}
        matrices = as_a.matrix, as_b.matrix, as_d
        stated = matrix_problem((a.element, d_type, acc, layout), extents, matrices, **features)
    return Request(stated.problem, stated.obstacle, extents, stated.operands, shape, a.device, by_torch, spacing)


def _strides_of_d(
    out: tuple[int, ...] | None, batch: Sequence[int], sizes: Sizes, matrices: tuple[bool, bool]
) -> MatrixStrides:  # fmt: skip
    """Strides of the result, which is contiguous without ``out``. ``matrices``: whether A and B are more than
    vectors."""
    extents = (*batch, sizes.m, sizes.n)
    if out is None:
        strides = [math.prod(extents[place + 1 :]) for place in range(len(extents))]
        return MatrixStrides(strides[-2], 1, tuple(strides[:-2]))
    strides = list(out)
    if not matrices[1]:
        strides.append(1)
    if not matrices[0]:
        strides.insert(len(strides) - 1, sizes.n)
    return MatrixStrides(strides[-2], strides[-1], tuple(strides[:-2]))


def _folded(
    a: MatrixStrides, b: MatrixStrides, d: MatrixStrides, batch: Sequence[int], sizes: Sizes
) -> tuple[Sizes, MatrixStrides, MatrixStrides] | None:
    """A batch as one product: its sizes, A and D; None if B differs, or rows of A or D are not one matrix's."""
    as_a, as_d = plan_batches.folded(a, b, batch, sizes), plan_batches.folded(d, b, batch, sizes)
    return None if as_a is None or as_d is None else (*as_a, as_d[1])


def request_linear(x: torch.Tensor, weight: torch.Tensor, biased: bool) -> Request:
    """The product of x (..., K) and weight (N,K), in the layout that serves their strides."""
    of_x, of_weight = facts(x), facts(weight)
    k, n = of_x.shape[-1], of_weight.shape[0]
    sizes = Sizes(x.numel() // k if k else 0, n, k)
    as_x = Stored(False, None)
    if sizes.m:
        # Batch dimensions that are no rows of one matrix have no view as such.
        with suppress(RuntimeError):
            rows, cols = x.view(sizes.m, k).stride()
            as_x = stored(of_x, sizes.m, k, MatrixStrides(rows, cols))
    as_weight = stored(of_weight, k, n, MatrixStrides(of_weight.strides[1], of_weight.strides[0]))
    layout = layout_of(as_x, as_weight)
    stated = MatrixProblem(None, of_x.obstacle, LaunchOperands.packed(layout, sizes))
    if of_x.element is not None:
        matrices = as_x.matrix, as_weight.matrix, Matrix(n)
        stated = matrix_problem((of_x.element, "same", "f32", layout), sizes, matrices)
    shape = (*of_x.shape[:-1], n)
    request = Request(stated.problem, stated.obstacle, sizes, stated.operands, shape, of_x.device, torch_linear)
    return request._replace(fusion=BIASED, finish=add) if biased else request


def linear_of_rows(m: int, n: int, k: int, element: ElementName, device: int, biased: bool) -> Request:
    """``request_linear`` of m packed rows, without tensors."""
    sizes, matrices = Sizes(m, n, k), (Matrix(k), Matrix(k), Matrix(n))
    stated = matrix_problem((element, "same", "f32", "tn"), sizes, matrices)
    request = Request(stated.problem, stated.obstacle, sizes, stated.operands, (m, n), device, torch_linear)
    return request._replace(fusion=BIASED, finish=add) if biased else request


def request_grouped(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None, out_dtype: torch.dtype | None
) -> Request:
    """A grouped product; a batch if all groups are of one size."""
    shape, by_torch = grouped_shape(a, b, offs), partial(torch_grouped, out_dtype=out_dtype)
    if offs is None:
        return request_matmul(a, b, "f32", None, out_dtype)._replace(by_torch=by_torch)
    of_a, of_b, groups = facts(a), facts(b), len(offs)
    sizes, spacing = Sizes(of_a.shape[-2], of_b.shape[-1], of_a.shape[-1]), Batches()
    stated = MatrixProblem(None, "groups of columns or of k", LaunchOperands.packed("nn", sizes))
    if of_a.element is None:
        stated = stated._replace(obstacle=of_a.obstacle)
    elif not groups:
        stated = stated._replace(obstacle="an extent is 0")
    elif (a.ndim, b.ndim) == (2, 3):
        spacing = Batches(groups, b=of_b.strides[0])
        as_b = stored(of_b, sizes.k, sizes.n, MatrixStrides(of_b.strides[1], of_b.strides[2]), spacing.b)
        # Groups are rows of A, so it has rows of its own.
        as_a = Stored(False, matrix(of_a, sizes.m, sizes.k, MatrixStrides(of_a.strides[0], of_a.strides[1])))
        kind: Kind = (of_a.element, output_name(of_a.dtype, out_dtype), "f32", layout_of(as_a, as_b))
        stated = matrix_problem(kind, sizes, (as_a.matrix, as_b.matrix, Matrix(sizes.n)), batch="grouped")
    return Request(stated.problem, stated.obstacle, sizes, stated.operands, shape, of_a.device, by_torch, spacing)


def add(d: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """D with a bias along n."""
    return d if bias is None else d.add_(bias)


def request_fused(
    x: torch.Tensor, weight: torch.Tensor, biased: bool, epilogue: Epilogue, by_torch: Run | None = None
) -> Request:
    """The product of x (..., K) and weight (N,K) with an epilogue. ``by_torch``: if it is not ``torch_fused``."""
    activation, gate, aux = epilogue
    fusion = Fusion(bias="n" if biased else "none", aux=aux, activation=activation, gate=gate)

    def unfused(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        d, z = torch_fused(x, weight, bias, activation, gate)
        return (d, z) if aux else d

    def finish(z: torch.Tensor, bias: torch.Tensor | None) -> Any:
        z = add(z, bias)
        d = epilogues.apply(z, activation, gate)
        return (d, z) if aux else d

    plain = request_linear(x, weight, False)
    return plain._replace(fusion=fusion, finish=finish, by_torch=by_torch or unfused)


# --- keys of plans ---


def key_of(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    """What a plan may depend on of a tensor. Raises RuntimeError or AttributeError for what has no strides or no
    memory."""
    if tensor is None:
        return ()
    return tensor.shape, tensor.stride(), tensor.data_ptr() & 15, tensor.device, tensor.dtype


def span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first to its last element."""
    if not tensor.numel():
        return 0
    reach = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.element_size()) * (int(reach) + 1)


def apart(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one storage surely have no byte in common, as other columns of the same rows have none."""
    # Modulo a row's length, a tensor reaches no further than its strides that are no multiples of it.
    steps = [
        [((extent - 1) * stride * tensor.element_size(), stride * tensor.element_size())
         for extent, stride in zip(tensor.shape, tensor.stride(), strict=True) if extent > 1 and stride]
        for tensor in (first, second)
    ]  # fmt: skip
    for _, pitch in (*steps[0], *steps[1]):
        wide, other = (
            tensor.element_size() + sum(reach for reach, stride in of_tensor if stride % pitch)
            for tensor, of_tensor in zip((first, second), steps, strict=True)
        )
        start = (second.data_ptr() - first.data_ptr()) % pitch
        if wide <= start <= pitch - other:
            return True
    return False
