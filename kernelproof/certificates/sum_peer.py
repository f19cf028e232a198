"""Executes what a CTA of a cluster does to send sums to the others and to expect its own; see ``cluster_sums``."""

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
    """Sums that go to one CTA. ``signal``: the address of the mbarrier at which their bytes count. ``elements``: the
    elements of shared memory that they fill."""

    sent: Sent
    signal: int
    elements: Lanes


class SumPeer(ClusterAddresses):
    """The machine of such a CTA. ``initialisers``: address of an mbarrier -> the thread that has initialised it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.initialisers: dict[int, int] = {}

    def expected_bytes(
        self, address: Any, count: Any, expected: Any, lanes: Lanes, order: int, drops: bool
    ) -> tuple[int, int]:
        """mbarrier.arrive.expect_tx, once, by the thread that has initialised the mbarrier. Returns its address, and
        how many bytes of sums are expected."""
        at = self._one(address, lanes)
        if drops or np.any(np.asarray(count) != 1) or not order & ORDERS:
            raise NotCertified("an arrival that is not one, or does not release")
        if len(lanes) != 1 or self.initialisers.get(at) != lanes[0]:
            raise NotCertified("bytes of sums are expected by another thread than that which initialised the mbarrier")
        total = self._one(expected, lanes)
        if not 0 <= total <= MOST_BYTES:
            raise NotCertified(f"{total} bytes are expected")
        return at, total

    def sums_to_peers(self, address: Any, value: Any, size: int, signal: Any, tile: Tile) -> Iterator[Sending]:
        """st.async of complete sums over the slice to CTAs of the cluster, by all threads: what goes to each CTA."""
        if not isinstance(value, Cells) or value.bytes != size:
            raise NotCertified("what is sent to another CTA is not a sum of products")
        self.whole_sum(value, "another CTA", SUM_BYTES, tile)
        ranks, places = self.peers(address)
        mbarriers = self.peers(signal)
        if (mbarriers[0] != ranks).any():
            raise NotCertified("bytes of sums count at another CTA's mbarrier than that to which they go")
        rows, cols = value.rows - int(tile.row.constant), value.cols - int(tile.col.constant)
        if rows.min() < 0 or cols.min() < 0 or rows.max() >= tile.rows or cols.max() >= tile.cols:
            raise NotCertified("a sum that is sent lies outside of the tile")
        for rank in np.unique(ranks).tolist():
            lanes = np.flatnonzero(ranks == rank)
            at = np.unique(mbarriers[1][lanes])
            if len(at) != 1:
                raise NotCertified("lanes send sums to several mbarriers of a CTA")
            elements = self.memory.places(places[lanes].astype("u4"), size)
            # A slot has room for one sum: elements of ELEMENT bytes, counted in sums of SUM_BYTES.
            slots = elements[:, :: SUM_BYTES // ELEMENT] // (SUM_BYTES // ELEMENT)
            yield Sending(Sent(rank, slots, rows[lanes], cols[lanes]), int(at[0]), elements)
