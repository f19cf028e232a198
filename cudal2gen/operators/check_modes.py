"""Checks whether operands are tensors, and whether anything in torch has to see a call: a gradient, a mode, a tracer.

A call that nothing has to see skips torch's dispatcher. If torch's internals are not as known here, no call does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

OPTIONAL = ("bias", "offs")  # operands that a call may lack
VARIABLE = "CUDAL2GEN_BATCH_INVARIANT"
# How far calls with other numbers of rows must be computed alike. FREE: each by what is fastest for it. ALIKE, under
# torch's deterministic algorithms: by one kernel for all numbers of rows, or by torch for all. INVARIANT, on demand: by
# one kernel; what no kernel computes is refused, since torch's own products promise nothing of the kind.
FREE, ALIKE, INVARIANT = range(3)


def check_tensors(**values: Any) -> None:
    """Raises TypeError for a value that is no tensor and stands for none in a trace. Those of ``OPTIONAL`` may be
    None."""
    for name, value in values.items():
        if value is None and name in OPTIONAL:
            continue
        if not isinstance(value, TORCH.Tensor) and not hasattr(type(value), "__torch_function__"):
            kind = type(value).__name__
            raise TypeError(f"{name}: expected a tensor, got {kind}; torch.as_tensor makes one of numbers")


def compiling() -> bool:
    """Whether torch.compile or torch.export traces the call."""
    return bool(_is_compiling())


def undispatched(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> bool:
    """Whether a call may skip torch's dispatcher: no tracer, mode, transform, subclass or gradient is at work.

    The dispatcher and the derivative's wrapper in Python take longer than everything else here. Autocast and ``lazy``
    operands are not looked for, which takes long too: C++ has no plan for them, so only calls without a plan need to
    look.
    """
    # Written out without helpers, because every planned call runs all of it.
    if _is_compiling() or type(a) not in _PLAIN or type(b) not in _PLAIN:
        return False
    if _is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return False
    if c is not None and (type(c) not in _PLAIN or (c.requires_grad and _is_grad_enabled())):
        return False
    for watches in _WATCHERS:  # noqa: SIM110  # any() takes half a microsecond
        if watches():
            return False
    return True


def lazy(*tensors: torch.Tensor | None) -> bool:
    """Whether a tensor is negated lazily or is a zero tensor: only torch's dispatcher gives it its elements."""
    return any(tensor is not None and (tensor.is_neg() or tensor._is_zerotensor()) for tensor in tensors)


def local(arguments: Sequence[Any]) -> bool:
    """Whether an operator's tensors lie on the CPU or on a GPU and nothing in torch has to see the call. For calls
    within the dispatcher, where gradients are dealt with already."""
    for argument in arguments:
        if type(argument) in _PLAIN:
            if not (argument.is_cuda or argument.is_cpu) or lazy(argument):
                return False
        elif type(argument) not in _VALUES:
            return False
    for watches in _WATCHERS:  # noqa: SIM110  # any() takes half a microsecond
        if watches():
            return False
    return True


def deterministic() -> bool:
    """Whether torch was asked for deterministic algorithms, or warns of others."""
    return bool(_deterministic())


class BatchInvariance:
    """Whether all calls of the process are demanded to be batch-invariant: ``CUDAL2GEN_BATCH_INVARIANT``."""

    always = False


def invariance(demanded: bool = False) -> int:
    """``FREE``, ``ALIKE`` or ``INVARIANT`` for a call of now; ``demanded``: by its own argument."""
    if demanded or BatchInvariance.always:
        return INVARIANT
    return ALIKE if _deterministic() else FREE


def refusal(reason: str) -> Callable[..., Any]:
    """A function that refuses a call which was to be batch-invariant: it raises RuntimeError."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"cudal2gen: batch invariance was demanded, and no kernel computes this call ({reason}). torch's own "
            f"products are not batch-invariant: call without batch_invariant=True or {VARIABLE}=1 to let torch compute"
        )

    return refuse


def _always() -> bool:
    value = os.environ.get(VARIABLE, "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={value}: must be 0 or 1")
    return value == "1"


def foreign(operands: Sequence[Any], *, functions: bool = False) -> str:
    """Why torch's own functions have to compute with these operands, in words; "" if our operators may.

    A subclass with rules of its own (a DTensor, a quantized weight) knows torch's functions and not ours, and a nested
    tensor is no matrix. ``functions``: also of a subclass whose rules are for functions and not for operators.
    """
    for operand in operands:
        kind = type(operand)
        if kind in _VALUES or not isinstance(operand, TORCH.Tensor):
            continue
        if kind in _PLAIN:
            if operand.is_nested:
                return "a nested tensor"
        elif _has_rules(kind, functions):
            return f"a {kind.__name__}, which has rules of its own"
    return ""


def _has_rules(kind: type, functions: bool) -> bool:
    if kind.__torch_dispatch__ is not _NO_RULES:  # type: ignore[attr-defined]
        return not kind.__module__.startswith("torch._subclasses.")  # torch's own, by which it traces
    function = kind.__torch_function__  # type: ignore[attr-defined]
    return functions and function is not _NO_FUNCTIONS and getattr(function, "__func__", None) is not _ALL_FUNCTIONS


def in_forward_mode() -> bool:
    """Whether torch computes tangents (forward-mode derivatives)."""
    return bool(TORCH.autograd.forward_ad._current_level >= 0)


def _watchers() -> tuple[Any, Any, tuple[Any, ...]]:
    """torch, its plain classes of tensors, and functions that are false while nothing in torch intercepts calls."""
    import torch

    watchers: tuple[Any, ...] = (lambda: True,)
    try:
        internals = torch._C
        watchers = (
            internals._len_torch_dispatch_stack,
            internals._len_torch_function_stack,
            internals._get_tracing_state,
            internals._functorch.peek_interpreter_stack,
            in_forward_mode,
        )
    except AttributeError:
        pass  # an unknown torch: the function above lets all calls go through its dispatcher
    return torch, {torch.Tensor, torch.nn.Parameter}, watchers


_VALUES = {type(None), bool, int, float, str}
TORCH, _PLAIN, _WATCHERS = _watchers()
_NO_RULES, _ALL_FUNCTIONS = TORCH.Tensor.__torch_dispatch__, TORCH.Tensor.__torch_function__.__func__
_NO_FUNCTIONS = TORCH._C._disabled_torch_function_impl
_VALUES.add(TORCH.dtype)
_is_compiling, _is_grad_enabled, _deterministic = (
    TORCH.compiler.is_compiling,
    TORCH.is_grad_enabled,
    TORCH.are_deterministic_algorithms_enabled,
)  # local names are faster to look up
BatchInvariance.always = _always()
