"""Gives proofs the facts about kernels that split k: which k-tiles each slice has."""

from __future__ import annotations

from cudal2gen.kernel.problem import MAX_EXTENT
from kernelproof.certificates import TILES, ZERO, Bounds, Facts, Polynomial, Quotient
from kernelproof.ground.integers import ceil_div

named = Polynomial.named


def with_slices(facts: Facts, count: int, k_step: int) -> Facts:
    """The facts, extended by those about an arbitrary slice.

    Of T k-tiles, slice s of ``count`` slices has the tiles from T * s / count up to, but not including, T * (s + 1) /
    count, both rounded down. A ``Quotient`` states such a division with its remainder.
    """
    total, own, first = named("all_tiles"), named("slice"), named("first_tile")
    most = ceil_div(MAX_EXTENT, k_step)
    bounds: Bounds = {
        ("slice",): (0, count - 1), ("all_tiles",): (count, most), ("first_tile",): (0, most),
        ("arrived",): (0, count - 2), ("slice_half",): (0, (count - 1) // 2), ("slice_odd",): (0, 1),
        ("first_rest",): (0, count - 1), ("end_rest",): (0, count - 1),
    }  # fmt: skip
    extended = facts.extended(bounds, total - first - named(TILES))
    extended.quotients += [
        Quotient(total * own, count, first, named("first_rest")),
        Quotient(total * own + total, count, first + named(TILES), named("end_rest")),
        # A compiler divides by an even number by halving both numbers first, so half of the slice's number has a name.
        Quotient(own, 2, named("slice_half"), named("slice_odd")),
    ]
    return extended


def slice_of(rank: int, count: int) -> tuple[Polynomial, Polynomial]:
    """The number of the first k-tile of slice ``rank``, and how many k-tiles all slices have together."""
    first = named("first_tile") if rank else ZERO
    return first, named("all_tiles") if rank < count - 1 else first + named(TILES)


def with_slice(facts: Facts, rank: int, count: int, k_step: int) -> Facts:
    """The facts, extended by those about slice ``rank``; see ``with_slices``."""
    first, total = slice_of(rank, count)
    end, most = first + named(TILES), ceil_div(MAX_EXTENT, k_step)
    bounds: Bounds = {("all_tiles",): (count, most), ("first_tile",): (0, most)}
    bounds |= {(name,): (0, count - 1) for name in ("first_rest", "end_rest")}
    extended = facts.extended(bounds, total - end, total - count, most - total)
    if rank:
        extended.quotients.append(Quotient(total * rank, count, first, named("first_rest")))
    if rank < count - 1:
        extended.quotients.append(Quotient(total * (rank + 1), count, end, named("end_rest")))
    return extended
