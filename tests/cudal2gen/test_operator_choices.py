"""Proves by stand-ins when measurements of buckets count, and which products Inductor's choice leaves to torch."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudal2gen.kernel import Problem
from tests.packages import require

torch = require("torch")

from cudal2gen.operators import call_kernels, call_native, call_torch, inductor, plan_requests  # noqa: E402
from cudal2gen.operators.dispatch import Dispatcher  # noqa: E402
from cudal2gen.operators.measuring import Measuring, buckets  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("mode", "prefer", "is_measured"), [
    *product(("off", "once", "background"), ("measured", "inferred", "kernel", "vendor"), (True, False)),
])  # fmt: skip
def test_measurements_of_a_bucket_count_only_where_they_are_made_and_asked_for(
    mode: Any, prefer: Any, is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = SimpleNamespace(choose=lambda *arguments: ("table", arguments))
    device, pack, problem, request = (
        SimpleNamespace(name="device"), SimpleNamespace(name="pack"), SimpleNamespace(name="problem"),
        SimpleNamespace(device=3, batches=SimpleNamespace(products=7), operands="operands"),
    )  # fmt: skip
    asked: list[Any] = []
    monkeypatch.setattr(Measuring, "table", lambda _, *arguments: asked.append(arguments) or table)
    monkeypatch.setattr(buckets, "choose", lambda *arguments: ("bucket", arguments) if is_measured else None)
    nothing: Any = None
    choice: Any = Measuring(mode, nothing, nothing).choose(device, pack, problem, request, prefer, 2.5)  # type: ignore[arg-type]
    assert asked == [(device, pack, 3)]
    if mode != "off" and prefer == "measured" and is_measured:
        assert choice == ("bucket", (table, problem, "operands", 2.5, 7))
    else:
        assert choice == ("table", (problem, "operands", prefer, 2.5, 7))


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from(("same", "f32")), st.booleans(), st.floats(10, 1e6))
def test_a_pass_that_torch_adds_is_charged_to_the_kernel(
    m: int, n: int, d: Any, finished: bool, bandwidth: float
) -> None:
    """The pass reads and writes D at half of the bandwidth, after a launch of 3 us."""
    own = SimpleNamespace(
        prefer="measured",
        _packs=SimpleNamespace(table=lambda pack: SimpleNamespace(bandwidth=bandwidth)),
        _measuring=SimpleNamespace(choose=lambda *arguments: arguments),
    )
    request: Any = SimpleNamespace(invariance=0, finish=abs if finished else None)
    problem = Problem(gpu="a100", acc="f32", layout="tn", m=m, n=n, k=64, d=d)
    *passed, extra_us = Dispatcher._choose(own, "device", "pack", problem, request)  # type: ignore[arg-type,misc]
    assert passed == ["device", "pack", problem, request, "measured"]
    element_bytes = 4 if d == "f32" else 2
    expected = 3 + (m * n * element_bytes * 2) / (bandwidth / 2)
    assert extra_us == (pytest.approx(expected) if finished else 0)


BY_TORCH = {call_torch.torch_matmul: "aten::matmul", call_torch.torch_linear: "aten::linear"}


@pytest.mark.parametrize(("fusion", "into", "third"), [
    ("none", False, call_native.NONE), ("none", True, call_native.OUT), ("bias_n", False, call_native.BIAS),
])  # fmt: skip
@pytest.mark.parametrize(("connected", "device"), [*product((True, False), (plan_requests.CPU, 0, 3))])
@pytest.mark.parametrize("run", [*BY_TORCH, torch.addmm])
def test_c_makes_torchs_calls_of_one_operator_on_a_card(
    run: Any, connected: bool, device: int, fusion: str, into: bool, third: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_kernels, "NATIVE", SimpleNamespace(connected=connected))
    request: Any = SimpleNamespace(
        by_torch=run,
        device=device,
        has_out=into,
        fusion=Problem(gpu="a100", acc="f32", layout="tn", m=8, n=8, k=8).revised(fusion=fusion).fusion,
    )
    call = call_kernels.native_by_torch(request)
    if run not in BY_TORCH or not connected or device < 0:
        assert call is None
    else:
        assert call is not None
        assert (call.run, call.third, call._plan.third) == (run, third, third)
        assert call._plan.torch_operator.decode() == BY_TORCH[run]
        assert (call._plan.torch_overload or b"").decode() == ("out" if into else "")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_devices_have_numbers_of_their_own(dtype: Any) -> None:
    """Kernels are launched on CUDA devices, and on the CPU in tests only."""

    def on(kind: str, index: int = -1) -> Any:
        """A tensor on such a device."""
        return SimpleNamespace(
            is_cuda=kind == "cuda", is_cpu=kind == "cpu", is_meta=kind == "meta", device=SimpleNamespace(type=kind),
            get_device=lambda: index, shape=(8, 8), stride=lambda: (8, 1), data_ptr=lambda: 64, dtype=dtype,
            element_size=lambda: 2,
        )  # fmt: skip

    places = [on("cpu"), on("xpu"), on("meta"), on("cuda", 0), on("cuda", 3)]
    facts = [plan_requests.facts(tensor) for tensor in places]
    assert [fact.device for fact in facts[-2:]] == [0, 3]
    assert len({fact.device for fact in facts}) == len(facts)
    requests: list[Any] = [SimpleNamespace(device=fact.device) for fact in facts]
    assert [call_kernels.on_gpu(request) for request in requests] == [False, False, False, True, True]
    known = [dtype == torch.float16 and tensor.device.type in ("cpu", "cuda") for tensor in places]
    assert [fact.element for fact in facts] == ["f16" if each else None for each in known]
    assert [not fact.obstacle for fact in facts] == known


TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("types", [*product(TYPES, TYPES, TYPES)], ids=str)
def test_a_product_of_one_half_precision_type_is_ours(types: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    planned = SimpleNamespace(call=lambda plan, *tensors: made.append((plan, tensors)))
    monkeypatch.setattr(inductor, "current", lambda: SimpleNamespace(any_kernel=planned))
    monkeypatch.setattr(inductor, "_plan", lambda key, request: ("plan", key, request().sizes))
    monkeypatch.setattr(torch, "mm", lambda a, b, out: made.append(("torch", (a, b, out))))
    a, b, out = (
        torch.zeros(shape, dtype=kind) for shape, kind in zip(((8, 16), (16, 24), (8, 24)), types, strict=True)
    )
    inductor.cudal2gen_mm(a, b, out)
    ((way, tensors),) = made
    assert all(mine is given for mine, given in zip(tensors, (a, b, out), strict=True))
    is_ours = len(set(types)) == 1 and types[0] in (torch.float16, torch.bfloat16)
    assert (way == "torch") == (not is_ours)
    if is_ours:
        assert way[2] == (8, 24, 16)
        key = set(map(str, way[1]))
        assert {str(x) for each in (a, b) for x in (each.shape, each.stride())} | {str(out.stride())} <= key
