"""Argues why CTAs of a cluster exchange partial sums without races or deadlocks, and records what each of them sends.

If a cluster divides k, its CTAs have slices of k of one tile. Each CTA has one item, the slice of its rank, and a ring
of its own. Two more mbarriers of each CTA order the exchange of sums:

- ``freed`` expects one arrival of each consumer warp of the cluster. A warp arrives at the ``freed`` of every CTA when
  it has waited for all of its k-tiles and for all products that read them, and its lanes are synchronised.
- ``arrived`` expects one arrival, and the bytes of all sums that the CTA adds. One thread arrives there, and announces
  the number of these bytes, right after it has initialised the mbarrier.

1. Every consumer thread waits for ``freed`` of its own CTA. After that all copies to all rings have landed, since each
   was waited for, and no warp reads a ring any more.
2. So the thread sends its sums. Each sum goes to one CTA, into the ring there, by a store whose bytes count at the
   ``arrived`` of that CTA. No two sums of the cluster go to the same address.
3. The thread waits for ``arrived`` of its own CTA. Its phase completes exactly when all sums for the CTA have come,
   whether bytes come before or after the arrival that announces them. ``cluster_sum_proof`` proves how the thread then
   adds them.

No wait lasts for ever: all warps arrive at ``freed`` before they wait for it, and send before they wait for
``arrived``. Both mbarriers have one phase. No CTA ends before all arrivals and all bytes have come to it, because its
consumers have waited for both mbarriers.

``sum_sender`` checks at each instruction of a consumer that the consumer keeps this order, and notes in a ``SumTrack``
how far it has come.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.polynomials import Lanes

SUM_BYTES = 4
NOBODY = -1  # the source of an address to which no sum is sent


class Waited(IntEnum):
    """The last mbarrier for which a group of consumers has waited after its products."""

    NOTHING = 0
    FREED = 1
    ARRIVED = 2


@dataclass(frozen=True, eq=False)
class Sent:
    """The sums that one instruction sends to the CTA of a ``rank``, each array with one element per sum.

    ``at``: their addresses in that CTA's shared memory, in units of SUM_BYTES. ``rows``, ``cols``: the elements of D
    to which they belong, as offsets in the tile.
    """

    rank: int
    at: Lanes
    rows: Lanes
    cols: Lanes


@dataclass(frozen=True)
class SumTrack:
    """What a group of consumers has done after its products. ``freed``: pairs (warp, rank): the warp has arrived at the
    ``freed`` of the CTA of that rank. ``sent``: the sums that the group has sent."""

    waited: Waited = Waited.NOTHING
    freed: frozenset[tuple[int, int]] = frozenset()
    sent: tuple[Sent, ...] = ()

    def arrive(self, arrivals: frozenset[tuple[int, int]]) -> SumTrack:
        """The track after warps have arrived at the ``freed`` of CTAs. Raises NotCertified if one of them has done so
        before, or the group has already waited."""
        if self.waited != Waited.NOTHING or arrivals & self.freed:
            raise NotCertified("a warp says twice, or too late, that a ring is free")
        return replace(self, freed=self.freed | arrivals)

    def send(self, sums: Sent) -> SumTrack:
        """The track after sums were sent. Raises NotCertified unless the group has waited for ``freed`` and not yet for
        ``arrived``."""
        if self.waited != Waited.FREED:
            raise NotCertified("a sum is sent to a ring that may still be read, or too late")
        return replace(self, sent=(*self.sent, sums))


class SumsAt(NamedTuple):
    """Which sum is sent to each address of a CTA's shared memory: the rank of the sender (or NOBODY), and the sum's
    offsets in D's tile. Each array has one element per SUM_BYTES of shared memory."""

    sources: Lanes
    rows: Lanes
    cols: Lanes


class ClusterSums:
    """The sums that all CTAs of a cluster send to one of them.

    ``freed``, ``arrived``: the address of the mbarrier of this name in shared memory, under the only key 0.
    ``expected``: the bytes that the CTA has announced; None before it does so. ``at``: the sum at each address.
    ``sent``: whether the CTA's own consumers have sent their sums.
    """

    def __init__(self, size: int) -> None:
        """``size``: bytes of the CTA's shared memory."""
        self.freed: dict[int, int] = {}
        self.arrived: dict[int, int] = {}
        self.expected: int | None = None
        self.sent = False
        self.at = SumsAt(*(np.full(size // SUM_BYTES, NOBODY, np.int64) for _ in range(3)))

    def expect(self, count: int) -> None:
        """Note how many bytes the CTA announces. Raises NotCertified if it has done so before."""
        if self.expected is not None:
            raise NotCertified("a CTA says twice how many bytes of sums it expects")
        self.expected = count

    def receive(self, rank: int, sent: Sent) -> None:
        """Note the sums that the CTA of a ``rank`` sends to this one. Raises NotCertified if two sums of the cluster go
        to the same address."""
        if np.unique(sent.at).size != sent.at.size or (self.at.sources[sent.at] != NOBODY).any():
            raise NotCertified("two sums go to one place of a CTA")
        self.at.sources[sent.at] = rank
        self.at.rows[sent.at], self.at.cols[sent.at] = sent.rows, sent.cols

    def check(self) -> None:
        """Check, when all consumers of the cluster have been proven, that as many bytes come as the CTA announced.
        Raises NotCertified."""
        coming = int((self.at.sources != NOBODY).sum()) * SUM_BYTES
        if self.expected != coming:
            raise NotCertified(f"a CTA expects {self.expected} bytes of sums, and {coming} come")
