"""Runs built kernels on GPUs: a device, its facts and its state, and kernels bound to torch tensors.

``MeasuringDevice`` is the interface that validation and benchmarks need; ``Gpu`` implements it. Times are in
microseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from cudal2gen import places, torch_range
from cudal2gen.kernel import Problem, Record, ceil_div, serving
from cudal2gen.kernel.launch import Batches, Groups, LaunchOperands, Sizes
from cudal2gen.launch.launcher import Fused, LaunchError, OpenKernel
from cudal2gen.launch.operands import Empty, Operands, check, draw, launch_tensors, matrices
from cudal2gen.results import EXCEEDED, Environment
from kernelproof.ground import toolchain
from kernelproof.ground.chips import GPUS, CardFacts, runs
from kernelproof.ground.element import F16
from kernelproof.ground.errors import MissingTool, installation

if TYPE_CHECKING:
    import torch

Call = Callable[[], Any]  # returns D only for torch's grouped product, which cannot write into a given D
Stream = Callable[[], int]  # returns the handle of the stream on which to launch
Binder = Callable[[Operands], Call]  # the method ``bind`` of a contender, or of one of its algorithms


@dataclass(frozen=True)
class Winner:
    """The fastest candidate of a race. ``timed``: how many candidates could be timed."""

    index: int
    median_us: float
    timed: int


Race = Callable[[Sequence[Binder]], Winner]  # times candidates and returns the fastest

RESERVED_BYTES = 2 << 30  # device memory that is left free for libraries
STAND_IN = "CUDAL2GEN_GPU"  # the variable that names a class to use in place of ``Gpu``; see ``connect``
HANG_S = 60  # seconds after which a kernel counts as hung; kernels take a fraction of one
NO_DEVICE = "torch sees no CUDA device; without one, the emulator runs kernels: validate, run"
TRACEBACK_FD = 2  # the file descriptor for the traceback of a hang: sys.stderr may be replaced, as pytest does
# CU_DEVICE_ATTRIBUTE_ of cuda.h: compute capability, SMs, shared memory that a CTA may opt into.
CARD_ATTRIBUTES = (75, 76, 16, 97)
HOLD_CYCLES = 40_000_000  # about 20 ms at any clock of a GPU


class GpuError(MissingTool):
    """No usable GPU, or not the one that is needed; the message says what to do."""


@dataclass(frozen=True)
class CardReading:
    """The state of the card at one moment, from NVML; 0 for values that NVML does not report."""

    sm_mhz: int
    memory_mhz: int
    power_w: float
    temperature_c: int
    throttle: frozenset[str]


class Contender(Protocol):
    """Something that computes D = A B, fused or batched if the problem is: our kernel, or a baseline."""

    @property
    def name(self) -> str:
        """The name under which measurements are stored."""
        ...

    def prepare(self, problem: Problem, race: Race) -> None:
        """Does what is needed once per problem and not timed, such as choosing an algorithm. Raises Absent."""
        ...

    def bind(self, operands: Operands) -> Call:
        """A call that enqueues one product, or one batch, on the device's current stream. Raises Absent if it
        cannot."""
        ...

    @property
    def detail(self) -> str:
        """The library, algorithm or kernel that computes the problem that was prepared last, as text."""
        ...


@runtime_checkable
class PaddingContender(Protocol):
    """A contender that may compute on padded copies of the operands."""

    def stages(self, operands: Operands) -> tuple[Call, Call | None]:
        """The complete call, and the part of it that copies to and from padded matrices, or None."""
        ...


class Absent(Exception):
    """A contender cannot compute this problem here; the message says why."""


class MeasuringDevice(Protocol):
    """The interface of a GPU that measurements need. Work is enqueued on one stream, in order."""

    @property
    def environment(self) -> Environment:
        """The facts of device, driver and libraries that a measurement is stored with."""
        ...

    def stream(self) -> int:
        """The handle of the stream on which calls must enqueue their work."""
        ...

    def empty(self, *shape: int) -> torch.Tensor:
        """Memory of this shape for 16-bit elements, with undefined content."""
        ...

    def operands(self, problem: Problem, count: int, seed: int, products: int = 1) -> list[Operands]:
        """Sets of random normal matrices, each at its own address, for a batch of this many products."""
        ...

    def capture(self, calls: Sequence[Call]) -> Call:
        """One call that enqueues all these calls without their work on the host: a CUDA graph."""
        ...

    def elapsed_us(self, run: Call, before: Call) -> float:
        """The device time of ``run``, which is enqueued after ``before`` so that the device does not wait for the
        host."""
        ...

    def evict(self) -> None:
        """Enqueues a read of three times the L2's size, which evicts everything else from the L2."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has done all its work."""
        ...

    def now(self) -> float:
        """The host's clock in seconds."""
        ...

    def sleep(self, seconds: float) -> None:
        """Lets the host wait."""
        ...

    def reading(self) -> CardReading:
        """The present clocks, power and temperature of the card."""
        ...


def runtime(cuda: int = torch_range.CUDA) -> Path:
    """The CUDA runtime library for kernels of this CUDA's major version: the one that torch has loaded, or one of a
    PyPI package or of the system's folder.

    Raises GpuError. LD_LIBRARY_PATH is not searched.
    """
    names = torch_range.runtimes(cuda)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            mapped = Path(line.split(maxsplit=5)[-1])
            if mapped.name.startswith(tuple(names)):
                return mapped
    folders = [Path(entry) / "nvidia" / inside for entry in sys.path for inside in ("cu13/lib", "cuda_runtime/lib")]
    folders += [Path("/usr/local/cuda/lib64"), Path("/usr/local/cuda/targets/x86_64-linux/lib")]
    for candidate in (folder / name for name in names for folder in folders):
        if candidate.is_file():
            return candidate
    torch = sys.modules.get("torch")
    other = torch_range.remark_on_cuda(torch.version.cuda or "") if torch is not None else ""
    raise GpuError(
        f"{' or '.join(names)} not found; "
        f"{other or 'install it: pip install nvidia-cuda-runtime==13.0.*, or a torch for CUDA 13'}"
    )


def runtime_of_built() -> Path:
    """``runtime`` for kernels that this machine's tools assemble. Raises GpuError."""
    try:
        return runtime(torch_range.major(toolchain.discover().cuda))
    except toolchain.ToolchainError:  # without a compiler, kernels are from elsewhere
        return runtime()


@contextlib.contextmanager
def reserved_device(index: int) -> Iterator[None]:
    """Reserves a device for the measurements of this process. Raises GpuError if another process has reserved it."""
    path = places.user_cache() / f"device-{index}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GpuError(f"another process measures on device {index}; two at once would slow each other") from None
        yield


class KernelContender:
    """A built kernel on one device; a ``Contender``.

    ``stream`` is called at every launch and returns the stream to use. ``runtime_library`` is the CUDA runtime, or the
    emulator's. ``empty`` allocates 16-bit memory of a shape, for workspaces and padded matrices; by default torch does.
    Raises LaunchError if the runtime refuses.
    """

    name = "cudal2gen"

    def __init__(
        self,
        record: Record,
        directory: Path,
        library: Path,
        stream: Stream,
        runtime_library: Path | None = None,
        empty: Empty | None = None,
    ) -> None:
        self.record = record
        self.digest = directory.name
        self.detail = ""
        self._stream = stream
        self._empty = empty
        self._kernel = OpenKernel(library, directory, record.launch_options, runtime_library or runtime())

    def prepare(self, problem: Problem, race: Race) -> None:  # noqa: ARG002
        """Writes the padding into ``detail``. There is nothing to choose: the record was tuned before."""
        operands = LaunchOperands.packed(problem.layout, serving.sizes_of(problem), problem.fusion)
        use = serving.own_use(self.record, serving.sizes_of(problem), operands)
        padding = f"padded to {use.launched.text}" if use.launched.text != problem.mnk else f"copies of {use.matrices}"
        self.detail = f"{padding}, in the timing" if any(use.copied) else ""

    def bind(self, operands: Operands) -> Call:
        """A call that computes one product, or one batch, of these tensors. Raises ValueError if the kernel cannot."""
        run, _ = self.stages(operands)
        return run

    def stages(self, operands: Operands) -> tuple[Call, Call | None]:
        """The complete call, and the part of it that copies to and from padded matrices, or None. Raises ValueError
        like ``bind``."""
        record = self.record
        problem = check(record, operands)
        use = serving.own_use(record, serving.sizes_of(problem), matrices(operands, record.layout))
        tensors = launch_tensors(record, operands, use, self._empty)
        run = self._bound(tensors.operands, use.launched)
        if not tensors.copies:
            return run, None

        def run_with_copies() -> None:
            for target, source in tensors.before:
                target.copy_(source)
            run()
            for target, source in tensors.after:
                target.copy_(source)

        def copies() -> None:
            for target, source in tensors.copies:
                target.copy_(source)

        return run_with_copies, copies

    def _bound(self, operands: Operands, sizes: Sizes) -> Call:
        """A call that launches on operands that need no copies."""
        record, d = self.record, operands.d
        a, b = operands.stored_a(record.layout), operands.stored_b(record.layout)
        products = 1 if record.grouped else operands.products
        size = ceil_div(self._kernel.workspace_bytes(*sizes, products), F16.bytes)
        workspace = a.new_empty(size, dtype=F16.torch_dtype) if self._empty is None else self._empty(size)
        scratch = workspace.data_ptr() if size else 0
        pointers = (a.data_ptr(), a.stride(-2), b.data_ptr(), b.stride(-2), d.data_ptr(), d.stride(-2))
        fused = _fused(operands) if record.fusion else None
        launch: Callable[[int], int | None]
        if record.grouped:
            groups = _groups(operands)
            launch = partial(self._kernel.launch, *pointers, *sizes, scratch, fused=fused, groups=groups)
        elif record.batched and fused is not None:
            batches = _batches(operands)
            launch = partial(self._kernel.launch, *pointers, *sizes, scratch, fused=fused, batches=batches)
        elif record.batched:
            sized = self._kernel.sized(a.stride(-2), b.stride(-2), d.stride(-2), *sizes, _batches(operands))
            launch = partial(sized, a.data_ptr(), b.data_ptr(), d.data_ptr(), scratch)
        else:
            launch = self._kernel.bound(*pointers, *sizes, scratch, fused)
        stream, check_code = self._stream, self._kernel.check

        # The default value keeps the tensors alive as long as the call, which holds only their addresses.
        def call(_keep: Any = (operands, workspace)) -> None:
            if code := launch(stream()):
                check_code(code)

        return call

    def close(self) -> None:
        """Unloads the kernel. Its calls must not be used afterwards."""
        self._kernel.close()

    def __enter__(self) -> KernelContender:
        return self

    def __exit__(self, kind: object, value: BaseException | None, trace: object) -> None:
        # On a stopped device unloading fails too; the error that stopped it is the one to report.
        with contextlib.suppress(LaunchError) if value else contextlib.nullcontext():
            self.close()


def _fused(operands: Operands) -> Fused:
    """The addresses of a fused kernel's operands besides A, B and D."""
    bias, c, aux = operands.bias, operands.c, operands.aux
    return Fused(
        0 if bias is None else bias.data_ptr(),
        *((0, 0) if c is None else (c.data_ptr(), c.stride(-2))),
        operands.alpha,
        operands.beta,
        *((0, 0) if aux is None else (aux.data_ptr(), aux.stride(-2))),
    )


def _spacing(tensor: torch.Tensor | None, dimensions: int) -> int:
    """Elements from one product's part of a tensor to the next one's; 0 if products share the tensor.

    A tensor with one part for each product has this many ``dimensions``.
    """
    return tensor.stride(0) if tensor is not None and tensor.ndim == dimensions else 0


def _batches(operands: Operands) -> Batches:
    """The number of products of a strided batch, and the spacing of each operand."""
    if operands.products == 1:  # for a single product torch may report any stride
        return Batches()
    a, b, d, c, aux = (_spacing(tensor, 3) for tensor in (operands.a, operands.b, operands.d, operands.c, operands.aux))
    return Batches(operands.products, a, b, d, _spacing(operands.bias, 2), c, aux)


def _groups(operands: Operands) -> Groups:
    """The groups of rows, and the spacing of their B and of their bias along n."""
    assert operands.ends is not None
    return Groups(operands.ends.data_ptr(), operands.products, _spacing(operands.b, 3), _spacing(operands.bias, 2))


def card_facts(properties: Any) -> CardFacts:
    """The facts in torch's properties of a device. Older versions do not report its shared memory."""
    smem = int(getattr(properties, "shared_memory_per_block_optin", 0))
    return CardFacts.of(
        str(properties.name), (properties.major, properties.minor), properties.multi_processor_count, smem
    )


class Card:
    """A CUDA device as torch and NVML describe it. Raises GpuError if there is none."""

    def __init__(self, index: int = 0) -> None:
        try:
            import torch
        except ImportError:
            raise GpuError(f"torch is missing, which runs kernels on a GPU: {installation('gpu')}") from None
        if not torch.cuda.is_available():
            raise GpuError(NO_DEVICE)
        if index >= torch.cuda.device_count():
            raise GpuError(f"--gpu NAME:{index}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")
        self._torch = torch
        self.device = torch.device("cuda", index)
        self._properties = torch.cuda.get_device_properties(self.device)

    @property
    def name(self) -> str:
        """The device's own name."""
        return str(self._properties.name)

    @property
    def model(self) -> str:
        """The model in ``GPUS``, or the device's own name."""
        return self.facts.model or self.name

    @property
    def runtime_library(self) -> Path:
        """The CUDA runtime for kernels that this machine builds. Raises GpuError."""
        return runtime_of_built()

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability: (major, minor)."""
        return (self._properties.major, self._properties.minor)

    @property
    def facts(self) -> CardFacts:
        """The facts that decide which kernels run here."""
        return card_facts(self._properties)

    @property
    def record_model(self) -> str:
        """The model whose records serve here: the card's own, or the nearest one. Raises GpuError if there is none."""
        if models := self.facts.stand_ins(GPUS):
            return models[0]
        raise GpuError(
            f"{self.facts.text}: no GPU of the catalog is of its architecture, so no record is compiled for it"
        )

    def check(self, record: Record) -> None:
        """Raises GpuError for a record whose code does not run here."""
        if not runs(record.arch, self.capability):
            models = self.facts.stand_ins(GPUS)
            raise GpuError(
                f"{record.gpu} {record.family} is for {record.arch}; this is {self.facts.text}: "
                + (f"choose --gpu {models[0]}" if models else "the catalog has no GPU of its architecture")
            )

    @cached_property
    def environment(self) -> Environment:
        """The facts of device, driver and libraries; its ``id`` is their digest. Raises GpuError without NVML."""
        torch, device = self._torch, self._properties
        nvml, handle = self._nvml
        ecc: bool | None = None
        with contextlib.suppress(nvml.NVMLError):
            ecc = bool(nvml.nvmlDeviceGetEccMode(handle)[0])
        versions = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda or ""}
        for package in ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cuda-runtime", "nvmath-python", "triton"):
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[package] = metadata.version(package)
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            output = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
            versions["nvcc"] = (re.findall(r"V([\d.]+)", output) or [""])[0]
        facts: dict[str, Any] = {
            "gpu": self.facts.model or "",
            "name": device.name,
            "capability": f"{device.major}.{device.minor}",
            "sms": device.multi_processor_count,
            "l2_bytes": device.L2_cache_size,
            "memory_bytes": device.total_memory,
            "max_sm_mhz": self._ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
            "max_memory_mhz": self._ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_MEM),
            "memory_bus_bits": self._ask(nvml.nvmlDeviceGetMemoryBusWidth),
            "power_limit_w": self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit) / 1000,
            "ecc": ecc,
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "versions": versions,
        }
        return Environment(id=sha256(repr(sorted(facts.items())).encode()).hexdigest()[:16], **facts)

    @cached_property
    def _nvml(self) -> tuple[Any, Any]:
        """NVML, and this device in it, found by its UUID: NVML ignores CUDA_VISIBLE_DEVICES. Raises GpuError."""
        try:
            import pynvml
        except ImportError:
            message = f"nvidia-ml-py is missing, which reads the GPU's clocks: {installation('gpu')}"
            raise GpuError(message) from None
        try:
            pynvml.nvmlInit()
            return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{self._properties.uuid}".encode())
        except pynvml.NVMLError as error:
            raise GpuError(f"NVML does not tell of {self._properties.name}: {error}") from None

    @cached_property
    def _reasons(self) -> dict[str, int]:
        """The bits of the reasons that lower the clocks, by name, except idleness."""
        nvml, _ = self._nvml
        prefix = "nvmlClocksEventReason"
        bits = {name.removeprefix(prefix): getattr(nvml, name) for name in dir(nvml) if name.startswith(prefix)}
        return {name: bit for name, bit in bits.items() if name not in ("All", "None", "GpuIdle")}

    def _ask(self, function: Callable[..., int], *arguments: int) -> int:
        """NVML's answer for this device; 0 if this card or this host does not support the question."""
        nvml, handle = self._nvml
        try:
            return function(handle, *arguments)
        except nvml.NVMLError:
            return 0

    def reading(self) -> CardReading:
        """The present clocks, power and temperature of the card."""
        nvml, _ = self._nvml
        mask = self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons)
        return CardReading(
            sm_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            memory_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            power_w=self._ask(nvml.nvmlDeviceGetPowerUsage) / 1000,
            temperature_c=self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            throttle=frozenset(name for name, bit in self._reasons.items() if bit & mask),
        )


class Gpu(Card):
    """A device for measurements. It becomes the process's current device, with a new stream."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        import torch

        torch.cuda.set_device(self.device)
        self._own_stream = torch.cuda.Stream(self.device)
        torch.cuda.set_stream(self._own_stream)
        self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Reference products must be fp32 throughout (no tf32).
        torch.backends.cuda.matmul.allow_tf32 = False

    def stream(self) -> int:
        # This is called for every launch, and torch.cuda.current_stream is too slow because it creates an object.
        return int(self._torch._C._cuda_getCurrentRawStream(self.device.index))

    def empty(self, *shape: int) -> torch.Tensor:
        """Memory of this shape for 16-bit elements, filled with NaN, so that stale results cannot pass."""
        return self._torch.full(shape, float("nan"), dtype=F16.torch_dtype, device=self.device)

    def hold(self) -> None:
        """Enqueues some milliseconds of idling, so that the host can enqueue further work before the device starts
        it."""
        self._torch.cuda._sleep(HOLD_CYCLES)

    def wait(self) -> None:
        """Waits for this stream only. Raises RuntimeError for an error of the device.

        A kernel that hangs ends the process, with a traceback: no further call to its device returns, not even one that
        would unload the kernel.
        """
        faulthandler.dump_traceback_later(HANG_S, exit=True, file=TRACEBACK_FD)
        try:
            self._torch.cuda.current_stream(self.device).synchronize()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def operands(self, problem: Problem, count: int, seed: int, products: int = 1) -> list[Operands]:
        """Sets of random normal matrices. Raises GpuError if the device has too little free memory."""
        free, _ = self._torch.cuda.mem_get_info(self.device)
        second_b = products * problem.n * problem.k  # the other form of B
        row = problem.d_cols * (1 + problem.fusion.residual) + problem.n * problem.fusion.aux  # of D, C and aux
        outputs = problem.m * row * (1 if problem.grouped else products)
        needed = count * (
            problem.element.bytes * (problem.elements_of(products) + second_b) + problem.output.bytes * outputs
        )
        if needed > free + self._torch.cuda.memory_reserved(self.device) - RESERVED_BYTES:
            raise GpuError(f"{problem.mnk}: {count} sets of operands need {needed >> 20} MiB, {free >> 20} are free")
        generator = self._torch.Generator(self.device).manual_seed(seed)
        return draw(problem, count, generator, self.device, products)

    def capture(self, calls: Sequence[Call]) -> Call:
        """One call that replays the work of these calls, as a CUDA graph."""
        graph = self._torch.cuda.CUDAGraph()
        self._torch.cuda.synchronize(self.device)
        graph.capture_begin()
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
        replay: Call = graph.replay
        return replay

    def elapsed_us(self, run: Call, before: Call) -> float:
        """The microseconds between two events around ``run``, after ``before`` was enqueued."""
        before()
        self._start.record()
        run()
        self._stop.record()
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) * 1000

    def evict(self) -> None:
        evict(self.device)

    def synchronize(self) -> None:
        self._torch.cuda.synchronize(self.device)

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def evict(device: torch.device) -> None:
    """Enqueues a read of ``EXCEEDED`` times the L2's size on the current stream, which evicts everything else from the
    L2. The memory that is read is not initialised; torch gets it back."""
    import torch

    count = EXCEEDED * torch.cuda.get_device_properties(device).L2_cache_size // F16.bytes
    torch.empty(count, dtype=F16.torch_dtype, device=device).amax()


def _driver() -> ctypes.CDLL | None:
    """The library of NVIDIA's driver, or None."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def has_driver() -> bool:
    """Whether the library of NVIDIA's driver is installed."""
    return _driver() is not None


def cards() -> list[CardFacts]:
    """The CUDA devices as the driver describes them, without torch; none if there is no driver or it fails."""
    driver, count = _driver(), ctypes.c_int()
    if driver is None or driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []

    def attribute(number: int, device: int) -> int:
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    devices = []
    for device in range(count.value):
        name = ctypes.create_string_buffer(256)
        driver.cuDeviceGetName(name, len(name), device)
        major, minor, sms, smem = (attribute(number, device) for number in CARD_ATTRIBUTES)
        devices.append(CardFacts.of(name.value.decode(errors="replace"), (major, minor), sms, smem))
    return devices


def driver_cuda() -> int:
    """The newest CUDA that the driver supports, 13000 for 13.0; 0 without a driver."""
    driver, version = _driver(), ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)):
        return 0
    return version.value


def connect(index: int = 0) -> Gpu:
    """The CUDA device with this number. Raises GpuError.

    ``CUDAL2GEN_GPU`` may name a stand-in as ``module:class``: a subclass of ``Gpu`` for rehearsals without a device.
    """
    if not (stand_in := os.environ.get(STAND_IN)):
        if find_spec("torch") and not has_driver():  # torch takes seconds to say so
            raise GpuError(NO_DEVICE)
        return Gpu(index)
    module, _, name = stand_in.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise GpuError(f"{STAND_IN}={stand_in}: {error}; it takes module:class, or is not set") from None
    if not (isinstance(kind, type) and issubclass(kind, Gpu)):
        raise GpuError(f"{STAND_IN}={stand_in}: is no cudal2gen.launch.gpu.Gpu")
    return kind(index)
