"""Hypothesis strategies that draw legal records of every family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

from hypothesis import assume
from hypothesis import strategies as st
from pydantic import ValidationError

from cudal2gen.kernel import (
    GPUS,
    IllegalRecord,
    Record,
    Sm80Direct,
    Sm80Multistage,
    Sm90Small,
    Sm90Wgmma,
    Sm100Tcgen05,
    Sm120Mma,
    parse,
)
from cudal2gen.kernel.fusion import PARTS, PLAIN, Fusion
from cudal2gen.kernel.problem import Batch, Layout, aligned, rows_along_k

# The origin of the plain records.
ORIGIN = {"source": "test", "structure": "modelled", "changed": []}

# A plain record of each family, as JSON fields.
MULTISTAGE: dict[str, Any] = {
    "gpu": "a100",
    "acc": "f16",
    "layout": "tn",
    "m": 4096,
    "n": 4096,
    "k": 4096,
    "family": "sm80_multistage",
    "origin": ORIGIN,
    "bm": 128,
    "bn": 128,
    "bk": 64,
    "stages": 3,
    "mma_repeat": [2, 2, 1],
    "min_blocks": 1,
    "smem_swizzle": [3, 3, 3],
    "smem_swizzle_c": [3, 3, 3],
    "g2s_cols": 4,
    "g2s_slot": 0,
    "raster": "plain",
    "swizzle_stride": None,
    "prefetch": {"kind": "single", "distance": None},
    "unroll_k": False,
    "bake": [],
    "epilogue": "staged",
    "c_batch": 4,
    "r2s_bytes": 4,
    "padding": "none",
    "split_k": 1,
}
DIRECT: dict[str, Any] = {
    "gpu": "a100",
    "acc": "f16",
    "layout": "tn",
    "m": 64,
    "n": 64,
    "k": 128,
    "family": "sm80_direct",
    "origin": ORIGIN,
    "bm": 32,
    "bn": 32,
    "mma_repeat": [1, 1, 1],
    "unroll_k": False,
    "bake": [],
    "padding": "none",
    "split_k": 1,
}
WGMMA: dict[str, Any] = {
    "gpu": "h200",
    "acc": "f32",
    "layout": "tn",
    "m": 4096,
    "n": 4096,
    "k": 4096,
    "family": "sm90_wgmma",
    "origin": ORIGIN,
    "bm": 128,
    "bn": 256,
    "swap_ab": False,
    "bk": 64,
    "stages": 4,
    "cluster": [1, 1],
    "consumers": 2,
    "atom_n": 256,
    "schedule": "cooperative",
    "raster_axis": "m",
    "raster_group": 8,
    "split_k": 1,
    "reduce": None,
    "epilogue": "tma",
    "registers": [40, 232],
    "hint_a": "normal",
    "hint_b": "normal",
    "pdl": False,
    "min_blocks": 1,
}
SINGLE_SHOT: dict[str, Any] = {
    "gpu": "h200",
    "acc": "f32",
    "layout": "tn",
    "m": 64,
    "n": 128,
    "k": 256,
    "family": "sm90_small",
    "origin": ORIGIN,
    "bm": 32,
    "bn": 64,
    "k_chunks": 4,
    "split_k": 1,
}
TENSOR: dict[str, Any] = {
    "gpu": "b200",
    "acc": "f32",
    "layout": "tn",
    "m": 4096,
    "n": 4096,
    "k": 4096,
    "family": "sm100_tcgen05",
    "origin": ORIGIN,
    "bm": 128,
    "bn": 256,
    "swap_ab": False,
    "bk": 64,
    "stages": 4,
    "cluster": [1, 1],
    "pair": False,
    "accumulators": 2,
    "raster_axis": "m",
    "raster_group": 8,
    "split_k": 1,
    "epilogue": "tma",
    "hint_a": "normal",
    "hint_b": "normal",
    "pdl": False,
}
WARPS: dict[str, Any] = {
    "gpu": "rtx5090",
    "acc": "f32",
    "layout": "tn",
    "m": 4096,
    "n": 4096,
    "k": 4096,
    "family": "sm120_mma",
    "origin": ORIGIN,
    "bm": 128,
    "bn": 128,
    "swap_ab": False,
    "bk": 64,
    "stages": 2,
    "consumers": 2,
    "schedule": "cooperative",
    "raster_axis": "m",
    "raster_group": 8,
    "split_k": 1,
    "epilogue": "tma",
    "registers": [40, 232],
    "hint_a": "normal",
    "hint_b": "normal",
    "pdl": False,
    "min_blocks": 1,
}
# Changes of MULTISTAGE for a small tile and problem.
SMALL: dict[str, Any] = {
    "bm": 32,
    "bn": 32,
    "bk": 32,
    "mma_repeat": [1, 2, 1],
    "c_batch": 1,
    "m": 64,
    "n": 64,
    "k": 128,
}


Made = TypeVar("Made", bound=Record)


@dataclass(frozen=True)
class Maker(Generic[Made]):
    """Makes records of a family: a plain record with some fields changed to JSON values."""

    family: type[Made]
    fields: dict[str, Any]

    def __call__(self, **changes: Any) -> Made:
        """The plain record with these changes. Raises IllegalRecord."""
        record = parse(self.fields | changes)
        assert isinstance(record, self.family)
        return record


multistage = Maker(Sm80Multistage, MULTISTAGE)
direct = Maker(Sm80Direct, DIRECT)
wgmma = Maker(Sm90Wgmma, WGMMA)
tcgen05 = Maker(Sm100Tcgen05, TENSOR)
warp_mma = Maker(Sm120Mma, WARPS)
single_shot = Maker(Sm90Small, SINGLE_SHOT)


def prefetch(kind: str, distance: int | None = None) -> dict[str, Any]:
    """The change of a record to this way of prefetching."""
    return {"prefetch": {"kind": kind, "distance": distance}}


# Changes of MULTISTAGE, each a way to store D.
STAGED_16 = {"r2s_bytes": 16, "smem_swizzle_c": None}
STAGED_8 = {"r2s_bytes": 8, "smem_swizzle_c": None}
TO_GLOBAL = {"epilogue": "global", "c_batch": None, "r2s_bytes": None, "smem_swizzle_c": None}
STRAIGHT = {"epilogue": "direct", "c_batch": None}

# The number of tiles along an axis of D.
problem_sizes = st.integers(1, 4)
layouts = st.sampled_from(get_args(Layout))


def _divisors(number: int, candidates: tuple[int, ...]) -> list[int]:
    """The candidates that divide a number."""
    return [divisor for divisor in candidates if number % divisor == 0]


@st.composite
def multistage_records(draw: st.DrawFn, max_tile: int = 256) -> Sm80Multistage:
    """Legal sm80_multistage records over the whole space, odd tiles and maps included."""
    repeat_m, repeat_n = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 2), (2, 4), (1, 3)]))
    bm = 16 * repeat_m * draw(st.integers(1, max(1, max_tile // (32 * repeat_m))))
    bn = 16 * repeat_n * draw(st.integers(1, max(1, max_tile // (32 * repeat_n))))
    bk = draw(st.sampled_from([16, 32, 48, 64, 80, 96, 128]))
    threads = 32 * repeat_m * repeat_n
    blocks = bk // 16
    gpu = draw(st.sampled_from(sorted(GPUS)))
    ring = (bm + bn) * bk * 2
    stages = draw(st.integers(1, max(1, min(13, GPUS[gpu].capability.smem_block_bytes // ring))))
    kinds = (
        ["none", "single_intra_tile"]
        if blocks == 1
        else ["single", "single_intra_tile", "none", "pingpong", "staggered"]
    )
    kind = draw(st.sampled_from(kinds + (["multi"] if blocks > 2 else [])))
    distance = draw(st.integers(2, blocks - 1)) if kind == "multi" else None
    ahead = {"none": 1, "single_intra_tile": 1}.get(kind, distance or 1)
    padding = draw(st.sampled_from(["none", "predicate", "pad"]))
    split_k = draw(st.sampled_from([1, 1, 1, 2, 3]))
    m, n = bm * draw(problem_sizes), bn * draw(problem_sizes)
    k = bk * draw(st.integers(split_k, 6))
    if padding != "none":
        m, n = draw(st.integers(1, m)), draw(st.integers(1, n))
    if padding == "predicate":
        k = max(8, k - 8 * draw(st.integers(0, bk // 8 - 1)))
    assume(-(-k // bk) >= split_k)
    epilogue = draw(st.sampled_from(["staged", "direct", "global"]))
    r2s_bytes = draw(st.sampled_from([4, 8, 16])) if epilogue != "global" else None
    mma_tiles = bm * bn // (threads * 8)
    raster = draw(st.sampled_from(["plain", "zsplit", "persistent"]))
    bake = draw(st.sampled_from([[], [], ["k"]]))
    fields = {
        **MULTISTAGE,
        "gpu": gpu,
        "acc": draw(st.sampled_from(["f16", "f32"])),
        "layout": draw(layouts),
        "m": m,
        "n": n,
        "k": k,
        "bm": bm,
        "bn": bn,
        "bk": bk,
        "stages": stages,
        "mma_repeat": [repeat_m, repeat_n, 1],
        "smem_swizzle": draw(st.sampled_from([[3, 3, 3], [2, 3, 3], [2, 4, 3], [3, 3, 4], [0, 3, 3], [1, 3, 2]])),
        "smem_swizzle_c": draw(st.sampled_from([[3, 3, 3], [2, 3, 3], [0, 3, 0]])) if r2s_bytes == 4 else None,
        "g2s_cols": draw(st.sampled_from([c for c in _divisors(bk // 8, (1, 2, 4, 8, 16)) if threads % c == 0])),
        "g2s_slot": 0 if stages == 1 else draw(st.integers(0, blocks - ahead)),
        "raster": raster,
        "swizzle_stride": draw(st.integers(1, 2 * n + bn)) if raster == "zsplit" else None,
        "prefetch": {"kind": kind, "distance": distance},
        "unroll_k": bool(bake) and split_k == 1 and draw(st.booleans()),
        "bake": bake,
        "epilogue": epilogue,
        "c_batch": draw(st.integers(1, max(1, min(mma_tiles, stages * ring // (threads * 16)))))
        if epilogue == "staged"
        else None,
        "r2s_bytes": r2s_bytes,
        "padding": padding,
        "split_k": split_k,
    }
    try:
        return multistage(**fields)
    except IllegalRecord:
        # Rules that this strategy does not model may be broken: block sizes of swizzles, staging of large tiles.
        assume(False)
        raise


@st.composite
def direct_records(draw: st.DrawFn) -> Sm80Direct:
    """Legal sm80_direct records."""
    repeat_m, repeat_n = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]))
    bm, bn = 16 * repeat_m * draw(st.integers(1, 2)), 16 * repeat_n * draw(st.integers(1, 2))
    padding = draw(st.sampled_from(["none", "predicate", "pad"]))
    split_k = draw(st.sampled_from([1, 1, 2, 3]))
    m, n, k = bm * draw(problem_sizes), bn * draw(problem_sizes), 32 * draw(st.integers(split_k, 5))
    if padding != "none":
        m, n = draw(st.integers(1, m)), draw(st.integers(1, n))
    if padding == "predicate":
        k = max(8, k - 8 * draw(st.integers(0, 3)))
    bake = draw(st.sampled_from([[], ["k"]]))
    layout = draw(st.sampled_from(["tn", "nn"]))
    assume(-(-k // 32) >= split_k)
    return direct(
        gpu=draw(st.sampled_from(sorted(GPUS))),
        acc=draw(st.sampled_from(["f16", "f32"])),
        layout=layout,
        m=m,
        n=n,
        k=k,
        bm=bm,
        bn=bn,
        mma_repeat=[repeat_m, repeat_n, 1],
        unroll_k=bool(bake) and split_k == 1 and draw(st.booleans()),
        bake=bake,
        padding=padding,
        split_k=split_k,
    )


def _rows_of_a(draw: st.DrawFn, layout: Layout, bm: int, short: int) -> int:
    """Draws m: any number, or for an A (k,m) a multiple of a vector minus ``short``."""
    m = draw(st.integers(1, 3 * bm))
    return m if rows_along_k(layout).a else aligned(m, 8) - short


def _ring(
    draw: st.DrawFn, tile: tuple[int, int, int], ring_bytes: int, swap_ab: bool, split_k: int, stream_k: bool
) -> dict[str, Any]:
    """Draws the problem and the fields that all records with a TMA ring have. ``tile``: bm, bn, bk. ``ring_bytes``: the
    most shared memory of the ring."""
    bm, bn, bk = tile
    short = draw(st.sampled_from([0, 0, 1, 7]))  # elements that rows lack to whole vectors of 8
    layout = draw(layouts)
    return {
        "acc": "f32" if stream_k else draw(st.sampled_from(["f16", "f32"])),
        "layout": layout,
        "m": _rows_of_a(draw, layout, bm, short),
        "n": 8 * draw(st.integers(1, 3 * bn // 8)) - short,
        "k": 8 * draw(st.integers((split_k - 1) * bk // 8 + 1, 6 * bk)) - short,
        "padding": "pad" if short else "none",
        "bm": bm,
        "bn": bn,
        "bk": bk,
        "swap_ab": swap_ab,
        "stages": draw(st.integers(2, max(2, min(8, ring_bytes // ((bm + bn) * bk * 2))))),
        "raster_axis": draw(st.sampled_from(["m", "n"])),
        "raster_group": draw(st.integers(1, 9)),
        "split_k": split_k,
        "epilogue": draw(st.sampled_from(["tma", "direct"])),
        "hint_a": draw(st.sampled_from(["normal", "first", "last"])),
        "hint_b": draw(st.sampled_from(["normal", "first", "last"])),
        "pdl": draw(st.booleans()),
        "stream_k": stream_k,
    }


@st.composite
def wgmma_records(draw: st.DrawFn, max_cols: int = 256) -> Sm90Wgmma:
    """Legal sm90_wgmma records over the whole space, odd widths and clusters beyond the matrix included."""
    swap_ab = draw(st.booleans())
    schedule = draw(st.sampled_from(["cooperative", "cooperative", "pingpong"]))
    consumers = 2 if schedule == "pingpong" else draw(st.sampled_from([1, 2, 3]))
    sharers = 1 if schedule == "pingpong" else consumers
    rows = 64 * sharers * draw(st.sampled_from([1, 1, 2]))
    cols = 16 * draw(st.integers(1, max_cols // 16))
    atom_n = draw(st.sampled_from([n for n in range(16, 257, 16) if cols % n == 0]))
    bm, bn = (cols, rows) if swap_ab else (rows, cols)
    reduce = draw(st.sampled_from([None, None, "cluster", "workspace"]))
    split_k = {None: 1, "cluster": draw(st.sampled_from([2, 4, 8])), "workspace": draw(st.integers(2, 5))}[reduce]
    clusters = [[1, 1]] if reduce == "cluster" else [[1, 1], [2, 1], [1, 2], [2, 2], [4, 1]]
    bk = draw(st.sampled_from([64, 128]))
    stream_k = reduce is None and schedule == "cooperative" and draw(st.booleans())
    fields = _ring(draw, (bm, bn, bk), 220_000, swap_ab, split_k, stream_k) | {
        "gpu": draw(st.sampled_from(["h100", "h200", "h20"])),
        "cluster": draw(st.sampled_from(clusters)),
        "consumers": consumers,
        "atom_n": atom_n,
        "schedule": "cooperative" if reduce == "cluster" else schedule,
        "reduce": reduce,
        "prefetch_b": draw(st.booleans()),
        **({"epilogue": "direct"} if reduce == "cluster" else {}),
        "registers": draw(st.sampled_from({1: [None], 2: [None, [40, 232]], 3: [None, [32, 160]]}[consumers])),
        "min_blocks": 1,
    }
    try:
        return wgmma(**fields)
    except IllegalRecord:
        # This strategy does not model registers and shared memory.
        assume(False)
        raise


@st.composite
def tcgen05_records(draw: st.DrawFn) -> Sm100Tcgen05:
    """Legal sm100_tcgen05 records over the whole space, clusters beyond the matrix included."""
    swap_ab, pair = draw(st.booleans()), draw(st.booleans())
    step = 32 if pair else 16
    widths = [*range(step, 257, step), *([] if swap_ab else range(256 + 2 * step, 513, 2 * step))]
    cols = draw(st.sampled_from(widths))
    bm, bn = (cols, 128) if swap_ab else (128, cols)
    clusters = [[1, 1], [2, 1], [1, 2], [2, 2]] if not pair else [[1, 2]] if swap_ab else [[2, 1], [2, 2]]
    bk = draw(st.sampled_from([64, 128]))
    split_k = draw(st.sampled_from([1, 1, 2, 3]))
    stream_k = split_k == 1 and draw(st.booleans())
    claims = split_k == 1 and not stream_k and draw(st.booleans())
    fields = _ring(draw, (bm, bn, bk), 200_000, swap_ab, split_k, stream_k) | {
        "cluster": draw(st.sampled_from(clusters)),
        "pair": pair,
        "accumulators": 1 if cols > 256 else draw(st.sampled_from([1, 2])),
        "scheduler": "clc" if claims else "static",
        "prefetch_b": draw(st.booleans()),
    }
    try:
        return tcgen05(**fields)
    except IllegalRecord:
        # This strategy does not model shared memory and tensor memory.
        assume(False)
        raise


@st.composite
def warp_mma_records(draw: st.DrawFn, max_cols: int = 192) -> Sm120Mma:
    """Legal sm120_mma records over the whole space."""
    swap_ab, schedule = draw(st.booleans()), draw(st.sampled_from(["cooperative", "pingpong"]))
    consumers = 2 if schedule == "pingpong" else draw(st.integers(1, 3))
    rows = 64 * (1 if schedule == "pingpong" else consumers) * draw(st.integers(1, 2))
    cols = 16 * draw(st.integers(1, max_cols // 16))
    bm, bn = (cols, rows) if swap_ab else (rows, cols)
    split_k = draw(st.sampled_from([1, 1, 2, 3]))
    stream_k = split_k == 1 and schedule == "cooperative" and draw(st.booleans())
    fields = _ring(draw, (bm, bn, 64), 80_000, swap_ab, split_k, stream_k) | {
        "consumers": consumers,
        "schedule": schedule,
        "registers": draw(st.sampled_from([None, [40, 232]])) if consumers == 2 else None,
    }
    try:
        return warp_mma(**fields)
    except IllegalRecord:
        # This strategy does not model registers and shared memory.
        assume(False)
        raise


@st.composite
def single_shot_records(draw: st.DrawFn) -> Sm90Small:
    """Legal sm90_small records."""
    bm, bn = draw(st.sampled_from([16, 32, 64, 96, 128])), draw(st.sampled_from([16, 32, 64, 96, 128]))
    split_k, k_chunks = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 6))
    short = draw(st.sampled_from([0, 0, 1, 7]))  # elements that rows lack to whole vectors of 8
    layout = draw(layouts)
    try:
        return single_shot(
            gpu=draw(st.sampled_from(["h100", "h200", "h20"])),
            acc=draw(st.sampled_from(["f16", "f32"])),
            layout=layout,
            m=_rows_of_a(draw, layout, bm, short),
            n=8 * draw(st.integers(1, 3 * bn // 8)) - short,
            k=8 * draw(st.integers((split_k - 1) * 8 + 1, k_chunks * split_k * 8)) - short,
            padding="pad" if short else "none",
            bm=bm,
            bn=bn,
            k_chunks=k_chunks,
            split_k=split_k,
            pdl=draw(st.booleans()),
        )
    except IllegalRecord:
        # This strategy does not model shared memory, nor partial sums that do not fit into the operands' memory.
        assume(False)
        raise


@st.composite
def fusions(draw: st.DrawFn) -> Fusion:
    """Legal fusions, including the plain product: each field has its neutral value or one of its others."""
    by_field: dict[tuple[str, ...], list[str]] = {}
    for part, fields in PARTS.items():
        by_field.setdefault(tuple(fields), [""]).append(part)
    parts = [part for alternatives in by_field.values() if (part := draw(st.sampled_from(alternatives)))]
    while parts:
        try:
            return Fusion.model_validate("+".join(parts))
        except ValidationError:
            # Some parts exclude each other.
            parts.remove(draw(st.sampled_from(parts)))
    return PLAIN


batches: st.SearchStrategy[Batch] = st.sampled_from(get_args(Batch))


@st.composite
def records_of_any_product(
    draw: st.DrawFn,
    of: st.SearchStrategy[Record],
    fusion: st.SearchStrategy[Fusion] | None = None,
    batch: st.SearchStrategy[Batch] = batches,
) -> Record:
    """Legal records of any types, fusion and batch. If sums are in fp32, A and B may be bf16, and D fp32. If a family
    refuses a combination, parts are left out until it is legal."""
    record = draw(of)
    types: dict[str, Any] = {}
    if record.acc == "f32":
        types = {"ab": draw(st.sampled_from(["f16", "bf16"])), "d": draw(st.sampled_from(["same", "same", "f32"]))}
    fused = {"fusion": draw(fusions() if fusion is None else fusion)}
    several = {"batch": draw(batch)}
    singly = draw(st.permutations([fused, several]))
    for changes in ({**types, **fused, **several}, *({**types, **each} for each in singly), types):
        try:
            problem = record.problem.revised(**changes)
            return record.at(problem, **record.output_fields(problem))
        except IllegalRecord:
            continue
    # The record has no room for the wider buffers of an fp32 D.
    assume(False)
    raise AssertionError


plain_records = st.one_of(
    multistage_records(),
    direct_records(),
    wgmma_records(),
    tcgen05_records(),
    warp_mma_records(),
    single_shot_records(),
)
records = records_of_any_product(plain_records)
