"""Proves that Hugging Face's ``kernels`` package loads a pack as a repository, and computes with it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cudal2gen import pack
from cudal2gen.pack.repository import repository, workloads
from kernelproof import emulator
from tests.cudal2gen import packed
from tests.cudal2gen.emulated import allocate
from tests.packages import require

torch = require("torch")
kernels = require("kernels")

pytestmark = pytest.mark.torch

PREDICATED = packed.RECORDS["predicated"]
# The kernels of the table of which a variant is made.
RECORDS = [
    PREDICATED,  # 64_64_128, fp16, B (n,k)
    packed.RECORDS["nn"],
    packed.RECORDS["split"],  # 32_32_256
    PREDICATED.at(PREDICATED.problem.revised(fusion="bias_n")),
    PREDICATED.at(PREDICATED.problem.revised(ab="bf16")),
    packed.RECORDS["f16"],
    packed.RECORDS["whole"],  # 96_96_64, measured slower
]
A100 = "NVIDIA A100-SXM4-80GB"  # the card's name, as torch reports it


class Emulated:
    """Stands in for the variant's Gpu class on an emulated device. Tensors in other memory are the CPU's. ``captures``:
    whether a CUDA graph is being captured, which a test sets."""

    runtime = str(emulator.runtime_path())

    def __init__(self, memory: emulator.Memory) -> None:
        self.memory, self.captures = memory, False

    def has(self, tensor: Any) -> bool:
        """Whether the tensor is in memory of the emulated device."""
        place = tensor.data_ptr()
        return any(buffer.address <= place < buffer.address + buffer.nbytes for buffer in self.memory.buffers)

    def stream(self, tensor: Any) -> int:
        """The default stream, the only one here."""
        return 0

    def current(self, tensor: Any) -> AbstractContextManager[None]:
        """Makes nothing current: there is one device."""
        return nullcontext()

    def capturing(self) -> bool:
        """Whether the test captures a CUDA graph."""
        return self.captures

    def empty(self, like: Any, *shape: int) -> Any:
        """A tensor of this shape and of the type of ``like`` in the device's memory."""
        return allocate(self.memory, *shape).view(like.dtype)


@pytest.fixture(scope="module")
def table() -> Any:
    """A table in which all kernels but the last one were measured twice as fast as torch."""
    return packed.table(RECORDS, {0: 2.0, 1: 2.0, 2: 2.0, 3: 2.0, 4: 2.0, 5: 2.0, 6: 0.5})


@pytest.fixture(scope="module")
def directory(table: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a repository for the hub."""
    return pack.write_folder(repository(packed.files(table), table), tmp_path_factory.mktemp("hub") / "products")


@pytest.fixture
def products(directory: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The package's variant, as ``kernels`` loads it if torch reports a build for CUDA."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    module: ModuleType = kernels.get_local_kernel(directory)
    return module


@pytest.fixture
def gpu(products: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An emulated device in place of CUDA, as ``device``. ``draw`` gives small integers in its memory, and ``launches``
    counts launches."""
    with on_device(products, monkeypatch, A100) as device:
        yield device


class on_device:
    """A block in which the package's operators have an emulated device with this name and capability.

    Yields what ``gpu`` yields.
    """

    def __init__(
        self, products: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int] = (8, 0)
    ) -> None:
        self.products, self.monkeypatch = products, monkeypatch
        self.device = emulator.Device(capability=capability, name=name)

    def __enter__(self) -> Any:
        memory = emulator.Memory()
        self.session = emulator.session(memory, self.device)
        self.session.__enter__()
        device = Emulated(memory)
        self.monkeypatch.setattr(self.products.operators, "gpu", device)
        self.products.prefer("measured")
        self.products.library._libraries.clear()

        def draw(*shape: int, dtype: Any = torch.float16) -> Any:
            return allocate(memory, *shape).view(dtype).copy_(torch.randint(-2, 3, shape))

        return SimpleNamespace(device=device, draw=draw, launches=self.session.launches)

    def __exit__(self, *_: object) -> None:
        self.session.__exit__(None, None, None)
        assert self.session.errors == []
        self.products.prefer("measured")
        self.products.library._libraries.clear()


# --- the folder ---


def test_the_package_finds_metadata_and_digests_right(products: ModuleType, directory: Path) -> None:
    variant = directory / "build" / "torch-cuda"
    (loaded,) = [each for each in kernels.get_loaded_kernels() if each.module is products]
    metadata = loaded.metadata
    assert (str(metadata.name), metadata.id) == ("cudal2gen-a100", products.__name__)
    assert metadata.backend.archs == ["8.0"]
    assert metadata.version == 1
    from kernels._rust import Digest

    metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))
    assert pack.open_pack(variant / "pack").gpu == "a100", "the variant contains the whole pack"
    assert products.__name__.endswith(json.loads((variant / "pack" / "pack.json").read_text())["sha256"][:7])


def test_the_code_is_plain_python_of_3_9(directory: Path) -> None:
    modules = sorted(directory.rglob("*.py"))
    assert len(modules) == 6
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 9))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            else:
                continue
            own = {"torch", "kernels"} if path.name == "benchmark.py" else {"torch"}
            assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names | own, path
    lint = [sys.executable, "-m", "ruff", "--isolated", "--no-cache"]
    for action in (["check", "--select", "E,F,W,I"], ["format", "--check"]):
        command = [*lint[:3], *action, *lint[3:], "--line-length", "120", "--target-version", "py39", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_card_says_what_was_measured(directory: Path, table: Any) -> None:
    text = (directory / "README.md").read_text()
    assert "6 of 7 measured problems were won." in text
    assert "NVIDIA A100" in text
    bare = packed.table(RECORDS[:1])
    files = repository(packed.files(bare), bare)
    assert "Nothing in it was measured yet." in files["README.md"].decode()
    assert 'prefer("kernel")' in files["benchmarks/benchmark.py"].decode()


# --- products ---


@pytest.mark.slow
def test_a_measured_product_runs_on_its_kernel(products: ModuleType, gpu: Any) -> None:
    a, b = gpu.draw(64, 128), gpu.draw(64, 128)
    d = products.matmul(a, b.t())
    torch.testing.assert_close(d, (a.float() @ b.float().t()).half(), rtol=0, atol=0)
    assert [launch.kernel for launch in gpu.launches] == [PREDICATED.name]
    assert "measured 2.000x" in products.why(a, b.t())
    stored = gpu.draw(128, 64)  # (k,n)
    torch.testing.assert_close(products.matmul(a, stored), (a.float() @ stored.float()).half(), rtol=0, atol=0)
    torch.testing.assert_close(products.matmul(a, b.t(), "f16"), d, rtol=0, atol=0)
    wide = gpu.draw(32, 512)[:, :256]  # rows are further apart; two slices are summed in scratch memory
    square = (wide.float() @ wide.float().t()).half()
    torch.testing.assert_close(products.matmul(wide, wide.t()), square, rtol=0, atol=0)
    brain = gpu.draw(64, 128, dtype=torch.bfloat16)
    torch.testing.assert_close(products.matmul(brain, brain.t()), (brain.float() @ brain.float().t()).bfloat16())
    names = [record.name for record in (PREDICATED, RECORDS[1], RECORDS[5], RECORDS[2], RECORDS[4])]
    assert [launch.kernel for launch in gpu.launches] == names


def test_other_products_are_computed_by_torch(products: ModuleType, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = gpu.draw(96, 64), gpu.draw(96, 64)
    torch.testing.assert_close(products.matmul(a, b.t()), a @ b.t())
    assert "96_96_64: no kernel was measured faster" in products.why(a, b.t())
    c = gpu.draw(64, 129)[:, 1:]  # rows are not 16-byte aligned, so the launcher refuses
    torch.testing.assert_close(products.matmul(c, c.t()), c @ c.t())
    single = a.float()
    torch.testing.assert_close(products.matmul(single, single.t()), single @ single.t())
    outside = torch.randn(64, 128).half()
    torch.testing.assert_close(products.matmul(outside, outside.t()), outside @ outside.t())
    x = gpu.draw(64, 128)
    gpu.device.captures = True
    products.prefer("measured")
    torch.testing.assert_close(products.matmul(x, x.t()), x @ x.t())
    assert not gpu.launches
    gpu.device.captures = False
    products.matmul(x, x.t())
    assert len(gpu.launches) == 1, "a plan refused during capture is not kept"
    products.prefer("vendor")
    products.matmul(x, x.t())
    assert len(gpu.launches) == 1
    products.prefer("kernel")
    torch.testing.assert_close(products.matmul(a, b.t()), (a.float() @ b.float().t()).half(), rtol=0, atol=0)
    assert len(gpu.launches) == 2
    with pytest.raises(ValueError, match="prefer"):
        products.prefer("fastest")
    with pytest.raises(ValueError, match="acc='f64'"):
        products.matmul(a, b.t(), "f64")
    with pytest.raises(RuntimeError, match="shape"):
        products.matmul(a, b)


def test_linear_adds_the_bias_in_the_kernel(products: ModuleType, gpu: Any) -> None:
    x, weight, bias = gpu.draw(4, 16, 128), gpu.draw(64, 128), gpu.draw(64)
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float()).half()
    torch.testing.assert_close(products.linear(x, weight, bias), expected, rtol=0, atol=0)
    assert [launch.kernel for launch in gpu.launches] == [RECORDS[3].name]
    torch.testing.assert_close(products.linear(x, weight), (x.float() @ weight.float().t()).half(), rtol=0, atol=0)
    assert len(gpu.launches) == 2
    few = gpu.draw(128)
    torch.testing.assert_close(products.linear(few, weight, bias), torch.nn.functional.linear(few, weight, bias))
    # torch computes a bias that all columns share, and products without elements.
    for operands in (
        (x, weight, bias[:1]),
        (gpu.draw(4, 0, 128), weight, bias),
        (gpu.draw(4, 0), gpu.draw(64, 0), bias),
    ):
        torch.testing.assert_close(products.linear(*operands), torch.nn.functional.linear(*operands))
    assert len(gpu.launches) == 2


def test_another_gpu_is_named_once_and_torch_computes(products: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_device(products, monkeypatch, "NVIDIA H200", (9, 0)) as gpu:
        a = gpu.draw(64, 128)
        with pytest.warns(UserWarning, match=r"no kernels for NVIDIA H200 \(sm_90\): this pack is for a100"):
            torch.testing.assert_close(products.matmul(a, a.t()), a @ a.t())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            products.matmul(a, a.t())
        assert not gpu.launches


def test_another_card_computes_by_kernels_on_request(products: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_device(products, monkeypatch, "NVIDIA A40", (8, 6)) as gpu:
        a = gpu.draw(64, 128)
        torch.testing.assert_close(products.matmul(a, a.t()), a @ a.t())
        assert products.why(a, a.t()).endswith("nothing was measured on this card; the kernels are a100's")
        assert not gpu.launches
        products.prefer("kernel")
        torch.testing.assert_close(products.matmul(a, a.t()), a @ a.t())
        assert len(gpu.launches) == 1


def test_an_opening_that_fails_is_tried_once(products: ModuleType, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def fail(runtime: str | None) -> None:
        tries.append(runtime)
        raise OSError("libcudal2gen.so: cannot open shared object file")

    monkeypatch.setattr(products.library, "Library", fail)
    products.operators._plans.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # of other tests' garbage
        for rows in (64, 32, 31, 64):
            a = gpu.draw(rows, 128)
            torch.testing.assert_close(products.matmul(a, a.t()), a @ a.t())
    assert len(tries) == 1
    (warning,) = caught
    assert "torch computes all products: libcudal2gen.so: cannot open shared object file" in str(warning.message)
    with pytest.raises(products.library.Unavailable, match="cannot open shared object file"):
        products.library.library(gpu.draw(1, 1).device.index)


# --- with torch and with kernelize ---


def test_operators_are_registered_with_torch(products: ModuleType, gpu: Any) -> None:
    ops = getattr(torch.ops, products.__name__)
    x, weight, bias = gpu.draw(64, 128), gpu.draw(64, 128), gpu.draw(64)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(ops.matmul.default, (x, weight.t(), "f32"), test_utils=checks)
    torch.library.opcheck(ops.linear.default, (x, weight, bias), test_utils=checks)
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    products.linear(x, weight, bias).sum().backward()
    assert gpu.launches
    single = [tensor.detach().float().requires_grad_() for tensor in (x, weight, bias)]
    torch.nn.functional.linear(*single).sum().backward()
    for tensor, other in zip((x, weight, bias), single, strict=True):
        torch.testing.assert_close(tensor.grad.float(), other.grad, rtol=0, atol=0)


def test_a_layer_is_kernelized_and_compiles(products: ModuleType, gpu: Any, directory: Path) -> None:
    class Projection(torch.nn.Linear):
        pass

    kernels.replace_kernel_forward_from_hub(Projection, "Linear")
    layer = Projection(128, 64, dtype=torch.float16)
    layer.weight.data, layer.bias.data = gpu.draw(64, 128), gpu.draw(64)
    x = gpu.draw(64, 128)
    expected = torch.nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float()).half()
    mapping = {"Linear": {"cpu": kernels.LocalLayerRepository(directory, layer_name="Linear")}}
    mode = kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE
    with kernels.use_kernel_mapping(mapping), torch.no_grad():
        kernels.kernelize(layer, mode=mode, device="cpu", use_fallback=False)
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
        assert len(gpu.launches) == 1
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected, rtol=0, atol=0)
        assert len(gpu.launches) == 2


def test_the_benchmark_is_what_the_command_runs(
    products: ModuleType, directory: Path, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels.cli import benchmark

    (script,) = benchmark.discover_benchmark_scripts("products", directory)
    (workload_class,) = benchmark.discover_benchmark_classes(script, directory)
    # the device on which it draws tensors
    monkeypatch.setattr(benchmark, "_backend", lambda: SimpleNamespace(name="cpu"))
    results, sha = benchmark.run_benchmark_class(workload_class, 1, 0, str(directory), True, "local")
    assert sorted(results) == sorted(workload.name for workload in workloads(table))
    assert "float16_f32_tn_64_64_128" in results
    assert all(timing.verified for timing in results.values())
    assert products.__name__.endswith(sha)
    products.prefer("measured")
