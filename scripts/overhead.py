"""The host's cost of a call of cudal2gen.matmul, without a GPU: an idle stand-in replaces CUDA.

    python -m scripts.overhead

A lower bound: on a GPU the driver's launch adds to it, here and in torch's own call. torch's figures are of 8 x 8
products on the CPU, with computation and allocation; tests/test_operators_on_gpu.py compares the two on a GPU.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

import cudal2gen
from cudal2gen import choice, compiler, pack, toolchain
from cudal2gen.operators import emulated
from cudal2gen.results import Measurements
from tests import idle_runtime
from tests.paths import small

CALLS, ROUNDS = 200, 400  # short rounds: some are undisturbed


class IdleDevice:
    """A device of CPU tensors on which nothing runs."""

    name, model, alone = "a stand-in", "a100", True

    def __init__(self, folder: Path) -> None:
        self.runtime_library = idle_runtime.build(folder)

    def stream(self) -> int:
        return 0

    def empty(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        return like.new_empty(shape)

    def capturing(self) -> bool:
        return False

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()


def open_package(folder: Path) -> pack.Pack:
    """A pack of one kernel for each layout."""
    records = [small(acc="f32", padding="predicate", layout=layout, k=128) for layout in ("tn", "nn")]
    built = dict(zip((record.name for record in records), compiler.build(records), strict=True))
    table = choice.tabulate("a100", records, Measurements({}, []), lambda record: built[record.name].digest)
    artifacts = {artifact.digest: artifact for artifact in built.values()}
    files = pack.contents(table, artifacts, compiler.launcher(), toolchain.discover().nvcc_version)
    return pack.open_pack(pack.write_folder(files, folder / "pack"))


def call_us(call: Callable[[], Any]) -> float:
    """The fastest of several rounds, per call."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return min(times)


def main() -> None:
    """Prints microseconds per call."""
    torch.set_num_threads(1)
    a, b, weight = (torch.randn(8, 8).half() for _ in range(3))
    bias, out, strided = torch.randn(8).half(), torch.empty(8, 8).half(), torch.randn(8, 9).half()[:, :8]
    folder = Path(tempfile.mkdtemp())
    vendor_calls = {
        "torch.mm": lambda: torch.mm(a, b),
        "torch.mm(out=)": lambda: torch.mm(a, b, out=out),
        "torch's new_empty, part of each": lambda: a.new_empty((8, 8)),
    }
    calls = {
        "cudal2gen.matmul": lambda: cudal2gen.matmul(a, b),
        "cudal2gen.matmul(out=)": lambda: cudal2gen.matmul(a, b, out=out),
        "the same through torch's dispatcher": lambda: torch.ops.cudal2gen.matmul.default(a, b),
        "cudal2gen.linear": lambda: cudal2gen.linear(a, weight),
        "cudal2gen.linear with a bias": lambda: cudal2gen.linear(a, weight, bias),
        "cudal2gen.matmul, one operand copied": lambda: cudal2gen.matmul(strided, b),
    }
    with torch.no_grad(), emulated(IdleDevice(folder), [open_package(folder)], prefer="kernel") as dispatcher:
        for name, call in (vendor_calls | calls).items():
            print(f"{name:38} {call_us(call):6.2f} us")
        assert dispatcher.stats()["torch"] == {}


if __name__ == "__main__":
    main()
