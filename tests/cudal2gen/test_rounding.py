"""Proves models of a tensor core's rounding against sums worked out by hand and the emulator's."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cudal2gen import validator
from cudal2gen.generation import compiler
from cudal2gen.kernel import Record
from cudal2gen.results import Rounding
from cudal2gen.validator import Shape, agreement, rounding
from cudal2gen.validator.agreement import EXACT_INPUTS
from cudal2gen.validator.correctness import operands
from cudal2gen.validator.rounding import ALIGNED_BITS, SAMPLE, SumModel, models, predict, ulps
from tests.cudal2gen.paths import small
from tests.cudal2gen.strategies import direct


def total(values: list[float], model: SumModel, acc: str, record: Record | None = None) -> float:
    """The model's sum of these numbers, each multiplied by one."""
    a, b = np.array([values], np.float16), np.ones((1, len(values)), np.float16)
    return float(predict(model, acc, a, b, (record or small()).k_order(len(values)))[0, 0])  # type: ignore[arg-type]


def test_sums_by_hand() -> None:
    # 2048 + 1 is not an fp16 number, but 2048 + 1 + 1 is. The result shows whether both ones are added in the same
    # step.
    within, apart = [2048.0, *[0.0] * 7, 1.0, 1.0], [2048.0, *[0.0] * 7, 1.0, *[0.0] * 7, 1.0]
    assert total(within, SumModel(16, None, False), "f16") == 2050
    assert total(apart, SumModel(16, None, False), "f16") == 2048
    assert total(within, SumModel(4, None, False), "f16") == 2050
    assert total([2048.0, 0, 0, 1.0, 1.0], SumModel(4, None, False), "f16") == 2048
    assert total([2048.0, 0, 0, 1.0, 1.0], SumModel(8, None, False), "f16") == 2050
    assert total(apart, SumModel(None, None, False), "f16") == 2050
    assert total(apart, SumModel(8, None, False), "f32") == 2050
    # Sums are rounded toward zero: 2048 + 1.5 is 2048, and not 2050.
    assert total([2048.0, 1.5], SumModel(16, None, False), "f16") == 2050
    assert total([2048.0, 1.5], SumModel(16, None, True), "f16") == 2048
    assert total([-2048.0, -1.5], SumModel(16, None, True), "f16") == -2048


def test_alignment_cuts_below_the_largest() -> None:
    # 2^14 has the largest exponent, and 2^-10 is 24 bits below it.
    values = [2.0**14, 2.0**-10, 2.0**-10, -(2.0**14)]
    assert total(values, SumModel(16, None, False), "f32") == 2.0**-9
    assert total(values, SumModel(16, 24, True), "f32") == 2.0**-9
    assert total(values, SumModel(16, 23, True), "f32") == 0
    # A product's exponent is the sum of its factors': 1.5 * 1.5 counts as 1, not as 2.
    a, b = np.array([[1.5, 2.0**-12]], np.float16), np.array([[1.5, 2.0**-12]], np.float16)
    assert float(predict(SumModel(16, 24, True), "f32", a, b, small().k_order(2))[0, 0]) == pytest.approx(2.25)
    assert total([0.0] * 16, SumModel(16, 24, True), "f32") == 0


@pytest.mark.parametrize("bits", ALIGNED_BITS)
def test_products_and_the_sum_so_far_are_cut_at_the_same_bit(bits: int) -> None:
    model = SumModel(8, bits, True)
    last, cut = 2.0 ** (14 - bits), 2.0 ** (13 - bits)
    rest = [0.0] * 5
    assert total([2.0**14, last, -(2.0**14), *rest], model, "f32") == last
    assert total([2.0**14, cut, -(2.0**14), *rest], model, "f32") == 0
    # The small number is the sum of an earlier step. The large numbers are added in the next step.
    assert total([last, *[0.0] * 7, 2.0**14, -(2.0**14)], model, "f32") == last
    assert total([cut, *[0.0] * 7, 2.0**14, -(2.0**14)], model, "f32") == 0
    assert total([-last - cut, *[0.0] * 7, 2.0**14, -(2.0**14)], model, "f32") == -last, "toward zero"


def test_an_fp32_sum_is_rounded_to_nearest_or_toward_zero() -> None:
    """2^24 + 1.5 lies between 2^24 and 2^24 + 2; the next step takes 2^24 away again."""
    a, b = np.zeros((1, 16), np.float16), np.zeros((1, 16), np.float16)
    a[0, [0, 1, 8]], b[0, [0, 1, 8]] = (4096, 1.5, -4096), (4096, 1, 4096)
    order = small().k_order(16)
    assert float(predict(SumModel(8, None, False), "f32", a, b, order)[0, 0]) == 2
    assert float(predict(SumModel(8, None, True), "f32", a, b, order)[0, 0]) == 0


def test_the_candidates_of_each_accumulator() -> None:
    single, half = list(models("f32")), list(models("f16"))
    assert (len(single), len(set(single))) == (18, 18)
    assert {(model.width, model.bits) for model in single} == set(product((4, 8, 16), (None, *ALIGNED_BITS)))
    assert all(model.toward_zero for model in single if model.bits), "sums that are cut off are not rounded up"
    assert not any(model.toward_zero for model in half if model.bits)
    assert set(half) - {model._replace(toward_zero=False) for model in single} - set(single) == {
        SumModel(None, None, False)
    }
    names = [model.name for model in half]
    assert names[:3] == ["4 k, exact, nearest", "4 k, exact, toward zero", "4 k, 23 bits, nearest"]
    assert names[-1] == "all k, exact, nearest"


def test_agreement_is_that_of_the_corner() -> None:
    rng = np.random.default_rng(2)
    order = small().k_order(64)
    a, b = operands("normal", SAMPLE + 8, SAMPLE + 8, 64, rng)
    d = predict(SumModel(8, None, False), "f16", a, b, order)
    d[SAMPLE:], d[:, SAMPLE:] = 0, 0
    assert rounding.agreement("f16", a, b, d, order)["8 k, exact, nearest"] == 1
    d[0, 0] += 1
    assert rounding.agreement("f16", a, b, d, order)["8 k, exact, nearest"] == round(1 - SAMPLE**-2, 4)


def test_slices_of_k_are_added_in_fp32() -> None:
    record = small(split_k=2, k=128)
    values = [2048.0, *[0.0] * 63, 1.0, *[0.0] * 62, 1.0]
    assert total(values, SumModel(16, None, False), "f16", record) == 2050
    assert total(values, SumModel(16, None, False), "f16") == 2048


def test_units_of_the_last_place() -> None:
    values = np.array([0.0, 1.0, -1.0, 65504.0, np.nan, np.nan, 2.0**-24], np.float16)
    others = np.array([-0.0, 1.0009765625, -1.0, np.inf, np.nan, 1.0, -(2.0**-24)], np.float16)
    assert ulps(values, others).tolist() == [0, 1, 0, 1, 0, 1 << 16, 2]


@pytest.mark.parametrize("record", [small(), direct()], ids=["multistage", "direct"])
def test_the_emulators_fp16_sums_are_of_16_and_to_nearest(record: Record) -> None:
    artifact, library = compiler.build([record])[0], compiler.launcher()
    shape = Shape(32, 32, 256)
    for inputs, share in (("normal", 0.99), ("cancelling", 0.7)):
        done = validator.execute(record, artifact, library, shape, inputs, hazards=False)
        shares_of_models = rounding.agreement("f16", done.a, done.b, done.d, record.k_order(256))
        assert shares_of_models["16 k, exact, nearest"] > share
        assert (
            max(shares_of_models[name] for name in shares_of_models if not name.startswith("16 k") or "zero" in name)
            < share / 1.5
        )


def test_cancelling_inputs_tell_models_apart() -> None:
    """On normal inputs D's own rounding hides how an fp32 accumulator was rounded."""
    rng = np.random.default_rng(1)
    order = small().k_order(256)
    shares = {}
    for inputs in ("normal", "cancelling"):
        a, b = operands(inputs, 32, 32, 256, rng)
        d = predict(SumModel(8, 24, True), "f32", a, b, order)
        shares_of_models = rounding.agreement("f32", a, b, d, order)
        assert shares_of_models.pop("8 k, 24 bits, toward zero") == 1
        shares[inputs] = max(shares_of_models.values())
        wide = a.astype(np.float64) @ b.astype(np.float64).T
        assert inputs == "normal" or not wide.any()
    assert shares["normal"] > 0.97
    assert shares["cancelling"] < 0.5


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("fusion", ["none", "relu", "bias_n+gelu"])
def test_a_device_is_compared_with_the_emulator(fusion: str, wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact sums must be equal. Rounded ones tell a model of rounding, unless something is done with them."""
    record, rng = small(acc="f32", fusion=fusion), np.random.default_rng(1)

    def execute(record: Record, artifact: Any, library: Any, shape: Shape, inputs: str, **_: Any) -> Any:
        a, b = operands(inputs, shape.m, shape.n, shape.k, rng)
        return SimpleNamespace(a=a, b=b, d=(a.astype(np.float32) @ b.T).astype(np.float16), findings=[])

    def computed(device: Any, record: Record, contender: Any, emulated: Any) -> Any:
        d = emulated.d.copy()
        d[0, 0] += wrong * 8
        return d

    monkeypatch.setattr(agreement, "execute", execute)
    monkeypatch.setattr(agreement, "product", computed)
    monkeypatch.setattr(agreement, "LENGTHS", (64, 256))
    built: Any = SimpleNamespace(
        record=record, artifact=SimpleNamespace(digest="d"), library=None, open=lambda device: None
    )
    cases, lines = agreement.against_emulator(SimpleNamespace(model="h200"), built)  # type: ignore[arg-type]
    kinds = [*EXACT_INPUTS, "normal", "cancelling"]
    assert [(line.k, line.inputs) for line in lines] == [*product((64, 256), kinds)]
    assert all((line.differing, line.max_ulp > 0) == (wrong / (32 * 32), wrong) for line in lines)
    for line in lines:
        tells = fusion == "none" and line.inputs not in EXACT_INPUTS
        assert (bool(line.models), line.compared) == (tells, SAMPLE**2 * tells)
    exact = [] if "gelu" in fusion else [*product((64, 256), EXACT_INPUTS)]
    assert [(case.k, case.inputs) for case in cases] == exact
    assert all(case.passed != wrong for case in cases)


def test_the_table_names_what_predicts_most() -> None:
    line = Rounding(
        on="h200", record="r", digest="d", family="sm80_direct", acc="f16", m=32, n=32, k=64, inputs="normal",
        differing=0.125, max_ulp=2, compared=1024, models={"a": 1.0, "b": 1.0, "c": 0.5, "d": 1.0, "e": 1.0},
    )  # fmt: skip
    assert line.best == ["a", "b", "d", "e"]
    exact = line.model_copy(update={"models": {}, "inputs": "binary", "differing": 0.0})
    rows = rounding.markdown([line, exact]).splitlines()
    assert rows[2] == "| h200 | f16 | sm80_direct | 32_32_64 | binary | 0.00 % | 2 |  |  |"
    assert rows[3] == "| h200 | f16 | sm80_direct | 32_32_64 | normal | 12.50 % | 2 | a; b; d and 1 more | 100.0 % |"
