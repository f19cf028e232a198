"""Serves a problem without a record: finds the nearest record, the fields that must change, and the matrices to copy.

The command line and packs use this module through ``catalog``, ``cudal2gen.matmul`` uses it through ``choice``.
Distances are in octaves: 1 for a factor of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from cudal2gen.kernel.launch import LaunchOperands, Sizes
from cudal2gen.kernel.problem import MAX_EXTENT, Problem, aligned
from cudal2gen.kernel.record import Fields, Origin, Record
from cudal2gen.kernel.schema import IllegalRecord
from kernelproof.ground import chips
from kernelproof.ground.integers import ceil_div

Copied = tuple[bool, bool, bool]  # for A, B and D: whether the matrix is copied
Item = TypeVar("Item")
Served = TypeVar("Served")

OTHER_LAYOUT_OCTAVES = 0.5  # distance of a record with another layout
SMALLER_FACTOR = 3.0  # by which the octaves of a record for a smaller size are multiplied
COPY_OCTAVES = 1.0  # cost of copying one matrix


class Use(NamedTuple):
    """How a kernel computes a product: the sizes of the launch, and which of A, B and D are copied to or from padded
    matrices."""

    launched: Sizes
    copied: Copied

    def copied_bytes(self, sizes: Sizes, widths: tuple[int, int, int]) -> int:
        """Bytes that the copies move: each matrix is read, and its padded one is filled with zeros and written.
        ``widths``: those of the problem."""
        writes = (2, 2, 1)  # the padded D is not filled with zeros first
        matrices = zip(_shapes(sizes), _shapes(self.launched), writes, widths, self.copied, strict=True)
        return sum(
            width * (math.prod(own) + times * math.prod(wide)) for own, wide, times, width, copied in matrices if copied
        )

    @property
    def matrices(self) -> str:
        """The matrices that are copied, in words; empty if there are none."""
        names = [name for name, copied in zip("ABD", self.copied, strict=True) if copied]
        return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def sizes_of(problem: Problem) -> Sizes:
    """The extents of a problem."""
    return Sizes(problem.m, problem.n, problem.k)


def own_use(record: Record, sizes: Sizes, operands: LaunchOperands) -> Use:
    """The launch and the copies if the record's own padding serves the sizes; the launcher refuses other sizes."""
    launched = record.padded(sizes)
    return Use(launched, _copied(record, sizes, launched, operands))


def use(record: Record, sizes: Sizes, operands: LaunchOperands) -> Use | None:
    """How a record's binary computes a product with the fewest copies; None if it cannot.

    A binary computes other sizes than the record's own if these are legal and do not change the binary.
    """
    problem = record.problem.model_copy(update=sizes._asdict())
    vector = record.element.vector
    rows = sizes.m if record.along_k.a else aligned(sizes.m, vector)
    vectors = Sizes(rows, aligned(sizes.n, vector), aligned(sizes.k, vector))
    wider = (sizes._replace(k=vectors.k), vectors) if not record.caller_pads else ()
    tries = [(sizes, fields) for fields in record.SIZE_VARIANTS] + [(extents, {}) for extents in wider]
    candidates = []
    for extents, fields in tries:
        variant = _variant(record, problem.model_copy(update=extents._asdict()), fields)
        if variant is not None and variant.name == record.name:
            candidates.append(variant.padded(extents))
    uses = [Use(extents, _copied(record, sizes, extents, operands)) for extents in candidates]
    within = [candidate for candidate in uses if max(candidate.launched) <= MAX_EXTENT]
    return min(within, key=lambda candidate: _copies(candidate, problem, sizes), default=None)


def resized(record: Record, problem: Problem, *, same_binary: bool = False) -> tuple[Record, Use] | None:
    """The record changed for another problem, and its use on packed operands; None if the rules allow none.

    Among the family's variants (predicated tiles, padded operands) the one with the fewest copies is chosen, with
    ``same_binary`` only among variants with the record's binary. The origin names the fields that changed.
    """
    sizes, operands = sizes_of(problem), LaunchOperands.packed(problem.layout, sizes_of(problem), problem.fusion)
    pairs: list[tuple[Record, Use]] = []
    for fields in record.SIZE_VARIANTS:
        variant = _variant(record, problem, fields)
        if variant is None or (same_binary and variant.name != record.name):
            continue
        if chosen_use := use(variant, sizes, operands):
            pairs.append((variant, chosen_use))
    if not pairs:
        return None
    best, chosen_use = min(pairs, key=lambda pair: _copies(pair[1], problem, sizes))
    if best == record:
        return record, chosen_use
    origin = Origin(source=record.origin.source, structure="edited", changed=changed_fields(record, best))
    return best.at(problem, origin=origin), chosen_use


def changed_fields(record: Record, other: Record) -> tuple[str, ...]:
    """The fields in which a record differs from the one that it was made from, except the origin."""
    before, after = (item.model_dump(mode="json", exclude={"origin"}) for item in (record, other))
    return tuple(sorted(name for name in before | after if before.get(name) != after.get(name)))


def distance(problem: Problem, other: Problem, tile: tuple[int, int]) -> float:
    """How far the record of another problem is from serving this one; ``tile``: its bm and bn.

    It is the sum of the octaves between the sizes over m, n and k, because the best tile, split and order depend on the
    ratio of sizes, not on their difference. If the record is for a smaller size, its octaves count three times, and the
    additional tiles count as well: a kernel for a larger problem leaves part of its last tiles empty, but one for a
    smaller problem was chosen to spread little work (small tiles, split k), and a second tile reads an operand again.
    So 4097 rows use the record for 4096, but 5 rows the one for 8. Another layout changes how operands are
    loaded, not the tile. Types do not count, because tensor cores multiply bf16 at the rate of fp16. For GPUs see
    ``chips.distance``.
    """
    pairs = ((problem.m, other.m, tile[0]), (problem.n, other.n, tile[1]), (problem.k, other.k, None))
    total = chips.distance(problem.gpu, other.gpu) + (OTHER_LAYOUT_OCTAVES if problem.layout != other.layout else 0.0)
    for extent, size, side in pairs:
        octaves = math.log2(size / extent)
        total += octaves if octaves >= 0 else -SMALLER_FACTOR * octaves
        if side and octaves < 0:
            total += math.log2(ceil_div(extent, side) / ceil_div(size, side))
    return total


def nearest(
    ranked: Iterable[tuple[float, Item]],
    serve: Callable[[Item], tuple[Served, Use] | None],
) -> tuple[Item, Served, Use] | None:
    """The item that serves a problem best, what ``serve`` returns for it, and its use; None if no item serves.

    ``ranked``: items with their distances, nearest first. The best item has the least distance, plus one octave for
    each matrix that is copied, since a copy reads and writes a whole operand. An item at distance 0 always wins.
    """
    best: tuple[Item, Served, Use] | None = None
    least = math.inf
    for octaves, item in ranked:
        if octaves >= least:
            break
        if (result := serve(item)) is None:
            continue
        cost = octaves + COPY_OCTAVES * sum(result[1].copied)
        if cost < least:
            best, least = (item, *result), cost
        if octaves == 0.0:
            break
    return best


def cost(problem: Problem, source: Record, use: Use) -> float:
    """The cost that ``nearest`` compares, in octaves: the distance of a record plus its copies."""
    return distance(problem, source.problem, (source.bm, source.bn)) + COPY_OCTAVES * sum(use.copied)


def _variant(record: Record, problem: Problem, fields: Fields) -> Record | None:
    """The record with these decisions for a problem; None if a rule forbids it."""
    try:
        return record.at(problem.revised(), **(record.output_fields(problem) | fields))
    except IllegalRecord:
        return None


def _copies(use: Use, problem: Problem, sizes: Sizes) -> tuple[int, int]:
    """How many matrices are copied, and how many bytes: the order of uses, the cheapest first."""
    return sum(use.copied), use.copied_bytes(sizes, problem.widths)


def _shapes(sizes: Sizes) -> tuple[tuple[int, int], ...]:
    """Extents of A, B and D."""
    return ((sizes.m, sizes.k), (sizes.n, sizes.k), (sizes.m, sizes.n))


def _copied(record: Record, sizes: Sizes, launched: Sizes, operands: LaunchOperands) -> Copied:
    """Which of A, B and D are copied: those that are padded, and those that the kernel does not take where they lie."""
    launch = record.launch
    unchanged = [before == after for before, after in zip(_shapes(sizes), _shapes(launched), strict=True)]
    takes = launch.takes(launched, operands)
    a, b, d = (not (same_extents and is_taken) for same_extents, is_taken in zip(unchanged, takes, strict=True))
    return (a, b, d)
