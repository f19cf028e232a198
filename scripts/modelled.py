"""Chooses Hopper records by the analytic model, without a GPU: the best legal variant of every problem.

    python scripts/modelled.py --write          replaces the unmeasured H200 records of configs/kernels.jsonl
    python scripts/modelled.py --report         their spread, and how nvidia-matmul-heuristics, if installed, agrees

The records are not measured: their origin.source is "analytic model, unmeasured". A problem keeps its tuned record.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from cudal2gen import catalog, model, places
from cudal2gen.chips import GPUS
from cudal2gen.kernel import IllegalRecord, Problem, Record, Sm90Wgmma, parse
from cudal2gen.tuner import space

SOURCE = "analytic model, unmeasured"
EVEN = 1.03  # the model cannot separate variants within 3 %, so the plainer and more common one wins


def variants(problem: Problem) -> Iterator[Record]:
    """Legal records for a problem, of all families that serve its GPU, with as many stages as fit."""
    origin = {"source": SOURCE, "structure": "modelled", "changed": []}
    tiles: set[str] = set()
    for fields in space.proposals(problem):
        # Candidates that differ in stages alone come deepest first.
        tile = json.dumps({name: value for name, value in fields.items() if name != "stages"})
        if tile in tiles:
            continue
        tiles.add(tile)
        try:
            record = parse(fields | {"origin": origin})
        except IllegalRecord:
            continue
        if not _idles(record):
            yield record


def _idles(record: Record) -> bool:
    """Whether CTAs of its clusters, or every second warpgroup, have no work: the model does not see what that costs."""
    if not isinstance(record, Sm90Wgmma):
        return False
    remainder = record.tiles_m % record.cluster[0] or record.tiles_n % record.cluster[1]
    return bool(remainder) or (record.schedule == "pingpong" and record.ctas <= record.target.sms)


def plainness(record: Record) -> tuple[Any, ...]:
    """What to prefer among equals: no split, no cluster, MMAs that hide a warp's instructions, the larger tile."""
    hidden = model.hides_issue(record) or record.k < 4 * 128
    pingpong = record.family == "sm90_wgmma" and record.schedule == "pingpong"
    return record.split_k, record.cluster_ctas, not hidden, record.k_step != 64, pingpong, -record.bm * record.bn


def choose(problem: Problem) -> Record:
    """The variant with the least modelled time, the plainest of those within ``EVEN`` of it."""
    estimates = [(model.estimate(record).us, record) for record in variants(problem)]
    best = min(us for us, _ in estimates)
    return min((record for us, record in estimates if us <= best * EVEN), key=plainness)


@cache
def grid() -> list[tuple[int, int, int]]:
    """The problems of the catalog."""
    return sorted({(record.m, record.n, record.k) for record in catalog.load() if record.gpu == "a100"})


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--write", action="store_true")
    options.add_argument("--report", action="store_true")
    options.add_argument("--every", type=int, default=1, help="only each so many problems, for a look")
    arguments = options.parse_args()
    records: list[Record] = []
    for acc in ("f32", "f16"):
        for m, n, k in grid()[:: arguments.every]:
            records.append(choose(Problem(gpu="h200", acc=acc, layout="tn", m=m, n=n, k=k)))  # type: ignore[arg-type]
    if arguments.report:
        report(records)
        cross_check(records)
    if arguments.write:
        kept = [record for record in catalog.load() if record.gpu != "h200" or record.origin.structure == "tuned"]
        keys = {record.key for record in kept}
        target = places.editable_catalog()
        catalog.save([*kept, *(record for record in records if record.key not in keys)], target)


def cross_check(records: list[Record]) -> None:
    """How the choices compare with nvidia-matmul-heuristics, which is another model and not measured here either."""
    try:
        import nvMatmulHeuristics as other
    except ImportError:
        print("nvidia-matmul-heuristics is not installed: no cross-check")
        return
    interface = other.NvMatmulHeuristicsInterfaceEx(
        backend=other.NvMatmulHeuristicsTarget.CUTLASS3, gpu=other.NvMatmulHeuristicsNvidiaGpu[GPUS["h200"].heuristics]
    )
    interface.loadInternalDiscoverySet(other.NvMatmulHeuristicsMatmulLayout.NT_ROW_MAJOR, precision="HSH")
    tiles = splits = 0
    modelled, heuristic = [], []
    fp32 = [record for record in records if record.acc == "f32"]
    for record in fp32:
        problem = interface.makeNvMatmulHeuristicsProblem(
            record.m, record.n, record.k, other.NvMatmulHeuristicsMatmulLayout.NT_ROW_MAJOR
        )
        results = interface.get(problem, 16, "HSH")
        kernels = [result["kernel"] for result in results]
        tiles += any((kernel.cta_tile_m, kernel.cta_tile_n) == (record.bm, record.bn) for kernel in kernels)
        splits += any((kernel.split_k > 1) == (record.split_k > 1) for kernel in kernels[:1])
        modelled.append(model.estimate(record).us)
        heuristic.append(min(result["runtime"] for result in results) * 1e6)
    print(
        f"nvidia-matmul-heuristics, {len(fp32)} fp32 problems: our tile is among its 16 for {tiles}, its first choice "
        f"splits k as ours does for {splits}; times: rank correlation {spearman(modelled, heuristic):.3f}, median "
        f"ratio {sorted(a / b for a, b in zip(modelled, heuristic, strict=True))[len(modelled) // 2]:.2f}"
    )


def spearman(x: list[float], y: list[float]) -> float:
    ranks = [np.argsort(np.argsort(values)) for values in (x, y)]
    return float(np.corrcoef(*ranks)[0, 1])


def report(records: list[Record]) -> None:
    print(len(records), "records,", len({record.name for record in records}), "distinct texts")
    for title, count in (
        ("family", Counter(record.family for record in records)),
        ("tile", Counter((record.acc, record.family[5:], record.bm, record.bn) for record in records)),
        ("split", Counter((record.family[5:], record.split_k, getattr(record, "reduce", "")) for record in records)),
        ("schedule", Counter((getattr(record, "schedule", ""), getattr(record, "cluster", "")) for record in records)),
        ("swap", Counter(getattr(record, "swap_ab", False) for record in records)),
    ):
        print(title, count.most_common(40))


if __name__ == "__main__":
    main()
