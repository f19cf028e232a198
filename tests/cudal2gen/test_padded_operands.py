"""Proves that a product of padded operands, cut to the caller's sizes, is the product of the caller's operands."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from cudal2gen.kernel import serving
from cudal2gen.kernel.launch import Sizes
from tests.cudal2gen.paths import small
from tests.packages import require

torch = require("torch")
from cudal2gen.launch.operands import Operands, check, draw, launch_tensors  # noqa: E402

pytestmark = pytest.mark.torch

M, N, K = 13, 24, 19
LAUNCHED = Sizes(32, 40, 64)
FUSED, BATCHED = "bias_n+residual+aux+silu", "bias_n+residual"  # a batch has no aux


def draw_operands(layout: str, products: int, shared: bool) -> tuple[Any, Operands]:
    """A fused record of a layout with one product, or with a strided batch of several, and operands.

    ``shared``: all products of the batch have one B, which is expanded.
    """
    batch = {"batch": "strided", "fusion": BATCHED} if products > 1 else {"fusion": FUSED}
    record = small(layout=layout, padding="pad", m=M, n=N, k=K, **batch)
    (operands,) = draw(record.problem, 1, torch.Generator().manual_seed(1), "cpu", products)
    if shared:
        b, b_nn = (each[:1].expand(products, -1, -1) for each in (operands.b, operands.b_nn))
        operands = replace(operands, b=b, b_nn=b_nn)
    return record, operands


def product_of(operands: Operands) -> Any:
    """A B + bias + C in fp64, on whole operands."""
    assert operands.bias is not None
    assert operands.c is not None
    bias = operands.bias.double()
    wide = bias[:, None] if bias.ndim == 2 else bias
    return operands.a.double() @ operands.b.double().mT + wide + operands.c.double()


@pytest.mark.parametrize(("products", "shared"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("layout", ["tn", "nn", "nt", "tt"])
def test_a_product_of_padded_operands_is_cut_to_that_of_the_caller(layout: str, products: int, shared: bool) -> None:
    record, operands = draw_operands(layout, products, shared)
    expected = product_of(operands)
    for copied in product((False, True), repeat=3):
        use = serving.Use(LAUNCHED, copied)
        tensors = launch_tensors(record, operands, use, None)
        for target, source in tensors.before:
            assert target.shape == source.shape
            target.copy_(source)
        launched = tensors.operands
        # The launched B is in the record's layout, and both of its names are that tensor.
        along = record.along_k
        if copied[1]:
            assert launched.b is launched.b_nn
            launched = replace(launched, b=launched.b if along.b else launched.b.mT)
        else:
            launched = replace(launched, b=operands.b)
        lead = () if products == 1 else (products,)
        shapes = {"a": (LAUNCHED.m, LAUNCHED.k), "b": (LAUNCHED.n, LAUNCHED.k), "d": (LAUNCHED.m, LAUNCHED.n)}
        for (name, shape), was_copied in zip(shapes.items(), copied, strict=True):
            assert tuple(getattr(launched, name).shape) == (
                *lead,
                *(shape if was_copied else getattr(operands, name).shape[-2:]),
            )
            stored = getattr(tensors.operands, name)
            stored = stored.mT if name == "a" and not along.a else stored
            if was_copied:
                assert (stored.stride(-1), stored.stride(-2) % 8) == (1, 0)
        if shared and copied[1]:
            assert launched.b.stride(0) == 0
        # C, aux and the bias always have the launched sizes. What lies beyond the caller's is zero.
        assert launched.c is not None
        assert launched.bias is not None
        assert tuple(launched.c.shape) == (*lead, LAUNCHED.m, LAUNCHED.n)
        assert launched.bias.shape[-1] == LAUNCHED.n
        if copied != (True, True, True):
            continue
        whole = product_of(launched)
        assert torch.equal(
            whole[..., M:, :N], launched.bias.double().reshape(*lead, 1, -1)[..., :N].expand(*lead, LAUNCHED.m - M, N)
        )
        assert not whole[..., N:].any()
        launched.d.copy_(whole)
        if launched.aux is not None:
            launched.aux.copy_(2 * whole)
        for target, source in tensors.after:
            target.copy_(source)
        torch.testing.assert_close(operands.d.double(), expected.half().double())
        if operands.aux is not None:
            torch.testing.assert_close(operands.aux.double(), (2 * expected).half().double())
        assert tensors.copies == [*tensors.before, *tensors.after]


@pytest.mark.parametrize("products", [1, 3])
def test_operands_that_do_not_fit_are_refused(products: int) -> None:
    """Each operand is absent, of another type, a row or column too small, transposed in memory, or repeated."""
    record, operands = draw_operands("tn", products, shared=False)
    assert check(record, operands).mnk == f"{M}_{N}_{K}"
    kept = {name: getattr(operands, name) for name in ("a", "b", "d", "bias", "c", "aux")}
    wrong: list[dict[str, Any]] = [{"alpha": 2.0}, {"ends": torch.zeros(products, dtype=torch.int32)}]
    for name, tensor in kept.items():
        if tensor is None:
            wrong.append({name: torch.zeros_like(operands.d)})
            continue
        wrong += [{name: tensor.float()}, {name: tensor[..., :-1].contiguous()}, {name: tensor[None]}]
        if name in ("a", "b", "d", "c", "aux"):
            wrong += [{name: tensor.mT.contiguous().mT}, {name: tensor[..., :-1, :]}]
        if name in ("bias", "c", "aux"):
            wrong.append({name: None})
    if products > 1:
        wrong += [{name: kept[name][:2]} for name in ("a", "b", "d", "c")]
        wrong.append({"d": kept["d"][:1].expand(products, -1, -1)})
    for change in wrong:
        (name,) = change
        with pytest.raises(ValueError, match=rf"(?i)\b{name}\b"):
            check(record, replace(operands, **change))
    plain = small(layout="tn", padding="pad", m=M, n=N, k=K)
    single = replace(draw_operands("tn", 1, shared=False)[1], bias=None, c=None, aux=None, beta=1.0)
    assert check(plain, single).mnk == f"{M}_{N}_{K}"
    for name in ("bias", "c"):
        with pytest.raises(ValueError, match=f"(?i)^{name}:"):
            check(plain, replace(single, **{name: torch.zeros(N)}))
