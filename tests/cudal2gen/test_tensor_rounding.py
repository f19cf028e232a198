"""Proves the emulator's bit-exact models of tensor cores on cases worked out by hand and on kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudal2gen.generation import compiler
from cudal2gen.kernel import Record
from cudal2gen.validator import Shape, run_case
from kernelproof.emulator import RoundingName
from kernelproof.emulator.arithmetic.tensor_rounding import ROUNDINGS, add_products
from tests.cudal2gen.paths import ring, small

ULP = 2.0**-23  # the distance of fp32 numbers between 1 and 2
KERNELS: dict[str, Record] = {"mma.sync": small(acc="f32", ab="bf16"), "wgmma": ring(ab="bf16")}
BUILT_AHEAD = [*KERNELS.values()]


def total(gpu: str, products: list[float], before: float = 0.0) -> float:
    """The sum of one MMA over 16 k. The products are powers of two, of factors that bf16 represents."""
    a = np.zeros((1, 16), np.float32)
    a[0, : len(products)] = products
    b = np.ones((16, 1), np.float32)
    return float(add_products(a, b, np.full((1, 1), before, np.float32), ROUNDINGS[gpu])[0, 0])


@pytest.mark.parametrize(
    ("products", "before", "a100", "h100"),
    [
        # Added to 1, seven terms of 2^-25 are below the 24 bits that the A100 keeps, but within the 25 bits of the
        # H100: 1.75 ULP.
        ([1.0, *[2.0**-25] * 7], 0.0, 1.0, 1 + ULP),
        ([1.0, *[2.0**-25] * 8], 0.0, 1.0, 1 + 2 * ULP),
        # If the same terms come first, the A100 adds them in a separate group of 8 to 2 ULP.
        ([*[2.0**-25] * 8, 1.0], 0.0, 1 + 2 * ULP, 1 + 2 * ULP),
        # Both cards keep terms of 2^-24 in a group with the previous sum. Two of them make one ULP, since they are not
        # rounded one by one.
        ([2.0**-24, 2.0**-24], 1.0, 1 + ULP, 1 + ULP),
        # The remaining bits are truncated for either sign. Rounded to nearest, the result would be 1 + ULP.
        ([2.0**-24], 1.0, 1.0, 1.0),
        ([-(2.0**-24)], -1.0, -1.0, -1.0),
        ([2.0**-24 + 2.0**-23], 1.0, 1 + ULP, 1 + ULP),
        # If products are larger than the sum, the sum loses bits.
        ([2.0**24], 1.5, 2.0**24, 2.0**24),
        ([2.0**127], 1.0, 2.0**127, 2.0**127),
    ],
)
def test_sums_worked_out_by_hand(products: list[float], before: float, a100: float, h100: float) -> None:
    assert (total("a100", products, before), total("h100", products, before)) == (a100, h100)


def test_nothing_is_kept_below_the_floor_of_exponents() -> None:
    a, b = np.full((1, 8), 2.0**-70, np.float32), np.full((8, 1), 2.0**-79, np.float32)
    sums = [float(add_products(a, b, np.zeros((1, 1), np.float32), ROUNDINGS[gpu])[0, 0]) for gpu in ("a100", "h100")]
    assert sums == [2.0**-146, 2.0**-146]
    tiny = [
        float(add_products(a * 2.0**-8, b, np.zeros((1, 1), np.float32), ROUNDINGS[gpu])[0, 0]) for gpu in ROUNDINGS
    ]
    assert tiny == [0.0, 0.0], "2^-157 is less than 24 bits below 2^-132, and eight of them less than fp32 has"


def test_nan_and_infinities_stay() -> None:
    for gpu in ROUNDINGS:
        assert total(gpu, [np.inf, 1.0]) == np.inf
        assert np.isnan(total(gpu, [np.inf, -np.inf]))
        assert np.isnan(total(gpu, [1.0], np.nan))


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_round_as_the_option_says(name: str) -> None:
    record = KERNELS[name]
    (artifact,) = compiler.build([record])
    shape, library = Shape(record.m, record.n, record.k), compiler.launcher()

    def execute(rounding: RoundingName, inputs: str) -> Any:
        """D of the kernel by a model of tensor cores."""
        case, done = run_case(record, artifact, library, shape, inputs, hazards=False, rounding=rounding)
        assert case.findings == ()
        return done.d

    names: tuple[RoundingName, ...] = ("model", "a100", "h100")
    exact = [execute(rounding, "integers") for rounding in names]
    assert all((each == exact[0]).all() for each in exact)
    model, a100, h100 = (execute(rounding, "cancelling").astype(np.float64) for rounding in names)
    assert (model != a100).any()
    assert (a100 != h100).any()
