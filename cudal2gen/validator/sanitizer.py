"""Runs compute-sanitizer, memcheck and racecheck, on one launch of a built kernel in a separate process.

``python -m cudal2gen.validator.sanitizer`` is that process. It takes a ``SingleLaunch`` as JSON, allocates exactly what
the problem needs through the CUDA runtime, and launches once. It does not use torch, because the tool would also check
torch's kernels.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from cudal2gen.kernel import Record
from cudal2gen.launch.launcher import LaunchError, OpenKernel
from cudal2gen.validator.problems import Shape, strides
from kernelproof.ground import process_tree
from kernelproof.ground.element import ELEMENTS, ElementName, OutputName, stored

TOOLS = ("memcheck", "racecheck")
# Lines that the process prints before the launch, and after the kernel has run.
STARTED, DONE = "launching", "launched once"
REFUSED = "not supported"  # how the tool reports a device that it does not support
CLEAN = "0 errors"
NOT_RUN = "not run: "
NO_LAUNCH = "the tool reports no launch"
TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind
SUMMARY = re.compile(
    r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warn"
)
BANNER = re.compile(r"COMPUTE-SANITIZER|SUMMARY")


@dataclass(frozen=True)
class SingleLaunch:
    """A built kernel and a problem.

    ``element``: the type of A and B; ``output``: that of D. ``rows_a``, ``rows_b``: rows of A and B in memory. ``lda``,
    ``ldb`` and ``ldd`` count elements. ``missing_d``: bytes by which D's allocation is too small, to test that a tool
    notices.
    """

    library: str
    directory: str
    runtime: str
    options: dict[str, int]
    m: int
    n: int
    k: int
    rows_a: int
    rows_b: int
    lda: int
    ldb: int
    ldd: int
    element: ElementName
    output: OutputName = "same"
    missing_d: int = 0


def launch_of(record: Record, shape: Shape, directory: Path, library: Path, runtime: Path) -> SingleLaunch:
    """A launch of a record's kernel with matrices that are as packed as it allows."""
    sizes = shape.launched(record)
    (m, n, k), leading = sizes, strides(record, sizes, packed=True)
    rows = (m if record.along_k.a else k, n if record.along_k.b else k)
    types = (record.ab, record.d)
    return SingleLaunch(
        str(library), str(directory), str(runtime), record.launch_options, *sizes, *rows, *leading, *types
    )


def program() -> Path | None:
    """The path of compute-sanitizer, or None if it is not installed."""
    path = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    return Path(path) if os.access(path, os.X_OK) else None


def check(
    launch: SingleLaunch, tool: str, device: int = 0, timeout_s: float = 120, sanitizer: Path | None = None
) -> tuple[str, list[str]]:
    """A tool's answer (``0 errors``, ``3 errors``, or ``not run:`` and the reason), and the errors that it reports."""
    sanitizer = sanitizer or program()
    if sanitizer is None:
        return NOT_RUN + "compute-sanitizer is not installed", []
    command = [str(sanitizer), "--tool", tool, "--target-processes", "application-only", "--print-limit", "5"]
    command += [sys.executable, "-m", "cudal2gen.validator.sanitizer", json.dumps(asdict(launch))]
    root = str(Path(__file__).parents[2])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "CUDAL2GEN_DEVICE": str(device),
    }
    try:
        code, text = process_tree.output(command, environment, timeout_s)
    except subprocess.TimeoutExpired:
        return NOT_RUN + f"took more than {timeout_s:g} s", []
    if code == process_tree.NOT_STARTED:
        return NOT_RUN + text.strip().removeprefix("error: "), []
    return answer(text)


def answer(output: str) -> tuple[str, list[str]]:
    """The result of ``check``, read from the tool's output. Errors count only if the tool printed a summary and the
    launch began; their absence counts only if the kernel has also run to its end."""
    lines = [line.strip() for line in output.splitlines()]
    summaries = [match for match in map(SUMMARY.search, lines) if match]
    counts = [sum(int(count) for count in match.groups() if count) for match in summaries]
    marked = [line.lstrip("= ") for line in lines if line.startswith("=========") and not BANNER.search(line)]
    reports = [line for line in marked if line]
    refused = [line for line in reports if REFUSED in line]
    if counts and counts[-1] and STARTED in lines and not refused:
        first = reports[0] if reports else "the tool does not name it"
        return f"{counts[-1]} errors", [f"{counts[-1]} errors, first: {first}"]
    if counts and not counts[-1] and DONE in lines:
        return CLEAN, []
    errors = [line for line in lines if line.startswith("error: ")]
    return NOT_RUN + next(iter([*refused, *errors, *reports, NO_LAUNCH])), []


def run(launch: SingleLaunch, device: int = 0) -> None:
    """Launches the kernel once, with A and B full of ones, and waits. Raises LaunchError, also for a wrong product."""
    cuda = ctypes.CDLL(launch.runtime)
    cuda.cudaGetErrorString.restype = ctypes.c_char_p

    def runtime(name: str, *arguments: object) -> None:
        if code := getattr(cuda, name)(*arguments):
            raise LaunchError(code, f"{name}: {cuda.cudaGetErrorString(code).decode()}")

    def allocate(size: int, content: bytes = b"") -> ctypes.c_void_p:
        pointer = ctypes.c_void_p()
        runtime("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(size))
        if content:
            runtime("cudaMemcpy", pointer, content, ctypes.c_size_t(len(content)), TO_DEVICE)
        return pointer

    m, n, k = launch.m, launch.n, launch.k
    element, output = ELEMENTS[launch.element], stored(launch.element, launch.output)
    runtime("cudaSetDevice", device)
    with OpenKernel(Path(launch.library), Path(launch.directory), launch.options, Path(launch.runtime)) as kernel:
        one = element.spell(1)  # its bytes
        a, b = (
            allocate(len(one) * size, one * size) for size in (launch.rows_a * launch.lda, launch.rows_b * launch.ldb)
        )
        d = allocate(output.bytes * m * launch.ldd - launch.missing_d)
        size = kernel.workspace_bytes(m, n, k)
        workspace = allocate(size).value if size else 0
        print(STARTED, flush=True)
        pointers = (a.value or 0, launch.lda, b.value or 0, launch.ldb, d.value or 0, launch.ldd)
        kernel.launch(*pointers, m, n, k, workspace or 0)
        runtime("cudaDeviceSynchronize")
        corner = ctypes.create_string_buffer(output.bytes)
        runtime("cudaMemcpy", corner, d, ctypes.c_size_t(output.bytes), TO_HOST)
        if k <= output.exact and corner.raw != output.spell(k):
            raise LaunchError(0, f"the first element of D is not {k}")


def main(arguments: list[str]) -> None:
    """The process that the tool checks."""
    try:
        run(SingleLaunch(**json.loads(arguments[0])), int(os.environ.get("CUDAL2GEN_DEVICE", "0")))
    except LaunchError as error:
        sys.exit(f"error: {error}")
    print(DONE)


if __name__ == "__main__":
    main(sys.argv[1:])
