"""Proves that products with batch dimensions follow torch.matmul, reach kernels, and have derivatives and vmap."""

from __future__ import annotations

import itertools
import operator
import random
from typing import Any

import pytest

import cudal2gen
from cudal2gen import pack
from tests.cudal2gen import packed
from tests.cudal2gen.emulated import EmulatedDevice, OperatorDevice
from tests.cudal2gen.paths import small
from tests.packages import require

torch = require("torch")

from cudal2gen.operators import dispatch, emulated, plan_batches, plan_requests  # noqa: E402

pytestmark = pytest.mark.torch

# A batched kernel for each of the layouts tn and nn.
STRIDED = [
    small(acc="f32", layout=layout, padding="predicate", m=64, n=64, k=128, batch="strided") for layout in ("tn", "nn")
]
# Kernels of single products for the same layouts.
PLAIN = [packed.RECORDS["predicated"], packed.RECORDS["nn"]]


@pytest.fixture(scope="module")
def opened_pack(tmp_path_factory: pytest.TempPathFactory) -> pack.Pack:
    """A pack with plain and batched kernels, each for layouts tn and nn."""
    table = packed.table([*PLAIN, *STRIDED])
    return pack.open_pack(packed.folder(table, tmp_path_factory.mktemp("packs") / "a100"))


def draw_integers(shape: tuple[int, ...], seed: int = 0) -> Any:
    """An fp16 tensor of integers from -2 to 2, so that products are exact."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).half()


def copy_to_device(device: EmulatedDevice, tensor: Any) -> Any:
    """A copy of a tensor in the device's memory."""
    return device.empty(*tensor.shape).copy_(tensor)


# Shapes of A and B: matrices, vectors, broadcast batch dimensions, and dimensions without elements.
SHAPES = [
    ((3, 4), (4, 5)), ((4,), (4,)), ((4,), (4, 5)), ((3, 4), (4,)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (4,)),
    ((4,), (2, 4, 5)), ((3, 4), (2, 4, 5)), ((2, 3, 4), (2, 4, 5)), ((6, 1, 3, 4), (2, 4, 5)), ((1, 3, 4), (7, 4, 5)),
    ((2, 3, 4), (1, 4, 5)), ((5, 2, 3, 4), (5, 2, 4, 1)), ((0, 3, 4), (4, 5)), ((0, 3, 4), (0, 4, 5)),
    ((2, 0, 4), (2, 4, 5)), ((2, 3, 0), (2, 0, 5)), ((2, 3, 4), (2, 4, 0)), ((1, 1, 1), (1, 1)), ((0,), (0,)),
]  # fmt: skip


@pytest.mark.parametrize(("shape_a", "shape_b"), SHAPES, ids=str)
def test_shapes_are_those_of_torch(shape_a: tuple[int, ...], shape_b: tuple[int, ...]) -> None:
    a, b = draw_integers(shape_a), draw_integers(shape_b, 1)
    expected = torch.matmul(a.double(), b.double()).half()
    d = cudal2gen.matmul(a, b)
    assert (d.shape, d.is_contiguous()) == (expected.shape, True)
    assert torch.equal(d, expected)
    assert cudal2gen.matmul(a.to("meta"), b.to("meta")).shape == expected.shape
    assert torch.equal(cudal2gen.matmul(a, b, out_dtype=torch.float32), expected.float())
    out = torch.full_like(expected, 9)
    assert cudal2gen.matmul(a, b, out=out) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("shape_a", "shape_b"), [pair for pair in SHAPES if 0 not in pair[0] + pair[1]], ids=str)
def test_derivatives_are_those_of_torch(shape_a: tuple[int, ...], shape_b: tuple[int, ...]) -> None:
    a, b = draw_integers(shape_a).requires_grad_(), draw_integers(shape_b, 1).requires_grad_()
    wide_a, wide_b = (tensor.detach().double().requires_grad_() for tensor in (a, b))
    expected = torch.matmul(wide_a, wide_b)
    grad = draw_integers(tuple(expected.shape), 2)
    cudal2gen.matmul(a, b).backward(grad)
    expected.backward(grad.double())
    assert torch.equal(a.grad.double(), wide_a.grad)
    assert torch.equal(b.grad.double(), wide_b.grad)


def count_calls(dispatcher: dispatch.Dispatcher) -> tuple[int, int, list[str]]:
    """The numbers of calls of plain and of batched kernels, and the reasons of the other calls."""
    stats = dispatcher.stats()
    batched = {record.name for record in STRIDED}
    calls = [sum(count for name, count in stats["kernel"].items() if (name in batched) is own) for own in (False, True)]
    return calls[0], calls[1], sorted(stats["torch"])


def test_rows_with_one_b_are_one_product(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = copy_to_device(device, draw_integers((2, 3, 5, 64))), copy_to_device(device, draw_integers((64, 24), 1))
    for shared in (b, b.expand(1, 1, 64, 24), b.expand(3, 64, 24)):
        assert torch.equal(cudal2gen.matmul(a, shared), (a.double() @ b.double()).half())
    assert torch.equal(cudal2gen.matmul(a, copy_to_device(device, b.t()).t()), (a.double() @ b.double()).half())
    out = device.empty(2, 3, 5, 24)
    cudal2gen.matmul(a, b, out=out)
    assert torch.equal(out, (a.double() @ b.double()).half())
    vector = copy_to_device(device, draw_integers((64,), 2))
    assert torch.equal(cudal2gen.matmul(vector, b), (vector.double() @ b.double()).half())
    assert count_calls(kernels) == (6, 0, [])


def test_a_batch_is_one_launch(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = copy_to_device(device, draw_integers((6, 33, 64))), copy_to_device(device, draw_integers((6, 64, 40), 1))
    transposed = copy_to_device(device, b.mT)
    expected = (a.double() @ b.double()).half()
    for count, (left, right) in enumerate(
        [(a, b), (a, transposed.mT), (a.view(2, 3, 33, 64), b.view(2, 3, 64, 40)), (a, b)], 1
    ):
        d = cudal2gen.matmul(left, right)
        assert torch.equal(d.view(6, 33, 40), expected)
        assert len(device.session.launches) == count
    assert torch.equal(cudal2gen.bmm(a, b), expected)
    shared = cudal2gen.matmul(a[0], b)
    assert torch.equal(shared, (a[0].double() @ b.double()).half())
    every_other = cudal2gen.matmul(a[::2], b[1::2])
    assert torch.equal(every_other, (a[::2].double() @ b[1::2].double()).half())
    out = device.empty(6, 48, 40)
    cudal2gen.matmul(a, b, out=out[:, :33])
    assert torch.equal(out[:, :33], expected)
    assert bool(out[:, 33:].isnan().all()), "the columns next to it are unchanged"
    assert count_calls(kernels) == (0, 8, [])


def test_heads_of_attention_are_a_batch_of_strided_views(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    """The operands are (1, length, heads, width) with heads moved forward, so rows are far apart, with one stride from
    head to head."""
    query, key = (copy_to_device(device, draw_integers((1, 24, 3, 32), seed)).transpose(1, 2) for seed in (0, 1))
    expected = (query.double() @ key.double().mT).half()
    assert torch.equal(cudal2gen.matmul(query, key.mT), expected)
    assert count_calls(kernels) == (0, 1, [])
    two = [copy_to_device(device, draw_integers((2, 24, 3, 32), seed)).transpose(1, 2) for seed in (0, 1)]
    assert torch.equal(cudal2gen.matmul(two[0], two[1].mT), (two[0].double() @ two[1].double().mT).half())
    assert count_calls(kernels) == (0, 1, ["batch dimensions of A and B without a common stride"])
    assert cudal2gen.explain(two[0], two[1].mT) == "torch: batch dimensions of A and B without a common stride"


def test_a_batch_that_no_kernel_takes_is_computed_by_torch(
    device: EmulatedDevice, kernels: dispatch.Dispatcher
) -> None:
    odd = copy_to_device(device, draw_integers((3, 8, 66)))[:, :, 1:65]
    assert torch.equal(cudal2gen.matmul(odd, odd.mT), (odd.double() @ odd.double().mT).half())
    apart = copy_to_device(device, draw_integers((3, 8 * 64 + 4)))[:, :512].view(3, 8, 64)
    assert torch.equal(cudal2gen.matmul(apart, apart.mT), (apart.double() @ apart.double().mT).half())
    assert count_calls(kernels) == (0, 0, ["batched: a kernel would copy operands"])
    assert "A and B would be copied" in cudal2gen.explain(apart, apart.mT)
    shared = copy_to_device(device, draw_integers((3, 8, 64)))
    with pytest.raises(ValueError, match=r"^out:"):
        cudal2gen.matmul(shared, shared.mT[:, :, :8], out=shared[:, :, :8])


def test_elements_of_out_that_may_lie_in_one_place_are_computed_by_torch(
    device: EmulatedDevice, kernels: dispatch.Dispatcher
) -> None:
    """CTAs would race for elements at one address. In all three cases each element has an address of its own, but in
    the last one rows of different products alternate, which ``are_distinct`` cannot tell from an overlap. There torch
    computes the product, so the number of launches stays at two."""
    a, b = copy_to_device(device, draw_integers((4, 2, 64))), copy_to_device(device, draw_integers((4, 64, 8)))
    memory = device.empty(100)
    for strides, launches in (((8, 40, 1), 1), ((24, 8, 1), 2), ((16, 24, 1), 2)):
        out = memory.as_strided((4, 2, 8), strides)
        assert torch.equal(cudal2gen.matmul(a, b, out=out), (a.double() @ b.double()).half())
        assert sum(kernels.stats()["kernel"].values()) == launches, strides
    assert count_calls(kernels)[2] == ["elements of out that may lie in one place"]


def test_whether_elements_lie_in_places_of_their_own() -> None:
    """Both rules are right for drawn tensors. For up to two dimensions the overlap is always found, and fewer than 400
    of 3000 tensors remain undecided."""
    draw, undecided = random.Random(3), 0
    for _ in range(3000):
        dims = draw.randint(1, 3)
        extents, strides = ([draw.randint(low, 8) for _ in range(dims)] for low in (1, 0))
        places = [sum(map(operator.mul, place, strides)) for place in itertools.product(*map(range, extents))]
        several = len(set(places)) < len(places)
        overlapping, apart = (rule(extents, strides) for rule in (plan_batches.do_overlap, plan_batches.are_distinct))
        assert not (apart and several), (extents, strides)
        assert not (overlapping and not several), (extents, strides)
        assert dims > 2 or overlapping == several, (extents, strides)
        undecided += not (overlapping or apart)
    assert undecided < 400


def test_without_batched_kernels_torch_computes_batches(device: EmulatedDevice, opened_pack: pack.Pack) -> None:
    own = pack.Pack(opened_pack.directory, opened_pack.facts)
    own.table.kernels[:] = [kernel for kernel in opened_pack.table.kernels if kernel.record.batch == "none"]
    a = copy_to_device(device, draw_integers((3, 8, 64)))
    with emulated(OperatorDevice(device, "a100"), [own], prefer="kernel") as dispatcher:
        assert torch.equal(cudal2gen.bmm(a, a.mT), (a.double() @ a.double().mT).half())
        assert count_calls(dispatcher)[:2] == (0, 0)
        assert cudal2gen.explain(a, a.mT).startswith("torch: ")


def test_bmm_takes_batches_of_matrices_only() -> None:
    a = draw_integers((2, 3, 4))
    for left, right in ((a[0], a.mT), (a, a.mT[:1]), (a[None], a.mT[None])):
        with pytest.raises(ValueError, match=r"a and b must be \(B,M,K\) and \(B,K,N\)"):
            cudal2gen.bmm(left, right)
    assert torch.equal(cudal2gen.bmm(a, a.mT), torch.bmm(a.double(), a.mT.double()).half())


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex64", "complex128", "int64"])
def test_other_types_are_computed_by_torch(dtype: str) -> None:
    kind = getattr(torch, dtype)
    a, b = draw_integers((2, 3, 4)).to(kind), draw_integers((4, 5), 1).to(kind)
    assert torch.equal(cudal2gen.matmul(a, b), torch.matmul(a, b))
    if kind == torch.int64:
        return
    if kind.is_complex:
        a, b = a + 2j, b - 1j * b.flip(0)
    assert torch.equal(cudal2gen.linear(a, b.mT, b[0]), torch.nn.functional.linear(a, b.mT, b[0]))

    def gradients(matmul: Any, linear: Any) -> list[Any]:
        left, right = a.clone().requires_grad_(), b.clone().requires_grad_()
        d = matmul(left, right)
        (d.abs().square().sum() + linear(left, right.mT, right[0]).abs().square().sum()).backward()
        return [left.grad, right.grad]

    expected = gradients(torch.matmul, torch.nn.functional.linear)
    for own, reference in zip(gradients(cudal2gen.matmul, cudal2gen.linear), expected, strict=True):
        torch.testing.assert_close(own, reference)


def test_one_stride_for_all_dimensions() -> None:
    assert plan_batches.common_stride((2, 3, 4), (12, 4, 1)) == 1
    assert plan_batches.common_stride((2, 1, 4), (4, 99, 1)) == 1
    assert plan_batches.common_stride((2, 3), (0, 0)) == 0
    assert plan_batches.common_stride((2, 3), (0, 5)) is None
    assert plan_batches.common_stride((2, 3), (5, 10)) is None
    assert plan_batches.common_stride((1, 1), (5, 10)) == 0
    a, b = draw_integers((4, 1, 3, 8)), draw_integers((5, 8, 2))
    request = plan_requests.request_matmul(a, b, "f32")
    assert request.obstacle == "batch dimensions of A and B without a common stride"


# Shapes of A and B, and for each the dimension over which vmap runs, or None.
MAPPED: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int | None, int | None]]] = [
    ((7, 3, 4), (7, 4, 5), (0, 0)), ((3, 7, 4), (4, 5), (1, None)), ((3, 4), (4, 5, 7), (None, 2)),
    ((7, 4), (7, 4), (0, 0)), ((4, 7), (4, 5), (1, None)), ((4,), (7, 4, 5), (None, 0)),
    ((7, 2, 3, 4), (7, 4, 5), (0, 0)),    ((3, 4), (2, 7, 4, 5), (None, 1)),
    ((7, 2, 3, 4), (4,), (0, None)), ((7, 4), (7, 2, 4, 5), (0, 0)),    ((4,), (7, 4), (None, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("shape_a", "shape_b", "dims"), MAPPED, ids=str)
def test_vmap_of_a_product_is_a_batch(shape_a: Any, shape_b: Any, dims: Any) -> None:
    a, b = draw_integers(shape_a), draw_integers(shape_b, 1)
    expected = torch.vmap(torch.matmul, dims)(a.double(), b.double()).half()
    assert torch.equal(torch.vmap(cudal2gen.matmul, dims)(a, b), expected)


@pytest.mark.parametrize(
    "dims", [(0, None, None), (0, 0, None), (None, 0, None), (0, 0, 0), (None, None, 0), (1, None, 0)]
)
@pytest.mark.parametrize("lead", [(), (3,), (3, 2)], ids=str)
# ``dims``: for x, weight and bias the dimension over which vmap runs, or None. ``lead``: extents of x before its rows.
def test_vmap_of_a_layer(lead: tuple[int, ...], dims: tuple[int | None, ...]) -> None:
    shapes = [[*lead, 4], [5, 4], [5]]
    for shape, dim in zip(shapes, dims, strict=True):
        if dim is not None:
            shape.insert(min(dim, len(lead)), 7)
    dims = (None if dims[0] is None else min(dims[0], len(lead)), *dims[1:])
    x, weight, bias = (draw_integers(tuple(shape), seed) for seed, shape in enumerate(shapes))
    layer = torch.nn.functional.linear
    expected = torch.vmap(layer, dims)(x.double(), weight.double(), bias.double()).half()
    assert torch.equal(torch.vmap(cudal2gen.linear, dims)(x, weight, bias), expected)


def test_derivatives_by_transforms() -> None:
    x, weight = draw_integers((3, 4)), draw_integers((5, 4), 1)

    def loss(function: Any) -> Any:
        return lambda w, row: function(row, w).square().sum()

    own = torch.func.grad(loss(cudal2gen.linear))(weight, x)
    expected = torch.func.grad(loss(torch.nn.functional.linear))(weight.double(), x.double())
    assert torch.equal(own.double(), expected)
    per_row = torch.vmap(torch.func.grad(loss(cudal2gen.linear)), (None, 0))(weight, x)
    expected = torch.vmap(torch.func.grad(loss(torch.nn.functional.linear)), (None, 0))(weight.double(), x.double())
    assert torch.equal(per_row.double(), expected)
    twice = torch.func.grad(lambda w: torch.func.grad(loss(cudal2gen.linear))(w, x).square().sum())(weight)
    expected = torch.func.grad(
        lambda w: torch.func.grad(loss(torch.nn.functional.linear))(w, x.double()).square().sum()
    )(weight.double())
    torch.testing.assert_close(twice.double(), expected, rtol=0.01, atol=0.01)


@pytest.mark.slow
def test_torch_checks_operators_on_batches() -> None:
    matmul = torch.ops.cudal2gen.matmul.default
    for shape_a, shape_b in (((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((4,), (4, 5)), ((3, 1, 2, 4), (2, 4, 5))):
        for differentiable in (False, True):
            a, b = (
                draw_integers(shape_a).requires_grad_(differentiable),
                draw_integers(shape_b, 1).requires_grad_(differentiable),
            )
            torch.library.opcheck(matmul, (a, b))
