"""Registers operators with torch, by schema and not by ``torch.library.custom_op``, whose checks cost microseconds at
each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from cudal2gen.operators.casting import KEYS, following
from cudal2gen.operators.check_modes import BatchInvariance, compiling, foreign, in_forward_mode, local, refusal
from cudal2gen.operators.dispatch import current

NAMESPACE = "cudal2gen"
INVARIANT_OVERLOAD = "batch_invariant"  # the overload of calls that demand batch invariance

_DEFINED: dict[str, tuple[Operator, Any]] = {}  # operators and their overloads by name
_LIBRARIES: list[Any] = []  # keeps the libraries alive, and with them their operators
# The first key serves every device; on one without kernels the plan is torch's product. Nested tensors do not have it.
_KEYS = ("CompositeExplicitAutograd", "NestedTensorCPU", "NestedTensorCUDA")
# Tensors with a lazy sign: torch resolves them, except one that is written and not returned.
_SIGNED = ("Conjugate", "Negative")


class Operator(NamedTuple):
    """An operator to be registered with torch."""

    schema: str
    run: Callable[..., Any]  # computes it with tensors on any device
    fake: Callable[..., Any]  # its result's shape and type, for torch.compile and meta tensors
    by_torch: Callable[..., Any]  # by torch's own functions: for tangents, and for subclasses that only those accept
    setup_context: Callable[..., None] | None = None  # what the derivative keeps of a call
    backward: Callable[..., Any] | None = None
    vmap: Callable[..., Any] | None = None  # see torch.library.register_vmap
    batch_invariant: bool = False  # whether torch's functions may not stand in for it
    follows_autocast: bool = True  # as torch's operator in its place does

    def torch_fallback(self, reason: str) -> Callable[..., Any]:
        """What computes a call by torch's own functions; it refuses a call that must be batch-invariant."""
        return refusal(reason) if self.batch_invariant or BatchInvariance.always else self.by_torch

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]

    @property
    def writes(self) -> bool:
        """Whether it writes into a tensor of the caller's."""
        return "!" in self.schema

    @property
    def casts(self) -> bool:
        """Whether autocast casts its operands: not those of a call that writes into a tensor of the caller's."""
        return self.follows_autocast and not self.writes

    def write_signed(self, *arguments: Any, **options: Any) -> None:
        """A call with a tensor whose sign is lazy."""
        self.torch_fallback("conjugated or negated lazily")(*arguments, **options)


def register(*operators: Operator) -> dict[str, Any]:
    """Defines operators and returns their overloads by name."""
    import torch

    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    _LIBRARIES.append(library)
    overloads = {}
    for operator in operators:
        library.define(operator.schema, tags=(torch.Tag.needs_fixed_stride_order,))
        for key in _KEYS:
            library.impl(operator.name, operator.run, key)
        qualified = f"{NAMESPACE}::{operator.name}"
        torch.library.register_fake(qualified, operator.fake, lib=library)
        packet, _, overload = operator.name.partition(".")
        overloads[operator.name] = operation = getattr(getattr(torch.ops.cudal2gen, packet), overload or "default")
        _DEFINED[operator.name] = operator, operation
        for key in _SIGNED if operator.writes else ():
            library.impl(operator.name, operator.write_signed, key)
        for key in KEYS.values() if operator.casts else ():
            library.impl(operator.name, following(operation), key)
        if operator.vmap is not None:
            mapped = following(operator.vmap) if operator.casts else operator.vmap
            torch.library.register_vmap(qualified, mapped, lib=library)
        if operator.backward is not None:
            library.impl(operator.name, _differentiable(operator, operation), "Autograd")
    return overloads


def named(operator: str, batch_invariant: bool) -> str:
    """The name of an operator, or of its overload that is batch-invariant."""
    return f"{operator}.{INVARIANT_OVERLOAD}" if batch_invariant else operator


def call(name: str, *arguments: Any, **options: Any) -> Any:
    """Calls an operator by torch's dispatcher, or torch's own functions for operands that only those accept."""
    operator, overload = _DEFINED[name]
    operands = (*arguments, *options.values())
    reason = foreign(operands, functions=True)
    if not (reason or operator.backward or compiling()) and in_forward_mode() and has_tangents(operands):
        reason = "tangents"
    if not reason:
        return overload(*arguments, **options)
    if not compiling():
        current().count(reason)
    fallback = operator.torch_fallback(reason)
    return (following(fallback) if operator.casts else fallback)(*arguments, **options)


def _differentiable(operator: Operator, overload: Any) -> Callable[..., Any]:
    """The operator with its derivative, as torch's dispatcher calls it under the key Autograd.

    ``torch.library.register_autograd`` is not used, because torch.func.grad refuses the functions that it makes.
    """
    import torch
    from torch._functorch.utils import enable_single_level_autograd_function
    from torch.autograd.forward_ad import _set_fwd_grad_enabled

    defaults = [argument.default_value for argument in overload._schema.arguments]

    def below(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*arguments)

    def forward(*arguments: Any) -> Any:
        # Both modes are off within a Function. The next level of nested transforms needs them; below autograd they have
        # no effect.
        with torch.enable_grad(), _set_fwd_grad_enabled(True):
            return below(*arguments)

    class Derivative(torch.autograd.function._SingleLevelFunction):  # type: ignore[misc]  # torch has no types here
        """A derivative of one level of transforms, as functorch's own are."""

    Derivative.__name__ = f"{operator.name}_derivative"
    methods = {"forward": forward, "setup_context": operator.setup_context, "backward": operator.backward}
    for name, method in methods.items():
        setattr(Derivative, name, staticmethod(cast("Callable[..., Any]", method)))

    def run(*arguments: Any) -> Any:
        if in_forward_mode() and has_tangents(arguments):
            return operator.torch_fallback("tangents")(*arguments)
        differentiable = torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
        if not differentiable and local(arguments):
            return operator.run(*arguments)  # what the dispatcher would call in the end
        if reason := foreign(arguments):
            return operator.torch_fallback(reason)(*arguments)
        if differentiable:
            with enable_single_level_autograd_function():
                return Derivative.apply(*arguments, *defaults[len(arguments) :])
        return below(*arguments)

    return run


def has_tangents(arguments: Sequence[Any]) -> bool:
    """Whether a tensor has a tangent (a forward-mode derivative), which only torch's functions compute with."""
    from torch import Tensor
    from torch.autograd.forward_ad import unpack_dual

    return any(isinstance(argument, Tensor) and unpack_dual(argument).tangent is not None for argument in arguments)


def no_script(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets ``torch.jit.script`` refuse a function with a clear message."""
    function.__prepare_scriptable__ = partial(refuse_script, function.__name__, "a function")  # type: ignore[attr-defined]
    return function


def refuse_script(name: str, subject: str) -> None:
    """Raises TypeError; torch.jit.script calls this to get what it should compile."""
    raise TypeError(
        f"cudal2gen.{name}: torch.jit.script cannot compile {subject} that chooses a kernel at each call; "
        "use torch.compile or torch.export"
    )
