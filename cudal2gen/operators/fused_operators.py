"""Defines the operators ``fused_linear`` and ``gated_pair``: linear layers with an activation or a gate.

Each operator has a form ``_aux`` that also returns Z, the sums with bias. It is used if a gradient is needed, so that
the derivative need not compute Z again.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from cudal2gen.kernel.fusion import Activation
from cudal2gen.operators import epilogues, vmapping
from cudal2gen.operators.call_torch import public_fused, public_gated, public_linear, torch_gated
from cudal2gen.operators.casting import undispatched_without
from cudal2gen.operators.check_modes import (
    INVARIANT,
    TORCH,
    check_tensors,
    foreign,
    invariance,
    undispatched,
)
from cudal2gen.operators.check_operands import check_fused, check_gated_pair
from cudal2gen.operators.dispatch import current
from cudal2gen.operators.plan_requests import Arguments, Epilogue, in_rows, key_of, request_fused
from cudal2gen.operators.plans import CallPlan
from cudal2gen.operators.registration import Operator, call, no_script, overload_name, register
from cudal2gen.operators.torch_operators import OPS, as_rows, linear_gradients, run_linear
from kernelproof.ground.element import F32

if TYPE_CHECKING:
    import torch

Pair = tuple["torch.Tensor", "torch.Tensor"]  # D and Z


@no_script
def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None, *,
    batch_invariant: bool = False,
) -> torch.Tensor:  # fmt: skip
    """``activation(x @ weight.T + bias)`` for x (..., K), weight (N,K) and bias (N,), as (..., N); sums in fp32.

    ``activation``: None, relu, gelu (with the error function), gelu_tanh or silu. A kernel that was built with it
    applies bias and activation to the fp32 sums; if the pack has no such kernel, they are applied to the product's
    rounded result. If a gradient is needed, the sums with bias are kept for it. torch computes other types than fp16
    and bf16.
    ``batch_invariant``: as in ``matmul``. Raises as ``matmul``, and ValueError for another activation.
    """
    if activation is None:
        if undispatched(x, weight, bias):
            return run_linear(x, weight, bias, batch_invariant)
        check_tensors(x=x, weight=weight, bias=bias)
        return cast("torch.Tensor", call(overload_name("linear", batch_invariant), x, weight, bias))
    return _call_fused({"x": x, "weight": weight, "bias": bias}, activation, False, batch_invariant)


@no_script
def swiglu(x: torch.Tensor, w13: torch.Tensor, *, batch_invariant: bool = False) -> torch.Tensor:
    """``silu(x @ W1.T) * (x @ W3.T)`` for x (..., K), as (..., H); w13 (2H,K) is ``interleave(W1, W3)``.

    If the pack has a kernel for it, that computes both products and the gate. ``batch_invariant``: as in ``matmul``.
    Raises as ``matmul``, and ValueError if 2H is no multiple of 16.
    """
    return _call_fused({"x": x, "w13": w13, "bias": None}, "silu", True, batch_invariant)


def gated_pair(x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, activation: str) -> torch.Tensor:
    """``activation(x @ w1.T) * (x @ w3.T)``: like ``swiglu``, but with two separate weights (H,K).

    A kernel reads an interleaved copy of the weights, which is made at the first call and when they have changed
    (``derived``).
    """
    if invariance() == INVARIANT:
        # Captured graphs do not read the interleaved copy, so one kernel would not compute all calls.
        return epilogues.activate(linear(x, w1), activation) * linear(x, w3)
    return _call(("gated_pair", "gated_pair_aux"), _gated_pair, {"x": x, "w1": w1, "w3": w3}, activation)


def _call_fused(
    tensors: dict[str, torch.Tensor | None], activation: str, gate: bool, batch_invariant: bool
) -> torch.Tensor:
    """Calls the operator without pre-activations or the one with them, each in its batch-invariant form if asked
    for."""
    names = overload_name("fused_linear", batch_invariant), overload_name("fused_linear_aux", batch_invariant)
    run = partial(_fused_linear, batch_invariant=True) if batch_invariant else _fused_linear
    return _call(names, run, tensors, activation, gate)


def _call(
    names: tuple[str, str], run: Any, operands: dict[str, torch.Tensor | None], *options: Any
) -> torch.Tensor:  # fmt: skip
    """Calls an operator, or its form ``_aux`` if a gradient is needed. Skips torch's dispatcher if possible.

    - ``names``: the names of the operator and of its form ``_aux``.
    - ``run``: the function that computes the operator.
    - ``operands``: its tensors by the names of the caller's parameters, which error messages use.
    """
    d: torch.Tensor
    tensors = tuple(operands.values())
    if undispatched_without(tensors):
        return cast("torch.Tensor", run(*tensors, *options))
    check_tensors(**operands)
    differentiable = TORCH.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    if differentiable and not foreign(tensors, functions=True):
        d = _OPS[names[1]](*tensors, *options)[0]
    else:
        d = call(names[0], *tensors, *options)
    return d


# --- implementations ---


def _fused_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, gate: bool = False,
    aux: bool = False, batch_invariant: bool = False,
) -> Any:  # fmt: skip
    """Computes the layer by the plan of its operands. With ``aux`` the result is the pair of D and the sums Z."""
    level = invariance(batch_invariant)
    x = in_rows(x, current().memory) if level else x
    plan = plan_fused(x, weight, bias, Epilogue(cast("Activation", activation), gate, aux), level)
    return current().call(plan, x, weight, bias)


def plan_fused(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epilogue: Epilogue, level: int
) -> CallPlan:
    """The plan of a fused layer. Its key has everything that the plan depends on. ``level``: see ``invariance``."""
    dispatcher, (activation, gate, aux) = current(), epilogue
    try:
        key = ("fused", *epilogue, level, *map(key_of, (x, weight, bias)))
    except (RuntimeError, AttributeError):  # no sizes, strides or memory; or no tensor

        def by_functions(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
            d, z = public_fused(x, weight, bias, activation, gate)
            return (d, z) if aux else d

        if foreign_plan := dispatcher.plan_foreign(by_functions, (x, weight, bias), level):
            return foreign_plan
        check_fused(x, weight, bias, activation, gate)
        raise
    plan = dispatcher.plans.get(key)
    if plan is None:
        check_fused(x, weight, bias, activation, gate)
        request = request_fused(x, weight, bias is not None, epilogue)
        plan = dispatcher.plan(key, request, Arguments(x, weight, bias), level)
    return plan


def _gated_pair(
    x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, activation: str, aux: bool = False
) -> Any:  # fmt: skip
    """Computes a gate of two weights by the plan of the call; ``aux``: and returns the pre-activations too."""
    dispatcher = current()
    return dispatcher.call(plan_pair(x, w1, w3, activation, aux), x, w1, w3)


def _gated_pair_aux(x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, activation: str) -> Pair:
    """A gate of two weights, and its pre-activations."""
    return cast("Pair", _gated_pair(x, w1, w3, activation, aux=True))


def plan_pair(x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, activation: str, aux: bool) -> CallPlan:
    """The plan of a gated layer with two separate weights. It is a plan for their interleaved copy, which a kernel's
    call makes."""
    dispatcher = current()
    try:
        level = invariance()
        key = ("pair", activation, aux, level, w1.is_inference() or w3.is_inference(), *map(key_of, (x, w1, w3)))
    except (RuntimeError, AttributeError):  # no strides, or no memory; or no tensor
        check_gated_pair(x, w1, w3, activation)
        raise
    plan = dispatcher.plans.get(key)
    if plan is not None:
        return plan
    check_gated_pair(x, w1, w3, activation)

    def by_torch(x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor | None) -> Any:
        assert w3 is not None
        d, z = torch_gated(x, w1, w3, activation)
        return (d, z) if aux else d

    # A tensor without data represents the copy: only the copy's shape and strides matter, and its memory is aligned.
    pair = w1.new_empty((2 * w1.shape[0], w1.shape[1]), device="meta")
    request = request_fused(x, pair, False, Epilogue(cast("Activation", activation), True, aux), by_torch)
    if w1.is_inference() or w3.is_inference():
        request = request._replace(problem=None, obstacle="weights of inference mode, not followed")
        return dispatcher.plan(key, request, level=level)
    return dispatcher.plan(key, request._replace(pair=True), Arguments(x, w1, w3), level)


# --- by torch's functions, for operands that support no others ---


def _public_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, gate: bool = False
) -> torch.Tensor:  # fmt: skip
    """A fused layer by torch's functions alone."""
    return public_fused(x, weight, bias, activation, gate)[0]


def _public_gated_aux(x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, activation: str) -> Pair:
    """A gate of two weights and its pre-activations, by torch's functions alone."""
    return public_gated(x, w1, w3, activation), epilogues.join_columns(public_linear(x, w1), public_linear(x, w3))


# --- without data, and derivatives ---


def _fake_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, gate: bool = False
) -> torch.Tensor:  # fmt: skip
    """A tensor like the result, without values, as torch.compile needs it."""
    check_fused(x, weight, bias, activation, gate)
    return x.new_empty((*x.shape[:-1], weight.shape[0] // (1 + gate)))


def _fake_linear_aux(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, gate: bool = False
) -> Pair:  # fmt: skip
    """Tensors like the result and the pre-activations."""
    return _fake_linear(x, weight, bias, activation, gate), x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_pair(x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, activation: str) -> torch.Tensor:
    """A tensor like the result."""
    check_gated_pair(x, w1, w3, activation)
    return x.new_empty((*x.shape[:-1], w1.shape[0]))


def _fake_pair_aux(x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, activation: str) -> Pair:
    """Tensors like the result and the pre-activations."""
    return _fake_pair(x, w1, w3, activation), x.new_empty((*x.shape[:-1], 2 * w1.shape[0]))


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: Any, batch_invariant: bool = False) -> None:
    """Keeps what the derivative needs, for operators without and with Z."""
    x, weight, bias, ctx.activation, ctx.gate = inputs
    ctx.rows_by, ctx.layer = overload_name("matmul", batch_invariant), overload_name("linear", batch_invariant)
    ctx.set_materialize_grads(False)
    if isinstance(output, tuple):
        ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None, output[1])
    else:
        ctx.save_for_backward(x, weight, bias)
    ctx.biased = bias is not None


def _linear_backward(ctx: Any, grad: torch.Tensor | None) -> tuple[Any, ...]:
    """The gradients of a fused layer, whose pre-activations are computed again."""
    x, weight, bias = ctx.saved_tensors
    return _gradients(ctx, (x, weight, OPS[ctx.layer](x, weight, bias)), grad, None)


def _linear_aux_backward(ctx: Any, grad: torch.Tensor | None, grad_z: torch.Tensor | None) -> tuple[Any, ...]:
    """The gradients of a fused layer from its stored pre-activations."""
    return _gradients(ctx, ctx.saved_tensors, grad, grad_z)


def _gradients(
    ctx: Any, saved: tuple[Any, Any, torch.Tensor], grad: torch.Tensor | None, grad_z: torch.Tensor | None
) -> tuple[Any, ...]:
    """The gradients of a fused layer's arguments (x, weight, bias, activation, gate).

    ``saved``: x, weight and Z. ``grad`` and ``grad_z``: the gradients of D and of Z; None for one that is not used.
    """
    x, weight, z = saved
    if grad is not None:
        z_gradient = epilogues.apply_backward(grad, z, ctx.activation, ctx.gate)
        grad_z = z_gradient if grad_z is None else z_gradient + grad_z
    if grad_z is None:
        return None, None, None, None, None
    needs = (*ctx.needs_input_grad[:2], ctx.biased and ctx.needs_input_grad[2])
    return *linear_gradients(x, weight, grad_z, needs, ctx.rows_by), None, None


def _keep_pair(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keeps for the backward pass the operands of a gate, and its pre-activations if it returned them."""
    x, w1, w3, ctx.activation = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w1, w3, *(output[1:] if isinstance(output, tuple) else ()))


def _pair_backward(ctx: Any, grad: torch.Tensor | None) -> tuple[Any, ...]:
    """The gradients of a gate, whose pre-activations are computed again."""
    x, w1, w3 = ctx.saved_tensors
    z = epilogues.join_columns(OPS["linear"](x, w1), OPS["linear"](x, w3))
    return _pair_gradients(ctx, x, (w1, w3), z, grad, None)


def _pair_aux_backward(ctx: Any, grad: torch.Tensor | None, grad_z: torch.Tensor | None) -> tuple[Any, ...]:
    """The gradients of a gate from its stored pre-activations."""
    x, w1, w3, z = ctx.saved_tensors
    return _pair_gradients(ctx, x, (w1, w3), z, grad, grad_z)


def _pair_gradients(
    ctx: Any, x: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor], z: torch.Tensor,
    grad: torch.Tensor | None, grad_z: torch.Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of a gated layer's arguments (x, w1, w3, activation). ``weights``: w1 and w3. ``grad`` and
    ``grad_z``: as in ``_gradients``."""
    # For each of D and Z that has a gradient, the two halves of Z's gradient that follow from it.
    sum_gradients = [] if grad is None else [epilogues.pair_backward(grad, z, ctx.activation)]
    sum_gradients += [] if grad_z is None else [epilogues.split_columns(grad_z)]
    if not sum_gradients:
        return None, None, None, None
    z_gradients = [parts[0] if len(parts) == 1 else parts[0] + parts[1] for parts in zip(*sum_gradients, strict=True)]
    x_gradient = None
    if ctx.needs_input_grad[0]:
        wide = x.element_size() < F32.bytes
        parts = [_by_rows(part, weight, wide) for part, weight in zip(z_gradients, weights, strict=True)]
        x_gradient = (parts[0] + parts[1]).to(x.dtype).view(x.shape)
    needs = ctx.needs_input_grad[1:3]
    weight_gradients = [
        linear_gradients(x, None, part, (False, needed, False))[1]
        for part, needed in zip(z_gradients, needs, strict=True)
    ]
    return x_gradient, *weight_gradients, None


def _by_rows(grad: torch.Tensor, weight: torch.Tensor, wide: bool) -> torch.Tensor:
    """``grad @ weight`` as one product of all rows. ``wide``: in fp32, because another such product is added to it."""
    rows = as_rows(grad)
    other = weight.conj() if weight.is_complex() else weight
    d: torch.Tensor = OPS["matmul"](rows, other, "f32", F32.torch_dtype if wide else None)
    return d


# --- under torch.vmap ---


def _vmap_linear(batch_invariant: bool, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> vmapping.Mapped:
    """A fused layer under vmap. The result is batched along its first axis."""
    (d, _), _ = _vmap_linear_aux(batch_invariant, info, in_dims, *arguments)
    return d, 0


def _vmap_linear_aux(
    batch_invariant: bool, info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, weight: torch.Tensor,
    bias: torch.Tensor | None, activation: str, gate: bool = False,
) -> tuple[Pair, tuple[int, int]]:  # fmt: skip
    """The rule of vmap: a batch of x alone is more rows; otherwise the product and the fusion are computed apart."""
    del info
    layer, product, plain = (overload_name(name, batch_invariant) for name in ("fused_linear_aux", "matmul", "linear"))
    if in_dims[1] is None and in_dims[2] is None:
        return _OPS[layer](vmapping.in_front(x, in_dims[0]), weight, bias, activation, gate), (0, 0)
    z, _ = vmapping.linear(OPS[product], OPS[plain], in_dims[:3], x, weight, bias)
    return (epilogues.apply(z, activation, gate), z), (0, 0)


def _vmap_pair(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[torch.Tensor, int]:
    """A gate of two weights under vmap. The result is batched along its first axis."""
    (d, _), _ = _vmap_pair_aux(info, in_dims, *arguments)
    return d, 0


def _vmap_pair_aux(
    info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, activation: str
) -> tuple[Pair, tuple[int, int]]:  # fmt: skip
    """If only x is mapped, its mapped dimension becomes a batch dimension of x. Otherwise Z is computed by a layer for
    each weight, and D from it. A layer of which nothing is mapped is computed once, for all of the mapped dimension."""
    if in_dims[1] is None and in_dims[2] is None:
        return _OPS["gated_pair_aux"](vmapping.in_front(x, in_dims[0]), w1, w3, activation), (0, 0)
    z1, z3 = (
        vmapping.linear(OPS["matmul"], OPS["linear"], (in_dims[0], dim), x, weight)[0]
        if (in_dims[0], dim) != (None, None)
        else OPS["linear"](x, weight).expand(info.batch_size, *x.shape[:-1], weight.shape[0])
        for dim, weight in zip(in_dims[1:3], (w1, w3), strict=True)
    )
    z = epilogues.join_columns(z1, z3)
    return (epilogues.apply(z, activation, True), z), (0, 0)


_LINEAR = "(Tensor x, Tensor weight, Tensor? bias, str activation, bool gate=False)"
_PAIR = "(Tensor x, Tensor w1, Tensor w3, str activation)"


def _linears(batch_invariant: bool) -> tuple[Operator, ...]:
    """The operators of fused layers, or their overloads that are batch-invariant."""
    operators = ("fused_linear", "fused_linear_aux")
    name, name_aux = (overload_name(operator, batch_invariant) for operator in operators)
    run = partial(_fused_linear, batch_invariant=batch_invariant)
    keep = partial(_keep_linear, batch_invariant=batch_invariant)
    return (
        Operator(
            f"{name}{_LINEAR} -> Tensor",
            run, _fake_linear, _public_linear, keep, _linear_backward, partial(_vmap_linear, batch_invariant),
            batch_invariant,
        ),
        Operator(
            f"{name_aux}{_LINEAR} -> (Tensor, Tensor)",
            partial(run, aux=True), _fake_linear_aux, public_fused, keep, _linear_aux_backward,
            partial(_vmap_linear_aux, batch_invariant), batch_invariant,
        ),
    )  # fmt: skip


_PAIRS = (
    Operator(
        f"gated_pair{_PAIR} -> Tensor",
        _gated_pair, _fake_pair, public_gated, _keep_pair, _pair_backward, _vmap_pair,
    ),
    Operator(
        f"gated_pair_aux{_PAIR} -> (Tensor, Tensor)",
        _gated_pair_aux, _fake_pair_aux, _public_gated_aux, _keep_pair, _pair_aux_backward, _vmap_pair_aux,
    ),
)  # fmt: skip

_OPS = register(*_linears(batch_invariant=False), *_linears(batch_invariant=True), *_PAIRS)
