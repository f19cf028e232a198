"""Pipelines of a CTA's roles: one thread loads k-tiles into a ring of stages, groups of warps multiply them.

The roles share the ring, and nothing but mbarriers orders them. A **transaction** is a k-tile that goes through the
ring. They are numbered from 0 on over all items of a CTA, T for each item, and number x has the stage x % S. Every role
is proven by itself to do this, in its own program order:

- The producer, for each x: it waits until the mbarrier ``empty`` of the stage has completed its phase x / S - 1; it
  arrives at ``full`` and says how many bytes will land; and it issues copies of as many bytes, to that stage alone.
- Each warp of the group that has the item, for each x of it: all lanes wait for phase x / S of ``full``; they read
  the stage; all lanes meet; one lane arrives at ``empty``, once. Products of wgmma read until their group has been
  waited for: the next k-tiles may be waited for meanwhile, and stages are handed back in order.
- If groups take items in turn, a group first waits for its turn's mbarrier; and when it has waited for its last k-tile,
  one lane of each of its warps arrives at the turn's mbarrier of the other group.

``full`` expects one arrival, ``empty`` and turns as many as a group has warps. Then, by induction over x:

- A wait names a phase by its parity, which is right if the phase before has completed. The producer has waited for
  that one itself. A warp has, if it had the k-tile S before; otherwise the other group had, before it handed over.
- Phase x / S of ``full`` completes when the bytes of x have landed and not before; nothing but the copies of x is
  written to the stage until every warp of the group has arrived at ``empty`` for x, which is after its reads.
- Nobody waits for ever: what a role waits for comes from transactions, or turns, before its own. A warp that waits for
  x has handed back x - S, and one that has handed on its turn hands back all that it holds before it waits again.

CTAs of a **cluster** take the same items, each its own tile, and so have the same transactions. A producer may load a
box to several CTAs, at one place in all of them, and each of their ``full`` counts its bytes there; the CTA itself
expects all bytes that come to it. A warp hands a stage back to every CTA that loads a part of it, at the ``empty``
there, which expects the arrivals of all such CTAs. So the bytes of x come when the phase before x is complete at every
CTA that gets them. A producer ends after it has waited for the last round of its ``empty``: nobody arrives there later,
and consumers end after all bytes have come.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kernelproof.certificates.contract import Contract
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.polynomials import Lanes, Polynomial
from kernelproof.certificates.shared_memory import ELEMENT
from kernelproof.certificates.slices import SlabContents

FREE, MBARRIER, FIRST_STAGE, FIRST_WARP = 0, 1, 2, 1 << 16  # owners of elements of shared memory
MBARRIER_BYTES = 8
MOST_BARRIERS = 15  # the highest number of a barrier
WARP = 32


@dataclass(frozen=True)
class Parts:
    """Partial sums in a workspace, which all groups of all CTAs add when they have left their own; see ``sum_proof``.

    ``count``: of a tile. ``vectors``: of four sums, that a thread has of a tile; of these ``columns`` beside each
    other. ``tiles``: of D, in the contract up to the first item; ``tile``: the number of a tile, in that of an item.
    ``cta``, ``ctas``: the number of a CTA and how many there are, all of which run at once.
    """

    count: int
    vectors: int
    columns: int
    tiles: Polynomial
    tile: Polynomial
    cta: Polynomial
    ctas: Polynomial


@dataclass(frozen=True)
class Pipeline:
    """What is stated of the roles of a kernel, whose CTAs take items of work in turn.

    ``stages``: of the ring. ``groups``: the first lane of each group of consumers and the one after its last, in the
    order in which they take items. ``most``: k-tiles. ``entry``: the contract up to the first item, which is the number
    ``first``; ``names``: names of that contract -> what they are for the item ``current``. ``step``: from an item to
    the CTA's next one. ``left``: at least 0 if there is a next one, else negative. ``parts``: how the partial sums of
    items are added, None if items are whole tiles.

    Of a cluster of ``ranks`` CTAs, ``rank``: the CTA's own. ``share``: the bytes of boxes that it loads for a k-tile,
    None for all of a stage; ``returns``: the CTAs to which its warps hand a stage back. ``peers``: the contracts and
    pipelines of its other CTAs, in the order of their ranks, which are larger.
    """

    stages: int
    groups: tuple[tuple[int, int], ...]
    most: int
    entry: Contract
    first: Polynomial
    names: dict[str, Polynomial]
    current: Polynomial
    step: Polynomial
    left: Polynomial
    rank: int = 0
    ranks: int = 1
    share: int | None = None
    returns: frozenset[int] = frozenset((0,))
    peers: tuple[tuple[Contract, Pipeline], ...] = ()
    parts: Parts | None = None

    @property
    def round(self) -> int:
        """The transactions after which stages and parities are the same again."""
        return 2 * self.stages


class StageOperand(NamedTuple):
    """What a descriptor of wgmma names: elements of one kind of a stage. ``number``: of the kind, as that of the k-tile
    ``TURN``. ``places``, ``steps``: the offsets of rows (or columns) and of k."""

    stage: int
    number: int
    places: Lanes
    steps: tuple[int, ...]


class Protocol:
    """What the roles of a kernel have shown about shared memory, so far.

    ``owner``: of each element. ``counts``: of each mbarrier, by its address, the arrivals that a phase needs; ``full``,
    ``empty``: the mbarriers of each stage; ``turns``: of each group's turn. ``sizes``: bytes that each stage expects.
    ``kinds``, ``rows``, ``cols``: what a stage holds of the k-tile with the number ``TURN`` of its item; ``source``:
    the rank of the CTA that brings it, plus 1. ``operands``: what a stage holds by descriptor, extent and order, which
    does not change once the producers are proven; ``places``: their rows and columns, each array once, and ``of_d``:
    the rows and columns of registers of D by those arrays. ``sent``: how many elements of each stage the own producer
    loads for each CTA. ``cluster``: of all CTAs of the cluster, by rank. ``registers``: of a thread, by warpgroup,
    after setmaxnreg. ``meetings``: the number of each group's barrier. ``slab``: what every item leaves in the
    workspace, None if no item has been proven.
    """

    def __init__(self, elements: int, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.owner = np.zeros(elements, np.int32)
        self.counts: dict[int, int] = {}
        self.full: dict[int, int] = {}
        self.empty: dict[int, int] = {}
        self.turns: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.kinds, self.rows, self.cols = (np.zeros(elements, np.int64) for _ in range(3))
        self.source = np.zeros(elements, np.int32)
        self.sent: dict[int, dict[int, int]] = {}
        self.cluster = [self]
        self.operands: dict[tuple[int, int, bool], StageOperand] = {}
        self.places: dict[bytes, Lanes] = {}
        self.of_d: dict[object, list[tuple[Lanes, Lanes]]] = {}
        self.registers: dict[int, int] = {}
        self.meetings: dict[int, int] = {}
        self.slab: SlabContents | None = None

    def meeting(self, group: int, number: int) -> None:
        """A group takes a barrier for its own."""
        others = {other for of, other in self.meetings.items() if of != group}
        if not 1 <= number <= MOST_BARRIERS or number in others or self.meetings.setdefault(group, number) != number:
            raise NotCertified(f"barrier {number} is not one that a group of consumers has for itself")

    def leave(self, slab: SlabContents) -> None:
        """An item leaves its partial sums."""
        if self.slab is None:
            self.slab = slab
        elif not (np.array_equal(slab.rows, self.slab.rows) and np.array_equal(slab.cols, self.slab.cols)):
            raise NotCertified("partial sums of items lie at different places")

    def initialise(self, address: int, place: int, count: int) -> None:
        """An mbarrier begins at an address, the element ``place`` of shared memory."""
        if count < 1:
            raise NotCertified(f"an mbarrier that expects {count} arrivals")
        self.claim(np.arange(place, place + MBARRIER_BYTES // ELEMENT), MBARRIER, fresh=True)
        self.counts[address] = count

    def claim(self, places: Lanes, owner: int | Lanes, fresh: bool = False) -> None:
        """Elements belong to one stage, one warp or one mbarrier. ``fresh``: they belonged to none before."""
        before = self.owner[places]
        if ((before != FREE) & (fresh | (before != owner))).any():
            raise NotCertified("shared memory of one stage, warp or mbarrier is written for another one")
        self.owner[places] = owner

    def mbarrier(self, role: dict[int, int], number: int, address: int, what: str) -> None:
        """A role takes the mbarrier at an address for that of a stage or a turn."""
        if address not in self.counts:
            raise NotCertified("an mbarrier that is not initialised")
        if role.setdefault(number, address) != address:
            raise NotCertified(f"a wait for, or an arrival at, another mbarrier than that of {what}")

    def bring(self, places: Lanes, rank: int, stage: int) -> None:
        """The producer of a CTA loads to places of a stage here."""
        self.claim(places, FIRST_STAGE + stage)
        if ((self.source[places] != 0) & (self.source[places] != rank + 1)).any():
            raise NotCertified("two CTAs of a cluster load to the same place")
        self.source[places] = rank + 1

    def hold(self, places: Lanes, number: int, rows: Lanes, cols: Lanes) -> None:
        """Note what a k-tile brings to places."""
        known = self.kinds[places] != 0
        if (known & ((self.kinds[places] != number) | (self.rows[places] != rows) | (self.cols[places] != cols))).any():
            raise NotCertified("a stage gets other elements in another turn of the ring")
        self.kinds[places], self.rows[places], self.cols[places] = number, rows, cols

    def send(self, stage: int, places: dict[int, Lanes]) -> None:
        """All boxes of a k-tile are on their way: each of the places that this CTA brings to others, or to itself, is
        in one of them, and the same number as in other k-tiles."""
        for rank, at in places.items():
            peer = self.cluster[rank]
            own = np.flatnonzero(
                (peer.owner == FIRST_STAGE + stage) & (peer.source == self.pipeline.rank + 1)
            )  # fmt: skip
            if not np.array_equal(np.sort(at), own):
                raise NotCertified("copies of one k-tile overlap, or leave a part of a stage as it was")
        counts = {rank: len(at) for rank, at in places.items()}
        if self.sent.setdefault(stage, counts) != counts:
            raise NotCertified("a part of a stage keeps what an earlier k-tile has brought")

    def check_stages(self) -> None:
        """Check, when all producers have been proven, that as many bytes come to each stage as it expects."""
        for stage in range(self.pipeline.stages):
            elements = sum(peer.sent.get(stage, {}).get(self.pipeline.rank, 0) for peer in self.cluster)
            if not elements or self.sizes.get(stage) != elements * ELEMENT:
                raise NotCertified(f"{self.sizes.get(stage)} bytes are expected, and {elements * ELEMENT} copied")
        if any((peer.full, peer.empty) != (self.full, self.empty) for peer in self.cluster):
            raise NotCertified("the mbarriers of a cluster's CTAs lie at different places")
        written = {rank for sent in self.sent.values() for rank in sent}
        if any(self.pipeline.rank not in self.cluster[rank].pipeline.returns for rank in written):
            raise NotCertified("a CTA loads for another one whose warps do not hand stages back to it")

    def check(self, warps: int, groups: int) -> None:
        """Check the mbarriers when all roles have been proven. ``warps``: of each group."""
        readers = sum(self.pipeline.rank in peer.pipeline.returns for peer in self.cluster)
        roles = (self.full, self.empty, self.turns)
        addresses = [address for role in roles for address in role.values()]
        if len(set(addresses)) < len(addresses):
            raise NotCertified("one mbarrier serves two purposes")
        sizes = (self.pipeline.stages, self.pipeline.stages, groups if groups > 1 else 0)
        for role, size, arrivals in zip(roles, sizes, (1, warps * readers, warps), strict=True):
            if sorted(role) != list(range(size)):
                raise NotCertified("a stage or a turn has no mbarrier")
            if any(self.counts[address] != arrivals for address in role.values()):
                raise NotCertified(f"an mbarrier does not expect the {arrivals} arrivals that it gets in a phase")


@dataclass
class Stores:
    """What a role's warps do with memory of their own, from which bulk copies store. Both arrays have an element for
    each of shared memory.

    ``written``: 0 for nothing that matters; then WRITTEN by a warp, FENCED by all its lanes, and READY once these have
    met. ``read``: READING by a copy, READ when its thread has waited for it, and 0 once the warp has met. ``groups``:
    places that each lane's groups read, the oldest first; ``open``: of those in no group yet.
    """

    written: Lanes
    read: Lanes
    groups: dict[int, list[Lanes]] = field(default_factory=dict)
    open: dict[int, list[Lanes]] = field(default_factory=dict)

    WRITTEN, FENCED, READY = 1, 2, 3
    READING, READ = 1, 2

    @classmethod
    def none(cls, elements: int) -> Stores:
        return cls(np.zeros(elements, np.uint8), np.zeros(elements, np.uint8))

    def copied(self) -> Stores:
        groups = {lane: list(groups) for lane, groups in self.groups.items()}
        return Stores(
            self.written.copy(), self.read.copy(), groups, {lane: list(each) for lane, each in self.open.items()}
        )

    @property
    def key(self) -> object:
        """Equal for two states from which a role goes on in the same way: copies in no group yet are part of it."""
        groups, opened = (
            tuple((lane, tuple(places.tobytes() for places in each)) for lane, each in sorted(of_lane.items()) if each)
            for of_lane in (self.groups, self.open)
        )
        return self.written.tobytes(), self.read.tobytes(), groups, opened

    def write(self, places: Lanes) -> None:
        """A warp writes."""
        if np.unique(places).size != places.size:
            raise NotCertified("two lanes write the same byte of shared memory in one instruction")
        if self.read[places].any():
            raise NotCertified("shared memory is written that a bulk store may still read")
        if ((self.written[places] != 0) & (self.written[places] != self.READY)).any():
            raise NotCertified("shared memory is written twice without a barrier of the warp between")
        self.written[places] = self.WRITTEN

    def fence(self) -> None:
        """All lanes execute a fence of the asynchronous proxy."""
        self.written[self.written == self.WRITTEN] = self.FENCED

    def meet(self) -> None:
        """The lanes of each warp meet."""
        self.written[self.written == self.FENCED] = self.READY
        self.read[self.read == self.READ] = 0

    def begin(self, lane: int, places: Lanes) -> None:
        """A lane's bulk copy reads."""
        if (self.written[places] != self.READY).any():
            raise NotCertified("a bulk store reads what was not written and fenced before the lanes of its warp met")
        self.read[places] = self.READING
        self.open.setdefault(lane, []).append(places)

    def commit(self, lane: int) -> None:
        """A lane's copies are a group."""
        opened = self.open.pop(lane, [])
        self.groups.setdefault(lane, []).append(np.concatenate(opened) if opened else np.zeros(0, np.int64))

    def wait(self, lane: int, most: int) -> None:
        """All groups of a lane but the last ``most`` have read."""
        groups = self.groups.get(lane, [])
        done, self.groups[lane] = groups[: max(0, len(groups) - most)], groups[max(0, len(groups) - most) :]
        for places in done:
            self.read[places] = self.READ
        for places in self.groups[lane]:
            self.read[places] = self.READING

    def finish(self) -> None:
        """Check that nothing is read any more when threads end."""
        if self.open or (self.read == self.READING).any():
            raise NotCertified("a thread ends while its bulk stores may still read shared memory")
