"""Times Triton kernels on the CPU: in the emulator, in Triton's interpreter, and the same work in NumPy.

    python scripts/emulator_speed.py                          all cases: takes minutes, most of them in the interpreter
    python scripts/emulator_speed.py add-98k matmul-256 --rounds 5
    python scripts/emulator_speed.py --without-interpreter

Prints a Markdown table of CPU seconds: the least of ``--rounds`` calls after a first one, which compiles, in each of
``--processes`` processes. The contenders' processes alternate. A call that takes longer than ``--patience`` seconds is
not repeated. Every process uses one thread, and its results are compared with NumPy's. Needs triton and torch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

CHECKOUT = Path(__file__).resolve().parents[1]
# Contender -> the head of its column.
CONTENDERS = {
    "checked": "emulator, with checks", "unchecked": "emulator, without", "interpreter": "TRITON_INTERPRET=1",
    "numpy": "NumPy",
}  # fmt: skip


class Case(NamedTuple):
    """A launch, its result, the same result by NumPy, and the largest allowed difference, relative to the largest
    element."""

    launch: Callable[[], object]
    result: Any
    numpy: Callable[[], Any]
    tolerance: float


def add(n: int, block: int) -> Case:
    """x + y in fp32; each program adds ``block`` elements."""
    import torch
    import triton

    from examples.triton_kernels import add as kernel

    x, y, total = torch.randn(n), torch.randn(n), torch.empty(n)
    a, b = x.numpy(), y.numpy()
    return Case(lambda: kernel[(triton.cdiv(n, block),)](x, y, total, n, BLOCK=block), total, lambda: a + b, 0)


def softmax(rows: int, columns: int) -> Case:
    """Softmax of rows, fp32."""
    import torch

    from examples.triton_kernels import softmax as kernel

    x = torch.randn(rows, columns)
    y, a = torch.empty_like(x), x.numpy()

    def reference() -> Any:
        numerator = np.exp(a - a.max(axis=1, keepdims=True))
        return numerator / numerator.sum(axis=1, keepdims=True)

    return Case(lambda: kernel[(rows,)](x, y, rows, columns, columns, columns, BLOCK=1024), y, reference, 1e-5)


def layer_norm(rows: int, columns: int) -> Case:
    """Layer normalisation of rows, fp16 in and out."""
    import torch

    from examples.triton_kernels import layer_norm as kernel

    x, weight, bias = torch.randn(rows, columns).half(), torch.randn(columns).half(), torch.randn(columns).half()
    y, mean, rstd = torch.empty_like(x), torch.empty(rows), torch.empty(rows)
    a, w, b = (tensor.numpy().astype(np.float32) for tensor in (x, weight, bias))

    def reference() -> Any:
        centred = a - a.mean(axis=1, keepdims=True)
        return centred / np.sqrt((centred * centred).mean(axis=1, keepdims=True) + 1e-5) * w + b

    return Case(lambda: kernel[(rows,)](x, weight, bias, y, mean, rstd, columns, 1e-5, BLOCK=1024), y, reference, 2e-3)


def layer_norm_backward(rows: int, columns: int, groups: int) -> Case:
    """Gradients of layer normalisation, fp16 in and out: programs sum those of weight and bias in ``groups`` rows, each
    under a lock. The result is the sum of the weight's gradient."""
    import torch

    from examples.triton_kernels import layer_norm_backward as kernel

    x, dy, weight = torch.randn(rows, columns).half(), torch.randn(rows, columns).half(), torch.randn(columns).half()
    a, b = x.numpy().astype(np.float32), dy.numpy().astype(np.float32)
    mean, rstd = a.mean(axis=1), 1 / np.sqrt(a.var(axis=1) + 1e-5)
    dx, dweight, dbias = torch.empty_like(x), torch.zeros(groups, columns), torch.zeros(groups, columns)
    lock, filled = torch.zeros(groups, dtype=torch.int32), torch.zeros(groups, dtype=torch.int32)
    total = torch.empty(columns)
    means, rstds = torch.from_numpy(mean), torch.from_numpy(rstd)

    def launch() -> None:
        filled.zero_()
        kernel[(rows,)](
            dy, x, weight, means, rstds, dx, dweight, dbias, lock, filled, columns, GROUPS=groups, BLOCK=1024
        )
        torch.sum(dweight, 0, out=total)

    def reference() -> Any:
        return (b * (a - mean[:, None]) * rstd[:, None]).sum(axis=0)

    return Case(launch, total, reference, 1e-3)


def matmul(size: int) -> Case:
    """A square product, fp16 in and out, fp32 sums."""
    import torch
    import triton

    from examples.triton_kernels import matmul as kernel

    a, b = torch.randn(size, size).half(), torch.randn(size, size).half()
    d = torch.empty_like(a)
    x, y = a.numpy().astype(np.float32), b.numpy().astype(np.float32)
    tile = {"BM": 128, "BN": 128, "BK": 32} if size >= 1024 else {"BM": 64, "BN": 64, "BK": 32}
    grid = (triton.cdiv(size, tile["BM"]) * triton.cdiv(size, tile["BN"]),)

    def launch() -> None:
        kernel[grid](a, b, d, size, size, size, size, size, size, GROUP=8, num_warps=4, **tile)

    return Case(launch, d, lambda: x @ y, 1e-3)


def matmul_split_k(size: int, k: int, splits: int) -> Case:
    """A product, (size, k) by (k, size), of which ``splits`` programs share each tile; fp16 in, atomic sums in fp32."""
    import torch
    import triton

    from examples.triton_kernels import matmul_split_k as kernel

    a, b = torch.randn(size, k).half(), torch.randn(k, size).half()
    d = torch.empty(size, size)
    x, y = a.numpy().astype(np.float32), b.numpy().astype(np.float32)
    grid = (triton.cdiv(size, 64) ** 2, splits)

    def launch() -> None:
        d.zero_()
        kernel[grid](a, b, d, size, size, k, k, size, size, BM=64, BN=64, BK=32, GROUP=8, SPLITS=splits, num_warps=4)

    return Case(launch, d, lambda: x @ y, 1e-3)


def attention(heads: int, length: int, head: int) -> Case:
    """Causal attention, fp16."""
    import torch

    from examples.triton_kernels import attention as kernel

    q, k, v = (torch.randn(1, heads, length, head).half() for _ in range(3))
    out = torch.empty_like(q)
    x, y, z = (tensor.numpy().astype(np.float32) for tensor in (q, k, v))
    scale = head**-0.5
    grid = (length // 64, heads)

    def launch() -> None:
        kernel[grid](q, k, v, out, length, scale, HEAD=head, BM=64, BN=32, CAUSAL=True)

    def reference() -> Any:
        scores = np.where(np.tri(length, dtype=bool), x @ y.swapaxes(2, 3) * scale, -math.inf)
        share = np.exp(scores - scores.max(axis=3, keepdims=True))
        return share / share.sum(axis=3, keepdims=True) @ z

    return Case(launch, out, reference, 5e-3)


CASES: dict[str, tuple[str, Callable[[], Case]]] = {
    "add-98k": ("add, 98 432 elements", lambda: add(98_432, 1024)),
    "add-10m": ("add, 10 M threads", lambda: add(10_000_000, 128)),
    "softmax": ("softmax, 128 x 781", lambda: softmax(128, 781)),
    "layer-norm": ("layer norm, 128 x 1024, fp16", lambda: layer_norm(128, 1024)),
    "layer-norm-backward": (
        "layer norm backward with locks, 128 x 1024, fp16",
        lambda: layer_norm_backward(128, 1024, 16),
    ),
    "matmul-256": ("matmul, 256 x 256 x 256, fp16", lambda: matmul(256)),
    "matmul-1024": ("matmul, 1024 x 1024 x 1024, fp16", lambda: matmul(1024)),
    "matmul-split-k": (
        "matmul by 4 splits with atomics, 256 x 256 x 1024",
        lambda: matmul_split_k(256, 1024, 4),
    ),
    "attention": ("attention, 2 heads, 128 x 64, fp16", lambda: attention(2, 128, 64)),
}


def seconds_of(call: Callable[[], object], rounds: int, patience: float) -> float:
    """The CPU seconds of a call: the least of ``rounds`` calls, or of those up to the first that takes more than
    ``patience`` seconds."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
        if times[-1] > patience:
            break
    return min(times)


def measure(contender: str, names: list[str], device: str, rounds: int, patience: float) -> dict[str, float]:
    """The CPU seconds of each case by a contender. Raises AssertionError if a result differs from NumPy's by more than
    the tolerance."""
    import torch

    torch.set_num_threads(1)
    seconds = {}
    for name in names:
        torch.manual_seed(0)
        case = CASES[name][1]()
        call = case.numpy if contender == "numpy" else launcher(contender, device, case)
        start = time.process_time()
        call()
        first = time.process_time() - start
        seconds[name] = first if first > patience else seconds_of(call, rounds, patience)
        if contender != "numpy":
            expected = case.numpy()
            distance = np.abs(case.result.float().numpy() - expected).max()
            assert distance <= case.tolerance * np.abs(expected).max(), (
                f"{contender}, {name}: {distance} from NumPy's result"
            )
    return seconds


def launcher(contender: str, device: str, case: Case) -> Callable[[], object]:
    """A function that launches a case's kernel in the emulator, or in the interpreter if ``contender`` is that."""
    if contender == "interpreter":
        return case.launch

    from kernelproof import triton_emulation
    from kernelproof.emulator import Options

    options = Options(hazards=contender == "checked")

    def launch() -> None:
        with triton_emulation.emulate(device, options=options):
            case.launch()

    return launch


def measure_in_process(contender: str, arguments: argparse.Namespace) -> dict[str, float]:
    """``measure`` in a process of its own."""
    settings = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if contender == "interpreter":
        settings["TRITON_INTERPRET"] = "1"
    paths = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH", ""))))
    command = [sys.executable, __file__, *arguments.cases, "--contender", contender, "--device", arguments.device]
    command += ["--rounds", str(arguments.rounds), "--patience", str(arguments.patience)]
    environment = {**os.environ, "PYTHONPATH": paths, **settings}
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(process.stdout.splitlines()[-1]))


def seconds_text(seconds: float | None) -> str:
    """Seconds with two significant digits."""
    if seconds is None:
        return "-"
    return f"{seconds:.1f}" if seconds >= 9.95 else f"{seconds:#.2g}" if seconds >= 1e-4 else "< 0.0001"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--device", default="sm_80")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="of each contender")
    parser.add_argument("--patience", type=float, default=5.0)
    parser.add_argument("--without-interpreter", action="store_true")
    parser.add_argument("--contender", choices=CONTENDERS, help="measure one in this process, and print JSON")
    arguments = parser.parse_args()
    arguments.cases = arguments.cases or list(CASES)
    for name in arguments.cases:
        if name not in CASES:
            parser.error(f"no case {name}; there are {', '.join(CASES)}")
    if arguments.contender:
        print(
            json.dumps(
                measure(arguments.contender, arguments.cases, arguments.device, arguments.rounds, arguments.patience)
            )
        )
        return
    contenders = [name for name in CONTENDERS if name != "interpreter" or not arguments.without_interpreter]
    columns: dict[str, dict[str, float]] = {name: {} for name in contenders}
    for _ in range(arguments.processes):
        for name in contenders:
            for case, seconds in measure_in_process(name, arguments).items():
                columns[name][case] = min(seconds, columns[name].get(case, math.inf))
    print("| seconds of one core | " + " | ".join(CONTENDERS[name] for name in contenders) + " |")
    print("|---|" + "---:|" * len(contenders))
    for case in arguments.cases:
        print(
            f"| {CASES[case][0]} | " + " | ".join(seconds_text(columns[name].get(case)) for name in contenders) + " |"
        )


if __name__ == "__main__":
    main()
