"""States the claims of a proof of a kernel whose CTAs load all of their k at once: its launches and tiles.

m is (rows - 1) * bm + 1 + in_m with 0 <= in_m < bm, so the last tiles may reach beyond the problem. n is stated in the
same way, and k too, but in units of a vector where rows run along k. Every CTA has one tile, or in a cluster one slice
of the k of a tile. Tiles are numbered row by row.
"""

from __future__ import annotations

from collections.abc import Iterator

from cudal2gen.kernel import Record
from cudal2gen.kernel.launch import Cluster
from cudal2gen.kernel.problem import MAX_EXTENT
from cudal2gen.validator.slice_facts import slice_of, with_slice
from kernelproof.certificates import (
    ARRIVALS,
    PARTIALS,
    TILES,
    Bounds,
    Claim,
    Contract,
    Facts,
    Matrix,
    NotCertified,
    Polynomial,
    Program,
    SingleShot,
    Tile,
    rests,
)
from kernelproof.ground.integers import ceil_div

ALIGNMENT = 16  # bytes to which A and B are aligned
MOST_CTAS = 1 << 30  # of a launch
_MOST_ADDRESS = 1 << 60  # upper bound of every name that stands for an address
named = Polynomial.named


def refusal(record: Record) -> str:
    """Why no proof is tried for a record; empty if a proof is tried."""
    reasons = {
        f"a D of {record.output.name}": record.output.bytes != 2,
        f"a fused {record.fusion}": bool(record.fusion),
        f"batch={record.batch}": record.batched,
    }
    return "; ".join(f"{reason} is not covered in {record.family}" for reason, holds in reasons.items() if holds)


def problems(record: Record) -> tuple[str, ...]:
    """The launches that the claims of a record cover, in words for the reader of a certificate."""
    vector, of_k = record.element.vector, _k_unit(record)
    lines = (
        f"m and n from 1 to {MAX_EXTENT}, tiles of {record.bm} x {record.bn}",
        f"k a positive multiple of {of_k}, at most {record.most_k}",
        f"at most {MOST_CTAS // record.split_k} tiles",
        "A is ({}) and B is ({})".format(*record.along_k.shapes),
        f"lda and ldb are multiples of {vector}, they and ldd from a row's length to {MAX_EXTENT}",
        f"A and B are at multiples of {ALIGNMENT} bytes, D of {record.output.bytes}",
    )
    if record.split_k == 1:
        return lines
    slices = f"of which there are at least {record.split_k}"
    clusters = (
        f"clusters of {record.split_k} CTAs, each of which has a slice of the k-tiles of {record.k_step}, {slices}"
    )
    return *lines, clusters


def claims(record: Record, program: Program) -> Iterator[Claim]:
    """The claim that a proof of a record's kernel must show. It is about all CTAs of a cluster. Raises NotCertified if
    the kernel has another number of parameters than the launcher passes."""
    if len(program.offsets) != 11:
        raise NotCertified(f"the kernel has {len(program.offsets)} parameters, not the launcher's 11")
    first, *peers = (_contract(record, program.offsets, rank) for rank in range(record.split_k))
    yield Claim("every CTA has a tile or a slice of one", first, SingleShot(_most_tiles(record), tuple(peers)))


def _most_tiles(record: Record) -> int:
    """How many k-tiles a CTA holds at most."""
    assert isinstance(record.launch, Cluster)
    return record.launch.steps


def _k_unit(record: Record) -> int:
    """The number of which k is a multiple: rows along k are whole vectors."""
    return record.element.vector if record.along_k.a or record.along_k.b else 1


def _bounds(record: Record) -> Bounds:
    """Bounds of all names."""
    most = max(ceil_div(MAX_EXTENT, record.bm), ceil_div(MAX_EXTENT, record.bn))
    bounds: Bounds = {(name,): (1, _MOST_ADDRESS) for name in ("a", "b", "d", PARTIALS, ARRIVALS)}
    bounds |= {(f"{x}_vectors",): (1, MAX_EXTENT // record.element.vector) for x in ("lda", "ldb")}
    bounds |= {("ldd",): (1, MAX_EXTENT), (TILES,): (1, _most_tiles(record))}
    bounds |= {(name,): (0, most) for name in ("tile_m", "below", "tile_n", "right")}
    bounds[("in_k",)] = (0, record.k_step // _k_unit(record) - 1)
    return bounds | rests.bounds("in_m", record.bm) | rests.bounds("in_n", record.bn)


def _contract(record: Record, offsets: list[int], rank: int) -> Contract:
    """The contract of the CTA of this rank in its cluster. ``offsets``: the byte offsets of the kernel's parameters."""
    element, output, count, unit = record.element, record.output, record.split_k, _k_unit(record)
    rows, cols = named("tile_m") + named("below") + 1, named("tile_n") + named("right") + 1
    tile = named("tile_m") * cols + named("tile_n")
    limits = [*rests.limits("in_m", record.bm), *rests.limits("in_n", record.bn)]
    limits += [MOST_CTAS - rows * cols * count, MOST_CTAS // count - 1 - tile]
    facts, first, total = Facts(_bounds(record), limits), Polynomial.of(0), named(TILES)
    if count > 1:
        facts = with_slice(facts, rank, count, record.k_step)
        first, total = slice_of(rank, count)
    m = rows * record.bm - (record.bm - 1) + rests.number("in_m", record.bm)
    n = cols * record.bn - (record.bn - 1) + rests.number("in_n", record.bn)
    k = total * record.k_step - (record.k_step - unit) + named("in_k", unit)
    lda, ldb, ldd = named("lda_vectors", element.vector), named("ldb_vectors", element.vector), named("ldd")
    along = record.along_k
    matrices = (
        Matrix("A", "a", ALIGNMENT, lda, m, k, element.name, False, across=not along.a),
        Matrix("B", "b", ALIGNMENT, ldb, n, k, element.name, False, across=not along.b),
        Matrix("D", "d", output.bytes, ldd, m, n, output.name, True),
    )
    a, b, d = (named(matrix.base, matrix.alignment) for matrix in matrices)
    values = (
        (a, 64), (lda, 32), (b, 64), (ldb, 32), (d, 64), (ldd, 32), (m, 32), (n, 32), (k, 32),
        (named(PARTIALS, ALIGNMENT), 64), (named(ARRIVALS, 4), 64),
    )  # fmt: skip
    special = {"%ctaid.x": tile * count + rank, "%nctaid.x": rows * cols * count}
    slice_k = named(TILES) * record.k_step  # the k that the CTA sums over
    own = Tile(named("tile_m") * record.bm, named("tile_n") * record.bn, record.bm, record.bn)
    return Contract(
        record.threads, record.smem_bytes, dict(zip(offsets, values, strict=True)), special, matrices, slice_k, own,
        facts, first=first * record.k_step,
    )  # fmt: skip
