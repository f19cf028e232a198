"""Proves that ``matmul`` and ``linear`` are operators of torch: on the CPU, with gradients, compiled, in threads."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import cudal2gen
from tests.cudal2gen.emulated import EmulatedDevice
from tests.packages import require

torch = require("torch")

from cudal2gen.operators import dispatch, plans, torch_operators  # noqa: E402
from tests.cudal2gen.test_operators import directory, draw_integers, opened_pack, product, ran, run_python  # noqa: E402

__all__ = ["directory", "opened_pack"]  # fixtures
pytestmark = pytest.mark.torch


# --- on the CPU, and as torch's operators ---


def test_torch_computes_cpu_tensors_with_fp32_sums() -> None:
    a, b = torch.randn(40, 1000).half(), torch.randn(1000, 24).half()
    before = cudal2gen.stats()["torch"].get("on the CPU", 0)
    assert torch.equal(cudal2gen.matmul(a, b), (a.float() @ b.float()).half())
    assert torch.equal(cudal2gen.matmul(a, b, acc="f16"), (a.float() @ b.float()).half())
    out = torch.empty(40, 24).half()
    assert torch.equal(cudal2gen.matmul(a, b, out=out), cudal2gen.matmul(a, b))
    assert cudal2gen.stats()["torch"]["on the CPU"] == before + 4


@pytest.mark.slow
def test_torch_checks_the_operators() -> None:
    a, b, bias = torch.randn(6, 5).half(), torch.randn(5, 7).half(), torch.randn(7).half()
    ops = torch.ops.cudal2gen
    for differentiable in (False, True):
        x, y, z = (tensor.clone().requires_grad_(differentiable) for tensor in (a, b, bias))
        torch.library.opcheck(ops.matmul.default, (x, y))
        torch.library.opcheck(ops.matmul.default, (x, y.detach(), "f16"))
        torch.library.opcheck(ops.linear.default, (x.view(2, 3, 5), y.t(), z))
        torch.library.opcheck(ops.linear.default, (x, y.t().contiguous()))
    torch.library.opcheck(ops.matmul.out, (a, b), {"out": torch.empty(6, 7).half()})


def test_gradients_are_those_of_torch() -> None:
    a, b, bias = torch.randn(6, 5).half(), torch.randn(7, 5).half(), torch.randn(7).half()

    def gradients(function: Any) -> list[Any]:
        inputs = [tensor.clone().requires_grad_() for tensor in (a, b, bias)]
        function(*inputs).square().sum().backward()
        return [tensor.grad for tensor in inputs]

    for own, reference in (
        (lambda x, w, c: cudal2gen.matmul(x, w.t()) + c, lambda x, w, c: x @ w.t() + c),
        (cudal2gen.linear, torch.nn.functional.linear),
        (lambda x, w, c: cudal2gen.linear(x.view(2, 3, 5), w, c), torch.nn.functional.linear),
    ):
        for gradient, expected in zip(gradients(own), gradients(reference), strict=True):
            torch.testing.assert_close(gradient, expected, atol=0.05, rtol=0.01)
    frozen = torch.nn.Parameter(b, requires_grad=False)
    x = a.clone().requires_grad_()
    cudal2gen.linear(x, frozen).sum().backward()
    assert x.grad is not None
    assert frozen.grad is None


@pytest.mark.parametrize("columns", list(itertools.product((False, True), repeat=2)), ids=str)
def test_gradients_lie_as_those_of_torch(columns: tuple[bool, bool]) -> None:
    """A gradient has its operand's layout: that of ``w`` in ``matmul(x, w.t())`` is contiguous."""
    shapes = ((5, 6), (6, 7))
    own, reference = (
        [
            torch.randn(shape[::-1] if transposed else shape).double()
            for shape, transposed in zip(shapes, columns, strict=True)
        ]
        for _ in range(2)
    )
    weights = torch.randn(5, 7).double()
    gradients = []
    for function, leaves in ((cudal2gen.matmul, own), (torch.matmul, reference)):
        for leaf, first in zip(leaves, own, strict=True):
            leaf.copy_(first).requires_grad_()
        a, b = (leaf.t() if transposed else leaf for leaf, transposed in zip(leaves, columns, strict=True))
        gradients.append(torch.autograd.grad((function(a, b) * weights).sum(), leaves))
    for mine, torchs in zip(*gradients, strict=True):
        assert mine.stride() == torchs.stride()
        assert mine.is_contiguous()
        torch.testing.assert_close(mine, torchs)


def test_a_gradient_of_rows_that_are_alike_is_made_of_rows() -> None:
    """The gradient of a batch-invariant product's A also has equal rows, even if A is stored in columns."""
    context = SimpleNamespace(save_for_backward=lambda *_: None)
    a, b = torch.randn(6, 5).half().t(), torch.randn(7, 6).half().t()
    for invariant in (False, True):
        torch_operators._keep_matmul(context, (a, b, "f32", None), None, invariant)
        assert context.columns == (not invariant, True)


def test_gradients_through_kernels(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    """The forward product and the gradient of x, of which only x needs one, are computed by kernels."""
    x, weight = draw_integers(device, 40, 64), draw_integers(device, 24, 64)
    x.requires_grad_()
    cudal2gen.linear(x, weight).backward(draw_integers(device, 40, 24))
    assert torch.equal(x.grad, product(draw_integers(device, 40, 24), weight))
    assert ran(kernels) == (2, [])


def compile_anew(function: Any, **options: Any) -> Any:
    """The function, compiled anew without a graph break."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.slow
def test_compiled_without_a_graph_break(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = draw_integers(device, 40, 64), draw_integers(device, 24, 64).t()

    def model(x: Any, y: Any) -> Any:
        d = cudal2gen.matmul(x, y)
        return d, cudal2gen.linear(cudal2gen.matmul(d, y.t()), y.t()), d + 1

    expected = model(a, b)
    before = ran(kernels)[0]
    for dynamic in (False, True):
        results = compile_anew(model, dynamic=dynamic)(a, b)
        assert all(torch.equal(result, other) for result, other in zip(results, expected, strict=True))
    assert ran(kernels) == (before + 6, [])


@pytest.mark.slow
def test_compiled_with_out_and_gradients() -> None:
    a, b, weight = torch.randn(6, 5).half(), torch.randn(5, 7).half(), torch.randn(3, 7).half()

    def writes(x: Any, y: Any, out: Any) -> Any:
        cudal2gen.matmul(x, y, out=out)
        return out + 1

    out = torch.empty(6, 7).half()
    assert torch.equal(compile_anew(writes)(a, b, out), cudal2gen.matmul(a, b) + 1)
    assert torch.equal(out, cudal2gen.matmul(a, b))

    def loss(x: Any, w: Any) -> Any:
        return cudal2gen.linear(cudal2gen.matmul(x, b), w).sum()

    for function in (loss, compile_anew(loss)):
        x, w = a.clone().requires_grad_(), weight.clone().requires_grad_()
        function(x, w).backward()
        torch.testing.assert_close(w.grad, cudal2gen.matmul(a, b).sum(0).expand(3, 7), atol=0.02, rtol=0.01)


@pytest.mark.slow
def test_an_operator_is_first_called_while_torch_compiles() -> None:
    program = """
import torch, cudal2gen
f = torch.compile(lambda a, b: cudal2gen.matmul(a, b) * 2, fullgraph=True, backend="aot_eager")
a = torch.ones(8, 8).half()
assert float(f(a, a)[0, 0]) == 16
"""
    done = run_python(program)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_no_torch() -> None:
    program = "import sys, cudal2gen; assert 'matmul' in dir(cudal2gen); assert 'torch' not in sys.modules"
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    missing = run_python("import cudal2gen; cudal2gen.nothing")
    assert "module 'cudal2gen' has no attribute 'nothing'" in missing.stderr


def test_who_watches_sees_the_operators() -> None:
    """Modes, transforms and tracers see every operator."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    a = torch.ones(8, 8).half()
    with Watch():
        cudal2gen.matmul(a, a)
        cudal2gen.linear(a, a)
    assert [name for name in calls if "cudal2gen" in name] == ["cudal2gen.matmul.default", "cudal2gen.linear.default"]
    assert "cudal2gen.matmul" in str(make_fx(lambda x: cudal2gen.matmul(x, x))(a).graph)


def test_many_threads_make_one_plan(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    """Kernels are opened once. The emulator runs one launch at a time, so only planning is concurrent."""
    a, b = draw_integers(device, 64, 128), draw_integers(device, 64, 128).t()
    explanations: list[str] = []
    threads = [threading.Thread(target=lambda: explanations.append(cudal2gen.explain(a, b))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(explanations)) == 1
    assert len(kernels._packs._opened) == 1
    assert len(kernels.plans) == 1


def test_ever_new_shapes_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_PLANS", 4)
    dispatcher = dispatch.Dispatcher([])
    monkeypatch.setattr(dispatch.Current, "dispatcher", dispatcher)
    for k in range(1, 12):
        cudal2gen.matmul(torch.ones(2, k).half(), torch.ones(k, 2).half())
    assert len(dispatcher.plans) <= 4
    assert dispatcher.stats()["torch"] == {"on the CPU": 11}, "what was forgotten is counted"


@pytest.mark.parametrize("into", [False, True])
def test_a_plan_is_for_tensors_that_begin_alike(
    into: bool, device: EmulatedDevice, kernels: dispatch.Dispatcher
) -> None:
    """A kernel that reads or writes vectors of 16 bytes does not take tensors that begin between them. Each tensor has
    an offset of its own; the product is right, and offsets that differ by 16 bytes share a plan."""
    shapes = (16, 64), (64, 32), (16, 32)

    def at(shape: tuple[int, int], offset: int) -> Any:
        """A matrix of ones that begins ``offset`` elements after a multiple of 32 bytes."""
        memory = device.empty(shape[0] * shape[1] + 16)
        return memory.fill_(1.0)[offset : offset + shape[0] * shape[1]].view(shape)

    for moved, offset in itertools.product(range(3 if into else 2), (0, 4, 8)):
        a, b, out = (at(shape, offset if moved == number else 0) for number, shape in enumerate(shapes))
        d = cudal2gen.matmul(a, b, out=out.zero_()) if into else cudal2gen.matmul(a, b)
        assert torch.equal(d, torch.full((16, 32), 64.0).half())
    # All aligned, and one offset of each tensor.
    assert len(kernels.plans) == 1 + (3 if into else 2)
