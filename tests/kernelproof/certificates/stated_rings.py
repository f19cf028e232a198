"""States the launches of the small kernels with rings, for their proofs. Tiles of D lie one below the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kernelproof.certificates import (
    TILES,
    ZERO,
    BoxMap,
    Claim,
    Contract,
    Facts,
    Matrix,
    Pipeline,
    Polynomial,
    TensorPlan,
    Tile,
)

MOST = 1 << 20  # tiles, k-tiles and CTAs
named = Polynomial.named


@dataclass(frozen=True)
class StatedRing:
    """A kernel that loads operands of f16 by tensor maps into a ring of stages.

    ``rows``, ``cols``: of a CTA's tile, in elements. ``depth``: the k of a k-tile. ``groups``: the first thread of each
    group that stores, and the one after its last; no thread has a higher number. ``box_d``: rows, columns and bytes of
    the swizzle of the map of D. ``loaded_bytes``: what a CTA of a cluster loads for a stage. ``tensor``: its
    accumulators in tensor memory, None if it has none there.
    """

    rows: int
    cols: int
    depth: int
    stages: int
    groups: Sequence[tuple[int, int]]
    shared_bytes: int
    box_d: tuple[int, int, int]
    loaded_bytes: int | None = None
    tensor: TensorPlan | None = None

    def contract(self, facts: Facts, rows: Polynomial, row: Polynomial, rank: int, ranks: int) -> Contract:
        """The contract of the CTA of a rank, in a cluster of ``ranks``. ``rows``: the rows of cluster tiles that D
        has. ``row``: that of the CTA's cluster."""
        m, n, k = rows * self.rows * ranks, Polynomial.of(self.cols), named(TILES) * self.depth
        operands = (("A", m, k, False), ("B", n, k, False), ("D", m, n, True))
        return Contract(
            self.groups[-1][1], self.shared_bytes, {384: (rows, 32), 388: (named(TILES), 32)},
            {"%ctaid.x": named("cta_x") * ranks + rank, "%nctaid.x": named("grid_x") * ranks},
            tuple(Matrix(x, x.lower(), 16, named(f"ld{x}", 8), a, b, "f16", out) for x, a, b, out in operands),
            k, Tile((row * ranks + rank) * self.rows, ZERO, self.rows, self.cols), facts,
            maps=(
                BoxMap("A", 0, self.rows, self.depth, 32), BoxMap("B", 128, self.cols // ranks, self.depth, 32),
                BoxMap("D", 256, *self.box_d),
            ),
        )  # fmt: skip

    def claim(self, ranks: int = 1) -> Claim:
        """All launches: any number of tiles, k-tiles and clusters of ``ranks`` CTAs, of which none is without a
        tile."""
        bounds = {(name,): (1, MOST) for name in ("tiles_m", "grid_x", TILES)} | {
            (name,): (0, MOST) for name in ("cta_x", "at", "rest")
        }
        bounds |= {(name,): (1, 1 << 40) for name in ("a", "b", "d")} | {(f"ld{x}",): (1, MOST) for x in "ABD"}
        rows = named("at") + named("rest") + 1
        ctas = []
        for rank in range(ranks):
            facts = Facts(bounds, [named("tiles_m") - 1 - named("cta_x")])
            entry = self.contract(facts, named("tiles_m"), named("cta_x"), rank, ranks)
            item = self.contract(Facts(bounds, [MOST - rows]), rows, named("at"), rank, ranks)
            pipeline = Pipeline(
                self.stages, tuple(self.groups), MOST, entry, named("cta_x"), {"tiles_m": rows}, named("at"),
                named("grid_x"), named("rest") - named("grid_x"), rank, ranks,
                self.loaded_bytes if ranks > 1 else None, frozenset(range(ranks)), tensor=self.tensor,
            )  # fmt: skip
            ctas.append((item, pipeline))
        (item, pipeline), *peers = ctas
        return Claim("any tile", item, replace(pipeline, peers=tuple(peers)))
