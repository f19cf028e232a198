"""States the claims of a proof of a kernel whose producer loads boxes into a ring: its launches and items of work.

m is (rows - 1) * bm + 1 + in_m with 0 <= in_m < bm, so the last tiles may reach beyond the problem. n and k are stated
in the same way. Tiles are numbered band by band. Within a band, the tiles at the same place along it have successive
numbers (``templates/macros/tiles.j2``). An item of work is a tile, or with split k a slice of a tile's k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from cudal2gen.kernel.problem import MAX_EXTENT
from cudal2gen.kernel.tma_ring import MAX_BAND, TmaRing
from cudal2gen.kernel.warpgroups import Warpgroups
from cudal2gen.validator.slice_facts import slice_of, with_slice, with_slices
from kernelproof.certificates import (
    ARRIVALS,
    PARTIALS,
    TILES,
    ZERO,
    Adders,
    Bounds,
    BoxMap,
    Claim,
    Contract,
    Facts,
    Matrix,
    NotCertified,
    Parts,
    Pipeline,
    Polynomial,
    Program,
    Reciprocal,
    Slices,
    TensorPlan,
    Tile,
    rests,
)
from kernelproof.ground.chips import WARP
from kernelproof.ground.integers import ceil_div

ALIGNMENT = 16  # bytes to which the operands' addresses are aligned
MOST_TILES = 1 << 30  # most CTA tiles of a launch
MOST_RESIDENT = 1 << 16  # most CTAs that a GPU runs at once
WARPGROUP = 4 * WARP  # threads
PARAMETERS = 13  # of a kernel; one more if the rest of D's columns has a tensor map of its own
BANDS = 8  # the parameter that is the struct Bands
LOADS = 8  # vectors that a thread loads at once when it adds partial sums (``templates/macros/parts.j2``)
_MOST_ADDRESS = 1 << 60  # upper bound of every name that stands for an address
named = Polynomial.named
# Names: the tiles across a last band that is narrower than the others, and stems of the names for divisors of Bands.
LAST_WIDTH, DIVISORS = "last_width", ("tiles", "width", "last")


def refusal(record: TmaRing) -> str:
    """Why no proof is tried for a record; empty if a proof is tried."""
    if not record.tensor_tiles and record.instruction not in ("mma.sync", "wgmma"):
        return f"the family {record.family} is not covered"
    in_clusters = record.cluster_ctas > 1 and not (record.tensor_tiles and min(record.cluster) == 1)
    reasons = {
        f"split_k={record.split_k} in clusters": record.summed_in == "workspace" and in_clusters,
        "stream_k": record.stream_k and (record.instruction != "wgmma" or record.stores_tiles != "tma"),
        "scheduler=clc": record.claims_tiles,
        "swap_ab": record.swap_ab and record.instruction == "mma.sync",
        "a D that is stored directly": record.split_k == 1 and not record.stream_k and record.stores_tiles != "tma",
        f"a D of {record.output.name}": record.output.bytes != 2,
        f"a fused {record.fusion}": bool(record.fusion),
        f"batch={record.batch}": record.batched or record.grouped,
    }
    return "; ".join(f"{reason} is not covered where a producer loads" for reason, holds in reasons.items() if holds)


def problems(record: TmaRing) -> tuple[str, ...]:
    """The launches that the claims of a record cover, in words for the reader of a certificate."""
    vector, of_d = record.element.vector, record.output.vector
    extents = f"m, n and k from 1 to {MAX_EXTENT}, tiles of {record.bm} x {record.bn}, k-tiles of {record.bk}"
    bands, shapes = (
        f"in bands of 1 to {MAX_BAND} along m or n",
        "A is ({}) and B is ({})".format(*record.along_k.shapes),
    )
    if record.summed_in == "cluster":
        return (
            f"{extents}, of which there are at least {record.split_k}",
            f"at most {MOST_TILES // record.split_k} tiles, {bands}",
            f"clusters of {record.split_k} CTAs, each of which has a slice of k of one tile",
            shapes,
            f"lda and ldb are multiples of {vector}, they and ldd from a row's length to {MAX_EXTENT}",
            f"A and B are at multiples of {ALIGNMENT} bytes, D of {record.output.bytes}",
        )
    if record.split_k > 1:
        return (
            f"{extents}, of which there are at least {record.split_k}",
            f"at most {MOST_TILES // record.split_k} tiles, {bands}",
            f"at most {MOST_RESIDENT} CTAs, which all run at once",
            shapes,
            f"lda and ldb are multiples of {vector}, they and ldd from a row's length to {MAX_EXTENT}",
            f"A, B and partial sums are at multiples of {ALIGNMENT} bytes, D of {record.output.bytes}",
            "counters are zero",
        )
    return (
        extents,
        f"at most {MOST_TILES} tiles, {bands}",
        *(() if record.cluster_ctas == 1 else (f"clusters of {record.cluster[0]} x {record.cluster[1]} tiles",)),
        shapes,
        f"lda and ldb are multiples of {vector}, ldd of {of_d}, from a row's length to {MAX_EXTENT}",
        f"A, B and D are at multiples of {ALIGNMENT} bytes",
    )


def claims(record: TmaRing, program: Program) -> Iterator[Claim]:
    """The claims that a proof of a record's kernel must show. Together they cover every launch and every item.

    A claim is about all CTAs of a cluster: that of rank 0 and its peers.
    """
    for along_n in (0, 1):
        for full in (True, False):
            item = any_item(along_n, full)
            kind = "a whole band" if full else "the last and narrower band"
            title = f"a tile of {kind}, along {'n' if along_n else 'm'}"
            ranks = range(record.cluster_ctas)
            if record.summed_in == "cluster":
                ctas = [_slice_contract(record, program, item, rank) for rank in ranks]
                pipelines = [_slice_pipeline(record, cta, item, rank) for rank, cta in enumerate(ctas)]
            else:
                ctas = [_contract(record, program, item, place_of(record, rank)) for rank in ranks]
                pipelines = [pipeline_of(record, program, item, rank) for rank in ranks]
                if record.summed_in == "workspace":
                    pipelines = [_with_parts(record, x, program, item) for x in pipelines]
            peers = tuple(zip(ctas[1:], pipelines[1:], strict=True))
            yield Claim(title, ctas[0], replace(pipelines[0], peers=peers))


class Bands(NamedTuple):
    """How a launch numbers its tiles (a tile of a cluster counts as one): the struct Bands of a kernel's text.

    ``rows``, ``cols``: how many rows and columns of tiles there are. ``band``: tiles across a full band. ``along_n``:
    1 if bands run along n, else 0. ``last``: tiles across the last band if that is narrower; of a launch in which it is
    not, or need not be known, a name.
    """

    rows: Polynomial
    cols: Polynomial
    band: Polynomial
    along_n: int
    last: Polynomial = named(LAST_WIDTH)

    @property
    def names(self) -> dict[str, Polynomial]:
        """The values of the names by which a launch is stated as long as no item is known."""
        values = {"tiles_m": self.rows, "tiles_n": self.cols, "band": self.band, LAST_WIDTH: self.last}
        return {name: value for name, value in values.items() if not value.equals(named(name))}

    @property
    def along(self) -> Polynomial:
        """Tiles along a band."""
        return self.cols if self.along_n else self.rows

    @property
    def across(self) -> Polynomial:
        """Tiles across all bands."""
        return self.rows if self.along_n else self.cols

    @property
    def reciprocals(self) -> list[Reciprocal]:
        """The numbers by which a kernel divides to find a tile's place, in the order of the struct Bands."""
        divisors = self.along * self.band, self.band, self.last
        return [
            Reciprocal(x, f"{name}_multiplier", f"{name}_shift") for name, x in zip(DIVISORS, divisors, strict=True)
        ]


class Item(NamedTuple):
    """The tile of a CTA's item, and its place among all tiles (a tile of a cluster counts as one).

    ``bands``: how tiles are numbered. ``number``: the tile's number. ``tile``: its row and column. ``full``: whether
    its band is a full one.
    """

    bands: Bands
    number: Polynomial
    tile: tuple[Polynomial, Polynomial]
    full: bool


def any_item(along_n: int, full: bool) -> Item:
    """An arbitrary item in a full band, or in the last band if that is narrower.

    Before its band there are ``bands`` full ones. The item's place in its band is ``at_along`` along it and ``in_band``
    across it. Every number is a sum of names that are at least 0, so that the item lies within its band, and the band
    within D, by construction: a band has ``in_band_rest`` tiles across after the item's and ``along_rest`` along it.
    After a full band ``more`` tiles may follow across; a last band is narrower than a full one by ``more`` + 1.
    """
    width = named("in_band") + named("in_band_rest") + 1  # tiles across the item's band
    band = width if full else width + named("more") + 1
    across = named("bands") * band + (band + named("more") if full else width)
    along = named("at_along") + named("along_rest") + 1
    at_across = named("bands") * band + named("in_band")
    number = named("bands") * band * along + named("at_along") * width + named("in_band")
    at = (named("at_along"), at_across)
    rows, cols = (across, along) if along_n else (along, across)
    bands = Bands(rows, cols, band, along_n) if full else Bands(rows, cols, band, along_n, width)
    return Item(bands, number, at[::-1] if along_n else at, full)


def common_bounds(record: TmaRing) -> Bounds:
    """Bounds of all names but those that describe the place of an item."""
    bounds: Bounds = {(name,): (1, _MOST_ADDRESS) for name in ("a", "b", "d", PARTIALS, ARRIVALS)}
    bounds |= {(f"{x}_vectors",): (1, MAX_EXTENT) for x in ("lda", "ldb", "ldd")}
    for x, size in zip("mnk", extents_of(record), strict=True):
        bounds |= rests.bounds(f"in_{x}", size)
    most = MOST_RESIDENT if record.summed_in == "workspace" else most_items_of(record)
    bounds |= {("cta_x",): (0, most), ("grid_x",): (1, most)}
    bounds[(TILES,)] = (1, ceil_div(MAX_EXTENT, record.bk))
    bounds[(LAST_WIDTH,)] = (1, MAX_BAND)
    bounds |= {(f"{name}_multiplier",): (1, (1 << 32) - 1) for name in DIVISORS}
    return bounds | {(f"{name}_shift",): (0, 31) for name in DIVISORS}


def extents_of(record: TmaRing) -> tuple[int, int, int]:
    """The extents of a cluster's tiles along m and n, and of a k-tile."""
    return record.bm * record.cluster[0], record.bn * record.cluster[1], record.bk


def most_items_of(record: TmaRing) -> int:
    """An upper bound of the number of items of all clusters.

    Clusters may reach beyond D by up to three tiles along m and n, where D has at most 2^20 tiles each. So the clusters
    have at most 3 * 2^20 + 3 * 2^20 + 9 tiles more than D, which is less than 2^23.
    """
    beyond = 1 << 23 if record.cluster_ctas > 1 else 0
    return (MOST_TILES + beyond * record.split_k) // record.cluster_ctas


def place_of(record: TmaRing, rank: int) -> tuple[Polynomial, Polynomial]:
    """The place along m and n, within its cluster, of the CTA with a rank."""
    return Polynomial.of(rank % record.cluster[0]), Polynomial.of(rank // record.cluster[0])


def rank_bounds(record: TmaRing) -> Bounds:
    """Bounds of the names of any place in a cluster."""
    return {(name,): (0, size - 1) for name, size in zip(("rank_m", "rank_n"), record.cluster, strict=True)}


def rank_of(record: TmaRing, place: tuple[Polynomial, Polynomial]) -> Polynomial:
    """The rank of the CTA at a place of its cluster."""
    return place[0] + place[1] * record.cluster[0]


def _entry(record: TmaRing, program: Program, along_n: int, place: tuple[Polynomial, Polynomial]) -> Contract:
    """The contract of the CTA at a place of its cluster, up to its first item."""
    most_rows, most_cols = (ceil_div(MAX_EXTENT, size) for size in extents_of(record)[:2])
    bounds = common_bounds(record) | {
        ("tiles_m",): (1, most_rows), ("tiles_n",): (1, most_cols), ("band",): (1, MAX_BAND),
        ("tiles_m", "tiles_n"): (1, most_items_of(record) // record.split_k), **rank_bounds(record),
    }  # fmt: skip
    rows, cols, count = named("tiles_m"), named("tiles_n"), record.split_k
    facts = Facts(bounds, [rows * cols * count - 1 - named("cta_x"), *rest_limits(record)])
    if count > 1:
        limits = named("grid_x") - 1 - named("cta_x"), most_items_of(record) - rows * cols * count
        facts = with_slices(facts.extended({}, *limits), count, record.bk)
    return launch_of(record, program, Bands(rows, cols, named("band"), along_n), facts, rank_of(record, place))


def pipeline_of(record: TmaRing, program: Program, item: Item, rank: int) -> Pipeline:
    """The roles of a CTA's warps, for the CTA of this rank in its cluster."""
    bands = item.bands
    entry = _entry(record, program, bands.along_n, place_of(record, rank))
    current = _item_number(record, item)
    # Items after the CTA's next one; negative if it has no next one.
    left = bands.rows * bands.cols * record.split_k - 1 - current - named("grid_x")
    ranks = range(record.cluster_ctas)
    own_ranks = [rank, rank ^ 1] if record.paired else [rank]  # a pair of CTAs multiplies together
    own_places = [(x % record.cluster[0], x // record.cluster[0]) for x in own_ranks]
    # CTAs in the same row or column of the cluster load boxes into each other's stages.
    senders = frozenset(
        x for x in ranks for at_m, at_n in own_places if x % record.cluster[0] == at_m or x // record.cluster[0] == at_n
    )
    # Rows of A and B that the CTA itself loads for a stage; other CTAs of its row or column load the rest.
    loaded_rows = record.part_a // record.sharers_a + record.part_b // record.sharers_b
    return Pipeline(
        record.stages, groups_of(record), ceil_div(MAX_EXTENT, record.bk), entry, named("cta_x"), bands.names, current,
        named("grid_x"), left, rank, len(ranks),
        loaded_rows * record.bk * record.element.bytes if len(ranks) > 1 else None, senders,
        tensor=TensorPlan(record.tensor_tiles, record.bk, record.paired) if record.tensor_tiles else None,
    )  # fmt: skip


def _with_parts(record: TmaRing, pipeline: Pipeline, program: Program, item: Item) -> Pipeline:
    """The pipeline with what the claim states about partial sums.

    Only the tile of a cluster's first CTA always begins within D. For the others there are two contracts.
    """
    count, ctas, ((first, end), *_) = record.split_k, record.cluster_ctas, groups_of(record)
    across_m, across_n = (size > 1 for size in record.cluster)
    place = named("rank_m") if across_m else ZERO, named("rank_n") if across_n else ZERO
    rank, tiles = rank_of(record, place), named("tiles_m") * named("tiles_n") * ctas
    parts = Parts(
        # Consumers share a tile's vectors of four fp32 sums. A thread has one vector in every 8 columns.
        count, record.bm * record.bn // (4 * (end - first)), record.cols // 8,
        ceil_div(LOADS, count),  # a thread loads each vector from all ``count`` slices
        tiles, item.number * ctas + rank, named("cta_x") * ctas + rank, named("grid_x") * ctas,
        record.atom_cols // 8 if record.tensor_tiles else 0,
    )  # fmt: skip
    cases = (False, True) if ctas > 1 else (None,)
    within, *passed = (_contract(record, program, item, place, beyond) for beyond in cases)
    adders = Adders(_entry(record, program, item.bands.along_n, place), within, tuple(passed))
    if not pipeline.rank:
        return replace(pipeline, parts=parts, adders=adders)
    own = place_of(record, pipeline.rank)
    stores = tuple(_contract(record, program, item, own, beyond) for beyond in cases)
    return replace(pipeline, parts=parts, adders=adders, stores=stores)


def groups_of(record: TmaRing) -> tuple[tuple[int, int], ...]:
    """The first thread of each group of consumers, and the one after its last."""
    if not isinstance(record, Warpgroups):
        return ((WARPGROUP, WARPGROUP + WARP * record.store_warps),)
    size = WARPGROUP * record.sharers
    return tuple((WARPGROUP + at, WARPGROUP + at + size) for at in range(0, WARPGROUP * record.consumers, size))


def _item_number(record: TmaRing, item: Item) -> Polynomial:
    """The number of an item of work. The slices of a tile have successive numbers."""
    return item.number * record.split_k + named("slice") if record.split_k > 1 else item.number


def rest_limits(record: TmaRing) -> list[Polynomial]:
    """Polynomials that are at least 0 because ``in_m``, ``in_n`` and ``in_k`` are below a tile's extents."""
    sizes = zip("mnk", extents_of(record), strict=True)
    return [limit for x, size in sizes for limit in rests.limits(f"in_{x}", size)]


def item_bounds(record: TmaRing, item: Item) -> Bounds:
    """Bounds of all names in the contract of a CTA that is computing an item."""
    most = max(ceil_div(MAX_EXTENT, record.bm), ceil_div(MAX_EXTENT, record.bn))
    bounds = common_bounds(record) | {(name,): (0, most) for name in ("bands", "at_along", "along_rest")}
    bounds |= {(name,): (0, MAX_BAND - 1) for name in ("in_band", "in_band_rest")}
    bounds[("more",)] = (0, most if item.full else MAX_BAND - 1)
    # The bands before the item's lie within D, so ``bands`` times the width of a band is at most all tiles across. Of a
    # full band, ``more`` counts tiles of later bands and is no part of that width.
    of_width = ("in_band", "in_band_rest") if item.full else ("in_band", "in_band_rest", "more")
    return bounds | {tuple(sorted(("bands", name))): (0, most) for name in of_width}


def _contract(
    record: TmaRing, program: Program, item: Item, place: tuple[Polynomial, Polynomial], beyond: bool | None = None
) -> Contract:  # fmt: skip
    """The contract of the CTA at a place of its cluster, while it computes an item. ``beyond``: whether its tile begins
    beyond D, None if that is not stated."""
    bounds = item_bounds(record, item) | rank_bounds(record)
    count, current = record.split_k, _item_number(record, item)
    items, most_items = item.bands.rows * item.bands.cols * count, most_items_of(record)
    # Each of these is at least 0. The third one bounds the number of the CTA's next item, so that it does not overflow.
    assumed = [
        most_items - items, most_items - 1 - current, 2 * most_items - 1 - current - named("grid_x"),
        MAX_BAND - item.bands.band, *rest_limits(record),
    ]  # fmt: skip
    facts = Facts(bounds, assumed)
    if count > 1:
        facts = with_slices(facts.extended({}, most_items // count - 1 - item.number), count, record.bk)
    rank = rank_of(record, place)
    contract = launch_of(record, program, item.bands, facts, rank)
    row, col = (
        (x * each + at) * size
        for x, each, at, size in zip(item.tile, record.cluster, place, (record.bm, record.bn), strict=True)
    )
    contract = replace(contract, tile=Tile(row, col, record.bm, record.bn))
    if count == 1:
        return contract
    first = named("first_tile") * record.bk
    if beyond is not None:
        d = contract.matrices[2]
        start, extent = (row, d.rows) if record.cluster[0] > 1 else (col, d.cols)
        edge = start - extent if beyond else extent - 1 - start
        contract = replace(contract, facts=contract.facts.extended({}, edge))
        if beyond:
            return replace(contract, tile=None, first=first)
    slab = Polynomial.of(record.bm * record.bn)
    partials = Matrix(PARTIALS, PARTIALS, ALIGNMENT, slab, items * record.cluster_ctas, slab, "f32", None)
    tile = item.number * record.cluster_ctas + rank
    return replace(
        contract, matrices=(*contract.matrices, partials), first=first,
        slices=Slices(count, named("slice"), tile, record.bm * record.bn, ZERO),
    )  # fmt: skip


def _slice_contract(record: TmaRing, program: Program, item: Item, rank: int) -> Contract:
    """The contract of a CTA whose cluster adds the slices of one tile. Its only item is the slice of its rank."""
    most, count = most_items_of(record), record.split_k
    tiles = item.bands.rows * item.bands.cols
    assumed = [most - tiles, most - 1 - item.number, MAX_BAND - item.bands.band, *rest_limits(record)]
    facts = with_slice(Facts(item_bounds(record, item), assumed), rank, count, record.bk)
    first, total = slice_of(rank, count)
    contract = launch_of(record, program, item.bands, facts, rank, total)
    row, col = (x * size for x, size in zip(item.tile, (record.bm, record.bn), strict=True))
    return replace(
        contract, tile=Tile(row, col, record.bm, record.bn), first=first * record.bk,
        special={"%ctaid.x": item.number * count + rank, "%nctaid.x": tiles * count},
    )  # fmt: skip


def _slice_pipeline(record: TmaRing, cta: Contract, item: Item, rank: int) -> Pipeline:
    """The roles of the warps of a CTA whose cluster adds the slices of one tile. ``cta``: its ``_slice_contract``.

    The CTA has one item: the step to its next item is 0, and -1 says that there is none.
    """
    return Pipeline(
        record.stages, groups_of(record), ceil_div(MAX_EXTENT, record.bk), cta, item.number, {}, item.number, ZERO,
        Polynomial.of(-1), rank, record.split_k, None, frozenset((rank,)), adds=True,
    )  # fmt: skip


def launch_of(
    record: TmaRing,
    program: Program,
    bands: Bands,
    facts: Facts,
    rank: Polynomial | int,
    total: Polynomial | None = None,
) -> Contract:
    """The contract of a launch, for the CTA of this rank. ``total``: all k-tiles, if the rank decides which of them
    an item has. Raises NotCertified if the kernel has another number of parameters than the launcher passes."""
    launch = record.launch
    rest = launch.box_d_rest_cols
    # Tensor maps of A, B and D are parameters 0 to 2; a map for the rest of D's columns is the last one.
    if len(program.offsets) != (expected := PARAMETERS + bool(rest)):
        raise NotCertified(f"the kernel has {len(program.offsets)} parameters, not the launcher's {expected}")
    item_k = named(TILES) * record.bk  # the k that an item sums over
    if total is None:
        total = named("all_tiles") if record.split_k > 1 else named(TILES)
    high, wide, _ = extents_of(record)
    # The last tile has in_m + 1 rows within the problem; likewise n and k.
    m, n, k = (
        covered - (size - 1) + rests.number(f"in_{x}", size)
        for x, covered, size in (
            ("m", bands.rows * high, high), ("n", bands.cols * wide, wide), ("k", total * record.bk, record.bk)
        )
    )  # fmt: skip
    element, output, along = record.element, record.output, record.along_k
    lda, ldb, ldd = (named(f"{x}_vectors") for x in ("lda", "ldb", "ldd"))
    alignment = output.bytes if record.split_k > 1 else ALIGNMENT
    matrices = (
        Matrix("A", "a", ALIGNMENT, lda, m, k, element.name, False, across=not along.a),
        Matrix("B", "b", ALIGNMENT, ldb, n, k, element.name, False, across=not along.b),
        Matrix("D", "d", alignment, ldd, m, n, output.name, True),
    )
    boxes = [
        ("A", 0, launch.box_a_rows, launch.box_a_cols), ("B", 1, launch.box_b_rows, launch.box_b_cols),
        *([("D", 2, launch.box_d_rows, launch.box_d_cols)] if launch.box_d_cols else []),
    ]  # fmt: skip
    if rest:
        boxes.append(("D", PARAMETERS, launch.box_d_rows, rest))
    maps = tuple(
        BoxMap(name, program.offsets[parameter], box_rows, box_cols, _span(box_cols * element.bytes))
        for name, parameter, box_rows, box_cols in boxes
    )
    values = {
        3: (named("d", alignment), 64), 4: (ldd, 32), 5: (m, 32), 6: (n, 32), 7: (k, 32), 9: (named("policy_a"), 64),
        10: (named("policy_b"), 64), 11: (named(PARTIALS, ALIGNMENT), 64), 12: (named(ARRIVALS, 4), 64),
    }  # fmt: skip
    parameters = {program.offsets[number]: value for number, value in values.items()}
    words = [Polynomial.of(bands.along_n), bands.along, bands.across]
    for each in bands.reciprocals:
        words += [each.divisor, named(each.multiplier), named(each.shift)]
    parameters |= {program.offsets[BANDS] + 4 * i: (word, 32) for i, word in enumerate(words)}
    facts = replace(facts, reciprocals=bands.reciprocals)
    ctas = record.cluster_ctas
    special = {"%ctaid.x": named("cta_x") * ctas + rank, "%nctaid.x": named("grid_x") * ctas}
    return Contract(record.threads, record.smem_bytes, parameters, special, matrices, item_k, None, facts, maps=maps)


def _span(row_bytes: int) -> int:
    """The span, in bytes, of the swizzle that the launcher chooses for a box with rows of ``row_bytes``
    (``map_cache.h``)."""
    return row_bytes if row_bytes in (64, 128) else 32
