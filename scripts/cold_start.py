"""Measures the parts of a process's first product by a kernel, in CPU seconds of a new process.

    python -m scripts.cold_start [ROUNDS]

The CUDA runtime is a stand-in that does nothing, and no call times kernels to choose among them. Prints the least
seconds of the rounds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.cudal2gen import idle_device, idle_runtime

# The program of the new process. It has a device of its own, because tests.cudal2gen.idle_device imports compilers.
PROGRAM = """
import json, sys, time

seconds, before = {}, time.process_time()

def part(name):
    global before
    seconds[name] = time.process_time() - before
    before = time.process_time()

import torch

part("import torch")
import cudal2gen

cudal2gen.matmul(torch.ones(2, 8, 8).half(), torch.ones(8, 8).half())
cudal2gen.linear(torch.ones(8, 8).half(), torch.ones(8, 8).half())
part("this package's operators")
from contextlib import nullcontext
from pathlib import Path

from cudal2gen import pack
from cudal2gen.operators import call_native, dispatch
from kernelproof.ground.chips import CardFacts

class Device:
    card, alone, place = CardFacts.of("NVIDIA A100", (8, 0), 108), True, call_native.CallPlace(stream=1)
    runtime = lambda self, cuda: Path(sys.argv[2])
    stream = lambda self: 1
    empty = lambda self, like, *shape: like.new_empty(shape)
    capturing = lambda self: False
    current = lambda self: nullcontext()

a, b = torch.ones(64, 128).half(), torch.ones(128, 64).half()
before = time.process_time()
opened = pack.open_pack(Path(sys.argv[1]))
part("opening a pack of two kernels")
with dispatch.replaced(dispatch.Dispatcher([opened], Device())) as dispatcher, cudal2gen.prefer("kernel"):
    cudal2gen.matmul(a, b)
    part("a first call")
    cudal2gen.matmul(a, b)
    part("a second call")
    calls = sum(dispatcher.stats()["kernel"].values())
print(json.dumps({"seconds": seconds, "calls": calls, "cpp": call_native.NATIVE.connected, "modules": [*sys.modules]}))
"""


def run_program(folder: Path) -> dict[str, Any]:
    """Runs ``PROGRAM`` in a new process and returns the JSON object that it prints. ``folder``: an empty folder, in
    which a pack and a stand-in for the CUDA runtime are made."""
    directory, runtime = idle_device.open_pack(folder).directory, idle_runtime.build(folder)
    command = [sys.executable, "-c", PROGRAM, str(directory), str(runtime)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def main(rounds: str = "5") -> None:
    runs = []
    for _ in range(int(rounds)):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(run_program(Path(folder))["seconds"])
    for name in runs[0]:
        print(f"{name:32} {min(run[name] for run in runs):.5f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
