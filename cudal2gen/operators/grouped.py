"""Defines the operator ``grouped_mm``: products of groups of rows, with offsets on the device, for experts' layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from cudal2gen.operators import vmapping
from cudal2gen.operators.call_torch import public_grouped
from cudal2gen.operators.check_modes import TORCH, check_tensors, invariance, lazy, undispatched
from cudal2gen.operators.check_operands import check_grouped, grouped_shape
from cudal2gen.operators.dispatch import current
from cudal2gen.operators.plan_requests import Arguments, in_rows, key_of, request_grouped
from cudal2gen.operators.plans import CallPlan
from cudal2gen.operators.registration import Operator, call, no_script, overload_name, register

if TYPE_CHECKING:
    import torch


@no_script
def grouped_mm(
    mat_a: torch.Tensor, mat_b: torch.Tensor, *, offs: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, batch_invariant: bool = False,
) -> torch.Tensor:  # fmt: skip
    """``torch.nn.functional.grouped_mm``: a product for each group of rows of A. (M,K) and (G,K,N) give (M,N).

    - ``offs`` (G,) is int32, on the device and ascending. It has for each group the index of the row after its last;
      the first group starts at row 0. Rows after the last group are not computed: on the CPU they are zeros, elsewhere
      they may hold anything.
    - ``bias`` is broadcast and added to each group's product.
    - ``out_dtype``: the type of the result, that of A or torch.float32.
    - ``batch_invariant``: as in ``matmul``, for all sizes of groups.

    torch's other forms are supported too: (M,K) and (K,N) with groups of K give (G,M,N); (G,M,K) and (K,N) with groups
    of N give (M,N); (G,M,K) and (G,K,N) without ``offs`` are a batch. On the CPU torch computes, with fp32 sums. If a
    kernel or torch's own grouped product runs, the host does not wait for the device. As with torch's function,
    autocast casts nothing. Raises TypeError or ValueError for operands that do not fit, and as ``matmul``.
    """
    plain = undispatched(mat_a, mat_b, offs) and (bias is None or undispatched(mat_a, bias))
    if plain and not lazy(mat_a, mat_b, offs, bias):
        return _grouped_mm(mat_a, mat_b, offs, bias, out_dtype, batch_invariant)
    check_tensors(mat_a=mat_a, mat_b=mat_b, offs=offs, bias=bias)
    return cast("torch.Tensor", call(overload_name("grouped_mm", batch_invariant), mat_a, mat_b, offs, bias, out_dtype))


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, batch_invariant: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Computes the grouped product by the plan of its operands, and adds the bias."""
    level = invariance(batch_invariant)
    a = in_rows(a, current().memory) if level else a
    d: torch.Tensor = current().call(plan_grouped(a, b, offs, bias, out_dtype, level), a, b, offs)
    return d if bias is None else d.add_(bias)


def plan_grouped(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None, bias: torch.Tensor | None,
    out_dtype: torch.dtype | None, level: int,
) -> CallPlan:  # fmt: skip
    """The plan of a grouped product. Its key has everything that the plan depends on. ``level``: see
    ``invariance``."""
    dispatcher = current()
    try:
        key = ("grouped", level, key_of(a), key_of(b), key_of(offs), key_of(bias), out_dtype)
    except (RuntimeError, AttributeError):  # no strides, or no memory; or no tensor
        check_grouped(a, b, offs, bias, out_dtype)
        raise
    plan = dispatcher.plans.get(key)
    if plan is None:
        check_grouped(a, b, offs, bias, out_dtype)
        plan = dispatcher.plan(key, request_grouped(a, b, offs, out_dtype), Arguments(a, b, offs), level)
    return plan


def _fake_grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """A tensor like the result, without values, as torch.compile needs it."""
    check_grouped(a, b, offs, bias, out_dtype)
    return a.new_empty(grouped_shape(a, b, offs), dtype=out_dtype or a.dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any, batch_invariant: bool = False) -> None:  # noqa: ARG001
    """Keeps what the backward pass needs: of A and B, only an operand of a gradient that is asked for."""
    ctx.rows_by = overload_name("grouped_mm", batch_invariant)
    a, b, offs, bias, _ = inputs
    ctx.save_for_backward(a if b.requires_grad else None, b if a.requires_grad else None, offs)
    ctx.dtype, ctx.ranks, ctx.bias_shape = a.dtype, (a.ndim, b.ndim), None if bias is None else bias.shape


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradients of the arguments (a, b, offs, bias, out_dtype). Those of a and b are grouped products too.

    The groups of an operand with two dimensions are ranges of its rows or columns. Its gradient is zero in those after
    the last group. Batch invariance concerns each row's result, so the gradient of b, which sums over all rows of a
    group, is computed without it.
    """
    a, b, offs = ctx.saved_tensors
    bias_gradient = grad.sum_to_size(ctx.bias_shape).to(ctx.dtype) if ctx.needs_input_grad[3] else None
    grad = grad.to(ctx.dtype)
    product, (rank_a, rank_b) = _OPS["grouped_mm"], ctx.ranks
    a_gradient = b_gradient = None
    if ctx.needs_input_grad[0]:
        a_gradient = _OPS[ctx.rows_by](grad, b.mT, offs)
        a_gradient = _zero_after_groups(a_gradient, offs, -2 if rank_b == 3 else -1) if rank_a == 2 else a_gradient
    if ctx.needs_input_grad[1]:
        b_gradient = product(a.mT, grad, offs)
        b_gradient = _zero_after_groups(b_gradient, offs, -1 if rank_a == 3 else -2) if rank_b == 2 else b_gradient
    return a_gradient, b_gradient, None, bias_gradient, None


def _zero_after_groups(gradient: torch.Tensor, offs: torch.Tensor, dim: int) -> torch.Tensor:
    """The gradient with zeros in the rows or columns after the last group, which a product leaves undefined."""
    indices = TORCH.arange(gradient.shape[dim], device=gradient.device)
    inside = indices < offs[-1] if offs.shape[0] else indices < 0
    return TORCH.where(inside[:, None] if dim == -2 else inside, gradient, 0)


def _vmap(name: str, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> vmapping.Mapped:
    """Computes one product after the other, because groups of several batches cannot be one grouped product."""
    mapped = [vmapping.in_front(value, dim) for value, dim in zip(arguments, in_dims, strict=True)]
    products: Sequence[Any] = [
        _OPS[name](*(value if dim is None else value[i] for value, dim in zip(mapped, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    return cast("torch.Tensor", TORCH.stack(products)), 0


def _operator(batch_invariant: bool) -> Operator:
    """The operator, or its overload that is batch-invariant."""
    name = overload_name("grouped_mm", batch_invariant)
    with_level = partial(partial, batch_invariant=batch_invariant)  # binds a function's argument ``batch_invariant``
    return Operator(
        f"{name}(Tensor a, Tensor b, Tensor? offs=None, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor",
        with_level(_grouped_mm), _fake_grouped_mm, public_grouped, with_level(_keep), _backward, partial(_vmap, name),
        batch_invariant, follows_autocast=False,
    )  # fmt: skip


_OPS = register(_operator(batch_invariant=False), _operator(batch_invariant=True))
