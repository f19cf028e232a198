"""Proves that vLLM and SGLang compute linear layers by kernels that win, and otherwise by their own functions.

The hosts are stand-ins, and the functions of their released wheels.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import wraps
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from cudal2gen import pack, plugins
from scripts import released_hosts
from tests.cudal2gen import packed
from tests.cudal2gen.emulated import EmulatedDevice, OperatorDevice
from tests.packages import require

torch = require("torch")
pytestmark = pytest.mark.torch

# The folder of the hosts' stand-ins.
STAND_INS = Path(__file__).parent / "hosts"
F32 = torch.float32


class Host(NamedTuple):
    """A host's modules: our plugin of it, the module of its layers, how a layer runs, and the layers that its own
    function computed."""

    host: plugins.Host
    register: Callable[[], None]
    layers: ModuleType
    method: Callable[[], Any]
    calls: list[Any]

    def linear(self, *operands: Any) -> Any:
        """The host's result of a layer: ``operands`` are the layer, its input and perhaps a bias."""
        return self.method().apply(*operands)


class Layer(torch.nn.Module):  # type: ignore[misc]
    """A layer with a weight and nothing else."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)


@pytest.fixture(scope="session")
def released_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules of the released wheels that our plugins patch."""
    folder, wheels = tmp_path_factory.mktemp("released"), tmp_path_factory.mktemp("wheels")
    try:
        released_hosts.extract(released_hosts.download(wheels), folder)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"pip does not find {', '.join(released_hosts.VERSIONS)}: {error.stderr[-200:]}")
    finally:
        shutil.rmtree(wheels)
    return folder


RELEASED = [pytest.param(f"released {host}", marks=pytest.mark.slow) for host in ("vllm", "sglang")]


@pytest.fixture(params=["vllm", "sglang", *RELEASED])
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """The stand-in of a host, or its release if that is installed, with calls of its own functions counted."""
    *kind, package = request.param.split()
    monkeypatch.syspath_prepend(request.getfixturevalue("released_modules") if kind else STAND_INS)
    monkeypatch.setattr(plugins, "REPLACEMENTS", {})
    forget(package)
    yield vllm_host(monkeypatch) if package == "vllm" else sglang_host(monkeypatch)
    forget(package)


def record_results(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    """A host's own function, which also appends its results to ``calls``."""

    @wraps(function)
    def call(*operands: Any) -> Any:
        calls.append(function(*operands))
        return calls[-1]

    return call


def vllm_host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """The loaded vLLM, with a count of the calls of its own product."""
    layers = importlib.import_module("vllm.model_executor.layers.utils")
    method = importlib.import_module("vllm.model_executor.layers.linear").UnquantizedLinearMethod
    calls: list[Any] = []
    monkeypatch.setattr(layers, "default_unquantized_gemm", record_results(layers.default_unquantized_gemm, calls))
    return Host(plugins.VLLM, plugins.vllm, layers, method, calls)


def sglang_host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """The loaded SGLang, with a count of the calls of its own product."""
    layers = importlib.import_module("sglang.srt.layers.quantization.unquant")
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    method, calls = layers.UnquantizedLinearMethod, []
    monkeypatch.setattr(method, "apply", record_results(method.apply, calls))

    def register() -> None:
        plugins.sglang()
        hooks.apply_hooks()
        hooks.reset()

    return Host(plugins.SGLANG, register, layers, method, calls)


def forget(package: str) -> None:
    """Removes a package from all places where Python and torch keep it."""
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
    # torch.compile keeps modules by name, and the stand-in and the release have the same name.
    for name in [name for name in globals() if name.startswith(f"__import_{package}")]:
        del globals()[name]
    importlib.import_module("torch._dynamo.symbolic_convert")._import_module.cache_clear()


@pytest.fixture
def enabled_host(stand_in: Host, monkeypatch: pytest.MonkeyPatch) -> Host:
    """The host, with the plugin's variable set."""
    monkeypatch.setenv(stand_in.host.variable, "1")
    return stand_in


def draw_layer(dtype: Any = torch.bfloat16) -> tuple[Layer, Any, Any]:
    """A layer, an input and a bias."""
    generator = torch.Generator().manual_seed(1)
    weight, x, bias = (torch.randn(*size, generator=generator).to(dtype) for size in ((24, 64), (2, 5, 64), (24,)))
    return Layer(weight), x, bias


class WinningSetup(NamedTuple):
    """A device with a pack of kernels for fp16, of which one was measured faster for a weight (64,128) and 64 rows."""

    dispatcher: Any
    device: EmulatedDevice

    def layer(self, m: int, n: int = 64, k: int = 128) -> tuple[Layer, Any]:
        """A layer and an input of m rows, on the device."""
        weight, x = self.device.empty(n * k).view(n, k), self.device.empty(m * k).view(m, k)
        for matrix in (weight, x):
            matrix.copy_(torch.randint(-2, 3, matrix.shape))
        return Layer(weight), x

    @property
    def kernels(self) -> int:
        """Calls on kernels."""
        return sum(self.dispatcher.stats()["kernel"].values())


@pytest.fixture(scope="module")
def winning_pack(tmp_path_factory: pytest.TempPathFactory) -> pack.Pack:
    """A pack of a kernel that was measured as twice as fast as torch."""
    table = packed.table([packed.RECORDS["predicated"]], {0: 2.0})
    return pack.open_pack(packed.folder(table, tmp_path_factory.mktemp("winning") / "a100"))


@pytest.fixture
def winning_setup(winning_pack: pack.Pack) -> Iterator[WinningSetup]:
    """A dispatcher on an emulated device, whose kernel was measured as faster than torch."""
    from cudal2gen.operators import emulated

    with (
        EmulatedDevice(packed.RECORDS["predicated"]) as device,
        emulated(OperatorDevice(device, "a100"), [winning_pack]) as dispatcher,
    ):
        yield WinningSetup(dispatcher, device)


def product(layer: Layer, x: Any) -> Any:
    """The exact result of a layer, rounded to the type of its input."""
    return (x.double() @ layer.weight.double().t()).to(x.dtype)


def test_a_plugin_is_off_by_default(stand_in: Host) -> None:
    stand_in.register()
    layer, x, bias = draw_layer()
    assert stand_in.linear(layer, x, bias) is stand_in.calls[0]
    assert stand_in.host.state().endswith(f"{stand_in.host.variable}=1 turns it on")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, F32])
def test_the_host_computes_layers_that_no_kernel_wins(
    enabled_host: Host, dtype: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """They get the same result as by the host's own function."""
    caplog.set_level(logging.INFO)
    for _ in range(3):  # hosts may call a plugin several times
        enabled_host.register()
    (message,) = [record for record in caplog.records if "cudal2gen" in record.name]
    where = f"cudal2gen: {enabled_host.host.function} computes by cudal2gen::linear where a kernel was measured faster"
    assert message.getMessage() == where + enabled_host.host.exceptions
    layer, x, bias = draw_layer(dtype)
    for term in (bias, None):
        assert enabled_host.linear(layer, x, term) is enabled_host.calls[-1]
    with torch.device("meta"):
        assert enabled_host.linear(Layer(torch.empty(24, 64)), torch.empty(2, 64)).shape == (2, 24)
    assert len(enabled_host.calls) == 3


def test_a_kernel_computes_the_calls_that_it_wins(enabled_host: Host, winning_setup: WinningSetup) -> None:
    enabled_host.register()
    layer, x = winning_setup.layer(64)
    assert torch.equal(enabled_host.linear(layer, x), product(layer, x))
    assert (winning_setup.kernels, enabled_host.calls) == (1, [])
    for m, n in ((300, 64), (64, 512)):  # more rows than in the measurements that were won, and another weight
        layer, x = winning_setup.layer(m, n)
        assert enabled_host.linear(layer, x) is enabled_host.calls[-1]
    assert (winning_setup.kernels, len(enabled_host.calls)) == (1, 2)


def test_the_host_computes_what_the_operator_refuses(enabled_host: Host, winning_setup: WinningSetup) -> None:
    enabled_host.register()
    layer, x = winning_setup.layer(64)
    bias = winning_setup.device.empty(1).fill_(3)
    assert torch.equal(enabled_host.linear(layer, x, bias), product(layer, x) + 3)
    assert torch.equal(enabled_host.linear(layer, x, bias), enabled_host.calls[-1])
    with pytest.raises(RuntimeError):
        enabled_host.linear(layer, x[:, :64])
    assert winning_setup.kernels == 0


def test_the_host_keeps_layers_that_it_computes_in_another_way(enabled_host: Host, winning_setup: WinningSetup) -> None:
    enabled_host.register()
    layer, x = winning_setup.layer(64)
    if enabled_host.host is plugins.VLLM:
        enabled_host.layers.envs.VLLM_BATCH_INVARIANT = True
        assert enabled_host.layers.dispatch_unquantized_gemm()(layer, x, layer.weight, None) is enabled_host.calls[-1]
        enabled_host.layers.envs.VLLM_BATCH_INVARIANT = False
    else:
        enabled_host.layers._batch_invariant = True
        assert enabled_host.linear(layer, x) is enabled_host.calls[-1]
        enabled_host.layers._batch_invariant = False
    assert (winning_setup.kernels, len(enabled_host.calls)) == (0, 1)
    enabled_host.linear(layer, x)
    assert (winning_setup.kernels, len(enabled_host.calls)) == (1, 1)


@pytest.mark.parametrize("backend", ["CUTEDSL", "GEMV", "splitk", "TORCH", "AUTO"])
def test_sglang_computes_bf16_layers_for_which_it_has_kernels(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.syspath_prepend(STAND_INS)
    layers = importlib.import_module("sglang.srt.layers.quantization.unquant")
    chosen = "AUTO" if backend == "splitk" else backend
    monkeypatch.setattr(layers, "_BF16_GEMM_BACKEND", layers.Bf16GemmBackend[chosen])
    monkeypatch.setattr(layers, "_enable_bf16_splitk_gemm", backend == "splitk")
    assert plugins._sglang_defers(layers, bf16=True) == (backend not in ("TORCH", "AUTO"))
    assert not plugins._sglang_defers(layers, bf16=False)
    forget("sglang")


def test_sums_with_an_addend_and_into_an_output_are_right(enabled_host: Host, winning_setup: WinningSetup) -> None:
    if enabled_host.host is plugins.VLLM:
        assert not hasattr(enabled_host.method, "apply_into"), "it has none of these functions"
        return
    enabled_host.register()
    layer, x = winning_setup.layer(64)
    expected = product(layer, x)
    d = torch.empty_like(expected)
    assert enabled_host.method().apply_into(layer, x, d) is d
    assert torch.equal(d, expected)
    assert winning_setup.kernels == 0, "this one is the host's"
    assert torch.equal(enabled_host.method().apply_with_addend(layer, x, torch.ones_like(expected)), expected + 1)
    assert (winning_setup.kernels, enabled_host.calls) == (1, [])


def graph_of(enabled_host: Host, layer: Layer, x: Any) -> list[Any]:
    """The functions that the graph of a layer calls. Checks that its result is right."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    method = enabled_host.method()
    torch._dynamo.reset()
    result = torch.compile(lambda x: method.apply(layer, x), backend=backend, fullgraph=True, dynamic=True)(x)
    assert torch.equal(result, product(layer, x))
    (graph,) = graphs
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def test_graphs_have_the_operator_where_it_may_win(enabled_host: Host, winning_setup: WinningSetup) -> None:
    enabled_host.register()
    layer, x = winning_setup.layer(64)
    assert torch.ops.cudal2gen.linear.default in graph_of(enabled_host, layer, x)
    assert winning_setup.kernels == 1
    layer, x = winning_setup.layer(64, n=512)
    assert graph_of(enabled_host, layer, x)[-1] in (torch.nn.functional.linear, torch._C._nn.linear)
    assert winning_setup.kernels == 1


def test_while_calls_measure_every_layer_takes_part(enabled_host: Host, winning_setup: WinningSetup) -> None:
    from cudal2gen.operators import hosted

    assert not hosted.may_win(512, 128, torch.float16, "cpu", None, False)
    winning_setup.dispatcher.mode = "once"
    winning_setup.dispatcher.forget()
    assert hosted.may_win(512, 128, torch.float16, "cpu", None, False)
    assert not hosted.may_win(512, 128, F32, "cpu", None, False)
    winning_setup.dispatcher.mode, winning_setup.dispatcher.prefer = "off", "vendor"
    winning_setup.dispatcher.forget()
    assert not hosted.may_win(64, 128, torch.float16, "cpu", None, False)


def test_another_version_of_a_host_is_left_alone(enabled_host: Host, caplog: pytest.LogCaptureFixture) -> None:
    def other(x: Any, weight: Any) -> Any:
        raise NotImplementedError

    owner, name = (
        (enabled_host.layers, "default_unquantized_gemm")
        if enabled_host.host is plugins.VLLM
        else (enabled_host.layers.UnquantizedLinearMethod, "apply")
    )
    setattr(owner, name, other)
    enabled_host.register()
    assert getattr(owner, name) is other
    (message,) = caplog.messages
    assert message.startswith(f"cudal2gen leaves {enabled_host.host.name} (no version) as it is: ")
    assert message.endswith(f"takes (x, weight), not ({', '.join(enabled_host.host.parameters)})")
    delattr(owner, name)
    enabled_host.register()
    assert "has no attribute" in caplog.messages[-1] or "is not defined" in caplog.messages[-1]


def test_other_devices_of_vllm_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(STAND_INS)
    monkeypatch.setenv("CUDAL2GEN_VLLM", "1")
    layers = importlib.import_module("vllm.model_executor.layers.utils")
    monkeypatch.setattr(layers.current_platform, "is_rocm", lambda: True)
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
        host.function for host in plugins.HOSTS
    ]
    (tmp_path / "vllm").mkdir()
    wrong = check("vllm", hosts=tmp_path)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("cudal2gen leaves vLLM (no version) as it is: No module named 'vllm.model_executor'")
    assert check("llama", hosts=tmp_path).returncode == 2
