"""Proves without a GPU how one is found and named, what is refused, and that matrices are padded."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from cudal2gen.generation import compiler
from cudal2gen.kernel import Record, revise
from cudal2gen.kernel.fusion import ALPHA, BETA
from cudal2gen.launch import gpu
from cudal2gen.launch.gpu import Gpu, GpuError
from cudal2gen.launch.launcher import LaunchError
from cudal2gen.launch.operands import ALIGNMENT, Operands, draw
from cudal2gen.validator.matrices import Matrices
from kernelproof.emulator.host.cuda import INVALID_VALUE
from kernelproof.ground import chips
from kernelproof.ground.element import F16
from tests.cudal2gen import idle_runtime
from tests.cudal2gen.emulated import EmulatedDevice
from tests.cudal2gen.paths import PATHS, small
from tests.cudal2gen.strategies import wgmma

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090 D", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H20-3e", None),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", None),
        ("Tesla V100", None),
    ],
)
def test_a_model_is_known_by_its_words(name: str, model: str | None) -> None:
    assert chips.model_of(name) == model


def test_the_runtime_is_found_without_an_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    idle_runtime.hide_loaded(monkeypatch)
    library = gpu.runtime()
    assert library.name.startswith("libcudart.so.13")
    packaged = tmp_path / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    packaged.parent.mkdir(parents=True)
    packaged.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert gpu.runtime() == packaged
    monkeypatch.setattr(Path, "is_file", lambda _: False)
    for cuda in ("13.0", None, "12.8"):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        with pytest.raises(GpuError, match=r"libcudart.so.13 not found; .*pip install '?nvidia-cuda-runtime==13"):
            gpu.runtime()


def test_a_runtime_that_is_loaded_already_is_preferred(tmp_path: Path) -> None:
    """Such a runtime is torch's. Two runtimes in one process could not share a context's streams safely."""
    loaded = tmp_path / "libcudart.so.13"
    loaded.write_bytes(gpu.runtime().read_bytes())
    program = f"import ctypes; ctypes.CDLL({str(loaded)!r}); from cudal2gen.launch import gpu; print(gpu.runtime())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(loaded)


def test_without_a_gpu_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(GpuError, match="torch sees no CUDA device; without one, the emulator runs kernels: validate"):
        Gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(GpuError, match="--gpu NAME:2: there are 2 CUDA devices, counted from 0"):
        Gpu(2)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(GpuError, match=r"torch is missing, .*\[gpu\]"):
        Gpu()


class StandIn(Gpu):
    """Stands in for a CUDA device."""

    def __init__(self, index: int = 0) -> None:
        self.index = index


def test_a_stand_in_takes_the_place_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpu.STAND_IN, "tests.cudal2gen.test_gpu:StandIn")
    card = gpu.connect(3)
    assert (type(card).__name__, card.index) == ("StandIn", 3)  # type: ignore[attr-defined]
    others = {
        "tests.cudal2gen.test_gpu:Nothing": "no attribute 'Nothing'",
        "no_module:Card": "no_module",
        "pathlib:Path": "is no",
    }
    for name, message in others.items():
        monkeypatch.setenv(gpu.STAND_IN, name)
        with pytest.raises(GpuError, match=message):
            gpu.connect()


@pytest.mark.parametrize(("name", "model"), [("NVIDIA H200", "h200"), ("NVIDIA of tomorrow", "NVIDIA of tomorrow")])
def test_a_cards_verdicts_are_of_its_model_else_of_its_name(name: str, model: str, h200: Gpu) -> None:
    h200._properties.name = name
    assert (h200.name, h200.model) == (name, model)


@pytest.fixture
def h200() -> Gpu:
    """A Gpu with invented properties, on which nothing can be run."""
    bare = object.__new__(Gpu)
    bare._torch = torch
    bare._properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, L2_cache_size=60 << 20,
        total_memory=141 << 30, uuid="1234-abcd",
    )  # fmt: skip
    return bare


def test_records_of_another_capability_are_refused(h200: Gpu) -> None:
    record = small()
    h200.check(revise(record, gpu="h200"))
    h200.check(revise(record, gpu="h100"))
    for other, sm in (("a100", "sm_80"), ("l40s", "sm_89"), ("rtx5090", "sm_120")):
        with pytest.raises(
            GpuError, match=rf"{other} sm80_multistage is for {sm}; this is NVIDIA H200 \(sm_90, .*: choose --gpu h200"
        ):
            h200.check(revise(record, gpu=other))
    h200._properties.name, h200._properties.major, h200._properties.minor = "NVIDIA GeForce RTX 3090", 8, 6
    h200.check(revise(record, gpu="a100", bm=32))  # sm_80 code runs on 8.6
    with pytest.raises(GpuError, match=r"this is NVIDIA GeForce RTX 3090 \(sm_86"):
        h200.check(revise(record, gpu="l40s"))
    h200._properties.name, h200._properties.major, h200._properties.minor = "NVIDIA H200", 9, 0
    h200.check(wgmma())
    h200._properties.name, h200._properties.major, h200._properties.minor = "NVIDIA B200", 10, 0
    with pytest.raises(GpuError, match=r"h200 sm90_wgmma is for sm_90a; this is NVIDIA B200 \(sm_100"):
        h200.check(wgmma())


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch, h200: Gpu) -> SimpleNamespace:
    """A stand-in for pynvml with a driver. It accepts only names that the real package has."""
    import pynvml

    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: ("handle", uuid),
        "nvmlDeviceGetEccMode": lambda handle: [1, 1],
        "nvmlDeviceGetMaxClockInfo": lambda handle, kind: {0: 1980, 1: 1980, 2: 3201}[kind],
        "nvmlDeviceGetMemoryBusWidth": lambda handle: 6144,
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: (
            pynvml.nvmlClocksEventReasonGpuIdle | pynvml.nvmlClocksEventReasonSwPowerCap
        ),
        "nvmlDeviceGetClockInfo": lambda handle, kind: {0: 1700, 1: 1700, 2: 3201}[kind],
        "nvmlDeviceGetPowerUsage": lambda handle: 512_500,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 61,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer, raising=True)
    return SimpleNamespace(module=pynvml, answers=answers)


def test_the_environment_is_read(h200: Gpu, nvml: SimpleNamespace) -> None:
    environment = h200.environment
    assert (environment.gpu, environment.name, environment.capability) == ("h200", "NVIDIA H200", "9.0")
    assert (environment.sms, environment.l2_bytes, environment.power_limit_w) == (132, 60 << 20, 700.0)
    assert environment.ecc is True
    assert environment.bandwidth_bytes_us == pytest.approx(2 * 3201 * 6144 / 8)
    assert environment.versions["torch"] == torch.__version__
    assert h200._nvml[1] == ("handle", b"GPU-1234-abcd")


def test_the_same_environment_has_the_same_id(h200: Gpu, nvml: SimpleNamespace, monkeypatch: Any) -> None:
    first = h200.environment.id
    del h200.__dict__["environment"]
    assert h200.environment.id == first
    del h200.__dict__["environment"]
    monkeypatch.setattr(nvml.module, "nvmlSystemGetDriverVersion", lambda: "590.1")
    assert h200.environment.id != first


def test_a_card_without_ecc_is_no_error(h200: Gpu, nvml: SimpleNamespace, monkeypatch: Any) -> None:
    def raise_nvml_error(handle: Any) -> Any:
        raise nvml.module.NVMLError(nvml.module.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(nvml.module, "nvmlDeviceGetEccMode", raise_nvml_error)
    assert h200.environment.ecc is None


def test_what_the_host_does_not_tell_is_zero(h200: Gpu, nvml: SimpleNamespace, monkeypatch: Any) -> None:
    def raise_nvml_error(*_: Any) -> Any:
        raise nvml.module.NVMLError(nvml.module.NVML_ERROR_NO_PERMISSION)

    for name in nvml.answers:
        if name.startswith("nvmlDevice") and name != "nvmlDeviceGetHandleByUUID":
            monkeypatch.setattr(nvml.module, name, raise_nvml_error)
    assert h200.reading() == gpu.CardReading(0, 0, 0.0, 0, frozenset())
    assert h200.environment.floor_us(small().problem, cold=True) == 0


def test_without_nvml_the_error_says_what_to_do(h200: Gpu, nvml: SimpleNamespace, monkeypatch: Any) -> None:
    def raise_nvml_error() -> None:
        raise nvml.module.NVMLError(nvml.module.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setattr(nvml.module, "nvmlInit", raise_nvml_error)
    with pytest.raises(GpuError, match="NVML does not tell of NVIDIA H200: Driver Not Loaded"):
        _ = h200.environment
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(GpuError, match=r"nvidia-ml-py is missing, .*\[gpu\]"):
        _ = h200.environment


def test_the_card_is_read(h200: Gpu, nvml: SimpleNamespace) -> None:
    reading = h200.reading()
    assert (reading.sm_mhz, reading.memory_mhz, reading.power_w, reading.temperature_c) == (1700, 3201, 512.5, 61)
    assert reading.throttle == {"SwPowerCap"}


def test_nvml_is_asked_by_names_that_it_has(nvml: SimpleNamespace) -> None:
    """Every function of NVML that ``gpu`` calls exists in the real package and in the stand-in."""
    tree = ast.parse(Path(gpu.__file__).read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("nvml", "pynvml")
    }
    assert {name for name in used if not hasattr(nvml.module, name)} == set()
    assert {name for name in used if name.startswith("nvml")} == set(nvml.answers)


# --- kernels on tensors ---


@pytest.fixture
def library() -> Path:
    """The compiled launcher."""
    return compiler.launcher()


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    """An emulated A100."""
    with EmulatedDevice(small()) as device:
        yield device


def kernel_on(device: EmulatedDevice, record: Record, library: Path) -> gpu.KernelContender:
    """A record's kernel, opened on the device."""
    return device.open(record, compiler.build([record])[0], library)


def matrices(device: EmulatedDevice, m: int = 64, n: int = 64, k: int = 256) -> dict[str, Any]:
    """Operands of these sizes, with B stored both ways."""
    return {"a": device.empty(m, k), "b": device.empty(n, k), "b_nn": device.empty(k, n), "d": device.empty(m, n)}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("a", lambda it: it.float(), "A: expected a matrix of fp16 with contiguous rows, got torch.float32"),
        ("b", lambda it: it.bfloat16(), "B: expected a matrix of fp16 with contiguous rows, got torch.bfloat16"),
        ("d", lambda it: it.T, r"D: expected a matrix of fp16 .* with strides \(1, 64\)"),
        ("a", lambda it: it[:, ::2], r"A: expected .* with strides \(256, 2\)"),
        (
            "a",
            lambda it: it[None],
            r"A: expected a matrix of fp16 with contiguous rows, got torch.float16 \(1, 64, 256\)",
        ),
        ("b", lambda it: it[:32], r"A \(64, 256\), B \(32, 256\) as tn and D \(64, 64\) do not fit"),
        ("b", lambda it: it[:, :128], r"A \(64, 256\), B \(64, 128\) as tn and D"),
        ("d", lambda it: it[:32], r"and D \(32, 64\) do not fit"),
        ("d", lambda it: it[:, :48], r"and D \(64, 48\) do not fit"),
    ],
)
def test_tensors_that_a_kernel_does_not_take(
    name: str, change: Any, message: str, device: EmulatedDevice, library: Path
) -> None:
    operands = matrices(device)
    operands[name] = change(operands[name])
    with pytest.raises(ValueError, match=message):
        kernel_on(device, small(), library).bind(Operands(**operands))


def test_b_is_taken_as_the_layout_has_it(device: EmulatedDevice, library: Path) -> None:
    operands = Operands(**matrices(device, n=128))
    assert operands.stored_b("tn").shape == (128, 256)
    assert operands.stored_b("nn").shape == (256, 128)
    kernel_on(device, small(layout="nn"), library).bind(operands)
    wrong = Operands(operands.a, operands.b, operands.b, operands.d)
    with pytest.raises(ValueError, match=r"B \(128, 256\) as nn"):
        kernel_on(device, small(layout="nn"), library).bind(wrong)


def test_what_the_launcher_refuses_is_raised_at_the_call(device: EmulatedDevice, library: Path) -> None:
    call = kernel_on(device, small(), library).bind(Operands(**matrices(device, m=40)))
    with pytest.raises(LaunchError) as caught:
        call()
    assert caught.value.code == INVALID_VALUE


def refuse_race(binders: object) -> NoReturn:
    """A race that must not be begun."""
    raise AssertionError("our kernel has nothing to choose")


def test_a_padded_problem_is_copied_inside_the_call(device: EmulatedDevice, library: Path) -> None:
    record = PATHS["pad"]
    kernel = kernel_on(device, record, library)
    kernel.prepare(record.problem.model_copy(update={"m": 64, "n": 64, "k": 256}), refuse_race)
    assert kernel.detail == ""
    kernel.prepare(record.problem, refuse_race)
    assert kernel.detail == "padded to 64_64_256, in the timing"
    matrices = Matrices(device.empty, record, record.problem)
    whole, copies = kernel.stages(matrices.operands)
    assert copies is not None
    for seed in (1, 2):  # the second call must not see what the first one left in the padding
        matrices.draw("normal", seed, F16.poisons[0])
        whole()
        assert matrices.findings(F16.poisons[0]) == []
        assert matrices.compare("normal").findings == []
    launches = len(device.session.launches)
    copies()
    assert len(device.session.launches) == launches, "copying operands launches no kernel"
    assert matrices.compare("normal").findings == [], "copying operands leaves D as it was"


def test_whole_tiles_are_not_copied(device: EmulatedDevice, library: Path) -> None:
    for record in (small(), PATHS["pad"]):
        _, copies = kernel_on(device, record, library).stages(Operands(**matrices(device)))
        assert copies is None


def test_a_workspace_is_of_the_size_that_the_launcher_says(device: EmulatedDevice, library: Path) -> None:
    shapes: list[tuple[int, ...]] = []

    def empty(*shape: int) -> Any:
        shapes.append(shape)
        return device.empty(*shape)

    record = small(split_k=2)
    directory = compiler.build([record])[0].directory
    kernel = gpu.KernelContender(record, directory, library, device.stream, device.runtime_library, empty)
    kernel.bind(Operands(**matrices(device)))
    assert shapes == [((256 + 4 * 2 * 32 * 32 * 4) // 2,)]


def test_the_stream_is_asked_at_every_call(device: EmulatedDevice, library: Path) -> None:
    calls: list[int] = []

    def stream() -> int:
        calls.append(1)
        return device.stream()

    call = device.open(small(), compiler.build([small()])[0], library, stream).bind(Operands(**matrices(device)))
    assert calls == []
    call()
    call()
    assert len(calls) == 2


def test_drawn_operands_are_aligned_and_the_same_b(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small().problem.model_copy(update={"m": 3, "n": 5, "k": 24})
    sets = draw(problem, 3, torch.Generator().manual_seed(1), "cpu")
    assert len(sets) == 3
    for operands in sets:
        assert (operands.a.shape, operands.b.shape, operands.b_nn.shape, operands.d.shape) == (
            (3, 24),
            (5, 24),
            (24, 5),
            (3, 5),
        )
        assert torch.equal(operands.b.T, operands.b_nn)
        assert bool(operands.d.isnan().all())
        pointers = [tensor.data_ptr() - sets[0].inputs[name].data_ptr() for name, tensor in operands.inputs.items()]
        pointers.append(operands.d.data_ptr() - sets[0].d.data_ptr())
        assert all(pointer % ALIGNMENT == 0 for pointer in pointers)
    assert not torch.equal(sets[0].a, sets[1].a)
    again = draw(problem, 3, torch.Generator().manual_seed(1), "cpu")
    assert torch.equal(again[2].b, sets[2].b)


# A kernel with a bias, a C and factors, and one for batches.
FUSED = small(fusion="alpha+bias_n+residual+silu", acc="f32")
BATCHED = small(batch="strided")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bias", lambda _: None, r"bias: fusion=alpha\+bias_n\+residual\+silu has one of fp16 \(64,\), got none"),
        ("bias", lambda it: it[:32], r"bias: .* has one of fp16 \(64,\), got torch.float16 \(32,\)"),
        ("bias", lambda it: it.float(), r"bias: .* has one of fp16 \(64,\), got torch.float32 \(64,\)"),
        ("bias", lambda it: torch.stack([it, it], 1)[:, 0], r"bias: expected contiguous rows, got strides \(2,\)"),
        ("c", lambda it: it[:, :32], r"C: .* has one of fp16 \(64, 64\), got torch.float16 \(64, 32\)"),
        ("c", lambda it: it.T, r"C: expected contiguous rows, got strides \(1, 64\)"),
        ("aux", lambda _: torch.zeros(64, 64), r"aux: fusion=.* has none, got \(64, 64\)"),
    ],
)
def test_parts_of_a_fusion_that_a_kernel_does_not_take(
    name: str, change: Any, message: str, device: EmulatedDevice, library: Path
) -> None:
    (operands,) = draw(FUSED.problem, 1, torch.Generator().manual_seed(1), "cpu")
    changed = dataclasses.replace(operands, **{name: change(getattr(operands, name))})
    with kernel_on(device, FUSED, library) as kernel, pytest.raises(ValueError, match=message):
        kernel.bind(changed)


def test_a_plain_kernel_has_no_bias_and_no_alpha(device: EmulatedDevice, library: Path) -> None:
    operands = Operands(**matrices(device))
    with kernel_on(device, small(), library) as kernel:
        with pytest.raises(ValueError, match=r"bias: fusion=none has none, got \(64,\)"):
            kernel.bind(dataclasses.replace(operands, bias=device.empty(64)))
        for name in ("alpha", "beta"):
            with pytest.raises(ValueError, match=f"{name}=2.0: fusion=none has none, so it must be 1"):
                kernel.bind(dataclasses.replace(operands, **{name: 2.0}))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "a",
            lambda it: it[0],
            r"A: expected matrices of fp16, \(products, rows, columns\), .* \(64, 256\)",
        ),
        ("a", lambda it: it[:2], r"A \(2, 64, 256\), B \(3, 64, 256\) as tn and D \(3, 64, 64\) do not fit"),
        ("d", lambda it: it[:1].expand(3, -1, -1), "D: 3 products would be stored in one matrix; it must not be exp"),
    ],
)
def test_batches_that_a_kernel_does_not_take(
    name: str, change: Any, message: str, device: EmulatedDevice, library: Path
) -> None:
    (operands,) = draw(BATCHED.problem, 1, torch.Generator().manual_seed(1), "cpu", products=3)
    changed = dataclasses.replace(operands, **{name: change(getattr(operands, name))})
    with kernel_on(device, BATCHED, library) as kernel, pytest.raises(ValueError, match=message):
        kernel.bind(changed)


# A kernel for groups.
GROUPED = small(batch="grouped", padding="predicate")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("b", lambda it: it[0], r"B: expected matrices of fp16, \(products, rows, columns\), with contiguous rows"),
        ("ends", lambda _: None, r"ends: expected torch.int32 \(3,\), contiguous, one for each B, got none"),
        ("ends", lambda it: it[:2], r"ends: expected torch.int32 \(3,\).* got torch.int32 \(2,\)"),
        ("ends", lambda it: it.long(), r"ends: expected torch.int32 \(3,\).* got torch.int64 \(3,\)"),
        ("d", lambda it: it[:32], r"A \(64, 256\), B \(3, 64, 256\) as tn and D \(32, 64\) do not fit"),
    ],
)
def test_groups_that_a_kernel_does_not_take(
    name: str, change: Any, message: str, device: EmulatedDevice, library: Path
) -> None:
    (operands,) = draw(GROUPED.problem, 1, torch.Generator().manual_seed(1), "cpu", products=3)
    assert operands.ends.tolist() == [21, 42, 64]
    changed = dataclasses.replace(operands, **{name: change(getattr(operands, name))})
    with kernel_on(device, GROUPED, library) as kernel, pytest.raises(ValueError, match=message):
        kernel.bind(changed)


def copy_to_device(device: EmulatedDevice, operands: Operands) -> Operands:
    """The same operands in the device's memory, misaligned where a kernel may copy them."""
    placed = {}
    for name, tensor in operands.__dict__.items():
        placed[name] = tensor
        if isinstance(tensor, torch.Tensor):
            wide = device.empty(*tensor.shape[:-1], tensor.shape[-1] + 3)
            placed[name] = wide[..., 1 : 1 + tensor.shape[-1]]
            placed[name].copy_(tensor)
    return Operands(**placed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "record",
    [FUSED, small(fusion="alpha+bias_m+residual+relu", padding="pad", m=61, n=59, k=250), BATCHED],
    ids=["fused", "fused padded", "batched"],
)
def test_operands_that_are_not_aligned_to_16_bytes_are_copied(
    record: Record, device: EmulatedDevice, library: Path
) -> None:
    products = 2 if record.batched else 1
    (operands,) = draw(record.problem, 1, torch.Generator().manual_seed(1), "cpu", products)
    placed = copy_to_device(device, operands)
    with kernel_on(device, record, library) as kernel:
        run, copies = kernel.stages(placed)
        run()
        device.wait()
    assert copies is not None
    product = placed.a.double() @ placed.b.double().transpose(-2, -1)
    if record.fusion:
        bias = placed.bias.double() if record.fusion.bias == "n" else placed.bias.double()[:, None]
        product = ALPHA * product + bias + BETA * placed.c.double()
        product = product.relu() if record.fusion.activation == "relu" else torch.nn.functional.silu(product)
    assert torch.allclose(placed.d.double(), product, atol=0.3, rtol=0.01)


# A program whose device never ends its work.
HANGING = """
import time
from types import SimpleNamespace
from cudal2gen.launch import gpu

gpu.HANG_S = 0.2
card = gpu.Gpu.__new__(gpu.Gpu)
card.device = None
stream = SimpleNamespace(synchronize=lambda: time.sleep(300))
card._torch = SimpleNamespace(cuda=SimpleNamespace(current_stream=lambda device: stream))
card.wait()
"""


@pytest.mark.slow
def test_a_hang_in_a_test_shows_its_traceback(tmp_path: Path) -> None:
    """The traceback is visible with capture of file descriptors and with that of ``sys.stderr``."""
    body = HANGING.replace("\n", "\n    ")
    (tmp_path / "test_hanging.py").write_text(f"import time\n\ndef test_hangs(capsys):\n    {body}\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "-p",
        "tests.cudal2gen.conftest",
        str(tmp_path / "test_hanging.py"),
    ]
    root = Path(__file__).parents[2]
    process = subprocess.run(command, cwd=root, check=False, capture_output=True, text=True, timeout=240)
    assert process.returncode == 1
    assert "Timeout" in process.stderr
    assert "in wait" in process.stderr
    assert "in test_hangs" in process.stderr


def test_a_kernel_that_hangs_ends_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", HANGING], check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "in wait" in done.stderr
