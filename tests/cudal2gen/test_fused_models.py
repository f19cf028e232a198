"""Proves which layers of a model are fused, and that states, hooks, types and transformers' models keep working."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import cudal2gen
from tests.packages import require

torch = require("torch")
nn = torch.nn

from cudal2gen.operators import derived  # noqa: E402
from cudal2gen.operators.layers import is_patched  # noqa: E402

pytestmark = pytest.mark.torch


class Gated(nn.Module):  # type: ignore[misc]
    """A gated feed-forward layer like Llama's."""

    def __init__(self, width: int = 32, inner: int = 48, bias: bool = False, swapped: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width)
        self.act_fn = nn.SiLU()
        self.swapped = swapped

    def forward(self, x: Any) -> Any:
        """down(act(gate(x)) * up(x)), or its factors swapped."""
        if self.swapped:
            return self.down_proj(self.up_proj(x) * self.act_fn(self.gate_proj(x)))
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Chain(nn.Module):  # type: ignore[misc]
    """A feed-forward layer like GPT-2's."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.fc1, self.fc2, self.dropout = nn.GELU("tanh"), nn.Linear(32, 64), nn.Linear(64, 32), nn.Dropout()

    def forward(self, x: Any) -> Any:
        """fc2(act(fc1(x)))."""
        return self.dropout(self.fc2(self.act(self.fc1(x))))


class MisnamedChildren(nn.Module):  # type: ignore[misc]
    """A module that does not compute what its children's names suggest."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.act_fn = nn.SiLU()

    def forward(self, x: Any) -> Any:
        """Twice what a gated layer computes."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2)


class DataDependent(MisnamedChildren):
    """A module whose result depends on a value of its input, so that it cannot be traced."""

    def forward(self, x: Any) -> Any:
        """One of two layers, by the sign of the sum of x."""
        return self.up_proj(x) if float(x.sum()) > 0 else self.act_fn(self.gate_proj(x))


def sequential() -> Any:
    """Linear layers with activations, one of whose activation modules is used twice."""
    act = nn.ReLU(inplace=True)
    return nn.Sequential(
        nn.Linear(32, 64), act, nn.Linear(64, 64, bias=False), nn.GELU(), act, nn.Linear(64, 32), nn.Tanh()
    )


# By name: a model, and the layers that are fused into one call each.
MODELS = {
    "sequential": (sequential, "0, 1; 2, 3"),
    "chain": (Chain, "fc1, act"),
    "gated": (Gated, "gate_proj, act_fn, up_proj"),
    "swapped": (lambda: Gated(swapped=True), "gate_proj, act_fn, up_proj"),
}


@pytest.fixture
def x() -> Any:
    """An input of 2 x 5 rows in bf16."""
    return torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


def build(make: Any) -> Any:
    """A model in bf16 with equal weights at each call."""
    torch.manual_seed(0)
    return make().bfloat16().eval()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_fused_computes_the_same(name: str, dtype: str, x: Any) -> None:
    make, what = MODELS[name]
    kind = getattr(torch, dtype)
    model, x = build(make).to(kind), x.to(kind)
    before, state = model(x), list(model.state_dict())
    done = cudal2gen.patch(model, fuse=True)
    assert done.fused == {"": what}
    assert f"1 modules fused\n  : {what}" in str(done)
    torch.testing.assert_close(model(x), before, atol=0.02, rtol=0.02)
    exact = copy.deepcopy(model).double()
    torch.testing.assert_close(model(x).double(), exact(x.double()), atol=2.0**-7, rtol=2.0**-6)
    assert list(model.state_dict()) == state
    assert cudal2gen.patch(model, fuse=True).fused == {}
    for copied in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)) if name in ("sequential", "chain") else model,
    ):
        assert torch.equal(copied(x), model(x))
    assert cudal2gen.unpatch(model) == ["", *done.layers]
    assert torch.equal(model(x), before)
    assert not any({"forward", "__prepare_scriptable__"} & vars(module).keys() for module in model.modules())


def test_each_fused_pair_is_one_operator(x: Any) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: list[str] = []

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    model = nn.ModuleList([build(make) for make, _ in MODELS.values()])
    cudal2gen.patch(model, fuse=True)
    with torch.no_grad(), Watch():
        for part in model:
            part(x)
    assert [name.split(".")[1] for name in calls if "cudal2gen" in name] == [
        *("fused_linear", "fused_linear", "linear", "fused_linear", "linear"),
        *("gated_pair", "linear", "gated_pair", "linear"),
    ]  # fmt: skip


def mlp_with_unsupported_activation() -> Any:
    """A layer with an activation that no kernel has."""
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh())


@pytest.mark.parametrize(
    "make",
    [
        MisnamedChildren,
        DataDependent,
        lambda: Gated(bias=True),
        lambda: Gated(inner=44),
        mlp_with_unsupported_activation,
    ],
)
def test_what_no_kernel_does_stays(make: Any, x: Any) -> None:
    model = build(make)
    before = model(x)
    assert cudal2gen.patch(model, fuse=True).fused == {}
    torch.testing.assert_close(model(x), before, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(("name", "fuse"), [("input", False), ("input", True), ("x", True), ("hidden_states", True)])
def test_the_input_may_be_given_by_its_name(name: str, fuse: bool, x: Any) -> None:
    class Named(Chain):
        def forward(self, hidden_states: Any) -> Any:
            return super().forward(hidden_states)

    makes = {"x": (Gated, Chain), "hidden_states": (Named,), "input": (sequential, lambda: nn.Linear(32, 8))}
    for make in makes[name]:
        model = make().bfloat16().eval()
        assert cudal2gen.patch(model, fuse=fuse)
        expected = model(x)
        assert is_patched(model) or not fuse or type(model) is nn.Linear
        for forward in (model, torch.compile(model, fullgraph=True, backend="eager")):
            assert torch.equal(forward(**{name: x}), expected)
        with pytest.raises(TypeError):
            model(x, **{name: x})


@pytest.mark.parametrize("name", MODELS)
def test_training_is_as_before(name: str, x: Any) -> None:
    """Gradients, an optimizer's steps, load_state_dict and conversions take effect in the fused layers."""
    make, _ = MODELS[name]
    plain, fused = build(make), build(make)
    cudal2gen.patch(fused, fuse=True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, fused)]
    for _ in range(2):
        for model, optimizer in zip((plain, fused), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            optimizer.step()
        for own, other in zip(fused.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, atol=0.02, rtol=0.1)
    torch.testing.assert_close(fused(x), plain(x), atol=0.03, rtol=0.03)
    fresh = build(make)
    fused.load_state_dict(fresh.state_dict())
    torch.testing.assert_close(fused(x), fresh(x), atol=0.02, rtol=0.02)
    assert fused.float()(x.float()).dtype == torch.float32
    torch.testing.assert_close(fused(x.float()), fresh.float()(x.float()))
    fused.bfloat16()
    with torch.autocast("cpu", dtype=torch.float16):
        assert fused(x).dtype == fresh.bfloat16()(x).dtype == torch.float16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fused(x).dtype == torch.bfloat16


@pytest.mark.parametrize("name", MODELS)
def test_hooks_of_what_is_fused_are_called(name: str, x: Any) -> None:
    model = build(MODELS[name][0])
    cudal2gen.patch(model, fuse=True)
    fused = model(x)
    for child in model.children():
        calls: list[int] = []
        handles = [
            child.register_forward_hook(lambda *_, own=calls: own.append(1)),
            child.register_forward_pre_hook(lambda *_, own=calls: own.append(2)),
        ]
        torch.testing.assert_close(model(x), fused, atol=0.02, rtol=0.02)
        times = 2 if name == "sequential" and child is model[1] else 1
        assert calls == [2, 1] * times
        for handle in handles:
            handle.remove()
    calls = []
    with nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1)):
        model(x)
    assert len(calls) == 1 + len(list(model.children())) + (name == "sequential")
    gradients: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: gradients.append(1))
    model(x).sum().backward()
    assert len(gradients) == len(list(model.parameters())), (
        "data-parallel training waits for a gradient of each parameter"
    )


def test_frozen_weights_and_inputs_that_need_gradients(x: Any) -> None:
    derived.DERIVED.clear()  # entries of other tests' models
    model = build(Gated).requires_grad_(False)
    cudal2gen.patch(model, fuse=True)
    x.requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    model.up_proj.weight.requires_grad_()
    model(x.detach()).sum().backward()
    assert [parameter.grad is not None for parameter in model.parameters()] == [False, True, False, False]
    with torch.inference_mode():
        assert torch.equal(model(x), model(x.detach()))
    assert len(derived.DERIVED) == 0, "torch computes the product, so no weights were copied"
    assert model.to("meta")(x.to("meta")).device.type == "meta"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_compiles_and_is_not_scripted(name: str, x: Any) -> None:
    model = build(MODELS[name][0])
    cudal2gen.patch(model, fuse=True)
    torch._dynamo.reset()
    with torch.no_grad():
        output = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
        torch.testing.assert_close(output, model(x))
    with pytest.raises(TypeError, match=r"cudal2gen\.patch: torch\.jit\.script cannot compile a patched model"):
        torch.jit.script(nn.Sequential(model))


# --- transformers' models ---

# Two sequences, and a small model's sizes.
TOKENS = torch.arange(12).view(2, 6)
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "max_position_embeddings": 64}  # fmt: skip


def language_model(name: str) -> Any:
    """A small model of transformers with random weights: ``llama``, ``mixtral``, or else GPT-2."""
    transformers = require("transformers")
    torch.manual_seed(0)
    if name == "llama":
        config = transformers.LlamaConfig(**SIZES)
    elif name == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    else:
        config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


# By model: the fused modules, and their layers.
FUSED = {
    "llama": {f"model.layers.{i}.mlp": "gate_proj, act_fn, up_proj" for i in range(2)},
    "mixtral": {f"model.layers.{i}.mlp.experts": "experts as grouped products" for i in range(2)},
    "gpt2": {f"transformer.h.{i}.mlp": "c_fc, act" for i in range(2)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUSED)
def test_a_language_model_in_bf16(name: str) -> None:
    model = language_model(name)
    plain = copy.deepcopy(model)
    exact = copy.deepcopy(model).double()
    if name == "mixtral":
        exact.set_experts_implementation("eager")
    done = cudal2gen.patch(model, fuse=True)
    assert done.fused == FUSED[name]
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        own, unfused, reference = (each(TOKENS).logits.double() for each in (model, plain, exact))
    error, usual = float((own - reference).abs().max()), float((unfused - reference).abs().max())
    assert error <= 1.5 * usual + 2.0**-9, "the error is about that of torch in bf16"
    texts = [each.generate(TOKENS, max_new_tokens=8, do_sample=False, pad_token_id=0) for each in (model, plain)]
    agree_until_tie(plain, *texts)
    model(TOKENS, labels=TOKENS).loss.backward()
    plain(TOKENS, labels=TOKENS).loss.backward()
    for (path, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            scale = float(other.grad.abs().max())
            torch.testing.assert_close(parameter.grad, other.grad, atol=0.05 * scale, rtol=0.1, msg=path)
    cudal2gen.unpatch(model)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits.double(), unfused)


def agree_until_tie(model: Any, own: Any, other: Any) -> None:
    """Compares two texts up to the first tie, where two words' logits differ by one rounding of bf16."""
    for tokens, expected in zip(own, other, strict=True):
        different = (tokens != expected).nonzero()
        if not len(different):
            continue
        place = int(different[0])
        with torch.no_grad():
            logits = model(expected[None, :place]).logits[0, -1].float()
        gap = float((logits[tokens[place]] - logits[expected[place]]).abs())
        assert gap <= 2.0**-7 * float(logits.abs().max()) + 2.0**-8, f"word {place} differs by {gap}"
