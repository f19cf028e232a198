"""Turns a call's tensors into a request: the problem to compute, on row-major matrices in one of the layouts.

``facts`` describes each tensor once; the other functions work on these descriptions. No element is read.
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

# Computes D from (A, B, third); also Z if the fusion has ``aux``. third: out, bias, offsets, or the second B of a pair.
Run = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor | None"], Any]
Finish = Callable[["torch.Tensor", "torch.Tensor | None"], Any]  # computes by torch the rest, from a plain D and bias
MaybeMatrix = Matrix | None  # None: no layout has such strides
Kind = tuple[ElementName, OutputName, Acc, Layout]  # types and layout of a problem

BIASED = Fusion(bias="n")
CPU, ELSEWHERE, META = -1, -2, -3  # devices of a request that are no CUDA devices; on META nothing is computed


class Arguments(NamedTuple):
    """The tensors of a call. ``a``: x or a; ``b``: the weight or b; ``third``: a bias, the second weight of a gate, or
    offsets."""

    a: torch.Tensor
    b: torch.Tensor
    third: torch.Tensor | None = None


class Epilogue(NamedTuple):
    """The operation on the sums. ``aux``: whether the sums with bias (Z) are returned too."""

    activation: Activation
    gate: bool
    aux: bool


class Request(NamedTuple):
    """The product that a call must compute.

    - ``problem``: the problem without its GPU; None if no kernel can compute it, for the reason ``obstacle``.
    - ``sizes``: the extents of each product; ``batches``: the number and spacing of the products.
    - ``operands``: the tensors as matrices, as the layout stores them; ``shape``: the shape of the result.
    - ``device``: the CUDA device's index, ``CPU``, ``ELSEWHERE`` or ``META``.
    - ``by_torch`` computes the complete request by torch.
    - ``fusion``: what a kernel may apply to the sums; ``finish`` does the same by torch, from a plain kernel's D and
      the bias.
    - ``pair``: whether the caller has two weights of a gate, and B is their interleaved copy.
    - ``has_out``: whether the caller gives a tensor for D.
    - ``invariance``: the level of batch invariance (``check_modes``).
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
    has_out: bool = False
    invariance: int = FREE

    def with_invariance(self, invariance: int) -> Request:
        """The request at this level of batch invariance. ``by_torch`` refuses calls at the level ``INVARIANT``."""
        if invariance == FREE or self.device == META:
            return self
        by_torch = self.by_torch
        if invariance == INVARIANT:
            by_torch = refusal("the launch was refused, or a graph is captured")
        return self._replace(invariance=invariance, by_torch=by_torch)

    @property
    def fused(self) -> Request:
        """The request with the fusion as part of the problem; without a problem if no kernel has the fusion."""
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
    """The properties of a tensor on which a plan depends.

    - ``strides`` are in elements; ``aligned``: whether the address is a multiple of 16 bytes.
    - ``device``: as in a ``Request``.
    - ``element``: the name of its type in a problem; None if there are no kernels for the type or the device, for the
      reason ``obstacle``.
    """

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
    """The tensor itself if it is aligned and in rows, else a contiguous copy in ``memory``.

    Kernels read either in place if the length of rows allows it, so the choice of a kernel does not depend on the
    tensor's strides.
    """
    try:
        in_place = a.data_ptr() % VECTOR_BYTES == 0
        if not a.is_contiguous():
            vectors = a.ndim == 2 and a.stride(0) * a.element_size() % VECTOR_BYTES == 0
            in_place = in_place and vectors and a.stride(1) == 1 and a.stride(0) >= a.shape[1]
        return a if in_place or a.is_meta else memory(a).copy_(a)
    except (RuntimeError, AttributeError):  # no strides or no memory; or no tensor
        return a


def matrix(tensor: TensorFacts, rows: int, cols: int, strides: MatrixStrides, step: int = 0) -> MaybeMatrix:
    """A tensor's first matrix, row-major; None if its rows are not contiguous.

    ``step``: the number of elements to the next matrix. The matrix counts as aligned only if the next ones are too.
    """
    if cols > 1 and strides.cols != 1:
        return None
    # A single row has no leading dimension, so it gets one that kernels accept.
    ld = strides.rows if rows > 1 else aligned(cols, VECTOR_BYTES // tensor.element_bytes)
    if ld < cols:
        return None
    return Matrix(ld, tensor.aligned and step * tensor.element_bytes % VECTOR_BYTES == 0)


class StoredOperand(NamedTuple):
    """An operand as a layout stores it: row-major, or ``transposed``. ``matrix`` is None if neither it nor its
    transpose has contiguous rows."""

    transposed: bool
    matrix: MaybeMatrix


def stored_operand(tensor: TensorFacts, rows: int, cols: int, strides: MatrixStrides, step: int = 0) -> StoredOperand:
    """A (m,k) or B (k,n) with these strides as a layout stores it."""
    direct = matrix(tensor, rows, cols, strides, step)
    # A single row or column can be taken either way. The one whose rows start at multiples of 16 bytes needs no copy.
    if direct is None or direct.ld * tensor.element_bytes % VECTOR_BYTES:
        transposed = strides._replace(rows=strides.cols, cols=strides.rows)
        if as_transposed := matrix(tensor, cols, rows, transposed, step):
            return StoredOperand(True, as_transposed)
    return StoredOperand(False, direct)


def layout_of(a: StoredOperand, b: StoredOperand) -> Layout:
    """The layout of operands that are stored in this way."""
    return AlongK(not a.transposed, b.transposed).layout


class MatrixProblem(NamedTuple):
    """A problem with its operands as matrices. ``problem`` is without its GPU, or None for the reason ``obstacle``."""

    problem: Problem | None
    obstacle: str
    operands: LaunchOperands


def matrix_problem(
    kind: Kind, sizes: Sizes, matrices: tuple[MaybeMatrix, MaybeMatrix, MaybeMatrix], **features: str
) -> MatrixProblem:  # fmt: skip
    """The problem on the matrices A, B and D. ``features``: further fields of the problem."""
    problem, obstacle = problem_of(kind, sizes, **features)
    if problem is not None and None in matrices:
        strange = [name for name, found in zip("ABD", matrices, strict=True) if found is None]
        problem, obstacle = None, f"strides of {' and '.join(strange)} that no layout serves"
    (a, b, d), packed = matrices, LaunchOperands.packed(kind[-1], sizes)
    return MatrixProblem(problem, obstacle, LaunchOperands(a or packed.a, b or packed.b, d or packed.d))


def problem_of(kind: Kind, sizes: Sizes, **features: str) -> tuple[Problem | None, str]:
    """The problem without its GPU, and ""; or None, and the reason. ``features``: further fields of the problem."""
    from pydantic import ValidationError

    try:
        ab, d, acc, layout = kind
        fields = {"gpu": "", "ab": ab, "d": d, "acc": acc, "layout": layout, **sizes._asdict(), **features}
        return Problem.model_validate(fields), ""
    except ValidationError:
        return None, "an extent is 0" if 0 in sizes else "an extent is too large"


# --- the requests of each operator, after the checks of its operands ---


def request_matmul(
    a: torch.Tensor, b: torch.Tensor, acc: Acc, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Request:
    """The request of ``torch.matmul(a, b)``: a batch of products, or one product if all rows of A share B."""
    request = product(facts(a), facts(b), acc, None if out is None else facts(out), out_dtype)
    return request if out is None else request._replace(has_out=True)


def product(
    a: TensorFacts, b: TensorFacts, acc: Acc, out: TensorFacts | None, out_dtype: torch.dtype | None
) -> Request:  # fmt: skip
    """``request_matmul`` for tensors that are given by their facts."""
    shape, sizes = result_shape(a.shape, b.shape), plan_batches.sizes_of(a.shape, b.shape)
    batch = plan_batches.broadcast(a.shape[:-2], b.shape[:-2])
    a_strides = plan_batches.matrix_strides(a.shape, a.strides, batch)
    b_strides = plan_batches.matrix_strides(b.shape, b.strides, batch, column=True)
    d_strides = _strides_of_d(None if out is None else out.strides, batch, sizes, (len(a.shape) > 1, len(b.shape) > 1))
    # ``extents``: those of one product of the launch, which is all of the batch if it can be folded into rows of A.
    extents, spacing, obstacle = sizes, Batches(), ""
    if 0 in batch:
        extents = sizes._replace(m=0)
    elif batch and (folded := _folded(a_strides, b_strides, d_strides, batch, sizes)) is not None:
        extents, a_strides, d_strides = folded
    elif batch:
        strided, obstacle = plan_batches.strided_batch(batch, a_strides, b_strides, d_strides)
        spacing = strided or spacing
    if out is not None and not plan_batches.are_distinct(out.shape, out.strides):
        obstacle = "elements of out that may lie in one place"
    as_a = stored_operand(a, extents.m, extents.k, a_strides, spacing.a)
    as_b = stored_operand(b, extents.k, extents.n, b_strides, spacing.b)
    layout, d_type = layout_of(as_a, as_b), output_name(a.dtype, out_dtype)
    by_torch = torch_matmul if d_type == "same" else partial(torch_matmul, out_dtype=out_dtype)
    stated = MatrixProblem(None, a.obstacle or obstacle, LaunchOperands.packed(layout, extents))
    if a.element is not None and not obstacle:
        as_d = Matrix(extents.n) if out is None else matrix(out, extents.m, extents.n, d_strides, spacing.d)
        features = {"batch": "strided"} if spacing.products != 1 else {}
        matrices = as_a.matrix, as_b.matrix, as_d
        stated = matrix_problem((a.element, d_type, acc, layout), extents, matrices, **features)
    return Request(stated.problem, stated.obstacle, extents, stated.operands, shape, a.device, by_torch, spacing)


def _strides_of_d(
    out: tuple[int, ...] | None, batch: Sequence[int], sizes: Sizes, matrices: tuple[bool, bool]
) -> MatrixStrides:  # fmt: skip
    """The strides of D, which is contiguous if there is no ``out`` (the strides of that tensor). ``matrices``: whether
    A and B have two dimensions or more; vectors have no row or column in D."""
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
    """A batch as one product: its extents and the strides of A and D. None if the products do not share B, or if the
    rows of A or of D are not evenly spaced."""
    as_a, as_d = plan_batches.fold(a, b, batch, sizes), plan_batches.fold(d, b, batch, sizes)
    return None if as_a is None or as_d is None else (*as_a, as_d[1])


def request_linear(x: torch.Tensor, weight: torch.Tensor, biased: bool) -> Request:
    """The request of a linear layer with x (..., K) and weight (N,K), in the layout that fits their strides."""
    x_facts, weight_facts = facts(x), facts(weight)
    k, n = x_facts.shape[-1], weight_facts.shape[0]
    sizes = Sizes(x.numel() // k if k else 0, n, k)
    as_x = StoredOperand(False, None)
    if sizes.m:
        # ``view`` raises RuntimeError if the batch dimensions cannot be merged into the rows of one matrix.
        with suppress(RuntimeError):
            rows, cols = x.view(sizes.m, k).stride()
            as_x = stored_operand(x_facts, sizes.m, k, MatrixStrides(rows, cols))
    as_weight = stored_operand(weight_facts, k, n, MatrixStrides(weight_facts.strides[1], weight_facts.strides[0]))
    layout = layout_of(as_x, as_weight)
    stated = MatrixProblem(None, x_facts.obstacle, LaunchOperands.packed(layout, sizes))
    if x_facts.element is not None:
        matrices = as_x.matrix, as_weight.matrix, Matrix(n)
        stated = matrix_problem((x_facts.element, "same", "f32", layout), sizes, matrices)
    shape = (*x_facts.shape[:-1], n)
    request = Request(stated.problem, stated.obstacle, sizes, stated.operands, shape, x_facts.device, torch_linear)
    return request._replace(fusion=BIASED, finish=add) if biased else request


def linear_of_rows(m: int, n: int, k: int, element: ElementName, device: int, biased: bool) -> Request:
    """``request_linear`` for a packed x of m rows and a packed weight, without tensors."""
    sizes, matrices = Sizes(m, n, k), (Matrix(k), Matrix(k), Matrix(n))
    stated = matrix_problem((element, "same", "f32", "tn"), sizes, matrices)
    request = Request(stated.problem, stated.obstacle, sizes, stated.operands, (m, n), device, torch_linear)
    return request._replace(fusion=BIASED, finish=add) if biased else request


def request_grouped(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None, out_dtype: torch.dtype | None
) -> Request:
    """The request of a grouped product; without ``offs`` it is a batch."""
    shape, by_torch = grouped_shape(a, b, offs), partial(torch_grouped, out_dtype=out_dtype)
    if offs is None:
        return request_matmul(a, b, "f32", None, out_dtype)._replace(by_torch=by_torch)
    a_facts, b_facts, groups = facts(a), facts(b), len(offs)
    sizes, spacing = Sizes(a_facts.shape[-2], b_facts.shape[-1], a_facts.shape[-1]), Batches()
    stated = MatrixProblem(None, "groups of columns or of k", LaunchOperands.packed("nn", sizes))
    if a_facts.element is None:
        stated = stated._replace(obstacle=a_facts.obstacle)
    elif not groups:
        stated = stated._replace(obstacle="an extent is 0")
    elif (a.ndim, b.ndim) == (2, 3):
        spacing = Batches(groups, b=b_facts.strides[0])
        as_b = stored_operand(
            b_facts, sizes.k, sizes.n, MatrixStrides(b_facts.strides[1], b_facts.strides[2]), spacing.b
        )
        # Groups are rows of A, so A cannot be transposed.
        as_a = StoredOperand(
            False, matrix(a_facts, sizes.m, sizes.k, MatrixStrides(a_facts.strides[0], a_facts.strides[1]))
        )
        kind: Kind = (a_facts.element, output_name(a_facts.dtype, out_dtype), "f32", layout_of(as_a, as_b))
        stated = matrix_problem(kind, sizes, (as_a.matrix, as_b.matrix, Matrix(sizes.n)), batch="grouped")
    return Request(stated.problem, stated.obstacle, sizes, stated.operands, shape, a_facts.device, by_torch, spacing)


def add(d: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Adds a bias along n to D in place."""
    return d if bias is None else d.add_(bias)


def request_fused(
    x: torch.Tensor, weight: torch.Tensor, biased: bool, epilogue: Epilogue, by_torch: Run | None = None
) -> Request:
    """The request of a linear layer with an epilogue. ``by_torch``: torch's computation, by default ``torch_fused``."""
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
    """The part of a plan's key that comes from a tensor. Raises RuntimeError or AttributeError for a value without
    strides or memory."""
    if tensor is None:
        return ()
    return tensor.shape, tensor.stride(), tensor.data_ptr() & 15, tensor.device, tensor.dtype


def span(tensor: torch.Tensor) -> int:
    """The number of bytes from the beginning of a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    reach = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.element_size()) * (int(reach) + 1)


def are_disjoint(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors in one storage surely have no byte in common, such as different columns of the same rows."""
    # Taken modulo a pitch (a stride of either tensor), a tensor's bytes lie within a window, whose width follows from
    # the strides that are no multiples of the pitch. The tensors are disjoint if their windows are.
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
