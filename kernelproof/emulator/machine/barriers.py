"""Executes barriers of CTAs and warps (PTX ISA, "bar", "barrier", "bar.warp.sync"), and lets lanes wait at instructions
that they execute together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.machine.barrier_sites import BarrierSites
from kernelproof.emulator.machine.scheduler import WARP_BARRIER, Scheduler, Step, ranges
from kernelproof.emulator.memory.order import GlobalOrder, WarpView
from kernelproof.emulator.state.arrays import Array, Mask, Scalar, bits_of
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.participants import Participant
from kernelproof.emulator.state.warp_clocks import WarpClocks

BARRIERS = 16  # how many a CTA has


class ReleasedClocks(NamedTuple):
    """The clocks that threads release when they arrive at a barrier without waiting: that of their CTA, and what they
    know of other CTAs."""

    clock: Array
    view: WarpView | None

    def joined(self, clock: Array, view: WarpView | None) -> ReleasedClocks:
        """These clocks joined with those that more threads release."""
        views = self.view if view is None else view if self.view is None else self.view.joined(view)
        return ReleasedClocks(np.maximum(self.clock, clock), views)


class Phases:
    """The open phases of a barrier.

    - ``expected``: the number of threads that each row (CTA) expects.
    - ``uncounted``: whether a thread of the row has arrived by an instruction that states no number of threads.
    - ``site``: for each lane, the instruction by which it arrived.
    """

    def __init__(self, batch: BatchState) -> None:
        self.expected: Array = np.zeros(batch.count, np.int64)
        self.uncounted: Array = np.zeros(batch.count, bool)
        self.site: Array = np.zeros(batch.size, np.int64)


class Votes:
    """The predicates of lanes at barriers with reduction (bar.red), and the results.

    Per lane: whether it has voted in the open phase (``votes``), and its predicate (``predicate``). For its last
    complete phase, how many lanes voted (``voters``), and for how many the predicate held (``yes_votes``).
    """

    def __init__(self, batch: BatchState) -> None:
        self.batch = batch
        self.votes, self.predicate = np.zeros(batch.size, bool), np.zeros(batch.size, bool)
        self.voters, self.yes_votes = np.zeros(batch.size, np.uint32), np.zeros(batch.size, np.uint32)

    def record(self, mask: Array, value: Array) -> None:
        """The lanes of ``mask`` arrive with predicates."""
        self.votes[mask], self.predicate[mask] = True, value[mask]

    def count(self, participants: Array) -> None:
        """Count the votes of a complete phase of one barrier, for the lanes that take part in it."""
        shape = self.batch.count, self.batch.width
        voting = self.votes & participants
        for out, voted in ((self.voters, voting), (self.yes_votes, voting & self.predicate)):
            out[participants] = np.repeat(voted.reshape(shape).sum(axis=1), self.batch.width)[participants]
        self.votes &= ~participants


class Barriers:
    """The numbered barriers of every CTA, and the barriers of its warps.

    ``arrived``: number -> the lanes that have arrived in the barrier's present phase. A barrier with a count completes
    when as many threads have arrived; one without waits for all threads that have not exited (PTX ISA, "exit").
    """

    def __init__(self, batch: BatchState, scheduler: Scheduler, clocks: WarpClocks, order: GlobalOrder) -> None:
        self.batch, self.launch, self.scheduler = batch, batch.launch, scheduler
        self.clocks, self.order = clocks, order
        self.arrived: dict[int, Array] = {}
        # Number -> open phases. Rows in which no phase is open keep values of an earlier one.
        self.phases: dict[int, Phases] = {}
        # (number, row) -> the clocks that threads which arrived without waiting release, in the open phase.
        self.released: dict[tuple[int, int], ReleasedClocks] = {}
        self.barrier_sites = BarrierSites(batch.count, batch.width, self.launch.kernel.sites)
        # None before the first bar.red.
        self.votes: Votes | None = None
        # Per lane that waits at bar.warp.sync: the mask of lanes it waits for.
        self.members: Array = np.zeros(batch.size, np.uint32)
        scheduler.on_exit.append(self._after_exit)

    # --- barriers of a CTA ---

    def sync(self, number: Scalar, expected: Scalar, m: Mask, resume: int, site: int) -> Step:
        """bar.sync: ``expected`` threads (0: all of the CTA) wait for each other, then go on at block ``resume``."""
        # Fast path: all threads are here, so none has to sleep.
        if (
            isinstance(number, int)
            and isinstance(expected, int)
            and expected in (0, self.batch.threads)
            and number < BARRIERS
            and number not in self.arrived
            and self.scheduler.alone
            and (m is None or self.batch.is_everyone(m))
            and (self.scheduler.complete or self._ctas_are_complete())
        ):
            self.barrier_sites.passed_by_all.add(site)
            self._sync_all()
            return resume, m, False
        for barrier, count, group in self._groups(number, expected, m):
            self._check(barrier, count, group, site)
            self._arrive(barrier, count, group, resume, site)
        return self.scheduler.pick()

    def sync_voting(self, value: Array, number: Scalar, expected: Scalar, m: Mask, resume: int, site: int) -> Step:
        """bar.red: as ``sync``, with a predicate of each lane. ``reduced`` then returns the result."""
        if self.votes is None:
            self.votes = Votes(self.batch)
        self.votes.record(self.batch.running(m), value)
        return self.sync(number, expected, m, resume, site)

    def reduced(self, mode: str) -> Array:
        """The result of the lanes' last bar.red: popc gives uint32, and/or give predicates."""
        votes = self.votes
        assert votes is not None
        if mode == "popc":
            return votes.yes_votes.copy()
        return votes.yes_votes > 0 if mode == "or" else votes.yes_votes == votes.voters

    def arrive(self, number: Scalar, expected: Scalar, m: Mask, site: int) -> None:
        """bar.arrive: the lanes count as arrived and go on without waiting. This is a release: threads that wait at the
        barrier are ordered after what the lanes did so far, but the lanes are ordered after nobody."""
        for barrier, count, group in self._groups(number, expected, m):
            self._check(barrier, count, group, site)
            if self.launch.options.hazards:
                self._release(barrier, group)
            self._arrive(barrier, count, group, None, site)

    def _release(self, number: int, mask: Array) -> None:
        """Note the clocks that the lanes of ``mask``, which do not wait, release to threads that wait at a barrier."""
        batch, order = self.batch, self.order
        for row in np.flatnonzero(mask.reshape(batch.count, batch.width).any(axis=1)).tolist():
            threads = np.flatnonzero(mask[row * batch.width : (row + 1) * batch.width])
            warps = np.unique(threads >> 5)
            clock = np.maximum.reduce([self.clocks.present(row, int(warp)) for warp in warps])
            view = order.known_to(int(batch.ctas[row]), warps.tolist(), threads) if order.active else None
            old = self.released.get((number, row))
            self.released[number, row] = ReleasedClocks(clock, view) if old is None else old.joined(clock, view)
        # Later accesses of these lanes are not released.
        self.launch.tick += 1

    def _count(self, ctas: int) -> None:
        """Add a barrier to the launch's counters for each of ``ctas`` CTAs that have passed one."""
        if self.launch.counters is not None:
            self.launch.counters.barriers += ctas

    def _ctas_are_complete(self) -> bool:
        """Does each CTA have either all its threads alive, or none?"""
        living = self.batch.alive.reshape(self.batch.count, self.batch.width).sum(axis=1)
        return bool(((living == 0) | (living == self.batch.threads)).all())

    def _groups(self, number: Scalar, expected: Scalar, m: Mask) -> list[tuple[int, int, Array]]:
        """For every barrier that the lanes name: (its number, threads expected or 0 without a count, lanes)."""
        batch = self.batch
        mask = batch.running(m).copy()
        if isinstance(number, int) and isinstance(expected, int):
            return [(number, expected, mask)]
        numbers = np.full(batch.size, number) if isinstance(number, int) else number
        counts = np.full(batch.size, expected) if isinstance(expected, int) else expected
        pairs = {(int(a), int(b)) for a, b in zip(numbers[mask], counts[mask], strict=True)}
        return [(a, b, mask & (numbers == a) & (counts == b)) for a, b in sorted(pairs)]

    def _check(self, number: int, count: int, mask: Array, site: int) -> None:
        """Open a phase of a barrier in each row in which none is open. Report a barrier whose number does not exist, a
        ``count`` (0: none) that is no multiple of 32 or differs from that of threads which have arrived, and lanes of
        one warp that arrive by different instructions."""
        batch = self.batch
        expected = count or batch.threads
        text = ""
        if number >= BARRIERS:
            text = f"barrier {number}, of {BARRIERS} per CTA"
        elif expected % 32 and expected != batch.threads:
            text = f"barrier {number} for {expected} threads: the count must be a multiple of 32"
        arrived = self.arrived.get(number)
        phases = self.phases.get(number)
        if phases is None:
            phases = self.phases[number] = Phases(batch)
        rows = self._rows_of(mask)
        if arrived is None:
            before = np.zeros(batch.count, bool)
        else:
            before = self._rows_of(arrived) & rows
            if (phases.expected[before] != expected).any():
                first = int(phases.expected[before][phases.expected[before] != expected][0])
                text = f"arrives at barrier {number} for {expected} threads, at which others arrive for {first}"
            if self._is_aligned(site):
                elsewhere = (arrived & (phases.site != site)).reshape(-1, 32).any(axis=1)
                split = np.repeat(elsewhere, 32) & mask
                if split.any():
                    split_text = f"lanes of one warp arrive at barrier {number} by different instructions"
                    batch.report_lanes("barrier-divergence", split_text, site, np.flatnonzero(split))
        phases.uncounted[rows & ~before] = False
        phases.uncounted[rows] |= not count
        phases.expected[rows], phases.site[mask] = expected, site
        if text:
            batch.report_lanes("barrier-count", text, site, np.flatnonzero(mask))

    def _rows_of(self, mask: Array) -> Array:
        """Per row: is one of its lanes in the mask?"""
        return np.asarray(mask.reshape(self.batch.count, self.batch.width).any(axis=1))

    def _is_aligned(self, site: int) -> bool:
        """Must all lanes of a warp arrive by this same instruction?"""
        opcode = next(part for part in self.launch.kernel.sites[site].text.split() if part[0] != "@")
        return opcode.startswith("bar.") or ".aligned" in opcode

    def _arrive(self, number: int, count: int, mask: Array, resume: int | None, site: int) -> None:
        """Lanes arrive at a barrier, and sleep until they go on at block ``resume`` (None: they do not wait). The phase
        completes in CTAs in which ``count`` threads (0: all) have arrived."""
        batch = self.batch
        expected = count or batch.threads
        arrived = self.arrived.get(number)
        if arrived is not None and (arrived & mask).any():
            text = f"arrives at barrier {number} again before it has completed ({expected} threads expected)"
            batch.report_lanes("barrier-divergence", text, site, np.flatnonzero(arrived & mask))
        arrived = mask if arrived is None else arrived | mask
        if resume is not None:
            self.scheduler.sleep(number, mask, resume, site)
        counts = arrived.reshape(batch.count, batch.width).sum(axis=1)
        if (counts > expected).any():
            most = int(counts.max())
            text = f"{most} threads arrive at barrier {number}, which waits for {expected}"
            batch.report_lanes("barrier-count", text, site, np.flatnonzero(mask & (counts > expected)[batch.row_of]))
        self._settle(number, arrived, counts >= expected)

    def _after_exit(self, exited: Array) -> None:  # noqa: ARG002
        """Lanes have exited. Barriers without a count, and barriers of warps, that waited for no others complete."""
        for number in [n for n, phases in self.phases.items() if n in self.arrived and phases.uncounted.any()]:
            self._settle(number, self.arrived[number], np.zeros(self.batch.count, bool))
        arrived = self.arrived.get(WARP_BARRIER)
        if arrived is not None:
            leaving = arrived & ~self._warp_lacks(bits_of(self.members), arrived)
            if leaving.any():
                self._free_warps(leaving, arrived)

    def _settle(self, number: int, arrived: Array, completes: Array) -> None:
        """Complete the phase in rows in which the count is reached (``completes``), or in which all other threads have
        exited."""
        batch = self.batch
        participants, early_rows = arrived, np.zeros(batch.count, bool)
        phases = self.phases[number]
        if phases.uncounted.any():
            early_rows = self._rows_of(arrived) & ~self._rows_of(batch.alive & ~arrived) & ~completes & phases.uncounted
            if early_rows.any():
                exited = ~batch.alive & (batch.thread < batch.threads) & early_rows[batch.row_of]
                self._report_early(number, arrived, exited)
                # Exited threads are participants: their accesses are ordered before what follows.
                participants, completes = arrived | exited, completes | early_rows
        if completes.any():
            finished = completes[batch.row_of]
            meeting = arrived & finished & phases.uncounted[batch.row_of]
            if meeting.any():
                self.barrier_sites.record_phase(meeting, phases.site)
                self._report_crossings(number, early_rows)
            self._sync_some(number, participants & finished, completes)
            self.scheduler.release(number, finished)
            arrived = arrived & ~finished
        self._keep(number, arrived)

    def _report_early(self, number: int, arrived: Array, exited: Array) -> None:
        """Report lanes that wait at a barrier which the lanes of ``exited`` never reach: for each instruction at which
        lanes wait, one CTA."""
        batch = self.batch
        sites = self.phases[number].site
        waiting = arrived & np.repeat(self._rows_of(exited), batch.width)
        for site in np.unique(sites[waiting]).tolist():
            lanes = np.flatnonzero(waiting & (sites == site))
            row = int(batch.row_of[lanes[0]])
            ended = batch.thread[exited & (batch.row_of == row)]
            count = int((waiting & (batch.row_of == row)).sum())
            text = f"{len(ended)} threads ({ranges(ended)}) have exited before barrier {number}, at which {count} wait"
            batch.report_lanes("exit-before-barrier", text, site, lanes)

    def _report_crossings(self, number: int, early_rows: Array) -> None:
        """Report CTAs in which threads have exited before a barrier (``early_rows``, bool per row), if their warps had
        met there by different instructions."""
        for row in early_rows.nonzero()[0].tolist():
            crossing = self.barrier_sites.crossings.get(row)
            if crossing is not None and self._is_aligned(crossing.site) and self._is_aligned(crossing.other):
                text = (
                    f"warps have met at barrier {number} by different instructions, and threads have exited before its "
                    "last phase: their loops pass it a different number of times"
                )
                other = Participant(self.launch.kernel.sites[crossing.other])
                self.batch.report_lanes("barrier-divergence", text, crossing.site, crossing.lanes, other=other)

    def _keep(self, number: int, arrived: Array) -> None:
        """Store which lanes have arrived at a barrier; barriers without any are not kept."""
        if arrived.any():
            self.arrived[number] = arrived
        else:
            self.arrived.pop(number, None)

    def _sync_all(self) -> None:
        """All threads of every CTA have passed a barrier. The tick advances first: see ``LaunchState``."""
        self.launch.tick += 1
        self.clocks.meet_all()
        alive = self.batch.alive
        if self.votes is not None:
            self.votes.count(alive)
        if self.launch.counters is not None:
            self._count(int(self._rows_of(alive).sum()))
        warps, threads = range(self.batch.warps_per_cta), np.arange(self.batch.threads)
        for cta in self.order.unsynchronised(self.batch.ctas):
            self.order.barrier(cta, warps, warps, threads)

    def _sync_some(self, number: int, participants: Array, rows: Array) -> None:
        """A barrier is complete in some rows (bool per row), for the lanes of ``participants``. Participants that sleep
        there are now ordered after all participants. The others have exited, or have arrived without waiting."""
        batch = self.batch
        self.launch.tick += 1
        self._count(int(rows.sum()))
        if self.votes is not None:
            self.votes.count(participants & batch.alive)
        waits = self.scheduler.asleep(number) & participants
        # For lanes that went on after they had arrived, ``released`` has the clock at their arrival.
        present = waits | (participants & ~batch.alive)
        waiting, present_warps = self.clocks.warps_in(waits), self.clocks.warps_in(present)
        counts = present.reshape(batch.count, batch.width).sum(axis=1).tolist()
        unsynchronised = set(self.order.unsynchronised(batch.ctas))
        for row in np.flatnonzero(rows).tolist():
            released = self.released.pop((number, row), None)
            sleepers = waiting[row].nonzero()[0]
            if not sleepers.size:
                continue
            warps = present_warps[row].nonzero()[0]
            complete = counts[row] == batch.threads
            self.clocks.meet(row, warps, sleepers, complete, released.clock if released else None)
            cta, view = int(batch.ctas[row]), released.view if released else None
            if cta in unsynchronised or view is not None:
                threads = present[row * batch.width : (row + 1) * batch.width].nonzero()[0]
                self.order.barrier(cta, warps.tolist(), sleepers.tolist(), threads, view)

    # --- barriers of a warp ---

    def _require_own_lane(self, members: Scalar, mask: Array, site: int) -> None:
        """Report lanes that execute bar.warp.sync without being among its members."""
        batch = self.batch
        absent = (batch.words(members).reshape(-1) >> batch.lane & 1 == 0) & mask
        if absent.any():
            text = "the member mask omits the lane that executes the instruction"
            batch.report_lanes("warp-divergence", text, site, np.flatnonzero(absent))

    def sync_warp(self, members: Scalar, m: Mask, resume: int, site: int) -> Step:
        """bar.warp.sync: the lanes of a warp that the mask names wait for each other, wherever they are; lanes that
        have exited are not waited for.

        Lanes of one warp may name different sets. Each set is complete when all its living members have arrived.
        """
        batch, scheduler = self.batch, self.scheduler
        if scheduler.alone:
            if not isinstance(members, int) or members != 0xFFFFFFFF:
                self._require_own_lane(members, batch.running(m), site)
            self.clocks.warp_sync(m, members)
            return resume, m, False
        mask = batch.running(m).copy()
        self._require_own_lane(members, mask, site)
        arrived = self.arrived.get(WARP_BARRIER)
        arrived = mask if arrived is None else arrived | mask
        words = batch.words(members)
        named = bits_of(words)
        self.members[mask] = words.reshape(-1)[mask]
        missing = self._warp_lacks(named, arrived) & mask
        scheduler.sleep(WARP_BARRIER, mask, resume, site)
        ready = np.repeat((mask & ~missing).reshape(-1, 32).any(axis=1), 32)
        if ready.any():
            # If masks name less than the warp, only lanes that a complete set names go on.
            leaving = arrived & ready
            if int(words.reshape(-1)[np.flatnonzero(mask)[0]]) != 0xFFFFFFFF:
                leaving &= (named & (mask & ~missing).reshape(-1, 32, 1)).any(axis=1).reshape(-1)
            self._free_warps(leaving, arrived)
        else:
            self._keep(WARP_BARRIER, arrived)
        return scheduler.pick()

    def _warp_lacks(self, named: Array, arrived: Array) -> Array:
        """Per lane: has a living lane that it names not arrived with the same mask?"""
        members = self.members.reshape(-1, 32)
        present = arrived.reshape(-1, 1, 32) & (members[:, None, :] == members[:, :, None])
        absent = self.batch.alive.reshape(-1, 1, 32) & ~present
        return np.asarray((named.reshape(-1, 32, 32) & absent).any(axis=2).reshape(-1))

    def _free_warps(self, leaving: Array, arrived: Array) -> None:
        """Let the lanes ``leaving``, of those that have ``arrived``, go on after bar.warp.sync."""
        self.scheduler.release(WARP_BARRIER, leaving)
        self.clocks.warp_sync(leaving, self.members)
        self._keep(WARP_BARRIER, arrived & ~leaving)


@dataclass(slots=True, eq=False)
class Meeting:
    """Lanes that wait for others at an instruction. ``members``: a mask of the lanes of its warp for which each waits,
    or None if they wait for all of their warpgroup."""

    lanes: Array
    members: Scalar | None

    def describe(self, row: int) -> str:  # noqa: ARG002
        """What the lanes wait for, in words."""
        return "an instruction that their " + ("warpgroup" if self.members is None else "warp") + " executes together"

    def add(self, lanes: Array, members: Scalar | None) -> None:
        """More lanes arrive, which wait for the lanes in ``members``."""
        if self.members is not None and members is not None:
            same = isinstance(members, int) and isinstance(self.members, int) and members == self.members
            self.members = members if same else np.where(lanes, members, self.members).astype(np.uint32)
        self.lanes = self.lanes | lanes


class Meetings:
    """Instructions that some lanes, a warp or a warpgroup execute together, such as shuffles and wgmma. Lanes that come
    to one wait there for the others. Meeting orders no memory accesses.

    Invariant: ``by_site`` has the lanes that have come to an instruction and not left it, and all of them sleep. A lane
    leaves as soon as all living lanes for which it waits are there.
    """

    def __init__(self, batch: BatchState, scheduler: Scheduler) -> None:
        self.batch, self.scheduler = batch, scheduler
        self.by_site: dict[int, Meeting] = {}
        scheduler.on_exit.append(self._after_exit)

    def converge(self, members: Scalar | None, m: Mask, resume: int, site: int) -> Step:
        """The lanes wait for those in the mask ``members`` (None: the rest of their warpgroup), then all go on at block
        ``resume``."""
        if self.scheduler.alone:
            return resume, m, False
        mask = self.batch.running(m)
        meeting = self.by_site.get(site)
        if meeting is None:
            meeting = Meeting(mask, members)
            if not (mask & self._lacks(meeting, self.batch.alive & ~mask)).any():
                return self.scheduler.go(resume, m)
            self.by_site[site] = meeting
        else:
            meeting.add(mask, members)
        self.scheduler.sleep(meeting, mask, resume, site)
        self._settle(site)
        return self.scheduler.pick()

    def _after_exit(self, exited: Array) -> None:
        """Lanes have exited and are no longer waited for, which may complete meetings."""
        for site, meeting in list(self.by_site.items()):
            if meeting.members is not None:
                deserted = meeting.lanes & self._lacks(meeting, exited)
                if deserted.any():
                    text = "the member mask names lanes that exit without executing the instruction"
                    self.batch.report_lanes("warp-divergence", text, site, np.flatnonzero(deserted))
            self._settle(site)

    def _settle(self, site: int) -> None:
        """Release the lanes that no longer wait for anyone."""
        meeting = self.by_site[site]
        leaving = meeting.lanes & ~self._lacks(meeting, self.batch.alive & ~meeting.lanes)
        if leaving.any():
            meeting.lanes = meeting.lanes & ~leaving
            self.scheduler.release(meeting, leaving)
        if not meeting.lanes.any():
            del self.by_site[site]

    def _lacks(self, meeting: Meeting, absent: Array) -> Array:
        """Per lane: is one of the lanes for which it waits ``absent``?"""
        batch, members = self.batch, meeting.members
        absent = absent.reshape(-1, 32)
        if members is None:
            # Four warps are a warpgroup; the last warpgroup of a CTA may have fewer. Shapes: ``missing`` has (CTAs,
            # warps, padded to complete warpgroups), ``lacking`` (CTAs, warpgroups).
            warps, warpgroups = batch.warps_per_cta, -(-batch.warps_per_cta // 4)
            missing = np.zeros((batch.count, warpgroups * 4), bool)
            missing[:, :warps] = absent.any(axis=1).reshape(batch.count, warps)
            lacking = missing.reshape(batch.count, warpgroups, 4).any(axis=2)
            return np.repeat(np.repeat(lacking, 4, axis=1)[:, :warps].reshape(-1), 32)
        if isinstance(members, int):
            return np.repeat((absent & bits_of(np.array(members, np.uint32))).any(axis=1), 32)
        # Shape (warps, 32 lanes, 32 named lanes).
        named = bits_of(members.reshape(-1, 32))
        return np.asarray((named & absent[:, None, :]).any(axis=2).reshape(-1))
