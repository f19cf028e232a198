"""Defines the operators ``cudal2gen::matmul``, ``cudal2gen::matmul.out`` and ``cudal2gen::linear``, and the functions
``matmul`` and ``bmm``, which skip torch's dispatcher if nothing in torch must intercept the call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from cudal2gen.kernel import Acc
from cudal2gen.launch.launcher import LaunchError
from cudal2gen.operators import vmapping
from cudal2gen.operators.call_native import NATIVE
from cudal2gen.operators.call_torch import public_linear, public_matmul, public_matmul_out, torch_linear, torch_matmul
from cudal2gen.operators.casting import autocast_is_on
from cudal2gen.operators.check_modes import TORCH, check_tensors, invariance, lazy, undispatched
from cudal2gen.operators.check_operands import check_linear, check_matmul, check_no_gradient, check_out, result_shape
from cudal2gen.operators.dispatch import Current, current
from cudal2gen.operators.plan_requests import (
    Arguments,
    are_disjoint,
    in_rows,
    key_of,
    request_linear,
    request_matmul,
    span,
)
from cudal2gen.operators.plans import CallPlan
from cudal2gen.operators.registration import INVARIANT_OVERLOAD, Operator, call, no_script, overload_name, register
from kernelproof.ground.element import ELEMENTS, F32

if TYPE_CHECKING:
    import torch


@no_script
def matmul(
    a: torch.Tensor, b: torch.Tensor, *, acc: Acc = "f32", out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, batch_invariant: bool = False,
) -> torch.Tensor:  # fmt: skip
    """``torch.matmul`` of fp16 or bf16 tensors, a (..., M,K) and b (..., K,N), by the fastest measured kernel, or by
    torch if no kernel is faster.

    - ``acc``: the type in which products are summed: f32, or for fp16 also f16.
    - ``out_dtype``: the type of the result (..., M,N): that of a and b, or torch.float32 for unrounded sums.
    - ``out``: a tensor into which the result is written. The call then has no gradient.
    - ``batch_invariant``: one kernel computes all numbers of rows of a weight, so that a row's result has the same bits
      in any batch; see ``CUDAL2GEN_BATCH_INVARIANT``.

    Vectors and batch dimensions are handled as by torch.matmul. If all rows of ``a`` share one ``b``, they are one
    product; otherwise a batch runs on a kernel if its matrices are evenly spaced. Kernels read a row-major ``a``, and a
    ``b`` that is row-major or the transposed view of a row-major (N,K), in place with any leading dimension. torch
    computes for other strides and types, and on the CPU, where sums are in fp32.

    Raises TypeError for types that differ, ValueError for shapes and devices that do not fit, and RuntimeError if a
    batch-invariant product has no kernel.
    """
    if out is not None:
        if undispatched(a, b, out):
            _write(a, b, acc, out_dtype, out, batch_invariant)
        else:
            check_tensors(a=a, b=b, out=out)
            call(f"matmul.{INVARIANT_OVERLOAD}_out" if batch_invariant else "matmul.out", a, b, acc, out_dtype, out=out)
        return out
    if undispatched(a, b):
        return _matmul(a, b, acc, out_dtype, batch_invariant)
    check_tensors(a=a, b=b)
    return cast("torch.Tensor", call(overload_name("matmul", batch_invariant), a, b, acc, out_dtype))


@no_script
def bmm(
    a: torch.Tensor, b: torch.Tensor, *, acc: Acc = "f32", out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, batch_invariant: bool = False,
) -> torch.Tensor:  # fmt: skip
    """``torch.bmm``: ``matmul`` of a (B,M,K) and b (B,K,N). Raises as ``matmul``, and ValueError for other shapes."""
    if getattr(a, "ndim", 0) != 3 or getattr(b, "ndim", 0) != 3 or a.shape[0] != b.shape[0]:
        check_tensors(a=a, b=b)
        raise ValueError(f"a and b must be (B,M,K) and (B,K,N), got shapes {tuple(a.shape)} and {tuple(b.shape)}")
    return matmul(a, b, acc=acc, out=out, out_dtype=out_dtype, batch_invariant=batch_invariant)


# --- implementations ---


def _matmul(
    a: torch.Tensor, b: torch.Tensor, acc: str = "f32", out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Computes the product: by C++ if it knows a plan for such a call, else by the plan that is made here."""
    level = invariance(batch_invariant)
    kind = level * _KINDS_PER_LEVEL if out_dtype is None and acc == "f32" else _kind(acc, out_dtype, level)
    d: torch.Tensor | None = NATIVE.planned(a, b, kind)
    if d is not None:
        return d
    if autocast_is_on(a) or lazy(a, b):  # the caller skipped the dispatcher, which handles both
        return cast("torch.Tensor", call(overload_name("matmul", batch_invariant), a, b, acc, out_dtype))
    a = in_rows(a, current().memory) if level else a
    plan = plan_matmul(a, b, acc, out_dtype, level)
    if plan.native is not None and not plan.native.kept and kind != _NO_KIND:
        current().keep(plan, kind, a, b)
    plan.calls += 1
    try:
        d = plan.run(a, b, None)
    except LaunchError as error:
        d = current().replace(plan, error).run(a, b, None)
    return d


def plan_matmul(
    a: torch.Tensor, b: torch.Tensor, acc: str, out_dtype: torch.dtype | None, level: int
) -> CallPlan:  # fmt: skip
    """The plan of a product. Its key has everything on which the plan depends. ``level``: see ``invariance``."""
    dispatcher = Current.dispatcher or current()  # without a function's call in the usual case
    try:
        placement = (a.shape, a.stride(), a.data_ptr() & 15, b.shape, b.stride(), b.data_ptr() & 15)
    except (RuntimeError, AttributeError):  # no sizes, strides or memory; or no tensor
        if foreign_plan := dispatcher.plan_foreign(torch_matmul, (a, b), level):
            return foreign_plan
        check_matmul(a, b, acc, out_dtype)
        raise
    key = (acc, placement, a.device, b.device, a.dtype, b.dtype, out_dtype, level)
    plan = dispatcher.plans.get(key)
    if plan is None:
        check_matmul(a, b, acc, out_dtype)
        request = request_matmul(a, b, cast("Acc", acc), out_dtype=out_dtype)
        plan = dispatcher.plan(key, request, Arguments(a, b), level)
    return plan


def _matmul_out(
    a: torch.Tensor, b: torch.Tensor, acc: str = "f32", out_dtype: torch.dtype | None = None, *, out: torch.Tensor,
    batch_invariant: bool = False,
) -> None:  # fmt: skip
    """The operator that writes its result to ``out``."""
    check_no_gradient(a, b, out)
    _write(a, b, acc, out_dtype, out, batch_invariant)


def _write(
    a: torch.Tensor, b: torch.Tensor, acc: str, out_dtype: torch.dtype | None, out: torch.Tensor, batch_invariant: bool
) -> None:  # fmt: skip
    """Writes a product into ``out``. No gradient may be needed."""
    versioned = not out.is_inference()
    if not (versioned or TORCH.is_inference_mode_enabled()):
        raise ValueError("out: a tensor of inference mode is written in that mode only; clone it outside")
    level = invariance(batch_invariant)
    kind = _kind(acc, out_dtype, level)
    if not NATIVE.planned_into(a, b, out, kind):
        if lazy(a, b, out):  # the caller skipped the dispatcher, which calls this again with resolved tensors
            call(f"matmul.{INVARIANT_OVERLOAD}_out" if batch_invariant else "matmul.out", a, b, acc, out_dtype, out=out)
            return
        _plan_and_write(a, b, acc, out_dtype, out, kind, level)
    if versioned:
        TORCH._C._increment_version((out,))


def _plan_and_write(
    a: torch.Tensor, b: torch.Tensor, acc: str, out_dtype: torch.dtype | None, out: torch.Tensor, kind: int, level: int
) -> None:
    """``_write`` for a call that C++ does not make. Raises ValueError if ``out`` shares memory with a or b."""
    dispatcher = Current.dispatcher or current()  # without a function's call in the usual case
    a = in_rows(a, dispatcher.memory) if level else a
    strides = (a.shape, a.stride(), b.shape, b.stride(), out.shape, out.stride())
    alignment = (a.data_ptr() & 15, b.data_ptr() & 15, out.data_ptr() & 15)
    key = (acc, strides, alignment, a.device, b.device, out.device, a.dtype, b.dtype, out.dtype, out_dtype, level)
    plan = dispatcher.plans.get(key)
    if plan is None:
        check_matmul(a, b, acc, out_dtype)
        check_out(a, b, out, out_dtype)
        request = request_matmul(a, b, cast("Acc", acc), out, out_dtype)
        plan = dispatcher.plan(key, request, Arguments(a, b), level)
        plan.spans = (span(a), span(b), span(out))
    # The plan has the bytes over which the tensors extend; their addresses differ from call to call.
    (span_a, span_b, span_out), start = plan.spans, out.data_ptr()
    before_a, before_b = start - a.data_ptr(), start - b.data_ptr()
    if (-span_out < before_a < span_a and not are_disjoint(a, out)) or (
        -span_out < before_b < span_b and not are_disjoint(b, out)
    ):
        raise ValueError("out: shares memory with a or b")
    if plan.native is not None and not plan.native.kept and kind != _NO_KIND:
        dispatcher.keep(plan, kind, a, b, out)
    plan.calls += 1
    try:
        plan.run(a, b, out)
    except LaunchError as error:
        dispatcher.replace(plan, error).run(a, b, out)


def plan_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, level: int) -> CallPlan:
    """The plan of a linear layer. Its key has everything on which the plan depends. ``level``: see ``invariance``."""
    dispatcher = Current.dispatcher or current()  # without a function's call in the usual case
    try:
        bias_kind = key_of(bias)
        placement = (x.shape, x.stride(), weight.shape, weight.stride(), x.data_ptr() & 15, weight.data_ptr() & 15)
    except (RuntimeError, AttributeError):  # no sizes, strides or memory; or no tensor
        if foreign_plan := dispatcher.plan_foreign(torch_linear, (x, weight, bias), level):
            return foreign_plan
        check_linear(x, weight, bias)
        raise
    key = ("linear", placement, x.device, weight.device, x.dtype, weight.dtype, bias_kind, level)
    plan = dispatcher.plans.get(key)
    if plan is None:
        check_linear(x, weight, bias)
        request = request_linear(x, weight, bias is not None)
        plan = dispatcher.plan(key, request, Arguments(x, weight, bias), level)
    return plan


def run_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant: bool = False
) -> torch.Tensor:
    """The operator ``linear`` on tensors of any device."""
    level = invariance(batch_invariant)
    kind, d = _LINEAR + level * _KINDS_PER_LEVEL, None
    d = NATIVE.planned(x, weight, kind) if bias is None else NATIVE.planned_biased(x, weight, bias, kind)
    if d is not None:
        return d
    if autocast_is_on(x) or lazy(x, weight, bias):  # as in ``_matmul``
        return cast("torch.Tensor", call(overload_name("linear", batch_invariant), x, weight, bias))
    x = in_rows(x, current().memory) if level else x
    plan = plan_linear(x, weight, bias, level)
    if plan.native is not None and not plan.native.kept and (bias is None or bias.is_contiguous()):
        current().keep(plan, kind, x, weight, *(() if bias is None else (bias,)))
    plan.calls += 1
    try:
        d = plan.run(x, weight, bias)
    except LaunchError as error:
        d = current().replace(plan, error).run(x, weight, bias)
    return d


# --- without data, and derivatives ---


def _fake_matmul(
    a: torch.Tensor, b: torch.Tensor, acc: str = "f32", out_dtype: torch.dtype | None = None
) -> torch.Tensor:  # fmt: skip
    """A tensor like the result, without values, as torch.compile needs it."""
    check_matmul(a, b, acc, out_dtype)
    return a.new_empty(result_shape(a.shape, b.shape), dtype=out_dtype or a.dtype)


def _fake_matmul_out(
    a: torch.Tensor, b: torch.Tensor, acc: str = "f32", out_dtype: torch.dtype | None = None, *, out: torch.Tensor
) -> None:
    """Checks a call that torch.compile traces, of which there is no result."""
    check_matmul(a, b, acc, out_dtype)
    check_out(a, b, out, out_dtype)
    check_no_gradient(a, b, out)


def _fake_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor like the result, without values."""
    check_linear(x, weight, bias)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _keep_matmul(ctx: Any, inputs: tuple[Any, ...], output: Any, batch_invariant: bool = False) -> None:  # noqa: ARG001
    """Keeps what the derivative of a product needs."""
    a, b, acc, _ = inputs
    ctx.rows_by = overload_name("matmul", batch_invariant)
    # A tensor that no requested gradient needs is not kept, so that its memory can be freed.
    ctx.save_for_backward(a if b.requires_grad else None, b if a.requires_grad else None)
    ctx.acc, ctx.dtype, ctx.shapes = acc, a.dtype, (a.shape, b.shape)
    # The gradient of a batch-invariant product is computed by rows too, so a's is never computed by columns.
    ctx.columns = (not batch_invariant and _in_columns(a), _in_columns(b))


def _matmul_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradients of a product."""
    a, b = ctx.saved_tensors
    grad = grad.to(ctx.dtype)  # the gradient of an fp32 result: operands of a product have one type
    gradients = matmul_gradients(a, b, grad, ctx.shapes, ctx.needs_input_grad[:2], ctx.acc, ctx.rows_by, ctx.columns)
    return *gradients, None, None


def matmul_gradients(
    a: torch.Tensor | None, b: torch.Tensor | None, grad: torch.Tensor, shapes: tuple[Any, Any],
    needs: Sequence[bool], acc: str = "f32", rows_by: str = "matmul", columns: tuple[bool, bool] = (False, False),
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """The gradients of a and b in ``matmul(a, b)``. ``a`` may be None if b needs no gradient, and the other way round.

    - ``shapes``: the shapes of a and b; ``needs``: which of their gradients are requested.
    - ``rows_by``: the operator that computes the gradient of a, whose rows correspond to the rows of a.
    - ``columns``: which of a and b are ``_in_columns``. Their gradients are so too, as in torch: the gradient of ``w``
      in ``matmul(x, w.t())`` is contiguous.
    """
    rank_a, rank_b = (len(shape) for shape in shapes)
    product = OPS["matmul"]
    grad = grad.unsqueeze(-1) if rank_b == 1 else grad
    grad = grad.unsqueeze(-2) if rank_a == 1 else grad
    gradient_a = gradient_b = None
    if needs[0] and b is not None:
        matrices = b.unsqueeze(-1) if rank_b == 1 else b
        extents = (1, *shapes[0]) if rank_a == 1 else shapes[0]
        if columns[0] and rank_b <= 2:
            gradient_a = product(matrices.conj(), grad.mT, acc).mT
        else:
            gradient_a = _summed(OPS[rows_by](grad, _adjoint(matrices), acc), extents).view(shapes[0])
    if needs[1] and a is not None:
        matrices = a.unsqueeze(0) if rank_a == 1 else a
        if rank_b <= 2:  # one product of all rows
            rows = as_rows(matrices)
            if columns[1]:
                gradient_b = product(as_rows(grad).mT, rows.conj(), acc).mT
            else:
                gradient_b = product(_adjoint(rows), as_rows(grad), acc).view(shapes[1])
        else:
            gradient_b = _summed(product(_adjoint(matrices), grad, acc), shapes[1])
    return gradient_a, gradient_b


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor (..., N) as one matrix (rows, N), which may have no elements."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _in_columns(matrix: torch.Tensor) -> bool:
    """Whether a tensor is a column-major matrix without gaps."""
    return bool(matrix.ndim == 2 and matrix.stride() == (1, matrix.shape[0]))


def _adjoint(matrices: torch.Tensor) -> torch.Tensor:
    """The matrices transposed, and conjugated if they are complex."""
    return matrices.mH if matrices.is_complex() else matrices.mT


def _summed(gradient: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The gradient of an operand, summed over the dimensions in which it was broadcast."""
    return gradient if gradient.shape == tuple(shape) else gradient.sum_to_size(shape)


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: Any, batch_invariant: bool = False) -> None:  # noqa: ARG001
    """Keeps what the backward pass needs: x or weight only if the gradient of the other is asked for."""
    x, weight, bias = inputs
    ctx.rows_by = overload_name("matmul", batch_invariant)
    ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)
    ctx.biased = bias is not None


def _linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradients of a linear layer."""
    x, weight = ctx.saved_tensors
    needs = (*ctx.needs_input_grad[:2], ctx.biased and ctx.needs_input_grad[2])
    return linear_gradients(x, weight, grad, needs, ctx.rows_by)


def linear_gradients(
    x: torch.Tensor | None, weight: torch.Tensor | None, grad: torch.Tensor, needs: Sequence[bool],
    rows_by: str = "matmul",
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """The gradients of x, weight and bias in ``linear(x, weight, bias)``. ``x`` or ``weight`` may be None if the other
    one needs no gradient. ``needs`` and ``rows_by``: see ``matmul_gradients``."""
    rows = as_rows(grad)
    x_gradient = weight_gradient = None
    if needs[0] and weight is not None:
        flat = weight.conj() if weight.is_complex() else weight
        x_gradient = OPS[rows_by](rows, flat, "f32").reshape(*grad.shape[:-1], weight.shape[1])
    if needs[1] and x is not None:
        flat = as_rows(x)
        weight_gradient = OPS["matmul"](rows.t(), flat.conj() if flat.is_complex() else flat, "f32")
    return x_gradient, weight_gradient, rows.sum(0) if needs[2] else None


# --- under torch.vmap: a further batch dimension ---


def _vmap_matmul(product: str, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> vmapping.Mapped:  # noqa: ARG001
    """A product under vmap."""
    return vmapping.matmul(OPS[product], in_dims, *arguments)


def _vmap_linear(
    product: str, layer: str, info: Any, in_dims: tuple[Any, ...], *arguments: Any  # noqa: ARG001
) -> vmapping.Mapped:  # fmt: skip
    """A linear layer under vmap."""
    return vmapping.linear(OPS[product], OPS[layer], in_dims, *arguments)


def _operators(batch_invariant: bool) -> tuple[Operator, ...]:
    """The operators, or their overloads that are batch-invariant."""
    product, layer = (overload_name(name, batch_invariant) for name in ("matmul", "linear"))
    out = f"matmul.{INVARIANT_OVERLOAD}_out" if batch_invariant else "matmul.out"
    matmul_arguments = 'Tensor a, Tensor b, str acc="f32", ScalarType? out_dtype=None'
    with_level = partial(partial, batch_invariant=batch_invariant)  # binds a function's argument ``batch_invariant``
    return (
        Operator(
            f"{product}({matmul_arguments}) -> Tensor",
            with_level(_matmul), _fake_matmul, public_matmul, with_level(_keep_matmul), _matmul_backward,
            partial(_vmap_matmul, product), batch_invariant,
        ),
        Operator(
            f"{out}({matmul_arguments}, *, Tensor(a!) out) -> ()",
            with_level(_matmul_out), _fake_matmul_out, public_matmul_out, batch_invariant=batch_invariant,
        ),
        Operator(
            f"{layer}(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
            with_level(run_linear), _fake_linear, public_linear, with_level(_keep_linear), _linear_backward,
            partial(_vmap_linear, product, layer), batch_invariant,
        ),
    )  # fmt: skip


def _kind(acc: str, out_dtype: Any, level: int) -> int:
    """The kind of a call of ``matmul`` (see ``_KINDS``). ``level``: see ``invariance``."""
    kind = _KINDS.get((acc, out_dtype), _NO_KIND)
    return kind if kind == _NO_KIND else kind + level * _KINDS_PER_LEVEL


# The registered operators by name, as functions that go through torch's dispatcher.
OPS = register(*_operators(batch_invariant=False), *_operators(batch_invariant=True))
# The kind of a call is the part of its key that C++ does not read from the tensors: for ``matmul`` the number of its
# pair (acc, out_dtype), 0 for the defaults. C++ makes no calls of kind -1.
_OUT_DTYPES = (None, *(element.torch_dtype for element in ELEMENTS.values()), F32.torch_dtype)
_PAIRS = ((acc, dtype) for acc in ("f32", "f16") for dtype in _OUT_DTYPES)
_KINDS: dict[tuple[str, Any], int] = {pair: number for number, pair in enumerate(_PAIRS)}
_NO_KIND = -1
_LINEAR = len(_KINDS)  # the kind of a call of ``linear``
_KINDS_PER_LEVEL = _LINEAR + 1  # the number of kinds at one level of invariance; level i adds i times this number
