"""Defines ``patch``, which lets a model's layers use our kernels, and on request fuses layers into one kernel's call.

Whether a module is fused depends on what its ``forward`` does, not on its name. The forward is traced by ``torch.fx``,
without tracing into children. The trace must be a chain of children in which an activation follows a linear layer, or
the gated product of three children, as in Llama. Children with hooks, with another forward or of another type are
called as before.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from cudal2gen.kernel.fusion import Activation
from cudal2gen.operators.epilogues import BLOCK_COLS
from cudal2gen.operators.fused_operators import gated_pair, linear
from cudal2gen.operators.grouped import grouped_mm
from cudal2gen.operators.layers import (
    CAST_TYPES,
    TYPES,
    Replaced,
    check_model,
    forward_linear,
    has_our_types,
    is_uncast,
    replace_layers,
    set_forward,
)

if TYPE_CHECKING:
    import torch

# Classes of activations in transformers that compute the same formula as torch's.
TRANSFORMERS_ACTIVATIONS: dict[str, Activation] = {
    "GELUActivation": "gelu", "GELUTanh": "gelu_tanh", "NewGELUActivation": "gelu_tanh", "SiLUActivation": "silu",
    "FastGELUActivation": "gelu_tanh", "AccurateGELUActivation": "gelu_tanh",
}  # fmt: skip


def patch(model: torch.nn.Module, fuse: bool = False) -> Replaced:
    """Lets every ``nn.Linear`` of fp16, bf16 or fp32 in a model compute by ``cudal2gen.linear``.

    Parameters and hooks are unchanged. A call uses ``cudal2gen.linear`` if its input and its weight are both fp16 or
    both bf16, or if autocast casts them to one of these; torch computes other calls. A patched layer is not patched
    again. ``fuse`` also fuses

    - a linear layer with its activation, in ``nn.Sequential`` and in modules whose forward is a chain of children;
    - ``down(act(gate(x)) * up(x))`` of layers without biases;
    - transformers' experts, as grouped products.

    To find these, ``torch.fx`` traces each module with such children once. A kernel that computes a gate reads an
    interleaved copy of both weights, so their memory doubles; ``derived`` describes when copies are made again.
    ``state_dict`` does not contain the copies. Gates and experts whose weights autocast would cast are not fused.
    Raises TypeError for a value that is no module.
    """
    check_model(model)
    replaced = replace_layers(model)
    if fuse:
        for name, module in model.named_modules():
            if "forward" not in module.__dict__ and (fused := _fuse(module)):
                replaced.fused[name] = fused
    return replaced


def _fuse(module: torch.nn.Module) -> str:
    """Fuses layers of a module if possible. Returns their names in words, or "" if nothing was fused."""
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
        return TRANSFORMERS_ACTIVATIONS.get(kind.__name__)
    return "relu" if kind is torch.nn.ReLU else "silu" if kind is torch.nn.SiLU else None


def _is_layer(module: torch.nn.Module) -> bool:
    """Whether a module is a linear layer, of torch or of GPT-2."""
    import torch

    return type(module) is torch.nn.Linear or _is_conv1d(module)


def _is_conv1d(module: torch.nn.Module) -> bool:
    """GPT-2's linear layer, whose weight is (K,N)."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def _is_pair(gate: torch.nn.Module, activation: torch.nn.Module, up: torch.nn.Module) -> bool:
    """Whether ``gated_pair`` can compute ``activation(gate(x)) * up(x)``."""
    import torch

    if type(gate) is not torch.nn.Linear or type(up) is not torch.nn.Linear or activation_of(activation) is None:
        return False
    plain = gate.bias is None and up.bias is None and gate.weight.shape == up.weight.shape
    return plain and gate.weight.shape[0] % BLOCK_COLS == 0 and gate.weight.dtype in TYPES


def _fusable_pairs(children: Iterable[tuple[str, torch.nn.Module]]) -> str:
    """In words, the linear layers that an activation follows, each with its activation; "" if there are none."""
    named = list(children)
    return "; ".join(
        f"{name}, {following}"
        for (name, layer), (following, activation) in pairwise(named)
        if _is_layer(layer) and layer.weight.dtype in CAST_TYPES and activation_of(activation)
    )


# --- what a forward does ---


def _trace(module: torch.nn.Module) -> list[torch.fx.Node]:
    """The nodes of a module's trace, from its only argument to its result; empty if there are several arguments or the
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
    """The names of the children that these nodes call in a chain, the first of them on ``argument``; empty if a node
    does anything else."""
    names = []
    for node in nodes:
        if node.op != "call_module" or node.args != (argument,) or node.kwargs or "." in node.target:
            return ()
        names.append(node.target)
        argument = node
    return tuple(names)


def _gate_of(nodes: list[torch.fx.Node]) -> tuple[Any, ...]:
    """For a trace of ``down(act(gate(x)) * up(x))`` the names of gate, activation and up, and the names of the chain
    after the product; empty for another trace."""
    # The nodes are: the input, three calls of children in some order, the product, the calls after it, the output.
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


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether a call of the module runs only the forward of its class or of ``patch``, and no hooks."""
    from torch.nn.modules import module as modules

    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    if hooks or modules._has_any_global_hook():
        return False
    # ``patched`` is not used here: torch.compile traces through partial functions, not through their classes.
    return "forward" not in module.__dict__ or getattr(module.__dict__["forward"], "func", None) is forward_linear


def _is_gathered(module: torch.nn.Module) -> bool:
    """Whether FSDP gathers a module's weights. It writes them into the same memory without incrementing the version
    counter, so interleaved copies would become outdated unnoticed."""
    return bool(module.__dict__.get("_is_fsdp_managed_module", False))


def _forward_sequential(module: torch.nn.Sequential, input: Any) -> Any:  # torch calls the argument ``input``
    """Replaces the forward of a Sequential."""
    return _run_chain(list(module._modules.values()), input)


def _forward_chain(module: torch.nn.Module, names: tuple[str, ...], *operands: Any, **named: Any) -> Any:
    """Replaces the forward of a module that calls the children of these names one after the other."""
    return _run_chain([module._modules[name] for name in names], _only(operands, named))


def _only(operands: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The only input of a call. A caller may name it as the module's own forward does. Raises TypeError for more or
    fewer inputs."""
    if len(operands) + len(named) != 1:
        raise TypeError(f"forward takes 1 input, got {len(operands) + len(named)}")
    return (*operands, *named.values())[0]


def _run_chain(children: list[Any], x: Any) -> Any:
    """Calls one child after the other. A linear layer and the activation after it are one call of ``linear``."""
    index = 0
    while index < len(children):
        layer, successor = children[index], children[index + 1] if index + 1 < len(children) else None
        activation = None if successor is None or not _is_layer(layer) else activation_of(successor)
        if activation is not None and has_our_types(x, layer.weight) and _is_plain(layer) and _is_plain(successor):
            x = linear(x, layer.weight.t() if _is_conv1d(layer) else layer.weight, layer.bias, activation)
            index += 2
        else:
            x = layer(x)
            index += 1
    return x


def _forward_gated(
    module: torch.nn.Module, gate: str, act: str, up: str, after: tuple[str, ...], *operands: Any, **named: Any
) -> Any:
    """The forward of a module with a gate: its layers ``gate`` and ``up`` as one kernel if they allow it, then
    ``after``. All are names of its children."""
    x = _only(operands, named)
    first, activation, second = (module._modules[name] for name in (gate, act, up))
    assert first is not None and activation is not None and second is not None  # noqa: PT018
    # Each autocast context casts weights anew, so an interleaved copy of cast weights would serve only one call.
    typed = has_our_types(x, first.weight) and is_uncast(first.weight) and first.weight.dtype == second.weight.dtype
    pair = typed and _is_pair(first, activation, second) and not (_is_gathered(first) or _is_gathered(second))
    if pair and all(map(_is_plain, (first, activation, second))):
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
    # If weights must be cast, torch's forward is better: it casts only those of the chosen experts.
    typed = has_our_types(hidden_states, up) and is_uncast(up) and down.dtype == up.dtype
    if not typed or getattr(module, "_is_expert_parallel", False):
        d: torch.Tensor = type(module).forward(module, hidden_states, top_k_index, top_k_weights)
        return d
    chosen, order = torch.sort(top_k_index.reshape(-1), stable=True)
    # For each expert the number of rows of all experts up to it, counted on the device so that the host does not wait.
    experts = torch.arange(up.shape[0], device=chosen.device, dtype=chosen.dtype)
    offs = torch.searchsorted(chosen, experts, right=True, out_int32=True)
    # torch's forward computes layers, which autocast casts; it does not cast grouped products, so this casts the rows.
    rows = grouped_mm(hidden_states[order // top_k_index.shape[-1]].to(up.dtype), up.mT, offs=offs)
    rows = grouped_mm(module._apply_gate(rows).to(down.dtype), down.mT, offs=offs)
    weighted = rows * top_k_weights.reshape(-1)[order, None]
    restored = torch.empty_like(weighted).index_copy(0, order, weighted)
    return restored.view(*top_k_index.shape, -1).sum(-2).to(hidden_states.dtype)
