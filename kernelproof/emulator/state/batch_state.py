"""Keeps the state that all units of a batch share: its CTAs, their threads as lanes, and how to report findings.

A batch is a number of CTAs that execute together: each PTX instruction is one NumPy operation on all their threads.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kernelproof.emulator.state.arrays import MOVER, POISON, Array, Mask, Scalar
from kernelproof.emulator.state.launch_state import LaunchState
from kernelproof.emulator.state.participants import Dim3, Participant


class BatchState:
    """Some CTAs of a launch. All their threads form one vector of ``size`` lanes. Every CTA has ``width`` lanes, which
    is a multiple of 32; lanes beyond its threads are never alive.

    A CTA's place in the batch is its *row*. A batch has complete clusters, with consecutive rows.
    """

    def __init__(self, launch: LaunchState, ctas: Array) -> None:
        self.launch, self.ctas = launch, ctas
        self.count = len(ctas)
        self.threads = launch.threads
        self.identities = launch.lanes(self.count)
        self.width, self.size = self.identities.width, self.identities.size
        self.warps_per_cta = self.width // 32
        # Per lane: row, thread and warp of its CTA, lane of its warp, thread of the launch.
        self.row_of, self.thread = self.identities.row_of, self.identities.thread
        self.warp, self.lane = self.identities.warp, self.identities.lane
        # Per row: the difference between a lane's number in the launch and its place in the batch. CTAs of a batch are
        # mostly consecutive in the launch (``are_in_a_row``). Then it is the same for all rows.
        distance = (ctas.astype(np.int64) - np.arange(self.count)) * self.width
        self.are_in_a_row = bool((distance == distance[0]).all())
        self.gthread: Array = self.identities.place + (distance[0] if self.are_in_a_row else distance[self.row_of])
        self.cluster_size = launch.geometry.cluster_size
        # Per row: the CTA's rank in its cluster.
        self.rank: Array = np.arange(self.count) % self.cluster_size
        self.alive: Array = self.identities.alive
        self.everyone: Array = self.identities.place
        self._last_mask: Mask = None
        self._last_lanes: Array = np.zeros(0, np.int64)
        self._constants: dict[tuple[int, int], Array] = {}
        # Head of a loop that polls memory -> per lane, how many iterations it has executed.
        self.iterations: dict[int, Array] = {}

    # --- lanes and registers ---

    def lanes(self, m: Mask) -> Array:
        """Indices of the lanes in a mask, ascending; the array must not be changed. The last result is kept and found
        by the mask's identity, since masks never change in place."""
        if m is None:
            return self.everyone
        if m is not self._last_mask:
            self._last_mask, self._last_lanes = m, np.flatnonzero(m)
        return self._last_lanes

    def warps_of_lanes(self, lanes: Array | None) -> tuple[list[int], list[int]]:
        """The row and the warp of each of these lanes (None: all)."""
        rows, warps = self.row_of, self.warp
        return (rows if lanes is None else rows[lanes]).tolist(), (warps if lanes is None else warps[lanes]).tolist()

    def is_everyone(self, m: Array) -> bool:
        """Does the mask include every living lane?"""
        return bool(m[self.alive].all())

    def running(self, m: Mask) -> Array:
        """The mask as an array: all living lanes for None."""
        return self.alive if m is None else m

    def count_iteration(self, head: int, group: Array) -> None:
        """Count an iteration of a loop that polls memory, by the lanes of a mask."""
        iterations = self.iterations.get(head)
        if iterations is None:
            iterations = self.iterations[head] = np.zeros(self.size, np.int64)
        iterations += group

    def poison(self, width: int) -> Array:
        """A register of ``width`` bytes whose content is undefined."""
        return np.full(self.size * width, 0xFF, np.uint8).view(MOVER[width])

    def unspecified(self, width: int) -> Array:
        """A register of ``width`` bytes whose value no rule of PTX defines."""
        return np.full(self.size * width, self.launch.unspecified, np.uint8).view(MOVER[width])

    def quotient(self, out: Array, divisor: Array, m: Mask, site: int) -> Array:
        """Check an integer division with results ``out``, and return these. Divisions by zero are reported. Their
        results are those of today's hardware, unless this execution tries another value (``Variation.unspecified``)."""
        zero = divisor == 0
        if not zero.any():
            return out
        lanes = np.flatnonzero(zero & self.running(m))
        if len(lanes):
            self.report_lanes("division-by-zero", "divides an integer by zero", site, lanes, doubtful=True)
        if self.launch.unspecified == POISON:
            return out
        return np.where(zero, self.unspecified(out.dtype.itemsize).view(out.dtype), out)

    def spread(self, values: Array, lanes: Array, width: int) -> Array:
        """A register with the values of some lanes, and zero in all others."""
        out = np.zeros(self.size, MOVER[width])
        out[lanes] = values
        return out

    def constant(self, value: int, width: int) -> Array:
        """A register (``width`` bytes; 0: predicate) with the same value in every lane."""
        key = (value, width)
        out = self._constants.get(key)
        if out is None:
            out = np.full(self.size, bool(value) if width == 0 else value, bool if width == 0 else MOVER[width])
            if len(self._constants) < 512:  # a kernel may compute constants without end; these arrays are large
                self._constants[key] = out
        return out

    def words(self, value: Scalar) -> Array:
        """A 32-bit operand as an array, shape (warps, 32)."""
        return (self.constant(value, 4) if isinstance(value, int) else value).reshape(-1, 32)

    # --- reports ---

    def cta_index(self, row: int) -> Dim3:
        """(x, y, z) of a row's CTA."""
        return self.launch.cta_index(int(self.ctas[row]))

    def report(
        self,
        kind: str,
        message: str,
        site: int | None,
        row: int,
        threads: Iterable[int],
        *,
        address: int | None = None,
        count: int = 1,
        doubtful: bool = False,
        other: Participant | None = None,
    ) -> None:
        """Report a finding of threads of one CTA; ``other``: the other side of a race."""
        self.launch.reports.add(
            kind, message, site, self.cta_index(row), sorted({int(t) for t in threads}),
            address=address, count=count, doubtful=doubtful, other=other,
        )  # fmt: skip

    def report_lanes(
        self,
        kind: str,
        message: str,
        site: int | None,
        lanes: Array,
        address: int | None = None,
        doubtful: bool = False,
        other: Participant | None = None,
    ) -> None:
        """Report a finding of some lanes. It counts all of them, and lists the threads of the first lane's CTA."""
        row = int(self.row_of[lanes[0]])
        threads = self.thread[lanes[self.row_of[lanes] == row]]
        self.report(
            kind, message, site, row, threads, address=address, count=len(lanes), doubtful=doubtful, other=other
        )

    def report_lane(
        self,
        kind: str,
        message: str,
        site: int,
        lane: int,
        address: int | None = None,
        doubtful: bool = False,
        other: Participant | None = None,
    ) -> None:
        """Report a finding of one lane."""
        row, thread = int(self.row_of[lane]), int(self.thread[lane])
        self.report(kind, message, site, row, (thread,), address=address, doubtful=doubtful, other=other)

    def require_whole_warps(self, m: Mask, site: int) -> None:
        """Report warps of which only some lanes execute an instruction that needs all 32, such as mma or ldmatrix."""
        if m is None:
            return
        lanes = m.reshape(-1, 32)
        partial = lanes.any(axis=1) & ~lanes.all(axis=1)
        if partial.any():
            bad = np.flatnonzero(np.repeat(partial, 32) & m)
            self.report_lanes("warp-divergence", "only some lanes of a warp execute the instruction", site, bad)
