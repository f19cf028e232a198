"""The scheduler of a batch: groups of lanes that can run at blocks, sleep at barriers, or poll memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

import numpy as np

from kernelproof.emulator.machine.recurrence import Recurrence, State, state_of
from kernelproof.emulator.state.arrays import Array, Mask
from kernelproof.emulator.state.batch_state import BatchState

# A step of the scheduler: next block (or DONE, BLOCKED), mask (None: all lanes), and whether other lanes are elsewhere.
Step = tuple[int, Mask, bool]
DONE, BLOCKED = -1, -2


class Overtaken(Exception):
    """Lanes left lockstep where the translation relied on it: run again with the conservative translation."""


class Runaway(Exception):
    """A launch was given up: a loop never ends, or a batch exceeds ``Options.loop_limit`` backward branches."""


class Gathering(Protocol):
    """Something that lanes wait for, other than a numbered barrier."""

    def describe(self, row: int) -> str:
        """What is waited for, seen from a row, in words."""
        ...


# A numbered barrier (bar.sync; WARP_BARRIER for bar.warp.sync), or what releases its lanes itself.
Barrier = int | Gathering
WARP_BARRIER = -1


@dataclass(slots=True, eq=False)
class Sleeper:
    """Lanes asleep at a barrier, to go on at ``block``. ``token`` is the barrier's own."""

    barrier: Barrier
    mask: Array
    block: int
    site: int
    token: int = 0


class Scheduler:
    """The groups of a batch: the running one, and

    - ``pend``: block -> lanes that can run there;
    - ``waiting``: lanes asleep at barriers, until ``release``;
    - ``deferred``: block -> lanes that poll memory in a loop, and run again after all others.

    Invariants: the running group and these are disjoint and together hold all living lanes; after a divergent branch
    the group whose block comes first in order runs, so that groups meet where the translation expects (``Graph``).
    """

    def __init__(self, batch: BatchState) -> None:
        self.batch, self.launch = batch, batch.launch
        self.kernel = batch.launch.kernel
        self.pend: dict[int, Array] = {}
        self.waiting: list[Sleeper] = []
        self.deferred: dict[int, Array] = {}
        # All lanes of the batch are alive, so a mask of all can be None.
        self.complete = batch.width == batch.threads
        self.has_clobbers = any(self.kernel.clobbers)
        self.backward_branches = 0
        self.recurrence = Recurrence()
        # Choices of the next group, and backward branches: a measure of how far CTAs run together.
        self.steps = 0
        # Called with the lanes that exit.
        self.on_exit: list[Callable[[Array], None]] = []
        # Called when nothing can run: wakes sleepers whose time limit is over, and returns whether there were any.
        self.alarms: list[Callable[[], bool]] = []

    @property
    def alone(self) -> bool:
        """Is the running group all that is left?"""
        return not (self.pend or self.waiting or self.deferred)

    # --- from block to block ---

    def start(self) -> Step:
        """All living lanes at the entry."""
        return (0, None, False) if self.complete else (0, self.batch.alive.copy(), False)

    def go(self, block: int, m: Mask) -> Step:
        """The running group goes to ``block``, or lets others catch up first."""
        if self.pend:
            return self.next(block, m)
        return block, m, bool(self.waiting or self.deferred)

    def next(self, block: int, m: Mask) -> Step:
        """The running group goes to ``block`` while others are pending: the first block in order runs."""
        self.park(block, m)
        return self.pick()

    def park(self, block: int, m: Mask) -> None:
        """These lanes can run at ``block``."""
        _add(self.pend, block, self.batch.alive.copy() if m is None else m)

    def pick(self) -> Step:
        """The next group to run."""
        self.steps += 1
        if not self.pend:
            return self._idle()
        block, mask = self._last_warpgroup() if self.launch.options.adverse else self._first_block()
        others = not self.alone
        if others and self.has_clobbers:
            self._check_clobbers(block)
        if not others and self.complete:
            return block, None, False
        return block, mask, others

    def _check_clobbers(self, block: int) -> None:
        """A uniform register has one value for all lanes: a block may write it only if no group elsewhere reads it."""
        written = self.kernel.clobbers[block]
        if written:
            places = [*self.pend, *(sleeper.block for sleeper in self.waiting), *self.deferred]
            if any(written & self.kernel.live_in[place] for place in places):
                raise Overtaken

    def _first_block(self) -> tuple[int, Array]:
        block = min(self.pend)
        return block, self.pend.pop(block)

    def _last_warpgroup(self) -> tuple[int, Array]:
        """The last warpgroup that can run, at the first block where it has lanes; the others stay where they are."""
        start = max(int(np.flatnonzero(mask)[-1]) for mask in self.pend.values()) // 128 * 128
        lanes = slice(start, start + 128)
        block = min(block for block, mask in self.pend.items() if mask[lanes].any())
        rest = self.pend.pop(block).copy()
        chosen = np.zeros(self.batch.size, bool)
        chosen[lanes] = rest[lanes]
        rest[lanes] = False
        if rest.any():
            self.pend[block] = rest
        return block, chosen

    def branch(self, condition: Array, yes: int, no: int, m: Mask) -> Step:
        """A divergent branch: lanes with ``condition`` go to ``yes``, others to ``no``."""
        t = condition if m is None else condition & m
        f = ~condition if m is None else m & ~condition
        if not t.any():
            return self.go(no, m)
        if not f.any():
            return self.go(yes, m)
        self.park(yes, t)
        self.park(no, f)
        return self.pick()

    def switch(self, index: Array, targets: tuple[int, ...], m: Mask) -> Step:
        """brx.idx."""
        for i in np.unique(index if m is None else index[m]):
            hit = index == i
            self.park(targets[min(int(i), len(targets) - 1)], hit if m is None else hit & m)
        return self.pick()

    def exit(self, m: Mask) -> Step:
        """The running lanes have finished."""
        batch = self.batch
        exiting = batch.alive if m is None else m
        batch.alive = batch.alive & ~exiting
        self.complete = False
        for callback in self.on_exit:
            callback(exiting)
        return self.pick()

    # --- loops ---

    def backward(self, site: int, block: int, m: Mask) -> None:
        """The kernel takes a backward branch, instruction ``site`` in ``block``: give up on endless loops. Raises
        Runaway."""
        self.backward_branches += 1
        self.steps += 1
        turns, limit = self.backward_branches, self.launch.options.loop_limit
        if self.recurrence.looks_at(turns):
            period = self.recurrence.period(turns, self._state(sys._getframe(1), block))
            if period:
                again = "every backward branch" if period == 1 else f"every {period} backward branches"
                self._give_up(site, m, f"never ends: {again} all registers and all memory are as before")
            if self.launch.options.looping and turns == self.recurrence.first:
                self.launch.options.looping(self.kernel.sites[site], turns)
        if limit is not None and turns > limit:
            self._give_up(site, m, f"more than {limit} backward branches")

    def _give_up(self, site: int, m: Mask, text: str) -> None:
        batch = self.batch
        lanes = np.flatnonzero(batch.running(m))
        row = int(batch.row_of[lanes[0]])
        batch.report("runaway", text, site, row, batch.thread[lanes[batch.row_of[lanes] == row]])
        raise Runaway

    def _state(self, kernel: FrameType, block: int) -> State:
        """Everything that decides the batch's future; registers are variables of the kernel."""
        batch, launch = self.batch, self.launch
        groups = {f"pend {block}": mask for block, mask in self.pend.items()}
        groups |= {f"deferred {block}": mask for block, mask in self.deferred.items()}
        counts = block, launch.version, launch.tick, launch.printed_characters, len(self.waiting)
        return state_of(kernel.f_locals | groups | {"alive": batch.alive}, counts)

    def spin(self, head: int, m: Mask) -> Step:
        """The running group is back at the head of a loop that polls memory: all other groups may run first."""
        _add(self.deferred, head, self.batch.alive.copy() if m is None else m)
        return self.pick() if self.pend else (BLOCKED, None, True)

    def spin_branch(self, condition: Array, yes: int, no: int, head: int, m: Mask) -> Step:
        """A conditional branch with one way back to the head of a polling loop."""
        t = condition if m is None else condition & m
        f = ~condition if m is None else m & ~condition
        for target, group in ((yes, t), (no, f)):
            if group.any():
                _add(self.deferred if target == head else self.pend, target, group)
        return self.pick() if self.pend else (BLOCKED, None, True)

    def resume(self) -> Step:
        """After a yield: the pollers try again."""
        self.pend.update(self.deferred)
        self.deferred = {}
        return self.pick()

    # --- sleep ---

    def sleep(self, barrier: Barrier, mask: Array, block: int, site: int, token: int = 0) -> None:
        """Lanes wait until the barrier releases them; they go on at ``block``."""
        self.waiting.append(Sleeper(barrier, mask, block, site, token))

    def asleep(self, barrier: Barrier) -> Array:
        """The lanes that sleep at a barrier."""
        out = np.zeros(self.batch.size, bool)
        for sleeper in self.waiting:
            if sleeper.barrier is barrier:
                out |= sleeper.mask
        return out

    def release(self, barrier: Barrier, free: Array) -> None:
        """Wake the lanes of ``free`` that sleep at a barrier."""
        left = []
        for sleeper in self.waiting:
            if sleeper.barrier == barrier and (sleeper.mask & free).any():
                self.park(sleeper.block, sleeper.mask & free)
                sleeper.mask = sleeper.mask & ~free
                if not sleeper.mask.any():
                    continue
            left.append(sleeper)
        self.waiting = left

    def _idle(self) -> Step:
        """No group can run: pollers yield to other CTAs, else sleepers may be woken by a time limit, else the kernel
        has ended or is in a deadlock."""
        if self.deferred:
            return BLOCKED, None, True
        if self.waiting:
            if any(alarm() for alarm in self.alarms):
                return self.pick()
            self.report_stuck()
        return DONE, None, False

    # --- the end ---

    def report_stuck(self) -> None:
        """Nothing can run any more: say where every group waits."""
        batch = self.batch
        places = [(sleeper, np.flatnonzero(sleeper.mask)) for sleeper in self.waiting]
        rows = sorted({int(row) for _, lanes in places for row in batch.row_of[lanes]})
        for row in rows[:4]:
            self._report_stuck_row(row, places)
        polls = [(head, np.flatnonzero(mask)) for head, mask in self.deferred.items()]
        if polls and not rows:
            head, lanes = polls[0]
            line = self.kernel.block_lines[head]
            near = next((i for i, site in enumerate(self.kernel.sites) if site.line >= line), None)
            text = f"all CTAs are blocked; these threads poll in the loop at PTX line {line} for a value nobody writes"
            row = int(batch.row_of[lanes[0]])
            batch.report("deadlock", text, near, row, batch.thread[lanes[batch.row_of[lanes] == row]])

    def _report_stuck_row(self, row: int, places: list[tuple[Sleeper, Array]]) -> None:
        batch = self.batch
        clauses, first, threads = [], None, []
        for sleeper, lanes in places:
            waiting = batch.thread[lanes[batch.row_of[lanes] == row]]
            if len(waiting):
                first = sleeper.site if first is None else first
                threads += [int(t) for t in waiting]
                site = self.kernel.sites[sleeper.site]
                where = f"PTX line {site.line}" + (f" [{site.source}]" if site.source else "")
                name = _barrier_name(sleeper.barrier, row)
                clauses.append(f"{len(waiting)} threads ({ranges(waiting)}) wait at {name}, {where}")
        exited = ~batch.alive & (batch.thread < batch.threads) & (batch.row_of == row)
        if exited.any():
            clauses.append(f"{int(exited.sum())} threads ({ranges(batch.thread[exited])}) have exited")
        for head, mask in self.deferred.items():
            waiting = batch.thread[mask & (batch.row_of == row)]
            if len(waiting):
                line = self.kernel.block_lines[head]
                clauses.append(f"{len(waiting)} threads ({ranges(waiting)}) poll in the loop at PTX line {line}")
        numbered = all(isinstance(sleeper.barrier, int) for sleeper in self.waiting)
        kind = "barrier-divergence" if numbered else "deadlock"
        batch.report(kind, "; ".join(clauses), first, row, threads)


def _add(groups: dict[int, Array], block: int, mask: Array) -> None:
    old = groups.get(block)
    groups[block] = mask if old is None else old | mask


def _barrier_name(barrier: Barrier, row: int) -> str:
    if isinstance(barrier, int):
        return "bar.warp.sync" if barrier == WARP_BARRIER else f"barrier {barrier}"
    return barrier.describe(row)


def ranges(numbers: Array) -> str:
    """1, 2, 3, 7 -> ``1-3, 7``."""
    out = []
    values = sorted(int(n) for n in numbers)
    start = previous = values[0]
    for n in [*values[1:], -1]:
        if n != previous + 1:
            out.append(str(start) if start == previous else f"{start}-{previous}")
            start = n
        previous = n
    return ", ".join(out[:6]) + (", ..." if len(out) > 6 else "")
