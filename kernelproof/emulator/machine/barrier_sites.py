"""Finds loops with barriers that some warps of a CTA execute more often than others.

Warps may meet at a barrier by different instructions (PTX ISA, "barrier": different warps may execute different forms),
and threads that have exited are not waited for. Each of these alone is legal. Together they hide an error: one warp has
left a loop with a barrier and goes on to the next barrier, while another warp is still in the loop. If the first warp
then exits before the other one ends, they have met at the wrong barriers in between, and accesses are not ordered as
the program assumes. Only barriers without a count are concerned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.sites import Site


class Crossing(NamedTuple):
    """A phase of a barrier at which ``lanes`` arrived by instruction ``site``, and others of the CTA by ``other``."""

    site: int
    other: int
    lanes: Array


class BarrierSites:
    """The instructions by which warps of a batch have passed barriers. The batch has ``rows`` CTAs of ``width`` lanes.
    Instructions of one CUDA line count as one, since unrolling makes copies of an instruction.

    ``passed_by_all``: instructions that all warps have passed together. ``crossings``: row of a CTA -> the first phase
    at which warps met by two different instructions, if one warp executes both of them, at that phase or another.
    """

    def __init__(self, rows: int, width: int, sites: Sequence[Site]) -> None:
        self.rows, self.width, self.sites = rows, width, sites
        self.passed_by_all: set[int] = set()
        self.crossings: dict[int, Crossing] = {}
        # Place of an instruction -> which warps of the batch have passed it.
        self._passed: dict[object, Array] = {}
        # Row of a CTA -> places of two instructions -> a phase at which warps met by these two. It becomes a crossing
        # when one of its warps executes the other instruction.
        self._split_phases: dict[int, dict[tuple[object, object], Crossing]] = {}

    def record_phase(self, arrived: Array, sites: Array) -> None:
        """Note a complete phase of some CTAs: the lanes that have ``arrived`` (bool per lane), and by which instruction
        (``sites``, per lane)."""
        lane_sites = sites[arrived]
        arrival_sites = [int(lane_sites[0])] if (lane_sites == lane_sites[0]).all() else np.unique(lane_sites).tolist()
        if len(arrival_sites) > 1 or self._split_phases:
            for row in np.flatnonzero(arrived.reshape(self.rows, self.width).any(axis=1)).tolist():
                if row not in self.crossings:
                    lanes = row * self.width + np.flatnonzero(arrived[row * self.width : (row + 1) * self.width])
                    self._cross(
                        row,
                        {site: own_lanes for site in arrival_sites if (own_lanes := lanes[sites[lanes] == site]).size},
                    )
        for site in arrival_sites:
            warps = (arrived & (sites == site)).reshape(-1, 32).any(axis=1)
            place = self._place(site)
            self._passed[place] = self._passed[place] | warps if place in self._passed else warps

    def _cross(self, row: int, groups: dict[int, Array]) -> None:
        """Look for a warp of a CTA that has passed two instructions by which warps met. ``groups``: instruction -> the
        lanes that arrive by it now."""
        split = self._split_phases.get(row, {})
        for site, own_lanes in groups.items():
            place = self._place(site)
            for (_, other_place), crossing in split.items():
                if place == other_place and np.isin(own_lanes >> 5, crossing.lanes >> 5).any():
                    self.crossings.setdefault(row, crossing)
            for other in groups:
                pair = (place, self._place(other))
                if pair[0] == pair[1]:
                    continue
                if self._have_passed(own_lanes, other):
                    self.crossings.setdefault(row, Crossing(site, other, own_lanes))
                old = split.get(pair)
                lanes = own_lanes if old is None else np.union1d(old.lanes, own_lanes)
                self._split_phases.setdefault(row, split)[pair] = Crossing(site, other, lanes)

    def _have_passed(self, lanes: Array, site: int) -> bool:
        """Has a warp of these lanes passed a barrier by an instruction before?"""
        place = self._place(site)
        passed = self._passed.get(place)
        return place in map(self._place, self.passed_by_all) or (passed is not None and bool(passed[lanes >> 5].any()))

    def _place(self, site: int) -> object:
        """The CUDA lines of an instruction, or the instruction itself if they are not known."""
        return self.sites[site].frames or site
