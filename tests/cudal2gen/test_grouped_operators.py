"""Proves torch's four forms of grouped products with their derivatives, and our kernels on ragged and empty groups."""

from __future__ import annotations

from typing import Any

import pytest

import cudal2gen
from cudal2gen import pack
from tests.cudal2gen import packed
from tests.cudal2gen.emulated import EmulatedDevice
from tests.cudal2gen.paths import small
from tests.packages import require

torch = require("torch")

from cudal2gen.operators import call_torch, dispatch  # noqa: E402

pytestmark = pytest.mark.torch

# A grouped kernel for each of the layouts tn and nn.
RECORDS = [
    small(acc="f32", layout=layout, padding="predicate", m=64, n=64, k=128, batch="grouped") for layout in ("tn", "nn")
]


def integers(*shape: int, seed: int = 0) -> Any:
    """A bf16 tensor of integers from -2 to 2, so that products are exact."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def offsets(*ends: int) -> Any:
    """The ends of groups, as torch's grouped product takes them."""
    return torch.tensor(ends, dtype=torch.int32)


# The four forms, by the shapes of A and B and the ends of groups: groups are rows of A, parts of k, columns of B, or
# products of a batch. The extents are those that torch's own grouped product also supports.
FORMS = [
    ((16, 32), (3, 32, 24), (5, 5, 16)),
    ((16, 32), (32, 24), (8, 8, 32)),
    ((3, 16, 32), (32, 24), (8, 16, 24)),
    ((3, 16, 32), (3, 32, 24), None),
]


@pytest.mark.parametrize(("shape_a", "shape_b", "ends"), FORMS, ids=str)
def test_forms_and_derivatives_are_those_of_torch(shape_a: Any, shape_b: Any, ends: Any) -> None:
    offs = None if ends is None else offsets(*ends)
    a, b = integers(*shape_a).requires_grad_(), integers(*shape_b, seed=1).requires_grad_()
    expected = torch._grouped_mm(a, b, offs=offs)
    grad = integers(*expected.shape, seed=2)
    d = cudal2gen.grouped_mm(a, b, offs=offs)
    assert d.is_contiguous()
    assert torch.equal(d, expected)
    assert (
        cudal2gen.grouped_mm(a.to("meta"), b.to("meta"), offs=None if offs is None else offs.to("meta")).shape
        == d.shape
    )
    for own, reference in zip(
        torch.autograd.grad(d, (a, b), grad), torch.autograd.grad(expected, (a, b), grad), strict=True
    ):
        assert torch.equal(own, reference)
    bias = integers(shape_b[-1], seed=3).requires_grad_()
    wide = cudal2gen.grouped_mm(a, b, offs=offs, bias=bias, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, expected.float() + bias)
    (of_bias,) = torch.autograd.grad(wide, bias, grad.float())
    assert torch.equal(of_bias, grad.float().sum(list(range(grad.ndim - 1))).bfloat16())
    with torch.no_grad():
        assert torch.equal(cudal2gen.grouped_mm(a, b, offs=offs), expected)
        doubled = cudal2gen.grouped_mm(a.double(), b.double(), offs=offs)
        assert torch.equal(doubled, expected.double())


def test_rows_after_the_last_group_have_no_gradient() -> None:
    a, b = integers(9, 16).requires_grad_(), integers(3, 16, 8, seed=1).requires_grad_()
    d = cudal2gen.grouped_mm(a, b, offs=offsets(2, 2, 6))
    assert bool((d[6:] == 0).all())
    d.backward(torch.full_like(d, 1.0))
    assert bool((a.grad[6:] == 0).all())
    assert torch.equal(b.grad[1], torch.zeros(16, 8).bfloat16())
    assert torch.equal(b.grad[0], a.detach()[:2].double().sum(0)[:, None].expand(16, 8).bfloat16())
    for empty in (
        cudal2gen.grouped_mm(a[:0], b, offs=offsets(0, 0, 0)),
        cudal2gen.grouped_mm(a, b[:0], offs=offsets()),
    ):
        assert bool((empty == 0).all())


def test_what_is_no_grouped_product_is_refused() -> None:
    a, b, offs = integers(9, 16), integers(3, 16, 8), offsets(2, 2, 6)
    refused: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        ((a, b), {}, ValueError, r"offs: mat_a \(9, 16\) and mat_b \(3, 16, 8\) need offsets"),
        ((b.mT, b), {"offs": offs}, ValueError, "offs: must be None for mat_a"),
        ((a, b), {"offs": offs.long()}, TypeError, "offs: expected int32 of one dimension, got torch.int64"),
        ((a, b), {"offs": offs[None]}, TypeError, "offs: expected int32 of one dimension"),
        ((a, b), {"offs": offs[:2]}, ValueError, "do not fit: numbers of groups differ, 2 and 3"),
        ((a, b.mT), {"offs": offs}, ValueError, "each must have 2 or 3 dimensions, and both one K"),
        ((a[0], b), {"offs": offs}, ValueError, "each must have 2 or 3 dimensions"),
        ((a, b.half()), {"offs": offs}, TypeError, "mat_b: expected torch.bfloat16, got torch.float16"),
        ((a, b), {"offs": offs, "out_dtype": torch.half}, TypeError, "out_dtype: expected torch.bfloat16 or"),
        ((a, b), {"offs": offs, "bias": b[0, :3, 0]}, ValueError, r"bias: \(3,\) cannot be broadcast to \(9, 8\)"),
        ((a, b), {"offs": offs.to("meta")}, ValueError, "on different devices"),
    ]  # fmt: skip
    for arguments, options, error, message in refused:
        for _ in range(2):
            with pytest.raises(error, match=message):
                cudal2gen.grouped_mm(*arguments, **options)


def test_vmap_of_a_grouped_product() -> None:
    a, b = integers(2, 9, 16), integers(3, 16, 8, seed=1)
    ends = torch.stack((offsets(2, 2, 6), offsets(0, 3, 9)))
    product = torch.vmap(lambda x, offs: cudal2gen.grouped_mm(x, b, offs=offs), (0, 0))
    expected = torch.stack([cudal2gen.grouped_mm(a[i], b, offs=ends[i]) for i in range(2)])
    assert torch.equal(product(a, ends), expected)


def test_strides_that_torchs_own_grouped_product_refuses() -> None:
    takes = call_torch._takes_grouped
    a = integers(9, 24)
    assert takes(a)
    assert takes(a[:, :16])
    assert takes(a.t())
    assert not takes(a[:, :17].contiguous())
    assert not takes(a[:, 1:9])
    assert not takes(a[:, ::2])
    assert not takes(a.double())


# --- kernels, in the emulator ---


@pytest.fixture(scope="module")
def opened_pack(tmp_path_factory: pytest.TempPathFactory) -> pack.Pack:
    """A pack with a plain kernel, and with grouped ones for layouts tn and nn."""
    table = packed.table([packed.RECORDS["predicated"], *RECORDS])
    return pack.open_pack(packed.folder(table, tmp_path_factory.mktemp("packs") / "a100"))


def copy_to(device: EmulatedDevice, tensor: Any) -> Any:
    """A copy of a tensor in the device's memory."""
    return device.empty(*tensor.shape).copy_(tensor)


def ends_on(device: EmulatedDevice, *ends: int) -> Any:
    """The ends of groups in the device's memory."""
    return device.empty(2 * len(ends)).view(torch.int32).copy_(offsets(*ends))


@pytest.mark.parametrize("ends", [(5, 5, 33), (0, 33, 33), (11, 22, 32), (33, 33, 33)], ids=str)
def test_groups_of_rows_are_one_launch(ends: Any, device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, offs = copy_to(device, integers(33, 64)), ends_on(device, *ends)
    for b in (copy_to(device, integers(3, 64, 40, seed=1)), copy_to(device, integers(3, 40, 64, seed=1)).mT):
        d = cudal2gen.grouped_mm(a, b, offs=offs)
        start = 0
        for group, end in enumerate(ends):
            assert torch.equal(d[start:end], (a[start:end].double() @ b[group].double()).half())
            start = end
    assert kernels.stats() == {
        "kernel": {record.name: 1 for record in sorted(RECORDS, key=lambda r: r.name)},
        "torch": {},
    }
    assert len(device.session.launches) == 2
    shared = copy_to(device, integers(64, 40, seed=1)).expand(3, 64, 40)
    d = cudal2gen.grouped_mm(a, shared, offs=offs)
    assert torch.equal(d[: ends[-1]], (a[: ends[-1]].double() @ shared[0].double()).half())
    assert kernels.stats()["torch"] == {}


def test_other_forms_and_strides_are_computed_by_torch(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b, offs = (
        copy_to(device, integers(33, 64)),
        copy_to(device, integers(3, 64, 40, seed=1)),
        ends_on(device, 5, 5, 30),
    )
    expected = cudal2gen.grouped_mm(a, b, offs=offs)
    x, w = copy_to(device, a).requires_grad_(), copy_to(device, b).requires_grad_()
    cudal2gen.grouped_mm(x, w, offs=offs).backward(expected)
    column_major = device.empty(64, 33).copy_(a.t()).t()
    assert torch.equal(cudal2gen.grouped_mm(column_major, b, offs=offs)[:30], expected[:30])
    narrow = cudal2gen.grouped_mm(copy_to(device, a)[:, 1:63], b[:, 1:63], offs=offs)
    assert torch.equal(narrow[5:30], (a[5:30, 1:63].double() @ b[2, 1:63].double()).half())
    assert sorted(kernels.stats()["torch"]) == [
        "grouped: a kernel would copy operands", "groups of columns or of k", "strides of A that no layout serves"
    ]  # fmt: skip
    assert bool((x.grad[30:] == 0).all()), "no kernel writes rows after the last group, so they must be zeroed"
    assert bool(x.grad.isfinite().all())


@pytest.mark.slow
def test_torch_checks_the_operator() -> None:
    operator = torch.ops.cudal2gen.grouped_mm.default
    for shape_a, shape_b, ends in FORMS:
        for differentiable in (False, True):
            a, b = (integers(*shape).requires_grad_(differentiable) for shape in (shape_a, shape_b))
            torch.library.opcheck(operator, (a, b, None if ends is None else offsets(*ends)))


def test_meta_tensors_have_shapes() -> None:
    a, b, offs = torch.empty(10, 16).bfloat16(), torch.empty(3, 16, 8).bfloat16(), torch.zeros(3, dtype=torch.int32)
    a, b, offs = (tensor.to("meta") for tensor in (a, b, offs))
    d = cudal2gen.grouped_mm(a, b, offs=offs)
    assert (d.shape, d.dtype, d.is_meta) == ((10, 8), torch.bfloat16, True)
    assert cudal2gen.grouped_mm(a.mT, a, offs=offs).shape == (3, 16, 16)
