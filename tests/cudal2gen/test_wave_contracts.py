"""Compares what is stated of shared last waves with the items of real launches, by the definitions of shares."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, cached_property
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from cudal2gen.kernel import Record
from cudal2gen.validator.wave_contracts import claims
from kernelproof.certificates import Claim, Contract, Facts, Pipeline, Polynomial
from kernelproof.certificates.pipelines import ItemKind
from tests.cudal2gen.bands import last_width
from tests.cudal2gen.paths import ring

RECORD = ring(stages=2, stream_k=True, cluster=[2, 2])
CTAS, BK = RECORD.cluster_ctas, RECORD.bk


class Launch(NamedTuple):
    """A launch of ``clusters`` clusters. They compute ``rows`` x ``cols`` cluster tiles, each of ``steps`` k-tiles, in
    bands of ``band`` tiles."""

    rows: int
    cols: int
    band: int
    steps: int
    clusters: int


class Part(NamedTuple):
    """An item of a cluster: its number, the number of its tile, and its k-tiles from ``first`` to before ``end``.

    ``names``: values of names that belong to its kind alone.
    """

    number: int
    tile: int
    first: int
    end: int
    names: dict[str, int]


class Items:
    """The items of a launch, by the definitions of shares."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        all_tiles = launch.rows * launch.cols
        self.tail = all_tiles % launch.clusters
        self.whole = all_tiles - self.tail

    def begin(self, cluster: int) -> int:
        """The first k-tile of a cluster's share, counted over all tiles of the last wave."""
        least, longer = divmod(self.tail * self.launch.steps, self.launch.clusters)
        return least * cluster + min(cluster, longer)

    @cached_property
    def parts(self) -> dict[int, list[int]]:
        """Tile of the last wave -> the clusters that have a part of it, in the order of k."""
        out: dict[int, list[int]] = {}
        for cluster in range(self.launch.clusters):
            for tile in {step // self.launch.steps for step in range(self.begin(cluster), self.begin(cluster + 1))}:
                out.setdefault(tile, []).append(cluster)
        return out

    def wave_items(self) -> Iterator[Part]:
        """All items of the last wave, empty ones included."""
        steps, clusters = self.launch.steps, self.launch.clusters
        for cluster, second in product(range(clusters), (0, 1)):
            begin, end = self.begin(cluster), self.begin(cluster + 1)
            boundary = min(end, (begin // steps + 1) * steps)
            first, last = (boundary, end) if second else (begin, boundary)
            tile = min(first // steps, self.tail - 1)
            names = {
                "cluster": cluster, "second": second, "share_tile": begin // steps, "share_first": begin % steps,
                "share_length": end - begin, "share_over": max(0, end - boundary),
                "longer": int(cluster < self.tail * steps % clusters), "empty_end": end // steps,
            }  # fmt: skip
            yield Part(
                self.whole + second * clusters + cluster,
                self.whole + tile,
                first - tile * steps,
                last - tile * steps,
                names,
            )


def place_names(launch: Launch, tile: int, along_n: int) -> tuple[bool, dict[str, int]]:
    """Whether a tile is in a full band, and the values of the names of its place."""
    along, across = (launch.cols, launch.rows) if along_n else (launch.rows, launch.cols)
    bands = tile // (along * launch.band)
    width = min(launch.band, across - bands * launch.band)
    at_along, in_band = divmod(tile - bands * launch.band * along, width)
    full = width == launch.band
    more = across - bands * launch.band - width if full else launch.band - width - 1
    names = {
        "bands": bands, "at_along": at_along, "in_band": in_band, "in_band_rest": width - 1 - in_band, "more": more,
        "along_rest": along - 1 - at_along, "empty_band": bands, "empty_along": at_along,
        "last_width": last_width(across, launch.band),
    }  # fmt: skip
    return full, names


def value(poly: Polynomial, names: dict[str, int]) -> int:
    return sum(c * prod(names[name] for name in monomial) for monomial, c in poly.in_lane(0).items())


def check(facts: Facts, names: dict[str, int]) -> None:
    """Assert that facts hold for values of names; a name without a value is left out."""
    known = names.keys()
    for monomial, (low, high) in facts.bounds.items():
        assert not known >= set(monomial) or low <= value(Polynomial({monomial: 1}), names) <= high, monomial
    for each in facts.assumed:
        assert not known >= set(each.names()) or value(each, names) >= 0, each
    for fraction in facts.fractions:
        if fraction.given is None or value(fraction.given, names) >= 0:
            dividend, divisor = value(fraction.dividend, names), value(fraction.divisor, names)
            assert dividend >= 0, fraction
            whole, rest = divmod(dividend, divisor)
            assert whole == value(fraction.whole, names), fraction
            assert fraction.rest is None or rest == value(fraction.rest, names), fraction
    for first, second, least in facts.minima:
        assert min(value(first, names), value(second, names)) == value(least, names)


def launch_names(items: Items) -> dict[str, int]:
    launch = items.launch
    total = items.tail * launch.steps
    return {
        "grid_x": launch.clusters, "waves": items.whole // launch.clusters, "tail": items.tail, "band": launch.band,
        "all_tiles": launch.steps, "least_share": total // launch.clusters, "tiles_m": launch.rows,
        "tiles_n": launch.cols, "in_m": 0, "in_n": 0, "in_k": 0,
    }  # fmt: skip


def launches() -> Iterator[Launch]:
    for rows, cols, band, steps, clusters in product((1, 3), (1, 2), (1, 2), (1, 2, 5), (1, 2, 3, 4, 7)):
        yield Launch(rows, cols, band, steps, clusters)


@cache
def stated_claims(record: Record = RECORD) -> dict[tuple[int, bool, bool], Claim]:
    """(along n, in a full band, whether the last wave is shared out) -> the claim."""
    program: Any = SimpleNamespace(offsets=[100 * i for i in range(13)])
    keys = product((0, 1), (True, False), (False, True))
    return dict(zip(keys, claims(record, program), strict=True))


def kind_of(part: Part, steps: int, full: bool) -> int:
    """The number of the kind of an item of the last wave.

    0: a part of a tile, with the whole share. 1: a whole tile. 2: the first item of a share that goes on in the next
    tile. 3: its second item. 4: a tile of a full wave, which is no item of the last one. 5 to 8: an empty item, the
    first or second one, whose tile is in a full band or not.
    """
    if part.first == part.end:
        return 5 + 2 * part.names["second"] + (not full)
    if part.names["second"]:
        return 3
    return 2 if part.names["share_over"] else 1 if part.end - part.first == steps else 0


def whole_tiles(along_n: int) -> Iterator[tuple[Items, int, ItemKind, dict[str, int]]]:
    """For each tile of the full waves of all launches: the launch's items, the tile's number, the kind of item that the
    claim states for it, and the values of the names of launch and place."""
    contracts = stated_claims()
    for launch in launches():
        items = Items(launch)
        for tile in range(items.whole):
            full, place = place_names(launch, tile, along_n)
            pipeline: Any = contracts[along_n, full, bool(items.tail)].ring
            yield items, tile, pipeline.kinds[4 if items.tail else 0], launch_names(items) | place


def check_item(contract: Contract, part: Part, names: dict[str, int], current: Polynomial) -> None:
    check(contract.facts, names)
    assert value(current, names) == part.number
    if contract.tile is not None:
        assert value(contract.first, names) == part.first * BK
        assert value(contract.sum_end, names) == (part.end - part.first) * BK
    if contract.slices is not None and contract.slices.slab is not None:
        expected = part.names["cluster"] + names["in_wave"] + names["rank"] * (names["grid_x"] + names["tail"])
        assert value(contract.slices.slab, names) == expected


def check_last(kind: ItemKind, names: dict[str, int], is_last: bool) -> None:
    """Assert that of the cases in which a CTA has or has not a next item exactly one holds, and that it is the right
    one."""
    holding = [no_next for no_next, limits in kind.last if all(value(limit, names) >= 0 for limit in limits)]
    assert holding == [is_last]


@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (2, 1), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_the_parts_of_tiles_that_begin_within_d_are_left_and_no_others(cluster: tuple[int, int]) -> None:
    """The last cluster tile of D has one row or column, or all of them. CTAs beyond D leave nothing, and the claim
    states no case that no CTA has."""
    record = ring(stages=2, stream_k=True, cluster=[*cluster])
    launch = Launch(3, 2, 1, 2, 4)
    items, seen = Items(launch), set[tuple[int, bool]]()
    last = launch.rows * launch.cols - 1
    for along_n, (most_m, most_n) in product((0, 1), product((False, True), (False, True))):
        claim = stated_claims(record)[along_n, True, True]
        assert isinstance(claim.ring, Pipeline)
        place = place_names(launch, last, along_n)[1]
        names = launch_names(items) | place | {
            "in_m": most_m * (record.bm * cluster[0] - 1), "in_n": most_n * (record.bn * cluster[1] - 1),
        }  # fmt: skip
        for pipeline in (claim.ring, *(peer for _, peer in claim.ring.peers)):
            at = pipeline.rank % cluster[0], pipeline.rank // cluster[0]
            within = all(many or not own for many, own in zip((most_m, most_n), at, strict=True))
            kinds = [kind for kind in pipeline.kinds if kind.after_products]
            assert len(kinds) == 3, "a part of a tile, and the two items of a share in two tiles"
            for kind in kinds:
                assert len(kind.after_products) == 2 ** sum(own > 0 for own in at)
                known = {id(each) for each in kind.contract.facts.assumed}
                cases = [
                    case for case in kind.after_products
                    if all(value(each, names) >= 0 for each in case.facts.assumed if id(each) not in known)
                ]  # fmt: skip
                assert [(case.tile is not None, case.slices is not None) for case in cases] == [(within, within)]
                seen.add((pipeline.rank, within))
    ranks = range(cluster[0] * cluster[1])
    assert seen == {(rank, within) for rank in ranks for within in (True, False) if rank or within}


@pytest.mark.slow
@pytest.mark.parametrize("along_n", [0, 1])
def test_a_cta_of_full_waves_has_a_next_item_if_there_is_a_tile_for_it(along_n: int) -> None:
    for items, tile, kind, names in whole_tiles(along_n):
        # A CTA has an item of a shared last wave, which may be empty.
        check_last(kind, names, not items.tail and tile + items.launch.clusters >= items.whole)
    contracts = stated_claims()
    for number, is_last in enumerate((False, False, False, True, False, False, False, True, True)):
        check_last(contracts[along_n, True, True].ring.kinds[number], {}, is_last)  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("along_n", [0, 1])
def test_every_item_of_a_shared_last_wave_is_of_the_kind_that_is_stated(along_n: int) -> None:
    contracts, seen = stated_claims(), set[int]()
    for launch in launches():
        items = Items(launch)
        common = launch_names(items)
        for part in items.wave_items() if items.tail else ():
            full, place = place_names(launch, part.tile, along_n)
            pipeline: Any = contracts[along_n, full, True].ring
            assert isinstance(pipeline, Pipeline)
            number = kind_of(part, launch.steps, full)
            seen.add(number)
            kind = pipeline.kinds[number]
            wave = part.tile - items.whole
            names = common | place | part.names | {
                "in_wave": wave, "empty_tile": wave, "first_tile": part.first, "k_tiles": part.end - part.first,
                "rank": 0, "rank_m": 0, "rank_n": 0,
            }  # fmt: skip
            if number != 2:
                del names["share_over"]
            if number >= 5:
                del names["k_tiles"]  # an empty item has none
            if number in (5, 6):
                names["empty_end"] = part.names["share_tile"]
            check_item(kind.contract, part, names, kind.current)
            slabs = {c + t for t, owners in items.parts.items() for c in owners}
            assert len(slabs) == sum(map(len, items.parts.values())), "no two parts have one slab"
    assert seen == {0, 1, 2, 3, 5, 6, 7, 8}


@pytest.mark.slow
@pytest.mark.parametrize("along_n", [0, 1])
def test_every_whole_tile_is_of_the_kind_that_is_stated(along_n: int) -> None:
    for items, tile, kind, common in whole_tiles(along_n):
        names = common | {"k_tiles": items.launch.steps, "rank_m": 0, "rank_n": 0}
        if not items.tail:
            del names["tail"]  # the claim of full waves has no such name
        check_item(kind.contract, Part(tile, tile, 0, items.launch.steps, {}), names, kind.current)


@pytest.mark.slow
@pytest.mark.parametrize("along_n", [0, 1])
def test_the_parts_of_a_tile_are_those_that_are_stated(along_n: int) -> None:
    contracts, counts = stated_claims(), set[int]()
    for launch in launches():
        items = Items(launch)
        for wave, owners in items.parts.items():
            full, place = place_names(launch, items.whole + wave, along_n)
            pipeline: Any = contracts[along_n, full, True].ring
            counts.add(len(owners))
            for rank_m, rank_n in product((0, 1), (0, 1)):
                rank = rank_m + 2 * rank_n
                names = launch_names(items) | place | {
                    "in_wave": wave, "first_part": owners[0], "parts": len(owners), "rank_m": rank_m, "rank_n": rank_n,
                    "k_tiles": 1,
                }  # fmt: skip
                assert owners == list(range(owners[0], owners[0] + len(owners)))
                contract = pipeline.adders.passed[-1] if len(owners) == 1 else pipeline.adders.within
                # In m and n of whole tiles, a CTA of any rank has a tile within D.
                full_names = names | {"in_m": RECORD.bm * 2 - 1, "in_n": RECORD.bn * 2 - 1}
                check(contract.facts, full_names)
                slab = rank * (launch.clusters + items.tail) + owners[0] + wave
                assert value(pipeline.parts.first, full_names) == slab
                assert value(pipeline.parts.tile, full_names) == wave * CTAS + rank
    assert {1, 2, 3} < counts
