"""By which instructions warps come to a barrier without a count: finds loops with barriers that have different lengths.

Warps may meet at a barrier by different instructions (PTX ISA, "barrier": different warps may execute different forms),
and threads that have exited are not waited for. Both are legal alone. Where one warp is still in a loop whose barrier
another has left for the next one, and the other exits before the first has come to its end, the two have met at the
wrong barriers in between: what one believes to be ordered is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.sites import Site


class Crossing(NamedTuple):
    """A phase of a barrier at which lanes arrived by instruction ``site``, and other lanes of the CTA by ``other``."""

    site: int
    other: int
    lanes: Array


class BarrierSites:
    """Of a batch with ``rows`` CTAs of ``width`` lanes. Instructions of one CUDA line count as one: unrolling has made
    copies of it.

    ``passed_by_all``: instructions that all warps have passed together. ``crossings``: by CTA, the first phase at which
    warps met by instructions of which one warp passes both.
    """

    def __init__(self, rows: int, width: int, sites: Sequence[Site]) -> None:
        self.rows, self.width, self.sites = rows, width, sites
        self.passed_by_all: set[int] = set()
        self.crossings: dict[int, Crossing] = {}
        # Place of an instruction -> which warps of the batch have passed it.
        self._passed: dict[object, Array] = {}
        # Phases at which warps met by different instructions, by CTA and by the places of both, until a warp comes by
        # the other one.
        self._apart: dict[int, dict[tuple[object, object], Crossing]] = {}

    def meet(self, arrived: Array, sites: Array) -> None:
        """A phase is complete, for lanes of some CTAs that have ``arrived`` by the instructions in ``sites``."""
        at = sites[arrived]
        came = [int(at[0])] if (at == at[0]).all() else np.unique(at).tolist()
        if len(came) > 1 or self._apart:
            for row in np.flatnonzero(arrived.reshape(self.rows, self.width).any(axis=1)).tolist():
                if row not in self.crossings:
                    lanes = row * self.width + np.flatnonzero(arrived[row * self.width : (row + 1) * self.width])
                    self._cross(row, {site: mine for site in came if (mine := lanes[sites[lanes] == site]).size})
        for site in came:
            warps = (arrived & (sites == site)).reshape(-1, 32).any(axis=1)
            place = self._place(site)
            self._passed[place] = self._passed[place] | warps if place in self._passed else warps

    def _cross(self, row: int, groups: dict[int, Array]) -> None:
        """Look for warps of a CTA that came by one instruction, and by the other before or now."""
        apart = self._apart.get(row, {})
        for site, mine in groups.items():
            place = self._place(site)
            for (_, elsewhere), crossing in apart.items():
                if place == elsewhere and np.isin(mine >> 5, crossing.lanes >> 5).any():
                    self.crossings.setdefault(row, crossing)
            for other in groups:
                pair = (place, self._place(other))
                if pair[0] == pair[1]:
                    continue
                if self._have_passed(mine, other):
                    self.crossings.setdefault(row, Crossing(site, other, mine))
                old = apart.get(pair)
                lanes = mine if old is None else np.union1d(old.lanes, mine)
                self._apart.setdefault(row, apart)[pair] = Crossing(site, other, lanes)

    def _have_passed(self, lanes: Array, site: int) -> bool:
        place = self._place(site)
        passed = self._passed.get(place)
        return place in map(self._place, self.passed_by_all) or (passed is not None and bool(passed[lanes >> 5].any()))

    def _place(self, site: int) -> object:
        return self.sites[site].frames or site
