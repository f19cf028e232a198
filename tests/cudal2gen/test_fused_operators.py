"""Proves that layers with an activation or a gate compute what their formulas say, and so do their derivatives.

The reference is torch in fp64. Also: which kernels serve the layers, and when copies of weights are made and dropped.
"""

from __future__ import annotations

import gc
import math
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import cudal2gen
from cudal2gen import pack
from tests.cudal2gen import packed
from tests.cudal2gen.emulated import EmulatedDevice, OperatorDevice
from tests.cudal2gen.paths import WIDE_TILE, small
from tests.cudal2gen.strategies import STRAIGHT
from tests.packages import require

torch = require("torch")

from cudal2gen.operators import derived, dispatch, emulated, epilogues, fused_operators  # noqa: E402

pytestmark = pytest.mark.torch

ACTIVATIONS = ["relu", "gelu", "gelu_tanh", "silu"]
GATED = "silu+gate"


def normal(*shape: int, seed: int = 0, dtype: Any = None) -> Any:
    """Normally distributed numbers, bf16 by default."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype or torch.bfloat16)


def activate(z: Any, activation: str) -> Any:
    """The activation of z, by its formula."""
    if activation == "relu":
        return z.clamp(min=0)
    if activation == "silu":
        return z / (1 + torch.exp(-z))
    if activation == "gelu":
        return z * 0.5 * (1 + torch.erf(z / 2**0.5))
    return 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)))


def check_close(own: Any, reference: Any, scale: float = 1.0) -> None:
    """Checks that two tensors agree within four roundings of the first one's type. ``scale``: the magnitude of the
    numbers that were added up, as a result near zero has their rounding errors, too."""
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(own.dtype, 1e-6)
    torch.testing.assert_close(own.double(), reference.double(), rtol=4 * unit, atol=4 * unit * scale)


# --- numbers and derivatives, on the CPU ---


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_layer_and_its_derivative(activation: str, dtype: str) -> None:
    kind = getattr(torch, dtype)
    tensors = normal(2, 3, 40, dtype=kind), normal(24, 40, seed=1, dtype=kind), normal(24, seed=2, dtype=kind)
    for bias in (tensors[2], None):
        own = [tensor.clone().requires_grad_() for tensor in tensors[:2]] + ([] if bias is None else [bias.clone()])
        wide = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in own]
        expected = activate(torch.nn.functional.linear(*wide), activation)
        assert cudal2gen.linear(*(tensor.detach() for tensor in own), activation=activation).dtype == kind
        check_close(cudal2gen.linear(*(t.detach() for t in own), activation=activation), expected.detach(), 4)
        d = cudal2gen.linear(*own, activation=activation)
        check_close(d.detach(), expected.detach(), 4)
        grad = normal(*d.shape, seed=3, dtype=kind)
        d.backward(grad)
        expected.backward(grad.double())
        for tensor, reference in zip(own[:2], wide[:2], strict=True):
            check_close(tensor.grad, reference.grad, 8)


@pytest.mark.parametrize("name", ["fused_linear", "fused_linear_aux"])
def test_sums_are_kept_or_computed_again(name: str) -> None:
    """Both forms have the same derivative. That of Z is the derivative of the layer without activation."""
    tensors = [normal(5, 40).requires_grad_(), normal(32, 40, seed=1).requires_grad_(), normal(32, seed=2)]
    operator = getattr(torch.ops.cudal2gen, name)
    for gate in (False, True):
        wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
        z = torch.nn.functional.linear(*wide)
        d = activate(z, "silu")
        if gate:
            z1, z3 = epilogues.split_columns(z)
            d = activate(z1, "silu") * z3
        answers = operator(*tensors, "silu", gate)
        answers, references = (answers, (d, z)) if name.endswith("aux") else ((answers,), (d,))
        for answer, reference in zip(answers, references, strict=True):
            check_close(answer.detach(), reference.detach(), 8)
            grad = normal(*answer.shape, seed=3)
            own = torch.autograd.grad(answer, tensors[:2], grad, retain_graph=True)
            expected = torch.autograd.grad(reference, wide[:2], grad.double(), retain_graph=True)
            for tensor, exact in zip(own, expected, strict=True):
                check_close(tensor, exact, 16)
        own = torch.autograd.grad([answer.float().sum() for answer in answers], tensors[:2])
        expected = torch.autograd.grad([reference.sum() for reference in references], wide[:2])
        for tensor, exact in zip(own, expected, strict=True):
            check_close(tensor, exact, 16)


def test_swiglu_and_its_derivative() -> None:
    x, w1, w3 = normal(2, 3, 40), normal(24, 40, seed=1), normal(24, 40, seed=2)
    w13 = cudal2gen.interleave(w1, w3)
    assert w13.is_contiguous()
    assert torch.equal(w13[:8], w1[:8])
    assert torch.equal(w13[8:16], w3[:8])
    assert torch.equal(w13[32:40], w1[16:])
    for back, weight in zip(cudal2gen.deinterleave(w13), (w1, w3), strict=True):
        assert torch.equal(back, weight)
        assert back.is_contiguous()
    vector = cudal2gen.interleave(w1[:, 0], w3[:, 0])
    assert torch.equal(vector, w13[:, 0])
    assert torch.equal(torch.stack(cudal2gen.deinterleave(vector)), torch.stack((w1[:, 0], w3[:, 0])))
    own = [tensor.clone().requires_grad_() for tensor in (x, w13)]
    pair = [tensor.clone().requires_grad_() for tensor in (x, w1, w3)]
    wide = [tensor.double().requires_grad_() for tensor in (x, w1, w3)]
    expected = activate(wide[0] @ wide[1].mT, "silu") * (wide[0] @ wide[2].mT)
    grad = normal(2, 3, 24, seed=3)
    expected.backward(grad.double())
    for d in (cudal2gen.swiglu(x, w13), fused_operators.gated_pair(x, w1, w3, "silu"), cudal2gen.swiglu(*own),
              fused_operators.gated_pair(*pair, "silu"), torch.ops.cudal2gen.gated_pair(*pair, "silu")):  # fmt: skip
        check_close(d.detach(), expected.detach(), 16)
        if d.requires_grad:
            d.backward(grad)
    for tensor in (own[1], pair[1], pair[2]):
        assert tensor.grad is not None
    for reference, gradient in zip(wide[1:], cudal2gen.deinterleave(own[1].grad), strict=True):
        check_close(gradient, reference.grad, 32)
    check_close(own[0].grad, wide[0].grad, 32)
    for reference, tensor in zip(wide, pair, strict=True):
        check_close(tensor.grad / 2, reference.grad, 32)


def test_transforms_and_second_derivatives() -> None:
    # In fp64, so that second derivatives may be compared with the default tolerance.
    x, w1, w3, bias = normal(3, 8, dtype=torch.double), *(normal(8, 8, seed=s, dtype=torch.double) for s in (1, 2)), \
        normal(8, seed=3, dtype=torch.double)  # fmt: skip

    def layers(x: Any, w1: Any, w3: Any, bias: Any) -> Any:
        d = cudal2gen.linear(x, w1, bias, activation="gelu")
        return d * cudal2gen.swiglu(x, cudal2gen.interleave(w1, w3)) + fused_operators.gated_pair(d, w3, w1, "silu")

    def reference(x: Any, w1: Any, w3: Any, bias: Any) -> Any:
        d = activate(x @ w1.mT + bias, "gelu")
        return d * activate(x @ w1.mT, "silu") * (x @ w3.mT) + activate(d @ w3.mT, "silu") * (d @ w1.mT)

    arguments = x, w1, w3, bias

    def loss(function: Any) -> Any:
        return lambda *tensors: function(*tensors).square().sum()

    def squared_gradient(function: Any) -> Any:
        return lambda *tensors: torch.func.grad(loss(function))(*tensors).square().sum()

    def stack(tensor: Any, other: Any) -> Any:
        return torch.stack((tensor, other))

    transforms: list[tuple[Any, tuple[Any, ...]]] = [
        (lambda f: torch.func.grad(loss(f), (0, 1, 2, 3)), arguments),
        (lambda f: torch.func.grad(squared_gradient(f), (0, 1)), arguments),
        (lambda f: torch.vmap(f, (0, None, None, None)), arguments),
        (lambda f: torch.vmap(f, (None, 0, 0, None)), (x, stack(w1, w3), stack(w3, w1), bias)),
        (lambda f: torch.vmap(f, (0, 0, None, 0)), (stack(x, 2 * x), stack(w1, w3), w3, stack(bias, 3 * bias))),
        (lambda f: torch.vmap(f, (None, None, None, 0)), (x, w1, w3, stack(bias, 3 * bias))),
        (lambda f: torch.vmap(torch.func.grad(loss(f), (0, 1)), (0, None, None, None)), arguments),
    ]
    for transform, operands in transforms:
        torch.testing.assert_close(transform(layers)(*operands), transform(reference)(*operands))


@pytest.mark.parametrize("shape", [(0, 40), (3, 0, 40), (40,), (1, 40), (7, 1, 40)], ids=str)
def test_any_number_of_rows(shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape), normal(16, 40, seed=1)
    for d, cols in ((cudal2gen.linear(x, weight, activation="silu"), 16), (cudal2gen.swiglu(x, weight), 8)):
        assert d.shape == (*shape[:-1], cols)
        assert d.is_contiguous()
    strange = weight.t().contiguous().t(), weight[::2], weight.expand(2, 16, 40)[1], weight.flip(1)
    for other in strange:
        check_close(cudal2gen.linear(x, other, activation="relu"), activate(x.double() @ other.double().mT, "relu"), 8)
    empty = cudal2gen.linear(x[..., :0], weight[:, :0], weight[:, 0], activation="relu")
    assert torch.equal(empty, weight[:, 0].relu().expand(empty.shape))
    assert cudal2gen.swiglu(x, weight[:0]).shape == (*shape[:-1], 0)
    meta = cudal2gen.linear(x.to("meta"), weight.to("meta"), activation="silu")
    assert (meta.shape, meta.dtype) == ((*shape[:-1], 16), torch.bfloat16)
    with torch.inference_mode():
        frozen = x + 0
        assert torch.equal(cudal2gen.swiglu(frozen, weight), cudal2gen.swiglu(x, weight))


def test_what_is_no_fused_layer_is_refused() -> None:
    x, weight = normal(3, 8), normal(16, 8)
    linear, pair = cudal2gen.linear, fused_operators.gated_pair
    refused: list[tuple[Any, type[Exception], str]] = [
        (lambda: linear(x, weight, activation="tanh"), ValueError, "activation='tanh': must be None or one of"),
        (lambda: linear(x, weight.half(), activation="relu"), TypeError, "weight: expected torch.bfloat16"),
        (lambda: linear(x, weight, weight[0], activation="relu"), ValueError, r"bias: expected the shape \(16,\)"),
        (lambda: cudal2gen.swiglu(x, weight[:8]), ValueError, r"w13: expected rows in blocks of 16, got"),
        (lambda: cudal2gen.interleave(weight, weight[:8]), ValueError, r"w1 and w3: expected one shape \(h,k\)"),
        (lambda: cudal2gen.interleave(weight[:3], weight[:3]), ValueError, "with h a multiple of 8"),
        (lambda: cudal2gen.deinterleave(weight[:8]), ValueError, "w13: expected rows in blocks of 16"),
        (lambda: pair(x, weight, weight.half(), "silu"), TypeError, "w3: expected torch.bfloat16"),
    ]  # fmt: skip
    for call, error, message in refused:
        with pytest.raises(error, match=message):
            call()


# --- kernels, in the emulator ---


def record(fusion: str, layout: str = "tn", **changes: Any) -> Any:
    """A record for any sizes with this fusion."""
    return small(acc="f32", layout=layout, padding="predicate", m=64, n=64, k=128, fusion=fusion, **changes)


FUSED = [record("bias_n"), record("silu"), record("bias_n+gelu"), record("bias_n+silu", "nn")]


@pytest.fixture(scope="module")
def opened_pack(tmp_path_factory: pytest.TempPathFactory) -> pack.Pack:
    """A pack with a plain kernel and those of ``FUSED``."""
    table = packed.table([packed.RECORDS["predicated"], *FUSED])
    return pack.open_pack(packed.folder(table, tmp_path_factory.mktemp("packs") / "a100"))


def normal_half(device: EmulatedDevice, *shape: int, seed: int = 0) -> Any:
    """Normally distributed fp16 numbers in the device's memory."""
    return device.empty(*shape).copy_(normal(*shape, seed=seed, dtype=torch.float16))


@pytest.mark.slow
def test_a_fused_kernel_is_one_launch(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    x, weight = normal_half(device, 2, 17, 64), normal_half(device, 40, 64, seed=1)
    bias = normal_half(device, 40, seed=2)
    z = x.double() @ weight.double().mT
    check_close(cudal2gen.linear(x, weight, bias), z + bias.double(), 4)
    check_close(cudal2gen.linear(x, weight, activation="silu"), activate(z, "silu"), 4)
    check_close(cudal2gen.linear(x, weight, bias, activation="gelu"), activate(z + bias.double(), "gelu"), 4)
    column_major = device.empty(64, 40).copy_(weight.t()).t()
    check_close(cudal2gen.linear(x, column_major, bias, activation="silu"), activate(z + bias.double(), "silu"), 4)
    assert kernels.stats() == {
        "kernel": {kernel.name: 1 for kernel in sorted(FUSED, key=lambda r: r.name)},
        "torch": {},
    }
    assert len(device.session.launches) == 4


def test_torch_does_what_a_plain_kernel_leaves(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    """No kernel of the pack has relu, a gate or aux."""
    x, weight, bias = normal_half(device, 17, 64), normal_half(device, 48, 64, seed=1), normal_half(device, 48, seed=2)
    z = x.double() @ weight.double().mT
    check_close(cudal2gen.linear(x, weight, bias, activation="relu"), activate(z + bias.double(), "relu"), 16)
    z1, z3 = epilogues.split_columns(z)
    check_close(cudal2gen.swiglu(x, weight), activate(z1, "silu") * z3, 64)
    d, sums = torch.ops.cudal2gen.fused_linear_aux(x, weight, None, "silu", False)
    check_close(sums, z, 16)
    check_close(d, activate(z, "silu"), 16)
    assert kernels.stats() == {"kernel": {packed.RECORDS["predicated"].name: 3}, "torch": {}}
    reasons = [plan.reason for plan in kernels.plans.values()]
    assert ["; bias_n+relu by torch: " in reasons[0], "; silu+gate by torch: " in reasons[1]] == [
        True,
        True,
    ]


def test_what_no_kernel_takes_is_computed_by_torch(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    x, weight = normal_half(device, 17, 128)[:, ::2], normal_half(device, 48, 64, seed=1)
    check_close(cudal2gen.linear(x, weight, activation="silu"), activate(x.double() @ weight.double().mT, "silu"), 16)
    assert kernels.stats() == {"kernel": {}, "torch": {"strides of A that no layout serves": 1}}
    odd, short = normal_half(device, 17, 60)[:, :59], normal_half(device, 48, 60, seed=1)[:, :59]
    check_close(cudal2gen.linear(odd, short, activation="silu"), activate(odd.double() @ short.double().mT, "silu"), 16)
    assert kernels.stats()["kernel"] == {packed.RECORDS["predicated"].name: 1}, (
        "the kernel copies its operands, and torch applies silu"
    )


def test_every_call_is_explained(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    x, weight, bias = normal_half(device, 17, 64), normal_half(device, 48, 64, seed=1), normal_half(device, 48, seed=2)
    explain = cudal2gen.explain
    asked_for = "the kernel of 64_64_128 was asked for, nothing measured says that it is faster"
    plain = packed.RECORDS["predicated"].name
    assert explain(cudal2gen.matmul, x, weight.t()) == explain(x, weight.t()) == f"{plain}: {asked_for}"
    assert explain(cudal2gen.linear, x, weight) == f"{plain}: {asked_for}"
    assert explain(cudal2gen.linear, x, weight, bias) == f"{FUSED[0].name}: {asked_for}"
    assert explain(cudal2gen.linear, x, weight, bias, activation="gelu") == f"{FUSED[2].name}: {asked_for}"
    explanation = explain(cudal2gen.swiglu, x, weight)
    assert explanation.startswith(f"{plain}: {asked_for}; silu+gate by torch: ")
    assert explanation.endswith(" a100 f32 tn silu+gate")
    assert explain(cudal2gen.bmm, normal_half(device, 3, 17, 64), weight.t().expand(3, 64, 48)).startswith(plain)
    batch = normal_half(device, 3, 64, 48)
    several = explain(cudal2gen.bmm, x.expand(3, 17, 64), batch)
    assert several.startswith("torch: ")
    assert several.endswith(" a100 f32 nn batched")
    offs = device.empty(6).view(torch.int32)
    offs.copy_(torch.tensor([3, 3, 17]))
    grouped = explain(cudal2gen.grouped_mm, x, batch, offs=offs)
    assert grouped.startswith("torch: ")
    assert grouped.endswith(" a100 f32 nn grouped")
    with pytest.raises(
        TypeError, match="explain: expected tensors or one of bmm, grouped_mm, linear, matmul, swiglu, got"
    ):
        explain(torch.matmul, x, weight)


# --- kernels with a gate, and kernels that also store the sums ---

WITH_AUX = "bias_n+aux+silu"  # aux: the kernel also stores Z, the sums before the activation
GATES = [
    record(fusion, ab=ab, **(WIDE_TILE if "gate" in fusion else {}))
    for ab in ("f16", "bf16")
    for fusion in (GATED, f"aux+{GATED}", WITH_AUX, "aux+silu")
]
ANY_D = record("bias_n+aux+relu", **STRAIGHT)  # stores rows of D that start anywhere


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> pack.Pack:
    """A pack with gated kernels and kernels that store Z, for fp16 and bf16."""
    table = packed.table([packed.RECORDS["predicated"], *GATES, ANY_D])
    return pack.open_pack(packed.folder(table, tmp_path_factory.mktemp("gates") / "a100"))


@pytest.fixture
def gated_dispatcher(device: EmulatedDevice, gates: pack.Pack) -> Iterator[dispatch.Dispatcher]:
    """A dispatcher that takes kernels of ``gates`` whether they were measured or not."""
    with emulated(OperatorDevice(device, "a100"), [gates], prefer="kernel") as dispatcher:
        yield dispatcher


def draw_normal_of(device: EmulatedDevice, dtype: str, *shape: int, seed: int = 0) -> Any:
    """Normally distributed numbers of a type in the device's memory."""
    kind = getattr(torch, dtype)
    return device.empty(*shape).view(kind).copy_(normal(*shape, seed=seed, dtype=kind))


def name_of(fusion: str, dtype: str) -> str:
    """The name of the kernel of ``GATES`` with this fusion and type."""
    ab = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    return next(kernel.name for kernel in GATES if (kernel.fusion.text, kernel.ab) == (fusion, ab))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_gated_kernel_is_one_launch(
    dtype: str, device: EmulatedDevice, gated_dispatcher: dispatch.Dispatcher
) -> None:
    """D is half as wide as the product. Sizes leave rows and blocks of 16 columns beyond a tile."""
    for shape, n in (((2, 35, 72), 80), ((1, 64), 16)):
        x, w13 = draw_normal_of(device, dtype, *shape), draw_normal_of(device, dtype, n, shape[-1], seed=1)
        z1, z3 = (x.double() @ part.double().mT for part in cudal2gen.deinterleave(w13))
        d = cudal2gen.swiglu(x, w13)
        assert (d.shape, d.dtype, d.is_contiguous()) == ((*shape[:-1], n // 2), x.dtype, True)
        check_close_to_sums(d, activate(z1, "silu") * z3)
        w1, w3 = (draw_normal_of(device, dtype, *part.shape).copy_(part) for part in cudal2gen.deinterleave(w13))
        assert torch.equal(fused_operators.gated_pair(x, w1, w3, "silu"), d), (
            "a kernel that reads an interleaved copy of both weights gives the same"
        )
    derived.DERIVED.clear()
    assert gated_dispatcher.stats() == {"kernel": {name_of(GATED, dtype): 4}, "torch": {}}
    assert len(device.session.launches) == 4


def check_close_to_sums(own: Any, reference: Any) -> None:
    """Checks that two tensors agree within one rounding of the first one's type and the error of fp32 sums and
    activation."""
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[own.dtype]
    torch.testing.assert_close(own.double(), reference.detach(), rtol=1.01 * unit, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernels_keep_the_sums_for_the_derivative(
    dtype: str, device: EmulatedDevice, gated_dispatcher: dispatch.Dispatcher
) -> None:
    """One launch stores D and Z, with a bias, without, and gated. The gradients are torch's products: the pack's
    kernels accept neither their strides nor the tensors that torch made of Z, which are not in the emulator's
    memory."""
    x, weight, bias = (
        draw_normal_of(device, dtype, 2, 35, 72),
        draw_normal_of(device, dtype, 80, 72, seed=1),
        draw_normal_of(device, dtype, 80),
    )

    def layer(*tensors: Any) -> Any:
        return cudal2gen.linear(*tensors, activation="silu")

    calls = [(layer, (x, weight, bias), WITH_AUX), (layer, (x, weight), "aux+silu")]
    calls += [(cudal2gen.swiglu, (x, weight), f"aux+{GATED}")]
    for function, tensors, fusion in calls:
        own = [draw_normal_of(device, dtype, *tensor.shape).copy_(tensor).requires_grad_() for tensor in tensors]
        wide = [tensor.detach().double().requires_grad_() for tensor in own]
        z = torch.nn.functional.linear(*wide)
        z1, z3 = epilogues.split_columns(z) if "gate" in fusion else (z, 1)
        expected, d = activate(z1, "silu") * z3, function(*own)
        check_close_to_sums(d, expected)
        sums = torch.ops.cudal2gen.fused_linear_aux(*own[:2], *(own[2:] or [None]), "silu", "gate" in fusion)[1]
        assert sums.is_contiguous()
        check_close_to_sums(sums, z)
        grad = normal(*d.shape, seed=3, dtype=d.dtype)
        d.backward(grad)
        expected.backward(grad.double())
        for tensor, reference in zip(own, wide, strict=True):
            check_close(tensor.grad, reference.grad, float(reference.grad.abs().max()))
        assert gated_dispatcher.stats()["kernel"][name_of(fusion, dtype)] == 2
    assert len(device.session.launches) == 6


@pytest.mark.parametrize(("rows", "depth", "cols"), [(0, 16, 16), (3, 0, 16), (3, 16, 0)])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_gradients_of_nothing_have_shapes(activation: str | None, rows: int, depth: int, cols: int) -> None:
    x, w1, w3 = (normal(*shape).requires_grad_() for shape in ((2, rows, depth), (cols, depth), (cols, depth)))
    cudal2gen.linear(x, w1, None, activation).sum().backward()
    cudal2gen.matmul(x, w3.t()).sum().backward()
    fused_operators.gated_pair(x, w1, w3, "silu").sum().backward()
    for tensor in (x, w1, w3):
        assert tensor.grad.shape == tensor.shape
        assert not tensor.grad.any()


def test_sums_whose_rows_start_anywhere_are_computed_by_torch(
    device: EmulatedDevice, gated_dispatcher: dispatch.Dispatcher
) -> None:
    """A kernel that stores any D stores aux only in vectors, so here the plain kernel computes and torch does the
    rest."""
    x, weight, bias = normal_half(device, 35, 72), normal_half(device, 83, 72, seed=1), normal_half(device, 83, seed=2)
    z = x.double() @ weight.double().mT + bias.double()
    d, sums = torch.ops.cudal2gen.fused_linear_aux(x, weight, bias, "relu")
    check_close(sums, z, 16)
    check_close(d, z.relu(), 16)
    assert gated_dispatcher.stats() == {"kernel": {packed.RECORDS["predicated"].name: 1}, "torch": {}}
    (plan,) = gated_dispatcher.plans.values()
    assert plan.reason.endswith("; bias_n+aux+relu by torch: rows of aux of 83 elements, which no kernel stores")


# --- interleaved copies ---


def empty(like: Any, *shape: int) -> Any:
    """A tensor for a copy of weights, as a device would allocate it."""
    return like.new_empty(shape)


def test_copies_follow_their_weights(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    """One interleaved copy is kept for a pair of weights. It is made anew when a weight is changed in place, loaded or
    replaced, and dropped with its weights."""
    derived.DERIVED.clear()
    x = normal_half(device, 5, 64)
    weights = [torch.nn.Parameter(normal_half(device, 24, 64, seed=seed), requires_grad=False) for seed in (1, 2)]

    def check(copies: int) -> None:
        z1, z3 = (x.double() @ weight.detach().double().mT for weight in weights)
        check_close(fused_operators.gated_pair(x, *weights, "silu"), activate(z1, "silu") * z3, 64)
        assert len(derived.DERIVED) == copies

    check(1)
    before = derived.DERIVED.interleaved(*weights, empty)
    check(1)
    assert derived.DERIVED.interleaved(*weights, empty) is before
    with torch.no_grad():
        weights[1].mul_(-1)
    check(1)
    torch.nn.ParameterList(weights).load_state_dict({"0": weights[1].clone(), "1": weights[0].clone()})
    check(1)
    weights[0].data = normal_half(device, 24, 64, seed=7)
    check(1)
    weights = [torch.nn.Parameter(normal_half(device, 24, 64, seed=seed), requires_grad=False) for seed in (3, 4)]
    gc.collect()
    check(1)
    assert kernels.stats() == {"kernel": {packed.RECORDS["predicated"].name: 6}, "torch": {}}
    weights[0].requires_grad_()
    fused_operators.gated_pair(x, *weights, "silu").sum().backward()
    assert weights[0].grad is not None
    derived.DERIVED.clear()


def test_torch_needs_no_copies() -> None:
    derived.DERIVED.clear()
    fused_operators.gated_pair(normal(5, 64), normal(24, 64), normal(24, 64), "silu")
    assert len(derived.DERIVED) == 0


def test_a_captured_graph_reads_no_copy(
    device: EmulatedDevice, kernels: dispatch.Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a copy, replays would miss changes of a weight, and read the memory of a replaced copy."""
    derived.DERIVED.clear()
    own, copies = kernels.device, derived.DERIVED._copies
    assert isinstance(own, OperatorDevice)
    x, w1, w3 = normal_half(device, 5, 64), normal_half(device, 24, 64, seed=1), normal_half(device, 24, 64, seed=2)
    fused_operators.gated_pair(x, w1, w3, "silu")  # warms up before the capture
    for copy in copies.values():
        copy.weight.fill_(math.nan)
    monkeypatch.setattr(own, "captures", True)
    d = fused_operators.gated_pair(x, w1, w3, "silu")
    check_close(d, activate(x.double() @ w1.double().mT, "silu") * (x.double() @ w3.double().mT), 64)
    derived.DERIVED.clear()


def test_threads_share_copies() -> None:
    """One thread removes copies whose weights are gone while others add copies."""
    own, faults = derived.Derived(), []

    def many() -> None:
        try:
            for seed in range(300):
                pair = (torch.full((8, 8), float(seed)), torch.zeros(8, 8))
                assert float(own.interleaved(*pair, empty)[0, 0]) == seed
        except Exception as fault:
            faults.append(fault)

    threads = [threading.Thread(target=many) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert faults == []
    assert len(own) <= 5


# --- as torch's operators ---


@pytest.mark.slow
def test_torch_checks_the_operators() -> None:
    ops = torch.ops.cudal2gen
    for differentiable in (False, True):
        x, weight, bias, other = (
            tensor.requires_grad_(differentiable)
            for tensor in (normal(2, 3, 5), normal(16, 5, seed=1), normal(16, seed=2), normal(16, 5, seed=3))
        )
        for name in ("fused_linear", "fused_linear_aux"):
            torch.library.opcheck(getattr(ops, name).default, (x, weight, bias, "gelu"))
            torch.library.opcheck(getattr(ops, name).default, (x, weight, None, "silu", True))
        for name in ("gated_pair", "gated_pair_aux"):
            torch.library.opcheck(getattr(ops, name).default, (x, weight, other, "silu"))


@pytest.mark.slow
def test_compiled_without_a_graph_break() -> None:
    x, weight, bias, other = normal(6, 8), normal(16, 8, seed=1), normal(16, seed=2), normal(16, 8, seed=3)

    def model(x: Any, weight: Any, bias: Any, other: Any) -> Any:
        d = cudal2gen.linear(x, weight, bias, activation="gelu_tanh")
        e = cudal2gen.swiglu(x, weight) + fused_operators.gated_pair(x, weight, other, "silu")[:, :8]
        return (d[:, :8] + e).sum() + cudal2gen.bmm(d[None], e.new_ones(1, 16, 2)).sum()

    for differentiable in (False, True):
        arguments = [tensor.clone().requires_grad_(differentiable) for tensor in (x, weight, bias, other)]
        torch._dynamo.reset()
        own = torch.compile(model, fullgraph=True, backend="aot_eager")(*arguments)
        expected = model(*arguments)
        torch.testing.assert_close(own, expected)
        if differentiable:
            for first, second in zip(
                torch.autograd.grad(own, arguments), torch.autograd.grad(expected, arguments), strict=True
            ):
                torch.testing.assert_close(first, second)
