"""Proves against torch that operators follow autocast: types, numbers, gradients, transforms, kernels, cached casts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import product
from typing import Any

import pytest

import cudal2gen
from cudal2gen import pack
from tests.cudal2gen import idle_device
from tests.packages import require

torch = require("torch")
nn = torch.nn
functional = torch.nn.functional

from cudal2gen.operators import dispatch, emulated  # noqa: E402
from cudal2gen.operators.casting import KEYS, cast_operands  # noqa: E402

pytestmark = pytest.mark.torch

# The types to which torch.autocast casts operands.
CASTS = (torch.bfloat16, torch.float16)
# Types of operands before the cast.
TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# A linear layer with GELU and one without, by the library and by torch.
GELU: dict[str, Callable[..., Any]] = {
    "own": lambda x, w, b: cudal2gen.linear(x, w, b, activation="gelu"),
    "torch": lambda x, w, b: functional.gelu(functional.linear(x, w, b)),
}
LINEAR: dict[str, Callable[..., Any]] = {"own": cudal2gen.linear, "torch": functional.linear}
MATMUL: dict[str, Callable[..., Any]] = {
    "own": lambda x, w, b: cudal2gen.matmul(x, w.mT),
    "torch": lambda x, w, b: torch.matmul(x, w.mT),
}
# The operators of which both results are compared.
OPERATORS = {"linear": LINEAR, "gelu": GELU, "matmul": MATMUL}


def draw_integers(*shape: int) -> Any:
    """fp32 numbers that are integers from -2 to 2, which every type represents exactly."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


def normal(*shape: int) -> Any:
    """Normally distributed fp32 numbers, the same at each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# x (8,64), weight (24,64) and bias (24).
OPERANDS = normal(8, 64), normal(24, 64), normal(24)


def tolerances(cast: Any, fused: bool) -> dict[str, float]:
    """Tolerances of a comparison with torch. They are 0 if torch sums as we do. It does not in fp16 on the CPU, nor
    before an activation, which we apply to fp32 sums."""
    if fused:
        return {"atol": 2e-3, "rtol": 2e-2}
    return {"atol": 0, "rtol": 0} if cast is torch.bfloat16 else {"atol": 1e-6, "rtol": 1e-3}


def outcome(function: Callable[..., Any], *operands: Any) -> Any:
    """The result's type and numbers, or None if the operands are refused."""
    try:
        d = function(*operands)
    except (RuntimeError, TypeError):
        return None
    return d.dtype, d.tolist()


@pytest.mark.parametrize("name", OPERATORS)
def test_types_are_those_of_torch(name: str) -> None:
    """All pairs of types are tried, also those that autocast leaves alone."""
    own, reference = OPERATORS[name]["own"], OPERATORS[name]["torch"]
    x, weight, bias = draw_integers(8, 64), draw_integers(24, 64), draw_integers(24)
    results = []
    for cast, x_type, weight_type in product((*CASTS, None), TYPES, TYPES):  # None: without autocast
        operands = x.to(x_type), weight.to(weight_type), bias.to(weight_type)
        with torch.autocast("cpu", dtype=cast or CASTS[0], enabled=cast is not None):
            result = outcome(own, *operands)
            expected = outcome(reference, *operands)
        if name == "gelu" and result is not None:
            assert result[0] == expected[0]
        else:
            assert result == expected
        results.append(result)
    # Each of two casts allows any pair of three types, and fp64 with fp64. Without a cast both types must be equal.
    assert sum(result is not None for result in results) == 2 * (9 + 1) + 4


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_are_those_of_torch(name: str, cast: Any) -> None:
    """Gradients have the operands' type, though products have another one."""
    outcomes = []
    for function in OPERATORS[name].values():
        operands = [operand.clone().requires_grad_() for operand in OPERANDS]
        with torch.autocast("cpu", dtype=cast):
            d = function(*operands)
            loss = d.float().square().mean()
        loss.backward()
        outcomes.append([d, *(operand.grad for operand in operands if operand.grad is not None)])
    for own, reference in zip(*outcomes, strict=True):
        assert own.dtype == reference.dtype
        torch.testing.assert_close(own, reference, **tolerances(cast, fused=name == "gelu"))
    assert [each.dtype for each in outcomes[0]] == [cast, *[torch.float32] * (len(outcomes[0]) - 1)]


class Gated(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A gated feed-forward layer without a fused operator."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 32, bias=False), nn.Linear(64, 32, bias=False)
        self.act, self.down = nn.SiLU(), nn.Linear(32, 64)

    def forward(self, x: Any) -> Any:
        return self.down(self.act(self.gate(x)) * self.up(x))


def fp32_model() -> Any:
    """A small model with equal weights at each call."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), Gated(), nn.Linear(64, 8))


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("cast", CASTS)
def test_an_fp32_model_is_trained_as_by_torch(cast: Any, fuse: bool) -> None:
    plain = fp32_model()
    patched = deepcopy(plain)
    replaced = cudal2gen.patch(patched, fuse=fuse)
    assert len(replaced.layers) == 5
    assert replaced.left == {}
    assert list(replaced.fused) == ([""] if fuse else [])
    x = normal(16, 64)
    assert torch.equal(patched(x), plain(x)), "fp32 without autocast is torch's"
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (plain, patched)]
    for _ in range(3):
        for model, optimizer in zip((plain, patched), optimizers, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=cast):
                d = model(x)
                loss = d.float().square().mean()
            assert d.dtype == cast
            loss.backward()
            optimizer.step()
        for own, other in zip(patched.parameters(), plain.parameters(), strict=True):
            assert own.grad.dtype == torch.float32
            torch.testing.assert_close(own.grad, other.grad, **tolerances(cast, fuse))


def test_what_autocast_leaves_alone() -> None:
    a, b = draw_integers(8, 64), draw_integers(64, 24)
    narrow = a.to(CASTS[0]), b.to(CASTS[0])
    out = torch.empty(8, 24)
    with torch.autocast("cpu", dtype=CASTS[0]):
        assert cudal2gen.matmul(a, b, out=out) is out, "a call with out= keeps its type"
        wide = cudal2gen.matmul(a, b, out_dtype=torch.float32)
        assert wide.dtype == torch.float32, "as do sums that were asked for"
        with torch.autocast("cpu", enabled=False):
            assert cudal2gen.matmul(a, b).dtype == torch.float32
    assert torch.equal(out, a @ b)
    assert torch.equal(wide, narrow[0].float() @ narrow[1].float())


def test_groups_are_cast_as_by_torch() -> None:
    a, b, offs = draw_integers(8, 64), draw_integers(2, 64, 24), torch.tensor([3, 8], dtype=torch.int32)
    a.requires_grad_()
    own, torchs = cudal2gen.grouped_mm, functional.grouped_mm
    with torch.autocast("cpu", dtype=CASTS[0]):
        pairs = [
            [each(left, right, offs=offs) for each in (own, torchs)]
            for left, right in ((a, b), (a.detach(), b), (a.to(CASTS[0]), b.to(CASTS[0])))
        ]
        mapped = torch.vmap(lambda left: own(left, b, offs=offs))(a[None])[0]
        pairs.append([mapped, torchs(a, b, offs=offs)])
        assert outcome(lambda: own(a, b.to(CASTS[0]), offs=offs)) is None
        assert outcome(lambda: torchs(a, b.to(CASTS[0]), offs=offs)) is None
    for mine, reference in pairs:
        assert mine.dtype == reference.dtype
        assert torch.equal(mine, reference)
    assert [mine.dtype for mine, _ in pairs] == [torch.float32, torch.float32, CASTS[0], torch.float32]


def test_transforms_follow() -> None:
    x, weight, bias = draw_integers(3, 8, 64), draw_integers(3, 24, 64), draw_integers(3, 24)
    with torch.autocast("cpu", dtype=CASTS[0]):
        mapped = torch.vmap(cudal2gen.linear)(x, weight, bias)
        expected = torch.vmap(functional.linear)(x, weight, bias)
        own, reference = (
            torch.func.grad(lambda w, function=function: function(x[0], w, bias[0]).float().sum())(weight[0])
            for function in (cudal2gen.linear, functional.linear)
        )
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x[0], x[0])
            tangent = torch.autograd.forward_ad.unpack_dual(cudal2gen.linear(dual, weight[0])).tangent
    assert (mapped.dtype, own.dtype, tangent.dtype) == (CASTS[0], torch.float32, CASTS[0])
    assert torch.equal(mapped, expected)
    assert torch.equal(own, reference)
    assert torch.equal(tangent, cudal2gen.linear(x[0].to(CASTS[0]), weight[0].to(CASTS[0])))


def test_a_class_with_rules_of_its_own_follows() -> None:
    class Doubled(torch.Tensor):  # type: ignore[misc]  # torch has no types here
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            d = super().__torch_function__(function, types, arguments, options or {})
            return d * 2 if function is functional.linear else d

    x, weight = draw_integers(8, 64), draw_integers(24, 64)
    with torch.autocast("cpu", dtype=CASTS[0]):
        own, reference = (each(x, weight.as_subclass(Doubled)) for each in (cudal2gen.linear, functional.linear))
    assert own.dtype == CASTS[0]
    assert torch.equal(own, reference)
    assert torch.equal(own, functional.linear(x, weight).to(CASTS[0]) * 2)


@pytest.mark.slow
@pytest.mark.parametrize("fuse", [False, True])
def test_compiled_training_follows(fuse: bool) -> None:
    """Training compiles to one graph, with the context inside it or around it."""
    plain, x = fp32_model(), normal(16, 64)
    patched = deepcopy(plain)
    cudal2gen.patch(patched, fuse=fuse)

    def within(model: Any) -> Any:
        with torch.autocast("cpu", dtype=CASTS[0]):
            return model(x)

    for around in (False, True):
        torch._dynamo.reset()
        gradients = []
        for model, compiles in ((plain, False), (patched, True)):
            model.zero_grad()
            function = model if around else within
            function = torch.compile(function, backend="aot_eager", fullgraph=True) if compiles else function
            with torch.autocast("cpu", dtype=CASTS[0], enabled=around):
                d = function(x if around else model)
            assert d.dtype == CASTS[0]
            d.float().square().mean().backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        for own, other in zip(*gradients, strict=True):
            torch.testing.assert_close(own, other, atol=2e-3, rtol=2e-2)


def test_a_parameter_is_cast_by_way_of_autocasts_cache() -> None:
    """For operators of torch's, autocast casts a parameter once and keeps the copy. So ``cast_operands`` passes
    a parameter through an einsum that, on a GPU, takes the kept copy and returns it unchanged. The einsum must return a
    view, and the cast must have autocast's type and pass gradients on. On the CPU einsum casts nothing, so the view is
    of the parameter itself."""
    from torch.overrides import TorchFunctionMode

    called: list[str] = []

    class Watch(TorchFunctionMode):  # type: ignore[misc]  # torch has no types here
        def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            called.append(function.__name__)
            return function(*arguments, **(options or {}))

    with torch.autocast("cpu", dtype=CASTS[0]), Watch():
        cast_operands((nn.Parameter(draw_integers(24, 64)), draw_integers(8, 64)))
    assert called.count("einsum") == 1, "for the parameter, but not for the other operand"
    for shape in ((24,), (24, 64), (3, 24, 64)):
        parameter = nn.Parameter(normal(*shape))
        with torch.autocast("cpu", dtype=CASTS[0]):
            view = torch.einsum("...->...", parameter)
            (cast,) = cast_operands((parameter,))
        assert view.data_ptr() == parameter.data_ptr()
        assert view.stride() == parameter.stride()
        assert torch.equal(cast, parameter.to(CASTS[0]))
        cast.sum().backward()
        assert torch.equal(parameter.grad, torch.ones(shape))
    assert "AutocastCUDA" in torch._C._dispatch_dump("aten::einsum"), "on a GPU autocast casts einsum's operands"


def test_a_gpus_tensors_follow_its_autocast() -> None:
    """The tensors have no data, since there may be no GPU here."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, weight = torch.empty(8, 64, device="cuda"), torch.empty(24, 64, device="cuda")
        assert cudal2gen.linear(x, weight).dtype == torch.float32
        torch.set_autocast_enabled("cuda", True)  # its context would refuse without a GPU
        try:
            for cast in CASTS:
                torch.set_autocast_dtype("cuda", cast)
                for function in (cudal2gen.linear, torch.ops.cudal2gen.linear, functional.linear):
                    assert function(x, weight).dtype == cast
                on_cpu = cudal2gen.linear(torch.empty(8, 64), torch.empty(24, 64))
                assert on_cpu.dtype == torch.float32, "the GPU's autocast casts no tensors of the CPU"
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", torch.float16)
    assert {"cpu", "cuda"} <= set(KEYS)


# --- kernels ---


@pytest.fixture(scope="module")
def opened_pack(tmp_path_factory: pytest.TempPathFactory) -> pack.Pack:
    """A pack for a device that runs no kernel."""
    return idle_device.open_pack(tmp_path_factory.mktemp("packs"))


@pytest.fixture
def dispatcher(tmp_path_factory: pytest.TempPathFactory, opened_pack: pack.Pack) -> Iterator[dispatch.Dispatcher]:
    """The dispatcher of that device with this pack. It chooses a kernel wherever one serves."""
    with emulated(idle_device.IdleDevice(tmp_path_factory.mktemp("runtime")), [opened_pack], prefer="kernel") as own:
        yield own


def test_a_cast_call_runs_on_a_kernel(dispatcher: dispatch.Dispatcher) -> None:
    """Measuring, planning and counting see the operands that the kernel reads."""
    layer = nn.Linear(64, 40, bias=False)
    assert cudal2gen.patch(layer).layers == [""]
    x = draw_integers(48, 64)
    layer(x)
    assert dispatcher.stats() == {"kernel": {}, "torch": {}}, "torch computes an fp32 call, which is not counted"
    with torch.autocast("cpu", dtype=torch.float16):
        assert cudal2gen.explain(cudal2gen.linear, x, layer.weight).startswith("hgemm_sm80")
        groups = draw_integers(2, 64, 40), torch.tensor([3, 48], dtype=torch.int32)
        assert "torch.float32" in cudal2gen.explain(cudal2gen.grouped_mm, x, *groups), "autocast leaves it alone"
        for _ in range(3):
            assert layer(x).dtype == torch.float16
        assert cudal2gen.warm_up(layer, [1]) == [""]
    assert cudal2gen.warm_up(layer, [1]) == []
    assert dispatcher.stats()["torch"] == {}
    assert sum(dispatcher.stats()["kernel"].values()) == 4
