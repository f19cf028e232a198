"""Proves against torch that operators are right under autocast, dynamic shapes, checkpoints, inference and captures."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest

import cudal2gen
from tests.cudal2gen.emulated import EmulatedDevice, OperatorDevice
from tests.packages import require

torch = require("torch")
nn = torch.nn
functional = torch.nn.functional

from cudal2gen.operators import dispatch  # noqa: E402

pytestmark = pytest.mark.torch


def normal(*shape: int) -> Any:
    """Normally distributed fp16 numbers."""
    return torch.randn(shape).half()


def close(d: Any, expected: Any) -> None:
    """Checks the type of a result, and its numbers within the rounding of fp16."""
    assert d.dtype == expected.dtype
    torch.testing.assert_close(d, expected, atol=2e-2, rtol=2e-2)


def outcome(model: Any, x: Any) -> Any:
    """The result of a model, or the class of the exception that it raises."""
    try:
        return model(x)
    except RuntimeError as error:
        return type(error)


@pytest.mark.parametrize("weights", [torch.float16, torch.float32])
def test_autocasts_of_a_patched_model_are_those_of_torch(weights: Any) -> None:
    """Autocast is used alone, nested, and switched off inside another autocast."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 24)).to(weights)
    patched = deepcopy(model)
    cudal2gen.patch(patched, fuse=True)
    x = torch.randn(8, 64)
    compared = 0
    for outer in (torch.float16, torch.bfloat16):
        for inner in (None, torch.float16, torch.bfloat16, False):
            for kind in (torch.float32, weights):
                with torch.autocast("cpu", dtype=outer):
                    within = (
                        nullcontext()
                        if inner is None
                        else torch.autocast("cpu", dtype=inner or outer, enabled=bool(inner))
                    )
                    with within:
                        expected, own = (outcome(each, x.to(kind)) for each in (model, patched))
                if isinstance(expected, type):
                    assert own is expected
                else:
                    close(own, expected)
                    compared += 1
    # Of the 16 combinations, at most two have different types without autocast: an fp32 x with fp16 weights.
    assert compared >= 14


ROWS = (8, 13, 1, 64, 0)  # of x, one call after another
DRAWS = torch.Generator().manual_seed(1)
WEIGHT, BIAS = (torch.randn(shape, generator=DRAWS).half() for shape in ((24, 64), (24,)))


@pytest.mark.slow
def test_rows_vary_through_as_many_graphs_as_torchs_own() -> None:
    from torch._dynamo.testing import CompileCounter

    def own(x: Any) -> Any:
        return cudal2gen.matmul(cudal2gen.linear(x, WEIGHT, BIAS, activation="silu"), WEIGHT)

    def reference(x: Any) -> Any:
        return functional.silu(functional.linear(x, WEIGHT, BIAS)) @ WEIGHT

    frames = []
    for function in (own, reference):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(function, backend=counter, fullgraph=True)
        for rows in ROWS:
            x = normal(rows, 64)
            torch.testing.assert_close(compiled(x), reference(x), atol=0.1, rtol=2e-2)
        frames.append(counter.frame_count)
    assert frames[0] == frames[1] < len(ROWS)
    torch._dynamo.reset()
    counter, marked = CompileCounter(), normal(8, 64)
    torch._dynamo.mark_dynamic(marked, 0)
    compiled = torch.compile(own, backend=counter, fullgraph=True)
    for x in (marked, normal(64, 64), normal(13, 64)):
        torch.testing.assert_close(compiled(x), reference(x), atol=0.1, rtol=2e-2)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_gradients_of_dynamic_rows() -> None:
    def loss(function: Any, rows: int) -> tuple[Any, Any]:
        torch.manual_seed(rows)
        x, weight = normal(rows, 64).requires_grad_(), WEIGHT.clone().requires_grad_()
        function(x, weight).float().square().mean().backward()
        return x.grad, weight.grad

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, w: cudal2gen.linear(x, w, activation="silu"), backend="aot_eager", dynamic=True, fullgraph=True
    )
    for rows in (5, 9, 33):
        expected = loss(lambda x, w: functional.silu(functional.linear(x, w)), rows)
        for own, reference in zip(loss(compiled, rows), expected, strict=True):
            close(own, reference)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("cast", [False, True])
def test_checkpoints_give_the_same_gradients(reentrant: bool, cast: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    x, gradients = normal(8, 64), []

    def layer(y: Any, weight: Any) -> Any:
        return cudal2gen.linear(cudal2gen.linear(y, weight, BIAS, "gelu"), weight.t())

    for run in (lambda *tensors: checkpoint(layer, *tensors, use_reentrant=reentrant), layer):
        operands = [tensor.clone().requires_grad_() for tensor in (x, WEIGHT)]
        with torch.autocast("cpu", dtype=torch.float16, enabled=cast):
            d = run(*operands)
        d.float().square().mean().backward()
        gradients.append([tensor.grad for tensor in operands])
    assert all(torch.equal(own, plain) for own, plain in zip(*gradients, strict=True))
    assert float(gradients[0][1].abs().max()) > 0


def test_a_checkpoint_may_keep_what_operators_computed() -> None:
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    kept: list[str] = []

    def policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> Any:
        if "cudal2gen" not in str(operator):
            return CheckpointPolicy.PREFER_RECOMPUTE
        kept.append(str(operator))
        return CheckpointPolicy.MUST_SAVE

    x, gradients = normal(8, 64), []
    for options in ({}, {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}):
        own, weight = x.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
        d = checkpoint(_square, own, weight, use_reentrant=False, **options)
        d.sum().backward()
        gradients.append(weight.grad)
    assert torch.equal(*gradients)
    assert kept
    assert float(gradients[0].abs().max()) > 0


def _square(x: Any, weight: Any) -> Any:
    """The squares of a fused layer's results, a function for transforms."""
    return cudal2gen.linear(x, weight, BIAS, "gelu").square()


def test_inference_mode_around_and_within() -> None:
    weight = WEIGHT.clone().requires_grad_()
    with torch.inference_mode():
        x = normal(8, 64)
        d = cudal2gen.linear(x, weight, BIAS, "relu")
        assert d.is_inference()
        close(d, functional.relu(functional.linear(x, weight, BIAS)))
        out = torch.empty(8, 24).half()
        close(cudal2gen.matmul(x, WEIGHT.t(), out=out), functional.linear(x, weight))
    close(cudal2gen.linear(x, WEIGHT), functional.linear(x, WEIGHT))
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        cudal2gen.linear(x, weight)


def test_a_compiled_call_obeys_the_rules_of_captures(
    device: EmulatedDevice, operator_device: OperatorDevice, kernels: dispatch.Dispatcher
) -> None:
    """No kernel is loaded during a capture. A kernel that is loaded already is captured."""
    x, weight = (device.empty(*shape).copy_(torch.randint(-2, 3, shape)) for shape in ((40, 64), (24, 64)))
    expected = functional.linear(x.double(), weight.double()).half()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: cudal2gen.linear(x, w) + 0, backend="aot_eager", fullgraph=True)
    operator_device.captures = True
    assert torch.equal(compiled(x, weight), expected)
    assert kernels.stats() == {"kernel": {}, "torch": {"first used in a graph capture": 1}}
    operator_device.captures = False
    assert torch.equal(compiled(x, weight), expected)
    operator_device.captures = True
    assert torch.equal(compiled(x, weight), expected)
    assert sum(kernels.stats()["kernel"].values()) == 2
