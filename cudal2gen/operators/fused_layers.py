"""``patch``: lets a model's layers use our kernels, and on request fuses layers that one kernel computes together.

Whether a module is fused depends on what its ``forward`` does, not on its name. It is traced (``torch.fx``, without
tracing into children); the trace must be a chain of children in which an activation follows a linear layer, or the
gated product of three children, as in Llama. A child with hooks, another forward or another type is called as before.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from cudal2gen.kernel.fusion import Activation
from cudal2gen.operators.epilogues import HALF
from cudal2gen.operators.fused_operators import gated_pair, linear
from cudal2gen.operators.grouped import grouped_mm
from cudal2gen.operators.layers import (
    CAST_TYPES,
    TYPES,
    Replaced,
    as_typed,
    check_model,
    forward_linear,
    replace_layers,
    set_forward,
    uncast,
)

if TYPE_CHECKING:
    import torch

# Classes of activations in transformers that compute the same formula as torch's.
TRANSFORMERS: dict[str, Activation] = {
    "GELUActivation": "gelu", "GELUTanh": "gelu_tanh", "NewGELUActivation": "gelu_tanh", "SiLUActivation": "silu",
    "FastGELUActivation": "gelu_tanh", "AccurateGELUActivation": "gelu_tanh",
}  # fmt: skip


def patch(model: torch.nn.Module, fuse: bool = False) -> Replaced:
    """Lets every ``nn.Linear`` of fp16, bf16 or fp32 in a model compute by ``cudal2gen.linear``; parameters and hooks
    stay.

    A call has one type of fp16 and bf16, or runs under autocast to one of them, as fp32 models are trained; torch
    computes other calls. A patched layer is not patched again.

    ``fuse`` also fuses a linear layer with its activation, in ``nn.Sequential`` and in modules whose forward is a chain
    of children; ``down(act(gate(x)) * up(x))`` of layers without biases; and transformers' experts, as grouped
    products. To find these, each module with such children is traced once, on symbols. A kernel that computes a gate
    reads an interleaved copy of both weights, so their memory doubles; ``derived`` says when copies are made again.
    ``state_dict`` does not contain them. Gates and experts whose weights autocast would cast are not fused. Raises
    TypeError for what is no module.
    """
    check_model(model)
    replaced = replace_layers(model)
    if fuse:
        for name, module in model.named_modules():
            if "forward" not in module.__dict__ and (fused := _fuse(module)):
                replaced.fused[name] = fused
    return replaced


def _fuse(module: torch.nn.Module) -> str:
    """Fuses a module if possible; returns which of its layers, or ""."""
    import torch

    if _are_experts(module):
        set_forward(module, _forward_experts)
        return "experts as grouped products"
    if type(module) is torch.nn.Sequential:
        pairs = _fusable_pairs(module._modules.items())
        if pairs:
            set_forward(module, _forward_sequential)
        return pairs
    children = dict(module.named_children())
    if not any(map(activation_of, children.values())) or not any(map(_is_layer, children.values())):
        return ""
    nodes = _trace(module)
    chain = _children(nodes[1:-1], nodes[0]) if nodes else ()
    if chain and (pairs := _fusable_pairs((name, children[name]) for name in chain)):
        set_forward(module, _forward_chain, chain)
        return pairs
    if (gated := _gate_of(nodes)) and _is_pair(*(children[name] for name in gated[:3])):
        set_forward(module, _forward_gated, *gated)
        return f"{gated[0]}, {gated[1]}, {gated[2]}"
    return ""


def activation_of(module: torch.nn.Module) -> Activation | None:
    """The activation of a module, if a kernel supports it."""
    import torch

    kind = type(module)
    if kind is torch.nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    if kind.__module__ == "transformers.activations":
        return TRANSFORMERS.get(kind.__name__)
    return "relu" if kind is torch.nn.ReLU else "silu" if kind is torch.nn.SiLU else None


def _is_layer(module: torch.nn.Module) -> bool:
    import torch

    return type(module) is torch.nn.Linear or _is_conv1d(module)


def _is_conv1d(module: torch.nn.Module) -> bool:
    """GPT-2's linear layer, whose weight is (K,N)."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def _is_pair(gate: torch.nn.Module, activation: torch.nn.Module, up: torch.nn.Module) -> bool:
    import torch

    if type(gate) is not torch.nn.Linear or type(up) is not torch.nn.Linear or activation_of(activation) is None:
        return False
    plain = gate.bias is None and up.bias is None and gate.weight.shape == up.weight.shape
    return plain and gate.weight.shape[0] % HALF == 0 and gate.weight.dtype in TYPES


def _fusable_pairs(children: Iterable[tuple[str, torch.nn.Module]]) -> str:
    """The layers that an activation follows, each with it, in words."""
    named = list(children)
    return "; ".join(
        f"{name}, {following}"
        for (name, layer), (following, activation) in pairwise(named)
        if _is_layer(layer) and layer.weight.dtype in CAST_TYPES and activation_of(activation)
    )


# --- what a forward does ---


def _trace(module: torch.nn.Module) -> list[torch.fx.Node]:
    """The nodes of a module's trace from its only argument to its result; none if there are several arguments or the
    forward cannot be traced."""
    from torch import fx

    class Tracer(fx.Tracer):  # type: ignore[misc]  # torch has no types here
        def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
            return True

    try:
        nodes = list(Tracer().trace(module).nodes)
    except Exception:  # a forward may raise anything on symbols
        return []
    inputs = [node for node in nodes if node.op == "placeholder"]
    plain = len(inputs) == 1 and nodes[-1].args == (nodes[-2],)
    return nodes if plain else []


def _children(nodes: list[torch.fx.Node], argument: torch.fx.Node) -> tuple[str, ...]:
    """Names of the children that these nodes call, each on the result of the one before; none if a node does anything
    else."""
    names = []
    for node in nodes:
        if node.op != "call_module" or node.args != (argument,) or node.kwargs or "." in node.target:
            return ()
        names.append(node.target)
        argument = node
    return tuple(names)


def _gate_of(nodes: list[torch.fx.Node]) -> tuple[Any, ...]:
    """Names of gate, activation and up in ``down(act(gate(x)) * up(x))``, and of the chain after the product; or
    nothing."""
    products = [node for node in nodes if node.op == "call_function" and node.target is operator.mul]
    if len(products) != 1 or len(nodes) < 6 or products[0] is not nodes[4]:
        return ()
    product, after = products[0], nodes[5:-1]
    for first, second in (product.args, product.args[::-1]):
        branch = [node for node in nodes[1:4] if node is not second]
        gate = _children(branch, nodes[0])
        up = _children([second], nodes[0])
        chain = _children(after, product)
        if len(gate) == 2 and branch[-1] is first and up and len(chain) == len(after):
            return (*gate, *up, chain)
    return ()


# --- forwards ---


def _as_called(module: torch.nn.Module) -> bool:
    """Whether calling a child runs its forward alone: it has no hooks and no forward of its own."""
    from torch.nn.modules import module as modules

    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    if hooks or modules._has_any_global_hook():
        return False
    # ``patched`` is not used here: torch.compile traces through partial functions, not through their classes.
    return "forward" not in module.__dict__ or getattr(module.__dict__["forward"], "func", None) is forward_linear


def _gathered(module: torch.nn.Module) -> bool:
    """Whether FSDP gathers a module's weights. It does so into the same memory and raises no version counter, so that
    copies would be outdated unnoticed."""
    return bool(module.__dict__.get("_is_fsdp_managed_module", False))


def _forward_sequential(module: torch.nn.Sequential, x: Any) -> Any:
    return _run_chain(list(module._modules.values()), x)


def _forward_chain(module: torch.nn.Module, names: tuple[str, ...], x: Any) -> Any:
    return _run_chain([module._modules[name] for name in names], x)


def _run_chain(children: list[Any], x: Any) -> Any:
    """Calls one child after the other, but a layer and the activation after it at once."""
    place = 0
    while place < len(children):
        layer, following = children[place], children[place + 1] if place + 1 < len(children) else None
        activation = None if following is None or not _is_layer(layer) else activation_of(following)
        if activation is not None and as_typed(x, layer.weight) and _as_called(layer) and _as_called(following):
            x = linear(x, layer.weight.t() if _is_conv1d(layer) else layer.weight, layer.bias, activation)
            place += 2
        else:
            x = layer(x)
            place += 1
    return x


def _forward_gated(module: torch.nn.Module, gate: str, act: str, up: str, after: tuple[str, ...], x: Any) -> Any:
    first, activation, second = (module._modules[name] for name in (gate, act, up))
    assert first is not None and activation is not None and second is not None  # noqa: PT018
    # What autocast makes of weights is new in each of its contexts: a copy of it would be made for one call.
    typed = as_typed(x, first.weight) and uncast(first.weight) and first.weight.dtype == second.weight.dtype
    pair = typed and _is_pair(first, activation, second) and not (_gathered(first) or _gathered(second))
    if pair and all(map(_as_called, (first, activation, second))):
        x = gated_pair(x, first.weight, second.weight, str(activation_of(activation)))
    else:
        x = activation(first(x)) * second(x)
    return _run_chain([module._modules[name] for name in after], x)


def _are_experts(module: torch.nn.Module) -> bool:
    """Whether a module is transformers' experts: weights (E,2H,K) and (E,K,H), the gates first, without biases."""
    facts = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    if any(getattr(module, name, None) is not value for name, value in facts.items()):
        return False
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    complete = all(weight is not None and weight.ndim == 3 and weight.dtype in TYPES for weight in weights)
    return complete and hasattr(module, "_apply_gate") and not getattr(module, "has_post_expert_norm", False)


def _forward_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Sorts the rows by expert, computes two grouped products, and sums each token's experts by their weights."""
    import torch

    up, down = module.gate_up_proj, module.down_proj
    # Of weights to be cast, torch's forward casts only those of the chosen experts.
    typed = as_typed(hidden_states, up) and uncast(up) and down.dtype == up.dtype
    if not typed or getattr(module, "_is_expert_parallel", False):
        d: torch.Tensor = type(module).forward(module, hidden_states, top_k_index, top_k_weights)
        return d
    chosen, order = torch.sort(top_k_index.reshape(-1), stable=True)
    # For each expert, the rows of all experts up to it, counted on the device: the host does not wait.
    experts = torch.arange(up.shape[0], device=chosen.device, dtype=chosen.dtype)
    offs = torch.searchsorted(chosen, experts, right=True, out_int32=True)
    # Autocast casts no groups, and torch's forward computes layers, which it casts.
    rows = grouped_mm(hidden_states[order // top_k_index.shape[-1]].to(up.dtype), up.mT, offs=offs)
    rows = grouped_mm(module._apply_gate(rows).to(down.dtype), down.mT, offs=offs)
    weighted = rows * top_k_weights.reshape(-1)[order, None]
    restored = torch.empty_like(weighted).index_copy(0, order, weighted)
    return restored.view(*top_k_index.shape, -1).sum(-2).to(hidden_states.dtype)
