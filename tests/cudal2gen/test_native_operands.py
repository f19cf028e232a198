"""Proves that C++ makes calls with ``out`` and linear layers with a bias, with Python's numbers, counts and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

import cudal2gen
from cudal2gen import pack
from tests.cudal2gen import idle_device
from tests.cudal2gen.test_native_calls import (
    Reference,
    device,
    dispatcher,
    draw_integers,
    kernel_calls,
    opened_pack,
    plan_as_on_gpu,
    product,
    reference,
)
from tests.packages import require

torch = require("torch")

from cudal2gen.operators import dispatch, emulated  # noqa: E402
from cudal2gen.operators.plan_requests import are_disjoint  # noqa: E402
from scripts import overhead  # noqa: E402

pytestmark = pytest.mark.torch

BUILT_AHEAD = idle_device.records("bias_n", "bias_n+silu")
__all__ = ["device", "dispatcher", "opened_pack", "reference"]  # fixtures


# --- out ---


@pytest.mark.parametrize("layout", ["nn", "tn"])
def test_d_is_written_where_it_lies(layout: str, dispatcher: dispatch.Dispatcher, reference: Reference) -> None:
    reference.layout = layout
    a, b = draw_integers(48, 64), draw_integers(40, 64, seed=1).t() if layout == "tn" else draw_integers(64, 40, seed=1)
    rows = torch.full((48, 72), 9.0).half()
    for count, out in enumerate((torch.empty(48, 40).half(), rows[:, :40])):
        for calls in range(3):
            version = out._version
            out.fill_(9)
            assert cudal2gen.matmul(a, b, out=out) is out
            assert out._version == version + 2, "one of fill_, one of the product"
            assert len(reference.streams) == 2 * count + calls, "the first is Python's"
        assert torch.equal(out, product(a, b))
    assert torch.equal(rows[:, 40:], torch.full((48, 32), 9.0).half())
    batch = torch.empty(3, 48, 40).half()
    for _ in range(2):
        cudal2gen.matmul(torch.stack([a, a, a]), b, out=batch)
    assert torch.equal(batch, product(torch.stack([a, a, a]), b))
    assert kernel_calls(dispatcher) == 8
    assert len(reference.streams) == 5
    assert dispatcher.stats()["torch"] == {}


def test_out_that_overlaps_is_refused_at_each_call(dispatcher: dispatch.Dispatcher, reference: Reference) -> None:
    memory = draw_integers(5 * 64 * 64)
    a, b, apart = (memory[64 * 64 * place :][: 64 * 64].view(64, 64) for place in (1, 2, 3))
    for _ in range(3):
        cudal2gen.matmul(a, b, out=apart)
    assert (kernel_calls(dispatcher), len(reference.streams)) == (3, 2)
    for start in (8, 64 * 64, 2 * 64 * 64 - 64, 2 * 64 * 64 + 64, 3 * 64 * 64 - 8):
        overlapping = memory[start : start + 64 * 64].view(64, 64)
        before = memory.clone()
        for _ in range(2):
            with pytest.raises(ValueError, match="shares memory"):
                cudal2gen.matmul(a, b, out=overlapping)
        assert torch.equal(memory, before)
    cudal2gen.matmul(b, apart, out=a)
    assert (kernel_calls(dispatcher), len(reference.streams)) == (4, 3)


def test_out_may_lie_in_other_columns_of_an_operands_rows(dispatcher: dispatch.Dispatcher) -> None:
    rows, b = draw_integers(48, 160), draw_integers(64, 40, seed=1)
    a = rows[:, 40:104]
    for columns in (slice(0, 40), slice(104, 144), slice(120, 160)):
        for _ in range(2):
            cudal2gen.matmul(a, b, out=rows[:, columns])
    for columns in (slice(1, 41), slice(103, 143), slice(60, 100)):
        with pytest.raises(ValueError, match="shares memory"):
            cudal2gen.matmul(a, b, out=rows[:, columns])
    for out in (rows.view(96, 80)[:48, :40], rows.view(96, 80)[1:49, :40]):
        with pytest.raises(ValueError, match="shares memory"):
            cudal2gen.matmul(a, b, out=out)
    batch = rows.view(3, 16, 160)
    cudal2gen.matmul(batch[..., 40:104], b, out=batch[..., :40])
    assert kernel_calls(dispatcher) == 7


def test_what_is_apart_has_no_element_in_common() -> None:
    """This holds for drawn views of one memory. Views of disjoint columns or rows are recognised as disjoint."""
    random = Random(3)
    memory, numbers = torch.zeros(4096).half(), torch.arange(4096)
    found = 0
    for _ in range(2000):
        shapes = [tuple(random.randint(1, 4) for _ in range(random.randint(1, 3))) for _ in range(2)]
        strides = [tuple(random.choice([0, 1, 2, 4, 8, 9, 32, 64]) for _ in shape) for shape in shapes]
        places = [(*pair, random.randint(0, 80)) for pair in zip(shapes, strides, strict=True)]
        common = torch.isin(*(numbers.as_strided(*place).flatten() for place in places)).any()
        is_apart = are_disjoint(*(memory.as_strided(*place) for place in places))
        assert not (is_apart and common)
        found += is_apart
    assert found > 200
    rows = memory.view(64, 64)
    assert are_disjoint(rows[:, :32], rows[:, 32:])
    assert are_disjoint(rows[::2], rows[1::2])
    assert not are_disjoint(rows[:, :33], rows[:, 32:])


def test_a_tensor_of_inference_mode_is_written_in_that_mode(dispatcher: dispatch.Dispatcher) -> None:
    a, b = draw_integers(48, 64), draw_integers(64, 40, seed=1)
    with torch.inference_mode():
        out = torch.zeros(48, 40).half()
    for call in (cudal2gen.matmul, torch.ops.cudal2gen.matmul):
        for _ in range(2):
            with pytest.raises(ValueError, match="inference mode"):
                call(a, b, out=out)
            with pytest.raises(RuntimeError, match="InferenceMode"):
                torch.matmul(a, b, out=out)
    assert dispatcher.stats() == {"kernel": {}, "torch": {}}


def test_out_with_a_lazy_sign(dispatcher: dispatch.Dispatcher) -> None:
    cudal2gen.matmul(draw_integers(48, 64), draw_integers(64, 40))  # makes the C++ function available
    a, b = draw_integers(48, 64).cfloat() * 1j, draw_integers(64, 40, seed=1).cfloat() * (1 + 1j)
    for call in (cudal2gen.matmul, torch.ops.cudal2gen.matmul):
        for _ in range(2):
            conjugate, negative = torch.empty(48, 40).cfloat().conj(), torch._neg_view(torch.empty(48, 40).half())
            call(a, b.conj(), out=conjugate)
            call(a.real.half(), b.real.half(), out=negative)
            assert (conjugate.is_conj(), negative.is_neg()) == (True, True)
            assert torch.equal(conjugate, a @ b.conj())
            assert torch.equal(negative, (a.real @ b.real).half())
    with pytest.raises(RuntimeError, match="batch invariance"):
        cudal2gen.matmul(a.real.half(), b.real.half(), out=negative, batch_invariant=True)


def test_out_of_other_types_modes_and_gradients(dispatcher: dispatch.Dispatcher, reference: Reference) -> None:
    a, b, out = draw_integers(48, 64), draw_integers(64, 40, seed=1), torch.empty(48, 40).half()
    for _ in range(2):
        cudal2gen.matmul(a, b, out=out)
    with pytest.raises(TypeError, match=r"^out:"):
        cudal2gen.matmul(a, b, out=out.float())
    with pytest.raises(ValueError, match=r"^out:"):
        cudal2gen.matmul(a, b, out=torch.empty(40, 40).half())
    for call in (cudal2gen.matmul, torch.ops.cudal2gen.matmul):
        with pytest.raises(ValueError, match="not differentiable"):
            call(a.clone().requires_grad_(), b, out=out)
    assert len(reference.streams) == 1
    with torch.inference_mode():
        inferred = torch.empty(48, 40).half()
        cudal2gen.matmul(a, b, out=inferred)
        assert torch.equal(inferred, product(a, b))
    assert len(reference.streams) == 2
    with torch.autocast("cpu", torch.bfloat16):
        cudal2gen.matmul(a, b, out=out)
    assert len(reference.streams) == 2, "under autocast calls are Python's"
    for _ in range(2):
        cudal2gen.matmul(a, b, out=out, batch_invariant=True)
    assert len(reference.streams) == 3
    assert kernel_calls(dispatcher) == 6


# --- biases ---


def layer(x: Any, weight: Any, bias: Any) -> Any:
    """The exact result of a linear layer, rounded to fp16."""
    return (x.double() @ weight.double().t() + bias.double()).half()


def test_a_bias_is_added_to_the_kernels_sums(dispatcher: dispatch.Dispatcher, reference: Reference) -> None:
    """If no kernel adds the bias, torch adds it, called from C++."""
    reference.layout = "tn"
    x, weight, bias = draw_integers(2, 5, 64), draw_integers(40, 64, seed=1), draw_integers(40, seed=2)
    cudal2gen.linear(x, weight, bias)
    for calls in range(1, 4):
        d = cudal2gen.linear(x, weight, bias)
        assert torch.equal(d, layer(x, weight, bias))
        assert (d.shape, d.requires_grad, len(reference.streams)) == ((2, 5, 40), False, calls)
    other = cudal2gen.linear(x, weight, draw_integers(80, seed=2)[::2])
    assert other.shape == d.shape
    assert len(reference.streams) == 3, "a bias with gaps is another kind"
    with pytest.raises(ValueError, match=r"^bias:"):
        cudal2gen.linear(x, weight, draw_integers(1))
    with pytest.raises(TypeError, match=r"^bias:"):
        cudal2gen.linear(x, weight, bias.float())
    assert dispatcher.stats()["torch"] == {}
    learned = bias.clone().requires_grad_()
    cudal2gen.linear(x, weight, learned).sum().backward()
    assert learned.grad is not None


@pytest.fixture(scope="module")
def bias_pack(tmp_path_factory: pytest.TempPathFactory) -> pack.Pack:
    """A pack with kernels that add a bias, and one that also applies SiLU."""
    return idle_device.open_pack(tmp_path_factory.mktemp("packs"), "bias_n", "bias_n+silu")


@pytest.fixture
def fusing_dispatcher(
    device: idle_device.IdleDevice, bias_pack: pack.Pack, reference: Reference
) -> Iterator[dispatch.Dispatcher]:
    """A dispatcher that takes kernels of ``bias_pack``."""
    with emulated(device, [bias_pack], prefer="kernel") as own:
        yield own


def test_a_kernel_adds_its_bias(fusing_dispatcher: dispatch.Dispatcher, reference: Reference) -> None:
    reference.layout = "tn"
    x, weight = draw_integers(48, 64), draw_integers(40, 64, seed=1)
    for seed in range(4):
        bias = draw_integers(40, seed=seed)
        d = cudal2gen.linear(x, weight, bias)
        if seed:
            assert torch.equal(d, layer(x, weight, bias))
            given = reference.fused[-1]
            assert (given.bias, given.c, given.alpha, given.beta, given.aux) == (bias.data_ptr(), None, 1, 0, None)
    assert len(reference.fused) == 3
    gaps = draw_integers(80)[::2]
    for _ in range(2):
        cudal2gen.linear(x, weight, gaps)
    assert len(reference.fused) == 3, "Python copies a bias with gaps"
    cudal2gen.linear(x, weight, bias, "silu")
    cudal2gen.linear(x, weight, bias, "silu")
    assert len(reference.streams) == 3, "other fusions are Python's"
    (name,) = {name for name in fusing_dispatcher.stats()["kernel"] if "silu" not in name}
    assert "bias" in name
    assert fusing_dispatcher.stats()["torch"] == {}


def test_python_reports_a_refused_launch_with_a_bias(
    fusing_dispatcher: dispatch.Dispatcher, reference: Reference
) -> None:
    x, weight, bias = draw_integers(48, 64), draw_integers(40, 64, seed=1), draw_integers(40, seed=2)
    reference.code = 1
    for _ in range(2):
        cudal2gen.linear(x, weight, bias)
    assert len(reference.streams) == 1
    assert kernel_calls(fusing_dispatcher) == 2, "Python's launches, which nothing refuses here"


# --- torch's products ---


def test_cpp_makes_calls_of_layers_and_products_into_out_that_torch_computes(
    dispatcher: dispatch.Dispatcher, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is the case on a GPU, where they are calls of an operator."""
    planned_calls = plan_as_on_gpu(monkeypatch, "plan_linear", "_plan_and_write")
    x, weight, bias = (
        draw_integers(48, 64).float(),
        draw_integers(40, 64, seed=1).float(),
        draw_integers(40, seed=2).float(),
    )
    out = torch.empty(48, 40)
    for _ in range(3):
        assert torch.equal(cudal2gen.linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
        out.fill_(9)
        version = out._version
        assert cudal2gen.matmul(x, weight.t(), out=out) is out
        assert out._version > version
        assert torch.equal(out, x @ weight.t())
    assert [call[0] for call in planned_calls] == ["plan_linear", "_plan_and_write"]
    assert dispatcher.stats()["torch"] == {"no kernels of torch.float32": 6}
    gaps = torch.empty(48, 80)[:, :40]
    for _ in range(3):
        cudal2gen.matmul(x, weight.t(), out=gaps)
        assert torch.equal(gaps, x @ weight.t())
    planned = [call[0] for call in planned_calls]
    assert planned == ["plan_linear", *["_plan_and_write"] * 2], "computed once, though it has gaps"
    with pytest.raises(ValueError, match="shares memory"):
        cudal2gen.matmul(x[:, :40], weight[:, :40].t(), out=x[:, :40])


# --- what a call costs ---


def test_calls_with_three_operands_cost_little_more_than_plain_ones(
    device: idle_device.IdleDevice, bias_pack: pack.Pack
) -> None:
    """Through Python they cost twice as much. The times are minima of short alternating rounds, repeated while
    disturbed."""
    a, weight, bias, out = (
        draw_integers(8, 8),
        draw_integers(8, 8, seed=1),
        draw_integers(8, seed=2),
        torch.empty(8, 8).half(),
    )
    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: cudal2gen.matmul(a, weight),
        "out": lambda: cudal2gen.matmul(a, weight, out=out),
        "bias": lambda: cudal2gen.linear(a, weight, bias),
    }
    least = dict.fromkeys(calls, float("inf"))
    with torch.no_grad(), emulated(device, [bias_pack], prefer="kernel"):
        for call in calls.values():
            call()
        for _ in range(10):
            cost = overhead.costs(calls, rounds=40)
            least = {name: min(least[name], cost[name].least) for name in least}
            if max(least.values()) < 1.4 * least["plain"]:
                break
    assert max(least.values()) < 1.4 * least["plain"], least
