"""Schedules a batch: decides which lanes execute which basic block next.

Lanes of a batch run in lockstep as long as their branches agree. After they diverge, groups of lanes wait at different
blocks, sleep at barriers, or poll memory, and one group runs at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
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
    """Lanes left lockstep where the translation relied on it, so the launch must be run with a conservative
    translation."""


class Waits(Exception):
    """Lanes repeat a loop until others act, but the translation did not recognise it as a wait. The launch must be run
    with a translation that does. ``line``: the PTX line of the loop's head."""

    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line


class Runaway(Exception):
    """A launch was given up: a loop never ends, or a batch takes more than ``Options.loop_limit`` backward branches."""


class LaneWait(Protocol):
    """An object, other than a numbered barrier, for which lanes wait."""

    def describe(self, row: int) -> str:
        """In words, what lanes of a row wait for."""
        ...


# A numbered barrier (bar.sync; WARP_BARRIER for bar.warp.sync), or an object that releases its lanes itself.
Barrier = int | LaneWait
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

    - ``runnable``: block -> lanes that can run there;
    - ``waiting``: lanes that sleep at barriers until ``release``;
    - ``deferred``: block -> lanes that poll memory in a loop; they run again after all others.

    Invariants: these and the running group are disjoint, and together they contain all living lanes. After a divergent
    branch, the group whose block comes first in the order of blocks runs. So groups join again where the translation
    expects it (``Graph``).
    """

    def __init__(self, batch: BatchState) -> None:
        self.batch, self.launch = batch, batch.launch
        self.kernel = batch.launch.kernel
        self.runnable: dict[int, Array] = {}
        self.waiting: list[Sleeper] = []
        self.deferred: dict[int, Array] = {}
        # Are all lanes of the batch alive? Then None can stand for the mask of all living lanes.
        self.complete = batch.width == batch.threads
        self.has_clobbers = any(self.kernel.clobbers)
        self.backward_branches = 0
        self.recurrence = Recurrence()
        # The launch's version when the polling lanes last tried.
        self.version = -1
        # Choices of a next group, plus backward branches: a measure of how much the CTAs diverge.
        self.steps = 0
        # Called with the lanes that have exited.
        self.on_exit: list[Callable[[Array], None]] = []
        # Called when nothing can run: each wakes sleepers whose time limit is over, and returns whether there were any.
        self.alarms: list[Callable[[], bool]] = []

    @property
    def alone(self) -> bool:
        """Are all living lanes in the running group?"""
        return not (self.runnable or self.waiting or self.deferred)

    # --- from block to block ---

    def start(self) -> Step:
        """The first step: all living lanes at the kernel's entry."""
        return (0, None, False) if self.complete else (0, self.batch.alive.copy(), False)

    def go(self, block: int, m: Mask) -> Step:
        """The running group goes to ``block``; others may catch up first."""
        if self.runnable:
            return self.next(block, m)
        return block, m, bool(self.waiting or self.deferred)

    def next(self, block: int, m: Mask) -> Step:
        """The running group goes to ``block`` while others are pending. The first block in order runs."""
        self.park(block, m)
        return self.pick()

    def park(self, block: int, m: Mask) -> None:
        """Note that these lanes can run at ``block``."""
        _add(self.runnable, block, self.batch.alive.copy() if m is None else m)

    def pick(self) -> Step:
        """The next group to run."""
        self.steps += 1
        if not self.runnable:
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
        """Raise Overtaken if a block writes a uniform register that a group elsewhere still reads. The register holds
        one value for all lanes, so that group would read the wrong value."""
        written = self.kernel.clobbers[block]
        if written:
            places = [*self.runnable, *(sleeper.block for sleeper in self.waiting), *self.deferred]
            if any(written & self.kernel.live_in[place] for place in places):
                raise Overtaken

    def _first_block(self) -> tuple[int, Array]:
        """The first block in order at which lanes can run, and these lanes."""
        block = min(self.runnable)
        return block, self.runnable.pop(block)

    def _last_warpgroup(self) -> tuple[int, Array]:
        """For the adverse order: the first block at which the last warpgroup that can run has lanes, and these lanes.
        Other warpgroups' lanes remain there."""
        row, thread = divmod(max(int(np.flatnonzero(mask)[-1]) for mask in self.runnable.values()), self.batch.width)
        start = row * self.batch.width
        lanes = slice(start + thread // 128 * 128, start + min(thread // 128 * 128 + 128, self.batch.width))
        block = min(block for block, mask in self.runnable.items() if mask[lanes].any())
        rest = self.runnable.pop(block).copy()
        chosen = np.zeros(self.batch.size, bool)
        chosen[lanes] = rest[lanes]
        rest[lanes] = False
        if rest.any():
            self.runnable[block] = rest
        return block, chosen

    def branch(self, condition: Array, yes: int, no: int, m: Mask) -> Step:
        """A divergent branch: lanes with ``condition`` go to ``yes``, others to ``no``."""
        taken = condition if m is None else condition & m
        others = ~condition if m is None else m & ~condition
        if not taken.any():
            return self.go(no, m)
        if not others.any():
            return self.go(yes, m)
        # Both sides can run. ``pick`` takes the block that comes first.
        self.park(yes, taken)
        self.park(no, others)
        return self.pick()

    def switch(self, index: Array, targets: tuple[int, ...], m: Mask) -> Step:
        """brx.idx: each lane goes to the block in ``targets`` that its ``index`` selects. PTX leaves open what a larger
        index does; here it selects the last block."""
        for i in np.unique(index if m is None else index[m]):
            chosen = index == i
            self.park(targets[min(int(i), len(targets) - 1)], chosen if m is None else chosen & m)
        return self.pick()

    def exit(self, m: Mask) -> Step:
        """The running lanes exit."""
        batch = self.batch
        # Batches recognise masks by identity, so masks never change in place, and ``alive`` becomes a new array.
        exiting = batch.alive if m is None else m
        batch.alive = batch.alive & ~exiting
        self.complete = False
        for callback in self.on_exit:
            callback(exiting)
        return self.pick()

    # --- loops ---

    def backward(self, site: int, head: int, m: Mask) -> None:
        """Count a backward branch by instruction ``site`` to block ``head``. Raises Runaway for an endless loop, and
        Waits for a loop whose state repeats while others can act, since it may wait for them."""
        self.backward_branches += 1
        self.steps += 1
        iterations, limit = self.backward_branches, self.launch.options.loop_limit
        if self.recurrence.is_due(iterations) and head not in self.kernel.polling_variables:
            # Frame 1 is the kernel's generator, which called this method: its local variables are the registers.
            period = self.recurrence.period(iterations, self._state(sys._getframe(1), head))
            self.launch.repeating = self.recurrence.earlier is not None
            if period and self._others_can_act():
                raise Waits(self.kernel.block_lines[head])
            if period:
                again = "every backward branch" if period == 1 else f"every {period} backward branches"
                self._give_up(site, m, f"never ends: {again} all registers and all memory are as before")
            if self.launch.options.looping and iterations == self.recurrence.first:
                self.launch.options.looping(self.kernel.sites[site], iterations)
        if limit is not None and iterations > limit:
            self._give_up(site, m, f"more than {limit} backward branches")

    def _others_can_act(self) -> bool:
        """Can anything but the running group change memory: other groups, a time limit, or other CTAs?"""
        limited = self.waiting and self.alarms
        return bool(
            self.runnable or self.deferred or limited or self.launch.active > self.batch.count or self.launch.queue
        )

    def _give_up(self, site: int, m: Mask, text: str) -> None:
        """Report an endless loop of the lanes of ``m``, and raise Runaway."""
        batch = self.batch
        lanes = np.flatnonzero(batch.running(m))
        row = int(batch.row_of[lanes[0]])
        batch.report("runaway", text, site, row, batch.thread[lanes[batch.row_of[lanes] == row]])
        raise Runaway

    def _state(self, kernel: FrameType, head: int) -> State:
        """Everything that decides what the batch does next. ``kernel``: the frame of the kernel's function."""
        launch = self.launch
        # The tick only decides which values racing reads get in a trial.
        tick = launch.tick if launch.trial is not None else 0
        counts = head, launch.version, tick, launch.printed_characters
        return state_of(kernel.f_locals | self._groups(), counts)

    def _groups(self) -> dict[str, Array]:
        """The masks of all groups of lanes, by name."""
        groups = {f"runnable {block}": mask for block, mask in self.runnable.items()}
        groups |= {f"deferred {block}": mask for block, mask in self.deferred.items()}
        groups |= {f"waiting {i}": sleeper.mask for i, sleeper in enumerate(self.waiting)}
        return groups | {"alive": self.batch.alive}

    def polling_state(self, variables: Mapping[str, object]) -> State:
        """The state that decides whether a batch whose lanes all poll or sleep ever goes on by itself. ``variables``:
        the local variables of the kernel's function."""
        deciding = frozenset().union(*(self.kernel.polling_variables.get(head, ()) for head in self.deferred))
        values = {name: value for name, value in variables.items() if name in deciding}
        return state_of(values | self._groups(), ())

    def spin(self, head: int, m: Mask) -> Step:
        """The running group is back at the head of a loop that polls memory: all other groups run first."""
        group = self.batch.alive.copy() if m is None else m
        _add(self.deferred, head, group)
        self.batch.count_iteration(head, group)
        return self.pick() if self.runnable else (BLOCKED, None, True)

    def spin_branch(self, condition: Array, yes: int, no: int, head: int, m: Mask) -> Step:
        """A conditional branch with one target at the head of a polling loop."""
        taken = condition if m is None else condition & m
        others = ~condition if m is None else m & ~condition
        for target, group in ((yes, taken), (no, others)):
            if group.any():
                _add(self.deferred if target == head else self.runnable, target, group)
                if target == head:
                    self.batch.count_iteration(head, group)
        return self.pick() if self.runnable else (BLOCKED, None, True)

    def resume(self) -> Step:
        """Resume a batch that has yielded: its polling lanes try again. If nothing has changed since it last tried, the
        time limits of sleepers are over, too."""
        if self.waiting and self.launch.version == self.version:
            for alarm in self.alarms:
                alarm()
        self.version = self.launch.version
        for head, mask in self.deferred.items():
            _add(self.runnable, head, mask)
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

    def release(self, barrier: Barrier, woken: Array) -> None:
        """Wake the lanes of ``woken`` that sleep at a barrier."""
        still_asleep = []
        for sleeper in self.waiting:
            if sleeper.barrier == barrier and (sleeper.mask & woken).any():
                self.park(sleeper.block, sleeper.mask & woken)
                sleeper.mask = sleeper.mask & ~woken
                if not sleeper.mask.any():
                    continue
            still_asleep.append(sleeper)
        self.waiting = still_asleep

    def _idle(self) -> Step:
        """The next step if no group can run. If lanes poll, the batch yields to other CTAs. Otherwise a time limit may
        wake sleepers. Otherwise the kernel has ended or is in a deadlock."""
        if self.deferred:
            return BLOCKED, None, True
        if self.waiting:
            if any(alarm() for alarm in self.alarms):
                return self.pick()
            self.report_stuck()
        return DONE, None, False

    # --- the end ---

    def report_stuck(self) -> None:
        """Report that no lane can run any more, and where each group waits. CTAs whose lanes wait at the same places
        are reported once."""
        groups = [(sleeper.mask, sleeper.site) for sleeper in self.waiting]
        # A polling loop gets a negative number as its place, since sites are numbered from 0 on.
        groups += [(mask, -1 - head) for head, mask in self.deferred.items()]
        by_row = [np.asarray(mask.reshape(self.batch.count, self.batch.width).any(axis=1)) for mask, _ in groups]
        rows_at: dict[frozenset[int], list[int]] = {}
        for row in range(self.batch.count):
            places = frozenset(place for (_, place), rows in zip(groups, by_row, strict=True) if rows[row])
            if places:
                rows_at.setdefault(places, []).append(row)
        for same_places in rows_at.values():
            self._report_stuck_row(same_places[0], len(same_places))

    @property
    def polls_global(self) -> bool:
        """Are lanes in a loop that polls global memory?"""
        return any(
            head in self.deferred and ".shared" not in self.kernel.sites[site].text
            for site, head in self.kernel.polling_heads.items()
        )

    def _report_stuck_row(self, row: int, count: int) -> None:
        """Report where the threads of a CTA wait for ever. ``count``: how many CTAs wait like this one."""
        batch, kernel = self.batch, self.kernel
        lanes = slice(row * batch.width, (row + 1) * batch.width)
        clauses, threads, polls = [], [], []
        sleepers = [sleeper for sleeper in self.waiting if sleeper.mask[lanes].any()]
        for sleeper in sleepers:
            waiting = np.flatnonzero(sleeper.mask[lanes])
            threads += waiting.tolist()
            site = kernel.sites[sleeper.site]
            where = site.place + (f" [{site.source}]" if site.source else "")
            name = _barrier_name(sleeper.barrier, row)
            clauses.append(f"{len(waiting)} threads ({ranges(waiting)}) wait at {name}, {where}")
        exited = np.flatnonzero(~batch.alive[lanes])
        exited = exited[exited < batch.threads]
        if exited.size:
            clauses.append(f"{len(exited)} threads ({ranges(exited)}) have exited")
        for head, mask in self.deferred.items():
            waiting = np.flatnonzero(mask[lanes])
            if waiting.size:
                polls.append((head, waiting))
                loop = kernel.place(kernel.block_lines[head])
                clauses.append(f"{len(waiting)} threads ({ranges(waiting)}) poll in the loop at {loop}")
        if polls and (not sleepers or polls[0][0] in kernel.learned):
            self._report_polls(row, count, *polls[0])
            return
        numbered = all(isinstance(sleeper.barrier, int) for sleeper in sleepers)
        kind = "barrier-divergence" if numbered else "deadlock"
        batch.report(kind, "; ".join(clauses), sleepers[0].site, row, threads, count=count)

    def _report_polls(self, row: int, count: int, head: int, threads: Array) -> None:
        """Report a CTA whose threads repeat a loop for ever. ``count``: how many CTAs do so."""
        line = self.kernel.block_lines[head]
        head_site = next((i for i, site in enumerate(self.kernel.sites) if site.line >= line), None)
        if head in self.kernel.learned:
            text = "never ends: after every iteration all registers and all memory are as before"
            self.batch.report("runaway", text, head_site, row, threads, count=count)
        else:
            loop = f"the loop at {self.kernel.place(line)}"
            missing = (
                "a value that is no longer there if they look late" if self.launch.newest else "a value nobody writes"
            )
            text = f"all CTAs are blocked; these threads poll in {loop} for {missing}"
            self.batch.report("deadlock", text, head_site, row, threads, count=count)


def _add(groups: dict[int, Array], block: int, mask: Array) -> None:
    """Add lanes to those at a block."""
    old = groups.get(block)
    groups[block] = mask if old is None else old | mask


def _barrier_name(barrier: Barrier, row: int) -> str:
    """What the lanes of a row wait for at a barrier, in words."""
    if isinstance(barrier, int):
        return "bar.warp.sync" if barrier == WARP_BARRIER else f"barrier {barrier}"
    return barrier.describe(row)


def ranges(numbers: Array) -> str:
    """Numbers as text: 1, 2, 3, 7 becomes ``1-3, 7``. Only the first six parts are written."""
    out = []
    values = sorted(int(n) for n in numbers)
    start = previous = values[0]
    for n in [*values[1:], -1]:
        if n != previous + 1:
            out.append(str(start) if start == previous else f"{start}-{previous}")
            start = n
        previous = n
    return ", ".join(out[:6]) + (", ..." if len(out) > 6 else "")
