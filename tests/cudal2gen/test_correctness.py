"""Proves that a comparison notices a single wrong element, and that the bounds on errors hold."""

from __future__ import annotations

import numpy as np
import pytest

from cudal2gen.kernel import Acc
from cudal2gen.validator import correctness
from cudal2gen.validator.correctness import BOUNDED, INPUTS, compare, error_bound, operands
from tests.cudal2gen.paths import small


def test_the_fp32_bound_holds_for_fp32_and_fails_for_fp16_sums() -> None:
    for k in (64, 256, 1024):
        a, b = operands("normal", 64, 64, k, np.random.default_rng(k))
        wide = a.astype(np.float64) @ b.astype(np.float64).T
        single = np.zeros((64, 64), np.float32)
        half = np.zeros((64, 64), np.float16)
        for start in range(0, k, 16):
            part = a[:, start : start + 16].astype(np.float32) @ b[:, start : start + 16].astype(np.float32).T
            single += part
            half = (half.astype(np.float32) + part).astype(np.float16)
        bound = error_bound("f32", a.astype(np.float64), b.astype(np.float64), wide, small().k_order(k))
        assert (np.abs(single.astype(np.float16) - wide) <= bound).all()
        assert not (np.abs(half - wide) <= bound).all()
        loose = error_bound("f16", a.astype(np.float64), b.astype(np.float64), wide, small().k_order(k))
        assert (np.abs(half - wide) <= loose).all()
        assert not (np.abs(half - wide) <= loose / 100).all(), "and is of the errors' order"


def test_comparisons_notice_single_elements() -> None:
    rng = np.random.default_rng(0)
    accs: tuple[Acc, ...] = ("f16", "f32")
    for acc in accs:
        for inputs in INPUTS:
            a, b = operands(inputs, 32, 32, 64, rng)
            with np.errstate(invalid="ignore"):
                d = (a.astype(np.float64) @ b.astype(np.float64).T).astype(np.float16)
            right = compare(acc, inputs, a, b, d, small().k_order(64))
            assert (right.wrong, right.findings, right.size) == (0, [], 32 * 32)
            finite = np.argwhere(np.isfinite(d))[7]
            d[tuple(finite)] = np.nan if inputs in ("special", *BOUNDED) else d[tuple(finite)] + 1
            wrong = compare(acc, inputs, a, b, d, small().k_order(64))
            (finding,) = wrong.findings
            assert finding.startswith(
                f"wrong-value: 1 of 1024 elements, first at row {finite[0]}, column {finite[1]}: "
            )


def test_above_2048_an_fp16_sum_must_not_be_small() -> None:
    a, b = np.ones((1, 5000), np.float16), np.ones((1, 5000), np.float16)
    assert compare("f16", "binary", a, b, np.full((1, 1), 2048, np.float16), []).findings == []
    assert compare("f16", "binary", a, b, np.full((1, 1), 2046, np.float16), []).wrong == 1
    assert compare("f32", "binary", a, b, np.full((1, 1), 2048, np.float16), []).wrong == 1
    assert compare("f32", "binary", a, b, np.full((1, 1), 5000, np.float16), []).findings == []


@pytest.mark.slow
def test_integer_inputs_stay_exact_in_fp16() -> None:
    for k in (64, 4096, 16384):
        a, b = operands("integers", 32, 32, k, np.random.default_rng(k))
        sums = np.cumsum(a.astype(np.float64)[:, None, :] * b.astype(np.float64)[None, :, :], axis=2)
        assert np.abs(sums).max() <= 2048


@pytest.mark.torch
@pytest.mark.parametrize("acc", ["f16", "f32"])
@pytest.mark.parametrize("inputs", INPUTS)
def test_tensors_are_compared_as_arrays_are(acc: Acc, inputs: str) -> None:
    import torch

    rng = np.random.default_rng(3)
    for k in (64, 320, 5000):
        order = small(acc=acc).k_order(k)
        a, b = operands(inputs, 48, 40, k, rng)
        with np.errstate(invalid="ignore", over="ignore"):
            d = (a.astype(np.float32) @ b.astype(np.float32).T).astype(np.float16)
        for spoil in (False, True):
            if spoil:
                d[5, 7] = np.nan if inputs in ("special", *BOUNDED) else d[5, 7] / 2
            arrays = compare(acc, inputs, a, b, d, order)
            tensor_a, tensor_b, tensor_d = (torch.from_numpy(values) for values in (a, b, d))
            tensors = compare(acc, inputs, tensor_a, tensor_b, tensor_d, order)
            assert (tensors.compared, tensors.wrong, tensors.first) == (arrays.compared, arrays.wrong, arrays.first)
            assert tensors.max_error == pytest.approx(arrays.max_error)
            assert tensors.allowed == (None if arrays.allowed is None else pytest.approx(arrays.allowed))
            assert arrays.wrong == int(spoil)


@pytest.mark.torch
@pytest.mark.parametrize("torch_draws", [False, True], ids=["numpy", "torch"])
def test_operands_are_of_their_kind(torch_draws: bool) -> None:
    def draw_operands(inputs: str, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
        if not torch_draws:
            return operands(inputs, 32, 48, 8192, np.random.default_rng(seed))
        import torch

        a, b = operands(inputs, 32, 48, 8192, torch.Generator().manual_seed(seed))
        return a.numpy(), b.numpy()

    a, b = draw_operands("binary")
    assert (a.dtype.name, a.shape, b.shape) == ("float16", (32, 8192), (48, 8192))
    assert set(np.unique(a)) == {0, 1}
    a, b = draw_operands("sparse")
    assert (a.astype(float) @ b.astype(float).T).max() < 2048
    a, b = draw_operands("integers")
    assert set(np.unique(b)) == {-2, -1, 0, 1, 2}
    a, b = draw_operands("normal")
    assert a.astype(float).std() == pytest.approx(1, abs=0.01)
    assert not np.array_equal(a, draw_operands("normal", seed=2)[0])
    assert np.array_equal(a, draw_operands("normal")[0])
    a, b = draw_operands("cancelling")
    assert not (a.astype(float) @ b.astype(float).T).any()
    assert a.any()
    a, b = draw_operands("special")
    assert [int(np.isinf(values).sum()) for values in (a, b)] == [1, 1]
    for values in (a, b):
        rows_of_nan = np.isnan(values).any(axis=1)
        assert rows_of_nan.reshape(-1, 8).any(axis=1).all(), "in each 8 rows or columns of D"
        assert rows_of_nan.mean() < 0.25


def test_a_large_fp16_product_is_bounded_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound takes k/8 passes over D, so for large sizes it is computed for some rows only; one wrong element is
    still found."""
    a, b = operands("normal", 64, 64, 256, np.random.default_rng(0))
    d = np.zeros((64, 64), np.float32)
    for start in range(0, 256, 16):
        some = slice(start, start + 16)
        d = (d + a[:, some].astype(np.float32) @ b[:, some].astype(np.float32).T).astype(np.float16).astype(np.float32)
    half, order = d.astype(np.float16), small().k_order(256)
    monkeypatch.setattr(correctness, "MAX_FULL_BOUND", 64 * 64 * 64)
    monkeypatch.setattr(correctness, "CHUNK", 64 * 10)
    right = compare("f16", "normal", a, b, half, order)
    assert right.compared == "error bound of the accumulator in 16 rows, twice its largest in all"
    assert right.findings == []
    half[33, 9] += 1.5
    wrong = compare("f16", "normal", a, b, half, order)
    assert wrong.findings[0].startswith("wrong-value: 1 of 4096 elements, first at row 33, column 9")
