"""Registers our operators with torch.

They are defined by schemas and not by ``torch.library.custom_op``, whose checks take microseconds at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from cudal2gen.operators.casting import KEYS, with_autocast
from cudal2gen.operators.check_modes import BatchInvariance, compiling, foreign, in_forward_mode, local, refusal
from cudal2gen.operators.dispatch import current

NAMESPACE = "cudal2gen"
INVARIANT_OVERLOAD = "batch_invariant"  # the overload of calls that demand batch invariance

_DEFINED: dict[str, tuple[Operator, Any]] = {}  # operators and their overloads by name
_LIBRARIES: list[Any] = []  # keeps the libraries alive, and with them their operators
# The first key covers every device; on a device without kernels the plan is torch's product. It does not cover nested
# tensors.
_KEYS = ("CompositeExplicitAutograd", "NestedTensorCPU", "NestedTensorCUDA")
# The keys of lazily conjugated or negated tensors. torch resolves such operands, but not a tensor that is written into.
_SIGNED = ("Conjugate", "Negative")


class Operator(NamedTuple):
    """An operator to be registered with torch.

    - ``run`` computes the operator on tensors of any device.
    - ``fake`` makes a result of the right shape and type without data, for torch.compile and meta tensors.
    - ``by_torch`` computes it by torch's own functions, for tangents and for subclasses that support only these.
    - ``setup_context`` saves what the derivative needs of a call; ``backward`` computes the derivative.
    - ``vmap``: see torch.library.register_vmap.
    - ``batch_invariant``: whether calls must be batch-invariant, so that torch's functions may not replace it.
    - ``follows_autocast``: whether autocast casts the operands, as it does for torch's corresponding operator.
    """

    schema: str
    run: Callable[..., Any]
    fake: Callable[..., Any]
    by_torch: Callable[..., Any]
    setup_context: Callable[..., None] | None = None
    backward: Callable[..., Any] | None = None
    vmap: Callable[..., Any] | None = None
    batch_invariant: bool = False
    follows_autocast: bool = True

    def torch_fallback(self, reason: str) -> Callable[..., Any]:
        """A function that computes a call by torch's own functions, or refuses a call that must be batch-invariant."""
        return refusal(reason) if self.batch_invariant or BatchInvariance.always else self.by_torch

    @property
    def name(self) -> str:
        """The name in the schema, with that of the overload if it has one."""
        return self.schema.partition("(")[0]

    @property
    def writes(self) -> bool:
        """Whether the operator writes into one of its arguments."""
        return "!" in self.schema

    @property
    def casts(self) -> bool:
        """Whether autocast casts the operands. It does not if the operator ``writes``."""
        return self.follows_autocast and not self.writes

    def write_signed(self, *arguments: Any, **options: Any) -> None:
        """Computes, by torch's functions, a call with a lazily conjugated or negated tensor."""
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
            library.impl(operator.name, with_autocast(operation), key)
        if operator.vmap is not None:
            mapped = with_autocast(operator.vmap) if operator.casts else operator.vmap
            torch.library.register_vmap(qualified, mapped, lib=library)
        if operator.backward is not None:
            library.impl(operator.name, _differentiable(operator, operation), "Autograd")
    return overloads


def overload_name(operator: str, batch_invariant: bool) -> str:
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
    return (with_autocast(fallback) if operator.casts else fallback)(*arguments, **options)


def _differentiable(operator: Operator, overload: Any) -> Callable[..., Any]:
    """The operator with its derivative, as torch's dispatcher calls it under the key Autograd.

    ``torch.library.register_autograd`` is not used, because torch.func.grad refuses the functions that it makes.
    """
    import torch
    from torch._functorch.utils import enable_single_level_autograd_function
    from torch.autograd.forward_ad import _set_fwd_grad_enabled

    defaults = [argument.default_value for argument in overload._schema.arguments]

    def without_autograd(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*arguments)

    def forward(*arguments: Any) -> Any:
        # Both modes are off within an autograd Function. The next level of nested transforms needs them; below autograd
        # they have no effect.
        with torch.enable_grad(), _set_fwd_grad_enabled(True):
            return without_autograd(*arguments)

    class Derivative(torch.autograd.function._SingleLevelFunction):  # type: ignore[misc]  # torch has no types here
        """A derivative for one level of transforms, like functorch's own derivatives."""

    Derivative.__name__ = f"{operator.name}_derivative"
    methods = {"forward": forward, "setup_context": operator.setup_context, "backward": operator.backward}
    for name, method in methods.items():
        setattr(Derivative, name, staticmethod(cast("Callable[..., Any]", method)))

    def run(*arguments: Any) -> Any:
        if in_forward_mode() and has_tangents(arguments):
            return operator.torch_fallback("tangents")(*arguments)
        differentiable = torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
        if not differentiable and local(arguments):
            return operator.run(*arguments)  # the dispatcher would call the same function
        if reason := foreign(arguments):
            return operator.torch_fallback(reason)(*arguments)
        if differentiable:
            with enable_single_level_autograd_function():
                return Derivative.apply(*arguments, *defaults[len(arguments) :])
        return without_autograd(*arguments)

    return run


def has_tangents(arguments: Sequence[Any]) -> bool:
    """Whether a tensor has a tangent (a forward-mode derivative), which only torch's functions support."""
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
