"""Proves that what claims state of a launch holds for the CTAs of real launches, which are listed one by one.

A false statement would let a proof succeed that shows nothing. So every bound, polynomial and quotient of a claim is
evaluated for the CTAs of small launches and of the largest ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from cudal2gen.kernel import Record
from cudal2gen.kernel.mma_sync import MAX_GRID_YZ, MmaSyncKernel
from cudal2gen.kernel.problem import MAX_EXTENT
from cudal2gen.kernel.tma_ring import TmaRing
from cudal2gen.validator import contracts
from kernelproof.certificates import TILES, Contract, Facts, Pipeline, Ring, SingleShot, rests
from tests.cudal2gen import bands
from tests.cudal2gen.paths import PAIR, once, ring, small, tensor, warps
from tests.cudal2gen.test_wave_contracts import Launch, check, place_names, value

Names = dict[str, int]
# Where the parameters of a kernel with tensor maps begin, in bytes; parameter 8 is the struct Bands.
OFFSETS = [*range(0, 72, 8), *range(64 + 4 * bands.WORDS, 64 + 4 * bands.WORDS + 40, 8)]


def check_all(facts: Facts, names: Names) -> None:
    """Checks that facts and quotients hold for these values of names, and that every name has a value."""
    check(facts, names)
    assert {name for monomial in facts.bounds for name in monomial} <= names.keys()
    assert {name for each in facts.assumed for name in each.names()} <= names.keys()
    for quotient in facts.quotients:
        whole, rest = divmod(value(quotient.dividend, names), quotient.divisor)
        assert (whole, rest) == (value(quotient.whole, names), value(quotient.rest, names)), quotient


def operand_names() -> Names:
    """Values of the names of addresses, leading dimensions and distances."""
    bases = dict.fromkeys(("a", "b", "d", "partials", "arrivals"), 1 << 40)
    strides = dict.fromkeys((f"{x}_stride" for x in "abd"), 1 << 20)
    return bases | strides | dict.fromkeys(("lda_vectors", "ldb_vectors", "ldd_vectors"), 1 << 10)


def slice_names(own: int, count: int, steps: int) -> Names:
    """Values of the names of slice ``own`` of ``count`` slices of ``steps`` k-tiles."""
    first, first_rest = divmod(steps * own, count)
    end, end_rest = divmod(steps * (own + 1), count)
    return {
        "slice": own, "all_tiles": steps, "first_tile": first, TILES: end - first, "first_rest": first_rest,
        "end_rest": end_rest, "slice_half": own // 2, "slice_odd": own % 2,
    }  # fmt: skip


def sizes_of(contract: Contract, names: Names) -> tuple[int, ...]:
    """m, n and k of the operands that a contract states."""
    a, b, d = contract.matrices[:3]
    extents = [value(x, names) for x in (a.rows, b.rows, d.rows, d.cols, a.cols, b.cols)]
    assert (extents[0], extents[1], extents[4]) == (extents[2], extents[3], extents[5])
    return extents[2], extents[3], extents[4]


# --- kernels with a CTA for each tile, or with persistent CTAs ---


class Cta(NamedTuple):
    """A CTA, or the item of a persistent one: its special registers, its tile (None beyond the last column), and the
    names that its claim has. ``claim``: the number of its kind of CTAs."""

    special: Names
    tile: tuple[int, int] | None
    names: Names
    claim: int = 0


def plain_ctas(rows: int, cols: int, split: int) -> Iterator[Cta]:
    """The CTAs of a grid with one CTA for each slice of a tile."""
    for y, x in product(ends(rows), ends(cols)):
        for part in range(split):
            names = {"cta_x": x, "right": cols - 1 - x, "cta_y": y, "below": rows - 1 - y, "slice": part}
            yield Cta({"%ctaid.x": x, "%ctaid.y": y * split + part}, (y, x), names)


def zsplit_ctas(rows: int, cols: int, count: int) -> Iterator[Cta]:
    """The CTAs of a grid whose z counts slices of columns."""
    grid_x = -(-cols // count)
    for y, x, z in product(ends(rows), ends(grid_x), ends(count)):
        column = z * grid_x + x
        is_within = column < cols
        names = {
            "cta_x": x, "cta_z": z, "grid_x": grid_x, "cta_y": y, "below": rows - 1 - y, "slice": 0,
            "right": cols - 1 - column if is_within else column - cols,
        }  # fmt: skip
        special = {"%ctaid.x": x, "%ctaid.y": y, "%ctaid.z": z, "%nctaid.x": grid_x}
        yield Cta(special, (y, column) if is_within else None, names, not is_within)


def persistent_items(rows: int, cols: int, ctas: int) -> Iterator[Cta]:
    """The items of CTAs that compute every ``ctas``-th tile."""
    for item in ends(rows * cols):
        row, col = divmod(item, cols)
        x = item % ctas
        names = {
            "cta_x": x, "grid_x": ctas, "tile_m": row, "below": rows - 1 - row, "tile_n": col, "right": cols - 1 - col,
            "slice": 0, "tiles_m": rows, "tiles_n": cols,
        }  # fmt: skip
        yield Cta({"%ctaid.x": x, "%nctaid.x": ctas}, (row, col), names, item + ctas >= rows * cols)


def ends(count: int) -> list[int]:
    """All numbers below a small count; the first and the last ones below a large count."""
    return list(range(count)) if count < 8 else [0, count // 2, count - 2, count - 1]


GRIDS: dict[str, tuple[MmaSyncKernel, Any]] = {
    "plain": (small(), plain_ctas),
    "k is split": (small(split_k=3), plain_ctas),
    "columns in slices": (small(raster="zsplit", swizzle_stride=64), zsplit_ctas),
    "persistent": (small(raster="persistent"), persistent_items),
}


def launches_of(record: MmaSyncKernel, walk: Any) -> Iterator[tuple[int, int, Iterator[Cta]]]:
    """Rows and columns of tiles of small and of the largest launches, and their CTAs."""
    most_rows, most_cols = MAX_EXTENT // record.bm, MAX_EXTENT // record.bn
    if walk is not persistent_items:
        most_rows = min(most_rows, MAX_GRID_YZ // record.split_k)
    large = [(most_rows, 1), (1, most_cols), (most_rows, min(most_cols, (1 << 30) // most_rows // record.split_k))]
    for rows, cols in [*product((1, 3), (1, 2, 5)), *large]:
        counts = [record.split_k] if walk is plain_ctas else [1, 2, 3, 7]
        for count in counts:
            yield rows, cols, walk(rows, cols, count)


@pytest.mark.parametrize("name", GRIDS)
def test_every_cta_of_a_grid_is_of_the_kind_that_is_stated(name: str) -> None:
    record, walk = GRIDS[name]
    program: Any = SimpleNamespace(offsets=[8 * i for i in range(11)])
    stated = list(contracts.claims(record, program))
    arrivals = 2 if record.split_k > 1 else 1  # kinds of a CTA's arrival: before others, and as the last one
    seen = set[int]()
    for rows, cols, ctas in launches_of(record, walk):
        for cta, last in product(ctas, range(arrivals)):
            steps = record.split_k + 1
            names = operand_names() | {TILES: steps, **cta.names}
            if record.split_k > 1:
                names |= slice_names(cta.names["slice"], record.split_k, steps) | {"arrived": 1}
            claim = stated[cta.claim * arrivals + last]
            contract = claim.contract
            seen.add(cta.claim)
            check_all(contract.facts, names)
            assert {register: value(x, names) for register, x in contract.special.items()} == cta.special
            k = (steps if record.split_k == 1 else names[TILES]) * record.k_step
            assert sizes_of(contract, names) == (rows * record.bm, cols * record.bn, k)
            assert [value(contract.parameters[8 * i][0], names) for i in (6, 7, 8)] == [
                rows * record.bm, cols * record.bn, steps * record.k_step,
            ]  # fmt: skip
            corner = contract.tile and (value(contract.tile.row, names), value(contract.tile.col, names))
            assert corner == (cta.tile and (cta.tile[0] * record.bm, cta.tile[1] * record.bn))
            if contract.slices is not None:
                assert contract.slices.count == record.split_k
                assert value(contract.slices.arrived, names) == (record.split_k - 1 if last else 1)
                assert cta.tile is not None
                assert value(contract.slices.tile, names) == cta.tile[0] * cols + cta.tile[1]
                assert value(contract.matrices[3].rows, names) == rows * cols * record.split_k
            assert isinstance(claim.ring, Ring)
            if (items := claim.ring.items) is not None:
                check_all(items.entry.facts, names)
                assert [value(items.names[x], names) for x in ("tiles_m", "tiles_n")] == [rows, cols]
                assert value(items.current, names) % names["grid_x"] == value(items.first, names) == names["cta_x"]
                assert items.last == bool(cta.claim)
                assert value(items.step, names) == names["grid_x"]
    assert seen == set(range(len(stated) // arrivals))


# --- kernels whose producer loads boxes into a ring ---

RINGS: dict[str, TmaRing] = {
    "wgmma": ring(),
    "rows of 192": ring(bm=192, consumers=3),
    "clusters": ring(cluster=[2, 2]),
    "k is split": ring(split_k=3, reduce="workspace"),
    "k is split, columns of 48": ring(bn=48, atom_n=48, split_k=2, reduce="workspace"),
    "k is split in clusters": ring(split_k=2, reduce="cluster", epilogue="direct"),
    "tensor memory": tensor(),
    "pair": tensor(**PAIR),
    "k is split, two CTAs of a column": tensor(cluster=[2, 1], split_k=3),
    "mma.sync": warps(),
}


@cache  # all CTAs of a launch need the same few
def rest_names(name: str, size: int, rest: int) -> Names:
    """Values of the names of the parts of a number below ``size``: the least ones whose sum it is."""
    parts = rests.parts(name, size)
    if len(parts) == 1:
        return {name: rest}
    small_parts = [part for part, (factor, _) in parts.items() if factor != rests.block(size)]
    (big,) = parts.keys() - small_parts
    for values in product(*(range(parts[part][1] + 1) for part in small_parts)):
        names = dict(zip(small_parts, values, strict=True))
        left = rest - sum(parts[part][0] * names[part] for part in small_parts)
        if left >= 0 and left % rests.block(size) == 0:
            names[big] = left // rests.block(size)
            if all(value(limit, names) >= 0 for limit in rests.limits(name, size)):
                return names
    raise AssertionError(f"{rest} below {size} has no names")


def tile_place(launch: Launch, tile: int, along_n: int) -> tuple[int, int]:
    """The row and the column of a tile, found by a walk through the bands."""
    across, along = (launch.rows, launch.cols) if along_n else (launch.cols, launch.rows)
    band, first = launch.band, 0
    while tile >= min(band, across - first) * along:
        bands = max(1, min(tile // (band * along), (across - first) // band))
        tile, first = tile - bands * band * along, first + bands * band
    at_along, in_band = divmod(tile, min(band, across - first))
    return (first + in_band, at_along) if along_n else (at_along, first + in_band)


def extents(record: TmaRing) -> tuple[int, int, int]:
    """The extents of a cluster's tiles along m and n, and of a k-tile."""
    return record.bm * record.cluster[0], record.bn * record.cluster[1], record.bk


def ring_launches(record: TmaRing) -> Iterator[Launch]:
    """Small launches, and the largest ones."""
    for rows, cols, band, clusters, steps in product((1, 3), (1, 5), (2, 8), (1, 16), (1, 4)):
        yield Launch(rows, cols, band, steps + record.split_k - 1, clusters)
    high, wide, steps = (-(-MAX_EXTENT // size) for size in extents(record))
    yield Launch(high, 1, 8, steps, 16)
    yield Launch(1, wide, 8, record.split_k, 16)
    yield Launch(high, (1 << 30) // record.split_k // record.cluster_ctas // high, 1, steps, 1 << 12)


def check_cta(record: TmaRing, launch: Launch, contract: Contract, pipeline: Pipeline, along_n: int, tile: int,
              own: int, most: int) -> None:  # fmt: skip
    """Checks what is stated of a CTA that computes slice ``own`` of a tile.

    ``most``: whether m, n and k are the largest ones that have the launch's tiles, or else the least.
    """
    split, rank, (across_m, across_n) = record.split_k, pipeline.rank, record.cluster
    is_slice = record.summed_in == "cluster"
    number = tile if is_slice else tile * split + own
    names = operand_names() | place_names(launch, tile, along_n)[1] | {
        "cta_x": number % launch.clusters, "grid_x": launch.clusters, "tiles_m": launch.rows, "tiles_n": launch.cols,
        "band": launch.band, "rank_m": rank % across_m, "rank_n": rank // across_m, TILES: launch.steps, "arrived": 0,
    }  # fmt: skip
    names |= bands.reciprocal_names(launch.rows, launch.cols, along_n, launch.band)
    counts = launch.rows, launch.cols, launch.steps
    for x, size in zip("mnk", extents(record), strict=True):
        names |= rest_names(f"in_{x}", size, most * (size - 1))
    if split > 1:
        names |= slice_names(rank if is_slice else own, split, launch.steps)
    check_all(contract.facts, names)
    sizes = [(count - 1) * size + (size if most else 1) for count, size in zip(counts, extents(record), strict=True)]
    assert sizes_of(contract, names) == tuple(sizes)
    assert [value(contract.parameters[8 * i][0], names) for i in range(5, 8)] == sizes
    passed = [value(contract.parameters[OFFSETS[8] + 4 * i][0], names) for i in range(bands.WORDS)]
    assert passed == bands.words(launch.rows, launch.cols, along_n, launch.band)
    adders = (pipeline.adders.within, *pipeline.adders.passed) if pipeline.adders else ()
    for each in (contract, pipeline.entry, *pipeline.stores, *adders):
        assert each is None or len(each.facts.reciprocals) == 3, "every case knows by what the kernel divides"
    assert value(pipeline.current, names) == number
    row, col = tile_place(launch, tile, along_n)
    at = (row * across_m + names["rank_m"], col * across_n + names["rank_n"]) if not is_slice else (row, col)
    assert contract.tile is not None
    corner = value(contract.tile.row, names), value(contract.tile.col, names)
    assert corner == (at[0] * record.bm, at[1] * record.bn)
    special = [value(contract.special[x], names) for x in ("%ctaid.x", "%nctaid.x")]
    if is_slice:
        assert special == [tile * split + rank, launch.rows * launch.cols * split]
        return
    assert special == [x * across_m * across_n + y for x, y in ((names["cta_x"], rank), (launch.clusters, 0))]
    check_all(pipeline.entry.facts, names)
    assert all(value(stated, names) == names[name] for name, stated in pipeline.names.items())
    assert value(pipeline.left, names) == launch.rows * launch.cols * split - 1 - number - launch.clusters


@pytest.mark.parametrize("name", RINGS)
def test_every_item_of_a_ring_is_of_the_kind_that_is_stated(name: str) -> None:
    record = RINGS[name]
    program: Any = SimpleNamespace(offsets=OFFSETS[: 13 + bool(record.launch.box_d_rest_cols)])
    stated = dict(zip(product((0, 1), (True, False)), contracts.claims(record, program), strict=True))
    seen = set[tuple[int, bool]]()
    for launch in ring_launches(record):
        for tile, along_n, own, most in product(
            ends(launch.rows * launch.cols), (0, 1), ends(record.split_k), (False, True)
        ):
            full = place_names(launch, tile, along_n)[0]
            claim = stated[along_n, full]
            seen.add((along_n, full))
            assert isinstance(claim.ring, Pipeline)
            for contract, pipeline in ((claim.contract, claim.ring), *claim.ring.peers):
                check_cta(record, launch, contract, pipeline, along_n, tile, own, most)
    assert seen == stated.keys()


@pytest.mark.parametrize("name", ["clusters", "pair", "two columns", "two rows"])
def test_a_cluster_loads_every_row_once_and_returns_stages_to_who_loaded_them(name: str) -> None:
    record = (RINGS | {"two columns": ring(cluster=[1, 2]), "two rows": tensor(cluster=[2, 1])})[name]
    program: Any = SimpleNamespace(offsets=OFFSETS[: 13 + bool(record.launch.box_d_rest_cols)])
    claim = next(iter(contracts.claims(record, program)))
    assert isinstance(claim.ring, Pipeline)
    pipelines = [claim.ring, *(pipeline for _, pipeline in claim.ring.peers)]
    ranks = range(record.cluster_ctas)
    assert [(each.rank, each.ranks) for each in pipelines] == [(rank, len(ranks)) for rank in ranks]
    high, wide, step = extents(record)
    assert sum(each.share or 0 for each in pipelines) == (high + wide) * step * record.element.bytes
    places = [(rank % record.cluster[0], rank // record.cluster[0]) for rank in ranks]
    for pipeline in pipelines:
        own = {pipeline.rank, pipeline.rank ^ 1} if record.paired else {pipeline.rank}
        assert pipeline.returns == {
            rank for rank in ranks for each in own
            if any(x == y for x, y in zip(places[rank], places[each], strict=True))
        }  # fmt: skip


# --- kernels whose CTAs load all of their k at once ---

SHOTS: dict[str, Record] = {
    "a tile each": once(),
    "columns along k": once(layout="nt"),
    "k is split in clusters": once(split_k=2),
    "rows of 160": once(bm=160),
}


@pytest.mark.parametrize("name", SHOTS)
def test_every_cta_of_a_single_shot_is_of_the_kind_that_is_stated(name: str) -> None:
    record = SHOTS[name]
    program: Any = SimpleNamespace(offsets=[8 * i for i in range(11)])
    (claim,) = contracts.claims(record, program)
    assert isinstance(claim.ring, SingleShot)
    high, wide = (-(-MAX_EXTENT // size) for size in (record.bm, record.bn))
    unit = 1 if record.layout == "nt" else 8  # elements of 2 bytes in a vector of 16 bytes, where rows run along k
    split = record.split_k
    large = [(high, 1), (1, wide), (high, (1 << 30) // high // split)]
    for (rows, cols), steps in product([*product((1, 3), (1, 5)), *large], (split, claim.ring.most * split)):
        for tile, most, (rank, contract) in product(
            ends(rows * cols), (False, True), enumerate((claim.contract, *claim.ring.peers))
        ):
            row, col = divmod(tile, cols)
            names = operand_names() | {
                "tile_m": row, "below": rows - 1 - row, "tile_n": col, "right": cols - 1 - col, "ldd": 1 << 24,
                TILES: steps, "in_k": most * (record.k_step // unit - 1),
            }  # fmt: skip
            for x, size in (("m", record.bm), ("n", record.bn)):
                names |= rest_names(f"in_{x}", size, most * (size - 1))
            if split > 1:
                names |= slice_names(rank, split, steps)
            check_all(contract.facts, names)
            least = (rows - 1) * record.bm + 1, (cols - 1) * record.bn + 1, (steps - 1) * record.k_step + unit
            largest = rows * record.bm, cols * record.bn, steps * record.k_step
            assert sizes_of(contract, names) == (largest if most else least)
            assert [value(contract.parameters[8 * i][0], names) for i in (6, 7, 8)] == list(sizes_of(contract, names))
            special = [value(contract.special[x], names) for x in ("%ctaid.x", "%nctaid.x")]
            assert special == [tile * split + rank, rows * cols * split]
            assert contract.tile is not None
            corner = value(contract.tile.row, names), value(contract.tile.col, names)
            assert corner == (row * record.bm, col * record.bn)
            assert value(contract.first, names) == steps * rank // split * record.k_step
