"""The operators ``cudal2gen::matmul``, ``cudal2gen::matmul.out`` and ``cudal2gen::linear``, and the functions that call
them. If nothing in torch has to see a call, they skip torch's dispatcher."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from cudal2gen.kernel import Acc
from cudal2gen.launch.launcher import LaunchError
from cudal2gen.operators import vmapping
from cudal2gen.operators.call_native import NATIVE
from cudal2gen.operators.call_torch import own_linear, own_matmul, own_matmul_out, torch_linear, torch_matmul
from cudal2gen.operators.check_modes import TORCH, check_tensors, undispatched
from cudal2gen.operators.check_operands import check_linear, check_matmul, check_out, result_shape
from cudal2gen.operators.dispatch import Current, current
from cudal2gen.operators.plan_requests import Arguments, request_linear, request_matmul, span
from cudal2gen.operators.plans import CallPlan
from cudal2gen.operators.registration import Operator, call, no_script, register
from kernelproof.ground.element import ELEMENTS, F32

if TYPE_CHECKING:
    import torch


@no_script
def matmul(
    a: torch.Tensor, b: torch.Tensor, *, acc: Acc = "f32", out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """``torch.matmul`` of fp16 or bf16 tensors, a (..., M,K) and b (..., K,N), by the fastest measured kernel, or by
    torch if none is faster.

    Vectors and batch dimensions are torch.matmul's. Rows of ``a`` that share one ``b`` are one product; else the batch
    runs on a kernel if its matrices are evenly spaced. A row-major ``a``, and a ``b`` that is row-major or the
    transposed view of a row-major (N,K), are read in place with any leading dimension. torch computes for other strides
    and types, and on the CPU, there with fp32 sums.

    ``acc``: the type in which products are summed, f32, or for fp16 on request f16. ``out_dtype``: the type of the
    result (..., M,N), that of a and b, or torch.float32 for unrounded sums. ``out``: written in place, without
    gradients. Raises TypeError for types that differ, ValueError for shapes and devices that do not fit.
    """
    if out is not None:
        direct = undispatched(a, b) and undispatched(out, out)
        if direct:
            _matmul_out(a, b, acc, out_dtype, out=out)
        else:
            check_tensors(a=a, b=b, out=out)
            call("matmul.out", a, b, acc, out_dtype, out=out)
        return out
    if undispatched(a, b):
        return _matmul(a, b, acc, out_dtype)
    check_tensors(a=a, b=b)
    return cast("torch.Tensor", call("matmul", a, b, acc, out_dtype))


@no_script
def bmm(
    a: torch.Tensor, b: torch.Tensor, *, acc: Acc = "f32", out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """``torch.bmm``: ``matmul`` of a (B,M,K) and b (B,K,N). Raises as ``matmul``, and ValueError for other shapes."""
    if getattr(a, "ndim", 0) != 3 or getattr(b, "ndim", 0) != 3 or a.shape[0] != b.shape[0]:
        check_tensors(a=a, b=b)
        raise ValueError(f"a and b must be (B,M,K) and (B,K,N), got shapes {tuple(a.shape)} and {tuple(b.shape)}")
    return matmul(a, b, acc=acc, out=out, out_dtype=out_dtype)


# --- what runs ---


def _matmul(
    a: torch.Tensor, b: torch.Tensor, acc: str = "f32", out_dtype: torch.dtype | None = None
) -> torch.Tensor:  # fmt: skip
    kind = 0 if out_dtype is None and acc == "f32" else _KINDS.get((acc, out_dtype), _NO_KIND)
    d: torch.Tensor | None = NATIVE.planned(a, b, kind)
    if d is not None:
        return d
    plan = plan_matmul(a, b, acc, out_dtype)
    if plan.native is not None and not plan.native.kept and kind != _NO_KIND:
        current().keep(plan, a, b, kind)
    plan.calls += 1
    try:
        d = plan.run(a, b, None)
    except LaunchError as error:
        d = current().replace(plan, error).run(a, b, None)
    return d


def plan_matmul(a: torch.Tensor, b: torch.Tensor, acc: str, out_dtype: torch.dtype | None) -> CallPlan:
    """The plan of a product. Its key has everything that the plan depends on."""
    dispatcher = Current.dispatcher or current()  # spares every call a call
    try:
        lies = (a.shape, a.stride(), a.data_ptr() & 15, b.shape, b.stride(), b.data_ptr() & 15)
    except (RuntimeError, AttributeError):  # no sizes, strides or memory; or no tensor
        if aside := dispatcher.plan_foreign(torch_matmul, (a, b)):
            return aside
        check_matmul(a, b, acc, out_dtype)
        raise
    key = (acc, lies, a.device, b.device, a.dtype, b.dtype, out_dtype)
    plan = dispatcher.plans.get(key)
    if plan is None:
        check_matmul(a, b, acc, out_dtype)
        plan = dispatcher.plan(key, request_matmul(a, b, cast("Acc", acc), out_dtype=out_dtype), Arguments(a, b))
    return plan


def _matmul_out(
    a: torch.Tensor, b: torch.Tensor, acc: str = "f32", out_dtype: torch.dtype | None = None, *, out: torch.Tensor
) -> None:
    dispatcher = Current.dispatcher or current()  # spares every call a call
    lies = (a.shape, a.stride(), b.shape, b.stride(), out.shape, out.stride())
    where = (a.data_ptr() & 15, b.data_ptr() & 15, out.data_ptr() & 15)
    key = (acc, lies, where, a.device, b.device, out.device, a.dtype, b.dtype, out.dtype, out_dtype)
    plan = dispatcher.plans.get(key)
    if plan is None:
        check_matmul(a, b, acc, out_dtype)
        check_out(a, b, out, out_dtype)
        plan = dispatcher.plan(key, request_matmul(a, b, cast("Acc", acc), out, out_dtype), Arguments(a, b))
        plan.spans = (span(a), span(b), span(out))
    # The plan knows how far the tensors reach; where they start differs from call to call.
    (span_a, span_b, span_out), start = plan.spans, out.data_ptr()
    before_a, before_b = start - a.data_ptr(), start - b.data_ptr()
    if (-span_out < before_a < span_a) or (-span_out < before_b < span_b):
        raise ValueError("out: shares memory with a or b")
    plan.calls += 1
    try:
        plan.run(a, b, out)
    except LaunchError as error:
        dispatcher.replace(plan, error).run(a, b, out)
    if not out.is_inference():  # such tensors have no version
        TORCH.autograd.graph.increment_version(out)


def plan_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> CallPlan:
    """The plan of a linear layer. Its key has everything that the plan depends on."""
    dispatcher = Current.dispatcher or current()  # spares every call a call
    try:
        bias_kind: tuple[Any, ...] = () if bias is None else (bias.device, bias.dtype, bias.shape)
        lies = (x.shape, x.stride(), weight.shape, weight.stride(), x.data_ptr() & 15, weight.data_ptr() & 15)
    except (RuntimeError, AttributeError):  # no sizes, strides or memory; or no tensor
        if aside := dispatcher.plan_foreign(torch_linear, (x, weight, bias)):
            return aside
        check_linear(x, weight, bias)
        raise
    key = ("linear", lies, x.device, weight.device, x.dtype, weight.dtype, bias_kind)
    plan = dispatcher.plans.get(key)
    if plan is None:
        check_linear(x, weight, bias)
        plan = dispatcher.plan(key, request_linear(x, weight, bias is not None), Arguments(x, weight, bias))
    return plan


def run_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The operator ``linear`` on tensors of any device."""
    d: torch.Tensor | None = NATIVE.planned(x, weight, _LINEAR) if bias is None else None
    if d is not None:
        return d
    plan = plan_linear(x, weight, bias)
    if bias is None and plan.native is not None and not plan.native.kept:
        current().keep(plan, x, weight, _LINEAR)
    plan.calls += 1
    try:
        d = plan.run(x, weight, bias)
    except LaunchError as error:
        d = current().replace(plan, error).run(x, weight, bias)
    return d


# --- without data, and backwards ---


def _fake_matmul(
    a: torch.Tensor, b: torch.Tensor, acc: str = "f32", out_dtype: torch.dtype | None = None
) -> torch.Tensor:  # fmt: skip
    check_matmul(a, b, acc, out_dtype)
    return a.new_empty(result_shape(a.shape, b.shape), dtype=out_dtype or a.dtype)


def _fake_matmul_out(
    a: torch.Tensor, b: torch.Tensor, acc: str = "f32", out_dtype: torch.dtype | None = None, *, out: torch.Tensor
) -> None:
    check_matmul(a, b, acc, out_dtype)
    check_out(a, b, out, out_dtype)


def _fake_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    check_linear(x, weight, bias)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _keep_matmul(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
    a, b, acc, _ = inputs
    # A tensor that no wanted gradient needs is not kept, so that its memory can be freed.
    ctx.save_for_backward(a if b.requires_grad else None, b if a.requires_grad else None)
    ctx.acc, ctx.dtype, ctx.shapes = acc, a.dtype, (a.shape, b.shape)


def _matmul_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    grad = grad.to(ctx.dtype)  # the gradient of an fp32 result: operands of a product have one type
    of_a, of_b = matmul_gradients(a, b, grad, ctx.shapes, ctx.needs_input_grad[:2], ctx.acc)
    return of_a, of_b, None, None


def matmul_gradients(
    a: torch.Tensor | None, b: torch.Tensor | None, grad: torch.Tensor, shapes: tuple[Any, Any],
    needs: Sequence[bool], acc: str = "f32",
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """The gradients of a and b in ``matmul(a, b)``. ``a`` may be None if b needs no gradient, and the other way round.

    ``shapes``: those of a and b. ``needs``: which gradients are wanted.
    """
    of_a, of_b = (len(shape) for shape in shapes)
    product = OPS["matmul"]
    grad = grad.unsqueeze(-1) if of_b == 1 else grad
    grad = grad.unsqueeze(-2) if of_a == 1 else grad
    gradient_a = gradient_b = None
    if needs[0] and b is not None:
        matrices = b.unsqueeze(-1) if of_b == 1 else b
        extents = (1, *shapes[0]) if of_a == 1 else shapes[0]
        gradient_a = _summed(product(grad, _adjoint(matrices), acc), extents).view(shapes[0])
    if needs[1] and a is not None:
        matrices = a.unsqueeze(0) if of_a == 1 else a
        if of_b <= 2:  # one product, of all rows
            rows = as_rows(matrices)
            gradient_b = product(_adjoint(rows), as_rows(grad), acc).view(shapes[1])
        else:
            gradient_b = _summed(product(_adjoint(matrices), grad, acc), shapes[1])
    return gradient_a, gradient_b


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as one matrix, also if it has no elements."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _adjoint(matrices: torch.Tensor) -> torch.Tensor:
    return matrices.mH if matrices.is_complex() else matrices.mT


def _summed(gradient: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The gradient of an operand, summed over the dimensions in which it was broadcast."""
    return gradient if gradient.shape == tuple(shape) else gradient.sum_to_size(shape)


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
    x, weight, bias = inputs
    ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)
    ctx.biased = bias is not None


def _linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    return linear_gradients(x, weight, grad, (*ctx.needs_input_grad[:2], ctx.biased and ctx.needs_input_grad[2]))


def linear_gradients(
    x: torch.Tensor | None, weight: torch.Tensor | None, grad: torch.Tensor, needs: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of ``linear(x, weight, bias)``. ``x`` may be None if weight needs none, and the other way round."""
    rows = as_rows(grad)
    of_x = of_weight = None
    if needs[0] and weight is not None:
        flat = weight.conj() if weight.is_complex() else weight
        of_x = OPS["matmul"](rows, flat, "f32").reshape(*grad.shape[:-1], weight.shape[1])
    if needs[1] and x is not None:
        flat = as_rows(x)
        of_weight = OPS["matmul"](rows.t(), flat.conj() if flat.is_complex() else flat, "f32")
    return of_x, of_weight, rows.sum(0) if needs[2] else None


# --- under torch.vmap: a further batch dimension ---


def _vmap_matmul(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> vmapping.Mapped:  # noqa: ARG001
    return vmapping.matmul(OPS["matmul"], in_dims, *arguments)


def _vmap_linear(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> vmapping.Mapped:  # noqa: ARG001
    return vmapping.linear(OPS["matmul"], OPS["linear"], in_dims, *arguments)


OPERATORS = (
    Operator(
        'matmul(Tensor a, Tensor b, str acc="f32", ScalarType? out_dtype=None) -> Tensor',
        _matmul, _fake_matmul, own_matmul, _keep_matmul, _matmul_backward, _vmap_matmul,
    ),
    Operator(
        'matmul.out(Tensor a, Tensor b, str acc="f32", ScalarType? out_dtype=None, *, Tensor(a!) out) -> ()',
        _matmul_out, _fake_matmul_out, own_matmul_out,
    ),
    Operator(
        "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
        run_linear, _fake_linear, own_linear, _keep_linear, _linear_backward, _vmap_linear,
    ),
)  # fmt: skip


def _kinds() -> dict[tuple[str, Any], int]:
    """Numbers for what a plan of ``matmul`` depends on beside the tensors; 0 for the defaults."""
    types = (None, *(element.torch_dtype for element in ELEMENTS.values()), F32.torch_dtype)
    return {pair: number for number, pair in enumerate((acc, dtype) for acc in ("f32", "f16") for dtype in types)}


OPS = register(*OPERATORS)
# The kind of a call is the part of its key that C++ does not read from the tensors; -1 is kept for no plan.
_KINDS, _NO_KIND = _kinds(), -1
_LINEAR = len(_KINDS)
