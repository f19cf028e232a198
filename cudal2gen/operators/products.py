"""Requests for products: checks of a caller's tensors, which become row-major matrices of a layout.

Shapes and strides only; nothing here reads a tensor's elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from cudal2gen.kernel import Acc, IllegalRecord, Layout, Problem, aligned
from cudal2gen.kernel.fusion import GATE_COLS, PLAIN, Activation, Fusion
from cudal2gen.kernel.launch import Batches, Matrix, Operands, Sizes
from cudal2gen.operators import batches, epilogues
from cudal2gen.operators.batches import Stack, result_shape
from cudal2gen.operators.torch_products import torch_fused, torch_grouped, torch_linear, torch_matmul
from cudal2gen.operators.watching import check_tensors
from kernelproof.ground.element import F32, VECTOR_BYTES, ElementName, OutputName, dtypes, element_or_none, name_of

if TYPE_CHECKING:
    import torch

# (A, B, third) -> D, or D and Z if the fusion has ``aux``; third: out, bias, offsets, or the second B of a pair.
Run = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor | None"], Any]
Finish = Callable[["torch.Tensor", "torch.Tensor | None"], Any]
MaybeMatrix = Matrix | None  # None: no layout serves the strides
Kind = tuple[ElementName, OutputName, Acc, Layout]  # as a problem's
Posed = tuple[Problem | None, str, Operands]


class Epilogue(NamedTuple):
    """What is applied to the sums; ``aux``: whether the sums with bias are wanted as well."""

    activation: Activation
    gate: bool
    aux: bool


class Request(NamedTuple):
    """A product as a caller has it.

    ``problem``: its GPU to be filled in; None where no kernel can compute it, and ``obstacle`` says why. ``operands``:
    the tensors as matrices, B as the layout stores it. ``shape``: of the result. ``device``: the CUDA device's index,
    -1 for the CPU, -2 for others. ``by_torch``: torch's own product, whole. ``batches``: the products of a batch, each
    of ``sizes``. ``fusion``: what a kernel may apply to the sums; ``finish``: the same by torch, of a plain kernel's D
    and the bias. ``pair``: whether the caller has the weights of a gate apart, of which B is the interleaved copy.
    """

    problem: Problem | None
    obstacle: str
    sizes: Sizes
    operands: Operands
    shape: tuple[int, ...]
    device: int
    by_torch: Run
    batches: Batches = Batches()
    fusion: Fusion = PLAIN
    finish: Finish | None = None
    pair: bool = False

    @property
    def fused(self) -> Request:
        """The same with the fusion in the problem; without one where there is no such kernel."""
        if self.problem is None:
            return self
        shape = (*self.shape[:-1], self.fusion.d_cols(self.sizes.n))
        operands = self.operands._replace(d=Matrix(shape[-1]))
        try:
            problem = self.problem.revised(fusion=self.fusion)
        except IllegalRecord as error:
            return self._replace(problem=None, obstacle=str(error))
        return self._replace(problem=problem, shape=shape, operands=operands, finish=None)


# --- checks, also of tensors without data ---


def check_matmul(a: torch.Tensor, b: torch.Tensor, acc: str, out_dtype: torch.dtype | None = None) -> None:
    """Checks A, B and acc. Raises TypeError for types, ValueError for shapes and devices that do not fit."""
    if acc not in get_args(Acc):
        raise ValueError(f"acc={acc!r}: must be f32 or f16")
    _check_types(a=a, b=b)
    name = name_of(a.dtype)
    if name is None and (acc, out_dtype) not in (("f32", None), ("f32", a.dtype)):
        raise TypeError(f"a: expected {dtypes(a)} with acc or out_dtype, got {a.dtype}")
    if name is not None and out_dtype is not None and out_dtype not in (a.dtype, F32.torch_dtype):
        raise TypeError(f"out_dtype: expected {a.dtype} or {F32.torch_dtype}, got {out_dtype}")
    if name is not None and not Problem.exists(name, _output(a, out_dtype), acc):
        raise ValueError(f"acc={acc!r}: must be f32 for {out_dtype or a.dtype}")
    result_shape(a, b)


def check_out(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, out_dtype: torch.dtype | None = None) -> None:
    """Checks ``out``. Raises TypeError for another type, ValueError for a shape, strides or memory that do not fit."""
    import torch

    if out.dtype != (out_dtype or a.dtype):
        raise TypeError(f"out: expected {out_dtype or a.dtype}, got {out.dtype}")
    _check_places(a=a, out=out)
    if tuple(out.shape) != (shape := result_shape(a, b)):
        raise ValueError(f"out: expected the shape {shape}, got {tuple(out.shape)}")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (a, b, out)):
        raise ValueError("out: is not differentiable; use the result, or torch.no_grad()")


def check_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Checks a linear layer's operands. Raises TypeError for types, ValueError for shapes and devices."""
    _check_types(x=x, weight=weight, **({} if bias is None else {"bias": bias}))
    if weight.ndim != 2 or x.ndim < 1:
        raise ValueError(
            f"weight must be a matrix and x have a dimension, got {tuple(weight.shape)} and {tuple(x.shape)}"
        )
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit: K is {x.shape[-1]} and {weight.shape[1]}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias: expected the shape {(weight.shape[0],)}, got {tuple(bias.shape)}")


def check_fused(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, gate: bool) -> None:
    """Checks a fused linear layer. Raises ValueError for an unknown activation, else as ``check_linear``."""
    if activation not in epilogues.NAMES:
        raise ValueError(f"activation={activation!r}: must be None or one of {', '.join(epilogues.NAMES)}")
    check_tensors(**{"x": x, "w13" if gate else "weight": weight})
    check_linear(x, weight, bias)
    if gate and weight.shape[0] % GATE_COLS:
        raise ValueError(f"w13: expected rows in blocks of {GATE_COLS}, got the shape {tuple(weight.shape)}")


def check_gated_pair(x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, activation: str) -> None:
    """Checks a gated layer, whose two weights have one shape and type. Raises as ``check_linear``."""
    epilogues.check_pair(w1, w3)
    check_fused(x, w1, None, activation, gate=False)
    _check_types(x=x, w3=w3)


def check_grouped(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None, bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> None:  # fmt: skip
    """Checks a grouped product. Raises TypeError for types, ValueError for shapes and devices that do not fit."""
    import torch

    _check_types(mat_a=a, mat_b=b, **({} if bias is None else {"bias": bias}))
    if out_dtype not in (None, a.dtype) and (name_of(a.dtype) is None or out_dtype != F32.torch_dtype):
        raise TypeError(f"out_dtype: expected {a.dtype} or {F32.torch_dtype}, got {out_dtype}")
    shapes = f"mat_a {tuple(a.shape)} and mat_b {tuple(b.shape)}"
    if a.ndim not in (2, 3) or b.ndim not in (2, 3) or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"{shapes} do not fit: each must have 2 or 3 dimensions, and both one K")
    if (offs is None) != (a.ndim == b.ndim == 3):
        raise ValueError(
            f"offs: {shapes} need offsets of groups" if offs is None else f"offs: must be None for {shapes}"
        )
    groups = {len(tensor) for tensor in (a, b) if tensor.ndim == 3}
    if offs is not None:
        check_tensors(offs=offs)
        _check_places(mat_a=a, offs=offs)
        if offs.ndim != 1 or offs.dtype != torch.int32:
            raise TypeError(f"offs: expected int32 of one dimension, got {offs.dtype} {tuple(offs.shape)}")
        groups.add(len(offs))
    if len(groups) > 1:
        raise ValueError(f"{shapes} do not fit: numbers of groups differ, {' and '.join(map(str, sorted(groups)))}")
    if bias is not None and _broadcast(bias.shape, (shape := grouped_shape(a, b, offs))) != shape:
        raise ValueError(f"bias: {tuple(bias.shape)} cannot be broadcast to {shape}")


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The common shape; empty where shapes cannot be broadcast."""
    import torch

    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        return ()


def grouped_shape(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> tuple[int, ...]:
    """The shape of a grouped product's result."""
    alone = a.ndim == b.ndim
    groups = () if not alone else (a.shape[0],) if offs is None else (offs.shape[0],)
    return (*groups, a.shape[-2], b.shape[-1])


def _check_types(**tensors: torch.Tensor) -> None:
    """All tensors of one type, which torch computes where it is no element's, and in places that a product takes."""
    check_tensors(**tensors)
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if tensor.dtype != first.dtype:
            expected = first.dtype if element_or_none(first.dtype) else dtypes(first)
            odd = (name, tensor) if element_or_none(first.dtype) else (next(iter(tensors)), first)
            raise TypeError(f"{odd[0]}: expected {expected}, got {odd[1].dtype}")
    _check_places(**tensors)


def _check_places(**tensors: torch.Tensor) -> None:
    import torch

    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise TypeError(f"{name}: expected a strided tensor, got {tensor.layout}")
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        raise ValueError(f"{' and '.join(tensors)} are on different devices: {', '.join(sorted(map(str, devices)))}")


# --- tensors as matrices ---


def _name(dtype: torch.dtype) -> ElementName:
    """The name of an element's type, checked before."""
    name = name_of(dtype)
    assert name is not None
    return name


def _place(tensor: torch.Tensor) -> int:
    """A request's ``device``."""
    return tensor.get_device() if tensor.is_cuda else -1 if tensor.is_cpu else -2


def _unserved(tensor: torch.Tensor) -> str:
    """Why there are no kernels for tensors of this type or on this device; "" where there may be."""
    if not (tensor.is_cuda or tensor.is_cpu):
        return f"no kernels on {tensor.device.type}"
    return "" if name_of(tensor.dtype) is not None else f"no kernels of {tensor.dtype}"


def _output(a: torch.Tensor, out_dtype: torch.dtype | None) -> OutputName:
    return "same" if out_dtype in (None, a.dtype) else "f32"


def request_matmul(
    a: torch.Tensor, b: torch.Tensor, acc: Acc, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Request:
    """``torch.matmul(a, b)``, checked before: one product, also of all rows of A with a B that they share, or a batch.

    The layout is what serves b's strides.
    """
    import torch

    shape, sizes, d_type = result_shape(a, b), batches.sizes_of(a, b), _output(a, out_dtype)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    of_a, of_b = batches.stack(a, batch), batches.stack(b, batch, column=True)
    of_d = _stack_of_d(out, batch, sizes, (a.ndim > 1, b.ndim > 1))
    extents, spacing, obstacle = sizes, Batches(), ""
    if 0 in batch:
        extents = sizes._replace(m=0)
    elif batch and (as_rows := _as_rows(of_a, of_b, of_d, batch, sizes)) is not None:
        extents, of_a, of_d = as_rows
    elif batch:
        even, obstacle = batches.spaced(batch, of_a, of_b, of_d)
        spacing = even or spacing
    as_a = _placed(a, extents.m, extents.k, of_a, spacing.a)
    layout, as_b = _laid_out(b, extents, of_b, spacing.b)
    as_d = Matrix(extents.n) if out is None else _placed(out, extents.m, extents.n, of_d, spacing.d)
    by_torch = torch_matmul if d_type == "same" else partial(torch_matmul, out_dtype=out_dtype)
    obstacle = _unserved(a) or obstacle
    posed: Posed = None, obstacle, Operands.packed(layout, extents.n, extents.k)
    if not obstacle:
        features = {"batch": "strided"} if spacing.products != 1 else {}
        posed = _posed((_name(a.dtype), d_type, acc, layout), extents, (as_a, as_b, as_d), **features)
    return Request(posed[0], posed[1], extents, posed[2], shape, _place(a), by_torch, spacing)


def _stack_of_d(out: torch.Tensor | None, batch: Sequence[int], sizes: Sizes, matrix: tuple[bool, bool]) -> Stack:
    """The result's matrices, or contiguous ones. ``matrix``: whether A and B are more than vectors."""
    whole = (*batch, sizes.m, sizes.n)
    if out is None:
        strides = [math.prod(whole[place + 1 :]) for place in range(len(whole))]
        return Stack(strides[-2], 1, tuple(strides[:-2]))
    strides = list(out.stride())
    if not matrix[1]:
        strides.append(1)
    if not matrix[0]:
        strides.insert(len(strides) - 1, sizes.n)
    return Stack(strides[-2], strides[-1], tuple(strides[:-2]))


def _as_rows(a: Stack, b: Stack, d: Stack, batch: Sequence[int], sizes: Sizes) -> tuple[Sizes, Stack, Stack] | None:
    """A batch as one product: its sizes, A and D; None where B differs, or rows of A or D are no matrix's."""
    as_a, as_d = batches.folded(a, b, batch, sizes), batches.folded(d, b, batch, sizes)
    return None if as_a is None or as_d is None else (*as_a, as_d[1])


def _laid_out(b: torch.Tensor, sizes: Sizes, lies: Stack, step: int) -> tuple[Layout, MaybeMatrix]:
    """B's layout, and B as it stores it."""
    as_nn = _placed(b, sizes.k, sizes.n, lies, step)
    # A single row or column may be either; rows that start on 16 bytes need no copy.
    turned = lies._replace(rows=lies.cols, cols=lies.rows)
    apart = as_nn is None or as_nn.ld * b.element_size() % VECTOR_BYTES
    if apart and (as_tn := _placed(b, sizes.n, sizes.k, turned, step)):
        return "tn", as_tn
    return "nn", as_nn


def _placed(tensor: torch.Tensor, rows: int, cols: int, lies: Stack, step: int) -> MaybeMatrix:
    """A tensor's first matrix; in vectors only where all later ones are."""
    first = matrix(tensor, rows, cols, lies.rows, lies.cols)
    return first and first._replace(aligned=first.aligned and step * tensor.element_size() % 16 == 0)


def request_linear(x: torch.Tensor, weight: torch.Tensor, biased: bool) -> Request:
    """The product of x (..., K) and weight (N,K), checked before, in the layout that serves weight's strides."""
    k, n = x.shape[-1], weight.shape[0]
    sizes = Sizes(x.numel() // k if k else 0, n, k)
    as_x = None
    if sizes.m:
        # Batch dimensions that are no rows of one matrix have no view as such.
        with suppress(RuntimeError):
            flat = x.view(sizes.m, k)
            as_x = matrix(flat, sizes.m, k, *flat.stride())
    layout, as_weight = _laid_out(weight, sizes, Stack(weight.stride(1), weight.stride(0), ()), 0)
    matrices = (as_x, as_weight, Matrix(n))
    posed: Posed = None, _unserved(x), Operands.packed(layout, n, k)
    if not posed[1]:
        posed = _posed((_name(x.dtype), "same", "f32", layout), sizes, matrices)
    shape = (*x.shape[:-1], n)
    request = Request(posed[0], posed[1], sizes, posed[2], shape, _place(x), torch_linear)
    return request._replace(fusion=Fusion(bias="n"), finish=add) if biased else request


def request_grouped(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None, out_dtype: torch.dtype | None
) -> Request:
    """A grouped product, checked before; a batch where all groups are of one size."""
    shape, by_torch = grouped_shape(a, b, offs), partial(torch_grouped, out_dtype=out_dtype)
    if offs is None:
        return request_matmul(a, b, "f32", None, out_dtype)._replace(by_torch=by_torch)
    sizes, groups = Sizes(a.shape[-2], b.shape[-1], a.shape[-1]), len(offs)
    problem, obstacle, operands = None, "groups of columns or of k", Operands.packed("nn", sizes.n, sizes.k)
    spacing = Batches()
    if unserved := _unserved(a):
        obstacle = unserved
    elif not groups:
        obstacle = "an extent is 0"
    elif (a.ndim, b.ndim) == (2, 3):
        spacing = Batches(groups, b=b.stride(0))
        layout, as_b = _laid_out(b, sizes, Stack(b.stride(1), b.stride(2), ()), spacing.b)
        kind: Kind = (_name(a.dtype), _output(a, out_dtype), "f32", layout)
        as_a = matrix(a, sizes.m, sizes.k, *a.stride())
        problem, obstacle, operands = _posed(kind, sizes, (as_a, as_b, Matrix(sizes.n)), batch="grouped")
    return Request(problem, obstacle, sizes, operands, shape, _place(a), by_torch, spacing)


def add(d: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """D with a bias along n."""
    return d if bias is None else d.add_(bias)


def request_fused(
    x: torch.Tensor, weight: torch.Tensor, biased: bool, epilogue: Epilogue, by_torch: Run | None = None
) -> Request:
    """The product of x (..., K) and weight (N,K) with an epilogue, checked before. ``by_torch``: where it is not
    ``torch_fused``."""
    activation, gate, aux = epilogue
    fusion = Fusion(bias="n" if biased else "none", aux=aux, activation=activation, gate=gate)

    def whole(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        d, z = torch_fused(x, weight, bias, activation, gate)
        return (d, z) if aux else d

    def finish(z: torch.Tensor, bias: torch.Tensor | None) -> Any:
        z = add(z, bias)
        d = epilogues.apply(z, activation, gate)
        return (d, z) if aux else d

    plain = request_linear(x, weight, False)
    return plain._replace(fusion=fusion, finish=finish, by_torch=by_torch or whole)


def _posed(kind: Kind, sizes: Sizes, matrices: tuple[MaybeMatrix, MaybeMatrix, MaybeMatrix], **features: str) -> Posed:
    """The problem and its operands; or None, and why no kernel can compute it. ``features``: further fields."""
    problem, obstacle = problem_of(kind, sizes, **features)
    strange = [name for name, lies in zip("ABD", matrices, strict=True) if lies is None]
    if problem is not None and strange:
        problem, obstacle = None, f"strides of {' and '.join(strange)} that no layout serves"
    packed = Operands.packed(kind[-1], sizes.n, sizes.k)
    a, b, d = (lies or as_packed for lies, as_packed in zip(matrices, packed, strict=True))
    return problem, obstacle, Operands(a, b, d)


def matrix(tensor: torch.Tensor, rows: int, cols: int, row_stride: int, col_stride: int) -> Matrix | None:
    """A tensor as a row-major matrix; None where its rows are not contiguous."""
    if cols > 1 and col_stride != 1:
        return None
    # The only row of a matrix may be as far from the next as a kernel likes.
    ld = row_stride if rows > 1 else aligned(cols, VECTOR_BYTES // tensor.element_size())
    return Matrix(ld, tensor.data_ptr() % 16 == 0) if ld >= cols else None


def problem_of(kind: Kind, sizes: Sizes, **features: str) -> tuple[Problem | None, str]:
    """The problem, its GPU to be filled in; or None, and why there is none. ``features``: further fields."""
    from pydantic import ValidationError

    try:
        ab, d, acc, layout = kind
        fields = {"gpu": "", "ab": ab, "d": d, "acc": acc, "layout": layout, **sizes._asdict(), **features}
        return Problem.model_validate(fields), ""
    except ValidationError:
        return None, "an extent is 0" if 0 in sizes else "an extent is too large"


def lies_of(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    """What a plan may depend on of a tensor."""
    if tensor is None:
        return ()
    return tensor.shape, tensor.stride(), tensor.data_ptr() & 15, tensor.device, tensor.dtype


def span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first to its last element."""
    if not tensor.numel():
        return 0
    reach = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.element_size()) * (int(reach) + 1)
