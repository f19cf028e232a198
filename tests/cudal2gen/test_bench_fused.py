"""Proves that fused, batched and grouped products are timed against torch's, and that a missing part is noticed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cudal2gen import bench, results
from cudal2gen.bench import Reference, Settings, TooGood, baselines
from cudal2gen.kernel import Problem
from cudal2gen.launch.operands import Operands
from tests.cudal2gen.devices import ENVIRONMENT, FakeDevice, FakeKernel
from tests.cudal2gen.paths import small
from tests.cudal2gen.test_bench import COLD, HOT, SMALL, measure_one, problem

pytestmark = pytest.mark.torch


class Timed:
    """A baseline that torch computes on the CPU, and that takes ``us`` microseconds by the device's clock. ``spoils``:
    wrong values in place of operands, by name, as if the baseline left them out."""

    def __init__(self, device: FakeDevice, name: str, us: float, **spoils: Any) -> None:
        (self.contender,) = baselines.contenders([name], "f32", device, Path("none"))
        self.device, self.name, self.us, self.spoils = device, name, us, spoils

    detail = ""

    def prepare(self, problem: Problem, race: Any) -> None:
        self.contender.prepare(problem, race)

    def bind(self, operands: Operands) -> Any:
        """A call that computes with the spoilt operands and takes ``us`` microseconds by the device's clock."""
        call = self.contender.bind(replace(operands, **self.spoils))

        def timed_call() -> Any:
            answer = call()
            self.device.spend(self.us, self.name)
            return answer

        return timed_call


# Fusions of which torch has some in one call and others only in several.
FUSIONS = ["bias_n+silu", "alpha+bias_m+residual+gelu", "bias_n+relu", "residual", "bias_n+residual+gelu_tanh"]


@pytest.mark.slow
@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_fused_problem_is_measured_against_what_torch_has_for_it(fusion: str) -> None:
    device, of = FakeDevice(), SMALL.revised(fusion=fusion)
    names = baselines.default_names(of)
    assert names == ("torch.unfused", "torch.epilogue")
    measurement = measure_one(device, [Timed(device, name, 9.0) for name in names], COLD, of)
    assert measurement.problem == of
    unfused = measurement.timing("torch.unfused")
    assert unfused is not None
    assert 0 < unfused.error < 0.1
    exists = fusion in ("bias_n+relu", "residual")
    assert measurement.absent == ({} if exists else {"torch.epilogue": f"torch has no epilogue for {fusion}"})
    again = results.Measurement.model_validate_json(measurement.model_dump_json())
    assert again == measurement
    assert again.flops == SMALL.flops


@pytest.mark.slow
def test_a_batch_counts_all_its_products() -> None:
    device, of = FakeDevice(), SMALL.revised(batch="strided")
    assert baselines.default_names(of) == ("torch.bmm",)
    measurement = measure_one(device, [Timed(device, "torch.bmm", 9.0)], COLD, of, products=5)
    assert (measurement.products, measurement.flops) == (5, 5 * SMALL.flops)
    assert measurement.types == "f32 batched x5"
    assert '"products":5' in measurement.model_dump_json()
    slow = ENVIRONMENT.model_copy(update={"max_sm_mhz": 1})
    of_five, of_single = (slow.floor_us(of, cold=False, products=products) for products in (5, 1))
    assert of_five == pytest.approx(5 * of_single)
    device = FakeDevice(environment=slow)
    with pytest.raises(TooGood, match=r"3\.000 us.* 4\.8") as caught:
        measure_one(device, [Timed(device, "torch.bmm", 3.0)], HOT, of, products=5)
    assert caught.value.contender == "torch.bmm"


@pytest.mark.parametrize(
    ("fusion", "spoils"),
    [("bias_n+silu", {"bias": torch.zeros(64).half()}), ("alpha", {"alpha": 1.0}), ("residual", {"beta": 0.5})],
)
def test_a_part_that_a_contender_leaves_out_is_noticed(fusion: str, spoils: dict[str, Any]) -> None:
    device = FakeDevice()
    contender = Timed(device, "torch.unfused", 9.0, **spoils)
    measurement = measure_one(device, [contender], COLD, SMALL.revised(fusion=fusion))
    assert "wrong result after the timing" in measurement.absent["torch.unfused"]


def test_groups_are_measured_against_those_of_torch() -> None:
    device, of = FakeDevice(), SMALL.revised(batch="grouped", ab="bf16")
    assert baselines.default_names(of) == ("torch.grouped_mm",)
    measurement = measure_one(device, [Timed(device, "torch.grouped_mm", 9.0)], COLD, of, products=3)
    assert measurement.absent == {}
    assert 0 < measurement.timings[0].error < 0.2
    (operands,) = device.operands(of, 1, 0, 3)
    reference = Reference(of, operands)

    def product(shift: int) -> Any:
        """The product with every group's end moved by this number of rows."""
        return torch._grouped_mm(operands.a, operands.b_nn, offs=operands.ends + shift)

    assert reference.error(device, lambda: product(0))[1] == ""
    assert "wrong result" in reference.error(device, lambda: product(-1))[1]


def test_a_wrong_product_of_a_batch_is_noticed() -> None:
    device, of = FakeDevice(), SMALL.revised(batch="strided")
    (operands,) = device.operands(of, 1, 0, 5)
    reference = Reference(of, operands)

    def bmm() -> None:
        torch.bmm(operands.a, operands.b_nn, out=operands.d)

    assert reference.error(device, bmm)[1] == ""
    for product in (0, 2, 4):

        def spoil(product: int = product) -> None:
            bmm()
            operands.d[product, 5] += 1.0

        assert "wrong result" in reference.error(device, spoil)[1]


def test_a_kernel_may_round_once() -> None:
    """A baseline that stores between its parts is within the looser bound, but not within that of a kernel."""
    device, of = FakeDevice(), problem(64, 64, 16).revised(fusion="alpha+bias_n+residual")
    (operands,) = device.operands(of, 1, 0)
    contender = Timed(device, "torch.unfused", 9.0)
    contender.prepare(of, None)
    reference, call = Reference(of, operands), contender.bind(operands)
    assert "wrong result" in reference.error(device, call, strict=True)[1]
    assert reference.error(device, call, strict=False)[1] == ""


def test_a_batch_of_another_number_of_products_is_not_stored_yet() -> None:
    """A measurement of a batch of 5 products with a cold L2 is stored. A batch of 5 then needs only the measurement
    with a hot L2, and a batch of 4 needs both."""
    environment = ENVIRONMENT.model_copy(update={"l2_bytes": 1 << 20})
    device, record = FakeDevice(environment=environment), small(gpu="h200", acc="f32", batch="strided")
    stored = measure_one(device, [FakeKernel(device, record, 8.0)], COLD, record.problem, products=5)
    for products, left in ((5, ["hot"]), (4, ["cold", "hot"])):
        settings = Settings(products=products)
        work = bench.schedule.pending(record, record.name, (), settings, environment, [stored])
        assert [item.l2 for item in work] == left
