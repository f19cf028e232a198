"""The operators ``cudal2gen::matmul``, ``cudal2gen::matmul.out`` and ``cudal2gen::linear``, registered with torch.

Each has kernels for CUDA and CPU tensors, a fake one for torch.compile and meta tensors, and, where it returns a
tensor, a derivative. Defined by schema and not by ``torch.library.custom_op``, whose checks cost microseconds a call.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast, get_args

from cudal2gen.choice import Matrix, Operands, Sizes
from cudal2gen.kernel import Acc, Layout
from cudal2gen.operators.plans import Given, Plan, Run, current, matrix, problem_of

if TYPE_CHECKING:
    import torch

NAMESPACE = "cudal2gen"
SCHEMAS = (
    'matmul(Tensor a, Tensor b, str acc="f32") -> Tensor',
    'matmul.out(Tensor a, Tensor b, str acc="f32", *, Tensor(a!) out) -> ()',
    "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
)


def matmul(a: torch.Tensor, b: torch.Tensor, *, acc: Acc = "f32", out: torch.Tensor | None = None) -> torch.Tensor:
    """The product of fp16 matrices, a (M,K) and b (K,N), as fp16 (M,N), by the fastest kernel known, else by torch.

    ``acc``: the accumulator, f32, or f16 where that is asked for and a kernel has it. Row-major ``a``, and ``b``
    row-major or a transposed view of a row-major (N,K), are read where they lie, with any leading dimension; other
    strides are torch's. On CPU tensors torch computes, with fp32 sums. ``out``: (M,N), written in place; not with
    gradients. Raises TypeError for other types, ValueError for what does not fit.
    """
    if out is not None:
        (_matmul_out if _unseen(a, b) and _unseen(out, out) else _OPS["matmul.out"])(a, b, acc, out=out)
        return out
    return _matmul(a, b, acc) if _unseen(a, b) else cast("torch.Tensor", _OPS["matmul"](a, b, acc))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` for fp16 x (..., K), weight (N,K) and bias (N,), as (..., N); sums in fp32.

    A kernel rounds the product to fp16 before it adds the bias. Raises as ``matmul``.
    """
    if _unseen(x, weight) and (bias is None or _unseen(bias, bias)):
        return _linear(x, weight, bias)
    return cast("torch.Tensor", _OPS["linear"](x, weight, bias))


def _unseen(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether nobody but the kernel wants to see this call, so that it may pass torch's dispatcher by.

    No tracer, no mode, no transform, no subclass, no gradient: the dispatcher, and the derivative's wrapper in Python
    even where none is wanted, take longer than all else here.
    """
    torch = _TORCH
    if torch.compiler.is_compiling() or type(a) not in _PLAIN or type(b) not in _PLAIN:
        return False
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return False
    for watching in _WATCHING:  # noqa: SIM110  # any() takes half a microsecond
        if watching():
            return False
    return True


# --- checks, also of tensors without data ---


def check_matmul(a: torch.Tensor, b: torch.Tensor, acc: str) -> None:
    """Raises TypeError or ValueError for what is no product of two fp16 matrices on one device."""
    if acc not in get_args(Acc):
        raise ValueError(f"acc={acc!r}: must be f32 or f16")
    _check_types(a=a, b=b)
    if a.ndim != 2 or b.ndim != 2:
        raise ValueError(f"a and b must be matrices, got shapes {tuple(a.shape)} and {tuple(b.shape)}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} do not fit: K is {a.shape[1]} and {b.shape[0]}")


def check_out(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """The same for the matrix that is written."""
    import torch

    _check_types(a=a, out=out)
    if tuple(out.shape) != (a.shape[0], b.shape[1]):
        raise ValueError(f"out: expected the shape {(a.shape[0], b.shape[1])}, got {tuple(out.shape)}")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (a, b, out)):
        raise ValueError("out: is not differentiable; use the result, or torch.no_grad()")


def check_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """The same for ``linear``."""
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
    import torch

    for name, tensor in tensors.items():
        if tensor.dtype != torch.float16:
            raise TypeError(f"{name}: expected torch.float16, got {tensor.dtype}")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name}: expected a strided tensor, got {tensor.layout}")
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        raise ValueError(f"{' and '.join(tensors)} are on different devices: {', '.join(sorted(map(str, devices)))}")


# --- what runs ---


def _matmul(a: torch.Tensor, b: torch.Tensor, acc: str = "f32") -> torch.Tensor:
    plan = planned(a, b, acc)
    plan.calls += 1
    return plan.run(a, b, None)


def planned(a: torch.Tensor, b: torch.Tensor, acc: str) -> Plan:
    """The plan of a product; all that it depends on is in its key."""
    dispatcher = current()
    try:
        lies = (a.shape, a.stride(), a.data_ptr() & 15, b.shape, b.stride(), b.data_ptr() & 15)
    except RuntimeError:  # no strides, or no memory
        check_matmul(a, b, acc)
        raise
    key = (acc, lies, a.get_device(), b.get_device(), a.dtype, b.dtype)
    plan = dispatcher.plans.get(key)
    if plan is None:
        check_matmul(a, b, acc)
        given = _given(a, b, cast("Acc", acc), None)
        plan = dispatcher.plan(key, a.get_device(), given)
    return plan


def _matmul_out(a: torch.Tensor, b: torch.Tensor, acc: str = "f32", *, out: torch.Tensor) -> None:
    import torch

    dispatcher = current()
    lies = (a.shape, a.stride(), b.shape, b.stride(), out.shape, out.stride())
    where = (a.data_ptr() & 15, b.data_ptr() & 15, out.data_ptr() & 15)
    key = (acc, lies, where, a.get_device(), b.get_device(), out.get_device(), a.dtype, b.dtype, out.dtype)
    plan = dispatcher.plans.get(key)
    if plan is None:
        check_matmul(a, b, acc)
        check_out(a, b, out)
        plan = dispatcher.plan(key, a.get_device(), _given(a, b, cast("Acc", acc), out))
        plan.spans = (_span(a), _span(b), _span(out))
    (span_a, span_b, span), start = plan.spans, out.data_ptr()
    before_a, before_b = start - a.data_ptr(), start - b.data_ptr()
    if (-span < before_a < span_a) or (-span < before_b < span_b):
        raise ValueError("out: shares memory with a or b")
    plan.calls += 1
    plan.run(a, b, out)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    dispatcher = current()
    kind: tuple[Any, ...] = () if bias is None else (bias.get_device(), bias.dtype, bias.shape)
    try:
        lies = (x.shape, x.stride(), weight.shape, weight.stride(), x.data_ptr() & 15, weight.data_ptr() & 15)
    except RuntimeError:
        check_linear(x, weight, bias)
        raise
    key = ("linear", lies, x.get_device(), weight.get_device(), x.dtype, weight.dtype, kind)
    plan = dispatcher.plans.get(key)
    if plan is None:
        check_linear(x, weight, bias)
        plan = dispatcher.plan(key, x.get_device(), _given_linear(x, weight), bias is not None)
    plan.calls += 1
    if not plan.on_kernel:
        return _torch_linear(x, weight, bias)
    d = plan.run(x, weight, None)
    return d if bias is None else d.add_(bias)


def _given(a: torch.Tensor, b: torch.Tensor, acc: Acc, out: torch.Tensor | None) -> Given:
    """A product of a (M,K) and b (K,N) in terms of the layout that serves b's strides."""
    (m, k), n = a.shape, b.shape[1]
    layout: Layout = "nn"
    as_a, as_b = matrix(a, m, k, *a.stride()), matrix(b, k, n, *b.stride())
    # A single row or column may be either; rows that start on 16 bytes need no copy.
    if (as_b is None or as_b.ld % 8) and (as_tn := matrix(b, n, k, b.stride(1), b.stride(0))):
        layout, as_b = "tn", as_tn
    as_d = Matrix(n) if out is None else matrix(out, m, n, *out.stride())
    return _lying(acc, layout, (m, n, k), (as_a, as_b, as_d), (m, n), _torch_matmul)


def _given_linear(x: torch.Tensor, weight: torch.Tensor) -> Given:
    k, n = x.shape[-1], weight.shape[0]
    m = x.numel() // k if k else 0
    as_x = None
    if m:
        # Batch dimensions that are no rows of one matrix have no view as such.
        with suppress(RuntimeError):
            flat = x.view(m, k)
            as_x = matrix(flat, m, k, *flat.stride())
    matrices = (as_x, matrix(weight, n, k, *weight.stride()), Matrix(n))
    return _lying("f32", "tn", (m, n, k), matrices, (*x.shape[:-1], n), _torch_linear)


def _lying(
    acc: Acc,
    layout: Layout,
    sizes: tuple[int, int, int],
    matrices: tuple[Matrix | None, Matrix | None, Matrix | None],
    shape: tuple[int, ...],
    vendor: Run,
) -> Given:
    m, n, k = sizes
    packed = Operands.packed(layout, n, k)
    problem, why_not = problem_of(acc, layout, m, n, k)
    a, b, d = matrices
    if problem is not None and (a is None or b is None or d is None):
        missing = [name for name, one in zip("ABD", matrices, strict=True) if one is None]
        problem, why_not = None, f"strides of {' and '.join(missing)} that no layout serves"
    return Given(problem, why_not, Sizes(m, n, k), Operands(a or packed.a, b or packed.b, d or packed.d), shape, vendor)


def _torch_matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    import torch

    if a.device.type == "cuda":
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    # The CPU's own fp16 product need not sum in fp32.
    product = torch.mm(a.float(), b.float())
    return product.half() if out is None else out.copy_(product)


def _torch_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    import torch

    if x.device.type == "cuda":
        return torch.nn.functional.linear(x, weight, bias).contiguous()
    wide = None if bias is None else bias.float()
    return torch.nn.functional.linear(x.float(), weight.float(), wide).half().contiguous()


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element."""
    if not tensor.numel():
        return 0
    reach = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return 2 * (int(reach) + 1)


# --- without data, and backwards ---


def _fake_matmul(a: torch.Tensor, b: torch.Tensor, acc: str = "f32") -> torch.Tensor:
    check_matmul(a, b, acc)
    return a.new_empty((a.shape[0], b.shape[1]))


def _fake_matmul_out(a: torch.Tensor, b: torch.Tensor, acc: str = "f32", *, out: torch.Tensor) -> None:
    check_matmul(a, b, acc)
    check_out(a, b, out)


def _fake_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    check_linear(x, weight, bias)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _keep_matmul(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
    a, b, acc = inputs
    # Only what a wanted gradient needs is kept.
    ctx.save_for_backward(a if b.requires_grad else None, b if a.requires_grad else None)
    ctx.acc = acc


def _matmul_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    of_a = _OPS["matmul"](grad, b.t(), ctx.acc) if ctx.needs_input_grad[0] else None
    of_b = _OPS["matmul"](a.t(), grad, ctx.acc) if ctx.needs_input_grad[1] else None
    return of_a, of_b, None


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
    x, weight, bias = inputs
    ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)
    ctx.biased = bias is not None


def _linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    rows = grad.reshape(-1, grad.shape[-1])
    of_x = of_weight = of_bias = None
    if wanted[0]:
        of_x = _OPS["matmul"](rows, weight, "f32").reshape(*grad.shape[:-1], weight.shape[1])
    if wanted[1]:
        of_weight = _OPS["matmul"](rows.t(), x.reshape(-1, x.shape[-1]), "f32")
    if ctx.biased and wanted[2]:
        of_bias = rows.sum(0)
    return of_x, of_weight, of_bias


def _register() -> tuple[Any, dict[str, Any]]:
    """Defines the operators; the library that holds them, which must live on, and their overloads."""
    import torch

    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    for name, run, fake in (
        ("matmul", _matmul, _fake_matmul),
        ("matmul.out", _matmul_out, _fake_matmul_out),
        ("linear", _linear, _fake_linear),
    ):
        for key in ("CPU", "CUDA"):
            library.impl(name, run, key)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    for name, backward, keep in (
        ("matmul", _matmul_backward, _keep_matmul),
        ("linear", _linear_backward, _keep_linear),
    ):
        torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=keep, lib=library)
    of = torch.ops.cudal2gen
    return library, {"matmul": of.matmul.default, "matmul.out": of.matmul.out, "linear": of.linear.default}


def _watchers() -> tuple[Any, Any, tuple[Any, ...]]:
    """torch, its plain kinds of tensors, and questions whose answers are false while nobody watches."""
    import torch

    watching: tuple[Any, ...] = (lambda: True,)
    try:
        own = torch._C
        transforms = own._functorch.peek_interpreter_stack
        watching = (own._len_torch_dispatch_stack, own._len_torch_function_stack, own._get_tracing_state, transforms)
    except AttributeError:
        pass  # a torch of another kind: all calls go through its dispatcher
    return torch, {torch.Tensor, torch.nn.Parameter}, watching


_LIBRARY, _OPS = _register()
_TORCH, _PLAIN, _WATCHING = _watchers()
