"""Which product a caller's tensors ask for: checks, tensors as row-major matrices of a layout, and torch's own product.

Shapes and strides only; nothing here reads a tensor's elements but the products by torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, get_args

from cudal2gen.element import F32, ElementName, OutputName, dtypes, element_or_none, name_of
from cudal2gen.kernel import VECTOR, Acc, Layout, Problem, aligned
from cudal2gen.kernel.launch import Matrix, Operands, Sizes

if TYPE_CHECKING:
    import torch

Run = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor | None"], "torch.Tensor"]
MaybeMatrix = Matrix | None  # None: no layout serves the strides
Kind = tuple[ElementName, OutputName, Acc, Layout]  # as a problem's


class Request(NamedTuple):
    """A product as a caller has it.

    ``problem``: its GPU to be filled in; None where no kernel can compute it, and ``obstacle`` says why. ``operands``:
    the tensors as matrices, B as the layout stores it. ``shape``: of the result. ``device``: the CUDA device's index,
    -1 for the CPU. ``biased``: whether the caller adds a bias to D. ``by_torch``: torch's own product.
    """

    problem: Problem | None
    obstacle: str
    sizes: Sizes
    operands: Operands
    shape: tuple[int, ...]
    device: int
    biased: bool
    by_torch: Run


# --- checks, also of tensors without data ---


def check_matmul(a: torch.Tensor, b: torch.Tensor, acc: str, out_dtype: torch.dtype | None = None) -> None:
    """Raises TypeError or ValueError for what is no product of two matrices of one element on one device."""
    if acc not in get_args(Acc):
        raise ValueError(f"acc={acc!r}: must be f32 or f16")
    _check_types(a=a, b=b)
    if out_dtype is not None and out_dtype not in (a.dtype, F32.torch_dtype):
        raise TypeError(f"out_dtype: expected {a.dtype} or {F32.torch_dtype}, got {out_dtype}")
    if not Problem.exists(_name(a.dtype), _output(a, out_dtype), acc):
        raise ValueError(f"acc={acc!r}: must be f32 for {out_dtype or a.dtype}")
    if a.ndim != 2 or b.ndim != 2:
        raise ValueError(f"a and b must be matrices, got shapes {tuple(a.shape)} and {tuple(b.shape)}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} do not fit: K is {a.shape[1]} and {b.shape[0]}")


def check_out(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, out_dtype: torch.dtype | None = None) -> None:
    """Raises TypeError or ValueError for what is no matrix that the product can be written to."""
    import torch

    if out.dtype != (out_dtype or a.dtype):
        raise TypeError(f"out: expected {out_dtype or a.dtype}, got {out.dtype}")
    _check_places(a=a, out=out)
    if tuple(out.shape) != (a.shape[0], b.shape[1]):
        raise ValueError(f"out: expected the shape {(a.shape[0], b.shape[1])}, got {tuple(out.shape)}")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (a, b, out)):
        raise ValueError("out: is not differentiable; use the result, or torch.no_grad()")


def check_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises TypeError or ValueError for what is no linear layer of one element on one device."""
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


def _check_types(**tensors: torch.Tensor) -> None:
    """All of the first one's element, and in places that a product takes."""
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if element_or_none(tensor.dtype) is None or tensor.dtype != first.dtype:
            expected = first.dtype if element_or_none(first.dtype) and tensor is not first else dtypes(tensor)
            raise TypeError(f"{name}: expected {expected}, got {tensor.dtype}")
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


def _output(a: torch.Tensor, out_dtype: torch.dtype | None) -> OutputName:
    return "same" if out_dtype in (None, a.dtype) else "f32"


def request_matmul(
    a: torch.Tensor, b: torch.Tensor, acc: Acc, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Request:
    """The product of a (M,K) and b (K,N), checked before, in the layout that serves b's strides."""
    (m, k), n = a.shape, b.shape[1]
    layout: Layout = "nn"
    as_a, as_b = matrix(a, m, k, *a.stride()), matrix(b, k, n, *b.stride())
    # A single row or column may be either; rows that start on 16 bytes need no copy.
    if (as_b is None or as_b.ld % VECTOR) and (as_tn := matrix(b, n, k, b.stride(1), b.stride(0))):
        layout, as_b = "tn", as_tn
    as_d = Matrix(n) if out is None else matrix(out, m, n, *out.stride())
    ab, d = _name(a.dtype), _output(a, out_dtype)
    problem, obstacle, operands = _posed((ab, d, acc, layout), Sizes(m, n, k), (as_a, as_b, as_d))
    by_torch = torch_matmul if d == "same" else partial(torch_matmul, out_dtype=out_dtype)
    return Request(problem, obstacle, Sizes(m, n, k), operands, (m, n), a.get_device(), False, by_torch)


def request_linear(x: torch.Tensor, weight: torch.Tensor, biased: bool) -> Request:
    """The product of x (..., K) and weight (N,K), checked before."""
    k, n = x.shape[-1], weight.shape[0]
    sizes = Sizes(x.numel() // k if k else 0, n, k)
    as_x = None
    if sizes.m:
        # Batch dimensions that are no rows of one matrix have no view as such.
        with suppress(RuntimeError):
            flat = x.view(sizes.m, k)
            as_x = matrix(flat, sizes.m, k, *flat.stride())
    matrices = (as_x, matrix(weight, n, k, *weight.stride()), Matrix(n))
    problem, obstacle, operands = _posed((_name(x.dtype), "same", "f32", "tn"), sizes, matrices)
    shape = (*x.shape[:-1], n)
    return Request(problem, obstacle, sizes, operands, shape, x.get_device(), biased, torch_linear)


def _posed(
    kind: Kind, sizes: Sizes, matrices: tuple[MaybeMatrix, MaybeMatrix, MaybeMatrix]
) -> tuple[Problem | None, str, Operands]:
    """The problem and its operands; or None, and why no kernel can compute it."""
    problem, obstacle = problem_of(kind, sizes)
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
    ld = row_stride if rows > 1 else aligned(cols)
    return Matrix(ld, tensor.data_ptr() % 16 == 0) if ld >= cols else None


def problem_of(kind: Kind, sizes: Sizes) -> tuple[Problem | None, str]:
    """The problem, its GPU to be filled in; or None, and why there is none."""
    from pydantic import ValidationError

    try:
        ab, d, acc, layout = kind
        return Problem(gpu="", ab=ab, d=d, acc=acc, layout=layout, **sizes._asdict()), ""
    except ValidationError:
        return None, "an extent is 0" if 0 in sizes else "an extent is too large"


def span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first to its last element."""
    if not tensor.numel():
        return 0
    reach = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.element_size()) * (int(reach) + 1)


# --- torch's own product ---


def torch_matmul(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """a (M,K) times b (K,N) by torch, with fp32 sums on the CPU too. ``out_dtype``: where it is not theirs."""
    import torch

    if a.device.type == "cuda":
        typed = {} if out_dtype is None else {"out_dtype": out_dtype}
        return torch.mm(a, b, **typed) if out is None else torch.mm(a, b, **typed, out=out)
    # The CPU's own product of 16-bit elements need not sum in fp32.
    product = torch.mm(a.float(), b.float())
    return product.to(out_dtype or a.dtype) if out is None else out.copy_(product)


def torch_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (..., K) times weight (N,K) transposed, plus bias, by torch, with fp32 sums on the CPU too."""
    import torch

    if x.device.type == "cuda":
        return torch.nn.functional.linear(x, weight, bias).contiguous()
    wide = None if bias is None else bias.float()
    return torch.nn.functional.linear(x.float(), weight.float(), wide).to(x.dtype).contiguous()
