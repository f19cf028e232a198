"""States what a proof is about: the launches that the launcher accepts for a record's kernel, and the main loop's ring.

A proof covers all sizes at once, so sizes are polynomials of named integers. If a CTA's tile is in row ``cta_y`` of
tiles, and ``below`` further rows follow, then m is (cta_y + below + 1) * bm: the tile lies within D by construction. n
is stated in the same way, and k as a number of k-steps. Leading dimensions are multiples of a vector, pointers are
multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from cudal2gen.kernel import Record
from cudal2gen.kernel.launch import Cluster, Tiles
from cudal2gen.kernel.mma_sync import MAX_GRID_YZ, MmaSyncKernel
from cudal2gen.kernel.problem import MAX_EXTENT
from cudal2gen.kernel.record import Ring as RingRecord
from cudal2gen.kernel.tma_ring import TmaRing
from cudal2gen.validator import ring_contracts, shot_contracts, wave_contracts
from cudal2gen.validator.slice_facts import with_slices
from kernelproof.certificates import (
    ARRIVALS,
    PARTIALS,
    TILES,
    ZERO,
    Bounds,
    Claim,
    Contract,
    Facts,
    Items,
    Matrix,
    NotCertified,
    Polynomial,
    Program,
    Ring,
    Slices,
    Tile,
)

ALIGNMENT = 16  # bytes to which the operands' addresses are aligned
MOST_TILES = 1 << 30  # most CTA tiles of a launch
_MOST_ADDRESS = 1 << 60  # upper bound of every name that stands for an address or a distance in elements
named = Polynomial.named


def refusal(record: Record) -> str:
    """Why no proof is tried for a record; empty if a proof is tried."""
    if isinstance(record, TmaRing):
        return ring_contracts.refusal(record)
    if isinstance(record.launch, Cluster):
        return shot_contracts.refusal(record)
    if not isinstance(record, MmaSyncKernel) or not isinstance(record.launch, Tiles):
        return f"the family {record.family} is not covered"
    reasons = {
        "tiles that reach beyond the problem (padding=predicate)": record.predicated,
        f"split_k={record.split_k} with raster=persistent": record.split_k > 1 and record.launch.raster == "persistent",
        f"split_k={record.split_k} with batch={record.batch}": record.split_k > 1 and record.batched,
        f"a fused {record.fusion}": bool(record.fusion),
        f"batch={record.batch}": record.batch == "grouped",
        f"batch={record.batch} with raster={record.launch.raster}": record.batched and record.launch.raster != "plain",
    }
    return "; ".join(f"{reason} is not covered" for reason, holds in reasons.items() if holds)


def claims(record: Record, program: Program) -> Iterator[Claim]:
    """The claims that a proof of a record's kernel must show. Together they cover every launch and every CTA.

    Raises NotCertified for a record that ``refusal`` refuses.
    """
    if why := refusal(record):
        raise NotCertified(why)
    if isinstance(record, TmaRing):
        yield from (wave_contracts if record.stream_k else ring_contracts).claims(record, program)
        return
    if isinstance(record.launch, Cluster):
        yield from shot_contracts.claims(record, program)
        return
    assert isinstance(record, MmaSyncKernel)
    assert isinstance(record.launch, Tiles)
    stages = record.stages if isinstance(record, RingRecord) else 1
    # An iteration of the main loop copies a k-tile ahead, or without a ring loads one. The last stages - 1 iterations
    # (at least one) do not, because k has ended.
    ring = Ring(stages, max(1, stages - 1), MAX_EXTENT // record.k_step, record.baked_k // record.k_step)
    for grid in {"plain": _plain, "zsplit": _zsplit, "persistent": _persistent}[record.launch.raster](record):
        items = None
        if grid.entry is not None:
            entry = _contract(record, grid.entry, program.offsets)
            items = Items(entry, named("cta_x"), grid.names, grid.item, named("grid_x"), grid.last)
        for arrived, case in _arrivals(record, grid):
            contract = _contract(record, grid, program.offsets, arrived)
            yield Claim(grid.title + case, contract, replace(ring, items=items))


def _arrivals(record: MmaSyncKernel, grid: _Grid) -> Iterator[tuple[Polynomial, str]]:
    """The cases in which a CTA may arrive at its tile's counter, if k is split; a single case otherwise.

    Yields how many CTAs of the tile arrived before it, and what the claim's title says of the case.
    """
    if record.split_k == 1 or grid.tile is None:
        yield ZERO, ""
        return
    yield named("arrived"), "; others of the tile arrive after it"
    yield Polynomial.of(record.split_k - 1), "; it arrives last of its tile"


def problems(record: Record) -> tuple[str, ...]:
    """The launches that the claims of a record cover, in words for the reader of a certificate. The record must not be
    refused."""
    if isinstance(record, TmaRing):
        return wave_contracts.problems(record) if record.stream_k else ring_contracts.problems(record)
    if isinstance(record.launch, Cluster):
        return shot_contracts.problems(record)
    assert isinstance(record, MmaSyncKernel)
    vector, of_d = record.element.vector, record.output.vector
    k = f"k = {record.baked_k}" if record.baked_k else f"k of {record.k_step}"
    along = record.along_k
    packed = [f"{ld} = k" for ld, packs in zip(("lda", "ldb"), along, strict=True) if record.baked_k and packs]
    by_rows = not isinstance(record.launch, Tiles) or record.launch.raster != "persistent"
    lines = [
        f"m a positive multiple of {record.bm}, n of {record.bn}, {k}; each at most {MAX_EXTENT}",
        f"at most {MAX_GRID_YZ} rows of tiles" if by_rows else f"at most {MOST_TILES} tiles",
        "A is ({}) and B is ({})".format(*along.shapes),
        f"lda and ldb are multiples of {vector}, ldd of {of_d}, from a row's length to {MAX_EXTENT}",
        *packed,
        f"A, B and D are at multiples of {ALIGNMENT} bytes",
    ]
    if record.batched:
        lines.append(f"any number of products; distances of their matrices are multiples of {ALIGNMENT} bytes")
    if record.padding == "pad":
        lines.append("callers copy other sizes to such ones")
    return tuple(lines)


class _Grid(NamedTuple):
    """One kind of CTAs of a launch, such as those that have a tile.

    ``special``: the values of their special registers, such as %ctaid.x. ``rows``, ``cols``: how many tiles D has along
    m and n. ``tile``: row and column of the CTA's tile, None if it has none. ``bounds``: the range of every name.
    ``assumed``: polynomials that are at least 0.

    Of persistent CTAs, a kind consists of those that are computing some item. ``item``: the number of that tile;
    ``last``: whether it is the CTA's last one. ``entry``: the same CTAs before their first item. ``names``: the values
    that the names of ``entry`` have while the item is computed.
    """

    title: str
    special: dict[str, Polynomial]
    rows: Polynomial
    cols: Polynomial
    tile: tuple[Polynomial, Polynomial] | None
    bounds: Bounds
    assumed: tuple[Polynomial, ...] = ()
    entry: _Grid | None = None
    names: dict[str, Polynomial] = {}
    item: Polynomial = ZERO
    last: bool = False


def _max_tiles(record: MmaSyncKernel) -> tuple[int, int]:
    """The most tiles along m and n."""
    return MAX_EXTENT // record.bm, MAX_EXTENT // record.bn


def _plain(record: MmaSyncKernel) -> Iterator[_Grid]:
    """The CTAs of a grid with one CTA for each tile."""
    most = _max_tiles(record)[1]
    x, y, rows, bounds = _by_rows(record)
    bounds |= {("cta_x",): (0, most - 1), ("right",): (0, most - 1)}
    special = {"%ctaid.x": x, "%ctaid.y": _along_y(record, y)}
    if record.batched:
        special["%ctaid.z"] = named("cta_z")
        bounds[("cta_z",)] = (0, MAX_GRID_YZ - 1)
    yield _Grid("every CTA has a tile", special, rows, x + named("right") + 1, (y, x), bounds)


def _by_rows(record: MmaSyncKernel) -> tuple[Polynomial, Polynomial, Polynomial, Bounds]:
    """For a grid whose y counts rows of tiles: a CTA's x and y, the number of rows, and bounds of these names."""
    most = min(_max_tiles(record)[0], MAX_GRID_YZ // record.split_k)
    y = named("cta_y")
    return named("cta_x"), y, y + named("below") + 1, {("cta_y",): (0, most - 1), ("below",): (0, most - 1)}


def _along_y(record: MmaSyncKernel, row: Polynomial) -> Polynomial:
    """A CTA's index along y: a row of tiles has one index for each slice of k."""
    return row * record.split_k + named("slice") if record.split_k > 1 else row


def _zsplit(record: MmaSyncKernel) -> Iterator[_Grid]:
    """The CTAs of a grid whose z counts slices of columns, with and without a tile.

    A CTA's column of tiles is cta_z * grid_x + cta_x, which no other CTA of its row has, because cta_x < grid_x. grid_x
    is the number of columns divided by the number of slices, rounded up. So the last slices may begin after the last
    column, but by less than the number of slices.
    """
    most = _max_tiles(record)[1]
    x, y, rows, bounds = _by_rows(record)
    special = {"%ctaid.x": x, "%ctaid.y": _along_y(record, y), "%ctaid.z": named("cta_z"), "%nctaid.x": named("grid_x")}
    bounds |= {("cta_x",): (0, most - 1), ("cta_z",): (0, MAX_GRID_YZ - 1), ("grid_x",): (1, most)}
    column = named("cta_z") * named("grid_x") + x
    with_tile: Bounds = {("right",): (0, most - 1), ("cta_z", "grid_x"): (0, most - 1)}
    yield _Grid("CTAs that have a tile", special, rows, column + named("right") + 1, (y, column), bounds | with_tile)
    last_column = most + MAX_GRID_YZ
    without_tile: Bounds = {("right",): (0, 2 * last_column), ("cta_z", "grid_x"): (0, last_column)}
    yield _Grid("CTAs beyond the last column", special, rows, column - named("right"), None, bounds | without_tile)


def _persistent(record: MmaSyncKernel) -> Iterator[_Grid]:
    """Persistent CTAs at some tile: at their last one, or at an earlier one.

    A CTA's first tile is that of its own number, and each next one is grid_x tiles later. So no two CTAs have a tile in
    common, and every tile is computed.
    """
    most_rows, most_cols = _max_tiles(record)
    x, step = named("cta_x"), named("grid_x")
    special = {"%ctaid.x": x, "%nctaid.x": step}
    bounds: Bounds = {("cta_x",): (0, MOST_TILES), ("grid_x",): (1, MOST_TILES)}
    sizes: Bounds = {
        ("tiles_m",): (1, most_rows), ("tiles_n",): (1, most_cols), ("tiles_m", "tiles_n"): (1, MOST_TILES)
    }  # fmt: skip
    tiles = named("tiles_m") * named("tiles_n")
    entry = _Grid("", special, named("tiles_m"), named("tiles_n"), None, bounds | sizes, (tiles - 1 - x,))
    rows, cols = named("tile_m") + named("below") + 1, named("tile_n") + named("right") + 1
    item = named("tile_m") * cols + named("tile_n")
    bounds |= {(name,): (0, most_rows - 1) for name in ("tile_m", "below")}
    bounds |= {(name,): (0, most_cols - 1) for name in ("tile_n", "right")}
    after_next = rows * cols - 1 - item - step  # tiles after the CTA's next one; negative if this is its last
    # D has at most MOST_TILES tiles, which bounds the number of this tile and that of the next one.
    limits = (MOST_TILES - rows * cols, MOST_TILES - 1 - item, 2 * MOST_TILES - 1 - item - step)
    for last, rest in ((False, after_next), (True, -after_next - 1)):
        title = "the last tile of a CTA" if last else "a tile before the last one of a CTA"
        yield _Grid(
            title, special, rows, cols, (named("tile_m"), named("tile_n")), bounds, (*limits, rest), entry,
            {"tiles_m": rows, "tiles_n": cols}, item, last,
        )  # fmt: skip


def _contract(record: MmaSyncKernel, grid: _Grid, offsets: list[int], arrived: Polynomial = ZERO) -> Contract:
    """The contract of one kind of CTAs. ``offsets``: the byte offsets of the kernel's parameters.

    ``arrived``: how many CTAs of the tile arrived at its counter before this one.
    """
    element, output = record.element, record.output
    rows, cols = grid.rows * record.bm, grid.cols * record.bn
    slices = _slices(record, grid, arrived)
    k = named(TILES) * record.k_step
    first = named("first_tile") * record.k_step if slices else ZERO
    baked_k, along = Polynomial.of(record.baked_k), record.along_k
    lda = baked_k if record.baked_k and along.a else named("lda_vectors", element.vector)
    ldb = baked_k if record.baked_k and along.b else named("ldb_vectors", element.vector)
    ldd = named("ldd_vectors", output.vector)
    strides = [named(f"{name}_stride", x.vector) for name, x in (("a", element), ("b", element), ("d", output))]
    # In elements, where the CTA's part of each operand begins: at its product of the batch and at its slice's first k.
    to_product = [stride * named("cta_z") if record.batched else ZERO for stride in strides]
    first_a, first_b = (first if along.a else first * lda), (first if along.b else first * ldb)
    begins = (to_product[0] + first_a, to_product[1] + first_b, to_product[2])
    matrices = [
        Matrix("A", "a", ALIGNMENT, lda, rows, k, element.name, False, across=not along.a, offset=begins[0]),
        Matrix("B", "b", ALIGNMENT, ldb, cols, k, element.name, False, across=not along.b, offset=begins[1]),
        Matrix("D", "d", ALIGNMENT, ldd, rows, cols, output.name, True, offset=begins[2]),
    ]
    a, b, d = (named(matrix.base, ALIGNMENT) for matrix in matrices)
    # The value and the bits of each parameter, in the order of the kernel's signature.
    arguments = (
        (a, 64), (lda, 32), (b, 64), (ldb, 32), (d, 64), (ldd, 32), (rows, 32), (cols, 32),
        (named("all_tiles", record.k_step) if slices else k, 32),
        (named(PARTIALS, ALIGNMENT), 64), (named(ARRIVALS, 4), 64),
    )  # fmt: skip
    if (expected := len(arguments) + record.batched) != len(offsets):
        raise NotCertified(f"the kernel has {len(offsets)} parameters, not the launcher's {expected}")
    parameters = dict(zip(offsets, arguments, strict=False))
    if record.batched:  # the last parameter is a struct of 8-byte members: the number of products, then the distances
        parameters |= {offsets[-1] + 8 * i: (stride, 64) for i, stride in enumerate(strides, 1)}
    bounds = grid.bounds | {(name,): (1, _MOST_ADDRESS) for name in ("a", "b", "d", "partials", "arrivals")}
    types = {"lda": element, "ldb": element, "ldd": output}
    bounds |= {(f"{name}_vectors",): (1, MAX_EXTENT // stored.vector) for name, stored in types.items()}
    if record.batched:
        # The distance to a CTA's product, stride * cta_z, has a bound of its own, tighter than that of its factors. The
        # names count vectors, of at most 16 elements, so their bound is that of elements divided by 16.
        for name in ("a_stride", "b_stride", "d_stride"):
            bounds[(name,)] = bounds[tuple(sorted((name, "cta_z")))] = (0, _MOST_ADDRESS >> 4)
    bounds[(TILES,)] = (1, MAX_EXTENT // record.k_step)
    facts = Facts(bounds, list(grid.assumed))
    if slices:
        # A slab has the partial sums of one slice of one tile.
        count, slab = record.split_k, Polynomial.of(slices.elements)
        slabs = grid.rows * grid.cols * count
        matrices.append(Matrix(PARTIALS, PARTIALS, ALIGNMENT, slab, slabs, slab, "f32", None))
        facts = with_slices(facts.extended({}, MOST_TILES - slabs), count, record.k_step)
    tile = Tile(grid.tile[0] * record.bm, grid.tile[1] * record.bn, record.bm, record.bn) if grid.tile else None
    return Contract(
        record.threads, record.smem_bytes, parameters, grid.special, tuple(matrices), k, tile, facts, slices
    )


def _slices(record: MmaSyncKernel, grid: _Grid, arrived: Polynomial) -> Slices | None:
    """The CTA's slice of its tile's k; None if k is not split or the CTA has no tile."""
    if record.split_k == 1 or grid.tile is None:
        return None
    tile = grid.tile[0] * grid.cols + grid.tile[1]
    return Slices(record.split_k, named("slice"), tile, record.bm * record.bn, arrived)
