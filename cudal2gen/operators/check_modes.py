"""Checks whether operands are tensors, and whether a call may skip torch's dispatcher.

A call needs the dispatcher if a gradient, a mode, a transform or a tracer of torch must intercept it. If torch's
internals are not those that this module expects, every call goes through the dispatcher.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

OPTIONAL = ("bias", "offs")  # operands that a call may lack
VARIABLE = "CUDAL2GEN_BATCH_INVARIANT"
# The levels of batch invariance. FREE: each number of rows is computed by what is fastest for it. UNIFORM, under
# torch's deterministic algorithms: one kernel computes all numbers of rows, or torch computes all. INVARIANT, if
# demanded: one kernel computes all. A call without a kernel is refused, since torch's products are not invariant.
FREE, UNIFORM, INVARIANT = range(3)


def check_tensors(**values: Any) -> None:
    """Raises TypeError for a value that is neither a tensor nor a tracer's substitute for one. Values whose names are
    in ``OPTIONAL`` may be None."""
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
    """Whether a call may skip torch's dispatcher: no tracer, mode, transform, subclass or gradient needs it.

    The dispatcher and the Python wrapper of the derivative take longer than all the rest of a call. Autocast and
    ``lazy`` operands are not checked here, because that takes long too: C++ has no plan for such calls, so only calls
    without a plan check for them.
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
    """Whether a tensor is lazily negated or a zero tensor, whose elements only torch's dispatcher computes."""
    for tensor in tensors:  # noqa: SIM110  # any() takes half a microsecond
        if tensor is not None and (tensor.is_neg() or tensor._is_zerotensor()):
            return True
    return False


def local(arguments: Sequence[Any]) -> bool:
    """Whether an operator's tensors are on the CPU or on a GPU and nothing in torch must intercept the call.

    This is for calls within the dispatcher, after the check for gradients.
    """
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
    """Whether torch is set to use deterministic algorithms, or to warn of others."""
    return bool(_deterministic())


class BatchInvariance:
    """Whether all calls of the process must be batch-invariant (``always``), by ``CUDAL2GEN_BATCH_INVARIANT``."""

    always = False


def invariance(demanded: bool = False) -> int:
    """The level of batch invariance of a call now: ``FREE``, ``UNIFORM`` or ``INVARIANT``. ``demanded``: whether the
    call's own argument demands invariance."""
    if demanded or BatchInvariance.always:
        return INVARIANT
    return UNIFORM if _deterministic() else FREE


def refusal(reason: str) -> Callable[..., Any]:
    """A function that raises RuntimeError, for a call that must be batch-invariant and that no kernel computes."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"cudal2gen: batch invariance was demanded, and no kernel computes this call ({reason}). torch's own "
            f"products are not batch-invariant: call without batch_invariant=True or {VARIABLE}=1 to let torch compute"
        )

    return refuse


def _always() -> bool:
    """Whether the environment variable ``VARIABLE`` is 1. Raises ValueError for values other than 0 and 1."""
    value = os.environ.get(VARIABLE, "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={value}: must be 0 or 1")
    return value == "1"


def foreign(operands: Sequence[Any], *, functions: bool = False) -> str:
    """Why torch's own functions must compute with these operands; "" if our operators may.

    A subclass with rules of its own (a DTensor, a quantized weight) supports torch's functions and not ours, and a
    nested tensor is no matrix. ``functions``: whether to include subclasses whose rules are for functions
    (``__torch_function__``) and not for operators.
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
    """Whether a subclass of torch.Tensor has rules for operators, or with ``functions`` also for torch's functions."""
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
        pass  # an unknown version of torch: the function above sends all calls through the dispatcher
    return torch, {torch.Tensor, torch.nn.Parameter}, watchers


TORCH, _PLAIN, _WATCHERS = _watchers()
_VALUES = {type(None), bool, int, float, str, TORCH.dtype}  # types of arguments that are no tensors
# What a class has if it defines no rules: of operators (``__torch_dispatch__``), and of functions: either the one that
# torch.Tensor has, or the one that switches them off (``__torch_function__``).
_NO_RULES, _ALL_FUNCTIONS = TORCH.Tensor.__torch_dispatch__, TORCH.Tensor.__torch_function__.__func__
_NO_FUNCTIONS = TORCH._C._disabled_torch_function_impl
_is_compiling, _is_grad_enabled, _deterministic = (
    TORCH.compiler.is_compiling,
    TORCH.is_grad_enabled,
    TORCH.are_deterministic_algorithms_enabled,
)  # local names are faster to look up
BatchInvariance.always = _always()
