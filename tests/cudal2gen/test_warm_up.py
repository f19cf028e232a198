"""Proves that a patched model's first calls can be made before its first request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cudal2gen
from cudal2gen.operators import plan_packs
from scripts import cold_start
from tests.cudal2gen.emulated import EmulatedDevice
from tests.cudal2gen.emulated_operators import device, kernels, opened_pack, operator_device
from tests.packages import require

torch = require("torch")

pytestmark = pytest.mark.torch
__all__ = ["device", "kernels", "opened_pack", "operator_device"]  # fixtures


def model_on(device: EmulatedDevice) -> Any:
    """A model of two linear layers whose weights are in the device's memory."""
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 32, bias=False), torch.nn.ReLU(), torch.nn.Linear(32, 16, bias=False)
    )
    for layer in (model[0], model[2]):
        weight = device.empty(*layer.weight.shape)
        weight.copy_(torch.randint(-2, 3, weight.shape))
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return model


def test_calls_after_it_load_no_kernel_and_make_no_plan(
    device: EmulatedDevice, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_on(device)
    assert cudal2gen.warm_up(model, [4]) == [], "nothing is patched"
    cudal2gen.patch(model)
    x, narrow = (device.empty(4, k).copy_(torch.randint(-2, 3, (4, k))) for k in (64, 32))
    monkeypatch.setattr(type(model[0].weight), "new_empty", lambda _, *shape: device.empty(*shape), raising=False)
    assert cudal2gen.warm_up(model, [8, 4, 4]) == ["0", "2"]
    plans = dict(kernels.plans)
    assert len(plans) == 4

    def refuse(*_: Any) -> Any:
        raise AssertionError("a kernel is opened")

    monkeypatch.setattr(plan_packs, "OpenKernel", refuse)
    for layer, of_layer in ((model[0], x), (model[2], narrow)):
        assert torch.equal(layer(of_layer).double(), of_layer.double() @ layer.weight.double().t())
    assert kernels.plans == plans


def test_what_it_does_not_take_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        cudal2gen.warm_up(torch.zeros(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^rows:"):
        cudal2gen.warm_up(torch.nn.Linear(2, 2), [0, 4])


@pytest.mark.slow
def test_a_first_call_imports_nothing_large(tmp_path: Path) -> None:
    """Neither a call that torch computes nor one of a kernel, which C++ makes from then on."""
    found = cold_start.run_program(tmp_path)
    assert (found["calls"], found["cpp"]) == (2, True)
    late = {"sympy", "torch._dynamo", "jinja2", "cudal2gen.timing", "cudal2gen.generation"}
    late |= {"kernelproof.emulator", "kernelproof.profile", "kernelproof.sass"}
    assert not late & set(found["modules"])
