"""Times cudal2gen.matmul, which chooses a kernel during its first call, alternating with torch.matmul on equal tensors.

    CUDAL2GEN_PACK=DIR python -m scripts.race_operators --budget 45s --out DIR

The pack has candidates without measurements (`cudal2gen pack --candidates`): the first call of a shape times some of
them and torch, and later calls run the fastest, which may be torch's product. Products are those of linear layers, fp16
and bf16 alternating, B stored (N,K). The measurement is that of `cudal2gen bench`, protocol `device`; rows go to
``operators.jsonl``. Exit code 1: cudal2gen.matmul is wrong, or slower than ``MIN_SPEED`` of torch's beyond noise.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import cudal2gen
from cudal2gen import bench, results
from cudal2gen.cli import selection
from cudal2gen.kernel import Problem
from cudal2gen.launch import gpu
from cudal2gen.launch.gpu import Call, MeasuringDevice, Race
from cudal2gen.launch.operands import Operands
from cudal2gen.operators import dispatch
from cudal2gen.pack import installed, search
from cudal2gen.results import KERNEL, Measurement, ratios
from kernelproof.ground.command_line.options import seconds
from kernelproof.ground.errors import UserError, WrongInput
from kernelproof.ground.pages import grid

if TYPE_CHECKING:
    import torch

# The store of these measurements, and the contender to which operators are compared.
STORE = "operators"
TORCH = "torch.matmul"
MIN_SPEED = 0.99  # share of torch's speed that the upper end of an interval must reach
# (N, K) of linear layers of Llama 3 8B and 70B, Qwen 2.5 7B and DeepSeek V3.
LAYERS = (
    (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (10240, 8192), (57344, 8192), (8192, 28672),
    (3584, 3584), (4608, 3584), (37888, 3584), (3584, 18944), (7168, 2048), (1536, 7168), (576, 7168), (256, 7168),
)  # fmt: skip
MAX_ROWS, PREFILL = 272, 2048  # most rows of a batch that servers decode; rows of a prompt
SAMPLE = 48  # number of products
# Types of A, B and D.
TYPES = ("f16", "bf16")


class OperatorCall:
    """A function of a and b as a ``gpu.Contender``. All contenders write to one D; B is the view (K,N) of (N,K)."""

    def __init__(self, name: str, product: Callable[..., torch.Tensor]) -> None:
        self.name, self.detail, self._product = name, "", product

    def prepare(self, problem: Problem, race: Race) -> None:
        """Does nothing: the first call prepares what it needs."""

    def bind(self, operands: Operands) -> Call:
        return partial(self._product, operands.a, operands.b.t(), out=operands.d)


def drawn(sample: int, seed: int = 0) -> list[str]:
    """Sizes off the catalog's grid: layer shapes with few, sometimes odd, m; every eighth has the m of a prompt."""
    rng = random.Random(seed)
    rows = [PREFILL if number % 8 == 7 else rng.randint(1, MAX_ROWS) for number in range(sample)]
    return ["_".join(map(str, (m, *rng.choice(LAYERS)))) for m in rows]


def problems(model: str, mnks: Sequence[str]) -> list[Problem]:
    """Products of these sizes, fp16 and bf16 alternating."""
    types = cycle(TYPES)
    return [selection.problem_of(mnk, gpu=model, ab=next(types), acc="f32", layout="tn") for mnk in mnks]


def race(card: MeasuringDevice, chosen: Sequence[Problem], store: Path, budget: float | None) -> int:
    """Measures what the store lacks, within a budget in seconds; returns how many problems are left."""
    import torch

    begin, environment = card.now(), card.environment
    stored = results.measurements(store)
    measured = {row.problem for row in stored.measurements if row.environment == environment.id}
    if environment.id not in stored.environments:
        results.append([environment], store)
    contenders = [OperatorCall(KERNEL, cudal2gen.matmul), OperatorCall(TORCH, torch.matmul)]
    settings = bench.Settings(warmup_seconds=1.0, benchmark_seconds=0.2)
    remaining = [problem for problem in chosen if problem not in measured]
    longest = 0.0
    with dispatch.autotune("once"):
        for number, problem in enumerate(remaining):
            start = card.now()
            if budget is not None and start - begin + longest > budget:
                return len(remaining) - number
            work = [bench.Condition("device", state) for state in bench.states(problem, "device", environment.l2_bytes)]
            results.append(bench.measure(card, problem, contenders, work, settings, warm=number > 0), store)
            longest = max(longest, card.now() - start)
    return 0


def check_pack(model: str) -> None:
    """Raises WrongInput without a pack for a GPU: torch would then run against itself."""
    packs = search(installed())
    if model not in packs.packs:
        present = "; ".join([*packs.refused, f"packs for {', '.join(packs.packs) or 'no GPU'} are there"])
        raise WrongInput(
            f"no pack for {model} ({present}): 'cudal2gen pack --gpu {model} --candidates --out FOLDER', and name the "
            "folder in CUDAL2GEN_PACK"
        )


def table(rows: Sequence[Measurement]) -> tuple[list[str], int]:
    """Times and ratios, worst first, and how many problems are wrong, or slower than torch beyond noise."""
    paired, faults = [], []
    for row, ratio in zip(rows, results.speedups(rows, TORCH), strict=True):
        kernel_timing, torch_timing = row.timing(KERNEL), row.timing(TORCH)
        if kernel_timing is None or torch_timing is None or ratio is None:
            faults.append(f"{row.mnk} {row.ab}: {row.absent or 'no pairs of samples'}")
            continue
        paired.append((ratio, row, kernel_timing, torch_timing))
        if ratio.high < MIN_SPEED:
            faults.append(f"{row.mnk} {row.ab}, L2 {row.l2}: {ratio.value:.3f} of {TORCH}'s speed, below {MIN_SPEED}")
    cells = [
        (
            row.mnk, row.problem.types, row.l2, f"{kernel_timing.median_us:.2f}", f"{torch_timing.median_us:.2f}",
            f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
        )
        for ratio, row, kernel_timing, torch_timing in sorted(paired, key=lambda pair: pair[0].value)
    ]  # fmt: skip
    columns = ("problem", "types", "L2", f"{KERNEL} us", f"{TORCH} us", "speedup [95 %]")
    lines = grid(columns, cells, left=3).split("\n")
    if (mean := ratios.geomean([ratio.value for ratio, *_ in paired])) is not None:
        lines.append(f"\ngeometric mean {mean.value:.3f} [{mean.low:.3f}, {mean.high:.3f}] over {len(paired)} rows")
    return lines + [f"fault: {fault}" for fault in faults], len(faults)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: never slower; 1: slower beyond noise, or wrong; 2: wrong options, no GPU, or no pack for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=SAMPLE, help=f"number of products, default {SAMPLE}")
    parser.add_argument("--mnk", action="append", metavar="M_N_K", help="these sizes instead of layers")
    parser.add_argument("--budget", type=seconds, help="end after, e.g., 45s; no product is begun without time for it")
    parser.add_argument("--out", type=Path, help="folder of operators.jsonl, default results/")
    parser.add_argument("--device", type=int, default=0)
    options = parser.parse_args(arguments)
    store = options.out.resolve() / f"{STORE}.jsonl" if options.out else results.store(STORE)
    try:
        card = gpu.connect(options.device)
        check_pack(card.model)
        chosen = problems(card.model, options.mnk or drawn(options.sample))
        with gpu.reserved_device(options.device):
            remaining = race(card, chosen, store, options.budget)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lines, faults = table(results.measurements(store).latest())
    print("\n".join([*lines, f"{remaining} of {len(chosen)} products left", str(cudal2gen.stats())]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
