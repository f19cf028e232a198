"""The scheduler of a batch: which lanes execute which basic block next.

Lanes of a batch run in lockstep as long as their branches agree. Where they diverge, groups of lanes wait at different
blocks, sleep at barriers, or poll memory; one group runs at a time.
"""

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

# A step of the scheduler: the next block (or DONE, BLOCKED), its lanes (None: all), and whether other lanes are
# elsewhere.
Step = tuple[int, Mask, bool]
DONE, BLOCKED = -1, -2


class Overtaken(Exception):
    """Lanes left lockstep where the translation relied on it: the launch must be run with the conservative one."""


class Runaway(Exception):
    """A launch was given up: a loop never ends, or a batch takes more than ``Options.loop_limit`` backward branches."""


class Gathering(Protocol):
    """Something other than a numbered barrier that lanes wait for."""

    def describe(self, row: int) -> str:
        """What lanes of a row wait for, in words."""
        ...


# A numbered barrier (bar.sync; WARP_BARRIER for bar.warp.sync), or an object that releases its lanes itself.
Barrier = int | Gathering
WARP_BARRIER = -1


@dataclass(slots=True, eq=False)
class Sleeper:
    """Lanes that sleep at a barrier and will go on at ``block``. ``token`` is for the barrier's own use."""

    barrier: Barrier
    mask: Array
    block: int
    site: int
    token: int = 0


class Scheduler:
    """The groups of lanes of a batch. Besides the running group there are

    - ``pend``: block -> lanes that can run there;
    - ``waiting``: lanes that sleep at barriers until ``release``;
    - ``deferred``: block -> lanes that poll memory in a loop; they run again after all others.

    Invariants: the running group and these are disjoint, and together they hold all living lanes. After a divergent
    branch the group whose block comes first in order runs, so that groups meet again where the translation expects it
    (``Graph``).
    """

    def __init__(self, batch: BatchState) -> None:
        self.batch, self.launch = batch, batch.launch
        self.kernel = batch.launch.kernel
        self.pend: dict[int, Array] = {}
        self.waiting: list[Sleeper] = []
        self.deferred: dict[int, Array] = {}
        # Are all lanes of the batch alive? Then a mask of all lanes can be None.
        self.complete = batch.width == batch.threads
        self.has_clobbers = any(self.kernel.clobbers)
        self.backward_branches = 0
        self.recurrence = Recurrence()
        # Choices of a next group and backward branches: a measure of how far the CTAs run apart.
        self.steps = 0
        # Called with the lanes that have exited.
        self.on_exit: list[Callable[[Array], None]] = []
        # Called when nothing can run: each wakes sleepers whose time limit is over, and returns whether there were any.
        self.alarms: list[Callable[[], bool]] = []

    @property
    def alone(self) -> bool:
        """Is no lane outside of the running group?"""
        return not (self.pend or self.waiting or self.deferred)

    # --- from block to block ---

    def start(self) -> Step:
        """All living lanes are at the entry."""
        return (0, None, False) if self.complete else (0, self.batch.alive.copy(), False)

    def go(self, block: int, m: Mask) -> Step:
        """The running group goes to ``block``; others may catch up first."""
        if self.pend:
            return self.next(block, m)
        return block, m, bool(self.waiting or self.deferred)

    def next(self, block: int, m: Mask) -> Step:
        """The running group goes to ``block`` while others are pending: of all, the first block in order runs."""
        self.park(block, m)
        return self.pick()

    def park(self, block: int, m: Mask) -> None:
        """Note that these lanes can run at ``block``."""
        _add(self.pend, block, self.batch.alive.copy() if m is None else m)

    def pick(self) -> Step:
        """The next group to run."""
        self.steps += 1
        if not self.pend:
            return self._idle()
        # The order of blocks decides where groups meet again; see ``Graph``.
        block, mask = self._last_warpgroup() if self.launch.options.adverse else self._first_block()
        others = not self.alone
        if others and self.has_clobbers:
            self._check_clobbers(block)
        if not others and self.complete:
            return block, None, False
        return block, mask, others

    def _check_clobbers(self, block: int) -> None:
        """Uniform registers hold one value for all lanes, so a block may write one only if no group elsewhere reads it.
        Raises Overtaken."""
        written = self.kernel.clobbers[block]
        if written:
            places = [*self.pend, *(sleeper.block for sleeper in self.waiting), *self.deferred]
            if any(written & self.kernel.live_in[place] for place in places):
                raise Overtaken

    def _first_block(self) -> tuple[int, Array]:
        block = min(self.pend)
        return block, self.pend.pop(block)

    def _last_warpgroup(self) -> tuple[int, Array]:
        """The adverse order: the last warpgroup that can run, at the first block where it has lanes. The others stay
        where they are."""
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
        # Both sides can run; whichever comes first in the order of blocks does.
        self.park(yes, t)
        self.park(no, f)
        return self.pick()

    def switch(self, index: Array, targets: tuple[int, ...], m: Mask) -> Step:
        """brx.idx: a branch to one of several blocks per lane."""
        for i in np.unique(index if m is None else index[m]):
            hit = index == i
            self.park(targets[min(int(i), len(targets) - 1)], hit if m is None else hit & m)
        return self.pick()

    def exit(self, m: Mask) -> Step:
        """The running lanes have exited."""
        batch = self.batch
        # Masks never change in place, because batches keep the last one by identity: so ``alive`` is a new array.
        exiting = batch.alive if m is None else m
        batch.alive = batch.alive & ~exiting
        self.complete = False
        for callback in self.on_exit:
            callback(exiting)
        return self.pick()

    # --- loops ---

    def backward(self, site: int, block: int, m: Mask) -> None:
        """The kernel takes a backward branch by instruction ``site`` in ``block``. Endless loops are given up: raises
        Runaway."""
        self.backward_branches += 1
        self.steps += 1
        turns, limit = self.backward_branches, self.launch.options.loop_limit
        if self.recurrence.looks_at(turns):
            # Frame 1 is the kernel's generator, which called this method: its local variables are the registers.
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
        """Everything that decides the batch's future. ``kernel``: the frame of the kernel's function."""
        batch, launch = self.batch, self.launch
        groups = {f"pend {block}": mask for block, mask in self.pend.items()}
        groups |= {f"deferred {block}": mask for block, mask in self.deferred.items()}
        counts = block, launch.version, launch.tick, launch.printed_characters, len(self.waiting)
        return state_of(kernel.f_locals | groups | {"alive": batch.alive}, counts)

    def spin(self, head: int, m: Mask) -> Step:
        """The running group is back at the head of a loop that polls memory: all other groups run first."""
        group = self.batch.alive.copy() if m is None else m
        _add(self.deferred, head, group)
        self.batch.turn(head, group)
        return self.pick() if self.pend else (BLOCKED, None, True)

    def spin_branch(self, condition: Array, yes: int, no: int, head: int, m: Mask) -> Step:
        """A conditional branch of which one way leads back to the head of a polling loop."""
        t = condition if m is None else condition & m
        f = ~condition if m is None else m & ~condition
        for target, group in ((yes, t), (no, f)):
            if group.any():
                _add(self.deferred if target == head else self.pend, target, group)
                if target == head:
                    self.batch.turn(head, group)
        return self.pick() if self.pend else (BLOCKED, None, True)

    def resume(self) -> Step:
        """Other CTAs have run since the batch yielded: the pollers try again."""
        self.pend.update(self.deferred)
        self.deferred = {}
        return self.pick()

    # --- sleep ---

    def sleep(self, barrier: Barrier, mask: Array, block: int, site: int, token: int = 0) -> None:
        """Lanes sleep until the barrier releases them, then go on at ``block``."""
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
        """No group can run. Pollers yield to other CTAs; else a time limit may wake sleepers; else the kernel has ended
        or is in a deadlock."""
        if self.deferred:
            return BLOCKED, None, True
        if self.waiting:
            if any(alarm() for alarm in self.alarms):
                return self.pick()
            self.report_stuck()
        return DONE, None, False

    # --- the end ---

    def report_stuck(self) -> None:
        """Report that nothing can run any more, and where every group waits. At most four CTAs are reported."""
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
            loop = f"the loop at {self.kernel.place(line)}"
            text = f"all CTAs are blocked; these threads poll in {loop} for a value nobody writes"
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
                where = site.place + (f" [{site.source}]" if site.source else "")
                name = _barrier_name(sleeper.barrier, row)
                clauses.append(f"{len(waiting)} threads ({ranges(waiting)}) wait at {name}, {where}")
        exited = ~batch.alive & (batch.thread < batch.threads) & (batch.row_of == row)
        if exited.any():
            clauses.append(f"{int(exited.sum())} threads ({ranges(batch.thread[exited])}) have exited")
        for head, mask in self.deferred.items():
            waiting = batch.thread[mask & (batch.row_of == row)]
            if len(waiting):
                line = self.kernel.block_lines[head]
                clauses.append(
                    f"{len(waiting)} threads ({ranges(waiting)}) poll in the loop at {self.kernel.place(line)}"
                )
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
    """Numbers as text: 1, 2, 3, 7 becomes ``1-3, 7``."""
    out = []
    values = sorted(int(n) for n in numbers)
    start = previous = values[0]
    for n in [*values[1:], -1]:
        if n != previous + 1:
            out.append(str(start) if start == previous else f"{start}-{previous}")
            start = n
        previous = n
    return ", ".join(out[:6]) + (", ..." if len(out) > 6 else "")
