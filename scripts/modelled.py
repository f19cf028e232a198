"""Chooses the records of a GPU by the timing model: for every problem a legal variant that is near the modelled best.

    python scripts/modelled.py --gpu b200 --write      renews the unmeasured records of configs/kernels.jsonl
    python scripts/modelled.py --gpu b200 --report     prints their spread, compared with nvidia-matmul-heuristics

The problems are those of the A100's records and, for an H200 and a B200, products of decoding with few rows. Nothing is
measured, and tuned records stay as they are. ``origin.source`` says where a record comes from:

- "published H100 choice": tile, cluster and schedule of a published H100 configuration for this problem, where an H200
  record can express them and the model does not find a variant that is faster by the factor ``MAX_PUBLISHED_LOSS``;
- "timing model": one of the variants that the model cannot tell from its best. Among these, kernels that serve many
  problems come first, so that there are few kernels to build and to prove.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any

import numpy as np

from cudal2gen import places
from cudal2gen.generation import catalog
from cudal2gen.kernel import Acc, IllegalRecord, Origin, Problem, Record, Sm90Wgmma, parse, space
from cudal2gen.kernel.sm80_multistage import PREFETCHES, STRIDES, Sm80Multistage
from cudal2gen.kernel.sm90_wgmma import WGMMA_M
from cudal2gen.kernel.tma_ring import TmaRing
from cudal2gen.kernel.warpgroups import Warpgroups
from cudal2gen.timing import model
from cudal2gen.timing.evidence.published import hopper_configurations
from kernelproof.ground.chips import GPUS

SOURCE, PUBLISHED_SOURCE = "timing model", "published H100 choice"  # values of ``origin.source``
SHORT_US = 10.0  # modelled time below which a kernel overlaps with the previous one
LONG_K = 512  # from this k on, a warp's own instructions count
TIE = 1.03  # the model cannot separate variants within 3 %, so the plainer and more common one wins
# A published choice may be slower than the model's best by this factor. It was made on hardware, where the model's own
# choice among recorded tiles takes 3 to 4 % longer than the best (docs/timing-model.md), and a tenth for some.
MAX_PUBLISHED_LOSS = 1.10
LARGE = 4096  # from these extents on 46 of 57 published H100 kernels share operands in pairs of CTAs
# A product of decoding reads its weights at the rate of device memory, which few SMs may not reach. So on these GPUs
# its kernel has at least this number of CTAs, if a kernel with as many takes at most MAX_BUSY_LOSS times the best
# modelled time.
BUSY_CTAS, MAX_BUSY_LOSS = {"b200": 120}, 1.10
WIDE = 2048  # from these extents of D on, GPUs other than Hopper take tiles of published kernels: is_wide
PRESENT_WEIGHT = 2.0  # weight of a problem for a kernel that the catalog has already

# GPUs and accumulators for which records are chosen.
MODELLED = ("h200", "rtx4090", "rtx5090", "b200")
ACCS: tuple[Acc, ...] = ("f32", "f16")

# Products of decoding, for these GPUs with fp32 sums: numbers of rows, then (n, k) of mixture-of-experts routers and of
# linear layers of models of 7B to 70B: q, k and v in one product, output, gate and up in one, down.
DECODING = ("h200", "b200")
DECODE_ROWS = (1, 8, 16, 32, 64)
FEW_ROWS = DECODE_ROWS[:3]
# The most rows of a product of decoding whose kernel has ``prefetch_b``. Kernels for 64 rows serve other problems too,
# which do not need that field, so the catalog would have each of them twice.
MOST_EARLY_ROWS = 32
ROUTERS = ((256, 7168), (384, 7168), (896, 7168))
LINEARS = (
    *((6144, 4096), (12288, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    *((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
)
DECODE = [(m, n, k) for n, k in (*ROUTERS, *LINEARS) for m in DECODE_ROWS]


def variants(problem: Problem) -> Iterator[Record]:
    """The legal records for a problem, of all families that serve its GPU."""
    origin = {"source": SOURCE, "structure": "modelled", "changed": []}
    raster = _raster(problem)
    tiles: set[str] = set()
    for fields in proposals(problem):
        if not GPUS[problem.gpu].capability.has_wgmma and fields.get("prefetch", PREFETCHES[0]) != PREFETCHES[0]:
            continue  # the model does not see the order of loads, so only the first kind is proposed
        # Of candidates that differ only in stages, the first is kept, which has the most. All are kept for mma.sync on
        # GPUs without wgmma, where fewer stages may let more CTAs be resident.
        dropped = () if "mma_repeat" in fields and not GPUS[problem.gpu].capability.has_wgmma else ("stages",)
        tile = json.dumps({name: value for name, value in fields.items() if name not in dropped})
        if tile in tiles:
            continue
        try:
            record = parse(fields | {"origin": origin} | (raster if "swizzle_stride" in fields else {}))
        except IllegalRecord:
            continue
        tiles.add(tile)
        if not (record.spill_remarks or _spills(record) or _idles(record) or _unlikely(record)):
            yield record


def proposals(problem: Problem) -> Iterator[dict[str, Any]]:
    """The proposals of all families. For products of decoding also kernels of tcgen05 that share out the last wave,
    which the tuner does not try: all SMs then work on a few tiles."""
    for fields in space.proposals(problem):
        yield fields
        static = fields.get("split_k") == 1 and "scheduler" not in fields
        if static and fields["family"] == "sm100_tcgen05" and decodes(problem):
            yield fields | {"stream_k": True}


def _raster(problem: Problem) -> dict[str, Any]:
    """The raster fields of an mma.sync record: slices of columns, about as wide as a square of one tile of 128 x 128
    for each SM. Empty if two thirds of the L2 hold both operands."""
    chip = GPUS[problem.gpu]
    operands = problem.element.bytes * problem.k * (problem.m + problem.n)
    if operands <= chip.rates.l2_size * 2 // 3:
        return {}
    stride = min(STRIDES, key=lambda stride: abs(math.log2(stride / (128 * math.sqrt(chip.sms)))))
    return {"raster": "zsplit", "swizzle_stride": stride} if stride < problem.n else {}


def _spills(record: Record) -> bool:
    """Whether ptxas 13.0 spills although the register estimate is legal, as seen in builds: for sm_90 a lone warp with
    a tile of 64 x 64 by mma.sync; for others a lone warp with three quarters of that, and estimates above 240
    registers."""
    if record.work.instruction != "mma.sync" or isinstance(record, TmaRing):
        return False
    if record.target.capability.has_wgmma:
        return record.threads == 32 and record.accumulator_registers >= 128
    return record.estimated_registers > 240 or (record.threads == 32 and record.accumulator_registers >= 96)


def _idles(record: Record) -> bool:
    """Whether parts of a kernel have no work, the cost of which the model does not see: CTAs of its clusters, every
    second warpgroup, or three of four rows of a wgmma."""
    if not isinstance(record, TmaRing):
        return False
    if record.m <= WGMMA_M // 4 and not record.swap_ab:
        return True
    remainder = record.tiles_m % record.cluster[0] or record.tiles_n % record.cluster[1]
    return bool(remainder) or (_pingpong(record) and record.ctas <= record.target.sms)


def _unlikely(record: Record) -> bool:
    """Whether the model is known to favour a variant too much. It never says so for Hopper.

    Elsewhere these are slices of k although tiles fill the GPU, two stages of cp.async in a longer loop, and for
    Blackwell clusters of four and tiles of two instructions. Such clusters and tiles read less from the L2, but its
    rate is no limit for pairs of CTAs: they read 46 bytes a clock and SM at the 1610 TFLOP/s published for 8192^3.
    """
    if record.target.capability.has_wgmma:
        return False
    needless = record.split_k > 1 and record.tiles_m * record.tiles_n >= record.target.sms
    shallow = isinstance(record, Sm80Multistage) and record.stages == 2 and record.k > 2 * record.k_step
    return needless or shallow or record.cluster_ctas > 2 or record.bn > 256


def _pingpong(record: Record) -> bool:
    """Whether two warpgroups of a CTA alternate between MMAs and epilogue, each with tiles of its own."""
    return isinstance(record, Warpgroups) and record.schedule == "pingpong"


def plainness(record: Record) -> tuple[Any, ...]:
    """The sort key among variants of equal time; the least is preferred. First ``merits``, then: no split, no shared
    last wave, no cluster, the usual k-step, no pingpong, the larger tile."""
    return (
        *merits(record),
        record.split_k,
        record.shares_last_wave,
        record.cluster_ctas,
        record.k_step != 64,
        _pingpong(record),
        -record.bm * record.bn,
    )


def merits(record: Record) -> tuple[int, bool, bool, bool, bool, bool]:
    """The part of ``plainness`` that counts more than how many problems share a kernel: little padding, enough SMs
    for the memory's rate, MMAs that hide a warp's instructions, a pair of CTAs for large problems, no predication, and
    no shared last wave of tcgen05, which ``cudal2gen prove`` does not cover."""
    padding = round(math.log2(1 + record.padding_waste))
    large = min(record.m, record.n, record.k) >= LARGE
    predicated = isinstance(record, Sm80Multistage) and record.predicated and not record.target.capability.has_wgmma
    paired = not large or record.cluster_ctas == 2
    unproven = record.shares_last_wave and record.target.capability.has_tcgen05
    return (padding, underuses_memory(record), exposes_issue(record), not paired, predicated, unproven)


def near_best(problem: Problem) -> list[Record]:
    """The variants within ``TIE`` of the least modelled time that have equal merits, plainest first.

    If some variants within ``MAX_PUBLISHED_LOSS`` of the best are published choices (``is_published``), only these
    count; if there are none, only those with tiles of published kernels (``is_wide``). For products of decoding, in
    which every kernel follows another one, only variants count that can overlap with the kernel before. On a GPU of
    ``BUSY_CTAS`` only those count that leave few SMs idle (``idles_sms``), if some are within ``MAX_BUSY_LOSS`` of the
    best.
    """
    offered = [record for record in variants(problem) if overlaps(record) or not decodes(problem)]
    times = {record: model.estimate(record).us for record in offered}
    least = min(times.values())
    published = [record for record in offered if is_published(record) and times[record] <= MAX_PUBLISHED_LOSS * least]
    wide = [record for record in offered if is_wide(record) and times[record] <= MAX_PUBLISHED_LOSS * least]
    busy = [record for record in offered if not idles_sms(record) and times[record] <= MAX_BUSY_LOSS * least]
    if preferred := published or wide or (busy if decodes(problem) and problem.gpu in BUSY_CTAS else []):
        times = {record: times[record] for record in preferred}
        least = min(times.values())
    near = sorted((record for record, us in times.items() if us <= TIE * least), key=plainness)
    source = PUBLISHED_SOURCE if published else SOURCE
    return [
        overlapping(record).at(problem, origin=Origin(source=source, structure="modelled", changed=()))
        for record in near
        if merits(record) == merits(near[0])
    ]


def decodes(problem: Problem) -> bool:
    """Whether a problem is one of the products of decoding. The few of them that the grid has with fp16 sums count on
    an H200 only, whose records for them were chosen as such."""
    counts = problem.gpu == "h200" or (problem.gpu in DECODING and problem.acc == "f32")
    return counts and (problem.m, problem.n, problem.k) in DECODE


@cache
def hopper_choices() -> dict[tuple[int, int, int], dict[str, Any]]:
    """The published H100 configurations, by (m, n, k)."""
    return {(facts["m"], facts["n"], facts["k"]): facts for facts in hopper_configurations()}


def is_published(record: Record) -> bool:
    """Whether a record has the tile, cluster and schedule that a published H100 kernel has for its problem."""
    facts = hopper_choices().get((record.m, record.n, record.k))
    if facts is None or not isinstance(record, Sm90Wgmma) or record.acc != "f32" or record.split_k > 1:
        return False
    schedule = "pingpong" if "Pingpong" in facts["kernel_schedule"] else "cooperative"
    return (
        (record.bm, record.bn, record.bk) == (facts["bm"], facts["bn"], facts["bk"])
        and list(record.cluster) == facts["cluster"][:2]
        and record.schedule == schedule
        and record.stream_k == facts["stream_k"]
    )


def is_wide(record: Record) -> bool:
    """Whether a record for another GPU than Hopper has a tile that published kernels take for large products: at least
    128 x 128 on sm_120 and before (CUTLASS, QuACK), at least 256 x 128 for a pair on sm_100 (QuACK, DeepGEMM)."""
    if record.target.capability.has_wgmma or min(record.m, record.n) < WIDE:
        return False
    paired = record.cluster_ctas == 2 or not record.target.capability.has_tcgen05
    return paired and record.bm * record.bn >= 128 * 128


def common_offers(offers: dict[Problem, list[Record]]) -> list[list[Record]]:
    """The offers of each problem. Products of decoding that differ only in their number of rows get common kernels.

    Up to 16 rows fit the columns of one wgmma, so one kernel serves 1, 8 and 16 rows and every number between. If no
    kernel is offered for all three, they take the offers for 16 rows.
    """
    for n, k in (*ROUTERS, *LINEARS):
        few = [problem for problem in offers if (problem.n, problem.k) == (n, k) and problem.m in FEW_ROWS]
        names = [{record.name for record in offers[problem]} for problem in few]
        common = set.intersection(*names) if few else set()
        for problem in few:
            own = [record for record in offers[problem] if record.name in common]
            offers[problem] = own or [record.at(problem) for record in offers[few[-1]]]
    return list(offers.values())


def kept_offers(own: Record | None, offers: list[Record]) -> list[Record]:
    """The catalog's own record alone if it is among a problem's offers, else the offers with its kernel, else all. A
    kernel that the model cannot tell from its best is not replaced, so that its proofs remain useful."""
    if own in offers:
        return [own]
    return [offer for offer in offers if own and offer.name == own.name] or offers


def cover(offers: list[list[Record]], present: set[str]) -> list[Record]:
    """For each problem one of its ``offers``, chosen so that few kernels are needed; in the order of ``offers``.

    The kernel that serves most problems without a record is chosen first (a greedy set cover). A problem counts
    ``PRESENT_WEIGHT`` times for a kernel whose name is in ``present``, because the catalog has it already.
    """
    uncovered = dict(enumerate({record.name: record for record in reversed(offer)} for offer in offers))
    chosen: dict[int, Record] = {}
    while uncovered:
        counts = Counter(name for by_name in uncovered.values() for name in by_name)
        best = max(counts, key=lambda name: (counts[name] * (PRESENT_WEIGHT if name in present else 1.0), name))
        for place in [place for place, by_name in uncovered.items() if best in by_name]:
            chosen[place] = uncovered.pop(place)[best]
    return [chosen[place] for place in range(len(offers))]


def underuses_memory(record: Record) -> bool:
    """Whether device memory bounds a record that leaves SMs idle. Too few SMs may not reach the rate of device memory,
    but the model assumes that they do."""
    bounds = model.estimate(record).bounds_us
    return idles_sms(record) and max(bounds, key=bounds.__getitem__) == "device memory"


def idles_sms(record: Record) -> bool:
    """Whether a record has fewer CTAs than SMs; for products of decoding, fewer than ``BUSY_CTAS``."""
    sms = record.target.sms
    enough = BUSY_CTAS.get(record.gpu, sms) if decodes(record.problem) else sms
    return record.ctas < enough and not record.shares_last_wave


def exposes_issue(record: Record) -> bool:
    """Whether a warp's own instructions take longer than the MMAs of a k-step, in a loop of more than a few steps."""
    return not model.hides_issue(record) and record.k >= LONG_K


def overlaps(record: Record) -> bool:
    """Whether a kernel can start before the previous one has ended."""
    return "pdl" in type(record).model_fields


def overlapping(record: Record) -> Record:
    """The record, with dependent launch if it can overlap and is short or a product of decoding. For up to
    ``MOST_EARLY_ROWS`` rows of the latter it asks for weights before it waits for the kernel before."""
    if not overlaps(record):
        return record
    decoding = decodes(record.problem)
    short = model.estimate(record).us < SHORT_US or decoding
    early = decoding and record.m <= MOST_EARLY_ROWS and "prefetch_b" in type(record).model_fields
    return record.at(record.problem, pdl=short, **({"prefetch_b": True} if early else {}))


def problems(gpu: str) -> Iterator[Problem]:
    """The problems of the A100's records, for another GPU, and for some the products of decoding."""
    grid = {(record.m, record.n, record.k) for record in catalog.load() if record.gpu == "a100"}
    for acc in ACCS:
        for m, n, k in sorted(grid.union(DECODE) if gpu in DECODING and acc == "f32" else grid):
            yield Problem(gpu=gpu, acc=acc, layout="tn", m=m, n=n, k=k)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gpu", choices=MODELLED, default="h200")
    options.add_argument("--write", action="store_true")
    options.add_argument("--report", action="store_true")
    options.add_argument("--every", type=int, default=1, help="only every so many problems")
    arguments = options.parse_args()
    own = {record.key: record for record in catalog.load() if record.gpu == arguments.gpu}
    tuned = {key for key, record in own.items() if record.origin.structure == "tuned"}
    untuned = [problem for problem in list(problems(arguments.gpu))[:: arguments.every] if problem.key not in tuned]
    with ProcessPoolExecutor() as pool:
        near = dict(zip(untuned, pool.map(near_best, untuned, chunksize=20), strict=True))
    offers = common_offers({problem: kept_offers(own.get(problem.key), near[problem]) for problem in untuned})
    records = cover(offers, {record.name for record in own.values()})
    if arguments.report:
        report(records)
        cross_check(records)
    if arguments.write:
        remaining = [record for record in catalog.load() if record.gpu != arguments.gpu or record.key in tuned]
        catalog.save([*remaining, *records], places.editable_catalog())


def cross_check(records: list[Record]) -> None:
    """Prints how the choices compare with nvidia-matmul-heuristics, another model; neither is a measurement."""
    try:
        import nvMatmulHeuristics as other
    except ImportError:
        print("nvidia-matmul-heuristics is not installed: no cross-check")
        return
    interface = other.NvMatmulHeuristicsInterfaceEx(
        backend=other.NvMatmulHeuristicsTarget.CUTLASS3,
        gpu=other.NvMatmulHeuristicsNvidiaGpu[records[0].target.heuristics],
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
    """Spearman's rank correlation; equal values get different ranks."""
    ranks = [np.argsort(np.argsort(values)) for values in (x, y)]
    return float(np.corrcoef(*ranks)[0, 1])


def report(records: list[Record]) -> None:
    """Prints how many records have each family, tile, split, schedule and swap."""
    print(len(records), "records,", len({record.name for record in records}), "distinct texts")
    for title, count in (
        ("family", Counter(record.family for record in records)),
        ("tile", Counter((record.acc, record.family, record.bm, record.bn) for record in records)),
        ("split", Counter((record.family, record.split_k, getattr(record, "reduce", "")) for record in records)),
        ("schedule", Counter((getattr(record, "schedule", ""), getattr(record, "cluster", "")) for record in records)),
        ("swap", Counter(getattr(record, "swap_ab", False) for record in records)),
    ):
        print(title, count.most_common(40))


if __name__ == "__main__":
    main()
