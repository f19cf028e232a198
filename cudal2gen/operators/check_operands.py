"""Checks a call's operands: types, shapes and devices.

The checks read no elements, so they also work on fake and meta tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from cudal2gen.kernel import Acc, Problem
from cudal2gen.kernel.fusion import GATE_COLS
from cudal2gen.operators import epilogues, plan_batches
from cudal2gen.operators.check_modes import check_tensors
from kernelproof.ground.element import F32, OutputName, dtypes, element_or_none, name_of

if TYPE_CHECKING:
    import torch


def check_matmul(a: torch.Tensor, b: torch.Tensor, acc: str, out_dtype: torch.dtype | None = None) -> None:
    """Checks the operands of ``matmul``. Raises TypeError for types, ValueError for shapes and devices that do not
    fit."""
    if acc not in get_args(Acc):
        raise ValueError(f"acc={acc!r}: must be f32 or f16")
    _check_types(a=a, b=b)
    name = name_of(a.dtype)
    if name is None and (acc, out_dtype) not in (("f32", None), ("f32", a.dtype)):
        raise TypeError(f"a: expected {dtypes(a)} with acc or out_dtype, got {a.dtype}")
    if name is not None and out_dtype is not None and out_dtype not in (a.dtype, F32.torch_dtype):
        raise TypeError(f"out_dtype: expected {a.dtype} or {F32.torch_dtype}, got {out_dtype}")
    if name is not None and not Problem.exists(name, output_name(a.dtype, out_dtype), acc):
        raise ValueError(f"acc={acc!r}: must be f32 for {out_dtype or a.dtype}")
    result_shape(a.shape, b.shape)


def output_name(dtype: torch.dtype, out_dtype: torch.dtype | None) -> OutputName:
    """The name of D's type in a problem whose A and B have this type."""
    return "same" if out_dtype in (None, dtype) else "f32"


def result_shape(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """The shape of ``torch.matmul(a, b)`` for tensors of these shapes. Raises ValueError if they do not fit."""
    import torch

    if not a or not b:
        raise ValueError(f"a and b must have dimensions, got shapes {tuple(a)} and {tuple(b)}")
    depth = b[-2] if len(b) > 1 else b[0]
    if a[-1] != depth:
        raise ValueError(f"a {tuple(a)} and b {tuple(b)} do not fit: K is {a[-1]} and {depth}")
    matrix = (*a[-2:-1], *(b[-1:] if len(b) > 1 else ()))
    if len(a) <= 2 or len(b) <= 2:  # torch.broadcast_shapes would import sympy, which takes half a second
        return (*a[:-2], *b[:-2], *matrix)
    try:
        return (*torch.broadcast_shapes(tuple(a[:-2]), tuple(b[:-2])), *matrix)
    except RuntimeError:
        raise ValueError(
            f"a {tuple(a)} and b {tuple(b)} do not fit: batch dimensions {tuple(a[:-2])} and {tuple(b[:-2])}"
        ) from None


def check_out(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, out_dtype: torch.dtype | None = None) -> None:
    """Checks ``out``. Raises TypeError for another type than the result's, ValueError for another shape or device, and
    for elements that share memory."""
    if out.dtype != (out_dtype or a.dtype):
        raise TypeError(f"out: expected {out_dtype or a.dtype}, got {out.dtype}")
    _check_devices(a=a, out=out)
    if tuple(out.shape) != (shape := result_shape(a.shape, b.shape)):
        raise ValueError(f"out: expected the shape {shape}, got {tuple(out.shape)}")
    if plan_batches.do_overlap(out.shape, out.stride()):
        raise ValueError(f"out: several elements lie in one place (strides {out.stride()}); clone it")


def check_no_gradient(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Raises ValueError if a call with ``out`` needs a gradient. Plans do not depend on that, so each call checks."""
    import torch

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
    """Checks a fused linear layer. ``gate``: the weight is w13, with the rows of both weights in alternating blocks.

    Raises ValueError for an unknown activation, else as ``check_linear``.
    """
    if activation not in epilogues.ACTIVATION_NAMES:
        raise ValueError(f"activation={activation!r}: must be None or one of {', '.join(epilogues.ACTIVATION_NAMES)}")
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
        _check_devices(mat_a=a, offs=offs)
        if offs.ndim != 1 or offs.dtype != torch.int32:
            raise TypeError(f"offs: expected int32 of one dimension, got {offs.dtype} {tuple(offs.shape)}")
        groups.add(len(offs))
    if len(groups) > 1:
        raise ValueError(f"{shapes} do not fit: numbers of groups differ, {' and '.join(map(str, sorted(groups)))}")
    if bias is not None and _broadcast(bias.shape, (shape := grouped_shape(a, b, offs))) != shape:
        raise ValueError(f"bias: {tuple(bias.shape)} cannot be broadcast to {shape}")


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The common shape; empty if the shapes cannot be broadcast."""
    import torch

    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        return ()


def grouped_shape(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> tuple[int, ...]:
    """The shape of a grouped product's result.

    If both A and B have 3 dimensions, the groups are a batch; if both have 2, k is divided into groups. In both cases
    each group has a D of its own, and the result's first dimension counts the groups. Otherwise the groups are rows or
    columns of one D.
    """
    has_own_d = a.ndim == b.ndim
    groups = () if not has_own_d else (a.shape[0],) if offs is None else (offs.shape[0],)
    return (*groups, a.shape[-2], b.shape[-1])


def _check_types(**tensors: torch.Tensor) -> None:
    """Raises TypeError unless all are strided tensors of the same type, ValueError unless they are on one device.

    Any type is allowed, because torch computes types for which there are no kernels.
    """
    check_tensors(**tensors)
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if tensor.dtype != first.dtype:
            # The message blames the tensor whose type has no kernels: the first if it has such a type, else this one.
            expected = first.dtype if element_or_none(first.dtype) else dtypes(first)
            odd = (name, tensor) if element_or_none(first.dtype) else (next(iter(tensors)), first)
            raise TypeError(f"{odd[0]}: expected {expected}, got {odd[1].dtype}")
    _check_devices(**tensors)


def _check_devices(**tensors: torch.Tensor) -> None:
    """Raises TypeError for a tensor that is not strided, ValueError for tensors on different devices."""
    import torch

    devices = set[torch.device]()
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise TypeError(f"{name}: expected a strided tensor, got {tensor.layout}")
        devices.add(tensor.device)
    if len(devices) > 1:
        raise ValueError(f"{' and '.join(tensors)} are on different devices: {', '.join(sorted(map(str, devices)))}")
