"""The host's cost of a call of cudal2gen.matmul, without a GPU: an idle stand-in replaces CUDA.

    python -m scripts.overhead

A lower bound: on a GPU the driver's launch adds to it, here and in torch's own call. torch's figures are of 8 x 8
products on the CPU, with computation and allocation; tests/test_operators_on_gpu.py compares the two on a GPU.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import cudal2gen
from cudal2gen.operators import emulated
from tests.idle_device import IdleDevice, open_pack

CALLS, ROUNDS = 200, 400  # short rounds: some are undisturbed


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
    with torch.no_grad(), emulated(IdleDevice(folder), [open_pack(folder)], prefer="kernel") as dispatcher:
        for name, call in (vendor_calls | calls).items():
            print(f"{name:38} {call_us(call):6.2f} us")
        assert dispatcher.stats()["torch"] == {}


if __name__ == "__main__":
    main()
