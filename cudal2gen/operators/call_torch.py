"""Computes products by torch, for calls that no kernel computes.

``torch_*`` compute a plan's calls; on the CPU they sum in fp32. ``public_*`` call torch's public functions only, so
that tensor subclasses can override them. Autocast is off within all of them, because ``casting`` has already cast the
operands, and a given ``out`` fixes the result's type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from cudal2gen.operators import epilogues
from kernelproof.ground.element import element_or_none

if TYPE_CHECKING:
    import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _without_autocast(product: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function ``product``, with autocast off while it runs."""

    @wraps(product)
    def run(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        import torch

        if not torch._C._is_any_autocast_enabled():
            return product(*arguments, **options)
        with torch._C._DisableAutocast():  # of all devices
            return product(*arguments, **options)

    return run


def _summed_in_16_bits(tensor: torch.Tensor) -> bool:
    """Whether torch's own product may sum in a narrower type than fp32, as it does for 16-bit elements on the CPU."""
    return element_or_none(tensor.dtype) is not None and tensor.device.type == "cpu" and not tensor.is_nested


@_without_autocast
def torch_matmul(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``torch.matmul(a, b)``, contiguous. ``out_dtype``: the result's type, if it is not that of a and b."""
    import torch

    if _summed_in_16_bits(a):
        product = torch.matmul(a.float(), b.float())
        return product.to(out_dtype or a.dtype).contiguous() if out is None else out.copy_(product)
    if out_dtype in (None, a.dtype):
        return torch.matmul(a, b).contiguous() if out is None else torch.matmul(a, b, out=out)
    product = _in_type(a, b, out_dtype)
    return product if out is None else out.copy_(product)


def _in_type(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    """Multiplies by torch.mm or torch.bmm, which can give a result of another type; torch.matmul cannot. Batch
    dimensions are broadcast and merged into one, and a vector is a matrix of one row or column."""
    import torch

    if a.ndim == b.ndim == 2:
        return torch.mm(a, b, out_dtype=out_dtype)
    rows, cols = a.shape[-2:-1], b.shape[-1:] if b.ndim > 1 else ()  # empty for a vector
    a, b = a if a.ndim > 1 else a[None], b if b.ndim > 1 else b[:, None]
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    wide_a, wide_b = (
        tensor.expand(*batch, *tensor.shape[-2:]).reshape(math.prod(batch), *tensor.shape[-2:]) for tensor in (a, b)
    )
    return torch.bmm(wide_a, wide_b, out_dtype=out_dtype).view(*batch, *rows, *cols)


@_without_autocast
def torch_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns x (..., K) times weight (N,K) transposed, plus bias, contiguous."""
    import torch

    if _summed_in_16_bits(x):
        wide = None if bias is None else bias.float()
        return torch.nn.functional.linear(x.float(), weight.float(), wide).to(x.dtype).contiguous()
    return torch.nn.functional.linear(x, weight, bias).contiguous()


@_without_autocast
def torch_fused(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, gate: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """D and Z (see ``epilogues``) of x (..., K) times weight (N,K) transposed, plus bias; both contiguous."""
    import torch

    # If sums are in fp32, Z stays in fp32 until D is computed from it, so that each is rounded once.
    widened = epilogues.wide if _summed_in_16_bits(x) else _same
    z = torch.nn.functional.linear(widened(x), widened(weight), None if bias is None else widened(bias))
    d = epilogues.apply(z, activation, gate)
    return d.to(x.dtype).contiguous(), z.to(x.dtype).contiguous()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@_without_autocast
def torch_gated(
    x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """D (..., N) and Z (..., 2N) of a gated layer: x (..., K) and two weights (N,K), which are not interleaved."""
    import torch

    widened = epilogues.wide if _summed_in_16_bits(x) else _same
    z1, z3 = (torch.nn.functional.linear(widened(x), widened(weight)) for weight in (w1, w3))
    d = epilogues.activate(epilogues.wide(z1), activation) * epilogues.wide(z3)
    return d.to(x.dtype).contiguous(), epilogues.join_columns(z1, z3).to(x.dtype)


@_without_autocast
def torch_grouped(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The product of ``torch.nn.functional.grouped_mm``, contiguous.

    On a GPU torch's grouped product computes it if it accepts the operands. Otherwise each group is a product of its
    own, and the host waits to read ``offs`` (the end row of each group). Without ``offs`` A and B are batches of
    matrices.
    """
    import torch

    if offs is None:
        return torch_matmul(a, b, None, out_dtype)
    if a.device.type == "cuda" and out_dtype in (None, a.dtype) and _takes_grouped(a) and _takes_grouped(b):
        return torch._grouped_mm(a, b, offs=offs).contiguous()
    d = a.new_zeros((*((len(offs),) if a.ndim == b.ndim else ()), a.shape[-2], b.shape[-1]), dtype=out_dtype or a.dtype)
    if offs.is_meta:
        return d
    # Reading the offsets makes the host wait for the device.
    ends = offs.tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    for number, group in enumerate(groups):
        if a.ndim == b.ndim:
            d[number] = torch_matmul(a[:, group], b[group], None, out_dtype)
        elif a.ndim == 2:
            d[group] = torch_matmul(a[group], b[number], None, out_dtype)
        else:
            d[:, group] = torch_matmul(a[number], b[:, group], None, out_dtype)
    return d


@_without_autocast
def public_matmul(
    a: torch.Tensor, b: torch.Tensor, acc: str = "f32", out_dtype: torch.dtype | None = None  # noqa: ARG001
) -> torch.Tensor:  # fmt: skip
    """``torch.matmul`` by torch's public functions only. ``acc`` has no effect: torch chooses the accumulator. Operands
    are cast to ``out_dtype`` if it differs from their type."""
    import torch

    return torch.matmul(a, b) if out_dtype in (None, a.dtype) else torch.matmul(a.to(out_dtype), b.to(out_dtype))


@_without_autocast
def public_matmul_out(
    a: torch.Tensor, b: torch.Tensor, acc: str = "f32", out_dtype: torch.dtype | None = None, *, out: torch.Tensor
) -> torch.Tensor:
    """``torch.matmul`` into ``out`` by torch's public functions only, with arguments as for ``public_matmul``."""
    import torch

    if out_dtype in (None, a.dtype):
        return torch.matmul(a, b, out=out)
    return out.copy_(public_matmul(a, b, acc, out_dtype))


@_without_autocast
def public_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., K) times weight (N,K) transposed, plus bias (N,), by torch's public functions only."""
    import torch

    return torch.nn.functional.linear(x, weight, bias)


@_without_autocast
def public_fused(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, gate: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """D and Z of a linear layer (``epilogues``) by torch's public functions only."""
    z = public_linear(x, weight, bias)
    return epilogues.apply(z, activation, gate), z


@_without_autocast
def public_gated(x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, activation: str) -> torch.Tensor:
    """D (..., N) of a gated layer of x (..., K) and weights (N,K), by torch's public functions only."""
    return epilogues.activate(public_linear(x, w1), activation) * public_linear(x, w3)


@_without_autocast
def public_grouped(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """A grouped product by torch's public functions only."""
    import torch

    return torch.nn.functional.grouped_mm(a, b, offs=offs, bias=bias, out_dtype=out_dtype)


def _takes_grouped(matrices: torch.Tensor) -> bool:
    """Whether torch's grouped product takes matrices of this type and with these strides: rows or columns must be
    contiguous and start at multiples of 16 bytes."""
    rows, cols = matrices.stride()[-2:]
    row, col = matrices.shape[-2:]
    # ``ld``: the stride between rows, or between columns if they are contiguous; ``extent``: the elements of one.
    ld, extent = (rows, col) if cols == 1 else (cols, row)
    in_vectors = ld * matrices.element_size() % 16 == 0 and matrices.data_ptr() % 16 == 0
    return 1 in (rows, cols) and ld >= max(1, extent) and in_vectors and element_or_none(matrices.dtype) is not None
