"""Compiles published CUDA-L2 kernels from a checkout to shared libraries, loads them, and calls them on tensors.

A library has the published host function of a kernel, unchanged, with its authors' grid, attributes and tensor maps.
``published_host/`` stands in for the headers of PyTorch that it includes; ``calls.cpp`` there redirects its launches to
the stream of a measurement. The CUDA runtime is not linked, so a library runs on a GPU and in the emulator.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from cudal2gen.kernel import Acc, ceil_div
from kernelproof.ground import files, toolchain
from kernelproof.ground.chips import GPUS
from kernelproof.ground.errors import Failure

if TYPE_CHECKING:
    import torch

HOST = Path(__file__).resolve().parent / "published_host"
# The folders of CUDA-L2, each by its GPU and accumulator; then how names of folders and of functions spell these.
SETS: tuple[tuple[str, Acc], ...] = (("a100", "f16"), ("a100", "f32"), ("h100", "f32"), ("3090", "f32"))
TYPES = {"f16": "F16F16F16F16", "f32": "F32F16F16F32"}
FUNCTION = "cuda_l2_{device}_{acc}"
SPELLED: dict[Acc, str] = {"f16": "fp16", "f32": "fp32"}
# The flags of the published build, without its warnings and libraries.
FLAGS = (
    "-std=c++17", "-O3", "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__", "--expt-relaxed-constexpr",
    "--expt-extended-lambda", "--use_fast_math",
)  # fmt: skip
# Libraries in one process must not share static variables and other symbols that C++ makes unique.
LINK = (
    "-w", "-shared", "-cudart", "none", "-Xcompiler", "-fPIC,-fno-gnu-unique,-fvisibility=hidden",
    "-Xlinker", "-Bsymbolic,--gc-sections,-s",
)  # fmt: skip

# m, n and k.
Sizes = tuple[int, int, int]


@dataclass(frozen=True)
class Source:
    """A published kernel: the GPU of its folder, its accumulator, and its problem."""

    device: str
    acc: Acc
    mnk: str

    @property
    def path(self) -> str:
        """The source's path in a checkout."""
        return f"kernels/{self.device}_{TYPES[self.acc]}/{self.mnk}.cu"

    @property
    def sizes(self) -> Sizes:
        """m, n and k."""
        m, n, k = map(int, self.mnk.split("_"))
        return m, n, k


@dataclass(frozen=True)
class Library:
    """A compiled kernel, as the file beside the library describes it.

    ``gpu``: the GPU that it was compiled for. ``padded``: the sizes that the published benchmark passes.
    ``reads_rows``: whether the host function reads B stored (k,n). ``identity``: a digest of everything that was
    compiled.
    """

    source: Source
    gpu: str
    commit: str
    arch: str
    versions: dict[str, str]
    padded: Sizes
    reads_rows: bool
    identity: str
    path: Path

    @property
    def title(self) -> str:
        """A description of the library, which is stored as the detail of a timing."""
        return f"{self.source.path} at {self.commit[:7]}, {self.arch}, nvcc {self.versions.get('nvcc', '?')}"


def tile(text: str) -> Sizes | None:
    """BM, BN and BK of a published source as its benchmark reads them: the last mention of each. None if one is
    missing."""
    sizes = dict(re.findall(r"^.*?\b(BM|BN|BK)\s*=\s*Int\s*<\s*(\d+)\s*>", text, re.MULTILINE))
    return (int(sizes["BM"]), int(sizes["BN"]), int(sizes["BK"])) if len(sizes) == 3 else None


def padded(text: str, sizes: Sizes) -> Sizes:
    """The sizes that the published benchmark passes to this source: whole tiles if the source names a tile."""
    steps = tile(text)
    if steps is None:
        return sizes
    m, n, k = (ceil_div(size, step) * step for size, step in zip(sizes, steps, strict=True))
    return m, n, k


def _wrapped_functions() -> list[str]:
    """The functions of the CUDA runtime that calls.cpp wraps to use its stream."""
    return re.findall(r"(?:^WRAPPED\(|\b__wrap_)(\w+)\b", (HOST / "calls.cpp").read_text(), re.MULTILINE)


def arch_of(gpu: str) -> str:
    """The architecture that the published build compiles for; from 9.0 on it is the GPU's own alone."""
    capability = GPUS[gpu].capability
    return f"{capability.sm}a" if capability.has_tma else capability.sm


def commit_of(checkout: Path) -> str:
    """The commit of a checkout; ``unknown`` if git does not say."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"


def build(checkout: Path, source: Source, gpu: str, folder: Path) -> Library:
    """Compiles a published kernel for a GPU into a folder, unless it is there. Raises Failure and ToolchainError."""
    tools, arch = toolchain.discover(), arch_of(gpu)
    try:
        text = (checkout / source.path).read_text()
    except OSError as error:
        raise Failure(f"{checkout / source.path}: {error.strerror}") from None
    number = arch.removeprefix("sm_")
    # Machine code for the card, so that nothing is translated there, and PTX for the emulator.
    target = ["-gencode", f"arch=compute_{number},code=[{arch},compute_{number}]"]
    wraps = [word for name in _wrapped_functions() for word in ("-Xlinker", f"--wrap={name}")]
    function = FUNCTION.format(device=source.device, acc=SPELLED[source.acc])
    options = [*FLAGS, *target, *LINK, *wraps, f"-DPUBLISHED_FUNCTION={function}"]
    host = {str(path.relative_to(HOST)): path.read_text() for path in sorted(HOST.rglob("*")) if path.is_file()}
    identity = hashlib.sha256(json.dumps([text, options, host, tools.versions]).encode()).hexdigest()[:32]
    name = f"{gpu}-{source.device}_{source.acc}-{source.mnk}"
    library = Library(
        source, gpu, commit_of(checkout), arch, dict(tools.versions), padded(text, source.sizes),
        re.search(r"\bb\s*\.\s*(?:\w+_)?data_ptr\b", text) is not None, identity, folder / f"{name}.so",
    )  # fmt: skip
    if any(built.identity == identity for built in libraries(folder) if built.path == library.path):
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as scratch:
        fresh = Path(scratch) / "kernel.so"
        includes = [f"-I{HOST}", f"-I{tools.cutlass_include}", f"-I{tools.cutlass_include.parent}/tools/util/include"]
        sources = [str(checkout / source.path), str(HOST / "calls.cpp")]
        command = [str(tools.nvcc), *options, *includes, "-o", str(fresh), *sources]
        process = subprocess.run(command, capture_output=True, text=True, env=toolchain.environment(), check=False)
        if process.returncode:
            lines = [line for line in process.stderr.splitlines() if "error" in line] or process.stderr.splitlines()
            raise Failure(f"{source.path} does not compile: {lines[0] if lines else 'nvcc failed'}")
        fresh.replace(library.path)
    described = asdict(library) | {"path": library.path.name}
    files.write(library.path.with_suffix(".json"), json.dumps(described, indent=1) + "\n")
    return library


def libraries(folder: Path) -> Iterator[Library]:
    """The libraries of a folder, in the order of their names."""
    for described in sorted(folder.glob("*.json")):
        row = json.loads(described.read_text())
        path = folder / row["path"]
        if path.is_file():
            row |= {"source": Source(**row["source"]), "padded": tuple(row["padded"]), "path": path}
            yield Library(**row)


class Loaded:
    """A library in this process. ``runtime``: the CUDA runtime that it calls.

    Published functions take B both stored (k,n), here ``b_rows``, and stored (n,k), here ``b``. All tensors are
    contiguous. Raises Failure if the library cannot be loaded.
    """

    def __init__(self, library: Library, runtime: Path) -> None:
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)  # the library's undefined symbols are found in it
        try:
            self._functions = ctypes.CDLL(str(library.path))
        except OSError as error:
            raise Failure(f"{library.path.name} cannot be loaded: {error}") from None
        arguments = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3 + [ctypes.c_void_p]
        for name in ("published_call", "published_capture"):
            getattr(self._functions, name).argtypes = arguments
            getattr(self._functions, name).restype = ctypes.c_char_p

    def call(
        self, a: torch.Tensor, b_rows: torch.Tensor, b: torch.Tensor, d: torch.Tensor, stream: Callable[[], int]
    ) -> Callable[[], str]:
        """A call that enqueues the product on the stream. It returns the error's text, empty if nothing failed."""
        function, words = self._functions.published_call, _call_arguments(a, b_rows, b, d)

        def run() -> str:
            fault: bytes | None = function(*words, stream())
            return fault.decode(errors="replace") if fault else ""

        return run

    def refusal(
        self, a: torch.Tensor, b_rows: torch.Tensor, b: torch.Tensor, d: torch.Tensor, stream: Callable[[], int]
    ) -> str:
        """Why a CUDA graph cannot hold the product; empty if it can."""
        fault: bytes | None = self._functions.published_capture(*_call_arguments(a, b_rows, b, d), stream())
        if fault:
            return fault.decode(errors="replace")
        if elsewhere := self._functions.published_elsewhere():
            return f"{elsewhere} of its calls use several streams, or attributes of one"
        return ""


def _call_arguments(a: torch.Tensor, b_rows: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> tuple[int, ...]:
    """The arguments of ``published_call`` but for the stream: contiguous A (m,k), B (k,n), B (n,k) and D (m,n)."""
    (m, k), n = a.shape, b.shape[0]
    return a.data_ptr(), b_rows.data_ptr(), b.data_ptr(), d.data_ptr(), m, n, k
