"""Chooses Hopper records by the analytic model, without a GPU: the best legal variant of every problem.

    python scripts/modelled.py --write          replaces the unmeasured H200 records of configs/kernels.jsonl
    python scripts/modelled.py --report         their spread, and how nvidia-matmul-heuristics, if installed, agrees

Nothing here is measured, and the records say so: origin.source is "analytic model, unmeasured". A problem whose record
was tuned keeps it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from cudal2gen import catalog, model, places
from cudal2gen.kernel import IllegalRecord, Problem, Record, Sm90Wgmma, ceil_div, parse

SOURCE = "analytic model, unmeasured"
# bm, bn, schedule, consumers, warps_n, registers: tiles that ptxas compiles clean, by accumulator.
TILES: dict[str, list[tuple[int, int, str, int, int, list[int] | None]]] = {
    "f32": [
        *[(128, bn, "cooperative", 2, 1, [40, 232]) for bn in (64, 96, 128, 160, 192, 224, 256)],
        *[(256, bn, "cooperative", 2, 1, [40, 232]) for bn in (64, 96, 128, 160, 192)],
        (256, 208, "cooperative", 2, 1, [24, 240]),
        *[(192, bn, "cooperative", 3, 1, [32, 160]) for bn in (128, 192)],
        *[(64, bn, "cooperative", 1, 1, None) for bn in (32, 64, 96, 128, 192)],
        *[(64, bn, "cooperative", 2, 2, [40, 232]) for bn in (64, 128, 256)],
        *[(64, bn, "pingpong", 2, 1, [40, 232]) for bn in (64, 128, 192, 256)],
        *[(128, bn, "pingpong", 2, 1, [40, 232]) for bn in (64, 96, 128, 160, 192)],
    ],
    "f16": [
        *[(128, bn, "cooperative", 2, 1, [40, 232]) for bn in (64, 96, 128, 160, 192, 224, 256)],
        *[(256, bn, "cooperative", 2, 1, [40, 232]) for bn in (64, 96, 128, 160, 192, 256)],
        *[(64, bn, "cooperative", 1, 1, None) for bn in (32, 64, 96, 128, 192)],
        *[(64, bn, "cooperative", 2, 2, [40, 232]) for bn in (64, 128, 256)],
        *[(64, bn, "pingpong", 2, 1, [40, 232]) for bn in (64, 128, 192, 256)],
        *[(128, bn, "pingpong", 2, 1, [40, 232]) for bn in (64, 128, 192, 256)],
        *[(192, bn, "pingpong", 2, 1, [40, 232]) for bn in (128, 192, 256)],
    ],
}
CLUSTERS = ([1, 1], [2, 1], [1, 2])
SPLITS = (
    (1, None),
    (2, "cluster"),
    (4, "cluster"),
    (8, "cluster"),
    (4, "workspace"),
    (8, "workspace"),
    (16, "workspace"),
)
RING_BYTES = 227 << 10
EVEN = 1.03  # variants within 3 % are equal to such a model: the plainer and more common one is taken


def variants(problem: Problem) -> Iterator[Record]:
    """Legal records for a problem, of both Hopper families."""
    for fields in [*_wgmma(problem), *_small(problem)]:
        try:
            record = parse(fields)
        except IllegalRecord:
            continue
        if not _idles(record):
            yield record


def _idles(record: Record) -> bool:
    """Whether CTAs of its clusters, or every second warpgroup, have no work: the model does not see what that costs."""
    if not isinstance(record, Sm90Wgmma):
        return False
    beyond = record.tiles_m % record.cluster[0] or record.tiles_n % record.cluster[1]
    return bool(beyond) or (record.schedule == "pingpong" and record.ctas <= record.target.sms)


def _base(problem: Problem, family: str) -> dict[str, Any]:
    origin = {"source": SOURCE, "structure": "modelled", "changed": []}
    return problem.model_dump(mode="json") | {"family": family, "origin": origin}


def _wgmma(problem: Problem) -> Iterator[dict[str, Any]]:
    shapes = [(False, tile) for tile in TILES[problem.acc]]
    if problem.m <= 64:
        # Few rows: D^T = B^T A^T, whose rows are many. warps_n then splits m, which is too short for it.
        bm = ceil_div(problem.m, 16) * 16
        shapes += [(True, (bm, bn, "cooperative", groups, 1, None)) for bn, groups in ((64, 1), (128, 1), (128, 2))]
    for (swap_ab, tile), cluster, (split_k, reduce), bk in product(shapes, CLUSTERS, SPLITS, (64, 128)):
        bm, bn, schedule, consumers, warps_n, registers = tile
        if (not swap_ab and bm >= 2 * problem.m > 128) or (bn >= 2 * problem.n and bn > 64):
            continue
        if split_k > 1 and (cluster != [1, 1] or schedule != "cooperative" or ceil_div(problem.k, bk) < 2 * split_k):
            continue
        epilogue = "direct" if reduce == "cluster" or problem.n % 8 else "tma"
        columns = bm if swap_ab else bn // warps_n
        buffers = consumers * 4 * 2 * 16 * 64 * 2 if epilogue == "tma" else 0
        stages = min(8 if bk == 64 else 4, (RING_BYTES - buffers - 512) // ((bm + bn) * bk * 2))
        if stages < 2:
            continue
        yield _base(problem, "sm90_wgmma") | {
            "bm": bm, "bn": bn, "bk": bk, "stages": stages, "cluster": cluster, "consumers": consumers,
            "warps_n": warps_n, "atom_n": 128 if consumers == 3 and bn == 256 else columns, "schedule": schedule,
            "raster_axis": "m" if problem.m >= problem.n else "n", "raster_group": 8, "split_k": split_k,
            "reduce": reduce, "swap_ab": swap_ab, "epilogue": epilogue, "registers": registers, "hint_a": "normal",
            "hint_b": "normal", "pdl": False, "min_blocks": 1,
        }  # fmt: skip


def _small(problem: Problem) -> Iterator[dict[str, Any]]:
    if problem.m * problem.n > 1 << 20:
        return
    chunks = ceil_div(problem.k, 64)
    for split_k in (1, 2, 4, 8):
        held = 1 << (ceil_div(chunks, split_k) - 1).bit_length()
        if held > 8 or split_k > chunks:
            continue
        for swap_ab, bm, bn in [
            *((False, 64, bn) for bn in (16, 32, 64, 128)),
            *((True, bm, 64) for bm in (16, 32, 64) if problem.m <= bm),
        ]:
            yield _base(problem, "sm90_small") | {
                "bm": bm, "bn": bn, "swap_ab": swap_ab, "k_chunks": held, "engine": "tma_wgmma", "exact": False,
                "split_k": split_k,
            }  # fmt: skip
        for bm, bn in ((16, 32), (32, 32), (32, 64)):
            yield _base(problem, "sm90_small") | {
                "bm": bm, "bn": bn, "swap_ab": False, "k_chunks": held, "engine": "cpasync_mma", "exact": False,
                "split_k": split_k,
            }  # fmt: skip


def plainness(record: Record) -> tuple[Any, ...]:
    """What to prefer among equals: no split, no cluster, no swap, the larger tile."""
    cluster = record.cluster_ctas
    pingpong = record.family == "sm90_wgmma" and record.schedule == "pingpong"
    return record.split_k, cluster, record.k_step != 64, pingpong, -record.bm * record.bn


def choose(problem: Problem) -> Record:
    """The variant with the least modelled time, the plainest of those within ``EVEN`` of it."""
    timed = [(model.estimate(record).us, record) for record in variants(problem)]
    best = min(us for us, _ in timed)
    return min((record for us, record in timed if us <= best * EVEN), key=plainness)


@cache
def grid() -> list[tuple[int, int, int]]:
    """The problems of the catalog."""
    return sorted({(record.m, record.n, record.k) for record in catalog.load() if record.gpu == "a100"})


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--write", action="store_true")
    options.add_argument("--report", action="store_true")
    options.add_argument("--every", type=int, default=1, help="only each so many problems, for a look")
    given = options.parse_args()
    chosen: list[Record] = []
    for acc in ("f32", "f16"):
        for m, n, k in grid()[:: given.every]:
            chosen.append(choose(Problem(gpu="h200", acc=acc, layout="tn", m=m, n=n, k=k)))  # type: ignore[arg-type]
    if given.report:
        report(chosen)
        cross_check(chosen)
    if given.write:
        tuned = [one for one in catalog.load() if one.gpu != "h200" or one.origin.structure == "tuned"]
        keys = {one.key for one in tuned}
        target = places.editable_catalog()
        catalog.save([*tuned, *(one for one in chosen if one.key not in keys)], target)


def cross_check(chosen: list[Record]) -> None:
    """How the choices compare with nvidia-matmul-heuristics, which is another model and not measured here either."""
    try:
        import nvMatmulHeuristics as other
    except ImportError:
        print("nvidia-matmul-heuristics is not installed: no cross-check")
        return
    told = other.NvMatmulHeuristicsInterfaceEx(
        backend=other.NvMatmulHeuristicsTarget.CUTLASS3, gpu=other.NvMatmulHeuristicsNvidiaGpu.H200_SXM
    )
    told.loadInternalDiscoverySet(other.NvMatmulHeuristicsMatmulLayout.NT_ROW_MAJOR, precision="HSH")
    tiles = splits = 0
    ours, theirs = [], []
    fp32 = [record for record in chosen if record.acc == "f32"]
    for record in fp32:
        problem = told.makeNvMatmulHeuristicsProblem(
            record.m, record.n, record.k, other.NvMatmulHeuristicsMatmulLayout.NT_ROW_MAJOR
        )
        offered = told.get(problem, 16, "HSH")
        kernels = [one["kernel"] for one in offered]
        tiles += any((kernel.cta_tile_m, kernel.cta_tile_n) == (record.bm, record.bn) for kernel in kernels)
        splits += any((kernel.split_k > 1) == (record.split_k > 1) for kernel in kernels[:1])
        ours.append(model.estimate(record).us)
        theirs.append(min(one["runtime"] for one in offered) * 1e6)
    print(
        f"nvidia-matmul-heuristics, {len(fp32)} fp32 problems: our tile is among its 16 for {tiles}, its first choice "
        f"splits k as ours does for {splits}; times: rank correlation {spearman(ours, theirs):.3f}, median ratio "
        f"{sorted(a / b for a, b in zip(ours, theirs, strict=True))[len(ours) // 2]:.2f}"
    )


def spearman(one: list[float], other: list[float]) -> float:
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


def report(chosen: list[Record]) -> None:
    print(len(chosen), "records,", len({one.name for one in chosen}), "distinct texts")
    for title, count in (
        ("family", Counter(one.family for one in chosen)),
        ("tile", Counter((one.acc, one.family[5:], one.bm, one.bn) for one in chosen)),
        ("split", Counter((one.family[5:], one.split_k, getattr(one, "reduce", "")) for one in chosen)),
        ("schedule", Counter((getattr(one, "schedule", ""), getattr(one, "cluster", "")) for one in chosen)),
        ("swap", Counter(one.swap_ab for one in chosen if one.family != "sm80_multistage")),
    ):
        print(title, count.most_common(40))


if __name__ == "__main__":
    main()
