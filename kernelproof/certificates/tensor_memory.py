"""How the roles of a CTA use tensor memory, and why no race or deadlock is then possible.

Tensor memory holds the accumulators of N items: item y of a CTA uses place y % N. One thread, the multiplier, adds
products to them by tcgen05.mma, and a group of four warps loads the sums and stores them to D. Two more mbarriers of
each place order these roles, ``summed`` and ``stored``. The multiplier takes the place of the consumers in the ring of
stages (``pipelines``). Each role is proven by itself to do this, in its own program order:

- One warp allocates columns before the CTA's barrier. All threads read their address after that barrier.
- The multiplier, for each item y: it waits until ``stored`` of the place has completed its phase y / N - 1. For each
  k-tile it waits for ``full`` of the stage, issues products that read the stage, and then a commit that arrives at
  ``empty`` of the stage. After the last k-tile, a commit arrives at ``summed`` of the place. A tcgen05.fence stands
  between each wait and the products after it.
- Each warp of the group, for each item y: all lanes wait for phase y / N of ``summed``, and a tcgen05.fence follows.
  They load sums from the place, wait for the loads, execute a tcgen05.fence and meet. Then one lane arrives at
  ``stored``.
- After their items, all threads meet at a barrier of the CTA. Then the warp that has allocated the columns frees them,
  after a tcgen05.fence.

A commit arrives when all products have ended that its thread has issued before. So ``empty`` of a stage completes when
nothing reads the stage any more, and ``summed`` when the place has all sums of the item. The products of one thread to
one place, of one shape, are executed in order. The group has loaded the sums of item y before it arrives at ``stored``,
for which the multiplier waits before item y + N. So no product changes sums that are still to be loaded. By induction
over items, no wait lasts for ever: the multiplier waits until the group has loaded the sums of an earlier item, and the
group waits for products of stages that the producer has filled.

In a **pair** of CTAs, the multiplier of the first one (the leader) issues products for both. They read a part of each
operand in the stages of each CTA, and write sums of each CTA's tile to its own tensor memory. So ``full`` of the leader
counts the bytes of both CTAs' stages, commits arrive in both CTAs, and the groups of both arrive at ``stored`` of the
leader. Before it ends, the leader's multiplier waits once more for ``stored`` of each place, so that nobody arrives
there later. Commits of a thread arrive in their order: who has waited for ``summed`` of the last item knows that no
earlier commit is due.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np

from kernelproof.certificates.cells import SummedRange, same_elements
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.polynomials import ZERO, Lanes, Polynomial
from kernelproof.emulator.blackwell.tensor_memory import COLUMNS, LANES

BASE = "tensor_base"  # the name of the first column that a CTA has
FREE = -1  # a column that belongs to no place


@dataclass(frozen=True)
class TensorPlan:
    """A contract's statement about accumulators in tensor memory: for how many items there is a place (``tiles``), the
    k of a k-tile (``depth``), and whether CTAs are ``paired``."""

    tiles: int
    depth: int
    paired: bool

    @property
    def cta_group(self) -> int:
        """The cta_group of all instructions: how many CTAs one concerns."""
        return 2 if self.paired else 1

    @property
    def round(self) -> int:
        """The number of items after which places and parities are the same again: each use of a place changes its
        parity."""
        return 2 * self.tiles


class Reading(IntEnum):
    """How far a warp is with the sums of an item. Each step follows the one before it."""

    NOTHING = 0
    LOADING = 1
    LOADED = 2  # the loads have been waited for
    FENCED = 3
    MET = 4  # the lanes have met: one of them may hand the place back


@dataclass(frozen=True)
class SummedColumns:
    """Columns of an item's accumulators, from ``first`` to before ``end``: the k whose products they have, and the
    instruction descriptor of these products, which all have the same shape."""

    first: int
    end: int
    summed: SummedRange
    shape: int


@dataclass(frozen=True)
class TensorTrack:
    """How far a role is with the accumulators of an item.

    ``opened``: it has waited for them. ``fenced``: a tcgen05.fence follows its last wait. ``sums``: what the multiplier
    has added. ``passed``: the multiplier has committed the item. ``reading``: how far the group is. ``drained``: the
    places for which the multiplier has waited after its last item.
    """

    opened: bool = False
    fenced: bool = False
    sums: tuple[SummedColumns, ...] = ()
    passed: bool = False
    reading: Reading = Reading.NOTHING
    drained: int = 0

    def summed(self, done: Polynomial) -> TensorTrack:
        """The track in which columns have the products of all k before ``done``, if they have any."""
        return replace(self, sums=tuple(replace(each, summed=SummedRange(done, 0)) for each in self.sums))

    def substituted(self, name: str, value: Polynomial) -> TensorTrack:
        """The track for the problems in which a name has a value."""
        sums = tuple(
            replace(x, summed=SummedRange(x.summed.done.substituted(name, value), x.summed.beyond)) for x in self.sums
        )
        return replace(self, sums=sums)

    def alike(self, other: TensorTrack) -> bool:
        """Whether a role has done as much in tensor memory as in the state ``other``."""
        own_sums, other_sums = ([(x.first, x.end, x.summed.key, x.shape) for x in each.sums] for each in (self, other))
        return replace(self, sums=()) == replace(other, sums=()) and own_sums == other_sums


@dataclass
class ItemSums:
    """The sums of an item at one place when its products have ended, in arrays of shape (lanes, columns): the numbers
    of their kinds, 0 for none, and their rows and columns in D."""

    kinds: Lanes = field(default_factory=lambda: np.zeros((LANES, COLUMNS), np.int64))
    rows: Lanes = field(default_factory=lambda: np.zeros((LANES, COLUMNS), np.int64))
    cols: Lanes = field(default_factory=lambda: np.zeros((LANES, COLUMNS), np.int64))

    def same(self, other: ItemSums) -> bool:
        """Whether another item leaves the same sums."""
        return same_elements(self, other)


@dataclass
class TensorColumns:
    """How the roles of a CTA use its tensor memory, as far as they have been proven.

    ``count``: the columns that ``warp`` allocates; it stores their address at ``word``, the elements of shared memory.
    ``owner``: the place to which each column belongs. ``summed``, ``stored``: place -> address of its mbarrier.
    ``products``: place -> first column -> rows and columns of D, shape (128,) and (columns,), to which the products
    there belong, and the kind of them without k. ``left``: place -> what items leave. ``width``: bytes of a sum.
    ``freed``: whether the columns are freed.
    """

    count: int = 0
    warp: int = -1
    word: Lanes = field(default_factory=lambda: np.zeros(0, np.int64))
    owner: Lanes = field(default_factory=lambda: np.full(COLUMNS, FREE, np.int64))
    summed: dict[int, int] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)
    products: dict[tuple[int, int], ProductPlaces] = field(default_factory=dict)
    left: dict[int, ItemSums] = field(default_factory=dict)
    width: int = 0
    freed: bool = False

    def allocate(self, count: int, warp: int, word: Lanes) -> None:
        """Note that a warp allocates columns. Raises NotCertified if it may not."""
        if self.count:
            raise NotCertified("a CTA allocates tensor memory twice")
        if count not in (32, 64, 128, 256, 512):  # what tcgen05.alloc accepts (PTX ISA)
            raise NotCertified(f"an allocation of {count} columns of tensor memory")
        self.count, self.warp, self.word = count, warp, word

    def location(self, address: int, columns: int) -> tuple[int, int]:
        """The lane and the column of an address, counted from the start of the allocation. Raises NotCertified unless
        ``columns`` columns from there on have been allocated."""
        lane, column = address >> 16, address & 0xFFFF
        if not 0 <= lane < LANES or column + columns > self.count:
            raise NotCertified(f"columns {column} to {column + columns} of {self.count} in lane {lane}")
        return lane, column

    def multiply(self, place: int, first: int, products: ProductPlaces) -> None:
        """Note the products that are added to columns of a place, from column ``first`` on. Raises NotCertified if
        another item adds products of other elements there."""
        end = first + len(products.cols)
        others = self.owner[first:end]
        if ((others != FREE) & (others != place)).any():
            raise NotCertified("products are added to accumulators of another item")
        self.owner[first:end] = place
        known = self.products.setdefault((place, first), products)
        if not known.same(products):
            raise NotCertified("products are added to the sums of another element of D")

    def leave(self, place: int, sums: ItemSums, width: int) -> None:
        """Note which sums an item leaves at a place. Raises NotCertified if another item there leaves others."""
        self.width = width
        if not self.left.setdefault(place, sums).same(sums):
            raise NotCertified("items leave different sums in tensor memory")


@dataclass(frozen=True, eq=False)
class ProductPlaces:
    """To which elements of D products belong: the parts of row and column that depend on the problem, and the offset of
    each row and column. ``across``: rows of the product are columns of D."""

    row: Polynomial
    col: Polynomial
    rows: Lanes
    cols: Lanes
    across: bool

    def same(self, other: ProductPlaces) -> bool:
        """Whether other products belong to the same elements."""
        places = (self.rows, other.rows), (self.cols, other.cols)
        return (
            self.across == other.across
            and self.row.equals(other.row)
            and self.col.equals(other.col)
            and all(a is b or np.array_equal(a, b) for a, b in places)
        )


NO_SUM = SummedRange(ZERO, 0)
