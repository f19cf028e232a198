"""Symbolically executes how a CTA of a cluster sends partial sums to the other CTAs, and announces how many bytes of
sums it will receive; see ``cluster_sums``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from kernelproof.certificates.cells import Cells
from kernelproof.certificates.cluster_addresses import ClusterAddresses
from kernelproof.certificates.cluster_sums import SUM_BYTES, Sent
from kernelproof.certificates.contract import Tile
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.polynomials import Lanes
from kernelproof.certificates.shared_memory import ELEMENT
from kernelproof.certificates.waits import MOST_BYTES
from kernelproof.emulator.state.scopes import ORDERS


class Sending(NamedTuple):
    """Sums that go to one CTA. ``signal``: the address, in the receiving CTA, of the mbarrier whose transaction count
    their bytes complete. ``elements``: the elements of the receiving CTA's shared memory that they fill."""

    sent: Sent
    signal: int
    elements: Lanes


class SumPeer(ClusterAddresses):
    """The machine of a CTA that sends sums to the other CTAs of its cluster, and receives sums from them.

    ``initialisers``: address of an mbarrier of this CTA -> the thread that has initialised it.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.initialisers: dict[int, int] = {}

    def expected_bytes(
        self, address: Any, count: Any, expected: Any, lanes: Lanes, order: int, drops: bool
    ) -> tuple[int, int]:
        """mbarrier.arrive.expect_tx, which announces the bytes of all sums that this CTA receives.

        ``address``, ``count``, ``expected``: the mbarrier's address, the arrivals that the instruction counts as, and
        the bytes that it announces. ``lanes``: the threads that execute it. ``order``: the strength of the access, as
        in ``scopes``. ``drops``: whether it is an arrive_drop.

        Returns the mbarrier's address and the announced bytes. Raises NotCertified unless the instruction is one
        arrival that releases, by the thread that has initialised the mbarrier. Callers check that it happens once.
        """
        at = self._one(address, lanes)
        if drops or np.any(np.asarray(count) != 1) or not order & ORDERS:
            raise NotCertified("the arrival that announces sums drops, does not count as one, or does not release")
        if len(lanes) != 1 or self.initialisers.get(at) != lanes[0]:
            raise NotCertified("bytes of sums are not announced by the one thread that has initialised the mbarrier")
        total = self._one(expected, lanes)
        if not 0 <= total <= MOST_BYTES:
            raise NotCertified(f"{total} bytes of sums are announced; an mbarrier can expect up to {MOST_BYTES}")
        return at, total

    def sums_to_peers(self, address: Any, value: Any, size: int, signal: Any, tile: Tile) -> Iterator[Sending]:
        """st.async by all threads: each lane sends sums, which are complete over this CTA's slice of k, to one CTA.

        ``address``, ``value``, ``size``, ``signal``: per lane the target, its sums, their bytes, and the address of the
        mbarrier that they signal. ``tile``: the tile of D of which they are sums. Yields what each CTA receives. Raises
        NotCertified if a lane sends anything but such sums, if a target is outside of the tile or of the cluster, or if
        the sums that go to a CTA do not all signal one mbarrier of that CTA.
        """
        if not isinstance(value, Cells) or value.bytes != size:
            raise NotCertified("what is sent to another CTA is not a sum of products")
        self.whole_sum(value, "another CTA", SUM_BYTES, tile)
        ranks, places = self.peers(address)
        mbarriers = self.peers(signal)
        if (mbarriers[0] != ranks).any():
            raise NotCertified("sums go to one CTA, but signal an mbarrier of another")
        rows, cols = value.rows - int(tile.row.constant), value.cols - int(tile.col.constant)
        if rows.min() < 0 or cols.min() < 0 or rows.max() >= tile.rows or cols.max() >= tile.cols:
            raise NotCertified("a sum that is sent lies outside of the tile")
        for rank in np.unique(ranks).tolist():
            lanes = np.flatnonzero(ranks == rank)
            at = np.unique(mbarriers[1][lanes])
            if len(at) != 1:
                raise NotCertified("sums that go to one CTA signal several mbarriers of it")
            elements = self.memory.places(places[lanes].astype("u4"), size)
            # A sum fills SUM_BYTES // ELEMENT elements. Its slot is its address in units of SUM_BYTES, so it follows
            # from the first of them.
            slots = elements[:, :: SUM_BYTES // ELEMENT] // (SUM_BYTES // ELEMENT)
            yield Sending(Sent(rank, slots, rows[lanes], cols[lanes]), int(at[0]), elements)
