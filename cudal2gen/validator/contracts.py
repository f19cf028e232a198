"""What a proof is told of a record's kernel: the launches that the launcher accepts, and the main loop's ring.

The sizes are named integers: m is (tile_m + 1 + tiles_below) * bm, so that a CTA's tile lies within D by construction,
and likewise n; k is k_tiles * k_step. Leading dimensions are multiples of a vector, pointers of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cudal2gen.kernel import Record
from cudal2gen.kernel.launch import Tiles
from cudal2gen.kernel.mma_sync import MAX_GRID_YZ, MmaSyncKernel
from cudal2gen.kernel.problem import MAX_EXTENT
from cudal2gen.kernel.record import Ring as RingRecord
from kernelproof.certificates.certificate import Claim
from kernelproof.certificates.contract import Bounds, Contract, Matrix, Tile
from kernelproof.certificates.facts import Facts, NotCertified
from kernelproof.certificates.loops import TILES, Ring
from kernelproof.certificates.polynomials import Polynomial
from kernelproof.certificates.program import Program

ALIGNMENT = 16  # of the operands' addresses, bytes
_MOST_ADDRESS = 1 << 60


def refusal(record: Record) -> str:
    """Why no proof is tried for a record; empty if one is."""
    if not isinstance(record, MmaSyncKernel) or not isinstance(record.launch, Tiles):
        return f"the family {record.family} is not covered"
    reasons = {
        "tiles that reach beyond the problem (padding=predicate)": record.predicated,
        f"{record.split_k} slices of k, which meet in a workspace": record.split_k > 1,
        f"a fused {record.fusion}": bool(record.fusion),
        f"batch={record.batch}": record.batched,
        "a persistent raster": record.persistent,
    }
    return "; ".join(f"{reason} is not covered" for reason, holds in reasons.items() if holds)


def claims(record: Record, program: Program) -> Iterator[Claim]:
    """What must hold of a record's kernel; the claims together are about every launch.

    Raises NotCertified for a record that ``refusal`` refuses.
    """
    if why := refusal(record):
        raise NotCertified(why)
    assert isinstance(record, MmaSyncKernel)
    for title, grid in _grids(record):
        yield Claim(title, _contract(record, grid, program.offsets), _ring(record))


class _Grid(NamedTuple):
    """CTAs of a launch: their special registers, the columns of tiles there are, and the CTA's tile (None: it has
    none)."""

    special: dict[str, Polynomial]
    columns: Polynomial
    tile_n: Polynomial | None
    bounds: Bounds


def _grids(record: MmaSyncKernel) -> Iterator[tuple[str, _Grid]]:
    named = Polynomial.named
    most = MAX_EXTENT // record.bn
    x, y = named("cta_x"), named("cta_y")
    special = {"%ctaid.x": x, "%ctaid.y": y}
    sizes: Bounds = {("cta_x",): (0, most - 1), ("right",): (0, most - 1)}
    assert isinstance(record.launch, Tiles)
    if record.launch.raster == "plain":
        yield "every CTA has a tile", _Grid(special, x + named("right") + 1, x, sizes)
        return
    # grid.x is the columns of tiles divided by the slices, rounded up. So a slice begins before the columns and the
    # slices together; and a column is that of one CTA, because cta_x < grid_x.
    special |= {"%ctaid.z": named("cta_z"), "%nctaid.x": named("grid_x")}
    sizes |= {("cta_z",): (0, MAX_GRID_YZ - 1), ("grid_x",): (1, most)}
    column = named("cta_z") * named("grid_x") + x
    sizes[("cta_z", "grid_x")] = (0, most - 1)
    yield "CTAs that have a tile", _Grid(special, column + named("right") + 1, column, sizes)
    beyond = most + MAX_GRID_YZ
    sizes = sizes | {("cta_z", "grid_x"): (0, beyond), ("right",): (0, 2 * beyond)}
    yield "CTAs beyond the last column", _Grid(special, column - named("right"), None, sizes)


def _contract(record: MmaSyncKernel, grid: _Grid, offsets: list[int]) -> Contract:
    named = Polynomial.named
    element, output = record.element, record.output
    rows = (named("cta_y") + named("below") + 1) * record.bm
    cols = grid.columns * record.bn
    k = named(TILES) * record.k_step
    packed = Polynomial.of(record.baked_k)
    lda = packed if record.baked_k else named("lda_vectors", element.vector)
    ldb = packed if record.baked_k and record.layout == "tn" else named("ldb_vectors", element.vector)
    ldd = named("ldd_vectors", output.vector)
    matrices = (
        Matrix("A", "a", ALIGNMENT, lda, rows, k, element.bytes, False),
        Matrix("B", "b", ALIGNMENT, ldb, cols, k, element.bytes, False, across=record.layout == "nn"),
        Matrix("D", "d", ALIGNMENT, ldd, rows, cols, output.bytes, True),
    )
    a, b, d = (matrix.address for matrix in matrices)
    arguments = (
        (a, 64), (lda, 32), (b, 64), (ldb, 32), (d, 64), (ldd, 32), (rows, 32), (cols, 32), (k, 32),
        (named("partials"), 64), (named("arrivals"), 64),
    )  # fmt: skip
    if len(arguments) != len(offsets):
        raise NotCertified(f"the kernel has {len(offsets)} parameters, not the launcher's {len(arguments)}")
    most = min(MAX_EXTENT // record.bm, MAX_GRID_YZ)
    bounds = grid.bounds | {("cta_y",): (0, most - 1), ("below",): (0, most - 1)}
    bounds |= {(name,): (1, _MOST_ADDRESS) for name in ("a", "b", "d", "partials", "arrivals")}
    bounds |= {(f"{name}_vectors",): (1, MAX_EXTENT // 4) for name in ("lda", "ldb", "ldd")}
    bounds[(TILES,)] = (1, MAX_EXTENT // record.k_step)
    tile = Tile(named("cta_y") * record.bm, grid.tile_n * record.bn, record.bm, record.bn) if grid.tile_n else None
    return Contract(
        record.threads, record.smem_bytes, dict(zip(offsets, arguments, strict=True)), grid.special, matrices, k, tile,
        Facts(bounds),
    )  # fmt: skip


def _ring(record: MmaSyncKernel) -> Ring:
    """The loop's ring by the record: in its last turns nothing is copied, or, without a ring, loaded ahead."""
    stages = record.stages if isinstance(record, RingRecord) else 1
    return Ring(stages, max(1, stages - 1), MAX_EXTENT // record.k_step, record.baked_k // record.k_step)
