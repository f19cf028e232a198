"""Computes how much slower batch-invariant layers are, by the timing model, for weights of Llama 3.

A batch-invariant layer uses one kernel for every number of rows. The cost is its time as a multiple of the time of the
fastest kernel for that number of rows.

    python scripts/invariance_cost.py [--gpu h200 --gpu a100] [--weight 4096x4096 ...]

Each line of the output is a row of the table in docs/batch-invariance.md. The candidates are all records of the catalog
for fp16, fp32 sums and weights (N,K), as if one pack had them all. To save time, only those are compared that are among
the 400 nearest to one of the numbers of rows.
"""

from __future__ import annotations

import argparse

from cudal2gen.generation import catalog
from cudal2gen.kernel import GPUS, Problem, Record
from cudal2gen.operators import plan_invariance
from cudal2gen.results import Measurements
from cudal2gen.results.choice import Table, TableKernel, tabulate

# NxK of the weights of linear layers, and numbers of rows that are compared.
WEIGHTS = ("4096x4096", "6144x4096", "28672x4096", "4096x14336", "1024x8192")
ROWS = (1, 16, 64, 256, 1024, 4096)
NEAR = 400  # kernels whose times are compared for each number of rows
PLAIN = {"ab": "f16", "d": "same", "acc": "f32", "layout": "tn", "suffix": ""}  # fields of the problems


def table(gpu: str) -> Table:
    """All plain kernels of a GPU for fp16, fp32 sums and weights (N,K)."""
    records = [record for record in catalog.load() if record.gpu == gpu and _plain(record.problem)]
    return tabulate(gpu, records, Measurements({}, []), lambda record: record.name)


def _plain(problem: Problem) -> bool:
    """Whether a problem has the fields ``PLAIN``."""
    return all(getattr(problem, name) == value for name, value in PLAIN.items())


def line(kernels: Table, n: int, k: int) -> str:
    """The table's line for a weight (n,k). Raises ValueError if no kernel serves every number of rows."""
    problem = kernels.kernels[0].record.problem.revised(m=1, n=n, k=k)
    chosen = plan_invariance._decide(kernels, problem, measured=False)
    if chosen.number is None:
        raise ValueError(f"{kernels.gpu} {n}x{k}: {chosen.reason}")
    near = {chosen.number}
    for rows in ROWS:
        resized = problem.model_copy(update={"m": rows})
        distances = [kernel.distance(resized) for kernel in kernels.kernels]
        near |= set(sorted(range(len(distances)), key=distances.__getitem__)[:NEAR])
    times = {number: plan_invariance._modelled_us(kernels.kernels[number], problem, ROWS) for number in near}
    fastest = [min(column) for column in zip(*times.values(), strict=True)]
    factors = [f"{us / least:.2f}" for us, least in zip(times[chosen.number], fastest, strict=True)]
    weight, tile = f"{n} x {k}", _tile(kernels.kernels[chosen.number])
    return f"| {' | '.join([GPUS[kernels.gpu].title, weight, tile, *factors])} |"


def _tile(kernel: TableKernel) -> str:
    """A kernel's tile, and its number of slices of k if it has several."""
    record: Record = kernel.record
    return record.tile.partition("_")[0] + (f", split k {record.split_k}" if record.split_k > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="append", choices=sorted(GPUS))
    parser.add_argument("--weight", action="append", metavar="NxK")
    arguments = parser.parse_args()
    for gpu in arguments.gpu or ("h200", "a100"):
        kernels = table(gpu)
        for weight in arguments.weight or WEIGHTS:
            print(line(kernels, *map(int, weight.split("x"))), flush=True)


if __name__ == "__main__":
    main()
