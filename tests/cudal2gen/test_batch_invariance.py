"""Proves in the emulator that batch-invariant calls give a row the same bits in any batch, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import cudal2gen
from cudal2gen import pack
from cudal2gen.kernel import Problem, aligned, serving
from cudal2gen.kernel.launch import LaunchOperands, Sizes
from cudal2gen.launch.launcher import LaunchError, OpenKernel
from cudal2gen.results.choice import tabulate
from kernelproof.ground.errors import WrongInput
from scripts import invariance_cost
from tests.cudal2gen import packed
from tests.cudal2gen.emulated import EmulatedDevice, OperatorDevice
from tests.cudal2gen.emulated_operators import GPU
from tests.cudal2gen.paths import PATHS, small
from tests.packages import require

torch = require("torch")

from cudal2gen.operators import check_modes, dispatch, emulated, hosted, inductor, plan_invariance  # noqa: E402

pytestmark = pytest.mark.torch

# Kernels for few rows (which splits k) and for many. Each also exists with a bias and for strided batches.
FEW, MANY = packed.RECORDS["split"], packed.RECORDS["predicated"]
# By kernel: its own problem's sizes.
SIZES = {record.name: {"m": record.m, "n": record.n, "k": record.k} for record in (FEW, MANY)}
PLAIN = {"acc": "f32", "padding": "predicate"}
VARIANTS = [
    small(**PLAIN, **SIZES[record.name], split_k=record.split_k, **variant)
    for record in (FEW, MANY)
    for variant in ({"fusion": "bias_n"}, {"batch": "strided"})
]
LAYOUT_NN = [  # B stored (k,n), as gradients need it
    small(**PLAIN, **SIZES[record.name], split_k=record.split_k, layout="nn") for record in (FEW, MANY)
]
# Two grouped kernels whose k-tiles differ.
GROUPED = [
    small(**PLAIN, m=64, n=64, k=128, batch="grouped"),
    small(**PLAIN, m=64, n=64, k=128, bk=32, batch="grouped"),
]
# Sizes of the products, and the rows of the largest A.
N, K = 40, 256
ROWS = 70


@pytest.fixture(scope="module")
def opened_pack(tmp_path_factory: pytest.TempPathFactory) -> pack.Pack:
    """A pack in which the kernel for many rows was measured as faster than torch."""
    table = packed.table([FEW, MANY, *LAYOUT_NN, *VARIANTS, *GROUPED], {1: 2.0})
    return pack.open_pack(packed.folder(table, tmp_path_factory.mktemp("packs") / GPU))


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    """A device with bit-exact rounding. The default model's last bits depend on how many products are computed
    together."""
    with EmulatedDevice(MANY, rounding="a100") as own:
        yield own
        assert own.session.errors == []


@pytest.fixture
def kernels(operator_device: OperatorDevice, opened_pack: pack.Pack) -> Iterator[dispatch.Dispatcher]:
    """A dispatcher that takes the nearest kernel, measured or not."""
    with emulated(operator_device, [opened_pack], prefer="kernel") as dispatcher:
        yield dispatcher


@pytest.fixture
def measured_dispatcher(operator_device: OperatorDevice, opened_pack: pack.Pack) -> Iterator[dispatch.Dispatcher]:
    """A dispatcher with a pack whose kernel for many rows was measured faster on its own problem."""
    with emulated(operator_device, [opened_pack]) as dispatcher:
        yield dispatcher


@pytest.fixture
def demand_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Demands batch invariance of all calls, as the environment's variable does."""
    monkeypatch.setattr(check_modes.BatchInvariance, "always", True)


def draw_rounding(device: EmulatedDevice, *shape: int, seed: int = 0) -> Any:
    """Numbers whose sums round, in the device's memory."""
    return device.empty(*shape).copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


@contextmanager
def deterministic() -> Iterator[None]:
    """Demands deterministic algorithms of torch."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def names(dispatcher: dispatch.Dispatcher) -> set[str]:
    """The names of the kernels that a dispatcher has called."""
    return set(dispatcher.stats()["kernel"])


# --- the same bits ---


def rows_by_batches(product: Callable[[Any], Any], a: Any) -> list[tuple[int, Any, Any]]:
    """For drawn numbers of rows: where they start in A, their results, and those rows of the product of all rows."""
    whole = product(a)
    draws = torch.Generator().manual_seed(3)
    parts = []
    for rows in (1, 2, *torch.randint(3, ROWS, (4,), generator=draws).tolist()):
        start = int(torch.randint(0, ROWS - rows + 1, (1,), generator=draws))
        parts.append((start, product(a[start : start + rows]), whole[start : start + rows]))
    return parts


@pytest.mark.thorough
@pytest.mark.slow
def test_the_fastest_kernels_of_few_and_many_rows_differ_in_bits(
    device: EmulatedDevice, kernels: dispatch.Dispatcher
) -> None:
    a, b = draw_rounding(device, ROWS, K), draw_rounding(device, N, K, seed=1).t()
    assert any(not torch.equal(own, its) for _, own, its in rows_by_batches(lambda x: cudal2gen.matmul(x, b), a))
    assert names(kernels) == {FEW.name, MANY.name}


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), [(N, K), (5, 203)])
def test_a_row_has_the_same_bits_among_any_rows(
    n: int, k: int, device: EmulatedDevice, kernels: dispatch.Dispatcher
) -> None:
    a, weight, bias = (
        draw_rounding(device, ROWS, k),
        draw_rounding(device, n, k, seed=1),
        draw_rounding(device, n, seed=2),
    )
    calls: list[Callable[[Any], Any]] = [
        lambda x: cudal2gen.matmul(x, weight.t(), batch_invariant=True),
        lambda x: cudal2gen.linear(x, weight, bias, batch_invariant=True),
        lambda x: cudal2gen.linear(x, weight, bias, "silu", batch_invariant=True),
    ]
    for call in calls:
        for start, own, its in rows_by_batches(call, a):
            assert torch.equal(own, its), start
    assert kernels.stats()["torch"] == {}
    (plain,) = names(kernels) - {record.name for record in VARIANTS}
    fused = {record.name for record in VARIANTS if record.fusion and record.split_k == {FEW.name: 2}.get(plain, 1)}
    assert names(kernels) - {plain} == (fused if k % 8 == 0 else set()), (
        "the fused kernel adds up in the plain one's way"
    )


@pytest.mark.slow
def test_how_rows_lie_changes_no_bit(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = draw_rounding(device, 12, K), draw_rounding(device, N, K, seed=1).t()
    bias = draw_rounding(device, N, seed=2)
    whole = cudal2gen.matmul(a, b, batch_invariant=True)
    wide = device.empty(12, K + 1)
    wide[:, :K].copy_(a)
    off = device.empty(12 * K + 1)[1:].view(12, K).copy_(a)
    columns = device.empty(K, 12).copy_(a.t()).t()
    steps = device.empty(4, 3, K).copy_(a.view(3, 4, K).transpose(0, 1)).transpose(0, 1)
    out = device.empty(12, N)
    cudal2gen.matmul(a, b, out=out, batch_invariant=True)
    assert torch.equal(out, whole)
    biased = cudal2gen.linear(a, b.t(), bias, batch_invariant=True)
    for other in (wide[:, :K], off, columns, steps, a.view(2, 6, K)):
        assert torch.equal(cudal2gen.matmul(other, b, batch_invariant=True).view(12, N), whole)
        assert torch.equal(cudal2gen.linear(other, b.t(), bias, batch_invariant=True).view(12, N), biased)
    assert torch.equal(cudal2gen.matmul(a[7], b, batch_invariant=True), whole[7])
    assert kernels.stats()["torch"] == {}


@pytest.mark.slow
def test_a_batch_adds_up_as_its_products_do(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = draw_rounding(device, 3, 40, K), draw_rounding(device, 3, N, K, seed=1).mT
    d = cudal2gen.bmm(a, b, batch_invariant=True)
    for own, left, right in zip(d, a, b, strict=True):
        assert torch.equal(own, cudal2gen.matmul(left, right, batch_invariant=True))
    assert kernels.stats()["torch"] == {}
    assert len(names(kernels)) == 2


@pytest.mark.slow
def test_a_rows_group_changes_no_bit(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = draw_rounding(device, ROWS, K), draw_rounding(device, 2, N, K, seed=1).mT
    results = []
    for first in (5, 33, 60):
        offs = device.empty(4).view(torch.int32).copy_(torch.tensor([first, ROWS], dtype=torch.int32))
        results.append(cudal2gen.grouped_mm(a, b, offs=offs, batch_invariant=True))
    assert all(torch.equal(each[:5], results[0][:5]) for each in results)
    assert all(torch.equal(each[60:], results[0][60:]) for each in results)
    assert len(names(kernels)) == 1


def test_gradients_of_rows_are_batch_invariant_too(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    weight, x, grad = (
        draw_rounding(device, K, N),
        draw_rounding(device, ROWS, N, seed=1),
        draw_rounding(device, ROWS, K, seed=2),
    )
    # Two large products cancel each other, so nearly every sum would round differently in another order.
    grad[:, 0], grad[:, 200] = 2000, -2000
    weight[[0, 200]] = 2000

    def gradient(rows: slice) -> Any:
        own = device.empty(rows.stop - rows.start, N).copy_(x[rows]).requires_grad_()
        cudal2gen.linear(own, weight, batch_invariant=True).backward(grad[rows])
        return own.grad

    whole = gradient(slice(0, ROWS))
    for rows in (slice(3, 4), slice(20, 53)):
        assert torch.equal(gradient(rows), whole[rows])


@pytest.mark.slow
def test_compiled_calls_stay_batch_invariant(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    from torch._dynamo.testing import EagerAndRecordGraphs

    a, weight = draw_rounding(device, 8, K), draw_rounding(device, N, K, seed=1)
    recorder = EagerAndRecordGraphs()
    compiled = torch.compile(
        lambda x: cudal2gen.linear(x, weight, batch_invariant=True), backend=recorder, fullgraph=True
    )
    assert torch.equal(compiled(a), cudal2gen.linear(a, weight, batch_invariant=True))
    called = [str(node.target) for node in recorder.graphs[0].graph.nodes if node.op == "call_function"]
    assert called == ["cudal2gen.linear.batch_invariant"]


# --- the variable, and deterministic algorithms ---


@pytest.mark.slow
@pytest.mark.usefixtures("demand_invariance")
def test_the_variable_demands_it_of_every_call(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, w1, w3 = draw_rounding(device, ROWS, K), draw_rounding(device, N, K, seed=1), draw_rounding(device, N, K, seed=2)
    layer = torch.nn.Linear(K, N, bias=False).half()
    layer.weight = torch.nn.Parameter(w1, requires_grad=False)
    cudal2gen.patch(layer)
    calls = [lambda x: cudal2gen.matmul(x, w1.t()), layer, lambda x: silu_pair(x, w1, w3)]
    for call in calls:
        for start, own, its in rows_by_batches(call, a):
            assert torch.equal(own, its), start
    assert len(names(kernels)) == 1
    with pytest.raises(RuntimeError, match="batch invariance"):
        cudal2gen.matmul(torch.ones(4, 8), torch.ones(8, 4))
    with pytest.raises(WrongInput):
        inductor.offer()


def silu_pair(x: Any, w1: Any, w3: Any) -> Any:
    """``gated_pair`` with SiLU."""
    from cudal2gen.operators.fused_operators import gated_pair

    return gated_pair(x, w1, w3, "silu")


def test_the_variable_is_read_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv(check_modes.VARIABLE, value)
        assert check_modes._always() == expected
    monkeypatch.setenv(check_modes.VARIABLE, "true")
    with pytest.raises(ValueError, match=check_modes.VARIABLE):
        check_modes._always()


@pytest.mark.slow
def test_deterministic_algorithms_take_one_kernel_or_torch_for_all_rows(
    device: EmulatedDevice, measured_dispatcher: dispatch.Dispatcher
) -> None:
    n, k = MANY.n, MANY.k
    a, b, other = (
        draw_rounding(device, ROWS, k),
        draw_rounding(device, n, k, seed=1).t(),
        draw_rounding(device, 40, k, seed=1).t(),
    )
    cudal2gen.matmul(a[:1], b)
    assert names(measured_dispatcher) == set(), "a product with a vector is torch's"
    with deterministic():
        for start, own, its in rows_by_batches(lambda x: cudal2gen.matmul(x, b), a):
            assert torch.equal(own, its), start
        assert names(measured_dispatcher) == {MANY.name}
        calls = sum(measured_dispatcher.stats()["kernel"].values())
        for rows in (1, 32, 64, ROWS):
            cudal2gen.matmul(a[:rows], other)
        assert sum(measured_dispatcher.stats()["kernel"].values()) == calls, "nothing was measured of this weight"
        assert measured_dispatcher.stats()["torch"][plan_invariance.NOT_MEASURED] == 4
        assert hosted.may_win(n, k, torch.float16, "cpu", None, False)
        assert not hosted.may_win(40, k, torch.float16, "cpu", None, False)
    cudal2gen.matmul(a[:1], b)
    assert sum(measured_dispatcher.stats()["kernel"].values()) == calls, "afterwards it is torch's again"


# --- what is refused, and explained ---


@pytest.mark.slow
def test_torch_never_stands_in(
    device: EmulatedDevice,
    kernels: dispatch.Dispatcher,
    monkeypatch: pytest.MonkeyPatch,
    operator_device: OperatorDevice,
) -> None:
    a, b = draw_rounding(device, 8, K), draw_rounding(device, N, K, seed=1).t()
    refused = pytest.raises(RuntimeError, match="batch invariance")
    operator_device.captures = True
    with refused:
        cudal2gen.matmul(a, b, batch_invariant=True)  # its kernel cannot be loaded now
    operator_device.captures = False
    cudal2gen.matmul(a, b, batch_invariant=True)
    with refused:
        cudal2gen.matmul(a.float(), b.float(), batch_invariant=True)
    with refused:
        cudal2gen.matmul(a, b, acc="f16", batch_invariant=True)
    with refused:
        cudal2gen.linear(torch.nested.nested_tensor([a, a]), b.t(), batch_invariant=True)
    with refused, torch.autograd.forward_ad.dual_level():
        cudal2gen.matmul(torch.autograd.forward_ad.make_dual(a, a), b, batch_invariant=True)
    with dispatch.prefer("vendor"), refused:
        cudal2gen.matmul(a, b, batch_invariant=True)

    def refuse(kernel: OpenKernel, code: int) -> None:
        raise LaunchError(1, "test")

    monkeypatch.setattr(OpenKernel, "sized", lambda *_, **__: lambda *_: 1)
    monkeypatch.setattr(OpenKernel, "check", refuse)
    with refused:
        cudal2gen.matmul(draw_rounding(device, 9, K), b, batch_invariant=True)
    assert kernels.stats()["torch"].keys() >= {"refused: first used in a graph capture", "the launcher refuses"}


def test_explain_prices_the_one_kernel(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = draw_rounding(device, 8, K), draw_rounding(device, N, K, seed=1).t()
    explanation = cudal2gen.explain(a, b, batch_invariant=True)
    assert (
        explanation
        == cudal2gen.explain(a[:1], b, batch_invariant=True)
        == cudal2gen.explain(cudal2gen.linear, a, b.t(), batch_invariant=True)
    )
    assert "modelled" in explanation
    assert cudal2gen.explain(cudal2gen.linear, a.float(), b.float().t(), batch_invariant=True).startswith("refused: ")
    assert "modelled" not in cudal2gen.explain(a, b)


# --- the choice ---


@pytest.mark.slow
def test_no_kernel_whose_order_depends_on_rows_is_taken() -> None:
    stream = [record for record in PATHS.values() if getattr(record, "stream_k", False) and not record.problem.suffix]
    assert len(stream) >= 2
    for record in stream:
        table = tabulate(record.gpu, [record], packed.NOTHING)
        operands = LaunchOperands.packed(record.layout, serving.sizes_of(record.problem))
        assert table.choose(record.problem, operands, "kernel").kernel == 0
        chosen = plan_invariance.OneKernel().choose(table, record.problem, operands, False, 0)
        assert (chosen.kernel, chosen.short) == (None, plan_invariance.NO_KERNEL)
        whole = record.at(record.problem, stream_k=False)
        table = tabulate(record.gpu, [record, whole], packed.NOTHING)
        assert plan_invariance.OneKernel().choose(table, record.problem, operands, False, 0).kernel == 1


@pytest.mark.slow
def test_no_kernel_copies_by_the_number_of_rows() -> None:
    """A single row of any length may be stored like one of whole vectors, and so may the rows of B."""
    for record in PATHS.values():
        if record.grouped or record.TEXTUAL or not record.along_k.a:  # an A (k,m) is copied to rows before
            continue
        for k in (record.k, record.k + 3):
            operands = LaunchOperands.packed(record.layout, Sizes(2, record.n, k), record.fusion)
            single, wide = (operands.a._replace(ld=ld) for ld in (aligned(k, 8), k))
            operands = operands._replace(b=operands.b._replace(ld=aligned(operands.b.ld, 8)))
            uses = [
                serving.use(record, Sizes(rows, record.n, k), operands._replace(a=a))
                for rows, a in ((1, single), (2, wide))
            ]
            assert len({use and use.copied for use in uses}) == 1, record.name


def test_the_choice_is_by_modelled_times_of_all_rows_and_kept() -> None:
    table = tabulate(GPU, [FEW, MANY], packed.NOTHING)
    own = plan_invariance.OneKernel()
    operands = LaunchOperands.packed("tn", Sizes(1, 4096, 256))
    wide = FEW.problem.model_copy(update={"n": 4096, "k": 256})
    times = [plan_invariance._modelled_us(kernel, wide) for kernel in table.kernels]
    ratios = [few / many for few, many in zip(*times, strict=True)]
    product = 1.0
    for ratio in ratios:
        product *= ratio
    best = 0 if product < 1 else 1
    assert all(own.choose(table, problem_at(wide, m), operands, False, 0).kernel == best for m in (1, 100, 9999))
    reordered = tabulate(GPU, [MANY, FEW], packed.NOTHING)
    assert own.choose(reordered, wide, operands, False, 0).kernel == best, "decided once"
    own.forget()
    assert own.choose(reordered, wide, operands, False, 0).kernel == 1 - best


def problem_at(problem: Problem, m: int) -> Problem:
    """The problem with another number of rows."""
    return problem.model_copy(update={"m": m})


@pytest.mark.slow
def test_the_costs_of_the_page_are_those_of_the_script(checkout: Path) -> None:
    line = invariance_cost.line(invariance_cost.table("h200"), 4096, 4096)
    assert line in (checkout / "docs" / "batch-invariance.md").read_text().splitlines()
