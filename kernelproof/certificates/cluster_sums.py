"""How the CTAs of a cluster, which have slices of k of one tile, send each other their sums.

Each CTA has one item, the slice of its rank, and a ring of its own. Two more mbarriers of each CTA order the sums:

- ``freed`` expects one arrival of each warp of consumers of the cluster. A warp arrives at that of every CTA when it
  has waited for all of its k-tiles and for all products that read them, and its lanes have met.
- ``arrived`` expects one arrival, and the bytes of all sums that the CTA adds. One thread arrives there, and says how
  many bytes these are, right after it has initialised the mbarrier.

Every thread of a consumer waits for ``freed`` of its own CTA. Then all copies to all rings have landed, since each was
waited for, and nobody reads a ring any more. So the thread sends its sums, each to one CTA, into the ring there: by
stores whose bytes count at ``arrived`` of that CTA. No two sums of the cluster go to one place. Then it waits for its
own ``arrived``: that phase is complete when all of the CTA's sums have come, and not before, whether bytes come before
or after the arrival that expects them. What it reads then, ``cluster_sum_proof`` follows.

Nobody waits for ever: all warps arrive at ``freed`` before they wait for it, and send before they wait for ``arrived``.
Both mbarriers have one phase. No CTA ends before all arrivals and all bytes have come to it, because its consumers have
waited for both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.polynomials import Lanes

SUM_BYTES = 4
NOBODY = -1  # the source of a place that gets no sum


class Waited(IntEnum):
    """For what a CTA's consumers have waited after their products."""

    NOTHING = 0
    FREED = 1
    ARRIVED = 2


@dataclass(frozen=True, eq=False)
class Sent:
    """Sums that one instruction sends to the CTA with a ``rank``. ``at``: their places there, in units of a sum.
    ``rows``, ``cols``: their offsets in D's tile."""

    rank: int
    at: Lanes
    rows: Lanes
    cols: Lanes


@dataclass(frozen=True)
class SumTrack:
    """What a group has done after its products. ``freed``: the warps that have arrived at ``freed``, each with the rank
    of the CTA at which. ``sent``: the sums that it has sent."""

    waited: Waited = Waited.NOTHING
    freed: frozenset[tuple[int, int]] = frozenset()
    sent: tuple[Sent, ...] = ()

    def arrive(self, arrivals: frozenset[tuple[int, int]]) -> SumTrack:
        """Note that warps arrive at ``freed`` of CTAs."""
        if self.waited != Waited.NOTHING or arrivals & self.freed:
            raise NotCertified("a warp says twice, or too late, that a ring is free")
        return replace(self, freed=self.freed | arrivals)

    def send(self, sums: Sent) -> SumTrack:
        """Note that sums are sent."""
        if self.waited != Waited.FREED:
            raise NotCertified("a sum is sent to a ring that may still be read, or too late")
        return replace(self, sent=(*self.sent, sums))


class SumsAt(NamedTuple):
    """What comes to each place of a CTA: the rank of its source, and the offset in D's tile."""

    sources: Lanes
    rows: Lanes
    cols: Lanes


class ClusterSums:
    """What comes to one CTA of a cluster.

    ``freed``, ``arrived``: 0 -> address of the mbarrier. ``expected``: the bytes that the CTA expects; None before it
    says so. ``at``: what comes to each place, in units of a sum. ``sent``: whether its consumers have sent their sums.
    """

    def __init__(self, size: int) -> None:
        """``size``: bytes of shared memory."""
        self.freed: dict[int, int] = {}
        self.arrived: dict[int, int] = {}
        self.expected: int | None = None
        self.sent = False
        self.at = SumsAt(*(np.full(size // SUM_BYTES, NOBODY, np.int64) for _ in range(3)))

    def expect(self, count: int) -> None:
        """Note how many bytes the CTA expects."""
        if self.expected is not None:
            raise NotCertified("a CTA says twice how many bytes of sums it expects")
        self.expected = count

    def receive(self, rank: int, sent: Sent) -> None:
        """Note the sums that the CTA with a rank sends to this one."""
        if np.unique(sent.at).size != sent.at.size or (self.at.sources[sent.at] != NOBODY).any():
            raise NotCertified("two sums go to one place of a CTA")
        self.at.sources[sent.at] = rank
        self.at.rows[sent.at], self.at.cols[sent.at] = sent.rows, sent.cols

    def check(self) -> None:
        """Check, when all consumers of the cluster have been proven, that as many bytes come as are expected."""
        coming = int((self.at.sources != NOBODY).sum()) * SUM_BYTES
        if self.expected != coming:
            raise NotCertified(f"a CTA expects {self.expected} bytes of sums, and {coming} come")
