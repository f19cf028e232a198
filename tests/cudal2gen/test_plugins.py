"""Proves that linear layers of vLLM and SGLang compute by our operator, with stand-ins for both hosts."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from cudal2gen import pack, plugins
from tests.cudal2gen import packed
from tests.cudal2gen.emulated import EmulatedDevice, OperatorDevice
from tests.packages import require

torch = require("torch")
pytestmark = pytest.mark.torch

STAND_INS = Path(__file__).parent / "hosts"


class Host(NamedTuple):
    """A stand-in: our plugin of it, the module whose ``calls`` are those of its own product, and how a layer runs."""

    host: plugins.Host
    register: Callable[[], None]
    layers: ModuleType
    linear: Callable[..., Any]


class Layer(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)


@pytest.fixture(params=["vllm", "sglang"])
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.syspath_prepend(STAND_INS)
    monkeypatch.setattr(plugins, "REPLACEMENTS", {})
    if request.param == "vllm":
        layers = importlib.import_module("vllm.model_executor.layers.utils")
        method = importlib.import_module("vllm.model_executor.layers.linear").UnquantizedLinearMethod()
        yield Host(plugins.VLLM, plugins.vllm, layers, method.apply)
    else:
        layers = importlib.import_module("sglang.srt.layers.quantization.unquant")
        hooks = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry

        def register() -> None:
            plugins.sglang()
            hooks.apply_hooks()
            hooks.hooks.clear()

        yield Host(plugins.SGLANG, register, layers, lambda *words: layers.UnquantizedLinearMethod().apply(*words))
    forget(request.param)


def forget(package: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]


@pytest.fixture
def enabled(stand_in: Host, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv(stand_in.host.variable, "1")
    return stand_in


def drawn(dtype: Any = torch.bfloat16) -> tuple[Layer, Any, Any]:
    """A layer, an input and a bias."""
    generator = torch.Generator().manual_seed(1)
    weight, x, bias = (torch.randn(*size, generator=generator).to(dtype) for size in ((24, 64), (2, 5, 64), (24,)))
    return Layer(weight), x, bias


def test_a_plugin_is_off_by_default(stand_in: Host) -> None:
    stand_in.register()
    layer, x, bias = drawn()
    stand_in.linear(layer, x, bias)
    assert stand_in.layers.calls == ["Layer"]
    assert stand_in.host.state().endswith(f"{stand_in.host.variable}=1 turns it on")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_compute_by_the_operator(enabled: Host, dtype: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(3):  # hosts may call a plugin again
        enabled.register()
    assert caplog.messages == [f"cudal2gen: {enabled.host.layers} computes by cudal2gen::linear"]
    assert caplog.records[0].name == f"{enabled.host.package}.cudal2gen"
    layer, x, bias = drawn(dtype)
    for term in (bias, None):
        assert torch.equal(enabled.linear(layer, x, term), torch.nn.functional.linear(x, layer.weight, term))
    assert enabled.layers.calls == []


def test_what_the_operator_does_not_take_is_the_hosts(enabled: Host) -> None:
    enabled.register()
    layer, x, bias = drawn(torch.float32)
    assert torch.equal(enabled.linear(layer, x, bias), torch.nn.functional.linear(x, layer.weight, bias))
    layer, x, bias = drawn()
    with torch.device("meta"):
        assert enabled.linear(Layer(torch.empty(24, 64)), torch.empty(2, 64)).shape == (2, 24)
    assert enabled.layers.calls == ["Layer"] * 2


def test_a_graph_has_the_operator_as_one_node(enabled: Host) -> None:
    enabled.register()
    layer, x, bias = drawn()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    result = torch.compile(lambda x: enabled.linear(layer, x, bias), backend=backend, fullgraph=True)(x)
    assert torch.equal(result, torch.nn.functional.linear(x, layer.weight, bias))
    (graph,) = graphs
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [
        torch.ops.cudal2gen.linear.default
    ]


def test_a_measured_kernel_computes_a_layer(enabled: Host, tmp_path: Path) -> None:
    from cudal2gen.operators import emulated

    table = packed.table(list(packed.RECORDS.values()), {0: 2.0, 2: 2.0})
    opened = pack.open_pack(packed.folder(table, tmp_path / "a100"))
    enabled.register()
    with (
        EmulatedDevice(packed.RECORDS["predicated"]) as device,
        emulated(OperatorDevice(device, "a100"), [opened], prefer="kernel") as dispatcher,
    ):
        weight, x = device.empty(24 * 64).view(24, 64), device.empty(30 * 64).view(30, 64)
        for matrix in (weight, x):
            matrix.copy_(torch.randint(-2, 3, matrix.shape))
        d = enabled.linear(Layer(weight), x)
        assert torch.equal(d, (x.double() @ weight.double().t()).half())
        assert sum(dispatcher.stats()["kernel"].values()) == 1
    assert enabled.layers.calls == []


def test_another_version_of_a_host_is_left_alone(enabled: Host, caplog: pytest.LogCaptureFixture) -> None:
    def other(x: Any, weight: Any) -> Any:
        raise NotImplementedError

    owner, name = (
        (enabled.layers, "default_unquantized_gemm")
        if enabled.host is plugins.VLLM
        else (enabled.layers.UnquantizedLinearMethod, "apply")
    )
    setattr(owner, name, other)
    enabled.register()
    assert getattr(owner, name) is other
    (message,) = caplog.messages
    assert message.startswith(f"cudal2gen leaves {enabled.host.name} (no version) as it is: ")
    assert message.endswith(f"takes (x, weight), not ({', '.join(enabled.host.parameters)})")
    delattr(owner, name)
    enabled.register()
    assert "has no attribute" in caplog.messages[-1]


def test_other_devices_of_vllm_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(STAND_INS)
    monkeypatch.setenv("CUDAL2GEN_VLLM", "1")
    layers = importlib.import_module("vllm.model_executor.layers.utils")
    monkeypatch.setattr(layers, "platform", "rocm")
    plugins.vllm()
    forget("vllm")
    assert caplog.messages[0].endswith("its layers compute by rocm_unquantized_gemm")


def test_a_host_that_is_not_there_costs_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for host, register in ((plugins.VLLM, plugins.vllm), (plugins.SGLANG, plugins.sglang)):
        monkeypatch.setenv(host.variable, "1")
        monkeypatch.setitem(sys.modules, host.package, None)
        register()
        assert caplog.messages[-1].startswith(f"cudal2gen leaves {host.name} ")


def test_entry_points_load_without_torch(checkout: Path) -> None:
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    for group, function in (("vllm.general_plugins", plugins.vllm), ("sglang.srt.plugins", plugins.sglang)):
        (value,) = project["entry-points"][group].values()
        assert EntryPoint("cudal2gen", value, group).load() is function
    program = (
        "import sys; from cudal2gen import plugins; plugins.vllm(); plugins.sglang(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_a_script_checks_what_is_installed(checkout: Path, tmp_path: Path) -> None:
    def check(*words: str, hosts: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(checkout / "scripts/check_hosts.py"), *words], capture_output=True, text=True,
            check=False, env=os.environ | {"PYTHONPATH": f"{checkout}:{hosts}"},
        )  # fmt: skip

    done = check("vllm", "sglang", hosts=STAND_INS)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(" is as expected")[0].split(": ")[1] for line in done.stdout.splitlines()] == [
        host.layers for host in plugins.HOSTS
    ]
    (tmp_path / "vllm").mkdir()
    wrong = check("vllm", hosts=tmp_path)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("cudal2gen leaves vLLM (no version) as it is: No module named 'vllm.model_executor'")
    assert check("llama", hosts=tmp_path).returncode == 2
