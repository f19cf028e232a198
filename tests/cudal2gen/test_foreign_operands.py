"""Proves that operators leave operands other than plain CPU and CUDA tensors to torch's own functions.

They are subclasses with rules of their own, nested tensors, weights of sharded models, and tensors of other devices.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cudal2gen
from tests.cudal2gen.emulated import EmulatedDevice
from tests.packages import require

torch = require("torch")
nn = torch.nn
functional = torch.nn.functional

from cudal2gen.operators import derived, dispatch, fused_layers, fused_operators  # noqa: E402

pytestmark = pytest.mark.torch


class Quantized(torch.Tensor):  # type: ignore[misc]
    """Codes and a scale, like quantized weights. It implements torch's products and no other operators."""

    @staticmethod
    def __new__(cls, codes: Any, scale: float) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float16, strides=codes.stride())

    def __init__(self, codes: Any, scale: float) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        aten = torch.ops.aten
        if function in (aten.t.default, aten.transpose.int, aten.detach.default, aten.view.default):
            own = arguments[0]
            return cls(function(own.codes, *arguments[1:]), own.scale)
        if function not in (aten.mm.default, aten.addmm.default, aten.matmul.default, aten.linear.default):
            raise NotImplementedError(f"Quantized: {function}")
        return function(*(each.whole() if isinstance(each, cls) else each for each in arguments), **(options or {}))

    def whole(self) -> Any:
        """The fp16 numbers that the tensor stands for."""
        return self.codes.half() * self.scale


class Scaled(torch.Tensor):  # type: ignore[misc]
    """A tensor of codes. It implements one function of torch; other functions compute with the codes."""

    scale = 4.0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is not functional.linear:
            return super().__torch_function__(function, types, arguments, options or {})
        x, weight, *bias = arguments
        d = functional.linear(x, weight.as_subclass(torch.Tensor)) * cls.scale
        return d if bias in ([], [None]) else d + bias[0]


def codes(rows: int, cols: int) -> Any:
    """Drawn int8 numbers from -3 to 3."""
    return torch.randint(-3, 4, (rows, cols), dtype=torch.int8)


def normal(*shape: int) -> Any:
    """Normally distributed fp16 numbers."""
    return torch.randn(shape).half()


# By operator: a call of ours and the same by torch, of x (rows, k) and a weight (n, k).
CALLS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "matmul": (lambda x, w: cudal2gen.matmul(x, w.t()), lambda x, w: x @ w.t()),
    "linear": (cudal2gen.linear, functional.linear),
    "activation": (
        lambda x, w: cudal2gen.linear(x, w, activation="relu"),
        lambda x, w: functional.relu(functional.linear(x, w)),
    ),
    "pair": (
        lambda x, w: fused_operators.gated_pair(x, w, w, "silu"),
        lambda x, w: functional.silu(functional.linear(x, w)) * functional.linear(x, w),
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("inference", [False, True])
def test_a_quantized_weight_is_computed_by_its_own_rules(name: str, inference: bool) -> None:
    call, reference = CALLS[name]
    before = cudal2gen.stats()["torch"].get("a Quantized, which has rules of its own", 0)
    with torch.inference_mode(inference):
        weight, x = Quantized(codes(24, 64), 0.5), normal(8, 64)
        expected = reference(x, weight.whole())
        torch.testing.assert_close(call(x, weight), expected, atol=2e-2, rtol=2e-3)
    assert cudal2gen.stats()["torch"]["a Quantized, which has rules of its own"] == before + 1
    if not inference:
        x.requires_grad_()
        call(x, weight).sum().backward()
        own, x.grad = x.grad, None
        reference(x, weight.whole()).sum().backward()
        torch.testing.assert_close(own, x.grad, atol=0.2, rtol=2e-2)


def test_operators_themselves_leave_such_a_weight_to_torch() -> None:
    weight, x = Quantized(codes(24, 64), 0.5), normal(8, 64)
    ops = torch.ops.cudal2gen
    expected = functional.linear(x, weight.whole())
    torch.testing.assert_close(ops.linear(x, weight), expected, atol=2e-2, rtol=2e-3)
    d, z = ops.fused_linear_aux(x, weight, None, "relu")
    torch.testing.assert_close(z, expected, atol=2e-2, rtol=2e-3)
    assert torch.equal(d, z.relu())
    assert cudal2gen.explain(cudal2gen.linear, x, weight) == "torch: a Quantized, which has rules of its own"


def test_a_patched_layer_takes_a_quantized_weight() -> None:
    layer, x = nn.Linear(64, 24).half(), normal(8, 64)
    cudal2gen.patch(layer)
    layer.weight = nn.Parameter(Quantized(codes(24, 64), 0.5), requires_grad=False)
    expected = functional.linear(x, layer.weight.whole(), layer.bias)
    torch.testing.assert_close(layer(x), expected, atol=2e-2, rtol=2e-3)


def test_a_weight_that_overrides_functions_is_asked() -> None:
    weight, x, bias = normal(24, 64), normal(8, 64), normal(24)
    scaled = weight.as_subclass(Scaled)
    for term in (None, bias):
        expected = functional.linear(x, weight) * 4 + (0 if term is None else term)
        assert torch.equal(cudal2gen.linear(x, scaled, term), expected)
    whole = cudal2gen.linear(x, scaled, activation="relu")
    torch.testing.assert_close(whole, functional.relu(functional.linear(x, weight) * 4))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", ["strided", "jagged"])
def test_nested_tensors_are_computed_by_torch(layout: str) -> None:
    parts, weight, bias = [normal(3, 64), normal(5, 64)], normal(24, 64), normal(24)
    nested = torch.nested.nested_tensor(parts, layout=getattr(torch, layout))
    for term, activation in ((None, None), (bias, None), (bias, "relu")):
        d = cudal2gen.linear(nested, weight, term, activation=activation)
        for part, own in zip(parts, d.unbind(), strict=True):
            expected = functional.linear(part, weight, term)
            expected = expected if activation is None else expected.relu()
            torch.testing.assert_close(own, expected, atol=2e-2, rtol=2e-3)
    trained = weight.clone().requires_grad_()
    cudal2gen.linear(nested, trained).values().sum().backward()
    expected = torch.cat(parts).double().sum(0).expand(24, 64)
    torch.testing.assert_close(trained.grad.double(), expected, atol=2e-2, rtol=1e-2)
    assert cudal2gen.explain(cudal2gen.linear, nested, weight).startswith("torch: a ")


def test_transforms_of_functions_see_products(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    """vmap of grad gives the derivatives of each sample."""
    from torch.func import grad, vmap

    x, weight = (device.empty(*shape).copy_(torch.randint(-2, 3, shape)) for shape in ((5, 8, 64), (24, 64)))

    def loss(w: Any, sample: Any) -> Any:
        return cudal2gen.linear(sample, w).float().square().sum()

    own = vmap(grad(loss), in_dims=(None, 0))(weight, x)
    d = x.double() @ weight.double().t()
    assert torch.equal(own.double(), 2 * d.mT @ x.double())
    assert sum(kernels.stats()["kernel"].values()) > 0


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_tangents_pass_through_levels(activation: str | None) -> None:
    """A Hessian is a forward derivative of a backward one."""
    from torch.func import hessian, jacfwd

    x, weight = torch.randn(3, 8).double(), torch.randn(4, 8).double()
    activate = functional.__dict__[activation] if activation else lambda z: z

    def own(y: Any) -> Any:
        return cudal2gen.linear(y, weight, None, activation).square()

    def reference(y: Any) -> Any:
        return activate(functional.linear(y, weight)).square()

    torch.testing.assert_close(jacfwd(own)(x), jacfwd(reference)(x))
    expected = hessian(lambda y: reference(y).sum())(x)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(hessian(lambda y: own(y).sum())(x), expected)


# --- sharded models, in a group of one process ---


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A device mesh of this process alone."""
    import torch.distributed as distributed
    from torch.distributed.tensor import init_device_mesh

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # independent of the machine's host name
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_distributed_tensors_are_computed_by_torch(name: str, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    call, reference = CALLS[name]
    x, weight = normal(8, 64), normal(24, 64)
    expected = reference(x, weight)
    for inference in (False, True):
        with torch.inference_mode(inference):
            wide, shards = distribute_tensor(x, mesh, [Replicate()]), distribute_tensor(weight, mesh, [Shard(0)])
            d = call(wide, shards)
            torch.testing.assert_close(d.full_tensor(), expected, atol=2e-2, rtol=2e-3)
            assert d.placements == reference(wide, shards).placements
    shards = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    call(distribute_tensor(x, mesh, [Replicate()]), shards).sum().backward()
    trained = weight.clone().requires_grad_()
    reference(x, trained).sum().backward()
    torch.testing.assert_close(shards.grad.full_tensor(), trained.grad, atol=0.2, rtol=2e-2)


class Gated(nn.Module):  # type: ignore[misc]
    """A gated feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((16, 24), (16, 24), (24, 16)))
        self.act = nn.SiLU()

    def forward(self, x: Any) -> Any:
        return self.down(self.act(self.gate(x)) * self.up(x))


@pytest.mark.slow
@pytest.mark.parametrize("before", [False, True])
def test_a_sharded_model_trains_as_without_a_patch(before: bool, mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP gathers weights into the memory of the previous step, so an interleaved copy would be that step's.
    ``before``: whether the model is patched before it is sharded."""
    from torch.distributed.fsdp import fully_shard

    def gated_by_kernel(x: Any, w1: Any, w3: Any, activation: str) -> Any:
        return cudal2gen.swiglu(x, derived.DERIVED.interleaved(w1, w3, lambda like, *shape: like.new_empty(shape)))

    monkeypatch.setattr(fused_layers, "gated_pair", gated_by_kernel)
    losses: list[list[float]] = []
    x = normal(8, 16)
    for patched in (False, True):
        torch.manual_seed(1)
        model = Gated().half()
        if patched and before:
            cudal2gen.patch(model, fuse=True)
        fully_shard(model, mesh=mesh)
        if patched and not before:
            cudal2gen.patch(model, fuse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        losses.append([])
        for _ in range(4):
            loss = (model(x) - x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0][0] - losses[0][-1] > 0.05, "the loss falls"
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    derived.DERIVED.clear()


# --- other devices ---


def test_tensors_without_data_reach_no_kernel(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    x, weight = (torch.empty(*shape, dtype=torch.float16, device="meta") for shape in ((8, 64), (24, 64)))
    for d in (cudal2gen.linear(x, weight), cudal2gen.matmul(x, weight.t()), cudal2gen.bmm(x[None], weight.t()[None])):
        assert d.is_meta
    assert len(device.session.launches) == 0
    assert cudal2gen.explain(x, weight.t()) == "torch: no kernels on meta"


OTHER_DEVICE = """
import numpy as np, torch, cudal2gen
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
_setup_privateuseone_for_python_backend("npy")

def tensor(values):
    own = torch._C._acc.create_empty_tensor(values.shape, torch.float16)
    own.values = values
    return own

@torch.library.impl("aten::mm", "privateuseone")
def mm(a, b):
    return tensor(a.values @ b.values)

a, b = (np.random.default_rng(0).integers(-3, 4, shape).astype(np.float16) for shape in ((4, 8), (8, 16)))
x, y = tensor(a), tensor(b)
assert (x.get_device(), x.is_cuda, x.is_cpu) == (0, False, False)
for _ in range(2):
    for product in (cudal2gen.matmul, torch.ops.cudal2gen.matmul):
        assert np.array_equal(product(x, y).values, a @ b)
print(cudal2gen.explain(x, y), cudal2gen.stats())
"""


@pytest.mark.slow
def test_a_device_of_another_kind_is_not_taken_for_a_cuda_device() -> None:
    """The device has the same index as a CUDA device."""
    environment = os.environ | {"PYTHONPATH": str(Path(cudal2gen.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OTHER_DEVICE],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch: no kernels on npy {'kernel': {}, 'torch': {'no kernels on npy': 4}}\n"
