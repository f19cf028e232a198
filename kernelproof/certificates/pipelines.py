"""States what each role of a pipelined CTA must do, and why no race or deadlock is then possible.

One thread, the producer, loads k-tiles into a ring of S stages, and groups of warps, the consumers, multiply them. Only
mbarriers order these roles. A **transaction** is a k-tile that goes through the ring. Transactions are numbered from 0
on over all items of a CTA, T for each item, and number x uses the stage x % S. Every role is proven by itself to do
this, in its own program order:

- The producer, for each x: it waits until the stage's mbarrier ``empty`` has completed its phase x / S - 1. It arrives
  at the stage's mbarrier ``full`` and says how many bytes will land. It issues copies of as many bytes, to that stage
  alone.
- Each warp of the group that has the item, for each x of the item: all lanes wait for phase x / S of ``full`` and read
  the stage. Then all lanes meet, and one lane arrives at ``empty``, once. Products of wgmma read the stage until their
  commit group has been waited for. Meanwhile the warp may wait for the next k-tiles, and it hands stages back in order.
- If two groups take items in turn, a group first waits for the mbarrier of its turn. After it has waited for its last
  k-tile, one lane of each of its warps arrives at the mbarrier of the other group's turn.

``full`` expects one arrival. ``empty`` and the turns' mbarriers expect as many as a group has warps. From this follows,
by induction over x:

- A wait names a phase by its parity only. That is enough if the previous phase has completed. The producer has waited
  for the previous phase itself. So has a warp whose group had the transaction x - S; otherwise the other group has,
  before it handed on its turn.
- Phase x / S of ``full`` completes exactly when the bytes of x have landed. After that nothing is written to the stage
  until every warp of the group has arrived at ``empty`` for x, which it does after its reads.
- No wait lasts for ever, since a role waits only for earlier transactions and turns. A warp that waits for x has handed
  back x - S. A warp that has handed on its turn hands back all stages that it holds before it waits again.

CTAs of a **cluster** take the same items, each with its own tile, and so have the same transactions. A producer may
load a box to several CTAs, at the same place in each. The ``full`` of each CTA counts all bytes that come to this CTA,
whichever producer loads them. A warp hands a stage back to every CTA that loads a part of it, at the ``empty`` of that
CTA, which expects arrivals from all CTAs that do so. So a producer loads x only after the previous use of the stage has
ended in every CTA that gets the bytes. A producer ends after it has waited for the last round of its ``empty``, so that
nobody arrives there later. Consumers end after all bytes have come.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from kernelproof.certificates.cluster_sums import ClusterSums
from kernelproof.certificates.contract import Contract
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.polynomials import Lanes, Polynomial
from kernelproof.certificates.shared_memory import ELEMENT
from kernelproof.certificates.slices import SlabContents
from kernelproof.certificates.tensor_memory import TensorColumns, TensorPlan
from kernelproof.emulator.hopper.pattern import Strides

# Owners of elements of shared memory. Stage s is FIRST_STAGE + s, and warp w is FIRST_WARP + w.
FREE, MBARRIER, FIRST_STAGE, FIRST_WARP = 0, 1, 2, 1 << 16
MBARRIER_BYTES = 8
MOST_BARRIERS = 15  # the highest number of a barrier of bar.sync


@dataclass(frozen=True)
class Parts:
    """Partial sums in a workspace, which all groups of all CTAs add after their items; see ``sum_proof``.

    ``count``: how many parts a tile has; a polynomial if that varies. ``first``: the number of the slab of a tile's
    first part, None for ``tile`` * ``count``; its other parts have the slabs after that. ``vectors``: how many vectors
    of four sums each thread has of a tile, with ``columns`` vectors in a row, and ``per_iteration`` in an iteration
    of the loop that adds them. ``tiles``: how many tiles are added, in the contract up to the first item. ``tile``: the
    number of a tile, in the contract of an item. ``cta``: the number of a CTA. ``ctas``: how many there are; all run at
    the same time. ``chunk``: how many vectors of a row a thread stores at once; 0 for all.

    Only if ``count`` varies: ``at_once``: how many parts an iteration of the innermost loop loads at most. ``widths``:
    pairs (most, vectors): tiles with at most so many parts have so many vectors in an iteration, and others
    ``per_iteration``.
    """

    count: int | Polynomial
    vectors: int
    columns: int
    per_iteration: int
    tiles: Polynomial
    tile: Polynomial
    cta: Polynomial
    ctas: Polynomial
    chunk: int = 0
    first: Polynomial | None = None
    at_once: int = 0
    widths: tuple[tuple[int, int], ...] = ()

    def of_count(self, count: int | Polynomial) -> Parts:
        """The parts for tiles that have ``count`` of them."""
        number = count if isinstance(count, int) else self.at_once + 1
        per_iteration = next((width for most, width in self.widths if number <= most), self.per_iteration)
        return replace(self, count=count, per_iteration=per_iteration)


@dataclass(frozen=True)
class Adders:
    """Contracts of any CTA of a cluster, for the proof of how partial sums are added: the CTA that adds, and the one
    whose tile it adds, may have any ranks.

    ``entry``: up to the first item. ``within``: of a tile that is added; None if there are none. ``passed``: of tiles
    that are not added: those that begin beyond D or, if the number of parts varies, have one part.
    """

    entry: Contract
    within: Contract | None
    passed: tuple[Contract, ...] = ()


@dataclass(frozen=True)
class ItemKind:
    """One of several kinds of items of a CTA, such as whole tiles and slices of k.

    ``contract``: of such an item. ``names``, ``current``: as in ``Pipeline``. ``last``: for each case in which the CTA
    has no next item (True) or has one (False), polynomials that are at least 0 in it. ``is_empty``: the item has no
    k-tiles, and every role skips it. ``after_products``: contracts of a consumer after its products, one for each case
    that it tells apart; empty if ``contract`` holds there too. ``loop``: names of the contract ``loop`` of ``Pipeline``
    -> their values for this kind.

    All kinds name the same places in A, B and D by the same polynomials, so that a stage holds the same elements.
    """

    contract: Contract
    names: dict[str, Polynomial]
    current: Polynomial
    last: tuple[tuple[bool, tuple[Polynomial, ...]], ...]
    is_empty: bool = False
    after_products: tuple[Contract, ...] = ()
    loop: dict[str, Polynomial] = field(default_factory=dict)


@dataclass(frozen=True)
class Pipeline:
    """What is stated of the roles of a kernel whose CTAs compute one item of work after the other.

    - ``stages``: how many the ring has. ``most``: the most k-tiles of an item.
    - ``groups``: for each group of consumers its first lane and the lane after its last, in the order in which groups
      take items.
    - ``entry``: the contract up to the first item, whose number is ``first``. ``names``: names of that contract ->
      their values for the item ``current``.
    - ``step``: the difference from an item to the CTA's next one. ``left``: at least 0 if there is a next one.
    - ``parts``, ``adders``: how and by whom the partial sums of items are added; None if items are complete tiles.
    - ``kinds``: the kinds of a CTA's items; empty if it has one kind, which ``names``, ``current`` and ``left`` state.
    - ``loop``: a contract of the loop over k-tiles that holds for every kind; None for that of the kind.

    In a cluster:

    - ``rank``, ``ranks``: the CTA's rank, and how many CTAs the cluster has.
    - ``share``: the bytes that the CTA loads for a k-tile; None for all bytes of a stage.
    - ``returns``: the ranks of the CTAs to which the CTA's warps hand a stage back.
    - ``peers``: contracts and pipelines of the CTAs with larger ranks, in the order of their ranks.
    - ``adds``: the CTAs have slices of k of one tile, one item each, and add their sums; see ``cluster_sums``.

    ``tensor``: accumulators in tensor memory, None if there are none; see ``tensor_memory``. ``stores``: contracts of
    the group that stores them, one for each case that it tells apart; empty if it has the CTA's contract.
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
    adders: Adders | None = None
    adds: bool = False
    tensor: TensorPlan | None = None
    stores: tuple[Contract, ...] = ()
    kinds: tuple[ItemKind, ...] = ()
    loop: Contract | None = None

    def kinds_of(self, contract: Contract) -> tuple[ItemKind, ...]:
        """The kinds of items; ``contract``: that of the items if there is one kind."""
        cases = (True, (-self.left - 1,)), (False, (self.left,))
        last = cases[:1] if self.adds else cases[::-1]
        return self.kinds or (ItemKind(contract, self.names, self.current, last),)

    @property
    def leader(self) -> int:
        """The rank of the CTA that multiplies for this one: its own, or that of the first CTA of its pair."""
        return self.rank & ~1 if self.tensor and self.tensor.paired else self.rank

    @property
    def leads(self) -> bool:
        """Whether the CTA waits for the bytes of its stages itself, and no other CTA does it."""
        return self.leader == self.rank

    @property
    def drains(self) -> bool:
        """Whether a producer waits in the end for what other CTAs hand back."""
        return self.ranks > 1 and not self.adds

    @property
    def round(self) -> int:
        """The transactions after which stages and parities are the same again."""
        return 2 * self.stages


class StageOperand(NamedTuple):
    """The elements of a stage that a descriptor of a product names. ``number``: that of their kind in the k-tile
    ``TURN``. ``places``: the offsets of rows (or columns). ``steps``: the offsets of k."""

    stage: int
    number: int
    places: Lanes
    steps: tuple[int, ...]


class Protocol:
    """How the roles of a CTA use shared memory, as far as they have been proven. Methods raise NotCertified for a use
    that contradicts an earlier one.

    - ``owner``: of each element, the stage, warp or mbarrier to which it belongs.
    - ``counts``: address of an mbarrier -> the arrivals that a phase needs. ``full``, ``empty``: stage -> address of
      its mbarrier. ``turns``: group -> address of its turn's mbarrier. ``sizes``: stage -> the bytes that it expects.
    - ``kinds``, ``rows``, ``cols``: for each element of a stage, what it holds of the k-tile TURN of an item.
      ``source``: the rank of the CTA that loads it, plus 1.
    - ``sent``: stage -> rank of a CTA -> how many elements the own producer loads there.
    - ``cluster``: the protocols of all CTAs of the cluster, by rank.
    - ``operands``: what descriptors of products name, by their fields, extent and order. ``places``: the arrays of
      their rows and columns, equal ones only once. ``of_d``: rows and columns of the registers of D, by those arrays.
    - ``registers``: warpgroup -> registers of a thread after setmaxnreg.
    - ``meetings``: group -> number of its barrier. ``slab``: what every item leaves in the workspace; None before the
      first item has been proven.
    - ``sums``: what CTAs of the cluster send to this one. ``tensor``: how tensor memory is used.
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
        self.operands: dict[tuple[Strides, int, bool], StageOperand] = {}
        self.places: dict[bytes, Lanes] = {}
        self.of_d: dict[object, list[tuple[Lanes, Lanes]]] = {}
        self.registers: dict[int, int] = {}
        self.meetings: dict[int, int] = {}
        self.slab: SlabContents | None = None
        self.sums = ClusterSums(elements * ELEMENT)
        self.tensor = TensorColumns()

    def meeting(self, group: int, number: int) -> None:
        """Note that a group uses a barrier. Raises NotCertified if it uses another one, or another group uses this."""
        others = {other for of, other in self.meetings.items() if of != group}
        if not 1 <= number <= MOST_BARRIERS or number in others or self.meetings.setdefault(group, number) != number:
            raise NotCertified(f"barrier {number} is not one that a group of consumers has for itself")

    def leave(self, slab: SlabContents) -> None:
        """Note where an item leaves its partial sums: at the same places as every other item."""
        if self.slab is None:
            self.slab = slab
        elif not (np.array_equal(slab.rows, self.slab.rows) and np.array_equal(slab.cols, self.slab.cols)):
            raise NotCertified("partial sums of items lie at different places")

    def initialise(self, address: int, place: int, count: int) -> None:
        """Note an mbarrier that expects ``count`` arrivals in a phase. It begins at an address, which is that of the
        element ``place``."""
        if count < 1:
            raise NotCertified(f"an mbarrier that expects {count} arrivals")
        self.claim(np.arange(place, place + MBARRIER_BYTES // ELEMENT), MBARRIER, fresh=True)
        self.counts[address] = count

    def claim(self, places: Lanes, owner: int | Lanes, fresh: bool = False) -> None:
        """Note that elements belong to an owner. Raises NotCertified if they belong to another one or, with ``fresh``,
        if they belong to any."""
        before = self.owner[places]
        if ((before != FREE) & (fresh | (before != owner))).any():
            raise NotCertified("shared memory of one stage, warp or mbarrier is written for another one")
        self.owner[places] = owner

    def mbarrier(self, role: dict[int, int], number: int, address: int, what: str) -> None:
        """Note that the mbarrier at an address is that of a stage or a turn. ``role``: the dict ``full``, ``empty`` or
        ``turns``. ``number``: the key in it."""
        if address not in self.counts:
            raise NotCertified("an mbarrier that is not initialised")
        if role.setdefault(number, address) != address:
            raise NotCertified(f"a wait for, or an arrival at, another mbarrier than that of {what}")

    def bring(self, places: Lanes, rank: int, stage: int) -> None:
        """Note that the producer of the CTA with a rank loads to places of a stage of this CTA."""
        self.claim(places, FIRST_STAGE + stage)
        if ((self.source[places] != 0) & (self.source[places] != rank + 1)).any():
            raise NotCertified("two CTAs of a cluster load to the same place")
        self.source[places] = rank + 1

    def hold(self, places: Lanes, number: int, rows: Lanes, cols: Lanes) -> None:
        """Note which elements a k-tile brings to places: the same as in every other round of the ring."""
        known = self.kinds[places] != 0
        if (known & ((self.kinds[places] != number) | (self.rows[places] != rows) | (self.cols[places] != cols))).any():
            raise NotCertified("a stage gets other elements in another round of the ring")
        self.kinds[places], self.rows[places], self.cols[places] = number, rows, cols

    def send(self, stage: int, places: dict[int, Lanes]) -> None:
        """Check the boxes of a k-tile that this CTA loads. ``places``: rank of a CTA -> all places in its stage that
        they fill. The boxes must not overlap, and must fill the same places as those of other k-tiles."""
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
        """Check, after all producers have been proven, that as many bytes come to each stage as it expects."""
        mine = [peer.pipeline.rank for peer in self.cluster if peer.pipeline.leader == self.pipeline.rank]
        for stage in range(self.pipeline.stages):
            elements = [sum(peer.sent.get(stage, {}).get(rank, 0) for peer in self.cluster) for rank in mine]
            expected = self.sizes.get(stage, 0)
            if not all(elements) or expected != sum(elements) * ELEMENT:
                raise NotCertified(f"{expected} bytes are expected, and {sum(elements) * ELEMENT} copied")
        if any((peer.full, peer.empty) != (self.full, self.empty) for peer in self.cluster):
            raise NotCertified("the mbarriers of a cluster's CTAs lie at different places")
        written = {rank for sent in self.sent.values() for rank in sent}
        if any(self.pipeline.rank not in self.cluster[rank].pipeline.returns for rank in written):
            raise NotCertified("a CTA loads for another one whose warps do not hand stages back to it")

    def check(self, warps: int, groups: int) -> None:
        """Check the mbarriers after all roles have been proven. ``warps``: the number of warps in a group."""
        purposes = self._purposes(warps, groups)
        addresses = [address for role, *_ in purposes for address in role.values()]
        if len(set(addresses)) < len(addresses):
            raise NotCertified("one mbarrier serves two purposes")
        for role, size, arrivals in purposes:
            if sorted(role) != list(range(size)):
                raise NotCertified("a stage or a turn has no mbarrier, or one that is not needed")
            if any(self.counts[address] != arrivals for address in role.values()):
                raise NotCertified(f"an mbarrier does not expect the {arrivals} arrivals that it gets in a phase")

    def _purposes(self, warps: int, groups: int) -> list[tuple[dict[int, int], int, int]]:
        """For each purpose: its mbarriers, how many there must be, and the arrivals that each must expect."""
        pipeline = self.pipeline
        stages, adds, tensor = pipeline.stages, int(pipeline.adds), pipeline.tensor
        readers = [peer.pipeline for peer in self.cluster if pipeline.rank in peer.pipeline.returns]
        if tensor is not None:
            multipliers = sum(reader.leads for reader in readers)
            mine = sum(peer.pipeline.leader == pipeline.rank for peer in self.cluster)
            return [
                (self.full, stages, 1), (self.empty, stages, multipliers), (self.tensor.summed, tensor.tiles, 1),
                (self.tensor.stored, tensor.tiles if pipeline.leads else 0, warps * mine),
            ]  # fmt: skip
        return [
            (self.full, stages, 1), (self.empty, stages, warps * len(readers)),
            (self.turns, groups if groups > 1 else 0, warps), (self.sums.freed, adds, warps * pipeline.ranks),
            (self.sums.arrived, adds, 1),
        ]  # fmt: skip


@dataclass
class Stores:
    """The shared memory that belongs to warps of a role, from which bulk copies store to D.

    ``written`` and ``read`` have a state for each element of shared memory. ``written`` is WRITTEN after a warp's
    store, FENCED after a fence by all its lanes, and READY once these have met. ``read`` is READING from a copy's
    begin, READ after its thread has waited for it, and 0 once the warp has met. ``committed``: lane -> the places
    that each of its bulk groups reads, the oldest first. ``open``: lane -> the places of copies in no bulk group yet.
    """

    written: Lanes
    read: Lanes
    committed: dict[int, list[Lanes]] = field(default_factory=dict)
    open: dict[int, list[Lanes]] = field(default_factory=dict)

    WRITTEN, FENCED, READY = 1, 2, 3
    READING, READ = 1, 2

    @classmethod
    def none(cls, elements: int) -> Stores:
        """The state of ``elements`` elements to which nothing has been stored."""
        return cls(np.zeros(elements, np.uint8), np.zeros(elements, np.uint8))

    def copied(self) -> Stores:
        committed, opened = (
            {lane: list(each) for lane, each in of_lane.items()} for of_lane in (self.committed, self.open)
        )
        return Stores(self.written.copy(), self.read.copy(), committed, opened)

    @property
    def key(self) -> object:
        """A key that is equal for equal states, copies in no bulk group yet included."""
        committed, opened = (
            tuple((lane, tuple(places.tobytes() for places in each)) for lane, each in sorted(of_lane.items()) if each)
            for of_lane in (self.committed, self.open)
        )
        return self.written.tobytes(), self.read.tobytes(), committed, opened

    def write(self, places: Lanes) -> None:
        """Warps store to places."""
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
        """A lane issues a bulk copy that reads places."""
        if (self.written[places] != self.READY).any():
            raise NotCertified("a bulk store reads what was not written and fenced before the lanes of its warp met")
        self.read[places] = self.READING
        self.open.setdefault(lane, []).append(places)

    def commit(self, lane: int) -> None:
        """A lane's copies since its last commit become a bulk group."""
        opened = self.open.pop(lane, [])
        self.committed.setdefault(lane, []).append(np.concatenate(opened) if opened else np.zeros(0, np.int64))

    def wait(self, lane: int, most: int) -> None:
        """A lane waits until all of its bulk groups but the last ``most`` have read shared memory."""
        committed = self.committed.get(lane, [])
        first_left = max(0, len(committed) - most)
        done, self.committed[lane] = committed[:first_left], committed[first_left:]
        for places in done:
            self.read[places] = self.READ
        # Copies of later groups may read the same places as those that are done.
        for places in self.committed[lane]:
            self.read[places] = self.READING

    def finish(self) -> None:
        """Check that copies read nothing any more when threads end."""
        if self.open or (self.read == self.READING).any():
            raise NotCertified("a thread ends while its bulk stores may still read shared memory")
