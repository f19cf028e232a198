"""States the claims of a proof of a kernel whose clusters share out the last wave of tiles (``stream_k``).

D has R cluster tiles, and C clusters run. Full waves have R - T tiles, with T = R mod C. Cluster c computes the tiles
c, c + C, c + 2 * C, ... of these, each whole. The last wave has the other T tiles. Their k-tiles, ``steps`` of each
tile, are numbered through, tile by tile, and cluster c has a **share**: from begin(c) to before begin(c + 1), where

    least = T * steps / C,    longer = T * steps mod C,    begin(c) = least * c + min(c, longer).

A share has at most ``steps`` k-tiles, because least < steps: T is less than C. So it lies in one tile or in two. After
its whole tiles a cluster has two items: the part of its share in the tile in which the share begins, and the part in
the next tile. Each of them may be empty. A tile that is one cluster's whole share is stored like one of a full wave.

All other parts are left in a workspace. The part of cluster c in tile t of the last wave, of the CTA with rank r, has
slab r * (C + T) + c + t. From one part to the next along k, c or t or both grow by one; so no two parts have one slab,
and the parts of a tile lie one after the other. The parts of tile t are those of the clusters from ``first_part`` on,
the one whose share has k-tile t * steps, up to the one whose share has k-tile (t + 1) * steps - 1: shares before that
are not empty, since the first ``longer`` ones are longer than the others.

Every number that the text computes is stated as a polynomial in names: a cluster's share by the tile and the k-tile at
which it begins, ``least`` by the length of the share, T by the tiles after the item's. What defines these names are
``Fraction`` and ``Minimum``, and the facts that follow from the definitions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from cudal2gen.kernel.problem import MAX_EXTENT
from cudal2gen.kernel.tma_ring import MAX_BAND, TmaRing
from cudal2gen.validator.ring_contracts import (
    ALIGNMENT,
    Bands,
    Item,
    any_item,
    common_bounds,
    extents_of,
    groups_of,
    item_bounds,
    launch_of,
    most_items_of,
    named,
    pipeline_of,
    place_of,
    rank_bounds,
    rank_of,
    rest_limits,
)
from cudal2gen.validator.ring_contracts import problems as problems_of_ring
from kernelproof.certificates import (
    PARTIALS,
    TILES,
    ZERO,
    Adders,
    Bounds,
    Claim,
    Contract,
    Facts,
    Fraction,
    ItemKind,
    Matrix,
    Minimum,
    Parts,
    Pipeline,
    Polynomial,
    Program,
    Slices,
    Tile,
)
from kernelproof.ground.integers import ceil_div

MOST_RESIDENT = 1 << 12  # most CTAs that share out a last wave; the k-tiles of its tiles are counted in 31 bits
AT_ONCE = 16  # the most parts of a tile that a thread loads at once (``templates/macros/parts.j2``)
# Pairs: the most parts of a tile, and how many vectors a thread then adds at once. With more parts it adds one.
WIDTHS = ((4, 4), (8, 2))
# Names: C, T, the number of full waves, ``steps``, ``least``; the cluster whose share is meant; whether its share is
# one of the longer ones; the item's tile in the last wave; the first k-tile of an item in its tile.
CLUSTERS, TAIL, WAVES, STEPS, LEAST, CLUSTER = "grid_x", "tail", "waves", "all_tiles", "least_share", "cluster"
LONGER, AT, FIRST = "longer", "in_wave", "first_tile"
# Names for a share: the tile and the k-tile in it at which the share begins; its length; its k-tiles in a second tile.
SHARE_TILE, SHARE_FIRST, LENGTH, OVER = "share_tile", "share_first", "share_length", "share_over"
# Names for an empty item, whose tile does not matter: its tile in the last wave, and where the text finds that tile.
EMPTY, EMPTY_END, EMPTY_BAND, EMPTY_ALONG = (f"empty_{x}" for x in ("tile", "end", "band", "along"))
FIRST_PART, PARTS = "first_part", "parts"  # of a tile: the first cluster with a part of it, and how many parts it has


def problems(record: TmaRing) -> tuple[str, ...]:
    """The launches that the claims of a record cover, in words for the reader of a certificate."""
    return (
        *problems_of_ring(record),
        f"at most {MOST_RESIDENT} CTAs, which all run at once",
        f"partial sums are at multiples of {ALIGNMENT} bytes",
        "counters are zero",
    )


def claims(record: TmaRing, program: Program) -> Iterator[Claim]:
    """The claims that a proof of a record's kernel must show. Together they cover every launch and every item."""
    for along_n in (0, 1):
        for full in (True, False):
            band = f"{'whole bands' if full else 'the last and narrower band'}, along {'n' if along_n else 'm'}"
            for shares in (False, True):
                wave = _Wave(record, program, any_item(along_n, full), shares)
                title = f"tiles of {band}; {'the last wave is shared out' if shares else 'all waves are full'}"
                pipelines = [wave.pipeline(rank) for rank in range(record.cluster_ctas)]
                contracts = [pipeline.kinds[0].contract for pipeline in pipelines]
                peers = tuple(zip(contracts[1:], pipelines[1:], strict=True))
                yield Claim(title, contracts[0], replace(pipelines[0], peers=peers))


@dataclass(frozen=True)
class _Wave:
    """The contracts of launches for items at one kind of place, that of ``item``.

    ``shares``: whether the last wave is shared out; otherwise all waves are full.
    """

    record: TmaRing
    program: Program
    item: Item
    shares: bool

    # --- numbers

    @cached_property
    def most_clusters(self) -> int:
        return MOST_RESIDENT // self.record.cluster_ctas

    @cached_property
    def most_steps(self) -> int:
        return ceil_div(MAX_EXTENT, self.record.bk)

    @cached_property
    def tail(self) -> Polynomial:
        """T, computed from the number of an item of the last wave. The item's tile is number AT in that wave."""
        return self.item.bands.rows * self.item.bands.cols - self.item.number + named(AT)

    def _bounds(self) -> Bounds:
        """Bounds of the names of a launch and of shares."""
        clusters, steps = self.most_clusters, self.most_steps
        bounds: Bounds = {("cta_x",): (0, clusters - 1), (CLUSTERS,): (1, clusters), (LONGER,): (0, 1)}
        bounds |= {(WAVES,): (0, most_items_of(self.record)), (TAIL,): (1, clusters - 1)}
        bounds |= {(name,): (0, clusters - 1) for name in (CLUSTER, AT, EMPTY, FIRST_PART)}
        bounds |= {(name,): (0, clusters) for name in (SHARE_TILE, EMPTY_END)}
        bounds |= {(name,): (0, steps) for name in (LEAST, FIRST, SHARE_FIRST, LENGTH)}
        return bounds | {(name,): (1, steps) for name in (STEPS, OVER)} | {(PARTS,): (1, clusters)}

    # --- facts

    def _facts(
        self, bounds: Bounds, tiles: Polynomial, tail: Polynomial, steps: Polynomial, least: Polynomial,
        *assumed: Polynomial,
    ) -> Facts:  # fmt: skip
        """The facts of a launch with ``tiles`` cluster tiles, of which the last wave has ``tail``, and ``steps``
        k-tiles of each. ``least``: as in the module. ``assumed``: further polynomials that are at least 0."""
        clusters = named(CLUSTERS)
        known = [most_items_of(self.record) - tiles, *rest_limits(self.record), *assumed]
        fractions = [Fraction(tiles, clusters, named(WAVES), rest=tail)]
        if self.shares:
            total, longer = tail * steps, tail * steps - least * clusters
            known += [
                clusters - 1 - tail, tiles - tail, self._limit - total, longer, clusters - 1 - longer, least,
                self.most_steps - least,
            ]  # fmt: skip
            fractions.append(Fraction(total, clusters, least, rest=longer))
        facts = Facts(self._bounds() | bounds, [each for each in known if not each.is_constant])
        return replace(facts, fractions=fractions)

    @property
    def _limit(self) -> int:
        """The most k-tiles of all tiles of a last wave."""
        return (self.most_clusters - 1) * self.most_steps

    def _share_facts(
        self, bounds: Bounds, tiles: Polynomial, tail: Polynomial, steps: Polynomial, begin: Polynomial,
        tile: Polynomial, length: Polynomial, longer: Polynomial, *assumed: Polynomial,
    ) -> Facts:  # fmt: skip
        """The facts of the share of CLUSTER, which begins at k-tile ``begin``, in ``tile`` of the last wave, and has a
        ``length``. ``longer``: 1 if it is one of the longer ones, else 0."""
        clusters, own, least = named(CLUSTERS), named(CLUSTER), length - longer
        facts = self._facts(
            bounds, tiles, tail, steps, least,
            clusters - 1 - own, begin, self._limit - begin, begin + length, self._limit - begin - length,
            self._limit + self.most_steps - (tile + 1) * steps, *assumed,
        )  # fmt: skip
        rest, before = tail * steps - least * clusters, begin - least * own
        return replace(
            facts,
            fractions=[
                *facts.fractions, Fraction(begin, steps, tile), Fraction(clusters + own, clusters, Polynomial.of(1)),
            ],
            minima=[Minimum(own, rest, before), Minimum(own + 1, rest, before + longer)],
        )  # fmt: skip

    # --- contracts

    def _entry_contract(self, place: tuple[Polynomial, Polynomial]) -> Contract:
        """The contract of the CTA at a place of its cluster, up to its first item."""
        record, (high, wide, _) = self.record, extents_of(self.record)
        rows, cols = named("tiles_m"), named("tiles_n")
        tail = named(TAIL) if self.shares else ZERO
        known = [named(CLUSTERS) - 1 - named("cta_x")]
        if not self.shares:
            known.append(rows * cols - named(CLUSTERS))
            known.append(rows * cols - 1 - named("cta_x"))
        facts = self._facts(
            self._launch_bounds(high, wide), rows * cols, tail, named(STEPS), named(LEAST), *known
        )  # fmt: skip
        return launch_of(record, self.program, self._unknown_bands(), facts, rank_of(record, place), named(STEPS))

    def _launch_bounds(self, high: int, wide: int) -> Bounds:
        """Bounds of the names of a launch in which no item is named. ``high``, ``wide``: extents of a cluster tile."""
        record = self.record
        return common_bounds(record) | self._bounds() | rank_bounds(record) | {
            ("tiles_m",): (1, ceil_div(MAX_EXTENT, high)), ("tiles_n",): (1, ceil_div(MAX_EXTENT, wide)),
            ("tiles_m", "tiles_n"): (1, most_items_of(record)), ("band",): (1, MAX_BAND),
        }  # fmt: skip

    def _contract(self, place: tuple[Polynomial, Polynomial], facts: Facts, steps: Polynomial) -> Contract:
        """The contract of the CTA at a place of its cluster while it computes the item. ``steps``: the k-tiles of a
        tile."""
        record, item = self.record, self.item
        contract = launch_of(record, self.program, item.bands, facts, rank_of(record, place), steps)
        row, col = (
            (x * each + at) * size
            for x, each, at, size in zip(item.tile, record.cluster, place, (record.bm, record.bn), strict=True)
        )
        return replace(contract, tile=Tile(row, col, record.bm, record.bn))

    def _item_facts(self) -> tuple[Bounds, Polynomial, tuple[Polynomial, ...]]:
        """Bounds of the names of the item, the number of tiles, and polynomials that are at least 0."""
        item, most = self.item, most_items_of(self.record)
        bounds = item_bounds(self.record, item) | rank_bounds(self.record) | self._bounds()
        limits = (
            most - 1 - item.number, 2 * most - 1 - item.number - named(CLUSTERS), MAX_BAND - item.bands.band,
        )  # fmt: skip
        return bounds, item.bands.rows * item.bands.cols, limits

    def _names(self, tail: Polynomial, steps: Polynomial, least: Polynomial) -> dict[str, Polynomial]:
        """The values of the names of the entry for an item."""
        return self.item.bands.names | {TAIL: tail, STEPS: steps, LEAST: least}

    # --- kinds of items

    def _full_wave_item(self, rank: int) -> ItemKind:
        """A tile of a full wave."""
        bounds, tiles, limits = self._item_facts()
        tail, steps = named(TAIL) if self.shares else ZERO, named(TILES)
        before = tiles - tail - 1 - self.item.number
        facts = self._facts(bounds, tiles, tail, steps, named(LEAST), *limits, before)
        left = tiles - 1 - self.item.number - named(CLUSTERS)
        # If the last wave is shared out, the CTA has an item of it after those of full waves.
        last = ((False, ()),) if self.shares else ((False, (left,)), (True, (-left - 1,)))
        return ItemKind(
            self._contract(place_of(self.record, rank), facts, steps), self._names(tail, steps, named(LEAST)),
            self.item.number, last, loop={STEPS: steps, FIRST: ZERO},
        )  # fmt: skip

    def _number(self, part_index: int) -> Polynomial:
        """The number of the cluster's first or second item of the last wave, as a polynomial in the item's names."""
        return self.item.number - named(AT) + named(CLUSTER) + named(CLUSTERS) * part_index

    def _part_item(
        self, rank: int, part_index: int, steps: Polynomial, first: Polynomial, begin: Polynomial, tile: Polynomial,
        length: Polynomial, *assumed: Polynomial, is_whole: bool = False,
    ) -> ItemKind:  # fmt: skip
        """The first (``part_index`` 0) or second item of a cluster's share, which has the k-tiles of the item's tile
        from ``first`` on. ``begin``, ``tile``, ``length``: those of the share, see ``_share_facts``. ``is_whole``:
        whether the item is a whole tile."""
        bounds, tiles, limits = self._item_facts()
        facts = self._share_facts(
            bounds, tiles, self.tail, steps, begin, tile, length, named(LONGER), self.item.number - named(AT),
            *limits, *assumed,
        )  # fmt: skip
        place = place_of(self.record, rank)
        contract = replace(self._contract(place, facts, steps), first=first * self.record.bk)
        names = self._names(self.tail, steps, length - named(LONGER))
        last: tuple[tuple[bool, tuple[Polynomial, ...]], ...] = ((bool(part_index), ()),)
        loop = {name: value for name, value in ((STEPS, steps), (FIRST, first)) if not value.equals(named(name))}
        if is_whole:
            return ItemKind(contract, names, self._number(part_index), last, loop=loop)
        kept = self._with_workspace(contract, rank_of(self.record, place))
        within, beyond = self._edges(kept, place)
        return ItemKind(kept, names, self._number(part_index), last, after_products=(within, *beyond), loop=loop)

    @property
    def _slabs(self) -> Polynomial:
        """How many slabs of the workspace the CTAs of one rank have."""
        return named(CLUSTERS) + self.tail

    @property
    def _workspace(self) -> Matrix:
        """The workspace: a row for each slab, which has the partial sums of a tile."""
        slab = Polynomial.of(self.record.bm * self.record.bn)
        slabs = self._slabs * self.record.cluster_ctas
        return Matrix(PARTIALS, PARTIALS, ALIGNMENT, slab, slabs, slab, "f32", None)

    def _with_workspace(self, contract: Contract, rank: Polynomial) -> Contract:
        """The contract with the workspace added, in which the CTA of a rank leaves its part of the item's tile."""
        record, slabs = self.record, self._slabs
        counter = named(AT) * record.cluster_ctas + rank
        own = rank * slabs + named(CLUSTER) + named(AT)
        return replace(
            contract, matrices=(*contract.matrices, self._workspace),
            slices=Slices(2, ZERO, counter, record.bm * record.bn, ZERO, own),
        )  # fmt: skip

    def _edges(self, contract: Contract, place: tuple[Polynomial, Polynomial]) -> tuple[Contract, tuple[Contract, ...]]:
        """The contract for tiles that begin within D, and those for tiles that begin beyond it along m, n or both. The
        tile of a cluster's first CTA always begins within D."""
        d, tile = contract.matrices[2], contract.tile
        assert tile is not None
        # Along each axis, whether the tile begins within D, with a polynomial that is at least 0 in this case.
        cases = [
            ((True, extent - 1 - start), (False, start - extent)) if at.terms else ((True, extent - 1 - start),)
            for at, start, extent in zip(place, (tile.row, tile.col), (d.rows, d.cols), strict=True)
        ]
        contracts = []
        for (in_rows, row), (in_cols, col) in product(*cases):
            case = replace(contract, facts=contract.facts.extended({}, row, col))
            contracts.append(case if in_rows and in_cols else replace(case, tile=None, slices=None))
        return contracts[0], tuple(contracts[1:])

    def _parts(self, rank: int) -> Iterator[ItemKind]:
        """The kinds of items that are parts of the last wave, without empty ones."""
        at, steps, first, tiles, over = named(AT), named(STEPS), named(FIRST), named(TILES), named(OVER)
        after = self.tail - at - 1  # tiles after the item's
        begin = at * steps + first
        # The share lies in one tile, of which it is a part.
        yield self._part_item(rank, 0, steps, first, begin, at, tiles, steps - first - tiles, steps - 1 - tiles)
        # The share is a whole tile.
        yield self._part_item(rank, 0, tiles, ZERO, at * tiles, at, tiles, is_whole=True)
        # The share goes on in the next tile, in which it has at most as many k-tiles as the tile has before its begin.
        yield self._part_item(
            rank, 0, first + tiles, first, at * (first + tiles) + first, at, tiles + over, first - over, after - 1
        )
        # The second item of such a share.
        own = named(SHARE_FIRST)
        yield self._part_item(
            rank, 1, steps, ZERO, (at - 1) * steps + own, at - 1, steps - own + tiles,
            at - 1, own - tiles, steps - 1 - own, steps - 1 - tiles,
        )  # fmt: skip

    def _unknown_bands(self) -> Bands:
        """The bands of a launch in which no item is named."""
        return Bands(named("tiles_m"), named("tiles_n"), named("band"), self.item.bands.along_n)

    def _empty_item(self, part_index: int, is_full: bool) -> ItemKind:
        """An empty item of a share: the first one (``part_index`` 0) of a share without k-tiles, or the second one of a
        share that lies in one tile. ``is_full``: whether the band in which the text finds its tile is a full one."""
        record, (high, wide, _) = self.record, extents_of(self.record)
        bands = self._unknown_bands()
        left = bands.across - named(EMPTY_BAND) * bands.band  # tiles across from this band on
        if not is_full:
            bands = bands._replace(last=left)
        rows, cols, band, along = bands.rows, bands.cols, bands.band, bands.along
        tiles, tail, steps, at = rows * cols, named(TAIL), named(STEPS), named(EMPTY)
        begin = named(SHARE_TILE) * steps + named(SHARE_FIRST)
        length, longer = (named(LENGTH), named(LONGER)) if part_index else (ZERO, ZERO)
        end, number = begin + length, tiles - tail + at
        in_band, width = number - named(EMPTY_BAND) * band * along, band if is_full else left
        bounds: Bounds = {(EMPTY_BAND,): (0, max(high, MAX_EXTENT)), (EMPTY_ALONG,): (0, MAX_EXTENT)}
        facts = self._share_facts(
            self._launch_bounds(high, wide) | bounds, tiles, tail, steps, begin, named(SHARE_TILE), length, longer,
            steps - named(SHARE_FIRST) - length, steps - 1 - named(SHARE_FIRST), tail - 1 - at,
            end - at * steps, steps - end + at * steps, in_band, most_items_of(record) - in_band,
            *((left - band,) if is_full else (left - 1, band - 1 - left)), number, most_items_of(record) - number,
        )  # fmt: skip
        # The kernel takes the tile that contains ``end``, or the last tile if ``end`` is after it.
        found = named(EMPTY_END) if part_index else named(SHARE_TILE)
        facts.fractions += [
            Fraction(end, steps, found), Fraction(number, along * band, named(EMPTY_BAND)),
            Fraction(in_band, width, named(EMPTY_ALONG)),
        ]  # fmt: skip
        facts.minima.append(Minimum(found, tail - 1, at))
        contract = launch_of(record, self.program, bands, facts, 0, steps)
        current = tiles - tail + named(CLUSTER) + named(CLUSTERS) * part_index
        return ItemKind(
            contract, bands.names | {LEAST: length - longer}, current, ((bool(part_index), ()),), is_empty=True
        )

    def _loop_contract(self, rank: int) -> Contract:
        """The contract of the loop over k-tiles, for items of every kind: TILES k-tiles of STEPS, from FIRST on."""
        bounds, tiles, limits = self._item_facts()
        known = [most_items_of(self.record) - tiles, *rest_limits(self.record), *limits]
        facts = Facts(bounds, [*known, named(STEPS) - named(FIRST) - named(TILES)])
        contract = self._contract(place_of(self.record, rank), facts, named(STEPS))
        return self._with_workspace(replace(contract, first=named(FIRST) * self.record.bk), Polynomial.of(rank))

    # --- pipelines

    def pipeline(self, rank: int) -> Pipeline:
        """The roles of the warps of the CTA of this rank, for items of every kind."""
        base = pipeline_of(self.record, self.program, self.item, rank)
        kinds = [self._full_wave_item(rank)]
        if self.shares:
            kinds = [*self._parts(rank), *kinds]
            for part_index, is_full in product((0, 1), (True, False)):
                empty = self._empty_item(part_index, is_full)
                ranked = {"%ctaid.x": empty.contract.special["%ctaid.x"] + rank}
                special = {**empty.contract.special, **ranked}
                kinds.append(replace(empty, contract=replace(empty.contract, special=special)))
        parts, adders = self._adders()
        return replace(
            base, entry=self._entry_contract(place_of(self.record, rank)), first=named("cta_x"),
            names=self._names(self.tail, named(STEPS), named(LEAST)), kinds=tuple(kinds), parts=parts, adders=adders,
            loop=self._loop_contract(rank) if self.shares else None,
        )  # fmt: skip

    def _adders(self) -> tuple[Parts, Adders]:
        """What the claim states about the consumer groups that add the parts of the last wave's tiles."""
        record, ((first, end), *_) = self.record, groups_of(self.record)
        across_m, across_n = (size > 1 for size in record.cluster)
        place = named("rank_m") if across_m else ZERO, named("rank_n") if across_n else ZERO
        rank, ctas = rank_of(record, place), record.cluster_ctas
        tail = named(TAIL) if self.shares else ZERO
        parts = Parts(
            named(PARTS), record.bm * record.bn // (4 * (end - first)), record.cols // 8, 1, tail * ctas,
            named(AT) * ctas + rank, named("cta_x") * ctas + rank, named(CLUSTERS) * ctas,
            first=rank * self._slabs + named(FIRST_PART) + named(AT), at_once=AT_ONCE, widths=WIDTHS,
        )  # fmt: skip
        if not self.shares:
            return parts, Adders(self._entry_contract(place), None)
        most = self.most_clusters
        within, _ = self._edges(self._adder_contract(place, rank, 2, most), place)
        _, beyond = self._edges(self._adder_contract(place, rank, 1, most), place)
        alone = replace(self._adder_contract(place, rank, 1, 1), tile=None)
        return parts, Adders(self._entry_contract(place), within, (*beyond, alone))

    def _adder_contract(
        self, place: tuple[Polynomial, Polynomial], rank: Polynomial, fewest: int, most: int
    ) -> Contract:
        """The contract of a CTA that adds the parts of the item's tile, of which there are from ``fewest`` to
        ``most``."""
        bounds, tiles, limits = self._item_facts()
        clusters, steps, least, tail = named(CLUSTERS), named(STEPS), named(LEAST), self.tail
        start, count = named(FIRST_PART), named(PARTS)
        longer = tail * steps - least * clusters
        edge = longer * (least + 1)  # the k-tiles of the longer shares
        begin, last = named(AT) * steps, named(AT) * steps + steps - 1
        slabs = self._slabs
        facts = self._facts(
            bounds | {(PARTS,): (fewest, most)}, tiles, tail, steps, least, *limits,
            self.item.number - named(AT), edge, self._limit - edge, clusters - start - count,
            slabs * self.record.cluster_ctas - rank * slabs - named(AT) - start - count,
        )  # fmt: skip
        for step, cluster in ((begin, start), (last, start + count - 1)):
            facts.fractions += [
                Fraction(step, least + 1, cluster, edge - 1 - step),
                Fraction(step - edge, least, cluster - longer, step - edge),
            ]
        contract = self._contract(place, facts, steps)
        return replace(contract, matrices=(*contract.matrices, self._workspace))
