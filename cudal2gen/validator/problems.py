"""Lists the problems that stress a record: their shapes, their kinds of inputs, and how their matrices are stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cudal2gen.kernel import Problem, Record, aligned, ceil_div
from cudal2gen.kernel.fusion import GATE_COLS
from cudal2gen.kernel.launch import Batches, Sizes
from cudal2gen.results import Case

Array = NDArray[Any]

SMALL_PROBLEM = 1 << 24  # largest m * n * k of a record's own problem that is executed as a whole
CLUSTERS = 2  # clusters that the emulated device holds at once; a CTA without a cluster counts as one


@dataclass(frozen=True)
class Shape:
    """A problem to execute. If the record's caller pads, the launch is larger and the rest of A and B is zero.

    ``swizzle_stride`` and ``options``: launch options in place of the record's own. ``corners``: execute only the
    corner CTAs of the grid. ``batch``: the products of one launch; ``shared_b``: they share one B. ``groups``: for a
    grouped kernel the rows of each group, from the first row on; rows after them belong to no group.
    """

    m: int
    n: int
    k: int
    swizzle_stride: int | None = None
    corners: bool = False
    options: tuple[tuple[str, int], ...] = ()
    batch: int = 1
    shared_b: bool = False
    groups: tuple[int, ...] = ()

    @property
    def mnk(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k

    def launched(self, record: Record) -> Sizes:
        """The extents with which the kernel is launched."""
        return record.padded(Sizes(*self.mnk))

    @property
    def launch_options(self) -> dict[str, int]:
        """The launch options that differ from the record's own."""
        stride = {} if self.swizzle_stride is None else {"swizzle_stride": self.swizzle_stride}
        return stride | dict(self.options)

    @property
    def products(self) -> dict[str, int]:
        """The fields of a case that describe a batch or groups; empty for a single product. ``rows``: those that belong
        to a group."""
        several = {"batch": self.batch} if self.batch > 1 else {}
        grouped = {"groups": len(self.groups), "rows": sum(self.groups)} if self.groups else {}
        return several | grouped | ({"shared_b": 1} if self.shared_b else {})

    def rows(self, executed: Array) -> list[Array]:
        """For each product its rows of D among the ``executed`` ones; a group has rows of its own."""
        if not self.groups:
            return [executed[executed < self.m]] * self.batch
        ends = np.cumsum(self.groups)
        return [np.arange(end - size, end) for size, end in zip(self.groups, ends, strict=True)]

    def ctas(self, record: Record) -> int:
        """CTA tiles of the whole problem, including slices of k."""
        tiles_m = sum(ceil_div(rows, record.bm) for rows in self.groups or (self.m,))
        return tiles_m * ceil_div(self.n, record.bn) * record.split_k * self.batch

    def problem(self, record: Record) -> Problem:
        """The record's problem with these sizes."""
        return record.problem.model_copy(update={"m": self.m, "n": self.n, "k": self.k})

    def case(
        self,
        inputs: str,
        ctas: int,
        compared: str = "nothing",
        findings: list[str] | tuple[str, ...] = (),
        max_error: float = 0.0,
        allowed: float | None = None,
        remarks: tuple[str, ...] = (),
    ) -> Case:
        """The stored form of an execution of this shape. ``compared`` and ``allowed`` are those of a ``Comparison``."""
        return Case(
            m=self.m,
            n=self.n,
            k=self.k,
            swizzle_stride=self.swizzle_stride,
            inputs=inputs,
            compared=compared,
            max_error=max_error,
            allowed=allowed,
            ctas=ctas,
            findings=tuple(findings),
            options=dict(self.options) | self.products,
            remarks=remarks,
        )


class Strides(NamedTuple):
    """The leading dimensions of A and B as a record's layout stores them, and of D (m,n), in elements."""

    a: int
    b: int
    d: int


def strides(record: Record, sizes: Sizes, packed: bool = False) -> Strides:
    """Leading dimensions that a record's kernel takes, longer than the rows unless the lengths are compiled in.

    ``packed``: as short as alignment allows. Rows of D are aligned only if the kernel stores vectors.
    """
    return Strides(*(matrix.ld for matrix in record.launch.spaced(sizes, 0 if packed else 1)))


def batches(record: Record, shape: Shape, packed: bool = False) -> Batches:
    """The products of a launch, one after the other, with space between them unless ``packed``.

    Groups are rows of the same A, C and D, so only B and a bias along n have a stride.
    """
    if shape.batch == 1 and not shape.shared_b and not shape.groups:
        return Batches()
    sizes = shape.launched(record)
    (m, n, k), (lda, ldb, ldd) = sizes, strides(record, sizes, packed)
    vector = record.element.vector
    # The spaces differ in length, so that a kernel that takes one operand's distance for another reads wrong data.
    gap = 0 if packed else vector
    size_a, size_b = (m if record.along_k.a else k) * lda, (n if record.along_k.b else k) * ldb
    # If D is stored in vectors, its matrices must start at multiples of them.
    gap_d = gap if packed or record.launch.stores_vectors else 1
    stride_b = 0 if shape.shared_b else size_b + 2 * gap
    bias = aligned(m if record.fusion.bias == "m" else n, vector) + gap
    if shape.groups:
        return Batches(len(shape.groups), b=stride_b, bias=bias)
    return Batches(shape.batch, size_a + gap, stride_b, m * ldd + 3 * gap_d, bias, m * ldd + 5 * gap_d)


def stress_shapes(record: Record) -> list[Shape]:
    """Problems that exercise a record.

    One and several CTAs in each direction; k below, at and above the length of the ring, and the largest k that the
    kernel takes; sizes that are no multiple of the tile if the kernel allows them; slices of several widths; and the
    record's own problem if it is small.
    """
    bm, bn, bk = record.bm, record.bn, record.k_step
    sizes = [(m, n, record.baked_k or k) for m, n, k in _stress_sizes(record)]
    if record.caller_pads:
        sizes = [record.padded(Sizes(*extents)) for extents in sizes]
    if record.m * record.n * record.k <= SMALL_PROBLEM:
        sizes.append((record.m, record.n, record.k))
    if record.fusion.gate:
        sizes = [(m, aligned(n, GATE_COLS), k) for m, n, k in sizes]
    legal = [
        (m, n, k)
        for m, n, k in dict.fromkeys(sizes)
        if k > 0 and ceil_div(k, bk) >= record.split_k and k <= (record.most_k or k)
    ]
    shapes = [
        Shape(m, n, k, stride)
        for m, n, k in legal
        for stride in [record.launch_options.get("swizzle_stride"), *record.other_strides(n)]
    ]
    # Other launch options than the record's own, such as orders of tiles.
    m, n, k = 2 * bm, 3 * bn, record.baked_k or bk * record.split_k
    shapes += [Shape(m, n, k, options=tuple(options.items())) for options in record.other_options]
    if record.batch == "strided":
        return shapes + list(_batches(record, shapes))
    return list(_groups(record, shapes)) if record.grouped else shapes


def _groups(record: Record, shapes: list[Shape]) -> Iterator[Shape]:
    """Each problem with its rows cut into groups, and four more problems.

    These have only empty groups, groups around the size of a tile, many small groups, and groups that share one B.
    """
    for number, shape in enumerate(shapes):
        yield replace(shape, groups=cut(shape.m, number))
    ragged = max(shapes, key=lambda shape: (shape.n % record.element.vector > 0, shape.m * shape.n))
    bm = record.bm
    edges = (1, 2, bm - 1, bm, bm + 1, 0, 3)
    small_groups = tuple(number * 7 % 4 for number in range(72))  # 0, 3, 2 and 1 rows in turn
    yield replace(ragged, m=bm + 1, groups=(0, 0, 0))
    yield replace(ragged, m=sum(edges), groups=edges)
    yield replace(ragged, m=sum(small_groups), groups=small_groups)
    yield replace(ragged, m=bm + 2, groups=(bm, 1), shared_b=True)


def cut(m: int, number: int) -> tuple[int, ...]:
    """Cuts rows into groups in one of four ways: one group, two groups, with empty groups, or with rows left over."""
    third, quarter = m // 3, m // 4
    return [(m,), (third, m - third), (0, m - quarter, 0, quarter), (m // 2, 0, quarter, 0)][number % 4]


def _batches(record: Record, shapes: list[Shape]) -> Iterator[Shape]:
    """Batches of two and three products: of the smallest problem, of a ragged one, and of the one with the longest
    sums."""
    smallest = min(shapes, key=lambda shape: shape.m * shape.n * shape.k)
    ragged = max(shapes, key=lambda shape: (shape.n % record.element.vector > 0, shape.m * shape.n))
    yield replace(smallest, batch=3)
    yield replace(ragged, batch=3, shared_b=True)
    yield replace(thorough_shape(record, shapes), batch=2)


def _stress_sizes(record: Record) -> list[tuple[int, int, int]]:
    """Sizes m, n, k around the tile and the ring; a compiled-in k is not yet applied."""
    bm, bn, bk = record.bm, record.bn, record.k_step
    stages, least = record.ring_steps, record.split_k
    # More steps than the ring holds, so that the last one is copied inside the loop.
    in_loop = min(stages, ceil_div(record.most_k, bk) - least) if record.most_k else stages
    below, at, above = (bk * max(least, steps) for steps in (stages - 1, stages, stages + 2))
    sizes = [(bm, bn, bk * least), (2 * bm, bn, below), (bm, 2 * bn, at), (2 * bm, 3 * bn, above)]
    if record.split_k > 1:
        sizes += [(bm, bn, bk * (least + 1)), (bm, bn, bk * least * (stages + 1))]
    if record.most_k:
        sizes.append((bm, bn, record.most_k))
    if (places := record.tiles_at_once) > 1 and not record.grouped:  # groups have shapes of many tiles anyway
        # A CTA computes three tiles with the same accumulators: the third waits for a phase with the parity of the
        # first one's.
        tiles = ceil_div(CLUSTERS * (2 * places + 1), record.split_k)
        sizes.append((bm * record.cluster_ctas, bn * tiles, bk * least))
    if record.shares_last_wave:
        sizes += [(bm, 7 * bn, above), (7 * bm, bn, above)]
    if record.predicated:
        vector, eighth = record.element.vector, 8 * record.element.vector
        sizes += [(2 * bm - 3, 2 * bn - 5, above - vector), (bm + 1, bn + 8, bk * least - vector)]
        # A last k-tile of one vector, at several places of the loop; every remainder of n; edges everywhere in the
        # tile; and ends of k everywhere in the first k-tile of a slice and in one that the loop copies.
        sizes += [(1, 1, bk * steps + vector) for steps in sorted({least - 1, least, least + stages + 1})]
        sizes += [(bm - e, bn * e // 64 * 8 + e, bk * least - bk * e // eighth * vector) for e in range(2, 8)]
        sizes += [(bm * e // 8 + 1, bn, bk * (least + in_loop) - bk * e // eighth * vector) for e in range(2, 8)]
        if not any(record.along_k):  # no row runs along k, so k need not be of whole vectors
            sizes += [(bm + 1, bn + 8, bk * (least + 1) - 3), (bm, bn, bk * (least - 1) + 1)]
    return sizes


def own_shape(record: Record) -> Shape:
    """The record's own problem, or only the corners of its grid if it is too large to execute completely.

    If CTAs of the grid are not tiles of the problem, a large problem shrinks to three tiles in each direction. The rows
    of a grouped record are cut into three quarters and a quarter, each after an empty group. A strided record computes
    two products if they are executed completely.
    """
    m, n, k = record.m, record.n, record.k
    large = m * n * k > SMALL_PROBLEM
    if large and not record.grid_is_tiles:
        m, n = min(m, 3 * record.bm), min(n, 3 * record.bn)
    if record.grouped:
        return Shape(m, n, k, groups=cut(m, 2))
    corners = large and record.grid_is_tiles
    return Shape(m, n, k, corners=corners, batch=2 if record.batched and not corners else 1)


def thorough_shape(record: Record, shapes: list[Shape]) -> Shape:
    """The shape that is executed with every kind of inputs.

    Shapes larger than a tile are preferred, then ragged ones, then those with the longest sums, then the largest.
    """

    def worth(shape: Shape) -> tuple[bool, bool, int, int]:
        m = sum(shape.groups) if shape.groups else shape.m
        beyond = m > record.bm and shape.n > record.bn
        ragged = m % record.bm > 0 and shape.n % record.bn > 0
        return beyond, ragged, shape.k, m * shape.n

    return max(shapes, key=worth)


def kinds(shape: Shape, thorough: bool, exact: int) -> Iterator[str]:
    """The kinds of inputs with which a problem is executed. ``exact``: the integer up to which D's type is exact."""
    yield "binary"
    if shape.k > 2 * exact:  # sums of binary inputs, k / 4 on average, may then exceed ``exact``
        yield "sparse"
    if thorough:
        yield from ("integers", "normal", "special")
