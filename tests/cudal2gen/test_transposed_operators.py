"""Proves in the emulator that the operators read a transposed A, stored as (k,m), without copying it.

The gradient of a weight is such a product: its A is a transposed view.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import cudal2gen
from cudal2gen.pack import Pack, open_pack
from tests.cudal2gen import packed
from tests.cudal2gen.emulated import EmulatedDevice, OperatorDevice
from tests.cudal2gen.emulated_operators import GPU
from tests.cudal2gen.paths import RAGGED, STRAIGHT, small
from tests.packages import require

torch = require("torch")

from cudal2gen.operators import dispatch, emulated, plan_requests  # noqa: E402
from cudal2gen.operators.measuring import buckets, races  # noqa: E402
from cudal2gen.operators.measuring.tuned import Store  # noqa: E402
from tests.cudal2gen.racing import A100, Clock, ClockedDevice, measurements, simulated_process, store  # noqa: E402
from tests.cudal2gen.test_operators import draw_integers, product, ran  # noqa: E402

__all__ = ["store"]  # a fixture

pytestmark = pytest.mark.torch

# A kernel of single products for each layout, and a batched one.
PLAIN = {layout: small(acc="f32", layout=layout, **RAGGED, **STRAIGHT) for layout in ("tn", "nn", "nt", "tt")}
BATCHED = small(acc="f32", layout="nt", batch="strided", **RAGGED, **STRAIGHT)
BUILT_AHEAD = [*PLAIN.values(), BATCHED]


@pytest.fixture(scope="module")
def opened_pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """A pack with these kernels."""
    return open_pack(packed.folder(packed.table(BUILT_AHEAD), tmp_path_factory.mktemp("packs") / GPU))


@pytest.fixture
def kernels(operator_device: OperatorDevice, opened_pack: Pack) -> Iterator[dispatch.Dispatcher]:
    """A dispatcher that takes these kernels wherever one serves the call."""
    with emulated(operator_device, [opened_pack], prefer="kernel") as dispatcher:
        yield dispatcher


def layouts(dispatcher: dispatch.Dispatcher) -> list[str]:
    """The layouts of the kernels that ran, sorted; everything ran on kernels."""
    counted = dispatcher.stats()
    assert counted["torch"] == {}
    return sorted(name.partition("_f32_")[2][:2] for name, calls in counted["kernel"].items() for _ in range(calls))


@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 128), (40, 24, 101), (31, 47, 8), (2, 3, 5), (33, 1, 72)])
@pytest.mark.parametrize("b_along_k", [False, True])
def test_a_transposed_view_in_any_size(
    m: int, n: int, k: int, b_along_k: bool, device: EmulatedDevice, kernels: dispatch.Dispatcher
) -> None:
    a, b = (
        draw_integers(device, k, m).t(),
        draw_integers(device, n, k).t() if b_along_k else draw_integers(device, k, n),
    )
    assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
    out = draw_integers(device, m, n)
    assert torch.equal(cudal2gen.matmul(a, b, out=out), product(a, b))
    assert layouts(kernels) == ["tt" if b_along_k or n == 1 else "nt"] * 2


def test_nothing_is_copied(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = draw_integers(device, 101, 40, wide=80).t(), draw_integers(device, 101, 24, wide=72)
    allocated: list[Any] = []
    device.empty, real = (lambda *shape: allocated.append(shape) or real(*shape)), device.empty  # type: ignore[func-returns-value,method-assign]
    assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
    assert allocated == [(40, 24)], "D alone is allocated"
    assert layouts(kernels) == ["nt"]


def test_all_products_of_a_training_step_are_kernels(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    x, weight, grad = draw_integers(device, 40, 64), draw_integers(device, 24, 64), draw_integers(device, 40, 24)
    expected = product(grad, weight), product(grad.t(), x)
    x.requires_grad_()
    weight.requires_grad_()
    cudal2gen.linear(x, weight).backward(grad)
    assert all(torch.equal(*pair) for pair in zip((x.grad, weight.grad), expected, strict=True))
    a, b = (tensor.detach().requires_grad_() for tensor in (x, weight.t()))
    cudal2gen.matmul(a, b).backward(grad)
    assert torch.equal(a.grad, expected[0])
    assert torch.equal(b.grad.t(), expected[1])
    assert layouts(kernels) == ["nn", "nn", "nt", "nt", "tn", "tn"]


def test_a_batch_of_transposed_views(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = draw_integers(device, 3 * 72, 40).view(3, 72, 40).mT, draw_integers(device, 3 * 72, 24).view(3, 72, 24)
    assert torch.equal(cudal2gen.bmm(a, b), product(a, b))
    assert layouts(kernels) == ["nt"]


def test_a_pack_without_such_kernels_leaves_them_to_torch(
    operator_device: OperatorDevice, device: EmulatedDevice, tmp_path: Any
) -> None:
    only = open_pack(packed.folder(packed.table([PLAIN["nn"]]), tmp_path / GPU))
    with emulated(operator_device, [only], prefer="kernel") as dispatcher:
        a, b = draw_integers(device, 64, 40).t(), draw_integers(device, 64, 24)
        assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
        kernels, (reason,) = ran(dispatcher)
        assert kernels == 0
        assert reason.endswith(" a100 f32 nt")


def test_rows_are_preferred_where_an_operand_lies_in_both_ways() -> None:
    row, column = torch.zeros(1, 64).half(), torch.zeros(64, 1).half()
    problem = plan_requests.request_matmul(row, torch.zeros(64, 8).half(), "f32").problem
    assert problem is not None
    assert problem.layout == "nn"
    strange = torch.zeros(8, 128).half()[:, ::2]
    assert plan_requests.request_matmul(strange, torch.zeros(64, 8).half(), "f32").problem is None
    assert plan_requests.request_matmul(column, row, "f32").problem is not None


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["once", "background"])
def test_a_transposed_view_is_raced_at_its_own_size(
    device: EmulatedDevice, opened_pack: Pack, mode: races.Mode
) -> None:
    a, b = draw_integers(device, 101, 40).t(), draw_integers(device, 101, 24)
    of_batch = draw_integers(device, 2 * 72, 40).view(2, 72, 40).mT, draw_integers(device, 2 * 72, 24).view(2, 72, 24)
    with simulated_process(opened_pack, ClockedDevice(device, Clock(device, {}, 400.0)), mode) as dispatcher:
        for _ in range(180):
            assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
            assert torch.equal(cudal2gen.matmul(*of_batch), product(*of_batch))
        assert sum(dispatcher.stats()["kernel"].values()) > 0
    assert {(row.problem.layout, row.problem.m, row.problem.batch) for row in measurements()} == {
        ("nt", 40, "none"),
        ("nt", 40, "strided"),
    }
    assert Store(A100).first_runs.banned() == set()
    problem = measurements()[0].problem
    assert buckets.bucket(problem) == (40, 40)
    assert buckets.bucket(problem.revised(layout="nn")) != (40, 40)
