"""Offers our kernels to torch.compile: Inductor times them together with ATen's and Triton's and takes the fastest.

``offer`` makes ``cudal2gen_mm`` one of the choices for each ``mm`` under max-autotune. It also lets Inductor time
``cudal2gen::linear`` in ranges of rows against torch's own product, which Inductor may compute by Triton. Inductor
times the nearest kernel of a pack, whether `bench` measured it or not. The interfaces are those of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

from cudal2gen.operators.call_torch import public_linear
from cudal2gen.operators.check_modes import VARIABLE, BatchInvariance
from cudal2gen.operators.check_operands import check_linear
from cudal2gen.operators.dispatch import current
from cudal2gen.operators.plan_requests import Request, key_of, request_linear, request_matmul
from cudal2gen.operators.plans import CallPlan
from cudal2gen.operators.registration import Operator, register
from kernelproof.ground.element import element_or_none
from kernelproof.ground.errors import WrongInput

if TYPE_CHECKING:
    import torch

OFFERED = "offered_linear"  # name of the operator that Inductor times instead of ``linear``
FIRST = "2.13"  # the first torch with all parts of the interface
# Numbers of rows between which another kernel is often the best: a decoded token, small batches, a prefill.
SPLIT_POINTS = (1, 16, 64, 256, 1024, 4096)


def cudal2gen_mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """``out = a @ b`` by the nearest kernel, or by torch if no kernel computes it.

    It is made for ``torch._inductor.config.external_matmul``: a (M,K), b (K,N) and out (M,N) have any type and strides.
    """
    import torch

    if element_or_none(a.dtype) is None or a.dtype != b.dtype or out.dtype != a.dtype:
        torch.mm(a, b, out=out)
        return
    key = (a.shape, a.stride(), a.data_ptr() & 15, b.shape, b.stride(), b.data_ptr() & 15, a.dtype, a.device)
    plan = _plan((*key, out.stride(), out.data_ptr() & 15), lambda: request_matmul(a, b, "f32", out))
    current().any_kernel.call(plan, a, b, out)


def _plan(key: tuple[Any, ...], request: Callable[[], Request]) -> CallPlan:
    """The plan by the nearest kernel. ``key``: all that the plan depends on. ``request`` makes the request of a call
    that has no plan yet."""
    dispatcher = current().any_kernel
    return dispatcher.plans.get(key) or dispatcher.plan(key, request())


def _offered_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``cudal2gen.linear`` by the nearest kernel, measured or not."""

    def request() -> Request:
        check_linear(x, weight, bias)
        return request_linear(x, weight, bias is not None)

    plan = _plan(("linear", *map(key_of, (x, weight, bias))), request)
    d: torch.Tensor = current().any_kernel.call(plan, x, weight, bias)
    return d


def _fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor like the result, without values, as torch.compile needs it."""
    check_linear(x, weight, bias)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def offer(split_points: Sequence[int] = SPLIT_POINTS, least_gain: float = 1.02) -> None:
    """Lets torch.compile choose our kernels by its own timings in this process.

    - ``split_points``: ascending numbers of rows of ``linear``'s input. If the number of rows is dynamic, Inductor
      makes a choice for each range between them.
    - ``least_gain``: how many times faster than the unchanged operator a choice must be.

    A second call changes only these two. Raises WrongInput if the installed torch has no such interface, and if all
    calls must be batch-invariant, because Inductor chooses by the number of rows.
    """
    import torch

    if BatchInvariance.always:
        raise WrongInput(f"{VARIABLE}=1: what is offered to torch.compile is chosen by the number of rows")

    if list(split_points) != sorted(set(split_points)) or not all(point > 0 for point in split_points):
        raise WrongInput(f"split_points={list(split_points)}: must be positive and ascending")
    interface = _interface()
    configs: list[Any] = [interface.config(_offered()), interface.config(torch.nn.functional.linear)]
    interface.register(
        torch.ops.cudal2gen.linear.default,
        configs=configs,
        dispatch_on={"tensor_name": "x", "dim": 0},
        split_points=list(split_points),
        min_speedup_threshold=least_gain,
    )
    if cudal2gen_mm not in interface.external:
        interface.external.append(cudal2gen_mm)
        interface.register_extern(cudal2gen_mm)  # now, so that code from Inductor's cache finds it too


def withdraw() -> None:
    """Undoes ``offer``: code that is compiled later has none of our kernels as choices. Does nothing if the installed
    torch has no such interface."""
    import torch

    try:
        interface = _interface()
    except WrongInput:
        return
    if cudal2gen_mm in interface.external:
        interface.external.remove(cudal2gen_mm)
    interface.lowerings.pop(torch.ops.cudal2gen.linear.default, None)


class _Interface(NamedTuple):
    """The parts of Inductor that ``offer`` uses.

    - ``external``: the list of external products; ``register_extern`` registers one of them.
    - ``config`` makes a choice for an operator, ``register`` registers choices, and ``lowerings`` has the operators
      with registered choices.
    """

    external: list[Any]
    register_extern: Callable[..., Any]
    config: Callable[..., Any]
    register: Callable[..., Any]
    lowerings: dict[Any, Any]


def _interface() -> _Interface:
    """The interface of the installed torch. Raises WrongInput if it lacks a part; then nothing was changed."""
    import torch

    try:
        from torch._inductor import config
        from torch._inductor.kernel.custom_op import CustomOpConfig, register_custom_op_autotuning
        from torch._inductor.kernel.mm import lazy_register_extern_choice
        from torch._inductor.lowering import user_lowerings

        if "min_speedup_threshold" not in signature(register_custom_op_autotuning).parameters:
            raise ImportError("register_custom_op_autotuning has no min_speedup_threshold")
        external: list[Any] = config.external_matmul
    except (ImportError, AttributeError) as error:
        raise WrongInput(
            f"torch {torch.__version__} has no interface for choices of others ({error}); torch {FIRST} has"
        ) from None
    return _Interface(
        external, lazy_register_extern_choice, CustomOpConfig, register_custom_op_autotuning, user_lowerings
    )


@cache
def _offered() -> Any:
    """The operator that Inductor times instead of ``linear``. It is defined once."""
    import cudal2gen.operators.torch_operators  # noqa: F401  # defines linear

    schema = f"{OFFERED}(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor"
    return register(Operator(schema, _offered_linear, _fake, public_linear))[OFFERED]
